"""What each class is: windows and heads, LongP's architectures."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
import transformers

import pyterrier_longdoc as ld
from pyterrier_longdoc.common.arguments import arguments_of
from pyterrier_longdoc.modelling import templates
from pyterrier_longdoc.training import evaluate

from ..support import tiny, tiny_long
from ..support.scorers import Passes
from ..support.systems import QUIET, longp, make, scores, slow_but
from ..support.tiny_long import LONG
from ..support.toy import toy_task

pytestmark = QUIET


def test_birch_interpolates_with_scores_of_the_first_stage(results):
    sizes = {"window_size": 150, "stride": 100}
    neural = scores(make("KMaxP", windows=ld.SentenceWindows(max_sentences=1), **sizes), results)
    first_stage = results["score"].to_numpy()
    for a in (0.0, 0.3, 1.0):
        birch = make("Birch", first_stage_weight=a)
        np.testing.assert_allclose(scores(birch, results), a * first_stage + (1 - a) * neural, atol=1e-6)
    with pytest.raises(ValueError, match=r"'score' .*'high'"):
        birch(results.assign(score=["1", "2", "3", "high", "5"]))
    written = birch(results.assign(score=results["score"].map(str)))  # numbers, as a file without types has them
    np.testing.assert_array_equal(written["score"], birch(results)["score"])


@pytest.mark.parametrize("name", ["FirstP", "BiEncoder-first"])
def test_models_of_the_first_window_read_the_first_of_any_windows(name, results):
    beginnings = results.assign(text=[" ".join(text.split()[:7]) for text in results["text"].fillna("")])
    model = make(name, windows=ld.SlidingWords(7, 3), window_size=None)
    np.testing.assert_allclose(scores(model, results), scores(make(name), beginnings), rtol=1e-5)
    assert model.coverage.windows == model.coverage.pairs
    assert model.coverage.pairs_truncated == 2  # one text, for two queries
    assert model.coverage.tokens_read < model.coverage.tokens


@pytest.fixture(scope="module", params=slow_but(("longformer", "bigbird", "qwen3 answers"), LONG))
def kind(request):
    return request.param


@pytest.fixture(scope="module")
def checkpoint(kind, tmp_path_factory):
    return tiny_long.make(kind, tmp_path_factory.mktemp("long"))


TEXTS = tiny_long.texts()
FULL = TEXTS[TEXTS["text"] != ""]  # a tokenizer takes an empty second text for none
PAIRS = list(FULL[["query", "text"]].itertuples(index=False, name=None))


def test_a_loaded_model_scores_different_texts_as_before(kind, checkpoint, tmp_path):
    model = longp(kind, checkpoint)
    expected = scores(model, TEXTS)
    assert model.model.encoder.pooling == tiny_long.POOLINGS.get(kind, "cls")
    assert len(set(expected)) == len(expected)
    assert expected.std() > 1e-3
    assert model.coverage.pairs_truncated == 0
    model.save(tmp_path)
    restored = ld.LongP.load(tmp_path, device="cpu")
    assert arguments_of(restored) == arguments_of(model)
    np.testing.assert_allclose(scores(restored, TEXTS), expected, atol=1e-5)
    assert restored.model.reader.describe() == model.model.reader.describe()


def test_texts_longer_than_the_input_of_the_backbone_are_truncated(kind, checkpoint, results):
    model = longp(kind, checkpoint)
    results.loc[0, "text"] = "the old dog " * 400
    with pytest.warns(ld.TruncationWarning):
        assert np.isfinite(scores(model, results)).all()
    assert model.coverage.pairs_truncated == 1
    reader = model.model.reader
    assert reader.windows.largest == reader.longest - 8 - reader.special_tokens()


def test_longp_with_max_doc_len_is_a_firstp_model(kind, checkpoint):
    twin, whole = longp(kind, checkpoint, max_doc_len=20), scores(longp(kind, checkpoint), TEXTS)
    with pytest.warns(ld.TruncationWarning):
        cut = scores(twin, TEXTS)
    short = TEXTS["text"].str.split().str.len() <= 2
    np.testing.assert_allclose(cut[short], whole[short], atol=1e-4)
    assert (np.abs(cut - whole)[~short] > 1e-4).all()
    assert twin.coverage.tokens_read <= 20 * twin.coverage.pairs


@pytest.mark.slow
@pytest.mark.parametrize("kind", tiny_long.LEARNING, scope="function")
def test_longp_learns_with_each_backbone(kind, tmp_path):
    run, judged = toy_task(0, queries=4)
    checkpoint = tiny_long.make(kind, tmp_path, **tiny_long.LEARNING[kind])
    recipe = ld.TrainingArgs(epochs=25, queries_per_step=4, learning_rates={"": 5e-3}, metric="RR")
    short = templates.Template("{query}\n{text}", answers=("yes", "no"))
    model = longp(kind, checkpoint, training=recipe, **({"template": short} if kind == "qwen3 answers" else {}))
    before = evaluate(model(run), judged, "RR")
    losses = model.fit(run, judged).history["loss"].tolist()
    assert np.mean(losses[-5:]) < 0.75 * np.mean(losses[:3])
    assert evaluate(model(run), judged, "RR") > max(before, 0.8)


@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("longformer", {}),
        ("big_bird", {}),
        pytest.param("nomic_bert", {}, marks=pytest.mark.slow),
        *(
            pytest.param("eurobert", {"classifier_pooling": pooling}, marks=pytest.mark.slow)
            for pooling in ("bos", "mean", "late")
        ),
    ],
)
def test_scores_of_long_cross_encoders_equal_those_of_transformers(family, options, tmp_path):
    folder = tiny_long.encoder(tmp_path, family, labels=1, **options)
    model = transformers.AutoModelForSequenceClassification.from_pretrained(folder).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    inputs = [tokenizer(q, t, return_tensors="pt") for q, t in PAIRS]
    with torch.no_grad():  # a copy, as BigBird's attention depends on earlier inputs
        expected = np.array([copy.deepcopy(model)(**each).logits.item() for each in inputs])
    reranker = ld.LongP(folder, device="cpu", **({"global_attention": "cls"} if family == "longformer" else {}))
    for _ in range(2):  # BigBird changes its attention between short and long inputs
        np.testing.assert_allclose(scores(reranker, FULL), expected, atol=1e-5)
    if family == "longformer":
        assert np.abs(scores(ld.LongP(folder, device="cpu"), FULL) - expected).max() > 1e-3
    if family == "big_bird":
        long = np.array([each["input_ids"].numel() > (5 + 2) * 4 for each in inputs])
        full = scores(ld.LongP(folder, attention_type="original_full", device="cpu"), FULL)
        np.testing.assert_allclose(full[~long], expected[~long], atol=1e-5)
        assert (np.abs(full - expected)[long] > 1e-3).all()


@pytest.fixture(scope="module")
def longformer(tmp_path_factory):
    return tiny_long.encoder(tmp_path_factory.mktemp("longformer"), "longformer", labels=1)


def global_positions(model, query, text):
    """Tokens of the one input with global attention, by position, and the input's ids."""
    scorer = model.model
    passes = Passes(scorer)
    scorer.score([query], [text])
    [inputs] = passes.inputs
    return inputs["global_attention_mask"][0].nonzero().flatten().tolist(), inputs["input_ids"][0].tolist()


def test_global_attention_covers_the_chosen_tokens_of_longformer(longformer):
    for choice, expected in (("query", [0, 1, 2, 3, 4]), ("query_only", [1, 2, 3]), ("cls", [0])):
        model = ld.LongP(longformer, global_attention=choice, device="cpu")
        positions, ids = global_positions(model, "the old dog", "a red fish " * 30)
        assert positions == expected
        assert (ids[0], ids[4], ids[5]) == (2, 3, 3)  # [CLS], and two separators of which the first counts
    assert global_positions(ld.LongP(longformer, device="cpu"), "", "a red fish")[0] == [0, 1]
    padded = ld.LongP(longformer, layout="padded", max_query_len=6, max_doc_len=40, device="cpu")
    positions, ids = global_positions(padded, "the old dog", "a red fish")
    assert (positions, ids[4:8]) == ([0, 1, 2, 3, 7], [0, 0, 0, 3])


SENTENCES = "a red fish. the old tree in rain and snow! the dog"


def test_sentences_begin_with_a_mark_with_global_attention(longformer):
    model = ld.LongP(longformer, global_attention="sentences", max_query_len=8, device="cpu")
    positions, ids = global_positions(model, "the old dog", SENTENCES)
    tokenizer = model.model.tokenizer
    shown = [tokenizer.decode([token]) for token in ids[: ids.index(0)]]
    text = "[CLS] a red fish . [CLS] the old tree in rain and snow ! [CLS] the dog [SEP]"
    assert " ".join(shown) == f"[CLS] the old dog [SEP] [SEP] {text}"
    assert positions == [0, 1, 2, 3, 4, *(i for i, token in enumerate(shown) if token == "[CLS]" and i)]


def test_sentence_marks_count_as_tokens(longformer):
    frame = tiny.frame(["the old dog"], [SENTENCES, ""])
    arguments = {"max_query_len": 8, "explain": True, "device": "cpu"}
    plain = ld.LongP(longformer, **arguments)
    model = ld.LongP(longformer, global_attention="sentences", **arguments)
    spans = [out["window_spans"].tolist() for out in (plain(frame), model(frame))]
    assert spans[0] == spans[1] == [[(0, len(SENTENCES))], [(0, 0)]]
    assert model.coverage.tokens == model.coverage.tokens_read == plain.coverage.tokens + 3
    model.max_doc_len = 8
    [start, end] = model(frame).iloc[0]["window_spans"][0]
    assert SENTENCES[start:end] == "a red fish. the old"  # six words and full stops, two marks
    assert (model.coverage.tokens_read, model.coverage.truncated) == (8, {"max_doc_len=8": 9})


def test_a_model_with_sentence_marks_scores_the_same_after_loading(longformer, tmp_path):
    arguments = {"global_attention": "sentences", "attention_window": 8, "max_query_len": 8, "device": "cpu"}
    model, texts = ld.LongP(longformer, **arguments), tiny.longer_results()
    model.save(tmp_path)
    again, expected = ld.LongP.load(tmp_path, device="cpu"), scores(model, texts)
    np.testing.assert_allclose(scores(again, texts), expected, rtol=1e-5)
    assert again.model.encoder.backbone.config.attention_window == [8, 8]
    for other in ({"global_attention": "query"}, {"attention_window": None}):
        assert not np.allclose(scores(ld.LongP(longformer, **{**arguments, **other}), texts), expected)


def test_bigbird_may_have_positions_that_do_not_fill_whole_blocks(tmp_path):
    folder = tiny_long.encoder(tmp_path, "big_bird", max_position_embeddings=250)
    model = ld.LongP(folder, max_query_len=8, device="cpu")
    assert np.isfinite(scores(model, TEXTS.assign(query="dog " * 8, text="dog " * 400))).all()
    specials = model.model.reader.special_tokens()
    assert model.model.reader.windows.largest == 248 - 8 - specials
    full = ld.LongP(folder, attention_type="original_full", max_query_len=8, device="cpu").model
    assert full.reader.windows.largest == 250 - 8 - specials


def test_a_truncated_query_keeps_the_template_text_after_it(tmp_path):
    folder = tiny_long.decoder(tmp_path, "qwen3")
    model = ld.LongP(folder, template="{query}\n{text}", max_query_len=2, device="cpu").model
    [pair] = model.read(["the old dog in the rain"], ["a cat"])
    words, after = (model.tokenizer(text)["input_ids"] for text in ("the old dog in the rain", "\na cat"))
    assert pair.windows[0].ids.tolist() == [*words[:2], *after]
    assert (pair.query.tokens, pair.query.tokens_read) == (len(words), 2)


ASKING = ld.Template("{query} {text}", answers=("yes", "no"))


@pytest.mark.parametrize(
    ("family", "arguments", "word"),
    [
        *((family, {"template": ASKING}, "language models") for family in ("bert", "jina")),
        ("jina", {"template": ld.Template("{query}{text}", chat=True)}, "chat_template"),
        ("qwen3", {"template": "yes-no"}, "chat_template"),
        *(("bert", {"global_attention": value}, "global_attention") for value in ("cls", "sentences")),
        ("bert", {"attention_window": 8}, "attention_window"),
        ("bert", {"attention_type": "original_full"}, "attention_type"),
        ("longformer", {"global_attention": "sentences", "template": "plain"}, "template"),
        ("longformer", {"attn_implementation": "sdpa"}, "sdpa|scaled_dot_product_attention"),
        *(("qwen3", {"layout": layout}, "layout='pair'") for layout in ("padded", "shared")),
        ("jina", {"layout": "longformer"}, "positions="),
    ],
)
def test_options_that_a_backbone_lacks_are_refused(family, arguments, word, tmp_path):
    folder = tiny.encoder() if family == "bert" else tiny_long.make(family, tmp_path)
    with pytest.raises(ValueError, match=word):
        _ = ld.LongP(folder, **arguments).model


def test_a_model_saved_with_flash_attention_is_loaded_with_another_attention(tmp_path):
    """The model was saved on a machine with flash attention and is loaded on one without."""
    model = ld.LongP(tiny_long.decoder(tmp_path / "decoder", "llama"), device="cpu")
    expected = scores(model, TEXTS)
    model.model.backbone.model.config._attn_implementation_internal = "flash_attention_2"
    model.save(tmp_path / "saved")
    again = ld.LongP.load(tmp_path / "saved", attn_implementation=None, device="cpu")
    np.testing.assert_allclose(scores(again, TEXTS), expected, atol=1e-5)
    eager = ld.LongP.load(tmp_path / "saved", attn_implementation="eager", device="cpu")
    assert eager.model.encoder.backbone.config._attn_implementation == "eager"


@pytest.mark.parametrize("name", ["FirstP", "LongP", "MaxP", "SumP", "AvgP", "PARADE-avg", "PARADE-elementwise"])
def test_pooling_scores_the_raw_state_of_a_cross_encoder(name, tmp_path):
    """As the papers' ELECTRA models: no classification head, not even its dense layer, but a new last layer."""
    texts = tiny.frame(["old dog"], ["the cat", "a red fish in the river", "old dog, dog"])  # one window each
    folder = tiny.checkpoint(tmp_path / "electra", "electra")
    model, other = make(name, folder, pooling="cls"), make(name, folder)
    with pytest.warns(ld.UntrainedWarning):
        found = scores(model, texts)
    electra = transformers.AutoModel.from_pretrained(folder).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    with torch.no_grad():
        pairs = zip(texts["query"], texts["text"], strict=True)
        states = [electra(**tokenizer(*pair, return_tensors="pt")).last_hidden_state[:, 0] for pair in pairs]
        expected = [model.model.head.final(state).item() for state in states]
    np.testing.assert_allclose(found, expected, atol=1e-5)
    assert np.abs(scores(other, texts) - found).max() > 0.1
    assert model.describe() != other.describe()
    with pytest.raises(ValueError, match="pooling"):
        model.start_from(other)
