from __future__ import annotations

import errno
import os
import random
import re
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import numpy as np
import pandas as pd
import pyterrier as pt
import pytest

import pyterrier_longdoc as ld
from pyterrier_longdoc.experiment.runs import EXACT_FLOATS
from pyterrier_longdoc.scale.candidates import Source

from ..support import memory, own, processes, systems, tiny
from ..support.digests import Digests, candidates, write_trec
from ..support.lines import shown_lines

pytest.importorskip("pyarrow")
RUN, TOPICS = candidates(300, 12)
WITH_QUERIES = RUN.merge(TOPICS, on="qid", how="left")


def files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in (folder / "blocks").iterdir()}


def merged(folder: Path) -> bytes:
    return ld.merge_run(folder, folder / "merged.res").read_bytes()


# What comes out.


@pytest.mark.parametrize("loads", [False, True], ids=["text in the frame", "text by a loader"])
def test_the_frame_is_that_of_transform(cross_encoder, tmp_path, loads):
    frame = tiny.longer_results().sort_values("qid", kind="stable")
    frame = frame.assign(note=[[i] for i in range(len(frame))], text=frame["text"].fillna(""))
    texts = frame.drop_duplicates("docno").set_index("docno")["text"].to_dict()
    loader = pt.apply.text(lambda row: texts[row["docno"]]) if loads else None
    inp = frame.drop(columns="text") if loads else frame
    model = ld.MaxP(cross_encoder, window_size=8, stride=4, max_query_len=4, text_loader=loader)
    work = ld.rerank_to_disk(model, inp, tmp_path / "out")
    assert (work.rows, work.rows_before, work.cost) == (len(frame), 0, None)
    expected = model(inp).reset_index(drop=True)
    pd.testing.assert_frame_equal(ld.merge_run(tmp_path / "out"), expected, check_exact=False, rtol=1e-5)


def test_queries_keep_their_order_and_their_rows_that_of_the_pipeline(tmp_path):
    ld.rerank_to_disk(Digests(), WITH_QUERIES, tmp_path / "out")
    found = ld.merge_run(tmp_path / "out")
    assert found["qid"].drop_duplicates().tolist() == WITH_QUERIES["qid"].drop_duplicates().tolist()
    expected = Digests()(WITH_QUERIES)
    order = expected["qid"].map({qid: i for i, qid in enumerate(found["qid"].unique())}).argsort(kind="stable")
    pd.testing.assert_frame_equal(found, expected.iloc[order].reset_index(drop=True)[found.columns])


def test_a_merged_file_is_in_the_order_of_ranks(tmp_path):
    ld.rerank_to_disk(Digests(), WITH_QUERIES, tmp_path / "out")
    path = ld.merge_run(tmp_path / "out", tmp_path / "merged.res.gz", name="my system")
    written = pd.read_csv(path, sep=" ", header=None, **EXACT_FLOATS)
    assert written[5].unique().tolist() == ["my_system"]
    lines, frame = pt.io.read_results(str(path)).assign(score=written[4]), ld.merge_run(tmp_path / "out")
    assert lines["qid"].drop_duplicates().tolist() == frame["qid"].drop_duplicates().tolist()
    assert all(ranks.tolist() == list(range(len(ranks))) for _, ranks in lines.groupby("qid")["rank"])
    both = lines.merge(frame, on=["qid", "docno"], validate="1:1")
    assert len(both) == len(frame)
    assert (both["score_x"] == both["score_y"]).all()
    assert (both["rank_x"] == both["rank_y"]).all()


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> Path:
    """One uninterrupted run by one process."""
    out = tmp_path_factory.mktemp("whole") / "out"
    ld.rerank_to_disk(Digests(), RUN, out, topics=TOPICS)
    return out


def test_qids_belong_to_the_same_blocks_for_ever(whole):
    """In other ones, what an earlier version has finished would be of no use."""
    blocks = [21, 121, 151, 282, 362, 462, 527, 536, 585, 738, 798, 999]
    assert sorted(files(whole)) == [f"{key:04}.parquet" for key in blocks]


@pytest.mark.parametrize("n", [2, 7])
def test_any_number_of_shards_gives_the_same_bytes(whole, tmp_path, n):
    for i in random.Random(n).sample(range(n), n):
        ld.rerank_to_disk(Digests(), RUN, tmp_path / "out", topics=TOPICS, shard=(i, n))
    assert files(tmp_path / "out") == files(whole)
    assert merged(tmp_path / "out") == merged(whole)


@pytest.mark.bytes
@pytest.mark.filterwarnings("ignore::pyterrier_longdoc.UntrainedWarning")
def test_models_that_remember_embeddings_give_the_same_bytes_too(tmp_path):
    rng = np.random.default_rng(0)
    texts = [" ".join(rng.choice(tiny.WORDS, length)) for length in rng.integers(5, 150, 20)]
    frame = tiny.frame([f"{word} dog" for word in tiny.WORDS[:12]], texts)
    frame = frame[rng.random(len(frame)) < 0.3]
    for n in (1, 7):
        for i in range(n):
            ld.rerank_to_disk(systems.make("LateIR"), frame, tmp_path / str(n), shard=(i, n))
    assert files(tmp_path / "1") == files(tmp_path / "7")


@pytest.mark.parametrize("form", ["run", "run.gz", "parquet", "folder"])
def test_candidates_in_files_give_what_a_frame_gives(whole, tmp_path, form):
    given = tmp_path / form
    if form == "parquet":
        RUN.to_parquet(given := tmp_path / "run.parquet")
    elif form == "folder":
        given.mkdir()
        for part in range(3):
            RUN.iloc[100 * part : 100 * part + 100].to_parquet(given / f"{part}.parquet")
    else:
        write_trec(RUN, given)
    ld.rerank_to_disk(Digests(), given, tmp_path / "out", topics=TOPICS)
    assert merged(tmp_path / "out") == merged(whole)


def test_candidates_larger_than_what_is_held_are_dealt_in_pieces(whole, tmp_path, monkeypatch):
    monkeypatch.setattr("pyterrier_longdoc.scale.candidates._ROWS_AT_ONCE", 40)
    monkeypatch.setattr("pyterrier_longdoc.scale.candidates._BYTES_HELD", 4000)
    ld.rerank_to_disk(Digests(), write_trec(RUN, tmp_path / "run"), tmp_path / "out", topics=TOPICS)
    assert merged(tmp_path / "out") == merged(whole)


def test_numbers_as_ids_and_pipelines_that_cut(tmp_path):
    run = WITH_QUERIES.assign(qid=WITH_QUERIES["qid"].str[1:].astype(int), docno=range(300))
    ld.rerank_to_disk(Digests() % 2, run, tmp_path / "out")
    found = ld.merge_run(tmp_path / "out")
    assert found.groupby("qid")["rank"].apply(sorted).tolist() == [[0, 1]] * 12


def test_a_block_without_results_is_finished_too(tmp_path):
    nothing_of_q3 = Digests() >> pt.apply.generic(lambda frame: frame[frame["qid"] != "q3"])
    ld.rerank_to_disk(nothing_of_q3, WITH_QUERIES, tmp_path / "out")
    assert set(ld.merge_run(tmp_path / "out")["qid"]) == set(TOPICS["qid"]) - {"q3"}
    assert b"q3 " not in merged(tmp_path / "out")


def test_sequences_come_back_as_lists_and_dictionaries_are_refused(tmp_path):
    with_lists = WITH_QUERIES.assign(spans=[[(i, i + 1)] for i in range(300)], bits=[np.zeros(2)] * 300)
    ld.rerank_to_disk(Digests(), with_lists, tmp_path / "lists")
    first = ld.merge_run(tmp_path / "lists").iloc[0]
    assert (first["spans"], first["bits"]) == ([[0, 1]], [0.0, 0.0])
    with pytest.raises(RuntimeError, match="the column 'tokens' holds dictionaries"):
        ld.rerank_to_disk(Digests(), WITH_QUERIES.assign(tokens=[{str(i): i} for i in range(300)]), tmp_path / "dicts")
    mixed = WITH_QUERIES.assign(mixed=["a", 1] * 150)
    with pytest.raises(RuntimeError, match=r"cannot be written to disk.*mixed"):
        ld.rerank_to_disk(Digests(), mixed, tmp_path / "mixed")


def test_whole_numbers_stay_exact_where_some_are_missing(tmp_path):
    import pyarrow.parquet

    numbers = [None if i % 7 == 0 else 2**60 + i for i in range(300)]
    table = pyarrow.Table.from_pandas(RUN).append_column("time", pyarrow.array(numbers, pyarrow.int64()))
    pyarrow.parquet.write_table(table.replace_schema_metadata(None), tmp_path / "run.parquet")
    ld.rerank_to_disk(Digests(), tmp_path / "run.parquet", tmp_path / "out", topics=TOPICS)
    found = ld.merge_run(tmp_path / "out").set_index("docno")["time"]
    assert [None if pd.isna(number) else int(number) for number in found[RUN["docno"]]] == numbers


# What is left out and what is shown.


def test_a_dry_run_tells_time_and_cost_and_writes_nothing(tmp_path):
    stub = Digests(log=tmp_path / "log")
    work = ld.rerank_to_disk(stub, RUN, tmp_path / "out", topics=TOPICS, dry_run=True, price_per_hour=3600.0)
    assert (work.rows, work.rows_before) == (300, 0)
    assert work.cost == work.seconds > 0
    assert not (tmp_path / "out").exists()
    ld.rerank_to_disk(stub, RUN, tmp_path / "out", topics=TOPICS, shard=(0, 2))
    before = files(tmp_path / "out")
    rest = ld.rerank_to_disk(stub, write_trec(RUN, tmp_path / "run"), tmp_path / "new", topics=TOPICS, dry_run=True)
    assert rest.rows == 300
    rest = ld.rerank_to_disk(stub, RUN, tmp_path / "out", topics=TOPICS, dry_run=True)
    assert rest.rows + rest.rows_before == 300
    assert 0 < rest.rows < 300
    assert files(tmp_path / "out") == before


def test_a_dry_run_measures_some_queries_and_leaves_no_trace(cross_encoder, tmp_path):
    run, topics = candidates(400, 40)
    stub = Digests(log=tmp_path / "log")
    ld.rerank_to_disk(stub, run, tmp_path / "out", topics=topics, dry_run=True)
    assert len({qid for call in stub.calls() for qid in call}) == 16
    model = ld.FirstP(cross_encoder, window_size=8, max_query_len=4, score_cache=tmp_path / "cache.sqlite")
    ld.rerank_to_disk(model, tiny.longer_results(), tmp_path / "out", dry_run=True)
    assert model.coverage is None
    assert not (tmp_path / "cache.sqlite").exists()


def test_the_bar_counts_rows_with_those_of_an_earlier_call(tmp_path, capsys):
    ld.rerank_to_disk(Digests(), RUN, tmp_path / "out", topics=TOPICS, shard=(0, 2))
    assert shown_lines(capsys) == []
    ld.rerank_to_disk(Digests(), RUN, tmp_path / "out", topics=TOPICS, verbose=True)
    err = capsys.readouterr().err
    assert "300/300" in err
    assert "rows/s" in err


# Going on.


def test_finished_blocks_are_not_scored_again(tmp_path):
    stub = Digests(log=tmp_path / "log")
    for _ in range(2):
        work = ld.rerank_to_disk(stub, RUN, tmp_path / "out", topics=TOPICS)
    assert (work.rows, work.rows_before) == (0, 300)
    assert sorted(qid for call in stub.calls() for qid in call) == sorted(TOPICS["qid"])


@pytest.mark.slow
def test_killed_at_random_moments_it_ends_with_the_same_bytes(tmp_path):
    run, topics = candidates(20_000, 150)
    source, out = write_trec(run, tmp_path / "run.gz"), tmp_path / "killed"
    whole, killed = Digests(log=tmp_path / "log of whole"), Digests(log=tmp_path / "log of killed")
    ld.rerank_to_disk(whole, source, tmp_path / "whole", topics=topics)
    blocks, rng = whole.calls(), random.Random(0)
    for finished in sorted(rng.sample(range(len(blocks)), 5)):
        child = processes.start(lambda: ld.rerank_to_disk(killed, source, out, topics=topics))
        end = time.monotonic() + 60
        while len(list(out.glob("blocks/*.parquet"))) < finished and time.monotonic() < end:
            time.sleep(0.002)
        time.sleep(rng.uniform(0, 0.05))
        processes.kill(child)
        assert processes.wait(child) in (-signal.SIGKILL, 0)
    ld.rerank_to_disk(killed, source, out, topics=topics)
    assert files(out) == files(tmp_path / "whole")
    assert merged(out) == merged(tmp_path / "whole")
    # Every call is one block; besides the one that was open, a kill costs nothing.
    assert {tuple(call) for call in killed.calls()} == {tuple(call) for call in blocks}
    assert len(blocks) <= len(killed.calls()) <= len(blocks) + 5


def test_a_pipeline_that_fails_says_where_and_loses_nothing(tmp_path):
    def texts(frame):
        if texts.lost in set(frame["qid"]):
            raise KeyError("d17")
        return frame.assign(text="words")

    texts.lost = sorted(TOPICS["qid"])[5]
    stub = Digests(log=tmp_path / "log")
    pipeline = pt.apply.generic(texts, transform_outputs=lambda columns: [*columns, "text"]) >> stub
    with pytest.raises(RuntimeError, match=rf"KeyError: 'd17' \(in block \d+, queries .*{texts.lost}.*Finished blocks"):
        ld.rerank_to_disk(pipeline, RUN, tmp_path / "out", topics=TOPICS)
    done = [qid for call in stub.calls() for qid in call]
    assert 0 < len(done) < 12
    texts.lost = None
    with pytest.warns(UserWarning, match="nobody can tell if with the same pt.apply.generic"):
        ld.rerank_to_disk(pipeline, RUN, tmp_path / "out", topics=TOPICS)
    assert sorted(qid for call in stub.calls() for qid in call) == sorted(TOPICS["qid"])
    assert len(ld.merge_run(tmp_path / "out")) == 300


def test_a_full_disk_is_said_and_loses_nothing(whole, tmp_path, monkeypatch):
    import pyarrow.parquet

    write, calls = pyarrow.parquet.write_table, []

    def write_until_full(table, where, **options):
        write(table, where, **options)
        calls.append(where)
        if len(calls) == 4:
            raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(pyarrow.parquet, "write_table", write_until_full)
    with pytest.raises(OSError, match=r"no space is left for block \d+; the blocks that are finished stay") as raised:
        ld.rerank_to_disk(Digests(), RUN, tmp_path / "out", topics=TOPICS)
    assert raised.value.errno == errno.ENOSPC
    assert len(files(tmp_path / "out")) == 3
    monkeypatch.undo()
    ld.rerank_to_disk(Digests(), RUN, tmp_path / "out", topics=TOPICS)
    assert files(tmp_path / "out") == files(whole)


def test_a_disk_that_is_full_while_candidates_are_dealt_leaves_nothing(tmp_path, monkeypatch):
    def deal(parts, folder):
        (folder / "0001.arrow").write_bytes(b"half")
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("pyterrier_longdoc.scale.job.deal", deal)
    source = write_trec(RUN, tmp_path / "run")
    with pytest.raises(OSError, match="no space is left for the candidates"):
        ld.rerank_to_disk(Digests(), source, tmp_path / "out", topics=TOPICS)
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["shards"]
    monkeypatch.undo()
    assert ld.rerank_to_disk(Digests(), source, tmp_path / "out", topics=TOPICS).rows == 300


# Other pipelines, other candidates, other files.


def test_what_differs_from_the_job_in_the_folder_is_named(tmp_path):
    out = tmp_path / "out"
    ld.rerank_to_disk(Digests(), RUN, out, topics=TOPICS, shard=(0, 2))
    before = files(out)

    def differs(*names: str) -> object:
        return pytest.raises(ValueError, match=f"begun with something else, which differs in {', '.join(names)}:")

    with differs("pipeline.name"):
        ld.rerank_to_disk(Digests("b"), RUN, out, topics=TOPICS)
    with differs("candidates"):
        ld.rerank_to_disk(Digests(), RUN.iloc[1:], out, topics=TOPICS)
    with differs("topics"):
        ld.rerank_to_disk(Digests(), RUN, out, topics=TOPICS.assign(query="other words"), dry_run=True)
    with differs("pipeline.name", "candidates"):
        ld.rerank_to_disk(Digests("b"), RUN.assign(score=1.0), out, topics=TOPICS)
    assert files(out) == before


def test_a_model_with_another_argument_or_other_weights_is_another_one(cross_encoder, tmp_path):
    model = ld.MaxP(cross_encoder, window_size=8, stride=4, max_query_len=4)
    ld.rerank_to_disk(model, tiny.longer_results(), tmp_path / "out")
    with pytest.raises(ValueError, match=r"differs in pipeline\.windows\.stride"):
        ld.rerank_to_disk(model.apply_attributes(stride=5), tiny.longer_results(), tmp_path / "out")
    other = ld.MaxP(tiny.checkpoint(tmp_path / "other", seed=1), window_size=8, stride=4, max_query_len=4)
    with pytest.raises(ValueError, match=r"differs in pipeline\.weights"):
        ld.rerank_to_disk(other, tiny.longer_results(), tmp_path / "out")


@pytest.mark.parametrize("kind", own.EDITED)
def test_blocks_of_code_of_ones_own_are_never_put_together(kind, cross_encoder, tmp_path):
    make_edited, name = own.EDITED[kind]
    for dry_run in (True, False):
        with pytest.raises(ValueError, match=rf"of .*{name} nobody can tell.* def describe\(self\)"):
            ld.rerank_to_disk(make_edited(1, cross_encoder), tiny.longer_results(), tmp_path / "out", dry_run=dry_run)
    assert not (tmp_path / "out").exists()


def test_a_class_of_ones_own_that_tells_its_version_goes_on(cross_encoder, tmp_path):
    frame, out = tiny.longer_results(), tmp_path / "out"
    for shard in ((0, 2), (1, 2)):
        ld.rerank_to_disk(own.vouching(1, 1, cross_encoder), frame, out, shard=shard)
    expected = own.vouching(1, 1, cross_encoder)(frame)["score"].tolist()
    assert sorted(ld.merge_run(out)["score"]) == pytest.approx(sorted(expected), rel=1e-5)
    with pytest.raises(ValueError, match=r"differs in pipeline\.version"):
        ld.rerank_to_disk(own.vouching(-1, 2, cross_encoder), frame, out)


def test_a_changed_file_is_noticed_and_a_copied_one_is_the_same(tmp_path):
    source, out = write_trec(RUN, tmp_path / "run"), tmp_path / "out"
    ld.rerank_to_disk(Digests(), source, out, topics=TOPICS, shard=(0, 2))
    (tmp_path / "copy").write_bytes(source.read_bytes())
    ld.rerank_to_disk(Digests(), tmp_path / "copy", out, topics=TOPICS, shard=(0, 2))
    write_trec(RUN.iloc[::-1], source)
    with pytest.raises(ValueError, match="differs in candidates"):
        ld.rerank_to_disk(Digests(), source, out, topics=TOPICS, shard=(1, 2))


def test_damaged_blocks_are_named_and_scored_again_once_they_are_deleted(whole, tmp_path):
    out, stub = tmp_path / "out", Digests(log=tmp_path / "log")
    ld.rerank_to_disk(Digests(), RUN, out, topics=TOPICS)
    half, flipped = sorted((out / "blocks").iterdir())[:2]
    half.write_bytes(half.read_bytes()[:-20])
    for call in (lambda: ld.rerank_to_disk(stub, RUN, out, topics=TOPICS), lambda: ld.merge_run(out)):
        with pytest.raises(ValueError, match=rf"1 finished block\(s\) cannot be used\. Delete.*{half.name}"):
            call()
    half.unlink()
    ld.rerank_to_disk(stub, RUN, out, topics=TOPICS)
    assert len(stub.calls()) == 1
    assert files(out) == files(whole)
    data = bytearray(flipped.read_bytes())
    data[40] ^= 255
    flipped.write_bytes(data)
    with pytest.raises(ValueError, match=flipped.name):
        ld.merge_run(out)


def test_blocks_of_another_job_are_refused(whole, tmp_path):
    ld.rerank_to_disk(Digests("b"), RUN, tmp_path / "out", topics=TOPICS)
    block = next((whole / "blocks").iterdir())
    (tmp_path / "out" / "blocks" / block.name).write_bytes(block.read_bytes())
    with pytest.raises(ValueError, match=rf"{block.name} \(of another job\)"):
        ld.merge_run(tmp_path / "out")


def test_files_of_somebody_else_are_left_alone(tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(FileExistsError, match=r"holds other files \(notes\.txt\): choose a new or empty folder"):
        ld.rerank_to_disk(Digests(), RUN, tmp_path, topics=TOPICS)
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]
    ld.rerank_to_disk(Digests(), RUN, tmp_path / "out", topics=TOPICS)
    (tmp_path / "out" / "blocks" / "0001 (copy).parquet").touch()
    with pytest.raises(ValueError, match=r"files that are no blocks: move away 0001 \(copy\)\.parquet"):
        ld.merge_run(tmp_path / "out")
    with pytest.raises(FileNotFoundError, match="is no folder of rerank_to_disk"):
        ld.merge_run(tmp_path)


def test_damaged_candidates_are_dealt_anew_once_they_are_deleted(whole, tmp_path):
    import shutil

    source, out, stub = write_trec(RUN, tmp_path / "run"), tmp_path / "out", Digests(log=tmp_path / "log")
    ld.rerank_to_disk(stub, source, out, topics=TOPICS, shard=(0, 2))
    done = len(stub.calls())
    for file in (out / "candidates").glob("*.arrow"):
        file.write_bytes(file.read_bytes()[:-200])
    with pytest.raises(ValueError, match=r"\.arrow' are damaged \(.*\): delete the folder .*what is scored stays"):
        ld.rerank_to_disk(stub, source, out, topics=TOPICS)
    shutil.rmtree(out / "candidates")
    ld.rerank_to_disk(stub, source, out, topics=TOPICS)
    assert len(stub.calls()) == len(files(out)) > done
    assert merged(out) == merged(whole)
    (out / "candidates" / "manifest.json").write_text("{")
    with pytest.raises(ValueError, match=r"manifest\.json' is damaged"):
        ld.merge_run(out)


def test_a_merge_says_which_blocks_and_shards_are_missing(tmp_path):
    ld.rerank_to_disk(Digests(), RUN, tmp_path / "out", topics=TOPICS, shard=(0, 3))
    ld.rerank_to_disk(Digests(), RUN, tmp_path / "out", topics=TOPICS, shard=(1, 3))
    gone = next(path for path in sorted((tmp_path / "out" / "blocks").iterdir()) if int(path.stem) % 3 == 1)
    gone.unlink()
    with pytest.raises(FileNotFoundError) as raised:
        ld.merge_run(tmp_path / "out")
    message = str(raised.value)
    assert re.search(r"\d+ of the \d+ blocks in .* are not finished \(.*; of \d+ rows\)", message)
    assert "for the shards 1 (not finished), 2 (not begun) of 3" in message
    assert re.search(rf"\b{int(gone.stem)}\b", message)


BAD = [
    ({"shard": (2, 2)}, ValueError, r"shard=\(2, 2\) must be \(i, n\)"),
    ({"shard": 1}, ValueError, "shard=1 must be"),
    ({"price_per_hour": "2.5"}, ValueError, "price_per_hour='2.5' must be a number of at least 0"),
    ({"pipeline": len}, ValueError, "must be a transformer"),
    ({"topics": None}, ValueError, "no column query: give topics="),
    ({"topics": TOPICS.iloc[2:]}, ValueError, "have 2 qids that are not in topics, e.g. 'q"),
    ({"topics": pd.concat([TOPICS, TOPICS])}, ValueError, "topics hold the qid 'q0' more than once"),
    ({"run": WITH_QUERIES}, ValueError, "topics= would have no effect"),
    ({"run": RUN.iloc[:0]}, ValueError, "the candidates have no rows"),
    ({"run": RUN.drop(columns="docno")}, ValueError, "the candidates lack the column.s. docno"),
    ({"run": "no-such-file"}, FileNotFoundError, "run='no-such-file' does not exist"),
]


@pytest.mark.parametrize(("changes", "kind", "message"), BAD, ids=[message for *_, message in BAD])
def test_what_cannot_work_is_said_before_anything_is_written(tmp_path, changes, kind, message):
    arguments = {"pipeline": Digests(), "run": RUN, "topics": TOPICS, "out": tmp_path / "out", **changes}
    with pytest.raises(kind, match=message):
        ld.rerank_to_disk(**arguments)
    assert not (tmp_path / "out").exists()


def test_files_that_are_no_candidates_are_named(tmp_path):
    (tmp_path / "folder").mkdir()
    with pytest.raises(FileNotFoundError, match="is a folder without Parquet files"):
        ld.rerank_to_disk(Digests(), tmp_path / "folder", tmp_path / "out", topics=TOPICS)
    RUN.iloc[:0].to_parquet(tmp_path / "folder" / "a.parquet")
    with pytest.raises(ValueError, match="the candidates have no rows"):
        ld.rerank_to_disk(Digests(), tmp_path / "folder", tmp_path / "out", topics=TOPICS)
    (tmp_path / "folder" / "a.parquet").write_text("words")
    with pytest.raises(ValueError, match=r"a\.parquet' is no Parquet file"):
        ld.rerank_to_disk(Digests(), tmp_path / "folder", tmp_path / "out", topics=TOPICS)
    (tmp_path / "run").write_text("1 Q0 d1 0 high bm25\n")
    with pytest.raises(ValueError, match="is no TREC run"):
        ld.rerank_to_disk(Digests(), tmp_path / "run", tmp_path / "out", topics=TOPICS)


def test_candidates_without_text_are_refused_before_anything_is_written(cross_encoder, tmp_path):
    with pytest.raises(pt.validate.InputValidationError, match=r"the column\(s\) text are missing.*text_loader"):
        ld.rerank_to_disk(ld.MaxP(cross_encoder), RUN, tmp_path / "out", topics=TOPICS)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("result", "message"),
    [
        (lambda frame: frame.drop(columns="score"), "lack the column.s. score"),
        (lambda frame: frame.assign(score=np.nan), "no finite number: every result needs a score"),
        (lambda frame: frame.assign(qid="other"), "have the qid 'other', which the candidates have not"),
    ],
)
def test_results_that_are_none_are_refused(tmp_path, result, message):
    with pytest.raises(RuntimeError, match=message):
        ld.rerank_to_disk(Digests() >> pt.apply.generic(result), WITH_QUERIES, tmp_path / "out")
    assert not list((tmp_path / "out").glob("blocks/*"))


def test_without_pyarrow_it_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(ImportError, match=r"pip install pyarrow \(it is in the extra \[disk\]\)"):
        ld.rerank_to_disk(Digests(), RUN, tmp_path / "out", topics=TOPICS)


# Elsewhere, and in several processes.


class Backwards:
    """Takes so many blocks at a time, and returns the last one first."""

    def __init__(self, at_once: int) -> None:
        self.at_once, self.left_out, self.most = at_once, 0, 0

    def map_blocks(self, transformer, blocks):
        held = []
        for block in blocks:
            held.append(block)
            self.most = max(self.most, len(held))
            if len(held) == self.at_once:
                key, frame = held.pop()
                yield key, transformer(frame)
        for key, frame in held[self.left_out :]:
            yield key, transformer(frame)


def test_an_executor_returns_blocks_in_any_order(whole, tmp_path):
    ld.rerank_to_disk(Digests(), RUN, tmp_path / "out", topics=TOPICS, executor=Backwards(3))
    assert files(tmp_path / "out") == files(whole)


def test_an_executor_that_loses_blocks_is_noticed(tmp_path):
    executor = Backwards(3)
    executor.left_out = 1
    with pytest.raises(RuntimeError, match=r"did not return all blocks \(in block \d+, queries "):
        ld.rerank_to_disk(Digests(), RUN, tmp_path / "out", topics=TOPICS, executor=executor)


def test_processes_that_start_at_once_deal_once_and_divide_the_work(whole, tmp_path):
    source, log, dealt = write_trec(RUN, tmp_path / "run.gz"), tmp_path / "log", tmp_path / "dealt"

    def shard(i: int) -> None:
        from pyterrier_longdoc.scale import job

        deal = job.deal

        def logged(parts, folder):
            with dealt.open("a") as file:
                file.write("dealt\n")
            time.sleep(0.5)
            return deal(parts, folder)

        job.deal = logged
        ld.rerank_to_disk(Digests(log=log), source, tmp_path / "out", topics=TOPICS, shard=(i, 3))

    children = [processes.start(lambda i=i: shard(i)) for i in range(3)]
    assert [processes.wait(child) for child in children] == [0, 0, 0]
    assert dealt.read_text() == "dealt\n"
    assert sorted(qid for call in Digests(log=log).calls() for qid in call) == sorted(TOPICS["qid"])
    assert merged(tmp_path / "out") == merged(whole)


def test_processes_that_start_at_once_on_a_new_folder_all_end_well(whole, tmp_path):
    source = write_trec(RUN, tmp_path / "run")
    for turn in range(5):
        out, begin = tmp_path / f"out-{turn}", time.monotonic() + 0.2

        def shard(i: int, out: Path = out, begin: float = begin) -> None:
            time.sleep(max(0.0, begin - time.monotonic() + 0.004 * i))
            ld.rerank_to_disk(Digests(), source, out, topics=TOPICS, shard=(i, 6))

        children = [processes.start(lambda i=i: shard(i)) for i in range(6)]
        assert [processes.wait(child) for child in children] == [0] * 6
        assert merged(out) == merged(whole)


@pytest.mark.parametrize("form", ["frame", "file"])
def test_a_process_that_begins_while_another_one_does_joins_it(form, whole, tmp_path, monkeypatch):
    source = RUN if form == "frame" else write_trec(RUN, tmp_path / "run")
    digests, out = Source.digests, tmp_path / "out"

    def slowly(self, files):
        if not out.exists():  # another process looked at the folder later, and is through with it
            out.mkdir()
            ld.rerank_to_disk(Digests(), source, out, topics=TOPICS, shard=(0, 2))
        return digests(self, files)

    monkeypatch.setattr(Source, "digests", slowly)
    ld.rerank_to_disk(Digests(), source, out, topics=TOPICS, shard=(1, 2))
    assert merged(out) == merged(whole)


@pytest.mark.slow
def test_memory_does_not_grow_with_the_blocks(tmp_path):
    run, topics = candidates(60_000, 300)
    source = write_trec(run, tmp_path / "run.gz")
    texts = pt.apply.generic(lambda frame: frame.assign(text=[docno * 500 for docno in frame["docno"]]))
    pipeline = texts >> Digests()  # 160 MB of text in all
    ld.rerank_to_disk(pipeline, source, tmp_path / "out", topics=topics, shard=(0, 8))
    with pytest.warns(UserWarning, match="nobody can tell"):
        assert memory.growth(lambda: ld.rerank_to_disk(pipeline, source, tmp_path / "out", topics=topics)) < 60


def page_blocks(kind: str) -> list[str]:
    page = (Path(ld.__file__).parent / "pt_docs" / "scale.rst").read_text(encoding="utf-8")
    return [textwrap.dedent(code) for code in re.findall(rf"code-block:: {kind}\n\n((?:    .*\n|\n)+)", page)]


@pytest.mark.slow
def test_the_array_job_of_the_documentation_runs_as_local_processes(tmp_path):
    pytest.importorskip("pyterrier_pisa")
    (script,) = page_blocks("bash")
    prepare, program = page_blocks("python")[:2]
    (tmp_path / "rerank.sh").write_text(script)
    (tmp_path / "rerank.py").write_text(program)
    preamble = page_preamble()
    subprocess.run([sys.executable, "-c", preamble + prepare], cwd=tmp_path, check=True, capture_output=True)
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    for i in range(2):
        environment = {**os.environ, "PATH": path, "SLURM_ARRAY_TASK_ID": str(i), "SLURM_ARRAY_TASK_COUNT": "2"}
        subprocess.run(["bash", "rerank.sh"], cwd=tmp_path, env=environment, check=True, capture_output=True)
    assert len(ld.merge_run(tmp_path / "reranked")) > 0


def page_preamble() -> str:
    page = (Path(ld.__file__).parent / "pt_docs" / "index.rst").read_text(encoding="utf-8")
    return textwrap.dedent(re.search(r"code-block:: python\n\n((?:    .*\n|\n)+)", page)[1])
