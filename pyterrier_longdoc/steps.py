"""A run of a scorer in steps: blocks of like texts, one after the other or on several devices at a time."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

import numpy as np
import torch

from .replicas import in_turn, one_at_a_time, replica
from .texts import Block, TokenizedText, blocks, numbered, share_out

if TYPE_CHECKING:
    from .scorer import LongDocScorer

logger = logging.getLogger(__name__)

BLOCK_CHARACTERS = 1_000_000
"""Text that is tokenised and held at a time, about 250,000 tokens; larger blocks pad less."""
BLOCK_PAIRS = 4096
TOKEN_BLOCK_CHARACTERS = 150_000
"""The same for heads that look at tokens, whose matches take `channels * 32` numbers for each token."""
SMALL_BLOCK_CHARACTERS, BLOCKS_PER_DEVICE = 65_536, 4
"""Several devices share a run in smaller blocks, so that each has some: no smaller than a full pass on a GPU."""

Pairs = tuple[list[np.ndarray], list[TokenizedText], list[str]]
"""Of B (query, document) pairs the queries' token ids, the documents, and the queries."""

Part = TypeVar("Part")
Result = TypeVar("Result")


@dataclass(frozen=True, eq=False)
class Step:
    """A block of a run.

    Attributes:
        block: its pairs, and the rows that ask for them.
        documents: its tokenised texts.
        pairs: its pairs, with their tokens.
        report: to be called with shares of its work, for a progress bar; None for none.
    """

    block: Block
    documents: list[TokenizedText]
    pairs: Pairs
    report: Callable[[float], None] | None


def steps(
    scorer: LongDocScorer,
    queries: Sequence[str],
    query_ids: Sequence[np.ndarray],
    texts: Sequence[str],
    on_rows: Callable[[int], None] | None,
    *,
    offsets: bool,
) -> Iterator[Step]:
    """Divides a run.

    Args:
        scorer: whose run it is.
        queries: R queries.
        query_ids: token ids of the distinct ones, in order of appearance.
        texts: R texts.
        on_rows: called with the number of rows that are done.
        offsets: also keep the character offsets of the texts' tokens.
    """
    asked, of_row = numbered(queries)
    characters = scorer.block_characters()
    if len(scorer.devices) > 1:
        on_rows = one_at_a_time(on_rows)
        share = sum(map(len, texts)) // (BLOCKS_PER_DEVICE * len(scorer.devices))
        characters = min(characters, max(share, SMALL_BLOCK_CHARACTERS))
    for block in blocks(of_row, texts, characters=characters, pairs=BLOCK_PAIRS):
        documents = scorer.tokenize(block.texts, offsets=offsets)
        pairs = (
            [query_ids[query] for query, _ in block.pairs],
            [documents[text] for _, text in block.pairs],
            [asked[query] for query, _ in block.pairs],
        )
        yield Step(block, documents, pairs, share_out(on_rows, sum(map(len, block.rows))))


def on_devices(
    scorer: LongDocScorer, parts: Iterable[Part], work: Callable[[LongDocScorer, Part], Result]
) -> Iterator[tuple[Part, Result]]:
    """`work(scorer, part)` of each part of a run by the scorer or, on several devices, by copies of it, as it is done.

    Copies are made anew for every run of more than one part, so that they have the scorer's weights. They are copies of
    all objects in it, also of those that hooks belong to.

    Args:
        scorer: its coverage counts what is encoded.
        parts: steps, and what has been made of them.
        work: called in a thread for each device if there are several.
    """

    def counted(worker: LongDocScorer, part: Part) -> tuple[Result, tuple[int, int]]:
        return work(worker, part), worker.encoder.take_counts()

    workers = [scorer]
    if len(scorer.devices) > 1:
        parts = iter(parts)
        ahead = list(itertools.islice(parts, len(scorer.devices)))
        parts = itertools.chain(ahead, parts)
        if len(ahead) > 1:
            workers = _copies(scorer, scorer.devices[: len(ahead)])
    for part, (result, counts) in in_turn(workers, parts, counted):
        scorer.coverage.add_encoded(*counts)
        yield part, result
    scorer.encoder.affordable_tokens = min(worker.encoder.affordable_tokens for worker in workers)


def _copies(scorer: LongDocScorer, devices: Sequence[torch.device]) -> list[LongDocScorer]:
    """A copy on each device that has room for one; the first is the scorer's own.

    A copy there too: the caller may use the scorer in the meantime, and changes its modes.
    """
    shared = (scorer.tokenizer, scorer.tokens, scorer.windows, scorer.preselect)
    copies = []
    for device in devices:
        try:
            copies.append(replica(scorer, device, shared).eval())
        except torch.OutOfMemoryError:
            logger.warning("%s has no room for a copy of the model and takes no part", device)
    return copies
