"""Training: losses, training data, the loop, and that every head learns."""

from __future__ import annotations

import itertools
import math
import pickle
import random

import numpy as np
import pandas as pd
import pytest
import torch
from torch import nn

import pyterrier_longdoc as ld
from pyterrier_longdoc.modelling.heads import build_head, registered_heads
from pyterrier_longdoc.training import Group, TrainingArgs, evaluate, make_groups, train
from pyterrier_longdoc.training.losses import pairwise_margin
from pyterrier_longdoc.training.schedule import parameter_groups

from ..support import tiny
from ..support.systems import CROSS_ENCODERS, make

pytestmark = [
    pytest.mark.filterwarnings("ignore::pyterrier_longdoc.rerankers.base.UntrainedWarning"),
    pytest.mark.filterwarnings("ignore::pyterrier_longdoc.common.frames.TruncationWarning"),
]


# Losses.


def margin_by_hand(scores: np.ndarray, margin: float) -> float:
    return sum(max(0.0, margin - row[0] + negative) for row in scores for negative in row[1:])


@pytest.mark.parametrize("margin", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("shape", [(1, 2), (4, 2), (3, 6)])
def test_pairwise_margin_is_its_formula(shape, margin):
    scores = np.random.default_rng(0).normal(size=shape)
    assert pairwise_margin(torch.tensor(scores), margin=margin).item() == pytest.approx(margin_by_hand(scores, margin))


def test_pairwise_margin_identities():
    scores = torch.tensor([[2.5, 1.0], [5.0, -5.0]], requires_grad=True)
    loss = pairwise_margin(scores)
    assert loss.item() == 0.0  # every gap is above 1
    loss.backward()
    assert scores.grad.abs().sum() == 0
    assert pairwise_margin(torch.zeros(3, 2)).item() == 3 * 1.0
    assert pairwise_margin(torch.tensor([[0.0, 1.0]])).item() == 1.0 + 1.0
    shifted = torch.randn(5, 4, generator=torch.Generator().manual_seed(0))
    assert pairwise_margin(shifted + 7).item() == pytest.approx(pairwise_margin(shifted).item(), rel=1e-5)
    assert pairwise_margin(torch.tensor([[-1e30, 1e30]])).isfinite()


def test_pairwise_margin_pushes_apart():
    scores = torch.zeros(1, 2, requires_grad=True)
    pairwise_margin(scores).backward()
    assert scores.grad.tolist() == [[-1.0, 1.0]]


# Training data.

RUN = pd.DataFrame(
    {
        "qid": ["1", "1", "1", "1", "2", "2", "3"],
        "query": ["a", "a", "a", "a", "b", "b", "c"],
        "docno": ["d1", "d2", "d3", "d4", "d1", "d5", "d1"],
        "score": [1.0, 9.0, 5.0, 7.0, 2.0, 1.0, 3.0],
    }
)
TEXTS = [f"text of {row.docno} for {row.qid}" for row in RUN.itertuples()]


def qrels(*rows: tuple[str, str, int]) -> pd.DataFrame:
    return pd.DataFrame(rows, columns=["qid", "docno", "label"])


def test_groups():
    groups = make_groups(RUN, TEXTS, qrels(("1", "d3", 1), ("2", "d1", 3), ("3", "d1", 1), ("4", "d1", 1)))
    assert groups == [
        Group("1", "a", tuple(f"text of d{i} for 1" for i in (2, 4, 3, 1)), (0.0, 0.0, 1.0, 0.0)),
        Group("2", "b", ("text of d1 for 2", "text of d5 for 2"), (3.0, 0.0)),
    ]  # query 3 has no negative


def test_labels_that_are_not_positive_are_negatives():
    groups = make_groups(RUN, TEXTS, qrels(("1", "d1", 2), ("1", "d2", 0), ("1", "d3", -2), ("1", "d4", 1)))
    (group,) = groups
    assert group.texts == tuple(f"text of d{i} for 1" for i in (2, 4, 3, 1))
    assert group.labels == (0.0, 1.0, -2.0, 2.0)
    assert (group.positives, group.negatives) == ([1, 3], [0, 2])


def test_labels_of_one_query_do_not_count_for_another():
    with pytest.raises(ValueError, match="no training query"):
        make_groups(RUN, TEXTS, qrels(("2", "d2", 1), ("1", "d5", 1)))


def test_integer_qids():
    expected = make_groups(RUN, TEXTS, qrels(("1", "d3", 1), ("2", "d1", 1)))
    integers = qrels(("1", "d3", 1), ("2", "d1", 1)).astype({"qid": int})
    assert make_groups(RUN, TEXTS, integers) == expected
    assert make_groups(RUN.astype({"qid": int}), TEXTS, integers.assign(iteration="Q0")) == expected
    assert make_groups(RUN.astype({"qid": int}), TEXTS, integers.astype({"qid": str})) == expected


@pytest.mark.parametrize("order", ["score", "rank", "rows"])
def test_negatives_up_to_a_rank(order):
    run = {
        "score": RUN,
        "rank": RUN.drop(columns="score").assign(rank=[3, 0, 2, 1, 0, 1, 0]),
        "rows": RUN.drop(columns="score"),
    }[order]
    judged = qrels(("1", "d4", 1))
    best_first = {"score": ["d2", "d3", "d1"], "rank": ["d2", "d3", "d1"], "rows": ["d1", "d2", "d3"]}[order]
    # The rank is among all candidates: d4, the positive, takes one of the first places of score and rank.
    places = {"score": [0, 2, 3], "rank": [0, 2, 3], "rows": [0, 1, 2]}[order]
    for limit in (1, 2, 3, 4):
        (group,) = make_groups(run, TEXTS, judged, TrainingArgs(max_negative_rank=limit))
        expected = [d for d, place in zip(best_first, places, strict=True) if place < limit]
        assert [group.texts[i] for i in group.negatives] == [f"text of {d} for 1" for d in expected]
        assert [group.texts[i] for i in group.positives] == ["text of d4 for 1"]


def test_groups_do_not_depend_on_the_index():
    judged = qrels(("1", "d3", 1), ("2", "d1", 3))
    assert make_groups(RUN.set_axis([0, 0, 0, 1, 1, 5, 5]), TEXTS, judged) == make_groups(RUN, TEXTS, judged)


def test_nothing_to_train_on():
    for judged in (qrels(("9", "d1", 1)), qrels(("1", "d1", 0)), qrels(("3", "d1", 1)), qrels()):
        with pytest.raises(ValueError, match="no training query has both a relevant and a non-relevant candidate"):
            make_groups(RUN, TEXTS, judged)
    with pytest.raises(ValueError, match="no training query"):
        make_groups(RUN.iloc[:0], [], qrels(("1", "d1", 1)))
    with pytest.raises(ValueError, match=r"qrels lack the columns \['docno', 'label'\]"):
        make_groups(RUN, TEXTS, pd.DataFrame({"qid": ["1"], "relevance": [1]}))


# The recipe.


def test_training_args():
    args = TrainingArgs()
    assert (args.epochs, args.margin, args.queries_per_step, args.weight_decay, args.warmup) == (1, 1.0, 16, 1e-7, 0.2)
    assert args.as_dict()["learning_rates"] == {"encoder.": 1e-5, "": 1e-4}
    assert pickle.loads(pickle.dumps(args)) == args
    assert {args: 1}[TrainingArgs()] == 1
    for wrong in (
        {"epochs": 0},
        {"queries_per_step": 0},
        {"warmup": 1.1},
        {"warmup": -0.1},
        {"learning_rates": {"encoder.": 1e-5}},
    ):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            TrainingArgs(**wrong)


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
        self.calls.append((list(queries), list(texts)))
        self.modes.append(self.training)
        return self.head(torch.tensor([[1.0] if text.startswith("+") else [-1.0] for text in texts])).squeeze(1)


def toy_groups(count: int) -> list[Group]:
    return [
        Group(f"q{i}", f"query {i}", ("+a", "-a", "+b", "-b", "-c"), (1.0, 0.0, 2.0, 0.0, 0.0)) for i in range(count)
    ]


def test_the_longest_prefix_gives_the_learning_rate():
    rates = {"": 1.0, "encoder.": 2.0, "encoder.second.": 3.0, "head": 4.0}
    model = Toy()
    model.encoder["first"].bias.requires_grad_(False)
    groups = {group["lr"]: group["params"] for group in parameter_groups(model, TrainingArgs(learning_rates=rates))}
    assert groups.keys() == {2.0, 3.0, 4.0}
    assert [p is model.encoder["first"].weight for p in groups[2.0]] == [True]
    assert [id(p) for p in groups[3.0]] == [id(p) for p in model.encoder["second"].parameters()]
    assert [p is model.head.weight for p in groups[4.0]] == [True]


def test_a_learning_rate_of_no_parameter():
    with pytest.raises(
        ValueError, match=r"begins with learning_rates' 'backbone\.'; they begin with encoder\., head\."
    ):
        parameter_groups(Toy(), TrainingArgs(learning_rates={"": 1e-4, "backbone.": 1e-5}))


def test_default_learning_rates_of_a_real_model(cross_encoder):
    scorer = make("PARADE-transformer", cross_encoder).load_scorer()
    low, high = sorted(parameter_groups(scorer, TrainingArgs()), key=lambda group: group["lr"])
    assert (low["lr"], high["lr"]) == (1e-5, 1e-4)
    assert {id(p) for p in low["params"]} == {id(p) for p in scorer.encoder.parameters()}
    assert {id(p) for p in high["params"]} == {id(p) for p in scorer.head.parameters()}


@pytest.mark.parametrize(
    ("warmup", "expected"),
    [
        (0.0, [1.0] * 10),
        (0.2, [0.5] + [1.0] * 9),
        (0.5, [0.2, 0.4, 0.6, 0.8] + [1.0] * 6),
        (1.0, [i / 10 for i in range(1, 11)]),
    ],
)
def test_learning_rates_warm_up_and_stay(warmup, expected, monkeypatch):
    rates = []
    step = torch.optim.AdamW.step

    def spy(self, *args, **kwargs):
        rates.append(self.param_groups[0]["lr"])
        return step(self, *args, **kwargs)

    monkeypatch.setattr(torch.optim.AdamW, "step", spy)
    # 5 groups, 1 per step, 2 epochs: 10 steps
    train(Toy(), toy_groups(5), TrainingArgs(epochs=2, queries_per_step=1, warmup=warmup, learning_rates={"": 1.0}))
    np.testing.assert_allclose(rates, expected)


# The loop.


def test_each_epoch_asks_each_query_once():
    model = Toy()
    train(model, toy_groups(5), TrainingArgs(epochs=3, queries_per_step=2))
    assert len(model.calls) == 3 * 5
    for epoch in _batched(model.calls, 5):
        assert sorted(queries[0] for queries, _ in epoch) == [f"query {i}" for i in range(5)]
    for queries, texts in model.calls:
        assert queries[0] == queries[1]
        assert (texts[0][0], texts[1][0]) == ("+", "-")
    assert {texts[1] for _, texts in model.calls} == {"-a", "-b", "-c"}
    orders = [[queries[0] for queries, _ in epoch] for epoch in _batched(model.calls, 5)]
    assert orders[0] != orders[1]
    assert all(model.modes)
    assert not model.training


def _batched(items: list, size: int) -> list[list]:
    return [items[i : i + size] for i in range(0, len(items), size)]


def test_gradients_are_summed_over_a_step(monkeypatch):
    gradients = []
    step = torch.optim.AdamW.step

    def spy(self, *args, **kwargs):
        gradients.append(self.param_groups[-1]["params"][0].grad.item())
        return step(self, *args, **kwargs)

    monkeypatch.setattr(torch.optim.AdamW, "step", spy)
    train(Toy(), toy_groups(5), TrainingArgs(queries_per_step=3, learning_rates={"head": 1e-9, "": 0.0}))
    # With weights near 0 each query's loss is 1 - 2 w: gradient -2. The last step has what is left, 2 queries.
    np.testing.assert_allclose(gradients, [3 * -2.0, 2 * -2.0], rtol=1e-5)


def test_history_is_the_mean_loss():
    history = train(Toy(), toy_groups(4), TrainingArgs(epochs=2, learning_rates={"": 0.0}))
    assert [{**entry, "documents_per_second": None} for entry in history] == [
        {"epoch": epoch, "step": epoch, "loss": 1.0, "learning_rate": 0.0, "documents_per_second": None}
        for epoch in (1, 2)
    ]
    assert all(entry["documents_per_second"] > 0 for entry in history)


def test_the_best_epoch_is_kept():
    weights, modes = [], []
    figures = iter([0.2, 0.7, 0.7, 0.1])
    model = Toy()

    def validate() -> float:
        weights.append(model.head.weight.item())
        modes.append(model.training)
        return next(figures)

    history = train(model, toy_groups(3), TrainingArgs(epochs=4, learning_rates={"": 0.1}), validate=validate)
    assert [entry["validation"] for entry in history] == [0.2, 0.7, 0.7, 0.1]
    assert len(set(weights)) == 4
    assert model.head.weight.item() == weights[1]  # the first of the two best
    assert modes == [False] * 4
    assert all(model.modes)
    assert not model.training


def test_loss_that_is_not_finite():
    model = Toy()
    with torch.no_grad():
        model.head.weight.fill_(math.nan)
    with pytest.raises(
        FloatingPointError, match=r"the loss is nan in the step of the queries 'q\d', 'q\d'; lower learning_rates"
    ):
        train(model, toy_groups(2), TrainingArgs())
    assert not model.training


def test_global_random_state_is_left_alone():
    model = Toy()
    before = torch.get_rng_state(), random.getstate()
    train(model, toy_groups(3), TrainingArgs())
    assert torch.equal(before[0], torch.get_rng_state())
    assert before[1] == random.getstate()


def test_evaluate():
    run = pd.DataFrame({"qid": [1, 1, 2, 2], "docno": ["a", "b", "a", "b"], "score": [2.0, 1.0, 2.0, 1.0]})
    judged = qrels(("1", "a", 1), ("2", "b", 2))
    assert evaluate(run, judged, "RR") == pytest.approx((1 + 1 / 2) / 2)
    assert evaluate(run, judged, "P@1") == pytest.approx(1 / 2)
    # Judgements of a larger collection do not lower the figure of a sample of its queries.
    elsewhere = pd.DataFrame({"qid": ["other"], "docno": ["d"], "label": [1]})
    assert evaluate(run, pd.concat([judged, elsewhere]), "RR") == evaluate(run, judged, "RR")


# Real models.


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


HEADS = {
    "firstp": (ld.FirstP, {"window_size": 13}),
    "avgp": (ld.AvgP, {"window_size": 5}),
    "maxp": (ld.MaxP, {"window_size": 6, "stride": 4}),
    "cedr-knrm": (ld.CEDR, {"window_size": 5}),
    "cedr-pacrr": (ld.CEDR, {"window_size": 5, "aggregation": "pacrr"}),
    "cedr-drmm": (ld.CEDR, {"window_size": 5, "aggregation": "drmm"}),
    "model1": (ld.NeuralModel1, {"window_size": 5}),
    "sump": (ld.SumP, {"window_size": 6, "stride": 4}),
    "kmaxp": (ld.KMaxP, {"window_size": 6, "stride": 4, "k": 2}),
    "parade-avg": (ld.PARADE, {"window_size": 6, "stride": 4, "aggregation": "avg"}),
    "parade-max": (ld.PARADE, {"window_size": 6, "stride": 4, "aggregation": "max"}),
    "parade-attn": (ld.PARADE, {"window_size": 6, "stride": 4}),
    "parade-attn-elementwise": (ld.PARADE, {"window_size": 6, "stride": 4, "attention": "elementwise"}),
    "parade-transformer": (ld.PARADE, {"window_size": 6, "stride": 4, "aggregation": "transformer"}),
    "parade-transformer-query": (
        ld.PARADE,
        {"window_size": 6, "stride": 4, "aggregation": "transformer", "query_states": True},
    ),
}


def test_every_head_is_trained_here():
    assert list(registered_heads()) == sorted(HEADS)
    for name, (cls, arguments) in HEADS.items():
        head = cls("any/model", **arguments)._head_spec()
        assert head[0] == name
        assert build_head(head[0], 24, channels=3, **head[1]) is not None


@pytest.mark.slow
@pytest.mark.parametrize("name", HEADS)
def test_every_head_learns(name, tmp_path):
    # The large initialisation of the other tests learns badly.
    backbone = tiny.checkpoint(tmp_path, initializer_range=0.1, num_hidden_layers=1)
    run, judged = toy_task(0, queries=5)
    cls, arguments = HEADS[name]
    recipe = TrainingArgs(epochs=60, queries_per_step=5, learning_rates={"": 4e-3}, metric="RR")
    model = cls(backbone, **arguments, max_query_len=2, training=recipe)
    assert evaluate(model(run), judged, "RR") < 0.9
    model.fit(run, judged, run, judged)
    losses = model.history["loss"].tolist()
    assert np.mean(losses[-10:]) < min(0.4, 0.6 * max(losses[:10]))
    assert evaluate(model(run), judged, "RR") == 1.0


def aggregator(folder) -> str:
    return tiny.checkpoint(folder, initializer_range=0.1, num_hidden_layers=1, hidden_size=24, num_attention_heads=2)


OTHERS = {
    "PARADE-pretrained": lambda folder: ld.PARADE(
        tiny.checkpoint(folder / "backbone", initializer_range=0.1, num_hidden_layers=1),
        aggregation="transformer",
        aggregator=aggregator(folder / "aggregator"),
    ),
    "LateIR": lambda folder: ld.LateIR(
        tiny.checkpoint(folder / "backbone", initializer_range=0.1, num_hidden_layers=1),
        interaction=aggregator(folder / "interaction"),
        aggregator=aggregator(folder / "aggregator"),
    ),
    "MORESPlus": lambda folder: ld.MORESPlus(tiny.bart(init_std=0.1)),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", OTHERS)
def test_models_with_several_checkpoints_learn(name, tmp_path):
    run, judged = toy_task(0, queries=5)
    recipe = TrainingArgs(epochs=60, queries_per_step=5, learning_rates={"": 4e-3}, metric="RR")
    model = OTHERS[name](tmp_path).apply_attributes(window_size=6, stride=4, max_query_len=2, training=recipe)
    assert evaluate(model(run), judged, "RR") < 0.9
    model.fit(run, judged, run, judged)
    losses = model.history["loss"].tolist()
    assert losses[0] > 0.5
    assert np.mean(losses[-10:]) < 0.4
    assert evaluate(model(run), judged, "RR") == 1.0


@pytest.mark.parametrize("name", CROSS_ENCODERS)
def test_seeds_reproduce(name, cross_encoder):
    run, judged = toy_task(0, queries=5)
    global_seeds = itertools.count()

    def state(seed: int) -> dict[str, torch.Tensor]:
        torch.manual_seed(next(global_seeds))
        recipe = TrainingArgs(queries_per_step=2, learning_rates={"": 1e-2}, seed=seed)
        return make(name, cross_encoder, training=recipe).fit(run, judged).load_scorer().state_dict()

    first, second, other = state(1), state(1), state(2)
    assert all(torch.equal(first[key], second[key]) for key in first)
    assert not all(torch.equal(first[key], other[key]) for key in first)


def test_validation_keeps_the_best_epoch_of_a_real_model(cross_encoder):
    run, judged = toy_task(0, queries=5)
    recipe = TrainingArgs(epochs=6, queries_per_step=2, learning_rates={"": 3e-2}, metric="RR")
    model = make("MaxP", cross_encoder, training=recipe).fit(run, judged, run, judged)
    figures = model.history["validation"].tolist()
    assert len(set(figures)) > 1
    assert evaluate(model(run), judged, "RR") == pytest.approx(max(figures))


def test_failed_training_is_reported(cross_encoder):
    run, judged = toy_task(0, queries=5)
    model = make("MaxP", cross_encoder, training=TrainingArgs(epochs=50, queries_per_step=1, learning_rates={"": 1e30}))
    with pytest.raises(FloatingPointError, match="lower learning_rates"):
        model.fit(run, judged)
    assert not model.load_scorer().training
    assert model.history.empty
    assert list(model.history.columns) == ["epoch", "step", "loss"]
