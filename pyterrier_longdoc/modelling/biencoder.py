"""The model behind `BiEncoder`: embeds queries and windows separately and compares them.

Shapes: B documents, N windows of a document, V token sequences, H width of an embedding.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from ..common.caches import EmbeddingCache
from ..common.coverage import Coverage
from ..common.files import folder_digest
from ..common.hub import reachable
from ..common.packaged import encoder_folder
from .backbones.load import Backbone, load_encoder
from .backbones.sentence_transformers_files import (
    Dense,
    check_field,
    load_dense,
    longest_of,
    modules_of,
    pooling_of,
    read_json,
    transformer_settings,
)
from .devices import current_dtype
from .encoder import WindowEncoder, distinct
from .inputs import Encoded, Input, Inputs, QueryStates, Settings, to_dense
from .readers import SeparateReader
from .readers.separate import specials_of_text
from .weights import WeightsWatch

EMBEDDING_POOLINGS = ("mean", "cls")
SIMILARITIES = ("cosine", "dot")


class SpreadReader(SeparateReader):
    """Gives inputs that are short enough the positions `0, step, 2 step, ...` (E5-4K).

    The number of tokens of an input decides, special ones included. Differs from the LongEmbed code, where the longest
    input of a batch decides, so that a short text's embedding depends on its batch.
    """

    def __init__(self, backbone: Backbone, settings: Settings, step: int, **options: Any) -> None:
        kind, longest = backbone.family, backbone.longest_input
        if kind != "bert" or longest is None or longest < step:
            raise ValueError(
                f"position_step={step} needs a BERT with a stretched table of positions, such as E5-4K; this backbone "
                f"is of type {kind!r} and takes {longest} tokens: leave position_step at 1"
            )
        self.step = step
        super().__init__(backbone, settings, **options)

    def assemble(self, query: np.ndarray, content: np.ndarray) -> Input:
        return self._spread(super().assemble(query, content))

    def assemble_query(self, query: np.ndarray) -> Input:
        return self._spread(super().assemble_query(query))

    def _spread(self, one: Input) -> Input:
        step = self.step if len(one) * self.step <= (self.longest or 0) else 1
        return replace(one, positions=np.arange(len(one), dtype=np.int32) * step)


class EmbeddingEncoder(WindowEncoder):
    """Embeds queries and windows separately, each distinct one once while it is remembered.

    Args:
        shared: the loaded encoder with its remembered embeddings, which are forgotten when its weights change.
        pooling: `"mean"` of the token states (special tokens included) or `"cls"`, the first token's; None for that of
            the checkpoint, else `"mean"`.
        similarity: `"cosine"` or `"dot"`; None for that of the checkpoint, else cosine.
        query_prefix: put before every query; None for that of the checkpoint.
        passage_prefix: put before every window; None for that of the checkpoint.
        position_step: the distance between positions of short inputs; see `SpreadReader`.
    """

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
        defaults = shared.settings
        query_prefix = defaults.query_prefix if query_prefix is None else query_prefix
        passage_prefix = defaults.passage_prefix if passage_prefix is None else passage_prefix
        if (query_prefix or passage_prefix) and not defaults.pools_prompt:
            raise ValueError("this checkpoint leaves its prompt out of the mean, but BiEncoder's prefixes count in it")
        pooling = _choose("pooling", pooling, defaults.pooling, EMBEDDING_POOLINGS)
        self.prefixes = query_prefix, passage_prefix
        self.position_step = position_step
        super().__init__(replace(shared.backbone, pooling=pooling, representation=defaults.projection))
        self.shared = shared
        self.similarity = _choose("similarity", similarity, defaults.similarity, SIMILARITIES)

    def make_reader(self, settings: Settings) -> SeparateReader:
        lengths = self.shared.settings.query_length, self.shared.settings.document_length
        options: dict[str, Any] = {"prefixes": self.prefixes, "lengths": lengths}
        if self.position_step == 1:
            return SeparateReader(self.origin, settings, **options)
        return SpreadReader(self.origin, settings, self.position_step, **options)

    def room(self, length: int) -> int:
        """Return the most tokens of a window in inputs of this length, as far as the backbone takes it."""
        specials, _ = specials_of_text(self.origin, self.prefixes[1])
        return max(1, min(length, self.origin.longest_input or sys.maxsize) - len(specials))

    def make_runtime(self, name: str) -> Any:
        return self.shared.runtimes.setdefault(name, super().make_runtime(name))

    def refresh(self) -> None:
        super().refresh()
        self.shared.forget_if_changed(self)

    def forward(self, pairs: Sequence[Inputs], *, coverage: Coverage | None = None, **_: Any) -> Encoded:
        """Embed P documents' windows, `cls (P, N, H)`, and their queries, `query.states (P, 1, H)`."""
        queries = self._embed([pair.query_input for pair in pairs], coverage)  # (P, H)
        windows = self._embed([one for pair in pairs for one in pair.windows], coverage)  # (V, H)
        mask = torch.ones(len(queries), 1, dtype=torch.bool, device=self.device)
        documents = to_dense(windows, [len(pair.windows) for pair in pairs])
        return replace(documents, query=QueryStates(queries.unsqueeze(1), mask))

    def _embed(self, inputs: Sequence[Any], coverage: Coverage | None) -> torch.Tensor:
        """Return `(V, H)` fp32 embeddings of V inputs; remembered ones are not encoded again."""
        made_by, (unique, numbers) = self.shared.settings, distinct(inputs)

        def embed(new: list[int]) -> np.ndarray:
            vectors = self.vectors([unique[i] for i in new], coverage)
            if made_by.normalizes:
                vectors = nn.functional.normalize(vectors, dim=-1)
            vectors = vectors[:, : made_by.truncate_dim]
            if self.similarity == "cosine":
                vectors = nn.functional.normalize(vectors, dim=-1)
            return vectors.cpu().numpy()

        setting = self.pooling, self.similarity, current_dtype(self.device), self.device.type, self.runtime.name
        embeddings = self.shared.cache.through([(setting, one.key) for one in unique], embed)
        return torch.from_numpy(np.stack(embeddings)[numbers]).to(self.device)


class Similarity(nn.Module):
    """The head of a bi-encoder: aggregates the `(B, N)` products of window and query embeddings."""

    needs = "query"

    def __init__(self, aggregation: str) -> None:
        super().__init__()
        self.aggregation = aggregation

    def forward(self, encoded: Encoded) -> torch.Tensor:
        """Return `(B,)` float64 scores."""
        scores = self.window_scores(encoded)
        if self.aggregation == "first":
            return scores[:, 0]
        return scores.nan_to_num(-torch.inf).amax(1) if self.aggregation == "max" else scores.nanmean(1)

    def window_scores(self, encoded: Encoded) -> torch.Tensor:
        """Return `(B, N)` float64 similarities; NaN where there is no window."""
        # Row by row: a matrix product's rounding may depend on what else is in the matrix.
        scores = (encoded.cls * encoded.query.states).sum(-1, dtype=torch.float64)
        return scores.masked_fill(~encoded.mask, torch.nan)

    def window_weights(self, encoded: Encoded) -> None:
        """Return None: there is no attention over windows."""

    def check_windows(self, windows: int, query: int = 0) -> None:
        """Accept any number."""


def _choose(argument: str, value: str | None, default: str | None, choices: tuple[str, ...]) -> str:
    """Return the value, else the checkpoint's, else the first choice; ValueError if it is not one of the choices."""
    choice = value or default or choices[0]
    if choice not in choices:
        raise ValueError(
            f"this checkpoint was trained with the {argument} {choice!r}, which BiEncoder does not have: "
            f"{argument}={' or '.join(map(repr, choices))} uses another one"
        )
    return choice


class SharedEncoder:
    """A loaded encoder with its remembered embeddings; this package never trains it."""

    def __init__(self, backbone: Backbone, settings: EmbeddingSettings) -> None:
        self.backbone = backbone
        self.settings = settings
        self.cache = EmbeddingCache()
        self.runtimes: dict[str, Any] = {}
        self._weights = WeightsWatch()

    def forget_if_changed(self, encoder: nn.Module) -> None:
        """Forget the embeddings if the weights that made them have changed."""
        if self._weights.changed(encoder, contents=True):
            self.cache.clear()


_LOADED: weakref.WeakValueDictionary[tuple[Any, ...], SharedEncoder] = weakref.WeakValueDictionary()


def shared_encoder(name: str, device: torch.device, *, trust_remote_code: bool = False) -> SharedEncoder:
    """Return the encoder of this name, loaded once for all transformers that use it on a device at the same time.

    Bi-encoders with several aggregations, and selectors of windows, then embed each text once. Every device has weights
    of its own: a model that moves would take along those of the others. A folder whose files have changed is loaded
    anew.
    """
    name = encoder_folder(name)
    if device.type == "cuda" and device.index is None:
        device = torch.device("cuda", torch.cuda.current_device())
    key = (name, folder_digest(name), trust_remote_code, device)
    encoder = _LOADED.get(key)
    if encoder is None:
        name = reachable(name)
        backbone = load_encoder(name, trust_remote_code=trust_remote_code)
        encoder = SharedEncoder(backbone, embedding_settings(name, backbone.tokenizer))
        _LOADED[key] = encoder
    return encoder


_PASSAGE_PROMPTS = ("document", "passage", "corpus")


@dataclass(frozen=True, eq=False)
class EmbeddingSettings:
    """How a checkpoint's token states become one embedding.

    Attributes:
        pooling: `"mean"`, `"cls"`, or one that `BiEncoder` does not have; None if no file names it.
        projection: the dense layer after pooling; None without one.
        pools_prompt: whether the tokens of a prefix count in the mean.
        similarity: `"cosine"`, `"dot"`, or one that `BiEncoder` does not have; None if no file names it.
        query_prefix: put before queries.
        passage_prefix: put before passages.
        normalizes: whether embeddings have length 1 before they are compared, whatever the similarity.
        truncate_dim: how many numbers of an embedding count; None for all.
        query_length: most tokens of a query, special ones included; None if no file tells.
        document_length: most tokens of a passage, special ones included; None if no file tells.
    """

    pooling: str | None = None
    projection: Dense | None = None
    pools_prompt: bool = True
    similarity: str | None = None
    query_prefix: str = ""
    passage_prefix: str = ""
    normalizes: bool = False
    truncate_dim: int | None = None
    query_length: int | None = None
    document_length: int | None = None


def embedding_settings(name: str, tokenizer: Any) -> EmbeddingSettings:
    """Read `modules.json` and `config_sentence_transformers.json`; empty settings if there are none."""
    pooling, projection, pools_prompt = None, None, True
    kinds: list[str] = []
    for kind, path in modules_of(name):
        config = read_json(name, Path(path, "config.json").as_posix()) or {}
        if kind == "Pooling":
            pooling, pools_prompt = pooling_of(config), config.get("include_prompt", True)
        elif kind == "Dense" and kinds[-1:] == ["Pooling"]:
            projection = load_dense(name, path)
        elif kind == "Normalize" and "Pooling" in kinds:
            check_field(name, path, config)
        elif kind != "Transformer" or kinds:
            after = f" after {kinds[-1]}" if kinds else ""
            raise ValueError(
                f"checkpoint {name!r} has a {kind} layer{after} for its embeddings, which BiEncoder cannot apply"
            )
        kinds.append(kind)
    model_config = read_json(name, "config_sentence_transformers.json") or {}
    prompts = model_config.get("prompts") or {}
    default_prompt = prompts.get(model_config.get("default_prompt_name"))
    query_length, document_length = _lengths(name, tokenizer) if kinds else (None, None)
    return EmbeddingSettings(
        pooling,
        projection,
        pools_prompt,
        similarity=model_config.get("similarity_fn_name"),
        # An empty prompt is one, too: sentence-transformers puts no other in its place.
        query_prefix=prompts.get("query", default_prompt) or "",
        passage_prefix=next((prompts[key] for key in _PASSAGE_PROMPTS if key in prompts), default_prompt) or "",
        normalizes="Normalize" in kinds,
        truncate_dim=model_config.get("truncate_dim"),
        query_length=query_length,
        document_length=document_length,
    )


def _lengths(name: str, tokenizer: Any) -> tuple[int, int]:
    """Return the most tokens of a query and of a passage; ValueError for settings that BiEncoder cannot apply."""
    settings = transformer_settings(name)
    reading = settings.get("modality_config") or {"text": {}}
    refused = {
        "processing_kwargs": settings.get("processing_kwargs"),
        "query_expansion": settings.get("query_expansion"),
        "transformer_task": settings.get("transformer_task") not in (None, "feature-extraction"),
        "modality_config": "text" not in reading,
    }
    for key, is_refused in refused.items():
        if is_refused:
            raise ValueError(f"checkpoint {name!r} has {key}={settings[key]!r}, which BiEncoder cannot apply")
    longest = longest_of(name, settings, tokenizer)
    return settings.get("query_length") or longest, settings.get("document_length") or longest
