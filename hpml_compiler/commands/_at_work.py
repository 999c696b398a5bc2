"""Progress display of commands; keeps stdout for their results."""
from __future__ import annotations

import contextlib
import ctypes
import os
import sys
from collections.abc import Iterator
from typing import Any


@contextlib.contextmanager
def at_work() -> Iterator[Any]:
    """Yield a function that reports progress; output printed meanwhile goes to stderr."""
    with _stdout_to_stderr(), _progress() as progress:
        yield progress


@contextlib.contextmanager
def _progress() -> Iterator[Any]:
    """Yield a function that reports progress: a spinner on a terminal, nothing elsewhere."""
    if not sys.stderr.isatty():
        yield lambda text: None
        return
    from rich.console import Console

    with Console(stderr=True).status("starting") as status:
        yield status.update


@contextlib.contextmanager
def _stdout_to_stderr() -> Iterator[None]:
    """Redirect stdout to stderr, for prints of the model's code and for solvers that write to the file descriptor: stdout
    carries only the table or the JSON object."""
    sys.stdout.flush()
    kept = os.dup(1)
    os.dup2(2, 1)
    try:
        with contextlib.redirect_stdout(sys.stderr):
            yield
    finally:
        ctypes.CDLL(None).fflush(None)  # a solver in C may have buffered lines for stdout if it is a pipe
        os.dup2(kept, 1)
        os.close(kept)
