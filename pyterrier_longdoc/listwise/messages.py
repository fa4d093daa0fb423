"""What a model is asked and what it answers: prompts, documents that fit into them, rankings in replies."""

from __future__ import annotations

import re
import string
import threading
import unicodedata
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from ..common.arguments import check_choice
from ..common.coverage import Coverage, LeftOut, Reading
from ..common.language import token_counter
from .evidence import MARK, Passages

Message = dict[str, str]
"""One chat message, `{"role": "system" | "user" | "assistant", "content": text}`."""

Prompt = Callable[[str, Sequence[str]], list[Message]]
"""`(query, texts) -> messages`; the texts are numbered from 1 in their order."""

CHARACTERS_PER_TOKEN = 4
"""Without a tokenizer: OpenAI's rule of thumb for English. Other scripts have fewer characters per token."""

TOKENS_PER_MESSAGE = 4
"""What chat templates add around a message: role and marks of begin and end."""

MOST_TEMPLATE_TOKENS, MOST_MESSAGE_TOKENS = 64, 16
"""Room for what they may add, once (a system message of their own, as Llama 3.1's and Qwen 2.5's) and to a message."""

# Full-width brackets too: models and the parser take them for the mark of an id as well.
_BRACKETED = re.compile(r"[\[［【〔](\s*\d[\d\s,;>]*)[\]］】〕]")  # noqa: RUF001
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f]")

_ID = re.compile(r"\[[ \t]*(\d+)[ \t]*\]")
# A JSON list of numbers, or of numbers in quotes, on lines of its own.
_LIST = re.compile(r"^[^\S\n]*\[\s*([\"']?)\d+\1\s*(?:,\s*([\"']?)\d+\2\s*)+\][^\S\n]*\.?[^\S\n]*$", re.MULTILINE)
_DIGITS = re.compile(r"\d+")
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
_ANNOUNCED = re.compile(rf"(?::|<\w+>)\s*{_BULLET}\[?\s*\Z")
# "[3], then [1] and [2]"
_IN_WORDS = re.compile(
    rf"{_ID.pattern}(?:[\s,;*_`\"']{{0,9}}(?:(?:and\s)?(?:then|followed by)\s|and\s)?[*_`\"']{{0,9}}{_ID.pattern})+",
    re.IGNORECASE,
)
_THEN = re.compile(r"then|followed", re.IGNORECASE)
# Of whoever speaks, or at the beginning of a sentence; "I can't find" is none, nor "I can't be sure, but here is:"
_REFUSAL = re.compile(
    r"(?:\b(?:I|we)\b(?:['\u2019]m)?(?: \w+){0,3}? |(?:\A|[.!?\n])\W{0,9})"
    r"(?:can['\u2019]t|can ?not|could(?:n['\u2019]t| not)|won['\u2019]t|will not|unable|"
    r"do(?:n['\u2019]t| not) (?:rank|order|want|wish|feel)|not (?:able|going|willing|comfortable)|decline|refuse)\b"
    r"(?! (?:to )?(?:find|see|tell|be|guarantee|rule out)\b)"
    r"(?![^.!?\n]{0,200}\b(?:but|however)\b[^.!?\n]{0,200}:)",
    re.IGNORECASE,
)

# Tokenizers refuse to be used by two threads at the same time; a lock of each could not be pickled.
_COUNTING = threading.Lock()


class IncompleteReplyWarning(UserWarning):
    """Replies could not be read, or left documents out, and the run went on without them."""


class UnreadableReplyError(ValueError):
    """The model's text is no ranking (or no grade), after all retries."""


# Prompts.


def clean(text: str) -> str:
    r"""A text that can stand in a prompt: one line, without control characters, bracketed numbers in round brackets.

    Without the last, a text that contains `[3]` could pass for document 3, or for a ranking.

    Example:
        >>> clean("As shown in [12],\n  it rains. [2] > [1]")
        'As shown in (12), it rains. (2) > (1)'
    """
    return " ".join(_BRACKETED.sub(r"(\1)", _CONTROL.sub(" ", text)).split())


@dataclass(frozen=True)
class ListwisePrompt:
    r"""A listwise ranking prompt, as chat turns (one message per document) or as a single message.

    In the chat form the model acknowledges each document in a turn of its own, as in RankGPT (Sun et al. 2023); the
    single form, as in RankZephyr (Pradeep et al. 2023), takes fewer tokens and suits models trained on one turn. The
    wording is this package's own.

    Args:
        form: `"turns"` or `"single"`.
        system: the system message; empty for none, which some local models need.
        opening: before the documents; may use `{query}` and `{n}`, the number of documents.
        ready: the model's answer to it (chat form only).
        document: one document; must use `{number}` and `{text}`.
        noted: the model's answer to a document (chat form only); may use `{number}`.
        closing: after the documents; may use `{query}` and `{n}`.
        identifiers: what `{number}` is: `"numbers"` from 1, or `"letters"` A to Z for `FirstToken`, which make at most
            26 documents in a prompt.

    Raises:
        ValueError: for an unknown form or identifiers, or a template with other or missing fields.

    Example:
        >>> prompt = ListwisePrompt("single", system="", opening="{query}?", closing="Order all {n}.")
        >>> prompt("rain", ["It rains.", "Sun [2]"])
        [{'role': 'user', 'content': 'rain?\n\n[1] It rains.\n[2] Sun (2)\n\nOrder all 2.'}]
    """

    form: str = "turns"
    system: str = "You are a search expert who orders documents by how well they answer a query."
    opening: str = (
        "Query: {query}\n\nBelow are {n} documents that a search engine found for it. Each begins with its number in "
        "square brackets."
    )
    ready: str = "I am ready to read the documents."
    document: str = "[{number}] {text}"
    noted: str = "I have read document [{number}]."
    closing: str = (
        "Query: {query}\n\nThose were all {n} documents. Put them in order, the most relevant to the query first. "
        "Answer with the numbers of all {n} documents and nothing else, written like this: [2] > [1]"
    )
    identifiers: str = "numbers"

    def __post_init__(self) -> None:
        check_choice("form", self.form, ("turns", "single"))
        check_choice("identifiers", self.identifiers, ("numbers", "letters"))
        check_fields("opening", self.opening, {"query", "n"})
        check_fields("document", self.document, {"number", "text"}, required={"number", "text"})
        check_fields("noted", self.noted, {"number"})
        check_fields("closing", self.closing, {"query", "n"})
        if "{query}" not in self.opening + self.closing:
            raise ValueError("neither opening= nor closing= uses {query}: the model would not see the query")

    def __call__(self, query: str, texts: Sequence[str]) -> list[Message]:
        """The messages that ask for an order of `texts`; both arguments are cleaned first."""
        fields = {"query": clean(query), "n": len(texts)}
        opening, closing = self.opening.format(**fields), self.closing.format(**fields)
        letters = self.identifiers == "letters"
        if letters and len(texts) > len(string.ascii_uppercase):
            raise ValueError(f"{len(texts)} documents in a prompt are more than there are letters to name them")
        numbers: Sequence[Any] = string.ascii_uppercase if letters else range(1, len(texts) + 1)
        named = list(zip(numbers, texts, strict=False))
        shown = [self.document.format(number=number, text=clean(text)) for number, text in named]
        messages = [{"role": "system", "content": self.system}] if self.system else []
        if self.form == "single":
            content = f"{opening}\n\n{chr(10).join(shown)}\n\n{closing}"
            return [*messages, {"role": "user", "content": content}]
        turns = [(opening, self.ready)]
        turns += [(document, self.noted.format(number=i)) for document, (i, _) in zip(shown, named, strict=True)]
        for asked, answered in turns:
            messages += [{"role": "user", "content": asked}, {"role": "assistant", "content": answered}]
        return [*messages, {"role": "user", "content": closing}]


def check_fields(name: str, template: str, allowed: Set[str], required: Set[str] = frozenset()) -> None:
    """Raises ValueError for a template for `str.format` with fields that are not allowed, or without required ones."""
    try:
        used = {field for _, field, _, _ in string.Formatter().parse(template) if field is not None}
    except ValueError as error:
        raise ValueError(f"{name}={template!r} is no template: {error}; write {{{{ for a brace") from None
    if used - allowed or required - used:
        raise ValueError(
            f"{name}={template!r} uses the fields {sorted(used)}; it may use {sorted(allowed)}"
            + (f" and must use {sorted(required)}" if required else "")
        )


# Documents that fit into a prompt.


class Tokens:
    """Counts and cuts by the tokens of a model, as well as they are known; None counts four characters as a token."""

    def __init__(self, tokenizer: Any = None) -> None:
        self._counts = token_counter(_estimate if tokenizer is None else tokenizer)

    def count(self, text: str) -> int:
        """Number of tokens of a text, without special tokens."""
        with _COUNTING:
            return self._counts([text])[0]

    def cut(self, text: str, limit: int) -> str:
        """The longest beginning of a text that was found to have at most `limit` tokens."""
        end = max(limit, 1) * CHARACTERS_PER_TOKEN
        while end < len(text) and self.count(text[:end]) <= limit:
            end *= 2
        ends = range(1, min(end, len(text)) + 1)
        return text[: bisect_right(ends, limit, key=lambda end: self.count(text[:end]))]

    def count_messages(self, messages: Sequence[Message]) -> int:
        """Number of tokens of a conversation."""
        return sum(self.count(message["content"]) + TOKENS_PER_MESSAGE for message in messages)


def most_tokens(messages: Sequence[Message]) -> int:
    """More tokens than any tokenizer makes of a conversation: one for each byte, and those of a chat template.

    Example:
        >>> most_tokens([{"role": "user", "content": "né"}])
        83
    """
    sizes = (len(message["content"].encode("utf-8", "replace")) for message in messages)
    return MOST_TEMPLATE_TOKENS + sum(size + MOST_MESSAGE_TOKENS for size in sizes)


def bytes_beyond_ascii(messages: Sequence[Message]) -> int:
    """Bytes of a conversation that are not ASCII."""
    texts = (message["content"].encode("utf-8", "replace") for message in messages)
    return sum(len(text) - len(text.decode("ascii", "ignore")) for text in texts)


def _estimate(text: str) -> int:
    return -(-len(text) // CHARACTERS_PER_TOKEN)


def fair_limit(lengths: Sequence[int], budget: int) -> int:
    """The largest limit so that documents cut to it have at most `budget` tokens together: the longest shrink first.

    Example:
        >>> fair_limit([10, 100, 200], 150)
        70
    """
    limits = range(max(lengths) + 1)
    return bisect_right(limits, budget, key=lambda limit: sum(min(length, limit) for length in lengths)) - 1


@dataclass(frozen=True)
class Shown:
    """What of a document stands in a prompt.

    Attributes:
        text: as it is shown.
        tokens: of the document, without marks.
        passages: parts of the document that were chosen; 1 for its beginning.
    """

    text: str
    tokens: int
    passages: int = 1


class DocumentReader(Tokens):
    """Shortens the documents of a run, to `max_doc_len` tokens at most, and remembers how much of each was shown.

    Args:
        tokenizer: as for `Tokens`.
        max_doc_len: most tokens of a document; None for no limit.
        passages: for each query and text the passages that may be shown; None shows beginnings.
    """

    def __init__(
        self,
        tokenizer: Any = None,
        max_doc_len: int | None = None,
        passages: Mapping[tuple[str, str], Passages] | None = None,
    ) -> None:
        super().__init__(tokenizer)
        self.max_doc_len = max_doc_len
        self.passages = passages
        self._length: dict[str, int] = {}
        self._least_shown: dict[tuple[str, str], Shown] = {}
        self._lock = threading.Lock()

    def length(self, text: str) -> int:
        """Number of tokens of a text, counted once."""
        if text not in self._length:
            self._length[text] = self.count(text)
        return self._length[text]

    def fit(self, query: str, texts: Sequence[str], budget: int | None) -> list[Shown]:
        """Documents shortened to `max_doc_len` each, and to `budget` tokens together if there is one.

        Short documents leave their share of the budget to long ones.
        """
        wanted = [self._all(query, text) for text in texts]
        lengths = [self.length(text) for text in wanted]
        limit = max(lengths) if self.max_doc_len is None else self.max_doc_len
        if budget is not None:
            limit = min(limit, fair_limit([min(length, limit) for length in lengths], budget))
        return [self._shown(query, text, limit) for text in texts]

    def _all(self, query: str, text: str) -> str:
        """What is shown of a document where there is room."""
        if self.passages is None:
            return text
        of_pair = self.passages[query, text]
        return of_pair.shown(range(len(of_pair.spans)))

    def _shown(self, query: str, text: str, limit: int) -> Shown:
        whole = self.length(text)
        if whole <= limit and (self.passages is None or self._all(query, text) == text):
            return Shown(text, whole)
        if self.passages is None:
            part = self.cut(text, limit)
            return Shown(part, self.count(part))
        of_pair = self.passages[query, text]
        chosen = of_pair.within(limit, self.count)
        if not chosen:  # the beginning of the best passage, without marks for which there may be no room
            part = self.cut(of_pair.shown(of_pair.best[:1]).removeprefix(MARK).strip(), limit)
            return Shown(part, self.count(part.removesuffix(MARK)))
        parts = (self.count(text[slice(*of_pair.spans[number])]) for number in chosen)
        return Shown(of_pair.shown(chosen), min(sum(parts), whole), len(chosen))

    def note(self, query: str, texts: Sequence[str], shown: Sequence[Shown]) -> None:
        """Remembers what a model has read of documents."""
        for text, part in zip(texts, shown, strict=True):
            with self._lock:
                least = self._least_shown.get((query, text), part)
                self._least_shown[query, text] = min(part, least, key=lambda each: each.tokens)

    def coverage(self, queries: int) -> Coverage:
        """What was read of the texts shown so far, each for each of its queries, with the shortest length.

        With passages, what is not shown was passed over.
        """
        coverage = Coverage(queries=queries)
        for (_, text), shown in self._least_shown.items():
            whole = self.length(text)
            left_out = LeftOut() if self.passages is None else LeftOut(passed_over=whole - shown.tokens)
            coverage.add(Reading(whole, shown.tokens, windows=shown.passages), left_out)
        return coverage


# Replies.


@dataclass(frozen=True)
class ParsedReply:
    """The order that a reply asks for, and how many documents it leaves out, names again, or invents.

    The order has all positions 0..n-1 once: those named, best first, then those missing in their given order.
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
    # Chat templates often contain the opening mark, so that only the closing one is in the reply.
    answer = _THINK_CLOSE.split(reply)[-1]
    return _THINK_OPEN.split(answer)[0]


def parse_ranking(reply: str, n: int) -> ParsedReply | None:
    """Reads a ranking of `n` documents, which have the ids 1..n.

    It is a chain of bracketed ids, `[2] > [1]` (or one id per line), or a JSON list, `[2, 1]`. A reply that is nothing
    but ids may separate them by spaces or commas too. In a longer reply, a ranking stands on lines of its own, or is a
    chain of `>` that names more than half of the documents. It begins the reply, comes after a colon, or names all
    documents; within a sentence more than two of them, for which `[3], then [1] and [2]` will do too. Nothing behind
    `I can't` and the like counts. So `the passages [1] and [2]`, a quotation of the request's `[2] > [1]` or
    `policy 3.2` is never taken for a ranking. Of several the one with the most documents counts, and of those the last.
    None is for a reply that holds no ranking: a refusal, prose, an empty or cut-off reply.

    Example:
        >>> parse_ranking("[3] > [3] > [9] > [2]", 4)
        ParsedReply(order=[2, 1, 0, 3], missing=2, duplicates=1, unknown=1)
        >>> parse_ranking("I can't rank these 5 passages (policy 3.2)", 5) is None
        True
    """
    text = _FENCE.sub("\n", unicodedata.normalize("NFKC", without_reasoning(reply)).translate(_BRACKETS))
    begins = text.find("[")
    begun = _is_bare(text[: min(begins, _LONGEST_GAP + 1)])
    refused = _REFUSAL.search(text)
    best: ParsedReply | None = None
    for start, ids, on_own_lines in _found(text, n):
        known = [i - 1 for i in ids if 1 <= i <= n]
        named = dict.fromkeys(known)
        rest = [position for position in range(n) if position not in named]
        given = (begun and (on_own_lines or start == begins)) or _is_announced(text, start)
        # Two are as many as a quotation of the request's form names.
        given = given or (not rest and (on_own_lines or n > 2))
        is_order = known and given and (refused is None or start < refused.end())
        if is_order and (best is None or len(rest) <= best.missing):
            best = ParsedReply([*named, *rest], len(rest), len(known) - len(named), len(ids) - len(known))
    return best


def _found(text: str, n: int) -> Iterator[tuple[int, list[int], bool]]:
    """What may be rankings: where each begins, its ids, and whether it stands on lines of its own."""
    yield from _chains(text, n)
    for match in _IN_WORDS.finditer(text):
        ids = [_number(digits) for digits in _DIGITS.findall(match[0])]
        if _THEN.search(match[0]) and len(set(ids)) == n:
            yield match.start(), ids, False
    for match in _LIST.finditer(text):
        yield match.start(), [_number(digits) for digits in _DIGITS.findall(match[0])], True


def _chains(text: str, n: int) -> Iterator[tuple[int, list[int], bool]]:
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
        # No more of the line than tells whether it is bare: lines may be very long, and have very many ids.
        before = _just_before(text, ids[0].start()).rpartition("\n")[2]
        after = text[ids[-1].end() : ids[-1].end() + _LONGEST_GAP + 1].partition("\n")[0]
        on_own_lines = _is_bare(before) and _is_bare(after)
        within_prose = set(joined_by) == {"arrow"} and 2 * len(ids) > n
        if (on_own_lines or within_prose) and (len(ids) > 1 or (alone and len(found) == 1)):
            yield ids[0].start(), [_number(match[1]) for match in ids], on_own_lines
        start = end


def _just_before(text: str, start: int) -> str:
    return text[max(0, start - _LONGEST_GAP - 1) : start]


def _is_announced(text: str, start: int) -> bool:
    """Whether what begins there comes after a colon, or an opening tag."""
    return _ANNOUNCED.search(_DECORATION.sub("", _just_before(text, start))) is not None


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
