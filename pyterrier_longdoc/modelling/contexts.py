"""What is read with every window of a text: fields that are repeated, a title for instance, and the headings above it.

A window is read as `context, line break, window`, each tokenized by itself, so that a text has the same tokens and
windows whether something is read with them or not. Word pieces have no token for a line break: with these nothing
stands between the two.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from ..common.documents import Document, Text, as_document, headings_so_far, markdown_headings, on_lines
from .texts import Context, Contexts, TokenizedText

Tokenize = Callable[[Sequence[str]], list[TokenizedText]]


def tokenize_documents(
    tokenize: Tokenize, texts: Sequence[Text], repeat_tokens: int, *, headings: bool
) -> list[TokenizedText]:
    """The tokens of texts and what is read with their windows; equal texts share one result.

    Args:
        tokenize: the model's tokenizer as a function, with character offsets where something needs them.
        texts: documents, or texts that have nothing but their headings to be read with their windows.
        repeat_tokens: most tokens of what is read with a window, line break included; it is cut at its end. 0 where
            nothing is.
        headings: whether the headings above a window's beginning are read with it, the highest first.
    """
    if not repeat_tokens:
        return tokenize([as_document(text).text for text in texts])
    documents = list(map(as_document, texts))
    distinct = list(dict.fromkeys(documents))
    bodies = tokenize([document.text for document in distinct])
    places = [_places(document, body.text, headings) for document, body in zip(distinct, bodies, strict=True)]
    repeated = dict.fromkeys(text for own in places for _, text in own if text)
    contexts = _contexts(tokenize, list(repeated), repeat_tokens)
    made = {}
    for document, body, own in zip(distinct, bodies, places, strict=True):
        if any(text for _, text in own):
            starts = np.array([start for start, _ in own])
            body = replace(body, contexts=Contexts(starts, [contexts[text] for _, text in own]))
        made[document] = body
    return [made[document] for document in documents]


def _places(document: Document, text: str, headings: bool) -> list[tuple[int, str]]:
    """From which character of the text on what is read with windows."""
    above = headings_so_far(markdown_headings(text)) if headings else [(0, "")]
    return [(start, on_lines(document.repeated, own)) for start, own in above]


def _contexts(tokenize: Tokenize, texts: list[str], limit: int) -> dict[str, Context]:
    """The contexts that texts make, by text; the empty one too."""
    word, with_break, *tokenized = tokenize(["a", "a\n", *texts])
    line_break = with_break.ids[len(word) :]
    most = max(0, limit - len(line_break))
    found = {"": Context(line_break[:0], "", 0, 0)}
    for text, whole in zip(texts, tokenized, strict=True):
        head = whole.head(most)
        cut = len(head) < len(whole) and head.offsets is not None
        shown = whole.text[: head.characters((0, len(head)))[1]] if cut else whole.text
        found[text] = Context(np.concatenate([head.ids, line_break]), shown, len(whole), len(head))
    return found
