"""rerank_to_disk and merge_run: results equal transform's, and a job that was stopped continues."""

from __future__ import annotations

import random
import signal
import time
import warnings
from pathlib import Path

import numpy as np
import pandas as pd
import pyterrier as pt
import pytest

import pyterrier_longdoc as ld
from pyterrier_longdoc.scale.disk import run_lines

from ..support import memory, processes, systems, tiny
from ..support.digests import Digests, candidates

parquet = pytest.importorskip("pyarrow.parquet")
RUN = candidates(300, 12)
TERMS = ("term_scores", "term_places")

pytestmark = pytest.mark.filterwarnings("ignore:.*cannot notice changes", "ignore::pyterrier_longdoc.UntrainedWarning")


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    """Of one query or two."""
    monkeypatch.setattr("pyterrier_longdoc.scale.blocks.BLOCK_ROWS", 25)


@pytest.fixture(scope="module")
def whole() -> pd.DataFrame:
    """All queries at once, in the order in which they first appear."""
    places = {qid: place for place, qid in enumerate(RUN["qid"].unique())}
    return Digests()(RUN.iloc[RUN["qid"].map(places).argsort(kind="stable")].reset_index(drop=True))


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
    ld.rerank_to_disk(model, inp, tmp_path / "out")
    expected = model(inp).reset_index(drop=True)
    pd.testing.assert_frame_equal(ld.merge_run(tmp_path / "out"), expected, check_exact=False, rtol=1e-5)


@pytest.mark.parametrize("name", ["MaxP", "LateIR"])
def test_coverage_equals_that_of_transform(name, tmp_path, monkeypatch):
    monkeypatch.setattr("pyterrier_longdoc.scale.blocks.BLOCK_ROWS", 1)
    frame = tiny.frame([f"{word} dog" for word in tiny.WORDS[:4]], [tiny.LONG, "old dog", " "])
    model = systems.make(name, max_query_len=8)
    with pytest.warns(ld.EmptyTextWarning, match="no text"):
        coverage = ld.rerank_to_disk(model, frame, tmp_path / "out")
    assert len(written(tmp_path / "out")) == 4
    model(frame)
    assert coverage == model.coverage


@pytest.mark.parametrize("n", [1, 2, 7])
def test_every_number_of_shards_gives_the_same_results(whole, tmp_path, n):
    for i in random.Random(n).sample(range(n), n):
        ld.rerank_to_disk(Digests(), RUN, tmp_path / "out", shard=(i, n))
    assert len(written(tmp_path / "out")) > 5
    assert_merged(tmp_path / "out", whole)


def test_a_merged_file_is_a_run_in_the_order_of_ranks(tmp_path):
    ld.rerank_to_disk(Digests(), RUN, tmp_path / "out")
    path = ld.merge_run(tmp_path / "out", tmp_path / "merged.res.gz", name="my system")
    lines, frame = pt.io.read_results(str(path)), ld.merge_run(tmp_path / "out")
    assert lines["name"].unique().tolist() == ["my_system"]
    assert lines["qid"].drop_duplicates().tolist() == frame["qid"].drop_duplicates().tolist()
    assert all(ranks.tolist() == list(range(len(ranks))) for _, ranks in lines.groupby("qid")["rank"])
    both = lines.merge(frame, on=["qid", "docno"], validate="1:1")
    assert len(both) == len(frame)
    np.testing.assert_allclose(both["score_x"], both["score_y"], rtol=1e-15)


def test_lines_of_a_run_keep_every_score():
    scores = [1 / 3, np.nextafter(1e-300, 1), -np.inf]
    frame = pd.DataFrame({"qid": ["NA", "null", "null"], "docno": ['a"b', "nan", "1"], "score": scores, "rank": 0})
    lines = list(run_lines(frame, "my system"))
    assert lines[0] == 'NA Q0 a"b 0 0.3333333333333333 my_system'
    assert [float(line.split(" ")[4]) for line in lines] == scores


@pytest.mark.parametrize("column", ["qid", "docno"])
@pytest.mark.parametrize("name", ["a b", ""])
def test_names_that_a_run_cannot_hold_are_refused(column, name, tmp_path):
    ld.rerank_to_disk(Digests(), RUN.assign(**{column: name}), tmp_path / "out")
    with pytest.raises(ValueError, match=column):
        ld.merge_run(tmp_path / "out", tmp_path / "run.res")
    assert not (tmp_path / "run.res").exists()


def test_a_pipeline_can_drop_rows_and_queries(tmp_path):
    two_of_each = Digests() % 2 >> pt.apply.generic(lambda frame: frame[frame["qid"] != "q3"])
    ld.rerank_to_disk(two_of_each, RUN, tmp_path / "out")
    ranks = ld.merge_run(tmp_path / "out").groupby("qid")["rank"].apply(sorted)
    assert ranks.to_dict() == {f"q{i}": [0, 1] for i in range(12) if i != 3}


def test_columns_of_sequences_come_back_as_lists_and_features_as_arrays(tmp_path):
    columns = {"spans": [[(i, i + 1)] for i in range(300)], "bits": [np.zeros(2)] * 300, "counts": [{"a": 1}] * 300}
    features = [np.array([i, 0.5]) for i in range(300)]
    ld.rerank_to_disk(Digests(), RUN.assign(**columns, features=features, place=range(300)), tmp_path / "out")
    found = ld.merge_run(tmp_path / "out")
    first = found.iloc[0]
    assert (first["spans"], first["bits"]) == ([[first["place"], first["place"] + 1]], [0.0, 0.0])
    assert first["counts"] == {"a": 1}
    assert np.array_equal(np.stack(found["features"])[:, 0], found["place"])


@pytest.mark.parametrize("name", ["CEDR-knrm", "MaxSim", "NeuralModel1", "MaxP"])
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


def test_missing_explanations_come_back_as_missing(tmp_path):
    explained = systems.make("MaxSim", explain=True)
    missing = pt.apply.generic(lambda frame: frame.assign(**{name: [None, *frame[name][1:]] for name in TERMS}))
    ld.rerank_to_disk(explained >> missing, tiny.results(), tmp_path / "out")
    merged = ld.merge_run(tmp_path / "out")
    assert merged["term_places"].isna().sum() == merged["term_scores"].isna().sum() == 1


def test_a_lone_surrogate_is_written_as_a_question_mark(tmp_path):
    text = pd.Series(["cut \ud83d", "whole", None] * 100, dtype=object)
    ld.rerank_to_disk(Digests(), RUN.assign(text=text), tmp_path / "out")
    assert set(ld.merge_run(tmp_path / "out")["text"].dropna()) == {"cut ?", "whole"}


@pytest.mark.parametrize(
    "result", [lambda frame: frame.drop(columns="score"), lambda frame: frame.assign(score=np.nan)]
)
def test_results_without_scores_are_refused(tmp_path, result):
    with pytest.raises(ValueError, match="score"):
        ld.rerank_to_disk(Digests() >> pt.apply.generic(result), RUN, tmp_path / "out")
    assert not list((tmp_path / "out").glob("blocks/*"))


def test_an_empty_run_gives_an_empty_run(tmp_path):
    ld.rerank_to_disk(Digests(), RUN.iloc[:0], tmp_path)
    assert set(ld.merge_run(tmp_path)) == {*RUN, "rank"}


# Going on.


class Texts(pt.Transformer):
    """Adds texts, unless they contain those of a lost query."""

    lost = None

    def transform(self, inp):
        if self.lost in set(inp["qid"]):
            raise KeyError("d17")
        return inp.assign(text="words")


def test_the_next_call_continues_after_an_error(tmp_path, capsys):
    stub, texts = Digests(log=tmp_path / "log"), Texts()
    pipeline, texts.lost = texts >> stub, RUN["qid"].unique()[5]
    with pytest.raises(KeyError, match="d17"):
        ld.rerank_to_disk(pipeline, RUN, tmp_path / "out")
    assert written(tmp_path / "out")
    texts.lost = None
    ld.rerank_to_disk(pipeline, RUN, tmp_path / "out", verbose=True)
    assert "300/300" in capsys.readouterr().err
    ld.rerank_to_disk(pipeline, RUN, tmp_path / "out")
    assert sorted(qid for call in stub.calls() for qid in call) == sorted(RUN["qid"].unique())
    assert len(ld.merge_run(tmp_path / "out")) == 300


@pytest.mark.slow
def test_a_repeatedly_killed_job_gives_the_same_results(tmp_path):
    run, out = candidates(20_000, 150), tmp_path / "killed"
    whole, killed = Digests(log=tmp_path / "log of whole"), Digests(log=tmp_path / "log of killed")
    ld.rerank_to_disk(whole, run, tmp_path / "whole")
    blocks, rng = whole.calls(), random.Random(0)
    for finished in [0, *sorted(rng.sample(range(len(blocks)), 5))]:
        child = processes.start(lambda: ld.rerank_to_disk(killed, run, out))
        end = time.monotonic() + 60
        while len(list(out.glob("blocks/*.parquet"))) < finished and time.monotonic() < end:
            time.sleep(0.002)
        time.sleep(rng.uniform(0, 0.05))
        processes.kill(child)
        assert processes.wait(child) in (-signal.SIGKILL, 0)
    ld.rerank_to_disk(killed, run, out)
    pd.testing.assert_frame_equal(ld.merge_run(out), ld.merge_run(tmp_path / "whole"))
    # Every call is one block; besides the one that was open, a kill costs nothing.
    assert {tuple(call) for call in killed.calls()} == {tuple(call) for call in blocks}
    assert len(blocks) <= len(killed.calls()) <= len(blocks) + 6


def test_a_damaged_block_is_named_and_scored_again_once_deleted(whole, tmp_path):
    ld.rerank_to_disk(Digests(), RUN, tmp_path / "out")
    block = tmp_path / "out/blocks/00001.parquet"
    column = parquet.read_metadata(block).row_group(0).column(0)
    content = bytearray(block.read_bytes())
    content[column.dictionary_page_offset + column.total_compressed_size - 1] ^= 1
    block.write_bytes(content)
    with pytest.raises(ValueError, match=r"00001\.parquet"):
        ld.merge_run(tmp_path / "out")
    block.unlink()
    ld.rerank_to_disk(Digests(), RUN, tmp_path / "out")
    assert_merged(tmp_path / "out", whole)


def test_a_merge_names_the_blocks_that_are_missing(tmp_path):
    ld.rerank_to_disk(Digests(), RUN, tmp_path / "out", shard=(1, 3))
    for path in (None, tmp_path / "run.res"):
        with pytest.raises(FileNotFoundError, match=r"00000\.parquet"):
            ld.merge_run(tmp_path / "out", path)


def test_a_folder_without_a_job_cannot_be_merged(tmp_path):
    with pytest.raises(FileNotFoundError, match="job"):
        ld.merge_run(tmp_path)


# Other pipelines and other candidates.


@pytest.mark.parametrize(
    "changes",
    [{"seed": 1}, {"run": lambda run: run.iloc[::-1]}, {"run": lambda run: run.assign(query="other words")}],
    ids=["model", "order", "query"],
)
def test_another_job_in_the_folder_is_refused(changes, plain_encoder, tmp_path):
    model, run = systems.make("MaxP", plain_encoder), tiny.results()
    ld.rerank_to_disk(model, run, tmp_path, shard=(0, 2))
    before = written(tmp_path)
    assert before
    if "seed" in changes:
        model = systems.make("MaxP", plain_encoder, **changes)
    with pytest.raises(ValueError, match="another job"):
        ld.rerank_to_disk(model, changes.get("run", lambda run: run)(run), tmp_path)
    assert written(tmp_path) == before


def test_a_folder_without_finished_blocks_can_get_another_job(tmp_path):
    with pytest.raises(pt.validate.InputValidationError, match="query"):
        ld.rerank_to_disk(Digests(), RUN.drop(columns="query"), tmp_path)
    ld.rerank_to_disk(Digests(), RUN, tmp_path)
    assert len(ld.merge_run(tmp_path)) == 300


class Counter:
    """Scores by a method."""

    def count(self, queries, texts):
        return list(map(len, texts))


SCORERS = {
    "a method": Counter().count,
    "a transformer": pt.apply.doc_score(lambda row: float(len(row["text"]))),
}


@pytest.mark.parametrize("scorer", SCORERS.values(), ids=SCORERS)
def test_a_scorer_without_identity_continues_with_a_warning(scorer, tmp_path):
    model, run = ld.MaxP(ld.PairScorer(scorer), window_size=8, stride=8), tiny.results()
    ld.rerank_to_disk(model, run, tmp_path, shard=(0, 2))
    with pytest.warns(UserWarning, match="cannot notice changes"):
        ld.rerank_to_disk(model, run, tmp_path, shard=(1, 2))
    expected = model(run).sort_values("qid", kind="stable", ignore_index=True)
    pd.testing.assert_frame_equal(ld.merge_run(tmp_path)[expected.columns], expected)


def test_a_pipeline_with_a_function_continues_with_a_warning(cross_encoder, tmp_path):
    function, model = pt.apply.generic(lambda frame: frame.assign(note="mine")), systems.make("MaxP", cross_encoder)
    run = tiny.longer_results().assign(text="the old dog")
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        ld.rerank_to_disk(function >> model, run, tmp_path, shard=(0, 2))
        ld.rerank_to_disk(model, run, tmp_path / "alone", shard=(0, 2))
        ld.rerank_to_disk(model, run, tmp_path / "alone")
    with pytest.warns(UserWarning, match="cannot notice changes"):
        ld.rerank_to_disk(function >> model, run, tmp_path, shard=(1, 2))
    assert set(ld.merge_run(tmp_path)["note"]) == {"mine"}


def test_a_text_loader_continues_with_a_warning(cross_encoder, tmp_path):
    run = tiny.longer_results()
    model = systems.make("MaxP", cross_encoder, text_loader=tiny.Store(run))
    ld.rerank_to_disk(model, run.drop(columns="text"), tmp_path, shard=(0, 2))
    with pytest.warns(UserWarning, match="text loaders"):
        ld.rerank_to_disk(model, run.drop(columns="text"), tmp_path, shard=(1, 2))


BAD = [
    ({"run": RUN.assign(note=["one", 2, *[None] * (len(RUN) - 2)])}, "note"),
    ({"shard": (2, 2)}, "shard"),
    ({"run": RUN.assign(qid=[None, *RUN["qid"][1:]])}, "'qid'"),
    ({"run": RUN.drop(columns="docno")}, "docno"),
    ({"run": "run.res"}, "candidates"),
    ({"pipeline": len}, "pipeline"),
]


@pytest.mark.parametrize(("changes", "message"), BAD)
def test_wrong_arguments_are_refused_before_anything_is_written(tmp_path, changes, message):
    arguments = {"pipeline": Digests(), "run": RUN, "out": tmp_path / "out", **changes}
    with pytest.raises(ValueError, match=message):
        ld.rerank_to_disk(**arguments)
    assert not (tmp_path / "out").exists()


# In several processes.


def test_concurrent_processes_share_the_work_even_if_one_dies(whole, tmp_path):
    log = tmp_path / "log"

    def shard(i: int) -> None:
        ld.rerank_to_disk(Digests(log=log), RUN, tmp_path / "out", shard=(i, 3))

    killed = processes.start(lambda: shard(0))
    children = [processes.start(lambda i=i: shard(i)) for i in (1, 2)]
    processes.kill(killed)
    processes.wait(killed)
    children.append(processes.start(lambda: shard(0)))
    assert [processes.wait(child) for child in children] == [0, 0, 0]
    assert_merged(tmp_path / "out", whole)


class LongTexts(pt.Transformer):
    """Adds a long text to each row."""

    def transform(self, inp):
        return inp.assign(text=[docno * 500 for docno in inp["docno"]])


@pytest.mark.slow
def test_memory_use_does_not_grow_with_the_number_of_blocks(tmp_path):
    run, pipeline = candidates(60_000, 300), LongTexts() >> Digests()  # 160 MB of text in all
    ld.rerank_to_disk(pipeline, run, tmp_path / "out", shard=(0, 8))
    assert memory.growth(lambda: ld.rerank_to_disk(pipeline, run, tmp_path / "out")) < 60


def test_a_block_in_the_place_of_another_is_refused(tmp_path):
    for out, run in (("one", RUN), ("other", RUN.iloc[:-1])):
        ld.rerank_to_disk(Digests(), run, tmp_path / out)
    first, second = sorted(tmp_path.glob("one/blocks/*.parquet"))[:2]
    for source in (second, tmp_path / "other" / "blocks" / first.name):
        first.write_bytes(source.read_bytes())
        with pytest.raises(ValueError, match=f"{first.name}' is damaged.*another block or another job"):
            ld.merge_run(tmp_path / "one")


def test_a_folder_with_other_files_is_refused(tmp_path):
    (tmp_path / "job.json").write_text("{}")
    with pytest.raises(ValueError, match="contains other files"):
        ld.rerank_to_disk(Digests(), RUN, tmp_path)
    assert (tmp_path / "job.json").read_text() == "{}"


JOB = '{"format": 1, "candidates": "", "models": [], "pipeline": "", "blocks": %s}'


@pytest.mark.parametrize("content", ["", "[]", "{}", *(JOB % blocks for blocks in ("null", '"x"', "0"))])
def test_a_damaged_job_is_named(content, tmp_path):
    ld.rerank_to_disk(Digests(), RUN, tmp_path)
    (tmp_path / "job.json").write_text(content)
    for call in (lambda: ld.merge_run(tmp_path), lambda: ld.rerank_to_disk(Digests(), RUN, tmp_path)):
        with pytest.raises(ValueError, match=r"job\.json' is damaged"):
            call()


def test_shards_that_start_before_any_block_is_finished_are_compared(tmp_path, results):
    ld.rerank_to_disk(systems.make("MaxP"), results.iloc[:0], tmp_path, shard=(0, 2))
    with pytest.raises(ValueError, match="models"):
        ld.rerank_to_disk(systems.make("SumP"), results.iloc[:0], tmp_path, shard=(1, 2))
