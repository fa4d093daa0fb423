"""Terrier for tests: its jars where they already are, its Java in this process or in another, and a small index."""

from __future__ import annotations

import os
import re
import shutil
import signal
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pyterrier as pt
import pytest

JARS = ("terrier-assemblies", "terrier-python-helper")

DOCUMENTS = {
    "d1": "the cat and the dog walk in the rain . the river is slow",
    "d2": "a bird on a tree as old as the mountain . it is green",
    "d3": "the city from which the cat run fast",
    "d4": "snow on the mountain and wind in the tree . the sun is red",
    "d5": "a fish in the blue river . a dog by the river . a long walk to the city with the dog",
    "d6": "write this and read that",
}
"""The texts of `terrier_index`, by docno."""


def jars() -> dict[str, Path]:
    """Both jars by the beginning of their names, from the first folder that has them; empty if none has."""
    named = (os.environ.get("PYTERRIER_HOME"), "~/.pyterrier", os.environ.get("TERRIER_JARS"))
    for folder in (Path(name).expanduser() for name in named if name):
        found = {jar: sorted(folder.glob(f"{jar}-*.jar")) for jar in JARS}
        if all(found.values()):
            return {jar: paths[-1].resolve() for jar, paths in found.items()}
    return {}


def home(folder: Path) -> Path:
    """A folder for PYTERRIER_HOME with links to the jars; skips where there are no jars or there is no Java."""
    pytest.importorskip("jnius_config")
    if not (os.environ.get("JAVA_HOME") or shutil.which("java")):
        pytest.skip("there is no Java")
    if not jars():
        pytest.skip("there are no jars of Terrier in PYTERRIER_HOME, ~/.pyterrier or TERRIER_JARS")
    for path in jars().values():
        (folder / path.name).symlink_to(path)
    return folder


def start(home: Path) -> None:
    """Starts Java in this process, offline, and gives the signals back to Python."""
    if pt.java.started():
        return
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setenv("PYTERRIER_HOME", str(home))
        pt.java.mavenresolver.offline()
        # Java would write to what stands for stdout during this test alone.
        pt.java.set_redirect_io(False)
        pt.java.init()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.getsignal(number))


def environment(home: Path) -> dict[str, str]:
    """The environment of another Python process that may use `pt.terrier`: named versions are not looked for."""
    found = {jar: re.search(r"-(\d[\d.]*\d)", path.name) for jar, path in jars().items()}
    assembly, helper = (match[1] for match in found.values() if match)
    return {**os.environ, "PYTERRIER_HOME": str(home), "TERRIER_VERSION": assembly, "TERRIER_HELPER_VERSION": helper}


def index(folder: Path, documents: dict[str, str] | Iterable[dict[str, str]] = DOCUMENTS, **meta: int) -> Any:
    """A `TerrierIndex` of documents: texts by docno, or dictionaries whose fields are kept if `meta` has their length.

    Needs the fixture `terrier_started`.
    """
    rows = [{"docno": d, "text": t} for d, t in documents.items()] if isinstance(documents, dict) else documents
    made = pt.terrier.TerrierIndex(str(folder))
    made.indexer(meta={"docno": 20, "text": 200_000, **meta}, store_positions=True).index(rows)
    return made
