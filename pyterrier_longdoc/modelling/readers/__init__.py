"""Readers turn a query and a text into inputs of a backbone; each has its own file."""

from __future__ import annotations

from typing import Any

from ..inputs import Settings
from .base import Reader, Specials
from .padded import PaddedReader
from .separate import SeparateReader
from .shared import SharedReader
from .template import TemplateReader

__all__ = ["PaddedReader", "Reader", "SeparateReader", "SharedReader", "Specials", "TemplateReader"]


def reader_of(backbone: Any, settings: Settings) -> Reader:
    """Return a backbone's reader of a query and a window in one input; ValueError if the settings do not fit it."""
    layout = settings.layout
    if backbone.template is not None or backbone.prompt:
        if layout.is_for_pairs:
            raise ValueError(
                f"{layout!r} is for [CLS] query [SEP] text [SEP]; this backbone has a template: use layout='pair'"
            )
        return TemplateReader(backbone, settings)
    if layout.pad_query:
        return PaddedReader(backbone, settings)
    return SharedReader(backbone, settings) if layout.shared_budget else Reader(backbone, settings)
