"""Prompts whose documents are short enough for a budget, and for the server."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from ..common.progress import counting
from ..common.servers import ContextOverflowError
from .evidence import best_passages
from .messages import DocumentReader, Message, Prompt, Shown

SHRINK = 0.75
SHRINK_ATTEMPTS = 8
"""A prompt that the server finds too long is sent again with 3/4 of its documents' tokens, down to a tenth."""

Reply = TypeVar("Reply")


@dataclass(frozen=True, eq=False)
class Fitting(Generic[Reply]):
    """Asks about documents, shortened where they must be.

    Args:
        send: `(qid, messages) -> reply`.
        reader: shortens the documents, and remembers what was shown.
        prompt: makes messages of a query and texts.
        max_prompt_tokens: the budget; None for no other than the server's.
    """

    send: Callable[[str, list[Message]], Reply]
    reader: DocumentReader
    prompt: Prompt
    max_prompt_tokens: int | None

    def ask(self, qid: str, query: str, texts: list[str]) -> tuple[list[Message], Reply]:
        """Asks with documents that are short enough for the budget, and for the server.

        Returns:
            The prompt, and the reply.

        Raises:
            ValueError: if the budget leaves no room for documents.
        """
        budget = self._document_budget(query, len(texts))
        attempts_left = SHRINK_ATTEMPTS
        while True:
            shown, messages = self._fitted(query, texts, budget)
            try:
                reply = self.send(qid, messages)
            except ContextOverflowError:
                if not attempts_left:
                    raise
                attempts_left -= 1
                budget = int(SHRINK * sum(self.reader.count(each.text) for each in shown))
            else:
                self.reader.note(query, texts, shown)
                return messages, reply

    def ask_again(
        self, qid: str, query: str, texts: list[str], messages: list[Message], reminder: list[Message]
    ) -> Reply:
        """Goes on with a conversation, in which the documents make room for its end."""
        budget = self._document_budget(query, len(texts), reminder)
        begun = messages if budget is None else self._fitted(query, texts, budget, reminder)[1]
        return self.send(qid, [*begun, *reminder])

    def _fitted(
        self, query: str, texts: list[str], budget: int | None, reminder: Sequence[Message] = ()
    ) -> tuple[list[Shown], list[Message]]:
        """The documents within the budget, and the prompt with them."""
        while True:
            shown = self.reader.fit(query, texts, budget)
            messages = self.prompt(query, [each.text for each in shown])
            if self.max_prompt_tokens is None or budget is None:
                return shown, messages
            # A whole may have more tokens than its parts together, and other templates other text around documents.
            over = self.reader.count_messages([*messages, *reminder]) - self.max_prompt_tokens
            if over <= 0:
                return shown, messages
            budget -= over
            self._check_room(budget, len(texts))

    def _document_budget(self, query: str, n: int, reminder: Sequence[Message] = ()) -> int | None:
        """Tokens left for the documents of a prompt."""
        if self.max_prompt_tokens is None:
            return None
        empty = [*self.prompt(query, [""] * n), *reminder]
        left = self.max_prompt_tokens - self.reader.count_messages(empty)
        if reminder and left < n:
            raise ContextOverflowError("the documents leave no room for a reminder")
        self._check_room(left, n)
        return left

    def _check_room(self, left: int, n: int) -> None:
        if left < n:
            fewer = ", or give schedule= with fewer documents in a prompt" if n > 1 else ""
            raise ValueError(
                f"max_prompt_tokens={self.max_prompt_tokens} leaves no room for {n} document{'s' * (n > 1)} beside the "
                f"query and the instructions; raise it{fewer}"
            )


def reader_for(asker: Any, pairs: Sequence[tuple[str, str]]) -> DocumentReader:
    """What shows the documents of a run; scores their passages if there is a choice, before any thread starts.

    Args:
        asker: with the arguments `tokenizer, max_doc_len, preselect, windows, verbose` of `RankGPT`.
        pairs: queries and texts.
    """
    if asker.preselect is None:
        return DocumentReader(asker.tokenizer, asker.max_doc_len)
    pairs = list(dict.fromkeys(pairs))
    with counting(type(asker).__name__, "document", len(pairs), shown=asker.verbose) as done:
        passages = best_passages(asker.preselect, asker.windows, pairs, on_pairs=done)
    return DocumentReader(asker.tokenizer, asker.max_doc_len, passages)
