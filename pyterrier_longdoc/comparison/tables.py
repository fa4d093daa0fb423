"""Tables of results in the papers' layout: Markdown, LaTeX and notebooks."""

from __future__ import annotations

import html
import string
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

Results = Any
"""`Comparison`, which imports this module."""

Decimals = int | Mapping[str, int] | None
"""For all measures, or by measure."""

DIGITS = 3
"""Default decimals in the papers' layout."""

TEST_NAMES = {
    "t": "paired t-test", "wilcoxon": "Wilcoxon signed-rank test", "randomisation": "paired randomisation test",
    "bootstrap": "paired bootstrap test",
}  # fmt: skip
MISSING = "-"
LATEX_SPECIAL: dict[str, str | int | None] = {
    "\\": r"\textbackslash{}", "{": r"\{", "}": r"\}", "$": r"\$", "&": r"\&", "%": r"\%", "#": r"\#", "_": r"\_",
    "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "<": r"\textless{}", ">": r"\textgreater{}",
    "|": r"\textbar{}",
}  # fmt: skip
MARKDOWN_SPECIAL: dict[str, str | int | None] = {character: f"\\{character}" for character in "\\`*_{}[]<>|"}


class Notation(NamedTuple):
    """The markup of a table in one language."""

    escape: Callable[[str], str]
    bold: str
    superscript: str


MARKDOWN = Notation(lambda text: text.translate(str.maketrans(MARKDOWN_SPECIAL)), "**{}**", "<sup>{}</sup>")
LATEX = Notation(lambda text: text.translate(str.maketrans(LATEX_SPECIAL)), r"\textbf{{{}}}", "$^{{{}}}$")
HTML = Notation(html.escape, "<b>{}</b>", "<sup>{}</sup>")
PLAIN = Notation(str, "{}", "^{}")


@dataclass(frozen=True, eq=False, repr=False)
class PaperTable:
    """A table of systems and measures for one or several test sets.

    Attributes:
        results: the results by name of the test set; the name is empty if there is only one.
        digits: the number of decimals; None uses the `round` of the results, or 3.
        average: add a column with the mean gain of each system.
    """

    results: Mapping[str, Results]
    digits: int | None = None
    average: bool = False

    def __repr__(self) -> str:
        return self.to_markdown()

    def _repr_html_(self) -> str:
        return self.styled().to_html()

    def frame(self, notation: Notation = HTML) -> pd.DataFrame:
        """Return the cells of the table as text, one row per system."""
        gains: dict[str, list[float]] = {name: [] for results in self.results.values() for name in results.names}
        frame = pd.DataFrame(index=pd.Index([notation.escape(name) for name in gains], name="System"), dtype=object)
        for test_set, results in self.results.items():
            marks, set_gains = _marks_and_gains(results, self._letters)
            for measure in results.measures:
                rounding = results.round.get(measure) if isinstance(results.round, Mapping) else results.round
                digits = next(each for each in (self.digits, rounding, DIGITS) if each is not None)
                means, texts = results.means[measure], []
                best = means.round(digits).max()
                for name in gains:
                    gain = set_gains.get((name, measure))
                    gains[name] += [] if gain is None else [gain]
                    mark = marks.get((name, measure), "")
                    texts.append(_cell(means.get(name), digits, best, mark, gain, notation))
                frame[notation.escape(f"{test_set} {measure}".strip())] = texts
        if self.average:
            averages = [float(np.mean(values)) if values else np.nan for values in gains.values()]
            frame["Average gain"] = [_percent(average, notation) for average in averages]
        return frame

    def to_string(self) -> str:
        """Return a table in plain text, without bold, and a line that explains it."""
        return f"{self.frame(PLAIN).reset_index().to_string(index=False)}\n{self.note(PLAIN)}".rstrip()

    def to_markdown(self) -> str:
        """Return a table in GitHub's Markdown and a line that explains it."""
        frame = self.frame(MARKDOWN).reset_index()
        lines = [list(frame.columns), ["---"] + ["---:"] * (frame.shape[1] - 1), *frame.to_numpy().tolist()]
        table = "\n".join(f"| {' | '.join(line)} |" for line in lines)
        return f"{table}\n\n{self.note(MARKDOWN)}"

    def to_latex(self) -> str:
        r"""Return a `tabular` with the rules of booktabs, and a paragraph that explains it."""
        frame = self.frame(LATEX).reset_index()
        columns = "l" + "r" * (frame.shape[1] - 1)
        return f"{frame.to_latex(index=False, escape=False, column_format=columns)}\n{self.note(LATEX)}"

    def styled(self) -> Any:
        """Return a pandas Styler with the same content."""
        return self.frame().style.set_caption(self.note(HTML))

    @property
    def _partners(self) -> set[str]:
        return {partner for results in self.results.values() for partner in results.statistics.partner.values()}

    @property
    def _letters(self) -> dict[tuple[str, str | None], str]:
        """The letters by kind and baseline; a common partner that is also a baseline has one letter."""
        statistics = next(iter(self.results.values())).statistics
        references = [(kind, baseline) for kind, baseline, _ in statistics.references([])]
        if len(self._partners) == 1 and self._partners <= set(statistics.baseline):
            references = references[1:]
        return dict(zip(references, string.ascii_lowercase, strict=False))

    def note(self, notation: Notation = HTML) -> str:
        """Return the line that explains the table."""
        first = next(iter(self.results.values()))
        s, note = first.statistics, "" if notation is PLAIN else "Best in bold."
        seeds = max(len(runs) for results in self.results.values() for runs in results.values.values())
        if seeds > 1:
            note += f" Averaged over {seeds} seeds where a system has them."
        references = s.references(first.names)
        if not references:
            return note
        partner = next(iter(self._partners)) if len(self._partners) == 1 else "its partner"
        names = {(kind, baseline): notation.escape(baseline or partner) for kind, baseline, _ in references}
        letters = {reference: notation.superscript.format(letter) for reference, letter in self._letters.items()}
        marks = ", ".join(f"{letter} from {names[reference]}" for reference, letter in letters.items())
        test = TEST_NAMES.get(s.test_name, s.test_name)
        corrected = f", {s.correction} correction over systems" if s.correction else ""
        alphas = ", ".join(dict.fromkeys(f"{results.statistics.alpha:g}" for results in self.results.values()))
        method = notation.escape(f"({test} on per-query values{corrected}, alpha {alphas}).")
        partners = references[0][2]
        pairs = "; ".join(f"{reference} for {name}" for name, reference in partners.items())
        detail = notation.escape(f" ({pairs})") if len(set(partners.values())) > 1 else ""
        gain = next(iter(names.values())) + detail
        return f"{note} In parentheses: gain over {gain}. Significant difference: {marks} {method}".lstrip()


def _cell(mean: float | None, digits: int, best: float, marks: str, gain: float | None, notation: Notation) -> str:
    if mean is None or np.isnan(mean):
        return MISSING
    text = f"{mean:.{digits}f}"
    if round(mean, digits) == best:
        text = notation.bold.format(text)
    if marks:
        text += notation.superscript.format(marks)
    return text if gain is None or np.isnan(gain) else f"{text} ({_percent(gain, notation)})"


def paper_table(
    results: Results | Mapping[str, Results], *, digits: int | None = None, average: bool | None = None
) -> PaperTable:
    """Lay out results as in Tables 1 and 4 of Boytsov et al. 2025.

    The superscripts mark significant differences: the first letter stands for the partner, if there are partners, the
    others for the baselines in order. If one baseline is the partner of all systems, it has one letter, with the
    correction of the baseline.

    Args:
        results: one comparison, or several by name of the test set, which are shown side by side.
        digits: the number of decimals; None uses the `round` of the results, or 3.
        average: add the mean gain over all columns; None adds it if there are partners and several columns.

    Returns:
        The table.

    Raises:
        ValueError: if the comparisons differ in baselines, partners, test or correction, so that one legend would not
            fit all of them.
    """
    sets = dict(results) if isinstance(results, Mapping) else {"": results}
    first = next(iter(sets.values())).statistics
    legends = [(s.baseline, bool(s.partner), s.test, s.correction) for s in (r.statistics for r in sets.values())]
    for name, legend in zip(sets, legends, strict=True):
        if legend != legends[0]:
            raise ValueError(f"results {name!r} must have the baselines, partners, test and correction of the first")
    if average is None:
        average = bool(first.partner) and sum(len(columns.measures) for columns in sets.values()) > 1
    return PaperTable(sets, digits, average)


def _marks_and_gains(
    results: Results, letters: Mapping[tuple[str, str | None], str]
) -> tuple[dict[tuple[str, str], str], dict[tuple[str, str], float]]:
    """Return the letters of significant differences and the gain over the first reference, by system and measure."""
    first = next(((kind, baseline) for kind, baseline, _ in results.statistics.references(results.names)), None)
    marks: dict[tuple[str, str], str] = {}
    gains: dict[tuple[str, str], float] = {}
    for row in results.comparisons.to_dict("records"):
        key = (row["name"], row["measure"])
        reference = (row["kind"], row["reference"] if row["kind"] == "baseline" else None)
        marks[key] = marks.get(key, "") + (letters.get(reference, "") if row["reject"] else "")
        if reference == first:
            gains[key] = row["gain"]
    return marks, gains


def _percent(gain: float, notation: Notation) -> str:
    return MISSING if np.isnan(gain) else notation.escape(f"{100 * gain:+.1f}%")
