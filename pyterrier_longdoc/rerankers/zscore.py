"""Scores of different systems on one scale, so that they can be added."""

# Without `from __future__ import annotations`: what the fields are must be known in the modules of subclasses too.

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import pandas as pd
import pyterrier as pt

from ..common.frames import check_qids, numeric
from ..common.presentation import NotebookMixin

ROUNDING = 8 * np.finfo(float).eps
"""Scores of magnitude 1 that differ by less are equal."""


@dataclass(eq=False, repr=False)
class ZScore(NotebookMixin, pt.Transformer):
    """Replaces each score by its z-score among the query's candidates, for sums of systems (Montague & Aslam 2001).

    The z-score is `(score - mean) / std`, with the mean and the standard deviation over all candidates of the query. It
    is 0 if a query has one candidate or all its scores are equal. The new scores of each query have mean 0 and standard
    deviation 1, so that systems with different scales can be added without a weight. Scores that differ by no more than
    rounding errors are equal.

    A z-score depends on all candidates of the query: another `num_results` of the first stage changes it. Apply cutoffs
    (`% 10`) after the sum, not before, and keep all candidates of a query in one frame.

    Returns the same rows, columns, order and index with new `score` (float64) and `rank`. Equal scores keep their order
    of rows.

    Example:
        `bm25 >> dataset.text_loader() >> (ld.ZScore() + (ld.MaxP() >> ld.ZScore()))`. The inner parentheses are needed,
        because `+` binds more tightly than `>>`. The sum keeps the columns of both systems. If both have a column, such
        as `window_scores`, it keeps that of the first.
    """

    papers: ClassVar[tuple[str, ...]] = ("montague-2001-relevance",)

    def transform(self, inp: pd.DataFrame) -> pd.DataFrame:
        """Return a new frame with z-scores.

        Raises:
            pt.validate.InputValidationError: if a column is missing.
            ValueError: if a score is not a finite number, or a qid is empty.
        """
        pt.validate.result_frame(inp, extra_columns=["score"], context=self)
        check_qids(inp)
        qids = inp["qid"].to_numpy()
        scores = pd.Series(numeric(inp, "score", "ZScore", "the system before it must score every row"))
        # At most 1 in magnitude, so that nothing overflows.
        scores = scores / scores.abs().groupby(qids, sort=False).transform("max").replace(0.0, 1.0)
        queries = scores.groupby(qids, sort=False)
        least, most = queries.transform("min"), queries.transform("max")
        # From 0 to 1 first, where equal scores are exactly 0: rounding would give them a tiny deviation.
        spread = most - least
        scores = ((scores - least) / spread).where(spread > ROUNDING, 0.0)
        queries = scores.groupby(qids, sort=False)
        z_scores = (scores - queries.transform("mean")) / queries.transform("std", ddof=0).replace(0.0, 1.0)
        return pt.model.add_ranks(inp.drop(columns="rank", errors="ignore").assign(score=z_scores.to_numpy()))
