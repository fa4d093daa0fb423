"""The papers' tables and figures of what was replicated."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from ..experiment.results import ExperimentResults, PaperTable, list_table, paper_table
from ..experiment.significance import Statistics
from ..experiment.sweeps import Sweep
from .replicate import SYSTEMS, UNTRAINED

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


# As text and pictures.


def tables_as_rst(outcomes: pd.DataFrame) -> Iterator[str]:
    """Each table of which something was run, in reStructuredText, with its number in its paper above it."""
    for title, make in TABLES.items():
        table = make(outcomes)
        if table is not None:
            yield f"{title}:\n\n{table.to_rst()}"
    for title, make_sweep in SWEEPS.items():
        sweep = make_sweep(outcomes)
        if sweep is not None:
            frame = sweep.parameters.assign(**{MEASURE: sweep.table[MEASURE].map("{:.3f}".format)})
            yield f"{title}:\n\n{list_table(frame)}"


def draw(outcomes: pd.DataFrame, folder: Path) -> list[Path]:
    """Draws each sweep of which something was run into a folder; gives the pictures' files."""
    files = []
    for title, make in SWEEPS.items():
        sweep = make(outcomes)
        if sweep is not None:
            axes: Any = sweep.plot()
            folder.mkdir(parents=True, exist_ok=True)
            files.append(folder / f"{re.sub(r'[^a-z0-9]+', '-', title.lower())}.png")
            axes.figure.savefig(files[-1], dpi=150, bbox_inches="tight")
    return files
