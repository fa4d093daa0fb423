"""Whether weights are still those of which something was made: an export, embeddings, token states."""

from __future__ import annotations

import functools
import zlib
from collections.abc import Hashable, Iterable

import torch
from torch import nn

CHUNK = 2**20
"""Numbers that an accelerator multiplies at a time."""


class WeightsWatch:
    """Tells whether weights have changed since it last looked at them.

    torch counts the writes to a tensor, but not those through `.data` or by fused optimizers. These show in the
    contents alone. To read those of 22 million weights takes about 30 ms: little for a run, much for a single pass.
    """

    def __init__(self) -> None:
        self._writes: Hashable = None
        self._contents: Hashable = None

    def forget(self) -> None:
        """The next look will find the weights changed."""
        self._writes = self._contents = None

    def changed(self, *modules: nn.Module, contents: bool) -> bool:
        """Looks at all parameters and buffers of some modules.

        Args:
            modules: the same ones every time, in the same order.
            contents: also read what they hold. Without it only exchanged tensors and counted writes are noticed; of
                tensors made within `torch.inference_mode()`, whose writes are not counted, contents are always read.

        Returns:
            Whether anything is not as it was at the last look; True at the first one.
        """
        tensors = [tensor for module in modules for tensor in (*module.parameters(), *module.buffers())]
        uncounted = any(tensor.is_inference() for tensor in tensors)
        writes = tuple((id(tensor), None if tensor.is_inference() else tensor._version) for tensor in tensors)
        if writes == self._writes and not (contents or uncounted):
            return False
        before = self._writes, self._contents
        self._writes, self._contents = writes, fingerprints(tensors)
        return before != (self._writes, self._contents)


def fingerprints(tensors: Iterable[torch.Tensor]) -> tuple[int, ...]:
    """One number or more for each tensor; that other values give the same ones has a chance of about one in 2^32."""
    found: list[int] = []
    for tensor in tensors:
        values = tensor.detach().reshape(-1)
        if values.device.type == "cpu":
            found.append(zlib.crc32(values.view(torch.uint8).numpy().data))
        else:
            found += weighted_sums(values).tolist()
    return tuple(found)


def weighted_sums(values: torch.Tensor) -> torch.Tensor:
    """The same for accelerators, from whose memory weights are not copied for this: a multilinear hash.

    Args:
        values: `(n,)` of any type.

    Returns:
        Sums of the values' bits times random numbers, modulo 2^64, one for each `CHUNK`.
    """
    # At most 32 bits at a time: the sign bits of two 64-bit numbers would cancel out.
    bits = values.view({1: torch.uint8, 2: torch.int16}.get(values.element_size(), torch.int32))
    factors = _factors(CHUNK, values.device)
    sums = [(chunk.long() * factors[: len(chunk)]).sum() for chunk in bits.split(CHUNK)]
    return torch.stack(sums)


@functools.cache
def _factors(count: int, device: torch.device) -> torch.Tensor:
    """`(count,)` random 64-bit numbers, always the same ones."""
    generator = torch.Generator().manual_seed(0)
    return torch.randint(-(2**63), 2**63 - 1, (count,), dtype=torch.int64, generator=generator).to(device)
