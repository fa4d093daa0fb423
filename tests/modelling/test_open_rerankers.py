"""Open rerankers beside what their authors publish: their prompts, tokenized as they do, and their arithmetic."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
import torch

import pyterrier_longdoc as ld
from pyterrier_longdoc.modelling.templates import TEMPLATES

from ..support import tiny, tiny_answers
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
    """`modeling_zeranker.py`: the query as the system's message; the logit of "Yes" is divided by 5."""
    chats = [[{"role": "system", "content": query}, {"role": "user", "content": text}] for text in texts]
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
    "ctxl-rerank-v2": (ctxl, "qwen3", " "),
    "zerank-2": (zerank, "qwen3", ""),
    "qwen3-reranker": (qwen3, "qwen3", " "),
    "mxbai-rerank-v2": (mxbai, "qwen3", " "),
}
"""Published arithmetic, architecture, and the space before the text in the prompt."""

INSTRUCTED = [name for name in FAMILIES if TEMPLATES[name].takes_instruction]


def loaded(name, folder):
    """A random model of the family, its tokenizer and its folder."""
    tokenizer = tiny_answers.tokenizer(chat=tiny_answers.CHAT)
    return (*tiny_answers.checkpoint(folder, FAMILIES[name][1], tokenizer, max_position_embeddings=1024), tokenizer)


def published(name, model, tokenizer, results):
    """The published scores of the windows of each row, which explanations locate."""
    score, _, lead = FAMILIES[name]
    rows = []
    for row in results.itertuples():
        windows = [row.text[start:end].strip() for start, end in row.window_spans]
        if not lead:  # only the first window begins without the space before its first word
            windows = [windows[0], *(f" {window}" for window in windows[1:])]
        if results.attrs.get("titled"):
            windows = [f"{row.title}\n{lead}{window}" for window in windows]
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
        np.testing.assert_allclose(scores(reloaded(reranker, tmp_path / cls.__name__), FRAME), expected, atol=1e-5)


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
    found = [scores(ld.FirstP(folder, instruction=words, **own), FRAME) for words in ("", "find", "find it", "find")]
    assert np.array_equal(found[1], found[3])
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
    column = ld.LongP(folder, instruction_field="instruction", **own)
    column(frame.assign(instruction=short))
    assert column.coverage.longest_input <= 1024
    with pytest.raises(ValueError, match="instruction"):
        column(frame.assign(instruction=long))


def test_instructions_without_effect_are_refused(tmp_path):
    _, folder, _ = loaded("zerank-2", tmp_path)
    for given in ({"instruction": "find"}, {"instruction_field": "instruction"}):
        for checkpoint, template in ((folder, "zerank-2"), (tiny.encoder(), None)):
            with pytest.raises(ValueError, match=r"no \{instruction\}"):
                _ = ld.MaxP(checkpoint, template=template, **given, **READING).model
        with pytest.raises(ValueError, match="instruction"):
            ld.MaxP(ld.PairScorer(lambda queries, texts: [0.0] * len(texts)), **given)
    with pytest.raises(ValueError, match=r"lack the column.* instruction;"):
        ld.MaxP(folder, template="ctxl-rerank-v2", instruction_field="instruction", device="cpu")(FRAME)


@pytest.mark.parametrize("prompt", [None, "find a plant"])
def test_a_chat_template_with_roles_reads_an_instruction_as_the_message_of_the_system(prompt, tmp_path):
    """As sentence-transformers does with a prompt."""
    library = pytest.importorskip("sentence_transformers")
    tokenizer, stored = tiny_answers.tokenizer(chat=tiny_answers.ROLES), str(tmp_path / "stored")
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


# Training, truncation, other heads.


@pytest.mark.parametrize("cls", [ld.MaxP, ld.PARADE, ld.KMaxP])
@pytest.mark.parametrize("name", FAMILIES)
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
