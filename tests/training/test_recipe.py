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


def test_invalid_recipes_are_refused_by_argument():
    for arguments in [
        {"loss": ["ranknet"]},
        {"loss": "ranknet", "sampling": "pointwise"},
        {"augment": "rotate"},
        {"learning_rates": 1e-4},
        {"learning_rates": {"encoder.": 1e-5}},
        {"learning_rates": {"": "1e-5"}},
        {"metric": "import os"},
        {"metric": "ndcg_cut"},
    ]:
        *_, (name, value) = arguments.items()
        with pytest.raises(ValueError, match=value if name == "metric" else name):
            TrainingArgs(**arguments)


def test_measures_are_named_as_in_experiments():
    for given, name in [("ndcg_cut_10", "nDCG@10"), (nDCG @ 10, "nDCG@10"), ("map", "AP"), ("AP(rel=2)", "AP(rel=2)")]:
        assert TrainingArgs(metric=given) == TrainingArgs(metric=name)
        json.dumps(TrainingArgs(metric=given).as_dict())


def rotate(text: str, rng: random.Random) -> str:
    return text


def test_a_recipe_can_be_written_as_json_without_paths():
    args = TrainingArgs(augment=rotate, lora=Lora(rank=4), checkpoint="/secret/folder", trackers=("tensorboard",))
    text = json.dumps(args.as_dict())
    found = json.loads(text)
    assert (found["augment"], found["lora"]["rank"]) == ("<function rotate>", 4)
    assert found["learning_rates"] == {"encoder.": 1e-5, "": 1e-4}
    assert "secret" not in text


def test_equal_recipes_are_one_key():
    args = TrainingArgs(augment=rotate, lora=Lora(targets=["query"]))
    assert pickle.loads(pickle.dumps(args)) == args
    assert len({args, replace(args), TrainingArgs(augment=rotate, lora=Lora(targets=("query",)))}) == 1
    assert len({args, TrainingArgs()}) == 2


def test_a_recipe_keeps_its_learning_rates():
    rates = {"": 1.0}
    recipe = TrainingArgs(learning_rates=rates)
    rates[""] = 2.0
    assert recipe.learning_rates[""] == 1.0


class Cut:
    def __call__(self, text: str, rng: random.Random) -> str:
        return text[:2]


def test_the_description_of_an_augmentation_is_the_same_in_every_process():
    described = TrainingArgs(augment=partial(rotate, cut=Cut())).as_dict()["augment"]
    assert "rotate" in described
    assert " at 0x" not in described


def test_the_repr_of_a_recipe_creates_it_again():
    own = TrainingArgs(learning_rates={"": 1e-3}, lora=Lora(rank=4))
    for recipe in (own, *(recipe for rounds in PRESETS.values() for recipe in rounds)):
        assert eval(repr(recipe), {"TrainingArgs": TrainingArgs, "Lora": Lora}) == recipe


def test_the_defaults_are_the_recipe_of_boytsov_except_for_candidates_and_decay():
    boytsov = TrainingArgs.preset("boytsov2025")
    drawn = {"negative_pool": None, "judged": "retrieved"}
    assert replace(boytsov, **drawn, epoch_decay=1.0, restart_each_epoch=False) == TrainingArgs()
    defaults = (1, 1.0, 16, 1e-7, 0.2)
    assert (boytsov.epochs, boytsov.margin, boytsov.queries_per_step, boytsov.weight_decay, boytsov.warmup) == defaults


def test_presets_have_the_values_of_their_papers():
    assert {"boytsov2025", "parade", "cedr", "best", "robust04", "leaderboard"} <= set(PRESETS)
    # FlexNeuART's candidates are all that is judged; other papers train on what was retrieved.
    judged = {name: {recipe.judged for recipe in rounds} for name, rounds in PRESETS.items()}
    assert {name for name, ways in judged.items() if ways == {"all"}} == {"boytsov2025", "robust04", "leaderboard"}
    parade = TrainingArgs.preset("parade", epochs=1)
    assert (parade.epochs, parade.queries_per_step, parade.learning_rates[""]) == (1, 32, 3e-6)
    assert [args.schedule for args in recipes("leaderboard")] == ["constant", "constant", "one_cycle"]
    with pytest.raises(ValueError, match="3 rounds"):
        TrainingArgs.preset("leaderboard")
    with pytest.raises(ValueError, match="name='bm25'"):
        recipes("bm25")
