"""Files: replaced as a whole, read by lines; and libraries that may be missing."""

from __future__ import annotations

import gzip
import importlib
import json
import os
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from hashlib import blake2b
from pathlib import Path
from typing import Any

_ROWS_AT_ONCE = 64  # of a Parquet file; documents of a megabyte are published


@contextmanager
def replacing(path: Path, *, only_writer: bool = False) -> Iterator[Path]:
    """A temporary file beside `path` that takes its place when all has gone well and it is complete on disk.

    Its mode is the umask's, whatever writes it: safetensors would keep it from all other users.

    Args:
        path: its folder is made if need be.
        only_writer: no other process writes it, so that what a kill left half-written is written over.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.part" if only_writer else f".{path.name}.{os.getpid()}.part")
    temporary.unlink(missing_ok=True)
    try:
        temporary.touch()
        mode = temporary.stat().st_mode
        yield temporary
        temporary.chmod(mode)
        _flush(temporary, os.O_RDWR)
        os.replace(temporary, path)
        if os.name == "posix":  # elsewhere folders cannot be opened
            _flush(path.parent, os.O_RDONLY)
    finally:
        temporary.unlink(missing_ok=True)


def _flush(path: Path, mode: int) -> None:
    """Waits until a file, or a folder's list of files, is on disk and not only in memory."""
    handle = os.open(path, mode)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def file_digest(path: Path) -> str:
    """Tells whether two files have the same contents."""
    digest = blake2b(digest_size=16)
    with path.open("rb") as file:
        while piece := file.read(2**22):
            digest.update(piece)
    return digest.hexdigest()


_DIGESTS: dict[Path, tuple[tuple[int, ...], str]] = {}
_SETTLED = 2 * 10**9
"""Nanoseconds after which another write shows in the time of a file: the clock of some file systems ticks so slowly."""


def folder_digest(folder: str | Path) -> str | None:
    """Tells whether two folders have the same files, hidden ones left out; None for what is no folder.

    Files that a process has digested before are read again only if their size or times are others.
    """
    if not Path(folder).is_dir():
        return None
    digest, root = blake2b(digest_size=16), Path(folder).resolve()
    for path in sorted(root.rglob("*")):
        name = path.relative_to(root)
        if path.is_file() and not any(part.startswith(".") for part in name.parts):
            digest.update(f"{name.as_posix()}\0{_remembered_digest(path)}\0".encode())
    return digest.hexdigest()


def _remembered_digest(path: Path) -> str:
    now, stat = time.time_ns(), path.stat()
    state = (stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns, stat.st_ino)
    found, digest = _DIGESTS.get(path, (None, ""))
    if found != state:
        digest = file_digest(path)
        if now - max(stat.st_mtime_ns, stat.st_ctime_ns) > _SETTLED:
            _DIGESTS[path] = state, digest
    return digest


def read_lines(path: Path) -> Iterator[tuple[str, str]]:
    """The lines of a UTF-8 file, compressed (`.gz`) or not, each with where it stands, for messages.

    Blank lines are skipped. Form feeds and U+2028, which JSON strings may hold, end no line.
    """
    with (gzip.open if path.suffix == ".gz" else open)(path, "rt", encoding="utf-8-sig") as stream:
        for number, line in enumerate(stream, start=1):
            if line.strip():
                yield f"{path}:{number}", line.rstrip("\n")


def read_jsonl(path: Path, strings: Iterable[str] = ()) -> Iterator[tuple[str, dict[str, Any]]]:
    """The JSON objects of a file of one object a line, compressed or not, each with where it stands.

    Args:
        path: the file.
        strings: fields that must be there and be strings.

    Raises:
        ValueError: if a line is malformed or lacks a field.
    """
    for where, line in read_lines(path):
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            raise ValueError(f"{where}: not a JSON object ({error}): {line[:80]!r}") from None
        yield where, checked_row(where, row, strings)


def read_rows(path: Path, strings: Iterable[str] = ()) -> Iterator[tuple[str, dict[str, Any]]]:
    """The rows of a Parquet file (`.parquet`), or of one that `read_jsonl` reads, each with where it stands.

    Args:
        path: the file.
        strings: fields that must be there and be strings.

    Raises:
        ValueError: if the file is not what its name says, or a row lacks a field.
        ImportError: if it is a Parquet file, and pyarrow is missing.
    """
    if path.suffix != ".parquet":
        yield from read_jsonl(path, strings)
        return
    parquet = import_extra("pyarrow.parquet", "disk", f"{path} is a Parquet file, and to read it needs pyarrow")
    try:
        file = parquet.ParquetFile(path)
    except ValueError as error:  # as all of pyarrow's complaints about contents are
        raise ValueError(
            f"{path}: no Parquet file ({error}); a clone without Git LFS has pointers in place of files"
        ) from None
    with file:
        rows = (row for batch in file.iter_batches(_ROWS_AT_ONCE) for row in batch.to_pylist())
        for number, row in enumerate(rows, start=1):
            where = f"{path}, row {number}"
            yield where, checked_row(where, row, strings)


def checked_row(where: str, row: Any, strings: Iterable[str]) -> dict[str, Any]:
    """The row itself; raises ValueError, saying where, if it is no dict or one of the fields is no string."""
    if not isinstance(row, dict):
        raise ValueError(f"{where}: expected a JSON object, got {str(row)[:80]!r}")
    for name in strings:
        if not isinstance(row.get(name), str):
            raise ValueError(f"{where}: field {name!r} must be a string, got {row.get(name)!r}")
    return row


def write_lines(path: Path, lines: Iterable[str]) -> None:
    """Writes a file as a whole, compressed if its name ends in `.gz`; the same lines give the same bytes."""
    with replacing(path) as temporary, temporary.open("wb") as raw:
        # Neither name nor time in the header of compressed files, so that the bytes depend on the lines only.
        compressed = gzip.GzipFile("", "wb", 4, raw, mtime=0) if path.suffix == ".gz" else nullcontext(raw)
        with compressed as stream:
            stream.writelines(f"{line}\n".encode() for line in lines)


def write_jsonl(path: Path, rows: Iterable[Any]) -> None:
    """Writes one JSON object a line, as `write_lines` does."""
    write_lines(path, (json.dumps(row, ensure_ascii=False) for row in rows))


_PACKAGES = {"sklearn": "scikit-learn"}
"""Modules whose package has another name, but for `-` and `_`."""


def import_extra(name: str, extra: str, complaint: str) -> Any:
    """Imports a library of one of this package's extras.

    Args:
        name: of the module.
        extra: that has it, with what else goes with it.
        complaint: what the message says before the command.

    Raises:
        ImportError: if it is missing; the message says how to install it, wherever this package came from.
    """
    try:
        return importlib.import_module(name)
    except ImportError as error:
        module = name.partition(".")[0]
        package = _PACKAGES.get(module, module.replace("_", "-"))
        raise ImportError(f"{complaint}: pip install {package} (it is in the extra [{extra}])") from error
