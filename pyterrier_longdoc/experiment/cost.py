"""The cost of a run: time, memory and the amount of text that was read."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from typing import Any

from ..common.files import import_extra

SAMPLE_SECONDS = 0.01
"""Interval at which the memory of the process is sampled."""


@dataclass
class Cost:
    """Cost of one run, summed over its batches. All fields but `seconds` describe the last stage, the reranker."""

    seconds: float = 0.0  # for the whole pipeline; shared stages count in full for each system
    rerank_seconds: float = 0.0
    queries: int = 0
    documents: int = 0  # (query, document) pairs in the input of the last stage
    texts: int = 0  # (query, text) pairs that it read
    tokens: int = 0  # in these texts
    tokens_read: int = 0
    windows: int = 0
    memory: int = 0  # peak resident memory of the process, in bytes
    gpu_memory: int = 0  # sum over GPUs of torch's peak allocation, in bytes

    @classmethod
    def total(cls, costs: Sequence[Cost]) -> Cost:
        """Return the total cost of several runs or parts of a run: sums, and the maximum of peaks."""
        values = {f.name: [getattr(cost, f.name) for cost in costs] for f in fields(cls)}
        return cls(**{name: max(numbers) if "memory" in name else sum(numbers) for name, numbers in values.items()})


@contextmanager
def measuring(cost: Cost) -> Iterator[None]:
    """Add time and peak memory of the block to `rerank_seconds`, `memory` and `gpu_memory`."""
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
