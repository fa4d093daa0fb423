"""Tables of word embeddings instead of a backbone, from a checkpoint or from a text file of vectors (GloVe)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.normalizers import BertNormalizer
from tokenizers.pre_tokenizers import BertPreTokenizer
from torch import nn
from transformers import PreTrainedTokenizerFast

from .backbones.load import Backbone, load_encoder

PAD, UNKNOWN = "[PAD]", "[UNK]"

FILES = (".txt", ".vec", ".gz", ".zip")
"""Suffixes of files with vectors, from GloVe and fastText; no model on the hub has such a name."""


@dataclass(frozen=True)
class WordConfig:
    """Sizes of a table of word embeddings and of the transformer on it."""

    vocab_size: int
    hidden_size: int
    overlap: int
    layers: int
    attention_heads: int
    feed_forward: int

    model_type: ClassVar[str] = "word-embeddings"
    num_hidden_layers: ClassVar[int] = 0


class WordTable(nn.Module):
    """A table of word embeddings instead of an encoder."""

    def __init__(self, config: WordConfig) -> None:
        super().__init__()
        self.config = config
        # Zeros, because vectors come from a file: random ones would change the random state.
        self.words = nn.Embedding.from_pretrained(torch.zeros(config.vocab_size, config.hidden_size), freeze=False)

    def get_input_embeddings(self) -> nn.Embedding:
        """Return the table, as Hugging Face models do."""
        return self.words

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        """Return the `(V, T, H)` embeddings of `(V, T)` ids."""
        return self.words(input_ids)


class WordBackbone(Backbone):
    """A table of word embeddings and its tokenizer; texts are read without special tokens."""

    def describe(self) -> dict[str, Any]:
        """Return a JSON-able description from which `build_word_backbone` creates the same modules."""
        return {"words": asdict(self.model.config)}


def load_word_backbone(
    name: str,
    *,
    overlap: int,
    layers: int,
    attention_heads: int | None,
    feed_forward: int,
    trust_remote_code: bool = False,
) -> WordBackbone:
    """Load word embeddings from a text file of vectors or from an encoder; for the other arguments see `WordConfig`."""
    if Path(name).is_file() or Path(name).suffix in FILES:
        words, vectors = read_vectors(Path(name))
        tokenizer = word_tokenizer(words)
    else:
        backbone = load_encoder(name, trust_remote_code=trust_remote_code)
        vectors, tokenizer = backbone.model.get_input_embeddings().weight.detach().clone(), backbone.tokenizer
    size, width = vectors.shape
    heads = attention_heads or next(n for n in range(10, 0, -1) if width % n == 0)
    word_backbone = _with_table(WordConfig(size, width, overlap, layers, heads, feed_forward), tokenizer)
    word_backbone.model.words.weight.data = vectors
    return word_backbone


def build_word_backbone(description: dict[str, Any], tokenizer: Any) -> WordBackbone:
    """Return the table that `WordBackbone.describe` described, with zeros, for strict loading afterwards."""
    return _with_table(WordConfig(**description["words"]), tokenizer)


def _with_table(config: WordConfig, tokenizer: Any) -> WordBackbone:
    return WordBackbone(WordTable(config), tokenizer, None, None, "mean")


def read_vectors(path: Path) -> tuple[list[str], torch.Tensor]:
    """Read word embeddings in the text format of GloVe, or of word2vec, whose first line holds two sizes.

    A line is a word and its numbers, separated by spaces. If a word has two lines, the first one is used.

    Returns:
        The words, starting with padding and the unknown word, and `(words, H)` fp32 vectors, zeros for these two: the
        neighbours of an unknown word give it a context.
    """
    number_of = {PAD: 0, UNKNOWN: 1}
    vectors: list[np.ndarray] = []
    for number, line in _lines(path):
        parts = line.split(" ")
        width = len(vectors[0]) if vectors else len(parts) - 1
        word, vector = " ".join(parts[:-width]), _numbers(parts[-width:])
        if not word or vector is None:
            raise ValueError(
                f"line {number} of {str(path)!r} must be a word and {width or 'some'} numbers, separated by spaces: "
                f"{line[:60]!r}"
            )
        if word not in number_of:
            number_of[word] = len(number_of)
            vectors.append(vector)
    if not vectors:
        raise ValueError(f"{str(path)!r} has no words and vectors")
    return list(number_of), torch.from_numpy(np.stack([np.zeros_like(vectors[0])] * 2 + vectors))


def _lines(path: Path) -> Iterator[tuple[int, str]]:
    """Yield the lines with vectors, and their numbers."""
    # Words may contain characters that Python would take for line ends.
    with path.open(encoding="utf-8", newline="\n") as file:
        for number, line in enumerate(file, 1):
            text = line.rstrip(" \r\n")
            is_header = number == 1 and len(text.split(" ")) == 2 and text.replace(" ", "").isdecimal()
            if text and not is_header:
                yield number, text


def _numbers(parts: list[str]) -> np.ndarray | None:
    try:
        values = np.array(parts, dtype=np.float32)
    except ValueError:
        return None
    return values if len(values) and np.isfinite(values).all() else None


def word_tokenizer(words: Sequence[str]) -> PreTrainedTokenizerFast:
    """Return a tokenizer with these words, padding and unknown first; texts are lower-cased if all words are."""
    lowercase = all(word == word.lower() for word in words[2:])
    core = Tokenizer(WordLevel({word: number for number, word in enumerate(words)}, unk_token=UNKNOWN))
    core.normalizer = BertNormalizer(lowercase=lowercase, strip_accents=False)
    core.pre_tokenizer = BertPreTokenizer()
    return PreTrainedTokenizerFast(
        tokenizer_object=core, unk_token=UNKNOWN, pad_token=PAD, model_input_names=["input_ids", "attention_mask"]
    )
