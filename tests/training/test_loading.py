"""`fit` with a text loader: which texts are read and when, what is said of those that are missing, going on later."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pandas as pd
import pyterrier as pt
import pytest

from pyterrier_longdoc.training import TrainingArgs, make_groups

from ..support.systems import QUIET, make
from ..support.toy import optimizer_steps, qrels, toy_task

pytestmark = QUIET
RUN, JUDGED = toy_task(0)
BARE = RUN.drop(columns="text")
RECIPE = TrainingArgs(epochs=2, queries_per_step=3, learning_rates={"": 1e-3}, warmup=0.0)


class Loader(pt.Transformer):
    """Notes what it is asked for.

    Args:
        texts: by query and docno; None is what a store says of a document that it does not have.
    """

    def __init__(self, texts: dict[tuple[str, str], str | None]) -> None:
        super().__init__()
        self.texts = texts
        self.asked: list[list[tuple[str, str]]] = []

    def transform(self, inp: pd.DataFrame) -> pd.DataFrame:
        self.asked.append(list(zip(inp["qid"], inp["docno"], strict=True)))
        return inp.assign(text=[self.texts[key] for key in self.asked[-1]])


def loader(**changes: str | None) -> Loader:
    """Has the toy task's texts; `dogs=None` changes that of the document `dogs` of every query."""
    keys = zip(RUN["qid"], RUN["docno"], strict=True)
    return Loader({key: changes.get(key[1], text) for key, text in zip(keys, RUN["text"], strict=True)})


def test_each_step_loads_only_the_texts_it_draws(cross_encoder):
    rows, per_query = 2000, 50
    run = pd.DataFrame({"qid": [f"q{row // per_query}" for row in range(rows)], "query": "old dog"})
    run["docno"] = [f"d{row}" for row in range(rows)]
    judged = qrels(*[(f"q{row // per_query}", f"d{row}", 1) for row in range(0, rows, per_query)])
    texts = {key: f"the cat {key[1]}" for key in zip(run["qid"], run["docno"], strict=True)}
    counting = Loader(texts)
    model = make("MaxP", cross_encoder, training=replace(RECIPE, max_steps=4), text_loader=counting)
    model.fit(run, judged)
    assert list(map(len, counting.asked)) == [6, 6, 6, 6]  # one call for a step: 3 queries with 2 documents each
    assert model.coverage.pairs == len({key for step in counting.asked for key in step}) == 24
    assert model.trained_on.candidates == rows


@pytest.mark.parametrize("sampling", ["pairs", "pointwise", "listwise"])
def test_loaded_texts_give_the_same_losses_as_texts_in_the_frame(sampling, cross_encoder):
    loss = {"pairs": "pairwise_margin", "pointwise": "pointwise_bce", "listwise": "lambda_loss"}[sampling]
    recipe = replace(RECIPE, sampling=sampling, loss=loss, negatives=2)
    run, losses = RUN.sample(frac=1.0, random_state=3), []
    for frame, given in ((run, None), (run.drop(columns="text"), loader())):
        model = make("MaxP", cross_encoder, training=recipe, text_loader=given)
        losses.append(model.fit(frame, JUDGED).history["loss"].tolist())
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


def test_a_missing_document_is_named_when_it_is_drawn(cross_encoder):
    def fit(given: pt.Transformer) -> None:
        make("MaxP", cross_encoder, training=RECIPE, text_loader=given).fit(BARE, JUDGED)

    fit(loader(d1=None, d2=""))  # None is an empty text, as in a frame
    with pytest.raises(ValueError, match=r"text_loader .*'d0'"):
        fit(pt.apply.generic(lambda inp: loader()(inp[inp["docno"] != "d0"])))


def test_texts_in_the_frame_are_checked_before_the_first_step(cross_encoder):
    unread = RUN.assign(text=[*RUN["text"][:-1], b"bytes"]).astype({"text": object})
    with optimizer_steps() as steps, pytest.raises(ValueError, match="bytes"):
        make("MaxP", cross_encoder, training=RECIPE).fit(unread, JUDGED)
    assert not steps


def test_a_checkpoint_loads_no_more_texts(cross_encoder, tmp_path):
    recipe, asked = replace(RECIPE, max_steps=2), []
    for checkpoint in (None, tmp_path):
        counting = loader()
        model = make("MaxP", cross_encoder, training=replace(recipe, checkpoint=checkpoint), text_loader=counting)
        model.fit(BARE, JUDGED)
        asked.append(counting.asked)
    assert asked[0] == asked[1]
    assert list(map(len, asked[0])) == [6, 6]
    resumed = loader()
    make("MaxP", cross_encoder, training=replace(recipe, checkpoint=tmp_path), text_loader=resumed).fit(BARE, JUDGED)
    assert resumed.asked == []


def test_a_training_with_a_text_loader_resumes_with_the_same_results(cross_encoder, tmp_path):
    recipe = replace(RECIPE, save_steps=1)
    whole = make("MaxP", cross_encoder, training=recipe, text_loader=loader()).fit(BARE, JUDGED)
    recipe = replace(recipe, checkpoint=tmp_path)
    with optimizer_steps(stop_at=4):
        make("MaxP", cross_encoder, training=recipe, text_loader=loader()).fit(BARE, JUDGED)
    with pytest.raises(ValueError, match="another training"):
        make("MaxP", cross_encoder, training=recipe, text_loader=loader()).fit(BARE.iloc[:-1], JUDGED)
    resumed = make("MaxP", cross_encoder, training=recipe, text_loader=loader()).fit(BARE, JUDGED)
    np.testing.assert_allclose(resumed(RUN)["score"], whole(RUN)["score"], atol=1e-5)


def test_a_query_without_an_id_is_not_trained_on():
    run = RUN.assign(qid=[None, *RUN["qid"][1:]])
    assert "q-cat" not in {group.qid for group in make_groups(run, JUDGED)}  # its only positive has none
