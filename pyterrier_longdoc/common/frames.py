"""What every reranker does with frames: checks columns, gets the text, adds scores, ranks and explanations."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from hashlib import blake2b
from typing import Any

import numpy as np
import pandas as pd
import pyterrier as pt

from .arguments import plain
from .documents import Document, Text, on_lines

TextField = str | tuple[str, ...] | list[str]


class TruncationWarning(UserWarning):
    """Some text was not read; `coverage` of the transformer says how much."""


class EmptyTextWarning(UserWarning):
    """Some rows have no text, or no query; `coverage` of the transformer says how many."""


def field_names(text_field: TextField, argument: str = "text_field") -> list[str]:
    """The text columns, in order.

    Args:
        text_field: one name, or several.
        argument: where they were given, for the error.

    Raises:
        ValueError: if there is none.
    """
    names = [text_field] if isinstance(text_field, str) else text_field
    if not isinstance(names, Sequence) or not names or not all(isinstance(name, str) and name for name in names):
        raise ValueError(f"{argument}={text_field!r} must be the name of a column, or a tuple of names")
    return list(names)


def window_fields(text_field: TextField, repeat: TextField | None) -> list[str]:
    """The text columns of which windows are made: those that are not read with each of them.

    Raises:
        ValueError: if none is left, or a column to repeat is not read at all.
    """
    fields, repeated = field_names(text_field), [] if repeat is None else field_names(repeat, "repeat")
    others = [name for name in fields if name not in repeated]
    if not others or not set(repeated) <= set(fields):
        raise ValueError(
            f"repeat={repeat!r} must name some of the columns in text_field={text_field!r} and leave one, of which "
            f'windows are made, e.g. text_field=("title", "body"), repeat="title"'
        )
    return others


def validated(
    inp: pd.DataFrame, text_field: TextField, text_loader: Any, context: pt.Transformer, *, further: Sequence[str] = ()
) -> list[str]:
    """Checks the columns of a result frame, `further` ones included, and returns the text columns.

    Raises:
        pt.validate.InputValidationError: if a column is missing; the message names it and says what to do.
        ValueError: if a column stands there twice, or `text_field` names none.
    """
    fields = field_names(text_field)
    if inp.columns.has_duplicates:
        twice = sorted({str(name) for name in inp.columns[inp.columns.duplicated()]})
        raise ValueError(f"the column(s) {', '.join(twice)} stand more than once in the input: rename or drop one")
    try:
        with pt.validate.any(inp, context=context) as v:
            v.result_frame(["query", *fields, *further], mode="text")
            if text_loader is not None:
                v.result_frame(["query", *further], mode="text_loader")
    except pt.validate.InputValidationError as error:
        missing = [name for name in fields if name not in inp.columns]
        if text_loader is None and missing and {"qid", "query", "docno"} <= set(inp.columns):
            error.args = (
                f"{type(context).__name__} needs the text of the documents, but the column(s) {', '.join(missing)} "
                f"are missing (there are: {', '.join(map(str, inp.columns))}). Put a text loader before it "
                f"(retriever >> dataset.text_loader() >> {type(context).__name__}(...)), pass text_loader=, or name "
                f"the column(s) that hold the text with text_field=.",
            )
        raise
    return fields


def texts_of(inp: pd.DataFrame, fields: list[str], text_loader: Any) -> list[str]:
    """The text of each row: its text columns joined by one space; None and NaN count as empty.

    Where a text column is absent, `text_loader` supplies it.

    Raises:
        ValueError: if a column holds bytes, or the loader does not supply the text of every row.
    """
    frame = inp if set(fields) <= set(inp.columns) else with_text(inp, fields, text_loader)
    if len(fields) == 1:
        return strings(frame[fields[0]], fields[0])
    columns = [strings(frame[name], name) for name in fields]
    return [" ".join(filter(None, parts)) for parts in zip(*columns, strict=True)]


def documents_of(
    inp: pd.DataFrame, text_field: TextField, repeat: TextField | None, text_loader: Any
) -> Sequence[Text]:
    """As `texts_of`; with `repeat`, whose columns are read with each window, a line each, documents."""
    fields = field_names(text_field)
    if repeat is None:
        return texts_of(inp, fields, text_loader)
    frame = inp if set(fields) <= set(inp.columns) else with_text(inp, fields, text_loader)
    repeated = zip(*(strings(frame[name], name) for name in field_names(repeat)), strict=True)
    texts = texts_of(frame, window_fields(text_field, repeat), None)
    return [Document(text, on_lines(*own)) for text, own in zip(texts, repeated, strict=True)]


def with_text(inp: pd.DataFrame, fields: list[str], text_loader: Any) -> pd.DataFrame:
    """What a text loader, or that of a dataset or an index, makes of the rows: with the text columns, index anew.

    Raises:
        ValueError: if it does not return the same rows, or not all of the columns.
    """
    loader = text_loader.text_loader(fields) if hasattr(text_loader, "text_loader") else text_loader
    frame: pd.DataFrame = loader(inp.reset_index(drop=True))
    if len(frame) != len(inp) or frame["docno"].tolist() != inp["docno"].tolist():
        missing = inp["docno"][~inp["docno"].isin(frame["docno"])]
        of_one = f": {missing.iloc[0]!r} is missing" if len(missing) else ""
        raise ValueError(f"text_loader {loader!r} did not return the rows it was given{of_one}")
    absent = [name for name in fields if name not in frame.columns]
    if absent:
        raise ValueError(f"text_loader {loader!r} does not supply the column(s) {', '.join(absent)}")
    return frame


def with_all_text(inp: pd.DataFrame, fields: list[str], text_loader: Any, what: str, where: str) -> pd.DataFrame:
    """As `with_text`, for what is trained on: a document without any text teaches something wrong.

    Args:
        inp: rows with `docno`.
        fields: the text columns.
        text_loader: as for `with_text`.
        what: what the rows are, for the error.
        where: of what they can be left out, for the error.

    Raises:
        ValueError: as `with_text`, and if all text columns of a row are None or NaN; the message names its docno.
    """
    frame = with_text(inp, fields, text_loader)
    lacking = frame.loc[frame[fields].isna().all(axis=1), "docno"]
    if len(lacking):
        raise ValueError(
            f"text_loader {text_loader!r} has no text of {len(lacking)} {what}, e.g. {lacking.iloc[0]!r}: leave them "
            f"out of {where}"
        )
    return frame


def strings(column: pd.Series, name: str) -> list[str]:
    """A column as strings; None and NaN count as empty, halves of surrogate pairs become question marks.

    A column of objects gives its own strings; equal values of any other become one string, so that a text that stands
    in many rows is held once.

    Raises:
        ValueError: if it holds bytes.
    """
    check_no_bytes(column, name)
    missing = column.isna()
    if column.dtype == object:
        return ["" if lacks else _valid(str(value)) for value, lacks in zip(column, missing, strict=True)]
    known: dict[str, str] = {}
    found = []
    # One value at a time: a list of an Arrow column would be a copy of all of its text.
    for value, lacks in zip(column, missing, strict=True):
        text = "" if lacks else str(value)
        if text not in known:
            known[text] = _valid(text)
        found.append(known[text])
    return found


def _valid(text: str) -> str:
    """The text itself where it is valid Unicode, which cut JSON escapes are not, and which tokenizers ask for."""
    try:
        text.isascii() or text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-8", "replace").decode("utf-8")
    return text


def blank_rows(frame: pd.DataFrame, fields: list[str]) -> np.ndarray:
    """`(R,)` bool: whether all of these columns are None, NaN or white space in a row; copies no column."""
    columns = [frame[name] for name in fields]
    blank = [np.array([not str(value).strip() for value in column], dtype=bool) for column in columns]
    return np.logical_and.reduce([own | column.isna().to_numpy() for own, column in zip(blank, columns, strict=True)])


def check_no_bytes(column: pd.Series, name: str) -> None:
    """Raises ValueError if a column of text holds bytes."""
    if column.dtype == object and any(isinstance(value, bytes) for value in column):
        raise ValueError(f"column {name!r} holds bytes, not text: decode it before reranking")


def with_scores(
    inp: pd.DataFrame, scores: Sequence[float] | np.ndarray, **columns: list[Any] | np.ndarray
) -> pd.DataFrame:
    """A new frame: the input's rows, columns and index with new scores, further columns and ranks.

    Further columns keep the type of an array; a list makes a column of objects.
    """
    out = inp.drop(columns=["score", "rank", *columns], errors="ignore")
    out = out.assign(score=np.asarray(scores, dtype="float64"))
    for name, values in columns.items():
        out[name] = pd.Series(values, index=out.index, dtype=None if isinstance(values, np.ndarray) else object)
    return pt.model.add_ranks(out)


def check_columns(frame: pd.DataFrame, columns: Iterable[str], what: str) -> None:
    """Raises ValueError, naming them, if columns are missing."""
    if not isinstance(frame, pd.DataFrame):
        raise ValueError(f"{what} must be a DataFrame, not {type(frame).__name__}")
    missing = [column for column in columns if column not in frame.columns]
    if missing:
        raise ValueError(f"{what} lack the column(s) {', '.join(missing)}; they have {', '.join(map(str, frame))}")


def relevant_pairs(topics: pd.DataFrame, qrels: pd.DataFrame, min_label: int) -> pd.DataFrame:
    """`qid, docno, label` of the topics' relevant documents, each pair once, in the order of the qrels; ids as strings.

    Raises:
        ValueError: if a column is missing, a topic is there twice, labels are no numbers, or nothing is relevant.
    """
    check_columns(topics, ("qid",), "topics")
    check_columns(qrels, ("qid", "docno", "label"), "qrels")
    qids = as_strings(topics["qid"])
    if qids.duplicated().any():
        raise ValueError(f"topics hold the qid {qids[qids.duplicated()].iloc[0]!r} more than once")
    pairs = qrels[["qid", "docno", "label"]].assign(qid=as_strings(qrels["qid"]), docno=as_strings(qrels["docno"]))
    relevant = labels_of(qrels, "qrels") >= min_label
    pairs = pairs[relevant & pairs["qid"].isin(qids)].drop_duplicates(["qid", "docno"])
    if not len(pairs):
        raise ValueError(
            f"no document in qrels has a label of at least {min_label} for any qid of the topics ({len(qrels)} qrels, "
            f"{len(topics)} topics)"
        )
    return pairs.reset_index(drop=True)


def as_strings(column: pd.Series) -> pd.Series:
    """The column as strings: PyTerrier's qids and docnos, which files and users give as integers too."""
    return column if pd.api.types.is_string_dtype(column) else column.astype(str)


def keys_of(frame: pd.DataFrame) -> list[tuple[str, str]]:
    """The query and document of each row, as strings."""
    return list(zip(frame["qid"].astype(str), frame["docno"].astype(str), strict=True))


def numbers(frame: pd.DataFrame, column: str, what: str, advice: str, *, infinite: bool = False) -> np.ndarray:
    """A column as float64; numbers that are written as text are read.

    Args:
        frame: has the column.
        column: its name.
        what: whose column it is, for the error.
        advice: what to do about a value that is no number.
        infinite: whether infinity may stand there.

    Raises:
        ValueError: if a value is no number, is missing or is infinite; the message names the first one's row, from 0.
    """
    values = frame[column]
    if not pd.api.types.is_numeric_dtype(values):
        values = pd.to_numeric(values.astype(object), errors="coerce")
    found = values.to_numpy(dtype="float64", na_value=np.nan)
    bad = np.flatnonzero(np.isnan(found) if infinite else ~np.isfinite(found))
    if len(bad):
        row = frame.iloc[bad[0]]
        ids = ", ".join(f"{name} {str(row[name])!r}" for name in ("qid", "docno") if name in frame.columns)
        raise ValueError(
            f"{what}: the column {column!r} holds {plain(row[column])!r} in row {bad[0]} ({ids}), and in {len(bad)} of "
            f"{len(frame)} rows no {'' if infinite else 'finite '}number: {advice}"
        )
    return found


def labels_of(qrels: pd.DataFrame, what: str) -> np.ndarray:
    """The labels as numbers.

    Raises:
        ValueError: if one is none.
    """
    advice = "relevance labels are numbers, e.g. 0 and 1; leave out rows that are not judged"
    return numbers(qrels, "label", what, advice)


def frame_digest(frame: pd.DataFrame | None) -> str | None:
    """Of the rows and columns that a training, a score or a run may depend on, `rank` left out; None of none."""
    if frame is None:
        return None
    digest = blake2b(digest_size=16)
    names = frame.columns.map(str)
    for place in sorted(range(len(names)), key=lambda place: names[place]):
        if names[place] == "rank":
            continue
        digest.update(f"{names[place]}\0".encode())
        for value in frame.iloc[:, place].tolist():
            # Long arrays are not written out.
            shown = value.tolist() if isinstance(value, np.ndarray) else value
            digest.update(f"{shown}\0".encode("utf-8", "replace"))
    return digest.hexdigest()
