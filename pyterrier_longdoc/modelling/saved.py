"""Saved models: a folder with config.json, safetensors, tokenizer and card, or a difference from the backbone."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import huggingface_hub
import torch
from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError
from safetensors.torch import load_file, save_file

from ..common.files import full_name, replacing
from ..common.hub import refuse_pointer, unreachable
from ..common.packaged import model_folder
from ..common.registry import defined_in
from .backbones.load import SAVED_FORMAT, load_fast_tokenizer
from .heads import build_head
from .inputs import Settings
from .model import Model
from .quantized import FILES as QUANTIZED_FILES
from .quantized import QuantizedRuntime
from .weights import fingerprint

FORMAT_VERSION = 1
CONFIG_FILE = "config.json"
WEIGHTS_FILE = "model.safetensors"
ADAPTER_FILE = "adapter.safetensors"
TRAINING_FILE = "training.json"

ITS_NAME = "this-folder-or-hub-id"
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


def save_model(
    folder: Path, model: Model, *, cls: type, parameters: dict[str, Any], adapter: Adapter | None = None
) -> None:
    """Write a model and the arguments of its class into a folder; with an adapter, only the changes of the backbone.

    `config.json` contains the fingerprint of the weights, so that `load` detects mixed files of two models.
    """
    head, options = model.head_spec
    if adapter is None:
        tensors = {key: value.detach().cpu().contiguous() for key, value in model.state_dict().items()}
        model.tokenizer.save_pretrained(folder)
    else:
        tensors, needs = adapter
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
            "ready": model.ready,
        },
        "weights": fingerprint(tensors),
        **({} if adapter is None else {"adapter": needs}),
        **({} if model.encoder.quantized is None else {"quantized": model.encoder.quantized.save(folder)}),
    }
    texts = {
        CONFIG_FILE: _pretty(config),
        "pt_meta.json": _pretty({"type": "longdoc_reranker", "format": "hf", "package_hint": "pyterrier-longdoc"}),
        "README.md": _card(cls, parameters),
    }
    if model.recipe is not None:
        texts[TRAINING_FILE] = _pretty({"args": model.recipe, "history": model.history})
    for file, text in texts.items():
        (folder / file).write_text(text, encoding="utf-8")
    with replacing(folder / (WEIGHTS_FILE if adapter is None else ADAPTER_FILE)) as temporary_file:
        save_file(tensors, temporary_file, metadata={"format": "pt"})


def check_folder(folder: Path) -> None:
    """Raise ValueError for a folder with files that are not a model saved by this package."""
    names = {path.name for path in folder.glob("[!.]*")}
    is_ours = bool(names & {WEIGHTS_FILE, ADAPTER_FILE})  # without a configuration: a save that was interrupted
    if CONFIG_FILE in names:
        try:
            config = json.loads((folder / CONFIG_FILE).read_text(encoding="utf-8"))
        except ValueError:
            config = None
        is_ours = isinstance(config, dict) and config.get("format") == SAVED_FORMAT
    if names and not is_ours:
        raise ValueError(f"{str(folder)!r} contains other files, such as {min(names)!r}: save to a new folder")


def read_config(name: str | Path, *, revision: str | None = None) -> tuple[Path, dict[str, Any]]:
    """Return the folder and the config.json of a model: local, packaged or on the hub."""
    folder = model_folder(name)
    if not folder.is_dir():
        patterns = ["*.json", "*.safetensors", "*.txt", "*.model", "*.md", *QUANTIZED_FILES]
        try:
            folder = Path(huggingface_hub.snapshot_download(str(name), revision=revision, allow_patterns=patterns))
        except (LocalEntryNotFoundError, HFValidationError) as error:
            unreachable(str(name), error.__cause__ or error)
    path = folder / CONFIG_FILE
    config = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    if not config and any((folder / file).is_file() for file in (WEIGHTS_FILE, ADAPTER_FILE)):
        raise ValueError(
            f"{str(name)!r} has weights but no {CONFIG_FILE}, because saving was interrupted: save the model again"
        )
    if config.get("format") != SAVED_FORMAT:
        raise ValueError(
            f"{str(name)!r} was not saved by this package; to start from a Hugging Face checkpoint, use it as the "
            f"backbone, e.g. MaxP({str(name)!r})"
        )
    if config["format_version"] > FORMAT_VERSION:
        raise ValueError(f"{str(name)!r} was saved by a newer version: update pyterrier_longdoc")
    return folder, config


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
    module = encoder(backbone)
    if "quantized" in config:
        module.quantized = QuantizedRuntime.load(folder, config["quantized"])
    model = Model(module, tokenizer, head, settings, **arguments)
    model.load_state_dict(_read_tensors(folder / WEIGHTS_FILE, config), strict=True)
    return model.eval()


def _read_tensors(file: Path, config: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Return the weights in a file; ValueError if they are not those of the configuration."""
    refuse_pointer(file)
    tensors = load_file(file)
    if fingerprint(tensors) != config.get("weights"):
        raise ValueError(
            f"the weights in {str(file.parent)!r} do not belong to its {CONFIG_FILE}: the folder mixes two models; "
            f"save the model again"
        )
    return tensors


def _card(cls: type, parameters: dict[str, Any]) -> str:
    name, module = cls.__name__, defined_in(cls).get("module")
    return _CARD.format(
        name=name,
        its_name=ITS_NAME,
        import_line="import pyterrier_longdoc as ld" if module is None else f"from {module} import {name}",
        class_name=f"ld.{name}" if module is None else name,
        backbone=parameters["backbone"],
        parameters=_json(parameters),
    )


def _pretty(content: dict[str, Any]) -> str:
    return _json(content, indent=2, sort_keys=True) + "\n"


def _json(content: Any, **options: Any) -> str:
    return json.dumps(content, default=lambda number: number.tolist(), **options)  # numpy's numbers and arrays


# As an adapter.


Adapter = tuple[dict[str, torch.Tensor], dict[str, str | None]]
"""A model as a difference from its backbone, or from the encoder of another adapter on it: tensors, and what they need.

After LoRA training, each matrix differs from the backbone's by a low-rank product `B A`. These products and the few
weights outside the backbone take one or two megabytes instead of ninety. After full training, a matrix takes one byte
per weight, and models that start from the same encoder share its difference.
"""


def adapter_of(model: Model, untrained: Model, upon: str | None) -> Adapter:
    """Return the changes since `untrained`, the same model before training, or since the adapter `upon`."""
    base, upon = _pretrained(untrained), full_name(upon)
    needs = {"base": fingerprint(base), "upon": upon, "upon_weights": None}
    if upon is not None:
        changes = _encoder_of(upon)
        base, needs["upon_weights"] = restore(changes, base), fingerprint(changes)
    state = {name: value.detach().cpu() for name, value in model.state_dict().items()}
    return compress(state, base), needs


def apply_adapter(model: Model, folder: Path, config: dict[str, Any], backbone: str) -> None:
    """Add an adapter to an untrained model; ValueError if it belongs to other weights."""
    tensors = _read_tensors(folder / ADAPTER_FILE, config)
    base, upon = _pretrained(model), config["adapter"]["upon"]
    if fingerprint(base) != config["adapter"]["base"]:
        raise ValueError(f"the adapter in {str(folder)!r} belongs to other weights than those of {backbone!r}")
    if upon is not None:
        changes = _encoder_of(upon)
        if fingerprint(changes) != config["adapter"]["upon_weights"]:
            raise ValueError(
                f"the adapter in {str(folder)!r} is based on other weights than those now in {upon!r}: restore "
                f"them, or train and save this model again"
            )
        base = restore(changes, base)
    model.load_state_dict(restore(tensors, base), strict=True)


def _pretrained(model: Model) -> dict[str, torch.Tensor]:
    """Return the weights that LoRA adapts, those of the backbone and of a pre-trained aggregator."""
    prefixes = (_ENCODER, *(f"head.{name}." for name in model.head.pretrained()))
    return {name: value.cpu() for name, value in model.state_dict().items() if name.startswith(prefixes)}


def _encoder_of(adapter: str) -> dict[str, torch.Tensor]:
    """Return the changes of a saved adapter to the backbone's weights."""
    folder, config = read_config(adapter)
    differences = _read_tensors(folder / ADAPTER_FILE, config)
    return {name: value for name, value in differences.items() if name.startswith(_ENCODER)}


_ENCODER = "encoder.backbone."


def compress(state: Mapping[str, torch.Tensor], base: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the difference between two states, with each changed matrix in the smaller of two forms.

    A matrix `(m, n)` with a low-rank difference becomes `name::B (m, r)` and `name::A (r, n)` in fp16, any other matrix
    `name::rows (m, n)` in int8 and `name::scales (m, 1)`. Changed vectors and weights outside `base` stay in fp16.
    """
    differences: dict[str, torch.Tensor] = {}
    for name, value in state.items():
        if name in base and torch.equal(value, base[name]):
            continue
        if name not in base or value.ndim != 2:
            differences[name] = _half(value)
        else:
            difference = value.double() - base[name].double()
            differences |= _factors(name, difference) or _bytes(name, difference)
    return differences


def restore(differences: Mapping[str, torch.Tensor], base: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return all weights of the model: `base` plus the differences from `compress`."""
    state = dict(base)
    for name, value in differences.items():
        matrix, _, kind = name.partition("::")
        if kind == "B":
            state[matrix] = base[matrix] + value.float() @ differences[matrix + "::A"].float()
        elif kind == "rows":
            state[matrix] = base[matrix] + value.float() * differences[matrix + "::scales"]
        elif not kind:
            state[name] = value.to(base[name].dtype) if name in base else value.float()
    return state


def _factors(name: str, difference: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return a matrix as a low-rank product, or {} if that is not smaller than one byte per weight."""
    u, s, v = torch.linalg.svd(difference, full_matrices=False)
    rank = int((s > s[0] * 1e-4).sum())
    if 2 * rank * sum(difference.shape) >= difference.numel():
        return {}
    root = s[:rank].sqrt()
    return {f"{name}::B": _half(u[:, :rank] * root), f"{name}::A": _half(root[:, None] * v[:rank])}


def _bytes(name: str, difference: torch.Tensor) -> dict[str, torch.Tensor]:
    scales = difference.float().abs().amax(dim=1, keepdim=True) / 127
    rows = (difference / scales.clamp_min(torch.finfo(torch.float32).tiny)).round().to(torch.int8)
    return {f"{name}::rows": rows.contiguous(), f"{name}::scales": scales.contiguous()}


def _half(value: torch.Tensor) -> torch.Tensor:
    return value.half().contiguous() if value.is_floating_point() else value.contiguous()
