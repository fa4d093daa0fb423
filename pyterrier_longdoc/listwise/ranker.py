"""Rank the documents of a query by a schedule, with shuffles and failures."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from ..common.parallel import RunAll
from .client import describe_failure, read_reply
from .parsing import UnreadableReplyError, parse_ranking
from .prompt_budget import PromptBudget
from .schedules import Answer, PromptGroup

ANSWER_AGAIN = (
    "That answer could not be read. Answer again with the numbers of all {n} documents, the most relevant first, and "
    "nothing else, written like this: [2] > [1]"
)

COUNTS = ("prompts", "rounds", "missing", "duplicates", "unknown", "refusals", "retries", "failed")
"""Counts for the ranking of a query, documented in `RankGPT`."""


@dataclass(eq=False)
class QueryRanking:
    """The ranking of the documents of one query, which are numbered in the order of the first stage.

    Attributes:
        settings: the `RankGPT`.
        texts: the texts of the `top_k` documents to rank.
        rows: the rows of each document, including those below `top_k`.
        order: the ranked documents, best first, without those in `sunk`.
        sunk: documents of failed prompts that come last.
        counts: the counts of `COUNTS`.
        failure: describes a prompt without a readable reply; empty if there is none.
    """

    settings: Any
    qid: Any
    query: str
    texts: list[str]
    rows: list[list[int]]
    order: list[int] = field(default_factory=list)
    sunk: set[int] = field(default_factory=set)
    counts: Counter[str] = field(default_factory=Counter)
    failure: str = ""

    def rank(self, budget: PromptBudget, run_all: RunAll) -> None:
        """Rank the documents; prompts of a round run concurrently."""
        order, n = list[int](), len(self.texts)
        if n > 1:
            schedule = self.settings.schedule.rank(n)
            try:
                groups = next(schedule)
                while True:
                    groups = schedule.send(self._answers(groups, budget, run_all))
            except StopIteration as end:
                order = self._checked(end.value)
        # Documents left out by the schedule follow the others.
        order = [*order, *sorted(set(range(n)) - set(order))]
        self.order = [document for document in order if document not in self.sunk]

    def _answers(self, groups: list[PromptGroup], budget: PromptBudget, run_all: RunAll) -> list[Answer]:
        """Return the orders of the groups of a round; sunk documents are in no prompt and come last."""
        live_groups, prompts = list[PromptGroup](), list[list[PromptGroup]]()
        for group in groups:
            live = [document for document in self._checked(group) if document not in self.sunk]
            live_groups.append(live)
            # A separate seed per group, so that its orders do not depend on other queries and threads.
            rng = random.Random(f"{self.settings.seed}|{self.qid}|{self.counts['groups']}")
            self.counts["groups"] += 1
            shuffled = [rng.sample(live, len(live)) for _ in range(self.settings.shuffles)]
            prompts.append([] if len(live) < 2 else shuffled or [live])
        of_round = [prompt for of_group in prompts for prompt in of_group]
        if of_round:
            self.counts.update(prompts=len(of_round), rounds=1)
        outcomes = iter(run_all([partial(self._order, budget, prompt) for prompt in of_round]))
        answers: list[Answer] = []
        for group, live, of_group in zip(groups, live_groups, prompts, strict=True):
            replies = [next(outcomes) for _ in of_group]
            for _, counts in replies:
                self.counts.update(counts)
            answer = mean_order(live, [order for order, _ in replies]) if replies else live
            if answer is None and self.settings.on_failure == "last":
                self.sunk.update(live)
            answers.append(None if answer is None else [*answer, *(each for each in group if each not in live)])
        return answers

    def _checked(self, group: PromptGroup) -> PromptGroup:
        n = len(self.texts)
        if len(set(group)) < len(group) or not set(group) <= set(range(n)):
            rule = f"it must return distinct documents of 0 to {n - 1}"
            raise ValueError(f"schedule={self.settings.schedule!r} returned {group!r}: {rule}")
        return group

    def _order(self, budget: PromptBudget, group: PromptGroup) -> tuple[Answer, Counter[str]]:
        """Ask for an order of a group; return None if no reply is readable."""
        settings, texts = self.settings, [self.texts[document] for document in group]
        parsed, unreadable = read_reply(
            partial(budget.ask, partial(settings.client.ask, str(self.qid)), self.query, texts),
            partial(parse_ranking, n=len(group)),
            request=ANSWER_AGAIN.format(n=len(group)),
            retries=settings.retries,
        )
        counts = Counter(refusals=len(unreadable), retries=len(unreadable) - (parsed is None))
        if parsed is not None:
            counts.update(missing=parsed.missing, duplicates=parsed.duplicates, unknown=parsed.unknown)
            return [group[position] for position in parsed.order], counts
        numbers = ", ".join(str(document + 1) for document in group)
        failure = describe_failure("ranking", unreadable)
        self.failure = f"query '{self.qid}', documents {numbers} of the first stage: {failure}"
        if settings.on_failure == "raise":
            advice = "Set" if unreadable[-1].problem else "Raise retries=, change prompt=, or set"
            raise UnreadableReplyError(f"{self.failure}. {advice} on_failure='keep' or 'last' to continue")
        counts["failed"] += 1
        return None, counts


def mean_order(documents: PromptGroup, orders: list[Answer]) -> Answer:
    """Order by mean rank, which approximates the central ranking of Tang et al. 2024; None without any order."""
    ranks: Counter[int] = Counter()
    for order in orders:
        ranks.update({document: rank for rank, document in enumerate(order or ())})
    # sorted() is stable, so that documents with equal mean ranks keep the given order.
    return sorted(documents, key=ranks.__getitem__) if any(orders) else None
