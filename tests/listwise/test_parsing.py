# ruff: noqa: RUF001
"""What counts as a ranking in a reply."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pyterrier_longdoc.listwise.parsing import final_answer, parse_ranking

from ..support.llm import HARD

CHAIN = "[3] > [1] > [4] > [2]"
NOTES = "[1] is about dogs.\n[2] is about cats.\n[3] is about both.\n[4] is off topic.\n\n"
RANKINGS = [
    # Chains.
    CHAIN, "[3]>[1]>[4]>[2].", "[3] >\n[1] >\n[4] >\n[2]\n", "[3], [1], [4], [2]", "[3][1][4][2]",
    "[3] → [1] → [4] → [2]", "[3] >= [1] = [4] > [2]", f"**{CHAIN}**", "**[3]** > **[1]** > **[4]** > **[2]**",
    f"```text\n{CHAIN}\n```", f"$\\boxed{{{CHAIN}}}$", r"\[3\] \> \[1\] \> \[4\] \> \[2\]",
    "［３］ > ［１］ > ［４］ > ［２］", "【3】 > 【1】 > 【4】 > 【2】",
    "[3] (both) > [1] (dogs, see 2) > [4] > [2] (cats)", "Document [3] > Document [1] > Document [4] > Document [2]",
    f"Sure! The ranking of the 4 documents is {CHAIN}, because [3] answers it.\n\nLet me know if you need more.",
    f"{NOTES}Ranking: {CHAIN}", f"[2] > [1] is the form:\n{CHAIN}", f"First: [1] > [2] > [3] > [4]. Better: {CHAIN}",
    f"{CHAIN}\n\nReasons:\n{NOTES}", f"{CHAIN}\n\nThe best are [3] and [1].",
    # Lines.
    "[3]\n[1]\n[4]\n[2]", "- [3]\n- [1]\n\n- [4]\n- [2]", "1) [3]\n2) [1]\n3) [4]\n4) [2]",
    "(1) [3]\n(2) [1]\n(3) [4]\n(4) [2]", "| 1 | [3] |\n| 2 | [1] |\n| 3 | [4] |\n| 4 | [2] |",
    "[3]: both\n[1]: dogs, as [2]\n[4]: none\n[2]: cats",
    f"{NOTES}**Final**\n1. **[3]** Both\n2. **[1]** Dogs, like [2]\n3. **[4]** None\n4. **[2]** Cats\n\nBye.",
    "1. Document [3]: both\n2. Document [1]: dogs\n3. Document [4]: none\n4. Document [2]: cats",
    "1. [3] Both\n   It is better than [2].\n2. [1] Dogs\n   - bark\n3. [4] None\n4. [2] Cats", "3 > 1 > 4 > 2",
    "3\n1\n4\n2", "The order is:\n3.\n1.\n4.\n2.",
    # JSON.
    "[3, 1, 4, 2]", '["[3]", "[1]", "[4]", "[2]"]', "```json\n[\n  3,\n  1,\n  4,\n  2\n]\n```",
    "{'ranking': [3, 1, 4, 2]}", '{"why": ["[2] barks", "1 more"], "ranking": [3, 1, 4, 2], "scores": [4, 3, 2, 1]}',
    '{"ranking": ["3", "1", "4", "2"]}',
    'As JSON: {"why": "since [1] > [2] > [3] > [4]", "order": ["[3]", "[1]", "[4]", "[2]"]}',
    f'{{"ranking": "{CHAIN}"}}',
    "Given: [1] > [2] > [3] > [4]\n\n[3, 1, 4, 2]",
    "[1] is about A > B\n[2] b\n[3] c\n[4] d\n\nFinal:\n[3]\n[1]\n[4]\n[2]",
    # After reasoning, in an answer.
    f"<think>[1] > [2] > [3] > [4]</think>{CHAIN}", f"[1] > [2] > [3] > [4], no.</think>\n\n{CHAIN}",
    f"[1] > [2] > [3] > [4]\n<answer>{CHAIN}</answer>\n[4] > [3] > [2] > [1]",
]  # fmt: skip


@pytest.mark.parametrize("reply", RANKINGS)
def test_a_ranking_is_read_in_any_form(reply):
    parsed = parse_ranking(reply, 4)
    assert ([position + 1 for position in parsed.order], parsed.missing, parsed.unknown) == ([3, 1, 4, 2], 0, 0)


@pytest.mark.parametrize(
    ("reply", "order", "counts"),
    [
        ("[3] > [3] > [9] > [0] > [2]", [3, 2, 1, 4], (2, 1, 2)),
        ("[4, 2, 2, 7]", [4, 2, 1, 3], (2, 1, 1)),
        ("[4] > [" + "1" * 5000 + "] > [3]", [4, 3, 1, 2], (2, 0, 1)),
        ("[3] > [2] > [", [3, 2, 1, 4], (2, 0, 0)),
        ("1. [3]\n2. [2]\n3. [1", [3, 2, 1, 4], (2, 0, 0)),
        ("[3] > [4] > [1]. I left out [2].", [3, 4, 1, 2], (1, 0, 0)),
        ("[3]\nIt is the only one about cats.", [3, 1, 2, 4], (3, 0, 0)),
    ],
)
def test_incomplete_rankings_are_counted(reply, order, counts):
    parsed = parse_ranking(reply, 4)
    assert [position + 1 for position in parsed.order] == order
    assert (parsed.missing, parsed.duplicates, parsed.unknown) == counts


@pytest.mark.parametrize(
    "reply",
    [
        "", "[]", "<answer></answer>", "<think>[3] > [1]", "<think>[2] > [1]</think>",
        "I can't rank these 4 passages (policy 3.2).", "I'm sorry, but I cannot compare [1] and [2] for you.",
        "Under rule [4] I must decline.", "[0] > [9]", "[-1] > [-2]", "[1.5] > [2.5]", "[a] > [b]", "[3", "2024",
        '{"1": 0.3, "2": 0.9}', '{"[1]": 0.3, "[2]": 0.9}', '{"scores": [0.3, 0.9]}', '{"ranking": []}',
        '{"ranking": [3, 1,',
        # A form that is not known for the best documents: the rest alone would be another ranking.
        "The best is [3], then [1] > [4] > [2]", "[3] and [1] and [4] and [2]", "[3], [1]: good\n[4], [2]: bad",
        "**[3]**\nIt answers.\n\n**[1]**\nIt does not.\n\n**[4]**\nNo.\n\n**[2]**\nNo.",
    ],
)  # fmt: skip
def test_other_replies_are_unreadable(reply):
    assert parse_ranking(reply, 4) is None


@pytest.mark.parametrize(
    ("reply", "answer"),
    [
        ("<think>a</think>b", "b"), ("a</THINKING>b", "b"), ("a<think>b", "a"), ("<think>a", ""),
        ("<think><answer>a</answer></think>b<answer>c</answer>d<answer>e</answer>f", "e"), ("<answer>a", "a"),
    ],
)  # fmt: skip
def test_the_final_answer_follows_reasoning_and_is_the_last(reply, answer):
    assert final_answer(reply) == answer


@settings(max_examples=200, deadline=None)
@given(st.one_of(st.text(), st.lists(HARD).map("".join)), st.integers(0, 30))
def test_a_parsed_ranking_is_a_permutation(reply, n):
    parsed = parse_ranking(reply, n)
    if parsed is not None:
        assert sorted(parsed.order) == list(range(n))
        assert 0 <= parsed.missing < n
        assert parsed.order[n - parsed.missing :] == sorted(parsed.order[n - parsed.missing :])


@pytest.mark.slow
@pytest.mark.parametrize("start", ["", "[1]", "1", "{"])
@pytest.mark.parametrize(
    "piece", ["[", "{", "}", "[1]", "[1,", "[1] > ", ">", "1\n", "[1] x\n  y\n", "\t", "<think>", "a > "]
)
def test_a_huge_reply_is_parsed(start, piece):
    """In quadratic time this would take minutes."""
    parsed = parse_ranking(start + piece * (300_000 // len(piece)), 20)
    assert parsed is None or sorted(parsed.order) == list(range(20))
