"""Frames as Arrow tables, and back: what is the same afterwards, and what is refused because it would not be."""

from __future__ import annotations

from typing import Any

import pandas as pd

from ..common.files import import_extra


def arrow(part: str = "") -> Any:
    """pyarrow, or a part of it.

    Raises:
        ImportError: if it is missing.
    """
    return import_extra(f"pyarrow.{part}".rstrip("."), "disk", "runs on disk are Parquet files, which need pyarrow")


def as_table(frame: pd.DataFrame, what: str) -> Any:
    """The rows without their index.

    Args:
        frame: any.
        what: whose rows they are, for the error.

    Raises:
        ValueError: for a column that would come back as something else, or mixes types; the message names it.
    """
    pa = arrow()
    try:
        table = pa.Table.from_pandas(frame, preserve_index=False)
    except (ValueError, TypeError, NotImplementedError) as error:  # as pyarrow's are
        reason = "; ".join(map(str, error.args))
        raise ValueError(f"{what} cannot be written to disk: {reason}; drop or convert the column") from error
    for field in table.schema:
        if "struct<" in str(field.type):
            raise ValueError(
                f"{what} cannot be written to disk: the column {field.name!r} holds dictionaries, which Parquet would "
                f"fill up with each other's keys; drop it, or write it as JSON"
            )
    return table


def as_frame(table: Any) -> pd.DataFrame:
    """The rows of a table; sequences are lists, and whole numbers stay whole where some are missing."""
    pa = arrow()
    frame: pd.DataFrame = table.to_pandas(integer_object_nulls=True)
    for field in table.schema:
        if pa.types.is_list(field.type) or pa.types.is_large_list(field.type):
            frame[field.name] = pd.Series(table[field.name].to_pylist(), index=frame.index, dtype=object)
    return frame
