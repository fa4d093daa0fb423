"""One setting varied at a time: truncation, windows, passages, first-stage depth."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NamedTuple

import pandas as pd
import pyterrier as pt

from ..common.arguments import check_arguments
from ..common.plots import finish, line_style, new_axes, offsets
from .experiment import Experiment
from .results import ExperimentResults

ModelOrFactory = pt.Transformer | Callable[..., pt.Transformer]
LABELS = {
    "chunks": "chunks that are read",
    "window_size": "window size (tokens)",
    "stride": "stride (tokens)",
    "training": "windows at training",
    "inference": "windows at inference",
    "depth": "documents that are reranked",
}
"""Axis labels by parameter."""


class _Setting(NamedTuple):
    """One setting of a sweep: the table's parameters, the model's arguments, and attributes to set afterwards."""

    parameters: Mapping[str, Any]
    arguments: Mapping[str, Any] = MappingProxyType({})
    attributes: Mapping[str, Any] = MappingProxyType({})


@dataclass(frozen=True, eq=False)
class Sweep:
    """A sweep's results.

    Attributes:
        results: of the experiment; the first setting is the partner of all others unless said otherwise.
        parameters: a row for each system, a column for each varied parameter.
    """

    results: ExperimentResults
    parameters: pd.DataFrame

    @property
    def table(self) -> pd.DataFrame:
        """The varied parameters, and the columns of `results.table`."""
        return pd.concat([self.parameters, self.results.table], axis=1)

    def plot(self, measure: str | None = None, *, ax: Any = None) -> Any:
        """Draw a measure (None: the first) over the varied parameters, with its standard deviation over seeds.

        There is a line for each value of the second parameter where there are two. `ax` are matplotlib axes to draw on;
        None makes a figure. The axes are returned.
        """
        measure = measure or self.results.measures[0]
        check_arguments("str", choices=self.results.measures, measure=measure)
        table, (first, *second) = self.table, self.parameters.columns
        lines: list[tuple[Any, pd.DataFrame]] = list(table.groupby(second[0])) if second else [("", table)]
        ax = ax or new_axes(len(lines) if second else 0)
        for line, shift in enumerate(offsets(table[first], len(lines))):
            value, rows = lines[line]
            rows = rows.sort_values(first)
            label = f"{LABELS.get(second[0], second[0])}: {value}" if second else None
            style = {"capsize": 3, "label": label, **line_style(line)}
            ax.errorbar(rows[first] + shift, rows[measure], yerr=rows.get(f"{measure} std"), **style)
        ax.set_xticks(sorted(table[first].unique()))
        ax.set_xlabel(LABELS.get(first, first))
        ax.set_ylabel(f"{measure}: mean and standard deviation over seeds" if f"{measure} std" in table else measure)
        if second:
            finish(ax)
        ax.spines[["top", "right"]].set_visible(False)
        return ax


def sweep_truncation(
    first_stage: pt.Transformer,
    model: ModelOrFactory,
    topics: pd.DataFrame,
    qrels: pd.DataFrame,
    metrics: Sequence[Any],
    *,
    chunks: Sequence[int] = (1, 2, 3, 4, 5, 6),
    chunk_len: int = 477,
    **experiment: Any,
) -> Sweep:
    """Cut documents after 1, 2, ... chunks (`max_doc_len`): Table 6 of Boytsov et al. 2025.

    Args:
        first_stage: retriever and text loader.
        model: a transformer, whose attributes are varied at inference, or a function `model(seed=..., max_doc_len=...)`
            that makes a model for each setting, and trains it as in the paper.
        topics: `qid, query`.
        qrels: `qid, docno, label`.
        metrics: measures.
        chunks: the numbers to try.
        chunk_len: tokens of a chunk; 477 in the paper.
        **experiment: for `Experiment`, e.g. `seeds`, `save_dir`, `efficiency`.
    """
    settings = {
        f"{n} chunk{'s' if n > 1 else ''}": _Setting({"chunks": n}, {"max_doc_len": n * chunk_len}) for n in chunks
    }
    return _sweep(first_stage, model, settings, topics, qrels, metrics, experiment)


def sweep_windows(
    first_stage: pt.Transformer,
    model: ModelOrFactory,
    topics: pd.DataFrame,
    qrels: pd.DataFrame,
    metrics: Sequence[Any],
    *,
    window_sizes: Sequence[int] = (75, 150, 300),
    strides: Sequence[int] = (75, 150, 300),
    **experiment: Any,
) -> Sweep:
    """Try all combinations of window size and stride that read all text (stride <= window size).

    `window_sizes` (150 in Boytsov et al. 2025) and `strides` are in tokens; a function as model gets `window_size` and
    `stride`. The other arguments are those of `sweep_truncation`.
    """
    pairs = [{"window_size": size, "stride": stride} for size in window_sizes for stride in strides if stride <= size]
    settings = {f"window {pair['window_size']}, stride {pair['stride']}": _Setting(pair, pair) for pair in pairs}
    return _sweep(first_stage, model, settings, topics, qrels, metrics, experiment)


def sweep_passages(
    first_stage: pt.Transformer,
    model: Callable[..., pt.Transformer],
    topics: pd.DataFrame,
    qrels: pd.DataFrame,
    metrics: Sequence[Any],
    *,
    seeds: Sequence[int],
    train: Sequence[int] = (4, 8, 16),
    test: Sequence[int] = (4, 8, 16),
    **experiment: Any,
) -> Sweep:
    """Try the number of windows (`max_windows`) at training, `train`, against that at inference, `test`.

    `model(seed=..., max_windows=...)` makes and trains a model, once for each seed and number. The other
    arguments are those of `sweep_truncation`.
    """
    if isinstance(model, pt.Transformer):
        raise ValueError(f"model= must be a function of seed and max_windows that makes and trains one, not {model!r}")
    # Systems come one after the other, each with all seeds and folds: the cache holds the models of one of them.
    cached_model = functools.lru_cache(maxsize=len(seeds) * len(experiment.get("folds") or [None]))(model)
    settings = {
        f"{a} at training, {b} at inference": _Setting(
            {"inference": b, "training": a}, {"max_windows": a}, {"max_windows": b}
        )
        for a in train
        for b in test
    }
    return _sweep(first_stage, cached_model, settings, topics, qrels, metrics, {"seeds": seeds, **experiment})


def sweep_depth(
    first_stage: pt.Transformer,
    model: ModelOrFactory,
    topics: pd.DataFrame,
    qrels: pd.DataFrame,
    metrics: Sequence[Any],
    *,
    depths: Sequence[int] = (10, 20, 50, 100),
    **experiment: Any,
) -> Sweep:
    """Rerank the best 10, 20, ... documents of the first stage; all others are dropped.

    The first stage must return as many documents as the largest of `depths` (100 in Boytsov et al. 2025). A function as
    model gets the seed only. The other arguments are those of `sweep_truncation`.
    """
    settings = {f"depth {depth}": _Setting({"depth": depth}) for depth in depths}
    return _sweep(first_stage, model, settings, topics, qrels, metrics, experiment)


def _sweep(
    first_stage: pt.Transformer,
    model: ModelOrFactory,
    settings: Mapping[str, _Setting],
    topics: pd.DataFrame,
    qrels: pd.DataFrame,
    metrics: Sequence[Any],
    experiment: dict[str, Any],
) -> Sweep:
    systems = {name: _system(first_stage, model, setting) for name, setting in settings.items()}
    first, *others = systems or [""]
    arguments = {"partner": dict.fromkeys(others, first), **experiment}
    results = Experiment(systems, topics, qrels, metrics, **arguments)
    return Sweep(results, pd.DataFrame([setting.parameters for setting in settings.values()]))


def _system(first_stage: pt.Transformer, model: ModelOrFactory, setting: _Setting) -> Callable[..., pt.Transformer]:
    """Return a factory, so that each setting's model is made in its turn and dropped after it."""
    stage = first_stage % setting.parameters["depth"] if "depth" in setting.parameters else first_stage
    if isinstance(model, pt.Transformer):
        return lambda: stage >> _with_attributes(model, {**setting.arguments, **setting.attributes})

    def make(seed: int, fold: Any = None) -> pt.Transformer:
        arguments = {**setting.arguments, **({} if fold is None else {"fold": fold})}
        return stage >> _with_attributes(model(seed=seed, **arguments), setting.attributes)

    return make


def _with_attributes(model: pt.Transformer, attributes: Mapping[str, Any]) -> pt.Transformer:
    """Return a copy of a model with other attributes."""
    return pt.inspect.transformer_apply_attributes(model, **attributes) if attributes else model
