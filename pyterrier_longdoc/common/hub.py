"""Checkpoints of the Hugging Face hub, also without a network."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path, PureWindowsPath
from typing import NoReturn

import huggingface_hub
from huggingface_hub.errors import EntryNotFoundError, HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

from .packaged import ENCODER, packaged_models

WITHOUT_HUB = (
    f"Without the hub, use a packaged model: CrossEncoder.load(name) for a trained one "
    f"({', '.join(packaged_models())}), or backbone={ENCODER!r} for an encoder to train."
)
"""Advice in error messages."""

_KINDS = ("json", "safetensors", "txt", "model", "metadata", "jinja", "py")
"""Suffixes of the files of a checkpoint; downloading code does not run it."""


def reachable(name: str, *, weights: bool = True) -> str:
    """Return where to load a checkpoint from: its name if the hub is reachable, else its folder in the cache.

    There is a single request, because the libraries of the hub try a dozen files, six times each, even if the
    checkpoint is in the cache. A folder is returned unchanged. Without `weights`, a copy of the tokenizer is enough.
    Raises OSError if the hub is not reachable or does not answer (5xx, 429), and the cache has no copy.
    """
    if Path(name).is_dir():
        return name
    try:
        huggingface_hub.get_hf_file_metadata(huggingface_hub.hf_hub_url(name, "config.json"))
    except HFValidationError as error:
        unreachable(name, error)
    except EntryNotFoundError:
        return name  # loading it raises the same error with details
    except Exception as error:  # noqa: BLE001 - of httpx or httpx2, depending on the version of huggingface_hub
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
    """Return a file of a checkpoint found by `reachable`; None only if the checkpoint has no such file.

    Raises ValueError for a path outside of the checkpoint, because some paths come from files of the checkpoint.
    """
    check_inside(name, path)
    if Path(name).is_dir():
        file = Path(name, path)
        return file if file.is_file() else None
    try:
        return Path(huggingface_hub.hf_hub_download(name, path))
    except LocalEntryNotFoundError as error:  # raised if the hub is not reachable
        cause = error.__cause__ or error
        raise OSError(
            f"cannot check whether {name!r} contains {path} ({type(cause).__name__}: {cause}): connect to the network, "
            f"or run 'hf download {name}' first"
        ) from None
    except EntryNotFoundError:
        return None


def check_inside(name: str, path: str) -> None:
    """Raise ValueError for a path outside of a checkpoint."""
    parts = PureWindowsPath(path)  # parses Windows and POSIX paths
    if parts.anchor or ".." in parts.parts:
        raise ValueError(f"checkpoint {name!r} names {path!r}, which is outside of the checkpoint")


def local_folder(name: str) -> str:
    """Return the folder of a checkpoint found by `reachable`; files are downloaded from the hub, but no pickles."""
    if Path(name).is_dir():
        return name
    return huggingface_hub.snapshot_download(name, allow_patterns=[f"*.{kind}" for kind in _KINDS])


def refuse_pointer(file: Path) -> None:
    """Raise ValueError for a git-LFS pointer: a few lines of text instead of the weights."""
    with file.open("rb") as stream:
        if stream.read(24) == b"version https://git-lfs.":
            raise ValueError(f"{str(file)!r} is a git-LFS pointer, not the weights: run 'git lfs pull' in its folder")


def unreachable(name: str, error: BaseException) -> NoReturn:
    """Raise OSError for a model that is not available locally if `error` prevents access to the hub."""
    if isinstance(error, HFValidationError):
        raise FileNotFoundError(f"there is no folder {name!r}, and no model on the hub has such a name") from None
    raise OSError(
        f"the model {name!r} is neither a folder nor in the cache, and the Hugging Face hub is not reachable "
        f"({type(error).__name__}: {error}). Connect to the network, or run 'hf download {name}' on a machine with a "
        f"network and copy its Hugging Face cache to this one. {WITHOUT_HUB}"
    ) from None  # otherwise a notebook would show three screens of traceback before the message
