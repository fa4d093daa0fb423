"""Late interaction over long documents: vectors of all windows' tokens, and each query token's maxima over them.

ColBERT (Khattab & Zaharia 2020, section 3) compares a query with the tokens of one passage. Here a document's windows
are encoded apart, and the vectors of their tokens are one set. They serve every query; overlaps do a maximum no harm.

Shapes: P pairs, N windows, Q query vectors, T vectors of a window, E their width.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextvars import ContextVar
from dataclasses import asdict, replace
from functools import partial
from hashlib import blake2b
from itertools import chain
from typing import Any

import numpy as np
import torch
from torch import nn

from ..common.caches import MakeArrays
from ..common.coverage import Coverage
from ..common.hub import reachable
from ..common.packaged import encoder_folder
from ..common.store import ArrayStore
from .backbones.load import Backbone, load_encoder, values_of
from .backbones.multi_vector_files import load_token_vectors
from .biencoder import prefixed_format, within_lengths
from .heads.base import WarmStart
from .inputs import NOTHING, Encoded, InputFormat, Pairs, Settings, WindowBatch, to_dense
from .late_interaction import SeparateEncoder
from .token_vectors import TokenVectors
from .tokens import Span
from .weights import fingerprint

STORE: ContextVar[ArrayStore | None] = ContextVar("store", default=None)
"""Keeps the vectors of windows of the run in this thread on disk in fp16, and rounds new ones, so that it makes no
difference which were stored before; None keeps them in memory alone, in fp32."""


def load_token_backbone(name: str, *, seed: int, trust_remote_code: bool = False) -> Backbone:
    """Load a late-interaction checkpoint, or an encoder with a projection that is random by seed."""
    name = reachable(encoder_folder(name))
    backbone = load_encoder(name, trust_remote_code=trust_remote_code)
    with torch.random.fork_rng(devices=range(torch.cuda.device_count())):
        torch.manual_seed(seed)
        vectors, projection = load_token_vectors(name, backbone.tokenizer, backbone.state_size)
    options = replace(backbone.options, vectors=asdict(vectors))
    # The last steps of a cross-encoder expect a state that depends on the query.
    return replace(backbone, representation=projection, final=None, pooling="cls", options=options)


class MaxSimEncoder(SeparateEncoder):
    """Encodes queries and windows separately, and finds each query token's maximum in every window."""

    def __init__(self, backbone: Backbone) -> None:
        self.vectors_of = TokenVectors(**(backbone.options.vectors or {}))
        self.names = backbone.tokenizer.convert_ids_to_tokens
        super().__init__(backbone)

    @property
    def projection(self) -> nn.Module:
        return self.representation

    def make_format(self, backbone: Backbone) -> InputFormat:
        how = self.vectors_of
        return prefixed_format(backbone, {"query prompt": how.query_prefix, "document prompt": how.document_prefix})

    def use(self, settings: Settings) -> None:
        how, form = self.vectors_of, self.input_format
        if how.expand_to > (form.longest or sys.maxsize):
            raise ValueError(
                f"the checkpoint expands queries to {how.expand_to} tokens; its model takes {form.longest}"
            )
        super().use(within_lengths(settings, form, how.query_length, how.document_length))
        if factor := settings.token_pooling:
            how = replace(how, pooling=factor, pooling_normalizes=how.pooling_normalizes or how.pooling == 1 < factor)
        self.query_form: Any = replace(self.format.query_format or form, vectors=replace(how, side="query"))
        self.format = replace(self.format, vectors=how, query_format=self.query_form)

    def take_over(self, backbone: Any, tokenizer: Any) -> WarmStart:
        return replace(super().take_over(backbone, tokenizer), compares_tokens=self.vectors_of.trained)

    # Vectors.

    def token_vectors(self, batch: WindowBatch, form: InputFormat, coverage: Coverage | None) -> Iterator[torch.Tensor]:
        prepared, kept = form.vectors.prepare(batch)
        for state in self.token_states(prepared, coverage, kept):
            yield form.vectors.finish(self.projection(state).float())

    def remembered(self, key: Any, sequences: list[np.ndarray], make: MakeArrays) -> list[np.ndarray]:
        store = STORE.get()
        if store is None or self.training or key[0].vectors.side == "query":
            return super().remembered(key, sequences, make)
        if not self.fingerprint:
            self.fingerprint = fingerprint({**self.backbone.state_dict(), **self.projection.state_dict()})
        weights = self.fingerprint, values_of(self.backbone.config), self.projection.description
        # Sorted, as a saved model's settings come back in the order of their names.
        made_by = json.dumps([repr(key), self.device.type, *weights], sort_keys=True, default=str)
        setting = blake2b(made_by.encode(), digest_size=16).digest()
        through_store = partial(store.through, setting, make=make, width=self.hidden_size)
        return super().remembered((key, "float16"), sequences, through_store)

    # Comparison.

    def forward(self, pairs: Pairs, *, coverage: Coverage | None = None, **_: Any) -> Encoded:
        """Compare P queries and documents: `cls (P, N, Q)` has each query vector's maximum in each window."""
        queries = self.states(pairs.queries, self.query_form, coverage)
        windows = iter(self.states(list(chain.from_iterable(pairs.documents)), self.format, coverage))
        documents = [[next(windows) for _ in document] for document in pairs.documents]
        joined = [torch.cat(document) for document in documents]
        with torch.autocast(self.device.type, enabled=False):
            found = [
                _maxima(queries[q], joined[d], list(map(len, documents[d])))
                for q, d in zip(pairs.query, pairs.document, strict=True)
            ]
        width = max(map(len, queries))
        maxima, places = (
            to_dense(torch.cat([nn.functional.pad(p, (0, width - p.shape[1])) for p in parts]), pairs.counts)
            for parts in zip(*found, strict=True)
        )
        return replace(maxima, places=places.cls)

    # Explanation.

    def term_places(
        self, encoded: Encoded, pairs: Any, windows: torch.Tensor
    ) -> list[list[tuple[str, int, int, float]]]:
        """Return for each pair each query token, the characters of its maximum in `windows (P, Q)`, and its part."""
        places: Any = encoded.places
        found = []
        for i, (q, d) in enumerate(zip(pairs.query, pairs.document, strict=True)):
            row: list[tuple[str, int, int, float]] = []
            names = self.names(_tokens(pairs.queries[q], self.query_form)[0])
            for j, (name, n) in enumerate(zip(names, windows[i].tolist(), strict=False)):
                start, end = self._characters(pairs, d, n, int(places[i, n, j]))
                row.append((name, start, end, float(encoded.cls[i, n, j])))
            found.append(row)
        return found

    def _characters(self, pairs: Any, document: int, n: int, vector: int) -> Span:
        """Return the characters of a vector of a document's window; those of the window if its tokens are pooled.

        Special tokens, those of titles, and pooled ones of a window of several blocks have none: they stand before the
        window's first character.
        """
        text, span, window = pairs.texts[document], pairs.spans[document][n], pairs.documents[document][n]
        (start, end), *more = text.pieces(span)
        if self.format.vectors.pooling > 1:
            return (start, start) if more else (start, end)
        title_size = len(window) - (span[1] - span[0])
        token = span[0] + _tokens(window, self.format)[1][vector] - title_size
        return text.characters((token, token + 1)) if span[0] <= token < span[1] else (start, start)


def _maxima(query: torch.Tensor, document: torch.Tensor, sizes: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the `(N, Q)` maximum of each query vector in each window of a document, and in which vector it is.

    Each pair is a product of its own: in a larger one rounding might depend on the other pairs.
    """
    products = document @ query.T  # (all windows' T, Q)
    maxima, places = zip(*(window.max(0) for window in products.split(sizes)), strict=True)
    return torch.stack(maxima), torch.stack(places)


def _tokens(ids: np.ndarray, form: InputFormat) -> tuple[list[int], list[int]]:
    """Return the token id of each vector of an input, and its place among `ids`; negative before, larger after them."""
    batch, kept = form.vectors.prepare(form.collate([NOTHING], [[ids]]))
    columns = kept[0].nonzero()[:, 0]
    return batch.input_ids[0, columns].tolist(), (columns - batch.content_start[0]).tolist()
