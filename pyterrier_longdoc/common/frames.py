"""Frames of rerankers: column checks, texts, scores, ranks and explanations."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

import numpy as np
import pandas as pd
import pyterrier as pt

from .arguments import to_scalar
from .language import is_visible

TextField = str | tuple[str, ...] | list[str]


@dataclass(frozen=True, slots=True)
class Document:
    """A text to be split into windows, and a text that is repeated in each window, such as a title."""

    text: str
    repeated: str = ""

    def __len__(self) -> int:
        return len(self.text)


@dataclass(frozen=True, slots=True)
class Question:
    """A query, and an instruction of its own for the model; None for that of the model."""

    text: str
    instruction: str | None = None


def questions(queries: Sequence[str | Question]) -> list[Question]:
    """Return queries as questions; equal ones share an object."""
    made = {query: query if isinstance(query, Question) else Question(query) for query in dict.fromkeys(queries)}
    return [made[query] for query in queries]


def documents(texts: Sequence[str | Document]) -> list[Document]:
    """Return texts as documents; equal ones share an object."""
    made = {text: text if isinstance(text, Document) else Document(text) for text in dict.fromkeys(texts)}
    return [made[text] for text in texts]


def is_blank(document: Document) -> bool:
    """Return whether a text and its title have no visible character."""
    return not (is_visible(document.text) or is_visible(document.repeated))


def join_lines(*parts: str) -> str:
    """Join the non-empty parts, each on a separate line."""
    return "\n".join(filter(None, parts))


class TruncationWarning(UserWarning):
    """Text was truncated; `coverage` of the transformer shows how much."""


class EmptyTextWarning(UserWarning):
    """Rows have no text or no query; `coverage` of the transformer shows how many."""


class SeenQueriesWarning(UserWarning):
    """A model scores queries that it was trained on. Such scores say little about other queries."""


def field_names(text_field: TextField, argument: str = "text_field") -> list[str]:
    """Return the column names in an argument with one or several names."""
    names = [text_field] if isinstance(text_field, str) else text_field
    if not isinstance(names, Sequence) or not names or not all(isinstance(name, str) and name for name in names):
        raise ValueError(f"{argument}={text_field!r} must be the name of a column, or a tuple of names")
    return list(names)


def window_fields(text_field: TextField, repeat: TextField | None) -> list[str]:
    """Return the text columns that are split into windows: all but the repeated ones."""
    fields, repeated = field_names(text_field), [] if repeat is None else field_names(repeat, "repeat")
    others = [name for name in fields if name not in repeated]
    if not others or not set(repeated) <= set(fields):
        raise ValueError(
            f"repeat={repeat!r} must be some but not all columns of text_field={text_field!r}, e.g. "
            f"text_field=('title', 'text') and repeat='title'"
        )
    return others


def check_windows(results: pd.DataFrame, text_field: TextField, repeat: TextField | None = None) -> None:
    """Raise ValueError if the windows in explained results are from other columns than those of the arguments."""
    own = " ".join(window_fields(text_field, repeat))
    for name in set(results["window_field"].dropna()) - {own} if "window_field" in results else ():
        whose = (
            f"{name!r}, not of {own!r}: set text_field= accordingly"
            if name
            else "texts that Evidence or Passages replaced: use the results before it"
        )
        raise ValueError(f"the windows in the results are those of {whose}")


def digest_of_text(text: str) -> str:
    """Return a fingerprint of the text that is split into windows, ignoring white space at its end."""
    return blake2b(text.rstrip().encode(), digest_size=8).hexdigest()


def digest_of_query(query: Question) -> str:
    """Return a fingerprint of the query without its instruction, by which a model recognises its training queries."""
    return blake2b(query.text.encode(), digest_size=8).hexdigest()


def with_windows_in(results: pd.DataFrame, texts: Iterable[str]) -> pd.DataFrame:
    """Map the windows of explained results to these texts, one per row.

    Windows of a passage are moved to the place of the passage in the text, given by `passage_span`. Raises ValueError
    for windows of another text.
    """
    if "window_digest" not in results:
        return results
    spans = results["passage_span"] if "passage_span" in results else [None] * len(results)
    rows = zip(results["docno"], results["window_digest"], spans, texts, strict=True)
    shifts = np.array([_shift(*row) for row in rows], dtype="int64")
    if not shifts.any():
        return results
    moved = {name: results[name] + shifts for name in ("best_start", "best_end") if name in results}
    for name, ends in (("window_spans", slice(0, 2)), ("term_places", slice(1, 3))):
        if name in results:
            values = [_moved(*row, ends) for row in zip(results[name], shifts.tolist(), strict=True)]
            moved[name] = pd.Series(values, index=results.index, dtype=object)
    return results.assign(**moved)


def _shift(docno: Any, digest: Any, span: Any, text: str) -> int:
    """Return the character of `text` at which the text of the windows begins."""
    if not isinstance(digest, str) or digest_of_text(text) == digest:  # not a string: a row of a union without windows
        return 0
    if np.ndim(span) and digest_of_text(text[slice(*span)]) == digest:
        return int(span[0])
    raise ValueError(
        f"the windows of {docno!r} belong to another text, e.g. a passage of it: use the text of the reranker, or "
        f"split documents with ld.Passages(), which stores the places of passages"
    )


def _moved(parts: Any, shift: int, ends: slice) -> Any:
    """Shift spans, or tuples with a span at `ends`, by this number of characters."""
    if not shift or not np.ndim(parts):
        return parts
    return [(*part[: ends.start], *(int(end) + shift for end in part[ends]), *part[ends.stop :]) for part in parts]


_NO_TEXTS = ("qid", "query", "docno", "docid", "score", "rank", "query_0")
"""Columns that are never taken for the text of a document."""


def validated(
    inp: pd.DataFrame, text_field: TextField, text_loader: Any, context: pt.Transformer, *, extra: Sequence[str] = ()
) -> list[str]:
    """Check the columns of a result frame (including `extra` ones) and its qids; return the text columns."""
    fields = field_names(text_field)
    if inp.columns.has_duplicates:
        twice = sorted({str(name) for name in inp.columns[inp.columns.duplicated()]})
        raise ValueError(f"the input has {_columns(twice)} more than once: rename or drop all but one")
    try:
        with pt.validate.any(inp, context=context) as v:
            v.result_frame(["query", *fields, *extra], mode="text")
            if text_loader is not None:
                v.result_frame(["query", *extra], mode="text_loader")
    except pt.validate.InputValidationError as error:
        absent = [name for name in ("qid", "docno", "query", *extra, *fields) if name not in inp]
        name = type(context).__name__
        if "docno" in absent and "query" in inp:
            advice = f"put a first stage before it, e.g. BM25 ({error.args[0]})"
            error.args = (f"{name} reranks documents, but its input has topics without {_columns(absent)}: {advice}",)
        elif text_loader is None and absent and set(absent) <= set(fields):
            advice = f"put dataset.text_loader() before it, or set text_loader= or text_field= ({error.args[0]})"
            texts = inp.columns.difference(_NO_TEXTS, sort=False)
            texts = [other for other in texts if len(inp) and isinstance(inp[other].iloc[0], str)]
            if texts:
                longest = max(texts, key=lambda other: len(inp[other].iloc[0]))
                advice = f"set text_field={longest!r} if this is the text; otherwise, {advice}"
            error.args = (f"{name} lacks the text {_columns(absent)}: {advice}",)
        raise
    check_qids(inp)
    return fields


def check_qids(results: pd.DataFrame) -> None:
    """Raise ValueError if rows have no qid."""
    absent = results["qid"].isna()
    if absent.any():
        docnos = results.loc[absent, "docno"]
        rows = f"{len(docnos)} of {len(results)} rows, e.g. that of docno {str(docnos.iloc[0])!r}"
        raise ValueError(f"the column 'qid' is empty in {rows}: give each query a qid, or leave these rows out")


def texts_of(inp: pd.DataFrame, fields: list[str], text_loader: Any) -> list[str]:
    """Return the text columns of each row, joined by a space; `text_loader` loads them if one is missing."""
    frame = inp if set(fields) <= set(inp.columns) else with_text(inp, fields, text_loader)
    if len(fields) == 1:
        return strings(frame[fields[0]], fields[0])
    columns = [strings(frame[name], name) for name in fields]
    return [" ".join(filter(None, parts)) for parts in zip(*columns, strict=True)]


def documents_of(
    inp: pd.DataFrame, text_field: TextField, repeat: TextField | None, text_loader: Any
) -> list[Document]:
    """Return the document of each row: its text, like `texts_of`, and each repeated column as a line."""
    fields = field_names(text_field)
    if repeat is None:
        return documents(texts_of(inp, fields, text_loader))
    frame = inp if set(fields) <= set(inp.columns) else with_text(inp, fields, text_loader)
    repeated = zip(*(strings(frame[name], name) for name in field_names(repeat)), strict=True)
    texts = texts_of(frame, window_fields(text_field, repeat), None)
    return documents([Document(text, join_lines(*parts)) for text, parts in zip(texts, repeated, strict=True)])


def first_stage_order(inp: pd.DataFrame, *ties: str) -> np.ndarray:
    """Return the positions of rows by descending `score`, ascending `rank`, columns of `ties`, and position.

    Rows without a number come last.
    """
    numbers = [name for name in ("score", "rank") if name in inp.columns]
    keys = {name: pd.to_numeric(inp[name]) for name in numbers} | {name: as_strings(inp[name]) for name in ties}
    if not keys:
        return np.arange(len(inp))
    frame = pd.DataFrame(keys).set_axis(pd.RangeIndex(len(inp)))
    ordered = frame.sort_values(list(keys), ascending=[name != "score" for name in keys], kind="stable")
    return ordered.index.to_numpy()


def with_text(inp: pd.DataFrame, fields: list[str], text_loader: Any) -> pd.DataFrame:
    """Add text columns from a text loader, or from a dataset or an index that has one.

    The loader of a dataset or an index gets each docno once, as a string, and no other column. Other loaders get all
    rows and columns; Terrier's does not get `docid`, which it would prefer, although it can belong to another index.
    """
    rows = inp.reset_index(drop=True)
    if not hasattr(text_loader, "text_loader"):
        foreign = ["docid"] if is_from_terrier(text_loader) else []
        return _loaded(rows.drop(columns=foreign, errors="ignore"), fields, text_loader)
    docnos = as_strings(rows["docno"])
    documents = _loaded(pd.DataFrame({"docno": docnos.unique()}), fields, text_loader.text_loader(fields))
    places = pd.Index(documents["docno"]).get_indexer(docnos)
    texts = repeated(documents[fields], places)
    return rows.assign(**{name: texts[name] for name in fields})


def is_from_terrier(text_loader: Any) -> bool:
    """Return whether texts come from a Terrier index, which truncates them: also from a Java `Index` or `IndexRef`."""
    java = ("org.terrier.structures.Index", "org.terrier.querying.IndexRef")
    is_java = any((cls.__module__, cls.__name__) == ("jnius", "JavaClass") for cls in type(text_loader).__mro__)
    is_index = is_java and type(text_loader).__name__.startswith(java)
    return is_index or isinstance(text_loader, pt.terrier.TerrierIndex | pt.terrier.TerrierTextLoader)


def _loaded(rows: pd.DataFrame, fields: list[str], loader: Any) -> pd.DataFrame:
    """Apply a loader to rows; ValueError unless it returns the same rows with the fields."""
    try:
        frame: pd.DataFrame = loader(rows)
    except Exception as error:
        if "ArrayIndexOutOfBoundsException" not in str(error):  # which says nothing of the missing document
            raise
        cure = "use the index of the candidates, or leave their rows out"
        raise ValueError(f"text_loader {loader!r} lacks documents of {len(rows)} rows: {cure}") from error
    absent = [name for name in fields if name not in frame.columns]
    missing = rows["docno"][~rows["docno"].isin(frame["docno"])].unique().tolist()
    if absent or missing or frame["docno"].tolist() != rows["docno"].tolist():
        lacking = ", ".join(map(repr, [*absent, *missing[:1]])) or "nothing, but their order differs"
        raise ValueError(f"text_loader {loader!r} must return its input's rows with {fields}; missing: {lacking}")
    return frame


def repeated(frame: pd.DataFrame, rows: Sequence[int] | np.ndarray) -> pd.DataFrame:
    """Return the rows at these positions with a new index; a row can occur several times.

    Columns of text become objects, which share their strings: a column of Arrow would copy a text for each row.
    """
    texts = [name for name, dtype in frame.dtypes.items() if pd.api.types.is_string_dtype(dtype)]
    return frame.astype(dict.fromkeys(texts, object)).iloc[rows].reset_index(drop=True)


def strings(column: pd.Series, name: str) -> list[str]:
    """Return a column as strings; None and NaN are empty, lone surrogates become question marks.

    Equal values share one string, so that a text in many rows is in memory once.
    """
    check_text(column, name)
    text_of = {"": ""}
    texts = []
    # One value at a time, because a list would copy all text of an Arrow column.
    for value, lacks in zip(column, column.isna(), strict=True):
        text = "" if lacks else str(value)
        if text not in text_of:
            try:
                text_of[text] = text
                text.isascii() or text.encode()
            except UnicodeEncodeError:  # tokenizers need valid Unicode, unlike truncated JSON escapes
                text_of[text] = text.encode("utf-8", "replace").decode("utf-8")
        texts.append(text_of[text])
    return texts


def check_text(column: pd.Series, name: str) -> None:
    """Raise ValueError if a text column has values other than strings, None and NaN."""
    if pd.api.types.is_string_dtype(column):
        return
    other = next((value for value in column[column.notna()] if not isinstance(value, str)), None)
    if other is not None:
        cure = "decode it" if isinstance(other, bytes) else "convert each value to a string"
        raise ValueError(f"column {name!r} holds {type(other).__name__}, not text: {cure} before reranking")


OF_WINDOWS = ("window_scores", "window_weights", "window_spans", "best_start", "best_end", "term_scores")
"""The columns in which models explain scores."""

EXPLANATION = (*OF_WINDOWS, "term_places", "window_tokenizer", "window_field", "window_digest")
"""The columns that `explain=True` adds; `term_places` is one of MaxSim."""

OWN_EXPLANATION = "explain_"
"""The prefix of the columns that a user's own encoder adds to them."""

SCORE_COLUMNS = ("score", "rank", *EXPLANATION)
"""The columns that belong to a score; new scores replace or remove them, and those with the prefix."""


def with_scores(
    inp: pd.DataFrame, scores: Sequence[float] | np.ndarray, **columns: list[Any] | np.ndarray
) -> pd.DataFrame:
    """Return a new frame with scores, ranks and other columns (objects unless they are arrays).

    Columns that belong to the scores of an earlier model are removed.
    """
    replaced = {*SCORE_COLUMNS, *columns}
    kept = [name for name in inp if name not in replaced and not str(name).startswith(OWN_EXPLANATION)]
    out = inp[kept].assign(score=np.asarray(scores, dtype="float64"))
    for name, values in columns.items():
        out[name] = pd.Series(values, index=out.index, dtype=None if isinstance(values, np.ndarray) else object)
    return pt.model.add_ranks(out, single_query=out["qid"].nunique() == 1)


def check_columns(frame: pd.DataFrame, columns: Iterable[str], owner: str) -> None:
    """Raise ValueError if columns are missing."""
    if not isinstance(frame, pd.DataFrame):
        raise ValueError(f"{owner} must be a DataFrame, not {type(frame).__name__}")
    missing = sorted(set(columns) - set(frame.columns))
    if missing:
        verb, present = "is" if len(missing) == 1 else "are", ", ".join(map(str, frame)) or "none"
        raise ValueError(f"{_columns(missing)} {verb} missing from {owner}; the columns are {present}")


def _columns(names: Sequence[str]) -> str:
    return f"column{'s' * (len(names) > 1)} {', '.join(map(repr, names))}"


def relevant_pairs(topics: pd.DataFrame, qrels: pd.DataFrame, min_label: int) -> pd.DataFrame:
    """Return `qid, docno, label` of the distinct relevant documents of the topics, in the order of the qrels."""
    check_columns(topics, ("qid",), "topics")
    check_columns(qrels, ("qid", "docno", "label"), "qrels")
    qids = as_strings(topics["qid"])
    if qids.duplicated().any():
        raise ValueError(f"topics have the qid {qids[qids.duplicated()].iloc[0]!r} more than once: keep one row")
    pairs = qrels[["qid", "docno", "label"]].assign(qid=as_strings(qrels["qid"]), docno=as_strings(qrels["docno"]))
    relevant = labels_of(qrels, "qrels") >= min_label
    pairs = pairs[relevant & pairs["qid"].isin(qids)].drop_duplicates(["qid", "docno"])
    if not len(pairs):
        raise ValueError(f"none of {len(qrels)} qrels has a label of at least {min_label} for a qid of the topics")
    return pairs.reset_index(drop=True)


def as_strings(column: pd.Series) -> pd.Series:
    """Return a column of qids or docnos as strings, because files and users can have integers."""
    return column if pd.api.types.is_string_dtype(column) else column.astype(str)


def keys_of(frame: pd.DataFrame) -> list[tuple[str, str]]:
    """Return the qid and docno of each row as strings."""
    return list(zip(frame["qid"].astype(str), frame["docno"].astype(str), strict=True))


def numeric(frame: pd.DataFrame, column: str, owner: str, advice: str, *, infinite: bool = False) -> np.ndarray:
    """Return a column of numbers, also as text, as float64; refuse other values.

    The error names the owner of the column, the first bad row (from 0) and the fix (`advice`).
    """
    values = frame[column]
    if not pd.api.types.is_numeric_dtype(values):
        values = pd.to_numeric(values.astype(object), errors="coerce")
    floats = values.to_numpy(dtype="float64", na_value=np.nan)
    bad = np.flatnonzero(np.isnan(floats) if infinite else ~np.isfinite(floats))
    if len(bad):
        row = frame.iloc[bad[0]]
        ids = ", ".join(f"{name} {str(row[name])!r}" for name in ("qid", "docno") if name in frame.columns)
        raise ValueError(
            f"{owner}: the column {column!r} holds {to_scalar(row[column])!r} in row {bad[0]} ({ids}); {len(bad)} of "
            f"{len(frame)} rows have no {'' if infinite else 'finite '}number: {advice}"
        )
    return floats


def labels_of(qrels: pd.DataFrame, owner: str) -> np.ndarray:
    """Return the labels as numbers; ValueError if a document has two different labels for a query."""
    advice = "relevance labels are numbers, e.g. 0 and 1; leave out rows that are not judged"
    labels = numeric(qrels, "label", owner, advice)
    pairs = pd.DataFrame({name: as_strings(qrels[name]).to_numpy() for name in ("qid", "docno")})
    judged = pairs.assign(label=labels).drop_duplicates()
    again = judged[judged.duplicated(["qid", "docno"])]
    if len(again):
        qid, docno, label = again.iloc[0]
        first = judged["label"][(judged["qid"] == qid) & (judged["docno"] == docno)].iloc[0]
        raise ValueError(
            f"{owner}: the document {docno!r} has the labels {first:g} and {label:g} for the query {qid!r}: keep one "
            f"label for each pair"
        )
    return labels


LARGEST_LABEL = 1_000_000
"""trec_eval needs memory for each grade up to the largest, and takes labels above 2**31 for others."""


def integer_labels(qrels: pd.DataFrame, owner: str) -> np.ndarray:
    """Return the labels as whole numbers for measures, even if a merge has converted them to floats."""
    labels = labels_of(qrels, owner)
    fractions = np.flatnonzero(labels % 1 != 0)
    if len(fractions):
        found = f"the column 'label' holds {labels[fractions[0]]:g} in row {fractions[0]}"
        raise ValueError(f"{owner}: {found}, but measures need whole numbers: round or scale the labels")
    large = np.flatnonzero(np.abs(labels) > LARGEST_LABEL)
    if len(large):
        found = f"the column 'label' holds {labels[large[0]]:g} in row {large[0]}"
        raise ValueError(f"{owner}: {found}, but measures take grades of at most {LARGEST_LABEL:,}: scale the labels")
    return labels.astype(np.int64)
