from __future__ import annotations

import io
import pickle
import unittest
import warnings

import numpy as np
import pandas as pd
import pyterrier as pt
import pytest

import pyterrier_longdoc as ld
from pyterrier_longdoc.common.coverage import Coverage
from pyterrier_longdoc.experiment.identity import Identities
from pyterrier_longdoc.scale import RayExecutor, WorkerDiedError
from pyterrier_longdoc.scale import ray as ray_module
from pyterrier_longdoc.scale.ray import blocks_of
from pyterrier_longdoc.training import fit_seeds, k_fold_fit

from ..support import systems, tiny, workers
from ..support.toy import toy_task

pytest.importorskip("ray")


def candidates(queries: int = 6, depth: int = 4) -> pd.DataFrame:
    """Rows of several queries, mixed, with an index of their own."""
    frame = tiny.frame(
        [f"{word} dog" for word in tiny.WORDS[22 : 22 + queries]], [tiny.LONG[: 90 * d] for d in range(depth)]
    )
    frame = frame.sample(frac=1, random_state=3)
    return frame.assign(price=np.arange(len(frame), dtype="int32"))


@pytest.fixture(scope="module")
def executor():
    with RayExecutor(2, gpus_per_worker=0) as executor:
        yield executor


# Without Ray.


def test_blocks_are_whole_queries_in_their_order():
    frame = candidates(queries=5)
    blocks = blocks_of(frame, 7)
    assert [len(block) for block in blocks] == [8, 8, 4]
    assert sorted(np.concatenate(blocks)) == list(range(20))
    qids = [frame["qid"].iloc[block].drop_duplicates().tolist() for block in blocks]
    assert [qid for block in qids for qid in block] == frame["qid"].drop_duplicates().tolist()
    assert [len(block) for block in blocks_of(frame[["qid", "query"]].drop_duplicates(), 7)] == [1] * 5


def test_coverage_of_several_runs_is_their_sum():
    one = Coverage(documents=2, tokens=30, tokens_read=20, queries=1, dtype="float32")
    total = Coverage.total([one, Coverage(documents=1, tokens=10, tokens_read=10, windows=3)])
    assert total.as_dict() == Coverage(3, 0, 40, 30, windows=3, queries=1, dtype="float32").as_dict()
    assert one.documents == 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"workers": 0}, "workers=0 must be at least 1"),
        ({"workers": 2, "cpus_per_worker": 1.5}, "cpus_per_worker=1.5 must be a whole number"),
        ({"workers": 2, "gpus_per_worker": -1}, "gpus_per_worker=-1 must be a number of at least 0"),
        ({"workers": 2, "block_rows": 0}, "block_rows=0 must be at least 1"),
    ],
)
def test_numbers_that_cannot_work(arguments, message):
    with pytest.raises(ValueError, match=message):
        ld.distributed(workers.FirstRows(), **arguments)


def test_only_transformers():
    with pytest.raises(TypeError, match="neither a model nor a pipeline"):
        ld.distributed("MaxP", workers=2)


def test_nothing_is_started_for_no_rows_and_for_columns_that_are_missing(cross_encoder):
    model = systems.make("MaxP", cross_encoder)
    distributed = ld.distributed(model, workers=2)
    assert distributed(candidates().iloc[:0]).columns.tolist() == model(candidates().iloc[:0]).columns.tolist()
    with pytest.raises(pt.validate.InputValidationError, match="MaxP needs the text of the documents"):
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
    assert repr(fresh) == f"distributed({fresh.model!r}, RayExecutor(2, gpus_per_worker=0))"


@pytest.mark.parametrize(
    "make",
    [
        lambda: systems.make("MaxP", max_query_len=1),
        lambda: systems.make("FirstP"),
        lambda: systems.make("MaxP", max_windows=1),
        lambda: systems.make("MaxP", preselect=ld.BM25Windows(1)),
        lambda: systems.make("FirstP", layout="shared", window_size=10),
        lambda: systems.make("BiEncoder-max"),
        lambda: ld.RankGPT(lambda messages: "[1]", max_doc_len=20, on_failure="keep"),
        lambda: ld.RankGPT(lambda messages: "[1]", max_doc_len=20, on_failure="keep", preselect=ld.BM25Windows(1)),
    ],
)
@pytest.mark.filterwarnings("ignore")
def test_the_coverage_of_workers_adds_up_to_that_of_one_process(make):
    """Queries share texts, and not all of them have all."""
    model, frame, parts = make(), candidates().drop_duplicates(["qid", "docno"]).iloc[:-5], []
    model(frame)
    whole = model.coverage
    for rows in blocks_of(frame, 4):
        model(frame.iloc[rows])
        parts.append(model.coverage)
    assert len(parts) > 2
    total = Coverage.total(parts)
    assert total == whole
    assert (total.documents, total.queries) == (len(frame), frame["qid"].nunique())
    assert total.share_read == whole.share_read


# With two workers.


@pytest.mark.slow
@pytest.mark.parametrize("name", ["MaxP", "PARADE-pretrained", "LateIR"])
def test_scores_are_those_of_the_same_blocks_bit_for_bit(name, executor):
    frame, model = candidates(), systems.make(name)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ld.UntrainedWarning)
        distributed = executor.distributed(model, block_rows=8)
        out, read = distributed(frame), distributed.coverage
        expected = pd.concat([model(frame.iloc[rows]) for rows in blocks_of(frame, 8)]).loc[frame.index]
    pd.testing.assert_frame_equal(out, expected, check_exact=name != "LateIR", rtol=1e-6)
    assert (read.documents, read.queries) == (24, 6)
    assert read.dtype == "float32"
    assert np.allclose(out["score"], model(frame)["score"], rtol=1e-5)
    assert read == model.coverage


@pytest.mark.slow
def test_the_model_of_now_is_used_and_known_by_the_same_identity(executor, cross_encoder):
    frame, model = candidates(queries=3), systems.make("MaxP", cross_encoder, max_query_len=1)
    distributed = executor.distributed(model, block_rows=1)
    with pytest.warns(ld.TruncationWarning, match="max_query_len=1") as told:
        before = distributed(frame)
    assert len([each for each in told if each.category is ld.TruncationWarning]) == 1
    assert Identities().of(distributed) == Identities().of(model)
    run = frame.assign(label=(frame["docno"] == "d2").astype(int))
    model.training = ld.TrainingArgs(max_steps=2, learning_rates={"": 1e-2})
    model.fit(run.drop(columns="label"), run[["qid", "docno", "label"]])
    after = distributed(frame)
    assert not np.allclose(before["score"], after["score"])
    assert np.allclose(after["score"], model(frame)["score"], rtol=1e-5)
    assert Identities().of(distributed) == Identities().of(model)


@pytest.mark.slow
def test_a_killed_worker_loses_nothing_but_its_open_block(executor, tmp_path):
    frame = candidates(queries=20)
    distributed = executor.distributed(workers.Stub(str(tmp_path), dies_at="q9", seconds=0.05), block_rows=8)
    out = distributed(frame)
    expected = frame["docno"].str[1:].astype(float)
    pd.testing.assert_series_equal(out["score"], expected, check_names=False)
    by_process = workers.scored(tmp_path)
    asked = [qid for qids in by_process.values() for qid in qids]
    block = next(block for rows in blocks_of(frame, 8) if "q9" in (block := frame["qid"].iloc[rows].unique().tolist()))
    twice = {qid for qid in asked if asked.count(qid) > 1}
    assert len(by_process) >= 2
    assert "q9" in twice
    assert twice <= set(block)
    assert all(asked.count(qid) <= 2 for qid in asked)


@pytest.mark.slow
@pytest.mark.parametrize("lost", ["OutOfMemoryError", "ObjectLostError"])
def test_what_is_lost_with_memory_or_a_machine_is_done_again(executor, tmp_path, monkeypatch, lost):
    import ray

    get, error = ray.get, getattr(ray.exceptions, lost)
    arguments = ("no memory",) if lost == "OutOfMemoryError" else ("00", None, "")
    answers = []

    def get_but_once(reference):
        answer = get(reference)
        answers.append(answer)
        if [value for value, _ in answers if value is not None] == [answer[0]]:
            raise error(*arguments)
        return answer

    monkeypatch.setattr(ray, "get", get_but_once)
    frame = candidates(queries=4)
    out = executor.distributed(workers.Stub(str(tmp_path)), block_rows=1)(frame)
    assert out["score"].tolist() == frame["docno"].str[1:].astype(float).tolist()
    asked = [qid for qids in workers.scored(tmp_path).values() for qid in qids]
    assert sorted(asked.count(f"q{i}") for i in range(4)) == [1, 1, 1, 2]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::pyterrier_longdoc.UntrainedWarning")
def test_blocks_on_disk_are_those_of_this_process(executor, tmp_path):
    pytest.importorskip("pyarrow")
    frame = candidates(queries=8, depth=4)
    for name in ("MaxP", "LateIR"):
        model, files = systems.make(name, device="cpu"), []
        for out, on in ((tmp_path / name, None), (tmp_path / f"{name} on Ray", executor)):
            ld.rerank_to_disk(model, frame, out, executor=on)
            files.append({path.name: path.read_bytes() for path in (out / "blocks").iterdir()})
        assert files[0] == files[1]
        assert len(files[0]) > 2


@pytest.mark.slow
def test_work_that_kills_every_worker_is_an_error(executor, tmp_path):
    distributed = executor.distributed(workers.Stub(str(tmp_path), dies_at="q1", always=True), block_rows=1)
    with pytest.raises(WorkerDiedError, match="3 workers died over"):
        distributed(candidates(queries=3))
    assert [qid for qids in workers.scored(tmp_path).values() for qid in qids].count("q1") == 3


@pytest.mark.slow
def test_errors_are_the_models_own_and_the_workers_go_on(executor):
    with pytest.raises(KeyError, match="no text of query q2"):
        executor.distributed(workers.Fails("q2"), block_rows=1)(candidates())
    with pytest.raises(TypeError, match=r"Locked\(\) cannot be sent to workers: cannot pickle"):
        executor.distributed(workers.Locked())(candidates())
    firsts = executor.distributed(workers.FirstRows(), block_rows=8)(candidates())
    pd.testing.assert_frame_equal(firsts, workers.FirstRows()(candidates()))


@pytest.mark.slow
def test_blocks_are_asked_for_when_workers_are_free(executor, tmp_path):
    pulled = []

    def blocks():
        for number in range(12):
            pulled.append(number)
            yield number, tiny.frame(["old dog"], ["a", "b"])

    done = []
    for key, frame in executor.map_blocks(workers.Stub(str(tmp_path)), blocks()):
        done.append(key)
        assert frame["score"].tolist() == [0.0, 1.0]
        assert len(pulled) <= len(done) + 2
    assert sorted(done) == list(range(12))


@pytest.mark.slow
def test_a_place_in_an_experiment(executor, cross_encoder):
    frame, model = candidates(queries=3), systems.make("MaxP", cross_encoder)
    first = pt.Transformer.from_df(frame)
    topics, qrels = frame[["qid", "query"]].drop_duplicates(), frame[["qid", "docno"]].assign(label=1)
    table = pt.Experiment([first >> model, first >> executor.distributed(model)], topics, qrels, ["map", "ndcg"])
    assert table["ndcg"].nunique() == 1


@pytest.mark.bytes
@pytest.mark.slow
def test_folds_and_seeds_are_trained_by_workers(executor, cross_encoder, tmp_path):
    run, judged = toy_task(0, queries=6)
    recipe = ld.TrainingArgs(max_steps=2, learning_rates={"": 1e-3})
    model = systems.make("MaxP", cross_encoder, training=recipe, device="cpu")
    qids = run["qid"].drop_duplicates().tolist()
    folds = [qids[:2], qids[2:4], qids[4:]]
    expected = k_fold_fit(model, run, judged, folds)
    fitted = k_fold_fit(model, run, judged, folds, folder=tmp_path / "folds", executor=executor)
    pd.testing.assert_frame_equal(fitted.run, expected.run)
    assert [each.describe()["weights"] for each in fitted.models] == [
        each.describe()["weights"] for each in expected.models
    ]
    assert sorted(path.name for path in (tmp_path / "folds").iterdir()) == ["fold-0", "fold-1", "fold-2"]
    # Finished ones are read.
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "folds").rglob("*") if path.is_file()}
    again = k_fold_fit(model, run, judged, folds, folder=tmp_path / "folds", executor=executor)
    pd.testing.assert_frame_equal(again.run, expected.run)
    assert {path: path.stat().st_mtime_ns for path in before} == before
    seeds = fit_seeds(model, [1, 0], run, judged, executor=executor.distributed(model))
    assert list(seeds) == [1, 0]
    alone = fit_seeds(model, [1, 0], run, judged)
    assert {seed: each.describe()["weights"] for seed, each in seeds.items()} == {
        seed: each.describe()["weights"] for seed, each in alone.items()
    }
    with pytest.raises(ValueError, match="returned the same"):
        fit_seeds(lambda seed: model, [0, 1], run, judged, executor=executor)


@pytest.mark.slow
def test_threads_and_workers_that_have_no_room(executor, monkeypatch):
    assert dict(executor.map(workers.threads, None, [("a", 0)])) == {"a": 1}
    monkeypatch.setattr(ray_module, "PATIENCE", 0.2)
    monkeypatch.setattr(
        RayExecutor, "tell_of_waiting", lambda own, told=RayExecutor.tell_of_waiting: free_after(own, told)
    )

    def free_after(own, told):
        told(own)
        executor.close()

    wide = RayExecutor(1, cpus_per_worker=2, gpus_per_worker=0)
    with wide, pytest.warns(UserWarning, match="waits for room: each worker needs {'CPU': 2, 'GPU': 0}"):
        assert dict(wide.map(workers.threads, None, [("a", 0)])) == {"a": 2}
    with pytest.raises(ValueError, match=r"no worker of RayExecutor.* has room, which needs 1 CPUs and 64 GPUs"):
        next(RayExecutor(1, gpus_per_worker=64).map(workers.threads, None, [("a", 0)]))
