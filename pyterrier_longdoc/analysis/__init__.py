"""Analyses of long-document retrieval: relevance judgements, positions of relevant text, evidence, calibration."""

from .audit import Audit, audit
from .by_query import length_by_query, position_by_query
from .calibration import calibrated_on_nonrelevant, calibrated_on_positions, nonrelevant
from .estimators import Estimator, best_chunk, first_above
from .evidence import evidence_recall
from .judging import RelevanceJudge, agreement
from .locating import PassageLocator
from .positions import RelevantPositions, relevant_positions
from .sensitivity import position_sensitivity

__all__ = [
    "Audit", "Estimator", "PassageLocator", "RelevanceJudge", "RelevantPositions", "agreement", "audit", "best_chunk",
    "calibrated_on_nonrelevant", "calibrated_on_positions", "evidence_recall", "first_above", "length_by_query",
    "nonrelevant", "position_by_query", "position_sensitivity", "relevant_positions",
]  # fmt: skip
