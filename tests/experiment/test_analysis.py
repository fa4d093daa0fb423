"""Efficiency, sweeps, checks, breakdowns and plots."""

import sys
import time
import warnings
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pyterrier as pt
import pytest

import pyterrier_longdoc as ld
from pyterrier_longdoc.common.caches import forget_embeddings
from pyterrier_longdoc.experiment import (
    Experiment,
    ExperimentWarning,
    by_document_length,
    plot_efficiency,
    sweep_depth,
    sweep_passages,
    sweep_truncation,
    sweep_windows,
)
from pyterrier_longdoc.experiment.efficiency import Cost, efficiency_table, measured

from ..support import synthetic

METRICS = ["nDCG@5", "AP"]
TOPICS, QRELS = synthetic.collection()


def warnings_of(function, *args, **kwargs):
    """The checks' messages by kind, and the result."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        result = function(*args, **kwargs)
    texts = [str(w.message) for w in caught if issubclass(w.category, ExperimentWarning)]
    return dict(text.split(": ", 1) for text in texts), result


class Sleeper(pt.Transformer):
    """A reranker that takes `seconds` for each document and says what it read."""

    def __init__(self, seconds, tokens):
        self.seconds, self.tokens, self.calls, self.coverage = seconds, tokens, [], None

    def transform(self, inp):
        self.calls.append(inp["qid"].nunique())
        time.sleep(self.seconds * len(inp))
        n = len(inp)
        self.coverage = SimpleNamespace(documents=n, tokens=20 * n, tokens_read=self.tokens * n, windows=3 * n)
        return pt.model.add_ranks(inp)


def first_stage(seed=0):
    return pt.Transformer.from_df(pt.model.add_ranks(synthetic.run(TOPICS, 1.0, seed)))


@pytest.mark.filterwarnings("ignore::pyterrier_longdoc.experiment.ExperimentWarning")
def test_costs_are_those_of_the_reranker_after_warming_up():
    pytest.importorskip("psutil")
    fast, slow = Sleeper(0.0002, 5), Sleeper(0.0006, 20)
    first = first_stage()
    results = Experiment(
        {"FirstP": first >> fast, "MaxP": first >> slow, "run": synthetic.run(TOPICS, 0.0, 3)},
        TOPICS, QRELS, METRICS, partner={"MaxP": "FirstP"}, efficiency=True, batch_size=10,
    )  # fmt: skip
    table = results.efficiency.set_index("name")
    assert slow.calls == [2, 10, 10, 10]
    assert table.index.tolist() == ["FirstP", "MaxP"]  # runs that were there already cost nothing to measure
    assert table.loc["MaxP", "rerank ms/document"] == pytest.approx(0.6, rel=0.5)
    assert table.loc["MaxP", "rerank ms/query"] == pytest.approx(12 * table.loc["MaxP", "rerank ms/document"])
    assert table.loc["MaxP", "ms/query"] > table.loc["MaxP", "rerank ms/query"]
    assert 1.5 < table.loc["MaxP", "slow-down"] < 4.5
    assert np.isnan(table.loc["FirstP", "slow-down"])
    assert table["tokens read/document"].tolist() == [5, 20]
    assert table["share read"].tolist() == [0.25, 1.0]
    assert table["windows/document"].tolist() == [3, 3]
    assert (table["peak memory MB"] > 50).all()


def test_costs_are_kept_with_the_runs(tmp_path):
    pytest.importorskip("psutil")

    def experiment(**options):
        systems = {"a": first_stage() >> sleeper}
        return Experiment(systems, TOPICS, QRELS, METRICS, save_dir=tmp_path, **options)

    sleeper = Sleeper(0.0001, 5)
    assert experiment().efficiency is None
    measured = experiment(efficiency=True)  # the kept run was not measured
    assert sleeper.calls == [30, 2, 30]
    pd.testing.assert_frame_equal(experiment(efficiency=True).efficiency, measured.efficiency)
    loaded = type(measured).load(tmp_path).efficiency
    pd.testing.assert_frame_equal(loaded, measured.efficiency, check_dtype=False)
    assert sleeper.calls == [30, 2, 30]


def test_real_rerankers_report_what_they_read(cross_encoder, tmp_path):
    pytest.importorskip("psutil")
    texts = {f"d{i}": "the cat walk to the river " * (3 + 2 * i) for i in range(12)}
    candidates = first_stage() >> pt.apply.text(lambda row: texts[row["docno"]])
    small = {"max_query_len": 8, "batch_size": 256}
    systems = {
        "FirstP": candidates >> ld.FirstP(cross_encoder, window_size=20, **small),
        "MaxP": candidates >> ld.MaxP(cross_encoder, window_size=20, stride=10, **small),
    }
    _, results = warnings_of(
        Experiment, systems, TOPICS, QRELS, METRICS, partner={"MaxP": "FirstP"}, efficiency=True, save_dir=tmp_path
    )
    table = results.efficiency.set_index("name")
    assert table.loc["FirstP", "windows/document"] == 1
    assert table.loc["FirstP", "tokens read/document"] < 20.1
    assert table.loc["MaxP", "share read"] == 1.0
    of_document = table["rerank ms/document"]
    assert table.loc["MaxP", "slow-down"] == pytest.approx(of_document["MaxP"] / of_document["FirstP"])
    assert of_document.min() > 0
    pyplot = pytest.importorskip("matplotlib.pyplot")
    open_figures = pyplot.get_fignums()
    axes = plot_efficiency(results)
    assert pyplot.get_fignums() == open_figures  # a figure that pyplot holds shows up twice in a notebook
    [points] = axes.collections
    gain = results.comparisons.groupby("name")["gain"].mean()["MaxP"]
    assert points.get_offsets().tolist() == [[table.loc["MaxP", "slow-down"], pytest.approx(100 * gain)]]
    axes.figure.savefig(tmp_path / "picture.png")
    assert (tmp_path / "picture.png").stat().st_size > 1000


def test_plots_need_what_they_show():
    systems = {"a": synthetic.run(TOPICS, 1.0, 0), "b": synthetic.run(TOPICS, 0.5, 1)}
    results = Experiment(systems, TOPICS, QRELS, METRICS)
    with pytest.raises(ValueError, match="gains need partners"):
        plot_efficiency(results)
    with pytest.raises(ValueError, match="give Experiment efficiency=True"):
        plot_efficiency(results.retest(partner={"a": "b"}))


def test_peaks_of_gpu_memory_are_those_of_the_reranker(monkeypatch):
    pytest.importorskip("psutil")
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
    with measured(cost):
        said.append("run")
    assert said == ["synchronize", "reset 0", "reset 1", "run", "synchronize"]
    assert efficiency_table({"a": [cost]}, {}).loc[0, "peak GPU memory MB"] == 7


def test_embeddings_of_earlier_runs_are_forgotten(plain_encoder, results):
    model = ld.BiEncoder(plain_encoder, window_size=20, stride=10, max_query_len=8)
    before = model(results)
    assert len(model.load_scorer().encoder.shared.cache) > 0
    forget_embeddings()
    assert len(model.load_scorer().encoder.shared.cache) == 0
    pd.testing.assert_frame_equal(model(results), before)


# ---------------------------------------------------------------- sweeps


class Model(pt.Transformer):
    """Scores by what it is set to."""

    made: list = []  # noqa: RUF012

    def __init__(self, max_doc_len=None, window_size=150, stride=100, max_windows=None, noise=0):
        self.max_doc_len, self.window_size, self.stride = max_doc_len, window_size, stride
        self.max_windows, self.noise = max_windows, noise

    def transform(self, inp):
        value = (self.max_doc_len or 0) + self.window_size + self.stride + (self.max_windows or 0) + self.noise
        scores = np.random.default_rng(value).normal(size=len(inp)) + 1e-3 * value * inp["docno"].isin(["d0", "d1"])
        return pt.model.add_ranks(inp.assign(score=scores))


def alone(model, depth=None):
    first = first_stage() if depth is None else first_stage() % depth
    return Experiment({"x": first >> model}, TOPICS, QRELS, METRICS).means.loc["x", "AP"]


@pytest.mark.filterwarnings("ignore::pyterrier_longdoc.experiment.ExperimentWarning")
def test_truncation():
    pytest.importorskip("matplotlib")
    sweep = sweep_truncation(first_stage(), Model(), TOPICS, QRELS, METRICS, chunks=(1, 2, 6))
    assert sweep.table["chunks"].tolist() == [1, 2, 6]
    assert sweep.table["AP"].tolist() == [alone(Model(477)), alone(Model(2 * 477)), alone(Model(6 * 477))]
    assert sweep.to_markdown().splitlines()[3].startswith("| 2 chunks |")
    [line] = [line for line in sweep.plot("AP").lines if line.get_marker() == "o"]
    assert line.get_xydata().tolist() == sweep.table[["chunks", "AP"]].to_numpy().tolist()
    with pytest.raises(ValueError, match="measure 'RR' was not computed"):
        sweep.plot("RR")


@pytest.mark.filterwarnings("ignore::pyterrier_longdoc.experiment.ExperimentWarning")
def test_truncation_with_a_model_trained_for_each_setting():
    made = []

    def model(seed, max_doc_len):
        made.append((seed, max_doc_len))
        return Model(max_doc_len, noise=seed)

    sweep = sweep_truncation(first_stage(), model, TOPICS, QRELS, METRICS, chunks=(1, 2), chunk_len=10, seeds=[0, 1])
    assert made == [(0, 10), (1, 10), (0, 20), (1, 20)]
    assert sweep.table.loc[1, "AP"] == pytest.approx((alone(Model(20)) + alone(Model(20, noise=1))) / 2)
    assert sweep.table.loc[1, "AP std"] > 0


@pytest.mark.filterwarnings("ignore::pyterrier_longdoc.experiment.ExperimentWarning")
def test_windows_and_strides():
    pytest.importorskip("matplotlib")
    sweep = sweep_windows(
        first_stage(), Model(), TOPICS, QRELS, METRICS, window_sizes=(75, 150), strides=(50, 100), baselines=[1]
    )
    assert sweep.parameters.to_numpy().tolist() == [[75, 50], [150, 50], [150, 100]]
    assert sweep.table.loc[2, "AP"] == alone(Model(window_size=150, stride=100))
    labels = [text.get_text() for text in sweep.plot().get_legend().get_texts()]
    assert labels == ["stride 50", "stride 100"]


@pytest.mark.filterwarnings("ignore::pyterrier_longdoc.experiment.ExperimentWarning")
def test_passages_at_training_and_at_inference():
    made = []

    def model(seed, max_windows):
        made.append((seed, max_windows))
        return Model(max_windows=max_windows, noise=100 * seed + 1000 * max_windows)

    sweep = sweep_passages(first_stage(), model, TOPICS, QRELS, METRICS, seeds=[0, 1], train=(1, 4), test=(2, 3))
    assert made == [(0, 1), (1, 1), (0, 4), (1, 4)]  # each trained once
    assert sweep.parameters.to_numpy().tolist() == [[2, 1], [3, 1], [2, 4], [3, 4]]
    expected = [alone(Model(max_windows=3, noise=100 * seed + 4000)) for seed in (0, 1)]
    assert sweep.table.loc[3, "AP"] == pytest.approx(np.mean(expected))
    with pytest.raises(ValueError, match="sweep_passages trains models"):
        sweep_passages(first_stage(), Model(), TOPICS, QRELS, METRICS, seeds=[0])


@pytest.mark.filterwarnings("ignore::pyterrier_longdoc.experiment.ExperimentWarning")
def test_depth():
    sweep = sweep_depth(first_stage(), Model(), TOPICS, QRELS, METRICS, depths=(3, 6))
    assert sweep.table["AP"].tolist() == [alone(Model(), 3), alone(Model(), 6)]
    assert sweep.table.columns[:3].tolist() == ["depth", "name", "nDCG@5"]


def test_models_without_the_attribute():
    with pytest.raises(ValueError, match="has no attribute max_doc_len to vary"):
        sweep_truncation(first_stage(), pt.Transformer.identity(), TOPICS, QRELS, METRICS)


def test_real_rerankers_can_be_varied(cross_encoder):
    candidates = first_stage() % 2 >> pt.apply.text(lambda row: "the cat and the dog " * (1 + len(row["docno"])))
    model = ld.MaxP(cross_encoder, window_size=20, stride=10, max_query_len=8)
    _, sweep = warnings_of(
        sweep_windows, candidates, model, TOPICS.head(4), QRELS, METRICS, window_sizes=(5, 10), strides=(5,)
    )
    assert len(sweep.table) == 2
    assert (model.window_size, model.stride) == (20, 10)


# ---------------------------------------------------------------- checks


def test_sound_experiments_are_not_warned_of():
    systems = {"a": synthetic.run(TOPICS, 1.0, 0), "b": synthetic.run(TOPICS, 0.5, 1)}
    found, results = warnings_of(Experiment, systems, TOPICS, QRELS, METRICS, baselines=["a"])
    assert found == {}
    assert results.checks.empty


def test_everything_doubtful_is_named():
    good = synthetic.run(TOPICS, 1.0, 0)
    first_two = good["qid"].isin(["q0", "q1"])
    tied = good.copy()
    tied.loc[first_two & (good["docno"] == "d5"), "score"] = good["score"][first_two & (good["docno"] == "d6")].tolist()
    systems = {
        "good": good,
        "twin": good.copy(),
        "tied": tied,
        "constant": good.assign(score=good["score"].mask(first_two, 3.0)),
        "nan": good.assign(score=good["score"].mask(first_two & (good["docno"] == "d5"))),
        "missing": good[~first_two],
        "shorter": good[~(first_two & (good["docno"] == "d11"))],
        "twice": pd.concat([good, good[first_two].head(1)]),
    }
    found, results = warnings_of(Experiment, systems, TOPICS, QRELS, METRICS, baselines=["good"])
    checks = {(row.check, row.name): row.queries for row in results.checks.itertuples(index=False, name="Row")}
    assert checks[("NaN or infinite scores", "nan")] == 2
    assert checks[("constant scores", "constant")] == checks[("tied scores", "constant")] == 2
    assert checks[("tied scores", "tied")] == 2
    assert checks[("missing queries", "missing")] == checks[("different candidates", "missing")] == 2
    assert checks[("different candidates", "shorter")] == 2
    assert checks[("repeated documents", "twice")] == 1
    assert checks[("equal systems", "twin")] == 30
    assert not [key for key in checks if key[1] == "good"]
    assert found["different candidates"].startswith("missing and good rank different documents in 2 of 30 queries")
    assert found["NaN or infinite scores"] == "NaN or infinite scores in 2 of 30 queries of nan"


def test_few_queries_are_named():
    systems = {"a": synthetic.run(TOPICS, 1.0, 0), "b": synthetic.run(TOPICS, 0.5, 1)}
    few = TOPICS.head(5)
    found, _ = warnings_of(Experiment, systems, few, QRELS, METRICS, baselines=["a"], test="wilcoxon")
    assert "5 queries; comparisons need at least 25" in found["too few queries"]
    assert "no p-value of test='wilcoxon' can be below 0.0625" in found["too few queries"]
    assert warnings_of(Experiment, systems, few, QRELS, METRICS)[0] == {}


# ---------------------------------------------------------------- breakdowns


def test_breakdown_by_length_of_relevant_documents():
    systems = {"a": synthetic.run(TOPICS, 1.0, 0), "b": synthetic.run(TOPICS, 0.5, 1)}
    results = Experiment(systems, TOPICS, QRELS, METRICS, baselines=["a"])
    lengths = {f"d{i}": 100 * i for i in range(12)}
    third = QRELS.groupby("qid", sort=False)["docno"].nth(2).str[1:].astype(int)
    mean = ((0 + 1 + third) / 3 * 100).tolist()  # of d0, d1 and the third relevant one
    table = by_document_length(results, QRELS, lengths, edges=(0, 200, 300))
    groups = {"0 to < 200": (0, 200), "200 to < 300": (200, 300), ">= 300": (300, 1e9)}
    assert table["document length"].tolist() == [name for name in groups for _ in range(2)]
    for name, (low, high) in groups.items():
        qids = [qid for qid, length in zip(TOPICS["qid"], mean, strict=True) if low <= length < high]
        rows = table[table["document length"] == name]
        assert rows["queries"].tolist() == [len(qids)] * 2
        assert rows["AP"].tolist() == results.subset(qids).table["AP"].tolist()
        assert rows["AP p-value"].iloc[1] == results.subset(qids).table["AP p-value"].iloc[1]
