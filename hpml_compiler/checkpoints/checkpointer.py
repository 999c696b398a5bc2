"""Checkpointer: saves a training run in the background, and resumes it from the newest whole checkpoint."""
from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from hashlib import blake2b
from importlib.metadata import PackageNotFoundError, version
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn

from hpml_compiler.checkpoints.checkpoint_folder import CheckpointFolder
from hpml_compiler.checkpoints.read_checkpoint import CheckpointReader, newest_whole
from hpml_compiler.checkpoints.run_state import CALLED, RunState
from hpml_compiler.checkpoints.save_queue import SaveQueue
from hpml_compiler.checkpoints.staged_tensors import StagingBuffers
from hpml_compiler.checkpoints.stop_signals import STOPPED, StopSignals, log
from hpml_compiler.checkpoints.write_checkpoint import CheckpointWriter, Saving
from hpml_compiler.run_recording.recorder import open_monitor
from hpml_compiler.runtime.process.world_group import ensure_process_group, from_all_ranks, this_rank, world_size
from hpml_compiler.runtime.watchdog.activity_scope import activity
from hpml_compiler.session.session import current
from passes.errors import BadInput, HpmlError

T = TypeVar("T")


class Checkpointer:
    """Checkpoints of a training run in a folder::

        checkpointer = hpml_compiler.Checkpointer("runs/a", model, optimizer, scheduler=scheduler, loader=loader, every=100)
        step = checkpointer.resume()                # 0, or the number of steps that the newest whole checkpoint has
        ...
            checkpointer.step(step)                 # after each step

    folder: a path, or a URL of fsspec. model: also as compiled. optimizer, scheduler: one, or a list. loader: the result of
    `hpml_compiler.distribute`, a torchdata.StatefulDataLoader, or another object with a state dict. extra: name -> object with
    a state dict, such as a GradScaler. every: steps between checkpoints; None saves on signals and `save` only. keep: newest
    checkpoints to keep; None keeps all. background: write while training goes on; needs host memory for up to two copies of
    this rank's state.

    All ranks make it, and call its methods, together. After SIGTERM or SIGUSR1, `step` saves and exits with code 75.
    """

    def __init__(self, folder: str | os.PathLike[str], model: nn.Module,
                 optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] = (), *, scheduler: Any = (),
                 loader: Any = None, extra: Mapping[str, Any] | None = None, every: int | None = None, keep: int | None = 3,
                 background: bool = True) -> None:
        _check_numbers(every, keep)
        self.every, self.keep, self._background = every, keep, background
        self._state = RunState(model, _listed(optimizer), _listed(scheduler), loader, extra or {})
        self._folder = CheckpointFolder(folder)
        ensure_process_group()
        _together(lambda: self._folder.create() if this_rank() == 0 else None)
        self._writer = CheckpointWriter(self._folder, _own_group())
        self._signals = StopSignals(_own_group())
        self._queue, self._buffers = SaveQueue(), StagingBuffers()
        self._begins: int | None = None
        """The step that comes first after `resume`, until it is done."""

    def resume(self) -> int:
        """Load the newest whole checkpoint; returns the number of steps that it has, or 0 without one.

        A damaged one is passed over, with a warning that names the file. Raises BadInput if all are damaged, or if they are
        those of another model.
        """
        self._queue.wait()
        with activity("resuming from a checkpoint"):
            if this_rank() == 0:
                self._folder.remove_unfinished()
            found = newest_whole(self._folder)
            self._begins = 0 if found is None else found.step
            if found is None:
                return 0
            _together(lambda: self._state.restore(CheckpointReader(self._folder, found)))
        if (monitor := open_monitor()) is not None:
            monitor.resumed(found.step)
        if this_rank() == 0:
            log.info("resumed from the checkpoint of step %d in %s", found.step, self._folder.given)
        return found.step

    def step(self, k: int) -> None:
        """Note that step k (from 0) is done, and save where it is due.

        After a signal, raises SystemExit(75) when the checkpoint is complete. Raises BadInput if an earlier save failed, or if
        steps seem to be counted from 1."""
        if self._begins is not None and k == self._begins + 1:
            raise BadInput(f"step({k}) is the first call after resume() returned {self._begins}, so that checkpoints would "
                           "have one step more than was done: steps are counted from 0", f"{CALLED}.step",
                           "call step(k) before k goes up, or step(k - 1) after that")
        self._begins = None
        signal_name = self._signals.agreed()
        if signal_name is not None:
            self.save(k, wait=True)
            if this_rank() == 0:
                log.warning("%s: saved the checkpoint of step %d, and ends with exit code %d", signal_name, k + 1, STOPPED)
            self.close()
            sys.exit(STOPPED)
        if self.every is not None and (k + 1) % self.every == 0:
            self.save(k)

    def save(self, k: int, wait: bool = False) -> None:
        """Save the state after step k. wait: return when the checkpoint is complete."""
        in_background = self._background and not wait
        with activity("saving a checkpoint"):
            tensors, state, own = _together(self._state.collect)
            staged = self._buffers.stage(tensors, copy=in_background)
            saving = Saving(k + 1, staged, {"step": k + 1, **state}, own, _writer_facts(), self.keep)
            self._queue.put(lambda: self._written(saving, in_background))
            if (monitor := open_monitor()) is not None:
                monitor.note("checkpoint", f"of step {k + 1}")
            if not in_background:
                self._queue.wait()

    def _written(self, saving: Saving, staged: bool) -> HpmlError | None:
        try:
            return self._writer.write(saving)
        finally:
            if staged:
                self._buffers.give_back(saving.staged)

    @property
    def run_state(self) -> RunState:
        """The objects whose state is saved."""
        return self._state

    def has(self, steps: int) -> bool:
        """True if there is a checkpoint after this number of steps. All ranks call it."""
        return from_all_ranks(this_rank() == 0 and steps in self._folder.steps())[0]

    def give_up_saves(self) -> None:
        """Drop the checkpoints in flight: ranks that wrote a part are gone."""
        self._queue.give_up()

    def regroup(self) -> None:
        """Go on with the present process group of all ranks, after `give_up_saves`. All of its ranks call it."""
        self._writer = CheckpointWriter(self._folder, _own_group())
        self._signals.regroup(_own_group())
        if this_rank() == 0:
            self._folder.remove_unfinished()

    def wait(self) -> None:
        """Wait until the checkpoints in flight are complete. Raises the error of the first that failed."""
        self._queue.wait()

    def close(self) -> None:
        """Wait for the checkpoints in flight and restore the signal handlers. To be called before the process group is
        destroyed; the end of the script does it too."""
        try:
            self._queue.close()
        finally:
            self._signals.close()

    def __enter__(self) -> Checkpointer:
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()


def _check_numbers(every: Any, keep: Any) -> None:
    for name, value in (("every", every), ("keep", keep)):
        if value is not None and (type(value) is not int or value < 1):
            raise BadInput(f"{name}={value!r} is not a positive number", CALLED, f"give a number of at least 1, or {name}=None")


def _listed(value: Any) -> list[Any]:
    return list(value) if isinstance(value, (list, tuple)) else [value] if value is not None else []


def _own_group() -> dist.ProcessGroup | None:
    """A group of all ranks on the host. Writing takes as long as it takes; a rank that is gone closes its connections."""
    made: Any = dist.new_group(backend="gloo", timeout=timedelta(hours=24)) if world_size() > 1 else None
    return made


def _together(work: Callable[[], T]) -> T:
    """The result of something that may fail on one rank alone. If it does, all ranks raise its error."""
    result, problem = None, None
    try:
        result = work()
    except (HpmlError, OSError) as error:
        problem = error
    problems = from_all_ranks(problem if isinstance(problem, HpmlError) or problem is None else BadInput(
        f"a checkpoint cannot be read: {problem}", f"rank {this_rank()}", "check the file system"))
    first = next((each for each in problems if each is not None), None)
    if first is not None:
        raise first from problem
    return result  # type: ignore[return-value]


def _writer_facts() -> dict[str, Any]:
    """Origin of a checkpoint: releases, number of ranks, mesh, and a stamp of the plan (graphs and options)."""
    session = current()
    stamp = blake2b(repr((session.trail, session.mesh, session.options)).encode(), digest_size=8).hexdigest()
    return {"hpml": _version("hpml-compiler"), "torch": str(torch.__version__), "ranks": world_size(),
            "mesh": dict(session.mesh or {}), "plan": stamp}


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:  # run from its sources
        return ""


