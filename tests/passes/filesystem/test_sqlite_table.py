"""Several at one file at the same moment, a full disk -> all rows of each of them, or an error that says what to do."""
from __future__ import annotations

import sqlite3
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from passes.errors import BadInput
from passes.filesystem.sqlite_table import SqliteFile, Unusable

TABLE = "CREATE TABLE IF NOT EXISTS t (number INTEGER PRIMARY KEY)"


def rows(path, number: int) -> list[int]:
    with SqliteFile(path, TABLE, 1, "cache", "delete it") as file:
        file.write("INSERT INTO t VALUES (?)", [(number,)])
        return [row for row, in file.read("SELECT number FROM t ORDER BY number", ())]


@pytest.mark.timeout(60)
@pytest.mark.parametrize("file", range(30))
def test_whoever_finds_another_at_work_waits(tmp_path, file):
    together, failed = threading.Barrier(6), []

    def write(number: int) -> None:
        together.wait()
        try:
            rows(tmp_path / "file.sqlite", number)
        except BadInput as error:
            failed.append(error)

    threads = [threading.Thread(target=write, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed and rows(tmp_path / "file.sqlite", 6) == [*range(7)]


def test_what_another_empties_meanwhile_is_never_damaged(tmp_path):
    """As `hpml doctor --clear-cache` does while a run starts. One deleted under a writer is: its log goes to the next file."""
    path, over = tmp_path / "file.sqlite", threading.Event()

    def write(number: int) -> None:
        for each in range(60):
            rows(path, number + 4 * each)

    def forget() -> None:
        while not over.is_set():
            with SqliteFile(path, TABLE, 1, "cache", "delete it") as file:
                file.forget("t")

    with ThreadPoolExecutor(5) as pool:
        forgetting, writing = pool.submit(forget), [pool.submit(write, number) for number in range(4)]
        try:
            for each in writing:
                each.result()
        finally:
            over.set()
        forgetting.result()


def test_forgetting_gives_the_room_back_and_says_whether_there_was_anything(tmp_path):
    path = tmp_path / "file.sqlite"
    with SqliteFile(path, TABLE, 1, "cache", "delete it") as file:
        assert file.forget("t") is None and not path.exists()
        file.write("INSERT INTO t VALUES (?)", [(number,) for number in range(20000)])
        assert file.forget("t") == path and file.forget("t") is None
    assert path.stat().st_size < 20000
    path.write_bytes(b"no such file" * 100)
    with SqliteFile(path, TABLE, 1, "cache", "delete it") as file:
        assert file.forget("t") == path and not path.exists()


def test_a_full_disk_takes_all_rows_or_none(tmp_path, monkeypatch):
    path, connect = tmp_path / "file.sqlite", sqlite3.connect
    assert rows(path, 0) == [0]

    def with_no_more_pages(*args, **kwargs):
        connection = connect(*args, **kwargs)
        connection.execute("PRAGMA max_page_count = 3")
        return connection

    monkeypatch.setattr(sqlite3, "connect", with_no_more_pages)
    with SqliteFile(path, TABLE, 1, "cache", "delete it") as file:
        with pytest.raises(Unusable, match="disk is full") as told:
            file.write("INSERT INTO t VALUES (?)", [(number,) for number in range(1, 5000)])
        assert str(path) in str(told.value) and "make room there, or set HPML_CACHE_DIR" in str(told.value)
        assert file.read("SELECT number FROM t", ()) == [(0,)]
        file.write("INSERT INTO t VALUES (?)", [(1,)])
    assert rows(path, 2) == [0, 1, 2]
