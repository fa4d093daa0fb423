"""Presets: every row of the paper's table, each of which builds the transformer that it names."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

import pyterrier_longdoc as ld
from pyterrier_longdoc.papers.presets import FAR_MEASURES, FIRST, MEASURES, WHOLE

from ..support import tiny, tiny_long
from ..support.scorers import Passes
from ..support.systems import QUIET

pytestmark = QUIET

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


# What models read, in small: 6 tokens of a query, 20 of a document.


def fixed_layout(tokenizer, query, text):
    """`[CLS] query [SEP] text [SEP]`, query and text filled up with None."""
    own, its = (tokenizer(x, add_special_tokens=False)["input_ids"] for x in (query, text))
    own, its = own[:6], its[:20]
    cls, sep = tokenizer.cls_token_id, tokenizer.sep_token_id
    return [cls, *own, *[None] * (6 - len(own)), sep, *its, *[None] * (20 - len(its)), sep]


def shared_budget(tokenizer, query, text):
    """The tokenizer's own pair."""
    return tokenizer([query], [text], truncation="longest_first", max_length=3 + 6 + 20)["input_ids"][0]


INPUTS = {
    "firstp": (lambda folder: tiny.checkpoint(folder), fixed_layout),
    "firstp-electra": (lambda folder: tiny.checkpoint(folder, "electra"), fixed_layout),
    "firstp-deberta": (lambda folder: tiny.cased(tiny.checkpoint(folder, "deberta-v2")), fixed_layout),
    "firstp-longformer": (lambda folder: tiny.cased(tiny_long.make("longformer", folder)), fixed_layout),
    "firstp-bigbird": (lambda folder: tiny.cased(tiny_long.make("bigbird", folder)), fixed_layout),
    "firstp-jina": (lambda folder: tiny_long.make("jina", folder), shared_budget),
    "firstp-mosaic": (lambda folder: tiny_long.make("mosaic", folder), shared_budget),
    "firstp-tinyllama": (lambda folder: tiny_long.make("llama", folder), shared_budget),
}


@pytest.mark.parametrize("name", INPUTS)
def test_inputs_are_the_published_ones(name, tmp_path):
    """Of lower-cased text, token for token."""
    checkpoint, layout = INPUTS[name]
    size = {"window_size" if ld.presets[name].transformer == "FirstP" else "max_doc_len": 20}
    model = ld.presets[name](backbone=checkpoint(tmp_path), max_query_len=6, device="cpu", **size)
    scorer = model.load_scorer()
    passes = Passes(scorer)
    for query, text in [
        ("Old DOG", "The Cat AND the dog. " * 9),
        ("The old dog and the cat in the city", "a Bird"),
        ("OLD", ""),
    ]:
        scorer.score([query], [text])
        [inputs], passes.inputs = passes.inputs, []
        expected = layout(scorer.tokenizer, query.lower(), text.lower())
        ids, mask = inputs["input_ids"][0], inputs["attention_mask"]
        real = torch.ones_like(ids, dtype=torch.bool) if mask is None else mask[0].bool()
        assert [token if own else None for token, own in zip(ids.tolist(), real, strict=True)][
            : len(expected)
        ] == expected
        assert not real[len(expected) :].any()  # Longformer fills up its last window
        if name == "firstp-longformer":
            assert inputs["position_ids"][0][real].tolist() == list(range(1, int(real.sum()) + 1))


def test_partners_read_alike():
    for preset in ld.presets.values():
        if preset.partner is not None and "layout" in preset.arguments:
            assert ld.presets[preset.partner].arguments["layout"] == preset.arguments["layout"]
            assert bool(preset.note) or preset.arguments["layout"] == "padded"


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
