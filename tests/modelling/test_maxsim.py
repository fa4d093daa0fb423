"""MaxSim: the scores of the libraries whose checkpoints it reads, of the whole document, and what is remembered."""

from __future__ import annotations

import json
import shutil
import sqlite3
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

import pyterrier_longdoc as ld
from pyterrier_longdoc.common.caches import forget_embeddings
from pyterrier_longdoc.common.store import ArrayStore
from pyterrier_longdoc.modelling.model import Model
from pyterrier_longdoc.modelling.token_vectors import TokenVectors

from ..benchmarks import late_interaction_checkpoints as script
from ..support import tiny
from ..support.systems import QRELS, QUIET, scores
from ..support.threads import Interleaved
from ..support.tiny import LONG, frame

pytestmark = QUIET

FOLDER = Path(__file__).parents[1] / "support" / "late_interaction"
NAMES = sorted(path.parent.name for path in FOLDER.glob("*/scores.json"))
PLAIN, FIXED, STANFORD, POOLED = (str(FOLDER / name) for name in ("st-plain", "st-fixed", "colbert", "st-min"))
QUERIES = ["old dog", "snow in the city"]
CLOSE = {"rtol": 0, "atol": 1e-5}


def reference(folder: str):
    return pytest.importorskip("sentence_transformers").MultiVectorEncoder(folder, device="cpu")


def vectors(model, windows: list[str]) -> torch.Tensor:
    """Vectors of hand-made windows, one after the other."""
    return torch.cat([vectors.clone() for vectors in model.encode_document(windows, convert_to_numpy=False)])


def theirs(model, queries: list[str], texts: list[str]) -> np.ndarray:
    """The library's scores of all pairs, in the order of `frame`."""
    return model.similarity(model.encode_query(queries), model.encode_document(texts)).numpy().ravel()


def by_hand(model, query: str, windows: list[str]) -> float:
    products = model.encode_query([query], convert_to_numpy=False)[0] @ vectors(model, windows).T
    return float(products.max(1).values.sum())


def whole_words() -> str:
    """A long text whose words are one token each: no window begins within one."""
    words = (LONG + " " + LONG).split()
    sizes = map(len, ld.MaxSim(PLAIN).model.reader.tokenize(words))
    return " ".join(word for word, size in zip(words, sizes, strict=True) if size == 1)


def copy_of(folder: str, target: Path) -> Path:
    return Path(shutil.copytree(folder, target / "copy"))


def change(file: Path, **values) -> None:
    file.write_text(json.dumps({**json.loads(file.read_text()), **values}))


# Checkpoints.


@pytest.mark.parametrize("name", NAMES)
def test_checkpoints_have_the_scores_of_the_library_that_wrote_them(name):
    stored = json.loads((FOLDER / name / "scores.json").read_text(encoding="utf-8"))
    model = ld.MaxSim(str(FOLDER / name), dtype="float32", device="cpu")
    found = scores(model, frame(stored["queries"], stored["texts"]))
    np.testing.assert_allclose(found, np.ravel(stored["scores"]), **CLOSE)
    assert model.model.ready
    assert model.coverage.windows == model.coverage.documents


def without(folder: Path, kind: str) -> None:
    file = folder / "modules.json"
    file.write_text(json.dumps([each for each in json.loads(file.read_text()) if not each["type"].endswith(kind)]))


@pytest.mark.parametrize("name", ["st-fixed", "st-min"])
@pytest.mark.parametrize("kind", ["MultiVectorMask", "Normalize"])
def test_scores_of_sentence_transformers_without_a_module(name, kind, tmp_path):
    folder = copy_of(str(FOLDER / name), tmp_path)
    without(folder, kind)
    for file in folder.glob("*HierarchicalTokenPooling/config.json"):
        change(file, pool_factor=1)
    texts = ["the cat and the dog walk to the river in the rain.", "the old tree"]
    expected = theirs(reference(str(folder)), QUERIES, texts)
    np.testing.assert_allclose(scores(ld.MaxSim(str(folder)), frame(QUERIES, texts)), expected, **CLOSE)


def test_the_older_name_of_attend_to_expansion_tokens_is_read(tmp_path):
    folder = copy_of(str(FOLDER / "pylate-bert"), tmp_path)
    file = folder / "config_sentence_transformers.json"
    settings = json.loads(file.read_text())
    assert not settings.pop("attend_to_expansion_tokens")
    file.write_text(json.dumps({**settings, "attend_to_mask_tokens": True}))
    expected = theirs(reference(str(folder)), QUERIES, [LONG[:40]])
    np.testing.assert_allclose(scores(ld.MaxSim(folder), frame(QUERIES, [LONG[:40]])), expected, **CLOSE)


def test_the_longest_input_of_the_tokenizer_is_that_of_the_checkpoint(tmp_path):
    folder, queries, texts = copy_of(PLAIN, tmp_path), [QUERIES[0], " ".join(tiny.WORDS)], ["the old dog", "a tree"]
    change(folder / "sentence_bert_config.json", document_length=None)
    change(folder / "tokenizer_config.json", model_max_length=14)
    model = ld.MaxSim(folder)
    np.testing.assert_allclose(
        scores(model, frame(queries, texts)), theirs(reference(str(folder)), queries, texts), **CLOSE
    )
    assert model.coverage.windows == model.coverage.documents
    assert model.model.reader.windows.largest == 14 - model.model.reader.special_tokens()


def test_the_fixtures_come_from_three_libraries_and_are_small():
    libraries = {json.loads((FOLDER / n / "scores.json").read_text(encoding="utf-8"))["library"] for n in NAMES}
    assert {library.split()[0] for library in libraries} == {"sentence-transformers", "pylate", "colbert-ai"}
    assert all(sum(f.stat().st_size for f in (FOLDER / n).rglob("*") if f.is_file()) <= 200_000 for n in NAMES)


def test_the_script_still_writes_checkpoints_like_the_fixtures(tmp_path):
    written = {kind: Path(getattr(script, kind)(str(tmp_path / kind))) for kind in ("bert", "modernbert")}
    for name in NAMES:
        old, new = FOLDER / name, written[json.loads((FOLDER / name / "config.json").read_text())["model_type"]]
        vocabularies = [json.loads((f / "tokenizer.json").read_text("utf-8"))["model"]["vocab"] for f in (old, new)]
        assert vocabularies[0] == vocabularies[1]
        configs = [json.loads((f / "config.json").read_text()) for f in (old, new)]
        assert all(config[key] == value for config in configs for key, value in script.SIZES.items())
        content = json.loads((old / "scores.json").read_text(encoding="utf-8"))
        assert [content["queries"], content["texts"]] == [script.QUERIES, script.TEXTS]


@pytest.mark.parametrize("name", ["st-plain", "pylate-bert", "colbert"])
def test_long_documents_are_maxima_over_hand_made_windows(name):
    folder, words = str(FOLDER / name), LONG.split()
    model = reference(folder)
    windows = [" ".join(words[a:b]) for a, b in ((0, 7), (7, 14), (14, 21))]
    text = " ".join(words[:21])
    sizes = [len(tokens) for tokens in ld.MaxSim(folder).model.reader.tokenize(windows)]
    # Words may have several tokens.
    cut = {"windows": ld.SlidingWords(7, 7)} if len(set(sizes)) > 1 else {"window_size": sizes[0]}
    found = ld.MaxSim(folder, explain=True, **cut)(frame(["old dog"], [text])).iloc[0]
    assert len(found.window_scores) == 3
    assert found.score == pytest.approx(by_hand(model, "old dog", windows), abs=1e-5)
    each = [by_hand(model, "old dog", [window]) for window in windows]
    np.testing.assert_allclose(found.window_scores, each, **CLOSE)
    best = ld.MaxSim(folder, aggregation="max", **cut)(frame(["old dog"], [text]))["score"].item()
    assert best == pytest.approx(max(each), abs=1e-5)


def test_overlaps_and_repetitions_change_nothing_but_context():
    text = whole_words()
    overlapping = ld.MaxSim(PLAIN, window_size=20, stride=10, explain=True)(frame(["old dog"], [text])).iloc[0]
    windows = [text[start:end] for start, end in overlapping.window_spans]
    assert len(windows) > 3
    assert overlapping.score == pytest.approx(by_hand(reference(PLAIN), "old dog", windows), abs=1e-5)
    part = LONG[: LONG.index(" ", 60)]
    windows = ld.SentenceWindows(max_sentences=1)
    single, repeated = (
        scores(ld.MaxSim(PLAIN, windows=windows), frame(QUERIES, [t])) for t in (f"{part}.", f"{part}. {part}.")
    )
    np.testing.assert_allclose(single, repeated, **CLOSE)


def test_windows_are_as_long_as_the_checkpoint_says():
    model = ld.MaxSim(PLAIN)
    model(frame(QUERIES, [LONG * 3]))
    assert model.model.reader.windows.largest == 60 - model.model.reader.special_tokens()
    assert model.model.reader.special_tokens() > 2  # the prompt
    assert ld.MaxSim(PLAIN, window_size=30).model.reader.windows.largest == 30
    assert ld.MaxSim(tiny.encoder(None)).model.reader.windows.largest == 128 - 2


def test_a_query_longer_than_the_checkpoint_allows_is_truncated_with_a_warning():
    model = ld.MaxSim(STANFORD)
    with pytest.warns(ld.TruncationWarning, match="maximum query length of 13"):
        model(frame([" ".join(tiny.WORDS)], ["a dog"]))


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


@pytest.mark.parametrize("name", ["st-plain", "st-fixed", "st-min", "pylate-modernbert", "colbert"])
def test_batch_padding_and_order_change_no_score(name):
    table = ld.check_invariance(ld.MaxSim(str(FOLDER / name), window_size=30), verbose=False)
    assert table["passed"].dropna().all(), table


@pytest.mark.parametrize(
    ("file", "values", "message"),
    [
        ("3_MultiVectorMask/config.json", {"keep_only_token_ids": [3]}, "keep_only_token_ids"),
        ("2_Dense/config.json", {"module_input_name": "sentence_embedding"}, "sentence_embedding"),
        ("2_Dense/config.json", {"activation_function": "numpy.tanh"}, "numpy.tanh"),
        ("sentence_bert_config.json", {"modality_config": {"message": {"method": "forward"}}}, "modality_config"),
        ("sentence_bert_config.json", {"processing_kwargs": {"text": {"max_length": 9}}}, "processing_kwargs"),
        ("tokenizer_config.json", {"truncation_side": "left"}, "truncation_side"),
        (
            "sentence_bert_config.json",
            {"query_expansion": {"strategy": "fixed", "length": 200, "attend": True}},
            "expands queries to 200 tokens; its model takes 96",
        ),
    ],
)
def test_settings_that_cannot_be_applied_are_refused(file, values, message, tmp_path):
    folder = copy_of(PLAIN, tmp_path)
    change(folder / file, **values)
    with pytest.raises(ValueError, match=message):
        ld.MaxSim(folder)(frame(QUERIES, [LONG]))


@pytest.mark.parametrize(
    ("place", "kind", "message"),
    [
        (3, "sentence_transformers.models.WordWeights", "WordWeights"),
        (2, "sentence_transformers.base.modules.normalize.Normalize", "does not support Dense"),
        (0, "sentence_transformers.models.Router", "cannot load"),
    ],
)
def test_unknown_modules_are_refused_by_name(place, kind, message, tmp_path):
    folder = copy_of(PLAIN, tmp_path)
    modules = json.loads((folder / "modules.json").read_text())
    if place == 2:
        modules.insert(1, {**modules[-1], "type": kind})
    else:
        modules[place]["type"] = kind
    (folder / "modules.json").write_text(json.dumps(modules))
    with pytest.raises(ValueError, match=message):
        ld.MaxSim(folder)(frame(QUERIES, [LONG]))


def test_pickled_weights_are_refused(tmp_path):
    folder = copy_of(STANFORD, tmp_path)
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises((OSError, ValueError), match="safetensors"):
        ld.MaxSim(folder)(frame(QUERIES, [LONG]))


@pytest.mark.parametrize(
    "arguments",
    [
        *({"pooling": "mean"}, {"template": "plain"}, {"layout": "padded"}, {"stride": 10}),
        *({"token_pooling": float("inf")}, {"token_pooling": float("nan")}),
    ],
)
def test_arguments_without_effect_are_refused(arguments):
    with pytest.raises(ValueError, match=next(iter(arguments))):
        ld.MaxSim(PLAIN, **arguments)


@pytest.mark.filterwarnings("default::pyterrier_longdoc.rerankers.cross_encoder.UntrainedWarning")
def test_a_plain_encoder_gets_a_projection_by_seed_and_must_be_trained(cross_encoder, plain_encoder, results):
    for backbone in (plain_encoder, cross_encoder):
        with pytest.warns(ld.UntrainedWarning, match="late-interaction checkpoint"):
            first = scores(ld.MaxSim(backbone), results)
        np.testing.assert_array_equal(first, scores(ld.MaxSim(backbone), results))
        assert (first != scores(ld.MaxSim(backbone, seed=1), results)).any()
    assert ld.MaxSim(plain_encoder).model.encoder.hidden_size == 128


# Texts.


@pytest.mark.parametrize("folder", [PLAIN, STANFORD, POOLED])
def test_any_text_has_a_score(folder):
    texts = ["", " ", "...", "!?", "\U0001f40d naïve 中文 \u202e", "a" * 400, "\n\n"]
    rows = frame(["", "...", "dog"], texts)
    before = rows.copy()
    found = ld.MaxSim(folder, explain=True)(rows)
    assert np.isfinite(found["score"]).all()
    assert rows.equals(before)
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
    rows = frame(["old dog"], [whole_words()]).assign(title="red fish")
    titled = ld.MaxSim(PLAIN, window_size=20, text_field=("title", "text"), repeat="title", explain=True)(rows).iloc[0]
    model = reference(PLAIN)
    plain = ld.MaxSim(PLAIN, window_size=20, explain=True)(rows).iloc[0]
    assert titled.window_spans == plain.window_spans
    windows = [f"red fish {rows['text'][0][a:b]}" for a, b in plain.window_spans]
    assert titled.score == pytest.approx(by_hand(model, "old dog", windows), abs=1e-5)
    assert titled.score != plain.score


# What is remembered.


def test_windows_are_encoded_once_for_all_queries(encoded):
    model = ld.MaxSim(PLAIN, window_size=20)
    expected = scores(model, frame(QUERIES, [LONG, "a dog"]))
    assert sum(encoded) > 2
    encoded.clear()
    np.testing.assert_array_equal(scores(model, frame(QUERIES, [LONG, "a dog"])), expected)
    assert not encoded
    scores(model, frame(["river"], [LONG, "a dog"]))
    assert sum(encoded) == 1  # the query


def test_a_query_and_a_text_of_the_same_words_have_their_own_vectors(tmp_path):
    folder = copy_of(PLAIN, tmp_path)
    change(folder / "config_sentence_transformers.json", prompts={})
    change(folder / "3_MultiVectorMask/config.json", skiplist_tasks=["document"])
    text = "old, dog"
    expected = by_hand(reference(str(folder)), text, [text])
    assert scores(ld.MaxSim(folder), frame([text], [text])).item() == pytest.approx(expected, abs=1e-5)


def test_the_vector_cache_in_memory_keeps_its_limit():
    model = ld.MaxSim(PLAIN, window_size=20, cached_bytes=4000)
    expected = scores(ld.MaxSim(PLAIN, window_size=20), frame(QUERIES, [LONG, LONG[10:], LONG[20:]]))
    np.testing.assert_allclose(scores(model, frame(QUERIES, [LONG, LONG[10:], LONG[20:]])), expected, **CLOSE)
    cache = model.model.encoder.cache
    assert 0 < sum(array.nbytes for array in cache._vectors.values()) <= 4000


def test_a_relative_path_of_the_vector_cache_is_resolved_when_it_is_given(tmp_path, monkeypatch):
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    model = ld.MaxSim(PLAIN, window_size=20, vector_cache="vectors")
    monkeypatch.chdir("elsewhere")
    model(frame(QUERIES, [LONG]))
    assert (tmp_path / "vectors").is_file()


def test_vectors_on_disk_give_later_models_exactly_the_same_scores(tmp_path, encoded):
    arguments = {"window_size": 20, "vector_cache": tmp_path / "deeper" / "vectors"}
    rows = frame(QUERIES, [LONG, "a dog", ""])
    first = scores(ld.MaxSim(PLAIN, **arguments), rows)
    exact = scores(ld.MaxSim(PLAIN, window_size=20), rows)
    np.testing.assert_allclose(first, exact, atol=2e-3)
    assert (first != exact).any()
    encoded.clear()
    forget_embeddings()
    again = ld.MaxSim(PLAIN, **arguments)
    np.testing.assert_array_equal(scores(again, rows), first)
    assert sum(encoded) == len(QUERIES)
    np.testing.assert_array_equal(scores(again, rows), first)  # from memory


def test_vectors_on_disk_are_of_these_weights_and_settings(tmp_path, encoded):
    arguments = {"window_size": 20, "vector_cache": tmp_path / "vectors"}
    rows = frame(["old dog"], [LONG])
    ld.MaxSim(PLAIN, **arguments)(rows)
    stored = len(ArrayStore(tmp_path / "vectors", 10**9))
    model = ld.MaxSim(PLAIN, **arguments)
    with torch.no_grad():
        model.model.encoder.representation[0].linear.weight.mul_(1.1)
    changed = scores(model, rows)
    assert len(ArrayStore(tmp_path / "vectors", 10**9)) == 2 * stored
    assert changed.item() != pytest.approx(scores(ld.MaxSim(PLAIN, **arguments), rows).item(), abs=1e-4)
    ld.MaxSim(PLAIN, token_pooling=2, **arguments)(rows)
    assert len(ArrayStore(tmp_path / "vectors", 10**9)) == 3 * stored


def test_two_threads_can_share_a_vector_cache(tmp_path, monkeypatch):
    rows, shared = frame(QUERIES, [LONG, "a dog"]), ld.MaxSim(PLAIN, vector_cache=tmp_path / "vectors")
    alone = scores(ld.MaxSim(PLAIN, vector_cache=tmp_path / "alone"), rows)
    assert np.abs(alone - scores(ld.MaxSim(PLAIN), rows)).max() > 1e-5  # rounded vectors make a difference
    forget_embeddings()
    threads = Interleaved().before(monkeypatch, Model, "encode")
    for found in threads.run(lambda: scores(shared, rows), lambda: scores(shared, rows)):
        np.testing.assert_allclose(found, alone, rtol=0, atol=1e-6)


def test_the_vector_cache_on_disk_keeps_its_limit_and_drops_the_oldest(tmp_path):
    store = ArrayStore(tmp_path / "vectors", 3000)
    made = []

    def get_or_compute(numbers, store=store):
        def make(new):
            made.append(len(new))
            return [np.full((10, 4), numbers[i], np.float16) for i in new]  # 80 bytes each

        return store.get_or_compute([bytes([number]) for number in numbers], make, width=4)

    for number in range(50):
        get_or_compute([number])
    assert len(store) == 3000 // 80
    made.clear()
    newest = get_or_compute(range(20, 50))
    assert not made
    assert [float(array[0, 0]) for array in newest] == list(range(20, 50))
    get_or_compute([0, 1])
    assert made == [2]
    too_large = ArrayStore(tmp_path / "other", 79)
    assert get_or_compute([0], too_large)[0].shape == (10, 4)
    assert len(too_large) == 0


def test_a_file_that_is_not_a_vector_cache_is_named(tmp_path):
    (tmp_path / "text").write_text("no database " * 100)
    with pytest.raises(ValueError, match="text"):
        ld.MaxSim(PLAIN, vector_cache=tmp_path / "text")(frame(QUERIES, [LONG]))
    ld.MaxSim(PLAIN, vector_cache=tmp_path / "vectors")(frame(QUERIES, [LONG]))
    with sqlite3.connect(tmp_path / "vectors") as connection:
        assert connection.execute("SELECT count(*) FROM arrays").fetchone()[0]


@pytest.mark.parametrize("value", ["X''", "X'00'", "substr(value, 1, size / 2)", "'text'", "NULL"])
def test_damaged_vectors_name_the_file_and_the_cure(value, tmp_path):
    rows, file = frame(QUERIES, [LONG]), tmp_path / "vectors"
    ld.MaxSim(PLAIN, vector_cache=file)(rows)
    with sqlite3.connect(file) as connection:
        connection.execute(f"UPDATE arrays SET value = {value}")
    forget_embeddings()
    with pytest.raises(ValueError, match=rf"cache .*{file.name}' is damaged: delete it"):
        ld.MaxSim(PLAIN, vector_cache=file)(rows)


def test_scores_in_a_score_cache_are_of_rounded_vectors_or_of_exact_ones(tmp_path):
    rows, cache = frame(QUERIES, [LONG]), {"score_cache": tmp_path / "scores", "window_size": 20}
    exact, rounded = ld.MaxSim(PLAIN, **cache), ld.MaxSim(PLAIN, vector_cache=tmp_path / "vectors", **cache)
    assert (scores(exact, rows) != scores(rounded, rows)).any()
    np.testing.assert_array_equal(scores(exact, rows), scores(ld.MaxSim(PLAIN, window_size=20), rows))


# Pooled tokens.


@pytest.mark.parametrize("factor", [1.5, 2, 4])
@pytest.mark.parametrize("protected", [0, 1])
@pytest.mark.parametrize("normalize", [True, False])
def test_pooling_is_that_of_sentence_transformers(factor, protected, normalize):
    modules = pytest.importorskip("sentence_transformers.multi_vector_encoder.modules")
    theirs = modules.HierarchicalTokenPooling(factor, num_protected_tokens=protected, normalize_embeddings=normalize)
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
    query, document = model.encode_query([QUERIES[0]]), model.encode_document([text], token_pooling=pooling)
    expected = model.similarity(query, document).item()
    assert scores(ld.MaxSim(PLAIN, token_pooling=3), frame(QUERIES[:1], [text])).item() == pytest.approx(
        expected, abs=1e-5
    )
    cited = [ld.MaxSim(PLAIN, token_pooling=factor).cited() for factor in (None, 1, 3)]
    assert ["clavie-2024-reducing" in keys for keys in cited] == [False, False, True]


def test_pooling_of_a_checkpoint_can_be_switched_off():
    pooled, single = (ld.MaxSim(POOLED, token_pooling=factor) for factor in (None, 1))
    rows = frame(QUERIES, [LONG])
    assert (scores(pooled, rows) < scores(single, rows)).any()
    assert pooled.model.encoder.how.pooling == 2.0


# Explanations.


def test_term_places_are_the_positions_of_the_maxima():
    text = "the cat in the rain. a dog by the river, and snow on the old tree"
    model, reference_model = ld.MaxSim(PLAIN, window_size=12, explain=True), reference(PLAIN)
    row = model(frame(["old dog"], [text])).iloc[0]
    assert sum(part for *_, part in row.term_places) == pytest.approx(row.score, abs=1e-5)
    assert [(token, part) for token, _, _, part in row.term_places] == row.term_scores
    names = [token for token, *_ in row.term_places]
    assert names[0] == "[CLS]"
    assert names[-1] == "[SEP]"
    assert {"old", "dog"} <= set(names)
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
    places = ld_places(model, "Dog rain", text)
    assert places["dog"] == "dog"
    assert places["rain"] == "rain"
    assert places["[CLS]"] == ""


def ld_places(model, query: str, text: str) -> dict[str, str]:
    row = model(frame([query], [text])).iloc[0]
    return {token: text[start:end] for token, start, end, _ in row.term_places}


def test_the_place_of_a_pooled_token_is_its_window():
    row = ld.MaxSim(POOLED, window_size=30, explain=True)(frame(["old dog"], [LONG])).iloc[0]
    assert {(start, end) for _, start, end, _ in row.term_places} <= set(row.window_spans)


def test_pooled_tokens_of_several_blocks_have_no_place():
    blocks = ld.KeyBlocks(ld.BM25Windows(2), ld.SentenceWindows(max_sentences=1))
    model = ld.MaxSim(POOLED, window_size=30, preselect=blocks, explain=True)
    row = model(frame(["old dog"], ["An old dog. The cat in the rain. The old dog."])).iloc[0]
    assert len(row.window_spans) == 2
    assert all(start == end for _, start, end, _ in row.term_places)


def test_only_the_best_window_counts_with_max():
    row = ld.MaxSim(PLAIN, window_size=20, aggregation="max", explain=True)(frame(["old dog"], [LONG])).iloc[0]
    assert row.score == pytest.approx(max(row.window_scores), abs=1e-6)
    assert sum(part for *_, part in row.term_places) == pytest.approx(row.score, abs=1e-5)
    assert all(row.best_start <= start <= end <= row.best_end for _, start, end, _ in row.term_places)


def test_columns_of_an_explanation_are_the_same_without_rows():
    model = ld.MaxSim(PLAIN, explain=True)
    rows = frame(QUERIES, [LONG])
    assert list(model(rows).columns) == list(model(rows.head(0)).columns)
    assert "term_places" in model(rows)


# Training.

STEPS = ld.TrainingArgs(epochs=8, queries_per_step=2, negatives=1, learning_rates={"": 3e-3}, dropout=0.0)


def test_fit_learns_and_what_is_saved_scores_the_same(plain_encoder, results, tmp_path):
    model = ld.MaxSim(plain_encoder, window_size=20, training=STEPS)
    model.fit(results, QRELS)
    losses = model.history["loss"].dropna()
    assert losses.iloc[-1] < 0.5 * losses.iloc[0]
    model.save(tmp_path / "saved")
    loaded = ld.MaxSim.load(tmp_path / "saved")
    np.testing.assert_allclose(scores(loaded, results), scores(model, results), **CLOSE)
    assert loaded.model.ready
    assert loaded.is_trained
    model.save_adapter(tmp_path / "adapter")
    adapted = ld.CrossEncoder.load(tmp_path / "adapter")
    np.testing.assert_allclose(scores(adapted, results), scores(model, results), atol=5e-2)


@pytest.mark.parametrize("name", NAMES)
def test_every_checkpoint_can_be_saved_and_loaded(name, tmp_path, encoded):
    model = ld.MaxSim(str(FOLDER / name), window_size=30, token_pooling=2)
    rows = frame(QUERIES, [LONG, "A dog, a Cat!"])
    expected = scores(model, rows)
    model.vector_cache = tmp_path / "vectors"
    rounded = scores(model, rows)
    model.save(tmp_path / "model")
    loaded = ld.MaxSim.load(tmp_path / "model")
    assert loaded.model.ready
    assert loaded.model.reader.describe() == model.model.reader.describe()
    np.testing.assert_allclose(scores(loaded, rows), expected, **CLOSE)
    loaded.vector_cache = model.vector_cache
    forget_embeddings()
    encoded.clear()
    np.testing.assert_array_equal(scores(loaded, rows), rounded)
    assert sum(encoded) == len(QUERIES)  # all windows are in the file


def test_lora_trains_attention_and_projection_of_a_checkpoint(results):
    pytest.importorskip("peft")
    recipe = ld.TrainingArgs(
        max_steps=2, queries_per_step=2, negatives=1, lora=ld.Lora(rank=2), learning_rates={"": 1e-2}
    )
    model = ld.MaxSim(PLAIN, window_size=20, training=recipe)
    before = {name: value.clone() for name, value in model.model.state_dict().items()}
    model.fit(results, QRELS)
    after = model.model.state_dict()
    assert list(after) == list(before)
    changed = {name for name in after if not torch.equal(after[name], before[name])}
    assert any("representation" in name for name in changed)
    assert any("attention" in name for name in changed)


def test_validation_does_not_write_to_the_vector_cache(plain_encoder, results, tmp_path):
    recipe = ld.TrainingArgs(max_steps=2, queries_per_step=2, negatives=1)
    model = ld.MaxSim(plain_encoder, window_size=20, training=recipe, vector_cache=tmp_path / "vectors")
    model.fit(results, QRELS, results, QRELS)
    assert not (tmp_path / "vectors").exists()
    model(results)
    assert (tmp_path / "vectors").exists()


def test_start_from_takes_over_the_weights_that_both_models_have(plain_encoder, results):
    recipe = ld.TrainingArgs(max_steps=2, queries_per_step=2, negatives=1, learning_rates={"": 1e-2})
    trained = ld.MaxSim(plain_encoder, window_size=20, training=recipe).fit(results, QRELS)
    other = ld.MaxSim(plain_encoder, window_size=20).start_from(trained)
    assert other.model.ready
    np.testing.assert_array_equal(scores(other, results), scores(trained, results))
    maxp = ld.MaxP(plain_encoder, window_size=20, stride=10, training=recipe).fit(results, QRELS)
    from_maxp = ld.MaxSim(plain_encoder, window_size=20).start_from(maxp)
    assert not from_maxp.model.ready  # its projection is random
    weight = "encoder.layer.0.output.dense.weight"
    assert torch.equal(
        from_maxp.model.encoder.backbone.state_dict()[weight], maxp.model.encoder.backbone.state_dict()[weight]
    )
    back = ld.MaxP(plain_encoder, window_size=20, stride=10).start_from(trained)
    assert not back.model.ready
    from_embeddings = ld.MaxSim(plain_encoder).start_from(ld.BiEncoder(plain_encoder, window_size=20, stride=10))
    assert not from_embeddings.model.ready


# As a selector.


def test_maxsim_windows_selects_the_windows_with_the_best_scores(cross_encoder, tmp_path, encoded):
    selecting = ld.MaxSim(PLAIN)
    rows = frame(QUERIES, [LONG])
    windows = {"window_size": 10, "stride": 10, "explain": True}
    chosen = ld.MaxP(cross_encoder, preselect=ld.MaxSimWindows(2, selecting), **windows)
    whole = ld.MaxP(cross_encoder, **windows)(rows)
    found = chosen(rows)
    for row, all_spans in zip(found.itertuples(), whole["window_spans"], strict=True):
        texts = [row.text[a:b] for a, b in all_spans]
        by_window = scores(selecting, frame([row.query], texts))
        best = sorted(np.argsort(-by_window, kind="stable")[:2])
        assert row.window_spans == [all_spans[i] for i in best]
    encoded.clear()
    chosen(frame(["river"], [LONG]))
    assert sum(encoded) == 1  # of the selector: the query
    chosen.save(tmp_path)
    loaded = ld.MaxP.load(tmp_path)
    assert isinstance(loaded.preselect, ld.MaxSimWindows)
    np.testing.assert_allclose(scores(loaded, rows), scores(chosen, rows), **CLOSE)
    assert "khattab-2020-colbert" in chosen.cited()


def test_maxsim_windows_refuses_other_models(cross_encoder):
    with pytest.raises(ValueError, match="MaxSim"):
        ld.MaxSimWindows(2, ld.MaxP(cross_encoder))


def test_maxsim_reads_preselected_windows():
    rows = frame(QUERIES, [LONG])
    part = ld.MaxSim(PLAIN, window_size=10, preselect=ld.BM25Windows(2), explain=True)(rows)
    assert all(len(spans) == 2 for spans in part["window_spans"])
    assert (part["score"] <= ld.MaxSim(PLAIN, window_size=10)(rows)["score"] + 1e-6).all()


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


def test_vectors_on_disk_belong_to_an_architecture(tmp_path):
    other = copy_of(PLAIN, tmp_path)
    change(other / "config.json", hidden_act="relu")
    rows = frame(QUERIES, [LONG])
    for folder in (PLAIN, other):
        kept = scores(ld.MaxSim(str(folder), vector_cache=tmp_path / "vectors"), rows)
        forget_embeddings()
        np.testing.assert_allclose(kept, scores(ld.MaxSim(str(folder)), rows), atol=2e-3)
        forget_embeddings()


def test_documents_longer_than_the_encoder_reads_are_read_in_windows_that_fit(tmp_path):
    folder = copy_of(PLAIN, tmp_path)
    change(folder / "sentence_bert_config.json", document_length=8000)
    for changes in ({}, {"windows": ld.SentenceWindows()}):
        model = ld.MaxSim(str(folder), **changes)
        model(frame(QUERIES, [LONG * 3]))
        assert model.coverage.share_read == 1.0


def test_weights_taken_over_for_other_markers_are_untrained():
    model = ld.MaxSim(PLAIN).start_from(ld.MaxSim(PLAIN))
    assert model.model.ready
    folder = str(FOLDER / "st-fixed")
    assert not ld.MaxSim(folder).start_from(ld.MaxSim(STANFORD)).model.ready


def test_do_lower_case_is_applied_with_a_cased_tokenizer(tmp_path):
    folder, query, texts = copy_of(PLAIN, tmp_path), ["Old DOG"], ["A Cat", "the RED fish"]
    tiny.cased(str(folder))
    change(folder / "sentence_bert_config.json", do_lower_case=True)
    expected = theirs(reference(str(folder)), query, texts)
    np.testing.assert_allclose(scores(ld.MaxSim(str(folder)), frame(query, texts)), expected, **CLOSE)


def test_loading_arguments_in_a_checkpoint_are_used(tmp_path):
    folder, texts = copy_of(PLAIN, tmp_path), ["the cat", "a red fish"]
    change(folder / "sentence_bert_config.json", config_args={"num_hidden_layers": 1})
    expected = theirs(reference(str(folder)), QUERIES, texts)
    np.testing.assert_allclose(scores(ld.MaxSim(str(folder)), frame(QUERIES, texts)), expected, **CLOSE)


def test_checkpoints_that_retrieve_images_are_refused(tmp_path):
    change(Path(tiny.checkpoint(tmp_path, labels=None)) / "config.json", architectures=["ColPaliForRetrieval"])
    with pytest.raises(ValueError, match="ColPaliForRetrieval"):
        ld.MaxSim(tmp_path)(frame(QUERIES, [LONG]))


@pytest.mark.parametrize("folder", [PLAIN, STANFORD])
def test_missing_weights_are_refused(folder, tmp_path):
    folder = copy_of(folder, tmp_path)
    weights = load_file(folder / "model.safetensors")
    name = next(name for name in weights if name.endswith("output.dense.weight"))
    save_file(
        {key: value for key, value in weights.items() if key != name}, folder / "model.safetensors", {"format": "pt"}
    )
    with pytest.raises(ValueError, match="lacks 1 weights"):
        ld.MaxSim(folder)(frame(QUERIES, [LONG]))


def test_a_saved_model_is_loaded_without_the_library_of_its_checkpoint(tmp_path, monkeypatch):
    model, rows = ld.MaxSim(PLAIN), frame(QUERIES, [LONG])
    expected = scores(model, rows)
    model.save(tmp_path)
    monkeypatch.setitem(sys.modules, "sentence_transformers.multi_vector_encoder", None)
    np.testing.assert_allclose(scores(ld.MaxSim.load(tmp_path), rows), expected, **CLOSE)
    with pytest.raises(ImportError, match="pip install sentence-transformers"):
        ld.MaxSim(PLAIN)(rows)


def test_skips_in_may_be_a_string():
    assert TokenVectors(skips_in="query").skips_in == ("query",)


def test_only_transform_uses_rounded_vectors_of_the_cache(tmp_path):
    rows = frame(QUERIES, [LONG])
    model = ld.MaxSim(PLAIN, vector_cache=tmp_path / "vectors")
    rounded = scores(model, rows)
    exact = model.model.score(rows["query"].tolist(), rows["text"].tolist()).scores
    np.testing.assert_allclose(exact, scores(ld.MaxSim(PLAIN), rows), **CLOSE)
    assert np.abs(exact - rounded).max() > 1e-5
    with pytest.raises(ValueError, match="vector_cache=5"):
        ld.MaxSim(PLAIN, vector_cache=5)


@pytest.mark.parametrize("name", NAMES)
def test_a_late_interaction_checkpoint_in_a_cross_encoder_is_logged(name, caplog):
    ld.MaxP(FOLDER / name, window_size=20, stride=10, max_query_len=8).model  # noqa: B018 - loads it
    assert "late-interaction model" in caplog.text
