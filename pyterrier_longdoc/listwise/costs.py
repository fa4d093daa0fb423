"""The calls of a model: their cost, and the cap on it."""

from __future__ import annotations

import threading
from dataclasses import asdict, dataclass

import pandas as pd

from ..common.arguments import argument, validate
from ..common.presentation import readable

# One lock for all ledgers: a lock of each could not be pickled.
_ADDING = threading.Lock()


class SpendCapError(RuntimeError):
    """The calls have cost `max_cost`, and no call starts any more."""


@dataclass(frozen=True)
class Prices:
    """Prices of a model, in any one currency; no default, as they change.

    Args:
        input: of a million tokens of prompt.
        output: of a million tokens of answer.
    """

    input: float = argument(at_least=0)
    output: float = argument(at_least=0)

    def __post_init__(self) -> None:
        validate(self)

    def cost(self, input_tokens: int, output_tokens: int) -> float:
        """Return the cost of a call."""
        return (input_tokens * self.input + output_tokens * self.output) / 1e6


@dataclass(frozen=True)
class Call:
    """One reply: for which query, whether from the cache, its tokens, and whether these were counted here."""

    qid: str
    replayed: bool
    input_tokens: int
    output_tokens: int
    estimated: bool


@dataclass(frozen=True)
class Estimate:
    """The calls, tokens and cost that a run is expected to take.

    Attributes:
        calls: prompts, without retries and shortened prompts; the largest possible number where answers decide. Those
            whose reply is in the cache count, too.
        input_tokens: of the prompts.
        output_tokens: of answers that hold nothing but the ranking; reasoning models write far more.
        cost: at the ledger's prices; None without prices.
    """

    calls: int
    input_tokens: int
    output_tokens: int
    cost: float | None

    def __repr__(self) -> str:
        cost = None if self.cost is None else readable(self.cost)
        return (
            f"Estimate(calls={self.calls}, input_tokens={self.input_tokens}, output_tokens={self.output_tokens}, "
            f"cost={cost})"
        )


@dataclass(eq=False, repr=False)
class Ledger:
    """The calls of one or several runs; those that ended in an error are not among them.

    Args:
        prices: for costs; None leaves costs at zero.
        max_cost: no call starts once `earlier_cost` and the cost reach it; calls under way, one for each thread, may
            still pass it. None for no cap. Replayed calls are free.
        earlier_cost: cost of the replies that were in the cache before.

    Attributes:
        calls: one entry per reply, in order.
        cost: cost of the calls; replayed ones are free.
    """

    prices: Prices | None = None
    max_cost: float | None = argument(None, at_least=0, needs="prices")
    earlier_cost: float = 0.0

    def __post_init__(self) -> None:
        validate(self, "LLMClient")
        self.calls: list[Call] = []
        self.cost = 0.0

    def __repr__(self) -> str:
        new_calls = sum(not call.replayed for call in self.calls)
        return f"Ledger({new_calls} calls, {len(self.calls) - new_calls} replayed, cost {readable(self.cost, 6)})"

    def estimate(self, calls: int, input_tokens: int, output_tokens: int) -> Estimate:
        """Return the estimate of a run with so many calls and tokens, at the ledger's prices."""
        cost = None if self.prices is None else self.prices.cost(input_tokens, output_tokens)
        return Estimate(calls, input_tokens, output_tokens, cost)

    def cost_of(self, input_tokens: int, output_tokens: int) -> float:
        """Return the cost of a call; nothing without prices."""
        return 0.0 if self.prices is None else self.prices.cost(input_tokens, output_tokens)

    def check_cap(self) -> None:
        """Raise SpendCapError if nothing may be spent any more."""
        spent = self.earlier_cost + self.cost
        if self.max_cost is not None and spent >= self.max_cost:
            raise SpendCapError(
                f"max_cost={self.max_cost} is spent: {readable(spent, 6)}, {readable(self.earlier_cost, 6)} of it by "
                f"earlier runs. Raise the cap (.ledger.max_cost, or max_cost= of a new LLMClient with the same cache=) "
                f"and run again: with cache= only the rest is paid for"
            )

    def add(self, call: Call) -> None:
        """Enter a call."""
        with _ADDING:
            self.calls.append(call)
            if not call.replayed:
                self.cost += self.cost_of(call.input_tokens, call.output_tokens)

    def table(self) -> pd.DataFrame:
        """Return one row per query, in order of first call.

        `calls` counts all calls, `replayed` and `estimated` such calls; `input_tokens` and `output_tokens` are those of
        all calls; `cost` is that of new calls, and `saved` what the replayed calls would cost.
        """
        rows = []
        for call in self.calls:
            cost = self.cost_of(call.input_tokens, call.output_tokens)
            costs = {"cost": 0.0, "saved": cost} if call.replayed else {"cost": cost, "saved": 0.0}
            rows.append({**asdict(call), "calls": 1, **costs})
        columns = ["calls", "replayed", "estimated", "input_tokens", "output_tokens", "cost", "saved"]
        return pd.DataFrame(rows, columns=["qid", *columns]).groupby("qid", sort=False).sum().reset_index()
