"""FarRelevant collections: how fast and in how much memory they are written, and what rerankers make of them.

    python tests/benchmarks/bench_far_relevant.py [--documents 5000 50000] [--topics 30] [--depth 100] [--maxp]

First table: a collection of each size is made from the Vaswani abstracts and written in the released format, in a
process of its own; its peak memory should not depend on the size. Second table: MRR on the docstrings collections, in
which the same documents have their relevant passage in another place. Candidates are BM25's, the relevant document in
place of the last one where BM25 misses it, so that a random order has an MRR of H_n / n (0.052 for 100 candidates).
FirstP is a bi-encoder that reads the first window (MiniLM, 254 tokens); MaxP (--maxp) reads all windows.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pandas as pd
import pyterrier as pt

import pyterrier_longdoc as ld
from pyterrier_longdoc.data import far_relevant, write_far_relevant
from pyterrier_longdoc.demo import first_stage

VASWANI = Path(__file__).resolve().parents[3] / "shared" / "data" / "vaswani"
POSITIONS = ("early", "uniform", "far")
WINDOW = 254  # and two special tokens: what MiniLM was trained with


def write(folder: str, documents: int) -> None:
    """Makes a collection of so many documents, writes it, and prints what that took as JSON."""
    start = time.perf_counter()
    one = far_relevant(f"longdoc:folder:{VASWANI}")
    copies = -(-documents // len(one.documents))
    collection = far_relevant(f"longdoc:folder:{VASWANI}", copies=copies)
    spare = len(collection.documents) - documents
    if spare:  # whole copies and distractors that make up the number
        copies -= 1
        collection = far_relevant(
            f"longdoc:folder:{VASWANI}", copies=copies, distractors=documents - copies * len(one.documents)
        )
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    write_far_relevant(collection, folder)
    seconds = time.perf_counter() - start
    after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    row = {
        "documents": len(collection.documents),
        "seconds": seconds,
        "built_MB": before / 1024,
        "peak_MB": after / 1024,
    }
    print(json.dumps(row))


def sizes(documents: list[int]) -> pd.DataFrame:
    """Time and peak memory for each size, each in a new process."""
    rows = []
    for count in documents:
        with tempfile.TemporaryDirectory() as folder:
            command = [sys.executable, __file__, "--write", folder, "--documents", str(count)]
            row = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
            row["written_MB"] = sum(file.stat().st_size for file in Path(folder).rglob("*.*")) / 2**20
            rows.append(row)
    return pd.DataFrame(rows)


def candidates(collection: pt.datasets.Dataset, topics: pd.DataFrame, bm25: pt.Transformer, depth: int) -> pd.DataFrame:
    """BM25's first documents, the relevant one in place of the last where it is missing."""
    run = bm25(topics)
    qrels = collection.get_qrels()
    missing = qrels.merge(run[["qid", "docno"]], how="left", indicator=True).query("_merge == 'left_only'")
    missing = missing[missing["qid"].isin(topics["qid"])]
    full = run.groupby("qid")["docno"].transform("size") == depth
    last = full & run["qid"].isin(missing["qid"]) & (run["rank"] == depth - 1)
    added = missing[["qid", "docno"]].merge(topics).assign(score=run["score"].min() - 1)
    return pt.model.add_ranks(pd.concat([run[~last], added], ignore_index=True)[["qid", "query", "docno", "score"]])


def effectiveness(positions: list[str], count: int, depth: int, maxp: bool) -> pd.DataFrame:
    """MRR of BM25, random order and bi-encoders, by position of the relevant passage."""
    # Here, since it imports torch, whose memory would be counted in the first table.
    from pyterrier_longdoc.common.packaged import ENCODER

    rows = []
    aggregations = {"FirstP": "first", **({"MaxP": "max"} if maxp else {})}
    models = {name: ld.BiEncoder(ENCODER, aggregation=kind, window_size=WINDOW) for name, kind in aggregations.items()}
    for position in positions:
        collection = pt.get_dataset(f"longdoc:docstrings-{position}")
        topics = collection.get_topics().sample(count, random_state=0).sort_values("qid").reset_index(drop=True)
        with tempfile.TemporaryDirectory() as folder:
            bm25 = first_stage(collection, Path(folder) / "index", depth)
            retrieved = bm25(topics)
            run = candidates(collection, topics, bm25, depth)
        shuffled = [run.sample(frac=1, random_state=seed) for seed in range(20)]
        orders = [pt.model.add_ranks(order.assign(score=range(len(order)))) for order in shuffled]
        texts = collection.text_loader()(run)
        systems = {"BM25": retrieved, **{name: model(texts) for name, model in models.items()}}
        qrels = collection.get_qrels()
        names = [*systems, *(f"random {i}" for i in range(len(orders)))]
        table = pt.Experiment([*systems.values(), *orders], topics, qrels, ["recip_rank"], names=names)
        mrr = table.set_index("name")["recip_rank"]
        row = {"position": position, "topics": count}
        row |= {"recall": retrieved.merge(qrels)["qid"].nunique() / count, "random": mrr[-len(orders) :].mean()}
        rows.append(row | {name: mrr[name] for name in systems})
        print(rows[-1], flush=True)
    return pd.DataFrame(rows)


def main() -> None:
    """Prints the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--documents", type=int, nargs="*", default=[5000, 50000], help="none leave the first table out"
    )
    parser.add_argument("--topics", type=int, default=30, help="0 leaves the second table out")
    parser.add_argument("--positions", nargs="+", default=list(POSITIONS), choices=POSITIONS)
    parser.add_argument("--depth", type=int, default=100)
    parser.add_argument("--maxp", action="store_true", help="MaxP too, which takes several times as long")
    parser.add_argument("--write", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.write:
        write(args.write, args.documents[0])
        return
    if args.documents:
        print(sizes(args.documents).round(1).to_string(index=False))
    if args.topics:
        expected = sum(1 / rank for rank in range(1, args.depth + 1)) / args.depth
        table = effectiveness(args.positions, args.topics, args.depth, args.maxp)
        print(f"\nMRR; a random order of {args.depth} candidates is expected to have {expected:.3f}")
        print(table.round(3).to_string(index=False))


if __name__ == "__main__":
    main()
