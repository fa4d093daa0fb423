"""What retrieval over long documents shows: relevance judgements, and where in a document relevance lies."""

from .effectiveness import PositionEffectiveness, effectiveness_by_position
from .judging import RelevanceJudge, agreement
from .locating import PassageLocator
from .positions import RelevantPositions, relevant_positions
from .sensitivity import PositionSensitivity, position_sensitivity

__all__ = [
    "PassageLocator",
    "PositionEffectiveness",
    "PositionSensitivity",
    "RelevanceJudge",
    "RelevantPositions",
    "agreement",
    "effectiveness_by_position",
    "position_sensitivity",
    "relevant_positions",
]
