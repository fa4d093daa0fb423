"""One run for each system and one baseline: everything as `pt.Experiment` has it."""

import warnings
from pathlib import Path

import numpy as np
import pandas as pd
import pyterrier as pt
import pytest
from ir_measures import AP, RR, P, R, nDCG
from scipy import stats

from pyterrier_longdoc.data import FolderDataset
from pyterrier_longdoc.experiment import Experiment

from ..support import synthetic

SHARED = Path(__file__).resolve().parents[3] / "shared" / "data"
METRICS = [nDCG @ 10, AP, "recip_rank", P @ 5, R(rel=2) @ 20, "ndcg_cut_20"]
SETTINGS = [(0.9, 0.4), (1.2, 0.75), (2.0, 0.9), (0.4, 0.1)]

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(scope="module", params=["time", "cranfield"])
def real(request, tmp_path_factory):
    """Runs of four BM25 variants, topics and qrels of a real collection."""
    pisa = pytest.importorskip("pyterrier_pisa")
    if not (SHARED / request.param).is_dir():
        pytest.skip(f"the collection {request.param} is not here")
    dataset = FolderDataset(SHARED / request.param)
    index = pisa.PisaIndex(str(tmp_path_factory.mktemp(request.param) / "index"), text_field="text")
    index.index(list(dataset.get_corpus_iter(verbose=False)))
    topics = dataset.get_topics()
    runs = {f"k1={k1} b={b}": index.bm25(num_results=100, k1=k1, b=b)(topics) for k1, b in SETTINGS}
    return runs, topics, dataset.get_qrels()


def assert_same(systems, topics, qrels, metrics, *, baseline, **options):
    """Compares all columns; PyTerrier leaves their order to chance."""
    ours_only = {"test": options.get("test", "t"), "correction": options.get("correction")}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        expected = pt.Experiment(systems, topics, qrels, metrics, baseline=baseline, **options)
        options = {name: value for name, value in options.items() if name not in (*ours_only, "correction_alpha")}
        results = Experiment(systems, topics, qrels, metrics, baselines=[baseline], **ours_only, **options)
    assert sorted(expected) == sorted(results.table)
    pd.testing.assert_frame_equal(results.table, expected[results.table.columns], check_exact=False, rtol=1e-12)
    return results


@pytest.mark.parametrize("correction", [None, "holm", "bonferroni", "fdr_bh"])
def test_values_tests_and_corrections_on_real_runs(real, correction):
    results = assert_same(*real, METRICS, baseline=0, correction=correction)
    assert results.table["nDCG@10 p-value"].dropna().between(0, 1, inclusive="neither").all()


def test_wilcoxon_and_given_functions_on_real_runs(real):
    assert_same(*real, METRICS, baseline=1, test="wilcoxon")
    assert_same(*real, METRICS, baseline=2, test=lambda x, y: stats.mannwhitneyu(x, y))


def test_per_query_values_of_real_runs(real):
    runs, topics, qrels = real
    expected = pt.Experiment(runs, topics, qrels, METRICS, perquery=True, filter_by_qrels=True)
    ours = Experiment(runs, topics, qrels, METRICS).perquery
    keys = ["name", "qid", "measure"]
    pd.testing.assert_frame_equal(
        ours.sort_values(keys, ignore_index=True), expected.sort_values(keys, ignore_index=True), check_exact=True
    )


@pytest.fixture
def doubtful():
    """Runs with everything that evaluation treats in a special way."""
    topics, qrels = synthetic.collection()
    good, other = synthetic.run(topics, 1.0, 1), synthetic.run(topics, 0.5, 2)
    systems = {
        "good": good,
        "same": good.copy(),
        "tied": other.assign(score=other["score"].round()),
        "float32 ties": other.assign(score=1 + 1e-9 * other["score"]),
        "missing": other[~other["qid"].isin(["q3", "q7"])],
        "unsorted": other.sample(frac=1.0, random_state=0),
        "repeated": pd.concat([other, other.head(20).assign(score=-5.0)]),
        "float32": other.astype({"score": "float32"}),
    }
    return systems, topics, qrels


@pytest.mark.parametrize("correction", [None, "holm", "fdr_bh", "bonferroni"])
def test_ties_missing_queries_and_equal_systems(doubtful, correction):
    metrics = [AP, nDCG @ 10] if correction else METRICS
    results = assert_same(*doubtful, metrics, baseline="good", correction=correction)
    p = results.table.set_index("name")["AP p-value"]
    assert np.isnan(p["same"])
    assert p["unsorted"] == p["float32"]


def test_unjudged_topics_and_unasked_judgements(doubtful):
    systems, topics, qrels = doubtful
    for topics_kept, qrels_kept in ((slice(None), slice(0, 60)), (slice(0, 20), slice(None))):
        kept = (topics.iloc[topics_kept], qrels.iloc[qrels_kept])
        assert_same(systems, *kept, METRICS, baseline="missing")
        assert_same(systems, *kept, METRICS, baseline="missing", filter_by_topics=False)
        assert_same(systems, *kept, METRICS, baseline="missing", filter_by_qrels=True)


def test_counts_are_summed(doubtful):
    assert_same(*doubtful, ["num_rel", "num_ret", "map"], baseline="good")


def test_pipelines_and_names(doubtful):
    runs, topics, qrels = doubtful
    pipelines = [pt.Transformer.from_df(runs[name]) for name in ("good", "tied", "missing")]
    assert_same(pipelines, topics, qrels, METRICS, baseline=1, names=["a", "b", "c"])


def test_integers_as_qids_are_strings():
    topics, qrels = synthetic.collection()
    systems = {"a": synthetic.run(topics, 1.0, 1), "b": synthetic.run(topics, 0.0, 2)}
    expected = Experiment(systems, topics, qrels, METRICS).table
    for frame in (topics, qrels, *systems.values()):
        frame["qid"] = frame["qid"].str[1:].astype(int)
    pd.testing.assert_frame_equal(Experiment(systems, topics, qrels, METRICS).table, expected)


def test_names_of_measures_are_understood_like_the_measures():
    topics, qrels = synthetic.collection()
    table = Experiment(
        [synthetic.run(topics, 1.0, 1)], topics, qrels, ["nDCG@10", nDCG @ 5, "map", AP, "RR@10"], names=["a"]
    ).table
    assert table.columns.tolist() == ["name", "nDCG@10", "nDCG@5", "map", "RR@10"]
    assert table.loc[0, "RR@10"] == pytest.approx(
        pt.Evaluate(synthetic.run(topics, 1.0, 1), qrels, [RR @ 10])["RR@10"], rel=1e-12
    )
