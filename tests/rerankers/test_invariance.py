"""The public check finds what depends on the batch, says what it could not check, and leaves no trace."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pyterrier as pt
import pytest
import torch

import pyterrier_longdoc as ld

from ..support import tiny, tiny_long
from ..support.systems import BI_ENCODERS, make

pytestmark = pytest.mark.filterwarnings("ignore::pyterrier_longdoc.rerankers.base.UntrainedWarning")

CHECKS = [
    "repeated",
    "order",
    "alone",
    "padding",
    "batch size 1",
    "attention eager",
    "attention sdpa",
    "dtype bfloat16",
]


def check(model, results=None, **arguments) -> pd.DataFrame:
    return ld.check_invariance(model, results, verbose=False, **arguments).set_index("check")


def test_a_sound_model_passes(cross_encoder, results):
    model = ld.MaxP(cross_encoder, window_size=20, stride=10, max_query_len=8, device="cpu")
    table = check(model, results)
    assert list(table.index) == CHECKS
    assert table["passed"].dropna().all()
    assert table["same_order"].dropna().all()
    assert table.loc["attention sdpa", "note"] == "the usual one"
    assert table.loc[["alone", "padding"], "difference"].max() < 1e-5
    assert 1e-5 < table.loc["dtype bfloat16", "difference"] < 0.1


def test_bi_encoders_can_be_checked(plain_encoder, results):
    table = check(ld.BiEncoder(plain_encoder, window_size=20, stride=10, device="cpu"), results)
    assert table["passed"].dropna().all()
    assert table.loc[["alone", "attention eager"], "passed"].all()


def test_made_up_rows_are_long(tmp_path):
    model = ld.LongP(tiny_long.encoder(tmp_path, "modernbert"), max_query_len=8, device="cpu")
    table = check(model, dtypes=())
    assert list(table.index) == CHECKS[:-1]
    assert table["passed"].dropna().all()


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
        }[self.what]
        return inp.assign(score=lengths + extra).iloc[::-1]


@pytest.mark.parametrize(
    ("what", "caught"),
    [
        ("calls", {"repeated", "order", "alone", "padding"}),
        ("place", {"order", "alone", "padding"}),
        ("size", {"alone", "padding"}),
        ("longest mate", {"alone"}),
        ("nothing", set()),
    ],
)
def test_dependence_is_found(what, caught, results):
    table = check(Sneaky(what), results)
    judged = table[table["passed"].notna()]
    assert set(judged.index) == {"repeated", "order", "alone", "padding"}
    assert set(judged.index[~judged["passed"].astype(bool)]) == caught
    assert table.loc["batch size 1", "note"] == "Sneaky has no batch_size"
    assert table.loc["dtype bfloat16", "note"] == "Sneaky has no dtype"


def test_a_backbone_that_looks_at_its_padding_is_found(cross_encoder, results, monkeypatch):
    """Without an attention mask scores depend on how far an input is padded."""
    model = ld.FirstP(cross_encoder, window_size=60, max_query_len=8, device="cpu")
    backbone = model.load_scorer().encoder.backbone
    forward = backbone.forward
    monkeypatch.setattr(backbone, "forward", lambda **inputs: forward(**{**inputs, "attention_mask": None}))
    table = check(model, results)
    assert not table.loc["alone", "passed"]
    assert not table.loc["batch size 1", "passed"]


@pytest.mark.parametrize("name", ["BiEncoder-max", "LateIR", "MORESPlus"])
def test_what_is_remembered_hides_nothing(name, cross_encoder, plain_encoder, results, monkeypatch):
    """Without an attention mask states depend on the batch, although each text is encoded once and remembered."""
    model = make(name, plain_encoder if name in BI_ENCODERS else cross_encoder, device="cpu")
    backbone = model.load_scorer().encoder.backbone
    forward = backbone.forward
    monkeypatch.setattr(backbone, "forward", lambda **inputs: forward(**{**inputs, "attention_mask": None}))
    table = check(model, results)
    assert not table.loc["alone", "passed"]
    assert not table.loc["batch size 1", "passed"]


def test_scores_on_disk_hide_nothing(cross_encoder, results, monkeypatch, tmp_path):
    file = tmp_path / "scores.sqlite"
    model = ld.FirstP(cross_encoder, window_size=60, max_query_len=8, device="cpu", score_cache=file)
    backbone = model.load_scorer().encoder.backbone
    forward = backbone.forward
    monkeypatch.setattr(backbone, "forward", lambda **inputs: forward(**{**inputs, "attention_mask": None}))
    assert not check(model, results).loc["alone", "passed"]
    assert model.score_cache == file
    assert not file.exists()


def test_states_of_another_attention_are_not_kept(plain_encoder, results):
    model = ld.BiEncoder(plain_encoder, window_size=20, stride=10, device="cpu")
    check(model, results)
    assert not len(model.load_scorer().encoder.shared.cache)


def test_the_model_is_left_as_it_was(cross_encoder, results):
    model = ld.LongP(cross_encoder, max_query_len=2, max_doc_len=10, device="cpu")
    before = results.copy()
    shown, implementation = repr(model), model.load_scorer().encoder.backbone.config._attn_implementation
    check(model, results)
    assert repr(model) == shown
    assert model.coverage is None
    assert model.load_scorer().encoder.backbone.config._attn_implementation == implementation
    with pytest.warns(ld.TruncationWarning):
        model(results)
    pd.testing.assert_frame_equal(results, before)


def test_tolerance_is_relative_to_large_scores(results):
    class Large(pt.Transformer):
        calls = 0

        def transform(self, inp):
            self.calls += 1
            return inp.assign(score=1e6 + self.calls)

    assert check(Large(), results, tolerance=1e-4)["passed"].dropna().all()
    assert not check(Large(), results, tolerance=1e-7)["passed"].dropna().any()


def test_nothing_cannot_be_compared(results):
    with pytest.raises(ValueError, match="results has no rows"):
        check(pt.apply.doc_score(lambda row: 1.0), results.head(0))


def test_rows_that_are_dropped_cannot_be_compared(results):
    with pytest.raises(ValueError, match="does not return every row"):
        check(pt.apply.generic(lambda frame: frame.head(1).assign(score=1.0)), results)


def test_the_table_is_printed(cross_encoder, results, capsys):
    table = ld.check_invariance(ld.FirstP(cross_encoder, device="cpu"), results)
    printed = capsys.readouterr().out
    assert printed.splitlines()[0].split() == list(table.columns)
    assert len(printed.splitlines()) == 1 + len(table)


def test_no_gradient_state_is_touched(cross_encoder, results):
    model = ld.FirstP(cross_encoder, device="cpu")
    scorer = model.load_scorer()
    state = {name: value.clone() for name, value in scorer.state_dict().items()}
    random_state = torch.get_rng_state()
    check(model, results)
    assert all(torch.equal(value, state[name]) for name, value in model.load_scorer().state_dict().items())
    assert torch.equal(torch.get_rng_state(), random_state)
    assert tiny.results().equals(results)
