"""Pre-selection: the right windows are read, of each document for itself, and only those."""

from __future__ import annotations

import math
import unicodedata
from collections import Counter
from dataclasses import dataclass

import numpy as np
import pandas as pd
import pytest
import torch
from scipy.spatial.distance import cosine

import pyterrier_longdoc as ld
from pyterrier_longdoc.modelling.model import Model
from pyterrier_longdoc.modelling.preselection import (
    Preselection,
    WindowSelector,
    preselection_from_config,
)
from pyterrier_longdoc.modelling.tokens import tokenize
from pyterrier_longdoc.modelling.windows import GreedyChunks, SlidingWindows

from ..support import tiny
from ..support.systems import QRELS, QUIET, make, slow_but

pytestmark = QUIET
FILLER = "the cat and the bird walk to the river in the rain and sing by the old tree"  # 18 words
GOLD = "a red fish"
LONG = " ".join([FILLER] * 5 + [GOLD] + [FILLER] * 4)
SELECTORS = ("FirstK", "BM25Windows", "EmbeddingWindows", "CrossEncoderWindows", "WordEmbeddingWindows")
REPRESENTATIVE = ("MaxP", "Birch", "PARADE-query", "CEDR-knrm", "LateIR", "BiEncoder-max")
"""Windows in tokens and in sentences, heads of vectors, of query states and of matches, and windows encoded apart."""


@pytest.fixture
def selector(cross_encoder, plain_encoder):
    """Makes a selector by its name."""

    def of(name, k):
        if name == "EmbeddingWindows":
            return ld.EmbeddingWindows(k, ld.BiEncoder(plain_encoder, max_query_len=8, window_size=30, stride=30))
        if name in ("CrossEncoderWindows", "WordEmbeddingWindows"):
            return getattr(ld, name)(k, ld.FirstP(cross_encoder, max_query_len=8))
        return getattr(ld, name)(k)

    return of


def frame(query, *texts):
    docnos = [f"d{i}" for i in range(len(texts))]
    return pd.DataFrame({"qid": "1", "query": query, "docno": docnos, "text": texts})


def tokenized(*texts):
    return tokenize(tiny.tokenizer(), texts, offsets=True)


@pytest.mark.parametrize("table", [None, ({"cat": 3, "red": 1, "the": 9}, 10)], ids=["own windows", "table"])
def test_scores_of_bm25_windows_equal_the_formula(table):
    (document,) = tokenized(LONG)
    windows = [(0, 20), (20, 55), (80, 100), (100, 100)]
    selector = ld.BM25Windows(2, 0.9, 0.4, *(table or ()))
    bags = [Counter(LONG.split()[a:b]) for a, b in windows]
    mean = sum(bag.total() for bag in bags) / len(bags)
    expected = []
    for bag in bags:
        score = 0.0
        for word in ["red", "cat", "the", "snow", "cat"]:
            having = sum(word in other for other in bags) if table is None else table[0].get(word, 0)
            idf = math.log(1 + ((len(bags) if table is None else 10) - having + 0.5) / (having + 0.5))
            score += idf * bag[word] * 1.9 / (bag[word] + 0.9 * (0.6 + 0.4 * bag.total() / mean))
        expected.append(score)
    (scores,) = selector.scores(["Red cat; the SNOW cat"], [document], [windows])
    np.testing.assert_allclose(scores, expected, rtol=1e-12)


def test_from_texts_counts_document_frequencies():
    selector = ld.BM25Windows.from_texts(["the cat the dog", "The bird", ""], 2, k1=1.0)
    assert selector.document_frequencies == {"the": 2, "cat": 1, "dog": 1, "bird": 1}
    assert (selector.documents, selector.k, selector.k1) == (3, 2, 1.0)
    other = ld.BM25Windows.from_texts(["the cat the dog", "The bird", "bird"], 2, k1=1.0)
    assert repr(other) != repr(selector)


FORMS = {
    "decomposed": ("café", "cafe\u0301"),
    "soft hyphen": ("cafeteria", "cafe\u00adteria"),
    "zero-width space": ("cafeteria", "cafe\u200bteria"),
    "ligature": ("waffle", "wa\ufb04e"),
    "full-width letters": ("waffle", "\uff57\uff41\uff46\uff46\uff4c\uff45"),
    "Arabic vowel signs": ("كتب", "كَتَبَ"),
    "Korean jamo": ("한국", unicodedata.normalize("NFD", "한국")),
}
"""A word and another Unicode form of it."""


@pytest.mark.parametrize("form", FORMS)
def test_the_best_window_does_not_depend_on_the_unicode_form(form):
    for query, planted in (FORMS[form], FORMS[form][::-1]):
        (document,) = tokenized(f"{FILLER} {FILLER} the dog is a red {planted} {FILLER}")
        for selector in (ld.BM25Windows(1), ld.BM25Windows.from_texts([query, FILLER], 1)):
            [(_, [span])] = selector.cut([query], [document], GreedyChunks(20))
            assert "red" in document.window_text(span)


@pytest.mark.parametrize("form", FORMS)
def test_key_blocks_do_not_depend_on_the_unicode_form(form):
    query, planted = FORMS[form]
    (document,) = tokenized(f"{FILLER} {FILLER} the dog is a red {planted} {FILLER}")
    blocks = ld.KeyBlocks(ld.BM25Windows(1), GreedyChunks(20))
    [(shorter, [span])] = blocks.cut([query], [document], GreedyChunks(20))
    assert "red" in shorter.window_text(span)


def test_a_table_counts_forms_of_a_word_together():
    selector = ld.BM25Windows(1, document_frequencies={"Café": 2, "cafe\u0301": 2, "cat": 1}, documents=3)
    assert selector.document_frequencies == {"cafe": 3, "cat": 1}


@pytest.mark.parametrize("name", slow_but(REPRESENTATIVE, [*REPRESENTATIVE, "MaxSim", "NeuralModel1", "TKL"]))
def test_every_family_reads_the_best_windows(name, cross_encoder):
    results = tiny.results()
    results["text"] = [LONG, "a short dog", LONG, "", None]
    results["query"] = ["red fish", "red fish", "tree", "tree", "red fish"]
    windows = {"windows": SlidingWindows(20, 10)} if name == "Birch" else {}  # the text is one sentence
    model = make(name, cross_encoder, explain=True, **windows)
    everything = model(results)
    spans = [tuple(span) for span in everything["window_spans"][0]]
    golden = [span for span in spans if GOLD in LONG[span[0] : span[1]]]
    assert len(spans) > 4
    assert golden
    model.preselect = ld.BM25Windows(2)
    chosen = model(results)
    assert model.coverage.windows == 2 + 2 + 1 + 1 + 1
    assert model.coverage.documents == 5
    assert 0 < model.coverage.tokens_read < model.coverage.tokens
    for row in (0, 2):
        kept = [tuple(span) for span in chosen["window_spans"][row]]
        assert kept == sorted(kept)
        assert len(kept) == len(chosen["window_scores"][row]) == 2
        assert set(kept) < set(spans)
        # PARADE-query's windows are scored with the query as it is in the first one, TKL's with their neighbours.
        if name not in ("PARADE-query", "TKL"):
            scores = dict(zip(spans, everything["window_scores"][row], strict=True))
            expected = [scores[span] for span in kept]
            np.testing.assert_allclose(chosen["window_scores"][row], expected, rtol=1e-4, atol=1e-5)
    assert set(golden) & {tuple(span) for span in chosen["window_spans"][0]}
    for row in (1, 3, 4):
        assert chosen["score"][row] == pytest.approx(everything["score"][row], rel=1e-4, abs=1e-5)
    model.preselect, model.explain = ld.BM25Windows(len(spans)), False
    with_all = model(results)["score"]
    model.preselect = None
    assert with_all.tolist() == model(results)["score"].tolist()


def similarities(model, query, passages):
    """Returns for each passage the sum of the query tokens' best cosines, weighted by their rarity in the passages."""
    weights = model.encoder.backbone.get_input_embeddings().weight.detach().numpy()
    tokens_of = [model.tokenizer(passage, add_special_tokens=False)["input_ids"] for passage in passages]
    scores = np.zeros(len(passages))
    for token in model.tokenizer(query, add_special_tokens=False)["input_ids"]:
        having = sum(token in tokens for tokens in tokens_of)
        rarity = math.log(1 + (len(passages) - having + 0.5) / (having + 0.5))
        for number, tokens in enumerate(tokens_of):
            scores[number] += rarity * max(1 - cosine(weights[token], weights[other]) for other in tokens)
    return scores


@pytest.mark.parametrize("name", SELECTORS)
def test_each_selector_keeps_what_its_method_scores_best(name, selector, cross_encoder):
    model = make("MaxP", cross_encoder, explain=True)
    spans = model(frame("red fish", LONG))["window_spans"][0]
    passages = [LONG[a:b] for a, b in spans]
    chosen = selector(name, 3)
    if name in ("EmbeddingWindows", "CrossEncoderWindows"):
        scores = chosen.model(frame("red fish", *passages))["score"].round(5).to_numpy()
    elif name == "WordEmbeddingWindows":
        scores = similarities(chosen.model.model, "red fish", passages)
    elif name == "BM25Windows":
        scores = np.array([passage.split().count("red") + passage.split().count("fish") for passage in passages])
    else:
        scores = -np.arange(len(spans))
    best = sorted(np.argsort(-scores, kind="stable")[:3])
    model.preselect = chosen
    assert model(frame("red fish", LONG))["window_spans"][0] == [spans[i] for i in best]


@pytest.mark.parametrize("name", SELECTORS)
def test_scores_do_not_depend_on_other_rows(name, selector, cross_encoder):
    model = make("PARADE-attn", cross_encoder, preselect=selector(name, 2), explain=True)
    results = pd.concat(
        [
            frame("red fish", LONG, f"{GOLD} {FILLER} {FILLER} snow", "cat"),
            frame("snow in the tree", LONG, LONG[40:]).assign(qid="2"),
        ],
        ignore_index=True,
    )
    together = model(results)
    for row in range(len(results)):
        alone = model(results.iloc[[row]])
        assert alone["window_spans"].tolist() == [together["window_spans"][row]]
        assert alone["score"].iloc[0] == pytest.approx(together["score"][row], rel=1e-5)
    back = model(results.iloc[::-1]).sort_index()
    assert back["window_spans"].tolist() == together["window_spans"].tolist()


@pytest.mark.parametrize("name", ["FirstP", "LongP", "MaxP", "CEDR-knrm"])
def test_key_blocks_are_scored_as_a_shorter_document(name, cross_encoder):
    blocks = ld.KeyBlocks(ld.BM25Windows(1), GreedyChunks(18))
    gold = " ".join(LONG.split()[90:108])
    assert gold.startswith(GOLD)
    model = make(name, cross_encoder)
    expected = model(frame("red fish", gold, gold))["score"][0]
    every = model(frame("red fish", gold))["score"][0]
    model.preselect = ld.KeyBlocks(ld.BM25Windows(1), GreedyChunks(20))
    assert model(frame("red fish", gold))["score"][0] == every
    model.preselect, model.explain = blocks, True
    out = model(frame("red fish", LONG, gold))
    np.testing.assert_allclose(out["score"], [expected, expected], rtol=1e-4)
    start = LONG.index(gold)
    assert out["window_spans"].tolist() == [[(start, start + len(gold))], [(0, len(gold))]]
    coverage = model.coverage
    assert (coverage.documents, coverage.documents_cut, coverage.windows, coverage.tokens_read) == (2, 1, 2, 36)
    assert coverage.tokens == len(LONG.split()) + 18


@pytest.mark.parametrize("name", ["FirstP", "MaxP", "PARADE-attn", "BiEncoder-max"])
def test_key_blocks_are_explained_one_by_one(name):
    text = f"{GOLD} {FILLER} {GOLD}"
    blocks = ld.KeyBlocks(ld.BM25Windows(2), GreedyChunks(3))
    row = make(name, preselect=blocks, explain=True)(frame("red fish", text)).iloc[0]
    assert row["window_spans"] == [(0, len(GOLD)), (len(text) - len(GOLD), len(text))]
    assert row["window_scores"] == pytest.approx([row["score"]] * 2, abs=1e-5)
    assert row["window_weights"] == ([1.0, 1.0] if name == "PARADE-attn" else None)
    assert (row["best_start"], row["best_end"]) == (0, len(GOLD))


@pytest.mark.parametrize("name", [*SELECTORS, "table", "KeyBlocks"])
def test_a_selector_is_saved_and_loaded_with_its_model(name, selector, cross_encoder, tmp_path):
    if name == "table":
        chosen: Preselection = ld.BM25Windows.from_texts([LONG, FILLER, GOLD], 2)
    elif name == "KeyBlocks":
        chosen = ld.KeyBlocks(selector("CrossEncoderWindows", 2), GreedyChunks(12))
    else:
        chosen = selector(name, 2)
    if name in ("CrossEncoderWindows", "WordEmbeddingWindows"):
        with torch.no_grad():  # as if it were trained
            chosen.model.model.encoder.backbone.get_input_embeddings().weight.add_(1.0).mul_(-1.0)
    model = make("MaxP", cross_encoder, preselect=chosen)
    results = frame("red fish", LONG, LONG[100:])
    expected = model(results)["score"]
    model.save(tmp_path)
    loaded = ld.MaxP.load(tmp_path)
    assert loaded.preselect.describe() == chosen.describe()
    np.testing.assert_allclose(loaded(results)["score"], expected, atol=1e-5)
    plain = ld.MaxP.load(tmp_path, preselect=None)
    np.testing.assert_allclose(plain(results)["score"], make("MaxP", cross_encoder)(results)["score"], rtol=1e-5)


@dataclass(frozen=True)
class Last(WindowSelector):
    """A selector of a user's own: the last windows."""

    def scores(self, queries, documents, spans):
        return [np.arange(len(windows)) for windows in spans]


def test_user_selectors_are_restored_from_their_description(tmp_path):
    (document,) = tokenized(LONG)
    assert Last(2).cut(["red"], [document], GreedyChunks(60)) == [(document, [(60, 120), (120, 165)])]
    assert preselection_from_config(Last(2).to_config(tmp_path), tmp_path) == Last(2)
    assert Last(2).to_config(tmp_path)["module"] == __name__
    for module in ({}, {"module": "parts"}):
        with pytest.raises(ValueError, match="'Later'"):
            preselection_from_config({"type": "Later", **module}, tmp_path)


def test_fit_reads_the_selected_windows_and_does_not_train_the_selector(selector, cross_encoder, monkeypatch):
    chosen = selector("CrossEncoderWindows", 2)
    training = ld.TrainingArgs(learning_rates={"": 1e-2})
    model = make("PARADE-attn", cross_encoder, preselect=chosen, training=training)
    before = {part: _weights(part) for part in (model, chosen.model)}
    read = []
    encode = Model.encode

    def spy(self, pairs, coverage=None):
        if self is model.model and torch.is_grad_enabled():
            read.extend(len(pair.windows) for pair in pairs)
        return encode(self, pairs, coverage)

    monkeypatch.setattr(Model, "encode", spy)
    model.fit(tiny.results(), QRELS)
    assert read
    assert max(read) == 2
    changed = [name for name, value in _weights(model).items() if not torch.equal(value, before[model][name])]
    assert {name.split(".")[0] for name in changed} == {"encoder", "head"}
    assert all(torch.equal(value, before[chosen.model][name]) for name, value in _weights(chosen.model).items())
    assert not any("preselect" in name for name in before[model])


def _weights(model):
    return {name: value.detach().clone() for name, value in model.model.state_dict().items()}


@pytest.mark.parametrize(
    ("make_bad", "name"),
    [
        (lambda: ld.FirstK(0), "k=0"),
        (lambda: ld.BM25Windows(None), "k=None"),
        (lambda: ld.BM25Windows(3, k1=-1), "k1=-1"),
        (lambda: ld.BM25Windows(3, b=2), "b=2"),
        (lambda: ld.BM25Windows(3, document_frequencies={"a": 1}), "documents=None"),
        (lambda: ld.BM25Windows(3, document_frequencies={"a": 3}, documents=2), "documents=2"),
        (lambda: ld.BM25Windows(3, documents=2), "documents=2"),
        (lambda: ld.EmbeddingWindows(3, ld.FirstP("m")), "model="),
        (lambda: ld.CrossEncoderWindows(3, ld.BiEncoder("m")), "model="),
        (lambda: ld.CrossEncoderWindows(3, ld.Birch("m")), "Birch"),
        (lambda: ld.WordEmbeddingWindows(3, ld.BiEncoder("m")), "WordEmbeddingWindows: model="),
        (lambda: ld.KeyBlocks("bm25"), "selector='bm25'"),
        (lambda: ld.MaxP("m", preselect="bm25"), "preselect='bm25'"),
        (lambda: ld.FirstP("m", preselect=ld.BM25Windows(3)), "KeyBlocks"),
        (lambda: ld.LongP("m", preselect=ld.FirstK(3)), "KeyBlocks"),
        (lambda: ld.FirstP("m", preselect=ld.KeyBlocks(ld.FirstK(8))), "8 blocks of up to 63"),
        (lambda: ld.FirstP("m", preselect=ld.KeyBlocks(ld.FirstK(8), ld.SentenceWindows())), "max_tokens"),
        (lambda: ld.Birch("m", preselect=ld.KeyBlocks(ld.FirstK(8))), "windows in tokens"),
    ],
)
def test_wrong_arguments_are_refused_by_name(make_bad, name):
    with pytest.raises(ValueError, match=name):
        make_bad()


def test_a_served_model_has_no_word_embeddings():
    with pytest.raises(TypeError, match="word embeddings"):
        ld.WordEmbeddingWindows(3, ld.MaxP(ld.ScoreServer("http://127.0.0.1:9")))


def test_word_embedding_windows_cite_their_own_paper():
    model = ld.MaxP("m")
    assert ld.WordEmbeddingWindows(3, model).cited() == ["busolin-2025-efficient", *model.cited()]


def test_a_selecting_model_warns_about_truncated_windows(cross_encoder, results):
    inner = ld.FirstP(cross_encoder, windows=ld.Truncate(size=3))
    model = ld.MaxP(cross_encoder, window_size=10, stride=10, preselect=ld.CrossEncoderWindows(1, inner))
    with pytest.warns(ld.TruncationWarning, match=r"which selects windows, did not read .* windows=Truncate"):
        model(results)
