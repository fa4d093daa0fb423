"""Scores of single texts by any reranker."""

from __future__ import annotations

from hashlib import blake2b
from typing import Any

import numpy as np
import pandas as pd
import pyterrier as pt

from ..common.frames import as_strings


def scores_by_row(reranker: Any, rows: pd.DataFrame, name: str) -> np.ndarray:
    """Return a reranker's scores for rows with `qid`, `query` and the text, in their order."""
    # Each row gets its own docno, by which its score is found in the result. It depends on the text, so that a cache of
    # scores by docno does not confuse texts, and has 20 characters: Terrier's text scorer takes no longer docnos.
    numbered = rows.reset_index(drop=True).itertuples(name=None)
    docnos = pd.Index([blake2b(repr(row).encode(), digest_size=10).hexdigest() for row in numbered], dtype=object)
    results = reranker(pt.model.add_ranks(rows.assign(docno=docnos, score=0.0)))
    by_docno = results.set_axis(as_strings(results["docno"]), axis=0)["score"].astype("float64")
    scores = np.full(len(rows), np.nan) if by_docno.index.has_duplicates else by_docno.reindex(docnos).to_numpy()
    if not np.isfinite(scores).all():
        raise ValueError(
            f"{name} must return one finite score for each of {len(rows)} texts: remove cutoffs from the pipeline"
        )
    return scores
