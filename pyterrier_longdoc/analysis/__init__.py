"""Analyses of long-document retrieval: relevance judgements, positions of relevant text, evidence."""

from .audit import Audit, audit
from .by_query import length_by_query, position_by_query
from .evidence import evidence_recall
from .judging import RelevanceJudge, agreement
from .locating import PassageLocator
from .positions import RelevantPositions, relevant_positions
from .sensitivity import position_sensitivity

__all__ = [
    "Audit", "PassageLocator", "RelevanceJudge", "RelevantPositions", "agreement", "audit", "evidence_recall",
    "length_by_query", "position_by_query", "position_sensitivity", "relevant_positions",
]  # fmt: skip
