"""A training of one process, or of several that train together."""

from __future__ import annotations

import os
from pathlib import Path

import torch
from safetensors.torch import save_file

import pyterrier_longdoc as ld

from .toy import optimizer_steps, toy_task


def main(backbone: str, out: str, die_at: str = "0") -> None:
    """Fits, and saves the model and the gradients of all steps; or dies in the step of that number."""
    rank = os.environ.get("RANK", "0")
    run, judged = toy_task(0, queries=5)
    # The last step of an epoch has one query: nothing for the second process.
    recipe = ld.TrainingArgs(
        epochs=2,
        queries_per_step=2,
        learning_rates={"": 1e-5},
        metric="RR",
        max_grad_norm=1.0,
        gradient_checkpointing=True,
        checkpoint=Path(out) / "state",
    )
    # Each process starts from weights of its own; the first one's count.
    sizes = {"window_size": 6, "stride": 4, "max_query_len": 2, "batch_size": 3}
    model = ld.MaxP(backbone, training=recipe, device="cpu", **sizes)
    model.model.head.dropout.p = 0.0
    with torch.no_grad():
        model.model.head.final.bias += float(rank)
    with optimizer_steps(stop_at=int(die_at), stop=lambda: os._exit(1)) as steps:
        model.fit(run, judged, run, judged)
    model.save(Path(out) / f"model-{rank}")
    again = model.apply_attributes(training=ld.TrainingArgs(max_steps=1, lora=ld.Lora(dropout=0.0)))
    again.fit(run, judged).save(Path(out) / f"again-{rank}")
    gradients = {str(number): gradient for number, (_, gradient, _) in enumerate(steps)}
    save_file(gradients, Path(out) / f"gradients-{rank}.safetensors")
