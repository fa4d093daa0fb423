"""What int8 costs in quality: rankings, evidence and calibration of the packaged MaxP, next to float32.

    python tests/benchmarks/bench_int8.py PATH/time PATH/fairytaleqa --to FOLDER [--queries 120]

BM25's first 10 documents of queries drawn from each collection's test split (all topics where there are no splits) are
reranked by the two windows that BM25 finds best, in float32 and in int8. The model is quantized on candidates of the
dev split (without splits, of the same topics). FOLDER keeps the results, so that an interrupted command resumes.

Columns: `difference` of int8 from float32 in nDCG@10, with a paired 95 % interval (Student's t); `tau`, Kendall's over
all documents; `evidence@1`, how often the best window of a relevant document overlaps its gold text; `ECE`, the
expected calibration error on one half of the queries after Platt scaling on the other half. Needs the extras `demo` and
`openvino`.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyterrier as pt
from scipy.stats import kendalltau, ttest_1samp
from sklearn.calibration import calibration_curve

import pyterrier_longdoc as ld
from pyterrier_longdoc.demo import first_stage

DEPTH, WINDOWS = 10, 2
MEASURE = "ndcg_cut_10"


def results_of(dataset: Any, to: Path, queries: int) -> dict[str, pd.DataFrame]:
    """Return the results in both precisions, with windows."""
    files = {name: to / f"{dataset.path.name}-{name}.jsonl.gz" for name in ("float32", "int8")}
    if not all(file.is_file() for file in files.values()):
        with tempfile.TemporaryDirectory() as scratch:
            bm25 = first_stage(dataset, Path(scratch) / "index", DEPTH) >> dataset.text_loader()
        frames = []
        for split, number in (("test", queries), ("dev", 30)):
            topics = dataset.get_topics(split if dataset.splits else None)
            frames.append(bm25(topics.sample(min(number, len(topics)), random_state=0)))
        candidates, dev = frames
        model = ld.MaxP.load("longdoc:maxp", dtype="float32", explain=True, preselect=ld.BM25Windows(WINDOWS))
        for name, scorer in (("float32", model), ("int8", model.quantize(dev))):
            if not files[name].is_file():
                scorer(candidates).to_json(files[name], orient="records", lines=True)
                print(f"{dataset.path.name} {name}: {scorer.coverage.windows} windows", flush=True)
    return {
        name: pd.read_json(file, lines=True, dtype=dict.fromkeys(("qid", "docno"), str)) for name, file in files.items()
    }


def row_of(dataset: Any, results: dict[str, pd.DataFrame]) -> dict[str, Any]:
    """Return one row of the table."""
    qrels = dataset.get_qrels("test" if dataset.splits else None)
    topics = results["float32"][["qid", "query"]].drop_duplicates()
    values = pt.Experiment(list(results.values()), topics, qrels, [MEASURE], list(results), perquery=True)
    wide = values.pivot_table("value", "qid", "name")
    gap = ttest_1samp(wide["int8"] - wide["float32"], 0)
    low, high = gap.confidence_interval()
    both = results["float32"].merge(results["int8"], on=["qid", "docno"])
    tau = both.groupby("qid").apply(lambda one: kendalltau(one["score_x"], one["score_y"]).statistic).mean()
    row = {
        "collection": dataset.path.name,
        "queries": len(wide),
        **{name: f"{wide[name].mean():.4f}" for name in results},
        "difference": f"{(wide['int8'] - wide['float32']).mean():+.4f} ({low:+.4f} to {high:+.4f})",
        "tau": round(tau, 3),
    }
    if len(dataset.gold):
        table = ld.evidence_recall(results, dataset.gold, 1).groupby("name")["value"].mean()
        row["evidence@1"] = " / ".join(f"{table[name]:.3f}" for name in results)
    halves = topics["qid"].iloc[::2]
    errors = []
    for frame in results.values():
        calibrated = ld.Calibrated(pt.Transformer.identity(), method="platt")
        calibrated.fit(frame[frame["qid"].isin(halves)].drop(columns="window_scores"), qrels)
        rest = frame[~frame["qid"].isin(halves)].drop(columns="window_scores")
        errors.append(f"{calibration_error(calibrated(rest), qrels):.3f}")
    return {**row, "ECE": " / ".join(errors)}


def calibration_error(results: pd.DataFrame, qrels: pd.DataFrame, bins: int = 10) -> float:
    """Return the expected calibration error for judged queries; unjudged documents count as not relevant."""
    judged = results[results["qid"].isin(qrels["qid"])].merge(qrels, how="left", on=["qid", "docno"])
    p = judged["probability"].to_numpy()
    shares, means = calibration_curve(judged["label"] > 0, p, n_bins=bins)
    documents = np.bincount(np.searchsorted(np.linspace(0, 1, bins + 1)[1:-1], p))
    return float(np.average(np.abs(shares - means), weights=documents[documents > 0]))


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("collections", nargs="+", type=Path, help="folders with docs.jsonl, topics.tsv and qrels.txt")
    parser.add_argument("--to", type=Path, required=True, help="folder of the results")
    parser.add_argument("--queries", type=int, default=120)
    args = parser.parse_args()
    args.to.mkdir(parents=True, exist_ok=True)
    datasets = [pt.get_dataset(f"longdoc:folder:{folder}") for folder in args.collections]
    rows = [row_of(dataset, results_of(dataset, args.to, args.queries)) for dataset in datasets]
    print(pd.DataFrame(rows).fillna("").to_string(index=False))


if __name__ == "__main__":
    main()
