"""Probabilities of relevance from a reranker's scores."""

# Without `from __future__ import annotations`: what the fields are must be known in the modules of subclasses too.

import json
from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pandas as pd
import pyterrier as pt
from scipy.special import expit

from ..common.arguments import argument, arguments_of, check_type, validate
from ..common.files import claim, full_path, import_extra, replacing, undamaged
from ..common.frames import check_columns, numeric, relevance_of
from ..common.key import model_keys
from ..common.presentation import NotebookMixin, changes
from .cross_encoder import CrossEncoder
from .saved import CALIBRATION, save

FEWEST = 20
"""The minimum number of relevant documents for `fit`, and of others: this package's choice."""


@dataclass(eq=False, repr=False)
class Calibrated(NotebookMixin, pt.Estimator):
    """Adds the column `probability` to the results of a reranker: the probability that a document is relevant.

    `fit` learns the calibration from judged results. It uses scores and, if the reranker has `explain=True`, numbers of
    windows, because the maximum of many window scores tends to be higher than that of few. Probabilities are valid for
    queries and candidates like those of `fit` and for the same model. If weights or settings of this package's models
    have changed since `fit`, an error is raised; changes in other stages of a pipeline are not noticed. Scores are not
    changed.

    Args:
        model: a reranker, or any transformer that gives scores.
        method: `"platt"` for a logistic regression (Platt 1999, with his smoothed labels), or `"isotonic"` for a
            monotone curve on top of it (Zadrozny & Elkan 2002), which needs about a thousand documents.
        judged_only: whether to ignore documents without a label; otherwise they count as not relevant, as in
            `CrossEncoder.fit`.
        calibration: the result of `fit`, JSON-able; None before.

    Example:
        `results = ld.Calibrated(model).fit(candidates, qrels)(others)`, then `results[results["probability"] >= 0.5]`.
    """

    papers: ClassVar[tuple[str, ...]] = ("platt-1999-probabilistic", "zadrozny-2002-transforming")

    model: Any
    _: KW_ONLY
    method: str = argument("platt", role="head", choices=("platt", "isotonic"))
    judged_only: bool = argument(False, role="head")
    calibration: Mapping[str, Any] | None = argument(None, role="head")

    def __post_init__(self) -> None:
        validate(self)
        check_type(pt.Transformer, "a transformer that gives scores", model=self.model)

    def __repr__(self) -> str:
        return f"Calibrated({', '.join([repr(self.model), *changes(self, hidden=('model', 'calibration'))])})"

    def subtransformers(self) -> dict[str, Any]:
        """Return the model."""
        return {"model": self.model}

    def describe(self) -> dict[str, Any]:
        """Return the calibration, without the model."""
        return {"calibration": self.calibration}

    def transform(self, inp: pd.DataFrame) -> pd.DataFrame:
        """Return the model's results with `probability`; ValueError before `fit`, or if the model has changed since."""
        found = self.calibration
        if not len(inp):
            return self.model.transform(inp).assign(probability=np.zeros(0))
        if found is None:
            raise ValueError(f"{self!r} is not fitted: call fit(results, qrels), or Calibrated.load(folder)")
        if len(found["of"]) > 1 and not getattr(self.model, "explain", True):
            raise ValueError("this calibration uses numbers of windows: set explain=True in the reranker")
        if found.get("scored by") not in (None, _scored_by(self.model)):
            raise ValueError(
                f"{self!r} was fitted to other scores: its model has changed since. Call fit(results, qrels) again"
            )
        results = self.model.transform(inp)
        logits = _features(results, found["of"]) @ found["weights"] + found["bias"]
        return results.assign(probability=np.interp(logits, *found["steps"]) if found["steps"] else expit(logits))

    def fit(self, results: pd.DataFrame, qrels: pd.DataFrame, *_: Any) -> "Calibrated":
        """Learn from candidates as for the model's `transform`, and `qid, docno, label`; validation data has no effect.

        Queries without a label are ignored. Do not use the model's training queries, for which it is overconfident.
        Raises ValueError if there are fewer than 20 relevant documents or fewer than 20 others, and ImportError without
        scikit-learn.
        """
        libraries = ("sklearn.linear_model", "sklearn.isotonic")
        linear, isotonic = (import_extra(name, "analysis", "Calibrated.fit needs scikit-learn") for name in libraries)
        results = self.model.transform(results)
        relevant = relevance_of(results, qrels, judged_only=self.judged_only)
        results, relevant = results[~np.isnan(relevant)], relevant[~np.isnan(relevant)] > 0
        ones, zeros = int(relevant.sum()), int((~relevant).sum())
        if min(ones, zeros) < FEWEST:
            found = f"{ones} of the results are relevant and {zeros} are not, but {FEWEST} of each are needed"
            raise ValueError(f"Calibrated.fit: too few judged documents: {found}: give more queries with qrels")
        names = ["score", *(["window_scores"] if "window_scores" in results else [])]
        x = _features(results, names)
        # A number of windows that never varies says nothing, whatever rounding makes of its variance.
        mean, scale = x.mean(0), np.where(np.ptp(x, 0) > 0, x.std(0), np.inf)
        targets = np.where(relevant, (ones + 1) / (ones + 2), 1 / (zeros + 2))
        model = linear.LogisticRegression(C=1e6, tol=1e-8, max_iter=1000)  # all but unregularised
        twice, shares = np.tile((x - mean) / scale, (2, 1)), np.concatenate([targets, 1 - targets])
        model.fit(twice, np.repeat([1, 0], len(x)), sample_weight=shares)
        slopes = model.coef_[0] / scale
        bias, steps = float(model.intercept_[0] - mean @ slopes), None
        if self.method == "isotonic":
            curve = isotonic.IsotonicRegression().fit(x @ slopes + bias, relevant)
            steps = [curve.X_thresholds_.tolist(), curve.y_thresholds_.tolist()]
        self.calibration = {
            "of": names,
            "weights": slopes.tolist(),
            "bias": bias,
            "steps": steps,
            "documents": len(x),
            "scored by": _scored_by(self.model),
        }
        return self

    def save(self, folder: str | Path, *, overwrite: bool = False) -> None:
        """Save a cross-encoder together with `calibration.json`; for any other model, only the calibration.

        `overwrite` is that of `CrossEncoder.save`.
        """
        calibration = json.dumps(arguments_of(self, "head"))
        if isinstance(self.model, CrossEncoder) and self.model.has_weights:
            save(self.model, folder, calibration=calibration, overwrite=overwrite)
            return
        path = Path(full_path(folder))
        if (path / "config.json").is_file():
            raise ValueError(f"{str(folder)!r} has another model: give a new folder")
        claim(path)
        with replacing(path / CALIBRATION) as file:
            file.write_text(calibration)

    @classmethod
    def load(cls, folder: str | Path, model: Any = None, **parameters: Any) -> "Calibrated":
        """Restore from `save`, with `model` in place of a saved one; `parameters` are those of `CrossEncoder.load`.

        Raises ValueError if `save` wrote only a calibration and `model` is missing.
        """
        path = Path(full_path(folder))
        with undamaged(path / CALIBRATION, "save it again"):
            saved = json.loads((path / CALIBRATION).read_text())
            arguments = {name: saved[name] for name in ("method", "judged_only", "calibration")}
            found = saved["calibration"] or {"of": (), "weights": (), "bias": 0.0, "steps": None}
            names, _ = found["of"], (found["weights"], found["bias"], found["steps"])
        if model is None and not (path / "config.json").is_file():
            raise ValueError(f"{str(folder)!r} has a calibration without a model: use Calibrated.load(..., model=)")
        if model is not None and parameters:
            raise ValueError(f"{', '.join(parameters)} would have no effect together with model=")
        if "window_scores" in names:
            parameters = {"explain": True, **parameters}
        return cls(CrossEncoder.load(folder, **parameters) if model is None else model, **arguments)


def _scored_by(pipeline: pt.Transformer) -> list[str | None]:
    """Return the keys of this package's models, whatever computes them."""
    return model_keys(pipeline, without=("computed",))


def _features(results: pd.DataFrame, names: list[str]) -> np.ndarray:
    """Return `(R, F)` scores and logarithms of the numbers of windows."""
    check_columns(results, names, "the model's results (explain=True adds window_scores)")
    columns = [numeric(results, "score", "Calibrated", "the model must score every row")]
    for name in names[1:]:
        columns.append(np.log2([len(of_row) if np.ndim(of_row) else 1 for of_row in results[name]]))
    return np.column_stack(columns)
