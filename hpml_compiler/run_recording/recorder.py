"""Monitor of a run: records throughput, memory and the script's values by step, and events, in files and other sinks."""
from __future__ import annotations

import logging
import os
import platform
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.fx import GraphModule
from torch.optim.optimizer import register_optimizer_step_post_hook

from hpml_compiler.options import Options
from hpml_compiler.run_recording.device_memory import DeviceMemory
from hpml_compiler.run_recording.graph_facts import GraphFacts, facts_of
from hpml_compiler.run_recording.plan_figures import PlanFigures
from hpml_compiler.run_recording.record_sinks import CALLED, SINKS, AllSinks, PrometheusSink, RecordSink, scalars_of
from hpml_compiler.run_recording.run_events import ProcessEvents
from hpml_compiler.run_recording.script_values import ScriptValues, ValuesOnTheWay, finite
from hpml_compiler.run_recording.step_counter import StepCounter, StepWindow
from hpml_compiler.run_records.record_file import RecordFile, file_of_rank
from hpml_compiler.runtime.process.world_group import ensure_process_group, from_all_ranks, this_rank, world_size
from passes.errors import BadInput, HpmlError
from passes.session_state import state_of

log = logging.getLogger("hpml")
OTHER_RANKS = 10.0
"""Windows of ranks other than 0 are this many times as long: what differs between them is memory and events."""
MOST_WINDOWS = 5000
"""Windows grow with the run: there is one per MOST_WINDOWS-th of the time so far, where that is longer than the interval."""
Compile = Callable[[], Callable[..., Any]]


class Monitor:
    """Records a run in a folder, for `hpml watch` and `hpml report`::

        monitor = hpml_compiler.Monitor("runs/a")            # before the first step, on all ranks
        ...
            monitor.log(loss=loss, lr=scheduler.get_last_lr()[0])    # after each step, on all ranks

    folder: all ranks write to it; a restart appends. sinks: "tensorboard", "wandb" and "mlflow", on rank 0. metrics_port:
    serves Prometheus metrics on 127.0.0.1, on rank 0. interval: seconds of a window of steps, each of which is one record; a
    longer step has its own. start: steps done before, where the script does not resume by `hpml_compiler.Checkpointer`.
    """

    def __init__(self, folder: str | os.PathLike[str], *, sinks: Sequence[str] = (), metrics_port: int | None = None,
                 interval: float = 1.0, start: int = 0) -> None:
        _check(sinks, interval, start)
        if state_of(OpenMonitor).monitor is not None:
            raise BadInput("a monitor is open already", CALLED, "close it first")
        ensure_process_group()
        self.folder, self.rank, self.interval = Path(folder), this_rank(), interval * (OTHER_RANKS if this_rank() else 1.0)
        self.counter, self.values, self.metrics_port = StepCounter(start), ScriptValues(), metrics_port
        self._together(lambda: self._open(sinks))
        self._began = self._window_began = self.counter.clock()
        self._facts: dict[str, GraphFacts] = {}
        self._waiting: list[tuple[dict[str, Any], ValuesOnTheWay]] = []
        self._depth, self._closed, self._memory, self._plan = 0, False, None, PlanFigures(self.folder, self._event)
        self._hook = register_optimizer_step_post_hook(self._optimizer_ended)
        self._process = ProcessEvents(self._event, self.close)
        state_of(OpenMonitor).monitor = self

    def _open(self, sinks: Sequence[str]) -> None:
        self._file = RecordFile(file_of_rank(self.folder, self.rank))
        made: dict[str, RecordSink] = {}
        if self.rank == 0:
            made = {name: SINKS[name](self.folder) for name in sinks}
            if self.metrics_port is not None:
                made["prometheus"] = served = PrometheusSink(self.metrics_port)
                self.metrics_port = served.port
        self._sinks = AllSinks(made)
        self._file.write({"kind": "start", "time": time.time(), "step": self.counter.step, "rank": self.rank,
                          "ranks": world_size(), "host": platform.node(), "process": os.getpid(),
                          "torch": str(torch.__version__)})

    def _together(self, work: Callable[[], None]) -> None:
        """Do it, and raise on all ranks if it fails on one."""
        problem = None
        try:
            work()
        except HpmlError as error:
            problem = error
        first = next((each for each in from_all_ranks(problem) if each is not None), None)
        if first is not None:
            raise first from problem

    # -- called by the script ------------------------------------------------------------------------------------------

    def log(self, *, samples: float | None = None, tokens: float | None = None, **values: Any) -> None:
        """Log the script's own values of this step: numbers, or tensors of one element, which are read when the device has
        computed them. samples, tokens: read in this step, where the rows and integers of the model's inputs do not tell."""
        if samples is not None or tokens is not None:
            self.counter.count(samples, tokens)
        self.values.put(values)

    def close(self) -> None:
        """Write what is left, and close files and sinks; the end of the script does it too."""
        if self._closed:
            return
        self._closed = True
        self._hook.remove()
        self._process.close()
        self.counter.finish()
        self._record(self.counter.take())
        self._write_waiting(wait=True)
        self._plan.save()
        self._file.write({"kind": "end", "time": time.time(), "step": self.counter.step, "how": "ended"})
        self._sinks.close()
        self._file.close()
        state_of(OpenMonitor).monitor = None

    def __enter__(self) -> Monitor:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: Any) -> None:
        if kind is not None and issubclass(kind, Exception):
            self._event("failed", f"{kind.__name__}: {error}"[:2000])
        self.close()

    # -- called by the compiler and by checkpoints ---------------------------------------------------------------------

    def counted(self, gm: GraphModule, given: Sequence[Any], options: Options, compile_: Compile) -> Callable[..., Any]:
        """Compile a graph, and count its calls. Graphs that it calls in turn do not count."""
        began = self.counter.clock()
        facts = facts_of(gm, given, world_size()) if self._depth == 0 else None
        self._depth += 1
        try:
            with self._plan.new_graphs() as planned:
                call = compile_()
        finally:
            self._depth -= 1
        self.counter.disturb()
        self._event("compiled", f"a graph of {len(gm.graph.nodes)} nodes in {self.counter.clock() - began:.1f} s")
        self._plan.options = options
        return call if facts is None or not facts.training else _watched(call, facts.planned(planned))

    def call_begins(self, facts: GraphFacts, args: Sequence[Any]) -> bool:
        """Note a call of a training graph; returns False for one inside another, which does not count."""
        if self._depth:
            return False
        self._plan.dtype = facts.dtype
        if self.counter.graph_called(*facts.ran(args)):
            self._step_ended()
        self._depth += 1
        return True

    def call_ends(self) -> None:
        self._depth -= 1

    def resumed(self, step: int) -> None:
        """Note that the run goes on from a checkpoint with this number of steps."""
        self.counter.step = step
        self._event("resumed", f"from the checkpoint of step {step}")

    def note(self, event: str, text: str) -> None:
        """Write an event of this rank."""
        self._event(event, text)

    # -- records -------------------------------------------------------------------------------------------------------

    def _optimizer_ended(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if not torch.compiler.is_compiling() and self.counter.optimizer_ended(id(optimizer)):
            self._step_ended()

    def _step_ended(self) -> None:
        stalled, now = self.counter.stalled, self.counter.clock()
        if stalled is not None:
            times = stalled.seconds / stalled.usual_s
            self._event("stall", f"step {stalled.step} took {stalled.seconds:.3g} s, {times:.0f} times the usual time")
        if self._waiting:
            self._write_waiting()
        if now - self._window_began >= max(self.interval, (now - self._began) / MOST_WINDOWS):
            self._record(self.counter.take())
            self._window_began = now
            if self.rank == 0 and self._plan.report(self._file.write):
                self.counter.disturb()

    def _record(self, window: StepWindow) -> None:
        if not window.steps:
            return
        if self._memory is None:
            self._memory = DeviceMemory(self._plan.device_type)
        took = window.seconds
        record = {"kind": "steps", "time": time.time(), "step": self.counter.step, "steps": window.steps,
                  "step_s": took / window.steps, "longest_s": window.longest_s, "memory": self._memory.now()}
        if self.rank == 0:
            record |= {f"{name}_per_s": count / took for name, count in (
                ("samples", window.samples), ("tokens", window.tokens)) if count}
            record |= self._plan.figures(window.flops, took)
        self._waiting.append((record, self.values.take()))
        self._write_waiting()

    def _write_waiting(self, wait: bool = False) -> None:
        while self._waiting and (wait or self._waiting[0][1].is_here):
            record, values = self._waiting.pop(0)
            if self.rank == 0:
                record["values"] = values.read()
                self._sinks.write(finite(scalars_of(record)), record["step"])
            self._file.write(record)

    def _event(self, event: str, text: str) -> None:
        self._file.write({"kind": "event", "event": event, "time": time.time(), "step": self.counter.step, "text": text})


class OpenMonitor:
    """The monitor of this process, if one is open; closed with the session."""

    def __init__(self) -> None:
        self.monitor: Monitor | None = None

    def close(self) -> None:
        if self.monitor is not None:
            self.monitor.close()


def open_monitor() -> Monitor | None:
    return state_of(OpenMonitor).monitor


def _watched(call: Callable[..., Any], facts: GraphFacts) -> Callable[..., Any]:
    """The call of a training graph, noted by the monitor that is open then."""
    def watched(*args: Any) -> Any:
        monitor = open_monitor()
        if monitor is None or not monitor.call_begins(facts, args):
            return call(*args)
        try:
            return call(*args)
        finally:
            monitor.call_ends()

    return watched


def _check(sinks: Any, interval: Any, start: Any) -> None:
    if isinstance(sinks, str) or (unknown := next((each for each in sinks if each not in SINKS), None)) is not None:
        given = sinks if isinstance(sinks, str) else unknown
        raise BadInput(f"unknown sink {given!r}" if given not in SINKS else f"sinks={given!r} is no list", f"{CALLED}, sinks",
                       f"give a list of {', '.join(map(repr, SINKS))}; records go to the folder in any case")
    for name, value, wanted in (("interval", interval, "a number of seconds above 0"), ("start", start, "a number of steps")):
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not value >= 0 or name == "interval" and not value:
            raise BadInput(f"{name}={value!r} is not {wanted}", f"{CALLED}, {name}", f"give {wanted}")
