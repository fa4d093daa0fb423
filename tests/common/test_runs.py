"""Runs as TREC files."""

import numpy as np
import pandas as pd
import pytest

from pyterrier_longdoc.common.runs import read_run, write_run

from ..support import synthetic

TOPICS, _ = synthetic.collection()
RUNS = [synthetic.run(TOPICS, 1.0, seed) for seed in range(2)]


@pytest.mark.parametrize("file", ["run.res", "run.res.gz"])
def test_trec_files_keep_every_score(tmp_path, file):
    scores = [1 / 3, np.nextafter(1e-300, 1), -np.inf]
    frame = pd.DataFrame({"qid": ["NA", "null", "null"], "docno": ['a"b', "nan", "1"], "score": scores})
    write_run(frame, tmp_path / file, "my system")
    pd.testing.assert_frame_equal(read_run(tmp_path / file), frame, check_dtype=False, check_exact=True)
    write_run(frame, tmp_path / f"other-{file}", "my system")
    assert (tmp_path / f"other-{file}").read_bytes() == (tmp_path / file).read_bytes()
    if file == "run.res":
        assert (tmp_path / file).read_text().splitlines()[0] == 'NA Q0 a"b 0 0.3333333333333333 my_system'


def test_invalid_trec_files_are_refused(tmp_path):
    frame = pd.DataFrame({"qid": ["1"], "docno": ["a b"], "score": [1.0]})
    with pytest.raises(ValueError, match="docno"):
        write_run(frame, tmp_path / "run.res", "x")
    assert not list(tmp_path.iterdir())
    with pytest.raises(FileNotFoundError, match="run"):
        read_run(tmp_path / "run.res")
    (tmp_path / "text.res").write_text("this is not a run at all\n")
    with pytest.raises(ValueError, match="no TREC run"):
        read_run(tmp_path / "text.res")


def test_a_damaged_compressed_run_is_named(tmp_path):
    path = tmp_path / "run.res.gz"
    write_run(RUNS[0], path, "x")
    whole = path.read_bytes()
    for damaged in (whole[:-20], b"x" + whole, whole[:100] + b"xxxx" + whole[104:]):
        path.write_bytes(damaged)
        with pytest.raises(ValueError, match=r"run\.res\.gz' is no TREC run"):
            read_run(path)


def test_a_failed_write_leaves_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "run.res"
    write_run(RUNS[0], path, "x")
    before = path.read_bytes()
    monkeypatch.setattr("os.replace", lambda *_: (_ for _ in ()).throw(OSError("disk full")))
    with pytest.raises(OSError, match="disk full"):
        write_run(RUNS[1], path, "x")
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]
