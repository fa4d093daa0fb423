"""How large a checkout of this repository is: lines, statements, errors, names, and what one score passes through.

    python tests/benchmarks/sizes.py [CHECKOUT [CHECKOUT]] [--api] [--names]

Prints for a checkout (default: this one), or before -> after for two: lines of the package by room, its lines of code
and docstrings, statements of its syntax tree, `raise` for 100 lines of code, lines of tests (`test_*.py` outside
`tests/benchmarks`; what supports them apart), public names that are defined in two modules or more, and files and
functions that a `transform` and a `fit` of a loaded MaxP enter (see `way_of_data.py`, whose copy of the checkout runs).
`--names` lists the names; `--api` prints the public names with their signatures instead, one a line, to be compared by
`diff`.
"""

from __future__ import annotations

import argparse
import ast
import os
import subprocess
import sys
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path

HERE = Path(__file__).resolve().parents[2]
PACKAGE = "pyterrier_longdoc"

API = '''
import importlib, inspect, pkgutil
import pyterrier_longdoc as ld

def shown(value):
    """A signature on one line; the bases of a class, a constant's type."""
    if not callable(value):
        return f": {type(value).__name__}"
    try:
        signature = str(inspect.signature(value)).replace("\\n", " ")
    except ValueError:
        signature = "(...)"
    bases = [base.__name__ for base in value.__bases__ if base is not object] if inspect.isclass(value) else []
    return signature + (f"  [{', '.join(bases)}]" if bases else "")

packages = [ld.__name__, *(f"{ld.__name__}.{each.name}" for each in pkgutil.iter_modules(ld.__path__) if each.ispkg)]
for package in packages:
    module = importlib.import_module(package)
    for name in sorted(getattr(module, "__all__", ())):
        value = getattr(module, name)
        print(f"{package}.{name}{shown(value)}")
        if inspect.isclass(value):
            for method in sorted(vars(value)):
                if not method.startswith("_") and inspect.isroutine(vars(value)[method]):
                    print(f"{package}.{name}.{method}{shown(getattr(value, method))}")
'''
"""Run in a process of its own with the checkout's package."""


def docstring_lines(tree: ast.Module) -> Iterator[tuple[int, int]]:
    """First and last lines of docstrings, also of those beneath attributes and constants."""
    for node in ast.walk(tree):
        for statement in getattr(node, "body", []) if not isinstance(node, ast.Lambda | ast.IfExp) else []:
            value = statement.value if isinstance(statement, ast.Expr) else None
            if isinstance(value, ast.Constant) and isinstance(value.value, str):
                yield statement.lineno, statement.end_lineno or statement.lineno


def public_names(tree: ast.Module) -> Iterator[str]:
    """Classes, functions and constants without underscore at the top of a module."""
    for node in tree.body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            names = [node.name]
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names = [target.id for target in targets if isinstance(target, ast.Name)]
        else:
            names = []
        yield from (name for name in names if not name.startswith("_"))


def lines_of(paths: Iterable[Path]) -> int:
    """All lines of files."""
    return sum(len(path.read_text(encoding="utf-8").splitlines()) for path in paths)


def of_sources(checkout: Path) -> tuple[dict[str, float], dict[str, set[str]]]:
    """Every number that is read from the source, by what it counts; and the modules that define a public name."""
    package, tests = checkout / PACKAGE, checkout / "tests"
    rooms, kinds = Counter[str](), Counter[str]()
    modules: dict[str, set[str]] = defaultdict(set)
    for path in sorted(package.rglob("*.py")):
        text, inside = path.read_text(encoding="utf-8"), path.relative_to(package)
        tree, lines = ast.parse(text), text.splitlines()
        docstrings = {number for start, end in docstring_lines(tree) for number in range(start, end + 1)}
        written = [line.strip() for number, line in enumerate(lines, 1) if number not in docstrings]
        nodes = list(ast.walk(tree))
        rooms[f"package, {inside.parts[0] if len(inside.parts) > 1 else '(top)'}"] += len(lines)
        kinds["package, lines"] += len(lines)
        kinds["package, files"] += 1
        kinds["package, lines of code"] += sum(bool(line) and not line.startswith("#") for line in written)
        kinds["package, lines of docstrings"] += len(docstrings)
        kinds["package, statements"] += sum(isinstance(node, ast.stmt) for node in nodes)
        kinds["package, raise"] += sum(isinstance(node, ast.Raise) for node in nodes)
        for name in public_names(tree):
            modules[name].add(str(inside.with_suffix("")))
    checked = [path for path in tests.rglob("*.py") if "benchmarks" not in path.relative_to(tests).parts]
    numbers: dict[str, float] = dict(sorted(rooms.items())) | dict(kinds)
    numbers |= {
        "package, raise per 100 lines of code": round(
            100 * kinds["package, raise"] / kinds["package, lines of code"], 2
        ),
        "public names in two modules": sum(len(where) > 1 for where in modules.values()),
        "tests, lines of test_*.py": lines_of(path for path in checked if path.name.startswith("test_")),
        "tests, lines of support": lines_of(path for path in checked if not path.name.startswith("test_")),
        "tests, lines of benchmarks": lines_of((tests / "benchmarks").rglob("*.py")),
        "lines of pages": lines_of((package / "pt_docs").glob("*.rst")),
    }
    return numbers, modules


def in_checkout(checkout: Path, command: list[str]) -> str:
    """What a Python process with the checkout's package prints."""
    environment = {**os.environ, "PYTHONPATH": str(checkout), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, *command], cwd=checkout, env=environment, capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise RuntimeError(f"{command} failed in {checkout}:\n{done.stderr}")
    return done.stdout


def of_ways(output: str) -> dict[str, float]:
    """Files and functions of `transform` and `fit`, from what `way_of_data.py` prints."""
    numbers: dict[str, float] = {}
    for line in output.splitlines():
        name, _, counts = line.partition(": ")
        if name in ("transform", "fit"):
            files, functions = (int(part.split()[0]) for part in counts.split(", "))
            numbers |= {f"{name}, files": files, f"{name}, functions": functions}
    return numbers


def main() -> None:
    """Print the numbers."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkouts", nargs="*", type=Path, default=[HERE], help="one, or the one before and the after")
    parser.add_argument("--api", action="store_true", help="print the public names with their signatures instead")
    parser.add_argument("--names", action="store_true", help="list the public names in two modules")
    args = parser.parse_args()
    checkouts = [path.resolve() for path in args.checkouts]
    if args.api:
        for checkout in checkouts:
            print(in_checkout(checkout, ["-c", API]), end="")
        return
    found: list[dict[str, float]] = []
    for checkout in checkouts:
        numbers, modules = of_sources(checkout)
        found.append(numbers | of_ways(in_checkout(checkout, ["tests/benchmarks/way_of_data.py"])))
        for name, where in sorted(modules.items()) if args.names else ():
            if len(where) > 1:
                print(f"{checkout.name}, {name}: {', '.join(sorted(where))}")
    for name in dict.fromkeys(name for numbers in found for name in numbers):
        print(f"{name:42}" + " -> ".join(f"{numbers.get(name, 0):>10,}" for numbers in found))


if __name__ == "__main__":
    main()
