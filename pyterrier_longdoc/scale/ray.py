"""Models on the actors of Ray: each holds one, and is handed one block of whole queries after the other.

Actors and not Ray Data, whose batches are rows: a query may be cut in two, and what waits between two steps fills the
object store. Here a worker has one block at a time: that is all that is in the store, and all that is lost with it.
"""

from __future__ import annotations

import os
import pickle
import re
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from hashlib import blake2b
from numbers import Real
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import pyterrier as pt

from ..common.arguments import check_given
from ..common.caches import forget_embeddings
from ..common.coverage import Coverage
from ..common.files import import_extra
from ..common.frames import as_strings
from ..common.notices import Empties, Told, added_up, is_news, tell_of_empties, told_together, warn
from ..common.presentation import Presented
from ..common.progress import counting
from ..experiment.identity import Identities, stages_of

MOST_LOSSES = 3
"""Workers that may die over one task: then it is the task, and not the machines."""

PATIENCE = 60.0
"""Seconds without any worker after which it is said that there is none."""


class WorkerDiedError(RuntimeError):
    """Several workers died one after the other over the same task, or none of them starts."""


class RayExecutor:
    """Ray actors that do one task at a time each: for `ld.distributed`, `ld.rerank_to_disk`, `k_fold_fit`, `fit_seeds`.

    They are started with the first task, on the Ray that is there: the one that this program is connected to, the
    cluster named by `RAY_ADDRESS` or begun here by `ray start`, or else a new one on this machine. They stay, with the
    model that they hold, until `close`. One that dies is replaced, and its task is done again.

    Args:
        workers: most actors; work begins when the first is up.
        cpus_per_worker: cores that Ray counts for each, and the threads that it computes with.
        gpus_per_worker: GPUs for each, which sees no others; 0.5 for two on one. None: 1 where Ray has any, else 0.

    Raises:
        ValueError: for numbers that can never work.
    """

    def __init__(self, workers: int, *, cpus_per_worker: int = 1, gpus_per_worker: float | None = None) -> None:
        check_given(workers=workers, cpus_per_worker=cpus_per_worker)
        gpus = gpus_per_worker
        if gpus is not None and (isinstance(gpus, bool) or not isinstance(gpus, Real) or gpus < 0):
            raise ValueError(f"gpus_per_worker={gpus!r} must be a number of at least 0, or None")
        self.workers, self.cpus_per_worker, self.gpus_per_worker = workers, cpus_per_worker, gpus_per_worker
        self.warned: Told = set()
        self._notices: dict[tuple[type[Warning], str], str] = {}
        self._actors: list[Any] = []
        self._sent: tuple[str, Any] = "", None
        self._job = ""

    def distributed(self, model: pt.Transformer, *, block_rows: int = 100, verbose: bool = False) -> Distributed:
        """As `ld.distributed`, on these workers: several models take turns on them.

        Args:
            model: see there.
            block_rows: see there.
            verbose: see there.
        """
        return Distributed(model, self, block_rows=block_rows, verbose=verbose)

    def map_blocks(
        self, transformer: pt.Transformer, blocks: Iterable[tuple[Any, pd.DataFrame]]
    ) -> Iterator[tuple[Any, pd.DataFrame]]:
        """`(key, transformer.transform(frame))` of each `(key, frame)`; otherwise as `map`.

        Models remember nothing from block to block, so that a block's scores depend on it alone.

        Args:
            transformer: a model or a pipeline.
            blocks: frames of whole queries.
        """
        return self.map(_transform, transformer, blocks)

    def map(
        self, function: Callable[[Any, Any], Any], shared: Any, items: Iterable[tuple[Any, Any]]
    ) -> Iterator[tuple[Any, Any]]:
        """Calls `function(shared, item)` on the workers for each `(key, item)`.

        Args:
            function: of a module that the workers can import, or of this program.
            shared: what all calls need, e.g. a model: sent to each worker once, which keeps it until another comes.
            items: the next one is asked for when a worker is free for it.

        Yields:
            `(key, value)`, as they are done.

        Raises:
            TypeError: if what is shared cannot be pickled.
            ValueError: if Ray has no room for even one worker.
            WorkerDiedError: if three workers died over one item.
            Exception: what the function raises. What is open then is given up, as it is when nobody asks for more.
        """
        self._connect()
        round_ = _Round(self, self._send(shared), function, items)
        try:
            yield from round_.results()
        finally:
            for actor in round_.busy():
                self._dismiss(actor)

    def actors(self) -> list[Any]:
        """All actors, up or not yet; as many as there may be."""
        while len(self._actors) < self.workers:
            self._start()
        return list(self._actors)

    def replace(self, actor: Any) -> Any:
        """A new actor in place of one that has died."""
        self._dismiss(actor)
        return self._start()

    def tell(self, notices: list[tuple[str, type[Warning]]], empties: Empties) -> None:
        """Warns here of what a worker was warned of, once for all workers, and of what it would have told together."""
        tell_of_empties(empties)
        for message, category in notices:
            # Other blocks have other figures.
            self._notices.setdefault((category, re.sub(r"[<>\d.,%]+", "", message)), message)
        # Of earlier ones too, as a worker warns once, and perhaps nobody was to be warned then.
        for (category, alike), message in self._notices.items():
            if is_news(self.warned, category, alike):
                warn(message, category)

    def tell_of_waiting(self) -> None:
        """Warns that Ray has had no room for any of the actors for a while."""
        if is_news(self.warned, "waiting"):
            free = {kind: _ray().available_resources().get(kind, 0.0) for kind in self._resources()}
            warn(
                f"{self!r} waits for room: each worker needs {self._resources()}, and free are {free}; close() of "
                f"others gives theirs back",
                UserWarning,
            )

    def close(self) -> None:
        """Ends the actors, which frees their GPUs; the next task starts new ones. Ray itself goes on."""
        for actor in list(self._actors):
            self._dismiss(actor)
        self._sent = "", None

    def __enter__(self) -> RayExecutor:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_actors": [], "_sent": ("", None), "_job": ""}

    def __repr__(self) -> str:
        gpus = "" if self.gpus_per_worker is None else f", gpus_per_worker={self.gpus_per_worker}"
        cpus = "" if self.cpus_per_worker == 1 else f", cpus_per_worker={self.cpus_per_worker}"
        return f"{type(self).__name__}({self.workers}{cpus}{gpus})"

    def _connect(self) -> None:
        ray = _ray()
        if not ray.is_initialized():
            # Without an address it finds what `ray start` has begun; "auto" would also join other programs' own.
            os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
            ray.init(include_dashboard=False, log_to_driver=False, logging_level="ERROR")
        job = ray.get_runtime_context().get_job_id()
        if job != self._job:  # what belongs to an earlier one has ended with it
            self._job, self._actors, self._sent = job, [], ("", None)
        there = ray.cluster_resources()
        needed = {kind: number for kind, number in self._resources().items() if number}
        room = min(int(there.get(kind, 0) // number) for kind, number in needed.items())
        has = ", ".join(f"{there.get(kind, 0):g} {kind}s" for kind in needed)
        if not room:
            each = " and ".join(f"{number:g} {kind}s" for kind, number in needed.items())
            raise ValueError(f"no worker of {self!r} has room, which needs {each}: Ray has {has}")
        if room < self.workers and is_news(self.warned, "room", room):
            warn(f"{self!r} has room for {room} workers at present: Ray has {has}", UserWarning)

    def _resources(self) -> dict[str, float]:
        """What one worker needs, by Ray's names."""
        gpus = self.gpus_per_worker
        if gpus is None:
            gpus = float(bool(_ray().cluster_resources().get("GPU")))
        return {"CPU": self.cpus_per_worker, "GPU": gpus}

    def _send(self, shared: Any) -> tuple[str, Any]:
        """A name for the contents, and where the workers find them; as before if they are the same."""
        ray = _ray()
        try:
            written = ray.cloudpickle.dumps(shared)
        except (TypeError, AttributeError, pickle.PicklingError) as error:
            raise TypeError(
                f"{shared!r} cannot be sent to workers: {error}. What cannot be pickled (an open file, a connection, a "
                f"lock) has to be made on the worker, when it is first needed"
            ) from error
        name = blake2b(written, digest_size=16).hexdigest()
        if name != self._sent[0]:
            self._sent = name, ray.put(written)
        return self._sent

    def _start(self) -> Any:
        needed = self._resources()
        actor_class = _ray().remote(num_cpus=needed["CPU"], num_gpus=needed["GPU"])(_Worker)
        self._actors.append(actor_class.remote(self.cpus_per_worker))
        return self._actors[-1]

    def _dismiss(self, actor: Any) -> None:
        self._actors = [other for other in self._actors if other is not actor]
        if _ray().is_initialized():
            _ray().kill(actor)


class _Task(NamedTuple):
    """Something to do, and how many workers have died over it."""

    key: Any
    item: Any
    losses: int = 0


_Notices = tuple[list[tuple[str, type[Warning]]], Empties]
"""What a worker was warned of, and what it has added up."""


class _Worker:
    """In an actor: what its tasks share."""

    def __init__(self, threads: int) -> None:
        # For torch, which is imported when the first model comes.
        os.environ["OMP_NUM_THREADS"] = os.environ["MKL_NUM_THREADS"] = str(threads)
        self.name, self.shared = "", None

    def start(self) -> tuple[None, _Notices]:
        """Is done as soon as the actor is up."""
        return None, ([], {})

    def work(self, name: str, place: list[Any], function: Callable[..., Any], item: Any) -> tuple[Any, _Notices]:
        """The function's value, what was warned of, and what is to be told together with other workers' calls."""
        if name != self.name:
            self.name, self.shared = "", None  # makes room for the next model
            ray = _ray()
            self.shared, self.name = ray.cloudpickle.loads(ray.get(place[0])), name
        with warnings.catch_warnings(record=True) as caught, added_up() as empties:
            value = function(self.shared, item)
        return value, ([(str(each.message), each.category) for each in caught], empties)


class _Round:
    """One `map`: who does what."""

    def __init__(
        self,
        executor: RayExecutor,
        sent: tuple[str, Any],
        function: Callable[[Any, Any], Any],
        items: Iterable[tuple[Any, Any]],
    ) -> None:
        self.executor, self.function, self.ray = executor, function, _ray()
        errors = self.ray.exceptions  # of the process, by the memory monitor, and of a result with its machine
        self.losses = errors.RayActorError, errors.OutOfMemoryError, errors.ObjectLostError
        self.name, self.place = sent[0], [sent[1]]  # in a list, a reference is not fetched anew for each task
        self.items, self.exhausted = iter(items), False
        self.idle: list[Any] = []
        self.again: deque[_Task] = deque()
        self.open: dict[Any, tuple[Any, _Task | None]] = {}  # by what is waited for; None is the actor's own start
        self.failed_starts = 0

    def results(self) -> Iterator[tuple[Any, Any]]:
        for actor in self.executor.actors():
            self.open[actor.start.remote()] = actor, None
        while self.hand_out():
            done = self.wait()
            actor, task = self.open.pop(done)
            try:
                value, notices = self.ray.get(done)
            except self.ray.exceptions.RayTaskError as error:
                raise error.cause from error
            except self.losses as error:
                self.lose(actor, task, error)
                continue
            self.idle.append(actor)
            self.executor.tell(*notices)
            if task is None:
                self.failed_starts = 0
            else:
                self.hand_out()  # whoever takes the result may need a while for it
                yield task.key, value

    def wait(self) -> Any:
        """The first that is done of what is open."""
        while True:
            done, _ = self.ray.wait(list(self.open), timeout=PATIENCE)
            if done:
                return done[0]
            if all(task is None for _, task in self.open.values()):
                self.executor.tell_of_waiting()

    def hand_out(self) -> bool:
        """Gives a task to each worker that has none; tells whether any is left or open."""
        while self.idle and (task := self.next_task()) is not None:
            actor = self.idle.pop()
            self.open[actor.work.remote(self.name, self.place, self.function, task.item)] = actor, task
        return not self.exhausted or bool(self.again) or any(task is not None for _, task in self.open.values())

    def next_task(self) -> _Task | None:
        if self.again:
            return self.again.popleft()
        for key, item in self.items:
            return _Task(key, item)
        self.exhausted = True
        return None

    def lose(self, actor: Any, task: _Task | None, error: Exception) -> None:
        """A worker has died: another takes its place, and somebody its task."""
        if task is None:
            self.failed_starts += 1
        else:
            self.again.append(task._replace(losses=task.losses + 1))
        if max(self.failed_starts, 0 if task is None else task.losses + 1) >= MOST_LOSSES:
            what = "before they had started" if task is None else f"over {task.key!r}"
            raise WorkerDiedError(f"{MOST_LOSSES} workers died {what}, the last one so: {error}") from error
        new = self.executor.replace(actor)
        self.open[new.start.remote()] = new, None

    def busy(self) -> list[Any]:
        """Actors with work that nobody waits for any more."""
        return [actor for actor, task in self.open.values() if task is not None]


class Distributed(Presented, pt.Transformer):
    """A model whose queries are shared out among workers; `ld.distributed` makes it.

    Args:
        model: a model or a pipeline.
        executor: its workers.
        block_rows: rows of a block.
        verbose: show a bar.

    Attributes:
        coverage: how much of the text the last `transform` read, as the model's own would be: the sum over all blocks;
            only queries of the same words with different qids count in each of theirs. None before.
    """

    def __init__(
        self, model: pt.Transformer, executor: RayExecutor, *, block_rows: int = 100, verbose: bool = False
    ) -> None:
        check_given(block_rows=block_rows)
        if not isinstance(model, pt.Transformer):
            raise TypeError(f"{model!r} is neither a model nor a pipeline")
        self.model, self.executor, self.block_rows, self.verbose = model, executor, block_rows, verbose
        self.coverage: Coverage | None = None

    def transform(self, inp: pd.DataFrame) -> pd.DataFrame:
        """What the model makes of each block of queries, put together.

        Args:
            inp: what the model takes, with `qid`.

        Returns:
            A new frame: of a model that keeps its rows, in the order and with the index of the input; else query by
            query, in the order of their first rows.

        Raises:
            Exception: what the model raises, and what `RayExecutor.map` does.
        """
        nothing = self.model.transform(inp.iloc[:0])  # columns that are missing are told here, before anything is sent
        if not len(inp):
            return nothing
        pt.validate.columns(inp, includes=["qid"], context=self)
        rows = blocks_of(inp, self.block_rows)
        blocks = ((place, inp.iloc[own]) for place, own in enumerate(rows))
        parts: dict[int, pd.DataFrame] = {}
        coverages = []
        with counting(repr(self), "row", len(inp), shown=self.verbose) as advance, told_together():
            for place, (part, coverage) in self.executor.map(_transform_counted, self.model, blocks):
                parts[place] = part
                coverages += [] if coverage is None else [coverage]
                advance(len(rows[place]))
        self.coverage = Coverage.total(coverages) if coverages else None
        return _in_order(pd.concat([parts[place] for place in range(len(rows))]), inp, np.concatenate(rows))

    def map_blocks(
        self, transformer: pt.Transformer, blocks: Iterable[tuple[Any, pd.DataFrame]]
    ) -> Iterator[tuple[Any, pd.DataFrame]]:
        """`RayExecutor.map_blocks` of its workers: this object, too, may be an `executor=`."""
        return self.executor.map_blocks(transformer, blocks)

    def map(
        self, function: Callable[[Any, Any], Any], shared: Any, items: Iterable[tuple[Any, Any]]
    ) -> Iterator[tuple[Any, Any]]:
        """`RayExecutor.map` of its workers."""
        return self.executor.map(function, shared, items)

    def describe(self) -> dict[str, Any]:
        """Who the model is, device and precision included, as a worker sees it: as the model tells it itself.

        So a kept run is the same whether it was made here or there.

        Raises:
            ValueError: if something of it cannot be told.
        """
        ((_, (told, unchecked)),) = self.executor.map(_identity, self.model, [(None, None)])
        if unchecked:
            raise ValueError(f"of {self.model!r} it cannot be told whether these stay the same: {', '.join(unchecked)}")
        return dict(told)

    @property
    def text_loader(self) -> Any:
        """The model's."""
        return getattr(self.model, "text_loader", None)

    def close(self) -> None:
        """Ends the workers, which frees their GPUs; the next `transform` starts new ones."""
        self.executor.close()

    def __enter__(self) -> Distributed:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def subtransformers(self) -> dict[str, Any]:
        """The model."""
        return {"model": self.model}

    def __repr__(self) -> str:
        return f"distributed({self.model!r}, {self.executor!r})"


def distributed(
    model: pt.Transformer,
    *,
    workers: int,
    cpus_per_worker: int = 1,
    gpus_per_worker: float | None = None,
    block_rows: int = 100,
    verbose: bool = False,
) -> Distributed:
    """The same model on the workers of a Ray cluster, or on several GPUs or cores of this machine.

    It stands where the model stands: `bm25 >> ld.distributed(ld.PARADE(), workers=8)`. The model is sent to each worker
    once, and again after its weights or arguments have changed; one whose weights are not in memory here is loaded by
    each worker. Queries are handed out in blocks that depend on the input alone, one at a time to each worker, and no
    query is divided. A worker that dies is replaced, and its block is scored anew. Needs the extra `ray`.

    Scores are those of `model.transform(block)`, bit for bit on like machines with as many threads, in fp32 on CPUs,
    whatever the number of workers. `model.transform` of the whole input may differ from them in the seventh digit, as
    windows then share passes with other ones; and so may models that remember what they have encoded (`LateIR`,
    `MORESPlus`, `BiEncoder`), as what a worker remembers depends on its earlier blocks.

    Args:
        model: a model or a pipeline. With a `text_loader`, workers load the texts themselves.
        workers: most workers; work begins when the first is up.
        cpus_per_worker: cores that Ray counts for each, and the threads that it computes with.
        gpus_per_worker: GPUs for each, which sees no others; 0.5 for two on one. None: 1 where Ray has any, else 0.
            Leave the model's `device` None.
        block_rows: queries are put together until they have so many rows; one with more is a block of its own, and so
            is each topic of an input without `docno`.
        verbose: show a bar; models on workers show none.

    Returns:
        A transformer; `close()`, or the end of a `with` block, ends the workers and frees their GPUs. It can also be
        the `executor=` of `ld.rerank_to_disk`, `k_fold_fit` and `fit_seeds`.

    Raises:
        ValueError: for numbers that can never work.
        TypeError: if that is no transformer.
    """
    executor = RayExecutor(workers, cpus_per_worker=cpus_per_worker, gpus_per_worker=gpus_per_worker)
    return executor.distributed(model, block_rows=block_rows, verbose=verbose)


def blocks_of(frame: pd.DataFrame, block_rows: int) -> list[np.ndarray]:
    """The rows, by place, of blocks of whole queries, in the order of the queries' first rows.

    Args:
        frame: with `qid`; rows of a query need not stand together.
        block_rows: of a block, at least, the last one left out; without `docno` each query is a block.
    """
    least = block_rows if "docno" in frame.columns else 1
    numbers, _ = pd.factorize(as_strings(frame["qid"]), use_na_sentinel=False)
    order, ends = np.argsort(numbers, kind="stable"), np.cumsum(np.bincount(numbers))
    blocks, start = [], 0
    for end in ends:
        if end - start >= least or end == len(order):
            blocks.append(order[start:end])
            start = end
    return blocks


def _in_order(out: pd.DataFrame, inp: pd.DataFrame, rows: np.ndarray) -> pd.DataFrame:
    """The output of blocks in the order of the input, if it has the input's rows."""
    names = [name for name in ("qid", "docno") if name in inp.columns and name in out.columns]
    if len(out) != len(inp) or any(out[name].tolist() != inp[name].iloc[rows].tolist() for name in names):
        return out.reset_index(drop=True)
    out = out.iloc[np.argsort(rows, kind="stable")]
    return out if out.index.equals(inp.index) else out.reset_index(drop=True)


# On the workers.


def _transform(transformer: pt.Transformer, frame: pd.DataFrame) -> pd.DataFrame:
    forget_embeddings()  # of other blocks, or the last digits would depend on which these were
    return transformer.transform(frame)


def _transform_counted(transformer: pt.Transformer, frame: pd.DataFrame) -> tuple[pd.DataFrame, Coverage | None]:
    """With what the last model of a pipeline has read."""
    out = transformer.transform(frame)
    coverages = [getattr(stage, "coverage", None) for stage in stages_of(transformer)]
    return out, next((each for each in reversed(coverages) if isinstance(each, Coverage)), None)


def _identity(transformer: pt.Transformer, _: None) -> tuple[Any, list[str]]:
    told, unchecked = Identities().of(transformer)
    return told, unchecked


def _ray() -> Any:
    return import_extra("ray", "ray", "ld.distributed and RayExecutor need Ray")
