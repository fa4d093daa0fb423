"""What late-interaction checkpoints store beside their encoder: how texts become vectors of tokens.

Three formats are read as `MultiVectorEncoder` of sentence-transformers 6.2 reads them: its own (`modules.json`), PyLate's
(the same with other settings), and that of Stanford's ColBERT (`artifact.metadata`, one linear layer among the weights).
"""

from __future__ import annotations

import string
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from tokenizers import AddedToken

from .sentence_transformers_files import RepresentationSteps, Step, dense_step, load_steps, read_json, read_weights

DIMENSIONS = 128
"""Width of a projection that must be trained: that of ColBERT (Khattab & Zaharia 2020, section 3.2)."""

DEFAULT_EXPANSION = 32
"""Tokens of an expanded query where a checkpoint names no number (ColBERT's `query_maxlen`)."""

_TOKENS = "token_embeddings"
"""The name of the tokens' vectors in the files of modules."""

_PYLATE = (
    "query_prefix", "document_prefix", "query_length", "document_length", "do_query_expansion", "skiplist_words",
    "attend_to_expansion_tokens",
)  # fmt: skip
"""Settings that only PyLate stores in `config_sentence_transformers.json`."""


@dataclass(frozen=True)
class TokenVectors:
    """How a checkpoint turns texts into vectors of tokens; JSON-able.

    Attributes:
        query_prefix: marker token or prompt put before every query.
        document_prefix: the same for documents.
        query_length: most tokens of a query, special ones included; None if only the backbone limits it.
        document_length: the same for a document, here for a window.
        expand_to: queries of fewer tokens are filled up to this number; 0 for no expansion.
        expand_with: the token that fills them; None for `[MASK]`, or the end token where there is none.
        attends: whether the encoder attends to these tokens.
        skipped: tokens that have no vector.
        skips_in: `"query"` and `"document"`: where these tokens are skipped.
        normalize: whether vectors have length 1.
        mean: whether the score is the mean over the query's tokens, not the sum.
        pooling: how many tokens of a document share a vector; 1 for no pooling.
        protected: tokens at the beginning that are not pooled.
        pooling_normalizes: whether pooled vectors get length 1 again.
        trained: whether the projection is the checkpoint's.
    """

    query_prefix: str = ""
    document_prefix: str = ""
    query_length: int | None = None
    document_length: int | None = None
    expand_to: int = 0
    expand_with: str | None = None
    attends: bool = False
    skipped: Sequence[str] = ()
    skips_in: Sequence[str] = ("document",)
    normalize: bool = True
    mean: bool = False
    pooling: float = 1.0
    protected: int = 1
    pooling_normalizes: bool = True
    trained: bool = True


@dataclass
class _Modules:
    """The modules after the transformer, as far as they were read."""

    name: str
    layers: list[tuple[Step, str]] = field(default_factory=list)
    settings: dict[str, Any] = field(default_factory=dict)

    def add(self, kind: str, path: str) -> None:
        """Read a module; ValueError, which names it, if it cannot be applied here."""
        config = read_json(self.name, f"{path}/config.json") or {}
        fields = {config.get("module_input_name") or _TOKENS, config.get("module_output_name") or _TOKENS}
        late = "pooling" in self.settings or (kind == "Dense" and "normalize" in self.settings)
        if kind not in ("Dense", "Normalize", "MultiVectorMask", "HierarchicalTokenPooling") or late:
            raise ValueError(
                f"checkpoint {self.name!r} has a {kind} module in {path!r}{' after others' * late}, which MaxSim cannot "
                f"apply: it knows Dense, MultiVectorMask, Normalize and HierarchicalTokenPooling, in this order"
            )
        if config.get("keep_only_token_ids") or fields != {_TOKENS}:
            raise ValueError(
                f"checkpoint {self.name!r} has a {kind} module in {path!r} that reads or writes {sorted(fields)} or "
                f"keeps certain tokens only: MaxSim needs {_TOKENS!r}, all tokens and a skip list"
            )
        if kind == "Dense":
            self.layers.append((dense_step(self.name, path, {**config, "module_input_name": _TOKENS}, _TOKENS), path))
        elif kind == "Normalize":
            self.settings["normalize"] = True
        elif kind == "MultiVectorMask":
            self.settings["skipped"] = tuple(config.get("skiplist_words") or ())
            self.settings["skips_in"] = tuple(config.get("skiplist_tasks") or ("document",))
        else:
            self._pool(config)

    def _pool(self, config: dict[str, Any]) -> None:
        self.settings |= {
            "pooling": config.get("pool_factor", 1.0),
            "protected": config.get("num_protected_tokens", 1),
            "pooling_normalizes": config.get("normalize_embeddings", False),
        }
        if config.get("tasks", ["document"]) != ["document"]:
            raise ValueError(f"checkpoint {self.name!r} pools the tokens of {config['tasks']}: only documents' can be")


def load_token_vectors(name: str, tokenizer: Any, width: int) -> tuple[TokenVectors, RepresentationSteps]:
    """Return how a checkpoint makes vectors of tokens, and its projection; the tokenizer learns its marker tokens.

    A checkpoint of no such format gets a random projection from `width` to 128, by torch's random state.
    """
    modules, general = read_json(name, "modules.json"), read_json(name, "config_sentence_transformers.json") or {}
    architectures = (read_json(name, "config.json") or {}).get("architectures") or [""]
    if architectures[0].endswith("ForRetrieval"):
        raise ValueError(f"checkpoint {name!r} is a {architectures[0]}, which retrieves images: MaxSim cannot read it")
    is_pylate = general.get("model_type") == "ColBERT" or any(key in general for key in _PYLATE)
    if modules and (is_pylate or general.get("model_type") == "MultiVectorEncoder"):
        vectors, layers = _read_modules(name, modules, general, is_pylate=is_pylate)
        if is_pylate:
            _register(tokenizer, (vectors.query_prefix, vectors.document_prefix))
        return vectors, load_steps(name, layers, width)
    linear = {"kind": "dense", "inputs": width, "outputs": DIMENSIONS, "activation": "Identity", "residual": False}
    if modules or "HF_ColBERT" not in architectures:
        return TokenVectors(trained=False), RepresentationSteps([{**linear, "bias": False}], width)
    vectors = _of_stanford(read_json(name, "artifact.metadata") or {})
    _register(tokenizer, (vectors.query_prefix, vectors.document_prefix))
    weight = read_weights(name, "model.safetensors")["linear.weight"]
    steps = RepresentationSteps([{**linear, "outputs": len(weight), "bias": False}], width)
    steps[0].linear.load_state_dict({"weight": weight})  # type: ignore[union-attr]
    return vectors, steps


def _read_modules(
    name: str, modules: Sequence[dict[str, Any]], general: dict[str, Any], *, is_pylate: bool
) -> tuple[TokenVectors, list[tuple[Step, str]]]:
    kinds, paths = [module["type"].rsplit(".", 1)[-1] for module in modules], [module["path"] for module in modules]
    config = read_json(name, str(Path(paths[0], "sentence_bert_config.json"))) or {}
    if kinds[0] != "Transformer" or "message" in config.get("modality_config", {}):
        raise ValueError(f"checkpoint {name!r} begins with a {kinds[0]} or a chat template: MaxSim needs a Transformer")
    prompts = general.get("prompts") or {}
    vectors = TokenVectors(
        query_prefix=prompts.get("query") or "",
        document_prefix=prompts.get("document") or "",
        normalize=is_pylate,
        mean=general.get("similarity_fn_name") == "meanmaxsim",
    )
    lengths = config
    if is_pylate:
        lengths = {**_pylate_lengths(general), **config}
        skipped = general.get("skiplist_words")
        vectors = replace(
            vectors,
            query_prefix=_joined(general.get("query_prefix"), vectors.query_prefix),
            document_prefix=_joined(general.get("document_prefix"), vectors.document_prefix),
            skipped=tuple(string.punctuation if skipped is None else skipped),  # PyLate's default
        )
    expansion, longest = lengths.get("query_expansion"), lengths.get("max_seq_length")
    vectors = replace(vectors, query_length=lengths.get("query_length") or longest)
    vectors = replace(vectors, document_length=lengths.get("document_length") or longest)
    if expansion:
        is_fixed = expansion["strategy"] == "fixed"
        vectors = replace(
            vectors,
            expand_to=expansion["length"],
            query_length=expansion["length"] if is_fixed else vectors.query_length,
            attends=bool(expansion.get("attend", False)),
            expand_with=expansion.get("token"),
        )
    found = _Modules(name)
    for kind, path in zip(kinds[1:], paths[1:], strict=True):
        found.add(kind, path)
    return replace(vectors, **found.settings), found.layers


def _joined(marker: str | None, prompt: str) -> str:
    """Return PyLate's marker token and the prompt after it."""
    return (marker or "") + prompt.removeprefix(marker or "")


def _pylate_lengths(general: dict[str, Any]) -> dict[str, Any]:
    """Return PyLate's settings under the names that sentence-transformers gives them."""
    lengths = {key: general[key] for key in ("query_length", "document_length") if general.get(key) is not None}
    if "query_expansion" in general:
        return {**lengths, "query_expansion": general["query_expansion"]}
    if general.get("do_query_expansion") is False:
        return lengths
    length = lengths.pop("query_length", None) or DEFAULT_EXPANSION
    attends = bool(general.get("attend_to_expansion_tokens"))
    return {**lengths, "query_expansion": {"strategy": "fixed", "attend": attends, "length": length}}


def _of_stanford(metadata: dict[str, Any]) -> TokenVectors:
    """Return the settings of an `artifact.metadata`; those it lacks are the defaults of ColBERT's code."""
    length = metadata.get("query_maxlen") or DEFAULT_EXPANSION
    return TokenVectors(
        query_prefix=(metadata.get("query_token_id") or "[unused0]") + " ",
        document_prefix=(metadata.get("doc_token_id") or "[unused1]") + " ",
        query_length=length,
        document_length=metadata.get("doc_maxlen"),
        expand_to=length,
        attends=bool(metadata.get("attend_to_mask_tokens")),
        skipped=tuple(string.punctuation) if metadata.get("mask_punctuation", True) else (),
    )


def _register(tokenizer: Any, prefixes: Sequence[str]) -> None:
    """Let the tokenizer read the marker tokens that it knows as one token each, as they were trained."""
    vocabulary = tokenizer.get_vocab()
    for prefix in prefixes:
        known = [token for token in (prefix, *prefix.split(None, 1)[:1]) if token in vocabulary]
        if known and tokenizer.tokenize(known[0]) != known[:1]:
            tokenizer.add_tokens([AddedToken(known[0], normalized=False, special=True)], special_tokens=True)


def token_ids(tokenizer: Any, words: Sequence[str]) -> tuple[int, ...]:
    """Return the ids of words that are one token each; the others would stand for all unknown words."""
    ids = {word: tokenizer.convert_tokens_to_ids(word) for word in words}
    unknown = (None, tokenizer.unk_token_id)
    return tuple(sorted(i for word, i in ids.items() if i not in unknown or word == tokenizer.unk_token))


def expansion_id(tokenizer: Any, token: str | None) -> int:
    """Return the id of the token that fills up queries; ValueError if the tokenizer has none."""
    if token is not None:
        ids = token_ids(tokenizer, [token])
        found = ids[0] if ids else None
    else:
        found = tokenizer.eos_token_id if tokenizer.mask_token_id is None else tokenizer.mask_token_id
    if found is None:
        raise ValueError(f"this checkpoint fills up queries with {token or '[MASK]'!r}, which its tokenizer lacks")
    return int(found)

