"""Compute or load the runs of an experiment one by one, and evaluate them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any
from weakref import ref

import numpy as np
import pandas as pd
import pyterrier as pt

from ..common.caches import forget_embeddings
from ..common.citations import papers_of_pipeline
from ..common.key import frame_digest, model_keys
from ..common.runs import stages_of, trained_qids
from .cost import Cost, measuring
from .runs import QueryEvaluator, RunByQuery, RunFolder, run_by_query
from .systems import RunPart

WARM_UP_TOPICS = 2
"""Topics that are run before measuring, to load weights and compile kernels."""

TRAINED = "seen in training"
RUN_CHECKS = (
    "missing queries",
    "NaN or infinite scores",
    "constant scores",
    "tied scores",
    "repeated documents",
    TRAINED,
)


@dataclass
class EvaluatedRun:
    """The results of a run, without its rows, because the rows of many runs do not fit into memory."""

    seed: int | None  # None for a system without seeds
    values: np.ndarray = field(default_factory=lambda: np.zeros((0, 0)))  # (Q, M)
    costs: list[Cost] = field(default_factory=list)  # one per part
    doubtful: dict[str, int] = field(default_factory=lambda: dict.fromkeys(RUN_CHECKS, 0))  # queries that fail each
    candidates: dict[str, int] = field(default_factory=dict)  # a hash of the documents, by query
    with_relevant: set[str] = field(default_factory=set)  # queries with a relevant document
    papers: list[str] = field(default_factory=list)  # to cite for the pipeline


@dataclass
class Runner:
    """Computes runs or loads finished ones, and evaluates them.

    The output of all stages but the last is kept for the next pipeline, so that pipelines with the same objects for
    these stages run them once. It is discarded when a factory is called, because it may change these objects.
    """

    topics: pd.DataFrame
    evaluator: QueryEvaluator
    relevant: pd.DataFrame  # documents, `qid, docno, label`
    folder: RunFolder | None
    batch_size: int | None
    efficiency: bool
    # By system and id of a stage that can be fitted: its reference, the last part and the length of its history.
    fitted: dict[tuple[str, int], tuple[ref[Any], RunPart, int | None]] = field(default_factory=dict)
    last_candidates: tuple[Sequence[Any], pd.DataFrame, pd.DataFrame, float] | None = None

    def evaluate(self, parts: Sequence[RunPart], on_part: Callable[[], object]) -> EvaluatedRun:
        """Compute or load a run of a system (one part, or one per fold), and evaluate it.

        `on_part` is called after each part.
        """
        outcome, run = EvaluatedRun(parts[0].seed), RunByQuery()
        for part in parts:
            run |= run_by_query(self._run(part, outcome), str(part))
            on_part()
        qids = self.evaluator.qids
        outcome.values = self.evaluator(run)
        count_doubtful(run, qids, outcome.doubtful)
        outcome.candidates = {qid: hash(frozenset(run[qid][0].tolist())) for qid in qids if qid in run}
        relevant = zip(self.relevant["qid"], self.relevant["docno"], strict=True)
        documents = {qid: set(docnos.tolist()) for qid, (docnos, _) in run.items()}
        outcome.with_relevant = {qid for qid, docno in relevant if docno in documents.get(qid, ())}
        return outcome

    def _run(self, part: RunPart, outcome: EvaluatedRun) -> pd.DataFrame:
        """Compute or load a run (`qid, docno, score`), and add its costs and checks to `outcome`."""
        if not isinstance(part.source, pt.Transformer):
            self.last_candidates = None
        pipeline = part.make()
        if isinstance(pipeline, pd.DataFrame):
            if self.folder is not None:
                self.folder.write(part, pipeline, None, None)
            return pipeline
        outcome.papers += papers_of_pipeline(pipeline)
        topics = self.topics if part.fold is None else part.fold.test_topics
        self._refuse_fitted_again(pipeline, part)
        outcome.doubtful[TRAINED] += len(trained_qids(pipeline) & set(topics["qid"]))
        made_by = None
        if self.folder is not None:
            made_by = {
                "topics": frame_digest(topics),
                "models": model_keys(pipeline, without=("computed",)),  # whatever computes them
                "efficiency": self.efficiency,
            }
            saved = self.folder.find(part, made_by)
            if saved is not None:
                outcome.costs.append(saved[1])
                return saved[0]
        frame, cost = self._execute(pipeline, topics)
        outcome.costs.append(cost)
        if self.folder is not None:
            self.folder.write(part, frame, made_by, cost)
        return frame

    def _refuse_fitted_again(self, pipeline: pt.Transformer, part: RunPart) -> None:
        """Refuse a model that a factory returned for several folds or seeds, and that was trained in between.

        One without a `history`, of another package, may have been trained for each fold.
        """
        if part.fold is None and part.seed is None:
            return
        for stage in stages_of(pipeline):
            if not hasattr(stage, "fit") or isinstance(stage, pt.Compose):
                continue
            history = getattr(stage, "history", None)
            trained = None if history is None else len(history)
            model, other, before = self.fitted.get((part.system, id(stage)), (ref(stage), part, trained))
            may_have_been = trained != before or (trained is None and part.fold is not None)
            if model() is stage and other is not part and may_have_been:
                raise ValueError(
                    f"the factory of {part} returned the same {stage!r} as that of {other}, so that it may have been "
                    f"trained for both: create a new model in each call, e.g. lambda seed: ld.MaxP(seed=seed)"
                )
            self.fitted[part.system, id(stage)] = ref(stage), part, trained

    def _execute(self, pipeline: pt.Transformer, topics: pd.DataFrame) -> tuple[pd.DataFrame, Cost]:
        """Run a pipeline; return `qid, docno, score` and the cost (memory and coverage only with `efficiency`)."""
        *earlier, last = list(pipeline) if isinstance(pipeline, pt.Compose) else [pipeline]
        if self.efficiency:
            last.transform(_through(earlier, topics.head(WARM_UP_TOPICS)))
            forget_embeddings()
        costs, frames, size = [], [], self.batch_size or max(1, len(topics))
        for start in range(0, len(topics), size):
            batch = topics if size >= len(topics) else topics.iloc[start : start + size]
            candidates, seconds = self._candidates(earlier, batch)
            cost = Cost(queries=len(batch), documents=len(candidates) if earlier else 0)
            begin = time.perf_counter()
            with measuring(cost) if self.efficiency else nullcontext():
                frame = last.transform(candidates)
            cost.seconds = seconds + time.perf_counter() - begin
            coverage = getattr(last, "coverage", None) if self.efficiency else None
            if coverage is not None:
                cost.texts, cost.windows = coverage.pairs, coverage.windows
                cost.tokens, cost.tokens_read = coverage.tokens, coverage.tokens_read
            costs.append(cost)
            frames.append(frame[[column for column in ("qid", "docno", "score") if column in frame.columns]])
        return pd.concat(frames, ignore_index=True), Cost.total(costs)

    def _candidates(self, stages: Sequence[Any], topics: pd.DataFrame) -> tuple[pd.DataFrame, float]:
        """Return a copy of the candidates, and the time they took in seconds."""
        if self.last_candidates is not None:
            last_stages, last_topics, frame, seconds = self.last_candidates
            # Compared by identity, because equal transformers can have different weights.
            if last_topics is topics and list(map(id, last_stages)) == list(map(id, stages)):
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


def count_doubtful(run: RunByQuery, qids: Sequence[str], counts: dict[str, int]) -> None:
    """Count the queries of a run that fail each check; scores are compared in float32, as in trec_eval."""
    for qid in qids:
        if qid not in run:
            counts["missing queries"] += 1
            continue
        docnos, scores = run[qid]
        rows, documents = len(docnos), dict(zip(docnos.tolist(), scores.tolist(), strict=True))
        scores = np.array(list(documents.values()))
        with np.errstate(over="ignore"):
            distinct = len(np.unique(scores.astype("float32"), equal_nan=False))
        counts["NaN or infinite scores"] += not np.isfinite(scores).all()
        counts["constant scores"] += distinct == 1 < len(scores)
        counts["tied scores"] += distinct < len(scores)
        counts["repeated documents"] += len(documents) < rows
