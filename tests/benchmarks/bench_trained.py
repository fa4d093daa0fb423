"""How good the packaged cross-encoders are: docstrings with long answers, and news articles that they never saw.

    python tests/benchmarks/bench_trained.py [--topics 100] [--depth 20] [--models firstp maxp ...] [--folder FOLDER]
    python tests/benchmarks/bench_trained.py --topics 200 --windows 3 --add-bm25
    python tests/benchmarks/bench_trained.py --collection PATH/time

Without `--collection`: topics of the docstrings' test split whose relevant document has more than 512 tokens. Reranks
BM25's top documents; prints nDCG@10 and reciprocal rank with p-values (paired t-test) against BM25 and against FirstP,
corrected by Holm. `--add-bm25` also shows the sums of each model's scores and BM25's. `--folder` takes the models from
there (of `train_docstrings.py`) instead of from the package. With `--windows 3` all but FirstP read the three
windows of a document that BM25 finds best, as in their training, instead of all.
Finished runs are kept in `--output` and read again by the same command. Needs the extra `demo`.
"""

from __future__ import annotations

import argparse
import tempfile
import warnings
from pathlib import Path
from typing import Any

MODELS = ("firstp", "maxp", "avgp", "parade-attn", "parade-transformer")


def collection(folder: str | None, topics: int) -> tuple[Any, Any, Any]:
    """A dataset, a sample of its topics, and its qrels."""
    import pyterrier as pt

    dataset = pt.get_dataset("longdoc:docstrings" if folder is None else f"longdoc:folder:{folder}")
    variant = "test-long" if folder is None else None
    chosen = dataset.get_topics(variant)
    if 0 < topics < len(chosen):
        chosen = chosen.sample(topics, random_state=0).sort_values("qid").reset_index(drop=True)
    return dataset, chosen, dataset.get_qrels(variant)


def table(systems: dict[str, Any], topics: Any, qrels: Any, runs: Path | None) -> Any:
    """Means, and p-values against BM25 and, where it is there, against FirstP; runs are kept in a folder."""
    import pyterrier as pt
    from ir_measures import RR, nDCG

    measures = [nDCG @ 10, RR]
    rows = None
    for baseline in ("BM25", "firstp"):
        if baseline not in systems:
            continue
        result = pt.Experiment(
            systems,
            topics,
            qrels,
            measures,
            baseline=baseline,
            correction="holm",
            filter_by_qrels=True,
            **({} if runs is None else {"save_dir": str(runs), "save_mode": "reuse"}),
        ).set_index("name")
        rows = result[list(map(str, measures))].round(4) if rows is None else rows
        for measure in map(str, measures):
            rows[f"{measure} p({baseline})"] = result[f"{measure} p-value corrected"].map("{:.1e}".format)
    return rows


def added(names: Any, runs: Path) -> dict[str, Any]:
    """By name, runs of BM25 and of each model plus BM25: sums of the scores as they are, no weight is tuned."""
    import pyterrier as pt

    found = {name: pt.io.read_results(str(runs / f"{name}.res.gz")) for name in ("BM25", *names)}
    first = found.pop("BM25")[["qid", "docno", "score"]]
    both = {name: run.merge(first, on=["qid", "docno"], suffixes=("", "_first")) for name, run in found.items()}
    sums = {
        f"{name} + BM25": pt.model.add_ranks(x.assign(score=x["score"] + x["score_first"])) for name, x in both.items()
    }
    return {"BM25": pt.model.add_ranks(first), **sums}


def main() -> None:
    """Prints the table of one collection."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--collection", help="folder with docs.jsonl, topics.tsv and qrels.txt")
    parser.add_argument("--topics", type=int, default=100, help="sample so many; 0 takes all")
    parser.add_argument("--depth", type=int, default=20)
    parser.add_argument("--models", nargs="*", default=MODELS, choices=MODELS)
    parser.add_argument("--folder", type=Path, help="where the models are; default: the package")
    parser.add_argument("--windows", type=int, help="read so many of a document's windows, BM25's best")
    parser.add_argument("--dtype", help="of the encoders, see CrossEncoder; default: the models' own")
    parser.add_argument("--add-bm25", action="store_true", help="also evaluate each model's scores plus BM25's")
    parser.add_argument("--output", type=Path, help="folder for the runs")
    parser.add_argument("--threads", type=int, help="of torch")
    args = parser.parse_args()
    import torch

    import pyterrier_longdoc as ld
    from pyterrier_longdoc.demo import first_stage

    if args.threads:
        torch.set_num_threads(args.threads)
    warnings.filterwarnings("ignore", message="There are shared pipeline components")
    dataset, topics, qrels = collection(args.collection, args.topics)
    with tempfile.TemporaryDirectory() as scratch:
        bm25 = first_stage(dataset, Path(scratch) / "index", args.depth)
        systems = {"BM25": bm25}
        for name in args.models:
            source = f"longdoc:{name}" if args.folder is None else args.folder / name
            read: dict[str, Any] = (
                {"preselect": ld.BM25Windows(args.windows)} if args.windows and name != "firstp" else {}
            )
            if args.dtype:
                read["dtype"] = args.dtype
            model = ld.CrossEncoder.load(source, verbose=True, **read)
            systems[name] = bm25 >> dataset.text_loader() >> model
        runs = args.output or Path(scratch) / "runs"
        runs.mkdir(parents=True, exist_ok=True)
        print(f"{len(topics)} topics, {args.depth} documents each")
        print(table(systems, topics, qrels, runs).to_string())
        if args.add_bm25:
            print(table(added(args.models, runs), topics, qrels, None).to_string())


if __name__ == "__main__":
    main()
