"""Kill ranks with signal 9 in each phase of a recovery, and time recoveries by phase.

    python benchmarks/lost_ranks.py kills [--modes dp tp pp zero3 budget] [--json FILE]
    python benchmarks/lost_ranks.py times [--modes dp] [--count 10] [--json FILE]

kills: three ranks under `hpml run --replace`. In each phase (noticed, formed, loaded, planned, compiled, step), each of the
ranks is killed once, one after another in one run: when the process that replaces the one before has joined. A run hangs if
nothing happens for --patience seconds, and is wrong if a loss is not that of one device (float64, relative 1e-8).

Ranks are forked from a process that has imported torch: a process that joins is there at once.

times: from a kill to the end of the next step, with three ranks of which two go on in process (`--elastic`), and with a restart
of all (`--max-restarts`); medians by phase of --count kills. A phase ends when the last rank has ended it. Plans are in the
cache after the first.
"""
from __future__ import annotations

import argparse
import atexit
import functools
import json
import logging
import multiprocessing
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

BEGUN = time.time()
import torch  # noqa: E402
from torch import nn  # noqa: E402
from torch.utils.data import DataLoader, TensorDataset  # noqa: E402

import hpml_compiler  # noqa: E402
from hpml_compiler.compile.cache.graph_cache import GraphCache  # noqa: E402
from hpml_compiler.compile.decide.graph_decisions import GraphDecisions  # noqa: E402
from hpml_compiler.compile.graph_compiler import GraphCompiler  # noqa: E402
from hpml_compiler.elastic import attempts  # noqa: E402
from hpml_compiler.elastic.launcher import ElasticLauncher  # noqa: E402
from hpml_compiler.elastic.membership import ID, JOINS  # noqa: E402
from hpml_compiler.runtime.process.world_group import this_rank, world_size  # noqa: E402

RANKS, WIDTH, ROWS, EVERY, TOLERANCE = 3, 48, 96, 5, 1e-8
PHASES = ("noticed", "formed", "loaded", "planned", "compiled", "step")
SETTINGS = ("GLOO_SOCKET_IFNAME", "HPML_CACHE", "HPML_CACHE_DIR", "HPML_PG_TIMEOUT_S", "OMP_NUM_THREADS")
PATIENCE_STEPS, BUDGET = 12, "1.2MiB"
STEPS_PER_KILL, SLOW_STEP_S = 25, 0.5  # while a process is about to join


def options_of(mode: str, ranks: int) -> dict[str, Any]:
    of_mode: dict[str, dict[str, Any]] = {
        "dp": {"mesh": {"dp": ranks}, "zero": 0}, "tp": {"mesh": {"tp": ranks}, "redundancy": 1}, "pp": {"mesh": {"pp": ranks}},
        "zero3": {"mesh": {"dp": ranks}, "zero": 3, "redundancy": 1},
        "budget": {"mesh": {"dp": ranks}, "memory_budget": BUDGET}}
    return {"compiler": "eager", "monitor": False, **({} if ranks == 1 else of_mode[mode])}


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(16, WIDTH), nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 1)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Dropout(0.1),
                                                  nn.Linear(2 * WIDTH, WIDTH)) for _ in range(3))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = x + block(self.norm(x))
        return (self.last(x).squeeze(-1) - y).square().mean()


class Marks:
    """Times at which this process ended a phase, and the kills: phases and ranks, in order. each: kill it in every RANKS-th
    step of this many instead."""

    def __init__(self, folder: Path, kills: Sequence[tuple[str, int]], each: int = 0) -> None:
        self._folder, self._kills, self.each = folder, kills, each
        self._file = open(folder / f"marks{os.getpid()}", "a", buffering=1)  # noqa: SIM115

    def killed(self) -> int:
        return len(list(self._folder.glob("killed*")))

    def note(self, phase: str, rank: int, ranks: int, **more: Any) -> None:
        self._file.write(json.dumps({"phase": phase, "rank": rank, "ranks": ranks, "time": time.time(), **more}) + "\n")

    def end(self, phase: str, rank: int | None = None, ranks: int | None = None, **more: Any) -> None:
        """Note the end of a phase, and die if that is the next kill."""
        rank, ranks = this_rank() if rank is None else rank, world_size() if ranks is None else ranks
        self.note(phase, rank, ranks, **more)
        number = self.killed()
        due = ranks == RANKS and number < len(self._kills) and self._kills[number] == (phase, rank)
        if due and gone_on(self._folder):
            self.die(number)

    def die(self, number: int) -> None:
        (self._folder / f"killed{number:03}").write_text(str(time.time()))
        os.kill(os.getpid(), signal.SIGKILL)

    def step(self, steps_of_all: int) -> None:
        """End a step. Where no recovery leads to the next kill, as after a restart of all ranks, begin one: rank 0 dies."""
        self.end("step")
        if not self.each and self.killed() < len(self._kills) and steps_of_all > PATIENCE_STEPS and this_rank() == 0:
            self.note("begins", 0, RANKS)
            os.kill(os.getpid(), signal.SIGKILL)

    def after(self, function: Callable[..., Any], phase: str) -> Callable[..., Any]:
        @functools.wraps(function)
        def wrapped(*arguments: Any, **named: Any) -> Any:
            found = function(*arguments, **named)
            self.end(phase)
            return found

        return wrapped

    def install(self) -> None:
        run: Any = attempts._Run
        go_on = run._go_on

        def noticed(self_: Any) -> int:
            members = self_.membership.members(self_.membership.newest())
            self.end("noticed", members.index(self_.membership.own), len(members))
            return go_on(self_)

        run._go_on, run._restored = noticed, self.after(run._restored, "loaded")
        module: Any = attempts
        module.form_world = self.after(attempts.form_world, "formed")
        cached: Any = GraphCache
        make = cached.__init__

        def made(self_: Any, *arguments: Any, **named: Any) -> None:
            make(self_, *arguments, **named)
            if self_.entry is not None:
                self.end("planned")

        cached.__init__ = made
        GraphDecisions.decide = self.after(GraphDecisions.decide, "planned")  # type: ignore[method-assign]
        GraphCompiler.compile = self.after(GraphCompiler.compile, "compiled")  # type: ignore[method-assign]


class InBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, call: Callable[[], None]) -> torch.Tensor:
        ctx.call = call
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        ctx.call()
        return gradients[0], None


def train(folder: Path, mode: str, steps: int, marks: Marks | None) -> list[float]:
    """Losses by step. marks: None on one device, without hpml."""
    torch.manual_seed(0)
    model, losses = Model().double(), dict[int, float]()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9)
    drawn = torch.Generator().manual_seed(1)
    data = TensorDataset(*(torch.randn(*size, generator=drawn, dtype=torch.float64) for size in ((4 * ROWS, 16), (4 * ROWS,))))
    loader = hpml_compiler.distribute(DataLoader(data, ROWS, shuffle=True))
    checkpointer = hpml_compiler.Checkpointer(folder / "checkpoints", model, optimizer, loader=loader, every=EVERY, keep=3)
    calls, together = dict[int, Any](), 0
    if marks is not None:
        marks.note("formed", this_rank(), world_size())
    for attempt in hpml_compiler.attempts(checkpointer, steps):
        if marks is not None and not losses:
            marks.note("loaded", this_rank(), world_size())
        with attempt as step:
            ranks = world_size()
            if ranks not in calls:
                calls[ranks] = model if marks is None else torch.compile(model, backend="hpml", options=options_of(mode, ranks))
            together = together + 1 if ranks == RANKS else 0
            optimizer.zero_grad()
            loss = calls[ranks](*attempt.batch())
            if marks is not None and step > EVERY and (not marks.each or step % marks.each == marks.each - 1):
                loss = InBackward.apply(loss, functools.partial(marks.step, together))
            loss.backward()
            optimizer.step()
            losses[step] = loss.item()
            if marks is not None:
                marks.note("done", this_rank(), ranks, step=step, loss=losses[step])
                time.sleep(SLOW_STEP_S if ranks < RANKS and marks.killed() < len(marks._kills) and not marks.each else 0.0)
    checkpointer.close()
    return [losses[step] for step in sorted(losses)]


def lines_of(folder: Path) -> list[dict[str, Any]]:
    return sorted((json.loads(line) for file in folder.glob("marks*") for line in file.read_text().splitlines()),
                  key=lambda each: each["time"])


class ForkedRank:
    """The methods of `subprocess.Popen` that the launcher uses, of a process of multiprocessing's fork server."""

    def __init__(self, environment: dict[str, str], run: dict[str, Any]) -> None:
        context: Any = multiprocessing.get_context("forkserver")
        self._process = context.Process(target=forked, args=(environment, run))
        self._process.start()
        self.pid = self._process.pid

    @property
    def returncode(self) -> Any:
        return self._process.exitcode

    def poll(self) -> Any:
        return self._process.exitcode

    def kill(self) -> None:
        self._process.kill()

    def send_signal(self, number: int) -> None:
        os.kill(self.pid, number)

    def wait(self, timeout: float | None = None) -> Any:
        self._process.join(timeout)
        if self._process.exitcode is None:
            raise subprocess.TimeoutExpired(str(self.pid), timeout or 0.0)
        return self._process.exitcode


def forked(environment: dict[str, str], run: dict[str, Any]) -> None:
    os.environ |= environment
    log = os.open(Path(run["folder"]) / "log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    work(**run)
    atexit._run_exitfuncs()  # type: ignore[attr-defined]


class ForkingLauncher(ElasticLauncher):
    """run: arguments of `work`."""

    def __init__(self, run: dict[str, Any], restarts: int, replace: bool) -> None:
        super().__init__([], RANKS, restarts, replace)
        self._run_of = run

    def _process(self, environment: dict[str, str]) -> Any:
        return ForkedRank({**environment, **{name: os.environ[name] for name in SETTINGS}}, self._run_of)


def launched(run: dict[str, Any], restarts: int, replace: bool, patience: float) -> str:
    """Run ranks in this process's launcher. Returns "ended", "hung" or the exit code."""
    folder, ended, hung = Path(run["folder"]), threading.Event(), list[float]()

    def watch() -> None:
        seen, since = -1, time.monotonic()
        while not ended.wait(0.2):
            size = sum(file.stat().st_size for file in folder.glob("marks*"))
            seen, since = (size, time.monotonic()) if size != seen else (seen, since)
            if time.monotonic() - since > patience and not hung:
                hung.append(since)
                os.kill(os.getpid(), signal.SIGTERM)

    watching = threading.Thread(target=watch)
    watching.start()
    handler = logging.FileHandler(folder / "log")
    logging.getLogger("hpml").addHandler(handler)
    try:
        code = ForkingLauncher(run, restarts, replace).run()
    finally:
        logging.getLogger("hpml").removeHandler(handler)
        ended.set()
        watching.join()
    return "hung" if hung else "ended" if code == 0 else f"exit code {code}"


def restarted(run: dict[str, Any]) -> str:
    """Run ranks under torchrun, which restarts all of them when one has failed. Returns "ended" or the exit code."""
    command = [sys.executable, "-m", "hpml_compiler.cli", "run", "--nproc", str(RANKS), "--max-restarts", "1", __file__, "work",
               json.dumps(run)]
    with open(Path(run["folder"]) / "log", "wb") as log:
        code = subprocess.run(command, stdout=log, stderr=log, timeout=200).returncode
    return "ended" if code == 0 else f"exit code {code}"


def kills_of(mode: str, patience: float, ranks: Sequence[int], phases: Sequence[str], cold: bool) -> dict[str, Any]:
    kills = [("step", 0), *((phase, rank) for phase in phases for rank in ranks)]
    steps = STEPS_PER_KILL * len(kills)
    with tempfile.TemporaryDirectory() as temporary, tempfile.TemporaryDirectory() as alone:
        folder, begun = Path(temporary), time.monotonic()
        os.environ["HPML_CACHE_DIR"], os.environ["HPML_CACHE"] = str(folder / "cache"), "0" if cold else "1"
        outcome = launched({"folder": temporary, "mode": mode, "steps": steps, "kills": kills, "each": 0}, 4 * len(kills), True,
                           patience)
        expected = train(Path(alone), mode, steps, None)
        lines, log = lines_of(folder), (folder / "log").read_text()
        done = [each for each in lines if each["phase"] == "done"]
        worst = max(abs(each["loss"] - expected[each["step"]]) / abs(expected[each["step"]]) for each in done)
        killed = len(list(folder.glob("killed*")))
        return {"mode": mode, "outcome": outcome, "kills": killed, "asked": len(kills), "last": kills[killed - 1],
                "steps": max(each["step"] for each in done) + 1, "of": steps, "worst": worst, "right": worst < TOLERANCE,
                "restarts of all": log.count("all ranks are restarted"), "from memory": log.count("from memory"),
                "from the checkpoint": log.count("from the checkpoint"), "seconds": round(time.monotonic() - begun, 1),
                "log": log[-8000:] if outcome != "ended" or "restarted" in log else ""}


def times_of(mode: str, count: int, in_process: bool, patience: float) -> dict[str, Any]:
    """Medians in seconds of the phases; each run has one kill."""
    found = list[dict[str, float]]()
    with tempfile.TemporaryDirectory() as cache:
        os.environ["HPML_CACHE_DIR"], os.environ["HPML_CACHE"] = cache, "1"
        for _ in range(count + 1):
            with tempfile.TemporaryDirectory() as temporary:
                run = {"folder": temporary, "mode": mode, "steps": 14, "kills": [("step", 1)], "each": 8}
                outcome = launched(run, 1, False, patience) if in_process else restarted(run)
                if outcome != "ended":
                    raise SystemExit(f"a run {outcome} after its kill:\n{(Path(temporary) / 'log').read_text()[-8000:]}")
                found.append(phases_in(Path(temporary)))
    return {"mode": mode, "in process": in_process, "count": count, "first": found[0],
            **{phase: round(statistics.median(each[phase] for each in found[1:] if phase in each), 3)
               for phase in {name: 0 for each in found[1:] for name in each}}}


def phases_in(folder: Path) -> dict[str, float]:
    killed = float((folder / "killed000").read_text())
    after = [each for each in lines_of(folder) if each["time"] > killed]
    end = next(each["time"] for each in after if each["phase"] == "done")
    found, last = dict[str, float](), killed
    for phase in ("noticed", "imported", *PHASES[1:-1]):
        if times := [each["time"] for each in after if each["phase"] == phase and each["time"] < end]:
            found[phase], last = round(max(times) - last, 3), max(times)
    return {**found, "step": round(end - last, 3), "all": round(end - killed, 3)}


def work(folder: str, mode: str, steps: int, kills: Sequence[tuple[str, int]], each: int) -> None:
    """One rank."""
    marks = Marks(Path(folder), [(phase, rank) for phase, rank in kills], each)
    if ID not in os.environ:
        marks.note("noticed", 0, 0, time=BEGUN)
        marks.note("imported", 0, 0)
    marks.install()
    if os.environ.get(JOINS) == "1":
        wait_for_a_step(Path(folder))
    train(Path(folder), mode, steps, marks)


def gone_on(folder: Path) -> bool:
    """True if a rank has completed a step since the last kill."""
    lost = max((float(file.read_text()) for file in folder.glob("killed*")), default=0.0)
    return any(each["phase"] == "done" and each["time"] > lost for each in lines_of(folder))


def wait_for_a_step(folder: Path) -> None:
    """Join when the others have gone on, so that they are interrupted again."""
    until = time.time() + 60.0
    while time.time() < until and not gone_on(folder):
        time.sleep(0.2)


def main() -> None:
    if sys.argv[1] == "work":
        work(**json.loads(sys.argv[2]))
        return
    os.environ |= {"GLOO_SOCKET_IFNAME": "lo", "HPML_CACHE": "0", "HPML_CACHE_DIR": "", "HPML_PG_TIMEOUT_S": "30",
                   "OMP_NUM_THREADS": "1"}
    multiprocessing.set_forkserver_preload(["torch._dynamo", "torch._inductor.lowering", "hpml_compiler.backend", "pulp"])
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("kills", "times"))
    parser.add_argument("--modes", nargs="+", default=["dp", "tp", "pp", "zero3", "budget"])
    parser.add_argument("--phases", nargs="+", default=PHASES)
    parser.add_argument("--ranks", nargs="+", type=int, default=range(RANKS))
    parser.add_argument("--cold", action="store_true", help="plan each time, not from the cache")
    parser.add_argument("--count", type=int, default=10)
    parser.add_argument("--patience", type=float, default=90.0)
    parser.add_argument("--json", type=Path)
    chosen = parser.parse_args()
    found = list[dict[str, Any]]()
    for mode in chosen.modes:
        if chosen.what == "kills":
            found.append(kills_of(mode, chosen.patience, chosen.ranks, chosen.phases, chosen.cold))
        else:
            found += [times_of(mode, chosen.count, in_process, chosen.patience) for in_process in (True, False)]
        print(json.dumps(found[-1] if chosen.what == "kills" else found[-2:]), flush=True)
    if chosen.json:
        chosen.json.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
