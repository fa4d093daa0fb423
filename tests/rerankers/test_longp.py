"""LongP: every architecture scores alike in any batch, saves, learns, and does what its originals do."""

from __future__ import annotations

import copy
import math
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
import torch
import transformers
from packaging.version import Version

import pyterrier_longdoc as ld
from pyterrier_longdoc.common.coverage import Coverage
from pyterrier_longdoc.common.frames import TruncationWarning
from pyterrier_longdoc.modelling.backbones import architectures, load
from pyterrier_longdoc.modelling.backbones.load import build_backbone, load_backbone
from pyterrier_longdoc.training import TrainingArgs, evaluate

from ..support import tiny, tiny_long
from ..training.test_training import toy_task

pytestmark = [
    pytest.mark.filterwarnings("ignore::pyterrier_longdoc.rerankers.base.UntrainedWarning"),
    pytest.mark.filterwarnings("ignore::pyterrier_longdoc.common.frames.TruncationWarning"),
]

KINDS = {
    "longformer": lambda folder: tiny_long.encoder(folder, "longformer"),
    "longformer cross-encoder": lambda folder: tiny_long.encoder(folder, "longformer", labels=1),
    "bigbird": lambda folder: tiny_long.encoder(folder, "big_bird"),
    "bigbird cross-encoder": lambda folder: tiny_long.encoder(folder, "big_bird", labels=1),
    "modernbert": lambda folder: tiny_long.encoder(folder, "modernbert"),
    "modernbert cross-encoder": lambda folder: tiny_long.encoder(folder, "modernbert", labels=1),
    "nomicbert": lambda folder: tiny_long.encoder(folder, "nomic_bert"),
    "nomicbert cross-encoder": lambda folder: tiny_long.encoder(folder, "nomic_bert", labels=1),
    "eurobert": lambda folder: tiny_long.encoder(folder, "eurobert"),
    "eurobert cross-encoder": lambda folder: tiny_long.encoder(folder, "eurobert", labels=1),
    "jina": lambda folder: tiny_long.published(folder, "jina"),
    "jina cross-encoder": lambda folder: tiny_long.published(folder, "jina-code", labels=1),
    "mosaic": lambda folder: tiny_long.published(folder, "mosaic"),
    "llama": lambda folder: tiny_long.decoder(folder, "llama", begin=True),
    "llama cross-encoder": lambda folder: tiny_long.decoder(folder, "llama", labels=1),
    "qwen3": lambda folder: tiny_long.decoder(folder, "qwen3"),
    "qwen3 answers": lambda folder: tiny_long.decoder(folder, "qwen3"),
}
ARGUMENTS = {"qwen3": {"pooling": "last"}, "qwen3 answers": {"answers": ("yes", "no")}}
POOLINGS = {"jina": "mean", "llama": "mean", "llama cross-encoder": "last", "qwen3": "last", "qwen3 answers": "last",
            "eurobert cross-encoder": "late"}  # fmt: skip

if Version(transformers.__version__).major < 5:
    KINDS = {kind: make for kind, make in KINDS.items() if not kind.startswith(("nomicbert", "eurobert"))}


@pytest.fixture(scope="module", params=KINDS)
def kind(request):
    return request.param


@pytest.fixture(scope="module")
def checkpoint(kind, tmp_path_factory):
    return KINDS[kind](tmp_path_factory.mktemp("long"))


def longp(kind, checkpoint, **changes):
    return ld.LongP(checkpoint, **{"max_query_len": 8, "device": "cpu", **ARGUMENTS.get(kind, {}), **changes})


def frame() -> pd.DataFrame:
    """Two queries with texts of 0 to 120 tokens, more than one block or window."""
    rng = np.random.default_rng(0)
    rows = [
        {"qid": qid, "query": query, "docno": f"d{count}", "text": " ".join(rng.choice(tiny.WORDS, count))}
        for qid, query, counts in (("1", "old dog", (0, 2, 30, 32, 70)), ("2", "snow in the city?", (1, 120)))
        for count in counts
    ]
    return pd.DataFrame(rows)


# Every architecture.


def test_scores_depend_on_nothing_but_query_and_text(kind, checkpoint):
    if kind.endswith("cross-encoder") and "modernbert" not in kind:
        pytest.skip("the encoder is that of the plain checkpoint")
    table = ld.check_invariance(longp(kind, checkpoint), frame(), tolerance=5e-5, verbose=False)
    table = table.set_index("check")
    assert table.loc[["repeated", "order", "alone", "padding", "batch size 1", "dtype bfloat16"], "passed"].all(), table
    assert table["passed"].dropna().all(), table
    if kind.startswith(("modernbert", "eurobert", "llama", "qwen3")) and Version(transformers.__version__).major >= 5:
        assert table.loc["attention eager", "passed"]


def test_scores_tell_texts_apart(kind, checkpoint):
    model = longp(kind, checkpoint)
    out = model(frame())
    assert model.load_scorer().encoder.pooling == POOLINGS.get(kind, "cls")
    assert out["score"].nunique() == len(out)
    assert out["score"].std() > 1e-3
    assert model.coverage.documents_cut == 0


def test_save_and_load(kind, checkpoint, tmp_path):
    model = longp(kind, checkpoint)
    expected = model(frame())["score"]
    model.save(tmp_path)
    restored = ld.LongP.load(tmp_path, device="cpu")
    assert repr(restored) == repr(model)
    np.testing.assert_allclose(restored(frame())["score"], expected, atol=1e-5)
    assert restored.load_scorer().layout == model.load_scorer().layout


LEARNERS = {
    "longformer": lambda folder, **sizes: tiny_long.encoder(folder, "longformer", attention_window=[8], **sizes),
    "bigbird": lambda folder, **sizes: tiny_long.encoder(folder, "big_bird", block_size=1, **sizes),
    "modernbert": lambda folder, **sizes: tiny_long.encoder(folder, "modernbert", **sizes),
    "nomicbert": lambda folder, **sizes: tiny_long.encoder(folder, "nomic_bert", **sizes),
    "eurobert": lambda folder, **sizes: tiny_long.encoder(folder, "eurobert", **sizes),
    "jina": lambda folder, **sizes: tiny_long.published(folder, "jina", scale=0.1),
    "mosaic": lambda folder, **sizes: tiny_long.published(folder, "mosaic", scale=0.1),
    "llama": lambda folder, **sizes: tiny_long.decoder(folder, "llama", begin=True, **sizes),
    "qwen3 answers": lambda folder, **sizes: tiny_long.decoder(folder, "qwen3", **sizes),
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", [kind for kind in LEARNERS if kind in KINDS], scope="function")
def test_learns(kind, tmp_path):
    # The large initialization of the other tests learns badly.
    checkpoint = LEARNERS[kind](tmp_path, initializer_range=0.1, num_hidden_layers=1)
    run, judged = toy_task(0, queries=4)
    recipe = TrainingArgs(epochs=25, queries_per_step=4, learning_rates={"": 5e-3}, metric="RR")
    arguments = {"template": "plain"} if kind == "qwen3 answers" else {}
    model = longp(kind, checkpoint, training=recipe, **arguments)
    generator = np.random.get_state()[1].copy()  # noqa: NPY002
    before = evaluate(model(run), judged, "RR")
    model.fit(run, judged)
    losses = model.history["loss"].tolist()
    assert np.mean(losses[-5:]) < 0.5 * np.mean(losses[:3])
    assert evaluate(model(run), judged, "RR") > max(before, 0.8)
    np.testing.assert_array_equal(np.random.get_state()[1], generator)  # noqa: NPY002


def test_texts_longer_than_the_backbone_takes_are_cut(kind, checkpoint, results):
    model = longp(kind, checkpoint)
    results.loc[0, "text"] = "the old dog " * 400
    with pytest.warns(TruncationWarning):
        out = model(results)
    assert np.isfinite(out["score"]).all()
    assert model.coverage.documents_cut == 1
    scorer = model.load_scorer()
    trail = scorer.layout.query_trail_size
    assert scorer.settings.windows.largest == scorer.encoder.longest_input - 8 - scorer.layout.specials - trail


def test_the_firstp_twin_is_one_argument(kind, checkpoint):
    texts = frame()
    whole, twin = longp(kind, checkpoint), longp(kind, checkpoint, max_doc_len=20)
    with pytest.warns(TruncationWarning):
        cut = twin(texts)["score"]
    short = texts["text"].str.split().str.len() <= 2
    np.testing.assert_allclose(cut[short], whole(texts)["score"][short], atol=1e-4)
    assert (np.abs(cut - whole(texts)["score"])[~short] > 1e-4).all()
    assert twin.coverage.tokens_read <= 20 * twin.coverage.documents


# Longformer.


@pytest.fixture(scope="module")
def longformer(tmp_path_factory):
    return tiny_long.encoder(tmp_path_factory.mktemp("longformer"), "longformer", labels=1)


def global_positions(model, query, text, **reading):
    """Tokens of the one input with global attention, by position, and the input's ids."""
    scorer = model.load_scorer()
    seen = {}

    def spy(_, args, kwargs):
        seen.update(kwargs)

    handle = scorer.encoder.backbone.register_forward_pre_hook(spy, with_kwargs=True)
    scorer.score([query], [text])
    handle.remove()
    return seen["global_attention_mask"][0].nonzero().flatten().tolist(), seen["input_ids"][0].tolist()


@pytest.mark.parametrize(("choice", "expected"), [("query", [0, 1, 2, 3, 4]), ("query_only", [1, 2, 3]), ("cls", [0])])
def test_longformer_global_attention(longformer, choice, expected):
    model = ld.LongP(longformer, global_attention=choice, device="cpu")
    positions, ids = global_positions(model, "the old dog", "a red fish " * 30)
    assert positions == expected
    assert (ids[0], ids[4], ids[5]) == (2, 3, 3)  # [CLS], and two separators of which the first counts


def test_longformer_global_attention_of_the_papers_layout(longformer):
    model = ld.LongP(longformer, pad_query=True, max_query_len=6, max_doc_len=40, device="cpu")
    positions, ids = global_positions(model, "the old dog", "a red fish")
    assert positions == [0, 1, 2, 3, 7]
    assert ids[4:8] == [0, 0, 0, 3]


def test_longformer_without_query_attends_from_cls_and_separator(longformer):
    assert global_positions(ld.LongP(longformer, device="cpu"), "", "a red fish")[0] == [0, 1]


def test_longformer_with_cls_alone_is_the_published_classifier(longformer):
    model = transformers.LongformerForSequenceClassification.from_pretrained(longformer).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(longformer)
    texts = frame()[lambda f: f["text"] != ""]  # a tokenizer takes an empty second text for none
    scores = ld.LongP(longformer, global_attention="cls", device="cpu")(texts)["score"]
    with torch.no_grad():
        expected = [model(**tokenizer(q, t, return_tensors="pt")).logits.item() for q, t in pairs(texts)]
    np.testing.assert_allclose(scores, expected, atol=1e-5)
    assert np.abs(ld.LongP(longformer, device="cpu")(texts)["score"] - expected).max() > 1e-3


def pairs(texts):
    return list(texts[["query", "text"]].itertuples(index=False, name=None))


# BigBird.


@pytest.fixture(scope="module")
def bigbird(tmp_path_factory):
    return tiny_long.encoder(tmp_path_factory.mktemp("bigbird"), "big_bird", labels=1)


def test_bigbird_is_the_published_classifier_fresh_for_every_input(bigbird):
    fresh = transformers.BigBirdForSequenceClassification.from_pretrained(bigbird).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(bigbird)
    texts = frame()[lambda f: f["text"] != ""]
    expected = []
    for query, text in pairs(texts):
        with torch.no_grad():
            encoded = tokenizer(query, text, return_tensors="pt")
            expected.append(copy.deepcopy(fresh)(**encoded).logits.item())
    model = ld.LongP(bigbird, device="cpu")
    np.testing.assert_allclose(model(texts)["score"], expected, atol=1e-5)
    long = np.array([len(tokenizer(q, t)["input_ids"]) > (5 + 2) * 4 for q, t in pairs(texts)])
    assert 0 < long.sum() < len(long)
    full = ld.LongP(bigbird, attention_type="original_full", device="cpu")(texts)["score"].to_numpy()
    np.testing.assert_allclose(full[~long], np.array(expected)[~long], atol=1e-5)
    assert (np.abs(full - expected)[long] > 1e-3).all()


def test_bigbird_comes_back_to_block_sparse_attention(bigbird):
    model = ld.LongP(bigbird, device="cpu")
    texts = frame()
    long, short = texts.tail(1), texts.head(1)
    before = model(long)["score"].item()
    model(short)
    assert model.load_scorer().encoder.backbone.attention_type == "original_full"
    assert model(long)["score"].item() == before
    assert model.load_scorer().encoder.backbone.attention_type == "block_sparse"


@pytest.mark.parametrize("positions", [252, 250])
def test_bigbird_whose_positions_are_no_whole_number_of_blocks(positions, tmp_path):
    model = ld.LongP(
        tiny_long.encoder(tmp_path, "big_bird", max_position_embeddings=positions), max_query_len=8, device="cpu"
    )
    texts = frame().assign(query="dog " * 8, text="dog " * 400)
    assert np.isfinite(model(texts)["score"]).all()
    scorer = model.load_scorer()
    assert scorer.settings.windows.largest == positions // 4 * 4 - 8 - scorer.layout.specials
    full = ld.LongP(model.backbone, attention_type="original_full", max_query_len=8, device="cpu").load_scorer()
    assert full.settings.windows.largest == positions - 8 - scorer.layout.specials


def test_bigbird_leaves_the_global_generator_alone(bigbird):
    generator = np.random.get_state()[1].copy()  # noqa: NPY002
    ld.LongP(bigbird, device="cpu")(frame().tail(1))
    np.testing.assert_array_equal(np.random.get_state()[1], generator)  # noqa: NPY002


def test_bigbird_passes_hold_inputs_of_one_number_of_blocks(bigbird):
    model = ld.LongP(bigbird, device="cpu")
    scorer = model.load_scorer()
    shapes = []
    scorer.encoder.backbone.register_forward_pre_hook(
        lambda _, args, kwargs: shapes.append(tuple(kwargs["input_ids"].shape)), with_kwargs=True
    )
    # With [CLS] cat [SEP] ... [SEP] 4 more; up to 28 tokens attention is full.
    scorer.score(["cat"] * 6, ["dog " * n for n in (3, 5, 39, 40, 45, 60)])
    assert sorted(shapes) == [(1, 52), (1, 64), (2, 9), (2, 44)]


# Full attention.


@pytest.mark.skipif("nomicbert" not in KINDS, reason="needs transformers 5")
@pytest.mark.parametrize(
    ("family", "pooling"), [("nomic_bert", None), ("eurobert", "bos"), ("eurobert", "mean"), ("eurobert", "late")]
)
def test_cross_encoders_are_the_published_classifiers(family, pooling, tmp_path):
    folder = tiny_long.encoder(
        tmp_path, family, labels=1, **({} if pooling is None else {"classifier_pooling": pooling})
    )
    model = transformers.AutoModelForSequenceClassification.from_pretrained(folder).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    texts = frame()[lambda f: f["text"] != ""]
    with torch.no_grad():
        expected = [model(**tokenizer(q, t, return_tensors="pt")).logits.item() for q, t in pairs(texts)]
    np.testing.assert_allclose(ld.LongP(folder, device="cpu")(texts)["score"], expected, atol=1e-5)


# Language models.


def test_a_decoder_with_a_head_is_the_published_classifier(tmp_path):
    folder = tiny_long.decoder(tmp_path, "llama", labels=1)
    model = transformers.LlamaForSequenceClassification.from_pretrained(folder).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    template = "question: {query} text: {document}"
    scores = ld.LongP(folder, template=template, max_query_len=40, device="cpu")(frame())["score"]
    with torch.no_grad():
        expected = [
            model(input_ids=torch.tensor([tokenizer(template.format(query=q, document=t))["input_ids"]])).logits.item()
            for q, t in pairs(frame())
            if t
        ]
    np.testing.assert_allclose(scores[frame()["text"] != ""], expected, atol=1e-5)


def test_a_model_that_answers_scores_as_its_model_card_says(tmp_path):
    """As Qwen3-Reranker is used: log-probability of "yes" and "no" after the filled-in template."""
    folder = tiny_long.decoder(tmp_path, "qwen3")
    model = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    yes, no = tokenizer.convert_tokens_to_ids(["yes", "no"])
    reranker = ld.LongP(folder, answers=("yes", "no"), max_query_len=40, device="cpu")
    texts = frame()[lambda f: f["text"].str.len().between(1, 400)]
    scores = reranker(texts)["score"]
    template = load.TEMPLATES["qwen3-reranker"]
    for score, query, text in zip(scores, texts["query"], texts["text"], strict=True):
        ids = tokenizer(template.replace("{query}", query).replace("{document}", text))["input_ids"]
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([ids])).logits[0, -1]
        chance = torch.softmax(logits[[no, yes]], 0)[1].item()
        assert 1 / (1 + math.exp(-score)) == pytest.approx(chance, abs=1e-5)
    assert reranker.load_scorer().layout.query_trail == "\n"


def test_an_answer_must_be_one_token(tmp_path):
    folder = tiny_long.decoder(tmp_path, "qwen3")
    with pytest.raises(ValueError, match=r"answer 'certainly so' is \d+ tokens of this backbone"):
        ld.LongP(folder, answers=("certainly so", "no")).load_scorer()


def test_answers_of_another_family_need_a_template(tmp_path):
    folder = tiny_long.decoder(tmp_path, "llama")
    with pytest.raises(ValueError, match="give template="):
        ld.LongP(folder, answers=("yes", "no")).load_scorer()


@pytest.mark.parametrize(
    "make",
    [
        lambda name, **own: ld.BiEncoder(name, window_size=20, stride=10, **own),
        lambda name, **own: ld.LateIR(
            name, interaction=tiny.aggregator(), aggregator=None, window_size=20, stride=10, **own
        ),
        lambda name, **own: ld.LongP(name, template="{query}{document}", pooling="last", **own),
        lambda name, **own: ld.LongP(name, template="{query}{document}", pooling="mean", **own),
    ],
    ids=["BiEncoder", "LateIR", "last", "mean"],
)
def test_empty_texts_where_there_are_no_special_tokens(make, tmp_path):
    model = make(tiny_long.decoder(tmp_path, "qwen3"), device="cpu")
    texts = pd.concat([frame().assign(query=""), frame()], ignore_index=True)
    assert np.isfinite(model(texts)["score"]).all()
    table = ld.check_invariance(model, texts, tolerance=5e-5, dtypes=(), verbose=False)
    assert table["passed"].dropna().all(), table


@pytest.mark.parametrize("kind", ["jina", "mosaic", "bert"])
def test_answers_are_for_language_models(kind, cross_encoder, tmp_path):
    folder = cross_encoder if kind == "bert" else KINDS[kind](tmp_path)
    with pytest.raises(ValueError, match=r"answers=\('dog', 'cat'\) would have no effect: it is for language models"):
        ld.LongP(folder, answers=("dog", "cat")).load_scorer()


# Templates.


@pytest.mark.parametrize(
    "template",
    [
        "query: {query} document: {document}",
        "{query}\n{document}",
        "<|im_start|>q: {query}\n\nd: {document}<|im_end|>\n",
        "plain",
    ],
)
@pytest.mark.parametrize("query", ["old dog", "snow in the city?", "a"])
def test_template_gives_the_tokens_of_its_filled_in_text(template, query, tmp_path):
    folder = tiny_long.decoder(tmp_path, "qwen3")
    model = ld.LongP(folder, template=template, max_query_len=20, device="cpu")
    scorer = model.load_scorer()
    seen = []
    scorer.encoder.backbone.register_forward_pre_hook(
        lambda _, args, kwargs: seen.append(kwargs["input_ids"][0].tolist()), with_kwargs=True
    )
    scorer.score([query], ["red fish."])
    text = load.TEMPLATES.get(template, template)
    filled = text.replace("{query}", query).replace("{document}", "red fish.")
    assert seen == [scorer.tokenizer(filled)["input_ids"]]


def test_a_query_that_is_cut_keeps_what_follows_it(tmp_path):
    folder = tiny_long.decoder(tmp_path, "qwen3")
    model = ld.LongP(folder, template="{query}\n{document}", max_query_len=2, device="cpu")
    scorer = model.load_scorer()
    coverage = Coverage()
    [ids] = scorer.read_queries(["the old dog in the rain"], coverage)
    first = scorer.tokenizer("the old dog in the rain")["input_ids"][:2]
    assert ids.tolist() == [*first, *scorer.tokenizer("\n")["input_ids"]]
    assert coverage.queries_cut == 1


@pytest.mark.parametrize(
    "make",
    [
        lambda name: ld.LongP(name, pad_query=True),
        lambda name: ld.MaxP(name, window_size=20, stride=10, pad_query=True),
    ],
)
def test_the_papers_layout_has_no_template(make, tmp_path):
    with pytest.raises(ValueError, match="this backbone reads the template 'plain': leave pad_query=False"):
        make(tiny_long.decoder(tmp_path, "qwen3")).load_scorer()


@pytest.mark.parametrize("template", ["{query}", "{document} {query}", "{query} {query} {document}", "none"])
def test_templates_that_lack_something(template):
    with pytest.raises(ValueError, match=r"must hold \{query\} and then \{document\}, once each"):
        ld.LongP(template=template)


# Options.


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"pooling": "max"}, "pooling='max'"),
        ({"global_attention": "all"}, "global_attention='all'"),
        ({"attention_type": "sparse"}, "attention_type='sparse'"),
        ({"answers": "yes"}, "answers='yes' must be two words"),
        ({"answers": (1, 0)}, r"answers=\(1, 0\) must be two words"),
        ({"template": 3}, "template=3 must be a text"),
        ({"answers": ("yes", "no"), "pooling": "mean"}, "pooling='mean' would have no effect with answers"),
        ({"template": "{query} {document}", "pad_query": True}, "pad_query"),
    ],
)
def test_arguments_that_can_never_work(arguments, message):
    with pytest.raises(ValueError, match=message):
        ld.LongP(**arguments)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"global_attention": "cls"}, "it is Longformer's, not bert's"),
        ({"attention_type": "original_full"}, "it is BigBird's, not bert's"),
    ],
)
def test_options_of_another_architecture(arguments, message, cross_encoder):
    with pytest.raises(ValueError, match=message):
        ld.LongP(cross_encoder, **arguments).load_scorer()


def test_attention_that_an_architecture_lacks(longformer):
    with pytest.raises(ValueError, match=r"sdpa|scaled_dot_product_attention"):
        ld.LongP(longformer, attn_implementation="sdpa").load_scorer()
    backbone = load_backbone(longformer)
    with pytest.raises(ValueError, match="'sdpa' is not available for longformer"):
        architectures.use_attention(backbone.model, "sdpa")


def test_a_model_of_another_machine_s_attention(tmp_path):
    """Saved where flash attention is installed, loaded where it is not."""
    model = ld.LongP(tiny_long.decoder(tmp_path / "decoder", "llama"), device="cpu")
    expected = model(frame())["score"]
    model.load_scorer()
    model._loaded.backbone.options = replace(model._loaded.backbone.options, attn_implementation="flash_attention_2")
    model.save(tmp_path / "saved")
    again = ld.LongP.load(tmp_path / "saved", attn_implementation=None, device="cpu")
    np.testing.assert_allclose(again(frame())["score"], expected, atol=1e-5)
    eager = ld.LongP.load(tmp_path / "saved", attn_implementation="eager", device="cpu")
    assert eager.load_scorer().encoder.backbone.config._attn_implementation == "eager"


def test_another_pooling_than_the_head_was_trained_for_starts_untrained(cross_encoder, results):
    model = ld.LongP(cross_encoder, pooling="mean", device="cpu")
    with pytest.warns(ld.UntrainedWarning):
        model(results)
    assert model.load_scorer().encoder.pooling == "mean"


def test_pooling_takes_the_real_tokens(plain_encoder):
    scorer = ld.LongP(plain_encoder, device="cpu").load_scorer()
    states = torch.arange(24.0).view(2, 4, 3)
    mask = torch.tensor([[True, True, False, False], [True, False, True, False]])
    for pooling, expected in {
        "cls": [states[0, 0], states[1, 0]],
        "last": [states[0, 1], states[1, 2]],
        "mean": [states[0, :2].mean(0), states[1, [0, 2]].mean(0)],
    }.items():
        scorer.encoder.pooling = pooling
        assert torch.equal(scorer.encoder._pool(states, mask), torch.stack(expected))


def test_options_do_not_change_trained_weights(cross_encoder, results):
    run, judged = toy_task(0, queries=4)
    model = ld.LongP(cross_encoder, device="cpu").fit(run, judged)
    model.pooling = "mean"
    with pytest.raises(ValueError, match="would lose them"):
        model(results)


# Parameter counts of the published models, with our final layer; poolers are dropped.

CONFIGS = {
    # Boytsov et al. 2025 report 149M, 127M and 1034M, with poolers, which are never used.
    "longformer": (
        "longformer",
        {"max_position_embeddings": 4098, "vocab_size": 50265, "type_vocab_size": 1, "attention_window": [512] * 12,
         "pad_token_id": 1},
        148_659_456 + 769 - 590_592,
    ),
    "bigbird": ("big_bird", {"vocab_size": 50358, "type_vocab_size": 2, "max_position_embeddings": 4096},
                127_468_800 + 769 - 590_592),
    "tinyllama": (
        "llama",
        {"vocab_size": 32000, "hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 22,
         "num_attention_heads": 32, "num_key_value_heads": 4, "max_position_embeddings": 2048},
        1_034_512_384 + 2049,
    ),
    # JINA and MOSAIC: 137M.
    "jina": ("alibi-bert", {"vocab_size": 30528}, 136_777_728 + 769),
    "mosaic": ("alibi-bert", {"vocab_size": 30528}, 136_777_728 + 769),
}  # fmt: skip


@pytest.mark.parametrize("name", CONFIGS)
def test_parameter_counts(name):
    family, sizes, expected = CONFIGS[name]
    with torch.device("meta"):
        tokenizer = tiny_long.byte_tokenizer(begin=True) if family == "llama" else tiny.tokenizer()
        backbone = build_backbone({"config": {"model_type": family, **sizes}, "cross_encoder": False}, tokenizer)
        final = torch.nn.Linear(backbone.hidden_size, 1)
    count = sum(p.numel() for module in (backbone.model, final) for p in module.parameters())
    assert count == expected
