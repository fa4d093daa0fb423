"""Collections in the layout in which others publish them: invented rows, the published names of files and fields."""

import gzip
import json
import tracemalloc

import pyterrier as pt
import pytest

from pyterrier_longdoc.common.language import count_tokens
from pyterrier_longdoc.data import (
    read_bright,
    read_colder,
    read_fineweb_posq,
    read_longembed,
    read_mldr,
    read_squad_posq,
)
from pyterrier_longdoc.data.published import PREFERRED, SQUAD_GROUPS

from ..support.systems import QUIET

pytestmark = QUIET

FORMATS = ["jsonl", "jsonl.gz", "parquet"]


def write(path, rows, form="jsonl"):
    """A table, its format added to the path."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path = path.with_name(f"{path.name}.{form}")
    content = "".join(json.dumps(row) + "\n" for row in rows).encode()
    if form == "parquet":
        arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
        parquet.write_table(arrow.Table.from_pylist(rows), path)
    else:
        path.write_bytes(gzip.compress(content) if form == "jsonl.gz" else content)
    return path


# ---------------------------------------------------------------- LongEmbed


LONGEMBED = {
    "corpus": [{"doc_id": f"d{i}", "text": f"text {i}", "context_length": 256 * (1 + i % 2)} for i in range(4)],
    "queries": [{"qid": f"q{i}", "text": f"query {i}", "context_length": 256 * (1 + i % 2)} for i in range(2)],
    "qrels": [{"qid": f"q{i}", "doc_id": f"d{i}"} for i in range(2)],
}


@pytest.mark.parametrize("form", FORMATS)
def test_longembed(tmp_path, form):
    for name, rows in LONGEMBED.items():
        write(tmp_path / name, rows, form)
    collection = pt.get_dataset(f"longdoc:longembed:{tmp_path}")
    assert collection.splits == {"256": ["q0"], "512": ["q1"]}
    assert collection.get_qrels("512").values.tolist() == [["q1", "d1", 1]]
    assert sorted(collection.candidates("256", pool="same_length")["docno"]) == ["d0", "d2"]
    assert len(collection.candidates()) == 8
    assert collection.documents["d3"] == {"docno": "d3", "text": "text 3"}
    assert len(collection.gold) == 0
    assert collection.statistics()["queries"].tolist() == [1, 1, 2]


def test_longembed_without_lengths_and_malformed(tmp_path):
    kept = ("doc_id", "qid", "text")
    bare = {part: [{k: row[k] for k in kept if k in row} for row in rows] for part, rows in LONGEMBED.items()}
    with pytest.raises(FileNotFoundError, match="corpus"):
        read_longembed(tmp_path)
    for name, rows in bare.items():
        write(tmp_path / name, rows)
    collection = read_longembed(tmp_path)
    assert (collection.splits, len(collection.get_topics())) == ({}, 2)
    write(tmp_path / "qrels", [{"qid": "q0", "doc_id": 3}])
    with pytest.raises(ValueError, match=r"qrels\.jsonl:1: field 'doc_id'"):
        read_longembed(tmp_path)


# ---------------------------------------------------------------- BRIGHT


def bright(folder, form="jsonl"):
    """Two domains, the second one without long documents; as published, each in one part."""
    part = "-00000-of-00001"
    pages = [{"id": f"moths/Page_{i}.txt", "content": f"Page {i} on moths and light. " * 9} for i in range(4)]
    pieces = [{"id": f"moths/Page_{i}_{j}.txt", "content": f"Piece {j} of {i}."} for i in range(4) for j in range(2)]
    query = {"reasoning": "They steer by it.", "gold_answer": "N/A", "excluded_ids": ["N/A"]}
    queries = [
        {
            "query": f"Why do moths fly to the light of lamp {i}?",
            "id": str(i),
            "gold_ids_long": [f"moths/Page_{i}.txt"],
            "gold_ids": [f"moths/Page_{i}_0.txt", f"moths/Page_{i}_1.txt"],
            **query,
        }
        for i in range(2)
    ]
    for table, rows in (("long_documents", pages), ("documents", pieces), ("examples", queries)):
        write(folder / table / f"biology{part}", rows, form)
    thought = [{**row, "query": f"{row['query']} Light guides them."} for row in queries]
    write(folder / "gpt4_reason" / f"biology{part}", thought, form)
    problems = [{"id": f"aops_{i}", "content": f"Problem {i}. Solution: {i}."} for i in range(3)]
    asked = {"query": "What is 0?", "id": "0", "gold_ids": ["aops_1"], "gold_ids_long": ["N/A"]}
    write(folder / "documents" / f"aops{part}", problems, form)
    write(folder / "examples" / f"aops{part}", [{**query, **asked, "excluded_ids": ["aops_0"]}], form)
    return folder


@pytest.mark.parametrize("form", FORMATS)
def test_bright(tmp_path, form):
    collection = pt.get_dataset(f"longdoc:bright:biology:{bright(tmp_path, form)}")
    assert list(collection.documents) == [f"moths/Page_{i}.txt" for i in range(4)]
    assert collection.documents["moths/Page_1.txt"]["text"].startswith("Page 1 on moths")
    assert collection.get_topics().values.tolist()[1] == ["1", "Why do moths fly to the light of lamp 1?"]
    assert collection.get_qrels().values.tolist() == [["0", "moths/Page_0.txt", 1], ["1", "moths/Page_1.txt", 1]]
    assert len(collection.excluded) == 0
    assert collection.statistics()["documents"].tolist() == [4]
    pieces = read_bright(tmp_path, "biology", documents="documents", queries="gpt4_reason")
    assert (len(pieces.documents), len(pieces.qrels)) == (8, 4)
    assert pieces.topics["query"].str.endswith("Light guides them.").all()


def test_a_domain_without_long_documents(tmp_path):
    """Its pieces are read instead, some of which must not be returned."""
    problems = read_bright(bright(tmp_path), "aops", documents="documents")
    assert problems.excluded.values.tolist() == [["0", "aops_0"]]
    assert sorted(problems.candidates()["docno"]) == ["aops_1", "aops_2"]
    with pytest.raises(FileNotFoundError, match=r"long_documents/aops\.parquet.*biology\)"):
        read_bright(tmp_path, "aops")
    with pytest.raises(ValueError, match="documents='short'"):
        read_bright(tmp_path, "biology", documents="short")


def test_judged_documents_that_are_missing_are_told_of(tmp_path):
    corpus = mldr(tmp_path, "jsonl") / "corpus.jsonl"
    corpus.write_text("".join(corpus.read_text().splitlines(keepends=True)[1:]))
    with pytest.warns(UserWarning, match="1 of 5 judged documents are not among the 7 .*'doc-en-0'"):
        assert len(read_mldr(tmp_path).get_qrels("train")) == 3


# ---------------------------------------------------------------- MLDR


def mldr(folder, form="jsonl.gz", splits=("train", "dev", "test"), documents=8):
    texts = [f"Article {i} tells of river {i}. " * 50 for i in range(documents)]
    write(folder / "corpus", [{"docid": f"doc-en-{i}", "text": text} for i, text in enumerate(texts)], form)
    for number, split in enumerate(splits):
        passages = [{"docid": f"doc-en-{i}", "text": texts[i]} for i in range(number, number + 3)]
        row = {"query_id": f"q-en-{number}", "query": f"Which river is in article {number}?"}
        negative = passages[1:] if split == "train" else []
        write(folder / split, [{**row, "positive_passages": passages[:1], "negative_passages": negative}], form)
    return folder


@pytest.mark.parametrize("form", FORMATS)
def test_mldr(tmp_path, form):
    collection = pt.get_dataset(f"longdoc:mldr:{mldr(tmp_path / 'mldr-v1.0-en', form)}")
    assert collection.splits == {"train": ["q-en-0"], "dev": ["q-en-1"], "test": ["q-en-2"]}
    assert collection.get_topics().values.tolist() == [["q-en-2", "Which river is in article 2?"]]  # test
    labels = collection.get_qrels("train").set_index("docno")["label"].to_dict()
    assert labels == {"doc-en-0": 1, "doc-en-1": 0, "doc-en-2": 0}
    assert len(collection.documents) == 8
    assert collection.text_loader()(collection.qrels)["text"].str.startswith("Article").all()


def test_mldr_reads_the_splits_that_are_asked_for(tmp_path):
    folder = mldr(tmp_path, splits=("train", "dev"))
    assert list(read_mldr(folder).splits) == ["train", "dev"]
    assert len(read_mldr(folder).get_topics()) == 2  # without test, all
    (folder / "train.jsonl.gz").write_bytes(b"never read")
    assert list(read_mldr(folder, splits=["dev"]).splits) == ["dev"]
    with pytest.raises(FileNotFoundError, match=r"test\.parquet"):
        read_mldr(folder, splits=["test"])
    with pytest.raises(ValueError, match="splits='validation'"):
        read_mldr(folder, splits=["validation"])


@pytest.mark.parametrize("read", [read_mldr, read_fineweb_posq])
def test_documents_are_not_held_in_memory(tmp_path, read):
    """English MLDR has 200,000 documents of some 20 kB."""
    texts = [f"{i} " + "long " * 4000 for i in range(400)]
    if read is read_mldr:
        mldr(tmp_path, "jsonl")
    rows = ({"docid": f"doc-en-{i}", "text": t, "content": t} for i, t in enumerate(texts))
    write(tmp_path / ("corpus" if read is read_mldr else "posq"), rows)
    size = sum(map(len, texts))
    tracemalloc.start()
    try:
        assert sum(len(row["text"]) for row in read(tmp_path).corpus) == size
        assert tracemalloc.get_traced_memory()[1] < size / 5
    finally:
        tracemalloc.stop()


# ---------------------------------------------------------------- SQuAD-PosQ


def squad(folder, form="jsonl"):
    """The answer of question n begins at character 100 * n of passage n; the last question has no answer."""
    rows = []
    for n in range(6):
        context = "word " * (20 * n) + f"The answer is {n}, as all know. " + "more " * 20
        answers = {"text": [f"The answer is {n}", "all"], "answer_start": [100 * n, 100 * n + 21]}
        rows.append({"id": f"56{n}", "title": "T", "context": context, "question": f"What is {n}?", "answers": answers})
    last = {**rows[0], "id": "57a", "question": "Who?", "answers": {"text": [], "answer_start": []}}
    alone = {**last, "id": "57b", "context": "A passage without an answer."}
    write(folder / "squad_v2" / "train-00000-of-00001", [*rows[:4], last], form)
    write(folder / "squad_v2" / "validation-00000-of-00001", [*rows[4:], alone], form)
    return folder


@pytest.mark.parametrize("form", FORMATS)
def test_squad_posq(tmp_path, form):
    collection = pt.get_dataset(f"longdoc:squad-posq:{squad(tmp_path, form)}")
    assert collection.topics.values.tolist() == [[f"56{n}", f"What is {n}?"] for n in range(6)]
    texts = {docno: row["text"] for docno, row in collection.documents.items()}
    assert len(texts) == 7  # each once, those without a question, too
    gold = collection.gold
    for n, row in enumerate(gold.to_dict("records")):
        assert texts[row["docno"]][row["start"] : row["end"]] == f"The answer is {n}"
        assert (row["first_token"], row["length"]) == (20 * n, count_tokens(texts[row["docno"]]))
    assert list(collection.splits) == list(SQUAD_GROUPS)
    # Groups have both ends, as in the paper: an answer that begins at character 100 is in two.
    assert list(map(len, collection.splits.values())) == [2, 2, 2, 2, 2, 1]
    assert gold["position"].tolist() == ["0-100", "0-100", "100-200", "200-300", "300-400", "400-500"]
    assert collection.get_qrels("500-3120").values.tolist() == [["565", gold["docno"][5], 1]]


@pytest.mark.parametrize("start", [101, -1, 10_000])
def test_answers_stand_where_they_are_said_to_stand(start, tmp_path):
    train = squad(tmp_path) / "squad_v2" / "train-00000-of-00001.jsonl"
    train.write_text(train.read_text().replace('"answer_start": [100,', f'"answer_start": [{start},'))
    with pytest.raises(ValueError, match=rf"jsonl:2: field 'answers' .* character {start} "):
        read_squad_posq(tmp_path).get_topics()


# ---------------------------------------------------------------- FineWeb-PosQ


def fineweb(folder, form="jsonl"):
    """Three pages of thirds, which say which third they are; and a page without a question."""
    pages = [" ".join(f"{third}{i}" for third in ("aaa", "bbb", "ccc") for _ in range(40)) for i in range(3)]
    tags = [["beginning"], ["middle"], ["end"], ["beginning", "middle"], ["middle", "end"]]
    rows = [
        {"question": f"What of {number}?", "content": pages[number % 3], "span_class": tag, "answer": "x"}
        for number, tag in enumerate(tags)
    ]
    return write(folder / "data", [*rows, {"question": None, "content": "No question.", "span_class": None}], form)


@pytest.mark.parametrize("form", FORMATS)
def test_fineweb_posq(tmp_path, form):
    file = fineweb(tmp_path, form)
    for path in (file, tmp_path):
        collection = pt.get_dataset(f"longdoc:fineweb-posq:{path}")
        assert collection.topics.values.tolist()[4] == ["q4", "What of 4?"]
        assert [row["text"][:4] for row in collection.corpus] == ["aaa0", "aaa1", "aaa2", "No q"]
        assert collection.splits == {"beginning": ["q0", "q3"], "middle": ["q1", "q3", "q4"], "end": ["q2", "q4"]}
    places = collection.gold[["start", "end", "first_token", "length"]].values.tolist()
    length = len(collection.documents["p0"]["text"])
    assert [place[:2] for place in places] == [
        [length * low // 3, length * high // 3] for low, high in ((0, 1), (1, 2), (2, 3), (0, 2), (1, 3))
    ]
    assert [place[2:] for place in places] == [[first, 120] for first in (0, 40, 80, 0, 40)]


def test_fineweb_posq_says_which_row_is_malformed(tmp_path):
    row = {"question": "What?", "content": "A page."}
    for tags in ("start", [], None, [["end"]]):
        file = write(tmp_path / "data", [{**row, "span_class": "end"}, {**row, "span_class": tags}])
        with pytest.raises(ValueError, match=r"data\.jsonl:2: field 'span_class'"):
            read_fineweb_posq(file).get_topics()


# ---------------------------------------------------------------- ColDeR


def colder(folder, form="jsonl", subsets=tuple(PREFERRED)):
    for subset in subsets:
        rows = [
            {"query": f"Who is {i} of {subset}?", "evidence_sents": [["It", "is", f"{i}", "."]]}
            | {"document_1": f"{subset} {i} {i}", "document_2": f"The {subset}. It is {i}."}
            for i in range(2)
        ]
        write(folder / "test" / subset, rows, form)
    return folder


@pytest.mark.parametrize("form", FORMATS)
def test_colder(tmp_path, form):
    collection = pt.get_dataset(f"longdoc:colder:{colder(tmp_path, form)}")
    assert list(collection.splits) == list(PREFERRED)
    assert len(collection.documents) == 28
    pairs = collection.get_qrels("foil").values.tolist()
    assert pairs[:2] == [["foil-0", "foil-0-document_1", 0], ["foil-0", "foil-0-document_2", 1]]
    assert collection.get_qrels("answer_importance")["label"].tolist() == [1, 0, 1, 0]
    offered = collection.candidates("poison", pool="judged")
    assert sorted(offered["docno"]) == [f"poison-{i}-document_{j}" for i in range(2) for j in (1, 2)]
    statistics = collection.statistics().set_index("split")
    assert statistics["documents"].to_dict() == dict.fromkeys(PREFERRED, 4) | {"all": 28}


# ---------------------------------------------------------------- what all have in common

COLLECTIONS = {
    "bright": (bright, lambda folder: read_bright(folder, "biology")),
    "mldr": (mldr, read_mldr),
    "squad-posq": (squad, read_squad_posq),
    "fineweb-posq": (fineweb, read_fineweb_posq),
    "colder": (colder, read_colder),
}


def rewrite(folder, change):
    """Changes the content of all files."""
    for file in filter(lambda path: path.is_file(), folder.rglob("*")):
        packed = file.suffix == ".gz"
        content = change(gzip.decompress(file.read_bytes()) if packed else file.read_bytes())
        file.write_bytes(gzip.compress(content) if packed else content)


@pytest.mark.parametrize("kind", COLLECTIONS)
def test_files_are_found_at_once_and_read_at_the_first_use(kind, tmp_path):
    made, read = COLLECTIONS[kind]
    made(tmp_path)
    rewrite(tmp_path, lambda content: b"[1]\n")
    collection = read(tmp_path)
    with pytest.raises(ValueError, match="JSON"):
        collection.get_topics()
    with pytest.raises(FileNotFoundError, match=r"files of the dataset \w+/[\w-]+ of the"):
        read(tmp_path / "nowhere")


@pytest.mark.parametrize(
    ("kind", "field"),
    [
        ("bright", "gold_ids_long"),
        ("bright", "content"),
        ("mldr", "positive_passages"),
        ("mldr", "docid"),
        ("squad-posq", "answers"),
        ("squad-posq", "context"),
        ("fineweb-posq", "content"),
        ("colder", "document_2"),
    ],
)
def test_a_missing_field_is_named(kind, field, tmp_path):
    made, read = COLLECTIONS[kind]
    made(tmp_path)
    rewrite(tmp_path, lambda content: content.replace(f'"{field}"'.encode(), b'"other"'))
    with pytest.raises(ValueError, match=f"field '{field}'"):
        read(tmp_path).get_topics()


def test_ids_that_are_there_twice(tmp_path):
    folder = mldr(tmp_path, "jsonl")
    corpus = folder / "corpus.jsonl"
    corpus.write_text(corpus.read_text() + corpus.read_text())
    assert len(read_mldr(folder).documents) == len(list(read_mldr(folder).corpus)) == 8  # the same again is no harm
    corpus.write_text(corpus.read_text() + '{"docid": "doc-en-0", "text": "another"}\n')
    with pytest.raises(ValueError, match=r"corpus\.jsonl:17: 'doc-en-0' is there twice"):
        read_mldr(folder).get_topics()


def test_a_table_may_have_several_parts_but_not_two_formats(tmp_path):
    folder = mldr(tmp_path, "jsonl")
    lines = (folder / "corpus.jsonl").read_text().splitlines(keepends=True)
    (folder / "corpus.jsonl").unlink()
    for part in range(2):
        (folder / f"corpus-0000{part}-of-00002.jsonl").write_text("".join(lines[4 * part : 4 * part + 4]))
    assert list(read_mldr(folder).documents) == [f"doc-en-{i}" for i in range(8)]
    (folder / "corpus-00001-of-00002.jsonl").unlink()
    with pytest.raises(FileNotFoundError, match="all parts of corpus"):
        read_mldr(folder)
    for form in FORMATS[:2]:
        mldr(tmp_path / "twice", form)
    with pytest.raises(FileNotFoundError, match=r"corpus\.jsonl, corpus\.jsonl\.gz"):
        read_mldr(tmp_path / "twice")
