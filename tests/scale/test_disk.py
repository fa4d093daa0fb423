"""rerank_to_disk and merge_run: results equal transform's, and a job that was stopped continues."""

from __future__ import annotations

import errno
import random
import re
import signal
import time
from functools import partial
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pandas as pd
import pyterrier as pt
import pytest

import pyterrier_longdoc as ld
from pyterrier_longdoc.scale.blocks import Candidates

from ..support import memory, own, processes, systems, tiny
from ..support.digests import Digests, candidates, write_trec

parquet = pytest.importorskip("pyarrow.parquet")
RUN, TOPICS = candidates(300, 12)
TERMS = ("term_scores", "term_places")
WITH_QUERIES = RUN.merge(TOPICS, on="qid", how="left")


pytestmark = pytest.mark.usefixtures("tests_are_installed")


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    """Of one query or two."""
    monkeypatch.setattr("pyterrier_longdoc.scale.blocks.BLOCK_ROWS", 25)


@pytest.fixture(scope="module")
def whole() -> pd.DataFrame:
    """All queries at once, in the order in which they first appear."""
    expected = Digests()(WITH_QUERIES)
    places = {qid: place for place, qid in enumerate(RUN["qid"].unique())}
    return expected.iloc[expected["qid"].map(places).argsort(kind="stable")].reset_index(drop=True)


def assert_merged(out: Path, whole: pd.DataFrame) -> None:
    found = ld.merge_run(out)
    pd.testing.assert_frame_equal(found[whole.columns], whole)


def written(out: Path) -> dict[str, int]:
    """When each block was written."""
    return {path.name: path.stat().st_mtime_ns for path in out.glob("blocks/*.parquet")}


# What comes out.


@pytest.mark.parametrize("loads", [False, True], ids=["text in the frame", "text by a loader"])
def test_merged_results_equal_transform(cross_encoder, tmp_path, loads):
    frame = tiny.longer_results().sort_values("qid", kind="stable")
    frame = frame.assign(note=[[i] for i in range(len(frame))], text=frame["text"].fillna(""))
    texts = frame.drop_duplicates("docno").set_index("docno")["text"].to_dict()
    loader = pt.apply.text(lambda row: texts[row["docno"]]) if loads else None
    inp = frame.drop(columns="text") if loads else frame
    model = ld.MaxP(cross_encoder, window_size=8, stride=4, max_query_len=4, text_loader=loader)
    work = ld.rerank_to_disk(model, inp, tmp_path / "out")
    assert (work.rows, work.rows_before) == (len(frame), 0)
    expected = model(inp).reset_index(drop=True)
    pd.testing.assert_frame_equal(ld.merge_run(tmp_path / "out"), expected, check_exact=False, rtol=1e-5)


@pytest.mark.parametrize("name", ["MaxP", "LateIR"])
@pytest.mark.filterwarnings("ignore::pyterrier_longdoc.UntrainedWarning")
def test_coverage_equals_that_of_transform(name, tmp_path, monkeypatch):
    monkeypatch.setattr("pyterrier_longdoc.scale.blocks.BLOCK_ROWS", 1)
    frame = tiny.frame([f"{word} dog" for word in tiny.WORDS[:4]], [tiny.LONG, "old dog", " "])
    model = systems.make(name, max_query_len=8)
    with pytest.warns(ld.EmptyTextWarning, match="no text"):
        work = ld.rerank_to_disk(model, frame, tmp_path / "out")
    assert len(written(tmp_path / "out")) == 4
    model(frame)
    assert work.coverage == model.coverage


@pytest.mark.parametrize("n", [1, 2, 7])
@pytest.mark.parametrize("form", ["frame", "run.gz", "parquet", "folder"])
def test_every_form_of_candidates_and_number_of_shards_gives_the_same_results(whole, tmp_path, form, n, monkeypatch):
    monkeypatch.setattr("pyterrier_longdoc.scale.blocks._PART_ROWS", 40)
    given = tmp_path / form
    if form == "parquet":
        RUN.to_parquet(given := tmp_path / "run.parquet")
    elif form == "folder":
        given.mkdir()
        for part in range(3):
            RUN.iloc[100 * part : 100 * part + 100].to_parquet(given / f"{part}.parquet")
    else:
        given = RUN if form == "frame" else write_trec(RUN, given)
    for i in random.Random(n).sample(range(n), n):
        ld.rerank_to_disk(Digests(), given, tmp_path / "out", topics=TOPICS, shard=(i, n))
    assert len(written(tmp_path / "out")) > 5
    assert_merged(tmp_path / "out", whole)


def test_a_merged_file_is_a_run_in_the_order_of_ranks(tmp_path):
    ld.rerank_to_disk(Digests(), WITH_QUERIES, tmp_path / "out")
    path = ld.merge_run(tmp_path / "out", tmp_path / "merged.res.gz", name="my system")
    lines, frame = pt.io.read_results(str(path)), ld.merge_run(tmp_path / "out")
    assert lines["name"].unique().tolist() == ["my_system"]
    assert lines["qid"].drop_duplicates().tolist() == frame["qid"].drop_duplicates().tolist()
    assert all(ranks.tolist() == list(range(len(ranks))) for _, ranks in lines.groupby("qid")["rank"])
    both = lines.merge(frame, on=["qid", "docno"], validate="1:1")
    assert len(both) == len(frame)
    np.testing.assert_allclose(both["score_x"], both["score_y"], rtol=1e-15)


def test_ids_can_be_numbers_and_a_pipeline_can_drop_rows_and_queries(tmp_path):
    run = WITH_QUERIES.assign(qid=WITH_QUERIES["qid"].str[1:].astype(int), docno=range(300))
    two_of_each = Digests() % 2 >> pt.apply.generic(lambda frame: frame[frame["qid"] != "3"])
    ld.rerank_to_disk(two_of_each, run, tmp_path / "out")
    ranks = ld.merge_run(tmp_path / "out").groupby("qid")["rank"].apply(sorted)
    assert ranks.to_dict() == {str(i): [0, 1] for i in range(12) if i != 3}


def test_columns_of_sequences_come_back_as_lists(tmp_path):
    run = WITH_QUERIES.assign(spans=[[(i, i + 1)] for i in range(300)], bits=[np.zeros(2)] * 300, place=range(300))
    ld.rerank_to_disk(Digests(), run, tmp_path / "out")
    first = ld.merge_run(tmp_path / "out").iloc[0]
    assert (first["spans"], first["bits"]) == ([[first["place"], first["place"] + 1]], [0.0, 0.0])


@pytest.mark.parametrize("name", ["CEDR-knrm", "MaxSim", "NeuralModel1", "MaxP"])
@pytest.mark.filterwarnings("ignore::pyterrier_longdoc.UntrainedWarning")
def test_explanations_equal_those_of_transform(name, tmp_path):
    model, results = systems.make(name, explain=True), tiny.results()
    ld.rerank_to_disk(model, results, tmp_path / "out")
    found, expected = (each.set_index(["qid", "docno"]) for each in (ld.merge_run(tmp_path / "out"), model(results)))
    assert found.columns.tolist() == expected.columns.tolist()
    for row, expected_row in zip(found.loc[expected.index].itertuples(), expected.itertuples(), strict=True):
        assert row.window_spans == [list(span) for span in expected_row.window_spans]
        terms = [[*term] for term in expected_row.term_scores or ()]
        assert [token for token, _ in row.term_scores or ()] == [token for token, _ in terms]
        assert [part for _, part in row.term_scores or ()] == pytest.approx([part for _, part in terms], abs=1e-4)
    if name == "MaxSim":
        places = [[place[:3] for place in row] for row in expected["term_places"]]
        assert [[(*place[:3],) for place in row] for row in found.loc[expected.index, "term_places"]] == places


@pytest.mark.filterwarnings("ignore::pyterrier_longdoc.UntrainedWarning")
def test_missing_explanations_come_back_as_missing(tmp_path):
    explained = systems.make("MaxSim", explain=True)
    missing = pt.apply.generic(lambda frame: frame.assign(**{name: [None, *frame[name][1:]] for name in TERMS}))
    results = tiny.results().assign(score=range(5))
    ld.rerank_to_disk(explained >> missing, results, tmp_path / "out")
    merged = ld.merge_run(tmp_path / "out")
    assert merged["term_places"].isna().sum() == merged["term_scores"].isna().sum() == 1
    merged["term_scores"] = [None if row is None else np.array(row, dtype=object) for row in merged["term_scores"]]
    ld.rerank_to_disk(pt.Transformer.identity(), merged, tmp_path / "again")
    assert ld.merge_run(tmp_path / "again")["term_scores"].isna().sum() == 1
    assert ld.merge_run(tmp_path / "again")["term_places"].tolist() == merged["term_places"].tolist()


def test_features_come_back_as_arrays(tmp_path):
    features = [np.array([i, 0.5]) for i in range(len(WITH_QUERIES))]
    ld.rerank_to_disk(Digests(), WITH_QUERIES.assign(features=features), tmp_path / "out")
    found = ld.merge_run(tmp_path / "out")
    assert np.stack(found["features"]).shape == (300, 2)
    assert all(isinstance(row, np.ndarray) for row in found["features"])


def test_a_lone_surrogate_is_written_as_a_question_mark(tmp_path):
    text = pd.Series(["cut \ud83d", "whole", None] * 100, dtype=object)
    ld.rerank_to_disk(Digests(), WITH_QUERIES.assign(text=text), tmp_path / "out")
    assert set(ld.merge_run(tmp_path / "out")["text"].dropna()) == {"cut ?", "whole"}


@pytest.mark.parametrize(
    ("result", "message"),
    [
        (lambda frame: frame.drop(columns="score"), "score"),
        (lambda frame: frame.assign(score=np.nan), "score"),
        (lambda frame: frame.assign(qid=frame["qid"] + "x"), "qid"),
        (lambda frame: frame.assign(tokens=[{str(i): i} for i in range(len(frame))]), "dictionaries"),
    ],
)
def test_results_that_cannot_be_stored_are_refused(tmp_path, result, message):
    with pytest.raises(RuntimeError, match=message):
        ld.rerank_to_disk(Digests() >> pt.apply.generic(result), WITH_QUERIES, tmp_path / "out")
    assert not list((tmp_path / "out").glob("blocks/*"))


# Going on.


class Texts(pt.Transformer):
    """Adds texts, unless they contain those of a lost query."""

    lost = None

    def transform(self, inp):
        if self.lost in set(inp["qid"]):
            raise KeyError("d17")
        return inp.assign(text="words")


def test_an_error_names_its_block_and_the_next_call_continues_there(tmp_path, capsys):
    stub, texts = Digests(log=tmp_path / "log"), Texts()
    pipeline, texts.lost = texts >> stub, RUN["qid"].unique()[5]
    with pytest.raises(RuntimeError, match=rf"KeyError: 'd17' \(in block \d+, queries .*{texts.lost}"):
        ld.rerank_to_disk(pipeline, RUN, tmp_path / "out", topics=TOPICS)
    texts.lost = None
    rest = ld.rerank_to_disk(pipeline, RUN, tmp_path / "out", topics=TOPICS, verbose=True)
    assert re.search(r" 300/300 .*rows/s", capsys.readouterr().err)
    assert 0 < rest.rows < rest.rows + rest.rows_before == 300
    assert ld.rerank_to_disk(pipeline, RUN, tmp_path / "out", topics=TOPICS).rows == 0
    assert sorted(qid for call in stub.calls() for qid in call) == sorted(TOPICS["qid"])
    assert len(ld.merge_run(tmp_path / "out")) == 300


@pytest.mark.slow
def test_a_repeatedly_killed_job_gives_the_same_results(tmp_path):
    run, topics = candidates(20_000, 150)
    source, out = write_trec(run, tmp_path / "run.gz"), tmp_path / "killed"
    whole, killed = Digests(log=tmp_path / "log of whole"), Digests(log=tmp_path / "log of killed")
    ld.rerank_to_disk(whole, source, tmp_path / "whole", topics=topics)
    blocks, rng = whole.calls(), random.Random(0)
    for finished in [0, *sorted(rng.sample(range(len(blocks)), 5))]:
        child = processes.start(lambda: ld.rerank_to_disk(killed, source, out, topics=topics))
        end = time.monotonic() + 60
        while len(list(out.glob("blocks/*.parquet"))) < finished and time.monotonic() < end:
            time.sleep(0.002)
        time.sleep(rng.uniform(0, 0.05))
        processes.kill(child)
        assert processes.wait(child) in (-signal.SIGKILL, 0)
    ld.rerank_to_disk(killed, source, out, topics=topics)
    pd.testing.assert_frame_equal(ld.merge_run(out), ld.merge_run(tmp_path / "whole"))
    # Every call is one block; besides the one that was open, a kill costs nothing.
    assert {tuple(call) for call in killed.calls()} == {tuple(call) for call in blocks}
    assert len(blocks) <= len(killed.calls()) <= len(blocks) + 6


def test_a_job_continues_after_a_full_disk(whole, tmp_path, monkeypatch):
    source, write = write_trec(RUN, tmp_path / "run"), parquet.write_table

    def write_until_full(*arguments, **options):
        if len(written(tmp_path / "out")) == 3:
            raise OSError(errno.ENOSPC, "No space left on device")
        write(*arguments, **options)

    with monkeypatch.context() as patch:
        patch.setattr(parquet, "write_table", write_until_full)
        with pytest.raises(RuntimeError, match=r"No space left.*in block \d+, queries"):
            ld.rerank_to_disk(Digests(), source, tmp_path / "out", topics=TOPICS)
    assert len(written(tmp_path / "out")) == 3
    ld.rerank_to_disk(Digests(), source, tmp_path / "out", topics=TOPICS)
    assert_merged(tmp_path / "out", whole)


def test_partly_written_candidates_are_written_again(whole, tmp_path):
    (tmp_path / "out" / "candidates").mkdir(parents=True)
    (tmp_path / "out" / "candidates" / "00000.arrow").write_bytes(b"half a block")
    ld.rerank_to_disk(Digests(), write_trec(RUN, tmp_path / "run"), tmp_path / "out", topics=TOPICS)
    assert_merged(tmp_path / "out", whole)


@pytest.fixture
def job(tmp_path, monkeypatch):
    """A finished job in `out`, to call again."""
    monkeypatch.setattr("pyterrier_longdoc.scale.blocks._PART_ROWS", 40)
    job = partial(ld.rerank_to_disk, Digests(), write_trec(RUN, tmp_path / "run"), tmp_path / "out", topics=TOPICS)
    job()
    return job


def test_a_damaged_block_is_named_and_scored_again_once_deleted(whole, job, tmp_path):
    block = tmp_path / "out/blocks/00001.parquet"
    column = parquet.read_metadata(block).row_group(0).column(0)
    content = bytearray(block.read_bytes())
    content[column.dictionary_page_offset + column.total_compressed_size - 1] ^= 1
    block.write_bytes(content)
    with pytest.raises(ValueError, match=r"00001\.parquet"):
        ld.merge_run(tmp_path / "out")
    block.unlink()
    job()
    assert_merged(tmp_path / "out", whole)


@pytest.mark.parametrize(
    "damaged",
    [
        lambda content: b"".join(content.partition(b"\xff" * 4 + b"\0" * 4)[:2]),  # the first part alone
        lambda content: content[:-40],
        lambda content: b"x" + content,
    ],
    ids=["cut after a part", "cut", "longer"],
)
def test_damaged_candidates_are_named(damaged, job, tmp_path):
    (tmp_path / "out/blocks/00001.parquet").unlink()
    file = tmp_path / "out/candidates/00001.arrow"
    file.write_bytes(damaged(file.read_bytes()))
    with pytest.raises(ValueError, match=r"00001\.arrow"):
        job()


def test_a_merge_names_the_blocks_that_are_missing(tmp_path):
    ld.rerank_to_disk(Digests(), RUN, tmp_path / "out", topics=TOPICS, shard=(1, 3))
    names = written(tmp_path / "out")
    first = min(set(range(3)) - {int(name.partition(".")[0]) for name in names})
    for path in (None, tmp_path / "run.res"):
        with pytest.raises(FileNotFoundError, match=rf"{first:05}\.parquet"):
            ld.merge_run(tmp_path / "out", path)


def test_a_folder_without_a_job_cannot_be_merged(tmp_path):
    with pytest.raises(FileNotFoundError, match="manifest"):
        ld.merge_run(tmp_path)


def test_an_empty_run_gives_an_empty_run(tmp_path):
    assert ld.rerank_to_disk(Digests(), WITH_QUERIES.iloc[:0], tmp_path).rows == 0
    assert set(ld.merge_run(tmp_path)) == {*WITH_QUERIES, "rank"}


# Other pipelines, other candidates, other files.


@pytest.mark.parametrize(
    "changes",
    [{"pipeline": Digests("b")}, {"run": RUN.iloc[::-1]}, {"topics": TOPICS.assign(query="other words")}],
    ids=lambda changes: next(iter(changes)),
)
def test_another_job_in_the_folder_is_refused(changes, tmp_path):
    run = write_trec(RUN, tmp_path / "run")
    job = {"pipeline": Digests(), "run": run, "topics": TOPICS, "out": tmp_path / "out"}
    ld.rerank_to_disk(**job, shard=(0, 2))
    before = written(tmp_path / "out")
    with pytest.raises(ValueError, match="another job"):
        ld.rerank_to_disk(**{**job, **changes})
    assert written(tmp_path / "out") == before


def test_a_copy_of_the_candidates_is_the_same_job(tmp_path):
    source = write_trec(RUN, tmp_path / "run")
    ld.rerank_to_disk(Digests(), source, tmp_path / "out", topics=TOPICS)
    (tmp_path / "copy").write_bytes(source.read_bytes())
    assert ld.rerank_to_disk(Digests(), tmp_path / "copy", tmp_path / "out", topics=TOPICS).rows == 0


def test_other_columns_of_the_results_are_another_job(cross_encoder, tmp_path):
    model = ld.MaxP(cross_encoder, window_size=8, stride=4, max_query_len=4)
    ld.rerank_to_disk(model, tiny.results(), tmp_path, shard=(0, 2))
    model.explain = True
    with pytest.raises(ValueError, match="another job"):
        ld.rerank_to_disk(model, tiny.results(), tmp_path, shard=(1, 2))


@pytest.mark.parametrize("kind", own.EDITED)
def test_a_job_with_user_code_runs_in_one_call_and_is_never_continued(kind, cross_encoder, tmp_path):
    frame, out = tiny.longer_results(), tmp_path / "out"
    make_edited, name = own.EDITED[kind]
    with pytest.raises(ValueError, match=f"{name} may change unnoticed.*without shard="):
        ld.rerank_to_disk(make_edited(1, cross_encoder), frame, out, shard=(0, 2))
    ld.rerank_to_disk(make_edited(1, cross_encoder), frame, out)
    assert len(ld.merge_run(out)) == len(frame)
    with pytest.raises(ValueError, match=f"{name} may change unnoticed.*new folder"):
        ld.rerank_to_disk(make_edited(-1, cross_encoder), frame, out)


def test_a_folder_with_other_files_is_refused(tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(FileExistsError, match=r"notes\.txt"):
        ld.rerank_to_disk(Digests(), RUN, tmp_path, topics=TOPICS)
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]


def test_a_partly_written_manifest_is_ignored(tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / ".manifest.json.1.part").touch()
    assert ld.rerank_to_disk(Digests(), RUN, tmp_path / "out", topics=TOPICS).rows == 300


BAD = [
    ({"shard": (2, 2)}, ValueError, "shard"),
    ({"topics": None}, pt.validate.InputValidationError, "query"),
    ({"topics": TOPICS.iloc[2:]}, ValueError, "topics.* 2 "),
    ({"topics": pd.concat([TOPICS, TOPICS])}, ValueError, "not unique"),
    ({"run": RUN.assign(qid=[None, *RUN["qid"][1:]], query="words"), "topics": None}, ValueError, "'qid'"),
    ({"run": RUN.drop(columns="docno")}, ValueError, "docno"),
    ({"run": "no-such-file"}, FileNotFoundError, "no-such-file"),
    ({"run": __file__}, ValueError, "test_disk"),
    ({"run": Path(__file__).parent}, FileNotFoundError, "Parquet"),
    ({"run": WITH_QUERIES}, ValueError, "topics="),
    ({"run": RUN.assign(tokens=[{"a": 1}] * 300)}, ValueError, "'tokens'"),
    ({"run": RUN.assign(tokens=[[{"a": 1}]] * 300)}, ValueError, "'tokens'"),
    ({"run": RUN.assign(docno=pd.Series(["\ud83d"] * 300, dtype=object))}, ValueError, "'docno'"),
    ({"pipeline": len}, ValueError, "pipeline"),
    ({"pipeline": ld.MaxP("longdoc:minilm-l6")}, pt.validate.InputValidationError, "text"),
]


@pytest.mark.parametrize(("changes", "kind", "message"), BAD)
def test_wrong_arguments_are_refused_before_anything_is_written(tmp_path, changes, kind, message):
    arguments = {"pipeline": Digests(), "run": RUN, "topics": TOPICS, "out": tmp_path / "out", **changes}
    with pytest.raises(kind, match=message):
        ld.rerank_to_disk(**arguments)
    assert not (tmp_path / "out").exists()


# Elsewhere, and in several processes.


class Backwards:
    """Takes three blocks at a time, and returns the last one first."""

    def map(self, function, shared, items):
        held = []
        for item in items:
            held.append(item)
            if len(held) == 3:
                key, frame = held.pop()
                yield key, function(shared, frame)
        for key, frame in held:
            yield key, function(shared, frame)


def test_an_executor_can_return_blocks_in_any_order(whole, tmp_path):
    ld.rerank_to_disk(Digests(), RUN, tmp_path / "out", topics=TOPICS, executor=Backwards())
    assert_merged(tmp_path / "out", whole)


def test_an_error_of_the_executor_itself_is_passed_on(tmp_path):
    executor = Mock(map=Mock(side_effect=ConnectionError("no workers")))
    with pytest.raises(ConnectionError, match="no workers"):
        ld.rerank_to_disk(Digests(), RUN, tmp_path / "out", topics=TOPICS, executor=executor)


def test_concurrent_processes_share_the_work_even_if_one_dies(whole, tmp_path, monkeypatch):
    source, log, divided = write_trec(RUN, tmp_path / "run.gz"), tmp_path / "log", tmp_path / "divided"
    divide = Candidates.divide

    def logged(self, folder):
        with divided.open("a") as file:
            file.write("x")
        time.sleep(0.5)
        return divide(self, folder)

    monkeypatch.setattr(Candidates, "divide", logged)

    def shard(i: int, pipeline: pt.Transformer) -> None:
        ld.rerank_to_disk(pipeline, source, tmp_path / "out", topics=TOPICS, shard=(i, 3))

    # One dies while it has the lock, and another one takes over.
    killed = processes.start(lambda: shard(0, Digests()))
    while not divided.exists():
        time.sleep(0.01)
    children = [processes.start(lambda i=i: shard(i, Digests(log=log))) for i in range(3)]
    processes.kill(killed)
    assert processes.wait(killed) == -signal.SIGKILL
    assert [processes.wait(child) for child in children] == [0, 0, 0]
    assert divided.read_text() == "xx"
    assert sorted(qid for call in Digests(log=log).calls() for qid in call) == sorted(TOPICS["qid"])
    assert_merged(tmp_path / "out", whole)


class LongTexts(pt.Transformer):
    """Adds a long text to each row."""

    def transform(self, inp):
        return inp.assign(text=[docno * 500 for docno in inp["docno"]])


@pytest.mark.slow
def test_memory_use_does_not_grow_with_the_number_of_blocks(tmp_path):
    run, topics = candidates(60_000, 300)
    source = write_trec(run, tmp_path / "run.gz")
    pipeline = LongTexts() >> Digests()  # 160 MB of text in all
    ld.rerank_to_disk(pipeline, source, tmp_path / "out", topics=topics, shard=(0, 8))
    assert memory.growth(lambda: ld.rerank_to_disk(pipeline, source, tmp_path / "out", topics=topics)) < 60
