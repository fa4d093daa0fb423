"""The calls of a model: what they have cost, and the cap on it."""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass

import pandas as pd

from ..common.presentation import readable

ASSUMED_ANSWER = 1024
"""Tokens of an answer that are reserved where nothing bounds it: ten times those of a ranking of 20 documents."""

MARGIN = 1.1
"""So much more is reserved than the largest ratio of reported to counted tokens so far says: the ratio of two
tokenizers' counts differs by some percent between prompts of one kind."""

# One for all ledgers: one of each could not be pickled.
_CHANGED = threading.Condition()


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
        counted: tokens of the prompt by our own count, where the backend reported them and a cap needs the ratio.
    """

    qid: str
    replayed: bool
    input_tokens: int
    output_tokens: int
    estimated: bool
    counted: int | None = None


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


class Ledger:
    """The calls of one or several runs; those that ended in an error are not among them.

    Before a call is made, the most that it may cost is reserved, and its reply replaces that by what it did cost. So
    the cap is never passed while no call takes more tokens than were reserved:

    - of the prompt, until a backend has reported how many it took, one token for each byte and some for a chat
      template, which no tokenizer exceeds; afterwards our own count times the largest ratio of reported to counted
      tokens so far, a tenth more, and one token for each byte beyond ASCII, as the ratio of one script says nothing of
      another one; never more than before;
    - of the answer what the backend's parameters allow, or else 1,024, or the longest so far if that is longer.

    A call that does not fit beside those under way waits for them, as they mostly take less than is reserved.

    Args:
        prices: for costs; None leaves costs at zero.
        max_cost: no call starts that may bring `earlier` and the cost above it; None for no cap. Replayed calls are
            free.
        earlier: what the replies in a cache have cost before.

    Attributes:
        calls: one entry per reply, in order.
        cost: what was paid: replayed calls are free.

    Raises:
        ValueError: for a cap that is negative, or one without prices.
    """

    def __init__(self, prices: Prices | None = None, max_cost: float | None = None, earlier: float = 0.0) -> None:
        if max_cost is not None and prices is None:
            raise ValueError(f"max_cost={max_cost} needs prices=Prices(input, output) per million tokens")
        if max_cost is not None and not max_cost >= 0:
            raise ValueError(f"max_cost={max_cost} must be 0 or more")
        self.prices = prices or Prices(0, 0)
        self.max_cost = max_cost
        self.earlier = earlier
        self._priced = prices is not None
        self.calls: list[Call] = []
        self.cost = 0.0
        self._reserved: list[float] = []  # of each call under way
        self._longest_answer = 0
        self._ratio: float | None = None  # the largest of reported to counted tokens of a prompt

    def __repr__(self) -> str:
        paid = sum(not call.replayed for call in self.calls)
        return f"Ledger({paid} calls, {len(self.calls) - paid} replayed, cost {readable(self.cost, 6)})"

    def estimate(self, calls: int, input_tokens: int, output_tokens: int) -> Estimate:
        """What so many calls and tokens would take, at these prices."""
        cost = self.prices.cost(input_tokens, output_tokens) if self._priced else None
        return Estimate(calls, input_tokens, output_tokens, cost)

    @contextmanager
    def reserving(
        self, counted: int, most_input: int, most_output: int | None = None, *, beyond_ascii: int = 0
    ) -> Iterator[None]:
        """Reserves the most that a call may cost, as long as it is under way; without a cap nothing.

        Args:
            counted: tokens of the prompt, by our own count.
            most_input: most tokens of the prompt by any count.
            most_output: most tokens of the answer; None if nothing bounds it.
            beyond_ascii: bytes of the prompt that are not ASCII.

        Raises:
            SpendCapError: if that would pass the cap even if the calls under way cost nothing more.
        """

        def most() -> tuple[int, int]:
            return self._most(counted, most_input, most_output, beyond_ascii)

        def fits() -> bool:
            possible = self.earlier + self.cost + sum(self._reserved) + self.prices.cost(*most())
            return self.max_cost is None or possible <= self.max_cost

        with _CHANGED:
            _CHANGED.wait_for(lambda: not self._reserved or fits())
            held = self.prices.cost(*most())
            if not fits():
                costs = self.earlier + self.cost, sum(self._reserved), held
                spent, reserved, next_call = (readable(cost, 6) for cost in costs)
                spent += f" ({readable(self.earlier, 6)} earlier)" if self.earlier else ""
                raise SpendCapError(
                    f"max_cost={self.max_cost} would be passed: {spent} spent, {reserved} reserved for calls under "
                    f"way, and the next call may cost {next_call} (up to {most()[0]} tokens of prompt and {most()[1]} "
                    f"of answer). Replies so far are in the file cache=, if the LLMClient has one: raise the cap "
                    f"(.ledger.max_cost, or max_cost= of a new one with the same cache=) and run again, and only the "
                    f"rest is paid for"
                )
            self._reserved.append(held)
        try:
            yield
        finally:
            with _CHANGED:
                self._reserved.remove(held)
                _CHANGED.notify_all()

    def _most(self, counted: int, most_input: int, most_output: int | None, beyond_ascii: int) -> tuple[int, int]:
        """Most tokens of a prompt and its answer, by what is known now."""
        tokens_in = most_input
        if self._ratio is not None:
            tokens_in = min(most_input, math.ceil(counted * self._ratio * MARGIN) + beyond_ascii)
        return tokens_in, max(ASSUMED_ANSWER, self._longest_answer) if most_output is None else most_output

    def add(self, call: Call) -> None:
        """Enters a call."""
        with _CHANGED:
            self.calls.append(call)
            self._longest_answer = max(self._longest_answer, call.output_tokens)
            if call.counted:
                self._ratio = max(self._ratio or 0.0, call.input_tokens / call.counted)
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
