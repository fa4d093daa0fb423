"""What each class is: windows and heads, arguments that it refuses, LongP's architectures, numbers of parameters."""

from __future__ import annotations

import copy
import math
from dataclasses import replace

import numpy as np
import pandas as pd
import pyterrier as pt
import pytest
import torch
import transformers
from packaging.version import Version
from transformers import BertConfig

import pyterrier_longdoc as ld
from pyterrier_longdoc.common.arguments import arguments_of
from pyterrier_longdoc.modelling.apart import LateInteractionEncoder, build_late_backbone
from pyterrier_longdoc.modelling.backbones import templates
from pyterrier_longdoc.modelling.backbones.load import build_backbone
from pyterrier_longdoc.modelling.encoder import WindowEncoder
from pyterrier_longdoc.modelling.heads import build_head
from pyterrier_longdoc.training import TrainingArgs, evaluate

from ..support import tiny, tiny_long
from ..support.scorers import Passes
from ..support.systems import QUIET, SMALL, make, scores, slow_but
from ..support.tiny_long import LONG
from ..support.toy import toy_task

pytestmark = QUIET


# Windows and heads.


def test_birch_mixes_in_the_first_stage(results):
    sizes = {"window_size": 150, "stride": 100}
    neural = scores(make("KMaxP", windows=ld.SentenceWindows(max_sentences=1), **sizes), results)
    first_stage = results["score"].to_numpy()
    for a in (0.0, 0.3, 1.0):
        birch = make("Birch", first_stage_weight=a)
        np.testing.assert_allclose(scores(birch, results), a * first_stage + (1 - a) * neural, atol=1e-6)
    for scores_of, told in (
        ([1.0, None, 1.0, 1.0, 1.0], "nan in row 1"),
        (["1", "2", "3", "high", "5"], "'high' in row 3"),
    ):
        with pytest.raises(ValueError, match=f"'score' holds {told} .*Birch mixes in the first stage's score"):
            birch(results.assign(score=scores_of))
    written = birch(results.assign(score=results["score"].map(str)))  # numbers, as a file without types has them
    np.testing.assert_array_equal(written["score"], birch(results)["score"])


def test_a_sum_with_the_first_stage(results):
    first, model = pt.Transformer.from_df(results), make("MaxP", preselect=ld.BM25Windows(2), explain=True)
    topics = results[["qid", "query"]].drop_duplicates()
    neural = model(results)
    for pipeline, weight in ((first + (first >> model), 1.0), (2.5 * first + (first >> model), 2.5)):
        both = pipeline(topics)
        assert set(both.columns) == set(neural.columns)
        assert len(both) == len(results)
        merged = both.merge(neural, on=["qid", "docno"], suffixes=("", "_neural"))
        first_stage = merged.merge(results, on=["qid", "docno"], suffixes=("", "_first"))["score_first"]
        np.testing.assert_allclose(merged["score"], weight * first_stage + merged["score_neural"], atol=1e-6)
        assert merged["window_scores"].tolist() == merged["window_scores_neural"].tolist()
        assert merged["best_start"].dtype == "int64"


@pytest.mark.parametrize("name", ["FirstP", "BiEncoder-first"])
def test_first_window_of_any_windows(name, results):
    beginnings = results.assign(text=[" ".join(text.split()[:7]) for text in results["text"].fillna("")])
    model = make(name, windows=ld.SlidingWords(7, 3), window_size=None)
    np.testing.assert_allclose(scores(model, results), scores(make(name), beginnings), rtol=1e-5)
    assert model.coverage.windows == model.coverage.documents
    assert model.coverage.documents_cut == 2  # one text, for two queries
    assert model.coverage.tokens_read < model.coverage.tokens


TRANSFORMER = {"aggregation": "transformer"}


@pytest.mark.parametrize(
    ("cls", "arguments", "message"),
    [
        (ld.PARADE, {"aggregation": "mean"}, "aggregation='mean' is unknown; choose one of avg, max, attn, transform"),
        (ld.PARADE, {"attention": "scalar"}, "attention='scalar' is unknown; choose one of vector, elementwise"),
        (ld.PARADE, {"aggregation": "avg", "layers": 3}, "layers would have no effect with aggregation='avg'"),
        (ld.PARADE, {"aggregation": "max", "attention": "elementwise"}, "attention would have no effect"),
        (ld.PARADE, {"aggregator": "a/b"}, "aggregator would have no effect with aggregation='attn'"),
        (ld.PARADE, {"query_states": True}, "query_states would have no effect with aggregation='attn'"),
        (ld.PARADE, {**TRANSFORMER, "separate_query_projection": True}, "only with query_states=True"),
        (ld.PARADE, {**TRANSFORMER, "aggregator": "a/b", "layers": 3}, "layers would have no effect.*starts at random"),
        (ld.PARADE, {**TRANSFORMER, "special_vectors": "zero"}, "special_vectors='zero' is unknown; choose one of wor"),
        (ld.PARADE, {**TRANSFORMER, "layers": 0}, "layers=0 must be at least 1"),
        (ld.CEDR, {"aggregation": "max"}, "aggregation='max' is unknown; choose one of knrm, pacrr, drmm"),
        (ld.MaxP, {"window_size": 100, "stride": 101}, "stride=101 is larger than the window size 100"),
        (ld.MaxP, {"window_size": 0}, "window_size=0 must be at least 1"),
        (ld.MaxP, {"stride": 0}, "stride=0 must be at least 1"),
        (ld.FirstP, {"window_size": 0.5}, "window_size=0.5 must be a whole number"),
        (ld.MaxP, {"window_size": 40.0}, "size=40.0 must be a whole number"),
        (ld.MaxP, {"window_size": None}, "size=None must be a whole number"),
        (ld.MaxP, {"stride": None}, "stride=None must be a whole number"),
        (ld.MaxP, {"windows": ld.SlidingWords(), "max_windows": 4}, "max_windows would have no effect next to windows"),
        (ld.MaxP, {"windows": ld.SlidingWords(), "selection": "first_last_random"}, "selection would have no effect"),
        (ld.MaxP, {"windows": ld.SlidingWords(), "window_size": 40, "stride": 30}, "window_size and stride would have"),
        (ld.BiEncoder, {"windows": ld.SlidingWords(), "window_size": 40}, "window_size would have no effect"),
        (ld.MaxP, {"training": {}}, "training={} must be TrainingArgs"),
        (ld.KMaxP, {"k": 0}, "k=0 must be at least 1"),
        (ld.KMaxP, {"k": None}, "k=None must be a whole number"),
        (ld.KMaxP, {"k": "3"}, "k='3' must be a whole number"),
        (ld.KMaxP, {"k": 2, "weights": [1.0]}, "must have k=2 entries"),
        (ld.KMaxP, {"k": 2, "weights": 1.0}, "weights=1.0 must have k=2 entries"),
        (ld.KMaxP, {"k": 2, "weights": [1.0, float("nan")]}, "must be finite"),
        (ld.Birch, {"first_stage_weight": None}, "first_stage_weight=None must be between 0 and 1"),
        (ld.Birch, {"first_stage_weight": 1.5}, "between 0 and 1"),
        (ld.Birch, {"window_size": 20}, "Birch reads sentences"),
        (ld.BiEncoder, {"aggregation": "attn"}, "aggregation='attn' is unknown; choose one of first, max, avg"),
        (ld.BiEncoder, {"pooling": "max"}, "pooling='max' is unknown; choose one of mean, cls"),
        (ld.BiEncoder, {"similarity": "l2"}, "similarity='l2' is unknown; choose one of cosine, dot"),
        (ld.LongP, {"pooling": "max"}, "pooling='max'"),
        (ld.MaxP, {"pooling": "max"}, "pooling='max' is unknown; choose one of cls, mean, last"),
        (ld.LateIR, {"pooling": "cls"}, "pooling would have no effect: LateIR looks at the states of all tokens"),
        (ld.MORESPlus, {"pooling": "cls"}, "pooling would have no effect: MORESPlus looks at the states of all tokens"),
        (ld.NeuralModel1, {"pooling": "cls"}, "pooling would have no effect: NeuralModel1 looks at the states of all"),
        (ld.LongP, {"global_attention": "all"}, "global_attention='all'"),
        (ld.LongP, {"attention_window": 7}, "attention_window=7 must be even"),
        (ld.LongP, {"attention_type": "sparse"}, "attention_type='sparse'"),
        (ld.MaxP, {"template": 3}, r"template=3 must be ld.Template\(...\), a text with {query} and {text}, or one of"),
        (ld.MaxP, {"template": "{query} {text}", "layout": "padded"}, "layout='padded' is for"),
        (ld.LateIR, {"template": "plain"}, "template would have no effect: LateIR reads query and text apart"),
        (ld.MORESPlus, {"template": "plain"}, "template would have no effect: MORESPlus reads query and text apart"),
        *(
            (ld.LongP, {"template": template}, r"must hold \{query\} and then \{text\}, once each")
            for template in ("{query}", "{text} {query}", "{query} {query} {text}", "none")
        ),
    ],
)
def test_wrong_arguments(cls, arguments, message):
    with pytest.raises(ValueError, match=message):
        cls("any/model", **arguments)


# LongP over every architecture.


@pytest.fixture(scope="module", params=slow_but(("longformer", "bigbird", "qwen3 answers"), LONG))
def kind(request):
    return request.param


@pytest.fixture(scope="module")
def checkpoint(kind, tmp_path_factory):
    return tiny_long.make(kind, tmp_path_factory.mktemp("long"))


def longp(kind, checkpoint, **changes):
    own = {
        "qwen3": {"pooling": "last"},
        "qwen3 answers": {"template": "qwen3-reranker"},
        "llama cross-encoder": {"template": "plain"},
    }.get(kind, {})
    return ld.LongP(checkpoint, **{**SMALL, "device": "cpu", **own, **changes})


TEXTS = tiny_long.texts()
FULL = TEXTS[TEXTS["text"] != ""]  # a tokenizer takes an empty second text for none
PAIRS = list(FULL[["query", "text"]].itertuples(index=False, name=None))


@pytest.mark.slow
def test_scores_depend_on_nothing_but_query_and_text(kind, checkpoint):
    if kind.endswith("cross-encoder") and "modernbert" not in kind:
        pytest.skip("the encoder is that of the plain checkpoint")
    table = ld.check_invariance(longp(kind, checkpoint), TEXTS, tolerance=5e-5, verbose=False)
    table = table.set_index("check")
    assert table.loc[["repeated", "order", "alone", "padding", "batch size 1", "dtype bfloat16"], "passed"].all(), table
    assert table["passed"].dropna().all(), table
    if kind.startswith(("modernbert", "eurobert", "llama", "qwen3")) and Version(transformers.__version__).major >= 5:
        assert table.loc["attention eager", "passed"]


def test_saved_and_loaded_it_tells_texts_apart(kind, checkpoint, tmp_path):
    model = longp(kind, checkpoint)
    expected = scores(model, TEXTS)
    assert model.load_scorer().encoder.pooling == tiny_long.POOLINGS.get(kind, "cls")
    assert len(set(expected)) == len(expected)
    assert expected.std() > 1e-3
    assert model.coverage.documents_cut == 0
    model.save(tmp_path)
    restored = ld.LongP.load(tmp_path, device="cpu")
    assert arguments_of(restored) == arguments_of(model)
    np.testing.assert_allclose(scores(restored, TEXTS), expected, atol=1e-5)
    assert restored.load_scorer().layout == model.load_scorer().layout


def test_texts_longer_than_the_backbone_takes_are_cut(kind, checkpoint, results):
    model = longp(kind, checkpoint)
    results.loc[0, "text"] = "the old dog " * 400
    with pytest.warns(ld.TruncationWarning):
        assert np.isfinite(scores(model, results)).all()
    assert model.coverage.documents_cut == 1
    scorer = model.load_scorer()
    trail = scorer.layout.query_trail_size
    assert scorer.settings.windows.largest == scorer.encoder.longest_input - 8 - scorer.layout.specials - trail


def test_the_firstp_twin_is_one_argument(kind, checkpoint):
    twin, whole = longp(kind, checkpoint, max_doc_len=20), scores(longp(kind, checkpoint), TEXTS)
    with pytest.warns(ld.TruncationWarning):
        cut = scores(twin, TEXTS)
    short = TEXTS["text"].str.split().str.len() <= 2
    np.testing.assert_allclose(cut[short], whole[short], atol=1e-4)
    assert (np.abs(cut - whole)[~short] > 1e-4).all()
    assert twin.coverage.tokens_read <= 20 * twin.coverage.documents


@pytest.mark.slow
@pytest.mark.parametrize("kind", [kind for kind in tiny_long.LEARNING if kind in LONG], scope="function")
def test_learns(kind, tmp_path):
    run, judged = toy_task(0, queries=4)
    checkpoint = tiny_long.make(kind, tmp_path, **tiny_long.LEARNING[kind])
    recipe = TrainingArgs(epochs=25, queries_per_step=4, learning_rates={"": 5e-3}, metric="RR")
    short = templates.Template.of("{query}\n{text}", answers=("yes", "no"))
    arguments = {"template": short} if kind == "qwen3 answers" else {}
    model = longp(kind, checkpoint, training=recipe, **arguments)
    generator = np.random.get_state()[1].copy()  # noqa: NPY002
    before = evaluate(model(run), judged, "RR")
    model.fit(run, judged)
    losses = model.history["loss"].tolist()
    assert np.mean(losses[-5:]) < 0.75 * np.mean(losses[:3])
    assert evaluate(model(run), judged, "RR") > max(before, 0.8)
    np.testing.assert_array_equal(np.random.get_state()[1], generator)  # noqa: NPY002


# As the published classifiers.


def logits_of(model, inputs) -> list[float]:
    with torch.no_grad():
        return [copy.deepcopy(model)(**each).logits.item() for each in inputs]


@pytest.mark.parametrize(
    ("family", "pooling"),
    [
        ("longformer", None),
        pytest.param("nomic_bert", None, marks=pytest.mark.slow),
        *(pytest.param("eurobert", pooling, marks=pytest.mark.slow) for pooling in ("bos", "mean", "late")),
    ],
)
def test_cross_encoders_are_the_published_classifiers(family, pooling, tmp_path):
    options = {} if pooling is None else {"classifier_pooling": pooling}
    folder = tiny_long.encoder(tmp_path, family, labels=1, **options)
    model = transformers.AutoModelForSequenceClassification.from_pretrained(folder).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    expected = logits_of(model, [tokenizer(q, t, return_tensors="pt") for q, t in PAIRS])
    cls_alone = {"global_attention": "cls"} if family == "longformer" else {}
    np.testing.assert_allclose(scores(ld.LongP(folder, device="cpu", **cls_alone), FULL), expected, atol=1e-5)
    if family == "longformer":
        assert np.abs(scores(ld.LongP(folder, device="cpu"), FULL) - expected).max() > 1e-3


def test_a_decoder_with_a_head_is_the_published_classifier(tmp_path):
    folder = tiny_long.decoder(tmp_path, "llama", labels=1)
    model = transformers.LlamaForSequenceClassification.from_pretrained(folder).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    template = "question: {query} text: {text}"
    found = scores(ld.LongP(folder, template=template, max_query_len=40, device="cpu"), FULL)
    filled = [tokenizer(template.format(query=q, text=t))["input_ids"] for q, t in PAIRS]
    np.testing.assert_allclose(found, logits_of(model, [{"input_ids": torch.tensor([i])} for i in filled]), atol=1e-5)


def test_a_model_that_answers_scores_as_its_model_card_says(tmp_path):
    """As Qwen3-Reranker is used: log-probability of "yes" and "no" after the filled-in template."""
    folder = tiny_long.decoder(tmp_path, "qwen3")
    model = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    yes, no = tokenizer.convert_tokens_to_ids(["yes", "no"])
    reranker = ld.LongP(folder, template="qwen3-reranker", max_query_len=40, device="cpu")
    texts = TEXTS[TEXTS["text"].str.len().between(1, 400)]
    template = templates.TEMPLATES["qwen3-reranker"]
    for score, query, text in zip(scores(reranker, texts), texts["query"], texts["text"], strict=True):
        ids = tokenizer(template.fill(query, text))["input_ids"]
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([ids])).logits[0, -1]
        chance = torch.softmax(logits[[no, yes]], 0)[1].item()
        assert 1 / (1 + math.exp(-score)) == pytest.approx(chance, abs=1e-5)
    assert reranker.load_scorer().layout.query_trail == "\n"


# Longformer and BigBird.


@pytest.fixture(scope="module")
def longformer(tmp_path_factory):
    return tiny_long.encoder(tmp_path_factory.mktemp("longformer"), "longformer", labels=1)


def global_positions(model, query, text):
    """Tokens of the one input with global attention, by position, and the input's ids."""
    scorer = model.load_scorer()
    passes = Passes(scorer)
    scorer.score([query], [text])
    [inputs] = passes.inputs
    return inputs["global_attention_mask"][0].nonzero().flatten().tolist(), inputs["input_ids"][0].tolist()


@pytest.mark.parametrize(("choice", "expected"), [("query", [0, 1, 2, 3, 4]), ("query_only", [1, 2, 3]), ("cls", [0])])
def test_longformer_global_attention(longformer, choice, expected):
    model = ld.LongP(longformer, global_attention=choice, device="cpu")
    positions, ids = global_positions(model, "the old dog", "a red fish " * 30)
    assert positions == expected
    assert (ids[0], ids[4], ids[5]) == (2, 3, 3)  # [CLS], and two separators of which the first counts


# QDS-Transformer.

SENTENCES = "a red fish. the old tree in rain and snow! the dog"


def test_sentences_have_marks_that_all_tokens_see(longformer):
    model = ld.LongP(longformer, global_attention="sentences", max_query_len=8, device="cpu")
    positions, ids = global_positions(model, "the old dog", SENTENCES)
    tokenizer = model.load_scorer().tokenizer
    shown = [tokenizer.decode([token]) for token in ids[: ids.index(0)]]
    marked = "[CLS] a red fish . [CLS] the old tree in rain and snow ! [CLS] the dog [SEP]".split()  # noqa: SIM905
    assert shown == ["[CLS]", "the", "old", "dog", "[SEP]", "[SEP]", *marked]
    assert positions == [0, 1, 2, 3, 4, *(i for i, token in enumerate(shown) if token == "[CLS]" and i)]


def test_marks_of_sentences_count_as_tokens(longformer):
    frame = tiny.frame(["the old dog"], [SENTENCES, ""])
    plain = ld.LongP(longformer, max_query_len=8, explain=True, device="cpu")
    model = ld.LongP(longformer, global_attention="sentences", max_query_len=8, explain=True, device="cpu")
    spans = [out["window_spans"].tolist() for out in (plain(frame), model(frame))]
    assert spans[0] == spans[1] == [[(0, len(SENTENCES))], [(0, 0)]]
    assert model.coverage.tokens == model.coverage.tokens_read == plain.coverage.tokens + 3
    cut = ld.LongP(longformer, global_attention="sentences", max_query_len=8, max_doc_len=8, explain=True, device="cpu")
    with pytest.warns(ld.TruncationWarning, match="9 of 17 tokens"):
        [start, end] = cut(frame).iloc[0]["window_spans"][0]
    assert SENTENCES[start:end] == "a red fish. the old"  # six words and full stops, two marks
    assert (cut.coverage.tokens_read, cut.coverage.tokens_beyond) == (8, 9)
    assert cut.summary(frame).coverage == cut.coverage


def test_chosen_sentences_bring_their_marks(longformer):
    blocks = ld.KeyBlocks(ld.BM25Windows(2), ld.SentenceWindows(max_tokens=20, max_sentences=1))
    model = ld.LongP(longformer, global_attention="sentences", preselect=blocks, max_query_len=8, device="cpu")
    _, ids = global_positions(model, "red dog", SENTENCES)
    shown = model.load_scorer().tokenizer.decode(ids[: ids.index(0)])
    assert shown == "[CLS] red dog [SEP] [SEP] [CLS] a red fish . [CLS] the dog [SEP]"


def test_sentence_marks_are_saved_and_depend_on_no_batch(longformer, tmp_path):
    arguments = {"global_attention": "sentences", "attention_window": 8, "max_query_len": 8, "device": "cpu"}
    model = ld.LongP(longformer, **arguments)
    table = ld.check_invariance(model, tiny.longer_results(), dtypes=(), verbose=False)
    assert table["passed"].dropna().all()
    model.save(tmp_path)
    again = ld.LongP.load(tmp_path, device="cpu")
    assert (again.global_attention, again.attention_window) == ("sentences", 8)
    assert again.load_scorer().encoder.backbone.config.attention_window == [8, 8]
    expected = scores(model, tiny.longer_results())
    np.testing.assert_allclose(scores(again, tiny.longer_results()), expected, rtol=1e-5)
    for other in ({"global_attention": "query"}, {"attention_window": None}):
        assert not np.allclose(scores(ld.LongP(longformer, **{**arguments, **other}), tiny.longer_results()), expected)


def test_longformer_global_attention_of_other_layouts(longformer):
    model = ld.LongP(longformer, layout="padded", max_query_len=6, max_doc_len=40, device="cpu")
    positions, ids = global_positions(model, "the old dog", "a red fish")
    assert positions == [0, 1, 2, 3, 7]
    assert ids[4:8] == [0, 0, 0, 3]
    # Without a query [CLS] and the separator attend.
    assert global_positions(ld.LongP(longformer, device="cpu"), "", "a red fish")[0] == [0, 1]


@pytest.fixture(scope="module")
def bigbird(tmp_path_factory):
    return tiny_long.encoder(tmp_path_factory.mktemp("bigbird"), "big_bird", labels=1)


def test_bigbird_is_the_published_classifier_fresh_for_every_input(bigbird):
    fresh = transformers.BigBirdForSequenceClassification.from_pretrained(bigbird).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(bigbird)
    inputs = [tokenizer(q, t, return_tensors="pt") for q, t in PAIRS]
    expected, generator = np.array(logits_of(fresh, inputs)), np.random.get_state()[1].copy()  # noqa: NPY002
    np.testing.assert_allclose(scores(ld.LongP(bigbird, device="cpu"), FULL), expected, atol=1e-5)
    np.testing.assert_array_equal(np.random.get_state()[1], generator)  # noqa: NPY002
    long = np.array([each["input_ids"].numel() > (5 + 2) * 4 for each in inputs])
    assert 0 < long.sum() < len(long)
    full = scores(ld.LongP(bigbird, attention_type="original_full", device="cpu"), FULL)
    np.testing.assert_allclose(full[~long], expected[~long], atol=1e-5)
    assert (np.abs(full - expected)[long] > 1e-3).all()


def test_bigbird_comes_back_to_block_sparse_attention(bigbird):
    model = ld.LongP(bigbird, device="cpu")
    before = scores(model, TEXTS.tail(1))
    model(TEXTS.head(1))
    assert model.load_scorer().encoder.backbone.attention_type == "original_full"
    assert scores(model, TEXTS.tail(1)) == before
    assert model.load_scorer().encoder.backbone.attention_type == "block_sparse"


@pytest.mark.parametrize("positions", [252, 250])
def test_bigbird_whose_positions_are_no_whole_number_of_blocks(positions, tmp_path):
    folder = tiny_long.encoder(tmp_path, "big_bird", max_position_embeddings=positions)
    model = ld.LongP(folder, max_query_len=8, device="cpu")
    assert np.isfinite(scores(model, TEXTS.assign(query="dog " * 8, text="dog " * 400))).all()
    scorer = model.load_scorer()
    assert scorer.settings.windows.largest == positions // 4 * 4 - 8 - scorer.layout.specials
    full = ld.LongP(folder, attention_type="original_full", max_query_len=8, device="cpu").load_scorer()
    assert full.settings.windows.largest == positions - 8 - scorer.layout.specials


def test_bigbird_passes_hold_inputs_of_one_number_of_blocks(bigbird):
    scorer = ld.LongP(bigbird, device="cpu").load_scorer()
    passes = Passes(scorer)
    # With [CLS] cat [SEP] ... [SEP] 4 more; up to 28 tokens attention is full.
    scorer.score(["cat"] * 6, ["dog " * n for n in (3, 5, 39, 40, 45, 60)])
    assert sorted(passes.shapes) == [(1, 52), (1, 64), (2, 9), (2, 44)]


# Templates and language models.


@pytest.mark.parametrize(
    "template",
    [
        "query: {query} document: {text}",
        "{query}\n{text}",
        "<|im_start|>q: {query}\n\nd: {text}<|im_end|>\n",
        "plain",
    ],
)
def test_template_gives_the_tokens_of_its_filled_in_text(template, tmp_path):
    model = ld.LongP(tiny_long.decoder(tmp_path, "qwen3"), template=template, max_query_len=20, device="cpu")
    scorer = model.load_scorer()
    passes = Passes(scorer)
    for query in ("old dog", "snow in the city?", "a"):
        scorer.score([query], ["red fish."])
        filled = templates.resolve_template(template).fill(query, "red fish.")
        assert passes.inputs[-1]["input_ids"].tolist() == [scorer.tokenizer(filled)["input_ids"]]


def test_a_query_that_is_cut_keeps_what_follows_it(tmp_path):
    folder = tiny_long.decoder(tmp_path, "qwen3")
    scorer = ld.LongP(folder, template="{query}\n{text}", max_query_len=2, device="cpu").load_scorer()
    census = scorer.census()
    [ids] = scorer.read_queries(["the old dog in the rain"], census)
    first = scorer.tokenizer("the old dog in the rain")["input_ids"][:2]
    assert ids.tolist() == [*first, *scorer.tokenizer("\n")["input_ids"]]
    assert census.coverage.queries_cut == 1


SLIDING = {"window_size": 20, "stride": 10}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("cls", "arguments"),
    [
        (ld.BiEncoder, SLIDING),
        (ld.LateIR, {"interaction": tiny.aggregator(), "aggregator": None, **SLIDING}),
        (ld.LongP, {"template": "{query}{text}", "pooling": "last"}),
        (ld.LongP, {"template": "{query}{text}", "pooling": "mean"}),
    ],
)
def test_empty_texts_where_there_are_no_special_tokens(cls, arguments, tmp_path):
    model = cls(tiny_long.decoder(tmp_path, "qwen3"), device="cpu", **arguments)
    texts = pd.concat([TEXTS.assign(query=""), TEXTS], ignore_index=True)
    assert np.isfinite(scores(model, texts)).all()
    table = ld.check_invariance(model, texts, tolerance=5e-5, dtypes=(), verbose=False)
    assert table["passed"].dropna().all(), table


def answering(*answers):
    return {"template": ld.Template(middle=" ", answers=answers)}


@pytest.mark.parametrize(
    ("family", "arguments", "message"),
    [
        ("qwen3", answering("certainly so", "no"), r"answer 'certainly so' is \d+ tokens of this backbone"),
        ("qwen3", answering(10**6), "answer 1000000 is no id of a token: this backbone has"),
        ("bert", answering("yes", "no"), r"answers=\('yes', 'no'\) is for language models, not bert: leave the ans"),
        ("jina", answering("yes", "no"), r"answers=\('yes', 'no'\) is for language models, not "),
        ("jina", {"template": ld.Template(chat=True)}, "but the checkpoint's tokenizer has no chat template"),
        ("qwen3", {"template": "yes-no"}, "but the checkpoint's tokenizer has no chat template"),
        ("bert", {"global_attention": "cls"}, "it is Longformer's, not bert's"),
        ("bert", {"global_attention": "sentences"}, "it is Longformer's, not bert's"),
        ("bert", {"attention_window": 8}, "attention_window=8 would have no effect: it is Longformer's, not bert's"),
        ("bert", {"attention_type": "original_full"}, "it is BigBird's, not bert's"),
        (
            "longformer",
            {"global_attention": "sentences", "template": "plain"},
            "CLS. query .SEP. text .SEP.: leave templ",
        ),
        ("longformer", {"attn_implementation": "sdpa"}, r"sdpa|scaled_dot_product_attention"),
        ("qwen3", {"layout": "padded"}, "this backbone reads words around query and text: leave layout='pair'"),
        ("qwen3", {"layout": "shared"}, "this backbone reads words around query and text: leave layout='pair'"),
        (
            "jina",
            {"layout": "longformer"},
            "positions='real tokens' is for backbones that number positions by token ids",
        ),
    ],
)
def test_options_that_a_backbone_does_not_have(family, arguments, message, tmp_path):
    folder = tiny.encoder() if family == "bert" else tiny_long.make(family, tmp_path)
    with pytest.raises(ValueError, match=message):
        ld.LongP(folder, **arguments).load_scorer()


def test_a_model_of_another_machine_s_attention(tmp_path):
    """Saved where flash attention is installed, loaded where it is not."""
    model = ld.LongP(tiny_long.decoder(tmp_path / "decoder", "llama"), device="cpu")
    expected = scores(model, TEXTS)
    backbone = model.load_weights().backbone
    backbone.options = replace(backbone.options, attn_implementation="flash_attention_2")
    model.save(tmp_path / "saved")
    again = ld.LongP.load(tmp_path / "saved", attn_implementation=None, device="cpu")
    np.testing.assert_allclose(scores(again, TEXTS), expected, atol=1e-5)
    eager = ld.LongP.load(tmp_path / "saved", attn_implementation="eager", device="cpu")
    assert eager.load_scorer().encoder.backbone.config._attn_implementation == "eager"


def test_another_pooling_than_the_head_was_trained_for_starts_untrained(results):
    model = make("LongP", pooling="mean")
    with pytest.warns(ld.UntrainedWarning):
        model(results)
    assert model.load_scorer().encoder.pooling == "mean"


ONE_WINDOW = pd.DataFrame(
    {
        "qid": "1",
        "query": "old dog",
        "docno": list("abc"),
        "text": ["the cat", "a red fish in the river", "old dog, dog"],
    }
)


@pytest.mark.parametrize("name", ["FirstP", "LongP", "MaxP", "SumP", "AvgP", "PARADE-avg", "PARADE-elementwise"])
def test_pooling_scores_the_raw_state_of_a_cross_encoder(name, tmp_path):
    """As the papers' ELECTRA models: no classification head, not even its dense layer, but a new last layer."""
    folder = tiny.checkpoint(tmp_path / "electra", "electra")
    model = make(name, folder, pooling="cls")
    with pytest.warns(ld.UntrainedWarning):
        found = scores(model, ONE_WINDOW)
    electra = transformers.AutoModel.from_pretrained(folder).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    final = model.load_scorer().head.final
    with torch.no_grad():
        pairs = zip(ONE_WINDOW["query"], ONE_WINDOW["text"], strict=True)
        states = [electra(**tokenizer(*pair, return_tensors="pt")).last_hidden_state[:, 0] for pair in pairs]
        expected = [final(state).item() for state in states]
    np.testing.assert_allclose(found, expected, atol=1e-5)
    assert np.abs(scores(make(name, folder), ONE_WINDOW) - found).max() > 0.1
    assert model.describe() != make(name, folder).describe()
    model.save(tmp_path / "saved")
    restored = ld.LongDocReranker.load(tmp_path / "saved", device="cpu")
    assert restored.pooling == "cls"
    np.testing.assert_allclose(scores(restored, ONE_WINDOW), found, rtol=1e-5)
    with pytest.raises(ValueError, match="give both the same backbone and pooling"):
        model.start_from(make(name, folder))


# Numbers of parameters of the papers' configurations, counted without weights (on the meta device). The papers count
# tables of words and poolers that are never read, which this package drops.

H, A = 768, 384
BERT = BertConfig().to_dict()
POOLER, POOLER_A, WORDS_A = H * H + H, A * A + A, 30522 * A


def minilm(layers: int) -> dict:
    """The configuration of cross-encoder/ms-marco-MiniLM-L2/4/6-v2."""
    sizes = {"hidden_size": A, "intermediate_size": 4 * A, "num_attention_heads": 12, "num_hidden_layers": layers}
    return BertConfig(**sizes).to_dict()


def count(*modules: torch.nn.Module) -> int:
    return sum(p.numel() for module in modules for p in module.parameters())


def parade(head: str = "parade-transformer", **options) -> int:
    """PARADE over BERT-base."""
    with torch.device("meta"):
        backbone = build_backbone({"config": BERT, "cross_encoder": False}, None)
        return count(WindowEncoder(backbone), build_head(head, H, **options))


@pytest.mark.parametrize(("layers", "published"), [(6, 132_491_905), (4, 128_942_977)])
def test_pre_trained_aggregators(layers, published):
    """PARADE Transf-PRETR-L6 and -L4: 132M and 128M in Boytsov et al. 2022; -Q: 295,296 more if projected apart."""
    number = parade(aggregator=minilm(layers))
    assert number + POOLER + WORDS_A + POOLER_A == published
    assert parade("parade-transformer-query", aggregator=minilm(layers)) == number
    separate = parade("parade-transformer-query", aggregator=minilm(layers), separate_projection=True)
    assert separate - number == H * A + A == 295_296


@pytest.mark.parametrize(("interaction", "published"), [(2, 148_108_033), (6, 155_205_889)])
def test_late_interaction(interaction, published):
    """PARADE-LATEIR: 148M in Boytsov et al. 2025, which is that of an interaction with two layers."""
    with torch.device("meta"):
        description = {"config": BERT, "cross_encoder": False, "interaction": minilm(interaction)}
        backbone = build_late_backbone(description, tiny.tokenizer())
        head = build_head("parade-transformer", backbone.hidden_size, aggregator=minilm(6))
        assert count(LateInteractionEncoder(backbone), head) + POOLER + 2 * (WORDS_A + POOLER_A) == published


@pytest.mark.parametrize(
    ("family", "sizes", "published"),
    [
        # Boytsov et al. 2025 report 149M, 127M and (JINA, MOSAIC) 137M, with poolers, which are never used.
        (
            "longformer",
            {"max_position_embeddings": 4098, "vocab_size": 50265, "attention_window": [512] * 12, "pad_token_id": 1},
            148_659_456 + H,
        ),
        ("big_bird", {"vocab_size": 50358, "max_position_embeddings": 4096}, 127_468_800),
        ("alibi-bert", {"vocab_size": 30528}, 136_777_728 + POOLER),
    ],
)
def test_parameter_counts(family, sizes, published):
    with torch.device("meta"):
        description = {"config": {"model_type": family, **sizes}, "cross_encoder": False}
        assert count(build_backbone(description, tiny.tokenizer()).model) == published - POOLER
