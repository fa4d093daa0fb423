"""Splitting documents into passages and selecting evidence for a reader or a language model."""

from .evidence import Evidence
from .passages import Passages

__all__ = ["Evidence", "Passages"]
