"""What a progress bar shows is the share of the work that is done, whatever the lengths of the documents."""

from __future__ import annotations

import io
import random

import numpy as np
import pandas as pd
import pyterrier as pt
import pytest

import pyterrier_longdoc as ld
from pyterrier_longdoc.modelling import scorer as scorer_module
from pyterrier_longdoc.modelling.preselection import FirstK, KeyBlocks
from pyterrier_longdoc.modelling.settings import Settings
from pyterrier_longdoc.modelling.windows import GreedyChunks, SlidingWindows, SlidingWords, Truncate
from pyterrier_longdoc.modelling.workload import window_sizes

from ..support.lines import shown_lines
from ..support.scorers import Passes
from ..support.systems import QUIET, make
from ..support.tiny import LONG

pytestmark = QUIET

RANDOM = random.Random(1)
TEXTS = [" ".join(RANDOM.choices(LONG.split(), k=words)) for words in [400] * 3 + [120] * 5 + [8] * 40]
RUN = pd.DataFrame(
    [
        {"qid": qid, "query": query, "docno": f"d{i}", "text": text}
        for qid, query in (("1", "old dog"), ("2", "snow in the city"))
        for i, text in enumerate(TEXTS)
    ]
)


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("FirstP", {}),
        ("MaxP", {}),
        ("MaxP", {"max_windows": 2}),
        ("MaxP", {"max_doc_len": 25}),
        ("MaxP", {"preselect": FirstK(2)}),
        ("Birch", {}),
        ("CEDR-knrm", {}),
        ("BiEncoder-max", {}),
    ],
    ids=str,
)
def test_progress_is_the_share_of_what_is_encoded(name, changes, monkeypatch):
    monkeypatch.setattr(scorer_module, "BLOCK_PAIRS", 8)
    model = make(name, **changes)
    passes, shown = Passes(model.load_scorer()), []

    class Bar(pt.tqdm):
        def update(self, n=1):
            super().update(n)
            shown.append((self.n / self.total, sum(rows * tokens for rows, tokens in passes.shapes)))

    with Bar(file=io.StringIO()) as bar:
        model.score_pairs(RUN["query"].tolist(), RUN["text"].tolist(), bar)
    shares, tokens = np.array(shown).T
    assert shares[-1] == 1
    assert (np.diff(shares) >= 0).all()
    assert np.abs(shares - tokens / tokens[-1]).max() < 0.08


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        (Settings(Truncate(size=10)), [10]),
        (Settings(SlidingWindows(40, 20)), [40, 40, 40, 40]),
        (Settings(SlidingWindows(40, 20, max_windows=2)), [40, 40]),
        (Settings(SlidingWindows(40, 20), max_doc_len=50), [40, 30]),
        (Settings(SlidingWindows(40, 20), preselect=FirstK(3)), [40, 40, 40]),
        (Settings(GreedyChunks(60), preselect=KeyBlocks(FirstK(4), GreedyChunks(20))), [60, 20]),
        (Settings(SlidingWords(50, 50, max_tokens=30)), [30, 30, 30, 10]),
    ],
    ids=str,
)
def test_windows_of_a_text_of_a_hundred_tokens(settings, expected):
    assert window_sizes(settings, 100) == expected
    assert window_sizes(settings, 0) == [0]


def test_an_experiment_shows_one_line_for_each_run(capsys):
    topics = RUN[["qid", "query"]].drop_duplicates()
    qrels = pd.DataFrame({"qid": ["1", "2"], "docno": ["d1", "d2"], "label": 1})
    candidates = pt.Transformer.from_df(RUN.assign(score=0.0))
    maxp, firstp = make("MaxP", verbose=True), make("FirstP")
    systems = {"nothing": candidates, "best window": candidates >> maxp, "both": candidates >> firstp % 5 >> maxp}
    ld.Experiment(systems, topics, qrels, ["map"], verbose=True)
    assert shown_lines(capsys) == ["1/3 nothing", "2/3 best window", "3/3 both"]
    ld.Experiment(systems, topics, qrels, ["map"])
    assert shown_lines(capsys) == ["MaxP", "MaxP"]
