"""A run on several GPUs: copies of the scorer take its blocks in turn."""

from __future__ import annotations

import copy
import queue
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeVar

import torch
from torch import nn

Module = TypeVar("Module", bound=nn.Module)
Item = TypeVar("Item")
Result = TypeVar("Result")


def replica(module: Module, device: torch.device, shared: Sequence[Any] = ()) -> Module:
    """A copy for inference whose weights are on another device; on the same one they are the same memory.

    Args:
        module: what is copied.
        device: where the copy's weights are.
        shared: attributes that the copy has in common with it.
    """
    memo: dict[int, Any] = {id(value): value for value in shared}
    for parameter in module.parameters():
        memo[id(parameter)] = nn.Parameter(parameter.detach().to(device), requires_grad=False)
    for buffer in module.buffers():
        memo[id(buffer)] = buffer.to(device)
    return copy.deepcopy(module, memo)


def in_turn(
    workers: Sequence[Module], items: Iterable[Item], work: Callable[[Module, Item], Result]
) -> Iterator[tuple[Item, Result]]:
    """`work(worker, item)` of every item; each goes to the next worker that is free.

    With one worker nothing runs beside the caller. With more, each has a thread, in which torch's inference mode is on,
    and items come as they are done: a slow worker holds nobody up. Items are prepared by the caller's thread, not
    further ahead than the workers need. After an error what is already being done is still yielded; then it is raised.

    Args:
        workers: modules, each on a device of its own.
        items: what is to be done.
        work: does it.
    """
    if len(workers) == 1:
        for item in items:
            yield item, work(workers[0], item)
        return
    free: queue.SimpleQueue[Module] = queue.SimpleQueue()
    for worker in workers:
        free.put(worker)

    def done_by_next(item: Item) -> Result:
        worker = free.get()
        try:
            with torch.inference_mode(), _current(worker):
                return work(worker, item)
        finally:
            free.put(worker)

    waiting: dict[Future[Result], Item] = {}
    errors: list[BaseException] = []
    pool = ThreadPoolExecutor(len(workers), thread_name_prefix="longdoc-device")
    try:
        for item in _until_error(items, errors):
            waiting[pool.submit(done_by_next, item)] = item
            if len(waiting) > len(workers):
                yield from _finished(waiting, errors)
            if errors:
                break
        while waiting:
            yield from _finished(waiting, errors)
        if errors:
            raise errors[0]
    finally:
        pool.shutdown(cancel_futures=True)


def _until_error(items: Iterable[Item], errors: list[BaseException]) -> Iterator[Item]:
    try:
        yield from items
    except Exception as error:  # noqa: BLE001 - raised by the caller once finished work is yielded
        errors.append(error)


def _finished(waiting: dict[Future[Result], Item], errors: list[BaseException]) -> Iterator[tuple[Item, Result]]:
    """Waits until something is done; takes it from what is waited for."""
    for future in wait(waiting, return_when=FIRST_COMPLETED).done:
        item = waiting.pop(future)
        error = future.exception()
        if error is None:
            yield item, future.result()
        else:
            errors.append(error)


def one_at_a_time(call: Callable[[int], None] | None) -> Callable[[int], None] | None:
    """The same callback for several threads, which wait for each other."""
    if call is None:
        return None
    lock = threading.Lock()

    def locked(value: int) -> None:
        with lock:
            call(value)

    return locked


def _current(module: nn.Module) -> AbstractContextManager[Any]:
    """Kernels that torch did not write start on the current GPU, not on that of their tensors."""
    device = next(module.parameters()).device
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()
