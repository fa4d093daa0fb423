"""What a sentence-transformers checkpoint says about how its embeddings are made."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors.torch import load_file
from torch import nn
from transformers.utils import cached_file

from .backbones import Representation

_ACTIVATIONS = {"Identity": nn.Identity, "Tanh": nn.Tanh, "ReLU": nn.ReLU, "GELU": nn.GELU, "SiLU": nn.SiLU}
_PASSAGE_PROMPTS = ("document", "passage", "corpus")
_POOLINGS = {"cls": "cls", "cls_token": "cls", "mean": "mean", "mean_tokens": "mean"}


@dataclass(frozen=True, eq=False)
class EmbeddingSettings:
    """How a checkpoint's token states become one embedding.

    Attributes:
        pooling: `"mean"`, `"cls"`, or the name of one that `BiEncoder` does not have; None if nothing is said.
        projection: the dense layer after pooling; None without one.
        pools_prompt: whether the tokens of a prefix count in the mean.
        similarity: `"cosine"`, `"dot"`, or the name of one that `BiEncoder` does not have; None if nothing is said.
        query_prefix: put before queries.
        passage_prefix: put before passages.
    """

    pooling: str | None = None
    projection: Representation | None = None
    pools_prompt: bool = True
    similarity: str | None = None
    query_prefix: str = ""
    passage_prefix: str = ""


def embedding_settings(name: str) -> EmbeddingSettings:
    """Reads `modules.json` and what it points to, and `config_sentence_transformers.json`.

    Args:
        name: a model on the Hugging Face hub, or a folder.

    Returns:
        The settings; empty ones for a checkpoint without these files.

    Raises:
        ValueError: for a module after the encoder that this package cannot apply.
    """
    modules = _read_json(name, "modules.json")
    pooling, projection, pools_prompt = None, None, True
    kinds: list[str] = []
    for module in modules or []:
        kind = module["type"].rsplit(".", 1)[-1]
        if kind == "Pooling":
            config = _read_json(name, f"{module['path']}/config.json") or {}
            pooling, pools_prompt = _pooling(config), config.get("include_prompt", True)
        elif kind == "Dense" and kinds[-1:] == ["Pooling"]:
            projection = _projection(name, module["path"])
        elif kind not in ("Transformer", "Normalize"):
            after = f" after {kinds[-1]}" if kinds else ""
            raise ValueError(
                f"checkpoint {name!r} has a {kind} layer{after} for its embeddings, which BiEncoder cannot apply"
            )
        kinds.append(kind)
    general = _read_json(name, "config_sentence_transformers.json") or {}
    prompts = general.get("prompts") or {}
    default = prompts.get(general.get("default_prompt_name"), "")
    return EmbeddingSettings(
        pooling,
        projection,
        pools_prompt,
        similarity=general.get("similarity_fn_name"),
        query_prefix=prompts.get("query") or default,
        passage_prefix=next((prompts[key] for key in _PASSAGE_PROMPTS if prompts.get(key)), default),
    )


def _pooling(config: dict[str, Any]) -> str | None:
    modes = config.get("pooling_mode")
    if modes is None:
        prefix = "pooling_mode_"
        modes = [key.removeprefix(prefix) for key, value in config.items() if key.startswith(prefix) and value is True]
    modes = [modes] if isinstance(modes, str) else list(modes)
    return "+".join(_POOLINGS.get(mode, mode) for mode in modes) or None


def _projection(name: str, path: str) -> Representation:
    config = _read_json(name, f"{path}/config.json") or {}
    activation = config.get("activation_function", "torch.nn.modules.activation.Tanh").rsplit(".", 1)[-1]
    weights = _file(name, f"{path}/model.safetensors")
    if activation not in _ACTIVATIONS or weights is None:
        raise ValueError(
            f"checkpoint {name!r} projects its embeddings by {path}, which needs model.safetensors there and one of "
            f"the activations {', '.join(_ACTIVATIONS)} (it names {activation})"
        )
    dense = nn.Linear(config["in_features"], config["out_features"], bias=config.get("bias", True))
    dense.load_state_dict({key.removeprefix("linear."): value for key, value in load_file(weights).items()})
    return Representation(dense, _ACTIVATIONS[activation]())


def _read_json(name: str, path: str) -> Any:
    file = _file(name, path)
    return None if file is None else json.loads(file.read_text(encoding="utf-8"))


def _file(name: str, path: str) -> Path | None:
    """A file of the checkpoint, from its folder, the hub or the hub's cache; None where it is not."""
    if Path(name).is_dir():
        file = Path(name) / path
        return file if file.is_file() else None
    found = cached_file(
        name, path, _raise_exceptions_for_missing_entries=False, _raise_exceptions_for_connection_errors=False
    )
    return None if found is None else Path(found)
