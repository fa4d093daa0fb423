"""Models whose queries and windows are encoded apart, so that what is made of a window serves all queries.

PARADE-LATEIR (Boytsov et al. 2025, appendix, "Miscellaneous models"): a second, smaller transformer lets the states of
query and window interact; the vectors that it makes of the windows are aggregated by PARADE's transformer head.

Shapes: B documents, N windows, V windows of all documents, T tokens of one text with its special tokens, E width of
what is remembered, I of the interaction.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import nn

from ..common.caches import EmbeddingCache
from ..common.coverage import Coverage
from .aggregators import Part, VectorTransformer, first_state, join, projection, random_vector, vector_transformer
from .backbones.load import Backbone, build_backbone, load_encoder
from .devices import current_dtype
from .encoder import TOKEN_BLOCK_CHARACTERS, WindowEncoder, micro_batches, of_distinct
from .inputs import NOTHING, Encoded, InputFormat, Pairs, to_dense
from .weights import WeightsWatch

DEFAULT_INTERACTION = "cross-encoder/ms-marco-MiniLM-L2-v2"
"""The interaction transformer of Boytsov et al. 2025."""

_SPECIALS = 4
"""Vectors of an interaction that are neither the query's nor the window's: `c`, and `s` three times."""


class SeparateEncoder(WindowEncoder):
    """Base of the encoders that read queries and windows apart, in inference each distinct one once while remembered.

    States are worth nothing after the weights that made them have been trained or loaded: whoever scores calls
    `refresh` first, so that no such change goes unnoticed.
    """

    block_characters = TOKEN_BLOCK_CHARACTERS

    def __init__(self, backbone: Backbone) -> None:
        super().__init__(backbone)
        self.cache = EmbeddingCache()
        self._weights = WeightsWatch()

    @property
    def projection(self) -> nn.Module:
        """What states go through before they are remembered."""
        return nn.Identity()

    def refresh(self) -> None:
        self._forget_if_changed(contents=True)

    def _forget_if_changed(self, *, contents: bool) -> None:
        if self._weights.changed(self.backbone, self.projection, contents=contents):
            self.cache.clear()

    def states(
        self, sequences: Sequence[np.ndarray], form: InputFormat, coverage: Coverage | None
    ) -> list[torch.Tensor]:
        """Return V tensors `(T, E)` in fp32, the states of V token sequences; equal ones are encoded once."""

        def make(distinct: list[np.ndarray]) -> list[torch.Tensor]:
            return self._encode_apart(distinct, form, coverage)

        def remembered(distinct: list[np.ndarray]) -> list[torch.Tensor]:
            setting = (replace(form, of_query=None), current_dtype(self.device), self.training)
            arrays = self.cache.through(setting, distinct, lambda new: (states.cpu().numpy() for states in make(new)))
            return [torch.from_numpy(array).to(self.device) for array in arrays]

        if torch.is_grad_enabled():
            self._weights.forget()  # training follows
            return of_distinct(sequences, make)
        # Runs, at whose start `refresh` has read all weights, score in inference mode.
        self._forget_if_changed(contents=not torch.is_inference_mode_enabled())
        return of_distinct(sequences, remembered)

    def _encode_apart(
        self, sequences: list[np.ndarray], form: InputFormat, coverage: Coverage | None
    ) -> list[torch.Tensor]:
        made: dict[int, torch.Tensor] = {}
        for part in micro_batches(form.length(0, list(map(len, sequences))).tolist()):
            batch = form.collate([NOTHING] * len(part), [[sequences[i]] for i in part], self.device)
            states = (self.projection(own).float() for own in self.token_states(batch, coverage))
            made |= zip(part, states, strict=True)
        return [made[i] for i in range(len(sequences))]

    def by_length(self, lengths: Sequence[int], make: Callable[[list[int]], torch.Tensor]) -> torch.Tensor:
        """Return `(V, E)` vectors of V inputs, which `make` makes of their numbers in batches of like length."""
        order = sorted(range(len(lengths)), key=lengths.__getitem__)
        rows_of_pass = self.divided([lengths[i] for i in order], torch.tensor(order))
        made = torch.cat([make(rows.tolist()) for rows in rows_of_pass])
        return made[torch.tensor(order, device=made.device).argsort()]


def padded_states(states: Sequence[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return `(B, n, E)` states of like width, padded, and their `(B, n)` mask."""
    lengths = torch.tensor([len(state) for state in states], device=states[0].device)
    padded = nn.utils.rnn.pad_sequence(list(states), batch_first=True)
    return padded, torch.arange(padded.shape[1], device=padded.device) < lengths.unsqueeze(1)


@dataclass(eq=False)
class LateBackbone(Backbone):
    """The two transformers before the aggregation."""

    interaction: VectorTransformer = field(kw_only=True)

    @property
    def hidden_size(self) -> int:
        """I, the width of what the head sees."""
        return self.interaction.output_width

    def describe(self) -> dict[str, Any]:
        """Return a JSON-able description from which `build_late_backbone` makes the same modules."""
        return {**super().describe(), "interaction": self.interaction.describe()}


def load_late_backbone(name: str, interaction: str, *, trust_remote_code: bool = False) -> LateBackbone:
    """Load both transformers; of cross-encoders only their layers."""
    return _together(load_encoder(name, trust_remote_code=trust_remote_code), vector_transformer(interaction))


def build_late_backbone(description: dict[str, Any], tokenizer: Any) -> LateBackbone:
    """Return the modules that `LateBackbone.describe` described, with random weights, for strict loading afterwards."""
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

    States of special tokens are among them, as in Boytsov et al. 2025. In the papers' fixed input layout padding of the
    query and of the window keeps its place, as in their code.
    """

    def __init__(self, hidden_size: int, loaded: VectorTransformer) -> None:
        super().__init__()
        self.project = projection(hidden_size, loaded.width)
        self.model: Any = loaded.model
        self.cls_vector = random_vector(loaded.width)
        self.sep_vector = random_vector(loaded.width)

    def forward(self, query: Part, window: Part) -> torch.Tensor:
        """Return `(V, I)`: each window after its interaction with its query, from projected states."""
        one = query.mask.new_ones(len(query.mask), 1)
        separator = Part(self.sep_vector, one, 0)
        parts = [Part(self.cls_vector, one, 0), separator, query, separator, window, separator]
        return first_state(self.model, *join(parts))


class LateInteractionEncoder(SeparateEncoder):
    """Queries and windows encoded apart, then their interaction: one vector for each window."""

    build_backbone = staticmethod(build_late_backbone)

    def __init__(self, backbone: LateBackbone) -> None:
        super().__init__(backbone)
        self.interaction = Interaction(int(backbone.model.config.hidden_size), backbone.interaction)

    def make_format(self, backbone: Any) -> InputFormat:
        """Return the format for pairs with an empty query, as in Boytsov et al. 2025."""
        text = super().make_format(backbone)
        of_query = text if text.types is None else replace(text, types=(text.types[0],) * 5)
        longest, together = backbone.interaction.max_vectors, None
        if longest is not None:
            together = longest - _SPECIALS - 2 * text.specials
        return replace(text, of_query=of_query, together=together)

    @property
    def projection(self) -> nn.Module:
        return self.interaction.project

    def forward(self, pairs: Pairs, *, coverage: Coverage | None = None, **_: Any) -> Encoded:
        """Encode windows; there are no states but their vectors."""
        query, windows = pairs.by_window()
        text_format, query_format = self.format, self.format.of_query or self.format
        of_query = self.states(pairs.queries, query_format, coverage)
        of_window = self.states(windows, text_format, coverage)
        asking = [of_query[number] for number in query]
        lengths = (_sizes(asking, query_format) + _sizes(of_window, text_format) + _SPECIALS).tolist()

        def interact(chosen: list[int]) -> torch.Tensor:
            return self.interaction(
                _in_place([asking[i] for i in chosen], query_format),
                _in_place([of_window[i] for i in chosen], text_format),
            )

        return to_dense(self.by_length(lengths, interact).float(), pairs.counts)


def _sizes(states: Sequence[torch.Tensor], form: InputFormat) -> np.ndarray:
    """Return how many vectors `_in_place` makes of the states of each input."""
    return form.length(0, np.array(list(map(len, states))) - form.specials)


def _in_place(states: Sequence[torch.Tensor], form: InputFormat) -> Part:
    """Return states of inputs of their own, padded as the format says: before its last special tokens."""
    ends = len(form.suffix)
    content, mask = padded_states([state[: len(state) - ends] for state in states])
    missing = 0 if form.window_size is None else int(form.length(0, 0)) - ends - content.shape[1]
    suffix = torch.stack([state[len(state) - ends :] for state in states])
    vectors = torch.cat([nn.functional.pad(content, (0, 0, 0, missing)), suffix], 1)
    real = torch.cat([nn.functional.pad(mask, (0, missing)), mask.new_ones(len(states), ends)], 1)
    return Part(vectors, real, 0, form.window_size is not None)
