"""Open rerankers beside what their authors publish: their prompts, tokenized as they do, and their arithmetic."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import pyterrier_longdoc as ld

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


def ctxl(model, tokenizer, query, texts):
    """Model card: one string, and the logit of the first word of the vocabulary."""
    task = "Check whether a given document contains information helpful to answer the query."
    prompts = [f"{task}\n<Document> {text}\n<Query> {query} ??" for text in texts]
    return last_logits(model, tokenizer(prompts)["input_ids"])[:, 0]


def zerank(model, tokenizer, query, texts):
    """`modeling_zeranker.py`: the query as the system's message; the logit of "Yes" is divided by 5."""
    chats = [[{"role": "system", "content": query}, {"role": "user", "content": text}] for text in texts]
    prompts = tokenizer.apply_chat_template(chats, add_generation_prompt=True, tokenize=False)
    return last_logits(model, tokenizer(prompts)["input_ids"])[:, encode(tokenizer, "Yes")[0]] / 5


FAMILIES = {"ctxl-rerank-v2": (ctxl, "qwen3", " "), "zerank-2": (zerank, "qwen3", "")}
"""Published arithmetic, architecture, and the space before the text in the prompt."""


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
        rows.append(score(model, tokenizer, row.query, windows).numpy())
    return rows


AGGREGATIONS = {
    "FirstP": (ld.FirstP, {}, lambda s: s[0]),
    "MaxP": (ld.MaxP, {}, max),
    "KMaxP": (ld.KMaxP, {"k": 2}, lambda s: np.sort(s)[-2:].mean()),
    "PARADE": (ld.PARADE, {"aggregation": "avg"}, np.mean),
}


@pytest.mark.parametrize("titled", [False, True])
@pytest.mark.parametrize("name", FAMILIES)
def test_windows_have_the_published_scores(name, titled, tmp_path):
    model, folder, tokenizer = loaded(name, tmp_path / "model")
    fields = {"text_field": ("title", "text"), "repeat": "title"} if titled else {}
    for cls, arguments, combine in AGGREGATIONS.values():
        reranker = cls(folder, template=name, explain=True, **READING, **fields, **arguments)
        results = reranker(FRAME)
        results.attrs["titled"] = titled
        windows = published(name, model, tokenizer, results)
        assert cls is ld.FirstP or max(map(len, windows)) > 4 > min(map(len, windows))
        expected = [combine(row) for row in windows]
        np.testing.assert_allclose(results["score"], expected, atol=1e-5)
        np.testing.assert_allclose(
            np.concatenate(results["window_scores"].tolist()), np.concatenate(windows), atol=1e-5
        )
        np.testing.assert_allclose(scores(reloaded(reranker, tmp_path / cls.__name__), FRAME), expected, atol=1e-5)


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
    _, folder = tiny_answers.checkpoint(tmp_path, FAMILIES[name][1], tokenizer, max_position_embeddings=64)
    reranker = ld.LongP(folder, template=name, max_query_len=12, device="cpu")
    reranker(tiny.frame([" ".join(tiny.WORDS)], [" ".join(tiny.WORDS)]))
    assert reranker.coverage.longest_input in (63, 64)  # a line break has room, and may be joined
