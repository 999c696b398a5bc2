"""Check that inductor and the C++ compiler can write to their folders, and report a folder that is not writable."""
from __future__ import annotations

import contextlib
import errno
import logging
import os
import tempfile
from collections.abc import Iterator

from passes import compat
from passes.errors import BadInput, HpmlError
from passes.filesystem.private_files import is_written_by_others, make_private_folder
from passes.filesystem.sqlite_table import cache_folder
from passes.session_state import state_of

log = logging.getLogger("hpml")
FOLDER_VARIABLE = "TORCHINDUCTOR_CACHE_DIR"

TRIED_BYTES = 2**16
"""Bytes written to test a folder: more than the rest of a block of a full disk."""
REFUSALS = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM, errno.ENOTDIR, errno.EEXIST, errno.EIO)
"""Error numbers of opening, creating or writing a file that mean that the folder is not writable."""
FULL = (errno.ENOSPC, errno.EDQUOT)


class _WritableFolders(set[str]):
    """Folders that were tried."""


@contextlib.contextmanager
def check_cache_dir() -> Iterator[None]:
    """Context around inductor's compilation. Raises BadInput with the folder that cannot be written, and why.

    Checks before the first graph, since a C++ compiler that cannot write takes half a minute to fail, many times over; and
    again when a graph fails to compile, since disks fill up.
    """
    writable = state_of(_WritableFolders)
    if (folder := _trusted(compat.inductor_folder())) not in writable:
        _check(folder)
        writable.add(folder)
    try:
        yield
    except HpmlError:
        raise
    except Exception as error:
        _check(folder, error)
        if refused := _refused(error, folder):
            raise _unwritable(*refused) from error
        raise


def _trusted(folder: str) -> str:
    """A folder for inductor's cache, which loads and runs the code it finds there. If another user may have written to
    `folder`, returns one in hpml's own cache folder, unless the environment names `folder`: a team may share one."""
    if folder in state_of(_WritableFolders) or (why := is_written_by_others(folder)) is None:
        return folder
    if os.environ.get(FOLDER_VARIABLE):
        log.warning("inductor loads compiled code from %s (set by %s), which another user may have written: %s",
                    folder, FOLDER_VARIABLE, why)
        return folder
    own = str(cache_folder() / "inductor")
    if (own_why := is_written_by_others(own)) is not None:
        raise BadInput(f"no folder for compiled code is private to this user: {why}; {own_why}", folder,
                       f"set {FOLDER_VARIABLE} or HPML_CACHE_DIR to a folder that only you can write")
    log.warning("compiled code is cached in %s instead of %s, since inductor runs any code in its cache: %s", own, folder, why)
    os.environ[FOLDER_VARIABLE] = own
    return own


def _check(folder: str, cause: Exception | None = None) -> None:
    try:
        temporary = tempfile.gettempdir()
    except OSError as error:  # its text lists all folders that were tried
        raise _unwritable("the folder of temporary files", str(error)) from (cause or error)
    for each in dict.fromkeys((folder, temporary)):
        try:
            make_private_folder(each)
            with tempfile.TemporaryFile(dir=each) as file:
                file.write(bytes(TRIED_BYTES))
        except OSError as error:
            number = errno.ENOTDIR if os.path.isfile(each) else error.errno
            raise _unwritable(each, os.strerror(number) if number else str(error)) from (cause or error)


def _refused(error: BaseException, folder: str) -> tuple[str, str] | None:
    """Where and why a write failed, if that is what caused `error`. The folder checks may pass nevertheless: a subfolder may
    belong to another user, or a disk may have space again."""
    chain, here = error, (folder, tempfile.gettempdir())
    while chain is not None:
        path = str(chain.filename or folder) if isinstance(chain, OSError) else ""
        if isinstance(chain, OSError) and chain.errno in REFUSALS and (path.startswith(here) or chain.errno in FULL):
            return path, os.strerror(chain.errno)
        for number in FULL:  # as the C++ compiler reports it
            if os.strerror(number) in str(chain):
                return f"{folder} or {here[1]}", os.strerror(number)
        chain = chain.__cause__ or chain.__context__
    return None


def _unwritable(where: str, why: str) -> BadInput:
    return BadInput(f"compiled code cannot be written: {why}", where,
                    "free disk space or grant write permission there, or set TORCHINDUCTOR_CACHE_DIR (compiled code) and "
                    "TMPDIR (temporary files) to folders on a local disk with free space")
