"""The model behind `BiEncoder`: embeds queries and windows apart and compares them.

Shapes: R rows of a run, N windows of a document, V token sequences, H width of an embedding.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import nn

from .batching import PairLayout
from .devices import dtype_name
from .embeddings import SharedEncoder
from .encoder import WindowEncoder
from .microbatches import encode_distinct
from .positions import spread_positions
from .reports import Coverage, Explanation, check_finite
from .texts import Span, TokenizedText, numbered, rows_by_pair, share_out
from .windows import Windows, windows_to_config

BLOCK_CHARACTERS = 1_000_000
"""Text that is tokenised and whose window embeddings are held at a time."""

POOLINGS = ("mean", "cls")
SIMILARITIES = ("cosine", "dot")

OnShare = Callable[[float], None]


class BiEncoderScorer(nn.Module):
    """Scores (query, text) pairs by comparing embeddings: each distinct window and query is encoded once.

    Args:
        encoder: the loaded encoder with its remembered embeddings, which are forgotten when its weights change.
        windows: how texts are cut; checked against the backbone's longest input.
        aggregation: of a document's window similarities: `"first"`, `"max"` or `"avg"`.
        pooling: `"mean"` of the token states (special tokens included) or `"cls"`, the first token's; None for what
            the checkpoint names, else `"mean"`.
        similarity: `"cosine"` or `"dot"`; None for what the checkpoint names, else cosine.
        query_prefix: put before every query; None for what the checkpoint names.
        passage_prefix: put before every window; None for what the checkpoint names.
        position_step: positions of short inputs are this far apart; see `spread_positions`.
        max_query_len: read only this many tokens of a query, prefix and special tokens not counted.
        max_doc_len: read only this many tokens of a text; None reads all.
    """

    def __init__(
        self,
        encoder: SharedEncoder,
        windows: Windows,
        *,
        aggregation: str = "max",
        pooling: str | None = None,
        similarity: str | None = None,
        query_prefix: str | None = None,
        passage_prefix: str | None = None,
        position_step: int = 1,
        max_query_len: int = 32,
        max_doc_len: int | None = None,
    ) -> None:
        super().__init__()
        settings = encoder.settings
        query_prefix = settings.query_prefix if query_prefix is None else query_prefix
        passage_prefix = settings.passage_prefix if passage_prefix is None else passage_prefix
        if (query_prefix or passage_prefix) and not settings.pools_prompt:
            raise ValueError("this checkpoint leaves its prompt out of the mean, which BiEncoder's prefixes do not")
        pooling = _known("pooling", pooling, settings.pooling, POOLINGS)
        backbone = replace(encoder.backbone, pooling=pooling, representation=settings.projection)
        self.tokenizer = backbone.tokenizer
        self.encoder = WindowEncoder(backbone)
        self._shared = encoder
        self.cache, self.tokens = encoder.cache, encoder.tokens
        self.query_layout, self._query_lead = backbone.text_layout(query_prefix)
        self.passage_layout, self._passage_lead = backbone.text_layout(passage_prefix)
        if backbone.max_length is not None:
            _check_room("query_prefix", query_prefix, self.query_layout, backbone.max_length, max_query_len)
            _check_room("passage_prefix", passage_prefix, self.passage_layout, backbone.max_length, 1)
            windows = windows.within(backbone.max_length - self.passage_layout.specials)
        self.query_layout = spread_positions(self.query_layout, backbone, position_step)
        self.passage_layout = spread_positions(self.passage_layout, backbone, position_step)
        self.windows = windows
        self.aggregation = aggregation
        self.similarity = _known("similarity", similarity, settings.similarity, SIMILARITIES)
        self.max_query_len = max_query_len
        self.max_doc_len = max_doc_len
        self.coverage = Coverage()

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return next(self.parameters()).device

    def describe(self) -> dict[str, Any]:
        """All that a score depends on besides weights, tokenizer and precision, for hashing."""
        return {
            "windows": windows_to_config(self.windows),
            "layouts": [repr(self.query_layout), repr(self.passage_layout)],
            "leads": [self._query_lead, self._passage_lead],
            "pooling": self.encoder.pooling,
            "aggregation": self.aggregation,
            "similarity": self.similarity,
            "max_query_len": self.max_query_len,
            "max_doc_len": self.max_doc_len,
        }

    def score(
        self,
        queries: Sequence[str],
        texts: Sequence[str],
        *,
        dtype: torch.dtype = torch.float32,
        on_rows: Callable[[int], None] | None = None,
    ) -> np.ndarray:
        """Scores for inference.

        Args:
            queries: R queries.
            texts: R texts.
            dtype: precision of the encoder.
            on_rows: called with the number of rows that are done, for a progress bar.

        Returns:
            `(R,)` float64 similarities. `coverage` then tells what was read.

        Raises:
            FloatingPointError: if a similarity is not finite.
        """
        scores = np.full(len(texts), np.nan)
        for rows, _, _, similarities in self._run(queries, texts, dtype, on_rows, offsets=False):
            scores[rows] = self._aggregate(similarities)
        check_finite(scores)
        return scores

    def explain(
        self,
        queries: Sequence[str],
        texts: Sequence[str],
        *,
        dtype: torch.dtype = torch.float32,
        on_rows: Callable[[int], None] | None = None,
    ) -> tuple[np.ndarray, list[Explanation]]:
        """As `score`, and the similarity of each window."""
        scores = np.full(len(texts), np.nan)
        explanations: list[Any] = [None] * len(texts)
        for rows, document, spans, similarities in self._run(queries, texts, dtype, on_rows, offsets=True):
            scores[rows] = self._aggregate(similarities)
            explanation = Explanation([document.characters(s) for s in spans], similarities.tolist(), None)
            for row in rows:
                explanations[row] = explanation
        check_finite(scores)
        return scores, explanations

    def _aggregate(self, similarities: np.ndarray) -> float:
        if self.aggregation == "first":
            return float(similarities[0])
        return float(similarities.max() if self.aggregation == "max" else similarities.mean())

    def _embed(
        self, sequences: list[np.ndarray], layout: PairLayout, dtype: torch.dtype, on_share: OnShare | None
    ) -> np.ndarray:
        """`(V, H)` float32 embeddings of V token sequences; those seen before are not encoded again."""
        setting = (layout, self.encoder.pooling, self.similarity, dtype, self.device.type)
        keys = [(setting, sequence.tobytes()) for sequence in sequences]
        vectors = {key: vector for key in keys if (vector := self.cache.get(key)) is not None}
        new = {key: sequence for key, sequence in zip(keys, sequences, strict=True) if key not in vectors}
        if new:
            for key, vector in zip(new, self._encode(list(new.values()), layout, dtype, on_share), strict=True):
                vectors[key] = vector
                self.cache.put(key, vector)
        elif on_share is not None:
            on_share(1.0)
        return np.stack([vectors[key] for key in keys])

    @torch.inference_mode()
    def _encode(
        self, sequences: list[np.ndarray], layout: PairLayout, dtype: torch.dtype, on_share: OnShare | None
    ) -> np.ndarray:
        self.eval()
        empty = np.zeros(0, dtype=np.int32)
        with torch.autocast(self.device.type, dtype=dtype, enabled=dtype != torch.float32):
            queries = [empty] * len(sequences)
            vectors = encode_distinct(self.encoder, layout, queries, sequences, on_share=on_share)
        self.coverage.add_encoded(*self.encoder.take_counts())
        if self.similarity == "cosine":
            vectors = nn.functional.normalize(vectors, dim=-1)
        return vectors.cpu().numpy()

    def _run(
        self,
        queries: Sequence[str],
        texts: Sequence[str],
        dtype: torch.dtype,
        on_rows: Callable[[int], None] | None,
        *,
        offsets: bool,
    ) -> Iterator[tuple[list[int], TokenizedText, list[Span], np.ndarray]]:
        """For each distinct pair: its rows, the document, its windows and their `(N,)` similarities."""
        self._shared.begin(self.encoder)
        self.coverage = Coverage(dtype=dtype_name(dtype))
        distinct, of_row = numbered(queries)
        query_vectors = self._embed(self._query_ids(distinct), self.query_layout, dtype, None)
        wanted = rows_by_pair(of_row.tolist(), texts)
        for block in _text_blocks(sorted(wanted, key=len, reverse=True)):
            offsets = offsets or self.windows.needs_text
            documents = self.tokens(self.tokenizer, block, offsets=offsets, lead=self._passage_lead)
            spans = [self.windows(d if self.max_doc_len is None else d.head(self.max_doc_len)) for d in documents]
            rows = sum(len(group) for text in block for group in wanted[text].values())
            vectors = self._window_vectors(documents, spans, dtype, share_out(on_rows, rows))
            for text, document, cut, own in zip(block, documents, spans, vectors, strict=True):
                self.coverage.add_document(len(document), cut)
                for query, rows_of_pair in wanted[text].items():
                    # Row by row: a matrix product's rounding may depend on what else is in the matrix.
                    yield rows_of_pair, document, cut, (own * query_vectors[query]).sum(1, dtype=np.float64)

    def _window_vectors(
        self, documents: list[TokenizedText], spans: list[list[Span]], dtype: torch.dtype, on_share: OnShare | None
    ) -> list[np.ndarray]:
        """`(N, H)` embeddings of each document's windows; equal windows are encoded once."""
        windows = [document.ids[a:b] for document, cut in zip(documents, spans, strict=True) for a, b in cut]
        vectors = self._embed(windows, self.passage_layout, dtype, on_share)
        return np.split(vectors, np.cumsum([len(cut) for cut in spans])[:-1])

    def _query_ids(self, queries: list[str]) -> list[np.ndarray]:
        tokenized = self.tokens(self.tokenizer, queries, lead=self._query_lead)
        self.coverage.add_queries([len(query) for query in tokenized], self.max_query_len)
        return [query.ids[: self.max_query_len] for query in tokenized]


def _check_room(name: str, prefix: str, layout: PairLayout, longest: int, tokens: int) -> None:
    room = longest - layout.specials
    if room < 1:
        raise ValueError(f"{name}={prefix!r} alone is longer than the backbone's {longest} tokens")
    if room < tokens:
        raise ValueError(
            f"max_query_len={tokens} does not fit: next to prefix and special tokens the backbone takes {room} query "
            f"tokens"
        )


def _known(what: str, given: str | None, trained: str | None, known: tuple[str, ...]) -> str:
    """What is asked for, else what the checkpoint was trained with, else the first of what is known."""
    chosen = given or trained or known[0]
    if chosen not in known:
        raise ValueError(
            f"this checkpoint was trained with the {what} {chosen!r}, which BiEncoder does not have; {what}="
            f"{' or '.join(map(repr, known))} asks for another one all the same"
        )
    return chosen


def _text_blocks(texts: list[str]) -> Iterator[list[str]]:
    block: list[str] = []
    size = 0
    for text in texts:
        if block and size + len(text) > BLOCK_CHARACTERS:
            yield block
            block, size = [], 0
        block.append(text)
        size += len(text)
    if block:
        yield block
