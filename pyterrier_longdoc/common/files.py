"""Read and write files safely, and import optional libraries."""

from __future__ import annotations

import gzip
import importlib
import itertools
import json
import os
import platform
import re
import shutil
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from functools import lru_cache
from hashlib import blake2b
from json import JSONDecodeError
from pathlib import Path
from typing import Any

MARKER = ".pyterrier_longdoc"
"""An empty file in each folder of this package: others' files of the same names are not ours to replace."""

_DAMAGE = (AttributeError, LookupError, RecursionError, TypeError, UnicodeError, JSONDecodeError)
_DAY = 24 * 60 * 60
_NUMBERS = itertools.count()
_ROWS_AT_ONCE = 64  # of a Parquet file; some published documents have a megabyte


# Folders and files of this package.


def claim(folder: Path) -> None:
    """Create a folder for this package and mark it; raise ValueError for files, and for folders of others."""
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"{str(folder)!r} is a file: choose a new folder")
    names = [path.name for path in folder.glob("[!.]*")]
    if names and not (folder / MARKER).is_file():
        raise ValueError(f"{str(folder)!r} contains other files, such as {min(names)!r}: choose a new folder")
    folder.mkdir(parents=True, exist_ok=True)
    (folder / MARKER).touch()


@contextmanager
def undamaged(file: Path, cure: str, *errors: type[Exception]) -> Iterator[None]:
    """Turn errors in the contents of a file of this package, also `errors`, into a ValueError that names the file."""
    kinds: tuple[type[Exception], ...] = (*_DAMAGE, *errors)
    try:
        yield
    except FileNotFoundError:
        raise
    except kinds as error:
        raise ValueError(f"{str(file)!r} is damaged ({type(error).__name__}: {error}): {cure}") from error


def _temporary(path: Path) -> Path:
    """Return an unused hidden name next to `path`, named after this process.

    What other processes have left there under such a name for `path` is removed, if they have ended on this machine, or
    wrote nothing for a day.
    """
    host = platform.node()
    own_name = re.compile(rf"\.{re.escape(path.name)}\.(.*)-([0-9]+)-[0-9]+\.part")
    for left in path.parent.glob(".*-*-*.part"):
        name = own_name.fullmatch(left.name)
        if name is None:
            continue
        with suppress(FileNotFoundError):
            if not _is_running(int(name[2])) if name[1] == host else time.time() - left.stat().st_mtime > _DAY:
                _remove(left)
    return path.with_name(f".{path.name}.{host}-{os.getpid()}-{next(_NUMBERS)}.part")


def _is_running(process: int) -> bool:
    if os.name != "posix":  # other systems would end the process
        return True
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True


def _remove(path: Path) -> None:
    """Remove a file or folder, which another process may also be removing."""
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield a temporary file next to `path` that replaces it on success, once it is completely on disk.

    Its mode follows the umask, because safetensors would make it unreadable for other users.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = _temporary(path)
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
def replacing_files(folder: Path, *, last: str, old: Iterable[str] = ()) -> Iterator[Path]:
    """Yield an empty folder, whose contents move into `folder` on success, once they are completely on disk.

    The file `last` is removed first and moved last, so that it is missing after an interruption. Files and folders
    named `old` are removed; others that are not replaced stay.
    """
    claim(folder)
    temporary = _temporary(folder / "new")
    temporary.mkdir()
    try:
        yield temporary
        for file in temporary.rglob("*"):
            if file.is_file():
                _flush(file)
        new = sorted(temporary.iterdir(), key=lambda path: (path.name == last, path.name))
        (folder / last).unlink(missing_ok=True)
        for target in (folder / name for name in (*old, *(path.name for path in new))):
            if target.is_dir():
                shutil.rmtree(target)
            elif target.name in old:
                target.unlink(missing_ok=True)
        for path in new:
            os.replace(path, folder / path.name)
        _flush(folder)
    finally:
        _remove(temporary)


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
    """Return a string or Path as an absolute path, with `~` expanded; None stays None."""
    return None if path is None else type(path)(os.path.abspath(os.path.expanduser(path)))


def full_name(name: Any) -> Any:
    """Return the absolute path of an existing folder; anything else is returned unchanged."""
    return full_path(name) if isinstance(name, str | Path) and Path(full_path(name)).is_dir() else name


def folder_digest(folder: str | Path) -> str | None:
    """Return a digest of the files in a folder, except for hidden ones; None if it is not a folder."""
    if not Path(folder).is_dir():
        return None
    digest, root = blake2b(digest_size=16), Path(folder).resolve()
    for path in sorted(root.rglob("*")):
        name = path.relative_to(root)
        if path.is_file() and not any(part.startswith(".") for part in name.parts):
            digest.update(f"{name.as_posix()}\0{file_digest(path)}\0".encode())
    return digest.hexdigest()


def file_digest(path: Path) -> str:
    """Return a digest of a file's contents, which are only read again if its size or times have changed."""
    stat = path.stat()
    return _file_digest(path, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns)


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
