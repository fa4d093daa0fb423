"""Importing the package is cheap, and its public names are listed and documented."""

from __future__ import annotations

import importlib
import inspect
import re
import subprocess
import sys
from pathlib import Path

import pytest

import pyterrier_longdoc as ld

PACKAGE = Path(ld.__file__).parent
LIGHT = (
    "common",
    "comparison",
    "data",
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
WITH_PUBLIC_NAMES = ("", "analysis", "comparison", "data", "listwise", "passages", "scale", "training")


IMPORT_ALL_OF = """
import importlib, pkgutil, sys

for name in sys.argv[1:]:
    module = importlib.import_module(name)
    if "." in name and hasattr(module, "__path__"):
        for inside in pkgutil.walk_packages(module.__path__, f"{name}."):
            importlib.import_module(inside.name)
    loaded = {"torch", "transformers", "matplotlib"} & sys.modules.keys()
    if loaded:
        sys.exit(f"{name} loads {loaded}")
"""


def module(name: str):
    return importlib.import_module(f"pyterrier_longdoc.{name}".rstrip("."))


@pytest.mark.slow
def test_import_loads_neither_torch_nor_transformers_nor_matplotlib():
    names = ["pyterrier_longdoc", *(f"pyterrier_longdoc.{name}" for name in LIGHT)]
    done = subprocess.run([sys.executable, "-c", IMPORT_ALL_OF, *names], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_public_names_are_listed():
    assert set(ld.__all__) <= set(dir(ld))


def test_a_misspelt_public_name_suggests_the_right_one():
    with pytest.raises(AttributeError, match="did you mean 'MaxSim'"):
        _ = ld.MaxSin


def test_public_classes_and_functions_have_docstrings_that_say_more_than_their_names():
    named = [
        (name, public, getattr(module(name), public)) for name in WITH_PUBLIC_NAMES for public in module(name).__all__
    ]
    silent = []
    for package, name, value in named:
        if not (inspect.isclass(value) or inspect.isfunction(value)):
            continue
        # Not `inspect.getdoc`, which gives a class the docstring of its base.
        doc = value.__doc__ or ""
        is_generated = doc.startswith(f"{name}(")  # by dataclass
        if is_generated or words(doc) <= words(name) | {"a", "an", "the", "of", "s"}:
            silent.append(f"{package}.{name}".lstrip("."))
    assert silent == []


@pytest.mark.parametrize("name", WITH_PUBLIC_NAMES)
def test_docstrings_describe_every_argument_and_no_other(name):
    """Arguments in `Args:`; the fields of data also in `Attributes:`."""
    wrong = {}
    for public in module(name).__all__:
        value = getattr(module(name), public)
        is_protocol = getattr(value, "_is_protocol", False)
        if not callable(value) or is_protocol or (inspect.isclass(value) and issubclass(value, Exception)):
            continue
        arguments = set(inspect.signature(value).parameters)
        described = entries(value, "Args")
        missing = arguments - described - entries(value, "Attributes")
        if missing or described - arguments:
            wrong[public] = (missing, described - arguments)
    assert wrong == {}


def entries(value: object, section: str) -> set[str]:
    """The names with an entry in a section of a docstring."""
    doc = inspect.cleandoc(value.__doc__ or "")
    lines = "".join(re.findall(rf"^{section}:\n((?: .*\n?)+)", doc, re.MULTILINE))
    return set(re.findall(r"^    \**(\w+): \S", lines, re.MULTILINE))


def words(text: str) -> set[str]:
    """The words of a text, also those of names in snake and camel case."""
    return {word.lower() for word in re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d+", text)}


@pytest.mark.parametrize("name", WITH_PUBLIC_NAMES)
def test_public_names_are_in_the_documentation(name):
    pages = "\n".join(path.read_text(encoding="utf-8") for path in (PACKAGE / "pt_docs").glob("*.rst"))
    listed = re.findall(r"^\.\. auto\w+:: pyterrier_longdoc\.([\w.]+)$", pages, re.MULTILINE)
    documented = [getattr(module(package), public) for package, _, public in (each.rpartition(".") for each in listed)]
    public = module(name)
    assert [each for each in public.__all__ if not any(getattr(public, each) is value for value in documented)] == []
