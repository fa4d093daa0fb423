"""Documents as passages, for passage indexes and passage rerankers, with nothing lost."""

# Without `from __future__ import annotations`: what the fields are must be known in the modules of subclasses too.

from dataclasses import KW_ONLY, dataclass
from typing import Any

import numpy as np
import pandas as pd
import pyterrier as pt

from ..common.arguments import argument, check_type
from ..common.frames import Text, TextField, as_document, documents_of, field_names, on_lines, window_fields
from ..common.presentation import Presented, changed_arguments
from ..modelling.tokens import Span, tokenized
from ..modelling.windows import SlidingWindows, Windows

SEPARATOR = "%p"
"""Stands in PyTerrier's names of passages between the document and the number of the passage."""


@dataclass(eq=False, repr=False)
class Passages(Presented, pt.Transformer):
    """Makes each document's windows rows of their own: `d1%p0`, `d1%p1`, ..., as PyTerrier names passages.

    It reads documents (`docno` and the text), to be indexed, or results (`qid, docno` and the text, perhaps `score`),
    to be reranked. `pt.text.max_passage()` and its relatives make documents of passages again. Each passage has all
    other columns of its document. The new column `passage_span` has its characters `(start, end)` in the document.

    Unless `max_windows` of the windows leaves some out, every character is in a passage: what is between two windows is
    at the end of the first, so that disjoint passages joined are the text. A document without text is an empty passage.

    Args:
        windows: how documents are cut. Default: as `pt.text.sliding()`, 150 tokens that begin every 75.
        tokenizer: a fast Hugging Face tokenizer, or its name, in whose tokens windows are. None: words and punctuation
            marks.
        text_field: the column with the text, or a tuple of columns that are joined by a space. The passage is in this
            column, or in `text` where several are cut.
        repeat: columns of `text_field`, such as the title, that are put before each passage, each as a line.

    Example:
        `ld.Passages(ld.SentenceWindows(max_tokens=100), repeat="title", text_field=("title", "text")) >> indexer`.
    """

    windows: Windows = argument(SlidingWindows(150, 75))
    _: KW_ONLY
    tokenizer: Any = None
    text_field: TextField = "text"
    repeat: TextField | None = None

    def __post_init__(self) -> None:
        check_type(Windows, "windows, e.g. SlidingWindows(150, 75)", windows=self.windows)
        window_fields(self.text_field, self.repeat)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(changed_arguments(self, ('tokenizer',)))})"

    def transform(self, inp: pd.DataFrame) -> pd.DataFrame:
        """Return a row for each passage, in the order of documents and passages, with a new index.

        Raises:
            pt.validate.InputValidationError: if a column is missing.
            ValueError: for a docno with `%p`, of which PyTerrier could make no document again.
        """
        fields = field_names(self.text_field)
        with pt.validate.any(inp, context=self) as v:
            v.result_frame(fields)
            v.document_frame(fields)
        named = inp["docno"].astype(str)
        if len(clashes := named[named.str.contains(SEPARATOR, regex=False)]):
            raise ValueError(
                f"Passages: docno {clashes.iloc[0]!r} holds {SEPARATOR!r}, which names a passage: rename it"
            )
        documents = documents_of(inp, self.text_field, self.repeat, None) if len(inp) else []
        passages = list(map(self._passages, documents))
        rows = np.repeat(np.arange(len(inp)), [len(of_document) for of_document in passages])
        names = [f"{docno}{SEPARATOR}{i}" for docno, of in zip(named, passages, strict=True) for i in range(len(of))]
        column, *others = window_fields(self.text_field, self.repeat)
        flat = [passage for of_document in passages for passage in of_document]
        texts, spans = [text for text, _ in flat], pd.Series([span for _, span in flat], dtype=object)
        out = inp.iloc[rows].reset_index(drop=True)
        return out.assign(**{"docno": names, "text" if others else column: texts, "passage_span": spans})

    def _passages(self, document: Text) -> list[tuple[str, Span]]:
        """Return the text and the characters of each passage."""
        source = as_document(document)
        tokens = tokenized(self.tokenizer, source.text)
        starts = [*(tokens.characters((i, i + 1))[0] for i in range(len(tokens))), len(source)]
        spans = [(starts[start] if start else 0, starts[end]) for start, end in self.windows(tokens)]
        return [(on_lines(source.repeated, source.text[start:end]), (start, end)) for start, end in spans]
