"""The model: tokenizer, windows, encoder and head, which read, encode and aggregate (query, text) pairs.

Shapes: R rows of a run, P distinct pairs of a block, B documents, N windows.
"""

from __future__ import annotations

import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from torch import nn

from ..common.coverage import Account, Coverage, Explanation, Reading, Scored, tokens_in
from ..common.frames import Document, Text, as_document, factorize
from ..common.signals import take_back_signals
from .devices import dtype_name
from .encoder import TOKEN_BLOCK_CHARACTERS, WindowEncoder
from .heads.base import TokenHead, WarmStart
from .inputs import Encoded, InputFormat, Pairs, Settings
from .layout import layout_name, longest_first
from .preselection import TextPairs
from .runtimes import choose_runtime
from .templates import with_trail
from .tokens import Span, TokenCache, TokenizedText, tokenize_documents
from .weights import HeadSpec, WeightsWatch, fingerprint, seeded_head, warm_start

PAIRS_PER_BLOCK = 4096
"""Most pairs that are read and encoded at a time."""

BLOCK_SECONDS = 2.0
"""About how long a block may take if a store of scores or a progress bar waits for each."""

OnBlock = Callable[[list[list[int]], np.ndarray, Sequence[Reading]], None]
"""Called when a block is done, with the rows of each of its P pairs, `(P,)` scores, and what was read."""


@dataclass(frozen=True, eq=False)
class Block:
    """Some of the distinct (query, text) pairs of a run."""

    queries: Sequence[str]  # the distinct queries of the run
    texts: list[Text]  # distinct texts of like length
    query: list[int]  # for each pair the number of its query
    text: list[int]  # for each pair the number of its text among `texts`
    rows: list[list[int]]  # for each pair its rows in the input

    @property
    def pairs(self) -> tuple[list[str], list[Text]]:
        """The query of each pair, and its text."""
        return list(map(self.queries.__getitem__, self.query)), list(map(self.texts.__getitem__, self.text))

    @property
    def characters(self) -> int:
        """The characters of the texts of all its rows."""
        return sum(len(self.texts[text]) * len(rows) for text, rows in zip(self.text, self.rows, strict=True))


class Pace:
    """Sets the characters of a block so that it takes about so many seconds, judged by the block before.

    The first block is one pair, the longest.
    """

    def __init__(self, max_characters: int, seconds: float | None) -> None:
        self._max_characters, self._seconds = max_characters, seconds
        self.characters = max_characters if seconds is None else 1
        self._since = time.monotonic()

    def note(self, block: Block) -> None:
        """Note that a block is done."""
        if self._seconds is None:
            return
        now = time.monotonic()
        elapsed, self._since = max(now - self._since, 1e-3), now
        size = len(block.rows) * max(len(block.texts[0]), 1)
        self.characters = max(1, min(self._max_characters, int(size / elapsed * self._seconds)))


def blocks(queries: Sequence[str], texts: Sequence[Text], *, characters: int | Pace, pairs: int) -> Iterator[Block]:
    """Divide a run into blocks, longest texts first.

    A text's pairs stay together, so that it is tokenised once; texts of like length share a block, so that there is
    little padding. With the longest first, a run that does not fit into memory fails at its start.
    """
    (distinct_queries, query_of_row), (distinct_texts, text_of_row) = factorize(queries), factorize(texts)
    lengths = np.fromiter(map(len, distinct_texts), np.int64, len(distinct_texts))
    # Arrays, because an object for every pair would take more memory than the rest of a run.
    order = np.lexsort((query_of_row, text_of_row, -lengths[text_of_row]))
    block, last_text, last_pair = Block(distinct_queries, [], [], [], []), -1, (-1, -1)
    for row in order:
        number, query = int(text_of_row[row]), int(query_of_row[row])
        if (number, query) == last_pair:
            block.rows[-1].append(int(row))
            continue
        count = len(block.rows)
        limit = characters.characters if isinstance(characters, Pace) else characters
        if count and (count >= pairs or (count + 1) * len(block.texts[0]) > limit):
            yield block
            block = Block(distinct_queries, [], [], [], [])
        if number != last_text or not block.texts:
            block.texts.append(distinct_texts[number])
        block.query.append(query)
        block.text.append(len(block.texts) - 1)
        block.rows.append([int(row)])
        last_text, last_pair = number, (number, query)
    if block.rows:
        yield block


@dataclass(frozen=True, eq=False)
class Queries:
    """Distinct queries."""

    texts: Sequence[str]  # the whole queries
    lengths: Sequence[int]  # the number of their tokens
    lengths_read: Sequence[int]  # how many of these are read, before a text takes its share
    ids: Sequence[np.ndarray]  # the token ids that are read
    cut_texts: Sequence[str] = ()  # the texts that are read; none unless the encoder reads texts


@dataclass(frozen=True, eq=False)
class ReadPairs(Pairs):
    """What is read of P pairs of a query and a text: `Pairs` for the encoder, and its place in the texts."""

    texts: Sequence[TokenizedText]  # what is read of each distinct document: all, its beginning, or a selection
    spans: Sequence[list[Span]]  # the windows of each, in tokens
    readings: Sequence[Reading]  # for each pair, how much is read
    query_texts: Sequence[str] = ()  # the `cut_texts` of `Queries`


class Cutters(NamedTuple):
    """The arguments, with their values, that cut each kind of text."""

    limit: str
    windows: str
    choice: str
    title: str
    query: str

    @classmethod
    def of(cls, request: Settings, fitted: Settings) -> Cutters:
        """Return the arguments of requested settings and of the same settings, fitted to the backbone."""
        rule = fitted.windows_argument or "the longest input of the backbone"
        if rule == "window_size":
            rule = f"window_size={fitted.windows.largest}"
        choice = rule if fitted.max_windows is None else f"max_windows={fitted.max_windows}"
        query = f"max_query_len={fitted.max_query_len}"
        if request.max_query_len is None:
            query = f"the longest query of the checkpoint, which takes {fitted.max_query_len}"
        if fitted.preselect is not None:
            choice = f"preselect={fitted.preselect!r}"
        if fitted.layout.shared_budget:
            rule = choice = query = f"layout={layout_name(fitted.layout)}"
        return cls(f"max_doc_len={fitted.max_doc_len}", rule, choice, f"repeat_tokens={fitted.repeat_tokens}", query)


class Model(nn.Module):
    """Scores (query, text) pairs: text, windows, encoder, head.

    `forward` is for training, `score` for inference. Both see the same inputs.

    Args:
        encoder: encodes query and windows.
        tokenizer: its tokenizer.
        head: the aggregation, a `Head` or what has its methods.
        settings: what is read and how it is computed.
        backbone: the origin of the encoder; None for a model that is neither trained nor saved.
        head_spec: name and options of the head.
        weight_arguments: the arguments that the weights depend on.
        tokens: remembers the tokens of queries and texts, for later runs and epochs; None for a new memory.

    Attributes:
        settings: the settings, with windows that fit into the backbone.
        format: how a query and a window become an input.
        computed_in: the precision and the runtime of the backbone; both None if nothing is computed here.
        ready: whether the scores make sense without training.
        trained: whether the weights are from `fit` or `load`, so that they must not be lost.
        started: whether the weights are from another model: then `fit` goes on from them silently.
        source: the arguments of `load` for these weights, as code; empty if they are not saved.
        saved_arguments: the reprs of the arguments with which the weights were saved.
        history: one entry for each epoch of training, and for each validation.
        recipe: of the last training, JSON-able; None before one.

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
        tokens: TokenCache | None = None,
    ) -> None:
        super().__init__()
        self.encoder = encoder
        self.tokenizer = tokenizer
        self.head = head
        self.backbone = backbone
        self.head_spec = head_spec
        self.weight_arguments = weight_arguments or {}
        self.tokens = TokenCache() if tokens is None else tokens
        self.ready = self.trained = self.started = False
        self.source = ""
        self.saved_arguments: dict[str, str] = {}
        self.history: list[dict[str, Any]] = []
        self.recipe: dict[str, Any] | None = None
        self._account: Account | None = None
        self._watch = WeightsWatch()
        self._fingerprint = ""
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
        """Put a head on a loaded backbone, with the checkpoint's weights where they fit, else random ones by seed."""
        module = seeded_head(head, backbone.hidden_size, seed, channels=backbone.channels)
        with torch.random.fork_rng(devices=range(torch.cuda.device_count())):
            torch.manual_seed(seed)
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
        model.ready = warm_start(model.head, model.take_over())
        return model.eval()

    def use(self, settings: Settings) -> None:
        """Read and compute by these settings from now on; the weights move to their device."""
        self.encoder.check_needs(self.head.needs)
        how = settings.runtime, self.encoder, self.head.needs, settings.device, settings.dtype
        self.encoder.use(replace(settings, runtime=choose_runtime(*how)))
        self.settings: Settings = self.encoder.settings
        self.format: InputFormat = self.encoder.format
        reads_text = self.encoder.reads_text
        self.computed_in: tuple[str | None, str | None] = (None, None)
        if not reads_text:
            quantized = self.encoder.quantized
            precision = dtype_name(settings.dtype) if quantized is None else quantized.precision
            self.computed_in = precision, self.settings.runtime
        self._cutters = Cutters.of(settings, self.settings)
        self.to(settings.device)
        if reads_text:
            self.double()  # so that a single window's score is the scorer's

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return next(self.parameters()).device

    # The walk over a run.

    def walk(
        self,
        queries: Sequence[str],
        texts: Sequence[Text],
        *,
        offsets: bool = False,
        seconds: float | None = None,
        bar: Any = None,
    ) -> Iterator[tuple[Block, ReadPairs]]:
        """Read a run in blocks, the longest texts first, each distinct pair once, in bounded memory.

        The bar counts the characters of each block when the caller asks for the next one.
        """
        take_back_signals()
        if bar is not None:
            bar.reset(total=sum(map(len, texts)))
        characters = self.encoder.block_characters
        if isinstance(self.head, TokenHead):
            characters = min(characters, TOKEN_BLOCK_CHARACTERS)
        pace, distinct = Pace(characters, seconds), None
        for block in blocks(queries, texts, characters=pace, pairs=PAIRS_PER_BLOCK):
            distinct = distinct or self.read_queries(block.queries)
            yield block, self.read(distinct, block.query, self.tokenize(block.texts, offsets=offsets), block.text)
            pace.note(block)
            if bar is not None:
                bar.update(block.characters)

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
        """Score R rows for inference; `on_block` is called after each block, for callers that store scores."""
        account = Account(*self.computed_in)
        scored = Scored(len(texts), account.coverage)
        self.encoder.refresh()
        waiting = on_block is not None or not getattr(bar, "disable", True)
        with self.inference():
            walk = self.walk(queries, texts, offsets=explain, seconds=BLOCK_SECONDS if waiting else None, bar=bar)
            for block, pairs in walk:
                account.add(*block.pairs, pairs.readings)
                encoded = self.encode(pairs, account.coverage)
                values = self.aggregate(encoded).double().cpu().numpy()
                scored.add(block.rows, values, self.explanations(encoded, pairs) if explain else None)
                if on_block is not None:
                    on_block(block.rows, values, pairs.readings)
        return scored.checked()

    def forward(self, queries: Sequence[str], texts: Sequence[Text]) -> torch.Tensor:
        """Return the `(B,)` scores of B queries and texts, with gradients, for training."""
        if not len(queries):
            return torch.zeros(0, device=self.settings.device)
        numbers = range(len(queries))
        pairs = self.read(self.read_queries(queries), numbers, self.tokenize(texts), numbers)
        if self._account is not None:
            self._account.add(queries, texts, pairs.readings)
        return self.aggregate(self.encode(pairs, None if self._account is None else self._account.coverage))

    def coverage_of(self, queries: Sequence[str], texts: Sequence[Text], bar: Any = None) -> Coverage:
        """Return what `score` of these rows would read, without encoding anything."""
        account = Account(*self.computed_in)
        self.encoder.refresh()
        for block, pairs in self.walk(queries, texts, bar=bar):
            account.add(*block.pairs, pairs.readings)
        return account.coverage

    @contextmanager
    def counting(self, dtype: str) -> Iterator[Coverage]:
        """Let `forward` count what it reads, each query and text once, however often they are drawn."""
        self._account = Account(dtype, "torch")
        try:
            yield self._account.coverage
        finally:
            self._account = None

    # Read.

    def tokenize(self, texts: Sequence[Text], *, offsets: bool = False) -> list[TokenizedText]:
        """Return the tokens of texts with their titles, and with character offsets where they are needed."""
        settings = self.settings
        selects_by_text = settings.preselect is not None and settings.preselect.needs_text
        marks = self.format.marks_sentences
        needs_offsets = offsets or settings.windows.needs_text or selects_by_text or marks or self.encoder.reads_text

        if settings.layout.lowercase:
            texts = [Document(*settings.layout.read([doc.text, doc.repeated])) for doc in map(as_document, texts)]
        tokenize = partial(self.tokens, self.tokenizer, offsets=needs_offsets, lead=self.format.text_lead)
        tokenized = tokenize_documents(tokenize, texts, settings.repeat_tokens)
        return [text.with_sentences_marked(self.format.prefix[0]) for text in tokenized] if marks else tokenized

    def read_queries(self, queries: Sequence[str]) -> Queries:
        """Return what is read of queries, before a text takes its share."""
        settings, form = self.settings, self.format
        limit = sys.maxsize if settings.layout.shared_budget else settings.max_query_len or sys.maxsize
        texts = settings.layout.read(queries) if settings.layout.lowercase else queries
        tokens = self.tokens(self.tokenizer, texts, offsets=self.encoder.reads_text, lead=form.query_lead)
        ids = [query.ids[:limit] for query in tokens]
        if form.query_lead:
            ids = [query_ids if len(query_ids) else self._lead(form.query_lead) for query_ids in ids]
        if form.query_trail:
            ids = with_trail(partial(self.tokens, self.tokenizer), form, texts, ids)
        cut_texts = [query.beginning(limit) for query in tokens] if self.encoder.reads_text else ()
        lengths = list(map(len, tokens))
        return Queries(queries, lengths, [min(length, limit) for length in lengths], ids, cut_texts)

    def read(
        self, queries: Queries, query: Sequence[int], texts: Sequence[TokenizedText], text: Sequence[int]
    ) -> ReadPairs:
        """Return the windows that are read of P pairs; `query` and `text` are the numbers in `queries` and `texts`."""
        if self.settings.layout.shared_budget:
            ids, query_of_pair, documents, spans, document = self._share(queries.ids, query, texts, text)
            query_lengths = [len(ids[number]) for number in query_of_pair]
        else:
            ids, query_of_pair, query_lengths = queries.ids, query, [queries.lengths_read[number] for number in query]
            documents, spans, document = self._cut(queries.texts, query, texts, text)
        for q, d in zip(query_of_pair, document, strict=True):
            self.head.check_windows(len(spans[d]), max(len(ids[q]), self.format.query_size or 0))
        windows = [list(map(doc.read, doc_spans)) for doc, doc_spans in zip(documents, spans, strict=True)]
        if self.format.text_lead:
            lead = self._lead(self.format.text_lead)
            windows = [[tokens if len(tokens) else lead for tokens in doc_windows] for doc_windows in windows]
        pairs = zip(text, document, query, query_lengths, strict=True)
        readings = [
            self._reading(texts[t], documents[d], spans[d], queries.lengths[q], tokens) for t, d, q, tokens in pairs
        ]
        return ReadPairs(ids, windows, query_of_pair, document, documents, spans, readings, queries.cut_texts)

    def _lead(self, lead: str) -> np.ndarray:
        """Return the tokens of an empty query or text: the white space before any other one."""
        return self.tokens(self.tokenizer, [lead])[0].ids

    def _cut(
        self, queries: Sequence[str], query: Sequence[int], texts: Sequence[TokenizedText], text: Sequence[int]
    ) -> tuple[Sequence[TokenizedText], list[list[Span]], Sequence[int]]:
        """Return what is read of documents, the windows of each, and for each pair the number of its document."""
        settings, limit = self.settings, self.settings.max_doc_len
        documents = texts if limit is None else [document.head(limit) for document in texts]
        if settings.preselect is None:
            return documents, list(map(settings.windows, documents)), text
        # The model of a selector has its own precision.
        with torch.autocast(settings.device.type, enabled=False):
            pairs = TextPairs(settings.layout.read(queries), documents, np.asarray(query), np.asarray(text))
            cuts = settings.preselect.cut(pairs, settings.windows)
        return [document for document, _ in cuts], [spans for _, spans in cuts], range(len(cuts))

    def _share(
        self, ids: Sequence[np.ndarray], query: Sequence[int], texts: Sequence[TokenizedText], text: Sequence[int]
    ) -> tuple[Sequence[np.ndarray], Sequence[int], Sequence[TokenizedText], list[list[Span]], Sequence[int]]:
        """Return the ids of queries, each pair's query, the documents, their single windows, each pair's document."""
        budget = self.format.budget or 0
        queries: dict[tuple[int, int], int] = {}
        documents: dict[tuple[int, int], int] = {}
        query_of_pair, document_of_pair = [], []
        for q, t in zip(query, text, strict=True):
            query_size, text_size = longest_first(len(ids[q]), len(texts[t]), budget)
            query_of_pair.append(queries.setdefault((q, query_size), len(queries)))
            document_of_pair.append(documents.setdefault((t, text_size), len(documents)))
        return (
            [ids[q][:size] for q, size in queries],
            query_of_pair,
            [texts[t] for t, _ in documents],
            [[(0, size)] for _, size in documents],
            document_of_pair,
        )

    def _reading(
        self, text: TokenizedText, document: TokenizedText, spans: list[Span], query_tokens: int, query_read: int
    ) -> Reading:
        """Return how much of a pair is read, and how much of the rest each argument cut."""
        settings, cutters, read, cut = self.settings, self._cutters, tokens_in(spans), Counter[str]()
        if len(text) > read:
            within_limit = covered = len(text)
            if not settings.layout.shared_budget:
                within_limit = covered = min(len(text), settings.max_doc_len or len(text))
                if settings.preselect is None:
                    covered = settings.windows.reach(within_limit)
            cut[cutters.limit] += len(text) - within_limit
            cut[cutters.windows] += within_limit - covered
            cut[cutters.choice] += covered - read
        if document.title is not None:
            cut[cutters.title] += document.title.tokens - document.title.tokens_read
        query_cut_by = cutters.query if query_read < query_tokens else ""
        return Reading(len(text), read, len(spans), query_tokens, query_read, query_cut_by, dict(+cut))

    # Encode.

    def encode(self, pairs: ReadPairs, coverage: Coverage | None = None) -> Encoded:
        """Return what the head sees of the documents."""
        head = self.head
        match = head.match if isinstance(head, TokenHead) else None
        encoded: Encoded = self.encoder(pairs, needs=head.needs, match=match, coverage=coverage)
        return encoded

    # Aggregate.

    def aggregate(self, encoded: Encoded) -> torch.Tensor:
        """Return `(B,)` scores. Heads work in fp32, in training and in inference."""
        with torch.autocast(self.settings.device.type, enabled=False):
            scores: torch.Tensor = self.head(encoded)
        if scores.shape != encoded.mask.shape[:1]:
            raise ValueError(
                f"the head {self.head.name!r} gave scores of the shape {tuple(scores.shape)} for "
                f"{len(encoded.mask)} documents: its forward must return one score for each document, (B,)"
            )
        return scores

    def explanations(self, encoded: Encoded, pairs: ReadPairs) -> list[Explanation]:
        """Return the shares of each window, and if the head can tell of each query token, in P scores."""
        with torch.autocast(self.settings.device.type, enabled=False):
            scores = self.head.window_scores(encoded).tolist()
            weights = self.head.window_weights(encoded)
            terms = self.head.query_contributions(encoded) if isinstance(self.head, TokenHead) else None
        explanations, places = [], None
        if encoded.places is not None:
            places = cast(Any, self.encoder).term_places(encoded, pairs, self.head.token_windows(encoded))
        for i, (query, number) in enumerate(zip(pairs.query, pairs.document, strict=True)):
            document, spans, term_scores = pairs.texts[number], pairs.spans[number], None
            if terms is not None:
                tokens = self.tokenizer.convert_ids_to_tokens(pairs.queries[query].tolist())
                term_scores = list(zip(tokens, terms[i].tolist(), strict=False))
            elif places is not None:
                term_scores = [(token, part) for token, _, _, part in places[i]]
            pieces = [(n, characters) for n, span in enumerate(spans) for characters in document.pieces(span)]
            windows = [n for n, _ in pieces]
            explanations.append(
                Explanation(
                    spans=[characters for _, characters in pieces],
                    scores=[scores[i][n] for n in windows],
                    weights=None if weights is None else weights[i, windows].tolist(),
                    term_scores=term_scores,
                    term_places=None if places is None else places[i],
                )
            )
        return explanations

    # Its weights.

    @contextmanager
    def inference(self) -> Iterator[None]:
        """Enter evaluation mode, and the precision of the settings."""
        modes, dtype = {}, self.settings.dtype
        for module in self.modules():
            modes[module] = module.training
        self.eval()
        if next(self.parameters()).device.type != self.settings.device.type:  # moved by somebody meanwhile
            self.to(self.settings.device)
        try:
            with torch.autocast(self.settings.device.type, dtype=dtype, enabled=dtype != torch.float32):
                yield
        finally:
            for module, training in modes.items():
                module.training = training

    def take_over(self) -> WarmStart:
        """Return what a head can take over from the checkpoint."""
        return self.encoder.take_over(self.backbone, self.tokenizer)

    def mark_trained(self, recipe: dict[str, Any]) -> None:
        """Note that the weights, trained by this recipe, make sense and must not be lost."""
        self.trained = self.ready = True
        self.started, self.source, self.recipe = False, "", recipe
        self._fingerprint = ""

    def fingerprint(self, *, contents: bool = True) -> str:
        """Return the weights' fingerprint, renewed when they have changed; for `contents` see `WeightsWatch`."""
        if self._watch.changed(self, contents=contents):
            self._fingerprint = ""  # at once: the next look, perhaps of another thread, sees no change
        if not self._fingerprint:
            self._fingerprint = fingerprint(self.state_dict())
        return self._fingerprint
