"""A document with fields that are read with each of its windows."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Document:
    """A text that windows are made of, and what is read with each of them.

    Attributes:
        text: the text.
        repeated: a title, for instance.
    """

    text: str
    repeated: str = ""

    def __len__(self) -> int:
        return len(self.text)


Text = str | Document
"""A text with nothing beside it, or a document."""


def as_document(text: Text) -> Document:
    """The document itself, or one of a text alone."""
    return text if isinstance(text, Document) else Document(text)


def is_blank(text: Text) -> bool:
    """Whether there is nothing but white space, in what is read with its windows neither."""
    document = as_document(text)
    return not (document.text.strip() or document.repeated.strip())


def on_lines(*parts: str) -> str:
    """What is repeated, each part on a line of its own; empty ones are left out."""
    return "\n".join(filter(None, parts))
