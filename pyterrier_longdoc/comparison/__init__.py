"""Compare systems by per-query values: seeds, several baselines, gains over partners, the papers' tables."""

from .groups import PositionEffectiveness
from .results import Comparison, ComparisonWarning, compare
from .significance import Statistics
from .tables import PaperTable, paper_table

__all__ = [
    "Comparison", "ComparisonWarning", "PaperTable", "PositionEffectiveness", "Statistics", "compare", "paper_table",
]  # fmt: skip
