"""Private files and folders for caches, and checks that no other user could have written them."""
from __future__ import annotations

import contextlib
import os
import stat
from collections import deque
from dataclasses import dataclass
from pathlib import Path

MOST_LINKS = 40  # as many as Linux follows
_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH
_ROOT = 0


def make_private_folder(path: str | os.PathLike[str]) -> None:
    """Create the folder and missing parents with mode 0700."""
    for each in (*reversed(Path(path).parents), Path(path)):
        if not each.is_dir():
            with contextlib.suppress(FileExistsError):  # another process created it meanwhile, or `is_dir` of a file is False
                each.mkdir(mode=0o700)
    if not Path(path).is_dir():
        raise NotADirectoryError(20, os.strerror(20), str(path))


def make_private_file(path: str | os.PathLike[str]) -> None:
    """Create an empty file with mode 0600; an existing one loses read permission for others."""
    try:
        os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600))
    except FileExistsError:
        mode = stat.S_IMODE(os.stat(path).st_mode)
        if mode & 0o077:
            os.chmod(path, mode & 0o700)


def is_written_by_others(path: str | os.PathLike[str]) -> str | None:
    """Reason why another user may have written the file at `path`; None if none can have, or if it does not exist.

    A file must belong to this user, and not be writable by others. So must its folder. Parent folders may belong
    to root as well, and may be writable by others if they are sticky, like /tmp: entries of other owners cannot be renamed
    there. Symbolic links on the way must belong to this user or root, and their targets are checked likewise.
    """
    if not hasattr(os, "geteuid"):  # Windows: a user's folders are the user's own there
        return None
    try:
        *above, last = _way(path)
        own = (last,) if stat.S_ISDIR(last.mode) else (last, _step(os.path.dirname(last.path)))
    except (FileNotFoundError, NotADirectoryError):
        return None
    found = (*map(_not_own, own), *map(_replaceable, above))
    return next((why for why in found if why is not None), None)


@dataclass(frozen=True)
class _PathEntry:
    """A folder, a link or a file on the way to another."""

    path: str
    owner: int
    mode: int


def _way(path: str | os.PathLike[str]) -> list[_PathEntry]:
    """All path entries looked up on the way to a file, links before their targets; the file, or folder, is last."""
    here, way, links = os.sep, [_step(os.sep)], 0
    rest = deque(Path(os.path.join(os.getcwd(), path)).parts[1:])
    while rest:
        part = rest.popleft()
        if part == os.pardir:
            here = os.path.dirname(here)
            continue
        step = _step(os.path.join(here, part))
        way.append(step)
        if not stat.S_ISLNK(step.mode):
            here = step.path
            continue
        links += 1
        if links > MOST_LINKS:
            raise NotADirectoryError(step.path)
        target = Path(os.readlink(step.path))
        if target.is_absolute():
            here = os.sep
        rest.extendleft(reversed([part for part in target.parts if part != target.anchor]))
    if way[-1].path != here:  # the path ends in "..", and names a folder that is in the list already
        way.append(_step(here))
    return way


def _step(path: str) -> _PathEntry:
    found = os.lstat(path)
    return _PathEntry(path, found.st_uid, found.st_mode)


def _not_own(step: _PathEntry) -> str | None:
    if step.owner != os.geteuid():
        return f"{step.path} belongs to user {step.owner}"
    return f"others may write {step.path} (mode {stat.S_IMODE(step.mode):04o})" if step.mode & _OTHERS_WRITE else None


def _replaceable(step: _PathEntry) -> str | None:
    """Reason why others could replace an entry of this folder, or this link; None if they cannot."""
    if step.owner not in (_ROOT, os.geteuid()):
        return f"{step.path} belongs to user {step.owner}"
    if stat.S_ISDIR(step.mode) and step.mode & _OTHERS_WRITE and not step.mode & stat.S_ISVTX:
        return f"others may write {step.path} (mode {stat.S_IMODE(step.mode):04o})"
    return None
