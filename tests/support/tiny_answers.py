"""Tiny random language models that answer, and a tokenizer whose words the built-in templates are."""

from __future__ import annotations

import re
from pathlib import Path

import torch
from tokenizers import Regex, Tokenizer, models, pre_tokenizers, processors
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    AutoModelForSequenceClassification,
    PreTrainedTokenizerFast,
)

from pyterrier_longdoc.modelling.templates import TEMPLATES

from . import tiny, tiny_long

CHAT = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""A chat template that lets any role through, as ChatML does."""

ROLES = (
    '<|im_start|>system\n{{ messages | selectattr("role", "eq", "system") | map(attribute="content") | first | '
    'default("find it") }}<|im_end|>\n<|im_start|>query: '
    '{{ messages | selectattr("role", "eq", "query") | map(attribute="content") | first }}\n'
    'document: {{ messages | selectattr("role", "eq", "document") | map(attribute="content") | first }}<|im_end|>\nyes'
)
"""A chat template that speaks of the roles of a pair, as that of Qwen3-Reranker does."""

PAIR = ("what is a tree?", "the old tree is a plant.")

# What byte-level tokenizers take for words: those of Qwen, without contractions.
_WORD = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_SPECIALS = ["<unk>", *tiny_long.SPECIALS]


def tokenizer(*, begin: bool = False, end: bool = False, chat: str | None = None) -> PreTrainedTokenizerFast:
    """Whole words with the space before them; with a special token at the beginning, or at the end, of every text."""
    split = pre_tokenizers.Split(Regex(_WORD), "isolated")
    said = [template.fill(*PAIR) for template in TEMPLATES.values()]
    said += [piece for template in TEMPLATES.values() for part in template.parts for piece in part.split("{")]
    said += [*tiny.WORDS, *(f" {word}" for word in tiny.WORDS), "yes", "no", "Yes", "No", "true", "false", "1", "0"]
    said += [template.fill(*PAIR, "find it") for template in TEMPLATES.values()]
    said += ["?\n", ".\n", "!\n", "\n\n", "!", " find it", "  ", " \n", "  \n"]
    pieces = [
        piece for text in said for part in re.split(r"<\|\w+\|>", text) for piece, _ in split.pre_tokenize_str(part)
    ]
    vocabulary = {piece: i for i, piece in enumerate(dict.fromkeys([*_SPECIALS, *pieces]))}
    core = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    core.pre_tokenizer = split
    mark = tiny_long.SPECIALS[0]
    single = " ".join([*([mark] if begin else []), "$A", *([mark] if end else [])])
    core.post_processor = processors.TemplateProcessing(single=single, special_tokens=[(mark, vocabulary[mark])])
    made = PreTrainedTokenizerFast(
        tokenizer_object=core,
        unk_token="<unk>",
        eos_token=mark,
        pad_token=mark,
        additional_special_tokens=tiny_long.SPECIALS[1:],
        model_input_names=["input_ids", "attention_mask"],
    )
    made.chat_template = chat
    return made


def checkpoint(folder: Path, family: str, tokenizer: PreTrainedTokenizerFast, *, labels: int | None = None, **changes):
    """Saves a random language model, or with `labels` a classifier, and returns it and its folder."""
    torch.manual_seed(0)
    if family.endswith("t5"):
        sizes = {"d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4, "decoder_start_token_id": 1}
        ids = {"vocab_size": len(tokenizer), "pad_token_id": 1, "eos_token_id": 1}
        model = AutoModelForSeq2SeqLM.from_config(AutoConfig.for_model(family, **ids, **{**sizes, **changes}))
    else:
        sizes = {"num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 512}
        ids = {"pad_token_id": 1, "eos_token_id": 1, "bos_token_id": 1, "vocab_size": len(tokenizer)}
        config = AutoConfig.for_model(family, **{**tiny.SIZES, **sizes, **ids, **changes})
        if labels is not None:
            config.num_labels = labels
        auto = AutoModelForCausalLM if labels is None else AutoModelForSequenceClassification
        model = auto.from_config(config)
    model.eval().save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return model, str(folder)
