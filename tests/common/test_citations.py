"""The file of references, and who names its entries."""

import ast
import re
from pathlib import Path

import pyterrier as pt
import pytest

import pyterrier_longdoc as ld
from pyterrier_longdoc.common.citations import Cited, bibtex, entries
from pyterrier_longdoc.experiment.sources import PAPERS_OF_MEASURES
from pyterrier_longdoc.rerankers.cross import PAPERS_OF_ARCHITECTURES

PACKAGE = Path(ld.__file__).parent
KEY = re.compile(r"[a-z]+-(19|20)\d\d-[a-z0-9]+")

TRANSFORMERS = [
    value
    for name in ld.__all__
    if isinstance(value := getattr(ld, name), type)
    and issubclass(value, pt.Transformer)
    and value is not ld.LongDocReranker
]


@pytest.mark.parametrize("transformer", TRANSFORMERS, ids=lambda cls: cls.__name__)
def test_every_public_transformer_names_its_papers(transformer):
    assert issubclass(transformer, Cited)
    assert transformer.papers
    assert set(transformer.papers) <= entries().keys()


def test_every_entry_is_named_by_the_package_and_every_named_one_is_there():
    named = set(PAPERS_OF_MEASURES.values()).union(*PAPERS_OF_ARCHITECTURES.values())
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and KEY.fullmatch(node.value):
                named.add(node.value)
    assert named == entries().keys()


@pytest.mark.parametrize("key", entries())
def test_every_entry_says_who_what_and_when(key):
    entry = entries()[key]
    fields = dict(re.findall(r"^  (\w+) = \{(.*)\},$", entry, re.MULTILINE))
    assert {"author", "title", "year"} <= fields.keys()
    assert entry.count("\n") == len(fields) + 1  # each line is a field
    first = fields["author"].partition(",")[0].split()[-1].lower()
    plain = re.sub(r"\W", "", first.replace('{\\"a}', "a"))
    assert key.split("-")[:2] == [plain, fields["year"]]
    assert entry.startswith(("@misc", "@article")) or "booktitle" in fields


def test_broken_files_are_refused(tmp_path):
    for text, reason in (("@misc{a, title = {x}", "not closed"), ("@misc{a,\n}\n@misc{a,\n}", "two entries 'a'")):
        path = tmp_path / f"{len(text)}.bib"
        path.write_text(text)
        with pytest.raises(ValueError, match=reason):
            entries(path)


def test_bibtex_has_each_once_and_takes_ones_own():
    own = "@misc{me, title = {Mine}}"
    assert bibtex(["li-2024-parade", own, "li-2024-parade"]) == f"{entries()['li-2024-parade']}\n\n{own}"
    assert bibtex([]) == ""


def test_what_a_model_is_set_up_with_is_cited_too():
    keys = ld.PARADE(preselect=ld.KeyBlocks(ld.EmbeddingWindows(3, ld.BiEncoder()))).cited()
    assert keys[0] == "li-2024-parade"
    assert {"li-2023-power", "li-2024-keyb2", "reimers-2019-sentence"} <= set(keys)
    assert "jiang-2020-long" in ld.LongP(global_attention="sentences").cited()
    assert "jiang-2020-long" not in ld.LongP().cited()
    assert ld.Birch().citation() == entries()["yilmaz-2019-birch"]
