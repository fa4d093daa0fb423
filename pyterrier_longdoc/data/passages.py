"""Passages from which long documents are built: loading with topics and qrels, and storage on disk."""

from __future__ import annotations

import tempfile
from array import array
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

import numpy as np
import pandas as pd
import pyterrier as pt

from ..common.frames import check_columns, relevant_pairs, strings
from ..common.language import Counter, digest

_BATCH = 2048  # texts tokenized at a time


def read_source(
    passages: Any, topics: pd.DataFrame | None, qrels: pd.DataFrame | None, variant: str | None, min_label: int
) -> tuple[Iterable[Mapping[str, Any]], pd.DataFrame, pd.DataFrame]:
    """Return passages (dicts), topics, and their relevant pairs without duplicates (`qid, docno, label`)."""
    passages = find_source(passages)
    if hasattr(passages, "get_corpus_iter"):
        topics = passages.get_topics(variant) if topics is None else topics
        qrels = passages.get_qrels(variant) if qrels is None else qrels
        passages = passages.get_corpus_iter(verbose=False)
    elif variant is not None or topics is None or qrels is None:
        raise ValueError("topics= and qrels= are needed, without variant=, if passages is not a dataset")
    if isinstance(passages, pd.DataFrame):
        passages = passages.to_dict("records")
    check_columns(topics, ("qid", "query"), "topics")
    columns = [name for name in ("qid", "query", "split") if name in topics]
    topics = topics[columns].astype(str).assign(query=strings(topics["query"], "query")).reset_index(drop=True)
    return passages, topics, relevant_pairs(topics, qrels, min_label)


def find_source(source: Any) -> Any:
    """Return the dataset with this name, from PyTerrier or ir_datasets; anything else is returned unchanged."""
    try:
        return pt.get_dataset(source) if isinstance(source, str) else source
    except KeyError:
        return pt.get_dataset(f"irds:{source}")


class TextSpool:
    """Names and texts in a temporary file, with 12 bytes of memory per text.

    The file is memory-mapped, so that threads and forked processes can read it at the same time; in a
    `tempfile.SpooledTemporaryFile` they would share one file position. Lone surrogates become question marks.
    """

    def __init__(self, rows: Iterable[tuple[str, str]]) -> None:
        self._starts, self._name_sizes = array("q", [0]), array("i")
        with tempfile.TemporaryFile() as file:
            for name, text in rows:
                head, body = name.encode("utf-8", "replace"), text.encode("utf-8", "replace")
                file.write(head + body)
                self._name_sizes.append(len(head))
                self._starts.append(self._starts[-1] + len(head) + len(body))
            file.flush()
            self._content = np.asarray(np.memmap(file, mode="r") if self._starts[-1] else np.zeros(0, dtype=np.uint8))

    def name(self, index: int) -> str:
        """Return the name of an entry."""
        start = self._starts[index]
        return self._content[start : start + self._name_sizes[index]].tobytes().decode()

    def text(self, index: int) -> str:
        """Return the text of an entry."""
        return self._content[self._starts[index] + self._name_sizes[index] : self._starts[index + 1]].tobytes().decode()

    def __len__(self) -> int:
        return len(self._name_sizes)


class PassagePool(TextSpool):
    """A passage collection that is read once; docnos and texts are stored on disk, the rest in memory.

    `locate` can find the passages in `docnos`; `check` gets their names and lengths in tokens as they are read.

    Attributes:
        tokens: `(P,)` int32, the length of each passage in tokens.
        characters: `(P,)` int32, the length of each passage in characters.
        digests: `(P,)` int64, equal for passages with the same `digest`.
    """

    def __init__(
        self,
        documents: Iterable[Mapping[str, Any]],
        *,
        count: Counter,
        text_field: str | Sequence[str] = "text",
        docnos: Container[str] = (),
        check: Callable[[str, int], None] = lambda docno, tokens: None,
    ) -> None:
        self._index_of: dict[str, int] = {}
        tokens, characters, digests = array("i"), array("i"), array("q")

        def rows() -> Iterator[tuple[str, str]]:
            pairs = (docno_and_text(document, text_field) for document in documents)
            while batch := list(islice(pairs, _BATCH)):
                sizes = count([text for _, text in batch])
                tokens.extend(sizes)
                for (docno, text), size in zip(batch, sizes, strict=True):
                    if docno in docnos:
                        check(docno, size)
                        if self._index_of.setdefault(docno, len(characters)) != len(characters):
                            raise ValueError(f"docno {docno!r} must be unique, but passages has it twice")
                    characters.append(len(text))
                    digests.append(digest(text))
                yield from batch

        super().__init__(rows())
        self.tokens = np.frombuffer(tokens, dtype=np.int32)
        self.characters = np.frombuffer(characters, dtype=np.int32)
        self.digests = np.frombuffer(digests, dtype=np.int64)

    def locate(self, pairs: pd.DataFrame) -> pd.DataFrame:
        """Add `passage` (the index; -1 if missing), `tokens` and `digest` of each `docno`."""
        passages = np.array([self._index_of.get(docno, -1) for docno in pairs["docno"]], dtype=np.int32)
        tokens, digests = np.append(self.tokens, np.int32(-1)), np.append(self.digests, np.int64(0))
        return pairs.assign(passage=passages, tokens=tokens[passages], digest=digests[passages])


def docno_and_text(document: Mapping[str, Any], text_field: str | Sequence[str]) -> tuple[str, str]:
    """Return the name and text of a document, with fields joined by a space; None and NaN are empty."""
    docno, parts = document["docno"], []
    for name in [text_field] if isinstance(text_field, str) else text_field:
        value = document.get(name, ...)
        if isinstance(value, str):
            parts.append(value)
        elif not (pd.api.types.is_scalar(value) and pd.isna(value)):
            contents = "bytes, which longdoc:irds:NAME decodes," if isinstance(value, bytes) else "no text"
            names = ", ".join(map(str, document))
            raise ValueError(f"text_field: document {docno!r} has {contents} in {name!r}; its fields are {names}")
    return str(docno), " ".join(filter(None, parts)).strip().encode("utf-8", "replace").decode()
