"""Per-node compile lock: one process compiles each graph, and its peers read inductor's cache.

While a process compiles a graph, its peers compile the graphs that they need next. A process waits at most for a compilation
that is in progress: each graph has a file lock, which the operating system releases when its owner ends, even by a crash.
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
"""Number of lock files in that folder: graphs that share one by chance wait for each other."""
LONGEST_WAIT_S = 600.0  # as long as inductor waits for a kernel that another process compiles


@dataclass(frozen=True)
class CompileJob(Generic[T]):
    """A graph to compile. name: equal for graphs that share an entry of inductor's cache; None for uncacheable ones."""

    name: str | None
    compile: Callable[[], T]


def job_key(gm: GraphModule, inputs: Sequence[Any], *how: Hashable) -> str | None:
    """Name of a graph's `CompileJob`, or None. how: other values that the compiled code depends on."""
    if not compat.is_inductor_cacheable(gm):
        return None
    described = [(tuple(x.shape), x.stride(), x.dtype, x.device) if isinstance(x, torch.Tensor) else x for x in inputs]
    return hashlib.sha256(repr((gm.code, described, how)).encode()).hexdigest()


class Prefetch:
    """Graphs to compile ahead of time. Their code is not returned; it is only in inductor's cache, for any process."""

    def __init__(self, jobs: Callable[[], Iterable[CompileJob[Any]]] = tuple) -> None:
        self._make, self.left = jobs, None

    def one(self) -> bool:
        """Compile the next graph that no other process is compiling; returns whether there was one."""
        self.left = [*self._make()] if self.left is None else self.left
        return any(_done(self.left.pop(0), 0.0) for _ in self.left[:])

    def all(self) -> None:
        while self.one():
            pass


def compile_in_order(jobs: Sequence[CompileJob[T]], ahead: Prefetch | None = None) -> Iterator[tuple[int, T]]:
    """Compile all jobs and yield each result with its number, jobs that no other process is compiling first. While the rest
    are locked, compile graphs of `ahead` instead of waiting."""
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
    """The compiled job; None where another process holds its lock for longer than `wait_s`."""
    with _locked(job, wait_s) as mine:
        return _CompiledJob(job.compile()) if mine else None


@contextlib.contextmanager
def _locked(job: CompileJob[Any], timeout_s: float) -> Iterator[bool]:
    """Lock a job; yields False if another process holds the lock. Yields True where locking is not possible."""
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
        log.debug("every process compiles its own copy of each graph: %s cannot be locked: %s", path, error)
        yield True
        return
    try:
        yield True
    finally:
        lock.release()


def _path(name: str) -> Path | None:
    """Lock file; None where inductor's cache is off, or its folder cannot be written."""
    kept = compat.inductor_cache_folder()
    if kept is None:
        return None
    folder = Path(kept) / FOLDER
    try:
        make_private_folder(folder)
    except OSError as error:
        log.debug("every process compiles its own copy of each graph: %s", error)
        return None
    return folder / f"{int(name, 16) % LOCKS}.lock"
