"""What a model is after a training that was interrupted, failed, or never began."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pyterrier as pt
import pytest
import torch

import pyterrier_longdoc as ld
from pyterrier_longdoc.rerankers.base import UntrainedWarning
from pyterrier_longdoc.training import TrainingArgs, evaluate

from ..support.systems import make
from ..training.test_training import toy_task

RUN, JUDGED = toy_task(0, queries=5)
FAST = {"queries_per_step": 1, "learning_rates": {"": 3e-2}, "metric": "RR"}


class Interrupter:
    """Raises KeyboardInterrupt at the n-th call."""

    def __init__(self, function, n: int) -> None:
        self.function, self.left = function, n

    def __call__(self, *args, **kwargs):
        self.left -= 1
        if not self.left:
            raise KeyboardInterrupt
        return self.function(*args, **kwargs)


def interrupted(model, n: int, monkeypatch, *validation) -> None:
    """Fits and is interrupted at the n-th scoring of a training pair."""
    scorer = model.load_scorer()
    with monkeypatch.context() as patch:
        patch.setattr(scorer, "forward", Interrupter(scorer.forward, n))
        with pytest.raises(KeyboardInterrupt):
            model.fit(RUN, JUDGED, *validation)


def state(model) -> dict[str, torch.Tensor]:
    return {key: value.clone() for key, value in model.load_scorer().state_dict().items()}


def test_stopped_before_the_first_step(plain_encoder, monkeypatch):
    model = make("MaxP", plain_encoder, training=TrainingArgs(**FAST))
    before = state(model)
    interrupted(model, 1, monkeypatch)
    assert all(torch.equal(before[key], value) for key, value in state(model).items())
    with pytest.warns(UntrainedWarning):
        model(RUN)
    model.seed = 7  # nothing is lost that was trained
    model(RUN)


def test_stopped_after_a_step(plain_encoder, monkeypatch):
    model = make("MaxP", plain_encoder, training=TrainingArgs(**FAST))
    before = state(model)
    interrupted(model, 3, monkeypatch)
    assert not all(torch.equal(before[key], value) for key, value in state(model).items())
    assert all(parameter.grad is None for parameter in model.load_scorer().parameters())
    model.seed = 7
    with pytest.raises(ValueError, match="holds trained weights"):
        model(RUN)


def test_best_epoch_survives_an_interruption(cross_encoder, monkeypatch):
    whole = make("MaxP", cross_encoder, training=TrainingArgs(epochs=4, **FAST)).fit(RUN, JUDGED, RUN, JUDGED)
    figures = whole.history["validation"].tolist()
    model = make("MaxP", cross_encoder, training=TrainingArgs(epochs=5, **FAST))
    interrupted(model, 4 * 5 + 3, monkeypatch, RUN, JUDGED)  # in the fifth epoch
    assert model.history["epoch"].tolist() == [1, 2, 3, 4]
    kept = model.history["validation"].tolist()
    assert len(set(figures)) > 1
    assert evaluate(model(RUN), JUDGED, "RR") == pytest.approx(max(kept))


def test_divergence_in_the_last_step_is_an_error(cross_encoder):
    model = make("MaxP", cross_encoder, training=TrainingArgs(queries_per_step=5, learning_rates={"": 1e38}))
    with pytest.raises(FloatingPointError, match="after step 1 there are weights that are not finite"):
        model.fit(RUN, JUDGED)
    with pytest.raises(FloatingPointError, match="otherwise a weight of the model is not finite"):
        model(RUN)


def test_history_goes_on_in_a_second_training(cross_encoder):
    model = make("MaxP", cross_encoder, training=TrainingArgs(epochs=2, queries_per_step=3))
    model.fit(RUN, JUDGED).fit(RUN, JUDGED)
    assert model.history["epoch"].tolist() == [1, 2, 3, 4]
    assert model.history["step"].tolist() == [2, 4, 6, 8]


@pytest.mark.parametrize("metric", ["ndcg_cut_10", "nDCG@", "", "import os"])
def test_metric_that_does_not_exist(metric):
    with pytest.raises(ValueError, match="is no measure that ir_measures knows"):
        TrainingArgs(metric=metric)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"epochs": 1.5}, "epochs=1.5 must be a whole number"),
        ({"max_negative_rank": 0}, "max_negative_rank=0 must be a whole number of at least 1"),
        ({"margin": -1.0}, "margin=-1.0 must be at least 0"),
        ({"learning_rates": {"": -1e-5}}, r"learning_rates\[''\]=-1e-05 must be at least 0"),
        ({"learning_rates": {"": float("nan")}}, r"learning_rates\[''\]=nan must be at least 0"),
        ({"learning_rates": 1e-4}, "learning_rates=0.0001 must map prefixes to rates"),
        ({"margin": None}, "margin=None must be at least 0"),
        ({"min_label": "1"}, "min_label='1' must be a number"),
        ({"warmup": None}, "warmup=None must be a share of the steps"),
        ({"dropout": "0.1"}, "dropout='0.1' must be at least 0 and below 1, or None"),
        ({"seed": None}, "seed=None must be a whole number"),
        ({"seed": 1.5}, "seed=1.5 must be a whole number"),
        ({"lora": 16}, r"lora=16 must be ld.Lora\(rank=...\) or None"),
        ({"gradient_checkpointing": "no"}, "gradient_checkpointing='no' must be True or False"),
        ({"restart_each_epoch": 1}, "restart_each_epoch=1 must be True or False"),
        ({"trackers": "wandb"}, "trackers='wandb' must be a tuple"),
    ],
)
def test_recipes_that_cannot_work(arguments, message):
    with pytest.raises(ValueError, match=message):
        TrainingArgs(**arguments)


def test_validation_data_is_checked_before_training(cross_encoder, monkeypatch):
    model = make("MaxP", cross_encoder)
    monkeypatch.setattr(model, "_load_weights", lambda: pytest.fail("weights were loaded"))
    with pytest.raises(pt.validate.InputValidationError, match="text"):
        model.fit(RUN, JUDGED, RUN.drop(columns="text"), JUDGED)
    with pytest.raises(ValueError, match=r"qrels lack the columns \['label'\]"):
        model.fit(RUN, JUDGED, RUN, JUDGED.drop(columns="label"))
    with pytest.raises(ValueError, match="validation qrels judge none"):
        model.fit(RUN, JUDGED, RUN, JUDGED.assign(qid="other"))
    with pytest.raises(ValueError, match="both candidates and qrels"):
        model.fit(RUN, JUDGED, RUN)


def test_fit_leaves_its_frames_alone(cross_encoder):
    run, judged = RUN.copy(), JUDGED.copy()
    model = ld.MaxP(cross_encoder, window_size=20, stride=10, max_query_len=8)
    model.fit(run, judged, run, judged)
    pd.testing.assert_frame_equal(run, RUN)
    pd.testing.assert_frame_equal(judged, JUDGED)
    assert np.isfinite(model(RUN)["score"]).all()
