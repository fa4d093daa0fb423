"""Headings of Markdown texts, and which of them stand above a character."""

from __future__ import annotations

import sys

import pytest

from pyterrier_longdoc.common.documents import Document, Heading, as_document, headings_so_far, markdown_headings

TEXT = """Before any.

# One

```
# a comment in code
```

   ## One *point* two ##
Some words
- # in a list

> # in a quotation

Underlined
----------
#hashtag
"""


def test_headings_are_those_of_commonmark():
    found = markdown_headings(TEXT)
    assert [(heading.level, heading.text) for heading in found] == [
        (1, "One"),
        (2, "One *point* two"),
        (2, "Underlined"),
    ]
    assert [TEXT[heading.start :].split("\n")[0] for heading in found] == [
        "# One",
        "## One *point* two ##",
        "Underlined",
    ]


@pytest.mark.parametrize("end", ["\n", "\r\n", "\r"])
def test_headings_start_where_they_start_whatever_ends_lines(end):
    text = TEXT.replace("\n", end)
    assert [text[heading.start :].split(end)[0] for heading in markdown_headings(text)] == [
        "# One",
        "## One *point* two ##",
        "Underlined",
    ]


@pytest.mark.parametrize("text", ["", "no heading", "#no heading"])
def test_texts_without_headings(text):
    assert markdown_headings(text) == []
    assert headings_so_far([]) == [(0, "")]


def test_a_heading_stands_above_all_that_follows_until_one_of_its_level():
    headings = [Heading(5, 1, "A"), Heading(10, 3, "a"), Heading(20, 2, "b"), Heading(30, 1, "B")]
    assert headings_so_far(headings) == [
        *[(0, ""), (5, ""), (6, "A"), (10, "A"), (11, "A\na")],
        *[(20, "A"), (21, "A\nb"), (30, ""), (31, "B")],
    ]


def test_without_the_library_the_message_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "markdown_it", None)
    with pytest.raises(ImportError, match=r"pip install markdown-it.*extra \[markdown\]"):
        markdown_headings("# A")


def test_documents_are_their_content():
    assert Document("text", "title") == Document("text", "title") != Document("text", "other")
    assert len({Document("text", "title"), Document("text", "title"), Document("text")}) == 2
    assert len(Document("text", "title")) == 4
    assert as_document("text") == as_document(Document("text")) == Document("text")
