"""What a run costs: time, memory, and how much text was read."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import pandas as pd

from ..common.files import import_extra

SAMPLE_SECONDS = 0.01
"""Between two looks at the process's memory."""


@dataclass
class Cost:
    """Cost of one run, summed over its batches. All but `seconds` is that of the last stage, the reranker."""

    seconds: float = 0.0  # of the whole pipeline; of stages shared with other systems, what they took when they ran
    rerank_seconds: float = 0.0
    queries: int = 0
    documents: int = 0  # (query, document) pairs that the last stage was given
    texts: int = 0  # that it read, each for each of its queries
    tokens: int = 0  # of these texts
    tokens_read: int = 0
    windows: int = 0
    memory: int = 0  # peak of the process's resident memory in bytes
    gpu_memory: int = 0  # peaks of what torch had allocated on each GPU, added up, in bytes

    @classmethod
    def total(cls, costs: Sequence[Cost]) -> Cost:
        """Of parts of a run, or of several: sums, and the highest of the peaks."""
        values = {f.name: [getattr(cost, f.name) for cost in costs] for f in fields(cls)}
        return cls(**{name: max(of_all) if "memory" in name else sum(of_all) for name, of_all in values.items()})

    def add_coverage(self, stage: Any) -> None:
        """Adds what a reranker's `coverage` says of its last run; other stages add nothing."""
        coverage = getattr(stage, "coverage", None)
        if coverage is not None:
            self.texts += coverage.documents
            self.tokens += coverage.tokens
            self.tokens_read += coverage.tokens_read
            self.windows += coverage.windows


@contextmanager
def measured(cost: Cost) -> Iterator[None]:
    """Adds time and peak memory of what runs within to `rerank_seconds`, `memory` and `gpu_memory`."""
    process, stop = import_extra("psutil", "analysis", "psutil is missing").Process(), threading.Event()

    def watch() -> None:
        running = True
        while running:
            running = not stop.wait(SAMPLE_SECONDS)
            cost.memory = max(cost.memory, process.memory_info().rss)

    torch: Any = sys.modules.get("torch")
    on_gpu = torch is not None and torch.cuda.is_available() and torch.cuda.is_initialized()
    gpus = range(torch.cuda.device_count()) if on_gpu else ()
    if on_gpu:
        torch.cuda.synchronize()
    for gpu in gpus:
        torch.cuda.reset_peak_memory_stats(gpu)
    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    start = time.perf_counter()
    try:
        yield
    finally:
        if on_gpu:
            torch.cuda.synchronize()
        cost.rerank_seconds += time.perf_counter() - start
        stop.set()
        watcher.join()
        cost.gpu_memory = max(cost.gpu_memory, sum(torch.cuda.max_memory_allocated(gpu) for gpu in gpus))


def efficiency_table(costs: Mapping[str, list[Cost]], partner: Mapping[str, str]) -> pd.DataFrame:
    """One row for each system that was run: its costs, averaged over seeds (one `Cost` each).

    `ms/query` is that of the whole pipeline; `slow-down` is the rerank time per document relative to the partner's.
    """
    rows = {name: _row(of_system) for name, of_system in costs.items() if of_system}
    for name, row in rows.items():
        reference = rows.get(partner.get(name, ""), {}).get("rerank ms/document")
        row["slow-down"] = row["rerank ms/document"] / reference if reference else np.nan
    return pd.DataFrame([{"name": name, **row} for name, row in rows.items()])


def _row(costs: list[Cost]) -> dict[str, float]:
    total = Cost.total(costs)
    documents, texts, tokens = (number or np.nan for number in (total.documents, total.texts, total.tokens))
    return {
        "ms/query": 1000 * total.seconds / total.queries,
        "rerank ms/query": 1000 * total.rerank_seconds / total.queries,
        "rerank ms/document": 1000 * total.rerank_seconds / documents,
        "tokens read/document": total.tokens_read / texts,
        "share read": total.tokens_read / tokens,
        "windows/document": total.windows / texts,
        "peak memory MB": total.memory / 2**20,
        "peak GPU memory MB": total.gpu_memory / 2**20 if total.gpu_memory else np.nan,
    }
