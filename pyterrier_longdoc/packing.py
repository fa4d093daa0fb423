"""Passes without padding: windows of unequal length in one row, each attending to itself alone.

Shapes: V windows of a pass, T tokens of the longest, R real tokens of all, A attention heads, D size of a head, H
hidden size.
"""

from __future__ import annotations

import functools
import inspect
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from itertools import groupby
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.utils import is_flash_attn_2_available

FAMILIES = ("bert", "camembert", "distilbert", "electra", "modernbert", "roberta", "xlm-roberta")
"""Families that tests/test_packing.py finds to have the same states packed and padded."""

_POSITIONS_FROM_IDS = ("camembert", "roberta", "xlm-roberta")

_INPUTS = {"input_ids", "attention_mask", "token_type_ids", "position_ids"}

_NAME = "longdoc_packed"

Kernel = Callable[..., torch.Tensor]
"""Called with `(R, A, D)` queries, keys and values, twice the `(V + 1,)` int32 boundaries, twice the longest window,
and by name `scale` and `window`, how many tokens to the left and right are seen, (-1, -1) for all; returns
`(R, A, D)`."""

_packing: ContextVar[Packing | None] = ContextVar("packing", default=None)
"""Of the pass under way in this thread. Another thread that uses the model meanwhile has none: it attends as before."""

_locks: WeakKeyDictionary[nn.Module, threading.Lock] = WeakKeyDictionary()
"""One for each model: during a pass it attends in another way, which other threads must not see."""
_making_lock = threading.Lock()


@dataclass(frozen=True, eq=False)
class Packing:
    """The real tokens of a pass in one row.

    Attributes:
        inputs: what the backbone reads, each `(1, R)`.
        lengths: V, real tokens of each window.
        boundaries: `(V + 1,)` int32, where each window begins in the row, and where the last one ends.
        place: `(R,)` int64, where each token stands in the padded pass, its rows one after the other.
        shape: V and T.
    """

    inputs: dict[str, Any]
    lengths: tuple[int, ...]
    boundaries: torch.Tensor
    place: torch.Tensor
    shape: tuple[int, int]

    def encode(self, backbone: Any) -> torch.Tensor:
        """The last layer's states `(1, R, H)`."""
        with _attending(backbone, self):
            return backbone(**self.inputs).last_hidden_state

    def padded(self, states: torch.Tensor) -> torch.Tensor:
        """States `(1, R, H)` as `(V, T, H)`, zeros at padding."""
        windows, length = self.shape
        dense = states.new_zeros(windows * length, states.shape[-1])
        return dense.index_copy_(0, self.place, states[0]).view(windows, length, -1)


def pack(backbone: Any, inputs: dict[str, Any], mask: torch.Tensor) -> Packing | None:
    """A pass without its padding; None where it must, or had better, be left as it is.

    It is left where nothing is padded, in training, for families other than `FAMILIES`, where the user has chosen an
    implementation of attention or compiled the model, and where `worthwhile` says so; with transformers 4, whose
    encoders do not let their attention be exchanged, always.

    Args:
        backbone: a Hugging Face encoder.
        inputs: what it would read, each `(V, T)`.
        mask: `(V, T)` bool, True = real.
    """
    if inputs["attention_mask"] is None or not _can_pack(backbone, inputs):
        return None
    config = backbone.config
    if not worthwhile(mask.device, _precision(backbone), config.hidden_size // config.num_attention_heads):
        return None
    place = mask.flatten().nonzero().squeeze(1)
    lengths = mask.sum(1)
    boundaries = nn.functional.pad(lengths.cumsum(0), (1, 0))
    column = place % mask.shape[1]
    number = torch.arange(len(place), device=place.device) - boundaries[:-1].repeat_interleave(lengths)
    # With padding inside a window, neighbors in the row may be too far apart to see each other.
    if "sliding_attention" in getattr(config, "layer_types", ()) and not torch.equal(column, number):
        return None
    values = {name: values for name, values in inputs.items() if name != "attention_mask"}
    values["position_ids"] = _positions(config, inputs)
    return Packing(
        inputs={name: value.flatten()[place].unsqueeze(0) for name, value in values.items()},
        lengths=tuple(lengths.tolist()),
        boundaries=boundaries.int(),
        place=place,
        shape=(mask.shape[0], mask.shape[1]),
    )


def worthwhile(device: torch.device, dtype: torch.dtype, head_size: int) -> bool:
    """Whether packing is expected to be faster than padding.

    It is where a kernel takes windows of unequal length in one call, which a GPU has in half precision. Elsewhere each
    length needs a call of its own, which saves too little padding, as the windows of a pass are neighbors in length;
    tests/benchmarks/bench_packing.py measures it.
    """
    return kernel_for(device, dtype, head_size) is not None


@functools.cache
def kernel_for(device: torch.device, dtype: torch.dtype, head_size: int) -> Kernel | None:
    """Attention over windows of unequal length, by flash-attn if it is installed, else by torch 2.12 or later.

    Both need an NVIDIA GPU from Ampere on, half precision, and heads of at most 256 numbers, a multiple of 8.

    Returns:
        None where there is no such kernel.
    """
    if device.type != "cuda" or dtype not in (torch.bfloat16, torch.float16) or head_size % 8 or head_size > 256:
        return None
    if torch.version.hip is not None or torch.cuda.get_device_capability(device) < (8, 0):
        return None
    return flash_attn_kernel() or torch_kernel()


def flash_attn_kernel() -> Kernel | None:
    """That of the package flash-attn, 2.3.3 or later; None if it is not installed or made for another torch."""
    if not is_flash_attn_2_available():
        return None
    try:
        from flash_attn import flash_attn_varlen_func
    except ImportError:
        return None

    def attend(*args: Any, scale: float | None, window: tuple[int, int]) -> torch.Tensor:
        return flash_attn_varlen_func(*args, softmax_scale=scale, window_size=window)

    return attend


def torch_kernel() -> Kernel | None:
    """Torch's own; None before torch 2.12, where it lacks windows or cannot be kept from looking at the batch."""
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return None
    if not {"window_size", "num_splits"} <= inspect.signature(varlen_attn).parameters.keys():
        return None

    def attend(*args: Any, scale: float | None, window: tuple[int, int]) -> torch.Tensor:
        # One split: how keys are split up otherwise depends on the longest window of the pass.
        mixed: Any = varlen_attn(*args, scale=scale, window_size=window, num_splits=1)
        return mixed

    return attend


def attend_in_groups(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    lengths: Sequence[int],
    *,
    scale: float | None,
    reach: int | None,
) -> torch.Tensor:
    """Attention without a kernel for unequal lengths: neighbors of equal length make a batch, which needs no mask.

    Args:
        query: `(R, A, D)`.
        key: `(R, A, D)`.
        value: `(R, A, D)`.
        lengths: tokens of each window.
        scale: of the dot products; None for one over the root of D.
        reach: how many tokens to the left and right are seen; None for all.

    Returns:
        `(R, A, D)`.
    """
    parts, start = [], 0
    for length, group in groupby(lengths):
        shape = (len(list(group)), length)
        end = start + shape[0] * length
        q, k, v = (row[start:end].unflatten(0, shape).transpose(1, 2) for row in (query, key, value))
        band = None if reach is None or length <= reach + 1 else _band(length, reach, query.device)
        states = nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=band, scale=scale)
        parts.append(states.transpose(1, 2).flatten(0, 1))
        start = end
    return torch.cat(parts)


def attend_packed(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """The attention function that transformers calls: `(1, A, R, D)` queries, keys and values to `(1, R, A, D)`."""
    packing = _packing.get()
    if packing is None:
        return AttentionInterface()["sdpa"](module, query, key, value, attention_mask, scaling=scaling, **kwargs)
    q, k, v = (states[0].transpose(0, 1) for states in (query, key, value))
    # transformers counts the token itself.
    reach = None if sliding_window is None else sliding_window - 1
    kernel = kernel_for(query.device, query.dtype, query.shape[-1])
    if kernel is None:
        mixed = attend_in_groups(q, k, v, packing.lengths, scale=scaling, reach=reach)
    else:
        window = (-1, -1) if reach is None else (reach, reach)
        ends, longest = packing.boundaries, max(packing.lengths)
        mixed = kernel(q, k, v, ends, ends, longest, longest, scale=scaling, window=window)
    return mixed.unsqueeze(0), None


def _mask_packed(*args: Any, **kwargs: Any) -> torch.Tensor | None:
    return AttentionMaskInterface()["sdpa"](*args, **kwargs) if _packing.get() is None else None


AttentionInterface.register(_NAME, attend_packed)
AttentionMaskInterface.register(_NAME, _mask_packed)


@contextmanager
def _attending(backbone: Any, packing: Packing) -> Iterator[None]:
    """Within, the model attends inside the windows of `packing`; afterwards by SDPA as before."""
    with _making_lock:
        lock = _locks.setdefault(backbone, threading.Lock())
    config = backbone.config
    with lock:
        token = _packing.set(packing)
        config._attn_implementation = _NAME
        try:
            yield
        finally:
            config._attn_implementation = "sdpa"
            _packing.reset(token)


def _can_pack(backbone: Any, inputs: dict[str, Any]) -> bool:
    config = backbone.config
    return (
        config.model_type in FAMILIES
        # Code that comes with a checkpoint may go by the name of a family.
        and type(backbone).__module__.startswith("transformers.")
        and getattr(backbone, "_supports_attention_backend", False)
        and getattr(backbone, "_compiled_call_impl", None) is None
        and config._attn_implementation == "sdpa"
        and not getattr(config, "is_decoder", False)
        and not backbone.training
        and not torch.is_grad_enabled()
        and inputs.keys() <= _INPUTS
    )


def _precision(backbone: Any) -> torch.dtype:
    """That of queries and keys."""
    kind = backbone.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else backbone.dtype


def _positions(config: Any, inputs: dict[str, Any]) -> torch.Tensor:
    """`(V, T)` the position ids that the backbone would use in the padded pass."""
    ids = inputs["input_ids"]
    if "position_ids" in inputs:
        return inputs["position_ids"]
    if config.model_type in _POSITIONS_FROM_IDS:
        real = ids != config.pad_token_id
        return real.cumsum(1) * real + config.pad_token_id
    return torch.arange(ids.shape[1], device=ids.device).expand_as(ids)


def _band(length: int, reach: int, device: torch.device) -> torch.Tensor:
    """`(length, length)` bool, whether two tokens see each other."""
    position = torch.arange(length, device=device)
    return (position.unsqueeze(1) - position).abs() <= reach
