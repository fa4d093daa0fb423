"""Scores of several rerankers as features, with windows that are encoded once."""

from __future__ import annotations

from functools import reduce
from typing import Any

import numpy as np
import pandas as pd
import pyterrier as pt
import torch

from ..common.arguments import arguments_of
from ..common.frames import is_blank, strings, validated
from ..common.warnings import warn_of_coverage
from ..modelling.heads import registered_heads
from .cross_encoder import CrossEncoder


class SharedWindows(pt.Transformer):
    """Computes `MaxP(...) ** SumP(...)` for rerankers with the same checkpoint and windows, which PyTerrier compiles.

    Rerankers with weights of their own, from `fit` or `load`, are computed one by one.
    """

    def __init__(self, *rerankers: Any) -> None:
        self.rerankers = rerankers

    def __repr__(self) -> str:
        return f"({' ** '.join(map(repr, self.rerankers))})"

    def fuse_feature_union(self, other: pt.Transformer, is_left: bool) -> pt.Transformer | None:
        """Add a further reranker."""
        others = getattr(other, "rerankers", (other,))
        return fused(*((*self.rerankers, *others) if is_left else (*others, *self.rerankers)))

    def transform(self, inp: pd.DataFrame) -> pd.DataFrame:
        """Return the rows with the column `features`: an array with the score of each reranker."""
        first, models = self.rerankers[0], [reranker.model for reranker in self.rerankers]
        if not len(inp) or any(model.origin != "checkpoint" for model in models):
            return reduce(pow, self.rerankers).transform(inp)
        validated(inp, first.text_field, first.text_loader, first)
        queries, texts = strings(inp["query"], "query"), first.documents(inp)
        model, features, table = models[0], np.empty((len(inp), len(models))), []
        coverage = model.new_coverage()
        model.encoder.refresh()
        with torch.inference_mode(), model.inference():
            for block, pairs in model.walk(queries, texts):
                encoded = model.encode(pairs, coverage)
                scores = torch.stack([each.aggregate(encoded) for each in models], 1).double().cpu().numpy()
                for rows, values in zip(block.rows, scores, strict=True):
                    features[rows] = values
                table += [pair.row for pair in pairs]
        coverage.add(table)
        coverage.add_rows(inp, map(is_blank, texts))
        for reranker in self.rerankers:
            reranker.coverage = coverage
        warn_of_coverage(first, coverage)
        return inp.assign(features=list(features))


def fused(*rerankers: Any) -> SharedWindows | None:
    """Return a transformer for rerankers that combine scores of the same windows; None if they do not."""
    if not all(isinstance(each, CrossEncoder) and _combines_scores(each) for each in rerankers):
        return None
    first, *others = map(_windows_of, rerankers)
    return SharedWindows(*rerankers) if all(other == first for other in others) else None


def _combines_scores(reranker: CrossEncoder) -> bool:
    head = registered_heads().get(reranker.head_spec()[0])
    return bool(getattr(head, "from_scores", False)) and not (reranker.explain or reranker.score_cache)


def _windows_of(reranker: CrossEncoder) -> list[Any]:
    """Return everything that the scores of windows depend on."""
    texts = arguments_of(reranker, "input"), reranker.text_loader
    return [type(reranker).encoder_class, reranker.weight_arguments(), reranker.settings(), texts]
