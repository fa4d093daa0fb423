"""Saved models as PyTerrier artifacts and on the Hugging Face hub."""

from __future__ import annotations

import shutil
from pathlib import Path

import huggingface_hub
import numpy as np
import pyterrier as pt
import pytest

import pyterrier_longdoc as ld
from pyterrier_longdoc.modelling.preselection import preselection_from_config
from pyterrier_longdoc.rerankers.artifact import LongDocArtifact

from ..support.systems import QUIET, make, scores

pytestmark = QUIET


@pytest.fixture
def saved(tmp_path) -> Path:
    make("MaxP").save(tmp_path / "saved")
    return tmp_path / "saved"


def test_artifact(saved, results):
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
    with pytest.raises(ValueError, match="cannot be saved"):
        make("MaxP", trust_remote_code=True).push_to_hub("me/maxp")
    assert not hub.created  # nothing is made if saving fails
    address = ld.MaxP.load(saved).push_to_hub("me/maxp", private=True, commit_message="first")
    assert address == "https://hub/me/maxp/commit/first"
    assert hub.created == [("me/maxp", True)]
    files = {path.name for path in (hub.store / "me/maxp").iterdir()}
    assert files == {path.name for path in saved.iterdir()}

    asked = []

    def snapshot_download(name, *, revision, allow_patterns):
        asked.append((name, revision))
        patterns = tuple(pattern.lstrip("*") for pattern in allow_patterns)
        assert all(file.endswith(patterns) for file in files)
        return str(hub.store / name)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    restored = ld.LongDocReranker.load("me/maxp", revision="v1")
    assert asked == [("me/maxp", "v1")]
    np.testing.assert_array_equal(scores(restored, results), scores(ld.MaxP.load(saved), results))
