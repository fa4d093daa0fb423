"""Saving and restoring trained models: one folder of config.json, safetensors weights and tokenizer files."""

from __future__ import annotations

import json
import os
import tempfile
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import huggingface_hub
import torch
from huggingface_hub.errors import HfHubHTTPError
from safetensors.torch import load_file, save_file

from .backbones import FORMAT, Backbone, could_be_hub_id, load_tokenizer
from .files import replacing
from .heads.base import Head, build_head
from .packaged import model_folder
from .scorer import LongDocScorer
from .windows import windows_from_config, windows_to_config

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
