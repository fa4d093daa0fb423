"""Position sensitivity: how the score of a document changes when its relevant passage is moved."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from typing import Any

import numpy as np
import pandas as pd

from ..common.frames import as_strings, check_columns, strings
from ..common.language import sentence_starts, word_starts
from ..common.plots import draw_means, finish, label_mean, marker_legend, new_axes, offsets
from ..common.progress import work_bar
from ..experiment.significance import Statistics, correct, effect_sizes, p_values, resampled_means
from ..modelling.tokens import tokenized
from .judging import scores_by_row
from .positions import texts_of_corpus

PLACES = (0.0, 0.25, 0.5, 0.75, 1.0)


@dataclass(frozen=True, eq=False, repr=False)
class PositionSensitivity:
    """Scores of documents with the relevant passage at several places.

    Args:
        scores: `name` of the system, `qid`, `docno`, requested `place` (0 is the start and 1 the end of the document),
            `real_place` (the share of the other tokens that precede the passage), `first_token` (number of tokens
            before the passage), `length` (of the document in tokens) and `score`.
        statistics: the test, `alpha` and the confidence level of the intervals.
    """

    scores: pd.DataFrame
    statistics: Statistics = field(default_factory=Statistics)

    def __repr__(self) -> str:
        names = self.scores["name"].unique()
        return f"PositionSensitivity({', '.join(names)}; {len(self.scores)} scores)"

    def _repr_html_(self) -> str:
        return self.table.to_html(index=False)

    @cached_property
    def table(self) -> pd.DataFrame:
        """One row per system and place. Documents of the same query are averaged first.

        Columns:

        - `name, place`, and the means of `real_place` and `first_token`;
        - `queries`: the number of queries that have a document with versions for this place and the first place; only
          these documents count;
        - `score`: the mean;
        - `change`: the mean difference from the score at the first place, with its bootstrap interval `low, high`. The
          unit is the standard deviation over queries of the scores at the first place, because scales of systems
          differ;
        - `lower`: the share of queries with a lower score than at the first place;
        - `p-value` of the change, `p-value corrected` for the number of places by Holm's method, and `reject`;
        - `effect size`: Cohen's d_z of the change.
        """
        frames = [self._system_table(name, rows) for name, rows in self.scores.groupby("name", sort=False)]
        return pd.concat(frames, ignore_index=True)

    def plot(self, *, ax: Any = None) -> Any:
        """Plot the change of each system's score over the real place of the passage; return the matplotlib axes.

        A filled marker means a significant change from the first place. `ax` are axes to draw on; None creates a
        figure.
        """
        systems = self.table.groupby("name", sort=False)
        ax = ax or new_axes(len(systems))
        shifts = offsets(self.table["place"], len(systems))
        for system, ((name, rows), shift) in enumerate(zip(systems, shifts, strict=True)):
            places, full = rows["real_place"].to_numpy() + shift, rows["reject"].tolist()
            label = str(name) if rows["change"].notna().any() else f"{name}: not drawn, no spread at the first place"
            draw_means(ax, places, rows["change"], rows, full=full, label=label, system=system)
        ax.axhline(0, color="0.6", linewidth=0.8)
        ax.set_xlabel("real place of the relevant passage (0: start, 1: end)")
        ax.set_ylabel(
            label_mean("change of the score in standard deviations", self.statistics.confidence).replace(": ", ":\n")
        )
        return finish(
            ax, marker_legend(f"changed from the first place (p < {self.statistics.alpha:g}, holm correction)")
        )

    def _system_table(self, name: Any, rows: pd.DataFrame) -> pd.DataFrame:
        values = rows.pivot_table("score", ["qid", "docno"], "place")  # NaN where a document has no such version
        first, *others = values.columns.to_numpy(dtype="float64").tolist()
        spread = values[first].groupby("qid").mean().std(ddof=1)
        unit = spread if spread > 0 else np.nan
        changes = [{**self._change(values, first, first, unit), "p-value": np.nan}]
        changes += [self._change(values, first, place, unit) for place in others]
        table = pd.DataFrame([change for change in changes if change["queries"]])
        reject, corrected = correct(table["p-value"].to_numpy()[1:], "holm", self.statistics.alpha)
        means = rows.groupby("place")[["real_place", "first_token"]].mean().loc[table["place"]].reset_index(drop=True)
        table.insert(0, "name", name)
        table.insert(2, "real_place", means["real_place"])
        table.insert(3, "first_token", means["first_token"])
        table.insert(len(table.columns) - 1, "p-value corrected", [np.nan, *corrected])
        table.insert(len(table.columns) - 1, "reject", [False, *reject])
        return table

    def _change(self, values: pd.DataFrame, first: float, place: float, unit: float) -> dict[str, Any]:
        """Return the row of a place, from the documents with versions for this place and the first one."""
        means = pd.DataFrame({"x": values[place], "y": values[first]}).dropna().groupby("qid").mean()
        x, y = means[["x"]].to_numpy(), means[["y"]].to_numpy()
        row: dict[str, Any] = {"place": place, "queries": len(means)}
        if means.empty:
            return row
        s = self.statistics
        x_means, y_means = (resampled_means(scores, resamples=s.resamples, seed=s.seed) for scores in (x, y))
        low, high = s.interval(x_means - y_means)
        return row | {
            "score": x.mean(),
            "change": (x - y).mean() / unit,
            "low": low[0] / unit,
            "high": high[0] / unit,
            "lower": (x < y).mean(),
            "p-value": p_values(x, y, s.test, resamples=s.resamples, seed=s.seed)[0],
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

    The passage is removed from the document and inserted between two sentences of the rest, so that all versions of a
    document have the same words. If no sentence begins within half the distance between two places, as in tables, logs
    and transcripts, it is inserted between two words. In documents of a few words, several places can give the same
    version, which is used once, for the nearest place.

    Args:
        systems: a reranker, or several by name. Their input is `qid, query, docno` and the text column.
        topics: `qid, query`.
        corpus: `docno` and the text column: a frame, or an iterable of dicts such as a dataset's `get_corpus_iter()`.
        gold: `qid, docno, start, end`: the characters of one relevant passage per document, e.g. the gold positions of
            a collection or `relevant_positions(...).matched`.
        places: the new places of the passage, as a share of the rest of the document; 0 is the start.
        tokenizer: a fast Hugging Face tokenizer, its name or folder, to count tokens; None counts words and punctuation
            marks.
        text_field: the text column.
        verbose: show a progress bar over the systems.

    Returns:
        The scores with their table and plot. To change the test, use `dataclasses.replace(found, statistics=...)`.

    Example:
        `ld.position_sensitivity({"FirstP": ld.FirstP()}, topics, corpus, dataset.gold).plot()`
    """
    by_name = dict(systems) if isinstance(systems, Mapping) else {type(systems).__name__: systems}
    distinct = sorted({float(place) for place in places})
    if len(distinct) < 2 or distinct[0] < 0 or distinct[-1] > 1:
        raise ValueError(f"places={list(places)} must be at least two different numbers from 0 to 1")
    spans = _spans(gold, topics)
    texts = texts_of_corpus(corpus, set(spans["docno"]), text_field)
    versions = _versions(spans, texts, distinct, tokenizer, text_field)
    rows = versions[["qid", "query", text_field]]
    frames = []
    with work_bar("position_sensitivity", "system", len(by_name), shown=verbose) as bar:
        for name, system in by_name.items():
            frames.append(versions.assign(name=name, score=scores_by_row(system, rows, repr(name))))
            bar.update()
    columns = ["name", "qid", "docno", "place", "real_place", "first_token", "length", "score"]
    scores = pd.concat(frames, ignore_index=True)[columns]
    return PositionSensitivity(scores)


def move_passage(text: str, start: int, end: int, place: float, reach: float = 1.0) -> tuple[str, int]:
    """Move the passage from `start` to `end`; return the new text and the character at which the passage begins.

    `place` is the share of the rest before the passage. The passage moves to the nearest sentence boundary if this is
    closer than `reach` (a share of the rest), and otherwise to the nearest word boundary.

    Example:
        >>> move_passage("One. Two. Three.", 5, 9, 1.0)
        ('One. Three. Two.', 12)
    """
    passage = text[start:end].strip()
    before, after = text[:start].strip(), text[end:].strip()
    rest = f"{before} {after}".strip()
    target = place * len(rest)
    cut = _nearest(target, [0, *sentence_starts(rest), len(rest)])
    if abs(cut - target) >= reach * len(rest):
        cut = _nearest(target, [0, *word_starts(rest), len(rest)])
    head, tail = rest[:cut].rstrip(), rest[cut:].lstrip()
    start_there = len(head) + 1 if head else 0
    return " ".join(filter(None, [head, passage, tail])), start_there


def _nearest(target: float, boundaries: list[int]) -> int:
    return min(boundaries, key=lambda boundary: abs(boundary - target))


def _spans(gold: pd.DataFrame, topics: pd.DataFrame) -> pd.DataFrame:
    """Return `qid, query, docno, start, end` for the queries of the topics."""
    check_columns(gold, ("qid", "docno", "start", "end"), "gold")
    check_columns(topics, ("qid", "query"), "topics")
    queries = dict(zip(as_strings(topics["qid"]), strings(topics["query"], "query"), strict=True))
    spans = gold[["qid", "docno", "start", "end"]].assign(qid=as_strings(gold["qid"]), docno=as_strings(gold["docno"]))
    spans = spans.assign(query=spans["qid"].map(queries)).dropna(subset="query")
    duplicates = spans["docno"][spans.duplicated(["qid", "docno"])].tolist()
    if duplicates or not len(spans):
        problem = f"it has several for {duplicates[:5]}" if duplicates else "it has none for their qids"
        raise ValueError(f"gold must have one passage per document of the topics: {problem}")
    return spans


def _versions(
    spans: pd.DataFrame, texts: dict[str, str], places: list[float], tokenizer: Any, text_field: str
) -> pd.DataFrame:
    """Return one row per distinct version of each document."""
    rows: list[tuple[Any, ...]] = []
    reach = min(b - a for a, b in pairwise(places)) / 2
    for qid, docno, start, end, query in spans.itertuples(index=False):
        text = texts.get(docno, "")  # empty if missing from the corpus
        valid = pd.notna(start) and pd.notna(end) and 0 <= start < end <= len(text)
        passage = text[int(start) : int(end)].strip() if valid else ""
        if not passage:
            raise ValueError(f"gold of {docno!r} must be a passage: {start} to {end} of {len(text)} characters is not")
        versions: dict[int, tuple[Any, ...]] = {}  # by the offset of the passage
        for place in places:
            version, offset = move_passage(text, int(start), int(end), place, reach)
            tokens = tokenized(tokenizer, version)
            before, after = int(tokens.tokens_before(offset)), tokens.tokens_begun(offset + len(passage))
            rest = len(tokens) - (after - before)
            real = before / rest if rest else 0.0
            if offset not in versions or abs(place - real) < abs(versions[offset][0] - real):
                versions[offset] = (place, real, before, len(tokens), version)
        rows += [(qid, query, docno, *version) for version in versions.values()]
    columns = ["qid", "query", "docno", "place", "real_place", "first_token", "length", text_field]
    versions_frame = pd.DataFrame(rows, columns=columns)
    if not versions_frame.duplicated(["qid", "docno"]).any():
        raise ValueError("gold must have documents with text outside of the passage, to which it can be moved")
    return versions_frame
