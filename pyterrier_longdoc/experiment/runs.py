"""Runs: a system's ranking of all topics, in memory, as TREC files and in an experiment's folder, and its values."""

from __future__ import annotations

import csv
import importlib.metadata
import json
import platform
import shutil
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import quote

import ir_measures
import numpy as np
import pandas as pd
import pyterrier as pt

from ..common.arguments import check_choice
from ..common.files import write_lines
from ..common.frames import as_strings, check_columns, frame_digest, labels_of
from ..common.measures import measures_named
from .identity import differences
from .systems import Fold, Job

EXACT_FLOATS: dict[str, Any] = (
    {} if tuple(map(int, pd.__version__.split(".")[:2])) >= (3, 1) else {"float_precision": "round_trip"}
)
"""For `pd.read_csv`, so that numbers come back as they were written: the default, and the only choice, since 3.1."""

DOUBTS = ("missing queries", "NaN or infinite scores", "constant scores", "tied scores", "repeated documents")
LIBRARIES = (
    "pyterrier-longdoc", "pyterrier", "ir-measures", "pytrec-eval-terrier", "numpy", "pandas", "scipy", "statsmodels",
)  # fmt: skip

SUMMED = ("num_q", "num_rel", "num_ret", "num_rel_ret", "NumQ", "NumRel", "NumRet", "NumRelRet")
"""Counts, whose value over all queries is their sum, not their mean: as in `pt.Experiment`."""


Run = dict[str, tuple[np.ndarray, np.ndarray]]
"""By query, the docnos that a system returned, in the order of its frame, and their scores in float64."""


def as_run(frame: pd.DataFrame, name: str) -> Run:
    """A frame with `qid`, `docno` and `score` as a run; other columns do not count, and `rank` is not read.

    Raises:
        ValueError: if a column is missing, a score is no number, or there is no row at all.
    """
    check_columns(frame, ("qid", "docno", "score"), f"the rows of {name!r}")
    if not len(frame):
        raise ValueError(f"{name!r} returned no document for any topic; nothing can be evaluated")
    try:
        scores = frame["score"].to_numpy(dtype="float64")
    except (TypeError, ValueError):
        raise ValueError(f"the run of {name!r} has scores that are no numbers (column score)") from None
    codes, qids = pd.factorize(as_strings(frame["qid"]))
    order, ends = np.argsort(codes, kind="stable"), np.cumsum(np.bincount(codes))[:-1]
    docnos = as_strings(frame["docno"]).to_numpy(dtype=object)
    columns = (np.split(column[order], ends) for column in (docnos, scores))
    return {str(qid): documents for qid, documents in zip(qids, zip(*columns, strict=True), strict=True)}


def doubts(run: Run, qids: Sequence[str]) -> dict[str, int]:
    """In how many of these queries a run is doubtful, by why. Scores are compared as trec_eval does: in float32."""
    found = dict.fromkeys(DOUBTS, 0)
    for qid in qids:
        if qid not in run:
            found["missing queries"] += 1
            continue
        docnos, scores = run[qid]
        with np.errstate(over="ignore"):
            distinct = len(np.unique(scores.astype("float32"), equal_nan=False))
        found["NaN or infinite scores"] += not np.isfinite(scores).all()
        found["constant scores"] += distinct == 1 < len(scores)
        found["tied scores"] += distinct < len(scores)
        found["repeated documents"] += len(set(docnos.tolist())) < len(docnos)
    return found


def write_run(frame: pd.DataFrame, path: str | Path, name: str) -> None:
    """Writes a run in TREC format, gzipped where the path ends in `.gz`; a half-written file is never left.

    Args:
        frame: `qid, docno, score`; ranks are made from the scores.
        path: of the file.
        name: of the system, for the last column; white space in it becomes `_`.

    Raises:
        ValueError: if a qid or docno contains white space, which the format cannot hold.
    """
    columns = {column: as_strings(frame[column]).tolist() for column in ("qid", "docno")}
    ranked = pt.model.add_ranks(pd.DataFrame({**columns, "score": frame["score"].tolist()}))
    write_lines(Path(path), run_lines(ranked, name))


def run_lines(ranked: pd.DataFrame, name: str) -> Iterator[str]:
    """The lines of a run in TREC format: `qid, docno, score, rank` in the order of the rows; else as `write_run`."""
    columns = {column: as_strings(ranked[column]).tolist() for column in ("qid", "docno")}
    for column, values in columns.items():
        broken = next((value for value in values if not value or len(value.split()) != 1), None)
        if broken is not None:
            raise ValueError(f"column {column} holds {broken!r}: TREC runs cannot hold empty names or white space")
    system = "_".join(name.split()) or "run"
    for qid, docno, rank, score in zip(
        *columns.values(), ranked["rank"].tolist(), ranked["score"].tolist(), strict=True
    ):
        yield f"{qid} Q0 {docno} {rank} {score!r} {system}"


def read_run(path: str | Path) -> pd.DataFrame:
    """Reads a run in TREC format (`qid Q0 docno rank score system`), plain or compressed.

    `pt.io.read_results` would take names such as "NA" for missing ones, and quotation marks for syntax.

    Returns:
        `qid, docno, score`, with every score as it was written.

    Raises:
        FileNotFoundError: if there is no such file.
        ValueError: if it is no TREC run.
    """
    return pd.concat(run_parts(path, None))


def run_parts(path: str | Path, rows: int | None) -> Iterator[pd.DataFrame]:
    """As `read_run`, so many rows at a time; None for all at once."""
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"run file {str(path)!r} does not exist")
    try:
        with pd.read_csv(
            path,
            sep=r"\s+",
            names=["qid", "Q0", "docno", "rank", "score", "system"],
            usecols=["qid", "docno", "score"],
            dtype={"qid": str, "docno": str},
            keep_default_na=False,
            quoting=csv.QUOTE_NONE,
            iterator=True,
            chunksize=rows,
            **EXACT_FLOATS,
        ) as parts:
            for part in parts:
                yield part.astype({"score": "float64"})
    except (ValueError, UnicodeDecodeError) as error:
        raise ValueError(f"{str(path)!r} is no TREC run (qid Q0 docno rank score system): {error}") from None


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

    def __call__(self, run: Run) -> np.ndarray:
        """`(Q, M)` values of a run."""
        values = np.full((len(self.qids), len(self.names)), np.nan)
        # Of a document that is there twice the last score counts, as in PyTerrier.
        ranked = {qid: dict(zip(docnos, scores.tolist(), strict=True)) for qid, (docnos, scores) in run.items()}
        for metric in self._evaluator.iter_calc(ranked):
            values[self._row[metric.query_id], self._column[metric.measure]] = metric.value
        return values


def aggregate(values: np.ndarray, names: Iterable[str]) -> np.ndarray:
    """`(..., Q, M)` per-query values to `(..., M)` values of the system: means, and sums of counts."""
    summed = np.array([name in SUMMED for name in names])
    return np.where(summed, values.sum(axis=-2), values.mean(axis=-2))


def _named_measures(metrics: Iterable[Any]) -> dict[str, Any]:
    """Measures by the name that `pt.Experiment` gives them: a trec_eval name stays as it was written."""
    if isinstance(metrics, str) or not isinstance(metrics, Iterable):
        raise ValueError(f"metrics={metrics!r} must be a list of measures, e.g. [nDCG@10, 'map']")
    names: dict[Any, str] = {}  # by measure: "map" and AP are one, which trec_eval's name names
    for metric in metrics:
        if metric == "mrt":
            raise ValueError("'mrt' is no measure here: efficiency=True gives milliseconds per query and document")
        family = [metric] if isinstance(metric, ir_measures.Measure) else measures_named(metric)
        for measure in family:
            if measure not in names or (isinstance(metric, str) and metric != str(measure) and len(family) == 1):
                names[measure] = metric if isinstance(metric, str) and len(family) == 1 else str(measure)
    if not names:
        raise ValueError("metrics is empty: name at least one measure, e.g. [nDCG@10]")
    return {name: measure for measure, name in names.items()}


def _grades(qrels: pd.DataFrame) -> np.ndarray:
    """The labels as whole numbers, which trec_eval wants, also where a merge has made them floats."""
    labels = labels_of(qrels, "qrels")
    fractions = np.flatnonzero(labels != np.floor(labels))
    if len(fractions):
        raise ValueError(
            f"qrels: the column 'label' holds {labels[fractions[0]]} in row {fractions[0]}, and in {len(fractions)} of "
            f"{len(labels)} rows no whole number: measures are of whole numbers, e.g. 0, 1 and 2"
        )
    return labels.astype("int64")


class SavedRun(NamedTuple):
    """What a folder has of a job: a run and its cost, or what about the job `differs`, so that its run is of no use."""

    run: pd.DataFrame | None
    cost: dict[str, Any] | None
    differs: list[str]
    sources: dict[str, list[str]] | None = None
    """What to cite for it."""


class RunFolder:
    """The folder of an experiment: what it was asked for (`settings.json`), and the runs that are finished.

    A run is `runs/<system>/[seed-<seed>][.fold-<fold>].res.gz`, with a JSON file of notes on who made it. Runs that are
    there already are taken if the same system would make them (mode `"reuse"`), deleted (`"overwrite"`) or refused
    (`"error"`).
    """

    def __init__(
        self, folder: str | Path, settings: dict[str, Any], mode: str = "reuse", systems: Iterable[str] = ()
    ) -> None:
        check_choice("save_mode", mode, ("reuse", "overwrite", "error"))
        self.folder, self.versions = Path(folder), settings["versions"]
        runs, file = self.folder / "runs", self.folder / "settings.json"
        if runs.is_dir() and mode == "error":
            raise FileExistsError(f"{str(folder)!r} has runs already: choose another save_dir, or save_mode='reuse'")
        if runs.is_dir() and not file.is_file():
            raise FileExistsError(f"{str(runs)!r} is of no experiment (no settings.json): choose another save_dir")
        if mode == "overwrite":
            for name in systems:
                shutil.rmtree(_run_file(self.folder, Job(name, None, None, None)).parent, ignore_errors=True)
        elif runs.is_dir():
            found = json.loads(file.read_text(encoding="utf-8"))
            for what in ("topics", "folds"):
                if found.get(what) != settings[what]:
                    raise ValueError(
                        f"{str(folder)!r} holds runs of other {what}: choose another save_dir, or save_mode='overwrite'"
                    )
        write_lines(file, [json.dumps(settings, indent=1)])

    def find(self, job: Job, identity: Any, *, measured: bool) -> SavedRun | None:
        """The finished run of a job; None if there is none, or it was not `measured` and should be.

        Args:
            job: what is to be run.
            identity: of what would make the run, JSON-able; a run that something else has made is not taken.
            measured: whether its cost is asked for.
        """
        path = _run_file(self.folder, job)
        if job.given or not _notes_of(path).is_file():  # written last, so that they vouch for the run
            return None
        notes = json.loads(_notes_of(path).read_text(encoding="utf-8"))
        if notes.get("given") or (measured and notes["cost"] is not None and not notes["measured"]):
            return None
        differs = differences(notes["identity"], identity)
        if differs:
            return SavedRun(None, None, differs)
        return SavedRun(read_run(path), notes["cost"], [], notes.get("sources"))

    def write(self, job: Job, run: pd.DataFrame, notes: dict[str, Any]) -> None:
        """Writes a run and notes on it, which `find` reads; versions of libraries are added."""
        for other in run_files(self.folder, job.system, job.seed):
            if (".fold-" in other.name) != (job.fold is not None):
                # The system was not cross-validated before, or is not any more.
                _notes_of(other).unlink(missing_ok=True)
                other.unlink()
        path = _run_file(self.folder, job)
        write_run(run, path, job.system)
        write_lines(_notes_of(path), [json.dumps({**notes, "versions": self.versions}, indent=1)])


def run_files(folder: Path, system: str, seed: int | None) -> list[Path]:
    """The run files of a system and seed in an experiment's folder: one, or one for each fold."""
    path = _run_file(folder, Job(system, seed, None, None))
    return sorted([*path.parent.glob(path.name), *path.parent.glob(path.name.replace(".res", ".fold-*.res"))])


def _run_file(folder: Path, job: Job) -> Path:
    seed = "run" if job.seed is None else f"seed-{job.seed}"
    fold = "" if job.fold is None else f".fold-{job.fold.index}"
    # Reversible, so that no two names share a folder; a leading dot would hide it or leave it.
    return folder / "runs" / quote(job.system, safe=" ()+,=@-_").replace(".", "%2E") / f"{seed}{fold}.res.gz"


def _notes_of(run_file: Path) -> Path:
    return run_file.with_name(run_file.name.replace(".res.gz", ".json"))


def settings_of(topics: pd.DataFrame, folds: Sequence[Fold], seeds: Sequence[int] | None) -> dict[str, Any]:
    """What the runs of an experiment depend on, for JSON: topics, folds, seeds and versions."""
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
