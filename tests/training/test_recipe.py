"""The recipe: what it takes, how it is noted, and the papers' own."""

from __future__ import annotations

import json
import pickle
import random
from dataclasses import replace
from functools import partial

import pytest
from ir_measures import nDCG

from pyterrier_longdoc.training import PRESETS, Lora, TrainingArgs, recipes


@pytest.mark.parametrize(
    "arguments",
    [
        {"lora": {"rank": 0}},
        {"lora": {"alpha": 0}},
        {"lora": {"dropout": 1.0}},
        {"epochs": 0},
        {"epochs": 1.5},
        {"queries_per_step": None},
        {"max_steps": True},
        {"patience": 0},
        {"loss": ["ranknet"]},
        {"schedule": "cosine"},
        {"dtype": "int8"},
        {"loss": "ranknet", "sampling": "pointwise"},
        {"margin": -1.0},
        {"alpha": 1.5},
        {"min_label": "1"},
        {"warmup": 1.1},
        {"dropout": 1.0},
        {"epoch_decay": 0},
        {"max_grad_norm": 0},
        {"augment": "rotate"},
        {"seed": 1.5},
        {"gradient_checkpointing": "no"},
        {"learning_rates": 1e-4},
        {"learning_rates": {"encoder.": 1e-5}},
        {"learning_rates": {"": "1e-5"}},
        {"metric": "ndcg@ten"},
        {"metric": "import os"},
        {"metric": "ndcg_cut"},
    ],
)
def test_invalid_recipes_are_refused_by_argument(arguments):
    *_, (name, value) = arguments.get("lora", arguments).items()
    with pytest.raises(ValueError, match=value if name == "metric" else name):
        Lora(**arguments["lora"]) if "lora" in arguments else TrainingArgs(**arguments)


@pytest.mark.parametrize(
    ("given", "name"), [("ndcg_cut_10", "nDCG@10"), (nDCG @ 10, "nDCG@10"), ("map", "AP"), ("AP(rel=2)", "AP(rel=2)")]
)
def test_measures_are_named_as_in_experiments(given, name):
    assert TrainingArgs(metric=given) == TrainingArgs(metric=name)
    json.dumps(TrainingArgs(metric=given).as_dict())


def rotate(text: str, rng: random.Random) -> str:
    return text


def test_a_recipe_can_be_written_as_json_and_used_as_a_key():
    args = TrainingArgs(augment=rotate, lora=Lora(rank=4), checkpoint="/secret/folder", trackers=("tensorboard",))
    found = json.loads(json.dumps(args.as_dict()))
    assert (found["augment"], found["lora"]["rank"]) == ("<function rotate>", 4)
    assert found["learning_rates"] == {"encoder.": 1e-5, "": 1e-4}
    assert "secret" not in json.dumps(found)
    assert pickle.loads(pickle.dumps(args)) == args
    different = [args, replace(args), TrainingArgs(), TrainingArgs(lora=Lora(targets=["query"]))]
    assert len(set(different)) == 3  # they can be keys
    assert different[-1] == TrainingArgs(lora=Lora(targets=("query",)))
    rates = {"": 1.0}
    frozen = TrainingArgs(learning_rates=rates)
    rates[""] = 2.0
    assert frozen.learning_rates[""] == 1.0


class Cut:
    def __call__(self, text: str, rng: random.Random) -> str:
        return text[:2]


@pytest.mark.parametrize(
    ("augment", "described"),
    [
        (rotate, "<function rotate>"),
        (partial(rotate, cut=Cut()), f"functools.partial(<function rotate>, cut=<{__name__}.Cut object>)"),
    ],
)
def test_the_description_of_an_augmentation_is_the_same_in_every_process(augment, described):
    assert TrainingArgs(augment=augment).as_dict()["augment"] == described


def test_the_repr_of_a_recipe_shows_the_arguments_that_differ_from_the_defaults():
    assert repr(TrainingArgs(epochs=2, seed=1)) == "TrainingArgs(epochs=2, seed=1)"
    assert " at 0x" not in repr(TrainingArgs(augment=partial(rotate, cut=Cut())))
    own = TrainingArgs(learning_rates={"": 1e-3}, lora=Lora(rank=4))
    for recipe in (own, *(recipe for rounds in PRESETS.values() for recipe in rounds)):
        assert eval(repr(recipe), {"TrainingArgs": TrainingArgs, "Lora": Lora}) == recipe


def test_presets_have_the_values_of_their_papers():
    assert {"boytsov2025", "parade", "cedr", "best", "robust04", "leaderboard"} <= set(PRESETS)
    # The defaults are Boytsov et al. 2025; over one epoch the preset differs in what candidates are drawn alone.
    boytsov = TrainingArgs.preset("boytsov2025")
    drawn = {"negative_pool": None, "judged": "retrieved"}
    assert replace(boytsov, **drawn, epoch_decay=1.0, restart_each_epoch=False) == TrainingArgs()
    # FlexNeuART's candidates are all that is judged; other papers train on what was retrieved.
    judged = {name: {recipe.judged for recipe in rounds} for name, rounds in PRESETS.items()}
    assert {name for name, ways in judged.items() if ways == {"all"}} == {"boytsov2025", "robust04", "leaderboard"}
    defaults = (1, 1.0, 16, 1e-7, 0.2)
    assert (boytsov.epochs, boytsov.margin, boytsov.queries_per_step, boytsov.weight_decay, boytsov.warmup) == defaults
    parade = TrainingArgs.preset("parade", epochs=1)
    assert (parade.epochs, parade.queries_per_step, parade.learning_rates[""]) == (1, 32, 3e-6)
    assert [args.schedule for args in recipes("leaderboard")] == ["constant", "constant", "one_cycle"]
    with pytest.raises(ValueError, match="3 rounds"):
        TrainingArgs.preset("leaderboard")
    with pytest.raises(ValueError, match="parade"):
        recipes("bm25")
