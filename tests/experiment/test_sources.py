"""What to cite for pipelines, collections, measures and experiments."""

import json

import pyterrier as pt
import pytest

import pyterrier_longdoc as ld
from pyterrier_longdoc.common.citations import entries
from pyterrier_longdoc.data.collection import Parts, PositionedCollection
from pyterrier_longdoc.experiment import Experiment, ExperimentResults, citations

from ..support import synthetic, tiny

TOPICS, QRELS = synthetic.collection(5)

pytestmark = [
    pytest.mark.filterwarnings("ignore::pyterrier_longdoc.experiment.ExperimentWarning"),
    pytest.mark.filterwarnings("ignore::pyterrier_longdoc.TruncationWarning"),
]


def collection(**options):
    """One in which all documents are alike."""
    run = synthetic.run(TOPICS, 1.0, 0)
    documents = {docno: {"docno": docno, "text": "a b"} for docno in run["docno"]}
    return PositionedCollection("made-up", Parts(documents, TOPICS, QRELS, None), **options)


class Retriever(pt.Transformer):
    """Somebody's."""

    def transform(self, inp):
        return synthetic.run(TOPICS, 1.0, 0).merge(inp[["qid", "query"]])


def keys_in(text):
    return [key for key in entries() if f"{{{key}," in text]


def test_all_parts_of_a_pipeline_count_once():
    loader = collection(papers=("zhu-2024-longembed",)).text_loader()
    pipeline = Retriever() >> loader >> (ld.MaxP() % 10 + 0.5 * ld.Birch() + ld.MaxP(max_windows=3))
    cited = citations(pipeline)
    assert set(keys_in(cited)) == {
        "dai-2019-deeper", "boytsov-2025-positional", "yilmaz-2019-birch", "zhu-2024-longembed"
    }  # fmt: skip
    assert cited.count("@") == 4
    assert cited.endswith("% no citation is known of the transformer Retriever")


def test_a_text_loader_given_to_a_model_is_part_of_it():
    dataset = collection(papers=("chen-2024-m3",))
    for loader in (dataset, dataset.text_loader()):
        assert "chen-2024-m3" in keys_in(citations(ld.AvgP(text_loader=loader)))


def test_collections_and_measures():
    assert citations(collection()) == "% no citation is known of the collection made-up"
    assert keys_in(citations("nDCG@10", "ndcg_cut_5")) == ["jarvelin-2002-cumulated"]
    assert "https://dblp.org/rec/journals/ir/KantorV00.bib" in citations("recip_rank")
    assert citations("R@100") == ""
    with pytest.raises(ValueError, match="no pipeline, dataset or measure"):
        citations(5)


def test_ir_datasets_names_its_own():
    cited = citations(pt.get_dataset("irds:msmarco-document/trec-dl-2019"))
    assert "{Bajaj2016Msmarco," in cited
    assert "{Craswell2019TrecDl," in cited
    assert "{Wadden2020Scifact," in citations(pt.get_dataset("longdoc:irds:beir/scifact"))
    assert citations(pt.get_dataset("irds:vaswani")) == "% no citation is known of the collection irds:vaswani"


def test_an_experiment_knows_what_it_used_also_when_runs_are_read_again(tmp_path):
    dataset = collection(papers=("su-2024-bright",))

    def system(seed):
        return Retriever() >> dataset.text_loader() >> ld.FirstP(tiny.encoder(), max_query_len=8, seed=seed)

    systems = {"FirstP": system, "given": synthetic.run(TOPICS, 1.0, 3)}
    expected = ["dai-2019-deeper", "boytsov-2025-positional", "su-2024-bright", "jarvelin-2002-cumulated"]
    written = []
    for _ in range(2):
        results = Experiment(systems, TOPICS, QRELS, ["nDCG@5", "RR"], seeds=[0, 1], save_dir=tmp_path)
        cited = results.citations()
        assert sorted(keys_in(cited)) == sorted(expected)
        assert "% no citation is known of given, a given run" in cited
        written.append([file.stat().st_mtime_ns for file in sorted((tmp_path / "runs" / "FirstP").iterdir())])
    assert written[0] == written[1]  # read, not made once more
    assert ExperimentResults.load(tmp_path).citations() == cited
    assert "fayyaz-2025-collapse" in keys_in(results.citations(collection(papers=("fayyaz-2025-collapse",))))
    assert json.loads((tmp_path / "results.json").read_text())["sources"]["unknown"]
