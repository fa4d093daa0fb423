"""Int8 backbones: quantized with NNCF, computed by OpenVINO.

Quantization is static: the scales of weights and activations are calibrated on a few windows and then fixed, so that
scores depend only on query and text, up to rounding: a difference in the last digit of float32, as another batch size
makes, may move an activation by one of its 256 steps.
"""

from __future__ import annotations

import io
import re
import tempfile
import threading
from collections.abc import Sequence
from contextlib import nullcontext, redirect_stdout
from hashlib import blake2b
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from scipy.stats import kendalltau

from ..common.files import import_extra
from ..common.frames import Question, Text
from .runtimes import BackboneInputs, Form, TorchRuntime, compiled, converted, has_hooks, obstacle, with_mask
from .weights import WeightsWatch, fingerprint

LEAST_TAU = 0.9
"""A quantized model ranks its windows at least this much like the float32 model (Kendall's tau), or is refused.
Quantization that has failed gives about 0; that of the packaged MaxP .92 to .96."""

LEAST_WINDOWS = 20
"""Fewer windows than these calibrate no scales."""

FILES = ("int8.xml", "int8.bin")
"""OpenVINO's two files in a saved model: the graph, and its weights."""


class QuantizedRuntime:
    """Computes a backbone in int8 with fixed weights; the backbone's weights must not change.

    Args:
        graph: OpenVINO's graph, as XML.
        weights: the graph's weights.
        names: the inputs of the graph, in order.
        made_of: the fingerprint of the backbone's weights.
    """

    name: ClassVar[str] = "openvino"
    precision: ClassVar[str] = "int8"
    why: ClassVar[str] = ""

    def __init__(self, graph: bytes, weights: bytes, names: Sequence[str], made_of: str) -> None:
        self.graph, self.weights, self.names, self.made_of = graph, weights, tuple(names), made_of
        self._form: Form | None = None
        self._weights, self._is_of_weights = WeightsWatch(), False
        self._lock = threading.Lock()

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.graph, self.weights, self.names, self.made_of)

    def save(self, folder: Path) -> dict[str, Any]:
        """Write both files, and return further data for `load`, JSON-able."""
        for name, content in zip(FILES, (self.graph, self.weights), strict=True):
            (folder / name).write_bytes(content)
        return {"inputs": self.names, "made_of": self.made_of, "digest": self.digest}

    @classmethod
    def load(cls, folder: Path, saved: dict[str, Any]) -> QuantizedRuntime:
        """Read both files; ValueError if they do not belong to `saved`."""
        graph, weights = (folder.joinpath(name).read_bytes() for name in FILES)
        runtime = cls(graph, weights, saved["inputs"], saved["made_of"])
        if runtime.digest != saved["digest"]:
            files = " and ".join(FILES)
            raise ValueError(f"{files} in {str(folder)!r} do not belong to its config.json: save the model again")
        return runtime

    @property
    def digest(self) -> str:
        """A digest of graph and weights, equal after equal calibrations."""
        graph = re.sub(rb'_\d+|(?<="Model)\d+', b"", self.graph)  # OpenVINO counts the nodes of a process in names
        return blake2b(graph + self.weights, digest_size=16).hexdigest()

    def begin(self, backbone: Any) -> None:
        """Raise ValueError if the backbone has hooks, or other weights than when it was quantized."""
        if has_hooks(backbone):
            raise ValueError("this quantized model has hooks, which int8 would leave out: remove them")
        with self._lock:
            if self._weights.changed(backbone):
                self._is_of_weights = fingerprint(backbone.state_dict()) == self.made_of
        if not self._is_of_weights:
            raise ValueError("the weights have changed since this model was quantized: quantize it again")

    def __call__(self, backbone: Any, inputs: BackboneInputs) -> torch.Tensor:
        """Return the last hidden state `(V, T, H)`."""
        with self._lock:
            if self._form is None:
                core = import_extra("openvino", "openvino", "a quantized model needs OpenVINO").Core()
                self._form = compiled(core.read_model(self.graph, self.weights), torch.float32)
        inputs = with_mask(inputs)
        return self._form({name: inputs[name] for name in self.names})


class _Recorder(TorchRuntime):
    """Computes with torch and records the inputs of all passes."""

    def __init__(self) -> None:
        self.passes: list[BackboneInputs] = []

    def __call__(self, backbone: Any, inputs: BackboneInputs) -> torch.Tensor:
        self.passes.append(with_mask(inputs))
        return super().__call__(backbone, inputs)


def draw_windows(
    model: Any, queries: Sequence[Question], texts: Sequence[Text], number: int, seed: int
) -> tuple[list[str], list[str]]:
    """Return the queries and texts of at most `number` windows of these rows, drawn by seed."""
    random = np.random.default_rng(seed)
    rows = random.permutation(len(queries))[:number].tolist()
    found: list[tuple[str, str]] = []
    for _, pairs in model.walk([queries[row] for row in rows], [texts[row] for row in rows], offsets=True):
        found += [(pair.query.text, pair.text.input_text(span)) for pair in pairs for span in pair.spans]
    found = list(dict.fromkeys(found))
    drawn = [found[i] for i in sorted(random.permutation(len(found))[:number].tolist())]
    return [query for query, _ in drawn], [text for _, text in drawn]


def quantize(model: Any, queries: Sequence[str], texts: Sequence[str], *, verbose: bool = False) -> None:
    """Quantize a model's backbone to int8, calibrated on these windows and queries.

    Args:
        model: the model.
        queries: one for each window.
        texts: the windows.
        verbose: show NNCF's progress bars.

    Raises:
        ValueError: if OpenVINO cannot compute the model, if there are too few windows, or if quantization changes
            their ranking too much.
        ImportError: without NNCF.
    """
    encoder = model.encoder
    why = obstacle(encoder, model.head.needs)
    if why:
        raise ValueError(f"this model cannot be quantized, because {why}")
    if len(texts) < LEAST_WINDOWS:
        raise ValueError(f"{len(texts)} distinct windows are too few for calibration; {LEAST_WINDOWS} are needed")
    nncf = import_extra("nncf", "openvino", "quantize needs NNCF")
    before, recorder = encoder.runtime, _Recorder()
    encoder.runtime = recorder
    try:
        expected = model.score(queries, texts).scores
        names = tuple(recorder.passes[0])
        with nullcontext() if verbose else redirect_stdout(io.StringIO()):
            graph = nncf.quantize(
                converted(encoder.backbone, names),
                nncf.Dataset([[value.numpy() for value in inputs.values()] for inputs in recorder.passes]),
                model_type=nncf.ModelType.TRANSFORMER,
                subset_size=len(recorder.passes),
            )
        encoder.runtime = QuantizedRuntime(*_serialized(graph), names, fingerprint(encoder.backbone.state_dict()))
        tau = kendalltau(expected, model.score(queries, texts).scores).statistic
        if not tau >= LEAST_TAU:
            raise ValueError(
                f"int8 changes the ranking of {len(texts)} windows too much (Kendall's tau {tau:.3f}, at least "
                f"{LEAST_TAU} is needed): use it in float32 or bfloat16"
            )
        encoder.quantized = encoder.runtime
    finally:
        encoder.runtime = encoder.quantized or before
    model.source = ""


def _serialized(graph: Any) -> tuple[bytes, bytes]:
    """Return the contents of OpenVINO's two files."""
    import openvino

    with tempfile.TemporaryDirectory() as folder:
        files = [Path(folder, name) for name in FILES]
        openvino.serialize(graph, *files)
        return files[0].read_bytes(), files[1].read_bytes()
