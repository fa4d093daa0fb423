"""What it costs and saves to read only the k best windows of a document: selector by k, beside reading all.

    python tests/benchmarks/bench_selection.py [--topics 100] [--k 1 2 3 5] [--encoder none] [--threads 2]

The packaged MaxP reranks BM25's best 20 documents of `longdoc:docstrings` among those with more than 1,500 tokens, and
is judged by the relevant ones among these. Documents/s are those of one `transform` with everything loaded and nothing
remembered; "embedding, indexed" has the windows' embeddings from an earlier run. The change in nDCG@10 against all
windows has a p-value (paired t-test, corrected by Holm over the table). MaxP and the bi-encoder of the default are
equally large: on so small a model, selection by embeddings that are not indexed cannot save time.

Needs the extra `demo`.
"""

from __future__ import annotations

import argparse
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

import pandas as pd
import pyterrier as pt
import torch
from ir_measures import nDCG

import pyterrier_longdoc as ld
from pyterrier_longdoc.demo import first_stage
from pyterrier_longdoc.modelling.tokens import tokenize

MODEL = "longdoc:maxp"
MIN_TOKENS = 1500
CANDIDATES, DEPTH = 1000, 20
"""Documents that BM25 finds, and the most that are left of a topic without those that are too short."""


def candidates(tokenizer: Any, number: int) -> tuple[pd.DataFrame, pd.DataFrame, pd.DataFrame]:
    """Topics, their long candidates with text, and the qrels of long documents."""

    def is_long(texts: pd.Series) -> pd.Series:
        distinct = list(dict.fromkeys(texts))
        lengths = dict(zip(distinct, map(len, tokenize(tokenizer, distinct)), strict=True))
        return texts.map(lengths) > MIN_TOKENS

    dataset = pt.get_dataset("longdoc:docstrings")
    topics, qrels = dataset.get_topics("test-long"), dataset.get_qrels("test-long")
    texts = qrels["docno"].map({d["docno"]: d["text"] for d in dataset.get_corpus_iter(verbose=False)})
    qrels = qrels[is_long(texts)]
    topics = topics[topics["qid"].isin(qrels["qid"][qrels["label"] > 0])].reset_index(drop=True)
    if 0 < number < len(topics):
        topics = topics.sample(number, random_state=0).sort_values("qid").reset_index(drop=True)
    with tempfile.TemporaryDirectory() as scratch:
        found = (first_stage(dataset, Path(scratch) / "index", CANDIDATES) >> dataset.text_loader())(topics)
    found = found[is_long(found["text"])].sort_values(["qid", "rank"])
    return topics, pt.model.add_ranks(found.groupby("qid").head(DEPTH).reset_index(drop=True)), qrels


def selections(sizes: list[int], encoder: str) -> dict[tuple[str, str], Any]:
    """Preselections by the names of their rows."""
    makers: dict[str, Any] = {"first": ld.FirstK, "bm25": ld.BM25Windows}
    if encoder != "none":
        bi_encoder = ld.BiEncoder(encoder)
        makers["embedding"] = makers["embedding, indexed"] = lambda k: ld.EmbeddingWindows(k, bi_encoder)
    return {("all", "all"): None} | {(name, str(k)): of(k) for name, of in makers.items() for k in sizes}


def by_cost(args: argparse.Namespace, model: Any) -> None:
    """Print documents/s and nDCG@10 of the model over the windows that each selector chooses."""
    topics, found, qrels = candidates(model.model.tokenizer, args.topics)
    print(f"{MODEL}: {len(topics)} topics, {len(found)} documents of more than {MIN_TOKENS} tokens")
    runs, rows = {}, []
    for (name, k), preselect in selections(args.k, args.encoder).items():
        model.preselect = preselect
        model.transform(found.head(1))  # loads everything
        if name.endswith("indexed"):
            model.transform(found)
        elif isinstance(preselect, ld.EmbeddingWindows):
            preselect.model.model.reader.cache.clear()
        start = time.perf_counter()
        runs[f"{name} {k}"] = model.transform(found)
        speed = len(found) / (time.perf_counter() - start)
        rows.append({"selector": name, "k": k, "docs/s": speed, "windows": model.coverage.windows_per_document})
    table, measure = pd.DataFrame(rows), str(nDCG @ 10)
    table.insert(3, "speed-up", table["docs/s"] / table["docs/s"][0])
    result = pt.Experiment(
        list(runs.values()), topics, qrels, [nDCG @ 10], names=list(runs), baseline=0, correction="holm"
    ).set_index("name")
    table[measure] = result.loc[list(runs), measure].to_numpy()
    table["change"] = table[measure] - table[measure][0]
    table["p (Holm)"] = result.loc[list(runs), f"{measure} p-value corrected"].to_numpy()
    print(table.round({"docs/s": 1, "speed-up": 2, "windows": 2}).round(4).to_string(index=False))


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--topics", type=int, default=100, help="sample so many; 0 takes all")
    parser.add_argument("--k", type=int, nargs="*", default=[1, 2, 3, 5])
    parser.add_argument("--encoder", default="longdoc:minilm-l6", help="of the bi-encoder; 'none' leaves it out")
    parser.add_argument("--threads", type=int, help="of torch")
    args = parser.parse_args()
    if args.threads:
        torch.set_num_threads(args.threads)
    warnings.filterwarnings("ignore", message=".*did not read ")
    by_cost(args, ld.MaxP.load(MODEL))


if __name__ == "__main__":
    main()
