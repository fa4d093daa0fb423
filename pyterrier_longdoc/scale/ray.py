"""Models on the actors of Ray: each holds one, and is handed one block of whole queries after the other.

Actors and not Ray Data, whose batches are rows: a query may be cut in two, and what waits between two steps fills the
object store. Here a worker has one block at a time: that is all that is in the store, and all that is lost with it.
"""

from __future__ import annotations

import os
import re
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from dataclasses import KW_ONLY, dataclass
from hashlib import blake2b
from typing import Any

import numpy as np
import pandas as pd
import pyterrier as pt

from ..common.arguments import argument, validate
from ..common.coverage import Coverage
from ..common.files import import_extra
from ..common.presentation import Presented, ShowsChanges
from ..common.progress import counting
from ..common.warnings import Empties, SeenWarnings, added_up, first_time, tell_of_empties, told_together, warn
from ..experiment.identity import Identity, identify
from .blocks import BLOCK_ROWS, blocks_of, transformed

_PATIENCE = 60.0
"""Seconds without any worker after which it is said that there is none."""

_RETRIES = 3
"""So often a task is done again whose worker has died: then it is the task, and not the machines."""


@dataclass(eq=False, repr=False)
class RayExecutor(ShowsChanges, AbstractContextManager):
    """Ray actors that do one task at a time each: for `ld.distributed`, `ld.rerank_to_disk`, `k_fold_fit`, `fit_seeds`.

    They are started with the first task, on the Ray that is there: the one that this program is connected to, the
    cluster named by `RAY_ADDRESS` or begun here by `ray start`, or else a new one on this machine. They stay, with the
    model that they hold, until `close`. Ray starts one that dies anew, and does its task again.

    Args:
        workers: most actors; work begins when the first is up.
        cpus_per_worker: cores that Ray counts for each, and the threads that it computes with.
        gpus_per_worker: GPUs for each, which sees no others; 0.5 for two on one. None: 1 where Ray has any, else 0.
    """

    workers: int = argument(at_least=1)
    _: KW_ONLY
    cpus_per_worker: int = argument(1, at_least=1)
    gpus_per_worker: float | None = argument(None, at_least=0)

    def __post_init__(self) -> None:
        validate(self)
        self._actors: list[Any] = []
        self._sent: tuple[str, Any] = "", None
        self._warned: SeenWarnings = set()

    def distributed(self, model: pt.Transformer, *, block_rows: int = BLOCK_ROWS, verbose: bool = False) -> Distributed:
        """Return the model on these workers, as `ld.distributed` does; several models take turns on them."""
        return Distributed(model, self, block_rows=block_rows, verbose=verbose)

    def map(
        self, function: Callable[[Any, Any], Any], shared: Any, items: Iterable[tuple[Any, Any]]
    ) -> Iterator[tuple[Any, Any]]:
        """Call `function(shared, item)` on the workers for each `(key, item)`; yield `(key, value)`, as they are done.

        What is shared, e.g. a model, is sent to each worker once, which keeps it until another comes. The next item is
        asked for when a worker is free for it. What the function raises ends the call, as do four workers that died
        over one item (`ray.exceptions.RayActorError`).
        """
        actors, (name, place), tasks = self._connected(), self._send(shared), iter(items)
        ray, running = _ray(), {}
        free: list[Any] = []
        starting = {actor.start.remote(): actor for actor in actors}

        def hand_out() -> None:
            while free and (task := next(tasks, None)) is not None:
                actor, (key, item) = free.pop(), task
                # In a list, what is shared is not fetched anew for each task.
                running[actor.work.remote(name, [place], function, item)] = actor, key

        try:
            while running or not free:
                done, _ = ray.wait([*running, *starting], timeout=None if running else _PATIENCE)
                if not done:
                    self._tell_of_waiting()
                    continue
                if done[0] in starting:
                    free.append(starting.pop(done[0]))
                    hand_out()
                    continue
                actor, key = running.pop(done[0])
                try:
                    value = self._told(ray.get(done[0]))
                except ray.exceptions.RayTaskError as error:
                    raise error.cause from error
                free.append(actor)
                hand_out()  # whoever takes the result may need a while for it
                yield key, value
        finally:
            for actor, _ in running.values():
                self._dismiss(actor)

    def close(self) -> None:
        """End the actors, which frees their GPUs; the next task starts new ones. Ray itself goes on."""
        for actor in list(self._actors):
            self._dismiss(actor)

    def __exit__(self, *_: object) -> None:
        self.close()

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_actors": [], "_sent": ("", None)}

    def _connected(self) -> list[Any]:
        """Return the actors, up or not yet, of the Ray that this program is connected to."""
        ray = _ray()
        if not ray.is_initialized():
            # Without an address it finds what `ray start` has begun; "auto" would also join other programs' own.
            os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
            ray.init(include_dashboard=False, log_to_driver=False, logging_level="ERROR")
            self._actors, self._sent = [], ("", None)
        there = ray.cluster_resources()
        gpus = float("GPU" in there) if self.gpus_per_worker is None else self.gpus_per_worker
        each = {"CPU": self.cpus_per_worker, "GPU": gpus}
        room = min(int(there.get(kind, 0) // number) for kind, number in each.items() if number)
        if not room:
            raise ValueError(f"no worker of {self!r} has room: each needs {each}, and Ray has {there}")
        if room < self.workers and first_time(self._warned, "room"):
            warn(f"{self!r} has room for {room} workers at present: Ray has {there}", UserWarning)
        hired = ray.remote(num_cpus=self.cpus_per_worker, num_gpus=gpus, max_restarts=-1, max_task_retries=_RETRIES)
        while len(self._actors) < self.workers:
            self._actors.append(hired(_Worker).remote(self.cpus_per_worker))
        return self._actors

    def _tell_of_waiting(self) -> None:
        if first_time(self._warned, "waiting"):
            free = _ray().available_resources()
            warn(f"{self!r} waits for room: Ray has {free} free; close() of others gives theirs back", UserWarning)

    def _send(self, shared: Any) -> tuple[str, Any]:
        """Return a name for the contents, and where the workers find them; as before if they are the same."""
        written = _ray().cloudpickle.dumps(shared)
        name = blake2b(written, digest_size=16).hexdigest()
        if name != self._sent[0]:
            self._sent = name, _ray().put(written)
        return self._sent

    def _told(self, answer: tuple[Any, list[tuple[str, type[Warning]]], Empties]) -> Any:
        """Return a worker's value; warns here of what it was warned of, once for all workers."""
        value, caught, empties = answer
        tell_of_empties(empties)
        for message, category in caught:
            # Other blocks have other figures.
            if first_time(self._warned, category, re.sub(r"[<>\d.,%]+", "", message)):
                warn(message, category)
        return value

    def _dismiss(self, actor: Any) -> None:
        self._actors = [other for other in self._actors if other is not actor]
        if _ray().is_initialized():
            _ray().kill(actor)


class _Worker:
    """What the tasks of an actor share."""

    def __init__(self, threads: int) -> None:
        # For torch, which is imported when the first model comes.
        os.environ["OMP_NUM_THREADS"] = os.environ["MKL_NUM_THREADS"] = str(threads)
        self.name, self.shared = "", None

    def start(self) -> None:
        """Return as soon as the actor is up."""

    def work(self, name: str, place: list[Any], function: Callable[..., Any], item: Any) -> tuple[Any, ...]:
        """Return the function's value, what was warned of, and rows without text."""
        if name != self.name:
            self.name, self.shared = "", None  # makes room for the next model
            ray = _ray()
            self.shared, self.name = ray.cloudpickle.loads(ray.get(place[0])), name
        with warnings.catch_warnings(record=True) as caught, added_up() as empties:
            value = function(self.shared, item)
        return value, [(str(each.message), each.category) for each in caught], empties


class Distributed(Presented, pt.Transformer, AbstractContextManager):
    """A model whose queries are shared out among the workers of an executor; `ld.distributed` makes it.

    Attributes:
        coverage: how much of the text the last `transform` read, the sum over all blocks; None before.
    """

    def __init__(
        self, model: pt.Transformer, executor: RayExecutor, *, block_rows: int = BLOCK_ROWS, verbose: bool = False
    ) -> None:
        self.model, self.executor, self.block_rows, self.verbose = model, executor, block_rows, verbose
        self.coverage: Coverage | None = None

    def transform(self, inp: pd.DataFrame) -> pd.DataFrame:
        """Return what the model makes of each block of queries, put together in a new frame.

        Of a model that keeps its rows, these have the order and index of the input; else queries follow each other in
        the order of their first rows.
        """
        nothing = self.model.transform(inp.iloc[:0])  # columns that are missing are told here, before anything is sent
        if not len(inp):
            return nothing
        pt.validate.columns(inp, includes=["qid"], context=self)
        rows = blocks_of(inp["qid"], self.block_rows if "docno" in inp.columns else 1)
        blocks = ((place, inp.iloc[own]) for place, own in enumerate(rows))
        parts: dict[int, pd.DataFrame] = {}
        coverages = []
        with counting(repr(self), "row", len(inp), shown=self.verbose) as advance, told_together():
            for place, (part, coverage) in self.executor.map(transformed, self.model, blocks):
                parts[place] = part
                coverages += [] if coverage is None else [coverage]
                advance(len(rows[place]))
        self.coverage = Coverage.total(coverages) if coverages else None
        return _in_order(pd.concat([parts[place] for place in range(len(rows))]), inp, np.concatenate(rows))

    def describe(self) -> dict[str, Any]:
        """Return who the model is as a worker sees it, device and precision included."""
        ((_, (told, unchecked, functions)),) = self.executor.map(_identity, self.model, [(None, None)])
        if unchecked or functions:
            unknown = ", ".join([*unchecked, *functions])
            raise ValueError(f"of {self.model!r} it cannot be told whether these stay the same: {unknown}")
        return dict(told)

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

    It stands where the model stands: `bm25 >> ld.distributed(ld.PARADE(), workers=8)`. The model is sent to each worker
    once, and again after its weights or arguments have changed; one whose weights are not in memory here is loaded by
    each worker. Queries are handed out in blocks that depend on the input alone, one at a time to each worker, and no
    query is divided. A worker that dies is started anew, and so is its block. Needs the extra `ray`.

    Scores are those of `model.transform` but for the seventh digit, as windows share passes with other ones.

    Args:
        model: a model or a pipeline. With a `text_loader`, workers load the texts themselves. Leave its `device` None.
        workers: as of `RayExecutor`.
        cpus_per_worker: as of `RayExecutor`.
        gpus_per_worker: as of `RayExecutor`.
        block_rows: queries are put together until they have so many rows; one with more is a block of its own, and so
            is each topic of an input without `docno`.
        verbose: show a bar; models on workers show none.

    Returns:
        A transformer; `close()`, or the end of a `with` block, ends the workers and frees their GPUs. Its
        `executor` can also be that of `ld.rerank_to_disk`, `k_fold_fit` and `fit_seeds`.
    """
    executor = RayExecutor(workers, cpus_per_worker=cpus_per_worker, gpus_per_worker=gpus_per_worker)
    return executor.distributed(model, block_rows=block_rows, verbose=verbose)


def _in_order(out: pd.DataFrame, inp: pd.DataFrame, rows: np.ndarray) -> pd.DataFrame:
    """Return the output of blocks in the order of the input, if it has the input's rows."""
    names = [name for name in ("qid", "docno") if name in inp.columns and name in out.columns]
    if len(out) != len(inp) or any(out[name].tolist() != inp[name].iloc[rows].tolist() for name in names):
        return out.reset_index(drop=True)
    out = out.iloc[np.argsort(rows, kind="stable")]
    return out if out.index.equals(inp.index) else out.reset_index(drop=True)


def _identity(model: pt.Transformer, _: None) -> Identity:
    return identify(model)


def _ray() -> Any:
    return import_extra("ray", "ray", "ld.distributed and RayExecutor need Ray")
