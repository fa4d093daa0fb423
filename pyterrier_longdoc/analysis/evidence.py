"""Evidence@k: how often the best windows of a model overlap the gold text of relevant documents."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import comb
from typing import Any

import numpy as np
import pandas as pd

from ..common.arguments import check_arguments
from ..common.frames import (
    TextField,
    as_strings,
    check_columns,
    check_windows,
    field_names,
    keys_of,
    strings,
    texts_of,
    with_windows_in,
)
from ..common.warnings import warn
from ..modelling.preselection import BM25Windows
from ..modelling.tokens import TokenizedText

BASELINES = FIRST, RANDOM, BM25 = "first windows", "random windows", "BM25's best windows"


def evidence_recall(
    results: pd.DataFrame | Mapping[str, pd.DataFrame],
    gold: pd.DataFrame,
    k: int | Sequence[int] = (1, 3),
    *,
    text_field: TextField = "text",
    text_loader: Any = None,
) -> pd.DataFrame:
    """Measure how often one of the k best windows of a relevant document overlaps its gold text.

    The value of a query is the mean over its documents that have gold text and are in all results; a warning counts the
    others. The baselines select from the windows of the first model: the first k, k random ones (expected value), or
    the k best of `BM25Windows`.

    Args:
        results: the results of a model with `explain=True`, or of several models by name. The best windows have the
            highest `window_scores` (ties: the earlier window). To use attention weights instead, pass
            `frame.assign(window_scores=frame["window_weights"])`.
        gold: `qid, docno, start, end`: character spans of gold text, such as a collection's `.gold`.
        k: the number of windows, or several numbers.
        text_field: the column(s) that the first model split into windows: its `text_field` without `repeat`.
        text_loader: loads the text if the column is missing, as in the models.

    Returns:
        `name, qid, measure, value` for `compare`: `name` is a model or a baseline (`"first windows"`, `"random
        windows"`, `"BM25's best windows"`), and `measure` is `"evidence@1"` and so on.

    Raises:
        ValueError: if no document has gold text and windows in all results, or windows or gold text end after the text.

    Example:
        `ld.compare(ld.evidence_recall({"MaxP": ld.MaxP(explain=True)(run)}, dataset.gold), baseline="first windows")`
    """
    frames = dict(results) if isinstance(results, Mapping) else {"model": results}
    if not frames or set(frames) & set(BASELINES):
        raise ValueError(f"results={list(frames)} must have at least one model, and no name of a baseline")
    ks = np.unique(k).tolist() or [0]
    check_arguments("int", at_least=1, k=ks[0])
    check_columns(gold, ("qid", "docno", "start", "end"), "gold")
    by_pair = gold.groupby([as_strings(gold["qid"]), as_strings(gold["docno"])])
    gold_of = {pair: rows[["start", "end"]].to_numpy("int64") for pair, rows in by_pair}
    ranked = {name: _best_first(frame, name, text_field) for name, frame in frames.items()}
    pairs = set(gold_of).intersection(*ranked.values())
    if not pairs:
        raise ValueError("gold has no document that is in all results, with windows, for the same query")
    first, fields = next(iter(frames.values())), field_names(text_field)
    check_columns(first, ["query", *(fields if text_loader is None else ())], "results (or set text_loader=)")
    rows, records = first[[pair in pairs for pair in keys_of(first)]], []
    texts, queries = texts_of(rows, fields, text_loader), strings(rows["query"], "query")
    text_of = dict(zip(keys_of(rows), texts, strict=True))
    for name, frame in frames.items():
        found = frame[[pair in pairs for pair in keys_of(frame)]]
        ranked[name] = _best_first(with_windows_in(found, map(text_of.__getitem__, keys_of(found))), name, text_field)
    for (qid, docno), query, text in zip(keys_of(rows), queries, texts, strict=True):
        windows = {name: of_pair[qid, docno] for name, of_pair in ranked.items()}
        for (name, k), value in _found(windows, gold_of[qid, docno], query, text, ks).items():
            records.append((name, qid, f"evidence@{k}", value))
    qids = set(as_strings(first["qid"]))
    missing = sum(qid in qids for qid, _ in gold_of.keys() - pairs)
    if missing:
        message = f"evidence_recall: {missing} documents with gold text do not count"
        warn(f"{message}, because they are not in all results or have no windows there.", UserWarning)
    values = pd.DataFrame(records, columns=["name", "qid", "measure", "value"])
    return values.groupby(["name", "qid", "measure"], sort=False)["value"].mean().reset_index()


def _best_first(frame: pd.DataFrame, name: str, text_field: TextField) -> dict[tuple[str, str], np.ndarray]:
    """Return the `(N, 2)` windows of each query-document pair, best first."""
    columns = ["window_spans", "window_scores"]
    check_columns(frame, ("qid", "docno", *columns), f"results of {name!r} (set explain=True in the reranker)")
    check_windows(frame, text_field)
    rows = frame.dropna(subset=columns)
    ranked = [np.stack(spans)[np.argsort(-np.array(by), kind="stable")] for spans, by in rows[columns].to_numpy()]
    return dict(zip(keys_of(rows), ranked, strict=True))


def _found(
    windows: dict[str, Any], gold: np.ndarray, query: str, text: str, ks: list[int]
) -> dict[tuple[str, int], float]:
    """Return, by system and k, whether one of the k best windows of a document overlaps its `(G, 2)` gold spans."""
    spans = np.array(sorted(next(iter(windows.values())).tolist()))  # (N, 2)
    if max(spans.max(), gold.max()) > len(text):
        raise ValueError("windows or gold text end after the text: set text_field= (without repeat) or text_loader=")
    # Each window is one token, so that BM25 counts exactly the words within its characters.
    document, tokens = TokenizedText(np.zeros(len(spans)), text, spans), [(i, i + 1) for i in range(len(spans))]
    (best,) = BM25Windows(ks[-1]).choose([query], [document], [tokens], ordered=True)
    starts, ends = gold.T
    found: dict[tuple[str, int], float] = {}
    for name, w in {**windows, FIRST: spans, RANDOM: spans, BM25: spans[best]}.items():
        hits = (np.maximum(w[:, :1], starts) < np.minimum(w[:, 1:], ends)).any(1)
        for k in ks:
            if name == RANDOM:
                drawn, others = min(k, len(spans)), int((~hits).sum())
                found[name, k] = 1 - comb(others, drawn) / comb(len(spans), drawn)
            else:
                found[name, k] = float(hits[:k].any())
    return found
