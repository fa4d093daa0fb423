"""Small random collections and runs for the tests of comparisons."""

from __future__ import annotations

import numpy as np
import pandas as pd


def collection(queries: int = 30, documents: int = 12, seed: int = 0) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Topics, and graded qrels: for every query the documents d0 (1), d1 (2) and a random third one (1)."""
    rng = np.random.default_rng(seed)
    topics = pd.DataFrame({"qid": [f"q{i}" for i in range(queries)], "query": "some words"})
    rows = [
        (qid, docno, label)
        for qid in topics["qid"]
        for docno, label in (("d0", 1), ("d1", 2), (f"d{rng.integers(2, documents)}", 1))
    ]
    return topics, pd.DataFrame(rows, columns=["qid", "docno", "label"])


def run(topics: pd.DataFrame, quality: float, seed: int, documents: int = 12) -> pd.DataFrame:
    """All documents of each query with random scores; the judged d0 and d1 get `quality` more."""
    rng = np.random.default_rng(seed)
    scores = rng.normal(size=(len(topics), documents))
    scores[:, :2] += quality
    return pd.DataFrame(
        {
            "qid": np.repeat(topics["qid"].to_numpy(dtype=object), documents),
            "docno": [f"d{d}" for _ in range(len(topics)) for d in range(documents)],
            "score": scores.ravel(),
        }
    )
