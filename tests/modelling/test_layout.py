"""Input layouts against inputs made by Hugging Face's tokenizers and by hand; casing; budgets that are shared."""

from __future__ import annotations

import sys

import numpy as np
import pandas as pd
import pytest
import torch
import transformers

import pyterrier_longdoc as ld
from pyterrier_longdoc.modelling.layout import InputLayout

from ..support import tiny, tiny_long
from ..support.scorers import Passes
from ..support.systems import QUIET, make, scores
from .test_model import CLOSE, text_of

pytestmark = QUIET

ONE = {"layout": "shared", "windows": ld.Truncate(20)}


def test_contradictory_arguments_of_a_layout_are_refused_by_name():
    for make_bad, name in [
        (lambda: InputLayout(pad_query=True, shared_budget=True), "shared_budget"),
        (lambda: ld.MaxP(layout="paded"), "layout='paded'"),
        (lambda: ld.MaxP(layout=True), "layout=True"),
        # One window, in one input with its query.
        (lambda: ld.MaxP(layout="shared"), "shared_budget"),
        (lambda: ld.CEDR(layout="shared"), "shared_budget"),
        (lambda: ld.FirstP(layout="shared", windows=ld.SentenceWindows()), "shared_budget"),
        (lambda: ld.FirstP(layout="shared", preselect=ld.BM25Windows(2)), "preselect"),
        (lambda: ld.FirstP(layout="shared", text_field=("title", "text"), repeat="title"), "repeat"),
        (lambda: ld.LateIR(**ONE), "layout='shared'"),
    ]:
        with pytest.raises(ValueError, match=name):
            make_bad()


def test_the_longest_input_does_not_count_the_padding_of_the_layout(results):
    models = [make("MaxP", layout=layout, window_size=60) for layout in ("pair", "padded")]
    passes = [Passes(model.model) for model in models]
    for model in models:
        model(results)
    found = [model.coverage.longest_input for model in models]
    longest = [max(tokens for _, tokens in of_model.shapes) for of_model in passes]
    assert found[0] == found[1] == longest[0] < longest[1]


def test_lower_case_keeps_every_character_at_its_place():
    layout = InputLayout(lowercase=True)
    every = [chr(i) for i in range(sys.maxunicode + 1)]
    for character, lower in zip(every, layout.normalized(every), strict=True):
        assert lower == (character.lower() if len(character.lower()) == 1 else "i")
    assert layout.normalized(["İSTANBUL Straße", "ΑΣ"]) == ["istanbul straße", "ας"]
    texts = ["As it IS"]
    assert InputLayout().normalized(texts) is texts


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
    scorer, plain = model.model, make(name, with_capitals).model
    pairs = [list(frame[column]) for frame in (SHOUTED, QUIETLY) for column in ("query", "text")]
    torch.testing.assert_close(scorer(*pairs[:2]), plain(*pairs[2:]), **CLOSE)


LENGTHS = [(2, 10), (2, 40), (30, 3), (30, 40), (9, 8), (0, 40), (9, 0), (0, 0), (8, 9)]
SHARED = pd.DataFrame(
    [(f"q{i}", text_of(query, 3), f"d{i}", text_of(text, 5)) for i, (query, text) in enumerate(LENGTHS)],
    columns=["qid", "query", "docno", "text"],
)


@pytest.mark.parametrize("kind", ["jina", "mosaic", "llama", "bert"])
def test_inputs_of_the_shared_layout_equal_those_of_the_tokenizer(kind, tmp_path):
    """The same token ids as `tokenizer(query, text, truncation="longest_first", max_length=3 + 4 + 13)`."""
    if kind == "bert":
        model = make("FirstP", tiny.encoder(), layout="shared", window_size=13, max_query_len=4)
    else:
        model = ld.LongP(tiny_long.make(kind, tmp_path), layout="shared", max_doc_len=13, max_query_len=4, device="cpu")
    scorer = model.model
    passes = Passes(scorer)
    for query, text in zip(SHARED["query"], SHARED["text"], strict=True):
        scorer.score([query], [text])
        [inputs], passes.inputs = passes.inputs, []
        expected = scorer.tokenizer([query], [text], truncation="longest_first", max_length=3 + 4 + 13)
        assert inputs["input_ids"].tolist() == expected["input_ids"]
        assert "attention_mask" not in inputs  # nothing is padding
        if kind != "llama":
            assert inputs["token_type_ids"].tolist() == expected["token_type_ids"]


def test_coverage_counts_truncation_in_the_shared_layout():
    """The budget is 17 tokens. A text counts once per query, and a query as truncated if it is for any text."""
    long, short = text_of(40), text_of(3)
    frame = tiny.frame([text_of(2), text_of(30), text_of(15)], [long, short])
    model = make("FirstP", layout="shared", window_size=10, max_query_len=7)
    model(frame)
    coverage = model.coverage
    assert (coverage.queries, coverage.queries_truncated) == (3, 2)
    assert (coverage.query_tokens, coverage.query_tokens_read) == (2 + 30 + 15, 2 + 8 + 8)
    assert (coverage.pairs, coverage.pairs_truncated) == (6, 3)
    assert coverage.tokens == 3 * (40 + 3)
    assert coverage.tokens_read == (17 - 2 + 3) + (17 - 8 + 3) + (17 - 8 + 3)
    model(tiny.frame([text_of(14)], [short]))  # longer than max_query_len, and read to its end
    assert not model.coverage.truncated


@pytest.mark.parametrize(("query", "text"), [("old dog", text_of(20)), (text_of(6), text_of(3)), ("a", "")])
def test_the_padded_layout_has_the_positions_of_longformer_in_hugging_face(query, text, tmp_path):
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
