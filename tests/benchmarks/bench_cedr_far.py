"""Do the token-level heads find relevant passages that stand far back in a document? MRR on a FarRelevant-style task.

    python tests/benchmarks/bench_cedr_far.py [--layers 3] [--epochs 6] [--queries 93] [--models FirstP CEDR-knrm ...]

As Boytsov et al. 2025 (C.2) build FarRelevant, from the abstracts of Vaswani: a relevant document is filler of at
least one window, then one relevant abstract among further filler; all other documents are filler alone. The encoder is
the first layers of all-MiniLM-L6-v2, which is no cross-encoder, and each model is trained on three quarters of the
queries by the recipe of `fit`. FirstP reads the first window, where nothing relevant stands; NeuralModel1 starts from
words in common (`self_translation=0.5`), its "free" twin does not.
"""

from __future__ import annotations

import argparse
import random
import tempfile
import time
import warnings
from pathlib import Path

import numpy as np
import pandas as pd
import pyterrier as pt
from transformers import AutoModel, AutoTokenizer
from transformers.utils import logging as transformers_logging

import pyterrier_longdoc as ld
from pyterrier_longdoc.common.packaged import ENCODER, encoder_folder
from pyterrier_longdoc.training import TrainingArgs, evaluate

VASWANI = Path(__file__).resolve().parents[3] / "shared" / "data" / "vaswani"
WINDOW = 64
CANDIDATES = 10
DOCUMENTS_PER_QUERY = 3

MODELS = {
    "FirstP": (ld.FirstP, {}),
    "AvgP": (ld.AvgP, {}),
    "CEDR-knrm": (ld.CEDR, {"aggregation": "knrm"}),
    "CEDR-pacrr": (ld.CEDR, {"aggregation": "pacrr"}),
    "CEDR-drmm": (ld.CEDR, {"aggregation": "drmm"}),
    "NeuralModel1": (ld.NeuralModel1, {"self_translation": 0.5}),
    "NeuralModel1 free": (ld.NeuralModel1, {}),
}


def collection(folder: Path, count: int) -> tuple[pd.DataFrame, pd.DataFrame, list[str]]:
    """Candidates, qrels and qids: of each query some relevant documents, the others without anything relevant."""
    dataset = pt.get_dataset(f"longdoc:folder:{folder}")
    texts = {document["docno"]: document["text"] for document in dataset.get_corpus_iter(verbose=False)}
    judged = dataset.get_qrels().query("label > 0").groupby("qid")["docno"].agg(list)
    rng = random.Random(0)
    names, rows, qrels = list(texts), [], []
    topics = dataset.get_topics().head(count)
    for qid, query in zip(topics["qid"], topics["query"], strict=True):
        relevant = set(judged[qid])
        filler = [name for name in rng.sample(names, 400) if name not in relevant]
        for i in range(CANDIDATES):
            before: list[str] = []
            while len(" ".join(before).split()) < WINDOW:  # a word is at least one token
                before.append(texts[filler.pop()])
            after = [texts[filler.pop()] for _ in range(2)]
            if i < DOCUMENTS_PER_QUERY:
                after.insert(rng.randrange(3), texts[rng.choice(judged[qid])])
                qrels.append((qid, f"{qid}-{i}", 1))
            else:
                after.append(texts[filler.pop()])
            rows.append((qid, query, f"{qid}-{i}", " ".join(before + after), 0.0))
    run = pd.DataFrame(rows, columns=["qid", "query", "docno", "text", "score"])
    return run, pd.DataFrame(qrels, columns=["qid", "docno", "label"]), topics["qid"].tolist()


def checkpoint(folder: str, layers: int) -> str:
    """The first layers of MiniLM."""
    model = AutoModel.from_pretrained(encoder_folder(ENCODER), num_hidden_layers=layers)
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(encoder_folder(ENCODER)).save_pretrained(folder)
    return folder


def one_relevant(run: pd.DataFrame) -> pd.DataFrame:
    """Test candidates: the first relevant document of each query and all others."""
    number = run["docno"].str.split("-").str[1].astype(int)
    return run[(number == 0) | (number >= DOCUMENTS_PER_QUERY)]


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=3)
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--queries", type=int, default=93)
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=list(MODELS))
    parser.add_argument("--collection", type=Path, default=VASWANI, help="folder of the Vaswani collection")
    args = parser.parse_args()
    if not args.collection.is_dir():
        print(f"the Vaswani collection is not in {args.collection}")
        return
    warnings.simplefilter("ignore")
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    run, qrels, qids = collection(args.collection, args.queries)
    train = run[run["qid"].isin(qids[: 3 * len(qids) // 4])]
    test = one_relevant(run[~run["qid"].isin(train["qid"])])
    judged = qrels[qrels["qid"].isin(test["qid"])]
    size = CANDIDATES - DOCUMENTS_PER_QUERY + 1
    chance = np.mean([1 / rank for rank in range(1, size + 1)])
    print(f"{train['qid'].nunique()} queries to train on, {test['qid'].nunique()} to test, {size} candidates each")
    print(f"{'model':18}{'MRR':>7}{'first loss':>12}{'last loss':>11}{'seconds':>9}")
    print(f"{'chance':18}{chance:7.3f}", flush=True)
    recipe = TrainingArgs(epochs=args.epochs, queries_per_step=4, learning_rates={"encoder.": 3e-5, "": 1e-3})
    with tempfile.TemporaryDirectory() as folder:
        backbone = checkpoint(folder, args.layers)
        for name in args.models:
            cls, arguments = MODELS[name]
            start = time.perf_counter()
            model = cls(backbone, window_size=WINDOW, max_query_len=24, training=recipe, **arguments)
            losses = model.fit(train, qrels).history["loss"].tolist()
            score = evaluate(model(test), judged, "RR")
            seconds = time.perf_counter() - start
            print(f"{name:18}{score:7.3f}{losses[0]:12.3f}{losses[-1]:11.3f}{seconds:9.0f}", flush=True)


if __name__ == "__main__":
    main()
