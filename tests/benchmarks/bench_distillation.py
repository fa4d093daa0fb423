"""A small student that learns from a trained teacher (PARADE's Eq. 8), beside the same student without it.

    python tests/benchmarks/bench_distillation.py [--layers 3] [--queries 1500] [--epochs 2] [--topics 300]

The teacher is a packaged cross-encoder over the first 96 tokens of a docstring. The student has some of its layers and
a new last layer. Both students see the same documents in the same order, from the train split of the docstrings: for
each query the right docstring and three of BM25's top 50. One learns from labels alone (`"pointwise_bce"`), the other
also from the teacher's scores (`"distillation"`). Reranks BM25's top 20 for topics of the test split; prints reciprocal
rank and nDCG@10 with p-values (paired t-test, Holm) against the student without teacher. Needs the extra `demo`.
"""

from __future__ import annotations

import argparse
import copy
import tempfile
from pathlib import Path
from typing import Any

TOKENS = {"max_query_len": 24, "max_doc_len": 96, "window_size": 96}


def student_backbone(teacher: Any, layers: int, folder: Path) -> str:
    """The folder of an encoder with the teacher's embeddings and evenly spaced layers."""
    scorer = teacher.model
    encoder = copy.deepcopy(scorer.encoder.backbone)
    last = len(encoder.encoder.layer) - 1
    encoder.encoder.layer = type(encoder.encoder.layer)(
        encoder.encoder.layer[round(i * last / (layers - 1))] for i in range(layers)
    )
    encoder.config.num_hidden_layers = layers
    encoder.save_pretrained(folder)
    scorer.tokenizer.save_pretrained(folder)
    return str(folder)


def training_data(bm25: Any, dataset: Any, queries: int) -> tuple[Any, Any]:
    """For some queries the right docstring and three others of BM25's top 50."""
    qrels = dataset.get_qrels("train")
    found = bm25(dataset.get_topics("train").sample(frac=1.0, random_state=0).head(2 * queries))
    found = found.merge(qrels[["qid", "docno", "label"]], on=["qid", "docno"], how="left")
    right = found[found["label"] > 0].drop_duplicates("qid").head(queries)
    wrong = found[(found["label"].isna()) & found["qid"].isin(right["qid"])]
    wrong = wrong.groupby("qid").sample(3, random_state=0, replace=False)
    rows = right.index.union(wrong.index)
    return found.loc[rows].drop(columns="label").reset_index(drop=True), qrels


def students(backbone: str, teacher: Any, found: Any, qrels: Any, args: argparse.Namespace) -> dict[str, Any]:
    """Both students, trained."""
    import pyterrier_longdoc as ld
    from pyterrier_longdoc.training import TeacherScores

    scored = TeacherScores(teacher)(found)
    # Teachers that were trained on comparisons have no zero; the labels' cross entropy needs one.
    scored["teacher_score"] -= scored["teacher_score"].median()
    trained = {}
    for name, loss in (("student, labels alone", "pointwise_bce"), ("student, with teacher", "distillation")):
        recipe = ld.TrainingArgs(
            loss=loss,
            alpha=args.alpha,
            reduction="mean",
            sampling="listwise",
            negatives=3,
            epochs=args.epochs,
            queries_per_step=16,
            queries_per_forward=8,
            learning_rates={"encoder.": args.rate, "": 1e-3},
            schedule="linear",
            warmup=0.1,
            max_grad_norm=1.0,
            dropout=0.0,
        )
        trained[name] = ld.FirstP(backbone, training=recipe, verbose=args.verbose, **TOKENS).fit(scored, qrels)
        print(f"{name}\n{trained[name].history.to_string(index=False)}", flush=True)
    return trained


def main() -> None:
    """Trains both students and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--teacher", default="longdoc:maxp", help="packaged model or folder")
    parser.add_argument("--layers", type=int, default=3)
    parser.add_argument("--queries", type=int, default=1500, help="of the train split")
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--rate", type=float, default=1e-4, help="learning rate of the student's layers")
    parser.add_argument("--alpha", type=float, default=0.75, help="weight of the labels beside the teacher")
    parser.add_argument("--topics", type=int, default=300, help="of the test split")
    parser.add_argument("--threads", type=int, help="of torch")
    parser.add_argument("--verbose", action="store_true")
    args = parser.parse_args()
    import pyterrier as pt
    import torch
    from ir_measures import RR, nDCG

    import pyterrier_longdoc as ld
    from pyterrier_longdoc.demo import first_stage

    if args.threads:
        torch.set_num_threads(args.threads)
    dataset = pt.get_dataset("longdoc:docstrings")
    teacher = ld.CrossEncoder.load(args.teacher, max_doc_len=TOKENS["max_doc_len"])
    with tempfile.TemporaryDirectory() as scratch:
        bm25 = first_stage(dataset, Path(scratch) / "index", 50) >> dataset.text_loader()
        backbone = student_backbone(teacher, args.layers, Path(scratch) / "student")
        systems = students(backbone, teacher, *training_data(bm25, dataset, args.queries), args)
        topics = dataset.get_topics("test").sample(args.topics, random_state=0)
        candidates = bm25(topics)
        candidates = candidates[candidates["rank"] < 20]
        table = pt.Experiment(
            {"BM25": pt.Transformer.identity(), **systems, "teacher": teacher},
            candidates,
            dataset.get_qrels("test"),
            [RR, nDCG @ 10],
            baseline=1,
            correction="holm",
            filter_by_qrels=True,
        )
    shown = [column for column in table.columns if not column.endswith((" +", " -", "reject", "p-value"))]
    print(table[shown].to_string(index=False))


if __name__ == "__main__":
    main()
