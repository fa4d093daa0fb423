"""Presets: every row of the paper's table, each of which builds the transformer that it names."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import pyterrier_longdoc as ld
from pyterrier_longdoc.papers.presets import FAR_MEASURES, FIRST, MEASURES, WHOLE

PAPER = Path(__file__).resolve().parents[3] / "shared" / "papers" / "boytsov2025.txt"


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
    assert "PARADE Attn (ELECTRA)" in ld.presets._repr_html_()
    shown = repr(ld.presets["maxp"])
    assert shown.startswith("Preset(MaxP: MaxP(backbone='google-bert/bert-base-uncased', ")
    assert "window_size=150, stride=100" in shown
    with pytest.raises(KeyError, match="no preset is named 'nothing'; known are firstp"):
        ld.presets["nothing"]
