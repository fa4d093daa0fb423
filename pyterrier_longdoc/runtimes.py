"""Other ways to compute a backbone than torch's own: compiled, or exported to OpenVINO or ONNX Runtime.

For inference; training is always torch's. Shapes: V windows of a pass, T tokens, H hidden size.
"""

from __future__ import annotations

import inspect
import logging
import os
import shutil
import tempfile
import warnings
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from .architectures import quiet
from .changes import WeightsWatch
from .devices import device_names, dtype_name
from .extras import import_extra
from .frames import check_choice
from .heads import registered_heads

BACKENDS = ("torch", "compile", "openvino", "onnx", "onnx-int8")

FAMILIES = ("bert", "distilbert", "electra", "modernbert", "roberta", "xlm-roberta")
"""Architectures whose other forms are tested here. Exported, Longformer and BigBird are wrong at other lengths than the
one that they were exported with (huggingface/optimum issues 505 and 776)."""

_DTYPES = {"openvino": ("float32", "bfloat16"), "onnx": ("float32",), "onnx-int8": ("float32",)}
"""Precisions of the back ends that compute on a CPU with a copy of the weights."""

_TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.1}
"""How far an export may be from torch, relative to the norm of the states. A wrong one is off by about 1."""
_INT8_TOLERANCE = 0.3

_EXAMPLE, _CHECKED = (2, 16), (3, 29)
"""Windows and tokens of the input that an export is made with, and of the one that it is checked with."""

_COMPILED_FORMS = 64
"""Most kinds of passes that are compiled: each architecture has about four in each precision."""

Inputs = dict[str, Any]
Runtime = Callable[[Inputs], torch.Tensor]
"""`runtime(inputs)`: the inputs of a Hugging Face encoder by name, to its last hidden state `(V, T, H)`."""


def check_backend(backend: str, device: Any, dtype: str | None) -> None:
    """Raises ValueError for an unknown back end, or a device or precision that it does not have; None is its own."""
    check_choice("backend", backend, BACKENDS)
    if backend not in _DTYPES:
        return
    if any(name is not None and torch.device(name).type != "cpu" for name in device_names(device)):
        raise ValueError(
            f"backend={backend!r} computes on the CPU, not on device={device!r}: leave device=None, or take "
            f"backend='torch' or 'compile'"
        )
    if dtype is not None and dtype not in _DTYPES[backend]:
        known = " or ".join(map(repr, _DTYPES[backend]))
        raise ValueError(f"backend={backend!r} does not compute in {dtype}: use dtype={known}")


def check_last_layer(backend: str, model: str, one_encoder: bool, head: str) -> None:
    """Raises ValueError for a model that looks at more than what a back end returns, the last layer of one encoder.

    Args:
        backend: another one than torch.
        model: name of the model's class.
        one_encoder: whether its encoder reads query and window together, and nothing else encodes.
        head: registered name of its head.
    """
    known = registered_heads().get(head)
    if not one_encoder or (known is not None and known.needs == "all"):
        raise ValueError(
            f"backend={backend!r} is for models that look at the last layer of one encoder alone (FirstP, MaxP, AvgP, "
            f"PARADE, NeuralModel1, LongP and so on), which {model} does not: use backend='torch'"
        )


def default_device(backend: str) -> str | None:
    """Where a back end computes if no device is named; None for torch's choice."""
    return "cpu" if backend in _DTYPES else None


def default_dtype(backend: str) -> str | None:
    """In which precision a back end computes if none is named; None for the device's fastest."""
    known = _DTYPES.get(backend, ())
    return known[0] if len(known) == 1 else None


class BackboneRuntime:
    """Computes a backbone by a back end, whose form of it is made when it is first needed.

    It is made anew once the weights have changed, and is neither copied nor pickled with the model. An export holds a
    copy of the weights: whoever scores calls `begin` first, so that no change of them goes unnoticed.

    Args:
        backend: one of `BACKENDS`.
    """

    def __init__(self, backend: str = "torch") -> None:
        self._backend = backend
        self._made: dict[Hashable, Runtime] = {}
        self._weights = WeightsWatch()

    def __getstate__(self) -> dict[str, Any]:
        return {"_backend": self._backend, "_made": {}, "_weights": WeightsWatch()}

    @property
    def backend(self) -> str:
        """The back end."""
        return self._backend

    def use(self, backend: str, backbone: Any) -> None:
        """Chooses the back end.

        Args:
            backend: one of `BACKENDS`.
            backbone: what will be computed.

        Raises:
            ValueError: if the back end is not for this architecture.
        """
        if backend == self._backend:
            return
        family = backbone.config.model_type
        if backend != "torch" and (family not in FAMILIES or getattr(backbone.config, "auto_map", None)):
            raise ValueError(
                f"backend={backend!r} is for {', '.join(FAMILIES)} as transformers has them, not for "
                f"{type(backbone).__name__} ({family}): use backend='torch'"
            )
        self._forget()
        self._backend = backend

    def begin(self, backbone: Any) -> None:
        """At the start of a run: forgets the exports if the backbone's weights are no longer those that they hold.

        Raises:
            RuntimeError: if the weights were loaded within `torch.inference_mode()`.
        """
        if self._made:
            self._forget_if_changed(backbone, contents=True)

    def __call__(self, backbone: Any, inputs: Inputs) -> torch.Tensor:
        """The backbone's last hidden state `(V, T, H)`; in training, and where gradients are on, torch's own.

        Args:
            backbone: the Hugging Face encoder.
            inputs: its inputs by name; those that are None are left to the encoder.

        Raises:
            ImportError: if the back end is not installed.
            RuntimeError: if the back end's form of the backbone does not compute what torch does, or there is no
                compiler.
        """
        if torch.is_grad_enabled() or backbone.training:
            self._forget()  # fused optimizers, which may follow, leave no trace in the versions of tensors
            return backbone(**inputs).last_hidden_state
        if self._backend == "torch":
            return backbone(**inputs).last_hidden_state
        # Runs, at whose start `begin` has read all weights, score in inference mode.
        self._forget_if_changed(backbone, contents=not torch.is_inference_mode_enabled())
        given = {name: value for name, value in inputs.items() if value is not None}
        if self._backend != "compile":
            # One form for all passes: with a mask, whether there is padding or not, and always in the same order.
            given = {"attention_mask": torch.ones_like(given["input_ids"]), **given}
        dtype = torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else torch.float32
        key = "compile" if self._backend == "compile" else (dtype, tuple(given))
        if key not in self._made:
            self._made[key] = self._make(backbone, tuple(given), dtype)
        return self._made[key](given)

    def _make(self, backbone: Any, names: tuple[str, ...], dtype: torch.dtype) -> Runtime:
        if self._backend == "compile":
            return _compiled(backbone)
        check_backend(self._backend, None, dtype_name(dtype))
        int8 = self._backend == "onnx-int8"
        with _plain_torch():
            example = _example(backbone, names, _EXAMPLE)
            if self._backend == "openvino":
                runtime = _openvino(_ByPosition(backbone, names), example, dtype)
            else:
                runtime = _onnx(_ByPosition(backbone, names), example, int8=int8)
            _check(runtime, backbone, names, self._backend, _INT8_TOLERANCE if int8 else _TOLERANCE[dtype])
        return runtime

    def _forget_if_changed(self, backbone: Any, *, contents: bool) -> None:
        if any(tensor.is_inference() for tensor in (*backbone.parameters(), *backbone.buffers())):
            raise RuntimeError(
                "these weights were loaded within torch.inference_mode(), where torch does not record whether they "
                "change: load the model outside of it, or use backend='torch'"
            )
        # What is compiled reads the weights in every pass.
        if self._weights.changed(backbone, contents=contents and self._backend != "compile"):
            self._made.clear()

    def _forget(self) -> None:
        self._made.clear()
        self._weights.forget()


class _ByPosition(nn.Module):
    """A backbone whose inputs are told apart by their order, and whose output is a tensor, as exports are."""

    def __init__(self, backbone: Any, names: tuple[str, ...]) -> None:
        super().__init__()
        self.backbone = backbone
        self.names = names

    def forward(
        self,
        first: torch.Tensor,
        second: torch.Tensor | None = None,
        third: torch.Tensor | None = None,
        fourth: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """`(V, T)` inputs, as many as there are names, to `(V, T, H)` states."""
        tensors = [tensor for tensor in (first, second, third, fourth) if tensor is not None]
        return self.backbone(**dict(zip(self.names, tensors, strict=True))).last_hidden_state


@contextmanager
def _plain_torch() -> Iterator[None]:
    """Exports record what torch does: in fp32, without gradients, as ordinary tensors; they also warn a lot."""
    disabled = logging.root.manager.disable
    logging.disable(max(disabled, logging.WARNING))
    try:
        with (
            torch.inference_mode(False),
            torch.no_grad(),
            torch.autocast("cpu", enabled=False),
            warnings.catch_warnings(),
            quiet(),
        ):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(disabled)


def _example(backbone: Any, names: tuple[str, ...], shape: tuple[int, int]) -> Inputs:
    """Random inputs; the last window has padding."""
    rng, tokens = np.random.default_rng(0), shape[1]
    mask = np.ones(shape, dtype=np.int64)
    mask[-1, tokens // 2 :] = 0
    values = {
        "input_ids": rng.integers(0, backbone.config.vocab_size, shape),
        "attention_mask": mask,
        "token_type_ids": np.zeros(shape, dtype=np.int64),
        "position_ids": np.broadcast_to(np.arange(tokens), shape).copy(),
    }
    return {name: torch.from_numpy(values[name]) for name in names}


def _check(runtime: Runtime, backbone: Any, names: tuple[str, ...], backend: str, tolerance: float) -> None:
    """Compares with torch, at other sizes than the export was made with.

    Raises:
        RuntimeError: if the states of real tokens differ.
    """
    inputs = _example(backbone, names, _CHECKED)
    real = inputs["attention_mask"].bool()
    expected = backbone(**inputs).last_hidden_state[real]
    error = float((runtime(inputs)[real] - expected).norm() / expected.norm())
    if not error <= tolerance:
        raise RuntimeError(
            f"backend={backend!r} does not compute what torch does for this {type(backbone).__name__} (relative error "
            f"{error:.2g}, allowed {tolerance}): use backend='torch'"
        )


def _compiled(backbone: Any) -> Runtime:
    """Shares the weights; different kinds of passes (one window or more, with a mask or not) are compiled apart."""
    compilers = (os.environ.get("CXX") or "g++", "clang++", "cl")
    if not any(map(shutil.which, compilers)):
        raise RuntimeError(
            f"backend='compile' needs a C++ compiler, and none of {', '.join(compilers)} is there: install one (g++), "
            f"or use backend='torch'"
        )
    # All models of a process share torch's limit, which is 8; older versions of torch do not take another one.
    takes_limit = "recompile_limit" in inspect.signature(torch.compile).parameters
    limit: dict[str, Any] = {"recompile_limit": _COMPILED_FORMS} if takes_limit else {}
    # fullgraph: an error where torch would otherwise go on uncompiled.
    compiled = torch.compile(backbone, dynamic=True, fullgraph=True, **limit)
    return lambda inputs: compiled(**inputs).last_hidden_state


def _openvino(model: _ByPosition, example: Inputs, dtype: torch.dtype) -> Runtime:
    openvino = import_extra("openvino", "openvino", "backend='openvino' needs OpenVINO")
    converted = openvino.convert_model(model, example_input=tuple(example.values()))
    converted.reshape({port: openvino.PartialShape([-1, -1]) for port in range(len(example))})
    # Said outright, because OpenVINO computes in bf16 of its own accord where the CPU is fast at it.
    precision = "bf16" if dtype == torch.bfloat16 else "f32"
    settings = {"INFERENCE_PRECISION_HINT": precision, "INFERENCE_NUM_THREADS": torch.get_num_threads()}
    compiled = openvino.compile_model(converted, "CPU", settings)
    return lambda inputs: torch.from_numpy(compiled(_arrays(inputs))[0])


def _onnx(model: _ByPosition, example: Inputs, *, int8: bool) -> Runtime:
    missing = "backend='onnx' and backend='onnx-int8' need onnx, onnxscript and onnxruntime"
    onnxruntime, *_ = (import_extra(name, "onnx", missing) for name in ("onnxruntime", "onnx", "onnxscript"))
    names = [f"input_{i}" for i in range(len(example))]
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    options.log_severity_level = 3
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.onnx"
        sizes = {0: torch.export.Dim.DYNAMIC, 1: torch.export.Dim.DYNAMIC}
        torch.onnx.export(
            model,
            tuple(example.values()),
            str(path),
            input_names=names,
            output_names=["states"],
            dynamic_shapes=(sizes,) * len(example),
            dynamo=True,
            verbose=False,
        )
        if int8:
            path = _quantized(path, sum(isinstance(module, nn.Linear) for module in model.modules()))
        session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])

    def run(inputs: Inputs) -> torch.Tensor:
        return torch.from_numpy(session.run(None, dict(zip(names, _arrays(inputs), strict=True)))[0])

    return _one_by_one(run) if int8 else run


def _quantized(path: Path, layers: int) -> Path:
    """Linear layers in int8, with a scale for each output; attention's products of two activations stay in fp32.

    Weights take 7 bits: with 8, CPUs without VNNI instructions overflow, and scores would depend on the CPU.

    Args:
        path: of the model.
        layers: linear layers that must be found.
    """
    import onnx
    from onnxruntime.quantization import QuantType, quantize_dynamic

    out = path.with_name("int8.onnx")
    quantize_dynamic(
        path,
        out,
        op_types_to_quantize=["MatMul", "Gemm"],
        per_channel=True,
        reduce_range=True,
        weight_type=QuantType.QInt8,
        extra_options={"MatMulConstBOnly": True},
    )
    done = sum(node.op_type == "MatMulInteger" for node in onnx.load(str(out), load_external_data=False).graph.node)
    if done != layers:
        raise RuntimeError(f"backend='onnx-int8': {done} of {layers} linear layers were quantized: use backend='onnx'")
    return out


def _one_by_one(run: Runtime) -> Runtime:
    """One window at a time and without padding.

    Activations are quantized by their range in the whole input, so that a window's states would depend on what it is
    batched with.
    """

    def states(inputs: Inputs) -> torch.Tensor:
        mask = inputs["attention_mask"]
        lengths = (mask * torch.arange(1, mask.shape[1] + 1)).argmax(1) + 1  # (V,) one past the last real token
        windows = [
            run({name: value[row : row + 1, :length] for name, value in inputs.items()})[0]
            for row, length in enumerate(lengths.tolist())
        ]
        padded = windows[0].new_zeros(*mask.shape, windows[0].shape[-1])
        for row, window in enumerate(windows):
            padded[row, : len(window)] = window
        return padded

    return states


def _arrays(inputs: Inputs) -> Sequence[np.ndarray]:
    return [value.numpy() for value in inputs.values()]
