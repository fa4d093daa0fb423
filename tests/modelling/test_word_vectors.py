"""Word embeddings from text files and checkpoints."""

import pytest
import torch
from transformers import AutoModel

from pyterrier_longdoc.modelling.word_vectors import load_word_backbone, read_vectors

from ..support import tiny

OPTIONS = {"overlap": 5, "layers": 1, "attention_heads": None, "feed_forward": 8}


def vectors(folder, text, name="vectors.txt"):
    path = folder / name
    path.write_bytes(text.encode())
    return path


def test_vectors_are_read_as_they_stand(tmp_path):
    words, table = read_vectors(vectors(tmp_path, "the 1 2 3\nred 0.5 -1e-1 0\n. . 7 8 9\nthe 4 4 4\n\x85 1 1 1\n"))
    assert words == ["[PAD]", "[UNK]", "the", "red", ". .", "\x85"]
    assert table.dtype == torch.float32
    expected = [[0, 0, 0], [0, 0, 0], [1, 2, 3], [0.5, -0.1, 0], [7, 8, 9], [1, 1, 1]]
    torch.testing.assert_close(table, torch.tensor(expected))
    words, table = read_vectors(vectors(tmp_path, "2 2\nthe 1 2 \r\nred 3 4 \r\n"))  # word2vec's sizes are no word
    assert (words[2:], table[2:].tolist()) == (["the", "red"], [[1, 2], [3, 4]])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("the 1 2\nred 1\n", "line 2 .*'red 1'"),
        ("the 1 2\nred 1 x\n", "line 2 .*'red 1 x'"),
        ("the 1 nan\n", "line 1 "),
        ("the\n", "line 1 "),
        ("", "no words"),
    ],
)
def test_files_that_hold_no_vectors(text, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        read_vectors(vectors(tmp_path, text))


@pytest.mark.parametrize("name", ["glov.txt", "vectors/glov.txt.gz", "no/such/folder"])
def test_a_file_that_is_not_there_is_named(name):
    with pytest.raises((OSError, ValueError), match=name):
        load_word_backbone(name, **OPTIONS)


def test_words_and_punctuation_are_tokens_in_the_file_s_case(tmp_path):
    lower = load_word_backbone(str(vectors(tmp_path, "the 1 2\ncafé 3 4\n. 5 6\n")), **OPTIONS)
    encoded = lower.tokenizer("The café. Rain", return_offsets_mapping=True)
    assert lower.tokenizer.convert_ids_to_tokens(encoded["input_ids"]) == ["the", "café", ".", "[UNK]"]
    assert encoded["offset_mapping"] == [(0, 3), (4, 8), (8, 9), (10, 14)]
    words = lower.model(torch.tensor([encoded["input_ids"]]))[0]
    torch.testing.assert_close(words, torch.tensor([[1.0, 2], [3, 4], [5, 6], [0, 0]]))
    cased = load_word_backbone(str(vectors(tmp_path, "the 1 2\nThe 3 4\n", "cased.txt")), **OPTIONS)
    assert cased.tokenizer("The the")["input_ids"] == [3, 2]


@pytest.mark.parametrize("family", ["bert", "electra"])
def test_any_checkpoint_has_word_embeddings(family, tmp_path):
    folder = tiny.checkpoint(tmp_path, family, **({"embedding_size": 24} if family == "electra" else {}))
    backbone = load_word_backbone(folder, **OPTIONS)
    words = AutoModel.from_pretrained(folder).get_input_embeddings().weight
    torch.testing.assert_close(backbone.model.get_input_embeddings().weight, words, rtol=1e-5, atol=0)
    assert backbone.hidden_size == (24 if family == "electra" else 32)
    assert backbone.model.config.attention_heads == 8  # the most below ten that divide it
    assert [name for name, _ in backbone.model.named_parameters()] == ["words.weight"]
