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
from pyterrier_longdoc.papers.presets import _NOT_AS_PUBLISHED, ELECTRA, FAR_MEASURES, FIRST, MEASURES, WHOLE

from ..support import tiny, tiny_long
from ..support.scorers import Passes
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


def states_of(encoder, ids: list[int], mask: list[int], types: list[int]) -> torch.Tensor:
    """`(T, H)` states of one input of the padded layout."""
    inputs = {"input_ids": ids, "attention_mask": mask, "token_type_ids": types}
    return encoder(**{name: torch.tensor([values]) for name, values in inputs.items()}).last_hidden_state[0]


@torch.no_grad()
def states_of_all_windows(*, apart: bool) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Of R pairs all windows of 52 tokens, as FlexNeuART lays them out, those of padding alone included.

    Returns:
        `(R, 8 or 11, H)` states of the query, their mask, `(R, 5, T, H)` states of the windows and their mask. Encoded
        together the query's are those of its own tokens in the first window.
    """
    encoder, tokenizer = AutoModel.from_pretrained(tiny.encoder(None)).eval(), tiny.tokenizer()
    cls, sep, pad = tokenizer.convert_tokens_to_ids(["[CLS]", "[SEP]", "[PAD]"])
    assert pad == 0
    of_queries, of_windows, q_masks, d_masks = [], [], [], []
    for query, text in zip(DOCUMENTS["query"], DOCUMENTS["text"], strict=True):
        q, d = (tokenizer(t, add_special_tokens=False)["input_ids"] for t in (query, text))
        q, q_mask = filled(q, QUERY)
        states, masks = [], []
        for start in STARTS:
            window, mask = filled(d[:52][start : start + WINDOW], WINDOW)
            if apart:
                ids, mask, types = [cls, sep, *window, sep], [1, 1, *mask, 1], [0, 0, *[1] * (WINDOW + 1)]
            else:
                ids, mask = [cls, *q, sep, *window, sep], [1, *q_mask, 1, *mask, 1]
                types = [0] * (QUERY + 2) + [1] * (WINDOW + 1)
            states.append(states_of(encoder, ids, mask, types))
            masks.append(mask)
        if apart:
            q_mask = [1, 1, *q_mask, 1]
            of_queries.append(states_of(encoder, [cls, sep, *q, sep], q_mask, [0] * (QUERY + 3)))
        else:
            of_queries.append(states[0][1 : QUERY + 1])
        of_windows.append(torch.stack(states))
        q_masks.append(q_mask)
        d_masks.append(masks)
    return torch.stack(of_queries), torch.tensor(q_masks), torch.stack(of_windows), torch.tensor(d_masks)


def first(transformer, parts) -> torch.Tensor:
    """`(B, A)` first states of a transformer over vectors, masks and segments, padding in its place."""
    vectors = torch.cat([v.expand(len(m), m.shape[1], -1) for v, m, _ in parts], 1)
    mask = torch.cat([m for _, m, _ in parts], 1)
    types = torch.cat([torch.full_like(m, segment) for _, m, segment in parts], 1)
    return transformer(inputs_embeds=vectors, attention_mask=mask, token_type_ids=types).last_hidden_state[:, 0]


def aggregated(head, vectors, query=None) -> torch.Tensor:
    """PARADE's transformer over `(R, N, H)` window vectors, and a query's states and mask, all of them as they are."""
    one, every = torch.ones(len(vectors), 1, dtype=torch.long), torch.ones(vectors.shape[:2], dtype=torch.long)
    separator = [(head.sep_vector, one, 0)] if head.separators else []
    asking = [] if query is None else [(head.project(query[0]), query[1], 0), *separator]
    parts = [(head.cls_vector, one, 0), *separator, *asking, (head.project(vectors), every, 1), *separator]
    return head.score(first(head.aggregator, parts))


AGGREGATED = {
    "maxp": lambda cls, _, head: head.score(cls).amax(1),
    "sump": lambda cls, _, head: head.score(cls).sum(1),
    "parade-avg": lambda cls, _, head: head.score(cls.mean(1)),
    "parade-max": lambda cls, _, head: head.score(cls.amax(1)),
    "parade-attn": lambda cls, _, head: head.score((head.attention(cls).softmax(1) * cls).sum(1)),
    "parade-rand-l2": lambda cls, _, head: aggregated(head, cls),
    "parade-pretr-l6": lambda cls, _, head: aggregated(head, cls),
    "parade-pretr-q-l6": lambda cls, query, head: aggregated(head, cls, query),
}


@pytest.fixture(scope="module")
def read_together():
    return states_of_all_windows(apart=False)


@pytest.mark.parametrize("name", AGGREGATED)
def test_as_published_windows_of_padding_are_scored_too(name, read_together):
    own = {"aggregator": tiny.aggregator()} if "pretr" in name else {}
    model = ld.presets[name](as_published=True, backbone=tiny.encoder(None), **SMALL, **own)
    assert model.windows == ld.FixedGrid(20, 10, 52)
    head, (query, query_mask, states, _) = model.load_scorer().head, read_together
    torch.manual_seed(2)
    with torch.no_grad():
        for module, parameter in head.named_parameters():
            if not module.startswith("aggregator."):
                parameter.normal_()
        expected = AGGREGATED[name](states[:, :, 0], (query, query_mask), head).numpy()
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


def test_as_published_a_window_of_padding_is_no_place_at_the_beginning():
    """Explained, it is an empty one behind the text: a best window at 0 would look like relevance there."""
    model = ld.presets["maxp"](as_published=True, backbone=tiny.encoder(1), explain=True, **SMALL)
    seen = 0
    for row in model(DOCUMENTS).itertuples():
        read = max(end for _, end in row.window_spans)
        empty = [span for span in row.window_spans if span[0] == span[1]]
        assert empty == [(read, read)] * len(empty)
        best = int(np.argmax(row.window_scores))
        assert (row.best_start, row.best_end) == row.window_spans[best]
        seen += bool(empty) and read > 0
    assert seen == 6


@torch.no_grad()
def test_as_published_padding_keeps_its_place_in_the_interaction():
    """LATEIR: states of a short query, and those of the last window, are followed by a gap."""
    made = {"interaction": tiny.aggregator(), "aggregator": tiny.aggregator()}
    model = ld.presets["parade-lateir-l6"](as_published=True, backbone=tiny.encoder(None), **SMALL, **made)
    scorer = model.load_scorer()
    between, (query, query_mask, states, mask) = scorer.encoder.interaction, states_of_all_windows(apart=True)
    one, vectors = torch.ones(len(states), 1, dtype=torch.long), []
    for n in range(len(STARTS)):
        special = [(between.cls_vector, one, 0), (between.sep_vector, one, 0)]
        asking, window = (between.project(query), query_mask, 0), (between.project(states[:, n]), mask[:, n], 0)
        vectors.append(first(between.model, [*special, asking, special[1], window, special[1]]))
    expected = aggregated(scorer.head, torch.stack(vectors, 1)).numpy()
    np.testing.assert_allclose(scores(model, DOCUMENTS), expected, atol=1e-5, rtol=1e-5)
    alone = [scores(model, DOCUMENTS.iloc[[row]])[0] for row in range(len(DOCUMENTS))]
    np.testing.assert_allclose(alone, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("avgp", "adds the vectors of three chunks"),
        ("cedr-knrm", "matches padding"),
        ("model1", "was not published"),
        ("longp-e5-4k", "the longest one of its batch"),
        ("longp-rankgpt", "prompt"),
    ],
)
def test_what_cannot_be_had_as_published_says_why(name, reason):
    with pytest.raises(ValueError, match=f"{re.escape(ld.presets[name].row)} cannot be had as published: .*{reason}"):
        ld.presets[name](as_published=True)


def test_reasons_are_those_of_rows():
    assert set(_NOT_AS_PUBLISHED) <= {preset.row for preset in ld.presets.values()}


def test_as_published_changes_nothing_where_there_is_one_window():
    for name, preset in ld.presets.items():
        if preset.transformer in ("FirstP", "LongP") or name == "firstp-e5-4k":
            assert repr(preset(as_published=True)) == repr(preset()), name
    with pytest.raises(ValueError, match="as_published decides about the windows: leave windows out"):
        ld.presets["maxp"](as_published=True, windows=ld.SlidingWords())


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
        ids, mask = inputs["input_ids"][0], inputs.get("attention_mask")
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
    assert "PARADE Attn (ELECTRA)" in ld.presets._repr_html_()
    shown = repr(ld.presets["maxp"])
    assert shown.startswith("Preset(MaxP: MaxP(backbone='google-bert/bert-base-uncased', ")
    assert "window_size=150, stride=100" in shown
    with pytest.raises(KeyError, match="no preset is named 'nothing'; known are firstp"):
        ld.presets["nothing"]


def test_presets_are_keys():
    presets = [ld.presets[name] for name in ld.presets]
    assert len(dict.fromkeys(presets, 0)) == len(presets) > 30


def test_as_published_keeps_its_layout():
    for name in ("maxp", "firstp"):
        with pytest.raises(ValueError, match="layout='pair' is not what was published, layout='padded'"):
            ld.presets[name](as_published=True, layout="pair")
    ld.presets["maxp"](as_published=True, layout="padded-lowercase")
    ld.presets["maxp"](layout="pair")
