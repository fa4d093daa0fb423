"""Estimators of positions: which chunk they choose, and how far a threshold decides."""

from __future__ import annotations

import numpy as np
import pytest

from pyterrier_longdoc.analysis import best_chunk, first_above
from pyterrier_longdoc.analysis.estimators import JudgedDocument

NAN = float("nan")


@pytest.mark.parametrize(
    ("numbers", "best", "above"),
    [
        ([0, 2, 1, 3, 3], 3, 1),
        ([-5.0, -2.0, -9.0], 1, None),
        ([NAN, 1, NAN, 2], 3, 1),
        ([0, 0, 0], None, None),
        ([2, 2, 2], None, 0),
        ([NAN, 2, 2], None, 1),
        ([0], 0, None),
        ([NAN, 0], 1, None),
        ([NAN, NAN], None, None),
        ([], None, None),
    ],
)
def test_best_chunk_and_first_above_choose_a_chunk(numbers, best, above):
    numbers = np.array(numbers, dtype=float)
    assert best_chunk(numbers) == best
    assert first_above(0)(numbers) == above


@pytest.mark.parametrize(("threshold", "number", "decides"), [(2, 2, False), (2, 2.1, True), (0, NAN, False)])
def test_one_number_above_the_threshold_decides(threshold, number, decides):
    assert first_above(threshold).decides(number) == decides
    assert not best_chunk.decides(number)


def document(*numbers: float) -> JudgedDocument:
    """A document with ten tokens and characters in a chunk."""
    spans = [(10 * i, 10 * i + 10) for i in range(len(numbers))]
    values = np.array(numbers, dtype=float)
    return JudgedDocument(10 * len(numbers), [(span, span) for span in spans], len(numbers), values)
