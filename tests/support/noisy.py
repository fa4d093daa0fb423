"""A noisy oracle: orders groups of documents by their worth, and errs with a given probability."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

from pyterrier_longdoc.listwise import Schedule

from .llm import GRADE, shown


def noisy_order(worth: Sequence[float], p: float, rng: random.Random) -> list[int]:
    """Positions, best first: a sort by comparisons of neighbours, each of which errs with probability p.

    Two documents come out in the wrong order with probability p; a list of more is as wrong as such comparisons make
    it: at p = 0 it is right, at p = 0.5 it is random.
    """
    order: list[int] = []
    for new in rng.sample(range(len(worth)), len(worth)):
        low, high = 0, len(order)
        while low < high:
            middle = (low + high) // 2
            better = (worth[new] > worth[order[middle]]) != (rng.random() < p)
            low, high = (low, middle) if better else (middle + 1, high)
        order.insert(low, new)
    return order


class NoisyOracle:
    """Answers prompts about documents of `support.llm.candidates`; the same prompt always has the same answer."""

    def __init__(self, p: float, seed: int = 0) -> None:
        self.p, self.seed = p, seed

    def __call__(self, messages: list[dict[str, str]]) -> str:
        documents = shown(messages)
        rng = random.Random(f"{self.seed}|{self.p}|{[text for _, text in documents]}")
        order = noisy_order([int(GRADE.search(text)[1]) for _, text in documents], self.p, rng)
        return " > ".join(f"[{documents[position][0]}]" for position in order)


def play(schedule: Schedule, n: int, order: Callable[[list[int]], list[int] | None]) -> tuple[list[int], list[int]]:
    """What a schedule returns, and the number of prompts of each round; groups of one document ask nothing."""
    rounds, playing, answers = [], schedule.rank(n), None
    while True:
        try:
            groups = next(playing) if answers is None else playing.send(answers)
        except StopIteration as end:
            return end.value, rounds
        rounds.append(sum(len(group) > 1 for group in groups))
        answers = [order(group) if len(group) > 1 else group for group in groups]
