"""Passages that are read from any source and kept on disk."""

from concurrent.futures import ThreadPoolExecutor

import pandas as pd
import pytest

from pyterrier_longdoc.common.language import token_counter
from pyterrier_longdoc.data import far_relevant
from pyterrier_longdoc.data.passages import PassagePool, TextSpool, read_source

from ..support.sources import SMALL, build, passages, qrels, topics


@pytest.fixture
def spool():
    return TextSpool((f"n{number}", f"téxt {number} \ud800") for number in range(50))


def test_texts_on_disk_are_read_by_index(spool):
    assert (len(spool), spool.name(49), spool.text(49), spool.text(0)) == (50, "n49", "téxt 49 ?", "téxt 0 ?")


def test_threads_can_read_texts_on_disk(spool):
    with ThreadPoolExecutor(8) as threads:
        found = list(threads.map(spool.text, [number % 50 for number in range(2000)]))
    assert all(text == f"téxt {number % 50} ?" for number, text in enumerate(found))


def test_a_pool_has_lengths_and_finds_judged_passages():
    pool = PassagePool([*passages(3), {"docno": 3, "text": " A\nb "}], count=token_counter(), docnos={"p1", "3"})
    assert pool.tokens.tolist() == [len(row["text"].split()) for row in passages(3)] + [2]
    assert pool.characters[-1] == len(pool.text(3)) == 3
    found = pool.locate(pd.DataFrame({"qid": list("ab"), "docno": ["3", "nowhere"]}))
    assert found.drop(columns="digest").values.tolist() == [["a", "3", 3, 2], ["b", "nowhere", -1, -1]]
    assert found["digest"][0] == pool.digests[3]


def test_the_text_of_a_passage_can_be_several_fields():
    empty = {"none": None, "nan": float("nan"), "na": pd.NA}
    renamed = [
        {"docno": row["docno"], "title": row["text"].split(" ")[0], "body": row["text"].partition(" ")[2], **empty}
        for row in passages()
    ]
    assert list(build(passages=renamed, text_field=(*empty, "title", "body")).corpus) == list(build().corpus)


def test_passages_topics_and_qrels_come_from_a_named_dataset(tmp_path):
    judged = qrels().assign(iteration=0)[["qid", "iteration", "docno", "label"]]
    pd.DataFrame(passages()).to_json(tmp_path / "docs.jsonl", orient="records", lines=True)
    topics().to_csv(tmp_path / "topics.tsv", sep="\t", header=False, index=False)
    judged.to_csv(tmp_path / "qrels.txt", sep=" ", header=False, index=False)
    assert list(far_relevant(f"longdoc:folder:{tmp_path}", **SMALL).corpus) == list(build().corpus)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"variant": "dev"}, "variant"),
        ({"topics": None}, "topics="),
        ({"topics": topics().drop(columns="query")}, "query"),
        ({"topics": topics().assign(query=7)}, "'query'"),
        ({"qrels": qrels(0)}, "0 qrels"),
    ],
)
def test_bad_topics_and_qrels_are_named(arguments, message):
    given = {"topics": topics(), "qrels": qrels(), "variant": None, "min_label": 1, **arguments}
    with pytest.raises(ValueError, match=message):
        read_source(passages(), **given)


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([*passages(), passages()[0]], "'p0'"),
        ([{"docno": "p0", "body": "x"}], "'p0'.*'text'"),
        ([{"docno": "p0", "text": ["x", "y"]}], "'text'"),
        ([{"docno": "p0", "text": b"x"}], "text_field"),
    ],
)
def test_bad_passages_are_named(rows, message):
    with pytest.raises(ValueError, match=message):
        PassagePool(rows, count=token_counter(), docnos={"p0"})
