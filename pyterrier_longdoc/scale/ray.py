"""Models on Ray actors, each of which holds a model and processes one block of whole queries at a time.

Ray Data is not used, because its batches can split queries and fill the object store. Here, each worker has only one
block in the store and loses only this block if it dies.
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
from ..common.key import description
from ..common.presentation import NotebookMixin, ReprMixin
from ..common.progress import work_bar
from ..common.runs import stages_of
from ..common.signals import java_loses_signal, take_back_signals
from ..common.warnings import warn, warn_once
from .blocks import BLOCK_ROWS, blocks_of, loader_of, map_elsewhere, transformed

_PATIENCE = 60.0
"""Time without any worker before a warning, in seconds."""

_RETRIES = 3
"""How often a task is repeated after its worker died; after that, the task is assumed to be the cause."""


@dataclass(eq=False, repr=False)
class RayExecutor(ReprMixin, AbstractContextManager):
    """Ray actors for `ld.distributed`, `ld.rerank_to_disk`, `k_fold_fit` and `fit_seeds`, each with one task at a time.

    The actors start with the first task: on the Ray cluster to which this program is connected, on the cluster of
    `RAY_ADDRESS` or `ray start`, or else on a new one on this machine. They and their models stay until `close`. If a
    worker dies, Ray restarts it and repeats its task.

    Args:
        workers: the maximum number of actors; work begins once the first is ready.
        cpus_per_worker: the number of cores and threads of each worker.
        gpus_per_worker: the number of GPUs of each worker; 0.5 for two workers on one GPU. None uses 1 if Ray has any,
            else 0.
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
        """Return the model on these workers, like `ld.distributed`; several models can share the workers in turn."""
        return Distributed(model, self, block_rows=block_rows, verbose=verbose)

    def map(
        self, function: Callable[[Any, Any], Any], shared: Any, items: Iterable[tuple[Any, Any]]
    ) -> Iterator[tuple[Any, Any]]:
        """Call `function(shared, item)` on the workers for each `(key, item)`; yield `(key, value)` when it is done.

        `shared`, e.g. a model, is sent to each worker once and kept until the next one. An item is requested when a
        worker is free. The call ends with the first error of the function, or if four workers die on the same item
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
                # `place` is in a list, because otherwise Ray would fetch it for each task.
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
                hand_out()  # before yielding, because the caller may take a while
                yield key, value
        finally:
            for actor, _ in under_way.values():
                self._dismiss(actor)

    def can_send(self, value: Any) -> bool:
        """Return whether a value can be sent to workers: Ray also sends functions, but no Java objects."""
        try:
            _ray().cloudpickle.dumps(value)
        except Exception:  # noqa: BLE001 - `__reduce__` can raise anything
            return False
        return True

    def close(self) -> None:
        """End the actors and free their GPUs; the next task starts new ones. Ray itself keeps running."""
        for actor in list(self._actors):
            self._dismiss(actor)

    def __exit__(self, *_: object) -> None:
        self.close()

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_session": None, "_actors": [], "_sent": ("", None)}

    def _connected(self) -> list[Any]:
        """Return the actors, which may not be ready yet, and connect to Ray if necessary."""
        ray = _ray()
        if not ray.is_initialized():
            if java_loses_signal():
                warn(
                    "ray was imported before Java started, so it replaces a signal handler of Java when it connects, "
                    "which can end this program at any time: import ray after Java has started, call ray.init() before "
                    "Java starts, or set RAY_DISABLE_FAILURE_SIGNAL_HANDLER=1 before importing ray",
                    UserWarning,
                )
            # Without an address, Ray finds the cluster of `ray start`; "auto" could join those of other programs.
            os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
            ray.init(include_dashboard=False, log_to_driver=False, logging_level="ERROR")
        context = ray.get_runtime_context()
        session = context.get_node_id(), context.get_job_id()  # one of them changes after `ray.shutdown`
        if session != self._session:
            self._session, self._actors, self._sent = session, [], ("", None)
        resources = ray.cluster_resources()
        gpus = float("GPU" in resources) if self.gpus_per_worker is None else self.gpus_per_worker
        needs = {"CPU": self.cpus_per_worker, "GPU": gpus}
        room = min(int(resources.get(kind, 0) // number) for kind, number in needs.items() if number)
        if not room:
            raise ValueError(f"no worker of {self!r} can start: each needs {needs}, but Ray has {resources}")
        if room < self.workers:
            warn_once(self, f"{self!r} currently has room for only {room} workers", UserWarning)
        remote = ray.remote(num_cpus=self.cpus_per_worker, num_gpus=gpus, max_restarts=-1, max_task_retries=_RETRIES)
        while len(self._actors) < self.workers:
            self._actors.append(remote(_Worker).remote(self.cpus_per_worker))
        return self._actors

    def _warn_of_waiting(self) -> None:
        warn_once(self, f"{self!r} is waiting for room: close other executors to free their workers", UserWarning)

    def _send(self, shared: Any) -> tuple[str, Any]:
        """Store the contents once; return their name and their place in the store."""
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
        """Raise the error with the name of the pipeline stage that cannot be sent, if there is one."""
        pipelines = [each for each in values if isinstance(each, pt.Transformer)] if isinstance(values, tuple) else []
        stages = [stage for each in pipelines for stage in stages_of(each) if not self.can_send(stage)]
        if not stages:
            return
        stage, owner, cure = stages[-1], "the stage", "if it loads texts, use text_loader= of the model instead"
        if not self.can_send(loader_of(stage)):
            owner, cure = "the text_loader of", "add the texts to the frames instead"
        raise TypeError(f"{owner} {stage!r} cannot be sent to workers: {cure} ({error})") from error

    def _dismiss(self, actor: Any) -> None:
        self._actors = [other for other in self._actors if other is not actor]
        if _ray().is_initialized():
            with suppress(ValueError):  # ended with an earlier Ray session
                _ray().kill(actor)


class _Worker:
    """An actor whose tasks share a model."""

    def __init__(self, threads: int) -> None:
        # Must be set before the first model imports torch.
        os.environ["OMP_NUM_THREADS"] = os.environ["MKL_NUM_THREADS"] = str(threads)
        self.name, self.shared = "", None

    def start(self) -> None:
        """Return as soon as the actor is ready."""

    def work(self, name: str, place: list[Any], function: Callable[..., Any], item: Any) -> tuple[Any, ...]:
        """Return the value and the warnings of the function."""
        if name != self.name:
            self.name, self.shared = "", None  # makes room for the next model
            ray = _ray()
            self.shared, self.name = ray.cloudpickle.loads(ray.get(place[0])), name
        with warnings.catch_warnings(record=True) as notices:
            value = function(self.shared, item)
        return value, [(str(notice.message), notice.category) for notice in notices]


class Distributed(NotebookMixin, pt.Transformer, AbstractContextManager):
    """A model whose queries are divided among the workers of an executor; see `ld.distributed`.

    Attributes:
        coverage: how much of the text the last `transform` read, summed over all blocks; None before.
    """

    def __init__(
        self, model: pt.Transformer, executor: RayExecutor, *, block_rows: int = BLOCK_ROWS, verbose: bool = False
    ) -> None:
        self.model, self.executor, self.block_rows, self.verbose = model, executor, block_rows, verbose
        self.coverage: Coverage | None = None

    def transform(self, inp: pd.DataFrame) -> pd.DataFrame:
        """Return the results of the model for all blocks in a new frame.

        If the model keeps all rows, they have the order and index of the input. Otherwise, queries are in the order of
        their first rows.
        """
        empty = self.model.transform(inp.iloc[:0])  # checks columns before anything is sent
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
        """Return the description of the model on a worker, including device and precision."""
        ((_, found),) = map_elsewhere(self.executor, lambda model, _: description(model), self.model, [(None, None)])
        return dict(found)

    @property
    def text_loader(self) -> Any:
        """Return the text loader of the model."""
        return getattr(self.model, "text_loader", None)

    def close(self) -> None:
        """End the workers and free their GPUs; the next `transform` starts new ones."""
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
    """Run a model on the workers of a Ray cluster, or on several GPUs or cores of this machine.

    The result replaces the model: `bm25 >> ld.distributed(ld.PARADE(), workers=8)`. The model is sent to each worker
    once, and again if its weights or arguments change; if its weights are not in memory, each worker loads it. Workers
    process one block of whole queries at a time; the blocks only depend on the input. If a worker dies, Ray restarts it
    and repeats its block. Needs the extra `ray`.

    Scores equal those of `model.transform` up to the seventh digit, because batches contain other windows.

    Args:
        model: a model or a pipeline. With a `text_loader`, workers load the texts themselves. If it cannot be sent,
            like that of a Terrier index, texts are loaded in this process and sent with each block. Leave its `device`
            as None.
        workers: as in `RayExecutor`.
        cpus_per_worker: as in `RayExecutor`.
        gpus_per_worker: as in `RayExecutor`.
        block_rows: queries fill a block until it has this many rows. Without `docno` in the input, each topic is a
            block.
        verbose: show a progress bar; models on workers show none.

    Returns:
        A transformer. `close()`, or the end of a `with` block, ends the workers and frees their GPUs. Its `executor`
        can also be used for `ld.rerank_to_disk`, `k_fold_fit` and `fit_seeds`.
    """
    executor = RayExecutor(workers, cpus_per_worker=cpus_per_worker, gpus_per_worker=gpus_per_worker)
    return executor.distributed(model, block_rows=block_rows, verbose=verbose)


def _in_order(out: pd.DataFrame, inp: pd.DataFrame, rows: np.ndarray) -> pd.DataFrame:
    """Return the output of blocks in the order of the input, if it has the same rows."""
    names = [name for name in ("qid", "docno") if name in inp.columns and name in out.columns]
    if len(out) != len(inp) or any(out[name].tolist() != inp[name].iloc[rows].tolist() for name in names):
        return out.reset_index(drop=True)
    out = out.iloc[np.argsort(rows, kind="stable")]
    return out if out.index.equals(inp.index) else out.reset_index(drop=True)


def _ray() -> Any:
    return import_extra("ray", "ray", "ld.distributed and RayExecutor need Ray")
