"""A ranking to look at: the text of its documents, with their windows shaded by what a model made of them."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

import numpy as np
import pandas as pd

from ..common.arguments import check_choice, check_given
from ..common.frames import TextField, as_strings, check_columns, field_names, numbers, texts_of
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
.ld-show .map { display: flex; gap: 1px; height: .7em; margin: .3em 0; }
.ld-show .map i { min-width: 2px; border-bottom: 1px solid currentColor; box-sizing: border-box; }
.ld-show .map i.best { border-bottom-width: 4px; }
.ld-show .map i.unread { border-bottom-style: dotted; }
.ld-show .part { display: grid; grid-template-columns: 7.5em minmax(0, 1fr); column-gap: .8em; }
.ld-show .of { text-align: right; font-variant-numeric: tabular-nums; font-size: 85%; opacity: .85; }
.ld-show .text { white-space: pre-wrap; border-left: 3px solid transparent;
  padding-left: .5em; }
.ld-show .best > .text { border-left-color: currentColor; }
.ld-show .unread > .text { border-left: 3px dotted currentColor; opacity: .6; font-style: italic; }
.ld-show u { text-decoration: underline; text-decoration-thickness: 2px; text-underline-offset: 3px; }
""".strip()


@dataclass(frozen=True)
class _Part:
    """Characters of a document that are read in the same windows, or in none.

    Attributes:
        start: of the characters.
        end: of the characters.
        windows: in which they are, by their place among the windows.
    """

    start: int
    end: int
    windows: tuple[int, ...]


@dataclass(frozen=True, eq=False)
class _Ranked:
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
        """The whole text, cut wherever a window starts or ends."""
        ends = sorted({0, len(self.text), *(place for span in self.spans for place in span)})
        for start, end in itertools.pairwise(ends):
            yield _Part(start, end, tuple(i for i, (a, b) in enumerate(self.spans) if a <= start and end <= b))

    def title(self) -> str:
        """Rank, docno, score and label."""
        judged = "" if self.label is None else f", label {self.label:g}"
        return f"{self.rank}  {self.docno}  (score {self.score:.3f}{judged})"

    def summary(self) -> str:
        """Which window is the best one, and how much was not read."""
        if not self.spans:
            return "no windows: no model has explained this document"
        unread = sum(part.end - part.start for part in self.parts() if _is_unread(part, self.text))
        start, end = self.spans[self.best]
        best = (
            f"window {self.best} of {len(self.spans)} is best ({self.scores[self.best]:.3f}, characters {start}-{end})"
        )
        return best + (f"; {unread} of {len(self.text)} characters not read" if unread else "; all was read")


@dataclass(frozen=True, eq=False, repr=False)
class Shown:
    """A ranking as HTML in notebooks and as text elsewhere: see `show`."""

    qid: str
    query: str
    documents: Sequence[_Ranked]
    further: int
    by: str
    characters: int

    def __repr__(self) -> str:
        lines = [self._title()]
        for document in self.documents:
            lines += [document.title(), f"   {document.summary()}"]
            if document.spans:
                start, end = document.spans[document.best]
                lines.append(f"   {_shortened(document.text[start:end], PRINTED_CHARACTERS)}")
        return "\n".join(lines + [self._further()] * bool(self.further))

    def _repr_html_(self) -> str:
        low, high = self._range()
        body = [
            _document(each, self.by, low, high, self.characters, place) for place, each in enumerate(self.documents)
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

    def _range(self) -> tuple[float, float]:
        """The values that have no shade and the strongest one; for weights these are of each document."""
        values = [value for document in self.documents for value in document.scores]
        return (min(values), max(values)) if values else (0.0, 0.0)

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
) -> Shown:
    """Shows the ranked documents of a query with their windows shaded, and the best window marked.

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
        ValueError: if a column is missing, a score, rank or label is no number, the query is not among the results,
            windows end after the text, which then is not what the model has read (another text that is as long cannot
            be told), or the model has no attention.

    Example:
        `ld.show((bm25 >> ld.MaxP(explain=True)).search("draw a pie chart"))`.
    """
    check_choice("by", by, tuple(SHADES))
    check_given(documents=documents, characters=characters)
    check_columns(results, ("qid", "query", "docno", "score"), "results")
    _check_explained(results, by, field_names(text_field), text_loader)
    rows = _in_order(_of_query(results, query))
    shown = rows.head(documents)
    texts = texts_of(shown, field_names(text_field), text_loader)
    ranked = [_ranked(row, text, i) for i, (row, text) in enumerate(zip(shown.to_dict("records"), texts, strict=True))]
    if by == "weight" and all(document.weights is None for document in ranked):
        raise ValueError("by='weight': this model has no attention over windows (PARADE has): take by='score'")
    first = rows.iloc[0]
    return Shown(str(first["qid"]), str(first["query"]), ranked, len(rows) - len(shown), by, characters)


def _check_explained(results: pd.DataFrame, by: str, fields: list[str], text_loader: Any) -> None:
    missing = [name for name in ("window_spans", "window_scores", SHADES[by]) if name not in results.columns]
    if missing:
        raise ValueError(
            f"results lack the column(s) {', '.join(dict.fromkeys(missing))}: give the reranker explain=True and run "
            f"it once more, e.g. retriever >> ld.MaxP(explain=True)"
        )
    absent = [name for name in fields if name not in results.columns]
    if absent and text_loader is None:
        raise ValueError(
            f"results lack the text column(s) {', '.join(absent)}: pass text_loader=, or name the column(s) that the "
            f"model has read with text_field="
        )


def _of_query(results: pd.DataFrame, query: str | None) -> pd.DataFrame:
    """The rows of one query.

    Raises:
        ValueError: if there is none, or several and none is asked for.
    """
    qids = as_strings(results["qid"])
    if query is None:
        known = list(dict.fromkeys(qids))
        if len(known) != 1:
            some = f": say which, e.g. query={known[0]!r}" if known else ""
            raise ValueError(f"results are of {len(known)} queries{some}")
        return results
    rows = results[qids == str(query)]
    rows = rows if len(rows) else results[results["query"] == query]
    if not len(rows):
        raise ValueError(f"query {query!r} is neither a qid nor a query of the results, e.g. {qids.iloc[:1].tolist()}")
    if rows["qid"].nunique() > 1:
        raise ValueError(f"several qids have the query {query!r}: give one of {rows['qid'].unique().tolist()}")
    return rows


def _in_order(rows: pd.DataFrame) -> pd.DataFrame:
    """The rows by rank, or by score where there are no ranks, with scores, ranks and labels as numbers.

    Raises:
        ValueError: if one is none; the label of a document that is not judged may be missing.
    """
    rows = rows.assign(score=numbers(rows, "score", "results", "leave these rows out"))
    if "label" in rows:
        judged, labels = rows["label"].notna().to_numpy(), np.full(len(rows), np.nan)
        labels[judged] = numbers(rows[judged], "label", "results", "relevance labels are numbers, e.g. 0 and 1")
        rows = rows.assign(label=labels)
    if "rank" not in rows:
        return rows.sort_values("score", ascending=False, kind="stable")
    ranks = numbers(rows, "rank", "results", "leave the column out, and documents are shown by score")
    return rows.assign(rank=ranks).sort_values("rank", kind="stable")


def _ranked(row: dict[Any, Any], text: str, place: int) -> _Ranked:
    spans, scores, weights = (_listed(row, name) for name in ("window_spans", "window_scores", "window_weights"))
    end = max((int(end) for _, end in spans or ()), default=0)
    if end > len(text):
        raise ValueError(
            f"window_spans of {row['docno']!r} end at character {end}, and its text has {len(text)}: this is not the "
            f"text that the model has read; give the model's own text_field= (without repeat) or text_loader="
        )
    return _Ranked(
        str(row["docno"]),
        int(row.get("rank", place)),
        row["score"],
        None if pd.isna(row.get("label", np.nan)) else row["label"],
        text,
        [(int(start), int(end)) for start, end in spans or ()],
        list(map(float, scores or ())),
        None if weights is None else list(map(float, weights)),
    )


def _listed(row: dict[Any, Any], name: str) -> list[Any] | None:
    """A value for each window; None where no model has explained the document, as a union of results may have it.

    Raises:
        ValueError: for a list that has become text.
    """
    values = row.get(name)
    if isinstance(values, str):
        raise ValueError(
            f"{name} of {row['docno']!r} is text, {values[:20]!r}, as a file of comma-separated values makes of lists: "
            f"keep explained results as Parquet or JSON"
        )
    return list(values) if isinstance(values, Sequence | np.ndarray) else None


def _document(document: _Ranked, by: str, low: float, high: float, characters: int, place: int) -> str:
    """A document, to be opened with a click but for the first one: a map of it, and its text."""
    title = f"<b>{escape(document.title())}</b> <span class='note'>{escape(document.summary())}</span>"
    shades = _shades(document, by, low, high)
    parts = [part for part in document.parts() if document.spans]
    text = "".join(_row(document, group, shades, characters) for group in _rows_of(parts))
    plain = f'<div class="text">{_folded(document.text, characters)}</div>' if not document.spans else ""
    return (
        f'<details class="document"{"" if place else " open"}><summary>{title}</summary>'
        f'<div class="map" aria-hidden="true">{"".join(_cell(document, part, shades) for part in parts)}</div>'
        f"{text}{plain}</details>"
    )


def _shades(document: _Ranked, by: str, low: float, high: float) -> list[float]:
    """The opacity of each window."""
    values = np.array(document.scores if by == "score" else document.weights or [0.0] * len(document.spans))
    if by == "weight":
        low, high = 0.0, max(values, default=0.0)
    if high <= low:
        return [STRONGEST / 2] * len(values)
    return (STRONGEST * (values - low) / (high - low)).round(3).tolist()


def _rows_of(parts: Sequence[_Part]) -> Iterator[list[_Part]]:
    """Parts that stand next to one number: from where a window starts, or reading stops, to the next such place."""
    group: list[_Part] = []
    for part in parts:
        goes_on = group and part.windows and set(part.windows) <= set(group[-1].windows)
        if group and not goes_on:
            yield group
            group = []
        group.append(part)
    if group:
        yield group


def _row(document: _Ranked, group: Sequence[_Part], shades: Sequence[float], characters: int) -> str:
    start, end = group[0].start, group[-1].end
    if not group[0].windows:
        if not _is_unread(group[0], document.text):
            return ""
        of, text = f"not read<br>{end - start} characters", _folded(document.text[start:end], min(characters, 200))
        return f'<div class="part unread"><div class="of">{of}</div><div class="text">{text}</div></div>'
    room, shown, folded = characters, "", ""
    for part in group:
        whole = document.text[part.start : part.end]
        shown += _marked(whole[:room], part, document.best, shades)
        folded += _marked(whole[room:], part, document.best, shades)
        room = max(0, room - len(whole))
    more = end - start - characters
    text = shown + (f"<details><summary>… {more} more characters</summary>{folded}</details>" if folded else "")
    starting = [i for i in group[0].windows if document.spans[i][0] == start]
    best = any(document.best in part.windows for part in group)
    of = "<br>".join(_number(document, i) for i in starting) or "&nbsp;"
    return f'<div class="part{" best" * best}"><div class="of">{of}</div><div class="text">{text}</div></div>'


def _number(document: _Ranked, window: int) -> str:
    """What stands beside the place where a window starts."""
    weight = "" if document.weights is None else f"<br>weight {document.weights[window]:.3f}"
    said = f"{window}: {document.scores[window]:.3f}{weight}"
    return f"<b>▶ {said}</b>" if window == document.best else said


def _marked(text: str, part: _Part, best: int, shades: Sequence[float]) -> str:
    if not text:
        return ""
    shaded = f'<span style="{_background(max(shades[i] for i in part.windows))}">{escape(text)}</span>'
    return f"<u>{shaded}</u>" if best in part.windows else shaded


def _cell(document: _Ranked, part: _Part, shades: Sequence[float]) -> str:
    """A part in the map: as wide as it is long."""
    kind = "best" if document.best in part.windows else "" if part.windows else "unread"
    shade = f";{_background(max(shades[i] for i in part.windows))}" if part.windows else ""
    return f'<i class="{kind}" style="flex:{part.end - part.start}{shade}"></i>'


def _background(opacity: float) -> str:
    return f"background:rgba(0,114,178,{opacity:g})"


def _folded(text: str, characters: int) -> str:
    """A text of which only the first characters are seen at once."""
    rest = text[characters:]
    more = f"<details><summary>… {len(rest)} more characters</summary>{escape(rest)}</details>" if rest else ""
    return escape(text[:characters]) + more


def _is_unread(part: _Part, text: str) -> bool:
    """Whether no window has the characters; white space between two windows is in none."""
    return not part.windows and bool(text[part.start : part.end].strip())


def _shortened(text: str, characters: int) -> str:
    text = " ".join(text.split())
    return text if len(text) <= characters else f"{text[:characters]}…"
