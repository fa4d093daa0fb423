"""A small passage collection, long documents made of it, and a part of the docstrings."""

from __future__ import annotations

import random

import pandas as pd

from pyterrier_longdoc.data import far_relevant

SMALL = {"min_offset": 20, "max_doc_len": 60}
SLICE = """
from pyterrier_longdoc.data import docstrings
docstrings.PACKAGES = {"matplotlib": "matplotlib"}
"""
"""Code after which the collections of docstrings in a process are a twentieth as large."""
ON_TORCH = """
import sys
sys.modules["openvino"] = None
"""
"""Code after which models stay on torch: for a few texts OpenVINO's export takes longer than all else."""
_WORDS = "sun moon star sky tree river stone bird fish cat dog house road wind rain snow".split()  # noqa: SIM905


def write_modules(folder, **docstrings):
    """A tree of Python modules with one function `f` each, by the name of the module; returns the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in docstrings.items():
        (folder / f"{name}.py").write_text(f'def f():\n    """{text}"""\n', encoding="utf-8")
    return folder


def passages(count=80, seed=0):
    rng = random.Random(seed)
    return [
        {"docno": f"p{i}", "text": " ".join([f"w{i}", *rng.choices(_WORDS, k=rng.randrange(2, 12))])}
        for i in range(count)
    ]


def topics(count=5):
    return pd.DataFrame({"qid": [f"q{i}" for i in range(count)], "query": [f"query number {i}" for i in range(count)]})


def qrels(count=5, each=2):
    rows = [(f"q{i}", f"p{i * each + j}", 1) for i in range(count) for j in range(each)]
    return pd.DataFrame(rows, columns=["qid", "docno", "label"])


def build(**arguments):
    """A collection of ten documents, two for each topic, unless the arguments say otherwise."""
    given = {"passages": passages(), "topics": topics(), "qrels": qrels(), **SMALL, **arguments}
    return far_relevant(given.pop("passages"), given.pop("topics"), given.pop("qrels"), **given)
