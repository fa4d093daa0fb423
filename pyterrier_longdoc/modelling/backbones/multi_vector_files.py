"""What late-interaction checkpoints store beside their encoder: how texts become vectors of tokens, and the projection.

Three formats are read as `MultiVectorEncoder` of sentence-transformers 6.2 reads them: its own (`modules.json`),
PyLate's, and that of Stanford's ColBERT (`artifact.metadata`, with one linear layer among the weights).
"""

from __future__ import annotations

import string
from collections.abc import Sequence
from typing import Any

from tokenizers import AddedToken

from ..token_vectors import TokenVectors
from .sentence_transformers_files import (
    RepresentationSteps,
    Step,
    dense_step,
    load_steps,
    longest_of,
    modules_of,
    read_json,
    read_weights,
    transformer_settings,
)

DIMENSIONS, EXPANSION = 128, 32
"""Width of a new projection, and tokens of an expanded query: ColBERT's (Khattab & Zaharia 2020, section 4)."""

_TOKENS = "token_embeddings"
"""The name of the tokens' vectors in the files of modules."""

_OF_PYLATE = {"query_prefix", "document_prefix", "do_query_expansion", "skiplist_words", "attend_to_expansion_tokens"}
"""Settings that only PyLate stores in `config_sentence_transformers.json`."""

_MODULES = ("Dense", "MultiVectorMask", "Normalize", "HierarchicalTokenPooling")

_NAMES = {
    "skiplist_words": "skipped",
    "skiplist_tasks": "skips_in",
    "pool_factor": "pooling",
    "num_protected_tokens": "protected",
    "normalize_embeddings": "pooling_normalizes",
}
"""From the settings of these modules to attributes of `TokenVectors`."""


def late_interaction_format(name: str) -> str | None:
    """Return which of the three formats a checkpoint has; None for one of another kind."""
    general = read_json(name, "config_sentence_transformers.json") or {}
    if not read_json(name, "modules.json"):
        is_stanford = "HF_ColBERT" in ((read_json(name, "config.json") or {}).get("architectures") or ())
        return "Stanford's" if is_stanford else None
    if general.get("model_type") == "ColBERT" or not _OF_PYLATE.isdisjoint(general):
        return "PyLate"
    return "sentence-transformers" if general.get("model_type") == "MultiVectorEncoder" else None


def load_token_vectors(name: str, tokenizer: Any, width: int) -> tuple[TokenVectors, RepresentationSteps]:
    """Return how a checkpoint makes vectors of tokens, and its projection; the tokenizer learns its marker tokens.

    A checkpoint of no such format gets a random projection from `width` to 128 features. ValueError for modules and
    settings that cannot be applied.
    """
    modules, general = modules_of(name), read_json(name, "config_sentence_transformers.json") or {}
    architectures = (read_json(name, "config.json") or {}).get("architectures") or [""]
    linear = {"kind": "dense", "inputs": width, "bias": False, "activation": "Identity", "residual": False}
    kind = late_interaction_format(name)
    is_pylate = kind == "PyLate"
    if architectures[0].endswith("ForRetrieval"):
        raise ValueError(f"checkpoint {name!r} is a {architectures[0]}, which retrieves images: MaxSim cannot read it")
    if modules and kind is not None:
        settings, layers = _read_modules(name, modules, general, tokenizer, is_pylate=is_pylate)
        projection = load_steps(name, layers, width)
    elif kind is None:
        return TokenVectors(trained=False), RepresentationSteps([{**linear, "outputs": DIMENSIONS}], width)
    else:
        is_pylate, general = True, _of_stanford(read_json(name, "artifact.metadata") or {})
        settings, _ = _read_modules(name, [("Transformer", "")], general, tokenizer, is_pylate=True)
        weight = read_weights(name, "model.safetensors")["linear.weight"]
        projection = RepresentationSteps([{**linear, "outputs": len(weight)}], width)
        projection.load_state_dict({"0.linear.weight": weight})
    if is_pylate:
        _register(tokenizer, (settings["query_prefix"], settings["document_prefix"]))
    settings["skipped"] = _ids(tokenizer, settings["skipped"] or ())
    filler = settings.pop("token", None) or tokenizer.mask_token or tokenizer.eos_token
    if settings.get("expand_to"):
        (settings["expand_with"],) = _ids(tokenizer, [filler]) or (tokenizer.unk_token_id,)
    return TokenVectors(**settings), projection


def _read_modules(
    name: str, modules: Sequence[tuple[str, str]], general: dict[str, Any], tokenizer: Any, *, is_pylate: bool
) -> tuple[dict[str, Any], list[tuple[Step, str]]]:
    kinds, config = [kind for kind, _ in modules], transformer_settings(name)
    if kinds[0] != "Transformer" or "message" in config.get("modality_config", {}) or config.get("processing_kwargs"):
        problem = f"begins with a {kinds[0]}, a chat template or processing_kwargs"
        raise ValueError(f"checkpoint {name!r} {problem}: MaxSim needs a Transformer without them")
    lengths = {**_pylate_lengths(general), **config} if is_pylate else config
    longest = longest_of(name, config, tokenizer)
    expansion = lengths.get("query_expansion") or {}
    is_fixed, attends = expansion.get("strategy") == "fixed", expansion.get("attend", False)
    settings: dict[str, Any] = {
        "normalize": is_pylate or "Normalize" in kinds,
        "skipped": general.get("skiplist_words"),
        "mean": general.get("similarity_fn_name") == "meanmaxsim",
        "query_length": expansion["length"] if is_fixed else lengths.get("query_length") or longest,
        "document_length": lengths.get("document_length") or longest,
        # Tokens that are not attended to count only where this module says so.
        "expand_to": expansion.get("length", 0) if is_pylate or "MultiVectorMask" in kinds or attends else 0,
        "attends": attends,
        "token": expansion.get("token"),
    }
    if is_pylate and settings["skipped"] is None:
        settings["skipped"] = string.punctuation
    for side in ("query", "document"):
        marker, prompt = general.get(f"{side}_prefix") or "", (general.get("prompts") or {}).get(side) or ""
        settings[f"{side}_prefix"] = marker + prompt.removeprefix(marker)
    layers: list[tuple[Step, str]] = []
    for place, (kind, path) in enumerate(modules[1:]):
        config = read_json(name, f"{path}/config.json") or {}
        fields = {config.get(f"module_{part}_name") or _TOKENS for part in ("input", "output")}
        in_order = (kind != "Dense" or len(layers) == place) and _MODULES[-1] not in kinds[1 : place + 1]
        is_simple = config.get("tasks", ["document"]) == ["document"] and not config.get("keep_only_token_ids")
        if kind not in _MODULES or not in_order or not is_simple or fields != {_TOKENS}:
            raise ValueError(
                f"checkpoint {name!r} has the modules {', '.join(kinds)}, and MaxSim cannot apply the {kind} in "
                f"{path!r} ({config}): it knows {', '.join(_MODULES)} over {_TOKENS!r}, in this order"
            )
        if kind == "Dense":
            layers.append((dense_step(name, path, {**config, "module_input_name": _TOKENS}, _TOKENS), path))
        settings |= {_NAMES[key]: value for key, value in config.items() if key in _NAMES and value is not None}
    return settings, layers


def _pylate_lengths(general: dict[str, Any]) -> dict[str, Any]:
    """Return PyLate's settings under the names that sentence-transformers gives them."""
    lengths = {key: general[key] for key in ("query_length", "document_length") if general.get(key) is not None}
    if "query_expansion" in general or general.get("do_query_expansion") is False:
        return {**lengths, "query_expansion": general.get("query_expansion")}
    attends = bool(general.get("attend_to_expansion_tokens", general.get("attend_to_mask_tokens")))
    fixed = {"strategy": "fixed", "attend": attends, "length": lengths.pop("query_length", EXPANSION)}
    return {**lengths, "query_expansion": fixed}


def _of_stanford(metadata: dict[str, Any]) -> dict[str, Any]:
    """Return an `artifact.metadata` as PyLate's settings; what it lacks are the defaults of ColBERT's code."""
    return {
        "query_prefix": (metadata.get("query_token_id") or "[unused0]") + " ",
        "document_prefix": (metadata.get("doc_token_id") or "[unused1]") + " ",
        "query_length": metadata.get("query_maxlen"),
        "document_length": metadata.get("doc_maxlen"),
        "attend_to_expansion_tokens": metadata.get("attend_to_mask_tokens"),
        "skiplist_words": None if metadata.get("mask_punctuation", True) else (),
    }


def _register(tokenizer: Any, prefixes: Sequence[str]) -> None:
    """Let the tokenizer read the marker tokens that it knows as one token each, as they were trained."""
    vocabulary = tokenizer.get_vocab()
    for prefix in prefixes:
        known = [token for token in (prefix, *prefix.split(None, 1)[:1]) if token in vocabulary]
        if known and tokenizer.tokenize(known[0]) != known[:1]:
            tokenizer.add_tokens([AddedToken(known[0], normalized=False, special=True)], special_tokens=True)


def _ids(tokenizer: Any, words: Sequence[str]) -> tuple[int, ...]:
    """Return the ids of words that are one token each; the others would stand for all unknown words."""
    ids = {word: tokenizer.convert_tokens_to_ids(word) for word in words}
    unknown = (None, tokenizer.unk_token_id)
    return tuple(sorted(i for word, i in ids.items() if i not in unknown or word == tokenizer.unk_token))
