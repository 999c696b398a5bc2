"""Events of a run: uncaught errors, hpml's warnings, and the end of the process, noted while a monitor is open."""
from __future__ import annotations

import atexit
import logging
import os
import sys
from collections.abc import Callable
from types import TracebackType
from typing import Any

Note = Callable[[str, str], None]
log = logging.getLogger("hpml")


class WarningEvents(logging.Handler):
    """Passes on hpml's warnings and errors, such as those of late ranks, as events."""

    def __init__(self, note: Note) -> None:
        super().__init__(logging.WARNING)
        self.note = note

    def emit(self, record: logging.LogRecord) -> None:
        self.note("error" if record.levelno >= logging.ERROR else "warning", record.getMessage())


class ProcessEvents:
    """note(event, text): receives "failed" for an uncaught error, and warnings. over(): is called at the end of the process."""

    def __init__(self, note: Note, over: Callable[[], None]) -> None:
        self.note, self.over, self._process = note, over, os.getpid()
        self._warnings, self._before = WarningEvents(note), sys.excepthook
        log.addHandler(self._warnings)
        sys.excepthook = self._uncaught
        atexit.register(self._exit)

    def close(self) -> None:
        log.removeHandler(self._warnings)
        if sys.excepthook == self._uncaught:
            sys.excepthook = self._before
        atexit.unregister(self._exit)

    def _uncaught(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> Any:
        if os.getpid() == self._process:
            self.note("failed", f"{kind.__name__}: {error}"[:2000])
        return self._before(kind, error, trace)

    def _exit(self) -> None:
        if os.getpid() == self._process:
            self.over()
