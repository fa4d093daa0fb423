"""The folder of an experiment: the modes of `pt.Experiment`, with runs of the same models only."""

import gzip
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


def value_of(folder, system, topics=TOPICS, qrels=QRELS, save_mode="reuse"):
    results = Experiment({"a": system}, topics, qrels, ["AP"], save_dir=folder, save_mode=save_mode)
    return results.means.loc["a", "AP"]


def map_of(frame):
    return pytest.approx(pt.Evaluate(frame, JUDGED, ["map"])["map"])


class Noting(pt.Transformer):
    """A run that notes that it is made."""

    def __init__(self, frame, name, made, fail_at=()):
        self.frame, self.name, self.made, self.fail_at = frame, name, made, fail_at

    def transform(self, inp):
        if self.name in self.fail_at:
            raise KeyboardInterrupt
        self.made.append(self.name)
        return self.frame


@pytest.fixture
def made():
    return []


@pytest.fixture
def experiment(tmp_path, made):
    """Runs an experiment that saves its runs, and notes those that are made."""
    fail_at = {"slow 1"}

    def factory(name):
        return lambda seed: Noting(RUNS[seed], f"{name} {seed}", made, fail_at)

    def run(metric="AP", *, save_mode="reuse", **options):
        systems = {"fast": RUN, "slow": factory("slow"), "a/b: c": factory("a/b: c")}
        return Experiment(
            systems, TOPICS, QRELS, [metric], seeds=[0, 1], save_dir=tmp_path / "exp", save_mode=save_mode, **options
        )

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
    with pytest.raises(ValueError, match="save_mode"):
        experiment(save_mode="error")
    with pytest.raises(ValueError, match="save_mode"):
        experiment(save_mode="keep")


def test_by_default_runs_are_replaced_with_a_warning(tmp_path):
    Experiment({"a": SOME}, TOPICS, QRELS, ["AP"], save_dir=tmp_path)
    with pytest.warns(UserWarning, match="save_mode='reuse'"):
        results = Experiment({"a": pt.Transformer.from_df(RUNS[1])}, TOPICS, QRELS, ["AP"], save_dir=tmp_path)
    assert sorted(results.run("a")["score"]) == sorted(RUNS[1]["score"])


def test_a_line_lists_the_systems_that_were_read(experiment, capsys):
    experiment()
    assert "slow" in capsys.readouterr().out
    experiment(save_mode="overwrite")
    assert "slow" not in capsys.readouterr().out


def test_a_run_without_costs_is_not_read_for_an_efficiency_table(tmp_path):
    pytest.importorskip("psutil")
    options = {"save_dir": tmp_path, "save_mode": "reuse"}
    Experiment({"a": SOME >> ld.ZScore()}, TOPICS, QRELS, ["AP"], **options)
    measured, again = (
        Experiment({"a": SOME >> ld.ZScore()}, TOPICS, QRELS, ["AP"], efficiency=True, **options) for _ in range(2)
    )
    assert measured.efficiency["peak memory MB"].iloc[0] > 0
    pd.testing.assert_frame_equal(again.efficiency, measured.efficiency)


def test_seeds_and_versions_are_saved(experiment, tmp_path):
    experiment()
    settings = json.loads((tmp_path / "exp" / "results.json").read_text())
    assert settings["seeds"] == [0, 1]
    assert {"python", "pyterrier", "numpy", "ir-measures"} <= set(settings["versions"])


def test_runs_of_other_topics_are_refused(tmp_path):
    value_of(tmp_path, SOME)
    for topics in (TOPICS.head(10), TOPICS.assign(query="other words")):
        with pytest.raises(ValueError, match="other topics"):
            value_of(tmp_path, SOME, topics)


def test_a_run_that_is_given_is_not_taken_from_the_folder(tmp_path):
    for run in RUNS:
        assert value_of(tmp_path, lambda run=run: run) == pytest.approx(pt.Evaluate(run, QRELS, ["map"])["map"])


def test_runs_of_folds_and_runs_of_all_topics_replace_each_other(tmp_path):
    for _ in range(2):
        for factory, expected, files in ((lambda seed: RUN, RUN, 1), (lambda seed, fold: RUNS[1], RUNS[1], 3)):
            options = {"seeds": [0], "folds": FOLDS, "save_dir": tmp_path, "save_mode": "overwrite"}
            run = Experiment({"a": factory}, TOPICS, QRELS, ["AP"], **options).run("a", 0)
            assert sorted(run["score"]) == sorted(expected["score"])
            assert len(list(tmp_path.rglob("*.res.gz"))) == len(list((tmp_path / "runs").rglob("*.json"))) == files


# The same models only.


def test_a_saved_run_of_other_weights_is_refused(tmp_path, cross_encoder):
    model = make("MaxP", cross_encoder, training=TRAINING)
    texts = pt.Transformer.from_df(TEXTS)
    before = value_of(tmp_path, texts >> model, ASKED, JUDGED)
    (texts >> model).fit(ASKED, JUDGED)
    for system in (texts >> model, lambda: texts >> model, texts >> model % 3):
        with pytest.raises(ValueError, match="other models"):
            value_of(tmp_path, system, ASKED, JUDGED)
    assert value_of(tmp_path, texts >> make("MaxP", cross_encoder), ASKED, JUDGED) == before
    assert value_of(tmp_path, texts >> model, ASKED, JUDGED, "overwrite") == map_of(model(TEXTS)) != before


def test_a_saved_run_is_reused_for_the_same_model(tmp_path, cross_encoder, monkeypatch):
    texts = pt.Transformer.from_df(TEXTS)
    model = make("MaxP", cross_encoder, training=TRAINING).fit(TEXTS, JUDGED)
    before = value_of(tmp_path / "runs", texts >> model, ASKED, JUDGED)
    model.save(tmp_path / "model")
    loaded = ld.MaxP.load(tmp_path / "model", training=TRAINING)
    monkeypatch.setattr(ld.MaxP, "transform", None)
    for system in (texts >> loaded, lambda: texts >> loaded):  # a function is called, what it makes is not run
        assert value_of(tmp_path / "runs", system, ASKED, JUDGED) == before


def test_a_run_of_a_function_is_read_by_name_and_only_then(tmp_path):
    values = []
    for sign, mode in ((1.0, "reuse"), (-1.0, "reuse"), (-1.0, "warn")):
        turned = pt.apply.doc_score(lambda row, sign=sign: sign * row["score"])
        values.append(value_of(tmp_path, SOME >> turned, save_mode=mode))
    turned = pt.Evaluate(RUN.assign(score=-RUN["score"]), QRELS, ["map"])["map"]
    assert values[0] == values[1] != values[2] == pytest.approx(turned)


# Folders of others, and damaged files.


def test_a_folder_with_other_files_is_refused(tmp_path):
    (tmp_path / "runs" / "a").mkdir(parents=True)
    (tmp_path / "runs" / "a" / "events").write_text("of another program")
    with pytest.raises(ValueError, match="contains other files"):
        value_of(tmp_path, SOME, save_mode="overwrite")
    with pytest.raises(ValueError, match="contains other files"):
        Experiment({"a": SOME}, TOPICS, QRELS, ["AP"]).save(tmp_path)
    assert (tmp_path / "runs" / "a" / "events").exists()


@pytest.mark.parametrize("content", ["", "[]", "{}", "[" * 100_000, '{"made by": 1}'])
@pytest.mark.parametrize("name", ["results.json", "run.json"])
def test_a_damaged_file_is_named(name, content, tmp_path):
    value_of(tmp_path, SOME)
    [file] = tmp_path.rglob(name)
    file.write_text(content)
    with pytest.raises(ValueError, match=f"{name}' is damaged"):
        value_of(tmp_path, SOME) if name == "run.json" else ExperimentResults.load(tmp_path)


@pytest.mark.parametrize("name", ["run.res.gz", "perquery.csv.gz"])
def test_a_file_that_was_cut_to_valid_lines_is_refused(name, tmp_path):
    value_of(tmp_path, SOME)
    [file] = tmp_path.rglob(name)
    file.write_bytes(gzip.compress(b"".join(gzip.decompress(file.read_bytes()).splitlines(keepends=True)[:5])))
    with pytest.raises(ValueError, match=f"{name}' is damaged"):
        value_of(tmp_path, SOME) if name == "run.res.gz" else ExperimentResults.load(tmp_path)
