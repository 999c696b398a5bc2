"""Processes of one node that compile equal graphs at once: each graph is compiled by the one that comes first, while others
compile what they need next, and then read inductor's cache.

Nobody waits longer than compiling takes that began before: a graph has a lock, which the system lifts when a process ends,
however it ends.
"""
from __future__ import annotations

import contextlib
import hashlib
import logging
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

import filelock
import torch
from torch.fx import GraphModule

from passes import compat
from passes.filesystem.private_files import make_private_folder

log = logging.getLogger("hpml")

T = TypeVar("T")
FOLDER = "hpml_turns"
LOCKS = 4096
"""Files in that folder: graphs that share one by chance wait for each other."""
LONGEST_WAIT_S = 600.0  # as long as inductor waits for a kernel that another process compiles


@dataclass(frozen=True)
class CompileJob(Generic[T]):
    """What is compiled. name: equal for what inductor's cache knows as equal; None for what it does not keep."""

    name: str | None
    compile: Callable[[], T]


def job_key(gm: GraphModule, inputs: Sequence[Any], *how: Hashable) -> str | None:
    """What a graph is called among those that are compiled. how: what else the compiled code depends on."""
    if not compat.is_inductor_cacheable(gm):
        return None
    described = [(tuple(x.shape), x.stride(), x.dtype, x.device) if isinstance(x, torch.Tensor) else x for x in inputs]
    return hashlib.sha256(repr((gm.code, described, how)).encode()).hexdigest()


class Prefetch:
    """What will be compiled next. What comes out of it is only in inductor's cache, for whoever asks."""

    def __init__(self, jobs: Callable[[], Iterable[CompileJob[Any]]] = tuple) -> None:
        self._make, self.left = jobs, None

    def one(self) -> bool:
        """Compile one that nobody else is at; whether there was any."""
        self.left = [*self._make()] if self.left is None else self.left
        return any(_done(self.left.pop(0), 0.0) for _ in self.left[:])

    def all(self) -> None:
        while self.one():
            pass


def compile_in_order(jobs: Sequence[CompileJob[T]], ahead: Prefetch | None = None) -> Iterator[tuple[int, T]]:
    """Compile all of these, each with its number, those first that nobody else is at; of what comes next as much as can be
    done where there would be nothing to do but wait."""
    waiting, ahead = list(enumerate(jobs)), ahead or Prefetch()
    while waiting:
        for number, job in waiting[:]:
            if (done := _done(job, 0.0)) is not None:
                waiting.remove((number, job))
                yield number, done.call
        if waiting and not ahead.one():
            number, job = waiting.pop(0)
            yield number, (_done(job, LONGEST_WAIT_S) or _CompiledJob(job.compile())).call


@dataclass(frozen=True)
class _CompiledJob(Generic[T]):
    call: T


def _done(job: CompileJob[T], wait_s: float) -> _CompiledJob[T] | None:
    """None where another is at it for longer."""
    with _locked(job, wait_s) as mine:
        return _CompiledJob(job.compile()) if mine else None


@contextlib.contextmanager
def _locked(job: CompileJob[Any], timeout_s: float) -> Iterator[bool]:
    """Whether nobody else compiles this meanwhile, or none can tell."""
    path = None if job.name is None else _path(job.name)
    if path is None:
        yield True
        return
    lock = filelock.FileLock(path, mode=0o600)
    try:
        lock.acquire(timeout=timeout_s)
    except filelock.Timeout:
        yield False
        return
    except (OSError, NotImplementedError) as error:
        log.debug("graphs are not compiled in turn, %s cannot be locked: %s", path, error)
        yield True
        return
    try:
        yield True
    finally:
        lock.release()


def _path(name: str) -> Path | None:
    """None where compiled code is not kept for others, or its folder cannot be written."""
    kept = compat.inductor_cache_folder()
    if kept is None:
        return None
    folder = Path(kept) / FOLDER
    try:
        make_private_folder(folder)
    except OSError as error:
        log.debug("graphs are not compiled in turn: %s", error)
        return None
    return folder / f"{int(name, 16) % LOCKS}.lock"
