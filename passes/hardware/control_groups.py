"""Memory and cores that control groups (cgroups, v1 and v2) leave to this process: the limits of containers and batch jobs."""
from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import psutil

MOUNTS, MEMBERSHIPS = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")
UNLIMITED = 1 << 60
"""Bytes from which a limit means that there is none: v1 writes the largest multiple of a page."""
_FILES = {"v2": ("memory.max", "memory.current", "inactive_file"),
          "v1": ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")}
"""Limit and use of a control group in bytes, and the line of its memory.stat that says how much of its use is cached files."""


def bytes_left(mounts: Path = MOUNTS, memberships: Path = MEMBERSHIPS) -> int | None:
    """Bytes that the tightest limit leaves, where cached files count as free, since they are dropped first; None if no control
    group has a limit. A limit of an outer group holds for all within it."""
    left: list[int] = []
    for folder, version in _folders("memory", mounts, memberships):
        if (limit := _limit(folder, version)) is not None and (used := _number(_text(folder / _FILES[version][1]))) is not None:
            stat = dict(line.split(None, 1) for line in _text(folder / "memory.stat").splitlines())
            left.append(max(limit - used + int(stat.get(_FILES[version][2], 0)), 0))
    return min(left, default=None)


def memory_bytes(mounts: Path = MOUNTS, memberships: Path = MEMBERSHIPS) -> int:
    """Memory of the host that this process may use."""
    limits = [_limit(*each) for each in _folders("memory", mounts, memberships)]
    return min([psutil.virtual_memory().total, *(limit for limit in limits if limit is not None)])


def available_cores(mounts: Path = MOUNTS, memberships: Path = MEMBERSHIPS) -> int:
    """Physical cores that this process may use; of a part of a core, one."""
    logical = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    found = [logical, psutil.cpu_count(logical=False) or logical]
    for folder, version in _folders("cpu", mounts, memberships):
        quota, period = (_text(folder / "cpu.max").split() or ["", ""]) if version == "v2" else (
            _text(folder / f"cpu.cfs_{name}_us").strip() for name in ("quota", "period"))
        if quota.isdecimal() and period.isdecimal():  # others have no limit: "max", "-1"
            found.append(max(int(quota) // int(period), 1))
    return min(found)


def _folders(controller: str, mounts: Path, memberships: Path) -> Iterator[tuple[Path, str]]:
    """The folder of each group that this process is in, and those around it. In a container, the host's path may not exist:
    the root of the mount is then the container's own group."""
    for line in _text(memberships).splitlines():
        number, controllers, path = line.split(":", 2)
        version = "v2" if number == "0" and not controllers else "v1" if controller in controllers.split(",") else ""
        if not version:
            continue
        root = mounts / controller if version == "v1" else mounts
        inner = Path(path.lstrip("/"))
        yield from ((root / each, version) for each in (inner, *inner.parents))


def _limit(folder: Path, version: str) -> int | None:
    found = _number(_text(folder / _FILES[version][0]))
    return None if found is None or found >= UNLIMITED else found


def _number(text: str) -> int | None:
    return int(text) if text.strip().isdecimal() else None


def _text(file: Path) -> str:
    """Content of a file; "" if it cannot be read."""
    try:
        return file.read_text()
    except OSError:
        return ""
