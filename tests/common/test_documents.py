"""Documents: texts with what is read with each of their windows."""

from __future__ import annotations

from pyterrier_longdoc.common.documents import Document, as_document


def test_documents_are_their_content():
    assert Document("text", "title") == Document("text", "title") != Document("text", "other")
    assert len({Document("text", "title"), Document("text", "title"), Document("text")}) == 2
    assert len(Document("text", "title")) == 4
    assert as_document("text") == as_document(Document("text")) == Document("text")
