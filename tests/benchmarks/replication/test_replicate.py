"""The replication in miniature, with a tiny random encoder: its data, jobs, budget, and what is found again."""

from __future__ import annotations

import json
import random
import re
import time
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
import torch

from ...support import processes, tiny
from . import replicate as module
from .__main__ import main, seconds
from .claims import needed
from .encoders import as_longformer, first_layers
from .miniature import (
    FIRST,
    PASSAGE,
    POSITIONS,
    WHOLE,
    Miniature,
    Passages,
    Sizes,
    beginning,
    by_absence,
    passages_of,
)
from .replicate import (
    STUDIES,
    SYSTEMS,
    TRAININGS,
    UNTRAINED,
    Job,
    Replication,
    by_chance,
    is_done,
    jobs_of,
    read_figures,
    read_outcomes,
    reciprocal_ranks,
    replicate,
)

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")

SIZES = Sizes(train=6, test=4, dev=2, depth=4)
NAMES = tiny.WORDS[28:]
FILLER = tiny.WORDS[:28]


def passages(topics: int = 40, filler: int = 40) -> Passages:
    """Passages of 24 to 40 words; those of topics have two words in common with their query."""
    rng, corpus, asked, qrels = random.Random(0), [], [], []
    pairs = rng.sample([(a, b) for a in NAMES for b in NAMES if a < b], topics)
    for number in range(topics + filler):
        words = rng.choices(FILLER, k=rng.randint(24, 40))
        if number < topics:
            words[3:5] = pairs[number]
            asked.append((f"q{number}", " ".join(pairs[number])))
            qrels.append((f"q{number}", f"p{number}", 1))
        corpus.append({"docno": f"p{number}", "text": " ".join(words) + "."})
    return Passages(
        corpus, pd.DataFrame(asked, columns=["qid", "query"]), pd.DataFrame(qrels, columns=["qid", "docno", "label"])
    )


@pytest.fixture(scope="module")
def data() -> Miniature:
    return Miniature(passages(), SIZES, tokenizer=tiny.tokenizer())


@pytest.fixture(scope="module")
def backbone(tmp_path_factory) -> str:
    """A tiny random cross-encoder that takes a whole document."""
    return tiny.checkpoint(str(tmp_path_factory.mktemp("encoder")), max_position_embeddings=512)


@pytest.fixture
def replication(tmp_path, data, backbone) -> Replication:
    return Replication(tmp_path / "out", data, backbone=backbone, device="cpu", dtype="float32")


# Data.


def test_collections_differ_in_the_place_of_the_relevant_passage_alone(data):
    gold = {position: collection.gold for position, collection in data.collections.items()}
    count = tiny.tokenizer()
    texts = {p: {d: row["text"] for d, row in data.collections[p].documents.items()} for p in POSITIONS}
    for docno, text in texts["early"].items():
        assert sorted(text.split()) == sorted(texts["far"][docno].split()) == sorted(texts["uniform"][docno].split())
        assert len(count.tokenize(text)) <= WHOLE
    early = gold["early"]
    tokens = [
        len(count.tokenize(texts["early"][d][a:b])) for d, a, b in zip(early.docno, early.start, early.end, strict=True)
    ]
    assert (early["first_token"] + tokens <= FIRST).all()
    assert (gold["far"]["first_token"] >= FIRST).all()


def test_topics_to_test_on_are_found_and_no_other_part_s(data):
    parts = data.topics
    assert {split: len(topics) for split, topics in parts.items()} == {"test": 4, "dev": 2, "train": 6, "pairs": 19}
    assert not set(parts["test"]["qid"]) & {q for split in ("dev", "train", "pairs") for q in parts[split]["qid"]}
    for split in ("test", "dev"):
        found = data.candidates("far", split).merge(data.qrels(split), on=["qid", "docno"])
        assert set(found["qid"]) == set(parts[split]["qid"])
    trained = data.candidates("far", "train").merge(data.qrels("train"), on=["qid", "docno"])
    assert len(trained) == SIZES.train  # added where they were not found


def test_topics_that_share_a_passage_are_left_out():
    shared = passages(topics=41)
    shared.qrels.loc[40, "docno"] = "p0"
    left = Miniature(shared, SIZES, tokenizer=tiny.tokenizer()).source.topics["qid"].tolist()
    assert left == [f"q{number}" for number in range(1, 40)]


def test_too_few_topics_are_said():
    few = Miniature(passages(topics=8), SIZES, tokenizer=tiny.tokenizer())
    with pytest.raises(ValueError, match="8 topics with a fitting passage leave none for"):
        _ = few.topics


def test_passages_end_with_a_sentence_or_else_a_word():
    tokens = {"word": 1, "end.": 1, "long": 5}
    assert beginning(["word"] * 30 + ["end."] + ["word"] * 100, tokens).split() == ["word"] * 30 + ["end."]
    assert len(beginning(["word"] * 10 + ["end."] + ["word"] * 100, tokens).split()) == PASSAGE[1]
    assert len(beginning(["long"] * 100, tokens).split()) == PASSAGE[1] // 5


def test_fewest_words_tell_what_stands_behind_the_first_window():
    filler = " ".join(["word"] * (FIRST - 2))
    texts = {
        "early": f"blue whales {filler}",
        "far": f"{filler} and so Blue",
        "half": f"blue {filler} whales",
    }
    frame = pd.DataFrame({"qid": "q", "query": "Blue whales?", "docno": list(texts), "text": list(texts.values())})
    ranked = by_absence(frame, tiny.tokenizer()).sort_values("rank")
    assert ranked["docno"].tolist() == ["far", "half", "early"]
    assert ranked["score"].tolist() == [0, -1, -2]


# Figures of merit.


def test_random_has_its_exact_expectation():
    run = pd.DataFrame({"qid": ["a"] * 4 + ["b"] * 2 + ["c"], "docno": list("wxyzwxw")})
    qrels = pd.DataFrame({"qid": ["a", "b", "c"], "docno": ["x", "w", "no"], "label": 1})
    found = by_chance(run, qrels)
    rng = np.random.default_rng(0)
    drawn = np.mean([1 / (rng.permutation(4)[0] + 1) for _ in range(20000)])
    assert found["a"] == pytest.approx(drawn, abs=0.01)
    assert found.to_dict() == {"a": pytest.approx(25 / 48), "b": 0.75}


def test_reciprocal_ranks_are_of_the_best_relevant_document():
    run = pd.DataFrame({"qid": ["a", "a", "a", "b"], "docno": list("xyzx"), "rank": [0, 1, 2, 0]})
    qrels = pd.DataFrame({"qid": ["a", "a", "b"], "docno": ["z", "y", "x"], "label": [1, 1, 0]})
    assert reciprocal_ranks(run, qrels).to_dict() == {"a": 0.5}


# Jobs.


def test_every_study_names_systems_and_trainings_that_there_are():
    special = {*UNTRAINED, "BiEncoder", "BeST", "positions"}
    for job in jobs_of(list(STUDIES), [0]):
        assert job.system in SYSTEMS or job.system in special
        assert job.trained in {*TRAININGS, "none"}
        assert job.test in POSITIONS
    files = [module.file_name(*job) for job in jobs_of(list(STUDIES), [0, 1])]
    assert len(set(files)) == len(files)


@pytest.mark.parametrize(
    ("option", "told"),
    [
        (["--models", "Maxp"], "'Maxp' is in none of these studies: take random, BM25"),
        (["--studies", "cor"], "there is no study 'cor': take core, longer"),
        (["--studies", "best", "--models", "MaxP"], "'MaxP' is in none of these studies: take BeST"),
    ],
)
def test_misspelt_names_are_told_and_leave_nothing(option, told, tmp_path):
    with pytest.raises(SystemExit, match=re.escape(told)):
        main(["replicate", str(tmp_path / "new"), *option])
    assert not (tmp_path / "new").exists()


def test_everything_that_claims_read_is_in_a_study():
    done = {(job.system, job.trained, job.test) for job in jobs_of(list(STUDIES), [0])}
    assert {tuple(cell) for cell in needed()} <= done


@pytest.mark.bytes
def test_jobs_are_done_once_and_found_again(replication):
    jobs = jobs_of(["core"], [0], ["random", "BM25", "FirstP"])
    told: list[str] = []
    assert replicate(replication, jobs, tell=told.append) == []
    assert len(told) == len(jobs)
    assert replicate(replication, jobs, tell=told.append) == []
    assert len(told) == len(jobs)
    outcomes = read_outcomes(replication.folder)
    assert list(outcomes.columns) == ["trained", "system", "test", "seed", "qid", "rr"]
    keys = ["trained", "system", "test", "seed"]
    assert set(outcomes[keys].itertuples(index=False, name=None)) == {
        (j.trained, j.system, j.test, j.seed) for j in jobs
    }
    assert (outcomes.groupby(keys)["qid"].agg(set) == set(replication.data.topics["test"]["qid"])).all()
    assert outcomes["rr"].between(0, 1).all()
    chance = outcomes[outcomes["system"] == "random"]["rr"]
    assert chance.tolist() == pytest.approx([25 / 48] * len(chance), rel=1e-5)
    # What was written is what the trained model does.
    job = Job("FirstP", "early>far", "far", 0)
    run = replication.model(job.system, job.trained, 0)(replication.data.candidates("far", "test"))
    own = outcomes.query("system == 'FirstP' and trained == 'early>far' and test == 'far'").set_index("qid")["rr"]
    ranks = reciprocal_ranks(run, replication.data.qrels("test"))
    assert own.to_dict() == pytest.approx(ranks.to_dict(), rel=1e-5)
    figures = read_figures(replication.folder)
    assert len(figures) == len(jobs)
    assert set(figures["study"]) == {"cost"}


def test_fine_tuning_goes_on_from_the_weights_before(replication):
    before = replication.model("MaxP", "early", 0).model.state_dict()
    replication = replace(replication, verbose=False)
    model = replication.new("MaxP", 0).start_from(replication.model("MaxP", "early", 0))
    after = replication.model("MaxP", "early>far", 0).model.state_dict()
    assert all(torch.equal(value, before[name]) for name, value in model.model.state_dict().items())
    assert not all(torch.equal(value, before[name]) for name, value in after.items())


def test_a_budget_begins_nothing_new(replication, monkeypatch):
    jobs = jobs_of(["core"], [0], ["random", "BM25"])
    assert replicate(replication, jobs, budget=0.0) == jobs
    told: list[str] = []
    clock = iter([0.0, 1.0, 1.5, 3.0])
    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: 0.0, process_time=lambda: 0.0))
    monkeypatch.setattr(module.time, "monotonic", lambda: next(clock, 3.0))
    assert replicate(replication, jobs, budget=2.0, tell=told.append) == jobs[1:]
    assert len(told) == 1


def test_a_system_is_one_process_s_at_a_time(replication, monkeypatch):
    jobs = jobs_of(["core"], [0], ["random", "BM25"])
    done: list[str] = []

    def rest(_: float) -> None:
        assert [job.system for job in jobs if is_done(replication, job)] == ["BM25"] * 3
        held.release()

    held = module.FileLock(replication.folder / "work" / "locks" / f"{module.file_name('random', 0)}.lock")
    held.acquire()
    monkeypatch.setattr(module.time, "sleep", rest)
    # A lock of another object is another process's, as far as this one can tell.
    assert replicate(replication, jobs, tell=done.append) == []
    assert [line.split()[0] for line in done] == ["BM25"] * 3 + ["random"] * 3


def test_a_folder_has_one_kind_of_replication(replication):
    with pytest.raises(ValueError, match="holds a replication with other steps on pairs"):
        replace(replication, start_steps=7)
    settings = json.loads((replication.folder / "settings.json").read_text(encoding="utf-8"))
    assert settings["replication"]["queries and depth"] == SIZES._asdict()
    assert settings["machine"]["processor"]
    others = Miniature(passages(topics=39), SIZES, tokenizer=tiny.tokenizer())
    with pytest.raises(ValueError, match="holds a replication with other passages"):
        replace(replication, data=others)


@pytest.mark.parametrize("name", ["AvgP", "KMaxP", "PARADE RAND", "CEDR-DRMM", "Neural Model 1", "LongP (Longformer)"])
def test_systems_are_trained_and_tested(replication, name):
    assert replicate(replication, [Job(name, "early", "far", 0)], tell=lambda line: None) == []
    assert len(read_outcomes(replication.folder)) == SIZES.test


@pytest.mark.parametrize("trained", ["rotated", "uniform", "distilled"])
def test_trainings(replication, trained):
    name = "PARADE RAND, 1 layer" if trained == "distilled" else "PARADE RAND"
    model = replication.model(name, trained, 0)
    assert model.is_trained
    recipe = json.loads((replication.work(name, trained, 0) / "finished.json").read_text(encoding="utf-8"))["recipe"]
    assert (recipe["loss"] == "margin_mse") == (trained == "distilled")
    assert (recipe["augment"] is not None) == (trained == "rotated")


def test_best_has_its_precision_by_iteration(replication):
    assert replicate(replication, [Job("BeST", "uniform", "uniform", 0)], tell=lambda line: None) == []
    figures = read_figures(replication.folder).query("study == 'BeST'")
    assert figures["step"].tolist()[:1] == [1]
    assert set(figures["figure"]) == {"segment precision"}
    assert figures["value"].between(0, 1).all()
    assert len(read_outcomes(replication.folder)) == SIZES.test


def test_positions_are_the_known_ones_and_a_judge_s(replication):
    assert replicate(replication, jobs_of(["positions"], [0]), tell=lambda line: None) == []
    figures = read_figures(replication.folder).query("study == 'positions'").set_index(["figure", "step"])["value"]
    known, estimated = "share in first window (known)", "share in first window (estimated)"
    assert figures[known, "early"] == 1.0
    assert figures[known, "far"] == 0.0
    assert all(0 <= figures[estimated, position] <= 1 for position in POSITIONS)


def test_documents_of_the_chunks_study_are_longer(replication):
    long = replication.data_of("PARADE attn, 4 chunks")
    assert max(long.collections["early"].gold["length"]) > WHOLE
    assert replication.data_of("PARADE attn") is replication.data


# Encoders.


def test_a_longformer_begins_as_its_bert(plain_encoder):
    from transformers import AutoModel

    bert = AutoModel.from_pretrained(plain_encoder).eval()
    longformer = as_longformer(bert, 8).eval()
    ids = torch.randint(5, 30, (2, 8))
    with torch.no_grad():
        expected = bert(ids)[0]
        # All tokens see all others: within half a window, or by the second attention.
        seen = longformer(ids, global_attention_mask=torch.ones_like(ids))[0]
    assert torch.allclose(seen, expected, atol=1e-5)


def test_first_layers_are_those_of_the_encoder(plain_encoder):
    from transformers import AutoModel

    bert = AutoModel.from_pretrained(plain_encoder).eval()
    shorter = first_layers(bert, 1)
    ids = torch.randint(5, 30, (2, 8))
    with torch.no_grad():
        expected = bert(ids, output_hidden_states=True).hidden_states[1]
        assert torch.allclose(shorter(ids)[0], expected)
    assert (shorter.config.num_hidden_layers, bert.config.num_hidden_layers) == (1, 2)


# The command.


def test_times():
    assert [seconds(text) for text in ("4h", "90min", "30s", "1.5 h")] == [14400.0, 5400.0, 30.0, 5400.0]
    with pytest.raises(Exception, match="is no time"):
        seconds("soon")


@pytest.mark.bytes
def test_the_command_does_what_is_left(tmp_path, monkeypatch, backbone, capsys):
    monkeypatch.setattr("tests.benchmarks.replication.miniature.docstring_passages", lambda tokenizer: passages())
    sizes = ["--queries", "6", "--test-queries", "4", "--dev-queries", "2", "--depth", "4"]
    command = ["replicate", str(tmp_path), "--backbone", backbone, "--device", "cpu", "--dtype", "float32", *sizes]
    assert main([*command, "--models", "random", "BM25", "--budget", "0s"]) == 0
    assert "6 of 6 jobs are left; the same command goes on" in capsys.readouterr().out
    assert main([*command, "--models", "random", "BM25"]) == 0
    assert "left" not in capsys.readouterr().out
    assert len(read_outcomes(tmp_path)) == 6 * 4
    assert main(["claims", str(tmp_path), "--rst"]) == 0
    assert ".. csv-table::" in capsys.readouterr().out
    assert main([*command, "--models", "FirstP"]) == 0
    capsys.readouterr()
    assert main(["page", str(tmp_path)]) == 0
    written = capsys.readouterr().out
    assert "2 trained models of 1 systems, seeds 0; 6 queries to train on, 4 to test, 4 candidates each." in written
    assert "Boytsov et al. 2025, Tables 1 and 4:" in written
    assert main(["tables", str(tmp_path)]) == 0
    assert capsys.readouterr().out.strip() in written
    kept = tmp_path / "kept"
    assert main(["collect", str(tmp_path), str(kept)]) == 0
    assert sorted(file.name for file in kept.iterdir()) == ["figures.csv", "outcomes.csv.xz", "settings.json"]
    assert main(["page", str(kept)]) == 0
    assert capsys.readouterr().out.replace(kept.as_posix(), tmp_path.as_posix()) == written


def write_folder(folder, source: Passages) -> str:
    """A passage collection as a dataset's name."""
    folder.mkdir()
    (folder / "docs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in source.corpus))
    (folder / "topics.tsv").write_text("".join(f"{qid}\t{query}\n" for qid, query in source.topics.values))
    (folder / "qrels.txt").write_text("".join(f"{q} 0 {docno} {label}\n" for q, docno, label in source.qrels.values))
    return f"longdoc:folder:{folder}"


def test_the_command_takes_other_passages(tmp_path, backbone, capsys):
    sizes = ["--queries", "6", "--test-queries", "4", "--dev-queries", "2", "--depth", "4", "--device", "cpu"]
    models = ["--models", "random", "BM25", "--backbone", backbone, "--dtype", "float32", *sizes]
    out = str(tmp_path / "out")
    assert main(["replicate", out, "--passages", write_folder(tmp_path / "one", passages()), *models]) == 0
    assert len(read_outcomes(out)) == 6 * 4
    settings = json.loads((tmp_path / "out" / "settings.json").read_text())["replication"]
    assert settings["passages"].startswith("80 passages, 40 topics, ")
    other = write_folder(tmp_path / "other", passages(filler=39))
    with pytest.raises(ValueError, match=r"holds a replication with other passages \(80 passages, 40 topics"):
        main(["replicate", out, "--passages", other, *models])


def test_passages_of_a_dataset_are_its_first(tmp_path):
    found = passages_of(write_folder(tmp_path / "source", passages(topics=5, filler=20)), topics=3, filler=4)
    # Those of the topics that are left out are passages like any other.
    assert [row["docno"] for row in found.corpus] == [f"p{number}" for number in range(7)]
    assert found.topics["qid"].tolist() == ["q0", "q1", "q2"]
    assert found.qrels.values.tolist() == [["q0", "p0", 1], ["q1", "p1", 1], ["q2", "p2", 1]]


@pytest.mark.parametrize("docno", [str, int])
def test_passages_may_have_numbers_for_names_and_must_have_texts(monkeypatch, docno):
    asked = pd.DataFrame({"qid": ["q"], "query": ["what"]})
    relevant = pd.DataFrame({"qid": ["q"], "docno": ["3"]})
    rows = [{"docno": docno(number), "text": f"passage {number}"} for number in range(5)]
    monkeypatch.setattr("tests.benchmarks.replication.miniature.read_source", lambda *args: (rows, asked, relevant))
    assert [row["docno"] for row in passages_of("name", filler=1).corpus] == ["0", "3"]
    rows[1] = {"docno": docno(1), "body": "passage 1"}
    with pytest.raises(ValueError, match=r"document '?1'? has no text in 'text'"):
        passages_of("name")


# Kills.


def _train(folder, backbone) -> None:
    replication = Replication(
        folder,
        Miniature(passages(), SIZES, tokenizer=tiny.tokenizer()),
        backbone=backbone,
        device="cpu",
        dtype="float32",
    )
    replicate(replication, jobs_of(["core"], [0], ["MaxP"]), tell=lambda line: None)


@pytest.mark.bytes
@pytest.mark.slow
def test_killed_at_any_moment_it_ends_the_same(tmp_path, backbone):
    _train(tmp_path / "whole", backbone)
    folder = tmp_path / "killed"
    for delay in (0.2, 0.5, 1.0, 1.5):
        child = processes.start(partial(_train, folder, backbone))
        time.sleep(delay)
        processes.kill(child)
        processes.wait(child)
    _train(folder, backbone)
    next((folder / "outcomes").iterdir()).with_name(".other.csv.gz.1.part").write_bytes(b"\x1f\x8b half")
    pd.testing.assert_frame_equal(read_outcomes(folder), read_outcomes(tmp_path / "whole"))


@pytest.mark.bytes
@pytest.mark.slow
def test_two_processes_share_the_jobs(tmp_path, backbone):
    children = [processes.start(partial(_train, tmp_path, backbone)) for _ in range(2)]
    assert [processes.wait(child) for child in children] == [0, 0]
    assert len(read_outcomes(tmp_path)) == len(jobs_of(["core"], [0], ["MaxP"])) * SIZES.test


def test_help_names_every_study(capsys):
    with pytest.raises(SystemExit):
        main(["replicate", "--help"])
    assert ", ".join(STUDIES) in " ".join(capsys.readouterr().out.split())
