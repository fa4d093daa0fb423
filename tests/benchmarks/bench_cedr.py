"""Time and memory of the token-level heads beside AvgP, with the same backbone.

    python tests/benchmarks/bench_cedr.py [--hidden 384] [--layers 6] [--query 32] [--tokens 1431] [--documents 2]

Random weights, chunks of 477 tokens. Each round scores the same documents with every model in turn; the figures are
medians over rounds of processor time, of its ratio to AvgP's in the same round, and of wall-clock time. Memory is what
one document takes at its peak, in a process of its own. Target: at most 25 % on top of AvgP. Linux only.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from pyterrier_longdoc.modelling.backbones.load import load_backbone
from pyterrier_longdoc.modelling.heads import build_head
from pyterrier_longdoc.modelling.windows import GreedyChunks

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from tests.support import tiny
from tests.support.memory import growth
from tests.support.scorers import scorer_of

HEADS = ("avgp", "cedr-knrm", "cedr-pacrr", "cedr-drmm", "model1")


def checkpoint(folder: str, args: argparse.Namespace) -> str:
    """A random cross-encoder of some size."""
    sizes = {"num_hidden_layers": args.layers, "hidden_size": args.hidden, "intermediate_size": 4 * args.hidden}
    sizes |= {"num_attention_heads": 12, "max_position_embeddings": 512, "initializer_range": 0.02}
    return tiny.checkpoint(Path(folder), **sizes)


def scorer(folder: str, name: str) -> Any:
    """A model with that head."""
    backbone = load_backbone(folder)
    torch.manual_seed(0)
    head = build_head(name, backbone.hidden_size, channels=backbone.channels)
    return scorer_of(backbone, GreedyChunks(477), head)


def pairs(query: int, tokens: int, documents: int) -> tuple[list[str], list[str]]:
    """Random words, each of them one token."""
    rng = np.random.default_rng(0)
    queries = [" ".join(rng.choice(tiny.WORDS, query)) for _ in range(documents)]
    return queries, [" ".join(rng.choice(tiny.WORDS, tokens)) for _ in range(documents)]


def peak(name: str, folder: str, query: int, tokens: int) -> float:
    """MB by which this process grows at most while it scores one document."""
    model = scorer(folder, name)
    model.score(["a cat"], ["the dog"])
    return growth(lambda: model.score(*pairs(query, tokens, 1)))


def memory(name: str, folder: str, args: argparse.Namespace) -> float:
    """MB that a document takes, measured in a process of its own."""
    command = [sys.executable, __file__, "--peak", name, "--folder", folder]
    command += ["--query", str(args.query), "--tokens", str(args.tokens)]
    return float(subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()[-1])


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in {"hidden": 384, "layers": 6, "query": 32, "tokens": 1431, "documents": 2, "rounds": 5}.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--peak", help=argparse.SUPPRESS)
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.peak:
        print(peak(args.peak, args.folder, args.query, args.tokens))
        return
    with tempfile.TemporaryDirectory() as folder:
        checkpoint(folder, args)
        models = {name: scorer(folder, name) for name in HEADS}
        queries, texts = pairs(args.query, args.tokens, args.documents)
        times: dict[str, list[tuple[float, float]]] = {name: [] for name in HEADS}
        for _ in range(1 + args.rounds):
            for name, model in models.items():
                start = time.process_time(), time.perf_counter()
                model.score(queries, texts)
                times[name].append((time.process_time() - start[0], time.perf_counter() - start[1]))
        taken = {name: 1000 * np.array(rounds[1:]) / args.documents for name, rounds in times.items()}  # (rounds, 2)
        print(
            f"{args.hidden} x {args.layers}, {args.query} query and {args.tokens} document tokens, "
            f"{torch.get_num_threads()} thread(s)"
        )
        print(f"{'head':12}{'CPU ms':>8}{'to AvgP':>9}{'wall ms':>9}{'peak MB':>9}")
        for name in HEADS:
            ratio = np.median(taken[name][:, 0] / taken["avgp"][:, 0])
            cpu, wall = np.median(taken[name], 0)
            print(f"{name:12}{cpu:8.0f}{ratio:9.2f}{wall:9.0f}{memory(name, folder, args):9.0f}")


if __name__ == "__main__":
    main()
