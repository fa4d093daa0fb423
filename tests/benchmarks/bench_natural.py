"""Positional bias on questions about documents as they are: effectiveness by the place of the gold text, and evidence.

    python -m tests.benchmarks.bench_natural FOLDER_OF_COLLECTIONS --out FOLDER [--split dev] [--queries 300]
        [--collections fairytaleqa medquad ...] [--models FirstP MaxP ...] [--longp CHECKPOINT] [--windows 3]

A collection is a folder with docs.jsonl, topics.tsv, qrels.txt, spans.jsonl (gold text), splits.tsv, passages.jsonl and
perhaps findable.txt (questions that BM25 can find without their document). BM25's best documents are reranked, and its
best passages among those of all documents. Prints the page "Natural positions", every sentence made of the figures,
and writes it to FOLDER, with its tables as CSV. Finished runs in FOLDER are used again if the same model would make
them: an interrupted command goes on. Needs the extras `demo` and `analysis`.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
import tempfile
import warnings
from hashlib import blake2b
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pandas as pd
import pyterrier as pt
import torch
from ir_measures import RR, nDCG

import pyterrier_longdoc as ld
from pyterrier_longdoc.analysis import PositionEffectiveness
from pyterrier_longdoc.demo import BM25_WEIGHT, first_stage
from pyterrier_longdoc.experiment.significance import correct

from .natural_page import (
    ALPHA,
    COLLECTIONS,
    FIFTHS,
    NATURAL,
    ONE_WINDOW,
    fifth,
    findings,
    groups_of,
    page,
    with_verdicts,
)
from .replication.replicate import processor

MODELS = {
    "FirstP": ("longdoc:firstp", BM25_WEIGHT),
    "MaxP": ("longdoc:maxp", BM25_WEIGHT),
    "PARADE attn": ("longdoc:parade-attn", BM25_WEIGHT),
    "PARADE transformer": ("longdoc:parade-transformer", BM25_WEIGHT),
    "BiEncoder": ("longdoc:minilm-l6", None),
}
"""The models, and the weight of BM25 in each one's sum; None for no sum."""

MEASURES = [nDCG @ 10, RR]
EXPLAINED = ["qid", "docno", "window_spans", "window_scores"]
BLOCK = 50
"""Documents after which explained windows are written."""


# Models.


def load(name: str, args: argparse.Namespace, *, best: int) -> Any:
    """Return a model that reads the best windows by BM25 (0: all of them), its windows those of MaxP."""
    source, common = args.sources[name], {"dtype": args.dtype, "verbose": True}
    if name == "LongP" and not (Path(source) / "pt_meta.json").is_file():
        return ld.LongP(source, **common)
    if name == "BiEncoder":
        return ld.BiEncoder(source, windows=ld.CrossEncoder.load(MODELS["MaxP"][0]).make_windows(), **common)
    read = {"preselect": ld.BM25Windows(best)} if best and name not in ONE_WINDOW else {}
    return ld.CrossEncoder.load(source, **common, **read)


# Questions, and what is searched.


class Questions:
    """The questions of a collection's split: `topics`, `qrels`, and `gold` text, of which `placed` has a place."""

    def __init__(self, folder: Path, split: str, number: int) -> None:
        dataset = pt.get_dataset(f"longdoc:folder:{folder}")
        self.texts = {docno: row["text"] for docno, row in dataset.documents.items()}
        topics, findable = dataset.get_topics(split), folder / "findable.txt"
        if findable.is_file():
            topics = topics[topics["qid"].isin(findable.read_text(encoding="utf-8").split())]
        self.findable = len(topics)
        if 0 < number < len(topics):
            topics = topics.sample(number, random_state=0)
        self.topics = topics.sort_values("qid", ignore_index=True)
        self.qrels = dataset.get_qrels(split).query("qid in @topics.qid")
        gold = dataset.gold[["qid", "docno", "start", "end"]].query("qid in @topics.qid")
        size = gold["docno"].map(self.texts).map(len)
        self.gold, placed = gold, gold.assign(size=size)[(gold["end"] - gold["start"]) * 2 <= size]
        self.placed = placed.assign(
            fifth=[fifth(*row) for row in placed[["start", "end", "size"]].itertuples(index=False)]
        )
        self.passages = pd.read_json(folder / "passages.jsonl", lines=True, dtype={"docno": str})

    def task(self, name: str) -> tuple[dict[str, str], pd.DataFrame]:
        """Return the texts that are searched, and their qrels: documents, or the passages of all documents."""
        if name == "documents":
            return self.texts, self.qrels
        columns = self.passages[["docno", "start", "end"]].itertuples(index=False)
        texts = {f"{docno}:{start}": self.texts[docno][start:end] for docno, start, end in columns}
        pairs = self.gold.merge(self.passages, on="docno", suffixes=("", "_passage"))
        pairs = pairs.query("start < end_passage and start_passage < end")
        names = pairs["docno"] + ":" + pairs["start_passage"].astype(str)
        return texts, pairs.assign(docno=names, label=1)[["qid", "docno", "label"]].drop_duplicates()


def candidates(texts: dict[str, str], topics: pd.DataFrame, depth: int) -> pd.DataFrame:
    """Return BM25's best texts."""
    rows = [{"docno": docno, "text": text} for docno, text in texts.items()]
    with tempfile.TemporaryDirectory() as scratch, contextlib.redirect_stdout(sys.stderr):
        bm25 = first_stage(SimpleNamespace(get_corpus_iter=lambda verbose: rows), Path(scratch) / "index", depth)
        found = bm25(topics).sort_values(["qid", "rank"], ignore_index=True)
    return found.assign(text=found["docno"].map(texts))[["qid", "query", "docno", "text", "score", "rank"]]


# Figures.


def ranked(questions: Questions, task: str, folder: Path, args: argparse.Namespace) -> tuple[Any, pd.DataFrame]:
    """Return results of BM25, the models and the sums, each against FirstP and BM25, and what the models cost."""
    texts, qrels = questions.task(task)
    bm25 = pt.Transformer.from_df(candidates(texts, questions.topics, args.depth))
    # A factory loads its model when its turn comes.
    systems = {name: lambda name=name: bm25 >> load(name, args, best=args.windows) for name in args.sources}
    runs = ld.Experiment(
        {"BM25": bm25, **systems}, questions.topics, qrels, MEASURES, efficiency=True, save_dir=folder, verbose=True
    )
    frames = {name: runs.run(name) for name in runs.names}
    for name, (_, weight) in MODELS.items():
        if name in frames and weight is not None:
            both = frames[name].merge(frames["BM25"], on=["qid", "docno"], suffixes=("", "_first"))
            frames[f"{name} + BM25"] = both.assign(score=both["score"] + weight * both["score_first"])
    results = ld.Experiment(frames, questions.topics, qrels, MEASURES, baseline=["FirstP", "BM25"])
    costs = runs.efficiency[runs.efficiency["name"] != "BM25"]
    seconds = costs["rerank ms/query"] * len(questions.topics) / 1000
    columns = ["name", "share read", "windows/document", "rerank ms/document"]
    return results, costs[columns].assign(seconds=seconds, task=task)


def positions(results: Any, groups: dict[str, list[str]]) -> pd.DataFrame:
    """Return means by group with intervals, and p-values against FirstP and BM25, by Holm over systems and groups."""
    parts = {name: results.subset(qids) for name, qids in groups.items() if qids}
    by_group = PositionEffectiveness({"all": results, **parts})
    tests, keys = by_group.comparisons.copy(), ["group", "name", "measure"]
    for _, p in tests.groupby(["reference", "measure"])["p-value"]:
        tests.loc[p.index, "p-value corrected"] = correct(p.to_numpy(), "holm", ALPHA)[1]
    wide = tests.pivot(index=keys, columns="reference", values="p-value corrected").add_prefix("p against ")
    return by_group.table.merge(wide.reset_index(), on=keys, how="left")


def explained(questions: Questions, name: str, folder: Path, args: argparse.Namespace) -> pd.DataFrame:
    """Return a model's windows of the documents with gold text, all of them, with their scores."""
    pairs = questions.placed[["qid", "docno"]].drop_duplicates().merge(questions.topics, on="qid")
    pairs = pairs.assign(text=pairs["docno"].map(questions.texts))
    model = load(name, args, best=0)
    model.explain = True
    key = json.dumps([model.describe(), pairs.to_csv(index=False)], sort_keys=True)
    target = folder / f"windows-{name.replace(' ', '-')}-{blake2b(key.encode(), digest_size=8).hexdigest()}"
    target.mkdir(exist_ok=True)
    frames = []
    for start in range(0, len(pairs), BLOCK):
        file, block = target / f"{start}.jsonl.gz", pairs.iloc[start : start + BLOCK]
        if not file.is_file():
            part = target / f"part-{file.name}"
            model(block)[EXPLAINED].to_json(part, orient="records", lines=True)
            part.replace(file)
        columns = pd.read_json(file, lines=True, dtype={"qid": str, "docno": str})
        frames.append(block.merge(columns, on=["qid", "docno"]))
    return pd.concat(frames, ignore_index=True)


def evidence(questions: Questions, folder: Path, args: argparse.Namespace) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Return evidence@1 and @3 by group, and their comparisons with first, random and BM25's best windows."""
    # The first model's windows are those of the choices that it is compared with.
    frames = {name: explained(questions, name, folder, args) for name in args.sources if name not in ONE_WINDOW}
    found = ld.evidence_recall(frames, questions.placed, k=(1, 3))
    by_fifth = found.by_fifth.assign(group=[FIFTHS[number - 1] for number in found.by_fifth["fifth"]])
    return pd.concat([found.table.assign(group="all"), by_fifth.drop(columns="fifth")]), found.comparisons


def overview(name: str, questions: Questions, groups: dict[str, list[str]], by_task: dict[str, Any]) -> dict[str, Any]:
    """Return the row of a collection in the table of collections."""
    row: dict[str, Any] = {"collection": name, "positions": COLLECTIONS.get(name, (NATURAL, ""))[0]}
    row |= {
        "documents": len(questions.texts),
        "words": float(np.median([len(t.split()) for t in questions.texts.values()])),
    }
    row |= {"questions": len(questions.topics), "of": questions.findable}
    row["documents asked about"] = questions.qrels["docno"].nunique()
    row |= {group: len(groups[group]) for group in groups}
    bm25 = {task: float(results.means.loc["BM25", "nDCG@10"]) for task, results in by_task.items()}
    return row | {f"BM25, {task}": value for task, value in bm25.items()}


def main() -> None:
    """Make the figures, the tables and the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="folder of the collections' folders")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--collections", nargs="+", default=list(COLLECTIONS))
    parser.add_argument("--split", default="dev", help="variant of the topics (default dev)")
    parser.add_argument("--queries", type=int, default=300, help="sample so many; 0 takes all (default 300)")
    parser.add_argument("--models", nargs="+", choices=list(MODELS), default=list(MODELS), help="besides FirstP, MaxP")
    parser.add_argument("--longp", help="a long encoder: a saved LongP, or a checkpoint to make one of")
    parser.add_argument("--depth", type=int, default=20, help="documents and passages to rerank (default 20)")
    parser.add_argument("--windows", type=int, default=3, help="BM25's best of a document; 0 reads all (default 3)")
    parser.add_argument("--dtype", default="float32")
    args = parser.parse_args()
    args.sources = {n: s for n, (s, _) in MODELS.items() if n in ("FirstP", "MaxP", *args.models)}
    args.sources |= {"LongP": args.longp} if args.longp else {}
    # FirstP is meant to cut, one first stage is shared by all systems on purpose, and small samples are for trying out.
    warnings.simplefilter("ignore")
    names = ["BM25", *args.sources]
    tables: dict[str, list[pd.DataFrame]] = {}
    found, rows = [], []
    for name in args.collections:
        questions = Questions(args.folder / name, args.split, args.queries)
        folder = args.out / f"{name}-{args.split}-{args.queries}"
        folder.mkdir(parents=True, exist_ok=True)
        first = explained(questions, "FirstP", folder, args).set_index(["qid", "docno"])["window_spans"]
        ends = [first[qid, docno][0][1] for qid, docno in questions.placed[["qid", "docno"]].to_numpy()]
        groups = groups_of(questions.placed.assign(read=questions.placed["start"] < ends))
        by_task = {}
        for task in ("documents", "passages"):
            by_task[task], costs = ranked(questions, task, folder / task, args)
            tables.setdefault("costs", []).append(costs.assign(collection=name))
            own = positions(by_task[task], groups).assign(collection=name, task=task)
            tables.setdefault("positions", []).append(own)
        for title, table in zip(("evidence", "evidence tests"), evidence(questions, folder, args), strict=True):
            tables.setdefault(title, []).append(table.assign(collection=name))
        ndcg = [results.perquery.query("measure == 'nDCG@10'") for results in by_task.values()]
        wide = (each.pivot(index="qid", columns="name", values="value")[names] for each in ndcg)
        found += findings(name, *wide, groups)
        rows.append(overview(name, questions, groups, by_task))
    frames = {title: pd.concat(parts, ignore_index=True) for title, parts in tables.items()}
    frames |= {"collections": pd.DataFrame(rows), "findings": with_verdicts(found)}
    weights = [MODELS.get(name, ("", None))[1] for name in args.sources]
    frames["models"] = pd.DataFrame(
        {"model": args.sources.keys(), "from": args.sources.values(), "BM25 in sum": weights}
    )
    for title, frame in frames.items():
        frame.to_csv(args.out / f"{title.replace(' ', '-')}.csv", index=False)
    settings = {
        "depth": args.depth,
        "split": args.split,
        "read": f"the {args.windows} windows of a document that BM25 finds best" if args.windows else "all windows",
        "sample": f"{args.queries} of each collection, drawn at random" if args.queries else "all",
        "dtype": args.dtype,
        "processor": processor(),
        "threads": torch.get_num_threads(),
    }
    chosen = "" if args.models == list(MODELS) else f" --models {' '.join(args.models)}"
    chosen += " --longp CHECKPOINT" if args.longp else ""
    chosen += "" if args.dtype == "float32" else f" --dtype {args.dtype}"
    options = f"--split {args.split} --queries {args.queries} --depth {args.depth} --windows {args.windows}{chosen}"
    command = (
        f"python -m tests.benchmarks.bench_natural PATH --out OUT --collections {' '.join(args.collections)} {options}"
    )
    text = page(frames, command, settings)
    (args.out / "natural-positions.rst").write_text(text, encoding="utf-8")
    print(text)


if __name__ == "__main__":
    main()
