"""The papers' experiments in miniature, and what they say about the papers' claims.

python -m tests.benchmarks.replication replicate FOLDER [--budget 4h]
python -m tests.benchmarks.replication claims FOLDER
"""

from __future__ import annotations

import argparse
import re
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path

EXAMPLES = """examples:
  python -m tests.benchmarks.replication replicate replication --budget 4h
  python -m tests.benchmarks.replication replicate replication --studies core others --seeds 0 1 2 --device cuda
  python -m tests.benchmarks.replication tables replication --pictures pictures
  python -m tests.benchmarks.replication claims replication
"""
PASSAGES = (
    "a passage dataset, e.g. irds:msmarco-passage/train/judged: its first 20,000 topics, what is relevant for them, "
    "and its first 200,000 other passages"
)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command.

    Args:
        argv: command-line arguments; None takes those of the process.

    Returns:
        The process's exit code.
    """
    args = _arguments(argv)
    return args.command(args)


def replicate(args: argparse.Namespace) -> int:
    """Trains and tests what is not done yet."""
    from transformers.utils import logging

    from pyterrier_longdoc.common.packaged import ENCODER

    from .miniature import Miniature, Sizes, passages_of
    from .replicate import STUDIES, Replication, jobs_of
    from .replicate import replicate as do

    # A model that is trained and loaded fifty times says all it has to say fifty times.
    warnings.simplefilter("ignore")
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    studies = list(STUDIES) if "all" in args.studies else args.studies
    try:
        jobs = jobs_of(studies, args.seeds, args.models)
    except ValueError as misspelt:
        raise SystemExit(f"replicate: {misspelt}") from None
    sizes = Sizes(args.queries, args.test_queries, args.dev_queries, args.depth)
    passages = None if args.passages is None else passages_of(args.passages)
    replication = Replication(
        args.folder,
        Miniature(passages, sizes, tokenizer=args.backbone or ENCODER),
        backbone=args.backbone,
        device=args.device,
        dtype=args.dtype,
        arguments={} if args.batch_size is None else {"batch_size": args.batch_size},
        start_steps=args.start_steps,
        verbose=sys.stderr.isatty(),
    )
    left = do(replication, jobs, budget=args.budget, tell=lambda line: print(line, flush=True))
    if left:
        print(f"{len(left)} of {len(jobs)} jobs are left; the same command goes on, next with {left[0]}")
    return 0


def claims(args: argparse.Namespace) -> int:
    """Prints the papers' claims with what was seen of them."""
    from .claims import as_rst, as_text, verdicts
    from .replicate import read_figures, read_outcomes

    found = verdicts(read_outcomes(args.folder), read_figures(args.folder))
    print(as_rst(found) if args.rst else as_text(found))
    return 0


def tables(args: argparse.Namespace) -> int:
    """Prints the papers' tables of what was run, and draws their figures."""
    from .replicate import read_outcomes
    from .tables import draw, tables_as_rst

    outcomes = read_outcomes(args.folder)
    print("\n\n".join(tables_as_rst(outcomes)))
    if args.pictures is not None and not draw(outcomes, args.pictures):
        print("no pictures: nothing that the papers draw was run", file=sys.stderr)
    return 0


def collect(args: argparse.Namespace) -> int:
    """Writes the results, without the models, into another folder."""
    from .replicate import collect as write_results

    write_results(args.folder, args.target)
    return 0


def page(args: argparse.Namespace) -> int:
    """Prints a section of the documentation's page: what was run, the claims, the tables."""
    from .page import results_section

    print(results_section(args.folder))
    return 0


def seconds(text: str) -> float:
    """A time such as "4h", "90min" or "30s" in seconds.

    Raises:
        argparse.ArgumentTypeError: for anything else.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(h|min|m|s)", text)
    if match is None:
        raise argparse.ArgumentTypeError(f"{text!r} is no time; give e.g. 4h, 90min or 30s")
    return float(match[1]) * {"h": 3600, "min": 60, "m": 60, "s": 1}[match[2]]


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m tests.benchmarks.replication",
        description="The papers' experiments in miniature, and what they say about the papers' claims.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    run = commands.add_parser("replicate", help="train and test what is not done yet")
    run.set_defaults(command=replicate)
    run.add_argument("folder", type=Path, metavar="FOLDER", help="for models and results; a second call goes on")
    studies = "core, longer, rotated, uniform, others, distilled, best, windows, chunks, positions"
    run.add_argument("--studies", nargs="+", default=["core"], help=f"{studies}; or all (default core)")
    run.add_argument(
        "--models", nargs="+", default=(), help="these systems of the studies alone, e.g. MaxP 'PARADE RAND'"
    )
    run.add_argument("--seeds", nargs="+", type=int, default=[0], help="of trainings (default 0)")
    run.add_argument("--budget", type=seconds, help="begin nothing new after this time, e.g. 4h or 90min")
    run.add_argument("--device", help="cuda, cpu, ... (default: a GPU if there is one)")
    run.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), help="(default: the device's best)")
    run.add_argument("--backbone", help="a cross-encoder, name or folder, in place of the small one that is made")
    run.add_argument("--passages", metavar="NAME", help=PASSAGES)
    run.add_argument("--batch-size", type=int, help="most windows in one pass, e.g. 1024 on a GPU")
    run.add_argument("--queries", type=int, default=2000, help="to train on (default 2000)")
    run.add_argument("--test-queries", type=int, default=500, help="(default 500)")
    run.add_argument("--dev-queries", type=int, default=200, help="that settings were chosen on (default 200)")
    run.add_argument("--depth", type=int, default=8, help="BM25's best so many are reranked (default 8)")
    run.add_argument("--start-steps", type=int, default=300, help="on pairs of passages (default 300)")
    listed = commands.add_parser("claims", help="list the papers' claims with what was seen of them")
    listed.set_defaults(command=claims)
    listed.add_argument("folder", type=Path, metavar="FOLDER", help="of replicate")
    listed.add_argument("--rst", action="store_true", help="as tables of reStructuredText")
    laid_out = commands.add_parser("tables", help="the papers' tables of what was run, in reStructuredText")
    laid_out.set_defaults(command=tables)
    laid_out.add_argument("folder", type=Path, metavar="FOLDER", help="of replicate")
    laid_out.add_argument("--pictures", type=Path, metavar="FOLDER", help="draw the papers' figures into it")
    kept = commands.add_parser("collect", help="write the results, without the models, into a folder to keep")
    kept.set_defaults(command=collect)
    kept.add_argument("folder", type=Path, metavar="FOLDER", help="of replicate")
    kept.add_argument("target", type=Path, metavar="TARGET", help="for three small files")
    written = commands.add_parser("page", help="the results as a section of a page, in reStructuredText")
    written.set_defaults(command=page)
    written.add_argument("folder", type=Path, metavar="FOLDER", help="of replicate")
    return parser.parse_args(argv)


if __name__ == "__main__":
    raise SystemExit(main())
