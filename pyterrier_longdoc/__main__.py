"""The main job: BM25 and long-document rerankers side by side on a real collection, offline.

    python -m pyterrier_longdoc [--collection DIR] [--backbone NAME_OR_FOLDER] [--queries N] [--depth N]

Without arguments it indexes the documentation of the installed Python packages, reranks with FirstP, MaxP, AvgP and
PARADE (small cross-encoders that come with this package, on an encoder from PyPI), and compares them in one
`pt.Experiment`.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pandas as pd
import pyterrier as pt
from ir_measures import AP, nDCG

from .common.files import import_extra

MODELS = ("FirstP", "MaxP", "AvgP", "PARADE")
MEASURES = [nDCG @ 10, AP]
"""With one relevant document per topic, as in the default collection, AP is the reciprocal rank."""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the main job.

    Args:
        argv: command-line arguments; None takes those of the process.

    Returns:
        The process's exit code.
    """
    args = _arguments(argv)
    out = Path(args.output)
    runs = out / "runs"
    runs.mkdir(parents=True, exist_ok=True)
    _check_settings(args, out / "settings.json", runs)
    dataset, variant = _collection(args.collection)
    topics = dataset.get_topics(variant)
    if args.queries and args.queries < len(topics):
        topics = topics.sample(args.queries, random_state=args.seed).sort_values("qid").reset_index(drop=True)
    qrels = dataset.get_qrels(variant)
    # Runs are saved system by system, so that the job can resume; the shared first stage costs milliseconds.
    warnings.filterwarnings("ignore", message="There are shared pipeline components")
    with tempfile.TemporaryDirectory() as folder:
        bm25 = first_stage(dataset, Path(folder) / "index", args.depth)
        systems = pipelines(bm25 >> dataset.text_loader(), args.backbone)
        print(f"{len(topics)} topics, {args.depth} documents each; systems: BM25, {', '.join(systems)}")
        table = pt.Experiment(
            {"BM25": bm25, **systems},
            topics,
            qrels,
            MEASURES,
            baseline=args.baseline,
            correction="holm",
            filter_by_qrels=True,
            save_dir=str(runs),
            save_mode="reuse",
        )
    table.to_csv(out / "table.csv", index=False)
    print(f"\n{readable(table).to_string(index=False)}\n")
    for name, system in systems.items():
        model = system[-1]
        if model.coverage is not None:
            print(f"{name}: {model.coverage}")
    plot(runs, ["BM25", *systems], topics, qrels, out / "comparison.png")
    print(f"\nruns, table and picture are in {out}/")
    return 0


def first_stage(dataset: Any, folder: Path, depth: int) -> Any:
    """BM25 over a dataset's documents with PISA, which needs no Java.

    Args:
        dataset: a PyTerrier dataset with a corpus.
        folder: where the index goes.
        depth: documents to retrieve per topic.
    """
    pisa = import_extra("pyterrier_pisa", "demo", "pyterrier_pisa is missing")
    print("reading the collection ...", flush=True)
    documents = list(dataset.get_corpus_iter(verbose=False))
    print(f"indexing {len(documents)} documents ...", flush=True)
    with _silent_libraries():
        index = pisa.PisaIndex(str(folder), text_field="text")
        index.index(documents)
        return index.bm25(num_results=depth)


def pipelines(first_stage: Any, backbone: str | None = None) -> dict[str, Any]:
    """The systems to compare, by name.

    Args:
        first_stage: retriever and text loader.
        backbone: a cross-encoder; None for the models that come with this package.
    """
    from .rerankers.base import LongDocReranker
    from .rerankers.cross import PARADE, AvgP, FirstP, MaxP

    if backbone is None:
        packaged = zip(MODELS, ("firstp", "maxp", "avgp", "parade-attn"), strict=True)
        models = {name: LongDocReranker.load(f"longdoc:docstrings-{model}", verbose=True) for name, model in packaged}
    else:
        classes = zip(MODELS, (FirstP, MaxP, AvgP, PARADE), strict=True)
        models = {name: cls(backbone, verbose=True) for name, cls in classes}
    return {name: first_stage >> model for name, model in models.items()}


def readable(table: pd.DataFrame) -> pd.DataFrame:
    """An experiment's table with rounded means, corrected p-values and marks where a difference is significant."""
    rows = pd.DataFrame({"system": table["name"]})
    for measure in map(str, MEASURES):
        rows[measure] = table[measure].map("{:.4f}".format)
        p_values = table[f"{measure} p-value corrected"].map("{:.4f}".format).replace("nan", "")
        marks = table[f"{measure} reject"].map({True: " *", False: ""})
        rows[f"{measure} p (Holm)"] = p_values + marks
    if "mrt" in table:
        rows["ms/query"] = table["mrt"].round(1)
    return rows


def plot(runs: Path, names: list[str], topics: pd.DataFrame, qrels: pd.DataFrame, path: Path) -> None:
    """Draws the mean of each measure with its 95 % confidence interval (normal approximation over queries)."""
    # Not of pyplot, whose backend is the caller's: this picture is for a file.
    figures = import_extra("matplotlib.figure", "demo", "matplotlib is missing")
    systems: dict[str, Any] = {name: pt.io.read_results(str(runs / f"{name}.res.gz")) for name in names}
    values = pt.Experiment(systems, topics, qrels, MEASURES, perquery=True, filter_by_qrels=True)
    figure = figures.Figure(figsize=(5 * len(MEASURES), 0.6 * len(names) + 1.2))
    axes = figure.subplots(1, len(MEASURES), sharey=True)
    for axis, measure in zip(axes, map(str, MEASURES), strict=True):
        of_measure = values[values["measure"] == measure].groupby("name")["value"]
        means = of_measure.mean().reindex(names)
        half_width = 1.96 * of_measure.sem().reindex(names)
        colours = ["0.6" if name == "BM25" else "tab:blue" for name in names]
        axis.barh(range(len(names)), means, xerr=half_width, color=colours, capsize=3)
        axis.set_yticks(range(len(names)), names)
        axis.set_xlabel(f"{measure}, mean and 95% interval over {len(topics)} topics")
        axis.spines[["top", "right"]].set_visible(False)
    axes[0].invert_yaxis()
    figure.tight_layout()
    figure.savefig(path, dpi=150)


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m pyterrier_longdoc", description="Compare BM25 and long-document rerankers on a real collection."
    )
    parser.add_argument("--collection", help="folder with docs.jsonl, topics.tsv and qrels.txt (default: docstrings)")
    parser.add_argument("--backbone", help="cross-encoder, name or folder, in place of the packaged ones")
    parser.add_argument("--queries", type=int, default=10, help="sample so many topics; 0 takes all (default 10)")
    parser.add_argument("--depth", type=int, default=10, help="documents to rerank per topic (default 10)")
    baseline = "system that the others are tested against (default BM25)"
    parser.add_argument("--baseline", default="BM25", choices=("BM25", *MODELS), help=baseline)
    parser.add_argument("--output", default="longdoc-demo", help="folder for runs, table and picture")
    parser.add_argument("--resume", action="store_true", help="keep the runs that an interrupted job has finished")
    parser.add_argument("--seed", type=int, default=42, help="of the sample of topics (default 42)")
    return parser.parse_args(argv)


def _check_settings(args: argparse.Namespace, path: Path, runs: Path) -> None:
    """Clears the runs of an earlier job, or, to resume it, makes sure that it was the same job."""
    settings = {name: value for name, value in vars(args).items() if name not in ("resume", "baseline", "output")}
    earlier = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else None
    if args.resume and earlier != settings:
        raise SystemExit(f"--resume: {path.parent} holds no runs of this job (it was {earlier}, now {settings})")
    if not args.resume:
        for name in ("BM25", *MODELS):
            (runs / f"{name}.res.gz").unlink(missing_ok=True)
    path.write_text(json.dumps(settings), encoding="utf-8")


def _collection(folder: str | None) -> tuple[Any, str | None]:
    if folder is not None:
        return pt.get_dataset(f"longdoc:folder:{folder}"), None
    return pt.get_dataset("longdoc:docstrings"), "test"


@contextmanager
def _silent_libraries() -> Iterator[None]:
    """Drops what native code writes to the process's output: PISA logs every step, past Python's own streams."""
    sys.stdout.flush()
    sys.stderr.flush()
    saved = [(stream, os.dup(stream)) for stream in (1, 2)]
    with open(os.devnull, "w") as nowhere:
        for stream, _ in saved:
            os.dup2(nowhere.fileno(), stream)
        try:
            yield
        finally:
            for stream, copy in saved:
                os.dup2(copy, stream)
                os.close(copy)


if __name__ == "__main__":
    raise SystemExit(main())
