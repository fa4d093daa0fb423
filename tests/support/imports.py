"""Which file of the package imports which, also inside functions and under TYPE_CHECKING: read from the source."""

from __future__ import annotations

import ast
from collections.abc import Iterable
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import pyterrier_longdoc

PACKAGE = Path(pyterrier_longdoc.__file__).parent


@cache
def imports(package: Path = PACKAGE) -> dict[str, set[str]]:
    """The modules of the package that each of its modules imports, at any place in the file."""
    modules = {_module_name(path, package): path for path in package.rglob("*.py")}
    found: dict[str, set[str]] = {}
    for name, path in modules.items():
        tree = ast.parse(path.read_text(encoding="utf-8"))
        names = {target for node in ast.walk(tree) for target in _targets(node, name, path.name == "__init__.py")}
        found[name] = {target for target in (_known(each, modules) for each in names) if target not in (None, name)}
    return found


def _module_name(path: Path, package: Path) -> str:
    parts = [package.name, *path.relative_to(package).with_suffix("").parts]
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def _targets(node: ast.AST, module: str, is_package: bool) -> Iterable[str]:
    """The full names that an import statement asks for; `from a import b` may mean the module `a.b`."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if not isinstance(node, ast.ImportFrom):
        return []
    parts = module.split(".") if is_package else module.split(".")[:-1]
    base = ".".join(parts[: len(parts) - node.level + 1]) if node.level else ""
    origin = ".".join(filter(None, [base, node.module]))
    return [f"{origin}.{alias.name}" for alias in node.names]


def _known(name: str, modules: dict[str, Path]) -> str | None:
    """The module of the package that a name stands for or is in."""
    while name and name not in modules:
        name = name.rpartition(".")[0]
    return name or None


def in_order(graph: dict[str, set[str]]) -> list[str]:
    """The modules, each after those that it imports.

    Raises:
        graphlib.CycleError: if some import each other; the message names them.
    """
    return list(TopologicalSorter(graph).static_order())
