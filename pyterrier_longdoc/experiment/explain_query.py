"""Explain a single query of an experiment: differences between systems, ranks of relevant documents, best windows."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from html import escape
from typing import Any

import numpy as np
import pandas as pd
import pyterrier as pt

from ..common.arguments import changed
from ..common.frames import as_strings, texts_of, window_fields, with_windows_in
from ..common.presentation import NotebookMixin
from ..common.runs import stages_of
from .runs import RunByQuery, run_by_query

Results = Any
"""`ExperimentResults`, which imports this module."""

SHOWN_DOCUMENTS, SHOWN_CHARACTERS = 10, 100
"""Limits for printing relevant documents and the text of a window; the tables are complete."""

WINDOW_COLUMNS = [
    "name", "docno", "label", "rank", "window", "windows", "start", "end", "window_score", "weight", "text",
]  # fmt: skip


def with_ranks(documents: pd.DataFrame, run: RunByQuery) -> pd.DataFrame:
    """Add each document's `rank` in a run, and whether its query has `tied` scores.

    Ranks are those of trec_eval: scores in float32, ties by docno, descending. `rank` is missing for documents that are
    not in the run, `tied` for queries that are not in it.
    """
    ranks, tied = np.full((2, len(documents)), None, dtype=object)
    wanted = documents["docno"].tolist()
    for qid, rows in documents.groupby("qid").indices.items():
        if qid not in run:
            continue
        score_of = dict(zip(run[qid][0].tolist(), run[qid][1].tolist(), strict=True))  # the last repetition counts
        docnos = np.array(list(score_of), dtype=object)
        with np.errstate(over="ignore"):
            scores = np.array(list(score_of.values())).astype("float32")
        tied[rows] = len(np.unique(scores)) < len(scores)
        for row in rows:
            if wanted[row] in score_of:
                score = np.float32(score_of[wanted[row]])
                ranks[row] = int((scores > score).sum() + (docnos[scores == score] > wanted[row]).sum())
    return documents.assign(rank=pd.array(ranks, dtype="Int64"), tied=pd.array(tied, dtype="boolean"))


@dataclass(frozen=True, eq=False, repr=False)
class QueryExplanation:
    """The results of an experiment for one query.

    Attributes:
        qid: the id of the query.
        query: the text of the query; None if unknown.
        values: one row per system: the value of each measure, averaged over seeds, and the difference from each
            baseline, e.g. `nDCG@10 - BM25`.
        relevant: one row per relevant document: `docno, label` and its rank in each system, starting at 0 and missing
            if it was not returned.
        windows: the top and the relevant documents of each system that was run again, with the best window according
            to its last reranker: `name` of the system, `docno, label` (0 if unjudged), `rank`, the number of the best
            `window` (from 1) and of all `windows`, the character offsets `start` and `end` in the text, `window_score`,
            attention `weight` (missing if the model has none) and `text`.
        notes: remarks on missing information and on reading the tables.
    """

    qid: str
    query: str | None
    values: pd.DataFrame
    relevant: pd.DataFrame
    windows: pd.DataFrame
    notes: list[str]

    def differences(self) -> list[str]:
        """Return one line per measure with the best and the worst systems."""
        lines = []
        for measure in [column for column in self.values.columns if " - " not in column]:
            means = self.values[measure].round(6)
            if means.nunique(dropna=False) == 1:
                systems = "every system" if len(means) > 1 else means.index[0]
                lines.append(f"{measure}: {means.iloc[0]:.3f} for {systems}")
                continue
            ends = []
            for word, value in (("best", means.max()), ("worst", means.min())):
                ends.append(f"{word} {', '.join(means.index[means == value])} ({value:.3f})")
            lines.append(f"{measure}: {', '.join(ends)}")
        return lines

    def __repr__(self) -> str:
        title = f"query {self.qid!r}" if self.query is None else f"query {self.qid!r}: {self.query}"
        parts = ["\n".join([title, *self.differences()])]
        for title, frame in self._tables().items():
            parts.append(f"{title}\n{frame.to_string(index=False)}")
        if self.notes:
            parts.append("\n".join(f"- {note}" for note in self.notes))
        return "\n\n".join(parts)

    def _repr_html_(self) -> str:
        query = "" if self.query is None else f": {self.query}"
        parts = [f"<b>{escape(f'query {self.qid!r}{query}')}</b>", *map(escape, self.differences())]
        html = "<br>".join(parts)
        for title, frame in self._tables().items():
            html += f"<p>{escape(title)}</p>{frame.to_html(index=False)}"
        return html + "".join(f"<p>{escape(note)}</p>" for note in self.notes)

    def _tables(self) -> dict[str, pd.DataFrame]:
        """Return the printed tables by title."""
        tables = {"values": self.values.round(3).reset_index()}
        if len(self.relevant):
            rest = len(self.relevant) - SHOWN_DOCUMENTS
            title = "ranks of the relevant documents (0 is the first, - was not returned)"
            first = self.relevant.head(SHOWN_DOCUMENTS).astype(object)
            tables[title + (f"; {rest} more in .relevant" if rest > 0 else "")] = first.where(first.notna(), "-")
        if len(self.windows):
            table = self.windows.drop(columns=["start", "end"])
            if table["weight"].isna().all():
                del table["weight"]
            texts = table["text"].map(lambda text: " ".join(text.split()))
            table["text"] = [text if len(text) <= SHOWN_CHARACTERS else f"{text[:SHOWN_CHARACTERS]}…" for text in texts]
            tables["best windows"] = table.round(3).astype(object).where(table.notna(), "-")
        return tables


def explain_query(results: Results, row: int, systems: Mapping[str, Any] | None, top: int) -> QueryExplanation:
    """Explain the query in this row of the values; see `ExperimentResults.why`."""
    qid, no_windows = results.qids[row], pd.DataFrame(columns=WINDOW_COLUMNS)
    by_name = {name: values[row] for name, values in results.query_values.items()}
    values = pd.DataFrame.from_dict(by_name, orient="index", columns=results.measures).rename_axis("name")
    for baseline in results.statistics.baseline:
        differences = values[results.measures] - by_name[baseline]
        values = values.join(differences.add_suffix(f" - {baseline}"))
    if results.topics is None or results.ranks is None:
        relevant = pd.DataFrame(columns=["docno", "label", *by_name])
        return QueryExplanation(qid, None, values, relevant, no_windows, ["these results hold no ranks"])
    topic, ranks = (frame[frame["qid"] == qid] for frame in (results.topics, results.ranks))
    relevant, notes = _relevant_table(ranks, list(by_name))
    first_seeds = [f"{name} ({labels[0]})" for name, labels in results.seeds.items() if len(labels) > 1]
    if first_seeds:
        notes.append(f"values are means over seeds, ranks those of the first seed: {', '.join(first_seeds)}")
    if systems is None or topic.empty:
        hint = "not a topic" if topic.empty else f"pass the pipelines: why({qid!r}, {{name: pipeline, ...}})"
        windows, window_notes = no_windows, [f"no windows, because runs do not store them: {hint}"]
    else:
        windows, window_notes = _best_windows(systems, topic, ranks, top)
    query = str(topic["query"].iloc[0]) if "query" in topic.columns and len(topic) else None
    return QueryExplanation(qid, query, values, relevant, windows, notes + window_notes)


def _relevant_table(ranks: pd.DataFrame, names: Sequence[str]) -> tuple[pd.DataFrame, list[str]]:
    """Return `QueryExplanation.relevant`, and notes."""
    table = ranks.loc[ranks["name"] == names[0], ["docno", "label"]]
    table = table.sort_values("label", ascending=False, kind="stable").reset_index(drop=True)
    notes = [] if len(table) else ["no document is judged relevant for this query"]
    for name in names if len(table) else ():
        rows = ranks[ranks["name"] == name].set_index("docno")
        table[name] = table["docno"].map(rows["rank"]).astype("Int64")
        if rows["tied"].isna().any():
            notes.append(f"{name} returned nothing for this query")
        elif rows["tied"].any():
            notes.append(f"{name} has tied scores, which rank by docno, descending (trec_eval's rule)")
    return table, notes


def _best_windows(
    systems: Mapping[str, Any], topic: pd.DataFrame, ranks: pd.DataFrame, top: int
) -> tuple[pd.DataFrame, list[str]]:
    """Run the pipelines on one query; return `QueryExplanation.windows`, and notes."""
    qid, labels = topic["qid"].iloc[0], dict(zip(ranks["docno"], ranks["label"], strict=True))
    tables, notes = [], []
    for name, system in systems.items():
        models = _all_models(system) if isinstance(system, pt.Transformer) else []
        explaining = [model for model in models if hasattr(model, "explain")]
        reason = "has no reranker with explain" if not explaining else None
        if not models:
            reason = f"is a {type(system).__name__}, not a pipeline"
        elif any(hasattr(model, "ledger") for model in models):
            reason = "asks a language model, which may cost money"
        if reason is not None:
            notes.append(f"{name}: no windows, because it {reason}")
            continue
        frame = _explained(system, explaining, topic)
        if not len(frame):
            continue
        returned = pd.DataFrame({"qid": qid, "docno": as_strings(frame["docno"])})
        ranked = with_ranks(returned, run_by_query(frame, name))
        ranks_now = dict(zip(ranked["docno"], ranked["rank"].tolist(), strict=True))
        rows_before = ranks[(ranks["name"] == name) & ranks["rank"].notna()]
        if {docno: rank for docno, rank in ranks_now.items() if docno in labels} != dict(
            zip(rows_before["docno"], rows_before["rank"].tolist(), strict=True)
        ):
            notes.append(f"{name} ranks the relevant documents differently now: it has changed since the experiment")
        rows = _windows_of(frame, explaining[-1])
        if rows is None:
            notes.append(f"{name}: no windows, because its results lack them or the text: put the reranker last")
            continue
        rows = rows.assign(name=name, rank=rows["docno"].map(ranks_now))
        rows["label"] = [labels.get(docno, 0) for docno in rows["docno"]]
        tables.append(rows[(rows["rank"] < top) | (rows["label"] > 0)].sort_values("rank", kind="stable"))
    table = pd.concat(tables, ignore_index=True) if tables else pd.DataFrame()
    return table.reindex(columns=WINDOW_COLUMNS), notes


def _all_models(pipeline: pt.Transformer) -> list[Any]:
    """Return all transformers in a pipeline, including the models of a cross-validation."""
    stages: list[Any] = list(stages_of(pipeline))
    stages += [model for stage in stages if isinstance(stage, NotebookMixin) for model in getattr(stage, "models", ())]
    return list({id(stage): stage for stage in stages}.values())


def _explained(pipeline: pt.Transformer, models: Sequence[Any], topic: pd.DataFrame) -> pd.DataFrame:
    """Return the results with `explain=True`, without warnings and without changing the models."""
    trial = {"explain": True, "coverage": None, "warned": set[str]()}
    with ExitStack() as stack, warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        for model in models:
            own = {name: value for name, value in trial.items() if hasattr(model, name)}
            stack.enter_context(changed(model, **own))
        return pipeline.transform(topic.copy())


def _windows_of(frame: pd.DataFrame, model: Any) -> pd.DataFrame | None:
    """Return the best window of each row from the columns of `explain=True`; None if they or the text are missing."""
    fields = window_fields(model.text_field, getattr(model, "repeat", None))
    if not {"window_scores", *(fields if model.text_loader is None else ())} <= set(frame.columns):
        return None
    texts, rows = texts_of(frame, fields, model.text_loader), []
    try:
        frame = with_windows_in(frame, texts)
    except ValueError:  # the windows refer to an earlier text
        return None
    for row, text in zip(frame.to_dict("records"), texts, strict=True):
        scores, weights = row["window_scores"], row["window_weights"]
        best, start, end = int(np.argmax(scores)), row["best_start"], row["best_end"]
        weight = np.nan if weights is None else weights[best]
        rows.append((str(row["docno"]), best + 1, len(scores), start, end, scores[best], weight, text[start:end]))
    columns = ["docno", "window", "windows", "start", "end", "window_score", "weight", "text"]
    return pd.DataFrame(rows, columns=columns)
