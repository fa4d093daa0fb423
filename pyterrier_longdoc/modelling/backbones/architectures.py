"""Requirements of some architectures besides token ids and a mask, so that no score depends on its batch.

Shapes: V inputs of a pass, T tokens.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, MODEL_FOR_MASKED_LM_MAPPING_NAMES
from transformers.utils import logging as transformers_logging

from ..inputs import Pass
from ..templates import Template
from ..tokens import TokenizedText

POSITIONS_FROM_IDS = {
    "camembert", "data2vec-text", "esm", "ibert", "layoutlmv3", "lilt", "longformer", "luke", "markuplm", "mpnet",
    "roberta", "roberta-prelayernorm", "xlm-roberta", "xlm-roberta-xl", "xmod",
}  # fmt: skip
"""Families that number positions from `pad_token_id + 1`, counting only real tokens."""

_LET_PADDING_IN = ("convbert", "fnet", "nystromformer")
"""Families whose mask does not apply to every step (convolutions, Fourier transforms)."""

_PASS = threading.Lock()
"""Held during a pass of BigBird, which sets the model's kind of attention and numpy's global generator."""

GLOBAL_ATTENTION = ("query", "query_only", "cls", "sentences")


@dataclass(frozen=True)
class BackboneOptions:
    """How a backbone is used where there is a choice; each option is a reranker's argument of that name.

    Attributes:
        pooling: `"cls"`, `"mean"` or `"last"`, of the last layer's states as they are; None for the checkpoint's
            pooling and representation step.
        template: the words around query and text; None for the checkpoint's template, else the tokenizer's layout for
            two texts.
        prompt: the checkpoint's words before every query.
        global_attention: for Longformer, see `LongformerRules`.
        attention_window: for Longformer, the number of tokens around each token that it attends to; None for the
            configuration's.
        attention_type: for BigBird, `"block_sparse"` or `"original_full"`; None for the configuration's.
        attn_implementation: see `use_attention`.
    """

    pooling: str | None = None
    template: Template | None = None
    prompt: str = ""
    global_attention: str = "query"
    attention_window: int | None = None
    attention_type: str | None = None
    attn_implementation: str | None = None


class InputRules:
    """The needs of an architecture in its passes; here none."""

    needs_offsets = False
    """Whether `tokens` needs the character offsets of tokens."""

    def tokens(self, text: TokenizedText) -> TokenizedText:
        """Return the tokens of a text as the architecture reads them."""
        return text

    def group(self, length: int) -> int:
        """Return the group of an input: a pass has inputs of one group and of similar length."""
        return 0

    def padded(self, length: int) -> int:
        """Return the padded length of an input of `length` tokens that is the only one in its pass."""
        return length

    def cost(self, length: int) -> int:
        """Return the number of tokens that an input of `length` tokens counts as in the limit of a pass."""
        return self.padded(length)

    def longest(self, positions: int) -> int:
        """Return the longest input for a table of this many positions, padding included."""
        return positions

    def extra_inputs(self, batch: Pass) -> dict[str, Any]:
        """Return the backbone's arguments besides ids, mask, segments and positions."""
        return {}

    @contextmanager
    def pass_context(self, model: Any, length: int) -> Iterator[None]:
        """Prepare the model for a pass of padded length `length`, and clean up afterwards."""
        yield


class DecoderRules(InputRules):
    """Language models: no cache of keys and values, because only generation needs one."""

    def extra_inputs(self, batch: Pass) -> dict[str, Any]:
        return {"use_cache": False}


class EqualLengthRules(InputRules):
    """Encoders whose states depend on padding despite the mask: inputs of a pass have equal length."""

    def group(self, length: int) -> int:
        return length


class LongformerRules(InputRules):
    """Longformer: tokens with global attention.

    Args:
        window: inputs are padded to a multiple of it, as the model itself does.
        global_attention: `"query"`: `[CLS]`, the query's tokens and the first `[SEP]` (as run by Boytsov et al. 2025);
            `"query_only"`: the query's tokens (as in their text); `"cls"`: only `[CLS]`.
    """

    def __init__(self, window: int, global_attention: str) -> None:
        self.window = window
        self.global_attention = global_attention

    def padded(self, length: int) -> int:
        return -(-length // self.window) * self.window

    def extra_inputs(self, batch: Pass) -> dict[str, Any]:
        return {"global_attention_mask": self.global_tokens(batch).long()}

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
        return {"query_only": query, "cls": cls}.get(self.global_attention, cls | query | separator)


class SentenceRules(LongformerRules):
    """QDS-Transformer (Jiang et al. 2020): a mark before each sentence of a text has global attention, too.

    Args:
        window: see `LongformerRules`.
        mark: the mark, the tokenizer's first token.
    """

    needs_offsets = True

    def __init__(self, window: int, mark: int) -> None:
        super().__init__(window, "query")
        self.mark = mark

    def tokens(self, text: TokenizedText) -> TokenizedText:
        return text.with_sentences_marked(self.mark)

    def global_tokens(self, batch: Pass) -> torch.Tensor:
        return super().global_tokens(batch) | ((batch.input_ids == self.mark) & batch.mask)


class BigBirdRules(InputRules):
    """BigBird: sets the kind of attention before every pass, and pads all inputs of a pass to one length.

    At the first short input, the model itself switches to full attention permanently. Its last block, which all tokens
    attend to, moves with the padding: inputs of a pass therefore have the same number of blocks.

    Args:
        block: tokens in a block.
        random_blocks: the number of random blocks that each block attends to (only in training).
        sparse: False for full attention at any length.
    """

    def __init__(self, block: int, random_blocks: int, sparse: bool) -> None:
        self.block = block
        self.sparse = sparse
        # Shorter inputs get full attention.
        self.longest_full = (5 + 2 * random_blocks) * block

    def group(self, length: int) -> int:
        return self.padded(length) if self.is_sparse(length) else 0

    def padded(self, length: int) -> int:
        return -(-length // self.block) * self.block if self.is_sparse(length) else length

    def cost(self, length: int) -> int:
        # transformers 5 stores all T x T attention weights, block-sparse or not.
        return self.padded(length) * max(1, length // 1024)

    def longest(self, positions: int) -> int:
        return positions // self.block * self.block if self.is_sparse(positions) else positions

    def is_sparse(self, length: int) -> bool:
        """Return whether attention in an input of this length is block-sparse."""
        return self.sparse and length > self.longest_full

    @contextmanager
    def pass_context(self, model: Any, length: int) -> Iterator[None]:
        sparse = self.is_sparse(length)
        with _PASS:
            model.set_attention_type("block_sparse" if sparse else "original_full")
            # The model seeds numpy's global generator.
            if not sparse:
                yield
                return
            # The block-sparse code of transformers 5 fails in mixed precision.
            with torch.autocast(model.device.type, enabled=False):
                state = np.random.get_state()  # noqa: NPY002
                try:
                    yield
                finally:
                    np.random.set_state(state)  # noqa: NPY002


_OWNERS = {"global_attention": "longformer", "attention_window": "longformer", "attention_type": "big_bird"}
"""Options that only one family has."""


def rules_for(config: Any, options: BackboneOptions, tokenizer: Any = None) -> InputRules:
    """Return the rules of the architecture that a configuration describes; ValueError for options it does not have."""
    family = config.model_type
    for name, owner in _OWNERS.items():
        value = getattr(options, name)
        if family != owner and value != getattr(BackboneOptions, name):
            raise ValueError(f"{name}={value!r} would have no effect: it is for {owner}, not for {family}")
    if options.global_attention == "sentences" and options.template is not None:
        raise ValueError("global_attention='sentences' marks sentences in [CLS] query [SEP] text [SEP]: omit template")
    answers = None if options.template is None else options.template.answers
    # For remote code, nothing shows whether it answers.
    if answers is not None and not (is_language_model(config) or getattr(config, "auto_map", None)):
        raise ValueError(f"a template with answers={answers!r} is for language models, not for {family}")
    if family == "longformer":
        window = config.attention_window if isinstance(config.attention_window, int) else max(config.attention_window)
        if options.global_attention == "sentences" and tokenizer is not None:
            return SentenceRules(window, tokenizer("a")["input_ids"][0])
        return LongformerRules(window, options.global_attention)
    if family == "big_bird":
        sparse = (options.attention_type or config.attention_type) == "block_sparse"
        return BigBirdRules(config.block_size, config.num_random_blocks, sparse)
    if family in _LET_PADDING_IN:
        return EqualLengthRules()
    return DecoderRules() if is_decoder(config) else InputRules()


def is_decoder(config: Any) -> bool:
    """Return whether an architecture is a left-to-right language model."""
    family = config.model_type
    return family in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES and family not in MODEL_FOR_MASKED_LM_MAPPING_NAMES


def is_language_model(config: Any) -> bool:
    """Return whether an architecture generates text: left to right, or as a decoder that attends to an encoder."""
    return is_decoder(config) or bool(getattr(config, "is_encoder_decoder", False))


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
