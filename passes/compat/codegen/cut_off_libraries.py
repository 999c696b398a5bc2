"""Compile a C++ kernel again whose library, or whose precompiled header, was cut off.

The compiler writes both to the place from which they are read. A process that is killed meanwhile leaves a part, which inductor
takes for the whole: each later run on the machine that needs this kernel would end with "file too short", and after a part of
the header, each that needs any kernel, with "cannot read PCH file".
"""
from __future__ import annotations

import itertools
import logging
import os
import re
import struct
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType

from torch.utils._filelock import FileLock

log = logging.getLogger("hpml")
_ELF = struct.Struct("<4s36xQ10x3H")
"""The ELF header of a 64-bit library: its first bytes, where its table of sections begins, the size of an entry, and their
number. Nothing follows the table."""
_UNREADABLE = re.compile(r"\bPCH\b|precompiled header")


def loaded(load: Callable[[], ModuleType]) -> ModuleType:
    """The library that `load` compiles where its file does not exist. Compiled again if that file is only a part of it, or if
    the precompiled header cannot be read."""
    from torch._inductor.exc import CppCompileError  # loads inductor

    try:
        return load()
    except CppCompileError as error:
        if not _UNREADABLE.search(error.output) or not _without_header(error.cmd):
            raise
    except ImportError as error:
        if error.path is None:
            raise
        _remove_part(error.path)  # unless another process has compiled it again by now
        sys.modules.pop(error.name or "", None)
    return load()


def _without_header(command: Sequence[str]) -> bool:
    """Remove the precompiled header of a call of the compiler, which then reads the header itself; later processes compile it
    again. Returns False if the call names none."""
    words = " ".join(command).split()
    header = next((f"{after}.gch" for word, after in itertools.pairwise(words) if word == "-include"), None)
    if header is not None:
        log.warning("%s, which the C++ compiler cannot read, is removed: a process that is killed leaves a part of it", header)
        Path(header).unlink(missing_ok=True)
    return header is not None


def _remove_part(path: str) -> None:
    from torch._inductor.codecache import LOCK_TIMEOUT, get_lock_dir  # loads inductor

    key = os.path.basename(path).partition(".")[0]
    with FileLock(os.path.join(get_lock_dir(), f"{key}.lock"), timeout=LOCK_TIMEOUT):  # which who compiles it holds, too
        if os.path.exists(path) and not is_whole(path):
            log.warning("%s is compiled again: it is a part of a library, which a process that is killed leaves", path)
            os.remove(path)


def is_whole(path: str) -> bool:
    """False if the file is a part of a library for Linux."""
    if sys.platform != "linux":
        return True
    with open(path, "rb") as file:
        header = file.read(_ELF.size)
    if len(header) < _ELF.size:
        return False
    magic, at, entry, count, _ = _ELF.unpack(header)
    return magic == b"\x7fELF" and at + entry * count <= os.path.getsize(path)
