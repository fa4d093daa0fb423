"""What an experiment has found: values, comparisons, tables as the papers print them, results by groups of queries."""

from __future__ import annotations

import dataclasses
import difflib
import html
import itertools
import json
import string
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from ..common.files import write_lines
from ..common.frames import as_strings, check_columns
from .runs import EXACT_FLOATS, aggregate, read_run, run_files
from .significance import TESTS, Statistics, Test, baseline_names, compare, mean_over_seeds
from .sources import Sources, restored, sources_of, sources_of_measures
from .why import Rankings, Why, why

CHECK_COLUMNS = ["check", "name", "queries", "message"]

DEFAULT_EDGES = (0, 512, 1024, 2048)
"""In tokens: what a BERT reads at once, and twice and four times that."""

Decimals = int | Mapping[str, int] | None
"""Of all measures, or by measure."""

DIGITS = 3
"""Decimals in the papers' layout."""


@dataclass(frozen=True, eq=False, repr=False)
class ExperimentResults:
    """Per-query values of systems, and all that follows from them.

    Args:
        values: for each system `(S, Q, M)`: S seeds, Q queries, M measures.
        seeds: for each system the labels of its S seeds; `[None]` for a system without.
        qids: the Q queries.
        measures: the M measures' names.
        statistics: how systems are compared.
        round: decimals of means and standard deviations in `table` and in the papers' layout, by measure or for all.
        efficiency: one row for each system; None where it was not measured.
        checks: one row for each finding of the checks.
        settings: how the runs were made: versions, folds and so on.
        folder: where the runs are; None if they were not saved.
        rankings: how the systems rank the relevant documents; None if that was not noted.
    """

    values: Mapping[str, np.ndarray]
    seeds: Mapping[str, Sequence[int | None]]
    qids: list[str]
    measures: list[str]
    statistics: Statistics = field(default_factory=Statistics)
    _: KW_ONLY
    round: Decimals = None
    efficiency: pd.DataFrame | None = None
    checks: pd.DataFrame = field(default_factory=lambda: pd.DataFrame(columns=CHECK_COLUMNS))
    settings: Mapping[str, Any] = field(default_factory=dict)
    folder: Path | None = None
    rankings: Rankings | None = None

    def __post_init__(self) -> None:
        self.statistics.check(self.names)
        check_decimals(self.round, self.measures)

    def __repr__(self) -> str:
        return f"ExperimentResults({len(self.names)} systems, {len(self.qids)} queries, {', '.join(self.measures)})"

    def _repr_html_(self) -> str:
        return self.styled().to_html()

    @property
    def names(self) -> list[str]:
        """The systems."""
        return list(self.values)

    @cached_property
    def query_values(self) -> dict[str, np.ndarray]:
        """For each system `(Q, M)` values, averaged over its seeds: what all tests compare."""
        return {name: mean_over_seeds(values) for name, values in self.values.items()}

    @cached_property
    def means(self) -> pd.DataFrame:
        """Mean over queries and seeds: a row for each system, a column for each measure."""
        rows = [aggregate(values, self.measures) for values in self.query_values.values()]
        return pd.DataFrame(np.stack(rows), index=pd.Index(self.names, name="name"), columns=self.measures)

    @property
    def stds(self) -> pd.DataFrame:
        """Standard deviation over seeds (n - 1) of a system's mean; NaN for a single run."""
        of_seeds = {name: aggregate(values, self.measures) for name, values in self.values.items()}  # (S, M)
        rows = [v.std(0, ddof=1) if len(v) > 1 else np.full(len(self.measures), np.nan) for v in of_seeds.values()]
        return pd.DataFrame(np.stack(rows), index=pd.Index(self.names, name="name"), columns=self.measures)

    @property
    def perquery(self) -> pd.DataFrame:
        """`name, qid, measure, value`, averaged over seeds: the frame of `pt.Experiment(perquery=True)`."""
        levels = [self.names, self.qids, self.measures]
        index = pd.MultiIndex.from_product(levels, names=["name", "qid", "measure"])
        values = np.concatenate([of_system.ravel() for of_system in self.query_values.values()])
        return pd.DataFrame({"value": values}, index=index).reset_index()

    @property
    def perseed(self) -> pd.DataFrame:
        """`name, seed, qid, measure, value`; the seed is missing for systems without one."""
        frames = []
        for name, of_system in self.values.items():
            levels = [[name], pd.array(self.seeds[name], dtype="Int64"), self.qids, self.measures]
            index = pd.MultiIndex.from_product(levels, names=["name", "seed", "qid", "measure"])
            frames.append(pd.DataFrame({"value": of_system.ravel()}, index=index).reset_index())
        return pd.concat(frames, ignore_index=True)

    @cached_property
    def comparisons(self) -> pd.DataFrame:
        """Every system against its partner and each baseline, on each measure: see `significance.compare`."""
        return compare(self.query_values, self.measures, self.statistics)

    @cached_property
    def table(self) -> pd.DataFrame:
        """One row for each system, in the columns of `pt.Experiment`.

        With one baseline these are `name`, the measures and, for each, `+`, `-`, `p-value` and, with a correction,
        `reject` and `p-value corrected`. With several baselines each such column ends in `(baseline)`. Systems with
        several seeds add `std`, partners add `gain` (0.05 is +5 %) and `gain p-value` and so on.
        """
        table = self._rounded(self.means).reset_index()
        if any(len(values) > 1 for values in self.values.values()):
            table = pd.concat([table, self._rounded(self.stds).add_suffix(" std").reset_index(drop=True)], axis=1)
        statistics, columns = self.statistics, ["+", "-", "p-value"]
        if statistics.correction is not None:
            columns += ["reject", "p-value corrected"]
        for kind, baseline, _ in statistics.references(self.names):
            rows = self.comparisons[self.comparisons["kind"] == kind]
            if baseline is not None:
                rows = rows[rows["reference"] == baseline]
            shown = columns if kind == "baseline" else ["gain", *columns[2:]]
            suffix = f" ({baseline})" if len(statistics.baseline) > 1 and baseline is not None else ""
            for measure in self.measures:
                of_measure = rows[rows["measure"] == measure].set_index("name").reindex(self.names)
                for column in shown:
                    title = f"{measure} {'gain ' if kind == 'partner' and column != 'gain' else ''}{column}{suffix}"
                    values = of_measure[column]
                    # A system has no comparison with itself: nothing is rejected, all else is missing.
                    table[title] = (values.eq(True) if column == "reject" else values.astype("float64")).to_numpy()
        return table

    def _rounded(self, values: pd.DataFrame) -> pd.DataFrame:
        """Values with a column for each measure, rounded as `round` says."""
        if self.round is None:
            return values
        return values.round(self.round if isinstance(self.round, int) else dict(self.round))

    def retest(self, **changes: Any) -> ExperimentResults:
        """The same values compared in another way.

        Args:
            **changes: of `Statistics`, e.g. `test="wilcoxon", baseline="BM25"`; `baseline` as `Experiment` takes it.
        """
        if "baseline" in changes:
            changes["baseline"] = baseline_names(changes["baseline"], self.names)
        return dataclasses.replace(self, statistics=dataclasses.replace(self.statistics, **changes))

    def subset(self, qids: Iterable[str]) -> ExperimentResults:
        """The results on some of the queries only.

        Raises:
            ValueError: if none of them is among the evaluated ones.
        """
        wanted = {str(qid) for qid in qids}
        rows = [row for row, qid in enumerate(self.qids) if qid in wanted]
        if not rows:
            raise ValueError("none of these qids was evaluated")
        values = {name: of_system[:, rows] for name, of_system in self.values.items()}
        return dataclasses.replace(self, values=values, qids=[self.qids[row] for row in rows])

    def why(self, qid: str, systems: Mapping[str, Any] | None = None, *, top: int = 3) -> Why:
        """Which systems differ on a query, how they rank its relevant documents, and which windows made it.

        Runs do not keep windows, so systems are run once more, on this query alone and with `explain`, if they are
        given. What their models read before, have warned of and keep on disk stays as it is.

        Args:
            qid: an evaluated query.
            systems: pipelines by name, e.g. the dict that `Experiment` got: of those with a reranker that can
                `explain`, and without one that asks a language model, the windows are told; None tells no windows.
            top: so many of each system's first documents are told of with their windows, and all relevant ones.

        Raises:
            ValueError: if the query was not evaluated, or a system is none of this experiment.

        Example:
            `results.why("12", {"MaxP": bm25 >> maxp})`.
        """
        qid = str(qid)
        if qid not in self.qids:
            some = difflib.get_close_matches(qid, self.qids) or self.qids[:5]
            raise ValueError(
                f"query {qid!r} was not evaluated: it is no topic, or nothing is judged for it; there are "
                f"{len(self.qids)}, such as {', '.join(map(repr, some))}"
            )
        if not isinstance(systems, Mapping | None):
            raise ValueError(f"systems={systems!r} must be pipelines by name, e.g. {{{self.names[0]!r}: pipeline}}")
        unknown = [name for name in systems or () if name not in self.names]
        if unknown:
            raise ValueError(f"there is no system {', '.join(map(repr, unknown))}; they are {', '.join(self.names)}")
        of_system = {name: values[self.qids.index(qid)] for name, values in self.query_values.items()}
        values = pd.DataFrame.from_dict(of_system, orient="index", columns=self.measures).rename_axis("name")
        for baseline in self.statistics.baseline:
            differences = values[self.measures] - of_system[baseline]
            values = values.join(differences.add_suffix(f" - {baseline}"))
        return why(qid, values, self.seeds, self.rankings, systems, top)

    def citations(self, *further: Any) -> str:
        """BibTeX of the models, collections and measures that were used, each entry once.

        Collections are known from the text loaders of the pipelines: one without is named as an argument.

        Args:
            *further: datasets, or other pipelines.

        Returns:
            The entries, and a comment for each part that names no paper.
        """
        measures = sources_of_measures(self.measures)
        return str(Sources.of_all([restored(self.settings.get("sources")), *map(sources_of, further), measures]))

    def to_markdown(self, *, digits: int | None = None) -> str:
        """The papers' layout in Markdown: best in bold, superscripts, gains in parentheses; see `paper_table`."""
        return paper_table(self, digits=digits).to_markdown()

    def to_latex(self, *, digits: int | None = None) -> str:
        r"""The papers' layout in LaTeX, with `\usepackage{booktabs}`."""
        return paper_table(self, digits=digits).to_latex()

    def styled(self, *, digits: int | None = None) -> Any:
        """The papers' layout as a pandas Styler, for notebooks."""
        return paper_table(self, digits=digits).styled()

    def run(self, name: str, seed: int | None = None) -> pd.DataFrame:
        """The saved run of a system, `qid, docno, score`.

        Raises:
            ValueError: if runs were not saved, or there is none of this system and seed.
        """
        if name not in self.seeds or seed not in self.seeds[name]:
            known = f"seeds are {self.seeds[name]}" if name in self.seeds else f"systems are {', '.join(self.names)}"
            raise ValueError(f"there is no run of {name!r} with seed {seed}; {known}")
        files = [] if self.folder is None else run_files(self.folder, name, seed)
        if not files:
            raise ValueError("the runs were not saved: give Experiment a save_dir")
        return pd.concat(map(read_run, files), ignore_index=True)

    def save(self, folder: str | Path) -> None:
        """Writes settings, per-query values, checks, efficiency and the tables; `load` restores the results.

        Runs are not among them: these are written while an experiment with `save_dir` runs.

        Args:
            folder: made if need be.
        """
        folder = Path(folder)
        described = {
            "systems": self.seeds,
            "queries": self.qids,
            "measures": self.measures,
            "statistics": self.statistics.as_dict(),
            "round": self.round,
            **self.settings,
        }
        write_lines(folder / "results.json", [json.dumps(described, indent=1)])
        frames = {"perquery.csv.gz": self.perseed, "checks.csv": self.checks, "efficiency.csv": self.efficiency}
        frames |= {"table.csv": self.table, "comparisons.csv": self.comparisons}
        for file, frame in frames.items():
            if frame is not None:
                write_lines(folder / file, [frame.to_csv(index=False).rstrip("\n")])
        if self.rankings is not None:
            self.rankings.save(folder)
        write_lines(folder / "table.md", [self.to_markdown()])
        write_lines(folder / "table.tex", [self.to_latex()])

    @classmethod
    def load(cls, folder: str | Path, *, test: Test | None = None) -> ExperimentResults:
        """Restores results from the folder that `save` or an experiment with `save_dir` wrote.

        Args:
            folder: with `results.json`.
            test: the test, needed where it was a function: only its name is stored.

        Raises:
            FileNotFoundError: if the folder holds no finished experiment.
            ValueError: if the test was a function and is not given.
        """
        folder = Path(folder)
        if not (folder / "results.json").is_file():
            raise FileNotFoundError(f"{str(folder)!r} holds no results.json: no finished experiment was saved there")
        described = json.loads((folder / "results.json").read_text(encoding="utf-8"))
        seeds, qids, measures = (described.pop(name) for name in ("systems", "queries", "measures"))
        column = pd.read_csv(folder / "perquery.csv.gz", usecols=["value"], **EXACT_FLOATS)["value"]
        ends = len(qids) * len(measures) * np.cumsum([len(labels) for labels in seeds.values()])
        parts = np.split(column.to_numpy(dtype="float64"), ends[:-1])
        statistics = described.pop("statistics")
        statistics |= {"baseline": tuple(statistics["baseline"]), "test": test or statistics["test"]}
        if not callable(statistics["test"]) and statistics["test"] not in TESTS:
            raise ValueError(f"the test was the function {statistics['test']!r}, which is not stored: give it as test=")
        efficiency = folder / "efficiency.csv"
        return cls(
            {name: part.reshape(-1, len(qids), len(measures)) for name, part in zip(seeds, parts, strict=True)},
            seeds,
            qids,
            measures,
            Statistics(**statistics),
            round=described.pop("round"),
            efficiency=pd.read_csv(efficiency, keep_default_na=False, na_values=[""]) if efficiency.is_file() else None,
            checks=pd.read_csv(folder / "checks.csv", keep_default_na=False),
            settings=described,
            folder=folder,
            rankings=Rankings.load(folder),
        )


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
RST_SPECIAL: dict[str, str | int | None] = {character: f"\\{character}" for character in "\\`*_|"}


class Notation(NamedTuple):
    """How a language writes the parts of a table."""

    escape: Callable[[str], str]
    bold: str
    superscript: str


MARKDOWN = Notation(lambda text: text.translate(str.maketrans(MARKDOWN_SPECIAL)), "**{}**", "<sup>{}</sup>")
LATEX = Notation(lambda text: text.translate(str.maketrans(LATEX_SPECIAL)), r"\textbf{{{}}}", "$^{{{}}}$")
RST = Notation(lambda text: text.translate(str.maketrans(RST_SPECIAL)), "**{}**", r"\ :sup:`{}`\ ")
HTML = Notation(html.escape, "<b>{}</b>", "<sup>{}</sup>")


@dataclass(frozen=True, eq=False, repr=False)
class PaperTable:
    """A table of systems by measures, for one or several test sets.

    Attributes:
        results: by the name of the test set, which is empty if there is only one.
        digits: after the point; None for those of the results' `round`, or 3.
        average: add a column with the mean of each system's gains.
    """

    results: Mapping[str, ExperimentResults]
    digits: int | None = None
    average: bool = False

    def __repr__(self) -> str:
        systems = dict.fromkeys(name for results in self.results.values() for name in results.names)
        columns = [f"{test_set} {measure}".strip() for test_set, of in self.results.items() for measure in of.measures]
        return f"PaperTable({', '.join(systems)}; {', '.join(columns)})"

    def _repr_html_(self) -> str:
        return self.styled().to_html()

    def frame(self, notation: Notation = HTML) -> pd.DataFrame:
        """The table's texts, a row for each system."""
        gains: dict[str, list[float]] = {name: [] for results in self.results.values() for name in results.names}
        frame = pd.DataFrame(index=pd.Index([notation.escape(name) for name in gains], name="System"), dtype=object)
        for test_set, results in self.results.items():
            marks, of_set = _marks_and_gains(results, self._letters)
            for measure in results.measures:
                means, digits, texts = results.means[measure], self._digits(results, measure), []
                best = means.round(digits).max()
                for name in gains:
                    gain = of_set.get((name, measure))
                    gains[name] += [] if gain is None else [gain]
                    mark = marks.get((name, measure), "")
                    texts.append(_cell(means.get(name), digits, best, mark, gain, notation))
                frame[notation.escape(f"{test_set} {measure}".strip())] = texts
        if self.average:
            averages = [float(np.mean(of_system)) if of_system else np.nan for of_system in gains.values()]
            frame["Average gain"] = [_percent(average, notation) for average in averages]
        return frame

    def to_markdown(self) -> str:
        """A Markdown table (GitHub's) and a line that explains it."""
        frame = self.frame(MARKDOWN).reset_index()
        lines = [list(frame.columns), ["---"] + ["---:"] * (frame.shape[1] - 1), *frame.to_numpy().tolist()]
        table = "\n".join(f"| {' | '.join(line)} |" for line in lines)
        return f"{table}\n\n{self._note(MARKDOWN)}"

    def to_latex(self) -> str:
        r"""A `tabular` with the rules of the package booktabs, and a paragraph that explains it."""
        frame = self.frame(LATEX).reset_index()
        columns = "l" + "r" * (frame.shape[1] - 1)
        return f"{frame.to_latex(index=False, escape=False, column_format=columns)}\n{self._note(LATEX)}"

    def to_rst(self) -> str:
        """A table of reStructuredText and a paragraph that explains it."""
        return f"{list_table(self.frame(RST).reset_index())}\n\n{self._note(RST)}"

    def styled(self) -> Any:
        """A pandas Styler with the same content."""
        return self.frame().style.set_caption(self._note(HTML))

    @property
    def _partners(self) -> set[str]:
        return {partner for results in self.results.values() for partner in results.statistics.partner.values()}

    @property
    def _letters(self) -> dict[tuple[str, str | None], str]:
        """By kind and baseline; a partner of all that is a baseline too has that one's letter, and none of its own."""
        statistics = next(iter(self.results.values())).statistics
        references = [(kind, baseline) for kind, baseline, _ in statistics.references([])]
        if len(self._partners) == 1 and self._partners <= set(statistics.baseline):
            references = references[1:]
        return dict(zip(references, string.ascii_lowercase, strict=False))

    def _digits(self, results: ExperimentResults, measure: str) -> int:
        if self.digits is not None:
            return self.digits
        of_results = results.round.get(measure) if isinstance(results.round, Mapping) else results.round
        return DIGITS if of_results is None else of_results

    def _note(self, notation: Notation) -> str:
        first = next(iter(self.results.values()))
        s, note = first.statistics, "Best in bold."
        seeds = max(len(labels) for results in self.results.values() for labels in results.seeds.values())
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
        how = notation.escape(f"({test} on per-query values{corrected}, alpha {alphas}).")
        gain = next(iter(names.values())) + notation.escape(_where_they_differ(references[0][2]))
        return f"{note} In parentheses: gain over {gain}. Significant difference: {marks} {how}"


def _where_they_differ(compared: Mapping[str, str]) -> str:
    """What systems are compared to, such as " (FirstP for MaxP, PARADE; MaxP for tuned)"; nothing if to one system."""
    systems: dict[str, list[str]] = {}
    for name, reference in compared.items():
        systems.setdefault(reference, []).append(name)
    if len(systems) < 2:
        return ""
    told = "; ".join(f"{reference} for {', '.join(names)}" for reference, names in systems.items())
    return f" ({told})"


def list_table(frame: pd.DataFrame) -> str:
    """A frame of texts as a table of reStructuredText."""
    lines = [".. list-table::", "    :header-rows: 1", ""]
    for row in [list(frame.columns), *frame.to_numpy().tolist()]:
        lines += [f"    {'* ' if i == 0 else '  '}- {cell}".rstrip() for i, cell in enumerate(row)]
    return "\n".join(lines)


def _cell(mean: float | None, digits: int, best: float, marks: str, gain: float | None, notation: Notation) -> str:
    if mean is None or np.isnan(mean):
        return MISSING
    text = f"{mean:.{digits}f}"
    if round(mean, digits) == best:
        text = notation.bold.format(text)
    if marks:
        text += notation.superscript.format(marks)
    return text if gain is None or np.isnan(gain) else f"{text} ({_percent(gain, notation)})"


def check_decimals(decimals: Decimals, measures: Sequence[str]) -> None:
    """Raises ValueError for decimals that are no whole number from 0, or of a measure that is not among `measures`."""
    of_measure = decimals if isinstance(decimals, Mapping) else {} if decimals is None else {measures[0]: decimals}
    unknown = [name for name in of_measure if name not in measures]
    if unknown:
        raise ValueError(f"round names {', '.join(map(repr, unknown))}, but the measures are {', '.join(measures)}")
    if not all(isinstance(number, int) and number >= 0 for number in of_measure.values()):
        raise ValueError(f"round={decimals!r} must be a number of decimals from 0, or one for each measure by its name")


def paper_table(
    results: ExperimentResults | Mapping[str, ExperimentResults],
    *,
    digits: int | None = None,
    average: bool | None = None,
) -> PaperTable:
    """Lays out results as Boytsov et al. 2025 do in their Tables 1 and 4.

    Superscripts: the first letters stand for the partner, if there are partners, and the baselines in their order. A
    partner of all systems that is a baseline too has one letter, the baseline's, with that one's correction.

    Args:
        results: of one experiment, or of several by the name of the test set, side by side.
        digits: after the point; None for those of the results' `round`, or 3.
        average: add the systems' mean gain over all columns; None adds it if there are partners and several columns.

    Returns:
        The table.

    Raises:
        ValueError: if the experiments differ in baselines, test or correction: their letters would mislead.
    """
    sets = {"": results} if isinstance(results, ExperimentResults) else dict(results)
    if not sets:
        raise ValueError("there are no results to lay out")
    first = next(iter(sets.values())).statistics
    legends = [(s.baseline, bool(s.partner), s.test, s.correction) for s in (r.statistics for r in sets.values())]
    for name, legend in zip(sets, legends, strict=True):
        if legend != legends[0]:
            raise ValueError(f"{name!r} differs from the other results in baselines, partners, test or correction")
    if average is None:
        average = bool(first.partner) and sum(len(of_set.measures) for of_set in sets.values()) > 1
    return PaperTable(sets, digits, average)


def _marks_and_gains(
    results: ExperimentResults, letters: Mapping[tuple[str, str | None], str]
) -> tuple[dict[tuple[str, str], str], dict[tuple[str, str], float]]:
    """By system and measure: letters of what it differs from significantly, and the gain over its first reference."""
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


def by_document_length(
    results: ExperimentResults,
    qrels: pd.DataFrame,
    lengths: Mapping[str, float],
    *,
    edges: Sequence[float] = DEFAULT_EDGES,
) -> pd.DataFrame:
    """Results by the mean length of a query's relevant documents.

    Args:
        results: of an experiment.
        qrels: `qid, docno, label`; a label above 0 is relevant.
        lengths: of documents by docno, e.g. in tokens. Relevant documents that are missing here do not count.
        edges: lower ends of the groups; by default what a BERT reads at once, and twice and four times that, in tokens.

    Returns:
        See `by_query_value`; queries without a relevant document of known length are left out.
    """
    return by_query_value(results, relevant_lengths(qrels, lengths), edges=edges, column="document length")


def relevant_lengths(qrels: pd.DataFrame, lengths: Mapping[str, float]) -> dict[str, float]:
    """The mean length of each query's relevant documents: see `by_document_length`."""
    check_columns(qrels, ("qid", "docno", "label"), "qrels")
    relevant = qrels[qrels["label"] > 0]
    return mean_by_query(relevant, as_strings(relevant["docno"]).map(dict(lengths)))


def by_query_value(
    results: ExperimentResults, values: Mapping[str, float], *, edges: Sequence[float], column: str = "group"
) -> pd.DataFrame:
    """Results by groups of queries, each tested on its own.

    Args:
        results: of an experiment.
        values: by qid.
        edges: lower ends of the groups, ascending; the last group has no upper end.
        column: name of the first column.

    Returns:
        `column` (e.g. `"512 to < 1024"`), `queries`, and the columns of `results.table`: one row for each group that
        has queries and each system.

    Raises:
        ValueError: if edges do not ascend, or no evaluated query falls into any group.
    """
    tables = []
    for label, of_group in query_groups(results, values, edges=edges).items():
        table = of_group.table
        table.insert(0, column, label)
        table.insert(1, "queries", len(of_group.qids))
        tables.append(table)
    return pd.concat(tables, ignore_index=True)


def query_groups(
    results: ExperimentResults, values: Mapping[str, float], *, edges: Sequence[float]
) -> dict[str, ExperimentResults]:
    """The results of each group of queries that is not empty, by its label: see `by_query_value`."""
    if not len(edges) or any(a >= b for a, b in itertools.pairwise(edges)):
        raise ValueError(f"edges={list(edges)} must ascend")
    evaluated = {qid: values[qid] for qid in results.qids if qid in values and not np.isnan(values[qid])}
    groups = {}
    for low, high in zip(edges, [*edges[1:], np.inf], strict=True):
        qids = [qid for qid, value in evaluated.items() if low <= value < high]
        if qids:
            groups[f">= {low:g}" if high == np.inf else f"{low:g} to < {high:g}"] = results.subset(qids)
    if not groups:
        raise ValueError(f"no evaluated query has a value of at least {edges[0]:g}")
    return groups


def mean_by_query(frame: pd.DataFrame, values: pd.Series) -> dict[str, float]:
    """The mean of the values of each query; `values` belong to the rows of `frame`, which has the column `qid`."""
    of_query = values.astype("float64").groupby(as_strings(frame["qid"]), sort=False)
    return {str(qid): float(mean) for qid, mean in of_query.mean().items()}
