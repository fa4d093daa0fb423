"""Every name, file and command that a reader finds in README, pages, notebooks and model cards is there.

Code is read, not run (`test_readme.py` and `test_notebooks.py` run it): names are looked up in the packages that are
installed, files in the tree, arguments in signatures and in the text of scripts. Nothing asks the network.
"""

from __future__ import annotations

import ast
import importlib
import importlib.util
import inspect
import json
import re
import sys
import textwrap
from collections.abc import Iterator
from functools import cache
from importlib.metadata import PackageNotFoundError, distribution, distributions
from pathlib import Path
from typing import Any

import pytest

import pyterrier_longdoc
from pyterrier_longdoc.common.packaged import ENCODER, packaged_models
from pyterrier_longdoc.data.provider import LongDocDatasetProvider

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib  # pytest needs it there

ROOT = Path(__file__).parents[1]
PACKAGE = Path(pyterrier_longdoc.__file__).parent
TEXTS = [
    *(ROOT / name for name in ("README.md", "CHANGELOG.md", ".github/CONTRIBUTING.md", "tests/benchmarks/README.md")),
    ROOT / "tests/benchmarks/packaged_card.md",
    *sorted((PACKAGE / "models").glob("*/README.md")),
    *sorted((PACKAGE / "pt_docs").glob("*.rst")),
    *sorted((ROOT / "notebooks").glob("*.ipynb")),
]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
ALIASES = {"ld": "pyterrier_longdoc", "pt": "pyterrier", "training": "pyterrier_longdoc.training"}
ALIASES |= {"experiment": "pyterrier_longdoc.experiment", "analysis": "pyterrier_longdoc.analysis"}
LATER = {"pyterrier_dr", "pyterrier_alpha"}
"""Packages that a text recommends and that are no dependency."""
MADE_UP = {"program.py", "train.py", "rerank.py", "gpu.json"}
"""Files that the reader writes, or a command."""

CHAIN = re.compile(r"(?<![\w./\"'-])(ld|pt|pyterrier_longdoc|pyterrier_caching)((?:\.[A-Za-z]\w*)+)(?![\w/-])")
FILE = r"[\w-]+\.(?:py|rst|md|ipynb|toml|csv|svg|bib)"
FENCED = re.compile(r"```(?:python|py)\n(.*?)```", re.DOTALL)
BLOCKS = re.compile(r"^( *)\.\. code-block:: (?:python|py)\n\n((?:\1    .*\n|\n)+)", re.MULTILINE)


@cache
def parts(path: Path) -> tuple[str, tuple[str, ...]]:
    """The prose of a text, with all that its code says, and its Python code apart."""
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".ipynb":
        cells = json.loads(text)["cells"]
        code = tuple("".join(cell["source"]) for cell in cells if cell["cell_type"] == "code")
        prose = "\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "markdown")
        return f"{prose}\n\n" + "\n".join(code), code
    found = FENCED.findall(text) if path.suffix == ".md" else [match[1] for match in BLOCKS.findall(text)]
    return text, tuple(textwrap.dedent(code) for code in found)


def called(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


each_text = pytest.mark.parametrize("path", TEXTS, ids=called)


def looked_up(dotted: str) -> Any:
    """What a dotted name stands for: modules as far as they go, then attributes; an error if there is none."""
    first, *rest = dotted.split(".")
    value: Any = importlib.import_module(ALIASES.get(first, first))
    for name in rest:
        if inspect.ismodule(value) and not hasattr(value, name):
            value = importlib.import_module(f"{value.__name__}.{name}")
        elif inspect.isclass(value) and name in getattr(value, "__dataclass_fields__", {}):
            return None
        else:
            value = getattr(value, name)
    return value


def is_there(dotted: str) -> bool:
    try:
        looked_up(dotted)
    except (AttributeError, ImportError):
        return False
    return True


@each_text
def test_names_of_modules_are_there(path):
    """`ld.MaxP`, `pt.terrier.TerrierIndex.from_dataset`, `pyterrier_longdoc.data`, in prose and in code."""
    named = {f"{root}{rest}" for root, rest in CHAIN.findall(parts(path)[0])}
    named = {name for name in named if name.rpartition(".")[2] not in ("py", "rst", "md")}
    assert sorted(name for name in named if not is_there(name)) == []


@each_text
def test_code_imports_and_arguments_are_there(path):
    missing = []
    for code in parts(path)[1]:
        tree = ast.parse(re.sub(r"^[%!].*$", "", code, flags=re.MULTILINE))
        missing += [name for name in imported(tree) if name.split(".")[0] not in LATER and not is_there(name)]
        missing += [fault for node in ast.walk(tree) if isinstance(node, ast.Call) for fault in unknown_arguments(node)]
    assert missing == []


def imported(tree: ast.AST) -> Iterator[str]:
    """Dotted names of what code imports."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def unknown_arguments(call: ast.Call) -> Iterator[str]:
    """Keywords of a call of something in `ld` or `pt` that its signature does not have."""
    dotted = ast.unparse(call.func)
    if not CHAIN.fullmatch(dotted) or not is_there(dotted):
        return
    function = looked_up(dotted)
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError):
        return
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()) and not classmethods(function):
        return
    known = set(parameters) | fields_of_class(function)
    yield from (f"{dotted}({word.arg}=)" for word in call.keywords if word.arg and word.arg not in known)


def classmethods(function: Any) -> bool:
    """Whether it is a class method of a class with fields, such as `load` and `preset`, whose others are fields."""
    owner = function.__self__ if inspect.ismethod(function) else None
    return inspect.isclass(owner) and hasattr(owner, "__dataclass_fields__")


def fields_of_class(function: Any) -> set[str]:
    return set(function.__self__.__dataclass_fields__) if classmethods(function) else set()


@each_text
def test_extras_and_packages_are_there(path):
    """`pip install '.[demo]'`, `PATH[llm]`, and packages that are named alone."""
    text = parts(path)[0]
    extras = {extra for listed in re.findall(r"(?:\.|PATH)\[([\w,]+)\]", text) for extra in listed.split(",")}
    assert extras <= set(PROJECT["optional-dependencies"])
    wanted = set()
    for line in re.findall(r"pip install ([^`\n&|);#]+)", text):
        words = [word.strip("\"'.,") for word in line.split() if not word.startswith("-")]
        wanted |= {re.split(r"[<>=\[]", word)[0] for word in words if not re.match(r"PATH|https?:|\[", word)}
    assert sorted(name for name in wanted if name and not is_known_package(name)) == []


def is_known_package(name: str) -> bool:
    """Whether it is installed, wanted by the project, or an option of an installed package."""
    try:
        return bool(distribution(name))
    except PackageNotFoundError:
        return normal(name) in {normal(re.split(r"[\s<>=;\[!~(]", each)[0]) for each in requirements()}


def normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


@cache
def requirements() -> tuple[str, ...]:
    own = [*PROJECT["dependencies"], *(each for extra in PROJECT["optional-dependencies"].values() for each in extra)]
    return tuple(own + [each for installed in distributions() for each in installed.requires or ()])


@each_text
def test_commands_are_there(path):
    """`python -m module` and `python file.py`: the module or file, its subcommand, and its options."""
    faults = []
    text = re.sub(r" *\\\n\s*", " ", parts(path)[0])
    for kind, name, rest in re.findall(r"python[\d.]* (-m )?([\w./]+)((?: [^`\n|>&]*)?)", text):
        source = source_of(name, bool(kind))
        if source is None:
            faults += [name] if kind or (name.endswith(".py") and name not in MADE_UP) else []
            continue
        options = re.findall(r"(?<=\s)(--[a-z][\w-]*)", rest)
        # Some scripts make options of a dictionary's keys.
        faults += [f"{name} {o}" for o in options if source and f'"{o}"' not in source and f'"{o[2:]}"' not in source]
    assert faults == []


def source_of(name: str, module: bool) -> str | None:
    """The text of what a command runs, the whole package for one; None if it is not there, "" if it is another's."""
    if not module:
        file = ROOT / name
        return with_helpers(file) if file.suffix == ".py" and file.is_file() else None
    spec = importlib.util.find_spec(name) if is_module(name) else None
    if spec is None or spec.origin is None:
        return None
    # An environment may stand in the clone itself.
    if "site-packages" in Path(spec.origin).parts or not Path(spec.origin).is_relative_to(ROOT):
        return ""
    folder = Path(spec.origin).parent if spec.submodule_search_locations else None
    return "\n".join(with_helpers(file) for file in (folder.glob("*.py") if folder else [Path(spec.origin)]))


def with_helpers(file: Path) -> str:
    """The text of a script, and of the scripts of the same folder that it imports, which may add options."""
    text = file.read_text(encoding="utf-8")
    names = re.findall(r"^(?:from|import) \.?(\w+)", text, re.MULTILINE)
    helpers = [file.parent / f"{name}.py" for name in names]
    return text + "".join(helper.read_text(encoding="utf-8") for helper in helpers if helper.is_file())


def is_module(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ImportError:
        return False


@each_text
def test_files_are_there(path):
    """Paths of the repository in backticks, and links of Markdown."""
    text = parts(path)[0]
    named = set(re.findall(rf"`((?:[\w.-]+/)+(?:{FILE})?|{FILE})`", text)) - MADE_UP
    links = re.findall(r"\]\((?!https?:|#)([^)#\s]+)", text) if path.suffix == ".md" else []
    absent = [link for link in links if not (path.parent / link).exists()]
    absent += [name for name in sorted(named) if not has_file(name, path)]
    assert absent == []


def has_file(name: str, path: Path) -> bool:
    """Whether there is such a path below the repository, the package, the tests or the text's own folder."""
    below = (ROOT, PACKAGE, ROOT / "tests", path.parent)
    return any((folder / name).exists() for folder in below) or any(PACKAGE.rglob(name)) or any(below[2].rglob(name))


@each_text
def test_names_of_longdoc_are_there(path):
    """Packaged models, the packaged encoder, and collections."""
    with pytest.raises(ValueError, match="there is no collection") as error:
        LongDocDatasetProvider().get_dataset("nothing")
    known = {*packaged_models(), ENCODER, *re.findall(r"longdoc:[\w-]+", str(error.value))}
    named = set(re.findall(r"(?<![\w-])longdoc:[a-z][\w-]*\w", parts(path)[0]))
    assert named <= known


WITHOUT_EXAMPLE = {"Above", "CallableBackend", "Experiment", "FirstK", "HuggingFaceBackend", "InputLayout", "LLMClient"}
WITHOUT_EXAMPLE |= {"SlidingWords", "merge_run", "read_far_relevant", "recipes", "reliability"}
"""Shown beside what they belong to, or on a page of their own."""


def examples() -> Iterator[Any]:
    """Public functions, and classes but for bases and warnings, with the example of their docstring."""
    for name in pyterrier_longdoc.__all__:
        value = getattr(pyterrier_longdoc, name)
        is_base = inspect.isclass(value) and (issubclass(value, Warning) or name in ("Head", "Windows"))
        if callable(value) and not is_base and name not in WITHOUT_EXAMPLE:
            yield pytest.param(f"{inspect.getdoc(value) or ''}\n", id=name)


@pytest.mark.parametrize("text", examples())
def test_examples_in_docstrings_name_what_is_there(text):
    example = re.search(r"^Examples?:\n((?:(?: .*)?\n)+)", text, re.MULTILINE) or re.search(r"`[^`]*\(.*`", text)
    assert example
    codes = re.findall(r"`([^`]+)`", example[0])
    trees = [ast.parse(code) for code in codes if "ld." in code]
    calls = [node for tree in trees for node in ast.walk(tree) if isinstance(node, ast.Call)]
    assert [fault for call in calls for fault in unknown_arguments(call)] == []
    assert sorted(f"{root}{rest}" for root, rest in CHAIN.findall(example[0]) if not is_there(f"{root}{rest}")) == []
