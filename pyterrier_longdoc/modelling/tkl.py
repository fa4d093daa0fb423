"""Word embeddings contextualised in windows with a little overlap, and matched: the encoder of TKL.

S. Hofstätter, H. Zamani, B. Mitra, N. Craswell, A. Hanbury, "Local Self-Attention over Long Text for Efficient Document
Retrieval", SIGIR 2020, as in their published code (matchmaker, `sigir20_tkl.py` and `tkl.yaml`).

Shapes: B documents, N windows, V windows of all documents, T tokens of a window and its neighbours, Q query tokens, D
tokens of a document, H width of the word embeddings.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn

from ..common.coverage import Coverage
from .encoder import TOKEN_BLOCK_CHARACTERS, MatchFunction, WindowEncoder, of_distinct
from .inputs import Encoded, InputFormat, Matches, Pairs, QueryStates, to_dense
from .word_vectors import WordBackbone, build_word_backbone

FIRST_POSITION = 500
"""Positions of document tokens begin here, those of query tokens at 0, so that the two differ (the published code)."""


class Local(NamedTuple):
    """Token ids that are contextualised together, of which so many are a neighbour's before, or the window's own."""

    ids: np.ndarray
    before: int
    length: int
    position: int


class TKLEncoder(WindowEncoder):
    """`x = m e + (1 - m) transformer(e + position)` of each token's word embedding `e`, in queries and in windows.

    The transformer sees a window and `overlap` tokens on either side; `m` is learned and starts at 0.5. Windows are
    neighbours as they are read: chosen windows make a shorter document.

    Differs from the published code: the last tokens of a document have a window of their own (there up to four of the
    longest document of a batch are seen as neighbours alone), and positions are sinusoids, for queries of any length
    (there they are trained, and queries have 30 tokens at most).
    """

    block_characters = TOKEN_BLOCK_CHARACTERS

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

    def make_format(self, backbone: Any) -> InputFormat:
        """Return a format into which everything fits."""
        form: InputFormat = backbone.pair_format()
        return replace(form, of_query=form)

    def forward(
        self, pairs: Pairs, *, match: MatchFunction | None = None, coverage: Coverage | None = None, **_: Any
    ) -> Encoded:
        """Contextualise P queries and documents, each distinct one once, and match them; windows have no vectors."""
        cut = [self._locals(windows) for windows in pairs.documents]
        made = iter(self.states(list(chain.from_iterable(cut)), coverage))
        of_document = [torch.cat([next(made) for _ in own]) for own in cut]
        of_query = of_distinct(pairs.queries, lambda new: self.states([Local(q, 0, len(q), 0) for q in new], coverage))
        queries = [pairs.queries[number] for number in pairs.query]
        documents = [pairs.documents[number] for number in pairs.document]

        query, query_mask = _padded([of_query[number] for number in pairs.query])  # (P, Q, H), (P, Q)
        document, document_mask = _padded([of_document[number] for number in pairs.document])  # (P, D, H), (P, D)
        numbers = [np.repeat(np.arange(len(windows)), list(map(len, windows))) for windows in documents]
        window = _integers(numbers, document_mask).masked_fill(~document_mask, -1)
        matches = None
        if match is not None:
            ids = _integers([np.concatenate(windows) for windows in documents], document_mask)
            same = _integers(queries, query_mask).unsqueeze(2) == ids.unsqueeze(1)
            with torch.autocast(self.device.type, enabled=False):
                values = match(query, document, same)  # (P, Q, D)
            real = query_mask.unsqueeze(2) & document_mask.unsqueeze(1)
            values = values.masked_fill(~real, 0.0).unsqueeze(1)
            matches = Matches(values, query_mask, document_mask, window)
        nothing = to_dense(query.new_zeros(sum(pairs.counts), 0), pairs.counts)
        return Encoded(nothing.cls, nothing.mask, matches, QueryStates(query, query_mask))

    def _locals(self, windows: Sequence[np.ndarray]) -> list[Local]:
        """Return the windows of a document, each with its neighbours."""
        whole, ends = np.concatenate(windows), np.cumsum(list(map(len, windows)))
        parts = []
        for window, end in zip(windows, ends.tolist(), strict=True):
            start = end - len(window)
            before = min(self.overlap, start)
            ids = whole[start - before : end + self.overlap]
            parts.append(Local(ids, before, len(window), FIRST_POSITION + self.overlap - before))
        return parts

    def states(self, parts: Sequence[Local], coverage: Coverage | None) -> list[torch.Tensor]:
        """Return the contextualised states in fp32 of V windows' own tokens: V times `(length, H)`."""
        states = [torch.zeros(0, self.hidden_size, device=self.device)] * len(parts)
        order = sorted((i for i, part in enumerate(parts) if part.length), key=lambda i: len(parts[i].ids))
        lengths = [len(parts[i].ids) for i in order]
        for rows in self.divided(lengths, torch.tensor(order)) if order else ():
            chosen = [parts[i] for i in rows.tolist()]
            mixed = self._contextualise(chosen)
            for i, part, own in zip(rows.tolist(), chosen, mixed.float(), strict=True):
                states[i] = own[part.before : part.before + part.length]
            if coverage is not None:
                coverage.tokens_encoded += sum(len(part.ids) for part in chosen)
                coverage.tokens_computed += mixed.shape[0] * mixed.shape[1]
        return states

    def _contextualise(self, parts: Sequence[Local]) -> torch.Tensor:
        """Return `(V', T, H)` states of a pass."""
        lengths = torch.tensor([len(part.ids) for part in parts], device=self.device)
        column = torch.arange(int(lengths.max()), device=self.device)
        mask = column < lengths.unsqueeze(1)  # (V', T)
        words = self.backbone(input_ids=_integers([part.ids for part in parts], mask))  # (V', T, H)
        position = torch.tensor([part.position for part in parts], device=self.device).unsqueeze(1) + column
        placed = words + sinusoids(position, self.hidden_size)
        context = self.transformer(placed, src_key_padding_mask=None if bool(mask.all()) else ~mask)
        return self.mixture * words + (1.0 - self.mixture) * context


def sinusoids(positions: torch.Tensor, width: int) -> torch.Tensor:
    """Return `(..., width)` sines, then cosines, at wavelengths from 2 pi to 20,000 pi (Vaswani et al. 2017)."""
    scales = width // 2
    steps = torch.arange(scales, device=positions.device) * (-math.log(10000.0) / max(1, scales - 1))
    angles = positions.unsqueeze(-1) * steps.exp()
    return nn.functional.pad(torch.cat([angles.sin(), angles.cos()], -1), (0, width % 2))


def _padded(states: Sequence[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return `(B, n, H)` states and their mask, n at least 1."""
    lengths = torch.tensor(list(map(len, states)), device=states[0].device)
    padded = nn.utils.rnn.pad_sequence(list(states), batch_first=True)
    padded = nn.functional.pad(padded, (0, 0, 0, max(0, 1 - padded.shape[1])))
    return padded, torch.arange(padded.shape[1], device=lengths.device) < lengths.unsqueeze(1)


def _integers(rows: Sequence[np.ndarray], mask: torch.Tensor) -> torch.Tensor:
    """Return `(B, n)` int64 of rows that are as long as the mask says; zeros at padding."""
    values = np.zeros(tuple(mask.shape), dtype=np.int64)
    for row, own in zip(values, rows, strict=True):
        row[: len(own)] = own
    return torch.from_numpy(values).to(mask.device)
