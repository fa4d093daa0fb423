# ruff: noqa: RUF001
"""What goes into a prompt, and how it is made to fit."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pyterrier_longdoc.listwise.prompt_budget import Tokens, fair_limit
from pyterrier_longdoc.listwise.prompts import ListwisePrompt, clean

from ..support import tiny
from ..support.llm import HARD


@given(st.one_of(st.text(), st.lists(HARD).map("".join)))
def test_a_cleaned_text_contains_no_identifier(text):
    cleaned = clean(text)
    assert not re.search(r"[\[［【〔]\s*\d[\d\s,]*[\]］】〕]", cleaned)
    assert cleaned == " ".join(cleaned.split())
    assert clean(cleaned) == cleaned


def test_chat_turns_alternate():
    messages = ListwisePrompt()("old\ndog [1]", ["a [2] > [1]", "b"])
    assert [message["role"] for message in messages] == ["system", *["user", "assistant"] * 3, "user"]
    assert [messages[3]["content"], messages[5]["content"]] == ["[1] a (2) > (1)", "[2] b"]
    for message in (messages[1], messages[-1]):
        assert "Query: old dog (1)" in message["content"]
        assert "2 documents" in message["content"]


def test_braces_in_texts_are_not_filled_in():
    system, user = ListwisePrompt("single")("{n} {query}", ["{number} {text} %s", "}{"])
    assert (system["role"], user["role"]) == ("system", "user")
    assert "Query: {n} {query}" in user["content"]
    assert "\n[1] {number} {text} %s\n[2] }{\n" in user["content"]
    assert [message["role"] for message in ListwisePrompt("single", system="")("q", ["a"])] == ["user"]


@pytest.mark.parametrize(
    ("arguments", "name"),
    [
        ({"document": "{text}"}, "document"),
        ({"document": "[{number}] {text} {title}"}, "document"),
        ({"closing": "{"}, "closing"),
        ({"closing": None}, "closing"),
        ({"opening": "", "closing": "Order {n}"}, "closing"),
    ],
)
def test_wrong_templates_are_refused_by_name(arguments, name):
    with pytest.raises(ValueError, match=f"{name}="):
        ListwisePrompt(**arguments)


TOKENIZERS = {
    "none": None,
    "huggingface": tiny.tokenizer(),
    "function": lambda text: len(re.findall(r"\S+", text)),
}


@pytest.mark.parametrize("kind", TOKENIZERS)
def test_a_truncated_text_has_exactly_the_tokens_that_fit(kind):
    tokens = Tokens(TOKENIZERS[kind])
    text = "the old cat, the dog and the river. " * 50
    for limit in (1, 7, 100):
        cut = tokens.truncate(text, limit)
        assert text.startswith(cut)
        assert tokens.count(cut) == limit
    assert tokens.truncate(text, 10**6) == text
    assert tokens.truncate("", 1) == ""


@given(st.lists(st.integers(0, 500), min_size=1, max_size=20), st.integers(20, 3000))
def test_a_fair_limit_uses_the_whole_budget(lengths, budget):
    limit = fair_limit(lengths, budget)
    assert sum(min(length, limit) for length in lengths) <= budget
    if max(lengths) > limit:
        assert sum(min(length, limit + 1) for length in lengths) > budget
