"""Tiny random checkpoints of models for long inputs, made without any download."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pandas as pd
import torch
import transformers
from safetensors.torch import save_file
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, PreTrainedTokenizerFast

from . import tiny

# Small windows and blocks, so that documents of some dozen tokens are long.
FAMILIES = {
    "longformer": {
        "attention_window": [16, 16],
        "max_position_embeddings": 257,
        "type_vocab_size": 1,
        "pad_token_id": 0,
        "sep_token_id": 3,
    },
    "big_bird": {"block_size": 4, "num_random_blocks": 1, "max_position_embeddings": 256},
    "modernbert": {"max_position_embeddings": 256},
    "nomic_bert": {"max_position_embeddings": 256},
    "eurobert": {"max_position_embeddings": 256, "pad_token_id": 0, "num_key_value_heads": 2, "head_dim": 8},
    "llama": {"max_position_embeddings": 256, "num_key_value_heads": 2, "head_dim": 8},
    "qwen2": {"max_position_embeddings": 512, "num_key_value_heads": 2},
    "qwen3": {"max_position_embeddings": 512, "num_key_value_heads": 2, "head_dim": 8},
}

SPECIALS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
_PATTERN = r"(?i:'s|'t)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"


def byte_tokenizer(*, begin: bool = False, words: bool = True) -> PreTrainedTokenizerFast:
    """A byte-level tokenizer as language models have it: no special tokens around two texts, or each begun anew.

    Tokens begin with the space before their word, or (without `words`) every byte is a token.
    """
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_PATTERN), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    core.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(
        vocab_size=500 if words else 0, special_tokens=SPECIALS, initial_alphabet=alphabet, show_progress=False
    )
    all_words = " ".join(tiny.WORDS)
    core.train_from_iterator([f"{all_words}?\n{all_words}.\n yes no\n: {all_words}", "yes no yes no"] * 4, trainer)
    if begin:
        bos = SPECIALS[0]
        core.post_processor = processors.TemplateProcessing(
            single=f"{bos} $A", pair=f"{bos} $A {bos} $B", special_tokens=[(bos, core.token_to_id(bos))]
        )
    names = ["input_ids", "attention_mask"]
    return PreTrainedTokenizerFast(
        tokenizer_object=core, eos_token="<|endoftext|>", pad_token="<|endoftext|>", model_input_names=names
    )


def encoder(folder: Path, family: str, **changes) -> str:
    """Saves an encoder, or with `labels=1` a cross-encoder."""
    return tiny.checkpoint(folder, family, **{"labels": None, **FAMILIES[family], **changes})


def decoder(folder: Path, family: str = "qwen3", *, labels: int | None = None, begin: bool = False, **changes) -> str:
    """Saves a causal language model, or with `labels` a classifier on its last token."""
    tokenizer = byte_tokenizer(begin=begin)
    sizes = {**tiny.SIZES, **FAMILIES[family], "vocab_size": len(tokenizer), "pad_token_id": 0, "eos_token_id": 0}
    config = AutoConfig.for_model(family, **{**sizes, "bos_token_id": 0, **changes})
    torch.manual_seed(0)
    if labels is None:
        model = AutoModelForCausalLM.from_config(config)
    else:
        config.num_labels = labels
        model = transformers.AutoModelForSequenceClassification.from_config(config)
    model.eval().save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


def list_encoder(folder: Path, **changes) -> str:
    """Saves a checkpoint with the names and shapes of jina-reranker-v3: a language model and a projection."""
    tokenizer = byte_tokenizer()
    tokenizer.add_tokens(["<|embed_token|>", "<|rerank_token|>"], special_tokens=True)
    sizes = {**tiny.SIZES, **FAMILIES["qwen3"], "vocab_size": len(tokenizer), "pad_token_id": 0}
    names = {"architectures": ["JinaForRanking"], "auto_map": {"AutoModel": "modeling.JinaForRanking"}}
    config = AutoConfig.for_model("qwen3", **{**sizes, **names, "max_position_embeddings": 2048, **changes})
    torch.manual_seed(0)
    weights = {f"model.{name}": weight for name, weight in AutoModel.from_config(config).state_dict().items()}
    weights |= {"projector.0.weight": torch.randn(16, 32), "projector.2.weight": torch.randn(24, 16)}
    folder.mkdir(exist_ok=True)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    config.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


# The weights of JINA-v2 and MosaicBERT as they are published: names and shapes.

HIDDEN, WIDE, LAYERS, WORDS = 32, 64, 2, 134
_LINEAR = {"weight": (HIDDEN, HIDDEN), "bias": (HIDDEN,)}
_NORM = {"weight": (HIDDEN,), "bias": (HIDDEN,)}
_DOWN = {"weight": (HIDDEN, WIDE), "bias": (HIDDEN,)}
_EMBEDDINGS = {
    "embeddings.word_embeddings": {"weight": (WORDS, HIDDEN)},
    "embeddings.token_type_embeddings": {"weight": (2, HIDDEN)},
    "embeddings.LayerNorm": _NORM,
}
_SEPARATE = {
    "attention.self.query": _LINEAR,
    "attention.self.key": _LINEAR,
    "attention.self.value": _LINEAR,
    "attention.output.dense": _LINEAR,
    "attention.output.LayerNorm": _NORM,
}
_GATED = {"mlp.gated_layers": {"weight": (2 * WIDE, HIDDEN)}, "mlp.wo": _DOWN, "mlp.layernorm": _NORM}
_POOLER = {"pooler.dense": _LINEAR}

PUBLISHED = {
    # jinaai/jina-embeddings-v2-base-en, -small-en, -base-de, -base-es, -base-zh
    "jina": (_EMBEDDINGS, {**_SEPARATE, **_GATED}, _POOLER, ""),
    # jinaai/jina-embeddings-v2-base-code
    "jina-code": (
        _EMBEDDINGS,
        {
            **_SEPARATE,
            "attention.self.layer_norm_q": _NORM,
            "attention.self.layer_norm_k": _NORM,
            "layer_norm_1": _NORM,
            "layer_norm_2": _NORM,
            "mlp.up_gated_layer": {"weight": (2 * WIDE, HIDDEN)},
            "mlp.down_layer": _DOWN,
        },
        _POOLER,
        "",
    ),
    # mosaicml/mosaic-bert-base and -seqlen-256, -512, -1024, -2048
    "mosaic": (
        _EMBEDDINGS,
        {
            "attention.self.Wqkv": {"weight": (3 * HIDDEN, HIDDEN), "bias": (3 * HIDDEN,)},
            "attention.output.dense": _LINEAR,
            "attention.output.LayerNorm": _NORM,
            **_GATED,
        },
        {
            "pooler.dense": _LINEAR,
            "cls.predictions.transform.dense": _LINEAR,
            "cls.predictions.transform.LayerNorm": _NORM,
            "cls.predictions.decoder": {"weight": (WORDS, HIDDEN), "bias": (WORDS,)},
        },
        "bert.",
    ),
}
_SIZES = {
    "hidden_size": HIDDEN,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "intermediate_size": WIDE,
    "vocab_size": WORDS,
}
CONFIGS = {
    "jina": {"position_embedding_type": "alibi", "feed_forward_type": "geglu", "emb_pooler": "mean"},
    "jina-code": {"position_embedding_type": "alibi", "feed_forward_type": "geglu", "emb_pooler": "mean"},
    "mosaic": {"alibi_starting_size": 256},
}


def published_config(layout: str) -> dict:
    """The config.json of a checkpoint in a published layout."""
    longest = 128 if layout == "mosaic" else 256
    sizes = {"max_position_embeddings": longest, "type_vocab_size": 2, "layer_norm_eps": 1e-12, "pad_token_id": 0}
    return {"model_type": "bert", **_SIZES, **sizes, **CONFIGS[layout]}


def published_weights(layout: str, scale: float = 0.3) -> dict[str, torch.Tensor]:
    """Random weights with the names and shapes of a published layout."""
    embeddings, layer, rest, prefix = PUBLISHED[layout]
    modules = {
        **embeddings,
        **{f"encoder.layer.{i}.{name}": kinds for i in range(LAYERS) for name, kinds in layer.items()},
    }
    names = {
        **{f"{prefix}{name}.{kind}": shape for name, kinds in modules.items() for kind, shape in kinds.items()},
        **{
            f"{'' if name.startswith('cls') else prefix}{name}.{kind}": shape
            for name, kinds in rest.items()
            for kind, shape in kinds.items()
        },
    }
    generator = torch.Generator().manual_seed(0)

    def value(name: str, shape: tuple[int, ...]) -> torch.Tensor:
        noise = scale * torch.randn(shape, generator=generator)
        return 1 + noise if "norm" in name.lower() and name.endswith("weight") else noise

    return {name: value(name, shape) for name, shape in names.items()}


def published(folder: Path, layout: str, *, labels: int | None = None, scale: float = 0.3) -> str:
    """Saves a checkpoint in a published layout, with a classification head if there are `labels`."""
    tokenizer = tiny.tokenizer()
    weights = {name: tensor.contiguous() for name, tensor in published_weights(layout, scale).items()}
    if labels is not None:
        weights["classifier.weight"], weights["classifier.bias"] = torch.randn(labels, HIDDEN), torch.randn(labels)
    folder.mkdir(exist_ok=True, parents=True)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(published_config(layout)))
    tokenizer.save_pretrained(folder)
    return str(folder)


_ENCODERS = {
    "longformer": "longformer",
    "bigbird": "big_bird",
    "modernbert": "modernbert",
    "nomicbert": "nomic_bert",
    "eurobert": "eurobert",
}
LONG: dict[str, tuple[Callable[..., str], str, dict]] = {
    **{kind: (encoder, family, {}) for kind, family in _ENCODERS.items()},
    **{f"{kind} cross-encoder": (encoder, family, {"labels": 1}) for kind, family in _ENCODERS.items()},
    "jina": (published, "jina", {}),
    "jina cross-encoder": (published, "jina-code", {"labels": 1}),
    "mosaic": (published, "mosaic", {}),
    "llama": (decoder, "llama", {"begin": True}),
    "llama cross-encoder": (decoder, "llama", {"labels": 1}),
    "qwen3": (decoder, "qwen3", {}),
    "qwen3 answers": (decoder, "qwen3", {}),
}
"""Every kind of checkpoint that LongP takes."""

POOLINGS = {"jina": "mean", "llama": "mean", "llama cross-encoder": "last", "qwen3": "last", "qwen3 answers": "last",
            "eurobert cross-encoder": "late"}  # fmt: skip
"""What is scored where it is not the first token."""

_SMALLER = {"initializer_range": 0.1, "num_hidden_layers": 1}
LEARNING = {
    "llama": _SMALLER,
    "qwen3 answers": _SMALLER,
    "longformer": {**_SMALLER, "attention_window": [8]},
    "bigbird": {**_SMALLER, "block_size": 1},
    "jina": {"scale": 0.1},
}
"""With what checkpoints learn: the large initialization of the other tests learns badly.

A decoder's states and its answers, attention that the package sets for each input or pass, and ALiBi, which is its own.
"""


def make(kind: str, folder: Path, **changes) -> str:
    """Saves a checkpoint of a kind."""
    function, family, options = LONG[kind]
    return function(folder, family, **{**options, **changes})


def texts() -> pd.DataFrame:
    """Two queries with texts of 0 to 120 tokens, more than one block or window."""
    rng = np.random.default_rng(0)
    rows = [
        {"qid": qid, "query": query, "docno": f"d{count}", "text": " ".join(rng.choice(tiny.WORDS, count))}
        for qid, query, counts in (("1", "old dog", (0, 2, 30, 32, 70)), ("2", "snow in the city?", (1, 120)))
        for count in counts
    ]
    return pd.DataFrame(rows)
