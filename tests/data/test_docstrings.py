"""The collection of docstrings: what is a topic and a document, splits, and the file in which it is kept."""

import gzip
import json

import pytest

from pyterrier_longdoc.common.language import count_tokens
from pyterrier_longdoc.data import docstrings
from pyterrier_longdoc.data.docstrings import DocstringsDataset, collect, split_of, split_summary


def words(seed, n=60):
    """A text of n words that differs from that of any other seed."""
    return " ".join(f"{seed}{i}" for i in range(n))


def write_module(folder, name, **functions):
    """A module with one function for each docstring."""
    folder.mkdir(parents=True, exist_ok=True)
    body = [f'def {function}():\n    """{text}"""\n' for function, text in functions.items()]
    (folder / f"{name}.py").write_text("\n".join(body), encoding="utf-8")


def topics_of(entries):
    return {entry.docno: entry.query for entry in entries if entry.query}


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
    assert topics_of(entries) == expected
    assert [entry.docno for entry in entries] == sorted(expected)
    assert entries[0].text == words("a")
    assert entries[0].tokens == 60


def test_modules_are_not_imported_and_broken_ones_are_skipped(tmp_path):
    write_module(tmp_path, "good", f=f"A function that is fine.\n\n{words('w')}")
    text = f'"""A module that leaves at once.\n\n{words("x")}\n"""\nraise SystemExit("imported")\n'
    (tmp_path / "exits.py").write_text(text)
    (tmp_path / "broken.py").write_text(f'"""A broken module of Python.\n\n{words("y")}\n"""\ndef :\n')
    (tmp_path / "binary.py").write_bytes(b'"""' + b"word " * 100 + b'"""\n\x00')
    (tmp_path / "latin.py").write_bytes(b'"""caf\xe9 ' + b"word " * 100 + b'"""\n')
    (tmp_path / "gone.py").symlink_to(tmp_path / "nowhere.py")
    assert [entry.docno for entry in collect({"pkg": tmp_path})] == ["pkg.exits", "pkg.good.f"]


def test_tests_and_vendored_packages_are_left_out(tmp_path):
    for number, folder in enumerate(("tests", "test", "_vendor", "externals", "site-packages", "kept")):
        write_module(tmp_path / folder, "mod", f=f"A summary of number {folder}.\n\n{words(f'w{number}x')}")
    write_module(tmp_path, "test_it", f=f"A summary in a test file.\n\n{words('t')}")
    assert [entry.docno for entry in collect({"pkg": tmp_path})] == ["pkg.kept.mod.f"]


@pytest.mark.parametrize(
    ("texts", "expected"),
    [
        (  # a document needs fifty words
            {
                "a": f"Another summary with enough words.\n\n{words('b', 49)}",
                "b": f"It has words enough.\n\n{words('a', 50)}",
            },
            {"b": "It has words enough"},
        ),
        (  # a sentence that stands in its document is no topic
            {"a": f"Compute the ``Big`` values\n    of it.\n\n{words('w')} compute the big\n    VALUES of it"},
            {"a": ""},
        ),
        (  # nor is one for two texts, whatever its case and spacing
            {
                "a": f"Fit the model to data.\n\n{words('a')}",
                "b": f"fit  the\n    Model to data\n\n{words('b')}",
                "c": f"Fit the model to text.\n\n{words('c')}",
            },
            {"a": "", "b": "", "c": "Fit the model to text"},
        ),
        (  # of equal texts the first is taken
            {
                "b": f"Fit the model to data.\n\n{words('w')}",
                "a": f"Fit the model to data.\n\n{words('w')}",
            },
            {"a": "Fit the model to data"},
        ),
        (  # a sentence is ambiguous through a copy that is left out
            {
                "a": f"The first sentence of one.\n\n{words('w')}",
                "b": f"The sentence of two others.\n\n{words('w')}",
                "c": f"The sentence of two others.\n\n{words('v')}",
            },
            {"a": "The first sentence of one", "c": ""},
        ),
        (  # text can always be encoded
            {"a": rf"Handle surrogates in a text \ud800.\n\n{words('w')} \udfff"},
            {"a": "Handle surrogates in a text ?"},
        ),
    ],
)
def test_rules_decide_which_docstrings_become_documents_and_topics(tmp_path, texts, expected):
    write_module(tmp_path, "mod", **texts)
    entries = collect({"pkg": tmp_path})
    assert {entry.docno: entry.query for entry in entries} == {
        f"pkg.mod.{name}": query for name, query in expected.items()
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
    write_module(tmp_path / "json", "decoder", f=f"{summary}\n\n{words('w')}")
    [entry] = collect({docstrings.STDLIB: tmp_path})  # whose modules have no prefix
    assert (entry.docno, entry.query, entry.text) == ("json.decoder.f", "", words("w"))


# ---------------------------------------------------------------- the data set


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """200 documents, every fourth of them long."""
    folder = tmp_path_factory.mktemp("pkg")
    for n in range(20):
        length = 600 if n % 4 == 0 else 60
        write_module(
            folder,
            f"m{n}",
            **{f"f{i}": f"Function {n} of module {i} here.\n\n{words(f'w{n}x{i}y', length)}" for i in range(10)},
        )
    return DocstringsDataset({"pkg": folder})


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


def test_each_topic_has_its_document_as_relevant(small):
    topics, qrels = small.get_topicsqrels("train")
    assert topics["qid"].tolist() == qrels["qid"].tolist()
    assert topics["qid"].is_unique
    number, function = qrels["docno"][0].removeprefix("pkg.m").split(".f")
    assert topics["query"][0] == f"Function {number} of module {function} here"
    assert small.documents[qrels["docno"][0]]["title"] == qrels["docno"][0]
    assert set(qrels["label"]) == {1}


# ---------------------------------------------------------------- kept on disk


@pytest.fixture
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTERRIER_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


@pytest.fixture
def installed(home, tmp_path, monkeypatch):
    """A package that is all that is installed."""
    write_module(tmp_path / "pkg", "mod", f=f"A summary with enough words.\n\n{words('é')}")
    monkeypatch.setattr(docstrings, "installed_packages", lambda: {"pkg": tmp_path / "pkg"})
    return tmp_path / "pkg"


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


@pytest.mark.parametrize("damage", ["cut", "text", "foreign", "empty"])
def test_a_damaged_file_is_built_again(home, installed, damage, caplog):
    first = DocstringsDataset().entries
    [file] = (home / "longdoc").iterdir()
    whole = file.read_bytes()
    content = {
        "cut": whole[:-12],
        "text": b"not gzip",
        "foreign": gzip.compress(b'{"v": 0}\n{"n": 3}\n'),
        "empty": b"",
    }
    file.write_bytes(content[damage])
    assert DocstringsDataset().entries == first
    assert "damaged" in caplog.text
    assert file.read_bytes() == whole
    assert list((home / "longdoc").iterdir()) == [file]


def test_a_folder_that_cannot_be_written_causes_a_log_message(home, installed, caplog):
    home.mkdir()
    (home / "longdoc").write_text("a file where the folder should be")
    assert DocstringsDataset().entries == collect({"pkg": installed})
    assert "cannot be written" in caplog.text
