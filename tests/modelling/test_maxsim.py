"""MaxSim: the scores of the libraries whose checkpoints it reads, of the whole document, and what is remembered."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

import pyterrier_longdoc as ld
from pyterrier_longdoc.modelling.token_vectors import TokenVectors

from ..support import tiny, tiny_long
from ..support.scorers import Passes
from ..support.sentence_transformers import LATE_INTERACTION, framed, theirs
from ..support.systems import QRELS, QUIET, reloaded, scores
from ..support.tiny import LONG, change, frame

pytestmark = QUIET

NAMES = sorted(path.parent.name for path in LATE_INTERACTION.glob("*/scores.json"))
PLAIN, FIXED, STANFORD, POOLED = (LATE_INTERACTION / name for name in ("st-plain", "st-fixed", "colbert", "st-min"))
QUERIES = ["old dog", "snow in the city"]
ROWS = frame(QUERIES, [LONG])
CLOSE = {"rtol": 0, "atol": 1e-5}


def reference(folder: Path):
    return pytest.importorskip("sentence_transformers").MultiVectorEncoder(str(folder), device="cpu")


def vectors(model, windows: list[str]) -> torch.Tensor:
    """Vectors of hand-made windows, one after the other."""
    return torch.cat([vectors.clone() for vectors in model.encode_document(windows, convert_to_numpy=False)])


def by_hand(model, query: str, windows: list[str]) -> float:
    products = model.encode_query([query], convert_to_numpy=False)[0] @ vectors(model, windows).T
    return float(products.max(1).values.sum())


def copy_of(folder: Path, target: Path) -> Path:
    return Path(shutil.copytree(folder, target / "copy"))


# Checkpoints.


@pytest.mark.parametrize("name", NAMES)
def test_checkpoints_have_the_scores_of_the_library_that_wrote_them(name):
    stored = json.loads((LATE_INTERACTION / name / "scores.json").read_text(encoding="utf-8"))
    model = ld.MaxSim(LATE_INTERACTION / name, device="cpu")
    found = scores(model, frame(stored["queries"], stored["texts"]))
    np.testing.assert_allclose(found, np.ravel(stored["scores"]), **CLOSE)
    assert model.model.origin != "random"
    assert model.coverage.windows == model.coverage.pairs


@pytest.mark.parametrize("name", ["st-fixed", "st-min"])
@pytest.mark.parametrize("kind", ["MultiVectorMask", "Normalize"])
def test_scores_of_sentence_transformers_without_a_module(name, kind, tmp_path):
    folder = copy_of(LATE_INTERACTION / name, tmp_path)
    modules = json.loads((folder / "modules.json").read_text())
    (folder / "modules.json").write_text(json.dumps([one for one in modules if not one["type"].endswith(kind)]))
    for file in folder.glob("*HierarchicalTokenPooling/config.json"):
        change(file, pool_factor=1)
    texts = ["the cat and the dog walk to the river in the rain.", "the old tree"]
    expected = theirs(reference(folder), QUERIES, texts)
    np.testing.assert_allclose(scores(ld.MaxSim(folder), frame(QUERIES, texts)), expected, **CLOSE)


@pytest.mark.parametrize("stride", [7, 4])
@pytest.mark.parametrize("name", ["st-plain", "pylate-bert", "colbert"])
def test_scores_of_long_documents_are_maxima_over_their_windows(name, stride):
    folder, text = LATE_INTERACTION / name, " ".join(LONG.split()[:21])
    model, options = reference(folder), {"windows": ld.SlidingWords(7, stride)}
    row = ld.MaxSim(folder, explain=True, **options)(frame(["old dog"], [text])).iloc[0]
    windows = [" ".join(text.split()[i : i + 7]) for i in range(0, 21 - 7 + stride, stride)]
    assert row.score == pytest.approx(by_hand(model, "old dog", windows), abs=1e-5)
    each = [by_hand(model, "old dog", [window]) for window in windows]
    np.testing.assert_allclose(row.window_scores, each, **CLOSE)
    best = scores(ld.MaxSim(folder, aggregation="max", **options), frame(["old dog"], [text])).item()
    assert best == pytest.approx(max(each), abs=1e-5)


@pytest.mark.parametrize("words", [True, False])
def test_every_window_follows_the_prompt_with_its_space(words, tmp_path):
    """Whether a tokenizer joins the space to the word after it or every character is a token."""
    tokenizer = framed(tiny_long.byte_tokenizer(words=words))
    tiny.checkpoint(tmp_path / "base", labels=None, vocab_size=len(tokenizer))
    tokenizer.save_pretrained(tmp_path / "base")
    prompts = {"query": "find: ", "document": "the text: "}
    library = pytest.importorskip("sentence_transformers").MultiVectorEncoder
    library(str(tmp_path / "base"), prompts=prompts, device="cpu").save_pretrained(str(tmp_path / "stored"))
    model = ld.MaxSim(tmp_path / "stored", window_size=11, stride=8, explain=True)
    row = model(frame(["old dog"], [LONG])).iloc[0]
    windows = [LONG[start:end] for start, end in row.window_spans]
    if words:
        assert all(window.startswith(" ") for window in windows[1:])  # part of the token of the first word
        windows = [window.removeprefix(" ") for window in windows]
    expected = theirs(reference(tmp_path / "stored"), ["old dog"], windows)
    assert len(windows) > 4
    np.testing.assert_allclose(row.window_scores, expected, **CLOSE)


def test_repeated_windows_change_no_score():
    model, part = ld.MaxSim(PLAIN, windows=ld.SentenceWindows(max_sentences=1)), LONG[: LONG.index(" ", 60)]
    single, repeated = (scores(model, frame(QUERIES, [text])) for text in (f"{part}.", f"{part}. {part}."))
    np.testing.assert_allclose(single, repeated, **CLOSE)


def test_a_longer_query_than_the_checkpoint_expands_to_is_read_without_expansion():
    queries, texts = [QUERIES[0], " ".join(tiny.WORDS * 2)], ["the old dog", "a tree"]
    model = reference(FIXED)
    usual = theirs(model, queries, texts)
    model[0].query_expansion = {**model[0].query_expansion, "strategy": "min"}
    model[0].query_length = 30 + 2
    found = scores(ld.MaxSim(FIXED, max_query_len=30), frame(queries, texts))
    np.testing.assert_allclose(found, theirs(model, queries, texts), **CLOSE)
    np.testing.assert_allclose(found[:2], usual[:2], **CLOSE)
    assert (found[2:] > usual[2:] + 1).all()


def test_a_plain_encoder_gets_a_random_projection_by_seed(cross_encoder, plain_encoder, results):
    for backbone in (plain_encoder, cross_encoder):
        first = scores(ld.MaxSim(backbone), results)
        np.testing.assert_array_equal(first, scores(ld.MaxSim(backbone), results))
        assert (first != scores(ld.MaxSim(backbone, seed=1), results)).any()
    assert ld.MaxSim(plain_encoder).model.encoder.hidden_size == 128


# Texts.


@pytest.mark.parametrize("folder", [PLAIN, STANFORD, POOLED])
def test_any_text_has_a_score(folder):
    texts = ["", " ", "...", "!?", "\U0001f40d naïve 中文 \u202e", "a" * 400, "\n\n"]
    rows = frame(["", "...", "dog"], texts)
    found = ld.MaxSim(folder, explain=True)(rows)
    assert np.isfinite(found["score"]).all()
    for row in found.itertuples():
        assert all(0 <= start <= end <= len(row.text) for _, start, end, _ in row.term_places)


def test_skipped_tokens_have_no_vector():
    model = ld.MaxSim(STANFORD).model
    skipped = model.encoder.vectors_of.skipped
    assert len(skipped) == 32
    assert model.tokenizer.convert_tokens_to_ids("!") in skipped
    windows = [window for pair in model.read(["dog"] * 2, ["cat", "cat ! ?"]) for window in pair.windows]
    kept = [len(vectors) for vectors in model.encoder.states(windows, None)]
    assert kept == [model.reader.special_tokens() + 1] * 2


def test_titles_are_read_with_each_window():
    titles = {"text_field": ("title", "text"), "repeat": "title"}
    model = ld.MaxSim(PLAIN, windows=ld.SlidingWords(7, 7), explain=True, **titles)
    row = model(frame(["old dog"], [LONG]).assign(title="red fish")).iloc[0]
    windows = [f"red fish {LONG[a:b]}" for a, b in row.window_spans]
    assert len(windows) == 8
    assert row.score == pytest.approx(by_hand(reference(PLAIN), "old dog", windows), abs=1e-5)


# What is remembered.


def test_a_query_and_a_text_of_the_same_words_have_their_own_vectors(tmp_path):
    folder = copy_of(PLAIN, tmp_path)
    change(folder / "config_sentence_transformers.json", prompts={})
    change(folder / "3_MultiVectorMask/config.json", skiplist_tasks=["document"])
    text = "old, dog"
    expected = by_hand(reference(folder), text, [text])
    assert scores(ld.MaxSim(folder), frame([text], [text])).item() == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize("difference", ["weights", "token_pooling"])
def test_vectors_in_memory_are_not_used_after_a_change(difference):
    model = ld.MaxSim(PLAIN, window_size=20)
    passes = Passes(model.model)
    before = scores(model, ROWS)
    passes.inputs.clear()
    np.testing.assert_array_equal(scores(model, ROWS), before)
    assert not passes.windows
    if difference == "token_pooling":
        model.token_pooling = 2
    else:
        with torch.no_grad():
            model.model.encoder.representation[0].linear.weight.mul_(1.1)
    found = scores(model, ROWS)
    model.model.reader.cache.clear()
    np.testing.assert_array_equal(scores(model, ROWS), found)
    assert np.abs(found - before).max() > 1e-4


# Pooled tokens.


def test_pooling_is_that_of_sentence_transformers():
    for normalize in [True, False]:
        for protected in [0, 1]:
            for factor in [1.5, 2, 4]:
                modules = pytest.importorskip("sentence_transformers.multi_vector_encoder.modules")
                theirs = modules.HierarchicalTokenPooling(
                    factor, num_protected_tokens=protected, normalize_embeddings=normalize
                )
                ours = TokenVectors(pooling=factor, protected=protected, pooling_normalizes=normalize)
                for length in (1, 2, 3, 50):
                    states = torch.nn.functional.normalize(
                        torch.randn(length, 16, generator=torch.Generator().manual_seed(length)), dim=1
                    )
                    torch.testing.assert_close(ours.pooled(states), theirs.pool([states])[0], rtol=0, atol=1e-6)


def test_pooling_by_argument_is_that_of_sentence_transformers():
    modules = pytest.importorskip("sentence_transformers.multi_vector_encoder.modules")
    model, text = reference(PLAIN), LONG[:80]
    pooling = modules.HierarchicalTokenPooling(3)
    document = model.encode_document([text], token_pooling=pooling)
    expected = model.similarity(model.encode_query(QUERIES), document).numpy().ravel()
    np.testing.assert_allclose(scores(ld.MaxSim(PLAIN, token_pooling=3), frame(QUERIES, [text])), expected, **CLOSE)
    cited = [ld.MaxSim(PLAIN, token_pooling=factor).cited() for factor in (None, 1, 3)]
    assert ["clavie-2024-reducing" in keys for keys in cited] == [False, False, True]


def test_pooling_of_a_checkpoint_can_be_switched_off():
    pooled, single = (ld.MaxSim(POOLED, token_pooling=factor) for factor in (None, 1))
    assert (scores(pooled, ROWS) < scores(single, ROWS)).any()
    assert pooled.model.encoder.vector_rules.pooling == 2.0


# Explanations.


def test_term_places_are_the_positions_of_the_maxima():
    text = "the cat in the rain. a dog by the river, and snow on the old tree"
    model, reference_model = ld.MaxSim(PLAIN, window_size=12, explain=True), reference(PLAIN)
    row = model(frame(["old dog"], [text])).iloc[0]
    assert sum(part for *_, part in row.term_places) == pytest.approx(row.score, abs=1e-5)
    assert [(token, part) for token, _, _, part in row.term_places] == row.term_scores
    assert {"[CLS]", "old", "dog", "[SEP]"} <= {token for token, *_ in row.term_places}
    query = reference_model.encode_query(["old dog"], convert_to_numpy=False)[0]
    windows = [text[a:b] for a, b in row.window_spans]
    for i, (_, start, end, part) in enumerate(row.term_places):
        each = [vectors(reference_model, [window]) @ query[i] for window in windows]
        best = max(range(len(windows)), key=lambda n: float(each[n].max()))
        assert part == pytest.approx(float(each[best].max()), abs=1e-5)
        assert row.window_spans[best][0] <= start <= end <= row.window_spans[best][1]


def test_the_place_of_a_query_token_is_its_best_match():
    # Without context: the vectors of the embedding layer alone.
    model = ld.MaxSim(PLAIN, explain=True, window_size=50)
    weights = model.model.encoder.backbone
    with torch.no_grad():
        weights.embeddings.position_embeddings.weight.zero_()
        weights.embeddings.token_type_embeddings.weight.zero_()
        for layer in weights.encoder.layer:
            for part in (layer.attention.output.dense, layer.output.dense):
                part.weight.zero_()
                part.bias.zero_()
    text = "the cat in the rain and the old dog"
    row = model(frame(["Dog rain"], [text])).iloc[0]
    places = {token: text[start:end] for token, start, end, _ in row.term_places}
    assert (places["dog"], places["rain"], places["[CLS]"]) == ("dog", "rain", "")


def test_the_place_of_a_pooled_token_is_its_window():
    row = ld.MaxSim(POOLED, window_size=30, explain=True)(frame(["old dog"], [LONG])).iloc[0]
    assert {(start, end) for _, start, end, _ in row.term_places} <= set(row.window_spans)


def test_only_the_best_window_counts_with_max():
    row = ld.MaxSim(PLAIN, window_size=20, aggregation="max", explain=True)(frame(["old dog"], [LONG])).iloc[0]
    assert row.score == pytest.approx(max(row.window_scores), abs=1e-6)
    assert sum(part for *_, part in row.term_places) == pytest.approx(row.score, abs=1e-5)
    assert all(row.best_start <= start <= end <= row.best_end for _, start, end, _ in row.term_places)


# Training.

STEPS = ld.TrainingArgs(max_steps=2, queries_per_step=2, negatives=1, learning_rates={"": 1e-2})


@pytest.mark.parametrize("name", NAMES)
def test_every_checkpoint_can_be_saved_and_loaded(name, tmp_path):
    model = ld.MaxSim(LATE_INTERACTION / name, window_size=30, token_pooling=2)
    rows = frame(QUERIES, [LONG, "A dog, a Cat!"])
    expected = scores(model, rows)
    loaded = reloaded(model, tmp_path / "model")
    assert loaded.model.origin != "random"
    assert loaded.model.reader.describe() == model.model.reader.describe()
    np.testing.assert_allclose(scores(loaded, rows), expected, **CLOSE)


def test_start_from_another_kind_of_model_takes_over_the_encoder_only(plain_encoder, results):
    sizes, weight = {"window_size": 20, "stride": 10}, "encoder.layer.0.output.dense.weight"
    trained = ld.MaxP(plain_encoder, training=STEPS, **sizes).fit(results, QRELS)
    model = ld.MaxSim(plain_encoder, window_size=20).start_from(trained)
    assert model.model.origin == "random"  # its projection is random
    own, its = (each.model.encoder.backbone.state_dict()[weight] for each in (model, trained))
    assert torch.equal(own, its)
    maxsim = ld.MaxSim(plain_encoder, window_size=20, training=STEPS).fit(results, QRELS)
    assert ld.MaxP(plain_encoder, **sizes).start_from(maxsim).model.origin == "random"
    assert ld.MaxSim(plain_encoder).start_from(ld.BiEncoder(plain_encoder, **sizes)).model.origin == "random"


# With other parts of the package.


def test_show_marks_the_best_matches():
    results = ld.MaxSim(PLAIN, window_size=20, explain=True)(frame(["old dog"], [LONG]))
    page = ld.show(results)._repr_html_()
    row = results.iloc[0]
    marked = {LONG[start:end] for _, start, end, _ in row.term_places if start < end}
    assert marked
    assert all(f"<b>{word}</b>" in page for word in marked)
    assert "Bold: best match of a query token" in page
    assert "Bold" not in ld.show(results.drop(columns="term_places"))._repr_html_()


# What a checkpoint's files change.


def test_documents_longer_than_the_encoder_reads_are_read_in_windows_that_fit(tmp_path):
    folder = copy_of(PLAIN, tmp_path)
    change(folder / "sentence_bert_config.json", document_length=8000)
    for changes in ({}, {"windows": ld.SentenceWindows()}):
        model = ld.MaxSim(folder, **changes)
        model(frame(QUERIES, [LONG * 3]))
        assert model.coverage.share_read == 1.0


def test_weights_taken_over_for_other_markers_are_untrained():
    model = ld.MaxSim(PLAIN).start_from(ld.MaxSim(PLAIN))
    assert model.model.origin != "random"
    assert ld.MaxSim(FIXED).start_from(ld.MaxSim(STANFORD)).model.origin == "random"


def test_checkpoints_that_retrieve_images_are_refused(tmp_path):
    change(Path(tiny.checkpoint(tmp_path, labels=None)) / "config.json", architectures=["ColPaliForRetrieval"])
    with pytest.raises(ValueError, match="ColPaliForRetrieval"):
        ld.MaxSim(tmp_path)(ROWS)


def test_a_saved_model_is_loaded_without_the_library_of_its_checkpoint(tmp_path, monkeypatch):
    model = ld.MaxSim(PLAIN)
    expected = scores(model, ROWS)
    model.save(tmp_path)
    monkeypatch.setitem(sys.modules, "sentence_transformers.multi_vector_encoder", None)
    np.testing.assert_allclose(scores(ld.MaxSim.load(tmp_path), ROWS), expected, **CLOSE)


def test_skips_in_may_be_a_string():
    assert TokenVectors(skips_in="query").skips_in == ("query",)


@pytest.mark.parametrize("name", NAMES)
def test_a_late_interaction_checkpoint_in_a_cross_encoder_is_logged(name, caplog):
    ld.MaxP(LATE_INTERACTION / name, window_size=20, stride=10, max_query_len=8).model  # noqa: B018 - loads it
    assert "late-interaction model" in caplog.text
