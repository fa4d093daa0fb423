"""Tokenising texts once, and walking through many (query, text) pairs in bounded memory."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

Span = tuple[int, int]
"""Half-open: start and end of a window, in tokens or characters."""


@dataclass(frozen=True, eq=False)
class TokenizedText:
    """A text and its tokens, without special tokens.

    Attributes:
        ids: `(L,)` int32 token ids.
        text: the text the tokens come from.
        starts: `(L,)` int32 character offset at which each token begins; None if offsets were not asked for.
        ends: `(L,)` int32 character offset at which each token ends.
    """

    ids: np.ndarray
    text: str = ""
    starts: np.ndarray | None = None
    ends: np.ndarray | None = None

    def __len__(self) -> int:
        return len(self.ids)

    def head(self, length: int) -> TokenizedText:
        """The same text, of which only the first `length` tokens are kept."""
        if len(self) <= length:
            return self
        if self.starts is None or self.ends is None:
            return replace(self, ids=self.ids[:length])
        return replace(self, ids=self.ids[:length], starts=self.starts[:length], ends=self.ends[:length])

    def only(self, spans: Sequence[Span]) -> TokenizedText:
        """The same text, of which only the tokens in these windows are kept, in order and each once."""
        keep = np.zeros(len(self), dtype=bool)
        for start, end in spans:
            keep[start:end] = True
        if self.starts is None or self.ends is None:
            return replace(self, ids=self.ids[keep])
        return replace(self, ids=self.ids[keep], starts=self.starts[keep], ends=self.ends[keep])

    def characters(self, span: Span) -> Span:
        """The character offsets `(start, end)` of a window of this text; `(0, 0)` for an empty window."""
        start, end = span
        if self.starts is None or self.ends is None:
            raise ValueError("this text was tokenised without character offsets")
        if start >= end:
            return (0, 0)
        return int(self.starts[start]), int(self.ends[start:end].max())


def tokenize(tokenizer: Any, texts: Sequence[str], *, offsets: bool = False, lead: str = "") -> list[TokenizedText]:
    """Token ids, without special tokens and without a limit on their number.

    Args:
        tokenizer: a fast Hugging Face tokenizer.
        texts: any texts, empty ones included.
        offsets: also keep the character offsets of each token (needed for windows in words or sentences and for
            showing a window to a reader; costs several times the time).
        lead: put before every text that is not empty; offsets do not count it.
    """
    if not texts:
        return []
    encoded = tokenizer(
        [lead + text if text else text for text in texts],
        add_special_tokens=False,
        return_attention_mask=False,
        return_token_type_ids=False,
        return_offsets_mapping=offsets,
        truncation=False,
        verbose=False,
    )
    ids = [np.asarray(row, dtype=np.int32) for row in encoded["input_ids"]]
    if not offsets:
        return [TokenizedText(row, text) for row, text in zip(ids, texts, strict=True)]
    tokenized = []
    for row, text, pairs in zip(ids, texts, encoded["offset_mapping"], strict=True):
        characters = np.maximum(np.asarray(pairs, dtype=np.int32).reshape(-1, 2) - len(lead), 0)
        tokenized.append(TokenizedText(row, text, characters[:, 0], characters[:, 1]))
    return tokenized


@dataclass(frozen=True, eq=False)
class Block:
    """Some of the distinct (query, text) pairs of a run.

    Attributes:
        texts: distinct texts, of like length.
        pairs: `(index of a distinct query, index into texts)`.
        rows: for each pair, the rows of the input that ask for it.
        seen: for each text, whether an earlier block had it already.
    """

    texts: list[str]
    pairs: list[tuple[int, int]]
    rows: list[list[int]]
    seen: list[bool]


def numbered(values: Sequence[str]) -> tuple[list[str], np.ndarray]:
    """The distinct values in order of appearance, and for each value its number among them, `(R,)` int64."""
    numbers = {value: number for number, value in enumerate(dict.fromkeys(values))}
    return list(numbers), np.fromiter((numbers[value] for value in values), np.int64, len(values))


def rows_by_pair(query_of_row: Sequence[int], texts: Sequence[str]) -> dict[str, dict[int, list[int]]]:
    """For each distinct text and each of its queries, the rows that ask for the pair."""
    wanted: dict[str, dict[int, list[int]]] = defaultdict(lambda: defaultdict(list))
    for row, (query, text) in enumerate(zip(query_of_row, texts, strict=True)):
        wanted[text][query].append(row)
    return wanted


def blocks(
    query_of_row: Sequence[int] | np.ndarray, texts: Sequence[str], *, characters: int, pairs: int
) -> Iterator[Block]:
    """Divides a run into blocks, longest texts first.

    A text's pairs stay together, so that it is tokenised once; texts of like length share a block, so that
    little is padded. Longest first lets a run that does not fit into memory fail at its start.

    Args:
        query_of_row: for each row, the index of its distinct query.
        texts: for each row, its text.
        characters: bound on the number of pairs times the characters of the longest text, which is what a block
            takes when padded; a single pair may exceed it.
        pairs: bound on the number of pairs.
    """
    distinct, text_of_row = numbered(texts)
    of_row = np.asarray(query_of_row, dtype=np.int64)
    lengths = np.fromiter(map(len, distinct), np.int64, len(distinct))
    # Arrays: an object for every pair would take more memory than the rest of a run.
    order = np.lexsort((of_row, text_of_row, -lengths[text_of_row]))
    block, last_text, last_pair = Block([], [], [], []), -1, (-1, -1)
    for row in order:
        number, query = int(text_of_row[row]), int(of_row[row])
        if (number, query) == last_pair:
            block.rows[-1].append(int(row))
            continue
        count = len(block.pairs)
        if count and (count >= pairs or (count + 1) * len(block.texts[0]) > characters):
            yield block
            block = Block([], [], [], [])
        if number != last_text or not block.texts:
            block.texts.append(distinct[number])
            block.seen.append(number == last_text)
        block.pairs.append((query, len(block.texts) - 1))
        block.rows.append([int(row)])
        last_text, last_pair = number, (number, query)
    if block.pairs:
        yield block


def share_out(on_rows: Callable[[int], None] | None, rows: int) -> Callable[[float], None] | None:
    """Turns shares of a block's work, which add up to 1, into whole rows."""
    if on_rows is None:
        return None
    done, reported = 0.0, 0

    def report(share: float) -> None:
        nonlocal done, reported
        done += share
        whole = round(done * rows)
        on_rows(whole - reported)
        reported = whole

    return report
