"""Parse rankings in the replies of a model."""

from __future__ import annotations

import json
import re
import unicodedata
from dataclasses import dataclass

_THINK_OPEN = re.compile(r"<(?:think|thinking|thought|reasoning)>", re.IGNORECASE)
_THINK_CLOSE = re.compile(r"</(?:think|thinking|thought|reasoning)>", re.IGNORECASE)
_ANSWER_OPEN = re.compile(r"<(?:final_)?(?:answer|output|ranking|result)>", re.IGNORECASE)
_ANSWER_CLOSE = re.compile(r"</(?:final_)?(?:answer|output|ranking|result)>", re.IGNORECASE)
_BRACKETS = str.maketrans("【】〔〕", "[][]")  # noqa: RUF001 - full-width brackets that NFKC keeps
_DECORATION = re.compile(r"```(?:json|text)?|[*_`\"']")
_OBJECT = re.compile(r"\{.*\}", re.DOTALL)
_LIST = re.compile(r"\[(\s*\d+(?:\s*,\s*\d+)+\s*)\]")
_BULLET = r"(?:[-•][ \t]*|\d{1,4}[.):][ \t]*)?"
_CHAIN = re.compile(rf"\[\s*\d+\s*\](?:\s*[>,;]*\s*{_BULLET}\[\s*\d+\s*\])*")
_LINES = re.compile(rf"(?:^[ \t]*{_BULLET}\[\s*\d+\s*\](?!\s*[>,;]?\s*\[)[^\n]*\n+)+", re.MULTILINE)
_AT_LINE_START = re.compile(rf"^[ \t]*{_BULLET}\[\s*(\d+)\s*\]", re.MULTILINE)
_ID = re.compile(r"\[\s*(\d+)\s*\]")
_BARE = re.compile(r"^[ \t]*\d+(?:[ \t]*[>,;][ \t]*\d+)*[ \t]*[.,;]?[ \t]*$", re.MULTILINE)


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


def parse_ranking(reply: str, n: int) -> ParsedReply | None:
    """Read a ranking of `n` documents with the ids 1..n; return None for a reply without one.

    Only the final answer counts. A ranking is the first list in a JSON object. Without an object, it is a JSON list, a
    chain of ids in brackets (`[2] > [1]`), or lines that begin with an id in brackets. Without brackets, it is lines of
    bare numbers. Of several rankings, the last one with the most documents counts. An object without a list, such as
    one of scores, is no ranking.

    Example:
        >>> parse_ranking("[3] > [3] > [9] > [2]", 4)
        ParsedReply(order=[2, 1, 0, 3], missing=2, duplicates=1, unknown=1)
        >>> parse_ranking("I cannot rank these 5 passages.", 5) is None
        True
    """
    text = unicodedata.normalize("NFKC", final_answer(reply)).translate(_BRACKETS)
    if found := _OBJECT.search(text):
        try:
            value = json.loads(found[0])
        except (ValueError, RecursionError):
            value = None
        if isinstance(value, dict):
            # A string can hold a chain.
            lists = [each for each in value.values() if isinstance(each, list)]
            strings = [each for each in value.values() if isinstance(each, str)]
            text = json.dumps(lists[0]) if lists else "\n".join(strings)
    text = _DECORATION.sub("", text) + "\n"
    text = _LIST.sub(lambda match: ", ".join(f"[{number.strip()}]" for number in match[1].split(",")), text)
    if not _ID.search(text):
        text = _BARE.sub(lambda line: re.sub(r"\d+", r"[\g<0>]", line[0]), text)
    runs = [(match.end(), _ID.findall(match[0])) for match in _CHAIN.finditer(text) if _is_ranking(text, match)]
    runs += [(match.end(), _AT_LINE_START.findall(match[0])) for match in _LINES.finditer(text)]
    best: ParsedReply | None = None
    for _, digits in sorted(runs):
        ids = [int(number) if len(number) < 7 else 0 for number in digits]  # int() refuses very long numbers
        valid = [number - 1 for number in ids if 1 <= number <= n]
        ranking = dict.fromkeys(valid)
        missing = [position for position in range(n) if position not in ranking]
        if valid and (best is None or len(missing) <= best.missing):
            best = ParsedReply([*ranking, *missing], len(missing), len(valid) - len(ranking), len(ids) - len(valid))
    return best


def _is_ranking(text: str, chain: re.Match[str]) -> bool:
    """Tell whether a chain has several ids, or is a single one that begins a line; others are citations."""
    start = text.rfind("\n", 0, chain.start()) + 1
    return len(_ID.findall(chain[0])) > 1 or not text[start : chain.start()].strip(" \t-•")
