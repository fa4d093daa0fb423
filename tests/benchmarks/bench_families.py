"""Time and memory of PARADE, CEDR and LongP beside MaxP, over the same tokens of the same documents.

    python tests/benchmarks/bench_families.py --collection PATH/time [--topics 5] [--depth 100] [--threads 2]
        [--window-size 150] [--stride 150] [--max-doc-len 4000] [--dtype float32] [--systems MaxP CEDR-knrm ...]
    python tests/benchmarks/bench_families.py --words 3000 --topics 1 --depth 20

BM25's top documents of each topic, or `--topics` times `--depth` made-up texts of `--words` words, are scored by every
system in turn, round by round, each round begun by another system; figures are those of the best round. Documents are
read up to `--max-doc-len` tokens. MaxP, PARADE and CEDR read them in the same windows with the same backbone; the
stride is the window's size unless it is given, so that every token is read once. LongP reads them in one input of a
model with as many layers, heads, features and intermediate features as that backbone, and its tokenizer: ModernBERT,
Longformer (windows of 512, as published) and BERT with ALiBi (JINA-v2, MosaicBERT), with random weights. Heads are
untrained: nothing but time is compared. Nothing is remembered from one round to the next.

Weights are those of the layers and the head, in millions, word and position embeddings left out. ModernBERT and the
ALiBi model have gated feed-forward layers, which makes a layer of theirs a third larger. Memory is what scoring the
longest of the documents alone takes at its peak, in a process of its own: on a CPU by how much the process grows (Linux
only), on a GPU what torch allocates. Needs the extra `demo`.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import pyterrier_longdoc as ld
from pyterrier_longdoc.common.caches import forget_embeddings
from pyterrier_longdoc.modelling.backbones.load import build_backbone, load_backbone
from pyterrier_longdoc.modelling.devices import dtype_name, resolve_device, resolve_dtype
from pyterrier_longdoc.modelling.heads import build_head
from pyterrier_longdoc.modelling.model import Model
from pyterrier_longdoc.modelling.tokens import tokenize
from tests.benchmarks.bench_speed import collection
from tests.support import tiny
from tests.support.memory import growth
from tests.support.scorers import scorer_of

WINDOWED: dict[str, Callable[..., ld.CrossEncoder]] = {
    "MaxP": ld.MaxP,
    "PARADE-attn": ld.PARADE,
    "PARADE-transformer": partial(ld.PARADE, aggregation="transformer"),
    "CEDR-knrm": ld.CEDR,
}
LONG = {"LongP-modernbert": "modernbert", "LongP-longformer": "longformer", "LongP-alibi": "alibi-bert"}
SIZES = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size")
SPECIAL = 64
"""Room in the inputs of long models for a query and special tokens."""


def configuration(model_type: str, body: Any, tokenizer: Any, tokens: int) -> dict[str, Any]:
    """The configuration of a long model with the sizes of `body`, for documents of so many tokens."""
    config = {"model_type": model_type, "pad_token_id": tokenizer.pad_token_id}
    config |= {name: getattr(body, name) for name in SIZES}
    positions = tokens + SPECIAL
    if model_type == "alibi-bert":
        return {**config, "max_position_embeddings": positions}
    cls, sep = tokenizer.cls_token_id, tokenizer.sep_token_id
    config |= {"bos_token_id": cls, "cls_token_id": cls, "eos_token_id": sep, "sep_token_id": sep}
    if model_type == "longformer":
        config |= {"attention_window": [512] * body.num_hidden_layers, "type_vocab_size": 1}
        positions += tokenizer.pad_token_id + 1  # where its positions begin
    return {**config, "max_position_embeddings": positions}


def build(name: str, args: argparse.Namespace) -> Model:
    """A system, on its device."""
    if name in WINDOWED:
        windows = ld.SlidingWindows(args.window_size, args.stride or args.window_size)
        model = WINDOWED[name](args.backbone, windows=windows, max_doc_len=args.max_doc_len)
        model.device, model.dtype = args.device, args.dtype
        return model.model.eval()
    pretrained = load_backbone(args.backbone)
    config = configuration(LONG[name], pretrained.model.config, pretrained.tokenizer, args.max_doc_len)
    torch.manual_seed(0)
    backbone = build_backbone({"config": config, "cross_encoder": False}, pretrained.tokenizer)
    head = build_head("firstp", backbone.hidden_size)
    device = resolve_device(args.device)
    reading = {"max_doc_len": args.max_doc_len, "device": device, "dtype": resolve_dtype(args.dtype, device)}
    return scorer_of(backbone, ld.WholeText(), head, **reading)


def candidates(args: argparse.Namespace) -> pd.DataFrame:
    """BM25's top documents of the collection's topics, or made-up queries with texts of their own."""
    if args.collection is not None:
        return collection(args)[0]
    rng = np.random.default_rng(0)
    queries = [" ".join(rng.choice(tiny.WORDS, 8)) for _ in range(args.topics)]
    texts = [" ".join(rng.choice(tiny.WORDS, args.words)) for _ in range(args.topics * args.depth)]
    return pd.DataFrame({"query": np.repeat(queries, args.depth), "text": texts})


def read_of(scorer: Model, texts: list[str], max_doc_len: int) -> tuple[dict[str, int], dict[str, int]]:
    """The tokens that are to be read of each distinct text, and the windows of this system that hold them."""
    distinct = list(dict.fromkeys(texts))
    heads = [document.head(max_doc_len) for document in tokenize(scorer.tokenizer, distinct)]
    tokens = {text: len(head) for text, head in zip(distinct, heads, strict=True)}
    return tokens, {text: len(scorer.settings.windows(head)) for text, head in zip(distinct, heads, strict=True)}


def run(
    systems: dict[str, Model], frame: pd.DataFrame, args: argparse.Namespace
) -> tuple[dict[str, list[float]], dict[str, int]]:
    """Seconds of every round of each system, and how many tokens each has read."""
    names, seconds, read = list(systems), {name: [] for name in systems}, {}
    queries, texts = frame["query"].tolist(), frame["text"].tolist()
    for scorer in systems.values():
        scorer.score(["a cat"], ["the dog"])
    for round_ in range(args.rounds):
        for i in range(len(names)):
            name = names[(round_ + i) % len(names)]
            scorer = systems[name]
            forget_embeddings()
            start = time.perf_counter()
            read[name] = scorer.score(queries, texts).coverage.tokens_read
            seconds[name].append(time.perf_counter() - start)
    return seconds, read


def check(read: dict[str, int], tokens: int) -> None:
    """Raises RuntimeError for a system that did not read every token of the distinct texts."""
    for name, own in read.items():
        if own != tokens:
            raise RuntimeError(f"{name} read {own} tokens of {tokens}")


def weights(scorer: Model) -> float:
    """Millions of weights, embeddings left out."""
    embeddings = [m for m in scorer.encoder.backbone.modules() if isinstance(m, torch.nn.Embedding)]
    left_out = sum(p.numel() for module in embeddings for p in module.parameters())
    return (sum(p.numel() for p in scorer.parameters()) - left_out) / 1e6


def peak(name: str, query: str, text: str, args: argparse.Namespace) -> float:
    """MB that scoring this pair takes at most."""
    scorer = build(name, args)
    score = scorer.score
    score(["a cat"], ["the dog"])
    if scorer.device.type == "cpu":
        return growth(lambda: score([query], [text]))
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    score([query], [text])
    return (torch.cuda.max_memory_allocated() - before) / 2**20


def peak_in_a_process(name: str, query: str, text: str) -> float:
    """`peak` in a new process, started with the arguments of this one."""
    with tempfile.TemporaryDirectory() as folder:
        pair = Path(folder) / "pair.json"
        pair.write_text(json.dumps([query, text]), encoding="utf-8")
        command = [sys.executable, __file__, *sys.argv[1:], "--peak", name, str(pair)]
        return float(subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()[-1])


def table(frame: pd.DataFrame, args: argparse.Namespace) -> None:
    """Times the systems on these queries and texts."""
    systems = {name: build(name, args) for name in dict.fromkeys(["MaxP", *args.systems])}
    tokens, counts = read_of(systems["MaxP"], frame["text"].tolist(), args.max_doc_len)
    read, windows = frame["text"].map(tokens), int(frame["text"].map(counts).sum())
    device = systems["MaxP"].device
    print(
        f"{frame['query'].nunique()} topics, {len(frame)} documents ({len(tokens)} distinct) of {read.mean():.0f} "
        f"tokens on average, {read.max()} at most;\n{windows} windows of {args.window_size} tokens, one every "
        f"{args.stride or args.window_size}; {device.type}, {dtype_name(resolve_dtype(args.dtype, device))}, "
        f"{args.threads} thread(s), best of {args.rounds} round(s)",
        flush=True,
    )
    seconds, read = run(systems, frame, args)
    check(read, sum(tokens.values()))
    longest = frame.iloc[int(read.argmax())]
    print(f"{'system':20}{'weights':>9}{'s/document':>12}{'windows/s':>11}{'to MaxP':>9}{'slowest':>9}{'peak MB':>9}")
    for name, scorer in systems.items():
        best = min(seconds[name])
        speed = f"{windows / best:.1f}" if name in WINDOWED else ""
        mb = peak_in_a_process(name, longest["query"], longest["text"])
        print(
            f"{name:20}{weights(scorer):8.1f}M{best / len(frame):12.4f}{speed:>11}{best / min(seconds['MaxP']):9.2f}"
            f"{max(seconds[name]) / best:9.2f}{mb:9.0f}",
            flush=True,
        )


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--collection", help="folder with docs.jsonl, topics.tsv and qrels.txt")
    defaults = {"topics": 5, "depth": 100, "words": 1500, "rounds": 3, "window-size": 150, "max-doc-len": 4000}
    for option, default in {**defaults, "threads": torch.get_num_threads()}.items():
        parser.add_argument(f"--{option}", type=int, default=default)
    parser.add_argument("--stride", type=int, help="default: the window's size; at most that")
    parser.add_argument("--backbone", default="longdoc:minilm-l6")
    parser.add_argument("--device", help="default: a GPU if there is one")
    parser.add_argument("--dtype", default="fastest", help="default: what the device is best at")
    parser.add_argument("--systems", nargs="+", choices=[*WINDOWED, *LONG], default=[*WINDOWED, *LONG])
    parser.add_argument("--peak", nargs=2, metavar=("SYSTEM", "PAIR"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    if args.peak:
        print(peak(args.peak[0], *json.loads(Path(args.peak[1]).read_text(encoding="utf-8")), args))
        return
    table(candidates(args), args)


if __name__ == "__main__":
    main()
