"""The inputs of an encoder, and its output for the head.

Shapes: P pairs of a query and a document (B in training), V windows of all documents together, N windows of the
longest document, T tokens of an input, H hidden size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from hashlib import blake2b
from typing import Any

import numpy as np
import torch

from .devices import resolve_device, resolve_dtype
from .layout import LAYOUTS, InputLayout
from .preselection import WindowSelector, check_preselection
from .tokens import Span
from .windows import Windows


@dataclass(frozen=True)
class Settings:
    """How queries and texts are read and scores are computed, made from the arguments of a reranker when they change.

    Attributes:
        windows: the window rule, before a reader fits it into the maximum input length of the backbone.
        windows_argument: the reranker's argument that limits the windows; `coverage` reports truncated text under it.
            Without a value, it has the size of the windows.
        max_windows: the maximum number of windows set by the user; None without a limit.
        max_doc_len: truncates texts to this many tokens; None does not truncate.
        max_query_len: truncates queries to this many tokens, 32 in Boytsov et al. 2025; None for what fits.
        layout: how a query and a window form an input.
        instruction: the instruction for queries without one of their own.
        instruction_field: the column of the run with the instructions of queries; None without one.
        preselect: selects the windows that are read for a query; None reads all.
        repeat_tokens: the maximum number of tokens of the title in each window; 0 without a title.
        batch_size: the maximum number of windows in a pass through the backbone.
        max_batch_tokens: the maximum number of tokens in a pass, padding included; a longer window is computed alone.
            None for the device's default.
        device_name: the device of the weights; None for a GPU if there is one.
        dtype_name: the precision of the encoder in inference; None for that of the device. Heads compute in fp32.
        runtime: the library that computes the backbone in inference; None for the fastest one.

    Raises:
        ValueError: if the selection of windows or the layout does not suit the windows.
    """

    windows: Windows
    windows_argument: str = ""
    max_windows: int | None = None
    max_doc_len: int | None = None
    max_query_len: int | None = 32
    layout: InputLayout = LAYOUTS["pair"]
    instruction: str = ""
    instruction_field: str | None = None
    preselect: WindowSelector | None = None
    repeat_tokens: int = 0
    batch_size: int = 64
    max_batch_tokens: int | None = None
    device_name: str | None = "cpu"
    dtype_name: str | None = None
    runtime: str | None = None

    def __post_init__(self) -> None:
        check_preselection(self.preselect, self.windows)
        self.layout.check(self.windows, self.preselect, self.max_query_len, repeats=self.repeat_tokens > 0)

    @cached_property
    def device(self) -> torch.device:
        """The device of the weights; ValueError for a GPU if torch finds none."""
        return resolve_device(self.device_name)

    @cached_property
    def dtype(self) -> torch.dtype:
        """The precision of the encoder in inference."""
        return resolve_dtype(self.dtype_name, self.device)


@dataclass(frozen=True, eq=False, slots=True)
class Input:
    """A complete input of a backbone."""

    ids: np.ndarray  # `(T,)` int32 token ids
    query: Span  # where the tokens of the query stand; empty in an input of a text alone
    content: Span  # where the tokens of the text stand, its title included
    types: np.ndarray | None = None  # `(T,)` segments; None where the backbone has none
    mask: np.ndarray | None = None  # `(T,)` bool, True = real; None without padding
    positions: np.ndarray | None = None  # `(T,)` position ids; None for the backbone's own

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def key(self) -> bytes:
        """A digest, which equal inputs share."""
        digest = blake2b(repr((self.query, self.content)).encode(), digest_size=16)
        for values in (self.ids, self.types, self.mask, self.positions):
            digest.update(b"-" if values is None else values.tobytes())
        return digest.digest()


@dataclass(frozen=True, eq=False)
class Pass:
    """Inputs that are computed together, as tensors."""

    inputs: Sequence[Input]  # V of them
    input_ids: torch.Tensor  # `(V, T)` int64
    mask: torch.Tensor  # `(V, T)` bool, True = real
    tokens: int  # how many are real
    arguments: dict[str, torch.Tensor]  # the backbone's, by name; int64


def collate(inputs: Sequence[Input], length: int, pad_id: int, device: Any = "cpu") -> Pass:
    """Return inputs as tensors, padded to a length."""
    columns: dict[str, tuple[list[Any], int]] = {"input_ids": ([one.ids for one in inputs], pad_id)}
    if inputs[0].types is not None:
        columns["token_type_ids"] = [one.types for one in inputs], 0
    if inputs[0].positions is not None:
        columns["position_ids"] = [one.positions for one in inputs], 0
    columns["attention_mask"] = [np.ones(len(one)) if one.mask is None else one.mask for one in inputs], 0
    arguments = {}
    for name, (values, padding) in columns.items():
        table = np.full((len(inputs), length), padding, dtype=np.int64)
        for row, own in zip(table, values, strict=True):
            row[: len(own)] = own
        arguments[name] = torch.from_numpy(table)
    tokens = int(arguments["attention_mask"].sum())
    arguments = {name: tensor.to(device) for name, tensor in arguments.items()}
    mask = arguments["attention_mask"].bool()
    if tokens == mask.numel():
        del arguments["attention_mask"]  # attention is faster without one
    return Pass(inputs, arguments["input_ids"], mask, tokens, arguments)


@dataclass(frozen=True, eq=False)
class Matches:
    """Similarities of query and document tokens, for heads that need them.

    The windows of a document follow each other along the token axis; overlapping windows repeat tokens.

    Attributes:
        values: `(B, C, Q, D)` C channels, one per layer, of Q query tokens against D document tokens, in fp32; zero
            at padding.
        query_mask: `(B, Q)` bool, True = a real query token.
        document_mask: `(B, D)` bool, True = a real document token.
        window: `(B, D)` int64, the window that each document token is in; -1 at padding.
    """

    values: torch.Tensor
    query_mask: torch.Tensor
    document_mask: torch.Tensor
    window: torch.Tensor

    def one_window(self, n: int) -> Matches:
        """Return the same documents with only their n-th window."""
        mask = self.window == n
        order = (~mask).long().argsort(dim=1, stable=True)[:, : max(1, int(mask.sum(1).max()))]  # (B, D')
        mask = mask.gather(1, order)
        values = self.values.gather(3, order[:, None, None].expand(*self.values.shape[:3], -1)) * mask[:, None, None]
        return replace(self, values=values, document_mask=mask, window=self.window.gather(1, order))


@dataclass(frozen=True, eq=False)
class QueryStates:
    """The states of the query's tokens in the first window of each document, for heads that need them."""

    states: torch.Tensor  # `(B, Q, H)` fp32
    mask: torch.Tensor  # `(B, Q)` bool, True = a real query token
    fixed: bool = False  # whether Q is the same in all batches, as in the papers' fixed layout


@dataclass(frozen=True, eq=False)
class Encoded:
    """The input of a head for a batch of documents.

    Attributes:
        cls: `(B, N, H)` one vector per window; zeros where there is no window.
        mask: `(B, N)` bool, True = a real window; every document has at least one.
        matches: `Matches` of query and document tokens; None for heads that do not need them.
        query: `QueryStates` of the query's tokens; None for heads that do not need them.
    """

    cls: torch.Tensor
    mask: torch.Tensor
    matches: Any = None
    query: Any = None

    def each_window(self) -> tuple[Encoded, torch.Tensor]:
        """Return each window as a document with its query, and the `(B, N)` mask of real windows."""
        num_windows = self.mask.shape[1]
        query = self.query
        if query is not None:
            states, mask = (tensor.repeat_interleave(num_windows, 0) for tensor in (query.states, query.mask))
            query = replace(query, states=states, mask=mask)
        single_windows = Encoded(
            cls=self.cls.flatten(0, 1).unsqueeze(1),  # (B * N, 1, H)
            mask=torch.ones(self.mask.numel(), 1, dtype=torch.bool, device=self.mask.device),
            query=query,
        )
        return single_windows, self.mask


def padded(states: Sequence[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return B tensors `(n, H)` as a padded one, `(B, n, H)` with n at least 1, and its `(B, n)` mask."""
    lengths = torch.tensor(list(map(len, states)), device=states[0].device)
    rows = torch.nn.utils.rnn.pad_sequence(list(states), batch_first=True)
    rows = torch.nn.functional.pad(rows, (0, 0, 0, max(0, 1 - rows.shape[1])))
    return rows, torch.arange(rows.shape[1], device=rows.device) < lengths.unsqueeze(1)


def to_dense(vectors: torch.Tensor, counts: Sequence[int]) -> Encoded:
    """Turn `(V, H)` vectors, grouped by document, into `(B, N, H)` vectors and their mask."""
    num_windows = torch.tensor(counts, device=vectors.device)  # (B,)
    doc = torch.repeat_interleave(torch.arange(len(counts), device=vectors.device), num_windows)  # (V,)
    position = torch.arange(len(doc), device=doc.device) - (num_windows.cumsum(0) - num_windows)[doc]  # (V,)
    longest = max(counts)
    cls = vectors.new_zeros(len(counts), longest, vectors.shape[-1])
    cls = cls.index_put((doc, position), vectors)
    mask = torch.arange(longest, device=doc.device) < num_windows.unsqueeze(1)
    return Encoded(cls=cls, mask=mask)
