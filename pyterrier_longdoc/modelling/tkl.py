"""The encoder of TKL: contextualises word embeddings in slightly overlapping windows, and matches them.

S. Hofstätter, H. Zamani, B. Mitra, N. Craswell, A. Hanbury, "Local Self-Attention over Long Text for Efficient Document
Retrieval", SIGIR 2020, as in their published code (matchmaker, `sigir20_tkl.py` and `tkl.yaml`).

Shapes: B documents, N windows, V windows of all documents, T tokens of a window and its neighbours, Q query tokens, D
tokens of a document, H width of the word embeddings.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn

from ..common.coverage import Coverage
from .encoder import TOKEN_BLOCK_CHARACTERS, MatchFunction, WindowEncoder
from .inputs import Encoded, Matches, PairInputs, QueryStates, Settings, padded, to_dense
from .readers import SeparateReader, Specials
from .word_vectors import WordBackbone, build_word_backbone

FIRST_POSITION = 500
"""The first position of document tokens; that of query tokens is 0, so that they differ (as in the published code)."""


class Context(NamedTuple):
    """Token ids that are contextualised together: a window, which starts at `offset`, and tokens on either side."""

    ids: np.ndarray
    offset: int
    length: int
    position: int


class WordReader(SeparateReader):
    """Reads queries and windows without special tokens."""

    def make_specials(self, backbone: Any, prefixes: Sequence[str]) -> Sequence[tuple[Specials, str]]:
        return [(Specials(), "")] * 2


class TKLEncoder(WindowEncoder):
    """`x = m e + (1 - m) transformer(e + position)` of each token's word embedding `e`, in queries and in windows.

    The transformer sees a window and `overlap` tokens on either side; `m` is learned and starts at 0.5. If windows are
    selected, successive selected ones are neighbours.

    Differs from the published code: a document's last tokens have their own window (there, up to four tokens of the
    longest document of a batch are only neighbours), and positions are sinusoids, for queries of any length (there,
    they are trained, for at most 30 tokens).
    """

    block_characters = TOKEN_BLOCK_CHARACTERS
    supports_openvino = False

    build_backbone = staticmethod(build_word_backbone)

    def __init__(self, backbone: WordBackbone) -> None:
        super().__init__(backbone)
        config = backbone.model.config
        self.overlap = config.overlap
        layer = nn.TransformerEncoderLayer(
            config.hidden_size, config.attention_heads, config.feed_forward, dropout=0.0, batch_first=True
        )
        self.transformer = nn.TransformerEncoder(layer, config.layers, enable_nested_tensor=False)
        self.mixture = nn.Parameter(torch.tensor(0.5))

    def make_reader(self, settings: Settings) -> WordReader:
        return WordReader(self.origin, settings)

    def forward(
        self,
        pairs: Sequence[PairInputs],
        *,
        match: MatchFunction | None = None,
        coverage: Coverage | None = None,
        **_: Any,
    ) -> Encoded:
        """Contextualise P queries and documents, each distinct one once, and match them; windows have no vectors."""
        queries = [pair.query.ids for pair in pairs]
        documents = [[window.ids[slice(*window.content)] for window in pair.windows] for pair in pairs]
        query_parts = [(Context(ids, 0, len(ids), 0),) for ids in queries]
        query_states = self._joined(query_parts, coverage)
        document_states = self._joined(list(map(self._with_neighbours, documents)), coverage)

        query, query_mask = padded(query_states)  # (P, Q, H), (P, Q)
        document, document_mask = padded(document_states)  # (P, D, H), (P, D)
        numbers = [np.repeat(np.arange(len(windows)), list(map(len, windows))) for windows in documents]
        window = _integers(numbers, document_mask).masked_fill(~document_mask, -1)
        matches = None
        if match is not None:
            ids = _integers([np.concatenate(windows) for windows in documents], document_mask)
            same_token = _integers(queries, query_mask).unsqueeze(2) == ids.unsqueeze(1)
            with torch.autocast(self.device.type, enabled=False):
                values = match(query, document, same_token)  # (P, Q, D)
            real = query_mask.unsqueeze(2) & document_mask.unsqueeze(1)
            values = values.masked_fill(~real, 0.0).unsqueeze(1)
            matches = Matches(values, query_mask, document_mask, window)
        counts = list(map(len, documents))
        no_vectors = to_dense(query.new_zeros(sum(counts), 0), counts)
        return Encoded(no_vectors.cls, no_vectors.mask, matches, QueryStates(query, query_mask))

    def _joined(self, texts: Sequence[Sequence[Context]], coverage: Coverage | None) -> list[torch.Tensor]:
        """Return the token states of P texts, each given as its sequence of contexts; equal texts share theirs."""
        keys = [b"|".join(part.ids.tobytes() for part in parts) for parts in texts]
        distinct = dict(zip(keys, texts, strict=True))
        states = iter(self.states([part for parts in distinct.values() for part in parts], coverage))
        joined = {key: torch.cat([next(states) for _ in parts]) for key, parts in distinct.items()}
        return [joined[key] for key in keys]

    def _with_neighbours(self, windows: Sequence[np.ndarray]) -> list[Context]:
        """Return the windows of a document, each with its neighbours."""
        whole, ends = np.concatenate(windows), np.cumsum(list(map(len, windows)))
        parts = []
        for window, end in zip(windows, ends.tolist(), strict=True):
            start = end - len(window)
            offset = min(self.overlap, start)
            ids = whole[start - offset : end + self.overlap]
            parts.append(Context(ids, offset, len(window), FIRST_POSITION + self.overlap - offset))
        return parts

    def states(self, parts: Sequence[Context], coverage: Coverage | None) -> list[torch.Tensor]:
        """Return the fp32 states of the tokens of V windows, without their neighbours: V times `(length, H)`."""
        states = [torch.zeros(0, self.hidden_size, device=self.device)] * len(parts)
        order = sorted((i for i, part in enumerate(parts) if part.length), key=lambda i: len(parts[i].ids))
        lengths = [len(parts[i].ids) for i in order]
        for rows in self.divide(lengths, order) if order else ():
            pass_parts = [parts[i] for i in rows]
            pass_states = self._contextualise(pass_parts)
            for i, part, window_states in zip(rows, pass_parts, pass_states.float(), strict=True):
                states[i] = window_states[part.offset : part.offset + part.length]
            if coverage is not None:
                coverage.tokens_encoded += sum(len(part.ids) for part in pass_parts)
                coverage.tokens_computed += pass_states.shape[0] * pass_states.shape[1]
        return states

    def _contextualise(self, parts: Sequence[Context]) -> torch.Tensor:
        """Return `(V', T, H)` states of a pass."""
        lengths = torch.tensor([len(part.ids) for part in parts], device=self.device)
        column = torch.arange(int(lengths.max()), device=self.device)
        mask = column < lengths.unsqueeze(1)  # (V', T)
        words = self.backbone(input_ids=_integers([part.ids for part in parts], mask))  # (V', T, H)
        position = torch.tensor([part.position for part in parts], device=self.device).unsqueeze(1) + column
        inputs = words + sinusoids(position, self.hidden_size)
        context = self.transformer(inputs, src_key_padding_mask=None if bool(mask.all()) else ~mask)
        return self.mixture * words + (1.0 - self.mixture) * context


def sinusoids(positions: torch.Tensor, width: int) -> torch.Tensor:
    """Return `(..., width)` sines, then cosines, at wavelengths from 2 pi to 20,000 pi (Vaswani et al. 2017)."""
    scales = width // 2
    steps = torch.arange(scales, device=positions.device) * (-math.log(10000.0) / max(1, scales - 1))
    angles = positions.unsqueeze(-1) * steps.exp()
    return nn.functional.pad(torch.cat([angles.sin(), angles.cos()], -1), (0, width % 2))


def _integers(rows: Sequence[np.ndarray], mask: torch.Tensor) -> torch.Tensor:
    """Return rows of the mask's lengths as a `(B, n)` int64 tensor; zeros at padding."""
    values = np.zeros(tuple(mask.shape), dtype=np.int64)
    for target, row in zip(values, rows, strict=True):
        target[: len(row)] = row
    return torch.from_numpy(values).to(mask.device)
