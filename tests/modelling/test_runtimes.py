"""Other runtimes than torch: its scores, whatever the batch, and never those of weights that are no more."""

from __future__ import annotations

import copy
import itertools
import os
import pickle
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.reduction import ForkingPickler

import numpy as np
import pytest
import torch

import pyterrier_longdoc as ld
from pyterrier_longdoc.modelling import runtimes
from pyterrier_longdoc.modelling.backbones.families import FAMILIES

from ..support import tiny, tiny_long
from ..support.systems import QRELS, QUIET, SELECTORS, make, reloaded, scores

pytestmark = QUIET
CLOSE = {"rtol": 1e-4, "atol": 1e-4}
SLIDING = {"window_size": 40, "stride": 30, "max_query_len": 8}


@pytest.fixture
def exports(monkeypatch) -> list[torch.dtype]:
    """Exports need no library, and are copies of the backbone; the precisions of those that were made."""
    made = []

    def compiled(backbone, dtype):
        made.append(dtype)
        return lambda inputs: backbone(**inputs).last_hidden_state

    monkeypatch.setattr(runtimes, "converted", lambda backbone, names: copy.deepcopy(backbone))
    monkeypatch.setattr(runtimes, "compiled", compiled)
    return made


def assert_torchs(model, results) -> np.ndarray:
    """Checks the scores against those of the same weights by torch, and returns them."""
    values = scores(model, results)
    np.testing.assert_allclose(values, scores(model.apply_attributes(runtime="torch"), results), **CLOSE)
    return values


ONE_LAYER = {
    "distilbert": {"n_layers": 1},
    # What padding gets in a layer with local attention reaches the tokens in the next one.
    "modernbert": {"num_hidden_layers": 3, "global_attn_every_n_layers": 3},
}
REAL = {
    **{name: ("MaxP", name, {}) for name, family in FAMILIES.items() if family.supports_openvino},
    # Padding within inputs, and positions counted over it.
    "fixed layout": ("MaxP", "roberta", {"layout": "padded"}),
    "states of all tokens": ("NeuralModel1", "bert", {}),
}


def one_layer(folder, family: str = "bert") -> str:
    """A checkpoint that is exported in half the time."""
    return tiny.checkpoint(folder, family, **ONE_LAYER.get(family, {"num_hidden_layers": 1}))


@pytest.mark.slow
@pytest.mark.parametrize("case", REAL)
def test_openvino_gives_the_scores_of_torch_in_any_batch(case, tmp_path, results):
    pytest.importorskip("openvino")
    name, family, arguments = REAL[case]
    model = make(name, one_layer(tmp_path, family), runtime="openvino", **arguments)
    expected = assert_torchs(model, results)
    assert len(set(np.round(expected, 4))) > 3
    model.batch_size = 1
    np.testing.assert_allclose(scores(model, results[::-1]), expected[::-1], **CLOSE)


@pytest.mark.slow
@pytest.mark.parametrize("move", [ForkingPickler.dumps, torch.nn.Module.share_memory])
def test_openvino_computes_weights_whose_memory_moved(move, tmp_path, results):
    """As in a call through a pool of processes; exports read the memory of the weights."""
    pytest.importorskip("openvino")
    model = ld.MaxP(one_layer(tmp_path), runtime="openvino", **SLIDING)
    expected = scores(model, results)
    move(model.model)
    np.testing.assert_allclose(scores(model, results), expected, **CLOSE)


@pytest.mark.slow
def test_openvino_serves_several_threads(tmp_path, results):
    pytest.importorskip("openvino")
    model = ld.MaxP(one_layer(tmp_path), runtime="openvino", **SLIDING)
    expected = scores(model, results)
    with ThreadPoolExecutor(4) as pool:
        for found in pool.map(lambda _: scores(model, results), range(24)):
            np.testing.assert_allclose(found, expected, **CLOSE)


@pytest.mark.slow
def test_openvino_in_bfloat16_gives_nearly_the_scores_of_float32(tmp_path, results):
    pytest.importorskip("openvino")
    model = ld.MaxP(one_layer(tmp_path), runtime="openvino", dtype="bfloat16", **SLIDING)
    expected = scores(model.apply_attributes(dtype="float32", runtime="torch"), results)
    np.testing.assert_allclose(scores(model, results), expected, atol=0.3 * expected.std())


RUNS = {
    "score": lambda scorer, queries, texts: scorer.score(queries, texts).scores,
    "forward": lambda scorer, queries, texts: scorer(queries, texts).numpy(),
}


@pytest.mark.parametrize("run", RUNS)
def test_changes_of_weights_cause_a_new_export(run, cross_encoder, results, exports):
    model = ld.MaxP(cross_encoder, runtime="openvino", **SLIDING)
    pairs = results["query"].tolist(), results["text"].fillna("").tolist()
    with torch.no_grad():
        before = RUNS[run](model.model, *pairs)
        np.testing.assert_array_equal(RUNS[run](model.model, *pairs), before)
        assert len(exports) == 1
        model.model.encoder.backbone.encoder.layer[1].output.dense.weight.mul_(2)
        after = RUNS[run](model.model, *pairs)
    assert len(exports) == 2
    assert np.abs(after - before).max() > 1e-4
    np.testing.assert_allclose(after, scores(model.apply_attributes(runtime="torch"), results), **CLOSE)


def test_an_export_serves_until_the_weights_change(cross_encoder, tmp_path, results, exports):
    training = ld.TrainingArgs(epochs=1, learning_rates={"": 1e-2})
    model = ld.MaxP(cross_encoder, runtime="openvino", training=training, explain=True, **SLIDING)
    found = [assert_torchs(model, results)]
    model.window_size = model.stride = 20
    assert_torchs(model, results)
    model.window_size, model.stride = 40, 30
    assert len(exports) == 1
    model.fit(results, QRELS)
    assert len(exports) == 1
    found.append(assert_torchs(model, results))
    model.start_from(ld.MaxP(tiny.checkpoint(tmp_path / "other", seed=7), **SLIDING))
    found.append(assert_torchs(model, results))
    assert len(exports) == 3
    assert all(np.abs(after - before).max() > 0.01 for before, after in itertools.pairwise(found))


def test_moved_memory_causes_a_new_export(cross_encoder, results, exports):
    model = ld.MaxP(cross_encoder, runtime="openvino", **SLIDING)
    expected = assert_torchs(model, results)
    model.model.share_memory()
    np.testing.assert_allclose(scores(model, results), expected, **CLOSE)
    assert len(exports) == 2


def test_copies_export_again_and_saved_models_have_no_runtime(cross_encoder, tmp_path, results, exports):
    model = ld.MaxP(cross_encoder, runtime="openvino", **SLIDING)
    expected = assert_torchs(model, results)
    for number, twin in enumerate((copy.deepcopy(model), pickle.loads(pickle.dumps(model))), 2):
        np.testing.assert_allclose(scores(twin, results), expected, **CLOSE)
        assert len(exports) == number
    assert reloaded(model, tmp_path).runtime is None  # the machine's business, not the checkpoint's


def longformer(folder) -> ld.LongP:
    backbone = tiny.checkpoint(folder, "longformer", **tiny_long.FAMILIES["longformer"])
    return ld.LongP(backbone, max_query_len=8)


WITHOUT_EXPORT = {
    "CEDR": (lambda folder: make("CEDR-knrm"), "all layers"),
    "Longformer": (longformer, "longformer"),
}
"""Models, and why they are not exported."""


@pytest.mark.parametrize("name", WITHOUT_EXPORT)
def test_models_without_export_are_refused(name, tmp_path, results):
    model, reason = WITHOUT_EXPORT[name]
    with pytest.raises(ValueError, match=reason):
        model(tmp_path).apply_attributes(runtime="openvino")(results)


def wrong_with_much_padding(inputs, right):
    """NaN for windows that are padded with 100 tokens or more."""
    return right.masked_fill((inputs["attention_mask"] == 0).sum(1)[:, None, None] >= 100, torch.nan)


WRONG = {"everywhere": lambda inputs, right: torch.randn_like(right), "only with much padding": wrong_with_much_padding}


@pytest.mark.parametrize("wrong", WRONG)
def test_a_backbone_with_a_wrong_export_is_computed_by_torch(wrong, cross_encoder, results, can_export, monkeypatch):
    made = runtimes.compiled

    def compiled(backbone, dtype):
        form = made(backbone, dtype)
        return lambda inputs: WRONG[wrong](inputs, form(inputs))

    monkeypatch.setattr(runtimes, "compiled", compiled)
    model = ld.MaxP(cross_encoder, **SLIDING)
    assert_torchs(model, results)
    assert model.coverage.runtime == "torch"
    with pytest.raises(ValueError, match="its export differs from torch"):
        model.apply_attributes(runtime="openvino")(results)


def double_by_hook(backbone):
    backbone.encoder.layer[0].register_forward_hook(lambda module, inputs, output: output * 2)


CHANGES = {
    "hook": double_by_hook,
    "buffer": lambda backbone: backbone.embeddings.position_ids.copy_(backbone.embeddings.position_ids.flip(1)),
}
"""Changes of a backbone that are none of its weights."""


@pytest.mark.parametrize("change", CHANGES)
def test_hooks_and_changed_buffers_are_noticed(change, cross_encoder, results, can_export):
    model, unused = make("MaxP", cross_encoder), make("MaxP", cross_encoder, runtime="torch")
    before = scores(model, results)
    CHANGES[change](unused.model.encoder.backbone)
    CHANGES[change](model.model.encoder.backbone)
    after = scores(model, results)
    assert model.coverage.runtime == ("torch" if change == "hook" else "openvino")
    assert np.abs(after - before).max() > 1e-3
    np.testing.assert_allclose(after, scores(unused, results), **CLOSE)


def test_hooks_are_refused_with_openvino(cross_encoder, results, exports):
    model = ld.MaxP(cross_encoder, runtime="openvino", **SLIDING)
    model(results)
    double_by_hook(model.model.encoder.backbone)
    with pytest.raises(ValueError, match="hooks"):
        model(results)


# The choice of the runtime.


@pytest.fixture
def can_export(monkeypatch, exports) -> None:
    """An x86-64 machine with OpenVINO, on which every backbone is large enough."""
    monkeypatch.setattr(runtimes.platform, "machine", lambda: "x86_64")
    monkeypatch.setattr(runtimes, "find_spec", lambda name: name)
    monkeypatch.setattr(runtimes, "LEAST_WEIGHTS", 0)


def runtime_of(model, results) -> str:
    return model(results) is not None and model.coverage.runtime


@pytest.mark.parametrize("name", ["MaxP", "PARADE-query", "NeuralModel1", "LateIR", "MaxSim", "BiEncoder-max"])
def test_openvino_is_chosen(name, cross_encoder, results, can_export):
    model = make(name, cross_encoder)
    found = scores(model, results)
    assert model.coverage.runtime == "openvino"
    np.testing.assert_allclose(found, scores(make(name, cross_encoder, runtime="torch"), results), **CLOSE)


@pytest.mark.parametrize("name", WITHOUT_EXPORT)
def test_torch_is_chosen_for_models_without_export(name, tmp_path, results, can_export):
    model, _ = WITHOUT_EXPORT[name]
    assert runtime_of(model(tmp_path), results) == "torch"


@pytest.mark.parametrize(
    ("name", "value"),
    [("LEAST_WEIGHTS", 10_000_000), ("find_spec", lambda name: None), ("platform.machine", lambda: "arm64")],
    ids=["small backbone", "no OpenVINO", "another processor"],
)
def test_torch_is_chosen_where_openvino_does_not_pay_or_is_not_there(
    name, value, cross_encoder, results, can_export, monkeypatch
):
    monkeypatch.setattr(f"{runtimes.__name__}.{name}", value)
    assert runtime_of(ld.MaxP(cross_encoder, **SLIDING), results) == "torch"


@pytest.mark.parametrize(("native", "runtime"), [(True, "openvino"), (False, "torch")])
def test_openvino_is_chosen_in_bfloat16_where_the_processor_has_it(
    native, runtime, cross_encoder, results, can_export, monkeypatch
):
    monkeypatch.setattr(runtimes, "has_bfloat16", lambda device: native)
    assert runtime_of(ld.MaxP(cross_encoder, dtype="bfloat16", **SLIDING), results) == runtime


def test_the_runtime_is_part_of_the_description(cross_encoder, can_export):
    model = ld.MaxP(cross_encoder, **SLIDING)
    assert model.describe() != model.apply_attributes(runtime="torch").describe()


def test_validation_stays_on_torch(cross_encoder, results, can_export, exports):
    training = ld.TrainingArgs(epochs=2, learning_rates={"": 1e-2})
    model = ld.MaxP(cross_encoder, training=training, **SLIDING).fit(results, QRELS, results, QRELS)
    assert not exports
    assert runtime_of(model, results) == "openvino"


def test_bi_encoders_of_one_checkpoint_share_an_export(plain_encoder, results, can_export, exports):
    models = [make(name, plain_encoder) for name in ("BiEncoder-max", "BiEncoder-avg")]
    assert [runtime_of(model, results) for model in models] == ["openvino"] * 2
    assert len(exports) == 1


@pytest.mark.parametrize("selector", ["EmbeddingWindows", "CrossEncoderWindows"])
def test_openvino_is_chosen_for_the_model_of_a_selector(selector, cross_encoder, results, can_export, exports):
    ld.MaxP(cross_encoder, preselect=SELECTORS[selector](1), runtime="torch", **SLIDING)(results)
    assert len(exports) == 1


RUN = """
import sys
import pandas as pd
import pyterrier_longdoc as ld
sys.modules.pop("openvino_telemetry", None)
model = ld.FirstP(sys.argv[1], runtime="openvino", max_query_len=8, window_size=20)
model(pd.DataFrame({"qid": ["1"], "query": ["cat"], "docno": ["a"], "text": ["a cat"]}))
print(model.coverage.runtime)
"""


@pytest.mark.slow
def test_openvino_reports_nothing(cross_encoder, tmp_path):
    pytest.importorskip("openvino")
    environment = {**os.environ, "HOME": str(tmp_path), "PYTHONWARNINGS": "ignore"}
    command = [sys.executable, "-c", RUN, cross_encoder]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.stdout.strip() == "openvino", done.stderr
    assert not list(tmp_path.glob("intel*"))
