"""Display a ranking: the text of its documents, with windows shaded by score."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from ..common.arguments import check_arguments
from ..common.files import full_path
from ..common.frames import TextField, as_strings, check_columns, check_windows, field_names, texts_of, with_windows_in
from ..common.language import counted

SHADES = {"score": "window_scores", "weight": "window_weights"}
"""The columns by which windows can be shaded."""

STRONGEST = 0.55
"""Opacity of the strongest shade: text keeps a contrast of at least 7 to 1 on white and on black pages."""

# It is unknown whether a notebook's page is light or dark. All colours are those of the page (currentColor,
# transparent), except for one transparent blue.
_STYLE = """
.ld-show { color: inherit; line-height: 1.5; max-width: 60em; overflow-wrap: anywhere; }
.ld-show .note { opacity: .75; font-size: 90%; margin: .3em 0; }
.ld-show .document { border-top: 1px solid color-mix(in srgb, currentColor 30%, transparent); padding: .3em 0; }
.ld-show summary { cursor: pointer; }
.ld-show .part { display: grid; grid-template-columns: 7.5em minmax(0, 1fr); column-gap: .8em; }
.ld-show .of { text-align: right; font-variant-numeric: tabular-nums; font-size: 85%; opacity: .85; }
.ld-show .text { white-space: pre-wrap; border-left: 3px solid transparent; padding-left: .5em; }
.ld-show .best > .text { border-left-color: currentColor; }
.ld-show .unread > .text { border-left: 3px dotted currentColor; opacity: .6; font-style: italic; }
.ld-show u { text-decoration: underline; text-decoration-thickness: 2px; text-underline-offset: 3px; }
""".strip()


class _Part(NamedTuple):
    """A part of a document with the same windows (or none) throughout."""

    start: int
    end: int
    windows: tuple[int, ...]
    text: str
    is_place: bool

    @property
    def is_unread(self) -> bool:
        """Whether the part has text and is in no window."""
        return not self.windows and bool(self.text.strip())


@dataclass(frozen=True, eq=False)
class _ShownDocument:
    """A document of a ranking with its windows; `spans` is empty if it has none."""

    docno: str
    rank: int
    score: float
    label: float | None
    text: str
    spans: list[tuple[int, int]]
    scores: list[float]
    weights: list[float] | None
    places: list[tuple[int, int]]  # best matches of query tokens

    @property
    def best(self) -> int:
        return int(np.argmax(self.scores))

    def parts(self) -> Iterator[_Part]:
        """Yield the text in parts, split wherever a shaded window or a place starts or ends."""
        spans = self.spans
        ends = sorted({0, len(self.text), *itertools.chain.from_iterable([*spans, *self.places])})
        for start, end in itertools.pairwise(ends):
            windows = tuple(i for i, (a, b) in enumerate(spans) if a <= start and end <= b)
            is_place = any(a <= start and end <= b for a, b in self.places)
            yield _Part(start, end, windows, self.text[start:end], is_place)

    def summary(self) -> str:
        """Return the best window, and the number of unread characters."""
        if not self.spans:
            return "no windows: not scored with explain=True"
        unread = sum(part.end - part.start for part in self.parts() if part.is_unread)
        start, end = self.spans[self.best]
        score, number = f"{self.scores[self.best]:.3f}", f"window {self.best + 1} of {len(self.spans)}"
        reading = f"{unread} of {len(self.text)} characters not read" if unread else "all was read"
        return f"{number} is best ({score}, characters {start}-{end}); {reading}"

    def html(self, shades: Sequence[float], characters: int, *, is_open: bool) -> str:
        """Return a collapsible block of title, summary and text; `shades` are the opacities of the windows."""
        label = "" if self.label is None else f", label {self.label:g}"
        title = f"{self.rank}  {self.docno}  (score {self.score:.3f}{label})"
        title = f"<b>{escape(title)}</b> <span class='note'>{escape(self.summary())}</span>"
        body = f'<div class="text">{_collapsible(self.text, characters)}</div>'
        if self.spans:
            body = "".join(self._row(group, shades, characters) for group in self._groups())
        opened = " open" if is_open else ""
        return f'<details class="document"{opened}><summary>{title}</summary>{body}</details>'

    def _groups(self) -> Iterator[list[_Part]]:
        """Group the parts that share a label and a bar: up to the next start of a window or of unread text.

        The bar of the best window ends where that window ends. White space outside windows is left out.
        """
        group: list[_Part] = []
        for part in (part for part in self.parts() if part.windows or part.is_unread):
            continues = group and part.windows and set(part.windows) <= set(group[-1].windows)
            if group and not (continues and (self.best in part.windows) == (self.best in group[-1].windows)):
                yield group
                group = []
            group.append(part)
        if group:
            yield group

    def _row(self, group: Sequence[_Part], shades: Sequence[float], characters: int) -> str:
        """Return parts of the text next to the numbers of the windows that start there."""
        start, end = group[0].start, group[-1].end
        if not group[0].windows:
            text = _collapsible(group[0].text, min(characters, 200))
            labels = f"not read<br>{end - start} characters"
            return f'<div class="part unread"><div class="of">{labels}</div><div class="text">{text}</div></div>'
        room, visible, hidden = characters, "", ""
        for part in group:
            visible += self._mark(part.text[:room], part, shades)
            hidden += self._mark(part.text[room:], part, shades)
            room = max(0, room - len(part.text))
        if hidden:
            visible += f"<details><summary>… {end - start - characters} more characters</summary>{hidden}</details>"
        starting = [self._label(i) for i in group[0].windows if self.spans[i][0] == start]
        best = " best" if any(self.best in part.windows for part in group) else ""
        label = "<br>".join(starting) or "&nbsp;"
        return f'<div class="part{best}"><div class="of">{label}</div><div class="text">{visible}</div></div>'

    def _label(self, window: int) -> str:
        weight = "" if self.weights is None else f"<br>weight {self.weights[window]:.3f}"
        text = f"{window + 1}: {self.scores[window]:.3f}{weight}"
        return f"<b>▶ {text}</b>" if window == self.best else text

    def _mark(self, text: str, part: _Part, shades: Sequence[float]) -> str:
        if not text:
            return ""
        content = f"<b>{escape(text)}</b>" if part.is_place else escape(text)
        shade = max(shades[i] for i in part.windows)
        span = f'<span style="background:rgba(0,114,178,{shade:g})">{content}</span>'
        return f"<u>{span}</u>" if self.best in part.windows else span


@dataclass(frozen=True, eq=False, repr=False)
class ShownRanking:
    """A ranking, shown as HTML in notebooks; see `show`."""

    qid: str
    query: str
    documents: Sequence[_ShownDocument]
    rest: int
    by: str
    characters: int

    def __repr__(self) -> str:
        number = counted(len(self.documents), "document", "documents")
        return f"<{self._title()}; {number}, shown as HTML in notebooks; save(file) writes a page>"

    def save(self, file: str | Path) -> None:
        """Write the ranking as an HTML page."""
        page = f'<!doctype html><meta charset="utf-8"><title>{escape(self.query)}</title>{self._repr_html_()}'
        Path(full_path(file)).write_text(page, encoding="utf-8")

    def _repr_html_(self) -> str:
        values = [value for document in self.documents for value in document.scores]
        low, high = (min(values), max(values)) if values else (0.0, 0.0)
        blocks = [
            document.html(_shades(document, self.by, low, high), self.characters, is_open=not place)
            for place, document in enumerate(self.documents)
        ]
        if self.by == "score":
            scale = f"window score, from {low:.3f} to {high:.3f} in this ranking"
        else:
            scale = "window weight, up to the highest weight in the document"
        places = " Bold: best match of a query token." if any(d.places for d in self.documents) else ""
        legend = (
            f"Shade: {scale}. Text in several windows has the strongest of their shades. Underlined, with a line in "
            f"the margin and ▶: the best window. Dotted: not read.{places}"
        )
        rest = counted(self.rest, "more document is", "more documents are")
        note = f"{rest} not shown: documents={len(self.documents) + self.rest} shows all"
        note = f'<p class="note">{note}</p>' if self.rest else ""
        return (
            f'<div class="ld-show"><style>{_STYLE}</style><b>{escape(self._title())}</b>'
            f'<p class="note">{escape(legend)}</p>{"".join(blocks)}{note}</div>'
        )

    def _title(self) -> str:
        return f"query {self.qid!r}: {self.query}"


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
    """Show the ranked documents of a query with shaded windows and the best window marked.

    The results must come from a model with `explain=True`. The text is split into parts at the starts of windows, next
    to their numbers and scores. Text in several windows has the strongest of their shades. Scores are comparable across
    documents, weights only within a document. The best matches of query tokens (`MaxSim`) are in bold.

    Args:
        results: `qid, query, docno, score`, optionally `rank`, the text, `window_spans` and `window_scores`.
        query: a qid or the text of a query; not needed if the results have one query.
        by: the shade of windows: `"score"`, or `"weight"` for the model's attention over windows.
        text_field: the column(s) that the model split into windows: its `text_field` without `repeat`.
        text_loader: loads the text if the column is missing, as in the models.
        documents: the maximum number of documents to show; the first one is expanded.
        characters: the maximum number of characters to show per part; a click shows the rest.

    Returns:
        An object that notebooks show as HTML, without scripts; elsewhere, its `save(file)` writes a page.

    Raises:
        ValueError: if a column is missing, the results have several queries, or the windows belong to another text.

    Example:
        `ld.show((bm25 >> ld.MaxP(explain=True)).search("draw a pie chart"))`.
    """
    check_arguments("str", choices=SHADES.keys(), by=by)
    check_arguments("int", at_least=1, documents=documents, characters=characters)
    fields = field_names(text_field)
    check_columns(results, ("qid", "query", "docno", "score"), "results")
    check_columns(results, fields if text_loader is None else (), "results (set text_loader= or text_field=)")
    check_columns(results, ("window_spans", "window_scores", SHADES[by]), "results (set explain=True in the reranker)")
    check_windows(results, text_field)
    rows = _rows_of_query(results, query)
    rows = rows.sort_values("score", ascending=False, kind="stable") if "rank" not in rows else rows
    rows = rows.assign(rank=range(len(rows)) if "rank" not in rows else pd.to_numeric(rows["rank"]))
    rows = rows.sort_values("rank", kind="stable")
    top_rows = rows.head(documents)
    texts = texts_of(top_rows, fields, text_loader)
    shown = with_windows_in(top_rows, texts).to_dict("records")
    views = [_shown_document(row, text) for row, text in zip(shown, texts, strict=True)]
    qid, wording = map(str, rows.iloc[0][["qid", "query"]])
    return ShownRanking(qid, wording, views, len(rows) - len(views), by, characters)


def _rows_of_query(results: pd.DataFrame, query: str | None) -> pd.DataFrame:
    """Return the rows of one query, by its qid or its text."""
    qids = as_strings(results["qid"])
    rows = results
    if query is not None:
        rows = results[qids == str(query)] if (qids == str(query)).any() else results[results["query"] == query]
    number = rows["qid"].nunique()
    if number != 1:
        examples = (rows if number else results)["qid"].unique().tolist()[:5]
        raise ValueError(f"query={query!r} matches {number} qids: choose one of the results, such as {examples}")
    return rows


def _shown_document(row: dict[Any, Any], text: str) -> _ShownDocument:
    spans, scores, weights = (_list_or_none(row.get(name)) for name in ("window_spans", *SHADES.values()))
    end = max((int(end) for _, end in spans or ()), default=0)
    if end > len(text):
        raise ValueError(
            f"window_spans of {row['docno']!r} end at character {end}, but its text has {len(text)}: set text_field= "
            f"(without repeat) or text_loader= as in the model"
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
        [(start, end) for _, start, end, _ in _list_or_none(row.get("term_places")) or () if start < end],
    )


def _list_or_none(values: Any) -> list[Any] | None:
    """Return one value per window; None if the row has no windows, as in a union of results."""
    return list(values) if isinstance(values, Sequence | np.ndarray) else None


def _shades(document: _ShownDocument, by: str, low: float, high: float) -> list[float]:
    """Return the opacity of each window."""
    values = np.array(document.scores if by == "score" else document.weights or [0.0] * len(document.spans))
    if by == "weight":
        low, high = 0.0, max(values, default=0.0)
    if high <= low:
        return [STRONGEST / 2] * len(values)
    return (STRONGEST * (values - low) / (high - low)).round(3).tolist()


def _collapsible(text: str, characters: int) -> str:
    """Return a text of which the first characters are shown and the rest is collapsed."""
    rest = text[characters:]
    details = f"<details><summary>… {len(rest)} more characters</summary>{escape(rest)}</details>" if rest else ""
    return escape(text[:characters]) + details
