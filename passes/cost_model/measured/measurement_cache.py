"""Persistent cache of measurements: a SQLite file in the user's cache folder."""
from __future__ import annotations

import functools
import json
import math
import platform
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from passes.errors import BadInput
from passes.filesystem.sqlite_table import SqliteFile, cache_folder
from passes.hardware.control_groups import available_cores

FILE_NAME = "measurements.sqlite"
SCHEMA_VERSION = 1
_TABLE = """
CREATE TABLE IF NOT EXISTS measurement (
    device TEXT NOT NULL, kind TEXT NOT NULL, key TEXT NOT NULL,
    median_us REAL NOT NULL, runs INTEGER NOT NULL, spread REAL NOT NULL, extra TEXT NOT NULL,
    PRIMARY KEY (device, kind, key)
) WITHOUT ROWID
"""
_COLUMNS = "median_us, runs, spread, extra"


@dataclass(frozen=True)
class TimedMeasurement:
    """One timed thing. runs: number of runs; spread: 90th over 10th percentile of them, 1 if all were equal.

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


class MeasurementCache(SqliteFile):
    """Measurements by device (see `device_key`), kind ("op", "collective", "kernel") and key.

    path: the file; by default `measurements.sqlite` in the cache folder (`passes.filesystem.sqlite_table.cache_folder`).
    """

    def __init__(self, path: Path | None = None) -> None:
        super().__init__(Path(path) if path is not None else default_path(), _TABLE, SCHEMA_VERSION, "measurement cache",
                         "delete this file; `hpml profile` makes a new one")

    def get(self, device: str, kind: str, key: str) -> TimedMeasurement | None:
        """The latest measurement, or None."""
        sql = f"SELECT {_COLUMNS} FROM measurement WHERE device = ? AND kind = ? AND key = ?"
        rows = self.read(sql, (device, kind, key))
        return self.guarded(lambda: _measurement(rows[0])) if rows else None

    def all(self, device: str, kind: str) -> dict[str, TimedMeasurement]:
        """Every measurement of a kind on a device, by key, in order of the keys."""
        sql = f"SELECT key, {_COLUMNS} FROM measurement WHERE device = ? AND kind = ? ORDER BY key"
        rows = self.read(sql, (device, kind))
        return self.guarded(lambda: {key: _measurement(rest) for key, *rest in rows})

    def put(self, device: str, kind: str, key: str, measurement: TimedMeasurement) -> None:
        """Store a measurement, replacing an earlier one."""
        self.put_all(device, kind, {key: measurement})

    def put_all(self, device: str, kind: str, measurements: Mapping[str, TimedMeasurement]) -> None:
        """Store many in one transaction: all of them or none."""
        self.write("INSERT OR REPLACE INTO measurement VALUES (?, ?, ?, ?, ?, ?, ?)", [
            (device, kind, key, m.median_us, m.runs, m.spread, json.dumps(dict(m.extra), allow_nan=False))
            for key, m in measurements.items()
        ])


def default_path() -> Path:
    """The file in the user's cache folder."""
    return cache_folder() / FILE_NAME


def device_key(device_type: str = "cpu") -> str:
    """Key of this process's device: device, torch version and, on a CPU, cores and threads.

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
    """The processor's model: from the kernel on Linux, else from Python."""
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text(errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _measurement(row: Any) -> TimedMeasurement:
    median_us, runs, spread, extra = row
    return TimedMeasurement(median_us, runs, spread, json.loads(extra))
