"""A ranking to look at: the text of its documents, with their windows shaded by what a model made of them."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from ..common.arguments import check_arguments
from ..common.frames import TextField, as_strings, check_columns, field_names, texts_of
from ..common.language import counted

SHADES = {"score": "window_scores", "weight": "window_weights"}
"""What windows can be shaded by, and the column that has it."""

STRONGEST = 0.55
"""Opacity of the strongest shade: text keeps a contrast of at least 7 to 1 on a white and on a black page."""

PRINTED_CHARACTERS = 100
"""As much of the best window is printed where there is no notebook."""

# All colours are of the page (currentColor, transparent) but one blue that lies over it, so that the same markup is
# read on light and dark pages, of which a notebook does not tell; strength, numbers and lines say the rest.
_STYLE = """
.ld-show { color: inherit; line-height: 1.5; max-width: 60em; overflow-wrap: anywhere; }
.ld-show .note { opacity: .75; font-size: 90%; margin: .3em 0; }
.ld-show .document { border-top: 1px solid color-mix(in srgb, currentColor 30%, transparent); padding: .3em 0; }
.ld-show summary { cursor: pointer; }
.ld-show .part { display: grid; grid-template-columns: 7.5em minmax(0, 1fr); column-gap: .8em; }
.ld-show .of { text-align: right; font-variant-numeric: tabular-nums; font-size: 85%; opacity: .85; }
.ld-show .text { white-space: pre-wrap; border-left: 3px solid transparent;
  padding-left: .5em; }
.ld-show .best > .text { border-left-color: currentColor; }
.ld-show .unread > .text { border-left: 3px dotted currentColor; opacity: .6; font-style: italic; }
.ld-show u { text-decoration: underline; text-decoration-thickness: 2px; text-underline-offset: 3px; }
""".strip()


class _Part(NamedTuple):
    """Characters of a document that are in the same windows, or in none."""

    start: int
    end: int
    windows: tuple[int, ...]
    text: str

    @property
    def is_unread(self) -> bool:
        """Whether no window has the characters; white space between two windows is in none."""
        return not self.windows and bool(self.text.strip())


@dataclass(frozen=True, eq=False)
class _ShownDocument:
    """A document of a ranking with its windows; `spans` is empty where no model has explained it."""

    docno: str
    rank: int
    score: float
    label: float | None
    text: str
    spans: list[tuple[int, int]]
    scores: list[float]
    weights: list[float] | None

    @property
    def best(self) -> int:
        return int(np.argmax(self.scores))

    def parts(self) -> Iterator[_Part]:
        """Yield the whole text, cut wherever a window starts or ends."""
        ends = sorted({0, len(self.text), *(place for span in self.spans for place in span)})
        for start, end in itertools.pairwise(ends):
            windows = tuple(i for i, (a, b) in enumerate(self.spans) if a <= start and end <= b)
            yield _Part(start, end, windows, self.text[start:end])

    def title(self) -> str:
        """Return rank, docno, score and label."""
        judged = "" if self.label is None else f", label {self.label:g}"
        return f"{self.rank}  {self.docno}  (score {self.score:.3f}{judged})"

    def summary(self) -> str:
        """Return which window is the best one, and how much was not read."""
        if not self.spans:
            return "no windows: no model has explained this document"
        unread = sum(part.end - part.start for part in self.parts() if part.is_unread)
        start, end = self.spans[self.best]
        score, number = f"{self.scores[self.best]:.3f}", f"window {self.best} of {len(self.spans)}"
        rest = f"{unread} of {len(self.text)} characters not read" if unread else "all was read"
        return f"{number} is best ({score}, characters {start}-{end}); {rest}"


@dataclass(frozen=True, eq=False, repr=False)
class ShownRanking:
    """A ranking as HTML in notebooks and as text elsewhere: see `show`."""

    qid: str
    query: str
    documents: Sequence[_ShownDocument]
    further: int
    by: str
    characters: int

    def __repr__(self) -> str:
        lines = [self._title()]
        for document in self.documents:
            lines += [document.title(), f"   {document.summary()}"]
            if document.spans:
                start, end = document.spans[document.best]
                text = " ".join(document.text[start:end].split())
                more = "…" if len(text) > PRINTED_CHARACTERS else ""
                lines.append(f"   {text[:PRINTED_CHARACTERS]}{more}")
        return "\n".join(lines + [self._further()] * bool(self.further))

    def _repr_html_(self) -> str:
        values = [value for document in self.documents for value in document.scores]
        low, high = (min(values), max(values)) if values else (0.0, 0.0)
        body = [
            _DocumentHtml(each, _shades(each, self.by, low, high), self.characters).render(is_open=not place)
            for place, each in enumerate(self.documents)
        ]
        further = f'<p class="note">{self._further()}</p>' if self.further else ""
        return (
            f'<div class="ld-show"><style>{_STYLE}</style><b>{escape(self._title())}</b>'
            f'<p class="note">{escape(self._legend(low, high))}</p>{"".join(body)}{further}</div>'
        )

    def _title(self) -> str:
        return f"query {self.qid!r}: {self.query}"

    def _further(self) -> str:
        further = counted(self.further, "more document is", "more documents are")
        return f"{further} not shown: documents={len(self.documents) + self.further} shows all"

    def _legend(self, low: float, high: float) -> str:
        if self.by == "score":
            what = f"the stronger, the higher its window's score, from {low:.3f} to {high:.3f} in this ranking"
        else:
            what = "the stronger, the higher its window's weight, up to the highest weight in the document"
        return (
            f"Shade: {what}. Text in several windows has the shade of the highest. Underlined, with a line beside it "
            f"and ▶: the window that scores best. Dotted: not read."
        )


def show(
    results: pd.DataFrame,
    query: str | None = None,
    *,
    by: str = "score",
    text_field: TextField = "text",
    text_loader: Any = None,
    documents: int = 5,
    characters: int = 1000,
) -> ShownRanking:
    """Show the ranked documents of a query with their windows shaded, and the best window marked.

    Needs results of a model with `explain=True`. The text is cut where windows start: each part stands next to the
    number and score of the window that starts there. The shade of a character is that of the highest of its windows;
    scores are compared over all documents that are shown, weights within a document.

    Args:
        results: `qid, query, docno, score`, `rank` if there is one, the text, `window_spans` and `window_scores`.
        query: a qid, or the text of a query; None where the results are of one query.
        by: what windows are shaded by, `"score"` or `"weight"`: the model's attention over windows.
        text_field: the column or columns of which the model made its windows: its `text_field` without `repeat`.
        text_loader: supplies the text where the column is absent; as for the models.
        documents: so many are shown, the first one opened.
        characters: of a part that are shown; the rest opens with a click.

    Returns:
        An object that a notebook shows as HTML, without scripts, and that prints as text.

    Raises:
        ValueError: if a column is missing, the results are not of one query, or windows end after the text, which then
            is not what the model has read (another text that is as long cannot be told).

    Example:
        `ld.show((bm25 >> ld.MaxP(explain=True)).search("draw a pie chart"))`.
    """
    check_arguments("str", choices=SHADES.keys(), by=by)
    check_arguments("int", at_least=1, documents=documents, characters=characters)
    fields = field_names(text_field)
    check_columns(results, ("qid", "query", "docno", "score"), "results")
    check_columns(results, fields if text_loader is None else (), "results (pass text_loader=, or text_field=)")
    check_columns(results, ("window_spans", "window_scores", SHADES[by]), "results (give the reranker explain=True)")
    rows = _rows_of_query(results, query)
    rows = rows.sort_values("score", ascending=False, kind="stable") if "rank" not in rows else rows
    rows = rows.assign(rank=range(len(rows)) if "rank" not in rows else pd.to_numeric(rows["rank"]))
    rows = rows.sort_values("rank", kind="stable")
    first = rows.head(documents)
    texts = texts_of(first, fields, text_loader)
    shown = [_shown_document(row, text) for row, text in zip(first.to_dict("records"), texts, strict=True)]
    qid, wording = map(str, rows.iloc[0][["qid", "query"]])
    return ShownRanking(qid, wording, shown, len(rows) - len(shown), by, characters)


def _rows_of_query(results: pd.DataFrame, query: str | None) -> pd.DataFrame:
    """Return the rows of one query, by its qid or its text."""
    qids = as_strings(results["qid"])
    rows = results
    if query is not None:
        rows = results[qids == str(query)] if (qids == str(query)).any() else results[results["query"] == query]
    number = rows["qid"].nunique()
    if number != 1:
        some = (rows if number else results)["qid"].unique().tolist()[:5]
        raise ValueError(f"query={query!r} stands for {number} qids: give one of the results, such as {some}")
    return rows


def _shown_document(row: dict[Any, Any], text: str) -> _ShownDocument:
    spans, scores, weights = (_list_or_none(row.get(name)) for name in ("window_spans", *SHADES.values()))
    end = max((int(end) for _, end in spans or ()), default=0)
    if end > len(text):
        raise ValueError(
            f"window_spans of {row['docno']!r} end at character {end}, and its text has {len(text)}: give text_field= "
            f"(without repeat) or text_loader= for the text that the model has read"
        )
    return _ShownDocument(
        str(row["docno"]),
        int(row["rank"]),
        float(row["score"]),
        None if pd.isna(row.get("label", np.nan)) else float(row["label"]),
        text,
        [(int(start), int(end)) for start, end in spans or ()],
        list(map(float, scores or ())),
        None if weights is None else list(map(float, weights)),
    )


def _list_or_none(values: Any) -> list[Any] | None:
    """Return a value for each window; None where no model has explained a document, as a union of results may have."""
    return list(values) if isinstance(values, Sequence | np.ndarray) else None


def _shades(document: _ShownDocument, by: str, low: float, high: float) -> list[float]:
    """Return the opacity of each window."""
    values = np.array(document.scores if by == "score" else document.weights or [0.0] * len(document.spans))
    if by == "weight":
        low, high = 0.0, max(values, default=0.0)
    if high <= low:
        return [STRONGEST / 2] * len(values)
    return (STRONGEST * (values - low) / (high - low)).round(3).tolist()


@dataclass(frozen=True)
class _DocumentHtml:
    """Writes a document: to be opened with a click, a map of it, and its text."""

    document: _ShownDocument
    shades: Sequence[float]
    characters: int

    def render(self, *, is_open: bool) -> str:
        document = self.document
        title = f"<b>{escape(document.title())}</b> <span class='note'>{escape(document.summary())}</span>"
        parts = list(document.parts()) if document.spans else []
        text = "".join(self._row(group) for group in _groups_of(parts))
        plain = f'<div class="text">{_folded(document.text, self.characters)}</div>' if not document.spans else ""
        return (
            f'<details class="document"{" open" if is_open else ""}><summary>{title}</summary>{text}{plain}</details>'
        )

    def _row(self, group: Sequence[_Part]) -> str:
        """Return parts of the text beside the numbers of the windows that start with them."""
        document, start, end = self.document, group[0].start, group[-1].end
        if not group[0].windows:
            text = _folded(group[0].text, min(self.characters, 200))
            of = f"not read<br>{end - start} characters"
            return f'<div class="part unread"><div class="of">{of}</div><div class="text">{text}</div></div>'
        room, shown, folded = self.characters, "", ""
        for part in group:
            shown += self._marked(part.text[:room], part)
            folded += self._marked(part.text[room:], part)
            room = max(0, room - len(part.text))
        more = end - start - self.characters
        text = shown + (f"<details><summary>… {more} more characters</summary>{folded}</details>" if folded else "")
        starting = [i for i in group[0].windows if document.spans[i][0] == start]
        best = any(document.best in part.windows for part in group)
        of = "<br>".join(map(self._number, starting)) or "&nbsp;"
        return f'<div class="part{" best" * best}"><div class="of">{of}</div><div class="text">{text}</div></div>'

    def _number(self, window: int) -> str:
        """Return what stands beside the place where a window starts."""
        weights = self.document.weights
        weight = "" if weights is None else f"<br>weight {weights[window]:.3f}"
        said = f"{window}: {self.document.scores[window]:.3f}{weight}"
        return f"<b>▶ {said}</b>" if window == self.document.best else said

    def _marked(self, text: str, part: _Part) -> str:
        if not text:
            return ""
        shaded = f'<span style="{self._background(part)}">{escape(text)}</span>'
        return f"<u>{shaded}</u>" if self.document.best in part.windows else shaded

    def _background(self, part: _Part) -> str:
        return f"background:rgba(0,114,178,{max(self.shades[i] for i in part.windows):g})"


def _groups_of(parts: Sequence[_Part]) -> Iterator[list[_Part]]:
    """Yield parts that stand next to one number: from where a window starts, or reading stops, to the next such place.

    White space that no window has is left out.
    """
    group: list[_Part] = []
    for part in (part for part in parts if part.windows or part.is_unread):
        if group and not (part.windows and set(part.windows) <= set(group[-1].windows)):
            yield group
            group = []
        group.append(part)
    if group:
        yield group


def _folded(text: str, characters: int) -> str:
    """Return a text of which only the first characters are seen at once."""
    rest = text[characters:]
    more = f"<details><summary>… {len(rest)} more characters</summary>{escape(rest)}</details>" if rest else ""
    return escape(text[:characters]) + more
