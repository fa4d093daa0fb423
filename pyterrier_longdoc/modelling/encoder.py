"""The window encoder: windows go through the backbone in passes of like length, and the document axis is restored.

Shapes: B documents, V windows of all documents, V' windows of a pass, N windows of the longest document, L layers, Q
query tokens, T tokens of a window with its query and special tokens, D tokens of a document, H hidden size.
"""

from __future__ import annotations

import itertools
import logging
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import nn

from ..common.coverage import Coverage
from .backbones.architectures import layer_stack
from .backbones.load import Backbone, build_backbone
from .backbones.t5 import FirstStep
from .heads.base import WarmStart
from .inputs import Encoded, InputFormat, Matches, Pairs, QueryStates, Settings, WindowBatch, to_dense
from .quantized import QuantizedRuntime
from .runtimes import OpenVinoRuntime, TorchRuntime

logger = logging.getLogger(__name__)

GPU_BATCH_TOKENS, CPU_BATCH_TOKENS = 16384, 2048
"""Most tokens in a pass by default. A CPU keeps the states of a small pass in its caches; only large passes keep a GPU
busy (`tests/benchmarks/README.md`)."""

EXACT_RUN = 4
"""On a CPU so many windows of one length make passes of their own: attention without padding needs no mask and is
faster. In half precision one window is enough: with a mask such passes are slower than in fp32."""

BLOCK_CHARACTERS, TOKEN_BLOCK_CHARACTERS = 1_000_000, 150_000
"""Text that is tokenised and held at a time, about 250,000 tokens: larger blocks pad less. The second limit is for
heads that hold states or matches of all tokens, `channels * 32` numbers for each."""

MICRO_TOKENS = 2**18
"""Tokens, padding included, that are tensors at a time, about 17 bytes each: sixteen of the largest default passes, so
that a cut through the sorted windows costs next to nothing."""

MatchFunction = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""From one layer's `(V', Q, H)` query states and `(V', T, H)` window states, and `(V', Q, T)` bool, whether two tokens
are the same word piece, to `(V', Q, T)` matches."""

States = tuple[torch.Tensor, ...]
"""`(V', T', H)` states of the last layer alone, or of every layer, the embeddings included."""


class WindowEncoder(nn.Module):
    """Encodes each window with its query into one vector, and into what else the head needs.

    Args:
        backbone: the pre-trained encoder, and the representation step if it was a cross-encoder.

    Attributes:
        input_format: how the backbone reads a query and a window, before `use`.
        affordable_tokens: a limit on the tokens of a pass, set when memory runs out.
        runtime: computes the backbone when it scores.
        quantized: the runtime that has the backbone in int8; None for a backbone that is not quantized.
        settings: what is read and how it is computed, after `use`.
        format: how a query and a window become an input, after `use`.
    """

    block_characters = BLOCK_CHARACTERS
    reads_text = False
    """Whether it reads texts in place of token ids."""
    is_exported = True
    """Whether another runtime than torch can compute its backbone."""
    vectors_of: Any = None
    """How tokens get vectors that are compared, see `TokenVectors`; None where they get none."""

    build_backbone = staticmethod(build_backbone)
    """Rebuilds the backbone of a saved model."""

    settings: Settings
    format: InputFormat

    def __init__(self, backbone: Backbone) -> None:
        super().__init__()
        self.backbone = backbone.model
        self.representation = backbone.representation or nn.Identity()
        self.pooling = backbone.pooling
        self.rules = backbone.rules
        self.hidden_size = backbone.hidden_size
        self.state_size = backbone.state_size
        self.input_format: Any = None if backbone.tokenizer is None else self.make_format(backbone)
        self.affordable_tokens = sys.maxsize
        self.quantized: QuantizedRuntime | None = None
        self.runtime: Any = TorchRuntime()

    def make_format(self, backbone: Backbone) -> InputFormat:
        """Return how the backbone reads a query and a window."""
        has_words = backbone.template is not None or bool(backbone.options.prompt)
        return replace(backbone.pair_format(), longest=backbone.longest_input, has_words=has_words)

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return next(self.parameters()).device

    def use(self, settings: Settings) -> None:
        """Encode by these settings from now on; ValueError if they do not fit this backbone."""
        if self.quantized is not None:
            self.runtime = self.quantized
        elif settings.runtime != self.runtime.name:
            self.runtime = self.make_runtime(settings.runtime)
        self.settings, self.format = self.input_format.fit(settings)

    def make_runtime(self, name: str | None) -> TorchRuntime | OpenVinoRuntime:
        """Return the runtime of this name."""
        return OpenVinoRuntime() if name == "openvino" else TorchRuntime()

    def check_needs(self, needs: str) -> None:
        """Raise ValueError if a head needs states that the backbone does not have in one width."""
        if needs != "cls" and isinstance(self.backbone, FirstStep):
            raise ValueError(
                "this head looks at the states of query and text, but an encoder-decoder gives one for its answer: "
                "use FirstP, MaxP, AvgP, PARADE without query_states, ..."
            )
        if needs == "last" and self.state_size != self.hidden_size:
            raise ValueError(
                f"this head needs vectors of one width, but the checkpoint turns states of {self.state_size} features "
                f"into vectors of {self.hidden_size}"
            )

    def refresh(self) -> None:
        """Forget, at the start of a run, the results of other weights."""
        self.runtime.begin(self.backbone)

    def take_over(self, backbone: Backbone, tokenizer: Any) -> WarmStart:
        """Return what a head can take over from the checkpoint."""
        words = backbone.model.get_input_embeddings().weight
        cls, sep = (0 if i is None else i for i in (tokenizer.cls_token_id, tokenizer.sep_token_id))
        return WarmStart(backbone.final, words[cls], words[sep])

    # Encoding.

    def forward(
        self, pairs: Pairs, *, needs: str = "cls", match: MatchFunction | None = None, coverage: Coverage | None = None
    ) -> Encoded:
        """Encode the windows of P documents, each with its query.

        Args:
            pairs: P queries and documents.
            needs: what the head needs: `"cls"`, one vector for each window; `"query"`, also the last layer's states of
                the query's tokens in each document's first window (of a cross-encoder after its representation step);
                `"last"` or `"all"`, also these states as they are, and matches of query and document tokens in the
                last layer or in all.
            match: makes the matches of one layer.
            coverage: counts what is computed.

        Returns:
            `cls (P, N, H)` in fp32, `mask (P, N)` and, if needed, the matches and the query's states.
        """
        if needs == "cls":
            query, windows = pairs.by_window()
            return to_dense(self.vectors(pairs.queries, query, windows, self.format, coverage), pairs.counts)
        batch = self.format.collate(
            [pairs.queries[number] for number in pairs.query],
            [pairs.documents[number] for number in pairs.document],
            self.settings.device,
        )
        order = torch.argsort(batch.lengths, stable=True)
        query_collector = QueryCollector(batch)
        match_collector = None if match is None else MatchCollector(batch, match, query_collector)
        if match_collector is not None:
            # First windows have the queries' states: they come before all others.
            is_first = query_collector.window_number[order] == 0
            order = torch.cat([order[is_first], order[~is_first]])
        vectors = []
        for rows, states, mask in self._passes(batch, order, coverage, needs == "all"):
            vectors.append(self._vectors(states[-1], mask))
            query_collector.add(rows, states)
            if match_collector is not None:
                match_collector.add(rows, states)
        encoded = to_dense(torch.cat(vectors)[order.argsort()].float(), pairs.counts)  # (P, N, H)
        if match_collector is not None:
            return replace(encoded, matches=match_collector.collect(), query=query_collector.collect())
        return replace(encoded, query=self._represent_query(query_collector.collect(), self.format.query_size))

    def vectors(
        self,
        queries: Sequence[np.ndarray],
        query: Sequence[int],
        windows: Sequence[np.ndarray],
        form: InputFormat,
        coverage: Coverage | None = None,
    ) -> torch.Tensor:
        """Return the `(V, H)` fp32 vectors of windows with their queries; without gradients equal inputs share one.

        Windows of all documents are sorted by length, which bounds the memory for padded inputs: one long sentence
        among 20,000 short ones does not make them all long.
        """
        numbers, first_inputs = _distinct(query, windows)
        encoding_order: list[int] = []
        vectors = []
        lengths = form.length([len(queries[query[i]]) for i in first_inputs], [len(windows[i]) for i in first_inputs])
        for part in micro_batches(lengths.tolist()):
            inputs = [first_inputs[number] for number in part]
            part_queries = [queries[query[i]] for i in inputs]
            batch = form.collate(part_queries, [[windows[i]] for i in inputs], self.settings.device)
            order = torch.argsort(batch.lengths, stable=True)
            for rows, states, mask in self._passes(batch, order, coverage):
                vectors.append(self._vectors(states[-1], mask))
                encoding_order += [part[row] for row in rows.tolist()]
        positions = torch.tensor(encoding_order).argsort()[numbers]
        return torch.cat(vectors)[positions.to(self.settings.device)].float()

    def token_states(
        self, batch: WindowBatch, coverage: Coverage | None = None, kept: torch.Tensor | None = None
    ) -> list[torch.Tensor]:
        """Return V tensors `(T, H)`, the last layer's states in fp32 of real tokens, or of those in `kept (V, T)`."""
        states: dict[int, torch.Tensor] = {}
        order = torch.argsort(batch.lengths, stable=True)
        for rows, encoded, mask in self._passes(batch, order, coverage):
            chosen = mask if kept is None else kept[rows, : mask.shape[1]]
            for row, state, real in zip(rows.tolist(), encoded[-1].float(), chosen, strict=True):
                states[row] = state[: len(real)][real]
        return [states[row] for row in range(len(order))]

    def divide(
        self, lengths: Sequence[int], order: torch.Tensor, *, exact_run: int | None = None
    ) -> Iterator[torch.Tensor]:
        """Divide rows, ascending in length, into passes within the limits on windows and tokens."""
        settings, start, longest = self.settings, 0, 0
        groups = self._groups(lengths, exact_run)
        limit = settings.max_batch_tokens or (CPU_BATCH_TOKENS if settings.device.type == "cpu" else GPU_BATCH_TOKENS)
        limit = min(limit, self.affordable_tokens)
        for row, length in enumerate(map(self.rules.cost, lengths)):
            longest = max(longest, length)
            is_full = row - start == settings.batch_size or (row + 1 - start) * longest > limit
            if (is_full or groups[row] != groups[start]) and row > start:
                yield order[start:row]
                start, longest = row, length
        yield order[start:]

    def _groups(self, lengths: Sequence[int], exact_run: int | None) -> list[tuple[int, int | None]]:
        """Return what the rows of a pass have in common: the architecture's group and, in a long run, the length."""
        groups: list[tuple[int, int | None]] = []
        for length, run in itertools.groupby(lengths):
            rows = len(list(run))
            # Inputs that the architecture pads need a mask in any case.
            unpadded = exact_run is not None and rows >= exact_run and self.rules.padded(length) == length
            groups += [(self.rules.group(length), length if unpadded else None)] * rows
        return groups

    def _passes(
        self, batch: WindowBatch, order: torch.Tensor, coverage: Coverage | None, all_layers: bool = False
    ) -> Iterator[tuple[torch.Tensor, States, torch.Tensor]]:
        """Yield rows, states and mask of each pass; when memory runs out, passes become smaller from then on."""
        lengths, start, failed_rows = batch.lengths[order].tolist(), 0, None
        exact_run = None
        if batch.input_ids.device.type == "cpu" and not torch.is_grad_enabled():
            exact_run = 1 if torch.is_autocast_enabled("cpu") else EXACT_RUN
        while start < len(order):
            for rows in self.divide(lengths[start:], order[start:], exact_run=exact_run):
                try:
                    states, mask, num_computed = self._encode(batch, rows, all_layers)
                except RuntimeError as error:
                    # In training smaller passes do not help: the graph of earlier passes fills the memory.
                    if len(rows) == 1 or torch.is_grad_enabled() or not _is_out_of_memory(error):
                        raise
                    failed_rows = rows
                    break
                start += len(rows)
                if coverage is not None:
                    coverage.tokens_encoded += int(mask.sum())
                    coverage.tokens_computed += num_computed
                yield rows, states, mask
            if failed_rows is not None:
                # Outside "except": inside it the error would keep the failed pass's memory.
                self._afford_less(batch, failed_rows)
                failed_rows = None

    def _afford_less(self, batch: WindowBatch, rows: torch.Tensor) -> None:
        longest = int(batch.lengths[rows].max())
        self.affordable_tokens = max(1, len(rows) // 2) * self.rules.cost(longest)
        logger.warning(
            "memory ran out in a pass of %d windows of up to %d tokens: from now on a pass has at most %d tokens; "
            "max_batch_tokens=%d spares the attempt",
            *(len(rows), longest, self.affordable_tokens, self.affordable_tokens),
        )
        if torch.cuda.is_available():
            torch.cuda.empty_cache()

    def _encode(self, batch: WindowBatch, rows: torch.Tensor, all_layers: bool) -> tuple[States, torch.Tensor, int]:
        """Return the states of a pass, its `(V', T')` mask, and the number of computed tokens, padding included."""
        length = self.rules.padded(int(batch.lengths[rows].max()))

        def slice_pass(values: torch.Tensor, padding: int = 0) -> torch.Tensor:
            values = values[rows, :length]
            return nn.functional.pad(values, (0, length - values.shape[1]), value=padding)

        mask = slice_pass(batch.attention_mask)
        inputs: dict[str, Any] = {"input_ids": slice_pass(batch.input_ids, self.backbone.config.pad_token_id or 0)}
        # Inputs without padding need no mask: attention is faster without one, and FNet may not take one.
        if not bool(mask.all()):
            inputs["attention_mask"] = mask.long()
        if batch.token_type_ids is not None:
            inputs["token_type_ids"] = slice_pass(batch.token_type_ids)
        if batch.position_ids is not None:
            inputs["position_ids"] = slice_pass(batch.position_ids)
        inputs |= self.rules.extra_inputs(batch, rows, mask)
        recording: AbstractContextManager[list[torch.Tensor]] = self._recording() if all_layers else nullcontext([])
        with recording as earlier_states, self.rules.pass_context(self.backbone, length):
            last_states = self.runtime(self.backbone, inputs)
        return (*earlier_states, last_states), mask, mask.numel()

    @contextmanager
    def _recording(self) -> Iterator[list[torch.Tensor]]:
        """Collect the inputs of all layers: the embeddings, and the states of all layers but the last.

        `output_hidden_states` of transformers 5 would leave hooks on the model that cannot be pickled.
        """
        states: list[torch.Tensor] = []

        def record(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            states.append(args[0] if args else kwargs["hidden_states"])

        stack = self.backbone.get_submodule(layer_stack(self.backbone))
        handles = [layer.register_forward_pre_hook(record, with_kwargs=True) for layer in stack.children()]
        try:
            yield states
        finally:
            for handle in handles:
                handle.remove()

    def _represent_query(self, query: QueryStates, size: int | None) -> QueryStates:
        """Return the query's states after the representation step, padded to `size` tokens if there is a size."""
        states = self.representation(query.states).float()
        states = states.masked_fill(~query.mask.unsqueeze(-1), 0.0)
        missing = 0 if size is None else size - states.shape[1]
        return QueryStates(
            nn.functional.pad(states, (0, 0, 0, missing)), nn.functional.pad(query.mask, (0, missing)), size is not None
        )

    def _vectors(self, states: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """Return `(V', H)` vectors: the representation of the pooled states, or for `"late"` the other way round."""
        if self.pooling == "late":
            return self._pool(self.representation(states), mask)
        return self.representation(self._pool(states, mask))

    def _pool(self, states: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        if self.pooling == "cls":
            return states[:, 0]  # (V', H)
        if self.pooling == "last":
            position = torch.arange(mask.shape[1], device=mask.device)
            last = (position * mask).argmax(1)  # (V',)
            return states[torch.arange(len(last), device=last.device), last]  # (V', H)
        # In fp32, because bfloat16 cannot count beyond 256 tokens.
        weights = mask.unsqueeze(-1).float()
        return (states * weights).sum(1) / weights.sum(1)  # (V', H)


def _is_out_of_memory(error: RuntimeError) -> bool:
    """Tell whether memory ran out, on a GPU or on a CPU, whose allocator has no error class."""
    return isinstance(error, torch.OutOfMemoryError) or "can't allocate memory" in str(error)


def micro_batches(lengths: Sequence[int]) -> Iterator[list[int]]:
    """Sort inputs by length and divide them into parts of at most `MICRO_TOKENS` tokens, padding included."""
    part: list[int] = []
    for i in sorted(range(len(lengths)), key=lengths.__getitem__):
        if part and (len(part) + 1) * lengths[i] > MICRO_TOKENS:
            yield part
            part = []
        part.append(i)
    yield part


def map_distinct(sequences: Sequence[np.ndarray], make: Callable[[list[np.ndarray]], Sequence[Any]]) -> list[Any]:
    """Return a result for each token sequence; equal ones share one."""
    distinct = {sequence.tobytes(): sequence for sequence in sequences}
    results = dict(zip(distinct, make(list(distinct.values())), strict=True))
    return [results[sequence.tobytes()] for sequence in sequences]


def _distinct(queries: Sequence[int], windows: Sequence[np.ndarray]) -> tuple[list[int], list[int]]:
    """Return for each input its number among the distinct ones, and the first input of each number."""
    if torch.is_grad_enabled():
        # Dropout makes equal inputs differ.
        all_inputs = list(range(len(windows)))
        return all_inputs, all_inputs
    numbers: dict[tuple[int, bytes], int] = {}
    input_numbers: list[int] = []
    first_inputs: list[int] = []
    for i, (query, window) in enumerate(zip(queries, windows, strict=True)):
        number = numbers.setdefault((query, window.tobytes()), len(numbers))
        if number == len(first_inputs):
            first_inputs.append(i)
        input_numbers.append(number)
    return input_numbers, first_inputs


class QueryCollector:
    """The states of the query's tokens in the first window of each document, collected pass by pass."""

    def __init__(self, batch: WindowBatch) -> None:
        counts = torch.bincount(batch.doc, minlength=batch.documents)
        self._doc = batch.doc
        self.first_row = counts.cumsum(0) - counts  # (B,)
        self.window_number = torch.arange(len(batch.doc), device=batch.doc.device) - self.first_row[batch.doc]  # (V,)
        self.columns, self.mask = _span(batch.query_start, batch.query_length, self.first_row)  # (B, Q)
        self.layers: list[torch.Tensor] = []  # L times (B, Q, H), in fp32

    def add(self, rows: torch.Tensor, states: States) -> None:
        """Collect the states of one pass."""
        first_windows = (self.window_number[rows] == 0).nonzero()  # (documents that begin here, 1)
        doc = self._doc[rows[first_windows[:, 0]]]
        columns = self.columns[doc].clamp(max=states[0].shape[1] - 1)
        if not self.layers:
            shape = (*self.mask.shape, states[0].shape[2])
            self.layers = [layer.new_zeros(shape, dtype=torch.float32) for layer in states]
        for queries, layer in zip(self.layers, states, strict=True):
            queries.index_put_((doc,), layer[first_windows, columns].float())

    def collect(self) -> QueryStates:
        """Return the last layer's states of every document's query; zeros at padding."""
        return QueryStates(self.layers[-1].masked_fill(~self.mask.unsqueeze(-1), 0.0), self.mask)


class MatchCollector:
    """Matches windows with their document's query, pass by pass, without keeping the token states of a pass.

    A document's query states are those of its first window (Boytsov et al. 2025, section 3, as CEDR): first windows
    must be added before the others.
    """

    def __init__(self, batch: WindowBatch, match: MatchFunction, queries: QueryCollector) -> None:
        self._batch = batch
        self._match = match
        self._queries = queries
        lengths = batch.content_length
        starts = lengths.cumsum(0) - lengths
        self._offset = starts - starts[queries.first_row][batch.doc]  # (V,) where a window begins in its document
        totals = torch.zeros_like(queries.first_row).index_add_(0, batch.doc, lengths)
        self._longest = max(1, int(totals.max()))
        self._query_ids = batch.input_ids[queries.first_row.unsqueeze(1), queries.columns]  # (B, Q)
        self._parts: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = []

    def add(self, rows: torch.Tensor, states: States) -> None:
        """Match the windows of one pass; first windows must come before the others."""
        batch, doc, size = self._batch, self._batch.doc[rows], states[0].shape[1]
        same_token = self._query_ids[doc].unsqueeze(2) == batch.input_ids[rows, :size].unsqueeze(1)  # (V', Q, T)
        with torch.autocast(states[0].device.type, enabled=False):
            # Layer by layer: all at once would copy the states of all layers.
            values = [
                self._match(queries[doc], layer.float(), same_token)
                for queries, layer in zip(self._queries.layers, states, strict=True)
            ]
        column = torch.arange(size, device=rows.device)
        start, length = batch.content_start[rows].unsqueeze(1), batch.content_length[rows].unsqueeze(1)
        window, token = ((column >= start) & (column < start + length)).nonzero(as_tuple=True)
        position = self._offset[rows[window]] + token - batch.content_start[rows[window]]
        self._parts.append((rows[window], position, torch.stack(values, 1)[window, :, :, token]))  # (tokens, L, Q)

    def collect(self) -> Matches:
        """Return the matching tensor of every document, its windows in order along the token axis."""
        row, position, values = (torch.cat(parts) for parts in zip(*self._parts, strict=True))
        self._parts.clear()  # every copy of a long document's matches takes hundreds of MB
        indices = (self._batch.doc[row], position)
        dense = values.new_zeros(self._batch.documents, self._longest, *values.shape[1:])
        dense = dense.index_put_(indices, values).permute(0, 2, 3, 1)  # (B, L, Q, D)
        del values
        window = torch.full((self._batch.documents, self._longest), -1, device=row.device)
        window[indices] = self._queries.window_number[row]
        return Matches(
            values=dense.masked_fill_(~self._queries.mask[:, None, :, None], 0.0),
            query_mask=self._queries.mask,
            document_mask=window >= 0,
            window=window,
        )


def _span(start: torch.Tensor, length: torch.Tensor, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the `(B, Q)` positions of `length` tokens from `start` on in these rows, and their mask."""
    width = max(1, int(length[rows].max()))
    column = torch.arange(width, device=rows.device)
    positions = start[rows].unsqueeze(1) + torch.minimum(column, (length[rows].unsqueeze(1) - 1).clamp(min=0))
    return positions, column < length[rows].unsqueeze(1)
