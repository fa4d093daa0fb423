"""What each model costs beside FirstP, as it is set up by default: windows and tokens read of a document, and time.

    python tests/benchmarks/bench_choice.py [--tokens 2000] [--documents 2] [--rounds 2] [--models MaxP TKL ...]

Made-up texts of `--tokens` tokens in sentences of 20, one thread, float32, all models over the same backbone of 22 M
parameters; LongP's is a ModernBERT of its size with random weights. The least time of `--rounds`, each begun with
another model, with nothing remembered; then once more with another query ("again"), which is less for models that
remember what they made of a window. Heads are untrained: nothing but time is compared. Needs the extra `demo`.
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
from pyterrier_longdoc.modelling.backbones.load import build_backbone, load_backbone
from pyterrier_longdoc.modelling.heads import build_head
from tests.benchmarks.bench_families import configuration
from tests.support import tiny
from tests.support.scorers import scorer_of

BEST = ld.BM25Windows(3)
SMALL = {"interaction": "longdoc:minilm-l6", "aggregator": "longdoc:minilm-l6"}
MODELS: dict[str, Callable[..., Any]] = {
    "FirstP": ld.FirstP,
    "MaxP": ld.MaxP,
    "MaxP, 3 best": partial(ld.MaxP, preselect=BEST),
    "AvgP": ld.AvgP,
    "Birch": ld.Birch,
    "PARADE": ld.PARADE,
    "PARADE, 3 best": partial(ld.PARADE, preselect=BEST),
    "PARADE transformer": partial(ld.PARADE, aggregation="transformer"),
    "CEDR": ld.CEDR,
    "NeuralModel1": ld.NeuralModel1,
    "TKL": ld.TKL,
    "LateIR": partial(ld.LateIR, **SMALL),
    "MaxSim": ld.MaxSim,
    "BiEncoder": ld.BiEncoder,
}
QUERIES = ("old dog river mountain", "new cat city winter")


def scorer(name: str, tokens: int) -> Any:
    """Of a model, with its weights."""
    if name != "LongP":
        return MODELS[name]("longdoc:minilm-l6").model.eval()
    pretrained = load_backbone("longdoc:minilm-l6")
    config = configuration("modernbert", pretrained.model.config, pretrained.tokenizer, 2 * tokens)
    backbone = build_backbone({"config": config, "cross_encoder": False}, pretrained.tokenizer)
    return scorer_of(backbone, ld.WholeText(), build_head("firstp", backbone.hidden_size), max_doc_len=2 * tokens)


def timed(model: Any, query: str, texts: list[str]) -> tuple[float, Any]:
    """Seconds for one document, and what was read."""
    start = time.perf_counter()
    coverage = model.score([query] * len(texts), texts).coverage
    return (time.perf_counter() - start) / len(texts), coverage


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="*", default=[*MODELS, "LongP"])
    parser.add_argument("--tokens", type=int, default=2000)
    parser.add_argument("--documents", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=2)
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    rng = np.random.default_rng(0)
    words = rng.choice(tiny.WORDS, (args.documents, args.tokens // 20, 19))
    texts = [" ".join(f"{' '.join(sentence).capitalize()}." for sentence in text) for text in words]
    warnings.simplefilter("ignore")
    models = {name: scorer(name, args.tokens) for name in dict.fromkeys(["FirstP", *args.models])}
    for model in models.values():
        model.score(list(QUERIES[:1]), ["a short text"])
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in models}
    read = {}
    names = list(models)
    for turn in range(args.rounds):
        for name in names[turn:] + names[:turn]:
            forget_embeddings()
            first, read[name] = timed(models[name], QUERIES[0], texts)
            times[name].append((first, timed(models[name], QUERIES[1], texts)[0]))
    print(f"{args.documents} texts of {args.tokens} tokens, float32, one thread, best of {args.rounds} round(s)")
    print(f"{'model':20}{'windows':>9}{'read':>7}{'s/document':>12}{'to FirstP':>11}{'again':>8}")
    base = min(first for first, _ in times["FirstP"])
    for name, coverage in read.items():
        first, again = (min(values) for values in zip(*times[name], strict=True))
        windows = coverage.windows / args.documents
        print(
            f"{name:20}{windows:9.1f}{coverage.share_read:7.0%}{first:12.3f}{first / base:11.2f}{again / base:8.2f}",
            flush=True,
        )


if __name__ == "__main__":
    main()
