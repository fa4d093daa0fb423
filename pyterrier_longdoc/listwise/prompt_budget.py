"""Prompts whose documents are short enough for a budget, and for the server."""

from __future__ import annotations

import threading
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from ..common.coverage import Coverage, Reading
from ..common.language import token_counter
from ..common.servers import ContextOverflowError
from .backends import Reply
from .passages import MARK, Passages
from .prompts import Message, Prompt

CHARACTERS_PER_TOKEN = 4
"""Without a tokenizer: OpenAI's rule of thumb for English. Other scripts have fewer characters per token."""

TOKENS_PER_MESSAGE = 4
"""What chat templates add around a message: role and marks of begin and end."""

SHRINK = 0.75
SHRINK_ATTEMPTS = 8
"""A prompt that the server finds too long is sent again with 3/4 of its documents' tokens, down to a tenth."""

# Tokenizers refuse to be used by two threads at the same time; a lock of each could not be pickled.
_COUNTING = threading.Lock()

Send = Callable[[list[Message]], Reply]


class Tokens:
    """Counts and cuts by the tokens of a model, as well as they are known; None counts four characters as a token."""

    def __init__(self, tokenizer: Any = None) -> None:
        self._counts = token_counter(_estimate if tokenizer is None else tokenizer)

    def count(self, text: str) -> int:
        """Return the number of tokens of a text, without special tokens."""
        with _COUNTING:
            return self._counts([text])[0]

    def cut(self, text: str, limit: int) -> str:
        """Return the longest beginning of a text that was found to have at most `limit` tokens."""
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
    """Return the largest limit so that documents cut to it have at most `budget` tokens together."""
    limits = range(max(lengths) + 1)
    return bisect_right(limits, budget, key=lambda limit: sum(min(length, limit) for length in lengths)) - 1


class Shown(NamedTuple):
    """What of a document stands in a prompt: text, tokens without marks, passages (1 of a beginning), what cut it."""

    text: str
    tokens: int
    passages: int = 1
    cut_by: str = ""


class PromptBudget(Tokens):
    """Makes the prompts of a run, with documents that are short enough, and remembers how much of each was shown.

    `passages` has for each query and text those that may be shown, which `chosen_by` tells; None shows beginnings. The
    limits are `RankGPT`'s.
    """

    def __init__(
        self,
        prompt: Prompt,
        tokenizer: Any,
        max_doc_len: int | None,
        max_prompt_tokens: int | None,
        passages: Mapping[tuple[str, str], Passages] | None = None,
        chosen_by: str = "",
    ) -> None:
        super().__init__(tokenizer)
        self.chosen_by = chosen_by
        self.prompt = prompt
        self.max_doc_len = max_doc_len
        self.max_prompt_tokens = max_prompt_tokens
        self.passages = passages
        self._length: dict[str, int] = {}
        self._least_shown: dict[tuple[str, str], Shown] = {}
        self._lock = threading.Lock()

    def ask(self, send: Send, query: str, texts: Sequence[str]) -> tuple[list[Message], Reply]:
        """Ask with documents that are short enough for the budget, and for the server; return prompt and reply."""
        room = self._room(query, len(texts))
        attempts_left = SHRINK_ATTEMPTS
        while True:
            shown, messages = self._fitted(query, texts, room)
            try:
                reply = send(messages)
            except ContextOverflowError:
                if not attempts_left:
                    raise
                attempts_left -= 1
                room = int(SHRINK * sum(self.count(each.text) for each in shown))
            else:
                self._note(query, texts, shown)
                return messages, reply

    def ask_again(
        self, send: Send, query: str, texts: Sequence[str], messages: list[Message], reminder: list[Message]
    ) -> Reply:
        """Go on with a conversation, in which the documents make room for its end."""
        room = self._room(query, len(texts), reminder)
        begun = messages if room is None else self._fitted(query, texts, room, reminder)[1]
        return send([*begun, *reminder])

    def coverage(self, queries: int) -> Coverage:
        """Return what was read of the texts shown so far, each for each of its queries, with the shortest length."""
        coverage = Coverage(queries=queries)
        for (_, text), shown in self._least_shown.items():
            whole = self._tokens_of(text)
            coverage.add(Reading(whole, shown.tokens, shown.passages, cut={shown.cut_by: whole - shown.tokens}))
        return coverage

    def _room(self, query: str, n: int, reminder: Sequence[Message] = ()) -> int | None:
        """Return the tokens left for the documents of a prompt; None where nothing bounds them."""
        if self.max_prompt_tokens is None:
            return None
        empty = [*self.prompt(query, [""] * n), *reminder]
        left = self.max_prompt_tokens - self.count_messages(empty)
        return self._checked(left, n, reminder)

    def _checked(self, left: int, n: int, reminder: Sequence[Message]) -> int:
        """Return the tokens that are left; a reminder for which there is no room is a failure of the reply."""
        if left < n:
            raise (ContextOverflowError if reminder else ValueError)(
                f"max_prompt_tokens={self.max_prompt_tokens} leaves no room for {n} document{'s' * (n > 1)} beside the "
                f"query and the instructions: raise it, or give schedule= with fewer documents in a prompt"
            )
        return left

    def _fitted(
        self, query: str, texts: Sequence[str], room: int | None, reminder: Sequence[Message] = ()
    ) -> tuple[list[Shown], list[Message]]:
        """Return the documents within so many tokens, and the prompt with them."""
        while True:
            shown = self._shorten(query, texts, room)
            messages = self.prompt(query, [each.text for each in shown])
            if self.max_prompt_tokens is None or room is None:
                return shown, messages
            # A whole may have more tokens than its parts together, and other templates other text around documents.
            over = self.count_messages([*messages, *reminder]) - self.max_prompt_tokens
            if over <= 0:
                return shown, messages
            room = self._checked(room - over, len(texts), reminder)

    def _shorten(self, query: str, texts: Sequence[str], room: int | None) -> list[Shown]:
        """Shorten documents to `max_doc_len` each and to `room` together; short ones leave their share to long ones."""
        lengths = [self._tokens_of(self._all(query, text)) for text in texts]
        limit = max(lengths) if self.max_doc_len is None else self.max_doc_len
        cut_by = f"max_doc_len={self.max_doc_len}"
        if room is not None and (share := fair_limit([min(length, limit) for length in lengths], room)) < limit:
            limit = share
            cut_by = f"max_prompt_tokens={self.max_prompt_tokens}" if self.max_prompt_tokens else "the server"
        cut_by = cut_by if self.passages is None else self.chosen_by
        return [self._shown(query, text, limit)._replace(cut_by=cut_by) for text in texts]

    def _all(self, query: str, text: str) -> str:
        """Return what is shown of a document where there is room."""
        return text if self.passages is None else self.passages[query, text].shown(self.passages[query, text].best)

    def _shown(self, query: str, text: str, limit: int) -> Shown:
        whole = self._tokens_of(text)
        if whole <= limit and self._all(query, text) == text:
            return Shown(text, whole)
        if self.passages is None:
            part = self.cut(text, limit)
            return Shown(part, self.count(part))
        of_pair = self.passages[query, text]
        chosen = of_pair.within(limit, self.count)
        if not chosen:  # the beginning of the best passage, without marks for which there may be no room
            part = self.cut(of_pair.shown(of_pair.best[:1]).removeprefix(MARK).strip(), limit)
            return Shown(part, self.count(part.removesuffix(MARK)))
        parts = (self.count(text[slice(*of_pair.spans[number])]) for number in chosen)
        return Shown(of_pair.shown(chosen), min(sum(parts), whole), len(chosen))

    def _tokens_of(self, text: str) -> int:
        """Return the number of tokens of a text, counted once."""
        if text not in self._length:
            self._length[text] = self.count(text)
        return self._length[text]

    def _note(self, query: str, texts: Sequence[str], shown: Sequence[Shown]) -> None:
        """Remember what a model has read of documents."""
        with self._lock:
            for text, part in zip(texts, shown, strict=True):
                least = self._least_shown.get((query, text), part)
                self._least_shown[query, text] = min(part, least, key=lambda each: each.tokens)
