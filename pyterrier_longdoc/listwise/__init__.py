"""Listwise reranking by language models, without torch and without vendors' libraries until they are used."""

from .backends import (
    AnthropicBackend,
    Backend,
    BackendError,
    CallableBackend,
    ContextOverflowError,
    HuggingFaceBackend,
    MalformedReplyError,
    OpenAIBackend,
    Reply,
)
from .calls import Estimate, Ledger, Prices, SpendCapError
from .client import LLMClient, NotInCacheError
from .comparison import ScheduleComparison, Speed, compare_schedules
from .messages import IncompleteReplyWarning, ListwisePrompt, UnreadableReplyError
from .rankgpt import RankGPT
from .schedules import (
    BackToFront,
    PairwiseAll,
    PairwiseBubble,
    ParallelBlocks,
    Schedule,
    SetwiseHeapsort,
    SetwiseInsertion,
    TopDown,
    Tournament,
)

__all__ = [
    "AnthropicBackend",
    "BackToFront",
    "Backend",
    "BackendError",
    "CallableBackend",
    "ContextOverflowError",
    "Estimate",
    "HuggingFaceBackend",
    "IncompleteReplyWarning",
    "LLMClient",
    "Ledger",
    "ListwisePrompt",
    "MalformedReplyError",
    "NotInCacheError",
    "OpenAIBackend",
    "PairwiseAll",
    "PairwiseBubble",
    "ParallelBlocks",
    "Prices",
    "RankGPT",
    "Reply",
    "Schedule",
    "ScheduleComparison",
    "SetwiseHeapsort",
    "SetwiseInsertion",
    "Speed",
    "SpendCapError",
    "TopDown",
    "Tournament",
    "UnreadableReplyError",
    "compare_schedules",
]
