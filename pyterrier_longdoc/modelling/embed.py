"""The model behind `BiEncoder`: embeds queries and windows apart and compares them.

Shapes: R rows of a run, N windows of a document, V token sequences, H width of an embedding.
"""

from __future__ import annotations

import json
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file
from torch import nn
from transformers.utils import cached_file

from ..common.caches import EmbeddingCache
from ..common.coverage import Coverage, Explanation, check_finite
from .backbones.classifiers import Representation
from .backbones.load import Backbone, load_backbone
from .backbones.packaged import encoder_folder
from .batching import PairLayout
from .devices import dtype_name
from .encoder import WindowEncoder, encode_distinct
from .fingerprint import WeightsWatch
from .texts import Span, TokenCache, TokenizedText, numbered, rows_by_pair, share_out
from .windows import Windows, windows_to_config

BLOCK_CHARACTERS = 1_000_000
"""Text that is tokenised and whose window embeddings are held at a time."""

POOLINGS = ("mean", "cls")
SIMILARITIES = ("cosine", "dot")

OnShare = Callable[[float], None]


class BiEncoderScorer(nn.Module):
    """Scores (query, text) pairs by comparing embeddings: each distinct window and query is encoded once.

    Args:
        encoder: the loaded encoder with its remembered embeddings, which are forgotten when its weights change.
        windows: how texts are cut; checked against the backbone's longest input.
        aggregation: of a document's window similarities: `"first"`, `"max"` or `"avg"`.
        pooling: `"mean"` of the token states (special tokens included) or `"cls"`, the first token's; None for what
            the checkpoint names, else `"mean"`.
        similarity: `"cosine"` or `"dot"`; None for what the checkpoint names, else cosine.
        query_prefix: put before every query; None for what the checkpoint names.
        passage_prefix: put before every window; None for what the checkpoint names.
        position_step: positions of short inputs are this far apart; see `spread_positions`.
        max_query_len: read only this many tokens of a query, prefix and special tokens not counted.
        max_doc_len: read only this many tokens of a text; None reads all.
    """

    def __init__(
        self,
        encoder: SharedEncoder,
        windows: Windows,
        *,
        aggregation: str = "max",
        pooling: str | None = None,
        similarity: str | None = None,
        query_prefix: str | None = None,
        passage_prefix: str | None = None,
        position_step: int = 1,
        max_query_len: int = 32,
        max_doc_len: int | None = None,
    ) -> None:
        super().__init__()
        settings = encoder.settings
        query_prefix = settings.query_prefix if query_prefix is None else query_prefix
        passage_prefix = settings.passage_prefix if passage_prefix is None else passage_prefix
        if (query_prefix or passage_prefix) and not settings.pools_prompt:
            raise ValueError("this checkpoint leaves its prompt out of the mean, which BiEncoder's prefixes do not")
        pooling = _known("pooling", pooling, settings.pooling, POOLINGS)
        backbone = replace(encoder.backbone, pooling=pooling, representation=settings.projection)
        self.tokenizer = backbone.tokenizer
        self.encoder = WindowEncoder(backbone)
        self._shared = encoder
        self.cache, self.tokens = encoder.cache, encoder.tokens
        self.query_layout, self._query_lead = backbone.text_layout(query_prefix)
        self.passage_layout, self._passage_lead = backbone.text_layout(passage_prefix)
        if backbone.longest_input is not None:
            _check_room("query_prefix", query_prefix, self.query_layout, backbone.longest_input, max_query_len)
            _check_room("passage_prefix", passage_prefix, self.passage_layout, backbone.longest_input, 1)
            windows = windows.within(backbone.longest_input - self.passage_layout.specials)
        self.query_layout = spread_positions(self.query_layout, backbone, position_step)
        self.passage_layout = spread_positions(self.passage_layout, backbone, position_step)
        self.windows = windows
        self.aggregation = aggregation
        self.similarity = _known("similarity", similarity, settings.similarity, SIMILARITIES)
        self.max_query_len = max_query_len
        self.max_doc_len = max_doc_len
        self.coverage = Coverage()

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return next(self.parameters()).device

    def describe(self) -> dict[str, Any]:
        """All that a score depends on besides weights, tokenizer and precision, for hashing."""
        return {
            "windows": windows_to_config(self.windows),
            "layouts": [repr(self.query_layout), repr(self.passage_layout)],
            "leads": [self._query_lead, self._passage_lead],
            "pooling": self.encoder.pooling,
            "aggregation": self.aggregation,
            "similarity": self.similarity,
            "max_query_len": self.max_query_len,
            "max_doc_len": self.max_doc_len,
        }

    def score(
        self,
        queries: Sequence[str],
        texts: Sequence[str],
        *,
        dtype: torch.dtype = torch.float32,
        on_rows: Callable[[int], None] | None = None,
    ) -> np.ndarray:
        """Scores for inference.

        Args:
            queries: R queries.
            texts: R texts.
            dtype: precision of the encoder.
            on_rows: called with the number of rows that are done, for a progress bar.

        Returns:
            `(R,)` float64 similarities. `coverage` then tells what was read.

        Raises:
            FloatingPointError: if a similarity is not finite.
        """
        scores = np.full(len(texts), np.nan)
        for rows, _, _, similarities in self._run(queries, texts, dtype, on_rows, offsets=False):
            scores[rows] = self._aggregate(similarities)
        check_finite(scores)
        return scores

    def explain(
        self,
        queries: Sequence[str],
        texts: Sequence[str],
        *,
        dtype: torch.dtype = torch.float32,
        on_rows: Callable[[int], None] | None = None,
    ) -> tuple[np.ndarray, list[Explanation]]:
        """As `score`, and the similarity of each window."""
        scores = np.full(len(texts), np.nan)
        explanations: list[Any] = [None] * len(texts)
        for rows, document, spans, similarities in self._run(queries, texts, dtype, on_rows, offsets=True):
            scores[rows] = self._aggregate(similarities)
            explanation = Explanation([document.characters(s) for s in spans], similarities.tolist(), None)
            for row in rows:
                explanations[row] = explanation
        check_finite(scores)
        return scores, explanations

    def _aggregate(self, similarities: np.ndarray) -> float:
        if self.aggregation == "first":
            return float(similarities[0])
        return float(similarities.max() if self.aggregation == "max" else similarities.mean())

    def _embed(
        self, sequences: list[np.ndarray], layout: PairLayout, dtype: torch.dtype, on_share: OnShare | None
    ) -> np.ndarray:
        """`(V, H)` float32 embeddings of V token sequences; those seen before are not encoded again."""
        setting = (layout, self.encoder.pooling, self.similarity, dtype, self.device.type)
        keys = [(setting, sequence.tobytes()) for sequence in sequences]
        vectors = {key: vector for key in keys if (vector := self.cache.get(key)) is not None}
        new = {key: sequence for key, sequence in zip(keys, sequences, strict=True) if key not in vectors}
        if new:
            for key, vector in zip(new, self._encode(list(new.values()), layout, dtype, on_share), strict=True):
                vectors[key] = vector
                self.cache.put(key, vector)
        elif on_share is not None:
            on_share(1.0)
        return np.stack([vectors[key] for key in keys])

    @torch.inference_mode()
    def _encode(
        self, sequences: list[np.ndarray], layout: PairLayout, dtype: torch.dtype, on_share: OnShare | None
    ) -> np.ndarray:
        self.eval()
        empty = np.zeros(0, dtype=np.int32)
        with torch.autocast(self.device.type, dtype=dtype, enabled=dtype != torch.float32):
            queries = [empty] * len(sequences)
            vectors = encode_distinct(self.encoder, layout, queries, sequences, on_share=on_share)
        self.coverage.add_encoded(*self.encoder.take_counts())
        if self.similarity == "cosine":
            vectors = nn.functional.normalize(vectors, dim=-1)
        return vectors.cpu().numpy()

    def _run(
        self,
        queries: Sequence[str],
        texts: Sequence[str],
        dtype: torch.dtype,
        on_rows: Callable[[int], None] | None,
        *,
        offsets: bool,
    ) -> Iterator[tuple[list[int], TokenizedText, list[Span], np.ndarray]]:
        """For each distinct pair: its rows, the document, its windows and their `(N,)` similarities."""
        self._shared.begin(self.encoder)
        self.coverage = Coverage(dtype=dtype_name(dtype))
        distinct, of_row = numbered(queries)
        query_vectors = self._embed(self._query_ids(distinct), self.query_layout, dtype, None)
        wanted = rows_by_pair(of_row.tolist(), texts)
        for block in _text_blocks(sorted(wanted, key=len, reverse=True)):
            offsets = offsets or self.windows.needs_text
            documents = self.tokens(self.tokenizer, block, offsets=offsets, lead=self._passage_lead)
            spans = [self.windows(d if self.max_doc_len is None else d.head(self.max_doc_len)) for d in documents]
            rows = sum(len(group) for text in block for group in wanted[text].values())
            vectors = self._window_vectors(documents, spans, dtype, share_out(on_rows, rows))
            for text, document, cut, own in zip(block, documents, spans, vectors, strict=True):
                self.coverage.add_document(len(document), cut)
                for query, rows_of_pair in wanted[text].items():
                    # Row by row: a matrix product's rounding may depend on what else is in the matrix.
                    yield rows_of_pair, document, cut, (own * query_vectors[query]).sum(1, dtype=np.float64)

    def _window_vectors(
        self, documents: list[TokenizedText], spans: list[list[Span]], dtype: torch.dtype, on_share: OnShare | None
    ) -> list[np.ndarray]:
        """`(N, H)` embeddings of each document's windows; equal windows are encoded once."""
        windows = [document.ids[a:b] for document, cut in zip(documents, spans, strict=True) for a, b in cut]
        vectors = self._embed(windows, self.passage_layout, dtype, on_share)
        return np.split(vectors, np.cumsum([len(cut) for cut in spans])[:-1])

    def _query_ids(self, queries: list[str]) -> list[np.ndarray]:
        tokenized = self.tokens(self.tokenizer, queries, lead=self._query_lead)
        self.coverage.add_queries([len(query) for query in tokenized], self.max_query_len)
        return [query.ids[: self.max_query_len] for query in tokenized]


def _check_room(name: str, prefix: str, layout: PairLayout, longest: int, tokens: int) -> None:
    room = longest - layout.specials
    if room < 1:
        raise ValueError(f"{name}={prefix!r} alone is longer than the backbone's {longest} tokens")
    if room < tokens:
        raise ValueError(
            f"max_query_len={tokens} does not fit: next to prefix and special tokens the backbone takes {room} query "
            f"tokens"
        )


def _known(what: str, given: str | None, trained: str | None, known: tuple[str, ...]) -> str:
    """What is asked for, else what the checkpoint was trained with, else the first of what is known."""
    chosen = given or trained or known[0]
    if chosen not in known:
        raise ValueError(
            f"this checkpoint was trained with the {what} {chosen!r}, which BiEncoder does not have; {what}="
            f"{' or '.join(map(repr, known))} asks for another one all the same"
        )
    return chosen


def _text_blocks(texts: list[str]) -> Iterator[list[str]]:
    block: list[str] = []
    size = 0
    for text in texts:
        if block and size + len(text) > BLOCK_CHARACTERS:
            yield block
            block, size = [], 0
        block.append(text)
        size += len(text)
    if block:
        yield block


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

    def begin(self, encoder: nn.Module) -> None:
        """At the start of a run: forgets the embeddings if someone has changed the weights.

        Args:
            encoder: what makes embeddings of this encoder's states.
        """
        if self._weights.changed(encoder, contents=True):
            self.cache.clear()


_LOADED: weakref.WeakValueDictionary[tuple[str, bool], SharedEncoder] = weakref.WeakValueDictionary()


def shared_encoder(name: str, *, trust_remote_code: bool = False) -> SharedEncoder:
    """The encoder of this name, loaded once for all transformers that use it at the same time.

    Args:
        name: a model on the Hugging Face hub, or a folder.
        trust_remote_code: run modelling code that the checkpoint brings along.
    """
    name = encoder_folder(name)
    key = (name, trust_remote_code)
    encoder = _LOADED.get(key)
    if encoder is None:
        encoder = SharedEncoder(load_backbone(name, trust_remote_code=trust_remote_code), embedding_settings(name))
        _LOADED[key] = encoder
    return encoder


_ACTIVATIONS = {"Identity": nn.Identity, "Tanh": nn.Tanh, "ReLU": nn.ReLU, "GELU": nn.GELU, "SiLU": nn.SiLU}
_PASSAGE_PROMPTS = ("document", "passage", "corpus")
_POOLINGS = {"cls": "cls", "cls_token": "cls", "mean": "mean", "mean_tokens": "mean"}


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
    projection: Representation | None = None
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
        ValueError: for a module after the encoder that this package cannot apply.
    """
    modules = _read_json(name, "modules.json")
    pooling, projection, pools_prompt = None, None, True
    kinds: list[str] = []
    for module in modules or []:
        kind = module["type"].rsplit(".", 1)[-1]
        if kind == "Pooling":
            config = _read_json(name, f"{module['path']}/config.json") or {}
            pooling, pools_prompt = _pooling(config), config.get("include_prompt", True)
        elif kind == "Dense" and kinds[-1:] == ["Pooling"]:
            projection = _projection(name, module["path"])
        elif kind not in ("Transformer", "Normalize"):
            after = f" after {kinds[-1]}" if kinds else ""
            raise ValueError(
                f"checkpoint {name!r} has a {kind} layer{after} for its embeddings, which BiEncoder cannot apply"
            )
        kinds.append(kind)
    general = _read_json(name, "config_sentence_transformers.json") or {}
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


def _pooling(config: dict[str, Any]) -> str | None:
    modes = config.get("pooling_mode")
    if modes is None:
        prefix = "pooling_mode_"
        modes = [key.removeprefix(prefix) for key, value in config.items() if key.startswith(prefix) and value is True]
    modes = [modes] if isinstance(modes, str) else list(modes)
    return "+".join(_POOLINGS.get(mode, mode) for mode in modes) or None


def _projection(name: str, path: str) -> Representation:
    config = _read_json(name, f"{path}/config.json") or {}
    activation = config.get("activation_function", "torch.nn.modules.activation.Tanh").rsplit(".", 1)[-1]
    weights = _file(name, f"{path}/model.safetensors")
    if activation not in _ACTIVATIONS or weights is None:
        raise ValueError(
            f"checkpoint {name!r} projects its embeddings by {path}, which needs model.safetensors there and one of "
            f"the activations {', '.join(_ACTIVATIONS)} (it names {activation})"
        )
    dense = nn.Linear(config["in_features"], config["out_features"], bias=config.get("bias", True))
    dense.load_state_dict({key.removeprefix("linear."): value for key, value in load_file(weights).items()})
    return Representation(dense, _ACTIVATIONS[activation]())


def _read_json(name: str, path: str) -> Any:
    file = _file(name, path)
    return None if file is None else json.loads(file.read_text(encoding="utf-8"))


def _file(name: str, path: str) -> Path | None:
    """A file of the checkpoint, from its folder, the hub or the hub's cache; None where it is not."""
    if Path(name).is_dir():
        file = Path(name) / path
        return file if file.is_file() else None
    found = cached_file(
        name, path, _raise_exceptions_for_missing_entries=False, _raise_exceptions_for_connection_errors=False
    )
    return None if found is None else Path(found)


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
