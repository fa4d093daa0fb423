"""The folder of an experiment: going on after an interruption, with runs of the same pipeline only."""

import json

import pandas as pd
import pyterrier as pt
import pytest

import pyterrier_longdoc as ld
from pyterrier_longdoc.experiment import Experiment, ExperimentResults
from pyterrier_longdoc.training import TrainingArgs

from ..support import synthetic
from ..support.systems import make
from ..support.toy import toy_task

TOPICS, QRELS = synthetic.collection()
RUNS = [synthetic.run(TOPICS, 1.0, seed) for seed in range(2)]
RUN = RUNS[0]
FOLDS = [TOPICS["qid"].iloc[i::3].tolist() for i in range(3)]
SOME = pt.Transformer.from_df(RUN)
TEXTS, JUDGED = toy_task(0, queries=6)
ASKED = TEXTS[["qid", "query"]].drop_duplicates()
TRAINING = TrainingArgs(queries_per_step=1, learning_rates={"": 1e-2}, epochs=3)

pytestmark = pytest.mark.filterwarnings("ignore::pyterrier_longdoc.experiment.ExperimentWarning")


def value_of(folder, system, topics=TOPICS, qrels=QRELS, **options):
    return Experiment({"a": system}, topics, qrels, ["AP"], save_dir=folder, **options).means.loc["a", "AP"]


def map_of(frame):
    return pytest.approx(pt.Evaluate(frame, JUDGED, ["map"])["map"])


class Noting(pt.Transformer):
    """A run that notes that it is made."""

    def __init__(self, frame, name, made, fail_at=()):
        self.frame, self.name, self.made, self.fail_at = frame, name, made, fail_at

    def describe(self):
        return {"name": self.name}

    def transform(self, inp):
        if self.name in self.fail_at:
            raise KeyboardInterrupt
        self.made.append(self.name)
        return self.frame


@pytest.fixture
def made():
    return []


@pytest.fixture
def experiment(tmp_path, made, tests_are_installed):
    """Runs an experiment that saves its runs, and notes those that are made."""
    fail_at = {"slow 1"}

    def factory(name):
        return lambda seed: Noting(RUNS[seed], f"{name} {seed}", made, fail_at)

    def run(metric="AP", **options):
        systems = {"fast": RUN, "slow": factory("slow"), "a/b: c": factory("a/b: c")}
        return Experiment(systems, TOPICS, QRELS, [metric], seeds=[0, 1], save_dir=tmp_path / "exp", **options)

    with pytest.raises(KeyboardInterrupt):
        run()
    fail_at.clear()
    return run


def test_an_interrupted_experiment_continues(experiment, made, tmp_path):
    assert made == ["slow 0"]
    with pytest.raises(FileNotFoundError, match=r"results\.json"):
        ExperimentResults.load(tmp_path / "exp")
    results = experiment()
    assert made == ["slow 0", "slow 1", "a/b: c 0", "a/b: c 1"]
    pd.testing.assert_frame_equal(results.run("slow", 1), RUNS[1], check_dtype=False, check_exact=True)


def test_finished_runs_are_evaluated_in_another_way(experiment, made):
    results = experiment()
    made.clear()
    pd.testing.assert_frame_equal(experiment(baseline=["fast"]).means, results.means, check_exact=True)
    assert experiment("RR", test="wilcoxon").measures == ["RR"]
    assert made == []


def test_finished_runs_are_written_over_or_refused_by_the_mode(experiment, made):
    results = experiment()
    made.clear()
    with pytest.raises(ValueError, match="batch_size"):
        experiment(save_mode="overwrite", batch_size=0)
    pd.testing.assert_frame_equal(experiment().means, results.means, check_exact=True)
    assert made == []  # nothing was deleted
    experiment(save_mode="overwrite")
    assert len(made) == 4
    with pytest.raises(FileExistsError, match="save_mode"):
        experiment(save_mode="error")
    with pytest.raises(ValueError, match="save_mode"):
        experiment(save_mode="keep")


def test_seeds_and_versions_are_saved(experiment, tmp_path):
    experiment()
    settings = json.loads((tmp_path / "exp" / "settings.json").read_text())
    assert settings["seeds"] == [0, 1]
    assert {"python", "pyterrier", "numpy", "ir-measures"} <= set(settings["versions"])


def test_a_folder_of_another_experiment_is_refused(tmp_path):
    Experiment({"a": SOME}, TOPICS, QRELS, ["AP"], save_dir=tmp_path)
    with pytest.raises(ValueError, match="other topics"):
        Experiment({"a": SOME}, TOPICS.head(10), QRELS, ["AP"], save_dir=tmp_path)
    with pytest.raises(ValueError, match="other topics"):
        Experiment({"a": SOME}, TOPICS.assign(query="other words"), QRELS, ["AP"], save_dir=tmp_path)
    with pytest.raises(ValueError, match="other folds"):
        Experiment({"a": SOME}, TOPICS, QRELS, ["AP"], save_dir=tmp_path, folds=FOLDS)


@pytest.mark.parametrize("mode", ["reuse", "overwrite"])
def test_runs_without_settings_are_refused(mode, tmp_path):
    Experiment({"a": SOME}, TOPICS, QRELS, ["AP"], save_dir=tmp_path)
    (tmp_path / "settings.json").unlink()
    with pytest.raises(FileExistsError, match="save_mode"):
        Experiment({"a": SOME}, TOPICS, QRELS, ["AP"], save_dir=tmp_path, save_mode=mode)


def test_a_run_that_is_given_is_not_taken_from_the_folder(tmp_path):
    for run in RUNS:
        assert value_of(tmp_path, lambda run=run: run) == pytest.approx(pt.Evaluate(run, QRELS, ["map"])["map"])


def test_runs_of_folds_and_runs_of_all_topics_replace_each_other(tmp_path):
    for _ in range(2):
        for factory, expected, files in ((lambda seed: RUN, RUN, 1), (lambda seed, fold: RUNS[1], RUNS[1], 3)):
            options = {"seeds": [0], "folds": FOLDS, "save_dir": tmp_path}
            run = Experiment({"a": factory}, TOPICS, QRELS, ["AP"], **options).run("a", 0)
            assert sorted(run["score"]) == sorted(expected["score"])
            assert len(list(tmp_path.rglob("*.res.gz"))) == len(list((tmp_path / "runs").rglob("*.json"))) == files


# The same pipeline only.


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


def test_a_run_that_depends_on_user_code_is_computed_again(tmp_path):
    for sign in (1.0, -1.0):
        turned = pt.apply.doc_score(lambda row, sign=sign: sign * row["score"])
        expected = pt.Evaluate(RUN.assign(score=sign * RUN["score"]), QRELS, ["map"])["map"]
        assert value_of(tmp_path, SOME >> turned) == pytest.approx(expected)


def test_a_run_of_other_topics_is_not_read_after_another_system_was_written_over(tmp_path):
    def experiment(topics, systems, **options):
        return Experiment(dict.fromkeys(systems, SOME), topics, QRELS, ["num_q"], save_dir=tmp_path, **options)

    experiment(TOPICS, ["a", "b"])
    experiment(TOPICS.head(3), ["a"], save_mode="overwrite")
    assert sorted(path.name for path in (tmp_path / "runs").iterdir()) == ["a", "b"]
    before = (tmp_path / "runs" / "b" / "run.json").read_text()
    experiment(TOPICS.head(3), ["b"])
    assert (tmp_path / "runs" / "b" / "run.json").read_text() != before
