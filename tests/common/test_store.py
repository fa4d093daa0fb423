"""Values on disk: what was stored stays, whoever writes and however it ends."""

from __future__ import annotations

import pickle
import sqlite3
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from pyterrier_longdoc.common.store import Store

from ..support import processes


@pytest.fixture
def path(tmp_path):
    return tmp_path / "new folder" / "values.sqlite"


def test_values_are_restored_exactly(path):
    store = Store(path)
    assert (len(store), store.get_many(["a"])) == (0, {})
    assert not path.parent.exists()
    items = {"a": {"text": "é \ud83d \x00", "n": None}, b"\x00\xff": [0.1 + 0.2, 1e-320, 3], "c": "[2] > [1]"}
    store.put_many(items)
    store.put_many({"a": "another", "d": 1.5})
    again = pickle.loads(pickle.dumps(store))
    assert again.get_many([*items, "d", "absent"]) == {**items, "d": 1.5}
    assert len(again) == 4


def test_more_values_than_sqlite_takes_in_a_query_are_found(path):
    many = {f"{number}": number for number in range(2000)}
    Store(path).put_many(many)
    assert Store(path).get_many(many) == many


def test_a_relative_path_is_resolved_when_it_is_given(tmp_path, monkeypatch):
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    store = Store("values.sqlite")
    monkeypatch.chdir("elsewhere")
    store.put_many({"a": 1})
    assert Store(tmp_path / "values.sqlite").get_many(["a"]) == {"a": 1}


def test_reading_does_not_change_the_file(path):
    Store(path).put_many({"a": 1})
    before = path.read_bytes()
    assert Store(path).get_many(["a", "b"]) == {"a": 1}
    assert path.read_bytes() == before
    assert [file.name for file in path.parent.iterdir()] == [path.name]


def test_a_failed_write_stores_nothing(path):
    with pytest.raises(TypeError):
        Store(path).put_many({"a": 1, "b": object()})
    assert len(Store(path)) == 0


def test_processes_and_threads_write_at_the_same_time(path):
    def write(process: int) -> None:
        store = Store(path)  # nobody has made it before
        with ThreadPoolExecutor(4) as pool:
            list(pool.map(lambda n: store.put_many({f"{n}": n, f"{process} {n}": n}), range(20)))

    children = [processes.start(lambda process=process: write(process)) for process in range(3)]
    assert [processes.wait(child) for child in children] == [0] * 3
    assert len(Store(path)) == 20 + 3 * 20


def test_values_stored_before_a_kill_are_kept(path):
    def write() -> None:
        for number in range(10**6):
            Store(path).put_many({f"{number} {part}": number for part in range(3)})

    child = processes.start(write)
    while len(Store(path)) < 30:
        time.sleep(0.005)
    processes.kill(child)
    assert processes.wait(child) < 0
    assert len(Store(path)) % 3 == 0
    Store(path).put_many({"after": 1})
    assert Store(path).get_many(["0 0", "9 2", "after"]) == {"0 0": 0, "9 2": 9, "after": 1}


def test_files_that_are_not_a_store_are_refused(tmp_path):
    text, other = tmp_path / "notes.txt", tmp_path / "other.sqlite"
    text.write_text("This is no database. " * 100)
    with sqlite3.connect(other) as connection:
        connection.execute("CREATE TABLE store (x TEXT)")
    for file in (text, other, tmp_path):
        with pytest.raises(ValueError, match=file.name):
            Store(file).get_many(["a"])
