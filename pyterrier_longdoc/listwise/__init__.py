"""Listwise reranking by language models. Torch and the libraries of vendors are only imported when they are used."""

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
from .prompts import ListwisePrompt
from .rankgpt import RankGPT
from .schedules import BackToFront, Schedule, TopDown

__all__ = [
    "BackToFront", "Backend", "BackendError", "CallableBackend", "ContextOverflowError", "HuggingFaceBackend",
    "IncompleteReplyWarning", "LLMClient", "ListwisePrompt", "NotInCacheError", "OpenAIBackend", "RankGPT", "Reply",
    "Schedule", "TopDown", "UnreadableReplyError",
]  # fmt: skip
