"""The model: whatever the batches, the padding and the order, a pair has one score; and what is told about it."""

from __future__ import annotations

import gc
import io
import math
from contextlib import nullcontext
from dataclasses import replace

import numpy as np
import pyterrier as pt
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pyterrier_longdoc.common.coverage import Coverage, PairCoverage
from pyterrier_longdoc.common.frames import Document
from pyterrier_longdoc.modelling import model as model_module
from pyterrier_longdoc.modelling import reader as reader_module
from pyterrier_longdoc.modelling.backbones.load import load_backbone
from pyterrier_longdoc.modelling.encoder import WindowEncoder
from pyterrier_longdoc.modelling.heads import build_head, registered_heads
from pyterrier_longdoc.modelling.model import blocks
from pyterrier_longdoc.modelling.preselection import BM25Windows, FirstK
from pyterrier_longdoc.modelling.tokens import tokenize
from pyterrier_longdoc.modelling.windows import GreedyChunks, SlidingWindows, SlidingWords, Truncate, WholeText

from ..support import tiny
from ..support.scorers import Passes, explained, scorer_of
from ..support.systems import slow_but
from ..support.threads import Interleaved

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
    scorer.head.warm_start(scorer.initial_weights())
    with torch.no_grad():
        for name, parameter in scorer.head.named_parameters():
            if "attention" in name and name.count(".") < 2:
                parameter.normal_()
            elif name.startswith("aggregator.") and parameter.dim() == 2:
                parameter.normal_(0.0, 0.3)
    return scorer.eval()


def scores(scorer, queries=QUERIES, texts=TEXTS) -> np.ndarray:
    return scorer.score(queries, texts).scores


def test_a_head_without_a_score_for_each_document_is_refused_by_name(roberta, monkeypatch):
    scorer = make(roberta)
    monkeypatch.setattr(scorer.head, "forward", lambda encoded: scorer.head.score(encoded.cls))
    with pytest.raises(ValueError, match="maxp"):
        scorer(QUERIES[:2], TEXTS[:2])


def test_concurrent_threads_get_the_fingerprint_of_the_current_weights(roberta, monkeypatch):
    scorer = make(roberta)
    old = scorer.fingerprint()
    with torch.no_grad():
        scorer.head.final.bias.add_(1)
    threads = Interleaved().before(monkeypatch, model_module, "fingerprint")
    found = threads.run(scorer.fingerprint, scorer.fingerprint)
    assert old not in found
    assert len(set(found)) == 1


@given(
    rows=st.lists(st.tuples(st.integers(0, 4), st.integers(0, 6)), max_size=40),
    characters=st.integers(1, 60),
    pairs=st.integers(1, 12),
)
def test_blocks_contain_each_pair_once_within_their_limits(rows, characters, pairs):
    given_pairs = [(str(query), "x" * (3 * text) + str(text)) for query, text in rows]
    queries, texts = [query for query, _ in given_pairs], [text for _, text in given_pairs]
    made = list(blocks(queries, texts, characters=characters, pairs=pairs))
    for block in made:
        assert len(block) <= pairs
        # A block ends as soon as it has enough characters; a single pair may have more.
        assert len(block) == 1 or len(block) * len(block[0][1]) <= characters
    found = [pair for block in made for pair in block]
    owners = {(query, text): owned for query, text, owned in found}
    assert len(owners) == len(found) == len(set(given_pairs))
    assert all(owned == [i for i, pair in enumerate(given_pairs) if pair == own] for own, owned in owners.items())
    lengths = [len(text) for _, text, _ in found]
    assert lengths == sorted(lengths, reverse=True)


def test_scores_do_not_depend_on_the_size_of_blocks(backbone, monkeypatch):
    scorer = make(backbone)
    queries, texts = QUERIES * 2, TEXTS + TEXTS[::-1]
    expected = scorer.score(queries, texts)
    for characters, pairs in [(1, 4096), (10**6, 1), (300, 3)]:
        monkeypatch.setattr(WindowEncoder, "block_characters", characters)
        monkeypatch.setattr(model_module, "PAIRS_PER_BLOCK", pairs)
        again = scorer.score(queries, texts)
        np.testing.assert_allclose(again.scores, expected.scores, **CLOSE)
        assert again.coverage == expected.coverage


def test_a_run_holds_its_settings_from_its_start(backbone, monkeypatch):
    scorer = make(backbone)
    expected, cut = scores(scorer), replace(scorer.settings, max_doc_len=5)
    monkeypatch.setattr(model_module, "PAIRS_PER_BLOCK", 1)
    found = scorer.score(QUERIES, TEXTS, on_block=lambda rows, values: scorer.use(cut)).scores
    np.testing.assert_allclose(found, expected, **CLOSE)
    assert not np.allclose(scores(scorer), expected)


def test_no_object_of_a_pair_stays_in_memory(backbone, monkeypatch):
    monkeypatch.setattr(model_module, "PAIRS_PER_BLOCK", 1)
    scorer, alive = make(backbone), []

    def count(*_):
        alive.append(sum(type(each) is PairCoverage for each in gc.get_objects()))

    gc.collect()
    count()  # those of other tests
    scorer.score(["old dog"] * 20, [text_of(20 + number) for number in range(20)], on_block=count)
    assert len(alive) == 21
    assert max(alive) <= alive[0] + 3  # the current pair, the one before, and the shortest reading of the query


def test_a_text_in_several_blocks_is_tokenized_once(backbone, monkeypatch):
    scorer, tokenized = make(backbone), []
    tokenize_documents = reader_module.tokenize_documents

    def counting(tokenizer, documents, *arguments, **options):
        tokenized.extend(documents)
        return tokenize_documents(tokenizer, documents, *arguments, **options)

    expected = scorer.score(["a cat", "old dog"] * 2, [TEXTS[0]] * 2 + [TEXTS[1]] * 2).scores
    monkeypatch.setattr(reader_module, "tokenize_documents", counting)
    monkeypatch.setattr(model_module, "PAIRS_PER_BLOCK", 1)
    scorer = make(backbone)
    found = scorer.score(["a cat", "old dog"] * 2, [TEXTS[0]] * 2 + [TEXTS[1]] * 2).scores
    np.testing.assert_allclose(found, expected, **CLOSE)
    assert sorted(document.text for document in tokenized) == sorted(TEXTS[:2])


# RoBERTa's plain layout is not among them: there the model finds its positions by the id of padding.
@pytest.mark.parametrize(
    ("model", "layout"),
    [("backbone", "pair"), ("backbone", "padded"), ("roberta", "padded"), ("roberta", "longformer")],
)
def test_scores_do_not_depend_on_the_padding_id(request, model, layout):
    scorer = make(request.getfixturevalue(model), layout=layout)
    expected = scores(scorer)
    for pad_id in (1, 50):
        scorer.reader.pad_id = pad_id
        scorer.reader.specials = replace(scorer.reader.specials, pad_id=pad_id)
        np.testing.assert_allclose(scores(scorer), expected, **CLOSE)


@pytest.mark.parametrize("max_doc_len", [1, 20, 21, 50, 94, 95, 1000])
def test_max_doc_len_truncates_a_text_after_that_many_tokens(backbone, max_doc_len):
    expected = scores(make(backbone), ["old dog"], [text_of(min(max_doc_len, 95))])
    found = scores(make(backbone, max_doc_len=max_doc_len), ["old dog"], [text_of(95)])
    np.testing.assert_allclose(found, expected)


def test_no_pairs_give_no_scores(backbone):
    scorer = make(backbone)
    assert scorer([], []).tolist() == []
    scored = scorer.score([], [], explain=True)
    assert (scored.scores.tolist(), scored.columns, scored.coverage) == ([], {}, Coverage())
    assert (scored.coverage.lost, scored.coverage.padding) == ({}, 0.0)


@pytest.mark.parametrize("diverged", [False, True])
def test_scoring_restores_the_training_mode_of_each_module(backbone, diverged):
    expected = scores(make(backbone))
    scorer = make(backbone).train()
    scorer.encoder.backbone.embeddings.eval()  # as one who freezes a part does
    modes = [module.training for module in scorer.modules()]
    if diverged:
        torch.nn.init.constant_(scorer.head.final.bias, math.nan)
    with pytest.raises(FloatingPointError, match="6 of 6") if diverged else nullcontext():
        np.testing.assert_array_equal(scores(scorer), expected)
    assert set(modes) == {True, False}
    assert [module.training for module in scorer.modules()] == modes


def test_bars_count_the_characters_of_every_row(backbone):
    queries, texts = [*QUERIES, QUERIES[0]], [*TEXTS, TEXTS[0]]
    for run in (make(backbone).score, make(backbone).coverage_of):
        with pt.tqdm(file=io.StringIO()) as bar:
            run(queries, texts, bar=bar)
        assert bar.n == bar.total == sum(map(len, texts))


def test_coverage_counts_documents_windows_queries_and_tokens(backbone):
    # Windows of 20 by 10, three at most: tokens 0-40.
    windows = SlidingWindows(20, 10, max_windows=3)
    scorer = make(backbone, windows=windows, windows_argument="max_windows=3", max_query_len=3)
    queries = ["old dog", "snow in the city", "old dog", "old dog", "rain in the city", "snow in the"]
    texts = [text_of(95), text_of(40), text_of(41), text_of(15), text_of(95), ""]
    coverage = scorer.score(queries, texts).coverage
    assert coverage == Coverage(
        pairs=6,  # the text of 95 tokens is there for two queries
        pairs_truncated=3,  # 95 twice, and 41
        tokens=95 + 40 + 41 + 15 + 95 + 0,
        tokens_read=40 + 40 + 40 + 15 + 40 + 0,
        windows=3 + 3 + 3 + 1 + 3 + 1,
        queries=4,
        queries_truncated=2,
        query_tokens=2 + 4 + 4 + 3,
        query_tokens_read=2 + 3 + 3 + 3,
        truncated={"max_windows=3": 55 + 1 + 55, "max_query_len=3": 2},
    )
    assert coverage.lost == {"max_query_len=3": 2}  # that max_windows left something out was asked for
    assert coverage.share_read == (40 + 40 + 40 + 15 + 40) / (95 + 40 + 41 + 15 + 95)
    assert coverage.windows_per_document == 14 / 6
    gaps = make(backbone, windows=GreedyChunks(20, max_windows=2, selection="first_last_random"))
    assert gaps.score(["a"], [text_of(95)]).coverage.tokens_read == 20 + 15  # tokens 0-20 and 80-95


HALVES = SlidingWindows(20, 20, max_windows=2)
TITLED = Document(text_of(30), "the red bird and the blue cat")
LEFT = "the 105 tokens that window_size=20 leaves for a query"
LONGEST, FIRST_TWO, SHARED = "the maximum input length of the backbone", "preselect=FirstK(k=2)", "layout='shared'"


def test_coverage_names_the_argument_that_causes_truncation(backbone):
    for arguments, query, text, cut in [
        ({"max_doc_len": 45}, "a", text_of(95), {"max_doc_len=45": 50}),
        ({"max_query_len": 3}, text_of(5), text_of(9), {"max_query_len=3": 2}),
        ({"windows": HALVES, "windows_argument": "max_windows=2"}, "a", text_of(95), {"max_windows=2": 55}),
        ({"windows": Truncate(20), "windows_argument": "window_size"}, "a", text_of(95), {"window_size=20": 75}),
        ({"windows": HALVES, "windows_argument": f"windows={HALVES!r}"}, "a", text_of(95), {f"windows={HALVES!r}": 55}),
        ({"windows": WholeText()}, "a", text_of(200), {LONGEST: 200 - (128 - 3 - 8)}),
        ({"max_query_len": None, "windows_argument": "window_size"}, text_of(110), text_of(9), {LEFT: 5}),
        ({"preselect": FirstK(2)}, "a", text_of(95), {FIRST_TWO: 65}),
        ({"preselect": FirstK(2), "max_doc_len": 40}, "a", text_of(95), {"max_doc_len=40": 55, FIRST_TWO: 10}),
        ({"repeat_tokens": 3}, "a", TITLED, {"repeat_tokens=3": 4}),
        ({"preselect": BM25Windows(2)}, "a", text_of(95), {f"preselect={BM25Windows(2)!r}": 65}),
        ({"layout": "shared", "windows": Truncate(20)}, text_of(30), text_of(95), {SHARED: 30 - 14 + 95 - 14}),
        ({"layout": "shared", "windows": WholeText()}, "a", text_of(200), {SHARED: 200 - (128 - 3 - 1)}),
        ({"layout": "shared", "windows": WholeText(), "max_doc_len": 20}, "a", text_of(95), {SHARED: 95 - 27}),
        ({}, text_of(8), text_of(95), {}),
    ]:
        scorer = make(backbone, **arguments)
        coverage = scorer.score([query] * 2, [text] * 2).coverage
        assert coverage.truncated == cut
        assert coverage.lost == {
            name: n for name, n in cut.items() if not name.startswith(("max_windows=", "preselect="))
        }
        unread = coverage.tokens - coverage.tokens_read + coverage.query_tokens - coverage.query_tokens_read
        assert unread == sum(n for name, n in cut.items() if not name.startswith("repeat_tokens"))
        assert scorer.coverage_of([query] * 2, [text] * 2) == coverage


@pytest.mark.parametrize("head", ["maxp", "parade-transformer-query", "cedr-knrm"])
def test_equal_copies_are_one_query_and_one_text(backbone, head):
    queries, texts = ["old dog"] * 3 + ["snow"], [TEXTS[0]] * 2 + [TEXTS[2]] * 2
    copies = ["".join(list(query)) for query in queries], ["".join(list(text)) for text in texts]
    assert copies[1][0] is not copies[1][1]
    scorer = make(backbone, head)
    passes = Passes(scorer)
    expected, windows = scorer.score(queries, texts), passes.windows
    again = scorer.score(*copies)
    assert windows == passes.windows - windows == 9 + 2 * 2  # of the pair that stands there twice, once
    np.testing.assert_array_equal(again.scores, expected.scores)
    assert again.coverage == expected.coverage


def test_equal_texts_with_other_titles_are_other_texts(backbone):
    scorer = make(backbone, repeat_tokens=5)
    texts = [Document(TEXTS[2], title) for title in ("red fish", "a cat", "red fish")]
    first, other, again = scores(scorer, ["old dog"] * 3, texts)
    assert first == again != other
    assert scorer.coverage_of(["old dog"] * 3, texts).pairs == 2


@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize("windows", [SLIDING, pytest.param(SlidingWords(15, 10), marks=pytest.mark.slow)])
def test_explanations_have_spans_scores_and_weights_of_each_window(backbone, head, windows):
    scorer = make(backbone, head, windows, max_doc_len=60)
    single = make(backbone, head, Truncate(60))
    queries, texts = [*QUERIES, "old dog"], [text.replace("city", "city.") for text in [*TEXTS, TEXTS[0]]]
    found, explanations = explained(scorer, queries, texts)
    np.testing.assert_allclose(found, scores(scorer, queries, texts), **CLOSE)
    for query, text, score, explanation in zip(queries, texts, found, explanations, strict=True):
        [tokens] = tokenize(scorer.tokenizer, [text], offsets=True)
        assert explanation.window_spans == [tokens.characters(span) for span in scorer.reader.windows(tokens.head(60))]
        assert len(explanation.window_scores) == len(explanation.window_spans)
        # Each window by itself. White space at its ends is no token.
        pieces = [text[a:b] for a, b in explanation.window_spans]
        alone = scores(single, [query] * len(pieces), pieces)
        if head in TOKENS:
            # The query of later windows is that of the first one.
            alone[1:] = explanation.window_scores[1:]
        np.testing.assert_allclose(explanation.window_scores, alone, **CLOSE)
        assert (explanation.best_start, explanation.best_end) == explanation.window_spans[int(np.argmax(alone))]
        assert (explanation.window_weights is not None) == head.startswith("parade-attn")
        if explanation.window_weights is not None:
            assert len(explanation.window_weights) == len(explanation.window_spans)
            assert sum(explanation.window_weights) == pytest.approx(1)
        if head == "maxp":
            assert score == pytest.approx(max(explanation.window_scores))
