"""What an experiment has found."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from ..common.files import replacing
from .comparisons import Statistics, compare
from .papertable import PaperTable, paper_table
from .perquery import aggregate
from .runs import EXACT_FLOATS, read_run
from .significance import TESTS, Test
from .store import RunStore


class ExperimentResults:
    """Per-query values of systems, and all that follows from them.

    Args:
        values: for each system `(S, Q, M)`: S seeds, Q queries, M measures.
        seeds: for each system the labels of its S seeds; `[None]` for a system without.
        qids: the Q queries.
        measures: the M measures' names.
        statistics: how systems are compared.
        efficiency: one row for each system; None where it was not measured.
        checks: one row for each finding of the checks.
        settings: how the runs were made: versions, folds and so on.
        folder: where the runs are; None if they were not kept.

    Attributes:
        names: of the systems.
    """

    def __init__(
        self,
        values: Mapping[str, np.ndarray],
        seeds: Mapping[str, Sequence[int | None]],
        qids: Sequence[str],
        measures: Sequence[str],
        statistics: Statistics | None = None,
        *,
        efficiency: pd.DataFrame | None = None,
        checks: pd.DataFrame | None = None,
        settings: Mapping[str, Any] | None = None,
        folder: Path | None = None,
    ) -> None:
        self.values = dict(values)
        self.seeds = {name: list(labels) for name, labels in seeds.items()}
        self.qids = list(qids)
        self.measures = list(measures)
        self.names = list(self.values)
        self.statistics = statistics or Statistics()
        self.statistics.check(self.names)
        self.efficiency = efficiency
        self.checks = pd.DataFrame(columns=["check", "name", "queries", "message"]) if checks is None else checks
        self.settings = dict(settings or {})
        self.folder = folder

    def __repr__(self) -> str:
        return f"ExperimentResults({len(self.names)} systems, {len(self.qids)} queries, {', '.join(self.measures)})"

    def _repr_html_(self) -> str:
        return self.paper_table().to_html()

    # Values.

    @cached_property
    def query_values(self) -> dict[str, np.ndarray]:
        """For each system `(Q, M)` values, averaged over its seeds: what all tests compare."""
        return {name: values[0] if len(values) == 1 else values.mean(0) for name, values in self.values.items()}

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
        means = {name: values[None] for name, values in self.query_values.items()}
        return self._long(means, {name: [None] for name in self.names}).drop(columns="seed")

    @property
    def perseed(self) -> pd.DataFrame:
        """`name, seed, qid, measure, value`; the seed is missing for systems without one."""
        return self._long(self.values, self.seeds)

    def _long(self, values: Mapping[str, np.ndarray], seeds: Mapping[str, Sequence[int | None]]) -> pd.DataFrame:
        Q, M = len(self.qids), len(self.measures)
        frames = []
        for name, of_system in values.items():
            S = len(of_system)
            frame = pd.DataFrame(
                {
                    "name": name,
                    "seed": pd.array(np.repeat(pd.array(seeds[name], dtype="Int64"), Q * M), dtype="Int64"),
                    "qid": np.tile(np.repeat(np.array(self.qids, dtype=object), M), S),
                    "measure": np.tile(np.array(self.measures, dtype=object), S * Q),
                    "value": of_system.ravel(),
                }
            )
            frames.append(frame)
        return pd.concat(frames, ignore_index=True)

    # Comparisons.

    @cached_property
    def comparisons(self) -> pd.DataFrame:
        """Every system against its partner and each baseline, on each measure: see `comparisons.compare`."""
        return compare(self.query_values, self.measures, self.statistics, lambda v: aggregate(v, self.measures))

    @cached_property
    def table(self) -> pd.DataFrame:
        """One row for each system, in the columns of `pt.Experiment`.

        With one baseline these are `name`, the measures and, for each, `+`, `-`, `p-value` and, with a correction,
        `reject` and `p-value corrected`. With several baselines each such column ends in `(baseline)`. Systems with
        several seeds add `std`, partners add `gain` (0.05 is +5 %) and `gain p-value` and so on.
        """
        table = self.means.reset_index()
        if any(len(values) > 1 for values in self.values.values()):
            table = pd.concat([table, self.stds.add_suffix(" std").reset_index(drop=True)], axis=1)
        statistics, columns = self.statistics, ["+", "-", "p-value"]
        if statistics.correction is not None:
            columns += ["reject", "p-value corrected"]
        for kind, baseline, _ in statistics.references(self.names):
            rows = self.comparisons[self.comparisons["kind"] == kind]
            if baseline is not None:
                rows = rows[rows["reference"] == baseline]
            shown = columns if kind == "baseline" else ["gain", *columns[2:]]
            suffix = f" ({baseline})" if len(statistics.baselines) > 1 and baseline is not None else ""
            for measure in self.measures:
                of_measure = rows[rows["measure"] == measure].set_index("name").reindex(self.names)
                for column in shown:
                    title = f"{measure} {'gain ' if kind == 'partner' and column != 'gain' else ''}{column}{suffix}"
                    values = of_measure[column]
                    # A system has no comparison with itself: nothing is rejected, all else is missing.
                    table[title] = (values.eq(True) if column == "reject" else values.astype("float64")).to_numpy()
        return table

    def retest(self, **changes: Any) -> ExperimentResults:
        """The same values compared in another way.

        Args:
            **changes: of `Statistics`, e.g. `test="wilcoxon", baselines=["BM25"]`.
        """
        if "baselines" in changes:
            changes["baselines"] = tuple(changes["baselines"])
        return self._with(statistics=dataclasses.replace(self.statistics, **changes))

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
        return self._with(values=values, qids=[self.qids[row] for row in rows])

    def _with(self, **changes: Any) -> ExperimentResults:
        kept = ("values", "seeds", "qids", "measures", "statistics", "efficiency", "checks", "settings", "folder")
        return ExperimentResults(**{**{name: getattr(self, name) for name in kept}, **changes})

    # Tables.

    def paper_table(self, *, digits: int = 3) -> PaperTable:
        """The papers' layout: best in bold, superscripts, gains in parentheses; see `paper_table`."""
        return paper_table(self, digits=digits)

    def to_markdown(self, *, digits: int = 3) -> str:
        """The papers' layout in Markdown."""
        return self.paper_table(digits=digits).to_markdown()

    def to_latex(self, *, digits: int = 3) -> str:
        r"""The papers' layout in LaTeX, with `\usepackage{booktabs}`."""
        return self.paper_table(digits=digits).to_latex()

    def styled(self, *, digits: int = 3) -> Any:
        """The papers' layout as a pandas Styler, for notebooks."""
        return self.paper_table(digits=digits).styled()

    # Files.

    def run(self, name: str, seed: int | None = None) -> pd.DataFrame:
        """The kept run of a system, `qid, docno, score`.

        Raises:
            ValueError: if runs were not kept, or there is none of this system and seed.
        """
        if self.folder is None:
            raise ValueError("the runs were not kept: give Experiment a save_dir")
        if name not in self.seeds or seed not in self.seeds[name]:
            known = f"seeds are {self.seeds[name]}" if name in self.seeds else f"systems are {', '.join(self.names)}"
            raise ValueError(f"there is no run of {name!r} with seed {seed}; {known}")
        return pd.concat([read_run(path) for path in RunStore.files(self.folder, name, seed)], ignore_index=True)

    def save(self, folder: str | Path) -> None:
        """Writes settings, per-query values, checks, efficiency and the tables; `load` restores the results.

        Runs are not among them: these are written while an experiment with `save_dir` runs.

        Args:
            folder: made if need be.
        """
        folder = Path(folder)
        described = {
            "systems": [{"name": name, "seeds": self.seeds[name]} for name in self.names],
            "queries": self.qids,
            "measures": self.measures,
            "statistics": self.statistics.as_dict(),
            **self.settings,
        }
        _write(folder / "results.json", json.dumps(described, indent=1))
        frames = {"perquery.csv.gz": self.perseed, "checks.csv": self.checks}
        frames |= {"table.csv": self.table, "comparisons.csv": self.comparisons}
        if self.efficiency is not None:
            frames["efficiency.csv"] = self.efficiency
        for file, frame in frames.items():
            with replacing(folder / file) as path:
                frame.to_csv(path, index=False, compression="gzip" if file.endswith(".gz") else None)
        _write(folder / "table.md", self.to_markdown() + "\n")
        _write(folder / "table.tex", self.to_latex() + "\n")

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
        seeds = {system["name"]: system["seeds"] for system in described.pop("systems")}
        qids, measures = described.pop("queries"), described.pop("measures")
        frame = pd.read_csv(folder / "perquery.csv.gz", usecols=["value"], **EXACT_FLOATS)
        flat, values, start = frame["value"].to_numpy(dtype="float64"), {}, 0
        for name, labels in seeds.items():
            shape = (len(labels), len(qids), len(measures))
            values[name] = flat[start : start + np.prod(shape)].reshape(shape).copy()
            start += int(np.prod(shape))
        statistics = described.pop("statistics")
        statistics["baselines"] = tuple(statistics["baselines"])
        statistics["test"] = test or statistics["test"]
        if not callable(statistics["test"]) and statistics["test"] not in TESTS:
            raise ValueError(f"the test was the function {statistics['test']!r}, which is not stored: give it as test=")
        efficiency = folder / "efficiency.csv"
        return cls(
            values,
            seeds,
            qids,
            measures,
            Statistics(**statistics),
            efficiency=pd.read_csv(efficiency, keep_default_na=False, na_values=[""]) if efficiency.is_file() else None,
            checks=pd.read_csv(folder / "checks.csv", keep_default_na=False),
            settings=described,
            folder=folder,
        )


def _write(path: Path, text: str) -> None:
    with replacing(path) as temporary:
        temporary.write_text(text, encoding="utf-8")
