"""Weights: their version, and copying them from another model."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from hashlib import blake2b
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from .devices import float32_by_default
from .heads.base import Head, build_head

HeadSpec = tuple[str, dict[str, Any]]
"""Registered name and options of a head."""


def fingerprint(weights: Mapping[str, torch.Tensor]) -> str:
    """Return a digest that is equal for equal weights, on any device."""
    digest = blake2b(digest_size=16)
    for name in sorted(weights):
        digest.update(name.encode())
        digest.update(weights[name].detach().cpu().reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


_VERSIONS: WeakKeyDictionary[nn.Module, tuple[list[Hashable], object]] = WeakKeyDictionary()
"""The last version of the weights of each module, with what it was recognized by."""


def version_of(module: nn.Module) -> Hashable:
    """Return the version of a module's weights: another one when they are written, replaced or moved.

    It is meant for keys in the memory of a process: take it before computing what is stored under it. A module without
    weights has the version None. Writes through `.data` and by fused optimizers other than that of `fit` are not seen:
    write under `torch.no_grad()` instead.

    It looks at the tensors, not at their contents, and so takes far less time than a `fingerprint`.
    """
    found: list[Hashable] = []
    for part in module.modules():
        # `parameters()` and `buffers()` take several times as long, as much as the comparison with a small document.
        for tensor in (*part._parameters.values(), *part._buffers.values()):
            if tensor is not None:
                # The reference keeps torch from giving the identity of a freed storage to a new one.
                found += id(tensor), StorageWeakRef(tensor.untyped_storage()), tensor.data_ptr()
                # A backbone may make buffers in a run, which have no count.
                found.append(None if tensor.is_inference() else tensor._version)
    if not found:
        return None
    known = _VERSIONS.get(module)
    if known is None or known[0] != found:
        _VERSIONS[module] = known = found, object()
    return known[1]


def copy_inference_tensors(model: nn.Module) -> None:
    """Replace weights that were made in inference mode by copies: torch neither trains them nor counts their writes."""
    copies: dict[torch.Tensor, torch.Tensor] = {}  # tied weights stay tied
    with torch.inference_mode(False):
        for part in model.modules():
            for name, tensor in (*part._parameters.items(), *part._buffers.items()):
                if tensor is not None and tensor.is_inference():
                    if tensor not in copies:
                        is_parameter, copy = isinstance(tensor, nn.Parameter), tensor.clone()
                        copies[tensor] = nn.Parameter(copy, tensor.requires_grad) if is_parameter else copy
                    setattr(part, name, copies[tensor])


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Seed random weights without changing the global random state."""
    with float32_by_default(), torch.random.fork_rng(devices=range(torch.cuda.device_count())):
        torch.manual_seed(seed)
        yield


def seeded_head(head: HeadSpec, hidden_size: int, seed: int, *, channels: int = 1) -> Head:
    """Return a new head whose weights depend only on `seed`."""
    name, options = head
    with seeded(seed):
        return build_head(name, hidden_size, channels=channels, **options)


def check_head(head: HeadSpec) -> None:
    """Raise the error of a head for its options, without weights, and without a look at GPUs or the random state."""
    with torch.device("meta"):
        build_head(head[0], 1, **head[1])


def exchange_head(model: Any, head: HeadSpec, seed: int) -> bool:
    """Give the head of a model other options that keep its weights; return False if they do not."""
    new, old = seeded_head(head, model.backbone.hidden_size, seed, channels=model.backbone.channels), model.head
    changed = {name for name in head[1] if head[1][name] != model.head_spec[1].get(name)}
    if type(new) is not type(old) or not changed <= set(new.tunable):
        return False
    new.load_state_dict(old.state_dict())
    model.head, model.head_spec = new, head
    model.eval()
    return True


def start_from(model: Any, other: Any, seed: int) -> None:
    """Copy the encoder of another model, and the matching weights of its head.

    Weights that the other model lacks stay random, by seed. In that case, and if the other encoder has additional
    layers, scores make no sense before training.

    Of a bi-encoder, only the backbone is copied, because no head was trained on its states. The same holds for encoders
    whose vectors represent different things.

    Raises:
        ValueError: if the encoders or the vocabularies differ.
    """
    if model.tokenizer.get_vocab() != other.tokenizer.get_vocab():
        raise ValueError("the other model's tokenizer has another vocabulary: give both models the same backbone")
    encoder, other_encoder = model.encoder, other.encoder
    only_backbone = encoder.vector_kind != other_encoder.vector_kind or not isinstance(other.head, Head)
    # Other parts of the encoders may differ.
    for part in ("backbone",) if only_backbone else ("backbone", "representation"):
        different = _different(getattr(encoder, part), getattr(other_encoder, part))
        if different:
            raise ValueError(
                f"the other model has another kind of encoder ({different[0]} differs): give both the same backbone "
                f"and pooling"
            )
    if only_backbone:
        encoder.backbone.load_state_dict(other_encoder.backbone.state_dict())
        ready = False
    else:
        # A module or parameter of an encoder is copied as a whole.
        parts = {name.partition(".")[0] for name in _different(encoder, other_encoder)}
        lost, new = (
            [name for name in e.state_dict() if name.partition(".")[0] in parts] for e in (other_encoder, encoder)
        )
        shared = {name: value for name, value in other_encoder.state_dict().items() if name not in lost}
        encoder.load_state_dict(shared, strict=False)
        alike = not lost and (encoder.identity_at_start or not new)
        with seeded(seed):
            ready = _start_head(model, other)
        ready = ready and encoder.reads_like(other_encoder) and alike
    model.origin, model.source = "copied" if ready else "random", ""
    model.trained_queries |= other.trained_queries


def _start_head(model: Any, other: Any) -> bool:
    """Copy the matching weights of another head; return whether none stay random."""
    new, old, is_ready = model.head, other.head, other.origin != "random"
    if type(new) is type(old) and not _different(new, old):
        new.load_state_dict(old.state_dict())
        return is_ready
    start = replace(model.initial_weights(), final=getattr(old, "final", None))
    # A head that makes sense with a checkpoint's last layer has one for the same vectors.
    if old.ready_from(start):
        new.warm_start(start)
        return new.ready_from(start) and is_ready
    return model.origin != "random"


def _different(module: nn.Module, other: nn.Module) -> list[str]:
    """Return the weights that are missing in one of the modules or differ in shape."""
    shapes, others = ({name: value.shape for name, value in m.state_dict().items()} for m in (module, other))
    return [name for name in {**shapes, **others} if shapes.get(name) != others.get(name)]
