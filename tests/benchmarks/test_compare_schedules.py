"""Schedules side by side: calls, tokens, costs, simulated time, effectiveness, table and plot."""

from __future__ import annotations

from pathlib import Path

import pandas as pd
import pytest

import pyterrier_longdoc as ld
from pyterrier_longdoc.listwise import (
    BackToFront,
    CallableBackend,
    PairwiseAll,
    PairwiseBubble,
    ParallelBlocks,
    Prices,
    Reply,
    TopDown,
)

from ..support.llm import Scripted, candidates, oracle, worth
from .compare_schedules import Speed, compare_schedules, main

RUN = candidates(queries=3, documents=12)
QRELS = RUN.assign(label=(worth(RUN) >= 9).astype(int))[["qid", "docno", "label"]]
SCHEDULES = [BackToFront(6, 3), TopDown(6, 3, 6), ParallelBlocks(6, 2)]


def priced(model=oracle, **options) -> ld.LLMClient:
    return ld.LLMClient(CallableBackend(lambda m: Reply(model(m), 100, 10), name="m"), prices=Prices(1, 10), **options)


def test_what_schedules_take_and_how_well_they_rank():
    compared = compare_schedules(priced(), RUN, QRELS, SCHEDULES, metrics=["P@3", "RR"], concurrency=2)
    table = compared.table.set_index("name")
    assert table.index.tolist() == ["first stage", "BackToFront", "TopDown", "ParallelBlocks"]
    assert table["prompts"].tolist()[:2] == [0, 3]
    assert table.loc["ParallelBlocks", ["prompts", "rounds", "calls"]].tolist() == [4, 1, 12]
    assert (table["tokens"] == table["prompts"] * 110).all()
    assert table["cost/1000"].tolist() == pytest.approx((table["prompts"] * 200 / 1000).tolist())
    assert table["calls"].tolist() == (table["prompts"] * 3).tolist()
    assert table.loc["BackToFront", ["P@3", "RR"]].tolist() == [1, 1]
    assert table.loc["first stage", "P@3"] < 1
    assert compared.measures == ("P@3", "RR")
    assert "BackToFront" in repr(compared)
    assert "<table" in compared._repr_html_()
    assert "e-0" not in repr(compared)


@pytest.mark.parametrize(("concurrency", "seconds"), [(1, [9, 12]), (2, [9, 6]), (8, [9, 3])])
def test_rounds_wait_for_each_other_and_prompts_of_a_round_do_not(concurrency, seconds):
    speed = Speed(seconds=1, input_rate=100, output_rate=10)  # three seconds a call
    named = {"windows": BackToFront(6, 3), "blocks": ParallelBlocks(6, 2)}
    compared = compare_schedules(priced(), RUN, schedules=named, concurrency=concurrency, speed=speed)
    assert compared.table["seconds"].tolist() == [0, *seconds]


def test_the_cache_is_shared_and_what_it_saves_is_told(tmp_path):
    llm = priced(cache=tmp_path / "replies.sqlite")
    compared = compare_schedules(llm, RUN, QRELS, [PairwiseAll(), PairwiseBubble(2)])
    table = compared.table.set_index("name")
    assert table["calls"].tolist() == [0, 3 * 132, 3 * 2 * (11 + 10)]
    assert table["replayed"].tolist() == [0, 0, 3 * 2 * (11 + 10)]
    paid = compared.queries.groupby("name")["paid"].sum()
    assert paid["PairwiseBubble"] == 0 < table.loc["PairwiseBubble", "cost/1000"]
    assert paid["PairwiseAll"] == pytest.approx(llm.ledger.cost)


def test_retries_take_time():
    reply = Scripted("No.", *[oracle] * 99)
    speed = Speed(seconds=1, input_rate=100, output_rate=10)
    one = RUN[RUN["qid"] == "q0"]
    compared = compare_schedules(priced(reply), one, schedules=[BackToFront(6, 3)], speed=speed)
    assert compared.queries.iloc[1][["prompts", "calls", "seconds"]].tolist() == [3, 4, 12]


def test_arguments_go_to_rankgpt():
    compared = compare_schedules(priced(), RUN.rename(columns={"text": "body"}), schedules=SCHEDULES, text_field="body")
    assert compared.table["calls"].tolist()[1] == 9
    with pytest.raises(ValueError, match="text_field=''"):
        compare_schedules(priced(), RUN, text_field="")


def test_names_tell_schedules_of_one_class_apart():
    compared = compare_schedules(priced(), RUN, schedules=[BackToFront(6, 3), BackToFront(8, 4), TopDown(6, 3)])
    names = compared.table["name"].tolist()
    assert names == ["first stage", "BackToFront(window=6, stride=3)", "BackToFront(window=8, stride=4)", "TopDown"]


def test_a_query_without_qrels_has_no_values():
    compared = compare_schedules(priced(), RUN, QRELS[QRELS["qid"] != "q1"], [TopDown(6, 3)])
    values = compared.queries.set_index(["name", "qid"])["nDCG@10"]
    assert values.isna().tolist() == [False, True, False] * 2
    assert not compared.table["nDCG@10"].isna().any()


def test_plot_labels_each_schedule_and_draws_the_first_stage():
    compared = compare_schedules(priced(), RUN, QRELS, SCHEDULES, metrics=["P@3", "RR"], concurrency=2)
    ax = compared.plot("RR", against="seconds")
    assert {text.get_text() for text in ax.texts} == {"BackToFront", "TopDown", "ParallelBlocks"}
    assert (ax.get_xlabel(), ax.get_ylabel()) == ("seconds per query, 2 prompts in flight", "RR")
    assert ax.get_legend().get_texts()[0].get_text() == "first stage"
    with pytest.raises(ValueError, match="against='speed'"):
        compared.plot(against="speed")
    with pytest.raises(ValueError, match="give compare_schedules qrels="):
        compare_schedules(priced(), RUN, schedules=SCHEDULES).plot()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"schedules": []}, "must be at least one schedule"),
        ({"schedules": [TopDown(), TopDown()]}, "no two of them equal"),
        ({"concurrency": 0}, "concurrency=0 must be"),
        ({"qrels": QRELS.drop(columns="label")}, "label"),
        ({"qrels": QRELS, "metrics": ["best"]}, "unknown measure 'best'"),
        ({"candidates": pd.DataFrame({"qid": ["1"]})}, "query"),
    ],
)
def test_wrong_arguments(arguments, message):
    with pytest.raises((ValueError, KeyError), match=message):
        compare_schedules(**{"llm": oracle, "candidates": RUN, **arguments})
    with pytest.raises(ValueError, match="rates must be positive"):
        Speed(input_rate=0)


def test_the_page_has_the_table_that_is_printed(capsys):
    main()
    assert capsys.readouterr().out in Path(__file__).with_name("README.md").read_text(encoding="utf-8")
