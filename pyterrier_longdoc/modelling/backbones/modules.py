"""Checkpoints of sentence-transformers, loaded with that library.

It builds the modules of a checkpoint with their weights and follows the settings in its files. What it would silently
accept is refused here: missing weights, pickles, functions of other packages, texts within a chat template.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ...common.files import full_name, import_extra
from ...common.hub import local_folder, refuse_pointer
from .architectures import quiet
from .sentence_transformers_files import modules_of
from .steps import RepresentationSteps, Step

VECTOR, TOKENS = "sentence_embedding", "token_embeddings"
"""The keys of the pooled vector and of the tokens' vectors, before and after the layers."""


def library(name: str) -> Any:
    """Import sentence-transformers for a checkpoint."""
    import_extra(
        "sentence_transformers.multi_vector_encoder",
        "sentence-transformers",
        f"checkpoint {name!r} needs sentence-transformers 6.2 or later",
    )
    return import_extra("sentence_transformers", "sentence-transformers", "")


def load_model(folder: str, kind: str, *, trust_remote_code: bool = False) -> Any:
    """Return the model of a checkpoint of sentence-transformers, PyLate or Stanford's ColBERT, in fp32.

    Args:
        folder: the checkpoint's folder, see `local_folder`.
        kind: the class of the checkpoint, see `kind_of`; with another one, it would be silently converted.
        trust_remote_code: use the checkpoint's own classes of modules and functions.
    """
    classes = library(folder)
    check_files(folder, trust_remote_code=trust_remote_code)
    with quiet(), _naming(folder):
        model = getattr(classes, kind)(
            full_name(folder),
            device="cpu",
            trust_remote_code=trust_remote_code,
            local_files_only=not trust_remote_code,  # it is here; its code may be elsewhere
            model_kwargs={"dtype": torch.float32, "use_safetensors": True},
        )
    return model.eval()


@contextmanager
def _naming(name: str) -> Iterator[None]:
    """Name the checkpoint in errors of the library, including those for missing keys."""
    try:
        yield
    except (KeyError, RuntimeError, TypeError, ValueError) as error:
        raise ValueError(f"sentence-transformers cannot load checkpoint {name!r}: {error}") from error


def check_files(folder: str, *, trust_remote_code: bool = False) -> None:
    """Raise ValueError for files of modules that the library would load as pickles, or silently replace."""
    for file in _files(folder, [path for _, path in modules_of(folder)]):
        if file.suffix == ".safetensors":
            refuse_pointer(file)
        elif file.name == "pytorch_model.bin" and not list(file.parent.glob("model*.safetensors")):
            raise ValueError(f"{str(file)!r} is a pickle, and there are no safetensors weights next to it")
        elif file.name == "config.json" and not trust_remote_code:
            config = json.loads(file.read_text(encoding="utf-8"))
            function = "torch." if "model_type" in config else config.get("activation_function", "torch.")
            if not function.startswith("torch."):
                raise ValueError(
                    f"{str(file)!r} has activation_function={function!r}: without trust_remote_code=True it must be a "
                    f"function of torch.nn"
                )


def _files(folder: str, paths: Sequence[str]) -> Iterator[Path]:
    for path in {"", *paths}:
        root = Path(folder, path)
        yield from root.rglob("*") if path or (root / "router_config.json").is_file() else root.glob("*")


def check_transformer(name: str, module: Any) -> Any:
    """Return a model's first module; ValueError unless it returns the last layer's states of texts as they are."""
    if not hasattr(module, "auto_model"):
        raise ValueError(f"checkpoint {name!r} begins with a {type(module).__name__}: it must begin with a Transformer")
    reading = module.modality_config
    way = (reading.get("text", {}).get("method"), reading.get("text", {}).get("method_output_name"))
    refused = {
        "transformer_task": module.transformer_task != "feature-extraction",
        "modality_config": "message" in reading or way != ("forward", "last_hidden_state"),
        "processing_kwargs": bool(module.processing_kwargs),
    }
    for key, is_refused in refused.items():
        if is_refused:
            raise ValueError(
                f"checkpoint {name!r} has {key}={getattr(module, key)!r}: only the last_hidden_state of an encoder can "
                f"be used, for texts without a chat template"
            )
    # Otherwise a longer input would lose its beginning.
    if module.tokenizer.truncation_side != "right":
        raise ValueError(
            f"checkpoint {name!r} has truncation_side={module.tokenizer.truncation_side!r} in tokenizer_config.json, "
            f"which is not supported: windows keep the beginning of a long text"
        )
    return module


# Layers in the form in which this package saves them.

_POOLINGS = {"cls": "cls", "mean": "mean", "lasttoken": "last"}
"""Maps the poolings of cross-encoders that can be used to their names here."""


def load_head(name: str, modules: Sequence[tuple[str, str]], prompt: str) -> tuple[RepresentationSteps, nn.Linear, str]:
    """Return representation step, final layer and pooling of a cross-encoder that consists of modules."""
    classes, folder = library(name), local_folder(name)
    check_files(folder)
    with _naming(name):
        pooling, *layers = (
            classes.util.import_module_class(kind, folder).load(full_name(folder), subfolder=path)
            for kind, path in modules
        )
    if pooling.pooling_mode not in _POOLINGS or (prompt and not pooling.include_prompt):
        raise ValueError(
            f"checkpoint {name!r} has pooling_mode={pooling.pooling_mode!r} and include_prompt="
            f"{pooling.include_prompt!r}: only {', '.join(_POOLINGS)} are supported, with the prompt included"
        )
    # Dropout has no effect in scoring; heads have their own for training.
    layers = [layer for layer in layers if type(layer).__name__ != "Dropout"]
    before = steps_of(name, layers[:-1], pooling.embedding_dimension)
    fields = [getattr(layer, "module_output_name", VECTOR) for layer in layers]
    last = _step(name, layers[-1], VECTOR) if layers else {}
    is_linear = last.get("activation") == "Identity" and not last["residual"]
    if not is_linear or fields[-1] != "scores" or set(fields[:-1]) - {VECTOR}:
        raise ValueError(
            f"checkpoint {name!r} must end in a linear Dense module (activation_function Identity, without "
            f"use_residual) of the scores, and all before it must give {VECTOR!r}: it ends in {last}, and its "
            f"module_output_name are {fields}"
        )
    return before, layers[-1].linear.float(), _POOLINGS[pooling.pooling_mode]


def steps_of(name: str, modules: Sequence[Any], width: int, field: str = VECTOR) -> RepresentationSteps:
    """Return layers of sentence-transformers with their weights.

    Args:
        name: the checkpoint.
        modules: each reads and writes the field, except for the last layer of a cross-encoder.
        width: the number of input features of the first layer.
        field: the key of their input.
    """
    steps = RepresentationSteps([_step(name, module, field) for module in modules], width)
    for step, module in zip(steps, modules, strict=True):
        step.load_state_dict(module.state_dict())
    return steps.float()


def _step(name: str, module: Any, field: str) -> Step:
    kind = type(module).__name__
    if kind == "LayerNorm" and field == VECTOR:
        return {"kind": "norm", "size": module.dimension}
    if kind != "Dense":
        raise ValueError(f"checkpoint {name!r} has a {kind} module, which is not supported")
    function = module.activation_function
    if module.module_input_name != field or not isinstance(function, nn.Module):
        raise ValueError(
            f"checkpoint {name!r} has a Dense module with module_input_name={module.module_input_name!r} and "
            f"activation_function={function!r}: these must be {field!r} and a function of torch.nn"
        )
    return {
        "kind": "dense",
        "inputs": module.in_features,
        "outputs": module.out_features,
        "bias": module.bias,
        "activation": type(function).__name__,
        "residual": module.use_residual,
    }
