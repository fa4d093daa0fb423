"""The papers' tables and figures of what was replicated."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from pyterrier_longdoc.common.files import import_extra
from pyterrier_longdoc.common.plots import COLOURS
from pyterrier_longdoc.experiment import ExperimentResults, PaperTable, Statistics, Sweep, paper_table

from .replicate import SYSTEMS, UNTRAINED
from .rst import csv_table, paper_table_as_rst

MEASURE = "RR"
ALPHA = 0.05
"""Of the paired t-tests behind the marks; .01 in the paper, which has more queries."""

COLUMNS = {
    "early": ("early", "early"),
    "uniform": ("early", "uniform"),
    "far, zero-shot": ("early", "far"),
    "far, fine-tuned": ("early>far", "far"),
    "far, two epochs": ("early>far>far", "far"),
}
"""Of the main table: how systems are trained, and where they are tested."""

Cells = Mapping[str, tuple[str, str]]
"""By the name of a row: system and training."""


def main_table(outcomes: pd.DataFrame) -> PaperTable | None:
    """Tables 1 and 4 of Boytsov et al. 2025: all systems, each beside FirstP.

    Args:
        outcomes: of `read_outcomes`; the same for all tables.

    Returns:
        The table; None if nothing of it was run.
    """
    settings = outcomes["system"].str.contains(r"\d+/\d+$|chunks?$|layers?$|tokens$|BeST")
    found = set(outcomes["system"][~settings])
    names = [name for name in dict.fromkeys([*UNTRAINED, "BiEncoder", *SYSTEMS]) if name in found]
    untrained = set(outcomes["system"][outcomes["trained"] == "none"])
    sets = {}
    for column, (trained, test) in COLUMNS.items():
        cells = {name: (name, "none" if name in untrained else trained) for name in names}
        sets[column] = results_of(outcomes, cells, test, dict.fromkeys(names, "FirstP"))
    return _laid_out(sets)


def debiasing_table(outcomes: pd.DataFrame) -> PaperTable | None:
    """Table 2: the same systems trained on *early*, on rotated documents, and on passages anywhere."""
    own = outcomes[outcomes["trained"].isin(["rotated", "uniform"])]
    systems = dict.fromkeys(own["system"])
    cells = {name: (name, "early") for name in systems}
    cells |= {f"{name}, {trained}": (name, trained) for name in systems for trained in ("rotated", "uniform")}
    partner = {row: system for row, (system, trained) in cells.items() if trained != "early"}
    return _laid_out({test: results_of(outcomes, cells, test, partner) for test in ("early", "far")})


def students_table(outcomes: pd.DataFrame) -> PaperTable | None:
    """Table 3 of PARADE's paper: small students with and without a teacher."""
    systems = dict.fromkeys(outcomes["system"][outcomes["trained"] == "distilled"])
    cells = {name: (name, "early") for name in systems}
    cells |= {f"{name}, distilled": (name, "distilled") for name in systems}
    partner = {f"{name}, distilled": name for name in systems}
    return _laid_out({"early": results_of(outcomes, cells, "early", partner)})


def best_table(outcomes: pd.DataFrame) -> PaperTable | None:
    """Table 1 of BeST's paper: rankers trained on documents whose relevant passage is anywhere."""
    cells = {name: (name, "uniform") for name in ("FirstP", "MaxP", "BeST")}
    return _laid_out({"uniform": results_of(outcomes, cells, "uniform", {"MaxP": "FirstP", "BeST": "FirstP"})})


def chunks(outcomes: pd.DataFrame) -> Sweep | None:
    """Table 6 of Boytsov et al. 2025: PARADE attn trained and tested on documents cut after so many chunks."""
    return _sweep(outcomes, r"PARADE attn, (\d+) chunks?", ["chunks"])


def windows(outcomes: pd.DataFrame, system: str) -> Sweep | None:
    """Table 8 of Boytsov et al. 2022: a system with other windows and strides.

    Args:
        outcomes: of `read_outcomes`.
        system: its name.
    """
    return _sweep(outcomes, rf"{re.escape(system)} (\d+)/(\d+)", ["window_size", "stride"])


TABLES: dict[str, Callable[[pd.DataFrame], PaperTable | None]] = {
    "Boytsov et al. 2025, Tables 1 and 4": main_table,
    "Boytsov et al. 2025, Table 2": debiasing_table,
    "PARADE, Table 3": students_table,
    "BeST, Table 1": best_table,
}
"""By what they are in the papers."""
SWEEPS: dict[str, Callable[[pd.DataFrame], Sweep | None]] = {
    "Boytsov et al. 2025, Table 6": chunks,
    "Boytsov et al. 2022, Table 8, PRETR": lambda outcomes: windows(outcomes, "PARADE PRETR"),
    "Boytsov et al. 2022, Table 8, PRETR-Q": lambda outcomes: windows(outcomes, "PARADE PRETR-Q"),
}


def results_of(outcomes: pd.DataFrame, cells: Cells, test: str, partner: Mapping[str, str]) -> ExperimentResults | None:
    """What was run of some systems on a test collection, as an experiment's results; None for nothing.

    Args:
        outcomes: of `read_outcomes`.
        cells: the rows of a table.
        test: the collection.
        partner: by row, the one that it is compared with.
    """
    values: dict[str, np.ndarray] = {}
    seeds: dict[str, list[int | None]] = {}
    of_test, qids = outcomes[outcomes["test"] == test], []
    for row, (system, trained) in cells.items():
        own = of_test[(of_test["system"] == system) & (of_test["trained"] == trained)]
        if len(own):
            by_seed = own.pivot(index="seed", columns="qid", values="rr")
            qids = list(by_seed.columns)
            values[row] = by_seed.to_numpy()[..., None]
            seeds[row] = [None] if trained == "none" else by_seed.index.tolist()
    if not values:
        return None
    known = {row: other for row, other in partner.items() if row in values and other in values and row != other}
    return ExperimentResults(values, seeds, qids, [MEASURE], Statistics(partner=known, alpha=ALPHA))


def _laid_out(sets: Mapping[str, ExperimentResults | None]) -> PaperTable | None:
    found = {name: results for name, results in sets.items() if results is not None}
    # All columns of a table have marks of the same meaning.
    compared = {name: results for name, results in found.items() if results.statistics.partner}
    return paper_table(compared or found, average=False) if found else None


def _sweep(outcomes: pd.DataFrame, pattern: str, parameters: Sequence[str]) -> Sweep | None:
    names = dict.fromkeys(outcomes["system"][outcomes["trained"] == "early"])
    found = {name: match.groups() for name in names if (match := re.fullmatch(pattern, name))}
    results = results_of(outcomes, {name: (name, "early") for name in found}, "early", {})
    if results is None:
        return None
    values = [[int(value) for value in found[name]] for name in results.names]
    return Sweep(results, pd.DataFrame(values, columns=list(parameters)))


def by_seed(outcomes: pd.DataFrame) -> pd.DataFrame | None:
    """What tables average over seeds: `system, trained, test`, and RR of each seed; None for one seed."""
    trained = outcomes[outcomes["trained"] != "none"]
    means = trained.pivot_table(values="rr", index=["system", "trained", "test"], columns="seed", sort=False)
    several = means[means.notna().sum(axis=1) > 1]
    if several.empty:
        return None
    shown = several.apply(lambda column: column.map("{:.3f}".format).where(column.notna(), ""))
    return shown.rename(columns="seed {}".format).rename_axis(columns=None).reset_index()


FINE_TUNING = {name: cell for name, cell in COLUMNS.items() if name.startswith("far")}


def fine_tuning(outcomes: pd.DataFrame) -> pd.DataFrame | None:
    """Figure 2 of Boytsov et al. 2025: RR on *far* of each system, before and after training on it.

    Returns:
        One row for each system that was trained on *far*, one column for each training.
    """
    far = outcomes[outcomes["test"] == "far"]
    means = far.groupby(["system", "trained"])["rr"].mean().unstack()
    if "early>far" not in means:
        return None
    names = {trained: name for name, (trained, _) in FINE_TUNING.items()}
    found = means.rename(columns=names).reindex(columns=list(FINE_TUNING)).dropna(axis=1, how="all")
    rows = [name for name in SYSTEMS if name in found.index and pd.notna(found.at[name, "far, fine-tuned"])]
    return found.loc[rows]


# As text and pictures.


def tables_as_rst(outcomes: pd.DataFrame) -> Iterator[str]:
    """Each table of which something was run, in reStructuredText, with its number in its paper above it."""
    for title, make in TABLES.items():
        table = make(outcomes)
        if table is not None:
            yield f"{title}:\n\n{paper_table_as_rst(table)}"
    for title, make_sweep in SWEEPS.items():
        sweep = make_sweep(outcomes)
        if sweep is not None:
            frame = sweep.parameters.assign(**{MEASURE: sweep.table[MEASURE].map("{:.3f}".format)})
            yield f"{title}:\n\n{csv_table(frame)}"
    seeds = by_seed(outcomes)
    if seeds is not None:
        yield f"Each seed, of what is a mean over several above:\n\n{csv_table(seeds)}"


def draw(outcomes: pd.DataFrame, folder: Path) -> list[Path]:
    """Draws what the papers draw, and each sweep, as far as it was run, into a folder; gives the pictures' files."""
    pictures = {}
    found = fine_tuning(outcomes)
    if found is not None:
        chance = outcomes[(outcomes["system"] == "random") & (outcomes["test"] == "far")]["rr"].mean()
        pictures["Boytsov et al. 2025, Figure 2"] = _draw_fine_tuning(found, chance)
    for title, make in SWEEPS.items():
        sweep = make(outcomes)
        if sweep is not None:
            axes: Any = sweep.plot()
            pictures[title] = axes.figure
    files = []
    for title, figure in pictures.items():
        folder.mkdir(parents=True, exist_ok=True)
        files.append(folder / f"{re.sub(r'[^a-z0-9]+', '-', title.lower())}.png")
        figure.savefig(files[-1], dpi=150, bbox_inches="tight")
    return files


def _draw_fine_tuning(found: pd.DataFrame, chance: float) -> Any:
    """A line for each system, with a point for each training; the random order is a vertical line."""
    # Not of pyplot, whose backend is the caller's.
    figures = import_extra("matplotlib.figure", "demo", "matplotlib is missing")
    figure = figures.Figure(figsize=(6.0, 1.2 + 0.3 * len(found)), layout="constrained")
    axes = figure.subplots()
    axes.hlines(found.index, found.min(axis=1), found.max(axis=1), color="0.8", zorder=1)
    for (name, values), colour, marker in zip(found.items(), COLOURS, "osD", strict=False):
        axes.scatter(values, found.index, label=name, color=colour, marker=marker, zorder=2)
    if np.isfinite(chance):
        axes.axvline(chance, color="0.5", linestyle=":", label="random order")
    axes.invert_yaxis()
    axes.set_xlabel(f"{MEASURE} on far")
    axes.legend(fontsize="small", loc="upper left", bbox_to_anchor=(1.0, 1.0))
    axes.spines[["top", "right"]].set_visible(False)
    return figure
