"""The best passages of a document instead of its beginning, within budgets."""

from __future__ import annotations

import re
import warnings

import pandas as pd
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

import pyterrier_longdoc as ld
from pyterrier_longdoc.common.frames import TruncationWarning
from pyterrier_longdoc.listwise import BackToFront, ListwisePrompt, RankGPT, TopDown
from pyterrier_longdoc.listwise.prompt_budget import Tokens
from pyterrier_longdoc.modelling.excerpts import best_passages

from ..support import tiny
from ..support.llm import Scripted, order, shown

FILLER = "The train to the coast leaves at noon. "
FAR = FILLER * 40 + "Cats sleep all day. " + FILLER * 40 + "A cat purrs. " + FILLER * 10
DOCUMENTS = [FILLER * 90, FAR, "Short.", FILLER * 60 + "One cat."]
FRAME = pd.DataFrame({"qid": "1", "query": "cats cat", "docno": list("abcd"), "text": DOCUMENTS})
SENTENCES = ld.SentenceWindows(max_sentences=1)


def count_cats(messages) -> str:
    documents = sorted(shown(messages), key=lambda one: -one[1].lower().count("cat"))
    return " > ".join(f"[{number}]" for number, _ in documents)


def texts(messages) -> list[str]:
    return [text for _, text in shown(messages)]


def test_preselect_shows_the_best_passages_in_document_order_with_marks():
    model = Scripted(count_cats)
    ranker = RankGPT(model, preselect=ld.BM25Windows(2), windows=SENTENCES)
    assert order(ranker(FRAME)) == ["b", "d", "a", "c"]
    a, b, c, d = texts(model.asked[0])
    assert b == "[...] Cats sleep all day. [...] A cat purrs. [...]"
    assert d == "The train to the coast leaves at noon. [...] One cat."
    assert c == "Short."
    assert a == f"{FILLER}{FILLER}[...]"


def test_coverage_counts_what_preselect_left_out():
    ranker = RankGPT(count_cats, preselect=ld.BM25Windows(2), windows=SENTENCES)
    ranker(pd.concat([FRAME, FRAME.assign(qid="2", query="train")]))
    coverage = ranker.coverage
    assert (coverage.queries, coverage.pairs, coverage.pairs_truncated) == (2, 8, 6)
    assert coverage.truncated == {f"preselect={ranker.preselect!r}": coverage.tokens - coverage.tokens_read}
    assert coverage.windows == 2 * (2 + 2 + 1 + 2)


@pytest.mark.parametrize("tokenizer", [None, tiny.tokenizer()], ids=["characters", "word pieces"])
def test_max_doc_len_takes_the_best_passages_first(tokenizer):
    model = Scripted(count_cats)
    ranker = RankGPT(model, preselect=ld.BM25Windows(50), windows=SENTENCES, max_doc_len=15, tokenizer=tokenizer)
    with pytest.warns(TruncationWarning, match="max_doc_len=15"):
        assert order(ranker(FRAME))[:2] == ["b", "d"]
    assert list(ranker.coverage.truncated) == [f"preselect={ranker.preselect!r}", "max_doc_len=15"]
    count = Tokens(tokenizer).count
    for text in texts(model.asked[0]):
        assert 0 < count(text) <= 15
    assert "A cat purrs." in texts(model.asked[0])[1]


def test_long_documents_use_the_tokens_that_short_ones_leave():
    model = Scripted(count_cats)
    prompt = ListwisePrompt("single", system="")
    ranker = RankGPT(model, preselect=ld.FirstK(1000), windows=SENTENCES, max_prompt_tokens=1000, prompt=prompt)
    ranker(FRAME)
    lengths = [Tokens().count(text) for text in texts(model.asked[0])]
    assert lengths[2] == 2
    assert max(lengths) - min(lengths[:2] + lengths[3:]) <= 15  # but for a sentence, the others have the same
    assert 1000 - 3 * 15 <= Tokens().count_messages(model.asked[0]) <= 1000


SENTENCE = st.text(alphabet="ab [1]\n.é猫", min_size=0, max_size=30)
TEXT = st.lists(SENTENCE, max_size=12).map(". ".join)


def odd(text: str) -> int:
    """Tokens that do not add up: a whole may have more than its parts."""
    return len(re.findall(r"\w", text)) + len(text) % 7


def outcome_of(rank) -> str:
    try:
        return "".join(rank()["docno"].astype(str))
    except ValueError as error:
        return str(error)


@given(
    found=st.lists(TEXT, min_size=2, max_size=7),
    budget=st.integers(150, 700),
    selector=st.sampled_from([None, ld.FirstK(3), ld.BM25Windows(2), ld.BM25Windows(100)]),
    max_doc_len=st.sampled_from([None, 1, 9]),
    tokenizer=st.sampled_from([None, odd]),
    form=st.sampled_from(["turns", "single"]),
    schedule=st.sampled_from([BackToFront(4, 2), TopDown(3, 1, 3)]),
)
def test_no_prompt_is_longer_than_max_prompt_tokens(found, budget, selector, max_doc_len, tokenizer, form, schedule):
    frame = pd.DataFrame({"qid": "1", "query": "a cat", "docno": range(len(found)), "text": found})
    model = Scripted("No ranking " * 9, "[1] > [2]")  # the first is asked again, with a reminder
    arguments = {"preselect": selector, "max_doc_len": max_doc_len, "tokenizer": tokenizer, "schedule": schedule}
    ranker = RankGPT(
        model, max_prompt_tokens=budget, prompt=ListwisePrompt(form), on_failure="keep", windows=SENTENCES, **arguments
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        outcome = outcome_of(lambda: ranker(frame))
    assert "leaves no room" in outcome or sorted(outcome) == sorted(map(str, range(len(found))))
    for messages in model.asked:
        assert Tokens(tokenizer).count_messages(messages) <= budget


@given(TEXT, st.integers(1, 12), st.sampled_from(["cat", "a b"]))
def test_an_excerpt_is_the_text_with_marks_for_omitted_parts(text, k, query):
    assume("[...]" not in text)
    passages = best_passages(ld.BM25Windows(k), SENTENCES, [(query, text)])[query, text]
    assert len(passages.spans) == len(passages.best) <= k
    every = passages.excerpt(range(len(passages.spans)))
    if passages.is_complete:
        assert every == text
    kept = every.replace("[...]", "")
    assert "".join(kept.split()) == "".join("".join(text[a:b] for a, b in passages.spans).split())


@pytest.mark.parametrize("arguments", [{"preselect": 3}, {"preselect": ld.BM25Windows(3), "windows": ld.Truncate(9)}])
def test_wrong_selectors_are_refused(arguments):
    with pytest.raises(ValueError, match="preselect="):
        RankGPT(count_cats, **arguments)


def test_a_cross_encoder_can_preselect():
    model = Scripted(count_cats)
    ranker = RankGPT(model, preselect=ld.CrossEncoderWindows(2, ld.FirstP(tiny.encoder())), windows=SENTENCES)
    ranker(FRAME)
    assert [text.count("[...]") > 0 for text in texts(model.asked[0])] == [True, True, False, True]
    assert ranker.coverage.windows == 2 + 2 + 1 + 2
