"""This rank's status (location, call count), published by `heartbeat`. Updating it takes less than 0.1 us."""
from __future__ import annotations

import sys
import sysconfig
import threading
import time
from pathlib import Path
from typing import Any, cast

import torch


class Location:
    """A place in the program that all ranks reach: a half of a graph, the optimizer's step, a wait for a plan. entered: how
    often a rank came here from another place."""

    __slots__ = ("calls", "entered", "what")

    def __init__(self, what: str) -> None:
        self.what, self.calls, self.entered = what, 0, 0

    def __str__(self) -> str:
        return f"{self.what}, call {self.calls}" if self.calls else self.what


START = Location("the start of the script")


class RankStatus:
    """Part of the session's state. `at`: latest location; `inside`: whether this rank is still there. `calls` and `meetings`
    count calls of graphs and barriers (`barrier_check`); `meets`: purpose of the current barrier. `failed`: the call of a graph
    that failed here, with its error, until it is known to have failed on all ranks. Written by the main thread."""

    __slots__ = ("at", "calls", "failed", "inside", "meetings", "meets", "raised")

    def __init__(self) -> None:
        self.at, self.inside, self.raised = START, False, ""
        self.calls = self.meetings = 0
        self.meets = self.failed = ""

    def place(self) -> str:
        return f"in {self.at}" if self.inside else f"after {self.at}"


_LIBRARIES = ("<", *(str(Path(path).resolve()) for path in (
    Path(torch.__file__).parent, Path(__file__).parents[2], Path(__file__).parents[3] / "passes",
    Path(threading.__file__).parent,
    *(sysconfig.get_paths()[name] for name in ("purelib", "platlib")))))


def line_of_script() -> str:
    """Location of the main thread in the user's code: `train.py:57 in evaluate`; "" if it is in none."""
    return _script_line(sys._current_frames().get(threading.main_thread().ident or 0))[0]


def call_of_script() -> str:
    """The torch function that the user's code calls in this thread, and from where: `argmax at train.py:57 in evaluate`."""
    line, call = _script_line(sys._getframe(1))
    return f"{call} at {line}" if line else call


def _script_line(frame: Any) -> tuple[str, str]:
    """The innermost line of the user's code, "" if there is none, and the function that it calls: of torch's, the one that
    came to a class of tensors."""
    call, handled = "", ""
    while frame is not None:
        code = frame.f_code
        if not code.co_filename.startswith(_LIBRARIES):
            return f"{Path(code.co_filename).name}:{frame.f_lineno} in {code.co_name}", handled or call
        call = code.co_name
        if call == "__torch_function__":
            func: Any = frame.f_locals.get("func")
            handled = getattr(func, "__name__", "") or handled
            handled = func.__self__.__name__ if handled == "__get__" else handled
        frame = frame.f_back
    return "", handled or call


def collective_of_script() -> tuple[str, int]:
    """(name, id) of the torch.distributed collective that the main thread is in, such as "barrier", or ("", 0). The id stays
    the same during one call."""
    frame: Any = sys._current_frames().get(threading.main_thread().ident or 0)
    found = "", 0
    while frame is not None:
        name = frame.f_code.co_name
        if frame.f_code.co_filename.endswith("distributed_c10d.py") and not name.startswith(("_", "wrapper")):
            found = name, id(frame)
        frame = frame.f_back
    return found


class StallWatch:
    """Measures how long this rank has been at its location; to be polled about once a second."""

    def __init__(self, status: RankStatus) -> None:
        self.status, self.seen = status, cast("Any", None)
        self.since = time.monotonic()

    def age_s(self) -> float:
        now = self.status.at, self.status.at.calls, self.status.inside
        if now != self.seen:
            self.seen, self.since = now, time.monotonic()
        return time.monotonic() - self.since
