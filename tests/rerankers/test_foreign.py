"""Any function or transformer that scores pairs stands in place of a backbone; what it returns is checked."""

from __future__ import annotations

import copy
import pickle

import numpy as np
import pandas as pd
import pyterrier as pt
import pytest
import torch
from pyterrier_caching import SparseScorerCache

import pyterrier_longdoc as ld
from pyterrier_longdoc.experiment.identity import Identities
from pyterrier_longdoc.modelling.heads.base import Head
from pyterrier_longdoc.rerankers.score_cache import ScoreCache

from ..support import tiny
from ..support.served import LONGEST, logits
from ..support.systems import QRELS, QUIET, make, scores

pytestmark = QUIET

WORDS = {"window_size": 10, "stride": 5, "max_query_len": 8}


def overlap(queries, texts) -> list[float]:
    """A made-up scorer: words of the query in the text, and a little for its length."""
    pairs = zip(queries, texts, strict=True)
    return [sum(text.split().count(word) for word in query.split()) + len(text) / 1e3 for query, text in pairs]


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


# Scores.


def test_windows_in_words_are_aggregated_as_ever(results):
    scorer, pairs = ld.PairScorer(overlap), list(zip(results["query"], results["text"].fillna(""), strict=True))

    def expected(stride: int) -> list[list[float]]:
        windows = [(query, windows_of(text, 10, stride)) for query, text in pairs]
        return [overlap([query] * len(own), own) for query, own in windows]

    for cls, aggregate in ((ld.MaxP, max), (ld.SumP, sum)):
        found = scores(cls(scorer, **WORDS), results)
        np.testing.assert_allclose(found, list(map(aggregate, expected(5))), rtol=1e-12)
    chunks = {"window_size": 10, "max_query_len": 8}
    np.testing.assert_allclose(scores(ld.AvgP(scorer, **chunks), results), list(map(np.mean, expected(10))), rtol=1e-12)
    assert scores(ld.FirstP(scorer, **chunks), results).tolist() == [own[0] for own in expected(10)]


def test_with_a_tokenizer_scores_are_those_of_the_local_model(results):
    scorer = ld.PairScorer(logits, tokenizer=tiny.encoder(), longest_input=LONGEST)
    for name in ("FirstP", "MaxP", "SumP", "AvgP", "KMaxP", "Birch", "LongP"):
        further = {"max_doc_len": 60} if name == "LongP" else {}
        model, local = make(name, backbone=scorer, **further), make(name, device="cpu", **further)
        np.testing.assert_allclose(scores(model, results), scores(local, results), rtol=1e-5, atol=1e-5, err_msg=name)
        assert model.coverage == local.coverage


def test_titles_go_out_with_each_window(results):
    titled = {"text_field": ("title", "text"), "repeat": "title", "preselect": ld.BM25Windows(2)}
    rows = results.assign(title=["the red bird", "a cat", "snow", "", None])
    model, local = (
        make("MaxP", backbone=ld.PairScorer(logits, tokenizer=tiny.encoder(), longest_input=LONGEST), **titled),
        make("MaxP", device="cpu", **titled),
    )
    np.testing.assert_allclose(scores(model, rows), scores(local, rows), rtol=1e-5, atol=1e-5)
    assert model.coverage == local.coverage
    assert model.coverage.repeated_tokens > 0


def test_one_window_scores_as_first_p(results):
    scorer = ld.PairScorer(overlap)
    one = [cls(scorer, windows=ld.WholeText()) for cls in (ld.MaxP, ld.SumP, ld.AvgP, ld.LongP, ld.FirstP)]
    expected = overlap(results["query"], results["text"].fillna("").str.strip())
    for model in one:
        assert scores(model, results).tolist() == expected


def test_each_pair_is_asked_for_once_in_batches(results):
    twice = pd.concat([results, results.assign(docno=results["docno"] + "x")], ignore_index=True)
    spy = Spy()
    model = ld.MaxP(ld.PairScorer(spy), batch_size=4, **WORDS)
    model(twice)
    assert len(set(spy.asked)) == len(spy.asked)
    assert max(spy.sizes) == 4
    pairs = zip(results["query"], results["text"].fillna(""), strict=True)
    assert set(spy.asked) == {(query, window) for query, text in pairs for window in windows_of(text)}
    number = len(spy.asked)
    model(twice)
    assert len(spy.asked) == 2 * number  # a run remembers nothing of the one before


def test_a_transformer_scores_rows_of_its_own(results):
    expected = scores(ld.MaxP(ld.PairScorer(overlap), **WORDS), results)
    rows = Rows()
    model = ld.MaxP(ld.PairScorer(rows), **WORDS)
    assert scores(model, results).tolist() == expected.tolist()
    frame = pd.concat(rows.frames)
    assert not frame.duplicated(["qid", "docno"]).any()
    assert frame.groupby("docno")["text"].nunique().max() == frame.groupby("text")["docno"].nunique().max() == 1
    by_length = ld.MaxP(ld.PairScorer(pt.apply.doc_score(lambda row: len(row["text"]))), **WORDS)
    longest = [max(map(len, windows_of(text))) for text in results["text"].fillna("")]
    assert scores(by_length, results).tolist() == longest


def test_a_cache_behind_the_windows_takes_none_for_another(results, tmp_path):
    expected = scores(ld.MaxP(ld.PairScorer(overlap), **WORDS), results)
    inner = Rows(lambda frame: frame)
    for batch_size in (3, 64):
        cached = SparseScorerCache(str(tmp_path / "cache"), inner, verbose=False)
        model = ld.MaxP(ld.PairScorer(cached), batch_size=batch_size, **WORDS)
        assert scores(model, results).tolist() == expected.tolist()
    assert not pd.concat(inner.frames).duplicated(["qid", "docno"]).any()


def test_explanations_point_into_the_text_and_selectors_see_it(results):
    arguments = {"explain": True, **WORDS}
    out = ld.MaxP(ld.PairScorer(overlap), preselect=ld.BM25Windows(2), **arguments)(results)
    for row in out.itertuples():
        text = row.text if isinstance(row.text, str) else ""
        shown = [text[start:end] for start, end in row.window_spans]
        assert len(shown) <= 2
        assert overlap([row.query] * len(shown), shown) == pytest.approx(row.window_scores)
        assert row.score == pytest.approx(max(row.window_scores))
    spy = Spy()
    blocks = ld.KeyBlocks(ld.BM25Windows(2), ld.GreedyChunks(5))
    text = "a b c d e the old dog runs by f g h i j a dog is old too k l m n o"
    ld.FirstP(ld.PairScorer(spy), preselect=blocks)(tiny.frame(["old dog"], [text]))
    assert spy.asked == [("old dog", "the old dog runs by a dog is old too")]


def test_queries_are_cut_and_counted(results):
    spy = Spy()
    model = ld.MaxP(ld.PairScorer(spy), max_query_len=2)
    model(tiny.frame(["old  dog in the rain", " snow "], ["the cat"]))
    assert {query for query, _ in spy.asked} == {"old  dog", " snow "}
    assert (model.coverage.query_tokens, model.coverage.query_tokens_read, model.coverage.queries_cut) == (6, 3, 1)
    model.max_query_len = None
    model(tiny.frame(["old  dog in the rain"], ["the cat"]))
    assert spy.asked[-1][0] == "old  dog in the rain"


def test_coverage_counts_words(results):
    model = ld.MaxP(ld.PairScorer(overlap), max_doc_len=30, **WORDS)
    model(results)
    words = [len(text.split()) for text in results["text"].fillna("")]
    assert (model.coverage.tokens, model.coverage.tokens_read) == (sum(words), sum(min(30, n) for n in words))
    assert model.coverage.tokens_beyond == 2 * (max(words) - 30)  # of a text that two queries have
    told = model.summary(results)
    assert told.coverage == model.coverage
    assert " in None" not in repr(told)


def test_sizes_left_open_are_words_that_mostly_fit():
    models = [ld.FirstP(ld.PairScorer(overlap, longest_input=longest)) for longest in (None, 512, 8192)]
    largest = [model.load_scorer().settings.windows.largest for model in models]
    assert largest == [352, 352, 477]
    assert ld.LongP(ld.PairScorer(overlap)).load_scorer().settings.windows.largest is None
    given = ld.FirstP(ld.PairScorer(overlap, longest_input=512), window_size=500)
    assert given.load_scorer().settings.windows.largest == 500
    whole = ld.FirstP(ld.PairScorer(overlap), max_query_len=None).load_scorer().settings
    assert (whole.windows.largest, whole.max_query_len) == (288, None)  # a quarter is left to queries


@pytest.mark.parametrize(
    "too_much", [{"max_query_len": 384}, {"text_field": ("title", "text"), "repeat": "title", "repeat_tokens": 352}]
)
def test_no_words_are_left_for_a_window(too_much):
    with pytest.raises(ValueError, match=f"lower {list(too_much)[-1]}"):
        ld.FirstP(ld.PairScorer(overlap), **too_much).load_scorer()


def test_scores_do_not_depend_on_the_batch(results):
    table = ld.check_invariance(ld.MaxP(ld.PairScorer(overlap), **WORDS), results, verbose=False, tolerance=1e-12)
    passed = table.set_index("check")["passed"]
    assert passed[["repeated", "order", "alone", "padding", "batch size 1"]].tolist() == [True] * 5
    assert passed[["attention eager", "attention sdpa", "dtype bfloat16"]].isna().all()


def test_functions_may_return_tensors_and_arrays(results):
    expected = scores(ld.MaxP(ld.PairScorer(overlap), **WORDS), results)
    parameter = torch.nn.Parameter(torch.ones(1, dtype=torch.float64))
    for wrap in (np.array, tuple, lambda values: torch.tensor(values, dtype=torch.float64) * parameter):
        model = ld.MaxP(ld.PairScorer(lambda queries, texts, wrap=wrap: wrap(overlap(queries, texts))), **WORDS)
        np.testing.assert_allclose(scores(model, results), expected, rtol=1e-12)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.int64])
def test_tensors_of_any_precision_are_numbers(dtype):
    frame = tiny.frame(["old dog"], ["a cat", "a bird"])
    model = ld.MaxP(ld.PairScorer(lambda queries, texts: torch.arange(len(texts), dtype=dtype)))
    assert sorted(scores(model, frame)) == [0.0, 1.0]


def test_models_that_a_function_loads_can_be_trained_afterwards(results):
    loaded = []

    def score(queries, texts):
        loaded.append(torch.nn.Linear(1, 1))
        return overlap(queries, texts)

    ld.MaxP(ld.PairScorer(score), **WORDS)(results)
    loaded[0](torch.ones(1)).sum().backward()
    assert loaded[0].weight.grad is not None


# What is refused.


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda queries, texts: [1.0], r"shape \(1,\): it must return one number for each pair"),
        (lambda queries, texts: [[1.0]] * len(texts), r"it must return one number for each pair"),
        (lambda queries, texts: 1.0, r"returned float of the shape \(\)"),
        (lambda queries, texts: None, "no finite score|must return|one number for each pair"),
        (lambda queries, texts: ["good"] * len(texts), "must return numbers"),
        (lambda queries, texts: [float("nan")] * len(texts), "gave 3 of 3 pairs no finite score; the first, nan"),
        (lambda queries, texts: [float("inf")] * len(texts), "no finite score; the first, inf, to the query 'old dog'"),
    ],
)
def test_what_a_function_returns_is_checked(function, message):
    frame = tiny.frame(["old dog"], ["a cat", "a bird", "snow"])
    with pytest.raises(ValueError, match=message):
        ld.MaxP(ld.PairScorer(function))(frame)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda frame: frame.iloc[:-1], "given 3 rows and returned 2: 1 are missing"),
        (lambda frame: pd.concat([frame, frame.iloc[:1]]), "returned 4: 0 are missing, 0 were not asked for, 1 stand"),
        (lambda frame: frame.assign(docno=["d1", "d2", "d3"]), "3 are missing, 3 were not asked for"),
        (lambda frame: frame.drop(columns="score"), "returned no column score"),
        (lambda frame: frame.drop(columns="docno"), "returned no column docno"),
        (lambda frame: frame.assign(score=np.nan), "3 of 3 pairs no finite score"),
        (lambda frame: frame.assign(score="good"), "3 of 3 pairs no finite score"),
    ],
)
def test_what_a_transformer_returns_is_checked(change, message):
    frame = tiny.frame(["old dog"], ["a cat", "a bird", "snow"])
    with pytest.raises(ValueError, match=message):
        ld.MaxP(ld.PairScorer(Rows(change)))(frame)


def test_a_transformer_that_scores_nothing_is_noticed():
    with pytest.raises(ValueError, match="2 of 2 pairs no finite score"):
        ld.MaxP(ld.PairScorer(pt.Transformer.identity()))(tiny.frame(["old dog"], ["a cat", "snow"]))


def test_a_functions_own_errors_are_its_own():
    def fails(queries, texts):
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        ld.MaxP(ld.PairScorer(fails))(tiny.frame(["old dog"], ["a cat"]))


SCORER = ld.PairScorer(overlap)


@pytest.mark.parametrize(
    "model",
    [
        lambda: ld.PARADE(SCORER),
        lambda: ld.PARADE(SCORER, aggregation="avg"),
        lambda: ld.PARADE(SCORER, aggregation="transformer"),
        lambda: ld.CEDR(SCORER),
        lambda: ld.NeuralModel1(SCORER),
        lambda: ld.LateIR(SCORER),
        lambda: ld.MORESPlus(SCORER),
    ],
)
def test_models_that_need_more_than_scores_refuse(model):
    with pytest.raises(ValueError, match=r"needs more of a window than a score.*use FirstP, MaxP, SumP, AvgP, KMaxP"):
        model()


@pytest.mark.parametrize(
    ("arguments", "name"),
    [
        ({"pooling": "mean"}, "pooling"),
        ({"layout": "padded"}, "layout"),
        ({"device": "cpu"}, "device"),
        ({"dtype": "bfloat16"}, "dtype"),
        ({"max_batch_tokens": 100}, "max_batch_tokens"),
        ({"runtime": "compile"}, "runtime"),
        ({"trust_remote_code": True}, "trust_remote_code"),
    ],
)
def test_arguments_without_effect_are_refused(arguments, name):
    with pytest.raises(ValueError, match=f"{name} would have no effect: PairScorer"):
        ld.MaxP(SCORER, **arguments)


def test_what_needs_weights_is_refused(results, tmp_path, cross_encoder):
    model = ld.MaxP(SCORER, **WORDS)
    for use in (
        lambda: model.fit(results, QRELS),
        lambda: model.save(tmp_path),
        lambda: model.save_adapter(tmp_path),
        lambda: model.start_from(ld.MaxP(cross_encoder)),
        lambda: ld.MaxP(cross_encoder).start_from(model),
    ):
        with pytest.raises(TypeError, match=r"cannot be .*: its weights are not here"):
            use()
    with pytest.raises(ValueError, match="must be a folder, or a model on the Hugging Face hub"):
        ld.BiEncoder(SCORER)


def test_what_is_no_backbone_is_told_how_to_be_one():
    for given in (overlap, Rows()):
        with pytest.raises(ValueError, match=r"scores by itself: give it as ld.PairScorer"):
            ld.MaxP(given)
    with pytest.raises(ValueError, match=r"is an address: give a served model as ld.ScoreServer\(url\)"):
        ld.MaxP("http://127.0.0.1:8080")
    with pytest.raises(ValueError, match="must be a function"):
        ld.PairScorer("cross-encoder/ms-marco-MiniLM-L6-v2")
    with pytest.raises(ValueError, match=r"tokenizer=.* must be a fast Hugging Face tokenizer"):
        ld.MaxP(ld.PairScorer(overlap, tokenizer=str.split))(tiny.frame(["a"], ["b"]))


def test_own_heads_say_whether_scores_are_enough(results):

    class Median(Head, name="median-of-scores"):
        from_scores = True

        def forward(self, encoded):
            values = self.score(encoded.cls).masked_fill(~encoded.mask, float("nan"))
            return values.nanmedian(1).values

    class MedianP(ld.MaxP):
        head_name = "median-of-scores"

    long = results.iloc[:1]
    windows = windows_of(long["text"][0])
    own = sorted(overlap(["old dog"] * len(windows), windows))
    assert scores(MedianP(SCORER, **WORDS), long)[0] == pytest.approx(own[(len(own) - 1) // 2])


# Who it is.


def test_a_cache_needs_a_name(results, tmp_path):
    path = tmp_path / "scores"
    with pytest.raises(ValueError, match=r"PairScorer\(overlap\) has no name .*name=.*score_cache"):
        ld.MaxP(SCORER, score_cache=path, **WORDS)(results)
    spy = Spy()
    first = ld.MaxP(ld.PairScorer(spy, name="overlap"), score_cache=path, **WORDS)
    expected, number = scores(first, results), len(spy.asked)
    again = ld.MaxP(ld.PairScorer(spy, name="overlap"), score_cache=path, **WORDS)
    assert (scores(again, results) == expected).all()
    assert again.coverage == first.coverage
    assert len(spy.asked) == number
    assert len(ScoreCache(path)) == len(results.fillna("").drop_duplicates(["query", "text"]))
    ld.MaxP(ld.PairScorer(spy, name="overlap 2"), score_cache=path, **WORDS)(results)
    assert len(spy.asked) == 2 * number


def test_a_cache_knows_how_much_of_a_query_is_read(tmp_path):
    frame = tiny.frame(["old dog " * 60], ["a cat"])

    def model(longest: int, **arguments) -> ld.MaxP:
        of_query = ld.PairScorer(
            lambda queries, texts: list(map(len, queries)),
            name="length",
            tokenizer=tiny.encoder(),
            longest_input=longest,
        )
        return ld.MaxP(of_query, window_size=10, stride=5, max_query_len=None, **arguments)

    cached = [scores(model(longest, score_cache=tmp_path / "scores"), frame) for longest in (60, 100)]
    assert cached == [scores(model(longest), frame) for longest in (60, 100)]
    assert cached[0] < cached[1]


def test_experiments_tell_scorers_apart_by_their_names():
    told = [Identities().of(ld.MaxP(ld.PairScorer(overlap, name=name))) for name in ("a", "a", "b")]
    assert told[0] == told[1] != told[2]
    assert told[0].unchecked == []
    assert Identities().of(ld.MaxP(SCORER)).unchecked == ["MaxP(PairScorer(overlap))"]


def test_attributes_copies_and_pickles(results):
    model = ld.KMaxP(ld.PairScorer(overlap, name="overlap"), k=1, **WORDS)
    best = scores(model, results)
    assert repr(model).startswith("KMaxP(PairScorer(overlap, name='overlap'), ")
    model.k = 5
    more = scores(model, results)
    assert (more <= best).all()
    assert more[0] < best[0]
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model)), model.apply_attributes(k=5)):
        assert (scores(other, results) == more).all()
    assert copy.deepcopy(model).backbone is model.backbone
    union = (ld.MaxP(SCORER, **WORDS) ** ld.SumP(SCORER, **WORDS)).compile()
    assert union(results)["features"].str[0].tolist() == pytest.approx(best.tolist())
