"""Blocks of whole queries, and their results."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pyterrier as pt

from ..common.coverage import Coverage
from ..common.pipelines import stages_of

BLOCK_ROWS = 100
"""The unit of work of a worker, and what is lost if the job is killed."""


def blocks_of(frame: pd.DataFrame) -> list[np.ndarray]:
    """Return the row positions of each block, query by query in the order of their first rows.

    Queries fill a block until it has `BLOCK_ROWS` rows. Without `docno`, each topic is a block.
    """
    queries, _ = pd.factorize(frame["qid"], use_na_sentinel=False)
    rows, counts = np.argsort(queries, kind="stable"), np.bincount(queries)
    blocks = (np.cumsum(counts) - counts) // (BLOCK_ROWS if "docno" in frame.columns else 1)
    ends = np.flatnonzero(np.diff(blocks[queries[rows]])) + 1
    return np.split(rows, ends)


def transformed(transformer: pt.Transformer, frame: pd.DataFrame) -> tuple[pd.DataFrame, Coverage | None]:
    """Return the results of a block and the coverage of the last model in the pipeline."""
    out = transformer.transform(frame)
    coverages = [getattr(stage, "coverage", None) for stage in stages_of(transformer)]
    return out, next((each for each in reversed(coverages) if isinstance(each, Coverage)), None)
