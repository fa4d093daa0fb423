"""How many files and functions of the package one `transform` and one `fit` enter.

    python tests/benchmarks/way_of_data.py [--list]

A reader who wants to know how a score comes about opens these files and reads these functions. Counted with
`sys.setprofile` are the functions of the package that are entered by the second `transform` of a MaxP with a tiny
random model over five rows, and by a `fit` of two steps after another one. Comprehensions, which are functions in some
versions of Python, are left out.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import warnings
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import pandas as pd
import torch

import pyterrier_longdoc as ld
from tests.support import tiny

PACKAGE = Path(ld.__file__).parent
COMPREHENSIONS = {"<listcomp>", "<setcomp>", "<dictcomp>", "<genexpr>"}


def entered(call: Callable[[], Any]) -> dict[str, list[str]]:
    """The functions that a call enters, by file of the package."""
    codes: set[CodeType] = set()

    def note(frame: FrameType, event: str, _: Any) -> None:
        if event == "call":
            codes.add(frame.f_code)

    sys.setprofile(note)
    try:
        call()
    finally:
        sys.setprofile(None)
    files: dict[str, set[str]] = defaultdict(set)
    for code in sorted(codes, key=lambda code: (code.co_filename, code.co_firstlineno)):
        path = Path(code.co_filename)
        if path.is_relative_to(PACKAGE) and code.co_name not in COMPREHENSIONS:
            files[str(path.relative_to(PACKAGE))].add(getattr(code, "co_qualname", code.co_name))
    return {file: sorted(names) for file, names in sorted(files.items())}


def way_of_transform() -> dict[str, list[str]]:
    """What the second `transform` of a loaded MaxP enters."""
    with tempfile.TemporaryDirectory() as folder:
        model = ld.MaxP(tiny.checkpoint(Path(folder)), window_size=20, stride=10, max_query_len=8)
        model.transform(tiny.results())
        return entered(lambda: model.transform(tiny.results()))


def way_of_fit() -> dict[str, list[str]]:
    """What a `fit` of two steps enters."""
    frame = tiny.results().assign(text=lambda rows: rows["text"].fillna(""))
    qrels = pd.DataFrame({"qid": ["1", "2"], "docno": ["d1", "d1"], "label": [1, 1]})
    recipe = ld.TrainingArgs(epochs=2, queries_per_step=2)
    with tempfile.TemporaryDirectory() as folder:
        model = ld.MaxP(tiny.checkpoint(Path(folder)), window_size=20, stride=10, max_query_len=8, training=recipe)
        model.fit(frame, qrels)
        return entered(lambda: model.fit(frame, qrels))


def main() -> None:
    """Prints the counts."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--list", action="store_true", help="print the names, too")
    args = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    for name, files in (("transform", way_of_transform()), ("fit", way_of_fit())):
        print(f"{name}: {len(files)} files, {sum(map(len, files.values()))} functions")
        for file, functions in files.items() if args.list else ():
            print(f"  {file}")
            for function in functions:
                print(f"    {function}")


if __name__ == "__main__":
    main()
