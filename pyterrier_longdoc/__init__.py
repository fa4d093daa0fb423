"""Transformer rerankers for long documents in PyTerrier.

`import pyterrier_longdoc as ld` is fast, because it imports neither torch nor transformers: the public names below are
loaded on first use (PEP 562). Import other names from their sub-packages:
`from pyterrier_longdoc.training import k_fold_fit`.
"""

from __future__ import annotations

import importlib
from typing import Any

__version__ = "0.1.0"

_PUBLIC = {
    "rerankers.cross_encoder": ["CrossEncoder", "UntrainedWarning"],
    "rerankers.reranker": ["PrecisionWarning", "Reranker"],
    "rerankers.models": [
        "FirstP", "MaxP", "SumP", "AvgP", "KMaxP", "SoftMaxP", "Birch", "PARADE", "LateIR", "CEDR",
        "NeuralModel1", "LongP",
    ],
    "rerankers.biencoder": ["BiEncoder"],
    "rerankers.maxsim": ["MaxSim"],
    "rerankers.list_reranker": ["ListReranker"],
    "rerankers.zscore": ["ZScore"],
    "modelling.external": ["PairScorer"],
    "rerankers.selectors": ["EmbeddingWindows", "CrossEncoderWindows"],
    "common.arguments": ["argument"],
    "modelling.heads": ["Head"],
    "modelling.windows": [
        "Windows", "Truncate", "WholeText", "GreedyChunks", "SlidingWindows", "FixedGrid", "SlidingWords",
        "SentenceWindows",
    ],
    "modelling.layout": ["InputLayout"],
    "modelling.templates": ["Template"],
    "modelling.preselection": ["FirstK", "BM25Windows", "WindowSelector"],
    "common.frames": ["EmptyTextWarning", "SeenQueriesWarning", "TruncationWarning"],
    "training": ["Lora", "TrainingArgs", "recipes"],
    "papers.presets": ["presets"],
    "comparison": ["ComparisonWarning", "compare"],
    "scale.disk": ["rerank_to_disk", "merge_run"],
    "passages": ["Evidence", "Passages"],
    "listwise": ["RankGPT", "LLMClient", "OpenAIBackend", "HuggingFaceBackend", "CallableBackend"],
    "scale": ["distributed"],
    "data": ["far_relevant", "read_far_relevant", "from_passage_qrels"],
    "analysis": [
        "RelevanceJudge", "PassageLocator", "relevant_positions", "position_sensitivity", "position_by_query",
        "length_by_query", "evidence_recall", "audit",
    ],
    "analysis.show": ["show"],
}  # fmt: skip
_MODULE_OF = {name: module for module, names in _PUBLIC.items() for name in names}

__all__ = sorted(_MODULE_OF)


def __getattr__(name: str) -> Any:
    if name in _MODULE_OF:
        return getattr(importlib.import_module(f"{__name__}.{_MODULE_OF[name]}"), name)
    from .common.names import did_you_mean

    raise AttributeError(f"module {__name__!r} has no attribute {name!r}{did_you_mean(name, __all__)}")


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
