"""Split documents into passages for passage indexes and passage rerankers, without losing text."""

# No `from __future__ import annotations`: annotations must also be evaluable in the modules of subclasses.

from dataclasses import KW_ONLY, dataclass
from typing import Any

import pandas as pd
import pyterrier as pt

from ..common.arguments import argument, check_type
from ..common.files import full_name
from ..common.frames import Document, TextField, documents_of, field_names, join_lines, repeated, window_fields
from ..common.presentation import NotebookMixin
from ..modelling.tokens import Span, tokenized
from ..modelling.windows import SlidingWindows, Windows


@dataclass(eq=False, repr=False)
class Passages(NotebookMixin, pt.Transformer):
    """Splits each document into passages, one per row, named as in PyTerrier: `d1%p0`, `d1%p1`, ...

    The input is documents for indexing (`docno` and the text) or results for reranking (also with `qid`). Other columns
    are kept. `pt.text.max_passage()` and similar transformers aggregate passages to documents again. The new column
    `passage_span` holds the characters `(start, end)` of a passage in its document.

    Unless the `max_windows` of the windows leaves some out, every character is in a passage: text between two windows
    belongs to the first one, so joining disjoint passages restores the text. An empty document becomes one empty
    passage.

    Args:
        windows: how documents are split. Default: windows of 150 tokens with a stride of 75, the numbers of words in
            `pt.text.sliding()`.
        tokenizer: a fast Hugging Face tokenizer or its name. None splits into words and punctuation marks.
        text_field: the column with the text, or a tuple of columns, joined by a space. The passage replaces the text in
            this column, or goes into `text` if several columns are split.
        repeat: columns of `text_field`, e.g. the title, that are put before each passage, one per line.

    Example:
        `ld.Passages(ld.SentenceWindows(max_tokens=100), text_field=("title", "text"), repeat="title") >> indexer`.
    """

    windows: Windows = argument(SlidingWindows(150, 75))
    _: KW_ONLY
    tokenizer: Any = None
    text_field: TextField = "text"
    repeat: TextField | None = None

    def __post_init__(self) -> None:
        check_type(Windows, "windows, e.g. SlidingWindows(150, 75)", windows=self.windows)
        window_fields(self.text_field, self.repeat)
        self.tokenizer = full_name(self.tokenizer)

    def transform(self, inp: pd.DataFrame) -> pd.DataFrame:
        """Return one row per passage, in the order of documents and passages, with a new index.

        Raises:
            pt.validate.InputValidationError: if a column is missing.
            ValueError: if a docno contains `%p`, because PyTerrier could not restore it from the passages.
        """
        with pt.validate.any(inp, context=self) as v:
            v.result_frame(field_names(self.text_field))
            v.document_frame(field_names(self.text_field))
        docnos = inp["docno"].astype(object).tolist()
        if clash := [docno for docno in docnos if pd.isna(docno) or "%p" in str(docno)]:
            raise ValueError(
                f"Passages: docno {clash[0]!r} must be a name without '%p', which marks passages: rename it"
            )
        documents = documents_of(inp, self.text_field, self.repeat, None) if len(inp) else []
        passages = [(row, i, *each) for row, text in enumerate(documents) for i, each in enumerate(self._cut(text))]
        column, *others = window_fields(self.text_field, self.repeat)
        rows, numbers, texts, spans = map(list, zip(*passages, strict=True)) if passages else ([], [], [], [])
        names = [f"{docnos[row]}%p{number}" for row, number in zip(rows, numbers, strict=True)]
        out = repeated(inp, rows)
        out = out.assign(docno=pd.Series(names, dtype=object), passage_span=pd.Series(spans, dtype=object))
        windows = {"window_field": ""} if "window_scores" in out else {}  # the windows are the document's
        return out.assign(**{"text" if others else column: pd.Series(texts, dtype=object)}, **windows)

    def _cut(self, document: Document) -> list[tuple[str, Span]]:
        """Return the text and the span of each passage."""
        tokens = tokenized(self.tokenizer, document.text)
        starts = [*(tokens.characters((i, i + 1))[0] for i in range(len(tokens))), len(document)]
        spans = [(starts[start] if start else 0, starts[end]) for start, end in self.windows(tokens)]
        return [(join_lines(document.repeated, document.text[start:end]), (start, end)) for start, end in spans]
