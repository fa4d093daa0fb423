"""Trial runs of a transformer, which leave it as it was."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from .warnings import muted


@contextmanager
def restoring(transformer: Any, *attributes: str) -> Iterator[list[Any]]:
    """Run a transformer, and the models that select its windows, without a trace.

    It gives no warning and stores no score; afterwards `coverage` and the named attributes have their old values.
    """
    transformers = [transformer, *_selecting(transformer)]
    names = ("coverage", "score_cache", *attributes)
    states = [{name: copy.copy(getattr(each, name)) for name in names if hasattr(each, name)} for each in transformers]
    for each, state in zip(transformers, states, strict=True):
        if "score_cache" in state:
            each.score_cache = None
    try:
        with muted():
            yield transformers
    finally:
        for each, state in zip(transformers, states, strict=True):
            for name, value in state.items():
                setattr(each, name, value)


def _selecting(model: Any) -> list[Any]:
    """Return the model that selects windows for this one, the model that selects for that, and so on."""
    preselect = getattr(model, "preselect", None)
    inner = getattr(getattr(preselect, "selector", preselect), "model", None)
    return [] if inner is None else [inner, *_selecting(inner)]
