"""Models that encode queries and windows separately, so that the states of a window serve all queries.

PARADE-LATEIR (Boytsov et al. 2025, appendix, "Miscellaneous models"): a second, smaller transformer lets the states of
query and window interact, and PARADE's transformer head aggregates the vectors of the windows.

Shapes: B documents, N windows, V windows of all documents, T tokens of one text with its special tokens, E width of
the remembered states, I width of the interaction.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import nn

from ..common.caches import EmbeddingCache, MakeArrays
from ..common.coverage import Coverage
from .aggregators import Part, VectorTransformer, first_state, join, projection, random_vector, vector_transformer
from .backbones.load import Backbone, build_backbone, load_encoder
from .devices import current_dtype
from .encoder import TOKEN_BLOCK_CHARACTERS, WindowEncoder, map_distinct, micro_batches
from .inputs import NOTHING, Encoded, InputFormat, Pairs, WindowBatch, to_dense
from .weights import WeightsWatch

DEFAULT_INTERACTION = "cross-encoder/ms-marco-MiniLM-L2-v2"
"""The interaction transformer of Boytsov et al. 2025."""

_SPECIALS = 4
"""Vectors of an interaction that are neither the query's nor the window's: `c`, and `s` three times."""


class SeparateEncoder(WindowEncoder):
    """Base of the encoders that read queries and windows separately; in inference they remember the states.

    Remembered states are wrong after a change of weights: whoever scores calls `refresh` first, which forgets them.
    """

    block_characters = TOKEN_BLOCK_CHARACTERS

    def __init__(self, backbone: Backbone) -> None:
        super().__init__(backbone)
        self.cache = EmbeddingCache()
        self.fingerprint = ""  # of the weights, once somebody has asked for it
        self._weights = WeightsWatch()

    @property
    def projection(self) -> nn.Module:
        """The layer that states go through before they are remembered."""
        return nn.Identity()

    def refresh(self) -> None:
        super().refresh()
        self._forget_if_changed(contents=True)

    def _forget_if_changed(self, *, contents: bool) -> None:
        if self._weights.changed(self.backbone, self.projection, contents=contents):
            self.cache.clear()
            self.fingerprint = ""

    def states(
        self, sequences: Sequence[np.ndarray], form: InputFormat, coverage: Coverage | None
    ) -> list[torch.Tensor]:
        """Return V tensors `(T, E)` in fp32, the states of V token sequences; equal ones are encoded once."""

        def make(distinct: list[np.ndarray]) -> list[torch.Tensor]:
            return self._encode_distinct(distinct, form, coverage)

        def look_up(distinct: list[np.ndarray]) -> list[torch.Tensor]:
            key = (replace(form, query_format=None), current_dtype(self.device), self.settings.runtime, self.training)
            arrays = self.remembered(key, distinct, lambda new: (states.cpu().numpy() for states in make(new)))
            return [torch.from_numpy(array).to(self.device).float() for array in arrays]

        if torch.is_grad_enabled():
            self._weights.forget()  # a training step may follow
            return map_distinct(sequences, make)
        # Runs, at whose start `refresh` has read all weights, score in inference mode.
        self._forget_if_changed(contents=not torch.is_inference_mode_enabled())
        return map_distinct(sequences, look_up)

    def remembered(self, key: Hashable, sequences: list[np.ndarray], make: MakeArrays) -> list[np.ndarray]:
        """Return the states of distinct token sequences and a setting; `make` makes those that are not remembered."""
        return self.cache.through(key, sequences, make)

    def token_vectors(self, batch: WindowBatch, form: InputFormat, coverage: Coverage | None) -> Iterable[torch.Tensor]:
        """Yield the `(T, E)` states of each input of a batch, in fp32, as they are remembered."""
        return (self.projection(state).float() for state in self.token_states(batch, coverage))

    def _encode_distinct(
        self, sequences: list[np.ndarray], form: InputFormat, coverage: Coverage | None
    ) -> list[torch.Tensor]:
        results: dict[int, torch.Tensor] = {}
        for part in micro_batches(form.length(0, list(map(len, sequences))).tolist()):
            batch = form.collate([NOTHING] * len(part), [[sequences[i]] for i in part], self.device)
            results |= zip(part, self.token_vectors(batch, form, coverage), strict=True)
        return [results[i] for i in range(len(sequences))]

    def batch_by_length(self, lengths: Sequence[int], make: Callable[[list[int]], torch.Tensor]) -> torch.Tensor:
        """Return `(V, E)` vectors of V inputs; `make` gets the numbers of inputs, in batches of like length."""
        order = sorted(range(len(lengths)), key=lengths.__getitem__)
        rows_of_pass = self.divide([lengths[i] for i in order], torch.tensor(order))
        vectors = torch.cat([make(rows.tolist()) for rows in rows_of_pass])
        return vectors[torch.tensor(order, device=vectors.device).argsort()]


def padded_states(states: Sequence[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return states as one padded `(B, n, E)` tensor, and their `(B, n)` mask."""
    lengths = torch.tensor([len(state) for state in states], device=states[0].device)
    padded = nn.utils.rnn.pad_sequence(list(states), batch_first=True)
    return padded, torch.arange(padded.shape[1], device=padded.device) < lengths.unsqueeze(1)


@dataclass(eq=False)
class LateBackbone(Backbone):
    """The two transformers before the aggregation."""

    interaction: VectorTransformer = field(kw_only=True)

    @property
    def hidden_size(self) -> int:
        """I, the width of the head's input."""
        return self.interaction.output_width

    def describe(self) -> dict[str, Any]:
        """Return a JSON-able description from which `build_late_backbone` makes the same modules."""
        return {**super().describe(), "interaction": self.interaction.describe()}


def load_late_backbone(name: str, interaction: str, *, trust_remote_code: bool = False) -> LateBackbone:
    """Load both transformers; from cross-encoders only their layers."""
    return _late_backbone(load_encoder(name, trust_remote_code=trust_remote_code), vector_transformer(interaction))


def build_late_backbone(description: dict[str, Any], tokenizer: Any) -> LateBackbone:
    """Return the modules that `LateBackbone.describe` described, with random weights, for strict loading afterwards."""
    return _late_backbone(build_backbone(description, tokenizer), vector_transformer(description["interaction"]))


def _late_backbone(backbone: Backbone, interaction: VectorTransformer) -> LateBackbone:
    # The last steps of a cross-encoder expect a state that depends on the query.
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

    The states include those of special tokens, as in Boytsov et al. 2025. In the papers' fixed input layout padding of
    query and window keeps its place, as in their code.
    """

    def __init__(self, hidden_size: int, transformer: VectorTransformer) -> None:
        super().__init__()
        self.project = projection(hidden_size, transformer.width)
        self.model: Any = transformer.model
        self.cls_vector = random_vector(transformer.width)
        self.sep_vector = random_vector(transformer.width)

    def forward(self, query: Part, window: Part) -> torch.Tensor:
        """Return `(V, I)`: each window after its interaction with its query, from projected states."""
        real = query.mask.new_ones(len(query.mask), 1)
        separator = Part(self.sep_vector, real, 0)
        parts = [Part(self.cls_vector, real, 0), separator, query, separator, window, separator]
        return first_state(self.model, *join(parts))


class LateInteractionEncoder(SeparateEncoder):
    """Encodes queries and windows separately, then lets them interact: one vector for each window."""

    build_backbone = staticmethod(build_late_backbone)

    def __init__(self, backbone: LateBackbone) -> None:
        super().__init__(backbone)
        self.interaction = Interaction(int(backbone.model.config.hidden_size), backbone.interaction)

    def make_format(self, backbone: Any) -> InputFormat:
        """Return the format for pairs with an empty query, as in Boytsov et al. 2025."""
        text = super().make_format(backbone)
        query_format = text if text.types is None else replace(text, types=(text.types[0],) * 5)
        longest, longest_pair = backbone.interaction.max_vectors, None
        if longest is not None:
            longest_pair = longest - _SPECIALS - 2 * text.specials
        return replace(text, query_format=query_format, longest_pair=longest_pair)

    @property
    def projection(self) -> nn.Module:
        return self.interaction.project

    def forward(self, pairs: Pairs, *, coverage: Coverage | None = None, **_: Any) -> Encoded:
        """Encode windows; their vectors are the only states."""
        query, windows = pairs.by_window()
        text_format, query_format = self.format, self.format.query_format or self.format
        distinct_states = self.states(pairs.queries, query_format, coverage)
        window_states = self.states(windows, text_format, coverage)
        query_states = [distinct_states[number] for number in query]
        lengths = (_sizes(query_states, query_format) + _sizes(window_states, text_format) + _SPECIALS).tolist()

        def interact(numbers: list[int]) -> torch.Tensor:
            return self.interaction(
                _padded_part([query_states[i] for i in numbers], query_format),
                _padded_part([window_states[i] for i in numbers], text_format),
            )

        return to_dense(self.batch_by_length(lengths, interact).float(), pairs.counts)


def _sizes(states: Sequence[torch.Tensor], form: InputFormat) -> np.ndarray:
    """Return how many vectors `_padded_part` makes of the states of each input."""
    return form.length(0, np.array(list(map(len, states))) - form.specials)


def _padded_part(states: Sequence[torch.Tensor], form: InputFormat) -> Part:
    """Return the states of separate inputs, padded before the last special tokens as the format says."""
    suffix_size = len(form.suffix)
    content, mask = padded_states([state[: len(state) - suffix_size] for state in states])
    missing = 0 if form.window_size is None else int(form.length(0, 0)) - suffix_size - content.shape[1]
    suffix = torch.stack([state[len(state) - suffix_size :] for state in states])
    vectors = torch.cat([nn.functional.pad(content, (0, 0, 0, missing)), suffix], 1)
    real = torch.cat([nn.functional.pad(mask, (0, missing)), mask.new_ones(len(states), suffix_size)], 1)
    return Part(vectors, real, 0, form.window_size is not None)
