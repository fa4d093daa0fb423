"""Build prompts with documents truncated to a budget and to the limit of the server."""

from __future__ import annotations

import sys
import threading
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from ..common.coverage import Coverage, PairCoverage
from ..common.language import token_counter
from ..common.servers import ContextOverflowError
from ..modelling.excerpts import MARK, ChosenPassages
from .backends import Reply
from .prompts import Message

CHARACTERS_PER_TOKEN = 4
"""Used without a tokenizer: OpenAI's rule of thumb for English. Other scripts have fewer characters per token."""

TOKENS_PER_MESSAGE = 4
"""Tokens that chat templates add to a message: the role and start and end markers."""

SHRINK = 0.75
SHRINK_ATTEMPTS = 8
"""A prompt that is too long for the server is sent again with 3/4 of its documents' tokens, down to a tenth."""

# Threads must not use a tokenizer at the same time. One lock, because a lock per tokenizer could not be pickled.
_COUNTING = threading.Lock()

Send = Callable[[list[Message]], Reply]


class Tokens:
    """Counts tokens and truncates texts with a tokenizer; without one, four characters count as a token."""

    def __init__(self, tokenizer: Any = None) -> None:
        self._counts = token_counter(_estimate if tokenizer is None else tokenizer)

    def count(self, text: str) -> int:
        """Return the number of tokens of a text, without special tokens."""
        with _COUNTING:
            return self._counts([text])[0]

    def truncate(self, text: str, limit: int) -> str:
        """Truncate a text to at most `limit` tokens, found by bisection."""
        end = max(limit, 1) * CHARACTERS_PER_TOKEN
        while end < len(text) and self.count(text[:end]) <= limit:
            end *= 2
        ends = range(1, min(end, len(text)) + 1)
        return text[: bisect_right(ends, limit, key=lambda end: self.count(text[:end]))]

    def count_messages(self, messages: Sequence[Message]) -> int:
        """Return the number of tokens of a conversation."""
        return sum(self.count(message["content"]) + TOKENS_PER_MESSAGE for message in messages)


def _estimate(text: str) -> int:
    return -(-len(text) // CHARACTERS_PER_TOKEN)


def fair_limit(lengths: Sequence[int], budget: int) -> int:
    """Return the largest limit such that documents truncated to it have at most `budget` tokens together."""
    limits = range(max(lengths) + 1)
    return bisect_right(limits, budget, key=lambda limit: sum(min(length, limit) for length in lengths)) - 1


class Excerpt(NamedTuple):
    """The part of a document in a prompt; `truncated_by` names the limit that truncated it."""

    text: str
    tokens: int  # without marks
    passages: int = 1  # 1 for the beginning of the document
    truncated_by: str = ""


class PromptBudget(Tokens):
    """Builds the prompts of a run with truncated documents, and records the excerpts in them.

    The prompt, the tokenizer and the limits are those of `settings`, a `RankGPT`. `passages` maps a query and a text to
    its selected passages; None uses the beginning of documents.
    """

    def __init__(self, settings: Any, passages: Mapping[tuple[str, str], ChosenPassages] | None) -> None:
        super().__init__(settings.tokenizer)
        self.max_doc_len, self.max_prompt_tokens = settings.max_doc_len, settings.max_prompt_tokens
        self.chosen_by = f"preselect={settings.preselect!r}"
        self.prompt, self.passages = settings.prompt, passages
        self._length: dict[str, int] = {}
        self._server_room: dict[tuple[str, ...], int] = {}  # by query and texts
        self._shortest: dict[tuple[str, str], Excerpt] = {}
        self._lock = threading.Lock()

    def ask(self, send: Send, query: str, texts: Sequence[str], reminder: Sequence[Message] = ()) -> Reply:
        """Send a prompt with documents truncated to the budget and the server's limit, followed by a reminder."""
        key, attempts_left = (query, *texts), SHRINK_ATTEMPTS
        while True:
            # A retry with a reminder begins at the length that the server accepted.
            excerpts, messages = self._fit(query, texts, self._server_room.get(key), reminder)
            try:
                reply = send([*messages, *reminder])
            except ContextOverflowError:
                if not attempts_left:
                    raise
                attempts_left -= 1
                sent = sum(self.count(excerpt.text) for excerpt in excerpts)
                self._server_room[key] = max(len(texts), int(SHRINK * sent))
            else:
                with self._lock:
                    for text, excerpt in zip(texts, excerpts, strict=True):
                        shortest = self._shortest.get((query, text), excerpt)
                        self._shortest[query, text] = min(excerpt, shortest, key=lambda candidate: candidate.tokens)
                return reply

    def coverage(self, queries: int) -> Coverage:
        """Return the coverage of all prompts so far, by the shortest excerpt for each query and text."""
        coverage, rows = Coverage(), []
        for (query, text), excerpt in self._shortest.items():
            length, tokens = self._length_of(text), excerpt.tokens
            eligible = max(tokens, self._excerpt(query, text, sys.maxsize).tokens)
            truncated = Counter({self.chosen_by: length - eligible})
            truncated[f"max_doc_len={self.max_doc_len}"] = eligible - max(
                tokens, min(self.max_doc_len or eligible, eligible)
            )
            truncated[excerpt.truncated_by] += length - tokens - truncated.total()
            rows.append(PairCoverage(query, length, tokens, excerpt.passages, truncated=truncated))
        coverage.add(rows, {})  # its queries are counted below
        coverage.queries = queries
        return coverage

    def _fit(
        self, query: str, texts: Sequence[str], room: int | None, reminder: Sequence[Message]
    ) -> tuple[list[Excerpt], list[Message]]:
        """Return excerpts of at most `room` tokens in total, which the server allows, and the prompt with them."""
        limit, n = self.max_prompt_tokens, len(texts)
        room_by = f"max_prompt_tokens={limit}" if room is None else "the server"
        if limit is not None and room is None:
            room = limit - self.count_messages([*self.prompt(query, [""] * n), *reminder])
        while True:
            if limit is not None and room is not None and room < n:  # with a reminder, the reply counts as a failure
                raise (ContextOverflowError if reminder else ValueError)(
                    f"max_prompt_tokens={limit} leaves no room for {n} documents next to the query and the "
                    f"instructions: raise it, or use a schedule= with smaller prompts"
                )
            excerpts = self._shorten(query, texts, room, room_by)
            messages = self.prompt(query, [excerpt.text for excerpt in excerpts])
            # A prompt can have more tokens than the sum of its parts, and a template can have text around documents.
            excess = 0 if limit is None else self.count_messages([*messages, *reminder]) - limit
            if room is None or excess <= 0:
                return excerpts, messages
            room -= excess

    def _shorten(self, query: str, texts: Sequence[str], room: int | None, room_by: str) -> list[Excerpt]:
        """Truncate documents to `max_doc_len` each and `room` in total; long ones use what short ones leave."""
        lengths = [self._length_of(self._full_excerpt(query, text)) for text in texts]
        limit = max(lengths) if self.max_doc_len is None else self.max_doc_len
        truncated_by = f"max_doc_len={self.max_doc_len}"
        if room is not None and (share := fair_limit([min(length, limit) for length in lengths], room)) < limit:
            limit, truncated_by = share, room_by
        return [self._excerpt(query, text, limit)._replace(truncated_by=truncated_by) for text in texts]

    def _full_excerpt(self, query: str, text: str) -> str:
        """Return the excerpt of a document without a limit."""
        return text if self.passages is None else self.passages[query, text].excerpt(self.passages[query, text].best)

    def _excerpt(self, query: str, text: str, limit: int) -> Excerpt:
        length = self._length_of(text)
        if length <= limit and self._full_excerpt(query, text) == text:
            return Excerpt(text, length)
        if self.passages is None:
            part = self.truncate(text, limit)
            return Excerpt(part, self.count(part))
        of_pair = self.passages[query, text]
        numbers = of_pair.best_within(limit, self.count)
        if not numbers:  # only the beginning of the best passage, because there may be no room for marks
            part = self.truncate(of_pair.excerpt(of_pair.best[:1]).removeprefix(MARK).strip(), limit)
            return Excerpt(part, self.count(part.removesuffix(MARK)))
        parts = (self.count(text[slice(*of_pair.spans[number])]) for number in numbers)
        return Excerpt(of_pair.excerpt(numbers), min(sum(parts), length), len(numbers))

    def _length_of(self, text: str) -> int:
        """Return the number of tokens of a text (cached)."""
        if text not in self._length:
            self._length[text] = self.count(text)
        return self._length[text]
