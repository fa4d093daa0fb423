"""Presets: every row of the paper's table, each of which builds the transformer that it names."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from transformers import AutoModel

import pyterrier_longdoc as ld
from pyterrier_longdoc.papers.presets import ELECTRA, FAR_MEASURES, FIRST, MEASURES, WHOLE

from ..support import tiny
from ..support.systems import QUIET, scores

pytestmark = QUIET

PAPERS = Path(__file__).resolve().parents[3] / "shared" / "papers"
PAPER = PAPERS / "boytsov2025.txt"
PAPER_2022 = PAPERS / "boytsov2022.txt"


@pytest.mark.parametrize("name", ld.presets)
def test_preset_builds_its_transformer(name):
    preset = ld.presets[name]
    arguments = {"llm": lambda messages: "[1]"} if preset.transformer == "RankGPT" else {}
    model = preset(**arguments)
    assert type(model).__name__ == preset.transformer
    for argument, value in preset.arguments.items():
        if argument not in arguments:
            assert getattr(model, argument) == value
    if preset.epochs not in (None, 1):
        assert model.training.epochs == preset.epochs
        assert preset(training=ld.TrainingArgs(epochs=5)).training.epochs == 5
    other = preset(**arguments, text_field=("title", "body"))
    assert tuple(other.text_field) == ("title", "body")
    if preset.transformer == "BiEncoder":
        assert model.max_query_len == 32 - 2  # with [CLS] and [SEP], as the documents' lengths
    elif preset.transformer != "RankGPT":
        assert model.max_query_len == 32


def test_partners_are_first_p_of_the_same_backbone():
    for name, preset in ld.presets.items():
        if preset.partner is None:
            assert preset.row.startswith("FirstP")
            continue
        partner = ld.presets[preset.partner]
        assert partner.partner is None
        assert partner.arguments.get("backbone") == preset.arguments.get("backbone"), name
        if preset.transformer in ("LongP", "LateIR") and preset.transformer == partner.transformer:
            own, its = ({**p.arguments, "max_doc_len": None} for p in (preset, partner))
            assert own == its  # one argument is all that differs
            assert (preset.arguments["max_doc_len"], partner.arguments["max_doc_len"]) == (WHOLE, FIRST)


def test_published_figures_are_those_of_the_paper():
    """Compared with Table 1 and Table 4 of the paper's text, where it is at hand."""
    if not PAPER.is_file():
        pytest.skip("the paper's text is not here")
    lines = [line.split("\t") for line in PAPER.read_text(encoding="utf-8").splitlines()]
    start = next(i for i, cells in enumerate(lines) if cells[0] == "FirstP (BERT)" and len(cells) == 6)
    table = {cells[0]: cells[1:] for cells in lines[start : start + 40] if len(cells) == 6}
    rows = {preset.row: preset.published for preset in ld.presets.values() if "Table 1" in preset.source}
    assert set(rows) == set(table) - {"Retriever / Ranker"}
    for row, published in rows.items():
        figures = [None if cell == "-" else float(cell.split()[0].split("^")[0]) for cell in table[row][:4]]
        assert [published.get(measure) for measure in MEASURES] == figures, row
    far = {cells[0].replace("P. Transf", "PARADE Transf"): cells[1:] for cells in lines if len(cells) == 3}
    compared = 0
    for row, published in rows.items():
        for measure, cell in zip(FAR_MEASURES, far.get(row.removesuffix(" zero-shot"), []), strict=False):
            if cell[:1] == "0":
                assert published[measure] == float(cell.split()[0].split("^")[0]), row
                compared += 1
    assert compared >= 50


def test_strides_are_those_at_which_the_paper_has_the_figures():
    """Compared with Table 8 of the 2022 paper's text, where it is at hand."""
    if not PAPER_2022.is_file():
        pytest.skip("the paper's text is not here")
    blocks = re.findall(
        r"window=(\d+) stride=(\d+)\n(.*?)(?=window=|Superscripts)", PAPER_2022.read_text(encoding="utf-8"), re.DOTALL
    )
    assert len(blocks) == 6
    for place, name in ((0, "parade-attn"), (2, "parade-pretr-q-l6")):
        published = [ld.presets[name].published[measure] for measure in MEASURES[:2]]
        found = []
        for size, stride, cells in blocks:
            figures = [float(figure) for figure in re.findall(r"0\.\d{3}", cells)]  # Attn, PRETR-L6, PRETR-Q-L6
            assert len(figures) == 6
            if figures[2 * place : 2 * place + 2] == published:
                found.append((int(size), int(stride)))
        arguments = ld.presets[name].arguments
        assert found == [(arguments["window_size"], arguments["stride"])] == [(150, 100)]
        assert "Table 8" in ld.presets[name].note


def test_notes_say_where_a_stride_comes_from():
    for name, preset in ld.presets.items():
        if preset.transformer in ("PARADE", "LateIR"):
            assert f"150/{preset.arguments['stride']}" in preset.note, name
        if preset.transformer == "RankGPT":
            assert "prompt" in preset.note


def test_electra_is_read_without_its_classification_head():
    rows = [preset for preset in ld.presets.values() if preset.arguments.get("backbone") == ELECTRA]
    assert len(rows) == 4
    assert {preset.arguments["pooling"] for preset in rows} == {"cls"}


# As published.

SMALL = {"window_size": 20, "stride": 10, "max_doc_len": 52, "max_query_len": 8, "device": "cpu"}
STARTS = (0, 10, 20, 30, 40)
TEXTS = [" ".join(tiny.WORDS[i * 3 % len(tiny.WORDS)] for i in range(n)) for n in (0, 3, 21, 35, 52, 70)]
DOCUMENTS = pd.DataFrame(
    [(q, query, f"d{n}", text) for q, query in (("1", "old dog"), ("2", "")) for n, text in enumerate(TEXTS)],
    columns=["qid", "query", "docno", "text"],
)


@pytest.fixture(scope="module")
def window_states():
    """`(R, 5, H)` first states of all windows of 52 tokens, padded by hand."""
    model, tokenizer = AutoModel.from_pretrained(tiny.encoder(None)).eval(), tiny.tokenizer()
    cls, sep, pad = tokenizer.convert_tokens_to_ids(["[CLS]", "[SEP]", "[PAD]"])

    def padded(ids, size):
        return ids + [pad] * (size - len(ids)), [1] * len(ids) + [0] * (size - len(ids))

    def state(query, window):
        (q, q_mask), (d, d_mask) = padded(query, 8), padded(window, 20)
        inputs = {
            "input_ids": [cls, *q, sep, *d, sep],
            "attention_mask": [1, *q_mask, 1, *d_mask, 1],
            "token_type_ids": [0] * 10 + [1] * 21,
        }
        return model(**{name: torch.tensor([values]) for name, values in inputs.items()}).last_hidden_state[0, 0]

    states = []
    for query, text in zip(DOCUMENTS["query"], DOCUMENTS["text"], strict=True):
        q, d = (tokenizer(t, add_special_tokens=False)["input_ids"] for t in (query, text))
        with torch.no_grad():
            states.append(torch.stack([state(q, d[:52][start : start + 20]) for start in STARTS]))
    return torch.stack(states)


AGGREGATED = {
    "maxp": lambda states, head: head.score(states).amax(1),
    "sump": lambda states, head: head.score(states).sum(1),
    "parade-avg": lambda states, head: head.score(states.mean(1)),
    "parade-max": lambda states, head: head.score(states.amax(1)),
    "parade-attn": lambda states, head: head.score((head.attention(states).softmax(1) * states).sum(1)),
}


@pytest.mark.parametrize("name", AGGREGATED)
def test_as_published_windows_of_padding_are_scored_too(name, window_states):
    model = ld.presets[name](as_published=True, backbone=tiny.encoder(None), **SMALL)
    assert model.windows == ld.FixedGrid(20, 10, 52)
    head = model.load_scorer().head
    with torch.no_grad():
        for parameter in head.parameters():
            parameter.normal_()
        expected = AGGREGATED[name](window_states, head).numpy()
    np.testing.assert_allclose(scores(model, DOCUMENTS), expected, atol=1e-5, rtol=1e-5)
    assert model.coverage.windows == len(TEXTS) * len(STARTS)
    assert model.coverage.documents_cut == 1
    alone = [scores(model, DOCUMENTS.iloc[[row]])[0] for row in range(len(DOCUMENTS))]
    np.testing.assert_allclose(alone, expected, atol=1e-5, rtol=1e-5)
    model.windows, model.window_size, model.stride = None, 20, 10
    clean = scores(model, DOCUMENTS)
    whole = DOCUMENTS["docno"].isin(["d4", "d5"]).to_numpy()
    np.testing.assert_allclose(clean[whole], expected[whole], atol=1e-5, rtol=1e-5)
    assert np.abs(clean - expected)[~whole].max() > 0.01


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("avgp", "adds the vectors of three chunks"),
        ("cedr-knrm", "matches padding"),
        ("model1", "was not published"),
        ("parade-lateir-l6", "leaves a gap"),
        ("parade-pretr-q-l6", "leaves a gap"),
        ("longp-rankgpt", "prompt"),
    ],
)
def test_what_cannot_be_had_as_published_says_why(name, reason):
    with pytest.raises(ValueError, match=f"{re.escape(ld.presets[name].row)} cannot be had as published: .*{reason}"):
        ld.presets[name](as_published=True)


def test_as_published_changes_nothing_where_there_is_one_window():
    for name, preset in ld.presets.items():
        if "stride" not in preset.arguments and preset.transformer in ("FirstP", "LongP", "BiEncoder"):
            assert repr(preset(as_published=True)) == repr(preset()), name
    with pytest.raises(ValueError, match="as_published decides about the windows: leave windows out"):
        ld.presets["maxp"](as_published=True, windows=ld.SlidingWords())


def test_presets_run(cross_encoder, results):
    model = ld.presets["maxp"](backbone=cross_encoder, window_size=20, stride=10, max_query_len=8)
    assert np.isfinite(model(results)["score"]).all()
    assert model.coverage.windows_per_document > 1


def test_table_and_mapping():
    table = ld.presets.table()
    assert len(table) == len(ld.presets) >= 34
    assert table["name"].tolist() == list(ld.presets)
    row = table.set_index("name").loc["parade-attn-electra"]
    assert row["backbone"] == "cross-encoder/ms-marco-electra-base"
    assert row["dev RR"] == 0.431
    assert np.isnan(table.set_index("name").loc["firstp-rankgpt", "dev RR"])
    assert "nothing" not in ld.presets
    assert repr(ld.presets).startswith("Presets(firstp, firstp-longformer, ")
    with pytest.raises(KeyError, match="no preset is named 'nothing'; known are firstp"):
        ld.presets["nothing"]
