"""The model behind `BiEncoder`: embeds queries and windows apart and compares them.

Shapes: B documents, N windows of a document, V token sequences, H width of an embedding.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

import numpy as np
import torch
from torch import nn

from ..common.caches import EmbeddingCache
from ..common.coverage import Work
from ..common.files import folder_digest
from ..common.hub import reachable
from ..common.packaged import encoder_folder
from .backbones.load import Backbone, load_encoder
from .backbones.modular import Dense, load_dense, pooling_of, read_json
from .batching import NOTHING, ApartLayout, Encoded, PairLayout, QueryStates, to_dense
from .devices import current_dtype
from .encoder import WindowEncoder, of_distinct
from .fingerprint import WeightsWatch
from .settings import Settings
from .texts import TokenCache

POOLINGS = ("mean", "cls")
SIMILARITIES = ("cosine", "dot")


class EmbeddingEncoder(WindowEncoder):
    """Embeds queries and windows apart: each distinct one once, as long as it is remembered.

    Args:
        shared: the loaded encoder with its remembered embeddings, which are forgotten when its weights change.
        pooling: `"mean"` of the token states (special tokens included) or `"cls"`, the first token's; None for what
            the checkpoint names, else `"mean"`.
        similarity: `"cosine"` or `"dot"`; None for what the checkpoint names, else cosine.
        query_prefix: put before every query; None for what the checkpoint names.
        passage_prefix: put before every window; None for what the checkpoint names.
        position_step: positions of short inputs are this far apart; see `spread_positions`.
    """

    once_for_all_queries = True

    def __init__(
        self,
        shared: SharedEncoder,
        *,
        pooling: str | None = None,
        similarity: str | None = None,
        query_prefix: str | None = None,
        passage_prefix: str | None = None,
        position_step: int = 1,
    ) -> None:
        trained = shared.settings
        query_prefix = trained.query_prefix if query_prefix is None else query_prefix
        passage_prefix = trained.passage_prefix if passage_prefix is None else passage_prefix
        if (query_prefix or passage_prefix) and not trained.pools_prompt:
            raise ValueError("this checkpoint leaves its prompt out of the mean, which BiEncoder's prefixes do not")
        pooling = _known("pooling", pooling, trained.pooling, POOLINGS)
        backbone = replace(shared.backbone, pooling=pooling, representation=trained.projection)
        super().__init__(backbone)
        self.shared = shared
        self.similarity = _known("similarity", similarity, trained.similarity, SIMILARITIES)
        self.prefixes = {"query_prefix": query_prefix, "passage_prefix": passage_prefix}
        (query, query_lead), (text, text_lead) = map(backbone.text_layout, self.prefixes.values())
        self.layout = ApartLayout(
            spread_positions(query, backbone, position_step),
            spread_positions(text, backbone, position_step),
            query_lead,
            text_lead,
        )

    def prepare(self, settings: Settings) -> tuple[Settings, ApartLayout]:
        if self.longest_input is None:
            return settings, self.layout
        layouts = (self.layout.query, settings.max_query_len or 1), (self.layout.text, 1)
        for (name, prefix), (layout, tokens) in zip(self.prefixes.items(), layouts, strict=True):
            room = self.longest_input - layout.specials
            if room < 1:
                raise ValueError(f"{name}={prefix!r} alone is longer than the backbone's {self.longest_input} tokens")
            if room < tokens:
                raise ValueError(
                    f"max_query_len={tokens} does not fit: next to prefix and special tokens the backbone takes {room} "
                    f"query tokens"
                )
        query = settings.max_query_len or self.longest_input - self.layout.query.specials
        return replace(settings, windows=settings.windows_within(room), max_query_len=query), self.layout

    def begin(self, settings: Settings) -> None:
        self.shared.forget_if_changed(self)

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
        """Embeds the windows of B documents and their queries.

        Returns:
            `cls (B, N, H)`, embeddings of windows, and `query.states (B, 1, H)`, those of queries.
        """
        # A document that several queries ask for is the same object.
        distinct = {id(group): group for group in windows}
        # Queries are few: progress is that of the windows.
        counting = None if work is None else Work(work.coverage)
        of_query = self._embed(queries, layout.query, settings, counting)  # (B, H)
        made = self._embed(list(chain.from_iterable(distinct.values())), layout.text, settings, work)
        of_group = dict(zip(distinct, made.split(list(map(len, distinct.values()))), strict=True))
        of_window = torch.cat([of_group[id(group)] for group in windows])  # (V, H)
        mask = torch.ones(len(of_query), 1, dtype=torch.bool, device=self.device)
        query = QueryStates(of_query.unsqueeze(1), mask)
        return replace(to_dense(of_window, list(map(len, windows))), query=query)

    def _embed(
        self, sequences: Sequence[np.ndarray], layout: PairLayout, settings: Settings, work: Work | None
    ) -> torch.Tensor:
        """`(V, H)` fp32 embeddings of V token sequences; those seen before are not encoded again."""

        def embed(new: list[np.ndarray]) -> np.ndarray:
            vectors = self.vectors([NOTHING] * len(new), new, layout, settings, work)
            if self.similarity == "cosine":
                vectors = nn.functional.normalize(vectors, dim=-1)
            return vectors.cpu().numpy()

        setting = (layout, self.pooling, self.similarity, current_dtype(self.device), self.device.type)
        found = of_distinct(sequences, lambda distinct: self.shared.cache.through(setting, distinct, embed))
        return torch.from_numpy(np.stack(found)).to(self.device)


class Similarity(nn.Module):
    """The head of a bi-encoder: `(B, N)` products of window and query embeddings, of which one makes the score.

    Args:
        aggregation: `"first"`, `"max"` or `"avg"`.
    """

    needs = "query"

    def __init__(self, aggregation: str) -> None:
        super().__init__()
        self.aggregation = aggregation

    def forward(self, encoded: Encoded) -> torch.Tensor:
        """`(B,)` float64 scores."""
        scores = self.window_scores(encoded)
        if self.aggregation == "first":
            return scores[:, 0]
        return scores.nan_to_num(-torch.inf).amax(1) if self.aggregation == "max" else scores.nanmean(1)

    def window_scores(self, encoded: Encoded) -> torch.Tensor:
        """`(B, N)` float64 similarities; NaN where there is no window."""
        if encoded.query is None:
            raise ValueError("the embeddings of the queries are missing")
        # Row by row: a matrix product's rounding may depend on what else is in the matrix.
        scores = (encoded.cls * encoded.query.states).sum(-1, dtype=torch.float64)
        return scores.masked_fill(~encoded.mask, torch.nan)

    def window_weights(self, encoded: Encoded) -> None:
        """There is no attention over windows."""

    def check_windows(self, windows: int, query: int = 0) -> None:
        """Any number will do."""


def _known(what: str, given: str | None, trained: str | None, known: tuple[str, ...]) -> str:
    """What is asked for, else what the checkpoint was trained with, else the first of what is known."""
    chosen = given or trained or known[0]
    if chosen not in known:
        raise ValueError(
            f"this checkpoint was trained with the {what} {chosen!r}, which BiEncoder does not have; {what}="
            f"{' or '.join(map(repr, known))} asks for another one all the same"
        )
    return chosen


class SharedEncoder:
    """A loaded encoder, which this package never trains, with its remembered embeddings and tokens.

    Args:
        backbone: the loaded encoder.
        settings: how it was trained to embed.
    """

    def __init__(self, backbone: Backbone, settings: EmbeddingSettings) -> None:
        self.backbone = backbone
        self.settings = settings
        self.cache = EmbeddingCache()
        self.tokens = TokenCache()
        self._weights = WeightsWatch()

    def forget_if_changed(self, encoder: nn.Module) -> None:
        """Forgets the embeddings if someone has changed the weights.

        Args:
            encoder: what makes embeddings of this encoder's states.
        """
        if self._weights.changed(encoder, contents=True):
            self.cache.clear()


_LOADED: weakref.WeakValueDictionary[tuple[Any, ...], SharedEncoder] = weakref.WeakValueDictionary()


def shared_encoder(name: str, device: torch.device, *, trust_remote_code: bool = False) -> SharedEncoder:
    """The encoder of this name, loaded once for all transformers that use it on a device at the same time.

    A folder whose files have changed since is loaded anew.

    Bi-encoders with several aggregations, and selectors of windows, then embed a text once between them. A device has
    weights of its own: a model that moves would take those of all others with it.

    Args:
        name: a model on the Hugging Face hub, or a folder.
        device: where its weights are.
        trust_remote_code: run modelling code that the checkpoint brings along.
    """
    name = encoder_folder(name)
    if device.type == "cuda" and device.index is None:
        device = torch.device("cuda", torch.cuda.current_device())
    key = (name, folder_digest(name), trust_remote_code, device)
    encoder = _LOADED.get(key)
    if encoder is None:
        name = reachable(name)
        encoder = SharedEncoder(load_encoder(name, trust_remote_code=trust_remote_code), embedding_settings(name))
        _LOADED[key] = encoder
    return encoder


_PASSAGE_PROMPTS = ("document", "passage", "corpus")


@dataclass(frozen=True, eq=False)
class EmbeddingSettings:
    """How a checkpoint's token states become one embedding.

    Attributes:
        pooling: `"mean"`, `"cls"`, or the name of one that `BiEncoder` does not have; None if nothing is said.
        projection: the dense layer after pooling; None without one.
        pools_prompt: whether the tokens of a prefix count in the mean.
        similarity: `"cosine"`, `"dot"`, or the name of one that `BiEncoder` does not have; None if nothing is said.
        query_prefix: put before queries.
        passage_prefix: put before passages.
    """

    pooling: str | None = None
    projection: Dense | None = None
    pools_prompt: bool = True
    similarity: str | None = None
    query_prefix: str = ""
    passage_prefix: str = ""


def embedding_settings(name: str) -> EmbeddingSettings:
    """Reads `modules.json` and what it points to, and `config_sentence_transformers.json`.

    Args:
        name: a model on the Hugging Face hub, or a folder.

    Returns:
        The settings; empty ones for a checkpoint without these files.

    Raises:
        ValueError: for a module after the encoder that this package cannot apply, or whose weights are missing.
    """
    modules = read_json(name, "modules.json")
    pooling, projection, pools_prompt = None, None, True
    kinds: list[str] = []
    for module in modules or []:
        kind = module["type"].rsplit(".", 1)[-1]
        if kind == "Pooling":
            config = read_json(name, f"{module['path']}/config.json") or {}
            pooling, pools_prompt = pooling_of(config), config.get("include_prompt", True)
        elif kind == "Dense" and kinds[-1:] == ["Pooling"]:
            projection = load_dense(name, module["path"])
        elif kind not in ("Transformer", "Normalize"):
            after = f" after {kinds[-1]}" if kinds else ""
            raise ValueError(
                f"checkpoint {name!r} has a {kind} layer{after} for its embeddings, which BiEncoder cannot apply"
            )
        kinds.append(kind)
    general = read_json(name, "config_sentence_transformers.json") or {}
    prompts = general.get("prompts") or {}
    default = prompts.get(general.get("default_prompt_name"), "")
    return EmbeddingSettings(
        pooling,
        projection,
        pools_prompt,
        similarity=general.get("similarity_fn_name"),
        query_prefix=prompts.get("query") or default,
        passage_prefix=next((prompts[key] for key in _PASSAGE_PROMPTS if prompts.get(key)), default),
    )


def spread_positions(layout: PairLayout, backbone: Backbone, step: int) -> PairLayout:
    """The layout, with positions `0, step, 2 step, ...` for inputs that are short enough for them.

    Each input is judged by its own number of tokens, special ones included. Differs from the LongEmbed code, which
    judges whole batches, so that a short text's embedding depends on what it is batched with.

    Args:
        layout: how a text becomes an input.
        backbone: the encoder.
        step: 8 for E5-4K; 1 changes nothing.

    Raises:
        ValueError: if the encoder has no table of positions that could be used so.
    """
    if step == 1:
        return layout
    kind, longest = backbone.family, backbone.longest_input
    if kind != "bert" or longest is None or longest < step:
        raise ValueError(
            f"position_step={step} needs a BERT with a stretched table of positions, such as E5-4K; this backbone is "
            f"of type {kind!r} and takes {longest} tokens: leave position_step at 1"
        )
    return replace(layout, spread=(longest // step, step))
