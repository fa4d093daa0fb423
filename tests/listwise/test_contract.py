"""RankGPT and the judge as PyTerrier transformers: frames, inspection, experiments, pickling, operators."""

from __future__ import annotations

import ast
import pickle
import subprocess
import sys
import unittest
from pathlib import Path

import numpy as np
import pandas as pd
import pyterrier as pt
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import pyterrier_longdoc
from pyterrier_longdoc.analysis.judging import RelevanceJudge
from pyterrier_longdoc.listwise import LLMClient, OpenAIBackend, Prices, RankGPT
from pyterrier_longdoc.listwise.rankgpt import REPORT_COLUMNS

from ..support import tiny
from ..support.llm import Scripted, candidates, oracle, shown

PACKAGE = Path(pyterrier_longdoc.__file__).parent
JUDGE_COLUMNS = ("label", "chunk_grades", "chunk_spans", "best_chunk", "judged_share")


def by_length(messages) -> str:
    """A model that can be pickled: prefers long texts, then the alphabet; as a judge it says 2."""
    documents = sorted(shown(messages), key=lambda one: (-len(one[1]), one[1]))
    return " > ".join(f"[{number}]" for number, _ in documents) or "grade: 2"


def nobody(messages) -> str:
    raise AssertionError("asked")


SYSTEMS = {
    "RankGPT": lambda llm: RankGPT(llm),
    "RankGPT-report": lambda llm: RankGPT(llm, report=True, window_size=2, stride=1, concurrency=2, shuffles=2),
    "RelevanceJudge": lambda llm: RelevanceJudge(llm),
}
RANKERS = [name for name in SYSTEMS if name.startswith("RankGPT")]


@pytest.fixture(params=SYSTEMS)
def make(request):
    return SYSTEMS[request.param]


@pytest.fixture(params=RANKERS)
def make_ranker(request):
    return SYSTEMS[request.param]


def new_columns(transformer) -> list[str]:
    if isinstance(transformer, RelevanceJudge):
        return list(JUDGE_COLUMNS)
    return ["score", *(REPORT_COLUMNS if transformer.report else ()), "rank"]


# Frames.


@pytest.mark.parametrize("extra", [[], ["title", "_x", "score", "rank"]])
def test_empty_frame(make, extra):
    transformer = make(nobody)
    out = transformer(pd.DataFrame(columns=["qid", "query", "docno", "text", *extra]))
    assert len(out) == 0
    assert set(out.columns) == {"qid", "query", "docno", "text", *extra, *new_columns(transformer)}
    assert len(out.columns) == len(set(out.columns))


def test_zero_columns(make):
    with pytest.raises(pt.validate.InputValidationError):
        make(nobody)(pd.DataFrame())


def test_empty_and_full_frames_give_the_same_columns_and_dtypes(make, results):
    transformer = make(by_length)
    empty, full = transformer(results.iloc[:0]), transformer(results)
    assert list(empty.columns) == list(full.columns)
    assert empty.dtypes[new_columns(transformer)].equals(full.dtypes[new_columns(transformer)])


def test_rows_columns_index_are_kept_and_input_is_unchanged(make, results):
    frame = results.assign(title="t", _x=1.5, label_of_user="l").set_index(pd.Index([7, 7, 0, 3, 3]))
    before = frame.copy(deep=True)
    transformer = make(by_length)
    out = transformer(frame)
    assert frame.equals(before)
    assert out.index.tolist() == frame.index.tolist()
    kept = [column for column in frame.columns if column not in new_columns(transformer)]
    pd.testing.assert_frame_equal(out[kept], frame[kept])


def test_scores_and_ranks(make_ranker, results):
    out = make_ranker(by_length)(results)
    assert (out["score"].dtype, out["rank"].dtype) == (np.float64, np.int64)
    for _, query in out.groupby("qid"):
        assert sorted(query["score"]) == list(range(1, len(query) + 1))
        assert (query["score"] + query["rank"] == len(query)).all()


def test_row_order_does_not_matter(make, results):
    transformer = make(by_length)
    out = transformer(results)
    for seed in range(3):
        mixed = transformer(results.sample(frac=1, random_state=seed))
        pd.testing.assert_frame_equal(mixed.sort_index(), out, check_dtype=False)


def test_transform_gen(make_ranker, results):
    ranker, frame = make_ranker(by_length), results.sort_values("qid", kind="stable")
    batches = pd.concat(list(ranker.transform_gen(frame, batch_size=1)))
    assert batches["score"].tolist() == ranker(frame)["score"].tolist()


def test_duplicate_rows_are_one_document(make_ranker, results):
    out = make_ranker(by_length)(pd.concat([results, results.iloc[[0, 3]]]))
    assert out["score"].iloc[5:].tolist() == out["score"].iloc[[0, 3]].tolist()
    single = make_ranker(by_length)(results)
    assert out["score"].iloc[:5].tolist() == single["score"].tolist()


def test_a_docno_with_several_texts_is_several_documents():
    frame = pd.DataFrame({"qid": "1", "query": "q", "docno": "d", "text": ["a", "bbb", "cc"]})
    assert RankGPT(by_length)(frame)["score"].tolist() == [1.0, 3.0, 2.0]


def test_integer_qids_and_narrow_dtypes(make, results):
    frame = results.assign(qid=results["qid"].astype(int), score=results["score"].astype("float32"))
    out = make(by_length)(frame.assign(rank=frame["rank"].astype("int32")))
    expected = make(by_length)(results)
    for column in {"score", "label"} & set(out.columns):
        assert out[column].astype(float).tolist() == expected[column].astype(float).tolist()
    assert out["qid"].tolist() == frame["qid"].tolist()


def test_missing_text_counts_as_empty(make, results):
    transformer = make(by_length)
    pd.testing.assert_frame_equal(
        transformer(results).drop(columns="text"), transformer(results.fillna({"text": ""})).drop(columns="text")
    )


def test_text_columns_and_loader(make, results):
    cut = results["text"].str[:20]
    joined = make(by_length)
    joined.text_field = ("title", "body")
    whole = make(by_length)(results.assign(text=("T " + cut.fillna("")).str.strip()))
    out = joined(results.drop(columns="text").assign(title="T", body=cut))
    column = "score" if "score" in whole and "label" not in whole else "label"
    assert out[column].tolist() == whole[column].tolist()
    loading = make(by_length)
    loading.text_loader = pt.apply.generic(lambda frame: frame.assign(text=results["text"].tolist()))
    assert loading(results.drop(columns="text"))[column].tolist() == make(by_length)(results)[column].tolist()


def test_missing_text_column_and_bytes_are_explained(make, results):
    with pytest.raises(pt.validate.InputValidationError, match="needs the text of the documents"):
        make(nobody)(results.drop(columns="text"))
    with pytest.raises(ValueError, match="column 'text' holds bytes"):
        make(nobody)(results.assign(text=[b"x"] * 5))


def test_a_qid_with_two_queries_is_refused(make_ranker, results):
    with pytest.raises(ValueError, match="qid '1' has several texts in column 'query'"):
        make_ranker(nobody)(results.assign(query=list("abcde")))


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.lists(
        st.tuples(st.sampled_from("ab"), st.sampled_from("xyz"), st.text(max_size=20), st.floats(-5, 5)), max_size=12
    )
)
def test_any_frame_is_ranked(make_ranker, rows):
    frame = pd.DataFrame(rows, columns=["qid", "docno", "text", "score"]).assign(query="q")
    out = make_ranker(by_length)(frame)
    assert np.isfinite(out["score"].astype(float)).all()
    for _, query in out.groupby("qid"):
        documents = len(query.drop_duplicates(["docno", "text"]))
        assert query["score"].nunique() == documents
        assert query["score"].max() == documents


# PyTerrier.


@pytest.mark.parametrize("name", SYSTEMS)
def test_pyterrier_test_case(name):
    case = pt.testing.transformer_test_class(lambda: SYSTEMS[name](nobody))
    outcome = unittest.TestResult()
    unittest.defaultTestLoader.loadTestsFromTestCase(case).run(outcome)
    assert outcome.testsRun == 2
    assert not outcome.failures + outcome.errors


def test_inspection_asks_nothing(make):
    transformer = make(nobody)
    assert pt.inspect.transformer_inputs(transformer) == [["qid", "docno", "query", "text"]]
    columns = pt.inspect.transformer_outputs(transformer, ["qid", "query", "docno", "text"])
    assert columns == ["qid", "query", "docno", "text", *new_columns(transformer)]
    attributes = {attribute.name: attribute.value for attribute in pt.inspect.transformer_attributes(transformer)}
    assert attributes["llm"] is nobody
    assert pt.inspect.transformer_apply_attributes(transformer, retries=0).retries == 0
    assert pt.inspect.subtransformers(transformer) == {}


def test_pickle(make, results):
    transformer = make(by_length)
    fresh = pickle.dumps(transformer)
    out = transformer(results)
    for pickled in (fresh, pickle.dumps(transformer)):
        pd.testing.assert_frame_equal(pickle.loads(pickled)(results), out)


def test_names_are_short_and_tell_settings_apart():
    assert repr(RankGPT(oracle)) == "RankGPT(CallableBackend(tests.support.llm.oracle))"
    client = LLMClient(OpenAIBackend("gpt-x"), prices=Prices(1, 1))
    assert repr(RankGPT(client, max_doc_tokens=512)) == "RankGPT(OpenAIBackend('gpt-x'), max_doc_tokens=512)"
    assert repr(RelevanceJudge(oracle)) == "RelevanceJudge(CallableBackend(tests.support.llm.oracle))"


RUN = candidates(queries=3, documents=6)
TOPICS = RUN[["qid", "query"]].drop_duplicates()
FIRST_STAGE = pt.Transformer.from_df(RUN[["qid", "docno", "score", "rank"]])
LOADER = pt.apply.generic(lambda frame: frame.merge(RUN[["qid", "docno", "text"]], on=["qid", "docno"], how="left"))
QRELS = pd.DataFrame({"qid": ["q0", "q1", "q2"], "docno": ["d1", "d2", "d3"], "label": [1, 2, 1]})


def test_experiment_plans_agree():
    loaded = FIRST_STAGE >> LOADER
    systems = [loaded >> RankGPT(oracle), loaded >> RankGPT(oracle, window_size=3, stride=1), loaded]
    tables = [
        pt.Experiment(
            systems, TOPICS, QRELS, ["ndcg_cut_10", "recip_rank"], plan=plan, batch_size=size, validate="error"
        )
        for plan, size in (("linear", None), ("tree", None), ("linear", 1))
    ]
    pd.testing.assert_frame_equal(tables[0], tables[1])
    pd.testing.assert_frame_equal(tables[0], tables[2])


def test_operators():
    ranker, other = RankGPT(oracle), RankGPT(by_length)
    scores = {one: one(RUN).set_index(["qid", "docno"])["score"].sort_index() for one in (ranker, other)}
    top = ((FIRST_STAGE >> LOADER >> ranker) % 2)(TOPICS)
    assert top.groupby("qid")["rank"].apply(sorted).tolist() == [[0, 1]] * 3
    total = (ranker + other)(RUN).set_index(["qid", "docno"])["score"].sort_index()
    assert total.tolist() == (scores[ranker] + scores[other]).tolist()
    features = (ranker**other)(RUN).set_index(["qid", "docno"])["features"].sort_index()
    assert [list(row) for row in features] == [list(row) for row in zip(scores[ranker], scores[other], strict=True)]
    assert len((ranker % 2 ^ other)(RUN)) == len(RUN)
    assert len((ranker % 2 | other % 2)(RUN)) >= 6


def test_grid_search_changes_settings():
    ranker = RankGPT(oracle)
    pipeline = FIRST_STAGE >> LOADER >> ranker
    pt.GridSearch(pipeline, {ranker: {"top_k": [2, 6]}}, TOPICS, QRELS, metric="map")
    assert ranker.top_k in (2, 6)


def test_progress_only_if_verbose(make, results, capsys):
    make(by_length)(results)
    assert capsys.readouterr().err == ""
    transformer = make(by_length)
    transformer.verbose = True
    transformer(results)
    assert "100%" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"window_size": 1}, "window_size=1 must be at least 2"),
        ({"stride": 0}, "stride=0 must be at least 1"),
        ({"window_size": 5, "stride": 5}, "stride=5 must be smaller than window_size=5"),
        ({"top_k": 0}, "top_k=0 must be at least 1, or None"),
        ({"max_doc_tokens": 0}, "max_doc_tokens=0 must be"),
        ({"max_prompt_tokens": -1}, "max_prompt_tokens=-1 must be"),
        ({"retries": -1}, "retries=-1 must be"),
        ({"shuffles": -1}, "shuffles=-1 must be"),
        ({"concurrency": 0}, "concurrency=0 must be"),
        ({"on_failure": "nan"}, "on_failure='nan' is unknown; choose one of raise, keep, nan-free-bottom"),
        ({"prompt": "rank!"}, "prompt='rank!' must be"),
        ({"text_field": ""}, "text_field=''"),
        ({"llm": "gpt-4o"}, "llm='gpt-4o' must be a backend, an LLMClient, or a function"),
    ],
)
def test_wrong_arguments(arguments, message, results):
    with pytest.raises(ValueError, match=message):
        RankGPT(**{"llm": nobody, **arguments})
    later = RankGPT(nobody)
    for name, value in arguments.items():
        setattr(later, name, value)
    with pytest.raises(ValueError, match=message):
        later(results)


def test_a_function_must_return_text(results):
    with pytest.raises(TypeError, match=r"returned int; it must return a string or a Reply"):
        RankGPT(Scripted(lambda messages: 3))(results)


def test_one_truncation_warning(results):
    ranker = RankGPT(by_length, max_doc_tokens=3)
    with pytest.warns(UserWarning, match="did not read all of the text"):
        ranker(results)
    assert ranker(results)["rank"].tolist() is not None
    assert ranker.coverage.queries == 2
    assert ranker.coverage.documents == 3  # distinct texts


def test_long_documents_of_tiny_tokenizer_are_cut_by_its_tokens(results):
    ranker = RankGPT(by_length, max_doc_tokens=5, tokenizer=tiny.tokenizer())
    with pytest.warns(UserWarning, match="did not read all of the text"):
        ranker(results)
    assert ranker.coverage.tokens_read == 5 + 3 + 0


# The package.


def test_imports_are_light():
    forbidden = {"torch", "transformers", "openai", "anthropic", "tenacity", "sklearn", "heads", "encoder"}
    for file in [*(PACKAGE / "listwise").rglob("*.py"), PACKAGE / "analysis" / "judging.py"]:
        for node in ast.parse(file.read_text(encoding="utf-8")).body:
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) and node.level != 1 else []
            assert not forbidden & {part for name in names for part in name.split(".")}, file


def test_import_loads_neither_torch_nor_clients():
    # devices.py, which frames.py imports, is a module about torch.
    code = (
        "import sys, types\n"
        "stub = sys.modules['pyterrier_longdoc.modelling.devices'] = types.ModuleType('devices')\n"
        "stub.resolve_dtype = stub.resolve_device = stub.fastest_dtype = None\n"
        "import pyterrier_longdoc.listwise, pyterrier_longdoc.analysis.judging\n"
        "heavy = ('torch', 'transformers', 'openai', 'anthropic', 'tenacity', 'sklearn')\n"
        "print([name for name in heavy if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_missing_libraries_name_the_extra(monkeypatch, results):
    monkeypatch.setitem(sys.modules, "openai", None)
    monkeypatch.setitem(sys.modules, "anthropic", None)
    from pyterrier_longdoc.listwise import AnthropicBackend

    for backend in (OpenAIBackend("x", base_url="http://127.0.0.1:9"), AnthropicBackend("x")):
        with pytest.raises(ImportError, match=r"pip install 'pyterrier-longdoc\[llm\]'"):
            RankGPT(backend)(results)
