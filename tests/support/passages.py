"""Random texts with a passage in them, changed in many ways."""

from __future__ import annotations

import random

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
