"""Experiments as the papers report them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from ..common.arguments import check_arguments, check_seeds
from ..common.files import import_extra
from ..common.frames import as_strings, check_columns
from ..common.progress import counting
from ..common.warnings import one_system, warn
from .cost import Cost
from .efficiency import efficiency_table
from .explain_query import Rankings, relevant_documents
from .findings import findings
from .results import ExperimentResults
from .runner import EvaluatedRun, Runner
from .runs import QueryEvaluator, RunFolder, experiment_settings
from .significance import RESAMPLES, Baseline, Statistics, Test, baseline_names
from .systems import PlannedRun, make_folds, named_systems, planned_runs
from .tables import Decimals


class ExperimentWarning(UserWarning):
    """Something makes the numbers of an experiment doubtful; `checks` of the results lists it."""


def Experiment(  # noqa: N802 - named like pt.Experiment
    systems: Mapping[str, Any] | list[Any],
    topics: pd.DataFrame,
    qrels: pd.DataFrame,
    metrics: Sequence[Any],
    *,
    names: Sequence[str] | None = None,
    seeds: Sequence[int] | None = None,
    folds: Sequence[Sequence[str]] | None = None,
    baseline: Baseline = None,
    partner: Mapping[str, str] | None = None,
    test: Test = "t",
    correction: str | None = None,
    alpha: float = 0.05,
    margin: float = 0.05,
    resamples: int = RESAMPLES,
    round: Decimals = None,
    filter_by_qrels: bool = False,
    filter_by_topics: bool = True,
    batch_size: int | None = None,
    efficiency: bool = False,
    save_dir: str | Path | None = None,
    save_mode: str = "reuse",
    verbose: bool = False,
) -> ExperimentResults:
    """Compare systems over seeds and folds as Boytsov et al. 2025 do.

    Per-query values are averaged over a system's seeds before anything is tested. With one run for each system and
    one baseline, values, p-values and corrections are those of `pt.Experiment`; only systems with equal values for
    every query have the p-value 1, where `pt.Experiment` has NaN, also for what is corrected together with them.

    Args:
        systems: by name, or a list. A system is one of

            - a pipeline;
            - a factory `seed -> pipeline` or `(seed, fold) -> pipeline`, called for each seed (and fold), or
              `() -> pipeline`, called when its turn comes; parameters named `seed` and `fold` may have defaults;
            - a run, as frame or path of a TREC file;
            - a list of pipelines or runs, one for each seed.
        topics: `qid, query`.
        qrels: `qid, docno, label`.
        metrics: measures of ir_measures, or their names or trec_eval's.
        names: of a list's systems.
        seeds: what factories are called with; 0, 1, 2 in the paper. Also the labels of a list's runs.
        folds: a list of qids for each fold. A factory `(seed, fold)` gives the pipeline for that fold's topics, e.g.
            by `fold.fit(pipeline)` with a model that it makes; the folds' runs are put together before they are
            evaluated.
        baseline: a system's name, or its position, or a list of several; every other system is compared to each.
        partner: for a system the name of the one that its gain is relative to, e.g. its own FirstP.
        test: `"t"` (paired, as in the paper), `"wilcoxon"`, `"randomisation"`, `"bootstrap"`, or a function like
            `scipy.stats.ttest_rel`; see `significance.p_values`.
        correction: `"holm"`, `"bonferroni"`, `"fdr_bh"` (Benjamini-Hochberg), ...: for each measure over the systems
            compared to one baseline, or to their partners; see `significance.correct`.
        alpha: significance level; with a correction, the family's error rate. The paper takes 0.01 for MS MARCO dev
            and 0.05 elsewhere.
        margin: a system within this share of what it is compared to is equivalent: 0.05 is "within 5 %".
        resamples: of randomisation and bootstrap.
        round: decimals of means and standard deviations in `.table` and in the papers' layout, for all measures or by
            measure. None leaves `.table` as it is, and the layout has 3. What is compared is never rounded.
        filter_by_qrels: leave out topics without judgements before running anything.
        filter_by_topics: leave out judgements of other topics, which would count as 0.
        batch_size: so many topics at a time, for little memory.
        efficiency: measure time, memory and what was read, after a warm-up.
        save_dir: folder for runs and results. A second call with the same folder goes on where the first one was
            interrupted: finished runs are read.
        save_mode: with runs in that folder already, as in `pt.Experiment`: `"reuse"` them, `"overwrite"` them or raise
            an `"error"`. Unlike there, a run is reused only if the same pipeline would make it: weights, settings,
            first stage and topics by their contents; any other run is made anew. A factory is called anew, and the run
            of what it makes is reused. Runs with a function as a stage (`pt.apply`) or with code of your own (a class
            that is made of this package's, without a `describe` of its own) are made anew, as nobody can tell whether
            it does the same; transformers of other packages without `describe` are compared by what they show of
            themselves. `.checks` says so.
        verbose: show a progress bar of the runs.

    Returns:
        The results: `.table`, `.comparisons`, `.to_markdown()` and so on.
    """
    check_arguments("int | None", at_least=1, batch_size=batch_size)
    if seeds is not None:
        check_seeds(seeds)
    if efficiency:
        import_extra("psutil", "analysis", "psutil is missing")
    topics = _with_string_qids(topics, ("qid",), "topics")
    qrels = _with_string_qids(qrels, ("qid", "docno", "label"), "qrels")
    if filter_by_qrels:
        topics = topics[topics["qid"].isin(set(qrels["qid"]))]
    named = named_systems(systems, names)
    compared_to = baseline_names(baseline, list(named))
    statistics = Statistics(compared_to, dict(partner or {}), test, correction, alpha, margin, resamples=resamples)
    statistics.check_names(list(named))
    labels = None if seeds is None else [int(seed) for seed in seeds]
    prepared = make_folds(folds, topics, qrels) if folds is not None else []
    planned = {name: planned_runs(name, system, labels, prepared) for name, system in named.items()}
    evaluator = QueryEvaluator(topics, qrels, metrics, filter_by_topics=filter_by_topics)
    settings = experiment_settings(topics, prepared, labels)
    folder = None if save_dir is None else RunFolder(save_dir, settings, save_mode, named)
    relevant = relevant_documents(qrels, evaluator.qids)
    docnos = {str(qid): documents.tolist() for qid, documents in relevant.groupby("qid")["docno"]}
    runner = Runner(topics, evaluator, docnos, folder, batch_size, efficiency)
    evaluated = _evaluate_all(planned, runner, verbose=verbose)
    costs = {name: [Cost.total(run.costs) for run in runs if run.costs] for name, runs in evaluated.items()}
    papers = dict.fromkeys(paper for runs in evaluated.values() for run in runs for paper in run.papers)
    results = ExperimentResults(
        {name: np.stack([run.values for run in runs]) for name, runs in evaluated.items()},
        {name: [run.seed for run in runs] for name, runs in evaluated.items()},
        evaluator.qids,
        evaluator.names,
        statistics,
        round=round,
        efficiency=efficiency_table(costs, statistics.partner) if efficiency else None,
        checks=findings(evaluated, evaluator.qids, statistics),
        settings={**settings, "papers": list(papers)},
        folder=None if save_dir is None else Path(save_dir),
        rankings=Rankings.of(topics, relevant, {name: runs[0].standings for name, runs in evaluated.items()}),
    )
    if save_dir is not None:
        results.save(save_dir)
    for check, rows in results.checks.groupby("check", sort=False):
        messages = rows["message"].unique().tolist()
        more = f" (and {len(messages) - 3} more, see .checks)" if len(messages) > 3 else ""
        warn(f"{check}: {'; '.join(messages[:3])}{more}", ExperimentWarning)
    return results


def _evaluate_all(
    planned: Mapping[str, Sequence[Sequence[PlannedRun]]], runner: Runner, *, verbose: bool
) -> dict[str, list[EvaluatedRun]]:
    number = sum(len(parts) for runs in planned.values() for parts in runs)
    evaluated: dict[str, list[EvaluatedRun]] = {}
    with counting("Experiment", "run", number, shown=verbose) as done:
        for name, runs in planned.items():
            with one_system(name, set()):
                evaluated[name] = [runner.evaluate(parts, done, ranks=parts is runs[0]) for parts in runs]
    return evaluated


def _with_string_qids(frame: pd.DataFrame, columns: Sequence[str], what: str) -> pd.DataFrame:
    check_columns(frame, columns, what)
    return frame.assign(qid=as_strings(frame["qid"]))
