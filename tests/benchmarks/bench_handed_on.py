"""How much gold text reaches a reader for so many tokens, and what probabilities are worth on another collection.

    python -m tests.benchmarks.bench_handed_on PATH/fairytaleqa PATH/newwiki --to FOLDER [--queries 100 60] [--skip 200]

A packaged MaxP scores all windows of BM25's first 10 documents in float32, for `--queries` of each collection's test
split, drawn at random after the first `--skip`. FOLDER keeps the scores: an interrupted command goes on. The documents
are handed on, right and wrong ones, with 500 and with 2,000 tokens of MaxP. Evidence recall is the share of a query's
gold characters (`spans.jsonl`) in the text.

- `Evidence`: by MaxP's scores, over all documents; with `windows alone` without the document's score;
- `Evidence, equal shares`: the same with a tenth of the tokens for each document, and its last window cut to fill it;
- `BM25's best windows`: `Evidence` by BM25's scores of windows, with the word frequencies of the collection;
- `first tokens, equal shares`: a tenth for each document, from its beginning;
- `first tokens`: documents from their beginnings, in the order of ranks, until the tokens are spent.

Calibration: `Calibrated` learns from all test queries of one collection and is tried on the other, and from one half of
the queries of a collection on its other half. `before` is the sigmoid of the score. Needs the extra `demo`.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyterrier as pt
from scipy.special import expit

import pyterrier_longdoc as ld
from pyterrier_longdoc.common.packaged import ENCODER
from pyterrier_longdoc.comparison.significance import Statistics, resampled_means
from pyterrier_longdoc.modelling.tokens import TokenizedText, tokenized
from pyterrier_longdoc.rerankers.calibrated import FEWEST

from .bench_int8 import calibration_error
from .questions import candidates

DEPTH = 10
BUDGETS = (500, 2000)
"""Tokens of a query."""
AT_ONCE = 5
"""Queries that are scored between two writes."""
KEPT = ["qid", "query", "docno", "score", "rank", "window_spans", "window_scores", "cheap"]


def results_of(dataset: Any, queries: int, skip: int, file: Path) -> pd.DataFrame:
    """The test queries' documents with MaxP's scores, windows and texts."""
    rng = np.random.default_rng(0)
    # The draw from the dev split comes first, so that questions are those of the figures.
    _, test = (topics.iloc[rng.permutation(len(topics))] for topics in map(dataset.get_topics, ("dev", "test")))
    texts = {str(docno): str(row["text"]) for docno, row in dataset.documents.items()}
    run = candidates(texts, test.iloc[skip : skip + queries], DEPTH).rename(columns={"score": "bm25"})
    model = ld.MaxP.load("longdoc:maxp", dtype="float32", explain=True)
    selector = ld.BM25Windows(1)
    kept = file.read_text(encoding="utf-8").splitlines() if file.is_file() else []
    done = {json.loads(line)["qid"] for line in kept}
    left = [qid for qid in run["qid"].unique() if qid not in done]
    for at in range(0, len(left), AT_ONCE):
        scored = model(run[run["qid"].isin(left[at : at + AT_ONCE])])
        scored["cheap"] = [selector_scores(selector, *row) for row in scored[["query", "text", "window_spans"]].values]
        with file.open("a", encoding="utf-8") as out:
            out.write(scored[KEPT].to_json(orient="records", lines=True))
        print(f"{file.stem}: {min(at + AT_ONCE, len(left))} of {len(left)} queries", flush=True)
    rows = pd.read_json(file, lines=True, dtype={"qid": str, "docno": str})
    return rows.assign(text=rows["docno"].map(texts))


def selector_scores(selector: ld.BM25Windows, query: str, text: str, spans: Any) -> list[float]:
    """BM25 of each window, which is one token to the selector."""
    windows = TokenizedText(np.zeros(len(spans)), text, np.array(spans))
    return selector.scores([query], [windows], [[(i, i + 1) for i in range(len(spans))]])[0].tolist()


def handed_on(results: pd.DataFrame, gold: pd.DataFrame) -> pd.DataFrame:
    """Evidence recall and tokens of each query, by system and budget."""
    reading = [
        (-1e5 * rank - np.arange(len(spans))).tolist() for rank, spans in results[["rank", "window_spans"]].values
    ]
    scores = {
        "Evidence": results,
        "Evidence, windows alone": results,
        "BM25's best windows": results.assign(window_scores=results["cheap"]),
        "first tokens": results.assign(window_scores=reading),
    }
    kept = []
    for budget in BUDGETS:
        for name, frame in scores.items():
            handing = ld.Evidence(budget, document_weight=float(name == "Evidence"), tokenizer=ENCODER)
            out = handing(frame).assign(text=frame["text"])
            kept.append(recall(out, gold).assign(system=name, budget=budget))
        for name, frame in (("Evidence", results), ("first tokens", scores["first tokens"])):
            kept.append(
                recall(in_shares(frame, budget // DEPTH), gold).assign(system=f"{name}, equal shares", budget=budget)
            )
    return pd.concat(kept, ignore_index=True)


def in_shares(results: pd.DataFrame, share: int) -> pd.DataFrame:
    """Each document's best windows, the last one cut, so that each has its share of tokens."""
    spans, counts = [], []
    for row in results.itertuples():
        tokens = tokenized(ENCODER, row.text)
        starts = tokens.offsets[:, 0]
        taken = np.zeros(len(tokens), dtype=bool)
        for window in np.argsort(-np.array(row.window_scores), kind="stable"):
            first, last = np.searchsorted(starts, row.window_spans[window])
            fresh = np.flatnonzero(~taken[first:last])[: share - int(taken.sum())]
            taken[first + fresh] = True
        spans.append([tokens.characters((i, i + 1)) for i in np.flatnonzero(taken)])
        counts.append(int(taken.sum()))
    return results.assign(evidence_spans=spans, evidence_tokens=counts)


def recall(out: pd.DataFrame, gold: pd.DataFrame) -> pd.DataFrame:
    """The share of gold characters in the spans, and the tokens, of each query."""
    gold_of = gold.groupby(["qid", "docno"])[["start", "end"]].agg(list)
    found: dict[str, list[float]] = {}
    for row in out.itertuples():
        own = found.setdefault(row.qid, [0.0, 0.0, 0.0])
        own[2] += row.evidence_tokens
        if (row.qid, row.docno) not in gold_of.index:
            continue
        wanted, given = np.zeros(len(row.text), dtype=bool), np.zeros(len(row.text), dtype=bool)
        for start, end in zip(*gold_of.loc[(row.qid, row.docno)], strict=True):
            wanted[start:end] = True
        for start, end in row.evidence_spans:
            given[start:end] = True
        letters = np.array([not character.isspace() for character in row.text], dtype=bool)
        own[0] += (wanted & given & letters).sum()
        own[1] += (wanted & letters).sum()
    rows = [(qid, hit / total, tokens) for qid, (hit, total, tokens) in found.items() if total]
    return pd.DataFrame(rows, columns=["qid", "recall", "tokens"])


def table(values: pd.DataFrame) -> pd.DataFrame:
    """Means with bootstrap intervals over queries, and the paired difference of `Evidence` from each."""
    rows = []
    for budget, of_budget in values.groupby("budget"):
        wide = of_budget.pivot_table("recall", "qid", "system")
        samples = resampled_means(wide.to_numpy())
        low, high = Statistics().interval(samples)
        own = samples[:, list(wide).index("Evidence")]
        gaps = Statistics().interval(own[:, None] - samples)
        tokens = of_budget.groupby("system")["tokens"].mean()
        for i, system in enumerate(wide):
            gap = "" if system == "Evidence" else f"{gaps[0, i]:+.3f} to {gaps[1, i]:+.3f}"
            mean = f"{wide[system].mean():.3f} ({low[i]:.3f} to {high[i]:.3f})"
            rows.append([budget, system, round(tokens[system]), mean, gap])
    return pd.DataFrame(rows, columns=["budget", "system", "tokens", "recall", "Evidence is more by"])


def calibration(results: dict[str, pd.DataFrame], qrels: dict[str, pd.DataFrame]) -> pd.DataFrame:
    rows = []
    scores: Any = pt.Transformer.identity()
    halves = {name: frame["qid"].drop_duplicates().iloc[::2] for name, frame in results.items()}
    for name, frame in results.items():
        for other, target in results.items():
            here = frame[frame["qid"].isin(halves[name])] if name == other else frame
            there = target[~target["qid"].isin(halves[other])] if name == other else target
            if (here.merge(qrels[name], on=["qid", "docno"])["label"] > 0).sum() < FEWEST:
                continue
            before = calibration_error(there.assign(probability=expit(there["score"])), qrels[other])
            for method in ("platt", "isotonic"):
                for explained in (False, True):
                    drop = [] if explained else ["window_scores"]
                    model = ld.Calibrated(scores, method=method).fit(here.drop(columns=drop), qrels[name])
                    after = calibration_error(model(there.drop(columns=drop)), qrels[other])
                    errors = f"{before:.3f}", f"{after:.3f}"
                    rows.append([name, other, method, "yes" if explained else "no", *errors])
    return pd.DataFrame(rows, columns=["fit on", "tried on", "method", "windows", "before", "after"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("collections", nargs="+", type=Path)
    parser.add_argument("--to", type=Path, required=True, help="folder of the scores")
    parser.add_argument("--queries", nargs="+", type=int, default=[100], help="for all collections, or for each")
    parser.add_argument("--skip", type=int, default=0, help="test queries that an earlier choice has seen")
    args = parser.parse_args()
    args.to.mkdir(parents=True, exist_ok=True)
    numbers = args.queries * (len(args.collections) if len(args.queries) == 1 else 1)
    results, qrels = {}, {}
    for path, queries in zip(args.collections, numbers, strict=True):
        dataset = pt.get_dataset(f"longdoc:folder:{path}")
        qrels[path.name] = dataset.get_qrels()
        results[path.name] = results_of(dataset, queries, args.skip, args.to / f"{path.name}.jsonl")
        values = handed_on(results[path.name], dataset.gold)
        print(f"\n{path.name}: {values['qid'].nunique()} test queries with gold text in the {DEPTH} documents")
        print(table(values).to_string(index=False), flush=True)
    print(f"\n{calibration(results, qrels).to_string(index=False)}")


if __name__ == "__main__":
    main()
