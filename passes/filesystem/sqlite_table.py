"""A table in a SQLite file in the user's cache folder, shared by several processes."""
from __future__ import annotations

import os
import sqlite3
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

from typing_extensions import Self

from passes.errors import BadInput
from passes.filesystem.private_files import is_written_by_others, make_private_file, make_private_folder

T = TypeVar("T")

_BESIDE = ("", "-wal", "-shm", "-journal")
"""Suffixes of the files that SQLite maintains: all of them are read."""
BUSY_TIMEOUT_S = 30.0  # how long a writer waits for another one


def cache_folder() -> Path:
    """$HPML_CACHE_DIR, else `hpml` in $XDG_CACHE_HOME, else ~/.cache/hpml."""
    if folder := os.environ.get("HPML_CACHE_DIR"):
        return Path(folder)
    caches = os.environ.get("XDG_CACHE_HOME")
    return (Path(caches) if caches else Path.home() / ".cache") / "hpml"


class Unusable(BadInput):
    """A file that cannot be opened, read or written: no permission, disk full, or locked by another process."""


class OthersWrite(Unusable):
    """A file that another user may have written."""


class SqliteFile:
    """One file with one table.

    It is opened on first use, and created, with its folder, on the first write: reading a missing file leaves
    no trace. Several processes may use it at once (write-ahead log, and a writer waits up to 30 s for another); processes of
    several hosts should not share one, as with any SQLite file on a network disk.

    The file has mode 0600, and new folders 0700. A file that another user may have written is neither read nor
    written (`passes.filesystem.private_files`).

    table: the CREATE statement. version: of its columns. name: used in errors; remake: next step if it is
    damaged. Raises BadInput, naming the file, if it is damaged or of another version; Unusable if it cannot be opened or
    written, OthersWrite if another user may have written it.
    """

    def __init__(self, path: Path, table: str, version: int, name: str, remake: str) -> None:
        self.path, self.name = path, name
        self._table, self._version, self._remake = table, version, remake
        self._connection: sqlite3.Connection | None = None

    def read(self, sql: str, values: Iterable[Any]) -> list[Any]:
        """The rows of a query."""
        def rows() -> list[Any]:
            if self._connection is None and not self.path.exists():  # raises if the folder is not readable
                return []
            return self._open().execute(sql, tuple(values)).fetchall()

        return self.guarded(rows)

    def write(self, sql: str, rows: Iterable[tuple[Any, ...]]) -> None:
        """Run a statement for each of these rows, in one transaction: all of them or none."""
        self.guarded(lambda: self._write(sql, rows))

    def check_writable(self) -> None:
        """Raise BadInput if nothing could be stored. Creates the file."""
        self.guarded(self._begin_to_write)

    def forget(self, table: str) -> Path | None:
        """Delete all rows, and release their disk space. Returns the file; None if there was none.

        The file itself stays: another process may be using it, and its next write would go to SQLite's side files of
        that name, which belong to a new file by then, and damage that. One that cannot be emptied, as on a full disk, is
        deleted.
        """
        if not self.path.exists():
            return None
        try:
            return self.path if self.guarded(lambda: self._emptied(table)) else None
        except OthersWrite:
            raise
        except BadInput:
            self.close()
            for each in self._files():
                each.unlink(missing_ok=True)
            return self.path

    def close(self) -> None:
        """Closes the file; the next use opens it again."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def guarded(self, do: Callable[[], T]) -> T:
        """Call `do()`, converting errors of the file to BadInput."""
        where = f"{self.name} {self.path}"
        try:
            return do()
        except (sqlite3.OperationalError, OSError) as error:  # missing, no permission, disk full, locked by another
            raise Unusable(
                f"cannot use the {self.name}: {error}",
                where,
                "make room there, or set HPML_CACHE_DIR to a folder on a local disk that can be written",
            ) from error
        except (sqlite3.DatabaseError, ValueError, TypeError) as error:
            raise BadInput(f"the {self.name} is damaged: {error}", where, self._remake) from error

    def _write(self, sql: str, rows: Iterable[tuple[Any, ...]]) -> None:
        make_private_folder(self.path.parent)
        with self._open() as connection:
            connection.executemany(sql, rows)

    def _emptied(self, table: str) -> bool:
        with self._open() as connection:
            some = connection.execute(f"DELETE FROM {table}").rowcount > 0
        connection.execute("VACUUM")
        return some

    def _begin_to_write(self) -> None:
        make_private_folder(self.path.parent)
        with self._open() as connection:
            connection.execute("BEGIN IMMEDIATE")

    def _open(self) -> sqlite3.Connection:
        if self._connection is None:
            self._check_own()
            make_private_file(self.path)
            # Backward graphs are compiled in autograd's threads; SQLite itself serializes the calls.
            connection = sqlite3.connect(self.path, timeout=BUSY_TIMEOUT_S, check_same_thread=False)
            try:
                self._prepare(connection)
            except BaseException:
                connection.close()
                raise
            self._connection = connection
        return self._connection

    def _files(self) -> list[Path]:
        return [self.path.with_name(self.path.name + end) for end in _BESIDE]

    def _check_own(self) -> None:
        """Raise OthersWrite if another user may have written the files that are read here."""
        why = next((why for each in (self.path.parent, *self._files()) if (why := is_written_by_others(each))), None)
        if why is not None:
            raise OthersWrite(f"the {self.name} is not read: {why}", f"{self.name} {self.path}",
                           "if it is yours, `chmod go-w` it; else delete it, or set HPML_CACHE_DIR to a folder that you "
                              "alone can write")

    def _prepare(self, connection: sqlite3.Connection) -> None:
        """Create the table in a new file; raises BadInput on a file of another version."""
        version = connection.execute("PRAGMA user_version").fetchone()[0]
        if version not in (0, self._version):
            raise BadInput(
                f"the {self.name} has version {version}, this hpml reads version {self._version}",
                f"{self.name} {self.path}",
                "delete this file, or set HPML_CACHE_DIR to another folder",
            )
        if version == 0:
            _write_ahead(connection)
            with connection:
                connection.execute("BEGIN IMMEDIATE")  # a second process waits here, and then finds the table
                connection.execute(self._table)
                connection.execute(f"PRAGMA user_version = {self._version}")
        connection.execute("PRAGMA synchronous = NORMAL")  # data lost in a power cut can be made again


def _write_ahead(connection: sqlite3.Connection) -> None:
    """Enable the write-ahead log. SQLite does not wait here for another process that creates the same file, so retry."""
    over = time.monotonic() + BUSY_TIMEOUT_S
    while True:
        try:
            connection.execute("PRAGMA journal_mode = WAL")
            return
        except sqlite3.OperationalError as error:
            if "locked" not in str(error) or time.monotonic() > over:
                raise
        time.sleep(0.01)
