"""The stages of a pipeline."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pyterrier as pt


def stages_of(pipeline: pt.Transformer) -> Iterator[pt.Transformer]:
    """Yield a pipeline and all transformers in it."""
    yield pipeline
    try:
        parts = pt.inspect.subtransformers(pipeline)
    except (pt.inspect.InspectError, ValueError):
        return
    for value in parts.values():
        for stage in value if isinstance(value, Sequence) else [value]:
            yield from stages_of(stage)
