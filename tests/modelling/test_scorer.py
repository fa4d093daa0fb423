"""The scorer: whatever the batches, the padding and the order, a pair has one score."""

import itertools
import math
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pyterrier_longdoc.modelling.backbones.load import load_backbone
from pyterrier_longdoc.modelling.encoder import WindowEncoder
from pyterrier_longdoc.modelling.heads import build_head, registered_heads
from pyterrier_longdoc.modelling.texts import blocks, share_out, tokenize
from pyterrier_longdoc.modelling.windows import GreedyChunks, SentenceWindows, SlidingWindows, SlidingWords, Truncate

from ..modelling.test_windows import STRANGE
from ..support import tiny
from ..support.scorers import explained, scorer_of

SLIDING = SlidingWindows(20, 10)
CLOSE = {"rtol": 1e-5, "atol": 1e-5}
TOKENS = [name for name, head in registered_heads().items() if head.needs != "cls"]
LINEAR = [name for name in registered_heads() if name not in ("parade-transformer", *TOKENS)]
"""Heads that score a single window by the final layer alone."""


def text_of(words, seed=0):
    """A text of this many words, each of them one token."""
    return " ".join(tiny.WORDS[(i * i + 7 * i + seed) % len(tiny.WORDS)] for i in range(words))


QUERIES = ["old dog", "snow in the city", "old dog", "a", "", "red fish and a blue bird"]
TEXTS = [text_of(95), text_of(12, 1), text_of(30, 2), "", text_of(20, 3), text_of(47, 4)]


@pytest.fixture(scope="module")
def backbone(cross_encoder):
    return load_backbone(cross_encoder)


@pytest.fixture(scope="module")
def roberta(tmp_path_factory):
    return load_backbone(tiny.checkpoint(tmp_path_factory.mktemp("roberta"), "roberta"))


def make(backbone, head="maxp", windows=SLIDING, **arguments):
    """A scorer in evaluation mode; attention, which starts at zero, is given some weight."""
    torch.manual_seed(0)
    module = build_head(head, backbone.hidden_size, channels=backbone.channels)
    scorer = scorer_of(backbone, windows, module, **{"max_query_len": 8, **arguments})
    scorer.warm_start(backbone)
    with torch.no_grad():
        for name, parameter in scorer.head.named_parameters():
            if "attention" in name and name.count(".") < 2:
                parameter.normal_()
    return scorer.eval()


class Passes:
    """Records the shape of each pass through the backbone."""

    def __init__(self, scorer):
        self.shapes = []
        scorer.encoder.backbone.register_forward_pre_hook(
            lambda _, args, kwargs: self.shapes.append(tuple(kwargs["input_ids"].shape)), with_kwargs=True
        )

    @property
    def windows(self):
        return sum(rows for rows, _ in self.shapes)


# Batches, order, padding.


@pytest.mark.parametrize("head", list(registered_heads()))
@pytest.mark.parametrize("pad_query", [False, True], ids=["plain", "fixed"])
def test_a_score_does_not_depend_on_the_batch(backbone, head, pad_query):
    scorer = make(backbone, head, pad_query=pad_query)
    alone = [scorer.score([query], [text]).scores[0] for query, text in zip(QUERIES, TEXTS, strict=True)]
    assert len(set(np.round(alone, 4))) == len(alone)
    for batch_size, tokens in [(1, 10**6), (2, 10**6), (3, 10**6), (7, 10**6), (64, 1), (64, 40), (64, 100), (5, 70)]:
        scorer.use(replace(scorer.settings, batch_size=batch_size, max_batch_tokens=tokens))
        np.testing.assert_allclose(scorer.score(QUERIES, TEXTS).scores, alone, **CLOSE)
    for order in itertools.islice(itertools.permutations(range(len(alone))), 0, 720, 97):
        scores = scorer.score([QUERIES[i] for i in order], [TEXTS[i] for i in order]).scores
        np.testing.assert_allclose(scores, [alone[i] for i in order], **CLOSE)


@pytest.mark.parametrize("family", [family for family in tiny.FAMILIES if family != "bert"])
def test_a_score_does_not_depend_on_the_batch_whatever_the_family(family, tmp_path):
    backbone = load_backbone(tiny.checkpoint(tmp_path, family))
    for pad_query in (False, True):
        scorer = make(backbone, pad_query=pad_query)
        alone = [scorer.score([query], [text]).scores[0] for query, text in zip(QUERIES, TEXTS, strict=True)]
        np.testing.assert_allclose(scorer.score(QUERIES, TEXTS).scores, alone, **CLOSE)


@pytest.mark.parametrize(("batch_size", "tokens"), [(1, 10**6), (4, 10**6), (64, 64), (64, 5), (3, 80)])
def test_passes_stay_within_their_limits(backbone, batch_size, tokens):
    scorer = make(backbone, batch_size=batch_size, max_batch_tokens=tokens)
    passes = Passes(scorer)
    scorer.score(QUERIES, TEXTS).scores
    assert passes.windows == scorer.coverage.windows == 9 + 1 + 2 + 1 + 1 + 4
    assert all(rows <= batch_size for rows, _ in passes.shapes)
    assert all(rows == 1 or rows * length <= tokens for rows, length in passes.shapes)


def out_of_memory_beyond(limit, model, monkeypatch, error) -> list[tuple[int, int]]:
    """Lets the backbone run out of memory in passes of more than so many tokens; returns the passes that succeed."""
    passes, forward = [], model.encoder.backbone.forward

    def spy(*args, **kwargs):
        windows, length = kwargs["input_ids"].shape
        if windows * length > limit:
            raise error
        passes.append((windows, length))
        return forward(*args, **kwargs)

    monkeypatch.setattr(model.encoder.backbone, "forward", spy)
    return passes


MEMORY_ERRORS = [
    torch.OutOfMemoryError("CUDA out of memory."),
    RuntimeError("[enforce fail at alloc_cpu.cpp:121] . DefaultCPUAllocator: can't allocate memory: you tried to"),
]


@pytest.mark.parametrize("error", MEMORY_ERRORS, ids=["gpu", "cpu"])
@pytest.mark.parametrize("head", ["maxp", "cedr-knrm"])
def test_smaller_passes_where_memory_runs_out(backbone, head, error, monkeypatch, caplog):
    queries, texts = ["cat tree", "snow"] * 10, [text_of(5 + 7 * i, i) for i in range(20)]
    expected = make(backbone, head).score(queries, texts)
    model = make(backbone, head)
    passes = out_of_memory_beyond(200, model, monkeypatch, error)
    np.testing.assert_allclose(model.score(queries, texts).scores, expected, atol=1e-5)
    assert max(windows * length for windows, length in passes) <= 200
    limit = model.encoder.affordable_tokens
    assert f"from now on a pass has at most {limit} tokens; max_batch_tokens={limit}" in caplog.text
    caplog.clear()
    model.score(queries, texts).scores
    assert "memory ran out" not in caplog.text


def test_a_window_that_does_not_fit_alone_is_an_error(backbone, monkeypatch):
    model = make(backbone)
    out_of_memory_beyond(5, model, monkeypatch, MEMORY_ERRORS[0])
    with pytest.raises(torch.OutOfMemoryError):
        model.score(["cat"], [text_of(40)]).scores


def test_other_errors_and_training_are_not_tried_again(backbone, monkeypatch):
    model = make(backbone)
    out_of_memory_beyond(5, model, monkeypatch, RuntimeError("something else"))
    with pytest.raises(RuntimeError, match="something else"):
        model.score(["cat"] * 3, [text_of(40, i) for i in range(3)]).scores
    out_of_memory_beyond(5, model, monkeypatch, MEMORY_ERRORS[0])
    with pytest.raises(torch.OutOfMemoryError):
        model(["cat"] * 3, [text_of(40, i) for i in range(3)])


@pytest.mark.parametrize("head", ["avgp", "sump", "parade-attn", "parade-transformer"])
def test_a_document_budget_beyond_the_document_changes_nothing(backbone, head):
    scores = make(backbone, head).score(QUERIES, TEXTS)
    for max_doc_len in (95, 96, 1000):
        assert np.array_equal(make(backbone, head, max_doc_len=max_doc_len).score(QUERIES, TEXTS), scores)
    assert make(backbone, head, max_doc_len=94).score(QUERIES, TEXTS)[0] != scores[0]


def test_a_document_budget_is_the_text_cut_after_that_many_tokens(backbone):
    for max_doc_len in (1, 20, 21, 50):
        expected = make(backbone).score(["old dog"], [text_of(max_doc_len)]).scores
        np.testing.assert_allclose(
            make(backbone, max_doc_len=max_doc_len).score(["old dog"], [text_of(95)]).scores, expected
        )


def test_queries_are_cut(backbone):
    scorer = make(backbone, max_query_len=3)
    scores = scorer.score(["old dog in the city", "old dog in"], [text_of(30)] * 2).scores
    assert scores[0] == pytest.approx(scores[1], rel=1e-5)
    assert make(backbone, max_query_len=5).score(["old dog in the city"], [text_of(30)]).scores[0] != pytest.approx(
        scores[0]
    )


# RoBERTa's plain layout is not among them: there the model finds its positions by the id of padding.
@pytest.mark.parametrize(("model", "pad_query"), [("backbone", False), ("backbone", True), ("roberta", True)])
def test_the_id_of_padding_does_not_matter(request, model, pad_query):
    scorer = make(request.getfixturevalue(model), pad_query=pad_query)
    scores = scorer.score(QUERIES, TEXTS).scores
    for pad_id in (1, 7, 50):
        scorer.layout = replace(scorer.layout, pad_id=pad_id)
        np.testing.assert_allclose(scorer.score(QUERIES, TEXTS).scores, scores, **CLOSE)


def test_the_two_layouts_differ_where_there_is_padding_only(backbone):
    plain, fixed = make(backbone), make(backbone, pad_query=True)
    query, text = text_of(8, 9), text_of(20)
    np.testing.assert_allclose(plain.score([query], [text]).scores, fixed.score([query], [text]).scores, **CLOSE)
    assert plain.score([query], [text_of(19)]).scores != pytest.approx(fixed.score([query], [text_of(19)]).scores)
    assert plain.score(["old"], [text]).scores != pytest.approx(fixed.score(["old"], [text]).scores)


# Heads and modes.


def test_single_windows_have_one_score_whatever_the_head(backbone):
    texts = [text_of(20), text_of(7, 1), ""]
    expected = make(backbone, "firstp", Truncate(20)).score(["old dog"] * 3, texts).scores
    for head in LINEAR:
        np.testing.assert_allclose(make(backbone, head).score(["old dog"] * 3, texts), expected, **CLOSE)


@pytest.mark.parametrize("head", list(registered_heads()))
@pytest.mark.parametrize("pad_query", [False, True])
def test_scoring_is_forward_in_evaluation_mode(backbone, head, pad_query):
    scorer = make(backbone, head, pad_query=pad_query)
    scores = scorer(QUERIES, TEXTS)
    assert scores.requires_grad
    np.testing.assert_allclose(scorer.score(QUERIES, TEXTS).scores, scores.detach().numpy(), **CLOSE)


@pytest.mark.parametrize("windows", [SLIDING, GreedyChunks(20), SlidingWords(15, 10), SentenceWindows(max_tokens=20)])
def test_forward_and_score_read_the_same_windows(backbone, windows):
    texts = [text.replace("city", "city.") for text in TEXTS]
    scorer = make(backbone, windows=windows)
    scores = scorer(QUERIES, texts).detach().numpy()
    np.testing.assert_allclose(scorer.score(QUERIES, texts).scores, scores, **CLOSE)
    np.testing.assert_allclose(explained(scorer, QUERIES, texts)[0], scores, **CLOSE)


def test_nothing_in_nothing_out(backbone):
    scorer = make(backbone)
    assert scorer([], []).tolist() == []
    assert scorer.score([], []).scores.tolist() == []
    scores, explanations = explained(scorer, [], [])
    assert (scores.tolist(), explanations) == ([], [])
    assert scorer.coverage == make(backbone).coverage
    assert scorer.coverage.tokens_computed == 0


@pytest.mark.parametrize("head", list(registered_heads()))
@pytest.mark.parametrize("pad_query", [False, True])
def test_empty_queries_and_documents_have_finite_scores(backbone, head, pad_query):
    scores = make(backbone, head, pad_query=pad_query).score(["", "", "old dog"], ["", "a red fish", ""])
    assert np.isfinite(scores).all()
    # Sums over query tokens: without any, all documents are alike.
    assert len(set(scores)) == (2 if head in ("model1", "cedr-drmm") else 3)


def test_modes_are_restored(backbone):
    scorer = make(backbone)
    expected = scorer.score(QUERIES, TEXTS).scores
    scorer.train()
    scorer.encoder.backbone.embeddings.eval()  # as one who freezes a part does
    modes = [module.training for module in scorer.modules()]
    assert np.array_equal(scorer.score(QUERIES, TEXTS).scores, expected)
    explained(scorer, QUERIES, TEXTS)
    assert [module.training for module in scorer.modules()] == modes
    assert set(modes) == {True, False}
    with torch.no_grad():
        scorer.head.final.bias.fill_(math.nan)
    with pytest.raises(FloatingPointError, match="6 of 6 scores are not finite, the first in row 0"):
        scorer.score(QUERIES, TEXTS).scores
    assert [module.training for module in scorer.modules()] == modes


def test_scores_that_are_not_finite(backbone):
    scorer = make(backbone)
    scorer.head.forward = lambda encoded: torch.where(encoded.mask.sum(1) == 9, torch.inf, 0.0)
    message = r"1 of 3 scores are not finite, the first in row 1; with dtype='float16' use bfloat16"
    for method in (scorer.score, scorer.explain):
        with pytest.raises(FloatingPointError, match=message):
            method(["a"] * 3, ["the cat", text_of(95), ""])


def test_bfloat16_is_close_to_float32(cross_encoder):
    # Smaller weights than usual here: rounding grows with them.
    backbone = load_backbone(cross_encoder)
    with torch.no_grad():
        for parameter in backbone.model.parameters():
            parameter.mul_(0.5)
    for head in ("maxp", "parade-attn", "parade-transformer"):
        scorer = make(backbone, head)
        exact, rough = scorer.score(QUERIES, TEXTS).scores, scorer.score(QUERIES, TEXTS, dtype=torch.bfloat16).scores
        assert rough.dtype == np.float64
        assert not np.array_equal(exact, rough)
        np.testing.assert_allclose(rough, exact, atol=0.1 * np.ptp(exact))
    assert {p.dtype for p in scorer.parameters()} == {torch.float32}


def test_mean_pooling_counts_beyond_256_tokens_in_bfloat16(backbone):
    encoder = WindowEncoder(replace(backbone, pooling="mean"))
    states = torch.tensor([1.0, 3.0, 1.0] * 167 + [100.0] * 9, dtype=torch.bfloat16).view(1, -1, 1)
    mask = torch.arange(510).unsqueeze(0) < 501
    assert encoder._pool(states, mask).item() == pytest.approx((1 + 3 + 1) / 3, rel=1e-5)


# Work is done once.


def test_equal_pairs_are_encoded_once(backbone):
    scorer = make(backbone)
    passes = Passes(scorer)
    queries = ["old dog", "snow", "old dog", "old dog", "snow"]
    texts = [text_of(40), text_of(40), text_of(40), text_of(12), text_of(40)]
    scores = scorer.score(queries, texts).scores
    assert passes.windows == 3 + 3 + 1  # two pairs of 40 tokens in windows of 20 by 10, one pair of 12
    assert scores[0] == scores[2]
    assert scores[1] == scores[4]
    assert len(set(scores)) == 3


def test_texts_are_tokenised_once(backbone, monkeypatch):
    scorer = make(backbone)
    seen = Counter()
    tokenizer = scorer.tokenizer

    def counting(texts, **kwargs):
        seen.update(texts)
        return tokenizer(texts, **kwargs)

    monkeypatch.setattr(scorer, "tokenizer", counting)
    scorer.score(["old dog", "snow", "rain"] * 2, [text_of(40)] * 3 + [text_of(12)] * 3).scores
    assert seen == {"old dog": 1, "snow": 1, "rain": 1, text_of(40): 1, text_of(12): 1}


@given(
    rows=st.lists(st.tuples(st.integers(0, 4), st.integers(0, 6)), max_size=40),
    characters=st.integers(1, 60),
    pairs=st.integers(1, 12),
)
@settings(max_examples=200, deadline=None)
def test_blocks(rows, characters, pairs):
    texts = ["x" * (3 * text) + str(text) for _, text in rows]
    made = list(blocks([query for query, _ in rows], texts, characters=characters, pairs=pairs))
    owners = {}
    for block in made:
        assert len(block.pairs) == len(block.rows) <= pairs
        assert len(block.texts) == len(set(block.texts)) == len(block.seen)
        # A block ends as soon as it has enough characters.
        assert sum(len(block.texts[text]) for _, text in block.pairs[:-1]) < characters
        for (query, text), owned in zip(block.pairs, block.rows, strict=True):
            assert owned == [i for i, row in enumerate(rows) if (row[0], texts[i]) == (query, block.texts[text])]
            assert (query, block.texts[text]) not in owners
            owners[query, block.texts[text]] = owned
    assert sorted(itertools.chain(*owners.values())) == list(range(len(rows)))
    first = [text for block in made for text, seen in zip(block.texts, block.seen, strict=True) if not seen]
    assert sorted(first) == sorted(set(texts))
    lengths = [len(text) for block in made for text in block.texts]
    assert lengths == sorted(lengths, reverse=True)


def test_many_blocks_give_the_scores_of_one(backbone, monkeypatch):
    scorer = make(backbone)
    expected, coverage = scorer.score(QUERIES * 2, TEXTS + TEXTS[::-1]).scores, scorer.coverage
    for characters, pairs in [(1, 4096), (10**6, 1), (300, 3)]:
        monkeypatch.setattr("pyterrier_longdoc.modelling.scorer.BLOCK_CHARACTERS", characters)
        monkeypatch.setattr("pyterrier_longdoc.modelling.scorer.BLOCK_PAIRS", pairs)
        np.testing.assert_allclose(scorer.score(QUERIES * 2, TEXTS + TEXTS[::-1]).scores, expected, **CLOSE)
        assert scorer.coverage == coverage


def test_progress_adds_up_to_the_rows(backbone, monkeypatch):
    for batch_size, characters in [(1, 1), (1, 10**6), (3, 200), (64, 10**6)]:
        scorer = make(backbone, batch_size=batch_size)
        monkeypatch.setattr("pyterrier_longdoc.modelling.scorer.BLOCK_CHARACTERS", characters)
        for method in (scorer.score, scorer.explain):
            done = []
            method(QUERIES * 3, TEXTS * 3, on_rows=done.append)
            assert sum(done) == 18
            assert min(done) >= 0


@given(parts=st.lists(st.integers(1, 50), min_size=1, max_size=60), rows=st.integers(0, 1000))
def test_shares_add_up(parts, rows):
    done = []
    report = share_out(done.append, rows)
    for part in parts:
        report(part / sum(parts))
    assert sum(done) == rows
    assert min(done) >= 0
    assert share_out(None, rows) is None


# Reports.


def test_coverage(backbone):
    # Windows of 20 by 10, three at most: tokens 0-40.
    scorer = make(backbone, windows=SlidingWindows(20, 10, max_windows=3), max_query_len=3)
    queries = ["old dog", "snow in the city", "old dog", "old dog", "rain in the city", "snow in the"]
    texts = [text_of(95), text_of(40), text_of(41), text_of(15), text_of(95), ""]
    scorer.score(queries, texts).scores
    coverage = scorer.coverage
    assert coverage.documents == 5  # the text of 95 tokens is there twice
    assert coverage.documents_cut == 2  # 95 and 41
    assert coverage.tokens == 95 + 40 + 41 + 15 + 0
    assert coverage.tokens_read == 40 + 40 + 40 + 15 + 0
    assert coverage.windows == 3 + 3 + 3 + 1 + 1
    assert coverage.queries == 4
    assert coverage.queries_cut == 2
    assert coverage.is_cut
    assert coverage.share_read == (40 + 40 + 40 + 15) / (95 + 40 + 41 + 15)
    assert coverage.windows_per_document == 11 / 5


def test_coverage_with_a_document_budget_and_with_gaps(backbone):
    scorer = make(backbone, max_doc_len=45)
    scorer.score(["a"] * 3, [text_of(95), text_of(45), text_of(44)]).scores
    assert (scorer.coverage.tokens, scorer.coverage.tokens_read) == (95 + 45 + 44, 45 + 45 + 44)
    assert (scorer.coverage.documents_cut, scorer.coverage.queries_cut) == (1, 0)
    scorer.read_with(GreedyChunks(20, max_windows=2, selection="first_last_random"), max_query_len=8)
    scorer.score(["a"], [text_of(95)]).scores
    assert scorer.coverage.tokens_read == 20 + 15  # tokens 0-20 and 80-95


def test_coverage_of_the_last_run_only(backbone):
    scorer = make(backbone)
    scorer.score(QUERIES, TEXTS).scores
    scorer.score(["a"], ["the cat"]).scores
    assert (scorer.coverage.documents, scorer.coverage.queries, scorer.coverage.tokens) == (1, 1, 2)
    assert not scorer.coverage.is_cut
    assert scorer.coverage.share_read == 1.0


@pytest.mark.parametrize("head", list(registered_heads()))
@pytest.mark.parametrize("windows", [SLIDING, SlidingWords(15, 10), SentenceWindows(max_tokens=20)])
def test_explanations(backbone, head, windows):
    scorer = make(backbone, head, windows, max_doc_len=60)
    queries, texts = [*QUERIES, "old dog"], [text.replace("city", "city.") for text in [*TEXTS, TEXTS[0]]]
    expected = scorer.score(queries, texts).scores
    scores, explanations = explained(scorer, queries, texts)
    np.testing.assert_allclose(scores, expected, **CLOSE)
    for query, text, score, explanation in zip(queries, texts, scores, explanations, strict=True):
        [tokens] = tokenize(scorer.tokenizer, [text], offsets=True)
        assert explanation.spans == [tokens.characters(span) for span in scorer.settings.windows(tokens.head(60))]
        assert len(explanation.scores) == len(explanation.spans)
        # Each window by itself. White space at its ends is no token.
        pieces = [text[a:b] for a, b in explanation.spans]
        alone = make(backbone, head, Truncate(60)).score([query] * len(pieces), pieces)
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
        if head == "sump":
            assert score == pytest.approx(sum(explanation.scores), rel=1e-4)
        if head == "firstp":
            assert score == pytest.approx(explanation.scores[0])
    assert (explanations[0].weights is not None) == head.startswith("parade-attn")


# Reading.


def test_reading_can_be_changed(backbone):
    scorer = make(backbone)
    before = scorer.score(QUERIES, TEXTS).scores
    scorer.read_with(GreedyChunks(10), max_doc_len=30, max_query_len=4, pad_query=True)
    assert scorer.reading() == {"max_doc_len": 30, "max_query_len": 4, "pad_query": True}
    assert (scorer.layout.query_size, scorer.layout.window_size) == (4, 10)
    changed = make(backbone, windows=GreedyChunks(10), max_doc_len=30, max_query_len=4, pad_query=True)
    assert np.array_equal(scorer.score(QUERIES, TEXTS).scores, changed.score(QUERIES, TEXTS).scores)
    scorer.read_with(SLIDING, max_query_len=8)
    assert (scorer.layout.query_size, scorer.layout.window_size) == (None, None)
    assert np.array_equal(scorer.score(QUERIES, TEXTS).scores, before)


def test_windows_adapt_to_the_backbone(backbone):
    # 128 positions, 8 of them for the query, 3 for special tokens
    assert make(backbone, windows=GreedyChunks()).windows.largest == 128 - 8 - 3
    assert make(backbone, windows=SentenceWindows()).windows.largest == 128 - 8 - 3
    assert make(backbone, windows=SlidingWindows(117, 60)).windows.largest == 117


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"windows": SlidingWindows(118, 60)}, "the backbone takes 117 document tokens; lower the window size to 117"),
        ({"windows": SlidingWords(max_tokens=118)}, "max_tokens=118 does not fit"),
        ({"max_query_len": 0}, "max_query_len=0 must be at least 1"),
        ({"max_doc_len": 0}, "max_doc_len=0 must be at least 1, or None"),
        ({"max_query_len": 125}, "max_query_len=125 leaves no room for a document: the backbone takes 128 tokens, 3"),
        ({"max_query_len": 125, "pad_query": True}, "leaves no room for a document"),
    ],
)
def test_wrong_arguments(backbone, arguments, message):
    with pytest.raises(ValueError, match=message):
        make(backbone, **arguments)


def test_a_document_of_200_000_words(tmp_path):
    backbone = load_backbone(tiny.checkpoint(tmp_path, num_hidden_layers=1))
    text = text_of(100) + " "
    windows = SlidingWindows(100, 50, max_windows=4)
    scorer = make(backbone, windows=windows)
    passes = Passes(scorer)
    scores = scorer.score(["old dog"] * 2, [text * 2000, text * 3]).scores
    # The windows at tokens 0, 50, 100 and 150 are the same ones in both.
    assert scores[0] == pytest.approx(scores[1], rel=1e-5)
    assert passes.windows == 2 * 2  # of the four windows of a document every other one is the same
    assert scorer.coverage.windows == 2 * 4
    assert (scorer.coverage.tokens, scorer.coverage.tokens_read) == (200_000 + 300, 250 + 250)


@given(pairs=st.lists(st.tuples(STRANGE, STRANGE), max_size=6))
@settings(max_examples=40, deadline=None)
def test_strange_pairs(backbone, pairs):
    for windows in (SLIDING, SlidingWords(5, 3), SentenceWindows(max_tokens=20)):
        # Long words are many tokens: a cap keeps the test fast.
        scorer = make(backbone, windows=replace(windows, max_windows=5))
        queries, texts = [query for query, _ in pairs] * 2, [text for _, text in pairs] * 2
        scores = scorer.score(queries, texts).scores
        assert scores.shape == (2 * len(pairs),)
        assert np.isfinite(scores).all()
        assert np.array_equal(scores[: len(pairs)], scores[len(pairs) :])
        scores_again, explanations = explained(scorer, queries, texts)
        np.testing.assert_allclose(scores_again, scores, **CLOSE)
        for text, explanation in zip(texts, explanations, strict=True):
            assert all(0 <= a <= b <= len(text) for a, b in explanation.spans)


@pytest.mark.parametrize("plain", [True, False], ids=["encoder", "cross-encoder"])
@pytest.mark.parametrize("batch_size", [1, 64])
def test_query_states_are_those_of_the_first_window(plain, batch_size, plain_encoder, cross_encoder):
    loaded = load_backbone(plain_encoder if plain else cross_encoder)
    scorer = make(loaded, "parade-transformer-query", batch_size=batch_size)
    with torch.no_grad():
        encoded, _ = scorer._encode(scorer._query_ids(QUERIES), tokenize(scorer.tokenizer, TEXTS), QUERIES)
        for i, (query, text) in enumerate(zip(QUERIES, TEXTS, strict=True)):
            pair = [(query, " ".join(text.split()[:20]))]  # in a list, or an empty text would count as none
            inputs = scorer.tokenizer(pair, return_tensors="pt")
            states = loaded.model(**inputs).last_hidden_state[0, 1 : 1 + len(query.split())]
            if not plain:
                states = loaded.representation(states)
            assert encoded.query.mask[i].sum() == len(query.split())
            torch.testing.assert_close(encoded.query.states[i, : len(states)], states, **CLOSE)
            assert (encoded.query.states[i, len(states) :] == 0).all()
