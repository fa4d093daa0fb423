"""How large a checkout of this repository is: lines, statements, errors, names, and what one score passes through.

    python tests/benchmarks/sizes.py [CHECKOUT [CHECKOUT]] [--api] [--names] [--list]

Prints for a checkout (default: this one), or before -> after for two: lines of the package by room, its lines of code,
docstrings and blank lines or comments, statements of its syntax tree, `raise` for 100 lines of code, lines of tests
(`test_*.py` outside `tests/benchmarks`; what supports them apart), public names that are defined in two modules or
more, and files and functions that a `transform` and a `fit` of a loaded MaxP enter (see `way_of_data.py`, whose copy of
the checkout runs). `--names` lists the names, `--list` the functions; `--api` prints the public names with their
signatures instead, one a line, to be compared by `diff`.
"""

from __future__ import annotations

import argparse
import ast
import os
import subprocess
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
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


@dataclass
class Lines:
    """Lines of a kind each, statements, and errors that are raised."""

    total: int = 0
    code: int = 0
    docstrings: int = 0
    other: int = 0  # blank lines and comments
    statements: int = 0
    raises: int = 0
    names: dict[str, set[str]] = field(default_factory=lambda: defaultdict(set))  # to modules

    def add(self, path: Path, module: str) -> None:
        """Count a file."""
        text = path.read_text(encoding="utf-8")
        tree, lines = ast.parse(text), text.splitlines()
        docstrings = {number for start, end in docstring_lines(tree) for number in range(start, end + 1)}
        written = [line.strip() for number, line in enumerate(lines, 1) if number not in docstrings]
        code = sum(bool(line) and not line.startswith("#") for line in written)
        self.total += len(lines)
        self.code += code
        self.docstrings += len(docstrings)
        self.other += len(written) - code
        nodes = list(ast.walk(tree))
        self.statements += sum(isinstance(node, ast.stmt) for node in nodes)
        self.raises += sum(isinstance(node, ast.Raise) for node in nodes)
        for name in public_names(tree):
            self.names[name].add(module)

    @property
    def raises_per_100(self) -> float:
        """`raise` for 100 lines of code."""
        return 100 * self.raises / max(self.code, 1)


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


def count(checkout: Path, paths: list[Path]) -> Lines:
    """Count the lines of files."""
    lines = Lines()
    for path in paths:
        lines.add(path, str(path.relative_to(checkout).with_suffix("")))
    return lines


def room(path: Path, package: Path) -> str:
    """The sub-package that a file is in."""
    parts = path.relative_to(package).parts
    return parts[0] if len(parts) > 1 else "(top)"


def of_sources(checkout: Path) -> tuple[dict[str, float], Lines]:
    """Every number that is read from the source, by what it counts."""
    package, tests = checkout / PACKAGE, checkout / "tests"
    sources = sorted(package.rglob("*.py"))
    whole = count(checkout, sources)
    by_room = Counter[str]()
    for path in sources:
        by_room[room(path, package)] += len(path.read_text(encoding="utf-8").splitlines())
    checked = [path for path in sorted(tests.rglob("*.py")) if "benchmarks" not in path.relative_to(tests).parts]
    test_files = [path for path in checked if path.name.startswith("test_")]
    pages = list((package / "pt_docs").glob("*.rst"))
    numbers: dict[str, float] = {f"package, {name}": lines for name, lines in sorted(by_room.items())}
    numbers |= {
        "package, lines": whole.total,
        "package, files": len(sources),
        "package, lines of code": whole.code,
        "package, lines of docstrings": whole.docstrings,
        "package, blank lines and comments": whole.other,
        "package, statements": whole.statements,
        "package, statements per line of code": round(whole.statements / whole.code, 3),
        "package, raise": whole.raises,
        "package, raise per 100 lines of code": round(whole.raises_per_100, 2),
        "public names in two modules": len(twice(whole)),
        "tests, lines of test_*.py": count(checkout, test_files).total,
        "tests, lines of support": count(checkout, [path for path in checked if path not in test_files]).total,
        "tests, lines of benchmarks": count(checkout, sorted((tests / "benchmarks").rglob("*.py"))).total,
        "lines of pages": sum(len(path.read_text(encoding="utf-8").splitlines()) for path in pages),
    }
    return numbers, whole


def twice(lines: Lines) -> dict[str, list[str]]:
    """Public names that are defined in two modules or more, with the modules."""
    return {name: sorted(modules) for name, modules in sorted(lines.names.items()) if len(modules) > 1}


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
    parser.add_argument("--list", action="store_true", help="list the functions that transform and fit enter")
    args = parser.parse_args()
    checkouts = [path.resolve() for path in args.checkouts]
    if args.api:
        for checkout in checkouts:
            print(in_checkout(checkout, ["-c", API]), end="")
        return
    found: list[dict[str, float]] = []
    for checkout in checkouts:
        numbers, lines = of_sources(checkout)
        ways = in_checkout(checkout, ["tests/benchmarks/way_of_data.py", *(["--list"] if args.list else [])])
        found.append(numbers | of_ways(ways))
        if args.names:
            print(f"{checkout}:", *(f"  {name}: {', '.join(where)}" for name, where in twice(lines).items()), sep="\n")
        if args.list:
            print(ways)
    for name in dict.fromkeys(name for numbers in found for name in numbers):
        print(f"{name:42}" + " -> ".join(f"{numbers.get(name, 0):>10,}" for numbers in found))


if __name__ == "__main__":
    main()
