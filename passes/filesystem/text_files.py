"""Files that users name: read as text, and written atomically. Errors are BadInput.

Every writer of the project goes through `write_file`: plans, pictures, traces, clusters, formulas.
"""
from __future__ import annotations

import errno
import os
import re
import secrets
import stat
import sys
from pathlib import Path

from passes.errors import BadInput

_STREAM = re.compile(r"/(?:dev|proc/self)/(?:fd/(\d+)|(stdin|stdout|stderr))")
_NAMED = {"stdin": 0, "stdout": 1, "stderr": 2}


def read_text(path: str | os.PathLike[str], what: str, next_step: str) -> str:
    """The text of a UTF-8 file. what: "the plan". Raises BadInput."""
    try:
        return Path(path).read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise BadInput(f"cannot read {what}: the file is not UTF-8 text", str(path), next_step) from error
    except (OSError, ValueError) as error:  # ValueError: a null character in the path
        raise BadInput(f"cannot read {what}: {_reason(error)}", str(path), next_step) from error


def write_file(path: str | os.PathLike[str], content: str | bytes, what: str) -> None:
    """Write `what` (such as "the plan"). Raises BadInput with the reason if it cannot be written.

    A regular file is written beside and then renamed: an older one stays whole until the new one is, keeps its mode, and
    a link stays in place. A device, a pipe or one of this process's streams (/dev/stdout) is written
    directly, since renaming a file over /dev/null would replace the device.
    """
    data = content.encode() if isinstance(content, str) else content
    path = Path(path)
    try:
        if (stream := _stream(path)) is not None:
            for each in (sys.stdout, sys.stderr):
                each.flush()  # earlier prints come first
            _through(os.dup(stream), data)
        elif _is_regular(path):
            _beside(path.resolve(), data)
        else:
            _through(os.open(path, os.O_WRONLY), data)
    except (OSError, ValueError) as error:
        raise _refused(path, what, error) from error


def check_writable(path: str | os.PathLike[str] | None, what: str) -> None:
    """Raise BadInput if `write_file` could not even start: called before slow work. None is no file."""
    if path is None:
        return
    path = Path(path)
    try:
        if _stream(path) is not None:
            return
        if _is_regular(path):
            folder = path.resolve().parent
            folder.stat()
            if not os.access(folder, os.W_OK | os.X_OK):
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        elif not os.access(path, os.W_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
    except (OSError, ValueError) as error:
        raise _refused(path, what, error) from error


def make_folder(path: str | os.PathLike[str]) -> None:
    """Create the folder and missing parents. Raises BadInput."""
    try:
        Path(path).mkdir(parents=True, exist_ok=True)
    except (OSError, ValueError) as error:
        raise BadInput(f"cannot make the folder: {_reason(error)}", str(path), "name a folder that can be made") from error


def is_device(path: str | os.PathLike[str]) -> bool:
    """True if `write_file` writes directly: a suffix must not be required then."""
    try:
        return _stream(Path(path)) is not None or not _is_regular(Path(path))
    except (OSError, ValueError):
        return False


def _stream(path: Path) -> int | None:
    """The file descriptor of /dev/stdout and the like. Opening it anew would truncate a file behind it."""
    found = _STREAM.fullmatch(os.fspath(path))
    return None if found is None else _NAMED[found[2]] if found[2] else int(found[1])


def _is_regular(path: Path) -> bool:
    """True if it is, or would be, a regular file. Raises OSError if there can be none."""
    try:
        mode = path.stat().st_mode
    except FileNotFoundError:
        return True
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
    return stat.S_ISREG(mode)


def _beside(path: Path, data: bytes) -> None:
    mode = stat.S_IMODE(path.stat().st_mode) if path.exists() else None
    partial = path.with_name(f".hpml-{os.getpid()}-{secrets.token_hex(4)}.part")
    descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
    try:
        if mode is not None:
            os.fchmod(descriptor, mode)
        _through(descriptor, data)
        partial.replace(path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise


def _through(descriptor: int, data: bytes) -> None:
    with os.fdopen(descriptor, "wb", buffering=0) as file:
        rest = memoryview(data)
        while rest:
            rest = rest[file.write(rest) or 0:]


def _refused(path: Path, what: str, error: OSError | ValueError) -> BadInput:
    step = "name a file in a folder that exists and can be written"
    number = error.errno if isinstance(error, OSError) else None
    if number in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        step = "free space there, or name a file on another disk"
    elif number == errno.EISDIR:
        step = "name a file in that folder"
    elif number in (errno.ENOENT, errno.ENOTDIR):
        return BadInput(f"cannot write {what}: there is no folder {path.parent}", str(path), f"mkdir -p {path.parent}")
    return BadInput(f"cannot write {what}: {_reason(error)}", str(path), step)


def _reason(error: OSError | ValueError) -> str:
    return error.strerror or str(error) if isinstance(error, OSError) else str(error)
