"""Trains PARADE's attention on the windows' vectors of the packaged MaxP, and packages both.

    python tests/benchmarks/train_heads.py windows COLLECTIONS FOLDER FOLDER/round2
    python tests/benchmarks/train_heads.py heads FOLDER FOLDER/round2
    python tests/benchmarks/train_heads.py package FOLDER FOLDER/round2

1. `windows`: for questions of the training splits the document that answers, the same without the passage that does,
   and others of BM25's best; of each the vectors of BM25's best windows, three or eight, by the encoder of the MaxP.
2. `heads`: the encoder stays as it is, and only what stands above it learns, by cross entropy over a question's
   documents. PARADE's attention begins as a soft maximum of MaxP's scores.
3. `package`: the MaxP's folder holds the encoder, to which that of the PARADE refers.

`windows` goes on where it was interrupted. Needs the extras `demo` and `train`.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pandas as pd
import pyterrier as pt
import torch
from evaluate_questions import WINDOWS
from torch.nn import functional
from train_questions import COLLECTIONS, Collection, Passage, bm25, docstring_passages, write_packaged

import pyterrier_longdoc as ld
from pyterrier_longdoc.common.arguments import arguments_of
from pyterrier_longdoc.common.files import replacing
from pyterrier_longdoc.common.packaged import ENCODER
from pyterrier_longdoc.modelling.inputs import Encoded

DOCUMENTS, DEPTH = 6, 15
"""Documents of a question, the answering one first; the others are of so many of BM25's best."""
QUESTIONS = 500
"""Of each collection."""
DOCUMENT = {**WINDOWS, "max_doc_len": None, "text_field": "text", "repeat": None}
"""How documents are read by a model that was trained on passages with titles."""
BEST = (3, 3, 8)
"""Windows of a document that are read, by turns."""
HEAD, RATE = "parade-attn", 1e-3
"""The head that learns, and the rate."""
EPOCHS, STEP = 4, 32
HELD = 10
"""One question of so many is not trained on: its loss tells when a head has learnt enough."""


# What is learnt from.


def questions_of(collections: Path, name: str) -> pd.DataFrame:
    """Return `qid, query, text, label`: `DOCUMENTS` rows for each question, the answering document first."""
    without: dict[str, str] = {}
    if name == "docstrings":
        texts = {passage.docno: passage.text for passage in docstring_passages()[0]}
        long = pt.get_dataset("longdoc:docstrings").get_topics("train-long")  # others have one window or two
        queries = dict(zip(long["qid"], long["query"], strict=True))
        gold = {qid: qid.removeprefix("q-") for qid in queries}
    else:
        collection = Collection(collections / name)
        passages = collection.passages("train")
        texts = {p.docno: str(collection.documents[p.docno]["text"]) for p in passages}
        found = {q.qid: q for q in collection.questions("train", passages)}
        queries = {qid: question.query for qid, question in found.items()}
        gold = {qid: passages[question.gold[0]].docno for qid, question in found.items()}
        for qid, docno in gold.items():
            answers = [passages[i] for i in found[qid].gold if passages[i].docno == docno]
            without[qid] = without_answers(texts[docno], answers)
    topics = pd.DataFrame(queries.items(), columns=["qid", "query"])
    topics = topics.sample(min(QUESTIONS, len(topics)), random_state=0, ignore_index=True)
    docnos = list(texts)
    runs, rows = bm25(list(texts.values()), topics, DEPTH), []
    for qid, query in zip(topics["qid"], topics["query"], strict=True):
        others = [texts[docnos[i]] for i in runs.get(qid, []) if docnos[i] != gold[qid]]
        if without.get(qid):
            others = [without[qid], *Random(qid).sample(others, min(len(others), DOCUMENTS - 2))]
        elif len(others) >= DOCUMENTS:
            others = Random(qid).sample(others, DOCUMENTS - 1)
        if len(others) == DOCUMENTS - 1:
            rows += [(f"{name}:{qid}", query, text, i == 0) for i, text in enumerate([texts[gold[qid]], *others])]
    return pd.DataFrame(rows, columns=["qid", "query", "text", "label"])


def without_answers(text: str, answers: Sequence[Passage]) -> str:
    """Return a document without the passages that answer; nothing if these are half of it."""
    rest = text
    for passage in sorted(answers, key=lambda answer: -answer.start):
        rest = rest[: passage.start] + rest[passage.start + len(passage.text) :]
    return rest if len(rest) > len(text) // 2 else ""


def windows(collections: Path, folder: Path, name: str) -> None:
    """Write the vectors of all collections' windows, a file for each: `(questions, DOCUMENTS, windows, H)`, fp16."""
    target = folder / "windows"
    target.mkdir(exist_ok=True)
    for collection in (*(c for c in COLLECTIONS if c != "nq"), "docstrings"):
        file = target / f"{collection}.npz"
        if file.is_file():
            continue
        begin, frame = time.perf_counter(), questions_of(collections, collection)
        qids = frame["qid"].drop_duplicates().tolist()
        vectors = np.zeros((len(qids), DOCUMENTS, max(BEST), 384), np.float16)
        mask = np.zeros(vectors.shape[:3], bool)
        for turn in range(len(BEST)):
            model = ld.MaxP.load(name, preselect=ld.BM25Windows(BEST[turn]), dtype="bfloat16", **DOCUMENT).model
            numbers = range(turn, len(qids), len(BEST))
            own = frame[frame["qid"].isin({qids[i] for i in numbers})]
            place = [(i, document) for i in numbers for document in range(DOCUMENTS)]
            with torch.inference_mode(), model.inference():
                for rows_of_pairs, pairs in model.walk(own["query"].tolist(), own["text"].tolist()):
                    encoded, _ = model.compute(pairs)
                    for rows, found, there in zip(rows_of_pairs, encoded.cls, encoded.mask, strict=True):
                        for row in rows:
                            number = int(there.sum())
                            vectors[place[row]][:number] = found[there].float().numpy()
                            mask[place[row]][:number] = True
        with replacing(file) as whole, whole.open("wb") as out:
            np.savez(out, vectors=vectors, mask=mask)
        took = time.perf_counter() - begin
        print(f"{collection}: {len(qids)} questions, {mask.sum()} windows, {took:.0f} s", flush=True)


# Heads.


def loss_of(head: Any, vectors: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Return the mean cross entropy of questions, whose first document answers."""
    count = len(vectors)
    encoded = Encoded(vectors.flatten(0, 1).float(), mask.flatten(0, 1))
    scores = head(encoded).view(count, DOCUMENTS)
    return functional.cross_entropy(scores, torch.zeros(count, dtype=torch.long))


def train(start: Any, vectors: torch.Tensor, mask: torch.Tensor) -> Any:
    """Return a PARADE whose head has learnt from windows' vectors."""
    torch.manual_seed(1)
    model = ld.PARADE(ENCODER, aggregation="attn", **WINDOWS).start_from(start)
    head, final = model.model.head, start.model.head.final
    with torch.no_grad():
        head.final.weight.copy_(final.weight)
        head.final.bias.copy_(final.bias)
        head.attention.copy_(final.weight[0])
    held = torch.arange(len(vectors)) % HELD == 0
    learnt = torch.nonzero(~held)[:, 0]
    steps = EPOCHS * (len(learnt) // STEP)
    optimizer = torch.optim.AdamW(head.parameters(), lr=RATE, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, 20 * step / steps, 1 - step / steps))
    for epoch in range(EPOCHS + 1):
        head.eval()
        with torch.inference_mode():
            print(f"epoch {epoch}: loss of held questions {loss_of(head, vectors[held], mask[held]):.4f}", flush=True)
        if epoch == EPOCHS:
            break
        head.train()
        for batch in learnt[torch.randperm(len(learnt))].split(STEP):
            if len(batch) == STEP:
                loss = loss_of(head, vectors[batch], mask[batch])
                loss.backward()
                torch.nn.utils.clip_grad_norm_(head.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
                schedule.step()
    model.model.mark_trained({"trained by": "tests/benchmarks/train_heads.py", "epochs": EPOCHS, "rate": RATE})
    return model


def heads(folder: Path, name: str) -> None:
    """Train the head, and save the model whole."""
    files = [np.load(file) for file in sorted((folder / "windows").glob("*.npz"))]
    vectors, mask = (torch.from_numpy(np.concatenate([file[key] for file in files])) for key in ("vectors", "mask"))
    order = torch.from_numpy(np.random.default_rng(0).permutation(len(vectors)))
    start = ld.MaxP.load(name)
    train(start, vectors[order], mask[order]).save(folder / HEAD)


# The packaged models.


def package(folder: Path, name: str) -> None:
    """Write the MaxP and the PARADE into the package."""
    trained, maxp, parade = ld.MaxP.load(name), ld.MaxP(ENCODER, **WINDOWS), ld.PARADE.load(folder / HEAD)
    maxp.start_from(trained)
    maxp.model.recipe, maxp.model.history = trained.model.recipe, trained.model.history
    maxp.model.trained_on = parade.model.trained_on = trained.model.trained_on
    write_packaged(maxp, "maxp", ld.MaxP(ENCODER).model)
    # The very weights of MaxP's encoder, so that nothing of it is stored again.
    parade.model.encoder.load_state_dict(ld.MaxP.load("longdoc:maxp").model.encoder.state_dict())
    write_packaged(parade, HEAD, ld.PARADE(**arguments_of(parade)).model, encoder_of="longdoc:maxp")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    commands = parser.add_subparsers(dest="command", required=True)
    first = commands.add_parser("windows")
    first.add_argument("collections", type=Path)
    for each in (first, commands.add_parser("heads"), commands.add_parser("package")):
        each.add_argument("folder", type=Path)
        each.add_argument("model", help="the MaxP that has the encoder")
    args = parser.parse_args()
    if args.command == "windows":
        windows(args.collections, args.folder, args.model)
    else:
        {"heads": heads, "package": package}[args.command](args.folder, args.model)
    sys.stdout.flush()


if __name__ == "__main__":
    main()
