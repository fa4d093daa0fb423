"""Saved runs are taken from the same pipeline only."""

from functools import partial

import numpy as np
import pyterrier as pt
import pytest

import pyterrier_longdoc as ld
from pyterrier_longdoc.experiment import Experiment
from pyterrier_longdoc.training import TrainingArgs

from ..support import own, synthetic
from ..support.systems import make
from ..support.toy import toy_task

TOPICS, QRELS = synthetic.collection()
RUN = synthetic.run(TOPICS, 1.0, 0)
SOME = pt.Transformer.from_df(RUN)
TEXTS, JUDGED = toy_task(0, queries=6)
ASKED = TEXTS[["qid", "query"]].drop_duplicates()
TRAINING = TrainingArgs(queries_per_step=1, learning_rates={"": 1e-2}, epochs=3)

pytestmark = pytest.mark.filterwarnings("ignore::pyterrier_longdoc.experiment.ExperimentWarning")


def value_of(folder, system, topics=TOPICS, qrels=QRELS, **options):
    return Experiment({"a": system}, topics, qrels, ["AP"], save_dir=folder, **options).means.loc["a", "AP"]


def map_of(frame):
    return pytest.approx(pt.Evaluate(frame, JUDGED, ["map"])["map"])


def test_a_saved_run_is_not_reused_for_other_weights(tmp_path, cross_encoder):
    model = make("MaxP", cross_encoder, training=TRAINING)
    texts = pt.Transformer.from_df(TEXTS)
    before = value_of(tmp_path, texts >> model, ASKED, JUDGED)
    (texts >> model).fit(ASKED, JUDGED)
    after = value_of(tmp_path, texts >> model, ASKED, JUDGED)
    assert after == map_of(model(TEXTS)) != before
    again = value_of(tmp_path, texts >> make("MaxP", cross_encoder, training=TRAINING), ASKED, JUDGED)
    assert again == before


def test_a_saved_run_is_reused_for_the_same_model(tmp_path, cross_encoder, monkeypatch):
    texts = pt.Transformer.from_df(TEXTS)
    model = make("MaxP", cross_encoder, training=TRAINING).fit(TEXTS, JUDGED)
    before = value_of(tmp_path / "runs", texts >> model, ASKED, JUDGED)
    model.save(tmp_path / "model")
    loaded = ld.MaxP.load(tmp_path / "model", training=TRAINING)
    monkeypatch.setattr(ld.MaxP, "transform", None)
    for system in (texts >> loaded, lambda: texts >> loaded):  # a function is called, what it makes is not run
        assert value_of(tmp_path / "runs", system, ASKED, JUDGED) == before


@pytest.mark.parametrize("kind", own.EDITED)
def test_runs_that_depend_on_user_code_are_computed_again(kind, tmp_path, cross_encoder):
    make_edited, _ = own.EDITED[kind]
    texts = pt.Transformer.from_df(TEXTS)
    values = []
    for sign in (1, -1):
        model = make_edited(sign, cross_encoder)
        for system in (texts >> model, partial(lambda model: texts >> model, model)):
            values.append(value_of(tmp_path, system, ASKED, JUDGED))
            assert values[-1] == map_of(model(TEXTS))
    assert values[0] != values[-1]


def scorer(sign):
    def edited(queries, texts):
        return [sign * float(len(text)) for text in texts]

    return edited


@pytest.mark.parametrize("wrapped", [False, True])
def test_runs_of_an_edited_function_that_scores_pairs_are_computed_again(wrapped, tmp_path):
    texts, values = pt.Transformer.from_df(TEXTS), []
    for sign in (1, -1):
        function = pt.apply.doc_score(lambda row, sign=sign: sign * len(row["text"])) if wrapped else scorer(sign)
        model = ld.MaxP(ld.PairScorer(function), window_size=5, stride=5)
        values.append(value_of(tmp_path, texts >> model, ASKED, JUDGED))
        assert values[-1] == map_of(model(TEXTS))
    assert values[0] != values[1]


def test_a_function_that_scores_pairs_is_known_by_its_name(tmp_path):
    texts = pt.Transformer.from_df(TEXTS)
    expected = [map_of(ld.MaxP(ld.PairScorer(scorer(sign)), window_size=5, stride=5)(TEXTS)) for sign in (1, -1)]
    for sign, name, index in ((1, "a", 0), (-1, "a", 0), (-1, "b", 1)):
        model = ld.MaxP(ld.PairScorer(scorer(sign), name=name), window_size=5, stride=5)
        assert value_of(tmp_path, texts >> model, ASKED, JUDGED) == expected[index]


def test_a_function_as_a_stage_is_run_again(tmp_path):
    for sign in (1.0, -1.0):
        turned = pt.apply.doc_score(lambda row, sign=sign: sign * row["score"])
        expected = pt.Evaluate(RUN.assign(score=sign * RUN["score"]), QRELS, ["map"])["map"]
        assert value_of(tmp_path, SOME >> turned) == pytest.approx(expected)


def test_saved_runs_are_refused_if_any_column_of_the_topics_differs(tmp_path):
    topics = TOPICS.assign(query_vec=[np.full(2000, float(i)) for i in range(len(TOPICS))])
    for _ in range(2):
        value_of(tmp_path, SOME, topics)
    changed = [vector.copy() for vector in topics["query_vec"]]
    changed[3][1000] = -1.0
    with pytest.raises(ValueError, match="other topics"):
        value_of(tmp_path, SOME, topics.assign(query_vec=changed))


def test_a_run_of_other_topics_is_not_read_after_another_system_was_written_over(tmp_path):
    def experiment(topics, systems, **options):
        return Experiment(dict.fromkeys(systems, SOME), topics, QRELS, ["num_q"], save_dir=tmp_path, **options)

    experiment(TOPICS, ["a", "b"])
    experiment(TOPICS.head(3), ["a"], save_mode="overwrite")
    assert sorted(path.name for path in (tmp_path / "runs").iterdir()) == ["a", "b"]
    before = (tmp_path / "runs" / "b" / "run.json").read_text()
    experiment(TOPICS.head(3), ["b"])
    assert (tmp_path / "runs" / "b" / "run.json").read_text() != before
