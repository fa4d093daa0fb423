"""Presets: every row of the paper's table, each of which builds the transformer that it names."""

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


@pytest.mark.parametrize(("name", "nearest"), [("max-p", "maxp"), ("MaxP", "maxp"), ("zzz", "")])
def test_an_unknown_preset_lists_the_known_ones_and_suggests_the_nearest(name, nearest):
    with pytest.raises(KeyError, match="firstp-electra") as error:
        ld.presets[name]
    assert f"did you mean {nearest!r}?" in str(error.value) if nearest else "did you mean" not in str(error.value)


@pytest.mark.parametrize("name", ld.presets)
def test_presets_are_configured_as_in_the_paper(name):
    preset = ld.presets[name]
    arguments = {"llm": lambda messages: "[1]"} if preset.transformer == "RankGPT" else {}
    model = preset(**arguments)
    assert type(model).__name__ == preset.transformer
    for argument, value in preset.arguments.items():
        assert argument in arguments or getattr(model, argument) == value
    if preset.transformer != "RankGPT":  # the bi-encoder's lengths are with [CLS] and [SEP]
        assert model.max_query_len == (30 if preset.transformer == "BiEncoder" else 32)
    if "electra" in preset.arguments.get("backbone", ""):
        assert model.pooling == "cls"  # without its classification head
    if preset.transformer in ("MaxP", "SumP", "PARADE", "LateIR"):
        by_75 = name in ("parade-attn-deberta", "parade-pretr-l6", "parade-lateir-l6")
        assert (model.window_size, model.stride) == (150, 75 if by_75 else 100)
        assert f"150/{model.stride}" in preset.note or preset.transformer in ("MaxP", "SumP")
    if preset.transformer in ("AvgP", "CEDR", "NeuralModel1"):
        assert model.window_size == 477
    if preset.epochs not in (None, 1):
        assert model.training.epochs == preset.epochs
        assert preset(training=ld.TrainingArgs(epochs=5)).training.epochs == 5
        # The paper names these two alone as trained for more than one epoch.
        assert any(row in preset.row for row in ("RAND-L2", "LATEIR")) or "authors' training script" in preset.note
    assert tuple(preset(**arguments, text_field=("title", "body")).text_field) == ("title", "body")
    if preset.partner is None:
        assert preset.row.startswith("FirstP")
        return
    # The partner is the FirstP of the same backbone, and reads alike.
    partner = ld.presets[preset.partner]
    assert partner.partner is None
    for same in ("backbone", "layout"):
        assert partner.arguments.get(same) == preset.arguments.get(same)
    assert bool(preset.note) or preset.arguments.get("layout", "padded") == "padded"
    if preset.transformer == partner.transformer == "LongP":
        assert {**partner.arguments, "max_doc_len": WHOLE} == preset.arguments  # one argument is all that differs
        assert partner.arguments["max_doc_len"] == FIRST


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
def test_as_published_windows_of_padding_are_scored_too(name, all_windows):
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
    assert model.coverage.documents_cut == 2  # that of 70 tokens, for both queries
    alone = [scores(model, DOCUMENTS.iloc[[row]])[0] for row in range(len(DOCUMENTS))]
    np.testing.assert_allclose(alone, expected, atol=1e-5, rtol=1e-5)
    model.windows, model.window_size, model.stride = None, 20, 10
    clean = scores(model, DOCUMENTS)
    whole = DOCUMENTS["docno"].isin(["d4", "d5"]).to_numpy()
    np.testing.assert_allclose(clean[whole], expected[whole], atol=1e-5, rtol=1e-5)
    assert np.abs(clean - expected)[~whole].max() > 0.01


def test_what_cannot_be_had_as_published_says_why():
    for preset in ld.presets.values():
        if preset.row in _NOT_AS_PUBLISHED:
            with pytest.raises(ValueError, match=re.escape(_NOT_AS_PUBLISHED[preset.row])):
                preset(as_published=True)
    assert set(_NOT_AS_PUBLISHED) <= {preset.row for preset in ld.presets.values()}
    with pytest.raises(ValueError, match="windows"):
        ld.presets["maxp"](as_published=True, windows=ld.SlidingWords())
    with pytest.raises(ValueError, match="layout='pair'"):
        ld.presets["maxp"](as_published=True, layout="pair")


def test_as_published_changes_nothing_where_there_is_one_window():
    for name, preset in ld.presets.items():
        if preset.transformer in ("FirstP", "LongP") or name == "firstp-e5-4k":
            assert repr(preset(as_published=True)) == repr(preset()), name


def test_table_and_mapping():
    table = ld.presets.table()
    assert len(table) == len(ld.presets) >= 34
    assert table["name"].tolist() == list(ld.presets)
    row = table.set_index("name").loc["parade-attn-electra"]
    assert row["backbone"] == "cross-encoder/ms-marco-electra-base"
    assert row["dev RR"] == 0.431
    assert np.isnan(table.set_index("name").loc["firstp-rankgpt", "dev RR"])
    assert len(dict.fromkeys(ld.presets.values())) == len(ld.presets)  # they can be keys
    assert "PARADE Attn (ELECTRA)" in ld.presets._repr_html_()
    assert "window_size=150, stride=100" in repr(ld.presets["maxp"])
    with pytest.raises(KeyError, match="nothing"):
        ld.presets["nothing"]
