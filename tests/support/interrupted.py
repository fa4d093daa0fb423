"""Loops that get a signal under Java: `python tests/support/interrupted.py FOLDER LOOP:SIGNAL ...`.

Before each of them the signals are as Java's start has left them. Each that goes on to its end, or raises, gives a line
of JSON: `[LOOP:SIGNAL, what was raised, its message, whether the weights are finite, trained ones]`.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pyterrier as pt
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
import pyterrier_longdoc as ld
from tests.support import tiny
from tests.support.toy import toy_task

RUN, QRELS = toy_task(0, queries=4)
SIZES = {"window_size": 8, "stride": 4, "max_query_len": 4, "batch_size": 2, "device": "cpu"}
SIGNALS = (signal.SIGINT, signal.SIGTERM)
signal.signal(signal.SIGINT, signal.default_int_handler)  # which is missing in a shell's background jobs


class StoppedError(Exception):
    """What a user's own handler of SIGTERM raises."""


def stop(number: int, _: object) -> None:
    raise StoppedError("the user's own handler")


def handlers() -> dict[int, ctypes.Array]:
    """The process's handlers, which are those of Java once it has started."""
    actions = {number: ctypes.create_string_buffer(512) for number in SIGNALS}
    for number, action in actions.items():
        ctypes.CDLL(None).sigaction(int(number), None, action)
    return actions


def give(actions: dict[int, ctypes.Array]) -> None:
    for number, action in actions.items():
        ctypes.CDLL(None).sigaction(int(number), action, None)


def model_that_gets(number: int, at: int) -> ld.MaxP:
    """A model whose pass of that number comes with the signal; an answer that is not Python's has ten seconds."""
    recipe = ld.TrainingArgs(queries_per_step=1, epochs=3, schedule="constant")
    model = ld.MaxP(tiny.encoder(), training=recipe, **SIZES)
    passes = []

    def hook(*_: object) -> None:
        passes.append(None)
        if len(passes) == at:
            os.kill(os.getpid(), number)
            time.sleep(10)

    model.model.encoder.register_forward_hook(hook)
    return model


LOOPS: dict[str, Callable[[ld.MaxP, str], object]] = {
    "fit": lambda model, folder: model.fit(RUN, QRELS),
    "transform": lambda model, folder: model(RUN),
    "rerank_to_disk": lambda model, folder: ld.rerank_to_disk(model, RUN, Path(folder) / "out"),
}


def run(loop: str, number: int, folder: str) -> list:
    """How it ended."""
    model = model_that_gets(number, at=3 if loop == "fit" else 1)
    before = model.model.fingerprint()
    try:
        LOOPS[loop](model, folder)
        raised = ["", ""]
    except (KeyboardInterrupt, StoppedError) as error:
        raised = [type(error).__name__, str(error)]
    finite = all(bool(torch.isfinite(weight).all()) for weight in model.model.parameters())
    return [*raised, finite, model.model.fingerprint() != before]


def main(folder: str, *jobs: str) -> None:
    pt.java.init()
    java = handlers()
    for job in jobs:
        loop, name, *own = job.split(":")
        signal.signal(signal.SIGTERM, stop if own else signal.SIG_DFL)
        give(java)
        sys.stdout.write(json.dumps([job, *run(loop, getattr(signal, name), folder)]) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main(*sys.argv[1:])
