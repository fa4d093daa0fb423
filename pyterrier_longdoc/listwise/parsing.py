"""Parse rankings in the replies of a model."""

from __future__ import annotations

import json
import re
import unicodedata
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

_ID = re.compile(r"\[[ \t]*(\d+)[ \t]*\]")
# A JSON list of numbers, quoted or not, on separate lines.
_LIST = re.compile(r"^[^\S\n]*\[\s*([\"']?)\d+\1\s*(?:,\s*([\"']?)\d+\2\s*)+\][^\S\n]*\.?[^\S\n]*$", re.MULTILINE)
_DIGITS = re.compile(r"\d+")
_THINK_OPEN = re.compile(r"<(?:think|thinking|thought|reasoning)>", re.IGNORECASE)
_THINK_CLOSE = re.compile(r"</(?:think|thinking|thought|reasoning)>", re.IGNORECASE)
_ANSWER_OPEN = re.compile(r"<(?:final_)?(?:answer|output|ranking|result)>", re.IGNORECASE)
_ANSWER_CLOSE = re.compile(r"</(?:final_)?(?:answer|output|ranking|result)>", re.IGNORECASE)
_BRACKETS = str.maketrans("【】〔〕", "[][]")  # noqa: RUF001 - full-width brackets that NFKC keeps
_FENCE = re.compile(r"```(?:json|text)?", re.IGNORECASE)
_OBJECT = re.compile(r"\{[^{}]*\}")
# Keys of a ranking, in lower case without spaces and underscores; the group says that it is one.
_RANKING_KEY = re.compile(
    r"(?=.)(?:final|new|re)*(rank(?:ings?|ed)?|order(?:ing|ed)?|sorted|best(?:toworst)?|top|most(?:toleast)?(?:relevant)?"
    r"|permutation)?(?:list|order|documents?|docs?|passages?|ids?|results?|answer|output|response)*"
)
_DECORATION = re.compile(r"[*_`\"']")
_BULLET = r"(?:[-*•][ \t]*|\d{1,4}[.):][ \t]*)?"
_LINKS = {
    "line": re.compile(rf"[ \t]*[,;]?[ \t]*\n\s*{_BULLET}"),
    "arrow": re.compile(r"\s*>+\s*"),
    "weak": re.compile(r"[\s,;]*"),
}
# Allowed before or after a ranking, including the next id of a truncated reply.
_BARE = re.compile(rf"\s*{_BULLET}\[?\s*|[\s\].]*(?:>\s*(?:\[\s*\d*)?)?")
_LONGEST_GAP = 40
_ANNOUNCED = re.compile(rf":\s*{_BULLET}\[?\s*\Z")
_WORST, _BEST = "(?:least|worst|lowest)", "(?:most|best|highest)"
_START, _END = "start|beginning|top|front", "end|bottom"
# "At the end" or "last", but not "is the last", after a few words ("the best I can do at the end" is none).
_WORDS = rf"(?:[ -](?!(?:{_WORST}|{_BEST}|{_START}|{_END}|first|last|and|but|I|we)\b)\w+){{0,5}}?,?[ -]"
_PLACE = r"(?:(?<!the ){}|(?:at|on|in) (?:the )?(?:very )?(?:{}))"
# The group is a negation.
_WORST_FIRST = re.compile(
    r"(\b(?:not|never|instead of|rather than) (?:(?:from|in|the|with|an?|ordered|sorted|ranked|listed) ){0,3})?\b(?:"
    rf"(?<!at ){_WORST}{_WORDS}(?:{_PLACE.format('first', _START)}|(?:to|-?>|\u2192)[ -](?:the )?{_BEST})"
    rf"|{_BEST}{_WORDS}{_PLACE.format('last', _END)}"
    rf"|(?:start|begin)\w* (?:with|from|at) (?:the )?{_WORST}|(?:end|finish)\w* (?:with|in|at) (?:the )?{_BEST}"
    r"|bottom[ -](?:to[ -](?:the )?top|up)|reversed? order|(?:ascending|increasing) (?:order|relevance))\b",
    re.IGNORECASE,
)
# Said by the model, or at the start of a sentence; "I can't find" and "I can't be sure, but here is:" are none.
_REFUSAL = re.compile(
    r"(?:\b(?:I|we)\b(?:['\u2019]m)?(?: \w+){0,3}? |(?:\A|[.!?\n])\W{0,9})"
    r"(?:can['\u2019]t|can ?not|could(?:n['\u2019]t| not)|won['\u2019]t|will not|unable|"
    r"do(?:n['\u2019]t| not) (?:rank|order|want|wish|feel)|not (?:able|going|willing|comfortable)|decline|refuse)\b"
    r"(?! (?:to )?(?:find|see|tell|be|guarantee|rule out)\b)"
    r"(?![^.!?\n]{0,200}\b(?:but|however)\b[^.!?\n]{0,200}:)",
    re.IGNORECASE,
)


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


def find_verdict(reply: str, words: Sequence[str]) -> tuple[str, int] | None:
    """Return the one of these words that the answer after the reasoning consists of, and where it is in the reply.

    Marks around the word and a label before it, as in `Answer: **true**.`, are ignored. None for anything else, such as
    `not true`, a number with a sign or a fraction, or both words.

    Example:
        >>> find_verdict("It may be false.</think> True.", ("true", "false"))
        ('true', 25)
    """
    answer = final_answer(reply)
    pattern = re.compile(
        rf"\W*(?:[\w ]{{1,30}}:\W*)?(?<![-\u2212.])({'|'.join(map(re.escape, words))})\W*", re.IGNORECASE
    )
    found = pattern.fullmatch(answer)
    if found is None:
        return None
    word = next(word for word in words if word.casefold() == found[1].casefold())
    return word, reply.rindex(answer) + found.start(1)


def ends_reasoning(reply: str) -> bool:
    """Tell whether a reply says that its reasoning has ended."""
    return bool(_THINK_CLOSE.search(reply) or _ANSWER_OPEN.search(reply))


def parse_ranking(reply: str, n: int) -> ParsedReply | None:
    """Read a ranking of `n` documents with the ids 1..n.

    A ranking is a chain of bracketed ids, `[2] > [1]` (or one id per line), or a JSON list, `[2, 1]`, also in an object
    with a key such as `ranking` or `documents`; a single id counts if it is alone on its line. A reply that only has
    ids can also separate them by spaces or commas. In a longer reply, a ranking must be on separate lines, or be a
    chain of `>` with more than half of the documents. It must also begin the reply, follow a colon, or have all
    documents (within a sentence, more than two). Text after `I can't` and similar phrases is ignored. These rules
    exclude `the passages [1] and [2]`, a quotation of the request's `[2] > [1]`, and `policy 3.2`. Of several rankings,
    the last one with the most documents counts. Returns None for a reply without a ranking: a refusal, prose, an empty
    or truncated reply, or one that says in common English words that the least relevant document is first, because
    words and `>` then contradict each other. Unusual replies can still be misread.

    Example:
        >>> parse_ranking("[3] > [3] > [9] > [2]", 4)
        ParsedReply(order=[2, 1, 0, 3], missing=2, duplicates=1, unknown=1)
        >>> parse_ranking("I can't rank these 5 passages (policy 3.2)", 5) is None
        True
    """
    text = _FENCE.sub("\n", unicodedata.normalize("NFKC", final_answer(reply)).translate(_BRACKETS))
    if any(said[1] is None for said in _WORST_FIRST.finditer(_DECORATION.sub("", text))):
        return None
    text = _OBJECT.sub(_in_object, text)
    first_bracket = text.find("[")
    begins_bare = _is_bare(text[: min(first_bracket, _LONGEST_GAP + 1)])
    refusal = _REFUSAL.search(text)
    best: ParsedReply | None = None
    for start, ids, on_own_lines in _possible_rankings(text, n):
        valid = [i - 1 for i in ids if 1 <= i <= n]
        ranking = dict.fromkeys(valid)
        missing = [position for position in range(n) if position not in ranking]
        # After a colon or an opening tag.
        is_announced = _ANNOUNCED.search(_DECORATION.sub("", _just_before(text, start))) is not None
        is_ranking = is_announced or (begins_bare and (on_own_lines or start == first_bracket))
        # A quotation of the request has two ids.
        is_ranking = is_ranking or (not missing and (on_own_lines or n > 2))
        is_order = valid and is_ranking and (refusal is None or start < refusal.end())
        if is_order and (best is None or len(missing) <= best.missing):
            best = ParsedReply([*ranking, *missing], len(missing), len(valid) - len(ranking), len(ids) - len(valid))
    return best


def _in_object(found: re.Match[str]) -> str:
    """Return the ranking in a JSON object on separate lines, or other text as it is."""
    try:
        values = json.loads(found[0], strict=False)
    except (ValueError, RecursionError):
        return found[0]
    keys = ((_RANKING_KEY.fullmatch(re.sub(r"[\W_]", "", key).casefold()), value) for key, value in values.items())
    rankings = [(key[1] is None, value) for key, value in keys if key]
    # Of several, such as `documents` and `ranking`, the one that says so.
    value = min(rankings, key=lambda ranking: ranking[0], default=(True, ""))[1]
    return f"\n{value if isinstance(value, str) else json.dumps(value)}\n"


def _possible_rankings(text: str, n: int) -> Iterator[tuple[int, list[int], bool]]:
    """Yield possible rankings: the start of each, its ids, and whether it is on separate lines."""
    yield from _chains(text, n)
    for match in _LIST.finditer(text):
        yield match.start(), [_number(digits) for digits in _DIGITS.findall(match[0])], True


def _chains(text: str, n: int) -> Iterator[tuple[int, list[int], bool]]:
    """Yield chains of bracketed ids with only separators between them."""
    matches = list(_ID.finditer(text))
    if not matches:
        return
    only_ids = _is_bare(text[: matches[0].start()]) and _is_bare(text[matches[-1].end() :])
    links = [_link(text[a.end() : b.start()], weak=only_ids) for a, b in pairwise(matches)]
    if "arrow" in links:  # then each line is a separate ranking, e.g. an echo of the example or a second attempt
        links = [None if link == "line" else link for link in links]
    start = 0
    for end, link in enumerate([*links, None], 1):
        if link is not None:
            continue
        ids, separators = matches[start:end], links[start : end - 1]
        # Only a part of the line is checked, because lines can be very long and have many ids.
        prefix = _just_before(text, ids[0].start()).rpartition("\n")[2]
        suffix = text[ids[-1].end() : ids[-1].end() + _LONGEST_GAP + 1].partition("\n")[0]
        on_own_lines = _is_bare(prefix) and _is_bare(suffix)
        in_prose = set(separators) == {"arrow"} and 2 * len(ids) > n
        if (on_own_lines or in_prose) and (len(ids) > 1 or len(matches) == 1):
            yield ids[0].start(), [_number(match[1]) for match in ids], on_own_lines
        start = end


def _just_before(text: str, start: int) -> str:
    return text[max(0, start - _LONGEST_GAP - 1) : start]


def _number(digits: str) -> int:
    # int() refuses very long numbers; 0 is not the id of a document.
    return int(digits) if len(digits) < 7 else 0


def _link(gap: str, *, weak: bool) -> str | None:
    """Return the kind of separator between two ids: `"arrow"`, `"line"`, `"weak"` or None."""
    separator = _DECORATION.sub("", gap)
    kinds = (name for name, pattern in _LINKS.items() if (weak or name != "weak") and pattern.fullmatch(separator))
    return next(kinds, None) if len(gap) <= _LONGEST_GAP else None


def _is_bare(text: str) -> bool:
    return len(text) <= _LONGEST_GAP and _BARE.fullmatch(_DECORATION.sub("", text)) is not None
