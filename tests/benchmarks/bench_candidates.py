"""What is lost where queries are not trained on whose relevant document the first stage did not retrieve?

    python tests/benchmarks/bench_candidates.py [--queries 160] [--epochs 1] [--depth 10] [--topics 80]

Documents after MS MARCO FarRelevant, made of docstrings of up to 96 tokens: the relevant one at least 64 tokens into a
document of at most 224. A packaged MaxP is trained further on the same queries and BM25's best `--depth` documents of
each, once on what was retrieved (`judged="retrieved"`), once on all that is judged (`judged="all"`, FlexNeuART's way).
First it prints how many queries are left. Then reciprocal rank for topics of the test split: over BM25's candidates,
where a query counts 0 if the relevant document is not among them, and over the same with it in place of the last one;
p-values (paired t-test, Holm) are against training on what was retrieved. Needs the extra `demo`.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path
from typing import Any

import pandas as pd

LONGEST, OFFSET, MAX_DOC_LEN = 96, 64, 224


def collection() -> Any:
    """Known-item search in short documents of docstrings, the relevant one far into its document."""
    from pyterrier_longdoc.data import DocstringsDataset
    from pyterrier_longdoc.data.provider import of_docstrings

    return of_docstrings(DocstringsDataset(), LONGEST, min_offset=OFFSET, max_doc_len=MAX_DOC_LEN)


def with_relevant(run: pd.DataFrame, topics: pd.DataFrame, qrels: pd.DataFrame, depth: int) -> pd.DataFrame:
    """The ids of candidates, the relevant document of each topic in place of the last one where it is missing."""
    from pyterrier_longdoc.training import add_judged

    run = run[["qid", "query", "docno", "score", "rank"]]
    full = add_judged(run, qrels[qrels["qid"].isin(topics["qid"])], topics=topics)
    missed = full.loc[full["score"].eq(-float("inf")), "qid"]
    last = full["qid"].isin(missed) & full["rank"].eq(depth - 1)
    return full[~last].reset_index(drop=True)


def main() -> None:
    """Trains both ways and prints the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--queries", type=int, default=160, help="of the train split")
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--depth", type=int, default=10, help="of BM25's candidates, for training and test")
    parser.add_argument("--topics", type=int, default=80, help="of the test split")
    parser.add_argument("--rate", type=float, default=3e-5, help="learning rate")
    parser.add_argument("--model", default="longdoc:maxp", help="packaged model or folder to start from")
    args = parser.parse_args()
    import pyterrier as pt
    from ir_measures import RR

    import pyterrier_longdoc as ld
    from pyterrier_longdoc.demo import first_stage

    data = collection()
    loader = data.text_loader()
    samples = [
        data.get_topics(split).sample(count, random_state=0).sort_values("qid").reset_index(drop=True)[["qid", "query"]]
        for split, count in (("train", args.queries), ("test", args.topics))
    ]
    train, test = samples
    judged, qrels = (data.get_qrels(split) for split in ("train", "test"))
    with tempfile.TemporaryDirectory() as folder:
        bm25 = first_stage(data, Path(folder) / "index", args.depth)
        run, candidates = (loader(bm25(topics)) for topics in samples)
    print(f"BM25, depth {args.depth}: {run['qid'].nunique()} of {len(train)} training queries have candidates")
    systems = {"start": ld.CrossEncoder.load(args.model)}
    for way in ("retrieved", "all"):
        recipe = ld.TrainingArgs(
            judged=way, epochs=args.epochs, queries_per_step=4, queries_per_forward=4,
            learning_rates={"": args.rate}, dropout=0.0, dtype="bfloat16",
        )  # fmt: skip
        model = ld.CrossEncoder.load(args.model, training=recipe, text_loader=data)
        start, earlier = time.perf_counter(), model.history["step"].iloc[-1]
        systems[f"trained on {way}"] = model.fit(run, judged)
        seconds, (*_, loss) = time.perf_counter() - start, model.history["loss"]
        steps = model.history["step"].iloc[-1] - earlier
        print(f"judged={way!r}: {model.trained_on}; {steps} steps, mean loss {loss:.3f}, {seconds:.0f} s", flush=True)
    full = loader(with_relevant(candidates, test, qrels, args.depth))
    scored = {name: model(full) for name, model in systems.items()}
    own = full.merge(candidates[["qid", "docno"]])[["qid", "docno"]]
    for title, frames in (
        ("BM25's candidates", {name: frame.merge(own) for name, frame in scored.items()}),
        ("with the relevant document among them", scored),
    ):
        table = pt.Experiment(
            {"BM25": candidates, **frames}, test, qrels, [RR], baseline=2, correction="holm", filter_by_qrels=False
        )
        print(f"\n{title}\n{table[['name', 'RR', 'RR p-value corrected']].to_string(index=False)}", flush=True)


if __name__ == "__main__":
    main()
