"""The collection of docstrings: what is a topic and a document, splits, and the file in which it is kept."""

import gzip
import json

import pytest

from pyterrier_longdoc.common.language import count_tokens
from pyterrier_longdoc.data import docstrings
from pyterrier_longdoc.data.docstrings import DocstringsDataset, collect, split_of, split_summary

from ..support.sources import write_modules


def words(seed, n=60):
    """A text of n words that differs from that of any other seed."""
    return " ".join(f"{seed}{i}" for i in range(n))


# ---------------------------------------------------------------- reading one


@pytest.mark.parametrize(
    ("docstring", "summary", "rest"),
    [
        ("Return the sum. Then more.\n\nAnd more.", "Return the sum", "Then more.\n\nAnd more."),
        ("Two lines\nof summary.\n\n  Indented\n    more", "Two lines of summary", "Indented\n  more"),
        ("No full stop at all\n\nRest", "No full stop at all", "Rest"),
        ("Use, e.g. Version 1.5 of it. Rest", "Use, e.g. Version 1.5 of it", "Rest"),
        ("=====\nTitle\n=====\nThe rest", "Title", "The rest"),
        ("Call :func:`~numpy.linalg.svd` and ``foo`` *now*.", "Call svd and foo now", ""),
        ("See :doc:`the guide <guide/index>`:\n\nRest", "See the guide", "Rest"),
        ("", "", ""),
    ],
)
def test_the_summary_is_the_first_sentence_without_markup(docstring, summary, rest):
    assert split_summary(docstring) == (summary, rest)


# ---------------------------------------------------------------- a tree of modules


def test_docstrings_of_modules_classes_and_functions_are_named_by_their_path(tmp_path):
    (tmp_path / "sub").mkdir()
    doc = {key: f'"""Summary of the {key} object.\n\n    {words(key)}\n    """' for key in "abcdefg"}
    (tmp_path / "__init__.py").write_text(doc["a"])
    (tmp_path / "sub" / "mod.py").write_text(
        f"{doc['b']}\n"
        f"class K:\n    {doc['c']}\n    def m(self):\n        {doc['d']}\n"
        f"try:\n    pass\nexcept ImportError as missing:\n    async def g():\n        {doc['e']}\n"
        f"else:\n    def g():\n        {doc['f']}\n        def inner():\n            {doc['g']}\n"
    )
    expected = {
        "pkg": "Summary of the a object",
        "pkg.sub.mod": "Summary of the b object",
        "pkg.sub.mod.K": "Summary of the c object",
        "pkg.sub.mod.K.m": "Summary of the d object",
        "pkg.sub.mod.g": "Summary of the e object",
        "pkg.sub.mod.g#2": "Summary of the f object",
    }
    entries = collect({"pkg": tmp_path})
    assert {entry.docno: entry.query for entry in entries} == expected
    assert [entry.docno for entry in entries] == sorted(expected)
    assert entries[0].text == words("a")
    assert entries[0].tokens == 60


def test_modules_are_not_imported_and_broken_ones_are_skipped(tmp_path):
    write_modules(tmp_path, good=f"A function that is fine.\n\n{words('w')}")
    text = f'"""A module that leaves at once.\n\n{words("x")}\n"""\nraise SystemExit("imported")\n'
    (tmp_path / "exits.py").write_text(text)
    (tmp_path / "broken.py").write_text(f'"""A broken module of Python.\n\n{words("y")}\n"""\ndef :\n')
    (tmp_path / "binary.py").write_bytes(b'"""' + b"word " * 100 + b'"""\n\x00')
    (tmp_path / "latin.py").write_bytes(b'"""caf\xe9 ' + b"word " * 100 + b'"""\n')
    (tmp_path / "gone.py").symlink_to(tmp_path / "nowhere.py")
    assert [entry.docno for entry in collect({"pkg": tmp_path})] == ["pkg.exits", "pkg.good.f"]


def test_tests_and_vendored_packages_are_left_out(tmp_path):
    for number, folder in enumerate(("tests", "test", "_vendor", "externals", "site-packages", "kept")):
        write_modules(tmp_path / folder, mod=f"A summary of number {folder}.\n\n{words(f'w{number}x')}")
    write_modules(tmp_path, test_it=f"A summary in a test file.\n\n{words('t')}")
    assert [entry.docno for entry in collect({"pkg": tmp_path})] == ["pkg.kept.mod.f"]


FIT = "Fit the model to data."


@pytest.mark.parametrize(
    ("texts", "expected"),
    [
        pytest.param(
            {
                "a": ("Another summary with enough words.", words("b", 49)),
                "b": ("It has words enough.", words("a", 50)),
            },
            {"b": "It has words enough"},
            id="a document needs fifty words",
        ),
        pytest.param(
            {"a": ("Compute the ``Big`` values\n    of it.", f"{words('w')} compute the big\n    VALUES of it")},
            {"a": ""},
            id="a sentence that occurs in its document is no topic",
        ),
        pytest.param(
            {
                "a": (FIT, words("a")),
                "b": ("fit  the\n    Model to data", words("b")),
                "c": (FIT[:-5] + "text.", words("c")),
            },
            {"a": "", "b": "", "c": "Fit the model to text"},
            id="a sentence of two texts is no topic in any case and spacing",
        ),
        pytest.param(
            {"b": (FIT, words("w")), "a": (FIT, words("w"))}, {"a": FIT[:-1]}, id="the first of equal texts is kept"
        ),
        pytest.param(
            {"a": ("The first sentence of one.", words("w")), "b": (FIT, words("w")), "c": (FIT, words("v"))},
            {"a": "The first sentence of one", "c": ""},
            id="a sentence is ambiguous through a copy that is left out",
        ),
        pytest.param(
            {"a": (r"Handle surrogates in a text \ud800.", rf"{words('w')} \udfff")},
            {"a": "Handle surrogates in a text ?"},
            id="text can always be encoded",
        ),
    ],
)
def test_rules_decide_which_docstrings_become_documents_and_topics(tmp_path, texts, expected):
    write_modules(tmp_path, **{name: "\n\n".join(parts) for name, parts in texts.items()})
    entries = collect({"pkg": tmp_path})
    assert {entry.docno: entry.query for entry in entries} == {
        f"pkg.{name}.f": query for name, query in expected.items()
    }
    assert all(entry.text.encode() for entry in entries)


@pytest.mark.parametrize(
    "summary",
    [
        "Only three words",
        "svd(a, full_matrices=True, compute_uv=True) -> tuple of arrays",
        "Return the %(klass)s of the object",
        "Return the {klass} of the object",
        "Args: one two three four",
        "size (int, optional, defaults to 3): the size of it",
        "Copyright 2024 The Authors of this file",
        " ".join(["word"] * 41),
    ],
)
def test_a_docstring_without_a_summary_is_a_document_without_a_topic(tmp_path, summary):
    write_modules(tmp_path / "json", decoder=f"{summary}\n\n{words('w')}")
    [entry] = collect({docstrings.STDLIB: tmp_path})  # whose modules have no prefix
    assert (entry.docno, entry.query, entry.text) == ("json.decoder.f", "", words("w"))


# ---------------------------------------------------------------- the data set


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """200 documents, every fourth of them long."""
    modules = {f"m{n}": f"Function of module {n} here.\n\n{words(f'w{n}y', 60 if n % 4 else 600)}" for n in range(200)}
    return DocstringsDataset({"pkg": write_modules(tmp_path_factory.mktemp("pkg"), **modules)})


def test_splits_partition_the_topics(small):
    parts = {split: set(small.get_topics(split)["qid"]) for split in docstrings.SPLITS}
    assert sum(len(qids) for qids in parts.values()) == len(set.union(*parts.values())) == 200
    assert 120 < len(parts["train"]) < 160
    assert 20 < len(parts["test"]) < 60
    assert small.get_topics().equals(small.get_topics("test"))


@pytest.mark.parametrize(
    ("docno", "split"),
    [
        ("numpy.linalg._linalg.svd", "train"),
        ("pandas.core.frame.DataFrame", "test"),
        ("sklearn.cluster._mean_shift.mean_shift", "dev"),
    ],
)
def test_the_split_of_a_document_never_changes(docno, split):
    """One that moves from test to train would invalidate published numbers."""
    assert split_of(docno) == split


def test_long_variants_have_the_topics_with_long_documents(small):
    tokens = {docno: count_tokens(row["text"]) for docno, row in small.documents.items()}
    for split in docstrings.SPLITS:
        every, long = small.get_qrels(split), small.get_qrels(f"{split}-long")
        expected = [docno for docno in every["docno"] if tokens[docno] > 512]
        assert 0 < len(expected) < len(every)
        assert long["docno"].tolist() == expected
        assert small.get_topics(f"{split}-long")["qid"].tolist() == long["qid"].tolist()


# ---------------------------------------------------------------- kept on disk


@pytest.fixture
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTERRIER_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


@pytest.fixture
def installed(home, tmp_path, monkeypatch):
    """A package that is all that is installed."""
    folder = write_modules(tmp_path / "pkg", mod=f"A summary with enough words.\n\n{words('é')}")
    monkeypatch.setattr(docstrings, "installed_packages", lambda: {"pkg": folder})
    return folder


def test_the_default_collection_is_built_once_for_each_set_of_versions(home, installed, monkeypatch):
    first = DocstringsDataset().entries
    assert first == collect({"pkg": installed})
    [file] = (home / "longdoc").iterdir()
    with gzip.open(file, "rt") as stream:
        assert json.loads(next(stream)) == {"format": 1, "versions": {"pkg": "unknown"}}
    (installed / "mod.py").unlink()
    assert DocstringsDataset().entries == first
    monkeypatch.setattr(docstrings, "_version", lambda name: "2")
    assert DocstringsDataset().entries == []
    assert len(list((home / "longdoc").iterdir())) == 2
