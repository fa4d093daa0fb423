"""Position sensitivity: how the score of a document changes when its relevant passage is moved."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any

import pandas as pd

from ..common.frames import as_strings, check_columns, strings
from ..common.language import sentence_starts, word_starts
from ..common.progress import work_bar
from .positions import texts_of_corpus
from .scoring import scores_by_row

PLACES = (0.0, 0.25, 0.5, 0.75, 1.0)


def position_sensitivity(
    systems: Any,
    topics: pd.DataFrame,
    corpus: pd.DataFrame | Iterable[Mapping[str, Any]],
    gold: pd.DataFrame,
    *,
    places: Sequence[float] = PLACES,
    text_field: str = "text",
    verbose: bool = False,
) -> pd.DataFrame:
    """Score each document with its relevant passage moved to several places.

    The passage is removed from the document and inserted between two sentences of the rest, so that all versions of a
    document have the same words. If no sentence begins within half the distance between two places, as in tables, logs
    and transcripts, it is inserted between two words. In documents of a few words, several places can give the same
    version.

    Args:
        systems: a reranker, or several by name. Their input is `qid, query, docno` and the text column.
        topics: `qid, query`.
        corpus: `docno` and the text column: a frame, or an iterable of dicts such as a dataset's `get_corpus_iter()`.
        gold: `qid, docno, start, end`: the characters of one relevant passage per document, e.g. the gold positions of
            a collection or `relevant_positions(...).matched`.
        places: the new places of the passage, as a share of the rest of the document; 0 is the start.
        text_field: the text column.
        verbose: show a progress bar over the systems.

    Returns:
        `name, qid, measure, value` for `compare`: `name` is the place, such as `"0.5"`, `measure` the system, and
        `value` its score, averaged over the documents of the query. A comparison with the first place as the baseline
        tests each system on its own, because the scores of systems have different scales. Scores have no natural
        zero: read means, differences and p-values, not gains or equivalence.

    Raises:
        ValueError: if the places are not two different shares, or gold has no passage, several ones for a document, or
            one that is not in the text.

    Example:
        `ld.compare(ld.position_sensitivity(ld.FirstP(), topics, corpus, gold), baseline="0", correction="holm")`
    """
    by_name = dict(systems) if isinstance(systems, Mapping) else {type(systems).__name__: systems}
    distinct = sorted({float(place) for place in places})
    if len(distinct) < 2 or distinct[0] < 0 or distinct[-1] > 1:
        raise ValueError(f"places={list(places)} must be at least two different numbers from 0 to 1")
    spans = _spans(gold, topics)
    texts = texts_of_corpus(corpus, set(spans["docno"]), text_field)
    versions = _versions(spans, texts, distinct, text_field)
    frames = []
    with work_bar("position_sensitivity", "system", len(by_name), shown=verbose) as bar:
        for name, system in by_name.items():
            scores = scores_by_row(system, versions[["qid", "query", text_field]], repr(name))
            frames.append(versions[["name", "qid"]].assign(measure=str(name), value=scores))
            bar.update()
    rows = pd.concat(frames, ignore_index=True)
    return rows.groupby(["name", "qid", "measure"], sort=False)["value"].mean().reset_index()


def move_passage(text: str, start: int, end: int, place: float, reach: float = 1.0) -> str:
    """Return the text with the passage from `start` to `end` moved to another place.

    `place` is the share of the rest before the passage. The passage moves to the nearest sentence boundary if this is
    closer than `reach` (a share of the rest), and otherwise to the nearest word boundary.

    Example:
        >>> move_passage("One. Two. Three.", 5, 9, 1.0)
        'One. Three. Two.'
    """
    passage = text[start:end].strip()
    before, after = text[:start].strip(), text[end:].strip()
    rest = f"{before} {after}".strip()
    target = place * len(rest)
    cut = _nearest(target, [0, *sentence_starts(rest), len(rest)])
    if abs(cut - target) >= reach * len(rest):
        cut = _nearest(target, [0, *word_starts(rest), len(rest)])
    return " ".join(filter(None, [rest[:cut].rstrip(), passage, rest[cut:].lstrip()]))


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


def _versions(spans: pd.DataFrame, texts: dict[str, str], places: list[float], text_field: str) -> pd.DataFrame:
    """Return one row per place and document, place by place: the place as `name`, `qid`, `query` and the text."""
    reach = min(b - a for a, b in pairwise(places)) / 2
    rows = []
    for place in places:
        for qid, docno, start, end, query in spans.itertuples(index=False):
            text = texts.get(docno, "")  # empty if missing from the corpus
            valid = pd.notna(start) and pd.notna(end) and 0 <= start < end <= len(text)
            if not (valid and text[int(start) : int(end)].strip()):
                raise ValueError(
                    f"gold of {docno!r} must be a passage: {start} to {end} of {len(text)} characters is not"
                )
            rows.append((f"{place:g}", qid, query, move_passage(text, int(start), int(end), place, reach)))
    versions = pd.DataFrame(rows, columns=["name", "qid", "query", text_field])
    if versions.groupby("name")[text_field].agg(tuple).nunique() == 1:
        raise ValueError("gold must have documents with text outside of the passage, to which it can be moved")
    return versions
