"""The window encoder: runs windows of similar length through the backbone together, and restores the document axis.

Shapes: B documents, V windows of all documents, V' windows of a pass, N windows of the longest document, L layers, Q
query tokens, T tokens of a window with its query and special tokens, D tokens of a document, H hidden size.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import replace
from typing import Any, ClassVar

import numpy as np
import torch
from torch import nn

from ..common.coverage import Coverage
from .backbones.architectures import layer_stack
from .backbones.backbone import Backbone
from .backbones.load import build_backbone
from .heads.base import WarmStart
from .inputs import Encoded, Input, Matches, Pass, QueryStates, Settings, collate, padded, to_dense
from .reader import PairInputs, Reader, reader_of
from .runtimes import OpenVinoRuntime, refusal, uses_openvino

GPU_BATCH_TOKENS, CPU_BATCH_TOKENS = 16384, 2048
"""The default limit on the tokens of a pass. The states of a small pass fit into a CPU's caches, whereas only large
passes keep a GPU busy."""

EXACT_RUN = 4
"""On a CPU, at least this many windows of equal length form passes without padding, because attention is faster without
a mask. In half precision a single window does, because passes with a mask are slower than in fp32."""

BLOCK_CHARACTERS, TOKEN_BLOCK_CHARACTERS = 250_000, 150_000
"""The characters that are tokenized and held at a time, about 60,000 tokens: larger blocks need less padding, but an
interrupted run loses one, and the progress bar moves after each. The second limit is for heads that hold states or
matches of all tokens, `channels * 32` numbers for each."""

MatchFunction = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""Computes `(V', Q, T)` matches of one layer from `(V', Q, H)` query states, `(V', T, H)` window states and a
`(V', Q, T)` mask of equal word pieces."""

States = tuple[torch.Tensor, ...]
"""`(V', T', H)` states of the last layer, or of all layers including the embeddings."""


class WindowEncoder(nn.Module):
    """Encodes each window with its query into a vector, and into whatever else the head needs.

    Args:
        backbone: the pre-trained encoder, with the representation step of a cross-encoder.

    Attributes:
        runtime: computes the backbone in inference instead of torch; None for torch.
        settings: set by `use`.
        reader: turns a query and a text into inputs; set by `use`.
    """

    block_characters = BLOCK_CHARACTERS
    supports_openvino = True
    """Whether OpenVINO can compute the backbone."""
    identity_at_start: ClassVar[bool] = False
    """Whether additional layers have no effect before training, so that scores make sense."""
    explains: ClassVar[tuple[str, ...]] = ()
    """Columns that `explain` adds. Those of your own encoder begin with `explain_`, so that a later model leaves them
    out."""
    head_dtype: ClassVar[torch.dtype] = torch.float32
    """The precision of the head."""
    vector_kind = "inputs"
    """What a vector after the representation step represents; encoders only share its weights if this is equal."""

    build_backbone = staticmethod(build_backbone)
    """Rebuilds the backbone of a saved model."""

    settings: Settings
    reader: Reader

    def __init__(self, backbone: Backbone) -> None:
        super().__init__()
        self.backbone = backbone.model
        self.representation = backbone.representation or nn.Identity()
        self.pooling = backbone.pooling
        self.rules = backbone.rules
        self.hidden_size = backbone.hidden_size
        self.state_size = backbone.state_size
        self.origin = backbone
        self.runtime: OpenVinoRuntime | None = None

    def make_reader(self, settings: Settings) -> Reader:
        """Return the reader of the backbone; ValueError if the settings do not fit it."""
        return reader_of(self.origin, settings)

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return next(self.parameters()).device

    @property
    def computed_in(self) -> tuple[str | None, str | None]:
        """The precision and the runtime of the backbone; None if there is none."""
        runtime = "torch" if self.runtime is None or self.runtime.why else "openvino"
        return str(self.settings.dtype).removeprefix("torch."), runtime

    def use(self, settings: Settings, needs: str) -> None:
        """Apply settings for a head with these needs; ValueError if they do not fit the backbone."""
        if needs != "cls" and (why := getattr(self.backbone, "lacks_states", "")):
            raise ValueError(f"this head needs token states of query and text, but {why}")
        if needs == "last" and self.state_size != self.hidden_size:
            raise ValueError(
                f"this head needs states and vectors of the same width, but the checkpoint turns states of "
                f"{self.state_size} features into vectors of {self.hidden_size}"
            )
        if not uses_openvino(settings.runtime, self, needs, settings.device, settings.dtype):
            self.runtime = None
        elif self.runtime is None:
            self.runtime = self.make_runtime()
        reader = self.make_reader(settings)
        if (settings.instruction or settings.instruction_field) and not reader.takes_instruction:
            raise ValueError(
                "instruction= and instruction_field= would have no effect: the template of this backbone has no "
                "{instruction}; set template= to one that has it"
            )
        self.reader, self.settings = reader, settings

    @property
    def has_random_layers(self) -> bool:
        """Whether it has random weights apart from the backbone and the representation step."""
        parts = {name.partition(".")[0] for name, _ in self.named_parameters()}
        return not self.identity_at_start and not parts <= {"backbone", "representation"}

    def make_runtime(self) -> OpenVinoRuntime:
        """Return a runtime without an export."""
        return OpenVinoRuntime()

    def initial_weights(self, backbone: Backbone, tokenizer: Any) -> WarmStart:
        """Return the parts of the checkpoint that a head can use as initial weights."""
        words = backbone.model.get_input_embeddings().weight
        cls, sep = (0 if i is None else i for i in (tokenizer.cls_token_id, tokenizer.sep_token_id))
        return WarmStart(backbone.final, words[cls], words[sep])

    def describe_weights(self, model: Any) -> dict[str, Any]:
        """Return a fingerprint of the model's weights, JSON-able."""
        return {"fingerprint": model.fingerprint(), "encoder": model.backbone.describe()}

    def reads_like(self, other: Any) -> bool:
        """Return whether it reads inputs like another encoder whose weights it copies, so that scores make sense."""
        return True

    def explain(self, pairs: Sequence[PairInputs], encoded: Encoded, head: Any) -> dict[str, list[Any]]:
        """Return the columns that this encoder adds or replaces, each with a value for each of P pairs."""
        return {}

    # Encoding.

    def forward(
        self,
        pairs: Sequence[PairInputs],
        *,
        needs: str = "cls",
        match: MatchFunction | None = None,
        coverage: Coverage | None = None,
    ) -> Encoded:
        """Encode the windows of P documents, each with its query.

        Args:
            pairs: the inputs of P queries and documents.
            needs: what the head needs: `"cls"` for a vector per window; `"query"` for also the last layer's states of
                the query's tokens in each document's first window (after the representation step of a cross-encoder);
                `"last"` or `"all"` for also these states without that step, and the matches of query and document
                tokens in the last layer or in all layers.
            match: computes the matches of one layer.
            coverage: counts the computed tokens.

        Returns:
            `cls (P, N, H)` in fp32, `mask (P, N)` and, if needed, the matches and the query's states.
        """
        inputs, counts = [one for pair in pairs for one in pair.windows], [len(pair.windows) for pair in pairs]
        if needs == "cls":
            return to_dense(self.vectors(inputs, coverage), counts)
        order = np.argsort(list(map(len, inputs)), kind="stable").tolist()
        document_of = [document for document, count in enumerate(counts) for _ in range(count)]
        # A document's query has its states in the first window (Boytsov et al. 2025, section 3, as CEDR).
        first_rows = set(itertools.accumulate(counts[:-1], initial=0))
        if match is not None:
            order.sort(key=lambda row: row not in first_rows)
        vectors, matches = [], dict[int, torch.Tensor]()
        queries: dict[int, tuple[np.ndarray, torch.Tensor]] = {}  # (Q,) ids and (L, Q, H) states
        for rows, batch, states in self.passes(inputs, order, coverage, needs == "all"):
            vectors.append(self.pooled(states[-1], batch))
            for place, row in enumerate(rows):
                if row in first_rows:
                    tokens = slice(*inputs[row].query)
                    # A copy, because a view would keep the states of the whole pass.
                    of_query = torch.stack([layer[place, tokens] for layer in states]).float()
                    queries[document_of[row]] = inputs[row].ids[tokens], of_query
            if match is not None:
                of_pass = matches_of(match, [queries[document_of[row]] for row in rows], batch, states)
                matches |= zip(rows, of_pass, strict=True)
        encoded = to_dense(torch.cat(vectors)[torch.tensor(order).argsort()].float(), counts)  # (P, N, H)
        query = QueryStates(*padded([queries[document][1][-1] for document in range(len(counts))]))
        if match is None:
            return replace(encoded, query=self._represent_query(query, self.reader.sizes[0] or None))
        windows = iter(range(len(inputs)))
        parts = [[matches.pop(next(windows)) for _ in range(count)] for count in counts]
        return replace(encoded, query=query, matches=side_by_side(parts, query.mask))

    def vectors(self, inputs: Sequence[Input], coverage: Coverage | None = None, **options: Any) -> torch.Tensor:
        """Return the `(V, H)` fp32 vectors of inputs; without gradients, equal inputs are encoded once.

        `options` are passed to `pooled`.
        """
        # Dropout makes equal inputs differ.
        unique, numbers = (inputs, list(range(len(inputs)))) if torch.is_grad_enabled() else distinct(inputs)[:2]
        order, vectors = np.argsort(list(map(len, unique)), kind="stable").tolist(), []
        for _, batch, states in self.passes(unique, order, coverage):
            vectors.append(self.pooled(states[-1], batch, **options))
        return torch.cat(vectors)[torch.tensor(order).argsort()[numbers]].float()

    def token_states(
        self, inputs: Sequence[Input], coverage: Coverage | None = None, kept: Sequence[np.ndarray] | None = None
    ) -> list[torch.Tensor]:
        """Return V tensors `(T, H)`, the last layer's states in fp32 of real tokens, or of those in `kept`."""
        states: dict[int, torch.Tensor] = {}
        order = np.argsort(list(map(len, inputs)), kind="stable").tolist()
        for rows, batch, encoded in self.passes(inputs, order, coverage):
            for row, state, real in zip(rows, encoded[-1].float(), batch.mask, strict=True):
                length = len(inputs[row])
                chosen = real[:length] if kept is None else torch.from_numpy(kept[row]).to(real.device)
                states[row] = state[:length][chosen]
        return [states[row] for row in range(len(inputs))]

    def divide(
        self, lengths: Sequence[int], order: Sequence[int], *, exact_run: int | None = None
    ) -> Iterator[Sequence[int]]:
        """Divide rows, in ascending order of length, into passes within the limits on windows and tokens."""
        settings, start, longest = self.settings, 0, 0
        groups: list[tuple[int | None, int | None]] = []  # what the rows of a pass share
        for length, run in itertools.groupby(lengths):
            rows, padded = len(list(run)), self.rules.padded(length)
            # Inputs that the architecture pads need a mask in any case.
            unpadded = exact_run is not None and rows >= exact_run and padded in (None, length)
            groups += [(padded, length if unpadded else None)] * rows
        limit = settings.max_batch_tokens or (CPU_BATCH_TOKENS if settings.device.type == "cpu" else GPU_BATCH_TOKENS)
        for row, length in enumerate(map(self.rules.cost, lengths)):
            longest = max(longest, length)
            is_full = row - start == settings.batch_size or (row + 1 - start) * longest > limit
            if (is_full or groups[row] != groups[start]) and row > start:
                yield order[start:row]
                start, longest = row, length
        yield order[start:]

    def passes(
        self, inputs: Sequence[Input], order: Sequence[int], coverage: Coverage | None, all_layers: bool = False
    ) -> Iterator[tuple[Sequence[int], Pass, States]]:
        """Yield the rows of each pass through the backbone, the pass and its states."""
        exact_run = None
        if self.settings.device.type == "cpu" and not torch.is_grad_enabled():
            exact_run = 1 if torch.is_autocast_enabled("cpu") else EXACT_RUN
        for rows in self.divide([len(inputs[row]) for row in order], order, exact_run=exact_run):
            for half, batch, states in self._fitting(rows, inputs, all_layers):
                if coverage is not None:
                    coverage.tokens_encoded += batch.tokens
                    coverage.tokens_computed += batch.mask.numel()
                    real = [len(one) if one.mask is None else int(one.mask.sum()) for one in batch.inputs]
                    coverage.longest_input = max(coverage.longest_input, *real)
                yield half, batch, states

    def _fitting(
        self, rows: Sequence[int], inputs: Sequence[Input], all_layers: bool
    ) -> Iterator[tuple[Sequence[int], Pass, States]]:
        """Yield the rows, the pass and the states of one pass, or of two with half of the rows if memory is short."""
        with suppress(torch.OutOfMemoryError):  # tried again outside, where no traceback holds states of the pass
            computed = self._compute(rows, inputs, all_layers)
            yield rows, *computed
            return
        middle = len(rows) // 2
        for half in filter(len, (rows[:middle], rows[middle:])):
            try:
                computed = self._compute(half, inputs, all_layers)
            except torch.OutOfMemoryError as error:
                longest = max(len(inputs[row]) for row in half)
                what = f"{len(half)} windows of up to {longest} tokens in a pass: lower max_batch_tokens or batch_size"
                if len(half) == 1 and hasattr(self.settings, "block_size"):
                    what = f"one list of {longest} tokens: lower block_size or max_doc_len"
                elif len(half) == 1:
                    argument = self.settings.windows_argument.partition("=")[0] or "max_doc_len"
                    what = f"one window of {longest} tokens: make it smaller with {argument}="
                error.args = (f"{error} This happened with {what}.",)
                raise
            yield half, *computed

    def _compute(self, rows: Sequence[int], inputs: Sequence[Input], all_layers: bool) -> tuple[Pass, States]:
        """Return a pass and its states."""
        longest = max(len(inputs[row]) for row in rows)
        length = self.rules.padded(longest) or longest
        batch = collate([inputs[row] for row in rows], length, self.reader.pad_id, self.settings.device)
        recording: AbstractContextManager[list[torch.Tensor]] = self._recording() if all_layers else nullcontext([])
        with recording as earlier_states, self.rules.prepared(self.backbone, batch) as arguments:
            named = {**batch.arguments, **arguments}
            if self.runtime is None:
                last_states = self.backbone(**named).last_hidden_state
            else:
                last_states = self.runtime(self.backbone, named)
                if self.runtime.why and self.settings.runtime == "openvino":
                    raise refusal(self.runtime.why)
        return batch, (*earlier_states, last_states)

    @contextmanager
    def _recording(self) -> Iterator[list[torch.Tensor]]:
        """Record the inputs of all layers: the embeddings, and the states of all layers but the last.

        `output_hidden_states` of transformers 5 would leave unpicklable hooks on the model.
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
        """Return the query's states after the representation step, padded to `size` tokens if it is not None."""
        states = self.representation(query.states).float()
        states = states.masked_fill(~query.mask.unsqueeze(-1), 0.0)
        missing = 0 if size is None else size - states.shape[1]
        return QueryStates(
            nn.functional.pad(states, (0, 0, 0, missing)), nn.functional.pad(query.mask, (0, missing)), size is not None
        )

    def pooled(self, states: torch.Tensor, batch: Pass, **_: Any) -> torch.Tensor:
        """Return `(V', H)` vectors: pooled states after the representation step, or before it for `"late"` pooling."""
        mask = batch.mask
        if self.pooling == "cls":
            return self.representation(states[:, 0])  # (V', H)
        if self.pooling == "last":
            position = torch.arange(mask.shape[1], device=mask.device)
            last = (position * mask).argmax(1)  # (V',)
            return self.representation(states[torch.arange(len(last), device=last.device), last])
        if self.pooling == "late":
            states = self.representation(states)
        # In fp32, because bfloat16 cannot count beyond 256 tokens.
        weights = mask.unsqueeze(-1).float()
        mean = (states * weights).sum(1) / weights.sum(1)
        return mean if self.pooling == "late" else self.representation(mean)


def distinct(inputs: Sequence[Input]) -> tuple[list[Input], list[int], list[bytes]]:
    """Return the distinct inputs, the index of each input among them, and the keys of the distinct ones."""
    keys = {one: one.key for one in dict.fromkeys(inputs)}  # a reader may give one object several times
    numbers: dict[bytes, int] = {}
    unique: list[Input] = []
    found = []
    for one in inputs:
        number = numbers.setdefault(keys[one], len(numbers))
        if number == len(unique):
            unique.append(one)
        found.append(number)
    return unique, found, list(numbers)


def matches_of(
    match: MatchFunction, queries: Sequence[tuple[np.ndarray, torch.Tensor]], batch: Pass, states: States
) -> list[torch.Tensor]:
    """Return the `(L, Q, T)` matches of each of V' windows of a pass, without padding.

    Args:
        match: computes the matches of one layer.
        queries: for each window the `(Q,)` ids of its query and their `(L, Q, H)` states, in fp32.
        batch: the pass.
        states: its states.
    """
    query_ids = torch.full((len(queries), max(1, *(len(ids) for ids, _ in queries))), -1)
    for row, (ids, _) in zip(query_ids, queries, strict=True):
        row[: len(ids)] = torch.from_numpy(ids)
    same_token = query_ids.to(batch.input_ids.device).unsqueeze(2) == batch.input_ids.unsqueeze(1)  # (V', Q, T)
    with torch.autocast(states[0].device.type, enabled=False):
        # Layer by layer: all at once would copy the states of all layers.
        by_layer = [
            match(padded([layers[number] for _, layers in queries])[0], layer.float(), same_token)
            for number, layer in enumerate(states)
        ]
    values = torch.stack(by_layer, 1)  # (V', L, Q, T)
    return [
        value[:, : len(ids), slice(*one.content)]
        for value, (ids, _), one in zip(values, queries, batch.inputs, strict=True)
    ]


def side_by_side(windows: Sequence[list[torch.Tensor]], query_mask: torch.Tensor) -> Matches:
    """Return the `(L, Q, T)` matches of the windows of each document along one axis; the lists are emptied."""
    sizes = [[part.shape[2] for part in parts] for parts in windows]
    longest = max(1, *map(sum, sizes))
    window, documents = torch.full((len(windows), longest), -1), []
    for row, size, parts in zip(window, sizes, windows, strict=True):
        row[: sum(size)] = torch.arange(len(size)).repeat_interleave(torch.tensor(size))
        document = torch.cat(parts, 2)
        parts.clear()  # every copy of a long document's matches takes hundreds of MB
        missing = longest - document.shape[2], query_mask.shape[1] - document.shape[1]
        documents.append(nn.functional.pad(document, (0, missing[0], 0, missing[1])))
    window = window.to(query_mask.device)
    return Matches(torch.stack(documents), query_mask, window >= 0, window)
