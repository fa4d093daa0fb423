"""The picture of gains and costs, and what all pictures have in common."""

import os
import subprocess
import sys
from dataclasses import replace
from itertools import combinations

import numpy as np
import pandas as pd
import pytest

from pyterrier_longdoc.analysis import PositionEffectiveness
from pyterrier_longdoc.experiment import (
    Experiment,
    ExperimentResults,
    by_document_length,
    plot_document_length,
    plot_efficiency,
)
from pyterrier_longdoc.experiment.plots import COLOURS, MARKERS, beside, label_group, look_of
from pyterrier_longdoc.experiment.results import relevant_lengths

from ..support import synthetic

TOPICS, QRELS = synthetic.collection()

pytestmark = pytest.mark.filterwarnings("ignore::pyterrier_longdoc.experiment.ExperimentWarning")


def with_costs(slow_downs: dict[str, float], **systems: pd.DataFrame) -> ExperimentResults:
    """An experiment with the partner "base", of which slow-downs are known."""
    partner = dict.fromkeys(systems, "base")
    results = Experiment({"base": synthetic.run(TOPICS, 0.5, 1), **systems}, TOPICS, QRELS, ["AP"], partner=partner)
    return replace(results, efficiency=pd.DataFrame({"name": slow_downs.keys(), "slow-down": slow_downs.values()}))


def test_gains_over_slow_downs(tmp_path):
    pyplot = pytest.importorskip("matplotlib.pyplot")
    systems = {"a": synthetic.run(TOPICS, 1.0, 0), "b": synthetic.run(TOPICS, 0.5, 1)}
    results = Experiment(systems, TOPICS, QRELS, ["nDCG@5", "AP"])
    with pytest.raises(ValueError, match="gains need partners"):
        plot_efficiency(results)
    results = results.retest(partner={"a": "b"})
    with pytest.raises(ValueError, match="give Experiment efficiency=True"):
        plot_efficiency(results)
    costs = pd.DataFrame({"name": ["a", "b"], "slow-down": [2.5, float("nan")]})
    axes = plot_efficiency(replace(results, efficiency=costs))
    assert [pyplot.figure(number) for number in pyplot.get_fignums()] == [axes.figure]  # what a notebook shows
    assert axes.get_xlabel() == "time per document relative to the partner"
    [points] = axes.collections
    gain = results.comparisons["gain"].mean()
    assert points.get_offsets().tolist() == [[2.5, pytest.approx(100 * gain)]]
    axes.figure.savefig(tmp_path / "picture.png")
    assert (tmp_path / "picture.png").stat().st_size > 1000


def test_given_axes_are_drawn_on_and_no_figure_is_opened(tmp_path):
    pyplot, figures = pytest.importorskip("matplotlib.pyplot"), pytest.importorskip("matplotlib.figure")
    axes = figures.Figure().subplots()
    assert plot_efficiency(with_costs({"a": 2.0}, a=synthetic.run(TOPICS, 1.0, 0)), ax=axes) is axes
    assert pyplot.get_fignums() == []
    axes.figure.savefig(tmp_path / "picture.png")


def test_names_of_systems_at_the_same_place_do_not_hide_each_other():
    Text = pytest.importorskip("matplotlib.text").Text
    names = ("one", "two", "three", "four")
    equal = with_costs(dict.fromkeys(names, 2.0), **dict.fromkeys(names, synthetic.run(TOPICS, 1.0, 0)))
    axes = plot_efficiency(equal)
    axes.figure.draw_without_rendering()
    assert sorted(text.get_text() for text in axes.texts) == sorted(names)
    boxes = [Text.get_window_extent(text) for text in axes.texts]  # without the line to the point
    assert not any(one.overlaps(other) for one, other in combinations(boxes, 2))


def test_a_system_without_time_is_named():
    pytest.importorskip("matplotlib")
    runs = {"a": synthetic.run(TOPICS, 1.0, 0), "given": synthetic.run(TOPICS, 0.8, 2)}
    axes = plot_efficiency(with_costs({"a": 2.0}, **runs))
    assert axes.get_xlabel().endswith("\nnot drawn, as time or gain are not known: given")
    assert [text.get_text() for text in axes.texts] == ["a"]
    alone = plot_efficiency(with_costs({"given": np.nan}, given=runs["given"]))
    assert alone.get_xlabel().endswith(": given")
    alone.figure.draw_without_rendering()


def test_a_system_without_partner_is_named():
    pytest.importorskip("matplotlib")
    runs = {"a": synthetic.run(TOPICS, 1.0, 0), "alone": synthetic.run(TOPICS, 0.8, 2)}
    results = with_costs({"base": 1.0, "a": 2.0, "alone": 3.0}, **runs)
    axes = plot_efficiency(results.retest(partner={"a": "base"}))
    assert axes.get_xlabel().endswith(": alone")
    assert [text.get_text() for text in axes.texts] == ["a"]


def test_systems_differ_in_colour_and_in_marker_also_without_colours():
    looks = [look_of(system) for system in range(len(COLOURS) * len(MARKERS))]
    assert len({tuple(look.values()) for look in looks}) == len(looks)
    for name in ("color", "marker"):
        assert len({look[name] for look in looks[: len(COLOURS)]}) == len(COLOURS)
    colors = pytest.importorskip("matplotlib.colors")
    light = [np.array(colors.to_rgb(color)) @ (0.299, 0.587, 0.114) for color in COLOURS]
    assert min(light) > 0.3  # seen on black
    assert max(light) < 0.75  # and on white


def test_systems_stand_beside_one_another():
    assert beside([0.0, 0.5, 1.0], 1).tolist() == [0]
    two = beside([0.0, 0.5, 1.0], 2)
    assert two[0] == -two[1] < 0
    assert two[1] - two[0] < 0.25
    many = beside([3, 3], 30)
    assert np.ptp(many) < 1
    assert len(np.unique(many)) == 30


def test_a_long_legend_leaves_room_for_the_axes():
    pytest.importorskip("matplotlib")
    heights = []
    for systems in (1, 8):
        values = {f"system {n}": np.full((1, 3, 1), 0.5) for n in range(systems)}
        results = ExperimentResults(values, {name: [None] for name in values}, ["1", "2", "3"], ["AP"])
        axes = PositionEffectiveness({"early": results, "late": results}).plot()
        axes.figure.draw_without_rendering()
        heights.append(axes.bbox.height)
    assert heights[1] > 0.9 * heights[0]


def test_without_a_display(tmp_path):
    pytest.importorskip("matplotlib")
    code = f"""
import numpy as np
from pyterrier_longdoc.analysis import PositionEffectiveness
from pyterrier_longdoc.analysis import PositionEffectiveness
from pyterrier_longdoc.experiment import ExperimentResults

results = ExperimentResults({{"a": np.full((1, 3, 1), 0.5)}}, {{"a": [None]}}, ["1", "2", "3"], ["AP"])
axes = PositionEffectiveness({{"early": results, "late": results}}).plot()
axes.figure.savefig({str(tmp_path / "picture.png")!r})
"""
    without = {name: value for name, value in os.environ.items() if name not in ("DISPLAY", "MPLBACKEND")}
    subprocess.run([sys.executable, "-c", code], env=without, check=True)
    assert (tmp_path / "picture.png").stat().st_size > 1000


def test_means_by_the_length_of_relevant_documents():
    pytest.importorskip("matplotlib")
    runs = {"a": synthetic.run(TOPICS, 1.0, 0), "b": synthetic.run(TOPICS, 0.5, 1)}
    results = Experiment(runs, TOPICS, QRELS, ["AP"])
    lengths = {docno: 100 * place for place, docno in enumerate(sorted(set(QRELS["docno"])))}
    edges = [0, float(np.median(list(relevant_lengths(QRELS, lengths).values())))]
    table = by_document_length(results, QRELS, lengths, edges=edges)
    axes = plot_document_length(results, QRELS, lengths, edges=edges)
    drawn = {line.get_label(): line.lines[0].get_ydata().tolist() for line in axes.containers}
    assert drawn == {name: table.loc[table["name"] == name, "AP"].tolist() for name in ("a", "b")}
    groups = table.drop_duplicates("document length")
    assert len(groups) == 2
    labels = [label.get_text() for label in axes.get_xticklabels()]
    assert labels == (groups["document length"] + "\n" + groups["queries"].astype(str) + " queries").tolist()
    assert axes.get_xlabel() == "mean length of the relevant documents (tokens)"
    assert label_group(">= 9", 1) == ">= 9\n1 query"
    axes = plot_document_length(results, QRELS, lengths, edges=edges, unit="words")
    assert axes.get_xlabel().endswith("(words)")
    with pytest.raises(ValueError, match="measure"):
        plot_document_length(results, QRELS, lengths, measure="RR")
