"""Ways to ask a language model; the libraries behind them are imported when the first question is asked."""

from .anthropic import AnthropicBackend
from .base import Backend, CallableBackend, Reply, as_backend
from .huggingface import HuggingFaceBackend
from .openai_compatible import OpenAIBackend

__all__ = [
    "AnthropicBackend",
    "Backend",
    "CallableBackend",
    "HuggingFaceBackend",
    "OpenAIBackend",
    "Reply",
    "as_backend",
]
