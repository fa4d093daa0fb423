"""Whether a change of the code cost time: two checkouts of this repository take turns with the same work.

    git worktree add ../before COMMIT
    python tests/benchmarks/compare_checkouts.py ../before . --collection PATH/time [--rounds 7] [--threads 1]

A process for each checkout loads its models; then the two work in turn, `before, after, after, before` and so on: MaxP
and PARADE score 20 documents of the collection, and PARADE takes two training steps (four with `--steps 4`), with the
packaged MiniLM in fp32. Every round puts another word at the end of the texts, so that nothing is remembered. Printed
are the medians of the seconds and of the processor's seconds, which other jobs on the machine disturb less, the ratios
of the medians (above 1 the second checkout is faster) and each process's peak of memory. A round takes about 50 s on
one core; `--only training` takes one kind of work. Needs the extra `demo`.
"""

from __future__ import annotations

import argparse
import os
import resource
import statistics
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path

WORK = ("MaxP", "PARADE", "training")


def work(collection: Path, threads: int, steps: int) -> dict[str, Callable[[int], None]]:
    """What is timed, by name; each takes the number of the round. Uses no argument that was ever renamed."""
    import pandas as pd
    import torch

    import pyterrier_longdoc as ld

    torch.set_num_threads(threads)
    docs = pd.read_json(collection / "docs.jsonl", lines=True, dtype=str).iloc[::21].head(20)
    query = (collection / "topics.tsv").read_text(encoding="utf-8").split("\n", 1)[0].split("\t")[1]
    frame = docs.assign(qid="1", query=query, rank=range(len(docs)), score=[-float(i) for i in range(len(docs))])
    qrels = pd.DataFrame({"qid": "1", "docno": frame["docno"].iloc[:3], "label": 1})
    recipe = ld.TrainingArgs(epochs=steps, max_steps=steps, queries_per_step=1)
    encoder, precise = "longdoc:minilm-l6", {"dtype": "float32", "device": "cpu"}
    maxp, parade = ld.MaxP(encoder, **precise), ld.PARADE(encoder, **precise)
    learner = ld.PARADE(encoder, **precise, max_doc_len=477, training=recipe)

    def texts(round_: int) -> pd.DataFrame:
        return frame.assign(text=frame["text"] + f" {round_}")

    return {
        "MaxP": lambda round_: maxp.transform(texts(round_)),
        "PARADE": lambda round_: parade.transform(texts(round_)),
        "training": lambda round_: learner.fit(texts(round_), qrels),
    }


def serve(collection: Path, threads: int, steps: int) -> None:
    """Does what it is asked for, a line each, and answers with the seconds it took."""
    warnings.simplefilter("ignore")
    timed = work(collection, threads, steps)
    for line in sys.stdin:
        name, round_ = line.split()
        start, processor = time.perf_counter(), time.process_time()
        timed[name](int(round_))
        megabytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        print(time.perf_counter() - start, time.process_time() - processor, megabytes, flush=True)


def worker(checkout: Path, args: argparse.Namespace) -> subprocess.Popen[str]:
    """A process that works with the package of a checkout."""
    command = [sys.executable, __file__, "--serve", "--collection", str(args.collection.resolve())]
    command += ["--threads", str(args.threads), "--steps", str(args.steps)]
    environment = {**os.environ, "PYTHONPATH": str(checkout.resolve()), "OMP_NUM_THREADS": str(args.threads)}
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
    return subprocess.Popen(command, text=True, cwd=checkout, env=environment, **pipes)


def ask(process: subprocess.Popen[str], name: str, round_: int) -> tuple[float, float, float]:
    """The seconds that a worker takes for a round, its processor's, and its peak of memory so far in MB."""
    process.stdin.write(f"{name} {round_}\n")
    process.stdin.flush()
    answer = process.stdout.readline()
    if not answer:
        raise RuntimeError(f"the process of {process.args[0]} ended while it was at {name}")
    seconds, processor, memory = map(float, answer.split())
    return seconds, processor, memory


def measure(args: argparse.Namespace) -> dict[str, tuple[list, list]]:
    """Seconds, processor's seconds and memory of every round of each kind of work, before and after."""
    workers = [worker(checkout, args) for checkout in args.checkouts]
    took: dict[str, tuple[list, list]] = {name: ([], []) for name in args.only}
    try:
        for round_ in range(args.rounds + 1):
            for name in args.only:
                for which in (0, 1) if round_ % 2 else (1, 0):
                    seconds = ask(workers[which], name, round_)
                    if round_:  # the first round loads the models
                        took[name][which].append(seconds)
    finally:
        for process in workers:
            process.kill()
            process.wait()
    return took


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkouts", nargs="*", type=Path, help="the one before and the one after")
    parser.add_argument("--collection", type=Path, required=True)
    for option, default in {"rounds": 7, "threads": 1, "steps": 2}.items():
        parser.add_argument(f"--{option}", type=int, default=default)
    parser.add_argument("--only", nargs="+", choices=WORK, default=list(WORK))
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve:
        serve(args.collection, args.threads, args.steps)
        return
    if len(args.checkouts) != 2:
        parser.error("give two checkouts, the one before and the one after")
    took = measure(args)
    print(f"medians of {args.rounds} rounds, {args.threads} thread(s)")
    print(f"{'':10}{'before s':>10}{'after s':>10}{'ratio':>8}{'processor':>12}{'after':>8}{'ratio':>8}")
    for name, (before, after) in took.items():
        line = f"{name:10}"
        for kind, width in ((0, 10), (1, 12)):
            one, other = (statistics.median(each[kind] for each in rounds) for rounds in (before, after))
            line += f"{one:{width}.2f}{other:{10 - 2 * kind}.2f}{one / other:8.3f}"
        print(line)
    before, after = (max(each[2] for both in took.values() for each in both[which]) for which in (0, 1))
    print(f"peak of memory {before:,.0f} MB before, {after:,.0f} MB after")


if __name__ == "__main__":
    main()
