"""Documents held in memory, and the PyTerrier pieces every collection of this package shares.

A collection of some thousand documents fits in memory, so its text loader is a dictionary look-up: nothing
is truncated (as a Terrier meta index would), and no document store has to be built first.
"""

from __future__ import annotations

import gzip
import json
import logging
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from hashlib import blake2b
from pathlib import Path
from typing import Any

import pandas as pd
import pyterrier as pt

from pyterrier_longdoc.common.presentation import HELP_URL

_log = logging.getLogger(__name__)

Documents = Mapping[str, Mapping[str, str]]
"""docno -> {"docno": ..., "text": ..., further fields}."""


class TextLoader(pt.Transformer):
    """Adds the text of each document to a frame with a ``docno`` column.

    Rows, their order, their index and all other columns are kept; a column of the same name is replaced.

    Args:
        documents: docno -> fields of the document.
        fields: Names of the fields to add, each one present in every document.
        name: Name of the collection, for messages only.
        verbose: Show a progress bar.

    Example:
        >>> loader = TextLoader({"d1": {"docno": "d1", "text": "a long document"}}, ["text"])
        >>> loader(pd.DataFrame({"qid": ["q1"], "docno": ["d1"]}))["text"].tolist()
        ['a long document']
    """

    def __init__(self, documents: Documents, fields: Sequence[str], name: str = "", *, verbose: bool = False) -> None:
        self._documents = documents
        self.fields = list(fields)
        self.name = name
        self.verbose = verbose

    def transform(self, inp: pd.DataFrame) -> pd.DataFrame:
        """Adds the fields to ``inp``.

        Args:
            inp: Any frame with a ``docno`` column, one row per document (R rows).

        Returns:
            A new frame of R rows: the columns of ``inp`` and the fields.

        Raises:
            KeyError: If a docno is not in the collection.
        """
        pt.validate.columns(inp, includes=["docno"], context=self)
        docnos = inp["docno"].tolist()
        if self.verbose:
            docnos = pt.tqdm(docnos, desc=repr(self), unit="d")
        rows = [self._lookup(docno) for docno in docnos]
        out = inp.drop(columns=self.fields, errors="ignore")
        # dtype=str keeps the column type of an empty frame equal to that of a full one.
        columns = {field: pd.Series([row[field] for row in rows], dtype=str).array for field in self.fields}
        return out.assign(**columns)

    def fuse_rank_cutoff(self, k: int) -> pt.Transformer:
        """Cuts the ranking before the texts are looked up (``loader % k``)."""
        return pt.RankCutoff(k) >> self

    def schematic(self, *, input_columns: list[str] | None = None) -> dict[str, Any]:
        """How PyTerrier draws this transformer."""
        # Named settings, since PyTerrier would otherwise print every document; and a help_url, since it
        # would otherwise look one up in its online documentation, which fails offline.
        settings = {"name": self.name, "fields": self.fields}
        return {"label": "TextLoader", "help_url": HELP_URL, "settings": settings}

    def _lookup(self, docno: object) -> Mapping[str, str]:
        try:
            return self._documents[str(docno)]
        except KeyError:
            raise KeyError(
                f"docno {docno!r} is not in the collection {self.name!r} ({len(self._documents)} documents); "
                "was the run or index made from another collection, or another version of it?"
            ) from None

    def __repr__(self) -> str:
        return f"TextLoader({self.name!r}, {self.fields!r})"


class InMemoryDataset(pt.datasets.Dataset):
    """A test collection whose documents fit in memory.

    Subclasses give ``name`` and ``_read_documents``, and their own topics and qrels.
    """

    name: str

    def _read_documents(self) -> Documents:
        """Reads all documents; called once per instance. Every document has the same fields."""
        raise NotImplementedError

    @cached_property
    def documents(self) -> Documents:
        """All documents, docno -> {"docno", "text", further fields}, in order, read at first use."""
        return self._read_documents()

    @cached_property
    def _loaders(self) -> dict[tuple[tuple[str, ...], bool], TextLoader]:
        return {}

    def get_corpus_iter(self, *, verbose: bool = True) -> pt.model.IterDict:
        """Iterates over the documents, for indexing.

        Args:
            verbose: Show a progress bar.

        Returns:
            A sized iterator of ``{"docno": ..., "text": ..., ...}``.
        """
        documents = self.documents

        def generate() -> Iterator[dict[str, str]]:
            rows = documents.values()
            for row in pt.tqdm(rows, desc=f"{self.name} documents") if verbose else rows:
                yield dict(row)

        return pt.utils.GeneratorLen(generate(), len(documents))

    def text_loader(self, fields: Sequence[str] | str = "*", *, verbose: bool = False) -> pt.Transformer:
        """A transformer that adds the document texts to any frame with a ``docno`` column.

        The same arguments give the same object, so that ``pt.Experiment(..., plan="tree")`` sees that
        pipelines share it.

        Args:
            fields: ``"*"`` for all fields, or one or several of their names.
            verbose: Show a progress bar.

        Raises:
            ValueError: If the collection has no such field.
        """
        available = [field for field in next(iter(self.documents.values()), {"text": ""}) if field != "docno"]
        wanted = available if fields == "*" else [fields] if isinstance(fields, str) else list(fields)
        unknown = [field for field in wanted if field not in available]
        if unknown:
            raise ValueError(f"{self!r} has no field {unknown[0]!r}; its fields are {available}")
        key = (tuple(wanted), verbose)
        if key not in self._loaders:
            self._loaders[key] = TextLoader(self.documents, wanted, self.name, verbose=verbose)
        return self._loaders[key]


def kept_rows(name: str, recipe: Mapping[str, Any], build: Callable[[], list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """Rows that are expensive to build, kept on disk between runs.

    They are kept in the folder ``longdoc`` of PyTerrier's home, one file for each recipe. A damaged file is
    built again; a folder that cannot be written costs a warning, and the build in every run.

    Args:
        name: Beginning of the file's name.
        recipe: All that the rows depend on (versions, parameters), as JSON knows it.
        build: Makes the rows, each of them JSON too.
    """
    key = json.dumps(recipe, sort_keys=True)
    digest = blake2b(key.encode(), digest_size=8).hexdigest()
    file = Path(pt.io.pyterrier_home(), "longdoc", f"{name}-{digest}.jsonl.gz")
    try:
        return _read_rows(file, key)
    except FileNotFoundError:
        _log.info("building %s into %s", name, file)
    except (OSError, EOFError, ValueError, zlib.error) as error:
        _log.warning("%s is damaged (%s) and built again", file, error)
    rows = build()
    try:
        file.parent.mkdir(exist_ok=True)
        _write_rows(file, key, rows)
    except OSError as error:
        _log.warning("%s cannot be kept in %s: %s", name, file, error)
    return rows


def _read_rows(file: Path, key: str) -> list[dict[str, Any]]:
    with gzip.open(file, "rt", encoding="utf-8", newline="\n") as stream:
        if next(stream, "").rstrip("\n") != key:
            raise ValueError("its first line is not the recipe it is named after")
        return [json.loads(line) for line in stream]


def _write_rows(file: Path, key: str, rows: list[dict[str, Any]]) -> None:
    # Written aside and renamed when complete: two processes may build at the same time.
    with (
        pt.io.finalized_open(str(file), "b") as raw,
        gzip.open(raw, "wt", 4, "utf-8", newline="\n") as stream,
    ):
        stream.write(key + "\n")
        stream.writelines(json.dumps(row) + "\n" for row in rows)
