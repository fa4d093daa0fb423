"""Hours and money for reranking MS MARCO documents v2, from what this machine does in a few minutes.

    python tests/benchmarks/plan_scale.py [--device cuda] [--dtype bfloat16] [--price 2.5] [--units 8]
    python tests/benchmarks/plan_scale.py --documents 8 --families MaxP CEDR-knrm

Each family scores `--documents` made-up texts of `--words` words, as many tokens, for a query, on one thread or one
GPU, with nothing remembered; figures are the least of `--rounds`. Windows of 150 tokens, one every 75, as PARADE has
them, and FirstP's one of 477; `3 best` reads the three windows that BM25 finds best. All have the same backbone. From
seconds a document: hours of one core or GPU for `--queries` queries with 100 and with 1,000 candidates, hours of
`--units` of them (without start and end, for which see `simulate_workers.py`), and their cost at `--price` per hour of
a core or GPU.

MS MARCO documents v2: 12 M documents of 2,000 tokens on average (Boytsov et al. 2025, Table 7). The size of the
collection makes no difference: reranking reads candidates alone. 5,193 queries are those of MS MARCO's dev set (same,
Table 8). Needs the extra `demo`.
"""

from __future__ import annotations

import argparse
import sys
import time
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import pyterrier_longdoc as ld
from pyterrier_longdoc.common.caches import forget_embeddings
from tests.support import tiny

BEST = ld.BM25Windows(3)
WINDOWS = {"windows": ld.SlidingWindows(150, 75)}
FAMILIES: dict[str, Callable[..., Any]] = {
    "FirstP": ld.FirstP,
    "MaxP": partial(ld.MaxP, **WINDOWS),
    "MaxP, 3 best": partial(ld.MaxP, **WINDOWS, preselect=BEST),
    "PARADE-attn": partial(ld.PARADE, **WINDOWS),
    "PARADE-attn, 3 best": partial(ld.PARADE, **WINDOWS, preselect=BEST),
    "PARADE-transformer": partial(ld.PARADE, aggregation="transformer", **WINDOWS),
    "CEDR-knrm": ld.CEDR,
}


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backbone", default="longdoc:minilm-l6")
    parser.add_argument("--families", nargs="*", default=list(FAMILIES))
    parser.add_argument("--documents", type=int, default=8)
    parser.add_argument("--words", type=int, default=2000)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--device")
    parser.add_argument("--dtype")
    parser.add_argument("--queries", type=int, default=5193)
    parser.add_argument("--units", type=int, default=1000, help="cores or GPUs")
    parser.add_argument("--price", type=float, default=0.05, help="of one for an hour")
    args = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    rng = np.random.default_rng(0)
    texts = [" ".join(rng.choice(tiny.WORDS, args.words)) for _ in range(args.documents)]
    print(
        f"{args.documents} texts of {args.words} words, {args.device or 'device by default'}, best of {args.rounds} "
        f"round(s); {args.queries} queries, {args.units} units at {args.price:g} an hour"
    )
    print(f"{'':22}{'windows':>9}{'windows/s':>11}{'s/doc':>9}   ", end="")
    print("  ".join(f"{f'{depth} candidates: h':>18}{'h of all':>10}{'cost':>9}" for depth in (100, 1000)))
    for name in args.families:
        line(name, FAMILIES[name](args.backbone, device=args.device, dtype=args.dtype), texts, args)


def line(name: str, model: Any, texts: list[str], args: argparse.Namespace) -> None:
    """Times a family and says what it would take."""
    frame = tiny.frame(["old dog river mountain"], texts)
    model(frame.head(1))
    seconds = []
    for _ in range(args.rounds):
        forget_embeddings()
        start = time.perf_counter()
        model(frame)
        seconds.append(time.perf_counter() - start)
    each, read = min(seconds) / len(texts), model.coverage.windows / len(texts)
    print(f"{name:22}{read:9.1f}{read / each:11.1f}{each:9.4f}   ", end="")
    hours = [args.queries * depth * each / 3600 for depth in (100, 1000)]
    print("  ".join(f"{own:18,.0f}{own / args.units:10.1f}{own * args.price:9,.0f}" for own in hours), flush=True)


if __name__ == "__main__":
    main()
