"""Checks of the arguments that all rerankers share."""

from __future__ import annotations

import dataclasses
from numbers import Integral
from pathlib import Path
from typing import Any

import pyterrier as pt

from ..common.arguments import check_given, check_positive
from ..common.frames import field_names
from ..modelling.devices import check_dtype
from ..modelling.windows import Windows


def check_settings(transformer: Any) -> None:
    """Checks the arguments that all rerankers share, as far as that is possible without loading anything.

    Raises:
        ValueError: for one that can never work.
    """
    if not isinstance(transformer.backbone, str | Path) or not str(transformer.backbone):
        raise ValueError(f"backbone={transformer.backbone!r} must be a folder, or a model on the Hugging Face hub")
    field_names(transformer.text_field)
    check_dtype(transformer.dtype)
    for name in ("batch_size", "max_query_len"):
        check_given(**{name: getattr(transformer, name)})
    for name in ("max_batch_tokens", "max_windows", "max_doc_len"):
        check_positive(**{name: getattr(transformer, name)})
    if isinstance(transformer.seed, bool) or not isinstance(transformer.seed, Integral):
        raise ValueError(f"seed={transformer.seed!r} must be a whole number")
    if not isinstance(transformer.windows, Windows | None):
        raise ValueError(f"windows={transformer.windows!r} must be windows, e.g. SlidingWindows(150, 75)")
    loader = transformer.text_loader
    if not (loader is None or isinstance(loader, pt.Transformer) or hasattr(loader, "text_loader")):
        raise ValueError(
            f"text_loader={loader!r} must be a transformer that adds the text, or have a method text_loader "
            f"(as datasets and indexes do)"
        )


def check_only_windows(transformer: Any) -> None:
    """Raises ValueError if sizes are given next to `windows=`, where they would have no effect."""
    defaults = {f.name: f.default for f in dataclasses.fields(transformer)}
    names = ("window_size", "stride", "max_windows", "selection")
    both = [name for name in names if name in defaults and getattr(transformer, name) != defaults[name]]
    if both:
        raise ValueError(
            f"{' and '.join(both)} would have no effect next to windows={transformer.windows!r}: set them in windows, "
            f"or leave windows out"
        )
