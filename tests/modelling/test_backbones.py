"""Checkpoints taken apart: equal to sentence-transformers, to the papers' parameter counts, and loud when broken."""

import json
import logging
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForSequenceClassification, BertConfig, RobertaConfig, T5Config

import pyterrier_longdoc as ld
from pyterrier_longdoc.modelling.backbones.load import build_backbone, load_backbone
from pyterrier_longdoc.modelling.heads import build_head
from pyterrier_longdoc.modelling.scorer import LongDocScorer
from pyterrier_longdoc.modelling.windows import GreedyChunks, SlidingWindows

from ..support import tiny

FAMILIES = {name: (name, {}) for name in tiny.FAMILIES} | {
    "modernbert-mean": ("modernbert", {"classifier_pooling": "mean"})
}
PAIRS = [
    ("old dog", "the cat and the dog walk to the river. " * 3),
    ("snow in the city", "a red fish"),
    ("a", "tree, mountain! (rain) 1234 unbelievable"),
    ("", "the cat"),
    ("the cat", ""),
]
QUERIES, TEXTS = map(list, zip(*PAIRS, strict=True))


@pytest.fixture(scope="module", params=list(FAMILIES))
def checkpoint(request, tmp_path_factory):
    family, changes = FAMILIES[request.param]
    return tiny.checkpoint(tmp_path_factory.mktemp("checkpoint"), family, **changes)


def logits(folder, queries, texts):
    """What sentence-transformers makes of pairs: `(R, labels)` logits, or `(R,)` of one label."""
    sentence_transformers = pytest.importorskip("sentence_transformers")
    model = sentence_transformers.CrossEncoder(folder, device="cpu")
    pairs = list(zip(queries, texts, strict=True))
    return model.predict(pairs, activation_fn=torch.nn.Identity(), show_progress_bar=False)


def scorer_of(backbone, head="firstp", windows=None, **reading):
    """A head that is warm-started from its backbone, in evaluation mode."""
    scorer = LongDocScorer(
        backbone,
        windows or GreedyChunks(),
        build_head(head, backbone.hidden_size, channels=backbone.channels),
        **reading,
    )
    scorer.warm_start(backbone)
    return scorer.eval()


# The same scores as sentence-transformers.


def test_firstp_scores_as_the_cross_encoder_does(checkpoint):
    scores = scorer_of(load_backbone(checkpoint)).score(QUERIES, TEXTS)
    assert np.abs(scores - logits(checkpoint, QUERIES, TEXTS)).max() < 1e-5
    assert scores.std() > 0.01


def test_maxp_is_the_cross_encoder_on_the_best_window(checkpoint):
    # Whole words that are one token each, so that any slice of the text has the tokens of its window.
    text = " ".join(tiny.WORDS[i * 7 % len(tiny.WORDS)] for i in range(60))
    scorer = scorer_of(load_backbone(checkpoint), "maxp", SlidingWindows(20, 10))
    queries = ["old dog", "snow in the city", "fish"]
    scores, explanations = scorer.explain(queries, [text] * 3)
    for query, score, explanation in zip(queries, scores, explanations, strict=True):
        slices = [text[a:b] for a, b in explanation.spans]
        assert slices == [" ".join(text.split()[i * 10 : i * 10 + 20]) for i in range(5)]
        expected = logits(checkpoint, [query] * 5, slices)
        np.testing.assert_allclose(explanation.scores, expected, atol=1e-5)
        assert explanation.best == expected.argmax()
        assert abs(score - expected.max()) < 1e-5


def test_two_labels_score_their_difference(tmp_path, caplog):
    folder = tiny.checkpoint(tmp_path, labels=2)
    with caplog.at_level(logging.WARNING):
        backbone = load_backbone(folder)
    assert "has two labels: its score is logit[1] - logit[0]" in caplog.text
    both = logits(folder, QUERIES, TEXTS)
    assert both.shape == (5, 2)
    np.testing.assert_allclose(scorer_of(backbone).score(QUERIES, TEXTS), both[:, 1] - both[:, 0], atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("labels", [1, None])
def test_half_precision_checkpoints_are_computed_in_fp32(tmp_path, dtype, labels):
    source = tiny.checkpoint(tmp_path / "fp32", labels=labels)
    rounded = {key: value.to(dtype) for key, value in load_file(f"{source}/model.safetensors").items()}
    folder = shutil.copytree(source, tmp_path / "half")
    save_file(rounded, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "dtype": str(dtype).removeprefix("torch.")}))
    backbone = load_backbone(str(folder))
    scorer = scorer_of(backbone)
    assert {p.dtype for p in scorer.parameters()} == {torch.float32}
    weights = scorer.encoder.backbone.embeddings.word_embeddings.weight
    [stored] = (value for key, value in rounded.items() if key.endswith("word_embeddings.weight"))
    assert torch.equal(weights, stored.float())
    assert build_backbone(backbone.describe(), backbone.tokenizer).model.dtype == torch.float32


# The parts.


def test_parts_of_cross_encoders(checkpoint):
    backbone = load_backbone(checkpoint)
    assert backbone.final.out_features == 1
    assert backbone.representation is not None
    assert backbone.hidden_size == 32
    assert getattr(backbone.model, "pooler", None) is None
    # Nothing of the checkpoint is lost on the way.
    whole = AutoModelForSequenceClassification.from_pretrained(checkpoint)
    parts = [backbone.model, backbone.representation, backbone.final]
    assert sum(count(part) for part in parts) == count(whole)


@pytest.mark.parametrize("family", list(tiny.FAMILIES))
def test_plain_encoders_have_no_pooler_and_a_new_final_layer(family, tmp_path):
    backbone = load_backbone(tiny.checkpoint(tmp_path, family, labels=None))
    assert backbone.representation is None
    assert backbone.final is None
    assert not [name for name, _ in backbone.model.named_parameters() if "pooler" in name]
    scorer = LongDocScorer(backbone, GreedyChunks(), build_head("avgp", 32)).eval()
    before = scorer.head.final.weight.clone()
    assert not scorer.warm_start(backbone)
    assert torch.equal(scorer.head.final.weight, before)
    # The score is that of the raw state of the first token (models.md §0.2).
    inputs = backbone.tokenizer("old dog", "a red fish", return_tensors="pt")
    if backbone.pair_layout().types is None:
        inputs.pop("token_type_ids", None)
    with torch.no_grad():
        expected = scorer.head.final(backbone.model(**inputs).last_hidden_state[:, 0]).item()
    assert scorer.score(["old dog"], ["a red fish"])[0] == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize("labels", [1, 2, None])
def test_descriptions_build_the_same_modules(checkpoint, labels, tmp_path):
    family = json.loads((Path(checkpoint) / "config.json").read_text())["model_type"]
    first = load_backbone(checkpoint if labels == 1 else tiny.checkpoint(tmp_path, family, labels=labels))
    second = build_backbone(json.loads(json.dumps(first.describe())), first.tokenizer)
    assert (second.pooling, second.hidden_size, second.longest_input) == (
        first.pooling,
        first.hidden_size,
        first.longest_input,
    )
    one, other = (scorer_of(backbone) for backbone in (first, second))
    other.load_state_dict(one.state_dict(), strict=True)
    assert np.array_equal(one.score(QUERIES, TEXTS), other.score(QUERIES, TEXTS))


@pytest.mark.parametrize(
    ("family", "expected"),
    [
        ("bert", 128),
        ("electra", 128),
        ("distilbert", 128),
        ("deberta-v2", 128),
        ("modernbert", 128),
        ("roberta", 130 - 0 - 1),  # positions are numbered from pad_token_id + 1
        ("xlm-roberta", 130 - 0 - 1),
    ],
)
def test_longest_input(family, expected, tmp_path):
    backbone = load_backbone(tiny.checkpoint(tmp_path, family))
    assert backbone.longest_input == expected
    # An input of just this length goes through, also in the fixed layout.
    for pad_query in (False, True):
        layout = backbone.pair_layout().fixed(1, None) if pad_query else backbone.pair_layout()
        size = expected - 10 - layout.specials
        scorer = scorer_of(backbone, windows=GreedyChunks(size), max_query_len=10, pad_query=pad_query)
        assert np.isfinite(scorer.score(["the " * 50], ["cat " * 200])).all()
        with pytest.raises(ValueError, match=f"the backbone takes {size} document tokens"):
            scorer.read_with(GreedyChunks(size + 1), max_query_len=10, pad_query=pad_query)


def test_roberta_with_its_own_padding_id():
    config = RobertaConfig(vocab_size=200, architectures=["RobertaForSequenceClassification"], num_labels=1)
    description = {"config": {**config.to_dict(), "max_position_embeddings": 514}, "cross_encoder": True}
    with torch.device("meta"):
        backbone = build_backbone(description, tiny.tokenizer(double_separator=True, segments=False))
    assert backbone.longest_input == 514 - 1 - 1
    assert backbone.pair_layout().position_offset == 1 + 1


# Parameter counts (models.md §11).

LAYER = 7_087_872  # 4 (768² + 768) + 2 * 768 * 3072 + 3072 + 768 + 2 * 2 * 768
BERT = 108_891_648  # BERT base without pooler
POOLER = 768 * 768 + 768  # the representation step of a BERT cross-encoder
HEAD = 768 + 1
AGGREGATOR = 2 * LAYER + 2 * 768 + HEAD  # RAND-L2: layers, c and s, final layer
POSITIONS = (512 + 2) * 768 + 2 * 768  # positions, segments, layer norm; no word embeddings (23.4M in the papers)

CHANNELS = 12 + 1  # layers and embeddings
PACRR = sum(32 * (CHANNELS * n * n + 1) for n in (1, 2, 3)) + 32 * (32 * 3 * 2 + 768 + 1) + 32 * (32 + 1) + 32 + 1
DRMM = 5 * (11 * CHANNELS + 768 + 1) + 5 + 1
MODEL1 = (
    2 * (2 * 768)  # layer norms of query and document
    + 2 * (768 * 64 + 64)  # their projections to 64
    + (3 * 64 * 64 + 64)  # F1 of query, document and product
    + (64 * 32 + 32)  # F2
    + (32 + 1)  # F3
)

COUNTS = {
    ("cedr-knrm", ()): 11 * 2 + 11 * CHANNELS + 768 + 1,
    ("cedr-pacrr", ()): PACRR,
    ("cedr-drmm", ()): DRMM,
    ("model1", ()): MODEL1,
    ("firstp", ()): HEAD,
    ("maxp", ()): HEAD,
    ("sump", ()): HEAD,
    ("avgp", ()): HEAD,
    ("kmaxp", ()): HEAD,
    ("parade-avg", ()): HEAD,
    ("parade-max", ()): HEAD,
    ("parade-attn", ()): 768 + HEAD,
    ("parade-attn-elementwise", ()): 768 * 768 + 768 + HEAD,
    ("parade-transformer", ()): AGGREGATOR + POSITIONS,
    ("parade-transformer", (("positions", False),)): AGGREGATOR,
    ("parade-transformer", (("separators", False),)): AGGREGATOR + POSITIONS - 768,
    ("parade-transformer", (("layers", 3), ("separators", False), ("positions", False))): AGGREGATOR + LAYER - 768,
}
PUBLISHED = {
    "firstp": 109_483_009,
    "maxp": 109_483_009,
    "sump": 109_483_009,
    "avgp": 109_483_009,
    "parade-avg": 109_483_009,
    "parade-max": 109_483_009,
    "parade-attn": 109_483_777,
    "parade-attn-elementwise": 110_073_601,
    "cedr-knrm": 109_483_174,
    "cedr-drmm": 109_486_806,
    "cedr-pacrr": 109_520_001,
}


def count(module):
    return sum(p.numel() for p in module.parameters())


def head_of(backbone, name, **options):
    return build_head(name, backbone.hidden_size, channels=backbone.channels, **options)


def scorer_on_meta(head, options=(), *, classifier=True, **sizes):
    """A model of real size without its memory."""
    config = BertConfig(num_labels=1, architectures=["BertForSequenceClassification"] if classifier else ["BertModel"])
    description = {"config": {**config.to_dict(), **sizes}, "cross_encoder": classifier}
    with torch.device("meta"):
        backbone = build_backbone(description, tiny.tokenizer())
        return LongDocScorer(backbone, SlidingWindows(), head_of(backbone, head, **dict(options)))


@pytest.mark.parametrize(("head", "options"), list(COUNTS))
def test_parameters_on_a_cross_encoder(head, options):
    parameters = count(scorer_on_meta(head, options))
    assert parameters == BERT + POOLER + COUNTS[head, options]
    if not options and head in PUBLISHED:
        assert parameters == PUBLISHED[head]


@pytest.mark.parametrize(("head", "options"), list(COUNTS))
def test_parameters_on_a_plain_encoder(head, options):
    # The papers' counts include BERT's pooler, which no model uses: 590,592 fewer here.
    parameters = count(scorer_on_meta(head, options, classifier=False))
    assert parameters == BERT + COUNTS[head, options]
    if not options and head in PUBLISHED:
        assert parameters == PUBLISHED[head] - 590_592


def test_parameters_of_the_papers_transformer():
    # Boytsov et al. 2025 count 148,088,065: a full BertModel as aggregator, with word embeddings and pooler unused.
    unused = 30_522 * 768 + POOLER
    assert count(scorer_on_meta("parade-transformer")) == 148_088_065 - unused


@pytest.mark.parametrize(("layers", "published"), [(2, 15_615_360), (4, 19_164_288), (6, 22_713_216)])
def test_parameters_of_minilm(layers, published):
    sizes = {
        "hidden_size": 384,
        "num_hidden_layers": layers,
        "num_attention_heads": 12,
        "intermediate_size": 1536,
    }
    pooler = 384 * 384 + 384
    assert count(scorer_on_meta("maxp", **sizes)) == published + 384 + 1
    assert count(scorer_on_meta("maxp", classifier=False, **sizes)) == published - pooler + 384 + 1


# Folders that cannot be used.


def test_too_many_labels(tmp_path):
    with pytest.raises(ValueError, match=r"classifier with 3 labels; a cross-encoder for ranking has one .* or two"):
        load_backbone(tiny.checkpoint(tmp_path, labels=3))


def test_a_folder_without_a_config(tmp_path):
    with pytest.raises(ValueError, match=r"is no checkpoint: it has no config\.json"):
        load_backbone(str(tmp_path))


def test_a_folder_of_this_package(tmp_path, cross_encoder):
    model = ld.MaxP(cross_encoder, window_size=20, stride=10, max_query_len=8)
    model.save(str(tmp_path / "saved"))
    with pytest.raises(ValueError, match=r"holds a model saved by this package: restore it with its class's load\("):
        load_backbone(str(tmp_path / "saved"))


def test_an_encoder_decoder(tmp_path):
    T5Config(vocab_size=100, d_model=16, num_layers=1).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"\(t5\) is an encoder-decoder; an encoder is needed"):
        load_backbone(str(tmp_path))


def lose(folder, weight):
    """Takes a weight out of a checkpoint."""
    path = Path(folder) / "model.safetensors"
    tensors = load_file(path)
    kept = {key: value for key, value in tensors.items() if not key.endswith(weight)}
    assert len(kept) == len(tensors) - 1
    save_file(kept, path, metadata={"format": "pt"})
    return str(folder)


@pytest.mark.parametrize(
    ("labels", "weight"),
    [
        (1, "encoder.layer.1.output.dense.weight"),
        (1, "pooler.dense.weight"),
        (1, "classifier.bias"),
        (None, "encoder.layer.1.output.dense.weight"),
        (None, "embeddings.LayerNorm.bias"),
    ],
)
def test_missing_weights(tmp_path, labels, weight):
    folder = lose(tiny.checkpoint(tmp_path, labels=labels), weight)
    with pytest.raises(ValueError, match=rf"lacks 1 weights, among them \['.*{weight}'\]"):
        load_backbone(folder)


def test_a_plain_encoder_does_not_need_its_pooler(tmp_path):
    folder = lose(tiny.checkpoint(tmp_path, labels=None), "pooler.dense.weight")
    assert load_backbone(folder).model.pooler is None


def test_no_weights(tmp_path):
    folder = tiny.checkpoint(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(OSError, match=r"model\.safetensors"):
        load_backbone(folder)


def test_loading_is_quiet_and_leaves_the_settings_as_they_were(plain_encoder, capfd):
    from transformers.utils import logging as transformers_logging

    before = transformers_logging.get_verbosity(), transformers_logging.is_progress_bar_enabled()
    load_backbone(plain_encoder)
    assert (transformers_logging.get_verbosity(), transformers_logging.is_progress_bar_enabled()) == before
    assert capfd.readouterr() == ("", "")
