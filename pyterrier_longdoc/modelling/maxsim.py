"""Late interaction over long documents: the vectors of all windows' tokens, and each query token's maxima over them.

ColBERT (Khattab & Zaharia 2020, section 3) compares a query with the tokens of one passage. Here a document's windows are
encoded apart, and the vectors of their tokens are one set. They serve every query, and overlaps do no harm to a maximum.

Shapes: B documents, N windows, V inputs, Q query vectors, T vectors of a window or tokens of an input, E their width.
"""

from __future__ import annotations

import sys
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
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
from .backbones.load import Backbone, build_backbone, load_encoder
from .backbones.multi_vector_files import TokenVectors, expansion_id, load_token_vectors, token_ids
from .biencoder import prefixed_format
from .encoder import QueryPlace
from .heads.base import WarmStart
from .inputs import NOTHING, Encoded, InputFormat, Pairs, Settings, WindowBatch
from .late_interaction import SeparateEncoder
from .token_pooling import pooled
from .tokens import Span, TokenizedText
from .weights import fingerprint


@dataclass(eq=False)
class TokenBackbone(Backbone):
    """An encoder with the projection of its tokens' states, as `representation`."""

    vectors: TokenVectors = field(kw_only=True)

    def describe(self) -> dict[str, Any]:
        """Return a JSON-able description from which `build_token_backbone` makes the same modules."""
        return {**super().describe(), "vectors": asdict(self.vectors)}


def load_token_backbone(name: str, *, seed: int, trust_remote_code: bool = False) -> TokenBackbone:
    """Load a late-interaction checkpoint, or an encoder with a projection that is random by seed."""
    name = reachable(encoder_folder(name))
    backbone = load_encoder(name, trust_remote_code=trust_remote_code)
    with torch.random.fork_rng(devices=range(torch.cuda.device_count())):
        torch.manual_seed(seed)
        vectors, projection = load_token_vectors(name, backbone.tokenizer, backbone.state_size)
    return _with_projection(backbone, projection, vectors)


def build_token_backbone(description: dict[str, Any], tokenizer: Any) -> TokenBackbone:
    """Return the modules that `TokenBackbone.describe` described, with random weights."""
    backbone = build_backbone(description, tokenizer)
    return _with_projection(backbone, backbone.representation, TokenVectors(**description["vectors"]))


def _with_projection(backbone: Backbone, projection: nn.Module | None, vectors: TokenVectors) -> TokenBackbone:
    # The last steps of a cross-encoder expect a state that depends on the query.
    parts = (backbone.model, backbone.tokenizer, projection, None, "cls")
    return TokenBackbone(*parts, rules=backbone.rules, options=backbone.options, vectors=vectors)


@dataclass(frozen=True)
class VectorRules:
    """Which tokens of an input get vectors, and what happens to these; see `TokenVectors`."""

    of_query: bool
    skipped: tuple[int, ...] = ()
    normalize: bool = True
    expand_to: int = 0
    expand_with: int = 0
    attends: bool = False
    pooling: float = 1.0
    protected: int = 1
    pooling_normalizes: bool = True

    def prepare(self, batch: WindowBatch) -> tuple[WindowBatch, torch.Tensor]:
        """Return V inputs with short queries filled up, and `(V, T)` bool, whether a token gets a vector."""
        missing = max(0, self.expand_to - batch.input_ids.shape[1])
        ids, real = (nn.functional.pad(rows, (0, missing)) for rows in (batch.input_ids, batch.attention_mask))
        column = torch.arange(ids.shape[1], device=ids.device)
        added = (column >= batch.lengths.unsqueeze(1)) & (column < self.expand_to)
        ids = ids.masked_fill(added, self.expand_with)
        types = None if batch.token_type_ids is None else nn.functional.pad(batch.token_type_ids, (0, missing))
        expanded = replace(
            batch,
            input_ids=ids,
            attention_mask=real | added if self.attends else real,
            token_type_ids=types,
            lengths=batch.lengths.clamp(min=self.expand_to),
        )
        kept = (real | added) & ~torch.isin(ids, torch.tensor(self.skipped, device=ids.device, dtype=ids.dtype))
        # An input of nothing but such tokens keeps them: every text has a score.
        return expanded, torch.where(kept.any(1, keepdim=True), kept, real | added)

    def finish(self, vectors: torch.Tensor) -> torch.Tensor:
        """Return the vectors of an input as they are compared."""
        if self.normalize:
            vectors = nn.functional.normalize(vectors, dim=-1)
        if self.pooling == 1:
            return vectors
        return pooled(vectors, self.pooling, protected=self.protected, normalize=self.pooling_normalizes)


class MaxSimEncoder(SeparateEncoder):
    """Encodes queries and windows separately, and finds each query token's maximum in every window.

    Attributes:
        store: keeps the vectors of windows on disk in fp16; they are rounded before they are compared, so that it makes
            no difference whether they were stored before. None keeps fp32 vectors in memory alone.
    """

    build_backbone = staticmethod(build_token_backbone)
    own_representation = True

    def __init__(self, backbone: TokenBackbone) -> None:
        self.token_vectors_of = backbone.vectors
        super().__init__(backbone)
        self.store: ArrayStore | None = None

    @property
    def projection(self) -> nn.Module:
        return self.representation

    def make_format(self, backbone: Backbone) -> InputFormat:
        how, tokenizer = self.token_vectors_of, backbone.tokenizer
        form = prefixed_format(backbone, {"prompt": how.query_prefix, "document prompt": how.document_prefix})
        skipped = token_ids(tokenizer, how.skipped)
        of_query, of_text = (
            VectorRules(side == "query", skipped if side in how.skips_in else (), how.normalize)
            for side in ("query", "document")
        )
        if how.expand_to:
            expand_with = expansion_id(tokenizer, how.expand_with)
            of_query = replace(of_query, expand_to=how.expand_to, expand_with=expand_with, attends=how.attends)
        of_text = replace(
            of_text, pooling=how.pooling, protected=how.protected, pooling_normalizes=how.pooling_normalizes
        )
        return replace(form, vectors=of_text, query_format=replace(form.query_format, vectors=of_query))

    def use(self, settings: Settings) -> None:
        how, form = self.token_vectors_of, self.input_format
        room = max(1, min(how.query_length or sys.maxsize, form.longest or sys.maxsize) - form.query_format.specials)
        if how.query_length == how.expand_to > 0 and (settings.max_query_len or 0) > room:
            raise ValueError(
                f"max_query_len={settings.max_query_len} is more than the {room} tokens of a query that this checkpoint "
                f"reads, which fills up each to {how.expand_to}: leave max_query_len out"
            )
        if settings.max_query_len is None and (how.query_length or form.longest):
            self.longest_query = "the checkpoint's query length" if how.query_length else self.longest_query
            settings = replace(settings, max_query_len=room)
        has_size = settings.windows.within(settings.windows.largest or sys.maxsize) == settings.windows
        if how.document_length and not has_size:
            settings = settings.within(max(1, how.document_length - form.specials))
        super().use(settings)
        if settings.token_pooling is not None:
            rules = replace(self.format.vectors, pooling=settings.token_pooling)
            self.format = replace(self.format, vectors=rules)

    def take_over(self, backbone: Any, tokenizer: Any) -> WarmStart:
        return replace(super().take_over(backbone, tokenizer), compares_tokens=backbone.vectors.trained)

    # Vectors.

    def token_vectors(
        self, batch: WindowBatch, form: InputFormat, coverage: Coverage | None
    ) -> Iterator[torch.Tensor]:
        prepared, kept = form.vectors.prepare(batch)
        for state in self.token_states(prepared, coverage, kept):
            yield form.vectors.finish(self.projection(state).float())

    def remembered(self, key: Any, sequences: list[np.ndarray], make: MakeArrays) -> list[np.ndarray]:
        store = self.store
        if store is None or self.training or key[0].vectors.of_query:
            return super().remembered(key, sequences, make)
        if not self.fingerprint:
            self.fingerprint = fingerprint({**self.backbone.state_dict(), **self.projection.state_dict()})
        setting = blake2b(repr((key, self.device.type, self.fingerprint)).encode(), digest_size=16).digest()

        def from_store(new: list[np.ndarray]) -> list[np.ndarray]:
            return store.through(setting, new, make)

        half: Hashable = (key, "float16")
        return super().remembered(half, sequences, from_store)

    # Comparison.

    def forward(self, pairs: Pairs, *, coverage: Coverage | None = None, **_: Any) -> Encoded:
        """Compare P queries and documents: `cls (P, N, Q)` has each query vector's maximum in each window."""
        queries = self.states(pairs.queries, self.format.query_format or self.format, coverage)
        windows = iter(self.states(list(chain.from_iterable(pairs.documents)), self.format, coverage))
        documents = [[next(windows) for _ in document] for document in pairs.documents]
        joined = [torch.cat(document) for document in documents]
        with torch.autocast(self.device.type, enabled=False):
            found = [
                _maxima(queries[q], joined[d], list(map(len, documents[d])), mean=self.token_vectors_of.mean)
                for q, d in zip(pairs.query, pairs.document, strict=True)
            ]
        maxima, places = (_padded(list(parts)) for parts in zip(*found, strict=True))
        counts = torch.tensor(pairs.counts, device=maxima.device)
        mask = torch.arange(maxima.shape[1], device=maxima.device) < counts.unsqueeze(1)
        return Encoded(cls=maxima, mask=mask, places=places)

    # Explanation.

    def query_places(self, encoded: Encoded, pairs: Any, windows: torch.Tensor) -> list[list[QueryPlace]]:
        places: Any = encoded.places
        found = []
        for i, (q, d) in enumerate(zip(pairs.query, pairs.document, strict=True)):
            document, spans = pairs.texts[d], pairs.spans[d]
            tokens, _ = _tokens(pairs.queries[q], self.format.query_format or self.format)
            row: list[QueryPlace] = []
            for j, (token, n) in enumerate(zip(tokens, windows[i].tolist(), strict=False)):
                start, end = self._characters(document, spans[n], pairs.documents[d][n], int(places[i, n, j]))
                row.append((token, start, end, float(encoded.cls[i, n, j])))
            found.append(row)
        return found

    def _characters(self, document: TokenizedText, span: Span, window: np.ndarray, vector: int) -> Span:
        """Return the characters of a window's vector: a token, or the whole window if several tokens share it.

        Special tokens, and those of titles, have none: they stand before the window's first character.
        """
        if self.format.vectors.pooling > 1:
            return document.characters(span)
        title_size = len(window) - (span[1] - span[0])
        token = span[0] + _tokens(window, self.format)[1][vector] - title_size
        if span[0] <= token < span[1]:
            return document.characters((token, token + 1))
        start, _ = document.characters(span)
        return start, start


def _maxima(
    query: torch.Tensor, document: torch.Tensor, sizes: list[int], *, mean: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the `(N, Q)` maximum of each query vector in each window of a document, and in which vector it is.

    Each pair is a product of its own: in a larger one rounding might depend on the other pairs.
    """
    products = document @ query.T  # (all windows' T, Q)
    maxima, places = zip(*(window.max(0) for window in products.split(sizes)), strict=True)
    return torch.stack(maxima) / (len(query) if mean else 1), torch.stack(places)


def _padded(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return P tensors `(N, Q)` as one, with zeros at padding."""
    rows, columns = (max(part.shape[side] for part in parts) for side in (0, 1))
    return torch.stack([nn.functional.pad(p, (0, columns - p.shape[1], 0, rows - p.shape[0])) for p in parts])


def _tokens(ids: np.ndarray, form: InputFormat) -> tuple[list[int], list[int]]:
    """Return the token id of each vector of an input, and its place among `ids`; negative before, larger after them."""
    batch, kept = form.vectors.prepare(form.collate([NOTHING], [[ids]]))
    columns = kept[0].nonzero()[:, 0]
    return batch.input_ids[0, columns].tolist(), (columns - batch.content_start[0]).tolist()
