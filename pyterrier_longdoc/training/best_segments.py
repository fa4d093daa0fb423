"""BeST: training on the segments of documents that the model itself selects (Kim, Rahimi & Allan)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import inf, nan
from pathlib import Path
from random import Random
from typing import Any, ClassVar, cast
from zlib import crc32

import numpy as np
import pandas as pd
import torch
from torch import nn

from ..common.arguments import argument, check_arguments, validate
from ..common.citations import Cited, papers_of
from ..common.files import replacing
from ..common.frames import check_columns, keys_of, strings
from ..common.language import sentence_starts
from ..common.progress import counting
from ..modelling.tokens import Span
from .examples import Example, TrainingSet, make_groups, training_run
from .history import evaluate
from .loop import train
from .losses import LOSSES
from .processes import is_first_process
from .queries import check_validation
from .recipe import TrainingArgs
from .resume import TrainingData, check_new, fit_or_load, training_settings


@dataclass(frozen=True)
class Segments:
    """How training documents are cut: disjoint segments of whole sentences, each as many as fit a limit drawn anew.

    So length tells nothing about relevance. A sentence that is longer is a segment of its own.

    Args:
        min_words: least value of that limit.
        max_words: greatest one; about 400 word pieces, which leaves room for the query among 512.
        max_segments: only so many first segments are used; None for all. 4 on Robust04 in the paper.
        seed: of the lengths.
    """

    min_words: int = argument(50, at_least=1)
    max_words: int = argument(300, at_least=1)
    max_segments: int | None = argument(None, at_least=1)
    seed: int = 42

    def __post_init__(self) -> None:
        validate(self)

    def __call__(self, text: str, key: str) -> list[Span]:
        """Return the characters of each segment; the key, such as the docno, and the seed decide about lengths."""
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
    """What `fit_on_best_segments` returns; its `citation()` is that of the model and of this way to train it.

    Attributes:
        model: the model of the best iteration.
        iterations: for each iteration a row: `iteration`, `validation` (of the weights that were kept) and, with gold
            positions, `precision` of the segments that its model selects (P@1 of the paper's Table 2).
        selections: these segments, for each iteration: `qid, docno` and the characters `start` and `end`.
    """

    model: Any
    iterations: pd.DataFrame
    selections: list[pd.DataFrame]

    papers: ClassVar[tuple[str, ...]] = ("kim-2021-query",)

    def cited(self) -> list[str]:
        """Return the papers behind the model, and the training's own."""
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
    folder: str | Path | None = None,
) -> BestResult:
    """Train passage rankers on segments, each iteration on those that the one before ranks first.

    In the first iteration a selector learns from all segments while a ranker learns from the segments that it selects
    at that moment, scoring them without dropout (Eq. 2 and 3). Each later iteration trains a new model to the end on
    the segments that the last one selects (Eq. 4). Differs from the paper: titles are not repeated in segments unless
    the texts do so.

    Args:
        make: makes a new model from the pre-trained weights, e.g.
            `lambda: ld.MaxP(bert, windows=ld.SentenceWindows(), training=ld.TrainingArgs.preset("best"))`. It reads
            whole documents afterwards; one text column.
        topics_or_res_tr: training candidates, as `fit` takes them, with text.
        qrels_tr: their labels.
        topics_or_res_va: validation candidates.
        qrels_va: their labels.
        segments: how training documents are cut; None for the defaults.
        iterations: at most so many; 4 in the paper, the third was best.
        patience: stop after so many iterations without a new best.
        gold: `qid, docno, start, end`: the characters of known relevant passages, for the precision.
        folder: for models and selections. A second call with the same arguments goes on where the first one was killed.

    Raises:
        ValueError: if the recipe has a teacher or an augmentation, `make` returns a model twice, or the folder holds
            other models.
    """
    check_arguments("int", at_least=1, iterations=iterations, patience=patience)
    check_validation(topics_or_res_va, qrels_va)
    ranker, selector = make(), make()
    check_new(selector, [ranker])
    recipe: TrainingArgs = ranker.training or TrainingArgs.preset("best")
    if LOSSES[recipe.loss].teacher or recipe.augment is not None or not isinstance(ranker.text_field, str):
        raise ValueError("fit_on_best_segments needs a recipe without teacher and augment, and one text column")
    run = training_run(ranker, topics_or_res_tr, qrels_tr)
    candidates = _Candidates(run, segments or Segments(), ranker.text_field)
    data = TrainingData(candidates.frame, qrels_tr, topics_or_res_va, qrels_va)
    fit_first: Callable[[Any], None] = partial(_fit_jointly, selector, data=data, candidates=candidates)
    rows: list[dict[str, Any]] = []
    selections: list[pd.DataFrame] = []
    own_data, best_model, best_value, since_best = data, ranker, -inf, 0
    with counting("fit_on_best_segments", "iteration", iterations, shown=ranker.verbose) as done:
        for iteration in range(1, iterations + 1):
            if iteration > 1:
                new = make()
                check_new(new, [ranker, selector])
                ranker, own_data = new, data._replace(run=candidates.cut_to(selections[-1]))
            ranker.training, fit = recipe, fit_first if iteration == 1 else None
            own = None if folder is None else Path(folder) / f"iteration-{iteration}"
            earlier = len(ranker.history)
            ranker = fit_or_load(ranker, own_data, own, fit=fit, about={"segments": repr(candidates.segments)})
            selections.append(_select_or_read(ranker, candidates, own))
            done()
            value = float(ranker.history["validation"].iloc[earlier:].max())  # of the weights that were kept
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

    Both frames have `qid, docno, start, end`: the characters of a segment and of a passage.
    """
    known = _known(gold)
    segments = _known(selected)
    hits = [a <= known[key][0] and known[key][1] <= b for key, (a, b) in segments.items() if key in known]
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

    def selection(self, spans: Sequence[Span]) -> pd.DataFrame:
        """Return `qid, docno, start, end` of one segment of each."""
        return self.frame[["qid", "docno"]].assign(start=[a for a, _ in spans], end=[b for _, b in spans])

    def selected_by(self, model: Any) -> pd.DataFrame:
        """Return each one's best segment by the model."""
        queries = [str(query) for query, own in zip(self.frame["query"], self.spans, strict=True) for _ in own]
        segments = [text[a:b] for text, own in zip(self.texts, self.spans, strict=True) for a, b in own]
        ends = np.cumsum([len(own) for own in self.spans])
        scores = np.split(model.model.score(queries, segments).scores, ends[:-1])
        return self.selection([own[int(s.argmax())] for own, s in zip(self.spans, scores, strict=True)])

    def cut_to(self, selected: pd.DataFrame) -> pd.DataFrame:
        """Return the candidates with these segments as their texts."""
        rows = zip(self.texts, selected["start"], selected["end"], strict=True)
        return self.frame.assign(**{self.text_field: [text[a:b] for text, a, b in rows]})


def _fit_jointly(selector: Any, ranker: Any, data: TrainingData, candidates: _Candidates) -> None:
    """Do the first iteration: the ranker learns from what the selector selects while that learns from all segments."""
    recipe: TrainingArgs = ranker.recipe
    rates = {f"{part}.{name}": rate for part in ("selector", "ranker") for name, rate in recipe.learning_rates.items()}
    model, judged = ranker.model, cast(pd.DataFrame, data.validation_qrels)
    groups = make_groups(data.run, data.qrels, recipe)
    train(
        nn.ModuleDict({"selector": selector.model, "ranker": model}),
        # Numbers of rows in place of texts: the objective looks up the segments.
        TrainingSet(groups, data.run, lambda rows: list(map(str, rows.index))),
        replace(recipe, learning_rates={**rates, "": 0.0}),
        validate=lambda: evaluate(ranker.transform(data.validation_run), judged, recipe.metric),
        on_step=partial(model.mark_trained, recipe.as_dict()),
        history=model.history,
        objective=partial(_joint_loss, candidates=candidates),
        settings=lambda: {
            **training_settings(ranker, data.validation_run, judged),
            "segments": crc32(repr((candidates.texts, candidates.spans)).encode()),
        },
        verbose=ranker.verbose,
    )


def _joint_loss(
    joint: Any, examples: Sequence[Example], recipe: TrainingArgs, *, candidates: _Candidates
) -> torch.Tensor:
    """Return the selector's loss over all segments (Eq. 2) and the ranker's over those that it selects (Eq. 3)."""
    loss, texts, spans = LOSSES[recipe.loss], candidates.texts, candidates.spans
    losses = []
    chosen_queries, chosen_texts = [], []
    for example in examples:
        own = [[texts[row][a:b] for a, b in spans[row]] for row in map(int, map(str, example.texts))]
        flat = [segment for document in own for segment in document]
        queries, lengths = [example.query] * len(flat), [len(document) for document in own]
        scores = joint["selector"](queries, flat).float().split(lengths)
        losses += [loss.compute(*row, None, recipe) for row in _rows(scores, example, pairs=loss.pairs)]
        with torch.no_grad(), joint["selector"].inference():
            selecting = joint["selector"](queries, flat).split(lengths)
        chosen_queries += [example.query] * len(own)
        chosen_texts += [document[int(s.argmax())] for document, s in zip(own, selecting, strict=True)]
    ranked = joint["ranker"](chosen_queries, chosen_texts).float().split([len(e.texts) for e in examples])
    for example, scores in zip(examples, ranked, strict=True):
        losses.append(loss.compute(scores[None], scores.new_tensor(example.labels)[None], None, recipe))
    return torch.stack(losses).sum()


def _rows(
    scores: Sequence[torch.Tensor], example: Example, *, pairs: bool
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield scores and labels `(1, C)` of the documents' j-th segments, for each j that makes a comparison."""
    for j in range(max(map(len, scores))):
        having = [i for i, own in enumerate(scores) if len(own) > j]
        if not pairs or (having[0] == 0 and len(having) > 1):
            row = torch.stack([scores[i][j] for i in having])
            yield row[None], row.new_tensor([example.labels[i] for i in having])[None]


def _select_or_read(model: Any, candidates: _Candidates, folder: Path | None) -> pd.DataFrame:
    """Return what a model of `fit_or_load` selects; read, if its folder has it."""
    path = None if folder is None else folder / "selection.csv"
    if path is not None and path.is_file():
        return candidates.frame[["qid", "docno"]].join(pd.read_csv(path))
    selected = candidates.selected_by(model)
    if path is not None and is_first_process():
        with replacing(path) as temporary:
            selected[["start", "end"]].to_csv(temporary, index=False)
    return selected


def _known(gold: pd.DataFrame) -> dict[tuple[str, str], Span]:
    spans = zip(gold["start"].astype(int), gold["end"].astype(int), strict=True)
    return dict(zip(keys_of(gold), spans, strict=True))
