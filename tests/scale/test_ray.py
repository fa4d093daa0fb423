from __future__ import annotations

import io
import os
import pickle
import subprocess
import sys
import unittest
import warnings
from pathlib import Path

import numpy as np
import pandas as pd
import pyterrier as pt
import pytest

import pyterrier_longdoc as ld
from pyterrier_longdoc.common.coverage import Coverage
from pyterrier_longdoc.common.identity import identify
from pyterrier_longdoc.common.signals import JavaBesideRay
from pyterrier_longdoc.scale import RayExecutor
from pyterrier_longdoc.scale import ray as scale_ray
from pyterrier_longdoc.scale.blocks import blocks_of
from pyterrier_longdoc.training import fit_seeds, k_fold_fit

from ..support import systems, terrier, tiny, workers
from ..support.toy import toy_task

ray = pytest.importorskip("ray")


def candidates(queries: int = 6, depth: int = 4) -> pd.DataFrame:
    """Rows of several queries, mixed, with an index of their own."""
    frame = tiny.frame(
        [f"{word} dog" for word in tiny.WORDS[22 : 22 + queries]], [tiny.LONG[: 90 * d] for d in range(depth)]
    )
    frame = frame.sample(frac=1, random_state=3)
    return frame.assign(price=np.arange(len(frame), dtype="int32"))


@pytest.fixture(scope="module")
def cluster():
    """Two processes."""
    with RayExecutor(2, gpus_per_worker=0) as executor:
        yield executor


@pytest.fixture(params=["here", pytest.param("cluster", marks=pytest.mark.slow)])
def executor(request, monkeypatch):
    """Two workers: in this process, and on a cluster of Ray."""
    if request.param == "cluster":
        yield request.getfixturevalue("cluster")
        return
    from ..support.ray_here import RayHere  # which imports Ray

    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "RAY_USAGE_STATS_ENABLED"):
        monkeypatch.setenv(name, "1")
    here = RayHere(cores=2)
    monkeypatch.setattr("pyterrier_longdoc.scale.ray._ray", lambda: here)
    with RayExecutor(2, gpus_per_worker=0) as executor:
        yield executor
    assert not here.actors


# Without Ray.


def test_blocks_are_whole_queries_in_their_order():
    qids = candidates(queries=5)["qid"]
    blocks = blocks_of(qids, 7)
    assert [len(block) for block in blocks] == [8, 8, 4]
    assert sorted(np.concatenate(blocks)) == list(range(20))
    of_blocks = [qids.iloc[block].drop_duplicates().tolist() for block in blocks]
    assert [qid for block in of_blocks for qid in block] == qids.drop_duplicates().tolist()
    assert [len(block) for block in blocks_of(qids.drop_duplicates(), 1)] == [1] * 5


@pytest.mark.parametrize(
    ("arguments", "name"),
    [
        ({"workers": 0}, "workers"),
        ({"workers": 2, "cpus_per_worker": 1.5}, "cpus_per_worker"),
        ({"workers": 2, "gpus_per_worker": -1}, "gpus_per_worker"),
    ],
)
def test_numbers_that_cannot_work(arguments, name):
    with pytest.raises(ValueError, match=name):
        ld.distributed(workers.FirstRows(), **arguments)


def test_nothing_is_started_for_no_rows_and_for_columns_that_are_missing(cross_encoder):
    model = systems.make("MaxP", cross_encoder)
    distributed = ld.distributed(model, workers=2)
    assert distributed(candidates().iloc[:0]).columns.tolist() == model(candidates().iloc[:0]).columns.tolist()
    with pytest.raises(pt.validate.InputValidationError, match="text"):
        distributed(candidates().drop(columns="text"))
    assert not distributed.executor._actors


def test_contract_of_pyterrier(cross_encoder):
    fresh = ld.distributed(systems.make("MaxP", cross_encoder), workers=2, gpus_per_worker=0)
    case = pt.testing.transformer_test_class(lambda: fresh)
    suite = unittest.defaultTestLoader.loadTestsFromTestCase(case)
    outcome = unittest.TextTestRunner(stream=io.StringIO()).run(suite)
    assert outcome.testsRun
    assert outcome.wasSuccessful(), outcome.failures + outcome.errors
    assert repr(pickle.loads(pickle.dumps(fresh))) == repr(fresh)


@pytest.mark.parametrize(
    "make",
    [
        lambda: systems.make("MaxP", max_query_len=1),
        lambda: systems.make("MaxP", preselect=ld.BM25Windows(1)),
        lambda: systems.make("FirstP", layout="shared", window_size=10),
        lambda: systems.make("BiEncoder-max"),
        lambda: ld.RankGPT(lambda messages: "[1]", max_doc_len=20, on_failure="keep", preselect=ld.BM25Windows(1)),
    ],
)
@pytest.mark.filterwarnings("ignore")
def test_the_coverage_of_workers_adds_up_to_that_of_one_process(make):
    """Queries share texts, and not all of them have all."""
    model, frame, parts = make(), candidates().drop_duplicates(["qid", "docno"]).iloc[:-5], []
    model(frame)
    whole = model.coverage
    for rows in blocks_of(frame["qid"], 4):
        model(frame.iloc[rows])
        parts.append(model.coverage)
    assert len(parts) > 2
    assert Coverage.total(parts) == whole
    assert (whole.documents, whole.queries) == (len(frame), frame["qid"].nunique())


# With two workers.


@pytest.mark.parametrize("name", ["MaxP", "PARADE-pretrained", "LateIR"])
def test_scores_and_coverage_are_the_models(name, executor, capsys):
    frame, model = candidates(), systems.make(name)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ld.UntrainedWarning)
        distributed = executor.distributed(model, block_rows=8, verbose=True)
        with pytest.warns(ld.EmptyTextWarning, match="no text"):
            out = distributed(frame)
        expected = model(frame)
    pd.testing.assert_frame_equal(out, expected, check_exact=False, rtol=1e-5)
    assert distributed.coverage == model.coverage
    first, topics = pt.Transformer.from_df(frame), frame[["qid", "query"]].drop_duplicates()
    qrels = frame[["qid", "docno"]].assign(label=np.arange(24) % 2)
    table = pt.Experiment([first >> model, first >> distributed], topics, qrels, ["map"])
    assert table["map"].nunique() == 1
    assert "24/24" in capsys.readouterr().err


def test_the_model_of_now_is_used_and_known_by_the_same_identity(executor, cross_encoder):
    frame, model = candidates(queries=3), systems.make("MaxP", cross_encoder, max_query_len=1)
    distributed = executor.distributed(model, block_rows=1)
    with pytest.warns(ld.TruncationWarning, match="max_query_len"):
        before = distributed(frame)
    assert identify(distributed) == identify(model)
    run = frame.assign(label=(frame["docno"] == "d2").astype(int))
    model.training = ld.TrainingArgs(max_steps=2, learning_rates={"": 1e-2})
    model.fit(run.drop(columns="label"), run[["qid", "docno", "label"]])
    after = distributed(frame)
    assert not np.allclose(before["score"], after["score"])
    assert np.allclose(after["score"], model(frame)["score"], rtol=1e-5)
    assert identify(distributed) == identify(model)


@pytest.mark.slow
def test_a_killed_worker_loses_nothing_but_its_open_block(cluster, tmp_path):
    frame = candidates(queries=20)
    distributed = cluster.distributed(workers.Stub(str(tmp_path), dies_at="q9", seconds=0.05), block_rows=8)
    expected = frame["docno"].str[1:].astype(float)
    pd.testing.assert_series_equal(distributed(frame)["score"], expected, check_names=False)
    asked = [qid for qids in workers.scored(tmp_path).values() for qid in qids]
    rows = next(rows for rows in blocks_of(frame["qid"], 8) if "q9" in frame["qid"].iloc[rows].tolist())
    twice = {qid for qid in asked if asked.count(qid) > 1}
    assert "q9" in twice
    assert twice <= set(frame["qid"].iloc[rows])
    assert all(asked.count(qid) <= 2 for qid in asked)


@pytest.mark.slow
def test_work_that_kills_every_worker_is_an_error(cluster, tmp_path):
    distributed = cluster.distributed(workers.Stub(str(tmp_path), dies_at="q1", always=True), block_rows=1)
    with pytest.raises(ray.exceptions.RayActorError):
        distributed(candidates(queries=3))
    assert [qid for qids in workers.scored(tmp_path).values() for qid in qids].count("q1") == 4


@pytest.mark.filterwarnings("ignore::pyterrier_longdoc.UntrainedWarning")
def test_blocks_on_disk_are_those_of_this_process(executor, tmp_path, monkeypatch):
    pytest.importorskip("pyarrow")
    monkeypatch.setattr("pyterrier_longdoc.scale.blocks.BLOCK_ROWS", 4)
    frame, model = candidates(queries=8), systems.make("MaxP", device="cpu")
    here, there = (
        ld.rerank_to_disk(model, frame, tmp_path / name, executor=on) for name, on in (("a", None), ("b", executor))
    )
    pd.testing.assert_frame_equal(ld.merge_run(tmp_path / "a"), ld.merge_run(tmp_path / "b"), rtol=1e-6)
    assert here.coverage == there.coverage
    assert len(list((tmp_path / "b" / "blocks").iterdir())) == 8


def test_errors_are_the_models_own_and_the_workers_go_on(executor):
    with pytest.raises(KeyError, match="no text of query q2"):
        executor.distributed(workers.Fails("q2"), block_rows=1)(candidates())
    firsts = executor.distributed(workers.FirstRows(), block_rows=8)(candidates())
    pd.testing.assert_frame_equal(firsts, workers.FirstRows()(candidates()))


def test_who_cannot_be_told_from_others_is_named_and_the_end_of_a_with_block_ends_the_workers(executor):
    with executor.distributed(pt.apply.generic(workers.first_rows)) as distributed:
        with pytest.raises(ValueError, match="first_rows"):
            distributed.describe()
        assert executor._actors
    assert not executor._actors


def test_blocks_are_asked_for_when_workers_are_free(executor):
    pulled, done = [], []

    def items():
        for number in range(12):
            pulled.append(number)
            yield number, number

    for key, value in executor.map(max, 5, items()):
        done.append(key)
        assert value == max(5, key)
        assert len(pulled) <= len(done) + 2
    assert sorted(done) == list(range(12))
    abandoned = executor.map(max, 5, items())
    next(abandoned)
    abandoned.close()
    assert len(executor._actors) < 2  # who had begun with another item would have to end it first


@pytest.mark.bytes
@pytest.mark.slow
def test_folds_and_seeds_are_trained_by_workers(cluster, cross_encoder, tmp_path):
    run, judged = toy_task(0, queries=6)
    recipe = ld.TrainingArgs(max_steps=2, learning_rates={"": 1e-3})
    model = systems.make("MaxP", cross_encoder, training=recipe, device="cpu")
    qids = run["qid"].drop_duplicates().tolist()
    folds = [qids[:2], qids[2:4], qids[4:]]
    expected = k_fold_fit(model, run, judged, folds)
    fitted = k_fold_fit(model, run, judged, folds, folder=tmp_path / "folds", executor=cluster)
    pd.testing.assert_frame_equal(fitted.run, expected.run)
    assert [each.describe()["weights"] for each in fitted.models] == [
        each.describe()["weights"] for each in expected.models
    ]
    seeds = fit_seeds(model, [1, 0], run, judged, executor=cluster)
    alone = fit_seeds(model, [1, 0], run, judged)
    assert {seed: each.describe()["weights"] for seed, each in seeds.items()} == {
        seed: each.describe()["weights"] for seed, each in alone.items()
    }


def test_too_little_room_is_told(executor, monkeypatch):
    assert dict(executor.map(max, 1, [("a", 0)])) == {"a": 1}
    monkeypatch.setattr("pyterrier_longdoc.scale.ray._PATIENCE", 0.5)
    with pytest.raises(ValueError, match="no worker"):
        next(RayExecutor(1, gpus_per_worker=64).map(max, 1, [("a", 0)]))
    with RayExecutor(30, cpus_per_worker=2, gpus_per_worker=0) as wide:
        monkeypatch.setattr(wide, "_warn_of_waiting", lambda: executor.close() or RayExecutor._warn_of_waiting(wide))
        with pytest.warns(UserWarning, match="room") as told:
            assert dict(wide.map(max, 1, [("a", 0)])) == {"a": 1}
    assert ["has room for" in str(told[0].message), "waits for room" in str(told[1].message)] == [True, True]


def test_workers_of_an_earlier_ray_are_forgotten(executor):
    for end in (executor.close, lambda: None):
        assert dict(executor.map(max, 1, [("a", 0)])) == {"a": 1}
        scale_ray._ray().shutdown()
        scale_ray._ray().init(include_dashboard=False, log_to_driver=False, num_cpus=2)
        end()
        assert dict(executor.map(max, 1, [("a", 0)])) == {"a": 1}


@pytest.mark.slow
def test_workers_compute_with_their_cores(cluster):
    assert dict(cluster.map(workers.threads, None, [("a", 0)])) == {"a": 1}
    cluster.close()
    with RayExecutor(1, cpus_per_worker=2, gpus_per_worker=0) as wide:
        assert dict(wide.map(workers.threads, None, [("a", 0)])) == {"a": 2}


# What cannot be sent.


@pytest.mark.parametrize("pipeline", [lambda stage, model: stage >> model, lambda stage, model: stage + model])
def test_the_stage_that_cannot_be_sent_is_named(executor, pipeline, cross_encoder):
    model = systems.make("MaxP", cross_encoder)
    with pytest.raises(TypeError, match=r"the stage Locked\(\) cannot be sent .* give the model text_loader= instead"):
        executor.distributed(pipeline(workers.Locked(), model))(candidates())


@pytest.fixture
def without_text() -> tuple[pd.DataFrame, workers.LockedStore]:
    """Candidates, and what has their texts and cannot be sent."""
    frame = candidates()
    return frame.drop(columns="text"), workers.LockedStore(frame.drop_duplicates("docno"))


@pytest.mark.filterwarnings("ignore::pyterrier_longdoc.EmptyTextWarning")
def test_texts_of_a_loader_that_cannot_be_sent_are_sent_with_the_block(executor, without_text, cross_encoder):
    frame, store = without_text
    model = systems.make("MaxP", cross_encoder, text_loader=store)
    expected = model(frame)
    store.rows.clear()
    out = executor.distributed(model, block_rows=8)(frame)
    pd.testing.assert_frame_equal(out, expected, check_exact=False, rtol=1e-5)
    assert store.rows == [4, 4, 4]  # the documents of each block, once


@pytest.mark.filterwarnings("ignore::pyterrier_longdoc.EmptyTextWarning")
def test_each_model_gets_the_texts_of_its_own_loader(executor, without_text, cross_encoder):
    frame, store = without_text
    reversed_texts = workers.LockedStore(candidates().assign(text=lambda rows: rows["text"].str[::-1]))
    model, other = (systems.make("MaxP", cross_encoder, text_loader=loader) for loader in (store, reversed_texts))
    pipeline = model + other
    scores = executor.distributed(pipeline, block_rows=8)(frame).set_index(["qid", "docno"])["score"]
    expected = pipeline(frame).set_index(["qid", "docno"])["score"]
    pd.testing.assert_series_equal(scores.sort_index(), expected.sort_index(), rtol=1e-5)
    assert (model.text_loader, other.text_loader) == (store, reversed_texts)


@pytest.mark.filterwarnings("ignore::pyterrier_longdoc.EmptyTextWarning")
def test_blocks_on_disk_have_texts_of_a_loader_that_cannot_be_sent(
    executor, without_text, cross_encoder, tmp_path, monkeypatch
):
    pytest.importorskip("pyarrow")
    monkeypatch.setattr("pyterrier_longdoc.scale.blocks.BLOCK_ROWS", 4)
    frame, store = without_text
    model = systems.make("MaxP", cross_encoder, text_loader=store, device="cpu")
    here, there = tmp_path / "here", tmp_path / "there"
    ld.rerank_to_disk(model, frame, here)
    ld.rerank_to_disk(model, frame, there, executor=executor)
    pd.testing.assert_frame_equal(ld.merge_run(there), ld.merge_run(here), rtol=1e-6)


def test_a_retriever_on_the_workers_has_no_texts_of_a_loader_that_cannot_be_sent(executor, without_text):
    frame, store = without_text
    pipeline = pt.Transformer.from_df(frame) >> systems.make("MaxP", text_loader=store)
    with pytest.raises(TypeError, match="put the retriever before"):
        executor.distributed(pipeline)(frame[["qid", "query"]].drop_duplicates())


def test_a_training_on_workers_names_the_loader_that_cannot_be_sent(executor, without_text, cross_encoder):
    frame, store = without_text
    qrels = frame[["qid", "docno"]].assign(label=1)

    def make(seed: int) -> ld.MaxP:
        return systems.make("MaxP", cross_encoder, text_loader=store, seed=seed)

    with pytest.raises(TypeError, match=r"text_loader of MaxP\(.* put the texts into the frames"):
        fit_seeds(make, [1], frame, qrels, executor=executor)


@pytest.fixture
def of_terrier(terrier_index) -> pd.DataFrame:
    """Candidates without text."""
    topics = pd.DataFrame([("1", "dog river"), ("2", "mountain tree"), ("3", "city")], columns=["qid", "query"])
    return terrier_index.bm25()(topics)


@pytest.mark.parametrize("executor", ["here"], indirect=True)
def test_texts_of_an_index_of_terrier_are_sent_with_the_block(executor, of_terrier, terrier_index):
    model = systems.make("MaxP", text_loader=terrier_index)
    out = executor.distributed(model, block_rows=1)(of_terrier)
    pd.testing.assert_frame_equal(out, model(of_terrier), check_exact=False, rtol=1e-5)


@pytest.mark.parametrize("executor", ["here"], indirect=True)
def test_a_text_loader_of_terrier_as_a_stage_is_named(executor, of_terrier, terrier_index, tmp_path):
    pipeline = pt.text.get_text(terrier_index) >> systems.make("MaxP")
    with pytest.raises(TypeError, match=r"the stage .*TextLoader.* give the model text_loader= instead"):
        ld.rerank_to_disk(pipeline, of_terrier, tmp_path / "out", executor=executor)


# Beside Java.

AFTER_JAVA = """
import ctypes, signal
import pyterrier as pt
pt.java.init()

def handler():
    action = ctypes.create_string_buffer(512)
    ctypes.CDLL(None).sigaction(int(signal.SIGSEGV), None, action)
    return action.raw[: ctypes.sizeof(ctypes.c_void_p)]

of_java = handler()
from pyterrier_longdoc.scale import RayExecutor
with RayExecutor(1, gpus_per_worker=0) as executor:
    print(list(executor.map(max, 3, [(0, 4)])), handler() == of_java)
"""


@pytest.mark.slow
@pytest.mark.skipif(os.name != "posix", reason="compares handlers of signals")
def test_ray_leaves_java_its_signal(terrier_home, tmp_path):
    environment = terrier.environment(terrier_home)
    del environment["RAY_DISABLE_FAILURE_SIGNAL_HANDLER"]
    root = Path(__file__).parents[2]
    environment["PYTHONPATH"] = os.pathsep.join([str(tmp_path), str(root)])
    terrier.declare_entry_points(tmp_path)
    command = [sys.executable, "-c", AFTER_JAVA]
    done = subprocess.run(command, env=environment, cwd=root, capture_output=True, text=True, timeout=300)
    assert done.stdout.split("\n")[-2] == "[(0, 4)] True", done.stderr


@pytest.fixture
def ray_before_java(monkeypatch):
    """As in a program that imports Ray and then starts Java."""
    monkeypatch.setitem(sys.modules, "ray", ray)
    monkeypatch.delenv("RAY_DISABLE_FAILURE_SIGNAL_HANDLER", raising=False)
    JavaBesideRay().pre_init(None)
    monkeypatch.setattr("pyterrier.java.started", lambda: True)


@pytest.mark.parametrize("executor", ["here"], indirect=True)
def test_ray_that_was_imported_before_java_says_what_to_change(executor, ray_before_java):
    scale_ray._ray().shutdown()
    with pytest.warns(UserWarning, match="import ray after Java's start"):
        assert dict(executor.map(max, 1, [("a", 0)])) == {"a": 1}


@pytest.mark.parametrize("executor", ["here"], indirect=True)
@pytest.mark.parametrize("switch", ["1", "true"])
def test_ray_that_was_told_of_java_says_nothing(executor, ray_before_java, switch, monkeypatch):
    monkeypatch.setenv("RAY_DISABLE_FAILURE_SIGNAL_HANDLER", switch)
    scale_ray._ray().shutdown()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert dict(executor.map(max, 1, [("a", 0)])) == {"a": 1}
