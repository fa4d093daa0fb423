"""Random texts with a passage in them, changed in many ways."""

from __future__ import annotations

import random
from types import SimpleNamespace

import pandas as pd

from pyterrier_longdoc.common.language import count_tokens

SYLLABLES = "ba ce di fo gu la me ni po ru sa te vi zo ka".split()  # noqa: SIM905


class Writer:
    """Writes random prose: sentences of 4 to 12 words, frequent words more often."""

    def __init__(self, seed: int = 0, vocabulary: int = 1500) -> None:
        self.rng = random.Random(seed)
        self.vocabulary = ["".join(self.rng.choices(SYLLABLES, k=self.rng.randint(1, 4))) for _ in range(vocabulary)]
        self.weights = [1 / (rank + 5) for rank in range(vocabulary)]

    def words(self, count: int) -> list[str]:
        return self.rng.choices(self.vocabulary, self.weights, k=count)

    def prose(self, count: int) -> str:
        """`count` words."""
        sentences = []
        while count > 0:
            words = self.words(min(count, self.rng.randint(4, 12)))
            count -= len(words)
            sentences.append(" ".join(words).capitalize() + ".")
        return " ".join(sentences)

    def edited(self, text: str, share: float, kinds: tuple[str, ...] = ("substituted", "deleted", "inserted")) -> str:
        """A share of the words changed."""
        out = []
        for word in text.split(" "):
            kind = self.rng.choice(kinds) if self.rng.random() < share else "kept"
            out += {"deleted": [], "substituted": self.words(1), "inserted": [word, *self.words(1)]}.get(kind, [word])
        return " ".join(out)


def collection(count: int, passage: str | None = None) -> SimpleNamespace:
    """Topics, qrels and corpus of known-item search in prose, the passages looked for, and where they stand."""
    writer, rows, gold = Writer(7), [], []
    for number in range(count):
        before, own, after = (writer.prose(size) for size in (writer.rng.randint(0, 600), 40, 300))
        text = f"{before} {passage or own} {after}".strip()
        start = text.index(passage or own)
        rows.append((f"q{number}", passage or own, f"d{number}", text))
        gold.append((f"q{number}", f"d{number}", start, start + len(passage or own), count_tokens(before)))
    frame = pd.DataFrame(rows, columns=["qid", "passage", "docno", "text"])
    return SimpleNamespace(
        topics=frame[["qid"]].assign(query="elephants"),
        qrels=frame[["qid", "docno"]].assign(label=1),
        corpus=frame[["docno", "text"]],
        passages=frame[["qid", "passage"]].rename(columns={"passage": "text"}),
        gold=pd.DataFrame(gold, columns=["qid", "docno", "start", "end", "first_token"]),
    )
