"""Several that make one file at the same moment -> a row of each of them."""
from __future__ import annotations

import threading

import pytest

from passes.errors import BadInput
from passes.sqlite_file import SqliteFile

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
