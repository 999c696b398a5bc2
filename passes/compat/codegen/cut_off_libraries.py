"""Compile a C++ kernel again whose library was cut off.

The compiler writes a library to the place from which it is loaded. A process that is killed meanwhile leaves a part of it,
which inductor takes for the whole: each later run on the machine that needs this kernel would end with "file too short".
"""
from __future__ import annotations

import logging
import os
import struct
import sys
from collections.abc import Callable
from types import ModuleType

from torch.utils._filelock import FileLock

log = logging.getLogger("hpml")
_ELF = struct.Struct("<4s36xQ10x3H")
"""The header of a 64-bit library: its first bytes, where its table of sections begins, and that table's entry size and length.
Nothing follows the table."""


def loaded(load: Callable[[], ModuleType]) -> ModuleType:
    """The library that `load` compiles where its file does not exist. Compiled again if that file is only a part of it."""
    try:
        return load()
    except ImportError as error:
        if error.path is None or is_whole(error.path):
            raise
        _remove(error.path)
        sys.modules.pop(error.name or "", None)
    return load()


def _remove(path: str) -> None:
    from torch._inductor.codecache import LOCK_TIMEOUT, get_lock_dir

    key = os.path.basename(path).partition(".")[0]
    with FileLock(os.path.join(get_lock_dir(), f"{key}.lock"), timeout=LOCK_TIMEOUT):  # which who compiles it holds, too
        if os.path.exists(path) and not is_whole(path):
            log.warning("%s is compiled again: it is a part of a library, as a process leaves that is killed meanwhile", path)
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
