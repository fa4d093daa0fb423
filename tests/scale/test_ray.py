"""distributed and RayExecutor: workers give the results of one process."""

from __future__ import annotations

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
from pyterrier_longdoc.common.key import key
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


def test_blocks_are_whole_queries_in_order():
    qids = candidates(queries=5)["qid"]
    blocks = blocks_of(qids, 7)
    assert [len(block) for block in blocks] == [8, 8, 4]
    assert sorted(np.concatenate(blocks)) == list(range(20))
    of_blocks = [qids.iloc[block].drop_duplicates().tolist() for block in blocks]
    assert [qid for block in of_blocks for qid in block] == qids.drop_duplicates().tolist()
    assert [len(block) for block in blocks_of(qids.drop_duplicates(), 1)] == [1] * 5


def test_a_fraction_of_a_core_is_refused_by_name():
    with pytest.raises(ValueError, match="cpus_per_worker"):
        ld.distributed(workers.FirstRows(), workers=2, cpus_per_worker=1.5)


def test_an_empty_frame_starts_no_worker(cross_encoder):
    model = systems.make("MaxP", cross_encoder)
    distributed = ld.distributed(model, workers=2)
    assert distributed(candidates().iloc[:0]).columns.tolist() == model(candidates().iloc[:0]).columns.tolist()
    assert not distributed.executor._actors


def test_a_missing_column_is_refused_before_a_worker_is_started(cross_encoder):
    distributed = ld.distributed(systems.make("MaxP", cross_encoder), workers=2)
    with pytest.raises(pt.validate.InputValidationError, match="text"):
        distributed(candidates().drop(columns="text"))
    assert not distributed.executor._actors


def test_the_test_case_of_pyterrier_passes(cross_encoder):
    fresh = ld.distributed(systems.make("MaxP", cross_encoder), workers=2, gpus_per_worker=0)
    outcome = unittest.TestResult()
    unittest.defaultTestLoader.loadTestsFromTestCase(pt.testing.transformer_test_class(lambda: fresh)).run(outcome)
    assert outcome.testsRun
    assert not outcome.failures + outcome.errors


@pytest.mark.parametrize("executor", ["here"], indirect=True)
def test_a_distributed_model_has_the_key_of_the_model(executor, cross_encoder):
    model = systems.make("MaxP", cross_encoder)
    assert key(executor.distributed(model)) == key(model)


def test_a_distributed_model_can_be_pickled(cross_encoder):
    fresh = ld.distributed(systems.make("MaxP", cross_encoder), workers=2, gpus_per_worker=0)
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
def test_coverage_of_blocks_adds_up_to_the_total(make):
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
def test_scores_and_coverage_equal_those_of_the_model(name, executor, capsys):
    frame, model = candidates(), systems.make(name)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ld.UntrainedWarning)
        distributed = executor.distributed(model, block_rows=8, verbose=True)
        with pytest.warns(ld.EmptyTextWarning, match="no text"):
            out = distributed(frame)
        expected = model(frame)
    pd.testing.assert_frame_equal(out, expected, check_exact=False, rtol=1e-5)
    assert distributed.coverage == model.coverage
    assert "24/24" in capsys.readouterr().err


def test_weights_trained_in_the_meantime_are_used(executor, cross_encoder):
    frame, model = candidates(queries=3), systems.make("MaxP", cross_encoder, max_query_len=1)
    distributed = executor.distributed(model, block_rows=1)
    with pytest.warns(ld.TruncationWarning, match="max_query_len"):
        before = distributed(frame)
    run = frame.assign(label=(frame["docno"] == "d2").astype(int))
    model.training = ld.TrainingArgs(max_steps=2, learning_rates={"": 1e-2})
    model.fit(run.drop(columns="label"), run[["qid", "docno", "label"]])
    after = distributed(frame)
    assert not np.allclose(before["score"], after["score"])
    assert np.allclose(after["score"], model(frame)["score"], rtol=1e-5)


@pytest.mark.slow
def test_only_the_current_block_of_a_killed_worker_is_scored_again(cluster, tmp_path):
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
def test_an_item_that_kills_every_worker_raises_an_error(cluster, tmp_path):
    distributed = cluster.distributed(workers.Stub(str(tmp_path), dies_at="q1", always=True), block_rows=1)
    with pytest.raises(ray.exceptions.RayActorError):
        distributed(candidates(queries=3))
    assert [qid for qids in workers.scored(tmp_path).values() for qid in qids].count("q1") == 4


@pytest.mark.filterwarnings("ignore::pyterrier_longdoc.UntrainedWarning")
def test_rerank_to_disk_gives_the_same_results_on_workers(executor, tmp_path, monkeypatch):
    pytest.importorskip("pyarrow")
    monkeypatch.setattr("pyterrier_longdoc.scale.blocks.BLOCK_ROWS", 4)
    frame, model = candidates(queries=8), systems.make("MaxP", device="cpu")
    here, there = (
        ld.rerank_to_disk(model, frame, tmp_path / name, executor=on) for name, on in (("a", None), ("b", executor))
    )
    pd.testing.assert_frame_equal(ld.merge_run(tmp_path / "a"), ld.merge_run(tmp_path / "b"), rtol=1e-6)
    assert here.coverage == there.coverage
    assert len(list((tmp_path / "b" / "blocks").iterdir())) == 8


def test_an_error_of_the_model_is_raised_and_the_workers_stay_usable(executor):
    with pytest.raises(KeyError, match="no text of query q2"):
        executor.distributed(workers.Fails("q2"), block_rows=1)(candidates())
    firsts = executor.distributed(workers.FirstRows(), block_rows=8)(candidates())
    pd.testing.assert_frame_equal(firsts, workers.FirstRows()(candidates()))


def test_a_user_function_has_no_description(executor):
    with pytest.raises(ValueError, match="first_rows"):
        executor.distributed(pt.apply.generic(workers.first_rows)).describe()


def test_the_end_of_a_with_block_ends_the_workers(executor):
    with executor.distributed(workers.FirstRows()) as distributed:
        distributed(candidates())
        assert executor._actors
    assert not executor._actors


def test_blocks_are_requested_when_workers_are_free(executor):
    pulled, done = [], []

    def items():
        for number in range(12):
            pulled.append(number)
            yield number, number

    for number, value in executor.map(max, 5, items()):
        done.append(number)
        assert value == max(5, number)
        assert len(pulled) <= len(done) + 2
    assert sorted(done) == list(range(12))


def test_an_abandoned_map_ends_the_busy_workers(executor):
    abandoned = executor.map(max, 5, ((number, number) for number in range(12)))
    next(abandoned)
    abandoned.close()
    assert len(executor._actors) < 2


@pytest.mark.slow
def test_folds_and_seeds_trained_by_workers_have_the_same_weights(cluster, cross_encoder, tmp_path):
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


def test_a_cluster_without_room_for_any_worker_is_refused(executor, monkeypatch):
    dict(executor.map(max, 1, [("a", 0)]))
    monkeypatch.setattr("pyterrier_longdoc.scale.ray._PATIENCE", 0.5)
    with pytest.raises(ValueError, match="no worker"):
        next(RayExecutor(1, gpus_per_worker=64).map(max, 1, [("a", 0)]))


def test_a_cluster_with_room_for_fewer_workers_causes_a_warning(executor, monkeypatch):
    dict(executor.map(max, 1, [("a", 0)]))
    monkeypatch.setattr("pyterrier_longdoc.scale.ray._PATIENCE", 0.5)
    with RayExecutor(30, cpus_per_worker=2, gpus_per_worker=0) as wide:
        monkeypatch.setattr(wide, "_warn_of_waiting", lambda: executor.close() or RayExecutor._warn_of_waiting(wide))
        with pytest.warns(UserWarning, match="room") as told:
            assert dict(wide.map(max, 1, [("a", 0)])) == {"a": 1}
    assert len(told) == 2  # one of what it has room for, one of waiting


def test_workers_start_again_after_a_restart_of_ray(executor):
    for end in (executor.close, lambda: None):
        assert dict(executor.map(max, 1, [("a", 0)])) == {"a": 1}
        scale_ray._ray().shutdown()
        scale_ray._ray().init(include_dashboard=False, log_to_driver=False, num_cpus=2)
        end()
        assert dict(executor.map(max, 1, [("a", 0)])) == {"a": 1}


@pytest.mark.slow
def test_a_worker_uses_as_many_threads_as_it_has_cores(cluster):
    assert dict(cluster.map(workers.threads, None, [("a", 0)])) == {"a": 1}
    cluster.close()
    with RayExecutor(1, cpus_per_worker=2, gpus_per_worker=0) as wide:
        assert dict(wide.map(workers.threads, None, [("a", 0)])) == {"a": 2}


# What cannot be sent.


@pytest.mark.parametrize("pipeline", [lambda stage, model: stage >> model, lambda stage, model: stage + model])
def test_the_stage_that_cannot_be_sent_is_named(executor, pipeline, cross_encoder):
    model = systems.make("MaxP", cross_encoder)
    with pytest.raises(TypeError, match=r"Locked\(\).* text_loader="):
        executor.distributed(pipeline(workers.Locked(), model))(candidates())


@pytest.fixture
def without_text() -> tuple[pd.DataFrame, workers.LockedStore]:
    """Candidates, and what has their texts and cannot be sent."""
    frame = candidates()
    return frame.drop(columns="text"), workers.LockedStore(frame.drop_duplicates("docno"))


@pytest.mark.filterwarnings("ignore::pyterrier_longdoc.EmptyTextWarning")
def test_texts_of_loaders_that_cannot_be_pickled_are_sent_with_the_block(executor, without_text, cross_encoder):
    frame, store = without_text
    reversed_texts = workers.LockedStore(candidates().assign(text=lambda rows: rows["text"].str[::-1]))
    model, other = (systems.make("MaxP", cross_encoder, text_loader=loader) for loader in (store, reversed_texts))
    pipeline = model + other
    scores = executor.distributed(pipeline, block_rows=8)(frame).set_index(["qid", "docno"])["score"]
    assert store.rows == [4, 4, 4]  # the documents of each block, once
    expected = pipeline(frame).set_index(["qid", "docno"])["score"]
    pd.testing.assert_series_equal(scores.sort_index(), expected.sort_index(), rtol=1e-5)
    assert (model.text_loader, other.text_loader) == (store, reversed_texts)


def test_a_loader_that_cannot_be_pickled_is_refused_after_a_retriever_on_workers(executor, without_text):
    frame, store = without_text
    pipeline = pt.Transformer.from_df(frame) >> systems.make("MaxP", text_loader=store)
    with pytest.raises(TypeError, match="retriever"):
        executor.distributed(pipeline)(frame[["qid", "query"]].drop_duplicates())


def test_training_on_workers_refuses_a_loader_that_cannot_be_pickled(executor, without_text, cross_encoder):
    frame, store = without_text
    qrels = frame[["qid", "docno"]].assign(label=1)

    def make(seed: int) -> ld.MaxP:
        return systems.make("MaxP", cross_encoder, text_loader=store, seed=seed)

    with pytest.raises(TypeError, match="text_loader of MaxP"):
        fit_seeds(make, [1], frame, qrels, executor=executor)


@pytest.fixture
def of_terrier(terrier_index) -> pd.DataFrame:
    """Candidates without text."""
    topics = pd.DataFrame([("1", "dog river"), ("2", "mountain tree"), ("3", "city")], columns=["qid", "query"])
    return terrier_index.bm25()(topics)


@pytest.mark.parametrize("executor", ["here"], indirect=True)
def test_texts_of_a_terrier_index_are_sent_with_the_block(executor, of_terrier, terrier_index):
    model = systems.make("MaxP", text_loader=terrier_index)
    out = executor.distributed(model, block_rows=1)(of_terrier)
    pd.testing.assert_frame_equal(out, model(of_terrier), check_exact=False, rtol=1e-5)


@pytest.mark.parametrize("executor", ["here"], indirect=True)
def test_a_terrier_text_loader_as_a_stage_is_refused_by_name(executor, of_terrier, terrier_index, tmp_path):
    pipeline = pt.text.get_text(terrier_index) >> systems.make("MaxP")
    with pytest.raises(TypeError, match=r"TextLoader.* text_loader="):
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
def test_ray_does_not_replace_the_signal_handler_of_java(terrier_home, tmp_path):
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
def test_importing_ray_before_java_starts_causes_a_warning(executor, ray_before_java):
    scale_ray._ray().shutdown()
    with pytest.warns(UserWarning, match="Java"):
        assert dict(executor.map(max, 1, [("a", 0)])) == {"a": 1}


@pytest.mark.parametrize("executor", ["here"], indirect=True)
@pytest.mark.parametrize("switch", ["1", "true"])
def test_ray_with_a_disabled_signal_handler_causes_no_warning(executor, ray_before_java, switch, monkeypatch):
    monkeypatch.setenv("RAY_DISABLE_FAILURE_SIGNAL_HANDLER", switch)
    scale_ray._ray().shutdown()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert dict(executor.map(max, 1, [("a", 0)])) == {"a": 1}
