"""File of JSON lines that one rank appends to, and its reader. A full disk loses lines, not the run."""
from __future__ import annotations

import json
import logging
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from passes.errors import BadInput

log = logging.getLogger("hpml")
PREFIX, SUFFIX = "rank-", ".jsonl"


def file_of_rank(folder: str | os.PathLike[str], rank: int) -> Path:
    return Path(folder) / f"{PREFIX}{rank:05d}{SUFFIX}"


class RecordFile:
    """Appends one JSON object per line, each in one write, so that a killed process leaves at most one torn line. If writing
    fails, it warns once, and the next line is tried again."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._descriptor: int | None = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o666)
            size = os.fstat(self._descriptor).st_size
            self._torn = size > 0 and os.pread(self._descriptor, 1, size - 1) != b"\n"
        except (OSError, ValueError) as error:
            reason = error.strerror if isinstance(error, OSError) else error
            raise BadInput(f"the records of the run cannot be written: {reason}", str(path),
                           "give hpml_compiler.Monitor a folder that can be written") from error
        self._failing = False

    def write(self, record: Mapping[str, Any]) -> None:
        if self._descriptor is None:
            return
        line = json.dumps(_strict(record), separators=(",", ":"), allow_nan=False, default=str).encode() + b"\n"
        try:
            line = b"\n" + line if self._torn else line
            written = os.write(self._descriptor, line)
            self._torn = written < len(line)
            if self._torn:
                raise OSError(0, "the disk is full")
        except OSError as error:
            if not self._failing:
                log.warning("the records of the run are not written, training continues: %s (%s); free space there, and they "
                            "go on by themselves", error.strerror, self.path)
            self._failing = True
        else:
            self._failing = False

    def close(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None


def read_records(path: Path) -> tuple[list[dict[str, Any]], int]:
    """Records of a file in order, and the number of lines that are torn. Raises BadInput."""
    try:
        lines = path.read_bytes().splitlines()
    except OSError as error:
        raise BadInput(f"the records of a run cannot be read: {error.strerror}", str(path),
                       "name the folder that hpml_compiler.Monitor writes to") from error
    found, torn = [], 0
    for line in lines:
        try:
            record = json.loads(line) if line else None
        except ValueError:
            record = torn = torn + 1
        if isinstance(record, dict):
            found.append(record)
    return found, torn


_NOT_FINITE = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}


def _strict(value: Any) -> Any:
    """The value with NaN and infinities as text, which JSON has no numbers for."""
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if isinstance(value, Mapping):
        return {str(name): _strict(each) for name, each in value.items()}
    return [_strict(each) for each in value] if isinstance(value, (list, tuple)) else value


def number_of(value: Any) -> float:
    """A figure of a record as a number; inverse of how NaN and infinities are written."""
    return _NOT_FINITE.get(value, math.nan) if isinstance(value, str) else float(value)
