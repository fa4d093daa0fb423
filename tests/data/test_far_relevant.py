import hashlib
import json
import os
import pickle
import random
import subprocess
import sys
import tracemalloc
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pandas as pd
import pyterrier as pt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pyterrier_longdoc.common.language import count_tokens, token_counter
from pyterrier_longdoc.data.docstrings import DocstringsDataset
from pyterrier_longdoc.data.far_relevant import FarDocuments, far_relevant
from pyterrier_longdoc.data.jsonl import read_far_relevant, write_far_relevant
from pyterrier_longdoc.data.leaks import LEAKS, check_leaks, find_leaks
from pyterrier_longdoc.data.named import docstrings_with
from pyterrier_longdoc.data.passages import PassagePool, TextSpool, digest
from pyterrier_longdoc.data.positioned import Parts, PositionedCollection, gold_frame, kept_parts
from pyterrier_longdoc.data.recipe import POSITIONS, Recipe
from pyterrier_longdoc.data.sources import by_split

from ..conftest import SHARED_DATA
from ..support import tiny

SMALL = {"min_offset": 20, "max_length": 60}


def passages(count=80, seed=0):
    rng = random.Random(seed)
    return [
        {"docno": f"p{i}", "text": " ".join([f"w{i}", *rng.choices(tiny.WORDS, k=rng.randrange(2, 12))])}
        for i in range(count)
    ]


def topics(count=5):
    return pd.DataFrame({"qid": [f"q{i}" for i in range(count)], "query": [f"query number {i}" for i in range(count)]})


def qrels(count=5, each=2):
    rows = [(f"q{i}", f"p{i * each + j}", 1) for i in range(count) for j in range(each)]
    return pd.DataFrame(rows, columns=["qid", "docno", "label"])


def build(**arguments):
    given = {"passages": passages(), "topics": topics(), "qrels": qrels(), **SMALL, **arguments}
    return far_relevant(given.pop("passages"), given.pop("topics"), given.pop("qrels"), **given)


@pytest.fixture(scope="module")
def vaswani():
    folder = SHARED_DATA / "vaswani"
    if not folder.is_dir():
        pytest.skip("the Vaswani collection is not here")
    return pt.get_dataset(f"longdoc:folder:{folder}")


@pytest.fixture(scope="module")
def short_docstrings(tmp_path_factory):
    """A tree of modules with 60 documented functions, a third of them without a topic."""
    folder = tmp_path_factory.mktemp("package")
    for n in range(60):
        words = " ".join(f"w{n}x{i}" for i in range(60 + 5 * n))
        sentence = f"Function with the number {n} does this." if n % 3 else "Short."
        (folder / f"m{n}.py").write_text(f'def f():\n    """{sentence}\n\n    {words}\n    """\n', encoding="utf-8")
    return DocstringsDataset({"pkg": folder})


def check_documents(collection, source, *, recipe, count=count_tokens):
    """What holds for every collection, counted again in the texts."""
    text_of = {row["docno"]: row["text"].strip() for row in source}
    relevant = set(map(digest, (text_of[docno] for docno in collection.gold["passage"])))
    documents = collection.documents
    for row in collection.gold.itertuples():
        text = documents[row.docno]["text"]
        assert text[row.start : row.end] == text_of[row.passage]
        assert count(text) == row.length
        assert count(text[: row.start].rstrip()) == row.first_token
        pieces = documents.pieces(row.docno)
        assert text == recipe.separator.join(text_of[piece] for piece in pieces)
        assert len(set(pieces)) == len(pieces)
        assert [piece for piece in pieces if digest(text_of[piece]) in relevant] == [row.passage]
        if recipe.position == "far":
            assert row.first_token >= recipe.min_offset
        size = row.length - max((count(text_of[piece]) for piece in pieces if piece != row.passage), default=0)
        assert (size if recipe.extra_passage else row.length) <= recipe.max_length


# ---------------------------------------------------------------- properties on real collections


@pytest.mark.parametrize("extra_passage", [True, False])
@pytest.mark.parametrize("position", POSITIONS)
def test_vaswani_has_the_properties_of_the_algorithm(vaswani, position, extra_passage):
    recipe = Recipe(position=position, extra_passage=extra_passage)
    collection = far_relevant(vaswani, position=position, extra_passage=extra_passage, relevant_per_query=3)
    assert len(collection.gold["docno"].unique()) > 250
    check_documents(collection, vaswani.get_corpus_iter(verbose=False), recipe=recipe)
    assert collection.gold["length"].min() > 512
    over = collection.document_statistics()["over_1431"].item()
    assert (over > 0) == extra_passage
    assert over < 0.1
    assert not len(find_leaks(collection))


@pytest.mark.parametrize("position", POSITIONS)
def test_docstrings_have_the_properties_of_the_algorithm(short_docstrings, position):
    collection = docstrings_with(position, short_docstrings)
    source = [{"docno": entry.docno, "text": entry.text} for entry in short_docstrings.entries]
    recipe = Recipe(position=position, extra_passage=False)
    check_documents(collection, source, recipe=recipe)
    short = [entry for entry in short_docstrings.entries if entry.tokens <= 256]
    assert set(collection.gold["passage"]) == {entry.docno for entry in short if entry.query}
    assert set(collection.splits) <= {"train", "dev", "test"}
    assert collection.get_topics().equals(collection.get_topics("test"))
    for split in collection.splits:
        assert set(collection.get_topics(split)["qid"]) <= set(short_docstrings.get_topics(split)["qid"])
    if position == "early":
        sizes = collection.gold["end"] - collection.gold["start"]
        assert (collection.gold["first_token"][sizes > 2000] == 0).all()


def test_positions_share_filler_and_lengths(vaswani):
    made = {position: far_relevant(vaswani, position=position, relevant_per_query=1) for position in POSITIONS}
    gold = {position: collection.gold.set_index(["qid", "docno"]) for position, collection in made.items()}
    assert gold["early"]["length"].equals(gold["far"]["length"])
    assert gold["uniform"]["length"].equals(gold["far"]["length"])
    for docno in made["far"].documents:
        expected = sorted(made["far"].documents.pieces(docno))
        assert sorted(made["early"].documents.pieces(docno)) == expected
        assert sorted(made["uniform"].documents.pieces(docno)) == expected
    assert (gold["far"]["first_token"] >= 512).all()
    early = gold["early"]["first_token"]
    assert early.max() < 512
    assert early.nunique() > 20
    uniform = gold["uniform"]["first_token"] / gold["uniform"]["length"]
    assert 0.4 < uniform.mean() < 0.55
    assert (uniform < 0.2).any()
    assert (uniform > 0.8).any()


WRITE = """
import json, sys
import pandas as pd
from pyterrier_longdoc.data.far_relevant import far_relevant
from pyterrier_longdoc.data.jsonl import write_far_relevant
passages, topics, qrels, settings, folder = json.load(sys.stdin)
write_far_relevant(far_relevant(passages, pd.DataFrame(topics), pd.DataFrame(qrels), **settings), folder)
"""


def test_same_seed_same_bytes_in_another_process_too(tmp_path):
    splits = {"train": 0.6, "test": 0.4}
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        write_far_relevant(build(seed=seed, splits=splits), tmp_path / name)
    given = [passages(), topics().to_dict("list"), qrels().to_dict("list"), {**SMALL, "seed": 1, "splits": splits}]
    subprocess.run(
        [sys.executable, "-c", WRITE],
        input=json.dumps([*given, str(tmp_path / "d")]),
        cwd=Path(__file__).resolve().parents[2],
        env={**os.environ, "PYTHONHASHSEED": "3"},
        text=True,
        check=True,
    )
    files = [path.relative_to(tmp_path / "a") for path in (tmp_path / "a").rglob("*") if path.is_file()]
    assert len(files) == 6
    for file in files:
        content = (tmp_path / "a" / file).read_bytes()
        assert (tmp_path / "b" / file).read_bytes() == content
        assert (tmp_path / "d" / file).read_bytes() == content
    documents = "input_data/docs/AnswerFields.jsonl.gz"
    assert (tmp_path / "a" / documents).read_bytes() != (tmp_path / "c" / documents).read_bytes()


def test_bytes_stay_the_same_from_version_to_version():
    # Fixed for good: published numbers depend on it.
    collection = build(distractors=3)
    content = json.dumps([list(collection.corpus), collection.gold.values.tolist()])
    assert (
        hashlib.sha256(content.encode()).hexdigest()
        == "dc078aa11a07beef683c639e8da7c51cd0b33b92f7c3bc28034387fd1786e9f1"
    )


def test_a_document_does_not_depend_on_the_others():
    every, one = build(), build(topics=topics().iloc[3:4], relevant_per_query=1, exclude="own")
    [docno] = one.documents
    fewer = build(relevant_per_query=1)
    assert set(fewer.documents) < set(every.documents)
    assert all(fewer.documents[docno] == every.documents[docno] for docno in fewer.documents)
    assert docno in every.documents


# ---------------------------------------------------------------- properties on random collections


@settings(max_examples=20, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    position=st.sampled_from(POSITIONS),
    extra_passage=st.booleans(),
    min_offset=st.integers(0, 40),
    room=st.integers(30, 80),
    separator=st.sampled_from([" ", "\n\n"]),
    exclude=st.sampled_from(["all", "own"]),
    copies=st.integers(1, 2),
    length=st.sampled_from(["uniform", "longest", "list"]),
)
def test_random_collections_have_the_properties(
    seed, position, extra_passage, min_offset, room, separator, exclude, copies, length
):
    max_length = min_offset + room
    recipe = Recipe(position, min_offset, None, max_length, "uniform", extra_passage, separator, seed)
    chosen = {"uniform": "uniform", "longest": max_length, "list": [1, max_length - 1, max_length]}[length]
    source = passages(seed=seed)
    collection = build(
        passages=source,
        **{name: getattr(recipe, name) for name in ("position", "min_offset", "max_length", "separator", "seed")},
        extra_passage=extra_passage,
        exclude="all",
        copies=copies,
        length=chosen,
    )
    assert len(collection.documents) == 10 * copies
    check_documents(collection, source, recipe=recipe)
    if length != "uniform" and extra_passage:
        assert (collection.gold["length"] >= max_length - 1).all()
    assert not len(find_leaks(build(passages=source, exclude=exclude, seed=seed)).query("kind == 'relevant filler'"))


@settings(max_examples=30, deadline=None)
@given(st.lists(st.integers(1, 300), min_size=1, max_size=30), st.integers(1, 300), st.integers(0, 600))
def test_slots_are_where_the_position_says(sizes, passage, min_offset):
    before = np.cumsum([0, *sizes])
    slots = {
        position: Recipe(position, min_offset, None, min_offset + 1000).slots(before, passage) for position in POSITIONS
    }
    assert slots["uniform"] == (0, len(sizes))
    first, last = slots["early"]
    assert first == 0
    assert last == 0 or before[last] + passage <= min_offset
    assert last == len(sizes) or before[last + 1] + passage > min_offset
    if before[-1] >= min_offset:
        first, last = slots["far"]
        assert last == len(sizes)
        assert before[first] >= min_offset
        assert first == 0 or before[first - 1] < min_offset


def test_length_is_drawn_uniformly_and_from_functions():
    rng = random.Random(0)
    drawn = [Recipe(min_offset=5, max_length=14).target(rng, 10) for _ in range(2000)]
    assert set(drawn) == {10, 11, 12, 13, 14}
    assert all(350 < count < 450 for count in np.bincount(drawn)[10:])
    largest = Recipe(min_offset=5, max_length=14, length=lambda rng, smallest, largest: largest)
    assert largest.target(rng, 10) == 14
    assert {Recipe(min_offset=5, max_length=14, length=[1, 11, 20]).target(rng, 10) for _ in range(20)} == {11}


# ---------------------------------------------------------------- tokens


def test_offsets_are_in_the_tokens_of_the_tokenizer():
    tokenizer = tiny.tokenizer()
    collection = build(tokenizer=tokenizer)
    assert collection.documents.lengths_add_up
    count = lambda text: len(tokenizer(text, add_special_tokens=False)["input_ids"])  # noqa: E731
    check_documents(collection, passages(), recipe=Recipe(**SMALL), count=count)
    same = build(tokenizer=tokenizer.backend_tokenizer)
    assert same.gold.equals(collection.gold)


def test_early_passages_end_early_where_lengths_do_not_add_up():
    # A token for each character: the separators count too.
    source = [{"docno": f"p{i}", "text": "x" * (i % 9) + str(i)} for i in range(400)]
    collection = build(passages=source, tokenizer=len, position="early", min_offset=30, max_length=60, copies=20)
    assert not collection.documents.lengths_add_up
    assert collection.gold["end"].between(1, 30).all()
    assert (collection.gold["start"] > 0).any()


def test_offsets_are_kept_where_lengths_do_not_add_up():
    # A token for three characters: what stands in front of the passage has fewer than its pieces together.
    source = [{"docno": f"p{i}", "text": "abc"[: 1 + i % 3] + str(i)} for i in range(400)]
    collection = build(passages=source, tokenizer=lambda text: -(-len(text) // 3), min_offset=30, max_length=60)
    assert not collection.documents.lengths_add_up
    for row in collection.gold.itertuples():
        text = collection.documents[row.docno]["text"]
        assert -(-len(text[: row.start].rstrip()) // 3) == row.first_token >= 30
        assert -(-len(text) // 3) == row.length
    assert collection.lengths().tolist() == collection.gold["length"].tolist()


def test_unknown_tokenizers_are_refused():
    with pytest.raises(TypeError, match="tokenizer=3 must be a tokenizer"):
        token_counter(3)
    assert token_counter(tiny.tokenizer())([]) == []


# ---------------------------------------------------------------- topics, qrels, splits


def test_qrels_name_all_topics_that_a_passage_is_relevant_for():
    shared = pd.DataFrame({"qid": ["q0", "q1", "q1"], "docno": ["p0", "p0", "p1"], "label": [1, 2, 1]})
    collection = build(topics=topics(2), qrels=shared)
    found = sorted(map(tuple, collection.qrels[["qid", "docno"]].values))
    assert found == [
        ("q0", "q0_p0"), ("q0", "q1_p0"), ("q1", "q0_p0"), ("q1", "q1_p0"), ("q1", "q1_p1")
    ]  # fmt: skip
    assert sorted(map(tuple, collection.gold[["qid", "docno"]].values)) == found
    one = build(topics=topics(2), qrels=shared, relevant_per_query=1)
    assert sorted(one.documents) == ["q0_p0", "q1_p1"]  # q1 has a passage of its own


def test_equal_texts_are_one_passage():
    source = [*passages(), {"docno": "copy", "text": "  " + passages()[0]["text"].upper()}]
    both = pd.concat([qrels(), pd.DataFrame({"qid": ["q0"], "docno": ["copy"], "label": [1]})])
    assert len(build(passages=source, qrels=both).documents) == len(build().documents) == 10
    check_leaks(build(passages=source))  # the copy is no filler


def test_labels_and_topics_without_relevant_passages():
    graded = qrels().assign(label=[0, 1, 2] * 3 + [-1])
    collection = build(qrels=graded, min_label=2)
    assert collection.qrels["docno"].tolist() == ["q1_p2", "q2_p5", "q4_p8"]
    assert collection.topics["qid"].tolist() == ["q1", "q2", "q4"]


def test_splits_keep_topics_with_a_common_passage_together():
    shared = pd.concat([qrels(), pd.DataFrame({"qid": ["q3"], "docno": ["p0"], "label": [1]})])
    for seed in range(5):
        collection = build(qrels=shared, splits={"train": 3, "test": 2}, seed=seed)
        [with_q0] = [split for split, qids in collection.splits.items() if "q0" in qids]
        assert "q3" in collection.splits[with_q0]
        assert sorted(map(len, collection.splits.values())) == [2, 3]
        assert sorted(qid for qids in collection.splits.values() for qid in qids) == ["q0", "q1", "q2", "q3", "q4"]
        assert set(collection.get_qrels("test")["qid"]) == set(collection.splits["test"])
        assert pt.inspect.transformer_inputs(collection.text_loader()) == [["docno"]]
        check_leaks(collection)
    assert set(build(topics=topics().assign(split=list("aabba"))).splits["b"]) == {"q2", "q3"}
    with pytest.raises(ValueError, match=r"no variant 'dev'; available are \['train', 'test'\]"):
        build(splits={"train": 1, "test": 1}).get_topics("dev")


@settings(max_examples=50, deadline=None)
@given(st.integers(2, 40), st.integers(0, 100))
def test_split_shares_are_met(count, seed):
    qids = [str(i) for i in range(count)]
    alone = by_split(qids, [[qid] for qid in qids], {"a": 1, "b": 1}, seed)
    assert abs(alone.count("a") - count / 2) <= 0.5
    groups = [random.Random(seed).sample(qids[:-1], 2)] if count > 2 else [[qids[0]]]
    together = dict(zip(qids, by_split(qids, groups, {"a": 3, "b": 1}, seed), strict=True))
    assert len({together[qid] for qid in groups[0]}) == 1
    assert set(together.values()) == {"a", "b"}


def test_splits_keep_topics_with_the_same_query_together():
    same = topics().assign(query=["One query", "another", "a third", "one  QUERY", "a fourth"])
    for seed in range(10):
        collection = build(topics=same, splits={"train": 1, "test": 1}, seed=seed)
        check_leaks(collection)
        assert sum({"q0", "q3"} <= set(qids) for qids in collection.splits.values()) == 1


def test_copies_and_distractors():
    collection = build(copies=3, distractors=7)
    assert len(collection.documents) == 37
    texts = [row["text"] for row in collection.corpus]
    assert len(set(texts)) == 37
    assert set(collection.qrels["docno"]) == {
        f"q{i}_p{i * 2 + j}_{n}" for i in range(5) for j in (0, 1) for n in (1, 2, 3)
    }
    relevant = {f"p{i}" for i in range(10)}
    for number in range(7):
        assert not relevant & set(collection.documents.pieces(f"distractor_{number}"))
    assert collection.lengths()[-7:].min() >= 20
    own = build(copies=3, distractors=20, exclude="own")
    assert not find_leaks(own)["docno"].str.startswith("distractor").any()
    assert set(find_leaks(own)["kind"]) == {"unjudged passage"}


def test_candidates_of_random_order_have_the_mrr_of_chance():
    source = [{"docno": f"p{i}", "text": f"word{i} of text"} for i in range(1100)]
    many = pd.DataFrame({"qid": [f"q{i}" for i in range(1000)], "query": "x"})
    judged = pd.DataFrame({"qid": many["qid"], "docno": [f"p{i}" for i in range(1000)], "label": 1})
    collection = far_relevant(source, many, judged, min_offset=3, max_length=9)
    run = collection.candidates(depth=100)
    assert (run.groupby("qid").size() == 100).all()
    assert not run.duplicated(["qid", "docno"]).any()
    table = pt.Experiment([pt.Transformer.from_df(run)], many, collection.qrels, ["recip_rank"])
    expected = sum(1 / rank for rank in range(1, 101)) / 100
    assert table["recip_rank"].item() == pytest.approx(expected, abs=0.01)
    assert collection.candidates(depth=100).equals(run)
    assert not collection.candidates(depth=100, seed=1)["docno"].equals(run["docno"])
    with pytest.raises(ValueError, match=r"depth=1001 cannot be met for topic 'q0': 1 of 1000 documents are relevant"):
        collection.candidates(depth=1001)
    with pytest.raises(ValueError, match="no groups of equal length"):
        collection.candidates(pool="same_length")
    with pytest.raises(ValueError, match="pool='some' is unknown"):
        collection.candidates(pool="some")


# ---------------------------------------------------------------- the collection as a dataset


def test_collection_is_a_dataset():
    collection = build()
    corpus = collection.get_corpus_iter(verbose=False)
    assert len(corpus) == 10
    assert list(corpus) == list(collection.corpus) == list(collection.corpus)
    run = collection.qrels.assign(query="x", score=0.0, rank=0)
    loaded = collection.text_loader()(run)
    assert loaded["text"].tolist() == [collection.documents[docno]["text"] for docno in run["docno"]]
    again = pickle.loads(pickle.dumps(collection.text_loader()))
    assert again(run).equals(loaded)
    with pytest.raises(KeyError, match="'nowhere' is not in the collection 'far-relevant'"):
        collection.text_loader()(run.assign(docno="nowhere"))
    assert collection.gold.dtypes.astype(str)["start"] == "int64"
    assert repr(collection) == "PositionedCollection('far-relevant')"
    assert collection.get_topicsqrels()[1].equals(collection.qrels)


def test_statistics_are_those_of_the_texts():
    collection = build(splits={"a": 1, "b": 1}, distractors=4)
    sizes = [count_tokens(row["text"]) for row in collection.corpus]
    [row] = collection.document_statistics(limits=(50,)).to_dict("records")
    assert row["documents"] == 14
    assert row["mean"] == np.mean(sizes)
    assert row["max"] == max(sizes)
    assert row["over_50"] == np.mean([size > 50 for size in sizes])
    assert row["first_min"] == collection.gold["first_token"].min()
    table = collection.query_statistics().set_index("split")
    assert table.loc["all"].tolist() == [5, 3.0, 2.0]
    assert sorted(table.index) == ["a", "all", "b"]


def test_documents_are_made_one_at_a_time():
    collection = build(copies=200)
    next(iter(collection.corpus))
    tracemalloc.start()
    size = sum(len(row["text"]) for row in collection.corpus)
    memory = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert size > 300_000
    assert memory < size / 5


def test_any_source_will_do(tmp_path, vaswani):
    frame = pd.DataFrame(passages())
    expected = list(build().corpus)
    assert list(build(passages=frame).corpus) == expected
    assert list(build(passages=iter(passages())).corpus) == expected
    renamed = [{"docno": row["docno"], "title": row["text"].split(" ")[0], "body": row["text"].partition(" ")[2]}
               for row in passages()]  # fmt: skip
    assert list(build(passages=renamed, text_field=("title", "body")).corpus) == expected
    by_name = far_relevant(f"longdoc:folder:{vaswani.path}", relevant_per_query=1)
    assert next(iter(by_name.corpus)) == next(iter(far_relevant(vaswani, relevant_per_query=1).corpus))


def test_large_pools_are_on_disk(monkeypatch):
    monkeypatch.setattr("pyterrier_longdoc.data.passages._IN_MEMORY", 100)
    spool = TextSpool()
    for number in range(50):
        spool.append(f"n{number}", f"téxt {number} \ud800")
    assert spool._file is not None
    assert [spool.read(number) for number in (49, 0)] == [("n49", "téxt 49 ?"), ("n0", "téxt 0 ?")]
    with ThreadPoolExecutor(8) as threads:
        found = list(threads.map(spool.read, [number % 50 for number in range(2000)]))
    assert all(name == f"n{number % 50}" and str(number % 50) in text for number, (name, text) in enumerate(found))
    copy = pickle.loads(pickle.dumps(spool))
    copy.append("x", "y")
    assert copy.read(50) == ("x", "y")
    assert copy.read(7) == spool.read(7)
    assert list(build().corpus) == list(build().corpus)


# ---------------------------------------------------------------- files


def test_files_round_trip(tmp_path):
    collection = build(
        splits={"dev_official": 2, "bitext": 3}, passages=[*passages(), {"docno": "é\u2028", "text": "ü\n\x0c"}]
    )
    write_far_relevant(collection, tmp_path)
    for folder in (tmp_path, str(tmp_path)):
        again = read_far_relevant(folder)
        assert list(again.corpus) == list(collection.corpus)
        assert again.gold.equals(collection.gold)
        for split in collection.splits:
            assert again.get_topics(split).equals(collection.get_topics(split))
            assert sorted(map(tuple, again.get_qrels(split).values)) == sorted(
                map(tuple, collection.get_qrels(split).values)
            )
    lines = (tmp_path / "input_data" / "bitext" / "QuestionFields.jsonl").read_text(encoding="utf-8").splitlines()
    assert set(json.loads(lines[0])) == {"DOCNO", "text_raw"}
    dataset = pt.get_dataset(f"longdoc:far-relevant:{tmp_path}")
    assert dataset.get_topics("bitext").equals(collection.get_topics("bitext"))
    assert (
        dataset.text_loader()(dataset.qrels)["text"].tolist()
        == collection.text_loader()(dataset.qrels)["text"].tolist()
    )
    assert dataset.document_statistics().equals(collection.document_statistics())


def released(folder, part="bitext", **changes):
    """A collection in files, as released: with further fields, and without gold positions."""
    files = {
        "AnswerFields.jsonl": '{"DOCNO": "d1", "text_raw": "a text", "x": 1}\n\n{"DOCNO": "d2", "text_raw": "b"}\n',
        "QuestionFields.jsonl": '{"DOCNO": "q1", "text_raw": "a query"}\n',
        "qrels.txt": "q1 0 d1 1\n",
        **changes,
    }
    (folder / part).mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        if content:
            (folder / part / name).write_text(content)
    return folder


def test_names_that_could_not_be_read_back_are_not_written(tmp_path):
    odd = {"docno": 'é/猫"\\,'}
    source, judged = [{**passages()[0], **odd}, *passages()[1:]], qrels(1, 1).assign(**odd)
    collection = build(passages=source, qrels=judged, splits={"é, all": 1})
    write_far_relevant(collection, tmp_path / "odd")
    again = read_far_relevant(tmp_path / "odd")
    assert again.gold.equals(collection.gold)
    assert again.qrels.equals(collection.qrels)
    assert again.splits == collection.splits
    for blank in ("a b", "a\u00a0b", "a\u2028"):
        source[0]["docno"] = blank
        with pytest.raises(ValueError, match=r"docno 'q0_a.*' cannot be written: .* no white space"):
            write_far_relevant(build(passages=source, qrels=qrels(1, 1).assign(docno=blank)), tmp_path / "blank")
    for part in ("", "..", "a/b"):
        with pytest.raises(ValueError, match=f"split {part!r} cannot be written"):
            write_far_relevant(build(splits={part: 1}), tmp_path / "blank")
    assert not (tmp_path / "blank").exists()


def test_released_files_are_read(tmp_path):
    released(tmp_path, "bitext")
    released(tmp_path, "dev", **{"QuestionFields.jsonl": '{"DOCNO": "q2", "text_raw": "x"}', "qrels.txt": "q2 0 d2 1"})
    collection = read_far_relevant(tmp_path, default="dev")
    assert collection.splits == {"bitext": ["q1"], "dev": ["q2"]}
    assert collection.get_topics()["qid"].tolist() == ["q2"]
    assert [row["text"] for row in collection.corpus] == ["a text", "b"]
    assert len(collection.gold) == 0
    assert list(collection.gold.columns) == list(gold_frame([]).columns)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"AnswerFields.jsonl": '{"DOCNO": "d1", "text_raw": "x"'}, r"AnswerFields.jsonl:1: not a JSON object"),
        (
            {"AnswerFields.jsonl": '{"DOCNO": 7, "text_raw": "x"}'},
            r"jsonl:1: expected an object with the string 'DOCNO'",
        ),
        ({"AnswerFields.jsonl": '["DOCNO"]'}, r"jsonl:1: expected an object with the string 'DOCNO'"),
        ({"qrels.txt": "q1 d1 1\n"}, r"qrels.txt:1: expected 'qid iteration docno label'"),
        ({"QuestionFields.jsonl": None}, "holds no QuestionFields.jsonl or QuestionFields.jsonl.gz"),
        ({"qrels.txt": None}, "holds no qrels.txt"),
        (
            {"AnswerFields.jsonl": '{"DOCNO": "d", "text_raw": "x"}\n{"DOCNO": "d", "text_raw": "y"}'},
            "'d' is there twice, with different texts",
        ),
    ],
)
def test_malformed_files_are_named(tmp_path, changes, message):
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        read_far_relevant(released(tmp_path, **changes))


def test_parts_are_kept_between_runs(tmp_path, monkeypatch, short_docstrings):
    monkeypatch.setenv("PYTERRIER_HOME", str(tmp_path))
    monkeypatch.setattr("pyterrier_longdoc.data.named.DocstringsDataset", lambda: short_docstrings)
    built = docstrings_with("far")
    assert not list(tmp_path.rglob("docstrings-far-*"))  # nothing is read yet
    rows = list(built.corpus)
    [file] = tmp_path.rglob("docstrings-far-*")
    content = file.read_bytes()
    monkeypatch.setattr("pyterrier_longdoc.data.named.far_relevant", None)
    again = docstrings_with("far")
    assert list(again.corpus) == rows
    assert again.gold.equals(built.gold)
    assert again.splits == built.splits
    assert again.qrels.equals(built.qrels)
    assert again.topics.equals(built.topics)
    assert file.read_bytes() == content
    empty = Parts({}, topics(0), qrels(0), gold_frame([]))
    assert len(kept_parts("empty", {}, lambda: empty).topics) == 0


# ---------------------------------------------------------------- leaks


def planted(**changes):
    """A collection without leaks: two splits, one topic and document each."""
    documents = {"d1": "filler one relevant alpha", "d2": "filler two relevant beta"}
    values = {
        "documents": {docno: {"docno": docno, "text": text} for docno, text in documents.items()},
        "topics": pd.DataFrame({"qid": ["q1", "q2"], "query": ["first", "second"]}),
        "qrels": pd.DataFrame({"qid": ["q1", "q2"], "docno": ["d1", "d2"], "label": 1}),
        "gold": gold_frame([("q1", "d1", 11, 25, 2, 4, "far", ""), ("q2", "d2", 11, 24, 2, 4, "far", "")]),
        "splits": {"train": ["q1"], "test": ["q2"]},
    }
    return PositionedCollection("planted", Parts(**{**values, **changes}), count=token_counter())


def texts(**changed):
    documents = {**planted().documents, **{docno: {"docno": docno, "text": text} for docno, text in changed.items()}}
    return {"documents": documents}


def test_every_kind_of_leak_is_found():
    check_leaks(planted())
    queries = pd.DataFrame({"qid": ["q1", "q2"], "query": ["The same", "the  SAME"]})
    found = {
        "shared query": planted(topics=queries),
        "shared passage": planted(**texts(d2="another b RELEVANT  alpha"), gold=gold_frame(
            [("q1", "d1", 11, 25, 2, 4, "far", ""), ("q2", "d2", 10, 25, 2, 4, "far", "")])),
        "duplicate document": planted(**texts(d3="Filler one\nrelevant alpha")),
        "unjudged passage": build(exclude="own"),
    }  # fmt: skip
    for kind, collection in found.items():
        assert set(find_leaks(collection)["kind"]) == {kind}
        with pytest.raises(ValueError, match=f"x {kind}"):
            check_leaks(collection)
    nested = planted(topics=queries, splits={"dev": ["q1", "q2"], "sample": ["q1"]})
    check_leaks(nested)

    leaking = build()
    assert isinstance(leaking.documents, FarDocuments)
    leaking.documents._filler = np.arange(10, dtype=np.int32)  # relevant passages only
    leaking.documents.relevance.digests_of = {topic: set() for topic in range(5)}
    assert set(find_leaks(leaking)["kind"]) == {"relevant filler", "unjudged passage"}
    assert set(LEAKS) == {*found, "relevant filler"}


# ---------------------------------------------------------------- bad input


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"position": "middle"}, "position='middle' is unknown; choose one of early, uniform, far"),
        ({"min_offset": -1}, "min_offset=-1 must be at least 0"),
        ({"max_length": 20}, "max_length=20 must be greater than min_offset=20"),
        ({"within": 0}, "within=0 must be at least 1"),
        ({"length": "normal"}, "length='normal' is unknown"),
        ({"length": []}, r"length=\[\] holds no length"),
        ({"length": 50.0}, "length=50.0 is unknown; choose 'uniform', whole numbers"),
        ({"length": np.int64(500)}, r"length=np.int64\(500\) gives none from"),
        ({"min_passage": 0}, "min_passage=0 must be at least 1"),
        ({"qrels": qrels().astype({"label": str})}, "qrels: column label must hold numbers, not '1'"),
        ({"length": 500}, "length=500 gives none from"),
        ({"length": [1, 2]}, r"length=\[1, 2\] gives none from"),
        ({"length": lambda rng, smallest, largest: largest + 1}, "gives none from"),
        ({"separator": ""}, "separator='' must be white space"),
        ({"separator": " | "}, "must be white space"),
        ({"relevant_per_query": 0}, "relevant_per_query=0 must be at least 1"),
        ({"copies": 0}, "copies=0 must be at least 1"),
        ({"distractors": -1}, "distractors=-1 must be at least 0"),
        ({"exclude": "none"}, "exclude='none' is unknown; choose one of all, own"),
        ({"unfit": "drop"}, "unfit='drop' is unknown; choose one of raise, skip"),
        ({"splits": {"a": 0}}, "must be names with positive shares"),
        ({"splits": dict.fromkeys("abcdefg", 1)}, "f, g would be empty"),
        ({"variant": "dev"}, "variant='dev' is of datasets only"),
        ({"topics": topics().drop(columns="query")}, r"topics lack the column\(s\) query"),
        ({"qrels": qrels().drop(columns="label")}, r"qrels lack the column\(s\) label"),
        ({"topics": pd.concat([topics(), topics(1)])}, "topics: qid 'q0' is there twice"),
        ({"qrels": qrels().assign(label=0)}, "no topic has a relevant passage"),
        ({"qrels": qrels(0)}, "no topic has a relevant passage: none of 0 qrels"),
        ({"topics": None}, "topics and qrels are missing"),
        ({"passages": []}, "'p0' of topic 'q0' is unfit: not in the collection"),
        ({"passages": passages(5)}, r"'p5' of topic 'q2' is unfit: not in the collection.*\(5 of 10 are unfit\)"),
        ({"passages": passages(10)}, "no filler: of 10 passages none has 1 tokens or more"),
        ({"passages": passages(12)}, "cannot be completed: no further filler passage among 2"),
        ({"passages": [{"docno": "p0", "text": " \n"}, *passages()[1:]]}, "'p0' of topic 'q0' is unfit: 0 tokens"),
        ({"min_passage": 100}, "unfit: .* tokens, where 100 to 40 tokens are needed"),
        ({"max_length": 21}, "raise max_length"),
        ({"passages": [*passages(), passages()[0]]}, "docno 'p0' is there twice"),
        ({"passages": [{"docno": "p0", "body": "x"}]}, r"'p0' has no text in field 'text' \(there are docno, body\)"),
        ({"passages": [{"docno": "p0", "text": b"x"}]}, "field 'text' of 'p0' holds bytes"),
        ({"passages": [{"text": "x"}]}, "a document has no docno"),
    ],
)
def test_bad_input_is_named(arguments, message):
    with pytest.raises(ValueError, match=message):
        list(build(**arguments).corpus)


@pytest.mark.parametrize(("ids", "distractors"), [({"a_b": "c", "a": "b_c"}, 0), ({"distractor": "0"}, 1)])
def test_documents_have_names_of_their_own(ids, distractors):
    source = [{**row, "docno": docno} for row, docno in zip(passages(), ids.values(), strict=False)]
    asked = pd.DataFrame({"qid": list(ids), "query": list(ids)})
    judged = pd.DataFrame({"qid": list(ids), "docno": list(ids.values()), "label": 1})
    with pytest.raises(ValueError, match=r"two documents are called '(a_b_c|distractor_0)'"):
        build(passages=[*source, *passages()[len(ids) :]], topics=asked, qrels=judged, distractors=distractors)


def test_unknown_datasets_are_named():
    with pytest.raises(KeyError, match="no-such"):
        far_relevant("no-such-collection")


def test_unfit_passages_can_be_left_out():
    source = [{"docno": "p0", "text": ""}, {"docno": "p1", "text": "word " * 50}, *passages()[3:]]
    collection = build(passages=source, unfit="skip")
    assert set(collection.gold["passage"]) == {f"p{i}" for i in range(3, 10)}
    assert collection.topics["qid"].tolist() == ["q1", "q2", "q3", "q4"]
    with pytest.raises(ValueError, match=r"\(10 of 10 are unfit\)"):
        build(max_passage=1, unfit="skip")


def test_filler_that_fits_is_found_in_a_large_pool():
    pool = PassagePool.read(passages(3), count=token_counter(), judged={"p1"})
    assert pool.index_of == {"p1": 1}
    # One passage of 3001 has few enough tokens for the room that is left.
    rest = [{"docno": f"x{i}", "text": f"long{i} " + "w " * 30} for i in range(3000)]
    judged = pd.DataFrame({"qid": ["q0"], "docno": ["p0"], "label": [1]})
    collection = far_relevant(
        [passages(1)[0], *rest, {"docno": "fits", "text": "one two"}],
        topics(1),
        judged,
        min_offset=2,
        max_length=2 + len(passages(1)[0]["text"].split()),
        extra_passage=False,
    )
    assert collection.documents.pieces("q0_p0") == ["fits", "p0"]
