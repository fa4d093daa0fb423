"""Parts of the demo, also for notebooks: models, first stage, moved passages, random order, tables and a figure."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyterrier as pt
from ir_measures import AP, nDCG

from .common.files import import_extra
from .common.language import token_counter
from .common.plots import COLOURS
from .comparison import Comparison, PositionEffectiveness
from .comparison.significance import p_in_words
from .data.rows import recount
from .modelling.preselection import BM25Windows

MODELS = ("FirstP", "MaxP", "PARADE", "MaxSim")
SUM = "BM25 + MaxP + MaxSim"
"""The sum of z-scores."""

DEMO_MEASURES = [nDCG @ 10, AP]
"""With one relevant document per topic, as in the default collection, AP equals the reciprocal rank."""

PLACES = {"early": "early", "anywhere": "uniform", "far": "far"}
"""Labels for the position of the relevant passage, and the position in the names of the collections."""

CHANCE = "random order"


def rerankers(backbone: str | None = None, score_cache: Path | None = None, windows: int = 3) -> dict[str, Any]:
    """Return the models to compare by name: those of this package, or new ones from another cross-encoder.

    All but FirstP read the `windows` windows of each document that BM25 prefers. MaxSim is always the packaged model,
    because a cross-encoder has no token vectors. The file `score_cache` stores scores, so that none is computed twice.
    """
    from .rerankers.cross_encoder import CrossEncoder
    from .rerankers.maxsim import MaxSim
    from .rerankers.models import PARADE, FirstP, MaxP

    # float32 gives the same figures on all machines.
    common: dict[str, Any] = {"dtype": "float32", "score_cache": score_cache}
    window_arguments = {"preselect": BM25Windows(windows), **common}
    arguments = {"FirstP": common, "MaxP": window_arguments, "PARADE": window_arguments}
    maxsim = MaxSim.load("longdoc:maxsim", window_size=100, stride=80, **window_arguments)
    if backbone is not None:
        models = {cls.__name__: cls(backbone, **arguments[cls.__name__]) for cls in (FirstP, MaxP, PARADE)}
    else:
        files = {"FirstP": "firstp", "MaxP": "maxp", "PARADE": "parade-attn"}
        models = {name: CrossEncoder.load(f"longdoc:{file}", **arguments[name]) for name, file in files.items()}
    return {**models, "MaxSim": maxsim}


def first_stage(dataset: Any, folder: Path, depth: int) -> Any:
    """Index the documents of a dataset with PISA, which needs no Java, and return BM25.

    An existing index in `folder` is replaced; `depth` documents are retrieved per topic.
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
    """Suppress the log of PISA, which bypasses Python's streams."""
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


def with_sum(models: Mapping[str, Any]) -> dict[str, Any]:
    """Return BM25 (the candidates as they are), the models, and the sum of z-scores, by name."""
    from .rerankers.zscore import ZScore

    z = ZScore()
    fused = z + (models["MaxP"] >> z) + (models["MaxSim"] >> z)
    return {"BM25": pt.Transformer.identity(), **models, SUM: fused}


def moved_candidates(topics: pd.DataFrame, depth: int, seed: int = 42) -> dict[str, pd.DataFrame]:
    """Return candidates with text by the position of the relevant passage; everything else is the same.

    One document is relevant, the others are random. If they were retrieved by BM25, they would begin with words of the
    query, unlike a relevant document with a far passage, so that a model that reads the beginning would be worse than
    chance.
    """
    collections: Any = {place: pt.get_dataset(f"longdoc:docstrings-{name}") for place, name in PLACES.items()}
    far = collections["far"]
    candidates = far.candidates(depth=depth, seed=seed)
    candidates = far.text_loader()(candidates[candidates["qid"].isin(topics["qid"])])
    relevant = candidates.merge(far.get_qrels(), on=["qid", "docno"], how="left")["label"].gt(0).to_numpy()
    texts = {place: collection.text_loader()(candidates)["text"] for place, collection in collections.items()}
    return {place: candidates.assign(text=candidates["text"].mask(relevant, column)) for place, column in texts.items()}


def with_chance(values: pd.DataFrame, depth: int) -> pd.DataFrame:
    """Add the expected reciprocal rank of a random order to the per-query values of the measure RR.

    One of `depth` candidates per topic is relevant, and each rank is equally likely.
    """
    expected = sum(1 / rank for rank in range(1, depth + 1)) / depth
    chance = values[["qid", "measure"]].drop_duplicates().assign(name=CHANCE, value=expected)
    return pd.concat([values.sort_index(), chance], ignore_index=True)


def by_answer(results: Comparison, dataset: Any, firstp: Any) -> PositionEffectiveness:
    """Divide the queries by whether an answer begins inside FirstP's window; those without an answer are left out."""
    gold, window = dataset.gold[dataset.gold["qid"].isin(results.qids)], firstp.model.reader.windows.largest
    rows = recount(gold.itertuples(index=False), dataset.documents, token_counter(firstp.model.tokenizer))
    tokens = pd.DataFrame(rows, columns=gold.columns).groupby("qid")["first_token"].min()
    answered = [qid for qid in results.qids if qid in tokens]
    inside = [qid for qid in answered if window is None or tokens[qid] < window]
    groups = {"inside": inside, "behind": [qid for qid in answered if qid not in inside]}
    parts = {place: results.subset(qids) for place, qids in groups.items() if qids}
    return PositionEffectiveness(parts, "answer inside FirstP's window, or behind it")


def draw(natural: Comparison, moved: PositionEffectiveness | None = None) -> Any:
    """Draw a panel for a comparison with one baseline and one for moved passages, with 95 % intervals.

    The first panel's intervals are normal approximations over topics. Its bar of the baseline is grey; systems with a
    significant difference from it have a star.
    """
    # Without pyplot, so that the backend of the caller does not matter: the figure is saved or shown by a notebook.
    figures = import_extra("matplotlib.figure", "demo", "matplotlib is missing")
    figure = figures.Figure(figsize=(5.2 if moved is None else 10.4, 3.8), layout="constrained")
    ax, *others = figure.subplots(1, 1 if moved is None else 2, squeeze=False)[0]
    if moved is not None:
        moved.plot(ax=others[0]).set_ylim(0, 1.02)
    measure, (baseline,) = natural.measures[0], natural.statistics.baseline
    rows = natural.comparisons[natural.comparisons["measure"] == measure]
    different = set(rows.loc[rows["reject"], "name"])
    values = pd.DataFrame({name: array[:, 0] for name, array in natural.query_values.items()})
    names = [f"{name} *" if name in different else name for name in natural.names]
    colours = ["0.6" if name == baseline else COLOURS[0] for name in natural.names]
    ax.barh(names, values.mean(), xerr=1.96 * values.sem(), color=colours, capsize=3)
    ax.invert_yaxis()
    ax.set_title("documents as they are", fontsize="medium")
    ax.set_xlabel(f"{measure}, {len(values)} topics; * differs from {baseline}")
    ax.spines[["top", "right"]].set_visible(False)
    return figure


def readable_table(table: pd.DataFrame, measures: Sequence[Any] = DEMO_MEASURES) -> pd.DataFrame:
    """Return a table with rounded means, corrected p-values, and stars for significant differences."""
    rows = pd.DataFrame({"system": table["name"]})
    for measure in map(str, measures):
        stars = table[f"{measure} reject"].map({True: " *", False: "  "})
        rows[measure] = table[measure].map("{:.3f}".format)
        rows[f"{measure} p (Holm)"] = table[f"{measure} p-value corrected"].map(_p_value) + stars
    return rows


def readable_by_place(moved: PositionEffectiveness) -> pd.DataFrame:
    """Return the first measure by place, with p-values against the baseline and of the worst against the best place."""
    first = next(iter(moved.groups.values()))
    measure, rows = first.measures[0], pd.DataFrame({"system": first.names})
    for place, results in moved.groups.items():
        table = readable_table(results.table, [measure])
        rows[f"{measure} {place}"], rows[f"p {place}"] = table[measure], table[f"{measure} p (Holm)"]
    ratios = moved.ratios[moved.ratios["measure"] == measure].reset_index(drop=True)
    return rows.assign(**{"p worst/best": ratios["p-value"].map(_p_value)})


def _p_value(p: float) -> str:
    """Format a p-value for a column of a table."""
    return "" if np.isnan(p) else p_in_words(p).removeprefix("p ").removeprefix("= ")
