"""What is trained on: each query's candidates with their labels, what an epoch draws of them, a teacher's scores.

Shapes: R rows of a run, C candidates of a query.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from random import Random
from typing import Any

import numpy as np
import pandas as pd
import pyterrier as pt

from ..common.arguments import check_given
from ..common.documents import Document, Text, is_blank
from ..common.frames import (
    TextField,
    as_strings,
    blank_rows,
    check_columns,
    field_names,
    numbers,
    strings,
    with_all_text,
)
from .queries import labels_of_rows, nothing_to_train_on
from .recipe import TrainingArgs, seed_of


@dataclass(frozen=True, eq=False)
class Group:
    """A training query with its candidates, best ranked first; their texts are read when they are drawn.

    Attributes:
        qid: the query's identifier.
        query: the query's text.
        rows: `(C,)` the candidates' rows in the run, from 0.
        labels: `(C,)` labels: relevant candidates have at least 1, the more the better, whatever the collection's
            scale; all others have 0.
        targets: `(C,)` the teacher's scores, or None.
    """

    qid: str
    query: str
    rows: np.ndarray
    labels: np.ndarray
    targets: np.ndarray | None = None

    @property
    def positives(self) -> list[int]:
        """Indices of the relevant candidates."""
        return np.flatnonzero(self.labels > 0).tolist()

    @property
    def negatives(self) -> list[int]:
        """Indices of all others."""
        return np.flatnonzero(self.labels <= 0).tolist()


@dataclass(frozen=True)
class Example:
    """Some candidates of a query, of which one loss is computed.

    Attributes:
        qid: the query's identifier.
        query: the query's text.
        texts: C candidates, texts or documents.
        labels: C labels, as those of a `Group`.
        targets: the teacher's C scores, or None.
    """

    qid: str
    query: str
    texts: tuple[Text, ...]
    labels: tuple[float, ...]
    targets: tuple[float, ...] | None = None


@dataclass(frozen=True, eq=False)
class Texts:
    """The texts of a run, each read when it is drawn and not kept.

    Attributes:
        run: R candidates.
        read: gives the texts of some of these rows, as `documents` of a model does.
        loaded: whether reading is loading: a training that continues then knows the texts by their docnos.
        blank: of loaded texts, whether those that were drawn are blank, by row.
    """

    run: pd.DataFrame
    read: Callable[[pd.DataFrame], Sequence[Text]]
    loaded: bool = False
    blank: dict[int, bool] = field(default_factory=dict, init=False)

    def __getitem__(self, rows: np.ndarray) -> Sequence[Text]:
        """The texts of these rows.

        Raises:
            ValueError: if they cannot be read; the message names the documents.
        """
        asked = self.run.iloc[rows]
        try:
            read = self.read(asked)
        except Exception as error:
            docnos = ", ".join(map(repr, asked["docno"].head(10))) if "docno" in asked.columns else f"rows {rows[:10]}"
            more = f" and {len(asked) - 10} more" if len(asked) > 10 else ""
            raise ValueError(f"the texts of the training documents {docnos}{more} cannot be read: {error}") from error
        if self.loaded:
            self.blank.update(zip(rows.tolist(), map(is_blank, read), strict=True))
        return read

    def without(self, fields: list[str]) -> tuple[pd.DataFrame, Sequence[bool]]:
        """The candidates, or those that were drawn where texts are loaded, and whether each has no text."""
        if self.loaded:
            blank = dict(self.blank)  # whoever loads ahead may still be at it
            return self.run.iloc[list(blank)], list(blank.values())
        return self.run, blank_rows(self.run, fields).tolist()

    def told(self, rows: np.ndarray) -> tuple[Any, ...]:
        """What tells the texts of these rows from others, without loading them."""
        return tuple(as_strings(self.run["docno"].iloc[rows]) if self.loaded else self[rows])


def make_groups(results: pd.DataFrame, qrels: pd.DataFrame, args: TrainingArgs | None = None) -> list[Group]:
    """Joins a run with its qrels.

    Args:
        results: `qid, query, docno`, `score` or `rank` if negatives are to be limited by rank, and the recipe's
            `teacher_field` if it is there. No text: groups hold the numbers of rows.
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
    judged, targets = labels_of_rows(results, qrels, "qrels"), _targets(results, args)
    number, qids = pd.factorize(as_strings(results["qid"]))
    positions = _positions(results)
    # The queries in the order of their appearance, each with its candidates from the best ranked one on.
    rows = np.lexsort((positions, number))
    rows = rows[number[rows] >= 0]  # a row without a qid belongs to no query
    rows = rows[_may_be_drawn(number[rows], judged[rows], positions[rows], qids, args)]
    if not len(rows):
        raise nothing_to_train_on(results, qrels, args)
    number, judged = number[rows], judged[rows]
    labels = np.where(judged >= args.min_label, judged - args.min_label + 1, 0.0)
    starts = np.flatnonzero(np.diff(number, prepend=-1))
    queries = strings(results["query"].iloc[rows[starts]], "query")
    groups = []
    for query, start, end in zip(queries, starts, [*starts[1:], len(rows)], strict=True):
        own = slice(start, end)
        of_teacher = None if targets is None else targets[rows[own]]
        groups.append(Group(str(qids[number[start]]), query, rows[own], labels[own], of_teacher))
    return groups


def _targets(results: pd.DataFrame, args: TrainingArgs) -> np.ndarray | None:
    """The teacher's score of each row; None without a teacher."""
    if args.teacher_field not in results.columns:
        return None
    advice = "let the teacher score every candidate"
    if args.judged == "all":
        advice += ", judged ones too: TeacherScores(teacher)(add_judged(run, qrels, text_loader=...))"
    return numbers(results, args.teacher_field, "the teacher's scores", advice)


def _may_be_drawn(
    number: np.ndarray, judged: np.ndarray, positions: np.ndarray, qids: pd.Index, args: TrainingArgs
) -> np.ndarray:
    """Whether each candidate may be drawn, the same in every epoch: none of a query without a positive or a negative.

    The limit of ranks is for what was retrieved: with `judged="all"` a judged negative may be drawn wherever it stands,
    or else a longer run would have fewer of them.

    Args:
        number: `(R,)` number of each candidate's query, ascending.
        judged: `(R,)` labels, NaN where there is none.
        positions: `(R,)` ranks within the query, ascending.
        qids: those of the queries.
        args: the recipe.
    """
    positive, has_label = judged >= args.min_label, ~np.isnan(judged)
    negative = ~positive
    if args.unjudged == "skip":
        negative &= has_label
    if args.max_negative_rank is not None:
        near = positions < args.max_negative_rank
        negative &= near | has_label if args.judged == "all" else near
    both = [np.bincount(number[which], minlength=len(qids)) for which in (positive, negative)]
    whole = np.minimum(*both)[number] > 0
    if args.negative_pool is not None:
        for own in np.flatnonzero((both[0] > 0) & (both[1] > args.negative_pool)).tolist():
            first, end = np.searchsorted(number, [own, own + 1])
            places = (first + np.flatnonzero(negative[first:end])).tolist()
            negative[places] = False
            negative[Random(f"{seed_of(args)}:pool:{qids[own]}").sample(places, args.negative_pool)] = True
    return whole & (positive | negative)


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
        texts = with_all_text(added, field_names(text_field), text_loader, "judged documents", "the qrels")
        added = added.join(texts[fields].reset_index(drop=True))
    if "score" in results.columns:
        added["score"] = -np.inf
    if "rank" in results.columns:
        added["rank"] = results["rank"].max() + 1 if len(results) else 0
    # Of one type: not every id of the qrels is one of theirs, a number or a known category.
    ids = {name: as_strings(results[name]) for name in ("qid", "docno")}
    return pd.concat([results.assign(**ids), added], ignore_index=True)


def drawable(results: pd.DataFrame, qrels: pd.DataFrame, args: TrainingArgs) -> pd.DataFrame:
    """The candidates that a recipe may draw, so that only their texts are loaded: the same training as with all."""
    return results.iloc[np.sort(np.concatenate([group.rows for group in make_groups(results, qrels, args)]))]


def _positions(results: pd.DataFrame) -> np.ndarray:
    """Rank of each row within its query, by score if there is one, from 0."""
    advice = "give each candidate a number, or leave the column out where the rows stand in the order of their ranks"
    if "score" in results.columns:
        scores = pd.Series(numbers(results, "score", "the candidates", advice, infinite=True))
        queries = pd.factorize(results["qid"])[0]
        ranks = scores.groupby(queries, sort=False).rank(ascending=False, method="first") - 1
    elif "rank" in results.columns:
        ranks = pd.Series(numbers(results, "rank", "the candidates", advice))
    else:
        ranks = results.groupby("qid", sort=False).cumcount()
    return ranks.to_numpy().astype(int)


def pseudo_qrels(results: pd.DataFrame, *, relevant: int = 1) -> pd.DataFrame:
    """Labels made of a first stage's own ranking, for training where nothing is judged (Mokrii et al. 2021).

    Args:
        results: `qid, docno` and `score` or `rank`, e.g. of BM25.
        relevant: how many of the best candidates of each query count as relevant.

    Returns:
        `qid, docno, label` with label 1 for these and 0 for all others.
    """
    check_given(relevant=relevant)
    labels = (_positions(results) < relevant).astype(int)
    return results[["qid", "docno"]].assign(label=labels).reset_index(drop=True)


Pick = tuple[Group, tuple[int, ...]]
"""A query and the indices of some of its candidates; with `sampling="pairs"` a positive's, then negatives'."""


def examples_per_epoch(groups: Sequence[Group], args: TrainingArgs) -> int:
    """How many picks an epoch has."""
    return sum(len(group.rows) for group in groups) if args.sampling == "pointwise" else len(groups)


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
            picks += [(group, (i,)) for i in range(len(group.rows))]
            continue
        rng = Random(f"{seed_of(args)}:{epoch}:{group.qid}")
        positive, negatives = rng.choice(group.positives), group.negatives
        if args.sampling == "listwise":
            others = [i for i in range(len(group.rows)) if i != positive]
            drawn = sorted([positive, *rng.sample(others, min(args.negatives, len(others)))])
        elif len(negatives) >= args.negatives:
            drawn = [positive, *rng.sample(negatives, args.negatives)]
        else:
            # Too few: each is taken equally often, or once more.
            rng.shuffle(negatives)
            drawn = [positive, *(negatives[i % len(negatives)] for i in range(args.negatives))]
        picks.append((group, tuple(drawn)))
    Random(f"{seed_of(args)}:{epoch}").shuffle(picks)
    return picks


def make_examples(picks: Sequence[Pick], texts: Texts, args: TrainingArgs, epoch: int) -> list[Example]:
    """What losses are computed of: the candidates of each pick in its order, augmented if the recipe says so.

    All their texts are read at once, one that is drawn several times once.
    """
    drawn = [group.rows[list(candidates)] for group, candidates in picks]
    rows = np.unique(np.concatenate([np.empty(0, dtype=int), *drawn]))
    read = dict(zip(rows.tolist(), texts[rows], strict=True)) if len(rows) else {}
    examples = []
    for (group, candidates), own_rows in zip(picks, drawn, strict=True):
        own = [read[row] for row in own_rows.tolist()]
        if args.augment is not None:
            rngs = [Random(f"{seed_of(args)}:{epoch}:{group.qid}:{i}") for i in candidates]
            own = [_augmented(text, args.augment, rng) for text, rng in zip(own, rngs, strict=True)]
        chosen = list(candidates)
        targets = None if group.targets is None else tuple(group.targets[chosen].tolist())
        examples.append(Example(group.qid, group.query, tuple(own), tuple(group.labels[chosen].tolist()), targets))
    return examples


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
