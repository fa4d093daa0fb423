"""Aggregation heads: from one vector per window to one score per document.

A new aggregation is one new file in this folder: `class MyHead(Head, name="my-head")`. Importing the package
imports every module of the folder, and so registers every head.
"""

from __future__ import annotations

import importlib
import pkgutil

from .base import Head, build_head, registered_heads

for _module in sorted(module.name for module in pkgutil.iter_modules(__path__)):
    importlib.import_module(f"{__name__}.{_module}")

__all__ = ["Head", "build_head", "registered_heads"]
