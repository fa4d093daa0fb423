"""Scores of single texts by any reranker."""

from __future__ import annotations

from hashlib import blake2b
from typing import Any

import numpy as np
import pandas as pd
import pyterrier as pt

from ..common.frames import as_strings


def scores_by_row(reranker: Any, rows: pd.DataFrame, name: str, **first_stage: Any) -> np.ndarray:
    """Return a reranker's scores for rows with `qid`, `query` and the text, in their order.

    `first_stage` replaces the columns `score`, which is 0, and `rank`.
    """
    # Each row gets its own docno, by which its score is found in the result. It depends on the text, so that a cache of
    # scores by docno does not confuse texts, and on the index. It has 14 characters, because Terrier's text scorer
    # takes no more than 20 and the passages of a text get `%p0` behind it.
    numbered = rows.drop(columns="qid").itertuples(name=None)
    docnos = pd.Index([blake2b(repr(row).encode(), digest_size=7).hexdigest() for row in numbered], dtype=object)
    candidates = pt.model.add_ranks(rows.assign(docno=docnos, score=0.0)).assign(**first_stage)
    results = reranker(candidates.reset_index(drop=True))
    found = pd.to_numeric(results["score"], errors="coerce").to_numpy(dtype="float64", na_value=np.nan)
    by_docno = pd.Series(found, as_strings(results["docno"]))
    scores = np.full(len(rows), np.nan) if by_docno.index.has_duplicates else by_docno.reindex(docnos).to_numpy()
    if not np.isfinite(scores).all():
        raise ValueError(
            f"{name} must return one finite score for each of {len(rows)} texts: leave out the first stage and cutoffs"
        )
    return scores
