"""What runs cost, and the picture of it."""

import sys
import time
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pyterrier as pt
import pytest

import pyterrier_longdoc as ld
from pyterrier_longdoc.common.caches import EmbeddingCache
from pyterrier_longdoc.experiment import Experiment, ExperimentResults, plot_efficiency
from pyterrier_longdoc.experiment.cost import Cost, measuring
from pyterrier_longdoc.experiment.efficiency import efficiency_table

from ..support import synthetic

TOPICS, QRELS = synthetic.collection()
FIRST = pt.Transformer.from_df(pt.model.add_ranks(synthetic.run(TOPICS, 1.0, 0)))

pytestmark = pytest.mark.filterwarnings("ignore::pyterrier_longdoc.experiment.ExperimentWarning")
pytest.importorskip("psutil")


@pytest.fixture
def clock(monkeypatch):
    """Seconds that pass only where a test says so."""
    seconds = [0.0]
    monkeypatch.setattr(time, "perf_counter", lambda: seconds[0])
    return seconds


class Stage(pt.Transformer):
    """A reranker that takes `seconds` for each document and says what it read."""

    def __init__(self, clock, seconds, tokens=5):
        self.clock, self.seconds, self.tokens, self.calls = clock, seconds, tokens, []

    def describe(self):
        return {"seconds": self.seconds, "tokens": self.tokens}

    def transform(self, inp):
        self.calls.append(inp["qid"].nunique())
        self.clock[0] += self.seconds * len(inp)
        n = len(inp)
        self.coverage = SimpleNamespace(pairs=n, tokens=20 * n, tokens_read=self.tokens * n, windows=3 * n)
        return pt.model.add_ranks(inp)


def test_costs_are_measured_for_the_reranker_after_a_warm_up(clock):
    first, fast, slow = FIRST >> Stage(clock, 0.001), Stage(clock, 0.002, 5), Stage(clock, 0.006, 20)
    systems = {"FirstP": first >> fast, "MaxP": first >> slow, "run": synthetic.run(TOPICS, 0.0, 3)}
    (cache := EmbeddingCache()).put("of an earlier run", np.ones(3))
    results = Experiment(systems, TOPICS, QRELS, ["AP"], partner={"MaxP": "FirstP"}, efficiency=True, batch_size=10)
    assert len(cache) == 0
    assert slow.calls == [2, 10, 10, 10]
    table = results.efficiency.set_index("name")
    assert table.index.tolist() == ["FirstP", "MaxP"]  # runs that were there already cost nothing to measure
    of_both = table.drop(columns=["peak memory MB", "peak GPU memory MB"]).T
    assert of_both["FirstP"].tolist() == pytest.approx([36, 24, 2, 5, 0.25, 3, np.nan], nan_ok=True)
    assert of_both["MaxP"].tolist() == pytest.approx([84, 72, 6, 20, 1, 3, 3])
    assert (table["peak memory MB"] > 50).all()
    assert table["peak GPU memory MB"].isna().all()


def test_costs_are_saved_with_the_runs(clock, tmp_path):
    stage = Stage(clock, 0.001)

    def experiment(**options):
        return Experiment({"a": FIRST >> stage}, TOPICS, QRELS, ["AP"], save_dir=tmp_path, save_mode="reuse", **options)

    assert experiment().efficiency is None
    new = experiment(efficiency=True).efficiency  # the finished run was not measured
    assert stage.calls == [30, 2, 30]
    pd.testing.assert_frame_equal(experiment(efficiency=True).efficiency, new)
    pd.testing.assert_frame_equal(ExperimentResults.load(tmp_path).efficiency, new, check_dtype=False)
    assert stage.calls == [30, 2, 30]


def test_real_rerankers_report_what_they_read(cross_encoder):
    texts = {f"d{i}": "the cat walk to the river " * (3 + 2 * i) for i in range(12)}
    candidates = FIRST >> pt.apply.text(lambda row: texts[row["docno"]])
    small = {"max_query_len": 8, "batch_size": 256, "window_size": 20}
    systems = {
        "FirstP": candidates >> ld.FirstP(cross_encoder, **small),
        "MaxP": candidates >> ld.MaxP(cross_encoder, stride=10, **small),
    }
    table = Experiment(systems, TOPICS, QRELS, ["AP"], efficiency=True).efficiency.set_index("name")
    assert table.loc["FirstP", "windows/document"] == 1
    assert table.loc["FirstP", "tokens read/document"] < 20.1
    assert table.loc["MaxP", "share read"] == 1.0


def test_peak_gpu_memory_is_measured_for_the_reranker(monkeypatch):
    said = []
    cuda = SimpleNamespace(
        is_available=lambda: True,
        is_initialized=lambda: True,
        synchronize=lambda: said.append("synchronize"),
        device_count=lambda: 2,
        reset_peak_memory_stats=lambda gpu: said.append(f"reset {gpu}"),
        max_memory_allocated=lambda gpu: (3 + gpu) * 2**20,
    )
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(cuda=cuda))
    cost = Cost(queries=1)
    with measuring(cost):
        said.append("run")
    assert said == ["synchronize", "reset 0", "reset 1", "run", "synchronize"]
    assert efficiency_table({"a": [cost]}, {}).loc[0, "peak GPU memory MB"] == 7


RUNS = {name: synthetic.run(TOPICS, 1 - i / 10, i) for i, name in enumerate(("base", "a", "b", "other"))}


def plotted(costs, names=("base", "a", "b"), ax=None, partner=None):
    """The axes of a plot, the results of the experiment, and the points."""
    axes = ax or pytest.importorskip("matplotlib.figure").Figure().subplots()
    results = Experiment({name: RUNS[name] for name in names}, TOPICS, QRELS, ["nDCG@5", "AP"], partner=partner)
    costs = pd.DataFrame({"name": [*next(iter(costs.values()))], **{k: v.values() for k, v in costs.items()}})
    assert plot_efficiency(replace(results, efficiency=costs), ax=axes) is axes
    return axes, results, axes.collections[0].get_offsets().tolist()


def test_gains_are_plotted_against_slow_downs():
    costs = {"slow-down": {"base": np.nan, "a": 2.5}}
    axes, results, points = plotted(costs, partner={"a": "base", "b": "base"})
    gain = results.comparisons.query("name == 'a'")["gain"].mean()
    assert points == [[1.0, 0.0], [2.5, pytest.approx(100 * gain)]]
    assert axes.get_xlabel() == (
        "time per document relative to the partner\nnot drawn, because time or gain is unknown: b"
    )
    assert {text.get_text() for text in axes.texts} == {"base", "a"}


@pytest.mark.parametrize("partner", [None, {"a": "base"}], ids=["no partners", "a system without partner"])
def test_without_a_partner_for_each_system_means_are_plotted_against_time(partner):
    costs = {"ms/query": {"base": 1, "a": 2, "b": 3}}
    axes, results, points = plotted(costs, [*RUNS], partner=partner)
    assert points == [[i + 1, results.means.loc[name].iloc[0]] for i, name in enumerate(("base", "a", "b"))]
    assert axes.get_xlabel().startswith("milliseconds per query\n")
    assert axes.get_xlabel().endswith(": other")
    assert (axes.get_ylabel(), len(axes.texts)) == ("mean nDCG@5", 3)


def test_a_plot_is_a_pyplot_figure_by_default():
    pyplot = pytest.importorskip("matplotlib.pyplot")
    results = Experiment({"a": RUNS["a"]}, TOPICS, QRELS, ["AP"])
    with pytest.raises(ValueError, match="efficiency=True"):
        plot_efficiency(results)
    axes = plot_efficiency(replace(results, efficiency=pd.DataFrame({"name": ["a"], "ms/query": [1.0]})))
    assert [pyplot.figure(number) for number in pyplot.get_fignums()] == [axes.figure]  # what a notebook shows
