"""Running a transformer to look at it, and leaving it as it was."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from .warnings import muted


@contextmanager
def restoring(transformer: Any, *attributes: str) -> Iterator[list[Any]]:
    """Run a transformer, and the models that select its windows, without a trace.

    Nobody is warned, no score is stored, and afterwards `coverage` and the named attributes are what they were.
    """
    transformers = [transformer, *_selecting(transformer)]
    names = ("coverage", "score_cache", *attributes)
    before = [{name: copy.copy(getattr(each, name)) for name in names if hasattr(each, name)} for each in transformers]
    for each, values in zip(transformers, before, strict=True):
        if "score_cache" in values:
            each.score_cache = None
    try:
        with muted():
            yield transformers
    finally:
        for each, values in zip(transformers, before, strict=True):
            for name, value in values.items():
                setattr(each, name, value)


def _selecting(model: Any) -> list[Any]:
    """Return the model that selects windows for this one, the one that does so for that, and so on."""
    preselect = getattr(model, "preselect", None)
    inner = getattr(getattr(preselect, "selector", preselect), "model", None)
    return [] if inner is None else [inner, *_selecting(inner)]
