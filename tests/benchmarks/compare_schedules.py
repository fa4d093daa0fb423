"""Schedules of language models side by side: what they cost, how long they take, how well they rank.

Prints the comparison of notebook 5: its candidates and the recorded replies of a stand-in come with the package.

Run: python -m tests.benchmarks.compare_schedules
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ir_measures
import pandas as pd
import pyterrier as pt

import pyterrier_longdoc as ld
from pyterrier_longdoc.common.arguments import check_arguments
from pyterrier_longdoc.common.frames import as_strings, check_columns
from pyterrier_longdoc.common.measures import measure_named
from pyterrier_longdoc.common.plots import COLOURS, finish, label_points, new_axes
from pyterrier_longdoc.common.presentation import changes
from pyterrier_longdoc.common.progress import counting
from pyterrier_longdoc.experiment import read_run
from pyterrier_longdoc.listwise import (
    BackToFront,
    LLMClient,
    ParallelBlocks,
    Prices,
    RankGPT,
    Schedule,
    SetwiseHeapsort,
    SetwiseInsertion,
    TopDown,
    Tournament,
)
from pyterrier_longdoc.listwise.costs import Call
from pyterrier_longdoc.listwise.schedules.base import Rounds

SCHEDULES = (BackToFront(), TopDown(), ParallelBlocks(), Tournament(), SetwiseHeapsort(), SetwiseInsertion())
"""Compared by default: all but the pairwise ones, which take a thousand prompts and more for 100 documents."""

FIRST_STAGE = "first stage"
"""The row of the candidates as they are."""

AXES = {
    "prompts": "prompts per query",
    "rounds": "rounds per query",
    "tokens": "tokens per query",
    "cost/1000": "cost of 1,000 queries",
    "seconds": "seconds per query",
}
"""What a plot may show below."""


@dataclass(frozen=True)
class Speed:
    """How long a call takes: `seconds + input tokens / input_rate + output tokens / output_rate`.

    The defaults are round figures, measured nowhere: give those of your server.

    Args:
        seconds: of a call besides its tokens.
        input_rate: tokens of prompts read in a second.
        output_rate: tokens of answers written in a second.

    Raises:
        ValueError: for a rate that is not positive, or negative seconds.
    """

    seconds: float = 0.5
    input_rate: float = 5000.0
    output_rate: float = 50.0

    def __post_init__(self) -> None:
        if min(self.input_rate, self.output_rate) <= 0 or self.seconds < 0:
            raise ValueError(f"{self!r}: rates must be positive, and seconds not negative")

    def of(self, input_tokens: float, output_tokens: float) -> float:
        """Seconds of a call."""
        return self.seconds + input_tokens / self.input_rate + output_tokens / self.output_rate


@dataclass(frozen=True, eq=False, repr=False)
class ScheduleComparison:
    """What schedules cost and how well they rank the same candidates.

    Attributes:
        queries: one row for each schedule and query: `name, qid`; `prompts` and the `rounds` in which they had to wait
            for each other; `calls` (with retries), of which the cache `replayed` some; `input_tokens, output_tokens`;
            `cost` of all calls, as if nothing had been replayed, and what was `paid`; simulated `seconds`; then the
            measures, NaN for queries without qrels.
        measures: names of the measures.
        concurrency: prompts in flight, for which seconds were simulated.
    """

    queries: pd.DataFrame
    measures: tuple[str, ...]
    concurrency: int

    def __repr__(self) -> str:
        return f"ScheduleComparison\n{self.table.to_string(index=False)}"

    def _repr_html_(self) -> str:
        return str(self.table.to_html(index=False))

    @property
    def table(self) -> pd.DataFrame:
        """One row for each schedule: means over queries, and sums of `calls` and of those `replayed`.

        Columns: `name`; `prompts, rounds, tokens` (of prompts and answers), `cost/1000` (of a thousand queries) and
        `seconds` of a query with `concurrency` prompts in flight; `calls, replayed` of all queries; the measures.
        """
        rows = self.queries.assign(
            tokens=self.queries["input_tokens"] + self.queries["output_tokens"],
            **{"cost/1000": 1000 * self.queries["cost"]},
        )
        by_name = rows.groupby("name", sort=False)
        means = by_name[[*AXES, *self.measures]].mean()
        means = means.round({"prompts": 1, "rounds": 1, "tokens": 0, "cost/1000": 3, "seconds": 1})
        means = means.round(dict.fromkeys(self.measures, 3)).astype({"tokens": "int64"})
        sums = by_name[["calls", "replayed"]].sum()
        return pd.concat([means[list(AXES)], sums, means[list(self.measures)]], axis=1).reset_index()

    def plot(self, measure: str | None = None, *, against: str = "tokens", ax: Any = None) -> Any:
        """Draws a measure of each schedule over what it takes; the first stage is a line.

        Args:
            measure: one of the comparison's; None for the first.
            against: `"prompts"`, `"rounds"`, `"tokens"`, `"cost/1000"` or `"seconds"`.
            ax: matplotlib axes to draw on; None makes a figure.

        Returns:
            The axes.

        Raises:
            ValueError: without qrels, or for an unknown measure or column.
            ImportError: without matplotlib.
        """
        if not self.measures:
            raise ValueError("effectiveness is not known: give compare_schedules qrels=")
        measure = measure or self.measures[0]
        check_arguments("str", choices=self.measures, measure=measure)
        check_arguments("str", choices=tuple(AXES), against=against)
        table = self.table
        first, points = table[table["name"] == FIRST_STAGE], table[table["name"] != FIRST_STAGE]
        ax = ax or new_axes()
        ax.scatter(points[against], points[measure], color=COLOURS[0])
        ax.axhline(first[measure].iloc[0], color="0.6", linewidth=0.8, label=FIRST_STAGE)
        label_points(ax, points[["name", against, measure]])
        ax.set_xlabel(AXES[against] + (f", {self.concurrency} prompts in flight" if against == "seconds" else ""))
        ax.set_ylabel(measure)
        return finish(ax)


@dataclass(frozen=True)
class _Unchanged(Schedule):
    """Asks nothing."""

    def rank(self, n: int) -> Rounds:
        yield from ()
        return []

    def estimate(self, n: int) -> int:
        return 0


def compare_schedules(
    llm: Any,
    candidates: pd.DataFrame,
    qrels: pd.DataFrame | None = None,
    schedules: Mapping[str, Schedule] | Sequence[Schedule] = SCHEDULES,
    *,
    metrics: Sequence[Any] = ("nDCG@10",),
    concurrency: int = 8,
    speed: Speed = Speed(),
    verbose: bool = False,
    **arguments: Any,
) -> ScheduleComparison:
    """Ranks the same candidates with several schedules, one after the other.

    With an `LLMClient` that has a cache, prompts that schedules have in common are paid for once, and an interrupted
    comparison goes on where it was. Time is simulated, so that neither the cache nor the network of today decides:
    each call of a query takes as long as its mean tokens say, `concurrency` at a time, and rounds wait for each other.

    Args:
        llm: as for `RankGPT`.
        candidates: as for `RankGPT`, with `score` or `rank` of the first stage.
        qrels: `qid, docno, label`; None leaves effectiveness out.
        schedules: by name, or a list, whose names are their classes', with the arguments that are not defaults where
            several are of one class. Default: all but the pairwise ones, which take a thousand prompts and more.
        metrics: measures.
        concurrency: prompts in flight at the same time.
        speed: how long a call takes.
        verbose: show a progress bar.
        **arguments: for `RankGPT`, e.g. `max_doc_len`, `preselect`, `shuffles`.

    Returns:
        The comparison, whose first row are the candidates as they are.

    Raises:
        ValueError: for no schedules, equal names, or arguments that `RankGPT` refuses.
        BackendError: if the model cannot be asked. Replies so far are in the cache.
        SpendCapError: if the next call might pass the cap. Replies so far are in the cache.
    """
    check_arguments("int", at_least=1, concurrency=concurrency)
    named = schedules if isinstance(schedules, Mapping) else _named(schedules)
    client = llm if isinstance(llm, LLMClient) else LLMClient(llm)
    measures = [] if qrels is None else [measure_named(metric) for metric in metrics]
    rows = []
    with counting("compare_schedules", "schedule", 1 + len(named), shown=verbose) as done:
        for name, schedule in {FIRST_STAGE: _Unchanged(), **named}.items():
            ranker = RankGPT(client, schedule=schedule, concurrency=concurrency, verbose=verbose, **arguments)
            before = len(client.ledger.calls)
            ranked = ranker.transform(candidates)
            done()
            costs = _costs(ranker, client.ledger.calls[before:], concurrency, speed)
            rows.append(_with_measures(costs, ranked, qrels, measures).assign(name=name))
    queries = pd.concat(rows, ignore_index=True)
    return ScheduleComparison(queries[["name", *queries.columns.drop("name")]], tuple(map(str, measures)), concurrency)


def _named(schedules: Sequence[Schedule]) -> dict[str, Schedule]:
    """Schedules by their class, with arguments where several are of one class."""
    classes = [type(schedule).__name__ for schedule in schedules]
    names = [
        name if classes.count(name) == 1 else f"{name}({', '.join(changes(schedule))})"
        for name, schedule in zip(classes, schedules, strict=True)
    ]
    if not names or len(set(names)) < len(names):
        raise ValueError(f"schedules={schedules!r} must be at least one schedule, and no two of them equal")
    return dict(zip(names, schedules, strict=True))


def _costs(ranker: RankGPT, calls: Sequence[Call], concurrency: int, speed: Speed) -> pd.DataFrame:
    """One row for each query: what it took."""
    of_query: dict[str, list[Call]] = {}
    for call in calls:
        of_query.setdefault(call.qid, []).append(call)
    rows = []
    for qid, rounds in (ranker.rounds or {}).items():
        own = of_query.get(str(qid), [])
        prompts = sum(map(len, rounds))
        read, written = sum(call.input_tokens for call in own), sum(call.output_tokens for call in own)
        costs = {replayed: [call for call in own if call.replayed is replayed] for replayed in (False, True)}
        # A retry follows its prompt: such prompts take longer, not more places at a time.
        waves = sum(math.ceil(len(of_round) / concurrency) for of_round in rounds)
        per_prompt = len(own) * speed.of(read / len(own), written / len(own)) / prompts if prompts else 0.0
        rows.append(
            {
                "qid": str(qid),
                "prompts": prompts,
                "rounds": len(rounds),
                "calls": len(own),
                "replayed": len(costs[True]),
                "input_tokens": read,
                "output_tokens": written,
                "cost": ranker.ledger.cost_of(read, written),
                "paid": sum(ranker.ledger.cost_of(c.input_tokens, c.output_tokens) for c in costs[False]),
                "seconds": waves * per_prompt,
            }
        )
    return pd.DataFrame(rows)


def _with_measures(
    costs: pd.DataFrame, ranked: pd.DataFrame, qrels: pd.DataFrame | None, measures: Sequence[Any]
) -> pd.DataFrame:
    """With a column for each measure; NaN for queries without qrels."""
    if qrels is None:
        return costs
    check_columns(qrels, ("qid", "docno", "label"), "qrels")
    judged = pd.DataFrame(
        {"query_id": as_strings(qrels["qid"]), "doc_id": as_strings(qrels["docno"]), "relevance": qrels["label"]}
    )
    run = pd.DataFrame(
        {"query_id": as_strings(ranked["qid"]), "doc_id": as_strings(ranked["docno"]), "score": ranked["score"]}
    )
    run = run.sort_values("score", ascending=False, kind="stable").drop_duplicates(["query_id", "doc_id"])
    found = {
        (str(value.measure), value.query_id): value.value for value in ir_measures.iter_calc(measures, judged, run)
    }
    values = {str(m): [found.get((str(m), qid), math.nan) for qid in costs["qid"]] for m in measures}
    return costs.assign(**values)


def main() -> None:
    recorded = Path(ld.__file__).parent / "data" / "replies"
    dataset = pt.get_dataset(f"longdoc:folder:{recorded}")
    bm25 = pt.Transformer.from_df(read_run(recorded / "bm25.res")) >> dataset.text_loader()
    stand_in = ld.OpenAIBackend(
        "longdoc-maxp", base_url="http://localhost:8000/v1", parameters={"temperature": 0, "max_tokens": 200}
    )
    llm = LLMClient(
        stand_in, cache=recorded / "replies.sqlite", prices=Prices(input=0.15, output=0.60), replay_only=True
    )
    schedules = [
        BackToFront(window=10, stride=5),
        TopDown(window=10, pivot=5, budget=10),
        ParallelBlocks(block=10, replicas=2),
        Tournament(stages=((10, 5), (10, 5), (5, 2))),
        SetwiseHeapsort(children=3, k=5),
    ]
    candidates, evidence = bm25(dataset.get_topics()), {"preselect": ld.BM25Windows(2), "max_doc_len": 150}
    compared = compare_schedules(llm, candidates, dataset.get_qrels(), schedules, metrics=["RR"], **evidence)
    print(compared.table.to_string(index=False))


if __name__ == "__main__":
    main()
