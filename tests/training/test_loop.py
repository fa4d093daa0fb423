"""How the loop computes: precision, memory, adapters, validation, trackers, several processes."""

from __future__ import annotations

import logging
import sys
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
import torch

import pyterrier_longdoc as ld
from pyterrier_longdoc.training import Lora, TeacherScores, TrainingArgs, evaluate, plot_history, train

from ..support import tiny, tiny_long
from ..support.systems import CROSS_ENCODERS, make
from ..training.test_training import Toy, toy_groups, toy_task

pytestmark = [
    pytest.mark.filterwarnings("ignore::pyterrier_longdoc.rerankers.base.UntrainedWarning"),
    pytest.mark.filterwarnings("ignore::pyterrier_longdoc.common.frames.TruncationWarning"),
]
RUN, JUDGED = toy_task(0, queries=5)
RECIPE = TrainingArgs(epochs=2, queries_per_step=2, learning_rates={"": 1e-2}, metric="RR")


@pytest.fixture(scope="module")
def calm(tmp_path_factory) -> str:
    """A cross-encoder without dropout, so that how a step is divided makes no difference."""
    folder = tmp_path_factory.mktemp("calm")
    return tiny.checkpoint(folder, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)


@pytest.fixture
def gradients(monkeypatch) -> list[torch.Tensor]:
    """All gradients of each optimiser step."""
    seen = []
    step = torch.optim.AdamW.step

    def spy(self, *args, **kwargs):
        parameters = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        seen.append(torch.cat([p.grad.flatten() for p in parameters]))
        return step(self, *args, **kwargs)

    monkeypatch.setattr(torch.optim.AdamW, "step", spy)
    return seen


def fitted(backbone: str, name: str = "MaxP", data: tuple = (RUN, JUDGED), **changes):
    model = make(name, backbone, training=replace(RECIPE, **changes))
    model.load_scorer().head.dropout.p = 0.0
    return model.fit(*data)


def weights(model) -> dict[str, torch.Tensor]:
    return model.load_scorer().state_dict()


def assert_close(one: dict, other: dict, **tolerance) -> None:
    assert one.keys() == other.keys()
    for key, value in one.items():
        torch.testing.assert_close(value, other[key], **(tolerance or {"rtol": 1e-3, "atol": 1e-4}), msg=key)


# Dropout.


LONG = {"longformer": {"attention_window": 8}, "nomic_bert": {}, "llama": {"attention_dropout": 0.3}}


@pytest.mark.parametrize("family", [*tiny.FAMILIES, *LONG])
def test_without_dropout_training_computes_what_inference_does(family, tmp_path):
    backbone = tiny.checkpoint(tmp_path / "backbone", family, **LONG.get(family, {}))
    recipe = replace(RECIPE, learning_rates={"": 0.0}, dropout=0.0)
    model = (ld.LongP if family in LONG else ld.FirstP)(backbone, training=recipe)
    scorer = model.load_scorer()
    shares = {name: part.p for name, part in scorer.named_modules() if isinstance(part, torch.nn.Dropout)}
    seen = []
    queries, texts = RUN["query"].tolist(), RUN["text"].tolist()

    def look():
        scorer.train()
        with torch.no_grad():
            seen.append(scorer(queries, texts))

    train(scorer, toy_groups(1), recipe, on_step=look)
    scorer.eval()
    with torch.no_grad():
        torch.testing.assert_close(seen[0], scorer(queries, texts))
    assert max(shares.values()) > 0
    assert shares == {name: part.p for name, part in scorer.named_modules() if isinstance(part, torch.nn.Dropout)}


# How a step is divided.


@pytest.mark.parametrize("name", ["MaxP", "CEDR-knrm"])
def test_queries_per_forward_makes_no_difference(name, calm, gradients):
    for together in (1, 5):
        fitted(calm, name, queries_per_step=5, epochs=1, queries_per_forward=together)
    one, all_at_once = gradients
    torch.testing.assert_close(one, all_at_once, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("name", ["MaxP", "CEDR-knrm"])
def test_gradient_checkpointing_makes_no_difference(name, cross_encoder):
    plain, recomputed = (fitted(cross_encoder, name, gradient_checkpointing=on) for on in (False, True))
    assert plain.history["loss"].tolist() == pytest.approx(recomputed.history["loss"].tolist())
    assert_close(weights(plain), weights(recomputed))
    assert not any(getattr(m, "gradient_checkpointing", False) for m in recomputed.load_scorer().modules())


def test_gradient_checkpointing_really_recomputes(cross_encoder):
    model = make("MaxP", cross_encoder, training=replace(RECIPE, gradient_checkpointing=True, epochs=1))
    passes = []
    model.load_scorer().encoder.backbone.encoder.layer[0].attention.register_forward_hook(lambda *_: passes.append(1))
    model.fit(RUN, JUDGED)
    assert len(passes) == 2 * 5
    with pytest.raises(ValueError, match="backbone does not support it"):
        train(Toy(), toy_groups(2), TrainingArgs(gradient_checkpointing=True))


def test_mean_and_sum_differ_by_the_number_of_queries(gradients):
    for reduction in ("sum", "mean"):
        train(Toy(), toy_groups(5), TrainingArgs(queries_per_step=3, learning_rates={"": 1e-9}, reduction=reduction))
    np.testing.assert_allclose([g.item() for g in gradients], [-6.0, -4.0, -2.0, -2.0], rtol=1e-5)


def test_long_gradients_are_cut(gradients):
    for limit in (None, 0.5, 100.0):
        train(Toy(), toy_groups(2), TrainingArgs(max_grad_norm=limit, learning_rates={"": 1e-9}))
    np.testing.assert_allclose([g.item() for g in gradients], [-4.0, -0.5, -4.0], rtol=1e-4)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision(dtype, calm):
    half, full = (fitted(calm, "CEDR-knrm", dtype=d, epochs=1, queries_per_step=5) for d in (dtype, "float32"))
    assert all(value.dtype == torch.float32 for value in half.load_scorer().parameters())
    loss = half.history["loss"].iloc[0]
    assert loss == pytest.approx(full.history["loss"].iloc[0], rel=0.1)
    assert loss != full.history["loss"].iloc[0]


def test_overflow_in_fp16_skips_the_step():
    class Overflowing(Toy):
        def forward(self, queries, texts):
            scores = super().forward(queries, texts)
            scores.register_hook(lambda gradient: gradient * (float("inf") if len(self.calls) == 1 else 1.0))
            return scores

    model, moved = Overflowing(), []
    args = TrainingArgs(queries_per_step=1, dtype="float16", learning_rates={"": 0.1}, warmup=0.0)
    train(model, toy_groups(6), args, on_step=lambda: moved.append(model.head.weight.item()))
    assert moved[0] == 0.0
    assert moved[-1] != 0.0


# Losses in the loop.


RECIPES = {
    "many negatives": {"loss": "multi_margin", "negatives": 3},
    "cross entropy": {"loss": "cross_entropy", "negatives": 3},
    "pointwise": {"loss": "pointwise_bce", "sampling": "pointwise", "queries_per_forward": 2},
    "listwise": {"loss": "lambda_loss", "sampling": "listwise", "negatives": 3},
    "listwise cross entropy": {"loss": "listwise_cross_entropy", "sampling": "listwise", "negatives": 3},
    "margin-mse": {"loss": "margin_mse", "negatives": 2},
    "distillation": {"loss": "distillation", "sampling": "pointwise"},
}


@pytest.mark.slow
@pytest.mark.parametrize("changes", RECIPES.values(), ids=RECIPES)
def test_every_loss_learns(changes, tmp_path):
    backbone = tiny.checkpoint(tmp_path, initializer_range=0.1, num_hidden_layers=1)
    run = RUN.assign(teacher_score=[4.0 if docno == "d0" else -4.0 for docno in RUN["docno"]])
    recipe = TrainingArgs(
        **{"epochs": 60, "queries_per_step": 5, "learning_rates": {"": 4e-3}, "metric": "RR", "patience": 40, **changes}
    )
    model = ld.MaxP(backbone, window_size=6, stride=4, max_query_len=2, training=recipe)
    assert evaluate(model(run), JUDGED, "RR") < 0.9
    model.fit(run, JUDGED, run, JUDGED)
    assert evaluate(model(run), JUDGED, "RR") == 1.0


def test_student_in_a_pipeline(cross_encoder):
    teacher = make("AvgP", cross_encoder)
    student = make("MaxP", cross_encoder, training=replace(RECIPE, loss="margin_mse"))
    (TeacherScores(teacher) >> student).fit(RUN, JUDGED)
    assert len(student.history) == 2
    with pytest.raises(ValueError, match="loss='margin_mse' needs the teacher's scores"):
        student.fit(RUN, JUDGED)


# Validation.


def test_validation_every_few_steps():
    validated = []
    args = TrainingArgs(epochs=2, queries_per_step=1, validate_steps=2)
    history = train(Toy(), toy_groups(5), args, validate=lambda: validated.append(1) or 0.5)
    assert [(entry["epoch"], entry["step"], "validation" in entry) for entry in history] == [
        (1, 2, True), (1, 4, True), (1, 5, False), (2, 6, True), (2, 8, True), (2, 10, True),
    ]  # fmt: skip
    assert len(validated) == 5


def test_early_stopping_and_most_steps():
    figures = iter([0.1, 0.3, 0.3, 0.2, 0.9])
    args = TrainingArgs(epochs=9, queries_per_step=5, patience=2)
    history = train(Toy(), toy_groups(5), args, validate=lambda: next(figures))
    assert [entry["validation"] for entry in history] == [0.1, 0.3, 0.3, 0.2]
    with pytest.raises(ValueError, match="patience=2 needs validation data"):
        train(Toy(), toy_groups(5), args)
    model = Toy()
    history = train(model, toy_groups(5), TrainingArgs(epochs=9, queries_per_step=2, max_steps=4))
    assert len(model.calls) == 2 + 2 + 1 + 2
    assert [(entry["epoch"], entry["step"]) for entry in history] == [(1, 3), (2, 4)]


def test_learning_curve(cross_encoder):
    history = make("MaxP", cross_encoder, training=RECIPE).fit(RUN, JUDGED, RUN, JUDGED).history
    assert list(history["step"]) == [3, 6]
    axes = plot_history(pd.concat([history, history]))
    left, right = axes.figure.axes
    assert list(left.lines[0].get_xdata()) == [3, 6, 9, 12]
    assert list(right.lines[0].get_ydata()) == [*history["validation"], *history["validation"]]
    assert len(plot_history(history.drop(columns="validation")).figure.axes) == 1
    with pytest.raises(ValueError, match="no history"):
        plot_history(make("MaxP", cross_encoder).history)


def test_progress_bar_only_when_asked(cross_encoder, capfd):
    for verbose in (False, True):
        capfd.readouterr()
        make("MaxP", cross_encoder, training=RECIPE, verbose=verbose).fit(RUN, JUDGED)
        shown = capfd.readouterr().err
        assert all((part in shown) == verbose for part in ("epoch 2", "loss=", "lr=", "documents="))


# Adapters.


# The layers of MORESPlus have BART's names.
@pytest.mark.parametrize("name", [name for name in CROSS_ENCODERS if name != "MORESPlus"])
def test_lora_trains_and_saves_like_any_model(name, cross_encoder, tmp_path):
    model = make(name, cross_encoder, training=replace(RECIPE, epochs=1, lora=Lora(rank=2)))
    before = {key: value.clone() for key, value in weights(model).items()}
    model.fit(RUN, JUDGED)
    assert weights(model).keys() == before.keys()
    changed = {key for key, value in weights(model).items() if not torch.equal(value, before[key])}
    assert "encoder.backbone.encoder.layer.1.attention.self.query.weight" in changed
    assert not {key for key in changed if "encoder.backbone" in key and ("embeddings" in key or "LayerNorm" in key)}
    assert all(parameter.requires_grad for parameter in model.load_scorer().parameters())
    difference = weights(model)["encoder.backbone.encoder.layer.0.output.dense.weight"]
    difference = difference - before["encoder.backbone.encoder.layer.0.output.dense.weight"]
    assert torch.linalg.matrix_rank(difference, rtol=1e-4) <= 2
    model.save(tmp_path)
    restored = ld.LongDocReranker.load(tmp_path)
    # The last bit depends on where weights lie in memory.
    np.testing.assert_allclose(restored(RUN)["score"], model(RUN)["score"], rtol=1e-6, atol=1e-6)
    model.fit(RUN, JUDGED)  # and again


def test_lora_keeps_the_best_weights(cross_encoder):
    model = fitted(cross_encoder, data=(RUN, JUDGED, RUN, JUDGED), epochs=5, lora=Lora(rank=4, dropout=0.1))
    assert evaluate(model(RUN), JUDGED, "RR") == pytest.approx(model.history["validation"].max())


def test_lora_on_named_layers(cross_encoder):
    model = make("MaxP", cross_encoder, training=replace(RECIPE, lora=Lora(rank=2, targets=("query", "value"))))
    before = {key: value.clone() for key, value in weights(model).items()}
    model.fit(RUN, JUDGED)
    changed = {key for key, value in weights(model).items() if not torch.equal(value, before[key])}
    assert {key.split(".")[-2] for key in changed if "backbone" in key} == {"query", "value"}
    broken = make("MaxP", cross_encoder, training=replace(RECIPE, lora=Lora(targets=("nowhere",))))
    with pytest.raises(ValueError, match="does not fit the backbone"):
        broken.fit(RUN, JUDGED)
    assert all(parameter.requires_grad for parameter in broken.load_scorer().parameters())
    broken(RUN)


def test_lora_needs_a_backbone():
    model = Toy()
    with pytest.raises(ValueError, match="lora= needs a model with a Hugging Face backbone"):
        train(model, toy_groups(2), TrainingArgs(lora=Lora(rank=2)))
    assert all(parameter.requires_grad for parameter in model.parameters())


@pytest.mark.parametrize("labels", [None, 1])
def test_lora_of_a_decoder(labels, tmp_path):
    folder = tiny_long.decoder(tmp_path / "llama", "llama", **({} if labels is None else {"labels": labels}))
    model = ld.LongP(folder, training=replace(RECIPE, lora=Lora(rank=2)), device="cpu")
    before = {key: value.clone() for key, value in weights(model).items()}
    model.fit(RUN, JUDGED)
    changed = {key.split(".")[-2] for key, value in weights(model).items() if not torch.equal(value, before[key])}
    projections = {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}
    assert projections <= changed
    assert not {name for name in changed if "norm" in name or "embed" in name}
    (key,) = (key for key in before if key.endswith("layers.0.mlp.down_proj.weight"))
    assert torch.linalg.matrix_rank(weights(model)[key] - before[key], rtol=1e-4) <= 2
    model.save(tmp_path / "saved")
    np.testing.assert_allclose(ld.LongP.load(tmp_path / "saved", device="cpu")(RUN)["score"], model(RUN)["score"])


@pytest.mark.parametrize(
    ("changes", "library"), [({"lora": Lora()}, "peft"), ({"trackers": ("tensorboard",)}, "accelerate")]
)
def test_missing_library(changes, library, cross_encoder, monkeypatch):
    monkeypatch.setitem(sys.modules, library, None)
    with pytest.raises(ImportError, match=rf"needs {library}: pip install 'pyterrier-longdoc\[train\]'"):
        make("MaxP", cross_encoder, training=replace(RECIPE, **changes)).fit(RUN, JUDGED)
    make("MaxP", cross_encoder, training=RECIPE).fit(RUN, JUDGED)


# Trackers.


def test_trackers(cross_encoder):
    tracking = pytest.importorskip("accelerate.tracking")

    class Memory(tracking.GeneralTracker):
        name, requires_logging_directory = "memory", False

        def __init__(self):
            super().__init__()
            self.lines, self.config = [], None

        @property
        def tracker(self):
            return self.lines

        def store_init_configuration(self, values):
            self.config = values

        def log(self, values, step=None, **kwargs):
            self.lines.append((step, values))

    memory = Memory()
    level = logging.getLogger("accelerate").level
    model = make("MaxP", cross_encoder, training=replace(RECIPE, trackers=(memory,)), device="cpu")
    model.fit(RUN, JUDGED, RUN, JUDGED)
    assert logging.getLogger("accelerate").level == level
    assert [step for step, _ in memory.lines] == [3, 6]
    assert [values["loss"] for _, values in memory.lines] == model.history["loss"].tolist()
    assert memory.config["margin"] == "1.0"
