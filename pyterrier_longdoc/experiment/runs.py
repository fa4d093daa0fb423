"""Evaluate the runs of an experiment and store them in a folder."""

from __future__ import annotations

import importlib.metadata
import json
import platform
import shutil
import sys
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any
from urllib.parse import quote

import ir_measures
import numpy as np
import pandas as pd
import pyterrier as pt

from ..common.arguments import check_arguments
from ..common.files import claim, file_digest, full_path, undamaged, write_lines
from ..common.frames import as_strings, check_columns, integer_labels
from ..common.measures import measures_named
from ..common.runs import read_run, write_run
from ..common.warnings import warn
from .cost import Cost
from .systems import Fold, RunPart

LIBRARIES = (
    "pyterrier-longdoc", "pyterrier", "ir-measures", "pytrec-eval-terrier", "numpy", "pandas", "scipy", "statsmodels",
)  # fmt: skip

SUMMED = ("num_q", "num_rel", "num_ret", "num_rel_ret", "NumQ", "NumRel", "NumRet", "NumRelRet")
"""Counts, which are summed over queries instead of averaged, as in `pt.Experiment`."""

_RUN_AGAIN = "run the Experiment with save_mode='overwrite'"

RunByQuery = dict[str, tuple[np.ndarray, np.ndarray]]
"""For each query, the docnos that a system returned, in the order of its frame, and their scores in float64."""


def run_by_query(frame: pd.DataFrame, name: str) -> RunByQuery:
    """Group the documents and scores of a frame (`qid, docno, score`) by query; `rank` is ignored."""
    check_columns(frame, ("qid", "docno", "score"), f"the rows of {name!r}")
    if not len(frame):
        raise ValueError(f"{name!r} returned no document for any topic: check its first stage and the topics")
    scores = frame["score"].to_numpy(dtype="float64")
    codes, qids = pd.factorize(as_strings(frame["qid"]))
    order, ends = np.argsort(codes, kind="stable"), np.cumsum(np.bincount(codes))[:-1]
    docnos = as_strings(frame["docno"]).to_numpy(dtype=object)
    columns = (np.split(column[order], ends) for column in (docnos, scores))
    return {str(qid): documents for qid, documents in zip(qids, zip(*columns, strict=True), strict=True)}


class QueryEvaluator:
    """Evaluates runs on the judged queries, exactly as `pt.Experiment` does, but for repeated documents in `ERR`.

    If a system returned nothing for a judged query, the query gets the default value of the measure, usually 0. Topics
    without judgements are ignored. Documents with equal scores (in float32) are ranked by docno, descending, as in
    trec_eval.

    Attributes:
        qids: the Q judged queries, in the order of the qrels.
        names: the names of the M measures.
    """

    def __init__(
        self, topics: pd.DataFrame, qrels: pd.DataFrame, metrics: Iterable[Any], *, filter_by_topics: bool = True
    ) -> None:
        labels = integer_labels(qrels, "qrels")
        judged = qrels[["qid", "docno", "label"]].assign(docno=as_strings(qrels["docno"]), label=labels)
        if filter_by_topics:
            judged = judged[judged["qid"].isin(set(topics["qid"]))]
        if not len(judged) or not len(topics):
            found, judging = (", ".join(map(repr, f["qid"].unique()[:3].tolist())) or "none" for f in (topics, qrels))
            raise ValueError(
                f"qrels and topics have no qid in common (topics: {found}; qrels: {judging}): use the qrels of these "
                f"topics"
            )
        measures = _named_measures(metrics)
        self.qids = judged["qid"].drop_duplicates().tolist()
        self.names = list(measures)
        self._row = {qid: row for row, qid in enumerate(self.qids)}
        self._column = {measure: column for column, measure in enumerate(measures.values())}
        self._evaluator = ir_measures.evaluator(list(self._column), pt.model.to_ir_measures(judged))

    def __call__(self, run: RunByQuery) -> np.ndarray:
        """Return the `(Q, M)` values of a run."""
        values = np.full((len(self.qids), len(self.names)), np.nan)
        # The last score of a repeated document counts, as in trec_eval; ir_measures would give gdeval, which computes
        # ERR, a relevant document twice.
        score_dicts = {qid: dict(zip(docnos, scores.tolist(), strict=True)) for qid, (docnos, scores) in run.items()}
        for metric in self._evaluator.iter_calc(score_dicts):
            values[self._row[metric.query_id], self._column[metric.measure]] = metric.value
        return values


def aggregate(values: np.ndarray, names: Iterable[str]) -> np.ndarray:
    """Aggregate `(..., Q, M)` per-query values to `(..., M)` means, or sums for counts."""
    is_sum = np.array([name in SUMMED for name in names])
    return np.where(is_sum, values.sum(axis=-2), values.mean(axis=-2))


def _named_measures(metrics: Iterable[Any]) -> dict[str, Any]:
    """Return measures by their name in `pt.Experiment`, which keeps trec_eval names as written."""
    names: dict[Any, str] = {}  # by measure: "map" and AP are the same measure, named "map"
    for metric in [metrics] if isinstance(metrics, str) else metrics:
        if metric == "mrt":
            raise ValueError("metrics: 'mrt' is not supported: set efficiency=True and see .efficiency of the results")
        family = [metric] if isinstance(metric, ir_measures.Measure) else measures_named(metric)
        for measure in family:
            if measure not in names or (isinstance(metric, str) and metric != str(measure) and len(family) == 1):
                names[measure] = metric if isinstance(metric, str) and len(family) == 1 else str(measure)
    if not names:
        raise ValueError("metrics must name at least one measure")
    return {name: measure for measure, name in names.items()}


class RunFolder:
    """The folder of an experiment with its finished runs.

    A run is stored as `runs/<system>/[seed-<seed>][.fold-<fold>].res.gz`, with a JSON file of its cost, and the topics
    and models that it was made by.

    Attributes:
        read: the names of the systems of which a run was read.
    """

    def __init__(self, folder: str | Path, mode: str, systems: Iterable[str]) -> None:
        check_arguments("str", choices=("warn", "reuse", "overwrite", "error"), save_mode=mode)
        self.folder, self.mode, self.read = Path(full_path(folder)), mode, dict[str, None]()
        claim(self.folder)
        folders = {name: _run_file(self.folder, name, None, None).parent for name in systems}
        old = [name for name, path in folders.items() if path.is_dir()]
        message = (
            f"save_dir={str(folder)!r} already has runs of {', '.join(old)}: use save_mode='reuse' to read them, or "
            f"'overwrite' to replace them"
        )
        if old and mode == "error":
            raise ValueError(message)
        if old and mode == "warn":
            warn(f"{message}, as happens now", UserWarning)
        # Now, because an interruption would leave old runs beside new ones.
        for name in old if mode == "overwrite" else ():
            shutil.rmtree(folders[name])

    def find(self, part: RunPart, made_by: Mapping[str, Any]) -> tuple[pd.DataFrame, Cost] | None:
        """Return the run to reuse and its cost; None if there is none, or its cost was not measured but is asked for.

        Raises:
            ValueError: if it was made by another model of this package, or for other topics.
        """
        path = _run_file(self.folder, part.system, part.seed, part.fold)
        if self.mode != "reuse" or not _notes_of(path).is_file():  # notes are written last
            return None
        with undamaged(_notes_of(path), _RUN_AGAIN):
            notes = json.loads(_notes_of(path).read_text(encoding="utf-8"))
            saved = notes["made by"]
            if saved is None or saved["efficiency"] < made_by["efficiency"]:
                return None
            for what in ("topics", "models"):
                if saved[what] != made_by[what]:
                    raise ValueError(
                        f"save_dir={str(self.folder)!r} has a run of {part} with other {what}: use another folder, or "
                        f"save_mode='overwrite'"
                    )
            cost = Cost(**notes["cost"])
        self.read[part.system] = None
        return read_saved_run(path), cost

    def write(self, part: RunPart, run: pd.DataFrame, made_by: Mapping[str, Any] | None, cost: Cost | None) -> None:
        """Write a run and its notes; a run over all topics replaces runs of folds, and the other way round."""
        for other in run_files(self.folder, part.system, part.seed):
            if (".fold-" in other.name) != (part.fold is not None):
                _notes_of(other).unlink(missing_ok=True)
                other.unlink()
        path = _run_file(self.folder, part.system, part.seed, part.fold)
        _notes_of(path).unlink(missing_ok=True)  # those of an earlier run
        write_run(run, path, part.system)
        notes = {"made by": made_by, "cost": cost and asdict(cost), "digest": file_digest(path)}
        write_lines(_notes_of(path), [json.dumps(notes, indent=1)])


def read_saved_run(path: Path) -> pd.DataFrame:
    """Read a run of an experiment's folder; ValueError if it is not as it was written."""
    with undamaged(_notes_of(path), _RUN_AGAIN):
        digest = json.loads(_notes_of(path).read_text(encoding="utf-8"))["digest"]
    if file_digest(path) != digest:
        raise ValueError(f"{str(path)!r} is damaged: {_RUN_AGAIN}")
    return read_run(path)


def run_files(folder: Path, system: str, seed: int | None) -> list[Path]:
    """Return the run files of a system and seed in an experiment's folder: one, or one per fold."""
    path = _run_file(folder, system, seed, None)
    return sorted([*path.parent.glob(path.name), *path.parent.glob(path.name.replace(".res", ".fold-*.res"))])


def _run_file(folder: Path, system: str, seed: int | None, fold: Fold | None) -> Path:
    stem = "run" if seed is None else f"seed-{seed}"
    suffix = "" if fold is None else f".fold-{fold.index}"
    # Different systems get different folders, none of which is hidden or outside of the experiment's folder.
    name = quote(system, safe=" ()+,=@-_").replace(".", "%2E")
    return folder / "runs" / name / f"{stem}{suffix}.res.gz"


def _notes_of(run_file: Path) -> Path:
    return run_file.with_name(run_file.name.replace(".res.gz", ".json"))


def experiment_settings(folds: Sequence[Fold], seeds: Sequence[int] | None) -> dict[str, Any]:
    """Return folds, seeds and versions, for JSON."""
    versions = {"python": platform.python_version()}
    for name in (*LIBRARIES, *(name for name in ("torch", "transformers") if name in sys.modules)):
        with suppress(importlib.metadata.PackageNotFoundError):
            versions[name] = importlib.metadata.version(name)
    return {
        "folds": [fold.test_topics["qid"].tolist() for fold in folds],
        "seeds": None if seeds is None else list(seeds),
        "versions": versions,
    }
