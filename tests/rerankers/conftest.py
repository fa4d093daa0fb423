from __future__ import annotations

import shutil
import sys
import threading
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace

import huggingface_hub
import pyterrier as pt
import pytest
from huggingface_hub.utils import filter_repo_objects

from ..support.systems import CONTRACT, REPRESENTATIVE, SYSTEMS, make, slow_but


@pytest.fixture(params=slow_but(REPRESENTATIVE, CONTRACT))
def name(request) -> str:
    return request.param


@pytest.fixture
def fresh(name):
    """A new transformer that has loaded nothing yet."""
    return make(name)


@pytest.fixture(scope="session")
def all_loaded():
    return {name: make(name) for name in SYSTEMS}


@pytest.fixture
def loaded(name, all_loaded):
    """A transformer shared between tests, which must not change it."""
    return all_loaded[name]


@pytest.fixture
def nothing_loads(monkeypatch):
    """Loading a backbone is an error."""

    def refuse(*_, **__):
        raise AssertionError("a backbone was loaded")

    for module_name, module in list(sys.modules.items()):
        if module_name.startswith("pyterrier_longdoc.") and hasattr(module, "load_backbone"):
            monkeypatch.setattr(module, "load_backbone", refuse)


@pytest.fixture
def loopback(tmp_path, monkeypatch):
    """A hub on this machine: uploads go to its folder, which a server gives out as the hub does."""
    store = tmp_path / "hub"
    store.mkdir()
    handler = partial(SimpleHTTPRequestHandler, directory=str(store))
    monkeypatch.setattr(SimpleHTTPRequestHandler, "log_message", lambda *_: None)
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    made = []

    def folder(repo_id, repo_type="model"):
        return store / {"dataset": "datasets"}.get(repo_type, "") / repo_id / "resolve" / "main"

    def upload_folder(
        *, repo_id, folder_path, repo_type="model", revision="main", commit_message="", delete_patterns=()
    ):
        there = folder(repo_id, repo_type)
        names = [path.relative_to(there).as_posix() for path in there.rglob("*") if path.is_file()]
        for name in filter_repo_objects(names, allow_patterns=list(delete_patterns)):
            (there / name).unlink()
        shutil.copytree(folder_path, folder(repo_id, repo_type), dirs_exist_ok=True)
        return f"https://hub/{repo_id}"

    def create_repo(repo_id, *, repo_type="model", private=None, exist_ok=False):
        made.append((repo_type, repo_id, private))

    def file_exists(repo_id, filename, *, repo_type="model", revision="main"):
        return (folder(repo_id, repo_type) / filename).is_file()

    here = f"http://127.0.0.1:{server.server_address[1]}"
    hub = SimpleNamespace(
        create_repo=create_repo,
        file_exists=file_exists,
        upload_folder=upload_folder,
        made=made,
        url=here,
        store=store,
        folder=folder,
    )
    monkeypatch.setattr(huggingface_hub, "HfApi", lambda: hub)
    monkeypatch.setattr(huggingface_hub, "create_repo", create_repo)
    monkeypatch.setattr(huggingface_hub, "create_branch", lambda *_, **__: None)
    monkeypatch.setattr(huggingface_hub, "upload_folder", upload_folder)

    def resolve(parsed):
        return f"{here}/datasets/{parsed.path}/resolve/main/artifact.tar.lz4"

    monkeypatch.setattr("pyterrier._artifact._hf_url_resolver", resolve)
    monkeypatch.setenv("PYTERRIER_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(pt.io, "pyterrier_home", lambda: str(tmp_path / "home"))
    yield hub
    server.shutdown()
    server.server_close()
