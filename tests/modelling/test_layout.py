"""Input layouts against inputs made by Hugging Face's tokenizers and by hand; casing; budgets that are shared."""

from __future__ import annotations

import sys
from dataclasses import dataclass

import numpy as np
import pandas as pd
import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st

import pyterrier_longdoc as ld
from pyterrier_longdoc.modelling.backbones.load import load_backbone
from pyterrier_longdoc.modelling.batching import PairLayout
from pyterrier_longdoc.modelling.layout import LAYOUTS, InputLayout, longest_first, resolve_layout

from ..support import tiny, tiny_long
from ..support.scorers import Passes
from ..support.systems import QRELS, QUIET, make, scores

pytestmark = QUIET

CLOSE = {"rtol": 1e-5, "atol": 1e-5}


def text_of(words, seed=0):
    """A text of this many words, each of them one token."""
    return " ".join(tiny.WORDS[(i * i + 7 * i + seed) % len(tiny.WORDS)] for i in range(words))


# The values.


def test_layouts_by_name():
    assert LAYOUTS["pair"] == InputLayout()
    for name, layout in LAYOUTS.items():
        assert resolve_layout(name) is layout is resolve_layout(layout)
    assert resolve_layout(InputLayout(pad_query=np.bool_(True))).pad_query is True  # saved as JSON
    for bad in ("paded", None, True, {"pad_query": True}):
        with pytest.raises(ValueError, match=r"must be one of pair, padded, .*, or InputLayout"):
            ld.MaxP(layout=bad)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"positions": "rows"}, "positions='rows' is unknown; choose one of columns, real tokens"),
        ({"positions": "real tokens"}, "would have no effect without pad_query"),
        ({"pad_query": 32}, "pad_query=32 must be True or False"),
        ({"shared_budget": None}, "shared_budget=None must be True or False"),
        ({"lowercase": "no"}, "lowercase='no' must be True or False"),
        ({"pad_query": True, "shared_budget": True}, "does not go with shared_budget"),
    ],
)
def test_values_that_do_not_go_together(arguments, message):
    with pytest.raises(ValueError, match=message):
        InputLayout(**arguments)


@pytest.mark.parametrize(
    "model",
    [
        lambda: ld.MaxP(layout="shared"),
        lambda: ld.AvgP(layout="shared"),
        lambda: ld.CEDR(layout="shared"),
        lambda: ld.FirstP(layout="shared", windows=ld.SentenceWindows()),
        lambda: ld.FirstP(layout="shared", preselect=ld.KeyBlocks(ld.BM25Windows(2))),
    ],
)
def test_a_shared_budget_is_for_one_window(model):
    with pytest.raises(ValueError, match=r"it is for models with one window \(FirstP, LongP\) and without preselect"):
        model()


def test_a_shared_budget_is_for_one_input():
    with pytest.raises(ValueError, match="here they are read apart"):
        ld.LateIR(layout="shared", windows=ld.Truncate(20))


# Lower case.


def test_lower_case_keeps_every_character_at_its_place():
    layout = InputLayout(lowercase=True)
    every = [chr(i) for i in range(sys.maxunicode + 1)]
    for character, lower in zip(every, layout.read(every), strict=True):
        assert lower == (character.lower() if len(character.lower()) == 1 else "i")
    assert layout.read(["İSTANBUL Straße", "ΑΣ"]) == ["istanbul straße", "ας"]
    texts = ["As it IS"]
    assert InputLayout().read(texts) is texts


@pytest.fixture(scope="module")
def with_capitals(tmp_path_factory):
    return tiny.cased(tiny.checkpoint(tmp_path_factory.mktemp("cased")))


LOWER = InputLayout(lowercase=True)
LOUD = "The CAT and the Dog WALK to the river. " * 4
SHOUTED = tiny.frame(["OLD Dog"], [LOUD, "İ red Fish"])
QUIETLY = tiny.frame(["old dog"], [LOUD.lower(), "i red fish"])


@pytest.mark.parametrize("name", ["MaxP", "LateIR", "CEDR-knrm"])
def test_scores_are_those_of_the_lower_cased_text(name, with_capitals):
    expected = scores(make(name, with_capitals), QUIETLY)
    model = make(name, with_capitals, layout=LOWER)
    np.testing.assert_allclose(scores(model, SHOUTED), expected, **CLOSE)
    assert (np.abs(scores(make(name, with_capitals), SHOUTED) - expected) > 1e-3).all()
    # In training too.
    scorer, plain = model.load_scorer(), make(name, with_capitals).load_scorer()
    pairs = [list(frame[column]) for frame in (SHOUTED, QUIETLY) for column in ("query", "text")]
    torch.testing.assert_close(scorer(*pairs[:2]), plain(*pairs[2:]), **CLOSE)


def test_spans_point_into_the_text_as_it_was_given(with_capitals):
    text = "İİİ The CAT and the İ Dog WALK to the river. " * 6
    words = {"windows": ld.SlidingWords(6, 4), "window_size": 150, "stride": 100}
    model = make("MaxP", with_capitals, layout=LOWER, explain=True, **words)
    [spans] = model(tiny.frame(["Dog"], [text]))["window_spans"]
    words = text.split()
    expected = [" ".join(words[i : i + 6]) for i in range(0, len(words) - 2, 4)]
    assert [text[start:end] for start, end in spans] == expected


@dataclass(frozen=True)
class SpiedWindows(ld.FirstK):
    """Keeps the first windows, and what it was shown."""

    needs_text = True
    seen = []  # noqa: RUF012 - what all of them have seen

    def scores(self, queries, documents, spans):
        self.seen.extend((query, document.text) for query, document in zip(queries, documents, strict=True))
        return super().scores(queries, documents, spans)


def test_preselection_and_memory_see_the_lower_cased_text(with_capitals):
    model = make("MaxP", with_capitals, layout=LOWER, preselect=SpiedWindows(1))
    model(SHOUTED.head(1))
    assert SpiedWindows.seen == [(QUIETLY["query"][0], QUIETLY["text"][0])]
    remembered = len(model.load_scorer().tokens.cache)
    model(QUIETLY.head(1))
    assert len(model.load_scorer().tokens.cache) == remembered


# A budget that is shared.

TOKENIZERS = {
    "bert": tiny.tokenizer(),
    "roberta": tiny.tokenizer(double_separator=True, segments=False),
    "llama": tiny_long.byte_tokenizer(begin=True),
}


@given(
    family=st.sampled_from(sorted(TOKENIZERS)),
    query=st.integers(0, 30),
    text=st.integers(0, 60),
    longest=st.integers(6, 70),
)
@settings(max_examples=400, deadline=None)
def test_longest_first_is_the_tokenizers(family, query, text, longest):
    tokenizer = TOKENIZERS[family]
    asked, read = text_of(query, 3), text_of(text, 5)
    # As lists: of single texts an empty one would not count as a text.
    expected = tokenizer([asked], [read], truncation="longest_first", max_length=longest)[0]
    ids, its_ids = (tokenizer(x, add_special_tokens=False)["input_ids"] for x in (asked, read))
    specials = len(tokenizer([""], [""])["input_ids"][0])
    own, its = longest_first(len(ids), len(its_ids), longest - specials)
    assert [expected.sequence_ids.count(side) for side in (0, 1)] == [own, its]
    sides = zip(expected.ids, expected.sequence_ids, strict=True)
    assert [token for token, side in sides if side is not None] == ids[:own] + its_ids[:its]


LENGTHS = [(2, 10), (2, 40), (30, 3), (30, 40), (9, 8), (0, 40), (9, 0), (0, 0), (8, 9)]
SHARED = pd.DataFrame(
    [(f"q{i}", text_of(query, 3), f"d{i}", text_of(text, 5)) for i, (query, text) in enumerate(LENGTHS)],
    columns=["qid", "query", "docno", "text"],
)


@pytest.mark.parametrize("kind", ["jina", "mosaic", "llama", "bert"])
def test_inputs_of_a_shared_budget(kind, tmp_path):
    """Token for token those of `tokenizer(query, text, truncation="longest_first", max_length=3 + 4 + 13)`."""
    if kind == "bert":
        model = make("FirstP", tiny.encoder(), layout="shared", window_size=13, max_query_len=4)
    else:
        model = ld.LongP(tiny_long.make(kind, tmp_path), layout="shared", max_doc_len=13, max_query_len=4, device="cpu")
    scorer = model.load_scorer()
    passes = Passes(scorer)
    for query, text in zip(SHARED["query"], SHARED["text"], strict=True):
        scorer.score([query], [text])
        [inputs], passes.inputs = passes.inputs, []
        expected = scorer.tokenizer([query], [text], truncation="longest_first", max_length=3 + 4 + 13)
        assert inputs["input_ids"].tolist() == expected["input_ids"]
        assert "attention_mask" not in inputs  # nothing is padding
        if kind != "llama":
            assert inputs["token_type_ids"].tolist() == expected["token_type_ids"]


@pytest.mark.parametrize("kind", ["jina", "mosaic", "llama"])
def test_a_score_of_a_shared_budget_does_not_depend_on_the_batch(kind, tmp_path):
    model = ld.LongP(tiny_long.make(kind, tmp_path), layout="shared", max_doc_len=13, max_query_len=4, device="cpu")
    together = scores(model, SHARED)
    alone = [scores(model, SHARED.iloc[[i]])[0] for i in range(len(SHARED))]
    np.testing.assert_allclose(together, alone, **CLOSE)
    model.batch_size = 2
    np.testing.assert_allclose(scores(model, SHARED[::-1])[::-1], alone, **CLOSE)
    scorer = model.load_scorer()
    torch.testing.assert_close(
        scorer(list(SHARED["query"]), list(SHARED["text"])).double(), torch.tensor(np.array(alone)), **CLOSE
    )


def test_what_was_cut_of_a_shared_budget(tmp_path):
    """Of 17 tokens; a text counts once for each of its queries, a query if it was cut for one of its texts."""
    long, short = text_of(40), text_of(3)
    frame = tiny.frame([text_of(2), text_of(30), text_of(15)], [long, short])
    for options in ({}, {"score_cache": tmp_path / "scores"}, {"score_cache": tmp_path / "scores"}):
        model = make("FirstP", layout="shared", window_size=10, max_query_len=7, **options)
        model(frame)
        coverage = model.coverage
        assert (coverage.queries, coverage.queries_cut) == (3, 2)
        assert (coverage.query_tokens, coverage.query_tokens_read) == (2 + 30 + 15, 2 + 8 + 8)
        assert (coverage.documents, coverage.documents_cut) == (6, 3)
        assert coverage.tokens == 3 * (40 + 3)
        assert coverage.tokens_read == (17 - 2 + 3) + (17 - 8 + 3) + (17 - 8 + 3)
    model = make("FirstP", layout="shared", window_size=10, max_query_len=7)
    model(tiny.frame([text_of(14)], [short]))  # longer than max_query_len, and read to its end
    assert not model.coverage.is_cut


def test_a_shared_budget_ends_at_the_longest_input(cross_encoder):
    scorer = ld.LongP(cross_encoder, layout="shared", max_query_len=8, device="cpu").load_scorer()
    assert scorer.layout.budget == 128 - 3
    scorer = ld.FirstP(cross_encoder, layout="shared", max_query_len=8, max_doc_len=20, device="cpu").load_scorer()
    assert scorer.layout.budget == 8 + 20


# Positions.


def test_positions_skip_padding():
    """The first token of a text after a query of 17 tokens is at 21; FlexNeuART pads by Longformer's own pad id."""
    layout = PairLayout(prefix=(0,), middle=(2, 2), suffix=(2,), types=None, pad_id=1, position_offset=2)
    query, text = np.arange(100, 117), np.arange(200, 205)
    batch = layout.fixed(32, 8, skips_padding=True).collate([query, query[:2]], [[text], [text[:0]]])
    first, second = batch.position_ids
    assert first[batch.attention_mask[0]].tolist() == list(range(2, 2 + 1 + 17 + 1 + 5 + 1))
    assert first[34] == 21
    assert batch.input_ids[0, 34] == 200
    assert second[batch.attention_mask[1]].tolist() == [2, 3, 4, 5, 6]
    columns = layout.fixed(32, 8).collate([query], [[text]]).position_ids
    assert columns[0, 34] == 36


@pytest.mark.parametrize(("query", "text"), [("old dog", text_of(20)), (text_of(6), text_of(3)), ("a", "")])
def test_longformer_as_the_model_numbers_positions_itself(query, text, tmp_path):
    """Hugging Face's Longformer, given the padded input alone, skips padding as the layout does."""
    folder = tiny.cased(tiny_long.encoder(tmp_path, "longformer", labels=1))
    reference = transformers.AutoModelForSequenceClassification.from_pretrained(folder).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    cls, sep, pad = tokenizer.cls_token_id, tokenizer.sep_token_id, tokenizer.pad_token_id
    own, its = (tokenizer(x, add_special_tokens=False)["input_ids"] for x in (query, text))
    ids = [cls, *own, *[pad] * (6 - len(own)), sep, *its, *[pad] * (20 - len(its)), sep]
    ids = torch.tensor([ids])
    mask = (ids != pad).long()
    attends = mask * (torch.arange(ids.shape[1]) < 6 + 2)
    with torch.no_grad():
        expected = reference(input_ids=ids, attention_mask=mask, global_attention_mask=attends).logits.item()
    frame = tiny.frame([query.upper()], [text.upper()])
    arguments = {"max_query_len": 6, "max_doc_len": 20, "device": "cpu"}
    assert scores(ld.LongP(folder, layout="longformer", **arguments), frame)[0] == pytest.approx(expected, abs=1e-5)
    if len(own) < 6 or len(its) < 20:
        columns = scores(ld.LongP(folder, layout="padded-lowercase", **arguments), frame)[0]
        assert columns != pytest.approx(expected, abs=1e-4)


def test_scores_of_longformer_s_layout_do_not_depend_on_the_batch(tmp_path):
    folder = tiny_long.encoder(tmp_path, "longformer", labels=1)
    model = ld.LongP(folder, layout="longformer", max_query_len=6, max_doc_len=40, device="cpu")
    frame = tiny.longer_results()
    alone = [scores(model, frame.iloc[[i]])[0] for i in range(len(frame))]
    np.testing.assert_allclose(scores(model, frame), alone, **CLOSE)
    backbone = load_backbone(tiny.checkpoint(tmp_path / "roberta", "roberta"))
    assert backbone.pair_layout().fixed(4, 4, skips_padding=True).skips_padding


# A layout goes with its model.

OTHERS = [*LAYOUTS, InputLayout(pad_query=True, lowercase=True)]


@pytest.mark.parametrize("layout", OTHERS, ids=map(repr, OTHERS))
def test_saved_and_loaded(layout, tmp_path):
    backbone = tiny.cased(tiny.checkpoint(tmp_path / "backbone", "roberta"))
    model = make("FirstP", backbone, layout=layout)
    model.fit(tiny.results(), QRELS)
    model.save(tmp_path / "saved")
    loaded = ld.FirstP.load(tmp_path / "saved", device="cpu")
    assert loaded.layout == layout
    assert loaded.settings().layout == resolve_layout(layout)
    np.testing.assert_allclose(scores(loaded, SHOUTED), scores(model, SHOUTED), **CLOSE)
    assert loaded.describe() == model.describe()


def test_identities_and_scores_differ(tmp_path):
    backbone = tiny.cased(tiny.checkpoint(tmp_path / "backbone", "roberta"))
    models = [make("FirstP", backbone, layout=layout, window_size=12) for layout in LAYOUTS]
    described = [repr(model.describe()) for model in models]
    assert len(set(described)) == len(LAYOUTS)
    found = [tuple(np.round(scores(model, SHOUTED), 4)) for model in models]
    assert len(set(found)) == len(LAYOUTS)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_scores_depend_neither_on_the_batch_nor_on_its_padding(layout, tmp_path):
    backbone = tiny.cased(tiny.checkpoint(tmp_path, "roberta"))
    model = make("FirstP", backbone, layout=layout, window_size=12, max_query_len=4)
    table = ld.check_invariance(model, tiny.longer_results(), dtypes=(), tolerance=1e-5, verbose=False)
    passed = table.set_index("check")["passed"]
    assert all(passed[["repeated", "order", "alone", "padding"]])
    assert all(passed.dropna())
