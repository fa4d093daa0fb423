"""Pre-selection: the right windows are read, of each document for itself, and only those."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass

import numpy as np
import pandas as pd
import pytest
import torch
from scipy.spatial.distance import cosine

import pyterrier_longdoc as ld
from pyterrier_longdoc.modelling.model import Model
from pyterrier_longdoc.modelling.preselection import Preselection, WindowSelector, preselection_from_config
from pyterrier_longdoc.modelling.tokens import tokenize
from pyterrier_longdoc.modelling.windows import GreedyChunks, SlidingWindows

from ..support import tiny
from ..support.systems import QRELS, QUIET, SELECTORS, make, reloaded, slow_but

pytestmark = QUIET
FILLER = "the cat and the bird walk to the river in the rain and sing by the old tree"  # 18 words
GOLD = "a red fish"
LONG = " ".join([FILLER] * 5 + [GOLD] + [FILLER] * 4)
REPRESENTATIVE = ("MaxP", "Birch", "PARADE-query", "CEDR-knrm", "LateIR", "BiEncoder-max")
"""Windows in tokens and in sentences, heads of vectors, of query states and of matches, and windows encoded apart."""


def frame(query, *texts):
    return tiny.frame([query], texts)


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


BEST = {
    "windows": ld.BM25Windows(1),
    "windows, by a table": ld.BM25Windows.from_texts(["café", FILLER], 1),
    "blocks": ld.KeyBlocks(ld.BM25Windows(1), GreedyChunks(20)),
}


@pytest.mark.parametrize("selector", BEST)
@pytest.mark.parametrize(("query", "planted"), [("café", "cafe\u0301"), ("cafe\u0301", "café")], ids=ascii)
def test_the_best_window_does_not_depend_on_the_unicode_form(selector, query, planted):
    (document,) = tokenized(f"{FILLER} {FILLER} the dog is a red {planted} {FILLER}")
    [(read, [span])] = BEST[selector].cut([query], [document], GreedyChunks(20))
    assert "red" in read.window_text(span)


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
    spans = everything["window_spans"][0]
    golden = {span for span in spans if GOLD in LONG[slice(*span)]}
    model.preselect = ld.BM25Windows(2)
    chosen = model(results)
    assert (model.coverage.windows, model.coverage.documents) == (2 + 2 + 1 + 1 + 1, 5)
    assert 0 < model.coverage.tokens_read < model.coverage.tokens
    for row in (0, 2):
        kept = chosen["window_spans"][row]
        assert kept == sorted(kept)
        assert len(kept) == len(chosen["window_scores"][row]) == 2
        assert set(kept) < set(spans)
        # PARADE-query's windows are scored with the query as it is in the first one, TKL's with their neighbours.
        if name not in ("PARADE-query", "TKL"):
            scores = dict(zip(spans, everything["window_scores"][row], strict=True))
            expected = [scores[span] for span in kept]
            np.testing.assert_allclose(chosen["window_scores"][row], expected, rtol=1e-4, atol=1e-5)
    assert golden & set(chosen["window_spans"][0])
    short = [1, 3, 4]
    np.testing.assert_allclose(chosen["score"][short], everything["score"][short], rtol=1e-4, atol=1e-5)
    model.preselect = ld.BM25Windows(len(spans))
    np.testing.assert_array_equal(model(results)["score"], everything["score"])


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
def test_each_selector_keeps_what_its_method_scores_best(name, cross_encoder):
    model = make("MaxP", cross_encoder, explain=True)
    spans = model(frame("red fish", LONG))["window_spans"][0]
    passages = [LONG[a:b] for a, b in spans]
    chosen = SELECTORS[name](3)
    if name in ("EmbeddingWindows", "MaxSimWindows", "CrossEncoderWindows"):
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
def test_scores_do_not_depend_on_other_rows(name, cross_encoder):
    model = make("PARADE-attn", cross_encoder, preselect=SELECTORS[name](2), explain=True)
    first = frame("red fish", LONG, f"{GOLD} {FILLER} {FILLER} snow", "cat")
    results = pd.concat([first, frame("snow in the tree", LONG, LONG[40:]).assign(qid="2")], ignore_index=True)
    together = model(results)
    others = [model(results.iloc[[row]]) for row in range(len(results))]
    for other in (pd.concat(others), model(results.iloc[::-1]).sort_index()):
        assert other["window_spans"].tolist() == together["window_spans"].tolist()
        np.testing.assert_allclose(other["score"], together["score"], rtol=1e-5)


@pytest.mark.parametrize("name", ["FirstP", "LongP", "MaxP", "CEDR-knrm"])
def test_key_blocks_are_scored_as_a_shorter_document(name, cross_encoder):
    gold = " ".join(LONG.split()[90:108])
    assert gold.startswith(GOLD)
    expected = make(name, cross_encoder)(frame("red fish", gold, gold))["score"]
    blocks = ld.KeyBlocks(ld.BM25Windows(1), GreedyChunks(18))
    model = make(name, cross_encoder, preselect=blocks, explain=True)
    out = model(frame("red fish", LONG, gold))
    np.testing.assert_allclose(out["score"], expected, rtol=1e-4)
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
def test_a_selector_is_saved_and_loaded_with_its_model(name, cross_encoder, tmp_path):
    if name == "table":
        chosen: Preselection = ld.BM25Windows.from_texts([LONG, FILLER, GOLD], 2)
    elif name == "KeyBlocks":
        chosen = ld.KeyBlocks(SELECTORS["CrossEncoderWindows"](2), GreedyChunks(12))
    else:
        chosen = SELECTORS[name](2)
    if name in ("CrossEncoderWindows", "WordEmbeddingWindows"):
        with torch.no_grad():  # as if it were trained
            chosen.model.model.encoder.backbone.get_input_embeddings().weight.add_(1.0).mul_(-1.0)
    model, results = make("MaxP", cross_encoder, preselect=chosen), frame("red fish", LONG, LONG[100:])
    loaded = reloaded(model, tmp_path)
    assert loaded.preselect.describe() == chosen.describe()
    np.testing.assert_allclose(loaded(results)["score"], model(results)["score"], atol=1e-5)
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
    config = Last(2).to_config(tmp_path)
    assert preselection_from_config(config, tmp_path) == Last(2)
    with pytest.raises(ValueError, match="Later"):
        preselection_from_config({**config, "type": "Later"}, tmp_path)


def test_fit_reads_the_selected_windows_and_does_not_train_the_selector(cross_encoder, monkeypatch):
    chosen = SELECTORS["CrossEncoderWindows"](2)
    training = ld.TrainingArgs(learning_rates={"": 1e-2})
    model = make("PARADE-attn", cross_encoder, preselect=chosen, training=training)
    before, of_selector = ({n: w.clone() for n, w in part.model.state_dict().items()} for part in (model, chosen.model))
    windows, encode = [], Model.encode

    def spy(self, pairs, coverage=None):
        if self is model.model:
            windows.extend(len(pair.windows) for pair in pairs)
        return encode(self, pairs, coverage)

    monkeypatch.setattr(Model, "encode", spy)
    model.fit(tiny.results(), QRELS)
    assert max(windows) == 2
    changed = {name.split(".")[0] for name, value in model.model.state_dict().items() if not value.equal(before[name])}
    assert changed == {"encoder", "head"}
    assert all(value.equal(of_selector[name]) for name, value in chosen.model.model.state_dict().items())


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
    with pytest.raises((TypeError, ValueError), match=name):
        make_bad()


def test_a_selecting_model_warns_about_truncated_windows(cross_encoder, results):
    inner = ld.FirstP(cross_encoder, windows=ld.Truncate(size=3))
    model = ld.MaxP(cross_encoder, window_size=10, stride=10, preselect=ld.CrossEncoderWindows(1, inner))
    with pytest.warns(ld.TruncationWarning, match="which selects windows"):
        model(results)
