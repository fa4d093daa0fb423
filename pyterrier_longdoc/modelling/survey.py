"""What a run would read of its queries and texts, told by reading them as it does and encoding nothing.

Shapes: R rows of a run, P distinct pairs of a query and a text.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..common.coverage import Coverage
from ..common.documents import Text
from .batching import ApartLayout
from .scorer import BLOCK_PAIRS, LongDocScorer
from .texts import blocks, numbered


@dataclass(frozen=True, eq=False)
class Survey:
    """What is read of R rows.

    Attributes:
        coverage: as after a run, apart from what would be computed.
        windows: `(P,)` windows of each pair, in the order in which they are read.
        rows: `(P,)` the first row of each distinct pair.
        tokens: `(P,)` tokens of its inputs, with query and special tokens.
        inputs: distinct inputs: a query and a window, or a window where that is encoded without its query; equal ones,
            too, where the head looks at tokens.
        tokens_of_inputs: of these together.
    """

    coverage: Coverage
    windows: np.ndarray
    rows: np.ndarray
    tokens: np.ndarray
    inputs: int
    tokens_of_inputs: int


def survey(scorer: LongDocScorer, queries: Sequence[str], texts: Sequence[Text], bar: Any = None) -> Survey:
    """Reads queries and texts as `LongDocScorer.score` does, selection of windows included.

    Args:
        scorer: the model.
        queries: R queries.
        texts: R texts.
        bar: a tqdm bar for the texts, in characters; None for no bar.

    Raises:
        ValueError: if windows are too many for the head.
    """
    layout, once = scorer.layout, scorer.encoder.once_for_all_queries
    apart = isinstance(layout, ApartLayout)
    equal_once = apart or scorer.head.needs == "cls"
    lengths_of = layout.text.length if isinstance(layout, ApartLayout) else layout.length
    census = scorer.census()
    scorer.encoder.begin(scorer.settings)
    asked, query_of_row = numbered(queries)
    query_ids = scorer.read_queries(asked, census)
    inputs: set[int] = set()
    rows, tokens, tokens_of_inputs = [], [], 0
    if bar is not None:
        bar.reset(total=sum(map(len, set(texts))))
    for block in blocks(query_of_row, texts, characters=scorer.encoder.block_characters, pairs=BLOCK_PAIRS):
        read = scorer.read_block(block, scorer.tokenize(block.texts), asked, query_ids, census)
        for query, ids, own, of_pair in zip(block.query, read.queries, read.windows, block.rows, strict=True):
            lengths = lengths_of(0 if apart else len(ids), list(map(len, own))).tolist()
            rows.append(of_pair[0])
            tokens.append(sum(lengths))
            for window, length in zip(own, lengths, strict=True):
                key = hash((0 if once else query, window.tobytes())) if equal_once else len(inputs)
                tokens_of_inputs += 0 if key in inputs else length
                inputs.add(key)
        if bar is not None:
            bar.update(sum(len(text) for text in block.texts))
    windows, first, own_tokens = (np.array(values, dtype="int64") for values in (census.windows, rows, tokens))
    return Survey(census.coverage, windows, first, own_tokens, len(inputs), tokens_of_inputs)
