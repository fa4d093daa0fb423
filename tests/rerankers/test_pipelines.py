"""Rerankers inside PyTerrier: operators, experiments, grid search, fit; and the package's public names."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import numpy as np
import pandas as pd
import pyterrier as pt
import pytest

import pyterrier_longdoc as ld

from ..support import tiny
from ..support.systems import BI_ENCODERS, CROSS_ENCODERS, SLIDING, SYSTEMS, make

pytestmark = [
    pytest.mark.filterwarnings("ignore::pyterrier_longdoc.rerankers.base.UntrainedWarning"),
    pytest.mark.filterwarnings("ignore::pyterrier_longdoc.common.frames.TruncationWarning"),
]

W = tiny.WORDS
TOPICS = pd.DataFrame({"qid": ["1", "2", "3"], "query": ["cat river", "snow tree", "fish"]})
TEXTS = {
    f"d{i}": " ".join(W[(i * 5 + j * (i + 2)) % len(W)] + "." * (j % 7 == 6) for j in range(15 + 9 * i))
    for i in range(5)
}
RUN = pd.DataFrame(
    [
        {"qid": qid, "docno": docno, "score": 9.0 - i, "rank": i}
        for qid in TOPICS["qid"]
        for i, docno in enumerate(TEXTS)
    ]
)
QRELS = pd.DataFrame({"qid": ["1", "2", "2", "3"], "docno": ["d3", "d0", "d4", "d1"], "label": [1, 2, 1, 1]})
FIRST_STAGE = pt.Transformer.from_df(RUN)
LOADER = pt.apply.generic(lambda frame: frame.assign(text=frame["docno"].map(TEXTS)))


@pytest.fixture(scope="session")
def systems(cross_encoder, plain_encoder):
    return {name: make(name, plain_encoder if name in BI_ENCODERS else cross_encoder) for name in SYSTEMS}


@pytest.fixture(params=SYSTEMS)
def system(request, systems):
    """A transformer shared between tests, which must not change it."""
    return systems[request.param]


@pytest.fixture
def candidates() -> pd.DataFrame:
    return (FIRST_STAGE >> LOADER)(TOPICS)


def by_pair(frame: pd.DataFrame) -> pd.Series:
    return frame.set_index(["qid", "docno"])["score"].sort_index()


def scores(transformer, frame) -> np.ndarray:
    return transformer(frame)["score"].to_numpy()


# Operators.


def test_compose_and_cutoff(system, candidates):
    out = ((FIRST_STAGE >> LOADER >> system) % 2)(TOPICS)
    everything = system(candidates)
    expected = everything[everything["rank"] < 2]
    pd.testing.assert_series_equal(by_pair(out), by_pair(expected), atol=1e-5)
    assert out["rank"].tolist() == [*expected["rank"]]


def test_cutoff_before(system, candidates):
    out = (FIRST_STAGE % 3 >> LOADER >> system)(TOPICS)
    assert len(out) == 9
    pd.testing.assert_series_equal(by_pair(out), by_pair(system(candidates)).loc[by_pair(out).index], atol=1e-5)


def test_sum_feature_union_and_set_operators(system, systems, candidates):
    other = systems["FirstP"]
    ours, theirs = by_pair(system(candidates)), by_pair(other(candidates))
    pd.testing.assert_series_equal(by_pair((system + other)(candidates)), ours + theirs, atol=1e-5)
    pd.testing.assert_series_equal(by_pair((2.0 * system)(candidates)), 2 * ours, atol=1e-5)
    features = (system**other)(candidates).set_index(["qid", "docno"])["features"].sort_index()
    np.testing.assert_allclose(np.stack(features), np.stack([ours, theirs], 1), atol=1e-5)
    union = (system % 2 | other % 2)(candidates)
    assert len(union) == len(union.drop_duplicates(["qid", "docno"])) >= 6
    concatenated = (system % 2 ^ other)(candidates)
    assert len(concatenated) == len(candidates)
    top = concatenated[concatenated["rank"] < 2].set_index(["qid", "docno"]).index
    assert set(top) == set((system % 2)(candidates).set_index(["qid", "docno"]).index)


# Experiments.


def test_experiment_plans_agree(systems):
    loaded = FIRST_STAGE >> LOADER
    pipelines = {name: loaded >> system for name, system in systems.items()}
    tables = [
        pt.Experiment(
            {"first stage": FIRST_STAGE, **pipelines},
            TOPICS,
            QRELS,
            ["ndcg_cut_10", "recip_rank"],
            plan=plan,
            validate="error",
            batch_size=batch_size,
        )
        for plan, batch_size in (("linear", None), ("tree", None), ("linear", 1))
    ]
    pd.testing.assert_frame_equal(tables[0], tables[1])
    pd.testing.assert_frame_equal(tables[0], tables[2])
    assert tables[0]["ndcg_cut_10"].between(0.01, 1).all()


def test_experiment_names_systems_by_their_arguments(cross_encoder):
    systems = [ld.MaxP(cross_encoder, **SLIDING), ld.SumP(cross_encoder, **SLIDING)]
    table = pt.Experiment([FIRST_STAGE >> LOADER >> system for system in systems], TOPICS, QRELS, ["map"])
    assert all(repr(system) in name for system, name in zip(systems, table["name"], strict=True))


# Changing arguments.


@pytest.mark.parametrize("name", CROSS_ENCODERS)
def test_apply_attributes_keeps_weights(name, cross_encoder, candidates):
    model = make(name, cross_encoder)
    weights = model.load_scorer().head.final.weight
    weights.data.mul_(-3.0)
    model._loaded.trained = True
    clone = pt.inspect.transformer_apply_attributes(model, batch_size=3)
    assert (clone.batch_size, model.batch_size) == (3, 64)
    np.testing.assert_allclose(scores(clone, candidates), scores(model, candidates), atol=1e-5)
    before = scores(clone, candidates)
    weights.data.zero_()
    np.testing.assert_array_equal(scores(clone, candidates), before)  # a copy, not a view


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("KMaxP", {"k": 2}),
        ("KMaxP", {"weights": [1.0, 0.5, 0.1]}),
        ("Birch", {"first_stage_weight": 0.9}),
        ("Birch", {"k": 1}),
        ("MaxP", {"window_size": 12}),
        ("MaxP", {"stride": 5}),
        ("MaxP", {"max_windows": 1}),
        ("MaxP", {"max_doc_len": 11}),
        ("MaxP", {"max_query_len": 1}),
        ("MaxP", {"pad_query": True}),
        ("MaxP", {"windows": ld.SentenceWindows(max_tokens=7), "window_size": 150, "stride": 100}),
        ("PARADE-attn", {"window_size": 12}),
        ("FirstP", {"window_size": 30}),
        ("BiEncoder-max", {"window_size": 12}),
        ("BiEncoder-max", {"aggregation": "avg"}),
        ("BiEncoder-max", {"pooling": "cls"}),
        ("BiEncoder-max", {"similarity": "dot"}),
        ("BiEncoder-max", {"query_prefix": "find "}),
        ("BiEncoder-max", {"passage_prefix": "the "}),
        ("BiEncoder-max", {"max_doc_len": 11}),
    ],
)
def test_changed_argument_takes_effect(name, changes, cross_encoder, plain_encoder, candidates):
    backbone = plain_encoder if name in BI_ENCODERS else cross_encoder
    model = make(name, backbone)
    before = scores(model, candidates)
    for parameter, value in changes.items():
        model.set_parameter(parameter, value)
    after = scores(model, candidates)
    assert np.abs(after - before).max() > 1e-4
    np.testing.assert_allclose(after, scores(make(name, backbone, **changes), candidates), atol=1e-5)


@pytest.mark.parametrize(
    ("name", "changes"),
    [("KMaxP", {"k": 1}), ("Birch", {"first_stage_weight": 1.0}), ("MaxP", {"window_size": 12, "stride": 6})],
)
def test_changed_argument_keeps_trained_weights(name, changes, cross_encoder, candidates):
    model = make(name, cross_encoder)
    model.fit(candidates, QRELS)
    trained = model.load_scorer().head.final.weight.clone()
    for parameter, value in changes.items():
        model.set_parameter(parameter, value)
    model(candidates)
    assert model.load_scorer().head.final.weight.equal(trained)
    assert len(model.history) == 1


def test_untrained_model_may_change_backbone_and_aggregation(cross_encoder, tmp_path, candidates):
    other = tiny.checkpoint(tmp_path, seed=1)
    model = make("PARADE-attn", cross_encoder)
    first = scores(model, candidates)
    model.aggregation = "max"
    np.testing.assert_array_equal(scores(model, candidates), scores(make("PARADE-max", cross_encoder), candidates))
    model.backbone = other
    np.testing.assert_array_equal(scores(model, candidates), scores(make("PARADE-max", other), candidates))
    model.backbone, model.aggregation = cross_encoder, "attn"
    np.testing.assert_array_equal(scores(model, candidates), first)


def test_trained_model_may_not(cross_encoder, plain_encoder, candidates):
    changes = [
        ("backbone", plain_encoder, "backbone, trust_remote_code or seed"),
        ("aggregation", "max", "the aggregation"),
        ("attention", "elementwise", "the aggregation"),
        ("seed", 1, "backbone, trust_remote_code or seed"),
    ]
    model = make("PARADE-attn", cross_encoder)
    expected = scores(model.fit(candidates, QRELS), candidates)
    for parameter, value, what in changes:
        kept = getattr(model, parameter)
        setattr(model, parameter, value)
        with pytest.raises(ValueError, match=f"holds trained weights, and a change of {what} would lose them"):
            model(candidates)
        setattr(model, parameter, kept)
    np.testing.assert_array_equal(scores(model, candidates), expected)


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("KMaxP", {"k": [1, 3]}),
        ("KMaxP", {"weights": [None, [-1.0, -1.0, -1.0]]}),
        ("MaxP", {"window_size": [12, 20]}),
        ("Birch", {"first_stage_weight": [0.0, 0.5, 1.0]}),
    ],
)
def test_grid_search(name, parameters, cross_encoder):
    model = make(name, cross_encoder)
    ((parameter, values),) = parameters.items()
    pipeline = FIRST_STAGE >> LOADER >> model
    found, best, ((_, _, value),) = pt.GridSearch(
        pipeline, {model: parameters}, TOPICS, QRELS, metric="map", return_type="both"
    )
    alone = {}
    for candidate in values:
        fixed = FIRST_STAGE >> LOADER >> make(name, cross_encoder, **{parameter: candidate})
        alone[str(candidate)] = pt.Experiment([fixed], TOPICS, QRELS, ["map"])["map"].item()
    assert alone[str(value)] == max(alone.values()) == pytest.approx(best)
    assert getattr(model, parameter) == value
    assert pt.Experiment([found], TOPICS, QRELS, ["map"])["map"].item() == pytest.approx(best)


def test_cross_validated_grid_search(cross_encoder):
    model = make("Birch", cross_encoder)
    folds = [TOPICS.iloc[:1], TOPICS.iloc[1:]]
    table, settings = pt.KFoldGridSearch(
        FIRST_STAGE >> LOADER >> model, {model: {"first_stage_weight": [0.0, 0.5, 1.0]}}, folds, QRELS, metric="map"
    )
    assert sorted(table["qid"].unique()) == ["1", "2", "3"]
    assert len(settings) == 2


# Training inside a pipeline.


@pytest.mark.parametrize("validated", [False, True])
@pytest.mark.parametrize("name", CROSS_ENCODERS)
def test_fit_in_a_pipeline(name, validated, cross_encoder, candidates):
    recipe = ld.TrainingArgs(epochs=2, learning_rates={"": 1e-2})
    model = make(name, cross_encoder, training=recipe)
    before = scores(model, candidates)
    pipeline = FIRST_STAGE >> LOADER >> model
    if validated:
        pipeline.fit(TOPICS, QRELS, TOPICS, QRELS)
    else:
        pipeline.fit(TOPICS, QRELS)
    columns = ["epoch", "step", "loss", "learning_rate", "documents_per_second", *(["validation"] if validated else [])]
    assert model.history.columns.tolist() == columns
    assert len(model.history) == 2
    assert not model.load_scorer().training
    after = scores(model, candidates)
    assert np.isfinite(after).all()
    assert np.abs(after - before).max() > 1e-3
    np.testing.assert_array_equal(scores(pipeline, TOPICS), after)


def test_fit_wants_all_of_the_validation(cross_encoder, candidates):
    with pytest.raises(ValueError, match="both candidates and qrels"):
        make("MaxP", cross_encoder).fit(candidates, QRELS, candidates)


def test_fit_needs_text(cross_encoder):
    with pytest.raises(pt.validate.InputValidationError, match="needs the text"):
        make("MaxP", cross_encoder).fit(FIRST_STAGE(TOPICS), QRELS)


def test_fit_with_text_loader(cross_encoder, candidates):
    model = make("MaxP", cross_encoder, text_loader=LOADER)
    same = make("MaxP", cross_encoder)
    run = FIRST_STAGE(TOPICS)
    np.testing.assert_array_equal(scores(model.fit(run, QRELS), run), scores(same.fit(candidates, QRELS), candidates))


# The package.


def test_import_is_light():
    code = (
        "import sys, pyterrier_longdoc as ld; dir(ld); ld.__version__; "
        "print([m for m in ('torch', 'transformers') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_public_names():
    assert ld.__all__ == sorted(ld.__all__)
    for name in ld.__all__:
        public = getattr(ld, name)
        if name not in ("presets", "protocols"):  # mappings
            assert public.__name__ == name
        assert public.__doc__
        assert public.__module__.startswith("pyterrier_longdoc.")
    assert set(ld.__all__) <= set(dir(ld))
    with pytest.raises(AttributeError, match="no attribute 'NoSuchName'"):
        _ = ld.NoSuchName


def test_every_reranker_is_public():
    folder = Path(ld.__file__).parent / "rerankers"
    classes = {
        node.name
        for module in ("cross.py", "biencoder.py")
        for node in ast.parse((folder / module).read_text(encoding="utf-8")).body
        if isinstance(node, ast.ClassDef) and any(getattr(d, "func", None) is not None for d in node.decorator_list)
    }
    classes -= {"SlidingReranker"}  # a base class
    assert classes >= {"FirstP", "MaxP", "PARADE", "BiEncoder"}
    assert classes <= set(ld.__all__)
    assert classes == {cls.__name__ for cls, _ in SYSTEMS.values()}  # the contract tests run over all of them
