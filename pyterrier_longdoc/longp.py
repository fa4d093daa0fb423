"""Rerankers that read a long document in one piece."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import ClassVar

from .architectures import GLOBAL_ATTENTION, use_attention
from .backbones import Backbone, BackboneOptions, load_backbone
from .base import LongDocReranker
from .frames import check_choice
from .templates import resolve_template
from .weights import HeadSpec, Weights
from .windows import WholeText, Windows

LONG_BACKBONE = "Alibaba-NLP/gte-reranker-modernbert-base"
"""A public cross-encoder with one logit that takes 8,192 tokens (149M parameters)."""

POOLINGS = ("cls", "mean", "last")


@dataclass(eq=False, repr=False)
class LongP(LongDocReranker):
    """Scores query and document in one input of a model for long inputs (Boytsov et al. 2025, section 3).

    Its FirstP twin differs in one argument: `LongP(backbone, max_doc_len=1431)` and `LongP(backbone, max_doc_len=477)`.
    A document longer than the backbone takes is cut; `coverage` and a warning say so.

    Args:
        backbone: Longformer, BigBird, ModernBERT, NomicBERT, EuroBERT or any other encoder, a cross-encoder or a plain
            one; JINA-v2 or MosaicBERT, whose own code is not needed; a language model (Llama, Qwen3, ...), with a
            classification head, as a reranker that answers yes or no, or plain. Default: a public reranker.
        pooling: what of the last layer is scored: `"cls"` (the first token), `"mean"` (of all tokens, query and
            special ones included) or `"last"` (the last token). None: what the checkpoint was trained with, else
            `"mean"` for JINA and language models as in Boytsov et al. 2025, and `"cls"`.
        template: text with `{query}` and `{document}`, or `"plain"` or `"qwen3-reranker"`. None: the tokenizer's own
            layout for two texts; for a language model whose tokenizer puts nothing between them `"plain"`, for a
            Qwen with `answers` `"qwen3-reranker"`.
        answers: `("yes", "no")` for rerankers that answer: the score is the logit of the first word less that of the
            second, whose sigmoid is what such models call the score.
        global_attention: for Longformer: `"query"` (first token, query and the separator after it, as measured in
            Boytsov et al. 2025), `"query_only"` (as described there) or `"cls"`.
        attention_type: for BigBird: `"block_sparse"` or `"original_full"`; None for what its configuration says.
        attn_implementation: `"sdpa"`, `"flash_attention_2"`, `"eager"`; None for the best that the architecture has
            without further packages. Flash attention needs a GPU and a half-precision `dtype`.

    All other arguments: see `LongDocReranker`.
    """

    backbone: str | Path = LONG_BACKBONE
    _: KW_ONLY
    pooling: str | None = None
    template: str | None = None
    answers: tuple[str, str] | None = None
    global_attention: str = "query"
    attention_type: str | None = None
    attn_implementation: str | None = None

    _of_weights: ClassVar[tuple[str, ...]] = (
        "backbone", "pooling", "template", "answers", "global_attention", "attention_type", "trust_remote_code", "seed",
    )  # fmt: skip

    def _head_spec(self) -> HeadSpec:
        return "firstp", {}

    def _default_windows(self) -> Windows:
        return WholeText(self.max_doc_len)

    def _load_backbone(self) -> Backbone:
        options = BackboneOptions(
            pooling=self.pooling,
            template=self.template,
            answers=None if self.answers is None else (self.answers[0], self.answers[1]),
            global_attention=self.global_attention,
            attention_type=self.attention_type,
            attn_implementation=self.attn_implementation,
        )
        return load_backbone(str(self.backbone), trust_remote_code=self.trust_remote_code, options=options)

    def _load_weights(self) -> Weights:
        weights = super()._load_weights()
        use_attention(weights.scorer.encoder.backbone, self.attn_implementation)
        return weights

    def _check(self) -> None:
        super()._check()
        if self.pooling is not None:
            check_choice("pooling", self.pooling, POOLINGS)
        check_choice("global_attention", self.global_attention, GLOBAL_ATTENTION)
        if self.attention_type is not None:
            check_choice("attention_type", self.attention_type, ("block_sparse", "original_full"))
        if self.answers is not None and not _are_two_words(self.answers):
            raise ValueError(
                f'answers={self.answers!r} must be two words, for a relevant and another document: ("yes", "no")'
            )
        if self.answers is not None and self.pooling not in (None, "last"):
            raise ValueError(f"pooling={self.pooling!r} would have no effect with answers, which are the last token's")
        if self.template is not None:
            resolve_template(self.template)
            if self.pad_query:
                raise ValueError("pad_query is the papers' layout for [CLS] query [SEP] text [SEP]; it has no template")


def _are_two_words(answers: object) -> bool:
    return isinstance(answers, tuple | list) and len(answers) == 2 and all(isinstance(word, str) for word in answers)
