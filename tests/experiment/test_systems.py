"""What may be a system, and folds."""

import pyterrier as pt
import pytest

from pyterrier_longdoc.experiment import Experiment, write_run

from ..support import synthetic

TOPICS, QRELS = synthetic.collection()
FOLDS = [TOPICS["qid"].iloc[i::3].tolist() for i in range(3)]
RUNS = [synthetic.run(TOPICS, 1.0, seed) for seed in range(3)]

pytestmark = pytest.mark.filterwarnings("ignore::pyterrier_longdoc.experiment.ExperimentWarning")


def mean_of(*frames):
    """The mean over frames of the MAP that pt.Experiment finds."""
    return pt.Experiment(list(frames), TOPICS, QRELS, ["map"])["map"].mean()


def test_all_kinds_of_systems(tmp_path):
    pipelines = [pt.Transformer.from_df(frame) for frame in RUNS]
    files = [tmp_path / f"{seed}.res.gz" for seed in range(3)]
    for frame, file in zip(RUNS, files, strict=True):
        write_run(frame, file, "a system")
    of_one = {
        "frame": RUNS[0],
        "pipeline": pipelines[0],
        "file": files[0],
        "path": str(files[0]),
        "later": lambda: pipelines[0],
    }
    of_three = {
        "frames": RUNS,
        "files": files,
        "pipelines": pipelines,
        "factory": lambda seed: pipelines[seed],
        "factory of runs": lambda seed: RUNS[seed],
        "factory with folds": lambda seed, fold: pipelines[seed],
        "factory of runs with folds": lambda seed, fold: RUNS[seed],
    }
    results = Experiment({**of_one, **of_three}, TOPICS, QRELS, ["AP"], seeds=[0, 1, 2], folds=FOLDS)
    one, three = mean_of(RUNS[0]), mean_of(*RUNS)
    assert abs(one - three) > 1e-3
    assert results.means["AP"].tolist() == pytest.approx([one] * 5 + [three] * 7, rel=1e-12)
    assert (results.seeds["factory"], results.seeds["frame"]) == ([0, 1, 2], [None])


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
        with pytest.raises(TypeError, match="has no fit: give fold"):
            fold.fit(RUNS[seed])
        return fold.fit(pt.Transformer.from_df(RUNS[seed]) >> learners[-1], validation=validation)

    results = Experiment({"learned": factory}, TOPICS, QRELS, ["AP"], seeds=[1, 2], folds=FOLDS)
    assert results.means.loc["learned", "AP"] == pytest.approx(mean_of(RUNS[1], RUNS[2]), rel=1e-12)
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
