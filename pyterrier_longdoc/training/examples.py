"""What is trained on: each query's candidates with their labels, what an epoch draws of them, a teacher's scores."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from random import Random
from typing import Any

import numpy as np
import pandas as pd
import pyterrier as pt

from ..common.arguments import check_given
from ..common.documents import Document, Text
from ..common.frames import (
    TextField,
    as_strings,
    check_columns,
    field_names,
    keys_of,
    labels_of,
    numbers,
    with_text,
)
from .queries import nothing_to_train_on
from .recipe import TrainingArgs


@dataclass(frozen=True)
class Group:
    """A training query with its candidates, best ranked first.

    Attributes:
        qid: the query's identifier.
        query: the query's text.
        texts: C candidates, texts or documents.
        labels: C labels: relevant candidates have at least 1, the more the better, whatever the collection's scale; all
            others have 0.
        targets: the teacher's C scores, or None.
    """

    qid: str
    query: str
    texts: tuple[Text, ...]
    labels: tuple[float, ...]
    targets: tuple[float, ...] | None = None

    @property
    def positives(self) -> list[int]:
        """Indices of the relevant candidates."""
        return [i for i, label in enumerate(self.labels) if label > 0]

    @property
    def negatives(self) -> list[int]:
        """Indices of all others."""
        return [i for i, label in enumerate(self.labels) if label <= 0]


def make_groups(
    results: pd.DataFrame, texts: Sequence[Text], qrels: pd.DataFrame, args: TrainingArgs | None = None
) -> list[Group]:
    """Joins a run with its qrels.

    Args:
        results: `qid, query, docno`, `score` or `rank` if negatives are to be limited by rank, and the recipe's
            `teacher_field` if it is there.
        texts: the text of each row of `results`.
        qrels: `qid, docno, label`; of several labels of a document the last one counts.
        args: the recipe: `max_negative_rank`, `negative_pool`, `min_label`, `judged`, `unjudged`, `teacher_field`,
            `seed`; None for the defaults. Judged documents that were not retrieved are added before, by `add_judged`.

    Returns:
        The queries that have at least one positive and one negative among their candidates, in order of appearance.

    Raises:
        ValueError: if qrels lack a column, no query has both a positive and a negative (the message says why), or a
            label, a score or a teacher's score is no number.
    """
    args = args or TrainingArgs()
    check_columns(qrels, ("qid", "docno", "label"), "qrels")
    judged = dict(zip(keys_of(qrels), labels_of(qrels, "qrels"), strict=True))
    frame = pd.DataFrame(
        {
            "qid": results["qid"].astype(str).tolist(),
            "query": results["query"].tolist(),
            "text": texts,
            "label": np.array([judged.get(key, np.nan) for key in keys_of(results)], dtype=float),
            "position": _positions(results),
        }
    )
    if args.teacher_field in results.columns:
        advice = "let the teacher score every candidate"
        if args.judged == "all":
            advice += ", judged ones too: TeacherScores(teacher)(add_judged(run, qrels, text_loader=...))"
        frame["target"] = numbers(results, args.teacher_field, "the teacher's scores", advice)
    groups = [_group(str(qid), candidates, args) for qid, candidates in frame.groupby("qid", sort=False)]
    found = [group for group in groups if group is not None]
    if not found:
        raise nothing_to_train_on(results, qrels, args)
    return found


def add_judged(
    results: pd.DataFrame,
    qrels: pd.DataFrame,
    *,
    text_field: TextField = "text",
    text_loader: Any = None,
    topics: pd.DataFrame | None = None,
) -> pd.DataFrame:
    """Adds the judged documents that a first stage did not retrieve, so that they are trained on too.

    So does FlexNeuART's export of training data: all positives of the qrels; as negatives judged ones and those that
    were retrieved. Without it a query whose relevant document was not retrieved is not trained on.

    Args:
        results: `qid, query, docno`, `score` and `rank` if there are any, and the text unless it is loaded later.
        qrels: `qid, docno, label`.
        text_field: the column with the text, or a tuple of columns.
        text_loader: supplies the text of the added rows, where `results` has text.
        topics: `qid, query` of queries that may have no row in `results`; without them these are left out, because
            their text is unknown.

    Returns:
        `results`, and behind them a row for each judged document that is missing, in the order of the qrels: with the
        score minus infinity and a rank behind all others; other columns but the text are empty, and ids are strings.

    Raises:
        ValueError: if a column is missing, or rows are to be added to candidates with text and there is no text_loader,
            or none of their text in it.
    """
    check_columns(results, ("qid", "query", "docno"), "the candidates")
    check_columns(qrels, ("qid", "docno", "label"), "qrels")
    asked = [results] if topics is None else [results, topics]
    check_columns(asked[-1], ("qid", "query"), "topics")
    queries = pd.concat([frame[["qid", "query"]].assign(qid=as_strings(frame["qid"])) for frame in asked])
    queries = queries.reset_index(drop=True).drop_duplicates("qid")
    judged, retrieved = (
        frame[["qid", "docno"]].reset_index(drop=True).astype(str).drop_duplicates() for frame in (qrels, results)
    )
    judged = judged.merge(queries, on="qid").merge(retrieved, how="left", indicator="found")
    added = judged.loc[judged["found"] == "left_only", ["qid", "query", "docno"]].reset_index(drop=True)
    if not len(added):
        return results
    fields = [name for name in field_names(text_field) if name in results.columns]
    if fields and text_loader is None:
        qid, _, docno = added.iloc[0]
        raise ValueError(
            f"judged='all' trains on judged documents that were not retrieved, here {len(added)}, e.g. {docno!r} for "
            f"the query {qid!r}, and their text is missing: give text_loader= (a dataset or an index has one), or take "
            f"TrainingArgs(judged='retrieved')"
        )
    if fields:
        texts = with_text(added, field_names(text_field), text_loader)[fields].reset_index(drop=True)
        lacking = added[texts.isna().all(axis=1)]
        if len(lacking):
            raise ValueError(
                f"text_loader {text_loader!r} has no text of {len(lacking)} judged documents, e.g. "
                f"{lacking['docno'].iloc[0]!r}: leave them out of the qrels"
            )
        added = added.join(texts)
    if "score" in results.columns:
        added["score"] = -np.inf
    if "rank" in results.columns:
        added["rank"] = results["rank"].max() + 1 if len(results) else 0
    # Of one type: not every id of the qrels is one of theirs, a number or a known category.
    ids = {name: as_strings(results[name]) for name in ("qid", "docno")}
    return pd.concat([results.assign(**ids), added], ignore_index=True)


def drawable(results: pd.DataFrame, qrels: pd.DataFrame, args: TrainingArgs) -> pd.DataFrame:
    """The candidates that a recipe may draw, so that only their texts are loaded: the same training as with all."""
    groups = make_groups(results, [str(row) for row in range(len(results))], qrels, args)
    return results.iloc[sorted(int(str(row)) for group in groups for row in group.texts)]


def _group(qid: str, rows: pd.DataFrame, args: TrainingArgs) -> Group | None:
    """The candidates that may be drawn, the same in every epoch; None without a positive or a negative.

    The limit of ranks is for what was retrieved: with `judged="all"` a judged negative may be drawn wherever it stands,
    or else a longer run would have fewer of them.
    """
    if args.unjudged == "skip":
        rows = rows[rows["label"].notna()]
    rows = rows.sort_values("position", kind="stable")
    judged = rows["label"].to_numpy()
    positive = judged >= args.min_label
    labels = np.where(positive, judged - args.min_label + 1, 0.0)
    negatives = ~positive
    if args.max_negative_rank is not None:
        high = rows["position"].to_numpy() < args.max_negative_rank
        negatives &= high | (~np.isnan(judged) if args.judged == "all" else False)
    places = np.flatnonzero(negatives).tolist()
    if not positive.any() or not places:
        return None
    if args.negative_pool is not None and len(places) > args.negative_pool:
        places = Random(f"{args.seed}:pool:{qid}").sample(places, args.negative_pool)
    drawable = sorted([*np.flatnonzero(positive), *places])
    rows = rows.iloc[drawable]
    return Group(
        qid,
        str(rows["query"].iloc[0]),
        tuple(rows["text"]),
        tuple(labels[drawable].tolist()),
        tuple(rows["target"].tolist()) if "target" in rows.columns else None,
    )


def _positions(results: pd.DataFrame) -> list[int]:
    """Rank of each row within its query, by score if there is one, from 0."""
    advice = "give each candidate a number, or leave the column out where the rows stand in the order of their ranks"
    if "score" in results.columns:
        scores = pd.Series(numbers(results, "score", "the candidates", advice, infinite=True), index=results.index)
        ranks = scores.groupby(results["qid"].to_numpy(), sort=False).rank(ascending=False, method="first") - 1
    elif "rank" in results.columns:
        ranks = pd.Series(numbers(results, "rank", "the candidates", advice))
    else:
        ranks = results.groupby("qid", sort=False).cumcount()
    return ranks.astype(int).tolist()


def pseudo_qrels(results: pd.DataFrame, *, relevant: int = 1) -> pd.DataFrame:
    """Labels made of a first stage's own ranking, for training where nothing is judged (Mokrii et al. 2021).

    Args:
        results: `qid, docno` and `score` or `rank`, e.g. of BM25.
        relevant: how many of the best candidates of each query count as relevant.

    Returns:
        `qid, docno, label` with label 1 for these and 0 for all others.
    """
    check_given(relevant=relevant)
    labels = [int(position < relevant) for position in _positions(results)]
    return results[["qid", "docno"]].assign(label=labels).reset_index(drop=True)


Pick = tuple[Group, tuple[int, ...]]
"""A query and the indices of some of its candidates; with `sampling="pairs"` a positive's, then negatives'."""


def examples_per_epoch(groups: Sequence[Group], args: TrainingArgs) -> int:
    """How many picks an epoch has."""
    return sum(len(group.texts) for group in groups) if args.sampling == "pointwise" else len(groups)


def draw_epoch(groups: Sequence[Group], args: TrainingArgs, epoch: int) -> list[Pick]:
    """All picks of an epoch in the order of training.

    Every draw depends on the seed, the epoch and the query alone, not on what was drawn before: a run that continues
    after a kill needs no state of a random generator.

    Args:
        groups: the training data.
        args: the recipe: `sampling`, `negatives`, `seed`.
        epoch: its number, from 0.
    """
    picks: list[Pick] = []
    for group in groups:
        if args.sampling == "pointwise":
            picks += [(group, (i,)) for i in range(len(group.texts))]
            continue
        rng = Random(f"{args.seed}:{epoch}:{group.qid}")
        positive, negatives = rng.choice(group.positives), group.negatives
        if args.sampling == "listwise":
            others = [i for i in range(len(group.texts)) if i != positive]
            drawn = sorted([positive, *rng.sample(others, min(args.negatives, len(others)))])
        elif len(negatives) >= args.negatives:
            drawn = [positive, *rng.sample(negatives, args.negatives)]
        else:
            # Too few: each is taken equally often, or once more.
            rng.shuffle(negatives)
            drawn = [positive, *(negatives[i % len(negatives)] for i in range(args.negatives))]
        picks.append((group, tuple(drawn)))
    Random(f"{args.seed}:{epoch}").shuffle(picks)
    return picks


def make_example(pick: Pick, args: TrainingArgs, epoch: int) -> Group:
    """What one loss is computed of: the candidates of a pick in its order, augmented if the recipe says so."""
    group, candidates = pick
    texts = [group.texts[i] for i in candidates]
    if args.augment is not None:
        rngs = [Random(f"{args.seed}:{epoch}:{group.qid}:{i}") for i in candidates]
        texts = [_augmented(text, args.augment, rng) for text, rng in zip(texts, rngs, strict=True)]
    labels = tuple(group.labels[i] for i in candidates)
    targets = None if group.targets is None else tuple(group.targets[i] for i in candidates)
    return Group(group.qid, group.query, tuple(texts), labels, targets)


def _augmented(text: Text, augment: Callable[[str, Random], str], rng: Random) -> Text:
    """The text changed; what is read with each of its windows stays."""
    if isinstance(text, Document):
        return replace(text, text=augment(text.text, rng))
    return augment(text, rng)


class TeacherScores(pt.Transformer):
    """Adds a column with the scores of another transformer; all other columns stay, the score too.

    Args:
        teacher: scores `qid, query, docno` and text; frozen, whatever it is.
        column: its name, as in the student's `TrainingArgs(teacher_field=...)`.

    Example:
        `student = ld.MaxP(small, training=ld.TrainingArgs(loss="margin_mse"))`, then
        `(bm25 >> text >> TeacherScores(teacher) >> student).fit(topics, qrels)`. PARADE's distillation (Eq. 8) is
        `TrainingArgs.preset("parade-distillation")`.
    """

    def __init__(self, teacher: pt.Transformer, *, column: str = "teacher_score") -> None:
        super().__init__()
        self.teacher = teacher
        self.column = column

    def transform(self, inp: pd.DataFrame) -> pd.DataFrame:
        """Adds the column.

        Raises:
            ValueError: if the teacher drops a candidate, or has several scores for one.
        """
        keys, columns = ["qid", "docno"], {"qid": str, "docno": str}
        answer: Any = self.teacher(inp)
        scores = answer[[*keys, "score"]].astype(columns).drop_duplicates().set_index(keys)["score"].astype(float)
        twice = scores.index[scores.index.duplicated()]
        if len(twice):
            raise ValueError(f"the teacher gives {len(twice)} candidates several scores, e.g. {twice[0]}")
        asked = pd.MultiIndex.from_frame(inp[keys].astype(columns))
        missing = asked[~asked.isin(scores.index)]
        if len(missing):
            raise ValueError(
                f"the teacher gives no score for {len(missing)} of {len(asked)} candidates, e.g. {missing[0]}"
            )
        return inp.assign(**{self.column: scores.reindex(asked).to_numpy()})
