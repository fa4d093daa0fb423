"""Saved models: a folder with config.json, safetensors, tokenizer and card."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import huggingface_hub
import torch
from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from ..common.files import MARKER, replacing, undamaged
from ..common.hub import refuse_pointer, unreachable
from ..common.packaged import model_folder
from ..common.registry import defined_in
from .backbones.load import SAVED_FORMAT, load_fast_tokenizer
from .devices import float32_by_default
from .heads import build_head
from .inputs import Settings
from .model import Model
from .weights import fingerprint

FORMAT_VERSION = 1
CONFIG_FILE = "config.json"
WEIGHTS_FILE = "model.safetensors"
TRAINING_FILE = "training.json"
ARTIFACT_FILE = "pt_meta.json"
SAVE_AGAIN = "save the model again"

PLACEHOLDER_NAME = "this-folder-or-hub-id"
_CARD = """---
library_name: pyterrier_longdoc
tags:
- pyterrier
- reranking
- long-documents
---
# {name}

A long-document reranker, `{name}`, on top of `{backbone}`. It scores a query and a document for ranking.

```python
{import_line}

reranker = {class_name}.load("{its_name}")
pipeline = bm25 % 100 >> dataset.text_loader() >> reranker
```

Parameters: `{parameters}`
"""


class NewerFormatError(ValueError):
    """A saved model has a format that this version does not know."""


def save_model(folder: Path, model: Model, *, cls: type, parameters: dict[str, Any]) -> None:
    """Write a model and the arguments of its class into a folder.

    `config.json` contains the fingerprint of the weights, so that `load` detects mixed files of two models.
    """
    head, options = model.head_spec
    tensors = {key: value.detach().cpu().contiguous() for key, value in model.state_dict().items()}
    model.tokenizer.save_pretrained(folder)
    config = {
        "format": SAVED_FORMAT,
        "format_version": FORMAT_VERSION,
        "class": cls.__name__,
        **defined_in(cls),
        "parameters": parameters,
        "encoder": model.backbone.describe(),
        "head": {
            "name": head,
            **defined_in(type(model.head)),
            "options": options,
            "built_from": model.head.built_from(),
            "ready": model.origin != "random",
        },
        "weights": fingerprint(tensors),
    }
    texts = {
        CONFIG_FILE: pretty(config),
        ARTIFACT_FILE: pretty({"type": "longdoc_reranker", "format": "hf", "package_hint": "pyterrier-longdoc"}),
        "README.md": _card(cls, parameters),
    }
    if model.recipe is not None or model.trained_on is not None or model.trained_queries:
        learned = None if model.trained_on is None else asdict(model.trained_on)
        training = {"args": model.recipe, "trained_on": learned, "history": model.history}
        texts[TRAINING_FILE] = pretty({**training, "queries": sorted(model.trained_queries)})
    for file, text in texts.items():
        (folder / file).write_text(text, encoding="utf-8")
    with replacing(folder / WEIGHTS_FILE) as temporary_file:
        save_file(tensors, temporary_file, metadata={"format": "pt"})


def check_replaceable(folder: Path, cls: type, backbone: str) -> None:
    """Raise ValueError for a folder with another model: of another class, with another backbone or a newer format."""
    if not (folder / CONFIG_FILE).is_file():
        return
    try:
        _, config = read_config(folder)
    except NewerFormatError as error:
        raise ValueError(f"{error}, choose a new folder, or replace this model with overwrite=True") from None
    except ValueError:  # nothing that could be loaded
        return
    name, other = config["class"], config["parameters"]["backbone"]
    if (name, other) != (cls.__name__, backbone):
        raise ValueError(
            f"{str(folder)!r} holds a {name}({other!r}): choose a new folder, or replace this model with overwrite=True"
        )


def read_config(name: str | Path, *, revision: str | None = None) -> tuple[Path, dict[str, Any]]:
    """Return the folder and the config.json of a model: local, packaged or on the hub."""
    folder = model_folder(name)
    if not folder.is_dir():
        patterns = ["*.json", "*.safetensors", "*.txt", "*.model", "*.md"]
        try:
            folder = Path(huggingface_hub.snapshot_download(str(name), revision=revision, allow_patterns=patterns))
        except (LocalEntryNotFoundError, HFValidationError) as error:
            unreachable(str(name), error.__cause__ or error)
    path = folder / CONFIG_FILE
    if not path.is_file() and (folder / MARKER).is_file():
        raise ValueError(f"{str(name)!r} has no {CONFIG_FILE}, because saving was interrupted: save the model again")
    with undamaged(path, SAVE_AGAIN):
        config = dict(json.loads(path.read_text(encoding="utf-8"))) if path.is_file() else {}
        if config.get("format") != SAVED_FORMAT:
            raise ValueError(
                f"{str(name)!r} was not saved by this package; to start from a Hugging Face checkpoint, use it as the "
                f"backbone, e.g. MaxP({str(name)!r})"
            )
        if config["format_version"] > FORMAT_VERSION:
            raise NewerFormatError(f"{str(name)!r} was saved by a newer version: update pyterrier_longdoc")
        _ = config["class"], config["parameters"]["backbone"]
    return folder, config


@float32_by_default()
def load_model(
    folder: Path, config: dict[str, Any], settings: Settings, *, encoder: Any, weight_arguments: dict[str, Any]
) -> Model:
    """Build the model of a configuration and load its weights, strictly."""
    tokenizer = load_fast_tokenizer(str(folder))
    backbone = encoder.build_backbone(config["encoder"], tokenizer)
    head_spec = config["head"]["name"], config["head"]["options"]
    head_options = {**head_spec[1], **config["head"]["built_from"]}
    head = build_head(head_spec[0], backbone.hidden_size, channels=backbone.channels, **head_options)
    arguments = {"backbone": backbone, "head_spec": head_spec, "weight_arguments": weight_arguments}
    model = Model(encoder(backbone), tokenizer, head, settings, **arguments)
    model.load_state_dict(read_tensors(folder / WEIGHTS_FILE, config), strict=True)
    return model.eval()


def read_tensors(file: Path, config: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Return the weights in a file; ValueError if they are not those of the configuration."""
    refuse_pointer(file)
    with undamaged(file, SAVE_AGAIN, SafetensorError):
        tensors = load_file(file)
    if fingerprint(tensors) != config.get("weights"):
        raise ValueError(
            f"the weights in {str(file.parent)!r} do not belong to its {CONFIG_FILE}: the folder mixes two models; "
            f"{SAVE_AGAIN}"
        )
    return tensors


def _card(cls: type, parameters: dict[str, Any]) -> str:
    name, module = cls.__name__, defined_in(cls).get("module")
    return _CARD.format(
        name=name,
        its_name=PLACEHOLDER_NAME,
        import_line="import pyterrier_longdoc as ld" if module is None else f"from {module} import {name}",
        class_name=f"ld.{name}" if module is None else name,
        backbone=parameters["backbone"],
        parameters=_json(parameters),
    )


def pretty(content: dict[str, Any]) -> str:
    """Return JSON for people."""
    return _json(content, indent=2, sort_keys=True) + "\n"


def _json(content: Any, **options: Any) -> str:
    return json.dumps(content, default=lambda number: number.tolist(), **options)  # numpy's numbers and arrays
