"""Other ways to compute a backbone than torch's own: compiled, or exported to OpenVINO.

For inference; training is always torch's. Shapes: V windows of a pass, T tokens, H hidden size.
"""

from __future__ import annotations

import inspect
import logging
import os
import shutil
import warnings
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import nn

from ..common.arguments import check_choice
from ..common.files import import_extra
from .backbones.architectures import quiet
from .devices import current_dtype, dtype_name
from .fingerprint import WeightsWatch
from .heads import registered_heads

RUNTIMES = ("torch", "compile", "openvino")

FAMILIES = ("bert", "distilbert", "electra", "modernbert", "roberta", "xlm-roberta")
"""Architectures whose other forms are tested here. Exported, Longformer and BigBird are wrong at other lengths than the
one that they were exported with (huggingface/optimum issues 505 and 776)."""

_OPENVINO_DTYPES = ("float32", "bfloat16")
_TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.1}
"""How far an export may be from torch, relative to the norm of the states. A wrong one is off by about 1."""

_EXAMPLE, _CHECKED = (2, 16), (3, 29)
"""Windows and tokens of the input that an export is made with, and of the one that it is checked with."""

_COMPILED_FORMS = 64
"""Most kinds of passes that are compiled: each architecture has about four in each precision."""

Inputs = dict[str, Any]
Form = Callable[[Inputs], torch.Tensor]
"""Another form of a backbone: the inputs of a Hugging Face encoder by name, to its last hidden state `(V, T, H)`."""


def check_runtime(runtime: str, device: Any, dtype: str | None) -> None:
    """Raises ValueError for an unknown runtime, or a device or precision that it does not have; None is its own."""
    check_choice("runtime", runtime, RUNTIMES)
    if runtime != "openvino":
        return
    if device is not None and torch.device(device).type != "cpu":
        raise ValueError(
            f"runtime={runtime!r} computes on the CPU, not on device={device!r}: leave device=None, or take "
            f"runtime='torch' or 'compile'"
        )
    if dtype not in (None, *_OPENVINO_DTYPES):
        known = " or ".join(map(repr, _OPENVINO_DTYPES))
        raise ValueError(f"runtime={runtime!r} does not compute in {dtype}: use dtype={known}")


def check_last_layer(runtime: str, model: str, one_encoder: bool, head: str) -> None:
    """Raises ValueError for a model that looks at more than what a runtime returns, the last layer of one encoder.

    Args:
        runtime: another one than torch.
        model: name of the model's class.
        one_encoder: whether its encoder reads query and window together, and nothing else encodes.
        head: registered name of its head.
    """
    known = registered_heads().get(head)
    if not one_encoder or (known is not None and known.needs == "all"):
        raise ValueError(
            f"runtime={runtime!r} is for models that look at the last layer of one encoder alone (FirstP, MaxP, AvgP, "
            f"PARADE, NeuralModel1, LongP and so on), which {model} does not: use runtime='torch'"
        )


def default_device(runtime: str) -> str | None:
    """Where a runtime computes if no device is named; None for torch's choice."""
    return "cpu" if runtime == "openvino" else None


class BackboneRuntime:
    """Computes a backbone, in another form if so chosen, which is made when it is first needed.

    It is made anew once the weights have changed, and is neither copied nor pickled with the model. An export holds a
    copy of the weights: whoever scores calls `begin` first, so that no change of them goes unnoticed.

    Args:
        name: one of `RUNTIMES`.
    """

    def __init__(self, name: str = "torch") -> None:
        self.name = name
        self._made: dict[Hashable, Form] = {}
        self._weights = WeightsWatch()

    def __reduce__(self) -> tuple[Any, ...]:
        return BackboneRuntime, (self.name,)

    def use(self, name: str, backbone: Any) -> None:
        """Chooses the runtime.

        Args:
            name: one of `RUNTIMES`.
            backbone: what will be computed.

        Raises:
            ValueError: if the runtime is not for this architecture.
        """
        if name == self.name:
            return
        family = backbone.config.model_type
        if name != "torch" and (family not in FAMILIES or getattr(backbone.config, "auto_map", None)):
            raise ValueError(
                f"runtime={name!r} is for {', '.join(FAMILIES)} as transformers has them, not for "
                f"{type(backbone).__name__} ({family}): use runtime='torch'"
            )
        self._forget()
        self.name = name

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
            ImportError: if the runtime is not installed.
            RuntimeError: if the other form of the backbone does not compute what torch does, or there is no compiler.
        """
        if torch.is_grad_enabled() or backbone.training:
            self._forget()  # fused optimizers, which may follow, leave no trace in the versions of tensors
            return backbone(**inputs).last_hidden_state
        if self.name == "torch":
            return backbone(**inputs).last_hidden_state
        # Runs, at whose start `begin` has read all weights, score in inference mode.
        self._forget_if_changed(backbone, contents=not torch.is_inference_mode_enabled())
        if self.name == "compile":
            if not self._made:
                self._made["every pass"] = _compiled(backbone)
            return self._made["every pass"](inputs)
        # One export for all passes: with a mask, whether there is padding or not, and always in the same order.
        given = {"attention_mask": torch.ones_like(inputs["input_ids"]), **inputs}
        key = (current_dtype(given["input_ids"].device), tuple(given))
        if key not in self._made:
            self._made[key] = _exported(backbone, *key)
        return self._made[key](given)

    def _forget_if_changed(self, backbone: Any, *, contents: bool) -> None:
        if any(tensor.is_inference() for tensor in (*backbone.parameters(), *backbone.buffers())):
            raise RuntimeError(
                "these weights were loaded within torch.inference_mode(), where torch does not record whether they "
                "change: load the model outside of it, or use runtime='torch'"
            )
        # What is compiled reads the weights in every pass.
        if self._weights.changed(backbone, contents=contents and self.name != "compile"):
            self._made.clear()

    def _forget(self) -> None:
        self._made.clear()
        self._weights.forget()


def _compiled(backbone: Any) -> Form:
    """Shares the weights; different kinds of passes (one window or more, with a mask or not) are compiled apart."""
    compilers = (os.environ.get("CXX") or "g++", "clang++", "cl")
    if not any(map(shutil.which, compilers)):
        raise RuntimeError(
            f"runtime='compile' needs a C++ compiler, and none of {', '.join(compilers)} is there: install one (g++), "
            f"or use runtime='torch'"
        )
    # All models of a process share torch's limit, which is 8; older versions of torch do not take another one.
    takes_limit = "recompile_limit" in inspect.signature(torch.compile).parameters
    limit: dict[str, Any] = {"recompile_limit": _COMPILED_FORMS} if takes_limit else {}
    # fullgraph: an error where torch would otherwise go on uncompiled.
    compiled = torch.compile(backbone, dynamic=True, fullgraph=True, **limit)
    return lambda inputs: compiled(**inputs).last_hidden_state


def _exported(backbone: Any, dtype: torch.dtype, names: tuple[str, ...]) -> Form:
    """The OpenVINO form of a backbone for inputs of these names, compared with torch."""
    check_runtime("openvino", None, dtype_name(dtype))
    with _plain_torch():
        form = _openvino(_ByPosition(backbone, names), _example(backbone, names, _EXAMPLE), dtype)
        # At other sizes than the export was made with.
        inputs = _example(backbone, names, _CHECKED)
        real = inputs["attention_mask"].bool()
        expected = backbone(**inputs).last_hidden_state[real]
        error = float((form(inputs)[real] - expected).norm() / expected.norm())
    if not error <= _TOLERANCE[dtype]:
        raise RuntimeError(
            f"runtime='openvino' does not compute what torch does for this {type(backbone).__name__} (relative error "
            f"{error:.2g}, allowed {_TOLERANCE[dtype]}): use runtime='torch'"
        )
    return form


def _openvino(model: _ByPosition, example: Inputs, dtype: torch.dtype) -> Form:
    openvino = import_extra("openvino", "openvino", "runtime='openvino' needs OpenVINO")
    converted = openvino.convert_model(model, example_input=tuple(example.values()))
    converted.reshape({port: openvino.PartialShape([-1, -1]) for port in range(len(example))})
    # Said outright, because OpenVINO computes in bf16 of its own accord where the CPU is fast at it.
    precision = "bf16" if dtype == torch.bfloat16 else "f32"
    settings = {"INFERENCE_PRECISION_HINT": precision, "INFERENCE_NUM_THREADS": torch.get_num_threads()}
    compiled = openvino.compile_model(converted, "CPU", settings)
    return lambda inputs: torch.from_numpy(compiled([value.numpy() for value in inputs.values()])[0])


class _ByPosition(nn.Module):
    """A backbone whose inputs are told apart by their order, and whose output is a tensor, as exports are."""

    def __init__(self, backbone: Any, names: tuple[str, ...]) -> None:
        super().__init__()
        self.backbone = backbone
        self.names = names

    def forward(self, *tensors: torch.Tensor) -> torch.Tensor:
        """`(V, T)` inputs, as many as there are names, to `(V, T, H)` states."""
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
    mask = np.ones(shape, dtype=np.int64)
    mask[-1, shape[1] // 2 :] = 0
    values = {
        "input_ids": np.random.default_rng(0).integers(0, backbone.config.vocab_size, shape),
        "attention_mask": mask,
        "token_type_ids": np.zeros(shape, dtype=np.int64),
        "position_ids": np.broadcast_to(np.arange(shape[1]), shape).copy(),
    }
    return {name: torch.from_numpy(values[name]) for name in names}
