"""What README, pages, notebooks and model cards name exists: modules, arguments, files, commands, extras, models.

The code of the texts is read here, not run: `test_readme.py` and `test_notebooks.py` run what can be run.
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
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest

import pyterrier_longdoc as ld
from pyterrier_longdoc.common.packaged import ENCODER, packaged_models
from pyterrier_longdoc.data.provider import LongDocDatasetProvider

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib  # pytest needs it there

ROOT = Path(__file__).parents[1]
PACKAGE = Path(ld.__file__).parent
TEXTS = [
    *(ROOT / name for name in ("README.md", "CHANGELOG.md", ".github/CONTRIBUTING.md", "tests/benchmarks/README.md")),
    *sorted((PACKAGE / "models").glob("*/README.md")),
    *sorted((PACKAGE / "pt_docs").glob("*.rst")),
    *sorted((ROOT / "notebooks").glob("*.ipynb")),
]
NAME = re.compile(r"(?<![\w./\"'-])(?:ld|pt|pyterrier_longdoc|pyterrier_caching)(?:\.[A-Za-z]\w*)+(?![\w/-])")
FILE = r"[\w-]+\.(?:py|rst|md|ipynb|toml|csv|svg|bib)"
PYTHON = (
    re.compile(r"()```(?:python|py)\n(.*?)```", re.DOTALL),
    re.compile(r"^( *)\.\. code-block:: (?:python|py)\n\n((?:\1    .*\n|\n)+)", re.MULTILINE),
)
WRITTEN_BY_THE_READER = {"program.py", "train.py", "rerank.py", "gpu.json"}

CODE_OF_DOCSTRING = re.compile(r"`([^`]*\bld\.[^`]*\([^`]*)`")


def text_of(path: Path) -> str:
    """A text; of a notebook the cells, code fenced as in Markdown."""
    text = path.read_text(encoding="utf-8")
    if path.suffix != ".ipynb":
        return text
    cells = [(cell["cell_type"], "".join(cell["source"])) for cell in json.loads(text)["cells"]]
    return "\n\n".join(f"```python\n{source}\n```" if kind == "code" else source for kind, source in cells)


def looked_up(dotted: str):
    """The value of a dotted name, None for a field of a dataclass; AttributeError or ImportError without one."""
    first, *rest = dotted.split(".")
    value = importlib.import_module({"ld": "pyterrier_longdoc", "pt": "pyterrier"}.get(first, first))
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


def unknown_arguments(*codes: str) -> list[str]:
    """Keywords of calls of something in `ld` or `pt` that its signature lacks."""
    calls = [node for code in codes for node in ast.walk(ast.parse(code)) if isinstance(node, ast.Call)]
    found = []
    for call in calls:
        dotted = ast.unparse(call.func)
        if not NAME.fullmatch(dotted):
            continue
        if not is_there(dotted):
            found.append(dotted)
            continue
        if not callable(looked_up(dotted)):
            continue
        parameters = inspect.signature(looked_up(dotted)).parameters
        if not any(each.kind is each.VAR_KEYWORD for each in parameters.values()):
            found += [f"{dotted}({word.arg}=)" for word in call.keywords if word.arg and word.arg not in parameters]
    return found


def absent_from(check: Callable[[str, Path], Iterable[str]]) -> dict[str, list[str]]:
    """Per text what `check` does not find, without texts of which it finds everything."""
    found = {path.relative_to(ROOT).as_posix(): sorted(check(text_of(path), path)) for path in TEXTS}
    return {path: names for path, names in found.items() if names}


def test_names_of_modules_classes_and_functions_exist():
    def absent(text, path):
        named = {name for name in NAME.findall(text) if not name.endswith((".py", ".rst", ".md"))}
        return [name for name in named if not is_there(name)]

    assert absent_from(absent) == {}


def test_arguments_in_code_exist():
    def absent(text, path):
        codes = [textwrap.dedent(code) for pattern in PYTHON for _, code in pattern.findall(text)]
        return unknown_arguments(*(re.sub(r"^[%!].*$", "", code, flags=re.MULTILINE) for code in codes))

    assert absent_from(absent) == {}


def test_arguments_in_docstrings_exist():
    documented = [getattr(ld, name) for name in ld.__all__ if callable(getattr(ld, name))]
    codes = [code for value in documented for code in CODE_OF_DOCSTRING.findall(inspect.getdoc(value) or "")]
    assert unknown_arguments(*codes) == []


def test_extras_exist():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]

    def absent(text, path):
        named = re.findall(r"(?:\.|PATH)\[([\w,]+)\]", text)
        return set(",".join(named).split(",")) - {""} - set(project["optional-dependencies"])

    assert absent_from(absent) == {}


def test_files_exist():
    ends = [f"{file.as_posix()}/" for file in [*PACKAGE.rglob("*"), *(ROOT / "tests").rglob("*")]]

    def absent(text, path):
        links = re.findall(r"\]\((?!https?:|#)([^)#\s]+)", text) if path.suffix == ".md" else []
        named = set(re.findall(rf"`((?:[\w.-]+/)+(?:{FILE})?|{FILE})`", text)) - WRITTEN_BY_THE_READER
        not_here = [name for name in named if not any((folder / name).exists() for folder in (ROOT, path.parent))]
        nowhere = [name for name in not_here if not any(end.endswith(f"/{name.rstrip('/')}/") for end in ends)]
        return [link for link in links if not (path.parent / link).exists()] + nowhere

    assert absent_from(absent) == {}


def test_commands_run_files_and_modules_that_exist():
    def absent(text, path):
        commands = set(re.findall(r"python[\d.]* (-m )?([\w./]+)", text))
        modules = [name for is_module, name in commands if is_module]
        files = {name for is_module, name in commands if not is_module and name.endswith(".py")} - WRITTEN_BY_THE_READER
        no_modules = [name for name in modules if importlib.util.find_spec(name) is None]
        return no_modules + [name for name in files if not (ROOT / name).is_file()]

    assert absent_from(absent) == {}


def test_models_and_collections_of_longdoc_exist():
    with pytest.raises(ValueError, match="collection") as error:
        LongDocDatasetProvider().get_dataset("nothing")
    known = {*packaged_models(), ENCODER, *re.findall(r"longdoc:[\w-]+", str(error.value))}
    assert absent_from(lambda text, path: set(re.findall(r"(?<![\w-])longdoc:[a-z][\w-]*\w", text)) - known) == {}


@pytest.mark.parametrize("name", packaged_models())
def test_the_card_of_a_packaged_model_loads_that_model(name):
    card = (PACKAGE / "models" / name.removeprefix("longdoc:") / "README.md").read_text(encoding="utf-8")
    assert re.findall(r'\.load\("([^"]+)"\)', card) == [name]
    assert "Licence" in card
