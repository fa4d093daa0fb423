"""Saved models: what is in the folder, what comes back, and what is said about folders that are no model."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import huggingface_hub
import numpy as np
import pandas as pd
import pyterrier as pt
import pytest
import torch
from safetensors.torch import load_file, save_file

import pyterrier_longdoc as ld
from pyterrier_longdoc.rerankers.base import LongDocReranker

from ..support import tiny
from ..support.systems import CROSS_ENCODERS, SLIDING, make

pytestmark = [
    pytest.mark.filterwarnings("ignore::pyterrier_longdoc.rerankers.base.UntrainedWarning"),
    pytest.mark.filterwarnings("ignore::pyterrier_longdoc.common.frames.TruncationWarning"),
]

QRELS = pd.DataFrame({"qid": ["1", "2"], "docno": ["d2", "d1"], "label": [1, 1]})
FILES = {"config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json", "pt_meta.json", "README.md"}


def scores(transformer, frame) -> np.ndarray:
    return transformer(frame)["score"].to_numpy()


@pytest.fixture(scope="session")
def _saved(cross_encoder, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("saved")
    ld.MaxP(cross_encoder, training=ld.TrainingArgs(margin=0.5), **SLIDING).fit(tiny.results(), QRELS).save(folder)
    return folder


@pytest.fixture
def saved(_saved, tmp_path) -> Path:
    """A folder with a trained MaxP, which a test may damage."""
    return Path(shutil.copytree(_saved, tmp_path / "saved"))


def edit(folder: Path, **changes) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


# What comes back.


@pytest.mark.parametrize("name", CROSS_ENCODERS)
def test_round_trip(name, cross_encoder, results, tmp_path):
    model = make(name, cross_encoder, seed=7, training=ld.TrainingArgs(learning_rates={"": 1e-2}))
    model.fit(results, QRELS).save(tmp_path / "new" / "folder")
    expected = scores(model, results)
    for cls in (type(model), ld.LongDocReranker):
        restored = cls.load(tmp_path / "new" / "folder")
        assert type(restored) is type(model)
        np.testing.assert_array_equal(scores(restored, results), expected)
        assert repr(restored) == repr(pt.inspect.transformer_apply_attributes(model, training=None))
        pd.testing.assert_frame_equal(restored.history, model.history)
    state = model.load_scorer().state_dict()
    for key, value in restored.load_scorer().state_dict().items():
        assert torch.equal(value, state[key]), key


@pytest.mark.parametrize(
    "arguments",
    [
        {"windows": ld.SlidingWords(12, 6, max_windows=3, selection="first_last_random")},
        {"windows": ld.SentenceWindows(max_tokens=30)},
        {"windows": ld.GreedyChunks(20)},
        {"windows": ld.Truncate()},
        {"window_size": 20, "stride": 10, "text_field": ("title", "text")},
        {"window_size": 20, "stride": 10, "max_windows": 2, "selection": "first_last_random", "seed": 3},
        {"window_size": 20, "stride": 10, "max_doc_len": 30, "max_query_len": 5, "pad_query": True},
    ],
    ids=str,
)
def test_round_trip_of_arguments(arguments, cross_encoder, results, tmp_path):
    results = results.assign(title=["snow", None, "", "a", "b"])
    model = ld.MaxP(cross_encoder, **arguments)
    expected = scores(model, results)
    model.save(tmp_path)
    restored = ld.MaxP.load(tmp_path)
    np.testing.assert_array_equal(scores(restored, results), expected)
    assert restored.windows == model.windows


def test_numbers_of_numpy_are_saved(cross_encoder, results, tmp_path):
    model = make("KMaxP", cross_encoder, k=np.int64(2), weights=np.array([1.0, 0.5]))
    expected = scores(model, results)
    model.save(tmp_path)
    np.testing.assert_array_equal(scores(ld.KMaxP.load(tmp_path), results), expected)


def test_backbone_may_be_a_path(cross_encoder, results, tmp_path):
    model = make("MaxP", Path(cross_encoder))
    expected = scores(model, results)
    model.save(tmp_path)
    restored = ld.MaxP.load(tmp_path)
    np.testing.assert_array_equal(scores(restored, results), expected)
    assert repr(restored) == repr(model) == repr(make("MaxP", cross_encoder))


@pytest.mark.parametrize("family", tiny.FAMILIES)
@pytest.mark.parametrize("labels", [1, 2, None])
def test_round_trip_of_backbones(family, labels, results, tmp_path):
    backbone = tiny.checkpoint(tmp_path / "backbone", family, labels=labels)
    model = make("PARADE-attn", backbone)
    expected = scores(model, results)
    model.save(tmp_path / "saved")
    shutil.rmtree(tmp_path / "backbone")  # the folder is all that is needed
    np.testing.assert_allclose(scores(ld.PARADE.load(tmp_path / "saved"), results), expected, atol=1e-6)


def test_untrained_models_stay_untrained(plain_encoder, results, tmp_path):
    make("MaxP", plain_encoder).save(tmp_path)
    with pytest.warns(ld.UntrainedWarning):
        ld.MaxP.load(tmp_path)(results)


def test_saving_again_and_training_on(saved, results, tmp_path):
    model = ld.MaxP.load(saved)
    model.save(tmp_path / "again")
    for name in ("config.json", "model.safetensors", "tokenizer.json"):
        assert (tmp_path / "again" / name).read_bytes() == (saved / name).read_bytes()
    model.fit(results, QRELS)
    assert model.history["epoch"].tolist() == [1, 2]
    assert not np.array_equal(scores(model, results), scores(ld.MaxP.load(saved), results))


def test_arguments_may_be_changed(saved, results):
    model = ld.MaxP.load(saved, window_size=12, stride=6, batch_size=3, explain=True)
    assert (model.window_size, model.batch_size) == (12, 3)
    assert model(results)["window_spans"].map(len).max() > 10
    with pytest.raises(ValueError, match="holds trained weights, and a change of backbone"):
        ld.MaxP.load(saved, backbone="another/model")(results)
    with pytest.raises(TypeError, match="no_such_argument"):
        ld.MaxP.load(saved, no_such_argument=1)


@pytest.mark.slow
def test_any_class_is_found_in_a_new_process(saved, results):
    results.to_json(saved / "results.json", orient="records")
    code = (
        "import sys, pandas as pd, pyterrier as pt, pyterrier_longdoc as ld; "
        "frame = pd.read_json(sys.argv[1] + '/results.json', dtype={'qid': str}); "
        "print(type(ld.LongDocReranker.load(sys.argv[1])).__name__); "
        "print(pt.Artifact.load(sys.argv[1])(frame)['score'].tolist())"
    )
    command = [sys.executable, "-W", "ignore", "-c", code, str(saved)]
    name, values = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()[-2:]
    assert name == "MaxP"
    np.testing.assert_allclose(json.loads(values), scores(ld.MaxP.load(saved), results), atol=1e-5)


# What is in the folder.


def test_files(saved):
    names = {path.name for path in saved.iterdir()}
    assert FILES | {"training.json"} <= names
    assert not [name for name in names if name.endswith((".bin", ".pt", ".pkl", ".pickle", ".py"))]


def test_config_and_training(saved, cross_encoder):
    config = json.loads((saved / "config.json").read_text())
    assert (config["format"], config["format_version"], config["class"]) == ("pyterrier_longdoc", 1, "MaxP")
    assert config["parameters"]["window_size"] == 20
    assert not {"device", "verbose", "text_loader", "trust_remote_code"} & set(config["parameters"])
    training = json.loads((saved / "training.json").read_text())
    assert training["args"]["margin"] == 0.5
    assert training["args"]["learning_rates"] == {"": 1e-4, "encoder.": 1e-5}
    assert [set(entry) for entry in training["history"]] == [
        {"epoch", "step", "loss", "learning_rate", "documents_per_second"}
    ]
    assert json.loads((saved / "pt_meta.json").read_text())["type"] == "longdoc_reranker"
    card = (saved / "README.md").read_text()
    assert card.startswith("---\nlibrary_name: pyterrier_longdoc\n")
    assert "ld.MaxP.load(" in card


def test_a_loaded_model_keeps_its_recipe(saved, tmp_path):
    ld.MaxP.load(saved).save(tmp_path / "again")
    assert (tmp_path / "again" / "training.json").read_text() == (saved / "training.json").read_text()


def test_no_training_file_without_training(cross_encoder, tmp_path):
    make("MaxP", cross_encoder).save(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} >= FILES
    assert not (tmp_path / "training.json").exists()


def test_no_paths_but_the_backbone(cross_encoder, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    monkeypatch.chdir(Path(cross_encoder).parent)
    model = make("MaxP", Path(cross_encoder).name)
    model.save(tmp_path)
    absolute = tmp_path / "absolute"
    make("MaxP", cross_encoder).save(absolute)
    mentions = {path.name: path.read_bytes().count(cross_encoder.encode()) for path in absolute.iterdir()}
    assert {name: count for name, count in mentions.items() if count} == {"config.json": 1, "README.md": 2}
    for path in filter(Path.is_file, tmp_path.iterdir()):
        content = path.read_bytes()
        for private in (str(tmp_path), str(Path(cross_encoder).parent), str(Path.home()) + "/", "hf_secret"):
            assert private.encode() not in content, path.name


def test_remote_code_is_not_saved(cross_encoder, tmp_path):
    with pytest.raises(ValueError, match="remote code cannot be saved"):
        make("MaxP", cross_encoder, trust_remote_code=True).save(tmp_path)


# Folders that are no model.


def test_wrong_class(saved):
    with pytest.raises(ValueError, match=r"holds a MaxP, not a FirstP: use MaxP\.load"):
        ld.FirstP.load(saved)
    with pytest.raises(ValueError, match=r"holds a MaxP, not a KMaxP"):
        ld.KMaxP.load(saved)


def test_training_of_an_earlier_model_does_not_stay(cross_encoder, saved):
    assert len(ld.MaxP.load(saved).history) == 1
    make("MaxP", cross_encoder).save(saved)
    assert ld.MaxP.load(saved).history.empty


class OwnMaxP(ld.MaxP):
    """What a user writes to give MaxP other defaults."""


@pytest.mark.parametrize("failing", ["weights", "tokenizer"])
def test_full_disk_leaves_the_model_that_was_saved_before(failing, saved, tmp_path, monkeypatch):
    before = {path.name: path.read_bytes() for path in saved.iterdir()}
    # With another tokenizer, so that a new one beside the old weights would show.
    other = ld.MaxP(tiny.checkpoint(tmp_path / "roberta", "roberta"), **SLIDING)
    scorer = other.load_scorer()

    def half_written(path: Path) -> None:
        Path(path).write_bytes(b"half")
        raise OSError("No space left on device")

    if failing == "weights":
        monkeypatch.setattr(
            "pyterrier_longdoc.modelling.checkpoint.save_file", lambda _, path, **__: half_written(path)
        )
    else:
        monkeypatch.setattr(
            type(scorer.tokenizer), "save_pretrained", lambda _, path: half_written(Path(path) / "tokenizer.json")
        )
    with pytest.raises(OSError, match="No space left"):
        other.save(saved)
    assert {path.name: path.read_bytes() for path in saved.iterdir()} == before


def test_subclasses(cross_encoder, tmp_path):
    make("KMaxP", cross_encoder).save(tmp_path / "kmaxp")
    with pytest.raises(ValueError, match=r"holds a KMaxP, not a MaxP: use KMaxP\.load"):
        ld.MaxP.load(tmp_path / "kmaxp")  # that a KMaxP is written as a MaxP with another head is no matter of users
    assert type(LongDocReranker.load(tmp_path / "kmaxp")) is ld.KMaxP
    own = OwnMaxP(cross_encoder, window_size=20, stride=10, max_query_len=8)
    own.save(tmp_path / "own")
    assert type(ld.MaxP.load(tmp_path / "own")) is OwnMaxP
    with pytest.raises(ValueError, match="holds a OwnMaxP, not a KMaxP"):
        ld.KMaxP.load(tmp_path / "own")


def test_no_such_place(tmp_path):
    with pytest.raises(ValueError, match="neither a folder nor the id of a model"):
        ld.MaxP.load(tmp_path / "nothing")
    with pytest.raises(ValueError, match="'models/maxp' is no folder, and the hub does not give such a model"):
        ld.MaxP.load("models/maxp")
    with pytest.raises(ValueError, match=r"has no config\.json"):
        ld.MaxP.load(tmp_path)
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match="neither a folder nor"):
        ld.MaxP.load(tmp_path / "file")


def test_checkpoint_of_another_kind(cross_encoder, saved, results):
    with pytest.raises(ValueError, match=r"no model saved by this package.*give it as the backbone"):
        ld.MaxP.load(cross_encoder)
    with pytest.raises(ValueError, match="restore it with its class's load"):
        ld.MaxP(str(saved))(results)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "cannot be read as JSON"),
        ("", "cannot be read as JSON"),
        ("[]", "no model saved by this package"),
        ('{"format": "other"}', "no model saved by this package"),
        ('{"format": "pyterrier_longdoc"}', "lacks class, encoder, format_version, head, parameters, reading, windows"),
    ],
)
def test_damaged_config(saved, content, message):
    (saved / "config.json").write_text(content)
    with pytest.raises(ValueError, match=message):
        ld.MaxP.load(saved)


def test_newer_format_and_unknown_names(saved):
    edit(saved, format_version=2)
    with pytest.raises(ValueError, match=r"saved in format 2.*up to 1: update pyterrier_longdoc"):
        ld.MaxP.load(saved)
    edit(saved, format_version=1, **{"class": "LongestP"})
    with pytest.raises(
        ValueError, match=r"holds a 'LongestP'; known are AvgP, Birch, CEDR, FirstP, KMaxP, .*LongP, .*MaxP"
    ):
        ld.LongDocReranker.load(saved)
    edit(saved, **{"class": "MaxP"}, head={"name": "minp", "options": {}, "ready": True})
    with pytest.raises(ValueError, match="unknown head 'minp'"):
        ld.MaxP.load(saved)
    edit(saved, head={"name": "maxp", "options": {}, "ready": True}, windows={"type": "os.system"})
    with pytest.raises(ValueError, match=r"unknown windows 'os.system'"):
        ld.MaxP.load(saved)


def test_damaged_weights(saved):
    path = saved / "model.safetensors"
    whole, tensors = path.read_bytes(), load_file(path)
    name = "head.final.weight"
    for state, what in (
        ({key: value for key, value in tensors.items() if key != name}, name),
        ({**tensors, name: torch.zeros(1, 31)}, "size mismatch"),
        ({**tensors, "extra": torch.zeros(1)}, "extra"),
    ):
        save_file(state, path)
        with pytest.raises(ValueError, match=rf"do not fit config\.json(.|\n)*{what}"):
            ld.MaxP.load(saved)
    for content in (whole[: len(whole) // 2], whole[:4], b""):
        path.write_bytes(content)
        with pytest.raises(ValueError, match=r"weights in .*model\.safetensors"):
            ld.MaxP.load(saved)
    path.unlink()
    with pytest.raises(ValueError, match=r"has no model\.safetensors: the model was not saved completely"):
        ld.MaxP.load(saved)


@pytest.mark.parametrize("damage", ["missing", "{", "{}"])
def test_damaged_tokenizer(saved, damage):
    if damage == "missing":
        for name in ("tokenizer.json", "tokenizer_config.json"):
            (saved / name).unlink()
    else:
        (saved / "tokenizer.json").write_text(damage)
    with pytest.raises(ValueError, match=r"the tokenizer in .* cannot be loaded"):
        ld.MaxP.load(saved)


# Artifacts and the hub.


def test_artifact(saved, results):
    artifact = pt.Artifact.load(str(saved))
    assert isinstance(artifact, ld.LongDocArtifact)
    np.testing.assert_array_equal(scores(artifact, results), scores(ld.MaxP.load(saved), results))
    assert isinstance(artifact.reranker(), ld.MaxP)
    assert artifact.reranker(batch_size=2).batch_size == 2
    assert repr(artifact) == f"LongDocArtifact({str(saved)!r})"
    assert set(pt.inspect.transformer_inputs(artifact)[0]) == {"qid", "query", "docno", "text"}


class FakeHub:
    """Stands in for `huggingface_hub.HfApi`."""

    def __init__(self, store: Path) -> None:
        self.store = store
        self.created: list[tuple[str, bool]] = []

    def create_repo(self, repo_id, *, private, exist_ok):
        assert exist_ok
        self.created.append((repo_id, private))

    def upload_folder(self, *, repo_id, folder_path, commit_message):
        shutil.copytree(folder_path, self.store / repo_id)
        return f"https://hub/{repo_id}/commit/{commit_message}"


def test_hub(saved, results, tmp_path, monkeypatch):
    hub = FakeHub(tmp_path / "hub")
    monkeypatch.setattr(huggingface_hub, "HfApi", lambda: hub)
    address = ld.MaxP.load(saved).push_to_hub("me/maxp", private=True, commit_message="first")
    assert address == "https://hub/me/maxp/commit/first"
    assert hub.created == [("me/maxp", True)]
    assert {path.name for path in (hub.store / "me/maxp").iterdir()} >= FILES

    asked = []

    def snapshot_download(name, *, revision, allow_patterns):
        asked.append((name, revision))
        patterns = [pattern.lstrip("*") for pattern in allow_patterns]
        assert all(any(file.endswith(p) for p in patterns) for file in FILES)
        return str(hub.store / name)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    restored = ld.LongDocReranker.load("me/maxp", revision="v1")
    assert asked == [("me/maxp", "v1")]
    np.testing.assert_array_equal(scores(restored, results), scores(ld.MaxP.load(saved), results))


def test_nothing_is_created_on_the_hub_if_saving_fails(cross_encoder, tmp_path, monkeypatch):
    hub = FakeHub(tmp_path)
    monkeypatch.setattr(huggingface_hub, "HfApi", lambda: hub)
    with pytest.raises(ValueError, match="cannot be saved"):
        make("MaxP", cross_encoder, trust_remote_code=True).push_to_hub("me/maxp")
    assert not hub.created
