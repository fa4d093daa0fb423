"""The calls of a model: what they have cost, and the cap on it."""

from __future__ import annotations

import threading
from dataclasses import asdict, dataclass

import pandas as pd

from ..common.arguments import argument, validate
from ..common.presentation import readable

# Of all ledgers: a lock of each could not be pickled.
_ADDING = threading.Lock()


class SpendCapError(RuntimeError):
    """The calls have cost `max_cost`, and no further one is made."""


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
    """What a run is expected to take.

    Attributes:
        calls: prompts, without retries and shortened prompts sent again; the most there can be where answers decide.
        input_tokens: of the prompts.
        output_tokens: of answers that hold nothing but the ranking; reasoning models write far more.
        cost: at the given prices; None without prices.
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
        max_cost: no call starts once `earlier` and the cost have reached it, so that it is passed by no more than the
            calls under way cost, one for each thread; None for no cap. Replayed calls are free.
        earlier: what the replies in a cache have cost before.

    Attributes:
        calls: one entry per reply, in order.
        cost: what was paid: replayed calls are free.
    """

    prices: Prices | None = None
    max_cost: float | None = argument(None, at_least=0, needs="prices")
    earlier: float = 0.0

    def __post_init__(self) -> None:
        validate(self)
        self.calls: list[Call] = []
        self.cost = 0.0

    def __repr__(self) -> str:
        paid = sum(not call.replayed for call in self.calls)
        return f"Ledger({paid} calls, {len(self.calls) - paid} replayed, cost {readable(self.cost, 6)})"

    def estimate(self, calls: int, input_tokens: int, output_tokens: int) -> Estimate:
        """Return what so many calls and tokens would take, at these prices."""
        cost = None if self.prices is None else self.prices.cost(input_tokens, output_tokens)
        return Estimate(calls, input_tokens, output_tokens, cost)

    def cost_of(self, input_tokens: int, output_tokens: int) -> float:
        """Return the cost of a call; nothing without prices."""
        return 0.0 if self.prices is None else self.prices.cost(input_tokens, output_tokens)

    def check_cap(self) -> None:
        """Raise SpendCapError if nothing may be spent any more."""
        spent = self.earlier + self.cost
        if self.max_cost is not None and spent >= self.max_cost:
            raise SpendCapError(
                f"max_cost={self.max_cost} is spent: {readable(spent, 6)}, {readable(self.earlier, 6)} of it by "
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

        `qid, calls, replayed, estimated` are numbers of calls (`calls` counts all), `input_tokens, output_tokens` those
        of all, `cost` what was paid and `saved` what the replayed calls would cost.
        """
        rows = []
        for call in self.calls:
            cost = self.cost_of(call.input_tokens, call.output_tokens)
            costs = {"cost": 0.0, "saved": cost} if call.replayed else {"cost": cost, "saved": 0.0}
            rows.append({**asdict(call), "calls": 1, **costs})
        columns = ["calls", "replayed", "estimated", "input_tokens", "output_tokens", "cost", "saved"]
        return pd.DataFrame(rows, columns=["qid", *columns]).groupby("qid", sort=False).sum().reset_index()
