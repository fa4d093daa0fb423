"""Which candidates meet in which prompt, how answers become a ranking, and several queries in flight."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ..common.servers import ContextOverflowError
from .client import read_reply
from .messages import DocumentReader, Message, Prompt, UnreadableReplyError, parse_ranking

ON_FAILURE = ("raise", "keep", "nan-free-bottom")
COUNTS = ("prompts", "missing", "duplicates", "unknown", "refusals", "retries", "failed")
"""What is counted while a query is ranked; `RankGPT` explains it."""

SHRINK = 0.75
SHRINK_ATTEMPTS = 8
"""A prompt that the server finds too long is sent again with 3/4 of its documents' tokens, down to a tenth."""

ANSWER_AGAIN = (
    "That answer could not be read. Answer again with the numbers of all {n} documents, the most relevant first, and "
    "nothing else, written like this: [2] > [1]"
)

Ask = Callable[[str, list[Message]], str]
"""`(qid, messages) -> text of the reply`."""

Place = tuple[int, int]
"""Start and end, half-open, in a query's list of documents."""


@dataclass(frozen=True)
class BackToFront:
    """Lists from the back of a query's documents to their front, the last one from the top: Sun et al. 2023.

    Args:
        list_size: most documents in a prompt.
        step: documents from one list to the next. The best `list_size - step` of a list are seen again by the next.
    """

    list_size: int
    step: int

    def places(self, n: int) -> list[Place]:
        """The lists over `n` documents, in their order; one document needs none.

        Example:
            >>> BackToFront(20, 10).places(25)
            [(5, 25), (0, 15)]
        """
        ends = range(n, min(self.list_size - self.step, n - 1), -self.step) if n > 1 else ()
        return [(max(end - self.list_size, 0), end) for end in ends]

    def rank(self, n: int, order: Callable[[list[int], Place], list[int]]) -> list[int]:
        """The documents 0..n-1, best first; those that `order` leaves out of a list are left out of the ranking."""
        ranking = list(range(n))
        for start, end in self.places(n):
            documents = ranking[start:end]
            if len(documents) > 1:
                ranking[start:end] = order(documents, (start, end))
        return ranking


@dataclass(frozen=True, eq=False)
class ListRanker:
    """Ranks the documents of one query at a time, with settings of `RankGPT`; knows no frames, caches or threads."""

    ask: Ask
    reader: DocumentReader
    schedule: BackToFront
    prompt: Prompt
    max_prompt_tokens: int | None
    retries: int
    on_failure: str
    shuffles: int
    seed: int

    def rank(self, qid: str, query: str, texts: list[str], step: Callable[[], Any]) -> tuple[list[int], Counter[str]]:
        """Ranks documents that are given in the order of the first stage; `step()` before each order is asked for.

        Returns:
            Their positions, best first, without those that a failure sends to the bottom; and what happened.
        """
        counts: Counter[str] = Counter()

        def order(documents: list[int], place: Place) -> list[int]:
            # Of its own seed for each list, so that neither other queries nor threads change it.
            rng = random.Random(f"{self.seed}|{qid}|{place}")
            shuffled = [rng.sample(documents, len(documents)) for _ in range(self.shuffles)]
            ranks: Counter[int] = Counter()
            for given in shuffled or [documents]:
                step()
                counts["prompts"] += 1
                positions = self._order(qid, query, [texts[i] for i in given], place, counts)
                # Tang et al. 2024 find the central ranking, which the mean rank approximates.
                ranks.update({given[position]: rank for rank, position in enumerate(positions)})
            if not ranks:
                return [] if self.on_failure == "nan-free-bottom" else documents
            # sorted() is stable: equal mean ranks keep the given order.
            return sorted(documents, key=ranks.__getitem__)

        return self.schedule.rank(len(texts), order), counts

    def _order(self, qid: str, query: str, texts: list[str], place: Place, counts: Counter[str]) -> list[int]:
        """One order of the texts; empty if no reply could be read."""
        parsed, unreadable = read_reply(
            lambda messages: self.ask(qid, messages),
            *self._ask_to_fit(qid, query, texts),
            lambda reply: parse_ranking(reply, len(texts)),
            request=ANSWER_AGAIN.format(n=len(texts)),
            retries=self.retries,
        )
        counts.update(refusals=len(unreadable), retries=min(len(unreadable), self.retries))
        if parsed is not None:
            counts.update(missing=parsed.missing, duplicates=parsed.duplicates, unknown=parsed.unknown)
            return parsed.order
        if self.on_failure == "raise":
            raise UnreadableReplyError(
                f"query {qid!r}, documents {place[0] + 1} to {place[1]}: no ranking in the reply after {self.retries} "
                f"retries: {unreadable[-1][:200]!r}. Raise retries=, change prompt=, or let the run go on with "
                f"on_failure='keep' or 'nan-free-bottom'"
            )
        counts["failed"] += 1
        return []

    def _ask_to_fit(self, qid: str, query: str, texts: list[str]) -> tuple[list[Message], str]:
        """Asks with documents that are short enough for the budget, and for the server."""
        budget = self._document_budget(query, len(texts))
        attempts_left = SHRINK_ATTEMPTS
        while True:
            shown = self.reader.fit(texts, budget)
            messages = self.prompt(query, shown)
            try:
                reply = self.ask(qid, messages)
            except ContextOverflowError:
                if not attempts_left:
                    raise
                attempts_left -= 1
                budget = int(SHRINK * sum(map(self.reader.count, shown)))
            else:
                self.reader.note(texts, shown)
                return messages, reply

    def _document_budget(self, query: str, n: int) -> int | None:
        """Tokens left for the documents of a prompt."""
        if self.max_prompt_tokens is None:
            return None
        left = self.max_prompt_tokens - self.reader.count_messages(self.prompt(query, [""] * n))
        if left < n:
            raise ValueError(
                f"max_prompt_tokens={self.max_prompt_tokens} leaves no room for {n} documents beside the query and the "
                f"instructions; raise it, or lower list_size="
            )
        return left
