"""The model: reads, encodes and aggregates query-text pairs with a tokenizer, windows, an encoder and a head.

Shapes: R rows of a run, P distinct pairs of a block, B documents, N windows.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any, Literal

import numpy as np
import torch
from torch import nn

from ..common.coverage import Coverage, Explanation, PairCoverage, Scored
from ..common.frames import EXPLANATION, OWN_EXPLANATION, Question, Text, factorize
from ..common.key import NoKeyError, description
from ..common.registry import to_config
from .encoder import TOKEN_BLOCK_CHARACTERS, WindowEncoder
from .heads.base import TokenHead, WarmStart
from .inputs import Encoded, Settings
from .reader import PairInputs, Reader
from .runtimes import has_hooks
from .tokens import serialized
from .weights import HeadSpec, copy_inference_tensors, fingerprint, seeded, seeded_head, version_of

PAIRS_PER_BLOCK = 4096
"""The maximum number of pairs that are read and encoded together."""

Origin = Literal["checkpoint", "random", "fit", "copied"]

OnBlock = Callable[[list[list[int]], np.ndarray], None]
"""Called after each block with the rows of each of its P pairs and their `(P,)` scores."""


@dataclass(frozen=True, eq=False)
class Block:
    """Some of the distinct query-text pairs of a run, in parallel lists."""

    queries: list[Question] = field(default_factory=list)
    texts: list[Text] = field(default_factory=list)
    rows: list[list[int]] = field(default_factory=list)  # the input rows of each pair


def blocks(queries: Sequence[Question], texts: Sequence[Text], *, characters: int, pairs: int) -> Iterator[Block]:
    """Divide the distinct pairs of a run into blocks, longest texts first.

    The pairs of a text stay together, so that it is tokenized once. Texts of similar length share a block, which needs
    little padding. Because the longest texts come first, a run that does not fit into memory fails at its start.
    """
    (distinct_queries, query_of_row), (distinct_texts, text_of_row) = factorize(queries), factorize(texts)
    lengths = np.fromiter(map(len, distinct_texts), np.int64, len(distinct_texts))
    # Arrays, because an object for every pair would take more memory than the rest of a run.
    order = np.lexsort((query_of_row, text_of_row, -lengths[text_of_row]))
    block, last_pair = Block(), (-1, -1)
    for row in order.tolist():
        pair = int(query_of_row[row]), int(text_of_row[row])
        if pair == last_pair:
            block.rows[-1].append(row)
            continue
        count, last_pair = len(block.rows), pair
        if count and (count >= pairs or (count + 1) * len(block.texts[0]) > characters):
            yield block
            block = Block()
        block.queries.append(distinct_queries[pair[0]])
        block.texts.append(distinct_texts[pair[1]])
        block.rows.append([row])
    if block.rows:
        yield block


class Model(nn.Module):
    """Scores query-text pairs: text, windows, encoder, head.

    `forward` is for training, `score` for inference. Both see the same inputs.

    Args:
        encoder: encodes query and windows.
        tokenizer: the tokenizer of the encoder.
        head: the aggregation, a `Head` or an object with its methods.
        settings: how texts are read and computed.
        backbone: the origin of the encoder; None for a model that is neither trained nor saved.
        head_spec: name and options of the head.
        weight_arguments: the arguments on which the weights depend.

    Attributes:
        settings: how texts are read and computed.
        reader: turns a query and a text into inputs.
        origin: the origin of the weights: `"checkpoint"`, `"fit"` (also of a loaded model), `"copied"` by `start_from`,
            or `"random"` if any are random, so that scores make no sense before training.
        source: the arguments of `load` for these weights, as code; empty if they are not saved.
        saved_arguments: the reprs of the arguments with which the weights were saved.
        history: an entry per epoch of training and per validation.
        recipe: the recipe of the last training, JSON-able; None before.
        trained_queries: digests of the queries that the weights were trained on, also before they were copied or saved.
        trained_on: the queries of the last training and the length of its inputs; None before.

    Raises:
        ValueError: if query, largest window and special tokens exceed the backbone's longest input.
    """

    settings: Settings
    reader: Reader

    def __init__(
        self,
        encoder: WindowEncoder,
        tokenizer: Any,
        head: Any,
        settings: Settings,
        *,
        backbone: Any = None,
        head_spec: HeadSpec = ("", {}),
        weight_arguments: dict[str, Any] | None = None,
    ) -> None:
        super().__init__()
        self.encoder = encoder
        self.tokenizer = tokenizer
        self.head = head
        self.backbone = backbone
        self.head_spec = head_spec
        self.weight_arguments = weight_arguments or {}
        self.origin: Origin = "random"
        self.source = ""
        self.saved_arguments: dict[str, str] = {}
        self.history: list[dict[str, Any]] = []
        self.recipe: dict[str, Any] | None = None
        self.trained_queries: frozenset[str] = frozenset()
        self.trained_on: Any = None
        # Of a training: rows by hashes of pairs, because augmented texts are as many as draws.
        self._rows: dict[int, PairCoverage] | None = None
        self._coverage: Coverage | None = None
        self._fingerprint: tuple[Hashable, str] | None = None  # of a version of the weights
        self.use(settings)

    @classmethod
    def from_backbone(
        cls,
        backbone: Any,
        head: HeadSpec,
        settings: Settings,
        *,
        weight_arguments: dict[str, Any],
        seed: int,
        encoder: Callable[[Any], Any] = WindowEncoder,
    ) -> Model:
        """Put a head on a loaded backbone, with the checkpoint's weights where they fit and random ones elsewhere."""
        module = seeded_head(head, backbone.hidden_size, seed, channels=backbone.channels)
        with seeded(seed):
            encoder_module = encoder(backbone)
            model = cls(
                encoder_module,
                getattr(encoder_module, "tokenizer", backbone.tokenizer),
                module,
                settings,
                backbone=backbone,
                head_spec=head,
                weight_arguments=weight_arguments,
            )
            random_layers = getattr(encoder_module, "has_random_layers", False)
            start = model.initial_weights()
            module.warm_start(start)
            if module.ready_from(start) and not random_layers:
                model.origin = "checkpoint"
        return model.eval()

    def use(self, settings: Settings) -> None:
        """Apply settings, and move the weights to their device."""
        self.encoder.use(settings, self.head.needs)
        self.settings, self.reader = self.encoder.settings, self.encoder.reader
        copy_inference_tensors(self)
        self.to(self.settings.device)
        self.head.to(self.encoder.head_dtype)

    @property
    def is_trained(self) -> bool:
        """Whether the weights come from a training, also that of another model."""
        return self.origin in ("fit", "copied")

    @property
    def device(self) -> torch.device:
        """The device of the weights."""
        return next(self.parameters()).device

    # The walk over a run.

    def walk(
        self, queries: Sequence[Question], texts: Sequence[Text], *, offsets: bool = False, bar: Any = None
    ) -> Iterator[tuple[Block, list[PairInputs]]]:
        """Read the distinct pairs of a run in blocks, longest texts first, in bounded memory.

        The progress bar counts the characters of a block when the caller asks for the next one.
        """
        if bar is not None:
            bar.reset(total=sum(map(len, texts)))
        characters = self.encoder.block_characters
        if isinstance(self.head, TokenHead):
            characters = min(characters, TOKEN_BLOCK_CHARACTERS)
        divide = getattr(self.encoder, "blocks", blocks)  # those of a list-wise encoder are whole lists
        for block in divide(queries, texts, characters=characters, pairs=PAIRS_PER_BLOCK):
            yield block, self.read(block.queries, block.texts, offsets=offsets)
            if bar is not None:
                bar.update(sum(len(text) * len(rows) for text, rows in zip(block.texts, block.rows, strict=True)))

    @torch.inference_mode()
    def score(
        self,
        queries: Sequence[Question],
        texts: Sequence[Text],
        *,
        explain: bool = False,
        bar: Any = None,
        on_block: OnBlock | None = None,
    ) -> Scored:
        """Score R rows in inference mode; `on_block` is called after each block, for callers that store scores."""
        scored = Scored(len(texts), self.new_coverage())
        table: list[PairCoverage] = []
        with self.inference():
            for block, pairs in self.walk(queries, texts, offsets=explain, bar=bar):
                table += [pair.row for pair in pairs]
                encoded, scores = self.compute(pairs, scored.coverage)
                values = scores.double().cpu().numpy()
                scored.add(block.rows, values, self.explanations(encoded, pairs) if explain else None)
                if on_block is not None:
                    on_block(block.rows, values)
        scored.coverage.add(table)
        scored.coverage.runtime = self.encoder.computed_in[1]  # torch, if an export has turned out to be wrong
        return scored.checked()

    def forward(self, queries: Sequence[Question], texts: Sequence[Text]) -> torch.Tensor:
        """Return the `(B,)` scores of B query-text pairs with gradients, for training."""
        if not len(queries):
            return torch.zeros(0, device=self.settings.device)
        pairs = self.read(queries, texts)
        if self._rows is not None:
            self._rows |= {
                hash(key): pair.row for key, pair in zip(zip(queries, texts, strict=True), pairs, strict=True)
            }
        return self.compute(pairs, self._coverage)[1]

    def coverage_of(self, queries: Sequence[Question], texts: Sequence[Text], bar: Any = None) -> Coverage:
        """Return the coverage that `score` would report for these rows, without encoding anything."""
        coverage = self.new_coverage()
        coverage.add([pair.row for _, pairs in self.walk(queries, texts, bar=bar) for pair in pairs])
        return coverage

    def new_coverage(self) -> Coverage:
        """Return an empty coverage."""
        dtype, runtime = self.encoder.computed_in
        return Coverage(dtype=dtype, runtime=runtime)

    @contextmanager
    def counting(self, dtype: str) -> Iterator[Coverage]:
        """Make `forward` count its coverage, each query-text pair once."""
        self._rows, self._coverage = {}, Coverage(dtype=dtype, runtime="torch")
        try:
            yield self._coverage
        finally:
            self._coverage.add(self._rows.values())
            self._rows = self._coverage = None

    def read(self, queries: Sequence[Question], texts: Sequence[Text], *, offsets: bool = False) -> list[PairInputs]:
        """Return the inputs of P pairs; `offsets` adds the characters of windows."""
        pairs = self.reader.read(queries, texts, offsets=offsets)
        for pair in pairs:
            self.head.check_windows(len(pair.spans), max(len(pair.query.ids), self.reader.sizes[0]))
        return pairs

    def compute(self, pairs: Sequence[PairInputs], coverage: Coverage | None = None) -> tuple[Encoded, torch.Tensor]:
        """Return the encoded windows of B pairs and their `(B,)` scores; heads compute in fp32, also in training."""
        head = self.head
        match = head.match if isinstance(head, TokenHead) else None
        encoded: Encoded = self.encoder(pairs, needs=head.needs, match=match, coverage=coverage)
        with torch.autocast(self.settings.device.type, enabled=False):
            scores: torch.Tensor = head(encoded)
        if scores.shape != encoded.mask.shape[:1]:
            raise ValueError(
                f"the head {head.name!r} returned scores with the shape {tuple(scores.shape)} for "
                f"{len(encoded.mask)} documents: its forward must return one score per document, (B,)"
            )
        return encoded, scores

    def explanations(self, encoded: Encoded, pairs: Sequence[PairInputs]) -> list[Explanation]:
        """Return explanations of P scores by windows and, for heads with token matches, by query tokens."""
        with torch.autocast(self.settings.device.type, enabled=False):
            scores = self.head.window_scores(encoded).tolist()
            weights = self.head.window_weights(encoded)
            terms = self.head.query_contributions(encoded) if isinstance(self.head, TokenHead) else None
        explanations, own = [], self.encoder.explain(pairs, encoded, self.head)
        columns = set(getattr(self.encoder, "explains", ()))
        if (
            not all(name.startswith(OWN_EXPLANATION) for name in columns - {*EXPLANATION})
            or len(own) != len(pairs)
            or any(more.keys() - {"term_scores", "extra"} or set(more.get("extra", ())) != columns for more in own)
        ):
            raise ValueError(
                f"{type(self.encoder).__name__}.explain must return a dictionary for each of the {len(pairs)} pairs, "
                f"with no other keys than 'term_scores' and 'extra', and in 'extra' the columns that explains names "
                f"(now {sorted(columns)}), which must begin with {OWN_EXPLANATION!r}"
            )
        for i, (pair, more) in enumerate(zip(pairs, own, strict=True)):
            if terms is not None:
                first = pair.windows[0]
                tokens = self.tokenizer.convert_ids_to_tokens(first.ids[slice(*first.query)].tolist())
                more["term_scores"] = list(zip(tokens, terms[i].tolist(), strict=False))
            windows = len(pair.spans)
            explanations.append(
                Explanation(
                    spans=list(map(pair.text.characters, pair.spans)),
                    scores=scores[i][:windows],
                    weights=None if weights is None else weights[i, :windows].tolist(),
                    **more,
                )
            )
        return explanations

    # Its weights.

    def describe(self) -> dict[str, Any]:
        """Return everything on which scores depend apart from query and text, JSON-able: reader, weights and precision.

        Raises:
            NoKeyError: if a step of the tokenizer is Python code, or a module has hooks.
        """
        if has_hooks(self):
            raise NoKeyError("its modules have hooks, whose changes cannot be detected")
        tokenizer = serialized(self.tokenizer.backend_tokenizer)
        if tokenizer is None:
            raise NoKeyError("a step of its tokenizer is Python code, whose changes cannot be detected")
        settings, reader = self.settings, self.reader
        parts = (reader.windows, settings.preselect, reader, self.encoder, self.head)
        return {
            "classes": [description(type(part)) for part in parts if part is not None],
            "windows": to_config(reader.windows),
            "max_doc_len": settings.max_doc_len,
            "max_query_len": reader.max_query_len,
            "preselect": None if settings.preselect is None else settings.preselect.describe(),
            "reader": reader.describe(),
            "weights": self.encoder.describe_weights(self),
            "tokenizer": blake2b(tokenizer).hexdigest(),
            "computed": [settings.device.type, *self.encoder.computed_in],
        }

    @contextmanager
    def inference(self) -> Iterator[None]:
        """Switch to evaluation mode and to the precision of the settings."""
        dtype, in_training = self.settings.dtype, [module for module in self.modules() if module.training]
        for module in in_training:
            module.training = False
        if next(self.parameters()).device.type != self.settings.device.type:  # moved by somebody meanwhile
            with torch.inference_mode(False):
                self.to(self.settings.device)
        try:
            with torch.autocast(self.settings.device.type, dtype=dtype, enabled=dtype != torch.float32):
                yield
        finally:
            for module in in_training:
                module.training = True

    def initial_weights(self) -> WarmStart:
        """Return the parts of the checkpoint that a head can use as initial weights."""
        return self.encoder.initial_weights(self.backbone, self.tokenizer)

    def mark_trained(self, recipe: dict[str, Any], queries: frozenset[str] | None = None) -> None:
        """Mark the weights as trained with this recipe, in all on the queries with these digests; None keeps them."""
        self.origin, self.source, self.recipe = "fit", "", recipe
        self.trained_queries = self.trained_queries if queries is None else queries

    def fingerprint(self) -> str:
        """Return a fingerprint of the weights, updated when they change."""
        version, known = version_of(self), self._fingerprint
        if known is None or known[0] != version:
            self._fingerprint = known = version, fingerprint(self.state_dict())
        return known[1]
