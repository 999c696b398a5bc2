"""Compile times by phase, for the plan, and a progress line on a terminal."""
from __future__ import annotations

import sys
import time
from typing import Any

import torch.distributed as dist

_open: list[compile_phase] = []
"""Phases that this process is in, the innermost last."""


class compile_phase:  # noqa: N801  # reads as a statement
    """Context manager of one compile phase: adds its time, without that of nested phases, to `seconds[what]`, in seconds.
    Meanwhile, rank 0's terminal shows `text`."""

    def __init__(self, what: str, text: str, seconds: dict[str, float]) -> None:
        self.what, self.text, self.seconds, self.detail = what, text, seconds, ""
        self.inside_s = 0.0

    def __enter__(self) -> None:
        _open.append(self)
        _show()
        self.start = time.perf_counter()

    def __exit__(self, *_: Any) -> None:
        took = time.perf_counter() - self.start
        _open.remove(self)
        self.seconds[self.what] = self.seconds.get(self.what, 0.0) + took - self.inside_s
        if _open:
            _open[-1].inside_s += took
        _show()


def part(what: str, text: str) -> compile_phase:
    """A phase nested in another one: its time counts for the same graph, and its line begins with that graph's name, if any."""
    if not _open:
        return compile_phase(what, text, {})
    name, colon, _ = _open[-1].text.rpartition(": ")
    return compile_phase(what, f"{name}{colon}{text}", _open[-1].seconds)


def tell(detail: str) -> None:
    """Show the progress of the innermost phase: "block 3 of 5"."""
    if _open:
        _open[-1].detail = f", {detail}"
        _show()


def _show() -> None:
    """Write or erase the progress line: only on a terminal, so that log files have none of it."""
    if not sys.stderr.isatty() or dist.is_initialized() and dist.get_rank() != 0:
        return
    print("\r\x1b[K" + (f"hpml: {_open[-1].text}{_open[-1].detail} ..." if _open else ""), end="", file=sys.stderr, flush=True)
