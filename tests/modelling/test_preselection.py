"""Pre-selection: the right windows are read, of each document for itself, and only those."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass

import numpy as np
import pytest
import torch

import pyterrier_longdoc as ld
from pyterrier_longdoc.modelling.model import Model
from pyterrier_longdoc.modelling.preselection import WindowSelector, preselection_from_config
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


def test_scores_of_bm25_windows_equal_the_formula():
    (document,) = tokenized(LONG)
    windows = [(0, 20), (20, 55), (80, 100), (100, 100)]
    selector = ld.BM25Windows(2, 0.9, 0.4)
    bags = [Counter(LONG.split()[a:b]) for a, b in windows]
    mean = sum(bag.total() for bag in bags) / len(bags)
    expected = []
    for bag in bags:
        score = 0.0
        for word in ["red", "cat", "the", "snow", "cat"]:
            having = sum(word in other for other in bags)
            idf = math.log(1 + (len(bags) - having + 0.5) / (having + 0.5))
            score += idf * bag[word] * 1.9 / (bag[word] + 0.9 * (0.6 + 0.4 * bag.total() / mean))
        expected.append(score)
    (scores,) = selector.scores(["Red cat; the SNOW cat"], [document], [windows])
    np.testing.assert_allclose(scores, expected, rtol=1e-12)


@pytest.mark.parametrize(("query", "planted"), [("café", "cafe\u0301"), ("cafe\u0301", "café")], ids=ascii)
def test_the_best_window_does_not_depend_on_the_unicode_form(query, planted):
    (document,) = tokenized(f"{FILLER} {FILLER} the dog is a red {planted} {FILLER}")
    [[span]] = ld.BM25Windows(1).select([query], [document], GreedyChunks(20))
    assert "red" in document.window_text(span)


@pytest.mark.parametrize("name", slow_but(REPRESENTATIVE, [*REPRESENTATIVE, "MaxSim", "NeuralModel1"]))
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
    assert (model.coverage.windows, model.coverage.pairs) == (2 + 2 + 1 + 1 + 1, 5)
    assert 0 < model.coverage.tokens_read < model.coverage.tokens
    for row in (0, 2):
        kept = chosen["window_spans"][row]
        assert kept == sorted(kept)
        assert len(kept) == len(chosen["window_scores"][row]) == 2
        assert set(kept) < set(spans)
        # PARADE-query's windows are scored with the query as it is in the first one.
        if name != "PARADE-query":
            scores = dict(zip(spans, everything["window_scores"][row], strict=True))
            expected = [scores[span] for span in kept]
            np.testing.assert_allclose(chosen["window_scores"][row], expected, rtol=1e-4, atol=1e-5)
    assert golden & set(chosen["window_spans"][0])
    short = [1, 3, 4]
    np.testing.assert_allclose(chosen["score"][short], everything["score"][short], rtol=1e-4, atol=1e-5)
    model.preselect = ld.BM25Windows(len(spans))
    np.testing.assert_array_equal(model(results)["score"], everything["score"])


@pytest.mark.parametrize("name", SELECTORS)
def test_each_selector_keeps_what_its_method_scores_best(name, cross_encoder):
    model = make("MaxP", cross_encoder, explain=True)
    spans = model(frame("red fish", LONG))["window_spans"][0]
    passages = [LONG[a:b] for a, b in spans]
    chosen = SELECTORS[name](3)
    if hasattr(chosen, "model"):
        scores = chosen.model(frame("red fish", *passages))["score"].round(5).to_numpy()
    elif name == "BM25Windows":
        scores = np.array([passage.split().count("red") + passage.split().count("fish") for passage in passages])
    else:
        scores = -np.arange(len(spans))
    best = sorted(np.argsort(-scores, kind="stable")[:3])
    model.preselect = chosen
    assert model(frame("red fish", LONG))["window_spans"][0] == [spans[i] for i in best]


@pytest.mark.parametrize("name", SELECTORS)
def test_a_selector_is_saved_and_loaded_with_its_model(name, cross_encoder, tmp_path):
    chosen = SELECTORS[name](2)
    if name == "CrossEncoderWindows":
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
    assert Last(2).select(["red"], [document], GreedyChunks(60)) == [[(60, 120), (120, 165)]]
    config = Last(2).to_config(tmp_path)
    assert preselection_from_config(config, tmp_path) == Last(2)
    with pytest.raises(ValueError, match="Later"):
        preselection_from_config({**config, "type": "Later"}, tmp_path)


def test_fit_reads_the_selected_windows_and_does_not_train_the_selector(cross_encoder, monkeypatch):
    chosen = SELECTORS["CrossEncoderWindows"](2)
    training = ld.TrainingArgs(learning_rates={"": 1e-2})
    model = make("PARADE-attn", cross_encoder, preselect=chosen, training=training)
    before, of_selector = ({n: w.clone() for n, w in part.model.state_dict().items()} for part in (model, chosen.model))
    windows, compute = [], Model.compute

    def spy(self, pairs, coverage=None):
        if self is model.model:
            windows.extend(len(pair.windows) for pair in pairs)
        return compute(self, pairs, coverage)

    monkeypatch.setattr(Model, "compute", spy)
    model.fit(tiny.results(), QRELS)
    assert max(windows) == 2
    changed = {name.split(".")[0] for name, value in model.model.state_dict().items() if not value.equal(before[name])}
    assert changed == {"encoder", "head"}
    assert all(value.equal(of_selector[name]) for name, value in chosen.model.model.state_dict().items())


def test_wrong_arguments_are_refused_by_name():
    for make_bad, name in [
        (lambda: ld.EmbeddingWindows(3, ld.FirstP("m")), "model="),
        (lambda: ld.CrossEncoderWindows(3, ld.BiEncoder("m")), "model="),
        (lambda: ld.CrossEncoderWindows(3, ld.Birch("m")), "Birch"),
        (lambda: ld.MaxP("m", preselect="bm25"), "preselect='bm25'"),
        (lambda: ld.FirstP("m", preselect=ld.BM25Windows(3)), "Evidence"),
        (lambda: ld.LongP("m", preselect=ld.FirstK(3)), "Evidence"),
    ]:
        with pytest.raises((TypeError, ValueError), match=name):
            make_bad()


def test_a_selecting_model_warns_about_truncated_windows(cross_encoder, results):
    inner = ld.FirstP(cross_encoder, windows=ld.Truncate(size=3))
    model = ld.MaxP(cross_encoder, window_size=10, stride=10, preselect=ld.CrossEncoderWindows(1, inner))
    with pytest.warns(ld.TruncationWarning, match="which selects windows"):
        model(results)
