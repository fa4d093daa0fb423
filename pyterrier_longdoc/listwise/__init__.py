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
from .messages import IncompleteReplyWarning, ListwisePrompt, UnreadableReplyError
from .rankgpt import RankGPT

__all__ = [
    "AnthropicBackend",
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
    "Prices",
    "RankGPT",
    "Reply",
    "SpendCapError",
    "UnreadableReplyError",
]
