"""Checkpoints of the Hugging Face hub on a machine that may have no network."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path, PureWindowsPath
from typing import NoReturn

import huggingface_hub
from huggingface_hub.errors import EntryNotFoundError, HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

from .packaged import ENCODER, packaged_models

WITHOUT_HUB = (
    f"Without the hub there are the packaged models: CrossEncoder.load(name) restores a trained one "
    f"({', '.join(packaged_models())}), backbone={ENCODER!r} is an encoder to train."
)
"""A way out, for messages."""

_KINDS = ("json", "safetensors", "txt", "model", "metadata", "jinja", "py")
"""Files of a checkpoint; code among them is not run by itself."""


def reachable(name: str, *, weights: bool = True) -> str:
    """Return where to load a checkpoint from: its name if the hub has it, else the folder of its copy in the cache.

    The hub is asked once: its libraries try a dozen files, six times each, even if the checkpoint is in the cache. A
    folder is returned as it is. Without `weights` a copy of the tokenizer suffices. An OSError is raised if the hub is
    out of reach, or gives no answer (5xx, 429), and the cache has no copy.
    """
    if Path(name).is_dir():
        return name
    try:
        huggingface_hub.get_hf_file_metadata(huggingface_hub.hf_hub_url(name, "config.json"))
    except HFValidationError as error:
        unreachable(name, error)
    except EntryNotFoundError:
        return name  # loading it raises the same error, in full
    except Exception as error:  # noqa: BLE001 - of httpx or httpx2, by the version of the hub's client
        with suppress(LocalEntryNotFoundError):
            copy = Path(huggingface_hub.snapshot_download(name, local_files_only=True))
            if not weights or any(file.suffix in (".safetensors", ".bin") for file in copy.iterdir()):
                return str(copy)
        status = error.response.status_code if isinstance(error, HfHubHTTPError) else 500
        if status < 500 and status != 429:  # an error about the model, which loading it raises again
            return name
        unreachable(name, error)
    return name


def find_file(name: str, path: str) -> Path | None:
    """Return a file of a checkpoint that `reachable` found; None only if the checkpoint has no such file.

    ValueError for a path that leads out of the checkpoint: some come from the checkpoint's own files.
    """
    check_inside(name, path)
    if Path(name).is_dir():
        file = Path(name, path)
        return file if file.is_file() else None
    try:
        return Path(huggingface_hub.hf_hub_download(name, path))
    except LocalEntryNotFoundError as error:  # raised if the hub could not be asked
        cause = error.__cause__ or error
        raise OSError(
            f"cannot check whether {name!r} contains {path} ({type(cause).__name__}: {cause}): connect to the network, "
            f"or run 'hf download {name}' first"
        ) from None
    except EntryNotFoundError:
        return None


def check_inside(name: str, path: str) -> None:
    """Raise ValueError for a path that leads out of a checkpoint."""
    parts = PureWindowsPath(path)  # of both kinds of paths
    if parts.anchor or ".." in parts.parts:
        raise ValueError(f"checkpoint {name!r} names {path!r}, which is outside of the checkpoint")


def local_folder(name: str) -> str:
    """Return the folder of a checkpoint that `reachable` found; the hub's files are downloaded, but no pickles."""
    if Path(name).is_dir():
        return name
    return huggingface_hub.snapshot_download(name, allow_patterns=[f"*.{kind}" for kind in _KINDS])


def refuse_pointer(file: Path) -> None:
    """Raise ValueError for a file that git-LFS has not fetched: a few lines of text in place of weights."""
    with file.open("rb") as stream:
        if stream.read(24) == b"version https://git-lfs.":
            raise ValueError(f"{str(file)!r} is a git-LFS pointer, not the weights: run 'git lfs pull' in its folder")


def unreachable(name: str, error: BaseException) -> NoReturn:
    """Raise OSError for a model that is not here, if the hub cannot be asked because of `error`."""
    if isinstance(error, HFValidationError):
        raise FileNotFoundError(f"there is no folder {name!r}, and no model on the hub has such a name") from None
    raise OSError(
        f"the model {name!r} is no folder here, not in the cache, and the Hugging Face hub cannot be asked for it "
        f"({type(error).__name__}: {error}). Connect to the network, or run 'hf download {name}' on a machine "
        f"that is and copy its Hugging Face cache to here. {WITHOUT_HUB}"
    ) from None  # a notebook would show three screens of the hub's client before the message
