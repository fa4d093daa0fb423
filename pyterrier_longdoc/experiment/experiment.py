"""Experiments as reported in the papers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyterrier as pt

from ..common.arguments import check_arguments, check_seeds, to_scalar
from ..common.files import import_extra
from ..common.frames import as_strings, check_columns, labels_of
from ..common.progress import work_bar
from ..common.warnings import warn
from .checks import check_runs
from .cost import Cost
from .efficiency import efficiency_table
from .results import ExperimentResults
from .runner import EvaluatedRun, Runner
from .runs import QueryEvaluator, RunFolder, experiment_settings
from .significance import RESAMPLES, Baseline, Statistics, Test, baseline_names
from .systems import make_folds, named_systems, runs_of_system
from .tables import Decimals

IN_PYTERRIER = {
    "perquery": "the results have .perquery",
    "dataframe": "the results have .means, .table and .perquery",
    "highlight": "print or display the results",
    "correction_alpha": "use alpha=",
}
"""What takes the place of arguments of `pt.Experiment`."""


class ExperimentWarning(UserWarning):
    """A check of an experiment failed, so its results may be unreliable; see the `checks` of the results."""


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
    save_mode: str = "warn",
    verbose: bool = False,
    **unknown: Any,
) -> ExperimentResults:
    """Compare systems over seeds and folds, as in Boytsov et al. 2025.

    Per-query values are averaged over the seeds of a system before they are tested. With one run per system and one
    baseline, values, p-values and corrections are those of `pt.Experiment`, with one exception: systems with equal
    values for every query have the p-value 1 instead of NaN, also in the correction.

    Args:
        systems: a dict of systems by name, or a list. A system is one of

            - a pipeline;
            - a factory `seed -> pipeline` or `(seed, fold) -> pipeline`, called for each seed (and fold), or
              `() -> pipeline`, called once; parameters named `seed` and `fold` can have defaults;
            - a run: a frame or the path of a TREC file;
            - a list of pipelines or runs, one per seed.
        topics: `qid, query`.
        qrels: `qid, docno, label`.
        metrics: measures of ir_measures, or names of ir_measures or trec_eval.
        names: the names of the systems in a list.
        seeds: the arguments of the factories (0, 1, 2 in the paper), or the labels of the runs in a list.
        folds: a list of qids for each fold. A factory `(seed, fold)` returns the pipeline for the topics of that fold,
            e.g. `fold.fit(pipeline)` with a new model. The runs of all folds are concatenated before evaluation.
        baseline: the name or position of a system, or a list of several. All other systems are compared to each.
        partner: a dict `{system: partner}`. The gain of a system is relative to its partner, e.g. its own FirstP.
        test: `"t"` (paired, as in the paper), `"wilcoxon"`, `"randomisation"`, `"bootstrap"`, or a function like
            `scipy.stats.ttest_rel`; see `significance.p_values`.
        correction: a method of `statsmodels.stats.multitest.multipletests` or its short name, as in `pt.Experiment`,
            e.g. `"holm"`, `"bonferroni"`, `"fdr_bh"` (Benjamini-Hochberg). It is applied separately for each measure,
            over all systems compared to one baseline or to their partners.
        alpha: significance level; with a correction, the family-wise error rate. The paper uses 0.01 for MS MARCO dev
            and 0.05 elsewhere.
        margin: a system is equivalent to its reference if it differs by less than this share: 0.05 is "within 5 %".
        resamples: the number of resamples of the randomisation test and of the bootstrap.
        round: decimals of means and standard deviations in `.table` and in the papers' layout, for all measures or by
            measure. None leaves `.table` unrounded and uses 3 in the layout. Tests never use rounded values.
        filter_by_qrels: leave out topics without judgements before running anything.
        filter_by_topics: leave out judgements for other topics, which would count as 0.
        batch_size: the number of topics processed at a time, to save memory.
        efficiency: measure time, memory and the amount of text read, after a warm-up. Do not use a `score_cache` here:
            cached scores take no time.
        save_dir: folder for runs, results and tables (CSV, Markdown, LaTeX).
        save_mode: how to treat runs of the same systems in `save_dir`, as in `pt.Experiment`: `"reuse"` reads them, for
            instance after an interruption; `"overwrite"` replaces them, `"warn"` does so with a warning, and `"error"`
            raises an error. A run is read by the name of its system, seed and fold; a line lists the systems that were
            read. An error is raised if the topics or the models of this package (weights and settings) differ from
            those of the saved run. Changes in other stages are not noticed: choose `"overwrite"` after one. Factories
            are called all the same; give a training in one a `TrainingArgs(checkpoint=)`.
        verbose: show a progress bar over the runs.
        **unknown: an error, which names what takes the place of an argument of `pt.Experiment`.

    Returns:
        The results. `print` shows means and significance; `.table` has the columns of `pt.Experiment`, `.perquery` the
        values of each query.
    """
    for name in unknown:
        cure = IN_PYTERRIER.get(name)
        raise TypeError(f"Experiment() has no argument {name!r}" + ("" if cure is None else f": {cure}"))
    check_arguments("int | None", at_least=1, batch_size=batch_size)
    if seeds is not None:
        check_seeds(seeds)
    if efficiency:
        import_extra("psutil", "analysis", "psutil is missing")
    topics = _with_string_qids(topics, ("qid",), "topics")
    qrels = _with_string_qids(qrels, ("qid", "docno", "label"), "qrels")
    if filter_by_qrels:
        topics = topics[topics["qid"].isin(set(qrels["qid"]))]
    by_name = named_systems(systems, names)
    baselines = baseline_names(baseline, list(by_name))
    statistics = Statistics(baselines, dict(partner or {}), test, correction, alpha, margin, resamples=resamples)
    statistics.check_names(list(by_name))
    labels = None if seeds is None else [int(seed) for seed in seeds]
    fold_list = make_folds(folds, topics, qrels) if folds is not None else []
    system_runs = {name: runs_of_system(name, system, labels, fold_list) for name, system in by_name.items()}
    evaluator = QueryEvaluator(topics, qrels, metrics, filter_by_topics=filter_by_topics)
    for measure, decimals in round.items() if isinstance(round, Mapping) else [(evaluator.names[0], round)]:
        check_arguments("str", choices=evaluator.names, round=measure)
        check_arguments("int | None", at_least=0, round=decimals)
    settings = experiment_settings(fold_list, labels)
    folder = None if save_dir is None else RunFolder(save_dir, save_mode, by_name)
    judged = qrels[["qid", "docno", "label"]].assign(docno=as_strings(qrels["docno"]))
    judged = judged[(labels_of(qrels, "qrels") > 0) & judged["qid"].isin(set(evaluator.qids))]
    relevant = judged.drop_duplicates(["qid", "docno"])
    runner = Runner(topics, evaluator, relevant, folder, batch_size, efficiency)
    outcomes: dict[str, list[EvaluatedRun]] = {}
    number = sum(len(parts) for runs in system_runs.values() for parts in runs)
    with work_bar("Experiment", "run", number, shown=verbose) as bar:
        for name, runs in system_runs.items():
            outcomes[name] = [runner.evaluate(parts, bar.update) for parts in runs]
    if folder is not None and folder.read:
        pt.tqdm.write(f"Experiment: read from {str(save_dir)!r}: {', '.join(folder.read)}")
    costs = {name: [Cost.total(run.costs) for run in runs if run.costs] for name, runs in outcomes.items()}
    papers = dict.fromkeys(paper for runs in outcomes.values() for run in runs for paper in run.papers)
    results = ExperimentResults(
        {name: np.stack([run.values for run in runs]) for name, runs in outcomes.items()},
        {name: [run.seed for run in runs] for name, runs in outcomes.items()},
        evaluator.qids,
        evaluator.names,
        statistics,
        round=to_scalar(round),
        efficiency=efficiency_table(costs, statistics.partner) if efficiency else None,
        checks=check_runs(outcomes, evaluator.qids, topics, statistics),
        settings={**settings, "papers": list(papers)},
        folder=None if save_dir is None else Path(save_dir),
    )
    if save_dir is not None:
        results.save(save_dir)
    for _, rows in results.checks.groupby("check", sort=False):
        messages = rows["message"].unique().tolist()
        more = f" (and {len(messages) - 3} more, see .checks)" if len(messages) > 3 else ""
        warn("; ".join(messages[:3]) + more, ExperimentWarning)
    return results


def _with_string_qids(frame: pd.DataFrame, columns: Sequence[str], what: str) -> pd.DataFrame:
    check_columns(frame, columns, what)
    return frame.assign(qid=as_strings(frame["qid"]))
