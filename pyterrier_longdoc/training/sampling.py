"""What an epoch trains on: queries and candidates drawn from the groups.

Every draw depends on the seed, the epoch and the query alone, not on what was drawn before: a run that continues
after a kill needs no state of a random generator.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

from .args import TrainingArgs
from .groups import Group


@dataclass(frozen=True)
class Pick:
    """Some candidates of a query.

    Attributes:
        group: index of the query's group.
        candidates: C indices within the group.
    """

    group: int
    candidates: tuple[int, ...]


@dataclass(frozen=True)
class Example:
    """What one loss is computed of.

    Attributes:
        qid: the query's identifier.
        query: the query's text.
        texts: C candidates; with `sampling="pairs"` a positive, then negatives.
        labels: their C labels.
        targets: the teacher's C scores, or None.
    """

    qid: str
    query: str
    texts: tuple[str, ...]
    labels: tuple[float, ...]
    targets: tuple[float, ...] | None


def examples_per_epoch(groups: Sequence[Group], args: TrainingArgs) -> int:
    """How many picks an epoch has."""
    return sum(len(group.texts) for group in groups) if args.sampling == "pointwise" else len(groups)


def draw_epoch(groups: Sequence[Group], args: TrainingArgs, epoch: int) -> list[Pick]:
    """All picks of an epoch in the order of training.

    Args:
        groups: the training data.
        args: the recipe: `sampling`, `negatives`, `seed`.
        epoch: its number, from 0.
    """
    rng = Random(f"{args.seed}:{epoch}")
    if args.sampling == "pointwise":
        picks = [Pick(g, (i,)) for g, group in enumerate(groups) for i in range(len(group.texts))]
    else:
        draw = _draw_pair if args.sampling == "pairs" else _draw_list
        picks = [Pick(g, draw(group, args, epoch)) for g, group in enumerate(groups)]
    rng.shuffle(picks)
    return picks


def make_example(pick: Pick, groups: Sequence[Group], args: TrainingArgs, epoch: int) -> Example:
    """The texts and labels of a pick, augmented if the recipe says so."""
    group = groups[pick.group]
    texts = tuple(group.texts[i] for i in pick.candidates)
    if args.augment is not None:
        texts = tuple(
            args.augment(text, Random(f"{args.seed}:{epoch}:{group.qid}:{i}"))
            for text, i in zip(texts, pick.candidates, strict=True)
        )
    return Example(
        group.qid,
        group.query,
        texts,
        # Losses see 0 as the limit of relevance, whatever the collection's scale.
        tuple(max(0.0, group.labels[i] - group.min_label + 1) for i in pick.candidates),
        None if group.targets is None else tuple(group.targets[i] for i in pick.candidates),
    )


def _draw_pair(group: Group, args: TrainingArgs, epoch: int) -> tuple[int, ...]:
    rng = Random(f"{args.seed}:{epoch}:{group.qid}")
    positive, negatives = rng.choice(group.positives), group.negatives
    if len(negatives) >= args.negatives:
        return (positive, *rng.sample(negatives, args.negatives))
    # Too few: each is taken equally often, or once more.
    rng.shuffle(negatives)
    return (positive, *(negatives[i % len(negatives)] for i in range(args.negatives)))


def _draw_list(group: Group, args: TrainingArgs, epoch: int) -> tuple[int, ...]:
    rng = Random(f"{args.seed}:{epoch}:{group.qid}")
    positive = rng.choice(group.positives)
    others = [i for i in range(len(group.texts)) if i != positive]
    return tuple(sorted((positive, *rng.sample(others, min(args.negatives, len(others))))))
