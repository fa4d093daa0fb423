"""The compact format of the packaged models: changes of the weights since the pre-trained ones.

After LoRA training, each matrix differs from the backbone's by a low-rank product `B A`. These products and the few
weights outside the backbone take one or two megabytes instead of ninety. After full training, a matrix takes one byte
per weight, and another packaged model with the same encoder refers to it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from ..common.files import MARKER
from ..common.packaged import model_folder
from .model import Model
from .saved import CONFIG_FILE, WEIGHTS_FILE, pretty, read_tensors
from .weights import fingerprint

CHANGES_FILE = "changes.safetensors"
_ENCODER = "encoder.backbone."


def pack(folder: Path, untrained: Model, *, encoder_of: str | None = None) -> None:
    """Replace the weights and the tokenizer in a saved model's folder by the changes since the same model, untrained.

    With `encoder_of`, a packaged model, the changes of the encoder are those since that model. Scores change in the
    third or fourth digit.
    """
    base = _pretrained(untrained)
    origin = {"base": fingerprint(base), "encoder_of": encoder_of, "encoder": None}
    if encoder_of is not None:
        changes = _encoder_changes(encoder_of)
        base, origin["encoder"] = restore(changes, base), fingerprint(changes)
    tensors = compress(load_file(folder / WEIGHTS_FILE), base)
    config = json.loads((folder / CONFIG_FILE).read_text(encoding="utf-8"))
    config |= {"compact": origin, "weights": fingerprint(tensors)}
    (folder / CONFIG_FILE).write_text(pretty(config), encoding="utf-8")
    save_file(tensors, folder / CHANGES_FILE, metadata={"format": "pt"})
    for file in (folder / MARKER, folder / WEIGHTS_FILE, *folder.glob("tokenizer*")):
        file.unlink()


def unpack(model: Model, folder: Path, config: dict[str, Any]) -> None:
    """Add the changes in a folder to an untrained model; ValueError if they belong to other weights."""
    base, origin = _pretrained(model), config["compact"]
    if fingerprint(base) != origin["base"]:
        raise ValueError(
            f"the changes in {str(folder)!r} belong to other weights than those of its backbone "
            f"{config['parameters']['backbone']!r}: install the version with which the model was made"
        )
    if origin["encoder_of"] is not None:
        changes = _encoder_changes(origin["encoder_of"])
        if fingerprint(changes) != origin["encoder"]:
            raise ValueError(
                f"the changes in {str(folder)!r} belong to other weights than those in {origin['encoder_of']!r}: "
                f"package the model again"
            )
        base = restore(changes, base)
    model.load_state_dict(restore(read_tensors(folder / CHANGES_FILE, config), base), strict=True)


def _pretrained(model: Model) -> dict[str, torch.Tensor]:
    """Return the weights of the backbone and of a pre-trained aggregator."""
    prefixes = (_ENCODER, *(f"head.{name}." for name in model.head.pretrained()))
    return {name: value.cpu() for name, value in model.state_dict().items() if name.startswith(prefixes)}


def _encoder_changes(packaged: str) -> dict[str, torch.Tensor]:
    """Return the changes of a packaged model to the backbone's weights."""
    changes = load_file(model_folder(packaged) / CHANGES_FILE)
    return {name: value for name, value in changes.items() if name.startswith(_ENCODER)}


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
