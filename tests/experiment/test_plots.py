"""The picture of gains and costs."""

from dataclasses import replace

import pandas as pd
import pytest

from pyterrier_longdoc.experiment import Experiment, plot_efficiency

from ..support import synthetic

TOPICS, QRELS = synthetic.collection()


@pytest.mark.filterwarnings("ignore::pyterrier_longdoc.experiment.ExperimentWarning")
def test_gains_over_slow_downs(tmp_path):
    pyplot = pytest.importorskip("matplotlib.pyplot")
    systems = {"a": synthetic.run(TOPICS, 1.0, 0), "b": synthetic.run(TOPICS, 0.5, 1)}
    results = Experiment(systems, TOPICS, QRELS, ["nDCG@5", "AP"])
    with pytest.raises(ValueError, match="gains need partners"):
        plot_efficiency(results)
    results = results.retest(partner={"a": "b"})
    with pytest.raises(ValueError, match="give Experiment efficiency=True"):
        plot_efficiency(results)
    open_figures = pyplot.get_fignums()
    costs = pd.DataFrame({"name": ["a", "b"], "slow-down": [2.5, float("nan")]})
    axes = plot_efficiency(replace(results, efficiency=costs))
    assert pyplot.get_fignums() == open_figures  # a figure that pyplot holds shows up twice in a notebook
    [points] = axes.collections
    gain = results.comparisons["gain"].mean()
    assert points.get_offsets().tolist() == [[2.5, pytest.approx(100 * gain)]]
    axes.figure.savefig(tmp_path / "picture.png")
    assert (tmp_path / "picture.png").stat().st_size > 1000
