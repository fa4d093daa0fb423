"""Other ways to compute a backbone than torch's own: compiled, or exported to OpenVINO.

For inference; training is always torch's. Shapes: V windows of a pass, T tokens, H hidden size.
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
"""Architectures whose other forms are tested here. Exported, Longformer and BigBird are wrong at other lengths than the
one that they were exported with (huggingface/optimum issues 505 and 776)."""

_TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.1}
"""How far an export may be from torch, relative to the norm of the states. A wrong one is off by about 1."""

_COMPILED_FORMS = 64
"""Most kinds of passes that are compiled, of all models together; each architecture has about four per precision."""

Inputs = dict[str, Any]
Form = Callable[[Inputs], torch.Tensor]
"""Another form of a backbone: the inputs of a Hugging Face encoder by name, to its last hidden state `(V, T, H)`."""


def check_runtime(runtime: str, device: Any, dtype: str | None) -> None:
    """Raise ValueError for a device or a precision that a runtime does not have."""
    elsewhere = device is not None and torch.device(device).type != "cpu"
    if runtime == "openvino" and (elsewhere or dtype not in (None, *map(dtype_name, _TOLERANCE))):
        raise ValueError(
            f"runtime='openvino' computes on the CPU in float32 or bfloat16, not by device={device!r}, dtype={dtype!r}"
        )


def check_last_layer(runtime: str, model: str, one_encoder: bool, head: str) -> None:
    """Raise ValueError for a model that looks at more than the last layer of one encoder, which runtimes return."""
    known = registered_heads().get(head)
    if not one_encoder or (known is not None and known.needs == "all"):
        raise ValueError(
            f"runtime={runtime!r} is for models that look at the last layer of one encoder alone (FirstP, MaxP, AvgP, "
            f"PARADE, NeuralModel1, LongP and so on), which {model} does not: use runtime='torch'"
        )


def default_device(runtime: str) -> str | None:
    """Return where a runtime computes if no device is named; None for torch's choice."""
    return "cpu" if runtime == "openvino" else None


class BackboneRuntime:
    """Computes a backbone by torch, compiled, or by OpenVINO, whose exports are made anew when the weights change.

    A compiled form shares the weights, and an export holds a copy of them: whoever scores calls `begin` first, so that
    no change of them goes unnoticed. Neither is copied nor pickled with the model.
    """

    def __init__(self, name: str = "torch") -> None:
        self.name = name
        self._forms: dict[Hashable, Form] = {}
        self._weights = WeightsWatch()

    def __reduce__(self) -> tuple[Any, ...]:
        return BackboneRuntime, (self.name,)

    def use(self, name: str, backbone: Any) -> None:
        """Choose the runtime, one of `RUNTIMES`, for a backbone whose architecture it has."""
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
        """Return the last hidden state `(V, T, H)`; in training, and where gradients are on, it is torch's own."""
        if torch.is_grad_enabled() or backbone.training:
            if self.name == "openvino":
                self._forget()  # fused optimizers, which may follow, leave no trace in the versions of tensors
            return backbone(**inputs).last_hidden_state
        if self.name == "torch":
            return backbone(**inputs).last_hidden_state
        if self.name == "compile":
            return self._form("every pass", lambda: _compiled(backbone))(inputs)
        # Runs, at whose start `begin` has read all weights, score in inference mode.
        if self._weights.changed(backbone, contents=not torch.is_inference_mode_enabled()):
            self._forms.clear()
        # One export for all passes: with a mask, whether there is padding or not, and always in the same order.
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
    # All models of a process share torch's limit, which is 8; older versions of torch do not take another one.
    takes_limit = "recompile_limit" in inspect.signature(torch.compile).parameters
    limit: dict[str, Any] = {"recompile_limit": _COMPILED_FORMS} if takes_limit else {}
    # fullgraph: an error where torch would otherwise go on uncompiled.
    compiled = torch.compile(backbone, dynamic=True, fullgraph=True, **limit)
    return lambda inputs: compiled(**inputs).last_hidden_state


def _exported(backbone: Any, names: tuple[str, ...], dtype: torch.dtype) -> Form:
    """Return the OpenVINO form of a backbone for inputs of these names, compared with torch."""
    # Exports record what torch does: in fp32, without gradients, as ordinary tensors; they also warn a lot.
    with (
        torch.inference_mode(False),
        torch.no_grad(),
        torch.autocast("cpu", enabled=False),
        warnings.catch_warnings(),
        quiet(),
    ):
        warnings.simplefilter("ignore")
        form = _openvino(_ByPosition(backbone, names), _example(backbone, names, 2, 16), dtype)
        inputs = _example(backbone, names, 3, 29)  # other sizes than the export was made with
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
        """Return `(V, T, H)` states of `(V, T)` inputs, as many as there are names."""
        return self.backbone(**dict(zip(self.names, tensors, strict=True))).last_hidden_state


def _example(backbone: Any, names: tuple[str, ...], windows: int, tokens: int) -> Inputs:
    """Return random inputs, of which the last window has padding."""
    mask = torch.ones(windows, tokens, dtype=torch.long)
    mask[-1, tokens // 2 :] = 0
    values = {
        "input_ids": torch.randint(backbone.config.vocab_size, mask.shape, generator=torch.Generator().manual_seed(0)),
        "attention_mask": mask,
        "token_type_ids": torch.zeros_like(mask),
        "position_ids": torch.arange(tokens).repeat(windows, 1),
    }
    return {name: values[name] for name in names}
