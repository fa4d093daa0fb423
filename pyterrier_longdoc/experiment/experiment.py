"""Experiments as the papers report them."""

from __future__ import annotations

import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import pyterrier as pt

from ..common.arguments import check_positive
from ..common.caches import forget_embeddings
from ..common.files import import_extra
from ..common.frames import as_strings, check_columns
from ..common.progress import line_of_run
from .efficiency import Cost, efficiency_table, measured
from .results import CHECK_COLUMNS, ExperimentResults
from .runs import DOUBTS, QueryEvaluator, Run, RunFolder, as_run, described, doubts, read_run, settings_of
from .significance import RESAMPLES, Statistics, Test
from .systems import Job, make_folds, named_systems, plan

WARM_UP_TOPICS = 2
"""Run before measuring, so that weights are loaded and kernels compiled."""

FEW_QUERIES = 25
"""The least number of topics for a comparison by Buckley & Voorhees 2000, who find 50 better."""


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
    one baseline, values, p-values and corrections are those of `pt.Experiment`; only equal systems, which have no
    p-value, are never rejected.

    Args:
        systems: by name, or a list. A system is one of

            - a pipeline;
            - a factory `seed -> pipeline` or `(seed, fold) -> pipeline`, called for each seed (and fold), or
              `() -> pipeline`, called when its turn comes;
            - a run, as frame or path of a TREC file;
            - a list of pipelines or runs, one for each seed.
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
            `scipy.stats.ttest_rel`; see `significance.p_values`.
        correction: `"holm"`, `"bonferroni"`, `"fdr_bh"` (Benjamini-Hochberg), ...: for each measure over the systems
            compared to one baseline, or to their partners; see `significance.correct`.
        alpha: significance level; with a correction, the family's error rate. The paper takes 0.01 for MS MARCO dev
            and 0.05 elsewhere.
        margin: a system within this share of what it is compared to is equivalent: 0.05 is "within 5 %".
        resamples: of randomisation and bootstrap.
        filter_by_qrels: leave out topics without judgements before running anything.
        filter_by_topics: leave out judgements of other topics, which would count as 0.
        batch_size: so many topics at a time, for little memory.
        efficiency: measure time, memory and what was read, after a warm-up.
        save_dir: folder for runs and results. A second call with the same folder goes on where the first one was
            interrupted: finished runs are read.
        save_mode: with runs in that folder already: `"reuse"` them, `"overwrite"` them or raise an `"error"`.
        verbose: show a line for each run, with the progress of the model that it ends with.

    Returns:
        The results: `.table`, `.comparisons`, `.to_markdown()` and so on.

    Raises:
        ValueError: for arguments that do not fit together, and runs that cannot be evaluated.
    """
    check_positive(batch_size=batch_size)
    if efficiency:
        import_extra("psutil", "analysis", "psutil is missing")
    topics = _checked(topics, ("qid",), "topics")
    qrels = _checked(qrels, ("qid", "docno", "label"), "qrels")
    if filter_by_qrels:
        topics = topics[topics["qid"].isin(set(qrels["qid"]))]
    named = named_systems(systems, names)
    compared_to = _baseline_names(baselines, list(named))
    statistics = Statistics(compared_to, dict(partner or {}), test, correction, alpha, margin, resamples=resamples)
    statistics.check(list(named))
    labels = None if seeds is None else [int(seed) for seed in seeds]
    prepared = make_folds(folds, topics, qrels) if folds is not None else []
    planned = {name: plan(name, system, labels, prepared) for name, system in named.items()}
    evaluator = QueryEvaluator(topics, qrels, metrics, filter_by_topics=filter_by_topics)
    settings = settings_of(topics, prepared, labels)
    folder = None if save_dir is None else RunFolder(save_dir, settings, save_mode)
    runner = _Runner(topics, evaluator, folder, batch_size, efficiency)
    evaluated: dict[str, list[_Evaluated]] = {name: [] for name in named}
    number = sum(len(jobs) for runs in planned.values() for jobs in runs)
    places = (f"{place}/{number}" for place in range(1, number + 1))
    for name, runs in planned.items():
        for jobs in runs:
            evaluated[name].append(runner.evaluate(jobs, places if verbose else None))
    costs = {name: [run.cost for run in runs if run.cost is not None] for name, runs in evaluated.items()}
    results = ExperimentResults(
        {name: np.stack([run.values for run in runs]) for name, runs in evaluated.items()},
        {name: [run.seed for run in runs] for name, runs in evaluated.items()},
        evaluator.qids,
        evaluator.names,
        statistics,
        efficiency=efficiency_table(costs, statistics.partner) if efficiency else None,
        checks=_findings(evaluated, evaluator.qids, statistics),
        settings=settings,
        folder=None if save_dir is None else Path(save_dir),
    )
    if save_dir is not None:
        results.save(save_dir)
    for check, rows in results.checks.groupby("check", sort=False):
        messages = rows["message"].tolist()
        more = f" (and {len(messages) - 3} more, see .checks)" if len(messages) > 3 else ""
        warnings.warn(f"{check}: {'; '.join(messages[:3])}{more}", ExperimentWarning, stacklevel=2)
    return results


def _checked(frame: pd.DataFrame, columns: Sequence[str], what: str) -> pd.DataFrame:
    check_columns(frame, columns, what)
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


class _Evaluated(NamedTuple):
    """What is remembered of a run, since many runs do not fit into memory."""

    seed: int | None
    values: np.ndarray
    cost: Cost | None
    doubts: dict[str, int]
    candidates: dict[str, int]
    """By query, a hash of its documents."""


@dataclass
class _Runner:
    """Makes runs, or reads finished ones, and evaluates them.

    What all stages but the last one made stays until a pipeline with other stages comes: systems with the same objects
    as first stage and text loader run these once.
    """

    topics: pd.DataFrame
    evaluator: QueryEvaluator
    folder: RunFolder | None
    batch_size: int | None
    efficiency: bool
    last_candidates: tuple[Sequence[Any], pd.DataFrame, pd.DataFrame, float] | None = None

    def evaluate(self, jobs: Sequence[Job], places: Iterator[str] | None) -> _Evaluated:
        """One run of one system: the jobs are its folds. With `places`, what each shows in front of its name."""
        run: Run = {}
        costs: list[Cost] = []
        for job in jobs:
            with line_of_run("" if places is None else f"{next(places)} {job}", shown=places is not None):
                part, cost = self._run(job)
            run |= part
            costs += [] if cost is None else [cost]
        return _Evaluated(
            jobs[0].seed,
            self.evaluator(run),
            Cost.total(costs) if costs else None,
            doubts(run, self.evaluator.qids),
            {qid: hash(frozenset(run[qid][0].tolist())) for qid in self.evaluator.qids if qid in run},
        )

    def _run(self, job: Job) -> tuple[Run, Cost | None]:
        """A run and its cost; None for one that was not made by a pipeline."""
        found = self.folder.find(job, measured=self.efficiency) if self.folder is not None else None
        if found is not None:
            frame, known_cost = found
            return as_run(frame, str(job)), None if known_cost is None else Cost(**known_cost)
        made = job.source if job.given or isinstance(job.source, pt.Transformer) else job.source()
        cost = None
        if isinstance(made, pt.Transformer):
            frame, cost = self._execute(made, self.topics if job.fold is None else job.fold.test_topics)
        else:
            frame = _as_frame(made, job)
        run = as_run(frame, str(job))
        if self.folder is not None:
            made_by = "a factory" if cost is None else described(made)
            notes = {"made by": made_by, "measured": self.efficiency, "cost": None if cost is None else asdict(cost)}
            self.folder.write(job, frame, {"given": True} if job.given else notes)
        return run, cost

    def _execute(self, pipeline: pt.Transformer, topics: pd.DataFrame) -> tuple[pd.DataFrame, Cost]:
        """`qid, docno, score` and what they cost, without memory and coverage if these are not measured."""
        *first, last = list(pipeline) if isinstance(pipeline, pt.Compose) else [pipeline]
        if self.efficiency:
            last.transform(_through(first, topics.head(WARM_UP_TOPICS)))
            forget_embeddings()
        costs, frames, size = [], [], self.batch_size
        batches = [topics] if size is None else [topics.iloc[i : i + size] for i in range(0, len(topics), size)]
        for batch in batches:
            candidates, seconds = self._candidates(first, batch)
            cost = Cost(queries=len(batch), documents=len(candidates) if first else 0)
            start = time.perf_counter()
            with measured(cost) if self.efficiency else nullcontext():
                frame = last.transform(candidates)
            cost.seconds = seconds + time.perf_counter() - start
            if self.efficiency:
                cost.add_coverage(last)
            costs.append(cost)
            frames.append(frame[[column for column in ("qid", "docno", "score") if column in frame.columns]])
        return pd.concat(frames, ignore_index=True), Cost.total(costs)

    def _candidates(self, stages: Sequence[Any], topics: pd.DataFrame) -> tuple[pd.DataFrame, float]:
        """A frame of one's own with the results of the stages before the last, and the seconds that they took."""
        if self.last_candidates is not None:
            known_stages, known_topics, frame, seconds = self.last_candidates
            # The same objects: equality of transformers may not look at weights.
            if known_topics is topics and list(map(id, known_stages)) == list(map(id, stages)):
                return frame.copy(), seconds
        start = time.perf_counter()
        frame = _through(stages, topics)
        seconds = time.perf_counter() - start
        if self.batch_size is None:
            self.last_candidates = (stages, topics, frame.copy(), seconds)
        return frame, seconds


def _through(stages: Sequence[Any], topics: pd.DataFrame) -> pd.DataFrame:
    frame = topics.copy()
    for stage in stages:
        frame = stage.transform(frame)
    return frame


def _as_frame(made: Any, job: Job) -> pd.DataFrame:
    if isinstance(made, str | Path):
        made = read_run(made)
    if not isinstance(made, pd.DataFrame):
        raise ValueError(f"the factory of {job} returned a {type(made).__name__}, not a pipeline or a run")
    if job.fold is not None and "qid" in made.columns:
        made = made[as_strings(made["qid"]).isin(set(job.fold.test_topics["qid"])).to_numpy()]
    return made


def _findings(
    evaluated: Mapping[str, Sequence[_Evaluated]], qids: Sequence[str], statistics: Statistics
) -> pd.DataFrame:
    """What makes the numbers doubtful; of several seeds the worst counts, and the first for its candidates."""
    rows: list[tuple[str, str, int, str]] = []
    for name, runs in evaluated.items():
        for doubt in DOUBTS:
            queries = max(run.doubts[doubt] for run in runs)
            if queries:
                rows.append((doubt, name, queries, f"{doubt} in {queries} of {len(qids)} queries of {name}"))
    values = {name: np.mean([run.values for run in runs], axis=0) for name, runs in evaluated.items()}
    pairs = [pair for _, _, of_kind in statistics.references(list(evaluated)) for pair in of_kind.items()]
    for name, reference in dict.fromkeys(pairs):
        own, other = evaluated[name][0].candidates, evaluated[reference][0].candidates
        queries = sum(own.get(qid) != other.get(qid) for qid in qids)
        if queries:
            message = f"{name} and {reference} rank different documents in {queries} of {len(qids)} queries"
            rows.append(("different candidates", name, queries, message))
        if np.array_equal(values[name], values[reference]):
            rows.append(("equal systems", name, len(qids), f"{name} and {reference} have equal values everywhere"))
    if (statistics.baselines or statistics.partner) and len(qids) < FEW_QUERIES:
        message = f"{len(qids)} queries; comparisons need at least {FEW_QUERIES}, better 50 (Buckley & Voorhees 2000)"
        rows.append(("too few queries", "", len(qids), message))
        # Only signs are random in these tests: no p-value can be below 2 / 2^Q.
        least = 2.0 ** (1 - len(qids))
        if statistics.test in ("wilcoxon", "randomisation") and least >= statistics.alpha:
            message = f"with {len(qids)} queries no p-value of test={statistics.test!r} can be below {least:g}"
            rows.append(("too few queries", "", len(qids), message))
    return pd.DataFrame(rows, columns=CHECK_COLUMNS)
