"""Who makes a run: kept runs are taken only from the same system."""

import json
import os
import subprocess
import sys
from dataclasses import dataclass, replace
from functools import lru_cache, partial, wraps

import numpy as np
import pandas as pd
import pyterrier as pt
import pytest

import pyterrier_longdoc as ld
from pyterrier_longdoc.data.collection import StreamedDocuments, TextLoader
from pyterrier_longdoc.data.files import FolderDataset
from pyterrier_longdoc.experiment import Experiment, ExperimentResults, ExperimentWarning, sweep_truncation
from pyterrier_longdoc.experiment.identity import Identities, differences
from pyterrier_longdoc.training import TrainingArgs
from pyterrier_longdoc.training.repeat import FoldModels

from ..support import own, synthetic
from ..support.systems import make
from ..support.toy import toy_task

TOPICS, QRELS = synthetic.collection()
RUN, OTHER = synthetic.run(TOPICS, 1.0, 0), synthetic.run(TOPICS, 0.5, 1)
FOLDS = [TOPICS["qid"].iloc[i::3].tolist() for i in range(3)]
SOME = pt.Transformer.from_df(RUN)
TEXTS, JUDGED = toy_task(0, queries=6)
ASKED = TEXTS[["qid", "query"]].drop_duplicates()
TRAINING = TrainingArgs(queries_per_step=1, learning_rates={"": 1e-2}, epochs=3)


def identity(value):
    return Identities().of(value)


def same(a, b):
    return not differences(identity(a).told, identity(b).told)


def value_of(folder, systems, topics=TOPICS, qrels=QRELS, **options):
    """The values of the systems, and what the experiment warned of by the kind of check."""
    results = Experiment(systems, topics, qrels, ["AP"], save_dir=folder, **options)
    return results.means["AP"].to_dict(), dict(zip(results.checks["check"], results.checks["message"], strict=True))


pytestmark = pytest.mark.filterwarnings("ignore::pyterrier_longdoc.experiment.ExperimentWarning")


# Models of this package.


def test_a_saved_run_is_that_of_the_weights(tmp_path, cross_encoder):
    model = make("MaxP", cross_encoder, training=TRAINING)
    texts = pt.Transformer.from_df(TEXTS)
    before, checks = value_of(tmp_path, {"maxp": texts >> model}, ASKED, JUDGED)
    (texts >> model).fit(ASKED, JUDGED)
    shown = repr(model)
    after, checks = value_of(tmp_path, {"maxp": texts >> model}, ASKED, JUDGED)
    assert after["maxp"] == pytest.approx(pt.Evaluate(model(TEXTS), JUDGED, ["map"])["map"])
    assert after != before
    assert "not the same system.arguments.transformers.1.weights" in checks["made anew"]
    untrained = make("MaxP", cross_encoder, training=TRAINING)
    assert repr(untrained) != shown
    again, _ = value_of(tmp_path, {"maxp": texts >> untrained}, ASKED, JUDGED)
    assert again == before


def test_a_saved_run_of_the_same_model_is_read(tmp_path, cross_encoder, monkeypatch):
    texts = pt.Transformer.from_df(TEXTS)
    model = make("MaxP", cross_encoder, training=TRAINING).fit(TEXTS, JUDGED)
    before, _ = value_of(tmp_path / "runs", {"maxp": texts >> model}, ASKED, JUDGED)
    model.save(tmp_path / "model")
    loaded = ld.MaxP.load(tmp_path / "model", training=TRAINING)
    assert same(model, loaded)
    monkeypatch.setattr(ld.MaxP, "transform", None)
    again, checks = value_of(tmp_path / "runs", {"maxp": texts >> loaded}, ASKED, JUDGED)
    assert (again, checks.keys() & {"unchecked", "made anew"}) == (before, set())


def test_names_of_models_are_no_part_of_a_pipeline(tmp_path, cross_encoder):
    texts = pt.Transformer.from_df(TEXTS)
    model = make("MaxP", cross_encoder, training=TRAINING).fit(TEXTS, JUDGED)
    folds = FoldModels([model], [ASKED["qid"].tolist()], TEXTS)
    before = [identity(made) for made in (texts >> model % 3, 0.5 * model, folds)]
    names = repr(model), repr(folds)
    model.save(tmp_path)
    assert (repr(model), repr(folds)) != names
    for was, made in zip(before, (texts >> model % 3, 0.5 * model, folds), strict=True):
        assert not differences(identity(made).told, was.told)


@pytest.mark.parametrize("changes", [{"max_doc_len": 5}, {"window_size": 12, "stride": 6}, {"preselect": ld.FirstK(1)}])
def test_settings_count(cross_encoder, changes):
    model = make("MaxP", cross_encoder)
    assert same(model, make("MaxP", cross_encoder))
    assert same(model, make("MaxP", cross_encoder, verbose=True, batch_size=3))
    assert not same(model, make("MaxP", cross_encoder, **changes))


@pytest.mark.parametrize("kind", own.EDITED)
def test_runs_that_depend_on_code_of_ones_own_are_made_anew(kind, tmp_path, cross_encoder):
    make_edited, name = own.EDITED[kind]
    texts = pt.Transformer.from_df(TEXTS)
    values = []
    for sign in (1, -1):
        model = make_edited(sign, cross_encoder)
        expected = pt.Evaluate(model(TEXTS), JUDGED, ["map"])["map"]
        factory = partial(lambda model: texts >> model, model)
        found, checks = value_of(tmp_path, {"pipeline": texts >> model, "function": factory}, ASKED, JUDGED)
        assert found == pytest.approx({"pipeline": expected, "function": expected})
        values.append(expected)
    assert values[0] != values[1]
    assert name in checks["made anew"]


def test_a_function_that_names_a_class_of_ones_own_is_called_anew(tmp_path, cross_encoder):
    texts = pt.Transformer.from_df(TEXTS)

    def named(sign):
        cls = type(own.with_head(sign, cross_encoder))
        return lambda: texts >> cls(cross_encoder, **own.SMALL)

    values = [value_of(tmp_path, {"a": named(sign)}, ASKED, JUDGED) for sign in (1, -1)]
    expected = [pt.Evaluate(own.with_head(sign, cross_encoder)(TEXTS), JUDGED, ["map"])["map"] for sign in (1, -1)]
    assert [found["a"] for found, _ in values] == pytest.approx(expected)
    assert "WithEditedHead" in values[1][1]["made anew"]


def test_the_recipe_of_a_model_that_a_function_may_train_counts(cross_encoder):
    def model(**changes):
        return make("MaxP", cross_encoder, training=replace(TRAINING, **changes))

    def in_a_partial(model):
        return partial(identity, model=model)

    def in_a_closure(model):
        return lambda: model

    def in_a_pipeline(model):
        return partial(identity, SOME >> model)

    for named in (in_a_partial, in_a_closure, in_a_pipeline):
        assert same(named(model()), named(model()))
        assert not same(named(model()), named(model(epochs=7)))
        assert not same(named(model(augment=shortened)), named(model(augment=shortened)))  # the user's own code
    assert same(model(), model(epochs=7))  # which nothing trains


def shortened(text, rng):
    return text[:3]


def test_a_class_of_ones_own_vouches_for_its_code_by_describe(tmp_path, cross_encoder):
    texts = pt.Transformer.from_df(TEXTS)
    for sign, version, expected in ((1, 1, 1), (-1, 1, 1), (-1, 2, -1)):
        found, checks = value_of(tmp_path, {"a": texts >> own.vouching(sign, version, cross_encoder)}, ASKED, JUDGED)
        scored = own.vouching(expected, 1, cross_encoder)(TEXTS)
        assert found["a"] == pytest.approx(pt.Evaluate(scored, JUDGED, ["map"])["map"])
    assert checks["made anew"].endswith("version")


def test_a_function_that_names_a_class_with_a_version_is_called_anew_for_another_one(cross_encoder):
    first, same_one, other = (type(own.vouching(1, version, cross_encoder)) for version in (1, 1, 2))
    assert same(lambda: first(cross_encoder), lambda: first(cross_encoder))
    assert same(partial(identity, first), partial(identity, same_one))
    assert not same(partial(identity, first), partial(identity, other))


def test_sweeps_look_at_the_weights(tmp_path, cross_encoder):
    model, texts = make("MaxP", cross_encoder, training=TRAINING), pt.Transformer.from_df(TEXTS)

    def sweep():
        return (
            sweep_truncation(texts, model, ASKED, JUDGED, ["AP"], chunks=[1, 2], chunk_len=20, save_dir=tmp_path)
            .results.means["AP"]
            .tolist()
        )

    before = sweep()
    assert sweep() == before
    model.fit(TEXTS, JUDGED)
    expected = [pt.Evaluate(model.apply_attributes(max_doc_len=20 * n)(TEXTS), JUDGED, ["map"])["map"] for n in (1, 2)]
    assert sweep() == pytest.approx(expected)
    assert expected != before


# What feeds them.


def test_first_stages_and_text_count():
    loader = TextLoader({"d1": {"docno": "d1", "text": "one"}}, ["text"])
    changed = TextLoader({"d1": {"docno": "d1", "text": "two"}}, ["text"])
    assert same(SOME, pt.Transformer.from_df(RUN.copy()))
    assert not same(SOME, pt.Transformer.from_df(OTHER))
    assert not same(SOME, pt.Transformer.from_df(RUN.assign(text="more")))
    assert not same(loader, changed)
    assert not same(ld.MaxP(text_loader=loader).text_loader, changed)
    assert identity(SOME >> loader).unchecked == []

    class Streamed(StreamedDocuments):
        pass

    for method in ("__getitem__", "__iter__", "__len__"):
        setattr(Streamed, method, lambda *_: 0)
    Streamed.__abstractmethods__ = frozenset()
    assert identity(SOME >> TextLoader(Streamed(), ["text"], "big")).unchecked == ["TextLoader('big', ['text'])"]


def test_a_rerankers_text_loader_counts(cross_encoder):
    loaders = [TextLoader({"d1": {"docno": "d1", "text": text}}, ["text"]) for text in ("one", "two")]
    models = [make("MaxP", cross_encoder, text_loader=loader) for loader in loaders]
    assert differences(*(identity(model).told for model in models)) == ["text_loader.content"]


def test_texts_of_a_collection_count(tmp_path, cross_encoder):
    def model_over(text):
        documents = [json.dumps({"docno": "d1", "text": text})]
        for name, lines in (("docs.jsonl", documents), ("topics.tsv", ["1\tdog"]), ("qrels.txt", ["1 0 d1 1"])):
            (tmp_path / name).write_text("\n".join(lines), encoding="utf-8")
        return make("MaxP", cross_encoder, text_loader=FolderDataset(tmp_path))

    before, after = identity(model_over("one")), identity(model_over("two"))
    assert differences(before.told, after.told) == ["text_loader.content"]
    assert before.unchecked == []


def test_all_columns_of_the_topics_count(tmp_path):
    topics = TOPICS.assign(query_vec=[np.full(2000, float(i)) for i in range(len(TOPICS))])
    value_of(tmp_path, {"a": SOME}, topics)
    value_of(tmp_path, {"a": SOME}, topics)
    changed = [vector.copy() for vector in topics["query_vec"]]
    changed[3][1000] = -1.0
    with pytest.raises(ValueError, match="holds runs of other topics"):
        value_of(tmp_path, {"a": SOME}, topics.assign(query_vec=changed))


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
    assert same(pipeline, pipeline)
    assert not same(pipeline, other)
    assert identity(pipeline).unchecked == identity(other).unchecked == []


# What cannot be told.


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


def test_what_has_no_identity_is_named(tmp_path):
    applied = pt.apply.generic(lambda frame: frame.assign(score=1.0), transform_outputs=list)
    assert identity((SOME >> applied) ** Plugin(1)).unchecked == ["pt.apply.generic()", "Plugin()"]
    assert not same(Plugin(1), Plugin(2))  # by their arguments, as far as these go
    assert identity(Describing(1)) == ({"transformer": f"{__name__}.Describing", "k": 1, "text_loader": None}, [])
    assert not same(applied, pt.apply.generic(lambda frame: frame.assign(score=2.0), transform_outputs=list))
    systems = {"a": SOME >> Plugin(1), "b": SOME}
    _, checks = value_of(tmp_path, systems)
    assert "unchecked" not in checks
    with pytest.warns(ExperimentWarning, match=r"unchecked: the saved run of a was read; .*: Plugin\(\)") as caught:
        results = Experiment(systems, TOPICS, QRELS, ["AP"], save_dir=tmp_path)
    assert [warning.filename for warning in caught] == [__file__]
    assert results.checks[["check", "name"]].to_numpy().tolist() == [["unchecked", "a"]]
    assert ExperimentResults.load(tmp_path).settings["unchecked"] == {"a": ["Plugin()"]}
    assert json.loads((tmp_path / "runs" / "a" / "run.json").read_text())["unchecked"] == ["Plugin()"]


def test_the_same_in_another_process():
    code = "from tests.experiment.test_identity import *; print(json.dumps(identity(factory_of('x')).told))"
    outputs = [
        subprocess.run(
            [sys.executable, "-c", code],
            capture_output=True,
            text=True,
            check=True,
            env={**os.environ, "PYTHONHASHSEED": seed},
        ).stdout
        for seed in ("1", "2")
    ]
    assert outputs[0] == outputs[1]
    assert json.loads(outputs[0]) == identity(factory_of("x")).told


# Functions.


@dataclass
class Config:
    epochs: int = 1


CONFIG, NOTED = Config(), {}


def helper(run):
    return run


def factory_of(name, run=RUN):
    def factory(seed, fold=None):
        NOTED[seed] = SOME
        if name in {"one", "another"}:
            raise ValueError
        return helper(run).assign(score=run["score"] * CONFIG.epochs + seed)

    return factory


def test_functions_are_told_by_code_and_the_values_they_name(monkeypatch):
    assert same(factory_of("x"), factory_of("x"))
    assert not same(factory_of("x"), factory_of("y"))
    assert not same(factory_of("x"), factory_of("x", OTHER))
    assert not same(partial(factory_of("x"), 0), partial(factory_of("x"), 1))
    assert identity(factory_of("x")).unchecked == ["function factory_of.<locals>.factory", "NOTED", "function helper"]
    before = identity(factory_of("x")).told
    NOTED[0] = SOME
    assert not differences(before, identity(factory_of("x")).told)
    monkeypatch.setattr(CONFIG, "epochs", 2)
    assert differences(before, identity(factory_of("x")).told) == ["names.CONFIG.epochs"]
    monkeypatch.undo()
    monkeypatch.setitem(globals(), "helper", lambda run: run.head(3))
    assert "names.helper.code" in differences(before, identity(factory_of("x")).told)


def decorated(number):
    def decorate(function):
        @wraps(function)
        def cut(*arguments):
            return function(*arguments) % number

        return cut

    return decorate


def test_decorators_count():
    def plain(seed):
        return SOME

    assert same(decorated(3)(plain), decorated(3)(plain))
    assert not same(decorated(3)(plain), decorated(4)(plain))
    assert not same(decorated(3)(plain), plain)
    assert same(lru_cache(plain), lru_cache(plain))


@pytest.mark.parametrize("kind", [pd.Series, pd.DataFrame])
def test_an_index_counts(kind):
    assert same(kind([1, 2], index=["d1", "d2"]), kind([1, 2], index=["d1", "d2"]))
    assert not same(kind([1, 2], index=["d1", "d2"]), kind([1, 2], index=["d2", "d1"]))


def test_a_describe_that_means_something_else_is_no_identity(tmp_path):
    class Talking(Plugin):
        def describe(self):
            return "a plugin"

    value_of(tmp_path, {"a": SOME >> Talking(1)})
    _, checks = value_of(tmp_path, {"a": SOME >> Talking(1)})
    assert "Plugin()" in checks["unchecked"]


def test_runs_of_folds_depend_on_the_judgements_they_are_trained_on(tmp_path):
    calls = []

    def factory(seed, fold):
        judged = fold.train_qrels["label"].sum()
        record(judged)
        return RUN.assign(score=RUN["score"] * judged)

    record = Recorder(calls)
    for qrels, expected in ((QRELS, 3), (QRELS, 3), (QRELS.assign(label=1), 6)):
        value_of(tmp_path, {"a": factory}, TOPICS, qrels, seeds=[0], folds=FOLDS)
        assert len(calls) == expected


class Recorder:
    def __init__(self, calls):
        self.calls = calls

    def __call__(self, value):
        self.calls.append(value)


def test_overwrite_leaves_other_systems_alone(tmp_path):
    value_of(tmp_path, {"a": SOME, "b": SOME})
    value_of(tmp_path, {"a": SOME}, save_mode="overwrite")
    assert sorted(path.name for path in (tmp_path / "runs").iterdir()) == ["a", "b"]


def test_a_run_of_a_first_stage_that_has_changed_is_made_anew(tmp_path):
    first, _ = value_of(tmp_path, {"a": SOME >> Describing(1)})
    second, checks = value_of(tmp_path, {"a": pt.Transformer.from_df(OTHER) >> Describing(1)})
    assert second["a"] == pytest.approx(pt.Evaluate(OTHER, QRELS, ["map"])["map"])
    assert first != second
    assert "made anew" in checks
    assert pd.read_csv(tmp_path / "checks.csv")["check"].tolist() == ["made anew"]
