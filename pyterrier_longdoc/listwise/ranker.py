"""One query's documents, ranked by a schedule: shuffles, failures."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field
from functools import partial

from .answers import ANSWER_AGAIN, AnswerForm
from .client import read_reply
from .fitting import Fitting
from .messages import Message, UnreadableReplyError
from .schedules import Schedule
from .schedules.base import Answer, Group

ON_FAILURE = ("raise", "keep", "nan-free-bottom")
COUNTS = ("prompts", "rounds", "missing", "duplicates", "unknown", "refusals", "retries", "failed")
"""What is counted while a query is ranked; `RankGPT` explains it."""


@dataclass(frozen=True)
class Asked:
    """One prompt's outcome: the documents, best first, None without a readable reply; and what happened."""

    order: Answer
    counts: Counter[str]


@dataclass
class Ranked:
    """A query's documents, best first, without those that a failure sends to the bottom.

    Attributes:
        order: the documents.
        counts: what happened.
        rounds: documents in each prompt of each round; prompts of one round do not depend on each other.
    """

    order: list[int] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)
    rounds: list[list[int]] = field(default_factory=list)


@dataclass(frozen=True, eq=False)
class ListRanker:
    """Ranks the documents of one query at a time, with settings of `RankGPT`; knows no frames, caches or threads."""

    fitting: Fitting[str]
    schedule: Schedule
    answer: AnswerForm
    retries: int
    on_failure: str
    shuffles: int
    seed: int

    def rank(
        self, qid: str, query: str, texts: Sequence[str]
    ) -> Generator[Sequence[Callable[[], Asked]], list[Asked], Ranked]:
        """Ranks documents that are given in the order of the first stage; yields prompts, and is sent their outcomes.

        Raises:
            ValueError: for a schedule that asks for, or returns, what are not documents.
        """
        ranked, sunk = Ranked(), set[int]()
        order = []
        if len(texts) > 1:
            schedule, answers = self.schedule.rank(len(texts)), None
            try:
                while True:
                    groups = next(schedule) if answers is None else schedule.send(answers)
                    answers = yield from self._answers(groups, qid, query, texts, ranked, sunk)
            except StopIteration as end:
                order = end.value
        return self._finished(ranked, order, sunk, len(texts))

    def _answers(
        self, groups: list[Group], qid: str, query: str, texts: Sequence[str], ranked: Ranked, sunk: set[int]
    ) -> Generator[Sequence[Callable[[], Asked]], list[Asked], list[Answer]]:
        """The orders of the groups of a round; documents at the bottom are not shown again and stay behind."""
        shown = [
            [document for document in self._checked(group, len(texts)) if document not in sunk] for group in groups
        ]
        prompts: list[list[Group]] = []
        for group in shown:
            prompts.append(self._given(qid, group, ranked.counts["groups"]) if len(group) > 1 else [])
            ranked.counts["groups"] += 1
        tasks = [partial(self._order, qid, query, texts, given) for of_group in prompts for given in of_group]
        asked = iter((yield tasks) if tasks else ())
        if tasks:
            ranked.rounds.append([len(given) for of_group in prompts for given in of_group])
        answers: list[Answer] = []
        for group, live, given in zip(groups, shown, prompts, strict=True):
            outcomes = [next(asked) for _ in given]
            for outcome in outcomes:
                ranked.counts.update(outcome.counts)
            order = mean_order(live, [outcome.order for outcome in outcomes]) if given else live
            if order is None and self.on_failure == "nan-free-bottom":
                sunk.update(live)
            answers.append(None if order is None else [*order, *(each for each in group if each not in live)])
        return answers

    def _given(self, qid: str, group: Group, number: int) -> list[Group]:
        """The orders in which a group is shown."""
        # Of its own seed for each group, so that neither other queries nor threads change it.
        rng = random.Random(f"{self.seed}|{qid}|{number}")
        return [rng.sample(group, len(group)) for _ in range(self.shuffles)] or [group]

    def _checked(self, group: Group, n: int) -> Group:
        if len(set(group)) < len(group) or not set(group) <= set(range(n)):
            raise ValueError(f"{self.schedule!r} gave {group!r}, which must be distinct documents of 0 to {n - 1}")
        return group

    def _finished(self, ranked: Ranked, order: list[int], sunk: set[int], n: int) -> Ranked:
        """With the documents that the schedule has left out behind the others."""
        order = [*self._checked(order, n), *sorted(set(range(n)) - set(order))]
        ranked.order = [document for document in order if document not in sunk]
        ranked.counts.update(prompts=sum(map(len, ranked.rounds)), rounds=len(ranked.rounds))
        return ranked

    def _order(self, qid: str, query: str, texts: Sequence[str], given: Group) -> Asked:
        """One order of a group."""
        most = self.answer.most(self.fitting.prompt)
        if most is not None and len(given) > most:
            raise ValueError(
                f"{self.schedule!r} shows {len(given)} documents in a prompt, of which {self.answer!r} can order "
                f"{most} at most: give schedule= with fewer, such as BackToFront({most}, {max(most // 2, 1)}), or "
                f"raise top_logprobs= where that is the limit"
            )
        shown = [texts[document] for document in given]
        messages, reply = self.fitting.ask(qid, query, shown)

        def ask_again(conversation: list[Message]) -> str:
            return self.fitting.ask_again(qid, query, shown, messages, conversation[len(messages) :])

        retries = self.retries if self.answer.asks_again else 0
        parsed, unreadable = read_reply(
            ask_again,
            messages,
            reply,
            lambda reply: self.answer.parse(reply, len(given), self.fitting.prompt),
            request=ANSWER_AGAIN.format(n=len(given)),
            retries=retries,
        )
        counts = Counter(refusals=len(unreadable), retries=min(len(unreadable), retries))
        if parsed is not None:
            counts.update(missing=parsed.missing, duplicates=parsed.duplicates, unknown=parsed.unknown)
            return Asked([given[position] for position in parsed.order], counts)
        if self.on_failure == "raise":
            numbers = ", ".join(str(document + 1) for document in given)
            raise UnreadableReplyError(
                f"query {qid!r}, documents {numbers} of the first stage: no ranking in the reply after {retries} "
                f"retries: {unreadable[-1][:200]!r}. Raise retries=, change prompt=, or let the run go on with "
                f"on_failure='keep' or 'nan-free-bottom'"
            )
        counts["failed"] += 1
        return Asked(None, counts)


def mean_order(documents: Group, orders: list[Answer]) -> Answer:
    """By mean rank, which approximates the central ranking of Tang et al. 2024; None without any order."""
    ranks: Counter[int] = Counter()
    for order in orders:
        ranks.update({document: rank for rank, document in enumerate(order or ())})
    # sorted() is stable: equal mean ranks keep the given order.
    return sorted(documents, key=ranks.__getitem__) if any(orders) else None
