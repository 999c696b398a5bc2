"""Graph cache: rewritten graphs as bytes, by key, in a SQLite file in the user's cache folder."""
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
    """The entry of a key, or None. Raises BadInput if the file cannot be read or the entry is damaged."""
    with _file() as graphs:
        rows = graphs.read("SELECT digest, entry FROM graph WHERE key = ?", (key,))
    if not rows:
        return None
    digest, entry = rows[0]
    if _digest(entry) != digest:
        raise BadInput("an entry of the graph cache is corrupt", str(_file().path), "run `hpml doctor --clear-cache`")
    return zlib.decompress(entry)


def put(key: str, entry: bytes) -> None:
    """Store an entry, replacing an earlier one of the same key, and drop the oldest beyond `MOST_ENTRIES`. Raises BadInput if
    the file cannot be written."""
    packed = zlib.compress(entry, 1)
    with _file() as graphs:
        graphs.write("INSERT OR REPLACE INTO graph VALUES (?, ?, ?, ?)", [(key, time.time(), _digest(packed), packed)])
        graphs.write("DELETE FROM graph WHERE key NOT IN (SELECT key FROM graph ORDER BY made DESC LIMIT ?)", [(MOST_ENTRIES,)])


def path() -> Path:
    """Path of the SQLite file."""
    return _file().path


def clear() -> Path | None:
    """Delete all graphs. Returns the file that they were in, or None if there was none."""
    with _file() as graphs:
        return graphs.forget("graph")


def _digest(packed: bytes) -> str:
    return hashlib.sha256(packed).hexdigest()


def _file() -> SqliteFile:
    return SqliteFile(cache_folder() / FILE_NAME, _TABLE, SCHEMA_VERSION, "graph cache", "run `hpml doctor --clear-cache`")
