"""Windows of a query's candidates read best first, until its top 10 is settled: does that read fewer than fixed k?

    python -m tests.benchmarks.bench_anytime record PATH/time PATH/fairytaleqa PATH/newwiki docstrings --to FOLDER
    python -m tests.benchmarks.bench_anytime simulate time fairytaleqa newwiki docstrings --to FOLDER [--plot FILE.svg]

`record` scores all windows of BM25's first `--depth` documents by a packaged MaxP in bfloat16, and by BM25 with the
word frequencies of the collection, the cheap selector. It writes a line of JSON for each query and document; what is
written already is not scored again. Queries are `--dev` of the dev split and `--test` of the test split, drawn at
random; a collection without splits is divided.

`simulate` reads these scores as a reranker would read windows. All windows of a query are ordered by the selector and
read best first. A document's score is the best of its windows that are read. What its unread windows may still reach is
bounded by the selector score of its best unread window: a quantile of score given selector score over the dev queries,
at 1 - delta / (unread documents' bounds that must hold). Reading stops when the top 10 is settled, no unread bound being
above the tenth score, or above the score of a document in the top 10 that it could change, or when the budget is spent.
Fixed k reads the selector's k best windows of each document; k is the smallest on dev whose nDCG@10 is within .005 of
the best. The bar: at most half of fixed k's windows, and the paired 95 % interval of the difference in nDCG@10 above
-.005, on all four collections.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

TOP = 10
DELTAS = (0.5, 0.2, 0.05)
BUDGETS = (10, 20, 30, 40, 60, 80, 120, 200, 400)
KS = (1, 2, 3, 5, 8, 12, 20, 1000)
TOLERANCE = 0.005


# Recording.


def dataset_of(name: str) -> Any:
    """A folder, or the docstrings of the installed packages."""
    import pyterrier as pt

    return pt.get_dataset("longdoc:docstrings" if name == "docstrings" else f"longdoc:folder:{name}")


def topics_of(dataset: Any, dev: int, test: int) -> pd.DataFrame:
    """`qid, query, part`: dev and test queries, drawn at random from the splits, or from all queries."""
    rng = np.random.default_rng(0)
    try:
        pools = {part: dataset.get_topics(part) for part in ("dev", "test")}
    except (KeyError, ValueError):
        judged = dataset.get_topics().query("qid in @qids", local_dict={"qids": set(dataset.get_qrels()["qid"])})
        mixed = judged.iloc[rng.permutation(len(judged))]
        pools = {"dev": mixed.iloc[: min(dev, len(mixed) // 3)], "test": mixed.iloc[min(dev, len(mixed) // 3) :]}
    drawn = {
        part: pool.iloc[rng.permutation(len(pool))[: {"dev": dev, "test": test}[part]]] for part, pool in pools.items()
    }
    return pd.concat([frame.assign(part=part)[["qid", "query", "part"]] for part, frame in drawn.items()])


def candidates_of(dataset: Any, topics: pd.DataFrame, depth: int) -> pd.DataFrame:
    from pyterrier_longdoc.demo import first_stage

    with tempfile.TemporaryDirectory() as folder:
        run = (first_stage(dataset, Path(folder) / "index", depth) >> dataset.text_loader(["text"]))(topics)
    return run[["qid", "query", "docno", "text", "score", "rank"]].merge(topics[["qid", "part"]])


def selector_scores(selector: Any, query: str, text: str, spans: list[Any]) -> list[float]:
    """BM25 of each window, which is one token to the selector."""
    from pyterrier_longdoc.modelling.preselection import TextPairs
    from pyterrier_longdoc.modelling.tokens import TokenizedText

    pair = TextPairs([query], [TokenizedText(np.zeros(len(spans)), text, np.array(spans))], *np.zeros((2, 1), "int64"))
    return selector.scores(pair, [[(i, i + 1) for i in range(len(spans))]])[0].round(4).tolist()


def record(args: argparse.Namespace) -> None:
    import pyterrier_longdoc as ld

    model = ld.MaxP.load(args.model, dtype="bfloat16", explain=True)
    for name in args.collections:
        dataset, file = dataset_of(name), args.to / f"{Path(name).name}.jsonl"
        topics = topics_of(dataset, args.dev, args.test)
        qrels = dataset.get_qrels()
        label_of = dict(zip(zip(qrels["qid"], qrels["docno"], strict=True), qrels["label"], strict=True))
        texts = [str(row["text"]) for row in dataset.get_corpus_iter(verbose=False)]
        selector = ld.BM25Windows.from_texts(texts, 1)
        done = {json.loads(line)["qid"] for line in file.open()} if file.exists() else set()
        run = candidates_of(dataset, topics, args.depth)
        left = [qid for qid in run["qid"].unique() if qid not in done]
        start, windows = time.perf_counter(), 0
        for at in range(0, len(left), args.at_once):
            rows = model(run[run["qid"].isin(left[at : at + args.at_once])].rename(columns={"score": "bm25"}))
            lines = []
            for row in rows.itertuples():
                spans, scores = list(map(list, row.window_spans)), np.round(row.window_scores, 4).tolist()
                base = {"qid": row.qid, "query": row.query, "part": row.part, "docno": row.docno, "bm25": row.bm25}
                label = int(label_of.get((row.qid, row.docno), 0))
                cheap = selector_scores(selector, row.query, row.text, spans)
                lines.append(json.dumps({**base, "label": label, "spans": spans, "scores": scores, "cheap": cheap}))
                windows += len(spans)
            with file.open("a") as out:
                out.write("\n".join(lines) + "\n")
            rate = windows / (time.perf_counter() - start)
            print(f"{Path(name).name}: {at + args.at_once} of {len(left)} queries, {rate:.0f} windows/s", flush=True)


def recorded(file: Path) -> pd.DataFrame:
    """A row for each query and document, in the order of BM25."""
    return pd.DataFrame([json.loads(line) for line in file.open()])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=("record", "simulate"))
    parser.add_argument("collections", nargs="+", help="folders, or docstrings")
    parser.add_argument("--to", type=Path, required=True, help="folder of recorded scores")
    parser.add_argument("--model", default="longdoc:maxp")
    parser.add_argument("--depth", type=int, default=20, help="of BM25's candidates")
    parser.add_argument("--dev", type=int, default=40, help="queries")
    parser.add_argument("--test", type=int, default=100, help="queries")
    parser.add_argument("--at-once", type=int, default=5, help="queries scored between two writes")
    parser.add_argument("--plot", type=Path)
    args = parser.parse_args()
    args.to.mkdir(parents=True, exist_ok=True)
    record(args) if args.command == "record" else simulate(args)


if __name__ == "__main__":
    main()
