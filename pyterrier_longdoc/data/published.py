"""LongEmbed, BRIGHT, MLDR, SQuAD-PosQ, FineWeb-PosQ and ColDeR, from their published files.

All give a `PositionedCollection`. Files are those of the Hugging Face hub: they are found at once (FileNotFoundError)
and read at the first use, a row at a time (ValueError for a malformed row, or two with one id; ImportError for Parquet
without pyarrow). Documents are copied to a temporary file, not into memory. LongEmbed is small: it is read at once.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from hashlib import blake2b
from itertools import pairwise
from pathlib import Path
from typing import Any

import pandas as pd

from ..common.arguments import check_arguments
from ..common.files import checked_row, full_name, read_rows
from ..common.language import token_counter
from ..common.warnings import warn
from .collection import CollectionParts, PositionedCollection
from .rows import Rows, SpooledDocuments, check_field, qrels_frame, recount, topics_frame, unique_rows

_TABLE = re.compile(r"(.+?)(?:-\d+-of-(\d+))?(\.parquet|\.jsonl|\.jsonl\.gz)")
"""Name of a table, number of its parts if it has several, and format."""

_NOT_EXCLUDED = "N/A"
"""BRIGHT's entry where no document is excluded."""

SQUAD_GROUPS = {f"{low}-{high}": (low, high) for low, high in pairwise((0, 100, 200, 300, 400, 500, 3120))}
"""First characters of an answer, both ends included (Zeng et al. 2025)."""

THIRDS = {"beginning": 0, "middle": 1, "end": 2}
"""The thirds of a page, as FineWeb-PosQ names them, and their numbers."""

_BIASES = ("brevity_bias", "literal_bias", "position_bias", "repetition_bias", "poison")
PREFERRED = {"foil": "document_2", "answer_importance": "document_1", **dict.fromkeys(_BIASES, "document_2")}
"""Subsets of ColDeR, and the document of a pair that should have the higher score."""


def read_longembed(folder: str | Path, *, tokenizer: Any = None, name: str = "longembed") -> PositionedCollection:
    """Read a set of LongEmbed (Zhu et al. 2024): `needle`, `passkey`, or one of its real tasks.

    Topics and qrels have a variant for each context length. Positions are not published, so `gold` is empty.

    Args:
        folder: of a set, with the tables `corpus`, `queries` and `qrels`. Their fields are `doc_id, text`, `qid, text`
            and `qid, doc_id`; `context_length` (of documents and queries) may be absent.
        tokenizer: for statistics, see `token_counter`.
        name: of the collection.
    """
    hub = "dwzhu/LongEmbed"
    corpus = unique_rows(_rows(_tables(folder, "corpus", hub), ("doc_id", "text")), "doc_id")
    queries = unique_rows(_rows(_tables(folder, "queries", hub), ("qid", "text")), "qid")
    judgements = _rows(_tables(folder, "qrels", hub), ("qid", "doc_id"))
    splits: dict[str, list[str]] = {}
    for qid, row in queries.items():
        if "context_length" in row:
            splits.setdefault(str(row["context_length"]), []).append(qid)
    parts = CollectionParts(
        documents={docno: {"docno": docno, "text": row["text"]} for docno, row in corpus.items()},
        topics=topics_frame((qid, row["text"]) for qid, row in queries.items()),
        qrels=qrels_frame((row["qid"], row["doc_id"], 1) for _, row in judgements),
        splits=splits,
        groups={docno: str(row["context_length"]) for docno, row in corpus.items() if "context_length" in row},
    )
    return PositionedCollection(name, parts, tokenizer=tokenizer, papers=("zhu-2024-longembed",))


def read_bright(
    folder: str | Path,
    domain: str,
    *,
    documents: str = "long_documents",
    queries: str = "examples",
    tokenizer: Any = None,
) -> PositionedCollection:
    """Read a domain of BRIGHT (Su et al. 2025), by default its long documents: whole web pages.

    Each domain is a separate collection, with its own query 0. `excluded` has the documents that must not be returned
    for a query; `long_documents` have none.

    Args:
        folder: the files of `xlangai/BRIGHT`, laid out as there.
        domain: such as "biology"; eight of the twelve have long documents.
        documents: "long_documents", judged by `gold_ids_long`, or "documents", their parts, judged by `gold_ids`; each
            has `id, content`.
        queries: folder of the queries, `id, query`: "examples", or "gpt4_reason" and the like, by a language model.
        tokenizer: for statistics, see `token_counter`.
    """
    check_arguments("str", choices=("long_documents", "documents"), documents=documents)
    document_files, query_files = (
        _tables(folder, f"{table}/{domain}", "xlangai/BRIGHT") for table in (documents, queries)
    )
    gold = "gold_ids_long" if documents == "long_documents" else "gold_ids"
    parts = partial(_bright, document_files, query_files, gold)
    return PositionedCollection(f"bright-{domain}", parts, tokenizer=tokenizer, papers=("su-2024-bright",))


def _bright(documents: list[Path], queries: list[Path], gold: str) -> CollectionParts:
    rows = unique_rows(_bright_rows(queries, gold), "id")
    excluded = [(qid, docno) for qid, row in rows.items() for docno in row["excluded"] if docno != _NOT_EXCLUDED]
    judgements = [(qid, docno, 1) for qid, row in rows.items() for docno in row["relevant"]]
    return CollectionParts(
        _documents(documents, "id", "content", judgements),
        topics_frame((qid, row["query"]) for qid, row in rows.items()),
        qrels_frame(judgements),
        excluded=pd.DataFrame(excluded, columns=["qid", "docno"], dtype=str),
    )


def _bright_rows(files: list[Path], gold: str) -> Iterator[tuple[str, dict[str, Any]]]:
    for where, row in _rows(files, ("id", "query")):
        for field in (gold, "excluded_ids"):
            names = row.get(field)
            is_list = isinstance(names, list) and all(isinstance(name, str) for name in names)
            check_field(is_list, where, field, "be a list of strings", names)
        yield where, {"id": row["id"], "query": row["query"], "relevant": row[gold], "excluded": row["excluded_ids"]}


def read_mldr(
    folder: str | Path, *, splits: Sequence[str] | None = None, tokenizer: Any = None
) -> PositionedCollection:
    """Read MLDR in one language (Chen et al. 2024): questions about a paragraph of a long document.

    Topics and qrels have a variant for each split. Those of the training have judged negatives, with the label 0.

    Args:
        folder: of a language, such as `mldr-v1.0-en` of `Shitao/MLDR`, with `corpus.jsonl.gz` (`docid, text`) and
            `train.jsonl.gz`, `dev.jsonl.gz` or `test.jsonl.gz` (`query_id, query, positive_passages,
            negative_passages`, which have a `docid`).
        splits: to read; None takes all that are there. "test" is the default variant if it is read. The English
            training topics take 1.3 GB, since their files repeat the text of each passage.
        tokenizer: for statistics, see `token_counter`.
    """
    hub, choices = "Shitao/MLDR", ("train", "dev", "test")
    for split in splits or ():
        check_arguments("str", choices=choices, splits=split)
    corpus = _tables(folder, "corpus", hub)
    paths = {split: _tables(folder, split, hub, required=splits is not None) for split in splits or choices}
    files = {split: paths[split] for split in paths if paths[split]} or {"test": _tables(folder, "test", hub)}
    settings: dict[str, Any] = {"default": "test" if "test" in files else None, "papers": ("chen-2024-m3",)}
    return PositionedCollection("mldr", partial(_mldr, corpus, files), tokenizer=tokenizer, variants=files, **settings)


def _mldr(corpus: list[Path], files: dict[str, list[Path]]) -> CollectionParts:
    labels: list[tuple[str, str, int]] = []
    splits: dict[str, list[str]] = {split: [] for split in files}
    rows = unique_rows((row for split in files for row in _mldr_rows(files[split], split)), "query_id")
    for qid, row in rows.items():
        splits[row["split"]].append(qid)
        labels += [(qid, docno, label) for docno, label in row["judged"]]
    topics = topics_frame((qid, row["query"]) for qid, row in rows.items())
    return CollectionParts(_documents(corpus, "docid", "text", labels), topics, qrels_frame(labels), splits=splits)


def _mldr_rows(files: list[Path], split: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Read the rows without the texts of their passages."""
    for where, row in _rows(files, ("query_id", "query")):
        judgements = []
        for field, label in (("positive_passages", 1), ("negative_passages", 0)):
            passages = row.get(field)
            check_field(isinstance(passages, list), where, field, "be a list of passages", passages)
            judgements += [(checked_row(where, passage, ("docid",))["docid"], label) for passage in row[field]]
        yield where, {"query_id": row["query_id"], "query": row["query"], "split": split, "judged": judgements}


def read_squad_posq(folder: str | Path, *, tokenizer: Any = None) -> PositionedCollection:
    """Read SQuAD-PosQ (Zeng et al. 2025): the answerable questions of SQuAD 2.0 by the place of their answer.

    The documents are all passages of SQuAD 2.0, training and validation; they are named here. The first answer of a
    question is the relevant passage of `gold`; its `position` is the first of the groups that the question is in.
    Topics and qrels have a variant for each of the paper's groups of first characters, "0-100" to "500-3120", both ends
    included. Unlike in the paper's code, each question counts for the passage it was asked about.

    Args:
        folder: the files of `rajpurkar/squad_v2`: `squad_v2/train-00000-of-00001.parquet` and
            `squad_v2/validation-00000-of-00001.parquet`, with `id, question, context, answers`.
        tokenizer: counts the tokens of lengths and positions, see `token_counter`.
    """
    tables = ("squad_v2/train", "squad_v2/validation")
    files = [file for table in tables for file in _tables(folder, table, "rajpurkar/squad_v2")]
    parts, papers = partial(_squad, files, full_name(tokenizer)), ("zeng-2025-empirical",)
    return PositionedCollection("squad-posq", parts, tokenizer=tokenizer, variants=SQUAD_GROUPS, papers=papers)


def _squad(files: list[Path], tokenizer: Any) -> CollectionParts:
    documents, rows = _with_passages(_rows(files, ("id", "question", "context")), "context", _answer)
    questions = unique_rows(rows, "qid")
    splits = {
        label: [qid for qid, row in questions.items() if low <= row["start"] <= high]
        for label, (low, high) in SQUAD_GROUPS.items()
    }
    first_groups = {qid: label for label, qids in reversed(splits.items()) for qid in qids}
    questions = {qid: {**row, "position": first_groups.get(qid, "")} for qid, row in questions.items()}
    return _collection_parts(documents, questions, splits, tokenizer)


def _answer(where: str, row: dict[str, Any]) -> dict[str, Any] | None:
    """Return the question and the place of its answer in the passage; None for a question without an answer."""
    match row.get("answers"):
        case {"text": [], "answer_start": []}:
            return None
        case {"text": [str(text), *_], "answer_start": [int(start), *_]}:
            end = start + len(text)
            valid = start >= 0 and row["context"][start:end] == text
            check_field(valid, where, "answers", f"begin at character {start} of 'context'", text)
            return {"qid": row["id"], "query": row["question"], "start": start, "end": end}
        case answers:
            check_field(False, where, "answers", "have lists 'text' and 'answer_start'", answers)
            return None


def read_fineweb_posq(path: str | Path, *, tokenizer: Any = None) -> PositionedCollection:
    """Read FineWeb-PosQ (Zeng et al. 2025): questions about one part of a web page of 500 to 1,024 words.

    The files give the third (or two neighbouring thirds) of the page that a question is about. These thirds, in
    characters (the authors do not say their unit), are the relevant passage of `gold`.
    Topics and qrels have a variant for each third; a question with two is in both, as in the paper. Pages and questions
    are named here. A row without a question is a page only.

    Args:
        path: the file of `NovaSearch/FineWeb-PosQ` or of `NovaSearch/FineWeb-PosQ_raw`, all questions before they were
            filtered, with `question, content, span_class`; or a folder without other tables.
        tokenizer: counts the tokens of lengths and positions, see `token_counter`.
    """
    root = Path(path).expanduser()
    files = [root] if root.is_file() else _tables(root, "*", "NovaSearch/FineWeb-PosQ")
    parts = partial(_fineweb, files, full_name(tokenizer))
    papers = ("zeng-2025-empirical",)
    return PositionedCollection("fineweb-posq", parts, tokenizer=tokenizer, variants=THIRDS, papers=papers)


def _fineweb(files: list[Path], tokenizer: Any) -> CollectionParts:
    documents, rows = _with_passages(_rows(files, ("content",)), "content", _thirds)
    questions = {f"q{number}": row for number, (_, row) in enumerate(rows)}
    splits = {third: [qid for qid, row in questions.items() if third in row["thirds"]] for third in THIRDS}
    return _collection_parts(documents, questions, splits, tokenizer)


def _thirds(where: str, row: dict[str, Any]) -> dict[str, Any] | None:
    """Return the question and the thirds of the page it is about; None for a row without a question."""
    if not row.get("question"):
        return None
    value = row.get("span_class")
    tags: list[Any] = value if isinstance(value, list) else [value]
    thirds = list(map(str, tags))
    valid = bool(thirds) and set(thirds) <= set(THIRDS)
    check_field(valid, where, "span_class", f"name thirds, {', '.join(THIRDS)}", value)
    size, places = len(row["content"]), [THIRDS[third] for third in thirds]
    start, end = (size * place // len(THIRDS) for place in (min(places), max(places) + 1))
    query = checked_row(where, row, ("question",))["question"]
    return {"query": query, "start": start, "end": end, "thirds": thirds, "position": ", ".join(thirds)}


def read_colder(folder: str | Path, *, tokenizer: Any = None) -> PositionedCollection:
    """Read ColDeR (Fayyaz et al. 2025): pairs of documents, one of which exploits a bias of retrievers.

    Topics and qrels have a variant for each subset. The document that should have the higher score has the label 1, the
    other one 0. In "foil" and "poison" only the first answers the query truly, in "answer_importance" only the first
    has the answer; in the others both have it, and the first exploits no bias. Accuracy is P@1 of
    `candidates(subset, pool="judged")`; trec_eval gives a tie, an error in the authors' code, to `document_2`.

    Args:
        folder: the files of `mohsenfayyaz/ColDeR`: `test/foil.jsonl` and so on, with `query, document_1, document_2`;
            subsets whose files are missing are left out.
        tokenizer: for statistics, see `token_counter`.
    """
    hub = "mohsenfayyaz/ColDeR"
    files = {subset: _tables(folder, f"test/{subset}", hub, required=False) for subset in PREFERRED}
    tables = {subset: paths for subset, paths in files.items() if paths}
    tables = tables or {"foil": _tables(folder, "test/foil", hub)}
    papers = ("fayyaz-2025-collapse",)
    return PositionedCollection("colder", partial(_colder, tables), tokenizer=tokenizer, variants=tables, papers=papers)


def _colder(files: dict[str, list[Path]]) -> CollectionParts:
    queries: dict[str, str] = {}
    splits: dict[str, list[str]] = {subset: [] for subset in files}
    judgements, groups = [], {}

    def texts() -> Iterator[tuple[str, str, str]]:
        for subset, paths in files.items():
            rows = _rows(paths, ("query", "document_1", "document_2"))
            for number, (where, row) in enumerate(rows):
                qid = f"{subset}-{number}"
                queries[qid] = row["query"]
                splits[subset].append(qid)
                for field in ("document_1", "document_2"):
                    judgements.append((qid, f"{qid}-{field}", int(field == PREFERRED[subset])))
                    groups[f"{qid}-{field}"] = subset
                    yield where, f"{qid}-{field}", row[field]

    return CollectionParts(
        SpooledDocuments(texts()), topics_frame(queries.items()), qrels_frame(judgements), splits=splits, groups=groups
    )


def _with_passages(
    rows: Rows, field: str, read: Callable[[str, dict[str, Any]], dict[str, Any] | None]
) -> tuple[SpooledDocuments, list[tuple[str, dict[str, Any]]]]:
    """Return the passages of the rows, each once, and the questions that `read` finds, with their passages' `docno`."""
    names: dict[bytes, str] = {}
    questions: list[tuple[str, dict[str, Any]]] = []

    def passages() -> Iterator[tuple[str, str, str]]:
        for where, row in rows:
            key = blake2b(row[field].encode("utf-8", "surrogatepass"), digest_size=16).digest()
            if key not in names:
                names[key] = f"p{len(names)}"
                yield where, names[key], row[field]
            question = read(where, row)
            if question is not None:
                questions.append((where, {**question, "docno": names[key]}))

    return SpooledDocuments(passages()), questions


def _collection_parts(
    documents: SpooledDocuments, questions: dict[str, dict[str, Any]], splits: dict[str, list[str]], tokenizer: Any
) -> CollectionParts:
    """Return the parts of a collection whose questions have a passage each; tokens are counted on demand."""
    gold = [(qid, q["docno"], q["start"], q["end"], 0, 0, q["position"], "") for qid, q in questions.items()]
    return CollectionParts(
        documents,
        topics_frame((qid, q["query"]) for qid, q in questions.items()),
        qrels_frame((qid, q["docno"], 1) for qid, q in questions.items()),
        partial(recount, gold, documents, token_counter(tokenizer)),
        splits=splits,
    )


def _documents(files: list[Path], name: str, text: str, judgements: list[tuple[str, str, int]]) -> SpooledDocuments:
    """Read documents; warn of judged ones that are not among them."""
    documents = SpooledDocuments((where, row[name], row[text]) for where, row in _rows(files, (name, text)))
    missing = [docno for _, docno, _ in judgements if docno not in documents]
    if missing:
        warn(
            f"{len(missing)} of {len(judgements)} judged documents are not among the {len(documents)} documents, e.g. "
            f"{missing[0]!r}: no system can find them",
            UserWarning,
        )
    return documents


# Files.


def _rows(files: list[Path], strings: tuple[str, ...]) -> Rows:
    return (row for file in files for row in read_rows(file, strings))


def _tables(folder: str | Path, table: str, hub: str, *, required: bool = True) -> list[Path]:
    """Find the files of a table, which may be in several parts; "*" stands for all tables below the folder."""
    root = Path(folder).expanduser()
    files = root.rglob("*") if table == "*" else (root / table).parent.glob("*")
    matches = {path: match for path in sorted(files) if path.is_file() and (match := _TABLE.fullmatch(path.name))}
    paths = {path: match for path, match in matches.items() if table == "*" or match[1] == Path(table).name}
    if required and not paths:
        others = ", ".join(sorted({match[1] for match in matches.values()})) or "nothing of the kind"
        raise FileNotFoundError(
            f"{root} lacks {table}.parquet, .jsonl or .jsonl.gz, in one part or several (there is: {others}); give the "
            f"folder with the files of the dataset {hub} of the Hugging Face hub, laid out as there"
        )
    counts = Counter((match[1], match[2]) for match in paths.values())
    formats = {match[3] for match in paths.values()}
    if len(formats) > 1 or any(parts and number != int(parts) for (_, parts), number in counts.items()):
        names = ", ".join(str(path.relative_to(root)) for path in paths)
        raise FileNotFoundError(f"{root} must have all parts of {table}, in one format; it has {names}")
    return list(paths)
