"""Experiments as the papers report them."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import pyterrier as pt

from ..common.arguments import check_positive, check_seeds
from ..common.caches import forget_embeddings
from ..common.files import import_extra
from ..common.frames import as_strings, check_columns
from ..common.notices import one_system, warn
from ..common.progress import one_line
from ..common.registry import OWN_CODE
from ..common.undisturbed import undisturbed
from .efficiency import Cost, efficiency_table, measured
from .identity import Identities, Identity
from .results import CHECK_COLUMNS, Decimals, ExperimentResults, check_decimals
from .runs import DOUBTS, QueryEvaluator, Run, RunFolder, as_run, doubts, read_run, settings_of
from .significance import RESAMPLES, Baseline, Statistics, Test, baseline_names, mean_over_seeds, without_rounding
from .sources import Sources, restored, sources_of
from .systems import FittedModels, Job, make_folds, named_systems, plan
from .why import Rankings, Standing, relevant_documents, standings

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
    """Compares systems over seeds and folds as Boytsov et al. 2025 do.

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
            an `"error"`. Unlike there, a run is reused only if the same system would make it: weights, settings, first
            stage and topics by their contents; of a function its code, the values that it names, seed, fold and
            judgements to train on. Any other run is made anew. What cannot be compared (`pt.apply`, transformers of
            other packages without `describe`, what functions call) is named by a warning where a run is reused, in
            `.checks`, in `.settings["unchecked"]` and in the notes of the run. What depends on a class of your own that
            is made of this package's is made anew, unless that has a `describe` of its own; `.checks` says so.
        verbose: show a line for each run, with the progress of the model that it ends with.

    Returns:
        The results: `.table`, `.comparisons`, `.to_markdown()` and so on.

    Raises:
        ValueError: for arguments that do not fit together, runs that cannot be evaluated, and a model that is fitted
            for several folds or seeds, one after the other.
    """
    check_positive(batch_size=batch_size)
    if seeds is not None:
        check_seeds(seeds)
    if efficiency:
        import_extra("psutil", "analysis", "psutil is missing")
    topics = _checked(topics, ("qid",), "topics")
    qrels = _checked(qrels, ("qid", "docno", "label"), "qrels")
    if filter_by_qrels:
        topics = topics[topics["qid"].isin(set(qrels["qid"]))]
    named = named_systems(systems, names)
    compared_to = baseline_names(baseline, list(named))
    statistics = Statistics(compared_to, dict(partner or {}), test, correction, alpha, margin, resamples=resamples)
    statistics.check(list(named))
    labels = None if seeds is None else [int(seed) for seed in seeds]
    prepared = make_folds(folds, topics, qrels) if folds is not None else []
    planned = {name: plan(name, system, labels, prepared) for name, system in named.items()}
    evaluator = QueryEvaluator(topics, qrels, metrics, filter_by_topics=filter_by_topics)
    check_decimals(round, evaluator.names)
    settings = settings_of(topics, prepared, labels)
    folder = None if save_dir is None else RunFolder(save_dir, settings, save_mode, named)
    relevant = relevant_documents(qrels, evaluator.qids)
    docnos = {str(qid): documents.tolist() for qid, documents in relevant.groupby("qid")["docno"]}
    runner = _Runner(topics, evaluator, docnos, folder, batch_size, efficiency, settings["topics"])
    if folder is not None:
        runner.look_at_factories(job for runs in planned.values() for jobs in runs for job in jobs)
    evaluated: dict[str, list[_Evaluated]] = {name: [] for name in named}
    number = sum(len(jobs) for runs in planned.values() for jobs in runs)
    places = (f"{place}/{number}" for place in range(1, number + 1))
    for name, runs in planned.items():
        with one_system(name, set()):
            for jobs in runs:
                evaluated[name].append(runner.evaluate(jobs, places if verbose else None, ranks=jobs is runs[0]))
    costs = {name: [run.cost for run in runs if run.cost is not None] for name, runs in evaluated.items()}
    results = ExperimentResults(
        {name: np.stack([run.values for run in runs]) for name, runs in evaluated.items()},
        {name: [run.seed for run in runs] for name, runs in evaluated.items()},
        evaluator.qids,
        evaluator.names,
        statistics,
        round=round,
        efficiency=efficiency_table(costs, statistics.partner) if efficiency else None,
        checks=_findings(evaluated, evaluator.qids, statistics),
        settings={**settings, "unchecked": _unchecked(evaluated), "sources": _sources(evaluated)},
        folder=None if save_dir is None else Path(save_dir),
        rankings=Rankings.of(
            topics[topics["qid"].isin(set(evaluator.qids))],
            relevant,
            {name: runs[0].standings for name, runs in evaluated.items()},
        ),
    )
    if save_dir is not None:
        results.save(save_dir)
    for check, rows in results.checks.groupby("check", sort=False):
        messages = rows["message"].unique().tolist()
        more = f" (and {len(messages) - 3} more, see .checks)" if len(messages) > 3 else ""
        warn(f"{check}: {'; '.join(messages[:3])}{more}", ExperimentWarning)
    return results


def _sources(evaluated: Mapping[str, list[_Evaluated]]) -> dict[str, list[str]]:
    """What to cite for all systems, for JSON."""
    return Sources.of_all(run.sources for runs in evaluated.values() for run in runs).as_dict()


def _checked(frame: pd.DataFrame, columns: Sequence[str], what: str) -> pd.DataFrame:
    check_columns(frame, columns, what)
    return frame.assign(qid=as_strings(frame["qid"]))


class _Evaluated(NamedTuple):
    """What is remembered of a run, since many runs do not fit into memory."""

    seed: int | None
    values: np.ndarray
    cost: Cost | None
    doubts: dict[str, int]
    candidates: dict[str, int]
    """By query, a hash of its documents."""
    unchecked: list[str]
    """What nobody can tell whether it is as it was."""
    was_read: bool
    """Whether a saved run was taken."""
    differs: list[str]
    """In what the system that had made a saved run was another one."""
    standings: dict[str, Standing]
    """By query, how the relevant documents are ranked; of a system's first run alone."""
    sources: Sources
    """What to cite for it."""


class _Part(NamedTuple):
    """The run of a job, its cost (None for one that was not made by a pipeline), and what `_Evaluated` tells of it."""

    run: Run
    cost: Cost | None
    unchecked: list[str]
    was_read: bool
    differs: list[str]
    sources: Sources


@dataclass
class _Runner:
    """Makes runs, or reads finished ones, and evaluates them.

    What all stages but the last one made stays until a pipeline with other stages comes, or a function is called, which
    may change these: pipelines with the same objects as first stage and text loader run these once.
    """

    topics: pd.DataFrame
    evaluator: QueryEvaluator
    relevant: dict[str, list[str]]  # docnos by query
    folder: RunFolder | None
    batch_size: int | None
    efficiency: bool
    topics_digest: Any
    factories: dict[Job, Identity] = field(default_factory=dict)
    fitted: FittedModels = field(default_factory=FittedModels)
    last_candidates: tuple[Sequence[Any], pd.DataFrame, pd.DataFrame, float] | None = None

    def look_at_factories(self, jobs: Iterable[Job]) -> None:
        """Tells who they are before one of them is called, and changes what another one names."""
        identities = Identities()
        for job in jobs:
            if not (job.given or isinstance(job.source, pt.Transformer)):
                self.factories[job] = identities.of(job.source)

    def evaluate(self, jobs: Sequence[Job], places: Iterator[str] | None, *, ranks: bool) -> _Evaluated:
        """One run of one system: the jobs are its folds.

        Args:
            jobs: of the run.
            places: what each shows in front of its name; None shows nothing.
            ranks: note how relevant documents are ranked.
        """
        run: Run = {}
        costs: list[Cost] = []
        parts: list[_Part] = []
        for job in jobs:
            with one_line("" if places is None else f"{next(places)} {job}", shown=places is not None):
                parts.append(self._run(job))
            run |= parts[-1].run
            costs += [] if parts[-1].cost is None else [parts[-1].cost]
        return _Evaluated(
            jobs[0].seed,
            self.evaluator(run),
            Cost.total(costs) if costs else None,
            doubts(run, self.evaluator.qids),
            {qid: hash(frozenset(run[qid][0].tolist())) for qid in self.evaluator.qids if qid in run},
            list(dict.fromkeys(name for part in parts for name in part.unchecked)),
            any(part.was_read for part in parts),
            list(dict.fromkeys(name for part in parts for name in part.differs)),
            standings(run, {qid: self.relevant.get(qid, []) for qid in self.evaluator.qids}) if ranks else {},
            Sources.of_all(part.sources for part in parts),
        )

    def _run(self, job: Job) -> _Part:
        unchecked: list[str] = []
        differs: list[str] = []
        told = None
        if self.folder is not None and not job.given:
            identity = self.factories.get(job) or Identities().of(job.source)
            told, unchecked = {"system": identity.told, "topics": self.topics_digest}, identity.unchecked
            saved = self.folder.find(job, told, measured=self.efficiency)
            if saved is not None and saved.run is not None:
                cost = None if saved.cost is None else Cost(**saved.cost)
                return _Part(as_run(saved.run, str(job)), cost, unchecked, True, [], restored(saved.sources))
            differs = [] if saved is None else saved.differs
        if not isinstance(job.source, pt.Transformer):
            self.last_candidates = None
        made = job.make()
        self.fitted.check(made, job)
        cost = None
        if isinstance(made, pt.Transformer):
            frame, cost = self._execute(made, self.topics if job.fold is None else job.fold.test_topics)
        else:
            frame = _as_frame(made, job)
        sources = sources_of(made) if isinstance(made, pt.Transformer) else Sources([], [f"{job.system}, a given run"])
        run = as_run(frame, str(job))
        if self.folder is not None:
            known_cost = None if cost is None else asdict(cost)
            notes = {"identity": told, "unchecked": unchecked, "measured": self.efficiency, "cost": known_cost}
            notes["sources"] = sources.as_dict()
            self.folder.write(job, frame, {"given": True} if job.given else notes)
        return _Part(run, cost, unchecked, False, differs, sources)

    def _execute(self, pipeline: pt.Transformer, topics: pd.DataFrame) -> tuple[pd.DataFrame, Cost]:
        """`qid, docno, score` and what they cost, without memory and coverage if these are not measured."""
        *first, last = list(pipeline) if isinstance(pipeline, pt.Compose) else [pipeline]
        if self.efficiency:
            with undisturbed(last):
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
            # The same objects, as equality of transformers may not look at weights.
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


def _unchecked(evaluated: Mapping[str, Sequence[_Evaluated]]) -> dict[str, list[str]]:
    """By system, what its identity does not tell."""
    names = {
        name: list(dict.fromkeys(part for run in runs for part in run.unchecked)) for name, runs in evaluated.items()
    }
    return {name: unchecked for name, unchecked in names.items() if unchecked}


def _of_saved_runs(name: str, runs: Sequence[_Evaluated]) -> Iterator[tuple[str, str]]:
    """What of a system's saved runs could not be compared, and why some were made anew."""
    unchecked = dict.fromkeys(part for run in runs if run.was_read for part in run.unchecked)
    if unchecked:
        yield "unchecked", f"the saved run of {name} was read; nobody can tell if as before: {', '.join(unchecked)}"
    differs = list(dict.fromkeys(part for run in runs for part in run.differs))
    if differs:
        more = f" and {len(differs) - 3} more" if len(differs) > 3 else ""
        own = any(OWN_CODE in each for each in differs)
        who = "may be of another one: nobody can tell whether these are" if own else "was of another one: not"
        yield "made anew", f"the saved run of {name} {who} the same {', '.join(differs[:3])}{more}"


def _without_relevant_candidate(
    evaluated: Mapping[str, Sequence[_Evaluated]], queries: int
) -> Iterator[tuple[str, str, int, str]]:
    """A row for each system that has such queries; those that rerank the same candidates share the message."""
    systems: dict[tuple[str, ...], list[str]] = {}
    for name, runs in evaluated.items():
        without = tuple(qid for qid, standing in runs[0].standings.items() if not standing.ranks)
        systems.setdefault(without, []).append(name)
    for without, names in systems.items():
        if without:
            what = "no relevant candidate"
            message = f"{what} in {len(without)} of {queries} queries of {', '.join(names)}"
            yield from ((what, name, len(without), message) for name in names)


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
        distinct = len({run.values.tobytes() for run in runs})
        if distinct < len(runs):
            message = f"{len(runs) - distinct} of {len(runs)} seeds of {name} have the values of another one"
            rows.append(("equal seeds", name, len(qids), message))
        rows += [(check, name, len(qids), message) for check, message in _of_saved_runs(name, runs)]
    rows += _without_relevant_candidate(evaluated, len(qids))
    values = {name: mean_over_seeds(np.stack([run.values for run in runs])) for name, runs in evaluated.items()}
    pairs = [pair for _, _, of_kind in statistics.references(list(evaluated)) for pair in of_kind.items()]
    for name, reference in dict.fromkeys(pairs):
        own, other = evaluated[name][0].candidates, evaluated[reference][0].candidates
        queries = sum(own.get(qid) != other.get(qid) for qid in qids)
        if queries:
            message = f"{name} and {reference} rank different documents in {queries} of {len(qids)} queries"
            rows.append(("different candidates", name, queries, message))
        if np.array_equal(without_rounding(values[name], values[reference]), values[reference]):
            rows.append(("equal systems", name, len(qids), f"{name} and {reference} have equal values everywhere"))
    if (statistics.baseline or statistics.partner) and len(qids) < FEW_QUERIES:
        message = f"{len(qids)} queries; comparisons need at least {FEW_QUERIES}, better 50 (Buckley & Voorhees 2000)"
        rows.append(("too few queries", "", len(qids), message))
        # Only signs are random in these tests: no p-value can be below 2 / 2^Q.
        least = 2.0 ** (1 - len(qids))
        if statistics.test in ("wilcoxon", "randomisation") and least >= statistics.alpha:
            message = f"with {len(qids)} queries no p-value of test={statistics.test!r} can be below {least:g}"
            rows.append(("too few queries", "", len(qids), message))
    return pd.DataFrame(rows, columns=CHECK_COLUMNS)
