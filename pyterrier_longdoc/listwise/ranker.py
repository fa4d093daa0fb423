"""One query's documents, ranked by a schedule: shuffles, failures."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from ..common.parallel import Together
from .answer_forms import ANSWER_AGAIN
from .backends import Reply
from .client import read_reply
from .parsing import UnreadableReplyError
from .prompt_budget import PromptBudget
from .prompts import Message
from .schedules.base import Answer, PromptGroup

COUNTS = ("prompts", "rounds", "missing", "duplicates", "unknown", "refusals", "retries", "failed")
"""What is counted while a query is ranked; `RankGPT` explains it."""

Ask = Callable[[str, list[Message]], Reply]
"""`(qid, messages) -> reply`."""


@dataclass(frozen=True, eq=False)
class QueryDocuments:
    """The documents of one query, best first: the texts of the `top_k` to be ranked, and the rows of each of all."""

    qid: Any
    query: str
    texts: list[str]
    rows: list[list[int]]


@dataclass
class Ranked:
    """A query's documents, best first, without the sunk ones, which a failure sends to the bottom; and what happened.

    `rounds` has the documents in each prompt of each round; prompts of one round do not depend on each other.
    """

    order: list[int] = field(default_factory=list)
    sunk: set[int] = field(default_factory=set)
    counts: Counter[str] = field(default_factory=Counter)
    rounds: list[list[int]] = field(default_factory=list)


@dataclass(frozen=True, eq=False)
class ListRanker:
    """Ranks the documents of one query at a time, with a `RankGPT` as settings; knows no frames, caches or threads."""

    ask: Ask
    budget: PromptBudget
    settings: Any

    def rank(self, one: QueryDocuments, together: Together) -> Ranked:
        """Rank the documents of a query; prompts of a round are asked together."""
        ranked, order, n = Ranked(), list[int](), len(one.texts)
        if n > 1:
            schedule = self.settings.schedule.rank(n)
            try:
                groups = next(schedule)
                while True:
                    groups = schedule.send(self._answers(groups, one, ranked, together))
            except StopIteration as end:
                order = self._checked(end.value, n)
        # Documents that the schedule has left out stand behind the others.
        order = [*order, *sorted(set(range(n)) - set(order))]
        ranked.order = [document for document in order if document not in ranked.sunk]
        ranked.counts.update(prompts=sum(map(len, ranked.rounds)), rounds=len(ranked.rounds))
        return ranked

    def _answers(
        self, groups: list[PromptGroup], one: QueryDocuments, ranked: Ranked, together: Together
    ) -> list[Answer]:
        """Return the orders of the groups of a round; sunk documents are not shown again and stay behind."""
        live = [[each for each in self._checked(group, len(one.texts)) if each not in ranked.sunk] for group in groups]
        shown = [self._shuffled(one, group, ranked.counts["groups"] + i) for i, group in enumerate(live)]
        ranked.counts["groups"] += len(groups)
        given = [each for of_group in shown for each in of_group]
        if given:
            ranked.rounds.append([len(each) for each in given])
        outcomes = iter(together([partial(self._order, one, each) for each in given]))
        answers: list[Answer] = []
        for group, left, of_group in zip(groups, live, shown, strict=True):
            found = [next(outcomes) for _ in of_group]
            for _, counts in found:
                ranked.counts.update(counts)
            order = mean_order(left, [order for order, _ in found]) if found else left
            if order is None and self.settings.on_failure == "nan-free-bottom":
                ranked.sunk.update(left)
            answers.append(None if order is None else [*order, *(each for each in group if each not in left)])
        return answers

    def _shuffled(self, one: QueryDocuments, group: PromptGroup, number: int) -> list[PromptGroup]:
        """Return the orders in which a group is shown; none of one document."""
        if len(group) < 2:
            return []
        # Of its own seed for each group, so that neither other queries nor threads change it.
        rng = random.Random(f"{self.settings.seed}|{one.qid}|{number}")
        return [rng.sample(group, len(group)) for _ in range(self.settings.shuffles)] or [group]

    def _checked(self, group: PromptGroup, n: int) -> PromptGroup:
        if len(set(group)) < len(group) or not set(group) <= set(range(n)):
            raise ValueError(
                f"{self.settings.schedule!r} gave {group!r}, which must be distinct documents of 0 to {n - 1}"
            )
        return group

    def _order(self, one: QueryDocuments, given: PromptGroup) -> tuple[Answer, Counter[str]]:
        """Ask for an order of a group; None without a readable reply."""
        settings, prompt = self.settings, self.budget.prompt
        most = settings.answer.most(prompt)
        if most is not None and len(given) > most:
            raise ValueError(
                f"{settings.schedule!r} shows {len(given)} documents in a prompt, of which {settings.answer!r} can "
                f"order {most} at most: give schedule= with fewer, e.g. BackToFront({most}, {max(most // 2, 1)}), or "
                f"raise top_logprobs= where that is the limit"
            )
        shown = [one.texts[document] for document in given]
        send = partial(self.ask, str(one.qid))
        messages, reply = self.budget.ask(send, one.query, shown)
        retries = settings.retries if settings.answer.asks_again else 0
        parsed, unreadable = read_reply(
            lambda begun: self.budget.ask_again(send, one.query, shown, messages, begun[len(messages) :]),
            messages,
            reply,
            lambda reply: settings.answer.parse(reply, len(given), prompt),
            request=ANSWER_AGAIN.format(n=len(given)),
            retries=retries,
        )
        counts = Counter(refusals=len(unreadable), retries=min(len(unreadable), retries))
        if parsed is not None:
            counts.update(missing=parsed.missing, duplicates=parsed.duplicates, unknown=parsed.unknown)
            return [given[position] for position in parsed.order], counts
        if settings.on_failure == "raise":
            numbers = ", ".join(str(document + 1) for document in given)
            raise UnreadableReplyError(
                f"query '{one.qid}', documents {numbers} of the first stage: no ranking in the reply after {retries} "
                f"retries: {unreadable[-1].text[:200]!r}. Raise retries=, change prompt=, or let the run go on with "
                f"on_failure='keep' or 'nan-free-bottom'"
            )
        counts["failed"] += 1
        return None, counts


def mean_order(documents: PromptGroup, orders: list[Answer]) -> Answer:
    """Order by mean rank, which approximates the central ranking of Tang et al. 2024; None without any order."""
    ranks: Counter[int] = Counter()
    for order in orders:
        ranks.update({document: rank for rank, document in enumerate(order or ())})
    # sorted() is stable: equal mean ranks keep the given order.
    return sorted(documents, key=ranks.__getitem__) if any(orders) else None
