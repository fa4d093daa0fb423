"""Compares rerankers, and sums with BM25, with BM25 on questions with known answers: its first 20 are reranked.

    python tests/benchmarks/evaluate_questions.py candidates COLLECTIONS FOLDER
    python tests/benchmarks/evaluate_questions.py score FOLDER longdoc:maxp FOLDER/round1 [--best 5]
    python tests/benchmarks/evaluate_questions.py table FOLDER maxp+best5 maxsim+best5 maxp+best5,maxsim+best5
    python tests/benchmarks/evaluate_questions.py goals FOLDER maxp+best5,maxsim+best5 [--against parade-attn+best5]

`candidates` writes BM25's first 20 for up to 200 questions of each dev split, or 500 of a test split: documents where
BM25 leaves something to do on dev, an nDCG@10 of at most .90, else passages among all passages of a collection. `score`
reranks them by the windows that BM25 finds best. `table` shows nDCG@10 of BM25, of each model alone, and of its sums
with BM25 by `FUSIONS`; a comma adds models. `goals` tests sums of z-scores against BM25, or against another model with
.3 of BM25's raw score. Both take the questions that all named models have scored. An interrupted `score` goes on. All
choices are made by these figures. With `--split test` the same is done once for the test splits, and for TIME,
Cranfield and Vaswani.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyterrier as pt
from questions import candidates as bm25_candidates
from scipy.stats import ttest_1samp
from statsmodels.stats.multitest import multipletests
from train_questions import COLLECTIONS, NEVER, Collection

import pyterrier_longdoc as ld
from pyterrier_longdoc.common.files import replacing

MOST = 0.9
DEPTH = 20
QUESTIONS = {"dev": 200, "test": 500}
RAW_WEIGHT = 0.3
"""Of BM25's raw score in a sum, the recipe before z-scores."""
RRF = 60
"""Cormack et al. 2009."""
WINDOWS = {"window_size": 100, "stride": 80}
TEXT = dict.fromkeys(("qid", "query", "docno", "title", "text"), str)


# Candidates.


def candidates(collections: Path, folder: Path, split: str) -> None:
    """Write BM25's candidates with texts and labels, a file for each collection."""
    parts = [(name, "documents") for name in (*COLLECTIONS, "docstrings") if name != "nq"]
    parts += [(name, "passages") for name in COLLECTIONS]
    parts += [(name, "documents") for name in NEVER if split == "test"]
    for name, kind in parts:
        asked_of = {"docstrings": docstrings_asked, **dict.fromkeys(NEVER, judged)}.get(name, asked)
        topics, texts, relevant = asked_of(collections / name, split, kind)
        if name not in NEVER and len(topics) > QUESTIONS[split]:
            topics = topics.sample(QUESTIONS[split], random_state=0)
        run = bm25_candidates({docno: text for docno, (_, text) in texts.items()}, topics, DEPTH)
        found = with_texts(run.drop(columns="text"), texts, relevant)
        found.to_json(folder / f"{split}-{name}-{kind}.jsonl.gz", orient="records", lines=True)
        print(f"{name} {kind}: {found['qid'].nunique()} questions", flush=True)


Asked = tuple[pd.DataFrame, dict[str, tuple[str, str]], set[tuple[str, str]]]
"""Topics, titles and texts by docno, and relevant pairs of qid and docno."""


def asked(folder: Path, split: str, kind: str) -> Asked:
    """Return the questions of a folder's split."""
    collection = Collection(folder)
    passages = [p for each in ("train", "dev", "test") for p in collection.passages(each)]
    questions = collection.questions(split, passages)
    topics = pd.DataFrame([(q.qid, q.query) for q in questions], columns=["qid", "query"])
    if kind == "passages":
        texts = {f"p{i}": (p.title, p.text) for i, p in enumerate(passages)}
        return topics, texts, {(q.qid, f"p{i}") for q in questions for i in q.gold}
    texts = {d: (row.get("title", ""), row["text"]) for d, row in collection.documents.items()}
    return topics, texts, {(q.qid, passages[i].docno) for q in questions for i in q.gold}


def docstrings_asked(folder: Path, split: str, kind: str) -> Asked:
    """Return the same of the docstrings."""
    dataset = pt.get_dataset("longdoc:docstrings")
    texts = {entry.docno: ("", entry.text) for entry in dataset.entries}
    qrels = dataset.get_qrels(split)
    return dataset.get_topics(split), texts, set(zip(qrels["qid"], qrels["docno"], strict=True))


def judged(folder: Path, split: str, kind: str) -> Asked:
    """Return the same of a folder with human judgements and no splits."""
    dataset = pt.get_dataset(f"longdoc:folder:{folder}")
    texts = {docno: ("", row["text"]) for docno, row in dataset.documents.items()}
    qrels = dataset.get_qrels().query("label > 0")
    topics = dataset.get_topics().query("qid in @qrels.qid")
    return topics, texts, set(zip(qrels["qid"], qrels["docno"], strict=True))


def with_texts(run: pd.DataFrame, texts: dict[str, tuple[str, str]], relevant: set[tuple[str, str]]) -> pd.DataFrame:
    """Add title, text and label to a run."""
    found = pd.DataFrame([texts[docno] for docno in run["docno"]], columns=["title", "text"], index=run.index)
    label = [int(pair in relevant) for pair in zip(run["qid"], run["docno"], strict=True)]
    missed = {qid for qid, _ in relevant} - set(run["qid"])
    columns = ["qid", "query", "docno", "title", "text", "score", "rank", "label", "relevant"]
    counts = pd.Series([qid for qid, _ in relevant if qid not in missed]).value_counts()
    return run.join(found).assign(label=label, relevant=run["qid"].map(counts))[columns]


def read(folder: Path, split: str, only: list[str]) -> dict[str, pd.DataFrame]:
    """Return candidates by names such as `squad-passages`: the named ones, or those that models are compared on."""
    files = files_of(folder, split, only).items()
    return {name: read_file(file) for name, file in files if only or is_compared(folder, name)}


def files_of(folder: Path, split: str, only: list[str]) -> dict[str, Path]:
    """Return the files of candidates by the names of collections: the named ones, or all."""
    files = sorted((folder / "data").glob(f"{split}-*.jsonl.gz"))
    found = {file.name.removeprefix(f"{split}-").removesuffix(".jsonl.gz"): file for file in files}
    if unknown := [name for name in only if name not in found]:
        raise SystemExit(f"--only {' '.join(unknown)}: no candidates of the {split} split in {folder}")
    return {name: found[name] for name in only or found}


def read_file(file: Path) -> pd.DataFrame:
    return pd.read_json(file, orient="records", lines=True, dtype=TEXT).fillna("")


def is_compared(folder: Path, collection: str) -> bool:
    """Return whether these are documents where BM25 leaves something to do on dev, or passages elsewhere."""
    name, kind = collection.rsplit("-", 1)
    if name in ("docstrings", *NEVER):
        return True
    documents = folder / "data" / f"dev-{name}-documents.jsonl.gz"
    is_left = documents.is_file() and ndcg(read_file(documents)).mean() <= MOST
    return is_left == (kind == "documents")


def ndcg(frame: pd.DataFrame, score: np.ndarray | pd.Series | None = None) -> pd.Series:
    """Return nDCG@10 by qid; ties are in the order of BM25."""
    own = frame if score is None else frame.assign(score=np.asarray(score))
    own = own.sort_values(["qid", "score"], ascending=[True, False], kind="stable")
    place = own.groupby("qid").cumcount().to_numpy()
    own = own.assign(gain=own["label"].to_numpy() / np.log2(place + 2) * (place < 10))
    best = own.groupby("qid").agg(gain=("gain", "sum"), n=("relevant", "first"))
    return best["gain"] / best["n"].map(lambda n: sum(1 / np.log2(i + 2) for i in range(min(int(n), 10))))


# Scores.


def model_of(name: str, kind: str, *, best: int, dtype: str) -> Any:
    """Return a packaged model, or one in a folder, as it reads passages or documents."""
    if kind == "passages":
        reading: dict[str, Any] = {"window_size": 256, "stride": 256, "max_doc_len": 256}
    else:
        reading = {**WINDOWS, "max_doc_len": None, "preselect": ld.BM25Windows(best) if best else None}
    return ld.CrossEncoder.load(name, **reading, text_field="text", repeat=None, dtype=dtype)


def score(folder: Path, names: list[str], args: argparse.Namespace) -> None:
    """Write the scores of models, a file for each collection."""
    target = folder / "scores"
    target.mkdir(exist_ok=True)
    for name in names:
        short = Path(name).name.replace("longdoc:", "") + (f"+best{args.best}" if args.best else "+all")
        for collection, frame in read(folder, args.split, args.only).items():
            file = target / f"{args.split}-{collection}-{short}.csv"
            if file.is_file():
                continue
            qids = frame["qid"].drop_duplicates()
            own = frame[frame["qid"].isin(qids.sample(min(args.questions, len(qids)), random_state=1))]
            begin = time.process_time()
            model = model_of(name, collection.rsplit("-", 1)[1], best=args.best, dtype=args.dtype)
            out = model(own.drop(columns=["score", "rank"]))
            with replacing(file) as whole:
                out[["qid", "docno", "score"]].to_csv(whole, index=False)
            took, questions = time.process_time() - begin, own["qid"].nunique()
            means = f"{ndcg(own, out['score']).mean():.4f} (BM25 {ndcg(own).mean():.4f})"
            print(f"{short} {collection}: {means} on {questions}, {took / questions:.1f} CPU s each", flush=True)


# Sums.


def scaled(frame: pd.DataFrame, scores: pd.Series, how: str) -> np.ndarray:
    """Return scores on a scale of their own for each query: z-scores, 0 to 1, or by rank."""
    if how == "z":
        return ld.ZScore()(frame.assign(score=scores))["score"].to_numpy()
    queries = scores.groupby(frame["qid"])
    if how == "rank":
        return 1 / (RRF + queries.rank(ascending=False, method="first").to_numpy())
    least, most = queries.transform("min"), queries.transform("max")
    return ((scores - least) / (most - least).replace(0.0, 1.0)).to_numpy()


FUSIONS: dict[str, tuple[str, float]] = {
    "z": ("z", 1.0),
    "z, .5 BM25": ("z", 0.5),
    "z, .25 BM25": ("z", 0.25),
    "min-max": ("min-max", 1.0),
    "RRF": ("rank", 1.0),
}
"""How scores are scaled, and the weight of BM25 in the sum."""


def fused(frame: pd.DataFrame, models: list[str], how: str) -> np.ndarray:
    """Return the sum of BM25's scores, which are in `score`, and those of models; `alone` and `raw` take the first."""
    if how in ("alone", "raw"):
        return (frame[models[0]] + (RAW_WEIGHT if how == "raw" else 0.0) * frame["score"]).to_numpy()
    scale, weight = FUSIONS[how]
    return weight * scaled(frame, frame["score"], scale) + sum(scaled(frame, frame[m], scale) for m in models)


def scored(folder: Path, split: str, systems: list[str], only: list[str]) -> dict[str, pd.DataFrame]:
    """Return the candidates of each collection with a column for each model, of questions that all have scored."""
    found, models = {}, sorted({model for system in systems for model in system.split(",")})
    for collection, file in files_of(folder, split, only).items():
        scores = {model: folder / "scores" / f"{split}-{collection}-{model}.csv" for model in models}
        if all(each.is_file() for each in scores.values()):
            frame = read_file(file).drop(columns=["title", "text"])
            for model, each in scores.items():
                own = pd.read_csv(each, dtype={"qid": str, "docno": str}).rename(columns={"score": model})
                frame = frame.merge(own, on=["qid", "docno"])
            found[collection] = frame
    return found


def table(folder: Path, split: str, args: argparse.Namespace) -> pd.DataFrame:
    """Return nDCG@10 of BM25, the models and their sums, by collection, and the mean."""
    rows = {}
    for collection, frame in scored(folder, split, args.models, args.only).items():
        row = {"questions": frame["qid"].nunique(), "BM25": ndcg(frame).mean()}
        for system in args.models:
            models = system.split(",")
            for how in ("alone", "raw", *FUSIONS) if len(models) == 1 else FUSIONS:
                row[f"{system}: {how}"] = ndcg(frame, fused(frame, models, how)).mean()
        rows[collection.replace("-", " ")] = row
    found = pd.DataFrame(rows)
    return found.assign(mean=found.mean(axis=1)).rename_axis("nDCG@10").reset_index()


def goals(folder: Path, split: str, args: argparse.Namespace) -> pd.DataFrame:
    """Return sums of z-scores against a baseline: 95 % intervals, paired t-tests, Holm over the collections."""
    tables, others = [], [args.against] if args.against else []
    frames = scored(folder, split, [*args.models, *others], args.only)
    for system in args.models:
        rows = []
        for collection, frame in frames.items():
            baseline = fused(frame, others, "raw") if others else frame["score"]
            before, after = ndcg(frame, baseline), ndcg(frame, fused(frame, system.split(","), "z"))
            test = ttest_1samp(after - before, 0.0)
            means = before.mean(), after.mean(), (after - before).mean()
            row = (system, collection.replace("-", " "), len(before), *means)
            rows.append((*row, *test.confidence_interval(), test.pvalue))
        names = ["collection", "questions", args.against or "BM25", "sum", "difference", "low", "high", "p"]
        own = pd.DataFrame(rows, columns=["with BM25", *names])
        tables.append(own.assign(**{"p (Holm)": multipletests(own["p"], method="holm")[1]}))
    return pd.concat(tables)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    commands = parser.add_subparsers(dest="command", required=True)
    first = commands.add_parser("candidates")
    first.add_argument("collections", type=Path)
    first.add_argument("folder", type=Path)
    second = commands.add_parser("score")
    second.add_argument("folder", type=Path)
    second.add_argument("models", nargs="+")
    second.add_argument("--dtype", default="bfloat16")
    second.add_argument("--best", type=int, default=3, help="windows of a document that are read; 0 for all")
    second.add_argument("--questions", type=int, default=max(QUESTIONS.values()))
    third, fourth = commands.add_parser("table"), commands.add_parser("goals")
    for each in (third, fourth):
        each.add_argument("folder", type=Path)
        each.add_argument("models", nargs="+", help="as their files of scores are called; a comma adds")
    fourth.add_argument("--against", help="a model with .3 of BM25's raw score; default: BM25")
    for each in (second, third, fourth):
        each.add_argument("--only", nargs="+", default=[], help="collections, e.g. medquad-passages")
    for each in (first, second, third, fourth):
        each.add_argument("--split", choices=("dev", "test"), default="dev")
    args = parser.parse_args()
    if args.command == "candidates":
        data = args.folder / "data"
        data.mkdir(parents=True, exist_ok=True)
        candidates(args.collections, data, args.split)
    elif args.command == "score":
        score(args.folder, args.models, args)
    else:
        make = goals if args.command == "goals" else table
        print(make(args.folder, args.split, args).to_string(index=False, float_format="{:.4f}".format))


if __name__ == "__main__":
    main()
