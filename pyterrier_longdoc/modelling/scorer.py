"""Tokenizer, windows, encoder and head in one module that scores (query, text) pairs."""

from __future__ import annotations

import copy
import itertools
import logging
import queue
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import numpy as np
import torch
from torch import nn

from ..common.coverage import Coverage, Explanation, RawExplanation, Reading, check_finite
from .backbones.load import Backbone, build_backbone
from .backbones.templates import with_trail
from .batching import Encoded, PairLayout, of_documents
from .devices import dtype_name
from .encoder import WindowEncoder, encode_distinct
from .heads.base import Head, TokenHead, WarmStart
from .preselection import Cut, Preselection, check_preselection
from .texts import Block, TokenCache, TokenizedText, blocks, numbered, share_out
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
        self._max_length = backbone.longest_input
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


logger = logging.getLogger(__name__)

BLOCK_CHARACTERS = 1_000_000
"""Text that is tokenised and held at a time, about 250,000 tokens; larger blocks pad less."""
BLOCK_PAIRS = 4096
TOKEN_BLOCK_CHARACTERS = 150_000
"""The same for heads that look at tokens, whose matches take `channels * 32` numbers for each token."""
SMALL_BLOCK_CHARACTERS, BLOCKS_PER_DEVICE = 65_536, 4
"""Several devices share a run in smaller blocks, so that each has some: no smaller than a full pass on a GPU."""

Pairs = tuple[list[np.ndarray], list[TokenizedText], list[str]]
"""Of B (query, document) pairs the queries' token ids, the documents, and the queries."""

Part = TypeVar("Part")
Result = TypeVar("Result")


@dataclass(frozen=True, eq=False)
class Step:
    """A block of a run.

    Attributes:
        block: its pairs, and the rows that ask for them.
        documents: its tokenised texts.
        pairs: its pairs, with their tokens.
        report: to be called with shares of its work, for a progress bar; None for none.
    """

    block: Block
    documents: list[TokenizedText]
    pairs: Pairs
    report: Callable[[float], None] | None


def steps(
    scorer: LongDocScorer,
    queries: Sequence[str],
    query_ids: Sequence[np.ndarray],
    texts: Sequence[str],
    on_rows: Callable[[int], None] | None,
    *,
    offsets: bool,
) -> Iterator[Step]:
    """Divides a run.

    Args:
        scorer: whose run it is.
        queries: R queries.
        query_ids: token ids of the distinct ones, in order of appearance.
        texts: R texts.
        on_rows: called with the number of rows that are done.
        offsets: also keep the character offsets of the texts' tokens.
    """
    asked, of_row = numbered(queries)
    characters = scorer.block_characters()
    if len(scorer.devices) > 1:
        on_rows = one_at_a_time(on_rows)
        share = sum(map(len, texts)) // (BLOCKS_PER_DEVICE * len(scorer.devices))
        characters = min(characters, max(share, SMALL_BLOCK_CHARACTERS))
    for block in blocks(of_row, texts, characters=characters, pairs=BLOCK_PAIRS):
        documents = scorer.tokenize(block.texts, offsets=offsets)
        pairs = (
            [query_ids[query] for query, _ in block.pairs],
            [documents[text] for _, text in block.pairs],
            [asked[query] for query, _ in block.pairs],
        )
        yield Step(block, documents, pairs, share_out(on_rows, sum(map(len, block.rows))))


def on_devices(
    scorer: LongDocScorer, parts: Iterable[Part], work: Callable[[LongDocScorer, Part], Result]
) -> Iterator[tuple[Part, Result]]:
    """`work(scorer, part)` of each part of a run by the scorer or, on several devices, by copies of it, as it is done.

    Copies are made anew for every run of more than one part, so that they have the scorer's weights. They are copies of
    all objects in it, also of those that hooks belong to.

    Args:
        scorer: its coverage counts what is encoded.
        parts: steps, and what has been made of them.
        work: called in a thread for each device if there are several.
    """

    def counted(worker: LongDocScorer, part: Part) -> tuple[Result, tuple[int, int]]:
        return work(worker, part), worker.encoder.take_counts()

    workers = [scorer]
    if len(scorer.devices) > 1:
        parts = iter(parts)
        ahead = list(itertools.islice(parts, len(scorer.devices)))
        parts = itertools.chain(ahead, parts)
        if len(ahead) > 1:
            workers = _copies(scorer, scorer.devices[: len(ahead)])
    for part, (result, counts) in in_turn(workers, parts, counted):
        scorer.coverage.add_encoded(*counts)
        yield part, result
    scorer.encoder.affordable_tokens = min(worker.encoder.affordable_tokens for worker in workers)


def _copies(scorer: LongDocScorer, devices: Sequence[torch.device]) -> list[LongDocScorer]:
    """A copy on each device that has room for one; the first is the scorer's own.

    A copy there too: the caller may use the scorer in the meantime, and changes its modes.
    """
    shared = (scorer.tokenizer, scorer.tokens, scorer.windows, scorer.preselect)
    copies = []
    for device in devices:
        try:
            copies.append(replica(scorer, device, shared).eval())
        except torch.OutOfMemoryError:
            logger.warning("%s has no room for a copy of the model and takes no part", device)
    return copies


Module = TypeVar("Module", bound=nn.Module)
Item = TypeVar("Item")
Result = TypeVar("Result")


def replica(module: Module, device: torch.device, shared: Sequence[Any] = ()) -> Module:
    """A copy for inference whose weights are on another device; on the same one they are the same memory.

    Args:
        module: what is copied.
        device: where the copy's weights are.
        shared: attributes that the copy has in common with it.
    """
    memo: dict[int, Any] = {id(value): value for value in shared}
    for parameter in module.parameters():
        memo[id(parameter)] = nn.Parameter(parameter.detach().to(device), requires_grad=False)
    for buffer in module.buffers():
        memo[id(buffer)] = buffer.to(device)
    return copy.deepcopy(module, memo)


def in_turn(
    workers: Sequence[Module], items: Iterable[Item], work: Callable[[Module, Item], Result]
) -> Iterator[tuple[Item, Result]]:
    """`work(worker, item)` of every item; each goes to the next worker that is free.

    With one worker nothing runs beside the caller. With more, each has a thread, in which torch's inference mode is on,
    and items come as they are done: a slow worker holds nobody up. Items are prepared by the caller's thread, not
    further ahead than the workers need. After an error what is already being done is still yielded; then it is raised.

    Args:
        workers: modules, each on a device of its own.
        items: what is to be done.
        work: does it.
    """
    if len(workers) == 1:
        for item in items:
            yield item, work(workers[0], item)
        return
    free: queue.SimpleQueue[Module] = queue.SimpleQueue()
    for worker in workers:
        free.put(worker)

    def done_by_next(item: Item) -> Result:
        worker = free.get()
        try:
            with torch.inference_mode(), _current(worker):
                return work(worker, item)
        finally:
            free.put(worker)

    waiting: dict[Future[Result], Item] = {}
    errors: list[BaseException] = []
    pool = ThreadPoolExecutor(len(workers), thread_name_prefix="longdoc-device")
    try:
        for item in _until_error(items, errors):
            waiting[pool.submit(done_by_next, item)] = item
            if len(waiting) > len(workers):
                yield from _finished(waiting, errors)
            if errors:
                break
        while waiting:
            yield from _finished(waiting, errors)
        if errors:
            raise errors[0]
    finally:
        pool.shutdown(cancel_futures=True)


def _until_error(items: Iterable[Item], errors: list[BaseException]) -> Iterator[Item]:
    try:
        yield from items
    except Exception as error:  # noqa: BLE001 - raised by the caller once finished work is yielded
        errors.append(error)


def _finished(waiting: dict[Future[Result], Item], errors: list[BaseException]) -> Iterator[tuple[Item, Result]]:
    """Waits until something is done; takes it from what is waited for."""
    for future in wait(waiting, return_when=FIRST_COMPLETED).done:
        item = waiting.pop(future)
        error = future.exception()
        if error is None:
            yield item, future.result()
        else:
            errors.append(error)


def one_at_a_time(call: Callable[[int], None] | None) -> Callable[[int], None] | None:
    """The same callback for several threads, which wait for each other."""
    if call is None:
        return None
    lock = threading.Lock()

    def locked(value: int) -> None:
        with lock:
            call(value)

    return locked


def _current(module: nn.Module) -> AbstractContextManager[Any]:
    """Kernels that torch did not write start on the current GPU, not on that of their tensors."""
    device = next(module.parameters()).device
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()
