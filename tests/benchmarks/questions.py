"""Questions with gold text, BM25's candidates for them, and the name of the processor: what several scripts need."""

from __future__ import annotations

import contextlib
import platform
import re
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace

import pandas as pd
import pyterrier as pt

from pyterrier_longdoc.demo import first_stage


class Questions:
    """The questions of a collection's split: `topics`, `qrels`, and `gold` text, of which `placed` has a place.

    A collection is a folder with docs.jsonl, topics.tsv and qrels.txt, and where there is gold text also spans.jsonl,
    splits.tsv, passages.jsonl and findable.txt (questions that BM25 can find without their document). Without splits,
    all judged topics are drawn from.
    """

    def __init__(self, folder: Path, split: str, number: int) -> None:
        dataset = pt.get_dataset(f"longdoc:folder:{folder}")
        self.folder, self.texts = folder, {docno: row["text"] for docno, row in dataset.documents.items()}
        variant = split if dataset.splits else None
        qrels = dataset.get_qrels(variant)
        topics, findable = dataset.get_topics(variant).query("qid in @qrels.qid"), folder / "findable.txt"
        if findable.is_file():
            topics = topics[topics["qid"].isin(findable.read_text(encoding="utf-8").split())]
        if 0 < number < len(topics):
            topics = topics.sample(number, random_state=0)
        self.topics = topics.sort_values("qid", ignore_index=True)
        self.qrels = qrels.query("qid in @topics.qid")
        self.gold = dataset.gold[["qid", "docno", "start", "end"]].query("qid in @topics.qid")
        # What is most of its document has no place in it.
        lengths = [len(self.texts[docno]) for docno in self.gold["docno"]]
        self.placed = self.gold[(self.gold["end"] - self.gold["start"]) * 2 <= lengths]

    def task(self, name: str) -> tuple[dict[str, str], pd.DataFrame]:
        """Return the texts that are searched, and their qrels: documents, or the passages of all documents."""
        if name == "documents":
            return self.texts, self.qrels
        passages = pd.read_json(self.folder / "passages.jsonl", lines=True, dtype={"docno": str})
        columns = passages[["docno", "start", "end"]].itertuples(index=False)
        texts = {f"{docno}:{start}": self.texts[docno][start:end] for docno, start, end in columns}
        pairs = self.gold.merge(passages, on="docno", suffixes=("", "_passage"))
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


def processor() -> str:
    """The name of this machine's processor."""
    cpus = Path("/proc/cpuinfo")
    names = re.findall(r"model name\s*: (.*)", cpus.read_text()) if cpus.is_file() else []
    return names[0] if names else platform.processor()
