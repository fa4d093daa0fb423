"""Tables in reStructuredText."""

from __future__ import annotations

import csv

import pandas as pd

from pyterrier_longdoc.experiment import PaperTable
from pyterrier_longdoc.experiment.tables import Notation

SPECIAL: dict[str, str | int | None] = {character: f"\\{character}" for character in "\\`*_|"}
RST = Notation(lambda text: text.translate(str.maketrans(SPECIAL)), "**{}**", r"\ :sup:`{}`\ ")


def paper_table_as_rst(table: PaperTable) -> str:
    """Return a table in the papers' layout and a paragraph that explains it."""
    return f"{csv_table(table.frame(RST).reset_index())}\n\n{table.note(RST)}"


def csv_table(frame: pd.DataFrame) -> str:
    """Return a frame of texts as a table, a line for each row."""
    lines = frame.to_csv(index=False, quoting=csv.QUOTE_ALL).splitlines()
    return "\n".join([".. csv-table::", "    :header-rows: 1", "", *(f"    {line}" for line in lines)])
