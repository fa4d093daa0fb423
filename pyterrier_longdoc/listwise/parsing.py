"""From a model's reply to an order of documents, without guessing."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

_ID = re.compile(r"\[[ \t]*(\d+)[ \t]*\]")
_LIST = re.compile(r"\[([\d\s,\"']+)\]")
_ITEM = re.compile(r"\s*([\"']?)(\d+)\1\s*")
_THINK_OPEN = re.compile(r"<(?:think|thinking|thought|reasoning)>", re.IGNORECASE)
_THINK_CLOSE = re.compile(r"</(?:think|thinking|thought|reasoning)>", re.IGNORECASE)
_BRACKETS = str.maketrans("【】〔〕", "[][]")  # noqa: RUF001 - full-width brackets that NFKC keeps
_FENCE = re.compile(r"```(?:json|text)?", re.IGNORECASE)
_DECORATION = re.compile(r"[*_`\"']")
_BULLET = r"(?:[-*•][ \t]*|\d{1,4}[.):][ \t]*)?"
_LINKS = {
    "line": re.compile(rf"[ \t]*[,;]?[ \t]*\n\s*{_BULLET}"),
    "arrow": re.compile(r"\s*>+\s*"),
    "weak": re.compile(r"[\s,;]*"),
}
# What may stand before a ranking, or behind it: also the next id of a reply that was cut off.
_BARE = re.compile(rf"\s*{_BULLET}\[?\s*|[\s\].]*(?:>\s*(?:\[\s*\d*)?)?")
_LONGEST_GAP = 40


@dataclass(frozen=True)
class ParsedReply:
    """The order that a reply asks for.

    Attributes:
        order: positions 0..n-1, all of them once: those named, best first, then those missing in their given order.
        missing: documents that the reply does not name.
        duplicates: ids named again; the first place counts.
        unknown: ids that no document has.
    """

    order: list[int]
    missing: int
    duplicates: int
    unknown: int


def without_reasoning(reply: str) -> str:
    """The reply after its reasoning block; nothing is left of a reply that ends within one.

    Example:
        >>> without_reasoning("<think>[1] or [2]?</think>[2] > [1]")
        '[2] > [1]'
    """
    closings = list(_THINK_CLOSE.finditer(reply))
    # Chat templates often contain the opening mark, so that only the closing one is in the reply.
    answer = reply[closings[-1].end() :] if closings else reply
    opening = _THINK_OPEN.search(answer)
    return answer[: opening.start()] if opening else answer


def parse_ranking(reply: str, n: int) -> ParsedReply | None:
    """Reads a ranking of `n` documents.

    It is a chain of bracketed ids, `[2] > [1]` (or one id per line), or a JSON list, `[2, 1]`. A reply that is nothing
    but ids may separate them by spaces or commas too. Amid prose, a ranking stands on lines of its own, or is a chain
    of `>` that names more than half of the documents, so that `the passages [1] and [2]`, a quotation of the request's
    `[2] > [1]` or `policy 3.2` is never taken for one. Of several rankings the one with the most documents counts, and
    of those the last.

    Args:
        reply: the model's text.
        n: number of documents, which have the ids 1..n.

    Returns:
        None if the reply holds no ranking: a refusal, prose, an empty or cut-off reply.

    Example:
        >>> parse_ranking("[3] > [3] > [9] > [2]", 4)
        ParsedReply(order=[2, 1, 0, 3], missing=2, duplicates=1, unknown=1)
        >>> parse_ranking("I can't rank these 5 passages (policy 3.2)", 5) is None
        True
    """
    text = _FENCE.sub("\n", unicodedata.normalize("NFKC", without_reasoning(reply)).translate(_BRACKETS))
    best: ParsedReply | None = None
    for ids in (*_chains(text, n), *_lists(text)):
        parsed = _complete(ids, n)
        if parsed is not None and (best is None or parsed.missing <= best.missing):
            best = parsed
    return best


def _complete(ids: list[int], n: int) -> ParsedReply | None:
    known = [i - 1 for i in ids if 1 <= i <= n]
    if not known:
        return None
    named = dict.fromkeys(known)
    rest = [position for position in range(n) if position not in named]
    return ParsedReply([*named, *rest], len(rest), len(known) - len(named), len(ids) - len(known))


def _chains(text: str, n: int) -> Iterator[list[int]]:
    """Runs of bracketed ids with nothing but separators between them."""
    found = list(_ID.finditer(text))
    if not found:
        return
    alone = _is_bare(text[: found[0].start()]) and _is_bare(text[found[-1].end() :])
    links = [_link(text[a.end() : b.start()], weak=alone) for a, b in pairwise(found)]
    if "arrow" in links:  # then each line is a ranking of its own: an echo of the request's example, a second try
        links = [None if link == "line" else link for link in links]
    start = 0
    for end, link in enumerate([*links, None], 1):
        if link is not None:
            continue
        ids, joined_by = found[start:end], links[start : end - 1]
        on_own_lines = _is_bare(_line_before(text, ids[0].start())) and _is_bare(_line_after(text, ids[-1].end()))
        within_prose = set(joined_by) == {"arrow"} and 2 * len(ids) > n
        if (on_own_lines or within_prose) and (len(ids) > 1 or (alone and len(found) == 1)):
            yield [_number(match[1]) for match in ids]
        start = end


def _number(digits: str) -> int:
    # int() refuses very long numbers; 0 is no document's id.
    return int(digits) if len(digits) < 7 else 0


def _link(gap: str, *, weak: bool) -> str | None:
    """How the text between two ids joins them: `"arrow"`, `"line"`, `"weak"` or not at all."""
    if len(gap) > _LONGEST_GAP:
        return None
    plain = _DECORATION.sub("", gap)
    for name, pattern in _LINKS.items():
        if pattern.fullmatch(plain) and (weak or name != "weak"):
            return name
    return None


def _is_bare(text: str) -> bool:
    return len(text) <= _LONGEST_GAP and _BARE.fullmatch(_DECORATION.sub("", text)) is not None


def _lists(text: str) -> Iterator[list[int]]:
    """JSON lists of numbers, or of numbers in quotes, that stand on lines of their own."""
    for match in _LIST.finditer(text):
        items = [_ITEM.fullmatch(item) for item in match[1].split(",")]
        if len(items) < 2 or not all(items):
            continue
        if not _line_before(text, match.start()).strip() and _line_after(text, match.end()).strip() in ("", "."):
            yield [_number(item[2]) for item in items if item]


# Of a line no more is looked at than tells whether it is bare: lines may be very long, and have very many ids.


def _line_before(text: str, position: int) -> str:
    return text[max(0, position - _LONGEST_GAP - 1) : position].rpartition("\n")[2]


def _line_after(text: str, position: int) -> str:
    return text[position : position + _LONGEST_GAP + 1].partition("\n")[0]
