"""Other ways to compute a backbone than torch's own: compiled, or exported to OpenVINO or ONNX Runtime.

For inference; training is always torch's. Shapes: V windows of a pass, T tokens, H hidden size.
"""

from __future__ import annotations

import functools
import inspect
import logging
import os
import shutil
import tempfile
import threading
import warnings
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.utils import is_flash_attn_2_available

from ..common.arguments import check_choice
from ..common.files import import_extra
from .backbones.architectures import quiet
from .devices import dtype_name
from .fingerprint import WeightsWatch
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
    if device is not None and torch.device(device).type != "cpu":
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
        self.name = backend
        self._made: dict[Hashable, Runtime] = {}
        self._weights = WeightsWatch()

    def __getstate__(self) -> dict[str, Any]:
        return {"name": self.name, "_made": {}, "_weights": WeightsWatch()}

    def use(self, backend: str, backbone: Any) -> None:
        """Chooses the back end.

        Args:
            backend: one of `BACKENDS`.
            backbone: what will be computed.

        Raises:
            ValueError: if the back end is not for this architecture.
        """
        if backend == self.name:
            return
        family = backbone.config.model_type
        if backend != "torch" and (family not in FAMILIES or getattr(backbone.config, "auto_map", None)):
            raise ValueError(
                f"backend={backend!r} is for {', '.join(FAMILIES)} as transformers has them, not for "
                f"{type(backbone).__name__} ({family}): use backend='torch'"
            )
        self._forget()
        self.name = backend

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
        if self.name == "torch":
            return backbone(**inputs).last_hidden_state
        # Runs, at whose start `begin` has read all weights, score in inference mode.
        self._forget_if_changed(backbone, contents=not torch.is_inference_mode_enabled())
        given = {name: value for name, value in inputs.items() if value is not None}
        if self.name != "compile":
            # One form for all passes: with a mask, whether there is padding or not, and always in the same order.
            given = {"attention_mask": torch.ones_like(given["input_ids"]), **given}
        dtype = torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else torch.float32
        key = "compile" if self.name == "compile" else (dtype, tuple(given))
        if key not in self._made:
            self._made[key] = self._make(backbone, tuple(given), dtype)
        return self._made[key](given)

    def _make(self, backbone: Any, names: tuple[str, ...], dtype: torch.dtype) -> Runtime:
        if self.name == "compile":
            return _compiled(backbone)
        check_backend(self.name, None, dtype_name(dtype))
        int8 = self.name == "onnx-int8"
        with _plain_torch():
            example = _example(backbone, names, _EXAMPLE)
            if self.name == "openvino":
                runtime = _openvino(_ByPosition(backbone, names), example, dtype)
            else:
                runtime = _onnx(_ByPosition(backbone, names), example, int8=int8)
            _check(runtime, backbone, names, self.name, _INT8_TOLERANCE if int8 else _TOLERANCE[dtype])
        return runtime

    def _forget_if_changed(self, backbone: Any, *, contents: bool) -> None:
        if any(tensor.is_inference() for tensor in (*backbone.parameters(), *backbone.buffers())):
            raise RuntimeError(
                "these weights were loaded within torch.inference_mode(), where torch does not record whether they "
                "change: load the model outside of it, or use backend='torch'"
            )
        # What is compiled reads the weights in every pass.
        if self._weights.changed(backbone, contents=contents and self.name != "compile"):
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


PACKED_FAMILIES = ("bert", "camembert", "distilbert", "electra", "modernbert", "roberta", "xlm-roberta")
"""Families that tests/modelling/test_packing.py finds to have the same states packed and padded."""

_POSITIONS_FROM_IDS = ("camembert", "roberta", "xlm-roberta")

_INPUTS = {"input_ids", "attention_mask", "token_type_ids", "position_ids"}

_NAME = "longdoc_packed"

Kernel = Callable[..., torch.Tensor]
"""Called with `(R, A, D)` queries, keys and values, twice the `(V + 1,)` int32 boundaries, twice the longest window,
and by name `scale` and `window`, how many tokens to the left and right are seen, (-1, -1) for all; returns
`(R, A, D)`."""

_packing: ContextVar[Packing | None] = ContextVar("packing", default=None)
"""Of the pass under way in this thread. Another thread that uses the model meanwhile has none: it attends as before."""

_locks: WeakKeyDictionary[nn.Module, threading.Lock] = WeakKeyDictionary()
"""One for each model: during a pass it attends in another way, which other threads must not see."""
_making_lock = threading.Lock()


@dataclass(frozen=True, eq=False)
class Packing:
    """The real tokens of a pass in one row.

    Attributes:
        inputs: what the backbone reads, each `(1, R)`.
        lengths: V, real tokens of each window.
        boundaries: `(V + 1,)` int32, where each window begins in the row, and where the last one ends.
        place: `(R,)` int64, where each token stands in the padded pass, its rows one after the other.
        shape: V and T.
    """

    inputs: dict[str, Any]
    lengths: tuple[int, ...]
    boundaries: torch.Tensor
    place: torch.Tensor
    shape: tuple[int, int]

    def encode(self, backbone: Any) -> torch.Tensor:
        """The last layer's states `(1, R, H)`."""
        with _attending(backbone, self):
            return backbone(**self.inputs).last_hidden_state

    def padded(self, states: torch.Tensor) -> torch.Tensor:
        """States `(1, R, H)` as `(V, T, H)`, zeros at padding."""
        windows, length = self.shape
        dense = states.new_zeros(windows * length, states.shape[-1])
        return dense.index_copy_(0, self.place, states[0]).view(windows, length, -1)


def pack(backbone: Any, inputs: dict[str, Any], mask: torch.Tensor) -> Packing | None:
    """A pass without its padding; None where it must, or had better, be left as it is.

    It is left where nothing is padded, in training, for families other than `PACKED_FAMILIES`, where the user has
    chosen an implementation of attention or compiled the model, and where `worthwhile` says so; with transformers 4, whose
    encoders do not let their attention be exchanged, always.

    Args:
        backbone: a Hugging Face encoder.
        inputs: what it would read, each `(V, T)`.
        mask: `(V, T)` bool, True = real.
    """
    if inputs["attention_mask"] is None or not _can_pack(backbone, inputs):
        return None
    config = backbone.config
    if not worthwhile(mask.device, _precision(backbone), config.hidden_size // config.num_attention_heads):
        return None
    place = mask.flatten().nonzero().squeeze(1)
    lengths = mask.sum(1)
    boundaries = nn.functional.pad(lengths.cumsum(0), (1, 0))
    column = place % mask.shape[1]
    number = torch.arange(len(place), device=place.device) - boundaries[:-1].repeat_interleave(lengths)
    # With padding inside a window, neighbors in the row may be too far apart to see each other.
    if "sliding_attention" in getattr(config, "layer_types", ()) and not torch.equal(column, number):
        return None
    values = {name: values for name, values in inputs.items() if name != "attention_mask"}
    values["position_ids"] = _positions(config, inputs)
    return Packing(
        inputs={name: value.flatten()[place].unsqueeze(0) for name, value in values.items()},
        lengths=tuple(lengths.tolist()),
        boundaries=boundaries.int(),
        place=place,
        shape=(mask.shape[0], mask.shape[1]),
    )


def worthwhile(device: torch.device, dtype: torch.dtype, head_size: int) -> bool:
    """Whether packing is expected to be faster than padding.

    It is where a kernel takes windows of unequal length in one call, which a GPU has in half precision. Elsewhere each
    length needs a call of its own, which saves too little padding, as the windows of a pass are neighbors in length;
    tests/benchmarks/bench_packing.py measures it.
    """
    return kernel_for(device, dtype, head_size) is not None


@functools.cache
def kernel_for(device: torch.device, dtype: torch.dtype, head_size: int) -> Kernel | None:
    """Attention over windows of unequal length, by flash-attn if it is installed, else by torch 2.12 or later.

    Both need an NVIDIA GPU from Ampere on, half precision, and heads of at most 256 numbers, a multiple of 8.

    Returns:
        None where there is no such kernel.
    """
    if device.type != "cuda" or dtype not in (torch.bfloat16, torch.float16) or head_size % 8 or head_size > 256:
        return None
    if torch.version.hip is not None or torch.cuda.get_device_capability(device) < (8, 0):
        return None
    return flash_attn_kernel() or torch_kernel()


def flash_attn_kernel() -> Kernel | None:
    """That of the package flash-attn, 2.3.3 or later; None if it is not installed or made for another torch."""
    if not is_flash_attn_2_available():
        return None
    try:
        from flash_attn import flash_attn_varlen_func
    except ImportError:
        return None

    def attend(*args: Any, scale: float | None, window: tuple[int, int]) -> torch.Tensor:
        return flash_attn_varlen_func(*args, softmax_scale=scale, window_size=window)

    return attend


def torch_kernel() -> Kernel | None:
    """Torch's own; None before torch 2.12, where it lacks windows or cannot be kept from looking at the batch."""
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return None
    if not {"window_size", "num_splits"} <= inspect.signature(varlen_attn).parameters.keys():
        return None

    def attend(*args: Any, scale: float | None, window: tuple[int, int]) -> torch.Tensor:
        # One split: how keys are split up otherwise depends on the longest window of the pass.
        mixed: Any = varlen_attn(*args, scale=scale, window_size=window, num_splits=1)
        return mixed

    return attend


def attend_in_groups(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    lengths: Sequence[int],
    *,
    scale: float | None,
    reach: int | None,
) -> torch.Tensor:
    """Attention without a kernel for unequal lengths: neighbors of equal length make a batch, which needs no mask.

    Args:
        query: `(R, A, D)`.
        key: `(R, A, D)`.
        value: `(R, A, D)`.
        lengths: tokens of each window.
        scale: of the dot products; None for one over the root of D.
        reach: how many tokens to the left and right are seen; None for all.

    Returns:
        `(R, A, D)`.
    """
    parts, start = [], 0
    for length, group in groupby(lengths):
        shape = (len(list(group)), length)
        end = start + shape[0] * length
        q, k, v = (row[start:end].unflatten(0, shape).transpose(1, 2) for row in (query, key, value))
        band = None if reach is None or length <= reach + 1 else _band(length, reach, query.device)
        states = nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=band, scale=scale)
        parts.append(states.transpose(1, 2).flatten(0, 1))
        start = end
    return torch.cat(parts)


def attend_packed(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """The attention function that transformers calls: `(1, A, R, D)` queries, keys and values to `(1, R, A, D)`."""
    packing = _packing.get()
    if packing is None:
        return AttentionInterface()["sdpa"](module, query, key, value, attention_mask, scaling=scaling, **kwargs)
    q, k, v = (states[0].transpose(0, 1) for states in (query, key, value))
    # transformers counts the token itself.
    reach = None if sliding_window is None else sliding_window - 1
    kernel = kernel_for(query.device, query.dtype, query.shape[-1])
    if kernel is None:
        mixed = attend_in_groups(q, k, v, packing.lengths, scale=scaling, reach=reach)
    else:
        window = (-1, -1) if reach is None else (reach, reach)
        ends, longest = packing.boundaries, max(packing.lengths)
        mixed = kernel(q, k, v, ends, ends, longest, longest, scale=scaling, window=window)
    return mixed.unsqueeze(0), None


def _mask_packed(*args: Any, **kwargs: Any) -> torch.Tensor | None:
    return AttentionMaskInterface()["sdpa"](*args, **kwargs) if _packing.get() is None else None


AttentionInterface.register(_NAME, attend_packed)
AttentionMaskInterface.register(_NAME, _mask_packed)


@contextmanager
def _attending(backbone: Any, packing: Packing) -> Iterator[None]:
    """Within, the model attends inside the windows of `packing`; afterwards by SDPA as before."""
    with _making_lock:
        lock = _locks.setdefault(backbone, threading.Lock())
    config = backbone.config
    with lock:
        token = _packing.set(packing)
        config._attn_implementation = _NAME
        try:
            yield
        finally:
            config._attn_implementation = "sdpa"
            _packing.reset(token)


def _can_pack(backbone: Any, inputs: dict[str, Any]) -> bool:
    config = backbone.config
    return (
        config.model_type in PACKED_FAMILIES
        # Code that comes with a checkpoint may go by the name of a family.
        and type(backbone).__module__.startswith("transformers.")
        and getattr(backbone, "_supports_attention_backend", False)
        and getattr(backbone, "_compiled_call_impl", None) is None
        and config._attn_implementation == "sdpa"
        and not getattr(config, "is_decoder", False)
        and not backbone.training
        and not torch.is_grad_enabled()
        and inputs.keys() <= _INPUTS
    )


def _precision(backbone: Any) -> torch.dtype:
    """That of queries and keys."""
    kind = backbone.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else backbone.dtype


def _positions(config: Any, inputs: dict[str, Any]) -> torch.Tensor:
    """`(V, T)` the position ids that the backbone would use in the padded pass."""
    ids = inputs["input_ids"]
    if "position_ids" in inputs:
        return inputs["position_ids"]
    if config.model_type in _POSITIONS_FROM_IDS:
        real = ids != config.pad_token_id
        return real.cumsum(1) * real + config.pad_token_id
    return torch.arange(ids.shape[1], device=ids.device).expand_as(ids)


def _band(length: int, reach: int, device: torch.device) -> torch.Tensor:
    """`(length, length)` bool, whether two tokens see each other."""
    position = torch.arange(length, device=device)
    return (position.unsqueeze(1) - position).abs() <= reach
