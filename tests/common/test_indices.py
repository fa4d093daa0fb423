"""Indices are told by what their files say, other Java objects by their class; nothing is told by an address."""

from __future__ import annotations

import json
import shutil

import numpy as np
import pandas as pd
import pyterrier as pt
import pytest

import pyterrier_longdoc as ld
from pyterrier_longdoc.common.key import UserCodeError, description, key
from pyterrier_longdoc.common.presentation import described
from pyterrier_longdoc.training.resume import training_key, training_settings

from ..support import terrier

TOPICS = pd.DataFrame({"qid": ["1", "2"], "query": ["dog river", "tree"]})
QRELS = pd.DataFrame({"qid": ["1", "2"], "docno": ["d5", "d2"], "label": 1})
LONGER = {docno: f"{text} . a dog and a tree by the river" for docno, text in terrier.DOCUMENTS.items()}
LENGTHS = ld.PairScorer(lambda queries, texts: list(map(float, map(len, texts))), name="lengths")

pytestmark = pytest.mark.filterwarnings("ignore::pyterrier_longdoc.experiment.ExperimentWarning")


def properties(folder, changes=()):
    """The folder of an index with the file of properties that Terrier writes, as far as it matters."""
    values = {"index.created": "1795754259858", "num.Documents": "6", "num.Tokens": "32"}
    values |= {"index.meta.key-names": "docno,text", "index.meta.value-lengths": "20,200000", "other": "=\\u00e9"}
    folder.mkdir()
    lines = ["#Fri Nov 27", *(f"{name}={value}" for name, value in {**values, **dict(changes)}.items())]
    (folder / "data.properties").write_text("\n".join(lines), encoding="latin-1")
    return folder


# Without Java.


def test_copies_of_a_terrier_index_have_the_same_key(tmp_path):
    properties(tmp_path / "index")
    shutil.copytree(tmp_path / "index", tmp_path / "copy", copy_function=shutil.copy)
    index, copy = (pt.terrier.TerrierIndex(tmp_path / name) for name in ("index", "copy"))
    assert key(index) == key(copy)
    keys = [training_key(training_settings(ld.MaxP(LENGTHS, text_loader=each))) for each in (index, copy)]
    assert keys[0] == keys[1]
    assert keys[0][1] == ""  # no user code: a training with this index can be continued


@pytest.mark.parametrize(
    "name", ["index.created", "num.Documents", "num.Tokens", "index.meta.key-names", "index.meta.value-lengths"]
)
def test_another_terrier_index_has_another_key(tmp_path, name):
    folders = properties(tmp_path / "index"), properties(tmp_path / "other", {name: "2"})
    one, other = (ld.MaxP(LENGTHS, text_loader=pt.terrier.TerrierIndex(folder)) for folder in folders)
    assert key(one) != key(other)


def test_a_description_contains_no_memory_address():
    class Foreign:
        def __repr__(self):
            return f"<Index at {hex(id(self))} jself=<LocalRef obj={hex(id(self))}>>"

    assert described(Foreign()) == "<Index jself=<LocalRef obj>>"


def test_a_rebuilt_pisa_index_has_another_key(tmp_path):
    pisa = pytest.importorskip("pyterrier_pisa")
    index = pisa.PisaIndex(str(tmp_path / "index"), text_field="text", overwrite=True)
    documents = [{"docno": docno, "text": text} for docno, text in terrier.DOCUMENTS.items()]
    index.index(documents)
    before = key(index.bm25())
    index.dph()  # which adds files to the folder
    assert key(index.bm25()) == before
    with pytest.warns(UserWarning, match="Removing"):
        index.index(documents)
    assert key(index.bm25()) != before


def test_a_rebuilt_text_cache_has_another_key(tmp_path):
    caching = pytest.importorskip("pyterrier_caching")

    def model():
        cache = caching.IndexerCache(str(tmp_path / "cache"))
        if not cache.built():
            cache.index([{"docno": "a1", "text": "a cat"}, {"docno": "b2", "text": "a dog"}])
        return ld.MaxP(LENGTHS, text_loader=cache.text_loader())

    before = key(model())
    assert key(model()) == before
    shutil.rmtree(tmp_path / "cache")
    assert key(model()) != before


# With Terrier.


STAGES = {
    "bm25": lambda index: index.bm25(),
    "Retriever of an Index": lambda index: pt.terrier.Retriever(index.index_obj(), wmodel="BM25"),
    "Retriever of an IndexRef": lambda index: pt.terrier.Retriever(index.index_ref(), wmodel="BM25"),
    "Retriever of a path": lambda index: pt.terrier.Retriever(str(index.path), wmodel="BM25"),
    "FeaturesRetriever": lambda index: pt.terrier.FeaturesRetriever(index, ["WMODEL:Tf"], wmodel="BM25"),
    "Bo1": lambda index: pt.rewrite.Bo1QueryExpansion(index),
    "RM3": lambda index: pt.rewrite.RM3(index),
    "SDM": lambda index: pt.rewrite.SDM(),
    "text loader": lambda index: index.text_loader("text"),
    "get_text of an Index": lambda index: pt.text.get_text(index.index_obj(), "text"),
    "scorer": lambda index: pt.text.scorer(body_attr="text", wmodel="BM25", background_index=index),
    "text_loader=TerrierIndex": lambda index: ld.MaxP(LENGTHS, text_loader=index),
    "text_loader=Index": lambda index: ld.MaxP(LENGTHS, text_loader=index.index_obj()),
    "text_loader=IndexRef": lambda index: ld.MaxP(LENGTHS, text_loader=pt.text.get_text(index.index_ref())),
}


@pytest.mark.parametrize("make_stage", STAGES.values(), ids=STAGES)
def test_terrier_stages_have_the_same_key_in_every_process(make_stage, terrier_index):
    one, other = (make_stage(pt.terrier.TerrierIndex(terrier_index.path)) for _ in range(2))
    assert key(one) == key(other)
    assert "0x" not in json.dumps(description(one))


def test_all_forms_of_a_terrier_index_have_the_same_key(terrier_index):
    forms = [terrier_index, terrier_index.index_obj(), terrier_index.index_ref()]
    forms.append(pt.java.autoclass("org.terrier.querying.IndexRef").of(f"{terrier_index.path}/data.properties"))
    descriptions = [description(form) for form in forms]
    assert descriptions == [descriptions[0]] * 4
    assert descriptions[0]["num.Documents"] == "6"


def test_an_index_in_memory_has_no_key(terrier_started, tmp_path):
    memory = pt.terrier.IterDictIndexer(str(tmp_path), type=pt.terrier.IndexingType.MEMORY)
    index = pt.terrier.IndexFactory.of(memory.index([{"docno": "d1", "text": "a cat"}]))
    for stage in (pt.terrier.Retriever(index), ld.MaxP(LENGTHS, text_loader=index)):
        with pytest.raises(UserCodeError, match="not on disk"):
            key(stage)


def test_a_sum_of_indices_has_no_key(terrier_index):
    both = terrier_index.index_obj() + terrier_index.index_obj()
    with pytest.raises(UserCodeError, match="not on disk"):
        key(pt.terrier.Retriever(both))


def test_a_function_as_weighting_model_has_no_key(terrier_index):
    def weights(frequency, posting, entry, collection):
        return frequency

    with pytest.raises(UserCodeError, match="weights"):
        key(pt.terrier.Retriever(terrier_index, wmodel=weights))


@pytest.mark.parametrize(
    "changes",
    [{"body_attr": "title"}, {"background_index": True}, {"wmodel": "Tf"}, {"stemmer": None}, {"tokeniser": "utf"}],
    ids=lambda changes: next(iter(changes)),
)
def test_text_scorers_with_different_options_have_different_keys(changes, terrier_index):
    arguments = {"body_attr": "text", "wmodel": "BM25"}
    changes = {name: terrier_index if value is True else value for name, value in changes.items()}
    assert key(pt.text.scorer(**arguments)) != key(pt.text.scorer(**{**arguments, **changes}))


@pytest.mark.parametrize("changes", [{"fb_terms": 3}, {"fb_docs": 2}, {"tokeniser": "utf"}])
def test_query_expansions_with_different_options_have_different_keys(changes, terrier_index):
    expansion = pt.rewrite.Bo1QueryExpansion
    assert key(expansion(terrier_index)) != key(expansion(terrier_index, **changes))


@pytest.mark.parametrize("name", ["bm25", "FeaturesRetriever", "scorer", "RM3", "text loader"])
def test_using_a_stage_does_not_change_its_key(name, terrier_index):
    stage, unused = (STAGES[name](terrier_index) for _ in range(2))
    found = (terrier_index.bm25(num_results=3) >> terrier_index.text_loader("text"))(TOPICS)
    stage(TOPICS if name in ("bm25", "FeaturesRetriever") else found)
    assert key(stage) == key(unused)


def test_an_experiment_reuses_a_run_of_the_same_index_but_not_of_a_rebuilt_one(terrier_started, tmp_path, monkeypatch):
    folder = tmp_path / "index"

    def experiment():
        index = pt.terrier.TerrierIndex(folder)
        pipeline = index.bm25(num_results=5) >> index.text_loader("text") >> ld.MaxP(LENGTHS)
        results = ld.Experiment({"a": pipeline}, TOPICS, QRELS, ["AP"], save_dir=tmp_path / "experiment")
        fresh = pt.Evaluate(pipeline(TOPICS), QRELS, ["map"])["map"]
        return results.means.loc["a", "AP"], fresh

    terrier.index(folder)
    first = experiment()
    assert first[0] == pytest.approx(first[1])
    with monkeypatch.context() as patch:
        patch.setattr("pyterrier_longdoc.experiment.runner.Runner._execute", None)
        assert experiment() == first
    shutil.rmtree(folder)
    terrier.index(folder, {**LONGER, "d1": LONGER["d1"] * 9, "d2": LONGER["d2"] * 9})
    found, fresh = experiment()
    assert found == pytest.approx(fresh)
    assert not np.isclose(found, first[0])
