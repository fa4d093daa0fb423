"""PARADE-LATEIR: queries and windows are encoded apart, and a second, smaller transformer lets them interact.

Boytsov et al. 2025, appendix ("Miscellaneous models"). As a window's states do not depend on the query, they are
encoded once for all queries and remembered. The vectors that the interaction makes of the windows are aggregated by
PARADE's transformer head. Shapes: B documents, N windows, V windows of all documents, T tokens of one text, H hidden
size of the backbone, I of the interaction.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import nn

from .backbones import Backbone, build_backbone, load_backbone
from .batching import Encoded, PairLayout, to_dense
from .heads.base import Head
from .scorer import LongDocScorer
from .states import StateEncoder
from .steps import TOKEN_BLOCK_CHARACTERS
from .vectors import VectorTransformer, first_state, join, projection, random_vector, vector_transformer
from .windows import Windows

DEFAULT_INTERACTION = "cross-encoder/ms-marco-MiniLM-L2-v2"
"""The interaction transformer of Boytsov et al. 2025."""

_SPECIALS = 4
"""Vectors of an interaction that are neither the query's nor the window's: `c`, and `s` three times."""


@dataclass(eq=False)
class LateBackbone(Backbone):
    """The two transformers before the aggregation.

    Attributes:
        interaction: lets the states of query and window interact.
    """

    interaction: VectorTransformer = field(kw_only=True)

    @property
    def hidden_size(self) -> int:
        """I, the width of what the head sees."""
        return self.interaction.output_width

    def describe(self) -> dict[str, Any]:
        """JSON-able description from which `build_late_backbone` makes the same modules."""
        return {**super().describe(), "interaction": self.interaction.describe()}


def load_late_backbone(name: str, interaction: str, *, trust_remote_code: bool = False) -> LateBackbone:
    """Loads both transformers; of cross-encoders only their layers.

    Args:
        name: the encoder of queries and windows, on the Hugging Face hub or in a folder.
        interaction: the transformer that lets them interact.
        trust_remote_code: run modelling code that the first checkpoint brings along.
    """
    return _together(load_backbone(name, trust_remote_code=trust_remote_code), vector_transformer(interaction))


def build_late_backbone(description: dict[str, Any], tokenizer: Any) -> LateBackbone:
    """The modules that `LateBackbone.describe` described, with random weights, for strict loading afterwards."""
    return _together(build_backbone(description, tokenizer), vector_transformer(description["interaction"]))


def _together(backbone: Backbone, interaction: VectorTransformer) -> LateBackbone:
    # A cross-encoder's last steps expect a state that has seen the query.
    return LateBackbone(
        backbone.model,
        backbone.tokenizer,
        None,
        None,
        backbone.pooling,
        rules=backbone.rules,
        options=backbone.options,
        interaction=interaction,
    )


class Interaction(nn.Module):
    """One vector per window: a transformer over `[c, s, query's states, s, window's states, s]`, read at `c`.

    States of special tokens are among them, as in Boytsov et al. 2025. Differs from their code, where padding of the
    query leaves a gap.

    Args:
        hidden_size: H.
        loaded: the transformer.
    """

    def __init__(self, hidden_size: int, loaded: VectorTransformer) -> None:
        super().__init__()
        self.project = projection(hidden_size, loaded.width)
        self.model: Any = loaded.model
        self.cls_vector = random_vector(loaded.width)
        self.sep_vector = random_vector(loaded.width)

    def forward(self, queries: Sequence[torch.Tensor], windows: Sequence[torch.Tensor]) -> torch.Tensor:
        """Lets each window interact with its query.

        Args:
            queries: V projected states `(T, I)`.
            windows: V projected states `(T, I)`.

        Returns:
            `(V, I)`.
        """
        query, query_mask = _padded(queries)
        window, window_mask = _padded(windows)
        one = query_mask.new_ones(len(query_mask), 1)
        separator = (self.sep_vector, one, 0)
        parts = [(query, query_mask, 0), separator, (window, window_mask, 0), separator]
        return first_state(self.model, *join([(self.cls_vector, one, 0), separator, *parts]))


class LateInteractionScorer(LongDocScorer):
    """Scores (query, text) pairs: queries and windows encoded apart, interaction, head.

    While it scores, the projected states of queries and windows are remembered, within a bound on their memory
    (`states.cache`), until the weights change.

    Args:
        backbone: the loaded transformers.

    All other arguments: see `LongDocScorer`.
    """

    build_backbone = staticmethod(build_late_backbone)

    def __init__(self, backbone: LateBackbone, windows: Windows, head: Head, **reading: Any) -> None:
        self._interaction_length = backbone.interaction.max_vectors
        super().__init__(backbone, windows, head, **reading)
        self.interaction = Interaction(int(backbone.model.config.hidden_size), backbone.interaction)
        self.states = StateEncoder()

    def _capacity(self, max_query_len: int, layout: PairLayout) -> int | None:
        limits = []
        if self._max_length is not None:
            limits.append(self._max_length - layout.specials)
            if max_query_len > limits[0]:
                return limits[0] - max_query_len  # less than one: max_query_len is to blame
        if self._interaction_length is not None:
            limits.append(self._interaction_length - _SPECIALS - max_query_len - 2 * layout.specials)
        return min(limits, default=None)

    def block_characters(self) -> int:
        """See the base class."""
        return TOKEN_BLOCK_CHARACTERS

    def _encode_windows(
        self,
        query_ids: Sequence[np.ndarray],
        windows: Sequence[Sequence[np.ndarray]],
        on_share: Callable[[float], None] | None,
    ) -> Encoded:
        queries = self._states(query_ids, self._text_layout(self.max_query_len, first_segment_only=True))
        flat = [window for group in windows for window in group]
        texts = self._states(flat, self._text_layout(self.windows.largest))
        doc = torch.repeat_interleave(
            torch.arange(len(windows), device=self.device),
            torch.tensor([len(group) for group in windows], device=self.device),
        )
        vectors = self._interact([queries[i] for i in doc.tolist()], texts, on_share)
        return to_dense(vectors.float(), doc, len(windows))

    def _text_layout(self, size: int | None, *, first_segment_only: bool = False) -> PairLayout:
        """`[CLS] [SEP] text [SEP]`: the layout for pairs with an empty query, as in Boytsov et al. 2025."""
        layout = self._pair_layout.fixed(0, size) if self.pad_query else self._pair_layout
        if first_segment_only and layout.types is not None:
            layout = replace(layout, types=(layout.types[0],) * 5)
        return layout

    def _states(self, sequences: Sequence[np.ndarray], layout: PairLayout) -> list[torch.Tensor]:
        return self.states(self.encoder, self.interaction.project, sequences, layout)

    def _interact(
        self, queries: list[torch.Tensor], windows: list[torch.Tensor], on_share: Callable[[float], None] | None
    ) -> torch.Tensor:
        """`(V, I)` vectors, made in batches of like length."""
        lengths = [len(query) + len(window) + _SPECIALS for query, window in zip(queries, windows, strict=True)]
        order = sorted(range(len(lengths)), key=lengths.__getitem__)
        vectors = []
        for rows in self.encoder.passes([lengths[i] for i in order], torch.tensor(order)):
            chosen = rows.tolist()
            vectors.append(self.interaction([queries[i] for i in chosen], [windows[i] for i in chosen]))
            if on_share is not None:
                on_share(len(chosen) / len(order))
        return torch.cat(vectors)[torch.tensor(order, device=self.device).argsort()]


def _padded(states: Sequence[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    lengths = torch.tensor([len(state) for state in states], device=states[0].device)
    padded = nn.utils.rnn.pad_sequence(list(states), batch_first=True)
    return padded, torch.arange(padded.shape[1], device=padded.device) < lengths.unsqueeze(1)
