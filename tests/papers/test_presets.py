"""Presets: every row of the paper's table builds the transformer that it names."""

from __future__ import annotations

import re

import numpy as np
import pandas as pd
import pytest
import torch
from transformers import AutoModel

import pyterrier_longdoc as ld
from pyterrier_longdoc.papers.presets import _NOT_AS_PUBLISHED, FIRST, WHOLE

from ..support import tiny
from ..support.systems import QUIET, scores

pytestmark = QUIET


def names(*transformers: str) -> list[str]:
    return [name for name, preset in ld.presets.items() if preset.transformer in transformers]


def build(name: str, **arguments):
    llm = {"llm": lambda messages: "[1]"} if name in names("RankGPT") else {}
    return ld.presets[name](**llm, **arguments)


def test_an_unknown_preset_is_refused_with_the_known_names():
    with pytest.raises(KeyError, match=r"'max-p' .* maxp,"):
        ld.presets["max-p"]


def test_every_preset_builds_its_transformer_with_its_arguments():
    for name, preset in ld.presets.items():
        model = build(name)
        given = {argument: value for argument, value in preset.arguments.items() if argument != "llm"}
        assert type(model).__name__ == preset.transformer, name
        assert {argument: getattr(model, argument) for argument in given} == given, name


def test_lengths_are_those_of_the_paper():
    """Queries have 32 tokens, windows 150, chunks 477."""
    for name in ld.presets.keys() - set(names("RankGPT")):
        # A bi-encoder's lengths include [CLS] and [SEP].
        assert build(name).max_query_len == (30 if name in names("BiEncoder") else 32), name
    for name in names("MaxP", "SumP", "PARADE", "LateIR"):
        model, preset = build(name), ld.presets[name]
        by_75 = name in ("parade-attn-deberta", "parade-pretr-l6", "parade-lateir-l6")
        assert (model.window_size, model.stride) == (150, 75 if by_75 else 100), name
        assert f"150/{model.stride}" in preset.note or preset.transformer in ("MaxP", "SumP"), name
    assert {build(name).window_size for name in names("AvgP", "CEDR", "NeuralModel1")} == {477}


def test_electra_presets_use_no_classification_head():
    electra = [name for name, preset in ld.presets.items() if "electra" in preset.arguments.get("backbone", "")]
    assert {build(name).pooling for name in electra} == {"cls"}


def test_epochs_are_those_of_the_paper():
    """The paper names two rows alone that are trained for more than one epoch."""
    several = {name: preset for name, preset in ld.presets.items() if preset.epochs not in (None, 1)}
    assert several
    for name, preset in several.items():
        assert build(name).training.epochs == preset.epochs, name
        assert build(name, training=ld.TrainingArgs(epochs=5)).training.epochs == 5, name
        named = any(row in preset.row for row in ("RAND-L2", "LATEIR"))
        assert named or "authors' training script" in preset.note, name


def test_the_partner_is_the_firstp_of_the_same_backbone_and_layout():
    for name, preset in ld.presets.items():
        if preset.partner is None:
            assert preset.row.startswith("FirstP"), name
            continue
        partner = ld.presets[preset.partner]
        assert partner.partner is None, name
        for same in ("backbone", "layout"):
            assert partner.arguments.get(same) == preset.arguments.get(same), name
        assert preset.note or preset.arguments.get("layout", "padded") == "padded", name


def test_longp_and_its_partner_only_differ_in_max_doc_len():
    pairs = [(name, ld.presets[name].partner) for name in names("LongP") if ld.presets[name].partner in names("LongP")]
    assert pairs
    for name, partner in pairs:
        first = ld.presets[partner].arguments
        assert first["max_doc_len"] == FIRST, name
        assert {**first, "max_doc_len": WHOLE} == ld.presets[name].arguments, name


# As published.

QUERY, WINDOW = 8, 20
SMALL = {"window_size": WINDOW, "stride": 10, "max_doc_len": 52, "max_query_len": QUERY, "device": "cpu"}
STARTS = (0, 10, 20, 30, 40)
TEXTS = [" ".join(tiny.WORDS[i * 3 % len(tiny.WORDS)] for i in range(n)) for n in (0, 3, 21, 35, 52, 70)]
DOCUMENTS = pd.DataFrame(
    [(q, query, f"d{n}", text) for q, query in (("1", "old dog"), ("2", "")) for n, text in enumerate(TEXTS)],
    columns=["qid", "query", "docno", "text"],
)


def filled(ids: list[int], size: int) -> tuple[list[int], list[int]]:
    """Token ids padded to a size, and their mask."""
    return ids + [0] * (size - len(ids)), [1] * len(ids) + [0] * (size - len(ids))


@pytest.fixture(scope="module")
@torch.no_grad()
def all_windows() -> torch.Tensor:
    """`(R, 5, H)` states of `[CLS]`: of R pairs all windows of 52 tokens, those of padding alone included.

    As FlexNeuART lays them out: the query of 8 tokens and the window of 20 are filled up.
    """
    encoder, tokenizer = AutoModel.from_pretrained(tiny.encoder(None)).eval(), tiny.tokenizer()
    cls, sep, pad = tokenizer.convert_tokens_to_ids(["[CLS]", "[SEP]", "[PAD]"])
    assert pad == 0
    states = []
    for query, text in zip(DOCUMENTS["query"], DOCUMENTS["text"], strict=True):
        q, d = (tokenizer(t, add_special_tokens=False)["input_ids"] for t in (query, text))
        q, q_mask = filled(q, QUERY)
        windows = [filled(d[:52][start : start + WINDOW], WINDOW) for start in STARTS]
        inputs = {
            "input_ids": [[cls, *q, sep, *window, sep] for window, _ in windows],
            "attention_mask": [[1, *q_mask, 1, *mask, 1] for _, mask in windows],
            "token_type_ids": [[0] * (QUERY + 2) + [1] * (WINDOW + 1)] * len(windows),
        }
        tensors = {name: torch.tensor(values) for name, values in inputs.items()}
        states.append(encoder(**tensors).last_hidden_state[:, 0])
    return torch.stack(states)


AGGREGATED = {
    "maxp": lambda cls, head: head.score(cls).amax(1),
    "sump": lambda cls, head: head.score(cls).sum(1),
    "parade-attn": lambda cls, head: head.score((head.attention(cls).softmax(1) * cls).sum(1)),
}


@pytest.mark.parametrize("name", AGGREGATED)
def test_as_published_also_scores_windows_of_padding(name, all_windows):
    model = ld.presets[name](as_published=True, backbone=tiny.encoder(None), **SMALL)
    assert model.windows == ld.FixedGrid(20, 10, 52)
    head = model.model.head
    torch.manual_seed(2)
    with torch.no_grad():
        for parameter in head.parameters():
            parameter.normal_()
        expected = AGGREGATED[name](all_windows, head).numpy()
    np.testing.assert_allclose(scores(model, DOCUMENTS), expected, atol=1e-5, rtol=1e-5)
    assert model.coverage.windows == len(DOCUMENTS) * len(STARTS)
    assert model.coverage.pairs_truncated == 2  # that of 70 tokens, for both queries
    alone = [scores(model, DOCUMENTS.iloc[[row]])[0] for row in range(len(DOCUMENTS))]
    np.testing.assert_allclose(alone, expected, atol=1e-5, rtol=1e-5)
    # Without windows of padding, scores of shorter documents are others.
    model.windows, model.window_size, model.stride = None, 20, 10
    clean = scores(model, DOCUMENTS)
    whole = DOCUMENTS["docno"].isin(["d4", "d5"]).to_numpy()
    np.testing.assert_allclose(clean[whole], expected[whole], atol=1e-5, rtol=1e-5)
    assert np.abs(clean - expected)[~whole].max() > 0.01


def test_as_published_is_refused_with_the_reason_for_other_presets():
    for row, reason in _NOT_AS_PUBLISHED.items():
        (name,) = [name for name, preset in ld.presets.items() if preset.row == row]
        with pytest.raises(ValueError, match=re.escape(reason)):
            ld.presets[name](as_published=True)
    for arguments in ({"windows": ld.SlidingWords()}, {"layout": "pair"}):
        with pytest.raises(ValueError, match=next(iter(arguments))):
            ld.presets["maxp"](as_published=True, **arguments)


def test_as_published_changes_nothing_for_models_of_one_window():
    for name in (*names("FirstP", "LongP"), "firstp-e5-4k"):
        assert repr(ld.presets[name](as_published=True)) == repr(ld.presets[name]())


def test_the_table_has_the_values_of_the_paper():
    table = ld.presets.table().set_index("name")
    assert table.index.tolist() == list(ld.presets)
    row = table.loc["parade-attn-electra"]
    assert row["backbone"] == "cross-encoder/ms-marco-electra-base"
    assert row["dev RR"] == 0.431
    assert np.isnan(table.loc["firstp-rankgpt", "dev RR"])
