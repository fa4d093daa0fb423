"""Ranking a list longer than a prompt: windows from the back to the front."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from .budget import DocumentReader
from .errors import ContextOverflowError, UnreadableReplyError
from .parsing import parse_ranking
from .prompts import Message, Prompt, reminder

ON_FAILURE = ("raise", "keep", "nan-free-bottom")
SHRINK = 0.75
SHRINK_ATTEMPTS = 8
"""A prompt that the server finds too long is sent again with 3/4 of its documents' tokens, down to a tenth."""

ANSWER_AGAIN = (
    "That answer could not be read. Answer again with the numbers of all {n} documents, the most relevant first, and "
    "nothing else, written like this: [2] > [1]"
)

Ask = Callable[[str, list[Message]], str]
"""`(qid, messages) -> text of the reply`."""


def sliding_windows(n: int, size: int, stride: int) -> list[tuple[int, int]]:
    """Windows over a list of `n`, the last one first; the final window starts at 0.

    Args:
        n: length of the list; an empty one has no window.
        size: most places in a window; 20 in Sun et al. 2023.
        stride: places from one window to the next; 10 in Sun et al. 2023. The best `size - stride` documents of a
            window are seen again by the next.

    Example:
        >>> sliding_windows(25, 20, 10)
        [(5, 25), (0, 15)]
    """
    windows = []
    start, end = max(n - size, 0), n
    while end > 0:
        windows.append((start, end))
        if start == 0:
            break
        start, end = max(start - stride, 0), end - stride
    return windows


@dataclass
class Counts:
    """What happened while one query was ranked.

    Attributes:
        windows: prompts for an order of some documents.
        missing: ids that replies did not name; those documents kept their order, behind the named ones.
        duplicates: ids that a reply named again.
        unknown: ids in replies that no document had.
        refusals: replies without a readable ranking.
        retries: further calls because of those.
        failed: prompts without a readable reply after all retries.
    """

    windows: int = 0
    missing: int = 0
    duplicates: int = 0
    unknown: int = 0
    refusals: int = 0
    retries: int = 0
    failed: int = 0


@dataclass
class Ranking:
    """The order of one query's documents.

    Attributes:
        order: positions in the given list, best first.
        unranked: positions of documents in windows that failed, where those go to the bottom.
        counts: what happened.
    """

    order: list[int]
    unranked: list[int] = field(default_factory=list)
    counts: Counts = field(default_factory=Counts)


@dataclass(frozen=True, eq=False)
class WindowRanker:
    """Ranks the documents of one query at a time; knows nothing of frames, caches or threads.

    Args:
        ask: sends messages to a model.
        prompt: makes the messages.
        reader: shortens documents.
        window_size: most documents in a prompt.
        stride: documents from one window to the next.
        max_prompt_tokens: most tokens in a prompt; None for no limit.
        retries: further calls after an unreadable reply, each with a reminder.
        on_failure: `"raise"`, `"keep"` (the window keeps its order) or `"nan-free-bottom"` (its documents are taken out
            of the list and count as unranked).
        shuffles: ask about each window so many times in random orders and average the ranks; 0 asks once in the
            given order. Permutation self-consistency, Tang et al. 2024; they find the central ranking, which the
            mean rank approximates.
        seed: of those orders.
    """

    ask: Ask
    prompt: Prompt
    reader: DocumentReader
    window_size: int = 20
    stride: int = 10
    max_prompt_tokens: int | None = None
    retries: int = 2
    on_failure: str = "raise"
    shuffles: int = 0
    seed: int = 42

    def prompts(self, n: int) -> int:
        """How many orders are asked for to rank `n` documents, retries not counted."""
        return sum(end - start > 1 for start, end in self._windows(n)) * max(self.shuffles, 1)

    def rank(self, qid: str, query: str, texts: Sequence[str], on_prompt: Callable[[], None] = lambda: None) -> Ranking:
        """Ranks documents that are given in the order of the first stage.

        Args:
            qid: names the query in errors and in the ledger.
            query: its text.
            texts: the documents.
            on_prompt: called before each order is asked for.

        Raises:
            UnreadableReplyError: if a window has no readable reply and `on_failure` is `"raise"`.
            ValueError: if even empty documents would not fit into the prompt.
        """
        order, ranking = list(range(len(texts))), Ranking([])
        for start, end in self._windows(len(texts)):
            window = order[start:end]
            if len(window) < 2:
                continue
            shown = [texts[position] for position in window]
            permutation = self._agreed_order(qid, query, shown, (start, end), ranking.counts, on_prompt)
            if permutation is not None:
                order[start:end] = [window[place] for place in permutation]
            elif self.on_failure == "nan-free-bottom":
                del order[start:end]
                ranking.unranked = window + ranking.unranked
        ranking.order = order
        return ranking

    def _windows(self, n: int) -> list[tuple[int, int]]:
        return sliding_windows(n, self.window_size, self.stride)

    def _agreed_order(
        self,
        qid: str,
        query: str,
        texts: list[str],
        window: tuple[int, int],
        counts: Counts,
        on_prompt: Callable[[], None],
    ) -> list[int] | None:
        """The places of a window, best first, averaged over its shuffles; None if no reply could be read."""
        total = [0] * len(texts)
        readable = 0
        for given in self._given_orders(qid, len(texts), window):
            on_prompt()
            counts.windows += 1
            order = self._order(qid, query, [texts[place] for place in given], window, counts)
            if order is None:
                counts.failed += 1
                continue
            readable += 1
            for rank, position in enumerate(order):
                total[given[position]] += rank
        # sorted() is stable: equal mean ranks keep the given order.
        return sorted(range(len(texts)), key=total.__getitem__) if readable else None

    def _given_orders(self, qid: str, n: int, window: tuple[int, int]) -> list[list[int]]:
        if not self.shuffles:
            return [list(range(n))]
        # Of its own seed for each window, so that neither other queries nor threads change it.
        rng = random.Random(f"{self.seed}|{qid}|{window}")
        return [rng.sample(range(n), n) for _ in range(self.shuffles)]

    def _order(
        self, qid: str, query: str, texts: list[str], window: tuple[int, int], counts: Counts
    ) -> list[int] | None:
        """One order of `texts`; None if no reply could be read."""
        messages, reply = self._ask_to_fit(qid, query, texts)
        for attempt in range(self.retries + 1):
            if attempt:
                counts.retries += 1
                messages = reminder(messages, reply, ANSWER_AGAIN.format(n=len(texts)))
                try:
                    reply = self.ask(qid, messages)
                except ContextOverflowError:  # no room for a reminder
                    break
            parsed = parse_ranking(reply, len(texts))
            if parsed is not None:
                counts.missing += parsed.missing
                counts.duplicates += parsed.duplicates
                counts.unknown += parsed.unknown
                return parsed.order
            counts.refusals += 1
        if self.on_failure == "raise":
            raise UnreadableReplyError(
                f"query {qid!r}, documents {window[0] + 1} to {window[1]}: no ranking in the reply after "
                f"{self.retries} retries: {reply[:200]!r}. Raise retries=, change prompt=, or let the run go on with "
                f"on_failure='keep' or 'nan-free-bottom'"
            )
        return None

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
                budget = int(SHRINK * sum(map(self.reader.tokens.count, shown)))
            else:
                self.reader.note(texts, shown)
                return messages, reply

    def _document_budget(self, query: str, n: int) -> int | None:
        """Tokens left for the documents of a prompt."""
        if self.max_prompt_tokens is None:
            return None
        left = self.max_prompt_tokens - self.reader.tokens.of_messages(self.prompt(query, [""] * n))
        if left < n:
            raise ValueError(
                f"max_prompt_tokens={self.max_prompt_tokens} leaves no room for {n} documents beside the query and the "
                f"instructions; raise it, or lower window_size={self.window_size}"
            )
        return left
