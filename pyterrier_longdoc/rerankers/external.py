"""Scorers that may stand in place of a backbone: any function or transformer; `served.py` has models behind servers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from hashlib import blake2b
from typing import Any

import numpy as np
import pandas as pd
import pyterrier as pt

from ..common.presentation import changes, described
from ..modelling.external import ExternalScorer, Scores


@dataclass(frozen=True, repr=False)
class PairScorer(ExternalScorer):
    """A function, or a PyTerrier transformer, that scores queries and texts, as backbone of a model over windows.

    So every passage reranker becomes one for long documents: `ld.MaxP(ld.PairScorer(monot5))`. It is asked for each
    distinct query and window of a run once, in batches of the model's `batch_size`. Whether it reads a window to its
    end cannot be seen from here: give windows that it can read, or `tokenizer` and `longest_input`, and they will be.

    Args:
        scorer: a function `(queries, texts) -> scores`, which gets two lists of strings of one length and returns that
            many numbers; or a transformer that scores rows with `query` and `text` one by one, such as monoT5 or a
            ColBERT reranker. Its rows have a `qid` and a `docno` of their own, made of the query and the window, so
            that a cache behind them takes no window for another; it must return all of them, in any order.
        name: stands for the scorer in score caches and in what is known of a run: change it when its scores change.
            None: a `score_cache` is refused.
        tokenizer: a fast Hugging Face tokenizer, or its name: windows and queries are counted in its tokens. None
            counts words.
        longest_input: most tokens of a query and a window together, special ones included, into which the windows
            have to fit; needs `tokenizer` to be more than a guess. None: not known.

    Raises:
        ValueError: if that is neither a function nor a transformer; for a `CrossEncoder` or its `predict`, which take
            pairs.

    Example:
        `ld.MaxP(ld.PairScorer(lambda queries, texts: cross_encoder.predict(list(zip(queries, texts)))))`.
    """

    scorer: Any
    name: str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if isinstance(self.scorer, pt.Transformer):
            return
        owner = type(getattr(self.scorer, "__self__", self.scorer))  # of a method
        if any(cls.__module__.startswith("sentence_transformers.") for cls in owner.__mro__):
            # As a torch module it is callable, and its predict would take the texts for the name of a prompt.
            raise ValueError(
                f"a {owner.__name__} of sentence-transformers takes pairs: give ld.PairScorer(lambda queries, texts: "
                f"model.predict(list(zip(queries, texts)))), or its checkpoint, which can be trained: ld.MaxP('name')"
            )
        if not callable(self.scorer):
            raise ValueError(
                f"scorer={self.scorer!r} must be a function (queries, texts) -> scores, or a PyTerrier transformer "
                f"that scores rows with query and text"
            )

    def __repr__(self) -> str:
        shown = [getattr(self.scorer, "__qualname__", None) or described(self.scorer)]
        shown += [change for change in changes(self) if not change.startswith("scorer=")]
        return f"{type(self).__name__}({', '.join(shown)})"

    def identity(self) -> dict[str, Any]:
        """Return its name; ValueError without one."""
        if self.name is None:
            raise ValueError(
                f"{self!r} has no name by which its scores could be known again: give one, PairScorer(..., name=...), "
                f"and change it when the scores change; or leave score_cache out"
            )
        return {"type": type(self).__name__, "name": self.name}

    def score(self, queries: Sequence[str], texts: Sequence[str], batch_size: int) -> Scores:
        """Return what the function or transformer gives; ValueError if that is no finite score for each pair."""
        ask = partial(_of_rows, self.scorer) if isinstance(self.scorer, pt.Transformer) else self.scorer
        values = np.zeros(len(texts))
        for start in range(0, len(texts), batch_size):
            part = slice(start, start + batch_size)
            values[part] = self._checked(ask(list(queries[part]), list(texts[part])), len(texts[part]))
        bad = np.flatnonzero(~np.isfinite(values))
        if len(bad):
            raise ValueError(
                f"{self!r} gave {len(bad)} of {len(values)} pairs no finite score; the first, {values[bad[0]]}, to the "
                f"query {queries[bad[0]]!r} and the text {texts[bad[0]][:80]!r}"
            )
        return Scores(values)

    def _checked(self, given: Any, number: int) -> np.ndarray:
        given = given.detach().cpu().double() if hasattr(given, "detach") else given  # numpy has no bfloat16
        values = np.asarray(given, dtype="float64")
        if values.shape != (number,):  # a single number would be copied to all pairs
            raise ValueError(
                f"{self!r} must return one number for each of {number} pairs, not {type(given).__name__} of the shape "
                f"{values.shape}"
            )
        return values


def _of_rows(transformer: pt.Transformer, queries: list[str], texts: list[str]) -> np.ndarray:
    """Return the scores that a transformer gives rows of these queries and texts, in their order."""
    frame = pd.DataFrame({"qid": list(map(_name, queries)), "query": queries, "docno": list(map(_name, texts))})
    frame["text"] = texts
    # As from a first stage; a score that stays as it was is none.
    frame["score"], frame["rank"] = np.nan, frame.groupby("qid").cumcount()
    out = transformer.transform(frame.copy())
    asked = pd.MultiIndex.from_frame(frame[["qid", "docno"]])
    given = pd.MultiIndex.from_frame(out[["qid", "docno"]].astype(str))
    if len(given) != len(asked) or len(asked.difference(given)):
        raise ValueError(
            f"{transformer!r} was given {len(frame)} rows and returned {len(out)}, without "
            f"{len(asked.difference(given))} of the given ones: it must return each row once, in any order, without a "
            f"cutoff"
        )
    scores = pd.to_numeric(out["score"], errors="coerce").to_numpy(dtype="float64", na_value=np.nan)
    return scores[given.get_indexer(asked)]


def _name(text: str) -> str:
    return blake2b(text.encode(), digest_size=12).hexdigest()
