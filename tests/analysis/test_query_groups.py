"""Results by groups of queries, and their plot."""

import numpy as np
import pytest

from pyterrier_longdoc.analysis import by_document_length, by_query_value, plot_document_length
from pyterrier_longdoc.analysis.query_groups import relevant_lengths
from pyterrier_longdoc.experiment import Experiment

from ..support import synthetic

METRICS = ["nDCG@5", "AP"]
TOPICS, QRELS = synthetic.collection(40)
RUNS = [synthetic.run(TOPICS, 1.0, seed) for seed in range(3)]

pytestmark = pytest.mark.filterwarnings("ignore::pyterrier_longdoc.experiment.ExperimentWarning")


def test_by_document_length_groups_queries_by_their_relevant_documents():
    systems = {"a": RUNS[0], "b": RUNS[1]}
    results = Experiment(systems, TOPICS, QRELS, METRICS, baseline=["a"])
    lengths = {f"d{i}": 100 * i for i in range(12)}
    third = QRELS.groupby("qid", sort=False)["docno"].nth(2).str[1:].astype(int)
    mean = ((0 + 1 + third) / 3 * 100).tolist()  # of d0, d1 and the third relevant one
    table = by_document_length(results, QRELS, lengths, edges=(0, 200, 300))
    groups = {"0 to < 200": (0, 200), "200 to < 300": (200, 300), ">= 300": (300, 1e9)}
    assert table["document length"].tolist() == [name for name in groups for _ in range(2)]
    for name, (low, high) in groups.items():
        qids = [qid for qid, length in zip(TOPICS["qid"], mean, strict=True) if low <= length < high]
        rows = table[table["document length"] == name]
        assert rows["queries"].tolist() == [len(qids)] * 2
        assert rows["AP"].tolist() == results.subset(qids).table["AP"].tolist()
        assert rows["AP p-value"].iloc[1] == results.subset(qids).table["AP p-value"].iloc[1]


@pytest.mark.parametrize("edges", [(512, 0), (10,)])
def test_edges_that_descend_or_exclude_all_queries_are_refused(edges):
    results = Experiment({"a": RUNS[0]}, TOPICS, QRELS, METRICS)
    with pytest.raises(ValueError, match="edges"):
        by_query_value(results, {"q0": 3.0}, edges=edges)


def test_the_plot_shows_the_means_of_the_table():
    runs = {"a": synthetic.run(TOPICS, 1.0, 0), "b": synthetic.run(TOPICS, 0.5, 1)}
    results = Experiment(runs, TOPICS, QRELS, ["AP"])
    lengths = {docno: 100 * place for place, docno in enumerate(sorted(set(QRELS["docno"])))}
    edges = [0, float(np.median(list(relevant_lengths(QRELS, lengths).values())))]
    table = by_document_length(results, QRELS, lengths, edges=edges)
    axes = plot_document_length(results, QRELS, lengths, edges=edges)
    drawn = {line.get_label(): line.lines[0].get_ydata().tolist() for line in axes.containers}
    assert drawn == {name: table.loc[table["name"] == name, "AP"].tolist() for name in ("a", "b")}
    groups = table.drop_duplicates("document length")
    assert len(groups) == 2
    labels = [label.get_text().split("\n")[0] for label in axes.get_xticklabels()]
    assert labels == groups["document length"].tolist()
    assert "words" in plot_document_length(results, QRELS, lengths, edges=edges, unit="words").get_xlabel()
    with pytest.raises(ValueError, match="measure"):
        plot_document_length(results, QRELS, lengths, measure="RR")
