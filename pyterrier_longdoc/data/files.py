"""Collections in files: a folder of one's own, MS MARCO FarRelevant and LongEmbed as published."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import pandas as pd

from ..common.files import checked_row, read_jsonl, read_lines, write_jsonl, write_lines
from ..common.language import Counter, token_counter
from .collection import GOLD_COLUMNS, Collection, Documents, Parts, PositionedCollection
from .passages import TextSpool
from .recorded import WORDS, RecordedTokenizer, recorded_tokenizers

_LAYOUT = "docs.jsonl (docno, text[, title]), topics.tsv (qid<tab>query) and qrels.txt (qid iteration docno label)"


class FolderDataset(Collection):
    """A collection read from a folder: ``pt.get_dataset("longdoc:folder:PATH")``.

    ======================  =================================================================
    ``docs.jsonl``          one JSON object a line: ``docno``, ``text`` and perhaps ``title``
    ``topics.tsv``          ``qid <tab> query``, no header
    ``qrels.txt``           TREC: ``qid iteration docno label``
    ======================  =================================================================

    Files are UTF-8 and read at the first use; blank lines are skipped. Qrels may judge documents that are
    not in ``docs.jsonl``, as TREC's often do. A document without a title has the title ``""`` where others
    have one.

    Args:
        path: The folder.

    Raises:
        FileNotFoundError: If the folder or its ``docs.jsonl`` is missing. The other two files are only
            missed when asked for.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path).expanduser()
        self.name = self.path.name
        self._file("docs.jsonl")

    def get_topics(self, variant: str | None = None) -> pd.DataFrame:
        """The topics, with columns ``qid`` and ``query``.

        Raises:
            ValueError: If a variant is asked for, or a line is malformed or repeats a qid.
        """
        self._no_variant("topics", variant)
        topics = unique_rows(_read_topics(self._file("topics.tsv")), "qid")
        return pd.DataFrame(list(topics.values()), columns=["qid", "query"], dtype=str)

    def get_qrels(self, variant: str | None = None) -> pd.DataFrame:
        """The judgements, with columns ``qid``, ``docno`` and ``label`` (int).

        Raises:
            ValueError: If a variant is asked for, or a line is malformed.
        """
        self._no_variant("qrels", variant)
        rows = _read_qrels(self._file("qrels.txt"))
        return pd.DataFrame(rows, columns=["qid", "docno", "label"]).astype({"qid": str, "docno": str, "label": int})

    @cached_property
    def documents(self) -> Documents:
        """All documents, docno -> {"docno", "text", perhaps "title"}, in order, read at the first use."""
        rows = unique_rows(_read_documents(self._file("docs.jsonl")), "docno")
        names = ["docno", "text"]
        if any("title" in row for row in rows.values()):
            names.append("title")
        return {docno: {name: row.get(name, "") for name in names} for docno, row in rows.items()}

    def _file(self, name: str) -> Path:
        file = self.path / name
        if not file.is_file():
            missing = file if self.path.is_dir() else self.path
            raise FileNotFoundError(f"{missing} is missing; a collection folder holds {_LAYOUT}")
        return file

    def _no_variant(self, component: str, variant: str | None) -> None:
        if variant is not None:
            raise ValueError(f"{self!r} has no variants of its {component}, but {variant!r} was asked for")

    def _describe_component(self, component: str) -> bool | None:
        file = {"corpus": "docs.jsonl", "topics": "topics.tsv", "qrels": "qrels.txt"}.get(component)
        return True if file and (self.path / file).is_file() else None

    def __repr__(self) -> str:
        return f"FolderDataset({str(self.path)!r})"


def _read_documents(file: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    for where, row in read_jsonl(file, ("docno", "text")):
        row = checked_row(where, row, row.keys() & {"title"})
        yield where, {name: row[name] for name in ("docno", "text", "title") if name in row}


def _read_topics(file: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    for where, line in read_lines(file):
        qid, query = (part.strip() for part in line.partition("\t")[::2])
        if not (qid and query):
            raise ValueError(f"{where}: expected 'qid<tab>query', got {line[:80]!r}")
        yield where, {"qid": qid, "query": query}


def _read_qrels(file: Path) -> Iterator[tuple[str, str, int]]:
    for where, line in read_lines(file):
        try:
            qid, _, docno, label = line.split()
            row = qid, docno, int(label)
        except ValueError:
            raise ValueError(f"{where}: expected 'qid iteration docno label', got {line[:80]!r}") from None
        yield row


def unique_rows(rows: Iterable[tuple[str, dict[str, Any]]], field: str) -> dict[str, dict[str, Any]]:
    """The rows, each with where it stands, by what must be unique among them."""
    found: dict[str, dict[str, Any]] = {}
    for where, row in rows:
        if row[field] in found:
            raise ValueError(f"{where}: {field} {row[field]!r} is there twice; it must be unique")
        found[row[field]] = row
    return found


def write_far_relevant(collection: PositionedCollection, folder: str | Path, *, verbose: bool = False) -> None:
    """Writes a collection, one document at a time; equal collections give equal bytes.

    The files are those that MS MARCO FarRelevant is released in, FlexNeuART's. Its parts are ``bitext`` (training),
    ``dev_official`` and ``dev_official_sample1K``.

    ============================================  ============================================================
    ``input_data/docs/AnswerFields.jsonl.gz``     the documents: ``DOCNO``, ``text_raw``
    ``input_data/PART/QuestionFields.jsonl``      the topics of a part: ``DOCNO`` (the qid), ``text_raw``
    ``input_data/PART/qrels.txt``                 TREC: ``qid iteration docno label``
    ``gold.jsonl``                                where relevant passages stand: the columns of ``gold``
    ``unit.jsonl``                                in whose tokens its numbers are: the tokenizer's name
    ============================================  ============================================================

    Args:
        collection: made by `far_relevant`, or any other of its kind.
        folder: is made; files in it are replaced when they are complete.
        verbose: show a progress bar.

    Raises:
        ValueError: before anything is written, if a name cannot be read back: white space in the names that qrels.txt
            has, and splits whose names are no names of folders.
    """
    _check_names(collection)
    data = Path(folder, "input_data")
    documents = (
        {"DOCNO": row["docno"], "text_raw": row["text"]} for row in collection.get_corpus_iter(verbose=verbose)
    )
    write_jsonl(data / "docs" / "AnswerFields.jsonl.gz", documents)
    for part in collection.splits or [None]:
        topics, qrels = collection.get_topicsqrels(part)
        queries = ({"DOCNO": qid, "text_raw": query} for qid, query in topics.itertuples(index=False))
        write_jsonl(data / (part or "all") / "QuestionFields.jsonl", queries)
        judged = (f"{qid} 0 {docno} {label}" for qid, docno, label in qrels.itertuples(index=False))
        write_lines(data / (part or "all") / "qrels.txt", judged)
    gold = (dict(zip(GOLD_COLUMNS, row, strict=True)) for row in collection.gold_rows())
    write_jsonl(Path(folder, "gold.jsonl"), gold)
    write_jsonl(Path(folder, "unit.jsonl"), [asdict(RecordedTokenizer.of(collection.tokenizer))])


def read_far_relevant(
    folder: str | Path, *, tokenizer: Any = None, default: str | None = None, name: str = "far-relevant"
) -> PositionedCollection:
    """Reads a collection, the released one or one that `write_far_relevant` wrote.

    The documents are copied to a temporary file, not into memory. The released collection has no `gold.jsonl`: the
    authors' own map of positions is not read.

    Args:
        folder: all files that `write_far_relevant` names are read, wherever they are below it, compressed or not; each
            folder with topics is a variant of topics and qrels.
        tokenizer: in whose tokens lengths and positions are, see `token_counter`; positions that were written in those
            of another one are counted anew, from their characters. None takes the tokenizer that was recorded when the
            collection was written, which is loaded when texts are to be counted; where none was recorded, words and
            punctuation marks are counted.
        default: the part to take if none is asked for; None takes all.
        name: of the collection.

    Returns:
        The collection; its `gold` is empty if there is no such file.

    Raises:
        FileNotFoundError: if there are no documents, no topics or no qrels.
        ValueError: if a line is malformed, two documents or topics of the same name differ, or positions were written
            in tokens of several tokenizers and none is given.
    """
    documents = SpooledDocuments((name, text) for _, name, text in _named_texts(folder, "AnswerFields.jsonl"))
    queries, splits = dict[str, str](), dict[str, list[str]]()
    for part, qid, query in _named_texts(folder, "QuestionFields.jsonl"):
        queries[qid] = query
        splits.setdefault(part, []).append(qid)
    judged = dict.fromkeys(row for file in _found(folder, "qrels.txt") for row in _read_qrels(file))
    gold_files, unit_files = (_found(folder, name, needed=False) for name in ("gold.jsonl", "unit.jsonl"))
    gold, recorded = list(_gold(gold_files)), recorded_tokenizers(unit_files)
    if tokenizer is None and len(recorded) > 1:
        raise ValueError(
            f"{folder} has positions in {' and in '.join(map(str, recorded))}: give tokenizer=, by which all of them "
            f"are counted anew"
        )
    unit = recorded[0] if tokenizer is None and recorded else RecordedTokenizer.of(tokenizer)
    all_recorded = len(unit_files) == len(gold_files) and recorded == [unit]
    as_written = all_recorded and (tokenizer is None or unit.is_named)
    known = unit if tokenizer is None and unit.tokens != WORDS else tokenizer
    parts = Parts(
        documents,
        pd.DataFrame(list(queries.items()), columns=["qid", "query"]).astype(str),
        pd.DataFrame(list(judged), columns=["qid", "docno", "label"]),
        gold if as_written else partial(counted_anew, gold, documents, token_counter(known)),
        splits=splits,
    )
    return PositionedCollection(name, parts, tokenizer=known, default=default, papers=("boytsov-2025-positional",))


def _gold(files: Iterable[Path]) -> Iterator[tuple[Any, ...]]:
    for file in files:
        for where, row in read_jsonl(file, ("qid", "docno", "position", "passage")):
            for name in ("start", "end", "first_token", "length"):
                if not isinstance(row.get(name), int):
                    raise ValueError(f"{where}: field {name!r} must be a whole number, got {row.get(name)!r}")
            yield tuple(map(row.get, GOLD_COLUMNS))


def counted_anew(gold: Iterable[tuple[Any, ...]], documents: Documents, count: Counter) -> Iterator[tuple[Any, ...]]:
    """The rows of `gold`, with `first_token` and `length` by this counter."""
    for qid, docno, start, end, _, _, position, passage in gold:
        text = documents[docno]["text"]
        # The space before a passage belongs to its first token, where tokens have spaces.
        yield qid, docno, start, end, *count([text[:start].rstrip(), text]), position, passage


def _named_texts(folder: str | Path, name: str) -> Iterator[tuple[str, str, str]]:
    """Part, name and text of all rows in files of this name."""
    known: dict[str, int] = {}
    for file in _found(folder, name):
        for where, row in read_jsonl(file, ("DOCNO", "text_raw")):
            docno, text = row["DOCNO"], row["text_raw"]
            if known.setdefault(docno, hash(text)) != hash(text):
                raise ValueError(f"{where}: {docno!r} is there twice, with different texts; names must be unique")
            yield file.parent.name, docno, text


class SpooledDocuments(Mapping[str, Mapping[str, str]]):
    """Documents in a temporary file: docno -> `docno, text`."""

    def __init__(self, rows: Iterable[tuple[str, str]]) -> None:
        self._spool = TextSpool(rows)
        self._index_of = {self._spool.name(index): index for index in range(len(self._spool))}

    def __getitem__(self, docno: str) -> Mapping[str, str]:
        return {"docno": docno, "text": self._spool.text(self._index_of[docno])}

    def __iter__(self) -> Iterator[str]:
        return iter(self._index_of)

    def __len__(self) -> int:
        return len(self._index_of)


def read_longembed(
    source: str | Path | Mapping[str, Iterable[Mapping[str, Any]]], *, tokenizer: Any = None, name: str = "longembed"
) -> PositionedCollection:
    """Reads a set of the published LongEmbed: `needle`, `passkey`, or one of its real tasks.

    Topics and qrels have a variant for each context length. Positions are not published, so `gold` is empty.

    Args:
        source: a folder with `corpus`, `queries` and `qrels` as `.jsonl` or `.jsonl.gz`; or these three as dicts, such
            as `datasets.load_dataset("dwzhu/LongEmbed", "needle")` gives them. Their fields are `doc_id, text`,
            `qid, text` and `qid, doc_id`; `context_length` (of documents and queries) may be absent.
        tokenizer: for statistics, see `token_counter`.
        name: of the collection.

    Raises:
        FileNotFoundError: if a file is missing.
        ValueError: if a line is malformed, or an id is there twice.
    """
    corpus = unique_rows(_longembed_rows(source, "corpus", ("doc_id", "text")), "doc_id")
    queries = unique_rows(_longembed_rows(source, "queries", ("qid", "text")), "qid")
    qrels = [(row["qid"], row["doc_id"], 1) for _, row in _longembed_rows(source, "qrels", ("qid", "doc_id"))]
    splits: dict[str, list[str]] = {}
    for qid, row in queries.items():
        if "context_length" in row:
            splits.setdefault(str(row["context_length"]), []).append(qid)
    parts = Parts(
        documents={docno: {"docno": docno, "text": row["text"]} for docno, row in corpus.items()},
        topics=pd.DataFrame([(qid, row["text"]) for qid, row in queries.items()], columns=["qid", "query"]),
        qrels=pd.DataFrame(qrels, columns=["qid", "docno", "label"]),
        splits=splits,
        groups={docno: str(row["context_length"]) for docno, row in corpus.items() if "context_length" in row},
    )
    return PositionedCollection(name, parts, tokenizer=tokenizer, papers=("zhu-2024-longembed",))


def _longembed_rows(source: Any, part: str, strings: tuple[str, ...]) -> Iterator[tuple[str, dict[str, Any]]]:
    if not isinstance(source, Mapping):
        folder = Path(source).expanduser()
        files = [file for file in (folder / f"{part}.jsonl", folder / f"{part}.jsonl.gz") if file.is_file()]
        if not files:
            raise FileNotFoundError(f"{folder} holds no {part}.jsonl or {part}.jsonl.gz")
        yield from read_jsonl(files[0], strings)
        return
    if part not in source:
        raise ValueError(f"source lacks {part!r}; it has {list(source)}, and corpus, queries and qrels are needed")
    for number, row in enumerate(source[part], start=1):
        where = f"{part}, row {number}"
        yield where, checked_row(where, row, strings)


def _found(folder: str | Path, name: str, *, needed: bool = True) -> list[Path]:
    root = Path(folder).expanduser()
    found = sorted([*root.rglob(name), *root.rglob(f"{name}.gz")])
    if needed and not found:
        raise FileNotFoundError(f"{root} holds no {name} or {name}.gz, in no folder below it either")
    return found


def _check_names(collection: PositionedCollection) -> None:
    for part in collection.splits:
        if part in ("", ".", "..") or "/" in part or "\\" in part:
            raise ValueError(f"split {part!r} cannot be written: it must be the name of a folder")
    qrels = collection.qrels
    for column in ("qid", "docno"):
        for name in qrels[column].unique():
            if name.split() != [name]:
                raise ValueError(f"{column} {name!r} cannot be written: names in qrels.txt must have no white space")
