"""The words around query and text: tokens as their owners make them, scores of language models, what is refused."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from tokenizers import models
from transformers import AutoTokenizer
from transformers.utils import logging as transformers_logging

import pyterrier_longdoc as ld
from pyterrier_longdoc.modelling.backbones.load import load_backbone
from pyterrier_longdoc.modelling.backbones.templates import TEMPLATES, Template, template_layout
from pyterrier_longdoc.modelling.texts import tokenize
from pyterrier_longdoc.training import Lora, TrainingArgs

from ..support import tiny, tiny_answers, tiny_long
from ..support.systems import QUIET, scores, slow_but
from ..support.tiny_answers import CHAT, PAIR, ROLES
from ..support.toy import toy_task

pytestmark = QUIET

READING = {"max_query_len": 12, "device": "cpu"}
QUERIES = ["old dog", "snow in the city?", "what is a tree?"]
TEXTS = ["the cat and the dog walk to the river in the rain.", "a red fish", " ".join(tiny.WORDS), "tree!"]
FRAME = tiny.frame(QUERIES, TEXTS)
PAIRS = list(FRAME[["query", "text"]].itertuples(index=False, name=None))


# Tokens.


def tokenizer_for(name):
    return tiny_answers.tokenizer(begin=name == "bge-reranker-v2-gemma", end=name == "monot5", chat=CHAT)


def ids_of(tokenizer, template, query, text):
    """What an input is made of, put together as a scorer does."""
    layout = template_layout(tokenizer, template)
    own = tokenize(tokenizer, [query], lead=layout.query_lead)[0].ids.tolist()
    if layout.query_trail:
        own = tokenize(tokenizer, [layout.query_lead + query + layout.query_trail])[0].ids.tolist()
    [read] = tokenize(tokenizer, [text], lead=layout.text_lead)
    return [*layout.prefix, *own, *layout.middle, *read.ids.tolist(), *layout.suffix]


# fmt: off
IDS = {
    # The package's own.
    "plain": [4, 5, 6, 7, 8, 9, 10, 11, 5, 12, 13, 9, 7, 8, 14, 15],
    # Model card of Qwen/Qwen3-Reranker-0.6B: prefix, `<Instruct>: ...\n<Query>: ...\n<Document>: ...`, suffix.
    "qwen3-reranker": [
        2, 16, 17, 18, 19, 12, 20, 21, 12, 22, 23, 24, 12, 25, 26, 12, 27, 28, 15, 29, 30, 12, 31, 32, 33, 34, 35, 36,
        37, 38, 35, 39, 40, 3, 17, 2, 41, 17, 42, 43, 44, 8, 45, 46, 47, 48, 49, 50, 51, 30, 31, 12, 47, 17, 52, 43, 6,
        7, 8, 9, 10, 53, 43, 12, 13, 9, 7, 8, 14, 15, 3, 17, 2, 54, 17, 55, 56, 57, 58, 56,
    ],
    # mixedbread-ai/mxbai-rerank, mxbai_rerank/mxbai_rerank_v2.py: `?` and the line break after it are two tokens.
    "mxbai-rerank-v2": [
        2, 16, 17, 59, 60, 61, 48, 62, 63, 64, 65, 15, 66, 60, 8, 67, 68, 15, 3, 17, 2, 41, 17, 4, 5, 6, 7, 8, 9, 122,
        17, 11, 5, 12, 13, 9, 7, 8, 14, 15, 17, 59, 60, 8, 46, 70, 71, 72, 73, 74, 75, 76, 77, 46, 78, 15, 79, 80, 47,
        81, 82, 48, 83, 84, 12, 85, 86, 87, 88, 48, 89, 90, 91, 92, 70, 93, 94, 95, 96, 97, 50, 48, 98, 99, 96, 50,
        100, 101, 5, 3, 17, 2, 54, 17,
    ],
    # FlagOpen/FlagEmbedding, FlagEmbedding/inference/reranker/decoder_only/base.py.
    "bge-reranker-v2-gemma": [
        1, 102, 5, 6, 7, 8, 9, 122, 17, 103, 5, 12, 13, 9, 7, 8, 14, 15, 17, 104, 8, 47, 105, 26, 8, 106, 107, 48, 108,
        19, 12, 106, 109, 110, 31, 111, 12, 47, 63, 112, 8, 113, 114, 115, 116, 117, 118, 38, 116, 119, 120,
    ],
    # Nogueira et al. 2020, section 3; terrierteam/pyterrier_t5.
    "monot5": [121, 5, 6, 7, 8, 9, 122, 20, 5, 12, 13, 9, 7, 8, 14, 15, 123, 5, 1],
    # The package's own question, after Liang et al. 2022, in the chat template of the tokenizer.
    "yes-no": [
        2, 41, 17, 121, 5, 6, 7, 8, 9, 10, 124, 12, 106, 31, 12, 47, 122, 125, 116, 117, 118, 38, 116, 119, 126, 127, 5,
        12, 13, 9, 7, 8, 14, 15, 3, 17, 2, 54, 17,
    ],
}
# fmt: on


@pytest.mark.parametrize("name", TEMPLATES)
def test_token_ids_of_the_built_in_templates(name):
    tokenizer = tokenizer_for(name)
    assert ids_of(tokenizer, TEMPLATES[name].within(tokenizer), *PAIR) == IDS[name]


def plain_ids(tokenizer, text):
    return tokenizer(text, add_special_tokens=False)["input_ids"]


@pytest.mark.parametrize("pair", [PAIR, ("old dog", "tree!"), ("snow in the city?", "rain\n\n")])
def test_parts_that_are_tokenized_apart(pair):
    """Step by step as the code of mxbai-rerank and of FlagEmbedding puts an input together."""
    query, text = pair
    mxbai, tokenizer = TEMPLATES["mxbai-rerank-v2"], tokenizer_for("mxbai-rerank-v2")
    task, _, answer = mxbai.suffix.removeprefix("\n").partition("<|im_end|>")
    pieces = [mxbai.prefix, f"query: {query}", "\n", f"document: {text}", "\n", task, f"<|im_end|>{answer}"]
    expected = [token for piece in pieces for token in plain_ids(tokenizer, piece)]
    assert ids_of(tokenizer, mxbai, query, text) == expected
    bge, tokenizer = TEMPLATES["bge-reranker-v2-gemma"], tokenizer_for("bge-reranker-v2-gemma")
    pieces = [f"A: {query}", "\n", f"B: {text}", "\n", bge.suffix.removeprefix("\n")]
    expected = [1, *(token for piece in pieces for token in plain_ids(tokenizer, piece))]
    assert ids_of(tokenizer, bge, query, text) == expected


@pytest.mark.parametrize("name", ["plain", "qwen3-reranker", "monot5"])
def test_parts_that_are_tokenized_together(name):
    tokenizer, template = tokenizer_for(name), TEMPLATES[name]
    for query, text in PAIRS:
        assert ids_of(tokenizer, template, query, text) == tokenizer(template.fill(query, text))["input_ids"]


@pytest.mark.parametrize("apart", [False, True])
@pytest.mark.parametrize("string", ["Query:{query}", "a:({query})", "{query} find"])
def test_no_word_of_a_template_is_lost_in_a_token_of_query_or_text(string, apart):
    tokenizer = tiny_long.byte_tokenizer()
    tokenizer.add_tokens([":a", "(a", "a)"])  # as vocabularies of real models have them
    after = string.replace("{query}", "{text}")
    template = Template(query=string, middle="\n", text=after, apart=apart, special_tokens=False)
    for query, text in [("a", "a"), *PAIRS]:
        assert tokenizer.decode(ids_of(tokenizer, template, query, text)) == template.fill(query, text)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"query": "q"}, r"must hold {query} once, in query, and {text} once, in text: 'q{text}' does not"),
        ({"middle": "{text}"}, r"must hold {query} once"),
        ({"prefix": 3}, "prefix=3 of a template must be a text"),
        ({"answers": "yes"}, "answers='yes' must be two words"),
        ({"answers": ("a", "b", "c")}, "must be two words, for a relevant and another text"),
        ({"answers": (True,)}, "must be two words"),
        ({"chat": 1}, "chat=1 of a template must be True or False"),
        ({"chat": True, "apart": True}, "leave apart=False"),
    ],
)
def test_wrong_templates(arguments, message):
    with pytest.raises(ValueError, match=message):
        Template(**arguments)


# Scores.


def answers_of(tokenizer, *words):
    return [plain_ids(tokenizer, word)[0] for word in words]


def filled(model, tokenizer, template, pairs):
    """`(R, words)` logits of what follows the filled-in inputs, padded on the left, as the owners pad."""
    rows = [ids_of(tokenizer, template, query, text) for query, text in pairs]
    width = max(map(len, rows))
    ids = torch.tensor([[1] * (width - len(row)) + row for row in rows])
    mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows])
    start = {"decoder_input_ids": torch.ones(len(rows), 1, dtype=torch.long)} if model.config.is_encoder_decoder else {}
    with torch.no_grad():
        return model(input_ids=ids, attention_mask=mask, **start).logits[:, -1]


KINDS = {
    "qwen3": ("qwen3", "qwen3-reranker", {}),
    "mxbai": ("qwen3", "mxbai-rerank-v2", {}),
    "gemma": ("gemma", "bge-reranker-v2-gemma", {}),
    "t5": ("t5", "monot5", {"initializer_factor": 1.5}),
    "t5, two tables": ("t5", "monot5", {"tie_word_embeddings": False}),
    "mt5": ("mt5", "monot5", {}),
    "umt5": ("umt5", "monot5", {}),
    "chat": ("llama", "yes-no", {}),
    "granite": ("granite", "qwen3-reranker", {"logits_scaling": 8.0}),
    "cohere": ("cohere", "qwen3-reranker", {"logit_scale": 0.25}),
}


@pytest.fixture(scope="module", params=slow_but(("qwen3", "gemma", "t5", "granite"), KINDS))
def answering(request, tmp_path_factory):
    """A language model that answers: itself, its tokenizer, its folder, and the name of its template."""
    family, name, changes = KINDS[request.param]
    tokenizer = tokenizer_for(name)
    model, folder = tiny_answers.checkpoint(tmp_path_factory.mktemp("answering"), family, tokenizer, **changes)
    return model, tokenizer, folder, name


def test_scores_are_the_logits_of_the_filled_in_prompt(answering, tmp_path):
    model, tokenizer, folder, name = answering
    template = TEMPLATES[name].within(tokenizer)
    logits = filled(model, tokenizer, template, PAIRS)[:, answers_of(tokenizer, *template.answers)]
    expected = (logits[:, 0] - logits[:, 1] if len(template.answers) == 2 else logits[:, 0]).numpy()
    assert expected.std() > 1e-2
    first = ld.FirstP(folder, template=name, **READING)
    np.testing.assert_allclose(scores(first, FRAME), expected, atol=1e-5, rtol=1e-5)
    for reranker in (first, ld.MaxP(folder, template=name, **READING)):
        np.testing.assert_allclose(scores(reranker, FRAME), expected, atol=1e-5, rtol=1e-5)
        reranker.save(tmp_path / "saved")
        again = type(reranker).load(tmp_path / "saved", device="cpu")
        assert again.template == name
        np.testing.assert_allclose(scores(again, FRAME), expected, atol=1e-5, rtol=1e-5)
    for aggregation in ("avg", "max", "attn"):  # of one window
        parade = ld.PARADE(folder, template=name, aggregation=aggregation, **READING)
        np.testing.assert_allclose(scores(parade, FRAME), expected, atol=1e-5, rtol=1e-5)
        assert parade.load_weights().ready


MAKERS = {
    "words": lambda: tiny_answers.tokenizer(chat=CHAT),
    "words, ended": lambda: tiny_answers.tokenizer(end=True, chat=CHAT),
    "bytes": tiny_long.byte_tokenizer,
    "bytes, begun": lambda: tiny_long.byte_tokenizer(begin=True),
    "word pieces": lambda: tiny.tokenizer(segments=False),
}


@pytest.mark.parametrize("maker", MAKERS)
@pytest.mark.parametrize("name", TEMPLATES)
def test_empty_queries_and_texts_are_read_as_in_the_whole_string(name, maker, tmp_path):
    """By the scores of a model that reads the filled-in template, tokenized as its owner does."""
    tokenizer, template = MAKERS[maker](), replace(TEMPLATES[name], answers=(5, 6))
    tokenizer.chat_template = CHAT
    model, folder = tiny_answers.checkpoint(tmp_path, "qwen3", tokenizer)
    frame, said, expected = tiny.frame(["old dog", ""], ["the cat", "", " ", "tree!"]), template.within(tokenizer), []
    for query, text in frame[["query", "text"]].itertuples(index=False, name=None):
        if said.apart:
            parts = [part.replace("{query}", query).replace("{text}", text) for part in said.parts]
            ids = [token for part in parts for token in plain_ids(tokenizer, part)]
            around = tokenizer("a", add_special_tokens=said.special_tokens)["input_ids"]
            at = around.index(plain_ids(tokenizer, "a")[0])
            ids = [*around[:at], *ids, *around[at + 1 :]]
        else:
            ids = tokenizer(said.fill(query, text), add_special_tokens=said.special_tokens)["input_ids"]
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([ids])).logits[0, -1]
        expected.append((logits[5] - logits[6]).item())
    reranker = ld.FirstP(folder, template=template, **READING)
    np.testing.assert_allclose(scores(reranker, frame), expected, atol=1e-5)
    assert len(np.unique(np.round(expected, 3))) >= 4
    assert reranker.coverage.tokens == reranker.coverage.tokens_read


def test_nothing_but_query_and_text_decides(answering):
    _, _, folder, name = answering
    model = ld.MaxP(folder, template=name, window_size=12, stride=8, **READING)
    table = ld.check_invariance(model, FRAME, tolerance=5e-5, dtypes=(), verbose=False).set_index("check")
    assert table["passed"].dropna().all(), table
    assert table.loc[["repeated", "order", "alone", "padding", "batch size 1"], "passed"].all(), table
    assert len(set(scores(model, FRAME).round(5))) == len(FRAME)
    assert model.coverage.share_read == 1.0


@pytest.mark.parametrize("family", ["qwen3", "gemma"])
def test_a_conversion_to_classification_scores_with_its_head(family, tmp_path):
    tokenizer = tokenizer_for("qwen3-reranker")
    model, folder = tiny_answers.checkpoint(tmp_path, family, tokenizer, labels=1)
    template, expected = TEMPLATES["qwen3-reranker"], []
    for query, text in PAIRS:
        with torch.no_grad():
            expected.append(model(torch.tensor([ids_of(tokenizer, template, query, text)])).logits.item())
    for cls in (ld.FirstP, ld.MaxP, ld.AvgP, ld.LongP):
        found = scores(cls(folder, template="qwen3-reranker", **READING), FRAME)
        np.testing.assert_allclose(found, expected, atol=1e-5)


def test_window_by_window(tmp_path):
    tokenizer = tokenizer_for("qwen3-reranker")
    model, folder = tiny_answers.checkpoint(tmp_path, "qwen3", tokenizer)
    best = ld.MaxP(folder, template="qwen3-reranker", window_size=10, stride=5, explain=True, **READING)
    text = " ".join(tiny.WORDS)
    [row] = best(tiny.frame(["old dog"], [text])).to_dict("records")
    slices = [text[start:end] for start, end in row["window_spans"]]
    assert len(slices) > 3
    logits = filled(model, tokenizer, TEMPLATES["qwen3-reranker"], [("old dog", part.strip()) for part in slices])
    # A window in the middle of a text begins with the space before its first word.
    yes, no = answers_of(tokenizer, "yes", "no")
    np.testing.assert_allclose(row["window_scores"], (logits[:, yes] - logits[:, no]).numpy(), atol=1e-5)
    assert row["score"] == max(row["window_scores"])


def test_a_template_of_one_s_own(tmp_path):
    tokenizer = tiny_answers.tokenizer()
    model, folder = tiny_answers.checkpoint(tmp_path / "model", "qwen3", tokenizer)
    yes, no = answers_of(tokenizer, "yes", "no")
    own = ld.Template(prefix="query: ", middle="\n", suffix=" yes", answers=(yes, "no"))
    assert own == ld.Template.of("query: {query}\n{text} yes", answers=[yes, "no"])
    logits = filled(model, tokenizer, own, PAIRS)
    reranker = ld.MaxP(folder, template=own, **READING)
    np.testing.assert_allclose(scores(reranker, FRAME), (logits[:, yes] - logits[:, no]).numpy(), atol=1e-5)
    reranker.save(tmp_path / "saved")
    again = ld.MaxP.load(tmp_path / "saved", device="cpu")
    assert again.template == own
    assert json.loads((tmp_path / "saved" / "config.json").read_text())["parameters"]["template"]["middle"] == "\n"
    np.testing.assert_allclose(scores(again, FRAME), scores(reranker, FRAME), atol=1e-5)
    assert scores(ld.MaxP(folder, template=replace(own, answers=("no", yes)), **READING), FRAME)[0] == pytest.approx(
        -scores(reranker, FRAME)[0], abs=1e-6
    )


@pytest.fixture
def t5(tmp_path) -> str:
    return tiny_answers.checkpoint(tmp_path, "t5", tokenizer_for("monot5"))[1]


def test_what_nothing_limits_reads_windows_of_the_usual_size(t5):
    text = " ".join(["cat dog"] * 400)
    for cls, tokens in ((ld.FirstP, 477), (ld.AvgP, 800), (ld.LongP, 800)):
        model = cls(t5, template="monot5", device="cpu", max_query_len=8)
        model(tiny.frame(["old dog"], [text]))
        assert (model.coverage.tokens, model.coverage.tokens_read) == (800, tokens)
        assert model.load_scorer().encoder.longest_input is None


def test_an_encoder_and_its_decoder_are_computed_twice_without_a_word(t5, caplog):
    run, judged = toy_task(0, queries=4)
    transformers_logging.warning_once.cache_clear()
    losses = []
    for twice in (False, True):
        recipe = ld.TrainingArgs(epochs=1, queries_per_step=2, dropout=0.0, gradient_checkpointing=twice)
        model = ld.MaxP(t5, template="monot5", training=recipe, **READING)
        losses.append(model.fit(run, judged).history["loss"].tolist())
    np.testing.assert_allclose(losses[1], losses[0], rtol=1e-4)
    assert [record.getMessage() for record in caplog.records if record.name.startswith("transformers")] == []


@pytest.mark.parametrize("family", ["qwen3", "t5"])
def test_lora_learns_over_answers(family, tmp_path):
    name = {"qwen3": "qwen3-reranker", "t5": "monot5"}[family]
    _, folder = tiny_answers.checkpoint(tmp_path / "model", family, tokenizer_for(name))
    run, judged = toy_task(0, queries=4)
    recipe = TrainingArgs(epochs=1, queries_per_step=4, learning_rates={"": 1e-2}, lora=Lora(rank=2))
    model = ld.MaxP(folder, template=name, training=recipe, **READING)
    before = scores(model, run)
    words = model.load_scorer().encoder.backbone.get_input_embeddings().weight.clone()
    model.fit(run, judged)
    after = scores(model, run)
    assert np.abs(after - before).max() > 1e-2
    assert torch.equal(model.load_scorer().encoder.backbone.get_input_embeddings().weight, words)
    model.save(tmp_path / "saved")
    np.testing.assert_allclose(scores(ld.MaxP.load(tmp_path / "saved", device="cpu"), run), after, atol=1e-5)
    model.save_adapter(tmp_path / "adapter", rank=8)
    adapted = ld.MaxP.load(tmp_path / "adapter", device="cpu")
    np.testing.assert_allclose(scores(adapted, run), after, atol=0.05 * np.abs(after).max())


def test_heads_that_need_more_than_the_answer(tmp_path):
    _, folder = tiny_answers.checkpoint(tmp_path, "t5", tokenizer_for("monot5"))
    for cls, arguments in ((ld.CEDR, {}), (ld.NeuralModel1, {}), (ld.PARADE, {"query_states": True})):
        transformer = {"aggregation": "transformer"} if cls is ld.PARADE else {}
        with pytest.raises(ValueError, match="of which an encoder-decoder that answers gives none: use FirstP"):
            cls(folder, template="monot5", **arguments, **transformer, **READING).load_scorer()


# What a checkpoint says of itself.


def pair_scores(folder, activation=None):
    sentence_transformers = pytest.importorskip("sentence_transformers", minversion="5.7")
    model = sentence_transformers.CrossEncoder(folder, device="cpu")
    return model, model.predict(PAIRS, activation_fn=activation or torch.nn.Identity(), show_progress_bar=False)


@pytest.mark.parametrize("labels", [None, 1])
@pytest.mark.parametrize("prompt", [None, "find a plant"])
def test_the_chat_template_of_a_reranker(labels, prompt, tmp_path):
    """As sentence-transformers reads it, with its files or without them."""
    tokenizer = tiny_answers.tokenizer(chat=ROLES)
    _, folder = tiny_answers.checkpoint(tmp_path / "bare", "qwen3", tokenizer, labels=labels)
    model, expected = pair_scores(folder)
    np.testing.assert_allclose(scores(ld.FirstP(folder, **READING), FRAME), expected, atol=1e-5)
    if prompt is not None:
        model.prompts["search"], model.default_prompt_name = prompt, "search"
    stored = str(tmp_path / "stored")
    model.save_pretrained(stored)
    _, expected = pair_scores(stored)
    for cls in (ld.FirstP, ld.MaxP):
        reranker = cls(stored, **READING)
        np.testing.assert_allclose(scores(reranker, FRAME), expected, atol=1e-5)
    _, chances = pair_scores(stored, torch.nn.Sigmoid())
    np.testing.assert_allclose(1 / (1 + np.exp(-scores(reranker, FRAME))), chances, atol=1e-5)
    reranker.save(tmp_path / "ours")
    np.testing.assert_allclose(scores(ld.MaxP.load(tmp_path / "ours", device="cpu"), FRAME), expected, atol=1e-5)
    assert np.abs(scores(ld.MaxP(stored, template="plain", **READING), FRAME) - expected).max() > 1e-3


@pytest.mark.parametrize("one", [True, False])
def test_answers_that_sentence_transformers_compares(one, tmp_path):
    modules = pytest.importorskip("sentence_transformers.cross_encoder.modules")
    from sentence_transformers import CrossEncoder

    tokenizer = tiny_answers.tokenizer(chat=ROLES)
    _, folder = tiny_answers.checkpoint(tmp_path / "bare", "gemma", tokenizer)
    yes, no = answers_of(tokenizer, "1", "0")
    first = modules.Transformer(folder, transformer_task="text-generation")
    stored = str(tmp_path / "stored")
    CrossEncoder(modules=[first, modules.LogitScore(yes, None if one else no)], device="cpu").save_pretrained(stored)
    _, expected = pair_scores(stored)
    np.testing.assert_allclose(scores(ld.MaxP(stored, **READING), FRAME), expected, atol=1e-5)
    template = ld.MaxP(stored, **READING).load_weights().backbone.template
    assert template.answers == ((yes,) if one else (yes, no))


def with_chat(folder, chat):
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template = chat
    tokenizer.save_pretrained(folder)
    return folder


@pytest.mark.parametrize(
    ("family", "labels", "chat", "begin", "message"),
    [
        ("qwen3", 1, None, False, "classification head, .* say template='qwen3-reranker' for a conversion of Qwen3"),
        (
            "qwen3",
            1,
            CHAT,
            False,
            r"this Qwen3ForSequenceClassification is a language model with a classification head",
        ),
        ("llama", 1, CHAT, True, "nothing in the checkpoint tells in which words it reads query and text"),
        (
            "qwen3",
            None,
            CHAT,
            False,
            "is a chat model, .* say template='yes-no' to ask it, .*template='plain' to train",
        ),
        (
            "llama",
            None,
            CHAT,
            True,
            r"this LlamaForCausalLM is a chat model, .* template=ld.Template.of\('query: {quer",
        ),
        ("qwen3", None, ROLES.replace("query: ", "").split("document")[0] + "'document'", False, "does not let messag"),
        ("t5", None, None, False, "is an encoder-decoder, .* say template='monot5' for monoT5. Known are plain, qwen3"),
    ],
)
def test_language_models_of_which_the_words_are_not_known(family, labels, chat, begin, message, tmp_path):
    tokenizer = (
        tiny_answers.tokenizer(begin=begin, chat=chat) if family != "llama" else tiny_long.byte_tokenizer(begin=begin)
    )
    _, folder = tiny_answers.checkpoint(tmp_path, family, tokenizer, labels=labels)
    if chat is not None:
        with_chat(folder, chat)
    for cls in (ld.FirstP, ld.MaxP, ld.PARADE, ld.LongP):
        with pytest.raises(ValueError, match=message):
            cls(folder, **READING).load_scorer()


def test_the_sentences_to_write_work(tmp_path):
    _, chat = tiny_answers.checkpoint(tmp_path / "chat", "qwen3", tiny_answers.tokenizer(chat=CHAT))
    for template in (
        "yes-no",
        "qwen3-reranker",
        "plain",
        ld.Template.of("query: {query} {text}", answers=("yes", "no")),
    ):
        model = ld.MaxP(chat, template=template, **READING)
        assert np.isfinite(scores(model, FRAME)).all()
        assert model.load_weights().ready == (template != "plain")
    for folder in (chat, tiny_answers.checkpoint(tmp_path / "t5", "t5", tokenizer_for("monot5"))[1]):
        if folder is not chat:
            assert np.isfinite(scores(ld.MaxP(folder, template="monot5", **READING), FRAME)).all()
    # Texts one by one have no template.
    assert np.isfinite(scores(ld.BiEncoder(chat, **READING), FRAME)).all()


def test_a_checkpoint_is_not_known_by_its_name(tmp_path):
    _, folder = tiny_answers.checkpoint(
        tmp_path / "Qwen" / "Qwen3-Reranker-0.6B", "qwen3", tiny_answers.tokenizer(chat=CHAT)
    )
    with pytest.raises(ValueError, match="is a chat model"):
        load_backbone(folder)


@pytest.mark.parametrize(
    ("family", "changes", "template", "message"),
    [
        (
            "gemma2",
            {},
            "bge-reranker-v2-gemma",
            r"no linear function of its last state \(final_logit_softcapping=30.0\)",
        ),
        (
            "qwen3",
            {},
            Template(answers=("unheard", "no")),
            "answer 'unheard' is no token of this backbone: its tokenizer",
        ),
        (
            "qwen3",
            {},
            Template(answers=("no", "no")),
            "are one and the same token of this backbone: all scores would be 0",
        ),
        ("t5", {}, "plain", "is an encoder-decoder, whose answer is scored: the template needs answers"),
    ],
)
def test_scores_that_cannot_be_taken_over(family, changes, template, message, tmp_path):
    _, folder = tiny_answers.checkpoint(
        tmp_path, family, tokenizer_for(template), **{"initializer_range": 2.0, **changes}
    )
    with pytest.raises(ValueError, match=message):
        ld.FirstP(folder, template=template, **READING).load_scorer()


def test_a_tokenizer_that_is_loaded_as_another_kind_is_refused(tmp_path):
    # Transformers 5 makes a byte-level BPE of what a Qwen2 checkpoint has, and of whole words none is left.
    tokenizer = tiny_answers.tokenizer()
    without_letters = {token: i for token, i in tokenizer.get_vocab().items() if len(token) > 1 or not token.isalpha()}
    tokenizer.backend_tokenizer.model = models.BPE(without_letters, [])
    _, folder = tiny_answers.checkpoint(tmp_path, "qwen2", tokenizer)
    with pytest.raises(ValueError, match="makes no token of the word"):
        ld.FirstP(folder, template="mxbai-rerank-v2", **READING).load_scorer()
