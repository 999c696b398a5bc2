"""Run one function on several ranks, each a process of its own, and collect what it returns."""
from __future__ import annotations

import contextlib
import faulthandler
import multiprocessing
import multiprocessing.connection
import multiprocessing.forkserver
import os
import pickle
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

GROUP_TIMEOUT_S = 30  # of a collective: a rank left alone by its peer says so instead of using up the test's time
# One thread per rank, and inductor compiles in the rank itself: ranks share few cores, and a pool would outlive them.
AFTER_FAILURE_S = 1.0
THREADS = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "TORCHINDUCTOR_COMPILE_THREADS": "1"}
# What nearly every rank imports, much of it while it compiles for the first time: imported once, or 2.5 s of each rank.
IMPORTED = ["torch", "torch.distributed.tensor", "torch.distributed.tensor.experimental._attention", "torch._dynamo.testing",
            "torch._inductor.compile_fx", "torch._inductor.compiler_bisector", "torch._dynamo.backends.inductor",
            "torch._dynamo.backends.distributed", "torch._dynamo.backends.torchxla", "torch._dynamo.backends.tvm",
            "torch._dynamo.repro.after_dynamo", "torch._functorch._aot_autograd.subclass_codegen", "torch.export._trace",
            "torch.fx.experimental.validator", "sympy.combinatorics", "pulp", "highspy", "hpml_compiler.backend",
            "hpml_compiler.compile.dispatch", "hpml_compiler.compile.decide.graph_decisions",
            "hpml_compiler.compile.decide.stage_agreement", "hpml_compiler.compile.program.program_builder",
            "hpml_compiler.compile.program.stage_cutter", "hpml_compiler.compile.wrapper.stage_outputs",
            "hpml_compiler.planner.joint.graph_search", "hpml_compiler.profile.quick_profile", "passes.presets", "pytest",
            "tests.helpers.frozen"]
_STARTS = threading.Lock()  # a test may launch from several threads, which share their environment


@dataclass(frozen=True)
class RankFailure:
    """What stands in a rank's place when it did not return.

    `error` is its traceback, or a line that says how it ended; `exitcode` is negative for a signal, None if the
    rank was still running when its time was up; `log` is what it wrote to stdout and stderr.
    """

    rank: int
    error: str
    exitcode: int | None
    log: str

    def __str__(self) -> str:
        log = f"\n--- its output ---\n{self.log[-4000:]}" if self.log.strip() else ""
        return f"rank {self.rank}: {self.error.rstrip()}{log}"


class RanksFailed(RuntimeError):
    """At least one rank failed; `failures` lists them, the first to fail first."""

    def __init__(self, failures: list[RankFailure]) -> None:
        super().__init__("\n\n".join(str(f) for f in failures))
        self.failures = failures


def run_ranks(folder: Path, fn: Callable[..., Any], world_size: int = 2, args: tuple = (), timeout_s: float = 200,
              init: bool = True, check: bool = True) -> list[Any]:
    """Call `fn(rank, *args)` on `world_size` new processes and return their results, in order of rank.

    `fn` must be a module-level function; it, `args` and what it returns are pickled. Each process has RANK,
    WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR and MASTER_PORT, so `init_process_group` works,
    and the caller's environment otherwise (what torch reads while it is imported is read once, though);
    with `init` a gloo group with a timeout of 30 s is made (and destroyed) around the call.

    check=True: the first rank that fails ends the others, and RanksFailed carries the tracebacks.
    check=False: for tests of failure itself. Nobody is ended before `timeout_s`, and the list holds a
    `RankFailure` for each rank that did not return.
    """
    folder = Path(tempfile.mkdtemp(prefix="ranks-", dir=folder))
    # The store lives here: its port is picked by the system, and no rank's end takes it away from the others.
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    work = pickle.dumps((fn, args))
    context = _context()
    processes = [
        context.Process(target=_rank_main, args=(str(folder), work, _environment(rank, world_size, store.port), init,
                                                 timeout_s), name=f"rank{rank}")
        for rank in range(world_size)
    ]
    try:
        for process in processes:
            process.start()
        ended = _wait(processes, timeout_s, stop_at_failure=check)
        exitcodes = [process.exitcode for process in processes]  # before the kill: None is still running
    finally:
        for process in processes:
            _kill(process)
        del store
    outcomes = [_outcome(folder, rank, exitcode, timeout_s) for rank, exitcode in enumerate(exitcodes)]
    for rank in range(world_size):
        print(_log(folder, rank), end="")
    if not check:
        return outcomes
    failures = [outcomes[rank] for rank in ended if isinstance(outcomes[rank], RankFailure)]
    if not failures:  # nobody failed by itself; whoever is still running has used up the time
        failures = [outcome for outcome in outcomes if isinstance(outcome, RankFailure)]
    if failures:
        raise RanksFailed(failures)
    return outcomes


def _context() -> Any:
    """Processes forked from a server that has imported what they need (0.1 s each), or fresh ones where CUDA forbids forks."""
    if torch.cuda.is_available():
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(IMPORTED)
    with _STARTS:
        before = {name: os.environ.get(name) for name in THREADS}
        os.environ.update(THREADS)  # OpenMP reads them once, when the server loads torch
        try:
            multiprocessing.forkserver.ensure_running()
        finally:
            for name, value in before.items():
                os.environ.pop(name)
                if value is not None:
                    os.environ[name] = value
    return context


def _environment(rank: int, world_size: int, port: int) -> dict[str, str]:
    return {
        **os.environ, **THREADS, "RANK": str(rank), "WORLD_SIZE": str(world_size), "LOCAL_RANK": str(rank),
        "LOCAL_WORLD_SIZE": str(world_size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
        # as under torchrun: rank 0 is a client of the store too
        "TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": "0",
    }


def _rank_main(folder: str, work: bytes, environment: dict[str, str], init: bool, timeout_s: float) -> None:
    os.environ.clear()  # the server's, as it was when the first test launched
    os.environ.update(environment)
    os.setsid()  # so that whatever this rank starts can be ended with it
    _exit_with_parent()
    rank = int(environment["RANK"])
    log = os.open(f"{folder}/log{rank}", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    faulthandler.enable(file=2)  # a rank that dies of a signal shows where, too
    faulthandler.dump_traceback_later(max(timeout_s - 1, timeout_s / 2), file=2)  # a rank that hangs shows where
    torch.set_num_threads(1)
    try:
        if init:
            dist.init_process_group("gloo", timeout=timedelta(seconds=GROUP_TIMEOUT_S))
        fn, args = pickle.loads(work)
        outcome = pickle.dumps((True, fn(rank, *args)))
    except BaseException:
        outcome = pickle.dumps((False, traceback.format_exc()))
    sys.stdout.flush()  # into the log, which is read as soon as there is a result
    partial = Path(folder, f"partial{rank}")
    partial.write_bytes(outcome)
    partial.rename(Path(folder, f"result{rank}"))
    if not pickle.loads(outcome)[0]:
        os._exit(1)  # at once: leaving in good order may wait for peers
    if dist.is_initialized():
        dist.destroy_process_group()


def _exit_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None

    def watch() -> None:
        parent.join()
        os.killpg(0, signal.SIGKILL)

    threading.Thread(target=watch, daemon=True).start()


def _wait(processes: list[Any], timeout_s: float, stop_at_failure: bool) -> list[int]:
    """Ranks in the order in which they ended, up to the time limit or, if asked, a moment after the first failure: the rank
    that others fail of may end after them, since its connections are closed before its memory is given back."""
    deadline = time.monotonic() + timeout_s
    running = {process.sentinel: rank for rank, process in enumerate(processes)}
    ended: list[int] = []
    while running and time.monotonic() < deadline:
        ready = multiprocessing.connection.wait(list(running), timeout=max(0.0, deadline - time.monotonic()))
        for rank in [running.pop(sentinel) for sentinel in ready]:
            processes[rank].join(timeout=5)  # the sentinel is a pipe, closed a moment before the exit code is there
            ended.append(rank)
        failed = any(processes[rank].exitcode != 0 for rank in ended)
        if failed and stop_at_failure:
            deadline = min(deadline, time.monotonic() + AFTER_FAILURE_S)
    return ended


def _kill(process: Any) -> None:
    if process.pid is None:
        return
    with contextlib.suppress(ProcessLookupError):  # its group: also what it started
        os.killpg(process.pid, signal.SIGKILL)
    if process.is_alive():  # not yet the leader of a group
        process.kill()
    process.join()


def _log(folder: Path, rank: int) -> str:
    path = folder / f"log{rank}"
    return path.read_text(errors="replace") if path.exists() else ""


def _outcome(folder: Path, rank: int, exitcode: int | None, timeout_s: float) -> Any:
    path = folder / f"result{rank}"
    returned, value = pickle.loads(path.read_bytes()) if path.exists() else (False, None)
    if returned and exitcode == 0:
        return value
    if returned:
        error = f"returned, but then did not end well (exit code {exitcode}; None: still running after {timeout_s} s)"
    elif value is not None:
        error = value
    elif exitcode is None:
        error = f"still running when its time was up or a peer failed (limit {timeout_s} s)"
    else:
        error = f"ended with exit code {exitcode} and no result"
    return RankFailure(rank, error, exitcode, _log(folder, rank))
