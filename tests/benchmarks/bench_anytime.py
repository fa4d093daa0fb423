"""Windows of a query's candidates read best first, until its top 10 is settled: does that read fewer than fixed k?

    python -m tests.benchmarks.bench_anytime record PATH/time PATH/fairytaleqa PATH/newwiki docstrings --to FOLDER
    python -m tests.benchmarks.bench_anytime simulate time fairytaleqa newwiki docstrings --to FOLDER [--plot FILE.svg]

`record` scores all windows of BM25's first `--depth` documents by a packaged MaxP in float32, and by BM25 with the
word frequencies of the collection, the cheap selector. It writes a line of JSON for each query and document; what is
written already is not scored again. Queries are `--dev` of the dev split and `--test` of the test split, drawn at
random; a collection without splits is divided.

`simulate` reads these scores as a reranker would read windows. Fixed k reads the selector's k best windows of each
document. Anytime orders all windows of a query by the selector and reads the best first. A document's score is that of
its best window so far; what its other windows may still reach is bounded by the quantile 1 - delta of the best of so
many windows given the selector's score of the first of them, over the dev queries. Reading stops when the top 10, as a
list or as a set, is settled by these bounds, or when the budget is spent; with `skip` windows of documents that decide
nothing are passed over. The k, and the delta, budget and kind of stop, have the highest nDCG@10 on dev: k of all, the
others of those that read at most half of its windows. The bar: at most half of fixed k's windows on test, too, and the
paired 95 % interval of the difference in nDCG@10 above -.005, on all collections.
"""

from __future__ import annotations

import argparse
import itertools
import json
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

TOP = 10
DELTAS = (0.5, 0.3, 0.2, 0.1, 0.05, 0.02)
BUDGETS = (10, 20, 30, 40, 60, 80, 120, 200, 10**6)
KS = (1, 2, 3, 4, 5, 6, 8, 10, 15, 20, 10**6)
TOLERANCE = 0.005
EDGES = (1, 2, 4, 8, 16, 10**6)
"""Groups of numbers of unread windows for which bounds are found."""
CHEAP_GROUPS = 6
"""Groups of selector scores, of equal size, within them."""


# Recording.


def dataset_of(name: str) -> Any:
    """A folder, or the docstrings of the installed packages."""
    import pyterrier as pt

    return pt.get_dataset("longdoc:docstrings" if name == "docstrings" else f"longdoc:folder:{name}")


def topics_of(dataset: Any, dev: int, test: int, skip: int = 0) -> pd.DataFrame:
    """`qid, query, part`: dev and test queries, drawn at random from the splits, or from all queries.

    From a test split the first `skip` that are drawn are left out.
    """
    rng = np.random.default_rng(0)
    try:
        pools = {part: dataset.get_topics(part) for part in ("dev", "test")}
    except (KeyError, ValueError):
        judged = dataset.get_topics().query("qid in @qids", local_dict={"qids": set(dataset.get_qrels()["qid"])})
        mixed = judged.iloc[rng.permutation(len(judged))]
        pools = {"dev": mixed.iloc[: min(dev, len(mixed) // 3)], "test": mixed.iloc[min(dev, len(mixed) // 3) :]}
        skip = 0
    parts = {"dev": slice(dev), "test": slice(skip, skip + test)}
    drawn = {part: pool.iloc[rng.permutation(len(pool))[parts[part]]] for part, pool in pools.items()}
    return pd.concat([frame.assign(part=part)[["qid", "query", "part"]] for part, frame in drawn.items()])


def qrels_of(dataset: Any) -> pd.DataFrame:
    """The judgements of dev and test queries, or of all."""
    try:
        return pd.concat([dataset.get_qrels(part) for part in ("dev", "test")])
    except (KeyError, ValueError):
        return dataset.get_qrels()


def candidates_of(dataset: Any, topics: pd.DataFrame, depth: int) -> pd.DataFrame:
    from pyterrier_longdoc.demo import first_stage

    with tempfile.TemporaryDirectory() as folder:
        run = (first_stage(dataset, Path(folder) / "index", depth) >> dataset.text_loader(["text"]))(topics)
    return run[["qid", "query", "docno", "text", "score", "rank"]].merge(topics[["qid", "part"]])


def selector_scores(selector: Any, query: str, text: str, spans: list[Any]) -> list[float]:
    """BM25 of each window, which is one token to the selector."""
    from pyterrier_longdoc.modelling.preselection import TextPairs
    from pyterrier_longdoc.modelling.tokens import TokenizedText

    pair = TextPairs([query], [TokenizedText(np.zeros(len(spans)), text, np.array(spans))], *np.zeros((2, 1), "int64"))
    return selector.scores(pair, [[(i, i + 1) for i in range(len(spans))]])[0].round(4).tolist()


def record(args: argparse.Namespace) -> None:
    import pyterrier_longdoc as ld

    model = ld.MaxP.load(args.model, dtype="float32", explain=True)
    for name in args.collections:
        dataset, file = dataset_of(name), args.to / f"{Path(name).name}.jsonl"
        topics = topics_of(dataset, args.dev, args.test, args.skip)
        qrels = qrels_of(dataset)
        label_of = dict(zip(zip(qrels["qid"], qrels["docno"], strict=True), qrels["label"], strict=True))
        texts = [str(row["text"]) for row in dataset.get_corpus_iter(verbose=False)]
        selector = ld.BM25Windows.from_texts(texts, 1)
        done = {json.loads(line)["qid"] for line in file.open()} if file.exists() else set()
        run = candidates_of(dataset, topics, args.depth)
        left = [qid for qid in run["qid"].unique() if qid not in done]
        start, windows = time.perf_counter(), 0
        for at in range(0, len(left), args.at_once):
            rows = model(run[run["qid"].isin(left[at : at + args.at_once])].rename(columns={"score": "bm25"}))
            lines = []
            for row in rows.itertuples():
                spans, scores = list(map(list, row.window_spans)), np.round(row.window_scores, 4).tolist()
                base = {"qid": row.qid, "query": row.query, "part": row.part, "docno": row.docno, "bm25": row.bm25}
                label = int(label_of.get((row.qid, row.docno), 0))
                cheap = selector_scores(selector, row.query, row.text, spans)
                lines.append(json.dumps({**base, "label": label, "spans": spans, "scores": scores, "cheap": cheap}))
                windows += len(spans)
            with file.open("a") as out:
                out.write("\n".join(lines) + "\n")
            rate = windows / (time.perf_counter() - start)
            print(f"{Path(name).name}: {at + args.at_once} of {len(left)} queries, {rate:.0f} windows/s", flush=True)


def recorded(file: Path) -> pd.DataFrame:
    """A row for each query and document, in the order of BM25."""
    return pd.DataFrame([json.loads(line) for line in file.open()])


# Simulation.


class Query:
    """The candidates of a query in the order of BM25, and their windows in the order of the selector."""

    def __init__(self, rows: pd.DataFrame) -> None:
        self.labels = rows["label"].clip(lower=0).to_numpy()
        orders = [np.argsort(-np.array(cheap), kind="stable") for cheap in rows["cheap"]]
        self.cheap = [np.array(cheap)[order] for cheap, order in zip(rows["cheap"], orders, strict=True)]
        self.scores = [np.array(scores)[order] for scores, order in zip(rows["scores"], orders, strict=True)]
        self.best = [np.maximum.accumulate(scores) for scores in self.scores]
        self.rest = [np.maximum.accumulate(scores[::-1])[::-1] for scores in self.scores]
        self.sizes = np.array(list(map(len, self.scores)))
        self.full = self.values(self.sizes)

    def values(self, read: np.ndarray) -> np.ndarray:
        """Scores after so many windows of each document."""
        pairs = zip(self.best, read, strict=True)
        return np.array([best[number - 1] if number else -np.inf for best, number in pairs])

    def list_of(self, values: np.ndarray) -> list[int]:
        return np.argsort(-values, kind="stable")[:TOP].tolist()

    def ndcg(self, values: np.ndarray) -> float:
        discounts = 1 / np.log2(np.arange(2, TOP + 2))
        ideal = (np.sort(self.labels)[::-1][:TOP] * discounts[: len(self.labels)]).sum()
        gains = self.labels[self.list_of(values)]
        return float((gains * discounts[: len(gains)]).sum() / ideal) if ideal else 0.0

    def outcome(self, read: np.ndarray) -> tuple[int, float, bool]:
        """Windows read, nDCG@10, and whether the top 10 is that of all windows."""
        values = self.values(read)
        return int(read.sum()), self.ndcg(values), self.list_of(values) == self.list_of(self.full)


class Bounds:
    """Quantiles of the best unread score, given how many windows are unread and the selector's best score of them."""

    def __init__(self, queries: list[Query]) -> None:
        rows = [
            (query.sizes[d] - r, query.cheap[d][r], query.rest[d][r])
            for query in queries
            for d in range(len(query.sizes))
            for r in range(query.sizes[d])
        ]
        unread, cheap, rest = map(np.array, zip(*rows, strict=True))
        group = np.searchsorted(EDGES, unread, side="right")
        self.edges = {
            g: np.unique(np.quantile(cheap[group == g], np.arange(1, CHEAP_GROUPS) / CHEAP_GROUPS)) for g in set(group)
        }
        values: dict[tuple[int, int], list[float]] = {}
        for g, c, best in zip(group.tolist(), cheap.tolist(), rest.tolist(), strict=True):
            values.setdefault((g, int(np.searchsorted(self.edges[g], c, side="right"))), []).append(best)
        self.values = values

    def tables(self, queries: list[Query], delta: float) -> list[list[np.ndarray]]:
        """For each document of each query the bound after 0, 1, ... windows are read."""
        level = {cell: float(np.quantile(values, 1 - delta)) for cell, values in self.values.items()}
        nearest = {g: max(value for (own, _), value in level.items() if own == g) for g, _ in level}

        def of(unread: int, cheap: float) -> float:
            group = int(np.searchsorted(EDGES, unread, side="right"))
            group = group if group in self.edges else max(self.edges)
            cell = (group, int(np.searchsorted(self.edges[group], cheap, side="right")))
            return level.get(cell, nearest[group])

        return [
            [
                np.array([*(of(query.sizes[d] - r, query.cheap[d][r]) for r in range(query.sizes[d])), -np.inf])
                for d in range(len(query.sizes))
            ]
            for query in queries
        ]


def undecided(values: np.ndarray, upper: np.ndarray, *, as_list: bool) -> np.ndarray:
    """Which documents may still change the top 10."""
    order = np.argsort(-values, kind="stable")
    v, u = values[order], upper[order]
    open_ones = np.zeros(len(v), dtype=bool)
    firsts = range(min(TOP, len(v))) if as_list else [min(TOP, len(v)) - 1]
    for place in firsts:
        threats = u[place + 1 :] > v[place]
        open_ones[place + 1 :] |= threats
        open_ones[place] |= threats.any() and u[place] > v[place]
    out = np.zeros(len(v), dtype=bool)
    out[order] = open_ones
    return out


def anytime(query: Query, table: list[np.ndarray], *, as_list: bool, skip: bool) -> list[int]:
    """The documents whose next window is read, one after the other, until the top 10 is settled."""
    read, order = np.zeros(len(query.sizes), dtype=int), []
    while (read < query.sizes).any():
        values = query.values(read)
        upper = np.maximum(values, [bounds[number] for bounds, number in zip(table, read, strict=True)])
        open_ones = undecided(values, upper, as_list=as_list) & (read < query.sizes)
        if not open_ones.any():
            break
        candidates = np.flatnonzero(open_ones if skip else read < query.sizes)
        order.append(int(max(candidates, key=lambda d: query.cheap[d][read[d]])))
        read[order[-1]] += 1
    return order


def simulate(args: argparse.Namespace) -> None:
    frontiers = {}
    for name in args.collections:
        rows = recorded(args.to / f"{name}.jsonl")
        parts = {
            part: [Query(own) for _, own in frame.groupby("qid", sort=False) if own["label"].max() > 0]
            for part, frame in rows.groupby("part")
        }
        bounds = Bounds(parts["dev"])
        found = {}
        for part, queries in parts.items():
            for k in KS:
                outcomes = [query.outcome(np.minimum(query.sizes, k)) for query in queries]
                found[part, f"k={k}" if k < 10**6 else "all"] = np.array(outcomes, dtype=float)
            for delta in DELTAS:
                tables = bounds.tables(queries, delta)
                for stop, skip in itertools.product(("list", "set"), (False, True)):
                    options: dict[str, Any] = {"as_list": stop == "list", "skip": skip}
                    pairs = list(zip(queries, tables, strict=True))
                    orders = [anytime(query, table, **options) for query, table in pairs]
                    for budget in BUDGETS:
                        reads = [
                            np.bincount(order[:budget], minlength=len(query.sizes))
                            for query, order in zip(queries, orders, strict=True)
                        ]
                        outcomes = [query.outcome(read) for query, read in zip(queries, reads, strict=True)]
                        key = f"delta={delta} budget={budget} {stop}{' skip' * skip}"
                        found[part, key] = np.array(outcomes, dtype=float)
        frontiers[name] = report(name, found, {part: len(queries) for part, queries in parts.items()})
    if args.plot:
        plot(frontiers, args.plot)


def report(name: str, found: dict[Any, np.ndarray], queries: dict[str, int]) -> pd.DataFrame:
    """Print what was chosen on dev and what it is worth on test; return the means of all settings on test."""
    means = pd.DataFrame(
        {key: values.mean(0) for key, values in found.items()}, index=["windows", "nDCG@10", "equal"]
    ).T
    dev, test = means.loc["dev"], means.loc["test"]
    fixed = [key for key in dev.index if key.startswith("k=") or key == "all"]
    k = dev.loc[fixed].sort_values(["nDCG@10", "windows"], ascending=[False, True]).index[0]
    others = dev.drop(fixed)
    half = others[others["windows"] <= dev.loc[k, "windows"] / 2]
    chosen = half.sort_values(["nDCG@10", "windows"], ascending=[False, True]).index[0]
    rng = np.random.default_rng(0)
    gap = found["test", chosen][:, 1] - found["test", k][:, 1]
    drawn = gap[rng.integers(0, len(gap), (10000, len(gap)))].mean(1)
    low, high = np.quantile(drawn, [0.025, 0.975])
    share = test.loc[chosen, "windows"] / test.loc[k, "windows"]
    passes = share <= 0.5 and low > -TOLERANCE
    print(f"\n{name}: {queries['dev']} dev and {queries['test']} test queries with a relevant candidate")
    print(test.loc[[*fixed, chosen]].round({"windows": 1, "nDCG@10": 4, "equal": 3}).to_string())
    print(
        f"best k on dev: {k}; anytime on dev: {chosen}; windows {share:.2f} of fixed k's; nDCG@10 {gap.mean():+.4f} "
        f"({low:+.4f} to {high:+.4f}): {'passes' if passes else 'does not pass'}"
    )
    return test.assign(fixed=[key in fixed for key in test.index], chosen=test.index == chosen)


def plot(frontiers: dict[str, pd.DataFrame], file: Path) -> None:
    import matplotlib.pyplot as plt

    from pyterrier_longdoc.common.plots import COLOURS

    figure, axes = plt.subplots(1, len(frontiers), figsize=(4 * len(frontiers), 3.5), layout="constrained")
    for ax, (name, frame) in zip(np.atleast_1d(axes), frontiers.items(), strict=True):
        fixed, others = frame[frame["fixed"]], frame[~frame["fixed"]]
        ax.plot(fixed["windows"], fixed["nDCG@10"], marker="o", color=COLOURS[0], label="fixed k")
        ax.scatter(others["windows"], others["nDCG@10"], s=6, alpha=0.4, color=COLOURS[1], label="anytime")
        best = frame[frame["chosen"]]
        ax.scatter(best["windows"], best["nDCG@10"], s=60, marker="*", color="k", label="chosen on dev")
        ax.set(title=name, xlabel="windows of a query", ylabel="nDCG@10", xscale="log")
    axes.flat[0].legend(frameon=False) if len(frontiers) > 1 else axes.legend(frameon=False)
    figure.savefig(file)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=("record", "simulate"))
    parser.add_argument("collections", nargs="+", help="folders, or docstrings")
    parser.add_argument("--to", type=Path, required=True, help="folder of recorded scores")
    parser.add_argument("--model", default="longdoc:maxp")
    parser.add_argument("--depth", type=int, default=20, help="of BM25's candidates")
    parser.add_argument("--dev", type=int, default=40, help="queries")
    parser.add_argument("--test", type=int, default=100, help="queries")
    parser.add_argument("--skip", type=int, default=0, help="test queries that an earlier choice has seen")
    parser.add_argument("--at-once", type=int, default=5, help="queries scored between two writes")
    parser.add_argument("--plot", type=Path)
    args = parser.parse_args()
    args.to.mkdir(parents=True, exist_ok=True)
    record(args) if args.command == "record" else simulate(args)


if __name__ == "__main__":
    main()
