"""How close scoring comes to what the machine can do, and what it costs besides the encoder.

    python tests/benchmarks/bench_engine.py [--tables peak overhead memory linear huge] [--threads 2] [--dtype bfloat16]
    python tests/benchmarks/bench_engine.py --tables overhead --collection PATH/time --depth 100

peak: GFLOP/s of one large matrix product, and the share of it that the encoder reaches, by window length. Counted are
the multiplications and additions of real tokens: two for each weight of a linear layer, and four for each pair of
tokens and feature in attention. The encoder is measured as it is used, in passes of the default size.
overhead: the share of a transform's time that is not spent in the backbone, in a first transform and in a second,
whose texts' tokens are remembered. MaxP over the first `--depth` documents of the collection for each topic, or over
made-up texts.
memory: how much the process grows at most while it scores 1,000 to 100,000 rows, a hundred documents for each query,
with a tiny random backbone; each size in a process of its own. Linux only.
linear: seconds against the number of windows, the best line through them, and how far each point is from it.
huge: 200 documents of 300 words on average with and without one of `--huge-words` words among them, and that one
alone: seconds, growth of the process, each in a process of its own, and by how much the scores of the 200 differ at
most from those that they have without it. Tiny random backbone. Linux only.

Tables but memory and huge need the extra `demo`, whose encoder is used unless `--backbone` names another. Precision is
what the device is best at unless `--dtype` says otherwise. Times are the least over `--rounds`, those of
memory and huge of one round.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import pyterrier_longdoc as ld
from pyterrier_longdoc.modelling.backbones.load import load_backbone
from pyterrier_longdoc.modelling.devices import resolve_device, resolve_dtype
from pyterrier_longdoc.modelling.encoder import CPU_BATCH_TOKENS, GPU_BATCH_TOKENS, WindowEncoder
from pyterrier_longdoc.modelling.inputs import Settings
from tests.support import tiny
from tests.support.memory import growth

GIGA = 1e9


def least_seconds(run: Callable[[], Any], rounds: int, device: torch.device) -> float:
    """The least time that `run` takes; one more round, which comes first, sets things up."""
    seconds = []
    for _ in range(rounds + 1):
        start = time.perf_counter()
        run()
        if device.type == "cuda":
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
    return min(seconds[1:])


def gemm_peak(dtype: torch.dtype, device: torch.device, size: int, rounds: int) -> float:
    """GFLOP/s of a product of square matrices, as linear layers compute it."""
    matrix = torch.randn(size, size, device=device).to(dtype)
    product = torch.nn.functional.linear
    return 2 * size**3 / least_seconds(lambda: product(matrix, matrix), rounds, device) / GIGA


def flops_of_window(model: torch.nn.Module, tokens: int) -> float:
    """Multiplications and additions of the linear layers and of attention for one window."""
    weights = sum(module.weight.numel() for module in model.modules() if isinstance(module, torch.nn.Linear))
    config = model.config
    return tokens * (2.0 * weights + 4.0 * tokens * config.hidden_size * config.num_hidden_layers)


@torch.inference_mode()
def table_of_peak(args: argparse.Namespace, device: torch.device) -> None:
    """The GEMM peak and the encoder's share of it."""
    backbone = load_backbone(args.backbone)
    encoder = WindowEncoder(backbone).eval().to(device)
    encoder.use(Settings(ld.WholeText(), device=device))
    tokens = CPU_BATCH_TOKENS if device.type == "cpu" else GPU_BATCH_TOKENS
    form, vocabulary = encoder.format, backbone.model.config.vocab_size
    rng, empty = np.random.default_rng(0), np.zeros(0, dtype=np.int32)
    chosen = resolve_dtype(args.dtype, device)
    print(f"{'dtype':10}{'tokens':>7}{'windows/s':>11}{'GFLOP/s':>9}{'peak':>8}{'share':>7}")
    for dtype in dict.fromkeys((torch.float32, chosen)):
        peak = gemm_peak(dtype, device, args.size, args.rounds)
        for length in args.lengths:
            size = length - form.specials
            windows = list(rng.integers(1000, vocabulary, (args.passes * tokens // length, size), np.int32))
            with torch.autocast(device.type, dtype=dtype, enabled=dtype != torch.float32):
                seconds = least_seconds(
                    lambda windows=windows: encoder.vectors([empty], [0] * len(windows), windows, form),
                    args.rounds,
                    device,
                )
            reached = len(windows) * flops_of_window(backbone.model, length) / seconds / GIGA
            print(
                f"{str(dtype).removeprefix('torch.'):10}{length:7}{len(windows) / seconds:11.1f}{reached:9.1f}"
                f"{peak:8.0f}{reached / peak:7.1%}",
                flush=True,
            )


def candidates(args: argparse.Namespace) -> pd.DataFrame:
    """Topics of the collection, or made-up ones, each with the same `--depth` documents."""
    if args.collection is None:
        rng = np.random.default_rng(0)
        texts = [" ".join(rng.choice(tiny.WORDS, rng.integers(50, 1500))) for _ in range(args.depth)]
        queries = [" ".join(rng.choice(tiny.WORDS, 5)) for _ in range(args.topics)]
    else:
        import pyterrier as pt

        dataset = pt.get_dataset(f"longdoc:folder:{args.collection}")
        texts = [document["text"] for document, _ in zip(dataset.get_corpus_iter(verbose=False), range(args.depth))]  # noqa: B905
        queries = dataset.get_topics()["query"].head(args.topics).tolist()
    return frame_of(queries, texts)


def frame_of(queries: list[str], texts: list[str]) -> pd.DataFrame:
    """Every text for every query; rows share the texts."""
    numbers = range(len(texts))
    return pd.DataFrame(
        {
            "qid": np.repeat([str(i) for i in range(len(queries))], len(texts)),
            "query": np.repeat(np.array(queries, dtype=object), len(texts)),
            "docno": [f"d{i}" for i in numbers] * len(queries),
            "text": pd.Series(texts * len(queries), dtype=object),
        }
    )


def table_of_overhead(args: argparse.Namespace, device: torch.device) -> None:
    """Time in and outside the backbone."""
    frame = candidates(args)
    model = ld.MaxP(args.backbone, dtype=args.dtype, device=str(device))
    encoder = model.model.encoder
    model(frame.head(2).assign(text="a short text"))
    inside = 0.0
    encode = encoder._encode

    def timed(*arguments: Any) -> Any:
        nonlocal inside
        start = time.perf_counter()
        result = encode(*arguments)
        if device.type == "cuda":
            torch.cuda.synchronize()
        inside += time.perf_counter() - start
        return result

    encoder._encode = timed
    print(f"{'transform':10}{'rows':>7}{'windows/s':>11}{'seconds':>9}{'outside':>9}{'share':>7}{'padding':>9}  dtype")
    for name in ("first", "again"):
        inside, start = 0.0, time.perf_counter()
        model(frame)
        total = time.perf_counter() - start
        windows = model.coverage.windows * frame["qid"].nunique()
        print(
            f"{name:10}{len(frame):7}{windows / total:11.1f}{total:9.2f}{total - inside:9.3f}{1 - inside / total:7.1%}"
            f"{model.coverage.padding:9.1%}  {model.coverage.dtype}",
            flush=True,
        )


def grown_by(rows: int) -> tuple[float, float, float]:
    """MB of the frame (without shared texts), MB by which the process grows at most while scoring, and seconds."""
    rng = np.random.default_rng(0)
    texts = [" ".join(rng.choice(tiny.WORDS, 70)) for _ in range(min(rows, 1000))]
    pools = [texts[start : start + 100] for start in range(0, len(texts), 100)]
    frame = pd.concat([frame_of([f"cat {i}"], pools[i % len(pools)]) for i in range(rows // 100)], ignore_index=True)
    frame["qid"] = np.repeat([str(i) for i in range(rows // 100)], 100)
    with tempfile.TemporaryDirectory() as folder:
        backbone = tiny.checkpoint(Path(folder), num_hidden_layers=1)
        model = ld.MaxP(backbone, window_size=50, stride=50, dtype="float32", device="cpu")
        model(frame.head(100))
        return frame.memory_usage(deep=False).sum() / 1e6, *grown(lambda: model(frame))


def grown(run: Callable[[], Any]) -> tuple[float, float]:
    """MB by which this process grows at most while `run` runs, and seconds."""
    start = time.perf_counter()
    return growth(run), time.perf_counter() - start


def table_of_memory(args: argparse.Namespace, device: torch.device) -> None:
    """Peak memory against rows, each in a new process."""
    print(f"{'rows':>8}{'frame MB':>10}{'grown MB':>10}{'seconds':>9}")
    for rows in args.rows:
        command = [sys.executable, __file__, "--grown-by", str(rows), "--threads", str(args.threads)]
        done = subprocess.run(command, check=True, capture_output=True, text=True, env=os.environ.copy())
        frame, grown, seconds = map(float, done.stdout.split())
        print(f"{rows:8}{frame:10.1f}{grown:10.1f}{seconds:9.1f}", flush=True)


def table_of_windows(args: argparse.Namespace, device: torch.device) -> None:
    """Time against windows, and the best line."""
    rng = np.random.default_rng(0)
    model = ld.MaxP(args.backbone, window_size=100, stride=100, dtype=args.dtype, device=str(device))
    seconds = []
    for count in args.windows:
        texts = [" ".join(rng.choice(tiny.WORDS, 100 * min(8, count))) for _ in range(max(1, count // 8))]
        frame = frame_of(["old dog"], texts)
        seconds.append(least_seconds(lambda frame=frame: model(frame), args.rounds, device))
        if model.coverage.windows != count:
            raise RuntimeError(f"made {model.coverage.windows} windows instead of {count}")
    slope, start = np.polyfit(args.windows, seconds, 1)
    explained = np.corrcoef(args.windows, seconds)[0, 1] ** 2
    print(f"seconds = {start:.3f} + {slope:.5f} * windows, R2 = {explained:.5f}")
    print(f"{'windows':>8}{'seconds':>9}{'line':>9}{'off by':>8}")
    for count, measured in zip(args.windows, seconds, strict=True):
        line = start + slope * count
        print(f"{count:8}{measured:9.3f}{line:9.3f}{measured / line - 1:8.1%}")


def with_huge(case: str, words: int) -> dict[str, Any]:
    """Scores the documents of a case: windows, MB by which this process grows, seconds, scores but the huge one's."""
    rng = np.random.default_rng(0)
    ordinary = [" ".join(rng.choice(tiny.WORDS, rng.integers(50, 551))) for _ in range(200)]
    huge = " ".join(rng.choice(tiny.WORDS, words))
    cases = {"ordinary": ordinary, "with huge": [*ordinary[:100], huge, *ordinary[100:]], "huge": [huge]}
    frame = frame_of(["old dog"], cases[case])
    with tempfile.TemporaryDirectory() as folder:
        backbone = tiny.checkpoint(Path(folder), num_hidden_layers=1)
        model = ld.MaxP(backbone, window_size=50, stride=50, dtype="float32", device="cpu")
        model(frame_of(["cat"], [" ".join(rng.choice(tiny.WORDS, 300)) for _ in range(20)]))
        scored: list[pd.DataFrame] = []
        mb, seconds = grown(lambda: scored.append(model(frame)))
        scores = scored[0].loc[frame["text"] != huge, "score"].tolist()
        return {"windows": model.coverage.windows, "mb": mb, "seconds": seconds, "scores": scores}


def table_of_huge(args: argparse.Namespace, device: torch.device) -> None:
    """What one huge document among ordinary ones changes."""
    print(f"{'documents':12}{'windows':>9}{'seconds':>9}{'windows/s':>11}{'grown MB':>10}{'scores differ by':>18}")
    without = np.zeros(0)
    for case in ("ordinary", "with huge", "huge"):
        command = [sys.executable, __file__, "--with-huge", case, "--huge-words", str(args.huge_words)]
        command += ["--threads", str(args.threads)]
        done = subprocess.run(command, check=True, capture_output=True, text=True, env=os.environ.copy())
        figures = json.loads(done.stdout.splitlines()[-1])
        scores = np.array(figures["scores"])
        differ = f"{np.abs(scores - without).max():.1e}" if case == "with huge" else ""
        without = scores
        print(
            f"{case:12}{figures['windows']:9}{figures['seconds']:9.2f}{figures['windows'] / figures['seconds']:11.0f}"
            f"{figures['mb']:10.1f}{differ:>18}",
            flush=True,
        )


TABLES = {
    "peak": table_of_peak,
    "overhead": table_of_overhead,
    "memory": table_of_memory,
    "linear": table_of_windows,
    "huge": table_of_huge,
}


def main() -> None:
    """Prints the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tables", nargs="+", choices=list(TABLES), default=list(TABLES))
    parser.add_argument("--backbone", default="longdoc:minilm-l6")
    parser.add_argument("--collection", help="folder with docs.jsonl and topics.tsv")
    parser.add_argument("--device", help="default: a GPU if there is one")
    parser.add_argument("--dtype", default="fastest", help="default: what the device is best at")
    for name, default in {"threads": os.cpu_count(), "rounds": 3, "topics": 5, "depth": 50, "passes": 4}.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--size", type=int, default=2048, help="rows of the matrices whose product gives the peak")
    parser.add_argument("--lengths", type=int, nargs="+", default=[64, 128, 256, 512])
    parser.add_argument("--rows", type=int, nargs="+", default=[1000, 10_000, 100_000], help="multiples of 100")
    parser.add_argument("--windows", type=int, nargs="+", default=[8, 16, 32, 64, 128, 256], help="multiples of 8")
    parser.add_argument("--huge-words", type=int, default=200_000)
    parser.add_argument("--grown-by", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--with-huge", help=argparse.SUPPRESS)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    warnings.simplefilter("ignore")
    if args.grown_by:
        print(*grown_by(args.grown_by))
        return
    if args.with_huge:
        print(json.dumps(with_huge(args.with_huge, args.huge_words)))
        return
    device = resolve_device(args.device)
    print(f"torch {torch.__version__}, {device.type}, {args.threads} thread(s)")
    for name in args.tables:
        print(f"\n{name}", flush=True)
        TABLES[name](args, device)


if __name__ == "__main__":
    main()
