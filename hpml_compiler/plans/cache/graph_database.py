"""What graphs of earlier launches were rewritten to, by key, as bytes: a SQLite file in the user's cache folder."""
from __future__ import annotations

import hashlib
import time
import zlib
from pathlib import Path

from passes.errors import BadInput
from passes.filesystem.sqlite_table import SqliteFile, cache_folder

FILE_NAME = "graphs.sqlite"
SCHEMA_VERSION = 1
MOST_ENTRIES = 400
_TABLE = ("CREATE TABLE IF NOT EXISTS graph (key TEXT PRIMARY KEY, made REAL NOT NULL, digest TEXT NOT NULL, "
          "entry BLOB NOT NULL)")


def get(key: str) -> bytes | None:
    """Raises BadInput where the file cannot be read, or what is in it is not what was written."""
    with _file() as graphs:
        rows = graphs.read("SELECT digest, entry FROM graph WHERE key = ?", (key,))
    if not rows:
        return None
    digest, entry = rows[0]
    if _digest(entry) != digest:
        raise BadInput("an entry of the cache of graphs is damaged", str(_file().path), "run `hpml doctor --clear-cache`")
    return zlib.decompress(entry)


def put(key: str, entry: bytes) -> None:
    """In place of an earlier one; the oldest go where there are too many. Raises BadInput where it cannot be written."""
    packed = zlib.compress(entry, 1)
    with _file() as graphs:
        graphs.write("INSERT OR REPLACE INTO graph VALUES (?, ?, ?, ?)", [(key, time.time(), _digest(packed), packed)])
        graphs.write("DELETE FROM graph WHERE key NOT IN (SELECT key FROM graph ORDER BY made DESC LIMIT ?)", [(MOST_ENTRIES,)])


def path() -> Path:
    """The file."""
    return _file().path


def clear() -> Path | None:
    """Forget all graphs. The file that they were in; None where there was none."""
    with _file() as graphs:
        return graphs.forget("graph")


def _digest(packed: bytes) -> str:
    return hashlib.sha256(packed).hexdigest()


def _file() -> SqliteFile:
    return SqliteFile(cache_folder() / FILE_NAME, _TABLE, SCHEMA_VERSION, "cache of graphs", "run `hpml doctor --clear-cache`")
