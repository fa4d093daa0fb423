"""Compares rerankers, and sums with BM25, with BM25 on questions with known answers: its first 20 are reranked.

    python tests/benchmarks/evaluate_questions.py candidates COLLECTIONS FOLDER
    python tests/benchmarks/evaluate_questions.py score FOLDER FOLDER/round1 STATE.safetensors
    python tests/benchmarks/evaluate_questions.py table FOLDER maxp+best5 maxsim+best5 maxp+best5,maxsim+best5
    python tests/benchmarks/evaluate_questions.py goals FOLDER maxp+best5,maxsim+best5 [--against parade-attn+best5]

`candidates` writes BM25's first 20 for up to 200 questions of each dev split, or 500 of a test split: documents where
BM25 leaves something to do on dev, an nDCG@10 of at most .90, else passages among all passages of a collection. `score`
reranks them by the windows that BM25 finds best. `table` shows nDCG@10 of BM25, of each model alone, and of its sums
with BM25 by `FUSIONS`; a comma adds models. `goals` tests sums of z-scores against BM25, or against another model with
.3 of BM25's raw score. Both take the questions that all named models have scored. `evidence` tells how often the best
window of the right document has the answer. All choices are made by these figures. With `--split test` the same is
done once for the test splits, and for TIME, Cranfield and Vaswani: the first look of `score` and of `evidence` is noted
in FOLDER/looked.json; an interrupted one goes on, one with other models is refused.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyterrier as pt
from safetensors.torch import load_file
from scipy.stats import ttest_1samp
from statsmodels.stats.multitest import multipletests
from train_questions import COLLECTIONS, NEVER, WITH_TITLES, Collection, Passage, Question, bm25_run

import pyterrier_longdoc as ld
from pyterrier_longdoc.common.files import replacing
from pyterrier_longdoc.common.packaged import ENCODER

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
    for name in NEVER if split == "test" else ():
        found = judged_candidates(collections / name)
        found.to_json(folder / f"test-{name}-documents.jsonl.gz", orient="records", lines=True)
        print(f"{name}: {found['qid'].nunique()} topics", flush=True)
    for name in (*COLLECTIONS, "docstrings"):
        kinds = ("documents",) if name == "docstrings" else ("documents", "passages") if name != "nq" else ("passages",)
        for kind in kinds:
            found = (
                docstring_candidates(split) if name == "docstrings" else own_candidates(collections / name, split, kind)
            )
            found.to_json(folder / f"{split}-{name}-{kind}.jsonl.gz", orient="records", lines=True)
            shown = f", BM25 {mean_of(found)}" if split == "dev" else ""
            print(f"{name} {kind}: {found['qid'].nunique()} questions{shown}", flush=True)


def own_candidates(folder: Path, split: str, kind: str) -> pd.DataFrame:
    """Return `qid, query, docno, title, text, score, rank, label` of a folder's questions."""
    collection = Collection(folder)
    passages = [p for each in ("train", "dev", "test") for p in collection.passages(each)]
    questions = collection.questions(split, passages)
    topics = chosen(pd.DataFrame([(q.qid, q.query) for q in questions], columns=["qid", "query"]), split)
    if kind == "passages":
        texts = {f"p{i}": (p.title, p.text) for i, p in enumerate(passages)}
        relevant = {(q.qid, f"p{i}") for q in questions for i in q.gold}
    else:
        texts = {d: (str(row.get("title") or ""), str(row["text"])) for d, row in collection.documents.items()}
        relevant = {(q.qid, passages[i].docno) for q in questions for i in q.gold}
    return with_texts(bm25_run({d: text for d, (_, text) in texts.items()}, topics, DEPTH), texts, relevant)


def docstring_candidates(split: str) -> pd.DataFrame:
    """Return the same of the docstrings."""
    dataset = pt.get_dataset("longdoc:docstrings")
    texts = {entry.docno: ("", entry.text) for entry in dataset.entries}
    qrels = dataset.get_qrels(split)
    relevant = set(zip(qrels["qid"], qrels["docno"], strict=True))
    run = bm25_run({d: text for d, (_, text) in texts.items()}, chosen(dataset.get_topics(split), split), DEPTH)
    return with_texts(run, texts, relevant)


def judged_candidates(folder: Path) -> pd.DataFrame:
    """Return the same of a folder with human judgements, all topics."""
    dataset = pt.get_dataset(f"longdoc:folder:{folder}")
    texts = {str(row["docno"]): ("", str(row["text"])) for row in dataset.get_corpus_iter(verbose=False)}
    qrels = dataset.get_qrels().query("label > 0")
    relevant = set(zip(qrels["qid"], qrels["docno"], strict=True))
    topics = dataset.get_topics().query("qid in @qrels.qid")
    return with_texts(bm25_run({d: text for d, (_, text) in texts.items()}, topics, DEPTH), texts, relevant)


def chosen(topics: pd.DataFrame, split: str) -> pd.DataFrame:
    """Return so many topics, always the same."""
    return topics.sample(QUESTIONS[split], random_state=0) if len(topics) > QUESTIONS[split] else topics


def with_texts(run: pd.DataFrame, texts: dict[str, tuple[str, str]], relevant: set[tuple[str, str]]) -> pd.DataFrame:
    """Add title, text and label to a run."""
    found = pd.DataFrame([texts[docno] for docno in run["docno"]], columns=["title", "text"], index=run.index)
    label = [int(pair in relevant) for pair in zip(run["qid"], run["docno"], strict=True)]
    missed = {qid for qid, _ in relevant} - set(run["qid"])
    columns = ["qid", "query", "docno", "title", "text", "score", "rank", "label", "relevant"]
    counts = pd.Series([qid for qid, _ in relevant if qid not in missed]).value_counts()
    return run.join(found).assign(label=label, relevant=run["qid"].map(counts))[columns]


def read(folder: Path, split: str, *, all_kinds: bool = False) -> dict[str, pd.DataFrame]:
    """Return the candidates, `squad-passages` and so on: documents if BM25 leaves something to do, else passages."""
    found = {}
    for name in (*COLLECTIONS, "docstrings", *NEVER):
        for kind in ("documents", "passages"):
            file = folder / "data" / f"{split}-{name}-{kind}.jsonl.gz"
            if not file.is_file() or (f"{name}-documents" in found and not all_kinds):
                continue
            if all_kinds or kind == "passages" or name in ("docstrings", *NEVER) or left_to_do(folder, name):
                frame = pd.read_json(file, orient="records", lines=True, dtype=TEXT).fillna("")
                found[f"{name}-{kind}"] = frame.assign(kind=kind)
    return found


def left_to_do(folder: Path, name: str) -> bool:
    """Return whether BM25 leaves something to do among a collection's documents, on its dev split."""
    file = folder / "data" / f"dev-{name}-documents.jsonl.gz"
    return mean_of(pd.read_json(file, orient="records", lines=True, dtype=TEXT).fillna(""))[0] <= MOST


def values_of(frame: pd.DataFrame, score: np.ndarray | pd.Series | None = None) -> pd.DataFrame:
    """Return nDCG@10 and RR by qid; ties are in the order of BM25."""
    own = frame if score is None else frame.assign(score=np.asarray(score))
    own = own.sort_values(["qid", "score"], ascending=[True, False], kind="stable")
    place = own.groupby("qid").cumcount().to_numpy()
    gain = own["label"].to_numpy() / np.log2(place + 2) * (place < 10)
    rr = own["label"].to_numpy() / (place + 1)
    best = (
        own.assign(gain=gain, rr=rr).groupby("qid").agg(gain=("gain", "sum"), rr=("rr", "max"), n=("relevant", "first"))
    )
    ideal = best["n"].map(lambda n: sum(1 / np.log2(i + 2) for i in range(min(int(n), 10))))
    return pd.DataFrame({"nDCG@10": best["gain"] / ideal, "RR": best["rr"]})


def mean_of(frame: pd.DataFrame, score: Any = None) -> tuple[float, float]:
    """Return the means of both."""
    means = values_of(frame, score).mean().round(4)
    return float(means["nDCG@10"]), float(means["RR"])


# Evidence.


def evidence(folder: Path, collections: Path, names: list[str], args: argparse.Namespace) -> None:
    """Print how often the best window of the right document overlaps the gold text, of BM25's ten best windows."""
    for collection in ("squad", "newwiki", "fairytaleqa", "medquad"):
        own = Collection(collections / collection)
        passages = [p for each in ("train", "dev", "test") for p in own.passages(each)]
        questions = {q.qid: q for q in own.questions(args.split, passages)}
        asked = pd.DataFrame([(q.qid, q.query) for q in questions.values()], columns=["qid", "query"])
        asked = asked.sample(min(args.questions, len(asked)), random_state=2, ignore_index=True)
        places = [spans_of(questions[qid], passages) for qid in asked["qid"]]
        documents = [passages[questions[qid].gold[0]].docno for qid in asked["qid"]]
        texts = [str(own.documents[docno]["text"]) for docno in documents]
        frame = asked.assign(docno=documents, text=texts)
        for name, best in [(name, 10) for name in names] + [(names[0], 1)]:
            model = model_of(name, "documents", titles=False, best=best)
            model.explain = True
            out = model(frame)
            found = [
                any(start < e and s < end for s, e in own_places)
                for start, end, own_places in zip(out["best_start"], out["best_end"], places, strict=True)
            ]
            there = [
                any(start < e and s < end for start, end in spans for s, e in own_places)
                for spans, own_places in zip(out["window_spans"], places, strict=True)
            ]
            title = (
                "BM25's best window" if best == 1 else f"{Path(name).name} (gold among the ten: {np.mean(there):.3f})"
            )
            print(f"{collection} {title}: {np.mean(found):.3f} of {len(found)}", flush=True)


def spans_of(question: Question, passages: list[Passage]) -> list[tuple[int, int]]:
    """Return the gold characters in the document of the first gold passage: of the answer where it is known."""
    if question.answer:
        number, start, end = question.answer
        return [(passages[number].start + start, passages[number].start + end)]
    own = [passages[i] for i in question.gold if passages[i].docno == passages[question.gold[0]].docno]
    return [(p.start, p.start + len(p.text)) for p in own]


# Scores.


def model_of(name: str, kind: str, *, titles: bool, best: int, dtype: str = "bfloat16") -> Any:
    """Return a model for passages or documents: a packaged one, a folder, or the weights of a training's state."""
    fields: dict[str, Any] = WITH_TITLES if titles else {"text_field": "text", "repeat": None}
    if kind == "passages":
        reading: dict[str, Any] = {"window_size": 256, "stride": 256, "max_doc_len": 256}
    else:
        reading = {**WINDOWS, "max_doc_len": None, "preselect": ld.BM25Windows(best) if best else None}
    arguments = {**reading, **fields, "dtype": dtype}
    if not name.endswith(".safetensors"):
        return ld.CrossEncoder.load(name, **arguments)
    model = ld.MaxP(ENCODER, **arguments)
    model.model.mark_trained({})
    tensors = {k.removeprefix("model/"): v for k, v in load_file(name).items() if k.startswith("model/")}
    _, unexpected = model.model.load_state_dict(tensors, strict=False)
    if unexpected:
        raise ValueError(f"{name} has {unexpected}")
    return model


def score(folder: Path, names: list[str], args: argparse.Namespace) -> None:
    """Write the scores of models, a file for each collection."""
    target = folder / "scores"
    target.mkdir(exist_ok=True)
    for name in names:
        short = Path(name).name.removesuffix(".safetensors").replace("longdoc:", "")
        short += ("+titles" if args.titles else "") + (f"+best{args.best}" if args.best else "+all")
        for collection, frame in read(folder, args.split, all_kinds=bool(args.only)).items():
            file = target / f"{args.split}-{collection}-{short}.csv"
            if file.is_file() or (args.only and collection not in args.only):
                continue
            own = sampled(frame, args.questions)
            begin = time.process_time()
            model = model_of(name, frame["kind"].iloc[0], titles=args.titles, best=args.best, dtype=args.dtype)
            out = model(own.drop(columns=["score", "rank"]))
            with replacing(file) as whole:
                out[["qid", "docno", "score"]].to_csv(whole, index=False)
            took, questions = time.process_time() - begin, own["qid"].nunique()
            bm25, alone = mean_of(own), mean_of(own, out["score"])
            seconds = f"{took / questions:.1f} CPU s each"
            print(f"{short} {collection}: {alone} (BM25 {bm25}) on {questions}, {seconds}", flush=True)


def sampled(frame: pd.DataFrame, questions: int) -> pd.DataFrame:
    """Return the candidates of so many questions, always the same."""
    qids = frame["qid"].drop_duplicates()
    return frame[frame["qid"].isin(qids.sample(min(questions, len(qids)), random_state=1))]


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
    if unknown := [name for name in only if not (folder / "data" / f"{split}-{name}.jsonl.gz").is_file()]:
        raise SystemExit(f"--only {' '.join(unknown)}: no candidates of the {split} split in {folder}")
    for file in sorted((folder / "data").glob(f"{split}-*.jsonl.gz")):
        collection = file.name.removeprefix(f"{split}-").removesuffix(".jsonl.gz")
        scores = {model: folder / "scores" / f"{split}-{collection}-{model}.csv" for model in models}
        if collection in (only or [collection]) and all(each.is_file() for each in scores.values()):
            frame = pd.read_json(file, orient="records", lines=True, dtype=TEXT).drop(columns=["title", "text"])
            for model, each in scores.items():
                own = pd.read_csv(each, dtype={"qid": str, "docno": str}).rename(columns={"score": model})
                frame = frame.merge(own, on=["qid", "docno"])
            found[collection] = frame
    return found


def table(folder: Path, split: str, args: argparse.Namespace) -> pd.DataFrame:
    """Return nDCG@10 of BM25, the models and their sums, by collection, and the mean."""
    rows = {}
    for collection, frame in scored(folder, split, args.models, args.only).items():
        row = {"questions": frame["qid"].nunique(), "BM25": mean_of(frame)[0]}
        for system in args.models:
            models = system.split(",")
            for how in ("alone", "raw", *FUSIONS) if len(models) == 1 else FUSIONS:
                row[f"{system}: {how}"] = mean_of(frame, fused(frame, models, how))[0]
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
            before = values_of(frame, baseline)["nDCG@10"]
            after = values_of(frame, fused(frame, system.split(","), "z"))["nDCG@10"]
            test = ttest_1samp(after - before, 0.0)
            means = before.mean(), after.mean(), (after - before).mean()
            row = (system, collection.replace("-", " "), len(before), *means)
            rows.append((*row, *test.confidence_interval(), test.pvalue))
        names = ["collection", "questions", args.against or "BM25", "sum", "difference", "low", "high", "p"]
        own = pd.DataFrame(rows, columns=["with BM25", *names])
        tables.append(own.assign(**{"p (Holm)": multipletests(own["p"], method="holm")[1]}))
    return pd.concat(tables)


def look_once(folder: Path, command: str, what: list[str]) -> None:
    """Note the first look of a command at the test splits; refuse another one, with other models."""
    file = folder / "looked.json"
    looked = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
    if looked.get(command, {}).get("looked at") == what:
        return  # an interrupted one goes on
    if command in looked:
        raise SystemExit(f"the test splits were looked at before: {looked[command]}")
    commit = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=True).stdout.strip()
    looked[command] = {"date": datetime.now(UTC).isoformat(timespec="seconds"), "commit": commit, "looked at": what}
    file.write_text(json.dumps(looked), encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    commands = parser.add_subparsers(dest="command", required=True)
    first = commands.add_parser("candidates")
    first.add_argument("collections", type=Path)
    first.add_argument("folder", type=Path)
    second = commands.add_parser("score")
    second.add_argument("folder", type=Path)
    second.add_argument("models", nargs="+")
    second.add_argument("--titles", action="store_true", help="read the title with each window")
    second.add_argument("--dtype", default="bfloat16")
    second.add_argument("--best", type=int, default=3, help="windows of a document that are read; 0 for all")
    second.add_argument("--questions", type=int, default=max(QUESTIONS.values()))
    fourth = commands.add_parser("evidence")
    fourth.add_argument("folder", type=Path)
    fourth.add_argument("collections", type=Path)
    fourth.add_argument("models", nargs="+")
    fourth.add_argument("--questions", type=int, default=max(QUESTIONS.values()))
    third, fifth = commands.add_parser("table"), commands.add_parser("goals")
    for each in (third, fifth):
        each.add_argument("folder", type=Path)
        each.add_argument("models", nargs="+", help="as their files of scores are called; a comma adds")
    fifth.add_argument("--against", help="a model with .3 of BM25's raw score; default: BM25")
    for each in (second, third, fifth):
        each.add_argument("--only", nargs="+", default=[], help="collections, e.g. medquad-passages")
    for each in (first, second, third, fourth, fifth):
        each.add_argument("--split", choices=("dev", "test"), default="dev")
    args = parser.parse_args()
    if args.split == "test" and args.command in ("score", "evidence"):
        look_once(args.folder, args.command, args.models)
    if args.command == "candidates":
        candidates(args.collections, args.folder / "data", args.split)
    elif args.command == "score":
        score(args.folder, args.models, args)
    elif args.command == "evidence":
        evidence(args.folder, args.collections, args.models, args)
    else:
        make = goals if args.command == "goals" else table
        found = make(args.folder, args.split, args)
        print(found.to_string(index=False, float_format="{:.4f}".format))


if __name__ == "__main__":
    main()
