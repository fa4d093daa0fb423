"""BeST: training on document segments selected by the model itself (Kim, Rahimi & Allan)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import inf, nan
from pathlib import Path
from random import Random
from typing import Any, ClassVar

import numpy as np
import pandas as pd
import torch
from torch import nn

from ..common.arguments import argument, changed, check_arguments, validate
from ..common.citations import Cited, papers_of
from ..common.frames import check_columns, keys_of, strings
from ..common.language import sentence_starts
from ..common.progress import work_bar
from ..modelling.tokens import Span
from .examples import Example, add_judged, noted, prepare
from .history import evaluate
from .loop import train
from .losses import LOSSES
from .queries import check_validation
from .recipe import TrainingArgs
from .resume import training_settings


@dataclass(frozen=True)
class Segments:
    """Splits training documents into disjoint segments of whole sentences, with a random length limit for each.

    Random limits keep the model from learning relevance from length. A longer sentence is a separate segment.

    Args:
        min_words: the smallest limit in words.
        max_words: the largest limit in words; about 400 word pieces, which leaves room for the query among 512.
        max_segments: the maximum number of segments, from the first; None for all. 4 on Robust04 in the paper.
        seed: the random seed of the limits.
    """

    min_words: int = argument(50, at_least=1)
    max_words: int = argument(300, at_least=1)
    max_segments: int | None = argument(None, at_least=1)
    seed: int = 42

    def __post_init__(self) -> None:
        validate(self)

    def __call__(self, text: str, key: str) -> list[Span]:
        """Return the character span of each segment; lengths depend on the seed and the key, e.g. the docno."""
        rng = Random(f"{self.seed}:{key}")
        ends = [*sentence_starts(text), len(text)]
        spans: list[Span] = []
        start = end = words = 0
        limit = rng.randint(self.min_words, self.max_words)
        for sentence_end in ends:
            length = len(text[end:sentence_end].split())
            if words and words + length > limit:
                spans.append((start, end))
                start, words = end, 0
                limit = rng.randint(self.min_words, self.max_words)
            end, words = sentence_end, words + length
        return [*spans, (start, end)][: self.max_segments]


@dataclass(frozen=True, eq=False)
class BestResult(Cited):
    """The result of `fit_on_best_segments`; its `citation()` includes the model and the training method.

    Attributes:
        model: the model of the best iteration.
        iterations: one row per iteration: `iteration`, `validation` (of the best weights) and, with gold positions,
            `precision` of the segments selected by its model (P@1 in Table 2 of the paper).
        selections: the segments of each iteration: `qid, docno` and the characters `start` and `end`.
    """

    model: Any
    iterations: pd.DataFrame
    selections: list[pd.DataFrame]

    papers: ClassVar[tuple[str, ...]] = ("kim-2021-query",)

    def cited(self) -> list[str]:
        """Return the papers of the model and of the training method."""
        return [*papers_of(self.model), *super().cited()]


def fit_on_best_segments(
    make: Callable[[], Any],
    topics_or_res_tr: pd.DataFrame,
    qrels_tr: pd.DataFrame,
    topics_or_res_va: pd.DataFrame,
    qrels_va: pd.DataFrame,
    *,
    segments: Segments | None = None,
    iterations: int = 4,
    patience: int = 2,
    gold: pd.DataFrame | None = None,
) -> BestResult:
    """Train passage rankers iteratively on the segments ranked first by the previous model.

    In the first iteration, a selector learns from all segments, and a ranker from those that the selector, without
    dropout, ranks first at that step (Eq. 2 and 3). Each later iteration trains a new model on the segments selected by
    the previous model (Eq. 4). Differs from the paper: titles are not added to segments.

    Args:
        make: creates a new model from the pre-trained weights, with one text column, e.g.
            `lambda: ld.MaxP(bert, windows=ld.SentenceWindows(), training=ld.TrainingArgs.preset("best"))`. The trained
            model reads whole documents. If the recipe names a `checkpoint` folder, iteration i has the subfolder
            `iteration-i`: after an interruption, the same call continues, and selections are computed again.
        topics_or_res_tr: training candidates with text, as for `fit`.
        qrels_tr: their labels.
        topics_or_res_va: validation candidates.
        qrels_va: their labels.
        segments: how training documents are split; None for the defaults.
        iterations: the maximum number of iterations; 4 in the paper, of which the third was best.
        patience: stop after this many iterations without a new best result.
        gold: `qid, docno, start, end`: the characters of known relevant passages, to compute the precision.

    Raises:
        ValueError: if the recipe has a teacher or an augmentation, `make` returns the same model twice, or the
            checkpoint folder has another training.
    """
    check_arguments("int", at_least=1, iterations=iterations, patience=patience)
    validated = check_validation(topics_or_res_va, qrels_va)
    ranker, selector = make(), make()
    if selector is ranker:
        raise ValueError("make must create a new model in each call, but it returned the same one twice")
    recipe: TrainingArgs = ranker.training or TrainingArgs.preset("best")
    if LOSSES[recipe.loss].teacher or recipe.augment is not None or not isinstance(ranker.text_field, str):
        raise ValueError("fit_on_best_segments needs a recipe without teacher and augment=, and one text column")
    run = topics_or_res_tr
    if recipe.judged == "all":
        run = add_judged(run, qrels_tr, text_field=ranker.text_field, text_loader=ranker.text_loader)
    candidates = _Candidates(run, segments or Segments(), ranker.text_field)
    validation = topics_or_res_va, qrels_va
    rows: list[dict[str, Any]] = []
    selections: list[pd.DataFrame] = []
    best_model, best_value, since_best = ranker, -inf, 0
    with work_bar("fit_on_best_segments", "iteration", iterations, shown=ranker.verbose) as bar:
        for iteration in range(1, iterations + 1):
            if iteration > 1:
                ranker = make()
            folder = None if recipe.checkpoint is None else Path(recipe.checkpoint) / f"iteration-{iteration}"
            ranker.training, old_entries = replace(recipe, checkpoint=folder), len(ranker.history)
            if iteration == 1:
                _fit_jointly(selector, ranker, candidates, qrels_tr, *validation, validated)
            else:
                ranker.fit(candidates.with_segments(selections[-1]), qrels_tr, *validation)
            selections.append(candidates.select(ranker))
            bar.update()
            value = float(ranker.history["validation"].iloc[old_entries:].max())  # of the best weights
            precision = {} if gold is None else {"precision": segment_precision(selections[-1], gold)}
            rows.append({"iteration": iteration, "validation": value, **precision})
            since_best += 1
            if value > best_value:
                best_model, best_value, since_best = ranker, value, 0
            if since_best == patience:
                break
    return BestResult(best_model, pd.DataFrame(rows), selections)


def segment_precision(selected: pd.DataFrame, gold: pd.DataFrame) -> float:
    """Return the share of selected segments that contain the known relevant passage (P@1, Table 2); NaN without any.

    Args:
        selected: `qid, docno, start, end`, with the characters of the selected segment of a document.
        gold: `qid, docno, start, end`, with the characters of the known relevant passage.
    """
    passages, segments = _spans_by_pair(gold), _spans_by_pair(selected)
    hits = [a <= passages[key][0] and passages[key][1] <= b for key, (a, b) in segments.items() if key in passages]
    return float(np.mean(hits)) if hits else nan


class _Candidates:
    """Training candidates and the segments of their texts."""

    def __init__(self, results: pd.DataFrame, segments: Segments, text_field: str) -> None:
        self.segments, self.text_field = segments, text_field
        check_columns(results, ("qid", "docno", text_field), "the candidates")
        self.texts = strings(results[text_field], text_field)
        self.frame = results.reset_index(drop=True).assign(**{text_field: self.texts})
        docnos = self.frame["docno"].astype(str)
        self.spans = [segments(text, docno) for text, docno in zip(self.texts, docnos, strict=True)]

    def select(self, model: Any) -> pd.DataFrame:
        """Return the best segment of each candidate according to the model."""
        rows = zip(model.queries(self.frame), self.spans, strict=True)
        queries = [query for query, spans in rows for _ in spans]
        segments = [text[a:b] for text, spans in zip(self.texts, self.spans, strict=True) for a, b in spans]
        ends = np.cumsum([len(spans) for spans in self.spans])
        scores = np.split(model.model.score(queries, segments).scores, ends[:-1])
        best = [spans[int(s.argmax())] for spans, s in zip(self.spans, scores, strict=True)]
        return self.frame[["qid", "docno"]].assign(start=[a for a, _ in best], end=[b for _, b in best])

    def with_segments(self, selected: pd.DataFrame) -> pd.DataFrame:
        """Return the candidates with these segments as their texts."""
        rows = zip(self.texts, selected["start"], selected["end"], strict=True)
        return self.frame.assign(**{self.text_field: [text[a:b] for text, a, b in rows]})


def _fit_jointly(
    selector: Any,
    ranker: Any,
    candidates: _Candidates,
    qrels: pd.DataFrame,
    validation_run: pd.DataFrame,
    validation_qrels: pd.DataFrame,
    validated: int,
) -> None:
    """Train both models of the first iteration: the selector on all segments, the ranker on the selected ones."""
    recipe, model = ranker.recipe, ranker.model
    rates = {f"{part}.{name}": rate for part in ("selector", "ranker") for name, rate in recipe.learning_rates.items()}
    columns, settings = {"text_field": ranker.text_field, "text_loader": ranker.text_loader}, {}
    data = prepare(candidates.frame, qrels, recipe, texts=ranker.documents, queries=ranker.queries, **columns)
    if recipe.checkpoint is not None:
        settings = {**training_settings(ranker, validation_run, validation_qrels), "segments": candidates.segments}

    def validate() -> float:
        with changed(ranker, runtime="torch", _validating=True):  # as `fit` validates
            return evaluate(ranker.transform(validation_run), validation_qrels, recipe.metric)

    with noted(ranker, data, validated) as (coverage, mark):
        train(
            nn.ModuleDict({"selector": selector.model, "ranker": model}),
            data,
            replace(recipe, learning_rates={**rates, "": recipe.learning_rates[""]}),
            validate=validate,
            on_step=mark,
            coverage=coverage,
            history=model.history,
            objective=partial(_joint_loss, candidates=candidates),
            settings=settings,
            verbose=ranker.verbose,
        )


def _joint_loss(
    joint: Any, examples: Sequence[Example], recipe: TrainingArgs, *, candidates: _Candidates
) -> torch.Tensor:
    """Return the loss of the selector over all segments (Eq. 2) and of the ranker over the selected ones (Eq. 3)."""
    loss, texts, spans = LOSSES[recipe.loss], candidates.texts, candidates.spans
    losses = []
    ranker_queries, ranker_texts = [], []
    for example in examples:
        documents = [[texts[row][a:b] for a, b in spans[row]] for row in example.rows]
        flat = [segment for document in documents for segment in document]
        queries, lengths = [example.query] * len(flat), [len(document) for document in documents]
        scores = joint["selector"](queries, flat).float().split(lengths)
        losses += [loss.compute(*row, None, recipe) for row in _rows(scores, example, pairs=loss.pairs)]
        with torch.no_grad(), joint["selector"].inference():
            choices = joint["selector"](queries, flat).split(lengths)
        ranker_queries += [example.query] * len(documents)
        ranker_texts += [document[int(s.argmax())] for document, s in zip(documents, choices, strict=True)]
    ranker_scores = joint["ranker"](ranker_queries, ranker_texts).float().split([len(e.texts) for e in examples])
    for example, scores in zip(examples, ranker_scores, strict=True):
        losses.append(loss.compute(scores[None], scores.new_tensor(example.labels)[None], None, recipe))
    return torch.stack(losses).sum()


def _rows(
    scores: Sequence[torch.Tensor], example: Example, *, pairs: bool
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield scores and labels `(1, C)` of the j-th segments of the documents, for each j with a comparison."""
    for j in range(max(map(len, scores))):
        documents = [i for i, values in enumerate(scores) if len(values) > j]
        if not pairs or (documents[0] == 0 and len(documents) > 1):
            row = torch.stack([scores[i][j] for i in documents])
            yield row[None], row.new_tensor([example.labels[i] for i in documents])[None]


def _spans_by_pair(gold: pd.DataFrame) -> dict[tuple[str, str], Span]:
    spans = zip(gold["start"].astype(int), gold["end"].astype(int), strict=True)
    return dict(zip(keys_of(gold), spans, strict=True))
