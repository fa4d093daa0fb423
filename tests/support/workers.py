"""Transformers for workers in other processes, which import this module."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from signal import SIGKILL

import pandas as pd
import pyterrier as pt

from . import tiny


class Stub(pt.Transformer):
    """Scores by the number of the row's docno; `threads` has how many torch computes with.

    Args:
        folder: for a file of the queries that each process has scored.
        dies_at: the first process that comes to this query is killed.
        fails_at: raises an error for this query.
    """

    def __init__(self, folder: Path, dies_at: str | None = None, fails_at: str | None = None) -> None:
        self.folder, self.dies_at, self.fails_at = folder, dies_at, fails_at

    def transform(self, inp: pd.DataFrame) -> pd.DataFrame:
        import torch

        for qid in inp["qid"].drop_duplicates():
            if qid == self.fails_at:
                raise KeyError(f"no text of query {qid}")
            with Path(self.folder, f"scored-{os.getpid()}").open("a") as file:
                file.write(f"{qid}\n")
            if qid == self.dies_at and not Path(self.folder, "died").exists():
                Path(self.folder, "died").touch()
                os.kill(os.getpid(), SIGKILL)
        scored = inp.assign(score=inp["docno"].str[1:].astype(float), threads=torch.get_num_threads())
        return pt.model.add_ranks(scored)


def scored(folder: Path) -> list[list[str]]:
    """The queries that each process has scored, in its order."""
    return [path.read_text().split() for path in folder.glob("scored-*")]


class LockedStore(tiny.Store):
    """A dataset that cannot be pickled."""

    def __init__(self, frame: pd.DataFrame) -> None:
        super().__init__(frame)
        self.lock = threading.Lock()
