"""Rank the documents of a query by a schedule, with shuffles and failures."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from ..common.parallel import RunAll
from .answer_forms import ANSWER_AGAIN
from .backends import Reply
from .client import read_reply
from .parsing import UnreadableReplyError
from .prompt_budget import PromptBudget
from .prompts import Message
from .schedules.base import Answer, PromptGroup

COUNTS = ("prompts", "rounds", "missing", "duplicates", "unknown", "refusals", "retries", "failed")
"""Counts for the ranking of a query, documented in `RankGPT`."""

Ask = Callable[[str, list[Message]], Reply]
"""`(qid, messages) -> reply`."""


@dataclass(frozen=True, eq=False)
class QueryDocuments:
    """The documents of one query, best first: texts of the `top_k` to rank, and the rows of all documents."""

    qid: Any
    query: str
    texts: list[str]
    rows: list[list[int]]


@dataclass
class Ranked:
    """The order of a query's documents (without failed ones, which are in `sunk`), and the counts.

    `rounds` has the number of documents in each prompt of each round; prompts of a round are independent.
    """

    order: list[int] = field(default_factory=list)
    sunk: set[int] = field(default_factory=set)
    counts: Counter[str] = field(default_factory=Counter)
    rounds: list[list[int]] = field(default_factory=list)


@dataclass(frozen=True, eq=False)
class ListRanker:
    """Ranks the documents of one query at a time, with a `RankGPT` as settings, without frames, caches or threads."""

    ask: Ask
    budget: PromptBudget
    settings: Any

    def rank(self, documents: QueryDocuments, run_all: RunAll) -> Ranked:
        """Rank the documents of a query; prompts of a round run concurrently."""
        ranked, order, n = Ranked(), list[int](), len(documents.texts)
        if n > 1:
            schedule = self.settings.schedule.rank(n)
            try:
                groups = next(schedule)
                while True:
                    groups = schedule.send(self._answers(groups, documents, ranked, run_all))
            except StopIteration as end:
                order = self._checked(end.value, n)
        # Documents left out by the schedule follow the others.
        order = [*order, *sorted(set(range(n)) - set(order))]
        ranked.order = [document for document in order if document not in ranked.sunk]
        ranked.counts.update(prompts=sum(map(len, ranked.rounds)), rounds=len(ranked.rounds))
        return ranked

    def _answers(
        self, groups: list[PromptGroup], documents: QueryDocuments, ranked: Ranked, run_all: RunAll
    ) -> list[Answer]:
        """Return the orders of the groups of a round; sunk documents are in no prompt and come last."""
        n, sunk = len(documents.texts), ranked.sunk
        live = [[document for document in self._checked(group, n) if document not in sunk] for group in groups]
        prompts = [self._shuffles(documents, group, ranked.counts["groups"] + i) for i, group in enumerate(live)]
        ranked.counts["groups"] += len(groups)
        of_round = [prompt for of_group in prompts for prompt in of_group]
        if of_round:
            ranked.rounds.append(list(map(len, of_round)))
        outcomes = iter(run_all([partial(self._order, documents, prompt) for prompt in of_round]))
        answers: list[Answer] = []
        for group, rest, of_group in zip(groups, live, prompts, strict=True):
            replies = [next(outcomes) for _ in of_group]
            for _, counts in replies:
                ranked.counts.update(counts)
            order = mean_order(rest, [order for order, _ in replies]) if replies else rest
            if order is None and self.settings.on_failure == "nan-free-bottom":
                sunk.update(rest)
            answers.append(None if order is None else [*order, *(each for each in group if each not in rest)])
        return answers

    def _shuffles(self, documents: QueryDocuments, group: PromptGroup, number: int) -> list[PromptGroup]:
        """Return the document orders for the prompts of a group; none for a single document."""
        if len(group) < 2:
            return []
        # A separate seed per group, so that its orders do not depend on other queries and threads.
        rng = random.Random(f"{self.settings.seed}|{documents.qid}|{number}")
        return [rng.sample(group, len(group)) for _ in range(self.settings.shuffles)] or [group]

    def _checked(self, group: PromptGroup, n: int) -> PromptGroup:
        if len(set(group)) < len(group) or not set(group) <= set(range(n)):
            raise ValueError(
                f"schedule={self.settings.schedule!r} returned {group!r}: it must return distinct documents of 0 to "
                f"{n - 1}"
            )
        return group

    def _order(self, documents: QueryDocuments, group: PromptGroup) -> tuple[Answer, Counter[str]]:
        """Ask for an order of a group; return None if no reply is readable."""
        settings, prompt = self.settings, self.budget.prompt
        limit = settings.answer.max_documents(prompt)
        if limit is not None and len(group) > limit:
            raise ValueError(
                f"schedule={settings.schedule!r} has prompts of {len(group)} documents, but {settings.answer!r} orders "
                f"at most {limit}: use smaller prompts, e.g. BackToFront({limit}, {max(limit // 2, 1)}), or raise "
                f"top_logprobs="
            )
        texts = [documents.texts[document] for document in group]
        send = partial(self.ask, str(documents.qid))
        messages, reply = self.budget.ask(send, documents.query, texts)
        ask_again = partial(self.budget.ask_again, send, documents.query, texts, messages)
        retries = settings.retries if settings.answer.asks_again else 0
        parsed, unreadable = read_reply(
            lambda conversation: ask_again(conversation[len(messages) :]),
            messages,
            reply,
            lambda reply: settings.answer.parse(reply, len(group), prompt),
            request=ANSWER_AGAIN.format(n=len(group)),
            retries=retries,
        )
        counts = Counter(refusals=len(unreadable), retries=min(len(unreadable), retries))
        if parsed is not None:
            counts.update(missing=parsed.missing, duplicates=parsed.duplicates, unknown=parsed.unknown)
            return [group[position] for position in parsed.order], counts
        if settings.on_failure == "raise":
            numbers = ", ".join(str(document + 1) for document in group)
            raise UnreadableReplyError(
                f"query '{documents.qid}', documents {numbers} of the first stage: no ranking in the reply after "
                f"{retries} retries: {unreadable[-1].text[:200]!r}. Raise retries=, change prompt=, or set "
                f"on_failure='keep' or 'nan-free-bottom' to continue"
            )
        counts["failed"] += 1
        return None, counts


def mean_order(documents: PromptGroup, orders: list[Answer]) -> Answer:
    """Order by mean rank, which approximates the central ranking of Tang et al. 2024; None without any order."""
    ranks: Counter[int] = Counter()
    for order in orders:
        ranks.update({document: rank for rank, document in enumerate(order or ())})
    # sorted() is stable, so that documents with equal mean ranks keep the given order.
    return sorted(documents, key=ranks.__getitem__) if any(orders) else None
