"""Any function or transformer that scores pairs stands in place of a backbone; what it returns is checked."""

from __future__ import annotations

import copy
import pickle
from functools import partial

import numpy as np
import pandas as pd
import pyterrier as pt
import pytest
import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer

import pyterrier_longdoc as ld
from pyterrier_longdoc.modelling import model as model_module
from pyterrier_longdoc.modelling.heads.base import Head

from ..support import tiny
from ..support.llm import Answer, serving
from ..support.systems import QRELS, QUIET, make, scores
from ..support.threads import Interleaved
from ..test_readme import blocks

pytestmark = QUIET

LONGEST = 128
"""Tokens that the tiny cross-encoder takes."""
WORDS = {"window_size": 10, "stride": 5, "max_query_len": 8}


def overlap(queries, texts) -> list[float]:
    """A made-up scorer: words of the query in the text, and a little for its length."""
    pairs = zip(queries, texts, strict=True)
    return [sum(text.split().count(word) for word in query.split()) + len(text) / 1e3 for query, text in pairs]


def logits(queries, texts) -> list[float]:
    """The tiny cross-encoder's own scores of pairs, by transformers alone."""
    folder = tiny.encoder()
    model = AutoModelForSequenceClassification.from_pretrained(folder).eval()
    encoded = AutoTokenizer.from_pretrained(folder)(list(queries), list(texts), padding=True, return_tensors="pt")
    with torch.inference_mode():
        return model(**encoded).logits[:, 0].tolist()


class Spy:
    """Keeps what it was asked."""

    def __init__(self, function=overlap) -> None:
        self.function, self.asked, self.sizes = function, [], []

    def __call__(self, queries, texts):
        assert isinstance(queries, list)
        assert isinstance(texts, list)
        self.asked += zip(queries, texts, strict=True)
        self.sizes.append(len(texts))
        return self.function(queries, texts)


class Rows(pt.Transformer):
    """A passage reranker as PyTerrier has them, which gives its rows back in another order."""

    def __init__(self, change=lambda frame: frame.iloc[::-1]) -> None:
        self.change, self.frames = change, []

    def transform(self, inp: pd.DataFrame) -> pd.DataFrame:
        pt.validate.result_frame(inp, extra_columns=["query", "text"])
        self.frames.append(inp)
        out = inp.assign(score=overlap(inp["query"], inp["text"]))
        return self.change(pt.model.add_ranks(out))


def windows_of(text: str, size: int = 10, stride: int = 5) -> list[str]:
    words = text.split()
    starts = range(0, max(1, len(words) - size + stride), stride)
    return [" ".join(words[start : start + size]) for start in starts]


def test_scores_of_windows_in_words_are_aggregated(results):
    scorer, pairs = ld.PairScorer(overlap), list(zip(results["query"], results["text"].fillna(""), strict=True))
    for cls, aggregate in ((ld.MaxP, max), (ld.SumP, sum), (ld.AvgP, np.mean), (ld.FirstP, lambda own: own[0])):
        sizes = WORDS if cls in (ld.MaxP, ld.SumP) else {"window_size": 10, "max_query_len": 8}
        windows = [(query, windows_of(text, 10, sizes.get("stride", 10))) for query, text in pairs]
        expected = [aggregate(overlap([query] * len(own), own)) for query, own in windows]
        np.testing.assert_allclose(scores(cls(scorer, **sizes), results), expected, rtol=1e-12)


def test_with_a_tokenizer_scores_are_those_of_the_local_model(results):
    scorer = ld.PairScorer(logits, tokenizer=tiny.encoder(), longest_input=LONGEST)
    rows = results.assign(title=["the red bird", "a cat", "snow", "", None])
    titled = {"text_field": ("title", "text"), "repeat": "title", "preselect": ld.BM25Windows(2)}
    for name in ("FirstP", "MaxP", "SumP", "AvgP", "KMaxP", "Birch", "LongP"):
        further = {"LongP": {"max_doc_len": 60}, "MaxP": titled}.get(name, {})
        model, local = make(name, backbone=scorer, **further), make(name, device="cpu", **further)
        np.testing.assert_allclose(scores(model, rows), scores(local, rows), rtol=1e-5, atol=1e-5, err_msg=name)
        assert model.coverage == local.coverage


def test_the_function_of_the_page_asks_a_server(results):
    def answer(body: dict) -> Answer:
        assert body.keys() == {"query", "texts", "raw_scores"}
        own = enumerate(overlap([body["query"]] * len(body["texts"]), body["texts"]))
        return Answer([{"index": index, "score": score} for index, score in sorted(own, key=lambda each: -each[1])])

    [code] = [code for _, _, code, _ in blocks("checkpoints") if "/rerank" in code]
    defined: dict = {"ld": ld}
    exec(code.split("\nbge = ")[0], defined)
    with serving(answer) as server:
        rerank = ld.PairScorer(partial(defined["rerank"], url=f"{server.url}/rerank"))
        found = scores(ld.MaxP(rerank, batch_size=8, **WORDS), results)
    assert {path for path, _, _ in server.requests} == {"/rerank"}
    np.testing.assert_allclose(found, scores(ld.MaxP(ld.PairScorer(overlap), **WORDS), results))


def test_each_pair_is_scored_once_in_batches(results):
    twice = pd.concat([results, results.assign(docno=results["docno"] + "x")], ignore_index=True)
    spy = Spy()
    model = ld.MaxP(ld.PairScorer(spy), batch_size=4, **WORDS)
    model(twice)
    assert len(set(spy.asked)) == len(spy.asked)
    assert max(spy.sizes) == 4
    pairs = zip(results["query"], results["text"].fillna(""), strict=True)
    assert set(spy.asked) == {(query, window) for query, text in pairs for window in windows_of(text)}


def test_runs_in_two_threads_do_not_mix_their_scores(monkeypatch):
    monkeypatch.setattr(model_module, "PAIRS_PER_BLOCK", 1)
    start = "a b c d e f g h i j"
    rows = tiny.frame(["old dog"], [f"{start} old dog", f"{start} k"])  # of the second its first window is known
    threads = Interleaved()

    def scorer(queries, texts):
        if texts == ["f g h i j k"]:
            threads.stop()
        return overlap(queries, texts)

    model = ld.MaxP(ld.PairScorer(scorer), **WORDS)
    found, _ = threads.run(lambda: scores(model, rows), lambda: model(tiny.frame(["old dog"], ["snow"])))
    assert found.tolist() == scores(ld.MaxP(ld.PairScorer(overlap), **WORDS), rows).tolist()


def test_a_transformer_scores_each_window_as_a_row(results):
    expected = scores(ld.MaxP(ld.PairScorer(overlap), **WORDS), results)
    rows = Rows()
    model = ld.MaxP(ld.PairScorer(rows), **WORDS)
    assert scores(model, results).tolist() == expected.tolist()
    frame = pd.concat(rows.frames)
    assert not frame.duplicated(["qid", "docno"]).any()
    assert frame.groupby("docno")["text"].nunique().max() == frame.groupby("text")["docno"].nunique().max() == 1


def test_terriers_text_scorer_scores_windows(terrier_index, results):
    scorer = pt.text.scorer(body_attr="text", wmodel="BM25", background_index=terrier_index.index_obj())
    rows = results.assign(text=results["text"].fillna(""))
    windows = [(query, windows_of(text)) for query, text in zip(rows["query"], rows["text"], strict=True)]
    pairs = [(query, window) for query, own in windows for window in own]
    asked = pd.DataFrame(pairs, columns=["query", "text"]).drop_duplicates()
    asked["qid"], asked["docno"] = (
        pd.factorize(asked["query"])[0].astype(str),
        pd.factorize(asked["text"])[0].astype(str),
    )
    by_pair = scorer(asked).set_index(["query", "text"])["score"].to_dict()
    expected = [max(by_pair[query, window] for window in own) for query, own in windows]
    assert len(set(expected)) > 2
    np.testing.assert_allclose(scores(ld.MaxP(ld.PairScorer(scorer), **WORDS), rows), expected, rtol=1e-6)


def test_windows_are_preselected_and_explained_by_their_spans_in_the_text(results):
    arguments = {"explain": True, **WORDS}
    out = ld.MaxP(ld.PairScorer(overlap), preselect=ld.BM25Windows(2), **arguments)(results)
    for row in out.itertuples():
        text = row.text if isinstance(row.text, str) else ""
        shown = [text[start:end] for start, end in row.window_spans]
        assert len(shown) <= 2
        assert overlap([row.query] * len(shown), shown) == pytest.approx(row.window_scores)
        assert row.score == pytest.approx(max(row.window_scores))


def test_queries_and_texts_are_truncated_and_counted_in_words(results):
    spy = Spy()
    model = ld.MaxP(ld.PairScorer(spy), max_query_len=2, max_doc_len=3)
    model(tiny.frame(["old  dog in the rain", " snow "], ["the cat", "a red fish in the river"]))
    assert set(spy.asked) == {(query, text) for query in ("old  dog", " snow ") for text in ("the cat", "a red fish")}
    assert model.coverage.truncated == {"max_query_len=2": 3, "max_doc_len=3": 2 * 3}  # of a text that two queries have
    assert (model.coverage.query_tokens, model.coverage.tokens, model.coverage.tokens_read) == (6, 16, 10)
    model.max_query_len = None
    model(tiny.frame(["old  dog in the rain"], ["the cat"]))
    assert spy.asked[-1][0] == "old  dog in the rain"


def test_default_window_sizes_are_in_words_and_depend_on_longest_input():
    def reader(cls, longest=None, **arguments):
        return cls(ld.PairScorer(overlap, longest_input=longest), **arguments).model.reader

    largest = [reader(ld.FirstP, longest).windows.largest for longest in (None, 512, 8192)]
    assert largest == [352, 352, 477]
    assert reader(ld.LongP).windows.largest is None
    assert reader(ld.FirstP, 512, window_size=500).windows.largest == 500
    whole = reader(ld.FirstP, max_query_len=None)
    assert (whole.windows.largest, whole.max_query_len) == (288, None)  # a quarter is left to queries


def test_functions_may_return_tensors_and_arrays():
    frame, parameter = tiny.frame(["old dog"], ["a cat", "a bird"]), torch.nn.Parameter(torch.ones(1))
    for wrap in (np.array, tuple, lambda values: (torch.tensor(values) * parameter).bfloat16()):
        model = ld.MaxP(ld.PairScorer(lambda queries, texts, wrap=wrap: wrap([float(len(text)) for text in texts])))
        assert scores(model, frame).tolist() == [5.0, 6.0]


def test_models_that_a_function_loads_can_be_trained_afterwards(results):
    loaded = []

    def score(queries, texts):
        loaded.append(torch.nn.Linear(1, 1))
        return overlap(queries, texts)

    ld.MaxP(ld.PairScorer(score), **WORDS)(results)
    loaded[0](torch.ones(1)).sum().backward()
    assert loaded[0].weight.grad is not None


def test_wrong_return_values_of_a_scorer_are_refused():
    for scorer, word in [
        (lambda queries, texts: [1.0], "one number"),
        (lambda queries, texts: [[1.0]] * len(texts), "one number"),
        (lambda queries, texts: 1.0, "one number"),
        (lambda queries, texts: [float("nan")] * len(texts), "finite"),
        (Rows(lambda frame: frame.iloc[:-1]), "each row once"),
        (Rows(lambda frame: pd.concat([frame, frame.iloc[:1]])), "each row once"),
        (Rows(lambda frame: frame.assign(docno=["d1", "d2", "d3"])), "each row once"),
        (Rows(lambda frame: frame.assign(score="good")), "finite"),
        (pt.Transformer.identity(), "finite"),
    ]:
        frame = tiny.frame(["old dog"], ["a cat", "a bird", "snow"])
        with pytest.raises(ValueError, match=word):
            ld.MaxP(ld.PairScorer(scorer))(frame)


SCORER = ld.PairScorer(overlap)


def test_methods_that_need_weights_are_refused(results, tmp_path, cross_encoder):
    model = ld.MaxP(SCORER, **WORDS)
    for use in (
        lambda: model.fit(results, QRELS),
        lambda: model.save(tmp_path),
        lambda: model.start_from(ld.MaxP(cross_encoder)),
        lambda: ld.MaxP(cross_encoder).start_from(model),
    ):
        with pytest.raises(TypeError, match="has no weights"):
            use()


def test_arguments_that_a_scorer_cannot_use_are_refused():
    for make_bad, word in [
        *((lambda cls=cls: cls(SCORER), "a score per window") for cls in (ld.PARADE, ld.CEDR, ld.LateIR)),
        (lambda: ld.MaxP(SCORER, pooling="mean"), "pooling"),
        (lambda: ld.MaxP(SCORER, layout="padded"), "layout"),
        (lambda: ld.MaxP(SCORER, device="cpu"), "device"),
        (lambda: ld.MaxP(SCORER, runtime="openvino"), "runtime"),
        (lambda: ld.MaxP(overlap), "ld.PairScorer"),
        (lambda: ld.MaxP(Rows()), "ld.PairScorer"),
        (lambda: ld.MaxP("http://127.0.0.1:8080"), "ld.PairScorer"),
        (lambda: ld.BiEncoder(SCORER), "backbone"),
        (lambda: ld.PairScorer("cross-encoder/ms-marco-MiniLM-L6-v2"), "scorer="),
        (lambda: ld.MaxP(ld.PairScorer(overlap, tokenizer=str.split)).model, "tokenizer="),
    ]:
        with pytest.raises(ValueError, match=word):
            make_bad()


def test_a_custom_head_can_aggregate_the_scores_of_windows(results):

    class Median(Head, name="median-of-scores"):
        from_scores = True

        def forward(self, encoded):
            values = self.score(encoded.cls).masked_fill(~encoded.mask, float("nan"))
            return values.nanmedian(1).values

    class MedianP(ld.MaxP):
        head_name = "median-of-scores"

    windows = windows_of(results["text"][0])
    own = sorted(overlap(["old dog"] * len(windows), windows))
    assert scores(MedianP(SCORER, **WORDS), results)[0] == pytest.approx(own[(len(own) - 1) // 2])


def test_a_cache_needs_the_name_of_an_object(results, tmp_path):
    path, spy = tmp_path / "scores", Spy()
    with pytest.warns(UserWarning, match="name="):
        ld.MaxP(ld.PairScorer(spy), score_cache=path, **WORDS)(results)
    first, again, other = (
        ld.MaxP(ld.PairScorer(spy, name=name), score_cache=path, **WORDS)
        for name in ("overlap", "overlap", "overlap 2")
    )
    assert not path.exists()
    spy.asked.clear()
    expected, number = scores(first, results), len(spy.asked)
    assert (scores(again, results) == expected).all()
    assert len(spy.asked) == number
    other(results)
    assert len(spy.asked) == 2 * number


def test_a_cache_knows_how_much_of_a_query_is_read(tmp_path):
    def score(longest: int, **arguments) -> float:
        exact = {"name": "length", "tokenizer": tiny.encoder(), "longest_input": longest}
        of_query = ld.PairScorer(lambda queries, texts: list(map(len, queries)), **exact)
        model = ld.MaxP(of_query, window_size=10, stride=5, max_query_len=None, **arguments)
        return scores(model, tiny.frame(["old dog " * 60], ["a cat"])).item()

    cached = [score(longest, score_cache=tmp_path / "scores") for longest in (60, 100)]
    assert cached == [score(60), score(100)]
    assert cached[0] < cached[1]


def test_copies_and_pickles_have_the_changed_arguments(results):
    model = ld.KMaxP(ld.PairScorer(overlap, name="overlap"), k=1, **WORDS)
    best = scores(model, results)
    model.k = 5
    more = scores(model, results)
    assert more[0] < best[0]
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model)), model.apply_attributes(k=5)):
        assert scores(other, results).tolist() == more.tolist()
