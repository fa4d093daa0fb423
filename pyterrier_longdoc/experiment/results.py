"""Results of an experiment: per-query values, means and comparisons, with saving and loading."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from ..common.citations import bibtex
from ..common.files import claim, file_digest, full_path, undamaged, write_lines
from ..common.runs import EXACT_FLOATS
from .checks import CHECK_COLUMNS
from .runs import aggregate, read_saved_run, run_files
from .significance import Statistics, Test, baseline_names, compare, mean_over_seeds
from .tables import Decimals, paper_table


@dataclass(frozen=True, eq=False, repr=False)
class ExperimentResults:
    """The results of `Experiment`: per-query values of systems, with means, comparisons and tables.

    Args:
        values: for each system an array `(S, Q, M)` of S seeds, Q queries and M measures.
        seeds: for each system the labels of its S seeds; `[None]` for a system without seeds.
        qids: the Q query ids.
        measures: the names of the M measures.
        statistics: how systems are compared.
        round: decimals of means and standard deviations in `table` and in the papers' layout, by measure or for all.
        efficiency: one row per system; None if it was not measured.
        checks: one row per failed check.
        settings: how the runs were made: versions, folds and so on.
        folder: the folder of the runs; None if they were not saved.
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

    def __post_init__(self) -> None:
        self.statistics.check_names(self.names)

    def __repr__(self) -> str:
        return f"ExperimentResults({len(self.names)} systems, {len(self.qids)} queries, {', '.join(self.measures)})"

    def __str__(self) -> str:
        return paper_table(self).to_string()

    def _repr_html_(self) -> str:
        return self.styled().to_html()

    @property
    def names(self) -> list[str]:
        """The names of the systems."""
        return list(self.values)

    @cached_property
    def query_values(self) -> dict[str, np.ndarray]:
        """For each system the `(Q, M)` values averaged over its seeds, which all tests use."""
        return {name: mean_over_seeds(values) for name, values in self.values.items()}

    @cached_property
    def means(self) -> pd.DataFrame:
        """Means over queries and seeds, one row per system and one column per measure."""
        rows = [aggregate(values, self.measures) for values in self.query_values.values()]
        return pd.DataFrame(np.stack(rows), index=pd.Index(self.names, name="name"), columns=self.measures)

    @property
    def stds(self) -> pd.DataFrame:
        """Standard deviations (n - 1) of a system's mean over its seeds; NaN for a single run."""
        seed_means = {name: aggregate(values, self.measures) for name, values in self.values.items()}  # (S, M)
        rows = [v.std(0, ddof=1) if len(v) > 1 else np.full(len(self.measures), np.nan) for v in seed_means.values()]
        return pd.DataFrame(np.stack(rows), index=pd.Index(self.names, name="name"), columns=self.measures)

    @property
    def perquery(self) -> pd.DataFrame:
        """`name, qid, measure, value`, averaged over seeds.

        The frame of `pt.Experiment(perquery=True)`, without its NaN rows for topics without judgements.
        """
        levels = [self.names, self.qids, self.measures]
        index = pd.MultiIndex.from_product(levels, names=["name", "qid", "measure"])
        values = np.concatenate([array.ravel() for array in self.query_values.values()])
        return pd.DataFrame({"value": values}, index=index).reset_index()

    @property
    def perseed(self) -> pd.DataFrame:
        """`name, seed, qid, measure, value`; `seed` is missing for systems without seeds."""
        frames = []
        for name, values in self.values.items():
            levels = [[name], pd.array(self.seeds[name], dtype="Int64"), self.qids, self.measures]
            index = pd.MultiIndex.from_product(levels, names=["name", "seed", "qid", "measure"])
            frames.append(pd.DataFrame({"value": values.ravel()}, index=index).reset_index())
        return pd.concat(frames, ignore_index=True)

    @cached_property
    def comparisons(self) -> pd.DataFrame:
        """Comparisons of every system to its partner and each baseline, by measure; see `significance.compare`."""
        return compare(self.query_values, self.measures, self.statistics)

    @cached_property
    def table(self) -> pd.DataFrame:
        """One row per system, with the columns of `pt.Experiment`.

        With one baseline these are `name`, the measures and, for each measure, `+`, `-`, `p-value` and, with a
        correction, `reject` and `p-value corrected`. With several baselines, these columns end in `(baseline)`. Several
        seeds add `std`; partners add `gain` (0.05 is +5 %), `gain p-value` and so on.
        """
        decimals = dict(self.round) if isinstance(self.round, Mapping) else self.round
        means, stds = (f if decimals is None else f.round(decimals) for f in (self.means, self.stds))
        table = means.reset_index()
        if any(len(values) > 1 for values in self.values.values()):
            table = pd.concat([table, stds.add_suffix(" std").reset_index(drop=True)], axis=1)
        statistics, columns = self.statistics, ["+", "-", "p-value"]
        if statistics.correction is not None:
            columns += ["reject", "p-value corrected"]
        for kind, baseline, _ in statistics.references(self.names):
            rows = self.comparisons[self.comparisons["kind"] == kind]
            if baseline is not None:
                rows = rows[rows["reference"] == baseline]
            kind_columns = columns if kind == "baseline" else ["gain", *columns[2:]]
            suffix = f" ({baseline})" if len(statistics.baseline) > 1 and baseline is not None else ""
            for measure in self.measures:
                measure_rows = rows[rows["measure"] == measure].set_index("name").reindex(self.names)
                for column in kind_columns:
                    title = f"{measure} {'gain ' if kind == 'partner' and column != 'gain' else ''}{column}{suffix}"
                    values = measure_rows[column]
                    # A system is not compared to itself: `reject` is False, the other columns are missing.
                    table[title] = (values.eq(True) if column == "reject" else values.astype("float64")).to_numpy()
        return table

    def retest(self, **changes: Any) -> ExperimentResults:
        """Compare the same values with other `Statistics`, e.g. `test="wilcoxon", baseline="BM25"`."""
        if "baseline" in changes:
            changes["baseline"] = baseline_names(changes["baseline"], self.names)
        return dataclasses.replace(self, statistics=dataclasses.replace(self.statistics, **changes))

    def subset(self, qids: Iterable[str]) -> ExperimentResults:
        """Return the results for these queries only."""
        rows = sorted({self._row(str(qid)) for qid in qids})
        values = {name: array[:, rows] for name, array in self.values.items()}
        return dataclasses.replace(self, values=values, qids=[self.qids[row] for row in rows])

    def _row(self, qid: str) -> int:
        if qid not in self.qids:
            raise ValueError(f"qid {qid!r} was not evaluated: use one of .qids, such as {', '.join(self.qids[:5])}")
        return self.qids.index(qid)

    def citations(self) -> str:
        """Return the BibTeX entries of the papers behind the experiment's models and collections."""
        return bibtex(self.settings.get("papers", ()))

    def to_markdown(self, *, digits: int | None = None) -> str:
        """Return the papers' layout in Markdown, with the best in bold, superscripts and gains; see `paper_table`."""
        return paper_table(self, digits=digits).to_markdown()

    def to_latex(self, *, digits: int | None = None) -> str:
        r"""Return the papers' layout in LaTeX; it needs `\usepackage{booktabs}`."""
        return paper_table(self, digits=digits).to_latex()

    def styled(self, *, digits: int | None = None) -> Any:
        """Return the papers' layout as a pandas Styler, for notebooks."""
        return paper_table(self, digits=digits).styled()

    def run(self, name: str, seed: int | None = None) -> pd.DataFrame:
        """Return the saved run of a system: `qid, docno, score`."""
        files = [] if self.folder is None else run_files(self.folder, name, seed)
        if seed not in self.seeds.get(name, ()) or not files:
            raise ValueError(
                f"no saved run of {name!r} with seed {seed}: run the Experiment with save_dir= and choose one of the "
                f"systems and seeds {dict(self.seeds)}"
            )
        return pd.concat(map(read_saved_run, files), ignore_index=True)

    def save(self, folder: str | Path) -> None:
        """Write settings, per-query values, checks, efficiency and tables, but not the runs, to a folder for `load`."""
        folder = Path(full_path(folder))
        claim(folder)
        settings: dict[str, Any] = {
            "systems": self.seeds,
            "queries": self.qids,
            "measures": self.measures,
            "round": self.round,
        }
        settings |= {"statistics": self.statistics.as_dict(), **self.settings}
        frames = {"perquery.csv.gz": self.perseed, "checks.csv": self.checks, "efficiency.csv": self.efficiency}
        frames |= {"table.csv": self.table, "comparisons.csv": self.comparisons}
        for file, frame in frames.items():
            if frame is not None:
                write_lines(folder / file, [frame.to_csv(index=False).rstrip("\n")])
        settings["digest"] = file_digest(folder / "perquery.csv.gz")
        write_lines(folder / "results.json", [json.dumps(settings, indent=1)])
        write_lines(folder / "table.md", [self.to_markdown()])
        write_lines(folder / "table.tex", [self.to_latex()])

    @classmethod
    def load(cls, folder: str | Path, *, test: Test | None = None) -> ExperimentResults:
        """Load results from a folder. If the `test` was a function, pass it again: only its name is stored."""
        folder = Path(full_path(folder))
        with undamaged(folder / "results.json", "save the results again"):
            settings = json.loads((folder / "results.json").read_text(encoding="utf-8"))
            seeds, qids, measures = (settings.pop(name) for name in ("systems", "queries", "measures"))
            statistics, digits, digest = (settings.pop(name) for name in ("statistics", "round", "digest"))
            statistics |= {"baseline": tuple(statistics["baseline"]), "test": test or statistics["test"]}
            statistics = Statistics(**statistics)
        if file_digest(folder / "perquery.csv.gz") != digest:
            raise ValueError(f"{str(folder / 'perquery.csv.gz')!r} is damaged: save the results again")
        column = pd.read_csv(folder / "perquery.csv.gz", usecols=["value"], **EXACT_FLOATS)["value"]
        ends = len(qids) * len(measures) * np.cumsum([len(labels) for labels in seeds.values()])
        parts = np.split(column.to_numpy(dtype="float64"), ends[:-1])
        costs = folder / "efficiency.csv"
        return cls(
            {name: part.reshape(-1, len(qids), len(measures)) for name, part in zip(seeds, parts, strict=True)},
            seeds,
            qids,
            measures,
            statistics,
            round=digits,
            efficiency=pd.read_csv(costs, keep_default_na=False, na_values=[""]) if costs.is_file() else None,
            checks=pd.read_csv(folder / "checks.csv", keep_default_na=False),
            settings=settings,
            folder=folder,
        )
