"""What loading does where the hub cannot be asked: one try, the copy in the cache, or a message with a way out."""

from __future__ import annotations

import shutil
import socket
import threading
from contextlib import contextmanager
from pathlib import Path

import huggingface_hub
import pytest

import pyterrier_longdoc as ld
from pyterrier_longdoc.common.hub import reachable
from pyterrier_longdoc.common.packaged import packaged_models
from pyterrier_longdoc.listwise import HuggingFaceBackend

NAME = "someone/cross-encoder"


@contextmanager
def broken_server():
    """A server that hangs up on everyone; its address, and what was asked about the model so far."""
    asked: list[bytes] = []
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def hang_up() -> None:
            while True:
                try:
                    connection, _ = listening.accept()
                except OSError:
                    return
                with connection:
                    request = connection.recv(4096).partition(b"\r\n")[0]
                    asked.extend([request] if NAME.encode() in request else [])

        threading.Thread(target=hang_up, daemon=True).start()
        yield f"http://127.0.0.1:{listening.getsockname()[1]}", asked
        listening.shutdown(socket.SHUT_RDWR)


@pytest.fixture
def hub(monkeypatch, tmp_path):
    """A hub that cannot be asked, though nobody has said that there is none, and an empty cache."""
    constants = huggingface_hub.constants
    with broken_server() as (address, asked):
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
        monkeypatch.setattr(constants, "ENDPOINT", address)
        monkeypatch.setattr(
            constants, "HUGGINGFACE_CO_URL_TEMPLATE", address + "/{repo_id}/resolve/{revision}/{filename}"
        )
        # The pauses between the tries of the hub's own client.
        monkeypatch.setattr("time.sleep", lambda seconds: None)
        yield asked


def put_into_cache(folder: str | Path) -> None:
    commit = "c" * 40
    copy = Path(huggingface_hub.constants.HF_HUB_CACHE) / f"models--{NAME.replace('/', '--')}"
    (copy / "refs").mkdir(parents=True)
    (copy / "refs" / "main").write_text(commit)
    shutil.copytree(folder, copy / "snapshots" / commit)


@pytest.mark.parametrize("load", [ld.PARADE, ld.MORESPlus, ld.BiEncoder], ids=lambda model: model.__name__)
def test_the_hub_is_tried_once_and_the_error_names_the_model_and_a_way_out(hub, load, results):
    with pytest.raises(OSError, match="cannot be asked") as caught:
        load(NAME).transform(results)
    assert len(hub) == 1
    for named in (repr(NAME), f"hf download {NAME}", "'longdoc:minilm-l6'", "LongDocReranker.load", *packaged_models()):
        assert named in str(caught.value)


def test_a_language_model_too(hub):
    with pytest.raises(OSError, match=f"'{NAME}' is not on this machine"):
        HuggingFaceBackend(NAME, device="cpu")([{"role": "user", "content": "x"}])
    assert len(hub) == 1


def test_a_saved_model_too(hub, monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as closed:
        monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", f"http://127.0.0.1:{closed.getsockname()[1]}")
    with pytest.raises(ValueError, match=f"(?s)'{NAME}' is no folder.*longdoc:docstrings-parade-attn"):
        ld.PARADE.load(NAME)


def test_a_model_in_the_cache_is_loaded_without_the_hub(hub, cross_encoder, results):
    """Also if files that are optional were never asked for, as after `hf download` or a copy from another machine."""
    put_into_cache(cross_encoder)
    options = {"window_size": 20, "stride": 10, "max_query_len": 8, "device": "cpu"}
    for model in (ld.MaxP, ld.BiEncoder):
        hub.clear()
        scores = model(NAME, **options).transform(results)["score"].tolist()
        assert len(hub) == 1
        assert scores == model(cross_encoder, **options).transform(results)["score"].tolist()


def test_offline_mode_asks_nobody(hub, monkeypatch):
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(OSError, match="offline mode is enabled"):
        reachable(NAME)
    assert not hub


def test_a_folder_is_not_looked_for(hub, cross_encoder):
    assert reachable(cross_encoder) == cross_encoder
    assert not hub
