"""Scores of every kind of model, kept in a file, to show that a change of the code changes no number.

    python tests/benchmarks/reference_scores.py --collection PATH/time --out reference.npz
    python tests/benchmarks/reference_scores.py --collection PATH/time --compare reference.npz

Run the first on the commit before a change and the second on the commit after it, on the same machine. `--compare`
prints one row per configuration with the largest difference (relative where values are above 1) and exits with 1 if one
is above `--tolerance`, 1e-6; after a training (losses, weights, scores) 1e-4 is allowed, unless the tolerance is 0.
Digests of weights and of their names are compared too: that they differ is told, but is no failure.

Every class reads the same 20 documents of the collection, of all lengths, in fp32 and one thread: the first topic all
of them, the second one five. The backbone is the packaged encoder with the weights of all-MiniLM-L6-v2, or one of the
tests' tiny random models: `tiny ...` are all classes over these, explained, saved and loaded, with titles, and after a
few steps of training. Three configurations read whole documents, the others at most 600 tokens. `--only` takes the
configurations whose names contain a word. Needs the extras `demo` and `train`. Takes about ten minutes on one core.
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
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from safetensors.torch import load_file

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import pyterrier_longdoc as ld
from pyterrier_longdoc import listwise
from pyterrier_longdoc.data import RotateDocuments, rotate
from pyterrier_longdoc.training import LOSSES
from tests.support import systems, tiny, tiny_answers, tiny_long

ENCODER = "longdoc:minilm-l6"
FP32: dict[str, Any] = {"dtype": "float32", "device": "cpu"}
SHORT: dict[str, Any] = {**FP32, "max_doc_len": 600}
SMALL: dict[str, Any] = {**FP32, "window_size": 60, "max_query_len": 16, "max_doc_len": 400}
"""For the tiny models, which have 128 positions and tokens of one letter."""

Values = dict[str, np.ndarray]
Run = Callable[[pd.DataFrame, Path], Values]
"""Values of a configuration, from candidates and an empty folder."""
CONFIGURATIONS: dict[str, Run] = {}

TRAINED = ("loss", "some weights", "trained score", "trained score, loaded")
"""Values after a training, where rounding errors have grown."""
TOLD = ("weights", "names of weights")
"""Digests whose difference is told, but is no failure."""


def scores_of(model: Any, frame: pd.DataFrame) -> Values:
    """The scores of a model, how much it read, and what windows contributed, if it explains."""
    out = model.transform(frame)
    values = {"score": out["score"].to_numpy(dtype="float64"), "rank": out["rank"].to_numpy(dtype="float64")}
    for column in ("window_scores", "window_weights", "window_spans", "term_scores", "best_start", "best_end"):
        if column in out:
            values[column] = flat(out[column])
    read = getattr(model, "coverage", None)
    if hasattr(read, "windows_per_document"):
        values["read"] = np.array([read.share_read, read.windows_per_document])
    return values


def score_of_a_copy(model: Any, frame: pd.DataFrame) -> tuple[np.ndarray, Values]:
    """The scores of a saved and loaded copy, and digests of the weights.

    Weights are taken in the order of their values, so that other names in the file change no more than `names`.
    """
    with tempfile.TemporaryDirectory() as folder:
        model.save(folder)
        files = sorted(Path(folder).rglob("*.safetensors"))
        weights = {f"{file.relative_to(folder)} {name}": t for file in files for name, t in load_file(file).items()}
        again = type(model).load(folder, **FP32).transform(frame)["score"].to_numpy(dtype="float64")
    every = torch.cat([tensor.flatten().float() for tensor in weights.values()]).sort().values.double().numpy()
    values = {"some weights": every[:: max(1, len(every) // 5000)], "weights": digest(every.tobytes())}
    return again, values | {"names of weights": digest(json.dumps(sorted(weights)).encode())}


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


# Models.


def minilm(cls: Callable[..., Any], **arguments: Any) -> Callable[[Path], Any]:
    """A model over the packaged encoder."""
    return lambda _: cls(ENCODER, **{**SHORT, **arguments})


def small(name: str, **arguments: Any) -> Callable[[Path], Any]:
    """A model over one of the tests' tiny random models."""
    return lambda _: systems.make(name, **arguments)


def longp(make: Callable[..., str], *given: str, **arguments: Any) -> Callable[[Path], Any]:
    """LongP over a tiny random model."""
    limits = {**FP32, "max_query_len": 16, "max_doc_len": 100}
    return lambda folder: ld.LongP(make(folder, *given), **{**limits, **arguments})


def common_letters(queries: Sequence[str], texts: Sequence[str]) -> list[float]:
    """A scorer without a model: how large a share of a text's letters are those of the query."""
    pairs = zip(queries, texts, strict=True)
    return [sum(letter in query for letter in text) / (1 + len(text)) for query, text in pairs]


LABELLED = partial(tiny_long.encoder, labels=1)
TRANSFORMER = {"aggregation": "transformer"}
MODELS: dict[str, Callable[[Path], Any]] = {
    "FirstP": minilm(ld.FirstP),
    "MaxP": minilm(ld.MaxP, max_doc_len=None),
    "MaxP padded, 1431 tokens": minilm(ld.MaxP, layout="padded", max_doc_len=1431),
    "MaxP first_last_random": minilm(ld.MaxP, max_windows=4, selection="first_last_random"),
    "MaxP words": minilm(ld.MaxP, windows=ld.SlidingWords(150, 100)),
    "MaxP BM25Windows": minilm(ld.MaxP, preselect=ld.BM25Windows(3)),
    "MaxP FirstK": minilm(ld.MaxP, preselect=ld.FirstK(2)),
    "MaxP EmbeddingWindows": minilm(ld.MaxP, preselect=ld.EmbeddingWindows(3, ld.BiEncoder(ENCODER, **FP32))),
    "MaxP CrossEncoderWindows": minilm(ld.MaxP, preselect=ld.CrossEncoderWindows(2, ld.FirstP(ENCODER, **FP32))),
    "MaxP explained": minilm(ld.MaxP, explain=True),
    "MaxP BM25Windows explained": minilm(ld.MaxP, preselect=ld.BM25Windows(3), explain=True),
    "FirstP shared": minilm(ld.FirstP, layout="shared-lowercase"),
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
    "CEDR knrm": minilm(ld.CEDR, aggregation="knrm"),
    "CEDR knrm explained": minilm(ld.CEDR, aggregation="knrm", explain=True),
    "CEDR pacrr": minilm(ld.CEDR, aggregation="pacrr"),
    "CEDR drmm": minilm(ld.CEDR, aggregation="drmm"),
    "NeuralModel1": minilm(ld.NeuralModel1),
    "LongP": minilm(ld.LongP, max_doc_len=477),
    "BiEncoder first": minilm(ld.BiEncoder, aggregation="first"),
    "BiEncoder max": minilm(ld.BiEncoder),
    "BiEncoder max explained": minilm(ld.BiEncoder, explain=True),
    "BiEncoder dot of cls, with prefixes": minilm(
        ld.BiEncoder, similarity="dot", pooling="cls", query_prefix="query: ", passage_prefix="passage: "
    ),
    "BiEncoder avg": minilm(ld.BiEncoder, aggregation="avg", windows=ld.SentenceWindows(max_tokens=100)),
    "packaged FirstP": lambda _: ld.FirstP.load("longdoc:firstp", **FP32),
    "packaged MaxP": lambda _: ld.MaxP.load("longdoc:maxp", **SHORT),
    "packaged AvgP": lambda _: ld.AvgP(ENCODER, window_size=100, **SHORT).start_from(ld.MaxP.load("longdoc:maxp")),
    "packaged PARADE attn": lambda _: ld.PARADE.load("longdoc:parade-attn", **SHORT),
    "LongP longformer": longp(LABELLED, "longformer"),
    "LongP longformer layout": longp(LABELLED, "longformer", layout="longformer"),
    "LongP bigbird": longp(LABELLED, "big_bird", attention_type="original_full"),
    "LongP modernbert": longp(LABELLED, "modernbert"),
    "LongP jina": longp(tiny_long.published, "jina"),
    "LongP mosaic": longp(tiny_long.published, "mosaic"),
    "LongP yes/no": longp(tiny_long.decoder, template="qwen3-reranker"),
    "tiny, layout padded-lowercase": small("MaxP", layout="padded-lowercase", max_doc_len=300),
    "tiny, layout shared": small("FirstP", layout="shared", max_doc_len=60),
    "tiny, pooling mean": small("MaxP", pooling="mean", max_doc_len=300),
    "tiny, pooling last": small("PARADE-attn", pooling="last", max_doc_len=300),
    "tiny, sentences": small("AvgP", windows=ld.SentenceWindows(max_tokens=60), window_size=None),
    "tiny, fixed grid": lambda _: ld.MaxP(tiny.encoder(), windows=ld.FixedGrid(50, 10), max_query_len=8),
    "tiny, PairScorer": lambda _: ld.MaxP(ld.PairScorer(common_letters), windows=ld.SlidingWords(50, 25)),
    "tiny, PARADE that starts from MaxP": lambda folder: systems.make("PARADE-attn", max_doc_len=300).start_from(
        systems.make("MaxP", tiny.checkpoint(folder, seed=5))
    ),
}
for family in ("bert", "electra", "roberta", "deberta-v2", "distilbert", "modernbert"):
    MODELS[f"MaxP {family}"] = lambda folder, family=family: ld.MaxP(
        tiny.checkpoint(folder, family), **SMALL, stride=40
    )
CONFIGURATIONS |= {
    name: lambda frame, folder, make=make: scores_of(make(folder), frame) for name, make in MODELS.items()
}


def configuration(name: str) -> Callable[[Run], Run]:
    """Enters a function among the configurations."""
    return lambda function: CONFIGURATIONS.setdefault(name, function)


TITLES: dict[str, Any] = {"text_field": ("title", "text"), "repeat": "title", "repeat_tokens": 8}
NO_TITLES = ("Birch", "LongP", "NeuralModel1")
"""Kinds that refuse titles, or have no windows to repeat them in."""


def titled(frame: pd.DataFrame) -> pd.DataFrame:
    """A second column: the last words of a text, in some rows none."""
    titles = [None if number % 5 == 4 else text[-40:] for number, text in enumerate(frame["text"])]
    return frame.assign(title=titles)


def tiny_kind(name: str, frame: pd.DataFrame, folder: Path) -> Values:
    """A class over a tiny random model, explained, and a copy that was saved."""
    model = systems.make(name, explain=True, **FP32, max_doc_len=300)
    values = scores_of(model, frame)
    if name in systems.CROSS_ENCODERS:
        values["loaded"], weights = score_of_a_copy(model, frame)
        values |= weights
    return values


def tiny_titled(name: str, frame: pd.DataFrame, folder: Path) -> Values:
    """The same class over documents with titles."""
    return scores_of(systems.make(name, explain=True, **FP32, max_doc_len=300, **TITLES), titled(frame))


CONFIGURATIONS |= {f"tiny {name}": partial(tiny_kind, name) for name in systems.SYSTEMS}
CONFIGURATIONS |= {
    f"tiny {name} with titles": partial(tiny_titled, name) for name in systems.SYSTEMS if name not in NO_TITLES
}


def selected(make: Callable[[], Any], cls: str, frame: pd.DataFrame, folder: Path) -> Values:
    """A choice of windows, of titled documents too, and saved with its model."""
    sizes = {**FP32, "max_doc_len": 600}
    model = systems.make(cls, preselect=make(), explain=True, **sizes)
    values = scores_of(model, frame)
    values["loaded"], _ = score_of_a_copy(model, frame)
    with_titles = scores_of(systems.make(cls, preselect=make(), **sizes, **TITLES), titled(frame))
    return values | {f"{key} with titles": value for key, value in with_titles.items()}


for name, make, cls in (
    ("FirstK", lambda: ld.FirstK(2), "MaxP"),
    ("BM25Windows", lambda: ld.BM25Windows(3), "PARADE-attn"),
    ("EmbeddingWindows", lambda: ld.EmbeddingWindows(3, systems.make("BiEncoder-max", **FP32)), "MaxP"),
    ("CrossEncoderWindows", lambda: ld.CrossEncoderWindows(2, ld.FirstP(tiny.encoder(), **FP32)), "MaxP"),
):
    CONFIGURATIONS[f"tiny, selected by {name}"] = partial(selected, make, cls)


def answering(template: str, family: str, options: dict[str, Any], frame: pd.DataFrame, folder: Path) -> Values:
    """A language model that answers yes or no, over texts of words that its tokenizer knows."""
    words, arguments = tiny.longer_results(), {"template": template, "max_query_len": 12, **FP32}
    _, backbone = tiny_answers.checkpoint(folder, family, tiny_answers.tokenizer(**options))
    values = scores_of(ld.FirstP(backbone, **arguments), words)
    explained = scores_of(ld.MaxP(backbone, window_size=12, stride=8, explain=True, **arguments), words)
    return values | {f"{key} of MaxP": value for key, value in explained.items()}


for template, family, options in (
    ("plain", "qwen3", {}),
    ("qwen3-reranker", "qwen3", {}),
    ("mxbai-rerank-v2", "qwen3", {}),
    ("bge-reranker-v2-gemma", "gemma", {"begin": True}),
    ("monot5", "t5", {"end": True}),
    ("yes-no", "qwen3", {"chat": tiny_answers.CHAT}),
):
    CONFIGURATIONS[f"template {template}"] = partial(answering, template, family, options)


@configuration("score cache, read again")
def cached(frame: pd.DataFrame, folder: Path) -> Values:
    """Scores that come from a file."""
    model = ld.MaxP(ENCODER, score_cache=folder / "scores.sqlite", **SHORT)
    model.transform(frame)
    return scores_of(model, frame)


# Language models that order documents.


def most_rain(messages: list[dict[str, str]]) -> str:
    """Stands in for a language model: orders documents by how often they say "THE"."""
    documents = [m["content"] for m in messages if m["role"] == "user" and m["content"].startswith("[")]
    order = sorted(documents, key=lambda text: -text.count("THE"))
    return " > ".join(text[: text.index("]") + 1] for text in order)


def many(frame: pd.DataFrame) -> pd.DataFrame:
    """Sixty documents of one query."""
    rows = pd.concat([frame, frame, frame], ignore_index=True).assign(qid="1", query=frame["query"].iloc[0])
    rows["text"] = [text[29 * (i % 7) :] for i, text in enumerate(rows["text"])]
    rows["docno"] = [f"{docno}-{i}" for i, docno in enumerate(rows["docno"])]
    return rows


RANKERS: dict[str, Any] = {
    "RankGPT": ld.RankGPT(most_rain),
    "RankGPT shuffled, passages": ld.RankGPT(most_rain, shuffles=3, preselect=ld.BM25Windows(2), seed=3),
    "RankGPT TopDown": ld.RankGPT(most_rain, schedule=listwise.TopDown()),
}
CONFIGURATIONS |= {name: lambda frame, _, model=model: scores_of(model, many(frame)) for name, model in RANKERS.items()}


@configuration("RotateDocuments")
def rotated(frame: pd.DataFrame, folder: Path) -> Values:
    """Texts that training would see."""
    return {"rotate": digest("\n".join(RotateDocuments().transform(frame)["text"]).encode())}


# Trainings.

RATES = {"encoder.": 1e-4, "": 1e-3}


def after_training(model: Any, frame: pd.DataFrame) -> Values:
    """Losses, weights and scores after a fit, and whether a loaded copy scores the same."""
    number = frame.groupby("qid").cumcount()
    qrels = frame[["qid", "docno"]].assign(label=number.mod(3).eq(0).astype(int) + number.mod(6).eq(0))
    model.fit(frame.assign(teacher_score=np.sin(np.arange(len(frame)))), qrels)
    out = model.transform(frame)["score"].to_numpy(dtype="float64")
    again, weights = score_of_a_copy(model, frame)
    losses = model.history["loss"].to_numpy(dtype="float64")
    return {"loss": losses, "trained score": out, "trained score, loaded": again, **weights}


def trained(make: Callable[[Any, Path], Any], **recipe: Any) -> Run:
    """A training with a fixed seed."""

    def run(frame: pd.DataFrame, folder: Path) -> Values:
        settings = {"epochs": 20, "max_steps": 20, "queries_per_step": 1, "learning_rates": RATES, "seed": 7}
        torch.manual_seed(0)
        return after_training(make(ld.TrainingArgs(**{**settings, **recipe}), folder), frame)

    return run


def in_tiny(cls: Callable[..., Any], **arguments: Any) -> Callable[[Any, Path], Any]:
    """A model over a tiny random BERT, with dropout."""
    return lambda recipe, folder: cls(tiny.checkpoint(folder), **{**SMALL, **arguments}, training=recipe)


def in_minilm(cls: Callable[..., Any], **arguments: Any) -> Callable[[Any, Path], Any]:
    """A model over the packaged encoder."""
    return lambda recipe, _: cls(ENCODER, **FP32, **arguments, training=recipe)


TRAININGS = {
    "20 steps of PARADE attn": trained(in_minilm(ld.PARADE, max_doc_len=300)),
    "MaxP in epochs": trained(
        in_tiny(ld.MaxP, stride=40), max_steps=None, queries_per_step=2, negatives=3, loss="ranknet"
    ),
    "CEDR pacrr pointwise": trained(in_tiny(ld.CEDR, aggregation="pacrr"), sampling="pointwise", loss="pointwise_bce"),
    "listwise and rotated": trained(in_tiny(ld.AvgP), sampling="listwise", loss="lambda_loss", augment=rotate),
    "LoRA": trained(in_minilm(ld.MaxP, max_doc_len=150), lora=ld.Lora(rank=4), max_steps=5),
}
for name, loss in LOSSES.items():
    kinds = {"loss": name, "sampling": "pairs" if loss.pairs else "listwise", "negatives": 3}
    TRAININGS[f"loss {name}"] = trained(in_tiny(ld.MaxP, stride=40), **kinds)
for name in systems.CROSS_ENCODERS:
    TRAININGS[f"tiny {name}"] = trained(
        lambda recipe, _, name=name: systems.make(name, max_doc_len=200, training=recipe, **FP32),
        max_steps=4,
        loss="ranknet",
    )
CONFIGURATIONS |= {f"training, {name}": run for name, run in TRAININGS.items()}


def documents(folder: Path) -> pd.DataFrame:
    """Twenty documents, from the shortest to the longest, behind two topics."""
    docs = pd.read_json(folder / "docs.jsonl", lines=True, dtype=str)
    docs = docs.iloc[docs["text"].str.len().argsort(kind="stable")]
    chosen = docs.iloc[np.linspace(0, len(docs) - 1, 20).round().astype(int)]
    topics = pd.read_csv(folder / "topics.tsv", sep="\t", names=["qid", "query"], dtype=str).head(2)
    rows = pd.concat([topics.iloc[[0]].merge(chosen, how="cross"), topics.iloc[[1]].merge(chosen[::4], how="cross")])
    rank = rows.groupby("qid").cumcount()
    return rows.assign(rank=rank, score=20.0 - rank).reset_index(drop=True)


def difference(one: np.ndarray | None, other: np.ndarray | None) -> float:
    """The largest difference of two arrays, relative where values are above 1; infinite for those of two shapes."""
    if one is None or other is None or one.shape != other.shape:
        return np.inf
    scale = np.maximum(1.0, np.abs(other))
    apart = np.where(np.isnan(one) & np.isnan(other), 0.0, np.abs(one - other) / scale)
    return float(np.nan_to_num(apart, nan=np.inf).max(initial=0.0))


def verdict(after: Values, before: Values, tolerance: float) -> tuple[bool, str]:
    """Whether a configuration agrees with the reference, and in words how well."""
    apart = {key: difference(after.get(key), before.get(key)) for key in sorted({*after, *before})}
    wrong = []
    for key in apart.keys() - TOLD:
        allowed = 100 * tolerance if key in TRAINED else tolerance
        if apart[key] > allowed:
            wrong.append(f"{key} {apart[key]:.1e}")
    worst = max((value for key, value in apart.items() if key not in TOLD), default=np.inf)
    told = [f"other {key}" for key in TOLD if apart.get(key)]
    return not wrong, f"{worst:12.1e}  " + (
        "differs: " + ", ".join(sorted(wrong)) if wrong else "; ".join(["agrees", *told])
    )


def read(path: Path) -> dict[str, Values]:
    """The values in a file, by configuration."""
    found: dict[str, Values] = {}
    for key, values in np.load(path).items():
        name, _, what = key.partition(" | ")
        found.setdefault(name, {})[what] = values
    return found


def main() -> int:
    """Writes or compares the scores."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--collection", type=Path, required=True)
    parser.add_argument("--out", type=Path, help="write the scores to this file")
    parser.add_argument("--compare", type=Path, help="compare with the scores in this file")
    parser.add_argument("--tolerance", type=float, default=1e-6, help="0 asks for the same bits")
    parser.add_argument("--only", nargs="+", default=[""], help="configurations with one of these words in their name")
    args = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    frame = documents(args.collection)
    chosen = {name: run for name, run in CONFIGURATIONS.items() if any(word in name for word in args.only)}
    before = read(args.compare) if args.compare else {}
    after: dict[str, Values] = {}
    failed = 0
    for name, run in chosen.items():
        start, agrees, line = time.perf_counter(), True, ""
        try:
            with tempfile.TemporaryDirectory() as folder:
                after[name] = run(frame.copy(), Path(folder))
        except Exception as error:  # noqa: BLE001 - told, and the others go on
            agrees, line = False, f"  fails: {type(error).__name__}: {error}"
        else:
            if args.compare:
                agrees, line = verdict(after[name], before.get(name, {}), args.tolerance)
        failed += not agrees
        print(f"{name:45}{time.perf_counter() - start:7.1f} s{line}", flush=True)
    if args.out:
        np.savez(args.out, **{f"{name} | {what}": v for name, values in after.items() for what, v in values.items()})
    print(f"{len(chosen) - failed} of {len(chosen)} configurations {'agree' if args.compare else 'ran'}")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
