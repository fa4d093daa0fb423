"""Training recipes, including those of the papers by name."""

from __future__ import annotations

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
from ..common.files import full_path
from ..common.measures import measure_named
from ..common.presentation import ReprMixin, described
from .losses import LOSSES


@dataclass(frozen=True, repr=False)
class Lora(ReprMixin):
    """Low-rank adapters (Hu et al. 2022) on the frozen backbone and pre-trained aggregator.

    Needs `peft`. After training, the adapters are merged into the weights, so that the model is saved and loaded like
    any other. Suitable learning rates are 1e-4 to 1e-3.

    Args:
        rank: the rank of the update of each matrix.
        alpha: the update is scaled by `alpha / rank`.
        dropout: the dropout rate before the update.
        targets: `"all-linear"`, or suffixes of the names of layers with adapters, e.g. `("query", "value")`.

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
    """The settings of a training; the defaults are the learning rates, loss and sizes of Boytsov et al. 2025.

    `TrainingArgs.preset(name)` returns the recipes of the papers; `"boytsov2025"` also has the sampling and the
    learning rate decay per epoch of that paper.

    Args:
        epochs: the number of passes over the queries.
        max_steps: the maximum number of optimiser steps; None for all epochs.
        loss: a name in `pyterrier_longdoc.training.LOSSES`.
        margin: the margin of margin losses, `max(0, margin - s+ + s-)`.
        alpha: the weight of the labels relative to the teacher in the `"distillation"` loss; 0.75 in PARADE.
        reduction: the `"sum"` or `"mean"` of the losses over the queries of a step.
        sampling: `"pairs"`: one positive and `negatives` negatives per epoch and query; `"pointwise"`: each candidate
            separately, once per epoch (PARADE); `"listwise"`: up to `1 + negatives` candidates of any label per epoch
            and query, including a positive.
        negatives: the number of negatives.
        negative_pool: sample this many negatives of a query once, by the seed, and use only these; None for all.
        max_negative_rank: the maximum rank of negatives among the candidates; None for all.
        min_label: the smallest positive label; smaller ones, also below 0, are negative.
        judged: the judged documents to use: only `"retrieved"` ones, which leaves out queries without a relevant
            candidate; or `"all"`, whatever their rank, as in FlexNeuART. The model's `text_loader` loads the text of
            documents that were not retrieved.
        unjudged: treat candidates without a label as `"negative"`, or `"skip"` them.
        augment: a module-level function `(text, random.Random) -> text` that changes each training text, e.g. a
            rotation.
        teacher_field: the column with the scores of the teacher, for losses that need one.
        queries_per_step: the number of queries (with `"pointwise"`: documents) per optimiser step.
        queries_per_forward: the number of queries per forward pass; larger values are faster and need more memory.
        learning_rates: learning rates by prefix of the parameter's name. The longest matching prefix counts; `""`
            matches the rest.
        weight_decay: the weight decay of AdamW.
        decay: apply weight decay to `"all"` parameters, or only to `"matrices"`, not to biases and layer norms
            (PARADE).
        schedule: the learning rates after the warm-up: `"constant"`; `"linear"`: down to 0; `"one_cycle"`: linearly up
            from 1/25 and down to 1/250000, with AdamW's first beta from 0.95 down to 0.85 and up again.
        warmup: the share of all steps, rounded down, in which the learning rates increase from 0 (at the first step).
        epoch_decay: the factor of the learning rates after each epoch.
        restart_each_epoch: restart the optimiser and the schedule in each epoch, as FlexNeuART does.
        max_grad_norm: the maximum norm of gradients, for clipping; None for no clipping.
        dropout: the dropout rate of all layers in training, including attention; None uses that of the checkpoint
            (usually 0.1). With 0, a step is faster, on a CPU by about a third.
        dtype: the precision of the backbone's computation; weights stay in `"float32"`.
        gradient_checkpointing: recompute activations instead of storing them, for less memory and a third more time.
        lora: train low-rank adapters instead of the backbone.
        metric: a measure as in `pt.Experiment`; with validation data, the weights with the highest value are kept.
        validate_steps: validate every `validate_steps` optimiser steps; None after each epoch.
        patience: stop after this many validations without a new best value; None for no early stopping.
        checkpoint: a folder for the state of the training. After an interruption, the same call continues from it. A
            finished training continues if `epochs`, `max_steps` or `patience` is increased. Model, recipe and data must
            be the same; texts only if they are columns of the candidates, because a `text_loader` reads them later.
            Your own functions and classes count by their names: after changing the code of one, use another folder. A
            folder is for one training at a time.
        save_steps: save the state every `save_steps` steps, and after each epoch and validation.
        trackers: trackers of accelerate, by name (`"tensorboard"`, `"wandb"`, ...) or as objects.
        seed: the random seed of the order of queries, the sampling and dropout; None uses the model's `seed`.

    Raises:
        ValueError: for values that are out of range or incompatible.

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
            raise ValueError(f"TrainingArgs: learning_rates={rates!r} must be rates by prefix, with '' for the rest")
        check_type(Callable | None, "a function", augment=self.augment)
        check_type(Lora | None, "Lora(...)", lora=self.lora)
        if LOSSES[self.loss].pairs and self.sampling != "pairs":
            raise ValueError(f"loss={self.loss!r} compares positives with negatives, so it needs sampling='pairs'")
        object.__setattr__(self, "checkpoint", full_path(self.checkpoint))
        trackers = (self.trackers,) if isinstance(self.trackers, str) else tuple(self.trackers)
        changes = {"metric": str(measure_named(self.metric)), "learning_rates": dict(rates), "trackers": trackers}
        for name, value in changes.items():
            object.__setattr__(self, name, value)

    @classmethod
    def preset(cls, name: str, **changes: Any) -> TrainingArgs:
        """Return the recipe of a paper; for recipes with several rounds, use `recipes`.

        Args:
            name: `"boytsov2025"`, `"robust04"` (both Boytsov et al. 2025), `"parade"`, `"parade-distillation"` (Eq. 8,
                needs a teacher's scores), `"best"` or `"best-robust04"` (for `fit_on_best_segments`).
            **changes: arguments to change.
        """
        rounds = recipes(name, **changes)
        if len(rounds) > 1:
            raise ValueError(f"{name!r} has {len(rounds)} rounds: fit the model with each of recipes({name!r}) in turn")
        return rounds[0]

    def as_dict(self) -> dict[str, Any]:
        """Return JSON-serializable values by name, without the arguments for checkpoints and trackers."""
        values = dict(vars(self))
        for name in ("checkpoint", "save_steps", "trackers"):
            del values[name]
        values["augment"] = None if self.augment is None else described(self.augment)
        values["lora"] = None if self.lora is None else dataclasses.asdict(self.lora)
        return values

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> TrainingArgs:
        """Restore from `as_dict`, except for `augment`, whose function is not stored."""
        lora = None if values["lora"] is None else Lora(**values["lora"])
        return cls(**{**{name: values[name] for name in cls().as_dict()}, "lora": lora, "augment": None})


# FlexNeuART's configuration of Boytsov et al. 2025. Differs from FlexNeuART: a last step with fewer than 16 queries is
# not dropped.
_BOYTSOV = TrainingArgs(negative_pool=5, judged="all", epoch_decay=0.95, restart_each_epoch=True)

# 100 epochs over about 200 queries with one schedule, starting from the model trained on MS MARCO documents
# (`start_from`).
_ROBUST04 = TrainingArgs(epochs=100, negative_pool=100, max_negative_rank=1000, judged="all", metric="nDCG@20")

# Li et al. (PARADE): pointwise, from a model trained on MS MARCO passages; their cross entropy of two logits equals the
# binary cross entropy of one. Differs from their code: steps are not rounded down to thousands; the learning rate
# decays from the end of the warm-up (theirs from the first step, so that 0.9 is left after the warm-up); AdamW has bias
# correction and an epsilon of 1e-8 (1e-6).
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

# MacAvaney et al. 2019: 32 batches of 16 pairs between validations, at most 100 validations, patience 20. The first
# round trains the vanilla ranker (AvgP), the second trains CEDR from its weights (`start_from`).
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

# Boytsov et al. 2022: one epoch on each of three candidate runs, the hardest last.
_LEADERBOARD = TrainingArgs(negative_pool=5, judged="all")

# Kim et al. (BeST): one positive and one negative from the top 100, until the reciprocal rank on the dev set decreases.
# The paper does not give the learning rate and batch size; these are usual for BERT.
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
"""Recipes by name, one for each round of training."""


def seed_of(args: TrainingArgs) -> int:
    """Return the seed of the recipe or the default seed of models."""
    return 42 if args.seed is None else int(args.seed)


def papers_of_recipe(recipe: Mapping[str, Any] | None) -> list[str]:
    """Return keys of `references.bib` for the loss and adapters of a recipe in the form of `TrainingArgs.as_dict`."""
    if recipe is None:
        return []
    loss = LOSSES.get(recipe.get("loss", ""))
    return [*(loss.papers if loss is not None else ()), *(["hu-2022-lora"] if recipe.get("lora") else [])]


def recipes(name: str, **changes: Any) -> tuple[TrainingArgs, ...]:
    """Return the recipe of a paper: a `TrainingArgs` for each round of training.

    Args:
        name: a name in `pyterrier_longdoc.training.PRESETS`, e.g. `"boytsov2025"` or `"cedr"`.
        **changes: arguments of `TrainingArgs` to change in all rounds.
    """
    check_arguments("str", choices=PRESETS.keys(), name=name)
    return tuple(replace(recipe, **changes) for recipe in PRESETS[name])
