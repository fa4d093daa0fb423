"""distributed: workers give the results of one process."""

from __future__ import annotations

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
from pyterrier_longdoc.scale import ray as scale_ray
from pyterrier_longdoc.scale.blocks import blocks_of

from ..support import systems, terrier, tiny, workers

ray = pytest.importorskip("ray.data") and sys.modules["ray"]


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    monkeypatch.setattr("pyterrier_longdoc.scale.blocks.BLOCK_ROWS", 8)


@pytest.fixture(scope="module")
def cluster():
    """Two cores for workers."""
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
    yield
    ray.shutdown()


def candidates(queries: int = 6, depth: int = 4) -> pd.DataFrame:
    """Rows of several queries, mixed, with an index of their own."""
    frame = tiny.frame(
        [f"{word} dog" for word in tiny.WORDS[22 : 22 + queries]], [tiny.LONG[: 90 * d] for d in range(depth)]
    )
    frame = frame.sample(frac=1, random_state=3)
    return frame.assign(price=np.arange(len(frame), dtype="int32"))


def by_ids(results: pd.DataFrame) -> pd.DataFrame:
    return results.sort_values(["qid", "docno"]).reset_index(drop=True)


# Without Ray.


def test_blocks_are_whole_queries_in_order(monkeypatch):
    monkeypatch.setattr("pyterrier_longdoc.scale.blocks.BLOCK_ROWS", 7)
    frame = candidates(queries=5)
    blocks = blocks_of(frame)
    assert [len(block) for block in blocks] == [8, 8, 4]
    assert sorted(np.concatenate(blocks)) == list(range(20))
    of_blocks = [frame["qid"].iloc[block].drop_duplicates().tolist() for block in blocks]
    assert [qid for block in of_blocks for qid in block] == frame["qid"].drop_duplicates().tolist()
    topics = frame[["qid", "query"]].drop_duplicates()
    assert [block.tolist() for block in blocks_of(topics)] == [[0], [1], [2], [3], [4]]
    assert [block.tolist() for block in blocks_of(frame.iloc[:0])] == [[]]


@pytest.mark.parametrize("arguments", [{"workers": 0}, {"workers": 2, "cpus_per_worker": 1.5}])
def test_wrong_numbers_are_refused_by_name(arguments):
    with pytest.raises(ValueError, match=list(arguments)[-1]):
        ld.distributed(pt.Transformer.identity(), **arguments)


def test_an_empty_frame_and_a_missing_column_start_no_worker(cross_encoder, monkeypatch):
    monkeypatch.delattr(scale_ray, "_connected")
    model = systems.make("MaxP", cross_encoder)
    distributed = ld.distributed(model, workers=2)
    assert distributed(candidates().iloc[:0]).columns.tolist() == model(candidates().iloc[:0]).columns.tolist()
    with pytest.raises(pt.validate.InputValidationError, match="text"):
        distributed(candidates().drop(columns="text"))


def test_the_test_case_of_pyterrier_passes(cross_encoder):
    fresh = ld.distributed(systems.make("MaxP", cross_encoder), workers=2, gpus_per_worker=0)
    outcome = unittest.TestResult()
    unittest.defaultTestLoader.loadTestsFromTestCase(pt.testing.transformer_test_class(lambda: fresh)).run(outcome)
    assert outcome.testsRun
    assert not outcome.failures + outcome.errors


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
    for rows in blocks_of(frame):
        model(frame.iloc[rows])
        parts.append(model.coverage)
    assert len(parts) > 2
    assert Coverage.total(parts) == whole
    assert (whole.pairs, whole.queries) == (len(frame), frame["qid"].nunique())


def test_ray_imported_before_java_is_refused(monkeypatch):
    monkeypatch.delenv("RAY_DISABLE_FAILURE_SIGNAL_HANDLER", raising=False)
    monkeypatch.setattr("pyterrier.java.started", lambda: True)
    monkeypatch.setattr("ray.is_initialized", lambda: False)
    with pytest.raises(RuntimeError, match="before Java"):
        ld.distributed(pt.Transformer.identity(), workers=1)(candidates())


# With two workers.


@pytest.mark.slow
def test_a_worker_that_no_machine_has_room_for_is_refused(cluster, cross_encoder):
    for needed in ({"cpus_per_worker": 1000}, {"gpus_per_worker": 1000}):
        with pytest.raises(ValueError, match="1000"):
            ld.distributed(systems.make("MaxP", cross_encoder), workers=1, **needed)(candidates())


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::pyterrier_longdoc.UntrainedWarning")
def test_scores_coverage_and_warnings_equal_those_of_the_model(cluster, cross_encoder, capsys):
    frame = candidates()
    store = workers.LockedStore(frame.drop_duplicates("docno"))
    pipeline = systems.make("MaxP", cross_encoder, text_loader=store)
    distributed, without_text = ld.distributed(pipeline, workers=2, verbose=True), frame.drop(columns="text")
    with pytest.warns(ld.EmptyTextWarning, match="no text"):
        out = distributed(without_text)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        expected = pipeline(without_text)
    assert out["qid"].drop_duplicates().tolist() == frame["qid"].drop_duplicates().tolist()
    pd.testing.assert_frame_equal(by_ids(out), by_ids(expected), check_exact=False, rtol=1e-5)
    assert distributed.coverage == pipeline.coverage
    assert pipeline.text_loader is store
    assert "24/24" in capsys.readouterr().err


@pytest.mark.slow
def test_only_the_current_blocks_of_a_killed_worker_are_scored_again(cluster, tmp_path):
    frame = candidates(queries=20)
    out = ld.distributed(workers.Stub(tmp_path, dies_at="q9"), workers=2)(frame)
    assert out["score"].tolist() == out["docno"].str[1:].astype(float).tolist()
    assert set(out["threads"]) == {1}
    assert sorted(out["docno"] + out["qid"]) == sorted(frame["docno"] + frame["qid"])
    asked = [qid for qids in workers.scored(tmp_path) for qid in qids]
    assert asked.count("q9") == 2
    assert len(asked) < 30


@pytest.mark.slow
def test_rerank_to_disk_continues_on_workers_after_an_error(cluster, tmp_path):
    pytest.importorskip("pyarrow")
    frame, stub = candidates(queries=8), workers.Stub(tmp_path, fails_at="q5")
    with pytest.raises(Exception, match="no text of query q5"):
        ld.rerank_to_disk(ld.distributed(stub, workers=1), frame, tmp_path / "out")
    finished = len(list(tmp_path.glob("out/blocks/*.parquet")))
    stub.fails_at = None
    with pytest.warns(UserWarning, match="cannot notice changes") if finished else warnings.catch_warnings():
        ld.rerank_to_disk(ld.distributed(stub, workers=1), frame, tmp_path / "out")
    expected = workers.Stub(tmp_path).transform(frame)
    pd.testing.assert_frame_equal(by_ids(ld.merge_run(tmp_path / "out")), by_ids(expected))
    assert not list(tmp_path.glob("out/blocks/.*"))


BESIDE_JAVA = """
import sys
from pathlib import Path

import pandas as pd
import pyterrier as pt

import pyterrier_longdoc as ld
from tests.support import systems, terrier

pt.java.init()
index = terrier.index(Path(sys.argv[1]) / "index")
topics = pd.DataFrame([(str(i), "dog river mountain") for i in range(100)], columns=["qid", "query"])
model = systems.make("MaxP", text_loader=index)
pipeline = index.bm25() >> ld.distributed(model, workers=1, gpus_per_worker=0)
candidates = index.bm25()(topics)
for _ in range(2):
    out = pipeline(topics)
    for _ in range(20):
        index.bm25()(topics)
assert abs(out["score"].to_numpy() - model(candidates)["score"].to_numpy()).max() < 1e-5
ld.rerank_to_disk(ld.distributed(model, workers=1, gpus_per_worker=0), candidates, Path(sys.argv[1]) / "out")
merged = ld.merge_run(Path(sys.argv[1]) / "out")
assert abs(merged["score"].to_numpy() - out["score"].to_numpy()).max() < 1e-5
print("equal")
"""


@pytest.mark.slow
def test_workers_run_beside_java(terrier_home, tmp_path):
    environment = terrier.environment(terrier_home)
    environment.pop("RAY_DISABLE_FAILURE_SIGNAL_HANDLER", None)
    command, root = [sys.executable, "-c", BESIDE_JAVA, str(tmp_path)], Path(__file__).parents[2]
    done = subprocess.run(command, env=environment, cwd=root, capture_output=True, text=True, timeout=300)
    assert done.stdout.endswith("equal\n"), done.stderr
