"""The scorer: whatever the batches, the padding and the order, a pair has one score; and what is told about it."""

from __future__ import annotations

import io
import itertools
import math
from dataclasses import replace

import numpy as np
import pyterrier as pt
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pyterrier_longdoc.common.coverage import Coverage, Work
from pyterrier_longdoc.modelling import scorer as scorer_module
from pyterrier_longdoc.modelling.backbones.load import load_backbone
from pyterrier_longdoc.modelling.encoder import WindowEncoder
from pyterrier_longdoc.modelling.heads import build_head, registered_heads
from pyterrier_longdoc.modelling.texts import tokenize
from pyterrier_longdoc.modelling.windows import GreedyChunks, SentenceWindows, SlidingWindows, SlidingWords, Truncate

from ..support import tiny
from ..support.scorers import explained, scorer_of
from ..support.systems import slow_but

SLIDING = SlidingWindows(20, 10)
CLOSE = {"rtol": 1e-5, "atol": 1e-5}
HEADS = slow_but(("maxp", "parade-attn", "parade-transformer-query", "cedr-knrm"), registered_heads())
TOKENS = [name for name, head in registered_heads().items() if head.needs != "cls"]


def text_of(words, seed=0):
    """A text of this many words, each of them one token."""
    return " ".join(tiny.WORDS[(i * i + 7 * i + seed) % len(tiny.WORDS)] for i in range(words))


QUERIES = ["old dog", "snow in the city", "old dog", "a", "", "red fish and a blue bird"]
TEXTS = [text_of(95), text_of(12, 1), text_of(30, 2), "", text_of(20, 3), text_of(47, 4)]


@pytest.fixture(scope="module")
def roberta(tmp_path_factory):
    return load_backbone(tiny.checkpoint(tmp_path_factory.mktemp("roberta"), "roberta"))


def make(backbone, head="maxp", windows=SLIDING, **arguments):
    """A scorer in evaluation mode; attention, which starts at zero, and an aggregator are given some weight."""
    torch.manual_seed(0)
    module = build_head(head, backbone.hidden_size, channels=backbone.channels)
    scorer = scorer_of(backbone, windows, module, **{"max_query_len": 8, **arguments})
    scorer.warm_start(backbone)
    with torch.no_grad():
        for name, parameter in scorer.head.named_parameters():
            if "attention" in name and name.count(".") < 2:
                parameter.normal_()
            elif name.startswith("aggregator.") and parameter.dim() == 2:
                parameter.normal_(0.0, 0.3)
    return scorer.eval()


def scores(scorer, queries=QUERIES, texts=TEXTS) -> np.ndarray:
    return scorer.score(queries, texts).scores


def each_alone(scorer) -> np.ndarray:
    return np.array([scores(scorer, [query], [text])[0] for query, text in zip(QUERIES, TEXTS, strict=True)])


def test_a_head_that_gives_no_score_for_each_document_is_named(roberta, monkeypatch):
    scorer = make(roberta)
    monkeypatch.setattr(scorer.head, "forward", lambda encoded: scorer.head.score(encoded.cls))
    with pytest.raises(ValueError, match=r"head 'maxp' gave scores of the shape \(2, \d\) for 2 documents.*\(B,\)"):
        scorer(QUERIES[:2], TEXTS[:2])


# Batches, order, padding.


@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize("layout", ["pair", "padded"])
def test_a_score_does_not_depend_on_the_batch(backbone, head, layout):
    scorer = make(backbone, head, layout=layout)
    alone = each_alone(scorer)
    assert len(set(np.round(alone, 5))) == len(alone)
    for batch_size, tokens in [(1, 10**6), (3, 10**6), (64, 1), (64, 40), (5, 70)]:
        scorer.use(replace(scorer.settings, batch_size=batch_size, max_batch_tokens=tokens))
        np.testing.assert_allclose(scores(scorer), alone, **CLOSE)
    for order in itertools.islice(itertools.permutations(range(len(alone))), 0, 720, 240):
        mixed = scores(scorer, [QUERIES[i] for i in order], [TEXTS[i] for i in order])
        np.testing.assert_allclose(mixed, alone[list(order)], **CLOSE)


def test_many_blocks_give_the_scores_of_one(backbone, monkeypatch):
    scorer = make(backbone)
    queries, texts = QUERIES * 2, TEXTS + TEXTS[::-1]
    expected = scorer.score(queries, texts)
    for characters, pairs in [(1, 4096), (10**6, 1), (300, 3)]:
        monkeypatch.setattr(WindowEncoder, "block_characters", characters)
        monkeypatch.setattr(scorer_module, "BLOCK_PAIRS", pairs)
        again = scorer.score(queries, texts)
        np.testing.assert_allclose(again.scores, expected.scores, **CLOSE)
        assert again.coverage == expected.coverage


# RoBERTa's plain layout is not among them: there the model finds its positions by the id of padding.
@pytest.mark.parametrize(
    ("model", "layout"),
    [("backbone", "pair"), ("backbone", "padded"), ("roberta", "padded"), ("roberta", "longformer")],
)
def test_the_id_of_padding_does_not_matter(request, model, layout):
    scorer = make(request.getfixturevalue(model), layout=layout)
    expected = scores(scorer)
    for pad_id in (1, 50):
        scorer.layout = replace(scorer.layout, pad_id=pad_id)
        np.testing.assert_allclose(scores(scorer), expected, **CLOSE)


def test_the_two_layouts_differ_where_there_is_padding_only(backbone):
    plain, fixed = make(backbone), make(backbone, layout="padded")
    full = ([text_of(8, 9)], [text_of(20)])
    np.testing.assert_allclose(scores(plain, *full), scores(fixed, *full), **CLOSE)
    for query, text in ((full[0], [text_of(19)]), (["old"], full[1])):
        assert scores(plain, query, text) != pytest.approx(scores(fixed, query, text))


# What is read.


def test_a_document_budget_is_the_text_cut_after_that_many_tokens(backbone):
    whole = scores(make(backbone), ["old dog"], [text_of(95)])
    for max_doc_len in (1, 20, 21, 50, 94):
        expected = scores(make(backbone), ["old dog"], [text_of(max_doc_len)])
        cut = scores(make(backbone, max_doc_len=max_doc_len), ["old dog"], [text_of(95)])
        np.testing.assert_allclose(cut, expected)
    for max_doc_len in (95, 1000):
        assert np.array_equal(scores(make(backbone, max_doc_len=max_doc_len), ["old dog"], [text_of(95)]), whole)


def test_queries_are_cut(backbone):
    long, cut = scores(make(backbone, max_query_len=3), ["old dog in the city", "old dog in"], [text_of(30)] * 2)
    assert long == pytest.approx(cut, rel=1e-5)
    [whole] = scores(make(backbone, max_query_len=5), ["old dog in the city"], [text_of(30)])
    assert whole != pytest.approx(long)


def test_windows_adapt_to_the_backbone(backbone):
    # 128 positions, 8 of them for the query, 3 for special tokens
    for windows in (GreedyChunks(), SentenceWindows(), SlidingWindows(117, 60)):
        assert make(backbone, windows=windows).settings.windows.largest == 128 - 8 - 3


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"windows": SlidingWindows(118, 60)}, "the backbone takes 117 document tokens; lower the window size to 117"),
        ({"windows": SlidingWords(max_tokens=118)}, "max_tokens=118 does not fit"),
        ({"max_query_len": 125}, "max_query_len=125 leaves no room for a document: the backbone takes 128 tokens, 3"),
        ({"max_query_len": 125, "layout": "padded"}, "leaves no room for a document"),
    ],
)
def test_wrong_arguments(backbone, arguments, message):
    with pytest.raises(ValueError, match=message):
        make(backbone, **arguments)


# Heads and modes.


@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize("layout", ["pair", "padded"])
def test_scoring_is_forward_in_evaluation_mode(backbone, head, layout):
    scorer = make(backbone, head, layout=layout)
    expected = scorer(QUERIES, TEXTS)
    assert expected.requires_grad
    np.testing.assert_allclose(scores(scorer), expected.detach().numpy(), **CLOSE)


def test_nothing_in_nothing_out(backbone):
    scorer = make(backbone)
    assert scorer([], []).tolist() == []
    scored = scorer.score([], [], explain=True)
    assert (scored.scores.tolist(), scored.explanations) == ([], [])
    coverage = scored.coverage
    assert (coverage, coverage.tokens_computed, coverage.padding) == (Coverage(), 0, 0.0)
    assert "padding" not in str(coverage)
    assert coverage.losses() == ""


def test_modes_are_restored(backbone):
    scorer = make(backbone)
    expected = scores(scorer)
    scorer.train()
    scorer.encoder.backbone.embeddings.eval()  # as one who freezes a part does
    modes = [module.training for module in scorer.modules()]
    assert set(modes) == {True, False}
    assert np.array_equal(scores(scorer), expected)
    assert [module.training for module in scorer.modules()] == modes
    with torch.no_grad():
        scorer.head.final.bias.fill_(math.nan)
    with pytest.raises(FloatingPointError, match="6 of 6 scores are not finite, the first in row 0"):
        scores(scorer)
    assert [module.training for module in scorer.modules()] == modes


def test_scores_that_are_not_finite(backbone):
    scorer = make(backbone)
    scorer.head.forward = lambda encoded: torch.where(encoded.mask.sum(1) == 9, torch.inf, 0.0)
    message = r"1 of 3 scores are not finite, the first in row 1; with dtype='float16' use bfloat16"
    with pytest.raises(FloatingPointError, match=message):
        scorer.score(["a"] * 3, ["the cat", text_of(95), ""])


# What is told: progress, coverage, explanations.


@given(parts=st.lists(st.integers(1, 50), min_size=1, max_size=60), rows=st.integers(0, 1000))
def test_work_that_is_done_adds_up(parts, rows):
    with pt.tqdm(file=io.StringIO()) as bar:
        work = Work(Coverage(), bar, rows + 7)
        for block in (rows, 7):
            work.begin(block)
            for part in parts:
                before = bar.n
                work.advance(part, sum(parts))
                assert before <= bar.n
        assert bar.n == bar.total == rows + 7
        work.end()
        assert bar.n == rows + 7


def test_coverage(backbone):
    # Windows of 20 by 10, three at most: tokens 0-40.
    scorer = make(backbone, windows=SlidingWindows(20, 10, max_windows=3), max_query_len=3)
    queries = ["old dog", "snow in the city", "old dog", "old dog", "rain in the city", "snow in the"]
    texts = [text_of(95), text_of(40), text_of(41), text_of(15), text_of(95), ""]
    coverage = scorer.score(queries, texts).coverage
    assert coverage == Coverage(
        documents=6,  # the text of 95 tokens is there for two queries
        documents_cut=3,  # 95 twice, and 41
        tokens=95 + 40 + 41 + 15 + 95 + 0,
        tokens_read=40 + 40 + 40 + 15 + 40 + 0,
        tokens_passed_over=55 + 1 + 55,
        windows=3 + 3 + 3 + 1 + 3 + 1,
        queries=4,
        queries_cut=2,
        query_tokens=2 + 4 + 4 + 3,
        query_tokens_read=2 + 3 + 3 + 3,
    )
    assert coverage.tokens_lost == 0  # by what no argument asked for
    assert coverage.is_cut
    assert coverage.share_read == (40 + 40 + 40 + 15 + 40) / (95 + 40 + 41 + 15 + 95)
    assert coverage.windows_per_document == 14 / 6
    whole = scorer.score(["a"], ["the cat"]).coverage  # of this run alone
    assert (whole.documents, whole.queries, whole.tokens, whole.is_cut, whole.share_read) == (1, 1, 2, False, 1.0)
    # With a document budget, and with gaps.
    scorer = make(backbone, max_doc_len=45)
    coverage = scorer.score(["a"] * 3, [text_of(95), text_of(45), text_of(44)]).coverage
    assert (coverage.tokens, coverage.tokens_read) == (95 + 45 + 44, 45 + 45 + 44)
    assert (coverage.documents_cut, coverage.queries_cut) == (1, 0)
    assert (coverage.tokens_beyond, coverage.tokens_passed_over, coverage.tokens_lost) == (50, 0, 50)
    scorer = make(backbone, windows=GreedyChunks(20, max_windows=2, selection="first_last_random"))
    assert scorer.score(["a"], [text_of(95)]).coverage.tokens_read == 20 + 15  # tokens 0-20 and 80-95


@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize("windows", [SLIDING, pytest.param(SlidingWords(15, 10), marks=pytest.mark.slow)])
def test_explanations(backbone, head, windows):
    scorer = make(backbone, head, windows, max_doc_len=60)
    single = make(backbone, head, Truncate(60))
    queries, texts = [*QUERIES, "old dog"], [text.replace("city", "city.") for text in [*TEXTS, TEXTS[0]]]
    found, explanations = explained(scorer, queries, texts)
    np.testing.assert_allclose(found, scores(scorer, queries, texts), **CLOSE)
    for query, text, score, explanation in zip(queries, texts, found, explanations, strict=True):
        [tokens] = tokenize(scorer.tokenizer, [text], offsets=True)
        assert explanation.spans == [tokens.characters(span) for span in scorer.settings.windows(tokens.head(60))]
        assert len(explanation.scores) == len(explanation.spans)
        # Each window by itself. White space at its ends is no token.
        pieces = [text[a:b] for a, b in explanation.spans]
        alone = scores(single, [query] * len(pieces), pieces)
        if head in TOKENS:
            # The query of later windows is that of the first one.
            alone[1:] = explanation.scores[1:]
        np.testing.assert_allclose(explanation.scores, alone, **CLOSE)
        assert explanation.best == int(np.argmax(alone))
        if explanation.weights is not None:
            assert len(explanation.weights) == len(explanation.spans)
            assert sum(explanation.weights) == pytest.approx(1)
        if head == "maxp":
            assert score == pytest.approx(max(explanation.scores))
    assert (explanations[0].weights is not None) == head.startswith("parade-attn")
