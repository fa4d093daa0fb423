"""The papers' table in miniature: BM25 and six models, three seeds, five folds.

    python tests/benchmarks/table_seeds.py [--collection DIR] [--depth 50] [--seeds 0 1 2] [--output table-seeds]

Windows are encoded once by a small frozen encoder (MiniLM of the extra `demo`); a (query, window) pair is the
elementwise product of the two embeddings, and the package's heads are trained on these vectors, with the pairwise
margin loss of the papers, on four folds and tested on the fifth. At the start every head scores by the cosine. The
first stage's score is added with a trained weight.
"""

from __future__ import annotations

import argparse
import random
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyterrier as pt
import torch

import pyterrier_longdoc as ld
from pyterrier_longdoc.common.packaged import ENCODER
from pyterrier_longdoc.data import FolderDataset
from pyterrier_longdoc.demo import first_stage
from pyterrier_longdoc.experiment import Experiment
from pyterrier_longdoc.modelling.heads import build_head
from pyterrier_longdoc.modelling.inputs import Encoded, to_dense
from pyterrier_longdoc.modelling.model import Model

DEFAULT = Path(__file__).resolve().parents[3] / "shared" / "data" / "time"
HEADS = {
    "FirstP": "firstp",
    "AvgP": "avgp",
    "MaxP": "maxp",
    "KMaxP": "kmaxp",
    "PARADE Attn": "parade-attn",
    "PARADE Attn (elementwise)": "parade-attn-elementwise",
}
HIDDEN, EPOCHS, ACCUMULATE, LEARNING_RATE = 384, 20, 16, 1e-2
SCALE = 20.0  # of a cosine, so that the margin of 1 is 0.05 in cosine


class FrozenVectors:
    """Embeddings of queries and of the windows of documents."""

    def __init__(self, topics: pd.DataFrame, documents: dict[str, str]) -> None:
        self.queries: dict[str, torch.Tensor] = {}
        self.windows: dict[str, dict[str, torch.Tensor]] = {}
        for kind, aggregation in (("first", "first"), ("all", "max")):
            scorer = ld.BiEncoder(ENCODER, aggregation=aggregation).model
            queries = _encoded(scorer, topics["query"].tolist(), [""] * len(topics))
            self.queries = dict(zip(topics["qid"], queries.query.states.squeeze(1), strict=True))
            texts = _encoded(scorer, [""] * len(documents), list(documents.values()))
            own = [vectors[real] for vectors, real in zip(texts.cls, texts.mask, strict=True)]
            self.windows[kind] = dict(zip(documents, own, strict=True))

    def pairs(self, qid: str, docnos: list[str], kind: str) -> Encoded:
        """Products of the query's vector with those of each document's windows, `(B, N, H)`."""
        windows = [self.windows[kind][docno] for docno in docnos]
        return to_dense(torch.cat(windows) * self.queries[qid] * HIDDEN**0.5, list(map(len, windows)))


@torch.no_grad()
def _encoded(scorer: Model, queries: list[str], texts: list[str]) -> Any:
    numbers = range(len(queries))
    with scorer.inference():
        return scorer.encode(scorer.read(scorer.read_queries(queries), numbers, scorer.tokenize(texts), numbers))


class FrozenReranker(pt.Estimator):
    """A head over frozen vectors."""

    def __init__(self, head: str, vectors: FrozenVectors, seed: int) -> None:
        self.vectors, self.seed, self.kind = vectors, seed, "first" if head == "firstp" else "all"
        torch.manual_seed(seed)
        self.head = build_head(head, HIDDEN, dropout=0.1)
        torch.nn.init.constant_(self.head.final.weight, SCALE * HIDDEN**-0.5)
        torch.nn.init.zeros_(self.head.final.bias)
        self.first_stage_weight = torch.nn.Parameter(torch.tensor(0.5))

    def score(self, encoded: Encoded, first_stage_scores: torch.Tensor) -> torch.Tensor:
        return self.head(encoded) + self.first_stage_weight * first_stage_scores

    def transform(self, inp: pd.DataFrame) -> pd.DataFrame:
        scores = pd.Series(0.0, index=range(len(inp)))
        rows = pd.Series(range(len(inp)))
        self.head.eval()
        for qid, of_query in rows.groupby(inp["qid"].to_numpy(), sort=False):
            candidates = inp.iloc[of_query]
            with torch.inference_mode():
                encoded = self.vectors.pairs(str(qid), candidates["docno"].tolist(), self.kind)
                scores.iloc[of_query] = self.score(encoded, torch.tensor(candidates["score"].tolist())).numpy()
        return pt.model.add_ranks(inp.drop(columns=["score", "rank"]).assign(score=scores.to_numpy()))

    def fit(self, topics_or_res_tr: pd.DataFrame, qrels_tr: pd.DataFrame, *_: Any) -> FrozenReranker:
        torch.manual_seed(self.seed)
        generator = random.Random(self.seed)
        relevant = set(zip(qrels_tr["qid"], qrels_tr["docno"], strict=True))
        groups = []
        for qid, rows in topics_or_res_tr.groupby("qid"):
            docnos = rows["docno"].tolist()
            labels = np.array([(qid, docno) in relevant for docno in docnos])
            if labels.any() and not labels.all():
                encoded = (self.vectors.pairs(str(qid), docnos, self.kind), torch.tensor(rows["score"].tolist()))
                groups.append((*encoded, np.flatnonzero(labels).tolist(), np.flatnonzero(~labels).tolist()))
        optimizer = torch.optim.AdamW(
            [*self.head.parameters(), self.first_stage_weight], lr=LEARNING_RATE, weight_decay=0.0
        )
        self.head.train()
        for _ in range(EPOCHS):
            generator.shuffle(groups)
            for step, (encoded, first_stage_scores, positives, negatives) in enumerate(groups, start=1):
                pair = [generator.choice(positives), generator.choice(negatives)]
                s = self.score(Encoded(encoded.cls[pair], encoded.mask[pair]), first_stage_scores[pair])
                torch.relu(1.0 - s[0] + s[1]).backward()
                if step % ACCUMULATE == 0:
                    optimizer.step()
                    optimizer.zero_grad()
            optimizer.zero_grad()
        return self


def factory(head: str, vectors: FrozenVectors, bm25: pt.Transformer) -> Callable[[int, Any], pt.Transformer]:
    """What Experiment calls for each seed and fold."""
    return lambda seed, fold: fold.fit(bm25 >> FrozenReranker(head, vectors, seed))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--collection", default=str(DEFAULT), help="folder with docs.jsonl, topics.tsv, qrels.txt")
    parser.add_argument("--depth", type=int, default=50, help="documents to rerank")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--folds", type=int, default=5)
    parser.add_argument("--output", default="table-seeds", help="folder for runs and tables")
    args = parser.parse_args()
    start = time.perf_counter()
    dataset = FolderDataset(args.collection)
    topics, qrels = dataset.get_topics(), dataset.get_qrels()
    with tempfile.TemporaryDirectory() as folder:
        retrieved = first_stage(dataset, Path(folder) / "index", args.depth)(topics)
    bm25 = pt.Transformer.from_df(retrieved)
    wanted = set(retrieved["docno"])
    documents = {d["docno"]: d["text"] for d in dataset.get_corpus_iter(verbose=False) if d["docno"] in wanted}
    print(f"encoding {len(documents)} documents ...", flush=True)
    vectors = FrozenVectors(topics, documents)
    print(
        f"{sum(map(len, vectors.windows['all'].values()))} windows after {time.perf_counter() - start:.0f} s",
        flush=True,
    )
    results = Experiment(
        {"BM25": retrieved, **{name: factory(head, vectors, bm25) for name, head in HEADS.items()}},
        topics,
        qrels,
        ["nDCG@10", "AP", "RR"],
        seeds=args.seeds,
        folds=[topics["qid"].iloc[i :: args.folds].tolist() for i in range(args.folds)],
        baseline=["BM25"],
        partner={name: "FirstP" for name in HEADS if name != "FirstP"},
        correction="holm",
        save_dir=args.output,
        save_mode="overwrite",
    )
    print(f"\n{results.to_markdown()}\n")
    print(results.stds.round(4).rename(columns=lambda measure: f"{measure} std over seeds").to_string())
    shown = [
        "name",
        "measure",
        "gain",
        "gain low",
        "gain high",
        "p-value corrected",
        "effect size",
        "equivalence p-value",
    ]
    of_partner = results.comparisons[results.comparisons["kind"] == "partner"]
    print(f"\n{of_partner[shown].round(3).to_string(index=False)}\n\n{time.perf_counter() - start:.0f} s in all")


if __name__ == "__main__":
    main()
