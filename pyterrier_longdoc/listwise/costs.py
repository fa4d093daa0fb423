"""The cost of calls and its cap."""

from __future__ import annotations

import threading
from dataclasses import asdict, dataclass

import pandas as pd

from ..common.arguments import argument, validate
from ..common.presentation import readable

# One lock for all ledgers, because a lock per ledger could not be pickled.
_ADDING = threading.Lock()


class SpendCapError(RuntimeError):
    """The calls have reached `max_cost`."""


@dataclass(frozen=True)
class Prices:
    """The prices of a model, in any currency. There are no defaults, because prices change.

    Args:
        input: the price of a million prompt tokens.
        output: the price of a million generated tokens.
    """

    input: float = argument(at_least=0)
    output: float = argument(at_least=0)

    def __post_init__(self) -> None:
        validate(self)


@dataclass(frozen=True)
class Call:
    """One reply: its query, whether it was replayed from the cache, and its tokens (reported or estimated)."""

    qid: str
    replayed: bool
    input_tokens: int
    output_tokens: int
    estimated: bool


@dataclass(frozen=True)
class Estimate:
    """The expected calls, tokens and cost of a run.

    Attributes:
        calls: the number of prompts, without retries; the maximum if it depends on the answers. Prompts with a cached
            reply are included.
        input_tokens: the tokens of the prompts.
        output_tokens: the tokens of answers that only contain the ranking; reasoning models generate far more.
        cost: the cost at the prices of the ledger; None without prices.
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
    """The calls of one or several runs, without those that failed.

    Args:
        prices: the prices; without them all costs are zero.
        max_cost: no call starts once `earlier_cost` plus the cost reaches it. None for no cap.
        earlier_cost: the cost of replies that were already in the cache.

    Attributes:
        calls: one entry per reply, in order.
        cost: the cost of the calls; replayed calls are free.
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
        """Return the estimate of a run with these numbers of calls and tokens."""
        cost = None if self.prices is None else self.cost_of(input_tokens, output_tokens)
        return Estimate(calls, input_tokens, output_tokens, cost)

    def cost_of(self, input_tokens: int, output_tokens: int) -> float:
        """Return the cost of tokens; 0 without prices."""
        prices = self.prices or Prices(0, 0)
        return (input_tokens * prices.input + output_tokens * prices.output) / 1e6

    def check_cap(self) -> None:
        """Raise SpendCapError if `max_cost` is reached."""
        spent = self.earlier_cost + self.cost
        if self.max_cost is not None and spent >= self.max_cost:
            raise SpendCapError(
                f"max_cost={self.max_cost} is reached: the calls cost {readable(spent, 6)}, of which "
                f"{readable(self.earlier_cost, 6)} in earlier runs. Raise .ledger.max_cost, or max_cost= in a new "
                f"LLMClient with the same cache=, and run again: cached replies are free"
            )

    def add(self, call: Call) -> None:
        """Record a call."""
        with _ADDING:
            self.calls.append(call)
            if not call.replayed:
                self.cost += self.cost_of(call.input_tokens, call.output_tokens)

    def table(self) -> pd.DataFrame:
        """Return one row per query, in the order of their first calls.

        `calls` counts all calls, `replayed` the cached ones, `estimated` those with estimated tokens. `input_tokens`
        and `output_tokens` are sums over all calls. `cost` is the cost of new calls, `saved` that of replayed ones.
        """
        rows = []
        for call in self.calls:
            cost = self.cost_of(call.input_tokens, call.output_tokens)
            costs = {"cost": 0.0, "saved": cost} if call.replayed else {"cost": cost, "saved": 0.0}
            rows.append({**asdict(call), "calls": 1, **costs})
        columns = ["calls", "replayed", "estimated", "input_tokens", "output_tokens", "cost", "saved"]
        return pd.DataFrame(rows, columns=["qid", *columns]).groupby("qid", sort=False).sum().reset_index()
