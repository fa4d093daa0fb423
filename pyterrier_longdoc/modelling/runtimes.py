"""Runtimes: the libraries that compute a backbone in inference, torch or, on x86-64 CPUs, OpenVINO.

Training always uses torch. Shapes: V windows of a pass, T tokens, H hidden size.
"""

from __future__ import annotations

import platform
import threading
import warnings
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any, ClassVar

import torch
from torch import nn

from ..common.files import import_extra
from .backbones.architectures import quiet
from .backbones.families import FAMILIES, family_of
from .devices import current_dtype, has_bfloat16
from .weights import WeightsWatch

RUNTIMES = ("torch", "openvino")

LEAST_WEIGHTS = 5_000_000
"""Smaller backbones stay on torch by default: their export takes longer than it saves."""

_TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.1}
"""The largest error of an export, relative to the norm of the states. That of a wrong export is about 1."""

BackboneInputs = dict[str, Any]
Form = Callable[[BackboneInputs], torch.Tensor]
"""Another form of a backbone: from the named inputs of a Hugging Face encoder to its last state `(V, T, H)`."""


def check_runtime(runtime: str | None, device: Any, dtype: str | None) -> None:
    """Raise ValueError for a device or a precision that a runtime does not support."""
    off_cpu = device is not None and torch.device(device).type != "cpu"
    if runtime == "openvino" and (off_cpu or dtype == "float16"):
        raise ValueError(
            f"runtime='openvino' computes on the CPU in float32 or bfloat16, not with device={device!r} and "
            f"dtype={dtype!r}"
        )


def choose_runtime(runtime: str | None, encoder: Any, needs: str, device: torch.device, dtype: torch.dtype) -> str:
    """Return the runtime for an encoder: the given one, or the faster one for None.

    The choice depends only on machine, model and precision, so that a score does not depend on the rest of the run.

    Args:
        runtime: one of `RUNTIMES`, or None.
        encoder: a window encoder.
        needs: what the head needs from the encoder.
        device: where the weights are.
        dtype: precision of the backbone.

    Raises:
        ValueError: if the given runtime cannot compute the encoder.
    """
    why = obstacle(encoder, needs)
    if not why and encoder.quantized is not None:
        if runtime == "torch" or device.type != "cpu" or dtype != torch.float32:
            raise ValueError("a quantized model computes in int8 with OpenVINO: omit runtime=, device= and dtype=")
        return "openvino"
    if runtime == "openvino" and why:
        raise ValueError(f"runtime='openvino' cannot compute this model, because {why}: use runtime='torch'")
    if runtime is not None or why:
        return runtime or "torch"
    is_fast = dtype == torch.float32 or (dtype == torch.bfloat16 and has_bfloat16(device))
    pays = sum(weight.numel() for weight in encoder.backbone.parameters()) >= LEAST_WEIGHTS
    available = platform.machine() in ("x86_64", "AMD64") and find_spec("openvino") is not None
    return "openvino" if device.type == "cpu" and is_fast and pays and available else "torch"


def obstacle(encoder: Any, needs: str) -> str:
    """Return the reason why OpenVINO cannot compute an encoder, as a clause; "" if it can."""
    if not encoder.supports_openvino:
        return "its encoder is not exported"
    if needs == "all":
        return "its head needs all layers, and exports return only the last one"
    config = encoder.backbone.config
    if not family_of(config).supports_openvino or getattr(config, "auto_map", None):
        supported = ", ".join(family.name for family in FAMILIES.values() if family.supports_openvino)
        kind = f"{type(encoder.backbone).__name__} ({config.model_type})"
        return f"its backbone is a {kind}, and exports are for {supported}, as transformers has them"
    return ""


class TorchRuntime:
    """Computes a backbone with torch."""

    name: ClassVar[str] = "torch"

    def begin(self, backbone: Any) -> None:
        """Prepare for a run; torch needs no preparation."""

    def __call__(self, backbone: Any, inputs: BackboneInputs) -> torch.Tensor:
        """Return the last hidden state `(V, T, H)`."""
        states: torch.Tensor = backbone(**inputs).last_hidden_state
        return states


class OpenVinoRuntime:
    """Computes a backbone with OpenVINO, and exports it again when its weights change.

    An export shares the memory of the weights. Exports are neither copied nor pickled with the model.
    """

    name: ClassVar[str] = "openvino"

    def __init__(self) -> None:
        self._forms: dict[Hashable, Form] = {}
        self._weights = WeightsWatch()
        self._lock = threading.RLock()

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), ()

    def begin(self, backbone: Any) -> None:
        """Discard exports of outdated weights at the start of a run."""
        with self._lock:
            if self._forms and self._weights.changed(backbone):
                self._forms.clear()

    def __call__(self, backbone: Any, inputs: BackboneInputs) -> torch.Tensor:
        """Return the last hidden state `(V, T, H)`; in training and with gradients torch computes it."""
        with self._lock:
            if torch.is_grad_enabled() or backbone.training:
                self._forms.clear()
                return TorchRuntime()(backbone, inputs)
            # Runs score in inference mode, after `begin` has compared contents at their start.
            if self._weights.changed(backbone, contents=not torch.is_inference_mode_enabled()):
                self._forms.clear()
            inputs = with_mask(inputs)
            names, dtype = tuple(inputs), current_dtype(torch.device("cpu"))
            if (names, dtype) not in self._forms:
                self._forms[names, dtype] = _exported(backbone, names, dtype)
            form = self._forms[names, dtype]
        return form(inputs)


def with_mask(inputs: BackboneInputs) -> BackboneInputs:
    """Return inputs in a fixed order with an attention mask, so that one export serves all passes."""
    return {"attention_mask": torch.ones_like(inputs["input_ids"]), **inputs}


def _exported(backbone: Any, names: tuple[str, ...], dtype: torch.dtype) -> Form:
    """Return the OpenVINO export of a backbone for inputs with these names, compared with torch."""
    with _as_exports_need_it():
        form = compiled(converted(backbone, names), dtype)
        inputs = _example(backbone, names, 3, 29)  # sizes other than those of the export
        real = inputs["attention_mask"].bool()
        expected = backbone(**inputs).last_hidden_state[real]
        error = float((form(inputs)[real] - expected).norm() / expected.norm())
    if not error <= _TOLERANCE[dtype]:
        raise RuntimeError(
            f"OpenVINO and torch disagree for this {type(backbone).__name__} (relative error "
            f"{error:.2g}, allowed {_TOLERANCE[dtype]}): use runtime='torch'"
        )
    return form


@contextmanager
def _as_exports_need_it() -> Iterator[None]:
    """Compute in fp32, without gradients, on ordinary tensors, which exports need, and silence their warnings."""
    with (
        torch.inference_mode(False),
        torch.no_grad(),
        torch.autocast("cpu", enabled=False),
        warnings.catch_warnings(),
        quiet(),
    ):
        warnings.simplefilter("ignore")
        yield


def converted(backbone: Any, names: tuple[str, ...]) -> Any:
    """Return OpenVINO's graph of a backbone for inputs with these names and any size."""
    openvino = import_extra("openvino", "openvino", "runtime='openvino' needs OpenVINO")
    example = _example(backbone, names, 2, 16)
    with _as_exports_need_it():
        graph = openvino.convert_model(ByPosition(backbone, names), example_input=tuple(example.values()))
    graph.reshape({port: openvino.PartialShape([-1, -1]) for port in range(len(names))})
    return graph


def compiled(graph: Any, dtype: torch.dtype) -> Form:
    """Return a function that computes a graph; its inputs have the order of the export."""
    import openvino

    # Set explicitly, because OpenVINO chooses bf16 by itself on CPUs that are fast at it.
    precision = "bf16" if dtype == torch.bfloat16 else "f32"
    settings = {"INFERENCE_PRECISION_HINT": precision, "INFERENCE_NUM_THREADS": torch.get_num_threads()}
    model = openvino.compile_model(graph, "CPU", settings)
    # A request of its own for each pass: two threads cannot use one at the same time.
    return lambda inputs: torch.from_numpy(model.infer_new_request([v.numpy() for v in inputs.values()])[0])


class ByPosition(nn.Module):
    """A backbone with inputs by position and a tensor as output, as exports need it."""

    def __init__(self, backbone: Any, names: tuple[str, ...]) -> None:
        super().__init__()
        self.backbone = backbone
        self.names = names

    def forward(self, *tensors: torch.Tensor) -> torch.Tensor:
        """Return the `(V, T, H)` states of `(V, T)` inputs, one for each name."""
        return self.backbone(**dict(zip(self.names, tensors, strict=True))).last_hidden_state


def _example(backbone: Any, names: tuple[str, ...], windows: int, tokens: int) -> BackboneInputs:
    """Return random inputs; the last window has padding."""
    mask = torch.ones(windows, tokens, dtype=torch.long)
    mask[-1, tokens // 2 :] = 0
    values = {
        "input_ids": torch.randint(backbone.config.vocab_size, mask.shape, generator=torch.Generator().manual_seed(0)),
        "attention_mask": mask,
        "token_type_ids": torch.zeros_like(mask),
        "position_ids": torch.arange(tokens).repeat(windows, 1),
    }
    return {name: values[name] for name in names}
