"""Checkpoints of the Hugging Face hub on a machine that may have no network."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

import huggingface_hub
from huggingface_hub.errors import EntryNotFoundError, HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

from .packaged import ENCODER, packaged_models

WITHOUT_HUB = (
    f"Without the hub there are the packaged models: LongDocReranker.load(name) restores a trained one "
    f"({', '.join(packaged_models())}), backbone={ENCODER!r} is an encoder to train."
)
"""A way out, for messages."""

WEIGHTS = (".safetensors", ".bin")
"""How names of files with weights end."""


def reachable(name: str, *, weights: bool = True) -> str:
    """Where to load a checkpoint from: by its name if the hub has it, else the folder of its copy in the cache.

    The hub is tried once. Its libraries try each of the files that a checkpoint may have, a dozen, six times with
    growing pauses, also if the checkpoint is in the cache and lacks a file that is optional.

    Args:
        name: a model on the Hugging Face hub; a folder is returned as it is.
        weights: whether a copy needs them: the cache may hold a tokenizer alone.

    Raises:
        OSError: if the hub cannot be asked, or gives no answer (5xx, 429), and the cache has no copy.
    """
    if Path(name).is_dir():
        return name
    try:
        huggingface_hub.get_hf_file_metadata(huggingface_hub.hf_hub_url(name, "config.json"))
    except (HFValidationError, EntryNotFoundError):
        return name  # whoever loads it will be told the same, in full
    except Exception as error:  # noqa: BLE001 - of requests, httpx or httpx2, by the version of the hub's client
        with suppress(LocalEntryNotFoundError):
            copy = Path(huggingface_hub.snapshot_download(name, local_files_only=True))
            if not weights or any(file.suffix in WEIGHTS for file in copy.iterdir()):
                return str(copy)
        if _tells_of_the_model(error):
            return name  # likewise
        raise unreachable(name, error) from None
    return name


def find_file(name: str, path: str) -> Path | None:
    """A file of a checkpoint; None only if the checkpoint has no such file.

    What `huggingface_hub` calls a local entry that is not found is one that could not be asked for.

    Args:
        name: as `reachable` gave it: a folder, or a model of a hub that could be asked.
        path: of the file in there.

    Raises:
        OSError: if it is not in the cache, and the hub, which was there a moment ago, does not tell whether it has it.
    """
    if Path(name).is_dir():
        file = Path(name, path)
        return file if file.is_file() else None
    try:
        return Path(huggingface_hub.hf_hub_download(name, path))
    except LocalEntryNotFoundError as error:
        cause = error.__cause__ or error
        raise OSError(
            f"the Hugging Face hub has failed in the middle of loading {name!r}: it cannot be told whether that has a "
            f"{path}, without which it might be another model ({type(cause).__name__}: {cause}). Try again, or run "
            f"'hf download {name}' first"
        ) from None
    except EntryNotFoundError:
        return None


def has_file(name: str, path: str) -> bool:
    """Whether a folder, or a model on the hub as far as that tells, has a file, which is not downloaded."""
    if Path(name).is_dir():
        return Path(name, path).is_file()
    with suppress(Exception):
        return bool(huggingface_hub.file_exists(name, path))
    return False


def unreachable(name: str, error: BaseException) -> OSError:
    """What to raise, from None, for a checkpoint that is not here and cannot be had.

    A notebook would show the hub's client, frame by frame, for three screens before the message.

    Args:
        name: a model on the Hugging Face hub.
        error: why the hub cannot be asked.
    """
    return OSError(
        f"the model {name!r} is not on this machine, and the Hugging Face hub cannot be asked for it "
        f"({type(error).__name__}: {error}). Connect to the network, or run 'hf download {name}' on a machine "
        f"that is and copy its Hugging Face cache to here. {WITHOUT_HUB}"
    )


def _tells_of_the_model(error: Exception) -> bool:
    """Whether that is the hub's answer, which it would give again, and not that it is out of order or too busy."""
    status = error.response.status_code if isinstance(error, HfHubHTTPError) else 500
    return status < 500 and status != 429
