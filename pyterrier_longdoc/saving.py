"""A reranker as a checkpoint and back: its class, its arguments, its weights."""

from __future__ import annotations

import json
import shutil
import tempfile
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from .backbones import Backbone
from .checkpoint import ADAPTER_FILE, Adapter, load_pretrained, read_config, save_pretrained
from .low_rank import compress, fingerprint, restore
from .scorer import LongDocScorer
from .selectors import FOLDER as PRESELECT
from .selectors import preselection_from_config
from .weights import Weights
from .windows import windows_from_config, windows_to_config


class WithCheckpoints:
    """How rerankers are saved and loaded."""

    def save(self: Any, folder: str | Path) -> None:
        """Writes the model to a folder: config.json, model.safetensors, tokenizer, model card, training.json.

        Args:
            folder: made if need be; `load` restores the model from it.

        Raises:
            ValueError: for a backbone with remote code, whose code would be missing from the folder.
        """
        if self.trust_remote_code:
            raise ValueError("a model whose backbone runs remote code cannot be saved: its code is not ours to store")
        self._check()
        save_reranker(self, self._load_weights(), folder)

    @classmethod
    def load(cls, name: str | Path, *, revision: str | None = None, **parameters: Any) -> Any:
        """Restores a model that `save` or `push_to_hub` wrote.

        Args:
            name: a folder, a model on the Hugging Face hub, or one that comes with this package, e.g.
                `"longdoc:docstrings-maxp"`.
            revision: branch, tag or commit on the hub.
            **parameters: constructor arguments to change, e.g. `device="cpu"`.

        Returns:
            A transformer of this class, or of a subclass that is not this package's own; `LongDocReranker.load`
            restores any class.

        Raises:
            ValueError: if that is not a model saved by this package, or one of another class.
        """
        from . import longp, rerankers  # noqa: F401 - so that the classes are known
        from .base import LongDocReranker  # which imports this module

        return load_reranker(cls, LongDocReranker, name, revision=revision, parameters=parameters)

    def push_to_hub(self, repo_id: str, *, private: bool = False, commit_message: str = "Upload model") -> str:
        """Saves the model and uploads it to the Hugging Face hub, with the token of `huggingface-cli login`.

        Args:
            repo_id: `user/name`; made if need be.
            private: make it private.
            commit_message: of the upload.

        Returns:
            The model's address.
        """
        import huggingface_hub

        api = huggingface_hub.HfApi()
        with tempfile.TemporaryDirectory() as folder:
            self.save(folder)
            api.create_repo(repo_id, private=private, exist_ok=True)
            return str(api.upload_folder(repo_id=repo_id, folder_path=folder, commit_message=commit_message))


def save_reranker(model: Any, weights: Weights, folder: str | Path, *, adapter: Adapter | None = None) -> None:
    """Writes a reranker's checkpoint.

    Args:
        model: the transformer.
        weights: its weights, which fit its arguments.
        folder: made if need be.
        adapter: the weights as a difference from the backbone's, which is then stored.
    """
    parameters = {k: v for k, v in model._parameters().items() if k not in model._runtime}
    parameters = {k: str(v) if isinstance(v, Path) else v for k, v in parameters.items()}
    if model.windows is not None:
        parameters["windows"] = windows_to_config(model.windows)
    if model.preselect is None:
        shutil.rmtree(Path(folder) / PRESELECT, ignore_errors=True)  # of a model that was here before
    else:
        parameters["preselect"] = model.preselect.to_config(Path(folder))
    training = None
    if weights.history:
        training = {"args": weights.recipe, "history": weights.history}
    save_pretrained(
        folder,
        weights.scorer,
        weights.backbone,
        name=type(model).__name__,
        parameters=parameters,
        head={
            "name": weights.head[0],
            "options": weights.head[1],
            "built_from": weights.scorer.head.built_from(),
            "ready": weights.ready,
        },
        training=training,
        adapter=adapter,
    )


def save_adapter(model: Any, folder: str | Path, *, rank: int = 16) -> None:
    """Writes a model that was trained with LoRA as a small difference from its backbone.

    `load` restores it like any other model, if it finds the same backbone. Weights are stored in fp16, which changes
    scores in the third or fourth digit.

    Args:
        model: a `LongDocReranker`.
        folder: made if need be.
        rank: the highest rank of a difference: the sum of the ranks of the trainings it went through.

    Raises:
        ValueError: if the difference has a higher rank, as after a training without LoRA.

    Example:
        `ld.save_adapter(maxp, "my-maxp")`, then `ld.MaxP.load("my-maxp")`.
    """
    weights = model._load_weights()
    fresh = type(model)(**{**model._parameters(), "device": "cpu"})
    base = _pretrained_state(fresh._load_weights().scorer)
    state = {name: value.detach().cpu() for name, value in weights.scorer.state_dict().items()}
    stored = compress(state, base, rank=rank)
    save_reranker(model, weights, folder, adapter=Adapter(stored, fingerprint(base)))


def load_reranker(
    cls: type, base: type, name: str | Path, *, revision: str | None = None, parameters: dict[str, Any]
) -> Any:
    """Restores a reranker from its checkpoint.

    Args:
        cls: the class that is asked for.
        base: the class of all rerankers, which may ask for any.
        name: a folder, a model on the Hugging Face hub, or one of this package.
        revision: branch, tag or commit on the hub.
        parameters: constructor arguments to change.

    Raises:
        ValueError: if that is not a model saved by this package, or one of another class.
    """
    folder, config = read_config(name, revision=revision)
    known = {c.__name__: c for c in _all_classes(base)}
    saved: Any = known.get(config["class"])
    if saved is None:
        raise ValueError(f"{str(name)!r} holds a {config['class']!r}; known are {', '.join(sorted(known))}")
    if saved is not cls and saved not in _accepted(cls, base):
        raise ValueError(f"{str(name)!r} holds a {saved.__name__}, not a {cls.__name__}: use {saved.__name__}.load")
    arguments = dict(config["parameters"])
    if "windows" in arguments:
        arguments["windows"] = windows_from_config(arguments["windows"])
    preselect = arguments.pop("preselect", None)
    if preselect is not None and "preselect" not in parameters:
        arguments["preselect"] = preselection_from_config(preselect, folder)
    for argument in ("text_field", "answers"):
        if isinstance(arguments.get(argument), list):
            arguments[argument] = tuple(arguments[argument])
    model = saved(**{**arguments, **parameters})
    # What the weights were made for, whatever `parameters` ask for: the first transform compares the two.
    original = saved(**{**arguments, "trust_remote_code": model.trust_remote_code})
    made_for = original._made_for()
    head = (config["head"]["name"], config["head"]["options"])
    if "adapter" in config:
        scorer, backbone = _with_adapter(original, folder, config["adapter"]["base"])
    else:
        scorer, backbone = load_pretrained(folder, config, saved._scorer_class)
    training = folder / "training.json"
    past = json.loads(training.read_text(encoding="utf-8")) if training.is_file() else {"args": None, "history": []}
    model._loaded = Weights(
        scorer,
        backbone,
        made_for,
        head,
        ready=config["head"]["ready"],
        trained=True,
        history=past["history"],
        recipe=past["args"],
    )
    return model


def _with_adapter(model: Any, folder: Path, base: str) -> tuple[LongDocScorer, Backbone]:
    """The model on its backbone, changed by what `save_adapter` wrote."""
    weights = model._load_weights()
    before = _pretrained_state(weights.scorer)
    if fingerprint(before) != base:
        raise ValueError(
            f"the adapter in {str(folder)!r} was made for other weights than those of the backbone {model.backbone!r}"
        )
    try:
        weights.scorer.load_state_dict(restore(load_file(folder / ADAPTER_FILE), before), strict=True)
    except Exception as error:
        raise ValueError(f"the adapter in {str(folder)!r} does not fit config.json: {error}") from error
    return weights.scorer, weights.backbone


def _pretrained_state(scorer: LongDocScorer) -> dict[str, torch.Tensor]:
    """The weights to which LoRA adds: the backbone's, and those of a pre-trained aggregator."""
    head: Any = scorer.head
    prefixes = ("encoder.backbone.", *(f"head.{name}." for name in head.pretrained()))
    return {name: value.cpu() for name, value in scorer.state_dict().items() if name.startswith(prefixes)}


def _accepted(cls: type, base: type) -> list[type]:
    """Subclasses that a checkpoint for `cls` may name: all of the base class, else users' own.

    That SumP is written as a MaxP with another head does not make its checkpoints MaxPs.
    """
    ours = f"{__package__}."
    return [c for c in _all_classes(cls) if cls is base or not c.__module__.startswith(ours)]


def _all_classes(cls: Any) -> list[type]:
    return [c for child in cls.__subclasses__() for c in (child, *_all_classes(child))]
