"""Requirements of some architectures besides token ids and a mask, so that no score depends on its batch.

Shapes: V inputs of a pass, T tokens.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from torch import nn
from transformers.utils import logging as transformers_logging

from ..inputs import Pass
from ..tokens import TokenizedText

_PASS = threading.Lock()
"""Held during a pass of BigBird, which sets the model's kind of attention and numpy's global generator."""

GLOBAL_ATTENTION = ("query", "query_only", "cls", "sentences")


class InputRules:
    """The needs of an architecture in its passes; here no more than ids, a mask and constant arguments.

    Args:
        config: the backbone's configuration; only some architectures need it.
        arguments: the backbone's arguments in every pass.
    """

    needs_offsets = False
    """Whether `tokens` needs the character offsets of tokens."""

    def __init__(self, config: Any = None, arguments: Mapping[str, Any] = MappingProxyType({})) -> None:
        self.arguments = dict(arguments)

    def tokens(self, text: TokenizedText) -> TokenizedText:
        """Return the tokens of a text as the architecture reads them."""
        return text

    def padded(self, length: int) -> int | None:
        """Return the length to which an input of `length` tokens and all others of its pass are padded.

        None stands for the length of the longest one.
        """
        return None

    def cost(self, length: int) -> int:
        """Return the number of tokens that an input of `length` tokens counts as in the limit of a pass."""
        return self.padded(length) or length

    def longest(self, positions: int) -> int:
        """Return the longest input for a table of this many positions, padding included."""
        return positions

    @contextmanager
    def prepared(self, model: Any, batch: Pass) -> Iterator[dict[str, Any]]:
        """Prepare the model for a pass, and yield its arguments besides ids, mask, segments and positions."""
        yield self.arguments


class EqualLengthRules(InputRules):
    """Encoders whose states depend on padding despite the mask: inputs of a pass have equal length."""

    def padded(self, length: int) -> int:
        return length


class LongformerRules(InputRules):
    """Longformer: tokens with global attention, and inputs padded to a multiple of its window, as in the model itself.

    Args:
        config: the backbone's configuration.
        arguments: the backbone's arguments in every pass.
        global_attention: `"query"`: `[CLS]`, the query's tokens and the first `[SEP]` (as run by Boytsov et al. 2025);
            `"query_only"`: the query's tokens (as in their text); `"cls"`: only `[CLS]`; `"sentences"`: like `"query"`,
            with a mark before each sentence of a text (QDS-Transformer, Jiang et al. 2020).
        mark: the mark, the tokenizer's first token; None without marks.
    """

    def __init__(
        self, config: Any, arguments: Mapping[str, Any], *, global_attention: str = "query", mark: int | None = None
    ) -> None:
        super().__init__(config, arguments)
        window = config.attention_window
        self.window = window if isinstance(window, int) else max(window)
        self.global_attention = global_attention
        self.mark = mark
        self.needs_offsets = mark is not None

    def tokens(self, text: TokenizedText) -> TokenizedText:
        return text if self.mark is None else text.with_sentences_marked(self.mark)

    def padded(self, length: int) -> int:
        return -(-length // self.window) * self.window

    @contextmanager
    def prepared(self, model: Any, batch: Pass) -> Iterator[dict[str, Any]]:
        yield {**self.arguments, "global_attention_mask": self.global_tokens(batch).long()}

    def global_tokens(self, batch: Pass) -> torch.Tensor:
        """Return the `(V, T)` bool mask of tokens with global attention."""
        edges = torch.tensor([(*one.query, one.content[0]) for one in batch.inputs], device=batch.mask.device)
        start, end, content = edges.unsqueeze(2).unbind(1)  # (V, 1) each
        position = torch.arange(batch.mask.shape[1], device=batch.mask.device)
        query = (position >= start) & (position < end)
        cls = (position == 0).expand_as(query)
        between = (position >= end) & (position < content) & batch.mask
        # The first real token between query and text, or `[CLS]` for a single text.
        separator = position == between.int().argmax(1, keepdim=True)
        chosen = {"query_only": query, "cls": cls}.get(self.global_attention, cls | query | separator)
        return chosen if self.mark is None else chosen | ((batch.input_ids == self.mark) & batch.mask)


class BigBirdRules(InputRules):
    """BigBird: sets the kind of attention before every pass, and pads all inputs of a pass to one length.

    At the first short input, the model itself switches to full attention permanently. Its last block, which all tokens
    attend to, moves with the padding: inputs of a pass therefore have the same number of blocks.
    """

    def __init__(self, config: Any, arguments: Mapping[str, Any]) -> None:
        super().__init__(config, arguments)
        self.block = config.block_size
        self.sparse = config.attention_type == "block_sparse"
        # Shorter inputs get full attention.
        self.longest_full = (5 + 2 * config.num_random_blocks) * self.block

    def padded(self, length: int) -> int | None:
        return -(-length // self.block) * self.block if self.is_sparse(length) else None

    def cost(self, length: int) -> int:
        # transformers 5 stores all T x T attention weights, block-sparse or not.
        return super().cost(length) * max(1, length // 1024)

    def longest(self, positions: int) -> int:
        return positions // self.block * self.block if self.is_sparse(positions) else positions

    def is_sparse(self, length: int) -> bool:
        """Return whether attention in an input of this length is block-sparse."""
        return self.sparse and length > self.longest_full

    @contextmanager
    def prepared(self, model: Any, batch: Pass) -> Iterator[dict[str, Any]]:
        sparse = self.is_sparse(batch.mask.shape[1])
        with _PASS:
            model.set_attention_type("block_sparse" if sparse else "original_full")
            # The model seeds numpy's global generator.
            if not sparse:
                yield self.arguments
                return
            # The block-sparse code of transformers 5 fails in mixed precision.
            with torch.autocast(model.device.type, enabled=False):
                state = np.random.get_state()  # noqa: NPY002
                try:
                    yield self.arguments
                finally:
                    np.random.set_state(state)  # noqa: NPY002


def layer_stack(backbone: Any) -> str:
    """Return the name of the list of layers in a Hugging Face model."""
    count = getattr(getattr(backbone, "config", None), "num_hidden_layers", None)
    for name, module in backbone.named_modules():
        if isinstance(module, nn.ModuleList) and len(module) == count:
            return name
    raise ValueError(f"this needs a backbone with a list of layers, which {type(backbone).__name__} is not")


def use_attention(model: Any, implementation: str | None) -> None:
    """Make a backbone compute attention by `"eager"`, `"sdpa"`, `"flash_attention_2"`, ...; None leaves it as it is."""
    current = getattr(model.config, "_attn_implementation", None)
    if implementation is None or implementation == current:
        return
    if not hasattr(model, "set_attn_implementation"):
        raise ValueError(f"attn_implementation={implementation!r} is not available here: omit it")
    with quiet():
        model.set_attn_implementation(implementation)


@contextmanager
def quiet() -> Iterator[None]:
    """Keep transformers from logging and showing progress: this package checks what matters."""
    verbosity = transformers_logging.get_verbosity()
    shows_bars = transformers_logging.is_progress_bar_enabled()
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        transformers_logging.set_verbosity(verbosity)
        if shows_bars:
            transformers_logging.enable_progress_bar()
