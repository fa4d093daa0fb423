"""How the package is built: layers, light imports, documented public names, private names in their file."""

from __future__ import annotations

import ast
import importlib
import inspect
import pkgutil
import re
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest

import pyterrier_longdoc as ld

from .conftest import QUICK
from .support import reading
from .support.imports import PACKAGE, imports, in_order

LAYERS = {
    "common": 1,
    "modelling": 2,
    "data": 2,
    "experiment": 2,
    "training": 3,
    "passages": 3,
    "listwise": 4,
    "rerankers": 4,
    "scale": 4,
    "analysis": 5,
    "papers": 6,
    "demo": 6,
    "__main__": 7,
    "": 7,
}
"""A sub-package imports from lower layers alone; "" is the package itself."""

LIGHT = (
    "common",
    "data",
    "experiment",
    "listwise",
    "passages",
    "scale",
    "analysis.judging",
    "modelling.layout",
    "modelling.windows",
    "modelling.tokens",
    "modelling.preselection",
    "papers.presets",
)
HEAVY = ("torch", "transformers", "matplotlib")

SUBPACKAGES = sorted(
    path.parent.name
    for path in PACKAGE.glob("*/__init__.py")
    if "\n__all__ = " in path.read_text(encoding="utf-8") and path.parent.name != "rerankers"
)
"""Those with public names of their own; that of `rerankers` names its modules."""

OF_LIBRARIES = {
    "_asdict": "named tuples",
    "_replace": "named tuples",
    "_version": "torch's count of writes to a tensor",
    "_attn_implementation": "the attention of a configuration of transformers",
}
"""Names with an underscore that their library means to be used, or for which it has no other."""


def subpackage(module: str) -> str:
    """The sub-package that a module is in; "" for the package itself."""
    return module.partition(".")[2].partition(".")[0]


def sources() -> list[Path]:
    return sorted(PACKAGE.rglob("*.py"))


@cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def test_imports_go_down():
    up = [
        f"{module} imports {target}"
        for module, targets in sorted(imports().items())
        for target in sorted(targets)
        if subpackage(module) != subpackage(target) and LAYERS[subpackage(module)] <= LAYERS[subpackage(target)]
    ]
    assert not up


def test_no_circles():
    in_order(imports())


@pytest.mark.slow
@pytest.mark.parametrize("name", ["", *LIGHT])
def test_light_modules_import_nothing_heavy(name):
    modules = [f"pyterrier_longdoc.{name}".rstrip(".")]
    folder = PACKAGE.joinpath(*name.split("."))
    if name and folder.is_dir():
        modules += [each.name for each in pkgutil.walk_packages([str(folder)], prefix=f"{modules[0]}.")]
    code = (
        f"import importlib, sys\nfor name in {modules!r}: dir(importlib.import_module(name))\n"
        f"print([name for name in {HEAVY!r} if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_public_names_are_listed():
    assert set(ld.__all__) <= set(dir(ld))
    with pytest.raises(AttributeError, match="'MaxSin'; did you mean 'MaxSim'"):
        _ = ld.MaxSin


@pytest.mark.parametrize("name", ["", *SUBPACKAGES])
def test_public_names_have_docstrings(name):
    package = importlib.import_module(f"pyterrier_longdoc.{name}".rstrip("."))
    bare = [public for public in package.__all__ if not documented(getattr(package, public), public)]
    assert not bare
    assert package.__doc__


def documented(value: Any, name: str) -> bool:
    """Whether a class or function has a docstring of its own, or a constant one beneath it."""
    if inspect.isclass(value):
        text = vars(value).get("__doc__") or ""
        return bool(text) and not text.startswith(f"{name}(")  # what dataclass writes
    if inspect.isroutine(value):
        return bool(value.__doc__)
    return any(name in constants_with_docstrings(path) for path in sources())


@cache
def constants_with_docstrings(path: Path) -> set[str]:
    found = set()
    for node, after in zip(tree(path).body, tree(path).body[1:], strict=False):
        if isinstance(node, ast.Assign | ast.AnnAssign) and isinstance(after, ast.Expr):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            if isinstance(after.value, ast.Constant) and isinstance(after.value.value, str):
                found |= {target.id for target in targets if isinstance(target, ast.Name)}
    return found


def test_public_names_are_in_the_documentation():
    pages = "\n".join(path.read_text(encoding="utf-8") for path in (PACKAGE / "pt_docs").glob("*.rst"))
    listed = re.findall(r"^\.\. auto\w+:: pyterrier_longdoc\.([\w.]+)$", pages, re.MULTILINE)
    assert len(listed) == len(set(listed)), "a name is documented twice"
    found = [looked_up(*name.rpartition(".")[::2]) for name in listed]
    missing = [
        f"{package}.{name}".lstrip(".")
        for package in ("", *SUBPACKAGES)
        for name in importlib.import_module(f"pyterrier_longdoc.{package}".rstrip(".")).__all__
        if not any(looked_up(package, name) is value for value in found)
    ]
    assert not missing, f"without an `.. autoclass::` line (or autofunction, ...) in pt_docs: {missing}"


def looked_up(package: str, name: str) -> Any:
    """A public name's value; the names of a page that no longer exist are an error here."""
    return getattr(importlib.import_module(f"pyterrier_longdoc.{package}".rstrip(".")), name)


def test_private_names_stay_in_their_file():
    foreign = [
        f"{path.relative_to(PACKAGE)}, line {node.lineno}: {ast.unparse(node)}"
        for path in sources()
        for node in ast.walk(tree(path))
        if isinstance(node, ast.Attribute)
        and node.attr.startswith("_")
        and not node.attr.startswith("__")
        and not is_own(node.value)
        and node.attr not in private_names_of_classes(path)
        and node.attr not in OF_LIBRARIES
    ]
    assert not foreign


@cache
def private_names_of_classes(path: Path) -> set[str]:
    """Methods and attributes with an underscore of the classes of a file."""
    found = set()
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.ClassDef):
            found |= {part.name for part in node.body if isinstance(part, ast.FunctionDef)}
            found |= {ast.unparse(part.target) for part in node.body if isinstance(part, ast.AnnAssign)}
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and is_own(node.value):
            found.add(node.attr)
    return {name for name in found if name.startswith("_")}


def is_own(value: ast.expr) -> bool:
    """Whether an expression is `self`, `cls` or `super()`."""
    if isinstance(value, ast.Call):
        return isinstance(value.func, ast.Name) and value.func.id == "super"
    return isinstance(value, ast.Name) and value.id in ("self", "cls")


def test_lists_of_tests_name_files():
    assert [file for file in (*QUICK, *reading.FROM_FILES) if not Path(__file__).parent.joinpath(file).is_file()] == []
