"""Word embeddings contextualised in windows with a little overlap, and matched: the encoder of TKL.

S. Hofstätter, H. Zamani, B. Mitra, N. Craswell, A. Hanbury, "Local Self-Attention over Long Text for Efficient Document
Retrieval", SIGIR 2020, as in their published code (matchmaker, `sigir20_tkl.py` and `tkl.yaml`).

Shapes: B documents, N windows, V windows of all documents, T tokens of a window and its neighbours, Q query tokens, D
tokens of a document, H width of the word embeddings.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn

from ..common.coverage import Work
from .batching import ApartLayout, Encoded, Matches, QueryStates, to_dense
from .encoder import TOKEN_BLOCK_CHARACTERS, MatchFunction, WindowEncoder, of_distinct
from .settings import Settings
from .word_vectors import WordBackbone, build_word_backbone

FIRST_POSITION = 500
"""Positions of document tokens begin here, those of query tokens at 0, so that the two differ (the published code)."""


class Local(NamedTuple):
    """Tokens that are contextualised together.

    Attributes:
        ids: `(T,)` token ids, with those of the neighbours.
        before: how many of them are the neighbour's before.
        length: how many are of the window itself.
        position: of the first one.
    """

    ids: np.ndarray
    before: int
    length: int
    position: int


class LocalEncoder(WindowEncoder):
    """`x = m e + (1 - m) transformer(e + position)` of each token's word embedding `e`, in queries and in windows.

    The transformer sees a window and `overlap` tokens on either side; `m` is learned and starts at 0.5. Windows are
    neighbours as they are read: chosen windows make a shorter document.

    Differs from the published code: the last tokens of a document have a window of their own (there up to four of the
    longest document of a batch are seen as neighbours alone), and positions are sinusoids, for queries of any length
    (there they are trained, and queries have 30 tokens at most).

    Args:
        backbone: the word embeddings.
    """

    block_characters = TOKEN_BLOCK_CHARACTERS
    once_for_all_queries = True

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

    def prepare(self, settings: Settings) -> tuple[Settings, ApartLayout]:
        """See the base class; everything fits."""
        return settings, ApartLayout(self.pair_layout, self.pair_layout)

    def forward(
        self,
        queries: Sequence[np.ndarray],
        windows: Sequence[Sequence[np.ndarray]],
        layout: Any,
        settings: Settings,
        *,
        match: MatchFunction | None = None,
        work: Work | None = None,
        **_: Any,
    ) -> Encoded:
        """Contextualises B queries and documents, each distinct one once, and matches them.

        Returns:
            The matches of query and document tokens as the one layer there is, and the query's states; windows have no
            vectors of their own.
        """
        # A document that several queries ask for is the same object.
        distinct = {id(group): group for group in windows}
        cut = [self._locals(group) for group in distinct.values()]
        made = iter(self.states(list(chain.from_iterable(cut)), settings, work))
        of_group = {key: torch.cat([next(made) for _ in own]) for key, own in zip(distinct, cut, strict=True)}
        # Queries are few: progress is that of the windows.
        counting = None if work is None else Work(work.coverage)
        asking = of_distinct(
            queries, lambda new: self.states([Local(q, 0, len(q), 0) for q in new], settings, counting)
        )

        query, query_mask = _padded(asking)  # (B, Q, H), (B, Q)
        document, document_mask = _padded([of_group[id(group)] for group in windows])  # (B, D, H), (B, D)
        numbers = [np.repeat(np.arange(len(group)), list(map(len, group))) for group in windows]
        window = _integers(numbers, document_mask).masked_fill(~document_mask, -1)
        matches = None
        if match is not None:
            ids = _integers([np.concatenate(group) for group in windows], document_mask)
            same = _integers(queries, query_mask).unsqueeze(2) == ids.unsqueeze(1)
            with torch.autocast(self.device.type, enabled=False):
                values = match(query, document, same)  # (B, Q, D)
            real = query_mask.unsqueeze(2) & document_mask.unsqueeze(1)
            values = values.masked_fill(~real, 0.0).unsqueeze(1)
            matches = Matches(values, query_mask, document_mask, window)
        counts = list(map(len, windows))
        nothing = to_dense(query.new_zeros(sum(counts), 0), counts)
        return Encoded(nothing.cls, nothing.mask, matches, QueryStates(query, query_mask))

    def _locals(self, windows: Sequence[np.ndarray]) -> list[Local]:
        """The windows of a document, each with its neighbours."""
        whole, ends = np.concatenate(windows), np.cumsum(list(map(len, windows)))
        parts = []
        for window, end in zip(windows, ends.tolist(), strict=True):
            start = end - len(window)
            before = min(self.overlap, start)
            ids = whole[start - before : end + self.overlap]
            parts.append(Local(ids, before, len(window), FIRST_POSITION + self.overlap - before))
        return parts

    def states(self, parts: Sequence[Local], settings: Settings, work: Work | None) -> list[torch.Tensor]:
        """Contextualised states in fp32 of the windows' own tokens: V times `(length, H)`.

        Args:
            parts: V windows with their neighbours.
            settings: with the limits on a pass.
            work: counts what is computed.
        """
        states = [torch.zeros(0, self.hidden_size, device=self.device)] * len(parts)
        order = sorted((i for i, part in enumerate(parts) if part.length), key=lambda i: len(parts[i].ids))
        lengths = [len(parts[i].ids) for i in order]
        for rows in self.divided(lengths, torch.tensor(order), settings) if order else ():
            chosen = [parts[i] for i in rows.tolist()]
            mixed = self._contextualise(chosen)
            for i, part, own in zip(rows.tolist(), chosen, mixed.float(), strict=True):
                states[i] = own[part.before : part.before + part.length]
            if work is not None:
                tokens = sum(len(part.ids) for part in chosen)
                work.count(tokens, mixed.shape[0] * mixed.shape[1])
                work.advance(tokens, sum(lengths))
        return states

    def _contextualise(self, parts: Sequence[Local]) -> torch.Tensor:
        """`(V', T, H)` states of a pass."""
        lengths = torch.tensor([len(part.ids) for part in parts], device=self.device)
        column = torch.arange(int(lengths.max()), device=self.device)
        mask = column < lengths.unsqueeze(1)  # (V', T)
        words = self.backbone(input_ids=_integers([part.ids for part in parts], mask))  # (V', T, H)
        position = torch.tensor([part.position for part in parts], device=self.device).unsqueeze(1) + column
        placed = words + sinusoids(position, self.hidden_size)
        context = self.transformer(placed, src_key_padding_mask=None if bool(mask.all()) else ~mask)
        return self.mixture * words + (1.0 - self.mixture) * context


def sinusoids(positions: torch.Tensor, width: int) -> torch.Tensor:
    """`(..., width)` sines, then cosines of positions, at wavelengths from 2 pi to 20,000 pi (Vaswani et al. 2017)."""
    scales = width // 2
    steps = torch.arange(scales, device=positions.device) * (-math.log(10000.0) / max(1, scales - 1))
    angles = positions.unsqueeze(-1) * steps.exp()
    return nn.functional.pad(torch.cat([angles.sin(), angles.cos()], -1), (0, width % 2))


def _padded(states: Sequence[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """`(B, n, H)` states and their mask, n at least 1."""
    lengths = torch.tensor(list(map(len, states)), device=states[0].device)
    padded = nn.utils.rnn.pad_sequence(list(states), batch_first=True)
    padded = nn.functional.pad(padded, (0, 0, 0, max(0, 1 - padded.shape[1])))
    return padded, torch.arange(padded.shape[1], device=lengths.device) < lengths.unsqueeze(1)


def _integers(rows: Sequence[np.ndarray], mask: torch.Tensor) -> torch.Tensor:
    """`(B, n)` int64 of rows that are as long as the mask says; zeros at padding."""
    values = np.zeros(tuple(mask.shape), dtype=np.int64)
    for row, own in zip(values, rows, strict=True):
        row[: len(own)] = own
    return torch.from_numpy(values).to(mask.device)
