"""The training recipe, and those of the papers by name."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from math import inf
from numbers import Real
from pathlib import Path
from random import Random
from types import MappingProxyType
from typing import Any

from ..common.arguments import argument, check_arguments, check_type, validate
from ..common.measures import measure_named
from ..common.presentation import ReprMixin, described
from .losses import LOSSES


@dataclass(frozen=True, repr=False)
class Lora(ReprMixin):
    """Low-rank adapters (Hu et al. 2022) on the backbone, and on a pre-trained aggregator, themselves frozen.

    Needs `peft`. After training they are added to the weights, so that the model is saved and loaded like any other;
    `save_adapter` stores it as a small difference. They want learning rates of 1e-4 to 1e-3.

    Args:
        rank: of the update of each matrix.
        alpha: the update is scaled by `alpha / rank`.
        dropout: before the update.
        targets: `"all-linear"`, or the ends of the names of the layers that get one, e.g. `("query", "value")`.

    Example:
        `ld.TrainingArgs(lora=ld.Lora(rank=8), learning_rates={"": 2e-4})`
    """

    rank: int = argument(16, at_least=1)
    alpha: float = argument(32.0, above=0)
    dropout: float = argument(0.0, at_least=0, below=1)
    targets: str | tuple[str, ...] = "all-linear"

    def __post_init__(self) -> None:
        validate(self)
        if not isinstance(self.targets, str):
            object.__setattr__(self, "targets", tuple(self.targets))


@dataclass(frozen=True, repr=False)
class TrainingArgs(ReprMixin):
    """How a model is trained; the defaults are rates, loss and sizes of Boytsov et al. 2025.

    `TrainingArgs.preset(name)` gives the recipes of the papers; `"boytsov2025"` also draws candidates and lowers the
    rates from epoch to epoch as theirs does.

    What is learned:

    Args:
        epochs: passes over the queries.
        max_steps: end after so many optimiser steps; None for all epochs.
        loss: a name in `pyterrier_longdoc.training.LOSSES`.
        margin: of the margin losses, `max(0, margin - s+ + s-)`.
        alpha: weight of the labels beside the teacher in the `"distillation"` loss; 0.75 in PARADE.
        reduction: of the losses of a step's queries: their `"sum"` or their `"mean"`.

    What is drawn:

    Args:
        sampling: `"pairs"`: per epoch and query one positive and `negatives` negatives; `"pointwise"`: each candidate
            alone, once per epoch (PARADE); `"listwise"`: per epoch and query up to `1 + negatives` candidates of any
            label, at least one of them a positive.
        negatives: how many.
        negative_pool: choose so many negatives of a query once, by the seed, and draw from these; None for all.
        max_negative_rank: negatives come from the candidates of a query up to this rank; None takes all.
        min_label: the lowest positive label; lower ones, also those below 0, are negative.
        judged: judged documents to train on: `"retrieved"` ones, which leaves out queries without a relevant
            candidate; or `"all"`, whatever their rank, as in FlexNeuART: the model's `text_loader` supplies the text of
            documents that were not retrieved.
        unjudged: candidates without a label are a `"negative"`, or left out, `"skip"`.
        augment: changes each training text, `(text, random.Random) -> text`, e.g. a rotation; a function of a module.
        teacher_field: the column with the teacher's scores, for losses that need one.

    How the weights move:

    Args:
        queries_per_step: queries (with `"pointwise"`: documents) whose gradients make an optimiser step.
        queries_per_forward: how many of these pass through the model at once: more is faster and takes more memory.
        learning_rates: learning rate by prefix of the parameter's name; the longest matching prefix counts, `""`
            matches the rest.
        weight_decay: of AdamW.
        decay: on `"all"` parameters, or on `"matrices"` alone and so not on biases and layer norms (PARADE).
        schedule: of the learning rates after the warm-up: `"constant"`; `"linear"`: down to 0; `"one_cycle"`: up from
            1/25 and down to 1/250000, linearly, with AdamW's first beta from 0.95 down to 0.85 and up again.
        warmup: share of all steps, rounded down, over which the learning rates grow from 0, that of the first step.
        epoch_decay: the learning rates are multiplied by it after each epoch.
        restart_each_epoch: begin each epoch with a new optimiser and its schedule anew, as FlexNeuART does.
        max_grad_norm: longer gradients are cut to this length; None leaves them.
        dropout: of all layers while training, attention included; None leaves it as the checkpoint has it (mostly
            0.1). At 0 a step is faster, on a CPU by about a third.
        dtype: precision of the backbone's computation; weights stay in `"float32"`.
        gradient_checkpointing: compute activations twice instead of keeping them: less memory, a third more time.
        lora: train low-rank adapters instead of the backbone.

    What is validated and saved:

    Args:
        metric: a measure as in `pt.Experiment`; with validation data, the weights that are best by it are kept.
        validate_steps: validate every so many optimiser steps; None after each epoch.
        patience: stop after so many validations without a new best; None never.
        checkpoint: a folder for the state of the training: after a kill the same call continues from it, and a finished
            training continues when `epochs`, `max_steps` or `patience` are raised.
        save_steps: write the state every so many steps, and after each epoch and validation.
        trackers: accelerate's: `"tensorboard"`, `"wandb"`, ... or tracker objects.
        seed: order of the queries, choice of positives and negatives, dropout; None for the model's own `seed`.

    Raises:
        ValueError: for values that are out of range or do not fit together.

    Example:
        `ld.MaxP(training=ld.TrainingArgs(epochs=3, patience=1)).fit(run, qrels, dev_run, dev_qrels)`
    """

    epochs: int = argument(1, at_least=1)
    max_steps: int | None = argument(None, at_least=1)
    loss: str = argument("pairwise_margin", choices=LOSSES.keys())
    margin: float = argument(1.0, at_least=0)
    alpha: float = argument(0.75, at_least=0, at_most=1)
    reduction: str = argument("sum", choices=("sum", "mean"))
    sampling: str = argument("pairs", choices=("pairs", "pointwise", "listwise"))
    negatives: int = argument(1, at_least=1)
    negative_pool: int | None = argument(None, at_least=1)
    max_negative_rank: int | None = argument(100, at_least=1)
    min_label: float = 1
    judged: str = argument("retrieved", choices=("retrieved", "all"))
    unjudged: str = argument("negative", choices=("negative", "skip"))
    augment: Callable[[str, Random], str] | None = None
    teacher_field: str = "teacher_score"
    queries_per_step: int = argument(16, at_least=1)
    queries_per_forward: int = argument(1, at_least=1)
    learning_rates: Mapping[str, float] = dataclasses.field(
        default_factory=lambda: {"encoder.": 1e-5, "": 1e-4}, hash=False
    )
    weight_decay: float = argument(1e-7, at_least=0)
    decay: str = argument("all", choices=("all", "matrices"))
    schedule: str = argument("constant", choices=("constant", "linear", "one_cycle"))
    warmup: float = argument(0.2, at_least=0, at_most=1)
    epoch_decay: float = argument(1.0, above=0, at_most=1)
    restart_each_epoch: bool = False
    max_grad_norm: float | None = argument(None, above=0)
    dropout: float | None = argument(None, at_least=0, below=1)
    dtype: str = argument("float32", choices=("float32", "bfloat16", "float16"))
    gradient_checkpointing: bool = False
    lora: Lora | None = None
    metric: str = "nDCG@10"
    validate_steps: int | None = argument(None, at_least=1)
    patience: int | None = argument(None, at_least=1)
    checkpoint: str | Path | None = None
    save_steps: int = argument(100, at_least=1)
    trackers: tuple[Any, ...] = ()
    seed: int | None = None

    def __post_init__(self) -> None:
        validate(self)
        rates = self.learning_rates
        by_prefix = isinstance(rates, Mapping) and "" in rates
        if not by_prefix or not all(isinstance(rate, Real) and 0 <= rate < inf for rate in rates.values()):
            raise ValueError(f"TrainingArgs: learning_rates={rates!r} must be rates by prefix, with '' for all others")
        check_type(Callable | None, "a function", augment=self.augment)
        check_type(Lora | None, "Lora(...)", lora=self.lora)
        if LOSSES[self.loss].pairs and self.sampling != "pairs":
            raise ValueError(f"loss={self.loss!r} compares positives with negatives: it needs sampling='pairs'")
        trackers = (self.trackers,) if isinstance(self.trackers, str) else tuple(self.trackers)
        changes = {"metric": str(measure_named(self.metric)), "learning_rates": dict(rates), "trackers": trackers}
        for name, value in changes.items():
            object.__setattr__(self, name, value)

    @classmethod
    def preset(cls, name: str, **changes: Any) -> TrainingArgs:
        """Return a paper's recipe; `recipes` returns those of several rounds, as a tuple.

        Args:
            name: `"boytsov2025"`, `"robust04"` (both Boytsov et al. 2025), `"parade"`, `"parade-distillation"` (Eq. 8,
                needs a teacher's scores), `"best"` or `"best-robust04"` (for `fit_on_best_segments`).
            **changes: arguments that differ.
        """
        rounds = recipes(name, **changes)
        if len(rounds) > 1:
            raise ValueError(f"{name!r} has {len(rounds)} rounds: take training.recipes({name!r}) and fit_in_turn")
        return rounds[0]

    def with_seed(self, seed: int) -> TrainingArgs:
        """Return the same recipe with a seed."""
        seeded = copy.copy(self)
        object.__setattr__(seeded, "seed", seed)
        return seeded

    def as_dict(self) -> dict[str, Any]:
        """Return JSON-able values by name, without the arguments for checkpoints and trackers."""
        values = dict(vars(self))
        for name in ("checkpoint", "save_steps", "trackers"):
            del values[name]
        values["augment"] = None if self.augment is None else described(self.augment)
        values["lora"] = None if self.lora is None else dataclasses.asdict(self.lora)
        return values


# FlexNeuART's configuration of Boytsov et al. 2025. Differs from FlexNeuART: a last step of fewer than 16 queries is
# trained too.
_BOYTSOV = TrainingArgs(negative_pool=5, judged="all", epoch_decay=0.95, restart_each_epoch=True)

# 100 passes over about 200 queries under one schedule, from the model trained on MS MARCO documents (`start_from`).
_ROBUST04 = TrainingArgs(epochs=100, negative_pool=100, max_negative_rank=1000, judged="all", metric="nDCG@20")

# Li et al. (PARADE): every candidate alone, from a model trained on MS MARCO passages; their 2-logit cross entropy is
# the binary one here. Differs from their code: steps are not rounded down to thousands; the rate decays from the end
# of the warm-up on (theirs from the first step: 0.9 is left after it); AdamW corrects its means, and its epsilon is
# 1e-8 (1e-6).
_PARADE = TrainingArgs(
    epochs=3,
    loss="pointwise_bce",
    reduction="mean",
    sampling="pointwise",
    max_negative_rank=1000,
    queries_per_step=32,
    learning_rates={"": 3e-6},
    weight_decay=0.01,
    decay="matrices",
    schedule="linear",
    warmup=0.1,
    max_grad_norm=1.0,
    metric="nDCG@20",
)

# MacAvaney et al. 2019: 32 batches of 16 pairs between validations, at most 100 of these, patience 20. The first round
# trains the plain ranker (AvgP), the second CEDR from its weights (`start_from`).
_CEDR = TrainingArgs(
    epochs=3200,
    max_steps=3200,
    loss="pairwise_softmax",
    reduction="mean",
    learning_rates={"encoder.": 2e-5, "": 1e-3},
    weight_decay=0.0,
    warmup=0.0,
    metric="P@20",
    validate_steps=32,
    patience=20,
)

# Boytsov et al. 2022: an epoch on each of three candidate runs, the hardest last.
_LEADERBOARD = TrainingArgs(negative_pool=5, judged="all")

# Kim et al. (BeST): one positive and one negative of the top 100, until the dev set's reciprocal rank falls. The paper
# gives neither learning rate nor batch size; these are usual for BERT.
_BEST = TrainingArgs(epochs=10, learning_rates={"": 1e-5}, metric="RR@100", patience=1)

PRESETS = MappingProxyType(
    {
        "boytsov2025": (_BOYTSOV,),
        "robust04": (_ROBUST04,),
        "leaderboard": (_LEADERBOARD, _LEADERBOARD, replace(_LEADERBOARD, schedule="one_cycle")),
        "parade": (_PARADE,),
        "parade-distillation": (replace(_PARADE, loss="distillation"),),
        "cedr": (_CEDR, _CEDR),
        "best": (_BEST,),
        "best-robust04": (replace(_BEST, loss="pointwise_bce", negatives=10, metric="nDCG@20"),),
    }
)
"""Recipes by name. A recipe of several rounds is trained by `fit_in_turn`, or model by model."""


def seed_of(args: TrainingArgs) -> int:
    """Return the recipe's seed, or the default seed of models."""
    return 42 if args.seed is None else int(args.seed)


def papers_of_recipe(recipe: Mapping[str, Any] | None) -> list[str]:
    """Return keys of `references.bib` for the loss and the adapters of a recipe as `TrainingArgs.as_dict` has it."""
    if recipe is None:
        return []
    loss = LOSSES.get(recipe.get("loss", ""))
    return [*(loss.papers if loss is not None else ()), *(["hu-2022-lora"] if recipe.get("lora") else [])]


def recipes(name: str, **changes: Any) -> tuple[TrainingArgs, ...]:
    """Return the rounds of a paper's recipe, one of `PRESETS`, with arguments that differ in all of them."""
    check_arguments("str", choices=PRESETS.keys(), name=name)
    return tuple(replace(recipe, **changes) for recipe in PRESETS[name])
