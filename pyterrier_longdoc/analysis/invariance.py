"""Checks that a reranker's score of a document depends on the query and the document alone."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import pandas as pd
import pyterrier as pt

from ..common.caches import forget_embeddings
from ..common.frames import field_names, window_fields
from ..common.restoring import restoring
from ..modelling.backbones.architectures import use_attention
from ..rerankers.reranker import CrossEncoder

_WORDS = ("river", "stone", "garden", "letter", "winter", "music", "horse", "window", "paper", "market", "engine")
_QUERIES = {"1": "garden music", "2": "paper market by the river"}


def check_invariance(
    model: pt.Transformer,
    results: pd.DataFrame | None = None,
    *,
    tolerance: float = 1e-4,
    dtypes: Sequence[str] = ("bfloat16",),
    dtype_tolerance: float = 0.1,
    verbose: bool = True,
) -> pd.DataFrame:
    """Score the same documents in several ways and compare the scores.

    - `repeated`: once more;
    - `order`: with the rows in another order;
    - `alone`: every row in a call of its own;
    - `padding`: every row next to the longest document, to whose windows and tokens it is padded, against the row
      alone;
    - `batch size`: one document in each pass;
    - `attention`: by each other implementation that the backbone has;
    - `dtype`: in other precisions, where a larger difference is natural.

    A check that does not apply, e.g. because the model has no `batch_size`, is in the table without a verdict.
    Nothing that was scored or encoded before is used, be it remembered in memory or in a `score_cache`; what models
    remember in memory is forgotten. Apart from that the model is left as it was.

    Args:
        model: a reranker; `LongP`, `PARADE`, `BiEncoder` and so on, or any transformer that scores rows one by one.
        results: `qid, query, docno`, the text column(s) and whatever else the model reads; None for ten made-up rows of
            up to 1,500 words, which are in the last of the columns that windows are made of, and short titles.
        tolerance: largest difference that passes, relative to the larger of 1 and the score.
        dtypes: precisions to try.
        dtype_tolerance: the same for `dtype`.
        verbose: print the table.

    Returns:
        One row per check: `check`, `difference` (largest, relative as above), `same_order` (whether every query's
        documents keep their order), `tolerance`, `passed` (None without a verdict) and `note`.

    Example:
        >>> def length(row): return float(len(row["text"]))
        >>> check_invariance(pt.apply.doc_score(length), verbose=False)["passed"].tolist()[:4]
        [True, True, True, True]
    """
    frame = (_sample(model) if results is None else results).reset_index(drop=True)
    if frame.empty:
        raise ValueError("results has no rows, so there are no scores to compare; leave it out for made-up rows")
    with _undisturbed(model):
        expected = _scores(model, frame)
        rows = [
            _verdict(name, frame, reference, again, limit)
            for name, reference, again, limit in _checks(model, frame, expected, tolerance, dtypes, dtype_tolerance)
        ]
    table = pd.DataFrame(rows, columns=["check", "difference", "same_order", "tolerance", "passed", "note"])
    if verbose:
        sys.stdout.write(table.to_string(index=False) + "\n")
    return table


Attempt = Callable[[], np.ndarray | str]
"""Scores again in another way; or says why it does not apply."""


def _checks(
    model: Any,
    frame: pd.DataFrame,
    expected: np.ndarray,
    tolerance: float,
    dtypes: Sequence[str],
    dtype_tolerance: float,
) -> Iterator[tuple[str, np.ndarray, Attempt, float]]:
    order = np.random.default_rng(0).permutation(len(frame))
    yield "repeated", expected, partial(_scores, model, frame), tolerance
    yield "order", expected, partial(_reordered, model, frame, order), tolerance
    alone = _each(model, frame)
    yield "alone", expected, lambda: alone, tolerance
    # Among all rows every row is already padded to the longest one: that would be compared with itself.
    yield "padding", alone, partial(_padded, model, frame), tolerance
    yield "batch size 1", expected, partial(_with, model, frame, batch_size=1), tolerance
    for implementation in ("eager", "sdpa"):
        yield f"attention {implementation}", expected, partial(_by_attention, model, frame, implementation), tolerance
    for dtype in dtypes:
        yield f"dtype {dtype}", expected, partial(_with, model, frame, dtype=dtype), dtype_tolerance


def _verdict(name: str, frame: pd.DataFrame, expected: np.ndarray, again: Attempt, limit: float) -> dict[str, Any]:
    row = {"check": name, "difference": np.nan, "same_order": None, "tolerance": limit, "passed": None, "note": ""}
    scores = again()
    if isinstance(scores, str):
        return {**row, "note": scores}
    difference = float((np.abs(scores - expected) / np.maximum(1.0, np.abs(expected))).max(initial=0.0))
    same = all(
        np.array_equal(np.argsort(-expected[i], kind="stable"), np.argsort(-scores[i], kind="stable"))
        for i in frame.groupby("qid").indices.values()
    )
    return {**row, "difference": difference, "same_order": same, "passed": difference <= limit}


def _scores(model: Any, frame: pd.DataFrame) -> np.ndarray:
    """Return the scores of the rows in their order, NaN for those that a transformer does not return."""
    forget_embeddings()  # remembered ones would be compared with themselves
    numbered = frame.assign(_row=range(len(frame)))
    scores = model.transform(numbered).set_index("_row")["score"]
    return scores.reindex(range(len(frame))).to_numpy(dtype="float64")


def _reordered(model: Any, frame: pd.DataFrame, order: np.ndarray) -> np.ndarray:
    return _scores(model, frame.iloc[order].reset_index(drop=True))[np.argsort(order)]


def _each(model: Any, frame: pd.DataFrame, mate: int | None = None) -> np.ndarray:
    """Return the scores of the rows, each alone or next to another one."""
    scores = []
    for row in range(len(frame)):
        chosen = [row] if mate in (None, row) else [row, mate]
        scores.append(_scores(model, frame.iloc[chosen].reset_index(drop=True))[0])
    return np.array(scores)


def _padded(model: Any, frame: pd.DataFrame) -> np.ndarray | str:
    """Return scores of the rows, each next to the longest one and, where the model divides its work, in one pass."""
    fields = field_names(getattr(model, "text_field", "text"))
    present = [name for name in fields if name in frame.columns]
    if not present:
        return f"the frame has no text column {', '.join(fields)}"
    lengths = sum(frame[name].fillna("").astype(str).str.len() for name in present)
    sizes = [name for name in ("max_batch_tokens", "batch_size") if hasattr(model, "max_batch_tokens")]
    if getattr(model, "is_external", False):
        sizes.remove("max_batch_tokens")
    with _changed(model, **dict.fromkeys(sizes, sys.maxsize)):
        return _each(model, frame, int(np.argmax(lengths)))


def _with(model: Any, frame: pd.DataFrame, **attributes: Any) -> np.ndarray | str:
    lacking = [name for name in attributes if not hasattr(model, name)]
    if lacking:
        return f"{type(model).__name__} has no {', '.join(lacking)}"
    with _changed(model, **attributes):
        try:
            if isinstance(model, CrossEncoder):
                model.check()
        except ValueError as error:
            return str(error)
        return _scores(model, frame)


@contextmanager
def _changed(model: Any, **attributes: Any) -> Iterator[None]:
    before = {name: getattr(model, name) for name in attributes}
    try:
        for name, value in attributes.items():
            setattr(model, name, value)
        yield
    finally:
        for name, value in before.items():
            setattr(model, name, value)


def _by_attention(model: Any, frame: pd.DataFrame, implementation: str) -> np.ndarray | str:
    if not hasattr(type(model), "model") or getattr(model, "is_external", False):
        return f"{type(model).__name__} does not say what its backbone is"
    if getattr(model, "runtime", "torch") not in ("torch", "compile"):
        return f"runtime={model.runtime!r} has its own"
    backbone = model.model.encoder.backbone
    usual = getattr(backbone.config, "_attn_implementation", None)
    if usual == implementation:
        return "the usual one"
    try:
        use_attention(backbone, implementation)
    except ValueError:
        return f"not available for {backbone.config.model_type}"
    try:
        return _scores(model, frame)
    finally:
        use_attention(backbone, usual)


@contextmanager
def _undisturbed(model: Any) -> Iterator[None]:
    """Leave the model as it was; where the machine chooses the precision, compare with float32."""
    try:
        with restoring(model, "dtype") as models:
            for each in models:
                if not getattr(each, "is_external", False) and getattr(each, "dtype", "") in (None, "fastest"):
                    each.dtype = "float32"
            yield
    finally:
        forget_embeddings()  # those of other implementations of attention


def _sample(model: Any) -> pd.DataFrame:
    text_field = getattr(model, "text_field", "text")
    *_, column = window_fields(text_field, getattr(model, "repeat", None))
    rng = np.random.default_rng(0)
    lengths = (0, 1, 30, 300, 1500)
    texts = [" ".join(rng.choice(_WORDS, length)) for length in lengths]
    rows = [
        {"qid": qid, "query": query, "docno": f"d{length}", "score": -float(rank), "rank": rank}
        | {name: " ".join(_WORDS[: rank + 1]) for name in field_names(text_field)}
        | {column: text}
        for qid, query in _QUERIES.items()
        for rank, (length, text) in enumerate(zip(lengths, texts, strict=True))
    ]
    return pd.DataFrame(rows)
