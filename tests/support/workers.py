"""Transformers for workers in other processes, which import this module: they write down what they do."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path
from signal import SIGKILL

import pandas as pd
import pyterrier as pt

from . import tiny


class Stub(pt.Transformer):
    """Scores by the number of the row's docno, and writes the queries that it has scored to a file for each process.

    Args:
        folder: for the files.
        dies_at: the first process that comes to this query is killed in the middle of its block.
        always: every process is.
        seconds: for a block.
    """

    def __init__(self, folder: str, dies_at: str | None = None, always: bool = False, seconds: float = 0.0) -> None:
        self.folder, self.dies_at, self.always, self.seconds = folder, dies_at, always, seconds

    def transform(self, inp: pd.DataFrame) -> pd.DataFrame:
        time.sleep(self.seconds if len(inp) else 0.0)
        for qid in inp["qid"].drop_duplicates():
            with Path(self.folder, f"scored-{os.getpid()}").open("a") as file:
                file.write(f"{qid}\n")
            if qid == self.dies_at and self.is_first():
                os.kill(os.getpid(), SIGKILL)
        return pt.model.add_ranks(inp.assign(score=inp["docno"].str[1:].astype(float)))

    def is_first(self) -> bool:
        try:
            Path(self.folder, "died").touch(exist_ok=self.always)
        except FileExistsError:
            return False
        return True

    def __repr__(self) -> str:
        return "Stub()"


def scored(folder: Path) -> dict[int, list[str]]:
    """The queries that each process has scored, in its order."""
    return {int(path.name.split("-")[1]): path.read_text().split() for path in folder.glob("scored-*")}


class Fails(pt.Transformer):
    """Raises an error for one query."""

    def __init__(self, qid: str) -> None:
        self.qid = qid

    def transform(self, inp: pd.DataFrame) -> pd.DataFrame:
        if self.qid in inp["qid"].tolist():
            raise KeyError(f"no text of query {self.qid}")
        return inp


class Locked(pt.Transformer):
    """Holds what cannot be pickled."""

    def __init__(self) -> None:
        self.lock = threading.Lock()

    def transform(self, inp: pd.DataFrame) -> pd.DataFrame:
        return inp

    def __repr__(self) -> str:
        return "Locked()"


class LockedStore(tiny.Store):
    """A dataset that cannot be pickled; notes the number of rows of each call."""

    def __init__(self, frame: pd.DataFrame) -> None:
        super().__init__(frame)
        self.lock, self.rows = threading.Lock(), list[int]()

    def text_loader(self, fields: str | list[str] = "*", *, verbose: bool = False) -> pt.Transformer:
        loader = super().text_loader(fields)

        def load(frame: pd.DataFrame) -> pd.DataFrame:
            self.rows.append(len(frame))
            return loader(frame)

        return pt.apply.generic(load)

    def __repr__(self) -> str:
        return "LockedStore()"


class FirstRows(pt.Transformer):
    """Keeps each query's first row."""

    def transform(self, inp: pd.DataFrame) -> pd.DataFrame:
        return inp.drop_duplicates("qid").reset_index(drop=True)


def first_rows(frame: pd.DataFrame) -> pd.DataFrame:
    """As `FirstRows`, in a function."""
    return FirstRows()(frame)


def threads(shared: object, item: int) -> int:
    """How many torch computes with."""
    import torch

    return torch.get_num_threads()
