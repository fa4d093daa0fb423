"""Checkpoints of sentence-transformers, the library's scores, and tokenizers as such checkpoints have them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from . import tiny

LATE_INTERACTION = Path(__file__).parent / "late_interaction"
"""Checkpoints for MaxSim, each with the scores of the library that wrote it."""


def saved(folder: Path, modules: list[Any], **settings: Any) -> tuple[Any, Path]:
    """Saves a bi-encoder of these modules, with random weights after the first, and returns it and its folder."""
    from sentence_transformers import SentenceTransformer

    torch.manual_seed(2)
    for module in modules[1:]:
        for parameter in module.parameters():
            torch.nn.init.normal_(parameter, std=0.4)
    model = SentenceTransformer(modules=modules, device="cpu", **settings)
    model.save_pretrained(str(folder / "stored"))
    return model, folder / "stored"


def stored(folder: Path, *after: Any, pooling: Any = "mean", include_prompt: bool = True, **settings: Any) -> Any:
    """Saves a bi-encoder of an encoder, pooling and the modules `after` it, and returns it and its folder."""
    from sentence_transformers.sentence_transformer import modules

    encoder = modules.Transformer(tiny.checkpoint(folder / "base", labels=None))
    return saved(folder, [encoder, modules.Pooling(32, pooling, include_prompt=include_prompt), *after], **settings)


def theirs(model: Any, queries: list[str], texts: list[str]) -> np.ndarray:
    """The library's scores of all pairs, in the order of `tiny.frame`."""
    return model.similarity(model.encode_query(queries), model.encode_document(texts)).numpy().ravel()


def sentence_piece_tokenizer() -> PreTrainedTokenizerFast:
    """A tokenizer in the style of XLM-R: every word begins with a mark, the first one too."""
    pieces = ["<unk>", "\u2581", *(f"\u2581{w}" for w in tiny.WORDS), *"abcdefghijklmnopqrstuvwxyz:., "]
    core = Tokenizer(models.Unigram([(piece, -float(i % 7 + 1)) for i, piece in enumerate(pieces)], 0))
    core.pre_tokenizer = pre_tokenizers.Metaspace()
    return PreTrainedTokenizerFast(tokenizer_object=core, unk_token="<unk>")


def framed(tokenizer: PreTrainedTokenizerFast) -> PreTrainedTokenizerFast:
    """The same tokenizer with special tokens around every text."""
    tokenizer.add_special_tokens({"cls_token": "[CLS]", "sep_token": "[SEP]", "pad_token": "[PAD]"})
    special = [("[CLS]", tokenizer.cls_token_id), ("[SEP]", tokenizer.sep_token_id)]
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=special
    )
    return tokenizer
