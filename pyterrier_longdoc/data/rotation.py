"""Remove positional bias from training documents by rotation."""

from __future__ import annotations

import random
import re
from dataclasses import KW_ONLY, dataclass
from typing import ClassVar

import pandas as pd
import pyterrier as pt

from ..common.frames import strings
from ..common.presentation import NotebookMixin

_CUT = re.compile(r"\b(?=\w)")


def rotate(text: str, rng: random.Random) -> str:
    """Split a text at a random word and swap the two parts (Boytsov et al. 2025, Algorithm 1; Hofstätter et al. 2021).

    Splits at the start of the text and at the start of each word are equally likely.

    Args:
        text: the text; white space at its end is dropped.
        rng: chooses the word.

    Example:
        >>> rotate("one two three", random.Random(0))
        'two three one '
    """
    text = text.rstrip()
    if not text:
        return text
    starts = sorted({0, *(match.start() for match in _CUT.finditer(text))})
    cut = rng.choice(starts)
    return f"{text[cut:]} {text[:cut]}"


@dataclass(eq=False, repr=False)
class RotateDocuments(NotebookMixin, pt.Transformer):
    """Removes positional bias from training documents by rotating each at a random word.

    Put it between the text loader and the model for training, `bm25 >> dataset.text_loader() >> RotateDocuments()`, or
    before an indexer. The result only depends on the seed and the text, not on other rows.

    Args:
        text_field: the column to change.
        seed: the random seed.
    """

    papers: ClassVar[tuple[str, ...]] = ("hofstatter-2021-mitigating", "boytsov-2025-positional")

    _: KW_ONLY
    text_field: str = "text"
    seed: int = 0

    def transform(self, inp: pd.DataFrame) -> pd.DataFrame:
        """Rotate the texts; rows, index and other columns stay the same. None and NaN count as empty."""
        pt.validate.columns(inp, includes=[self.text_field], context=self)
        texts = strings(inp[self.text_field], self.text_field)
        # The text is part of the seed, so that a document is rotated in the same way in every run and batch.
        rotated = {text: rotate(text, random.Random(f"{self.seed}/{text}")) for text in set(texts)}
        column = pd.Series([rotated[text] for text in texts], inp.index, dtype=object)
        return inp.assign(**{self.text_field: column})
