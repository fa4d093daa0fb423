"""What a claim is compared by: outcomes, and the kinds of comparisons, each of which gives a difference and its error.

Shapes: Q queries, S seeds, C cells. A cell is a system, how it was trained, and what it was tested on.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import inf
from typing import NamedTuple, Protocol

import numpy as np
import pandas as pd

from pyterrier_longdoc.common.frames import as_strings, check_columns
from pyterrier_longdoc.experiment.significance import mean_over_seeds, resampled_means

from .verdict import SEEDS, SEEN, UNCHANGED, Effect, Estimate, paired, verdict, within

COLLECTIONS = ("early", "uniform", "far")
"""Where relevant passages are: within the length that FirstP reads, anywhere, behind it; otherwise they are alike."""

KEYS = ["system", "trained", "test", "seed", "qid"]
FIGURES = ["study", "system", "step", "figure", "value", "n"]


# Outcomes.


class Cell(NamedTuple):
    """A system, how it was trained, and on which collection it was tested."""

    system: str
    trained: str
    test: str

    def __str__(self) -> str:
        return f"{self.system} ({self.trained}) on {self.test}"


class NotRunError(LookupError):
    """Outcomes that a comparison needs are not there; the message says which."""


@dataclass(frozen=True, eq=False)
class Outcomes:
    """Reciprocal ranks by query, means over seeds, and figures that are no ranking; make it with `read`.

    Attributes:
        values: of each cell `(Q,)` reciprocal ranks by qid, sorted.
        seeds: how many each is the mean of.
        figures: `study, system, step, figure, value, n`.
    """

    values: Mapping[Cell, pd.Series]
    seeds: Mapping[Cell, int]
    figures: pd.DataFrame

    @classmethod
    def read(cls, outcomes: pd.DataFrame, figures: pd.DataFrame | None = None) -> Outcomes:
        """Checks frames and averages seeds.

        Args:
            outcomes: `system, trained, test, seed, qid, rr`; of any order.
            figures: `study, system, step, figure, value, n`.

        Raises:
            ValueError: if columns are missing, a value is no reciprocal rank or stands there twice, or the seeds of a
                system were tested on different queries.
        """
        check_columns(outcomes, [*KEYS, "rr"], "outcomes")
        figures = pd.DataFrame(columns=FIGURES) if figures is None else figures
        check_columns(figures, FIGURES, "figures")
        wrong = outcomes[~outcomes["rr"].between(0, 1) | outcomes[KEYS].isna().any(axis=1)]
        if len(wrong):
            raise ValueError(f"rr must be between 0 and 1, and nothing empty: {wrong.iloc[0].to_dict()}")
        rows = outcomes.assign(qid=as_strings(outcomes["qid"]))
        twice = rows[rows.duplicated(KEYS)]
        if len(twice):
            raise ValueError(f"outcomes have two values for one query and seed: {twice.iloc[0].to_dict()}")
        values, seeds = {}, {}
        for key, of_cell in rows.groupby(["system", "trained", "test"]):
            cell = Cell(*map(str, key))
            table = of_cell.pivot(index="qid", columns="seed", values="rr").sort_index()
            if table.isna().any(axis=None):
                raise ValueError(f"the seeds of {cell} were tested on different queries: run it anew")
            values[cell] = pd.Series(mean_over_seeds(table.to_numpy(dtype="float64").T), index=table.index)
            seeds[cell] = table.shape[1]
        return cls(values, seeds, figures)

    def of(self, cells: Sequence[Cell]) -> np.ndarray:
        """`(Q, C)` reciprocal ranks of the same queries.

        Raises:
            NotRunError: naming all cells that are missing.
            ValueError: if they were tested on different queries.
        """
        missing = list(dict.fromkeys(str(cell) for cell in cells if cell not in self.values))
        if missing:
            raise NotRunError("; ".join(missing))
        qids = self.values[cells[0]].index
        for cell in cells:
            if not self.values[cell].index.equals(qids):
                raise ValueError(f"{cells[0]} and {cell} were tested on different queries: run one of them anew")
        return np.stack([self.values[cell].to_numpy() for cell in cells], axis=1)

    def fewest_seeds(self, cells: Iterable[Cell]) -> int:
        """Of the systems that were trained; 1 if none was."""
        return min((self.seeds[cell] for cell in cells if cell.trained != "none"), default=1)

    def settled(self, cells: Iterable[Cell]) -> bool:
        """Whether the systems that were trained have `SEEDS` seeds, and another epoch changes nothing: see `verdict`.

        Another epoch of `early>far` is `early>far>far`. It is equivalent at the level .05, by two one-sided tests.
        """
        return all(self._converged(cell) for cell in cells if cell.trained != "none")

    def _converged(self, cell: Cell) -> bool:
        again = cell._replace(trained=f"{cell.trained}>{cell.trained.split('>')[-1]}")
        if min(self.seeds[cell], self.seeds.get(again, 0)) < SEEDS:
            return False
        x, y = self.of([again, cell]).T
        return verdict(paired(x, y).interval(0.05), within(UNCHANGED).times(y.mean()), settled=False) == SEEN

    def figure(self, study: str, figure: str, system: str | None = None) -> pd.DataFrame:
        """Rows of a study's figure, of one system or all.

        Raises:
            NotRunError: if there are none.
        """
        f = self.figures
        rows = f[(f["study"] == study) & (f["figure"] == figure) & ((f["system"] == system) | (system is None))]
        if rows.empty:
            raise NotRunError(f"study {study!r}: {figure}")
        return rows


# Comparisons.


@dataclass(frozen=True)
class Evidence:
    """What a comparison found.

    Attributes:
        ours: the figure of the system.
        reference: that of what it is compared to.
        estimate: their difference.
        scale: what the claimed effect is a share of.
        queries: that it was computed from.
        seeds: of the system that has the fewest.
        settled: whether the systems can contradict a paper, see `Outcomes.settled`.
        detail: what of the comparison depends on what was run.
    """

    ours: float
    reference: float
    estimate: Estimate
    scale: float
    queries: int
    seeds: int
    settled: bool = False
    detail: str = ""


class Comparison(Protocol):
    """One thing that a claim says.

    Attributes:
        claimed: where the difference should lie, as shares of `Evidence.scale`.
        published: the two figures in the paper, if it has them.
    """

    @property
    def claimed(self) -> Effect: ...

    @property
    def published(self) -> tuple[float | None, float | None]: ...

    @property
    def needs(self) -> Sequence[Cell]:
        """The cells that it always needs."""

    def evidence(self, outcomes: Outcomes) -> Evidence:
        """What was found.

        Raises:
            NotRunError: naming what is missing.
        """


@dataclass(frozen=True)
class Difference:
    """The mean difference of two cells: paired t-test over queries.

    Attributes:
        system: the cell that the claim is about.
        reference: what it is compared to.
        claimed: shares of the reference's mean; with `of`, of the difference of the means of two cells, of which
            nothing is left to have a share of (0) where the first is not better. The scale is taken as known, as the
            bounds of `significance.equivalence_p_values` are.
        published: the papers' figures of the two cells.
    """

    system: Cell
    reference: Cell
    claimed: Effect
    published: tuple[float | None, float | None] = (None, None)
    of: tuple[Cell, Cell] | None = None

    def __str__(self) -> str:
        (one, trained, test), (other, trained_other, _) = self.system, self.reference
        if one == other:
            return f"{one}, {trained} against {trained_other}, on {test}"
        return f"{one} against {other}, {trained}, on {test}"

    @property
    def needs(self) -> Sequence[Cell]:
        """See `Comparison`."""
        return [self.system, self.reference, *(self.of or ())]

    def evidence(self, outcomes: Outcomes) -> Evidence:
        """See `Comparison`."""
        values = outcomes.of(self.needs)
        x, y, *of = values.T
        scale = max(of[0].mean() - of[1].mean(), 0.0) if of else y.mean()
        seeds, settled = outcomes.fewest_seeds(self.needs), outcomes.settled(self.needs)
        return Evidence(x.mean(), y.mean(), paired(x, y), scale, len(x), seeds, settled)


@dataclass(frozen=True)
class Spread:
    """How much a system's mean depends on window and stride, against that of another system.

    The standard deviation over settings of the means over queries; its difference has the standard error that
    resampled queries give it (Efron & Tibshirani 1993, chapter 6), and Student's t. Settings are those that both were
    run with: `NAME`, and each `NAME WINDOW/STRIDE`.

    Attributes:
        system: its name.
        reference: that of the other.
        trained: how both were trained.
        test: the collection.
        claimed: shares of the reference's standard deviation.
        published: the papers' standard deviations.
    """

    system: str
    reference: str
    trained: str
    test: str
    claimed: Effect
    published: tuple[float | None, float | None] = (None, None)

    def __str__(self) -> str:
        return f"spread of {self.system} against {self.reference}, {self.trained}, on {self.test}"

    @property
    def needs(self) -> Sequence[Cell]:
        """See `Comparison`."""
        return [Cell(name, self.trained, self.test) for name in (self.system, self.reference)]

    def evidence(self, outcomes: Outcomes) -> Evidence:
        """See `Comparison`."""
        settings = sorted(self._settings(self.system, outcomes) & self._settings(self.reference, outcomes))
        if len(settings) < 3:
            raise NotRunError(
                f"{self.system} and {self.reference} ({self.trained}) on {self.test} with the same three windows and "
                f"strides or more: there are {len(settings)}"
            )
        cells = [
            Cell(f"{name}{s}", self.trained, self.test) for name in (self.system, self.reference) for s in settings
        ]
        values = outcomes.of(cells)
        ours, reference = self._spreads(values.mean(0)[None])[0]
        drawn = np.subtract(*self._spreads(resampled_means(values)).T)
        # A single query is drawn again and again, and varies no less for that.
        error = float(drawn.std(ddof=1)) if len(values) > 1 else inf
        estimate = Estimate(ours - reference, error, max(len(values) - 1, 1))
        detail = f"{len(settings)} windows and strides"
        seeds, settled = outcomes.fewest_seeds(cells), outcomes.settled(cells)
        return Evidence(ours, reference, estimate, reference, len(values), seeds, settled, detail)

    def _settings(self, name: str, outcomes: Outcomes) -> set[str]:
        """What stands behind the name, as " 32/24", of all settings that were run."""
        pattern = re.compile(re.escape(name) + r"( \d+/\d+)?")
        run = [cell.system for cell in outcomes.values if cell[1:] == (self.trained, self.test)]
        return {system.removeprefix(name) for system in run if pattern.fullmatch(system)}

    @staticmethod
    def _spreads(means: np.ndarray) -> np.ndarray:
        """`(R, 2)` standard deviations over settings of `(R, 2 * settings)` means."""
        return means.reshape(len(means), 2, -1).std(axis=2, ddof=1)


@dataclass(frozen=True)
class Trend:
    """Whether a proportion rises over steps: the slope of a line through a few points, tested as by Cochran & Armitage.

    Its error is that of independent proportions. Those of one set of queries vary together, so that their slope is
    better known than that: the test is on the safe side. Without the number of queries nothing is known of the error.

    Attributes:
        study: of the figures.
        system: whose.
        figure: the proportion.
        claimed: shares of the first step's proportion, for each step.
        published: the papers' proportions, of the last step and the first.
    """

    study: str
    system: str
    figure: str
    claimed: Effect
    published: tuple[float | None, float | None] = (None, None)

    def __str__(self) -> str:
        return f"{self.figure} of {self.system}, the last iteration against the first, difference by iteration"

    @property
    def needs(self) -> Sequence[Cell]:
        """See `Comparison`."""
        return []

    def evidence(self, outcomes: Outcomes) -> Evidence:
        """See `Comparison`."""
        rows = outcomes.figure(self.study, self.figure, self.system).astype({"step": "float64"}).sort_values("step")
        if len(rows) < 2:
            raise NotRunError(f"study {self.study!r}: a second iteration")
        p, n = rows["value"].to_numpy(dtype="float64"), pd.to_numeric(rows["n"]).to_numpy(dtype="float64")
        steps = rows["step"].to_numpy() - rows["step"].mean()
        weights = steps / (steps**2).sum()
        if np.isfinite(n).all() and (n > 0).all():
            pooled = (p * n).sum() / n.sum()
            error = float(np.sqrt((weights**2 / n).sum() * pooled * (1 - pooled)))
        else:
            error = inf
        queries = int(n.min()) if np.isfinite(error) else 0
        detail = f"{len(rows)} iterations"
        estimate = Estimate(float(weights @ p), error)
        return Evidence(p[-1], p[0], estimate, float(p[0]), queries, seeds=1, detail=detail)


@dataclass(frozen=True)
class Gains:
    """Whether long models gain more over FirstP where more of the relevant text stands behind the first window.

    An estimator's shares put the collections in order; the gains of two neighbours are compared, paired by query. A
    gain is the mean reciprocal rank of all long models that were run on both, less FirstP's. Several estimators are
    averaged.

    Attributes:
        pair: 0 for the first two collections in that order, 1 for the next two.
        systems: the long models.
        trained: how they and FirstP were trained.
        claimed: shares of FirstP's mean on the first collection, for a share of 1 of the relevant text.
    """

    pair: int
    systems: tuple[str, ...]
    trained: str
    claimed: Effect
    published: tuple[float | None, float | None] = (None, None)

    def __str__(self) -> str:
        return f"gain over FirstP, {self.trained}, step {self.pair + 1}"

    @property
    def needs(self) -> Sequence[Cell]:
        """See `Comparison`."""
        return [Cell("FirstP", self.trained, collection) for collection in COLLECTIONS]

    def evidence(self, outcomes: Outcomes) -> Evidence:
        """See `Comparison`."""
        behind = self._behind(outcomes)
        less, more = list(behind.index)[self.pair : self.pair + 2]
        run = [s for s in self.systems if all(Cell(s, self.trained, c) in outcomes.values for c in (less, more))]
        if not run:
            raise NotRunError(f"one of the long models ({self.trained}) on {less} and {more}, e.g. MaxP")
        firstp = [Cell("FirstP", self.trained, c) for c in (more, less, behind.index[0])]
        cells = [Cell(s, self.trained, c) for c in (more, less) for s in run]
        values = outcomes.of([*firstp, *cells])
        in_more, in_less = np.split(values[:, 3:], 2, axis=1)
        x, y = in_more.mean(1) - values[:, 0], in_less.mean(1) - values[:, 1]
        scale = float(behind[more] - behind[less]) * values[:, 2].mean()
        detail = f"{more} against {less}; models: {len(run)}"
        seeds, settled = outcomes.fewest_seeds(cells), outcomes.settled([*firstp, *cells])
        return Evidence(x.mean(), y.mean(), paired(x, y), scale, len(x), seeds, settled, detail)

    @staticmethod
    def _behind(outcomes: Outcomes) -> pd.Series:
        """The share behind the first window of each collection, the smallest first."""
        figure = "share in first window (estimated)"
        rows = outcomes.figure("positions", figure)
        means = rows.assign(step=rows["step"].astype(str)).groupby("step")["value"].mean()
        missing = [collection for collection in COLLECTIONS if collection not in means]
        if missing:
            raise NotRunError(f"study 'positions': {figure} of {', '.join(missing)}")
        return 1 - means[list(COLLECTIONS)].sort_values(ascending=False, kind="stable")
