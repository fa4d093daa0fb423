"""Saving and restoring trained models: one folder of config.json, safetensors weights and tokenizer files."""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import huggingface_hub
import torch
from huggingface_hub.errors import HfHubHTTPError
from safetensors.torch import load_file, save_file

from ..common.files import replacing
from .backbones.load import FORMAT, Backbone, could_be_hub_id, load_tokenizer
from .backbones.packaged import model_folder
from .heads import Head, build_head
from .scorer import LongDocScorer
from .windows import Windows, windows_from_config, windows_to_config

FORMAT_VERSION = 1

ADAPTER_FILE = "adapter.safetensors"

_CARD = """---
library_name: pyterrier_longdoc
tags:
- pyterrier
- reranking
- long-documents
---
# {name}

A long-document reranker, `{name}`, on top of `{backbone}`. It scores a query and a document for ranking.

```python
import pyterrier_longdoc as ld
reranker = ld.{name}.load("this-folder-or-hub-id")
pipeline = bm25 % 100 >> dataset.text_loader() >> reranker
```

Parameters: `{parameters}`
"""


@dataclass(frozen=True, eq=False)
class Adapter:
    """A model as a difference from its backbone.

    Attributes:
        tensors: what `low_rank.compress` gave.
        base: fingerprint of the weights to which they are added.
    """

    tensors: dict[str, torch.Tensor]
    base: str


def save_pretrained(
    folder: str | Path,
    scorer: LongDocScorer,
    backbone: Backbone,
    *,
    name: str,
    parameters: dict[str, Any],
    head: dict[str, Any],
    training: dict[str, Any] | None = None,
    adapter: Adapter | None = None,
) -> None:
    """Writes a model into a folder, which is made if need be.

    Args:
        folder: where to.
        scorer: the model.
        backbone: what its encoder was built from.
        name: the transformer's class.
        parameters: JSON-able constructor arguments of the transformer.
        head: `name` and `options` of the head.
        training: recipe and history, if the model was trained.
        adapter: the difference from the backbone, which is then stored instead of all weights.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    config = {
        "format": FORMAT,
        "format_version": FORMAT_VERSION,
        "class": name,
        "parameters": parameters,
        "windows": windows_to_config(scorer.windows),
        "reading": scorer.reading(),
        "encoder": backbone.describe(),
        "head": head,
    }
    if adapter is not None:
        config["adapter"] = {"base": adapter.base}
    meta = {"type": "longdoc_reranker", "format": "hf", "package_hint": "pyterrier-longdoc"}
    texts = {
        "config.json": _pretty(config),
        "pt_meta.json": _pretty(meta),
        "README.md": _CARD.format(name=name, backbone=parameters["backbone"], parameters=_json(parameters)),
        **({} if training is None else {"training.json": _pretty(training)}),
    }
    with ExitStack() as complete, tempfile.TemporaryDirectory(prefix=".tokenizer-", dir=folder) as scratch:
        # All take their places when all are written: where the disk is full a model saved before stays whole.
        for file, text in texts.items():
            complete.enter_context(replacing(folder / file)).write_text(text, encoding="utf-8")
        if adapter is None:
            weights = {key: value.detach().cpu().contiguous() for key, value in scorer.state_dict().items()}
            part = complete.enter_context(replacing(folder / "model.safetensors"))
            save_file(weights, part, metadata={"format": "pt"})
            scorer.tokenizer.save_pretrained(scratch)
            for path in [path for path in Path(scratch).rglob("*") if path.is_file()]:
                target = folder / path.relative_to(scratch)
                target.parent.mkdir(parents=True, exist_ok=True)
                os.replace(path, target)
        else:
            part = complete.enter_context(replacing(folder / ADAPTER_FILE))
            save_file(adapter.tensors, part, metadata={"format": "pt"})
    if training is None:
        (folder / "training.json").unlink(missing_ok=True)  # of a model that was saved here before


def read_config(name: str | Path, *, revision: str | None = None) -> tuple[Path, dict[str, Any]]:
    """Finds a saved model and reads its description.

    Args:
        name: a folder, a model on the Hugging Face hub, or one in this package, `"longdoc:docstrings-maxp"`.
        revision: branch, tag or commit on the hub.

    Returns:
        The folder that holds it and its config.json.

    Raises:
        ValueError: if that is not a model saved by this package, or one saved by a newer version of it.
    """
    folder = model_folder(name)
    if not folder.is_dir():
        if folder.exists() or not could_be_hub_id(str(name)):
            raise ValueError(f"{str(name)!r} is neither a folder nor the id of a model on the Hugging Face hub")
        patterns = ["*.json", "*.safetensors", "*.txt", "*.model", "*.md"]
        try:
            folder = Path(huggingface_hub.snapshot_download(str(name), revision=revision, allow_patterns=patterns))
        except (OSError, ValueError, HfHubHTTPError) as error:
            raise ValueError(f"{str(name)!r} is no folder, and the hub does not give such a model: {error}") from error
    path = folder / "config.json"
    if not path.is_file():
        raise ValueError(f"{str(name)!r} is no model saved by this package: it has no config.json")
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} cannot be read as JSON: {error}") from error
    if not isinstance(config, dict) or config.get("format") != FORMAT:
        raise ValueError(
            f"{str(name)!r} is no model saved by this package (config.json has no format {FORMAT!r}); to start from a "
            f"Hugging Face checkpoint give it as the backbone, e.g. MaxP({str(name)!r})"
        )
    lacking = sorted({"format_version", "class", "parameters", "windows", "reading", "encoder", "head"} - set(config))
    if lacking:
        raise ValueError(f"{path} lacks {', '.join(lacking)}: it is damaged or was edited")
    if config["format_version"] > FORMAT_VERSION:
        raise ValueError(
            f"{str(name)!r} was saved in format {config['format_version']}, this version of pyterrier_longdoc reads up "
            f"to {FORMAT_VERSION}: update pyterrier_longdoc"
        )
    return folder, config


def load_pretrained(
    folder: Path, config: dict[str, Any], scorer_class: type[LongDocScorer] = LongDocScorer
) -> tuple[LongDocScorer, Backbone]:
    """Builds the described model and loads its weights, strictly.

    Args:
        folder: that `read_config` found.
        config: what it read.
        scorer_class: of the transformer that was saved.

    Raises:
        ValueError: if weights are missing, left over or of another shape, or there is no usable tokenizer.
    """
    path = folder / "model.safetensors"
    if not path.is_file():
        raise ValueError(f"{str(folder)!r} has no model.safetensors: the model was not saved completely")
    try:
        tokenizer = load_tokenizer(str(folder))
    except Exception as error:
        raise ValueError(f"the tokenizer in {str(folder)!r} cannot be loaded: {error}") from error
    backbone = scorer_class.build_backbone(config["encoder"], tokenizer)
    options = {**config["head"]["options"], **config["head"].get("built_from", {})}
    head: Head = build_head(config["head"]["name"], backbone.hidden_size, channels=backbone.channels, **options)
    scorer = scorer_class(backbone, windows_from_config(config["windows"]), head, **config["reading"])
    try:
        scorer.load_state_dict(load_file(path), strict=True)
    except Exception as error:
        raise ValueError(f"the weights in {str(path)!r} do not fit config.json: {error}") from error
    return scorer, backbone


def _pretty(content: dict[str, Any]) -> str:
    return _json(content, indent=2, sort_keys=True) + "\n"


def _json(content: Any, **options: Any) -> str:
    return json.dumps(content, default=lambda number: number.tolist(), **options)  # numpy's numbers and arrays


HeadSpec = tuple[str, dict[str, Any]]
"""Registered name and options of a head."""


@dataclass(eq=False)
class Weights:
    """A scorer and its history.

    Attributes:
        scorer: the model.
        backbone: what its encoder was built from.
        made_for: the arguments that decide about the weights; with others the weights are of no use.
        head: name and options of the scorer's head.
        ready: whether the scores make sense without training.
        trained: whether `fit` or `load` gave the weights, so that they must not be lost.
        history: one entry per epoch of training, and per validation.
        recipe: of the last training, JSON-able; None before one.
    """

    scorer: LongDocScorer
    backbone: Backbone
    made_for: tuple[Any, ...]
    head: HeadSpec
    ready: bool
    trained: bool = False
    history: list[dict[str, Any]] = field(default_factory=list)
    recipe: dict[str, Any] | None = None

    @classmethod
    def from_backbone(
        cls,
        backbone: Backbone,
        head: HeadSpec,
        windows: Windows,
        *,
        made_for: tuple[Any, ...],
        seed: int,
        scorer_class: type[LongDocScorer] = LongDocScorer,
        **reading: Any,
    ) -> Weights:
        """Puts a head on a loaded backbone, warm-started where the checkpoint allows.

        Args:
            backbone: what the encoder is built from.
            head: the head.
            windows: how texts are cut.
            made_for: see the class.
            seed: of random weights.
            scorer_class: how the parts work together.
            **reading: further arguments of the scorer.
        """
        module = seeded_head(head, backbone.hidden_size, seed, channels=backbone.channels)
        with torch.random.fork_rng(devices=range(torch.cuda.device_count())):
            torch.manual_seed(seed)
            scorer = scorer_class(backbone, windows, module, **reading)
        ready = scorer.warm_start(backbone)
        return cls(scorer.eval(), backbone, made_for, head, ready)

    def mark_trained(self, recipe: dict[str, Any]) -> None:
        """From now on the weights, trained by this recipe, make sense and must not be lost."""
        self.trained = self.ready = True
        self.recipe = recipe

    def exchange_head(self, head: HeadSpec, seed: int) -> bool:
        """Puts another head on the same encoder.

        A head of the same kind takes over the weights; any other starts afresh, which trained weights forbid.

        Returns:
            Whether it was done; False if trained weights would be lost.
        """
        new = seeded_head(head, self.backbone.hidden_size, seed, channels=self.backbone.channels)
        old = self.scorer.head
        if self._same_weights_serve(head, new):
            new.load_state_dict(old.state_dict())
            self.scorer.head = new
        elif self.trained:
            return False
        else:
            self.scorer.head = new
            self.ready = self.scorer.warm_start(self.backbone)
        self.head = head
        self.scorer.eval()
        return True

    def _same_weights_serve(self, head: HeadSpec, new: Head) -> bool:
        """Whether `new` differs from the present head in nothing that the weights were trained for."""
        changed = {name for name in head[1] if head[1][name] != self.head[1].get(name)}
        return type(new) is type(self.scorer.head) and changed <= set(new.tunable)

    def adopt(self, other: Weights) -> bool:
        """Takes over another model's encoder, and its head if it is of the same kind, else what fits of its last layer.

        Returns:
            Whether it was done; False if the encoders differ in kind, and then nothing has changed.
        """
        encoder, its_encoder = self.scorer.encoder, other.scorer.encoder
        if _shapes(encoder) != _shapes(its_encoder):
            return False
        for name, module in self.scorer.named_children():
            its_module = getattr(other.scorer, name, None)
            if name != "head" and its_module is not None and _shapes(module) == _shapes(its_module):
                module.load_state_dict(its_module.state_dict())
        new, old = self.scorer.head, other.scorer.head
        if type(new) is type(old) and _shapes(new) == _shapes(old):
            new.load_state_dict(old.state_dict())
            self.ready = other.ready
        elif old.needs == "cls":
            start = replace(self.scorer.take_over(self.backbone), final=old.final)
            self.ready = new.warm_start(start) and other.ready
        self.trained = self.trained or other.trained
        return True


def seeded_head(head: HeadSpec, hidden_size: int, seed: int, *, channels: int = 1) -> Head:
    """Makes a head with weights that depend on `seed` alone; the global random state stays as it is."""
    name, options = head
    with torch.random.fork_rng(devices=range(torch.cuda.device_count())):
        torch.manual_seed(seed)
        return build_head(name, hidden_size, channels=channels, **options)


def _shapes(module: torch.nn.Module) -> dict[str, torch.Size]:
    return {name: value.shape for name, value in module.state_dict().items()}


Tensors = Mapping[str, torch.Tensor]

LARGEST_ERROR = 0.01
"""Most that a stored difference may deviate from the true one, relative to its norm."""

_B, _A = "::B", "::A"


def compress(state: Tensors, base: Tensors, *, rank: int) -> dict[str, torch.Tensor]:
    """The difference between two states, matrices as fp16 factors of low rank.

    Args:
        state: all weights of a trained model.
        base: those of them that it got from a checkpoint, as they were before training.
        rank: the highest rank of a difference; it is lower where that loses nothing.

    Returns:
        `name::B (m, r)` and `name::A (r, n)` of each changed matrix `(m, n)` of `base`, and what else has changed or
        is not in `base`, as fp16.

    Raises:
        ValueError: if a difference has a higher rank.
    """
    stored: dict[str, torch.Tensor] = {}
    for name, value in state.items():
        if name not in base:
            stored[name] = _half(value)
        elif not torch.equal(value, base[name]):
            if value.ndim == 2:
                stored |= _factors(name, value.double() - base[name].double(), rank)
            else:
                stored[name] = _half(value)
    return stored


def restore(stored: Tensors, base: Tensors) -> dict[str, torch.Tensor]:
    """All weights of the model: those of `base`, changed by what `compress` gave."""
    state = dict(base)
    for name, value in stored.items():
        if name.endswith(_A):
            continue
        if name.endswith(_B):
            matrix = name.removesuffix(_B)
            if matrix not in base:
                raise ValueError(f"the adapter changes {matrix!r}, which the backbone has not")
            difference = value.float() @ stored[matrix + _A].float()
            state[matrix] = base[matrix] + difference
        else:
            state[name] = value.to(base[name].dtype) if name in base else value.float()
    return state


def fingerprint(weights: Tensors) -> str:
    """Tells whether two models have the same weights, wherever they are."""
    digest = hashlib.blake2b(digest_size=16)
    for name in sorted(weights):
        digest.update(name.encode())
        digest.update(weights[name].detach().cpu().reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def _factors(name: str, difference: torch.Tensor, rank: int) -> dict[str, torch.Tensor]:
    u, s, v = torch.linalg.svd(difference, full_matrices=False)
    kept = min(rank, int((s > s[0] * 1e-4).sum()))
    root = s[:kept].sqrt()
    b, a = _half(u[:, :kept] * root), _half(root[:, None] * v[:kept])
    error = float((b.double() @ a.double() - difference).norm() / difference.norm())
    if error > LARGEST_ERROR:
        raise ValueError(
            f"the difference of {name!r} from the backbone is not of rank {rank} ({error:.0%} would be lost): raise "
            f"rank, or save the whole model with save()"
        )
    return {name + _B: b, name + _A: a}


def _half(value: torch.Tensor) -> torch.Tensor:
    return value.half().contiguous() if value.is_floating_point() else value.contiguous()
