"""The training recipe, and those of the papers by name."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from numbers import Integral, Real
from pathlib import Path
from random import Random
from types import MappingProxyType
from typing import Any

from ..common.arguments import check_choice, check_given, check_positive, plain_fields
from ..common.measures import measure_named
from ..common.presentation import ShowsChanges, changes, described
from .losses import LOSSES

_COUNTS = ("epochs", "negatives", "queries_per_step", "queries_per_forward", "save_steps")
_COUNTS_OR_NONE = ("max_steps", "negative_pool", "max_negative_rank", "validate_steps", "patience")
_CHOICES = {
    "reduction": ("sum", "mean"),
    "sampling": ("pairs", "pointwise", "listwise"),
    "judged": ("retrieved", "all"),
    "unjudged": ("negative", "skip"),
    "decay": ("all", "matrices"),
    "schedule": ("constant", "linear", "one_cycle"),
    "dtype": ("float32", "bfloat16", "float16"),
}


def _number(holds: Callable[[Any], bool], *, or_none: bool = False) -> Callable[[Any], bool]:
    """Tells of any value whether it is a number for which this holds."""

    def is_valid(value: Any) -> bool:
        if value is None:
            return or_none
        return isinstance(value, Real) and not isinstance(value, bool) and holds(value)

    return is_valid


_RULES: dict[str, tuple[Callable[[Any], bool], str]] = {
    "margin": (_number(lambda value: value >= 0.0), "at least 0"),
    "alpha": (_number(lambda value: 0.0 <= value <= 1.0), "a weight, between 0 and 1"),
    "min_label": (_number(lambda value: value == value), "a number"),
    "weight_decay": (_number(lambda value: value >= 0.0), "at least 0"),
    "warmup": (_number(lambda value: 0.0 <= value <= 1.0), "a share of the steps, between 0 and 1"),
    "epoch_decay": (_number(lambda value: 0.0 < value <= 1.0), "above 0 and at most 1"),
    "max_grad_norm": (_number(lambda value: value > 0.0, or_none=True), "above 0, or None to leave gradients alone"),
    "dropout": (
        _number(lambda value: 0.0 <= value < 1.0, or_none=True),
        "at least 0 and below 1, or None for the checkpoint's own",
    ),
    "seed": (
        _number(lambda value: isinstance(value, Integral), or_none=True),
        "a whole number, or None for the model's",
    ),
    "restart_each_epoch": (lambda value: isinstance(value, bool), "True or False"),
    "gradient_checkpointing": (lambda value: isinstance(value, bool), "True or False"),
    "lora": (lambda value: isinstance(value, Lora | None), "ld.Lora(rank=...) or None"),
    "augment": (lambda value: value is None or callable(value), "a function of a text and a random.Random"),
    "trackers": (
        lambda value: isinstance(value, Iterable) and not isinstance(value, str),
        'a tuple, such as ("tensorboard",)',
    ),
}


@dataclass(frozen=True, repr=False)
class Lora(ShowsChanges):
    """Low-rank adapters (Hu et al. 2022) on the backbone, and on a pre-trained aggregator, themselves frozen.

    Needs `peft`. After training they are added to the weights, so that the model is saved and loaded like any other;
    `save_adapter` stores it as a small difference. They want learning rates of 1e-4 to 1e-3.

    Args:
        rank: of the update of each matrix.
        alpha: the update is scaled by `alpha / rank`.
        dropout: before the update.
        targets: `"all-linear"`, or the ends of the names of the layers that get one, e.g. `("query", "value")`.
    """

    rank: int = 16
    alpha: float = 32.0
    dropout: float = 0.0
    targets: str | tuple[str, ...] = "all-linear"

    def __post_init__(self) -> None:
        plain_fields(self)
        if not isinstance(self.targets, str):
            object.__setattr__(self, "targets", tuple(self.targets))
        check_given(rank=self.rank)
        if not isinstance(self.alpha, Real) or not self.alpha > 0:
            raise ValueError(f"alpha={self.alpha!r} must be above 0")
        if not 0.0 <= self.dropout < 1.0:
            raise ValueError(f"dropout={self.dropout} must be at least 0 and below 1")


@dataclass(frozen=True, repr=False)
class TrainingArgs:
    """How a model is trained; the defaults are rates, loss and sizes of Boytsov et al. 2025.

    `TrainingArgs.preset(name)` gives the recipes of the papers; `"boytsov2025"` also draws candidates and lowers the
    rates from epoch to epoch as theirs does.

    What is learned:

    Args:
        epochs: passes over the queries.
        max_steps: end after so many optimiser steps; None for all epochs. A training with a checkpoint folder goes on
            when this or `epochs` is raised.
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
        min_label: labels from here on are positive; all lower ones, also those below 0, are negative.
        judged: which judged documents are trained on: those `"retrieved"`, so that queries without a relevant one among
            their candidates are left out; or `"all"`, whatever their rank, as FlexNeuART does and the recipes of
            Boytsov et al. do: the model's `text_loader` supplies the text of those that were not retrieved.
        unjudged: whether candidates without a label are a `"negative"` or are left out, `"skip"`.
        augment: changes each training text, `(text, random.Random) -> text`, e.g. a rotation; a function of a module.
        teacher_field: the column with the teacher's scores, for losses that need one.

    How the weights move:

    Args:
        queries_per_step: queries (with `"pointwise"`: documents) whose gradients make an optimiser step.
        queries_per_forward: of these, how many pass through the model at once: more is faster and takes more memory,
            the result differs by dropout's randomness alone.
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
            0.1). At 0 each step is faster, on a CPU by about a third; worth it where no document is seen twice.
        dtype: precision of the backbone's computation; weights stay in `"float32"`.
        gradient_checkpointing: compute activations twice instead of keeping them: less memory, a third more time.
        lora: train low-rank adapters instead of the backbone.

    What is validated and saved:

    Args:
        metric: a measure as in `pt.Experiment`; with validation data, the weights that are best by it are kept.
        validate_steps: validate every so many optimiser steps; None after each epoch.
        patience: stop after so many validations without a new best; None never.
        checkpoint: a folder for the state of the training: a run that was killed continues from there when it is
            started again, and ends with the same weights as if it had not been; one that is finished continues when it
            is made longer. None keeps no state.
        save_steps: write it every so many steps, and after each epoch and validation.
        trackers: accelerate's: `"tensorboard"`, `"wandb"`, ... or tracker objects.
        seed: order of the queries, choice of positives and negatives, dropout; None for the model's own `seed`.

    Raises:
        ValueError: for values out of range or that do not fit together.
    """

    epochs: int = 1
    max_steps: int | None = None
    loss: str = "pairwise_margin"
    margin: float = 1.0
    alpha: float = 0.75
    reduction: str = "sum"
    sampling: str = "pairs"
    negatives: int = 1
    negative_pool: int | None = None
    max_negative_rank: int | None = 100
    min_label: int = 1
    judged: str = "retrieved"
    unjudged: str = "negative"
    augment: Callable[[str, Random], str] | None = None
    teacher_field: str = "teacher_score"
    queries_per_step: int = 16
    queries_per_forward: int = 1
    learning_rates: Mapping[str, float] = field(
        default_factory=lambda: MappingProxyType({"encoder.": 1e-5, "": 1e-4}), hash=False
    )
    weight_decay: float = 1e-7
    decay: str = "all"
    schedule: str = "constant"
    warmup: float = 0.2
    epoch_decay: float = 1.0
    restart_each_epoch: bool = False
    max_grad_norm: float | None = None
    dropout: float | None = None
    dtype: str = "float32"
    gradient_checkpointing: bool = False
    lora: Lora | None = None
    metric: str = "nDCG@10"
    validate_steps: int | None = None
    patience: int | None = None
    checkpoint: str | Path | None = None
    save_steps: int = 100
    trackers: tuple[Any, ...] = ()
    seed: int | None = None

    def __post_init__(self) -> None:
        plain_fields(self)
        check_given(**{name: getattr(self, name) for name in _COUNTS})
        check_positive(**{name: getattr(self, name) for name in _COUNTS_OR_NONE})
        for name, choices in {"loss": tuple(LOSSES), **_CHOICES}.items():
            check_choice(name, getattr(self, name), choices)
        for name, (holds, words) in _RULES.items():
            if not holds(getattr(self, name)):
                raise ValueError(f"{name}={getattr(self, name)!r} must be {words}")
        self._check_rates()
        object.__setattr__(self, "metric", str(measure_named(self.metric)))
        if LOSSES[self.loss].pairs and self.sampling != "pairs":
            raise ValueError(f"loss={self.loss!r} compares positives with negatives: it needs sampling='pairs'")
        # Nobody can change the caller's mapping or list behind a frozen recipe.
        object.__setattr__(self, "learning_rates", MappingProxyType(dict(self.learning_rates)))
        object.__setattr__(self, "trackers", tuple(self.trackers))

    def __repr__(self) -> str:
        """What differs from the defaults, or from a paper's recipe where that is less."""
        shown = [(len(changes(self)), "TrainingArgs", changes(self))]
        for name, (recipe, *further) in PRESETS.items():
            if not further:
                own = [repr(name), *changes(self, recipe)]
                shown.append((len(own), "TrainingArgs.preset", own))
        _, made_by, arguments = min(shown, key=lambda way: way[0])
        return f"{made_by}({', '.join(arguments)})"

    def _check_rates(self) -> None:
        if not isinstance(self.learning_rates, Mapping):
            raise ValueError(f'learning_rates={self.learning_rates!r} must map prefixes to rates: {{"": 1e-4}} for one')
        if "" not in self.learning_rates:
            raise ValueError('learning_rates needs an entry "" for parameters that no other prefix matches')
        for prefix, rate in self.learning_rates.items():
            if not isinstance(rate, Real) or not rate >= 0:
                raise ValueError(f"learning_rates[{prefix!r}]={rate!r} must be at least 0")

    @classmethod
    def preset(cls, name: str, **changes: Any) -> TrainingArgs:
        """A paper's recipe; `pyterrier_longdoc.training.recipes` gives those of several rounds, as a tuple.

        Args:
            name: `"boytsov2025"`, `"robust04"` (both Boytsov et al. 2025), `"parade"`, `"parade-distillation"` (Eq. 8,
                needs a teacher's scores), `"best"` or `"best-robust04"` (for `fit_on_best_segments`).
            **changes: arguments that differ.

        Raises:
            ValueError: for an unknown name, or a recipe of several rounds.
        """
        rounds = recipes(name, **changes)
        if len(rounds) > 1:
            raise ValueError(f"{name!r} has {len(rounds)} rounds: take training.recipes({name!r}) and fit_in_turn")
        return rounds[0]

    def as_dict(self) -> dict[str, Any]:
        """JSON-able values by name, without those that say where a run keeps its records."""
        values = {**vars(self), "learning_rates": dict(self.learning_rates)}
        for name in ("checkpoint", "save_steps", "trackers"):
            del values[name]
        if self.augment is not None:
            values["augment"] = described(self.augment)
        if self.lora is not None:
            values["lora"] = dataclasses.asdict(self.lora)
        return values

    def __reduce__(self) -> tuple:
        # A mapping proxy does not pickle; a dict does.
        return partial(TrainingArgs, **{**vars(self), "learning_rates": dict(self.learning_rates)}), ()


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
    """The recipe's seed, or that of models that are given none, for loops of one's own."""
    return 42 if args.seed is None else int(args.seed)


def papers_of_recipe(recipe: Mapping[str, Any] | None) -> list[str]:
    """Keys of `references.bib` for the loss and the adapters of a training, by what `TrainingArgs.as_dict` says."""
    if recipe is None:
        return []
    loss = LOSSES.get(recipe.get("loss", ""))
    return [*(loss.papers if loss is not None else ()), *(["hu-2022-lora"] if recipe.get("lora") else [])]


def recipes(name: str, **changes: Any) -> tuple[TrainingArgs, ...]:
    """The rounds of a paper's recipe.

    Args:
        name: one of `PRESETS`.
        **changes: arguments of `TrainingArgs` that differ, in all rounds.

    Raises:
        ValueError: for an unknown name.
    """
    if name not in PRESETS:
        raise ValueError(f"there is no recipe {name!r}; known are {', '.join(PRESETS)}")
    return tuple(replace(recipe, **changes) for recipe in PRESETS[name])
