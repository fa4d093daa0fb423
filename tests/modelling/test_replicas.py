"""A run on several devices: the same scores, and work for each of them."""

from __future__ import annotations

import threading
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
import torch
from torch import nn

import pyterrier_longdoc as ld
from pyterrier_longdoc.modelling import devices
from pyterrier_longdoc.modelling import scorer as steps
from pyterrier_longdoc.modelling.backbones.load import load_backbone
from pyterrier_longdoc.modelling.devices import resolve_devices
from pyterrier_longdoc.modelling.encoder import WindowEncoder
from pyterrier_longdoc.modelling.scorer import in_turn, replica

from ..support.systems import CROSS_ENCODERS, REMEMBERING, SLIDING, make

pytestmark = [
    pytest.mark.filterwarnings("ignore::pyterrier_longdoc.rerankers.base.UntrainedWarning"),
    pytest.mark.filterwarnings("ignore::pyterrier_longdoc.common.frames.TruncationWarning"),
]

TWO = ["cpu", "cpu"]
SEVERAL = [name for name in CROSS_ENCODERS if name not in REMEMBERING]


@pytest.fixture
def one_by_one(monkeypatch):
    """Blocks of one pair."""
    monkeypatch.setattr(steps, "BLOCK_PAIRS", 1)


@pytest.fixture
def threads(monkeypatch) -> list[tuple[str, int]]:
    """Thread and encoder of each pass."""
    seen = []
    encode = WindowEncoder._encode

    def spy(self, *args):
        seen.append((threading.current_thread().name, id(self)))
        return encode(self, *args)

    monkeypatch.setattr(WindowEncoder, "_encode", spy)
    return seen


@pytest.fixture
def workers() -> list[nn.Linear]:
    return [nn.Linear(1, 1) for _ in range(2)]


@pytest.mark.parametrize("name", SEVERAL)
def test_several_devices_score_as_one(name, cross_encoder, results, one_by_one, threads):
    one, two = make(name, cross_encoder), make(name, cross_encoder, device=TWO)
    pd.testing.assert_frame_equal(two(results), one(results), rtol=1e-5)
    assert two.coverage.as_dict() == one.coverage.as_dict()
    assert two.coverage.tokens_encoded > 0
    encoders = {encoder for thread, encoder in threads if thread.startswith("longdoc-device")}
    assert len(encoders) == 2
    assert any(thread == "MainThread" for thread, _ in threads)  # the model on one device


def test_several_devices_explain_as_one(cross_encoder, results, one_by_one):
    one, two = (make("PARADE-attn", cross_encoder, explain=True, device=device) for device in ("cpu", TWO))
    pd.testing.assert_frame_equal(two(results), one(results), rtol=1e-5)


def test_fused_models_share_several_devices(cross_encoder, results, one_by_one, threads):
    models = [make("MaxP", cross_encoder, device=TWO), make("SumP", cross_encoder, device=TWO)]
    fused = (models[0] ** models[1]).compile()
    assert isinstance(fused, ld.fused.FusedRerankers)
    together = np.stack(fused(results)["features"])
    assert len({encoder for _, encoder in threads}) == 2
    np.testing.assert_allclose(together, np.stack([model(results)["score"] for model in models], axis=1), rtol=1e-5)
    assert models[0].coverage.tokens_encoded == models[1].coverage.tokens_encoded > 0


def test_copies_have_the_weights_of_the_moment(cross_encoder, results, one_by_one):
    model = make("MaxP", cross_encoder, device=TWO)
    before = model(results)["score"].to_numpy()
    with torch.no_grad():
        model.load_scorer().head.final.weight.mul_(-1)
        model.load_scorer().head.final.bias.mul_(-1)
    one = make("MaxP", cross_encoder)
    one.start_from(model)
    after = model(results)["score"].to_numpy()
    np.testing.assert_allclose(after, one(results)["score"], rtol=1e-5)
    assert np.abs(after - before).max() > 0.1


def test_progress_and_cache(cross_encoder, results, one_by_one, tmp_path):
    model = make("MaxP", cross_encoder, device=TWO, score_cache=tmp_path / "scores.sqlite")
    scorer, done = model.load_scorer(), []
    scores = scorer.score(list(results["query"]), list(results["text"].fillna("")), on_rows=done.append)
    assert sum(done) == len(results)
    for _ in range(2):
        np.testing.assert_allclose(model(results)["score"], scores, rtol=1e-6)


def test_what_a_copy_learns_about_memory_is_kept(cross_encoder, results, one_by_one, monkeypatch):
    model = make("MaxP", cross_encoder, device=TWO)
    scorer = model.load_scorer()
    encode = WindowEncoder._encode

    def fails_on_copies(self, batch, rows, *args):
        if self is not scorer.encoder and len(rows) > 1:
            raise torch.OutOfMemoryError("of the test")
        return encode(self, batch, rows, *args)

    expected = make("MaxP", cross_encoder)(results)
    monkeypatch.setattr(WindowEncoder, "_encode", fails_on_copies)
    pd.testing.assert_frame_equal(model(results), expected, rtol=1e-5)
    assert scorer.encoder.affordable_tokens < 1000


def test_a_copy_is_on_its_device_and_leaves_the_original(cross_encoder):
    encoder = WindowEncoder(load_backbone(cross_encoder))
    shared = object()
    encoder.something = shared
    copied = replica(encoder, torch.device("meta"), [shared])
    assert {tensor.device.type for tensor in (*copied.parameters(), *copied.buffers())} == {"meta"}
    assert {tensor.device.type for tensor in (*encoder.parameters(), *encoder.buffers())} == {"cpu"}
    assert copied.something is shared
    assert copied.state_dict().keys() == encoder.state_dict().keys()
    here = replica(encoder, torch.device("cpu"))
    assert [p.data_ptr() for p in here.parameters()] == [p.data_ptr() for p in encoder.parameters()]
    assert all(p.requires_grad for p in encoder.parameters())


def test_small_runs_make_no_copies(cross_encoder, results, threads):
    model = make("MaxP", cross_encoder, device=TWO)
    model(results)
    assert len({encoder for _, encoder in threads}) == 1


def test_large_runs_have_blocks_for_every_device(cross_encoder, monkeypatch):
    monkeypatch.setattr(steps, "SMALL_BLOCK_CHARACTERS", 100)
    texts = [f"{number} " + "old dog " * 50 for number in range(64)]
    counts = {}
    for device in ("cpu", TWO):
        scorer = make("MaxP", cross_encoder, device=device).load_scorer()
        queries = ["cat"] * len(texts)
        counts[str(device)] = len(list(steps.steps(scorer, queries, [np.array([7])], texts, None, offsets=False)))
    assert counts["cpu"] == 1
    assert 2 * steps.BLOCKS_PER_DEVICE <= counts[str(TWO)] <= 3 * steps.BLOCKS_PER_DEVICE


def test_workers_work_at_the_same_time(workers):
    barrier = threading.Barrier(2, timeout=20)  # passes only if both are at work

    def work(worker, item):
        barrier.wait()
        assert torch.is_inference_mode_enabled()
        return worker, item * 10

    with torch.inference_mode():
        done = list(in_turn(workers, range(6), work))
    assert sorted((item, result) for item, (_, result) in done) == [(item, item * 10) for item in range(6)]
    assert {id(worker) for _, (worker, _) in done} == set(map(id, workers))


def test_a_slow_worker_holds_nobody_up(workers):
    others_done = threading.Event()

    def work(worker, item):
        if worker is workers[0]:
            assert others_done.wait(timeout=20)  # in vain if later items waited for this one
        elif item == 9:
            others_done.set()
        return item

    assert sorted(item for item, _ in in_turn(workers, range(10), work)) == list(range(10))


def test_after_an_error_finished_work_is_kept(workers):
    started, prepared = [], []

    def items():
        for item in range(100):
            prepared.append(item)
            yield item

    def work(worker, item):
        started.append(item)
        if item == 2:
            raise ValueError("of item 2")
        return item

    done = []
    with pytest.raises(ValueError, match="of item 2"):
        done.extend(item for item, _ in in_turn(workers, items(), work))
    assert sorted([*done, 2]) == sorted(started) == prepared
    assert len(prepared) < 100


def test_what_cannot_be_prepared_ends_the_run_after_the_rest(workers):
    def items():
        yield from range(3)
        raise ValueError("of item 3")

    done = []
    with pytest.raises(ValueError, match="of item 3"):
        done.extend(item for item, _ in in_turn(workers, items(), lambda worker, item: item))
    assert sorted(done) == [0, 1, 2]


def test_a_run_that_is_left_stops_its_threads(workers):
    run = in_turn(workers, range(100), lambda worker, item: item)
    next(run)
    run.close()
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("longdoc-device")]


def test_one_worker_has_no_thread(workers):
    names = [result for _, result in in_turn(workers[:1], range(3), lambda *_: threading.current_thread().name)]
    assert names == [threading.current_thread().name] * 3


@pytest.fixture
def gpus(monkeypatch):
    """Four GPUs, the third of them of another model; the second is the current one."""
    cuda = SimpleNamespace(
        is_available=lambda: True,
        current_device=lambda: 1,
        device_count=lambda: 4,
        get_device_name=lambda number: "small" if number == 2 else "large",
    )
    monkeypatch.setattr(devices.torch, "cuda", cuda)


def test_all_equal_gpus_are_taken(gpus):
    assert list(map(str, resolve_devices(None))) == ["cuda:1", "cuda:0", "cuda:3"]
    assert list(map(str, resolve_devices("cuda:2"))) == ["cuda:2"]
    assert list(map(str, resolve_devices(["cuda:2", "cuda:0"]))) == ["cuda:2", "cuda:0"]


def test_each_of_several_processes_takes_its_gpu(gpus, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "6")
    monkeypatch.setenv("LOCAL_RANK", "5")
    assert list(map(str, resolve_devices(None))) == ["cuda:1"]
    with pytest.raises(ValueError, match="has one GPU: leave device=None"):
        resolve_devices(["cuda:0", "cuda:1"])


def test_a_device_without_room_takes_no_part(cross_encoder, results, one_by_one, monkeypatch, caplog):
    model = make("MaxP", cross_encoder, device=TWO)
    expected = model(results)
    made = []

    def full(scorer, device, shared):
        made.append(device)
        if len(made) == 2:
            raise torch.OutOfMemoryError("of the test")
        return replica(scorer, device, shared)

    monkeypatch.setattr(steps, "replica", full)
    pd.testing.assert_frame_equal(model(results), expected)
    assert len(made) == 2
    assert "no room for a copy" in caplog.text


@pytest.mark.parametrize(
    ("name", "settings", "message"),
    [
        ("MaxP", {"device": []}, "names no device"),
        ("MaxP", {"device": ["cpu", "cuda:0"]}, "of one kind"),
        ("MaxP", {"device": ["cpu", "toaster"]}, "toaster"),
        ("MaxP", {"device": TWO, "runtime": "openvino"}, "one device at a time"),
        ("LateIR", {"device": TWO}, "one device at a time"),
        ("BiEncoder-max", {"device": TWO}, "one device at a time"),
    ],
)
def test_unusable_devices_are_named(name, settings, message, cross_encoder, results):
    with pytest.raises(ValueError, match=message):
        make(name, cross_encoder, **settings)(results)


def test_saved_with_several_devices(cross_encoder, results, tmp_path):
    model = ld.MaxP(cross_encoder, device=TWO, **SLIDING)
    model.save(tmp_path / "model")
    np.testing.assert_allclose(ld.MaxP.load(tmp_path / "model")(results)["score"], model(results)["score"], rtol=1e-6)


def test_the_model_itself_stays_in_its_mode(cross_encoder, results, one_by_one, monkeypatch):
    model = make("MaxP", cross_encoder, device=TWO)
    scorer = model.load_scorer().train()
    used = []
    encode = WindowEncoder._encode
    monkeypatch.setattr(
        WindowEncoder, "_encode", lambda self, *a: used.append((self, self.training)) or encode(self, *a)
    )
    model(results)
    assert used
    assert not any(training or encoder is scorer.encoder for encoder, training in used)
    assert scorer.encoder.training
