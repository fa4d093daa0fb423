"""What the papers claim, as comparisons of outcomes, and the list of verdicts.

All claims of position are of reciprocal ranks on three collections, see `evidence.COLLECTIONS`. A system is
trained `"early"` (zero-shot on the others), `"early>far"` (then fine-tuned on *far*), `"rotated"` (on early documents
whose text was rotated), `"uniform"` (position-balanced) or `"distilled"`; `"none"` are those that learn nothing.

The papers are P25 (Boytsov et al. 2025), P22 (Boytsov et al. 2022), PARADE (Li et al. 2024) and BeST (Kim et al.).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from textwrap import fill, indent
from typing import Any

import numpy as np
import pandas as pd

from pyterrier_longdoc import presets
from pyterrier_longdoc.experiment.significance import correct

from .evidence import Cell, Comparison, Difference, Evidence, Gains, NotRunError, Outcomes, Spread, Trend
from .rst import csv_table
from .verdict import NOT_RUN, Effect, above, at_most, below, holm_levels, verdict, weakest, within

ALPHA = 0.05
"""Of the comparisons of one claim together. P25 has .01 on MS MARCO and FarRelevant, with 5,193 and 1,000 queries."""

Pair = tuple[float | None, float | None]


@dataclass(frozen=True)
class Claim:
    """A claim and how it is tested.

    Attributes:
        name: in short.
        sentence: what is claimed.
        source: where in the papers.
        comparisons: it is seen if all of them are.
    """

    name: str
    sentence: str
    source: str
    comparisons: tuple[Comparison, ...]


# The papers' figures.

_PRESETS = {
    "FirstP": "firstp", "AvgP": "avgp", "MaxP": "maxp", "SumP": "sump", "PARADE avg": "parade-avg",
    "PARADE max": "parade-max", "PARADE attn": "parade-attn", "PARADE RAND": "parade-rand-l2",
    "PARADE PRETR": "parade-pretr-l6", "PARADE PRETR-Q": "parade-pretr-q-l6", "LateIR": "parade-lateir-l6",
    "CEDR-KNRM": "cedr-knrm", "CEDR-PACRR": "cedr-pacrr", "CEDR-DRMM": "cedr-drmm", "Neural Model 1": "model1",
    "LongP": "longp-mosaic", "LongP, 128 tokens": "firstp-mosaic", "LongP (Longformer)": "longp-longformer",
    "LongP (Longformer), 128 tokens": "firstp-longformer",
}  # fmt: skip
"""What stands for our systems in Table 1 of P25; `LongP`, a full-attention encoder, is MOSAIC there."""

_MEASURES = {
    ("early", "early"): "dev RR",
    ("early", "far"): "far RR, zero-shot",
    ("early>far", "far"): "far RR, fine-tuned",
}

_UNTRAINED = {("random", "far"): 0.052, ("BM25", "far"): 0.207, ("BM25", "early"): 0.274}
"""P25, Tables 1 and 4."""


def published(cell: Cell) -> float | None:
    """The reciprocal rank that P25 has for a cell; *early* is MS MARCO dev there, and *far* FarRelevant."""
    system, trained, test = cell
    if trained == "none":
        return _UNTRAINED.get((system, test))
    measure = _MEASURES.get((trained, test))
    return presets[_PRESETS[system]].published.get(measure) if measure and system in _PRESETS else None


# The claims.

LONG = (
    "AvgP", "MaxP", "SumP", "KMaxP", "PARADE avg", "PARADE max", "PARADE attn", "PARADE RAND", "PARADE PRETR",
    "PARADE PRETR-Q", "LateIR", "CEDR-KNRM", "CEDR-PACRR", "CEDR-DRMM", "Neural Model 1", "LongP", "LongP (Longformer)",
)  # fmt: skip
ROBUST = ("MaxP", "PARADE attn")
OVERFITTED = (
    "AvgP", "PARADE RAND", "PARADE PRETR", "LateIR", "CEDR-KNRM", "CEDR-PACRR", "CEDR-DRMM", "Neural Model 1", "LongP",
    "LongP (Longformer)",
)  # fmt: skip
LEARNING = ("PARADE RAND", "CEDR-KNRM", "LongP")
DEBIASED = ("PARADE RAND", "CEDR-KNRM")
FIRST_OF = {name: f"{name}, 128 tokens" for name in ("LongP", "LongP (Longformer)")}
"""The FirstP of a model that reads documents in one piece: itself, with so many tokens; FirstP of all others."""
STUDENTS = ("PARADE RAND, 2 layers", "PARADE RAND, 1 layer")
RANDOM = Cell("random", "none", "far")

AT_CHANCE = (0.090 - 0.052) / (0.328 - 0.052)
"""What of MaxP's advantage over random P25 calls "roughly at the random-baseline level": that of FirstP, fine-tuned."""
LITTLE = 0.5
"""Of what PARADE's transformer gains by fine-tuning: more is not "little". In P25 MaxP has 18 % and attn 21 %."""
RISE = 0.5
"""By how much of FirstP's early reciprocal rank P25's mean gain over FirstP grows with a share of 1 behind its window.

From .002 on MS MARCO dev, where 14 % begin there (P22, Table 6), to .181 on FarRelevant, where all do: .18 / .40 / .86.
"""


def _difference(
    system: Cell, reference: Cell, claimed: Effect, *, papers: Pair | None = None, of: tuple[Cell, Cell] | None = None
) -> Difference:
    """With the papers' figures: those of P25's main tables, if no others are given."""
    return Difference(system, reference, claimed, papers or (published(system), published(reference)), of)


def _debiasing(trained: str, far: dict[str, Pair], early: dict[str, Pair]) -> tuple[Comparison, ...]:
    """Helps on *far*, where P25's smallest gain is 43.5 %, and costs 5 to 29 % on *early*."""
    helps = [
        _difference(Cell(name, trained, "far"), Cell(name, "early", "far"), above(0.435), papers=papers)
        for name, papers in far.items()
    ]
    costs = [
        _difference(
            Cell(name, trained, "early"), Cell(name, "early", "early"), below(0.05, 0.29, named=True), papers=papers
        )
        for name, papers in early.items()
    ]
    return (*helps, *costs)


_NONE: Pair = (None, None)

CLAIMS = (
    Claim(
        "FirstP at chance on far",
        "FirstP, which does not read the relevant passage, is no better than a random order of the candidates, "
        "zero-shot and fine-tuned. Worse, as zero-shot in the paper (.016 against .052), is no better either.",
        "P25 §3.3, Synthetic Data; Table 4",
        tuple(
            _difference(
                Cell("FirstP", trained, "far"), RANDOM, at_most(AT_CHANCE), of=(Cell("MaxP", trained, "far"), RANDOM)
            )
            for trained in ("early", "early>far")
        ),
    ),
    Claim(
        "MaxP and PARADE attn robust",
        "MaxP and PARADE attn are above chance on far without training on it, and gain little from it: no more than "
        "half of what PARADE's transformer gains.",
        "P25 §3.3, Synthetic Data; Table 4",
        tuple(
            comparison
            for name in ROBUST
            for zero_shot, tuned in [(Cell(name, "early", "far"), Cell(name, "early>far", "far"))]
            for comparison in (
                # Of what lies between chance and the fine-tuned model the paper's have 89 % and 87 %.
                _difference(zero_shot, RANDOM, above(0.87), of=(tuned, RANDOM)),
                _difference(
                    tuned,
                    zero_shot,
                    at_most(LITTLE),
                    of=(Cell("PARADE RAND", "early>far", "far"), Cell("PARADE RAND", "early", "far")),
                ),
            )
        ),
    ),
    Claim(
        "Other long models overfit, and learn",
        "AvgP, PARADE's transformers, LateIR, CEDR, Neural Model 1 and LongP are below MaxP on far without training on "
        "it, and after it above MaxP by 9.2 % or more.",
        "P25 §3.3, Synthetic Data; Table 4",
        tuple(
            _difference(Cell(name, trained, "far"), Cell("MaxP", trained, "far"), claimed)
            for name in OVERFITTED
            for trained, claimed in (("early", below(0.10)), ("early>far", above(0.092, named=True)))
        ),
    ),
    Claim(
        "Little to gain on early",
        "Long models are within 5 % of their FirstP on early, above or below. (The paper's 5 % is a mean over "
        "collections: on MS MARCO dev alone it prints +5.5 % for PARADE attn, +6.3 % for PARADE RAND and -3.8 % for "
        "CEDR-KNRM.)",
        "P25 abstract, §3.3 and Table 1",
        tuple(
            _difference(Cell(name, "early", "early"), Cell(first, "early", "early"), within(0.05))
            for name, first in ((name, FIRST_OF.get(name, "FirstP")) for name in LONG)
        ),
    ),
    Claim(
        "Rotation debiases, at a price",
        "Training on rotated documents helps PARADE's transformer and CEDR-KNRM on far, and costs 5 to 29 % on early.",
        "P25 §3.3, Bias Mitigation; Table 2 (ELECTRA but for CEDR-KNRM)",
        _debiasing(
            "rotated",
            {"PARADE RAND": (0.328, 0.229), "CEDR-KNRM": (0.202, 0.055)},
            {
                "MaxP": (0.377, 0.414),
                "PARADE attn": (0.390, 0.431),
                "PARADE RAND": (0.410, 0.433),
                "CEDR-KNRM": (0.269, 0.379),
            },
        ),
    ),
    Claim(
        "Position-balanced training does so too",
        "Training on documents with the relevant passage anywhere does what rotation does: it helps PARADE's "
        "transformer and CEDR-KNRM on far, and costs 5 to 29 % on early.",
        "by analogy with rotation; the papers have no figures for it",
        _debiasing(
            "uniform", dict.fromkeys(DEBIASED, _NONE), dict.fromkeys((*ROBUST, *DEBIASED), _NONE)
        ),
    ),
    Claim(
        "3 to 4 chunks suffice",
        "On early, PARADE attn with five or six chunks of a first window's length exceeds that with four by 0.6 % at "
        "most. (So much the paper's fourth chunk gains, in a mean over collections; 500 queries can hardly show it.)",
        "P25 §B.2.1 and Table 6; P22 §3.3.4 and Table 7",
        tuple(
            _difference(
                Cell(f"PARADE attn, {chunks} chunks", "early", "early"),
                Cell("PARADE attn, 4 chunks", "early", "early"),
                at_most(0.006),
                papers=(figure, 0.412),
            )
            for chunks, figure in ((5, 0.409), (6, 0.411))
        ),
    ),
    Claim(
        "PRETR-Q less sensitive",
        "PARADE PRETR-Q, whose aggregator reads the query, depends less on window and stride than PARADE PRETR.",
        "P22 §3.3.4, Sensitivity Analysis; Table 8",
        # On MS MARCO dev they are .0037 and .0498. The least difference there is: by 49 %, on TREC DL, without
        # 75/50, where PRETR broke down.
        (Spread("PARADE PRETR-Q", "PARADE PRETR", "early", "early", below(0.49), (0.0037, 0.0498)),),
    ),
    Claim(
        "Distilled students better",
        "A smaller PARADE that learns a larger one's scores is better than one that does not. (The paper's students "
        "learn scores and labels, Eq. 8; these learn differences of scores in place of labels.)",
        "PARADE §5.1 and Table 3 (Robust04; BERT-Small and -Mini here)",
        tuple(
            # The smallest gain of the table is that of its row 8.
            _difference(Cell(name, "distilled", "early"), Cell(name, "early", "early"), above(0.012), papers=papers)
            for name, papers in zip(STUDENTS, ((0.5098, 0.4983), (0.4666, 0.4500)), strict=True)
        ),
    ),
    Claim(
        "BeST above FirstP and MaxP",
        "A ranker trained on the segments that it selects is better than one trained on first segments and than MaxP, "
        "and its segments become more precise over three iterations. (The paper's MaxP is trained on first segments, "
        "too; this one on all windows. A fourth iteration lowers the paper's P@1 on dev from .491 to .458.)",
        "BeST §4 and Tables 1 and 2",
        (
            # The smallest gains of Table 1: over FirstP on MS MARCO dev, over MaxP on Robust04.
            *(
                _difference(
                    Cell("BeST", "uniform", "uniform"), Cell(name, "uniform", "uniform"), claimed, papers=papers
                )
                for name, claimed, papers in (
                    ("FirstP", above(0.035), (0.388, 0.375)),
                    ("MaxP", above(0.034), _NONE),
                )
            ),
            # .412, .488 and .522 on training documents, by Table 2: a slope of .055. A fourth has .525.
            Trend("BeST", "BeST", "segment precision", above(0.055 / 0.412), (0.522, 0.412)),
        ),
    ),
    Claim(
        "Where relevant text is explains it",
        "Long models gain the more over FirstP the more of the relevant text an estimator places behind the first "
        "window; all are trained on early, so that nothing but its place differs.",
        "P25 §3.3, Synthetic Data, and §C.4; P22 §3.3.3 and Table 6",
        tuple(Gains(pair, LONG, "early", above(RISE)) for pair in (0, 1)),
    ),
    Claim(
        "They learn in two epochs",
        "After a second epoch on far PARADE's transformer, CEDR and LongP are above MaxP by 9.2 % or more. (Asked "
        "after one epoch, of 125 steps, had not shown it; the paper's has 3,125.)",
        "P25 §3.3, Synthetic Data; Table 4",
        tuple(
            _difference(
                Cell(name, "early>far>far", "far"),
                Cell("MaxP", "early>far>far", "far"),
                above(0.092, named=True),
                papers=(published(Cell(name, "early>far", "far")), published(Cell("MaxP", "early>far", "far"))),
            )
            for name in LEARNING
        ),
    ),
)  # fmt: skip
"""The claims of the papers that the miniature tests, in the order of the documentation; the last was added to it."""


def needed(claims: Iterable[Claim] = CLAIMS) -> list[Cell]:
    """All cells that claims always read, each once; settings of windows and the estimator's models are more."""
    return list(dict.fromkeys(cell for claim in claims for each in claim.comparisons for cell in each.needs))


# The list.

COLUMNS = [
    "claim", "comparison", "papers", "papers' reference", "ours", "reference", "difference", "low", "high", "claimed",
    "p-value", "detectable", "queries", "seeds", "verdict", "to run",
]  # fmt: skip


@dataclass(frozen=True, eq=False)
class Verdicts:
    """The list of claims; make it with `verdicts`.

    Attributes:
        claims: one row each: `claim`, its `name`, `sentence` and `source`; the `verdict`, the weakest of those of its
            comparisons that were run; how many these are, `run`, of how many, `of`; and what is still `to run`.
        comparisons: one row each: number of the `claim`, `comparison`; `papers` and `papers' reference`, the figures of
            the system and of what it is compared to; the same of `ours` and our `reference`; the `difference` of ours
            with its interval, `low` and `high`; `claimed`, where it should lie, as a difference; the `p-value` of the
            bound of this (0, or the nearer end), by Holm's method for the comparisons of the claim that were run; the
            smallest difference (of a margin: distance from it) that the test finds in 80 % of all cases, `detectable`;
            `queries`, `seeds`, the `verdict`, and what is still `to run`.
    """

    claims: pd.DataFrame
    comparisons: pd.DataFrame

    def __repr__(self) -> str:
        return as_text(self)

    def _repr_html_(self) -> str:
        return f"{self.claims.to_html(index=False)}{comparisons_as_read(self.comparisons).to_html(index=False)}"


def verdicts(
    outcomes: pd.DataFrame,
    figures: pd.DataFrame | None = None,
    *,
    claims: Iterable[Claim] = CLAIMS,
    alpha: float = ALPHA,
) -> Verdicts:
    """The list of claims from what was run.

    Values of a query are averaged over seeds before they are compared, as in the papers: intervals are about queries,
    not about training anew: what speaks against a claim contradicts it only if the models are settled (`verdict`).
    Comparisons of a claim share `alpha` by Holm's method; each interval has the level at which
    that method tests the comparison, so that it excludes what the p-value rejects, and nothing else. Its two ends share
    that level; where the claim is one-sided each end has it.

    Args:
        outcomes: `system, trained, test, seed, qid, rr`, one row for each query and seed.
        figures: `study, system, step, figure, value, n`: the precision of BeST's segments by iteration, and the
            estimator's shares by collection (in `step`).
        claims: what to look at.
        alpha: the error rate of each claim.

    Raises:
        ValueError: for frames that are no outcomes, see `Outcomes.read`. What was not run is no error.
    """
    found, rows, summaries = Outcomes.read(outcomes, figures), [], []
    for number, claim in enumerate(claims, 1):
        of_claim = _compared(claim, found, alpha)
        rows += [{**row, "claim": number} for row in of_claim]
        summaries.append(_summary(number, claim, of_claim))
    return Verdicts(pd.DataFrame(summaries), pd.DataFrame(rows, columns=COLUMNS))


def _compared(claim: Claim, outcomes: Outcomes, alpha: float) -> list[dict[str, Any]]:
    """One row for each comparison of a claim; those that were run share alpha."""
    rows: list[dict[str, Any]] = []
    run: list[tuple[dict[str, Any], Effect, Evidence]] = []
    for comparison in claim.comparisons:
        papers, reference = comparison.published
        row: dict[str, Any] = {
            "comparison": str(comparison),
            "papers": papers,
            "papers' reference": reference,
            "verdict": NOT_RUN,
        }
        try:
            run.append((row, comparison.claimed, comparison.evidence(outcomes)))
        except NotRunError as missing:
            row["to run"] = str(missing)
        rows.append(row)
    p = [
        max(e.estimate.p_value(bound) for bound in claimed.times(e.scale).bounds) * claimed.tails / 2
        for _, claimed, e in run
    ]
    corrected = correct(np.array(p), "holm", alpha)[1] if p else np.array([])
    for (row, claimed, e), p_value, level in zip(run, corrected, holm_levels(p, alpha), strict=True):
        row |= _result(e, claimed.times(e.scale), level / claimed.tails) | {"p-value": p_value}
        row["comparison"] += f" ({e.detail})" if e.detail else ""
    return rows


def _result(e: Evidence, effect: Effect, tail: float) -> dict[str, Any]:
    """What a comparison found, at the level of a tail of its test."""
    low, high = e.estimate.interval(tail)
    return {
        "ours": e.ours,
        "reference": e.reference,
        "difference": e.estimate.difference,
        "low": low,
        "high": high,
        "claimed": str(effect),
        "detectable": e.estimate.detectable(tail),
        "queries": e.queries,
        "seeds": e.seeds,
        "verdict": verdict((low, high), effect, settled=e.settled),
    }


def _summary(number: int, claim: Claim, rows: list[dict[str, Any]]) -> dict[str, Any]:
    """The row of a claim."""
    run = [row["verdict"] for row in rows if row["verdict"] != NOT_RUN]
    missing = dict.fromkeys(part for row in rows if "to run" in row for part in row["to run"].split("; "))
    return {
        "claim": number,
        "name": claim.name,
        "sentence": claim.sentence,
        "source": claim.source,
        "verdict": weakest(run),
        "run": len(run),
        "of": len(rows),
        "to run": "; ".join(missing),
    }


# How it is shown.


def as_text(found: Verdicts) -> str:
    """Each claim with its verdict, its comparisons as a table beneath, and what is still to run."""
    parts = []
    for claim in found.claims.to_dict("records"):
        own = found.comparisons[found.comparisons["claim"] == claim["claim"]]
        rows = comparisons_as_read(own).drop(columns="claim")
        rows["comparison"] = rows["comparison"].str.ljust(rows["comparison"].str.len().max())
        said = indent(fill(f"{claim['sentence']} ({claim['source']})", 100), "   ")
        parts.append(f"{claim['claim']}. {claim['name']}: {verdict_of(claim).upper()}\n{said}")
        parts.append(indent(rows.to_string(index=False, justify="left"), "   "))
        parts += [indent(fill(f"to run: {claim['to run']}", 100), "   ")] if claim["to run"] else []
    return "\n\n".join(parts)


def as_rst(found: Verdicts) -> str:
    """Two tables in reStructuredText: the claims, and their comparisons."""
    claims = [
        [c["claim"], f"**{c['name']}.** {c['sentence']} *{c['source']}*", verdict_of(c)]
        for c in found.claims.to_dict("records")
    ]
    tables = [pd.DataFrame(claims, columns=["", "claim", "verdict"]), comparisons_as_read(found.comparisons)]
    return "\n\n".join(map(csv_table, tables))


def verdict_of(claim: Mapping[Any, Any]) -> str:
    """A claim's verdict, and how much of it was run where it was not all."""
    partly = 0 < claim["run"] < claim["of"]
    return f"{claim['verdict']} ({claim['run']} of {claim['of']} run)" if partly else str(claim["verdict"])


def comparisons_as_read(comparisons: pd.DataFrame) -> pd.DataFrame:
    """Comparisons as a reader wants them: rounded, with both figures of each in one column."""
    return pd.DataFrame(
        {
            "claim": comparisons["claim"],
            "comparison": comparisons["comparison"],
            "papers": _both(comparisons["papers"], comparisons["papers' reference"]),
            "ours": _both(comparisons["ours"], comparisons["reference"]),
            "difference [interval]": [
                "" if pd.isna(d) else f"{d:+.3f} [{low:+.3f}, {high:+.3f}]"
                for d, low, high in zip(*(comparisons[c] for c in ("difference", "low", "high")), strict=True)
            ],
            "claimed": comparisons["claimed"].fillna(""),
            "p": ["" if pd.isna(p) else "< .001" if p < 0.001 else f"{p:.3f}" for p in comparisons["p-value"]],
            "detectable": ["" if pd.isna(d) else f"{d:.3f}" for d in comparisons["detectable"]],
            "queries x seeds": [
                "" if pd.isna(n) else f"{n:.0f} x {s:.0f}"
                for n, s in zip(comparisons["queries"], comparisons["seeds"], strict=True)
            ],
            "verdict": comparisons["verdict"],
        }
    )


def _both(ours: pd.Series, reference: pd.Series) -> list[str]:
    pairs = zip(ours, reference, strict=True)
    return ["" if pd.isna(one) or pd.isna(other) else f"{one:.3f} / {other:.3f}" for one, other in pairs]
