"""Evidence@k: how often the best windows of a model overlap the gold text of relevant documents."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
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
from ..experiment.significance import Statistics, compare, correct, resampled_means
from ..modelling.preselection import BM25Windows
from ..modelling.tokens import TokenizedText

BASELINES = FIRST, RANDOM, BM25 = "first windows", "random windows", "BM25's best windows"


@dataclass(frozen=True, eq=False, repr=False)
class EvidenceRecall:
    """The share of relevant documents with gold text in one of k windows; see `evidence_recall`.

    Args:
        values: one column per system, and one row per `fifth, k, qid, docno`. Fifth 0 is the whole document; fifths 1
            to 5 only count gold text with its midpoint in that fifth of the document.
        missing: the number of documents with gold text that are missing from the results or have no windows there.
        statistics: the test and the confidence level of the intervals.
    """

    values: pd.DataFrame
    missing: int
    statistics: Statistics = field(default_factory=Statistics)

    def __repr__(self) -> str:
        names, queries = ", ".join(map(str, self.values)), self.values.index.unique("qid").size
        return f"EvidenceRecall({names}; queries: {queries}, missing documents: {self.missing})"

    def _repr_html_(self) -> str:
        return f"{self.table.to_html(index=False)}<p>missing documents: {self.missing}</p>"

    @cached_property
    def table(self) -> pd.DataFrame:
        """`system, k, queries, mean, low, high`: means over queries with bootstrap intervals."""
        return self._means(self.values.loc[[0]]).drop(columns="fifth")

    @cached_property
    def by_fifth(self) -> pd.DataFrame:
        """The same by `fifth` of the document, 1 to 5, in which the midpoint of the gold text is."""
        return self._means(self.values.drop(index=0, level="fifth"))

    @cached_property
    def comparisons(self) -> pd.DataFrame:
        """Comparisons of models to baselines, with Holm's correction for each k; see `significance.compare`."""
        by_query = self.values.loc[0].groupby(level=["qid", "k"]).mean().unstack("k")
        values = {str(name): by_query[name].to_numpy() for name in self.values}
        measures = [f"evidence@{k}" for k in by_query[FIRST]]
        table = compare(values, measures, replace(self.statistics, baseline=BASELINES, partner={}, correction=None))
        table = table[~table["name"].isin(BASELINES)].reset_index(drop=True)
        for _, p in table.groupby("measure")["p-value"]:
            corrected = zip(*correct(p.to_numpy(), "holm", self.statistics.alpha), strict=True)
            table.loc[p.index, ["reject", "p-value corrected"]] = list(corrected)
        return table

    def _means(self, values: pd.DataFrame) -> pd.DataFrame:
        s, frames = self.statistics, []
        for (k, fifth), rows in values.groupby(level=["k", "fifth"]):
            by_query = rows.groupby(level="qid").mean()
            low, high = s.interval(resampled_means(by_query.to_numpy(), resamples=s.resamples, seed=s.seed))
            columns = {"fifth": fifth, "system": list(by_query), "k": k, "queries": len(by_query)}
            frames.append(pd.DataFrame({**columns, "mean": by_query.mean().to_numpy(), "low": low, "high": high}))
        return pd.concat(frames, ignore_index=True)


def evidence_recall(
    results: pd.DataFrame | Mapping[str, pd.DataFrame],
    gold: pd.DataFrame,
    k: int | Sequence[int] = (1, 3),
    *,
    text_field: TextField = "text",
    text_loader: Any = None,
) -> EvidenceRecall:
    """Measure how often one of the k best windows of a relevant document overlaps its gold text.

    The value of a query is the mean over its documents that have gold text and are in all results. The baselines select
    from the windows of the first model: the first k, k random ones (expected value), or the k best of `BM25Windows`.

    Args:
        results: the results of a model with `explain=True`, or of several models by name. The best windows have the
            highest `window_scores` (ties: the earlier window). To use attention weights instead, pass
            `frame.assign(window_scores=frame["window_weights"])`.
        gold: `qid, docno, start, end`: character spans of gold text, such as a collection's `.gold`.
        k: the number of windows, or several numbers.
        text_field: the column(s) that the first model split into windows: its `text_field` without `repeat`.
        text_loader: loads the text if the column is missing, as in the models.

    Example:
        `ld.evidence_recall({"MaxP": ld.MaxP(explain=True)(run)}, dataset.gold).table`
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
        records += [{"qid": qid, "docno": docno, **row} for row in _rows(windows, gold_of[qid, docno], query, text, ks)]
    qids = set(as_strings(first["qid"]))
    values = pd.DataFrame(records).set_index(["fifth", "k", "qid", "docno"]).sort_index()
    return EvidenceRecall(values[[*frames, *BASELINES]], sum(qid in qids for qid, _ in gold_of.keys() - pairs))


def _best_first(frame: pd.DataFrame, name: str, text_field: TextField) -> dict[tuple[str, str], np.ndarray]:
    """Return the `(N, 2)` windows of each query-document pair, best first."""
    columns = ["window_spans", "window_scores"]
    check_columns(frame, ("qid", "docno", *columns), f"results of {name!r} (set explain=True in the reranker)")
    check_windows(frame, text_field)
    rows = frame.dropna(subset=columns)
    ranked = [np.stack(spans)[np.argsort(-np.array(by), kind="stable")] for spans, by in rows[columns].to_numpy()]
    return dict(zip(keys_of(rows), ranked, strict=True))


def _rows(windows: dict[str, Any], gold: np.ndarray, query: str, text: str, ks: list[int]) -> Iterator[dict[str, Any]]:
    """Yield the rows of `values` of a document: for all its `(G, 2)` gold spans, and for those in each fifth."""
    spans = np.array(sorted(next(iter(windows.values())).tolist()))  # (N, 2)
    if max(spans.max(), gold.max()) > len(text):
        raise ValueError("windows or gold text end after the text: set text_field= (without repeat) or text_loader=")
    # Each window is one token, so that BM25 counts exactly the words within its characters.
    document, tokens = TokenizedText(np.zeros(len(spans)), text, spans), [(i, i + 1) for i in range(len(spans))]
    (best,) = BM25Windows(ks[-1]).choose([query], [document], [tokens], ordered=True)
    windows = {**windows, FIRST: spans, BM25: spans[best]}
    fifths = 1 + np.minimum(4, 5 * gold.sum(1) // (2 * max(1, len(text))))
    for fifth in [0, *np.unique(fifths).tolist()]:
        starts, ends = gold[(fifths == fifth) | (fifth == 0)].T
        hits = {name: (np.maximum(w[:, :1], starts) < np.minimum(w[:, 1:], ends)).any(1) for name, w in windows.items()}
        for k in ks:
            drawn, others = min(k, len(spans)), int((~hits[FIRST]).sum())
            found = {name: float(of_system[:k].any()) for name, of_system in hits.items()}
            yield {"fifth": fifth, "k": k, **found, RANDOM: 1 - comb(others, drawn) / comb(len(spans), drawn)}
