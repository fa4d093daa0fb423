"""What may change about a trained model and what may not."""

from __future__ import annotations

import pytest
import torch

import pyterrier_longdoc as ld


def trained(model, results):
    model.transform(results)
    model._loaded.trained = True
    return model


def test_the_number_of_windows_that_count_may_change(cross_encoder, results):
    model = trained(ld.KMaxP(cross_encoder, window_size=20, stride=10, k=1), results)
    encoder = model.load_scorer().encoder
    best = model(results)["score"]
    model.set_parameter("k", 100)
    mean = model(results)["score"]
    assert model.load_scorer().encoder is encoder
    assert (mean <= best + 1e-6).all()
    assert (mean < best - 1e-3).any()


def test_attention_heads_may_not_change_although_the_weights_would_fit(cross_encoder, results):
    model = ld.PARADE(cross_encoder, aggregation="transformer", attention_heads=4, window_size=20, stride=10)
    with pytest.warns(ld.UntrainedWarning):
        trained(model, results)
    model.set_parameter("attention_heads", 2)
    with pytest.raises(ValueError, match=r"change of the aggregation would lose them: make a new PARADE"):
        model(results)


def test_an_untrained_model_starts_afresh_with_other_options(cross_encoder, results):
    model = ld.PARADE(cross_encoder, aggregation="transformer", layers=1, window_size=20, stride=10)
    with pytest.warns(ld.UntrainedWarning):
        model(results)
    model.set_parameter("layers", 2)
    model(results)
    layers = {name.split(".")[3] for name, _ in model.load_scorer().head.named_parameters() if ".layer." in name}
    assert layers == {"0", "1"}


def test_the_same_seed_gives_the_same_random_layers(cross_encoder):
    def weight(seed):
        model = ld.PARADE(cross_encoder, aggregation="transformer", window_size=20, stride=10, seed=seed)
        return model.load_scorer().head.final.weight

    assert torch.equal(weight(1), weight(1))
    assert not torch.equal(weight(1), weight(2))
