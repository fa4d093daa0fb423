"""Checkpoints taken apart: the scores of transformers, the papers' parameter counts, and errors for broken ones."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForSequenceClassification, AutoTokenizer, BartConfig, BertConfig

from pyterrier_longdoc.modelling.backbones.architectures import BigBirdRules
from pyterrier_longdoc.modelling.backbones.families import FAMILIES
from pyterrier_longdoc.modelling.backbones.load import build_backbone, load_backbone
from pyterrier_longdoc.modelling.encoder import WindowEncoder
from pyterrier_longdoc.modelling.heads import build_head
from pyterrier_longdoc.modelling.late_interaction import LateInteractionEncoder, build_late_backbone
from pyterrier_longdoc.modelling.reader import one_separator, specials_of_pair
from pyterrier_longdoc.modelling.templates import TEMPLATES, Template
from pyterrier_longdoc.modelling.windows import GreedyChunks, SlidingWindows

from ..support import scorers, tiny, tiny_long
from ..support.systems import QUIET, make, slow_but
from ..support.threads import meanwhile
from ..support.tiny import change

pytestmark = QUIET

PAIRS = [
    ("old dog", "the cat and the dog walk to the river. " * 3),
    ("snow in the city", "a red fish"),
    ("a", "tree, mountain! (rain) 1234 unbelievable"),
    ("", "the cat"),
    ("the cat", ""),
]
QUERIES, TEXTS = map(list, zip(*PAIRS, strict=True))


def scorer_of(backbone, head="firstp", windows=None, **reading):
    """A head that is warm-started from its backbone, in evaluation mode."""
    module = build_head(head, backbone.hidden_size, channels=backbone.channels)
    scorer = scorers.scorer_of(backbone, windows or GreedyChunks(), module, **reading)
    scorer.head.warm_start(scorer.initial_weights())
    return scorer


def count(module):
    return sum(p.numel() for p in module.parameters())


HEADS = [name for name, family in FAMILIES.items() if family.head is not None and family.in_transformers]
PLAIN = [name for name, family in FAMILIES.items() if family.supports_export]
DECODERS = {
    family: {"pad_token_id": 0, "num_key_value_heads": 2, "head_dim": 8}
    for family in ("llama", "mistral", "qwen2", "qwen3", "gemma", "gemma2", "phi3", "olmo2", "opt")
}
DECODERS["opt"] |= {"ffn_dim": 64, "word_embed_proj_dim": 32}
CLASSIFYING = {family: (family, DECODERS.get(family, {})) for family in (*HEADS, *DECODERS)}
CLASSIFYING["modernbert-mean"] = ("modernbert", {"classifier_pooling": "mean"})
OPTIONS = {"longformer": {"global_attention": "cls"}}


@torch.no_grad()
def logits(folder, queries, texts) -> np.ndarray:
    """The `(R, labels)` logits that transformers computes of each pair by itself."""
    model = AutoModelForSequenceClassification.from_pretrained(folder).eval()
    tokenizer, found = AutoTokenizer.from_pretrained(folder), []
    for query, text in zip(queries, texts, strict=True):
        inputs = tokenizer([query], [text], return_tensors="pt")
        found.append(model(inputs["input_ids"], token_type_ids=inputs.get("token_type_ids")).logits)
    return torch.cat(found).numpy()


@pytest.mark.parametrize("name", slow_but(("bert", "camembert", "modernbert-mean", "llama"), CLASSIFYING))
def test_scores_are_the_logits_of_transformers(name, tmp_path):
    family, changes = CLASSIFYING[name]
    folder, separator = tiny.checkpoint(tmp_path, family, **changes), "[SEP]"
    if family == "qwen2":  # of which transformers makes byte-level tokens, whatever the files say
        folder, separator = tiny_long.decoder(tmp_path, family, labels=1, begin=True, pad_token_id=1), "<|endoftext|>"
    expected = logits(folder, QUERIES, TEXTS)[:, 0]
    assert expected.std() > 1e-2
    template = None if family in HEADS else Template(f"{{query}}{separator}{{text}}")
    scorer = scorer_of(load_backbone(folder, template=template, **OPTIONS.get(family, {})))
    np.testing.assert_allclose(scorer.score(QUERIES, TEXTS).scores, expected, atol=1e-5 if family in HEADS else 1e-4)


@pytest.mark.parametrize("family", ["bert", "roberta"])
def test_scores_of_windows_are_the_logits_of_their_text(family, tmp_path):
    # Whole words that are one token each, so that any slice of the text has the tokens of its window.
    text, folder = " ".join((tiny.LONG + " " + tiny.LONG).split()[:60]), tiny.checkpoint(tmp_path, family)
    scorer = scorer_of(load_backbone(folder), "maxp", SlidingWindows(20, 10))
    [score], [explanation] = scorers.explained(scorer, ["old dog"], [text])
    slices = [text[a:b] for a, b in explanation.window_spans]
    assert slices == [" ".join(text.split()[i * 10 : i * 10 + 20]) for i in range(5)]
    expected = logits(folder, ["old dog"] * 5, slices)[:, 0]
    np.testing.assert_allclose(explanation.window_scores, expected, atol=1e-5)
    assert explanation.best_start == explanation.window_spans[expected.argmax()][0]
    assert score == pytest.approx(expected.max(), abs=1e-5)


@pytest.mark.parametrize(
    ("names", "relevant"),
    [
        *((["relevant", no], 0) for no in ("irrelevant", "Not relevant", "non-relevant")),
        *((pair, 0) for pair in (["yes", "no"], ["True", "False"], ["POSITIVE", "NEGATIVE"], ["related", "unrelated"])),
        *((pair, 1) for pair in (["LABEL_0", "LABEL_1"], ["0", "1"], ["not_entailment", "entailment"], [0, 1])),
    ],
)
def test_the_names_of_two_labels_decide_which_is_positive(names, relevant, tmp_path):
    folder = tiny.checkpoint(tmp_path, labels=2, id2label=dict(enumerate(names)))
    both = logits(folder, QUERIES, TEXTS)
    found = scorer_of(load_backbone(folder)).score(QUERIES, TEXTS).scores
    np.testing.assert_allclose(found, both[:, relevant] - both[:, 1 - relevant], atol=1e-5)


@pytest.mark.parametrize("names", [["a", "b"], ["relevant", "other"], ["relevant", "relevant"]])
def test_two_labels_with_ambiguous_names_are_refused(names, tmp_path):
    folder = tiny.checkpoint(tmp_path, labels=2, id2label=dict(enumerate(names)))
    with pytest.raises(ValueError, match="id2label"):
        load_backbone(folder)


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("albert", {"embedding_size": 16}),
        ("mpnet", tiny.FAMILIES["roberta"]),
        pytest.param("convbert", {}, marks=pytest.mark.slow),
        pytest.param("ctrl", {"n_embd": 32, "n_layer": 2, "n_head": 4, "dff": 64}, marks=pytest.mark.slow),
        ("modernbert-decoder", {"pad_token_id": 0}),
    ],
)
def test_an_omitted_classification_head_is_logged(family, changes, tmp_path, caplog):
    template = TEMPLATES["plain"] if family in ("ctrl", "modernbert-decoder") else None
    backbone = load_backbone(tiny.checkpoint(tmp_path, family, **changes), template=template)
    assert backbone.final is None
    assert f"the classification head of {family} is left out" in caplog.text


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_checkpoints_are_computed_in_fp32(tmp_path, dtype):
    folder = tiny.checkpoint(tmp_path)
    rounded = {key: value.to(dtype) for key, value in load_file(tmp_path / "model.safetensors").items()}
    save_file(rounded, tmp_path / "model.safetensors", metadata={"format": "pt"})
    change(tmp_path / "config.json", dtype=str(dtype).removeprefix("torch."))
    backbone = load_backbone(folder)
    assert {p.dtype for p in scorer_of(backbone).parameters()} == {torch.float32}
    weights = backbone.model.embeddings.word_embeddings.weight
    [stored] = (value for key, value in rounded.items() if key.endswith("word_embeddings.weight"))
    assert torch.equal(weights, stored.float())
    assert build_backbone(backbone.describe(), backbone.tokenizer).model.dtype == torch.float32


@pytest.mark.parametrize("family", slow_but(("bert", "modernbert"), PLAIN))
def test_plain_encoders_have_no_pooler_and_a_new_final_layer(family, tmp_path):
    backbone = load_backbone(tiny.checkpoint(tmp_path, family, labels=None))
    assert backbone.representation is None
    assert backbone.final is None
    assert not [name for name, _ in backbone.model.named_parameters() if "pooler" in name]
    scorer = scorer_of(backbone, "avgp")
    # The score is that of the raw state of the first token.
    inputs = backbone.tokenizer("old dog", "a red fish", return_tensors="pt")
    if specials_of_pair(backbone).types is None:
        inputs.pop("token_type_ids", None)
    with torch.no_grad():
        expected = scorer.head.final(backbone.model(**inputs).last_hidden_state[:, 0]).item()
    assert scorer.score(["old dog"], ["a red fish"]).scores[0] == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize("labels", [1, None])
@pytest.mark.parametrize("family", slow_but(("bert", "roberta", "modernbert"), PLAIN))
def test_descriptions_build_the_same_modules(family, labels, tmp_path):
    changes = {"classifier_pooling": "mean"} if family == "modernbert" else {}
    first = load_backbone(tiny.checkpoint(tmp_path, family, labels=labels, **changes))
    second = build_backbone(json.loads(json.dumps(first.describe())), first.tokenizer)
    for name in ("pooling", "hidden_size", "longest_input"):
        assert getattr(first, name) == getattr(second, name)
    one, other = (scorer_of(backbone) for backbone in (first, second))
    other.load_state_dict(one.state_dict(), strict=True)
    assert np.array_equal(one.score(QUERIES, TEXTS).scores, other.score(QUERIES, TEXTS).scores)


@pytest.mark.parametrize("family", slow_but(("bert", "roberta", "modernbert"), PLAIN))
def test_inputs_of_the_longest_length_are_scored_and_longer_ones_refused(family, tmp_path):
    backbone = load_backbone(tiny.checkpoint(tmp_path, family))
    # RoBERTa's positions are numbered from pad_token_id + 1.
    assert backbone.longest_input == (130 - 0 - 1 if FAMILIES[family].counts_from_padding else 128)
    own = specials_of_pair(backbone)
    for layout, specials in (("pair", len(own)), ("padded", len(one_separator(own)))):
        size = backbone.longest_input - 10 - specials
        scorer = scorer_of(backbone, windows=GreedyChunks(size), max_query_len=10, layout=layout)
        assert np.isfinite(scorer.score(["the " * 50], ["cat " * 200]).scores).all()
        with pytest.raises(ValueError, match=f"{size} document tokens"):
            scorer.use(replace(scorer.settings, windows=GreedyChunks(size + 1)))


BUILT_OTHERWISE = ("layoutlmv3", "lilt", "longformer", "xmod")  # not from the same sizes
POSITIONS_FROM_IDS = [name for name, row in FAMILIES.items() if row.counts_from_padding and name not in BUILT_OTHERWISE]
SIZES = {"max_position_embeddings": 67, "type_vocab_size": 1, "pad_token_id": 1}


@pytest.mark.parametrize("family", slow_but(("mpnet", "roberta"), POSITIONS_FROM_IDS))
def test_families_with_positions_by_token_ids_have_the_right_longest_input(family, tmp_path):
    backbone = load_backbone(tiny.checkpoint(tmp_path, family, labels=None, **SIZES))
    assert (backbone.longest_input, backbone.first_position) == (67 - 1 - 1, 1 + 1)
    with torch.no_grad():
        backbone.model(torch.full((1, 65), 7))
        with pytest.raises((IndexError, RuntimeError)):
            backbone.model(torch.full((1, 66), 7))


def test_bigbird_runs_one_pass_at_a_time():
    kinds: list[str] = []
    model = SimpleNamespace(device=torch.device("cpu"), set_attention_type=kinds.append)
    config = SimpleNamespace(block_size=4, num_random_blocks=1, attention_type="block_sparse")
    rules = BigBirdRules(config, {})

    def of_length(length):
        return rules.prepared(model, SimpleNamespace(mask=torch.ones(1, length)))

    def short_pass():
        with of_length(5):
            pass

    with of_length(100):
        other = meanwhile(short_pass)
        assert kinds == ["block_sparse"]
    other.join()
    assert kinds == ["block_sparse", "original_full"]


LAYER = 7_087_872  # 4 (768² + 768) + 2 * 768 * 3072 + 3072 + 768 + 2 * 2 * 768
BERT = 108_891_648  # BERT base without pooler
POOLER = 768 * 768 + 768  # the representation step of a BERT cross-encoder
POSITIONS = (512 + 2) * 768 + 2 * 768  # of the aggregator: positions, segments, layer norm
# Layer norms of query and document, their projections to 64, then F1 of query, document and product, F2 and F3.
MODEL1 = 2 * (2 * 768) + 2 * (768 * 64 + 64) + (3 * 64 * 64 + 64) + (64 * 32 + 32) + (32 + 1)
FIRSTP = 109_483_009
# 148,088,065 in Boytsov et al. 2025: a full BertModel as aggregator, with word embeddings and pooler unused.
TRANSFORMER = 148_088_065 - (30_522 * 768 + POOLER)

COUNTS = {
    **{(name, ()): FIRSTP for name in ("firstp", "maxp", "sump", "avgp", "kmaxp", "parade-avg", "parade-max")},
    ("parade-attn", ()): 109_483_777,
    ("parade-attn-elementwise", ()): 110_073_601,
    ("cedr-knrm", ()): 109_483_174,
    ("cedr-drmm", ()): 109_486_806,
    ("cedr-pacrr", ()): 109_520_001,
    ("model1", ()): BERT + POOLER + MODEL1,
    ("parade-transformer", ()): TRANSFORMER,
    ("parade-transformer", (("positions", False),)): TRANSFORMER - POSITIONS,
    ("parade-transformer", (("separators", False),)): TRANSFORMER - 768,
    ("parade-transformer", (("layers", 3), ("separators", False))): TRANSFORMER + LAYER - 768,
}
"""Of all weights of a model on a cross-encoder."""


@pytest.mark.parametrize("classifier", [True, False])
def test_numbers_of_parameters_equal_those_in_the_papers(classifier):
    config = BertConfig(num_labels=1, architectures=["BertForSequenceClassification"] if classifier else ["BertModel"])
    with torch.device("meta"):  # real sizes without their memory
        backbone = build_backbone({"config": config.to_dict(), "cross_encoder": classifier}, tiny.tokenizer())
        heads = {key: build_head(key[0], 768, channels=backbone.channels, **dict(key[1])) for key in COUNTS}
        found = {key: count(WindowEncoder(backbone)) + count(head) for key, head in heads.items()}
    # The papers' counts include BERT's pooler, which no model on a plain encoder uses.
    assert found == {key: number if classifier else number - POOLER for key, number in COUNTS.items()}


def minilm(layers):
    """The configuration of cross-encoder/ms-marco-MiniLM-L2/4/6-v2."""
    return BertConfig(hidden_size=384, intermediate_size=1536, num_hidden_layers=layers).to_dict()


def test_numbers_of_parameters_of_several_checkpoints_equal_those_in_the_papers():
    """PARADE Transf-PRETR-L6 and -L4 of Boytsov et al. 2022, and LATEIR of 2025, with two layers of interaction."""
    unused = 30_522 * 384 + 384 * 384 + 384  # words and pooler of a MiniLM
    with torch.device("meta"):
        for layers, published in ((6, 132_491_905), (4, 128_942_977)):
            options = {"aggregator": minilm(layers)}
            one, queries = (build_head(f"parade-transformer{of}", 768, **options) for of in ("", "-query"))
            apart = build_head("parade-transformer-query", 768, separate_projection=True, **options)
            found = [BERT + POOLER + count(head) + unused for head in (one, queries, apart)]
            assert found == [published, published, published + 768 * 384 + 384]
        description = {"config": BertConfig().to_dict(), "cross_encoder": False, "interaction": minilm(2)}
        late = build_late_backbone(description, tiny.tokenizer())
        head = build_head("parade-transformer", late.hidden_size, aggregator=minilm(6))
        assert count(LateInteractionEncoder(late)) + count(head) + POOLER + 2 * unused == 148_108_033


WEIGHTS = "model.safetensors"


def remove(pattern):
    def damage(folder):
        for file in folder.glob(pattern):
            file.unlink()

    return damage


def lose(weight):
    def damage(folder):
        tensors = load_file(folder / WEIGHTS)
        save_file({k: v for k, v in tensors.items() if not k.endswith(weight)}, folder / WEIGHTS, {"format": "pt"})

    return damage


def written(file, content):
    return lambda folder: (folder / file).write_text(content)


def pickled(folder):
    torch.save(load_file(folder / WEIGHTS), folder / "pytorch_model.bin")
    (folder / WEIGHTS).unlink()


def saved(folder):
    """As this package saves a model."""
    remove("*")(folder)
    make("MaxP").save(folder)


def class_of_tokenizer(name):
    return lambda folder: change(folder / "tokenizer_config.json", tokenizer_class=name)


def more_tokens(folder):
    """The tokenizer has been given a word, but the model no embedding of it."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.add_tokens(["aardvark"])
    tokenizer.save_pretrained(folder)


@pytest.mark.parametrize(
    ("damage", "checkpoint", "message"),
    [
        (remove("*"), {}, "config.json"),
        (lambda folder: BartConfig(vocab_size=100, d_model=16).save_pretrained(folder), {}, r"\(bart\)"),
        (saved, {}, r"MaxP\.load\("),
        *((lambda _: None, {"labels": 3, **kind}, "3 labels") for kind in ({}, {"family": "mpnet", **SIZES})),
        *((remove("*token*"), {"family": family}, "tokenizer") for family in ("bert", "distilbert")),
        (remove(WEIGHTS), {}, "safetensors"),
        (pickled, {}, r"model\.safetensors"),
        (written(WEIGHTS, "version https://git-lfs.github.com/spec/v1"), {}, "git lfs pull"),
        (written("adapter_config.json", '{"base_model_name_or_path": "some/base"}'), {}, "adapter of 'some/base'"),
        *((lose(w), {}, w) for w in ("encoder.layer.1.output.dense.weight", "pooler.dense.weight", "classifier.bias")),
        (lose("embeddings.LayerNorm.bias"), {"labels": None}, "embeddings.LayerNorm.bias"),
        (class_of_tokenizer("RobertaTokenizer"), {"family": "roberta"}, "PreTrainedTokenizerFast"),
        (class_of_tokenizer("XLMRobertaTokenizer"), {"family": "xlm-roberta"}, "PreTrainedTokenizerFast"),
        (more_tokens, {}, "135 tokens, but its model has embeddings of 134"),
    ],
)
def test_folders_without_a_usable_checkpoint_are_refused(damage, checkpoint, message, tmp_path):
    damage(Path(tiny.checkpoint(tmp_path / "folder", **checkpoint)))
    with pytest.raises((ValueError, OSError), match=message):
        load_backbone(str(tmp_path / "folder"))
