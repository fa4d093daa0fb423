"""Whether two models have the same weights, and whether a model's are still those of which something was made."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from hashlib import blake2b
from zlib import crc32

import torch
from torch import nn


def fingerprint(weights: Mapping[str, torch.Tensor]) -> str:
    """Tells whether two models have the same weights, wherever they are."""
    digest = blake2b(digest_size=16)
    for name in sorted(weights):
        digest.update(name.encode())
        digest.update(_contents(weights[name]))
    return digest.hexdigest()


def _contents(tensor: torch.Tensor) -> memoryview:
    return tensor.detach().cpu().reshape(-1).view(torch.uint8).numpy().data


class WeightsWatch:
    """Tells whether weights have changed since it last looked at them: of an export, of embeddings, of token states.

    torch counts the writes to a tensor, but not those through `.data` or by fused optimizers. These show in the
    contents alone, of which checksums are kept: those of 22 million weights take about 0.02 s, a `fingerprint` 0.15 s.
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
        self._writes = writes
        self._contents = tuple(crc32(_contents(tensor)) for tensor in tensors)
        return before != (self._writes, self._contents)
