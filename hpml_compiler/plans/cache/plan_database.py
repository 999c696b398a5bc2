"""Plan cache: plans as text, by key, in a SQLite file in the user's cache folder."""
from __future__ import annotations

import hashlib
import inspect
import os
import time
from collections.abc import Iterable
from pathlib import Path

from passes.errors import BadInput
from passes.filesystem.sqlite_table import SqliteFile, cache_folder

FILE_NAME = "plans.sqlite"
SCHEMA_VERSION = 1
MOST_ENTRIES = 1000
_TABLE = "CREATE TABLE IF NOT EXISTS plan (key TEXT PRIMARY KEY, made REAL NOT NULL, entry TEXT NOT NULL)"


def is_on() -> bool:
    """True unless HPML_CACHE=0 is set in the environment, which turns the plan cache off."""
    return os.environ.get("HPML_CACHE", "1") != "0"


def digest_of(parts: Iterable[object]) -> str:
    """Cache key of an entry that depends on these parts, compared by `repr`."""
    return hashlib.sha256("\n".join(map(repr, parts)).encode()).hexdigest()


def planners_code() -> str:
    """Fingerprint of the planner's own source, from the size and modification time of every file: cheap, and it changes with an
    upgrade as with an edit."""
    folders = Path(__file__).parents[2], Path(inspect.getfile(BadInput)).parent  # hpml_compiler, passes
    files = sorted(path for folder in folders for path in folder.rglob("*.py"))
    text = "\n".join(f"{path} {(stat := path.stat()).st_size} {stat.st_mtime_ns}" for path in files)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def get(key: str) -> str | None:
    """The entry of a key, or None. Raises BadInput if the file cannot be read."""
    with _file() as plans:
        rows = plans.read("SELECT entry FROM plan WHERE key = ?", (key,))
    return rows[0][0] if rows else None


def put(key: str, entry: str) -> None:
    """Store an entry, replacing an earlier one of the same key, and drop the oldest beyond `MOST_ENTRIES`. Raises BadInput if
    the file cannot be written."""
    with _file() as plans:
        plans.write("INSERT OR REPLACE INTO plan VALUES (?, ?, ?)", [(key, time.time(), entry)])
        plans.write("DELETE FROM plan WHERE key NOT IN (SELECT key FROM plan ORDER BY made DESC LIMIT ?)", [(MOST_ENTRIES,)])


def clear() -> Path | None:
    """Delete all plans. Returns the file that they were in, or None if there was none."""
    with _file() as plans:
        return plans.forget("plan")


def _file() -> SqliteFile:
    return SqliteFile(cache_folder() / FILE_NAME, _TABLE, SCHEMA_VERSION, "plan cache", "run `hpml doctor --clear-cache`")
