"""Small checkpoints are read once in a session and copied for every further reader.

Most tests begin with a model over a tiny checkpoint; reading one takes ten times as long as copying it. A copy is equal
to what would be read, down to the name of the folder. In tests whose subject is the reading itself, or the memory that
what was read lies in, every checkpoint is read from its files.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from hashlib import blake2b
from pathlib import Path
from typing import Any

import pytest
import transformers
from transformers.models.auto import auto_factory

FROM_FILES = ("common/test_hub.py", "modelling/test_backbones.py", "modelling/test_own_memory.py")
"""Tests of reading."""

LARGEST = 4 * 2**20
"""Bytes of a folder; larger ones, such as packaged encoders, are read each time."""

enabled = True
_KEPT: dict[Any, Any] = {}


def read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let configurations, tokenizers and models of transformers come from copies."""
    for owner in (transformers.AutoConfig, transformers.AutoTokenizer, auto_factory._BaseAutoModelClass):
        original = owner.__dict__["from_pretrained"].__func__
        monkeypatch.setattr(owner, "from_pretrained", classmethod(_copying(original)))


def _copying(read: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(read)
    def copied(cls: type, name: Any, *args: Any, **options: Any) -> Any:
        contents = _contents(Path(name)) if enabled and not args and not options.get("trust_remote_code") else None
        if contents is None:
            return read(cls, name, *args, **options)
        key = cls, contents, str(sorted((option, _written(value)) for option, value in options.items()))
        if key not in _KEPT:
            _KEPT[key] = copy.deepcopy(read(cls, name, **options))
        return _named(copy.deepcopy(_KEPT[key]), str(name))

    return copied


def _contents(folder: Path) -> bytes | None:
    """A digest of the files of a small folder; None for another one, and for what is no folder."""
    if not folder.is_dir():
        return None
    files = [path for path in sorted(folder.iterdir()) if path.is_file()]
    if sum(path.stat().st_size for path in files) > LARGEST:
        return None
    digest = blake2b()
    for path in files:
        digest.update(f"{path.name} {path.stat().st_size} ".encode())
        digest.update(path.read_bytes())
    return digest.digest()


def _written(value: Any) -> str:
    """An option of `from_pretrained`; of a configuration all its values but the name of the folder."""
    if not isinstance(value, transformers.PretrainedConfig):
        return repr(value)
    return str({name: each for name, each in value.to_dict().items() if name != "_name_or_path"})


def _named(made: Any, folder: str) -> Any:
    """The same with the name of the folder that was asked for."""
    model = made[0] if isinstance(made, tuple) else made
    for part in (model, getattr(model, "config", None)):
        for attribute in ("name_or_path", "_name_or_path"):
            if isinstance(vars(part).get(attribute) if part is not None else None, str):
                setattr(part, attribute, folder)
    return made
