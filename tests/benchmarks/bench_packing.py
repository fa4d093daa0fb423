"""Windows per second by what is done about unequal lengths: padding and a mask, passes of one length, or packing.

    python tests/benchmarks/bench_packing.py [--windows 512] [--rounds 5] [--device cuda] [--dtype bfloat16]

Windows of random tokens go through the encoder of `--backbone`, in three ways:

- padded: neighbors in length, padded to the longest of their pass, with a mask (what is done where nothing is packed);
- one length: passes of windows of exactly one length, without padding or mask, each as large as there are windows;
- packed: the passes of "padded", without padding, in one row; see `pyterrier_longdoc/modelling/runtimes.py`. On a CPU,
  which has no kernel for that, one call of attention for each length.

Lengths are uniform from 60 to 180 tokens, or 182 all, where nothing is padded and all three do the same. The ways take
turns, and the best of all rounds counts. "padding" is the share of padding among the tokens of the padded passes.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from pyterrier_longdoc.modelling import encoder as encoder_module
from pyterrier_longdoc.modelling import runtimes
from pyterrier_longdoc.modelling.backbones.architectures import EqualLengthRules
from pyterrier_longdoc.modelling.backbones.load import load_backbone
from pyterrier_longdoc.modelling.batching import PairLayout
from pyterrier_longdoc.modelling.encoder import WindowEncoder
from pyterrier_longdoc.modelling.settings import Settings
from pyterrier_longdoc.modelling.windows import WholeText
from tests.support.packing import attend_in_groups

Inputs = tuple[PairLayout, list[np.ndarray], list[list[np.ndarray]]]
"""A layout, queries, and the windows of a document for each."""


def windows_of(layout: PairLayout, lengths: np.ndarray) -> Inputs:
    """One document per window, with a query of 8 tokens, in inputs of these lengths."""
    rng = np.random.default_rng(0)
    query = rng.integers(1000, 2000, 8)
    texts = [[rng.integers(1000, 2000, length - 8 - layout.specials)] for length in lengths]
    return layout, [query] * len(texts), texts


def ways(args: argparse.Namespace) -> dict[str, Callable[[Inputs], None]]:
    """What encodes windows in each of the ways."""
    backbone = load_backbone(args.backbone)
    own_kernel = runtimes.kernel_for

    def kernel_for(*args: Any) -> runtimes.Kernel:
        return own_kernel(*args) or attend_in_groups

    def encoder(wants_packing: bool, **changes: object) -> Callable[[Inputs], None]:
        made = WindowEncoder(replace(backbone, **changes)).eval().to(args.device)
        settings = Settings(WholeText(), batch_size=args.batch_size, device=torch.device(args.device))
        precise = args.dtype == "float32"

        @torch.inference_mode()
        def encode(batch: Inputs) -> None:
            with (
                patch.object(encoder_module, "PACKING_DEVICES", ("cpu", "cuda")),
                patch.object(runtimes, "kernel_for", kernel_for if wants_packing else lambda *_: None),
                torch.autocast(args.device, getattr(torch, args.dtype), enabled=not precise),
            ):
                # Reading a value waits for a GPU to finish.
                layout, queries, windows = batch
                made(queries, windows, layout, settings).cls[0, 0, 0].item()

        return encode

    return {"padded": encoder(False), "one length": encoder(False, rules=EqualLengthRules()), "packed": encoder(True)}


def padding(lengths: np.ndarray, batch_size: int) -> float:
    """Share of padding among the tokens of passes of neighbors in length."""
    ordered = np.sort(lengths)
    passes = [ordered[i : i + batch_size] for i in range(0, len(ordered), batch_size)]
    return 1 - ordered.sum() / sum(len(rows) * rows.max() for rows in passes)


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backbone", default="longdoc:minilm-l6")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16", "float16"])
    for name, default in {"windows": 512, "rounds": 5, "batch_size": 64}.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    args = parser.parse_args()
    encoders = ways(args)
    layout = load_backbone(args.backbone).pair_layout()
    rng = np.random.default_rng(1)
    print(f"{args.backbone}, {args.device}, {args.dtype}, {torch.get_num_threads()} thread(s), {args.windows} windows")
    print(f"{'lengths':12}{'padding':>9}" + "".join(f"{name:>12}" for name in encoders) + f"{'packed/padded':>15}")
    for title, low, high in (("60 to 180", 60, 180), ("182", 182, 182)):
        lengths = rng.integers(low, high + 1, args.windows)
        batch = windows_of(layout, lengths)
        seconds = dict.fromkeys(encoders, float("inf"))
        # The first round warms up.
        for number in range(args.rounds + 1):
            for name, encode in encoders.items():
                start = time.perf_counter()
                encode(batch)
                if number:
                    seconds[name] = min(seconds[name], time.perf_counter() - start)
        speeds = "".join(f"{args.windows / taken:12.1f}" for taken in seconds.values())
        share = padding(lengths, args.batch_size)
        print(f"{title:12}{share:9.1%}{speeds}{seconds['padded'] / seconds['packed']:15.2f}", flush=True)


if __name__ == "__main__":
    main()
