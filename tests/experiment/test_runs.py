"""TREC files, and the folder of an experiment: going on after an interruption."""

import json
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pyterrier as pt
import pytest

from pyterrier_longdoc.experiment import Experiment, ExperimentResults, ExperimentWarning, read_run, write_run
from pyterrier_longdoc.experiment.runs import run_parts

from ..support import synthetic

TOPICS, QRELS = synthetic.collection()
FOLDS = [TOPICS["qid"].iloc[i::3].tolist() for i in range(3)]
RUNS = [synthetic.run(TOPICS, 1.0, seed) for seed in range(2)]

pytestmark = pytest.mark.filterwarnings("ignore::pyterrier_longdoc.experiment.ExperimentWarning")


def test_an_interrupted_experiment_goes_on(tmp_path):
    made, fail_at = [], {("slow", 1)}

    def note(name, seed):
        if (name, seed) in fail_at:
            raise KeyboardInterrupt
        made.append((name, seed))

    log = SimpleNamespace(note=note)  # what it holds is none of the values that a factory names

    def factory(name):
        def make(seed):
            log.note(name, seed)
            return pt.Transformer.from_df(RUNS[seed])

        return make

    def experiment(metric="AP", **options):
        systems = {"fast": RUNS[0], "slow": factory("slow"), "a/b: c": factory("a/b: c")}
        return Experiment(systems, TOPICS, QRELS, [metric], seeds=[0, 1], save_dir=tmp_path / "exp", **options)

    with pytest.raises(KeyboardInterrupt):
        experiment()
    assert made == [("slow", 0)]
    with pytest.raises(FileNotFoundError, match=r"holds no results\.json"):
        ExperimentResults.load(tmp_path / "exp")
    fail_at.clear()
    results = experiment()
    assert made == [("slow", 0), ("slow", 1), ("a/b: c", 0), ("a/b: c", 1)]
    pd.testing.assert_frame_equal(experiment(baseline=["fast"]).means, results.means, check_exact=True)
    assert experiment("RR", test="wilcoxon").measures == ["RR"]
    assert len(made) == 4
    pd.testing.assert_frame_equal(results.run("slow", 1), RUNS[1], check_dtype=False, check_exact=True)
    assert not list((tmp_path / "exp").rglob("*.part"))
    with pytest.raises(ValueError, match="batch_size=0"):
        experiment(save_mode="overwrite", batch_size=0)
    pd.testing.assert_frame_equal(experiment().means, results.means, check_exact=True)
    assert len(made) == 4
    experiment(save_mode="overwrite")
    assert len(made) == 8
    with pytest.raises(FileExistsError, match="has runs already"):
        experiment(save_mode="error")
    with pytest.raises(ValueError, match="save_mode='keep' is unknown"):
        experiment(save_mode="keep")
    settings = json.loads((tmp_path / "exp" / "settings.json").read_text())
    assert settings["seeds"] == [0, 1]
    assert {"python", "pyterrier", "numpy", "ir-measures"} <= set(settings["versions"])


def test_a_folder_of_another_experiment_is_refused(tmp_path):
    first = pt.Transformer.from_df(RUNS[0])
    Experiment({"a": first}, TOPICS, QRELS, ["AP"], save_dir=tmp_path)
    with pytest.raises(ValueError, match="runs of other topics"):
        Experiment({"a": first}, TOPICS.head(10), QRELS, ["AP"], save_dir=tmp_path)
    with pytest.raises(ValueError, match="runs of other folds"):
        Experiment({"a": first}, TOPICS, QRELS, ["AP"], save_dir=tmp_path, folds=FOLDS)
    with pytest.warns(ExperimentWarning, match="the saved run of a was of another one: not the same") as caught:
        Experiment({"a": first >> pt.Transformer.identity()}, TOPICS, QRELS, ["AP"], save_dir=tmp_path)
    own = [warning for warning in caught if issubclass(warning.category, ExperimentWarning)]
    assert [warning.filename for warning in own] == [__file__]
    (tmp_path / "settings.json").rename(tmp_path / "other.json")
    for mode in ("reuse", "overwrite"):
        with pytest.raises(FileExistsError, match="is of no experiment"):
            Experiment({"a": first}, TOPICS, QRELS, ["AP"], save_dir=tmp_path, save_mode=mode)
    (tmp_path / "other.json").rename(tmp_path / "settings.json")
    for run in RUNS:
        results = Experiment({"later": lambda run=run: run}, TOPICS, QRELS, ["AP"], save_dir=tmp_path)
        assert results.means.loc["later", "AP"] == pytest.approx(pt.Evaluate(run, QRELS, ["map"])["map"])


def test_runs_of_folds_and_of_all_topics_take_each_others_place(tmp_path):
    def experiment(factory):
        return Experiment({"a": factory}, TOPICS, QRELS, ["AP"], seeds=[0], folds=FOLDS, save_dir=tmp_path)

    for _ in range(2):
        for factory, files in ((lambda seed: RUNS[0], 1), (lambda seed, fold: RUNS[1], 3)):
            run = experiment(factory).run("a", 0)
            expected = factory(*range(files - 1 or 1)).sort_values("score")
            assert run.sort_values("score")["score"].tolist() == expected["score"].tolist()
            assert len(list(tmp_path.rglob("*.res.gz"))) == len(list((tmp_path / "runs").rglob("*.json"))) == files


@pytest.mark.parametrize("file", ["run.res", "run.res.gz"])
def test_trec_files_keep_every_score(tmp_path, file):
    scores = [1 / 3, np.nextafter(1e-300, 1), -np.inf]
    frame = pd.DataFrame({"qid": ["NA", "null", "null"], "docno": ['a"b', "nan", "1"], "score": scores})
    write_run(frame, tmp_path / file, "my system")
    pd.testing.assert_frame_equal(read_run(tmp_path / file), frame, check_dtype=False, check_exact=True)
    write_run(frame, tmp_path / f"other-{file}", "my system")
    assert (tmp_path / f"other-{file}").read_bytes() == (tmp_path / file).read_bytes()
    if file == "run.res":
        assert (tmp_path / file).read_text().splitlines()[0] == 'NA Q0 a"b 0 0.3333333333333333 my_system'


def test_a_run_is_read_in_parts(tmp_path):
    write_run(RUNS[0], str(tmp_path / "run.res.gz"), "x")
    parts = list(run_parts(tmp_path / "run.res.gz", 100))
    assert [len(part) for part in parts] == [100, 100, 100, 60]
    pd.testing.assert_frame_equal(pd.concat(parts), read_run(tmp_path / "run.res.gz"))


def test_trec_files_that_cannot_be(tmp_path):
    frame = pd.DataFrame({"qid": ["1"], "docno": ["a b"], "score": [1.0]})
    with pytest.raises(ValueError, match="column docno holds 'a b'"):
        write_run(frame, tmp_path / "run.res", "x")
    assert not list(tmp_path.iterdir())
    with pytest.raises(FileNotFoundError, match=r"run file .* does not exist"):
        read_run(tmp_path / "run.res")
    (tmp_path / "text.res").write_text("this is not a run at all\n")
    with pytest.raises(ValueError, match="is no TREC run"):
        read_run(tmp_path / "text.res")


def test_a_failed_write_leaves_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "run.res"
    write_run(RUNS[0], path, "x")
    before = path.read_bytes()
    monkeypatch.setattr("os.replace", lambda *_: (_ for _ in ()).throw(OSError("disk full")))
    with pytest.raises(OSError, match="disk full"):
        write_run(RUNS[1], path, "x")
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]
