"""Which estimator of relevant positions is biased: estimates from a cross-encoder's scores beside known positions.

    python tests/benchmarks/bench_position_estimators.py [--collections docstrings-uniform docstrings-long ...]
        [--queries 40] [--known 10] [--judge longdoc:maxp] [--data PATH]

Collections, with their relevant passage at places that are drawn evenly:

- docstrings-uniform: `pt.get_dataset("longdoc:docstrings-uniform")`, about 900 tokens;
- docstrings-long: the docstrings with a topic (test topics) in documents of about 9,300 tokens of other docstrings;
- needle: one invented sentence in 8,192 tokens of news articles (TIME).

A packaged cross-encoder scores all chunks of 256 tokens of each document once. Thresholds are calibrated on the first
`--known` queries, or on the documents of other queries (one for each query), and all estimators are compared on the
remaining queries. Printed: the share of documents with an estimate, and of these the medians of known and of estimated
positions, the median distance of the two and their rank correlation (Spearman).
"""

from __future__ import annotations

import argparse
import json
import time
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyterrier as pt
from scipy import stats

import pyterrier_longdoc as ld
from pyterrier_longdoc.analysis import (
    Estimator,
    RelevantPositions,
    best_chunk,
    calibrated_on_nonrelevant,
    calibrated_on_positions,
    first_above,
    nonrelevant,
)

LONG: dict[str, Any] = {
    **{"position": "uniform", "max_doc_len": 9816, "length": 9300, "relevant_per_query": 1},
    **{"unfit": "skip", "max_passage": 256, "seed": 1},
}
"""Documents of about 36 chunks."""


def docstrings_long(data: Path, queries: int) -> Any:
    return ld.far_relevant(pt.get_dataset("longdoc:docstrings"), variant="test", **LONG)


def needle(data: Path, queries: int) -> Any:
    articles = (row["text"] for row in read_jsonl(data / "time" / "docs.jsonl"))
    return ld.needle(articles, lengths=(8192,), queries=queries, documents=queries)


COLLECTIONS: dict[str, Callable[[Path, int], Any]] = {
    "docstrings-uniform": lambda data, queries: pt.get_dataset("longdoc:docstrings-uniform"),
    "docstrings-long": docstrings_long,
    "needle": needle,
}


def read_jsonl(path: Path) -> Iterator[dict[str, Any]]:
    with path.open(encoding="utf-8") as lines:
        yield from map(json.loads, lines)


def judged(collection: Any, queries: int, judge: Any) -> tuple[RelevantPositions, RelevantPositions, pd.DataFrame]:
    """The chunks of relevant documents, those of documents of other queries, and known positions."""
    topics = collection.get_topics().sample(frac=1, random_state=0).head(queries).reset_index(drop=True)
    gold = collection.gold[collection.gold["qid"].isin(topics["qid"])].drop_duplicates("qid")
    gold = gold.set_index("qid").loc[topics["qid"]].reset_index()
    documents = collection.text_loader()(gold[["docno"]].drop_duplicates()).to_dict("records")
    find = partial(ld.relevant_positions, topics, corpus=documents, judge=judge, max_chunks=None)
    found = find(qrels=gold[["qid", "docno"]].assign(label=1))
    run = gold[["qid"]].assign(docno=np.roll(gold["docno"], 1))
    others = find(qrels=nonrelevant(run, collection.get_qrels()), relevant_from=0)
    return found, others, gold


def row(estimator: Estimator, label: str, found: RelevantPositions, gold: pd.DataFrame) -> dict[str, Any]:
    """How an estimator does."""
    estimated = found.by(estimator).matched
    both = estimated.merge(gold[["qid", "docno", "first_token"]], on=["qid", "docno"], suffixes=("", "_known"))
    return {
        "estimator": label,
        "found": len(both) / len(found.frame),
        "known": both["first_token_known"].median(),
        "estimated": both["first_token"].median(),
        "error": (both["first_token"] - both["first_token_known"]).abs().median(),
        "rank correlation": stats.spearmanr(both["first_token"], both["first_token_known"]).statistic,
    }


def table(found: RelevantPositions, others: RelevantPositions, gold: pd.DataFrame, known: int) -> pd.DataFrame:
    """A row for each estimator, by the queries after the first `known`."""
    chosen = found.frame["qid"].isin(gold["qid"].head(known)).to_numpy()
    kept = [document for document, used in zip(found.judged or [], chosen, strict=True) if not used]
    rest = RelevantPositions(found.frame[~chosen].reset_index(drop=True), kept)
    on_positions = calibrated_on_positions(found, gold.head(known))
    on_others = calibrated_on_nonrelevant(others)
    scores = np.concatenate([document.numbers for document in kept])
    median = float(np.median(scores))
    estimators: dict[str, Estimator] = {
        "best_chunk": best_chunk,
        f"first_above, {known} known positions ({on_positions.threshold:.2f})": on_positions,
        f"first_above, non-relevant documents ({on_others.threshold:.2f})": on_others,
        "first_above(0)": first_above(0),
        f"first_above, median score ({median:.2f})": first_above(median),
    }
    return pd.DataFrame([row(estimator, label, rest, gold) for label, estimator in estimators.items()])


def main() -> None:
    """Prints the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--collections", nargs="*", default=list(COLLECTIONS), choices=list(COLLECTIONS))
    parser.add_argument("--queries", type=int, default=40)
    parser.add_argument("--known", type=int, default=10, help="queries whose positions calibrate a threshold")
    parser.add_argument("--judge", default="longdoc:maxp", help="a saved or packaged model")
    parser.add_argument("--data", type=Path, help="folder with the collection time, which needle is made of")
    args = parser.parse_args()
    if "needle" in args.collections and args.data is None:
        parser.error("needle is made of a collection in --data")
    warnings.simplefilter("ignore")  # what they say of bad thresholds is what the table shows
    judge = ld.CrossEncoder.load(args.judge)
    for name in args.collections:
        start = time.perf_counter()
        found, others, gold = judged(COLLECTIONS[name](args.data, args.queries), args.queries, judge)
        lengths = found.frame["length"].astype(float)
        print(
            f"\n{name}: {len(gold) - args.known} queries, documents of {lengths.median():,.0f} tokens (median), known "
            f"positions at {gold['first_token'].iloc[args.known :].median():,.0f} (median); "
            f"{time.perf_counter() - start:.0f} s\n"
        )
        shown = table(found, others, gold, args.known)
        print(shown.round(dict.fromkeys(["found", "rank correlation"], 2)).to_string(index=False), flush=True)


if __name__ == "__main__":
    main()
