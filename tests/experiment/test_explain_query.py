"""One query of an experiment: values, ranks as trec_eval has them, windows of systems that are run again."""

from __future__ import annotations

import ir_measures
import numpy as np
import pandas as pd
import pyterrier as pt
import pytest

import pyterrier_longdoc as ld
from pyterrier_longdoc.experiment import ExperimentResults, Statistics
from pyterrier_longdoc.experiment.explain_query import with_ranks
from pyterrier_longdoc.training import FoldModels

from ..support.systems import QUIET, make
from ..support.tiny import longer_results

pytestmark = [*QUIET, pytest.mark.filterwarnings("ignore::pyterrier_longdoc.experiment.ExperimentWarning")]

CANDIDATES = longer_results()
TOPICS = CANDIDATES[["qid", "query"]].drop_duplicates()
QRELS = pd.DataFrame(
    {"qid": ["1", "1", "q1", "q1", "q0"], "docno": ["d2", "d9", "d3", "d1", "d1"], "label": [1, 2, 1, 2, 0]}
)
FIRST = pt.Transformer.from_df(CANDIDATES)


@pytest.fixture(scope="module")
def systems():
    maxp, bi = make("MaxP", score_cache=None), make("BiEncoder-max")
    return {
        "first": FIRST,
        "MaxP": FIRST >> maxp,
        "PARADE": FIRST >> make("PARADE-attn"),
        "sum": FIRST + (FIRST >> bi),
        "run": CANDIDATES.loc[CANDIDATES["qid"] != "q1", ["qid", "docno", "score"]],
    }


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("experiment")


@pytest.fixture(scope="module")
def results(systems, folder):
    return ld.Experiment(systems, TOPICS, QRELS, ["nDCG@10", "RR"], baseline="first", save_dir=folder)


def test_a_query_has_values_and_differences_from_the_baseline(results):
    told = results.why("q1")
    perquery = results.perquery.query("qid == 'q1'").pivot(index="name", columns="measure", values="value")
    for measure in ("nDCG@10", "RR"):
        assert told.values[measure].to_dict() == perquery[measure].to_dict()
        expected = (perquery[measure] - perquery[measure]["first"]).to_dict()
        assert told.values[f"{measure} - first"].to_dict() == expected
    best, worst = told.differences()[0].split("worst")
    assert all(name in best for name in perquery.index[perquery["nDCG@10"] == perquery["nDCG@10"].max()])
    assert "run (0.000)" in worst
    assert all("every system" in difference for difference in results.why("q0").differences())


def test_a_query_has_the_ranks_of_its_relevant_documents(results, systems):
    told = results.why("q1")
    assert told.relevant["docno"].tolist() == ["d1", "d3"]  # the higher label first
    assert told.relevant["label"].tolist() == [2, 1]
    scored = systems["MaxP"].transform(TOPICS).query("qid == 'q1'").set_index("docno")
    assert told.relevant["MaxP"].tolist() == scored.loc[["d1", "d3"], "rank"].tolist()
    assert told.relevant["run"].isna().all()
    assert any("run returned nothing" in note for note in told.notes)
    assert pd.isna(results.why("1").relevant.set_index("docno").loc["d9", "MaxP"])  # not among the candidates


def test_a_query_missing_from_a_run_has_no_ranks():
    found = with_ranks(pd.DataFrame({"qid": ["2"], "docno": ["d1"]}), {"1": (np.array(["d1"]), np.ones(1))})
    assert found[["rank", "tied"]].isna().all(axis=None)


@pytest.mark.parametrize("seed", range(5))
def test_ranks_are_those_of_trec_eval_where_scores_are_tied(seed):
    rng = np.random.default_rng(seed)
    docnos = np.array([f"d{i}" for i in rng.permutation(30)], dtype=object)
    scores = rng.integers(0, 6, 30) + rng.integers(0, 2, 30) * 1e-9  # in float32 the small difference is none
    documents = pd.DataFrame({"qid": "1", "docno": docnos})
    found = with_ranks(documents, {"1": (docnos, scores)})
    assert found["tied"].all()
    assert sorted(found["rank"]) == list(range(30))
    run = {"1": dict(zip(docnos, scores.tolist(), strict=True))}
    for docno, rank in zip(found["docno"], found["rank"], strict=True):
        [metric] = ir_measures.iter_calc([ir_measures.RR], {"1": {docno: 1}}, run)
        assert metric.value == pytest.approx(1 / (rank + 1))


def test_best_windows_are_those_of_explain_true(results, systems):
    told = results.why("q1", systems, top=1)
    for name in ("MaxP", "PARADE"):
        [_, model] = systems[name]
        assert not model.explain
        scored = model.apply_attributes(explain=True)(CANDIDATES.query("qid == 'q1'")).set_index("docno")
        rows = told.windows[told.windows["name"] == name].set_index("docno")
        assert set(rows.index) == {"d1", "d3", *scored.index[scored["rank"] == 0]}
        for docno, row in rows.iterrows():
            expected = scored.loc[docno]
            best = int(np.argmax(expected["window_scores"]))
            assert (row["window"], row["windows"]) == (best + 1, len(expected["window_scores"]))
            assert row["window_score"] == pytest.approx(expected["window_scores"][best], abs=1e-5)
            assert row["text"] == expected["text"][expected["best_start"] : expected["best_end"]]
            assert (row["rank"], row["label"]) == (expected["rank"], {"d1": 2, "d3": 1}.get(docno, 0))
            weight = np.nan if expected["window_weights"] is None else expected["window_weights"][best]
            assert row["weight"] == pytest.approx(weight, abs=1e-5, nan_ok=True)


def test_systems_without_windows_are_noted(results, systems):
    told = results.why("q1", systems)
    assert set(told.windows["name"]) == {"MaxP", "PARADE", "sum"}
    noted = [note.split(":")[0] for note in told.notes if "no windows" in note]
    assert noted == ["first", "run"]


def test_an_explanation_is_printed_with_all_tables_and_notes(results, systems):
    told = results.why("q1", systems)
    assert all(part in repr(told) for part in (*told.differences(), "best windows", *told.notes))
    assert told._repr_html_().count("<table") == 3


def test_explaining_a_query_does_not_change_the_systems(results, systems, tmp_path):
    model = make("MaxP", score_cache=tmp_path / "scores.sqlite", max_windows=1)
    results.why("1", {"MaxP": FIRST >> model})
    assert (model.coverage, model.explain, model.warned) == (None, False, set())
    assert not (tmp_path / "scores.sqlite").exists()


def test_another_system_of_the_same_name_is_noted(results, systems):
    other = FIRST >> pt.apply.query(lambda row: "river fish") >> make("MaxP")
    reversed_ranks = pt.apply.doc_score(lambda row: -float(row["score"]))
    assert any("differently" in note for note in results.why("q1", {"MaxP": other >> reversed_ranks}).notes)
    assert not any("differently" in note for note in results.why("q1", {"MaxP": systems["MaxP"]}).notes)


def test_loaded_results_explain_a_query_in_the_same_way(results, systems, folder):
    loaded = ExperimentResults.load(folder)
    for qid in results.qids:
        for given in (None, systems):
            told, expected = loaded.why(qid, given), results.why(qid, given)
            assert repr(told) == repr(expected)
            pd.testing.assert_frame_equal(told.values, expected.values)
            pd.testing.assert_frame_equal(told.relevant, expected.relevant, check_dtype=False)
            pd.testing.assert_frame_equal(told.windows, expected.windows, check_dtype=False)
    assert loaded.retest(baseline="MaxP").subset(["q1"]).why("q1").relevant.equals(loaded.why("q1").relevant)


def test_notes_say_which_information_is_missing(results):
    assert "no document is judged relevant" in results.why("q0").notes[0]
    assert results.why("q1").windows.empty
    assert any("why('q1'," in note for note in results.why("q1").notes)
    by_hand = ExperimentResults({"a": np.ones((1, 1, 1))}, {"a": [None]}, ["7"], ["AP"], Statistics()).why(7)
    assert by_hand.values["AP"].tolist() == [1.0]
    assert len(by_hand.notes) == 1


def test_unknown_queries_are_refused(results):
    with pytest.raises(ValueError, match="zzz"):
        results.why("zzz")
    with pytest.raises(ValueError, match="systems="):
        results.why("q1", ["MaxP"])


def test_with_several_seeds_ranks_are_those_of_the_first():
    runs = [CANDIDATES, CANDIDATES.assign(score=-CANDIDATES["score"])]
    results = ld.Experiment({"seeded": runs, "first": FIRST}, TOPICS, QRELS, ["RR"], seeds=[3, 4])
    told = results.why("q1")
    assert told.relevant["seeded"].tolist() == told.relevant["first"].tolist()
    assert any("seeded (3)" in note for note in told.notes)


def test_systems_with_a_language_model_are_not_run_again():
    asked = []
    judge = ld.RankGPT(lambda messages: asked.append(messages) or "[1] > [2] > [3] > [4]", on_failure="keep")
    pipeline = FIRST >> make("MaxP") >> judge
    results = ld.Experiment({"both": pipeline}, TOPICS, QRELS, ["RR"])
    asked.clear()
    assert any("language model" in note for note in results.why("q1", {"both": pipeline}).notes)
    assert not asked


def test_with_several_rerankers_windows_are_those_of_the_last(results):
    model = make("PARADE-attn")
    two, one = (
        results.why("q1", {"both": first >> model}, top=4).windows for first in (FIRST >> make("FirstP"), FIRST)
    )
    columns = ["docno", "window", "window_score", "text"]
    pd.testing.assert_frame_equal(two[columns], one[columns], atol=1e-5)


def test_models_of_a_cross_validation_show_their_windows(results):
    one, other = make("FirstP"), make("MaxP")
    folds = FoldModels([one, other], [["1", "q0"], ["2", "q1", "q2"]], CANDIDATES)
    for qid in ("1", "q1"):
        assert len(results.why(qid, {"MaxP": FIRST >> folds}).windows)
    for each in (one, other):
        assert (each.explain, each.warned) == (False, set())


def test_results_without_the_columns_of_explain_have_no_windows(results):
    dropped = FIRST >> make("MaxP") >> pt.apply.generic(lambda frame: frame[["qid", "docno", "score", "rank"]])
    assert results.why("q1", {"MaxP": dropped}).windows.empty

    class Kept(pt.Transformer):
        model = make("MaxP")

        def transform(self, inp):
            return CANDIDATES[CANDIDATES["qid"].isin(inp["qid"])]

        def subtransformers(self):
            return {"model": self.model}

    assert results.why("q1", {"MaxP": Kept()}).windows.empty


def test_windows_of_an_earlier_text_are_not_shown(results):
    for later in (ld.Evidence(25), ld.Passages(ld.SlidingWindows(10, 10))):
        assert results.why("q1", {"MaxP": FIRST >> make("MaxP", explain=True) >> later}).windows.empty
