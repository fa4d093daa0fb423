"""A task that tiny models learn, and a model of one weight."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext

import numpy as np
import pandas as pd
import pytest
import torch
from torch import nn

from pyterrier_longdoc.common.frames import Question, documents
from pyterrier_longdoc.training import Example, QueryGroup, TrainingSet

from . import tiny


def qrels(*rows: tuple[str, str, int]) -> pd.DataFrame:
    return pd.DataFrame(rows, columns=["qid", "docno", "label"])


def toy_task(seed: int, queries: int = 8) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Relevant is the one of 4 documents in which, somewhere, the query's only word occurs."""
    rng = random.Random(seed)
    names = tiny.WORDS[19 : 19 + queries]  # cat dog bird ...
    filler = tiny.WORDS[:19]
    rows, judged = [], []
    for word in names:
        others = rng.sample([name for name in names if name != word], 3)
        for i, inside in enumerate([word, *others]):
            words = [rng.choice(filler) for _ in range(rng.randint(6, 12))]
            words.insert(rng.randrange(len(words) + 1), inside)
            rows.append((f"q-{word}", word, f"d{i}", " ".join(words), 0.1 * i))
        judged.append((f"q-{word}", "d0", 1))
    return pd.DataFrame(rows, columns=["qid", "query", "docno", "text", "score"]), qrels(*judged)


def set_of(groups: Sequence[QueryGroup], values: Sequence) -> TrainingSet:
    """A training set with these texts."""
    frame = pd.DataFrame({"text": values, "docno": [f"d{i}" for i in range(len(values))]})
    return TrainingSet(groups, frame, lambda rows: documents(rows["text"].tolist()))


def all_of(groups: Sequence[QueryGroup], values: Sequence) -> list[Example]:
    """Each group's candidates, all of them, with their texts."""
    return [
        Example(
            group.qid,
            group.query,
            tuple(documents([values[row] for row in group.rows])),
            tuple(group.labels.tolist()),
            None if group.targets is None else tuple(group.targets.tolist()),
        )
        for group in groups
    ]


class Toy(nn.Module):
    """Scores a text by a learned weight per text."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.ModuleDict({"first": nn.Linear(1, 1), "second": nn.Linear(1, 1)})
        self.head = nn.Linear(1, 1, bias=False)
        self.calls: list[tuple[list[str], list[str]]] = []
        self.modes: list[bool] = []
        for parameter in self.parameters():
            nn.init.zeros_(parameter)

    def forward(self, queries, texts):
        texts = [text.text for text in texts]
        self.calls.append(([query.text for query in queries], texts))
        self.modes.append(self.training)
        return self.head(torch.tensor([[1.0] if text.startswith("+") else [-1.0] for text in texts])).squeeze(1)


def toy_set(count: int) -> TrainingSet:
    """So many queries with five candidates, two of which are relevant."""
    labels = np.array([1.0, 0.0, 2.0, 0.0, 0.0])
    groups = [QueryGroup(f"q{i}", Question(f"query {i}"), np.arange(5), labels) for i in range(count)]
    return set_of(groups, ["+a", "-a", "+b", "-b", "-c"])


class Broken(Toy):
    """A `Toy` whose gradient is multiplied at the call of that number."""

    def __init__(self, at: int, factor: float):
        super().__init__()
        self.at, self.factor = at, factor

    def forward(self, queries, texts):
        scores = super().forward(queries, texts)
        scores.register_hook(lambda gradient: gradient * (self.factor if len(self.calls) == self.at else 1.0))
        return scores


def interrupt() -> None:
    raise KeyboardInterrupt


@contextmanager
def optimizer_steps(*, stop_at: int = 0, stop: Callable[[], None] = interrupt) -> Iterator[list]:
    """Gets learning rate, all gradients and whether the optimiser is new of each of its steps.

    The step of that number is stopped before it is done; the interruption ends here.
    """
    seen: list[tuple[float, torch.Tensor, bool]] = []
    step = torch.optim.AdamW.step

    def spy(self, *args, **kwargs):
        if len(seen) + 1 == stop_at:
            stop()
        gradients = [p.grad.flatten() for group in self.param_groups for p in group["params"] if p.grad is not None]
        seen.append((self.param_groups[0]["lr"], torch.cat(gradients), not self.state))
        return step(self, *args, **kwargs)

    torch.optim.AdamW.step = spy
    try:
        with pytest.raises(KeyboardInterrupt, match="interrupted after step") if stop_at else nullcontext():
            yield seen
    finally:
        torch.optim.AdamW.step = step
