"""Listwise reranking by language models, without torch and without vendors' libraries until they are used."""

from .backends import AnthropicBackend, Backend, CallableBackend, HuggingFaceBackend, OpenAIBackend, Reply
from .client import LLMClient
from .errors import (
    BackendError,
    ContextOverflowError,
    IncompleteReplyWarning,
    MalformedReplyError,
    NotInCacheError,
    SpendCapError,
    UnreadableReplyError,
)
from .ledger import Estimate, Ledger, Prices
from .prompts import ListwisePrompt
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
