"""BRIGHT, MLDR, SQuAD-PosQ, FineWeb-PosQ and ColDeR, from their files as they are published on the Hugging Face hub.

All give a `PositionedCollection`. Files are found at once and read at the first use, a row at a time; documents are
copied to a temporary file, not into memory.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from hashlib import blake2b
from pathlib import Path
from typing import Any

import pandas as pd

from ..common.arguments import check_choice
from ..common.files import checked_row, read_rows
from ..common.language import token_counter
from ..common.notices import warn
from .collection import Parts, PositionedCollection
from .files import SpooledDocuments, counted_anew, unique_rows

_TABLE = re.compile(r"(.+?)(?:-\d+-of-(\d+))?(\.parquet|\.jsonl|\.jsonl\.gz)")
"""Name of a table, number of its parts if it has several, and format."""

_NOT_EXCLUDED = "N/A"
"""What BRIGHT writes in place of an excluded document where there is none."""

SQUAD_GROUPS = {
    f"{low}-{high}": (low, high)
    for low, high in ((0, 100), (100, 200), (200, 300), (300, 400), (400, 500), (500, 3120))
}
"""First characters of an answer, both ends included (Zeng et al. 2025)."""

THIRDS = {"beginning": 0, "middle": 1, "end": 2}
"""The thirds of a passage that FineWeb-PosQ tells of."""

_EARLIER_NAMES = {"before": "beginning", "after": "end"}
"""Names of thirds in the collection's first release (May 2025)."""

PREFERRED = {
    "foil": "document_2",
    "answer_importance": "document_1",
    "brevity_bias": "document_2",
    "literal_bias": "document_2",
    "position_bias": "document_2",
    "repetition_bias": "document_2",
    "poison": "document_2",
}
"""Subsets of ColDeR, and which document of a pair is to have the higher score."""

Rows = Iterator[tuple[str, dict[str, Any]]]


def read_bright(
    folder: str | Path,
    domain: str,
    *,
    documents: str = "long_documents",
    queries: str = "examples",
    tokenizer: Any = None,
) -> PositionedCollection:
    """Reads a domain of BRIGHT (Su et al. 2025), by default its long documents: whole web pages.

    Each domain is a collection of its own: the names of its queries, numbers, are those of other queries elsewhere.
    Documents that must not be returned for a query, `excluded_ids`, are in `excluded`; among `long_documents` there
    are none.

    Args:
        folder: the files of `xlangai/BRIGHT`, in the folders that they have there.
        domain: such as "biology"; eight of the twelve have long documents.
        documents: "long_documents", judged by `gold_ids_long`, or "documents", their parts, judged by `gold_ids`; each
            has `id, content`.
        queries: folder of the queries, `id, query`: "examples", or "gpt4_reason" and the like, written by a language
            model that reasoned about them.
        tokenizer: for statistics, see `token_counter`.

    Raises:
        FileNotFoundError: if a file is missing.
        ValueError: when it is first used, if a row is malformed or an id is there twice.
        ImportError: when it is first used, without pyarrow, if files are in the Parquet format.
    """
    check_choice("documents", documents, ("long_documents", "documents"))
    of_documents, of_queries = (
        _tables(folder, f"{table}/{domain}", "xlangai/BRIGHT") for table in (documents, queries)
    )
    gold = "gold_ids_long" if documents == "long_documents" else "gold_ids"
    parts = partial(_bright, of_documents, of_queries, gold)
    return PositionedCollection(f"bright-{domain}", parts, tokenizer=tokenizer, papers=("su-2024-bright",))


def _bright(documents: list[Path], queries: list[Path], gold: str) -> Parts:
    rows = unique_rows(_bright_rows(queries, gold), "id")
    excluded = [(qid, docno) for qid, row in rows.items() for docno in row["excluded"] if docno != _NOT_EXCLUDED]
    judged = [(qid, docno, 1) for qid, row in rows.items() for docno in row["relevant"]]
    return Parts(
        _with_all(_documents(documents, "id", "content"), judged),
        _topics((qid, row["query"]) for qid, row in rows.items()),
        _qrels(judged),
        excluded=pd.DataFrame(excluded, columns=["qid", "docno"], dtype=str),
    )


def _bright_rows(files: list[Path], gold: str) -> Rows:
    for where, row in _rows(files, ("id", "query")):
        names = {"relevant": _names(where, row, gold), "excluded": _names(where, row, "excluded_ids")}
        yield where, {"id": row["id"], "query": row["query"], **names}


def _names(where: str, row: dict[str, Any], field: str) -> list[str]:
    names = row.get(field)
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise ValueError(f"{where}: field {field!r} must be a list of strings, got {names!r}")
    return names


def read_mldr(
    folder: str | Path, *, splits: Sequence[str] | None = None, tokenizer: Any = None
) -> PositionedCollection:
    """Reads MLDR in one language (Chen et al. 2024): questions about a paragraph of a long document.

    Topics and qrels have a variant for each split. Those of the training have judged negatives, with the label 0.

    Args:
        folder: of a language, such as `mldr-v1.0-en` of `Shitao/MLDR`, with `corpus.jsonl.gz` (`docid, text`) and
            `train.jsonl.gz`, `dev.jsonl.gz` or `test.jsonl.gz` (`query_id, query, positive_passages,
            negative_passages`, which have a `docid`).
        splits: to read; None takes those that are there. "test" is the default variant if it is read. The training
            topics of English are in 1.3 GB, since the text of each passage stands there, too.
        tokenizer: for statistics, see `token_counter`.

    Raises:
        FileNotFoundError: if a file is missing.
        ValueError: if a split is unknown; when it is first used, if a row is malformed or a name is there twice.
    """
    hub, known = "Shitao/MLDR", ("train", "dev", "test")
    for split in splits or ():
        check_choice("splits", split, known)
    corpus = _tables(folder, "corpus", hub)
    files = {split: _tables(folder, split, hub, needed=splits is not None) for split in splits or known}
    there = {split: of_split for split, of_split in files.items() if of_split}
    if not there:
        raise FileNotFoundError(f"{folder} holds no topics: {_expected('test')}; {_advice(hub)}")
    default = "test" if "test" in there else None
    parts = partial(_mldr, corpus, there)
    return PositionedCollection(
        "mldr", parts, tokenizer=tokenizer, default=default, variants=there, papers=("chen-2024-m3",)
    )


def _mldr(corpus: list[Path], files: dict[str, list[Path]]) -> Parts:
    judged: list[tuple[str, str, int]] = []
    splits: dict[str, list[str]] = {split: [] for split in files}
    rows = unique_rows((row for split in files for row in _mldr_rows(files[split], split)), "query_id")
    for qid, row in rows.items():
        splits[row["split"]].append(qid)
        judged += [(qid, docno, label) for docno, label in row["judged"]]
    topics = _topics((qid, row["query"]) for qid, row in rows.items())
    return Parts(_with_all(_documents(corpus, "docid", "text"), judged), topics, _qrels(judged), splits=splits)


def _mldr_rows(files: list[Path], split: str) -> Rows:
    """The rows without the texts of their passages."""
    for where, row in _rows(files, ("query_id", "query")):
        judged = []
        for field, label in (("positive_passages", 1), ("negative_passages", 0)):
            passages = row.get(field)
            if not isinstance(passages, list):
                raise ValueError(f"{where}: field {field!r} must be a list of passages, got {str(passages)[:80]!r}")
            judged += [(checked_row(where, passage, ("docid",))["docid"], label) for passage in passages]
        yield where, {"query_id": row["query_id"], "query": row["query"], "split": split, "judged": judged}


def read_squad_posq(folder: str | Path, *, tokenizer: Any = None) -> PositionedCollection:
    """Reads SQuAD-PosQ (Zeng et al. 2025): the answerable questions of SQuAD 2.0 by the place of their answer.

    The documents are all passages of SQuAD 2.0, training and validation; their names are of this package, since they
    have none. The first answer of a question is the relevant passage of `gold`; its `position` is the first of the
    groups that the question is in. Topics and qrels have a variant for each of the paper's groups of first characters,
    "0-100" to "500-3120", both ends included. In one thing this differs from the paper's code: a question that is asked
    of several passages counts for its own, not for the last of them.

    Args:
        folder: the files of `rajpurkar/squad_v2`: `squad_v2/train-00000-of-00001.parquet` and
            `squad_v2/validation-00000-of-00001.parquet`, with `id, question, context, answers`.
        tokenizer: in whose tokens lengths and positions are, see `token_counter`.

    Raises:
        FileNotFoundError: if a file is missing.
        ValueError: when it is first used, if a row is malformed, an answer is not where it is said to be, or an id
            is there twice.
        ImportError: when it is first used, without pyarrow, if files are in the Parquet format.
    """
    tables = ("squad_v2/train", "squad_v2/validation")
    files = [file for table in tables for file in _tables(folder, table, "rajpurkar/squad_v2")]
    parts = partial(_squad, files, tokenizer)
    return PositionedCollection(
        "squad-posq", parts, tokenizer=tokenizer, variants=SQUAD_GROUPS, papers=("zeng-2025-empirical",)
    )


def _squad(files: list[Path], tokenizer: Any) -> Parts:
    documents, rows = _with_passages(_rows(files, ("id", "question", "context")), "context", _answer)
    questions = unique_rows(rows, "qid")
    splits = {
        label: [qid for qid, row in questions.items() if low <= row["start"] <= high]
        for label, (low, high) in SQUAD_GROUPS.items()
    }
    first_of = {qid: label for label, qids in reversed(splits.items()) for qid in qids}
    labelled = {qid: {**row, "position": first_of.get(qid, "")} for qid, row in questions.items()}
    return _positioned(documents, labelled, splits, tokenizer)


def _answer(where: str, row: dict[str, Any]) -> dict[str, Any] | None:
    answers = row.get("answers")
    match answers:
        case {"text": [], "answer_start": []}:
            return None
        case {"text": [str(text), *_], "answer_start": [int(start), *_]}:
            end = start + len(text)
            if start < 0 or row["context"][start:end] != text:
                found = row["context"][max(start, 0) : end]
                raise ValueError(
                    f"{where}: 'answers' has {text!r} at character {start} of 'context', where {found!r} is"
                )
            return {"qid": row["id"], "query": row["question"], "start": start, "end": end}
    raise ValueError(f"{where}: field 'answers' must have lists 'text' and 'answer_start', got {answers!r}")


def read_fineweb_posq(path: str | Path, *, tokenizer: Any = None) -> PositionedCollection:
    """Reads FineWeb-PosQ (Zeng et al. 2025): questions about one part of a web page of 500 to 1,024 words.

    What is published of a question's place is the third of its page, or two neighbouring ones, in which the text
    stands that it was written from: `span_class`. These thirds, in characters, are the relevant passage of `gold`; in
    which unit the authors divide pages is not said. Topics and qrels have a variant for each third; a question with
    two thirds is in both, as in the paper. Names of pages and questions are of this package, since they have none. A
    row without a question is a page only.

    Args:
        path: the file of `NovaSearch/FineWeb-PosQ` or of `NovaSearch/FineWeb-PosQ_raw`, all questions before they were
            filtered, with `question, content, span_class`; or a folder in which there are no other tables.
        tokenizer: in whose tokens lengths and positions are, see `token_counter`.

    Raises:
        FileNotFoundError: if there is no file.
        ValueError: when it is first used, if a row is malformed.
        ImportError: when it is first used, without pyarrow, if files are in the Parquet format.
    """
    root, hub = Path(path).expanduser(), "NovaSearch/FineWeb-PosQ"
    files = [root] if root.is_file() else _whole(root, sorted(filter(_is_table, root.rglob("*"))))
    if not files:
        raise FileNotFoundError(f"{root} is no file and holds none: {_expected('*')}; {_advice(hub)}")
    return PositionedCollection(
        "fineweb-posq",
        partial(_fineweb, files, tokenizer),
        tokenizer=tokenizer,
        variants=THIRDS,
        papers=("zeng-2025-empirical",),
    )


def _fineweb(files: list[Path], tokenizer: Any) -> Parts:
    documents, rows = _with_passages(_rows(files, ("content",)), "content", _thirds)
    questions = {f"q{number}": row for number, (_, row) in enumerate(rows)}
    splits = {third: [qid for qid, row in questions.items() if third in row["thirds"]] for third in THIRDS}
    return _positioned(documents, questions, splits, tokenizer)


def _thirds(where: str, row: dict[str, Any]) -> dict[str, Any] | None:
    if not row.get("question"):
        return None
    given = row.get("span_class")
    tags: list[Any] = given if isinstance(given, list) else [given]
    thirds = [_EARLIER_NAMES.get(str(tag), str(tag)) for tag in tags]
    if not thirds or not set(thirds) <= set(THIRDS):
        raise ValueError(f"{where}: field 'span_class' must name thirds, {', '.join(THIRDS)}; got {given!r}")
    size, places = len(row["content"]), [THIRDS[third] for third in thirds]
    start, end = (size * place // len(THIRDS) for place in (min(places), max(places) + 1))
    query = checked_row(where, row, ("question",))["question"]
    return {"query": query, "start": start, "end": end, "thirds": thirds, "position": ", ".join(thirds)}


def read_colder(folder: str | Path, *, tokenizer: Any = None) -> PositionedCollection:
    """Reads ColDeR (Fayyaz et al. 2025): pairs of documents of which one exploits a bias of retrievers.

    Topics and qrels have a variant for each subset. The document that is to have the higher score has the label 1, the
    other one 0. In "foil" and "poison" only the former answers the query truly, in "answer_importance" only the former
    has the answer; in the others both have it, and the former is the one that exploits no bias. Accuracy is P@1 of
    `candidates(subset, pool="judged")`; a tie, an error in the authors' code, goes to `document_2` in trec_eval.

    Args:
        folder: the files of `mohsenfayyaz/ColDeR`: `test/foil.jsonl` and so on, with `query, document_1, document_2`;
            subsets whose files are missing are left out.
        tokenizer: for statistics, see `token_counter`.

    Raises:
        FileNotFoundError: if there is no file.
        ValueError: when it is first used, if a row is malformed.
    """
    hub = "mohsenfayyaz/ColDeR"
    files = {subset: _tables(folder, f"test/{subset}", hub, needed=False) for subset in PREFERRED}
    there = {subset: of_subset for subset, of_subset in files.items() if of_subset}
    if not there:
        raise FileNotFoundError(f"{folder} holds no subset: {_expected('test/foil')}; {_advice(hub)}")
    return PositionedCollection(
        "colder", partial(_colder, there), tokenizer=tokenizer, variants=there, papers=("fayyaz-2025-collapse",)
    )


def _colder(files: dict[str, list[Path]]) -> Parts:
    queries: dict[str, str] = {}
    splits: dict[str, list[str]] = {subset: [] for subset in files}
    judged, groups = [], {}

    def texts() -> Iterator[tuple[str, str]]:
        for subset, of_subset in files.items():
            rows = _rows(of_subset, ("query", "document_1", "document_2"))
            for number, (_, row) in enumerate(rows):
                qid = f"{subset}-{number}"
                queries[qid] = row["query"]
                splits[subset].append(qid)
                for field in ("document_1", "document_2"):
                    judged.append((qid, f"{qid}-{field}", int(field == PREFERRED[subset])))
                    groups[f"{qid}-{field}"] = subset
                    yield f"{qid}-{field}", row[field]

    return Parts(SpooledDocuments(texts()), _topics(queries.items()), _qrels(judged), splits=splits, groups=groups)


def _with_passages(
    rows: Rows, field: str, read: Callable[[str, dict[str, Any]], dict[str, Any] | None]
) -> tuple[SpooledDocuments, list[tuple[str, dict[str, Any]]]]:
    """Passages that rows repeat, each once; and what is read of the rows, with the `docno` of their passage."""
    names: dict[bytes, str] = {}
    found: list[tuple[str, dict[str, Any]]] = []

    def passages() -> Iterator[tuple[str, str]]:
        for where, row in rows:
            key = blake2b(row[field].encode("utf-8", "surrogatepass"), digest_size=16).digest()
            if key not in names:
                names[key] = f"p{len(names)}"
                yield names[key], row[field]
            question = read(where, row)
            if question is not None:
                found.append((where, {**question, "docno": names[key]}))

    return SpooledDocuments(passages()), found


def _positioned(
    documents: SpooledDocuments, questions: dict[str, dict[str, Any]], splits: dict[str, list[str]], tokenizer: Any
) -> Parts:
    """Of questions with a passage each and the characters of their answer in it; tokens are counted when asked for."""
    gold = [(qid, q["docno"], q["start"], q["end"], 0, 0, q["position"], "") for qid, q in questions.items()]
    return Parts(
        documents,
        _topics((qid, q["query"]) for qid, q in questions.items()),
        _qrels([(qid, q["docno"], 1) for qid, q in questions.items()]),
        partial(counted_anew, gold, documents, token_counter(tokenizer)),
        splits=splits,
    )


def _documents(files: list[Path], name: str, text: str) -> SpooledDocuments:
    known: dict[str, int] = {}

    def texts() -> Iterator[tuple[str, str]]:
        for where, row in _rows(files, (name, text)):
            docno, content = row[name], row[text]
            if docno not in known:
                known[docno] = hash(content)
                yield docno, content
            elif known[docno] != hash(content):
                raise ValueError(f"{where}: {name} {docno!r} is there twice, with different texts; it must be unique")

    return SpooledDocuments(texts())


def _with_all(documents: SpooledDocuments, judged: Sequence[tuple[str, str, int]]) -> SpooledDocuments:
    """The documents; warns of judged ones that are not among them."""
    missing = [docno for _, docno, _ in judged if docno not in documents]
    if missing:
        warn(
            f"{len(missing)} of {len(judged)} judged documents are not among the {len(documents)} documents that there "
            f"are, {missing[0]!r} is one: no system can find them",
            UserWarning,
        )
    return documents


def _topics(rows: Any) -> pd.DataFrame:
    return pd.DataFrame(list(rows), columns=["qid", "query"], dtype=str)


def _qrels(rows: list[tuple[str, str, int]]) -> pd.DataFrame:
    return pd.DataFrame(rows, columns=["qid", "docno", "label"]).astype({"qid": str, "docno": str, "label": int})


def _rows(files: list[Path], strings: tuple[str, ...]) -> Rows:
    return (row for file in files for row in read_rows(file, strings))


def _tables(folder: str | Path, table: str, hub: str, *, needed: bool = True) -> list[Path]:
    """The files of a table, which may be in several parts."""
    root = Path(folder).expanduser()
    beside = sorted(filter(_is_table, (root / table).parent.glob("*")))
    found = [path for path in beside if _table_of(path) == (root / table).name]
    if needed and not found:
        others = ", ".join(sorted(set(map(_table_of, beside)))) or "nothing of the kind"
        raise FileNotFoundError(f"{root} lacks {_expected(table)}; {_advice(hub)} (there is: {others})")
    return _whole(root, found)


def _table_of(path: Path) -> str:
    match = _TABLE.fullmatch(path.name)
    return match[1] if match else ""


def _is_table(path: Path) -> bool:
    return path.is_file() and bool(_table_of(path))


def _whole(root: Path, files: list[Path]) -> list[Path]:
    """The files themselves, of which none is there in another format or lacks its other parts."""
    matches = [match for path in files if (match := _TABLE.fullmatch(path.name))]
    if len({match[3] for match in matches}) > 1:
        names = ", ".join(str(path.relative_to(root)) for path in files)
        raise ValueError(f"{root} has the same table in several formats: {names}; keep one of them")
    for (table, parts), found in Counter((match[1], match[2]) for match in matches).items():
        if parts and found != int(parts):
            raise FileNotFoundError(f"{root} has {found} of the {int(parts)} parts of {table}")
    return files


def _expected(table: str) -> str:
    return f"{table}.parquet, {table}.jsonl or {table}.jsonl.gz, or parts of it ({table}-00000-of-00001.parquet)"


def _advice(hub: str) -> str:
    return f"give the folder with the files of the dataset {hub} of the Hugging Face hub, laid out as there"
