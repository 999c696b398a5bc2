"""Measurements kept from one run to the next: a SQLite file in the user's cache folder."""
from __future__ import annotations

import functools
import json
import math
import os
import platform
import sqlite3
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

from passes.errors import BadInput
from passes.machine.cluster import available_cores

T = TypeVar("T")

FILE_NAME = "measurements.sqlite"
SCHEMA_VERSION = 1
BUSY_TIMEOUT_S = 30.0  # how long a writer waits for another one
_TABLE = """
CREATE TABLE IF NOT EXISTS measurement (
    device TEXT NOT NULL, kind TEXT NOT NULL, key TEXT NOT NULL,
    median_us REAL NOT NULL, runs INTEGER NOT NULL, spread REAL NOT NULL, extra TEXT NOT NULL,
    PRIMARY KEY (device, kind, key)
) WITHOUT ROWID
"""
_COLUMNS = "median_us, runs, spread, extra"


@dataclass(frozen=True)
class Measurement:
    """One thing timed. runs: how many times; spread: 90th over 10th percentile of them, 1 where all were alike.

    extra: whatever else identifies or explains it, as JSON values.
    """

    median_us: float
    runs: int
    spread: float = 1.0
    extra: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not 0 <= self.median_us < math.inf:
            raise ValueError(f"median_us must be finite and at least 0, got {self.median_us}")
        if self.runs < 1 or not 1 <= self.spread < math.inf:
            raise ValueError(f"runs and spread must be at least 1, got {self.runs} and {self.spread}")


class MeasurementCache:
    """Measurements by device (see `device_key`), kind ("op", "collective", "kernel") and key.

    path: the file; by default `measurements.sqlite` in $HPML_CACHE_DIR, else $XDG_CACHE_HOME/hpml, else
    ~/.cache/hpml. It is opened at the first use, and made, with its folder, at the first `put`: reading where nothing
    was measured leaves no trace. Several processes may use it at once (write-ahead log, and a writer waits up to 30 s
    for another); processes of several hosts should not share one file, as with any SQLite file on a network disk.

    Raises BadInput, naming the file, where it is damaged, of another version, or cannot be opened.
    """

    def __init__(self, path: Path | None = None) -> None:
        self.path = Path(path) if path is not None else default_path()
        self._connection: sqlite3.Connection | None = None

    def get(self, device: str, kind: str, key: str) -> Measurement | None:
        """What was measured last, or None."""
        sql = f"SELECT {_COLUMNS} FROM measurement WHERE device = ? AND kind = ? AND key = ?"
        rows = self._read(sql, (device, kind, key))
        return self._guarded(lambda: _measurement(rows[0])) if rows else None

    def all(self, device: str, kind: str) -> dict[str, Measurement]:
        """Every measurement of a kind on a device, by key, in order of the keys."""
        sql = f"SELECT key, {_COLUMNS} FROM measurement WHERE device = ? AND kind = ? ORDER BY key"
        rows = self._read(sql, (device, kind))
        return self._guarded(lambda: {key: _measurement(rest) for key, *rest in rows})

    def put(self, device: str, kind: str, key: str, measurement: Measurement) -> None:
        """Keeps a measurement, in place of an earlier one."""
        self.put_all(device, kind, {key: measurement})

    def put_all(self, device: str, kind: str, measurements: Mapping[str, Measurement]) -> None:
        """Keeps many in one transaction: all of them or none."""
        rows = [
            (device, kind, key, m.median_us, m.runs, m.spread, json.dumps(dict(m.extra), allow_nan=False))
            for key, m in measurements.items()
        ]
        self._guarded(lambda: self._write(rows))

    def check_writable(self) -> None:
        """Raises BadInput where nothing could be kept: asked before something slow is measured. Makes the file."""
        self._guarded(self._begin_to_write)

    def _begin_to_write(self) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self._open() as connection:
            connection.execute("BEGIN IMMEDIATE")

    def close(self) -> None:
        """Closes the file; the next use opens it again."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def __enter__(self) -> MeasurementCache:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def _read(self, sql: str, values: tuple[str, ...]) -> list[Any]:
        if self._connection is None and not self.path.exists():
            return []
        return self._guarded(lambda: self._open().execute(sql, values).fetchall())

    def _write(self, rows: list[tuple[Any, ...]]) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self._open() as connection:
            connection.executemany("INSERT OR REPLACE INTO measurement VALUES (?, ?, ?, ?, ?, ?, ?)", rows)

    def _open(self) -> sqlite3.Connection:
        if self._connection is None:
            # Backward graphs are compiled in autograd's threads; SQLite itself serializes the calls.
            connection = sqlite3.connect(self.path, timeout=BUSY_TIMEOUT_S, check_same_thread=False)
            try:
                _prepare(connection, self.path)
            except BaseException:
                connection.close()
                raise
            self._connection = connection
        return self._connection

    def _guarded(self, do: Callable[[], T]) -> T:
        """`do()`, with what can go wrong with a file said as BadInput."""
        where = f"measurement cache {self.path}"
        try:
            return do()
        except (sqlite3.OperationalError, OSError) as error:  # not there, not allowed, disk full, held by another
            raise BadInput(
                f"cannot use the measurement cache: {error}",
                where,
                "set HPML_CACHE_DIR to a folder on a local disk that can be written",
            ) from error
        except (sqlite3.DatabaseError, ValueError, TypeError) as error:
            raise BadInput(
                f"the measurement cache is damaged: {error}", where, "delete this file; `hpml profile` makes a new one"
            ) from error


def default_path() -> Path:
    """The file in the user's cache folder."""
    if folder := os.environ.get("HPML_CACHE_DIR"):
        return Path(folder) / FILE_NAME
    caches = os.environ.get("XDG_CACHE_HOME")
    return (Path(caches) if caches else Path.home() / ".cache") / "hpml" / FILE_NAME


def device_key(device_type: str = "cpu") -> str:
    """Names this process's device, torch version and, on a CPU, cores and threads: what measurements hold for.

    device_type: "cpu" or "cuda". Such as "Intel(R) Xeon(R) CPU, 8 cores, 4 threads, torch 2.13.0".
    """
    import torch

    version = torch.__version__.split("+")[0]
    if device_type == "cuda":
        return f"{torch.cuda.get_device_name()}, torch {version}"
    if device_type != "cpu":
        raise BadInput(f"unknown device type {device_type!r}", "device_key", "legal types: cpu, cuda")
    return f"{_processor()}, {available_cores()} cores, {torch.get_num_threads()} threads, torch {version}"


@functools.cache
def _processor() -> str:
    """The processor's model: what the kernel says on Linux, else what Python knows."""
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text(errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _prepare(connection: sqlite3.Connection, path: Path) -> None:
    """Makes the table in a new file; raises BadInput on a file of another version."""
    version = connection.execute("PRAGMA user_version").fetchone()[0]
    if version not in (0, SCHEMA_VERSION):
        raise BadInput(
            f"the measurement cache has version {version}, this hpml reads version {SCHEMA_VERSION}",
            f"measurement cache {path}",
            "delete this file, or set HPML_CACHE_DIR to another folder",
        )
    if version == 0:
        connection.execute("PRAGMA journal_mode = WAL")
        with connection:
            connection.execute("BEGIN IMMEDIATE")  # whoever comes second waits here, and then finds the table
            connection.execute(_TABLE)
            connection.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")
    connection.execute("PRAGMA synchronous = NORMAL")  # what a power cut takes can be measured again


def _measurement(row: Any) -> Measurement:
    median_us, runs, spread, extra = row
    return Measurement(median_us, runs, spread, json.loads(extra))
