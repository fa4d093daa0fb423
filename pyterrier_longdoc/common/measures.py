"""Find measures by names of ir_measures (nDCG@10) and, as in `pt.Experiment`, of trec_eval (ndcg_cut_10)."""

from __future__ import annotations

from typing import Any

import ir_measures


def measure_named(name: Any) -> Any:
    """Return the measure with this name; ValueError if the name is unknown or, such as `"P"`, stands for several."""
    for parse in (ir_measures.parse_trec_measure, lambda name: [ir_measures.parse_measure(name)]):
        try:
            measures = parse(name)
        except (ValueError, NameError, TypeError, AttributeError):
            continue
        if len(measures) > 1:
            raise ValueError(f"{name!r} stands for {len(measures)} measures: name one, such as {str(measures[0])!r}")
        return measures[0]
    raise ValueError(f"unknown measure {name!r}: use ir_measures' names (nDCG@10) or trec_eval's (ndcg_cut_10)")
