"""The calls of a model: what they have cost, and the cap on it."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass

import pandas as pd

# One for all ledgers: a lock of each could not be pickled.
_LOCK = threading.Lock()


class SpendCapError(RuntimeError):
    """The next call might cost more than `max_cost` allows."""


@dataclass(frozen=True)
class Prices:
    """Prices of a model, in any one currency; no default, as they change.

    Args:
        input: of a million tokens of prompt.
        output: of a million tokens of answer.

    Raises:
        ValueError: for a negative price.
    """

    input: float
    output: float

    def __post_init__(self) -> None:
        if min(self.input, self.output) < 0:
            raise ValueError(f"{self!r}: a price cannot be negative")

    def cost(self, input_tokens: int, output_tokens: int) -> float:
        """Cost of a call."""
        return (input_tokens * self.input + output_tokens * self.output) / 1e6


@dataclass(frozen=True)
class Call:
    """One reply.

    Attributes:
        qid: the query it was for.
        replayed: whether it came from the cache, at no cost.
        input_tokens: of the prompt.
        output_tokens: of the answer.
        estimated: whether the tokens were counted here, as the backend did not report them.
    """

    qid: str
    replayed: bool
    input_tokens: int
    output_tokens: int
    estimated: bool


@dataclass(frozen=True)
class Estimate:
    """What a run is expected to take.

    Attributes:
        calls: prompts, without retries and shortened prompts sent again.
        input_tokens: of the prompts.
        output_tokens: of answers that hold nothing but the ranking; reasoning models write far more.
        cost: at the given prices; 0 without prices.
    """

    calls: int
    input_tokens: int
    output_tokens: int
    cost: float


class Ledger:
    """The calls of one or several runs; those that ended in an error are not among them.

    Args:
        prices: for costs; None leaves costs at zero.
        max_cost: no call starts if the cost so far and its own expected cost come to more; None for no cap. Replayed
            calls are free. An answer is expected to be as long as the backend allows it to be, or else as the longest
            so far; then the cap holds to within what the calls under way cost more than that.

    Attributes:
        calls: one entry per reply, in order.
        cost: what was paid: replayed calls are free.

    Raises:
        ValueError: for a cap that is negative, or one without prices.
    """

    def __init__(self, prices: Prices | None = None, max_cost: float | None = None) -> None:
        if max_cost is not None and prices is None:
            raise ValueError(f"max_cost={max_cost} needs prices=Prices(input, output) per million tokens")
        if max_cost is not None and not max_cost >= 0:
            raise ValueError(f"max_cost={max_cost} must be 0 or more")
        self.prices = prices or Prices(0, 0)
        self.max_cost = max_cost
        self.calls: list[Call] = []
        self.cost = 0.0
        self._reserved = 0.0
        self._longest_answer = 0

    def __repr__(self) -> str:
        paid = sum(not call.replayed for call in self.calls)
        return f"Ledger({paid} calls, {len(self.calls) - paid} replayed, cost {self.cost:.6g})"

    @contextmanager
    def reserving(self, input_tokens: int, most_output: int | None = None) -> Iterator[None]:
        """Holds money for a call, so that calls under way count towards the cap; SpendCapError if too little is left.

        Args:
            input_tokens: of the prompt.
            most_output: most tokens of the answer; None if that is not known.
        """
        with _LOCK:
            expected = self.prices.cost(input_tokens, self._longest_answer if most_output is None else most_output)
            if self.max_cost is not None and self.cost + self._reserved + expected > self.max_cost:
                raise SpendCapError(
                    f"max_cost={self.max_cost} would be passed: {self.cost:.6g} spent, {self._reserved:.6g} under way, "
                    f"about {expected:.6g} for the next call. Replies so far are in the cache, if there is one: raise "
                    f"max_cost and run again, and only the rest is paid for"
                )
            self._reserved += expected
        try:
            yield
        finally:
            with _LOCK:
                self._reserved -= expected

    def add(self, call: Call) -> None:
        """Enters a call."""
        with _LOCK:
            self.calls.append(call)
            self._longest_answer = max(self._longest_answer, call.output_tokens)
            if not call.replayed:
                self.cost += self.prices.cost(call.input_tokens, call.output_tokens)

    def table(self) -> pd.DataFrame:
        """One row per query, in order of first call.

        Returns:
            `qid, calls, replayed, estimated` (numbers of calls; `calls` counts all), `input_tokens, output_tokens` (of
            all), `cost` (paid) and `saved` (what the replayed calls would cost).
        """
        rows = []
        for call in self.calls:
            cost = self.prices.cost(call.input_tokens, call.output_tokens)
            costs = {"cost": 0.0, "saved": cost} if call.replayed else {"cost": cost, "saved": 0.0}
            rows.append({**asdict(call), "calls": 1, **costs})
        columns = ["calls", "replayed", "estimated", "input_tokens", "output_tokens", "cost", "saved"]
        return pd.DataFrame(rows, columns=["qid", *columns]).groupby("qid", sort=False).sum().reset_index()
