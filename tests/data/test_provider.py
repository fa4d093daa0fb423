"""The collections that PyTerrier finds by name."""

import pyterrier as pt
import pytest

from pyterrier_longdoc.data import DocstringsDataset
from pyterrier_longdoc.data.docstrings import SPLITS, VARIANTS
from pyterrier_longdoc.data.far_relevant import PASSAGE_POSITIONS
from pyterrier_longdoc.data.provider import LongDocDatasetProvider, docstrings_with

from ..support.sources import write_modules


@pytest.fixture(scope="module")
def short_docstrings(tmp_path_factory):
    """60 documented functions, a third of them without a topic."""
    modules = {}
    for n in range(60):
        words = " ".join(f"w{n}x{i}" for i in range(60 + 5 * n))
        modules[f"m{n}"] = f"{f'Function with the number {n} does this.' if n % 3 else 'Short.'}\n\n{words}"
    return DocstringsDataset({"pkg": write_modules(tmp_path_factory.mktemp("package"), **modules)})


@pytest.mark.parametrize("position", PASSAGE_POSITIONS)
def test_short_docstrings_of_each_split_become_passages_of_long_documents(position, short_docstrings):
    collection = docstrings_with(position, short_docstrings)
    short = {entry.docno for entry in short_docstrings.entries if entry.tokens <= 256 and entry.query}
    assert set(collection.gold["passage"]) == short
    for split in collection.splits:
        assert set(collection.get_topics(split)["qid"]) <= set(short_docstrings.get_topics(split)["qid"])
    assert collection.get_topics().equals(collection.get_topics("test"))
    assert collection.lengths().max() <= 1431


def test_far_docstrings_begin_after_512_tokens_and_long_early_ones_at_the_start(short_docstrings):
    far, early = (docstrings_with(position, short_docstrings).gold for position in ("far", "early"))
    assert far["first_token"].min() >= 512
    assert (early["first_token"][early["end"] - early["start"] > 2000] == 0).all()


@pytest.mark.parametrize("name", ["robust04", "folder", "folder:", "", "docstrings:x"])
def test_an_unknown_collection_name_is_refused_with_the_known_names(name):
    with pytest.raises(ValueError, match=rf"'longdoc:{name}'.* longdoc:docstrings, "):
        pt.get_dataset(f"longdoc:{name}")


def test_listing_collections_and_variants_builds_nothing(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTERRIER_HOME", str(tmp_path / "home"))
    names = LongDocDatasetProvider().list_dataset_names()
    made = ["docstrings-far", "docstrings-uniform", "docstrings-early"]
    assert names == ["docstrings", *made]
    for name in made:
        assert pt.get_dataset(f"longdoc:{name}")._describe_component("qrels") == list(SPLITS)
    dataset = pt.get_dataset("longdoc:docstrings")
    assert dataset._describe_component("topics") == list(VARIANTS)
    assert (dataset.get_topics_lang(), dataset.get_corpus_lang()) == ("en", "en")
    assert not (tmp_path / "home" / "longdoc").exists()
