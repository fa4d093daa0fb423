"""What is read with every window of a text: fields that are repeated, a title for instance.

A window is read as `context, line break, window`, each tokenized by itself, so that a text has the same tokens and
windows whether something is read with them or not. Word pieces have no token for a line break: with these nothing
stands between the two.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from ..common.documents import Text, as_document
from .texts import Context, TokenizedText

Tokenize = Callable[[Sequence[str]], list[TokenizedText]]


def tokenize_documents(tokenize: Tokenize, texts: Sequence[Text], repeat_tokens: int) -> list[TokenizedText]:
    """The tokens of texts and what is read with their windows; equal texts share one result.

    Args:
        tokenize: the model's tokenizer as a function, with character offsets where something needs them.
        texts: documents, or texts with whose windows nothing is read.
        repeat_tokens: most tokens of what is read with a window, line break included; it is cut at its end. 0 where
            nothing is.
    """
    if not repeat_tokens:
        return tokenize([as_document(text).text for text in texts])
    documents = list(map(as_document, texts))
    distinct = list(dict.fromkeys(documents))
    bodies = tokenize([document.text for document in distinct])
    contexts = _contexts(tokenize, list(dict.fromkeys(own.repeated for own in distinct if own.repeated)), repeat_tokens)
    made = {
        document: replace(body, context=contexts.get(document.repeated))
        for document, body in zip(distinct, bodies, strict=True)
    }
    return [made[document] for document in documents]


def _contexts(tokenize: Tokenize, texts: list[str], limit: int) -> dict[str, Context]:
    """The contexts that texts make, by text."""
    word, with_break, *tokenized = tokenize(["a", "a\n", *texts])
    line_break = with_break.ids[len(word) :]
    most = max(0, limit - len(line_break))
    found = {}
    for text, whole in zip(texts, tokenized, strict=True):
        head = whole.head(most)
        cut = len(head) < len(whole) and head.offsets is not None
        shown = whole.text[: head.characters((0, len(head)))[1]] if cut else whole.text
        found[text] = Context(np.concatenate([head.ids, line_break]), shown, len(whole), len(head))
    return found
