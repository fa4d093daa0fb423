"""A reranker whose scores are digests of ids, and candidates for it: large runs in seconds."""

from __future__ import annotations

import os
import zlib
from pathlib import Path

import numpy as np
import pandas as pd
import pyterrier as pt


class Digests(pt.Transformer):
    """Scores by qid, docno and its own name; each call appends its queries to a log, one line a call."""

    def __init__(self, name: str = "a", log: Path | None = None) -> None:
        self.name, self.log = name, log

    def transform(self, inp: pd.DataFrame) -> pd.DataFrame:
        pt.validate.result_frame(inp, extra_columns=["query"])
        keys = (self.name + inp["qid"] + " " + inp["docno"]).tolist() if len(inp) else []
        scores = np.array([zlib.crc32(key.encode()) for key in keys], dtype="float64") / 2**32
        if self.log is not None and len(inp):
            handle = os.open(self.log, os.O_CREAT | os.O_APPEND | os.O_WRONLY)  # lines of several processes stay whole
            os.write(handle, f"{' '.join(inp['qid'].unique())}\n".encode())
            os.close(handle)
        return pt.model.add_ranks(inp.drop(columns="rank", errors="ignore").assign(score=scores))

    def calls(self) -> list[list[str]]:
        """The queries of each call so far."""
        if self.log is None or not self.log.exists():
            return []
        return [line.split() for line in self.log.read_text(encoding="utf-8").splitlines()]


def candidates(rows: int, queries: int, seed: int = 0) -> pd.DataFrame:
    """`qid, query, docno, score`, the rows of each query scattered over the run."""
    rng = np.random.default_rng(seed)
    qids = [f"q{i}" for i in rng.integers(0, queries, rows)]
    run = pd.DataFrame({"qid": qids, "query": "some words", "docno": [f"d{i}" for i in range(rows)]})
    return run.assign(score=rng.normal(size=rows))
