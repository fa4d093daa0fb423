"""BeST: segments, their selection, and training on them."""

from __future__ import annotations

import random
import re
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
import torch

import pyterrier_longdoc as ld
from pyterrier_longdoc.training import (
    Example,
    Segments,
    TrainingArgs,
    fit_on_best_segments,
    segment_precision,
)
from pyterrier_longdoc.training.best_segments import _joint_loss

from ..support import tiny
from ..support.toy import optimizer_steps, qrels

TEXT = " ".join(f"{'word ' * (3 + i % 5)}end{i}." for i in range(60))


def test_segments_are_whole_sentences_and_disjoint():
    spans = Segments(min_words=10, max_words=40)(TEXT, "d")
    assert [a for a, _ in spans] == [0, *(b for _, b in spans[:-1])]
    assert spans[-1][1] == len(TEXT)
    lengths = [len(TEXT[a:b].split()) for a, b in spans]
    assert max(lengths) <= 40
    assert len(set(lengths)) > 3
    assert all(re.search(r"end\d+\.\s*$", TEXT[a:b]) for a, b in spans)


def test_segments_depend_on_seed_and_docno():
    cut = Segments(min_words=10, max_words=40)
    assert cut(TEXT, "d") == cut(TEXT, "d") != cut(TEXT, "e")
    assert Segments(min_words=10, max_words=40, seed=1)(TEXT, "d") != cut(TEXT, "d")
    assert Segments(min_words=10, max_words=40, max_segments=4)(TEXT, "d") == cut(TEXT, "d")[:4]
    assert cut("", "d") == [(0, 0)]
    long = "word " * 100
    assert cut(long, "d") == [(0, len(long))]  # one sentence is never cut


class Lengths(torch.nn.Module):
    """Scores a text by its number of words; notes what it was asked."""

    def __init__(self, factor):
        super().__init__()
        self.factor = torch.nn.Parameter(torch.tensor(float(factor)))
        self.asked = []

    @contextmanager
    def inference(self):
        self.eval()
        yield
        self.train()

    def forward(self, queries, texts):
        self.asked.append(list(texts))
        return self.factor * torch.tensor([float(len(text.split())) for text in texts])


CANDIDATES = SimpleNamespace(
    texts=["a b c d e f", "g h i j", "k"],
    spans=[[(0, 4), (4, 12)], [(0, 2), (2, 4), (4, 7)], [(0, 1)]],  # words: 2 4; 1 1 2; 1
)
EXAMPLE = Example("q", "query", ("", ""), (1.0, 0.0), rows=(0, 1))


def test_the_loss_of_the_first_iteration_equals_equations_2_and_3():
    both = torch.nn.ModuleDict({"selector": Lengths(0.5), "ranker": Lengths(0.1)})
    loss = _joint_loss(both, [EXAMPLE], TrainingArgs(), candidates=CANDIDATES)
    # The selector on pairs of the same index, as far as both have one; the ranker on the longest segments.
    hinges = [max(0, 1 - 0.5 * 2 + 0.5 * 1), max(0, 1 - 0.5 * 4 + 0.5 * 1), max(0, 1 - 0.1 * 4 + 0.1 * 2)]
    assert loss.item() == pytest.approx(sum(hinges))
    assert both["ranker"].asked == [["c d e f", "i j"]]
    loss.backward()
    # The selection itself has no gradient: each learns from its own loss.
    assert both["selector"].factor.grad.item() == pytest.approx(-2 + 1)
    assert both["ranker"].factor.grad.item() == pytest.approx(-4 + 2)


class Dropping(Lengths):
    """Drops words at random while training, as dropout would change its scores; prefers short texts else."""

    def forward(self, queries, texts):
        scores = super().forward(queries, texts)
        return scores * torch.randn(len(texts)) if self.training else -scores


def test_the_first_iteration_selects_segments_without_dropout():
    both = torch.nn.ModuleDict({"selector": Dropping(1.0), "ranker": Lengths(0.1)}).train()
    for seed in range(10):
        torch.manual_seed(seed)
        _joint_loss(both, [EXAMPLE], TrainingArgs(), candidates=CANDIDATES).backward()
    assert both["ranker"].asked == 10 * [["a b ", "g "]]  # the shortest, the first of equals
    assert both.training
    assert both["selector"].training


def test_segment_precision_is_the_share_of_segments_that_contain_the_gold():
    selected = pd.DataFrame({"qid": ["1", "1", "2"], "docno": ["a", "b", "a"], "start": [0, 5, 0], "end": [10, 9, 4]})
    gold = pd.DataFrame(
        {"qid": [1, 1, 2, 3], "docno": ["a", "b", "a", "a"], "start": [2, 4, 0, 0], "end": [10, 8, 4, 1]}
    )
    assert segment_precision(selected, gold) == pytest.approx(2 / 3)  # 4-8 is not within 5-9
    assert np.isnan(segment_precision(selected, gold.assign(docno="z")))


def task(queries: int) -> tuple[pd.DataFrame, pd.DataFrame, pd.DataFrame]:
    """One sentence of each relevant document speaks of a river, no other does; where is known."""
    rng = random.Random(1)
    filler = [word for word in tiny.WORDS if word not in ("river", "the")]
    rows, gold = [], []
    for number in range(queries):
        for docno in (f"good{number}", f"bad{number}"):
            sentences = [" ".join(rng.choice(filler) for _ in range(4)) + "." for _ in range(4)]
            if docno.startswith("good"):
                at = number % 4
                sentences[at] = f"the river {rng.choice(filler)} {rng.choice(filler)}."
                start = len(" ".join([*sentences[:at], ""]))
                gold.append((f"q{number}", docno, start, start + len(sentences[at])))
            rows.append((f"q{number}", "find", docno, " ".join(sentences), 1.0))
    run = pd.DataFrame(rows, columns=["qid", "query", "docno", "text", "score"])
    judged = qrels(*((row.qid, row.docno, 1) for row in run.itertuples() if row.docno.startswith("good")))
    return run, judged, pd.DataFrame(gold, columns=["qid", "docno", "start", "end"])


RUN, JUDGED, GOLD = task(6)
ONE_SENTENCE = Segments(min_words=1, max_words=6)


def maker(backbone: str, recipe: TrainingArgs | None, **changes):
    """A function that makes models, and all that it has made."""
    made = []

    def make():
        settings = {"window_size": 20, "stride": 20, "max_query_len": 4, "training": recipe, **changes}
        made.append(ld.MaxP(backbone, **settings))
        return made[-1]

    return make, made


def test_iterations_stop_after_patience(cross_encoder):
    make, made = maker(cross_encoder, TrainingArgs(learning_rates={"": 0.0}, metric="RR"))
    data = (RUN, JUDGED, RUN, JUDGED)
    result = fit_on_best_segments(make, *data, segments=ONE_SENTENCE, iterations=9, patience=2)
    assert len(result.iterations) == 3
    assert list(result.iterations.columns) == ["iteration", "validation"]
    assert result.model is made[0]
    assert len(made) == 2 + 2  # ranker and selector, then a fresh ranker each


def test_every_iteration_leaves_what_was_trained_on_and_read(cross_encoder):
    make, made = maker(cross_encoder, TrainingArgs(learning_rates={"": 0.0}, metric="RR"))
    run = RUN.assign(text=RUN["text"].where(RUN["docno"] != "bad3", ""))
    fit_on_best_segments(make, run, JUDGED, RUN, JUDGED, segments=ONE_SENTENCE, iterations=2)
    first, _, second = made
    for model in (first, second):
        assert (model.trained_on.used, model.trained_on.candidates, model.trained_on.validated) == (6, 12, 6)
        assert (model.coverage.rows, model.coverage.rows_without_text) == (12, 1)
        assert model.trained_on.longest_input == model.coverage.longest_input > 4
    assert first.trained_on == replace(second.trained_on, longest_input=first.trained_on.longest_input)


def test_recipes_that_do_not_fit_segments_are_refused(cross_encoder):
    for recipe, changes, named in [
        ({"loss": "margin_mse"}, {}, "teacher"),
        ({"augment": lambda text, rng: text}, {}, "augment"),
        ({}, {"text_field": ("a", "b")}, "text column"),
    ]:
        make, _ = maker(cross_encoder, TrainingArgs(**recipe), **changes)
        with pytest.raises(ValueError, match=named):
            fit_on_best_segments(make, RUN, JUDGED, RUN, JUDGED)


def test_wrong_arguments_of_iterations_are_refused(cross_encoder):
    make, made = maker(cross_encoder, None)
    with pytest.raises(ValueError, match="iterations"):
        fit_on_best_segments(make, RUN, JUDGED, RUN, JUDGED, iterations=0)
    make()
    with pytest.raises(ValueError, match="twice"):
        fit_on_best_segments(lambda: made[0], RUN, JUDGED, RUN, JUDGED)


@pytest.mark.slow
def test_a_killed_run_continues_with_the_same_results(cross_encoder, tmp_path):
    recipe = TrainingArgs(
        epochs=2, queries_per_step=2, learning_rates={"": 5e-3}, metric="RR", lora=ld.Lora(rank=2), save_steps=1
    )

    def run(folder, stop_at=0, segments=ONE_SENTENCE):
        make, made = maker(cross_encoder, replace(recipe, checkpoint=folder))
        data, options = (RUN, JUDGED, RUN, JUDGED), {"iterations": 2, "gold": GOLD}
        with optimizer_steps(stop_at=stop_at) as steps:
            return fit_on_best_segments(make, *data, segments=segments, **options), len(steps), made

    whole, all_steps, made = run(None)
    assert all_steps == 2 * 6
    assert [len(model.history) for model in made] == [2, 0, 2]  # both iterations by the one recipe; the selector's none
    done = 0
    for at in (4, 5, 3):  # in the first iteration; two steps later in the second; there again
        assert run(tmp_path, at) is None
        done += at - 1
    for steps_to_do in (all_steps - done, 0):
        resumed, rest, _ = run(tmp_path)
        assert rest == steps_to_do
        pd.testing.assert_frame_equal(resumed.iterations, whole.iterations)
        for one, other in zip(resumed.selections, whole.selections, strict=True):
            pd.testing.assert_frame_equal(one, other)
        pd.testing.assert_series_equal(resumed.model(RUN)["score"], whole.model(RUN)["score"])
    with pytest.raises(ValueError, match="another training"):
        run(tmp_path, segments=Segments(min_words=2, max_words=6))
