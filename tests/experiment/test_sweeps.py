"""Sweeps: one setting varied at a time."""

from dataclasses import replace
from itertools import product

import numpy as np
import pyterrier as pt
import pytest

import pyterrier_longdoc as ld
from pyterrier_longdoc.experiment import Experiment, sweep

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


def lengths(*values):
    return [{"max_doc_len": value} for value in values]


def test_truncation():
    pytest.importorskip("matplotlib")
    found = sweep(FIRST, Model(), lengths(5, 10, 30), TOPICS, QRELS, METRICS)
    assert found.table["max_doc_len"].tolist() == [5, 10, 30]
    assert found.table["AP"].tolist() == pytest.approx([alone(Model(5)), alone(Model(10)), alone(Model(30))])
    assert found.results.names == ["max_doc_len 5", "max_doc_len 10", "max_doc_len 30"]
    assert found.results.statistics.partner == dict.fromkeys(found.results.names[1:], "max_doc_len 5")
    [line] = [line for line in found.plot("AP").lines if line.get_marker() == "o"]
    assert line.get_xydata().tolist() == list(map(list, enumerate(found.table["AP"])))
    with pytest.raises(ValueError, match="measure"):
        found.plot("RR")


def test_a_model_trained_for_each_setting():
    made = []

    def model(seed, max_doc_len):
        made.append((seed, max_doc_len))
        return Model(max_doc_len, noise=seed)

    found = sweep(FIRST, model, lengths(10, 20), TOPICS, QRELS, METRICS, seeds=[0, 1])
    assert made == [(0, 10), (1, 10), (0, 20), (1, 20)]
    assert found.table.loc[1, "AP"] == pytest.approx((alone(Model(20)) + alone(Model(20, noise=1))) / 2)
    assert found.table.loc[1, "AP std"] > 0


def test_two_arguments():
    pytest.importorskip("matplotlib")
    pairs = [{"window_size": size, "stride": stride} for size, stride in ((75, 50), (150, 50), (150, 100))]
    given = [pairs[0], dict(reversed(pairs[1].items())), pairs[2]]
    found = sweep(FIRST, Model(), given, TOPICS, QRELS, METRICS, baseline=[1])
    assert found.parameters.to_dict("records") == pairs
    assert found.table.loc[2, "AP"] == pytest.approx(alone(Model(window_size=150, stride=100)))
    ax = found.plot()
    assert [text.get_text() for text in ax.get_legend().get_texts()] == ["stride: 50", "stride: 100"]
    assert [label.get_text() for label in ax.get_xticklabels()] == ["75", "150"]
    (_, of_50), (of_100,) = (container[0].get_xdata() for container in ax.containers)
    assert of_50 < 1 < of_100  # what has equal values is seen, too
    mixed = replace(found, parameters=found.parameters.assign(stride=np.array([50, 50, None], dtype=object)))
    assert [text.get_text() for text in mixed.plot().get_legend().get_texts()] == ["stride: 50", "stride: None"]


def test_none_is_a_setting_like_others():
    pytest.importorskip("matplotlib")
    found = sweep(FIRST, Model(), lengths(None, 10), TOPICS, QRELS, METRICS)
    assert found.table["max_doc_len"].tolist() == [None, 10]
    ax = found.plot("AP")
    assert [label.get_text() for label in ax.get_xticklabels()] == ["None", "10"]
    assert ax.containers[0][0].get_ydata().tolist() == found.table["AP"].tolist()


@pytest.mark.parametrize(
    "settings",
    [
        [],
        [{}],
        lengths(10, 10, 20),
        [*lengths(10), {"stride": 5}],
        [{"max_doc_len": 5, "stride": 5, "window_size": 5}],
        [{"max_doc_len": 5, "stride": 5}, {"stride": 5, "max_doc_len": 5}],
    ],
)
def test_settings_that_make_no_table_are_refused(settings):
    with pytest.raises(ValueError, match="the same one or two arguments"):
        sweep(FIRST, Model(), settings, TOPICS, QRELS, METRICS)


@pytest.mark.parametrize("folds", [None, [TOPICS["qid"].iloc[i::2].tolist() for i in range(2)]])
def test_windows_at_training_and_at_inference(folds):
    made = []

    def model(seed, max_windows, fold=None):
        made.append((max_windows, seed, fold and fold.index))
        return Model(max_windows=max_windows, noise=100 * seed + 1000 * max_windows)

    training, inference = ([{"max_windows": number} for number in numbers] for numbers in ((1, 4), (2, 3)))
    arguments = {"inference": inference, "seeds": [0, 1], "folds": folds}
    found = sweep(FIRST, model, training, TOPICS, QRELS, METRICS, **arguments)
    assert made == list(product((1, 4), (0, 1), (0, 1) if folds else (None,)))  # each is trained once
    assert found.parameters.columns.tolist() == ["max_windows", "max_windows at inference"]
    assert found.parameters.to_numpy().tolist() == [[1, 2], [1, 3], [4, 2], [4, 3]]
    if not folds:
        expected = [alone(Model(max_windows=3, noise=100 * seed + 4000)) for seed in (0, 1)]
        assert found.table.loc[3, "AP"] == pytest.approx(np.mean(expected))


def test_settings_at_inference_want_a_function():
    with pytest.raises(ValueError, match="with inference= model must be a function"):
        sweep(FIRST, Model(), lengths(1), TOPICS, QRELS, METRICS, inference=[{"max_windows": 1}])


def test_depth():
    found = sweep(FIRST, Model(), [{"depth": 3}, {"depth": 6}], TOPICS, QRELS, METRICS)
    assert found.table["AP"].tolist() == pytest.approx([alone(Model(), FIRST % 3), alone(Model(), FIRST % 6)])
    assert found.table.columns[:3].tolist() == ["depth", "name", "nDCG@5"]


def test_real_rerankers_can_be_varied(cross_encoder):
    candidates = FIRST % 2 >> pt.apply.text(lambda row: "the cat and the dog " * (1 + len(row["docno"])))
    model = ld.MaxP(cross_encoder, window_size=20, stride=10, max_query_len=8)
    sizes = [{"window_size": size, "stride": 5} for size in (5, 10)]
    assert len(sweep(candidates, model, sizes, TOPICS.head(4), QRELS, METRICS).table) == 2
    assert (model.window_size, model.stride) == (20, 10)
