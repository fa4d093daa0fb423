"""Equal keys: the same results. User code has no key."""

import json

import numpy as np
import pandas as pd
import pyterrier as pt
import pytest

import pyterrier_longdoc as ld
from pyterrier_longdoc.common.key import UserCodeError, description, key, version_of
from pyterrier_longdoc.data import FolderDataset
from pyterrier_longdoc.data.collection import TextLoader
from pyterrier_longdoc.listwise import CallableBackend, Pointwise, RankGPT
from pyterrier_longdoc.training import TrainingArgs
from pyterrier_longdoc.training.repeat import FoldModels

from ..support import own, synthetic
from ..support.systems import make
from ..support.toy import toy_task

TOPICS, _ = synthetic.collection()
RUN, OTHER = synthetic.run(TOPICS, 1.0, 0), synthetic.run(TOPICS, 0.5, 1)
SOME = pt.Transformer.from_df(RUN)
TEXTS, JUDGED = toy_task(0, queries=6)
TRAINING = TrainingArgs(queries_per_step=1, learning_rates={"": 1e-2}, epochs=3)


# Models of this package.


def test_the_folder_of_a_model_does_not_change_the_key(tmp_path, cross_encoder):
    model = make("MaxP", cross_encoder, training=TRAINING).fit(TEXTS, JUDGED)
    folds = FoldModels([model], [TEXTS["qid"].unique().tolist()], TEXTS)
    pipelines = (pt.Transformer.from_df(TEXTS) >> model % 3, 0.5 * model, folds)
    before, names = list(map(key, pipelines)), (repr(model), repr(folds))
    model.save(tmp_path)
    assert (repr(model), repr(folds)) != names
    assert list(map(key, pipelines)) == before


@pytest.mark.parametrize("changes", [{"max_doc_len": 5}, {"window_size": 12, "stride": 6}, {"preselect": ld.FirstK(1)}])
def test_settings_change_the_key(cross_encoder, changes):
    model = make("MaxP", cross_encoder)
    assert key(model) == key(make("MaxP", cross_encoder, verbose=True, batch_size=3))
    assert key(model) != key(make("MaxP", cross_encoder, **changes))


def test_ignored_arguments_do_not_change_the_key(cross_encoder):
    models = [make("MaxP", cross_encoder, text_loader=loader_of(text)) for text in ("one", "two")]
    assert key(models[0]) != key(models[1])
    assert key(models[0], without=("text_loader",)) == key(models[1], without=("text_loader",))


# User code.


@pytest.mark.parametrize("kind", own.EDITED)
def test_user_code_has_no_key_and_is_named(kind, cross_encoder):
    make_edited, name = own.EDITED[kind]
    model = make_edited(1, cross_encoder)
    for pipeline in (model, SOME >> model, ld.Calibrated(model)):
        with pytest.raises(UserCodeError, match=name):
            key(pipeline)


def test_user_code_can_be_identified_by_its_name(cross_encoder):
    make_edited, name = own.EDITED["windows"]
    names = []
    keys = {key(make_edited(sign, cross_encoder), user_code=names) for sign in (1, -1)}
    assert len(keys) == 1
    assert all(name in each for each in names)


def answer(messages):
    return "[1]"


@pytest.mark.parametrize("cls", [RankGPT, Pointwise])
@pytest.mark.parametrize("llm", [answer, ld.LLMClient(CallableBackend(answer))], ids=["function", "client"])
def test_a_function_used_as_a_language_model_is_user_code(cls, llm):
    with pytest.raises(UserCodeError, match="answer"):
        key(cls(llm))


NAMED = {
    "RankGPT": lambda name: RankGPT(CallableBackend(answer, name=name)),
    "Pointwise": lambda name: Pointwise(CallableBackend(answer, name=name)),
    "PairScorer": lambda name: ld.MaxP(ld.PairScorer(answer, name=name)),
}


@pytest.mark.parametrize("make_stage", NAMED.values(), ids=NAMED)
def test_a_function_with_a_given_name_is_identified_by_it(make_stage):
    one, again, other = (key(make_stage(name)) for name in ("1", "1", "2"))
    assert one == again != other


def test_a_function_that_scores_pairs_has_no_key_without_a_name():
    with pytest.raises(ValueError, match="name"):
        key(ld.MaxP(ld.PairScorer(answer)))


@pytest.mark.parametrize("stage", [pt.apply.doc_score(lambda row: 1.0), pt.apply.generic(answer)])
def test_functions_as_stages_have_no_key(stage):
    for pipeline in (stage, (SOME >> stage) + SOME):
        with pytest.raises(UserCodeError):
            key(pipeline)


VERSIONS = {"__main__": None, "tests.support.own": None, "json.decoder": "", "pyterrier.model": pt.__version__}


@pytest.mark.parametrize(("module", "version"), VERSIONS.items())
def test_code_outside_installed_packages_has_no_version(module, version):
    assert version_of(module) == version


# Transformers of other packages.


class Plugin(pt.Transformer):
    def __init__(self, k):
        self.k = k

    def transform(self, inp):
        return inp


class Talking(Plugin):
    def describe(self):
        return "a plugin"


class Hiding(pt.Transformer):
    def __init__(self, k):
        self.hidden = k

    def transform(self, inp):
        return inp

    def __repr__(self):
        return f"Hiding({self.hidden})"


class Thing:
    pass


@pytest.mark.parametrize("cls", [Plugin, Talking, Hiding])
def test_transformers_of_installed_packages_are_identified_by_their_arguments(cls, tests_are_installed):
    assert key(SOME >> cls(1)) == key(SOME >> cls(1)) != key(SOME >> cls(2))


def test_another_version_of_a_package_has_another_key(tests_are_installed, monkeypatch):
    before = key(Plugin(1))
    monkeypatch.setattr("pyterrier_longdoc.common.key.version_of", lambda module: "2")
    assert key(Plugin(1)) != before


def test_an_argument_without_a_repr_has_no_key(tests_are_installed):
    with pytest.raises(UserCodeError, match="Thing"):
        key(Plugin(Thing()))


def test_the_index_of_series_and_frames_changes_the_key(tests_are_installed):
    labels, others = pd.Series([1.0, 2.0], ["d1", "d2"]), pd.Series([1.0, 2.0], ["d2", "d1"])
    assert key(Plugin(labels)) != key(Plugin(others))
    assert key(Plugin(labels.to_frame())) != key(Plugin(others.to_frame()))


def test_the_order_of_sets_does_not_change_the_key(tests_are_installed):
    assert description(Plugin(set("bca")))["arguments"] == {"k": ["a", "b", "c"]}


# What feeds them.


def test_contents_of_frames_change_the_key():
    vectors = [np.full(2000, float(i)) for i in range(len(RUN))]
    changed = [vector.copy() for vector in vectors]
    changed[3][1000] = -1.0
    frames = [RUN, OTHER, RUN.assign(text="more"), RUN.assign(vector=vectors), RUN.assign(vector=changed)]
    keys = [key(pt.Transformer.from_df(frame)) for frame in frames]
    assert len(set(keys)) == 5
    assert key(pt.Transformer.from_df(RUN.copy())) == keys[0]


def loader_of(text):
    return TextLoader({"d1": {"docno": "d1", "text": text}}, ["text"])


def test_texts_of_a_loader_change_the_key(cross_encoder):
    assert key(loader_of("one")) != key(loader_of("two"))


def test_texts_of_a_dataset_as_text_loader_change_the_key(tmp_path, cross_encoder):
    def over(text):
        documents = [json.dumps({"docno": "d1", "text": text})]
        for name, lines in (("docs.jsonl", documents), ("topics.tsv", ["1\tdog"]), ("qrels.txt", ["1 0 d1 1"])):
            (tmp_path / name).write_text("\n".join(lines), encoding="utf-8")
        return key(make("MaxP", cross_encoder, text_loader=FolderDataset(tmp_path)))

    assert over("one") == over("one") != over("two")


@pytest.mark.parametrize(
    ("pipeline", "other"),
    [
        (SOME % 3, SOME % 4),
        (SOME >> SOME, SOME),
        (2 * SOME, 3 * SOME),
        (2 * ld.ZScore() + ld.ZScore(), 3 * ld.ZScore() + ld.ZScore()),
        (SOME + SOME, SOME | SOME),
        (SOME & SOME, SOME ^ SOME),
        (SOME >> (SOME**SOME), SOME >> (SOME**SOME**SOME)),
        (SOME >> pt.Transformer.identity(), SOME),
        (SOME >> pt.apply.rename({"score": "old"}), SOME >> pt.apply.rename({"score": "new"})),
    ],
    ids=lambda pipeline: type(pipeline).__name__,
)
def test_pyterrier_operators_are_identified_by_their_parts(pipeline, other):
    assert key(pipeline) == key(pipeline) != key(other)
