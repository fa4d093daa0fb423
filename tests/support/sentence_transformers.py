"""What makes a checkpoint one of sentence-transformers, and tokenizers as such checkpoints have them."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from . import tiny

MODULES = "sentence_transformers.models."


def describe(folder: Path, **configs: dict) -> Path:
    """Adds `modules.json` and a folder with the config of each module after the encoder."""
    modules = [{"idx": 0, "name": "0", "path": "", "type": f"{MODULES}Transformer"}]
    for i, (kind, config) in enumerate(configs.items(), 1):
        path = f"{i}_{kind}"
        modules.append({"idx": i, "name": str(i), "path": path, "type": MODULES + kind})
        (folder / path).mkdir(exist_ok=True)
        size = {"word_embedding_dimension": 32} if kind == "Pooling" else {}
        (folder / path / "config.json").write_text(json.dumps({**size, **config}))
    (folder / "modules.json").write_text(json.dumps(modules))
    return folder


def dense(folder: Path, size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Weights of a dense layer, put where `describe` puts the second module."""
    torch.manual_seed(3)
    weight, bias = torch.randn(size, 32), torch.randn(size)
    save_file({"linear.weight": weight, "linear.bias": bias}, folder / "2_Dense" / "model.safetensors")
    return weight, bias


def general(folder: Path, **settings) -> None:
    (folder / "config_sentence_transformers.json").write_text(json.dumps(settings))


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
