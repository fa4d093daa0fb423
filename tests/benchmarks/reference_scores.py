"""Scores of every kind of model, kept in a file, to show that a change of the code changes no number.

    python tests/benchmarks/reference_scores.py --collection PATH/time --out reference.npz
    python tests/benchmarks/reference_scores.py --collection PATH/time --compare reference.npz

Run the first on the commit before a change and the second on the commit after it, on the same machine. `--compare`
prints one row per configuration with the largest difference (relative where values are above 1) and exits with 1 if one
is above 1e-6. Weights after a training, and texts that are made, are compared by digest: they are equal or not.

Every class reads the same 20 documents of the collection, of all lengths, in fp32 and one thread: the first topic all
of them, the second one five. The backbone is the packaged encoder with the weights of all-MiniLM-L6-v2, except where
BERT is not possible: there the tests' tiny random models take its place. Three configurations read whole documents, the
others at most 600 tokens. `--only` takes the configurations whose names contain a word. Needs the extras `demo` and
`train`. Takes about ten minutes on one core.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from safetensors.torch import load_file

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import pyterrier_longdoc as ld
from pyterrier_longdoc.data.rotation import RotateDocuments, position_augmentation
from tests.support import tiny, tiny_long

ENCODER = "longdoc:minilm-l6"
FP32: dict[str, Any] = {"dtype": "float32", "device": "cpu"}
SHORT: dict[str, Any] = {**FP32, "max_doc_len": 600}
SMALL: dict[str, Any] = {**FP32, "window_size": 60, "max_query_len": 16, "max_doc_len": 400}
"""For the tiny models, which have 128 positions and tokens of one letter."""

Values = dict[str, np.ndarray]
CONFIGURATIONS: dict[str, Callable[[pd.DataFrame], Values]] = {}


def scores(make: Callable[[], Any]) -> Callable[[pd.DataFrame], Values]:
    """The scores of a model; what windows contributed, if it explains."""

    def run(frame: pd.DataFrame) -> Values:
        out = make().transform(frame)
        values = {"score": out["score"].to_numpy(dtype="float64"), "rank": out["rank"].to_numpy(dtype="float64")}
        for column in ("window_scores", "window_weights", "window_spans", "query_terms", "best_start", "best_end"):
            if column in out:
                values[column] = flat(out[column])
        return values

    return run


def flat(column: Sequence[Any]) -> np.ndarray:
    """All numbers in a column of nested lists; None is NaN, words are left out."""

    def numbers(value: Any) -> Iterator[float]:
        if isinstance(value, list | tuple | np.ndarray):
            for part in value:
                yield from numbers(part)
        elif not isinstance(value, str):
            yield np.nan if value is None else float(value)

    return np.fromiter(numbers(list(column)), dtype="float64")


def digest(data: bytes) -> np.ndarray:
    """SHA-256 as 32 numbers."""
    return np.frombuffer(hashlib.sha256(data).digest(), dtype=np.uint8).astype("float64")


def minilm(cls: Callable[..., Any], **arguments: Any) -> Callable[[], Any]:
    """A model over the packaged encoder."""
    return lambda: cls(ENCODER, **{**SHORT, **arguments})


TRANSFORMER = {"aggregation": "transformer"}
for name, make in {
    "FirstP": minilm(ld.FirstP),
    "MaxP": minilm(ld.MaxP, max_doc_len=None),
    "MaxP padded, 1431 tokens": minilm(ld.MaxP, layout="padded", max_doc_len=1431),
    "MaxP first_last_random": minilm(ld.MaxP, max_windows=4, selection="first_last_random"),
    "MaxP words": minilm(ld.MaxP, windows=ld.SlidingWords(150, 100)),
    "MaxP BM25Windows": minilm(ld.MaxP, preselect=ld.BM25Windows(3)),
    "MaxP FirstK": minilm(ld.MaxP, preselect=ld.FirstK(2)),
    "FirstP KeyBlocks": minilm(ld.FirstP, preselect=ld.KeyBlocks(ld.BM25Windows(7))),
    "MaxP EmbeddingWindows": minilm(ld.MaxP, preselect=ld.EmbeddingWindows(3, ld.BiEncoder(ENCODER, **FP32))),
    "MaxP CrossEncoderWindows": minilm(ld.MaxP, preselect=ld.CrossEncoderWindows(2, ld.FirstP(ENCODER, **FP32))),
    "MaxP explained": minilm(ld.MaxP, explain=True),
    "SumP": minilm(ld.SumP),
    "AvgP": minilm(ld.AvgP, max_doc_len=None),
    "KMaxP": minilm(ld.KMaxP, k=2),
    "KMaxP weights": minilm(ld.KMaxP, k=2, weights=[0.7, 0.3]),
    "Birch": minilm(ld.Birch),
    "PARADE avg": minilm(ld.PARADE, aggregation="avg"),
    "PARADE max": minilm(ld.PARADE, aggregation="max"),
    "PARADE attn": minilm(ld.PARADE, max_doc_len=None),
    "PARADE attn explained": minilm(ld.PARADE, explain=True),
    "PARADE elementwise": minilm(ld.PARADE, attention="elementwise"),
    "PARADE transformer": minilm(ld.PARADE, **TRANSFORMER),
    "PARADE pretrained": minilm(ld.PARADE, **TRANSFORMER, aggregator=ENCODER),
    "PARADE query states": minilm(ld.PARADE, **TRANSFORMER, aggregator=ENCODER, query_states=True),
    "LateIR": minilm(ld.LateIR, interaction=ENCODER, aggregator=ENCODER),
    "MORESPlus": lambda: ld.MORESPlus(tiny.bart(), **SMALL, stride=40),
    "CEDR knrm": minilm(ld.CEDR, aggregation="knrm"),
    "CEDR knrm explained": minilm(ld.CEDR, aggregation="knrm", explain=True),
    "CEDR pacrr": minilm(ld.CEDR, aggregation="pacrr"),
    "CEDR drmm": minilm(ld.CEDR, aggregation="drmm"),
    "NeuralModel1": minilm(ld.NeuralModel1),
    "LongP": minilm(ld.LongP, max_doc_len=477),
    "BiEncoder first": minilm(ld.BiEncoder, aggregation="first"),
    "BiEncoder max": minilm(ld.BiEncoder),
    "BiEncoder max explained": minilm(ld.BiEncoder, explain=True),
    "BiEncoder avg": minilm(ld.BiEncoder, aggregation="avg", windows=ld.SentenceWindows(max_tokens=100)),
    "packaged FirstP": lambda: ld.FirstP.load("longdoc:docstrings-firstp", **FP32),
    "packaged MaxP": lambda: ld.MaxP.load("longdoc:docstrings-maxp", **SHORT),
    "packaged AvgP": lambda: ld.AvgP.load("longdoc:docstrings-avgp", **SHORT),
    "packaged PARADE attn": lambda: ld.PARADE.load("longdoc:docstrings-parade-attn", **SHORT),
    "packaged PARADE transformer": lambda: ld.PARADE.load("longdoc:docstrings-parade-transformer", **SHORT),
}.items():
    CONFIGURATIONS[name] = scores(make)


def configuration(name: str) -> Callable[[Callable[[pd.DataFrame], Values]], Callable[[pd.DataFrame], Values]]:
    """Enters a function among the configurations."""

    def enter(function: Callable[[pd.DataFrame], Values]) -> Callable[[pd.DataFrame], Values]:
        CONFIGURATIONS[name] = function
        return function

    return enter


def tiny_longp(name: str, make: Callable[[Path], str], **arguments: Any) -> None:
    """LongP over a tiny random model."""

    @configuration(f"LongP {name}")
    def run(frame: pd.DataFrame) -> Values:
        with tempfile.TemporaryDirectory() as folder:
            model = ld.LongP(make(Path(folder)), **{**FP32, "max_query_len": 16, "max_doc_len": 100, **arguments})
            return scores(lambda: model)(frame)


tiny_longp("longformer", lambda folder: tiny_long.encoder(folder, "longformer", labels=1))
tiny_longp("bigbird", lambda folder: tiny_long.encoder(folder, "big_bird", labels=1), attention_type="original_full")
tiny_longp("modernbert", lambda folder: tiny_long.encoder(folder, "modernbert", labels=1))
tiny_longp("jina", lambda folder: tiny_long.published(folder, "jina"))
tiny_longp("mosaic", lambda folder: tiny_long.published(folder, "mosaic"))
tiny_longp("yes/no", lambda folder: tiny_long.decoder(folder), template="qwen3-reranker")


def tiny_family(family: str) -> None:
    """MaxP over a tiny random cross-encoder of another family."""

    @configuration(f"MaxP {family}")
    def run(frame: pd.DataFrame) -> Values:
        with tempfile.TemporaryDirectory() as folder:
            backbone = tiny.checkpoint(Path(folder), family)
            return scores(lambda: ld.MaxP(backbone, **SMALL, stride=40))(frame)


for each in ("bert", "electra", "roberta", "deberta-v2", "distilbert", "modernbert"):
    tiny_family(each)


@configuration("score cache, read again")
def cached(frame: pd.DataFrame) -> Values:
    """Scores that come from a file."""
    with tempfile.TemporaryDirectory() as folder:
        model = ld.MaxP(ENCODER, score_cache=Path(folder) / "scores.sqlite", **SHORT)
        model.transform(frame)
        return scores(lambda: model)(frame)


def most_rain(messages: list[dict[str, str]]) -> str:
    """Stands in for a language model: orders documents by how often they say "THE"."""
    documents = [m["content"] for m in messages if m["role"] == "user" and m["content"].startswith("[")]
    order = sorted(documents, key=lambda text: -text.count("THE"))
    return " > ".join(text[: text.index("]") + 1] for text in order)


@configuration("RankGPT")
def rankgpt(frame: pd.DataFrame) -> Values:
    """Sixty documents of one query, in three windows and more."""
    rows = pd.concat([frame, frame, frame], ignore_index=True).assign(qid="1", query=frame["query"].iloc[0])
    rows["docno"] = [f"{docno}-{i}" for i, docno in enumerate(rows["docno"])]
    return scores(lambda: ld.RankGPT(most_rain))(rows)


@configuration("RotateDocuments")
def rotated(frame: pd.DataFrame) -> Values:
    """Texts that training would see."""
    kinds = ("rotate", "windows", "sentences")
    texts = {kind: "\n".join(RotateDocuments(kind).transform(frame)["text"]) for kind in kinds}
    return {kind: digest(text.encode()) for kind, text in texts.items()}


# Trainings. Their weights are read from the folder that `save` writes.

RATES = {"encoder.": 1e-4, "": 1e-3}


def after_training(model: Any, frame: pd.DataFrame, adapter: bool = False) -> Values:
    """Losses, weights and scores after a fit, and whether a loaded copy scores the same."""
    labels = frame.groupby("qid").cumcount().mod(3).eq(0).astype(int)
    qrels = frame[["qid", "docno"]].assign(label=labels)
    model.fit(frame, qrels)
    with tempfile.TemporaryDirectory() as folder:
        if adapter:
            model.save_adapter(folder)
        else:
            model.save(folder)
        weights = load_file(Path(folder) / ("adapter.safetensors" if adapter else "model.safetensors"))
        again = type(model).load(folder, **FP32).transform(frame)["score"].to_numpy()
    out = model.transform(frame)["score"].to_numpy()
    every = torch.cat([weights[key].flatten().float() for key in sorted(weights)]).double().numpy()
    values = {"loss": model.history["loss"].to_numpy(dtype="float64"), "score": out, "loaded": again}
    values |= {"some weights": every[:: max(1, len(every) // 5000)], "weights": digest(every.tobytes())}
    return values | {"names of weights": digest(json.dumps(sorted(weights)).encode())}


def trained(name: str, make: Callable[[Any], Any], adapter: bool = False, **recipe: Any) -> None:
    """A training with a fixed seed."""

    @configuration(name)
    def run(frame: pd.DataFrame) -> Values:
        settings = {"epochs": 20, "max_steps": 20, "queries_per_step": 1, "learning_rates": RATES, "seed": 7}
        torch.manual_seed(0)
        return after_training(make(ld.TrainingArgs(**{**settings, **recipe})), frame, adapter)


def in_tiny(cls: Callable[..., Any], **arguments: Any) -> Callable[[Any], Any]:
    """A model over a tiny random BERT, with dropout."""

    def make(recipe: Any) -> Any:
        with tempfile.TemporaryDirectory() as folder:
            model = cls(tiny.checkpoint(Path(folder)), **{**SMALL, **arguments}, training=recipe)
            model.transform(pd.DataFrame([{"qid": "1", "query": "a", "docno": "d", "text": "a"}]))  # loads the weights
        return model

    return make


trained(
    "training, 20 steps of PARADE attn",
    lambda recipe: ld.PARADE(ENCODER, **FP32, max_doc_len=300, training=recipe),
)
trained(
    "training, MaxP in epochs",
    in_tiny(ld.MaxP, stride=40),
    max_steps=None,
    queries_per_step=2,
    negatives=3,
    loss="ranknet",
)
trained(
    "training, CEDR pacrr pointwise", in_tiny(ld.CEDR, aggregation="pacrr"), sampling="pointwise", loss="pointwise_bce"
)
trained(
    "training, listwise and rotated",
    in_tiny(ld.AvgP),
    sampling="listwise",
    loss="lambda_loss",
    augment=position_augmentation("rotate"),
)
trained(
    "training, LoRA as an adapter",
    lambda recipe: ld.MaxP(ENCODER, **FP32, max_doc_len=150, training=recipe),
    adapter=True,
    lora=ld.Lora(rank=4),
    max_steps=5,
)


def documents(folder: Path) -> pd.DataFrame:
    """Twenty documents, from the shortest to the longest, behind two topics."""
    docs = pd.read_json(folder / "docs.jsonl", lines=True, dtype=str)
    docs = docs.iloc[docs["text"].str.len().argsort(kind="stable")]
    chosen = docs.iloc[np.linspace(0, len(docs) - 1, 20).round().astype(int)]
    topics = pd.read_csv(folder / "topics.tsv", sep="\t", names=["qid", "query"], dtype=str).head(2)
    rows = pd.concat([topics.iloc[[0]].merge(chosen, how="cross"), topics.iloc[[1]].merge(chosen[::4], how="cross")])
    rank = rows.groupby("qid").cumcount()
    return rows.assign(rank=rank, score=20.0 - rank).reset_index(drop=True)


def difference(one: Values, other: Values) -> tuple[float, str]:
    """The largest difference, relative where values are above 1, and where it is."""
    worst, where = 0.0, ""
    for key in sorted({*one, *other}):
        if key not in one or key not in other or one[key].shape != other[key].shape:
            return np.inf, key
        scale = np.maximum(1.0, np.abs(other[key]))
        apart = np.where(np.isnan(one[key]) & np.isnan(other[key]), 0.0, np.abs(one[key] - other[key]) / scale)
        largest = float(np.nan_to_num(apart, nan=np.inf).max(initial=0.0))
        if largest > worst:
            worst, where = largest, key
    return worst, where


def main() -> int:
    """Writes or compares the scores."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--collection", type=Path, required=True)
    parser.add_argument("--out", type=Path, help="write the scores to this file")
    parser.add_argument("--compare", type=Path, help="compare with the scores in this file")
    parser.add_argument("--only", nargs="+", default=[""], help="configurations with one of these words in their name")
    args = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    frame = documents(args.collection)
    chosen = {name: run for name, run in CONFIGURATIONS.items() if any(word in name for word in args.only)}
    before: dict[str, Values] = {}
    if args.compare:
        for key, values in np.load(args.compare).items():
            name, _, what = key.partition(" | ")
            before.setdefault(name, {})[what] = values
    after: dict[str, Values] = {}
    failed = 0
    for name, run in chosen.items():
        start = time.perf_counter()
        try:
            after[name] = run(frame.copy())
        except Exception as error:
            if args.out:
                raise
            failed += 1
            print(f"{name:45}fails: {type(error).__name__}: {error}", flush=True)
            continue
        line = f"{name:45}{time.perf_counter() - start:7.1f} s"
        if args.compare:
            worst, where = difference(after[name], before.get(name, {}))
            failed += worst > 1e-6
            line += f"{worst:12.1e}  {'differs: ' + where if worst > 1e-6 else 'equal'}"
        print(line, flush=True)
    if args.out:
        np.savez(args.out, **{f"{name} | {what}": v for name, values in after.items() for what, v in values.items()})
    if args.compare:
        print(f"{len(chosen) - failed} of {len(chosen)} configurations agree")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
