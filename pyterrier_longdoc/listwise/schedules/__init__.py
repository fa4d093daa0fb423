"""Schedules of published methods, which select the documents of each prompt and combine the answers to a ranking."""

from .back_to_front import BackToFront
from .base import Schedule
from .pairwise import PairwiseAll, PairwiseBubble
from .parallel_blocks import ParallelBlocks
from .setwise import SetwiseHeapsort, SetwiseInsertion
from .top_down import TopDown
from .tournament import Tournament

__all__ = [
    "BackToFront", "PairwiseAll", "PairwiseBubble", "ParallelBlocks", "Schedule", "SetwiseHeapsort", "SetwiseInsertion",
    "TopDown", "Tournament",
]  # fmt: skip
