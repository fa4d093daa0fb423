"""Encoders, readers and heads that users bring: what they explain, and what is refused."""

from __future__ import annotations

import warnings
from dataclasses import KW_ONLY, dataclass, replace
from functools import partial

import numpy as np
import pytest
import torch
from torch import nn

import pyterrier_longdoc as ld
from pyterrier_longdoc.common import frames
from pyterrier_longdoc.modelling.encoder import WindowEncoder
from pyterrier_longdoc.modelling.inputs import Encoded
from pyterrier_longdoc.modelling.readers import PairReader

from ..support.systems import QUIET, make, scores

READING = {"window_size": 20, "stride": 20, "max_query_len": 8, "device": "cpu"}


@pytest.fixture
def lengths(monkeypatch) -> type[ld.MaxP]:
    """MaxP, whose encoder explains the number of tokens of each window in a column of its own."""
    monkeypatch.setattr(frames, "EXPLANATION", [*frames.EXPLANATION])

    class Lengths(WindowEncoder):
        explains = ("window_lengths",)

        def explain(self, pairs, encoded, head):
            return [{"extra": {"window_lengths": [len(one) for one in pair.windows]}} for pair in pairs]

    class LengthsP(ld.MaxP):
        encoder_class = Lengths

    return LengthsP


def test_explanations_of_a_custom_encoder_become_columns(lengths, cross_encoder, results):
    out = lengths(cross_encoder, explain=True, **READING)(results)
    assert [len(row) for row in out["window_lengths"]] == [len(row) for row in out["window_scores"]]


def test_a_later_model_leaves_an_encoders_column_out(lengths, cross_encoder, results):
    out = lengths(cross_encoder, explain=True, **READING)(results)
    assert "window_lengths" not in ld.MaxP(cross_encoder, **READING)(out)


@pytest.mark.parametrize("found", [[], [{"lengths": 3}], [{"extra": {"lengths": 3}}]])
def test_custom_explanations_of_a_wrong_form_are_refused(found, cross_encoder, results):
    class Wrong(WindowEncoder):
        def explain(self, pairs, encoded, head):
            return found * len(pairs)

    class WrongP(ld.MaxP):
        encoder_class = Wrong

    with pytest.raises(ValueError, match=r"Wrong\.explain must return"):
        WrongP(cross_encoder, explain=True, **READING)(results)


def test_an_explanation_without_a_column_that_it_names_is_refused(lengths, cross_encoder, results, monkeypatch):
    monkeypatch.setattr(lengths.encoder_class, "explain", WindowEncoder.explain)
    with pytest.raises(ValueError, match=r"Lengths\.explain must return .*: \['window_lengths'\]"):
        lengths(cross_encoder, explain=True, **READING)(results)


class Reversed(PairReader):
    """`[CLS] text [SEP] query [SEP]`."""

    def assemble(self, query, content):
        made = self.specials.around(content, query)
        return replace(made, query=made.content, content=made.query)


class ReversedEncoder(WindowEncoder):
    def make_reader(self, settings):
        return Reversed(self.origin, settings)


class ReversedP(ld.MaxP):
    encoder_class = ReversedEncoder


def test_a_custom_reader_changes_the_input(cross_encoder, results):
    found = scores(ReversedP(cross_encoder, **READING), results)
    assert np.abs(found - scores(ld.MaxP(cross_encoder, **READING), results)).max() > 1e-3


@pytest.mark.parametrize("argument", [{"layout": "padded"}, {"template": "query: {query} text: {text}"}])
def test_arguments_that_a_reader_ignores_are_refused(argument, cross_encoder, results):
    [name] = argument
    with pytest.raises(ValueError, match=f"{name}= would have no effect: Reversed"):
        ReversedP(cross_encoder, **READING, **argument)(results)


class Layered(WindowEncoder):
    """Has a layer of its own."""

    def __init__(self, backbone):
        super().__init__(backbone)
        self.gate = nn.Linear(self.hidden_size, self.hidden_size)


class Neutral(Layered):
    starts_neutral = True


@pytest.mark.parametrize(("encoder", "warns"), [(Layered, True), (Neutral, False)])
def test_random_layers_of_a_custom_encoder_cause_a_warning(encoder, warns, cross_encoder, results):
    class LayeredP(ld.MaxP):
        encoder_class = encoder

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        LayeredP(cross_encoder, **READING)(results)
    assert any(issubclass(warning.category, ld.UntrainedWarning) for warning in caught) == warns


def test_random_layers_of_a_custom_encoder_cause_a_warning_after_start_from(cross_encoder, results):
    class LayeredP(ld.MaxP):
        encoder_class = Layered

    model = LayeredP(cross_encoder, **READING).start_from(ld.MaxP(cross_encoder, **READING))
    with pytest.warns(ld.UntrainedWarning):
        model(results)


class Scaled(WindowEncoder):
    """Has a parameter of its own outside any layer."""

    def __init__(self, backbone):
        super().__init__(backbone)
        self.scale = nn.Parameter(torch.ones(self.hidden_size))


class ScaledP(ld.MaxP):
    encoder_class = Scaled


def test_random_parameters_outside_layers_cause_a_warning(cross_encoder, results):
    with pytest.warns(ld.UntrainedWarning):
        ScaledP(cross_encoder, **READING)(results)


def test_start_from_takes_over_parameters_of_an_encoder_outside_layers(cross_encoder):
    other = ScaledP(cross_encoder, **READING)
    nn.init.constant_(other.model.encoder.scale, 3.0)
    model = ScaledP(cross_encoder, **READING).start_from(other)
    assert model.model.encoder.scale.tolist() == other.model.encoder.scale.tolist()


def test_start_from_a_model_with_more_trained_layers_causes_a_warning(cross_encoder, results):
    class LayeredP(ld.MaxP):
        encoder_class = Layered

    trained = LayeredP(cross_encoder, **READING)
    trained.model.mark_trained({})
    model = ld.MaxP(cross_encoder, **READING).start_from(trained)
    with pytest.warns(ld.UntrainedWarning):
        model(results)


def test_random_layers_of_a_custom_encoder_cause_a_warning_with_another_aggregation(cross_encoder, results):
    class LayeredPARADE(ld.PARADE):
        encoder_class = Layered

    model = LayeredPARADE(cross_encoder, aggregation="avg", **READING)
    assert not model.model.ready
    model.aggregation = "max"
    with pytest.warns(ld.UntrainedWarning):
        model(results)


@pytest.mark.parametrize("name", ["CEDR-knrm", "PARADE-query"])
def test_heads_that_need_tokens_refuse_an_encoder_of_window_vectors(name, cross_encoder, results):
    class Vectors(WindowEncoder):
        def forward(self, pairs, *, coverage=None, **needs):
            encoded = super().forward(pairs, coverage=coverage)
            return Encoded(encoded.cls, encoded.mask)

    kind = type(make(name, cross_encoder))
    own = type("Own", (kind,), {"encoder_class": Vectors})
    own_arguments = {
        "CEDR-knrm": {"aggregation": "knrm", "window_size": 20},
        "PARADE-query": {"aggregation": "transformer", "query_states": True, "window_size": 20, "stride": 20},
    }
    with pytest.raises(ValueError, match="Vectors returns only window vectors"):
        own(cross_encoder, max_query_len=8, device="cpu", **own_arguments[name])(results)


def test_an_encoder_without_matches_is_refused_by_heads_that_need_them(cross_encoder, results):
    class Unmatched(WindowEncoder):
        def forward(self, pairs, **needs):
            return replace(super().forward(pairs, **needs), matches=None)

    class UnmatchedCEDR(ld.CEDR):
        encoder_class = Unmatched

    with pytest.raises(ValueError, match=r"Unmatched returns .* the head 'cedr-knrm' also needs"):
        UnmatchedCEDR(cross_encoder, window_size=20, max_query_len=8, device="cpu")(results)


class NoisyHead(ld.Head, name="noisyp"):
    """Draws weights in `warm_start`."""

    def __init__(self, hidden_size, **options):
        super().__init__(hidden_size, **options)
        self.noise = nn.Parameter(torch.zeros(hidden_size))

    def warm_start(self, start):
        nn.init.normal_(self.noise)
        return super().warm_start(start)

    def forward(self, encoded):
        return self.score(encoded.cls + self.noise).masked_fill(~encoded.mask, -torch.inf).amax(1)


@dataclass(eq=False, repr=False)
class NoisyP(ld.CrossEncoder):
    _: KW_ONLY
    noisy: bool = ld.argument(True, role="head")

    def head_spec(self):
        return ("noisyp" if self.noisy else "maxp"), {}

    def default_windows(self):
        return ld.GreedyChunks(20)


def made(noisy, cross_encoder):
    return NoisyP(cross_encoder, noisy=noisy, seed=3, max_query_len=8, device="cpu")


def with_another_head(cross_encoder):
    model = made(False, cross_encoder)
    assert model.model.head.name == "maxp"
    model.noisy = True
    return model


def started(cross_encoder):
    return made(True, cross_encoder).start_from(made(False, cross_encoder))


@pytest.mark.parametrize("make_noisy", [partial(made, True), with_another_head, started])
def test_random_weights_of_warm_start_only_depend_on_the_seed(make_noisy, cross_encoder):
    drawn = []
    for state in (0, 1):
        torch.manual_seed(state)
        drawn.append(make_noisy(cross_encoder).model.head.noise.detach().numpy())
    np.testing.assert_array_equal(*drawn)


pytestmark = QUIET
