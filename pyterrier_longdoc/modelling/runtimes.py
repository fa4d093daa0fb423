"""Runtimes: the libraries that compute a backbone in inference, torch or, on x86-64 CPUs, OpenVINO.

Training always uses torch. Shapes: V windows of a pass, T tokens, H hidden size.
"""

from __future__ import annotations

import platform
import sys
import threading
import warnings
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any

import torch
from torch import nn

from ..common.files import import_extra
from .backbones.architectures import quiet
from .backbones.families import FAMILIES, family_of
from .devices import current_dtype, has_bfloat16
from .weights import version_of

RUNTIMES = ("torch", "openvino")

LEAST_WEIGHTS = 5_000_000
"""Smaller backbones stay on torch by default: their export takes longer than it saves."""

_TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.1}
"""The largest error of an export, relative to the norm of the states. That of a wrong export is about 1."""

_TESTED_TOKENS = 512
"""An export is compared with torch in inputs of up to this length, because longer ones would take too long."""

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


def uses_openvino(runtime: str | None, encoder: Any, needs: str, device: torch.device, dtype: torch.dtype) -> bool:
    """Return whether OpenVINO computes an encoder: as given or, for None, if it is faster.

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
    if runtime == "openvino" and why:
        raise refusal(why)
    if runtime is not None or why:
        return runtime == "openvino"
    is_fast = dtype == torch.float32 or (dtype == torch.bfloat16 and has_bfloat16(device))
    pays = sum(weight.numel() for weight in encoder.backbone.parameters()) >= LEAST_WEIGHTS
    available = platform.machine() in ("x86_64", "AMD64") and find_spec("openvino") is not None
    return device.type == "cpu" and is_fast and pays and available


def refusal(why: str) -> ValueError:
    """Return the error for `runtime="openvino"` where OpenVINO cannot compute the model for this reason."""
    return ValueError(f"runtime='openvino' cannot compute this model, because {why}: use runtime='torch'")


def obstacle(encoder: Any, needs: str) -> str:
    """Return the reason why OpenVINO cannot compute an encoder, as a clause; "" if it can."""
    if not encoder.supports_openvino:
        return "its encoder is not exported"
    if needs == "all":
        return "its head needs all layers, and exports return only the last one"
    if has_hooks(encoder.backbone):
        return _HOOKS
    config = encoder.backbone.config
    if not family_of(config).supports_openvino or getattr(config, "auto_map", None):
        supported = ", ".join(family.name for family in FAMILIES.values() if family.supports_openvino)
        kind = f"{type(encoder.backbone).__name__} ({config.model_type})"
        return f"its backbone is a {kind}, and exports are for {supported}, as transformers has them"
    return ""


_HOOKS = "its backbone has hooks, which an export could miss"


def has_hooks(backbone: nn.Module) -> bool:
    """Return whether a module or one of its parts has forward hooks."""
    return any(part._forward_hooks or part._forward_pre_hooks for part in backbone.modules())


class OpenVinoRuntime:
    """Computes a backbone with OpenVINO, and exports it again when its weights change.

    An export shares the memory of the weights. A backbone with hooks, or whose export differs from it, is computed by
    torch. Exports are neither copied nor pickled with the model.

    Attributes:
        why: why torch computes the backbone, as a clause; "" if OpenVINO does.
    """

    def __init__(self) -> None:
        self.why = ""
        self._forms: dict[tuple[Hashable, ...], tuple[Form, str]] = {}
        self._lock = threading.RLock()

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), ()

    def __call__(self, backbone: Any, inputs: BackboneInputs) -> torch.Tensor:
        """Return the last hidden state `(V, T, H)`; in training and with gradients torch computes it."""
        if torch.is_grad_enabled() or backbone.training:
            with self._lock:
                self._forms, self.why = {}, ""
            states: torch.Tensor = backbone(**inputs).last_hidden_state
            return states
        # In a fixed order with an attention mask, so that one export serves all passes.
        inputs = {"attention_mask": torch.ones_like(inputs["input_ids"]), **inputs}
        names, dtype = tuple(inputs), current_dtype(torch.device("cpu"))
        with self._lock:
            version = version_of(backbone)
            key = version, names, dtype, has_hooks(backbone)
            if key not in self._forms:
                self._forms = {key: form for key, form in self._forms.items() if key[0] == version}
                self._forms[key] = _exported(backbone, names, dtype)
            form, self.why = self._forms[key]
        return form(inputs)


def _exported(backbone: Any, names: tuple[str, ...], dtype: torch.dtype) -> tuple[Form, str]:
    """Return the OpenVINO export of a backbone for inputs with these names, or torch and why the export is wrong."""

    def by_torch(inputs: BackboneInputs) -> torch.Tensor:
        states: torch.Tensor = backbone(**inputs).last_hidden_state
        return states

    if has_hooks(backbone):
        return by_torch, _HOOKS
    with _as_exports_need_it():
        form = compiled(converted(backbone, names), dtype)
        # The shortest window next to one of the longest: its padding is beyond the reach of local attention.
        inputs = _example(backbone, names, (3, _longest(backbone.config)))
        real = inputs["attention_mask"].bool()
        expected = by_torch(inputs)[real]
        error = float((form(inputs)[real] - expected).norm() / expected.norm())
    if error <= _TOLERANCE[dtype]:
        return form, ""
    return by_torch, f"its export differs from torch (relative error {error:.2g}, allowed {_TOLERANCE[dtype]})"


def _longest(config: Any) -> int:
    """Return the number of tokens of the longest input that is tested."""
    positions = getattr(config, "max_position_embeddings", 0) or _TESTED_TOKENS
    first = config.pad_token_id + 1 if family_of(config).counts_from_padding else 0
    return int(min(positions - first, max(_TESTED_TOKENS, 2 * getattr(config, "local_attention", 0))))


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
    # OpenVINO would send statistics to its makers; if the user imported it before, that is the user's choice.
    sys.modules.setdefault("openvino_telemetry", None)  # type: ignore[arg-type]
    openvino = import_extra("openvino", "openvino", "runtime='openvino' needs OpenVINO")
    example = _example(backbone, names, (16, 8))
    with _as_exports_need_it():
        graph = openvino.convert_model(ByPosition(backbone, names), example_input=tuple(example.values()))
    _attend_somewhere(graph)
    graph.reshape({port: openvino.PartialShape([-1, -1]) for port in range(len(names))})
    return graph


def _attend_somewhere(graph: Any) -> None:
    """Let rows of attention masks without a token attend to all: OpenVINO gives NaN for them, and torch zeros.

    In local attention, padding far from all tokens has such rows. Its NaN would reach the tokens in the next layer.
    """
    from openvino import Type, opset13

    for node in graph.get_ops():
        if node.get_type_name() == "ScaledDotProductAttention" and node.get_input_size() > 3:
            mask = node.input_value(3)
            if mask.get_element_type() == Type.boolean:
                attends = opset13.reduce_logical_or(mask, opset13.constant([-1]), keep_dims=True)
                node.input(3).replace_source_output(opset13.logical_or(mask, opset13.logical_not(attends)).output(0))


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


def _example(backbone: Any, names: tuple[str, ...], lengths: tuple[int, ...]) -> BackboneInputs:
    """Return random inputs of these lengths, padded."""
    tokens = torch.arange(max(lengths)).repeat(len(lengths), 1)
    values = {
        "input_ids": torch.randint(
            backbone.config.vocab_size, tokens.shape, generator=torch.Generator().manual_seed(0)
        ),
        "attention_mask": (tokens < torch.tensor(lengths).unsqueeze(1)).long(),
        "token_type_ids": torch.zeros_like(tokens),
        "position_ids": tokens,
    }
    return {name: values[name] for name in names}
