"""What a sentence-transformers checkpoint names is what BiEncoder does; prefixes become the tokens they would be."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

import pyterrier_longdoc as ld
from pyterrier_longdoc.modelling.embed import embedding_settings
from pyterrier_longdoc.modelling.texts import tokenize

from ..modelling.test_batching import encoder_with, ids
from ..modelling.test_windows import byte_level_tokenizer
from ..rerankers.test_biencoder import LONG, SMALL, frame, scores
from ..support import tiny

MODULES = "sentence_transformers.models."


def describe(folder: Path, **configs: dict) -> Path:
    """Adds `modules.json` and a folder with the config of each module after the encoder."""
    modules = [{"idx": 0, "name": "0", "path": "", "type": f"{MODULES}Transformer"}]
    for i, (kind, config) in enumerate(configs.items(), 1):
        path = f"{i}_{kind}"
        modules.append({"idx": i, "name": str(i), "path": path, "type": MODULES + kind})
        (folder / path).mkdir(exist_ok=True)
        (folder / path / "config.json").write_text(json.dumps(config))
    (folder / "modules.json").write_text(json.dumps(modules))
    return folder


def dense(folder: Path, size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Weights of a dense layer, put where `describe` puts the second module."""
    torch.manual_seed(3)
    weight, bias = torch.randn(size, 32), torch.randn(size)
    save_file({"linear.weight": weight, "linear.bias": bias}, folder / "2_Dense" / "model.safetensors")
    return weight, bias


@pytest.fixture
def encoder(tmp_path) -> Path:
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
def test_pooling_is_the_checkpoints_own(config, pooling, encoder):
    inp = frame(["old dog"], ["the cat and the dog", LONG])
    other = {"cls": "mean", "mean": "cls"}[pooling]
    expected = scores(ld.BiEncoder(encoder, pooling=pooling, **SMALL), inp)
    describe(encoder, Pooling=config, Normalize={})
    assert embedding_settings(str(encoder)).pooling == pooling
    assert np.array_equal(scores(ld.BiEncoder(encoder, **SMALL), inp), expected)
    assert not np.allclose(scores(ld.BiEncoder(encoder, pooling=other, **SMALL), inp), expected)


def test_unknown_pooling_must_be_chosen_away(encoder):
    inp = frame(["old dog"], ["the cat and the dog"])
    describe(encoder, Pooling={"pooling_mode_lasttoken": True, "pooling_mode_max_tokens": False})
    with pytest.raises(ValueError, match="trained with the pooling 'lasttoken'"):
        ld.BiEncoder(encoder, **SMALL)(inp)
    assert np.isfinite(scores(ld.BiEncoder(encoder, pooling="mean", **SMALL), inp)).all()


@pytest.mark.parametrize(("activation", "function"), [("Tanh", torch.tanh), ("Identity", lambda x: x)])
def test_dense_layer_is_applied(activation, function, encoder):
    from transformers import AutoModel, AutoTokenizer

    config = {"in_features": 32, "out_features": 24, "activation_function": f"torch.nn.modules.{activation}"}
    describe(encoder, Pooling={"pooling_mode": "mean"}, Dense=config)
    weight, bias = dense(encoder, 24)
    tokenizer, model = AutoTokenizer.from_pretrained(encoder), AutoModel.from_pretrained(encoder).eval()

    def embed(text: str) -> torch.Tensor:
        with torch.no_grad():
            pooled = model(**tokenizer(text, return_tensors="pt")).last_hidden_state[0].mean(0)
        return function(weight @ pooled + bias)

    query, text = "old dog", "the cat and the dog"
    model_scores = scores(ld.BiEncoder(encoder, similarity="dot", **SMALL), frame([query], [text]))
    assert model_scores == pytest.approx([float(embed(query) @ embed(text))], rel=1e-4)


def test_layers_that_cannot_be_applied(encoder):
    inp = frame(["old dog"], ["the cat"])
    describe(encoder, Pooling={"pooling_mode": "mean"}, WordWeights={})
    with pytest.raises(ValueError, match="has a WordWeights layer"):
        ld.BiEncoder(encoder, **SMALL)(inp)
    describe(encoder, Pooling={"pooling_mode": "mean"}, Normalize={}, Dense={"in_features": 32, "out_features": 24})
    with pytest.raises(ValueError, match="has a Dense layer after Normalize"):
        ld.BiEncoder(encoder, **SMALL)(inp)
    describe(encoder, Pooling={"pooling_mode": "mean"}, Dense={"in_features": 32, "out_features": 24})
    with pytest.raises(ValueError, match=r"needs model\.safetensors there"):
        ld.BiEncoder(encoder, **SMALL)(inp)


def general(folder: Path, **settings) -> None:
    (folder / "config_sentence_transformers.json").write_text(json.dumps(settings))


def test_similarity_is_the_checkpoints_own(encoder):
    inp = frame(["old dog"], ["the cat and the dog", LONG])
    expected = scores(ld.BiEncoder(encoder, similarity="dot", **SMALL), inp)
    general(encoder, similarity_fn_name="dot")
    assert np.array_equal(scores(ld.BiEncoder(encoder, **SMALL), inp), expected)
    assert not np.allclose(scores(ld.BiEncoder(encoder, similarity="cosine", **SMALL), inp), expected)
    general(encoder, similarity_fn_name="euclidean")
    with pytest.raises(ValueError, match="trained with the similarity 'euclidean'"):
        ld.BiEncoder(encoder, **SMALL)(inp)


@pytest.mark.parametrize(
    ("settings", "query", "passage"),
    [
        ({"prompts": {"query": "find ", "document": "read "}}, "find ", "read "),
        ({"prompts": {"query": "find ", "passage": "read "}}, "find ", "read "),
        ({"prompts": {"query": "find ", "document": ""}}, "find ", ""),
        ({"prompts": {"any": "write "}, "default_prompt_name": "any"}, "write ", "write "),
        ({"prompts": {"any": "write "}, "default_prompt_name": None}, "", ""),
        ({}, "", ""),
    ],
)
def test_prompts_are_the_checkpoints_own(settings, query, passage, encoder):
    inp = frame(["old dog"], ["the cat and the dog", LONG])
    plain = scores(ld.BiEncoder(encoder, **SMALL), inp)
    expected = scores(ld.BiEncoder(encoder, query_prefix=query, passage_prefix=passage, **SMALL), inp)
    general(encoder, **settings)
    assert np.array_equal(scores(ld.BiEncoder(encoder, **SMALL), inp), expected)
    assert np.array_equal(scores(ld.BiEncoder(encoder, query_prefix="", passage_prefix="", **SMALL), inp), plain)


def test_prefix_that_leaves_no_room(encoder):
    inp = frame(["old dog"], ["the cat"])
    for name in ("query_prefix", "passage_prefix"):
        with pytest.raises(ValueError, match=f"{name}='dog dog .*alone is longer than the backbone's 128 tokens"):
            ld.BiEncoder(encoder, **{name: "dog " * 200}, **SMALL)(inp)


def test_prompt_left_out_of_the_mean(encoder):
    describe(encoder, Pooling={"pooling_mode": "mean", "include_prompt": False})
    inp = frame(["old dog"], ["the cat"])
    with pytest.raises(ValueError, match="leaves its prompt out of the mean"):
        ld.BiEncoder(encoder, query_prefix="a dog: ", **SMALL)(inp)
    assert np.isfinite(scores(ld.BiEncoder(encoder, **SMALL), inp)).all()


def test_cross_encoder_as_bi_encoder_warns(cross_encoder):
    with pytest.warns(UserWarning, match="is a cross-encoder: as a bi-encoder it was never trained"):
        ld.BiEncoder(cross_encoder, **SMALL)(frame(["old dog"], ["the cat"]))


# Prefixes.


def sentence_piece_tokenizer() -> PreTrainedTokenizerFast:
    """A tokenizer in the style of XLM-R: every word begins with a mark, the first one too."""
    pieces = ["<unk>", "\u2581", *(f"\u2581{w}" for w in tiny.WORDS), *"abcdefghijklmnopqrstuvwxyz:., "]
    core = Tokenizer(models.Unigram([(piece, -float(i % 7 + 1)) for i, piece in enumerate(pieces)], 0))
    core.pre_tokenizer = pre_tokenizers.Metaspace()
    return PreTrainedTokenizerFast(tokenizer_object=core, unk_token="<unk>")


def framed(tokenizer: PreTrainedTokenizerFast) -> PreTrainedTokenizerFast:
    """The same tokenizer with special tokens around every text."""
    tokenizer.add_special_tokens({"cls_token": "[CLS]", "sep_token": "[SEP]", "pad_token": "[PAD]"})
    special = [("[CLS]", tokenizer.cls_token_id), ("[SEP]", tokenizer.sep_token_id)]
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=special
    )
    return tokenizer


@pytest.mark.parametrize("prefix", ["query: ", "find the dog: ", "a "])
@pytest.mark.parametrize("make", [tiny.tokenizer, byte_level_tokenizer, sentence_piece_tokenizer])
def test_prefix_becomes_the_tokens_that_it_would_be(make, prefix):
    tokenizer = tiny.tokenizer() if make is tiny.tokenizer else framed(make())
    texts = ["the cat and the dog", "rain", "Café! 12"]
    layout, lead = encoder_with(tokenizer, 2).text_layout(prefix)
    tokens = [ids(*text.ids.tolist()) for text in tokenize(tokenizer, texts, lead=lead)]
    batch = layout.collate([ids()] * 3, [[text] for text in tokens])
    for row, mask, text in zip(batch.input_ids, batch.attention_mask, texts, strict=True):
        assert row[mask].tolist() == tokenizer(prefix + text)["input_ids"]


def test_offsets_do_not_count_the_lead():
    text = "the cat  sat"
    [plain] = tokenize(byte_level_tokenizer(), [text], offsets=True)
    [led] = tokenize(byte_level_tokenizer(), [text], offsets=True, lead=" ")
    assert led.text == text
    assert int(led.ends.max()) == int(plain.ends.max()) == len(text)
    assert int(led.starts[0]) == 0
    [empty] = tokenize(byte_level_tokenizer(), [""], offsets=True, lead=" ")
    assert len(empty) == 0
