"""What all plots have in common."""

import numpy as np
import pytest

from pyterrier_longdoc.common.plots import COLOURS, MARKERS, line_style, offsets
from pyterrier_longdoc.comparison import Comparison, PositionEffectiveness


def test_systems_differ_in_colour_and_marker():
    looks = [line_style(system) for system in range(len(COLOURS) * len(MARKERS))]
    assert len({tuple(look.values()) for look in looks}) == len(looks)
    for name in ("color", "marker"):
        assert len({look[name] for look in looks[: len(COLOURS)]}) == len(COLOURS)
    colors = pytest.importorskip("matplotlib.colors")
    light = [np.array(colors.to_rgb(color)) @ (0.299, 0.587, 0.114) for color in COLOURS]
    assert min(light) > 0.3  # seen on black
    assert max(light) < 0.75  # and on white


def test_systems_are_drawn_side_by_side():
    assert offsets([0.0, 0.5, 1.0], 1).tolist() == [0]
    two = offsets([0.0, 0.5, 1.0], 2)
    assert two[0] == -two[1] < 0
    assert two[1] - two[0] < 0.25
    many = offsets([3, 3], 30)
    assert np.ptp(many) < 1
    assert len(np.unique(many)) == 30


def test_a_long_legend_leaves_room_for_the_axes():
    pytest.importorskip("matplotlib")
    heights = []
    for systems in (1, 8):
        values = {f"system {n}": np.full((1, 3, 1), 0.5) for n in range(systems)}
        results = Comparison(values, ["1", "2", "3"], ["AP"])
        axes = PositionEffectiveness({"early": results, "late": results}).plot()
        axes.figure.draw_without_rendering()
        heights.append(axes.bbox.height)
    assert heights[1] > 0.9 * heights[0]
