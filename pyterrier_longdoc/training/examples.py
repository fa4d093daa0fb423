"""Training data: candidates with labels, sampling of an epoch, and scores of a teacher.

Shapes: R rows of a run, C candidates of a query.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from random import Random
from typing import Any

import numpy as np
import pandas as pd
import pyterrier as pt

from ..common.coverage import Coverage
from ..common.frames import (
    Document,
    Question,
    SeenQueriesWarning,
    TextField,
    as_strings,
    check_columns,
    check_text,
    digest_of_query,
    field_names,
    is_blank,
    labels_of,
    numeric,
    questions,
    strings,
    with_text,
)
from ..common.language import is_visible
from ..common.warnings import as_one_call, warn, warn_of_coverage
from .processes import is_first_process
from .queries import LeftOutWarning, TrainedOn, labels_and_counts, nothing_to_learn
from .recipe import TrainingArgs, seed_of

_BLOCK = 256  # judged documents loaded at a time


@dataclass(frozen=True, eq=False)
class QueryGroup:
    """A training query with its candidates, best ranked first; texts are read when they are needed.

    Attributes:
        qid: the id of the query.
        query: the query, with its instruction if it has one of its own.
        rows: `(C,)`, the rows of the candidates in the run, from 0.
        labels: `(C,)`, at least 1 for relevant candidates (higher is better) and 0 for all others.
        targets: `(C,)`, the scores of the teacher, or None.
    """

    qid: str
    query: Question
    rows: np.ndarray
    labels: np.ndarray
    targets: np.ndarray | None = None

    @property
    def positives(self) -> list[int]:
        """Indices of the relevant candidates."""
        return np.flatnonzero(self.labels > 0).tolist()

    @property
    def negatives(self) -> list[int]:
        """Indices of all other candidates."""
        return np.flatnonzero(self.labels <= 0).tolist()


@dataclass(frozen=True)
class Example:
    """The candidates of a query for one loss: a few of those of a `QueryGroup`.

    Attributes:
        qid: the id of the query.
        query: the query, with its instruction if it has one of its own.
        texts: the texts of C candidates.
        labels: C labels, at least 1 for relevant candidates (higher is better) and 0 for all others.
        targets: C scores of the teacher, or None.
        rows: the C rows of the candidates in the run, from 0.
    """

    qid: str
    query: Question
    texts: tuple[Document, ...]
    labels: tuple[float, ...]
    targets: tuple[float, ...] | None = None
    rows: tuple[int, ...] = field(default=(), compare=False)


@dataclass(frozen=True, eq=False)
class TrainingSet:
    """The training data of a model, created by `prepare` from candidates and qrels.

    Attributes:
        groups: the training queries.
        candidates: R candidates, to whose rows the groups refer.
        read: returns the texts of these rows, like `documents` of a reranker.
        trained_on: the number of training queries, and of others by reason.
    """

    groups: Sequence[QueryGroup]
    candidates: pd.DataFrame
    read: Callable[[pd.DataFrame], Sequence[Document]]
    trained_on: TrainedOn = TrainedOn()  # noqa: RUF009 - frozen
    _blank: dict[int, bool] = field(default_factory=dict, init=False)  # of the texts read so far, by row

    def texts(self, rows: np.ndarray) -> Sequence[Document]:
        """Read the texts of these rows."""
        texts = self.read(self.candidates.iloc[rows])
        self._blank.update(zip(rows.tolist(), map(is_blank, texts), strict=True))
        return texts

    def draws(self) -> tuple[pd.Series, Iterable[bool], Iterable[bool]]:
        """Return the qids of the candidates whose texts have been read, and whether each has no query and no text."""
        drawn = self.candidates.iloc[list(self._blank)]
        return drawn["qid"], (not is_visible(query) for query in strings(drawn["query"], "query")), self._blank.values()


@contextmanager
def noted(reranker: Any, data: TrainingSet, validated: int) -> Iterator[tuple[Coverage, Callable[[], None]]]:
    """Report a training of a reranker, and leave on it what was trained on and how much of the texts was read.

    Yields the coverage of the training, and what `train` calls after each step, which marks the weights as trained.
    `validated` is the number of validation queries.
    """
    model, name, summary = reranker.model, type(reranker).__name__, replace(data.trained_on, validated=validated)
    reports = reranker.verbose and is_first_process()
    if reports:
        pt.tqdm.write(f"{name}: {summary}")
    elif not reranker.verbose and (summary.used < summary.queries or summary.not_found):
        warn(f"{name}: {summary} (see .trained_on).", LeftOutWarning)
    queries = model.trained_queries.union(digest_of_query(group.query) for group in data.groups)
    try:
        with as_one_call(), model.counting(reranker.recipe.dtype) as coverage:
            yield coverage, partial(model.mark_trained, reranker.recipe.as_dict(), queries)
    finally:
        earlier = 0 if model.trained_on is None else model.trained_on.longest_input
        model.trained_on = replace(summary, longest_input=max(earlier, coverage.longest_input))
        coverage.add_rows(*data.draws())
        reranker.coverage = coverage  # not that of the last validation
        warn_of_coverage(reranker, coverage, " in fit")
    if coverage.pairs and reports:
        pt.tqdm.write(f"{name}: trained on {coverage}")


def queries_of(frame: pd.DataFrame) -> list[Question]:
    """Return the query of each row."""
    return questions(strings(frame["query"], "query"))


def prepare(
    candidates: pd.DataFrame,
    qrels: pd.DataFrame,
    recipe: TrainingArgs,
    *,
    texts: Callable[[pd.DataFrame], Sequence[Document]],
    queries: Callable[[pd.DataFrame], Sequence[Question]] = queries_of,
    text_field: TextField = "text",
    text_loader: Any = None,
) -> TrainingSet:
    """Create the training set for `train` from candidates and their labels.

    Args:
        candidates: `qid, query, docno`, `score` or `rank`, and the text unless it is loaded during training.
        qrels: `qid, docno, label`.
        recipe: the recipe; with `judged="all"`, judged documents that are not candidates are added if the loader has
            them.
        texts: returns the texts of rows of such a frame.
        queries: returns their queries.
        text_field: the column with the text, or a tuple of columns.
        text_loader: loads the text of added judged documents.

    Raises:
        ValueError: if no query can be trained on, or a text, label or score is invalid.
    """
    run, not_found = candidates, 0
    if recipe.judged == "all":
        run, not_found = _with_judged(candidates, qrels, text_field, text_loader)
    fields = field_names(text_field)
    loaded = not set(fields) <= set(run.columns)
    for name in [] if loaded else fields:
        check_text(run[name], name)
    groups, counts = _groups_and_counts(run, qrels, recipe, queries)
    counts = replace(counts, added=len(run) - len(candidates), not_found=not_found)
    return TrainingSet(groups, run, texts, counts)


def make_groups(
    results: pd.DataFrame,
    qrels: pd.DataFrame,
    args: TrainingArgs | None = None,
    queries: Callable[[pd.DataFrame], Sequence[Question]] = queries_of,
) -> list[QueryGroup]:
    """Return the queries with a positive and a negative among the candidates.

    To include judged documents that were not retrieved, use `add_judged` first.

    Args:
        results: the candidates: `qid, query, docno`, and `score` or `rank`; they need no text.
        qrels: `qid, docno, label`.
        args: the recipe, which says what is positive and what can be sampled; None for `TrainingArgs()`.
        queries: returns the queries of rows of such a frame.
    """
    return _groups_and_counts(results, qrels, args or TrainingArgs(), queries)[0]


def _groups_and_counts(
    results: pd.DataFrame,
    qrels: pd.DataFrame,
    args: TrainingArgs,
    queries: Callable[[pd.DataFrame], Sequence[Question]],
) -> tuple[list[QueryGroup], TrainedOn]:
    judged, counts = labels_and_counts(results, qrels, args.min_label, "qrels")
    targets, teacher = None, args.teacher_field
    if teacher in results.columns:
        targets = numeric(results, teacher, "the teacher's scores", "let the teacher score every candidate")
    number, qids = pd.factorize(as_strings(results["qid"]))
    positions = _positions(results)
    # Queries in the order of their appearance, each with its candidates by rank.
    ordered = np.lexsort((positions, number))
    ordered = ordered[number[ordered] >= 0]  # rows without a qid are ignored
    parts, first = [], []
    for rows in np.split(ordered, np.flatnonzero(np.diff(number[ordered])) + 1):
        if not len(rows):
            continue
        drawable = rows[_drawable(judged[rows], positions[rows], f"pool:{qids[number[rows[0]]]}", args)]
        if len(drawable):
            parts.append(drawable)
            first.append(rows[0])  # the best ranked one, because added rows lack other columns
    groups = []
    for query, rows in zip(queries(results.iloc[first]), parts, strict=True):
        labels = np.where(judged[rows] >= args.min_label, judged[rows] - args.min_label + 1, 0.0)
        qid, teacher_scores = str(qids[number[rows[0]]]), None if targets is None else targets[rows]
        groups.append(QueryGroup(qid, query, rows, labels, teacher_scores))
    left_out = counts["unjudged"] + counts["without_relevant"] + counts["not_retrieved"]
    trained_on = TrainedOn(
        **counts,
        used=len(groups),
        candidates=sum(len(group.rows) for group in groups),
        relevant=sum(len(group.positives) for group in groups),
        without_negative=counts["queries"] - len(groups) - left_out,
    )
    if not groups:
        nothing_to_learn("train", trained_on, results, qrels)
    return groups, trained_on


def _drawable(judged: np.ndarray, positions: np.ndarray, key: str, args: TrainingArgs) -> np.ndarray:
    """Return whether each candidate of a query can be sampled; this is the same in every epoch.

    If the query has no positive or no negative, none can. With `judged="all"`, judged negatives are exempt from the
    rank limit; otherwise, a longer run would have fewer of them. A missing label is NaN.
    """
    positive = judged >= args.min_label
    negative = ~positive
    if args.unjudged == "skip":
        negative &= ~np.isnan(judged)
    if args.max_negative_rank is not None:
        in_reach = positions < args.max_negative_rank
        negative &= in_reach | ~np.isnan(judged) if args.judged == "all" else in_reach
    places = np.flatnonzero(negative).tolist()
    if not places or not positive.any():
        return np.zeros(len(judged), dtype=bool)
    if args.negative_pool is not None and len(places) > args.negative_pool:
        negative[:] = False
        negative[Random(f"{seed_of(args)}:{key}").sample(places, args.negative_pool)] = True
    return positive | negative


def add_judged(
    results: pd.DataFrame,
    qrels: pd.DataFrame,
    *,
    text_field: TextField = "text",
    text_loader: Any = None,
    topics: pd.DataFrame | None = None,
) -> pd.DataFrame:
    """Add judged documents that the first stage did not retrieve to the training candidates.

    FlexNeuART's export of training data does the same: all relevant documents of the qrels are positives; negatives are
    judged or retrieved. Without it, queries without a retrieved relevant document are not trained on.

    Args:
        results: `qid, query, docno`, optionally `score` and `rank`, and the text unless it is loaded later.
        qrels: `qid, docno, label`.
        text_field: the column with the text, or a tuple of columns.
        text_loader: loads the text of added rows if `results` has text; documents that it does not have are left out
            with a `LeftOutWarning`.
        topics: `qid, query`, to include queries without a row in `results`.

    Returns:
        `results`, followed by one row per missing judged document in the order of the qrels. Its score is minus
        infinity, its rank is after all others, and columns other than the text are empty. Ids are strings.
    """
    run, not_found = _with_judged(results, qrels, text_field, text_loader, topics)
    if not_found:
        warn(f"{not_found} judged documents are left out, because the text loader does not have them", LeftOutWarning)
    return run


def _with_judged(
    results: pd.DataFrame,
    qrels: pd.DataFrame,
    text_field: TextField,
    text_loader: Any,
    topics: pd.DataFrame | None = None,
) -> tuple[pd.DataFrame, int]:
    """Return the result of `add_judged`, and the number of documents that the loader does not have."""
    check_columns(results, ("qid", "query", "docno"), "the candidates")
    check_columns(qrels, ("qid", "docno", "label"), "qrels")
    labels_of(qrels, "qrels")  # checks labels before texts are loaded
    queries = pd.concat([frame[["qid", "query"]] for frame in (results, topics) if frame is not None])
    queries = queries.assign(qid=as_strings(queries["qid"])).reset_index(drop=True).drop_duplicates("qid")
    judged, retrieved = (
        frame[["qid", "docno"]].reset_index(drop=True).astype(str).drop_duplicates() for frame in (qrels, results)
    )
    judged = judged.merge(queries, on="qid").merge(retrieved, how="left", indicator="origin")
    added = judged.loc[judged["origin"] == "left_only", ["qid", "query", "docno"]].reset_index(drop=True)
    if not len(added):
        return results, 0
    names, not_found = field_names(text_field), 0
    fields = [name for name in names if name in results.columns]
    if fields and text_loader is None:
        problem = f"judged='all' trains on {len(added)} judged documents that were not retrieved"
        raise ValueError(f"{problem}: set text_loader= to load their text, or judged='retrieved'")
    if text_loader is not None:
        blocks = (added.iloc[i : i + _BLOCK] for i in range(0, len(added), _BLOCK))
        texts = pd.concat([_found(block, names, fields, text_loader, results.iloc[:1]) for block in blocks])
        not_found = len(added) - len(texts)
        added = added.loc[texts.index].join(texts).reset_index(drop=True)
        if not len(added):
            return results, not_found
    if "score" in results.columns:
        added["score"] = -np.inf
    if "rank" in results.columns:
        added["rank"] = results["rank"].max() + 1 if len(results) else 0
    # Converted to strings, because ids in the qrels can have another type, or not be a category of the column.
    ids = {name: as_strings(results[name]) for name in ("qid", "docno")}
    return pd.concat([results.assign(**ids), added], ignore_index=True), not_found


def _found(
    rows: pd.DataFrame, names: list[str], fields: list[str], text_loader: Any, retrieved: pd.DataFrame
) -> pd.DataFrame:
    """Return `fields` of the rows whose text the loader has; documents on which it fails are found by bisection."""
    try:
        texts = with_text(rows, names, text_loader).set_index(rows.index)
    except (MemoryError, OSError):
        raise
    except Exception:  # noqa: BLE001 - loaders raise different errors for a missing document
        if len(rows) == 1:
            with_text(retrieved, names, text_loader)  # raises if the cause is another one
            return rows.iloc[:0].reindex(columns=fields)
        halves = (rows.iloc[: len(rows) // 2], rows.iloc[len(rows) // 2 :])
        return pd.concat([_found(half, names, fields, text_loader, retrieved) for half in halves])
    return texts.loc[texts[names].notna().any(axis=1), fields]


def _positions(results: pd.DataFrame) -> np.ndarray:
    """Return the rank of each row within its query, from 0, by score if there is one."""
    advice = "give each candidate a number, or leave the column out if the rows are in the order of their ranks"
    if "score" in results.columns:
        scores = pd.Series(numeric(results, "score", "the candidates", advice, infinite=True))
        queries = pd.factorize(results["qid"])[0]
        ranks = scores.groupby(queries, sort=False).rank(ascending=False, method="first") - 1
    elif "rank" in results.columns:
        ranks = pd.Series(numeric(results, "rank", "the candidates", advice))
    else:
        ranks = results.groupby("qid", sort=False).cumcount()
    return ranks.to_numpy()


Pick = tuple[QueryGroup, tuple[int, ...]]
"""A query and the indices of some of its candidates; with `sampling="pairs"`, a positive and then negatives."""


def draw_epoch(groups: Sequence[QueryGroup], args: TrainingArgs, epoch: int) -> list[Pick]:
    """Draw all picks of an epoch in the order of training, depending only on the seed, the epoch and the query.

    A continued training therefore needs no state of a random generator.
    """
    picks: list[Pick] = []
    for group in groups:
        if args.sampling == "pointwise":
            picks += [(group, (i,)) for i in range(len(group.rows))]
            continue
        rng = Random(f"{seed_of(args)}:{epoch}:{group.qid}")
        positive, negatives = rng.choice(group.positives), group.negatives
        if args.sampling == "listwise":
            candidates = [i for i in range(len(group.rows)) if i != positive]
            pick = sorted([positive, *rng.sample(candidates, min(args.negatives, len(candidates)))])
        elif len(negatives) >= args.negatives:
            pick = [positive, *rng.sample(negatives, args.negatives)]
        else:
            # There are too few negatives, so they are repeated as evenly as possible.
            rng.shuffle(negatives)
            pick = [positive, *(negatives[i % len(negatives)] for i in range(args.negatives))]
        picks.append((group, tuple(pick)))
    Random(f"{seed_of(args)}:{epoch}").shuffle(picks)
    return picks


def make_examples(picks: Sequence[Pick], data: TrainingSet, args: TrainingArgs, epoch: int) -> list[Example]:
    """Read the distinct candidates of all picks at once, and augment them if the recipe says so."""
    rows_of_picks = []
    for group, candidates in picks:
        rows_of_picks.append(group.rows[list(candidates)])
    rows = np.unique(np.concatenate([np.empty(0, dtype=int), *rows_of_picks]))
    text_of = dict(zip(rows.tolist(), data.texts(rows), strict=True)) if len(rows) else {}
    examples = []
    for (group, candidates), pick_rows in zip(picks, rows_of_picks, strict=True):
        indices, texts = list(candidates), [text_of[row] for row in pick_rows.tolist()]
        if args.augment is not None:
            for place, i in enumerate(indices):
                text, rng = texts[place], Random(f"{seed_of(args)}:{epoch}:{group.qid}:{i}")
                texts[place] = replace(text, text=args.augment(text.text, rng))  # a repeated title is not changed
        labels, rows_of_pick = tuple(group.labels[indices].tolist()), tuple(pick_rows.tolist())
        targets = None if group.targets is None else tuple(group.targets[indices].tolist())
        examples.append(Example(group.qid, group.query, tuple(texts), labels, targets, rows_of_pick))
    return examples


class TeacherScores(pt.Transformer):
    """Adds a column with the scores of another transformer; other columns, including `score`, stay the same.

    Args:
        teacher: a transformer that scores `qid, query, docno` and text; it is not trained.
        column: the name of the column, as in the student's `TrainingArgs(teacher_field=...)`.

    Example:
        `(bm25 >> text >> TeacherScores(teacher) >> student).fit(topics, qrels)`, where the student has
        `training=ld.TrainingArgs(loss="margin_mse")`; PARADE's distillation is a preset, `"parade-distillation"`.
    """

    def __init__(self, teacher: pt.Transformer, *, column: str = "teacher_score") -> None:
        super().__init__()
        self.teacher = teacher
        self.column = column

    def transform(self, inp: pd.DataFrame) -> pd.DataFrame:
        """Add the column; refuse a teacher that drops a candidate or returns several scores for one."""
        keys, columns = ["qid", "docno"], {"qid": str, "docno": str}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", SeenQueriesWarning)  # a teacher may know the training queries
            answer: Any = self.teacher(inp)
        scores = answer[[*keys, "score"]].astype(columns).drop_duplicates().set_index(keys)["score"].astype(float)
        rows = pd.MultiIndex.from_frame(inp[keys].astype(columns))
        bad_pairs = [*scores.index[scores.index.duplicated()], *rows[~rows.isin(scores.index)]]
        if bad_pairs:
            problem = f"not for {len(bad_pairs)} candidates, e.g. {bad_pairs[0]}"
            raise ValueError(f"the teacher must return one score for each row: {problem}")
        return inp.assign(**{self.column: scores.reindex(rows).to_numpy()})
