"""Rerankers in pipelines: PyTerrier's own checks, operators, experiments, grid search, `fit`."""

from __future__ import annotations

import unittest
from collections.abc import Callable
from functools import partial

import numpy as np
import pandas as pd
import pyterrier as pt
import pytest

import pyterrier_longdoc as ld
from pyterrier_longdoc.common.frames import EXPLANATION
from pyterrier_longdoc.training import TeacherScores, k_fold_fit

from ..support import terrier, tiny
from ..support.llm import oracle
from ..support.systems import QRELS, QUIET, REPRESENTATIVE, SYSTEMS, TRAINABLE, make, scores, slow_but

pytestmark = QUIET

NEEDED = ["qid", "query", "docno", "text"]
TOPICS = tiny.results()[["qid", "query"]].drop_duplicates()
FIRST_STAGE = pt.Transformer.from_df(tiny.results().drop(columns="text"))
LOADER = tiny.Store(tiny.results()).text_loader(["text"])
CANDIDATES = (FIRST_STAGE >> LOADER)(TOPICS)


def by_pair(frame: pd.DataFrame) -> pd.Series:
    return frame.set_index(["qid", "docno"])["score"].sort_index()


def test_the_test_case_of_pyterrier_passes(fresh, nothing_loads):
    case = pt.testing.transformer_test_class(lambda: fresh)
    outcome = unittest.TestResult()
    unittest.defaultTestLoader.loadTestsFromTestCase(case).run(outcome)
    assert outcome.testsRun == 2
    assert not outcome.failures + outcome.errors


def test_inspection_loads_nothing(fresh, name, nothing_loads):
    inputs = [*NEEDED, "score"] if name == "Birch" else NEEDED
    assert [sorted(columns) for columns in pt.inspect.transformer_inputs(fresh)] == [sorted(inputs)]
    outputs = pt.inspect.transformer_outputs(fresh, [*inputs, "url"])
    assert set(outputs) == {*NEEDED, "url", "score", "rank"}
    assert pt.inspect.subtransformers(fresh) == {}
    values = {attribute.name: attribute.value for attribute in pt.inspect.transformer_attributes(fresh)}
    assert values == {key: getattr(fresh, key) for key in values}
    assert {"backbone", "text_field", "batch_size", "verbose", "device"} <= set(values)


def test_a_model_equals_only_itself_and_stays_in_its_dictionary():
    model, same = make("MaxP", training=ld.TrainingArgs(max_steps=1)), make("MaxP")
    members = {model: 1, same: 2}
    assert len(members) == 2
    model.batch_size = 3
    model.fit(CANDIDATES, QRELS)
    assert members[model] == 1
    # A selector is plain data, but its model is not.
    assert ld.CrossEncoderWindows(1, model) == ld.CrossEncoderWindows(1, model) != ld.CrossEncoderWindows(1, same)


def test_a_tree_runs_one_object_once_and_two_equal_objects_twice(monkeypatch):
    calls = []
    transform = ld.MaxP.transform
    monkeypatch.setattr(ld.MaxP, "transform", lambda self, inp: calls.append(len(inp)) or transform(self, inp))
    first = FIRST_STAGE >> LOADER >> make("MaxP")
    for others, runs in (([first, first], 1), ([first, FIRST_STAGE >> LOADER >> make("MaxP")], 2)):
        systems = [start >> last for start, last in zip(others, (ld.ZScore(), make("FirstP")), strict=True)]
        expected = pt.Experiment(systems, TOPICS, QRELS, ["ndcg_cut_10"])
        calls.clear()
        table = pt.Experiment(systems, TOPICS, QRELS, ["ndcg_cut_10"], plan="tree")
        assert list(filter(None, calls)) == [len(CANDIDATES)] * runs  # PyTerrier also passes empty frames, to validate
        pd.testing.assert_frame_equal(table, expected)


def test_a_tree_evaluates_both_of_two_equal_systems():
    systems = {name: FIRST_STAGE >> LOADER >> make("MaxP") for name in "ab"}
    table = pt.Experiment(systems, TOPICS, QRELS, ["ndcg_cut_10"], plan="tree")
    assert table["name"].tolist() == ["a", "b"]
    assert table["ndcg_cut_10"].nunique() == 1


def test_two_results_of_k_fold_fit_are_two_systems():
    recipe, folds = ld.TrainingArgs(max_steps=1), [[qid] for qid in TOPICS["qid"]]
    found = [k_fold_fit(make(name, training=recipe), CANDIDATES, QRELS, folds) for name in ("MaxP", "FirstP")]
    table = pt.Experiment([FIRST_STAGE >> LOADER >> models for models in found], TOPICS, QRELS, ["map"])
    assert table["map"].tolist() == [pt.Evaluate(models.run, QRELS, ["map"])["map"] for models in found]


def test_pipeline_operators_combine_the_scores_of_models(loaded, all_loaded):
    ours, theirs = by_pair(loaded(CANDIDATES)), by_pair(all_loaded["FirstP"](CANDIDATES))
    top = ((FIRST_STAGE >> LOADER >> loaded) % 2)(TOPICS)
    assert sorted(top["rank"]) == [0, 0, 1, 1]
    pd.testing.assert_series_equal(by_pair(top), ours.loc[by_pair(top).index], atol=1e-5)
    pd.testing.assert_series_equal(
        by_pair((2 * loaded + all_loaded["FirstP"])(CANDIDATES)), 2 * ours + theirs, atol=1e-5
    )
    features = (loaded ** all_loaded["FirstP"]).compile()(CANDIDATES).set_index(["qid", "docno"])["features"]
    np.testing.assert_allclose(np.stack(features.sort_index()), np.stack([ours, theirs], 1), atol=1e-5)


def test_a_sum_with_the_first_stage_adds_scores_and_keeps_explanations(results):
    first, model = pt.Transformer.from_df(results), make("MaxP", preselect=ld.BM25Windows(2), explain=True)
    neural = model(results)
    both = (2.5 * first + (first >> model))(TOPICS)
    assert set(both.columns) == set(neural.columns)
    assert len(both) == len(results)
    merged = both.merge(neural, on=["qid", "docno"], suffixes=("", "_neural"))
    first_stage = merged.merge(results, on=["qid", "docno"], suffixes=("", "_first"))["score_first"]
    np.testing.assert_allclose(merged["score"], 2.5 * first_stage + merged["score_neural"], atol=1e-6)
    assert merged["window_scores"].tolist() == merged["window_scores_neural"].tolist()
    assert merged["best_start"].dtype == "int64"


ADDING: dict[str, Callable[[], pt.Transformer]] = {
    **{name: partial(make, name, explain=True) for name in SYSTEMS},
    "Evidence": lambda: make("MaxSim", explain=True) >> ld.Evidence(),
    "Passages": lambda: make("MaxSim", explain=True) >> ld.Passages(),
    "RankGPT": lambda: ld.RankGPT(oracle),
    "RelevanceJudge": lambda: ld.RelevanceJudge(oracle),
    "TeacherScores": lambda: TeacherScores(make("MaxP")),
}
"""The transformers that add columns."""


def test_added_columns_are_not_query_columns(results, nothing_loads):
    for transformer in ADDING:
        out = ADDING[transformer]()(results.iloc[:0])
        assert sorted(pt.model.query_columns(out)) == ["qid", "query"]


def test_explained_passages_become_documents(results):
    passages = results.assign(docno=results["docno"] + "%p0")
    model = make("MaxSim", explain=True)
    out = (model >> pt.text.mean_passage())(passages)
    assert by_pair(out).to_dict() == pytest.approx(by_pair(model(results)).to_dict(), abs=1e-5)


def test_every_document_has_its_own_explanation_after_other_stages(results):
    explained = make("MaxSim", explain=True)(results)
    stages = pt.rewrite.stash_results() >> pt.apply.generic(pt.model.push_queries) >> pt.rewrite.reset_results()
    out = stages(explained)
    before, after = (frame.set_index(["qid", "docno"]) for frame in (explained, out))
    for name in explained.columns.difference(results.columns):
        assert after[name].to_dict() == before[name].to_dict()


SCORING: dict[str, Callable[[], pt.Transformer]] = {
    **{name: partial(make, name) for name in (*REPRESENTATIVE, "Birch")},
    "PairScorer": lambda: ld.MaxP(ld.PairScorer(lambda queries, texts: [0.0] * len(texts))),
    "RankGPT": lambda: ld.RankGPT(lambda messages: "[1] > [2] > [3]"),
}
"""The transformers that score."""


@pytest.fixture(scope="module")
def explained() -> pd.DataFrame:
    """Results with all columns of an explanation, and with others."""
    results = tiny.results().assign(note="mine", passage_span=[(0, 1)] * 5, evidence_spans=[[(0, 1)]] * 5)
    return make("MaxSim", explain=True)(results.assign(evidence_tokens=1, text=results["text"].fillna("")))


def test_an_explanation_adds_the_columns_in_explanation(explained):
    others = {*tiny.results(), "note", "passage_span", "evidence_spans", "evidence_tokens"}
    assert set(explained) - others == set(EXPLANATION)


@pytest.mark.parametrize("later", SCORING)
def test_new_scores_leave_out_the_columns_of_an_earlier_score(later, explained):
    model = SCORING[later]()
    for frame in (explained, explained.iloc[:0]):
        out = model(frame)
        assert set(out) == {*frame} - {*EXPLANATION}
        assert out["note"].tolist() == frame["note"].tolist()


@pytest.mark.parametrize("later", ["MaxP", "Birch"])
def test_an_explanation_only_describes_the_last_model(later, explained):
    model = make(later, explain=True)
    out, alone = model(explained), model(explained.drop(columns=list(EXPLANATION)))
    pd.testing.assert_frame_equal(out, alone)


def test_windows_of_an_earlier_model_are_not_evidence_of_a_later_one(results):
    out = (make("MaxP", explain=True) >> make("PARADE-attn"))(results)
    with pytest.raises(ValueError, match="explain=True"):
        ld.evidence_recall(out, results[["qid", "docno"]].assign(start=0, end=1))


@pytest.mark.parametrize(
    ("name", "parameter", "values"),
    [
        ("KMaxP", "weights", [None, [-1.0, -1.0, -1.0]]),
        ("SoftMaxP", "temperature", [0.01, 1.0, 100.0]),
        ("Birch", "first_stage_weight", [0.0, 0.5, 1.0]),
    ],
)
def test_grid_search_finds_the_best_value_of_an_argument(name, parameter, values):
    model = make(name)
    found, best, ((_, _, value),) = pt.GridSearch(
        FIRST_STAGE >> LOADER >> model, {model: {parameter: values}}, TOPICS, QRELS, metric="map", return_type="both"
    )
    alone = {}
    for candidate in values:
        fixed = FIRST_STAGE >> LOADER >> make(name, **{parameter: candidate})
        alone[str(candidate)] = pt.Experiment([fixed], TOPICS, QRELS, ["map"])["map"].item()
    assert alone[str(value)] == max(alone.values()) == pytest.approx(best)
    assert getattr(model, parameter) == value
    assert pt.Experiment([found], TOPICS, QRELS, ["map"])["map"].item() == pytest.approx(best)


def test_a_grid_over_two_equal_rerankers_tries_every_combination():
    models = [make("MaxP"), make("MaxP")]
    grid = {model: {"max_windows": values} for model, values in zip(models, ([1, 2], [1, 2, 3]), strict=True)}
    found = pt.GridScan(FIRST_STAGE >> LOADER >> (models[0] + models[1]), grid, TOPICS, QRELS, ["map"])
    tried = set(zip(found["tran_0_max_windows"], found["tran_1_max_windows"], strict=True))
    assert tried == {(first, second) for first in (1, 2) for second in (1, 2, 3)}


@pytest.mark.parametrize("name", slow_but(REPRESENTATIVE, TRAINABLE))
def test_fit_of_a_pipeline_trains_the_model(name):
    validated = TRAINABLE.index(name) % 2  # every second one with validation
    model = make(name, training=ld.TrainingArgs(epochs=2, margin=100.0, learning_rates={"": 1e-2}))
    before = scores(model, CANDIDATES)
    assert not model.is_trained
    pipeline = FIRST_STAGE >> LOADER >> model
    pipeline.fit(*(TOPICS, QRELS) * (1 + validated))
    columns = ["epoch", "step", "loss", "learning_rate", "documents_per_second", *(["validation"] if validated else [])]
    assert model.history.columns.tolist() == columns
    assert len(model.history) == 2
    assert model.is_trained
    assert not model.model.training
    after = scores(model, CANDIDATES)
    assert np.isfinite(after).all()
    assert np.abs(after - before).max() > 1e-3
    np.testing.assert_array_equal(scores(pipeline, TOPICS), after)


def test_fit_without_texts_is_refused():
    model, run = make("MaxP"), FIRST_STAGE(TOPICS)
    with pytest.raises(pt.validate.InputValidationError, match="text"):
        model.fit(run, QRELS)
    assert model._model is None


def test_a_model_reranks_results_of_terrier(terrier_index):
    stages = terrier_index.bm25() >> terrier_index.text_loader("text") >> make("MaxP")
    reranked = stages.search("dog river")
    assert set(reranked["docno"]) == {"d1", "d5"}
    assert reranked["text"].tolist() == [terrier.DOCUMENTS[docno] for docno in reranked["docno"]]


@pytest.mark.parametrize("loader", [lambda index: index, lambda index: index.text_loader("text")])
def test_a_document_that_the_index_lacks_is_refused_with_the_cure(loader, terrier_index):
    model = make("MaxP", text_loader=loader(terrier_index))
    for docnos in (["d9"], ["d1", "d2", "d9", "d3"], ["d9", "d1", "d8"]):
        with pytest.raises(ValueError, match="use the index of the candidates"):
            model(pd.DataFrame({"qid": "1", "query": "old dog", "docno": docnos}))


@pytest.mark.parametrize("union", [lambda a, b: a | b, lambda a, b: a & b])
def test_birch_is_refused_after_a_union_without_scores(union):
    first = pt.Transformer.from_df(tiny.results())
    with pytest.raises(pt.validate.InputValidationError, match="score"):
        (union(first, first) >> make("Birch"))(TOPICS)
