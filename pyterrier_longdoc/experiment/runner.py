"""Makes or reads the runs of an experiment, one after the other, and evaluates them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyterrier as pt

from ..common.caches import forget_embeddings
from ..common.citations import papers_of_pipeline
from ..common.frames import as_strings
from ..common.restoring import restoring
from ..common.runs import read_run
from .cost import Cost, measured
from .explain_query import Standing, standings
from .identity import identify
from .runs import QueryEvaluator, RunByQuery, RunFolder, run_by_query
from .systems import FittedModels, PlannedRun

WARM_UP_TOPICS = 2
"""Run before measuring, so that weights are loaded and kernels compiled."""

DOUBTS = ("missing queries", "NaN or infinite scores", "constant scores", "tied scores", "repeated documents")


@dataclass
class EvaluatedRun:
    """What is remembered of a run, since many runs do not fit into memory."""

    seed: int | None  # None for a system without
    values: np.ndarray = field(default_factory=lambda: np.zeros((0, 0)))  # (Q, M)
    costs: list[Cost] = field(default_factory=list)  # of its parts
    doubts: dict[str, int] = field(default_factory=dict)  # in how many queries it is doubtful, by why
    candidates: dict[str, int] = field(default_factory=dict)  # by query, a hash of its documents
    standings: dict[str, Standing] = field(default_factory=dict)  # by query, of a system's first run alone
    unchecked: list[str] = field(default_factory=list)  # of a saved run, what nobody can tell to be as it was
    differs: list[str] = field(default_factory=list)  # in what a saved run is that of another system
    papers: list[str] = field(default_factory=list)  # behind the pipeline


@dataclass
class Runner:
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
    fitted: FittedModels = field(default_factory=FittedModels)
    last_candidates: tuple[Sequence[Any], pd.DataFrame, pd.DataFrame, float] | None = None

    def evaluate(self, parts: Sequence[PlannedRun], on_part: Callable[[], object], *, ranks: bool) -> EvaluatedRun:
        """Return one run of a system, evaluated, of its parts: one, or one for each fold.

        `on_part` is called after each part; `ranks` notes how relevant documents rank.
        """
        evaluated, run = EvaluatedRun(parts[0].seed), RunByQuery()
        for planned in parts:
            run |= run_by_query(self._run(planned, evaluated), str(planned))
            on_part()
        qids = self.evaluator.qids
        evaluated.values = self.evaluator(run)
        evaluated.doubts = count_doubts(run, qids)
        evaluated.candidates = {qid: hash(frozenset(run[qid][0].tolist())) for qid in qids if qid in run}
        if ranks:
            evaluated.standings = standings(run, {qid: self.relevant.get(qid, []) for qid in qids})
        return evaluated

    def _run(self, planned: PlannedRun, evaluated: EvaluatedRun) -> pd.DataFrame:
        """Return a run, `qid, docno, score`, made or read; what else is known of it is added to `evaluated`."""
        if not isinstance(planned.source, pt.Transformer):
            self.last_candidates = None
        made = planned.make()
        self.fitted.check(made, planned)
        if not isinstance(made, pt.Transformer):
            frame = _as_frame(made, planned)
            if self.folder is not None:
                self.folder.write(planned, frame, None, None, measured=False)
            return frame
        evaluated.papers += papers_of_pipeline(made)
        identity = None if self.folder is None else identify(made)
        if self.folder is not None and identity is not None:
            saved, differs = self.folder.find(planned, identity, measured=self.efficiency)
            evaluated.differs += differs
            if saved is not None:
                evaluated.unchecked += identity.unchecked
                frame, cost = saved
                evaluated.costs.append(cost)
                return frame
        frame, cost = self._execute(made, self.topics if planned.fold is None else planned.fold.test_topics)
        evaluated.costs.append(cost)
        if self.folder is not None:
            self.folder.write(planned, frame, identity, cost, measured=self.efficiency)
        return frame

    def _execute(self, pipeline: pt.Transformer, topics: pd.DataFrame) -> tuple[pd.DataFrame, Cost]:
        """Return `qid, docno, score` and what they cost, without memory and coverage if these are not measured."""
        *first, last = list(pipeline) if isinstance(pipeline, pt.Compose) else [pipeline]
        if self.efficiency:
            with restoring(last):
                last.transform(_through(first, topics.head(WARM_UP_TOPICS)))
            forget_embeddings()
        costs, frames, size = [], [], self.batch_size or max(1, len(topics))
        for start in range(0, len(topics), size):
            batch = topics if size >= len(topics) else topics.iloc[start : start + size]
            candidates, seconds = self._candidates(first, batch)
            cost = Cost(queries=len(batch), documents=len(candidates) if first else 0)
            begin = time.perf_counter()
            with measured(cost) if self.efficiency else nullcontext():
                frame = last.transform(candidates)
            cost.seconds = seconds + time.perf_counter() - begin
            if self.efficiency:
                cost.add_coverage(last)
            costs.append(cost)
            frames.append(frame[[column for column in ("qid", "docno", "score") if column in frame.columns]])
        return pd.concat(frames, ignore_index=True), Cost.total(costs)

    def _candidates(self, stages: Sequence[Any], topics: pd.DataFrame) -> tuple[pd.DataFrame, float]:
        """Return a frame of one's own with the results of the stages before the last, and the seconds they took."""
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


def _through(stages: Iterable[Any], topics: pd.DataFrame) -> pd.DataFrame:
    frame = topics.copy()
    for stage in stages:
        frame = stage.transform(frame)
    return frame


def _as_frame(made: Any, planned: PlannedRun) -> pd.DataFrame:
    if isinstance(made, str | Path):
        made = read_run(made)
    if not isinstance(made, pd.DataFrame):
        raise ValueError(f"the factory of {planned} returned a {type(made).__name__}, not a pipeline or a run")
    if planned.fold is not None and "qid" in made.columns:
        made = made[as_strings(made["qid"]).isin(set(planned.fold.test_topics["qid"])).to_numpy()]
    return made


def count_doubts(run: RunByQuery, qids: Sequence[str]) -> dict[str, int]:
    """Count the queries in which a run is doubtful, by why; scores are compared as trec_eval does, in float32."""
    found = dict.fromkeys(DOUBTS, 0)
    for qid in qids:
        if qid not in run:
            found["missing queries"] += 1
            continue
        docnos, scores = run[qid]
        with np.errstate(over="ignore"):
            distinct = len(np.unique(scores.astype("float32"), equal_nan=False))
        found["NaN or infinite scores"] += not np.isfinite(scores).all()
        found["constant scores"] += distinct == 1 < len(scores)
        found["tied scores"] += distinct < len(scores)
        found["repeated documents"] += len(set(docnos.tolist())) < len(docnos)
    return found
