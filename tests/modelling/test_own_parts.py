"""Encoders, readers and heads that users bring: what they explain, and what is refused."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import pytest
import torch
from torch import nn

import pyterrier_longdoc as ld
from pyterrier_longdoc.modelling.encoder import WindowEncoder
from pyterrier_longdoc.modelling.heads import registered_heads
from pyterrier_longdoc.modelling.reader import Reader

from ..support.systems import QUIET, scores, told_of

pytestmark = QUIET
READING = {"window_size": 20, "stride": 20, "max_query_len": 8, "device": "cpu"}


def over(encoder, backbone, cls=ld.MaxP, **arguments):
    """A model with an encoder of one's own."""
    own = type(f"{cls.__name__}With{encoder.__name__}", (cls,), {"encoder_class": encoder})
    return own(backbone, **{**READING, **arguments})


@pytest.fixture
def lengths() -> type[ld.MaxP]:
    """MaxP, whose encoder explains the number of tokens of each window in a column of its own."""

    class Lengths(WindowEncoder):
        explains = ("explain_lengths",)

        def explain(self, pairs, encoded, head):
            return {"explain_lengths": [[len(one) for one in pair.windows] for pair in pairs]}

    class LengthsP(ld.MaxP):
        encoder_class = Lengths

    return LengthsP


def test_explanations_of_a_custom_encoder_become_columns(lengths, cross_encoder, results):
    out = lengths(cross_encoder, explain=True, **READING)(results)
    assert [len(row) for row in out["explain_lengths"]] == [len(row) for row in out["window_scores"]]


def test_a_later_model_leaves_an_encoders_column_out(lengths, cross_encoder, results):
    out = lengths(cross_encoder, explain=True, **READING)(results)
    assert "explain_lengths" not in ld.MaxP(cross_encoder, **READING)(out)


class Reversed(Reader):
    """`[CLS] text [SEP] query [SEP]`."""

    def assemble(self, query, content):
        made = self.specials.around(content, query)
        return replace(made, query=made.content, content=made.query)


class ReversedEncoder(WindowEncoder):
    def make_reader(self, settings):
        return Reversed(self.origin, settings)


def test_a_custom_reader_changes_the_input(cross_encoder, results):
    found = scores(over(ReversedEncoder, cross_encoder), results)
    assert np.abs(found - scores(ld.MaxP(cross_encoder, **READING), results)).max() > 1e-3


class Layered(WindowEncoder):
    """Has a layer of its own."""

    def __init__(self, backbone):
        super().__init__(backbone)
        self.gate = nn.Linear(self.hidden_size, self.hidden_size)


class Neutral(Layered):
    identity_at_start = True


class Scaled(WindowEncoder):
    """Has a parameter of its own outside any layer."""

    def __init__(self, backbone):
        super().__init__(backbone)
        self.scale = nn.Parameter(torch.ones(self.hidden_size))


def of_a_trained_layer(backbone):
    trained = over(Layered, backbone)
    trained.model.mark_trained({})
    return ld.MaxP(backbone, **READING).start_from(trained)


UNTRAINED = {
    "a layer": partial(over, Layered),
    "a parameter outside layers": partial(over, Scaled),
    "after start_from": lambda backbone: over(Layered, backbone).start_from(ld.MaxP(backbone, **READING)),
    "without the layer that the other model has": of_a_trained_layer,
}


@pytest.mark.parametrize("case", UNTRAINED)
def test_random_weights_of_a_custom_encoder_cause_a_warning(case, cross_encoder, results):
    with pytest.warns(ld.UntrainedWarning):
        UNTRAINED[case](cross_encoder)(results)


@pytest.mark.parametrize(("encoder", "warnings"), [(Neutral, 0), (Layered, 1)])
def test_only_an_encoder_that_starts_neutral_causes_no_warning(encoder, warnings, cross_encoder, results):
    model = over(encoder, cross_encoder)
    assert len(told_of(ld.UntrainedWarning, lambda: model(results))) == warnings


def test_start_from_takes_over_parameters_of_an_encoder_outside_layers(cross_encoder):
    other = over(Scaled, cross_encoder)
    nn.init.constant_(other.model.encoder.scale, 3.0)
    model = over(Scaled, cross_encoder).start_from(other)
    assert model.model.encoder.scale.tolist() == other.model.encoder.scale.tolist()


class NoisyHead(registered_heads()["maxp"], name="noisyp"):
    """Draws weights in `warm_start`."""

    def warm_start(self, start):
        super().warm_start(start)
        nn.init.normal_(self.final.bias)


@dataclass(eq=False, repr=False)
class NoisyP(ld.MaxP):
    noisy: bool = ld.argument(True, role="head")

    def head_spec(self):
        return ("noisyp" if self.noisy else "maxp"), {}


def noisy(cross_encoder, noisy=True):
    return NoisyP(cross_encoder, noisy=noisy, seed=3, **READING)


def started(cross_encoder):
    return noisy(cross_encoder).start_from(noisy(cross_encoder, False))


@pytest.mark.parametrize("make_noisy", [noisy, started])
def test_random_weights_of_warm_start_only_depend_on_the_seed(make_noisy, cross_encoder):
    drawn = []
    for state in (0, 1):
        torch.manual_seed(state)
        drawn.append(make_noisy(cross_encoder).model.head.final.bias.item())
    assert drawn[0] == drawn[1]
