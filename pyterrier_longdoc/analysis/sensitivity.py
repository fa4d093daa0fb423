"""How a reranker's score of a document changes when its relevant passage moves from the start to the end."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any

import numpy as np
import pandas as pd

from ..common.frames import as_strings, check_columns, strings
from ..common.language import sentence_starts, word_starts
from ..common.plots import draw_means, finish, label_mean, marker_legend, new_axes, offsets
from ..common.progress import counting
from ..experiment.significance import RESAMPLES, bootstrap_intervals, correct, effect_sizes, p_values
from ..modelling.tokens import Span
from .judging import scores_by_row
from .positions import texts_of_corpus, token_reader

PLACES = (0.0, 0.25, 0.5, 0.75, 1.0)

MovedVersion = tuple[float, float, int, int, str]
"""Place asked for, real place, tokens before the passage, tokens of the document, and the text."""


@dataclass(frozen=True, eq=False, repr=False)
class PositionSensitivity:
    """Scores of documents with their relevant passage at several places.

    Args:
        scores: `name` of the system, `qid`, `docno`, `place` that was asked for (0 is the start of the document and 1
            its end), `real_place` where the passage stands (tokens before it as a share of all those of the rest),
            `first_token` (tokens before the passage), `length` (of the document in tokens) and `score`.
        confidence: level of the bootstrap intervals.
        test: see `significance.p_values`.
        alpha: a change with a corrected p-value below is significant.
        resamples: of the queries.
        seed: of the random numbers.
    """

    scores: pd.DataFrame
    _: KW_ONLY
    confidence: float = 0.95
    test: str = "t"
    alpha: float = 0.05
    resamples: int = RESAMPLES
    seed: int = 42

    def __repr__(self) -> str:
        names = self.scores["name"].unique()
        return f"PositionSensitivity({', '.join(names)}; {len(self.scores)} scores)"

    def _repr_html_(self) -> str:
        return self.table.to_html(index=False)

    @cached_property
    def table(self) -> pd.DataFrame:
        """One row for each system and place.

        Columns: `name, place`; `real_place` and `first_token`, on average; `queries` with a document that has the
        passage there and at the first place, those that count here; the mean `score`; `change`, the mean difference
        from the score at the first place, in units of the standard deviation over queries of the scores there, since
        the scales of systems differ; its bootstrap interval `low, high`; `lower`, the share of queries whose score is
        lower than at the first place; `p-value` of the change, `p-value corrected` for the number of places by Holm's
        method, and `reject`; and the `effect size` (Cohen's d_z) of the change. Documents of the same query are
        averaged first.
        """
        frames = [self._of_system(name, rows) for name, rows in self.scores.groupby("name", sort=False)]
        return pd.concat(frames, ignore_index=True)

    def plot(self, *, ax: Any = None) -> Any:
        """Draw the change of each system's score over the real place of the passage; return the matplotlib axes.

        A full marker is a significant change from the first place. `ax` are axes to draw on; None makes a figure.
        """
        systems = self.table.groupby("name", sort=False)
        ax = ax or new_axes(len(systems))
        asides = offsets(self.table["place"], len(systems))
        for system, ((name, rows), aside) in enumerate(zip(systems, asides, strict=True)):
            places, full = rows["real_place"].to_numpy() + aside, rows["reject"].tolist()
            draw_means(ax, places, rows["change"], rows, full=full, label=str(name), system=system)
        ax.axhline(0, color="0.6", linewidth=0.8)
        ax.set_xlabel("real place of the relevant passage (0: start, 1: end)")
        ax.set_ylabel(label_mean("change of the score in standard deviations", self.confidence).replace(": ", ":\n"))
        return finish(ax, marker_legend(f"changed from the first place (p < {self.alpha:g}, holm correction)"))

    def _of_system(self, name: Any, rows: pd.DataFrame) -> pd.DataFrame:
        values = rows.pivot_table("score", ["qid", "docno"], "place")  # NaN where a document has no such version
        first, *later = values.columns.to_numpy(dtype="float64").tolist()
        spread = values[first].groupby("qid").mean().std(ddof=1)
        unit = spread if spread > 0 else np.nan
        changes = [{**self._change(values, first, first, unit), "p-value": np.nan}]
        changes += [self._change(values, first, place, unit) for place in later]
        table = pd.DataFrame([change for change in changes if change["queries"]])
        reject, corrected = correct(table["p-value"].to_numpy()[1:], "holm", self.alpha)
        means = rows.groupby("place")[["real_place", "first_token"]].mean().loc[table["place"]].reset_index(drop=True)
        table.insert(0, "name", name)
        table.insert(2, "real_place", means["real_place"])
        table.insert(3, "first_token", means["first_token"])
        table.insert(len(table.columns) - 1, "p-value corrected", [np.nan, *corrected])
        table.insert(len(table.columns) - 1, "reject", [False, *reject])
        return table

    def _change(self, values: pd.DataFrame, first: float, place: float, unit: float) -> dict[str, Any]:
        """Return the row of a place, by the documents that have their passage there and at the first place, too."""
        both = pd.DataFrame({"x": values[place], "y": values[first]}).dropna().groupby("qid").mean()
        x, y = both[["x"]].to_numpy(), both[["y"]].to_numpy()
        row: dict[str, Any] = {"place": place, "queries": len(both)}
        if both.empty:
            return row
        interval = bootstrap_intervals(x, y, level=self.confidence, resamples=self.resamples, seed=self.seed)
        return row | {
            "score": x.mean(),
            "change": (x - y).mean() / unit,
            "low": interval.low[0] / unit,
            "high": interval.high[0] / unit,
            "lower": (x < y).mean(),
            "p-value": p_values(x, y, self.test, resamples=self.resamples, seed=self.seed)[0],
            "effect size": effect_sizes(x, y)[0],
        }


def position_sensitivity(
    systems: Any,
    topics: pd.DataFrame,
    corpus: pd.DataFrame | Iterable[Mapping[str, Any]],
    gold: pd.DataFrame,
    *,
    places: Sequence[float] = PLACES,
    tokenizer: Any = None,
    text_field: str = "text",
    verbose: bool = False,
) -> PositionSensitivity:
    """Score each document with its relevant passage moved to several places.

    The passage is cut out of the document and put in between two sentences of the rest, so that all versions of a
    document have the same words. Where no sentence begins near a place (nearer than half the distance between two
    places), as in tables, logs and transcripts, it is put in between two words. Places that still fall together, in
    documents of a few words, are one version, which counts once: as the place that it is nearest to.

    Args:
        systems: a reranker, or several by name. They read `qid, query, docno` and the text column and set `score`.
        topics: `qid, query`.
        corpus: `docno` and the text column: a frame, or an iterable of dicts, such as a dataset's `get_corpus_iter()`.
        gold: `qid, docno, start, end`: the characters of one relevant passage of each document: gold positions of a
            collection, or `relevant_positions(...).matched`.
        places: where the passage is to be put, as a share of the rest of the document: 0 is before all else.
        tokenizer: a fast Hugging Face tokenizer, or its name or folder, whose tokens are counted; None counts words
            and punctuation marks.
        text_field: the text column.
        verbose: show a progress bar of the systems.

    Returns:
        The scores, their table and their plot; `dataclasses.replace` of `test`, `alpha` and so on tests them anew.
    """
    named = dict(systems) if isinstance(systems, Mapping) else {type(systems).__name__: systems}
    at = sorted({float(place) for place in places})
    if len(at) < 2 or at[0] < 0 or at[-1] > 1:
        raise ValueError(f"places={list(places)} must be at least two different numbers from 0 to 1")
    spans = _checked_gold(gold, topics)
    texts = texts_of_corpus(corpus, set(spans["docno"]), text_field)
    versions = _versions(spans, texts, at, token_reader(tokenizer), text_field)
    to_score = versions[["qid", "query", text_field]]
    frames = []
    with counting("position_sensitivity", "system", len(named), shown=verbose) as done:
        for name, system in named.items():
            frames.append(versions.assign(name=name, score=scores_by_row(system, to_score, repr(name))))
            done()
    columns = ["name", "qid", "docno", "place", "real_place", "first_token", "length", "score"]
    scores = pd.concat(frames, ignore_index=True)[columns]
    return PositionSensitivity(scores)


def moved(text: str, start: int, end: int, place: float, reach: float = 1.0) -> tuple[str, int]:
    """Return a text with its passage from `start` to `end` moved, and the character at which it begins there.

    `place` is the share of the rest that goes before it; the nearest sentence boundary is taken if it is nearer than
    `reach`, a share of the rest, else the nearest boundary of a word.

    Example:
        >>> moved("One. Two. Three.", 5, 9, 1.0)
        ('One. Three. Two.', 12)
    """
    passage = text[start:end].strip()
    before, after = text[:start].strip(), text[end:].strip()
    rest = f"{before} {after}".strip()
    wanted = place * len(rest)
    cut = _nearest(wanted, [0, *sentence_starts(rest), len(rest)])
    if abs(cut - wanted) >= reach * len(rest):
        cut = _nearest(wanted, [0, *word_starts(rest), len(rest)])
    head, tail = rest[:cut].rstrip(), rest[cut:].lstrip()
    begins = len(head) + 1 if head else 0
    return " ".join(filter(None, [head, passage, tail])), begins


def _nearest(wanted: float, boundaries: list[int]) -> int:
    return min(boundaries, key=lambda boundary: abs(boundary - wanted))


def _checked_gold(gold: pd.DataFrame, topics: pd.DataFrame) -> pd.DataFrame:
    """Return `qid, query, docno, start, end`, for the topics' queries."""
    check_columns(gold, ("qid", "docno", "start", "end"), "gold")
    check_columns(topics, ("qid", "query"), "topics")
    queries = dict(zip(as_strings(topics["qid"]), strings(topics["query"], "query"), strict=True))
    spans = gold[["qid", "docno", "start", "end"]].assign(qid=as_strings(gold["qid"]), docno=as_strings(gold["docno"]))
    spans = spans.assign(query=spans["qid"].map(queries)).dropna(subset="query")
    twice = spans["docno"][spans.duplicated(["qid", "docno"])].tolist()
    if twice or not len(spans):
        raise ValueError(f"gold must have one passage of each document; it has {len(spans)}, several of {twice[:5]}")
    return spans


def _versions(
    spans: pd.DataFrame, texts: dict[str, str], places: list[float], tokens_of: Any, text_field: str
) -> pd.DataFrame:
    """Return one row for each version of each document."""
    rows = []
    for qid, docno, start, end, query in spans.itertuples(index=False):
        text = texts.get(docno, "")  # where it is not in the corpus
        known = pd.notna(start) and pd.notna(end) and 0 <= start < end <= len(text)
        if not known or not text[int(start) : int(end)].strip():
            raise ValueError(f"gold has no passage of {docno!r}: {start} to {end} of {len(text)} characters")
        rows += [(qid, query, docno, *version) for version in _of_document(text, (start, end), places, tokens_of)]
    columns = ["qid", "query", "docno", "place", "real_place", "first_token", "length", text_field]
    versions = pd.DataFrame(rows, columns=columns)
    if not versions.duplicated(["qid", "docno"]).any():
        raise ValueError("no document of gold has text besides its passage: there is no other place to move it to")
    return versions


def _of_document(text: str, span: Span, places: list[float], tokens_of: Any) -> list[MovedVersion]:
    """Return a document's versions, each once."""
    start, end = map(int, span)
    size = len(text[start:end].strip())
    reach = min(b - a for a, b in pairwise(places)) / 2
    versions: dict[int, MovedVersion] = {}
    for place in places:
        version, begins = moved(text, start, end, place, reach)
        tokens = tokens_of(version)
        before, until = int(tokens.tokens_before(begins)), tokens.tokens_begun(begins + size)
        rest = len(tokens) - (until - before)
        real = before / rest if rest else 0.0
        if begins not in versions or abs(place - real) < abs(versions[begins][0] - real):
            versions[begins] = (place, real, before, len(tokens), version)
    return list(versions.values())
