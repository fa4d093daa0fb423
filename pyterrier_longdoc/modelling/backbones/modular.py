"""What sentence-transformers stores beside a checkpoint: its modules, its prompts, what it does to scores.

Since version 5.4 of sentence-transformers a cross-encoder may consist of modules (`modules.json`): a transformer,
pooling, and layers that end in one that gives the `scores` (the Ettin rerankers); or a language model and `LogitScore`,
which compares the logits of two of its tokens. Read here are the files, as `CrossEncoder.save_pretrained` of version
6.2 writes them.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import nn

from ...common.hub import find_file

_RISING = ("Identity", "Sigmoid", "Tanh", "LogSigmoid", "Softplus")
"""Functions that sentence-transformers may put on scores and that leave every ranking as it is."""

_CLASSIFIES, _ANSWERS, _ENCODES = "sequence-classification", "text-generation", "feature-extraction"

_VECTOR = "sentence_embedding"
"""What the pooled vector, and what layers make of it, is called in there."""

_POOLINGS = {"cls": "cls", "mean": "mean", "lasttoken": "last"}
"""What can be taken over, and its name here."""


class Dense(nn.Module):
    """A module of sentence-transformers: `activation(linear(x))`, to which `x` may be added.

    Args:
        inputs: width of what comes in.
        outputs: width of what goes out.
        bias: whether the layer has one.
        activation: name of a class of `torch.nn`.
        residual: add what comes in, by a layer of its own where the widths differ.
    """

    def __init__(self, inputs: int, outputs: int, *, bias: bool, activation: str, residual: bool) -> None:
        super().__init__()
        self.linear = nn.Linear(inputs, outputs, bias=bias)
        self.activation = _activation(activation)
        self.adds = residual
        if residual and inputs != outputs:
            self.residual = nn.Linear(inputs, outputs, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """`(..., inputs)` to `(..., outputs)`."""
        made: torch.Tensor = self.activation(self.linear(x))
        if not self.adds:
            return made
        return made + (self.residual(x) if hasattr(self, "residual") else x)


class Norm(nn.Module):
    """A module of sentence-transformers: layer normalisation, under the name that its weights have there."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(size)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """`(..., size)`."""
        normal: torch.Tensor = self.norm(x)
        return normal


Step = dict[str, Any]
"""A layer of a representation step as JSON-able values: its `kind`, `"dense"` or `"norm"`, and its arguments."""


def _options(step: Step) -> dict[str, Any]:
    return {name: value for name, value in step.items() if name != "kind"}


class Steps(nn.Sequential):
    """A representation step of several layers, between the pooled state and the last layer.

    Args:
        steps: description of each.
        width: of the pooled state.

    Attributes:
        width: of what goes out.
    """

    def __init__(self, steps: Sequence[Step], width: int) -> None:
        layers = []
        for step in steps:
            options = _options(step)
            layers.append(Dense(**options) if step["kind"] == "dense" else Norm(**options))
            width = options.get("outputs", width)
        super().__init__(*layers)
        self.description = [dict(step) for step in steps]
        self.width = width


@dataclass(frozen=True)
class CrossEncoderFiles:
    """What is said of a cross-encoder beside its weights.

    Attributes:
        task: what its transformer does: `"feature-extraction"`, `"sequence-classification"` or `"text-generation"`.
        prompt: put before every query; `""` for none.
        chat: where pairs are read through the chat template, as messages of the roles `query` and `document`: its
            further arguments, and whether contents are `structured`; None where they are read as two texts.
        answers: of a language model: id of the token whose logit is the score, and of the one that is deducted, if any.
        pooling: of an encoder with modules: `"cls"`, `"mean"` or `"last"`.
        layers: of the same: description and folder of each layer between pooling and scores, and of that of scores.
    """

    task: str
    prompt: str = ""
    chat: dict[str, Any] | None = None
    answers: tuple[int, ...] = ()
    pooling: str | None = None
    layers: tuple[tuple[Step, str], ...] = ()

    @property
    def is_modular(self) -> bool:
        """Whether its head consists of modules."""
        return bool(self.layers)


def cross_encoder_files(name: str) -> CrossEncoderFiles | None:
    """Reads the files of a cross-encoder of sentence-transformers 5.4 or later.

    Args:
        name: a model on the Hugging Face hub, or a folder.

    Returns:
        What they say; None where there are none, as for cross-encoders that are a classifier alone and embeddings.

    Raises:
        ValueError: naming it, for what this package cannot follow.
    """
    modules = read_json(name, "modules.json")
    general = read_json(name, "config_sentence_transformers.json") or {}
    if not modules or general.get("model_type") != "CrossEncoder":
        return None
    _check_activation(name, general.get("activation_fn"))
    kinds = [module["type"].rsplit(".", 1)[-1] for module in modules]
    if kinds[0] != "Transformer":
        raise ValueError(f"checkpoint {name!r} begins with a {kinds[0]} module; a backbone begins with a Transformer")
    own = read_json(name, str(Path(modules[0]["path"], "sentence_bert_config.json"))) or {}
    task, prompt = own.get("transformer_task", _ENCODES), _prompt(name, general)
    message = own.get("modality_config", {}).get("message")
    chat = None
    if message is not None:
        further = own.get("processing_kwargs", {}).get("chat_template", {})
        kept = {key: value for key, value in further.items() if key not in ("restore_suffix", "max_length")}
        chat = {"structured": message.get("format") == "structured", "arguments": kept}
    rest = list(zip(kinds, modules, strict=True))[1:]
    if task == _CLASSIFIES and not rest:
        return CrossEncoderFiles(task, prompt, chat)
    if task == _ANSWERS and [kind for kind, _ in rest] == ["LogitScore"]:
        config = read_json(name, f"{rest[0][1]['path']}/config.json") or {}
        answers = tuple(config[key] for key in ("true_token_id", "false_token_id") if config.get(key) is not None)
        return CrossEncoderFiles(task, prompt, chat, answers=answers)
    if task != _ENCODES or not rest or rest[0][0] != "Pooling":
        raise ValueError(
            f"checkpoint {name!r} consists of the modules {', '.join(kinds)} with transformer_task={task!r}; known are "
            f"a Transformer alone that classifies, one that answers with LogitScore, and one with Pooling and "
            f"layers up to the scores"
        )
    pooling = _pooling(name, rest[0][1]["path"], prompt)
    return CrossEncoderFiles(task, prompt, chat, pooling=pooling, layers=_layers(name, rest[1:]))


def load_layers(name: str, files: CrossEncoderFiles, width: int) -> tuple[Steps, nn.Linear]:
    """The representation step and the layer of the scores of a cross-encoder with modules, with their weights.

    Args:
        name: a model on the Hugging Face hub, or a folder.
        files: what `cross_encoder_files` read there.
        width: of the pooled state.

    Raises:
        ValueError: if weights are missing, or do not fit.
    """
    steps = Steps([step for step, _ in files.layers[:-1]], width)
    description, path = files.layers[-1]
    scores = nn.Linear(description["inputs"], description["outputs"], bias=description["bias"])
    parts = [(layer, path) for layer, (_, path) in zip(steps, files.layers, strict=False)]
    for layer, folder in parts:
        _fill(layer, name, folder, "")
    _fill(scores, name, path, "linear.")
    return steps, scores


def load_dense(name: str, path: str) -> Dense:
    """A Dense module of a checkpoint with its weights.

    Args:
        name: a model on the Hugging Face hub, or a folder.
        path: of the module in there.

    Raises:
        ValueError: if weights are missing or do not fit, or its input or activation is unknown.
    """
    description = _dense(name, path, read_json(name, f"{path}/config.json") or {})
    layer = Dense(**_options(description))
    _fill(layer, name, path, "")
    return layer


def _fill(layer: nn.Module, name: str, folder: str, prefix: str) -> None:
    file = find_file(name, f"{folder}/model.safetensors")
    if file is None:
        raise ValueError(f"checkpoint {name!r} has no {folder}/model.safetensors")
    state = {key.removeprefix(prefix): value.float() for key, value in load_file(file).items()}
    try:
        layer.load_state_dict(state, strict=True)
    except RuntimeError as error:
        raise ValueError(
            f"the weights in {folder} of checkpoint {name!r} do not fit its config.json: {error}"
        ) from error


def _layers(name: str, modules: Sequence[tuple[str, dict[str, Any]]]) -> tuple[tuple[Step, str], ...]:
    layers: list[tuple[Step, str]] = []
    outputs: list[str] = []
    for kind, module in modules:
        if kind == "Dropout":  # is nothing when a model scores; heads have their own in training
            continue
        config = read_json(name, f"{module['path']}/config.json") or {}
        if kind == "LayerNorm":
            step = {"kind": "norm", "size": config["dimension"]}
        elif kind == "Dense":
            step = _dense(name, module["path"], config)
            outputs.append(config.get("module_output_name") or _VECTOR)
        else:
            raise ValueError(f"checkpoint {name!r} has a {kind} module, which cannot be taken over")
        layers.append((step, module["path"]))
    if not layers or layers[-1][0]["kind"] != "dense" or outputs[-1] != "scores":
        raise ValueError(
            f"checkpoint {name!r} does not end in a Dense module that gives the scores: it must be the last"
        )
    if set(outputs[:-1]) - {_VECTOR}:
        raise ValueError(
            f"checkpoint {name!r} has module_output_name={outputs[:-1]!r} in Dense modules before the last, which must "
            f"give the vector that the next one takes, {_VECTOR!r}"
        )
    last = layers[-1][0]
    if last["activation"] != "Identity" or last["residual"]:
        raise ValueError(
            f"checkpoint {name!r} has activation_function={last['activation']} and use_residual={last['residual']} in "
            f"its last Dense module; heads can take over a linear layer alone"
        )
    return tuple(layers)


def _dense(name: str, path: str, config: dict[str, Any]) -> Step:
    if config.get("module_input_name", _VECTOR) != _VECTOR:
        raise ValueError(
            f"checkpoint {name!r} has module_input_name={config['module_input_name']!r} in {path}, which must be that "
            f"of the pooled vector, {_VECTOR!r}"
        )
    activation = config.get("activation_function", "torch.nn.modules.activation.Tanh")
    if not activation.startswith("torch.nn."):
        raise ValueError(f"checkpoint {name!r} has activation_function={activation!r} in {path}, which is not torch's")
    return {
        "kind": "dense",
        "inputs": config["in_features"],
        "outputs": config["out_features"],
        "bias": config.get("bias", True),
        "activation": activation.rsplit(".", 1)[-1],
        "residual": config.get("use_residual", False),
    }


def _activation(name: str) -> nn.Module:
    """A function of `torch.nn` without arguments, by the name of its class.

    Raises:
        ValueError: if there is none.
    """
    known = getattr(nn.modules.activation, name, None) or {"Identity": nn.Identity}.get(name)
    if not (isinstance(known, type) and issubclass(known, nn.Module)):
        raise ValueError(f"{name!r} is no activation of torch.nn")
    return known()


def _check_activation(name: str, activation: str | None) -> None:
    """What `predict` puts on the scores at the end is left out here, as long as it changes no order."""
    known = activation is None or (activation.startswith("torch.nn.") and activation.rsplit(".", 1)[-1] in _RISING)
    if not known:
        raise ValueError(
            f"checkpoint {name!r} puts activation_fn={activation!r} on its scores, which may change their order; known "
            f"are {', '.join(_RISING)} of torch.nn"
        )


def _prompt(name: str, general: dict[str, Any]) -> str:
    """The prompt that `predict` uses without being asked; others are for callers who name them."""
    default = general.get("default_prompt_name")
    prompts = general.get("prompts") or {}
    if default is not None and default not in prompts:
        raise ValueError(f"checkpoint {name!r} has default_prompt_name={default!r}, of which there is no prompt")
    return prompts.get(default) or ""


def _pooling(name: str, path: str, prompt: str) -> str:
    config = read_json(name, f"{path}/config.json") or {}
    pooling = pooling_of(config)
    if pooling not in _POOLINGS:
        raise ValueError(
            f"checkpoint {name!r} has pooling_mode={pooling!r}, which cannot be taken over; known are "
            f"{', '.join(_POOLINGS)}"
        )
    if prompt and not config.get("include_prompt", True):
        raise ValueError(
            f"checkpoint {name!r} leaves its prompt {prompt!r} out of the pooling, which cannot be followed"
        )
    return _POOLINGS[pooling]


def pooling_of(config: dict[str, Any]) -> str | None:
    """The pooling that the `config.json` of a Pooling module names, several joined by `+`; None if it names none."""
    modes = config.get("pooling_mode")
    if modes is None:
        prefix = "pooling_mode_"
        modes = [key.removeprefix(prefix) for key, value in config.items() if key.startswith(prefix) and value is True]
    modes = [modes] if isinstance(modes, str) else list(modes)
    # Before version 5.4 it had the names of these settings.
    return "+".join(mode.removesuffix("_tokens").removesuffix("_token") for mode in modes) or None


def read_json(name: str, path: str) -> Any:
    """The content of a JSON file of a checkpoint; None where there is no such file."""
    file = find_file(name, path)
    return None if file is None else json.loads(file.read_text(encoding="utf-8"))
