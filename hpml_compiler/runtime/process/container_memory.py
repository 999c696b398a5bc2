"""Memory that the control groups (cgroups, v1 and v2) of this process leave: the limits of containers and of batch jobs."""
from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

UNLIMITED = 1 << 60
"""Bytes from which a limit means that there is none: v1 writes the largest multiple of a page."""
_FILES = {"v2": ("memory.max", "memory.current", "inactive_file"),
          "v1": ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")}
"""Limit and use of a control group in bytes, and the line of its memory.stat that says how much of its use is cached files."""


def bytes_left(mounts: Path = Path("/sys/fs/cgroup"), memberships: Path = Path("/proc/self/cgroup")) -> int | None:
    """Bytes that the tightest limit leaves, where cached files count as free, since they are dropped first; None if no control
    group has a limit. A limit of an outer group holds for all within it."""
    left = [each for folder, version in _folders(mounts, memberships) if (each := _left_in(folder, version)) is not None]
    return min(left, default=None)


def _folders(mounts: Path, memberships: Path) -> Iterator[tuple[Path, str]]:
    """The folder of each group that this process is in, and those around it. In a container, the host's path may not exist:
    the root of the mount is then the container's own group."""
    for line in _text(memberships).splitlines():
        number, controllers, path = line.split(":", 2)
        version = "v2" if number == "0" and not controllers else "v1" if "memory" in controllers.split(",") else ""
        if not version:
            continue
        root = mounts / "memory" if version == "v1" else mounts
        inner = Path(path.lstrip("/"))
        yield from ((root / each, version) for each in (inner, *inner.parents))


def _left_in(folder: Path, version: str) -> int | None:
    limit, used, cached = _FILES[version]
    found = [_text(folder / name).strip() for name in (limit, used)]
    if not all(each.isdecimal() for each in found) or int(found[0]) >= UNLIMITED:
        return None
    stat = dict(line.split(None, 1) for line in _text(folder / "memory.stat").splitlines())
    return max(int(found[0]) - int(found[1]) + int(stat.get(cached, 0)), 0)


def _text(file: Path) -> str:
    """Content of a file; "" if it cannot be read."""
    try:
        return file.read_text()
    except OSError:
        return ""
