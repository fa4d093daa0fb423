"""Compare the systems of an experiment: means, tests, tables and groups of queries."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import pandas as pd

from ..common.arguments import check_arguments, to_scalar
from ..common.frames import as_strings, check_columns
from ..common.warnings import warn
from .groups import PositionEffectiveness
from .significance import RESAMPLES, Statistics, Test, aggregate, comparisons, mean_over_seeds, without_rounding
from .tables import Decimals, paper_table

FEW_QUERIES = 25
"""The minimum number of queries for a comparison according to Buckley & Voorhees 2000, who recommend 50."""

KEYS = ["name", "qid", "measure"]


class ComparisonWarning(UserWarning):
    """A comparison may be unreliable: there are few queries, or two systems are equal."""


@dataclass(frozen=True, eq=False, repr=False)
class Comparison:
    """The result of `compare`: means, tests and tables; `print` shows the papers' layout.

    Args:
        values: for each system an array `(S, Q, M)` of S seeds, Q queries and M measures.
        qids: the Q query ids.
        measures: the names of the M measures.
        statistics: how systems are compared.
        round: decimals of means and standard deviations in `table` and in the papers' layout, by measure or for all.
    """

    values: Mapping[str, np.ndarray]
    qids: list[str]
    measures: list[str]
    statistics: Statistics = field(default_factory=Statistics)
    round: Decimals = None

    def __post_init__(self) -> None:
        self.statistics.check_names(self.names)

    def __repr__(self) -> str:
        return f"Comparison({len(self.names)} systems, {len(self.qids)} queries, {', '.join(self.measures)})"

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
        """Means over queries and seeds (sums of counts), one row per system and one column per measure."""
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
        """`name, qid, measure, value`, averaged over seeds."""
        index = pd.MultiIndex.from_product([self.names, self.qids, self.measures], names=KEYS)
        values = np.concatenate([array.ravel() for array in self.query_values.values()])
        return pd.DataFrame({"value": values}, index=index).reset_index()

    @cached_property
    def comparisons(self) -> pd.DataFrame:
        """One row for each system, measure and reference, which is the system's partner or a baseline.

        Columns:

        - `name`, `reference`, `kind` (`"partner"` or `"baseline"`), `measure`;
        - `mean`, `reference mean`, their `difference` and its bootstrap interval `low, high` (counts: of the sums);
        - `gain`: the relative difference (0.05 is +5 %), with its interval `gain low, gain high`;
        - `+`, `-`: the numbers of better and worse queries;
        - `p-value`, `reject`, `p-value corrected`;
        - `effect size`: Cohen's d_z;
        - `equivalence p-value`, `equivalent`: two one-sided tests (TOST) of a difference within `margin`.
        """
        return comparisons(self.query_values, self.measures, self.statistics)

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

    def retest(self, **changes: Any) -> Comparison:
        """Compare the same values in another way.

        Args:
            **changes: arguments of `compare` from `baseline` to `resamples`, except `seeds`; also `confidence`, the
                confidence level of the intervals (.95), and `seed`, the random seed of the resamples (42).

        Example:
            `results.retest(test="wilcoxon", baseline="BM25", confidence=.99)`
        """
        if "baseline" in changes:
            changes["baseline"] = _names(changes["baseline"])
        if "partner" in changes:
            changes["partner"] = dict(changes["partner"] or {})
        return dataclasses.replace(self, statistics=dataclasses.replace(self.statistics, **changes))

    def subset(self, qids: Iterable[str]) -> Comparison:
        """Return the comparison on these queries only.

        Raises:
            ValueError: for a query without values.
        """
        wanted = set(map(str, qids))
        unknown = sorted(wanted - set(self.qids))
        if unknown:
            raise ValueError(f"qid {unknown[0]!r} has no values: use qids such as {', '.join(self.qids[:5])}")
        rows = [row for row, qid in enumerate(self.qids) if qid in wanted]
        values = {name: array[:, rows] for name, array in self.values.items()}
        return dataclasses.replace(self, values=values, qids=[self.qids[row] for row in rows])

    def by(self, values: Mapping[str, float], edges: Sequence[float], *, label: str = "") -> PositionEffectiveness:
        """Divide the queries into groups by a number, and compare the systems within each group.

        Args:
            values: a number for each qid, e.g. of `position_by_query` or `length_by_query`. Queries without a number,
                and those below the first edge, are left out.
            edges: the lower bounds of the groups, ascending; the last group has no upper bound. A group without queries
                is left out.
            label: what the numbers are, for the axis of the plot.

        Raises:
            ValueError: if the edges do not ascend, or no query reaches the first one.

        Example:
            `results.by(ld.position_by_query(dataset.gold), [0, 256, 512]).plot()`
        """
        values = {str(qid): value for qid, value in values.items()}
        if list(edges) != sorted(set(edges)):
            raise ValueError(f"edges={list(edges)} must ascend")
        groups = {}
        for low, high in zip(edges, [*edges[1:], np.inf], strict=True):
            qids = [qid for qid in self.qids if low <= values.get(qid, np.nan) < high]
            if qids:
                groups[f">= {low:g}" if high == np.inf else f"{low:g} to < {high:g}"] = self.subset(qids)
        if not groups:
            raise ValueError(f"edges={list(edges)} must begin lower: no query with values reaches the first one")
        return PositionEffectiveness(groups, label)

    def to_markdown(self, *, digits: int | None = None) -> str:
        """Return the papers' layout in Markdown, with the best in bold, superscripts and gains; see `paper_table`."""
        return paper_table(self, digits=digits).to_markdown()

    def to_latex(self, *, digits: int | None = None) -> str:
        r"""Return the papers' layout in LaTeX; it needs `\usepackage{booktabs}`."""
        return paper_table(self, digits=digits).to_latex()

    def styled(self, *, digits: int | None = None) -> Any:
        """Return the papers' layout as a pandas Styler, for notebooks."""
        return paper_table(self, digits=digits).styled()


def compare(
    values: pd.DataFrame,
    *,
    measures: Sequence[Any] | None = None,
    baseline: str | Sequence[str] | None = None,
    partner: Mapping[str, str] | None = None,
    seeds: Mapping[str, Sequence[str]] | None = None,
    test: Test = "t",
    correction: str | None = None,
    alpha: float = 0.05,
    margin: float = 0.05,
    resamples: int = RESAMPLES,
    round: Decimals = None,
) -> Comparison:
    """Compare systems by the per-query values of `pt.Experiment`, as in Boytsov et al. 2025.

    With one run per system and one baseline, means, p-values and corrections are those of
    `pt.Experiment(baseline=...)`, with one exception: systems with equal values for every query have the p-value 1
    instead of NaN, also in the correction.

    Args:
        values: `name, qid, measure, value`, as `pt.Experiment(..., perquery=True)` returns without `round=`, which
            would round what is tested. Rows without a value (topics without judgements) are left out. Systems are in
            the order of the index, which is that of the experiment.
        measures: the measures to show, in this order. None shows all, in the order of the rows. It can differ from
            run to run, because PyTerrier does not keep the order of its `eval_metrics`.
        baseline: the name of a system, or several names. All other systems are compared to each.
        partner: a dict `{system: partner}`. The gain of a system is relative to its partner, e.g. its own FirstP.
        seeds: a dict `{system: names}`: the runs with these names become one system. Their values are averaged per
            query before they are tested.
        test: `"t"` (paired, as in the paper), `"wilcoxon"`, `"randomisation"`, `"bootstrap"`, or a function like
            `scipy.stats.ttest_rel`; see `significance.p_values`.
        correction: a method of `statsmodels.stats.multitest.multipletests` or its short name, as in `pt.Experiment`,
            e.g. `"holm"`, `"bonferroni"`, `"fdr_bh"` (Benjamini-Hochberg). It is applied separately for each measure,
            over all systems compared to one baseline or to their partners.
        alpha: the significance level; with a correction, the family-wise error rate. The paper uses 0.01 for MS MARCO
            dev and 0.05 elsewhere.
        margin: a system is equivalent to its reference if it differs by less than this share: 0.05 is "within 5 %".
        resamples: the number of resamples of the randomisation test and of the bootstraps.
        round: decimals of means and standard deviations in `.table` and in the papers' layout, for all measures or by
            measure. None leaves `.table` unrounded and uses 3 in the layout. Tests never use rounded values.

    Returns:
        The comparison: `print` shows means, gains and significance, `.table` has the columns of `pt.Experiment`,
        `.comparisons` all tests, `.to_latex()` the papers' layout.

    Raises:
        ValueError: if a system has two values for a query and a measure, or lacks a query that another one has, or if
            an argument names an unknown system or measure.

    Example:
        `ld.compare(pt.Experiment(systems, topics, qrels, ["ndcg_cut_10"], perquery=True), baseline="BM25")`
    """
    statistics = Statistics(_names(baseline), dict(partner or {}), test, correction, alpha, margin, resamples=resamples)
    arrays, qids, names_of_measures = _arrays(values, measures)
    results = Comparison(_seeded(arrays, seeds or {}), qids, names_of_measures, statistics, round=to_scalar(round))
    for measure, decimals in round.items() if isinstance(round, Mapping) else [(results.measures[0], round)]:
        check_arguments("str", choices=results.measures, round=measure)
        check_arguments("int | None", at_least=0, round=decimals)
    for message in _doubts(results):
        warn(message, ComparisonWarning)
    return results


def _names(baseline: str | Sequence[str] | None) -> tuple[str, ...]:
    """Return the distinct names of the baselines."""
    return tuple(dict.fromkeys([baseline] if isinstance(baseline, str | int) else baseline or ()))


def _arrays(frame: pd.DataFrame, measures: Sequence[Any] | None) -> tuple[dict[str, np.ndarray], list[str], list[str]]:
    """Return `(Q, M)` values by system, the sorted qids, and the measures."""
    check_columns(frame, (*KEYS, "value"), "values")
    # PyTerrier sorts the rows by name; their index keeps the order of the systems.
    rows = frame.sort_index(kind="stable").dropna(subset="value").reset_index(drop=True)
    rows = rows.assign(**{name: as_strings(rows[name]) for name in KEYS})
    found = rows["measure"].unique().tolist()
    wanted = found if measures is None else list(dict.fromkeys(map(str, measures)))
    for measure in wanted:
        check_arguments("str", choices=found, measures=measure)
    rows = rows[rows["measure"].isin(wanted)]
    if not len(rows):
        raise ValueError("values has no row with a value: give compare the frame of pt.Experiment(perquery=True)")
    repeated = rows[rows.duplicated(KEYS)]
    if len(repeated):
        name, qid, measure = repeated[KEYS].iloc[0]
        raise ValueError(f"values has several rows of {name!r} for the qid {qid!r} and {measure}: keep one")
    # One column per system and measure, sorted by qid, so that resamples do not depend on the order of the topics.
    table = rows.pivot(index="qid", columns=["name", "measure"], values="value")
    names = rows["name"].unique().tolist()
    table = table.reindex(columns=pd.MultiIndex.from_product([names, wanted]))
    lacking = np.argwhere(table.isna().to_numpy())
    if len(lacking):
        row, column = lacking[0]
        name, measure = table.columns[column]
        raise ValueError(
            f"values has no {measure} of {name!r} for the qid {table.index[row]!r}, but others of this query: run all "
            f"systems on the same topics, with the same measures"
        )
    return {name: table[name].to_numpy("float64") for name in names}, table.index.tolist(), wanted


def _seeded(arrays: Mapping[str, np.ndarray], seeds: Mapping[str, Sequence[str]]) -> dict[str, np.ndarray]:
    """Return `(S, Q, M)` values by system; a system with seeds is at the place of its first run."""
    system_of: dict[str, str] = {}
    for system, runs in seeds.items():
        for name in runs:
            if name not in arrays:
                raise ValueError(f"seeds of {system!r} name {name!r}, which must be one of {', '.join(arrays)}")
            if name in system_of:
                raise ValueError(f"seeds name {name!r} twice: each run belongs to one system")
            system_of[name] = system
    grouped: dict[str, list[np.ndarray]] = {}
    for name, array in arrays.items():
        if name in seeds and name not in system_of:
            raise ValueError(f"seeds name {name!r}, which is also a run of its own: choose another name")
        grouped.setdefault(system_of.get(name, name), []).append(array)
    return {name: np.stack(runs) for name, runs in grouped.items()}


def _doubts(results: Comparison) -> Iterator[str]:
    """Yield what makes a comparison unreliable."""
    statistics, queries, values = results.statistics, len(results.qids), results.query_values
    for name, runs in results.values.items():
        if len({run.tobytes() for run in runs}) < len(runs):
            yield f"some seeds of {name} have equal values for every query"
    pairs = [pair for _, _, references in statistics.references(results.names) for pair in references.items()]
    for name, reference in dict.fromkeys(pairs):
        if np.array_equal(without_rounding(values[name], values[reference]), values[reference]):
            yield f"{name} and {reference} have equal values for every query"
    if pairs and queries < FEW_QUERIES:
        yield f"{queries} queries; comparisons need at least {FEW_QUERIES}, ideally 50 (Buckley & Voorhees 2000)"
    # Only the signs are random in these tests, so no p-value can be below 2 / 2^Q.
    least = 2.0 ** (1 - queries)
    if pairs and statistics.test in ("wilcoxon", "randomisation") and least >= statistics.alpha:
        yield f"with {queries} queries no p-value of test={statistics.test!r} can be below {least:g}"
