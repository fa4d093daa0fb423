"""How a reranker's score of a document changes when its relevant passage moves from the start to the end."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from functools import cached_property
from typing import Any

import numpy as np
import pandas as pd
import pyterrier as pt

from ..common.frames import as_strings, check_columns, strings
from ..common.language import sentence_starts
from ..experiment.plots import beside, draw_means, finish, marker_meaning, new_axes
from ..experiment.significance import RESAMPLES, bootstrap_intervals, correct, effect_sizes, p_values
from .judging import scores_by_row
from .positions import texts_of_corpus, token_reader

PLACES = (0.0, 0.25, 0.5, 0.75, 1.0)


@dataclass(frozen=True, eq=False, repr=False)
class PositionSensitivity:
    """Scores of documents with their relevant passage at several places.

    Args:
        scores: `name` of the system, `qid`, `docno`, `place` (0 is the start of the document and 1 its end),
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

        Columns: `name, place`; `first_token`, on average; the mean `score`; `change`, the mean difference from the
        score at the first place, in units of the standard deviation over queries of the scores there, since the scales
        of systems differ; its bootstrap interval `low, high`; `lower`, the share of queries whose score is lower than
        at the first place; `p-value` of the change, `p-value corrected` for the number of places by Holm's method, and
        `reject`; and the `effect size` (Cohen's d_z) of the change. Documents of the same query are averaged first.
        """
        frames = [self._of_system(name, rows) for name, rows in self.scores.groupby("name", sort=False)]
        return pd.concat(frames, ignore_index=True)

    def plot(self, *, ax: Any = None) -> Any:
        """Draws the change of each system's score over the place of the passage, with intervals.

        A full marker is a significant change from the first place.

        Args:
            ax: matplotlib axes to draw on; None makes a figure.

        Returns:
            The axes.

        Raises:
            ImportError: without matplotlib.
        """
        systems = self.table.groupby("name", sort=False)
        ax = ax or new_axes(len(systems))
        for (name, rows), aside in zip(systems, beside(self.table["place"], len(systems)), strict=True):
            places, full = rows["place"].to_numpy() + aside, rows["reject"].tolist()
            draw_means(ax, places, rows["change"], rows, full=full, label=self._label(name, rows))
        ax.axhline(0, color="0.6", linewidth=0.8)
        ax.set_xlabel("place of the relevant passage (0: start, 1: end)")
        ax.set_ylabel("change of the score (standard deviations)")
        return finish(ax, marker_meaning(f"changed from the first place (p < {self.alpha:g}, holm correction)"))

    def _label(self, name: Any, rows: pd.DataFrame) -> str:
        """A system's line in the legend: its name, and why there is nothing to see if there is not."""
        if rows["change"].notna().any():
            return str(name)
        queries = self.scores.loc[self.scores["name"] == name, "qid"].nunique()
        return f"{name}: not drawn, no spread of scores at the first place (queries: {queries})"

    def _of_system(self, name: Any, rows: pd.DataFrame) -> pd.DataFrame:
        values = rows.pivot_table("score", "qid", "place", aggfunc="mean")
        x, first = values.to_numpy(), values.to_numpy()[:, :1]
        y = np.repeat(first, x.shape[1], axis=1)
        spread = first.std(ddof=1) if len(first) > 1 else np.nan
        unit = spread if spread > 0 else np.nan
        interval = bootstrap_intervals(x, y, level=self.confidence, resamples=self.resamples, seed=self.seed)
        p = p_values(x[:, 1:], y[:, 1:], self.test, resamples=self.resamples, seed=self.seed)
        reject, corrected = correct(p, "holm", self.alpha)
        return pd.DataFrame(
            {
                "name": name,
                "place": values.columns.to_numpy(),
                "first_token": rows.groupby("place")["first_token"].mean().to_numpy(),
                "score": x.mean(0),
                "change": (x - y).mean(0) / unit,
                "low": interval.low / unit,
                "high": interval.high / unit,
                "lower": (x < y).mean(0),
                "p-value": [np.nan, *p],
                "p-value corrected": [np.nan, *corrected],
                "reject": [False, *reject],
                "effect size": effect_sizes(x, y),
            }
        )


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
    """Scores each document with its relevant passage moved to several places.

    The passage is cut out of the document and put in between two sentences of the rest, so that all versions of a
    document have the same words.

    Args:
        systems: a reranker, or several by name. They read `qid, query, docno` and the text column and set `score`.
        topics: `qid, query`.
        corpus: `docno` and the text column: a frame, or an iterable of dicts, such as a dataset's `get_corpus_iter()`.
        gold: `qid, docno, start, end`: the characters of one relevant passage of each document: gold positions of a
            collection, or `relevant_positions(...).matched`.
        places: where the passage is put, as a share of the rest of the document: 0 is before all else.
        tokenizer: a fast Hugging Face tokenizer, or its name or folder, whose tokens are counted; None counts words
            and punctuation marks.
        text_field: the text column.
        verbose: show a progress bar.

    Returns:
        The scores, their table and their plot; `dataclasses.replace` of `test`, `alpha` and so on tests them anew.

    Raises:
        ValueError: if a column is missing, a passage is not in its document, a document is not in the corpus, places
            are not between 0 and 1, or a system leaves out rows.
    """
    named = dict(systems) if isinstance(systems, Mapping) else {type(systems).__name__: systems}
    if not named:
        raise ValueError("systems is empty: name at least one reranker")
    at = sorted({float(place) for place in places})
    if len(at) < 2 or at[0] < 0 or at[-1] > 1:
        raise ValueError(f"places={list(places)} must be at least two different numbers from 0 to 1")
    spans = _checked_gold(gold, topics)
    texts = texts_of_corpus(corpus, set(spans["docno"]), text_field)
    versions = _versions(spans, texts, at, token_reader(tokenizer), text_field)
    to_score = versions[["qid", "query", text_field]]
    frames = [
        versions.assign(name=name, score=scores_by_row(system, to_score, repr(name)))
        for name, system in pt.tqdm(named.items(), desc="position_sensitivity", unit="system", disable=not verbose)
    ]
    columns = ["name", "qid", "docno", "place", "first_token", "length", "score"]
    scores = pd.concat(frames, ignore_index=True)[columns]
    return PositionSensitivity(scores)


def moved(text: str, start: int, end: int, place: float) -> tuple[str, int]:
    """A text with its passage from `start` to `end` moved, and the character at which it begins there.

    `place` is the share of the rest that goes before it; the nearest sentence boundary is taken.

    Example:
        >>> moved("One. Two. Three.", 5, 9, 1.0)
        ('One. Three. Two.', 12)
    """
    passage = text[start:end].strip()
    before, after = text[:start].strip(), text[end:].strip()
    rest = f"{before} {after}".strip()
    cut = min([0, *sentence_starts(rest), len(rest)], key=lambda boundary: abs(boundary - place * len(rest)))
    head, tail = rest[:cut].rstrip(), rest[cut:].lstrip()
    begins = len(head) + 1 if head else 0
    return " ".join(filter(None, [head, passage, tail])), begins


def _checked_gold(gold: pd.DataFrame, topics: pd.DataFrame) -> pd.DataFrame:
    """`qid, query, docno, start, end`, for the topics' queries."""
    check_columns(gold, ("qid", "docno", "start", "end"), "gold")
    check_columns(topics, ("qid", "query"), "topics")
    queries = dict(zip(as_strings(topics["qid"]), strings(topics["query"], "query"), strict=True))
    spans = gold[["qid", "docno", "start", "end"]].assign(qid=as_strings(gold["qid"]), docno=as_strings(gold["docno"]))
    spans = spans.assign(query=spans["qid"].map(queries)).dropna(subset="query")
    if not len(spans):
        raise ValueError("gold and topics have no qid in common: there is no passage to move")
    twice = spans[spans.duplicated(["qid", "docno"])]
    if len(twice):
        qid, docno = twice.iloc[0][["qid", "docno"]]
        raise ValueError(
            f"gold has several passages of document {docno!r} for query {qid!r}: keep one, since the others would stay "
            f"where they are"
        )
    return spans


def _versions(
    spans: pd.DataFrame, texts: dict[str, str], places: list[float], tokens_of: Any, text_field: str
) -> pd.DataFrame:
    """One row for each version of each document."""
    rows = []
    for qid, docno, start, end, query in spans.itertuples(index=False):
        if docno not in texts:
            raise ValueError(f"document {docno!r} of gold is not in the corpus")
        text = texts[docno]
        known = pd.notna(start) and pd.notna(end) and 0 <= start < end <= len(text)
        if not known or not text[int(start) : int(end)].strip():
            raise ValueError(
                f"gold has no passage of document {docno!r} from character {start} to {end}: the text has "
                f"{len(text)} characters"
            )
        for place in places:
            version, begins = moved(text, int(start), int(end), place)
            tokens = tokens_of(version)
            rows.append((qid, query, docno, place, int(tokens.tokens_before(begins)), len(tokens), version))
    return pd.DataFrame(rows, columns=["qid", "query", "docno", "place", "first_token", "length", text_field])
