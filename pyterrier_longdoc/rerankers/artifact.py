"""Saved models as PyTerrier artifacts: `pt.Artifact.load(folder)`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import huggingface_hub
import pandas as pd
import pyterrier as pt

from ..common.key import description
from .cross_encoder import CrossEncoder


class LongDocArtifact(pt.Artifact, pt.Transformer):
    """A saved model, as an artifact and a transformer.

    Args:
        path: the model's folder.
    """

    schematic = {"label": "LongDoc", "help_url": None}  # noqa: RUF012
    ARTIFACT_TYPE = "longdoc_reranker"
    ARTIFACT_FORMAT = "hf"
    ARTIFACT_PACKAGE_HINT = "pyterrier-longdoc"
    ARTIFACT_SCHEMATIC_SHOW_AS_TRANSFORMER = True  # otherwise PyTerrier leaves it out of the parts of a pipeline

    def __init__(self, path: str | Path) -> None:
        super().__init__(path)
        self._reranker: CrossEncoder | None = None

    def __repr__(self) -> str:
        return f"LongDocArtifact({str(self.path)!r})"

    def reranker(self, **parameters: Any) -> CrossEncoder:
        """Return the model with changed arguments (see `CrossEncoder.load`)."""
        return CrossEncoder.load(str(self.path), **parameters)

    def describe(self) -> dict[str, Any]:
        """Return the description of the model in the folder."""
        return {"saved": [description(self._loaded())]}

    def transform(self, inp: pd.DataFrame) -> pd.DataFrame:
        """Rerank with the model's saved arguments."""
        return self._loaded().transform(inp)

    def _hf_readme(self, *, repo: str, branch: str | None = "main", **options: Any) -> str | None:
        """Return the dataset card for `to_hf`; None if there is one, which may have been edited."""
        if huggingface_hub.HfApi().file_exists(repo, "README.md", repo_type="dataset", revision=branch):
            return None
        card: str | None = super()._hf_readme(repo=repo, branch=branch, **options)
        return card

    def _loaded(self) -> CrossEncoder:
        if self._reranker is None:
            self._reranker = self.reranker()
        return self._reranker
