"""Runs of an experiment: their evaluation, and the folder that keeps them."""

from __future__ import annotations

import importlib.metadata
import json
import platform
import shutil
import sys
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any
from urllib.parse import quote

import ir_measures
import numpy as np
import pandas as pd
import pyterrier as pt

from ..common.arguments import check_arguments
from ..common.files import write_lines
from ..common.frames import as_strings, check_columns, labels_of
from ..common.measures import measures_named
from ..common.runs import frame_digest, read_run, write_run
from .cost import Cost
from .identity import Identity, differences
from .systems import Fold, PlannedRun

LIBRARIES = (
    "pyterrier-longdoc", "pyterrier", "ir-measures", "pytrec-eval-terrier", "numpy", "pandas", "scipy", "statsmodels",
)  # fmt: skip

SUMMED = ("num_q", "num_rel", "num_ret", "num_rel_ret", "NumQ", "NumRel", "NumRet", "NumRelRet")
"""Counts, whose value over all queries is their sum, not their mean: as in `pt.Experiment`."""

RunByQuery = dict[str, tuple[np.ndarray, np.ndarray]]
"""By query, the docnos that a system returned, in the order of its frame, and their scores in float64."""


def run_by_query(frame: pd.DataFrame, name: str) -> RunByQuery:
    """Return a frame with `qid`, `docno` and `score` by query; other columns do not count, and `rank` is not read."""
    check_columns(frame, ("qid", "docno", "score"), f"the rows of {name!r}")
    if not len(frame):
        raise ValueError(f"{name!r} returned no document for any topic; nothing can be evaluated")
    scores = frame["score"].to_numpy(dtype="float64")
    codes, qids = pd.factorize(as_strings(frame["qid"]))
    order, ends = np.argsort(codes, kind="stable"), np.cumsum(np.bincount(codes))[:-1]
    docnos = as_strings(frame["docno"]).to_numpy(dtype=object)
    columns = (np.split(column[order], ends) for column in (docnos, scores))
    return {str(qid): documents for qid, documents in zip(qids, zip(*columns, strict=True), strict=True)}


class QueryEvaluator:
    """Evaluates runs on the queries that have judgements, exactly as `pt.Experiment` does.

    A judged query for which a system returned nothing counts as the measure's default, 0 for all common ones. Topics
    without judgements do not count. Documents of equal score (in float32) rank by docno, descending: trec_eval's rule.
    Attributes: `qids`, the Q queries that count, in the qrels' order, and `names` of the M measures.
    """

    def __init__(
        self, topics: pd.DataFrame, qrels: pd.DataFrame, metrics: Iterable[Any], *, filter_by_topics: bool = True
    ) -> None:
        judged = qrels[["qid", "docno", "label"]].assign(docno=as_strings(qrels["docno"]), label=_grades(qrels))
        if filter_by_topics:
            judged = judged[judged["qid"].isin(set(topics["qid"]))]
        if not len(judged):
            raise ValueError("qrels and topics have no qid in common: no topic can be evaluated")
        measures = _named_measures(metrics)
        self.qids = judged["qid"].drop_duplicates().tolist()
        self.names = list(measures)
        self._row = {qid: row for row, qid in enumerate(self.qids)}
        self._column = {measure: column for column, measure in enumerate(measures.values())}
        self._evaluator = ir_measures.evaluator(list(self._column), pt.model.to_ir_measures(judged))

    def __call__(self, run: RunByQuery) -> np.ndarray:
        """Return the `(Q, M)` values of a run."""
        values = np.full((len(self.qids), len(self.names)), np.nan)
        # Of a document that is there twice the last score counts, as in PyTerrier.
        ranked = {qid: dict(zip(docnos, scores.tolist(), strict=True)) for qid, (docnos, scores) in run.items()}
        for metric in self._evaluator.iter_calc(ranked):
            values[self._row[metric.query_id], self._column[metric.measure]] = metric.value
        return values


def aggregate(values: np.ndarray, names: Iterable[str]) -> np.ndarray:
    """Return the `(..., M)` values of a system, means and sums of counts, of its `(..., Q, M)` per-query values."""
    summed = np.array([name in SUMMED for name in names])
    return np.where(summed, values.sum(axis=-2), values.mean(axis=-2))


def _named_measures(metrics: Iterable[Any]) -> dict[str, Any]:
    """Return measures by the name that `pt.Experiment` gives them: a trec_eval name stays as it was written."""
    names: dict[Any, str] = {}  # by measure: "map" and AP are one, which trec_eval's name names
    for metric in [metrics] if isinstance(metrics, str) else metrics:
        family = [metric] if isinstance(metric, ir_measures.Measure) else measures_named(metric)
        for measure in family:
            if measure not in names or (isinstance(metric, str) and metric != str(measure) and len(family) == 1):
                names[measure] = metric if isinstance(metric, str) and len(family) == 1 else str(measure)
    return {name: measure for measure, name in names.items()}


def _grades(qrels: pd.DataFrame) -> np.ndarray:
    """Return the labels as whole numbers, which trec_eval wants, also where a merge has made them floats."""
    labels = labels_of(qrels, "qrels")
    fractions = np.flatnonzero(labels != np.floor(labels))
    if len(fractions):
        raise ValueError(
            f"qrels: the column 'label' holds {labels[fractions[0]]} in row {fractions[0]}: measures are of whole "
            f"numbers, e.g. 0, 1 and 2"
        )
    return labels.astype("int64")


class RunFolder:
    """The folder of an experiment: what it was asked for (`settings.json`), and the runs that are finished.

    A run is `runs/<system>/[seed-<seed>][.fold-<fold>].res.gz`, with a JSON file of notes on who made it. Runs that are
    there already are taken if the same system would make them (mode `"reuse"`), deleted (`"overwrite"`) or refused
    (`"error"`).
    """

    def __init__(
        self, folder: str | Path, settings: dict[str, Any], mode: str = "reuse", systems: Iterable[str] = ()
    ) -> None:
        check_arguments("str", choices=("reuse", "overwrite", "error"), save_mode=mode)
        self.folder, self.settings = Path(folder), settings
        runs, file = self.folder / "runs", self.folder / "settings.json"
        if runs.is_dir() and (mode == "error" or not file.is_file()):
            raise FileExistsError(f"{str(folder)!r} holds runs already: choose another save_dir, or save_mode='reuse'")
        if mode == "overwrite":
            for name in systems:
                shutil.rmtree(_run_file(self.folder, name, None, None).parent, ignore_errors=True)
        elif runs.is_dir():
            found = json.loads(file.read_text(encoding="utf-8"))
            for what in ("topics", "folds"):
                if found.get(what) != settings[what]:
                    raise ValueError(
                        f"{str(folder)!r} holds runs of other {what}: choose another save_dir, or save_mode='overwrite'"
                    )
        write_lines(file, [json.dumps(settings, indent=1)])

    def find(
        self, planned: PlannedRun, identity: Identity, *, measured: bool
    ) -> tuple[tuple[pd.DataFrame, Cost] | None, list[str]]:
        """Return the finished run and its cost, or else in what it is not that of the same system, `measured` alike."""
        path = self._path(planned)
        if not _notes_of(path).is_file():  # written last, so that they vouch for the run
            return None, []
        notes = json.loads(_notes_of(path).read_text(encoding="utf-8"))
        if notes["identity"] is None or (measured and not notes["measured"]):
            return None, []
        if identity.functions:
            return None, [f"function {name}" for name in identity.functions]
        differs = differences(notes["identity"], self._told(planned, identity))
        return (None, differs) if differs else ((read_run(path), Cost(**notes["cost"])), [])

    def write(
        self, planned: PlannedRun, run: pd.DataFrame, identity: Identity | None, cost: Cost | None, *, measured: bool
    ) -> None:
        """Write a run and notes on it; those that nothing has made, or a function, are never found again."""
        for other in run_files(self.folder, planned.system, planned.seed):
            if (".fold-" in other.name) != (planned.fold is not None):
                # The system was not cross-validated before, or is not any more.
                _notes_of(other).unlink(missing_ok=True)
                other.unlink()
        path = self._path(planned)
        write_run(run, path, planned.system)
        notes = {
            "identity": None if identity is None else self._told(planned, identity),
            "measured": measured,
            "cost": None if cost is None else asdict(cost),
            "versions": self.settings["versions"],
        }
        write_lines(_notes_of(path), [json.dumps(notes, indent=1)])

    def _told(self, planned: PlannedRun, identity: Identity) -> dict[str, Any]:
        """Return what tells a run from others, for JSON."""
        topics = self.settings["topics"]["digest"] if planned.fold is None else frame_digest(planned.fold.test_topics)
        return {"system": identity.told, "topics": topics}

    def _path(self, planned: PlannedRun) -> Path:
        fold = None if planned.fold is None else planned.fold.index
        return _run_file(self.folder, planned.system, planned.seed, fold)


def run_files(folder: Path, system: str, seed: int | None) -> list[Path]:
    """Return the run files of a system and seed in an experiment's folder: one, or one for each fold."""
    path = _run_file(folder, system, seed, None)
    return sorted([*path.parent.glob(path.name), *path.parent.glob(path.name.replace(".res", ".fold-*.res"))])


def _run_file(folder: Path, system: str, seed: int | None, fold: int | None) -> Path:
    stem = "run" if seed is None else f"seed-{seed}"
    of_fold = "" if fold is None else f".fold-{fold}"
    # Reversible, so that no two names share a folder; a leading dot would hide it or leave it.
    return folder / "runs" / quote(system, safe=" ()+,=@-_").replace(".", "%2E") / f"{stem}{of_fold}.res.gz"


def _notes_of(run_file: Path) -> Path:
    return run_file.with_name(run_file.name.replace(".res.gz", ".json"))


def experiment_settings(topics: pd.DataFrame, folds: Sequence[Fold], seeds: Sequence[int] | None) -> dict[str, Any]:
    """Return what the runs of an experiment depend on, for JSON: topics, folds, seeds and versions."""
    versions = {"python": platform.python_version()}
    for name in (*LIBRARIES, *(name for name in ("torch", "transformers") if name in sys.modules)):
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            versions[name] = "not installed as a package"
    return {
        "topics": {"queries": len(topics), "digest": frame_digest(topics)},
        "folds": [fold.test_topics["qid"].tolist() for fold in folds],
        "seeds": None if seeds is None else list(seeds),
        "versions": versions,
    }
