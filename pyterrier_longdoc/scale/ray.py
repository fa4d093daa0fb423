"""Models on the workers of Ray Data: each row of its dataset is a block of whole queries."""

from __future__ import annotations

import copy
import faulthandler
import os
import pickle
import sys
import warnings
from collections.abc import Iterable, Iterator
from typing import Any

import pandas as pd
import pyterrier as pt

from ..common.arguments import check_arguments, check_type
from ..common.coverage import Coverage
from ..common.files import import_extra
from ..common.frames import field_names, with_text
from ..common.presentation import NotebookMixin
from ..common.progress import work_bar
from ..common.warnings import warn_once
from .blocks import blocks_of, transformed

_SWITCH = "RAY_DISABLE_FAILURE_SIGNAL_HANDLER"
"""The environment variable, read when `ray` is imported, that prevents Ray's handler of SIGSEGV."""


class Distributed(NotebookMixin, pt.Transformer):
    """A model whose queries are divided among the workers of Ray; see `ld.distributed`.

    Args:
        model: a transformer, of which every worker gets a copy.
        workers: the number of workers.
        cpus_per_worker: the number of CPUs that Ray reserves for each.
        gpus_per_worker: the number of GPUs of each, which can be a part of one, such as 0.5; None for one if the
            cluster has GPUs.
        verbose: show a progress bar.

    Attributes:
        coverage: how much of the text the last `transform` read, summed over all blocks; None before.
    """

    def __init__(
        self, model: pt.Transformer, workers: int, cpus_per_worker: int, gpus_per_worker: float | None, verbose: bool
    ) -> None:
        check_type(pt.Transformer, "a transformer, e.g. ld.MaxP(...)", model=model)
        check_arguments("int", "distributed", workers=workers, cpus_per_worker=cpus_per_worker, at_least=1)
        check_arguments("float | None", "distributed", gpus_per_worker=gpus_per_worker, at_least=0)
        self.model, self.workers, self.verbose = model, workers, verbose
        self.cpus_per_worker, self.gpus_per_worker = cpus_per_worker, gpus_per_worker
        self.coverage: Coverage | None = None
        self.warned: set[str] = set()

    def transform(self, inp: pd.DataFrame) -> pd.DataFrame:
        """Return the results in a new frame, with queries in the order of their first rows."""
        empty = self.model.transform(inp.iloc[:0])  # checks columns before anything is sent
        if not len(inp):
            return empty
        pt.validate.columns(inp, includes=["qid"], context=self)
        rows = blocks_of(inp)
        parts, coverages = {}, []
        with work_bar(repr(self), "row", len(inp), shown=self.verbose) as bar:
            for number, part, coverage in self.map_blocks((i, inp.iloc[places]) for i, places in enumerate(rows)):
                parts[number] = part
                coverages += [] if coverage is None else [coverage]
                bar.update(len(rows[number]))
        self.coverage = Coverage.total(coverages) if coverages else None
        return pd.concat([parts[number] for number in range(len(rows))], ignore_index=True)

    def map_blocks(
        self, frames: Iterable[tuple[int, pd.DataFrame]]
    ) -> Iterator[tuple[int, pd.DataFrame, Coverage | None]]:
        """Yield the number, results and coverage of each block as soon as it is done."""
        ray, added = _connected(), []
        model: Any = self.model
        loader = vars(model).get("text_loader")
        if loader is not None:
            model, added = copy.copy(model), field_names(model.text_field)
            model.text_loader = None

        def sent() -> Iterator[Any]:
            for number, frame in frames:
                absent = [name for name in added if name not in frame.columns]
                if absent:
                    texts = with_text(frame, added, loader)
                    frame = frame.assign(**{name: texts[name].array for name in absent})
                yield ray.put(pd.DataFrame({"block": [pickle.dumps((number, frame, absent))]}))

        gpus = float("GPU" in ray.cluster_resources()) if self.gpus_per_worker is None else self.gpus_per_worker
        for name, needed in (("CPU", self.cpus_per_worker), ("GPU", gpus)):
            if needed > (available := ray.cluster_resources().get(name, 0)):  # Ray would wait for ever
                cure = "lower cpus_per_worker or gpus_per_worker"
                raise ValueError(f"a worker needs {needed:g} {name}s, but Ray has {available:g}: {cure}")
        results = ray.data.from_pandas_refs(list(sent())).map(
            _Worker,
            fn_constructor_args=(model,),
            compute=ray.data.ActorPoolStrategy(size=self.workers),
            num_cpus=self.cpus_per_worker,
            num_gpus=gpus,
        )
        results.context.enable_progress_bars = False
        for row in results.iter_rows():
            number, result, coverage, notices = pickle.loads(row["block"])
            for message, category in notices:
                warn_once(self, message, category)
            yield number, result, coverage

    def subtransformers(self) -> dict[str, Any]:
        """Return the model."""
        return {"model": self.model}

    def __repr__(self) -> str:
        return f"distributed({self.model!r}, workers={self.workers})"


class _Worker:
    """Transforms blocks in an actor of Ray Data; results are pickled, because Arrow does not keep every column."""

    def __init__(self, model: pt.Transformer) -> None:
        self.model = model

    def __call__(self, row: dict[str, Any]) -> dict[str, Any]:
        number, frame, added = pickle.loads(row["block"])
        with warnings.catch_warnings(record=True) as caught:
            result, coverage = transformed(self.model, frame)
        result = result.drop(columns=added, errors="ignore")
        notices = [(str(notice.message), notice.category) for notice in caught]
        return {"block": pickle.dumps((number, result, coverage, notices))}


def distributed(
    model: pt.Transformer,
    *,
    workers: int,
    cpus_per_worker: int = 1,
    gpus_per_worker: float | None = None,
    verbose: bool = False,
) -> Distributed:
    """Run a model on the workers of a Ray cluster, or on several GPUs or cores of this machine, by Ray Data.

    The result replaces the model: `bm25 >> ld.distributed(ld.PARADE(), workers=8)`, also in `ld.rerank_to_disk`. Each
    `transform` starts the workers, sends them the model once, and ends them. Workers process one block of whole queries
    (100 rows or more) at a time. If a worker dies, Ray starts another one and repeats its block. Needs the extra `ray`.

    Scores equal those of `model.transform` up to the seventh digit, because batches contain other windows.

    Args:
        model: a model or a pipeline that can be pickled. The `text_loader` of a model stays in this process: the texts
            are put into the rows before these are sent. Loaders inside a pipeline are sent with it; put those of a
            Terrier index, which cannot be sent, before it. Leave the `device` of models as None.
        workers: the number of workers.
        cpus_per_worker: the number of cores and threads of each worker.
        gpus_per_worker: the number of GPUs of each worker; 0.5 for two workers on one GPU. None uses 1 if Ray has any,
            else 0.
        verbose: show a progress bar; models on workers show none.
    """
    return Distributed(model, workers, cpus_per_worker, gpus_per_worker, verbose)


def _connected() -> Any:
    """Return Ray, connected to the cluster of `RAY_ADDRESS` or `ray start`, or to a new one on this machine.

    Java uses SIGSEGV internally. Ray replaces its handler by its own and by that of `faulthandler`; the program would
    crash.
    """
    if (
        "ray" in sys.modules
        and _SWITCH not in os.environ
        and pt.java.started()
        and not sys.modules["ray"].is_initialized()
    ):
        raise RuntimeError(
            "ray was imported before Java started and would crash it: call ray.init() before Java starts, or import "
            "ray after it"
        )
    os.environ.setdefault(_SWITCH, "1")
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    import_extra("ray.data", "ray", "ld.distributed needs Ray Data")
    ray = sys.modules["ray"]
    if not ray.is_initialized():
        enabled = faulthandler.is_enabled()
        ray.init(include_dashboard=False)
        if not enabled:
            faulthandler.disable()  # restores the handler of Java
    return ray
