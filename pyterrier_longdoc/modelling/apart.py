"""Token states of texts that are encoded apart from the query, and so can be remembered.

Shapes: V texts, T tokens of one text, H hidden size of the encoder, E width of what is made of them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import nn
from transformers import AutoConfig, AutoModel

from ..common.caches import EmbeddingCache
from ..common.coverage import RawExplanation
from .backbones.architectures import quiet
from .backbones.classifiers import Representation
from .backbones.load import Backbone, build_backbone, check_folder, load_backbone, load_tokenizer
from .batching import Encoded, PairLayout, of_documents
from .encoder import WindowEncoder, micro_batches
from .fingerprint import WeightsWatch
from .heads.base import Head
from .scorer import TOKEN_BLOCK_CHARACTERS, LongDocScorer
from .vectors import VectorTransformer, first_state, join, projection, random_vector, vector_transformer
from .windows import Windows


class StateEncoder:
    """Encodes token sequences; in inference each distinct one once, as long as it is remembered.

    States are worth nothing after the weights that made them have been trained or loaded: whoever scores calls `begin`
    first, so that no such change goes unnoticed.

    Args:
        max_bytes: most memory for remembered states; the least recently used ones go first. None for the bound of
            embeddings.
    """

    def __init__(self, max_bytes: int | None = None) -> None:
        self.cache = EmbeddingCache() if max_bytes is None else EmbeddingCache(max_bytes)
        self._weights = WeightsWatch()

    def __deepcopy__(self, memo: dict[int, Any]) -> StateEncoder:
        return StateEncoder(self.cache.max_bytes)

    def __reduce__(self) -> tuple[Any, ...]:
        return StateEncoder, (self.cache.max_bytes,)

    def begin(self, encoder: WindowEncoder, project: nn.Module) -> None:
        """At the start of a run: forgets the states that other weights have made.

        Args:
            encoder: see `__call__`.
            project: the same.
        """
        self._forget_if_changed(encoder, project, contents=True)

    def __call__(
        self, encoder: WindowEncoder, project: nn.Module, sequences: Sequence[np.ndarray], layout: PairLayout
    ) -> list[torch.Tensor]:
        """States of sequences; equal ones are encoded once.

        Args:
            encoder: the encoder.
            project: what its states go through before they are kept.
            sequences: V arrays of token ids.
            layout: how a sequence becomes an input, as the window of a pair with an empty query.

        Returns:
            V tensors `(T, E)` in fp32, of the real tokens, special ones included; with their graph where gradients
            are on.
        """
        keys = [sequence.tobytes() for sequence in sequences]
        distinct = dict(zip(keys, sequences, strict=True))
        device = next(encoder.parameters()).device
        if torch.is_grad_enabled():
            self._weights.forget()  # training follows
            states = dict(zip(distinct, self._encode(encoder, project, list(distinct.values()), layout), strict=True))
            return [states[key] for key in keys]
        setting = (layout, _precision(device), encoder.training)
        # Runs, at whose start `begin` has read all weights, score in inference mode.
        self._forget_if_changed(encoder, project, contents=not torch.is_inference_mode_enabled())
        known = {key: kept for key in distinct if (kept := self.cache.get((setting, key))) is not None}
        states = {key: torch.from_numpy(kept).to(device) for key, kept in known.items()}
        new = [key for key in distinct if key not in states]
        if new:
            made = self._encode(encoder, project, [distinct[key] for key in new], layout)
            for key, state in zip(new, made, strict=True):
                states[key] = state
                self.cache.put((setting, key), state.cpu().numpy())
        return [states[key] for key in keys]

    def _encode(
        self, encoder: WindowEncoder, project: nn.Module, sequences: list[np.ndarray], layout: PairLayout
    ) -> list[torch.Tensor]:
        empty = np.zeros(0, dtype=np.int32)
        device = next(encoder.parameters()).device
        made: dict[int, torch.Tensor] = {}
        for part in micro_batches([layout.length(0, len(sequence)) for sequence in sequences]):
            batch = layout.collate([empty] * len(part), [[sequences[i]] for i in part], device)
            made |= zip(part, (project(states).float() for states in encoder.token_states(batch)), strict=True)
        return [made[i] for i in range(len(sequences))]

    def _forget_if_changed(self, encoder: WindowEncoder, project: nn.Module, *, contents: bool) -> None:
        if self._weights.changed(encoder, project, contents=contents):
            self.cache.clear()


def by_length(
    encoder: WindowEncoder,
    lengths: Sequence[int],
    make: Callable[[list[int]], torch.Tensor],
    on_share: Callable[[float], None] | None,
) -> torch.Tensor:
    """`(V, E)` vectors of V inputs, made in batches of like length.

    Args:
        encoder: whose limits on a pass hold.
        lengths: V lengths in tokens.
        make: makes the `(B, E)` vectors of the inputs with these numbers.
        on_share: called after each batch with its share of the inputs, for a progress bar.
    """
    order = sorted(range(len(lengths)), key=lengths.__getitem__)
    vectors = []
    for rows in encoder.passes([lengths[i] for i in order], torch.tensor(order)):
        vectors.append(make(rows.tolist()))
        if on_share is not None:
            on_share(len(rows) / len(order))
    made = torch.cat(vectors)
    return made[torch.tensor(order, device=made.device).argsort()]


def _precision(device: torch.device) -> tuple[Any, ...]:
    if not torch.is_autocast_enabled(device.type):
        return (torch.float32,)
    return (torch.get_autocast_dtype(device.type),)


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

    def begin(self, queries: Sequence[str], dtype: torch.dtype) -> list[np.ndarray]:
        """See the base class."""
        self.states.begin(self.encoder, self.interaction.project)
        return super().begin(queries, dtype)

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
        asking = [query for query, group in zip(queries, windows, strict=True) for _ in group]
        return of_documents(self._interact(asking, texts, on_share).float(), windows)

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
        """`(V, I)` vectors."""
        lengths = [len(query) + len(window) + _SPECIALS for query, window in zip(queries, windows, strict=True)]

        def interact(chosen: list[int]) -> torch.Tensor:
            return self.interaction([queries[i] for i in chosen], [windows[i] for i in chosen])

        return by_length(self.encoder, lengths, interact, on_share)


def _padded(states: Sequence[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    lengths = torch.tensor([len(state) for state in states], device=states[0].device)
    padded = nn.utils.rnn.pad_sequence(list(states), batch_first=True)
    return padded, torch.arange(padded.shape[1], device=padded.device) < lengths.unsqueeze(1)


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
    check_folder(name)
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
    """One vector per document, and what it was made of.

    Attributes:
        queries: B arrays of token ids.
        windows: for each document the `(T, H)` states of its windows.
    """

    queries: Sequence[np.ndarray] = ()
    windows: Sequence[Sequence[torch.Tensor]] = ()


class MoresScorer(LongDocScorer):
    """Scores (query, text) pairs: windows encoded apart, a decoder over the query, the final layer.

    The decoder's attention within the query is bidirectional. Its state at the query's last token goes through a
    dense layer with tanh, as in BART's classifiers. States of windows are remembered while it scores, within a bound
    on their memory (`states.cache`), until the weights change.

    Args:
        backbone: the loaded encoder and decoder.

    All other arguments: see `LongDocScorer`.
    """

    build_backbone = staticmethod(build_encoder_decoder)

    def __init__(self, backbone: EncoderDecoder, windows: Windows, head: Head, **reading: Any) -> None:
        self._text_layout = backbone.text_layout()[0]
        super().__init__(backbone, windows, head, **reading)
        self.decoder = backbone.decoder
        width = backbone.hidden_size
        self.representation = Representation(nn.Linear(width, width), nn.Tanh(), dropout=0.1)
        self.states = StateEncoder()

    def _capacity(self, max_query_len: int, layout: PairLayout) -> int | None:
        if self._max_length is None:
            return None
        room = self._max_length - self._text_layout.specials
        return room if max_query_len <= room else room - max_query_len

    def begin(self, queries: Sequence[str], dtype: torch.dtype) -> list[np.ndarray]:
        """See the base class."""
        self.states.begin(self.encoder, nn.Identity())
        return super().begin(queries, dtype)

    def block_characters(self) -> int:
        """See the base class."""
        return TOKEN_BLOCK_CHARACTERS

    def _encode_windows(
        self,
        query_ids: Sequence[np.ndarray],
        windows: Sequence[Sequence[np.ndarray]],
        on_share: Callable[[float], None] | None,
    ) -> Encoded:
        flat = [window for group in windows for window in group]
        layout = self._text_layout.fixed(0, self.windows.largest) if self.pad_query else self._text_layout
        states = iter(self.states(self.encoder, nn.Identity(), flat, layout))
        of_document = [[next(states) for _ in group] for group in windows]
        vectors = self._decode(query_ids, of_document, on_share)
        mask = torch.ones(len(windows), 1, dtype=torch.bool, device=vectors.device)
        return Memory(vectors.unsqueeze(1), mask, queries=query_ids, windows=of_document)

    def _explain(self, encoded: Encoded) -> list[RawExplanation]:
        if not isinstance(encoded, Memory):
            raise TypeError("only documents that this scorer has encoded can be explained")
        pairs = [
            (query, [window]) for query, group in zip(encoded.queries, encoded.windows, strict=True) for window in group
        ]
        vectors = self._decode([query for query, _ in pairs], [group for _, group in pairs], None).unsqueeze(1)
        scores = iter(self.head(Encoded(vectors, torch.ones_like(vectors[..., 0], dtype=torch.bool))).tolist())
        return [RawExplanation([next(scores) for _ in group], None, None) for group in encoded.windows]

    def _decode(
        self,
        query_ids: Sequence[np.ndarray],
        windows: Sequence[Sequence[torch.Tensor]],
        on_share: Callable[[float], None] | None,
    ) -> torch.Tensor:
        """`(B, H)` vectors in fp32."""
        memories = [torch.cat(list(group)) for group in windows]

        def decode(chosen: list[int]) -> torch.Tensor:
            return self._decode_batch([query_ids[i] for i in chosen], [memories[i] for i in chosen])

        return by_length(self.encoder, list(map(len, memories)), decode, on_share)

    def _decode_batch(self, query_ids: list[np.ndarray], memories: list[torch.Tensor]) -> torch.Tensor:
        empty = np.zeros(0, dtype=np.int32)
        batch = self._text_layout.collate([empty] * len(query_ids), [[query] for query in query_ids], self.device)
        memory = nn.utils.rnn.pad_sequence(memories, batch_first=True)  # (B, D, H)
        lengths = torch.tensor([len(m) for m in memories], device=self.device)
        seen = torch.arange(memory.shape[1], device=self.device) < lengths.unsqueeze(1)  # (B, D)
        states = self.decoder(
            inputs_embeds=self.encoder.backbone.embed_tokens(batch.input_ids),
            attention_mask=_bidirectional(batch.attention_mask),
            encoder_hidden_states=memory,
            encoder_attention_mask=seen.long(),
            use_cache=False,
        ).last_hidden_state  # (B, Q, H)
        last = states[torch.arange(len(states), device=self.device), batch.lengths - 1]
        return self.representation(last).float()


def _bidirectional(mask: torch.Tensor) -> torch.Tensor:
    """`(B, 1, Q, Q)` to add to attention logits: every real token sees every real token; a decoder's own is causal."""
    hidden = torch.zeros(mask.shape, device=mask.device).masked_fill(~mask, torch.finfo(torch.float32).min)
    return hidden[:, None, None, :].expand(-1, 1, mask.shape[1], -1)
