"""The folder of an experiment: what it was asked for, and the runs that are finished."""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import platform
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pandas as pd

from ..common.files import replacing
from .runs import read_run, write_run
from .systems import Fold, Job

SAVE_MODES = ("reuse", "overwrite", "error")
SETTINGS = "settings.json"


class RunStore:
    """Keeps the runs of an experiment: `runs/<system>/[seed-<seed>][.fold-<fold>].res.gz`, with a JSON file for each.

    Args:
        folder: made if need be.
        settings: what the runs depend on; see `describe`.
        mode: `"reuse"` keeps finished runs, `"overwrite"` makes them anew, `"error"` refuses a folder with runs.

    Raises:
        ValueError: for an unknown mode, or a folder with runs of other topics or folds.
        FileExistsError: for a folder with runs and `"error"`.
    """

    def __init__(self, folder: str | Path, settings: dict[str, Any], mode: str = "reuse") -> None:
        if mode not in SAVE_MODES:
            raise ValueError(f"save_mode={mode!r} is unknown; choose one of {', '.join(SAVE_MODES)}")
        self.folder, self.versions = Path(folder), settings["versions"]
        runs, file = self.folder / "runs", self.folder / SETTINGS
        if runs.is_dir() and mode == "error":
            raise FileExistsError(f"{str(folder)!r} has runs already: choose another save_dir, or save_mode='reuse'")
        if mode == "overwrite" and file.is_file():
            # Only what an experiment wrote: the settings file says that this folder is one.
            shutil.rmtree(runs, ignore_errors=True)
        elif runs.is_dir():
            kept = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
            for what in ("topics", "folds"):
                if kept.get(what) != settings[what]:
                    raise ValueError(
                        f"{str(folder)!r} holds runs of other {what}: choose another save_dir, or save_mode='overwrite'"
                    )
        with replacing(file) as temporary:
            temporary.write_text(json.dumps(settings, indent=1), encoding="utf-8")

    def read(self, job: Job) -> tuple[pd.DataFrame, dict[str, Any]] | None:
        """A finished run and what was noted of it; None if it is not finished."""
        path = self._path(job)
        notes = path.with_name(path.name.removesuffix(".res.gz") + ".json")
        # Written last, so that it vouches for the run.
        if not notes.is_file():
            return None
        return read_run(path), json.loads(notes.read_text(encoding="utf-8"))

    def write(self, job: Job, run: pd.DataFrame, notes: dict[str, Any]) -> None:
        """Keeps a run and what is to be noted of it; versions of libraries are added."""
        path = self._path(job)
        for other in self.files(self.folder, job.system, job.seed):
            if (".fold-" in other.name) != (job.fold is not None):
                other.unlink()  # the system was not cross-validated before, or is not any more
        write_run(run, path, job.system)
        with replacing(path.with_name(path.name.removesuffix(".res.gz") + ".json")) as temporary:
            temporary.write_text(json.dumps({**notes, "versions": self.versions}, indent=1), encoding="utf-8")

    def _path(self, job: Job) -> Path:
        seed = "run" if job.seed is None else f"seed-{job.seed}"
        fold = "" if job.fold is None else f".fold-{job.fold.index}"
        return _runs_of(self.folder, job.system) / f"{seed}{fold}.res.gz"

    @staticmethod
    def files(folder: Path, system: str, seed: int | None) -> list[Path]:
        """The run files of a system and seed: one, or one for each fold."""
        stem = "run" if seed is None else f"seed-{seed}"
        runs = _runs_of(folder, system)
        return sorted([*runs.glob(f"{stem}.res.gz"), *runs.glob(f"{stem}.fold-*.res.gz")])


def describe(topics: pd.DataFrame, folds: Sequence[Fold], seeds: Sequence[int] | None) -> dict[str, Any]:
    """What the runs of an experiment depend on, for JSON: topics, folds, seeds and versions."""
    texts = topics[["qid", "query"]] if "query" in topics.columns else topics[["qid"]]
    digest = hashlib.sha256(json.dumps(texts.astype(str).to_numpy().tolist()).encode()).hexdigest()
    return {
        "topics": {"queries": len(topics), "sha256": digest},
        "folds": [fold.test_topics["qid"].tolist() for fold in folds],
        "seeds": None if seeds is None else list(seeds),
        "versions": _versions(),
    }


def _runs_of(folder: Path, system: str) -> Path:
    # Reversible, so that no two names share a folder; a leading dot would hide it or leave it.
    return folder / "runs" / quote(system, safe=" ()+,=@-_").replace(".", "%2E")


def _versions() -> dict[str, str]:
    versions = {"python": platform.python_version()}
    names = ("pyterrier-longdoc", "pyterrier", "ir-measures", "pytrec-eval-terrier", "numpy", "pandas", "scipy")
    for name in (*names, "statsmodels", *(name for name in ("torch", "transformers") if name in sys.modules)):
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            versions[name] = "not installed as a package"
    return versions
