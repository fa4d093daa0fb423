"""A model with several settings: truncation, windows, numbers of windows, depth of the first stage."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import pandas as pd
import pyterrier as pt

from ..common.arguments import check_arguments
from ..common.plots import finish, line_style, new_axes, offsets
from .experiment import Experiment
from .results import ExperimentResults

ModelOrFactory = pt.Transformer | Callable[..., pt.Transformer]


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

        Values stand in the order of the settings. There is a line for each value of the second parameter where there
        are two. `ax` are matplotlib axes to draw on; None makes a figure. The axes are returned.
        """
        measure = measure or self.results.measures[0]
        check_arguments("str", choices=self.results.measures, measure=measure)
        table, (first, *second) = self.table, self.parameters.columns
        values = [str(value) for value in dict.fromkeys(table[first])]
        table["place"] = [values.index(str(value)) for value in table[first]]
        # As strings: None and numbers have no order.
        groups = table.groupby(table[second[0]].map(str), sort=False) if second else [("", table)]
        lines: list[tuple[Any, pd.DataFrame]] = list(groups)
        ax = ax or new_axes(len(lines) if second else 0)
        for line, shift in enumerate(offsets(table["place"], len(lines))):
            value, rows = lines[line]
            rows = rows.sort_values("place")
            label = f"{second[0]}: {value}" if second else None
            style = {"capsize": 3, "label": label, **line_style(line)}
            ax.errorbar(rows["place"] + shift, rows[measure], yerr=rows.get(f"{measure} std"), **style)
        ax.set_xticks(range(len(values)), values)
        ax.set_xlabel(first)
        ax.set_ylabel(f"{measure}: mean and standard deviation over seeds" if f"{measure} std" in table else measure)
        if second:
            finish(ax)
        ax.spines[["top", "right"]].set_visible(False)
        return ax


def sweep(
    first_stage: pt.Transformer,
    model: ModelOrFactory,
    settings: Sequence[Mapping[str, Any]],
    topics: pd.DataFrame,
    qrels: pd.DataFrame,
    metrics: Sequence[Any],
    *,
    inference: Sequence[Mapping[str, Any]] = (),
    **experiment: Any,
) -> Sweep:
    """Try a model with several settings, such as documents cut after 1, 2, ... chunks (Boytsov et al. 2025, Table 6).

    Args:
        first_stage: retriever and text loader.
        model: a transformer, whose attributes are varied at inference, or a function `model(seed=..., max_doc_len=...)`
            that makes a model for each setting, and trains it as in the paper.
        settings: one or two arguments of the model by name, the same for each system. `depth` drops all but the best so
            many documents of the first stage.
        topics: `qid, query`.
        qrels: `qid, docno, label`.
        metrics: measures.
        inference: attributes with which each model is tried, once it is made (PARADE: numbers of windows).
        **experiment: for `Experiment`, e.g. `seeds`, `save_dir`, `efficiency`.

    Example:
        `sweep(bm25, ld.MaxP(), [{"max_doc_len": 477 * n} for n in range(1, 7)], topics, qrels, [nDCG @ 20]).plot()`
    """
    if inference and isinstance(model, pt.Transformer):
        raise ValueError(f"with inference= model must be a function that makes and trains one, not {model!r}")
    if inference:
        # Systems come one after the other, each with all seeds and folds: the cache holds the models of one of them.
        size = len(experiment.get("seeds") or [None]) * len(experiment.get("folds") or [None])
        model = cast(ModelOrFactory, functools.lru_cache(maxsize=size)(model))
    systems, parameters = {}, []
    for setting in settings:
        setting = {name: setting[name] for name in settings[0] if name in setting} | dict(setting)  # in one order
        for later in inference or [{}]:
            parameters.append({**setting, **{f"{name} at inference": value for name, value in later.items()}})
            name = ", ".join(f"{parameter} {value}" for parameter, value in parameters[-1].items())
            systems[name] = _system(first_stage, model, setting, later)
    columns = {tuple(of_system) for of_system in parameters}
    if len(columns) != 1 or len(*columns) not in (1, 2) or len(systems) < len(parameters):
        raise ValueError(f"settings must vary the same one or two arguments, each in another way, not {parameters}")
    first, *others = systems
    arguments = {"partner": dict.fromkeys(others, first), **experiment}
    return Sweep(Experiment(systems, topics, qrels, metrics, **arguments), pd.DataFrame(parameters, dtype=object))


def _system(
    first_stage: pt.Transformer, model: ModelOrFactory, setting: Mapping[str, Any], attributes: Mapping[str, Any]
) -> Callable[..., pt.Transformer]:
    """Return a factory, so that each setting's model is made in its turn and dropped after it."""
    arguments = {name: value for name, value in setting.items() if name != "depth"}
    stage = first_stage % setting["depth"] if "depth" in setting else first_stage
    if isinstance(model, pt.Transformer):
        return lambda: stage >> _with_attributes(model, arguments)

    def make(seed: int, fold: Any = None) -> pt.Transformer:
        trained = model(seed=seed, **arguments, **({} if fold is None else {"fold": fold}))
        return stage >> _with_attributes(trained, attributes)

    return make


def _with_attributes(model: pt.Transformer, attributes: Mapping[str, Any]) -> pt.Transformer:
    """Return a copy of a model with other attributes."""
    return pt.inspect.transformer_apply_attributes(model, **attributes) if attributes else model
