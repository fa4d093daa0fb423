"""The model behind `BiEncoder`: embeds queries and windows separately and compares them.

Shapes: B documents, N windows of a document, V token sequences, H width of an embedding.
"""

from __future__ import annotations

import copy
import sys
import weakref
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from ..common.caches import EmbeddingCache
from ..common.coverage import Coverage
from ..common.files import folder_digest
from ..common.hub import local_folder, reachable
from ..common.packaged import encoder_folder
from .backbones.backbone import Backbone
from .backbones.load import encoder_of, load_encoder
from .backbones.modules import VECTOR, load_model
from .backbones.sentence_transformers_files import kind_of, modules_of, read_json
from .encoder import BLOCK_CHARACTERS, distinct
from .inputs import Encoded, Input, Pass, QueryStates, Settings, to_dense
from .late_interaction import SeparateEncoder
from .reader import PairInputs, SeparateReader, specials_of_text
from .runtimes import OpenVinoRuntime

EMBEDDING_POOLINGS = ("mean", "cls")
SIMILARITIES = ("cosine", "dot")


class SpreadReader(SeparateReader):
    """Gives sufficiently short inputs the positions `0, step, 2 step, ...` (E5-4K).

    This depends on an input's number of tokens, special ones included. Differs from the LongEmbed code, where it
    depends on the longest input of a batch, so that a short text's embedding depends on its batch.
    """

    def __init__(self, backbone: Backbone, settings: Settings, step: int, **options: Any) -> None:
        kind, longest = backbone.family.name, backbone.longest_input
        if kind != "bert" or longest is None or longest < step:
            raise ValueError(
                f"position_step={step} needs a BERT with interpolated position embeddings, such as E5-4K; this "
                f"backbone is of type {kind!r} and takes {longest} tokens: use position_step=1"
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


class EmbeddingEncoder(SeparateEncoder):
    """Embeds queries and windows separately, each distinct one once while it is cached.

    Args:
        shared: the loaded encoder with its cached embeddings.
        pooling: `"mean"` of the token states (special tokens included) or `"cls"`, the first token's; None for that of
            the checkpoint, or `"mean"` without one.
        similarity: `"cosine"` or `"dot"`; None for that of the checkpoint, or cosine without one.
        query_prefix: the text before every query; None for that of the checkpoint.
        passage_prefix: the text before every window; None for that of the checkpoint.
        position_step: the distance between positions of short inputs; see `SpreadReader`.
    """

    block_characters = BLOCK_CHARACTERS

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
        self.prefixes = query_prefix, passage_prefix
        self.prompt_lengths = shared.prompt_length(query_prefix), shared.prompt_length(passage_prefix)
        self.position_step = position_step
        super().__init__(replace(shared.backbone, pooling=pooling or "mean", representation=None))
        self.shared, self.cache = shared, shared.cache
        self.own_pooling = pooling or ("mean" if shared.after is None else None)
        self.pooling_modules = shared.after
        if pooling and shared.after is not None:
            self.pooling_modules = copy.deepcopy(shared.after)
            for module in self.pooling_modules.modules():
                if hasattr(module, "pooling_mode"):
                    module.pooling_mode = pooling
        self.similarity = similarity or defaults.similarity or SIMILARITIES[0]
        if self.similarity not in SIMILARITIES:
            raise ValueError(
                f"this checkpoint was trained with the similarity {self.similarity!r}, which BiEncoder does not have: "
                f"similarity={' or '.join(map(repr, SIMILARITIES))} uses another one"
            )
        self.query_encoder: EmbeddingEncoder | None = None
        if shared.query_encoder is not None:
            self.query_encoder = EmbeddingEncoder(
                shared.query_encoder,
                pooling=pooling,
                similarity=similarity,
                query_prefix=query_prefix,
                passage_prefix=passage_prefix,
                position_step=position_step,
            )

    def make_reader(self, settings: Settings) -> SeparateReader:
        lengths = self.shared.settings.query_length, self.shared.settings.document_length
        options: dict[str, Any] = {"prefixes": self.prefixes, "lengths": lengths}
        if self.position_step == 1:
            return SeparateReader(self.origin, settings, **options)
        return SpreadReader(self.origin, settings, self.position_step, **options)

    def window_limit(self, length: int) -> int:
        """Return the maximum number of tokens of a window in inputs of this length, within the backbone's limit."""
        specials, _ = specials_of_text(self.origin, self.prefixes[1])
        return max(1, min(length, self.origin.longest_input or sys.maxsize) - len(specials))

    @property
    def projection(self) -> nn.Module:
        return nn.Identity() if self.pooling_modules is None else self.pooling_modules

    @property
    def vector_rules(self) -> Hashable:  # type: ignore[override]
        """The settings on which embeddings depend."""
        return self.own_pooling, self.similarity

    def make_runtime(self) -> OpenVinoRuntime:
        return self.shared.runtime

    def use(self, settings: Settings, needs: str) -> None:
        super().use(settings, needs)
        if self.query_encoder is not None:
            self.query_encoder.use(settings, needs)

    def forward(self, pairs: Sequence[PairInputs], *, coverage: Coverage | None = None, **_: Any) -> Encoded:
        """Embed P documents' windows, `cls (P, N, H)`, and their queries, `query.states (P, 1, H)`."""
        queries = (self.query_encoder or self).embed([pair.query_input for pair in pairs], coverage, "query")  # (P, H)
        windows = self.embed([one for pair in pairs for one in pair.windows], coverage, "document")  # (V, H)
        mask = torch.ones(len(queries), 1, dtype=torch.bool, device=self.device)
        documents = to_dense(windows, [len(pair.windows) for pair in pairs])
        return replace(documents, query=QueryStates(queries.unsqueeze(1), mask))

    def embed(self, inputs: Sequence[Any], coverage: Coverage | None, side: str) -> torch.Tensor:
        """Return `(V, H)` fp32 embeddings of V queries or windows; cached ones are not encoded again."""
        unique, numbers, keys = distinct(inputs)
        embeddings = np.stack(self.cached(unique, keys, coverage, side))
        return torch.from_numpy(embeddings[numbers]).to(self.device)

    def make_states(self, inputs: Sequence[Input], coverage: Coverage | None, side: str) -> list[torch.Tensor]:
        """Return the `(H,)` embedding of each query or window, on the CPU."""
        vectors = self.vectors(inputs, coverage, side=side)[:, : self.shared.settings.truncate_dim]
        return list((nn.functional.normalize(vectors, dim=-1) if self.similarity == "cosine" else vectors).cpu())

    def pooled(self, states: torch.Tensor, batch: Pass, side: str = "document", **_: Any) -> torch.Tensor:
        if self.pooling_modules is None:
            return super().pooled(states, batch)
        prompt_length = self.prompt_lengths[0 if side == "query" else 1]
        features = {
            "token_embeddings": states,
            "attention_mask": batch.mask,
            "input_ids": batch.input_ids,
            "modality": "text",
            **({} if prompt_length is None else {"prompt_length": prompt_length}),
        }
        vectors: torch.Tensor = self.pooling_modules(features, task=side)[VECTOR]
        return vectors


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
        # Row by row, because a matrix product's rounding may depend on its other rows.
        scores = (encoded.cls * encoded.query.states).sum(-1, dtype=torch.float64)
        return scores.masked_fill(~encoded.mask, torch.nan)

    def window_weights(self, encoded: Encoded) -> None:
        """Return None: there is no attention over windows."""

    def check_windows(self, windows: int, query: int = 0) -> None:
        """Accept any number of windows."""


class SharedEncoder:
    """A loaded encoder with its cached embeddings; this package never trains it.

    Attributes:
        backbone: the encoder.
        settings: how the checkpoint embeds texts.
        after: the model without the encoder, from the tokens' states to the embedding; None for a plain encoder.
        query_encoder: the encoder of queries; None if it is the same encoder.
    """

    def __init__(
        self, backbone: Backbone, settings: EmbeddingSettings, after: Any = None, transformer: Any = None
    ) -> None:
        self.backbone = backbone
        self.settings = settings
        self.after = after
        self.query_encoder: SharedEncoder | None = None
        self.cache = EmbeddingCache()
        self.runtime = OpenVinoRuntime()
        self._transformer = transformer

    def prompt_length(self, prompt: str) -> int | None:
        """Return the number of tokens of a prompt and of what precedes it; None if it does not matter."""
        if not prompt or self._transformer is None:
            return None
        return int(self._transformer.preprocess(["a"], prompt=prompt)["prompt_length"])


_LOADED: weakref.WeakValueDictionary[tuple[Any, ...], SharedEncoder] = weakref.WeakValueDictionary()


def shared_encoder(name: str, device: torch.device, *, trust_remote_code: bool = False) -> SharedEncoder:
    """Return the encoder of this name, loaded once for all transformers that use it on a device at the same time.

    Bi-encoders with several aggregations, and selectors of windows, then embed each text once. Every device has
    separate weights: a model that moves would also move those of the others. A folder whose files have changed is
    loaded again.
    """
    name = encoder_folder(name)
    if device.type == "cuda" and device.index is None:
        device = torch.device("cuda", torch.cuda.current_device())
    key = (name, folder_digest(name), trust_remote_code, device)
    encoder = _LOADED.get(key)
    if encoder is None:
        _LOADED[key] = encoder = load_shared(reachable(name), trust_remote_code=trust_remote_code)
    return encoder


@dataclass(frozen=True)
class EmbeddingSettings:
    """The settings with which a checkpoint embeds texts, besides its modules.

    Attributes:
        similarity: `"cosine"`, `"dot"`, or one that `BiEncoder` does not support; None if no file names it.
        query_prefix: the text before queries.
        passage_prefix: the text before passages.
        truncate_dim: the number of features of an embedding that are used; None for all.
        query_length: the maximum number of tokens of a query, special ones included; None if no file states it.
        document_length: the maximum number of tokens of a passage, special ones included; None if no file states it.
    """

    similarity: str | None = None
    query_prefix: str = ""
    passage_prefix: str = ""
    truncate_dim: int | None = None
    query_length: int | None = None
    document_length: int | None = None


_PASSAGE_PROMPTS = ("document", "passage", "corpus")


def load_shared(name: str, *, trust_remote_code: bool = False) -> SharedEncoder:
    """Load a bi-encoder of sentence-transformers with its modules, or a plain encoder."""
    kind = kind_of(name)
    if kind in (None, "CrossEncoder"):
        return SharedEncoder(load_encoder(name, trust_remote_code=trust_remote_code), EmbeddingSettings())
    if kind != "SentenceTransformer":
        cure = "MaxSim reads it" if kind == "MultiVectorEncoder" else "it has no embeddings of texts"
        raise ValueError(f"checkpoint {name!r} is a {kind} of sentence-transformers, not a bi-encoder: {cure}")
    name = local_folder(name)
    model = load_model(name, kind, trust_remote_code=trust_remote_code)
    [(_, path), *_] = modules_of(name)
    if not hasattr(model[0], "sub_modules"):
        shared = _shared(name, model, model[0], path, trust_remote_code=trust_remote_code)
        model[0] = nn.Identity()
        return shared
    router, encoders = model[0], {}
    if router.route_mappings:
        raise ValueError(f"checkpoint {name!r} has route_mappings={router.route_mappings!r}, which are not supported")
    files = (Path(path, file).as_posix() for file in ("router_config.json", "config.json"))  # the second is an old name
    structure = next(config["structure"] for file in files if (config := read_json(name, file)))
    for side in ("document", "query"):
        route = side if side in router.sub_modules else router.default_route
        transformer, where = router.sub_modules[route][0], Path(path, structure[route][0]).as_posix()
        if where not in encoders:
            encoders[where] = _shared(name, model, transformer, where, trust_remote_code=trust_remote_code)
        router.sub_modules[route][0] = nn.Identity()
    shared, *others = encoders.values()
    for query_encoder in others:
        shared.query_encoder = query_encoder
        shared.settings = replace(shared.settings, query_length=query_encoder.settings.query_length)
        first, second = shared.backbone, query_encoder.backbone
        if first.tokenizer.get_vocab() != second.tokenizer.get_vocab() or first.longest_input != second.longest_input:
            raise ValueError(
                f"checkpoint {name!r} has two tokenizers or lengths, but BiEncoder needs the same for queries and texts"
            )
    return shared


def _shared(name: str, model: Any, module: Any, path: str, *, trust_remote_code: bool) -> SharedEncoder:
    """Return the encoder of a Transformer with the modules after it; ValueError for what cannot be applied."""
    backbone = encoder_of(name, module, path, trust_remote_code=trust_remote_code)
    if module.query_expansion is not None:
        raise ValueError(
            f"checkpoint {name!r} has query_expansion={module.query_expansion!r}, which only MaxSim supports"
        )
    general, longest = read_json(name, "config_sentence_transformers.json") or {}, module.max_seq_length
    # The library adds empty prompts "query" and "document" if a file has none: they would hide the others.
    prompts = general.get("prompts") or {}
    default = prompts.get(general.get("default_prompt_name"))
    settings = EmbeddingSettings(
        similarity=general.get("similarity_fn_name"),
        query_prefix=prompts.get("query", default) or "",
        passage_prefix=next((prompts[key] for key in _PASSAGE_PROMPTS if key in prompts), default) or "",
        truncate_dim=model.truncate_dim,
        query_length=module.query_length or longest,
        document_length=module.document_length or longest,
    )
    return SharedEncoder(backbone, settings, model, module)
