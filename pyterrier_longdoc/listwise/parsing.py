"""Parse rankings in the replies of a model."""

from __future__ import annotations

import json
import re
import unicodedata
from contextlib import suppress
from dataclasses import dataclass

_THINK_OPEN = re.compile(r"<(?:think|thinking|thought|reasoning)>", re.IGNORECASE)
_THINK_CLOSE = re.compile(r"</(?:think|thinking|thought|reasoning)>", re.IGNORECASE)
_ANSWER_OPEN = re.compile(r"<(?:final_)?(?:answer|output|ranking|result)>", re.IGNORECASE)
_ANSWER_CLOSE = re.compile(r"</(?:final_)?(?:answer|output|ranking|result)>", re.IGNORECASE)
_SIGNS = str.maketrans("【】〔〕→≻", "[][]>>")  # noqa: RUF001 - NFKC keeps these
_DECORATION = re.compile(r"```[a-z]*|[*_`\"'\\]")
_LIST_OF_IDS = re.compile(r'\[(?:\d+|"\[?\d+\]?")[,\]]')
_LIST = re.compile(r"\[(\s*\d+(?:\s*,\s*\d+)+\s*)\]")
_ID = re.compile(r"\[\s*(\d+)\s*\]")
_ITEM = re.compile(
    r"^[ \t]*(?:[-•(|>#]+[ \t]*)?(?:\d{1,4}[ \t]*[.):|]+[ \t]*(?:\w+[ \t]+)?)?"
    rf"{_ID.pattern}(?![ \t]*(?:[>,;][ \t]*)?\[)",
    re.MULTILINE,
)
"""The beginning of a line: an id after a bullet, a number and a word at most, and not the beginning of a chain."""
_LINES = re.compile(rf"(?:{_ITEM.pattern}[^\n]*\n+(?:(?!{_ITEM.pattern})[ \t]+\S[^\n]*\n+)*)+", re.MULTILINE)
"""Lines that begin with an id, each with the indented lines below it."""
_BETWEEN = r"(?:[^\w\[\].!?:\n]*(?:[>,;]\s*)?|[^\[\]\n>]*>[^\[\]\n]*)"
"""Between the ids of a chain: punctuation, or anything with a `>`."""
_CHAIN = re.compile(rf"{_ID.pattern}(?:{_BETWEEN}{_ID.pattern})+")
_BARE = re.compile(r"^[ \t]*\d+(?:[ \t]*[>,;][ \t]*\d+)*[ \t]*(?:[.,;][ \t]*)?$", re.MULTILINE)


class IncompleteReplyWarning(UserWarning):
    """Some replies were unreadable or left documents out, and the run continued without them."""


class UnreadableReplyError(ValueError):
    """The reply of the model has no ranking (or grade) after all retries."""


@dataclass(frozen=True)
class ParsedReply:
    """The order in a reply, and the numbers of missing, repeated and unknown documents.

    The order has each position 0..n-1 once: those in the reply, best first, then the missing ones in the given order.
    """

    order: list[int]
    missing: int
    duplicates: int
    unknown: int


def final_answer(reply: str) -> str:
    """Return the reply after its reasoning, or the content of its last `<answer>`; empty without either."""
    # Chat templates often contain the opening tag, so that only the closing one is in the reply.
    answer = _THINK_OPEN.split(_THINK_CLOSE.split(reply)[-1])[0]
    return _ANSWER_CLOSE.split(_ANSWER_OPEN.split(answer)[-1])[0]


def _is_ordered(match: re.Match[str]) -> bool:
    """Return whether it is a chain with a `>`, which may be followed by lines of reasons."""
    return match.re is _CHAIN and ">" in match[0]


def parse_ranking(reply: str, n: int) -> ParsedReply | None:
    """Read a ranking of `n` documents with the ids 1..n; return None for a reply without one.

    Only the final answer counts. A ranking is the first list of ids in a JSON object. Without an object, it is a list,
    a chain of ids in brackets (`[2] > [1]`), or lines that begin with an id in brackets. Without brackets, it is lines
    of bare numbers. Of several rankings, the one with the most documents counts; of equal ones, the last list or chain
    with a `>`, or else the last. An object without a list, such as one of scores, is no ranking, nor is one that lacks
    a document named before it, because its beginning could be in another form.

    Example:
        >>> parse_ranking("[3] > [3] > [9] > [2]", 4)
        ParsedReply(order=[2, 1, 0, 3], missing=2, duplicates=1, unknown=1)
        >>> parse_ranking("I cannot rank these 5 passages.", 5) is None
        True
    """
    text = unicodedata.normalize("NFKC", final_answer(reply)).translate(_SIGNS)
    with suppress(ValueError, RecursionError):
        values = json.loads(text[text.find("{") : text.rfind("}") + 1]).values()
        lists = [dumped for dumped in map(json.dumps, values) if _LIST_OF_IDS.match(dumped)]
        # Without a list, a string can hold a chain.
        text = lists[0] if lists else "\n".join(value for value in values if isinstance(value, str))
    text = _DECORATION.sub("", text) + "\n"
    text = _LIST.sub(lambda match: " > ".join(f"[{number.strip()}]" for number in match[1].split(",")), text)
    if not _ID.search(text):
        text = _BARE.sub(lambda line: re.sub(r"\d+", r"[\g<0>]", line[0]), text)

    def positions(digits: list[str]) -> list[int]:
        return [int(number) - 1 if len(number) < 7 else -1 for number in digits]  # int() refuses very long numbers

    runs = [(match, positions(_ITEM.findall(match[0]))) for match in _LINES.finditer(text)]
    runs += [(match, positions(_ID.findall(match[0]))) for match in _CHAIN.finditer(text)]
    valid = [(match, ids, [each for each in ids if 0 <= each < n]) for match, ids in runs]
    if not valid:
        return None
    match, ids, known = max(valid, key=lambda run: (len(set(run[2])), _is_ordered(run[0]), run[0].end()))
    ranking, before = dict.fromkeys(known), text[: match.start()] if len(set(known)) > 1 else text
    missing = [position for position in range(n) if position not in ranking]
    if not ranking or not set(missing).isdisjoint(positions(_ID.findall(before))):
        return None
    return ParsedReply([*ranking, *missing], len(missing), len(known) - len(ranking), len(ids) - len(known))
