"""Equal keys mean equal scores; what cannot be identified has no key."""

import json
from dataclasses import dataclass
from functools import partial

import numpy as np
import pandas as pd
import pyterrier as pt
import pytest
import torch

import pyterrier_longdoc as ld
from pyterrier_longdoc.common.key import NoKeyError, description, frame_digest, key, own_models
from pyterrier_longdoc.data.collection import TextLoader
from pyterrier_longdoc.listwise import CallableBackend, RankGPT
from pyterrier_longdoc.training import TrainingArgs
from pyterrier_longdoc.training.folds import FoldModels

from ..support.systems import make
from ..support.toy import toy_task

TEXTS, JUDGED = toy_task(0, queries=6)
TRAINING = TrainingArgs(queries_per_step=1, learning_rates={"": 1e-2}, epochs=3)


# Models of this package.


def test_the_folder_of_a_model_does_not_change_the_key(tmp_path, cross_encoder):
    model = make("MaxP", cross_encoder, training=TRAINING).fit(TEXTS, JUDGED)
    before, name = key(model), repr(model)
    model.save(tmp_path)
    assert repr(model) != name
    assert key(model) == before


def test_settings_change_the_key(cross_encoder):
    for changes in [{"max_doc_len": 5}, {"window_size": 12, "stride": 6}, {"preselect": ld.FirstK(1)}]:
        model = make("MaxP", cross_encoder)
        assert key(model) == key(make("MaxP", cross_encoder, verbose=True, batch_size=3))
        assert key(model) != key(make("MaxP", cross_encoder, **changes))


def test_weights_change_the_key(cross_encoder):
    model = make("MaxP", cross_encoder)
    before = key(model)
    with torch.no_grad():
        model.model.head.final.bias += 1
    assert key(model) != before


def test_a_description_is_json(cross_encoder):
    model = make("MaxP", cross_encoder, preselect=ld.FirstK(1))
    assert json.loads(json.dumps(model.describe()))["class"] == "MaxP"


def test_the_key_covers_precision_and_device_unless_they_are_left_out(cross_encoder):
    exact, half = (make("MaxP", cross_encoder, dtype=dtype) for dtype in ("float32", "bfloat16"))
    assert key(exact) != key(half)
    assert key(exact, without=("computed",)) == key(half, without=("computed",))


def test_own_models_are_found_everywhere_in_a_pipeline(cross_encoder):
    one, other = make("MaxP", cross_encoder), make("FirstP", cross_encoder)
    folds = FoldModels([one, other], [["1"], ["2"]], TEXTS)
    pipeline = (z := ld.ZScore()) + 2 * (pt.apply.generic(len) >> one % 3) + pt.Transformer.identity() + folds
    assert own_models(pipeline) == [z, one, one, other]
    assert own_models(pt.Transformer.identity() >> TextLoader({}, ["text"])) == []


# A user's functions and classes.


@dataclass(frozen=True)
class ShortTruncate(ld.Truncate):
    """Windows of a user's own."""


class OwnMaxP(ld.MaxP):
    """A model of a user's own."""


def shouted(text, rng):
    return text.upper()


def whispered(text, rng):
    return text.lower()


def test_a_users_class_counts_by_its_name_and_arguments(cross_encoder):
    own, same, wider, ours = (
        key(cls(cross_encoder, window_size=size, stride=4, max_query_len=8))
        for cls, size in ((OwnMaxP, 8), (OwnMaxP, 8), (OwnMaxP, 9), (ld.MaxP, 8))
    )
    assert own == same
    assert len({own, wider, ours}) == 3
    windows = [ShortTruncate(20), ShortTruncate(20), ShortTruncate(10), ld.Truncate(20)]
    halves, again, fewer, truncated = (key(ld.MaxP(cross_encoder, windows=each, max_query_len=8)) for each in windows)
    assert halves == again
    assert len({halves, fewer, truncated}) == 3


def test_functions_count_by_module_and_name():
    assert description(shouted) == f"{__name__}.shouted"
    assert key(shouted) == key(shouted) != key(whispered)
    assert key(partial(shouted, rng=1)) == key(partial(shouted, rng=1)) != key(partial(shouted, rng=2))


def test_stages_of_this_package_have_keys():
    pipelines = [ld.Evidence(tokens) >> ld.ZScore() for tokens in (3, 20)]
    few, many = ([key(stage) for stage in own_models(pipeline)] for pipeline in pipelines)
    assert len(few) == 2
    assert (few[0] == many[0], few[1] == many[1]) == (False, True)


def answer(messages):
    return "[1]"


def answer_2(messages):
    return "[2]"


SCORERS = {
    "RankGPT": lambda function, name: RankGPT(CallableBackend(function, name=name)),
    "PairScorer": lambda function, name: ld.MaxP(ld.PairScorer(function, name=name)),
}


@pytest.mark.parametrize("make_stage", SCORERS.values(), ids=SCORERS)
def test_a_scoring_function_is_identified_by_the_given_name_or_by_its_own(make_stage):
    one, again, other = (key(make_stage(answer, name)) for name in ("1", "1", "2"))
    assert one == again != other
    assert key(make_stage(answer_2, "1")) == one
    assert key(make_stage(answer, None)) == key(make_stage(answer, None)) != key(make_stage(answer_2, None))


def test_a_transformer_that_scores_pairs_needs_a_name():
    scorer = pt.apply.doc_score(lambda row: 1.0)
    with pytest.raises(NoKeyError, match="name="):
        key(ld.MaxP(ld.PairScorer(scorer)))
    assert key(ld.MaxP(ld.PairScorer(scorer, name="a"))) != key(ld.MaxP(ld.PairScorer(scorer, name="b")))


# Everything else.


def forest(seed):
    ensemble = pytest.importorskip("sklearn.ensemble")
    rows = np.random.default_rng(seed).random((20, 2))
    return ensemble.RandomForestRegressor(n_estimators=2).fit(rows, rows[:, seed])


def local_class():
    class Local(ld.MaxP):
        pass

    return Local


UNKNOWN = {
    "fitted learner": lambda: forest(0),
    "pipeline with a learner": lambda: pt.ltr.apply_learned_model(forest(0)),
    "torch module": lambda: torch.nn.Linear(2, 2),
    "tensor": lambda: torch.zeros(2),
    "bound method": lambda: torch.nn.Linear(2, 2).forward,
    "function around a module": lambda: (lambda module: lambda queries, texts: module(texts))(torch.nn.Linear(2, 2)),
    "other transformer": lambda: pt.Transformer.identity(),
    "object": object,
    "builtin": lambda: len,
    "lambda": lambda: lambda text: text,
    "class within a function": lambda: local_class(),
}


def test_other_objects_have_no_key():
    for make_value in UNKNOWN.values():
        for value in (make_value(), [make_value()], {"a": make_value()}):
            with pytest.raises(NoKeyError):
                key(value)


def test_different_plain_data_have_different_keys():
    values = [None, "None", True, 1, 1.0, "1", [], {}, [None], ["a", "b"], [["a"], "b"], {"a": 1}, {1: "a"}, {"1": "a"}]
    assert len({key(value) for value in values}) == len(values)
    assert key({"a": 1, "b": {2, 3}}) == key({"b": {3, 2}, "a": 1})
    assert description(np.float32(0.5)) == 0.5


# Frames.


def column(*values, dtype=object):
    return pd.DataFrame({"a": pd.Series(values, dtype=dtype)})


DIFFERENT = [
    column("ab", "c"),
    column("a", "bc"),
    column("abc"),
    column("c", "ab"),
    column(None, "nan"),
    column(np.nan, "nan"),
    column("nan", "nan"),
    column(pd.NA, "nan"),
    column(["a", "b"]),
    column("['a', 'b']"),
    column({"a": [1]}),
    column({"a": [2]}),
    column(1, 2),
    column(1, 2, dtype="int64"),
    column(1, 2, dtype="float64"),
    column("ab", "c").rename(columns={"a": "b"}),
    column(np.arange(2000.0)),
    column(np.append(np.arange(1999.0), 0)),
]


def test_different_frames_have_different_digests():
    assert len(set(map(frame_digest, DIFFERENT))) == len(DIFFERENT)
    assert list(map(frame_digest, DIFFERENT)) == [frame_digest(frame.copy()) for frame in DIFFERENT]


def test_ranks_count_but_not_the_index_and_the_order_of_columns():
    frame = pd.DataFrame({"qid": ["1", "1"], "docno": ["a", "b"], "rank": [0, 1]})
    assert frame_digest(frame) != frame_digest(frame.assign(rank=[1, 0]))
    assert frame_digest(frame) == frame_digest(frame[["rank", "docno", "qid"]].set_index(pd.Index([7, 8])))


def test_other_cells_are_refused_by_column_and_type():
    for value in [object(), torch.zeros(1), b"bytes", [object()]]:
        inner = value[0] if isinstance(value, list) else value
        with pytest.raises(NoKeyError, match=f"'a'.*{type(inner).__name__}"):
            frame_digest(column("x", value))
