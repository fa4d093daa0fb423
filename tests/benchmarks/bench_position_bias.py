"""Models that read the first window collapse where relevant text stands far back; models that read all stay.

    python tests/benchmarks/bench_position_bias.py [--queries 100] [--depth 100] [--bm25] [--cross-encoder FOLDER]
        [--models NAME=FOLDER ...] [--no-bi-encoders] [--moved 50] [--output position-bias]

The collections docstrings-early, -uniform and -far have the same queries and the same documents but for the place of
the relevant passage. Candidates are a query's relevant document and others drawn from those of the other queries, so
that a model that sees nothing relevant is as good as chance; or with --bm25 the best of BM25. They are reranked by the
packaged MiniLM as bi-encoder over the first or the best window, by FirstP and MaxP with a cross-encoder checkpoint if
one is given, and by models of any class that `save` wrote or this package carries (MaxP=longdoc:maxp); one
called FirstP is what the others are tested against. Tables: effectiveness in each collection with intervals and the
test of each model against its first-window partner, the ratio of worst to best collection, the same by position within
docstrings-uniform, and the change of the scores when the passage moves through the document. The pictures are in the
output folder.
"""

from __future__ import annotations

import argparse
import random
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

import pandas as pd
import pyterrier as pt

import pyterrier_longdoc as ld
from pyterrier_longdoc.analysis import PositionEffectiveness
from pyterrier_longdoc.common.packaged import ENCODER
from pyterrier_longdoc.demo import first_stage

PLACES = ("early", "uniform", "far")
FIRST_WINDOW = ("BiEncoder first", "FirstP")


def rerankers(args: argparse.Namespace) -> dict[str, Any]:
    """The systems by name."""
    models: dict[str, Any] = {}
    if not args.no_bi_encoders:
        for aggregation in ("first", "max"):
            models[f"BiEncoder {aggregation}"] = ld.BiEncoder(ENCODER, aggregation=aggregation)
    if args.cross_encoder:
        models |= {"FirstP": ld.FirstP(args.cross_encoder), "MaxP": ld.MaxP(args.cross_encoder)}
    for model in args.models:
        name, _, folder = model.partition("=")
        if not folder or name in models:
            raise SystemExit(f"--models {model}: expected NAME=FOLDER, with a name of its own")
        models[name] = ld.CrossEncoder.load(folder)
    if not models:
        raise SystemExit("no model: give --cross-encoder or --models, or leave out --no-bi-encoders")
    return models


def partners_of(names: list[str]) -> dict[str, str]:
    """The system that reads the first window only, for each other one of its kind."""
    bi_encoder, cross_encoder = FIRST_WINDOW
    of_kind = {name: bi_encoder if name.startswith("BiEncoder") else cross_encoder for name in names}
    return {name: first for name, first in of_kind.items() if first in names and name != first}


def retrieved(collection: Any, topics: pd.DataFrame, depth: int, *, bm25: bool) -> pd.DataFrame:
    """Candidates with their text."""
    if bm25:
        with tempfile.TemporaryDirectory() as folder:
            return (first_stage(collection, Path(folder) / "index", depth) >> collection.text_loader())(topics)
    qrels = collection.get_qrels("test")
    own = qrels[qrels["qid"].isin(set(topics["qid"]))].groupby("qid")["docno"].agg(list)
    pool = sorted(set(own.sum()))
    rows = []
    for qid, query in topics[["qid", "query"]].itertuples(index=False):
        others = [docno for docno in pool if docno not in own[qid]]
        drawn = random.Random(qid).sample(others, min(len(others), depth - len(own[qid])))
        rows += [(qid, query, docno, 0.0) for docno in [*own[qid], *drawn]]
    frame = pd.DataFrame(rows, columns=["qid", "query", "docno", "score"])
    return collection.text_loader()(pt.model.add_ranks(frame))


def show(title: str, table: pd.DataFrame) -> None:
    """Prints a table."""
    few: Any = "{:.2g}".format
    rounded = table.round({name: 3 for name in table if not str(name).startswith("p-value")})
    formats = {name: few for name in table if str(name).startswith("p-value")}
    print(f"\n{title}\n\n{rounded.to_string(index=False, formatters=formats)}", flush=True)


def main() -> None:
    """Prints the tables and draws the pictures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--queries", type=int, default=100)
    parser.add_argument("--depth", type=int, default=100)
    parser.add_argument("--bm25", action="store_true", help="rerank what BM25 finds")
    parser.add_argument("--moved", type=int, default=50, help="documents whose passage is moved")
    parser.add_argument("--cross-encoder", help="checkpoint for FirstP and MaxP: a folder or a name")
    parser.add_argument("--models", nargs="*", default=[], metavar="NAME=FOLDER", help="saved or packaged models")
    parser.add_argument("--no-bi-encoders", action="store_true", help="the other models only")
    parser.add_argument("--output", type=Path, default=Path("position-bias"))
    args = parser.parse_args()
    # One stage is shared by all systems on purpose, FirstP is meant to cut, and small sizes are for trying out.
    warnings.simplefilter("ignore")
    args.output.mkdir(parents=True, exist_ok=True)
    models, results, start = rerankers(args), {}, time.perf_counter()
    collections = {place: pt.get_dataset(f"longdoc:docstrings-{place}") for place in PLACES}
    topics = collections["far"].get_topics("test").sample(args.queries, random_state=0).sort_values("qid")
    for place, collection in collections.items():
        candidates = retrieved(collection, topics, args.depth, bm25=args.bm25)
        systems = {name: model(candidates) for name, model in models.items()}
        if args.bm25:
            systems["BM25"] = candidates
        qrels = collection.get_qrels("test")
        results[place] = ld.Experiment(systems, topics, qrels, ["RR", "nDCG@10"], partner=partners_of(list(models)))
        print(f"{place}: {len(candidates)} candidates, {time.perf_counter() - start:.0f} s", flush=True)
    if not args.bm25:
        depth = min(args.depth, args.queries)
        chance = sum(1 / rank for rank in range(1, depth + 1)) / depth
        print(f"\nRR of a random order of {depth} candidates: {chance:.3f}")
    found = PositionEffectiveness(results)
    show("By collection", found.table)
    if partners_of(list(models)):
        columns = ["group", "name", "reference", "measure", "mean", "reference mean", "gain", "p-value", "reject"]
        show("Against the first-window partner", found.comparisons[columns])
    show("Worst and best collection", found.ratios)
    uniform = ld.effectiveness_by_position(results["uniform"], collections["uniform"].gold, edges=(0, 256, 512, 768))
    show("By position within docstrings-uniform", uniform.table)
    gold = collections["uniform"].gold
    corpus = collections["uniform"].get_corpus_iter(verbose=False)
    moving = ld.position_sensitivity(models, topics.head(args.moved), corpus, gold)
    show("Scores while the passage moves", moving.table)
    for name, result in (("collections", found), ("uniform", uniform), ("sensitivity", moving)):
        result.plot().figure.savefig(args.output / f"{name}.png", dpi=150)
    print(f"\npictures are in {args.output}/, {time.perf_counter() - start:.0f} s")


if __name__ == "__main__":
    main()
