"""Open rerankers beside what their authors publish: their prompts, tokenized as they do, and their arithmetic."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoConfig

import pyterrier_longdoc as ld
from pyterrier_longdoc.modelling.templates import TEMPLATES

from ..support import tiny, tiny_answers, tiny_long
from ..support.invariance import assert_independent
from ..support.systems import QRELS, QUIET, reloaded, scores

pytestmark = QUIET

SHORT, LONG = "a red fish and the old dog.", "the cat. and the dog! walk to the river, in the rain. " * 4
FRAME = tiny.frame(["old dog", "snow in the city?"], [SHORT, LONG.strip()]).assign(title="the long river")
READING = {"windows": ld.SlidingWords(12, 8), "max_query_len": 12, "device": "cpu"}


def last_logits(model, rows):
    """`(R, words)` logits after inputs that are padded on the left."""
    width = max(map(len, rows))
    ids = torch.tensor([[1] * (width - len(row)) + row for row in rows])
    mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows])
    with torch.no_grad():
        return model(input_ids=ids, attention_mask=mask).logits[:, -1]


def encode(tokenizer, text):
    return tokenizer(text, add_special_tokens=False)["input_ids"]


def ctxl(model, tokenizer, query, texts, instruction=""):
    """Model card: one string, and the logit of the first word of the vocabulary."""
    task = "Check whether a given document contains information helpful to answer the query."
    tail = f" {instruction}" if instruction else ""
    prompts = [f"{task}\n<Document> {text}\n<Query> {query}{tail} ??" for text in texts]
    return last_logits(model, tokenizer(prompts)["input_ids"])[:, 0]


def zerank(model, tokenizer, query, texts, instruction=""):
    """`modeling_zeranker.py`: query, as the system's message, and text are stripped; "Yes" is divided by 5."""
    system = {"role": "system", "content": query.strip()}
    chats = [[system, {"role": "user", "content": text.strip()}] for text in texts]
    prompts = tokenizer.apply_chat_template(chats, add_generation_prompt=True, tokenize=False)
    return last_logits(model, tokenizer(prompts)["input_ids"])[:, encode(tokenizer, "Yes")[0]] / 5


def qwen3(model, tokenizer, query, texts, instruction=""):
    """Model card: the words around the pair are tokenized by themselves; "yes" against "no"."""
    prefix = (
        "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the Instruct "
        'provided. Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n'
    )
    suffix = "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
    task = instruction or "Given a web search query, retrieve relevant passages that answer the query"
    pairs = [f"<Instruct>: {task}\n<Query>: {query}\n<Document>: {text}" for text in texts]
    rows = [[*encode(tokenizer, prefix), *encode(tokenizer, pair), *encode(tokenizer, suffix)] for pair in pairs]
    yes, no = (last_logits(model, rows)[:, encode(tokenizer, word)[0]] for word in ("yes", "no"))
    return yes - no


def mxbai(model, tokenizer, query, texts, instruction=""):
    """`mxbai_rerank_v2.py`: query with instruction, text and task are tokenized by themselves; "1" against "0"."""
    template = TEMPLATES["mxbai-rerank-v2"].parts
    system, task = (encode(tokenizer, template[place]) for place in (0, -1))
    asked = f"instruction: {instruction}\nquery: {query}" if instruction else f"query: {query}"
    middle = [*encode(tokenizer, asked), *encode(tokenizer, "\n")]
    rows = [[*system, *middle, *encode(tokenizer, f"document: {text}"), *task] for text in texts]
    yes, no = (last_logits(model, rows)[:, encode(tokenizer, word)[0]] for word in ("1", "0"))
    return yes - no


FAMILIES = {
    "ctxl-rerank-v2": (ctxl, "qwen3"),
    "zerank-2": (zerank, "qwen3"),
    "qwen3-reranker": (qwen3, "qwen3"),
    "mxbai-rerank-v2": (mxbai, "qwen3"),
}
"""Published arithmetic and architecture."""

INSTRUCTED = [name for name in FAMILIES if TEMPLATES[name].takes_instruction]


def loaded(name, folder):
    """A random model of the family, its tokenizer and its folder."""
    tokenizer = tiny_answers.tokenizer(chat=tiny_answers.CHAT)
    return (*tiny_answers.checkpoint(folder, FAMILIES[name][1], tokenizer, max_position_embeddings=1024), tokenizer)


def published(name, model, tokenizer, results):
    """The published scores of the windows of each row, which explanations locate."""
    score, _ = FAMILIES[name]
    titled = results.attrs.get("titled")
    rows = []
    for row in results.itertuples():
        windows = [row.text[start:end].strip() for start, end in row.window_spans]
        if titled:
            windows = [f"{row.title}\n{window}" for window in windows]
        rows.append(score(model, tokenizer, row.query, windows, results.attrs.get("instruction", "")).numpy())
    return rows


AGGREGATIONS = {
    "FirstP": (ld.FirstP, {}, lambda s: s[0]),
    "MaxP": (ld.MaxP, {}, max),
    "KMaxP": (ld.KMaxP, {"k": 2}, lambda s: np.sort(s)[-2:].mean()),
    "PARADE": (ld.PARADE, {"aggregation": "avg"}, np.mean),
}


CASES = [*((name, "") for name in FAMILIES), *((name, "find the old river.") for name in INSTRUCTED)]


@pytest.mark.parametrize("titled", [False, True])
@pytest.mark.parametrize(("name", "instruction"), CASES)
def test_windows_have_the_published_scores(name, instruction, titled, tmp_path):
    model, folder, tokenizer = loaded(name, tmp_path / "model")
    fields = {"text_field": ("title", "text"), "repeat": "title"} if titled else {}
    for cls, arguments, combine in AGGREGATIONS.values():
        own = {"template": name, "instruction": instruction, **READING, **fields, **arguments}
        reranker = cls(folder, explain=True, **own)
        results = reranker(FRAME)
        results.attrs |= {"titled": titled, "instruction": instruction}
        windows = published(name, model, tokenizer, results)
        assert cls is ld.FirstP or max(map(len, windows)) > 4 > min(map(len, windows))
        expected = [combine(row) for row in windows]
        np.testing.assert_allclose(results["score"], expected, atol=1e-5)
        np.testing.assert_allclose(
            np.concatenate(results["window_scores"].tolist()), np.concatenate(windows), atol=1e-5
        )
    again = reloaded(reranker, tmp_path / "saved")
    np.testing.assert_allclose(scores(again, FRAME), expected, atol=1e-5)


def test_zerank_reads_query_and_text_without_the_white_space_around_them(tmp_path):
    model, folder, tokenizer = loaded("zerank-2", tmp_path / "model")
    reranker = ld.FirstP(folder, template="zerank-2", max_query_len=12, device="cpu")
    spaced = tiny.frame([" old dog\n"], [f"\n\n{SHORT} ", " "])
    expected = zerank(model, tokenizer, "old dog", [SHORT, ""])
    np.testing.assert_allclose(scores(reranker, spaced), expected, atol=1e-5)
    np.testing.assert_allclose(scores(reloaded(reranker, tmp_path / "saved"), spaced), expected, atol=1e-5)


# Instructions of queries.

COLUMN = ["find the old river.", "read and write", "", None]


def with_instructions():
    """A query of one text with two instructions, an empty one and none; then other queries."""
    frame = tiny.frame(["old dog"], [SHORT] * 4)
    others = FRAME.assign(instruction="read and write", qid="q9")
    return pd.concat([frame.assign(instruction=COLUMN), others], ignore_index=True)


@pytest.mark.parametrize("default", ["", "long and short"])
@pytest.mark.parametrize("name", INSTRUCTED)
def test_each_query_has_the_instruction_of_its_row(name, default, tmp_path):
    model, folder, tokenizer = loaded(name, tmp_path / "model")
    own = {"template": name, "instruction": default, "instruction_field": "instruction", "device": "cpu"}
    reranker, frame = ld.FirstP(folder, max_query_len=12, score_cache=tmp_path / "scores", **own), with_instructions()
    expected = [
        FAMILIES[name][0](model, tokenizer, row.query, [row.text], row.instruction or default).item()
        for row in frame.fillna("").itertuples()
    ]
    assert (
        len(np.unique(np.round(expected, 4))) == len(expected) - 2
    )  # an empty one is none, and one row is there twice
    for _ in range(2):  # computed, then from the cache
        np.testing.assert_allclose(scores(reranker, frame), expected, atol=1e-5)
    assert reranker.coverage.tokens_encoded == 0
    assert_independent(ld.FirstP(folder, max_query_len=12, **own), frame)
    again = reloaded(reranker, tmp_path / "saved")
    np.testing.assert_allclose(scores(again, frame), expected, atol=1e-5)


def test_instructions_are_a_part_of_the_keys_of_a_cache(tmp_path):
    _, folder, _ = loaded("ctxl-rerank-v2", tmp_path / "model")
    own = {"template": "ctxl-rerank-v2", "score_cache": tmp_path / "scores", "device": "cpu"}
    found = [
        scores(ld.FirstP(folder, instruction=words, **own), FRAME) for words in ("", "find", "find it", "find", " ")
    ]
    assert np.array_equal(found[1], found[3])
    assert np.array_equal(found[0], found[4])  # white space is no instruction
    assert (np.abs(np.diff(found[:3], axis=0)) > 1e-4).all()


def test_a_model_is_trained_with_the_instructions_of_its_rows(tmp_path):
    _, folder, _ = loaded("ctxl-rerank-v2", tmp_path)
    run = tiny.results()
    trained = []
    for instructions in ("find", "read and write"):
        own = {"template": "ctxl-rerank-v2", "instruction_field": "instruction"}
        model = ld.MaxP(folder, training=ld.TrainingArgs(learning_rates={"": 1e-2}), **own, **READING)
        trained.append(model.fit(run.assign(instruction=instructions), QRELS).history["loss"].iloc[-1])
    constant = ld.MaxP(folder, template="ctxl-rerank-v2", instruction="find", training=model.training, **READING)
    assert constant.fit(run, QRELS).history["loss"].iloc[-1] == trained[0] != trained[1]


def test_windows_leave_room_for_an_instruction_and_longer_ones_are_refused(tmp_path):
    _, folder, _ = loaded("ctxl-rerank-v2", tmp_path)
    own, frame = {"template": "ctxl-rerank-v2", "device": "cpu"}, tiny.frame(["old dog"], [" ".join(["cat dog"] * 600)])
    short, long = "cat dog " * 100, "cat dog " * 200
    for given in (short, long):
        model = ld.LongP(folder, instruction=given, **own)
        model(frame)
        assert 1024 - 32 < model.coverage.longest_input <= 1024
    for queries in (12, None):
        with pytest.raises(ValueError, match="instruction"):
            _ = ld.LongP(folder, instruction="cat dog " * 600, max_query_len=queries, **own).model
    column = ld.LongP(folder, instruction_field="instruction", **own)
    column(frame.assign(instruction=short))
    assert column.coverage.longest_input <= 1024
    with pytest.raises(ValueError, match="instruction"):
        column(frame.assign(instruction=long))


def test_instructions_without_effect_are_refused(tmp_path):
    _, folder, _ = loaded("zerank-2", tmp_path)
    for given in ({"instruction": "find"}, {"instruction_field": "instruction"}):
        for checkpoint, template in ((folder, "zerank-2"), (tiny.encoder(), None)):
            with pytest.raises(ValueError, match="instruction"):
                _ = ld.MaxP(checkpoint, template=template, **given, **READING).model
        with pytest.raises(ValueError, match="instruction"):
            ld.MaxP(ld.PairScorer(lambda queries, texts: [0.0] * len(texts)), **given)
    with pytest.raises(ValueError, match="'instruction'"):
        ld.MaxP(folder, template="ctxl-rerank-v2", instruction_field="instruction", device="cpu")(FRAME)


BEFORE_TEXT = {
    "{instruction}{text}\n{query}?": "{instruction}: ",
    "Q: {query}\n{instruction}{text}": "{instruction} ",
    "Q: {query}\n{instruction}:{text}": "{instruction}",
    "{instruction}\n{text}\n{query}?": "so {instruction}",
    "{query}\n{instruction} Text: {text}": "so {instruction}",
}


@pytest.mark.parametrize("string", BEFORE_TEXT)
@pytest.mark.parametrize("instruction", ["", "find it", "find it."])
def test_an_instruction_before_the_text_is_read_as_in_the_whole_string(instruction, string, tmp_path):
    tokenizer, template = tiny_long.byte_tokenizer(), ld.Template(string, instructed=BEFORE_TEXT[string])
    _, folder = tiny_answers.checkpoint(tmp_path, "qwen3", tokenizer, max_position_embeddings=1024)
    model = ld.LongP(folder, template=template, instruction=instruction, device="cpu").model
    (window,) = model.read(["old dog"], [SHORT])[0].windows
    assert window.ids.tolist() == encode(tokenizer, template.fill("old dog", SHORT, instruction))


def test_plain_texts_are_ranked_with_the_instruction_of_all_queries(tmp_path):
    _, folder, _ = loaded("ctxl-rerank-v2", tmp_path)
    own = {"template": "ctxl-rerank-v2", "instruction": "find", "instruction_field": "wish", **READING}
    reranker, query = ld.MaxP(folder, **own), "old dog"
    found = reranker.rank(query, [SHORT, LONG])
    frame = tiny.frame([query], [SHORT, LONG]).assign(wish="find")
    np.testing.assert_allclose(found.sort_values("number")["score"], scores(reranker, frame), atol=1e-5)
    assert "wish" not in found


DOCUMENT_FIRST = (
    "{% macro of(role) %}{{ messages | selectattr('role', 'eq', role) | map(attribute='content') | first }}"
    "{% endmacro %}document: {{ of('document') }}\nquery: {{ of('query') }}"
    "{% if messages[0].role == 'system' %} {{ of('system') }}{% endif %} ??"
)
"""A chat template as ctxl-rerank-v2 has one: without a message of the system, its words vanish."""

SYSTEM_FIRST = "{% for message in messages %}{{ message['content'] }}\n{% endfor %}{# 'system' 'query' 'document' #}"
"""The words of the system stand right before the query."""


@pytest.mark.parametrize("chat", [tiny_answers.ROLES, DOCUMENT_FIRST, SYSTEM_FIRST])
@pytest.mark.parametrize("prompt", [None, "find a plant"])
def test_a_chat_template_with_roles_reads_an_instruction_as_the_message_of_the_system(prompt, chat, tmp_path):
    """As sentence-transformers does with a prompt."""
    library = pytest.importorskip("sentence_transformers")
    tokenizer, stored = tiny_answers.tokenizer(chat=chat), str(tmp_path / "stored")
    _, folder = tiny_answers.checkpoint(tmp_path / "bare", "qwen3", tokenizer)
    model = library.CrossEncoder(folder, device="cpu")
    if prompt is not None:
        model.prompts["search"], model.default_prompt_name = prompt, "search"
    model.save_pretrained(stored)
    pairs = list(FRAME[["query", "text"]].itertuples(index=False, name=None))
    reranker = ld.FirstP(stored, instruction="read and write", device="cpu", max_query_len=12)
    options = {"activation_fn": torch.nn.Identity(), "show_progress_bar": False}
    expected = model.predict(pairs, prompt="read and write", **options)
    np.testing.assert_allclose(scores(reranker, FRAME), expected, atol=1e-5)
    reranker.instruction = ""
    np.testing.assert_allclose(scores(reranker, FRAME), model.predict(pairs, **options), atol=1e-5)


# Names.

KNOWN = {
    "ContextualAI/ctxl-rerank-v2-instruct-multilingual-1b": "ctxl-rerank-v2",
    "zeroentropy/zerank-2": "zerank-2",
    "Qwen/Qwen3-Reranker-0.6B": "qwen3-reranker",
    "mixedbread-ai/mxbai-rerank-large-v2": "mxbai-rerank-v2",
    "nvidia/llama-nemotron-rerank-1b-v2": "nemotron-rerank",
    "castorini/monot5-base-msmarco": "monot5",
}


@pytest.mark.parametrize(("name", "copied"), [(name, i % 2 == 1) for i, name in enumerate(KNOWN)])
def test_the_name_of_a_known_checkpoint_suffices(name, copied, tmp_path, monkeypatch):
    """Its name on the hub, or in the configuration of a copy."""
    monkeypatch.chdir(tmp_path)
    path = "copy" if copied else name
    if name.startswith("nvidia"):
        nemotron(tmp_path / path)
    else:
        family = "t5" if name.startswith("castorini") else "qwen3"
        tiny_answers.checkpoint(tmp_path / path, family, tiny_answers.tokenizer(chat=tiny_answers.CHAT))
    if copied:
        tiny.change(tmp_path / path / "config.json", _name_or_path=name)
    reranker = ld.FirstP(path, device="cpu", max_query_len=12)
    expected = scores(ld.FirstP(path, template=KNOWN[name], device="cpu", max_query_len=12), FRAME)
    assert np.array_equal(scores(reranker, FRAME), expected)
    assert np.array_equal(scores(reloaded(reranker, tmp_path / "saved"), FRAME), expected)


def test_the_longest_input_is_that_of_the_card(tmp_path):
    *_, folder = nemotron(tmp_path / "model", max_position_embeddings=131_072)
    assert ld.MaxP(folder, template="nemotron-rerank", **READING).model.backbone.longest_input == 131_072
    tiny.change(tmp_path / "model" / "config.json", _name_or_path="nvidia/llama-nemotron-rerank-1b-v2")
    known = ld.LongP(folder, device="cpu")
    for model in (known, reloaded(known, tmp_path / "saved")):
        assert (model.model.backbone.longest_input, model.model.reader.longest) == (8192, 8192)


def test_rerankers_with_another_way_of_reading_are_refused(tmp_path):
    *_, unnamed = nemotron(tmp_path / "nemotron")
    with pytest.raises(ValueError, match=r"template=.*nemotron-rerank"):
        _ = ld.MaxP(unnamed, **READING).model
    v3, v35 = (tiny_long.list_encoder(tmp_path / name) for name in ("jina-reranker-v3", "jina-reranker-v3.5"))
    with pytest.raises(ValueError, match=r"ld\.ListReranker"):
        _ = ld.MaxP(v3, **READING).model
    assert ld.ListReranker(v3, max_query_len=12, max_doc_len=64, device="cpu").model.origin == "checkpoint"
    with pytest.raises(ValueError, match=r"v3\.5.* is not supported"):
        _ = ld.ListReranker(v35, device="cpu").model
    AutoConfig.for_model("qwen3_vl").save_pretrained(tmp_path / "vision")
    with pytest.raises(ValueError, match=r"qwen3_vl.*images"):
        _ = ld.MaxP(tmp_path / "vision", **READING).model


# Training, truncation, other heads.


@pytest.mark.parametrize(("name", "cls"), zip(FAMILIES, (ld.MaxP, ld.PARADE, ld.KMaxP, ld.MaxP), strict=True))
def test_training_changes_the_weights(name, cls, tmp_path):
    _, folder, _ = loaded(name, tmp_path)
    model = cls(folder, template=name, training=ld.TrainingArgs(learning_rates={"": 1e-2}), **READING)
    before = scores(model, FRAME)
    assert np.abs(scores(model.fit(tiny.results(), QRELS), FRAME) - before).max() > 1e-2


@pytest.mark.parametrize("name", FAMILIES)
def test_long_queries_and_texts_are_cut_and_the_words_around_them_are_not(name, tmp_path):
    """The text is cut also if it comes first, and then the query is read after it."""
    model, folder, tokenizer = loaded(name, tmp_path)
    words = " ".join(tiny.WORDS)
    frame = tiny.frame([words, words + " rain"], [words])
    reranker = ld.LongP(folder, template=name, max_query_len=5, max_doc_len=7, device="cpu")
    read = " ".join(tiny.WORDS[:7])
    expected = FAMILIES[name][0](model, tokenizer, " ".join(tiny.WORDS[:5]), [read]).repeat(2)
    np.testing.assert_allclose(scores(reranker, frame), expected, atol=1e-5)
    assert reranker.coverage.tokens_read == 2 * 7
    assert reranker.coverage.query_tokens_read == 2 * 5


@pytest.mark.parametrize("cls", [ld.CEDR, ld.NeuralModel1])
def test_heads_over_tokens_find_those_of_query_and_text_in_either_order(cls, tmp_path):
    _, folder, _ = loaded("ctxl-rerank-v2", tmp_path)
    reranker = cls(folder, template="ctxl-rerank-v2", window_size=20, max_query_len=12, device="cpu")
    pair = reranker.model.read(["old dog"], ["the cat. and the dog!"])[0]
    (window,), words = pair.windows, reranker.model.tokenizer.convert_ids_to_tokens
    assert words(window.ids[slice(*window.query)]) == [" old", " dog"]
    assert words(window.ids[slice(*window.content)]) == [" the", " cat", ".", " and", " the", " dog", "!\n"]
    assert_independent(reranker, FRAME)


@pytest.mark.parametrize("name", FAMILIES)
def test_windows_leave_room_for_the_words_of_the_template(name, tmp_path):
    tokenizer = tiny_answers.tokenizer()
    _, folder = tiny_answers.checkpoint(tmp_path, FAMILIES[name][1], tokenizer, max_position_embeddings=160)
    reranker = ld.LongP(folder, template=name, max_query_len=12, device="cpu")
    reranker(tiny.frame([" ".join(tiny.WORDS)], [" ".join(tiny.WORDS * 3)]))
    assert reranker.coverage.longest_input in (159, 160)  # a line break has room, and may be joined


# Architectures that transformers loads with remote code only.


def change(folder, **values):
    """Change the configuration of a checkpoint to that of its authors."""
    tiny.change(Path(folder, "config.json"), auto_map={"AutoModel": "modeling.Model"}, **values)
    return folder


def nemotron(folder, pooling="avg", **changes):
    """A random `LlamaBidirectionalForSequenceClassification`, its tokenizer and its folder."""
    tokenizer = tiny_long.byte_tokenizer(begin=True)
    tokenizer.add_tokens([":old", ":the", ":a"])  # Llama's joins colons to words
    model, folder = tiny_answers.checkpoint(folder, "llama", tokenizer, labels=1, max_position_embeddings=1024)
    kind = {"model_type": "llama_bidirec", "architectures": ["LlamaBidirectionalForSequenceClassification"]}
    return model, tokenizer, change(folder, **{**kind, "pooling": pooling, "temperature": 0.5, **changes})


def bidirectional(model, tokenizer, query, text, pooling):
    """`llama_bidirectional_model.py`: no causal mask, pooled states, and a temperature."""
    ids = torch.tensor([tokenizer(f"question:{query} \n \n passage:{text}")["input_ids"]])
    everything = torch.zeros(1, 1, ids.shape[1], ids.shape[1])  # added to the logits of attention
    with torch.no_grad():
        states = model.model(input_ids=ids, attention_mask=everything).last_hidden_state[0]
        pooled = {"avg": states.mean(0), "cls": states[0], "last": states[-1]}[pooling]
        return (model.score(pooled) / 0.5).item()


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
@pytest.mark.parametrize("pooling", ["avg", "cls", "last"])
def test_a_llama_without_a_causal_mask_has_the_published_scores(pooling, implementation, tmp_path):
    model, tokenizer, folder = nemotron(tmp_path / "model", pooling)
    expected = [bidirectional(model, tokenizer, row.query, row.text, pooling) for row in FRAME.itertuples()]
    own = {"template": "nemotron-rerank", "max_query_len": 12, "device": "cpu"}
    reranker = ld.LongP(folder, attn_implementation=implementation, **own)
    np.testing.assert_allclose(scores(reranker, FRAME), expected, atol=1e-5)
    np.testing.assert_allclose(scores(reloaded(reranker, tmp_path / "saved"), FRAME), expected, atol=1e-5)
    assert_independent(reranker, FRAME)
    for title, fields in (("", {}), ("the long river\n", {"text_field": ("title", "text"), "repeat": "title"})):
        windows = ld.MaxP(folder, template="nemotron-rerank", explain=True, **READING, **fields)(FRAME)
        for row in windows.itertuples():
            texts = [row.text[start:end].strip() for start, end in row.window_spans]
            if not title:  # later windows begin with the space before their first word
                texts = [texts[0], *(f" {text}" for text in texts[1:])]
            best = max(bidirectional(model, tokenizer, row.query, title + text, pooling) for text in texts)
            assert row.score == pytest.approx(best, abs=1e-5)


def gte(folder, **changes):
    """A random `NewForSequenceClassification` with its published names of weights: these, its tokenizer and folder."""
    tokenizer = tiny.tokenizer(double_separator=True, segments=False)
    size, width, layers = 32, 64, 2
    shapes = {
        "new.embeddings.word_embeddings.weight": (len(tokenizer), size),
        "new.embeddings.token_type_embeddings.weight": (1, size),
        **{f"new.embeddings.LayerNorm.{kind}": (size,) for kind in ("weight", "bias")},
        **{"new.pooler.dense.weight": (size, size), "new.pooler.dense.bias": (size,)},
        **{"classifier.weight": (1, size), "classifier.bias": (1,)},
    }
    for layer in range(layers):
        at = f"new.encoder.layer.{layer}"
        shapes |= {f"{at}.attention.qkv_proj.weight": (3 * size, size), f"{at}.attention.qkv_proj.bias": (3 * size,)}
        shapes |= {f"{at}.attention.o_proj.weight": (size, size), f"{at}.attention.o_proj.bias": (size,)}
        shapes |= {f"{at}.mlp.up_gate_proj.weight": (2 * width, size), f"{at}.mlp.down_proj.weight": (size, width)}
        shapes |= {f"{at}.mlp.down_proj.bias": (size,)}
        shapes |= {f"{at}.{norm}.{kind}": (size,) for norm in ("attn_ln", "mlp_ln") for kind in ("weight", "bias")}
    generator = torch.Generator().manual_seed(0)
    weights = {name: torch.randn(shape, generator=generator) * 0.3 for name, shape in shapes.items()}
    tokenizer.save_pretrained(folder)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    config = {
        **{"model_type": "new", "architectures": ["NewForSequenceClassification"], "id2label": {"0": "LABEL_0"}},
        **{"vocab_size": len(tokenizer), "hidden_size": size, "num_hidden_layers": layers, "num_attention_heads": 4},
        **{"intermediate_size": width, "hidden_act": "gelu", "type_vocab_size": 1, "layer_norm_eps": 1e-12},
        **{"max_position_embeddings": 512, "pad_token_id": 0, "position_embedding_type": "rope", "rope_theta": 500.0},
        **{"rope_scaling": {"factor": 8.0, "type": "ntk"}, "layer_norm_type": "layer_norm", "pack_qkv": True},
        **{"logn_attention_scale": False, "label2id": {"LABEL_0": 0}},
    }
    (folder / "config.json").write_text(json.dumps({**config, **changes}))
    return weights, tokenizer, str(folder)


def new_model(weights, tokenizer, query, text, scaling):
    """`modeling.py` of Alibaba-NLP/new-impl, step by step."""
    ids, functional = torch.tensor(tokenizer(query, text)["input_ids"]), torch.nn.functional

    def linear(x, name):
        return functional.linear(x, weights[f"{name}.weight"], weights.get(f"{name}.bias"))

    def norm(x, name):
        return functional.layer_norm(x, (32,), weights[f"{name}.weight"], weights[f"{name}.bias"], 1e-12)

    inverse = 1 / (500.0 * (scaling or 1)) ** (torch.arange(0, 8, 2) / 8) / (scaling or 1) ** (2 / 8)
    angles = torch.outer(torch.arange(len(ids)).float(), inverse).repeat(1, 2)  # (T, 8)

    def rotated(x):  # (4, T, 8)
        turned = torch.cat([-x[..., 4:], x[..., :4]], -1)
        return x * angles.cos() + turned * angles.sin()

    words = weights["new.embeddings.word_embeddings.weight"][ids]
    states = norm(words + weights["new.embeddings.token_type_embeddings.weight"][0], "new.embeddings.LayerNorm")
    for layer in range(2):
        at = f"new.encoder.layer.{layer}"
        heads = linear(states, f"{at}.attention.qkv_proj").view(len(ids), 3, 4, 8).permute(1, 2, 0, 3)
        attention = (rotated(heads[0]) @ rotated(heads[1]).transpose(1, 2) / 8**0.5).softmax(-1) @ heads[2]
        attended = linear(attention.transpose(0, 1).flatten(1), f"{at}.attention.o_proj")
        states = norm(states + attended, f"{at}.attn_ln")
        up, gate = linear(states, f"{at}.mlp.up_gate_proj").chunk(2, -1)
        states = norm(states + linear(functional.gelu(gate) * up, f"{at}.mlp.down_proj"), f"{at}.mlp_ln")
    return linear(linear(states[0], "new.pooler.dense").tanh(), "classifier").item()


@pytest.mark.parametrize("factor", [8.0, None])
def test_gte_multilingual_has_the_published_scores_without_its_code(factor, tmp_path):
    scaling = None if factor is None else {"factor": factor, "type": "ntk"}
    weights, tokenizer, folder = gte(tmp_path, rope_scaling=scaling, auto_map={"AutoModel": "x--modeling.NewModel"})
    expected = [new_model(weights, tokenizer, row.query, row.text, factor) for row in FRAME.itertuples()]
    reranker = ld.LongP(folder, max_query_len=12, device="cpu")
    np.testing.assert_allclose(scores(reranker, FRAME), expected, atol=1e-5)
    np.testing.assert_allclose(scores(reloaded(reranker, tmp_path / "saved"), FRAME), expected, atol=1e-5)
    assert_independent(reranker, FRAME)
    titled = ld.MaxP(folder, text_field=("title", "text"), repeat="title", explain=True, **READING)(FRAME)
    for row in titled.itertuples():
        texts = [f"{row.title} {row.text[start:end]}" for start, end in row.window_spans]
        best = max(new_model(weights, tokenizer, row.query, text, factor) for text in texts)
        assert row.score == pytest.approx(best, abs=1e-5)


@pytest.mark.parametrize("make", [nemotron, gte])
def test_published_architectures_load_without_a_warning_of_their_type(make, tmp_path, caplog, monkeypatch):
    *_, folder = make(tmp_path)
    monkeypatch.setattr(logging.getLogger("transformers"), "propagate", True)
    _ = ld.MaxP(folder, template="nemotron-rerank" if make is nemotron else None, **READING).model
    assert "model of type" not in caplog.text


@pytest.mark.parametrize("make", [nemotron, gte])
def test_published_architectures_learn(make, tmp_path):
    *_, folder = make(tmp_path)
    template = {"template": "nemotron-rerank"} if make is nemotron else {}
    model = ld.PARADE(folder, training=ld.TrainingArgs(learning_rates={"": 1e-2}), **template, **READING)
    before = scores(model, FRAME)
    assert np.abs(scores(model.fit(tiny.results(), QRELS), FRAME) - before).max() > 1e-2


@pytest.mark.parametrize(
    ("make", "changes"),
    [
        (nemotron, {"pooling": "weighted_avg"}),
        (gte, {"logn_attention_scale": True}),
        (gte, {"layer_norm_type": "rms_norm"}),
        (gte, {"rope_scaling": {"factor": 8.0, "type": "ntk", "mixed_b": 0.6}}),
    ],
)
def test_other_variants_are_refused_with_the_cure(make, changes, tmp_path):
    *_, folder = make(tmp_path, **changes)
    with pytest.raises(ValueError, match=f"{next(iter(changes))}.*trust_remote_code=True"):
        _ = ld.MaxP(folder, template="nemotron-rerank" if make is nemotron else None, **READING).model
