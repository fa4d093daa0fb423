"""Analyses of long-document retrieval: relevance judgements, positions of relevant text, evidence, calibration."""

from .audit import Audit, audit
from .calibration import calibrated_on_nonrelevant, calibrated_on_positions, nonrelevant
from .effectiveness import PositionEffectiveness, effectiveness_by_position
from .estimators import Estimator, best_chunk, first_above
from .evidence import EvidenceRecall, evidence_recall
from .judging import RelevanceJudge, agreement
from .locating import PassageLocator
from .positions import RelevantPositions, relevant_positions
from .query_groups import by_document_length, by_query_value, plot_document_length
from .sensitivity import PositionSensitivity, position_sensitivity

__all__ = [
    "Audit", "Estimator", "EvidenceRecall", "PassageLocator", "PositionEffectiveness", "PositionSensitivity",
    "RelevanceJudge", "RelevantPositions", "agreement", "audit", "best_chunk", "by_document_length",
    "by_query_value", "calibrated_on_nonrelevant", "calibrated_on_positions", "effectiveness_by_position",
    "evidence_recall", "first_above", "nonrelevant", "plot_document_length", "position_sensitivity",
    "relevant_positions",
]  # fmt: skip
