"""Suggest similar names."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches


def did_you_mean(name: str, names: Iterable[str]) -> str:
    """Return a suggestion of the most similar name for the end of a message; "" if none is similar.

    Example:
        >>> did_you_mean("batchsize", ["batch_size", "device"]), did_you_mean("colour", ["batch_size", "device"])
        ("; did you mean 'batch_size'?", '')
    """
    meant = get_close_matches(name, list(names), n=1, cutoff=0.6)
    return f"; did you mean {meant[0]!r}?" if meant else ""
