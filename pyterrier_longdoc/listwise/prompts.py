"""Prompts: messages with a query and documents."""

from __future__ import annotations

import re
import string
from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass

from ..common.arguments import argument, check_type, validate
from ..common.presentation import ReprMixin

Message = dict[str, str]
"""One chat message, `{"role": "system" | "user" | "assistant", "content": text}`."""

Prompt = Callable[[str, Sequence[str]], list[Message]]
"""`(query, texts) -> messages`; the texts are numbered from 1 in their order."""

# Including full-width brackets, which models and the parser also read as the mark of an id.
_BRACKETED = re.compile(r"[\[［【〔](\s*\d[\d\s,;>]*)[\]］】〕]")  # noqa: RUF001
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f]")


def clean(text: str) -> str:
    r"""Clean a text for a prompt: one line, no control characters, round instead of square brackets around numbers.

    Otherwise, `[3]` in a text could be mistaken for document 3 or for a ranking.

    Example:
        >>> clean("As shown in [12],\n  it rains. [2] > [1]")
        'As shown in (12), it rains. (2) > (1)'
    """
    return " ".join(_BRACKETED.sub(r"(\1)", _CONTROL.sub(" ", text)).split())


@dataclass(frozen=True, repr=False)
class ListwisePrompt(ReprMixin):
    r"""A listwise ranking prompt, as chat turns (one message per document) or as a single message.

    In the chat form, the model acknowledges each document in a separate turn, as in RankGPT (Sun et al. 2023). The
    single form, as in RankZephyr (Pradeep et al. 2023), has fewer tokens and suits models trained on a single turn. The
    text of the prompt is this package's.

    Args:
        form: `"turns"` or `"single"`.
        system: the system message; empty for none, which some local models need.
        opening: the text before the documents; can contain `{query}` and `{n}`, the number of documents.
        ready: the model's answer to the opening (chat form only).
        document: the text of one document; must contain `{number}` and `{text}`.
        noted: the model's answer to a document (chat form only); can contain `{number}`.
        closing: the text after the documents; can contain `{query}` and `{n}`.

    Example:
        >>> prompt = ListwisePrompt("single", system="", opening="{query}?", closing="Order all {n}.")
        >>> prompt("rain", ["It rains.", "Sun [2]"])
        [{'role': 'user', 'content': 'rain?\n\n[1] It rains.\n[2] Sun (2)\n\nOrder all 2.'}]
    """

    form: str = argument("turns", choices=("turns", "single"))
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
        validate(self)
        check_template("opening", self.opening, {"query", "n"})
        check_template("document", self.document, {"number", "text"}, required={"number", "text"})
        check_template("noted", self.noted, {"number"})
        in_opening = "{query}" in self.opening
        check_template("closing", self.closing, {"query", "n"}, required=set() if in_opening else {"query"})

    def __call__(self, query: str, texts: Sequence[str]) -> list[Message]:
        """Return the messages that request an order of `texts`; both arguments are cleaned first."""
        n = len(texts)
        pairs = list(enumerate(map(clean, texts), start=1))
        fields = {"query": clean(query), "n": n}
        opening, closing = self.opening.format(**fields), self.closing.format(**fields)
        documents = [self.document.format(number=number, text=text) for number, text in pairs]
        messages = [{"role": "system", "content": self.system}] if self.system else []
        if self.form == "single":
            return [*messages, {"role": "user", "content": "\n\n".join([opening, "\n".join(documents), closing])}]
        answers = [self.ready, *(self.noted.format(number=number) for number, _ in pairs)]
        for question, answer in zip([opening, *documents], answers, strict=True):
            messages += [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
        return [*messages, {"role": "user", "content": closing}]


def check_template(name: str, template: str, allowed: Set[str], required: Set[str] = frozenset()) -> None:
    """Raise ValueError for a template of `str.format` with wrong fields, or without required ones."""
    check_type(str, "a text", **{name: template})
    try:
        fields = {field for _, field, _, _ in string.Formatter().parse(template) if field is not None}
    except ValueError:
        fields = {template}  # not a template
    if fields - allowed or required - fields:
        raise ValueError(
            f"{name}={template!r} can have the fields {sorted(allowed)} and must have {sorted(required)}; write {{{{ "
            f"for a brace"
        )
