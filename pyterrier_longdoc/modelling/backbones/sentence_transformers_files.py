"""What sentence-transformers stores beside a checkpoint: its modules, its prompts, what it does to scores.

Since version 5.4 of sentence-transformers a cross-encoder may consist of modules (`modules.json`): a transformer,
pooling, and layers, the last of which gives the `scores` (the Ettin rerankers); or a language model and `LogitScore`,
which compares the logits of two tokens. The files are read as `CrossEncoder.save_pretrained` of version 6.2 writes
them.
"""

from __future__ import annotations

import json
import string
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import nn

from ...common.hub import find_file, refuse_pointer

_RISING = ("Identity", "Sigmoid", "Tanh", "LogSigmoid", "Softplus")
"""Functions of the scores that keep every ranking."""

_CLASSIFIES, _ANSWERS, _ENCODES = "sequence-classification", "text-generation", "feature-extraction"

_VECTOR = "sentence_embedding"
"""The name of the pooled vector, before and after the layers, in these files."""

_SETTINGS = tuple(
    f"sentence_{kind}_config.json"
    for kind in ("bert", "roberta", "distilbert", "camembert", "albert", "xlm-roberta", "xlnet")
)
"""Files with the settings of a Transformer module; those after the first are of old checkpoints."""

_LOADING = {"model_args", "model_kwargs", "tokenizer_args", "processor_kwargs", "config_args", "config_kwargs"}
"""Settings of a Transformer module that hold arguments for transformers, in old and new words."""

_CHANGES_NO_SCORE = {
    *("add_pooling_layer", "attn_implementation", "device_map", "dtype", "low_cpu_mem_usage", "model_max_length"),
    *("padding_side", "torch_dtype", "trust_remote_code", "use_cache", "use_fast"),
}
"""Arguments for transformers that need not be followed here; the length is read by `longest_of`."""

_READS_PAIRS = {"chat_template", "max_length", "padding", "truncation", "logits_to_keep"}
"""Settings of a processor that are applied or, as cross-encoders keep the backbone's limit, need not be."""

_POOLINGS = {"cls": "cls", "mean": "mean", "lasttoken": "last"}
"""From the poolings that can be taken over to their names here."""


class Dense(nn.Module):
    """A module of sentence-transformers: `activation(linear(x))`, plus `x` if it is residual."""

    def __init__(self, inputs: int, outputs: int, *, bias: bool, activation: str, residual: bool) -> None:
        super().__init__()
        self.linear = nn.Linear(inputs, outputs, bias=bias)
        self.activation = nn.Identity() if activation == "Identity" else getattr(nn.modules.activation, activation)()
        self.adds_input = residual
        if residual and inputs != outputs:
            self.residual = nn.Linear(inputs, outputs, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return `(..., outputs)` for `(..., inputs)`."""
        output: torch.Tensor = self.activation(self.linear(x))
        if not self.adds_input:
            return output
        return output + (self.residual(x) if hasattr(self, "residual") else x)


Step = dict[str, Any]
"""A layer of a representation step as JSON-able values: its `kind`, `"dense"` or `"norm"`, and its arguments."""


def _build_layer(step: Step) -> nn.Module:
    if step["kind"] == "norm":
        return nn.Sequential(OrderedDict(norm=nn.LayerNorm(step["size"])))  # under the name that its weights have there
    return Dense(**{name: value for name, value in step.items() if name != "kind"})


class RepresentationSteps(nn.Sequential):
    """A representation step of several layers, between the pooled state and the last layer."""

    def __init__(self, steps: Sequence[Step], width: int) -> None:
        super().__init__(*map(_build_layer, steps))
        self.description = [dict(step) for step in steps]
        self.width = next((step["outputs"] for step in reversed(steps) if "outputs" in step), width)


@dataclass(frozen=True)
class CrossEncoderFiles:
    """What the files say of a cross-encoder, besides its weights.

    Attributes:
        prompt: put before every query; `""` for none.
        chat: for pairs that are read through the chat template, as messages of the roles `query` and `document`: its
            other arguments, and whether contents are `structured`; None for pairs that are read as two texts.
        answers: for a language model, the id of the token whose logit is the score, and of the one to deduct, if any.
        pooling: for an encoder with modules, `"cls"`, `"mean"` or `"last"`.
        layers: for the same, description and folder of each layer after the pooling, the layer of the scores last;
            none where the head is no chain of modules.
    """

    prompt: str = ""
    chat: dict[str, Any] | None = None
    answers: tuple[int, ...] = ()
    pooling: str | None = None
    layers: tuple[tuple[Step, str], ...] = ()


def cross_encoder_files(name: str) -> CrossEncoderFiles | None:
    """Read the files of a cross-encoder of sentence-transformers 5.4 or later; None where there are none."""
    model_config = read_json(name, "config_sentence_transformers.json") or {}
    if not read_json(name, "modules.json") or model_config.get("model_type") != "CrossEncoder":
        _check_activation(name, _older_activation(read_json(name, "config.json") or {}))
        return None
    _check_activation(name, model_config.get("activation_fn"))
    modules = modules_of(name)
    kinds, paths = [kind for kind, _ in modules], [path for _, path in modules]
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
    config = read_json(name, f"{paths[1]}/config.json") or {}
    pooling, includes_prompt = pooling_of(config), config.get("include_prompt", True)
    if pooling not in _POOLINGS or (prompt and not includes_prompt):
        raise ValueError(
            f"checkpoint {name!r} has pooling_mode={pooling!r} and include_prompt={includes_prompt!r}: only "
            f"{', '.join(_POOLINGS)} can be taken over, over the prompt as well"
        )
    layers = _layers(name, modules[2:])
    return CrossEncoderFiles(prompt, chat, pooling=_POOLINGS[pooling], layers=layers)


def load_layers(name: str, layers: Sequence[tuple[Step, str]], width: int) -> tuple[RepresentationSteps, nn.Linear]:
    """Return representation step and layer of the scores with their weights; `width` is that of the pooled state."""
    steps = load_steps(name, layers[:-1], width)
    last_step, folder = layers[-1]
    scores = _build_layer(last_step)
    _fill(scores, name, folder)
    return steps, scores.linear  # type: ignore[return-value]


def load_steps(name: str, layers: Sequence[tuple[Step, str]], width: int) -> RepresentationSteps:
    """Return layers with their weights; `width` is that of what they get."""
    steps = RepresentationSteps([step for step, _ in layers], width)
    for layer, (_, folder) in zip(steps, layers, strict=True):
        _fill(layer, name, folder)
    return steps


def load_dense(name: str, path: str) -> Dense:
    """Return a Dense module with its weights; `path` is its folder in the checkpoint."""
    config = read_json(name, f"{path}/config.json") or {}
    check_field(name, path, config)
    layer = _build_layer(dense_step(name, path, config))
    _fill(layer, name, path)
    return layer  # type: ignore[return-value]


def _fill(layer: nn.Module, name: str, folder: str) -> None:
    layer.load_state_dict(read_weights(name, f"{folder}/model.safetensors"))


def read_weights(name: str, path: str) -> dict[str, torch.Tensor]:
    """Return the tensors of a safetensors file of a checkpoint in fp32."""
    file = find_file(name, path)
    if file is None:
        raise ValueError(f"checkpoint {name!r} has no {path}")
    refuse_pointer(file)
    return {key: value.float() for key, value in load_file(file).items()}


def _layers(name: str, modules: Sequence[tuple[str, str]]) -> tuple[tuple[Step, str], ...]:
    """Return the layers after the pooling; the last is a linear layer of the scores."""
    layers: list[tuple[Step, str]] = []
    outputs: list[str] = []
    for kind, path in modules:
        config = read_json(name, f"{path}/config.json") or {}
        if kind == "Dense":
            layers.append((dense_step(name, path, config), path))
            outputs.append(config.get("module_output_name") or _VECTOR)
        elif kind == "LayerNorm":
            layers.append(({"kind": "norm", "size": config["dimension"]}, path))
        elif kind != "Dropout":  # does nothing when a model scores; heads have their own for training
            raise ValueError(f"checkpoint {name!r} has a {kind} module, which cannot be taken over")
    last_step = layers[-1][0] if layers else {}
    is_linear = last_step.get("activation") == "Identity" and not last_step["residual"]
    if not is_linear or outputs[-1] != "scores" or set(outputs[:-1]) - {_VECTOR}:
        raise ValueError(
            f"checkpoint {name!r} must end in a linear Dense module (activation_function Identity, without "
            f"use_residual) of the scores, and all before it must give {_VECTOR!r}: it ends in {last_step}, and its "
            f"module_output_name are {outputs}"
        )
    return tuple(layers)


def dense_step(name: str, path: str, config: dict[str, Any], vector: str = _VECTOR) -> Step:
    """Return the description of a Dense module that reads `vector`, whose `config.json` is given."""
    field, activation = config.get("module_input_name", vector), config.get("activation_function", "torch.nn.Tanh")
    if field != vector or not activation.startswith("torch.nn."):
        raise ValueError(
            f"checkpoint {name!r} has module_input_name={field!r} and activation_function={activation!r} in {path}: "
            f"these must be {vector!r} and a function of torch.nn"
        )
    return {
        "kind": "dense",
        "inputs": config["in_features"],
        "outputs": config["out_features"],
        "bias": config.get("bias", True),
        "activation": activation.rsplit(".", 1)[-1],
        "residual": config.get("use_residual", False),
    }


def check_field(name: str, path: str, config: dict[str, Any]) -> None:
    """Raise ValueError for a module that reads or writes anything but the pooled vector."""
    for part in ("module_input_name", "module_output_name"):
        if (config.get(part) or _VECTOR) != _VECTOR:
            raise ValueError(f"checkpoint {name!r} has {part}={config[part]!r} in {path}: it must be {_VECTOR!r}")


def _check_activation(name: str, activation: str | None) -> None:
    """Raise ValueError for a function of the scores that may change their order; it is left out here."""
    rising = activation is None or (activation.startswith("torch.nn.") and activation.rsplit(".", 1)[-1] in _RISING)
    if not rising:
        raise ValueError(
            f"checkpoint {name!r} puts activation_fn={activation!r} on its scores, which may change their order"
        )


def _older_activation(config: dict[str, Any]) -> str | None:
    """Return the function of the scores that a config.json of sentence-transformers before 5.4 names; None if none."""
    named = (config.get("sentence_transformers") or {}).get("activation_fn")
    return named or config.get("sbert_ce_default_activation_function")


def pooling_of(config: dict[str, Any]) -> str | None:
    """Return the pooling that the `config.json` of a Pooling module names, several joined by `+`; None if none."""
    modes = config.get("pooling_mode")
    if modes is None:
        prefix = "pooling_mode_"
        modes = [key.removeprefix(prefix) for key, value in config.items() if key.startswith(prefix) and value is True]
    modes = [modes] if isinstance(modes, str) else list(modes)
    # Before version 5.4 each mode was a setting named so.
    return "+".join(mode.removesuffix("_tokens").removesuffix("_token") for mode in modes) or None


def modules_of(name: str) -> list[tuple[str, str]]:
    """Return kind and folder of each module that `modules.json` names; none if there is no such file.

    ValueError for a module whose code belongs to the checkpoint.
    """
    modules = read_json(name, "modules.json") or []
    for module in modules:
        if not module["type"].startswith(("sentence_transformers.", "pylate.")):
            raise ValueError(
                f"checkpoint {name!r} has the module {module['type']!r}, whose code is not that of "
                f"sentence-transformers: it cannot be applied"
            )
    return [(module["type"].rsplit(".", 1)[-1], module["path"]) for module in modules]


def transformer_settings(name: str) -> dict[str, Any]:
    """Return the settings of the Transformer module, the first one; ValueError for those that cannot be applied."""
    modules = modules_of(name)
    folder = modules[0][1] if modules else ""
    files = (Path(folder, file).as_posix() for file in (_SETTINGS if modules else ()))
    settings: dict[str, Any] = next(filter(None, (read_json(name, file) for file in files)), {})
    for key in _LOADING & set(settings):
        if changes := {k: v for k, v in (settings[key] or {}).items() if k not in _CHANGES_NO_SCORE and v is not None}:
            raise ValueError(f"checkpoint {name!r} is loaded with {key}={changes!r}, which cannot be applied here")
    reading = settings.get("modality_config", {}).get("text", {})
    output = reading.get("method"), reading.get("method_output_name")
    if reading and output not in (("forward", "last_hidden_state"), ("forward", "logits")):
        raise ValueError(
            f"checkpoint {name!r} has modality_config={reading!r} for texts: only the last_hidden_state or the logits "
            f"of the method 'forward' can be taken over"
        )
    return settings


def longest_of(name: str, settings: dict[str, Any], tokenizer: Any) -> int:
    """Return the most tokens of an input by the settings of a Transformer module; a huge number for no limit.

    ValueError if a longer input would lose its beginning.
    """
    if tokenizer.truncation_side != "right":
        raise ValueError(
            f"checkpoint {name!r} has truncation_side={tokenizer.truncation_side!r} in tokenizer_config.json, which "
            f"cannot be applied: a window here keeps the beginning of a long text"
        )
    arguments = settings.get("processor_kwargs") or settings.get("tokenizer_args") or {}
    # Versions of sentence-transformers from 5.4 on store this length in the tokenizer alone.
    return int(arguments.get("model_max_length") or settings.get("max_seq_length") or tokenizer.model_max_length)


def check_lower_case(name: str, tokenizer: Any) -> None:
    """Raise ValueError if sentence-transformers would put texts in lower case where the tokenizer does not."""
    letters = " ".join(string.ascii_uppercase)
    keeps_case = tokenizer.tokenize(letters) != tokenizer.tokenize(letters.lower())
    if keeps_case and transformer_settings(name).get("do_lower_case"):
        raise ValueError(
            f"checkpoint {name!r} has do_lower_case, which its tokenizer does not do: put a Lowercase normalizer in "
            f"its tokenizer.json"
        )


def _check_processing(name: str, options: dict[str, Any]) -> None:
    """Raise ValueError for settings of a cross-encoder's processor that change what it reads."""
    given = {**options, **(options.get("text") or {}), **(options.get("common") or {})}
    changes = {key: value for key, value in given.items() if key not in _READS_PAIRS | {"text", "common"}}
    if changes:
        raise ValueError(f"checkpoint {name!r} has processing_kwargs={changes!r}, which cannot be applied here")


def read_json(name: str, path: str) -> Any:
    """Return the content of a JSON file of a checkpoint; None where there is no such file."""
    file = find_file(name, path)
    return None if file is None else json.loads(file.read_text(encoding="utf-8"))
