"""Takes the position out of training documents: rotation, and shuffles of windows or sentences."""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass
from functools import partial
from typing import ClassVar

import pandas as pd
import pyterrier as pt

from ..common.arguments import check_arguments
from ..common.frames import strings
from ..common.language import sentences
from ..common.presentation import Presented, changed_arguments
from ..common.progress import counting

Augmentation = Callable[[str, random.Random], str]
"""Changes a text; the same random numbers give the same result."""

_CUT = re.compile(r"\b(?=\w)")


def rotate(text: str, rng: random.Random) -> str:
    """Cut a text at a random word and swap the two parts (Boytsov et al. 2025, Algorithm 1; Hofstätter et al. 2021).

    Cuts at the start of the text and at the start of each word are equally likely.

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


def shuffle_windows(text: str, rng: random.Random, *, words: int = 100) -> str:
    """Put windows of `words` words in random order. White space becomes single spaces."""
    tokens = text.split()
    windows = [" ".join(tokens[start : start + words]) for start in range(0, len(tokens), words)]
    rng.shuffle(windows)
    return " ".join(windows)


def shuffle_sentences(text: str, rng: random.Random) -> str:
    """Put sentences (`sentences`) in random order, one space between them."""
    parts = sentences(text)
    rng.shuffle(parts)
    return " ".join(parts)


def position_augmentation(name: str, *, words: int = 100) -> Augmentation:
    """Return an augmentation by name, to be called with a text and random numbers, once for each use of a document.

    Args:
        name: "rotate", "windows" or "sentences" (shuffled).
        words: length of a window, for "windows".
    """
    check_arguments("int", at_least=1, words=words)
    augmentations: dict[str, Augmentation] = {
        "rotate": rotate,
        "windows": partial(shuffle_windows, words=words),
        "sentences": shuffle_sentences,
    }
    check_arguments("str", choices=augmentations.keys(), augmentation=name)
    return augmentations[name]


@dataclass(eq=False, repr=False)
class RotateDocuments(Presented, pt.Transformer):
    """Removes the bias of positions from training documents: rotates each at a random word, or shuffles its parts.

    Put it between text loader and model when training, `bm25 >> dataset.text_loader() >> RotateDocuments()`, or before
    an indexer. The seed and the text alone decide what a text becomes, whatever else is in the frame.

    Args:
        augmentation: "rotate", "windows" or "sentences"; see `position_augmentation`.
        words: length of a window, for "windows".
        text_field: the column to change.
        seed: of the random numbers.
        verbose: show a progress bar.
    """

    papers: ClassVar[tuple[str, ...]] = ("hofstatter-2021-mitigating", "boytsov-2025-positional")

    augmentation: str = "rotate"
    _: KW_ONLY
    words: int = 100
    text_field: str = "text"
    seed: int = 0
    verbose: bool = False

    def __post_init__(self) -> None:
        position_augmentation(self.augmentation, words=self.words)

    def __repr__(self) -> str:
        return f"RotateDocuments({', '.join(changed_arguments(self, ('verbose',)))})"

    def transform(self, inp: pd.DataFrame) -> pd.DataFrame:
        """Change the texts of a frame, whose rows, index and other columns stay; None and NaN count as empty."""
        pt.validate.columns(inp, includes=[self.text_field], context=self)
        texts = strings(inp[self.text_field], self.text_field)
        augment = position_augmentation(self.augmentation, words=self.words)
        new_texts = []
        # The text seeds the random numbers: a document changes in the same way in every run and batch.
        with counting("RotateDocuments", "doc", len(texts), shown=self.verbose) as advance:
            for text in texts:
                new_texts.append(augment(text, random.Random(f"{self.seed}/{text}")))
                advance()
        return inp.assign(**{self.text_field: pd.Series(new_texts, dtype=str).array})
