"""The papers' recipes by name, each a tuple of the rounds in which a model is trained."""

from __future__ import annotations

from dataclasses import replace
from types import MappingProxyType
from typing import Any

from .args import TrainingArgs

# FlexNeuART's configuration of Boytsov et al. 2025. Differs from FlexNeuART: a last step of fewer than 16 queries is
# trained too.
_BOYTSOV = TrainingArgs(negative_pool=5, epoch_decay=0.95, restart_each_epoch=True)

# 100 passes over about 200 queries under one schedule, from the model trained on MS MARCO documents (`start_from`).
_ROBUST04 = TrainingArgs(epochs=100, negative_pool=100, max_negative_rank=1000, metric="nDCG@20")

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
_LEADERBOARD = TrainingArgs(negative_pool=5)

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
