"""Cached scores: read instead of scored, and never after a change of what they depend on; other packages' caches."""

from __future__ import annotations

import io
import os
import signal
import sqlite3
import time
from dataclasses import replace

import numpy as np
import pandas as pd
import pyterrier as pt
import pytest
import torch

import pyterrier_longdoc as ld
from pyterrier_longdoc.modelling import checkpoint
from pyterrier_longdoc.modelling import scorer as scorer_module
from pyterrier_longdoc.modelling.fingerprint import fingerprint
from pyterrier_longdoc.rerankers.score_cache import ScoreCache, pair_key

from ..support import own, processes, tiny
from ..support.systems import CROSS_ENCODERS, QRELS, QUIET, REPRESENTATIVE, make, scores, slow_but

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


@pytest.fixture
def encoded(monkeypatch) -> list[int]:
    """The number of pairs that each block reads."""
    counts = []
    read = scorer_module.LongDocScorer.read

    def spy(self, queries, query_ids, texts):
        counts.append(len(texts))
        return read(self, queries, query_ids, texts)

    monkeypatch.setattr(scorer_module.LongDocScorer, "read", spy)
    return counts


@pytest.mark.parametrize("name", slow_but(REPRESENTATIVE, CROSS_ENCODERS))
def test_second_run_reads(name, path, results, encoded):
    model, plain = make(name, score_cache=path), make(name)
    expected, coverage = scores(plain, results), plain.coverage
    encoded.clear()
    for _ in range(2):
        out = model(results)
        np.testing.assert_allclose(out["score"], expected, rtol=1e-5)
        assert model.coverage == coverage
    assert sum(encoded) == 5
    assert len(ScoreCache(path)) == 5
    again = make(name, score_cache=str(path))
    pd.testing.assert_frame_equal(again(results), out)
    assert again.coverage == coverage
    assert sum(encoded) == 5


def test_only_new_pairs_are_scored(path, results, encoded):
    model = make("MaxP", score_cache=path)
    model(results.iloc[:2])
    assert sum(encoded) == 2
    queries, texts = results["query"].tolist(), results["text"].fillna("").tolist()
    with pt.tqdm(file=io.StringIO()) as bar:
        found = model.score_pairs(queries, texts, bar).scores
    assert sum(encoded) == 5
    with pt.tqdm(file=io.StringIO()) as left:
        make("MaxP").score_pairs(queries[2:5], texts[2:5], left)
    assert bar.n == bar.total == left.total  # of what is not in the cache
    np.testing.assert_allclose(found, scores(make("MaxP"), results), rtol=1e-5)


@pytest.mark.parametrize(
    ("name", "change"),
    [
        *(("MaxP", {option: 12}) for option in ("window_size", "max_doc_len")),
        ("MaxP", {"stride": 9}),
        ("MaxP", {"max_windows": 2}),
        ("MaxP", {"max_query_len": 1}),
        ("MaxP", {"layout": "padded"}),
        ("MaxP", {"layout": ld.InputLayout(lowercase=True)}),
        ("MaxP", {"dtype": "bfloat16"}),
        ("KMaxP", {"k": 1}),
    ],
)
def test_settings_are_part_of_the_key(name, change, path, results):
    make(name, score_cache=path)(results)
    found = scores(make(name, score_cache=path, **change), results)
    np.testing.assert_allclose(found, scores(make(name, **change), results), rtol=1e-5)
    assert len(ScoreCache(path)) == 10


def test_how_equal_weights_are_used_is_part_of_the_key(path, results, plain_encoder):
    for pooling in ("cls", "mean"):
        found = scores(make("LongP", plain_encoder, pooling=pooling, score_cache=path), results)
        expected = scores(make("LongP", plain_encoder, pooling=pooling), results)
        np.testing.assert_allclose(found, expected, rtol=1e-5)


def test_weights_are_part_of_the_key(path, results, tmp_path):
    model = make("MaxP", score_cache=path, training=FAST_LEARNING)
    before = scores(model, results)
    after = scores(model.fit(results, QRELS), results)
    model.score_cache = None
    np.testing.assert_allclose(after, scores(model, results), rtol=1e-5)
    assert not np.allclose(before, after)
    with torch.no_grad():
        model.load_scorer().head.final.bias += 1.0
    model.score_cache = path
    np.testing.assert_allclose(scores(model, results), after + 1.0, rtol=1e-4)
    # Models do not meet.
    for name, backbone in (("SumP", tiny.encoder()), ("MaxP", tiny.checkpoint(tmp_path / "other", seed=1))):
        found = scores(make(name, backbone, score_cache=path), results)
        np.testing.assert_allclose(found, scores(make(name, backbone), results), atol=1e-5)


def test_fingerprints_of_weights_are_made_once_and_never_stale(path, results, plain_encoder, monkeypatch):
    model, other = make("MaxP", score_cache=path, training=FAST_LEARNING), make("MaxP")
    with torch.no_grad():
        other.load_scorer().head.final.weight.mul_(2)
    made = []

    def counted(weights):
        made.append(fingerprint(weights))
        return made[-1]

    monkeypatch.setattr(checkpoint, "fingerprint", counted)
    for _ in range(3):
        model(results)
        repr(model)
    assert len(made) == 1
    weight = max(model.load_scorer().parameters(), key=torch.numel)
    seen = [made[0]]
    for change in (
        lambda: weight.data.mul_(1.01),
        lambda: weight.data.copy_(weight.data.flip(0)),
        lambda: setattr(weight, "data", weight.data + 0.01),
        lambda: torch.nn.init.normal_(weight),
        lambda: model.load_scorer().load_state_dict(other.load_scorer().state_dict()),
        lambda: model.fit(results, QRELS),
        lambda: model.start_from(other),
    ):
        change()
        for _ in range(2):
            told = model.describe()["weights"]
            assert told == fingerprint(model.load_scorer().state_dict())
        assert told != seen[-1]
        assert len(ScoreCache(path)) == 5 * len(seen)
        model(results)
        seen.append(told)
        assert len(made) <= 2 * len(seen)


@pytest.mark.parametrize("kind", own.EDITED)
def test_scores_of_code_of_ones_own_are_not_kept(kind, path, results, plain_encoder):
    make_edited, name = own.EDITED[kind]
    for sign in (1, -1):
        model = make_edited(sign, plain_encoder, score_cache=path)
        with pytest.warns(UserWarning, match=f"the code of .*{name}"):
            found = scores(model, results)
        np.testing.assert_allclose(found, scores(make_edited(sign, plain_encoder), results), atol=1e-5)
        assert model.summary(results).cached == 0
    assert len(ScoreCache(path)) == 0


def test_scores_of_a_class_that_tells_its_version_are_kept(path, results, plain_encoder, encoded):
    for version, pairs in ((1, 5), (1, 0), (2, 5)):
        encoded.clear()
        own.vouching(1, version, plain_encoder, score_cache=path)(results)
        assert sum(encoded) == pairs


def test_text_and_query_do_not_run_together():
    keys = {pair_key(b"f", query, text) for query, text in (("ab", "c"), ("a", "bc"), ("", "abc"), ("abc", ""))}
    assert len(keys) == 4
    assert pair_key(b"f", "a", "b") == pair_key(b"f", "a", "b") != pair_key(b"g", "a", "b")


def test_an_interrupted_run_goes_on(path, results, encoded, monkeypatch):
    monkeypatch.setattr(scorer_module, "BLOCK_PAIRS", 1)
    model = make("MaxP", score_cache=path)
    head = model.load_scorer().head
    forward, calls = head.forward, []

    def stops(*args):
        calls.append(1)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return forward(*args)

    monkeypatch.setattr(head, "forward", stops)
    with pytest.raises(KeyboardInterrupt):
        model(results)
    assert len(ScoreCache(path)) == 2
    encoded.clear()
    found = scores(model, results)
    assert sum(encoded) == 3
    np.testing.assert_allclose(found, scores(make("MaxP"), results), rtol=1e-5)


def test_validations_of_fit_are_not_stored(path, results):
    """They are of weights that no later run has."""
    model = make("MaxP", score_cache=path, training=replace(FAST_LEARNING, epochs=3))
    model.fit(results, QRELS, results, QRELS)
    assert len(model.history["validation"].dropna()) == 3
    assert len(ScoreCache(path)) == 0
    model(results)
    assert len(ScoreCache(path)) == 5


def many(documents: int) -> pd.DataFrame:
    return pd.DataFrame(
        {
            "qid": "1",
            "query": "cat",
            "docno": [f"d{i}" for i in range(documents)],
            "text": [f"{tiny.LONG} {i} " * 20 for i in range(documents)],
        }
    )


def read_slowly(path, log, documents: int) -> int:
    """Scores in a process of its own, at most three documents a second; each one read leaves a line in a file."""

    def score():
        encode = scorer_module.LongDocScorer.encode

        def slow(self, read, work=None):
            for number in range(len(read.windows)):
                with log.open("a") as lines:
                    lines.write(f"{number}\n")
                time.sleep(0.3)
            return encode(self, read, work)

        scorer_module.LongDocScorer.encode = slow
        make("MaxP", score_cache=path)(many(documents))

    return processes.start(score)


@pytest.mark.slow
def test_a_killed_run_keeps_all_but_the_last_seconds(path, tmp_path, encoded):
    log = tmp_path / "read"
    log.touch()
    child = read_slowly(path, log, 40)
    while len(log.read_text().splitlines()) < 25:
        assert os.waitpid(child, os.WNOHANG) == (0, 0)
        time.sleep(0.02)
    processes.kill(child)
    assert processes.wait(child) == -signal.SIGKILL
    stored = len(ScoreCache(path))
    assert 25 - 4.0 / 0.3 <= stored <= 25  # of the last block and the one under way, two seconds each
    found = scores(make("MaxP", score_cache=path), many(40))
    assert sum(encoded) == 40 - stored
    np.testing.assert_allclose(found, scores(make("MaxP"), many(40)), rtol=1e-5)


def test_scores_that_are_not_finite_are_not_stored(path, results):
    model = make("MaxP", score_cache=path)
    with torch.no_grad():
        model.load_scorer().head.final.bias.fill_(float("nan"))
    with pytest.raises(FloatingPointError, match="not finite"):
        model(results)
    assert len(ScoreCache(path)) == 0


def test_explanations_do_not_come_from_the_cache(path, results):
    model = make("MaxP", score_cache=path)
    model(results)
    model.explain = True
    assert all(len(scores) >= 1 for scores in model(results)["window_scores"])


def test_files_that_are_no_cache(results, tmp_path):
    text, other = tmp_path / "notes.txt", tmp_path / "other.sqlite"
    text.write_text("not a database, but long enough to look like one" * 50)
    with sqlite3.connect(other) as connection:
        connection.execute("CREATE TABLE scores (name TEXT)")
    for place in (tmp_path, text, other):
        with pytest.raises(ValueError, match=r"cannot be used .*give a file that this package made"):
            make("MaxP", score_cache=place)(results)
    assert text.read_text().startswith("not a database")


# Behind the caches of pyterrier-caching.


@pytest.fixture
def caching():
    return pytest.importorskip("pyterrier_caching")


@pytest.mark.parametrize("name", slow_but(["MaxP"], ["MaxP", "CEDR-knrm", "LongP", "LateIR", "BiEncoder-max"]))
def test_scores_and_ranks_are_those_of_the_model(name, caching, path, encoded):
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


def test_what_those_caches_do_not_see(caching, path, tmp_path):
    """Their key is the query and the docno, nothing else; a cache of this package sees all of it."""
    model, own, results = make("Birch"), make("Birch", score_cache=tmp_path / "scores.sqlite"), tiny.results()
    with caching.ScorerCache(path, model) as cache:
        before = scores(cache, results)
        own(results)
        for frame in (results.assign(text="snow on the mountain"), results.assign(score=results["score"] * 10)):
            expected = scores(model, frame)
            assert not np.allclose(expected, before)
            np.testing.assert_array_equal(scores(cache, frame), before)
            np.testing.assert_allclose(scores(own, frame), expected, atol=1e-5)


def test_other_limits_of_those_caches(caching, path, tmp_path):
    model, results = make("MaxP", explain=True), tiny.results()
    with caching.ScorerCache(path, model) as cache:
        assert "window_scores" in model(results)
        assert "window_scores" not in cache(results)  # explanations are lost
    # One query under two ids, in rows that are both new, is refused.
    twice = pd.concat([results, results.assign(qid=results["qid"] + "b")], ignore_index=True)
    with (
        caching.ScorerCache(tmp_path / "twice", make("MaxP")) as cache,
        pytest.raises(sqlite3.IntegrityError, match="UNIQUE"),
    ):
        cache(twice)
    own = scores(make("MaxP", score_cache=tmp_path / "scores.sqlite"), twice)
    np.testing.assert_allclose(own, scores(make("MaxP"), twice), rtol=1e-5)
