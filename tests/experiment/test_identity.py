"""Saved runs are taken from the same pipeline only."""

import json
from functools import partial

import numpy as np
import pandas as pd
import pyterrier as pt
import pytest

import pyterrier_longdoc as ld
from pyterrier_longdoc.common.identity import differences, identify
from pyterrier_longdoc.common.registry import own_code_in
from pyterrier_longdoc.data.collection import TextLoader
from pyterrier_longdoc.data.folder import FolderDataset
from pyterrier_longdoc.experiment import Experiment, ExperimentWarning
from pyterrier_longdoc.listwise import CallableBackend, Pointwise, RankGPT
from pyterrier_longdoc.training import TrainingArgs
from pyterrier_longdoc.training.repeat import FoldModels

from ..support import own, synthetic
from ..support.systems import make
from ..support.toy import toy_task

TOPICS, QRELS = synthetic.collection()
RUN, OTHER = synthetic.run(TOPICS, 1.0, 0), synthetic.run(TOPICS, 0.5, 1)
SOME = pt.Transformer.from_df(RUN)
TEXTS, JUDGED = toy_task(0, queries=6)
ASKED = TEXTS[["qid", "query"]].drop_duplicates()
TRAINING = TrainingArgs(queries_per_step=1, learning_rates={"": 1e-2}, epochs=3)

pytestmark = pytest.mark.filterwarnings("ignore::pyterrier_longdoc.experiment.ExperimentWarning")


def differing(a, b):
    return differences(identify(a).description, identify(b).description)


def value_of(folder, system, topics=TOPICS, qrels=QRELS, **options):
    """The value of a system, and what the experiment warned of by the kind of check."""
    results = Experiment({"a": system}, topics, qrels, ["AP"], save_dir=folder, **options)
    return results.means.loc["a", "AP"], dict(zip(results.checks["check"], results.checks["message"], strict=True))


def map_of(frame):
    return pytest.approx(pt.Evaluate(frame, JUDGED, ["map"])["map"])


# Models of this package.


def test_a_saved_run_is_that_of_the_weights(tmp_path, cross_encoder):
    model = make("MaxP", cross_encoder, training=TRAINING)
    texts = pt.Transformer.from_df(TEXTS)
    before, _ = value_of(tmp_path, texts >> model, ASKED, JUDGED)
    (texts >> model).fit(ASKED, JUDGED)
    after, checks = value_of(tmp_path, texts >> model, ASKED, JUDGED)
    assert after == map_of(model(TEXTS)) != before
    assert "system.arguments.transformers.1.weights" in checks["made anew"]
    again, _ = value_of(tmp_path, texts >> make("MaxP", cross_encoder, training=TRAINING), ASKED, JUDGED)
    assert again == before


def test_a_saved_run_of_the_same_model_is_read(tmp_path, cross_encoder, monkeypatch):
    texts = pt.Transformer.from_df(TEXTS)
    model = make("MaxP", cross_encoder, training=TRAINING).fit(TEXTS, JUDGED)
    before, _ = value_of(tmp_path / "runs", texts >> model, ASKED, JUDGED)
    model.save(tmp_path / "model")
    loaded = ld.MaxP.load(tmp_path / "model", training=TRAINING)
    monkeypatch.setattr(ld.MaxP, "transform", None)
    for system in (texts >> loaded, lambda: texts >> loaded):  # a function is called, what it makes is not run
        again, checks = value_of(tmp_path / "runs", system, ASKED, JUDGED)
        assert (again, checks.keys() & {"unchecked", "made anew"}) == (before, set())


def test_names_of_models_are_no_part_of_a_pipeline(tmp_path, cross_encoder):
    model = make("MaxP", cross_encoder, training=TRAINING).fit(TEXTS, JUDGED)
    folds = FoldModels([model], [ASKED["qid"].tolist()], TEXTS)
    pipelines = (pt.Transformer.from_df(TEXTS) >> model % 3, 0.5 * model, folds)
    before, names = [identify(made).description for made in pipelines], (repr(model), repr(folds))
    model.save(tmp_path)
    assert (repr(model), repr(folds)) != names
    assert [identify(made).description for made in pipelines] == before


@pytest.mark.parametrize("changes", [{"max_doc_len": 5}, {"window_size": 12, "stride": 6}, {"preselect": ld.FirstK(1)}])
def test_settings_count(cross_encoder, changes):
    model = make("MaxP", cross_encoder)
    assert not differing(model, make("MaxP", cross_encoder, verbose=True, batch_size=3))
    assert differing(model, make("MaxP", cross_encoder, **changes))


# Code of one's own.


@pytest.mark.parametrize("kind", own.EDITED)
def test_runs_that_depend_on_code_of_ones_own_are_made_anew(kind, tmp_path, cross_encoder):
    make_edited, name = own.EDITED[kind]
    texts = pt.Transformer.from_df(TEXTS)
    values = []
    for sign in (1, -1):
        model = make_edited(sign, cross_encoder)
        for system in (texts >> model, partial(lambda model: texts >> model, model)):
            found, checks = value_of(tmp_path, system, ASKED, JUDGED)
            assert found == map_of(model(TEXTS))
        values.append(found)
    assert values[0] != values[1]
    assert name in checks["made anew"]


def scorer(sign):
    def edited(queries, texts):
        return [sign * float(len(text)) for text in texts]

    return edited


@pytest.mark.parametrize("wrapped", [False, True])
def test_runs_of_an_edited_function_that_scores_pairs_are_made_anew(wrapped, tmp_path):
    texts, values = pt.Transformer.from_df(TEXTS), []
    for sign in (1, -1):
        function = pt.apply.doc_score(lambda row, sign=sign: sign * len(row["text"])) if wrapped else scorer(sign)
        model = ld.MaxP(ld.PairScorer(function), window_size=5, stride=5)
        found, checks = value_of(tmp_path, texts >> model, ASKED, JUDGED)
        assert found == map_of(model(TEXTS))
        values.append(found)
    assert values[0] != values[1]
    assert ("ApplyDocumentScoringTransformer" if wrapped else "edited") in checks["made anew"]


def test_a_function_that_scores_pairs_vouches_by_its_name(tmp_path):
    texts = pt.Transformer.from_df(TEXTS)
    expected = [map_of(ld.MaxP(ld.PairScorer(scorer(sign)), window_size=5, stride=5)(TEXTS)) for sign in (1, -1)]
    for sign, name, index in ((1, "a", 0), (-1, "a", 0), (-1, "b", 1)):
        model = ld.MaxP(ld.PairScorer(scorer(sign), name=name), window_size=5, stride=5)
        assert value_of(tmp_path, texts >> model, ASKED, JUDGED)[0] == expected[index]


@pytest.mark.parametrize("cls", [RankGPT, Pointwise])
def test_a_function_that_takes_the_place_of_a_language_model_is_code_of_ones_own(cls):
    assert own_code_in(identify(cls(answer)).description) == ["answer"]
    assert own_code_in(identify(cls(ld.LLMClient(CallableBackend(answer)))).description) == ["answer"]
    named = CallableBackend(answer, name="version 1")
    assert (own_code_in(identify(cls(named)).description), identify(cls(named)).unchecked) == ([], [])


def answer(messages):
    return "[1]"


def test_a_class_of_ones_own_vouches_for_its_code_by_describe(tmp_path, cross_encoder):
    texts = pt.Transformer.from_df(TEXTS)
    for sign, version, expected in ((1, 1, 1), (-1, 1, 1), (-1, 2, -1)):
        found, checks = value_of(tmp_path, texts >> own.vouching(sign, version, cross_encoder), ASKED, JUDGED)
        assert found == map_of(own.vouching(expected, 1, cross_encoder)(TEXTS))
    assert "version" in checks["made anew"]


def test_a_function_as_a_stage_is_run_anew(tmp_path):
    for sign in (1.0, -1.0):
        turned = pt.apply.doc_score(lambda row, sign=sign: sign * row["score"])
        found, checks = value_of(tmp_path, SOME >> turned)
        assert found == pytest.approx(pt.Evaluate(RUN.assign(score=sign * RUN["score"]), QRELS, ["map"])["map"])
        assert identify((SOME >> turned) + SOME).functions
    assert "function" in checks["made anew"]


class Plugin(pt.Transformer):
    """A transformer of another package."""

    def __init__(self, k):
        self.k = k

    def transform(self, inp):
        return inp

    def __repr__(self):
        return "Plugin()"


class Describing(Plugin):
    def describe(self):
        return {"k": self.k}


class Talking(Plugin):
    def describe(self):
        return "a plugin"


def test_labels_of_series_and_frames_count_and_the_order_of_sets_does_not():
    labels, others = pd.Series([1.0, 2.0], ["d1", "d2"]), pd.Series([1.0, 2.0], ["d2", "d1"])
    assert differing(Plugin(labels), Plugin(others))
    assert differing(Plugin(labels.to_frame()), Plugin(others.to_frame()))
    assert identify(Plugin(set("bca"))).description["arguments"] == {"k": ["a", "b", "c"]}


@pytest.mark.parametrize("cls", [Plugin, Talking])
def test_transformers_of_others_are_compared_as_far_as_they_go_and_named(cls, tmp_path):
    assert "unchecked" not in value_of(tmp_path, SOME >> cls(1))[1]
    with pytest.warns(ExperimentWarning, match=r"unchecked: .*Plugin\(\)") as caught:
        value_of(tmp_path, SOME >> cls(1))
    assert {warning.filename for warning in caught} == {__file__}
    assert identify(Describing(1)).unchecked == []
    assert differing(Describing(1), Describing(2)) == ["k"]
    assert differing(Plugin(1), Plugin(2))


# What feeds them.


def test_first_stages_and_texts_count(tmp_path, cross_encoder):
    assert not differing(SOME, pt.Transformer.from_df(RUN.copy()))
    assert differing(SOME, pt.Transformer.from_df(OTHER))
    assert differing(SOME, pt.Transformer.from_df(RUN.assign(text="more")))
    loaders = [TextLoader({"d1": {"docno": "d1", "text": text}}, ["text"]) for text in ("one", "two")]
    assert differing(*loaders)
    models = [make("MaxP", cross_encoder, text_loader=loader) for loader in loaders]
    assert differing(*models) == ["text_loader.content"]
    assert identify(SOME >> models[0]).unchecked == []

    def over(text):
        documents = [json.dumps({"docno": "d1", "text": text})]
        for name, lines in (("docs.jsonl", documents), ("topics.tsv", ["1\tdog"]), ("qrels.txt", ["1 0 d1 1"])):
            (tmp_path / name).write_text("\n".join(lines), encoding="utf-8")
        return identify(make("MaxP", cross_encoder, text_loader=FolderDataset(tmp_path))).description

    assert differences(over("one"), over("two")) == ["text_loader.content"]


def test_a_dataset_as_text_loader_is_compared_by_its_texts_alone(tmp_path):
    (tmp_path / "docs.jsonl").write_text('{"docno": "d1", "text": "one"}', encoding="utf-8")
    assert identify(ld.MaxP(ld.PairScorer(scorer(1), name="a"), text_loader=FolderDataset(tmp_path)))[1:] == ([], [])


def test_all_columns_of_the_topics_count(tmp_path):
    topics = TOPICS.assign(query_vec=[np.full(2000, float(i)) for i in range(len(TOPICS))])
    for _ in range(2):
        value_of(tmp_path, SOME, topics)
    changed = [vector.copy() for vector in topics["query_vec"]]
    changed[3][1000] = -1.0
    with pytest.raises(ValueError, match="other topics"):
        value_of(tmp_path, SOME, topics.assign(query_vec=changed))


def test_a_run_of_other_topics_is_not_read_after_another_system_was_written_over(tmp_path):
    def experiment(topics, systems, **options):
        return Experiment(dict.fromkeys(systems, SOME), topics, QRELS, ["num_ret"], save_dir=tmp_path, **options)

    experiment(TOPICS, ["a", "b"])
    experiment(TOPICS.head(3), ["a"], save_mode="overwrite")
    assert sorted(path.name for path in (tmp_path / "runs").iterdir()) == ["a", "b"]
    assert experiment(TOPICS.head(3), ["b"]).checks["check"].tolist() == ["made anew"]


@pytest.mark.parametrize(
    ("pipeline", "other"),
    [
        (SOME % 3, SOME % 4),
        (SOME >> SOME, SOME),
        (2 * SOME, 3 * SOME),
        (SOME + SOME, SOME | SOME),
        (SOME & SOME, SOME ^ SOME),
        (SOME >> (SOME**SOME), SOME >> (SOME**SOME**SOME)),
        (SOME >> pt.Transformer.identity(), SOME),
        (SOME >> pt.apply.rename({"score": "old"}), SOME >> pt.apply.rename({"score": "new"})),
    ],
    ids=lambda pipeline: type(pipeline).__name__,
)
def test_pyterriers_operators_are_told_by_their_parts(pipeline, other):
    assert not differing(pipeline, pipeline)
    assert differing(pipeline, other)
    for each in (pipeline, other):
        assert identify(each)[1:] == ([], [])
