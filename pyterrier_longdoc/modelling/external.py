"""Functions and transformers in place of a backbone: they receive windows as texts and return a score for each.

For the heads, these scores are window vectors with one feature, and their last layer is the identity.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass
from functools import partial
from hashlib import blake2b
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pandas as pd
import pyterrier as pt
import torch
from torch import nn

from ..common.arguments import argument, check_type, validate
from ..common.coverage import Coverage
from ..common.files import full_name
from ..common.key import NoKeyError, description
from ..common.language import named_tokenizer
from ..common.presentation import changes, described
from .backbones.architectures import InputRules
from .encoder import BLOCK_CHARACTERS
from .heads.base import WarmStart
from .inputs import Encoded, Input, Settings, to_dense
from .reader import NOTHING, PairInputs, Reader, Specials
from .windows import WholeText, Windows
from .words import Words

ASSUMED_INPUT = 512
"""The longest input, in tokens, if it is not known and windows have no given size: BERT's."""

WORDS_PER_TOKEN = 0.75
"""For windows in words of no given size: OpenAI's rule of thumb for English."""

SPARE_TOKENS = 8
"""How many more tokens a window may have by itself than in its document: its ends may cut words in two."""


@dataclass(frozen=True, repr=False)
class PairScorer:
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
    _: KW_ONLY
    tokenizer: Any = None
    longest_input: int | None = argument(None, at_least=1)

    hidden_size: ClassVar[int] = 1
    channels: ClassVar[int] = 1

    def __post_init__(self) -> None:
        validate(self)
        object.__setattr__(self, "tokenizer", full_name(self.tokenizer))
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

    def __deepcopy__(self, memo: dict[int, Any]) -> PairScorer:
        # It never changes, and a copy might hold weights twice.
        return self

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


NO_INPUT = Input(NOTHING, (0, 0), (0, 0))


class ExternalReader(Reader):
    """Reads texts instead of token ids; tokens are only counted."""

    def __init__(self, encoder: ExternalEncoder, settings: Settings) -> None:
        self.counts_words = encoder.scorer.tokenizer is None
        self.assumed = int((encoder.scorer.longest_input or ASSUMED_INPUT) * WORDS_PER_TOKEN)
        super().__init__(encoder, settings)
        self.needs_offsets = True

    def make_specials(self, backbone: Any) -> Specials:
        """Return as many tokens as the tokenizer adds; they are only counted."""
        return Specials((0,) * backbone.tokenizer.num_special_tokens_to_add(pair=True))

    def limits(self) -> tuple[int, int, int] | None:
        return (self.assumed, self.assumed, self.assumed) if self.counts_words else super().limits()

    def adapt(self) -> tuple[Windows, int | None]:
        """See the base class. Windows without a size get a number of words that usually fits; a given size is kept."""
        if not self.counts_words:
            return super().adapt()
        windows, max_query_len = self.requested()
        has_size = windows.resized(sys.maxsize) == windows
        if not has_size and not (self.longest is None and isinstance(windows, WholeText)):
            windows, _ = super().adapt()
        return windows, max_query_len

    def assemble(self, query: np.ndarray, content: np.ndarray) -> Input:
        """Return an empty input, because the scorer reads texts."""
        return NO_INPUT


class ExternalEncoder(nn.Module):
    """Calls a scorer for windows, once for each distinct pair of a run."""

    block_characters = BLOCK_CHARACTERS
    supports_openvino = False
    computed_in = None, None
    head_dtype = torch.float64  # so that the score of a document with one window is the scorer's
    rules = InputRules()

    settings: Settings
    reader: ExternalReader

    def __init__(self, scorer: PairScorer) -> None:
        super().__init__()
        choice = scorer.tokenizer
        tokenizer = named_tokenizer(choice) if isinstance(choice, str | Path) else choice
        if not (choice is None or hasattr(tokenizer, "backend_tokenizer")):
            raise ValueError(f"tokenizer={choice!r} must be a fast Hugging Face tokenizer, or its name")
        self.scorer = scorer
        self.tokenizer = Words() if choice is None else tokenizer
        longest = scorer.longest_input
        self.longest_input = None if longest is None else longest - SPARE_TOKENS
        self._run: tuple[Coverage | None, dict[bytes, float]] = None, {}

    def use(self, settings: Settings, needs: str) -> None:
        """Apply settings; rerankers combine it only with heads that need no more than scores."""
        self.settings, self.reader = settings, ExternalReader(self, settings)

    def initial_weights(self, backbone: Any, tokenizer: Any) -> WarmStart:
        """Return the identity as the last layer, because the vector of a window is its score."""
        final = nn.Linear(1, 1)
        nn.init.ones_(final.weight)
        nn.init.zeros_(final.bias)
        return WarmStart(final, torch.zeros(1), torch.zeros(1))

    def forward(self, pairs: Sequence[PairInputs], *, coverage: Coverage | None = None, **_: Any) -> Encoded:
        """Return the scores of the windows of P pairs: `cls (P, N, 1)` in float64, and `mask (P, N)`."""
        questions = []
        for pair in pairs:
            questions += [(pair.query.text_read, pair.text.input_text(span)) for span in pair.spans]
        run, keys = self._run, []
        if run[0] is not coverage:  # that of another run, since which the scorer may have changed
            self._run = run = coverage, {}
        known = run[1]
        for query, text in questions:  # hashes, because the texts of a long run would take more memory
            keys.append(blake2b(f"{len(query)} {query}{text}".encode(), digest_size=16).digest())
        new_questions = {key: pair for key, pair in zip(keys, questions, strict=True) if key not in known}
        if new_questions:
            queries, texts = zip(*new_questions.values(), strict=True)
            # Weights that it loads in inference mode could not be trained later.
            with torch.inference_mode(False):
                scores = self.scorer.score(queries, texts, self.settings.batch_size)
            known |= zip(new_questions, scores.tolist(), strict=True)
        values = torch.tensor([known[key] for key in keys], dtype=torch.float64)
        return to_dense(values.unsqueeze(1), [len(pair.spans) for pair in pairs])

    def describe_weights(self, model: Any) -> dict[str, Any]:
        """Return the scorer's description instead of weights."""
        return self.scorer.describe()

    def explain(self, pairs: Sequence[PairInputs], encoded: Encoded, head: Any) -> dict[str, list[Any]]:
        """Return no columns."""
        return {}
