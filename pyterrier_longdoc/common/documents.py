"""A document with fields that are read with each of its windows, and the headings of its text."""

from __future__ import annotations

import re
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

from .files import import_extra

_LINE_END = re.compile(r"\r\n?|\n")
_NO_SPACE = re.compile(r"\S")


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


class Heading(NamedTuple):
    """A heading of a Markdown text.

    Attributes:
        start: character at which it begins.
        level: 1 to 6.
        text: what it says, as it is written.
    """

    start: int
    level: int
    text: str


def markdown_headings(text: str) -> list[Heading]:
    r"""The headings of a Markdown text (CommonMark), underlined ones too; not those in code, lists or quotations.

    Raises:
        ImportError: if markdown-it-py is missing.

    Example:
        >>> markdown_headings("Words.\n\n## A part\nMore.")
        [Heading(start=8, level=2, text='A part')]
    """
    library = import_extra("markdown_it", "markdown", "headings are found by markdown-it-py")
    parser = library.MarkdownIt("commonmark")
    parser.core.ruler.enableOnly(["normalize", "block"])
    tokens = parser.parse(text)
    lines = [0, *(match.end() for match in _LINE_END.finditer(text))]
    found = []
    for token, content in pairwise(tokens):
        if token.type == "heading_open" and token.level == 0:
            start = next(_NO_SPACE.finditer(text, lines[token.map[0]])).start()
            found.append(Heading(start, int(token.tag[1:]), content.content))
    return found


def headings_so_far(headings: list[Heading]) -> list[tuple[int, str]]:
    r"""From which character on which headings stand above: those of the part that a window begins in.

    A window that begins with a heading has only those of the parts around it above.

    Example:
        >>> headings_so_far([Heading(0, 1, "A"), Heading(9, 2, "B"), Heading(20, 1, "C")])
        [(0, ''), (1, 'A'), (9, 'A'), (10, 'A\nB'), (20, ''), (21, 'C')]
    """
    above: list[Heading] = []
    found = [(0, "")]
    for heading in headings:
        above = [other for other in above if other.level < heading.level]
        found.append((heading.start, on_lines(*(other.text for other in above))))
        above.append(heading)
        found.append((heading.start + 1, on_lines(*(other.text for other in above))))
    return found if not headings or headings[0].start else found[1:]
