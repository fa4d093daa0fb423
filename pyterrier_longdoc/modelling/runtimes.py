"""Ways to compute a backbone other than plain torch: compiled, or exported to OpenVINO.

They are for inference alone. Shapes: V windows of a pass, T tokens, H hidden size.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch import nn

from ..common.files import import_extra
from .backbones.architectures import quiet
from .devices import current_dtype, dtype_name
from .heads import registered_heads
from .weights import WeightsWatch

RUNTIMES = ("torch", "compile", "openvino")

FAMILIES = ("bert", "distilbert", "electra", "modernbert", "roberta", "xlm-roberta")
"""Architectures whose other forms are tested here. Exports of Longformer and BigBird are wrong at other lengths than
that of the export (huggingface/optimum issues 505 and 776)."""

_TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.1}
"""The largest error of an export, relative to the norm of the states. That of a wrong export is about 1."""

_COMPILED_FORMS = 64
"""Most kinds of passes that are compiled for all models; each architecture has about four per precision."""

Inputs = dict[str, Any]
Form = Callable[[Inputs], torch.Tensor]
"""Another form of a backbone: from the named inputs of a Hugging Face encoder to its last state `(V, T, H)`."""


def check_runtime(runtime: str, device: Any, dtype: str | None) -> None:
    """Raise ValueError for a device or a precision that a runtime does not support."""
    off_cpu = device is not None and torch.device(device).type != "cpu"
    if runtime == "openvino" and (off_cpu or dtype not in (None, *map(dtype_name, _TOLERANCE))):
        raise ValueError(
            f"runtime='openvino' computes on the CPU in float32 or bfloat16, not by device={device!r}, dtype={dtype!r}"
        )


def check_last_layer(runtime: str, model: str, one_encoder: bool, head: str) -> None:
    """Raise ValueError for a model that needs more than the last layer of one encoder: runtimes return no more."""
    head_class = registered_heads().get(head)
    if not one_encoder or (head_class is not None and head_class.needs == "all"):
        raise ValueError(
            f"runtime={runtime!r} is for models that look at the last layer of one encoder alone (FirstP, MaxP, AvgP, "
            f"PARADE, NeuralModel1, LongP and so on), which {model} does not: use runtime='torch'"
        )


def default_device(runtime: str) -> str | None:
    """Return the device of a runtime if none is named; None for torch's choice."""
    return "cpu" if runtime == "openvino" else None


class BackboneRuntime:
    """Computes a backbone by torch, compiled, or by OpenVINO, which exports it again when the weights change.

    A compiled form shares the weights, an export has a copy: whoever scores calls `begin` first, which notices every
    change. Neither is copied or pickled with the model.
    """

    def __init__(self, name: str = "torch") -> None:
        self.name = name
        self._forms: dict[Hashable, Form] = {}
        self._weights = WeightsWatch()

    def __reduce__(self) -> tuple[Any, ...]:
        return BackboneRuntime, (self.name,)

    def use(self, name: str, backbone: Any) -> None:
        """Choose one of `RUNTIMES`; ValueError if it does not support the backbone's architecture."""
        family = backbone.config.model_type
        if name != "torch" and (family not in FAMILIES or getattr(backbone.config, "auto_map", None)):
            raise ValueError(
                f"runtime={name!r} is for {', '.join(FAMILIES)} as transformers has them, not for "
                f"{type(backbone).__name__} ({family}): use runtime='torch'"
            )
        if name != self.name:
            self._forget()
        self.name = name

    def begin(self, backbone: Any) -> None:
        """Forget, at the start of a run, the exports of weights that have changed."""
        if self.name == "openvino" and self._forms and self._weights.changed(backbone, contents=True):
            self._forms.clear()

    def __call__(self, backbone: Any, inputs: Inputs) -> torch.Tensor:
        """Return the last hidden state `(V, T, H)`; in training and with gradients torch computes it."""
        if torch.is_grad_enabled() or backbone.training:
            if self.name == "openvino":
                self._forget()  # a fused optimizer may follow, which leaves the versions of tensors unchanged
            return backbone(**inputs).last_hidden_state
        if self.name == "torch":
            return backbone(**inputs).last_hidden_state
        if self.name == "compile":
            return self._form("every pass", lambda: _compiled(backbone))(inputs)
        # Runs, at whose start `begin` has read all weights, score in inference mode.
        if self._weights.changed(backbone, contents=not torch.is_inference_mode_enabled()):
            self._forms.clear()
        # One export for all passes: always with a mask, even without padding, and in the same order.
        inputs = {"attention_mask": torch.ones_like(inputs["input_ids"]), **inputs}
        names, dtype = tuple(inputs), current_dtype(torch.device("cpu"))
        return self._form((names, dtype), lambda: _exported(backbone, names, dtype))(inputs)

    def _form(self, key: Hashable, make: Callable[[], Form]) -> Form:
        if key not in self._forms:
            self._forms[key] = make()
        return self._forms[key]

    def _forget(self) -> None:
        self._forms.clear()
        self._weights.forget()


def _compiled(backbone: Any) -> Form:
    # All models of a process share torch's limit of 8; older versions of torch cannot change it.
    takes_limit = "recompile_limit" in inspect.signature(torch.compile).parameters
    limit: dict[str, Any] = {"recompile_limit": _COMPILED_FORMS} if takes_limit else {}
    # fullgraph: an error instead of a silent fallback to uncompiled code.
    compiled = torch.compile(backbone, dynamic=True, fullgraph=True, **limit)
    return lambda inputs: compiled(**inputs).last_hidden_state


def _exported(backbone: Any, names: tuple[str, ...], dtype: torch.dtype) -> Form:
    """Return the OpenVINO form of a backbone for inputs of these names, checked against torch."""
    # Exports record what torch computes: in fp32, without gradients, on ordinary tensors; they also warn a lot.
    with (
        torch.inference_mode(False),
        torch.no_grad(),
        torch.autocast("cpu", enabled=False),
        warnings.catch_warnings(),
        quiet(),
    ):
        warnings.simplefilter("ignore")
        form = _openvino(_ByPosition(backbone, names), _example(backbone, names, 2, 16), dtype)
        inputs = _example(backbone, names, 3, 29)  # sizes other than those of the export
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
    # Set explicitly, because OpenVINO chooses bf16 by itself on CPUs that are fast at it.
    precision = "bf16" if dtype == torch.bfloat16 else "f32"
    settings = {"INFERENCE_PRECISION_HINT": precision, "INFERENCE_NUM_THREADS": torch.get_num_threads()}
    compiled = openvino.compile_model(converted, "CPU", settings)
    # A request of its own for each pass: two threads cannot use one at the same time.
    return lambda inputs: torch.from_numpy(compiled.infer_new_request([v.numpy() for v in inputs.values()])[0])


class _ByPosition(nn.Module):
    """A backbone with inputs by position and a tensor as output, as exports need it."""

    def __init__(self, backbone: Any, names: tuple[str, ...]) -> None:
        super().__init__()
        self.backbone = backbone
        self.names = names

    def forward(self, *tensors: torch.Tensor) -> torch.Tensor:
        """Return the `(V, T, H)` states of `(V, T)` inputs, one for each name."""
        return self.backbone(**dict(zip(self.names, tensors, strict=True))).last_hidden_state


def _example(backbone: Any, names: tuple[str, ...], windows: int, tokens: int) -> Inputs:
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
