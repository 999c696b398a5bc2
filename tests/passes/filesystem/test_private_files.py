"""Files, folders and links of this user and of others, with modes -> read, or not read and why."""
from __future__ import annotations

import os
import sqlite3
import stat

import pytest

from passes.filesystem.private_files import is_written_by_others, make_private_file, make_private_folder
from passes.filesystem.sqlite_table import OthersWrite, SqliteFile

TABLE = "CREATE TABLE IF NOT EXISTS t (number INTEGER PRIMARY KEY)"
OTHER = 12345
needs_chown = pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() != 0, reason="only root may give a file away")


def mode_of(path) -> int:
    return stat.S_IMODE(os.stat(path).st_mode)


@pytest.fixture
def base(tmp_path):
    """folder/inner/file, of this user alone."""
    os.chmod(tmp_path, 0o700)
    make_private_folder(tmp_path / "folder" / "inner")
    make_private_file(tmp_path / "folder" / "inner" / "file")
    return tmp_path


def test_what_is_made_is_private_whatever_the_umask(tmp_path):
    before = os.umask(0)
    try:
        make_private_folder(tmp_path / "a" / "b")
        make_private_file(tmp_path / "a" / "b" / "file")
        with SqliteFile(tmp_path / "c" / "d" / "file.sqlite", TABLE, 1, "cache", "delete it") as file:
            file.write("INSERT INTO t VALUES (?)", [(1,)])
            beside = sorted((tmp_path / "c" / "d").iterdir())
            modes = {path.name: mode_of(path) for path in beside}
    finally:
        os.umask(before)
    assert [mode_of(tmp_path / each) for each in ("a", "a/b", "c", "c/d")] == 4 * [0o700]
    assert mode_of(tmp_path / "a" / "b" / "file") == 0o600
    assert modes == {"file.sqlite": 0o600, "file.sqlite-shm": 0o600, "file.sqlite-wal": 0o600}


def test_a_file_of_an_earlier_release_is_closed_to_readers(base):
    os.chmod(base / "folder" / "inner" / "file", 0o644)
    make_private_file(base / "folder" / "inner" / "file")
    assert mode_of(base / "folder" / "inner" / "file") == 0o600


def test_own_files_and_what_is_not_there_are_read(base, monkeypatch):
    file = base / "folder" / "inner" / "file"
    (base / "link").symlink_to("folder/inner")
    monkeypatch.chdir(base / "folder")
    for path in (file, base / "link" / "file", "inner/file", "inner/../inner/file", "..", base / "no" / "thing",
                 file / "below"):
        assert is_written_by_others(path) is None, path
    os.chmod(base, 0o1777)  # sticky, as /tmp: above the folder, nobody can put another in its place
    assert is_written_by_others(file) is None


@pytest.mark.parametrize(("which", "mode"), [
    ("folder/inner/file", 0o620), ("folder/inner/file", 0o602), ("folder/inner", 0o770), ("folder/inner", 0o1777),
    ("folder", 0o777), ("folder", 0o720), (".", 0o777)])
def test_what_others_may_write_is_not_read(base, which, mode):
    os.chmod(base / which, mode)
    assert "others may write" in (is_written_by_others(base / "folder" / "inner" / "file") or "")
    os.chmod(base / which, 0o700)


@needs_chown
@pytest.mark.parametrize("which", ["folder/inner/file", "folder/inner", "folder"])
def test_what_belongs_to_another_user_is_not_read(base, which):
    os.chown(base / which, OTHER, OTHER)
    assert f"belongs to user {OTHER}" in (is_written_by_others(base / "folder" / "inner" / "file") or "")


@needs_chown
@pytest.mark.parametrize(("link", "to"), [("theirs", "folder/inner"), ("theirs", "folder/inner/file")])
def test_a_link_of_another_user_is_not_followed(base, link, to):
    (base / link).symlink_to(base / to)
    os.chown(base / link, OTHER, OTHER, follow_symlinks=False)
    path = base / link / ("file" if to.endswith("inner") else "")
    assert f"belongs to user {OTHER}" in (is_written_by_others(path) or "")


def test_where_an_own_link_leads_is_looked_at(base, tmp_path_factory):
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    (elsewhere / "file").write_text("")
    os.chmod(elsewhere, 0o777)
    (base / "folder" / "link").symlink_to(elsewhere / "file")
    (base / "turns").symlink_to("turns")
    assert "others may write" in (is_written_by_others(base / "folder" / "link") or "")
    assert is_written_by_others(base / "turns") is None, "nothing is there"


@pytest.mark.parametrize("which", ["", "-wal", "-shm", "-journal"])
def test_a_database_that_others_may_have_written_is_neither_read_nor_written_nor_emptied(tmp_path, which):
    """Also by what SQLite keeps beside it, which it plays back into the file."""
    os.chmod(tmp_path, 0o700)
    path = tmp_path / "file.sqlite"
    with SqliteFile(path, TABLE, 1, "cache", "delete it") as file:
        file.write("INSERT INTO t VALUES (?)", [(1,)])
    beside = path.with_name(path.name + which)
    beside.touch()
    os.chmod(beside, 0o666)
    before = path.read_bytes()
    file = SqliteFile(path, TABLE, 1, "cache", "delete it")
    for use in (lambda: file.read("SELECT number FROM t", ()), lambda: file.write("INSERT INTO t VALUES (?)", [(2,)]),
                lambda: file.forget("t")):
        with pytest.raises(OthersWrite, match=f"others may write {beside}"):
            use()
    assert path.read_bytes() == before
    os.chmod(beside, 0o600)
    if which in ("", "-journal"):
        with sqlite3.connect(path) as connection:
            assert connection.execute("SELECT number FROM t").fetchall() == [(1,)]
