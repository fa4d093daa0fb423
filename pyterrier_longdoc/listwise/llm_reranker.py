"""Base class of rerankers that use a language model."""

# No `from __future__ import annotations`: annotations must also be evaluable in the modules of subclasses.

from collections.abc import Iterable
from dataclasses import KW_ONLY, dataclass
from typing import Any

import pandas as pd
import pyterrier as pt

from ..common.arguments import argument, arguments_of, check_type, validate
from ..common.citations import papers_of
from ..common.coverage import Coverage
from ..common.files import full_name
from ..common.frames import TextField, field_names, is_blank, texts_of, validated
from ..common.key import description
from ..common.presentation import NotebookMixin, changes
from ..common.progress import work_bar
from ..common.warnings import warn_of_coverage, warn_of_inputs
from ..modelling.excerpts import best_passages
from ..modelling.preselection import WindowSelector, check_preselection
from ..modelling.windows import SentenceWindows, Windows
from .client import AsksLLM
from .prompt_budget import PromptBudget
from .prompts import Prompt


@dataclass(eq=False, repr=False)
class LLMReranker(AsksLLM, NotebookMixin, pt.Transformer):
    """The common arguments of `RankGPT` (documented there) and `Pointwise`."""

    llm: Any = argument(role="checkpoint")
    _: KW_ONLY
    preselect: WindowSelector | None = argument(None, role="windows")
    windows: Windows = argument(SentenceWindows(max_tokens=63), role="windows")
    max_doc_len: int | None = argument(512, role="windows", at_least=1)
    max_prompt_tokens: int | None = argument(None, role="windows", at_least=1)
    tokenizer: Any = argument(None, role="input")
    concurrency: int = argument(1, role="computing", at_least=1)
    text_field: TextField = argument("text", role="input")
    text_loader: Any = argument(None, role="call")
    verbose: bool = argument(False, role="call")

    def __post_init__(self) -> None:
        self.coverage: Coverage | None = None
        self.warned: set[str] = set()
        self._check()

    def __repr__(self) -> str:
        parts = [repr(self.client.backend)]
        parts += changes(self, hidden=("llm", "tokenizer", "text_loader", "verbose", "concurrency"))
        return f"{type(self).__name__}({', '.join(parts)})"

    def cited(self) -> list[str]:
        """Return the papers of this transformer and its passage selector."""
        return [*super().cited(), *papers_of(self.preselect)]

    def describe(self) -> dict[str, Any]:
        """Return a JSON description that identifies this transformer: name and settings of the model, arguments."""
        backend, values = self.client.backend, arguments_of(self, "head", "windows", "input")
        return {
            "model": backend.model,
            "settings": dict(backend.settings),
            "backend": description(backend if hasattr(backend, "describe") else type(backend)),
            "arguments": {name: description(value) for name, value in values.items()},
        }

    def _check(self) -> None:
        """Raise ValueError for invalid arguments; the model is not called."""
        validate(self)
        self.tokenizer = full_name(self.tokenizer)
        field_names(self.text_field)
        check_type(Windows, "windows, e.g. SlidingWindows(150, 75)", windows=self.windows)
        check_preselection(self.preselect, self.windows)

    def _budget(self, prompt: Prompt, pairs: Iterable[tuple[str, str]]) -> PromptBudget:
        """Return the budget that builds the prompts of a run; passages are selected before threads start."""
        passages = None
        if self.preselect is not None:
            distinct_pairs = list(dict.fromkeys(pairs))
            with work_bar(type(self).__name__, "document", len(distinct_pairs), shown=self.verbose) as bar:
                passages = best_passages(self.preselect, self.windows, distinct_pairs, on_pairs=bar.update)
        return PromptBudget(self, prompt, passages)

    def _texts(self, inp: pd.DataFrame) -> list[str]:
        """Check columns and arguments; return the text of each row."""
        columns = validated(inp, self.text_field, self.text_loader, self)
        self._check()
        texts = texts_of(inp, columns, self.text_loader) if len(inp) else []
        warn_of_inputs(self, inp, texts)
        return texts

    def _note_coverage(self, budget: PromptBudget, inp: pd.DataFrame, texts: list[str]) -> None:
        """Record the coverage; warn about truncated text and rows without text or query."""
        self.coverage = coverage = budget.coverage(inp["query"].nunique(dropna=False))
        coverage.add_rows(inp, map(is_blank, texts))
        warn_of_coverage(self, coverage)
