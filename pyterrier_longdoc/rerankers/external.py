"""Functions and transformers in place of a backbone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from hashlib import blake2b
from typing import Any

import numpy as np
import pandas as pd
import pyterrier as pt

from ..common.arguments import check_type
from ..common.key import NoKeyError, description
from ..common.presentation import changes, described
from ..modelling.external import ExternalScorer


@dataclass(frozen=True, repr=False)
class PairScorer(ExternalScorer):
    """A function or a PyTerrier transformer that scores queries and texts, as the backbone of a model over windows.

    It turns any passage reranker into one for long documents: `ld.MaxP(ld.PairScorer(monot5))`. Each distinct pair of
    query and window is scored once, in batches of `batch_size`. The package cannot see whether the scorer truncates
    windows: choose a window size that it can read, or set `tokenizer` and `longest_input`.

    Args:
        scorer: a function `(queries, texts) -> scores` from two lists of strings of equal length to as many numbers; or
            a transformer that scores rows with `query` and `text` independently, such as monoT5 or a ColBERT reranker.
            It must return all rows, in any order. `qid` and `docno` are hashes of the query and the window, so that
            caches do not confuse windows.
        name: identifies the scorer in score caches and jobs on disk; change it when the scores change. Without a name,
            a function counts by its own name. A transformer, a lambda and a function within a function need a name.
        tokenizer: a fast Hugging Face tokenizer or its name, with which windows and queries are measured; None counts
            words.
        longest_input: the maximum number of tokens of a query and a window, special tokens included; windows are made
            to fit. Without `tokenizer`, the fit is approximate. None if it is unknown.

    Raises:
        ValueError: if `scorer` is neither a function nor a transformer, or if it is a `CrossEncoder` of
            sentence-transformers or its `predict`, which take pairs.

    Example:
        `ld.MaxP(ld.PairScorer(lambda queries, texts: cross_encoder.predict(list(zip(queries, texts)))))`.
    """

    scorer: Any
    name: str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if isinstance(self.scorer, pt.Transformer):
            return
        owner = type(getattr(self.scorer, "__self__", self.scorer))  # the owner of a method
        if any(cls.__module__.startswith("sentence_transformers.") for cls in owner.__mro__):
            # It is callable, being a torch module, and its predict would take the texts for the name of a prompt.
            raise ValueError(
                f"a {owner.__name__} of sentence-transformers takes pairs: give ld.PairScorer(lambda queries, texts: "
                f"model.predict(list(zip(queries, texts)))), or its checkpoint, which can be trained: ld.MaxP('name')"
            )
        rule = "a function (queries, texts) -> scores, or a PyTerrier transformer that scores rows with query and text"
        check_type(Callable, rule, scorer=self.scorer)

    def __repr__(self) -> str:
        scorer = getattr(self.scorer, "__qualname__", None) or described(self.scorer)
        return f"{type(self).__name__}({', '.join([scorer, *changes(self, hidden=('scorer',))])})"

    def describe(self) -> dict[str, Any]:
        """Return its name, or the description of its function; NoKeyError for a transformer without a name."""
        if self.name is not None:
            return {"type": type(self).__name__, "name": self.name}
        try:
            return {"type": type(self).__name__, "function": description(self.scorer)}
        except NoKeyError as error:
            raise NoKeyError(f"{error}: give PairScorer(..., name=...), and change it when the scores change") from None

    def score(self, queries: Sequence[str], texts: Sequence[str], batch_size: int) -> np.ndarray:
        """Return the scores of the function or transformer; ValueError without one finite score for each pair."""
        ask = partial(_transformer_scores, self.scorer) if isinstance(self.scorer, pt.Transformer) else self.scorer
        values = np.zeros(len(texts))
        for start in range(0, len(texts), batch_size):
            part = slice(start, start + batch_size)
            values[part] = self._checked(ask(list(queries[part]), list(texts[part])), len(texts[part]))
        rows = np.flatnonzero(~np.isfinite(values))
        if len(rows):
            raise ValueError(
                f"{self!r} gave {len(rows)} of {len(values)} pairs no finite score; the first is {values[rows[0]]}, of "
                f"the query {queries[rows[0]]!r} and the text {texts[rows[0]][:80]!r}"
            )
        return values

    def _checked(self, reply: Any, count: int) -> np.ndarray:
        reply = reply.detach().cpu().double() if hasattr(reply, "detach") else reply  # numpy has no bfloat16
        values = np.asarray(reply, dtype="float64")
        if values.shape != (count,):  # a single number would be copied to all pairs
            raise ValueError(
                f"{self!r} must return one number for each of {count} pairs, not {type(reply).__name__} of the shape "
                f"{values.shape}"
            )
        return values


def _transformer_scores(transformer: pt.Transformer, queries: list[str], texts: list[str]) -> np.ndarray:
    """Return the scores of a transformer for rows of these queries and texts, in their order."""
    frame = pd.DataFrame({"qid": list(map(_name, queries)), "query": queries, "docno": list(map(_name, texts))})
    frame["text"] = texts
    # The columns of a first stage; NaN shows rows that get no score.
    frame["score"], frame["rank"] = np.nan, frame.groupby("qid").cumcount()
    out = transformer.transform(frame.copy())
    inputs = pd.MultiIndex.from_frame(frame[["qid", "docno"]])
    outputs = pd.MultiIndex.from_frame(out[["qid", "docno"]].astype(str))
    if len(outputs) != len(inputs) or len(inputs.difference(outputs)):
        raise ValueError(
            f"{transformer!r} was given {len(frame)} rows and returned {len(out)}; {len(inputs.difference(outputs))} "
            f"are missing: it must return each row once, in any order, without a cutoff"
        )
    scores = pd.to_numeric(out["score"], errors="coerce").to_numpy(dtype="float64", na_value=np.nan)
    return scores[outputs.get_indexer(inputs)]


def _name(text: str) -> str:
    """Return a hash of 20 characters: Terrier's text scorer takes no longer docnos."""
    return blake2b(text.encode(), digest_size=10).hexdigest()
