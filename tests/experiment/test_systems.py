"""What may be a system, and folds."""

from functools import lru_cache, partial

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


def test_every_kind_of_system_is_accepted(tmp_path):
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


class Made:
    """A run as a class that takes a seed."""

    def __new__(cls, quality=1.0, *, seed=42):
        return RUNS[seed]


def make(seed=42):
    return RUNS[seed]


def make_of_fold(quality=1.0, *, fold=None, seed=42):
    assert fold is not None
    return RUNS[seed]


def shifted(fold, seed=42):
    return RUNS[seed].assign(score=RUNS[seed]["score"] + fold.index)


FACTORIES = {
    "default": make,
    "keyword-only": lambda *, seed: RUNS[seed],
    "fold with default": make_of_fold,
    "fold before seed": shifted,
    "class": Made,
    "partial": partial(make_of_fold, 0.5),
    "partial by name": partial(make_of_fold, quality=0.5),
    "cached": lru_cache(make),
    "other options": lambda quality=1.0, *, seed=42, **options: RUNS[seed],
}


@pytest.mark.parametrize("factory", FACTORIES.values(), ids=FACTORIES)
def test_seeds_and_folds_reach_every_factory_that_takes_them(factory):
    results = Experiment({"a": factory}, TOPICS, QRELS, ["AP"], seeds=[0, 2], folds=FOLDS)
    assert results.seeds["a"] == [0, 2]
    assert results.means.loc["a", "AP"] == pytest.approx(mean_of(RUNS[0], RUNS[2]), rel=1e-12)


def test_factories_only_get_the_parameters_they_have():
    systems = {"fixed": partial(make, seed=2), "closure": partial(lambda run: run, RUNS[1])}
    results = Experiment(systems, TOPICS, QRELS, ["AP"], seeds=[0, 1], folds=FOLDS)
    assert results.seeds == {"fixed": [None], "closure": [None]}
    assert results.means["AP"].tolist() == pytest.approx([mean_of(RUNS[2]), mean_of(RUNS[1])], rel=1e-12)
    of_folds = Experiment({"a": lambda fold: shifted(fold, 0)}, TOPICS, QRELS, ["AP"], folds=FOLDS)
    assert of_folds.means["AP"].tolist() == pytest.approx([mean_of(RUNS[0])], rel=1e-12)
    assert Experiment({"a": lambda seed=1: RUNS[seed]}, TOPICS, QRELS, ["AP"]).seeds == {"a": [None]}


class Learner(pt.Estimator):
    """Remembers what it was fitted on."""

    def __init__(self):
        self.fits = []

    def fit(self, topics_or_res_tr, qrels_tr, topics_or_res_va=None, qrels_va=None):
        self.fits.append((topics_or_res_tr, qrels_tr, topics_or_res_va, qrels_va))

    def transform(self, inp):
        return inp


def fitted_by_fold(model):
    return lambda seed, fold: fold.fit(pt.Transformer.from_df(RUNS[seed]) >> model)


def fitted_by_hand(model):
    def factory(seed, fold):
        model.fit(pt.Transformer.from_df(RUNS[seed])(fold.train_topics), fold.train_qrels)
        return pt.Transformer.from_df(RUNS[seed]) >> pt.Transformer.identity() >> model

    return factory


@pytest.mark.parametrize("fitted", [fitted_by_fold, fitted_by_hand])
def test_a_learner_that_is_fitted_for_several_folds_is_refused(fitted):
    with pytest.raises(ValueError, match=r"a, seed 0, fold 1 returned the same .* as that of a, seed 0, fold 0"):
        Experiment({"a": fitted(Learner())}, TOPICS, QRELS, ["AP"], seeds=[0, 1], folds=FOLDS)


def test_learners_that_are_new_or_not_fitted_again_are_accepted():
    once = Learner()
    systems = {
        "new": lambda seed, fold: fold.fit(pt.Transformer.from_df(RUNS[seed]) >> Learner()),
        "once": lambda seed: pt.Transformer.from_df(RUNS[seed]) >> once,
        "twice for one fold": lambda seed, fold: fold.fit(fold.fit(pt.Transformer.from_df(RUNS[seed]) >> Learner())),
    }
    results = Experiment(systems, TOPICS, QRELS, ["AP"], seeds=[0, 1], folds=FOLDS)
    assert len(results.means) == len(systems)


@pytest.mark.parametrize("validation", [False, True])
def test_a_fold_is_fitted_on_the_other_folds(validation):
    learners = []

    def factory(seed, fold):
        learners.append(Learner())
        return fold.fit(pt.Transformer.from_df(RUNS[seed]) >> learners[-1], validation=validation)

    results = Experiment({"learned": factory}, TOPICS, QRELS, ["AP"], seeds=[1, 2], folds=FOLDS)
    assert results.means.loc["learned", "AP"] == pytest.approx(mean_of(RUNS[1], RUNS[2]), rel=1e-12)
    assert len(learners) == 2 * 3
    for i, learner in enumerate(learners):
        [(train, train_qrels, valid, valid_qrels)] = learner.fits
        test, next_fold = set(FOLDS[i % 3]), set(FOLDS[(i + 1) % 3])
        expected = set(TOPICS["qid"]) - test - (next_fold if validation else set())
        assert set(train["qid"]) == set(train_qrels["qid"]) == expected
        if validation:
            assert set(valid["qid"]) == set(valid_qrels["qid"]) == next_fold
        else:
            assert valid is valid_qrels is None
