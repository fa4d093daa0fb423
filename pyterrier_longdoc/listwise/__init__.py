"""Listwise reranking by language models. Torch and the libraries of vendors are only imported when they are used."""

from .answer_forms import FirstToken, Permutation
from .backends import (
    Backend,
    BackendError,
    CallableBackend,
    ContextOverflowError,
    HuggingFaceBackend,
    OpenAIBackend,
    Reply,
)
from .client import LLMClient, NotInCacheError
from .parsing import IncompleteReplyWarning, UnreadableReplyError
from .pointwise import Pointwise
from .prompts import ListwisePrompt
from .rankgpt import RankGPT
from .reasoned import ReasonedPointwise
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
    "BackToFront", "Backend", "BackendError", "CallableBackend", "ContextOverflowError", "FirstToken",
    "HuggingFaceBackend", "IncompleteReplyWarning", "LLMClient", "ListwisePrompt", "NotInCacheError",
    "OpenAIBackend", "PairwiseAll", "PairwiseBubble", "ParallelBlocks", "Permutation", "Pointwise", "RankGPT",
    "ReasonedPointwise", "Reply", "Schedule", "SetwiseHeapsort", "SetwiseInsertion", "TopDown", "Tournament",
    "UnreadableReplyError",
]  # fmt: skip
