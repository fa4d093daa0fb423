"""What `bench_natural` says of its figures: places of gold text, claims with their verdicts, and the page."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

from pyterrier_longdoc import presets
from pyterrier_longdoc.experiment.significance import correct, p_in_words

from .replication.rst import csv_table
from .replication.verdict import Effect, Estimate, above, at_most, holm_levels, paired, verdict, weakest, within

NATURAL, CONTROLLED = "natural", "controlled"
COLLECTIONS = {
    "fairytaleqa": (NATURAL, "whole stories; questions by education experts"),
    "medquad": (NATURAL, "health pages; questions made by template of a page's subject and a section's type"),
    "squad": (CONTROLLED, "whole articles; about five questions of crowd workers for each paragraph"),
    "newwiki": (CONTROLLED, "articles, their paragraphs in another order; about five questions for each paragraph"),
}
"""Whether gold text stands where authors and readers put it, or evenly because of how questions were asked."""

FIFTHS = [f"fifth {number}" for number in range(1, 6)]
IN, BEHIND = "in the window", "behind the window"
GROUPS = ["all", *FIFTHS, IN, BEHIND]
FEWEST = 10
"""Questions of a group; of fewer nothing is said."""
MOST = 0.9
"""BM25's nDCG@10, above which little is left to gain."""
ONE_WINDOW = ("FirstP", "LongP")
ALPHA = 0.05

_FIRSTP = presets["firstp"].published
LOSS = 1 - _FIRSTP["far RR, fine-tuned"] / _FIRSTP["dev RR"]
"""Of its reciprocal rank on MS MARCO FirstP loses on FarRelevant, whose relevant text is behind its window."""
LITTLE = 0.05
"""Of FirstP's effectiveness: gains of at most so much are what P25 finds on most collections."""

CLAIMS = {
    "early": "Relevant text stands early: its middle is in the first fifth of more than a fifth of the documents.",
    "loss": "FirstP loses where the relevant text is behind its window.",
    "robust": f"Models that read windows of the whole document lose at most {LITTLE:.0%} there.",
    "control": f"Among passages, which no window cuts off, FirstP loses at most {LITTLE:.0%} on the same questions.",
    "gain": "Behind FirstP's window they are above FirstP.",
    "little": f"Where FirstP reads relevant text, they are within {LITTLE:.0%} of FirstP.",
}
"""What Boytsov et al. 2025 (P25) and 2022 say of positions, in the words that are tested here; and a control."""


def fifth(start: int, end: int, length: int) -> int:
    """Return the fifth of a text, 1 to 5, in which the middle of a span stands."""
    return 1 + min(4, 5 * (start + end) // (2 * length))


def groups_of(places: pd.DataFrame) -> dict[str, list[str]]:
    """Return qids by group of `qid, fifth, read`, one row for each gold span; `read` by FirstP, at least in part.

    A query with gold text in several fifths is in none of them.
    """
    by_query = places.groupby("qid")
    fifths = by_query["fifth"].agg(lambda values: values.iloc[0] if values.nunique() == 1 else 0)
    read = by_query["read"].any()
    groups = {name: list(fifths.index[fifths == number]) for number, name in enumerate(FIFTHS, 1)}
    return groups | {IN: list(read.index[read]), BEHIND: list(read.index[~read])}


# Claims.

Groups = Mapping[str, Sequence[str]]


@dataclass(frozen=True)
class Finding:
    """What a system on a collection says of a claim.

    Attributes:
        claimed: where the difference should lie, as a share of `scale`.
        text: the finding in words, with `{difference}` for the number without its sign.
        less, more: words for a significant negative and positive difference, at `{word}` in the text.
    """

    collection: str
    claim: str
    system: str
    estimate: Estimate
    claimed: Effect
    scale: float
    text: str
    less: str
    more: str


def welch(x: np.ndarray, y: np.ndarray) -> Estimate:
    """Return the difference of the means of other queries, that of Welch's t-test."""
    a, b = x.var(ddof=1) / len(x), y.var(ddof=1) / len(y)
    degrees = (a + b) ** 2 / (a**2 / (len(x) - 1) + b**2 / (len(y) - 1)) if a + b else np.inf
    return Estimate(float(x.mean() - y.mean()), float(np.sqrt(a + b)), float(degrees))


def share_above(count: int, total: int, share: float) -> Estimate:
    """Return by how much a share is above another one; its error is Agresti and Coull's."""
    adjusted = (count + 2) / (total + 4)
    return Estimate(count / total - share, float(np.sqrt(adjusted * (1 - adjusted) / (total + 4))))


def findings(collection: str, documents: pd.DataFrame, passages: pd.DataFrame, groups: Groups) -> list[Finding]:
    """Return the findings on a collection by nDCG@10 of systems (columns) on queries (the index), in both tasks."""
    found, placed, early = [], sum(len(groups[name]) for name in FIFTHS), len(groups[FIFTHS[0]])
    if placed >= FEWEST:
        text = f"{early / placed:.1%} of {placed} questions have their gold text in the first fifth, {{word}} a fifth"
        estimate = share_above(early, placed, 0.2)
        found.append(Finding(collection, "early", "", estimate, above(0.0), 1.0, text, "less than", "more than"))
    long = [system for system in documents if system not in ("BM25", "FirstP")]
    cases = [("FirstP", documents, "loss", above(LOSS)), ("FirstP", passages, "control", at_most(LITTLE))]
    cases += [(system, documents, "robust", at_most(LITTLE)) for system in long]
    for system, values, claim, effect in cases if min(len(groups[IN]), len(groups[BEHIND])) >= FEWEST else ():
        # Questions behind the window are others. BM25, which minds no position, tells how hard they are.
        read, unread = ((values[system] - values["BM25"])[groups[name]].to_numpy() for name in (IN, BEHIND))
        words, mean = ("gains {difference}", "loses {difference}"), float(values[system][groups[IN]].mean())
        text = f"beside BM25, {system} {{word}} behind FirstP's window ({len(unread)} questions, {len(read)} in it)"
        found.append(Finding(collection, claim, system, welch(read, unread), effect, mean, text, *words))
    for claim, group, effect in (("gain", BEHIND, above(LITTLE)), ("little", IN, within(LITTLE))):
        for system in long if len(groups[group]) >= FEWEST else ():
            own, first = (documents[name][groups[group]].to_numpy() for name in (system, "FirstP"))
            words, mean = ("{difference} below", "{difference} above"), float(first.mean())
            text = f"{group}, {system} ({own.mean():.3f}) is {{word}} FirstP ({mean:.3f})"
            found.append(Finding(collection, claim, system, paired(own, first), effect, mean, text, *words))
    return found


def with_verdicts(found: Iterable[Finding], alpha: float = ALPHA) -> pd.DataFrame:
    """Return a row for each finding, with its sentence; Holm corrects for all findings of a claim.

    `low` and `high` are at the level of the test. Models of one training do not contradict a paper: see `verdict`.
    """
    found, rows = list(found), []
    for claim in CLAIMS:
        own = [finding for finding in found if finding.claim == claim]
        effects = [finding.claimed.times(finding.scale) for finding in own]
        p = [
            max(map(finding.estimate.p_value, effect.bounds)) * effect.tails / 2
            for finding, effect in zip(own, effects, strict=True)
        ]
        zero = [finding.estimate.p_value(0.0) for finding in own]
        zero = correct(np.array(zero), "holm", alpha)[1].tolist() if own else []
        for finding, effect, level, against_zero in zip(own, effects, holm_levels(p, alpha), zero, strict=True):
            interval = finding.estimate.interval(level / effect.tails)
            row = {"collection": finding.collection, "claim": claim, "system": finding.system}
            row |= {"difference": finding.estimate.difference, "low": interval[0], "high": interval[1]}
            row |= {"claimed": str(effect), "p against 0": against_zero}
            row["verdict"] = verdict(interval, effect, settled=False)
            rows.append(row | {"sentence": sentence(finding, against_zero, interval, row["verdict"], alpha)})
    return pd.DataFrame(rows)


def sentence(finding: Finding, p: float, interval: tuple[float, float], outcome: str, alpha: float = ALPHA) -> str:
    """Return a finding in words, with its p-value against no difference and the interval of its verdict."""
    difference = finding.estimate.difference
    word = finding.less if difference < 0 else finding.more
    if not p < alpha:
        word = f"not significantly {word}" if finding.claim == "early" else f"{word} (not significantly)"
    told = finding.text.format(word=word.format(difference=f"{abs(difference):.3f}"))
    return f"{told}: {p_in_words(p)}, interval {interval[0]:+.3f} to {interval[1]:+.3f}; {outcome}."


# The page.


def page(tables: Mapping[str, pd.DataFrame], command: str, settings: Mapping[str, Any]) -> str:
    """Return the page in reStructuredText: what supports the verdicts; everything else is in the tables as CSV."""
    verdicts, collections = tables["findings"], tables["collections"]
    parts = [
        ".. default-role:: code\n\nNatural positions\n=================",
        METHOD.format(**settings),
        f"Made by\n\n.. code-block:: console\n\n    $ {command}",
        MADE_ON.format_map(settings),
        _titled("Does what the papers say hold?", "-", VERDICTS_NOTE),
        csv_table(_summary(verdicts, collections)),
        _titled("The differences behind the verdicts", "-", DIFFERENCES_NOTE),
        *map(csv_table, _differences(verdicts)),
        _titled("The collections", "-", csv_table(collections.drop(columns=FIFTHS).map(_text))),
        *_little_left(collections),
        _titled("Means by group", "-", MEANS_NOTE),
    ]
    for name in collections["collection"]:
        said = f"{name}: {COLLECTIONS.get(name, (NATURAL, ''))[1]}".removesuffix(": ") + "."
        own = tables["positions"][tables["positions"]["collection"] == name]
        parts.append(f"{said}\n\n{csv_table(_by_group(own, list(tables['models']['model'])))}")
    parts.append(_titled("Evidence", "-", EVIDENCE_NOTE))
    parts.append(csv_table(_evidence(tables["evidence"], tables["evidence tests"])))
    return "\n\n".join([*parts, SEE_ALSO]) + "\n"


METHOD = """\
How the packaged models do where nobody moved a passage: questions about documents as they are. BM25's best {depth}
documents of the whole collection are reranked, and its best {depth} passages of all documents. A passage stands alone,
so that no window cuts it off. FirstP reads the first window, the bi-encoder all windows, the others {read}. Questions
are those of the {split} split that BM25 can find without their document; of these {sample}. A question is *in the
window* if FirstP reads a part of its gold text, else *behind the window*."""

MADE_ON = """\
on {processor}, threads: {threads}, precision: {dtype}. It also writes, as CSV, RR, intervals, sums with BM25, fifths of
documents and costs."""

VERDICTS_NOTE = """\
The claims are those of Boytsov et al. 2022 and 2025, but for the fourth, a control. *Seen*: the difference lies
significantly where the claim has it; *not reached*: significantly elsewhere; *not seen*: neither, and an effect as
large as the papers' is excluded; *undecided*: both are possible. A claim is no better than its worst finding. Gold text
stands where authors put it (*natural*), or evenly because of how questions were asked (*controlled*)."""

DIFFERENCES_NOTE = """\
By the number of the claim: differences in ``nDCG@10`` of documents (of passages in the control; in 1 the share above a
fifth), with the interval at which the claim is tested by Holm's method. Losses (2 to 4) are those from questions in
the window to questions behind it, beside BM25's, which tells how hard the questions are. Questions count as
independent, though many are about the same document."""

MEANS_NOTE = """\
``nDCG@10``. A significant difference from FirstP is marked ``*``, from BM25 ``+``: paired t-test, alpha 0.05, by Holm's
method over all systems and groups of questions, also those that are not shown."""

EVIDENCE_NOTE = """\
The share of questions of which one of the k best windows of the right document, all of which were read, holds gold
text. The first and BM25's best windows are among those of MaxP; ``*`` is a difference from BM25's best, by Holm's
method."""

SEE_ALSO = ".. seealso:: :doc:`positions`, :doc:`replication`"


def _titled(title: str, line: str, text: str) -> str:
    return f"{title}\n{line * len(title)}\n\n{text}"


def _summary(verdicts: pd.DataFrame, collections: pd.DataFrame) -> pd.DataFrame:
    kind = dict(zip(collections["collection"], collections["positions"], strict=True))
    kinds = verdicts["collection"].map(kind)
    rows = [
        {"": number, "claim": said}
        | {
            k: weakest(verdicts.loc[(verdicts["claim"] == claim) & (kinds == k), "verdict"])
            for k in (NATURAL, CONTROLLED)
        }
        for number, (claim, said) in enumerate(CLAIMS.items(), 1)
    ]
    return pd.DataFrame(rows)


def _differences(rows: pd.DataFrame) -> list[pd.DataFrame]:
    """Return differences, intervals and verdicts of claims about one system, then those of claims about several."""
    numbers = zip(rows["difference"], rows["low"], rows["high"], rows["verdict"], strict=True)
    cells = [f"{difference:+.3f} [{low:+.3f}, {high:+.3f}] {outcome}" for difference, low, high, outcome in numbers]
    number = {claim: str(n) for n, claim in enumerate(CLAIMS, 1)}
    named = rows.assign(cell=cells, claim=rows["claim"].map(number), system=rows["system"].replace("", "all questions"))
    alone = named.groupby("claim")["system"].transform("nunique") == 1
    one = named[alone].assign(column=named["claim"] + ", " + named["system"])
    tables = [one.pivot(index="collection", columns="column", values="cell").loc[one["collection"].unique()]]
    several = named[~alone]
    wide = several.pivot(index=["claim", "collection"], columns="system", values="cell")
    order = list(dict.fromkeys(zip(several["claim"], several["collection"], strict=True)))
    tables.append(wide.loc[order, several["system"].unique()])
    return [table.fillna("").rename_axis(None, axis=1).reset_index() for table in tables]


def _little_left(collections: pd.DataFrame) -> list[str]:
    """Return a paragraph if BM25 leaves little to gain on a collection's documents."""
    names = collections.loc[collections["BM25, documents"] > MOST, "collection"]
    return [f"BM25 leaves little to gain on the documents of {' and '.join(names)}."] if len(names) else []


def _by_group(rows: pd.DataFrame, models: Sequence[str]) -> pd.DataFrame:
    """Return nDCG@10 of BM25 and of each model, of documents and of passages, by whether FirstP reads the text."""
    rows = rows[(rows["measure"] == "nDCG@10") & rows["group"].isin(["all", IN, BEHIND])]
    marks = np.where(rows["p against FirstP"] < ALPHA, "\\*", "") + np.where(rows["p against BM25"] < ALPHA, "+", "")
    cell = rows["mean"].map("{:.3f}".format) + np.where(marks == "", "", " ") + marks
    short = rows["group"].str.removesuffix(" the window")
    columns = rows["task"] + ", " + short + rows["queries"].map(" ({})".format)
    wide = rows.assign(cell=cell, column=columns).pivot(index="name", columns="column", values="cell")
    order = [column for task in rows["task"].unique() for column in columns[rows["task"] == task].unique()]
    return wide.loc[["BM25", *models], order].rename_axis(None, axis=1).reset_index(names="system")


def _evidence(rows: pd.DataFrame, tests: pd.DataFrame) -> pd.DataFrame:
    better = tests[(tests["reference"] == "BM25's best windows") & tests["reject"].astype(bool)]
    marked = set(zip(better["collection"], better["name"], better["measure"], strict=True))
    rows = rows[rows["group"] == "all"]
    stars = [
        " \\*" if (collection, name, f"evidence@{k}") in marked else ""
        for collection, name, k in rows[["collection", "system", "k"]].to_numpy()
    ]
    cell = rows["mean"].map("{:.3f}".format) + stars
    wide = rows.assign(cell=cell).pivot(index=["k", "system"], columns="collection", values="cell")
    order = list(dict.fromkeys(zip(rows["k"], rows["system"], strict=True)))
    return wide.loc[order, rows["collection"].unique()].fillna("").rename_axis(None, axis=1).reset_index()


def _text(value: Any) -> str:
    return (
        f"{value:.3g}"
        if isinstance(value, float) and value < 1000
        else f"{value:.0f}"
        if isinstance(value, float)
        else str(value)
    )
