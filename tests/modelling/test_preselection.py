"""Pre-selection: the right windows are read, of each document for itself, and only those."""

from __future__ import annotations

import copy
import math
import pickle
from collections import Counter
from dataclasses import dataclass

import numpy as np
import pandas as pd
import pytest
import torch

import pyterrier_longdoc as ld
from pyterrier_longdoc.modelling.preselection import (
    BM25Windows,
    KeyBlocks,
    Preselection,
    WindowSelector,
    preselection_from_config,
    words,
)
from pyterrier_longdoc.modelling.scorer import LongDocScorer
from pyterrier_longdoc.modelling.texts import tokenize
from pyterrier_longdoc.modelling.windows import GreedyChunks, SlidingWindows
from pyterrier_longdoc.rerankers.score_cache import ScoreCache

from ..support import tiny
from ..support.systems import CROSS_ENCODERS, QRELS, QUIET, SLIDING, make, slow_but

pytestmark = QUIET
FILLER = "the cat and the bird walk to the river in the rain and sing by the old tree"  # 18 words
GOLD = "a red fish"
LONG = " ".join([FILLER] * 5 + [GOLD] + [FILLER] * 4)
SELECTORS = ("FirstK", "BM25Windows", "EmbeddingWindows", "CrossEncoderWindows")
REPRESENTATIVE = ("MaxP", "Birch", "PARADE-query", "CEDR-knrm", "LateIR")
"""Windows in tokens and in sentences, heads of vectors, of query states and of matches, and windows encoded apart."""


@pytest.fixture
def selector(cross_encoder, plain_encoder):
    """Makes a selector by its name."""

    def of(name, k):
        if name == "EmbeddingWindows":
            return ld.EmbeddingWindows(k, ld.BiEncoder(plain_encoder, max_query_len=8, window_size=30, stride=30))
        if name == "CrossEncoderWindows":
            return ld.CrossEncoderWindows(k, ld.FirstP(cross_encoder, max_query_len=8))
        return getattr(ld, name)(k)

    return of


def frame(query, *texts):
    docnos = [f"d{i}" for i in range(len(texts))]
    return pd.DataFrame({"qid": "1", "query": query, "docno": docnos, "text": texts})


def tokenized(*texts):
    return tokenize(tiny.tokenizer(), texts, offsets=True)


def test_words():
    assert words("The Cat's 2nd map.") == ["the", "cat", "s", "2nd", "map"]
    assert words("東京 tower") == ["東", "京", "tower"]
    assert words("हिन्दी भाषा") == ["हिन्दी", "भाषा"]
    assert words("?!") == []


@pytest.mark.parametrize("table", [None, ({"cat": 3, "red": 1, "the": 9}, 10)], ids=["own windows", "table"])
def test_bm25_is_the_formula(table):
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


def test_rarity_from_texts():
    selector = ld.BM25Windows.from_texts(["the cat the dog", "The bird", ""], 2, k1=1.0)
    assert selector.document_frequencies == {"the": 2, "cat": 1, "dog": 1, "bird": 1}
    assert (selector.documents, selector.k, selector.k1) == (3, 2, 1.0)
    other = ld.BM25Windows.from_texts(["the cat the dog", "The bird", "bird"], 2, k1=1.0)
    assert repr(other) != repr(selector)
    assert "preselect=BM25Windows(k=2, k1=1.2, b=0.75)" in repr(ld.MaxP("m", preselect=ld.BM25Windows(2)))


def test_of_equals_the_earlier_in_document_order():
    long, short, empty = tokenized("red cat dog red bird red", "cat", "")
    one_word = [(i, i + 1) for i in range(6)]
    chosen = ld.BM25Windows(2).choose(["red", "fish", "bird", "red", "red"], [long] * 3 + [short, empty], [
        one_word, one_word, one_word, [(0, 1)], [(0, 0)],
    ])  # fmt: skip
    assert chosen == [[(0, 1), (3, 4)], [(0, 1), (1, 2)], [(0, 1), (4, 5)], [(0, 1)], [(0, 0)]]
    assert ld.FirstK(2).choose(["red"], [long], [one_word]) == [[(0, 1), (1, 2)]]


@pytest.mark.parametrize("name", slow_but(REPRESENTATIVE, sorted(CROSS_ENCODERS.keys() - {"FirstP", "LongP"})))
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


@pytest.mark.parametrize("name", SELECTORS)
def test_each_selector_keeps_what_its_method_scores_best(name, selector, cross_encoder):
    model = make("MaxP", cross_encoder, explain=True)
    spans = model(frame("red fish", LONG))["window_spans"][0]
    passages = [LONG[a:b] for a, b in spans]
    chosen = selector(name, 3)
    if name in ("EmbeddingWindows", "CrossEncoderWindows"):
        scores = chosen.model(frame("red fish", *passages))["score"].round(5).to_numpy()
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


def test_short_documents_are_not_selected_from(selector, cross_encoder, monkeypatch):
    chosen = selector("CrossEncoderWindows", 3)
    monkeypatch.setattr(type(chosen.model), "score_pairs", lambda *_: pytest.fail("nothing is to be chosen"))
    windows = SlidingWindows(20, 10)
    documents = tokenized("red cat", "", " ".join(["dog"] * 40))
    cuts = chosen.cut(["a", "b", "c"], documents, windows)
    assert [spans for _, spans in cuts] == [windows(document) for document in documents]


@pytest.mark.parametrize("name", ["FirstP", "LongP", "MaxP", "CEDR-knrm"])
def test_key_blocks_make_a_shorter_document(name, cross_encoder):
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


def test_key_blocks_that_overlap_are_merged_and_nothing_else_is_read():
    (document,) = tokenized(LONG)
    ((shorter, spans),) = ld.KeyBlocks(ld.FirstK(2), SlidingWindows(10, 5)).cut(["red"], [document], GreedyChunks(20))
    assert shorter.ids.tolist() == document.ids[:15].tolist()
    assert spans == [(0, 15)]
    few = ld.KeyBlocks(ld.FirstK(3), GreedyChunks(2, max_windows=3))
    assert few.cut(["red"], [document], GreedyChunks(20))[0][1] == [(0, 6)]


@pytest.mark.parametrize("name", [*SELECTORS, "table", "KeyBlocks"])
def test_saved_and_loaded(name, selector, cross_encoder, tmp_path):
    if name == "table":
        chosen: Preselection = ld.BM25Windows.from_texts([LONG, FILLER, GOLD], 2)
    elif name == "KeyBlocks":
        chosen = ld.KeyBlocks(selector("CrossEncoderWindows", 2), GreedyChunks(12))
    else:
        chosen = selector(name, 2)
    if name == "CrossEncoderWindows":
        with torch.no_grad():  # as if it were trained
            chosen.model.load_scorer().encoder.backbone.get_input_embeddings().weight.add_(1.0).mul_(-1.0)
    model = make("MaxP", cross_encoder, preselect=chosen)
    results = frame("red fish", LONG, LONG[100:])
    expected = model(results)["score"]
    model.save(tmp_path)
    loaded = ld.MaxP.load(tmp_path)
    assert loaded.preselect.identity() == chosen.identity()
    np.testing.assert_allclose(loaded(results)["score"], expected, atol=1e-5)
    plain = ld.MaxP.load(tmp_path, preselect=None)
    np.testing.assert_allclose(plain(results)["score"], make("MaxP", cross_encoder)(results)["score"], rtol=1e-5)


@dataclass(frozen=True)
class Last(WindowSelector):
    """A selector of a user's own: the last windows."""

    def scores(self, queries, documents, spans):
        return [np.arange(len(own)) for own in spans]


def test_selectors_of_users_own_are_read_back(tmp_path):
    (document,) = tokenized(LONG)
    assert Last(2).cut(["red"], [document], GreedyChunks(60)) == [(document, [(60, 120), (120, 165)])]
    assert preselection_from_config(Last(2).to_config(tmp_path), tmp_path) == Last(2)
    assert Last(2).to_config(tmp_path)["module"] == __name__
    with pytest.raises(ValueError, match=r"unknown preselection 'Later'; known are .*BM25Windows"):
        preselection_from_config({"type": "Later"}, tmp_path)
    with pytest.raises(ValueError, match="unknown preselection 'Later', which the module 'parts' defined: import"):
        preselection_from_config({"type": "Later", "module": "parts"}, tmp_path)


def test_what_cannot_be_stored_is_refused(plain_encoder, tmp_path):
    chosen = ld.EmbeddingWindows(2, ld.BiEncoder(plain_encoder, trust_remote_code=True))
    with pytest.raises(ValueError, match="remote code"):
        chosen.to_config(tmp_path)


def test_the_selector_is_part_of_the_cached_scores(selector, cross_encoder, plain_encoder, tmp_path):
    path = tmp_path / "scores.sqlite"
    results = pd.concat([frame("red fish", LONG, "cat"), frame("snow tree", LONG)], ignore_index=True)
    embedding = ld.BiEncoder(plain_encoder, max_query_len=8, window_size=30, stride=30, pooling="cls")
    other = ld.FirstP(cross_encoder, max_query_len=8)
    with torch.no_grad():
        other.load_scorer().encoder.backbone.get_input_embeddings().weight.mul_(-1.0)
    selectors = [
        *(None, ld.FirstK(2), ld.KeyBlocks(ld.BM25Windows(2))),
        *(ld.BM25Windows(2), ld.BM25Windows(3), ld.BM25Windows(2, b=0.1)),
        ld.BM25Windows(2, document_frequencies={"red": 1}, documents=5),
        *(selector("EmbeddingWindows", 2), ld.EmbeddingWindows(2, embedding)),
        *(selector("CrossEncoderWindows", 2), ld.CrossEncoderWindows(2, other)),
    ]
    model = make("MaxP", cross_encoder)
    for number, chosen in enumerate(selectors):
        model.preselect, model.score_cache = chosen, None
        expected, coverage = model(results)["score"], model.coverage
        model.score_cache = path
        for _ in range(2):
            np.testing.assert_allclose(model(results)["score"], expected, rtol=1e-5)
            assert model.coverage == coverage
        assert len(ScoreCache(path)) == 3 * (number + 1)


def test_fit_reads_the_chosen_windows_and_leaves_the_selector_alone(selector, cross_encoder, monkeypatch):
    chosen = selector("CrossEncoderWindows", 2)
    training = ld.TrainingArgs(learning_rates={"": 1e-2})
    model = make("PARADE-attn", cross_encoder, preselect=chosen, training=training)
    before = {part: _weights(part) for part in (model, chosen.model)}
    read = []
    encode = LongDocScorer.encode

    def spy(self, read_of, work=None):
        if self is model.load_scorer() and torch.is_grad_enabled():
            read.extend(map(len, read_of.windows))
        return encode(self, read_of, work)

    monkeypatch.setattr(LongDocScorer, "encode", spy)
    model.fit(tiny.results(), QRELS)
    assert read
    assert max(read) == 2
    changed = [name for name, value in _weights(model).items() if not torch.equal(value, before[model][name])]
    assert {name.split(".")[0] for name in changed} == {"encoder", "head"}
    assert all(torch.equal(value, before[chosen.model][name]) for name, value in _weights(chosen.model).items())
    assert not any("preselect" in name for name in before[model])


def _weights(model):
    return {name: value.detach().clone() for name, value in model.load_scorer().state_dict().items()}


def test_copies_share_the_selector(selector, cross_encoder):
    model = make("MaxP", cross_encoder, preselect=selector("EmbeddingWindows", 2))
    expected = model(frame("red fish", LONG))["score"][0]
    assert copy.deepcopy(model).preselect is model.preselect
    assert model.apply_attributes(batch_size=3).preselect is model.preselect
    restored = pickle.loads(pickle.dumps(model))
    assert restored(frame("red fish", LONG))["score"][0] == pytest.approx(expected, rel=1e-5)


BAD = {
    "must be at least 1": lambda: ld.FirstK(0),
    "k=None": lambda: ld.BM25Windows(None),
    "k1=-1": lambda: ld.BM25Windows(3, k1=-1),
    "b=2": lambda: ld.BM25Windows(3, b=2),
    "go together": lambda: ld.BM25Windows(3, document_frequencies={"a": 1}),
    "at most documents=2": lambda: ld.BM25Windows(3, document_frequencies={"a": 3}, documents=2),
    "must be a dictionary": lambda: ld.BM25Windows(3, document_frequencies=["a"], documents=2),
    "must be a BiEncoder": lambda: ld.EmbeddingWindows(3, ld.FirstP("m")),
    "must be a cross-encoder": lambda: ld.CrossEncoderWindows(3, ld.BiEncoder("m")),
    "Birch scores by more": lambda: ld.CrossEncoderWindows(3, ld.Birch("m")),
    "must be a selector": lambda: ld.KeyBlocks("bm25"),
    "must be windows": lambda: ld.KeyBlocks(ld.FirstK(3), 63),
    "is one block": lambda: ld.KeyBlocks(ld.FirstK(3), ld.Truncate(63)),
    "preselect='bm25' must be": lambda: ld.MaxP("m", preselect="bm25"),
    "reads one window.*KeyBlocks": lambda: ld.FirstP("m", preselect=ld.BM25Windows(3)),
    "nothing to choose from": lambda: ld.LongP("m", preselect=ld.FirstK(3)),
    "8 blocks of up to 63 .* k=7": lambda: ld.FirstP("m", preselect=ld.KeyBlocks(ld.FirstK(8))),
    "give max_tokens": lambda: ld.FirstP("m", preselect=ld.KeyBlocks(ld.FirstK(8), ld.SentenceWindows())),
    "use windows in tokens": lambda: ld.Birch("m", preselect=ld.KeyBlocks(ld.FirstK(8))),
}


def test_bad_arguments(cross_encoder):
    for message, make_bad in BAD.items():
        with pytest.raises(ValueError, match=message):
            make_bad()
    model = ld.LongP(cross_encoder, max_query_len=8, preselect=ld.KeyBlocks(ld.FirstK(2)))
    with pytest.raises(ValueError, match=r"2 blocks of up to 63 tokens do not fit .* k=1"):
        model.load_scorer()


def test_max_windows_apply_before(cross_encoder):
    model = make("MaxP", cross_encoder, max_windows=3, preselect=ld.BM25Windows(2), explain=True)
    spans = model(frame("red fish", LONG))["window_spans"][0]
    everything = ld.MaxP(cross_encoder, explain=True, **SLIDING)(frame("red fish", LONG))["window_spans"][0]
    assert spans == everything[:2]


# Models that select.


def test_a_selecting_model_can_be_trained_after_use(cross_encoder, results):
    inner = ld.FirstP(cross_encoder, training=ld.TrainingArgs(learning_rates={"": 1e-3}))
    model = ld.MaxP(cross_encoder, window_size=10, stride=10, preselect=ld.CrossEncoderWindows(1, inner))
    before = model(results)["score"].to_numpy()
    judged = results.groupby("qid").head(1)[["qid", "docno"]].assign(label=1)
    inner.fit(results, judged)
    other = copy.deepcopy(model)
    assert other.preselect.model is not inner
    np.testing.assert_allclose(model(results)["score"], other(results)["score"], rtol=1e-5)
    assert len(before) == len(results)


def test_a_selecting_model_says_what_it_does_not_read(cross_encoder, results):
    inner = ld.FirstP(cross_encoder, windows=ld.Truncate(size=3))
    model = ld.MaxP(cross_encoder, window_size=10, stride=10, preselect=ld.CrossEncoderWindows(1, inner))
    with pytest.warns(
        ld.TruncationWarning,
        match="which selects windows, did not read 154 of 224 tokens .* windows=Tr",
    ):
        model(results)


def test_saving_without_a_selector_leaves_none_behind(cross_encoder, tmp_path):
    inner = ld.FirstP(cross_encoder)
    ld.MaxP(cross_encoder, window_size=10, stride=10, preselect=ld.CrossEncoderWindows(1, inner)).save(tmp_path)
    assert (tmp_path / "preselect").is_dir()
    ld.MaxP(cross_encoder, window_size=10, stride=10).save(tmp_path)
    assert not (tmp_path / "preselect").exists()


def test_check_invariance_looks_at_the_selecting_model_too(cross_encoder, results, tmp_path):
    inner = ld.FirstP(cross_encoder, score_cache=tmp_path / "inner.sqlite")
    model = ld.MaxP(cross_encoder, window_size=10, stride=10, preselect=ld.CrossEncoderWindows(1, inner))
    table = ld.check_invariance(model, results, dtypes=(), verbose=False)
    assert not (table["passed"] == False).any()  # noqa: E712 - None is no verdict
    assert not (tmp_path / "inner.sqlite").exists()
    assert inner.score_cache == tmp_path / "inner.sqlite"


def test_selectors_are_keys():
    selectors = [BM25Windows(2), BM25Windows.from_texts(["a b", "b c"], 2), BM25Windows.from_texts(["a b", "b d"], 2)]
    selectors += [KeyBlocks(selector) for selector in selectors]
    assert len(dict.fromkeys(selectors, 0)) == 6
    assert hash(BM25Windows.from_texts(["a b", "b c"], 2)) == hash(selectors[1])
