"""From a query and documents to chat messages."""

from __future__ import annotations

import re
import string
from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass

Message = dict[str, str]
"""One chat message, `{"role": "system" | "user" | "assistant", "content": text}`."""

Prompt = Callable[[str, Sequence[str]], list[Message]]
"""`(query, texts) -> messages`; the texts are numbered from 1 in their order."""

# Full-width brackets too: models and the parser take them for the mark of an id as well.
_ID = re.compile(r"[\[［【〔](\s*\d[\d\s,;>]*)[\]］】〕]")  # noqa: RUF001
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f]")


def clean(text: str) -> str:
    r"""A text that can stand in a prompt: one line, without control characters, bracketed numbers in round brackets.

    Without the last, a text that contains `[3]` could pass for document 3, or for a ranking.

    Example:
        >>> clean("As shown in [12],\n  it rains. [2] > [1]")
        'As shown in (12), it rains. (2) > (1)'
    """
    return " ".join(_ID.sub(r"(\1)", _CONTROL.sub(" ", text)).split())


@dataclass(frozen=True)
class ListwisePrompt:
    r"""A listwise ranking prompt, as chat turns (one message per document) or as a single message.

    In the chat form the model acknowledges each document in a turn of its own, as in RankGPT (Sun et al. 2023); the
    single form, as in RankZephyr (Pradeep et al. 2023), takes fewer tokens and suits models trained on one turn. The
    wording is this package's own.

    Args:
        form: `"turns"` or `"single"`.
        system: the system message; empty for none, which some local models need.
        opening: before the documents; may use `{query}` and `{n}`, the number of documents.
        ready: the model's answer to it (chat form only).
        document: one document; must use `{number}` and `{text}`.
        noted: the model's answer to a document (chat form only); may use `{number}`.
        closing: after the documents; may use `{query}` and `{n}`.

    Raises:
        ValueError: for an unknown form, or a template with other or missing fields.

    Example:
        >>> prompt = ListwisePrompt("single", system="", opening="{query}?", closing="Order all {n}.")
        >>> prompt("rain", ["It rains.", "Sun [2]"])
        [{'role': 'user', 'content': 'rain?\n\n[1] It rains.\n[2] Sun (2)\n\nOrder all 2.'}]
    """

    form: str = "turns"
    system: str = "You are a search expert who orders documents by how well they answer a query."
    opening: str = (
        "Query: {query}\n\nBelow are {n} documents that a search engine found for it. Each begins with its number in "
        "square brackets."
    )
    ready: str = "I am ready to read the documents."
    document: str = "[{number}] {text}"
    noted: str = "I have read document [{number}]."
    closing: str = (
        "Query: {query}\n\nThose were all {n} documents. Put them in order, the most relevant to the query first. "
        "Answer with the numbers of all {n} documents and nothing else, written like this: [2] > [1]"
    )

    def __post_init__(self) -> None:
        if self.form not in ("turns", "single"):
            raise ValueError(f"form={self.form!r} is unknown; choose one of turns, single")
        check_fields("opening", self.opening, {"query", "n"})
        check_fields("document", self.document, {"number", "text"}, required={"number", "text"})
        check_fields("noted", self.noted, {"number"})
        check_fields("closing", self.closing, {"query", "n"})
        if "{query}" not in self.opening + self.closing:
            raise ValueError("neither opening= nor closing= uses {query}: the model would not see the query")

    def __call__(self, query: str, texts: Sequence[str]) -> list[Message]:
        """The messages that ask for an order of `texts`; both arguments are cleaned first."""
        fields = {"query": clean(query), "n": len(texts)}
        opening, closing = self.opening.format(**fields), self.closing.format(**fields)
        shown = [self.document.format(number=i, text=clean(text)) for i, text in enumerate(texts, 1)]
        messages = [{"role": "system", "content": self.system}] if self.system else []
        if self.form == "single":
            content = f"{opening}\n\n{chr(10).join(shown)}\n\n{closing}"
            return [*messages, {"role": "user", "content": content}]
        messages += [{"role": "user", "content": opening}, {"role": "assistant", "content": self.ready}]
        for i, document in enumerate(shown, 1):
            messages += [
                {"role": "user", "content": document},
                {"role": "assistant", "content": self.noted.format(number=i)},
            ]
        return [*messages, {"role": "user", "content": closing}]


def check_fields(name: str, template: str, allowed: Set[str], required: Set[str] = frozenset()) -> None:
    """Checks the fields of a template for `str.format`.

    Raises:
        ValueError: for fields other than the allowed ones, or required ones that are missing.
    """
    try:
        used = {field for _, field, _, _ in string.Formatter().parse(template) if field is not None}
    except ValueError as error:
        raise ValueError(f"{name}={template!r} is no template: {error}; write {{{{ for a brace") from None
    if used - allowed or required - used:
        raise ValueError(
            f"{name}={template!r} uses the fields {sorted(used)}; it may use {sorted(allowed)}"
            + (f" and must use {sorted(required)}" if required else "")
        )


def reminder(messages: Sequence[Message], reply: str, request: str) -> list[Message]:
    """The same conversation with an unreadable reply and the request to answer again.

    Args:
        messages: what was asked.
        reply: what came back; its first 2000 characters are repeated to the model.
        request: what to do now.
    """
    # Some servers refuse messages that are empty or end in white space.
    answered = reply.strip()[:2000].rstrip() or "(no answer)"
    return [*messages, {"role": "assistant", "content": answered}, {"role": "user", "content": request}]
