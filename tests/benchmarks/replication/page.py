"""The results of a replication as a section of the documentation's page about it."""

from __future__ import annotations

import json
from pathlib import Path

import pandas as pd

from .claims import NOT_RUN, Verdicts, comparisons_as_read, verdict_of, verdicts
from .replicate import read_figures, read_outcomes
from .rst import csv_table
from .tables import tables_as_rst

_SECTION = """What was found
--------------

Printed by

.. code-block:: console

    $ python -m tests.benchmarks.replication page {folder}

{run}

{claims}

{left}

What supports the verdicts, in reciprocal rank (``claims`` also prints what is claimed, p and *detectable*):

{comparisons}

{tables}"""


def results_section(folder: str | Path) -> str:
    """The section, in reStructuredText.

    Args:
        folder: of `replicate`.

    Raises:
        FileNotFoundError: if nothing was run there.
    """
    folder = Path(folder)
    outcomes, figures = read_outcomes(folder), read_figures(folder)
    settings = json.loads((folder / "settings.json").read_text(encoding="utf-8"))
    found = verdicts(outcomes, figures)
    return _SECTION.format(
        folder=folder.as_posix(),
        run=what_was_run(outcomes, figures, settings),
        claims=csv_table(claims_that_were_run(found)),
        left=claims_that_are_left(found),
        comparisons=csv_table(comparisons_that_were_run(found)),
        tables="\n\n".join(tables_as_rst(outcomes)),
    )


def claims_that_were_run(found: Verdicts) -> pd.DataFrame:
    """A row for each claim of which something was run: number, sentence, source and verdict."""
    claims = [claim for claim in found.claims.to_dict("records") if claim["run"]]
    rows = [(c["claim"], f"{c['sentence']} *{c['source']}*", verdict_of(c)) for c in claims]
    return pd.DataFrame(rows, columns=["", "claim", "verdict"])


def claims_that_are_left(found: Verdicts) -> str:
    """A sentence about the claims of which nothing was run."""
    left = [f"{c['claim']} ({c['name']})" for c in found.claims.to_dict("records") if not c["run"]]
    return f"Not run yet: {', '.join(left)}." if left else "All claims were run."


def comparisons_that_were_run(found: Verdicts) -> pd.DataFrame:
    """A row for each comparison that was run, in few columns."""
    rows = found.comparisons[found.comparisons["verdict"] != NOT_RUN]
    shown = comparisons_as_read(rows).drop(columns=["claimed", "p", "detectable", "queries x seeds"])
    return shown.rename(columns={"claim": ""})


def what_was_run(outcomes: pd.DataFrame, figures: pd.DataFrame, settings: dict) -> str:
    """Numbers of systems, seeds, queries and hours, and what they were computed with."""
    trained = outcomes[outcomes["trained"] != "none"]
    models = trained[["system", "trained", "seed"]].drop_duplicates()
    sizes, machine = settings["replication"]["queries and depth"], settings["machine"]
    hours = figures.loc[figures["study"] == "cost", "value"].sum() / 3600
    seeds = ", ".join(map(str, sorted(trained["seed"].unique())))
    packages = ", ".join(f"{name} {version}" for name, version in settings["packages"].items())
    return (
        f"{len(models)} trained models of {models['system'].nunique()} systems, seeds {seeds}; {sizes['train']:,} "
        f"queries to train on, {sizes['test']} to test, {sizes['depth']} candidates each. {hours:.1f} CPU hours in "
        f"{settings['replication']['precision']}, begun on {machine['processor']} ({machine['device']}) with "
        f"{packages}."
    )
