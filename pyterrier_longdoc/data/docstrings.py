"""Known-item search in the documentation of installed Python packages.

The collection has long English documents, queries and relevance labels, and needs no download. The first sentence of a
docstring is a query; the rest of the docstring is its only relevant document. Sources are parsed (`ast`), not imported.
The collection depends on the installed versions of the packages: report `DocstringsDataset.versions` with results.
"""

from __future__ import annotations

import ast
import gc
import importlib.metadata
import importlib.util
import inspect
import json
import logging
import os
import platform
import re
import sysconfig
import textwrap
import warnings
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from hashlib import blake2b
from itertools import chain, count, starmap
from pathlib import Path

import pyterrier as pt

from ..common.files import read_jsonl, write_jsonl
from ..common.language import count_tokens
from .collection import CollectionParts, PositionedCollection
from .rows import qrels_frame, topics_frame

_log = logging.getLogger(__name__)

STDLIB = "stdlib"
_NAMES = (STDLIB, "matplotlib", "numpy", "pandas", "scipy", "sklearn", "torch", "transformers")
PACKAGES: dict[str, str] = {name: name for name in _NAMES} | {STDLIB: "", "sklearn": "scikit-learn"}
"""Import name -> distribution name of the default packages; packages that are not installed are skipped."""

SPLITS = ("train", "dev", "test")
LONG_TOKENS = 512  # BERT's maximum input length
VARIANTS = (*SPLITS, *(f"{split}-long" for split in SPLITS))

MIN_DOCUMENT_WORDS = 50
MIN_QUERY_WORDS = 4
MAX_QUERY_WORDS = 40

_FORMAT = 1  # increment when the rules below change, so that cached collections are rebuilt
_SKIPPED_FOLDERS = re.compile(
    r"_?tests?|_?testing|site-packages|dist-packages|lib2to3|idlelib|turtledemo|ensurepip"
    r"|_?externals?|_?vendor(ed)?|third_party|__pycache__"
)
# Not imported from `common.language`, where they can change: the topics are published.
_SENTENCE_END = re.compile(r"(?<!\be\.g)(?<!\bi\.e)(?<!\bvs)(?<!\bcf)[.!?](?=\s+[^a-z\s]|\s*$)")
_LETTERS = re.compile(r"[^\W\d_]{2,}")  # a word that is not a number
_LONG_STRING = re.compile(rb'("""|\'\'\')(?:(?!\1).){100}', re.DOTALL)
_RULER = re.compile(r"[^\w\s]{3,}\s*$")
_PARAGRAPH_END = re.compile(r"\n[ \t]*\n")
_ROLE = re.compile(r":[\w:+-]+:`(?:~(?:[\w.]*\.)?|[!.\\]*)([^`<]*?)\s*(?:<[^>]*>)?`")
_MARKUP = re.compile(r"`+|\*\*?(?=\w)|(?<=\w)\*\*?")
_NOT_PROSE = re.compile(r"^\w+:|\boptional[,)]|%\(\w+\)s|\{\w*\}|^[\w.]+\(.*\)(\s*->.*)?$|^[Cc]opyright\b|https?://")
_DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


@dataclass(frozen=True)
class Entry:
    """A document of the collection and its topic."""

    docno: str  # dotted path of the documented object, such as numpy.linalg.svd
    text: str  # the docstring without its first sentence
    query: str  # the first sentence; empty if it is not used as a topic
    tokens: int  # of the text, see `count_tokens`


def split_of(docno: str) -> str:
    """Return the split of a document: 70 % train, 10 % dev, 20 % test.

    It only depends on the docno, so that a document stays in its split when packages are added or updated.
    """
    bucket = int.from_bytes(blake2b(docno.encode(), digest_size=8).digest(), "big") % 100
    return "train" if bucket < 70 else "dev" if bucket < 80 else "test"


def split_summary(docstring: str) -> tuple[str, str]:
    """Split a docstring into its first sentence, cleaned, and the rest.

    The sentence ends with the first paragraph at the latest. Line breaks, reStructuredText markup and the final full
    stop or colon are removed, because users do not type them into a search box.

    Example:
        >>> split_summary("Return the :class:`~a.Pool` in *use*. More.")
        ('Return the Pool in use', 'More.')
    """
    lines = inspect.cleandoc(docstring).splitlines()
    while lines and (not lines[0].strip() or _RULER.match(lines[0])):
        del lines[0]
    if len(lines) > 1 and _RULER.match(lines[1]):
        lines[1] = ""  # the first line is an underlined title, a separate paragraph
    body = "\n".join(lines)
    paragraph = _PARAGRAPH_END.split(body, maxsplit=1)[0]
    sentence = _SENTENCE_END.search(paragraph)
    end = sentence.end() if sentence else len(paragraph)
    return _plain(body[:end]).rstrip(" .:"), textwrap.dedent(body[end:]).strip()


def collect(packages: Mapping[str, Path]) -> list[Entry]:
    """Read the docstrings of packages.

    A docstring is kept if it has at least `MIN_DOCUMENT_WORDS` words after its first sentence; of equal texts, the
    first by docno is kept. The sentence is a topic unless it has fewer than `MIN_QUERY_WORDS` or more than
    `MAX_QUERY_WORDS` words, is a signature or a template, occurs verbatim in its document, or is shared by docstrings
    with different texts. Comparisons ignore letter case and white space.

    Args:
        packages: import name -> package folder; for the name `STDLIB`, a folder of top-level modules. Folders with
            tests or vendored packages, and files that cannot be read or parsed, are skipped.

    Returns:
        The documents, sorted by docno.
    """
    was_enabled = gc.isenabled()
    gc.disable()  # nearly halves the time: syntax trees have no cycles, but garbage collection visits all nodes
    try:
        docstrings = list(chain.from_iterable(starmap(_docstrings, packages.items())))
    finally:
        if was_enabled:
            gc.enable()
    candidates: dict[str, tuple[str, str]] = {}
    for docno, docstring in docstrings:
        query, text = split_summary(docstring)
        if len(text.split()) >= MIN_DOCUMENT_WORDS:
            names = chain([docno], (f"{docno}#{number}" for number in count(2)))
            candidates[next(name for name in names if name not in candidates)] = (query, text)
    first_of_text: dict[str, Entry] = {}
    texts_of_query: dict[str, set[str]] = {}
    for docno, (query, text) in sorted(candidates.items()):
        key = folded(text)
        texts_of_query.setdefault(folded(query), set()).add(key)
        if key not in first_of_text:
            topic = query if _is_topic(query, text) else ""
            first_of_text[key] = Entry(docno, text, topic, count_tokens(text))
    return [
        entry if len(texts_of_query.get(folded(entry.query), ())) == 1 else replace(entry, query="")
        for entry in first_of_text.values()
    ]


def installed_packages() -> dict[str, Path]:
    """Return the folders of the installed `PACKAGES` by name, without importing them."""
    folders = {}
    for name in PACKAGES:
        if name == STDLIB:
            folders[name] = Path(sysconfig.get_path("stdlib"))
            continue
        with suppress(ValueError):  # a module in memory without a specification
            spec = importlib.util.find_spec(name)
            if spec is not None and spec.submodule_search_locations:
                folders[name] = Path(spec.submodule_search_locations[0])
    return folders


class DocstringsDataset(PositionedCollection):
    """Known-item search in Python documentation: ``pt.get_dataset("longdoc:docstrings")``.

    Variants of topics and qrels are ``train``, ``dev`` and ``test`` (the default), and ``train-long``, ``dev-long`` and
    ``test-long``, which have the topics with documents of more than 512 tokens (`count_tokens`). All variants share the
    corpus. Documents have the fields ``text`` and ``title``. The title is the dotted path of the documented object,
    which makes retrieval easy: do not index it if the task should stay hard.

    The default collection is built once for each set of package versions (in half a minute) and stored in the folder
    ``longdoc`` of PyTerrier's home.

    Args:
        packages: import name -> folder, instead of the installed `PACKAGES`; such a collection is not stored on disk.
    """

    def __init__(self, packages: Mapping[str, Path] | None = None) -> None:
        super().__init__("docstrings", self._parts, default="test", variants=VARIANTS)
        self._packages = packages

    @cached_property
    def entries(self) -> list[Entry]:
        """All documents with their queries, sorted by docno; read or built on first use."""
        if self._packages is not None:
            return collect(self._packages)
        recipe = {"format": _FORMAT, "versions": self.versions}
        key = blake2b(json.dumps(recipe, sort_keys=True).encode(), digest_size=8).hexdigest()
        file = Path(pt.io.pyterrier_home(), "longdoc", f"docstrings-{key}.jsonl.gz")
        try:
            _, *rows = (row for _, row in read_jsonl(file))
            return [Entry(**row) for row in rows]
        except FileNotFoundError:
            _log.info("building %s", file)
        entries = collect(installed_packages())
        write_jsonl(file, [recipe, *map(asdict, entries)])
        return entries

    @property
    def versions(self) -> dict[str, str]:
        """The versions of the packages in the collection, by name."""
        packages = installed_packages() if self._packages is None else self._packages
        return {name: _version(name) for name in packages}

    def get_topics_lang(self) -> str:
        """Return the language of the topics, English."""
        return "en"

    get_corpus_lang = get_topics_lang

    def _parts(self) -> CollectionParts:
        topics = {f"q-{e.docno}": e for e in self.entries if e.query}
        splits: dict[str, list[str]] = {variant: [] for variant in VARIANTS}
        for qid, e in topics.items():
            splits[split_of(e.docno)].append(qid)
            if e.tokens > LONG_TOKENS:
                splits[f"{split_of(e.docno)}-long"].append(qid)
        return CollectionParts(
            {e.docno: {"docno": e.docno, "text": e.text, "title": e.docno} for e in self.entries},
            topics_frame((qid, e.query) for qid, e in topics.items()),
            qrels_frame((qid, e.docno, 1) for qid, e in topics.items()),
            splits=splits,
            lengths=lambda: (e.tokens for e in self.entries),
        )

    def __repr__(self) -> str:
        return f"DocstringsDataset({'' if self._packages is None else list(self._packages)})"


def folded(text: str) -> str:
    """Normalize letter case and white space of a text."""
    return " ".join(text.casefold().split())


def _plain(text: str) -> str:
    return " ".join(_MARKUP.sub("", _ROLE.sub(r"\1", text)).split())


def _is_topic(query: str, text: str) -> bool:
    if not MIN_QUERY_WORDS <= len(_LETTERS.findall(query)) <= MAX_QUERY_WORDS or _NOT_PROSE.search(query):
        return False
    return query.casefold() not in _plain(text).casefold()


def _docstrings(name: str, root: Path) -> Iterator[tuple[str, str]]:
    """Yield the dotted path and the docstring of each documented object in a package."""
    prefix = () if name == STDLIB else (name,)
    for folder, folders, files in os.walk(root):
        folders[:] = sorted(name for name in folders if not _SKIPPED_FOLDERS.fullmatch(name))
        for file in sorted(files):
            is_source = file.endswith(".py") and not file.startswith(("test_", "conftest"))
            path = Path(folder, file)
            if is_source and (tree := _parse(path)) is not None:
                module = ".".join((*prefix, *path.relative_to(root).with_suffix("").parts))
                yield from _definitions(tree, module.removesuffix(".__init__"))


def _parse(file: Path) -> ast.Module | None:
    try:
        source = file.read_bytes()
        if not _LONG_STRING.search(source):
            return None  # no string is long enough, and parsing takes most of the time
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # other people's invalid escape sequences
            return ast.parse(source)
    except (OSError, SyntaxError, ValueError, RecursionError) as error:
        _log.debug("skipped %s: %s", file, error)
        return None


def _definitions(node: ast.AST, path: str) -> Iterator[tuple[str, str]]:
    if isinstance(node, _DOCUMENTED):
        docstring = ast.get_docstring(node)
        if docstring:
            # Lone surrogates (in docstrings about encodings) cannot be written to any index.
            yield path, docstring.encode("utf-8", "replace").decode()
    if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
        return  # definitions inside a function have no dotted path
    for block in ("body", "handlers", "orelse", "finalbody"):
        for child in getattr(node, block, ()):
            name = child.name if isinstance(child, _DOCUMENTED[1:]) else ""
            yield from _definitions(child, f"{path}.{name}".strip(".") if name else path)


def _version(name: str) -> str:
    if name == STDLIB:
        return platform.python_version()
    try:
        return importlib.metadata.version(PACKAGES.get(name, name))
    except importlib.metadata.PackageNotFoundError:
        return "unknown"
