"""Rows of Table 1 of Boytsov et al. 2025 on MS MARCO documents, computed here and printed beside the published ones.

    python tests/benchmarks/published_row.py firstp-e5-4k longp-e5-4k
    python tests/benchmarks/published_row.py firstp maxp --train-queries 50000
    python tests/benchmarks/published_row.py firstp-e5-4k longp-e5-4k firstp maxp --stand-in

Arguments are names of `ld.presets`. E5-4K is a public checkpoint: it is evaluated as it is. All other presets are
trained first, with the paper's recipe, seed 0 and the official candidates of the training queries. Two test sets are
evaluated: the dev set (5,193 queries) and TREC DL 2019 and 2020 together (88 queries). The texts, queries, judgements
and candidates are downloaded by ir_datasets (8.5 GB and more).

Candidates are the official 100 of each query. The paper took those of BM25 with doc2query for the dev set and those of
ANCE for TREC DL, and its TREC DL also has 2021. So the figures differ, and the gain of a model over its partner is what
to compare. An interrupted command resumes when it is repeated.

`--stand-in` runs the same steps in two minutes on a CPU, without a download: the documentation of Python packages in
place of MS MARCO, a MiniLM in place of each backbone, two steps of training. Its figures mean nothing.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pandas as pd
import pyterrier as pt

import pyterrier_longdoc as ld
from pyterrier_longdoc.demo import first_stage

TEST_SETS = {"dev RR": ("RR@100", ["dev"]), "DL nDCG@10": ("nDCG@10", ["trec-dl-2019/judged", "trec-dl-2020/judged"])}
"""The measure and the parts of the collection behind a published figure."""


class Part(NamedTuple):
    """Topics with candidates and judgements."""

    topics: pd.DataFrame
    candidates: pd.DataFrame
    qrels: pd.DataFrame


def official(names: list[str], queries: int | None) -> Part:
    """Parts of MS MARCO documents with their official candidates; of some queries alone, drawn by a fixed seed."""
    datasets = [pt.get_dataset(f"irds:msmarco-document/{name}") for name in names]
    topics = pd.concat([dataset.get_topics() for dataset in datasets], ignore_index=True)
    if queries is not None and queries < len(topics):
        topics = topics.sample(queries, random_state=0)
    qids = set(topics["qid"])
    # One at a time: the training queries have 36.7 million candidates.
    rows = (one for dataset in datasets for one in dataset.irds_ref().scoreddocs_iter() if one.query_id in qids)
    runs = pd.DataFrame([(one.query_id, one.doc_id, one.score) for one in rows], columns=["qid", "docno", "score"])
    runs = pt.model.add_ranks(runs.merge(topics[["qid", "query"]], on="qid"))
    return Part(topics, runs, pd.concat([dataset.get_qrels() for dataset in datasets]))


def stand_in(names: list[str], queries: int | None, folder: Path) -> Part:
    """A few topics of the documentation of Python packages, with BM25's candidates."""
    dataset = pt.get_dataset("longdoc:docstrings")
    folder.mkdir(parents=True, exist_ok=True)
    split = names[0] if names[0] in ("train", "dev") else "test"
    topics = dataset.get_topics(split).head(queries or 6)
    return Part(topics, first_stage(dataset, folder / "index.pisa", 5)(topics), dataset.get_qrels(split))


def main() -> None:
    """Prints a table for each test set."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("presets", nargs="+", help="names of ld.presets, but for those of RankGPT")
    parser.add_argument("--folder", default="published-row", help="keeps trained models and runs (%(default)s)")
    parser.add_argument("--train-queries", type=int, help="train on so many queries; without it on all 367,013")
    parser.add_argument("--dev-queries", type=int, help="evaluate so many of the 5,193 queries of the dev set")
    parser.add_argument("--device", help="such as cuda:1; without it a GPU if there is one")
    parser.add_argument("--stand-in", action="store_true", help="try every step in minutes, with other data")
    args = parser.parse_args()

    # Other data or other queries have folders of their own.
    folder = Path(args.folder, "stand-in" if args.stand_in else "ms-marco")
    part_of = partial(stand_in, folder=folder) if args.stand_in else official
    texts = pt.get_dataset("longdoc:docstrings" if args.stand_in else "irds:msmarco-document")
    options: dict[str, Any] = {"text_loader": texts, "device": args.device, "verbose": True}
    recipe = ld.TrainingArgs.preset("boytsov2025")
    if args.stand_in:
        options |= {"backbone": "longdoc:minilm-l6", "window_size": 120}
        recipe = ld.TrainingArgs.preset("boytsov2025", max_steps=2)
    else:
        options["text_field"] = ("url", "title", "body")

    models = {}
    for name in args.presets:
        make = partial(ld.presets[name], **options)
        models[name] = make()
        if hasattr(models[name], "fit"):
            train = part_of(["train"], args.train_queries)
            kept = folder / f"{name}-{args.train_queries or 'all'}"
            models[name] = make(seed=0, training=replace(recipe, seed=0, checkpoint=kept))
            models[name].fit(train.candidates, train.qrels)

    partners = {name: ld.presets[name].partner for name in args.presets}
    for figure, (measure, names) in TEST_SETS.items():
        queries = args.dev_queries if names == ["dev"] else None
        test = part_of(names, queries)
        first_stage = pt.Transformer.from_df(test.candidates)
        results = ld.Experiment(
            {"candidates": first_stage, **{name: first_stage >> model for name, model in models.items()}},
            test.topics,
            test.qrels,
            [measure],
            baseline="candidates",
            partner={name: partner for name, partner in partners.items() if partner in models},
            save_dir=folder / f"{figure.replace(' ', '-')}-{args.train_queries or 'all'}-{queries or 'all'}",
            save_mode="reuse",
            verbose=True,
        )
        published = pd.Series({name: ld.presets[name].published.get(figure) for name in args.presets})
        print(f"{figure}, {len(test.topics)} queries")
        print(results.means.assign(published=published).to_string(float_format="{:.3f}".format))


if __name__ == "__main__":
    main()
