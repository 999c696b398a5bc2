"""While a command works: stdout is kept for its answer, and a terminal is told what is being done."""
from __future__ import annotations

import contextlib
import ctypes
import os
import sys
from collections.abc import Iterator
from typing import Any


@contextlib.contextmanager
def at_work() -> Iterator[Any]:
    """A function that says what is being done; what is printed meanwhile goes to stderr."""
    with _stdout_to_stderr(), _progress() as tell:
        yield tell


@contextlib.contextmanager
def _progress() -> Iterator[Any]:
    """A function that says what is being done: a spinner on a terminal, nothing elsewhere."""
    if not sys.stderr.isatty():
        yield lambda text: None
        return
    from rich.console import Console

    with Console(stderr=True).status("starting") as status:
        yield status.update


@contextlib.contextmanager
def _stdout_to_stderr() -> Iterator[None]:
    """What the model's code prints, and what a solver writes to the file descriptor itself, goes to stderr: stdout
    carries the table or the JSON object alone."""
    sys.stdout.flush()
    kept = os.dup(1)
    os.dup2(2, 1)
    try:
        with contextlib.redirect_stdout(sys.stderr):
            yield
    finally:
        ctypes.CDLL(None).fflush(None)  # a solver in C may still hold lines for a stdout that is a pipe
        os.dup2(kept, 1)
        os.close(kept)
