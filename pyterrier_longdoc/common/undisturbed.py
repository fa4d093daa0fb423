"""Running a transformer to look at it, and leaving it as it was."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from .notices import unheard


@contextmanager
def undisturbed(transformer: Any, *attributes: str) -> Iterator[list[Any]]:
    """Leaves no trace of having run a transformer: what it has warned of, how much it read, and scores on disk.

    The same holds for the model that selects its windows, if there is one. Meanwhile nobody is warned.

    Args:
        transformer: any; what it lacks of the attributes does not matter.
        *attributes: further ones that have their values again afterwards, if they are set meanwhile.

    Yields:
        The transformer, and the models that select windows for it.
    """
    transformers = [transformer, *_selecting(transformer)]
    names = ("coverage", "score_cache", *attributes)
    before = [{name: copy.copy(getattr(each, name)) for name in names if hasattr(each, name)} for each in transformers]
    for each, own in zip(transformers, before, strict=True):
        if "score_cache" in own:
            each.score_cache = None
    try:
        with unheard():
            yield transformers
    finally:
        for each, own in zip(transformers, before, strict=True):
            for name, value in own.items():
                setattr(each, name, value)


def _selecting(model: Any) -> list[Any]:
    """The model that selects windows for this one, the one that does so for that, and so on."""
    preselect = getattr(model, "preselect", None)
    inner = getattr(getattr(preselect, "selector", preselect), "model", None)
    return [] if inner is None else [inner, *_selecting(inner)]
