"""The weights of a reranker: in memory, in a folder (config.json, safetensors, tokenizer files), and as an adapter."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import huggingface_hub
import torch
from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError
from safetensors.torch import load_file, save_file

from ..common.files import replacing
from ..common.hub import WITHOUT_HUB, unreachable
from ..common.packaged import model_folder
from ..common.presentation import percent
from ..common.registry import defined_in
from .backbones.load import FORMAT, Backbone, could_be_hub_id, load_tokenizer
from .encoder import WindowEncoder
from .fingerprint import WeightsWatch, fingerprint
from .heads import Head, build_head
from .scorer import LongDocScorer
from .settings import Settings

HeadSpec = tuple[str, dict[str, Any]]
"""Registered name and options of a head."""


class Source(NamedTuple):
    """Where weights lie.

    Attributes:
        name: what `load` takes, as it is written.
        arguments: the model's arguments there, as they are shown.
    """

    name: str
    arguments: dict[str, str]


@dataclass(eq=False)
class Weights:
    """A scorer and where its weights came from.

    Attributes:
        scorer: the model.
        backbone: what its encoder was built from.
        made_for: the arguments that decide about the weights; with others the weights are of no use.
        head: name and options of the scorer's head.
        ready: whether the scores make sense without training.
        trained: whether `fit` or `load` gave the weights, so that they must not be lost.
        history: one entry per epoch of training, and per validation.
        recipe: of the last training, JSON-able; None before one.
        adopted: whether they were taken over from another model, and not trained since.
        source: where trained weights were loaded from, or saved to; None where they have changed since.
    """

    scorer: LongDocScorer
    backbone: Backbone
    made_for: dict[str, Any]
    head: HeadSpec
    ready: bool
    trained: bool = False
    history: list[dict[str, Any]] = field(default_factory=list)
    recipe: dict[str, Any] | None = None
    adopted: bool = False
    source: Source | None = None
    _watch: WeightsWatch = field(default_factory=WeightsWatch)
    _fingerprint: str = ""

    @classmethod
    def from_backbone(
        cls,
        backbone: Backbone,
        head: HeadSpec,
        settings: Settings,
        *,
        made_for: dict[str, Any],
        seed: int,
        encoder: type[WindowEncoder] = WindowEncoder,
    ) -> Weights:
        """Puts a head on a loaded backbone, warm-started where the checkpoint allows; random weights are the seed's."""
        module = seeded_head(head, backbone.hidden_size, seed, channels=backbone.channels)
        with torch.random.fork_rng(devices=range(torch.cuda.device_count())):
            torch.manual_seed(seed)
            scorer = LongDocScorer(encoder(backbone), backbone.tokenizer, module, settings)
        ready = scorer.warm_start(backbone)
        return cls(scorer.eval(), backbone, made_for, head, ready)

    def mark_trained(self, recipe: dict[str, Any]) -> None:
        """From now on the weights, trained by this recipe, make sense and must not be lost."""
        self.trained = self.ready = True
        self.adopted = False
        self.recipe = recipe
        self._have_changed()

    def _have_changed(self) -> None:
        self.source = None
        self._watch.forget()

    def fingerprint(self, *, contents: bool = True) -> str:
        """The weights' fingerprint, made anew when they have changed.

        Args:
            contents: also notice writes that torch does not count, see `WeightsWatch`.
        """
        if self._watch.changed(self.scorer, contents=contents):
            self._fingerprint = fingerprint(self.scorer.state_dict())
        return self._fingerprint

    def digest(self) -> str:
        """Eight hexadecimal digits of the fingerprint, by which to tell models apart."""
        return self.fingerprint(contents=False)[:8]

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

    def adopt(self, other: Weights) -> str | None:
        """Takes over another model's encoder, and its head if it is of the same kind, else what fits of its last layer.

        Returns:
            None if it was done; else in what the encoders differ, and then nothing has changed.
        """
        encoder, its_encoder = self.scorer.encoder, other.scorer.encoder
        # What they have beyond windows and queries read together may differ.
        for part in ("backbone", "representation"):
            difference = _difference(getattr(encoder, part), getattr(its_encoder, part))
            if difference is not None:
                return difference
        for name, module in encoder.named_children():
            its_module = getattr(its_encoder, name, None)
            if its_module is not None and _difference(module, its_module) is None:
                module.load_state_dict(its_module.state_dict())
        new, old = self.scorer.head, other.scorer.head
        if type(new) is type(old) and _difference(new, old) is None:
            new.load_state_dict(old.state_dict())
            self.ready = other.ready
        elif type(old).warm_start is Head.warm_start:  # then its last layer scores what a checkpoint's does
            start = replace(self.scorer.take_over(self.backbone), final=old.final)
            self.ready = new.warm_start(start) and other.ready
        self.trained, self.adopted = self.trained or other.trained, True
        self._have_changed()
        return None

    def adopt_backbone(self, encoder: WindowEncoder) -> str | None:
        """Takes over a bi-encoder's backbone, whose states no head was trained for; returns as `adopt`."""
        difference = _difference(self.scorer.encoder.backbone, encoder.backbone)
        if difference is None:
            self.scorer.encoder.backbone.load_state_dict(encoder.backbone.state_dict())
            self.ready, self.adopted = False, True
            self._have_changed()
        return difference


def seeded_head(head: HeadSpec, hidden_size: int, seed: int, *, channels: int = 1) -> Head:
    """Makes a head with weights that depend on `seed` alone; the global random state stays as it is."""
    name, options = head
    with torch.random.fork_rng(devices=range(torch.cuda.device_count())):
        torch.manual_seed(seed)
        return build_head(name, hidden_size, channels=channels, **options)


def _difference(module: torch.nn.Module, other: torch.nn.Module) -> str | None:
    """The first weight that not both have, or not in one shape; None if there is none."""
    shapes, its_shapes = (
        {name: tuple(value.shape) for name, value in each.state_dict().items()} for each in (module, other)
    )
    for name in [*shapes, *its_shapes]:
        if shapes.get(name) != its_shapes.get(name):
            return f"{name} is {shapes.get(name, 'not there')} and {its_shapes.get(name, 'not there')}"
    return None


# In a folder.

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
{imported}

reranker = {loaded}.load("this-folder-or-hub-id")
pipeline = bm25 % 100 >> dataset.text_loader() >> reranker
```

Parameters: `{parameters}`
"""


def save_weights(
    folder: Path, weights: Weights, *, cls: type, parameters: dict[str, Any], adapter: Adapter | None = None
) -> None:
    """Writes a model into a folder, which is made if need be.

    Args:
        folder: where to.
        weights: the model.
        cls: the transformer's class.
        parameters: its JSON-able constructor arguments.
        adapter: the difference from the backbone, which is then stored instead of all weights.
    """
    scorer, (head, options) = weights.scorer, weights.head
    folder.mkdir(parents=True, exist_ok=True)
    config = {
        "format": FORMAT,
        "format_version": FORMAT_VERSION,
        "class": cls.__name__,
        **defined_in(cls),
        "parameters": parameters,
        "encoder": weights.backbone.describe(),
        "head": {
            "name": head,
            **defined_in(type(scorer.head)),
            "options": options,
            "built_from": scorer.head.built_from(),
            "ready": weights.ready,
        },
        **({} if adapter is None else {"adapter": {"base": adapter.base}}),
    }
    texts = {
        "config.json": _pretty(config),
        "pt_meta.json": _pretty({"type": "longdoc_reranker", "format": "hf", "package_hint": "pyterrier-longdoc"}),
        "README.md": _card(cls, parameters),
    }
    if weights.history:
        texts["training.json"] = _pretty({"args": weights.recipe, "history": weights.history})
    with ExitStack() as complete, tempfile.TemporaryDirectory(prefix=".tokenizer-", dir=folder) as scratch:
        # All take their places when all are written: where the disk is full a model saved before stays whole.
        for file, text in texts.items():
            complete.enter_context(replacing(folder / file)).write_text(text, encoding="utf-8")
        if adapter is None:
            tensors = {key: value.detach().cpu().contiguous() for key, value in scorer.state_dict().items()}
            part = complete.enter_context(replacing(folder / "model.safetensors"))
            save_file(tensors, part, metadata={"format": "pt"})
            scorer.tokenizer.save_pretrained(scratch)
            for path in [path for path in Path(scratch).rglob("*") if path.is_file()]:
                target = folder / path.relative_to(scratch)
                target.parent.mkdir(parents=True, exist_ok=True)
                os.replace(path, target)
        else:
            part = complete.enter_context(replacing(folder / ADAPTER_FILE))
            save_file(adapter.tensors, part, metadata={"format": "pt"})
    if not weights.history:
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
        OSError: if it is not on this machine and the hub cannot be asked.
    """
    folder = model_folder(name)
    if not folder.is_dir():
        if folder.exists() or not could_be_hub_id(str(name)):
            raise ValueError(f"{str(name)!r} is neither a folder nor the id of a model on the Hugging Face hub")
        patterns = ["*.json", "*.safetensors", "*.txt", "*.model", "*.md"]
        try:
            folder = Path(huggingface_hub.snapshot_download(str(name), revision=revision, allow_patterns=patterns))
        except LocalEntryNotFoundError as error:
            raise unreachable(str(name), error.__cause__ or error) from None
        except (OSError, ValueError, HfHubHTTPError) as error:
            raise ValueError(
                f"{str(name)!r} is no folder, and the hub does not give such a model: {error}. {WITHOUT_HUB}"
            ) from error
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
    lacking = sorted({"format_version", "class", "parameters", "encoder", "head"} - set(config))
    if lacking:
        raise ValueError(f"{path} lacks {', '.join(lacking)}: it is damaged or was edited")
    if config["format_version"] > FORMAT_VERSION:
        raise ValueError(
            f"{str(name)!r} was saved in format {config['format_version']}, this version of pyterrier_longdoc reads up "
            f"to {FORMAT_VERSION}: update pyterrier_longdoc"
        )
    return folder, config


def load_weights(
    folder: Path, config: dict[str, Any], settings: Settings, made_for: dict[str, Any], encoder: type[WindowEncoder]
) -> Weights:
    """Builds the described model and loads its weights, strictly.

    Args:
        folder: that `read_config` found.
        config: what it read.
        settings: of the transformer that was saved.
        made_for: see `Weights`.
        encoder: of the same transformer.

    Raises:
        ValueError: if weights are missing, left over or of another shape, or there is no usable tokenizer.
    """
    path = folder / "model.safetensors"
    if not path.is_file():
        raise ValueError(f"{str(folder)!r} has no model.safetensors: the model was not saved completely")
    tokenizer = load_tokenizer(str(folder))
    backbone = encoder.build_backbone(config["encoder"], tokenizer)
    name, options = config["head"]["name"], config["head"]["options"]
    built_from = config["head"].get("built_from", {})
    head: Head = build_head(name, backbone.hidden_size, channels=backbone.channels, **{**options, **built_from})
    scorer = LongDocScorer(encoder(backbone), tokenizer, head, settings)
    try:
        scorer.load_state_dict(load_file(path), strict=True)
    except Exception as error:
        raise ValueError(f"the weights in {str(path)!r} do not fit config.json: {error}") from error
    return Weights(scorer, backbone, made_for, (name, options), ready=False)


def note_training(weights: Weights, folder: Path, config: dict[str, Any]) -> Weights:
    """The weights, with what a folder says of their training."""
    weights.ready, weights.trained = config["head"]["ready"], True
    training = folder / "training.json"
    if training.is_file():
        past = json.loads(training.read_text(encoding="utf-8"))
        weights.recipe, weights.history = past["args"], past["history"]
    return weights


def _card(cls: type, parameters: dict[str, Any]) -> str:
    name, module = cls.__name__, defined_in(cls).get("module")
    return _CARD.format(
        name=name,
        imported="import pyterrier_longdoc as ld" if module is None else f"from {module} import {name}",
        loaded=f"ld.{name}" if module is None else name,
        backbone=parameters["backbone"],
        parameters=_json(parameters),
    )


def _pretty(content: dict[str, Any]) -> str:
    return _json(content, indent=2, sort_keys=True) + "\n"


def _json(content: Any, **options: Any) -> str:
    return json.dumps(content, default=lambda number: number.tolist(), **options)  # numpy's numbers and arrays


# As an adapter.


@dataclass(frozen=True, eq=False)
class Adapter:
    """A model as a difference from its backbone.

    A model trained with LoRA differs from its backbone, in each matrix, by a product `B A` of low rank. Stored so, with
    the few weights that are not the backbone's, it takes one or two megabytes instead of ninety.

    Attributes:
        tensors: what `compress` gave.
        base: fingerprint of the weights to which they are added.
    """

    tensors: dict[str, torch.Tensor]
    base: str

    @classmethod
    def of(cls, weights: Weights, untrained: Weights, *, rank: int, largest_error: float) -> Adapter:
        """What training has changed.

        Args:
            weights: the trained model.
            untrained: the same model as its backbone gives it.
            rank: the highest rank of a difference.
            largest_error: see `compress`.

        Raises:
            ValueError: if a difference of this rank loses more than that.
        """
        base = _pretrained(untrained.scorer)
        state = {name: value.detach().cpu() for name, value in weights.scorer.state_dict().items()}
        return cls(compress(state, base, rank=rank, largest_error=largest_error), fingerprint(base))


def load_adapter(weights: Weights, folder: Path, config: dict[str, Any], backbone: str) -> Weights:
    """Changes a model on its backbone as an adapter says.

    Raises:
        ValueError: if it was made for other weights, or does not fit them.
    """
    before = _pretrained(weights.scorer)
    if fingerprint(before) != config["adapter"]["base"]:
        raise ValueError(
            f"the adapter in {str(folder)!r} was made for other weights than those of the backbone {backbone!r}"
        )
    try:
        weights.scorer.load_state_dict(restore(load_file(folder / ADAPTER_FILE), before), strict=True)
    except Exception as error:
        raise ValueError(f"the adapter in {str(folder)!r} does not fit config.json: {error}") from error
    return weights


def _pretrained(scorer: LongDocScorer) -> dict[str, torch.Tensor]:
    """The weights to which LoRA adds: the backbone's, and those of a pre-trained aggregator."""
    prefixes = ("encoder.backbone.", *(f"head.{name}." for name in scorer.head.pretrained()))
    return {name: value.cpu() for name, value in scorer.state_dict().items() if name.startswith(prefixes)}


Tensors = Mapping[str, torch.Tensor]

_B, _A = "::B", "::A"


def compress(state: Tensors, base: Tensors, *, rank: int, largest_error: float) -> dict[str, torch.Tensor]:
    """The difference between two states, matrices as fp16 factors of low rank.

    Args:
        state: all weights of a trained model.
        base: those of them that it got from a checkpoint, as they were before training.
        rank: the highest rank of a difference; it is lower where that loses nothing.
        largest_error: most that a stored difference may deviate from the true one, relative to its norm.

    Returns:
        `name::B (m, r)` and `name::A (r, n)` of each changed matrix `(m, n)` of `base`, and what else has changed or
        is not in `base`, as fp16.

    Raises:
        ValueError: if a difference of this rank loses more than that.
    """
    stored: dict[str, torch.Tensor] = {}
    for name, value in state.items():
        if name not in base:
            stored[name] = _half(value)
        elif not torch.equal(value, base[name]):
            if value.ndim == 2:
                stored |= _factors(name, value.double() - base[name].double(), rank, largest_error)
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


def _factors(name: str, difference: torch.Tensor, rank: int, largest_error: float) -> dict[str, torch.Tensor]:
    u, s, v = torch.linalg.svd(difference, full_matrices=False)
    rank_needed = min(rank, int((s > s[0] * 1e-4).sum()))
    root = s[:rank_needed].sqrt()
    b, a = _half(u[:, :rank_needed] * root), _half(root[:, None] * v[:rank_needed])
    error = float((b.double() @ a.double() - difference).norm() / difference.norm())
    if error > largest_error:
        raise ValueError(
            f"the difference of {name!r} from the backbone is not of rank {rank} ({percent(error, 0)} would be lost): "
            f"raise rank or largest_error, or save the whole model with save()"
        )
    return {name + _B: b, name + _A: a}


def _half(value: torch.Tensor) -> torch.Tensor:
    return value.half().contiguous() if value.is_floating_point() else value.contiguous()
