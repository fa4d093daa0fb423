"""Check that the score of a reranker only depends on the query and the document."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np
import pandas as pd
import pyterrier as pt

from ..common.arguments import changed
from ..common.caches import forget_embeddings
from ..common.frames import field_names, window_fields
from ..modelling.backbones.architectures import use_attention
from ..rerankers.cross_encoder import CrossEncoder

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

    - `repeated`: a second time;
    - `order`: with the rows in another order;
    - `alone`: every row in a separate call;
    - `padding`: each row in a batch with the longest document, compared with `alone`;
    - `batch size`: one document per batch;
    - `attention`: with the other attention implementations of the backbone;
    - `dtype`: with other precisions, which naturally cause larger differences.

    A check that does not apply, e.g. because the model has no `batch_size`, has no result but a note. Cached scores and
    vectors are not used, neither from memory nor from a `score_cache`. Vectors in memory are deleted; otherwise the
    model stays as it was.

    Args:
        model: a reranker such as `LongP`, `PARADE` or `BiEncoder`, or any transformer that scores rows independently.
        results: `qid, query, docno`, the text column(s) and other columns that the model needs. None uses ten synthetic
            rows with up to 1,500 words in the column that is split into windows, and short titles.
        tolerance: the maximum difference to pass, relative to the larger of 1 and the score.
        dtypes: the precisions to compare.
        dtype_tolerance: the tolerance of the `dtype` check.
        verbose: print the table.

    Returns:
        A frame with one row per check and the columns `check`, `difference` (maximum, relative as above), `same_order`
        (whether the ranking of every query is the same), `tolerance`, `passed` (None if the check does not apply) and
        `note`.

    Example:
        >>> def length(row): return float(len(row["text"]))
        >>> check_invariance(pt.apply.doc_score(length), verbose=False)["passed"].tolist()[:4]
        [True, True, True, True]
    """
    frame = (_sample(model) if results is None else results).reset_index(drop=True)
    if frame.empty:
        raise ValueError("results is empty: pass rows to score, or leave it out to use synthetic rows")
    with _in_float32(model), warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # about synthetic rows
        order = np.random.default_rng(0).permutation(len(frame))
        expected = _scores(model, frame)
        scores: dict[str, np.ndarray | str] = {"repeated": _scores(model, frame)}
        scores["order"] = _scores(model, frame.iloc[order].reset_index(drop=True))[np.argsort(order)]
        scores["alone"] = alone = _row_scores(model, frame)
        scores["padding"] = _scores_with_padding(model, frame)
        scores["batch size 1"] = _with_attributes(model, frame, batch_size=1)
        for kind in ("eager", "sdpa"):
            scores[f"attention {kind}"] = _scores_by_attention(model, frame, kind)
        for dtype in dtypes:
            scores[f"dtype {dtype}"] = _with_attributes(model, frame, dtype=dtype)
    rows = []
    for name, found in scores.items():
        # Padding is not compared with `expected`, where the rows are padded already.
        reference = alone if name == "padding" else expected
        limit = dtype_tolerance if name.startswith("dtype") else tolerance
        rows.append({"check": name, "tolerance": limit, **_comparison(frame, reference, found, limit)})
    table = pd.DataFrame(rows, columns=["check", "difference", "same_order", "tolerance", "passed", "note"])
    if verbose:
        sys.stdout.write(table.to_string(index=False) + "\n")
    return table


def _comparison(frame: pd.DataFrame, expected: np.ndarray, scores: np.ndarray | str, limit: float) -> dict[str, Any]:
    """Compare scores computed in another way; a string is the reason why there are none."""
    if isinstance(scores, str):
        return {"difference": np.nan, "same_order": None, "passed": None, "note": scores}
    difference = float((np.abs(scores - expected) / np.maximum(1.0, np.abs(expected))).max(initial=0.0))
    same = all(
        np.array_equal(np.argsort(-expected[i], kind="stable"), np.argsort(-scores[i], kind="stable"))
        for i in frame.groupby("qid").indices.values()
    )
    return {"difference": difference, "same_order": same, "passed": difference <= limit, "note": ""}


def _scores(model: Any, frame: pd.DataFrame) -> np.ndarray:
    """Return the scores of the rows in their order; NaN for missing rows."""
    forget_embeddings()  # so that vectors are computed again
    rows = frame.assign(_row=range(len(frame)))
    scores = model.transform(rows).set_index("_row")["score"]
    return scores.reindex(range(len(frame))).to_numpy(dtype="float64")


def _row_scores(model: Any, frame: pd.DataFrame, partner: int | None = None) -> np.ndarray:
    """Score each row alone or together with another one."""
    scores = []
    for row in range(len(frame)):
        rows = [row] if partner in (None, row) else [row, partner]
        scores.append(_scores(model, frame.iloc[rows].reset_index(drop=True))[0])
    return np.array(scores)


def _scores_with_padding(model: Any, frame: pd.DataFrame) -> np.ndarray | str:
    """Score each row in one batch with the longest one."""
    fields = field_names(getattr(model, "text_field", "text"))
    columns = [name for name in fields if name in frame.columns]
    if not columns:
        return f"the frame has no text column {', '.join(fields)}"
    lengths = sum(frame[name].fillna("").astype(str).str.len() for name in columns)
    sizes = [name for name in ("max_batch_tokens", "batch_size") if hasattr(model, "max_batch_tokens")]
    if not _has_weights(model):
        sizes.remove("max_batch_tokens")
    with changed(model, **dict.fromkeys(sizes, sys.maxsize)):
        return _row_scores(model, frame, int(np.argmax(lengths)))


def _with_attributes(model: Any, frame: pd.DataFrame, **attributes: Any) -> np.ndarray | str:
    missing = [name for name in attributes if not hasattr(model, name)]
    if missing:
        return f"{type(model).__name__} has no {', '.join(missing)}"
    with changed(model, **attributes):
        try:
            if isinstance(model, CrossEncoder):
                model.check()
        except ValueError as error:
            return str(error)
        return _scores(model, frame)


def _scores_by_attention(model: Any, frame: pd.DataFrame, implementation: str) -> np.ndarray | str:
    if not hasattr(type(model), "model") or not _has_weights(model):
        return f"the backbone of {type(model).__name__} is not accessible"
    runtime = model.model.encoder.computed_in[1]
    if runtime != "torch":
        return f"runtime={runtime!r} has its own implementation"
    backbone = model.model.encoder.backbone
    default = getattr(backbone.config, "_attn_implementation", None)
    if default == implementation:
        return "the default implementation"
    try:
        use_attention(backbone, implementation)
    except ValueError:
        return f"not available for {backbone.config.model_type}"
    try:
        return _scores(model, frame)
    finally:
        use_attention(backbone, default)


def _has_weights(model: Any) -> bool:
    """Return whether the weights of a model are local, so that its precision and batches can be set."""
    return getattr(model, "has_weights", True)


@contextmanager
def _in_float32(model: Any) -> Iterator[None]:
    """Use float32 if the precision is automatic, and no cached scores; restore the model afterwards."""
    try:
        with ExitStack() as stack:
            for part in _with_selectors(model):
                attributes = {name: getattr(part, name) for name in ("coverage", "score_cache") if hasattr(part, name)}
                attributes |= {"score_cache": None} if "score_cache" in attributes else {}
                if _has_weights(part) and getattr(part, "dtype", "") in (None, "fastest"):
                    attributes["dtype"] = "float32"
                stack.enter_context(changed(part, **attributes))
            yield
    finally:
        forget_embeddings()  # computed with other attention implementations


def _with_selectors(model: Any) -> list[Any]:
    """Return a model, the model that selects its windows, if any, and so on."""
    preselect = getattr(model, "preselect", None)
    selector = getattr(getattr(preselect, "selector", preselect), "model", None)
    return [model] if selector is None else [model, *_with_selectors(selector)]


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
