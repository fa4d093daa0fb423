"""check_invariance finds scores that depend on the batch, and leaves the model as it was."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pyterrier as pt
import pytest
import torch

import pyterrier_longdoc as ld
from pyterrier_longdoc.modelling import runtimes

from ..support.systems import CONTRACT, QUIET, REPRESENTATIVE, make, slow_but

pytestmark = QUIET

ATTENTION = ["attention eager", "attention sdpa"]
CHECKS = ["repeated", "order", "alone", "padding", "batch size 1", *ATTENTION, "dtype bfloat16"]


def check(model, results=None, **arguments) -> pd.DataFrame:
    return ld.check_invariance(model, results, verbose=False, **arguments).set_index("check")


def test_checks_do_not_change_model_rows_or_random_numbers(results):
    model = make("MaxP", device="cpu")
    before = results.copy()
    shown, backbone = repr(model), model.model.encoder.backbone
    state = {name: value.clone() for name, value in model.model.state_dict().items()}
    random_state, implementation = torch.get_rng_state(), backbone.config._attn_implementation
    check(model, results)
    assert repr(model) == shown
    assert model.coverage is None
    assert backbone.config._attn_implementation == implementation
    assert all(torch.equal(value, state[name]) for name, value in model.model.state_dict().items())
    assert torch.equal(torch.get_rng_state(), random_state)
    pd.testing.assert_frame_equal(results, before)


class Sneaky(pt.Transformer):
    """Scores that depend on the call: on its size, or on the row's place in it."""

    def __init__(self, what: str) -> None:
        self.what = what
        self.calls = 0

    def transform(self, inp: pd.DataFrame) -> pd.DataFrame:
        self.calls += 1
        lengths = inp["text"].fillna("").str.len().astype(float)
        extra = {
            "calls": self.calls,
            "place": np.arange(len(inp)),
            "size": len(inp),
            "longest mate": lengths.max(),
            "nothing": 0.0,
            "a little of a million": 1e6 + self.calls,
        }[self.what]
        return inp.assign(score=lengths + extra).iloc[::-1]


@pytest.mark.parametrize(
    ("what", "caught"),
    [
        ("calls", {"repeated", "order", "alone", "padding"}),
        ("place", {"order", "alone"}),
        ("size", {"alone", "padding"}),
        ("longest mate", {"alone", "padding"}),
        ("nothing", set()),
        ("a little of a million", set()),  # tolerance is relative to large scores
    ],
)
def test_scores_that_depend_on_the_call_fail_the_matching_checks(what, caught, results):
    table = check(Sneaky(what), results)
    judged = table[table["passed"].notna()]
    assert set(judged.index) == {"repeated", "order", "alone", "padding"}
    assert set(judged.index[~judged["passed"].astype(bool)]) == caught
    assert table.loc[["batch size 1", "dtype bfloat16"], "note"].str.contains("Sneaky").all()


@pytest.fixture
def blind(monkeypatch):
    """Makes models whose backbone looks at its padding."""

    def made(name, **changes):
        model = make(name, device="cpu", **changes)
        backbone = model.model.encoder.backbone
        forward = backbone.forward
        monkeypatch.setattr(backbone, "forward", lambda **inputs: forward(**{**inputs, "attention_mask": None}))
        return model

    return made


@pytest.mark.parametrize("limit", [{"max_batch_tokens": 8}, {"batch_size": 1}], ids=str)
def test_padding_is_checked_even_if_a_pass_has_room_for_one_row(limit, results, blind):
    model = blind("LongP", **limit)
    table = check(model, results)
    assert table.loc["alone", "passed"]  # no pass has two rows
    assert not table.loc["padding", "passed"]
    assert {name: getattr(model, name) for name in limit} == limit


@pytest.mark.parametrize("name", slow_but(REPRESENTATIVE, CONTRACT))
def test_every_kind_of_model_passes(name, results):
    model = make(name, device="cpu")
    table = check(model, results)
    assert list(table.index) == CHECKS
    assert table["passed"].dropna().all()
    assert table.loc[["alone", "padding"], "passed"].all()
    assert table.loc["dtype bfloat16", "difference"] > 0
    if name.startswith("BiEncoder"):
        assert table.loc["attention eager", "passed"]
        assert not len(model.model.encoder.shared.cache)  # states of another attention


@pytest.mark.parametrize(
    "name", slow_but(["FirstP", "BiEncoder-max", "LateIR"], ["FirstP", "BiEncoder-max", "LateIR", "MaxSim"])
)
def test_a_backbone_that_attends_to_padding_fails(name, results, blind, tmp_path):
    """Neither a score cache nor states that are kept hide it."""
    cache = {"score_cache": tmp_path / "scores.sqlite", "window_size": 60} if name == "FirstP" else {}
    model = blind(name, **cache)
    table = check(model, results)
    assert not table.loc["alone", "passed"]
    assert not table.loc["padding", "passed"]
    assert not table.loc["batch size 1", "passed"]
    assert not any(tmp_path.iterdir())
    assert getattr(model, "score_cache", None) == cache.get("score_cache")


def test_a_scorer_without_weights_skips_the_checks_of_weights():
    scorer = ld.PairScorer(lambda queries, texts: [float(len(text)) for text in texts])
    table = check(ld.MaxP(scorer, window_size=10, stride=5, max_query_len=8))  # made-up rows
    assert table.loc[CHECKS[:5], "passed"].all()
    assert table.loc[CHECKS[5:], "passed"].isna().all()


def test_attention_is_not_compared_under_openvino(results, monkeypatch):
    monkeypatch.setattr(runtimes, "converted", lambda backbone, names: backbone)
    monkeypatch.setattr(runtimes, "compiled", lambda model, _: lambda inputs: model(**inputs).last_hidden_state)
    table = check(make("MaxP", device="cpu", runtime="openvino"), results, dtypes=())
    assert table.loc[ATTENTION, "note"].str.contains("openvino").all()


def test_a_frame_without_rows_is_refused(results):
    with pytest.raises(ValueError, match="row"):
        check(pt.apply.doc_score(lambda row: 1.0), results.head(0))


def test_a_model_that_loses_rows_fails(results):
    incomplete = check(pt.apply.generic(lambda frame: frame.head(1).assign(score=1.0)), results)
    assert not incomplete["passed"].iloc[0]


def test_the_table_is_printed_and_notes_why_a_check_is_missing(results, capsys):
    table = ld.check_invariance(pt.apply.doc_score(lambda row: 1.0), results.drop(columns="text"))
    assert table.set_index("check").loc["padding", "note"]
    assert capsys.readouterr().out.splitlines()[0].split() == list(table.columns)
