"""What a run costs: time, memory, and how much text was read."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields
from typing import Any

import numpy as np
import pandas as pd

from .extras import required

SAMPLE_SECONDS = 0.01
"""Between two looks at the process's memory."""


@dataclass
class Cost:
    """Cost of one run, summed over its batches. All but `seconds` is that of the last stage, the reranker.

    Attributes:
        seconds: of the whole pipeline; of stages shared with other systems, what they took when they ran.
        rerank_seconds: of the last stage.
        queries: topics.
        documents: (query, document) pairs that the last stage was given.
        texts: distinct texts that it read.
        tokens: of these texts.
        tokens_read: tokens that it read of them.
        windows: of these texts.
        memory: peak of the process's resident memory in bytes.
        gpu_memory: peaks of the memory that torch had allocated on the GPUs, added up, in bytes; 0 without.
    """

    seconds: float = 0.0
    rerank_seconds: float = 0.0
    queries: int = 0
    documents: int = 0
    texts: int = 0
    tokens: int = 0
    tokens_read: int = 0
    windows: int = 0
    memory: int = 0
    gpu_memory: int = 0

    def add(self, other: Cost) -> None:
        """Adds the cost of another part of the run."""
        for f in fields(self):
            mine, theirs = getattr(self, f.name), getattr(other, f.name)
            setattr(self, f.name, max(mine, theirs) if "memory" in f.name else mine + theirs)

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)


@contextmanager
def measured(cost: Cost) -> Iterator[None]:
    """Adds time and peak memory of what runs within to `rerank_seconds`, `memory` and `gpu_memory`."""
    process, peak, stop = required("psutil").Process(), [0], threading.Event()

    def watch() -> None:
        while not stop.is_set():
            peak[0] = max(peak[0], process.memory_info().rss)
            stop.wait(SAMPLE_SECONDS)

    cuda = _cuda()
    if cuda is not None:
        cuda.synchronize()
        for gpu in range(cuda.device_count()):
            cuda.reset_peak_memory_stats(gpu)
    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    start = time.perf_counter()
    try:
        yield
    finally:
        if cuda is not None:
            cuda.synchronize()
        cost.rerank_seconds += time.perf_counter() - start
        stop.set()
        watcher.join()
        cost.memory = max(cost.memory, peak[0], process.memory_info().rss)
        if cuda is not None:
            cost.gpu_memory = max(cost.gpu_memory, sum(map(cuda.max_memory_allocated, range(cuda.device_count()))))


def add_coverage(cost: Cost, stage: Any) -> None:
    """Adds what a reranker's `coverage` says of its last run; other stages add nothing."""
    coverage = getattr(stage, "coverage", None)
    if coverage is not None:
        cost.texts += coverage.documents
        cost.tokens += coverage.tokens
        cost.tokens_read += coverage.tokens_read
        cost.windows += coverage.windows


def efficiency_table(costs: Mapping[str, list[Cost]], partner: Mapping[str, str]) -> pd.DataFrame:
    """One row for each system that was run: its costs, averaged over seeds.

    Args:
        costs: of each system one for each seed, folds summed.
        partner: for a system, the one that `slow-down` is relative to.

    Returns:
        `name`, `ms/query` (whole pipeline), `rerank ms/query`, `rerank ms/document`, `tokens read/document`,
        `share read`, `windows/document`, `peak memory MB`, `peak GPU memory MB` and `slow-down`: rerank time per
        document relative to the partner's.
    """
    rows = {name: _row(of_system) for name, of_system in costs.items() if of_system}
    for name, row in rows.items():
        reference = rows.get(partner.get(name, ""))
        row["slow-down"] = np.nan if reference is None else _ratio(row, reference, "rerank ms/document")
    return pd.DataFrame([{"name": name, **row} for name, row in rows.items()])


def _row(costs: list[Cost]) -> dict[str, float]:
    total = Cost()
    for cost in costs:
        total.add(cost)
    texts, tokens = total.texts or np.nan, total.tokens or np.nan
    return {
        "ms/query": 1000 * total.seconds / total.queries,
        "rerank ms/query": 1000 * total.rerank_seconds / total.queries,
        "rerank ms/document": 1000 * total.rerank_seconds / total.documents if total.documents else np.nan,
        "tokens read/document": total.tokens_read / texts,
        "share read": total.tokens_read / tokens,
        "windows/document": total.windows / texts,
        "peak memory MB": total.memory / 2**20,
        "peak GPU memory MB": total.gpu_memory / 2**20 if total.gpu_memory else np.nan,
    }


def _ratio(row: Mapping[str, float], reference: Mapping[str, float], column: str) -> float:
    return row[column] / reference[column] if reference[column] else np.nan


def _cuda() -> Any:
    torch = sys.modules.get("torch")
    return torch.cuda if torch is not None and torch.cuda.is_available() and torch.cuda.is_initialized() else None
