"""Experiments as the papers report them."""

from __future__ import annotations

import re
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyterrier as pt

from .checks import RunChecks, warn_of
from .comparisons import Statistics
from .efficiency import Cost, efficiency_table
from .execution import Executor
from .perquery import QueryEvaluator, check_columns
from .results import ExperimentResults
from .runs import Run, as_strings, read_run
from .significance import RESAMPLES, Test
from .store import RunStore, describe
from .systems import Job, make_folds, named_systems, plan


def Experiment(  # noqa: N802 - named like pt.Experiment
    systems: Mapping[str, Any] | list[Any],
    topics: pd.DataFrame,
    qrels: pd.DataFrame,
    metrics: Sequence[Any],
    *,
    names: Sequence[str] | None = None,
    seeds: Sequence[int] | None = None,
    folds: Sequence[Sequence[str]] | None = None,
    baselines: Sequence[str | int] = (),
    partner: Mapping[str, str] | None = None,
    test: Test = "t",
    correction: str | None = None,
    alpha: float = 0.05,
    margin: float = 0.05,
    resamples: int = RESAMPLES,
    filter_by_qrels: bool = False,
    filter_by_topics: bool = True,
    batch_size: int | None = None,
    efficiency: bool = False,
    save_dir: str | Path | None = None,
    save_mode: str = "reuse",
    verbose: bool = False,
) -> ExperimentResults:
    """Compares systems over seeds and folds as Boytsov et al. 2025 do.

    Per-query values are averaged over a system's seeds before anything is tested. With one run for each system and
    one baseline, values, p-values and corrections are those of `pt.Experiment`.

    Args:
        systems: by name, or a list. A system is a pipeline; a factory `seed -> pipeline` or
            `seed, fold -> pipeline`, called for each seed (and fold); a run, as frame or path of a TREC file; or a
            list of pipelines or runs, one for each seed.
        topics: `qid, query`.
        qrels: `qid, docno, label`.
        metrics: measures of ir_measures, or their names or trec_eval's.
        names: of a list's systems.
        seeds: what factories are called with; 0, 1, 2 in the paper. Also the labels of a list's runs.
        folds: a list of qids for each fold. A factory `(seed, fold)` gives the pipeline for that fold's topics, e.g.
            by `fold.fit(pipeline)`; the folds' runs are put together before they are evaluated.
        baselines: names, or positions in a list; every other system is compared to each.
        partner: for a system the name of the one that its gain is relative to, e.g. its own FirstP.
        test: `"t"` (paired, as in the paper), `"wilcoxon"`, `"randomisation"`, `"bootstrap"`, or a function like
            `scipy.stats.ttest_rel`.
        correction: `"holm"`, `"bonferroni"`, `"fdr_bh"` (Benjamini-Hochberg), ...: for each measure over the systems
            compared to one baseline.
        alpha: significance level. The paper takes 0.01 for MS MARCO dev and 0.05 elsewhere.
        margin: a system within this share of what it is compared to is equivalent: 0.05 is "within 5 %".
        resamples: of randomisation and bootstrap.
        filter_by_qrels: leave out topics without judgements before running anything.
        filter_by_topics: leave out judgements of other topics, which would count as 0.
        batch_size: so many topics at a time, for little memory.
        efficiency: measure time, memory and what was read, after a warm-up.
        save_dir: folder for runs and results. A second call with the same folder goes on where the first one was
            interrupted: finished runs are kept.
        save_mode: with runs in that folder already: `"reuse"` them, `"overwrite"` them or raise an `"error"`.
        verbose: show a progress bar.

    Returns:
        The results: `.table`, `.comparisons`, `.to_markdown()` and so on.

    Raises:
        ValueError: for arguments that do not fit together, and runs that cannot be evaluated.
    """
    topics, qrels = _checked(topics, "topics"), _checked(qrels, "qrels")
    if filter_by_qrels:
        topics = topics[topics["qid"].isin(set(qrels["qid"]))]
    named = named_systems(systems, names)
    statistics = Statistics(
        _baseline_names(baselines, list(named)), dict(partner or {}), test, correction, alpha, margin, resamples=resamples
    )
    statistics.check(list(named))
    labels = None if seeds is None else [int(seed) for seed in seeds]
    prepared = make_folds(folds, topics, qrels) if folds is not None else []
    jobs = [job for name, system in named.items() for job in plan(name, system, labels, prepared)]
    evaluator = QueryEvaluator(topics, qrels, metrics, filter_by_topics=filter_by_topics)
    settings = describe(topics, prepared, labels)
    runner = _Runner(
        Executor(batch_size=batch_size, efficiency=efficiency),
        evaluator,
        RunStore(save_dir, settings, save_mode) if save_dir is not None else None,
        topics,
    )
    with pt.tqdm(total=len(jobs), desc="Experiment", unit="run", disable=not verbose) as bar:
        for group in _by_seed(jobs):
            runner.do(group, bar)
    values = {name: np.stack(of_system) for name, of_system in runner.values.items()}
    checks = runner.checks.findings({name: of_system.mean(0) for name, of_system in values.items()}, statistics)
    warn_of(checks, stacklevel=3)
    results = ExperimentResults(
        values,
        runner.seeds,
        evaluator.qids,
        evaluator.names,
        statistics,
        efficiency=efficiency_table(runner.costs, statistics.partner) if efficiency else None,
        checks=checks,
        settings=settings,
        folder=None if save_dir is None else Path(save_dir),
    )
    if save_dir is not None:
        results.save(save_dir)
    return results


@dataclass
class _Runner:
    """Makes or reads the runs, and keeps only what follows from them: many runs do not fit into memory."""

    executor: Executor
    evaluator: QueryEvaluator
    store: RunStore | None
    topics: pd.DataFrame
    values: dict[str, list[np.ndarray]] = field(default_factory=dict)
    seeds: dict[str, list[int | None]] = field(default_factory=dict)
    costs: dict[str, list[Cost]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.checks = RunChecks(self.evaluator.qids)

    def do(self, jobs: Sequence[Job], bar: Any) -> None:
        """One run of one system: the jobs are its folds."""
        name, seed = jobs[0].system, jobs[0].seed
        frames, total = [], None
        for job in jobs:
            frame, cost = self._frame(job)
            frames.append(frame)
            if cost is not None:
                total = total or Cost()
                total.add(cost)
            bar.update(1)
        run = Run.from_frame(frames[0] if len(frames) == 1 else pd.concat(frames, ignore_index=True), name)
        self.checks.look_at(name, run)
        self.values.setdefault(name, []).append(self.evaluator(run))
        self.seeds.setdefault(name, []).append(seed)
        if total is not None:
            self.costs.setdefault(name, []).append(total)

    def _frame(self, job: Job) -> tuple[pd.DataFrame, Cost | None]:
        if job.given:
            frame = _as_frame(job.source(), job)
            if self.store is not None:
                self.store.write(job, frame, {"given": True})
            return frame, None
        kept = self.store.read(job) if self.store is not None else None
        if kept is not None and not kept[1].get("given") and (kept[1]["measured"] or not self.executor.efficiency):
            _warn_if_changed(job, kept[1]["made by"])
            return kept[0], Cost(**kept[1]["cost"])
        made = job.source()
        if not isinstance(made, pt.Transformer):
            return _as_frame(made, job), None
        frame, cost = self.executor.run(made, self.topics if job.fold is None else job.fold.test_topics)
        Run.from_frame(frame, str(job))  # a broken run is not worth keeping
        if self.store is not None:
            notes = {"made by": _described(made), "measured": self.executor.efficiency, "cost": cost.as_dict()}
            self.store.write(job, frame, notes)
        return frame, cost


def _by_seed(jobs: Sequence[Job]) -> list[list[Job]]:
    """Jobs that make up one run: the folds of a system and seed."""
    groups: dict[tuple[str, int | None], list[Job]] = {}
    for job in jobs:
        groups.setdefault((job.system, job.seed), []).append(job)
    return list(groups.values())


def _as_frame(made: Any, job: Job) -> pd.DataFrame:
    if isinstance(made, str | Path):
        made = read_run(made)
    if not isinstance(made, pd.DataFrame):
        raise ValueError(f"the factory of {job} returned a {type(made).__name__}, not a pipeline or a run")
    if job.fold is not None and "qid" in made.columns:
        made = made[as_strings(made["qid"]).isin(set(job.fold.test_topics["qid"])).to_numpy()]
    return made


def _checked(frame: pd.DataFrame, what: str) -> pd.DataFrame:
    check_columns(frame, ("qid",), what)
    return frame.assign(qid=as_strings(frame["qid"]))


def _baseline_names(baselines: Sequence[str | int], names: Sequence[str]) -> tuple[str, ...]:
    if isinstance(baselines, str | int):
        raise ValueError(f"baselines={baselines!r} must be a list, e.g. [{baselines!r}]")
    chosen = []
    for baseline in baselines:
        if isinstance(baseline, int) and not 0 <= baseline < len(names):
            raise ValueError(f"baseline {baseline} does not exist: there are {len(names)} systems, counted from 0")
        chosen.append(names[baseline] if isinstance(baseline, int) else str(baseline))
    return tuple(chosen)


def _described(pipeline: Any) -> str:
    return re.sub(r" at 0x[0-9a-f]+", "", repr(pipeline))


def _warn_if_changed(job: Job, made_by: str) -> None:
    # Factories are not called to find out: they may train a model.
    if job.seed is None and job.fold is None:
        now = _described(job.source())
        if now != made_by:
            warnings.warn(
                f"the kept run of {job} was made by {made_by}, which now is {now}; with save_mode='overwrite' it would "
                f"be made anew",
                stacklevel=6,
            )
