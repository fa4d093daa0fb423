"""What may be a system, and folds."""

from functools import lru_cache, partial

import pyterrier as pt
import pytest

from pyterrier_longdoc.experiment import Experiment, write_run
from pyterrier_longdoc.experiment.systems import make_folds
from pyterrier_longdoc.training.repeat import fit_seeds

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


class Made:
    """A run as a class that takes a seed."""

    def __new__(cls, quality=1.0, *, seed=42):
        return RUNS[seed]


def make(seed=42):
    return RUNS[seed]


def make_of_fold(quality=1.0, *, fold=None, seed=42):
    assert fold is not None
    return RUNS[seed]


def no_names(s, f):
    return RUNS[s].assign(score=RUNS[s]["score"] + f.index)


def keyword_only(*, seed):
    return RUNS[seed]


def either_way_round(fold, seed=42):
    return RUNS[seed].assign(score=RUNS[seed]["score"] + fold.index)


@pytest.mark.parametrize(
    "factory",
    [
        make,
        keyword_only,
        make_of_fold,
        either_way_round,
        no_names,
        Made,
        partial(make_of_fold, 0.5),
        partial(make_of_fold, quality=0.5),
        lru_cache(make),
        lambda quality=1.0, *, seed=42, **options: RUNS[seed],
    ],
)
def test_seeds_and_folds_reach_every_factory_that_takes_them(factory):
    results = Experiment({"a": factory}, TOPICS, QRELS, ["AP"], seeds=[0, 2], folds=FOLDS)
    assert results.seeds["a"] == [0, 2]
    assert results.means.loc["a", "AP"] == pytest.approx(mean_of(RUNS[0], RUNS[2]), rel=1e-12)


def test_factories_that_take_no_seed():
    fixed, closure = partial(make, seed=2), lambda run=RUNS[1]: run
    results = Experiment({"fixed": fixed, "closure": closure}, TOPICS, QRELS, ["AP"], seeds=[0, 1], folds=FOLDS)
    assert results.seeds == {"fixed": [None], "closure": [None]}
    assert results.means["AP"].tolist() == pytest.approx([mean_of(RUNS[2]), mean_of(RUNS[1])], rel=1e-12)
    of_folds = Experiment({"a": lambda fold: no_names(0, fold)}, TOPICS, QRELS, ["AP"], folds=FOLDS)
    assert of_folds.means["AP"].tolist() == pytest.approx([mean_of(RUNS[0])], rel=1e-12)
    assert Experiment({"a": lambda seed=1: RUNS[seed]}, TOPICS, QRELS, ["AP"]).seeds == {"a": [None]}


class Learner(pt.Estimator):
    """Remembers what it was fitted on."""

    def __init__(self):
        self.fitted = None

    def fit(self, topics_or_res_tr, qrels_tr, topics_or_res_va=None, qrels_va=None):
        self.fitted = (topics_or_res_tr, qrels_tr, topics_or_res_va, qrels_va)

    def transform(self, inp):
        assert not set(inp["qid"]) & set(self.fitted[0]["qid"])
        return inp


def fitted_by_fold(model):
    return lambda seed, fold: fold.fit(pt.Transformer.from_df(RUNS[seed]) >> model)


def fitted_by_hand(model):
    def factory(seed, fold=None):
        topics, qrels = (TOPICS, QRELS) if fold is None else (fold.train_topics, fold.train_qrels)
        model.fit(pt.Transformer.from_df(RUNS[seed]).transform(topics), qrels)
        return pt.Transformer.from_df(RUNS[seed]) >> pt.Transformer.identity() >> model

    return factory


class Weighted(Learner):
    """Tells its weights, which are what it was fitted on."""

    def describe(self):
        return {"weights": None if self.fitted is None else ",".join(self.fitted[0]["qid"]) + str(len(self.fits))}

    def __init__(self):
        super().__init__()
        self.fits = []

    def fit(self, *data):
        self.fits.append(data)
        super().fit(*data)

    def transform(self, inp):
        return inp


@pytest.mark.parametrize("options", [{"seeds": [0], "folds": FOLDS}, {"seeds": [0, 1], "folds": FOLDS}])
def test_a_model_that_is_fitted_for_several_folds_is_refused(options):
    model = Weighted()
    with pytest.raises(ValueError, match=r"was fitted for a, seed 0, fold 0 already .* make the model inside the func"):
        Experiment({"a": fitted_by_fold(model)}, TOPICS, QRELS, ["AP"], **options)
    assert len(model.fits) == 1
    # It has seen topics of all other folds: it is refused in a second attempt as well.
    with pytest.raises(ValueError, match="was fitted for a, seed 0, fold 0 already"):
        Experiment({"b": fitted_by_fold(model)}, TOPICS, QRELS, ["AP"], **options)
    with pytest.raises(
        ValueError, match=r"the function of a, seed 0, fold 1 returned the same .* make the model inside"
    ):
        Experiment({"a": fitted_by_hand(Weighted())}, TOPICS, QRELS, ["AP"], **options)


def test_a_model_that_is_fitted_for_several_seeds_is_refused():
    with pytest.raises(ValueError, match=r"the function of a, seed 1 returned the same .* as that of a, seed 0"):
        Experiment({"a": fitted_by_hand(Weighted())}, TOPICS, QRELS, ["AP"], seeds=[0, 1])
    fold = make_folds(FOLDS, TOPICS, QRELS)
    model = fold[0].fit(Weighted())
    assert fold[0].fit(model) is model
    with pytest.raises(ValueError, match="was fitted for fold 0 already"):
        fold[1].fit(model)


def test_models_that_are_made_for_each_fold_or_not_fitted_are_not_refused():
    untrained = pt.Transformer.from_df(RUNS[0]) >> Weighted()
    systems = {
        "new": lambda seed, fold: fold.fit(pt.Transformer.from_df(RUNS[seed]) >> Weighted()),
        "once": fitted_once(),
        "not at all": lambda seed, fold: untrained,
        "twice for one fold": lambda seed, fold: fold.fit(fold.fit(pt.Transformer.from_df(RUNS[seed]) >> Weighted())),
    }
    results = Experiment(systems, TOPICS, QRELS, ["AP"], seeds=[0, 1], folds=FOLDS)
    assert len(results.means) == 4


def fitted_once():
    """A model that was trained before, on another collection."""
    model = Weighted()
    model.fit(TOPICS.assign(qid="x"), QRELS)
    return lambda seed, fold: pt.Transformer.from_df(RUNS[seed]) >> model


def test_candidates_of_a_first_stage_that_is_trained_in_between_are_not_shared():
    class Shift(Weighted):
        def transform(self, inp):
            return inp.assign(score=inp["score"] * (-1.0 if self.fitted else 1.0))

    stages, last = pt.Transformer.from_df(RUNS[0]) >> Shift(), pt.Transformer.identity()

    def later():
        stages[1].fit(TOPICS, QRELS)
        return stages >> last

    results = Experiment({"before": stages >> last, "after": later}, TOPICS, QRELS, ["AP"])
    expected = [mean_of(RUNS[0]), mean_of(RUNS[0].assign(score=-RUNS[0]["score"]))]
    assert results.means["AP"].tolist() == pytest.approx(expected, rel=1e-12)


def test_candidates_of_a_first_stage_that_tells_no_weights_are_not_shared():
    stages = pt.Transformer.from_df(RUNS[0]) >> Turning()

    def later():
        stages[1].fit(TOPICS, QRELS)
        return stages >> pt.Transformer.identity()

    results = Experiment({"before": stages >> pt.Transformer.identity(), "after": later}, TOPICS, QRELS, ["AP"])
    expected = [mean_of(RUNS[0]), mean_of(RUNS[0].assign(score=-RUNS[0]["score"]))]
    assert results.means["AP"].tolist() == pytest.approx(expected, rel=1e-12)


class Turning(pt.Estimator):
    """A model of another package; trained, it turns the ranking round."""

    sign = 1.0

    def fit(self, topics, qrels, *validation):
        self.sign = -1.0
        return self

    def transform(self, inp):
        return inp.assign(score=self.sign * inp["score"])


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


def test_a_seed_by_another_name_is_told():
    for factory, shown in ((lambda s=0: RUNS[s], "s=0"), (lambda my_seed=1: RUNS[my_seed], "my_seed=1")):
        with pytest.raises(ValueError, match=f"the factory of 'a' would not get a seed in {shown}: name it seed"):
            Experiment({"a": factory}, TOPICS, QRELS, ["AP"], seeds=[0, 1])
        with pytest.raises(ValueError, match=f"would not get a seed in {shown}"):
            fit_seeds(factory, [0, 1], TOPICS, QRELS)
