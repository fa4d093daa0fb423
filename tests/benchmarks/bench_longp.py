"""Time and memory of models for long inputs beside MaxP over the same tokens.

    python tests/benchmarks/bench_longp.py [--models longformer jina] [--tokens 4096] [--documents 1] [--threads 2]

Models with random weights, base-sized unless `--layers` says otherwise, each in a process of its own. An input has 32
query tokens and as many document tokens as make up `--tokens` (default: the longest that the model was trained for;
JINA and MosaicBERT, which have no table of positions and are built alike, take more). Seconds are those of one
document, the least over `--rounds`; the first round, which also allocates, is left out where there are more. Memory is
the peak of the whole process, Python and weights included. Linux only.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

QUERY = 32
BASE = {"hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12, "intermediate_size": 3072}
MODELS: dict[str, tuple[int, dict[str, Any]]] = {
    "longformer": (
        4096,
        {**BASE, "model_type": "longformer", "vocab_size": 50265, "max_position_embeddings": 4097, "pad_token_id": 0,
         "type_vocab_size": 1, "attention_window": [512] * 12},
    ),
    "bigbird": (
        4096,
        {**BASE, "model_type": "big_bird", "vocab_size": 50358, "max_position_embeddings": 4096},
    ),
    "modernbert": (
        8192,
        {"model_type": "modernbert", "pad_token_id": 0, "bos_token_id": 2, "eos_token_id": 3, "cls_token_id": 2,
         "sep_token_id": 3},
    ),
    "jina": (8192, {"model_type": "alibi-bert"}),
    "mosaic": (2048, {"model_type": "alibi-bert"}),
}  # fmt: skip
BERT = {**BASE, "model_type": "bert", "vocab_size": 30522, "max_position_embeddings": 512}


def configuration(name: str, layers: int | None) -> dict[str, Any]:
    """The configuration of a model, or of BERT for `maxp`, with another number of layers if one is given."""
    config = BERT if name == "maxp" else MODELS[name][1]
    if layers is None:
        return config
    window = {"attention_window": [512] * layers} if name == "longformer" else {}
    return {**config, "num_hidden_layers": layers, **window}


def measure(name: str, tokens: int, documents: int, rounds: int, layers: int | None) -> dict[str, float]:
    """Seconds per document, peak MB of this process and weights in millions; `name` is a model, or `maxp`."""
    import numpy as np
    import torch

    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
    from pyterrier_longdoc.modelling.backbones.load import build_backbone
    from pyterrier_longdoc.modelling.heads import build_head
    from pyterrier_longdoc.modelling.windows import SlidingWindows, WholeText
    from tests.support import memory, tiny
    from tests.support.scorers import scorer_of

    config = configuration(name, layers)
    if config["model_type"] == "alibi-bert":
        config = {**config, "max_position_embeddings": tokens}
    tokenizer = tiny.tokenizer(segments=config["model_type"] in ("bert", "alibi-bert"))
    torch.manual_seed(0)
    backbone = build_backbone({"config": config, "cross_encoder": False}, tokenizer)
    head = build_head("maxp" if name == "maxp" else "firstp", backbone.hidden_size)
    windows = SlidingWindows(150, 100) if name == "maxp" else WholeText()
    scorer = scorer_of(backbone, windows, head, max_query_len=QUERY)
    rng = np.random.default_rng(0)
    length = tokens - QUERY - scorer.format.specials
    queries = [" ".join(rng.choice(tiny.WORDS, QUERY)) for _ in range(documents)]
    texts = [" ".join(rng.choice(tiny.WORDS, length)) for _ in range(documents)]
    seconds = []
    for _ in range(rounds):
        start = time.perf_counter()
        scored = scorer.score(queries, texts)
        seconds.append((time.perf_counter() - start) / documents)
    read = scored.coverage.tokens_read
    if read != documents * length:
        raise RuntimeError(f"{name} read {read} tokens instead of {documents * length}")
    weights = sum(p.numel() for p in scorer.parameters()) / 1e6
    return {
        "seconds": min(seconds[1:] or seconds),
        "peak": memory.peak(),
        "weights": weights,
    }


def in_a_process(name: str, tokens: int, args: argparse.Namespace) -> dict[str, float]:
    """`measure` in a new process, with a limited number of threads."""
    command = [sys.executable, __file__, "--measure", name, "--tokens", str(tokens)]
    command += ["--documents", str(args.documents), "--rounds", str(args.rounds)]
    command += [] if args.layers is None else ["--layers", str(args.layers)]
    environment = {**os.environ, "OMP_NUM_THREADS": str(args.threads), "TOKENIZERS_PARALLELISM": "false"}
    done = subprocess.run(command, check=True, capture_output=True, text=True, env=environment)
    return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=list(MODELS), default=list(MODELS))
    for name, default in {"documents": 1, "rounds": 1, "threads": 2}.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--tokens", type=int, help="default: the longest input of each model")
    parser.add_argument("--layers", type=int, help="of all models, MaxP's BERT included; default: what each has")
    parser.add_argument("--measure", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.measure:
        print(json.dumps(measure(args.measure, args.tokens, args.documents, args.rounds, args.layers)))
        return
    print(f"{args.threads} thread(s), {args.documents} document(s), fp32; MaxP: BERT-base, windows of 150, stride 100")
    print(f"{'model':12}{'tokens':>8}{'weights':>9}{'s/doc':>8}{'peak MB':>9}{'MaxP s/doc':>12}{'ratio':>7}")
    maxp: dict[int, dict[str, float]] = {}
    for name in args.models:
        tokens = args.tokens or MODELS[name][0]
        if tokens not in maxp:
            maxp[tokens] = in_a_process("maxp", tokens, args)
        own, other = in_a_process(name, tokens, args), maxp[tokens]
        print(
            f"{name:12}{tokens:8}{own['weights']:8.0f}M{own['seconds']:8.1f}{own['peak']:9.0f}{other['seconds']:12.1f}"
            f"{own['seconds'] / other['seconds']:7.2f}",
            flush=True,
        )


if __name__ == "__main__":
    main()
