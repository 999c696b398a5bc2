"""Files and folders that this user alone can write: caches are made so, and what others could have written is not read."""
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
    """The folder and those above it, where they are missing, with mode 0700."""
    for each in (*reversed(Path(path).parents), Path(path)):
        if not each.is_dir():
            with contextlib.suppress(FileExistsError):  # another process has made it meanwhile, or `is_dir` of a file is False
                each.mkdir(mode=0o700)
    if not Path(path).is_dir():
        raise NotADirectoryError(20, os.strerror(20), str(path))


def make_private_file(path: str | os.PathLike[str]) -> None:
    """An empty file with mode 0600, unless there is one, which others may no longer read then."""
    try:
        os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600))
    except FileExistsError:
        mode = stat.S_IMODE(os.stat(path).st_mode)
        if mode & 0o077:
            os.chmod(path, mode & 0o700)


def is_written_by_others(path: str | os.PathLike[str]) -> str | None:
    """Why another user may have written what is at `path`; None where none can have, and where nothing is.

    A file has to belong to this user, and nobody else may write it. So has the folder that it is in. Folders above may belong
    to root as well, and others may write them if they are sticky, as /tmp is: nobody can rename there what is not theirs.
    Symbolic links on the way have to be this user's or root's, and where they lead is judged likewise.
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
    """All that is looked up on the way to a file, links before what they lead to; the file, or folder, is last."""
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
    if way[-1].path != here:  # the path ends in "..", and names a folder that has been passed already
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
    """True if others could put something else in the place of what is in this folder, or of this link."""
    if step.owner not in (_ROOT, os.geteuid()):
        return f"{step.path} belongs to user {step.owner}"
    if stat.S_ISDIR(step.mode) and step.mode & _OTHERS_WRITE and not step.mode & stat.S_ISVTX:
        return f"others may write {step.path} (mode {stat.S_IMODE(step.mode):04o})"
    return None
