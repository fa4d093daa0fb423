"""The files of a sentence-transformers checkpoint: its class, and how a cross-encoder encodes pairs.

Since version 5.4 of sentence-transformers, a cross-encoder may consist of modules (`modules.json`): a transformer,
pooling and layers, the last of which computes the `scores` (the Ettin rerankers); or a language model and `LogitScore`,
which compares the logits of two tokens. The files are read without that library, as
`CrossEncoder.save_pretrained` of version 6.2 writes them. Bi-encoders, late interaction and layers are loaded with the
library: see `modules.py`.
"""

from __future__ import annotations

import json
import string
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...common.hub import check_inside, find_file

_RISING = ("Identity", "Sigmoid", "Tanh", "LogSigmoid", "Softplus")
"""Activation functions of scores that keep every ranking."""

_CLASSIFIES, _ANSWERS, _ENCODES = "sequence-classification", "text-generation", "feature-extraction"

_SETTINGS = tuple(
    f"sentence_{kind}_config.json"
    for kind in ("bert", "roberta", "distilbert", "camembert", "albert", "xlm-roberta", "xlnet")
)
"""Files with the settings of a Transformer module; all but the first are from old checkpoints."""

_LOADING = {"model_args", "model_kwargs", "tokenizer_args", "processor_kwargs", "config_args", "config_kwargs"}
"""Settings of a Transformer module that hold arguments for transformers, by old and new names."""

_CHANGES_NO_SCORE = {
    *("add_pooling_layer", "attn_implementation", "device_map", "dtype", "low_cpu_mem_usage", "model_max_length"),
    *("padding_side", "torch_dtype", "trust_remote_code", "use_cache", "use_fast"),
}
"""Arguments for transformers that can be ignored here; cross-encoders keep the backbone's length."""

_READS_PAIRS = {"chat_template", "max_length", "padding", "truncation", "logits_to_keep"}
"""Settings of a processor that are applied or, because cross-encoders keep the backbone's limit, can be ignored."""

_OF_PYLATE = {"query_prefix", "document_prefix", "do_query_expansion", "skiplist_words", "attend_to_expansion_tokens"}
"""Settings that only PyLate stores in `config_sentence_transformers.json`."""


def kind_of(name: str) -> str | None:
    """Return the class of sentence-transformers for a checkpoint; None for a plain transformers checkpoint.

    PyLate's and Stanford's checkpoints for late interaction are `"MultiVectorEncoder"`, too.
    """
    general = read_json(name, "config_sentence_transformers.json") or {}
    if not read_json(name, "modules.json"):
        is_stanford = "HF_ColBERT" in ((read_json(name, "config.json") or {}).get("architectures") or ())
        return "MultiVectorEncoder" if is_stanford else None
    is_pylate = general.get("model_type") == "ColBERT" or not _OF_PYLATE.isdisjoint(general)
    return "MultiVectorEncoder" if is_pylate else str(general.get("model_type", "SentenceTransformer"))


@dataclass(frozen=True)
class CrossEncoderFiles:
    """The settings of a cross-encoder in its files.

    Attributes:
        prompt: the text before every query; `""` for none.
        chat: for pairs that are encoded with the chat template, as messages of the roles `query` and `document`: its
            other arguments, and whether contents are `structured`; None for pairs that are encoded as two texts.
        answers: for a language model, the id of the token whose logit is the score, and of the one to subtract, if any.
        modules: class and folder of each module after an encoder; none for other heads.
    """

    prompt: str = ""
    chat: dict[str, Any] | None = None
    answers: tuple[int, ...] = ()
    modules: tuple[tuple[str, str], ...] = ()


def cross_encoder_files(name: str) -> CrossEncoderFiles | None:
    """Read the files of a cross-encoder of sentence-transformers 5.4 or later; None if there are none."""
    model_config = read_json(name, "config_sentence_transformers.json") or {}
    if not read_json(name, "modules.json") or model_config.get("model_type") != "CrossEncoder":
        _check_activation(name, _older_activation(read_json(name, "config.json") or {}))
        return None
    _check_activation(name, model_config.get("activation_fn"))
    modules = modules_of(name)
    kinds, paths = [kind.rsplit(".", 1)[-1] for kind, _ in modules], [path for _, path in modules]
    transformer_config = transformer_settings(name)
    _check_processing(name, transformer_config.get("processing_kwargs") or {})
    # The prompt that `predict` uses by default; callers must name any other.
    default, task = model_config.get("default_prompt_name"), transformer_config.get("transformer_task", _ENCODES)
    prompt = "" if default is None else model_config["prompts"][default] or ""
    message, chat = transformer_config.get("modality_config", {}).get("message"), None
    if message is not None:
        options = transformer_config.get("processing_kwargs", {}).get("chat_template", {})
        arguments = {key: value for key, value in options.items() if key not in ("restore_suffix", "max_length")}
        chat = {"structured": message.get("format") == "structured", "arguments": arguments}
    if task == _CLASSIFIES and kinds == ["Transformer"]:
        return CrossEncoderFiles(prompt, chat)
    if task == _ANSWERS and kinds == ["Transformer", "LogitScore"]:
        config = read_json(name, f"{paths[1]}/config.json") or {}
        answers = tuple(config[key] for key in ("true_token_id", "false_token_id") if config.get(key) is not None)
        return CrossEncoderFiles(prompt, chat, answers=answers)
    if task != _ENCODES or kinds[:2] != ["Transformer", "Pooling"]:
        raise ValueError(
            f"checkpoint {name!r} consists of the modules {', '.join(kinds)} with transformer_task={task!r}; known are "
            f"a Transformer that classifies, one that answers with LogitScore, and one with Pooling and layers"
        )
    return CrossEncoderFiles(prompt, chat, modules=tuple(modules[1:]))


def _check_activation(name: str, activation: str | None) -> None:
    """Raise ValueError for an activation function that may change the order of scores; it is not applied here."""
    rising = activation is None or (activation.startswith("torch.nn.") and activation.rsplit(".", 1)[-1] in _RISING)
    if not rising:
        raise ValueError(
            f"checkpoint {name!r} applies activation_fn={activation!r} to its scores, which can change their order"
        )


def _older_activation(config: dict[str, Any]) -> str | None:
    """Return the activation function in a config.json of sentence-transformers before 5.4; None if there is none."""
    named = (config.get("sentence_transformers") or {}).get("activation_fn")
    return named or config.get("sbert_ce_default_activation_function")


def modules_of(name: str) -> list[tuple[str, str]]:
    """Return class and folder of each module that `modules.json` names; none if there is no such file."""
    modules = read_json(name, "modules.json") or []
    for module in modules:
        check_inside(name, module["path"])
    return [(module["type"], module["path"]) for module in modules]


def transformer_settings(name: str) -> dict[str, Any]:
    """Return the settings of the first module, the Transformer; ValueError for those that cannot be applied."""
    modules = modules_of(name)
    folder = modules[0][1] if modules else ""
    files = (Path(folder, file).as_posix() for file in (_SETTINGS if modules else ()))
    settings: dict[str, Any] = next(filter(None, (read_json(name, file) for file in files)), {})
    for key in _LOADING & set(settings):
        if changes := {k: v for k, v in (settings[key] or {}).items() if k not in _CHANGES_NO_SCORE and v is not None}:
            raise ValueError(f"checkpoint {name!r} is loaded with {key}={changes!r}, which is not supported")
    reading = settings.get("modality_config", {}).get("text", {})
    output = reading.get("method"), reading.get("method_output_name")
    if reading and output not in (("forward", "last_hidden_state"), ("forward", "logits")):
        raise ValueError(
            f"checkpoint {name!r} has modality_config={reading!r} for texts: only the last_hidden_state or the logits "
            f"of the method 'forward' are supported"
        )
    return settings


def check_lower_case(name: str, tokenizer: Any) -> None:
    """Raise ValueError if sentence-transformers would lower-case texts and the tokenizer does not."""
    letters = " ".join(string.ascii_uppercase)
    keeps_case = tokenizer.tokenize(letters) != tokenizer.tokenize(letters.lower())
    if keeps_case and transformer_settings(name).get("do_lower_case"):
        raise ValueError(
            f"checkpoint {name!r} has do_lower_case, but its tokenizer does not lower-case: put a Lowercase normalizer "
            f"in its tokenizer.json"
        )


def _check_processing(name: str, options: dict[str, Any]) -> None:
    """Raise ValueError for settings of a cross-encoder's processor that change its inputs."""
    given = {**options, **(options.get("text") or {}), **(options.get("common") or {})}
    changes = {key: value for key, value in given.items() if key not in _READS_PAIRS | {"text", "common"}}
    if changes:
        raise ValueError(f"checkpoint {name!r} has processing_kwargs={changes!r}, which are not supported")


def read_json(name: str, path: str) -> Any:
    """Return the content of a JSON file of a checkpoint; None if there is no such file."""
    file = find_file(name, path)
    return None if file is None else json.loads(file.read_text(encoding="utf-8"))
