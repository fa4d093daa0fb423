"""Read and write files safely, and import optional libraries."""

from __future__ import annotations

import gzip
import importlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from functools import lru_cache
from hashlib import blake2b
from pathlib import Path
from typing import Any

_ROWS_AT_ONCE = 64  # of a Parquet file; some published documents have a megabyte


@contextmanager
def replacing(path: Path, *, only_writer: bool = False) -> Iterator[Path]:
    """Yield a temporary file next to `path` that replaces it on success, once it is completely on disk.

    Its mode follows the umask, because safetensors would make it unreadable for other users. `only_writer` means that
    no other process writes this file, so that leftovers of a killed process are overwritten.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.part" if only_writer else f".{path.name}.{os.getpid()}.part")
    temporary.unlink(missing_ok=True)
    try:
        temporary.touch()
        mode = temporary.stat().st_mode
        yield temporary
        temporary.chmod(mode)
        _flush(temporary)
        os.replace(temporary, path)
        _flush(path.parent)
    finally:
        temporary.unlink(missing_ok=True)


@contextmanager
def replacing_files(folder: Path, *, first: str, last: str, old: Iterable[str]) -> Iterator[Path]:
    """Yield an empty folder, whose contents move into `folder` on success, once they are completely on disk.

    The file `last` is removed first and moved last, so that it is missing after an interruption. Files whose names end
    in `first` are moved first. Files and folders named `old` are removed; others that are not replaced stay.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".new-", dir=folder) as temporary:
        yield Path(temporary)
        for file in Path(temporary).rglob("*"):
            if file.is_file():
                _flush(file)
        new = sorted(Path(temporary).iterdir(), key=lambda path: (path.name == last, not path.name.endswith(first)))
        (folder / last).unlink(missing_ok=True)
        for target in (folder / name for name in (*old, *(path.name for path in new))):
            if target.is_dir():
                shutil.rmtree(target)
            elif target.name in old:
                target.unlink(missing_ok=True)
        for path in new:
            os.replace(path, folder / path.name)
        _flush(folder)


def _flush(path: Path) -> None:
    """Wait until a file or the list of files in a folder is on disk."""
    if path.is_dir() and os.name != "posix":  # other systems cannot open folders
        return
    handle = os.open(path, os.O_RDONLY if path.is_dir() else os.O_RDWR)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def full_path(path: Any) -> Any:
    """Return a string or Path as an absolute path, which a later chdir does not affect; None stays None."""
    return None if path is None else type(path)(os.path.abspath(path))


def full_name(name: Any) -> Any:
    """Return the absolute path of an existing folder; anything else is returned unchanged."""
    return full_path(name) if isinstance(name, str | Path) and Path(name).is_dir() else name


def folder_digest(folder: str | Path) -> str | None:
    """Return a digest of the files in a folder, except for hidden ones; None if it is not a folder.

    A file is only read again if its size or times have changed.
    """
    if not Path(folder).is_dir():
        return None
    digest, root = blake2b(digest_size=16), Path(folder).resolve()
    for path in sorted(root.rglob("*")):
        name = path.relative_to(root)
        if path.is_file() and not any(part.startswith(".") for part in name.parts):
            stat = path.stat()
            contents = _file_digest(path, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns)
            digest.update(f"{name.as_posix()}\0{contents}\0".encode())
    return digest.hexdigest()


@lru_cache(maxsize=1024)
def _file_digest(path: Path, *_: int) -> str:
    digest = blake2b(digest_size=16)
    with path.open("rb") as file:
        while piece := file.read(2**22):
            digest.update(piece)
    return digest.hexdigest()


def read_lines(path: Path) -> Iterator[tuple[str, str]]:
    """Yield the lines of a UTF-8 file, compressed (`.gz`) or not, each with its location for messages.

    Blank lines are skipped. Form feeds and U+2028, which are allowed in JSON strings, do not end a line.
    """
    with (gzip.open if path.suffix == ".gz" else open)(path, "rt", encoding="utf-8-sig") as stream:
        for number, line in enumerate(stream, start=1):
            if line.strip():
                yield f"{path}:{number}", line.rstrip("\n")


def read_jsonl(path: Path, strings: Iterable[str] = ()) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the JSON objects of a file with one object per line, compressed or not, each with its location.

    Raises ValueError for lines that are not JSON, or if a field in `strings` is missing or not a string.
    """
    for place, line in read_lines(path):
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            raise ValueError(f"{place}: not a JSON object ({error}): {line[:80]!r}") from None
        yield place, checked_row(place, row, strings)


def read_rows(path: Path, strings: Iterable[str] = ()) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield rows like `read_jsonl`, also of Parquet files (`.parquet`)."""
    if path.suffix != ".parquet":
        yield from read_jsonl(path, strings)
        return
    parquet = import_extra("pyarrow.parquet", "disk", f"{path} is a Parquet file, which needs pyarrow")
    with parquet.ParquetFile(path) as file:
        rows = (row for batch in file.iter_batches(_ROWS_AT_ONCE) for row in batch.to_pylist())
        for number, row in enumerate(rows, start=1):
            place = f"{path}, row {number}"
            yield place, checked_row(place, row, strings)


def checked_row(place: str, row: Any, strings: Iterable[str]) -> dict[str, Any]:
    """Return the row; raise ValueError with its location if it is not a dict or a field is not a string."""
    names = [repr(name) for name in strings if not (isinstance(row, dict) and isinstance(row.get(name), str))]
    if names or not isinstance(row, dict):
        rule = f"field {names[0]} must be a string" if names else "there must be fields"
        raise ValueError(f"{place}: {rule} of a JSON object, got {str(row)[:80]!r}")
    return row


def write_lines(path: Path, lines: Iterable[str]) -> None:
    """Write a file, compressed if its name ends in `.gz`; it appears once it is complete.

    The same lines give the same bytes.
    """
    with replacing(path) as temporary, temporary.open("wb") as raw:
        # The header of compressed files has no name and time, so that the bytes only depend on the lines.
        compressed = gzip.GzipFile("", "wb", 4, raw, mtime=0) if path.suffix == ".gz" else nullcontext(raw)
        with compressed as stream:
            stream.writelines(f"{line}\n".encode() for line in lines)


def write_jsonl(path: Path, rows: Iterable[Any]) -> None:
    """Write one JSON object per line, like `write_lines`."""
    write_lines(path, (json.dumps(row, ensure_ascii=False) for row in rows))


def import_extra(name: str, extra: str, complaint: str) -> Any:
    """Import a module that an extra of this package installs; if it is missing, the error says how to install it."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        package = name.partition(".")[0].replace("_", "-")
        package = {"sklearn": "scikit-learn", "ray": "'ray[data]'"}.get(package, package)
        raise ImportError(f"{complaint}: pip install {package} (it is in the extra [{extra}])") from error
