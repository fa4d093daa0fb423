"""Passages on disk, of which only lengths and fingerprints are in memory."""

from __future__ import annotations

import os
import tempfile
from array import array
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from hashlib import blake2b
from itertools import islice
from typing import Any

import numpy as np

from pyterrier_longdoc.common.language import Counter

_BATCH = 2048  # texts that are tokenized at once
_IN_MEMORY = 1 << 24  # bytes; a larger collection moves to a temporary file


class TextSpool:
    """Names and texts, appended once and read back one at a time, from a temporary file if they are large.

    A text then costs 12 bytes of memory, however long it is. Threads and forked processes may read at the same time.
    """

    def __init__(self) -> None:
        self._memory = bytearray()
        self._file: Any = None
        self._starts = array("q", [0])
        self._name_sizes = array("i")

    def append(self, name: str, text: str) -> None:
        """Adds a text. Halves of surrogate pairs become question marks."""
        head, body = name.encode("utf-8", "replace"), text.encode("utf-8", "replace")
        self._write(head + body)
        self._name_sizes.append(len(head))
        self._starts.append(self._starts[-1] + len(head) + len(body))

    def read(self, index: int) -> tuple[str, str]:
        """Name and text of one entry."""
        content = self._read(self._starts[index], self._starts[index + 1])
        size = self._name_sizes[index]
        return content[:size].decode(), content[size:].decode()

    def _write(self, content: bytes) -> None:
        if self._file is None:
            self._memory += content
            if len(self._memory) > _IN_MEMORY:
                self._file = tempfile.TemporaryFile(buffering=0)  # noqa: SIM115 - lives as long as the spool
                self._file.write(self._memory)
                self._memory = bytearray()
        else:
            self._file.seek(0, os.SEEK_END)
            self._file.write(content)

    def _read(self, start: int, end: int) -> bytes:
        if self._file is None:
            return bytes(self._memory[start:end])
        if hasattr(os, "pread"):  # which has no position that others could move
            return os.pread(self._file.fileno(), end - start, start)
        self._file.seek(start)
        return self._file.read(end - start)

    def __len__(self) -> int:
        return len(self._name_sizes)

    def __getstate__(self) -> dict[str, Any]:
        content = self._read(0, self._starts[-1])
        return {"content": content, "starts": self._starts, "name_sizes": self._name_sizes}

    def __setstate__(self, state: Mapping[str, Any]) -> None:
        self.__init__()  # type: ignore[misc]
        self._write(state["content"])
        self._starts, self._name_sizes = state["starts"], state["name_sizes"]


class PassagePool:
    """A passage collection that is read once.

    Attributes:
        tokens: `(P,)` int32, the length of each passage.
        characters: `(P,)` int32.
        digests: `(P,)` int64, equal for passages that differ in letter case and white space only.
        index_of: docno -> position, for the passages that somebody judged.
    """

    tokens: np.ndarray
    characters: np.ndarray
    digests: np.ndarray

    def __init__(self) -> None:
        self._spool = TextSpool()
        self.index_of: dict[str, int] = {}

    @classmethod
    def read(
        cls,
        documents: Iterable[Mapping[str, Any]],
        *,
        count: Counter,
        text_field: str | Sequence[str] = "text",
        judged: Container[str] = (),
    ) -> PassagePool:
        """Reads a collection.

        Args:
            documents: dicts with `docno` and the text field(s), streamed.
            count: lengths of texts.
            text_field: one or several fields, joined by one space; None counts as empty.
            judged: docnos of which the position will be asked for.

        Raises:
            ValueError: if a field is missing or holds bytes, or a judged docno is there twice.
        """
        pool = cls()
        tokens, characters, digests = array("i"), array("i"), array("q")
        for batch in _batches((_row(document, text_field) for document in documents), _BATCH):
            tokens.extend(count([text for _, text in batch]))
            for docno, text in batch:
                if docno in judged and pool.index_of.setdefault(docno, len(characters)) != len(characters):
                    raise ValueError(f"docno {docno!r} is there twice; docnos must be unique")
                pool._spool.append(docno, text)
                characters.append(len(text))
                digests.append(digest(text))
        pool.tokens = np.frombuffer(tokens, dtype=np.int32)
        pool.characters = np.frombuffer(characters, dtype=np.int32)
        pool.digests = np.frombuffer(digests, dtype=np.int64)
        return pool

    def text(self, index: int) -> str:
        """The text of a passage, without white space around it."""
        return self._spool.read(index)[1]

    def docno(self, index: int) -> str:
        """The docno of a passage."""
        return self._spool.read(index)[0]

    def __len__(self) -> int:
        return len(self._spool)


def digest(text: str) -> int:
    """A fingerprint that letter case and white space do not change."""
    folded = " ".join(text.casefold().split()).encode("utf-8", "replace")
    return int.from_bytes(blake2b(folded, digest_size=8).digest(), "big", signed=True)


def joined_fields(document: Mapping[str, Any], text_field: str | Sequence[str]) -> str:
    """The text of a document: its fields joined by one space.

    Raises:
        ValueError: if a field is missing or no text.
    """
    names = [text_field] if isinstance(text_field, str) else list(text_field)
    parts = []
    for name in names:
        value = document.get(name, ...)
        if value is None or value != value:  # NaN, as frames have it
            value = ""
        if isinstance(value, bytes):
            raise ValueError(f"field {name!r} of {document.get('docno')!r} holds bytes; read it with longdoc:irds:...")
        if not isinstance(value, str):
            raise ValueError(
                f"document {document.get('docno')!r} has no text in field {name!r} (there are "
                f"{', '.join(map(str, document))}); name the field(s) that hold it with text_field="
            )
        parts.append(value)
    return " ".join(filter(None, parts))


def _row(document: Mapping[str, Any], text_field: str | Sequence[str]) -> tuple[str, str]:
    if document.get("docno") is None:
        raise ValueError(f"a document has no docno, only {', '.join(map(str, document))}")
    text = joined_fields(document, text_field).strip()
    return str(document["docno"]), text.encode("utf-8", "replace").decode()


def _batches(rows: Iterator[tuple[str, str]], size: int) -> Iterator[list[tuple[str, str]]]:
    take: Callable[[], list[tuple[str, str]]] = lambda: list(islice(rows, size))  # noqa: E731
    return iter(take, [])
