"""Does a run on disk that is killed, or divided, end with the rows of one that was not? And is its memory flat?

    python tests/benchmarks/bench_disk.py [--rows 1000000] [--queries 5000] [--kills 20] [--folder DIR] [--figure FILE]

A TREC run of random rows, those of each query scattered over it, is scored by a stub (digests of ids), so that what is
measured is everything but a model: uninterrupted, killed (`kill -9`) at random moments and started again, by 2 and by
7 shards as processes of their own, and on a disk that is full half-way (a small tmpfs, if this user may mount one).
Prints the memory of the process after its first block and later, seconds, and whether merged runs are the same. Not for
Windows.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
os.environ.setdefault("OMP_NUM_THREADS", "1")

import pandas as pd
import torch  # noqa: F401 - so that the copies of this process need not load it

import pyterrier_longdoc as ld
from tests.support import memory, processes
from tests.support.digests import Digests, candidates, write_trec


class Watched:
    """Computes blocks in this process, and notes its memory in MB at each of them."""

    def __init__(self) -> None:
        self.megabytes = []

    def map(self, function, shared, items):
        for key, item in items:
            yield key, function(shared, item)
            self.megabytes.append(memory.present())


def rerank(source, topics, out, log=None, shard=(0, 1), executor=None):
    return ld.rerank_to_disk(Digests(log=log), source, out, topics=topics, shard=shard, executor=executor)


def digest(out: Path) -> str:
    """Of the merged TREC file."""
    return hashlib.sha256(ld.merge_run(out, out.with_suffix(".res")).read_bytes()).hexdigest()[:8]


def watched(source, topics, out, memory_file) -> None:
    executor = Watched()
    start = time.perf_counter()
    rerank(source, topics, out, executor=executor)
    pd.Series([time.perf_counter() - start, *executor.megabytes]).to_csv(memory_file, index=False)


def full_disk(source, topics, out: Path, megabytes: int) -> str:
    out.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={megabytes}m", "tmpfs", str(out)], check=False).returncode:
        return "no tmpfs may be mounted"
    try:
        try:
            rerank(source, topics, out)
            said = "it was large enough"
        except OSError as error:
            said = str(error.strerror)
        done = len(list(out.glob("blocks/*.parquet")))
        subprocess.run(["mount", "-o", f"remount,size={20 * megabytes}m", str(out)], check=True)
        rerank(source, topics, out)
        return f"{said}: {done} blocks were finished; with more room: {digest(out)}"
    finally:
        subprocess.run(["umount", str(out)], check=True)


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--queries", type=int, default=5_000)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", type=Path, default=None, help="where to work; by default a temporary one")
    parser.add_argument("--figure", type=Path, default=None, help="write a figure of the memory here")
    args = parser.parse_args()
    run, topics = candidates(args.rows, args.queries)
    with tempfile.TemporaryDirectory(dir=args.folder) as name:
        folder = Path(name)
        source = write_trec(run, folder / "run.gz")
        assert (
            processes.wait(
                processes.start(lambda: watched(source, topics, folder / "whole", folder / "m")), timeout=3600
            )
            == 0
        )
        seconds, *megabytes = pd.read_csv(folder / "m").iloc[:, 0].tolist()
        print(f"uninterrupted: {args.rows:,} rows, {len(megabytes)} blocks, {seconds:.0f} s")
        tenth = len(megabytes) // 10
        print(f"memory in MB: {megabytes[0]:.0f} after the first block, {megabytes[tenth]:.0f} after a tenth, "
              f"{megabytes[-1]:.0f} after the last, {max(megabytes):.0f} at most")  # fmt: skip
        if args.figure is not None:
            draw(megabytes, args.figure)
        more = memory.growth(lambda: ld.merge_run(folder / "whole", folder / "merged.res.gz"))
        print(f"merging to a file: {more:.0f} MB more at most")
        expected = digest(folder / "whole")
        report("whole", folder / "whole", expected)

        rng, log = random.Random(args.seed), folder / "log"
        for _ in range(args.kills):
            child = processes.start(lambda: rerank(source, topics, folder / "killed", log))
            time.sleep(rng.uniform(0, seconds / 5))
            processes.kill(child)
            processes.wait(child)
        finished = len(list((folder / "killed").glob("blocks/*.parquet")))
        rerank(source, topics, folder / "killed", log)
        calls = len(Digests(log=log).calls())
        print(f"killed {args.kills} times, {finished} blocks finished then; {calls} calls for {len(megabytes)} blocks")
        report("killed", folder / "killed", expected)

        for n in (2, 7):
            out, start = folder / f"of {n}", time.perf_counter()
            shards = [
                processes.start(lambda i=i, n=n, out=out: rerank(source, topics, out, shard=(i, n))) for i in range(n)
            ]
            assert [processes.wait(shard, timeout=3600) for shard in shards] == [0] * n
            print(f"{n} processes at once: {time.perf_counter() - start:.0f} s")
            report(f"{n} shards", out, expected)
        size = sum(path.stat().st_size for path in (folder / "whole").rglob("*") if path.is_file()) // 2**20
        print(f"full disk: {full_disk(source, topics, folder / 'small', max(1, size // 2))} ({expected})")


def report(name: str, out: Path, expected: str) -> None:
    found = digest(out)
    print(f"{name:>10}: merged file {found} {'same' if found == expected else 'DIFFERENT'}")


def draw(megabytes: list[float], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(6, 3), layout="constrained")
    axes.plot(range(1, len(megabytes) + 1), megabytes)
    axes.set(xlabel="finished blocks", ylabel="memory of the process in MB", ylim=(0, None))
    figure.savefig(path)


if __name__ == "__main__":
    main()
