"""Models on the actors of Ray: each holds one, and gets one block of whole queries after the other.

Actors and not Ray Data, whose batches may cut a query in two, and fill the object store: of a worker only one block is
in the store, and only that is lost with it.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, suppress
from dataclasses import KW_ONLY, dataclass
from hashlib import blake2b
from typing import Any

import numpy as np
import pandas as pd
import pyterrier as pt

from ..common.arguments import argument, validate
from ..common.coverage import Coverage
from ..common.files import import_extra
from ..common.presentation import NotebookMixin, ReprMixin
from ..common.progress import work_bar
from ..common.runs import stages_of
from ..common.signals import java_loses_signal, take_back_signals
from ..common.warnings import warn, warn_once
from .blocks import BLOCK_ROWS, blocks_of, describe_or_problem, is_picklable, loader_of, map_elsewhere, transformed

_PATIENCE = 60.0
"""Seconds without any worker before a warning."""

_RETRIES = 3
"""How often a task is repeated after its worker died; after that the task is to blame, not the machine."""


@dataclass(eq=False, repr=False)
class RayExecutor(ReprMixin, AbstractContextManager):
    """Ray actors that do one task at a time each: for `ld.distributed`, `ld.rerank_to_disk`, `k_fold_fit`, `fit_seeds`.

    They start with the first task, on the Ray that this program is connected to, the cluster that `RAY_ADDRESS` names
    or `ray start` has begun here, or else a new one on this machine. They stay, with the model that they hold, until
    `close`. When a worker dies, Ray restarts it and repeats its task.

    Args:
        workers: most actors; work begins when the first is up.
        cpus_per_worker: cores, and so threads, of each worker.
        gpus_per_worker: GPUs of each worker; 0.5 for two workers on one GPU. None: 1 if Ray has any, else 0.
    """

    workers: int = argument(at_least=1)
    _: KW_ONLY
    cpus_per_worker: int = argument(1, at_least=1)
    gpus_per_worker: float | None = argument(None, at_least=0)

    def __post_init__(self) -> None:
        validate(self)
        self._session: tuple[str, str] | None = None
        self._actors: list[Any] = []
        self._sent: tuple[str, Any] = "", None
        self.warned: set[str] = set()

    def distributed(self, model: pt.Transformer, *, block_rows: int = BLOCK_ROWS, verbose: bool = False) -> Distributed:
        """Return the model on these workers, as `ld.distributed` does; several models take turns on them."""
        return Distributed(model, self, block_rows=block_rows, verbose=verbose)

    def map(
        self, function: Callable[[Any, Any], Any], shared: Any, items: Iterable[tuple[Any, Any]]
    ) -> Iterator[tuple[Any, Any]]:
        """Call `function(shared, item)` on the workers for each `(key, item)`; yield `(key, value)`, as they are done.

        `shared`, e.g. a model, is sent to each worker once, which keeps it until the next one. Items are taken when a
        worker is free. An error of the function ends the call, and so do four workers that die over one item
        (`ray.exceptions.RayActorError`).
        """
        actors, (name, place), tasks = self._connected(), self._send(shared), iter(items)
        take_back_signals()
        ray, under_way = _ray(), {}
        idle: list[Any] = []
        starts = {actor.start.remote(): actor for actor in actors}

        def hand_out() -> None:
            while idle and (task := next(tasks, None)) is not None:
                actor, (key, item) = idle.pop(), task
                # Ray would fetch `place` for each task if it were not in a list.
                try:
                    under_way[actor.work.remote(name, [place], function, item)] = actor, key
                except TypeError as error:
                    self._name_stage(item, error)
                    raise

        try:
            while under_way or not idle:
                ready, _ = ray.wait([*under_way, *starts], timeout=None if under_way else _PATIENCE)
                if not ready:
                    self._warn_of_waiting()
                    continue
                if ready[0] in starts:
                    idle.append(starts.pop(ready[0]))
                    hand_out()
                    continue
                actor, key = under_way.pop(ready[0])
                try:
                    value, notices = ray.get(ready[0])
                except ray.exceptions.RayTaskError as error:
                    raise error.cause from error
                for message, category in notices:
                    warn_once(self, message, category)
                idle.append(actor)
                hand_out()  # before the caller, who may need a while, gets the result
                yield key, value
        finally:
            for actor, _ in under_way.values():
                self._dismiss(actor)

    def can_send(self, value: Any) -> bool:
        """Return whether workers can get it: Ray sends functions, too, but no Java objects."""
        return is_picklable(value, _ray().cloudpickle.dumps)

    def close(self) -> None:
        """End the actors, which frees their GPUs; the next task starts new ones. Ray itself goes on."""
        for actor in list(self._actors):
            self._dismiss(actor)

    def __exit__(self, *_: object) -> None:
        self.close()

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_session": None, "_actors": [], "_sent": ("", None)}

    def _connected(self) -> list[Any]:
        """Return the actors, ready or not yet, and connect to Ray if need be."""
        ray = _ray()
        if not ray.is_initialized():
            if java_loses_signal():
                warn(
                    "ray was imported before Java started, and takes a signal away from Java when it connects, which "
                    "may end this program at any time: import ray after Java's start, call ray.init() before it, or "
                    "set RAY_DISABLE_FAILURE_SIGNAL_HANDLER=1 before ray is imported",
                    UserWarning,
                )
            # Without an address it finds the cluster of `ray start`; "auto" would also join other programs' clusters.
            os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
            ray.init(include_dashboard=False, log_to_driver=False, logging_level="ERROR")
        context = ray.get_runtime_context()
        session = context.get_node_id(), context.get_job_id()  # one of them is another after `ray.shutdown`
        if session != self._session:
            self._session, self._actors, self._sent = session, [], ("", None)
        resources = ray.cluster_resources()
        gpus = float("GPU" in resources) if self.gpus_per_worker is None else self.gpus_per_worker
        needs = {"CPU": self.cpus_per_worker, "GPU": gpus}
        room = min(int(resources.get(kind, 0) // number) for kind, number in needs.items() if number)
        if not room:
            raise ValueError(f"no worker of {self!r} has room: each needs {needs}, and Ray has {resources}")
        if room < self.workers:
            warn_once(self, f"{self!r} has room for {room} workers at present", UserWarning)
        remote = ray.remote(num_cpus=self.cpus_per_worker, num_gpus=gpus, max_restarts=-1, max_task_retries=_RETRIES)
        while len(self._actors) < self.workers:
            self._actors.append(remote(_Worker).remote(self.cpus_per_worker))
        return self._actors

    def _warn_of_waiting(self) -> None:
        warn_once(self, f"{self!r} waits for room: close other executors to free their workers", UserWarning)

    def _send(self, shared: Any) -> tuple[str, Any]:
        """Return a name for the contents, and their place in the store; the same contents are stored once."""
        try:
            pickle = _ray().cloudpickle.dumps(shared)
        except Exception as error:
            self._name_stage((shared,), error)
            raise
        name = blake2b(pickle, digest_size=16).hexdigest()
        if name != self._sent[0]:
            self._sent = name, _ray().put(pickle)
        return self._sent

    def _name_stage(self, values: Any, error: Exception) -> None:
        """Raise the error of what cannot be sent with the name of the stage, if it is one of a pipeline."""
        pipelines = [each for each in values if isinstance(each, pt.Transformer)] if isinstance(values, tuple) else []
        stages = [stage for each in pipelines for stage in stages_of(each) if not self.can_send(stage)]
        if not stages:
            return
        stage, owner, cure = stages[-1], "the stage", "if it loads texts, give the model text_loader= instead of it"
        if not self.can_send(loader_of(stage)):
            owner, cure = "the text_loader of", "put the texts into the frames instead"
        raise TypeError(f"{owner} {stage!r} cannot be sent to workers: {cure} ({error})") from error

    def _dismiss(self, actor: Any) -> None:
        self._actors = [other for other in self._actors if other is not actor]
        if _ray().is_initialized():
            with suppress(ValueError):  # it has ended with an earlier Ray
                _ray().kill(actor)


class _Worker:
    """An actor, whose tasks share a model."""

    def __init__(self, threads: int) -> None:
        # Before the first model imports torch.
        os.environ["OMP_NUM_THREADS"] = os.environ["MKL_NUM_THREADS"] = str(threads)
        self.name, self.shared = "", None

    def start(self) -> None:
        """Return as soon as the actor is ready."""

    def work(self, name: str, place: list[Any], function: Callable[..., Any], item: Any) -> tuple[Any, ...]:
        """Return the function's value and warnings."""
        if name != self.name:
            self.name, self.shared = "", None  # makes room for the next model
            ray = _ray()
            self.shared, self.name = ray.cloudpickle.loads(ray.get(place[0])), name
        with warnings.catch_warnings(record=True) as notices:
            value = function(self.shared, item)
        return value, [(str(notice.message), notice.category) for notice in notices]


class Distributed(NotebookMixin, pt.Transformer, AbstractContextManager):
    """A model whose queries are divided among the workers of an executor; `ld.distributed` makes it.

    Attributes:
        coverage: how much of the text the last `transform` read, the sum over all blocks; None before.
    """

    def __init__(
        self, model: pt.Transformer, executor: RayExecutor, *, block_rows: int = BLOCK_ROWS, verbose: bool = False
    ) -> None:
        self.model, self.executor, self.block_rows, self.verbose = model, executor, block_rows, verbose
        self.coverage: Coverage | None = None

    def transform(self, inp: pd.DataFrame) -> pd.DataFrame:
        """Return the model's results of all blocks of queries in a new frame.

        If the model keeps its rows, they have the order and index of the input; else queries have the order of their
        first rows.
        """
        empty = self.model.transform(inp.iloc[:0])  # refuses missing columns before anything is sent
        if not len(inp):
            return empty
        pt.validate.columns(inp, includes=["qid"], context=self)
        rows = blocks_of(inp["qid"], self.block_rows if "docno" in inp.columns else 1)
        blocks = ((number, inp.iloc[places]) for number, places in enumerate(rows))
        parts: dict[int, pd.DataFrame] = {}
        coverages = []
        with work_bar(repr(self), "row", len(inp), shown=self.verbose) as bar:
            for number, (part, coverage) in map_elsewhere(self.executor, transformed, self.model, blocks):
                parts[number] = part
                coverages += [] if coverage is None else [coverage]
                bar.update(len(rows[number]))
        self.coverage = Coverage.total(coverages) if coverages else None
        return _in_order(pd.concat([parts[number] for number in range(len(rows))]), inp, np.concatenate(rows))

    def describe(self) -> dict[str, Any]:
        """Return the model's description on a worker, device and precision included."""
        answers = map_elsewhere(self.executor, describe_or_problem, self.model, [(None, None)])
        ((_, (found, problem)),) = answers
        if problem:
            raise ValueError(problem)
        return dict(found)

    @property
    def text_loader(self) -> Any:
        """Return the model's."""
        return getattr(self.model, "text_loader", None)

    def close(self) -> None:
        """End the workers, which frees their GPUs; the next `transform` starts new ones."""
        self.executor.close()

    def __exit__(self, *_: object) -> None:
        self.close()

    def subtransformers(self) -> dict[str, Any]:
        """Return the model."""
        return {"model": self.model}

    def __repr__(self) -> str:
        return f"distributed({self.model!r}, {self.executor!r})"


def distributed(
    model: pt.Transformer,
    *,
    workers: int,
    cpus_per_worker: int = 1,
    gpus_per_worker: float | None = None,
    block_rows: int = BLOCK_ROWS,
    verbose: bool = False,
) -> Distributed:
    """Return the same model on the workers of a Ray cluster, or on several GPUs or cores of this machine.

    It takes the model's place: `bm25 >> ld.distributed(ld.PARADE(), workers=8)`. The model is sent to each worker once,
    and again after its weights or arguments have changed; without weights in memory here each worker loads it. Workers
    get one block of whole queries at a time, and blocks depend on the input alone. When a worker dies, Ray
    restarts it and repeats its block. Needs the extra `ray`.

    Scores are those of `model.transform` up to the seventh digit, as other windows share a pass.

    Args:
        model: a model or a pipeline. With a `text_loader`, workers load the texts themselves; if it cannot be sent, as
            that of a Terrier index, texts are loaded here and sent with each block. Leave its `device` None.
        workers: as of `RayExecutor`.
        cpus_per_worker: as of `RayExecutor`.
        gpus_per_worker: as of `RayExecutor`.
        block_rows: queries fill a block until it has so many rows; each topic of an input without `docno` is a block.
        verbose: show a bar; models on workers show none.

    Returns:
        A transformer; `close()`, or the end of a `with` block, ends the workers and frees their GPUs. Its
        `executor` can also be that of `ld.rerank_to_disk`, `k_fold_fit` and `fit_seeds`.
    """
    executor = RayExecutor(workers, cpus_per_worker=cpus_per_worker, gpus_per_worker=gpus_per_worker)
    return executor.distributed(model, block_rows=block_rows, verbose=verbose)


def _in_order(out: pd.DataFrame, inp: pd.DataFrame, rows: np.ndarray) -> pd.DataFrame:
    """Return the output of blocks in the order of the input if it has the input's rows."""
    names = [name for name in ("qid", "docno") if name in inp.columns and name in out.columns]
    if len(out) != len(inp) or any(out[name].tolist() != inp[name].iloc[rows].tolist() for name in names):
        return out.reset_index(drop=True)
    out = out.iloc[np.argsort(rows, kind="stable")]
    return out if out.index.equals(inp.index) else out.reset_index(drop=True)


def _ray() -> Any:
    return import_extra("ray", "ray", "ld.distributed and RayExecutor need Ray")
