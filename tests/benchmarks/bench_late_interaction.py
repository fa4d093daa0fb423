"""Time per document of LateIR, with and without remembered windows, beside MaxP over the same windows.

    python tests/benchmarks/bench_late_interaction.py [--tokens 1431] [--documents 8] [--queries 3]

Random weights in the sizes of MiniLM: both models encode with 6 layers of 384, LateIR's interaction has 2 and its
aggregator 6. Each query reranks the same documents. "first query" encodes their windows, "later queries" have them
already; MaxP reads every window again with every query. Figures are medians over queries.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

import pyterrier_longdoc as ld
from pyterrier_longdoc.common.caches import forget_embeddings

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from tests.support import tiny

WINDOWS = {"window_size": 150, "stride": 75}


def checkpoint(folder: Path, layers: int) -> str:
    """A random cross-encoder as wide as MiniLM."""
    sizes = {"hidden_size": 384, "intermediate_size": 1536, "num_attention_heads": 12, "num_hidden_layers": layers}
    return tiny.checkpoint(folder, max_position_embeddings=512, initializer_range=0.02, **sizes)


def timed(score: Callable[[list[str], list[str]], np.ndarray], query: str, texts: list[str]) -> tuple[float, float]:
    """Milliseconds of processor and wall-clock time for one document."""
    start = time.process_time(), time.perf_counter()
    score([query] * len(texts), texts)
    cpu, wall = time.process_time() - start[0], time.perf_counter() - start[1]
    return 1000 * cpu / len(texts), 1000 * wall / len(texts)


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in {"tokens": 1431, "documents": 8, "queries": 3}.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    args = parser.parse_args()
    rng = np.random.default_rng(0)
    texts = [" ".join(rng.choice(tiny.WORDS, args.tokens)) for _ in range(args.documents)]
    queries = [" ".join(rng.choice(tiny.WORDS, 8)) for _ in range(args.queries)]
    with tempfile.TemporaryDirectory() as name, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        folder = Path(name)
        six, two = checkpoint(folder / "six", 6), checkpoint(folder / "two", 2)
        maxp = ld.MaxP(six, **WINDOWS).model
        late = ld.LateIR(six, interaction=two, aggregator=six, **WINDOWS).model
    for scorer in (maxp, late):
        read = scorer.score(["a cat"], texts[:1]).coverage
    times: dict[str, list[tuple[float, float]]] = {"MaxP": [], "LateIR, first query": [], "LateIR, later queries": []}
    for query in queries:
        times["MaxP"].append(timed(maxp.score, query, texts))
        forget_embeddings()
        times["LateIR, first query"].append(timed(late.score, query, texts))
        times["LateIR, later queries"].append(timed(late.score, f"{query} snow", texts))
    remembered = late.encoder.cache
    print(
        f"{args.tokens} tokens, {read.windows_per_document:.0f} windows per document, "
        f"{torch.get_num_threads()} thread(s); {remembered._bytes / args.documents / 2**20:.1f} MiB remembered per "
        f"document"
    )
    print(f"{'':24}{'CPU ms':>8}{'to MaxP':>9}{'wall ms':>9}")
    reference = np.array(times["MaxP"])
    for name, taken in times.items():
        cpu, wall = np.median(np.array(taken), 0)
        print(f"{name:24}{cpu:8.0f}{np.median(np.array(taken)[:, 0] / reference[:, 0]):9.2f}{wall:9.0f}")


if __name__ == "__main__":
    main()
