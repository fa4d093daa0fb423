"""All that needs a GPU, in one go: the tests marked `gpu`, then speed and memory beside sentence-transformers.

    python tests/benchmarks/gpu.py [--device cuda] [--out gpu.json] [--minutes 10] [--tiny]

From a fresh install: `pip install -e . pytest sentence-transformers datasets accelerate peft` and, where it can be had,
`flash-attn`. Nothing is downloaded: weights are random, sizes are those of public checkpoints, and every word of the
texts is a token. `--device cpu --tiny` runs every line of it in a minute, on two layers; its figures mean nothing.

- tests: `pytest -m gpu`; with `--device cpu` the same tests' smaller forms.
- scoring: pairs per second in bfloat16, documents of 62 to 501 tokens, and of up to 8,000 for ModernBERT at 8,192, by
  `FirstP` and `LongP` from the frame of texts to the frame of scores, with nothing remembered, beside
  `CrossEncoder.predict` over the same pairs with its best attention (flash-attn if it is there, else sdpa) and the best
  of several batch sizes. Goal: 2 times as many.
- training: documents per second in bfloat16 beside `CrossEncoderTrainer`, by tests/benchmarks/bench_training.py. Goal:
  1.5 times as many.

Peak memory is torch's, of each system alone. Systems take turns, and the best of all rounds counts. What would end
after `--minutes` is left out, and so is what lacks a library; both are said. Prints a table and writes one JSON file.
"""

from __future__ import annotations

import argparse
import json
import platform
import subprocess
import sys
import tempfile
import time
import warnings
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable
from contextlib import nullcontext
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import pyterrier_longdoc as ld
from tests.support import tiny

ROOT = Path(__file__).resolve().parents[2]
GOALS = {"scoring": 2.0, "training": 1.5}
BERT = {"vocab_size": 30522}
MODERN = {"global_attn_every_n_layers": 3, "local_attention": 128, "vocab_size": 50368, "pad_token_id": 0}
SIZES = {
    "MiniLM-L6": ("bert", BERT, (384, 6, 12, 1536)),  # config.json of cross-encoder/ms-marco-MiniLM-L6-v2
    # jhu-clsp/ettin-encoder-17m and -150m: Weller et al. 2025 (arXiv 2507.11412), table of sizes
    "ettin-17m": ("modernbert", MODERN, (256, 7, 4, 384)),
    "ettin-150m": ("modernbert", MODERN, (768, 22, 12, 1152)),
    # config.json of answerdotai/ModernBERT-base
    "ModernBERT-base": ("modernbert", MODERN, (768, 22, 12, 1152)),
}
"""Architecture, its settings, and hidden size, layers, heads and intermediate size."""
TINY = (32, 2, 4, 64)
NAMES = ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size")

CASES = {"MiniLM-L6": 512, "ettin-17m": 512, "ettin-150m": 512, "ModernBERT-base": 8192}
"""The longest input of each case of scoring."""
TRAINED = ("MiniLM-L6", "ettin-150m")
QUERY_TOKENS = 8
CPU_FLAGS = ("avx2", "avx512_bf16", "amx_bf16")


# The machine.


def machine(device: str) -> dict[str, Any]:
    """What the figures depend on."""
    told: dict[str, Any] = {"python": platform.python_version(), "cpu": platform.processor() or platform.machine()}
    if Path("/proc/cpuinfo").exists():
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        told["cpu"] = next((line.split(": ")[1] for line in lines if line.startswith("model name")), told["cpu"])
        flags = next((line.split() for line in lines if line.startswith("flags")), [])
        told["cpu flags"] = [flag for flag in CPU_FLAGS if flag in flags]
    told["threads"] = torch.get_num_threads()
    if device.startswith("cuda"):
        about = torch.cuda.get_device_properties(device)
        told |= {"gpu": about.name, "gpu GB": round(about.total_memory / 2**30, 1), "cuda": torch.version.cuda}
        told["compute capability"] = f"{about.major}.{about.minor}"
    for package in ("torch", "transformers", "sentence-transformers", "flash-attn", "datasets", "pyterrier-longdoc"):
        try:
            told[package] = version(package)
        except PackageNotFoundError:
            told[package] = None
    return told


# Tests.


def run_tests(device: str, scratch: Path, limit: float) -> dict[str, Any]:
    """Counts of the tests of the device, and the names of those that failed."""
    report = scratch / "tests.xml"
    on_gpu = device.startswith("cuda")
    chosen = ["-m", "gpu", "tests"] if on_gpu else ["-k", "cpu", "-m", "not gpu", "tests/test_gpu.py"]
    options = ["-n", "0", "-q", "-p", "no:cacheprovider", f"--junitxml={report}"]
    command = [sys.executable, "-m", "pytest", *options, *chosen]
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=limit, check=False)
    except subprocess.TimeoutExpired:
        return {"error": f"not done after {limit:.0f} s"}
    if not report.exists():
        return {"error": (done.stdout + done.stderr)[-2000:]}
    cases = list(ElementTree.parse(report).getroot().iter("testcase"))
    failed, skipped = {}, 0
    for case in cases:
        skipped += case.find("skipped") is not None
        for found in (*case.iter("failure"), *case.iter("error")):
            failed[f"{case.get('classname')}::{case.get('name')}"] = str(found.get("message"))[:500]
    passed = len(cases) - len(failed) - skipped
    return {"tests": len(cases), "passed": passed, "skipped": skipped, "failed": failed}


# Models and texts.


def checkpoint(folder: Path, name: str, longest: int, *, small: bool) -> str:
    """A random cross-encoder of a public size; a word of `tiny.WORDS` is a token of its tokenizer."""
    family, settings, sizes = SIZES[name]
    settings = {**settings, "max_position_embeddings": max(longest, 512), "initializer_range": 0.1}
    settings |= dict(zip(NAMES, TINY if small else sizes, strict=True))
    path = tiny.checkpoint(folder / f"{name}-{longest}", family, **settings)
    config = Path(path) / "tokenizer_config.json"
    told = json.loads(config.read_text(encoding="utf-8"))
    config.write_text(json.dumps({**told, "model_max_length": longest}), encoding="utf-8")
    return path


def pairs_of(count: int, shortest: int, longest: int) -> pd.DataFrame:
    """Texts of so many tokens at least and at most, half of them labelled 1, two for each query."""
    rng = np.random.default_rng(0)
    lengths = rng.integers(shortest, longest + 1, count)
    rows = []
    for i, length in enumerate(lengths):
        query, text = (" ".join(rng.choice(tiny.WORDS, words)) for words in (QUERY_TOKENS, length))
        rows.append((f"q{i // 2}", query, f"d{i}", text, i % 2))
    run = pd.DataFrame(rows, columns=["qid", "query", "docno", "text", "label"])
    return run.assign(query=run.groupby("qid")["query"].transform("first"))


# Speed.


def measured(device: str, work: Callable[[], Any]) -> tuple[float, float | None]:
    """Seconds, and on a GPU the most MB that torch had."""
    if not device.startswith("cuda"):
        start = time.perf_counter()
        work()
        return time.perf_counter() - start, None
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    start = time.perf_counter()
    work()
    torch.cuda.synchronize()
    return time.perf_counter() - start, torch.cuda.max_memory_allocated() / 2**20


def ours(folder: str, run: pd.DataFrame, longest: int, args: argparse.Namespace) -> Callable[[], np.ndarray]:
    """FirstP, for longer inputs than 512 LongP."""
    given = {"max_query_len": QUERY_TOKENS, "device": args.device, "dtype": "bfloat16"}
    if longest > 512:
        model = ld.LongP(folder, **given)
    else:
        model = ld.FirstP(folder, window_size=longest - QUERY_TOKENS - 3, batch_size=256, **given)

    def score() -> np.ndarray:
        found = model(run)["score"].to_numpy()
        if model.coverage.pairs_truncated:
            raise RuntimeError(f"not all was read: {model.coverage}")
        return found

    return score


def theirs(
    folder: str, run: pd.DataFrame, longest: int, args: argparse.Namespace
) -> dict[str, Callable[[], np.ndarray]]:
    """The CrossEncoder by attention and batch size."""
    from sentence_transformers import CrossEncoder
    from transformers.utils import is_flash_attn_2_available

    flash = args.device.startswith("cuda") and is_flash_attn_2_available()
    sizes = (2, 8) if longest > 512 else (32, 128, 256)
    pairs = list(zip(run["query"], run["text"], strict=True))
    ways = {}
    for attention in ["flash_attention_2", "sdpa"] if flash else ["sdpa"]:
        model = CrossEncoder(
            folder,
            max_length=longest,
            device=args.device,
            activation_fn=torch.nn.Identity(),
            model_kwargs={"dtype": torch.bfloat16, "attn_implementation": attention},
        )
        for size in sizes[:1] if args.tiny else sizes:

            def score(model: Any = model, size: int = size) -> np.ndarray:
                return np.asarray(model.predict(pairs, batch_size=size, show_progress_bar=False), dtype="float64")

            ways[f"{attention}, {size} in a batch"] = score
    return ways


def scoring(name: str, longest: int, scratch: Path, args: argparse.Namespace) -> dict[str, Any]:
    """Pairs per second of both."""
    count = (8 if longest > 512 else 16) if args.tiny else (64 if longest > 512 else 4096)
    longest = min(longest, 1024) if args.tiny else longest
    room = longest - QUERY_TOKENS - 3
    run = pairs_of(count, room // 8, min(room, 8000))
    folder = checkpoint(scratch, name, longest, small=args.tiny)
    systems = {"pyterrier_longdoc": ours(folder, run, longest, args), **theirs(folder, run, longest, args)}
    seconds, peaks, scores = dict.fromkeys(systems, np.inf), dict.fromkeys(systems), {}
    for number in range(args.rounds + 1):  # the first warms up
        for system, score in systems.items():
            if number > 1 and seconds[system] > 2 * min(
                own for key, own in seconds.items() if key != "pyterrier_longdoc"
            ):
                continue  # a batch size that is far from the best
            taken, peak = measured(args.device, lambda score=score, system=system: scores.update({system: score()}))
            if number:
                seconds[system], peaks[system] = min(seconds[system], taken), peak
    own, *others = systems
    best = min(others, key=seconds.__getitem__)
    speeds = {"ours": count / seconds[own], "theirs": count / seconds[best]}
    row = row_of("scoring", name, longest, count, speeds, {"ours": peaks[own], "theirs": peaks[best]}, best)
    return {**row, "correlation": float(np.corrcoef(scores[own], scores[best])[0, 1])}


def training(name: str, longest: int, scratch: Path, args: argparse.Namespace) -> dict[str, Any]:
    """Documents per second of both trainers, and peak memory."""
    import bench_training

    documents, steps = (4, 3) if args.tiny else (32, 20)
    run = pairs_of(documents * steps, longest // 8, longest - QUERY_TOKENS - 3)
    folder = checkpoint(scratch, name, longest, small=args.tiny)
    options = bench_training.Options(documents, batch_size=documents, dtype="bfloat16", device=args.device)
    speeds: dict[str, float] = {}
    peaks: dict[str, float | None] = {}
    for who, train in (("ours", bench_training.train_ours), ("theirs", bench_training.train_theirs)):
        for _ in range(1 if args.tiny else 2):  # the first warms up
            clock = bench_training.Clock()
            _, peaks[who] = measured(args.device, lambda train=train, clock=clock: train(folder, run, options, clock))
        speeds[who] = clock.documents_per_second(documents)[0]
    return row_of("training", name, longest, len(run), speeds, peaks, "CrossEncoderTrainer")


def row_of(
    kind: str, name: str, longest: int, documents: int, speeds: dict[str, float], peaks: dict[str, Any], theirs: str
) -> dict[str, Any]:
    """A row of the table, from documents per second and the most MB of both."""
    return {
        "kind": kind,
        "model": name,
        "longest input": longest,
        "documents": documents,
        "ours/s": speeds["ours"],
        "theirs/s": speeds["theirs"],
        "ratio": speeds["ours"] / speeds["theirs"],
        "goal": GOALS[kind],
        "our MB": peaks["ours"],
        "their MB": peaks["theirs"],
        "theirs is": theirs,
    }


def all_of(args: argparse.Namespace, end: float, scratch: Path) -> tuple[list[dict[str, Any]], list[str]]:
    """The rows of the table, and what was left out."""
    cases = [(scoring, name, longest) for name, longest in CASES.items()] + [(training, name, 512) for name in TRAINED]
    rows: list[dict[str, Any]] = []
    left_out, slowest = [], 0.0
    for measure, name, longest in cases:
        title = f"{measure.__name__} of {name} at {longest} tokens"
        start = time.monotonic()
        if end - start < slowest:
            left_out.append(f"{title}: {args.minutes:g} minutes are over")
            continue
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                rows.append(measure(name, longest, scratch, args))
        except (ImportError, RuntimeError, ValueError, TypeError, AttributeError, OSError) as error:
            # One case that fails, or lacks a library, must not lose the figures of the others.
            left_out.append(f"{title}: {type(error).__name__}: {str(error)[:500]}")
        took = time.monotonic() - start
        slowest = max(slowest, took)
        print(f"  {title}: {took:.0f} s", flush=True)
    return rows, left_out


def shown(rows: list[dict[str, Any]]) -> str:
    """The table, goals beside the figures."""
    table = pd.DataFrame(rows)
    table["reached"] = np.where(table["ratio"] >= table["goal"], "yes", "no")
    return table.dropna(axis=1, how="all").to_string(index=False, float_format=lambda figure: f"{figure:.2f}")


def main() -> None:
    """Prints the table and writes the JSON file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--out", type=Path, default=Path("gpu.json"))
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tiny", action="store_true", help="two layers and few texts: whether the script runs")
    parser.add_argument("--skip-tests", action="store_true")
    args = parser.parse_args()
    if args.device.startswith("cuda") and not torch.cuda.is_available():
        parser.error("torch sees no GPU here; --device cpu --tiny tries the script")
    args.rounds = 1 if args.tiny else args.rounds
    start = time.monotonic()
    end = start + 60 * args.minutes
    about = machine(args.device)
    print("\n".join(f"{name}: {value}" for name, value in about.items()), flush=True)
    with tempfile.TemporaryDirectory() as folder:
        tests = None if args.skip_tests else run_tests(args.device, Path(folder), 30 * args.minutes)
        print(f"tests: {tests}", flush=True)
        on_gpu = args.device.startswith("cuda")
        with torch.cuda.device(args.device) if on_gpu else nullcontext():
            rows, left_out = all_of(args, end, Path(folder))
    if rows:
        print(shown(rows))
    print("\n".join(f"left out: {line}" for line in left_out))
    told = {
        "machine": about,
        "tiny": args.tiny,
        "device": args.device,
        "tests": tests,
        "speed": rows,
        "left out": left_out,
        "seconds": round(time.monotonic() - start),
    }
    args.out.write_text(json.dumps(told, indent=1), encoding="utf-8")
    print(f"{told['seconds']} s; all of it is in {args.out}")
    if tests is not None and (tests.get("failed") or "error" in tests):
        sys.exit(1)


if __name__ == "__main__":
    main()
