"""Parts of the demo, for notebooks too: models, first stage, moved passages, random order, tables and a picture."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyterrier as pt
from ir_measures import AP, nDCG

from .analysis import PositionEffectiveness
from .common.files import import_extra
from .common.plots import COLOURS
from .experiment import ExperimentResults, Statistics
from .experiment.significance import p_in_words
from .modelling.preselection import BM25Windows

MODELS = ("FirstP", "MaxP", "PARADE", "MaxSim")
SUM = "BM25 + MaxP + MaxSim"
"""The sum of z-scores."""
BEST_WINDOWS = 3
"""Windows of a document that all but FirstP read, to save time: the best ones for the query by BM25."""

DEMO_MEASURES = [nDCG @ 10, AP]
"""With one relevant document per topic, as in the default collection, AP is the reciprocal rank."""

PLACES = {"early": "early", "anywhere": "uniform", "far": "far"}
"""Words for the position of the relevant passage, and the position in the names of the collections."""

CHANCE = "random order"


def rerankers(backbone: str | None = None, score_cache: Path | None = None) -> dict[str, Any]:
    """Return the models to compare, by name: those of this package, or new ones of another cross-encoder.

    MaxSim is always the packaged one: no cross-encoder has vectors of tokens. A file `score_cache` keeps scores, so
    that none is computed twice.
    """
    from .rerankers.cross_encoder import CrossEncoder
    from .rerankers.maxsim import MaxSim
    from .rerankers.models import PARADE, FirstP, MaxP

    # With float32 all machines come to the same figures.
    common: dict[str, Any] = {"dtype": "float32", "score_cache": score_cache}
    window_arguments = {"preselect": BM25Windows(BEST_WINDOWS), **common}
    arguments = {"FirstP": common, "MaxP": window_arguments, "PARADE": window_arguments}
    maxsim = MaxSim.load("longdoc:maxsim", window_size=100, stride=80, **window_arguments)
    if backbone is not None:
        models = {cls.__name__: cls(backbone, **arguments[cls.__name__]) for cls in (FirstP, MaxP, PARADE)}
    else:
        files = {"FirstP": "firstp", "MaxP": "maxp", "PARADE": "parade-attn"}
        models = {name: CrossEncoder.load(f"longdoc:{file}", **arguments[name]) for name, file in files.items()}
    return {**models, "MaxSim": maxsim}


def first_stage(dataset: Any, folder: Path, depth: int) -> Any:
    """Index a dataset's documents with PISA, which needs no Java, and return BM25.

    The index replaces one in `folder`; `depth` documents are retrieved per topic.
    """
    pisa = import_extra("pyterrier_pisa", "demo", "pyterrier_pisa is missing")
    print("reading the collection ...", flush=True)
    documents = list(dataset.get_corpus_iter(verbose=False))
    print(f"indexing {len(documents)} documents ...", flush=True)
    index = pisa.PisaIndex(str(folder), text_field="text", overwrite=True)
    with _without_log():
        index.index(documents)
        return index.bm25(num_results=depth)


@contextmanager
def _without_log() -> Iterator[None]:
    """Drop the log of PISA, which goes past Python's own streams."""
    sys.stdout.flush()
    sys.stderr.flush()
    copies = {stream: os.dup(stream) for stream in (1, 2)}
    with open(os.devnull, "w") as null:
        for stream in copies:
            os.dup2(null.fileno(), stream)
    try:
        yield
    finally:
        for stream, copy in copies.items():
            os.dup2(copy, stream)
            os.close(copy)


def pipelines(first_stage: Any, text_loader: Any, models: Mapping[str, Any]) -> dict[str, Any]:
    """Return the systems to compare, all on the same candidates, which an experiment retrieves once."""
    from .rerankers.zscore import ZScore

    candidates, z = first_stage >> text_loader, ZScore()
    fused = z + (models["MaxP"] >> z) + (models["MaxSim"] >> z)
    rerankers = {"BM25": pt.Transformer.identity(), **models, SUM: fused}
    return {name: candidates >> reranker for name, reranker in rerankers.items()}


def moved_candidates(topics: pd.DataFrame, depth: int, seed: int = 42) -> dict[str, pd.DataFrame]:
    """Return documents to rerank, with text, by the place of the passage that answers the query; all else is the same.

    One document is relevant, the others are random. The best documents by BM25 would begin with words of the query, and
    a relevant one with a far passage would not: a model that reads the start would do worse than chance.
    """
    collections: Any = {place: pt.get_dataset(f"longdoc:docstrings-{name}") for place, name in PLACES.items()}
    far = collections["far"]
    candidates = far.candidates(depth=depth, seed=seed)
    candidates = far.text_loader()(candidates[candidates["qid"].isin(topics["qid"])])
    relevant = candidates.merge(far.get_qrels(), on=["qid", "docno"], how="left")["label"].gt(0).to_numpy()
    texts = {place: collection.text_loader()(candidates)["text"] for place, collection in collections.items()}
    return {place: candidates.assign(text=candidates["text"].mask(relevant, column)) for place, column in texts.items()}


def with_chance(results: ExperimentResults, depth: int) -> ExperimentResults:
    """Add the expected reciprocal rank of a random order to the results as a system, which is the baseline.

    The measure is RR; one of `depth` candidates for each topic is relevant, and has each rank equally often.
    """
    expected = sum(1 / rank for rank in range(1, depth + 1)) / depth
    return replace(
        results,
        values={**results.values, CHANCE: np.full((1, len(results.qids), 1), expected)},
        seeds={**results.seeds, CHANCE: [None]},
        statistics=Statistics(baseline=(CHANCE,), correction="holm"),
    )


def draw(natural: ExperimentResults, moved: PositionEffectiveness | None = None) -> Any:
    """Draw a panel for an experiment with one baseline, and one for moved passages, with 95 % intervals.

    The bar of the baseline is grey; systems that differ from it significantly have a star.
    """
    # Without pyplot, whose backend is the caller's: this picture is for a file, or for the end of a cell.
    figures = import_extra("matplotlib.figure", "demo", "matplotlib is missing")
    figure = figures.Figure(figsize=(5.2 if moved is None else 10.4, 3.8), layout="constrained")
    axes = figure.subplots(1, 1 if moved is None else 2, squeeze=False)[0]
    _draw_systems(axes[0], natural)
    if moved is not None:
        moved.plot(ax=axes[1]).set_ylim(0, 1.02)
    return figure


def _draw_systems(ax: Any, results: ExperimentResults) -> None:
    """Draw bars of the first measure, with intervals by normal approximation over topics."""
    measure, (baseline,) = results.measures[0], results.statistics.baseline
    rows = results.comparisons[results.comparisons["measure"] == measure]
    different = set(rows.loc[rows["reject"], "name"])
    values = pd.DataFrame({name: array[:, 0] for name, array in results.query_values.items()})
    names = [f"{name} *" if name in different else name for name in results.names]
    colours = ["0.6" if name == baseline else COLOURS[0] for name in results.names]
    ax.barh(names, values.mean(), xerr=1.96 * values.sem(), color=colours, capsize=3)
    ax.invert_yaxis()
    ax.set_title("documents as they are", fontsize="medium")
    ax.set_xlabel(f"{measure}, {len(values)} topics; * differs from {baseline}")
    ax.spines[["top", "right"]].set_visible(False)


def readable_table(table: pd.DataFrame, measures: Sequence[Any] = DEMO_MEASURES) -> pd.DataFrame:
    """Return a table with rounded means, corrected p-values and stars where a difference is significant."""
    rows = pd.DataFrame({"system": table["name"]})
    for measure in map(str, measures):
        stars = table[f"{measure} reject"].map({True: " *", False: "  "})
        rows[measure] = table[measure].map("{:.3f}".format)
        rows[f"{measure} p (Holm)"] = table[f"{measure} p-value corrected"].map(_p_value) + stars
    return rows


def readable_by_place(moved: PositionEffectiveness) -> pd.DataFrame:
    """Return RR by place with p-values against a random order, and the p-value of the worst place against the best."""
    rows = pd.DataFrame({"system": moved.names})
    for place, results in moved.groups.items():
        table = readable_table(results.table, results.measures)
        rows[f"RR {place}"], rows[f"p {place}"] = table["RR"], table["RR p (Holm)"]
    rows["p worst/best"] = moved.ratios["p-value"].map(_p_value)
    return rows


def _p_value(p: float) -> str:
    """Return a p-value for a column of a table."""
    return "" if np.isnan(p) else p_in_words(p).removeprefix("p ").removeprefix("= ")
