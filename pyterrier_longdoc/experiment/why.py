"""One query of an experiment: where systems differ on it, how they rank what is relevant, which windows made it."""

from __future__ import annotations

import html
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyterrier as pt

from ..common.files import write_lines
from ..common.frames import as_strings, labels_of, texts_of, window_fields
from ..common.presentation import Presented
from ..common.undisturbed import undisturbed
from .identity import stages_of
from .runs import Run, as_run

SHOWN_DOCUMENTS, SHOWN_CHARACTERS = 10, 100
"""As many relevant documents, and as much of a window, are printed; the tables have all."""

WINDOW_COLUMNS = [
    "name", "model", "docno", "label", "rank", "window", "windows", "start", "end", "window_score", "weight", "text",
]  # fmt: skip


@dataclass(frozen=True, eq=False)
class Rankings:
    """How systems rank the relevant documents of an experiment's queries; of several seeds the first.

    Attributes:
        queries: `qid, query`.
        relevant: `qid, docno, label` of the documents with a label above 0.
        returned: `name, qid` for which a system returned something, and whether some scores are equal (`tied`).
        ranks: `name, qid, docno, rank` (0 is the first) of the relevant documents among them.
    """

    queries: pd.DataFrame
    relevant: pd.DataFrame
    returned: pd.DataFrame
    ranks: pd.DataFrame

    @classmethod
    def of(
        cls, topics: pd.DataFrame, relevant: pd.DataFrame, standings: Mapping[str, Mapping[str, Standing]]
    ) -> Rankings:
        """The rankings of systems, by name and qid."""
        queries = topics[[column for column in ("qid", "query") if column in topics.columns]]
        returned, ranks = [], []
        for name, of_system in standings.items():
            for qid, standing in of_system.items():
                returned.append((name, qid, standing.tied))
                ranks += [(name, qid, docno, rank) for docno, rank in standing.ranks.items()]
        return cls(
            queries.reset_index(drop=True),
            relevant.reset_index(drop=True),
            pd.DataFrame(returned, columns=["name", "qid", "tied"]),
            pd.DataFrame(ranks, columns=["name", "qid", "docno", "rank"]),
        )

    def save(self, folder: Path) -> None:
        """Writes one file for each frame."""
        for f in fields(self):
            frame = getattr(self, f.name)
            write_lines(folder / f"{f.name}.csv.gz", [frame.to_csv(index=False).rstrip("\n")])

    @classmethod
    def load(cls, folder: Path) -> Rankings | None:
        """What `save` wrote; None if there is nothing of it."""
        files = {f.name: folder / f"{f.name}.csv.gz" for f in fields(cls)}
        if not all(file.is_file() for file in files.values()):
            return None
        texts = dict.fromkeys(("name", "qid", "docno", "query"), str)
        return cls(**{name: pd.read_csv(file, dtype=texts, keep_default_na=False) for name, file in files.items()})


@dataclass(frozen=True)
class Standing:
    """How a system answers a query: whether some documents are tied, and the ranks of some."""

    tied: bool
    ranks: dict[str, int]


def relevant_documents(qrels: pd.DataFrame, qids: Sequence[str]) -> pd.DataFrame:
    """`qid, docno, label` of the judgements above 0 for these queries."""
    judged = qrels[["qid", "docno", "label"]].assign(docno=as_strings(qrels["docno"]))
    return judged[(labels_of(qrels, "qrels") > 0) & judged["qid"].isin(set(qids))]


def standings(run: Run, documents: Mapping[str, Sequence[str]]) -> dict[str, Standing]:
    """By query how a run ranks these documents, as trec_eval does: scores in float32, equal ones by docno, descending.

    Args:
        run: of a system.
        documents: by query those that are asked for.
    """
    found = {}
    for qid, asked in documents.items():
        if qid not in run:
            continue
        ranked = dict(zip(run[qid][0].tolist(), run[qid][1].tolist(), strict=True))  # of one twice the last counts
        docnos = np.array(list(ranked), dtype=object)
        with np.errstate(over="ignore"):
            scores = np.array(list(ranked.values())).astype("float32")
        ranks = {}
        for docno in filter(ranked.__contains__, asked):
            score = np.float32(ranked[docno])
            ranks[docno] = int((scores > score).sum() + (docnos[scores == score] > docno).sum())
        found[qid] = Standing(len(np.unique(scores)) < len(scores), ranks)
    return found


@dataclass(frozen=True, eq=False, repr=False)
class Why:
    """What an experiment tells of one query.

    Attributes:
        qid: the query.
        query: its text; None if that is not known.
        values: a row for each system: its value of each measure, averaged over seeds, and the difference from each
            baseline, e.g. `nDCG@10 - BM25`.
        relevant: a row for each relevant document: `docno, label` and its rank in each system, 0 for the first and
            missing where it was not returned.
        windows: for each system that was run again its first documents and the relevant ones, as each of its rerankers
            saw them: `name`, the reranker's class (`model`), `docno, label` (0 also for what was not judged), `rank` in
            the system, the `window` that scores best of its `windows`, from 0, where it `start`s and `end`s in the text
            (characters), its `window_score`, its `weight` in the model's attention (missing without) and its `text`.
        notes: what cannot be told, and what to know of the rest.
    """

    qid: str
    query: str | None
    values: pd.DataFrame
    relevant: pd.DataFrame
    windows: pd.DataFrame
    notes: list[str]

    def differences(self) -> list[str]:
        """A line for each measure: the best and the worst systems."""
        lines = []
        for measure in [column for column in self.values.columns if " - " not in column]:
            of_system = self.values[measure].round(6)
            if of_system.nunique(dropna=False) == 1:
                every = "every system" if len(of_system) > 1 else of_system.index[0]
                lines.append(f"{measure}: {of_system.iloc[0]:.3f} for {every}")
                continue
            ends = []
            for word, value in (("best", of_system.max()), ("worst", of_system.min())):
                ends.append(f"{word} {', '.join(of_system.index[of_system == value])} ({value:.3f})")
            lines.append(f"{measure}: {', '.join(ends)}")
        return lines

    def __repr__(self) -> str:
        parts = ["\n".join([self._title(), *self.differences()])]
        for title, frame in self._tables().items():
            parts.append(f"{title}\n{frame.to_string(index=False)}")
        if self.notes:
            parts.append("\n".join(f"- {note}" for note in self.notes))
        return "\n\n".join(parts)

    def _repr_html_(self) -> str:
        parts = [f"<b>{html.escape(self._title())}</b>", *map(html.escape, self.differences())]
        with pd.option_context("display.max_colwidth", None):
            for title, frame in self._tables().items():
                parts += [f"<b>{html.escape(title)}</b>", frame.to_html(index=False)]
        notes = "".join(f"<li>{html.escape(note)}</li>" for note in self.notes)
        return "<br>\n".join(parts) + (f"<ul>{notes}</ul>" if notes else "")

    def _title(self) -> str:
        return f"query {self.qid!r}" if self.query is None else f"query {self.qid!r}: {self.query}"

    def _tables(self) -> dict[str, pd.DataFrame]:
        """What is printed of the tables, by title."""
        tables = {"values": self.values.round(3).reset_index()}
        if len(self.relevant):
            more = len(self.relevant) - SHOWN_DOCUMENTS
            title = "ranks of the relevant documents (0 is the first, - was not returned)"
            first = self.relevant.head(SHOWN_DOCUMENTS).astype(object)
            tables[title + (f"; {more} more in .relevant" if more > 0 else "")] = first.where(first.notna(), "-")
        if len(self.windows):
            shown = self.windows.drop(columns=["start", "end"])
            if not shown.duplicated(["name", "docno"]).any():
                del shown["model"]
            if shown["weight"].isna().all():
                del shown["weight"]
            texts = shown["text"].map(lambda text: " ".join(text.split()))
            shown["text"] = [text if len(text) <= SHOWN_CHARACTERS else f"{text[:SHOWN_CHARACTERS]}…" for text in texts]
            tables["best windows"] = shown.round(3).astype(object).where(shown.notna(), "-")
        return tables


def why(
    qid: str,
    values: pd.DataFrame,
    seeds: Mapping[str, Sequence[int | None]],
    rankings: Rankings | None,
    systems: Mapping[str, Any] | None,
    top: int,
) -> Why:
    """What can be told of a query.

    Args:
        qid: an evaluated query.
        values: as in `Why`.
        seeds: of each system.
        rankings: of the experiment; None if they were not noted.
        systems: see `ExperimentResults.why`.
        top: see there.
    """
    names = list(values.index)
    if rankings is None:
        empty = pd.DataFrame(columns=["docno", "label", *names]), pd.DataFrame(columns=WINDOW_COLUMNS)
        return Why(qid, None, values, *empty, ["these results hold no rankings: Experiment notes them"])
    topic = rankings.queries[rankings.queries["qid"] == qid]
    relevant, notes = _relevant_table(rankings, names, qid)
    seeded = [f"{name} ({labels[0]})" for name, labels in seeds.items() if len(labels) > 1]
    if seeded:
        notes.append(f"values are means over seeds, ranks those of the first seed: {', '.join(seeded)}")
    if systems is None or topic.empty:
        to_do = "the query is no topic" if topic.empty else f"pass the pipelines, why({qid!r}, {{name: pipeline, ...}})"
        windows, more = pd.DataFrame(columns=WINDOW_COLUMNS), [f"which windows made it is not in the runs: {to_do}"]
    else:
        windows, more = _best_windows(systems, topic, rankings, top)
    query = str(topic["query"].iloc[0]) if "query" in topic.columns and len(topic) else None
    return Why(qid, query, values, relevant, windows, notes + more)


def _best_windows(
    systems: Mapping[str, Any], topic: pd.DataFrame, rankings: Rankings, top: int
) -> tuple[pd.DataFrame, list[str]]:
    """Runs systems on one query and tells which windows made their scores.

    Args:
        systems: pipelines by name, as they are now; what is no pipeline is noted.
        topic: one row.
        rankings: of the experiment.
        top: so many of each system's first documents are told of, and all relevant ones.

    Returns:
        The table of `Why.windows`, and notes.
    """
    qid = topic["qid"].iloc[0]
    relevant = rankings.relevant[rankings.relevant["qid"] == qid]
    labels = dict(zip(relevant["docno"], relevant["label"], strict=True))
    tables, notes = [], []
    for name, system in systems.items():
        if (reason := _not_to_be_run(system)) is not None:
            notes.append(f"{name}: no windows, as it {reason}")
            continue
        frame, explained = _explained(system, topic)
        if not len(frame):
            continue
        docnos = as_strings(frame["docno"]).tolist()
        standing = standings(as_run(frame, name), {qid: docnos})[qid]
        evaluated = _ranks_of(rankings, name, qid)
        if {docno: rank for docno, rank in standing.ranks.items() if docno in labels} != evaluated:
            notes.append(f"{name} ranks the relevant documents otherwise now: it is not as it was in the experiment")
        if not explained:
            notes.append(f"{name}: no windows, as its reranker did not run: are its scores kept in a cache?")
            continue
        rows = pd.concat(explained, ignore_index=True).drop_duplicates()
        rows = rows[rows["docno"].isin(docnos)]  # later stages may have dropped some
        rows = rows.assign(name=name, rank=rows["docno"].map(standing.ranks))
        rows["label"] = [labels.get(docno, 0) for docno in rows["docno"]]
        tables.append(rows[(rows["rank"] < top) | (rows["label"] > 0)].sort_values("rank", kind="stable"))
    table = pd.concat(tables, ignore_index=True) if tables else pd.DataFrame()
    return table.reindex(columns=WINDOW_COLUMNS), notes


def _not_to_be_run(system: Any) -> str | None:
    """Why a system is not run to see its windows; None if it is."""
    if not isinstance(system, pt.Transformer):
        return f"is a {type(system).__name__}, not a pipeline"
    stages = _stages(system)
    if any(hasattr(stage, "ledger") for stage in stages):
        return "asks a language model, which may cost money"
    if not any(hasattr(stage, "explain") for stage in stages):
        return "has no reranker with explain"
    return None


def _stages(pipeline: pt.Transformer) -> list[Any]:
    """All transformers in a pipeline, with the models of cross-validation, which are no steps of it."""
    stages: list[Any] = list(stages_of(pipeline))
    stages += [model for stage in stages if isinstance(stage, Presented) for model in getattr(stage, "models", ())]
    return list({id(stage): stage for stage in stages}.values())


def _explained(pipeline: pt.Transformer, topic: pd.DataFrame) -> tuple[pd.DataFrame, list[pd.DataFrame]]:
    """The pipeline's results, and of each run of one of its rerankers the best windows."""
    explained: list[pd.DataFrame] = []
    with ExitStack() as stack:
        for stage in _stages(pipeline):
            stack.enter_context(_explaining(stage, explained) if hasattr(stage, "explain") else undisturbed(stage))
        frame = pipeline.transform(topic.copy())
    return frame, explained


@contextmanager
def _explaining(model: Any, explained: list[pd.DataFrame]) -> Iterator[None]:
    """Within it each run of a reranker adds its best windows: later stages may drop, overwrite or merge its columns."""
    transform = model.transform

    def explain(inp: pd.DataFrame) -> pd.DataFrame:
        out = transform(inp)
        if len(out):
            fields = window_fields(model.text_field, getattr(model, "repeat", None))
            texts = texts_of(out, fields, model.text_loader)
            explained.append(_best_of(out, texts, type(model).__name__))
        return out

    with undisturbed(model, "explain"):
        model.explain, model.transform = True, explain
        try:
            yield
        finally:
            del model.transform


def _best_of(frame: pd.DataFrame, texts: list[str], model: str) -> pd.DataFrame:
    """A row for each document, with its best window."""
    rows = []
    for row, text in zip(frame.to_dict("records"), texts, strict=True):
        scores, weights = row["window_scores"], row["window_weights"]
        best, start, end = int(np.argmax(scores)), row["best_start"], row["best_end"]
        rows.append(
            {
                **{"model": model, "docno": str(row["docno"]), "window": best, "windows": len(scores)},
                **{"start": start, "end": end, "window_score": scores[best]},
                **{"weight": np.nan if weights is None else weights[best], "text": text[start:end]},
            }
        )
    return pd.DataFrame(rows)


def _ranks_of(rankings: Rankings, name: str, qid: str) -> dict[str, int]:
    ranks = rankings.ranks[(rankings.ranks["name"] == name) & (rankings.ranks["qid"] == qid)]
    return dict(zip(ranks["docno"], ranks["rank"].tolist(), strict=True))


def _relevant_table(rankings: Rankings, names: Sequence[str], qid: str) -> tuple[pd.DataFrame, list[str]]:
    """The table of `Why.relevant` for these systems, and notes."""
    relevant = rankings.relevant[rankings.relevant["qid"] == qid]
    table = relevant[["docno", "label"]].sort_values("label", ascending=False, kind="stable").reset_index(drop=True)
    notes = [] if len(table) else ["no document is judged relevant for this query"]
    returned = rankings.returned[rankings.returned["qid"] == qid].set_index("name")
    for name in names:
        table[name] = table["docno"].map(_ranks_of(rankings, name, qid)).astype("Int64")
        if name not in returned.index:
            notes.append(f"{name} returned nothing for this query")
        elif returned.loc[name, "tied"]:
            notes.append(f"{name} has tied scores, which rank by docno, descending (trec_eval's rule)")
    return table, notes
