"""Models that encode queries and windows separately, so that the states of a window serve all queries.

PARADE-LATEIR (Boytsov et al. 2025, appendix, "Miscellaneous models"): in a second, smaller transformer, the states of
query and window interact, and PARADE's transformer head aggregates the vectors of the windows.

Shapes: B documents, N windows, V windows of all documents, T tokens of one text with its special tokens, E width of
the cached states, I width of the interaction.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import nn

from ..common.caches import EmbeddingCache
from ..common.coverage import Coverage
from .aggregators import Part, VectorTransformer, first_state, join, projection, random_vector, vector_transformer
from .backbones.backbone import Backbone
from .backbones.load import build_backbone, load_encoder
from .devices import current_dtype
from .encoder import TOKEN_BLOCK_CHARACTERS, WindowEncoder, distinct
from .inputs import Encoded, Input, Settings, padded, to_dense
from .reader import PairInputs, SeparateReader, Specials, one_separator, specials_of_pair
from .weights import version_of

DEFAULT_INTERACTION = "cross-encoder/ms-marco-MiniLM-L2-v2"
"""The interaction transformer of Boytsov et al. 2025."""

_SPECIALS = 4
"""Vectors of an interaction that are neither the query's nor the window's: `c`, and three times `s`."""


class SeparateEncoder(WindowEncoder):
    """Base of the encoders that read queries and windows separately; in inference, they cache the states."""

    block_characters = TOKEN_BLOCK_CHARACTERS
    reader: SeparateReader
    vector_rules: Hashable = None
    """What cached states depend on besides weights and inputs."""

    def __init__(self, backbone: Backbone) -> None:
        super().__init__(backbone)
        self.cache = EmbeddingCache()

    @property
    def projection(self) -> nn.Module:
        """The layer that states go through before they are cached."""
        return nn.Identity()

    def use(self, settings: Settings, needs: str) -> None:
        super().use(settings, needs)
        self.reader.cache = self.cache

    def states(self, inputs: Sequence[Input], coverage: Coverage | None, side: str = "document") -> list[torch.Tensor]:
        """Return V tensors `(T, E)` in fp32, the states of V inputs; equal inputs are encoded once.

        Args:
            inputs: V inputs.
            coverage: counts the computed tokens.
            side: `"query"` or `"document"`, the kind of inputs, for encoders that treat the two differently.
        """
        unique, numbers, keys = distinct(inputs)
        if torch.is_grad_enabled():
            made = self.make_states(unique, coverage, side)
        else:
            device = self.device
            made = [torch.from_numpy(array).to(device) for array in self.cached(unique, keys, coverage, side)]
        return [made[number] for number in numbers]

    def cached(
        self, inputs: Sequence[Input], keys: Sequence[bytes], coverage: Coverage | None, side: str
    ) -> list[np.ndarray]:
        """Return the states of distinct inputs with these keys; those in the cache are not computed."""
        weights = version_of(self.backbone), version_of(self.projection)
        setting = side, self.training, self.vector_rules, current_dtype(self.device), self.computed_in[1], *weights

        def make(new: list[int]) -> Iterable[np.ndarray]:
            return (state.cpu().numpy() for state in self.make_states([inputs[i] for i in new], coverage, side))

        return self.cache.get_or_compute([(setting, key) for key in keys], make)

    def make_states(self, inputs: Sequence[Input], coverage: Coverage | None, side: str) -> list[torch.Tensor]:
        """Return the `(T, E)` states of each input, in fp32, as they are cached."""
        return [self.projection(state).float() for state in self.token_states(inputs, coverage)]

    def batch_by_length(self, lengths: Sequence[int], make: Callable[[Sequence[int]], torch.Tensor]) -> torch.Tensor:
        """Return `(V, E)` vectors of V inputs; `make` gets the indices of inputs, in batches of similar length."""
        order = np.argsort(lengths, kind="stable").tolist()
        vectors = torch.cat([make(rows) for rows in self.divide([lengths[i] for i in order], order)])
        return vectors[torch.tensor(order, device=vectors.device).argsort()]


@dataclass(eq=False)
class LateBackbone(Backbone):
    """The two transformers before the aggregation."""

    interaction: VectorTransformer = field(kw_only=True)

    @property
    def hidden_size(self) -> int:
        """I, the width of the head's input."""
        return self.interaction.output_width

    def describe(self) -> dict[str, Any]:
        """Return a JSON-able description from which `build_late_backbone` creates the same modules."""
        return {**super().describe(), "interaction": self.interaction.describe()}


def load_late_backbone(name: str, interaction: str, *, trust_remote_code: bool = False) -> LateBackbone:
    """Load both transformers; from cross-encoders, only their layers."""
    return _late_backbone(load_encoder(name, trust_remote_code=trust_remote_code), vector_transformer(interaction))


def build_late_backbone(description: dict[str, Any], tokenizer: Any) -> LateBackbone:
    """Return the modules that `LateBackbone.describe` described, with random weights, for strict loading afterwards."""
    return _late_backbone(build_backbone(description, tokenizer), vector_transformer(description["interaction"]))


def _late_backbone(backbone: Backbone, interaction: VectorTransformer) -> LateBackbone:
    # The last steps of a cross-encoder expect a state that depends on the query.
    parts = vars(backbone) | {"representation": None, "final": None}
    return LateBackbone(**parts, interaction=interaction)


class Interaction(nn.Module):
    """One vector per window: the state at `c` of a transformer over `[c, s, query's states, s, window's states, s]`.

    The states include those of special tokens, as in Boytsov et al. 2025. In the papers' fixed input layout, the
    padding of query and window stays in place, as in their code.
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


class LateReader(SeparateReader):
    """Reads windows and queries, each with an empty query, as in Boytsov et al. 2025; both fit one interaction."""

    def make_specials(self, backbone: Any) -> Specials:
        specials = specials_of_pair(backbone)
        vectors, types = backbone.interaction.max_vectors, specials.types
        self.limit = None if vectors is None else vectors - _SPECIALS - 2 * len(specials)
        if self.settings.layout.pad_query:
            specials = one_separator(specials)
        self.query_specials = specials if types is None else replace(specials, types=(types[0],) * 5)
        return specials

    def limits(self) -> tuple[int, int, int] | None:
        limits = super().limits()
        if self.limit is None:
            return limits
        of_query, of_window, _ = limits or (self.limit, self.limit, self.limit)
        return of_query, of_window, self.limit

    def part(self, states: Sequence[torch.Tensor], side: int) -> Part:
        """Return the states of separate queries (side 0) or windows, padded before the last special tokens."""
        suffix_size = len((self.query_specials, self.specials)[side].suffix)
        content, mask = padded([state[: len(state) - suffix_size] for state in states])
        missing = max(0, self.part_size(0, side) - suffix_size - content.shape[1]) if self.sizes[side] else 0
        suffix = torch.stack([state[len(state) - suffix_size :] for state in states])
        vectors = torch.cat([nn.functional.pad(content, (0, 0, 0, missing)), suffix], 1)
        real = torch.cat([nn.functional.pad(mask, (0, missing)), mask.new_ones(len(states), suffix_size)], 1)
        return Part(vectors, real, 0, self.sizes[side] > 0)

    def part_size(self, states: int, side: int) -> int:
        """Return the number of vectors that `part` returns for this number of states."""
        specials = len((self.query_specials, self.specials)[side])
        return max(1, specials + max(states - specials, self.sizes[side]))


class LateInteractionEncoder(SeparateEncoder):
    """Encodes queries and windows separately, then lets them interact: one vector for each window."""

    build_backbone = staticmethod(build_late_backbone)
    reader: LateReader

    def __init__(self, backbone: LateBackbone) -> None:
        super().__init__(backbone)
        self.interaction = Interaction(int(backbone.model.config.hidden_size), backbone.interaction)

    def make_reader(self, settings: Settings) -> LateReader:
        return LateReader(self.origin, settings)

    @property
    def projection(self) -> nn.Module:
        return self.interaction.project

    def forward(self, pairs: Sequence[PairInputs], *, coverage: Coverage | None = None, **_: Any) -> Encoded:
        """Encode windows as one vector each; there are no other states."""
        reader, counts = self.reader, [len(pair.windows) for pair in pairs]
        queries = self.states([pair.query_input for pair in pairs], coverage, "query")
        windows = self.states([one for pair in pairs for one in pair.windows], coverage)
        queries = [query for query, count in zip(queries, counts, strict=True) for _ in range(count)]
        sizes = [
            reader.part_size(len(query), 0) + reader.part_size(len(window), 1) + _SPECIALS
            for query, window in zip(queries, windows, strict=True)
        ]

        def interact(rows: Sequence[int]) -> torch.Tensor:
            return self.interaction(
                reader.part([queries[i] for i in rows], 0), reader.part([windows[i] for i in rows], 1)
            )

        return to_dense(self.batch_by_length(sizes, interact).float(), counts)
