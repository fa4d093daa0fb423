"""What loading does where the hub cannot be asked: one try, the copy in the cache, or a message with a way out."""

from __future__ import annotations

import http.server
import shutil
import socket
import threading
from pathlib import Path

import huggingface_hub
import pytest
import transformers

import pyterrier_longdoc as ld
from pyterrier_longdoc.common.hub import find_file, reachable
from pyterrier_longdoc.common.language import named_tokenizer
from pyterrier_longdoc.common.packaged import packaged_models
from pyterrier_longdoc.listwise import HuggingFaceBackend

from ..support import tiny, tiny_long

NAME = "someone/cross-encoder"


def set_address(monkeypatch, address: str) -> None:
    template = address + "/{repo_id}/resolve/{revision}/{filename}"
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", address)
    monkeypatch.setattr(huggingface_hub.constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
    # A copy that is read before huggingface_hub 1.0.
    monkeypatch.setattr(huggingface_hub.file_download, "HUGGINGFACE_CO_URL_TEMPLATE", template, raising=False)


def set_offline(monkeypatch, offline: bool) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", offline)
    # Transformers 4 remembers it by itself, and so does a session before huggingface_hub 1.0.
    monkeypatch.setattr(transformers.utils.hub, "_is_offline_mode", offline, raising=False)
    getattr(huggingface_hub.utils, "reset_sessions", lambda: None)()


class Hub(http.server.BaseHTTPRequestHandler):
    """Has one model, or answers everything with a status; of some files it does not tell whether it has them."""

    folder: Path
    status: int | None
    asked: list[str]
    silent: tuple[str, ...]

    def do_GET(self) -> None:
        self.asked.append(self.path)
        file = self.folder / self.path.rpartition("/")[2]
        status = 503 if file.name in self.silent else self.status
        found = status is None and file.is_file()
        body = file.read_bytes() if found else b"{}"
        self.send_response(status or (200 if found else 404))
        error = {None: "EntryNotFound", 401: "GatedRepo", 404: "RepoNotFound"}.get(status, "")
        named = {"ETag": f'"{len(body)}"'} if found else {"X-Error-Code": error}
        for name, value in ({"X-Repo-Commit": "a" * 40, "Content-Length": str(len(body))} | named).items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    do_HEAD = do_GET  # noqa: N815

    def log_message(self, *args) -> None:
        pass


@pytest.fixture
def answering(monkeypatch, tmp_path, cross_encoder):
    """Starts a hub that has the tiny cross-encoder, or gives one answer; returns what it is asked."""
    set_offline(monkeypatch, False)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    # Transformers 4 has a copy.
    monkeypatch.setattr(transformers.utils.hub, "TRANSFORMERS_CACHE", str(tmp_path / "cache"), raising=False)
    # The pauses between the tries of the hub's own client.
    monkeypatch.setattr("time.sleep", lambda seconds: None)
    servers: list[http.server.ThreadingHTTPServer] = []

    def start(status: int | None = None, *, folder: str = cross_encoder, silent: tuple[str, ...] = ()) -> list[str]:
        told = {"folder": Path(folder), "status": status, "asked": [], "silent": silent}
        handler = type("Handler", (Hub,), told)
        servers.append(http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler))
        threading.Thread(target=servers[-1].serve_forever, daemon=True).start()
        set_address(monkeypatch, f"http://127.0.0.1:{servers[-1].server_port}")
        return handler.asked

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


def put_into_cache(folder: str | Path) -> None:
    commit = "c" * 40
    copy = Path(huggingface_hub.constants.HF_HUB_CACHE) / f"models--{NAME.replace('/', '--')}"
    (copy / "refs").mkdir(parents=True)
    (copy / "refs" / "main").write_text(commit)
    shutil.copytree(folder, copy / "snapshots" / commit)


SMALL = {"window_size": 20, "stride": 10, "max_query_len": 8, "device": "cpu"}
LOADS = {
    "PARADE": lambda name, results: ld.PARADE(name).transform(results),
    "BiEncoder": lambda name, results: ld.BiEncoder(name).transform(results),
    "language model": lambda name, results: HuggingFaceBackend(name, device="cpu")([{"role": "user", "content": "x"}]),
    "saved model": lambda name, results: ld.PARADE.load(name),
}


@pytest.mark.parametrize("load", LOADS.values(), ids=LOADS)
def test_without_a_connection_the_error_names_model_and_fix(answering, monkeypatch, load, results):
    answering()
    with socket.create_server(("127.0.0.1", 0)) as closed:
        set_address(monkeypatch, f"http://127.0.0.1:{closed.getsockname()[1]}")
    with pytest.raises(OSError, match="not reachable") as caught:
        load(NAME, results)
    assert (caught.value.__cause__, caught.value.__suppress_context__) == (None, True)
    for named in (repr(NAME), f"hf download {NAME}", "'longdoc:minilm-l6'", "CrossEncoder.load", *packaged_models()):
        assert named in str(caught.value)


@pytest.mark.parametrize("load", [LOADS["PARADE"], LOADS["BiEncoder"], LOADS["language model"]], ids=list(LOADS)[:3])
def test_a_hub_that_fails_is_asked_once(answering, load, results):
    asked = answering(503)
    with pytest.raises(OSError, match=rf"(?s)503.*hf download {NAME}"):
        load(NAME, results)
    assert len(asked) == 1


def test_a_tokenizer_on_a_hub_that_fails_is_named(answering):
    asked = answering(503)
    with pytest.raises(ValueError, match=rf"(?s)tokenizer='{NAME}'.*hf download {NAME}"):
        named_tokenizer(NAME)
    assert len(asked) == 1


@pytest.mark.parametrize(("status", "message"), [(401, "gated repo"), (404, "not a valid model identifier")])
def test_an_error_about_a_model_is_reported(answering, results, status, message):
    answering(status)
    with pytest.raises(OSError, match=message) as caught:
        ld.MaxP(NAME, **SMALL).transform(results)
    assert NAME in str(caught.value)


@pytest.mark.parametrize("load", [ld.PARADE, ld.BiEncoder], ids=lambda model: model.__name__)
def test_a_cached_tokenizer_does_not_count_as_a_cached_model(answering, load, cross_encoder, results):
    answering(503)
    put_into_cache(cross_encoder)
    for file in Path(huggingface_hub.constants.HF_HUB_CACHE).rglob("model.safetensors"):
        file.unlink()
    assert named_tokenizer.__wrapped__(NAME) is not None
    with pytest.raises(OSError, match=NAME):
        load(NAME).transform(results)


def test_offline_mode_and_folders_cause_no_requests(answering, monkeypatch, cross_encoder):
    asked = answering()
    assert reachable(cross_encoder) == cross_encoder
    set_offline(monkeypatch, True)
    with pytest.raises(OSError, match="offline mode"):
        reachable(NAME)
    assert not asked


@pytest.mark.parametrize("status", [401, 429, 503])
@pytest.mark.parametrize("model", [ld.MaxP, ld.BiEncoder], ids=lambda model: model.__name__)
def test_a_cached_copy_is_used_if_the_hub_fails(answering, model, status, cross_encoder, results):
    """Also if files that are optional were never asked for, as after `hf download` or a copy from another machine."""
    put_into_cache(cross_encoder)
    asked = answering(status)
    scores = model(NAME, **SMALL).transform(results)["score"].tolist()
    assert len(set(asked)) == 1, asked  # again, where the hub's own client tries again
    assert scores == pytest.approx(model(cross_encoder, **SMALL).transform(results)["score"].tolist(), rel=1e-5)


@pytest.mark.parametrize("load", [ld.MaxP, ld.BiEncoder], ids=lambda model: model.__name__)
def test_a_hub_that_fails_during_loading_raises_an_error(answering, load, results):
    """Only files that do not exist are absent: without modules.json a cross-encoder would be a plain encoder."""
    asked = answering(silent=("modules.json",))
    with pytest.raises(OSError, match=rf"'{NAME}'.*modules\.json.*503") as caught:
        load(NAME, **SMALL).transform(results)
    assert (caught.value.__cause__, caught.value.__suppress_context__) == (None, True)
    assert any("modules.json" in path for path in asked)


def test_a_failed_request_for_a_tokenizer_does_not_mean_that_there_is_none(answering, tmp_path):
    """MosaicBERT was published without one, to be used with that of BERT."""
    folder = tiny_long.published(tmp_path, "mosaic", labels=1)
    answering(folder=folder, silent=("tokenizer.json", "tokenizer_config.json", "vocab.txt"))
    with pytest.raises(OSError, match=r"contains tokenizer\.json"):
        ld.FirstP(NAME, device="cpu")(tiny.frame(["a"], ["b"]))


def test_cached_files_are_found_if_the_hub_fails(answering, cross_encoder, monkeypatch):
    answering()
    assert find_file(NAME, "modules.json") is None
    path = find_file(NAME, "config.json")
    assert path is not None
    answering(silent=("config.json", "modules.json"))
    assert find_file(NAME, "config.json") == path
    set_offline(monkeypatch, True)
    copy = reachable(NAME, weights=False)
    assert find_file(copy, "config.json") == Path(copy, "config.json")
    assert find_file(copy, "modules.json") is None
    assert find_file(cross_encoder, "modules.json") is None


def test_a_missing_folder_is_named(tmp_path):
    for name in (tmp_path / "none", "./none"):
        for load in (lambda name: ld.MaxP.load(name), lambda name: ld.MaxP(name).model):
            with pytest.raises(FileNotFoundError, match=f"'{name}'"):
                load(name)


@pytest.mark.parametrize(
    "path", ["../evil.json", "1_Pooling/../../evil.json", "..\\evil.json", "/evil.json", "C:\\evil.json"]
)
def test_files_outside_of_a_checkpoint_are_refused(path, tmp_path):
    (tmp_path / "evil.json").write_text("{}")
    (tmp_path / "checkpoint").mkdir()
    with pytest.raises(ValueError, match="outside of the checkpoint"):
        find_file(str(tmp_path / "checkpoint"), path)
