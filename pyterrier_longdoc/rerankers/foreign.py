"""Scorers that may stand in place of a backbone: any function or transformer; `served.py` has models behind servers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from hashlib import blake2b
from typing import Any

import numpy as np
import pandas as pd
import pyterrier as pt

from ..common.presentation import changes, described
from ..modelling.foreign import ForeignScorer, Scores


@dataclass(frozen=True, repr=False)
class PairScorer(ForeignScorer):
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
                f"a {owner.__name__} of sentence-transformers takes pairs, and PairScorer a function (queries, texts) "
                f"-> scores, here one line: ld.PairScorer(lambda queries, texts: model.predict(list(zip(queries, "
                f"texts)))). Or give its checkpoint in place of it, which can also be trained: ld.MaxP('name')"
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
        """Its name; ValueError without one."""
        if self.name is None:
            raise ValueError(
                f"{self!r} has no name by which its scores could be known again: give one, PairScorer(..., name=...), "
                f"and change it when the scores change; or leave score_cache out"
            )
        return {"type": type(self).__name__, "name": self.name}

    def score(
        self, queries: Sequence[str], texts: Sequence[str], batch_size: int, done: Callable[[int], None]
    ) -> Scores:
        """See the base class.

        Raises:
            ValueError: if it does not give a finite score for each pair.
        """
        ask = partial(_of_rows, self.scorer) if isinstance(self.scorer, pt.Transformer) else self.scorer
        values = np.zeros(len(texts))
        for start in range(0, len(texts), batch_size):
            part = slice(start, start + batch_size)
            values[part] = self._checked(ask(list(queries[part]), list(texts[part])), queries[part], texts[part])
            done(len(texts[part]))
        return Scores(values)

    def _checked(self, given: Any, queries: Sequence[str], texts: Sequence[str]) -> np.ndarray:
        given = given.detach().cpu().double() if hasattr(given, "detach") else given  # numpy has no bfloat16
        try:
            values = np.asarray(given, dtype="float64")
        except (TypeError, ValueError) as error:
            raise ValueError(f"{self!r} must return numbers: {error}") from error
        if values.shape != (len(texts),):
            raise ValueError(
                f"{self!r} was asked for {len(texts)} scores, and returned {type(given).__name__} of the shape "
                f"{values.shape}: it must return one number for each pair, ({len(texts)},)"
            )
        bad = np.flatnonzero(~np.isfinite(values))
        if len(bad):
            raise ValueError(
                f"{self!r} gave {len(bad)} of {len(values)} pairs no finite score; the first, {values[bad[0]]}, to the "
                f"query {queries[bad[0]]!r} and the text {texts[bad[0]][:80]!r}"
            )
        return values


def _of_rows(transformer: pt.Transformer, queries: list[str], texts: list[str]) -> np.ndarray:
    """What a transformer gives for rows of these queries and texts, in their order.

    Raises:
        ValueError: if rows or scores are missing, or were not asked for.
    """
    frame = pd.DataFrame({"qid": list(map(_name, queries)), "query": queries, "docno": list(map(_name, texts))})
    frame["text"] = texts
    # As from a first stage; a score that stays as it was is none.
    frame["score"], frame["rank"] = np.nan, frame.groupby("qid").cumcount()
    out = transformer.transform(frame.copy())
    lacking = [column for column in ("qid", "docno", "score") if column not in out.columns]
    if lacking:
        raise ValueError(f"{transformer!r} returned no column {', '.join(lacking)}: it must score the rows it is given")
    asked = pd.MultiIndex.from_frame(frame[["qid", "docno"]])
    given = pd.MultiIndex.from_frame(out[["qid", "docno"]].astype(str))
    missing, unknown = asked.difference(given), given.difference(asked)
    if len(missing) or len(unknown) or given.has_duplicates:
        raise ValueError(
            f"{transformer!r} was given {len(frame)} rows and returned {len(out)}: {len(missing)} are missing, "
            f"{len(unknown)} were not asked for, {int(given.duplicated().sum())} stand there again; it must return "
            f"each row once, in any order, without a cutoff"
        )
    scores = pd.to_numeric(out["score"], errors="coerce").to_numpy(dtype="float64", na_value=np.nan)
    return scores[given.get_indexer(asked)]


def _name(text: str) -> str:
    return blake2b(text.encode(), digest_size=12).hexdigest()
