"""One setting varied at a time: truncation, windows, passages, first-stage depth."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pandas as pd
import pyterrier as pt

from ..common.arguments import check_choice
from .experiment import Experiment
from .plots import beside, finish, look_of, new_axes
from .results import ExperimentResults

Model = pt.Transformer | Callable[..., pt.Transformer]
Setting = Mapping[str, Any]
Settings = dict[str, tuple[Setting, Setting, Setting]]
"""By system: what the table shows, what the model is made with, what is set afterwards."""


LABELS = {
    "chunks": "chunks that are read",
    "window_size": "window size (tokens)",
    "stride": "stride (tokens)",
    "training": "windows at training",
    "inference": "windows at inference",
    "depth": "documents that are reranked",
}
"""What stands beside the axis of a parameter."""


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
        """Draws a measure (None: the first) over the varied parameters, with its standard deviation over seeds.

        Args:
            measure: one of the experiment's.
            ax: matplotlib axes to draw on; None makes a figure.

        Returns:
            The matplotlib axes, with a line for each value of the second parameter where there are two.
        """
        measure = measure or self.results.measures[0]
        check_choice("measure", measure, tuple(self.results.measures))
        table, (first, *second) = self.table, self.parameters.columns
        lines: list[tuple[Any, pd.DataFrame]] = list(table.groupby(second[0])) if second else [("", table)]
        ax = ax or new_axes(len(lines) if second else 0)
        for line, aside in enumerate(beside(table[first], len(lines))):
            value, rows = lines[line]
            rows = rows.sort_values(first)
            label = f"{LABELS.get(second[0], second[0])}: {value}" if second else None
            look = {"capsize": 3, "label": label, **look_of(line)}
            ax.errorbar(rows[first] + aside, rows[measure], yerr=rows.get(f"{measure} std"), **look)
        ax.set_xticks(sorted(table[first].unique()))
        ax.set_xlabel(LABELS.get(first, first))
        ax.set_ylabel(f"{measure}: mean and standard deviation over seeds" if f"{measure} std" in table else measure)
        if second:
            finish(ax)
        ax.spines[["top", "right"]].set_visible(False)
        return ax


def sweep_truncation(
    first_stage: pt.Transformer,
    model: Model,
    topics: pd.DataFrame,
    qrels: pd.DataFrame,
    metrics: Sequence[Any],
    *,
    chunks: Sequence[int] = (1, 2, 3, 4, 5, 6),
    chunk_len: int = 477,
    **experiment: Any,
) -> Sweep:
    """Documents cut after 1, 2, ... chunks (`max_doc_len`): Table 6 of Boytsov et al. 2025.

    Args:
        first_stage: retriever and text loader.
        model: a transformer, whose attributes are varied at inference, or a function `model(seed=..., max_doc_len=...)`
            that makes it, and trains it as in the paper, with each setting.
        topics: `qid, query`.
        qrels: `qid, docno, label`.
        metrics: measures.
        chunks: the numbers to try.
        chunk_len: tokens of a chunk; 477 in the paper.
        **experiment: for `Experiment`, e.g. `seeds`, `save_dir`, `efficiency`.
    """
    settings: Settings = {
        f"{n} chunk{'s' if n > 1 else ''}": ({"chunks": n}, {"max_doc_len": n * chunk_len}, {}) for n in chunks
    }
    return _sweep(first_stage, model, settings, topics, qrels, metrics, experiment)


def sweep_windows(
    first_stage: pt.Transformer,
    model: Model,
    topics: pd.DataFrame,
    qrels: pd.DataFrame,
    metrics: Sequence[Any],
    *,
    window_sizes: Sequence[int] = (75, 150, 300),
    strides: Sequence[int] = (75, 150, 300),
    **experiment: Any,
) -> Sweep:
    """All combinations of window size and stride in which no text is left out (stride <= window size).

    `window_sizes` (150 in Boytsov et al. 2025) and `strides` are in tokens; a function as model gets `window_size` and
    `stride`. The other arguments are those of `sweep_truncation`.
    """
    pairs = [{"window_size": size, "stride": stride} for size in window_sizes for stride in strides if stride <= size]
    settings: Settings = {f"window {s['window_size']}, stride {s['stride']}": (s, s, {}) for s in pairs}
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
    """Number of windows (`max_windows`) at training, `train`, against that at inference, `test`.

    `model(seed=..., max_windows=...)` makes and trains a model, once for each seed and number. The other
    arguments are those of `sweep_truncation`.

    Raises:
        ValueError: if `model` is a transformer, which cannot be trained anew.
    """
    if isinstance(model, pt.Transformer):
        raise ValueError(
            "sweep_passages trains models: give a function model(seed=..., max_windows=...), no transformer"
        )
    # Systems come one after the other, each with all seeds and folds: the models of one training number are kept.
    trained = functools.lru_cache(maxsize=len(seeds) * len(experiment.get("folds") or [None]))(model)
    settings: Settings = {
        f"{a} at training, {b} at inference": ({"inference": b, "training": a}, {"max_windows": a}, {"max_windows": b})
        for a in train
        for b in test
    }
    return _sweep(first_stage, trained, settings, topics, qrels, metrics, {"seeds": seeds, **experiment})


def sweep_depth(
    first_stage: pt.Transformer,
    model: Model,
    topics: pd.DataFrame,
    qrels: pd.DataFrame,
    metrics: Sequence[Any],
    *,
    depths: Sequence[int] = (10, 20, 50, 100),
    **experiment: Any,
) -> Sweep:
    """The best 10, 20, ... documents of the first stage reranked; all others are dropped.

    The first stage must return as many documents as the largest of `depths` (100 in Boytsov et al. 2025). A function as
    model gets the seed only. The other arguments are those of `sweep_truncation`.
    """
    stages = {f"depth {depth}": first_stage % depth for depth in depths}
    settings: Settings = {f"depth {depth}": ({"depth": depth}, {}, {}) for depth in depths}
    return _sweep(stages, model, settings, topics, qrels, metrics, experiment)


def _sweep(
    first_stage: pt.Transformer | Mapping[str, pt.Transformer],
    model: Model,
    settings: Settings,
    topics: pd.DataFrame,
    qrels: pd.DataFrame,
    metrics: Sequence[Any],
    experiment: dict[str, Any],
) -> Sweep:
    systems: dict[str, Any] = {}
    for name, (_, made_with, set_to) in settings.items():
        stage = first_stage[name] if isinstance(first_stage, Mapping) else first_stage
        systems[name] = _system(stage, model, made_with, set_to, with_folds=experiment.get("folds") is not None)
    first, *others = systems or [""]
    arguments = {"partner": dict.fromkeys(others, first), **experiment}
    results = Experiment(systems, topics, qrels, metrics, **arguments)
    return Sweep(results, pd.DataFrame([shown for shown, _, _ in settings.values()]))


def _system(
    stage: pt.Transformer, model: Model, made_with: Setting, set_to: Setting, *, with_folds: bool
) -> Callable[..., pt.Transformer]:
    """A factory: each setting's model is made when its turn comes and dropped after it."""
    if isinstance(model, pt.Transformer):
        return lambda: stage >> _with_attributes(model, {**made_with, **set_to})
    if with_folds:
        return lambda seed, fold: stage >> _with_attributes(model(seed=seed, fold=fold, **made_with), set_to)
    return lambda seed: stage >> _with_attributes(model(seed=seed, **made_with), set_to)


def _with_attributes(model: pt.Transformer, attributes: Setting) -> pt.Transformer:
    """A copy of a model with other attributes."""
    if not attributes:
        return model
    missing = [name for name in attributes if not hasattr(model, name)]
    if missing:
        raise ValueError(f"{model!r} has no attribute {', '.join(missing)} to vary")
    return pt.inspect.transformer_apply_attributes(model, **attributes)
