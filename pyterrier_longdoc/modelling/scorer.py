"""Tokenizer, windows, encoder and head in one module that scores (query, text) pairs: read, encode, aggregate.

Shapes: R rows of a run, P distinct pairs of a block, B documents, N windows.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import nn

from ..common.coverage import Coverage, Explanation, Reading, Scored, Work
from ..common.documents import Text
from .backbones.load import Backbone
from .backbones.templates import with_trail
from .batching import NOTHING, ApartLayout, Encoded
from .census import Census
from .contexts import tokenize_documents
from .devices import dtype_name
from .encoder import TOKEN_BLOCK_CHARACTERS, WindowEncoder
from .heads.base import TokenHead, WarmStart
from .layout import longest_first
from .preselection import Cut
from .settings import Settings
from .texts import Block, Pace, TokenCache, TokenizedText, blocks, each_once, numbered
from .workload import Workload

BLOCK_PAIRS = 4096
"""Most pairs that are read and encoded at a time."""

BLOCK_SECONDS = 2.0
"""How long a block may take, about, whose scores are stored when it is done: what a run loses that is killed."""

OnBlock = Callable[[list[list[int]], np.ndarray, Sequence[Reading]], None]
"""Called when a block is done, with the rows that ask for each of its P pairs, `(P,)` scores, and what was read."""


@dataclass(frozen=True, eq=False)
class Read:
    """What is read of P pairs of a query and a text.

    Attributes:
        queries: token ids of each pair's query.
        cuts: what is read of each pair's text (all of it, its beginning, or a selection), and its windows.
        windows: these as token ids, with what is read with each of them.
        readings: how much of each pair's text that is.
        asked: each pair's query as a text, as far as it is read, for whom tokens tell nothing.
    """

    queries: Sequence[np.ndarray]
    cuts: Sequence[Cut]
    windows: Sequence[list[np.ndarray]]
    readings: Sequence[Reading]
    asked: Sequence[str] = ()


class LongDocScorer(nn.Module):
    """Scores (query, text) pairs: text, windows, encoder, head.

    `forward` is for training, `score` for inference. Both see the same inputs.

    Args:
        encoder: encodes query and windows.
        tokenizer: its tokenizer.
        head: the aggregation, a `Head` or what has its methods.
        settings: what is read and how it is computed.
        tokens: remembers the tokens of queries and texts, for later runs and epochs; None for a memory of its own.

    Attributes:
        settings: as given, with windows that fit into the backbone.
        layout: how a query and a window become one input.
        precision: the name of the settings' `dtype`, for coverage; None where nothing is computed here.

    Raises:
        ValueError: if query, largest window and special tokens exceed the backbone's longest input.
    """

    def __init__(
        self,
        encoder: WindowEncoder,
        tokenizer: Any,
        head: Any,
        settings: Settings,
        tokens: TokenCache | None = None,
    ) -> None:
        super().__init__()
        self.encoder = encoder
        self.tokenizer = tokenizer
        self.head = head
        self.tokens = TokenCache() if tokens is None else tokens
        self._census: tuple[Census, Work] | None = None
        self.use(settings)

    def use(self, settings: Settings) -> None:
        """Reads and computes by these settings from now on; the weights move to their device."""
        self.encoder.serve(self.head.needs)
        self.settings, self.layout = self.encoder.prepare(settings)
        self.precision: str | None = dtype_name(settings.dtype)
        self.to(settings.device)

    def back_to_its_device(self) -> None:
        """Moves the weights back to the device of the settings, if someone has moved them elsewhere."""
        if self.device.type != self.settings.device.type:
            self.to(self.settings.device)

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return next(self.parameters()).device

    def forward(self, queries: Sequence[str], texts: Sequence[Text]) -> torch.Tensor:
        """Scores for training.

        Args:
            queries: B queries.
            texts: B texts, or documents with what is read with each of their windows.

        Returns:
            `(B,)` scores with their graph.
        """
        if not len(queries):
            return torch.zeros(0, device=self.settings.device)
        census, work = self._census or (None, None)
        query_ids = self.read_queries(queries, census)
        read = self.read(queries, query_ids, self.tokenize(texts))
        if census is not None:
            census.add(queries, texts, query_ids, read.readings)
        return self.aggregate(self.encode(read, work))

    def census(self, dtype: str | None = None) -> Census:
        """Counts of what is read by the present settings, with their precision or the given one."""
        return Census(self.settings, self.layout, self.precision if dtype is None else dtype)

    @contextmanager
    def counting(self, dtype: str) -> Iterator[Coverage]:
        """Within, `forward` counts what it reads: each query and text of it once, however often they are drawn.

        Args:
            dtype: the precision to note.
        """
        census = self.census(dtype)
        self._census = census, Work(census.coverage)
        try:
            yield census.coverage
        finally:
            self._census = None

    @torch.inference_mode()
    def score(
        self,
        queries: Sequence[str],
        texts: Sequence[Text],
        *,
        explain: bool = False,
        bar: Any = None,
        on_block: OnBlock | None = None,
    ) -> Scored:
        """Scores for inference: block by block of texts of like length, each distinct pair once.

        Args:
            queries: R queries.
            texts: R texts, or documents with what is read with each of their windows.
            explain: tell how each window contributed.
            bar: a tqdm bar for the work, in tokens.
            on_block: called after each block, for callers that store what is done: blocks are then made so small that
                each takes about `BLOCK_SECONDS`.

        Raises:
            FloatingPointError: if a score is not finite.
        """
        settings = self.settings
        census = self.census()
        scored = Scored(len(texts), census.coverage)
        self.encoder.begin(settings)
        asked, query_of_row = numbered(queries)
        query_ids = self.read_queries(asked, census)
        workload = None if bar is None else self.workload(query_ids, query_of_row, texts)
        work = Work(census.coverage, bar, 0.0 if workload is None else workload.total)
        characters = TOKEN_BLOCK_CHARACTERS if isinstance(self.head, TokenHead) else self.encoder.block_characters
        pace = Pace(characters, None if on_block is None else BLOCK_SECONDS)
        with self.inference():
            for block in blocks(query_of_row, texts, characters=pace, pairs=BLOCK_PAIRS):
                work.begin(0.0 if workload is None else workload.of(block))
                read = self.read_block(block, self.tokenize(block.texts, offsets=explain), asked, query_ids, census)
                encoded = self.encode(read, work)
                values = self.aggregate(encoded).double().cpu().numpy()
                scored.add(block.rows, values, self.explanations(encoded, read) if explain else None)
                if on_block is not None:
                    on_block(block.rows, values, read.readings)
                pace.note(block)
        work.end()
        return scored.checked()

    def workload(self, query_ids: Sequence[np.ndarray], query_of_row: np.ndarray, texts: Sequence[Text]) -> Workload:
        """About how much there is to compute for R rows of these queries and texts."""
        layout = self.layout.text if isinstance(self.layout, ApartLayout) else self.layout
        together = layout is self.layout
        length = float(np.mean(list(map(len, query_ids)))) if together and len(query_ids) else 0.0
        if self.encoder.once_for_all_queries:
            query_of_row = np.zeros_like(query_of_row)
        return Workload(self.tokenizer, layout, self.settings, length, query_of_row, texts)

    # Read.

    def tokenize(self, texts: Sequence[Text], *, offsets: bool = False) -> list[TokenizedText]:
        """The tokens of texts, with their character offsets where something needs them, and what is read with them."""
        settings = self.settings
        chosen_by_text = settings.preselect is not None and settings.preselect.needs_text
        marks = self.layout.marks_sentences
        needed = offsets or settings.windows.needs_text or chosen_by_text or marks

        def tokens(own: Sequence[str]) -> list[TokenizedText]:
            return self.tokens(self.tokenizer, settings.layout.read(own), offsets=needed, lead=self.layout.text_lead)

        read = tokenize_documents(tokens, texts, settings.repeat_tokens)
        return each_once(read, lambda text: text.with_sentences_marked(self.layout.prefix[0])) if marks else read

    def read_block(
        self,
        block: Block,
        texts: Sequence[TokenizedText],
        asked: Sequence[str],
        query_ids: Sequence[np.ndarray],
        census: Census,
    ) -> Read:
        """What is read of the P pairs of a block, which the census counts.

        Args:
            block: some pairs of a run.
            texts: the tokens of its texts.
            asked: the run's distinct queries.
            query_ids: of these.
            census: of the run.
        """
        queries, own_ids = [asked[query] for query in block.query], [query_ids[query] for query in block.query]
        read = self.read(queries, own_ids, [texts[text] for text in block.text])
        census.add(queries, [block.texts[text] for text in block.text], own_ids, read.readings)
        return read

    def read_queries(self, queries: Sequence[str], census: Census | None = None) -> list[np.ndarray]:
        """Token ids of queries as far as they are read whatever the text, which a census counts."""
        settings = self.settings
        limit = sys.maxsize if settings.layout.shared_budget else settings.max_query_len or sys.maxsize
        read = settings.layout.read(queries)
        tokenized = self.tokens(self.tokenizer, read, lead=self.layout.query_lead)
        if census is not None:
            census.add_queries(queries, list(map(len, tokenized)), limit)
        lead = self._lead(self.layout.query_lead)
        cut = [query.ids[:limit] if len(query) else lead for query in tokenized]
        if not self.layout.query_trail:
            return cut
        return with_trail(partial(self.tokens, self.tokenizer), self.layout, read, cut)

    def read(self, queries: Sequence[str], query_ids: Sequence[np.ndarray], texts: Sequence[TokenizedText]) -> Read:
        """What is read of B texts for B queries: the windows that the settings ask for.

        Raises:
            ValueError: if they are too many for the head.
        """
        if self.settings.layout.shared_budget:
            query_ids, cuts = self._share(query_ids, texts)
        else:
            cuts = self._cut(queries, texts)
        for query, (_, spans) in zip(query_ids, cuts, strict=True):
            self.head.check_windows(len(spans), max(len(query), self.layout.query_size or 0))
        lead = self._lead(self.layout.text_lead)
        windows = each_once(cuts, lambda cut: [ids if len(ids) else lead for ids in map(cut[0].read, cut[1])])
        readings = []
        for (document, spans), text in zip(cuts, texts, strict=True):
            repeated = (0, 0) if document.context is None else (document.context.tokens, document.context.tokens_read)
            readings.append(Reading.through(spans, len(text), repeated))
        return Read(query_ids, cuts, windows, readings)

    def _lead(self, lead: str) -> np.ndarray:
        """What is read of an empty query or text: the white space that any other one begins with."""
        return self.tokens(self.tokenizer, [lead])[0].ids if lead else NOTHING

    def _cut(self, queries: Sequence[str], texts: Sequence[TokenizedText]) -> list[Cut]:
        """What is read of B texts for B queries, and its windows."""
        settings, documents = self.settings, list(texts)
        if settings.max_doc_len is not None:
            documents = each_once(documents, lambda text: text.head(settings.max_doc_len))
        if settings.preselect is None:
            return each_once(documents, lambda document: (document, settings.windows(document)))
        # A selector's model has a precision of its own.
        with torch.autocast(settings.device.type, enabled=False):
            return settings.preselect.cut(settings.layout.read(queries), documents, settings.windows)

    def _share(
        self, query_ids: Sequence[np.ndarray], texts: Sequence[TokenizedText]
    ) -> tuple[list[np.ndarray], list[Cut]]:
        """What is read of B queries and of their texts, each as the one window of its document."""
        queries: list[np.ndarray] = []
        cuts: list[Cut] = []
        for ids, text in zip(query_ids, texts, strict=True):
            own, size = longest_first(len(ids), len(text), self.layout.budget)
            # Where it is not cut, the same object: by it the encoder tells queries apart.
            queries.append(ids if len(ids) == own else ids[:own])
            cuts.append((text, [(0, size)]))
        return queries, cuts

    # Encode.

    def encode(self, read: Read, work: Work | None = None) -> Encoded:
        """What the head sees of the documents."""
        head = self.head
        return self.encoder(
            read.queries,
            read.windows,
            self.layout,
            self.settings,
            needs=head.needs,
            match=head.match if isinstance(head, TokenHead) else None,
            work=work,
        )

    # Aggregate.

    def aggregate(self, encoded: Encoded) -> torch.Tensor:
        """`(B,)` scores. Heads work in fp32, in training as in inference.

        Raises:
            ValueError: if the head, which may be somebody's own, does not give a score for each document: losses would
                broadcast what it gives.
        """
        with torch.autocast(self.settings.device.type, enabled=False):
            scores: torch.Tensor = self.head(encoded)
        if scores.shape != encoded.mask.shape[:1]:
            raise ValueError(
                f"the head {self.head.name!r} gave scores of the shape {tuple(scores.shape)} for "
                f"{len(encoded.mask)} documents: its forward must return one score for each document, (B,)"
            )
        return scores

    def explanations(self, encoded: Encoded, read: Read) -> list[Explanation]:
        """How each window, and each query token where the head can tell, contributed to B scores."""
        with torch.autocast(self.settings.device.type, enabled=False):
            scores = self.head.window_scores(encoded).tolist()
            weights = self.head.window_weights(encoded)
            terms = self.head.query_contributions(encoded) if isinstance(self.head, TokenHead) else None
        explained = []
        for i, (query, (document, spans)) in enumerate(zip(read.queries, read.cuts, strict=True)):
            shown = [] if terms is None else self.tokenizer.convert_ids_to_tokens(query.tolist())
            explained.append(
                Explanation(
                    spans=list(map(document.characters, spans)),
                    scores=scores[i][: len(spans)],
                    weights=None if weights is None else weights[i, : len(spans)].tolist(),
                    query_terms=None if terms is None else list(zip(shown, terms[i].tolist(), strict=False)),
                )
            )
        return explained

    # In which state.

    @contextmanager
    def inference(self) -> Iterator[None]:
        """Evaluation mode, and the precision of the settings."""
        modes = [(module, module.training) for module in self.modules()]
        dtype = self.settings.dtype
        self.eval()
        try:
            with torch.autocast(self.settings.device.type, dtype=dtype, enabled=dtype != torch.float32):
                yield
        finally:
            for module, training in modes:
                module.training = training

    def warm_start(self, backbone: Backbone) -> bool:
        """Lets the head take over what it can from the checkpoint; whether it then needs no training."""
        return self.head.warm_start(self.take_over(backbone))

    def take_over(self, backbone: Backbone) -> WarmStart:
        """What a head can take over from the checkpoint."""
        words = backbone.model.get_input_embeddings().weight
        cls, sep = (0 if i is None else i for i in (self.tokenizer.cls_token_id, self.tokenizer.sep_token_id))
        return WarmStart(backbone.final, words[cls], words[sep])
