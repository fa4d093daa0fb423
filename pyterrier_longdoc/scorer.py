"""Tokenizer, windows, encoder and head in one module that scores (query, text) pairs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeVar

import numpy as np
import torch
from torch import nn

from .backbones import Backbone, build_backbone
from .batching import Encoded, PairLayout, of_documents
from .devices import dtype_name
from .encoder import WindowEncoder
from .heads.base import Head, WarmStart
from .heads.tokens import TokenHead
from .microbatches import encode_distinct
from .preselection import Cut, Preselection, check_preselection
from .reports import Coverage, Explanation, RawExplanation, Reading, check_finite
from .steps import BLOCK_CHARACTERS, TOKEN_BLOCK_CHARACTERS, Step, on_devices, steps
from .templates import with_trail
from .texts import Block, TokenizedText
from .token_cache import TokenCache
from .windows import Windows

Result = TypeVar("Result")


class LongDocScorer(nn.Module):
    """Scores (query, text) pairs: text, windows, encoder, head.

    `forward` is for training, `score` for inference. Both see the same inputs.

    Args:
        backbone: the loaded backbone.
        windows: how texts are cut; checked against the backbone's longest input.
        head: the aggregation.
        max_doc_len: read only this many tokens of a text; None reads all.
        max_query_len: read only this many tokens of a query; 32 in Boytsov et al. 2025.
        pad_query: the papers' fixed layout: the query padded to `max_query_len`, the window to its full size.
        batch_size: most windows in one pass through the backbone.
        max_batch_tokens: most tokens in one pass; None for what suits the device, see `WindowEncoder`.

    Attributes:
        coverage: what the last run has read and encoded.
        tokens: remembers the tokens of queries and texts, for later runs and epochs.
        devices: where `score`, `stream` and `explain` work, several at a time; the weights are on the first.

    Raises:
        ValueError: if query, largest window and special tokens exceed the backbone's longest input.
    """

    build_backbone = staticmethod(build_backbone)
    """Makes a saved model's backbone again."""

    def __init__(
        self,
        backbone: Backbone,
        windows: Windows,
        head: Head,
        *,
        max_doc_len: int | None = None,
        max_query_len: int = 32,
        pad_query: bool = False,
        batch_size: int = 64,
        max_batch_tokens: int | None = None,
    ) -> None:
        super().__init__()
        self.tokenizer = backbone.tokenizer
        self.tokens = TokenCache()
        self.encoder = WindowEncoder(backbone, batch_size=batch_size, max_batch_tokens=max_batch_tokens)
        self.head = head
        self._pair_layout = backbone.pair_layout()
        self._template = backbone.template
        self._max_length = backbone.max_length
        self.coverage = Coverage()
        self.preselect: Preselection | None = None
        self.devices: tuple[torch.device, ...] = ()
        self.read_with(windows, max_doc_len=max_doc_len, max_query_len=max_query_len, pad_query=pad_query)

    def read_with(
        self,
        windows: Windows,
        *,
        max_doc_len: int | None = None,
        max_query_len: int = 32,
        pad_query: bool = False,
    ) -> None:
        """Changes how texts are read; the weights stay. For the arguments see the class."""
        if max_query_len < 1:
            raise ValueError(f"max_query_len={max_query_len} must be at least 1")
        if max_doc_len is not None and max_doc_len < 1:
            raise ValueError(f"max_doc_len={max_doc_len} must be at least 1, or None to read whole documents")
        if pad_query and self._template is not None:
            raise ValueError(
                f"pad_query is the papers' layout for [CLS] query [SEP] text [SEP]; this backbone reads the template "
                f"{self._template!r}: leave pad_query=False"
            )
        layout = self._pair_layout.fixed(max_query_len, None) if pad_query else self._pair_layout
        capacity = self._capacity(max_query_len, layout)
        if capacity is not None:
            if capacity < 1:
                specials = layout.specials + layout.query_trail_size
                raise ValueError(
                    f"max_query_len={max_query_len} leaves no room for a document: the backbone takes "
                    f"{self._max_length} tokens, {specials} of them special; lower max_query_len"
                )
            windows = windows.within(capacity)
        self.layout = layout.fixed(max_query_len, windows.largest) if pad_query else layout
        self.windows = windows
        self.max_doc_len = max_doc_len
        self.max_query_len = max_query_len
        self.pad_query = pad_query

    def select_with(self, preselect: Preselection | None) -> None:
        """Changes which windows are read for a query; None reads all. Its models are no part of this one.

        Raises:
            ValueError: if it cannot choose from the windows.
        """
        check_preselection(preselect, self.windows)
        self.preselect = preselect

    def _capacity(self, max_query_len: int, layout: PairLayout) -> int | None:
        """Most document tokens in a window; None where nothing limits it."""
        if self._max_length is None:
            return None
        return self._max_length - max_query_len - layout.specials - layout.query_trail_size

    def reading(self) -> dict[str, Any]:
        """The arguments of `read_with` besides the windows, JSON-able."""
        return {
            "max_doc_len": self.max_doc_len,
            "max_query_len": self.max_query_len,
            "pad_query": self.pad_query,
        }

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return next(self.parameters()).device

    def warm_start(self, backbone: Backbone) -> bool:
        """Lets the head take over what it can from the checkpoint; whether it then needs no training."""
        return self.head.warm_start(self.take_over(backbone))

    def take_over(self, backbone: Backbone) -> WarmStart:
        """What a head can take over from the checkpoint."""
        words = backbone.model.get_input_embeddings().weight
        tokenizer = backbone.tokenizer
        cls, sep = (0 if i is None else i for i in (tokenizer.cls_token_id, tokenizer.sep_token_id))
        return WarmStart(backbone.final, words[cls], words[sep])

    def forward(self, queries: Sequence[str], texts: Sequence[str]) -> torch.Tensor:
        """Scores for training.

        Args:
            queries: B queries.
            texts: B texts.

        Returns:
            `(B,)` scores with their graph.
        """
        if not len(queries):
            return torch.zeros(0, device=self.device)
        documents = self.tokenize(texts)
        encoded, _ = self._encode(self._query_ids(queries), documents, queries)
        # Heads work in fp32, in training as in inference.
        with torch.autocast(self.device.type, enabled=False):
            return self.head(encoded)

    @torch.inference_mode()
    def score(
        self,
        queries: Sequence[str],
        texts: Sequence[str],
        *,
        dtype: torch.dtype = torch.float32,
        on_rows: Callable[[int], None] | None = None,
    ) -> np.ndarray:
        """Scores for inference; each distinct pair is encoded once.

        Args:
            queries: R queries.
            texts: R texts.
            dtype: precision of the encoder; heads always work in fp32.
            on_rows: called with the number of rows that are done, for a progress bar.

        Returns:
            `(R,)` float64 scores. `coverage` then tells what was read.

        Raises:
            FloatingPointError: if a score is not finite.
        """
        scores = np.full(len(texts), np.nan)
        for block, values, _ in self.stream(queries, texts, dtype=dtype, on_rows=on_rows):
            for rows, value in zip(block, values, strict=True):
                scores[rows] = value
        check_finite(scores)
        return scores

    @torch.inference_mode()
    def stream(
        self,
        queries: Sequence[str],
        texts: Sequence[str],
        *,
        dtype: torch.dtype = torch.float32,
        on_rows: Callable[[int], None] | None = None,
    ) -> Iterator[tuple[list[list[int]], np.ndarray, list[Reading]]]:
        """As `score`, block by block, for callers that keep what is done.

        Yields:
            Of P distinct pairs: the rows that ask for each, `(P,)` scores, and what was read of each text.
        """
        for block, values, documents, cuts in self._run(queries, texts, dtype, on_rows, LongDocScorer._values):
            yield block.rows, values, self._count(block, documents, cuts)

    @torch.inference_mode()
    def explain(
        self,
        queries: Sequence[str],
        texts: Sequence[str],
        *,
        dtype: torch.dtype = torch.float32,
        on_rows: Callable[[int], None] | None = None,
    ) -> tuple[np.ndarray, list[Explanation]]:
        """As `score`, and how each window contributed.

        Returns:
            `(R,)` scores and R explanations.
        """
        scores = np.full(len(texts), np.nan)
        explanations: list[Any] = [None] * len(texts)
        query_ids = self._query_ids(list(dict.fromkeys(queries)))
        shown = [self.tokenizer.convert_ids_to_tokens(ids.tolist()) for ids in query_ids]
        run = self._run(queries, texts, dtype, on_rows, LongDocScorer._explained_values, offsets=True)
        for block, (values, explained), documents, cuts in run:
            self._count(block, documents, cuts)
            for i, (rows, (query, _)) in enumerate(zip(block.rows, block.pairs, strict=True)):
                document, spans = cuts[i]
                characters = [document.characters(span) for span in spans]
                explanation = explained[i].of(characters, shown[query])
                for row in rows:
                    scores[row] = values[i]
                    explanations[row] = explanation
        check_finite(scores)
        return scores, explanations

    def _run(
        self,
        queries: Sequence[str],
        texts: Sequence[str],
        dtype: torch.dtype,
        on_rows: Callable[[int], None] | None,
        use: Callable[[LongDocScorer, Encoded], Result],
        offsets: bool = False,
    ) -> Iterator[tuple[Block, Result, list[TokenizedText], list[Cut]]]:
        """What `use` makes of a run block by block, in evaluation mode; queries are numbered as they appear."""
        query_ids = self.begin(queries, dtype)
        walk = steps(self, queries, query_ids, texts, on_rows, offsets=offsets)
        parts = ((step, *self.cut(*step.pairs)) for step in walk)

        def work(scorer: LongDocScorer, part: tuple[Step, list[list[np.ndarray]], list[Cut]]) -> Result:
            step, windows, _ = part
            with scorer.encoding(dtype):
                encoded = scorer._encode_windows(step.pairs[0], windows, step.report)
            with scorer._evaluation():
                return use(scorer, encoded)

        for (step, _, cuts), result in on_devices(self, parts, work):
            yield step.block, result, step.documents, cuts

    @contextmanager
    def encoding(self, dtype: torch.dtype) -> Iterator[None]:
        """Evaluation mode, and the precision of the encoder."""
        half = dtype != torch.float32
        with self._evaluation(), torch.autocast(self.device.type, dtype=dtype, enabled=half):
            yield

    def begin(self, queries: Sequence[str], dtype: torch.dtype) -> list[np.ndarray]:
        """Starts the coverage of a run anew; returns the token ids of its distinct queries, in order of appearance."""
        self.coverage = Coverage(dtype=dtype_name(dtype))
        self.encoder.take_counts()
        self.encoder.runtime.begin(self.encoder.backbone)
        return self._query_ids(list(dict.fromkeys(queries)), count=True)

    def block_characters(self) -> int:
        """Most text that is tokenised and held at a time."""
        return TOKEN_BLOCK_CHARACTERS if isinstance(self.head, TokenHead) else BLOCK_CHARACTERS

    @contextmanager
    def _evaluation(self) -> Iterator[None]:
        modes = [(module, module.training) for module in self.modules()]
        self.eval()
        try:
            yield
        finally:
            for module, training in modes:
                module.training = training

    def _values(self, encoded: Encoded) -> np.ndarray:
        return self.head(encoded).double().cpu().numpy()

    def _explained_values(self, encoded: Encoded) -> tuple[np.ndarray, list[RawExplanation]]:
        return self._values(encoded), self._explain(encoded)

    def _explain(self, encoded: Encoded) -> list[RawExplanation]:
        scores = self.head.window_scores(encoded).tolist()
        weights = self.head.window_weights(encoded)
        terms = self.head.query_contributions(encoded) if isinstance(self.head, TokenHead) else None
        empty = [None] * len(scores)
        return [
            RawExplanation(*parts)
            for parts in zip(
                scores,
                empty if weights is None else weights.tolist(),
                empty if terms is None else terms.tolist(),
                strict=True,
            )
        ]

    def _encode(
        self,
        query_ids: Sequence[np.ndarray],
        documents: Sequence[TokenizedText],
        queries: Sequence[str],
    ) -> tuple[Encoded, list[Cut]]:
        windows, cuts = self.cut(query_ids, documents, queries)
        return self._encode_windows(query_ids, windows, None), cuts

    def cut(
        self, query_ids: Sequence[np.ndarray], documents: Sequence[TokenizedText], queries: Sequence[str]
    ) -> tuple[list[list[np.ndarray]], list[Cut]]:
        """The windows of the document of each of B pairs, as token ids and as spans of what is read of it.

        Raises:
            ValueError: if they are too many for the head.
        """
        cuts = self._cut_windows(queries, documents)
        for query, (_, spans) in zip(query_ids, cuts, strict=True):
            self.head.check_windows(len(spans), len(query))
        return [[document.ids[a:b] for a, b in spans] for document, spans in cuts], cuts

    def _cut_windows(self, queries: Sequence[str], documents: Sequence[TokenizedText]) -> list[Cut]:
        """What is read of each document for its query."""
        heads = {id(document): self._cut(document) for document in documents}
        if self.preselect is None:
            spans = {key: self.windows(head) for key, head in heads.items()}
            return [(heads[id(document)], spans[id(document)]) for document in documents]
        # A selector's model has a precision of its own.
        with torch.autocast(self.device.type, enabled=False):
            return self.preselect.cut(queries, [heads[id(document)] for document in documents], self.windows)

    def _encode_windows(
        self,
        query_ids: Sequence[np.ndarray],
        windows: Sequence[Sequence[np.ndarray]],
        on_share: Callable[[float], None] | None,
    ) -> Encoded:
        """What the head sees of B queries, each with the windows of one document."""
        if self.head.needs == "cls":
            queries = [query for query, group in zip(query_ids, windows, strict=True) for _ in group]
            flat = [window for group in windows for window in group]
            vectors = encode_distinct(self.encoder, self.layout, queries, flat, on_share=on_share)
            return of_documents(vectors, windows)
        batch = self.layout.collate(query_ids, windows, self.device)
        if isinstance(self.head, TokenHead):
            return self.encoder(batch, on_share, match=self.head.match, all_layers=self.head.needs == "all")
        return self.encoder(batch, on_share, query_states=self.head.needs == "query")

    def _cut(self, document: TokenizedText) -> TokenizedText:
        return document if self.max_doc_len is None else document.head(self.max_doc_len)

    def tokenize(self, texts: Sequence[str], *, offsets: bool = False) -> list[TokenizedText]:
        """The tokens of texts, with their character offsets where something needs them."""
        needed = offsets or self.windows.needs_text or (self.preselect is not None and self.preselect.needs_text)
        return self.tokens(self.tokenizer, texts, offsets=needed, lead=self.layout.text_lead)

    def query_lengths(self, queries: Sequence[str]) -> list[int]:
        """Tokens of each query, also of what is not read."""
        return [len(query) for query in self.tokens(self.tokenizer, queries, lead=self.layout.query_lead)]

    def _query_ids(self, queries: Sequence[str], *, count: bool = False) -> list[np.ndarray]:
        tokenized = self.tokens(self.tokenizer, queries, lead=self.layout.query_lead)
        if count:
            self.coverage.add_queries([len(query) for query in tokenized], self.max_query_len)
        cut = [query.ids[: self.max_query_len] for query in tokenized]
        if not self.layout.query_trail:
            return cut
        return with_trail(partial(self.tokens, self.tokenizer), self.layout, queries, cut)

    def _count(self, block: Block, documents: list[TokenizedText], cuts: list[Cut]) -> list[Reading]:
        """What was read for each pair of a block.

        Texts that no earlier block had enter the coverage; where windows are chosen for a query, all pairs do.
        """
        readings = []
        counted = {text for text, seen in enumerate(block.seen) if seen}
        for (_, text), (_, spans) in zip(block.pairs, cuts, strict=True):
            reading = Reading.through(spans, len(documents[text]))
            readings.append(reading)
            if self.preselect is not None or text not in counted:
                counted.add(text)
                self.coverage.add(reading)
        return readings
