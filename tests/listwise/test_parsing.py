# ruff: noqa: RUF001
"""What counts as a ranking in a reply."""

from __future__ import annotations

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pyterrier_longdoc.listwise.parsing import parse_ranking

from ..support.llm import HARD


@pytest.mark.parametrize(
    ("reply", "order", "missing", "duplicates", "unknown"),
    [
        ("[3] > [3] > [9] > [0] > [2]", [2, 1, 0, 3, 4], 3, 1, 2),  # models.md section 8
        ("[3]", [2, 0, 1, 3, 4], 4, 0, 0),
        ("<think>[1]?</think> <answer>[3]</answer>", [2, 0, 1, 3, 4], 4, 0, 0),
        ("[3]\nIt is the only one about cats.", [2, 0, 1, 3, 4], 4, 0, 0),
        ('{"best": [3]}', [2, 0, 1, 3, 4], 4, 0, 0),
        ('{"ranking": [4, 2]}', [3, 1, 0, 2, 4], 3, 0, 0),
        ("[2] > [1] > [", [1, 0, 2, 3, 4], 3, 0, 0),  # cut off
        ("[2, 2, 1, 7]", [1, 0, 2, 3, 4], 3, 1, 1),
        ("[2] > [1] > [3", [1, 0, 2, 3, 4], 3, 0, 0),
        ("[4] > [" + "1" * 5000 + "] > [3] > [2]", [3, 2, 1, 0, 4], 2, 0, 1),
    ],
)
def test_incomplete_rankings_are_counted(reply, order, missing, duplicates, unknown):
    parsed = parse_ranking(reply, 5)
    assert (parsed.order, parsed.missing, parsed.duplicates, parsed.unknown) == (order, missing, duplicates, unknown)


@pytest.mark.parametrize(
    "reply",
    [
        "",
        "I can't rank these 5 passages (policy 3.2).",
        "I'm sorry, but I cannot compare [1] and [2] for you.",
        "As an AI, see [1][2] and [3, 4].",
        "Under rule [4] I must decline.",
        "I will not write [2] > [1] or anything like it.",
        "2 > 1 > 3 > 5 > 4",
        "Compare" + " " * 50 + "[1, 2, 3]",
        "Извините, 5 документов [1] и [2] я не сравниваю.",
        "<think>[2] > [1] > [3] > [4] > [5]",
        "<think>[2] > [1]</think>",
        "[0] > [9] > [77]",
        "[-1] > [-2]",
        "[1.5] > [2.5]",
        "[a] > [b]",
        "[1]\n[2] is something I refuse to judge",
        "[1] [2] [3] are alike, so are [4] [5]",
        "ERROR::other",
        '{"why": "rule [4]", "ranking": []}',
        '{"least_to_most": [4, 2, 1, 3, 5]}',
        '{"scores": [4, 2, 1, 3, 5]}',
        '{"irrelevant": [4, 2]}',
        '{"irrelevant": "[4] > [2] > [1] > [3] > [5]"}',
        '{"ranking": [4, 2, 1, 3, 5], "order": "least relevant first"}',
        "<answer></answer>",
        "From least to most relevant: [3] > [1] > [2] > [5] > [4]",
        "[3] > [1] > [2] > [5] > [4] (the **least** relevant documents first)",
        "From the worst to the best:\n1. [3]\n2. [1]\n3. [2]",
        "In ascending order of relevance: [3] > [1] > [2] > [5] > [4]",
        "Least relevant \u2192 most relevant: [3] > [1] > [2] > [5] > [4]",
        "Here they are, starting with the least relevant: [3] > [1] > [2] > [5] > [4]",
        "Here they are, ending with the most relevant: [3] > [1] > [2] > [5] > [4]",
        "Ranked bottom to top: [3] > [1] > [2] > [5] > [4]",
        "Ranked (most relevant last): [3] > [1] > [2] > [5] > [4]",
        "The most relevant passage is last: [3] > [1] > [2] > [5] > [4]",
        "The **best** one is at the bottom: [3] > [1] > [2] > [5] > [4]",
        "In reverse order: [3] > [1] > [2] > [5] > [4]",
        "[3] > [1] > [2] > [5] > [4] (least relevant at the start)",
        "The least useful document is first:\n[3] > [1] > [2] > [5] > [4]",
        "[]",
    ],
)
def test_other_replies_are_not_a_ranking(reply):
    assert parse_ranking(reply, 5) is None


REFUSALS = (
    "I can't answer in the form [2] > [1]",
    "I'm sorry, but I cannot put these documents in order, not even as [2] > [1].",
    'I can’t rank these documents in the format "[2] > [1]" because neither is about the query.',
    "As an AI language model, I am unable to write [1] > [2] > [3] for texts like these.",
    "I won't answer like this: [2] > [1]",
    "I must respectfully decline to give a ranking such as\n[2] > [1]",
    "I'm not able to rank them. You asked for this form:\n\n[2] > [1]",
    "I cannot say that [3], then [1] and [2] is right.",
    "I don't rank [3], then [1] and [2], for moral reasons.",
    "We do not feel comfortable ranking these. The format would be:\n[2] > [1]",
    "Unable to comply. Expected answer: [2] > [1]",
    "The requested form `[2] > [1]` does not fit documents that say the same.",
    "Neither [1] > [2] nor [2] > [1] would be right.",
    "Both are equally relevant, so **[1] > [2]** would be arbitrary.",
    "There is no basis for [2] > [1] here.",
    "I refuse to order documents [1], [2] and [3] by relevance.",
    "<think>They want [2] > [1].</think>I can't help with that, or with [2] > [1].",
    "我无法以 [2] > [1] 的形式回答。",
    "Я не могу ответить в виде [2] > [1].",
)


@pytest.mark.parametrize("n", [2, 3, 4, 20])
@pytest.mark.parametrize("reply", REFUSALS)
def test_a_refusal_that_quotes_the_request_is_not_a_ranking(reply, n):
    assert parse_ranking(reply, n) is None


CHATTY = {
    "Here is the ranking: [2] > [1]": [2, 1],
    "[2] > [1]. Document 2 names the breed, document 1 does not.": [2, 1],
    "[2] > [1] because only the second one mentions rain.": [2, 1],
    "Certainly. My order is:\n\n**[2] > [1]**\n\nI can't say more than that.": [2, 1],
    "Document 1 can't be about dogs at all.\n\n[2] > [1]": [2, 1],
    "None of them fully answers the query, but here is my best attempt:\n\n[2] > [1]": [2, 1],
    "I cannot find the exact phrase anywhere, so by topic: [2] > [1]": [2, 1],
    "I can't guarantee accuracy, but here's my ranking: [2] > [1]": [2, 1],
    "I cannot decide between them with certainty, but my best attempt is:\n\n[2] > [1]": [2, 1],
    "We can't rule out [1]. Ranking: [2] > [1]": [2, 1],
    "Unable to find an exact match, I rank by topic: [3] > [1] > [2]": [3, 1, 2],
    "**Ranking:** [2] > [1]": [2, 1],
    "<answer>[2] > [1]</answer>": [2, 1],
    "以下是排序：[2] > [1]": [2, 1],
    "Sure! The ranked passages are:\n[2] > [3] > [1]": [2, 3, 1],
    "Ranking (most to least relevant):\n1. [3]\n2. [1]\n3. [2]\n\nLet me know if you need more.": [3, 1, 2],
    "I'd put them as [3] > [1] > [2], because [3] answers the question and [2] cannot.": [3, 1, 2],
    "Die Reihenfolge lautet: [3] > [2] > [1].": [3, 2, 1],
    "Of the four, [4] > [2] > [1] > [3] it is.": [4, 2, 1, 3],
    "Here you go: [4] > [2] > [1] > [3] (document 3 is off topic)": [4, 2, 1, 3],
}


FORMS = (
    "[3] > [1] > [2]",
    "  [3] >\n[1] >\n[2]\n",
    "[3], [1], [2]",
    "[3] [1] [2]",
    "[3][1][2]",
    "[3]\n[1]\n[2]",
    "- [3]\n- [1]\n- [2]",
    "1. [3]\n2. [1]\n3. [2]",
    "Sure, here it is:\n\n1. [3]\n2. [1]\n3. [2]\n\nTell me if you need more.",
    "The order is **[3]** > **[1]** > **[2]**.",
    "[3, 1, 2]",
    '["3", "1", "2"]',
    '["[3]", "[1]", "[2]"]',
    "[\n  3,\n  1,\n  2\n]",
    "```json\n[3, 1, 2]\n```",
    "<think>[1] > [2] > [3]? No.</think>[3] > [1] > [2]",
    "[1] > [2] > [3] it seems, but no.</think>\n[3] > [1] > [2]",
    "<THINKING>hm</THINKING>[3] > [1] > [2]",
    "<think>[1]</think>[1] > [2] > [3]<think>or</think>[3] > [1] > [2]",
    "[3] > [1] > [2]<think>or [1] > [2] > [3]",
    "Written like [2] > [1]:\n[3] > [1] > [2]",
    "[2] > [1]\n[3] > [1] > [2]",
    "Of the three, [3] > [1]; I leave out the other.\n[3] > [1] > [2]",
    "First try: [1] > [2] > [3]. Better: [3] > [1] > [2].",
    "[1], whose number stands far from every other one, is good.\n[3] > [1] > [2]",
    "［３］ > ［１］ > ［２］",
    "【3】 > 【1】 > 【2】",
    "[٣] > [١] > [٢]",
    '{"ranking": [3, 1, 2]}',
    '{"ranking": "[3] > [1] > [2]"}',
    '{"ranking": [3, 1, 2], "reasoning": "because [2] > [1] > [3] is wrong"}',
    '{"reasoning": "because", "Ranked documents": ["3", "1", "2"]}',
    '{"documents": [1, 2, 3], "final_ranking": [3, 1, 2], "ids": [1, 2, 3]}',
    '{"documents": [1, 2, 3], "re-ordered ids": [3, 1, 2]}',
    '{"answer": {"order": [3, 1, 2]}}',
    'Irrelevant: {"irrelevant": [2]}, so {"order": [3, 1, 2]}',
    'As JSON:\n```json\n{\n  "order": [\n    3,\n    1,\n    2\n  ]\n}\n```',
    "It is not [1].\n<answer>[3], [1], [2]</answer>",
    "<ranking>[1] > [2] > [3]</ranking> Or: <answer>[3] > [1] > [2]</answer>",
    "Most relevant first (least relevant last): [3] > [1] > [2]",
    "From most to least relevant: [3] > [1] > [2]",
    "Most relevant at the top and least relevant at the bottom: [3] > [1] > [2]",
    "Starting with the most relevant: [3] > [1] > [2]",
    "Not from least to most relevant, but best first: [3] > [1] > [2]",
    "The least relevant passage is the second, and at least the first is clear: [3] > [1] > [2]",
    "The most relevant passage is the last: [3] > [1] > [2]",
    "The best I can do at the end of the day: [3] > [1] > [2]",
)


@pytest.mark.parametrize(("reply", "order"), [*((form, [3, 1, 2]) for form in FORMS), *CHATTY.items()])
def test_a_ranking_is_read_in_any_form_and_within_other_words(reply, order):
    parsed = parse_ranking(reply, len(order))
    assert [position + 1 for position in parsed.order] == order
    assert (parsed.missing, parsed.duplicates, parsed.unknown) == (0, 0, 0)


@settings(max_examples=200, deadline=None)
@given(st.one_of(st.text(), st.lists(HARD).map("".join)), st.integers(0, 30))
def test_a_parsed_ranking_is_a_permutation(reply, n):
    parsed = parse_ranking(reply, n)
    if parsed is None:
        return
    assert sorted(parsed.order) == list(range(n))
    assert 0 <= parsed.missing < n
    named = parsed.order[: n - parsed.missing]
    assert parsed.order[n - parsed.missing :] == sorted(set(range(n)) - set(named))
    # Every document that was named stands in brackets in the reply: digits alone are never a ranking.
    assert re.search(r"[\[［【〔]", reply)


@pytest.mark.slow
@pytest.mark.parametrize(
    "piece",
    [
        "[",
        "{",
        '{"ids": [1]} ',
        "least relevant ",
        "[1]",
        "[1,",
        "[1, 2]",
        "[1] > ",
        "[1]\n",
        " \n",
        "<think>",
        "[1] > [2] x",
    ],
)
def test_a_huge_reply_is_parsed(piece):
    """In quadratic time this would take minutes."""
    parsed = parse_ranking(piece * (300_000 // len(piece)), 20)
    assert parsed is None or sorted(parsed.order) == list(range(20))
