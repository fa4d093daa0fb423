"""The folder of an experiment: going on after an interruption."""

import json

import pandas as pd
import pyterrier as pt
import pytest

from pyterrier_longdoc.experiment import Experiment, ExperimentResults

from ..support import synthetic

TOPICS, QRELS = synthetic.collection()
FOLDS = [TOPICS["qid"].iloc[i::3].tolist() for i in range(3)]
RUNS = [synthetic.run(TOPICS, 1.0, seed) for seed in range(2)]

pytestmark = [
    pytest.mark.filterwarnings("ignore::pyterrier_longdoc.experiment.ExperimentWarning"),
    pytest.mark.usefixtures("tests_are_installed"),
]


class Noting(pt.Transformer):
    """A run that notes that it is made."""

    def __init__(self, frame, name, made, fail_at):
        self.frame, self.name, self.made, self.fail_at = frame, name, made, fail_at

    def describe(self):
        return {"name": self.name}

    def transform(self, inp):
        if self.name in self.fail_at:
            raise KeyboardInterrupt
        self.made.append(self.name)
        return self.frame


def test_an_interrupted_experiment_continues(tmp_path):
    made, fail_at = [], {"slow 1"}

    def factory(name):
        return lambda seed: Noting(RUNS[seed], f"{name} {seed}", made, fail_at)

    def experiment(metric="AP", **options):
        systems = {"fast": RUNS[0], "slow": factory("slow"), "a/b: c": factory("a/b: c")}
        return Experiment(systems, TOPICS, QRELS, [metric], seeds=[0, 1], save_dir=tmp_path / "exp", **options)

    with pytest.raises(KeyboardInterrupt):
        experiment()
    assert made == ["slow 0"]
    with pytest.raises(FileNotFoundError, match=r"results\.json"):
        ExperimentResults.load(tmp_path / "exp")
    fail_at.clear()
    results = experiment()
    assert made == ["slow 0", "slow 1", "a/b: c 0", "a/b: c 1"]
    pd.testing.assert_frame_equal(experiment(baseline=["fast"]).means, results.means, check_exact=True)
    assert experiment("RR", test="wilcoxon").measures == ["RR"]
    assert len(made) == 4
    pd.testing.assert_frame_equal(results.run("slow", 1), RUNS[1], check_dtype=False, check_exact=True)
    with pytest.raises(ValueError, match="batch_size"):
        experiment(save_mode="overwrite", batch_size=0)
    pd.testing.assert_frame_equal(experiment().means, results.means, check_exact=True)
    assert len(made) == 4
    experiment(save_mode="overwrite")
    assert len(made) == 8
    with pytest.raises(FileExistsError, match="save_mode"):
        experiment(save_mode="error")
    with pytest.raises(ValueError, match="save_mode"):
        experiment(save_mode="keep")
    settings = json.loads((tmp_path / "exp" / "settings.json").read_text())
    assert settings["seeds"] == [0, 1]
    assert {"python", "pyterrier", "numpy", "ir-measures"} <= set(settings["versions"])


def test_a_folder_of_another_experiment_is_refused(tmp_path):
    first = pt.Transformer.from_df(RUNS[0])
    Experiment({"a": first}, TOPICS, QRELS, ["AP"], save_dir=tmp_path)
    with pytest.raises(ValueError, match="other topics"):
        Experiment({"a": first}, TOPICS.head(10), QRELS, ["AP"], save_dir=tmp_path)
    with pytest.raises(ValueError, match="other folds"):
        Experiment({"a": first}, TOPICS, QRELS, ["AP"], save_dir=tmp_path, folds=FOLDS)
    (tmp_path / "settings.json").rename(tmp_path / "other.json")
    for mode in ("reuse", "overwrite"):
        with pytest.raises(FileExistsError, match="save_mode"):
            Experiment({"a": first}, TOPICS, QRELS, ["AP"], save_dir=tmp_path, save_mode=mode)
    (tmp_path / "other.json").rename(tmp_path / "settings.json")
    for run in RUNS:
        results = Experiment({"later": lambda run=run: run}, TOPICS, QRELS, ["AP"], save_dir=tmp_path)
        assert results.means.loc["later", "AP"] == pytest.approx(pt.Evaluate(run, QRELS, ["map"])["map"])


def test_runs_of_folds_and_runs_of_all_topics_replace_each_other(tmp_path):
    def experiment(factory):
        return Experiment({"a": factory}, TOPICS, QRELS, ["AP"], seeds=[0], folds=FOLDS, save_dir=tmp_path)

    for _ in range(2):
        for factory, files in ((lambda seed: RUNS[0], 1), (lambda seed, fold: RUNS[1], 3)):
            run = experiment(factory).run("a", 0)
            expected = factory(*range(files - 1 or 1)).sort_values("score")
            assert run.sort_values("score")["score"].tolist() == expected["score"].tolist()
            assert len(list(tmp_path.rglob("*.res.gz"))) == len(list((tmp_path / "runs").rglob("*.json"))) == files
