"""Sweeps: one setting varied at a time."""

from itertools import product

import numpy as np
import pyterrier as pt
import pytest

import pyterrier_longdoc as ld
from pyterrier_longdoc.experiment import Experiment, sweep_depth, sweep_passages, sweep_truncation, sweep_windows

from ..support import synthetic

METRICS = ["nDCG@5", "AP"]
TOPICS, QRELS = synthetic.collection()
FIRST = pt.Transformer.from_df(pt.model.add_ranks(synthetic.run(TOPICS, 1.0, 0)))

pytestmark = pytest.mark.filterwarnings("ignore::pyterrier_longdoc.experiment.ExperimentWarning")


class Model(pt.Transformer):
    """Scores by what it is set to."""

    def __init__(self, max_doc_len=None, window_size=150, stride=100, max_windows=None, noise=0):
        self.max_doc_len, self.window_size, self.stride = max_doc_len, window_size, stride
        self.max_windows, self.noise = max_windows, noise

    def transform(self, inp):
        value = (self.max_doc_len or 0) + self.window_size + self.stride + (self.max_windows or 0) + self.noise
        scores = np.random.default_rng(value).normal(size=len(inp)) + 1e-3 * value * inp["docno"].isin(["d0", "d1"])
        return pt.model.add_ranks(inp.assign(score=scores))


def alone(model, first=FIRST):
    return Experiment([first >> model], TOPICS, QRELS, ["AP"], names=["x"]).means.loc["x", "AP"]


def test_truncation():
    pytest.importorskip("matplotlib")
    sweep = sweep_truncation(FIRST, Model(), TOPICS, QRELS, METRICS, chunks=(1, 2, 6))
    assert sweep.table["chunks"].tolist() == [1, 2, 6]
    assert sweep.table["AP"].tolist() == [alone(Model(477)), alone(Model(2 * 477)), alone(Model(6 * 477))]
    assert sweep.results.names == ["1 chunk", "2 chunks", "6 chunks"]
    assert sweep.results.statistics.partner == {"2 chunks": "1 chunk", "6 chunks": "1 chunk"}
    [line] = [line for line in sweep.plot("AP").lines if line.get_marker() == "o"]
    assert line.get_xydata().tolist() == sweep.table[["chunks", "AP"]].to_numpy().tolist()
    with pytest.raises(ValueError, match="measure"):
        sweep.plot("RR")


def test_truncation_with_a_model_trained_for_each_setting():
    made = []

    def model(seed, max_doc_len):
        made.append((seed, max_doc_len))
        return Model(max_doc_len, noise=seed)

    sweep = sweep_truncation(FIRST, model, TOPICS, QRELS, METRICS, chunks=(1, 2), chunk_len=10, seeds=[0, 1])
    assert made == [(0, 10), (1, 10), (0, 20), (1, 20)]
    assert sweep.table.loc[1, "AP"] == pytest.approx((alone(Model(20)) + alone(Model(20, noise=1))) / 2)
    assert sweep.table.loc[1, "AP std"] > 0


def test_windows_and_strides():
    pytest.importorskip("matplotlib")
    sweep = sweep_windows(
        FIRST, Model(), TOPICS, QRELS, METRICS, window_sizes=(75, 150), strides=(50, 100), baseline=[1]
    )
    assert sweep.parameters.to_numpy().tolist() == [[75, 50], [150, 50], [150, 100]]
    assert sweep.table.loc[2, "AP"] == alone(Model(window_size=150, stride=100))
    ax = sweep.plot()
    assert [text.get_text() for text in ax.get_legend().get_texts()] == ["stride (tokens): 50", "stride (tokens): 100"]
    assert list(ax.get_xticks()) == [75, 150]
    (_, of_50), (of_100,) = (container[0].get_xdata() for container in ax.containers)
    assert of_50 < 150 < of_100  # what has equal values is seen, too


@pytest.mark.parametrize("folds", [None, [TOPICS["qid"].iloc[i::2].tolist() for i in range(2)]])
def test_passages_at_training_and_at_inference(folds):
    made = []

    def model(seed, max_windows, fold=None):
        made.append((max_windows, seed, fold and fold.index))
        return Model(max_windows=max_windows, noise=100 * seed + 1000 * max_windows)

    sweep = sweep_passages(FIRST, model, TOPICS, QRELS, METRICS, seeds=[0, 1], train=(1, 4), test=(2, 3), folds=folds)
    assert made == list(product((1, 4), (0, 1), (0, 1) if folds else (None,)))  # each is trained once
    assert sweep.parameters.to_numpy().tolist() == [[2, 1], [3, 1], [2, 4], [3, 4]]
    if not folds:
        expected = [alone(Model(max_windows=3, noise=100 * seed + 4000)) for seed in (0, 1)]
        assert sweep.table.loc[3, "AP"] == pytest.approx(np.mean(expected))


def test_passages_want_a_function():
    with pytest.raises(ValueError, match="model="):
        sweep_passages(FIRST, Model(), TOPICS, QRELS, METRICS, seeds=[0])


def test_depth():
    sweep = sweep_depth(FIRST, Model(), TOPICS, QRELS, METRICS, depths=(3, 6))
    assert sweep.table["AP"].tolist() == [alone(Model(), FIRST % 3), alone(Model(), FIRST % 6)]
    assert sweep.table.columns[:3].tolist() == ["depth", "name", "nDCG@5"]


def test_real_rerankers_can_be_varied(cross_encoder):
    candidates = FIRST % 2 >> pt.apply.text(lambda row: "the cat and the dog " * (1 + len(row["docno"])))
    model = ld.MaxP(cross_encoder, window_size=20, stride=10, max_query_len=8)
    sweep = sweep_windows(candidates, model, TOPICS.head(4), QRELS, METRICS, window_sizes=(5, 10), strides=(5,))
    assert len(sweep.table) == 2
    assert (model.window_size, model.stride) == (20, 10)
