"""The state of a training on disk: one safetensors file, replaced as a whole.

Tensors are named `model/PARAMETER`, `best/PARAMETER` and `optimizer/PARAMETER/QUANTITY`; all else is JSON in the
file's header.
"""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import nn

STATE_FILE = "training-state.safetensors"
_FORMAT = "1"


def trained_tensors(scorer: nn.Module) -> dict[str, torch.Tensor]:
    """What training changes: the trainable parameters, and the buffers that belong to a saved model."""
    parameters = {name: p.detach() for name, p in scorer.named_parameters() if p.requires_grad}
    saved = scorer.state_dict().keys()
    return {**parameters, **{name: buffer for name, buffer in scorer.named_buffers() if name in saved}}


def restore_tensors(scorer: nn.Module, tensors: dict[str, torch.Tensor]) -> None:
    """Writes tensors of `trained_tensors` back."""
    with torch.no_grad():
        for name, tensor in trained_tensors(scorer).items():
            tensor.copy_(tensors[name])


def optimizer_tensors(optimizer: torch.optim.Optimizer, scorer: nn.Module) -> dict[str, torch.Tensor]:
    """The optimiser's state by `PARAMETER/QUANTITY`."""
    names = {id(p): name for name, p in scorer.named_parameters()}
    return {
        f"{names[id(parameter)]}/{quantity}": value
        for parameter, state in optimizer.state.items()
        for quantity, value in state.items()
    }


def restore_optimizer(optimizer: torch.optim.Optimizer, scorer: nn.Module, tensors: dict[str, torch.Tensor]) -> None:
    """Writes tensors of `optimizer_tensors` back."""
    parameters = dict(scorer.named_parameters())
    for key, value in tensors.items():
        name, _, quantity = key.rpartition("/")
        optimizer.state[parameters[name]][quantity] = value.to(parameters[name].device)


def save_state(folder: Path, sections: dict[str, dict[str, torch.Tensor]], about: dict[str, Any]) -> None:
    """Writes a state in place of the last one, which stays untouched until the new one is complete on disk.

    Args:
        folder: made if need be.
        sections: tensors by name by section.
        about: JSON-able values.

    Raises:
        OSError: if it cannot be written, e.g. as the disk is full; the last state is still there.
    """
    tensors = {
        f"{section}/{name}": tensor.detach().cpu().contiguous().clone()
        for section, named in sections.items()
        for name, tensor in named.items()
    }
    part = None
    try:
        folder.mkdir(parents=True, exist_ok=True)
        # What a kill left half-written; this folder belongs to one run.
        for abandoned in folder.glob(f"{STATE_FILE}.*.part"):
            abandoned.unlink()
        handle, part = tempfile.mkstemp(prefix=f"{STATE_FILE}.", suffix=".part", dir=folder)
        os.close(handle)
        save_file(tensors, part, metadata={"format": _FORMAT, "about": json.dumps(about)})
        _flush(Path(part))
        os.replace(part, folder / STATE_FILE)
        part = None
        if os.name == "posix":  # elsewhere folders cannot be opened
            _flush(folder)
    except Exception as error:
        kept = "; the last state is still there" if (folder / STATE_FILE).exists() else ""
        raise OSError(f"the state of the training cannot be written to {str(folder)!r}: {error}{kept}") from error
    finally:
        if part is not None:
            Path(part).unlink(missing_ok=True)


def load_state(folder: Path) -> tuple[dict[str, dict[str, torch.Tensor]], dict[str, Any]] | None:
    """Reads the state that `save_state` wrote.

    Returns:
        Its sections and values; None if there is none.

    Raises:
        ValueError: if it cannot be read. It is left as it is.
    """
    path = folder / STATE_FILE
    if not path.exists():
        return None
    sections: dict[str, dict[str, torch.Tensor]] = {}
    try:
        with safe_open(path, framework="pt") as file:
            about = file.metadata()
            if about.get("format") != _FORMAT:
                raise ValueError(f"its format is {about.get('format')!r}, not {_FORMAT!r}")
            for key in file.keys():  # noqa: SIM118 - no mapping
                section, _, name = key.partition("/")
                sections.setdefault(section, {})[name] = file.get_tensor(key)
            return sections, json.loads(about["about"])
    except Exception as error:
        raise ValueError(
            f"the state of the training in {str(path)!r} cannot be read: {error}. It was left as it is; move it away "
            f"or restore a copy, or name another checkpoint folder to start afresh"
        ) from error


def _flush(path: Path) -> None:
    """Waits until a file, or a folder's list of files, is on disk and not only in memory."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
