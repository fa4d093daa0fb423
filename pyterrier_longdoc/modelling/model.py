"""The model: reads, encodes and aggregates query-text pairs with a tokenizer, windows, an encoder and a head.

Shapes: R rows of a run, P distinct pairs of a block, B documents, N windows.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from hashlib import blake2b
from typing import Any, Literal

import numpy as np
import pandas as pd
import torch
from torch import nn

from ..common.coverage import Coverage, PairCoverage, Scored
from ..common.frames import Document, Question, documents, questions
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


Pair = tuple[str | Question, str | Document, list[int]]
"""A distinct query-text pair of a run, and its rows."""


def blocks(
    queries: Sequence[str | Question], texts: Sequence[str | Document], *, characters: int, pairs: int
) -> Iterator[list[Pair]]:
    """Divide the distinct pairs of a run into blocks, longest texts first.

    The pairs of a text are neighbours, so that it is tokenized once. Texts of similar length share a block, which needs
    little padding. Because the longest texts come first, a run that does not fit into memory fails at its start.
    """
    # Arrays, because an object for every pair would take more memory than the rest of a run.
    query_of_row, distinct_queries = pd.factorize(pd.Series(queries, dtype=object))  # type: ignore[arg-type]
    text_of_row, distinct_texts = pd.factorize(pd.Series(texts, dtype=object))  # type: ignore[arg-type]
    lengths = np.fromiter(map(len, distinct_texts), np.int64, len(distinct_texts))
    block, last = list[Pair](), (-1, -1)
    for row in np.lexsort((query_of_row, text_of_row, -lengths[text_of_row])).tolist():
        pair = query_of_row[row], text_of_row[row]
        if pair == last:
            block[-1][2].append(row)
            continue
        if block and (len(block) >= pairs or (len(block) + 1) * len(block[0][1]) > characters):
            yield block
            block = []
        block.append((distinct_queries[pair[0]], distinct_texts[pair[1]], [row]))
        last = pair
    if block:
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
        # Of a training: hashes of the pairs read so far, because augmented texts are as many as draws.
        self._seen: set[int] = set()
        self._queries: dict[str, PairCoverage] = {}
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
        copy_inference_tensors(self)
        self.to(self.settings.device)
        self.head.to(self.encoder.head_dtype)

    @property
    def settings(self) -> Settings:
        """How texts are read and computed."""
        return self.encoder.settings

    @property
    def reader(self) -> Reader:
        """Turns a query and a text into inputs."""
        return self.encoder.reader

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
        self,
        queries: Sequence[str | Question],
        texts: Sequence[str | Document],
        *,
        offsets: bool = False,
        bar: Any = None,
    ) -> Iterator[tuple[list[list[int]], list[PairInputs]]]:
        """Read the distinct pairs of a run in blocks, longest texts first; yield the rows and inputs of each pair.

        All blocks are read alike, also if another thread changes the settings meanwhile.
        The progress bar counts the characters of a block when the caller asks for the next one.
        """
        if bar is not None:
            bar.reset(total=sum(map(len, texts)))
        characters = self.encoder.block_characters
        if isinstance(self.head, TokenHead):
            characters = min(characters, TOKEN_BLOCK_CHARACTERS)
        reader = self.reader
        reader.known = {}
        divide = getattr(self.encoder, "blocks", blocks)  # those of a list-wise encoder are whole lists
        try:
            for block in divide(queries, texts, characters=characters, pairs=PAIRS_PER_BLOCK):
                asked, read = [query for query, _, _ in block], [text for _, text, _ in block]
                yield [rows for _, _, rows in block], self.read(asked, read, offsets=offsets, reader=reader)
                if bar is not None:
                    bar.update(sum(len(text) * len(rows) for _, text, rows in block))
        finally:
            reader.known = None

    @torch.inference_mode()
    def score(
        self,
        queries: Sequence[str | Question],
        texts: Sequence[str | Document],
        *,
        explain: bool = False,
        bar: Any = None,
        on_block: OnBlock | None = None,
    ) -> Scored:
        """Score R rows in inference mode; `on_block` is called after each block, for callers that store scores."""
        found, coverage, columns = np.full(len(texts), np.nan), self.new_coverage(), dict[str, list[Any]]()
        read_queries: dict[str, PairCoverage] = {}
        with self.inference():
            for rows, pairs in self.walk(queries, texts, offsets=explain, bar=bar):
                coverage.add([pair.row for pair in pairs], read_queries)
                encoded, scores = self.compute(pairs, coverage)
                values = scores.double().cpu().numpy()
                found[np.concatenate(rows)] = np.repeat(values, list(map(len, rows)))
                for name, explanations in self.explanations(encoded, pairs).items() if explain else ():
                    column = columns.setdefault(name, [None] * len(texts))
                    for own_rows, explanation in zip(rows, explanations, strict=True):
                        for row in own_rows:
                            column[row] = explanation
                if on_block is not None:
                    on_block(rows, values)
        coverage.add_queries(read_queries)
        coverage.runtime = self.encoder.computed_in[1]  # torch, if an export has turned out to be wrong
        return Scored(found, coverage, columns).checked()

    def forward(self, queries: Sequence[str | Question], texts: Sequence[str | Document]) -> torch.Tensor:
        """Return the `(B,)` scores of B query-text pairs with gradients, for training."""
        if not len(queries):
            return torch.zeros(0, device=self.settings.device)
        pairs = self.read(queries, texts)
        if self._coverage is not None:
            rows = {hash(key): pair.row for key, pair in zip(zip(queries, texts, strict=True), pairs, strict=True)}
            self._coverage.add([row for key, row in rows.items() if key not in self._seen], self._queries)
            self._seen |= rows.keys()
        return self.compute(pairs, self._coverage)[1]

    def coverage_of(
        self, queries: Sequence[str | Question], texts: Sequence[str | Document], bar: Any = None
    ) -> Coverage:
        """Return the coverage that `score` would report for these rows, without encoding anything."""
        coverage, read_queries = self.new_coverage(), dict[str, PairCoverage]()
        for _, pairs in self.walk(queries, texts, bar=bar):
            coverage.add([pair.row for pair in pairs], read_queries)
        coverage.add_queries(read_queries)
        return coverage

    def new_coverage(self) -> Coverage:
        """Return an empty coverage."""
        dtype, runtime = self.encoder.computed_in
        return Coverage(dtype=dtype, runtime=runtime)

    @contextmanager
    def counting(self, dtype: str) -> Iterator[Coverage]:
        """Make `forward` count its coverage, each query-text pair once."""
        self._seen, self._queries, self._coverage = set(), {}, Coverage(dtype=dtype, runtime="torch")
        try:
            yield self._coverage
        finally:
            self._coverage.add_queries(self._queries)
            self._seen, self._queries, self._coverage = set(), {}, None

    def read(
        self,
        queries: Sequence[str | Question],
        texts: Sequence[str | Document],
        *,
        offsets: bool = False,
        reader: Reader | None = None,
    ) -> list[PairInputs]:
        """Return the inputs of P pairs; `offsets` adds the characters of windows."""
        reader = reader or self.reader
        pairs = reader.read(questions(queries), documents(texts), offsets=offsets)
        for pair in pairs:
            self.head.check_windows(len(pair.spans), max(len(pair.query.ids), reader.sizes[0]))
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

    def explanations(self, encoded: Encoded, pairs: Sequence[PairInputs]) -> dict[str, list[Any]]:
        """Return the columns that explain P scores by windows and, for heads with token matches, by query tokens."""
        head, numbers = self.head, range(len(pairs))
        with torch.autocast(self.settings.device.type, enabled=False):
            scores, weights = head.window_scores(encoded).tolist(), head.window_weights(encoded)
            terms = head.query_contributions(encoded) if isinstance(head, TokenHead) else None
        spans = [list(map(pair.text.characters, pair.spans)) for pair in pairs]
        scores = [scores[i][: len(spans[i])] for i in numbers]
        best = [spans[i][int(np.argmax(scores[i]))] for i in numbers]  # the first of equal ones
        columns: dict[str, list[Any]] = {
            "window_scores": scores,
            "window_weights": [None if weights is None else weights[i, : len(spans[i])].tolist() for i in numbers],
            "window_spans": spans,
            "best_start": [start for start, _ in best],
            "best_end": [end for _, end in best],
            "term_scores": [None] * len(pairs),
        }
        if terms is not None:
            queries = [first.ids[slice(*first.query)].tolist() for first in (pair.windows[0] for pair in pairs)]
            tokens = map(self.tokenizer.convert_ids_to_tokens, queries)
            columns["term_scores"] = [
                list(zip(*each, strict=False)) for each in zip(tokens, terms.tolist(), strict=True)
            ]
        return columns | self.encoder.explain(pairs, encoded, head)

    # Weights.

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
