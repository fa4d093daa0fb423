"""Tables as the papers print them: best in bold, superscripts for significance, gains in parentheses."""

from __future__ import annotations

import html
import string
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

if TYPE_CHECKING:
    from .results import ExperimentResults

TEST_NAMES = {
    "t": "paired t-test",
    "wilcoxon": "Wilcoxon signed-rank test",
    "randomisation": "paired randomisation test",
    "bootstrap": "paired bootstrap test",
}
LATEX_SPECIAL = {
    "\\": r"\textbackslash{}", "{": r"\{", "}": r"\}", "$": r"\$", "&": r"\&", "%": r"\%", "#": r"\#", "_": r"\_",
    "~": r"\textasciitilde{}", "^": r"\textasciicircum{}",
}  # fmt: skip
MARKDOWN_SPECIAL = {character: f"\\{character}" for character in "\\`*_{}[]<>|"}


@dataclass(frozen=True)
class Cell:
    """A system's value of a measure.

    Attributes:
        value: the mean.
        best: of its column, at the digits shown.
        marks: letters of the references that it differs from significantly.
        gain: relative to its partner, or to the first baseline where there are no partners; None without.
    """

    value: float
    best: bool
    marks: str
    gain: float | None


@dataclass(frozen=True)
class Notation:
    """How a language writes the parts of a cell."""

    escape: Callable[[str], str]
    bold: str
    superscript: str
    percent: str


MARKDOWN = Notation(lambda text: text.translate(str.maketrans(MARKDOWN_SPECIAL)), "**{}**", "<sup>{}</sup>", "%")
LATEX = Notation(lambda text: text.translate(str.maketrans(LATEX_SPECIAL)), r"\textbf{{{}}}", "$^{{{}}}$", r"\%")
HTML = Notation(html.escape, "<b>{}</b>", "<sup>{}</sup>", "%")


@dataclass(frozen=True, eq=False)
class PaperTable:
    """A table of systems by measures, for one or several test sets.

    Attributes:
        columns: `(test set, measure)`; the test set is empty if there is only one.
        cells: for each system one cell for each column; None where it was not run.
        average_gain: for each system the mean of its gains; None to leave the column out.
        note: what bold, letters and parentheses mean; every second part is a superscript.
        digits: after the point.
    """

    columns: list[tuple[str, str]]
    cells: dict[str, list[Cell | None]]
    average_gain: dict[str, float] | None
    note: list[str]
    digits: int = 3

    def frame(self, notation: Notation = HTML) -> pd.DataFrame:
        """The table's texts, a row for each system."""
        titles = [notation.escape(" ".join(filter(None, column))) for column in self.columns]
        if len(set(titles)) < len(titles):
            raise ValueError(f"columns must differ, but there are {', '.join(titles)}")
        rows = {notation.escape(name): [self._text(c, notation) for c in row] for name, row in self.cells.items()}
        frame = pd.DataFrame.from_dict(rows, orient="index", columns=titles, dtype=object).rename_axis("System")
        if self.average_gain is not None:
            gains = [self._gain(self.average_gain.get(name), notation) or "–" for name in self.cells]
            frame["Average gain"] = pd.Series(gains, index=frame.index, dtype=object)
        return frame

    def to_markdown(self) -> str:
        """A Markdown table (GitHub's) and a line that explains it."""
        frame = self.frame(MARKDOWN)
        lines = [["System", *frame.columns], ["---"] + ["---:"] * frame.shape[1]]
        lines += [[name, *row] for name, row in zip(frame.index, frame.to_numpy().tolist(), strict=True)]
        table = "\n".join(f"| {' | '.join(line)} |" for line in lines)
        return f"{table}\n\n{self._note(MARKDOWN)}"

    def to_latex(self) -> str:
        r"""A `tabular` with the rules of the package booktabs, and a comment that explains it."""
        frame = self.frame(LATEX)
        lines = [["System", *frame.columns]]
        lines += [[name, *row] for name, row in zip(frame.index, frame.to_numpy().tolist(), strict=True)]
        head, *body = [" & ".join(line).replace("–", "--") + r" \\" for line in lines]
        rows = "\n".join(["\\toprule", head, "\\midrule", *body, "\\bottomrule"])
        return f"\\begin{{tabular}}{{l{'r' * frame.shape[1]}}}\n{rows}\n\\end{{tabular}}\n\n{self._note(LATEX)}"

    def to_html(self) -> str:
        """For notebooks."""
        return f"{self.frame().to_html(escape=False)}<p>{self._note(HTML)}</p>"

    def styled(self) -> Any:
        """A pandas Styler with the same content."""
        return self.frame().style.set_caption(self._note(HTML))

    def _text(self, cell: Cell | None, notation: Notation) -> str:
        if cell is None or np.isnan(cell.value):
            return "–"
        value = f"{cell.value:.{self.digits}f}"
        text = notation.bold.format(value) if cell.best else value
        if cell.marks:
            text += notation.superscript.format(cell.marks)
        gain = self._gain(cell.gain, notation)
        return f"{text} ({gain})" if gain else text

    def _gain(self, gain: float | None, notation: Notation) -> str:
        return "" if gain is None or np.isnan(gain) else f"{100 * gain:+.1f}{notation.percent}"

    def _note(self, notation: Notation) -> str:
        escaped = [notation.escape(part) for part in self.note]
        return "".join(notation.superscript.format(p) if i % 2 else p for i, p in enumerate(escaped))


def paper_table(
    results: ExperimentResults | Mapping[str, ExperimentResults], *, digits: int = 3, average: bool | None = None
) -> PaperTable:
    """Lays out results as Boytsov et al. 2025 do in their Tables 1 and 4.

    Superscripts: the first letters stand for the partner, if there are partners, and the baselines in their order.

    Args:
        results: of one experiment, or of several by the name of the test set, side by side.
        digits: after the point.
        average: add the systems' mean gain over all columns; None adds it if there are partners and several columns.

    Returns:
        The table.

    Raises:
        ValueError: if the experiments differ in baselines, test or correction: their letters would mislead.
    """
    from .results import ExperimentResults

    sets = {"": results} if isinstance(results, ExperimentResults) else dict(results)
    if not sets:
        raise ValueError("there are no results to lay out")
    first = next(iter(sets.values()))
    for name, other in sets.items():
        if _legend(other) != _legend(first):
            raise ValueError(f"{name!r} differs from the other results in baselines, partners, test or correction")
    columns = [(name, measure) for name, of_set in sets.items() for measure in of_set.measures]
    names = dict.fromkeys(name for of_set in sets.values() for name in of_set.names)
    by_set = [_cells(of_set, digits) for of_set in sets.values()]
    widths = [len(of_set.measures) for of_set in sets.values()]
    cells: dict[str, list[Cell | None]] = {
        name: [cell for of_set, width in zip(by_set, widths, strict=True) for cell in of_set.get(name, [None] * width)]
        for name in names
    }
    if average is None:
        average = bool(first.statistics.partner) and len(columns) > 1
    return PaperTable(columns, cells, _average_gains(cells) if average else None, _note(sets), digits)


def _cells(results: ExperimentResults, digits: int) -> dict[str, list[Cell | None]]:
    shown = results.means.round(digits)
    kinds = results.statistics.references(results.names)
    letters = {(kind, baseline): letter for (kind, baseline, _), letter in zip(kinds, string.ascii_lowercase, strict=False)}
    marks: dict[tuple[str, str], str] = {}
    gains: dict[tuple[str, str], float] = {}
    for row in results.comparisons.to_dict("records"):
        key = (row["name"], row["measure"])
        letter = letters[row["kind"], row["reference"] if row["kind"] == "baseline" else None]
        marks[key] = marks.get(key, "") + (letter if row["reject"] else "")
        if letter == "a":
            gains[key] = row["gain"]
    return {
        name: [
            Cell(
                float(results.means.loc[name, measure]),
                bool(shown.loc[name, measure] == shown[measure].max()),
                marks.get((name, measure), ""),
                gains.get((name, measure)),
            )
            for measure in results.measures
        ]
        for name in results.names
    }


def _average_gains(cells: Mapping[str, list[Cell | None]]) -> dict[str, float]:
    gains = {name: [c.gain for c in row if c is not None and c.gain is not None] for name, row in cells.items()}
    return {name: float(np.mean(of_system)) for name, of_system in gains.items() if of_system}


def _legend(results: ExperimentResults) -> tuple[Any, ...]:
    s = results.statistics
    return s.baselines, bool(s.partner), s.test, s.correction


def _note(sets: Mapping[str, ExperimentResults]) -> list[str]:
    first = next(iter(sets.values()))
    s, start = first.statistics, "Best in bold."
    seeds = max(len(labels) for of_set in sets.values() for labels in of_set.seeds.values())
    if seeds > 1:
        start += f" Averaged over {seeds} seeds where a system has them."
    kinds = s.references(first.names)
    if not kinds:
        return [start]
    names = ["its partner" if baseline is None else baseline for _, baseline, _ in kinds]
    test = TEST_NAMES.get(s.test, s.test) if isinstance(s.test, str) else s.as_dict()["test"]
    corrected = f", {s.correction} correction over systems" if s.correction else ""
    alphas = ", ".join(dict.fromkeys(f"{of_set.statistics.alpha:g}" for of_set in sets.values()))
    note = [f"{start} In parentheses: gain over {names[0]}. Significant difference: "]
    for letter, name in zip(string.ascii_lowercase, names, strict=False):
        note += [letter, f" from {name}, "]
    note[-1] = note[-1].removesuffix(", ") + f" ({test} on per-query values{corrected}, alpha {alphas})."
    return note
