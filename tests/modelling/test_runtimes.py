"""Back ends: torch's scores, whatever the batch, and never those of weights that are no more."""

from __future__ import annotations

import copy
import pickle
import shutil
import sys

import numpy as np
import pandas as pd
import pytest
import torch

import pyterrier_longdoc as ld
from pyterrier_longdoc.modelling import runtimes
from pyterrier_longdoc.modelling.runtimes import FAMILIES, BackboneRuntime
from pyterrier_longdoc.rerankers.score_cache import ScoreCache

from ..support import tiny, tiny_long
from ..support.systems import make

pytestmark = [
    pytest.mark.filterwarnings("ignore::pyterrier_longdoc.rerankers.base.UntrainedWarning"),
    pytest.mark.filterwarnings("ignore::pyterrier_longdoc.common.frames.TruncationWarning"),
]
CLOSE = {"rtol": 1e-4, "atol": 1e-4}
SLIDING = {"window_size": 40, "stride": 30, "max_query_len": 8}
QRELS = pd.DataFrame({"qid": ["1", "2"], "docno": ["d2", "d1"], "label": [1, 1]})
NEEDED = {"openvino": ["openvino"], "onnx": ["onnx", "onnxruntime", "onnxscript"]}


def need(backend: str) -> None:
    """Skips the test where the back end is not installed."""
    for module in NEEDED.get(backend.removesuffix("-int8"), []):
        pytest.importorskip(module)
    if backend == "compile" and not shutil.which("g++"):
        pytest.skip("there is no compiler")


@pytest.fixture
def exports(monkeypatch) -> list[str]:
    """The back ends of the exports that were made."""
    made = []
    make_one = BackboneRuntime._make

    def spy(self, *arguments):
        made.append(self.backend)
        return make_one(self, *arguments)

    monkeypatch.setattr(BackboneRuntime, "_make", spy)
    return made


@pytest.fixture
def copied(monkeypatch) -> list[str]:
    """Exports that need no library: copies of the backbone; their back ends."""
    made = []

    def export(model, example, dtype):
        made.append("openvino")
        copied = copy.deepcopy(model.backbone)
        return lambda inputs: copied(**inputs).last_hidden_state

    monkeypatch.setattr(runtimes, "_openvino", export)
    return made


def scores(model, results) -> np.ndarray:
    return model(results)["score"].to_numpy()


def torch_scores(model, results) -> np.ndarray:
    """What torch makes of the same weights."""
    return scores(model.apply_attributes(backend="torch"), results)


# The same scores.


@pytest.mark.parametrize(
    ("backend", "family"),
    [
        *(("openvino", family) for family in FAMILIES),
        *(("onnx", family) for family in ("bert", "roberta", "modernbert")),
    ],
)
def test_scores_are_those_of_torch_whatever_the_batch(backend, family, tmp_path, results, exports):
    need(backend)
    model = ld.MaxP(tiny.checkpoint(tmp_path, family), backend=backend, **SLIDING)
    expected = torch_scores(model, results)
    assert len(set(np.round(expected, 3))) == len(expected)
    np.testing.assert_allclose(scores(model, results), expected, **CLOSE)
    model.batch_size = 1
    np.testing.assert_allclose(scores(model, results), expected, **CLOSE)
    np.testing.assert_allclose(scores(model, results[::-1]), expected[::-1], **CLOSE)
    assert exports == [backend]


@pytest.mark.parametrize("family", ["bert", "roberta"])
def test_fixed_layout(family, tmp_path, results):
    """Padding within inputs, and RoBERTa's positions counted over it."""
    need("openvino")
    model = ld.MaxP(tiny.checkpoint(tmp_path, family), backend="openvino", pad_query=True, **SLIDING)
    np.testing.assert_allclose(scores(model, results), torch_scores(model, results), **CLOSE)


@pytest.mark.parametrize("name", ["PARADE-query", "NeuralModel1"])
def test_heads_that_look_at_states(name, cross_encoder, results):
    need("openvino")
    model = make(name, cross_encoder, backend="openvino")
    np.testing.assert_allclose(scores(model, results), torch_scores(model, results), **CLOSE)


def test_explanations(cross_encoder, results):
    need("openvino")
    model = ld.MaxP(cross_encoder, backend="openvino", explain=True, **SLIDING)
    out, expected = model(results), model.apply_attributes(backend="torch")(results)
    assert out["window_spans"].tolist() == expected["window_spans"].tolist()
    for given, wanted in zip(out["window_scores"], expected["window_scores"], strict=True):
        np.testing.assert_allclose(given, wanted, **CLOSE)


def test_openvino_in_bfloat16(cross_encoder, results):
    need("openvino")
    model = ld.MaxP(cross_encoder, backend="openvino", dtype="bfloat16", **SLIDING)
    expected = torch_scores(model.apply_attributes(dtype="float32"), results)
    np.testing.assert_allclose(scores(model, results), expected, atol=0.3 * expected.std())


def test_int8_is_close_and_does_not_depend_on_the_batch(cross_encoder, results, monkeypatch):
    need("onnx-int8")
    import onnx

    kinds = []
    quantized = runtimes._quantized

    def spy(path, layers):
        out = quantized(path, layers)
        kinds.extend(node.op_type for node in onnx.load(str(out)).graph.node)
        return out

    monkeypatch.setattr(runtimes, "_quantized", spy)
    model = ld.MaxP(cross_encoder, backend="onnx-int8", **SLIDING)
    values, expected = scores(model, results), torch_scores(model, results)
    assert np.corrcoef(values, expected)[0, 1] > 0.95
    np.testing.assert_allclose(values, expected, atol=0.5 * expected.std())
    assert not np.allclose(values, expected, **CLOSE)
    layers = 2
    assert kinds.count("MatMulInteger") == 6 * layers  # query, key, value, output, and the two of the feed-forward
    assert kinds.count("MatMul") == 2 * layers  # products of two activations: of queries and keys, and with values
    model.batch_size = 1
    np.testing.assert_allclose(scores(model, results[::-1]), values[::-1], rtol=0, atol=1e-6)


def test_compiled(cross_encoder, results):
    need("compile")
    model = ld.MaxP(cross_encoder, backend="compile", **SLIDING)
    np.testing.assert_allclose(scores(model, results), torch_scores(model, results), **CLOSE)
    with torch.no_grad():
        model.load_scorer().encoder.backbone.get_input_embeddings().weight.mul_(0.5)
    np.testing.assert_allclose(scores(model, results), torch_scores(model, results), **CLOSE)
    # Weights are shared, so that no write needs to be noticed.
    model.load_scorer().encoder.backbone.get_input_embeddings().weight.data.mul_(2)
    np.testing.assert_allclose(scores(model, results), torch_scores(model, results), **CLOSE)


# Never stale.


def dense(backbone) -> torch.Tensor:
    """Some weights within a backbone."""
    return backbone.encoder.layer[1].output.dense.weight


def exchange(backbone) -> None:
    dense(backbone).data = dense(backbone).data.flip(0)


def double(backbone) -> None:
    dense(backbone).data.mul_(2)


WRITES = [
    double,
    exchange,
    lambda backbone: dense(backbone).data.neg_(),
    lambda backbone: dense(backbone).data[:2].copy_(dense(backbone).data[:2].flip(0)),
]


@pytest.mark.parametrize(
    ("run", "write"), [*(("transform", write) for write in WRITES), ("score", double), ("forward", double)]
)
def test_writes_that_torch_does_not_count(run, write, cross_encoder, results, copied):
    model = ld.MaxP(cross_encoder, backend="openvino", **SLIDING)
    scorer = model.load_scorer()
    pairs = results["query"].tolist(), results["text"].fillna("").tolist()

    def values() -> np.ndarray:
        if run == "transform":
            return scores(model, results)
        with torch.no_grad():
            return np.asarray(scorer.score(*pairs) if run == "score" else scorer(*pairs))

    before = values()
    for _ in range(2):
        values()
    assert copied == ["openvino"]
    write(scorer.encoder.backbone)
    after = values()
    assert copied == ["openvino"] * 2
    assert np.abs(after - before).max() > 1e-4
    np.testing.assert_allclose(after, torch_scores(model, results), **CLOSE)


def test_an_export_serves_until_the_weights_change(cross_encoder, results, exports):
    need("openvino")
    model = ld.MaxP(cross_encoder, backend="openvino", **SLIDING)
    before = scores(model, results)
    model.window_size = model.stride = 20
    np.testing.assert_allclose(scores(model, results), torch_scores(model, results), **CLOSE)
    model.window_size, model.stride = 40, 30
    assert len(exports) == 1
    scorer = model.load_scorer()
    scorer.load_state_dict({name: value * 0.9 for name, value in scorer.state_dict().items()})
    after = scores(model, results)
    assert len(exports) == 2
    assert np.abs(after - before).max() > 0.01
    np.testing.assert_allclose(after, torch_scores(model, results), **CLOSE)


def test_training_is_torchs_and_its_weights_are_used(cross_encoder, results, exports):
    need("openvino")
    training = ld.TrainingArgs(epochs=1, learning_rates={"": 1e-2})
    model = ld.MaxP(cross_encoder, backend="openvino", training=training, **SLIDING)
    before = scores(model, results)
    model.fit(results, QRELS)
    assert len(exports) == 1
    after = scores(model, results)
    assert np.abs(after - before).max() > 0.01
    np.testing.assert_allclose(after, torch_scores(model, results), **CLOSE)


def test_fused_optimizers_leave_no_trace_but_training_does(cross_encoder):
    runtime, encoder = BackboneRuntime("openvino"), ld.MaxP(cross_encoder, **SLIDING).load_scorer().encoder
    runtime._made["some export"] = lambda inputs: inputs["input_ids"]
    runtime(encoder.backbone, {"input_ids": torch.ones(1, 3, dtype=torch.long)})
    assert runtime._made == {}


def test_weights_of_another_model(cross_encoder, tmp_path, results, exports):
    need("openvino")
    other = ld.MaxP(tiny.checkpoint(tmp_path / "other", seed=7), **SLIDING)
    model = ld.MaxP(cross_encoder, backend="openvino", **SLIDING)
    before = scores(model, results)
    model.start_from(other)
    np.testing.assert_allclose(scores(model, results), scores(other, results), **CLOSE)
    assert np.abs(scores(model, results) - before).max() > 0.01
    model.save(tmp_path / "saved")
    loaded = ld.MaxP.load(tmp_path / "saved")
    assert loaded.backend == "torch"  # the machine's business, not the checkpoint's
    loaded.backend = "openvino"
    np.testing.assert_allclose(scores(loaded, results), scores(other, results), **CLOSE)
    assert len(exports) == 3


def test_copies_make_their_own(cross_encoder, results):
    need("openvino")
    model = ld.MaxP(cross_encoder, backend="openvino", **SLIDING)
    expected = scores(model, results)
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        runtime = twin._loaded.scorer.encoder.runtime
        assert (runtime.backend, runtime._made) == ("openvino", {})
    np.testing.assert_allclose(scores(twin, results), expected, **CLOSE)


def test_cached_scores_know_their_back_end(cross_encoder, tmp_path, results):
    need("openvino")
    cache = ScoreCache(tmp_path / "scores.sqlite")
    scores(ld.MaxP(cross_encoder, score_cache=cache.path, **SLIDING), results)
    pairs = len(cache)
    scores(ld.MaxP(cross_encoder, score_cache=cache.path, backend="openvino", **SLIDING), results)
    assert len(cache) == 2 * pairs > 0


# What does not work says so.


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"backend": "tensorrt"}, "backend='tensorrt' is unknown; choose one of torch, compile, openvino, onnx"),
        ({"backend": "onnx", "device": "cuda"}, "'onnx' computes on the CPU, not on device='cuda'"),
        ({"backend": "onnx-int8", "dtype": "bfloat16"}, "does not compute in bfloat16: use dtype='float32'"),
        ({"backend": "openvino", "dtype": "float16"}, "in float16: use dtype='float32' or 'bfloat16'"),
    ],
)
def test_arguments_that_do_not_fit(arguments, message, cross_encoder):
    with pytest.raises(ValueError, match=message):
        ld.MaxP(cross_encoder, **arguments)


@pytest.mark.parametrize("name", ["CEDR-knrm", "CEDR-pacrr", "CEDR-drmm", "LateIR", "MORESPlus"])
def test_models_that_need_more_than_the_last_layer(name, cross_encoder):
    with pytest.raises(ValueError, match=r"which \w+ does not: use backend='torch'"):
        make(name, cross_encoder, backend="compile")


def test_other_architectures(tmp_path, results):
    deberta = ld.MaxP(tiny.checkpoint(tmp_path / "deberta", "deberta-v2"), backend="openvino", **SLIDING)
    with pytest.raises(ValueError, match=r"is for bert, distilbert, .*, not for DebertaV2Model \(deberta-v2\)"):
        deberta(results)
    longformer = tiny.checkpoint(tmp_path / "longformer", "longformer", **tiny_long.FAMILIES["longformer"])
    with pytest.raises(ValueError, match=r"not for LongformerModel \(longformer\): use backend='torch'"):
        ld.LongP(longformer, backend="onnx", max_query_len=8)(results)


@pytest.mark.parametrize(("backend", "module"), [("openvino", "openvino"), ("onnx", "onnxscript")])
def test_a_missing_library(backend, module, cross_encoder, results, monkeypatch):
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ImportError, match=rf"backend='{backend}'.*: pip install 'pyterrier-longdoc\[{backend}\]'"):
        ld.MaxP(cross_encoder, backend=backend, **SLIDING)(results)


def test_no_compiler(cross_encoder, results, monkeypatch):
    monkeypatch.setattr(runtimes.shutil, "which", lambda name: None)
    with pytest.raises(RuntimeError, match=r"needs a C\+\+ compiler, .*install one"):
        ld.MaxP(cross_encoder, backend="compile", **SLIDING)(results)


def test_a_wrong_export_is_found_out(cross_encoder, results, monkeypatch):
    monkeypatch.setattr(runtimes, "_openvino", lambda *_: lambda inputs: torch.randn(*inputs["input_ids"].shape, 32))
    with pytest.raises(RuntimeError, match="does not compute what torch does for this BertModel"):
        ld.MaxP(cross_encoder, backend="openvino", **SLIDING)(results)


def test_weights_of_which_no_change_is_recorded(cross_encoder, results):
    with torch.inference_mode():
        model = ld.MaxP(cross_encoder, backend="openvino", **SLIDING)
        with pytest.raises(RuntimeError, match="load the model outside of it"):
            model(results)


@pytest.mark.filterwarnings("ignore::pyterrier_longdoc.common.frames.TruncationWarning")
def test_check_invariance_leaves_out_what_a_back_end_does_not_have(cross_encoder, results):
    need("onnx")
    table = ld.check_invariance(ld.MaxP(cross_encoder, backend="onnx", **SLIDING), results, verbose=False)
    table = table.set_index("check")
    assert not (table["passed"] == False).any()  # noqa: E712 - None is no verdict
    assert table.loc["batch size 1", "passed"]
    for left_out in ("attention eager", "attention sdpa", "dtype bfloat16"):
        assert table.loc[left_out, "passed"] is None
        assert "onnx" in table.loc[left_out, "note"]
