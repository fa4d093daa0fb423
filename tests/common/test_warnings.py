"""Warnings name the user's line, and each model gives them once."""

from __future__ import annotations

import warnings

import pandas as pd
import pyterrier as pt
import pytest

import pyterrier_longdoc as ld
from pyterrier_longdoc.training import k_fold_fit

from ..support import terrier
from ..support.systems import make, told_of

QUERY = "old dog in the city snow in the city old dog"  # 11 tokens, of which 8 are read
TOPICS = pd.DataFrame({"qid": list("123"), "query": [f"{QUERY} {word}" for word in ("cat", "river", "rain")]})
CANDIDATES = pd.DataFrame(
    [
        (qid, query, f"d{i}", f"a {word} fish", 2.0 - i, i)
        for qid, query in TOPICS.values
        for i, word in enumerate("ab")
    ],
    columns=["qid", "query", "docno", "text", "score", "rank"],
)
QRELS = pd.DataFrame({"qid": list("123"), "docno": ["d0", "d1", "d0"], "label": 1})
RUN = pt.Transformer.from_df(CANDIDATES)
TRAINING = ld.TrainingArgs(max_steps=1)


def told(what) -> list[str]:
    return told_of(ld.TruncationWarning, what)


def experiment(systems, **arguments) -> pd.DataFrame:
    return pt.Experiment(systems, TOPICS, QRELS, ["map"], **arguments)


def test_a_model_gives_a_warning_once():
    model = make("MaxP")
    message = "MaxP did not read all text: some was truncated by max_query_len=8 (see .coverage)."
    assert told(lambda: model(CANDIDATES)) == [message]
    assert told(lambda: model(CANDIDATES)) == []
    assert told(lambda: make("MaxP")(CANDIDATES)) == [message]


def test_systems_that_share_a_model_warn_once():
    model = make("MaxP")
    assert len(told(lambda: experiment({"all": RUN >> model, "best": RUN % 1 >> model}, batch_size=1))) == 1


def test_each_model_of_seeds_and_folds_warns_separately():
    seeds = {str(seed): RUN >> make("MaxP", seed=seed) for seed in range(3)}
    assert len(told(lambda: experiment(seeds))) == 3
    folds = [["1"], ["2"], ["3"]]
    fitted = []
    fit = told(lambda: fitted.append(k_fold_fit(make("MaxP", training=TRAINING), CANDIDATES, QRELS, folds)))
    assert sorted(message.partition(" did not")[0] for message in fit) == ["MaxP"] * 3 + ["MaxP in fit"] * 3
    assert told(lambda: fitted[0](CANDIDATES)) == []


def test_another_cause_of_truncation_causes_another_warning():
    long, model = CANDIDATES.assign(text="the cat and the dog walk to the river " * 5), make("FirstP")
    assert len(told(lambda: model(CANDIDATES))) == 1
    [message] = told(lambda: model(long))
    assert "truncated by window_size=20" in message


def test_each_type_of_model_in_a_system_warns(plain_encoder):
    def untrained(name):
        return make(name, plain_encoder, max_query_len=32)

    system = RUN >> untrained("FirstP") >> untrained("MaxP") >> untrained("MaxP")
    messages = told_of(ld.UntrainedWarning, lambda: experiment({"both": system}))
    assert [message.partition(" has")[0] for message in messages] == ["FirstP", "MaxP", "MaxP"]


def run_through_the_users_function():
    return (RUN >> pt.apply.generic(lambda frame: make("MaxP")(frame)))(TOPICS)


@pytest.mark.parametrize(
    "what",
    [
        lambda: make("MaxP")(CANDIDATES),
        lambda: (RUN + (RUN >> make("MaxP"))).search(QUERY),
        lambda: (RUN >> make("MaxP", training=TRAINING)).fit(TOPICS, QRELS),
        lambda: experiment({"MaxP": RUN >> make("MaxP")}),
        lambda: (RUN >> ld.RankGPT(lambda messages: "[1] > [2]", max_doc_len=1))(TOPICS),
        run_through_the_users_function,
    ],
)
def test_warnings_point_to_the_line_of_the_user(what):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        what()
    assert any(w.category is ld.TruncationWarning for w in caught)
    assert {w.filename for w in caught if issubclass(w.category, UserWarning)} == {__file__}


# Queries that are no words, and texts that an index has cut.

READERS = {
    "MaxP": lambda **arguments: make("MaxP", **arguments),
    "BiEncoder": lambda **arguments: make("BiEncoder-max", **arguments),
    "RankGPT": lambda **arguments: ld.RankGPT(lambda messages: "[1]", on_failure="keep", **arguments),
    "RelevanceJudge": lambda **arguments: ld.RelevanceJudge(lambda messages: "grade: 1", **arguments),
}
each_reader = pytest.mark.parametrize("reader", READERS)


def inputs(what) -> list[str]:
    """The warnings of queries or texts that are not what they should be."""
    return [message for message in told_of(UserWarning, what) if "pt.rewrite.reset()" in message or "`meta`" in message]


EXPANDED = "applypipeline:off kennedi^1.000000000 dog^0.210000"


@each_reader
def test_query_language_causes_a_warning(reader):
    model, expanded = READERS[reader](), CANDIDATES.assign(query=EXPANDED)
    [message] = inputs(lambda: model(expanded))
    assert "reads Terrier's query syntax ('applypipeline:') as plain words: put pt.rewrite.reset() after" in message
    assert inputs(lambda: model(expanded)) == []


def test_query_language_causes_a_warning_in_fit():
    expanded = CANDIDATES.assign(query=EXPANDED)
    assert len(inputs(lambda: make("MaxP", training=TRAINING).fit(expanded, QRELS))) == 1


def test_questions_cause_no_warning_about_query_language():
    for query in [
        "who owns C^2",
        "the #1 song",
        "#uw in Seattle (Washington)",
        "what is applypipeline:off",
        "combine:0 and #combine",
        "old^1.5 dog",
    ]:
        assert inputs(lambda query=query: make("MaxP")(CANDIDATES.assign(query=query, query_0="old dog"))) == []


def expansions(index) -> dict[str, pt.Transformer]:
    bm25 = index.bm25()
    return {
        "Bo1": bm25 >> pt.rewrite.Bo1QueryExpansion(index),
        "KL": bm25 >> pt.rewrite.KLQueryExpansion(index),
        "RM3": bm25 >> pt.rewrite.RM3(index),
        "SDM": pt.rewrite.SDM(),
    }


@pytest.mark.parametrize("expansion", ["Bo1", "KL", "RM3", "SDM"])
@pytest.mark.parametrize("resets", [False, True])
def test_queries_expanded_by_terrier_cause_a_warning_unless_reset(expansion, resets, terrier_index):
    stages = expansions(terrier_index)[expansion] >> terrier_index.bm25() >> terrier_index.text_loader("text")
    stages = (stages >> pt.rewrite.reset() if resets else stages) >> make("MaxP")
    assert len(inputs(lambda: stages.search("dog river walk"))) == (0 if resets else 1)


def of_lengths(*lengths: int) -> pd.DataFrame:
    """Candidates of one query, with texts of so many characters, as they come from Terrier."""
    rows = [("1", "old dog", f"d{i}", i, f"{i:03} " + "a " * n, 1.0) for i, n in enumerate(lengths)]
    frame = pd.DataFrame(rows, columns=["qid", "query", "docno", "docid", "text", "score"])
    return frame.assign(text=[text[:n] for text, n in zip(frame["text"], lengths, strict=True)])


CUT = of_lengths(4095, 4094, 4093, 4092, 900)


@each_reader
def test_texts_of_equal_length_cause_a_warning(reader):
    model = READERS[reader]()
    [message] = inputs(lambda: model(CUT))
    assert "several texts end at character 4,095" in message


def test_texts_of_equal_length_cause_a_warning_in_fit():
    qrels = pd.DataFrame({"qid": ["1"], "docno": ["d0"], "label": [1]})
    recipe = ld.TrainingArgs(max_steps=1, negatives=4)
    assert len(inputs(lambda: make("MaxP", training=recipe).fit(CUT, qrels))) == 1


def test_texts_that_were_not_truncated_by_an_index_cause_no_warning():
    for frame in [
        CUT.drop(columns="docid"),
        of_lengths(499, 499, 499, 499),
        of_lengths(4095, 4094, 4092, 4092),
        CUT.assign(text=CUT["text"].iloc[0]),
        CUT.assign(docno=CUT["docno"] + "%p0"),
    ]:
        assert inputs(lambda frame=frame: make("MaxP")(frame)) == []


@pytest.mark.filterwarnings("ignore")
def test_texts_truncated_by_a_terrier_index_cause_a_warning(terrier_started, tmp_path):
    documents = {f"d{i}": f"dog {i} " + "river " * (150 + i) for i in range(4)} | {"short": "dog"}
    index = terrier.index(tmp_path / "index", documents, text=600)
    run = index.bm25().search("dog")
    for candidates, loader in ((run, index), (run.drop(columns="docid"), index.text_loader("text"))):
        [message] = inputs(lambda: make("MaxP", text_loader=loader)(candidates))  # noqa: B023 - called at once
        assert "texts end at character 59" in message
