"""The results of a replication as a page of the documentation."""

from __future__ import annotations

import json
from pathlib import Path

import pandas as pd

from .claims import as_rst, verdicts
from .replicate import read_figures, read_outcomes
from .tables import tables_as_rst

_TITLE = "What was replicated"

_PAGE = """{title}
{rule}

This page is made of the results in ``{folder}`` by

.. code-block:: console

    $ python -m tests.benchmarks.replication page {folder} > pyterrier_longdoc/pt_docs/replication-results.rst

{run}

The claims
----------

{claims}

The papers' tables
------------------

{tables}"""


def results_page(folder: str | Path) -> str:
    """The page, in reStructuredText.

    Args:
        folder: of `replicate`.

    Raises:
        FileNotFoundError: if nothing was run there.
    """
    folder = Path(folder)
    outcomes, figures = read_outcomes(folder), read_figures(folder)
    settings = json.loads((folder / "settings.json").read_text(encoding="utf-8"))
    return _PAGE.format(
        title=_TITLE,
        rule="=" * len(_TITLE),
        folder=folder.as_posix(),
        run=what_was_run(outcomes, figures, settings),
        claims=as_rst(verdicts(outcomes, figures)),
        tables="\n\n".join(tables_as_rst(outcomes)),
    )


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
