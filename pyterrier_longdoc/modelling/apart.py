"""Models whose queries and windows are encoded apart, so that what is made of a window serves all queries.

PARADE-LATEIR (Boytsov et al. 2025, appendix, "Miscellaneous models"): a second, smaller transformer lets the states of
query and window interact; the vectors that it makes of the windows are aggregated by PARADE's transformer head.

MORES+, experimental: a decoder reads the query and looks at all windows at once. L. Gao, J. Callan, "Long Document
Re-ranking with Modular Re-ranker", SIGIR 2022, as far as it is known: their code is incomplete, and in Boytsov et al.
2025 (the same appendix) a reimplementation did not beat BM25. In that one, windows of different documents got mixed up
wherever a batch held more than one; here each document has its own memory.

Shapes: B documents, N windows, V windows of all documents, T tokens of one text with its special tokens, Q of a query,
D tokens of all windows of a document, H hidden size of the encoder, I of the interaction, E width of what is
remembered.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, islice
from typing import Any

import numpy as np
import torch
from torch import nn
from transformers import AutoConfig, AutoModel

from ..common.caches import EmbeddingCache
from ..common.coverage import Work
from ..common.hub import reachable
from .backbones.architectures import quiet
from .backbones.classifiers import Representation
from .backbones.load import Backbone, build_backbone, checkpoint_config, load_encoder, load_tokenizer
from .batching import NOTHING, ApartLayout, Encoded, PairLayout, for_each_window, to_dense
from .devices import current_dtype, in_own_memory
from .encoder import TOKEN_BLOCK_CHARACTERS, WindowEncoder, micro_batches, of_distinct
from .fingerprint import WeightsWatch
from .settings import Settings
from .vectors import Part, VectorTransformer, first_state, join, projection, random_vector, vector_transformer


class ApartEncoder(WindowEncoder):
    """Base of the encoders that read queries and windows apart, in inference each distinct one once while remembered.

    States are worth nothing after the weights that made them have been trained or loaded: whoever scores calls `begin`
    first, so that no such change goes unnoticed.

    Args:
        backbone: encodes queries and windows, each by itself.

    Attributes:
        cache: the remembered states, within a bound on their memory.
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

    def begin(self, settings: Settings) -> None:
        self._forget_if_changed(contents=True)

    def _forget_if_changed(self, *, contents: bool) -> None:
        if self._weights.changed(self.backbone, self.projection, contents=contents):
            self.cache.clear()

    def states(
        self, sequences: Sequence[np.ndarray], layout: PairLayout, settings: Settings, work: Work | None
    ) -> list[torch.Tensor]:
        """States of token sequences; equal ones are encoded once.

        Args:
            sequences: V arrays of token ids.
            layout: how a sequence becomes an input, as the window of a pair with an empty query.
            settings: how it is computed.
            work: counts what is computed.

        Returns:
            V tensors `(T, E)` in fp32, of the real tokens, special ones included; with their graph where gradients
            are on.
        """

        def make(distinct: list[np.ndarray]) -> list[torch.Tensor]:
            return self._encode_apart(distinct, layout, settings, work)

        def remembered(distinct: list[np.ndarray]) -> list[torch.Tensor]:
            setting = (layout, current_dtype(self.device), self.training)
            arrays = self.cache.through(setting, distinct, lambda new: (states.cpu().numpy() for states in make(new)))
            return [torch.from_numpy(array).to(self.device) for array in arrays]

        if torch.is_grad_enabled():
            self._weights.forget()  # training follows
            return of_distinct(sequences, make)
        # Runs, at whose start `begin` has read all weights, score in inference mode.
        self._forget_if_changed(contents=not torch.is_inference_mode_enabled())
        return of_distinct(sequences, remembered)

    def _encode_apart(
        self, sequences: list[np.ndarray], layout: PairLayout, settings: Settings, work: Work | None
    ) -> list[torch.Tensor]:
        made: dict[int, torch.Tensor] = {}
        for part in micro_batches(layout.length(0, list(map(len, sequences))).tolist()):
            batch = layout.collate([NOTHING] * len(part), [[sequences[i]] for i in part], self.device)
            states = (self.projection(own).float() for own in self.token_states(batch, settings, work))
            made |= zip(part, states, strict=True)
        return [made[i] for i in range(len(sequences))]

    def room_apart(self, specials: int) -> int | None:
        """Tokens of an input of its own next to special ones; None where nothing limits it."""
        return None if self.longest_input is None else self.longest_input - specials

    def by_length(
        self,
        lengths: Sequence[int],
        make: Callable[[list[int]], torch.Tensor],
        settings: Settings,
        work: Work | None,
    ) -> torch.Tensor:
        """`(V, E)` vectors of V inputs, made in batches of like length.

        Args:
            lengths: V lengths in tokens.
            make: makes the `(B, E)` vectors of the inputs with these numbers.
            settings: with the limits on a batch.
            work: counts what is computed.
        """
        order = sorted(range(len(lengths)), key=lengths.__getitem__)
        vectors = []
        for rows in self.divided([lengths[i] for i in order], torch.tensor(order), settings):
            vectors.append(make(rows.tolist()))
            if work is not None:
                work.advance(sum(lengths[i] for i in rows.tolist()), sum(lengths))
        made = torch.cat(vectors)
        return made[torch.tensor(order, device=made.device).argsort()]


# PARADE-LATEIR.

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
    return _together(load_encoder(name, trust_remote_code=trust_remote_code), vector_transformer(interaction))


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

    States of special tokens are among them, as in Boytsov et al. 2025. In the papers' fixed input layout padding of the
    query and of the window keeps its place, as in their code.

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

    def forward(self, query: Part, window: Part) -> torch.Tensor:
        """Lets each window interact with its query.

        Args:
            query: V queries' projected states, `(V, T, I)`.
            window: the same of their windows.

        Returns:
            `(V, I)`.
        """
        one = query.mask.new_ones(len(query.mask), 1)
        separator = Part(self.sep_vector, one, 0)
        parts = [Part(self.cls_vector, one, 0), separator, query, separator, window, separator]
        return first_state(self.model, *join(parts))


class LateInteractionEncoder(ApartEncoder):
    """Queries and windows encoded apart, then their interaction: one vector for each window.

    Args:
        backbone: the loaded transformers.
    """

    build_backbone = staticmethod(build_late_backbone)

    def __init__(self, backbone: LateBackbone) -> None:
        super().__init__(backbone)
        self.interaction = Interaction(int(backbone.model.config.hidden_size), backbone.interaction)
        self.longest_interaction = backbone.interaction.max_vectors

    def prepare(self, settings: Settings) -> tuple[Settings, ApartLayout]:
        """See the base class; texts have the layout for pairs with an empty query, as in Boytsov et al. 2025."""
        specials = self.pair_layout.specials
        room = self.room_apart(specials)
        together = None if room is None else 2 * room
        if self.longest_interaction is not None:
            together = self.longest_interaction - _SPECIALS - 2 * specials
        settings = settings.within(self.longest_input, together, specials, room)

        query = self.padded(self.pair_layout, settings, 0, settings.max_query_len)
        if query.types is not None:
            query = replace(query, types=(query.types[0],) * 5)
        return settings, ApartLayout(query, self.padded(self.pair_layout, settings, 0, settings.largest_window))

    @property
    def projection(self) -> nn.Module:
        return self.interaction.project

    def forward(
        self,
        queries: Sequence[np.ndarray],
        windows: Sequence[Sequence[np.ndarray]],
        layout: Any,
        settings: Settings,
        *,
        work: Work | None = None,
        **_: Any,
    ) -> Encoded:
        """See the base class; there are no states but the windows' vectors."""
        counts = list(map(len, windows))
        of_query = self.states(queries, layout.query, settings, work)
        of_window = self.states(list(chain.from_iterable(windows)), layout.text, settings, work)
        asking = for_each_window(of_query, windows)
        lengths = (_sizes(asking, layout.query) + _sizes(of_window, layout.text) + _SPECIALS).tolist()

        def interact(chosen: list[int]) -> torch.Tensor:
            return self.interaction(
                _in_place([asking[i] for i in chosen], layout.query),
                _in_place([of_window[i] for i in chosen], layout.text),
            )

        return to_dense(self.by_length(lengths, interact, settings, work).float(), counts)


def _sizes(states: Sequence[torch.Tensor], layout: PairLayout) -> np.ndarray:
    """How many vectors `_in_place` makes of the states of each input."""
    return layout.length(0, np.array(list(map(len, states))) - layout.specials)


def _in_place(states: Sequence[torch.Tensor], layout: PairLayout) -> Part:
    """States of inputs of their own, padded as the layout says: before its last special tokens."""
    ends = len(layout.suffix)
    content, mask = _padded([state[: len(state) - ends] for state in states])
    missing = 0 if layout.window_size is None else int(layout.length(0, 0)) - ends - content.shape[1]
    suffix = torch.stack([state[len(state) - ends :] for state in states])
    vectors = torch.cat([nn.functional.pad(content, (0, 0, 0, missing)), suffix], 1)
    real = torch.cat([nn.functional.pad(mask, (0, missing)), mask.new_ones(len(states), ends)], 1)
    return Part(vectors, real, 0, layout.window_size is not None)


def _padded(states: Sequence[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    lengths = torch.tensor([len(state) for state in states], device=states[0].device)
    padded = nn.utils.rnn.pad_sequence(list(states), batch_first=True)
    return padded, torch.arange(padded.shape[1], device=padded.device) < lengths.unsqueeze(1)


# MORES+.

DEFAULT_BART = "facebook/bart-base"


class ExperimentalWarning(UserWarning):
    """A model is used of which no published result could be confirmed."""


@dataclass(eq=False)
class EncoderDecoder(Backbone):
    """BART taken apart.

    Attributes:
        decoder: without its table of word embeddings, which it shares with the encoder.
    """

    decoder: Any = field(kw_only=True)


def load_encoder_decoder(name: str) -> EncoderDecoder:
    """Loads BART in fp32.

    Args:
        name: a model on the Hugging Face hub, or a folder.

    Raises:
        ValueError: if it is no BART, or weights are missing.
    """
    name = reachable(name)
    checkpoint_config(name)
    config = AutoConfig.from_pretrained(name)
    if config.model_type != "bart":
        raise ValueError(f"checkpoint {name!r} is of type {config.model_type!r}; MORES+ needs 'bart'")
    with quiet():
        model, report = AutoModel.from_pretrained(
            name, config=config, dtype=torch.float32, use_safetensors=True, output_loading_info=True
        )
    if report["missing_keys"]:
        missing = sorted(report["missing_keys"])
        raise ValueError(f"checkpoint {name!r} lacks {len(missing)} weights, among them {missing[:3]}")
    in_own_memory(model)
    return _take_apart(model, load_tokenizer(name))


def build_encoder_decoder(description: dict[str, Any], tokenizer: Any) -> EncoderDecoder:
    """The modules that `EncoderDecoder.describe` described, with random weights, for strict loading afterwards."""
    fields = dict(description["config"])
    config = AutoConfig.for_model(fields.pop("model_type"), **fields)
    config.dtype = torch.float32
    return _take_apart(AutoModel.from_config(config), tokenizer)


def _take_apart(model: Any, tokenizer: Any) -> EncoderDecoder:
    decoder = model.decoder
    decoder.embed_tokens = None
    return EncoderDecoder(model.encoder, tokenizer, None, None, "cls", decoder=decoder)


@dataclass(frozen=True, eq=False)
class Memory(Encoded):
    """One vector per document; those of single windows are made where they are asked for.

    Attributes:
        of_windows: encodes each window as if it were all of its document.
    """

    of_windows: Callable[[], Encoded] = field(kw_only=True)

    def each_window(self) -> tuple[Encoded, torch.Tensor]:
        return self.of_windows().each_window()


class MoresEncoder(ApartEncoder):
    """Windows encoded apart, then a decoder over the query that looks at all of them: one vector for each document.

    The decoder's attention within the query is bidirectional. Its state at the query's last token goes through a
    dense layer with tanh, as in BART's classifiers.

    Args:
        backbone: the loaded encoder and decoder.
    """

    build_backbone = staticmethod(build_encoder_decoder)

    def __init__(self, backbone: EncoderDecoder) -> None:
        super().__init__(backbone)
        self.text_layout = backbone.text_layout()[0]
        self.decoder = backbone.decoder
        width = backbone.hidden_size
        self.represent = Representation(nn.Linear(width, width), nn.Tanh(), dropout=0.1)

    def prepare(self, settings: Settings) -> tuple[Settings, ApartLayout]:
        specials = self.text_layout.specials
        room = self.room_apart(specials)
        settings = settings.within(self.longest_input, None if room is None else 2 * room, specials, room)
        return settings, ApartLayout(
            self.text_layout, self.padded(self.text_layout, settings, 0, settings.largest_window)
        )

    def forward(
        self,
        queries: Sequence[np.ndarray],
        windows: Sequence[Sequence[np.ndarray]],
        layout: Any,
        settings: Settings,
        *,
        work: Work | None = None,
        **_: Any,
    ) -> Memory:
        """See the base class; there are no states but the documents' vectors."""
        counts = list(map(len, windows))
        states = self.states(list(chain.from_iterable(windows)), layout.text, settings, work)
        own = iter(states)
        memories = [torch.cat(list(islice(own, count))) for count in counts]
        asking = for_each_window(queries, windows)
        vectors = self._decode(queries, memories, layout.query, settings, work)
        return Memory(
            cls=vectors.unsqueeze(1),
            mask=torch.ones(len(vectors), 1, dtype=torch.bool, device=vectors.device),
            of_windows=lambda: to_dense(self._decode(asking, states, layout.query, settings, None), counts),
        )

    def _decode(
        self,
        queries: Sequence[np.ndarray],
        memories: Sequence[torch.Tensor],
        layout: PairLayout,
        settings: Settings,
        work: Work | None,
    ) -> torch.Tensor:
        """`(B, H)` vectors in fp32."""

        def decode(chosen: list[int]) -> torch.Tensor:
            return self._decode_batch([queries[i] for i in chosen], [memories[i] for i in chosen], layout)

        return self.by_length(list(map(len, memories)), decode, settings, work)

    def _decode_batch(
        self, queries: list[np.ndarray], memories: list[torch.Tensor], layout: PairLayout
    ) -> torch.Tensor:
        batch = layout.collate([NOTHING] * len(queries), [[query] for query in queries], self.device)
        memory, seen = _padded(memories)  # (B, D, H), (B, D)
        states = self.decoder(
            inputs_embeds=self.backbone.embed_tokens(batch.input_ids),
            attention_mask=_bidirectional(batch.attention_mask),
            encoder_hidden_states=memory,
            encoder_attention_mask=seen.long(),
            use_cache=False,
        ).last_hidden_state  # (B, Q, H)
        last = states[torch.arange(len(states), device=self.device), batch.lengths - 1]
        return self.represent(last).float()


def _bidirectional(mask: torch.Tensor) -> torch.Tensor:
    """`(B, 1, Q, Q)` to add to attention logits: every real token sees every real token; a decoder's own is causal."""
    hidden = torch.zeros(mask.shape, device=mask.device).masked_fill(~mask, torch.finfo(torch.float32).min)
    return hidden[:, None, None, :].expand(-1, 1, mask.shape[1], -1)
