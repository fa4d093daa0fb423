"""The training recipe."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from numbers import Integral
from types import MappingProxyType

from .validation import measure_named


@dataclass(frozen=True)
class TrainingArgs:
    """How a model is trained; the defaults are those of Boytsov et al. 2025.

    Args:
        epochs: passes over the queries; each draws one positive and one negative per query.
        margin: of the pairwise loss `sum max(0, margin - s+ + s-)`.
        queries_per_step: queries whose gradients are summed before an optimiser step.
        learning_rates: learning rate by prefix of the parameter's name; the longest matching prefix counts, `""`
            matches the rest.
        weight_decay: of AdamW, on every parameter.
        warmup: share of all steps over which the learning rates grow from 0; then they stay constant.
        max_negative_rank: negatives come from the candidates of a query up to this rank; None takes all.
        metric: any ir_measures measure; with validation data, the epoch that is best by it is kept.
        seed: order of the queries, choice of positives and negatives, dropout.

    Raises:
        ValueError: for values out of range.
    """

    epochs: int = 1
    margin: float = 1.0
    queries_per_step: int = 16
    learning_rates: Mapping[str, float] = field(
        default_factory=lambda: MappingProxyType({"encoder.": 1e-5, "": 1e-4}), hash=False
    )
    weight_decay: float = 1e-7
    warmup: float = 0.2
    max_negative_rank: int | None = 100
    metric: str = "nDCG@10"
    seed: int = 42

    def __post_init__(self) -> None:
        for name in ("epochs", "queries_per_step", "max_negative_rank"):
            value = getattr(self, name)
            if value is None and name == "max_negative_rank":
                continue
            if not isinstance(value, Integral) or value < 1:
                raise ValueError(f"{name}={value!r} must be a whole number of at least 1")
        measure_named(self.metric)
        if not 0.0 <= self.warmup <= 1.0:
            raise ValueError(f"warmup={self.warmup} is a share of the steps, between 0 and 1")
        if "" not in self.learning_rates:
            raise ValueError('learning_rates needs an entry "" for parameters that no other prefix matches')
        if min(self.margin, self.weight_decay, *self.learning_rates.values()) < 0:
            raise ValueError("margin, weight_decay and learning_rates cannot be negative")

    def __reduce__(self) -> tuple:
        # A mapping proxy does not pickle; a dict does.
        values = {name: getattr(self, name) for name in self.__dataclass_fields__}
        return _rebuild, ({**values, "learning_rates": dict(self.learning_rates)},)

    def as_dict(self) -> dict:
        """JSON-able values by name."""
        values = {name: getattr(self, name) for name in self.__dataclass_fields__}
        return {**values, "learning_rates": dict(self.learning_rates)}


def _rebuild(values: dict) -> TrainingArgs:
    return TrainingArgs(**values)
