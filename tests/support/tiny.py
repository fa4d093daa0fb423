"""Tiny random checkpoints and frames, made without any download."""

from __future__ import annotations

import atexit
import functools
import json
import shutil
import tempfile
from pathlib import Path

import pandas as pd
import pyterrier as pt
import torch
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    PreTrainedTokenizerFast,
)

WORDS = (  # noqa: SIM905 - shorter than a list of literals
    "a the of in to and is was for on with as by at from it this that which cat dog bird fish tree river mountain city "
    "rain snow wind sun red green blue old new long short fast slow run walk sing write read find lose good bad"
).split()
LONG = " ".join(WORDS[7 * i % len(WORDS)] for i in range(50))

PIECES = [
    *WORDS,
    *"abcdefghijklmnopqrstuvwxyz0123456789.,!?-'\"()",
    *(f"##{c}" for c in "abcdefghijklmnopqrstuvwxyz0123456789"),
]

SIZES = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 64,
    # Large, so that tiny random models tell texts apart.
    "initializer_range": 0.3,
}

_DEBERTA = {
    "relative_attention": True,
    "pos_att_type": ["p2c", "c2p"],
    "position_biased_input": False,
    "type_vocab_size": 0,
    "share_att_key": True,
    "norm_rel_ebd": "layer_norm",
    "position_buckets": 16,
    "pooler_hidden_size": 32,
}
_ROBERTA = {"max_position_embeddings": 130, "type_vocab_size": 1, "pad_token_id": 0}

FAMILIES = {
    "bert": {},
    "electra": {"embedding_size": 32},
    "roberta": _ROBERTA,
    "xlm-roberta": _ROBERTA,
    "camembert": _ROBERTA,
    "distilbert": {"dim": 32, "n_layers": 2, "n_heads": 4, "hidden_dim": 64},
    "deberta": _DEBERTA,
    "deberta-v2": _DEBERTA,
    "modernbert": {"global_attn_every_n_layers": 2, "local_attention": 16, "pad_token_id": 0},
    "nomic_bert": {"pad_token_id": 0},
    "gte": {"pad_token_id": 0, "type_vocab_size": 1},
    "eurobert": {"pad_token_id": 0},
    "longformer": {**_ROBERTA, "attention_window": 8},
    "big_bird": {"block_size": 8, "num_random_blocks": 1},
    "convbert": {"head_ratio": 2, "embedding_size": 32},
    "luke": {"entity_vocab_size": 10},
}
"""Sizes that a family of the table of architectures needs in its tiny checkpoints, besides `SIZES`."""


AGGREGATOR = {
    **{"model_type": "bert", "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2},
    **{"intermediate_size": 32, "max_position_embeddings": 64, "vocab_size": 5, "initializer_range": 0.3},
}
"""Configuration of an aggregator that is narrower than the backbones."""


def tokenizer(*, double_separator: bool = False, segments: bool = True) -> PreTrainedTokenizerFast:
    """A word-piece tokenizer over PIECES, with BERT's or RoBERTa's pair layout."""
    specials = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    vocabulary = {piece: i for i, piece in enumerate([*specials, *dict.fromkeys(PIECES)])}
    core = Tokenizer(models.WordPiece(vocabulary, unk_token="[UNK]"))
    core.normalizer = normalizers.BertNormalizer()
    core.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    middle = "[SEP] [SEP]" if double_separator else "[SEP]"
    core.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair=f"[CLS] $A {middle} $B:1 [SEP]:1",
        special_tokens=[("[CLS]", vocabulary["[CLS]"]), ("[SEP]", vocabulary["[SEP]"])],
    )
    names = ["input_ids", *(["token_type_ids"] if segments else []), "attention_mask"]
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        unk_token="[UNK]",
        pad_token="[PAD]",
        cls_token="[CLS]",
        sep_token="[SEP]",
        mask_token="[MASK]",
        model_max_length=128,
        model_input_names=names,
    )


def checkpoint(folder: Path, family: str = "bert", *, labels: int | None = 1, seed: int = 0, **changes) -> str:
    """Saves a random checkpoint and returns its folder: a classifier with `labels` labels, or (None) an encoder."""
    roberta = "roberta" in family or family == "longformer"
    tok = tokenizer(double_separator=roberta, segments=family in ("bert", "electra", "deberta-v2"))
    sizes = {**SIZES, "max_position_embeddings": 128, "vocab_size": len(tok), **FAMILIES.get(family, {}), **changes}
    if family == "distilbert":
        sizes = {k: v for k, v in sizes.items() if k not in SIZES or k == "initializer_range"}
    config = AutoConfig.for_model(family, **sizes)
    torch.manual_seed(seed)
    if labels is None:
        model = AutoModel.from_config(config)
    else:
        config.num_labels = labels
        model = AutoModelForSequenceClassification.from_config(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.normal_(0.0, 0.2)
    model.eval().save_pretrained(folder)
    tok.save_pretrained(folder)
    return str(folder)


def change(file: Path, **values) -> None:
    """Changes values of a JSON file of a checkpoint."""
    file.write_text(json.dumps({**json.loads(file.read_text()), **values}))


def cased(folder: str) -> str:
    """The same checkpoint, whose tokenizer keeps capitals, which are then unknown words."""
    tok = AutoTokenizer.from_pretrained(folder)
    tok.backend_tokenizer.normalizer = normalizers.BertNormalizer(lowercase=False)
    tok.save_pretrained(folder)
    return folder


@functools.cache
def encoder(labels: int | None = 1) -> str:
    """Folder of a random BERT: a cross-encoder with this many labels, or (None) a plain encoder."""
    return checkpoint(_folder(), labels=labels)


@functools.cache
def aggregator() -> str:
    """Folder of a cross-encoder that is narrower than the others; its layers aggregate."""
    sizes = {key: AGGREGATOR[key] for key in ("hidden_size", "num_attention_heads", "intermediate_size")}
    return checkpoint(_folder(), seed=1, **sizes)


def _folder() -> Path:
    folder = Path(tempfile.mkdtemp())
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


def results() -> pd.DataFrame:
    """Five rows of two queries: a long, a short, an empty and a missing text, one of them twice."""
    long = "the cat and the dog walk to the river in the rain and find a red fish by the old tree. " * 6
    return pd.DataFrame(
        {
            "qid": ["1", "1", "2", "2", "1"],
            "query": ["old dog", "old dog", "snow in the city", "snow in the city", "old dog"],
            "docno": ["d1", "d2", "d1", "d3", "d4"],
            "text": [long, "a short dog", long, "", None],
            "score": [5.0, 4.0, 3.0, 2.0, 1.0],
            "rank": [0, 1, 0, 1, 2],
        }
    )


def frame(queries: list[str], texts: list[str]) -> pd.DataFrame:
    """A row for each query and text."""
    rows = [(f"q{i}", query, f"d{j}", text, 1.0, 0) for i, query in enumerate(queries) for j, text in enumerate(texts)]
    return pd.DataFrame(rows, columns=["qid", "query", "docno", "text", "score", "rank"])


def longer_results() -> pd.DataFrame:
    """The same and, without ties, three queries with four documents each, of 1 to 76 words in sentences of seven."""
    rows = [
        {
            "qid": f"q{q}",
            "query": f"{WORDS[q + 22]} {WORDS[q + 30]}",
            "docno": f"d{d}",
            "text": " ".join(WORDS[(i * (d + 3) + q) % len(WORDS)] + "." * (i % 7 == 6) for i in range(1 + 25 * d)),
            "score": 10.0 - d,
            "rank": d,
        }
        for q in range(3)
        for d in range(4)
    ]
    return pd.concat([results(), pd.DataFrame(rows)], ignore_index=True)


class Store:
    """A dataset that supplies the texts of a frame."""

    def __init__(self, frame: pd.DataFrame) -> None:
        self.texts = dict(zip(frame["docno"], frame["text"], strict=True))
        self.calls = 0

    def text_loader(self, fields="*", *, verbose=False) -> pt.Transformer:
        def load(frame):
            self.calls += 1
            return frame.assign(**{field: frame["docno"].map(self.texts) for field in fields}).reset_index(drop=True)

        return pt.apply.generic(load)
