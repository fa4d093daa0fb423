"""Calibrated: probabilities with known values, kept without pickles."""

from __future__ import annotations

import sys

import numpy as np
import pandas as pd
import pyterrier as pt
import pytest
from scipy.special import expit

import pyterrier_longdoc as ld
from pyterrier_longdoc.common.key import key
from pyterrier_longdoc.data.collection import TextLoader

from ..support import tiny
from ..support.systems import QRELS, QUIET, make

pytest.importorskip("sklearn")

pytestmark = QUIET


def judged(queries=100, depth=20, slope=2.0, bias=-1.0, seed=0, windows=False):
    """Scores, and labels that are drawn with the probability `expit(slope * score + bias)`."""
    rng = np.random.default_rng(seed)
    qid, docno = np.divmod(np.arange(queries * depth), depth)
    frame = pd.DataFrame({"qid": qid.astype(str), "query": "q", "docno": docno.astype(str), "text": "t"})
    frame["score"] = 2 * rng.normal(size=len(frame))
    logits = slope * frame["score"] + bias
    if windows:
        counts = rng.integers(1, 64, len(frame))
        frame["window_scores"] = [[0.0] * count for count in counts]
        logits = logits - np.log2(counts)
    frame["truth"] = expit(logits)
    label = (rng.random(len(frame)) < frame["truth"]).astype(int)
    return pt.model.add_ranks(frame), frame[["qid", "docno"]].assign(label=label)


TEXTS = tiny.results()
MANY = pd.concat([TEXTS.assign(qid=TEXTS["qid"] + str(i)) for i in range(40)])
LABELS = pd.concat([QRELS.assign(qid=QRELS["qid"] + str(i)) for i in range(40)])
"""Enough copies of the queries for `fit`."""

SCORES = pt.Transformer.identity()
"""A reranker whose scores are those of the frame."""

CALIBRATION = {"of": ["score"], "weights": [2.0], "bias": -1.0, "steps": None}


@pytest.mark.parametrize("method", ["platt", "isotonic"])
@pytest.mark.parametrize("windows", [False, True])
def test_known_probabilities_are_found(method, windows):
    frame, qrels = judged(queries=400, windows=windows)
    model = ld.Calibrated(SCORES, method=method).fit(frame, qrels)
    out = model(frame)
    assert np.abs(out["probability"] - frame["truth"]).mean() < 0.02 + 0.01 * (method == "isotonic")
    assert out.drop(columns="probability").equals(frame)  # scores and ranks stay
    if method == "platt":
        np.testing.assert_allclose(model.calibration["weights"], [2, -1] if windows else [2], atol=0.15)
        assert model.calibration["bias"] == pytest.approx(-1, abs=0.4)


def test_probabilities_are_those_of_the_optimum_of_platts_likelihood():
    frame, qrels = judged(windows=True)
    model = ld.Calibrated(SCORES).fit(frame, qrels)
    x = np.column_stack([frame["score"], np.log2(frame["window_scores"].map(len)), np.ones(len(frame))])
    relevant = qrels["label"].to_numpy() > 0
    ones, zeros = relevant.sum(), (~relevant).sum()
    targets = np.where(relevant, (ones + 1) / (ones + 2), 1 / (zeros + 2))
    optimum = np.zeros(3)
    for _ in range(50):  # Newton's steps
        p = expit(x @ optimum)
        optimum += np.linalg.solve((x * (p * (1 - p))[:, None]).T @ x, x.T @ (targets - p))
    assert np.abs(x.T @ (targets - expit(x @ optimum))).max() < 1e-9
    np.testing.assert_allclose(model(frame)["probability"], expit(x @ optimum), rtol=0, atol=2e-6)


def test_separable_scores_stay_finite_by_smoothed_labels():
    frame, _ = judged(20, 4)
    qrels = frame[["qid", "docno"]].assign(label=(frame["score"] > 0).astype(int))
    out = ld.Calibrated(SCORES).fit(frame, qrels)(frame)
    assert out["probability"].between(1e-6, 1 - 1e-6).all()


def test_unjudged_documents_count_as_not_relevant_unless_they_are_ignored():
    frame, qrels = judged(60, 10)
    positives = qrels[qrels["label"] > 0]
    assert positives["qid"].nunique() == 60
    everything, same = (ld.Calibrated(SCORES).fit(frame, labels) for labels in (qrels, positives))
    assert same.calibration == everything.calibration
    with pytest.raises(ValueError, match=rf"{len(positives)} .* 0 "):
        ld.Calibrated(SCORES, judged_only=True).fit(frame, positives)


def test_queries_without_a_label_are_ignored():
    frame, qrels = judged(60, 10)
    half = ld.Calibrated(SCORES).fit(frame, qrels[qrels["qid"].astype(int) < 30])
    assert half.calibration["documents"] == 300
    with pytest.raises(ValueError, match="judged"):
        ld.Calibrated(SCORES).fit(frame, qrels.head(30))


def probabilities(model) -> list[float]:
    return pytest.approx(model(TEXTS)["probability"].tolist(), rel=1e-5)


def test_a_calibration_is_saved_with_its_model_and_restored(tmp_path):
    model = ld.Calibrated(make("MaxP", explain=True), method="isotonic").fit(MANY, LABELS)
    model.save(tmp_path)
    loaded = ld.Calibrated.load(tmp_path)
    assert (type(loaded.model), loaded.method) == (ld.MaxP, "isotonic")
    assert loaded(TEXTS)["probability"].tolist() == probabilities(model)
    assert isinstance(ld.CrossEncoder.load(tmp_path), ld.MaxP)  # the model alone
    loaded.model.explain = False
    with pytest.raises(ValueError, match="explain"):
        loaded(TEXTS)
    for changes in ({"max_query_len": 2}, {"model": make("FirstP", explain=True)}):
        with pytest.raises(ValueError, match="changed"):
            ld.Calibrated.load(tmp_path, **changes)(TEXTS)


def test_a_calibration_without_weights_is_saved_alone(tmp_path):
    ld.Calibrated(SCORES, calibration=CALIBRATION).save(tmp_path)
    assert ld.Calibrated.load(tmp_path, SCORES).calibration == CALIBRATION
    with pytest.raises(ValueError, match="model="):
        ld.Calibrated.load(tmp_path)


def test_an_artifact_has_a_calibration_until_another_model_is_saved_there(tmp_path):
    model = ld.Calibrated(make("MaxP"), calibration=CALIBRATION)
    model.save(tmp_path)
    assert pt.Artifact.load(str(tmp_path))(TEXTS)["probability"].tolist() == probabilities(model)
    make("FirstP").save(tmp_path, overwrite=True)
    assert "probability" not in pt.Artifact.load(str(tmp_path))(TEXTS)
    with pytest.raises(ValueError, match="another model"):
        ld.Calibrated(SCORES, calibration=CALIBRATION).save(tmp_path)


CHANGES = {
    "training": lambda model: model.fit(MANY, LABELS),
    "window selection": lambda model: setattr(model, "preselect", ld.BM25Windows(1)),
    "length": lambda model: setattr(model, "max_doc_len", 3),
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("wrap", [lambda model: model, lambda model: 0.5 * model], ids=["alone", "in a pipeline"])
def test_a_calibration_is_refused_after_a_change_of_its_model(change, wrap):
    model = make("MaxP", training=ld.TrainingArgs(max_steps=1, learning_rates={"": 1e-2}))
    calibrated = ld.Calibrated(wrap(model)).fit(MANY, LABELS)
    CHANGES[change](model)
    with pytest.raises(ValueError, match="changed"):
        calibrated(TEXTS)
    assert calibrated.fit(MANY, LABELS)(TEXTS)["probability"].between(0, 1).all()


def test_a_calibration_stays_valid_with_another_precision_or_text_loader():
    model = ld.Calibrated(make("MaxP")).fit(MANY, LABELS)
    expected = model(TEXTS)["probability"]
    model.model.dtype, model.model.batch_size = "bfloat16", 3
    model.model.text_loader = pt.apply.text(lambda row: "cat")
    np.testing.assert_allclose(model(TEXTS)["probability"], expected, atol=0.1)


def test_a_calibration_stays_valid_with_a_text_loader_of_other_texts():
    def loader(text):
        return TextLoader({docno: {"docno": docno, "text": text} for docno in TEXTS["docno"]}, ["text"])

    model = make("MaxP")
    pipeline = ld.Calibrated(loader("cat") >> model).fit(MANY, LABELS)
    pipeline.model = loader("dog") >> model
    assert pipeline(TEXTS)["probability"].between(0, 1).all()


def test_a_calibration_is_fitted_in_a_pipeline_and_part_of_the_key():
    frame, qrels = judged(60, 10)
    model, topics = ld.Calibrated(SCORES), frame[["qid", "query"]].drop_duplicates()
    before = key(model)
    (pt.Transformer.from_df(frame) >> model).fit(topics, qrels)
    assert key(model) != before  # a saved run of another calibration is another run
    assert 0 < len((pt.Transformer.from_df(frame) >> model)(topics).query("probability >= 0.5")) < len(frame)


def test_a_calibrated_model_shows_its_parts_and_papers():
    model = ld.Calibrated(make("MaxP"))
    assert "platt-1999-probabilistic" in model.cited()
    assert pt.inspect.subtransformers(model) == {"model": model.model}
    assert model(TEXTS.iloc[:0]).columns.tolist()[-1] == "probability"
    with pytest.raises(ValueError, match="model=3"):
        ld.Calibrated(3)


def test_fit_without_scikit_learn_names_the_missing_package(monkeypatch):
    monkeypatch.setitem(sys.modules, "sklearn.linear_model", None)
    with pytest.raises(ImportError, match="scikit-learn"):
        ld.Calibrated(SCORES).fit(*judged(30))


def test_a_constant_number_of_windows_has_no_weight():
    rng = np.random.default_rng(0)
    label = (np.arange(3000) % 3 == 0).astype(int)
    frame = pd.DataFrame({"qid": "q", "query": "a", "docno": [f"d{i}" for i in range(3000)], "text": "b"})
    frame = frame.assign(score=label + rng.normal(size=3000), window_scores=[[0.0, 1.0, 2.0]] * 3000)
    known = ld.Calibrated(SCORES).fit(frame, frame[["qid", "docno"]].assign(label=label))
    assert known.calibration["weights"][1] == 0.0
    few = known(frame.head(20).assign(window_scores=[[0.0]] * 20))["probability"]
    assert few.tolist() == known(frame.head(20))["probability"].tolist()


def test_a_calibrated_model_that_cannot_compute_probabilities_scores_nothing(results):
    asked = []

    def score(queries, texts):
        asked.extend(queries)
        return [0.0] * len(queries)

    model = ld.MaxP(ld.PairScorer(score))
    with pytest.raises(ValueError, match="call fit"):
        ld.Calibrated(model)(results)
    calibration = {"of": ["score", "window_scores"], "weights": [1.0, 1.0], "bias": 0.0, "steps": None}
    with pytest.raises(ValueError, match="explain=True"):
        ld.Calibrated(model, calibration=calibration)(results)
    assert not asked
    with pytest.raises(ValueError, match="window_scores"):
        ld.Calibrated(SCORES, calibration=calibration)(results.assign(score=1.0))


def test_probabilities_do_not_depend_on_the_scale_of_scores():
    frame, qrels = judged()
    model = ld.Calibrated(SCORES).fit(frame, qrels)
    small = frame.assign(score=frame["score"] * 1e-7)
    np.testing.assert_allclose(
        ld.Calibrated(SCORES).fit(small, qrels)(small)["probability"], model(frame)["probability"], atol=1e-4
    )
