"""Listwise reranking by language models, without torch and without vendors' libraries until they are used."""

from .answers import FirstToken, Permutation
from .backends import (
    AnthropicBackend,
    Backend,
    BackendError,
    CallableBackend,
    ContextOverflowError,
    FirstTokenBackend,
    HuggingFaceBackend,
    MalformedReplyError,
    OpenAIBackend,
    Reply,
)
from .calls import Estimate, Ledger, Prices, SpendCapError
from .client import LLMClient, NoLogprobsError, NotInCacheError
from .messages import IncompleteReplyWarning, ListwisePrompt, UnreadableReplyError
from .pointwise import Pointwise
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
    "FirstToken",
    "FirstTokenBackend",
    "HuggingFaceBackend",
    "IncompleteReplyWarning",
    "LLMClient",
    "Ledger",
    "ListwisePrompt",
    "MalformedReplyError",
    "NoLogprobsError",
    "NotInCacheError",
    "OpenAIBackend",
    "PairwiseAll",
    "PairwiseBubble",
    "ParallelBlocks",
    "Permutation",
    "Pointwise",
    "Prices",
    "RankGPT",
    "Reply",
    "Schedule",
    "SetwiseHeapsort",
    "SetwiseInsertion",
    "SpendCapError",
    "TopDown",
    "Tournament",
    "UnreadableReplyError",
]
