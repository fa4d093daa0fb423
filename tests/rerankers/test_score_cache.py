"""Cached scores: read instead of scored, and never after a change of what they depend on; other packages' caches."""

from __future__ import annotations

import io
import json
import sqlite3
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pyterrier as pt
import pytest
import torch

import pyterrier_longdoc as ld
from pyterrier_longdoc.common.coverage import Coverage
from pyterrier_longdoc.common.frames import documents, questions
from pyterrier_longdoc.common.store import Store
from pyterrier_longdoc.modelling import model as model_module
from pyterrier_longdoc.modelling.weights import fingerprint
from pyterrier_longdoc.rerankers.score_cache import keys_of_pairs

from ..support import tiny
from ..support.systems import QRELS, QUIET, REPRESENTATIVE, TRAINABLE, make, scores, slow_but

pytestmark = QUIET
FAST_LEARNING = ld.TrainingArgs(learning_rates={"": 1e-2})


@pytest.fixture
def results() -> pd.DataFrame:
    """Six rows, two of them of the same query and text."""
    frame = tiny.results()
    return pd.concat([frame, frame.iloc[[0]].assign(docno="d9", rank=3)], ignore_index=True)


@pytest.fixture
def path(tmp_path):
    return tmp_path / "folder" / "scores.sqlite"


def test_a_relative_path_is_resolved_when_it_is_given(results, tmp_path, monkeypatch):
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    model = make("MaxP", score_cache="scores.sqlite")
    monkeypatch.chdir("elsewhere")
    model(results)
    assert (tmp_path / "scores.sqlite").is_file()
    assert not (tmp_path / "elsewhere" / "scores.sqlite").exists()


@pytest.fixture
def encoded(monkeypatch) -> list[int]:
    """The number of pairs of each block."""
    counts, compute = [], model_module.Model.compute

    def spy(self, read, coverage=None):
        counts.append(len(read))
        return compute(self, read, coverage)

    monkeypatch.setattr(model_module.Model, "compute", spy)
    return counts


@pytest.mark.parametrize("name", slow_but(REPRESENTATIVE, TRAINABLE))
def test_a_second_run_reads_scores_from_the_cache(name, path, results, encoded):
    model, plain = make(name, score_cache=path), make(name)
    expected = scores(plain, results)
    encoded.clear()
    out = model(results)
    np.testing.assert_allclose(out["score"], expected, rtol=1e-5)
    assert model.coverage == plain.coverage
    assert sum(encoded) == len(Store(path)) == 5
    for again in (model, make(name, score_cache=str(path))):
        pd.testing.assert_frame_equal(again(results), out)
        assert again.coverage == Coverage()  # nothing was read
        assert (again.coverage.rows, again.coverage.dtype) == (6, "float32")
    assert sum(encoded) == 5


@pytest.mark.parametrize("damaged", ["{", "0.5", "[0.5, 1]"])
def test_a_damaged_score_is_refused_by_its_file_before_scoring(damaged, path, results, encoded):
    model = make("MaxP", score_cache=path)
    model(results.iloc[:2])
    with sqlite3.connect(path) as connection:
        connection.execute("UPDATE store SET value = ?", [damaged])
    encoded.clear()
    with pytest.raises(ValueError, match=path.name):
        model(results)
    assert not encoded


@pytest.mark.parametrize("score", ['"1e5"', "1e308", "NaN", "0.5"])
def test_an_edited_score_is_refused(score, path, results):
    model = make("MaxP", score_cache=path)
    model(results)
    with sqlite3.connect(path) as connection:
        connection.execute("UPDATE store SET value = substr(value, 1, 16) || ?", [score])  # after its digest
    with pytest.raises(ValueError, match=path.name):
        model(results)


def test_only_new_pairs_are_scored(path, results, encoded):
    model = make("MaxP", score_cache=path)
    model(results.iloc[:2])
    assert sum(encoded) == 2
    queries, texts = results["query"].tolist(), results["text"].fillna("").tolist()
    with pt.tqdm(file=io.StringIO()) as bar:
        found = model.score(queries, texts, bar)
    assert sum(encoded) == 5
    assert found.coverage.pairs == 3  # of what is not in the cache, as in the bar
    assert bar.n == bar.total == sum(map(len, texts[2:5]))
    np.testing.assert_allclose(found.scores, scores(make("MaxP"), results), rtol=1e-5)


def test_neither_the_cache_nor_a_bar_changes_how_texts_are_grouped(path, encoded):
    frame = tiny.frame(["old dog"], [f"{number} {'the cat sings ' * 700}" for number in range(40)])
    found, groups = [], []
    for options in ({}, {"verbose": True}, {"score_cache": path}):
        encoded.clear()
        found.append(scores(make("FirstP", **options), frame).tolist())
        groups.append(list(encoded))
    assert groups[0] == groups[1] == groups[2]
    assert len(groups[0]) > 1
    assert found[0] == found[1] == found[2]  # bit for bit


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("MaxP", {"window_size": 12}),
        ("MaxP", {"max_doc_len": 12}),
        ("MaxP", {"stride": 9}),
        ("MaxP", {"max_windows": 2}),
        ("MaxP", {"max_query_len": 1}),
        ("MaxP", {"layout": "padded"}),
        ("MaxP", {"layout": ld.InputLayout(lowercase=True)}),
        ("MaxP", {"dtype": "bfloat16"}),
        ("KMaxP", {"k": 1}),
        ("LongP", {"pooling": "mean"}),
    ],
)
def test_settings_are_part_of_the_key(name, change, path, results):
    start = {"pooling": "cls"} if name == "LongP" else {}
    make(name, score_cache=path, **start)(results)
    found = scores(make(name, score_cache=path, **change), results)
    np.testing.assert_allclose(found, scores(make(name, **change), results), rtol=1e-5)
    assert len(Store(path)) == 10


def test_weights_are_part_of_the_key(path, results, tmp_path):
    model = make("MaxP", score_cache=path, training=FAST_LEARNING)
    before = scores(model, results)
    after = scores(model.fit(results, QRELS), results)
    model.score_cache = None
    np.testing.assert_allclose(after, scores(model, results), rtol=1e-5)
    assert not np.allclose(before, after)
    with torch.no_grad():
        model.model.head.final.bias += 1.0
    model.score_cache = path
    np.testing.assert_allclose(scores(model, results), after + 1.0, rtol=1e-4)
    # Models do not meet.
    for name, backbone in (("SumP", tiny.encoder()), ("MaxP", tiny.checkpoint(tmp_path / "other", seed=1))):
        found = scores(make(name, backbone, score_cache=path), results)
        np.testing.assert_allclose(found, scores(make(name, backbone), results), atol=1e-5)


@pytest.mark.parametrize("name", ["MaxP", "MaxSim"])
def test_the_architecture_is_part_of_the_key(name, path, results, tmp_path):
    folder = tiny.checkpoint(tmp_path / "model")
    config, found = Path(folder) / "config.json", []
    for activation in ("gelu", "relu"):
        config.write_text(json.dumps({**json.loads(config.read_text()), "hidden_act": activation}))
        found.append(scores(make(name, folder, score_cache=path), results))
        np.testing.assert_allclose(found[-1], scores(make(name, folder), results), rtol=1e-5)
    assert not np.allclose(*found)


def test_every_way_to_change_weights_changes_the_key(path, results):
    reranker, other = make("MaxP", score_cache=path, training=FAST_LEARNING), make("MaxP")
    model = reranker.model
    with torch.no_grad():
        other.model.head.final.weight.mul_(2)
    weight, seen = max(model.parameters(), key=torch.numel), set()
    for change in (
        lambda: None,
        lambda: torch.no_grad()(weight.mul_)(1.01),
        lambda: torch.no_grad()(weight.copy_)(weight.flip(0)),
        lambda: setattr(weight, "data", weight.data + 0.01),
        lambda: torch.nn.init.normal_(weight),
        lambda: model.load_state_dict(other.model.state_dict()),
        lambda: reranker.fit(results, QRELS),
        lambda: reranker.start_from(other),
    ):
        change()
        seen.add(fingerprint(model.state_dict()))
        reranker(results)
        assert reranker.describe()["weights"]["fingerprint"] == fingerprint(model.state_dict())
        assert len(Store(path)) == 5 * len(seen)
    assert len(seen) == 7


def test_scores_of_a_function_without_identity_are_not_stored(path, results):
    module = torch.nn.Identity()
    model = ld.MaxP(ld.PairScorer(lambda queries, texts: module([1.0] * len(texts))), score_cache=path)
    with pytest.warns(UserWarning, match="name="):
        model(results)
    assert not path.exists()


def test_scores_of_a_model_with_hooks_are_not_stored(path, results):
    model = make("MaxP", score_cache=path)
    model(results)
    model.model.encoder.backbone.encoder.layer[0].register_forward_hook(lambda module, inputs, output: output * 2)
    with pytest.warns(UserWarning, match="hooks"):
        changed = scores(model, results)
    assert len(Store(path)) == 5
    assert np.abs(changed - scores(make("MaxP"), results)).max() > 1e-3


def test_the_keys_of_pairs_separate_query_and_text():
    pairs = [("ab", "c"), ("a", "bc"), ("", "abc"), ("abc", ""), ("ab", "c")]
    *keys, again = keys_of_pairs("f", questions([query for query, _ in pairs]), documents([text for _, text in pairs]))
    assert len(set(keys)) == 4
    assert again == keys[0] != keys_of_pairs("g", questions(["ab"]), documents(["c"]))[0]


def test_an_interrupted_run_continues_with_the_stored_scores(path, results, encoded, monkeypatch):
    monkeypatch.setattr(model_module, "PAIRS_PER_BLOCK", 1)
    model = make("MaxP", score_cache=path)
    compute, calls = model_module.Model.compute, []

    def stops(*args):
        calls.append(1)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return compute(*args)

    monkeypatch.setattr(model_module.Model, "compute", stops)
    with pytest.raises(KeyboardInterrupt):
        model(results)
    assert len(Store(path)) == 2
    encoded.clear()
    found = scores(model, results)
    assert sum(encoded) == 3
    np.testing.assert_allclose(found, scores(make("MaxP"), results), rtol=1e-5)


def test_validations_of_fit_are_not_stored(path, results):
    """Their weights are not used by later runs."""
    model = make("MaxP", score_cache=path, training=replace(FAST_LEARNING, epochs=3))
    model.fit(results, QRELS, results, QRELS)
    assert len(model.history["validation"].dropna()) == 3
    assert len(Store(path)) == 0
    model(results)
    assert len(Store(path)) == 5


def test_scores_that_are_not_finite_are_not_stored(path, results):
    model = make("MaxP", score_cache=path)
    with torch.no_grad():
        model.model.head.final.bias.fill_(float("nan"))
    with pytest.raises(FloatingPointError, match="not finite"):
        model(results)
    assert len(Store(path)) == 0


def test_explanations_do_not_come_from_the_cache(path, results):
    model = make("MaxP", score_cache=path)
    model(results)
    model.explain = True
    assert all(len(scores) >= 1 for scores in model(results)["window_scores"])


# Behind the caches of pyterrier-caching.


@pytest.mark.parametrize("name", slow_but(["MaxP"], REPRESENTATIVE))
def test_scores_and_ranks_are_those_of_the_model(name, path, encoded):
    caching = pytest.importorskip("pyterrier_caching")
    model, results = make(name), tiny.results()
    expected = model(results)
    with caching.ScorerCache(path, model) as cache:
        assert pt.inspect.transformer_outputs(cache, list(results.columns)) == list(expected.columns)
        first = cache(results)
        pd.testing.assert_frame_equal(first, expected)
        encoded.clear()
        pd.testing.assert_frame_equal(cache(results), first, check_exact=True)
        assert not encoded
        with pytest.raises(pt.validate.InputValidationError, match="text"):
            cache(results.drop(columns="text"))
    with caching.ScorerCache(path, make(name, "no/such-model")) as full:  # needs no weights
        pd.testing.assert_frame_equal(full(results), expected)
