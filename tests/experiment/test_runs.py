"""What may be a system; seeds, folds, files, and going on after an interruption."""

import json
import subprocess
import sys
import warnings

import numpy as np
import pandas as pd
import pyterrier as pt
import pytest

from pyterrier_longdoc.experiment import Experiment, ExperimentResults, read_run, write_run

from ..support import synthetic

METRICS = ["nDCG@5", "AP"]
TOPICS, QRELS = synthetic.collection()
FOLDS = [TOPICS["qid"].iloc[i::3].tolist() for i in range(3)]

pytestmark = pytest.mark.filterwarnings("ignore::pyterrier_longdoc.experiment.ExperimentWarning")


def run_of(seed, quality=1.0):
    return synthetic.run(TOPICS, quality, seed)


def pipeline(frame, calls=None):
    """A pipeline that returns a run, and notes that it was asked."""

    def look_up(topics):
        if calls is not None:
            calls.append(sorted(topics["qid"]))
        return frame[frame["qid"].isin(topics["qid"])].merge(topics, on="qid")

    return pt.apply.generic(look_up, transform_outputs=lambda columns: [*columns, "docno", "score"])


def mean_of(*frames):
    """The mean over frames of the MAP that pt.Experiment finds."""
    values = pt.Experiment(list(frames), TOPICS, QRELS, ["map"])
    return values["map"].mean()


def test_all_kinds_of_systems(tmp_path):
    frames = [run_of(seed) for seed in range(3)]
    for seed, frame in enumerate(frames):
        write_run(frame, tmp_path / f"{seed}.res.gz", "a system")
    systems = {
        "frame": frames[0],
        "pipeline": pipeline(frames[0]),
        "file": tmp_path / "0.res.gz",
        "path": str(tmp_path / "0.res.gz"),
        "later": lambda: pipeline(frames[0]),
        "frames": frames,
        "files": [tmp_path / f"{seed}.res.gz" for seed in range(3)],
        "pipelines": [pipeline(frame) for frame in frames],
        "factory": lambda seed: pipeline(frames[seed]),
        "factory of runs": lambda seed: frames[seed],
        "factory with folds": lambda seed, fold: pipeline(frames[seed]),
        "factory of runs with folds": lambda seed, fold: frames[seed],
    }
    results = Experiment(systems, TOPICS, QRELS, METRICS, seeds=[0, 1, 2], folds=FOLDS)
    one, three = mean_of(frames[0]), mean_of(*frames)
    assert abs(one - three) > 1e-3
    expected = [one] * 5 + [three] * 7
    assert results.means["AP"].tolist() == pytest.approx(expected, rel=1e-12)
    assert results.seeds["factory"] == [0, 1, 2]
    assert results.seeds["frame"] == [None]


def test_values_are_averaged_over_seeds_before_the_test():
    a, b = [run_of(seed) for seed in range(3)], [run_of(seed, 0.5) for seed in range(3, 6)]
    results = Experiment({"a": a, "b": b}, TOPICS, QRELS, METRICS, baselines=["b"])
    per_query = [
        pt.Experiment(runs, TOPICS, QRELS, ["map"], names=["0", "1", "2"], perquery=True).groupby("qid")["value"].mean()
        for runs in (a, b)
    ]
    from scipy.stats import ttest_rel

    [p] = results.table["AP p-value"].dropna()
    assert p == pytest.approx(ttest_rel(*per_query).pvalue, rel=1e-9)
    seeds = [mean_of(run) for run in a]
    assert results.stds.loc["a", "AP"] == pytest.approx(np.std(seeds, ddof=1), rel=1e-9)
    assert results.table.loc[0, "AP std"] == results.stds.loc["a", "AP"]
    assert len(results.perseed) == 2 * 3 * 30 * 2
    assert len(results.perquery) == 2 * 30 * 2


class Learner(pt.Estimator):
    """Remembers what it was fitted on."""

    def __init__(self):
        self.fitted = None

    def fit(self, topics_or_res_tr, qrels_tr, topics_or_res_va=None, qrels_va=None):
        self.fitted = (topics_or_res_tr, qrels_tr, topics_or_res_va, qrels_va)

    def transform(self, inp):
        assert not set(inp["qid"]) & set(self.fitted[0]["qid"])
        return inp


@pytest.mark.parametrize("validation", [False, True])
def test_folds_are_fitted_on_the_others(validation):
    learners = []

    def factory(seed, fold):
        learners.append(Learner())
        return fold.fit(pipeline(run_of(seed)) >> learners[-1], validation=validation)

    results = Experiment({"learned": factory}, TOPICS, QRELS, METRICS, seeds=[4, 5], folds=FOLDS)
    assert results.means.loc["learned", "AP"] == pytest.approx(mean_of(run_of(4), run_of(5)), rel=1e-12)
    assert len(learners) == 2 * 3
    for i, learner in enumerate(learners):
        train, train_qrels, valid, valid_qrels = learner.fitted
        test, next_fold = set(FOLDS[i % 3]), set(FOLDS[(i + 1) % 3])
        expected = set(TOPICS["qid"]) - test - (next_fold if validation else set())
        assert set(train["qid"]) == set(train_qrels["qid"]) == expected
        if validation:
            assert set(valid["qid"]) == set(valid_qrels["qid"]) == next_fold
        else:
            assert valid is valid_qrels is None


def test_first_stages_are_shared_and_nothing_given_is_changed():
    calls = []
    first = pipeline(run_of(0), calls)
    damage = pt.apply.generic(lambda frame: frame.__setitem__("score", 1.0) or frame)
    before = TOPICS.copy()
    results = Experiment({"a": first >> damage, "b": first >> pt.Transformer.identity()}, TOPICS, QRELS, METRICS)
    assert len(calls) == 1
    assert results.means.loc["b", "AP"] == pytest.approx(mean_of(run_of(0)), rel=1e-12)
    pd.testing.assert_frame_equal(TOPICS, before)


def test_batches_give_the_same(tmp_path):
    calls = []
    whole = Experiment({"a": pipeline(run_of(0))}, TOPICS, QRELS, METRICS)
    batched = Experiment({"a": pipeline(run_of(0), calls)}, TOPICS, QRELS, METRICS, batch_size=8)
    assert [len(qids) for qids in calls] == [8, 8, 8, 6]
    pd.testing.assert_frame_equal(whole.table, batched.table)


class InterruptedRunError(RuntimeError):
    """Stands for a crash."""


def test_an_interrupted_experiment_goes_on(tmp_path):
    made, fail_at = [], {("slow", 1)}

    def factory(name):
        def make(seed):
            if (name, seed) in fail_at:
                raise InterruptedRunError
            made.append((name, seed))
            return pipeline(run_of(seed))

        return make

    def experiment(**options):
        systems = {"fast": run_of(9), "slow": factory("slow"), "a/b: c": factory("a/b: c")}
        return Experiment(
            systems, TOPICS, QRELS, METRICS, seeds=[0, 1], baselines=["fast"], save_dir=tmp_path / "exp", **options
        )

    with pytest.raises(InterruptedRunError):
        experiment()
    assert made == [("slow", 0)]
    with pytest.raises(FileNotFoundError, match=r"holds no results\.json"):
        ExperimentResults.load(tmp_path / "exp")
    fail_at.clear()
    results = experiment()
    assert made == [("slow", 0), ("slow", 1), ("a/b: c", 0), ("a/b: c", 1)]
    again = experiment()
    assert len(made) == 4
    pd.testing.assert_frame_equal(again.table, results.table, check_exact=True)
    pd.testing.assert_frame_equal(results.run("slow", 1), run_of(1), check_dtype=False, check_exact=True)
    assert not list((tmp_path / "exp").rglob("*.part"))
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
    systems = {"a": pipeline(run_of(0))}
    Experiment(systems, TOPICS, QRELS, METRICS, save_dir=tmp_path)
    with pytest.raises(ValueError, match="runs of other topics"):
        Experiment(systems, TOPICS.head(10), QRELS, METRICS, save_dir=tmp_path)
    with pytest.raises(ValueError, match="runs of other folds"):
        Experiment(systems, TOPICS, QRELS, METRICS, save_dir=tmp_path, folds=FOLDS)
    with pytest.warns(UserWarning, match="the kept run of a was made by") as caught:
        Experiment({"a": pipeline(run_of(0)) >> pt.Transformer.identity()}, TOPICS, QRELS, METRICS, save_dir=tmp_path)
    assert [warning.filename for warning in caught] == [__file__]
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        Experiment({"later": lambda: run_of(0)}, TOPICS, QRELS, METRICS, save_dir=tmp_path)
        Experiment({"later": lambda: run_of(1)}, TOPICS, QRELS, METRICS, save_dir=tmp_path)


def test_other_measures_and_tests_need_no_new_runs(tmp_path):
    calls = []
    systems = {"a": pipeline(run_of(0), calls), "b": pipeline(run_of(1), calls)}
    Experiment(systems, TOPICS, QRELS, METRICS, save_dir=tmp_path)
    results = Experiment(systems, TOPICS, QRELS, ["RR"], baselines=[0], test="wilcoxon", save_dir=tmp_path)
    assert len(calls) == 2
    assert results.measures == ["RR"]


def test_results_come_back_from_their_folder(tmp_path):
    systems = {"NA": [run_of(0), run_of(1)], "b, c": run_of(2, 0.2)}
    results = Experiment(
        systems, TOPICS, QRELS, METRICS, baselines=["NA"], partner={"b, c": "NA"}, correction="holm", save_dir=tmp_path
    )
    loaded = ExperimentResults.load(tmp_path)
    pd.testing.assert_frame_equal(loaded.table, results.table, check_exact=True)
    pd.testing.assert_frame_equal(loaded.comparisons, results.comparisons, check_exact=True)
    pd.testing.assert_frame_equal(loaded.checks, results.checks, check_dtype=False)
    assert loaded.to_latex() == results.to_latex() == (tmp_path / "table.tex").read_text()[:-1]
    assert loaded.settings == json.loads(json.dumps(results.settings))
    pd.testing.assert_frame_equal(loaded.run("NA", 1), run_of(1), check_dtype=False, check_exact=True)
    with pytest.raises(ValueError, match="no run of 'NA' with seed 7; seeds are"):
        loaded.run("NA", 7)
    with pytest.raises(ValueError, match="give Experiment a save_dir"):
        Experiment(systems, TOPICS, QRELS, METRICS).run("NA", 0)


def test_a_function_as_test_must_be_given_again(tmp_path):
    from scipy.stats import ttest_ind

    results = Experiment({"a": run_of(0), "b": run_of(1)}, TOPICS, QRELS, METRICS, baselines=[0], test=ttest_ind)
    results.save(tmp_path)
    with pytest.raises(ValueError, match="the test was the function 'ttest_ind'"):
        ExperimentResults.load(tmp_path)
    loaded = ExperimentResults.load(tmp_path, test=ttest_ind)
    pd.testing.assert_frame_equal(loaded.table, results.table, check_exact=True)


@pytest.mark.parametrize("file", ["run.res", "run.res.gz"])
def test_trec_files_keep_every_score(tmp_path, file):
    frame = pd.DataFrame(
        {
            "qid": ["NA", "null", "null"],
            "docno": ['a"b', "nan", "1"],
            "score": [1 / 3, np.nextafter(1e-300, 1), -np.inf],
        }
    )
    write_run(frame, tmp_path / file, "my system")
    pd.testing.assert_frame_equal(read_run(tmp_path / file), frame, check_dtype=False, check_exact=True)
    if file == "run.res":
        assert (tmp_path / file).read_text().splitlines()[0] == 'NA Q0 a"b 0 0.3333333333333333 my_system'


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
    write_run(run_of(0), path, "x")
    before = path.read_bytes()
    monkeypatch.setattr(
        "pyterrier_longdoc.common.files.os.replace", lambda *_: (_ for _ in ()).throw(OSError("disk full"))
    )
    with pytest.raises(OSError, match="disk full"):
        write_run(run_of(1), path, "x")
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


BAD = {
    "names of systems must be unique": (["a", "a"], {}),
    "2 systems but 1 names": (["a"], {}),
    "is a factory: say with which seeds": (None, {"systems": {"a": lambda seed: None}}),
    "takes a fold: give folds=": (None, {"systems": {"a": lambda seed, fold: None}, "seeds": [0]}),
    "takes 3 arguments": (None, {"systems": {"a": lambda x, y, z: None}, "seeds": [0]}),
    "system 'a' is a int": (None, {"systems": {"a": 3}}),
    "there are 2 seeds": (None, {"systems": {"a": [run_of(0)]}, "seeds": [0, 1]}),
    "returned a int": (None, {"systems": {"a": lambda seed: 3}, "seeds": [0]}),
    r"lacks the column\(s\) score": (None, {"systems": {"a": run_of(0).drop(columns="score")}}),
    "returned no document": (None, {"systems": {"a": run_of(0).head(0)}}),
    "scores that are no numbers": (None, {"systems": {"a": run_of(0).assign(score="high")}}),
    "there are no systems": (None, {"systems": {}}),
    "must be a dict or a list": (None, {"systems": run_of(0)}),
    "'c' is a baseline or partner, but no system": (["a", "b"], {"baselines": ["c"]}),
    "baseline 2 does not exist": (["a", "b"], {"baselines": [2]}),
    "baselines='a' must be a list": (["a", "b"], {"baselines": "a"}),
    "names one twice": (["a", "b"], {"baselines": ["a", 0]}),
    "cannot be its own partner": (["a", "b"], {"partner": {"a": "a"}}),
    "needs baselines= or partner=": (["a", "b"], {"correction": "holm"}),
    "correction='x' is unknown": (["a", "b"], {"correction": "x", "baselines": [0]}),
    "test='x' is unknown": (["a", "b"], {"test": "x"}),
    "alpha=5 must be between 0 and 1": (["a", "b"], {"alpha": 5}),
    "at least two folds": (["a", "b"], {"folds": [TOPICS["qid"].tolist()]}),
    "in no fold": (["a", "b"], {"folds": FOLDS[:2]}),
    "in more than one fold": (["a", "b"], {"folds": [*FOLDS, FOLDS[0]]}),
    "unknown measure 'ndcg@ten'": (["a", "b"], {"metrics": ["ndcg@ten"]}),
    "metrics is empty": (["a", "b"], {"metrics": []}),
    "must be a list of measures": (["a", "b"], {"metrics": "map"}),
    "efficiency=True": (["a", "b"], {"metrics": ["mrt"]}),
    r"qrels lack the column\(s\) label": (["a", "b"], {"qrels": QRELS.drop(columns="label")}),
    "no qid in common": (["a", "b"], {"qrels": QRELS.assign(qid="x")}),
    "batch_size=0 must be at least 1": (["a", "b"], {"batch_size": 0}),
}


@pytest.mark.parametrize("message", BAD)
def test_errors_say_what_is_wrong(message):
    names, changes = BAD[message]
    arguments = {"systems": [run_of(0), run_of(1)], "topics": TOPICS, "qrels": QRELS, "metrics": METRICS, **changes}
    with pytest.raises(ValueError, match=message):
        Experiment(**arguments, names=names)


def test_importing_loads_no_torch():
    code = "import sys, pyterrier_longdoc.experiment; sys.exit(any(m in sys.modules for m in ('torch', 'matplotlib')))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
