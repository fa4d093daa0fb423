"""Transformer rerankers for long documents in PyTerrier.

`import pyterrier_longdoc as ld` imports neither torch nor transformers: the public names below are
looked up on first use (PEP 562), so that a notebook that only builds a pipeline starts at once.
"""

from __future__ import annotations

import importlib
from typing import Any

__version__ = "0.1.0"

_PUBLIC = {
    "rerankers.base": ["LongDocReranker", "UntrainedWarning", "save_adapter"],
    "common.frames": ["TruncationWarning"],
    "rerankers.cross": [
        "FirstP",
        "MaxP",
        "SumP",
        "AvgP",
        "KMaxP",
        "Birch",
        "PARADE",
        "LateIR",
        "MORESPlus",
        "CEDR",
        "NeuralModel1",
        "LongP",
    ],
    "modelling.apart": ["ExperimentalWarning"],
    "papers.presets": ["Preset", "presets"],
    "rerankers.invariance": ["check_invariance"],
    "rerankers.biencoder": ["BiEncoder"],
    "experiment": [
        "Experiment",
        "ExperimentResults",
        "ExperimentWarning",
        "Fold",
        "PaperTable",
        "Statistics",
        "Sweep",
        "by_document_length",
        "by_query_value",
        "by_relevant_position",
        "paper_table",
        "plot_efficiency",
        "read_run",
        "write_run",
        "sweep_depth",
        "sweep_passages",
        "sweep_truncation",
        "sweep_windows",
    ],
    "listwise": [
        "RankGPT",
        "ListwisePrompt",
        "LLMClient",
        "OpenAIBackend",
        "AnthropicBackend",
        "HuggingFaceBackend",
        "CallableBackend",
        "Reply",
        "Prices",
    ],
    "analysis.judging": ["RelevanceJudge", "agreement"],
    "analysis.locating": ["PassageLocator"],
    "analysis.positions": ["RelevantPositions", "relevant_positions"],
    "analysis.sensitivity": ["PositionSensitivity", "position_sensitivity"],
    "analysis.effectiveness": ["PositionEffectiveness", "effectiveness_by_position"],
    "data": [
        "RotateDocuments",
        "check_leaks",
        "far_relevant",
        "find_leaks",
        "needle",
        "passkey",
        "position_augmentation",
        "read_far_relevant",
        "read_longembed",
        "write_far_relevant",
    ],
    "modelling.windows": ["Truncate", "WholeText", "GreedyChunks", "SlidingWindows", "SlidingWords", "SentenceWindows"],
    "modelling.preselection": ["FirstK", "KeyBlocks"],
    "rerankers.selectors": ["BM25Windows", "EmbeddingWindows", "CrossEncoderWindows"],
    "training": [
        "Lora",
        "TeacherScores",
        "TrainingArgs",
        "fit_best",
        "fit_in_turn",
        "plot_history",
        "pseudo_qrels",
        "recipes",
    ],
    "training.folds": ["k_fold_fit"],
    "training.seeds": ["fit_seeds"],
    "papers.protocols": ["Protocol", "protocols"],
    "rerankers.artifact": ["LongDocArtifact"],
}
_MODULE_OF = {name: module for module, names in _PUBLIC.items() for name in names}

__all__ = sorted(_MODULE_OF)


def __getattr__(name: str) -> Any:
    if name in _MODULE_OF:
        return getattr(importlib.import_module(f"{__name__}.{_MODULE_OF[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
