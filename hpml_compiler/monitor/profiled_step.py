"""One step under torch's profiler: time by class of work, and the peak of tensor memory on the device."""
from __future__ import annotations

import bisect
import itertools
import logging
import os
import time
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile, record_function

from hpml_compiler.monitor.kernel_classes import class_of_event
from hpml_compiler.monitor.step_recorder import StepTimes
from passes import compat
from passes.simulation.step_timeline import TimelineEvent

log = logging.getLogger("hpml")

GRAPH_RANGE, BACKWARD_RANGE = "hpml graph", "hpml graph backward"
MEMORY_EVENT, WHOLE_GRAPH = "[memory]", "## Call CompiledFxGraph"
RANGES = (GRAPH_RANGE, BACKWARD_RANGE)
MOST_EVENTS = 1500
"""Most events of a timeline."""
_STICKY = frozenset(("optimizer", "collective", "attention", "convolution", "matmul"))


@dataclass(frozen=True)
class ProfilerEvent:
    """A profiler event: an operation or range of a thread or, on a device, a kernel. `operation`: for a kernel, the `id` of the
    operation that launched it."""

    name: str
    start_ns: int
    end_ns: int
    thread: int = 0
    on_device: bool = False
    id: int = 0
    operation: int = 0


@dataclass(frozen=True)
class KernelTimes:
    """Time in µs by class of work. kernels: True for times of device kernels, which may overlap; False for times of the calling
    thread inside compiled graphs. peak_bytes: peak of tensor memory; None if it was not measured."""

    classes_us: Mapping[str, float]
    kernels: bool
    peak_bytes: int | None
    timeline: tuple[TimelineEvent, ...] = ()
    """The step on this rank, as under the profiler; the longest of very many events."""

    def of_step(self, times: StepTimes) -> dict[str, float]:
        """Time in µs by class, scaled to a step that took `times` without a profiler, which slows down short operations.

        Thread times in graphs are scaled to the time measured without a profiler; kernel times are used as they are.
        """
        found = dict(self.classes_us)
        if self.kernels:
            found["overhead"] = max(times.step_us - sum(found.values()), 0.0)
            return found
        total = sum(found.values()) or 1.0
        found = {name: us / total * times.graphs_us for name, us in found.items()}
        found["optimizer"] = times.optimizer_us
        found["overhead"] = found.get("overhead", 0.0) + times.between_us
        return found


class StepProfile:
    """A running profile of one step. varying_bytes: sampled during the step; bytes that were allocated before the profile and
    may be freed during it, which the profiler does not see."""

    def __init__(self, device_type: str, varying_bytes: Callable[[], int] = lambda: 0) -> None:
        self.on_device, self.varying_bytes = device_type == "cuda", varying_bytes
        self._notes: list[tuple[int, int]] = []
        activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if self.on_device else [])]
        self._profile = profile(activities=activities, profile_memory=True)
        self._log_level = compat.set_cpp_log_level(2)  # it warns of each such free
        with _quiet_kineto(), warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Warning: Profiler clears events")  # torch 2.11, even where there were none
            self._profile.start()

    def begin_graph(self, backward: bool = False) -> Any:
        """Start the range of a compiled graph; returns a token for `end_graph`."""
        self.note()
        entered = record_function(BACKWARD_RANGE if backward else GRAPH_RANGE)
        entered.__enter__()
        return entered

    def end_graph(self, entered: Any) -> None:
        entered.__exit__(None, None, None)
        self.note()

    def note(self) -> None:
        """Sample the varying bytes."""
        self._notes.append((time.time_ns(), self.varying_bytes()))

    def stop(self, steady_bytes: int = 0) -> KernelTimes | None:
        """Stop the profile; returns its result, or None if the script used a profiler meanwhile, or torch's profiler failed.
        steady_bytes: bytes that are allocated before the profile and until after it."""
        found = self._read(steady_bytes)
        if found is None:
            return None
        operations, peak_bytes = found
        events = [_event(each) for each in operations if not _is_mirrored(each)]
        by_class = kernel_us(events) if self.on_device else graph_us(events)
        return KernelTimes(by_class, self.on_device, peak_bytes, timeline_of(events))

    def stop_at_peak(self, steady_bytes: int = 0) -> int | None:
        """Stop the profile; returns its peak in bytes alone, in a third of the time. None, steady_bytes: as in `stop`."""
        found = self._read(steady_bytes)
        return None if found is None else found[1]

    def _read(self, steady_bytes: int) -> tuple[list[Any], int] | None:
        """Torch's events of operations, and the peak in bytes."""
        self.note()
        if not self.cancel():
            return None
        found: Any = self._profile.profiler
        kind = torch.profiler.DeviceType.CUDA if self.on_device else torch.profiler.DeviceType.CPU
        operations, changes = [], []
        for each in found.kineto_results.events():
            if each.name() != MEMORY_EVENT:
                operations.append(each)
            elif each.device_type() == kind:
                changes.append((each.start_ns(), each.nbytes()))
        return operations, steady_bytes + peak(changes, self._notes)

    def cancel(self) -> bool:
        """Stop the profile without reading it. Returns False if it was over already: the end of another profile that started
        inside this one ended both, and the events are in the other one; or if torch's profiler failed."""
        running = compat.profiler_is_on()
        try:
            if running:
                _let_threads_finish()
                self._profile.stop()
        except MemoryError as error:  # std::bad_alloc: a thread of gloo still wrote its events, see `_let_threads_finish`
            log.info("a profile of a step is lost: torch's profiler failed: %s", error)
            return False
        finally:
            if self._log_level is not None:
                compat.set_cpp_log_level(self._log_level)
        return running


SETTLE_S = 0.1


def _let_threads_finish() -> None:
    """Give gloo's threads time to leave the collectives that this rank has waited for. Torch's profiler reads the events of all
    threads when it stops, and crashes (signal 11) where one of them still writes its own: with 10 ms, in about one of 2,000
    profiles, and in one of 60 with four ranks on two cores."""
    if dist.is_available() and dist.is_initialized() and "gloo" in dist.get_backend_config():
        time.sleep(SETTLE_S)


def graph_us(events: Iterable[ProfilerEvent]) -> dict[str, float]:
    """Self time in µs by class, inside the ranges of compiled graphs, of the threads that run them."""
    found: defaultdict[str, float] = defaultdict(float)
    for _, own_ns, chain in _with_parents(events):
        inside = _inside_graph(chain)
        if inside:
            found[_class_in(inside) or "overhead"] += own_ns / 1e3
    return dict(found)


def kernel_us(events: Iterable[ProfilerEvent]) -> dict[str, float]:
    """Time in µs by class of the kernels that an optimizer or a compiled graph launched."""
    events = list(events)
    chains = {event.id: chain for event, _, chain in _with_parents(events) if event.id}
    found: defaultdict[str, float] = defaultdict(float)
    for kernel in (event for event in events if event.on_device):
        chain = chains.get(kernel.operation, ())
        launched_by = _class_in(_inside_graph(chain) or chain)
        if launched_by == "optimizer" or _inside_graph(chain):
            name = launched_by if launched_by in _STICKY else class_of_event(kernel.name) or "pointwise"
            found[name] += (kernel.end_ns - kernel.start_ns) / 1e3
    return dict(found)


def timeline_of(events: Iterable[ProfilerEvent]) -> tuple[TimelineEvent, ...]:
    """Timeline of a step: kernels where there are any, else the outermost classed operations of the threads, inside compiled
    graphs and optimizers."""
    events = list(events)
    nested = [(event, chain) for event, _, chain in _with_parents(events)]
    chains = {event.id: chain for event, chain in nested if event.id}
    kernels = [(event, chains.get(event.operation, ())) for event in events if event.on_device]
    shown = kernels or [(event, chain) for event, chain in nested if not any(
        class_of_event(each.name) and not each.name.startswith(WHOLE_GRAPH) for each in chain[:-1])]
    found = []
    for event, chain in shown:
        kind = class_of_event(event.name) if event.on_device else _class_in(_inside_graph(chain)[1:] or chain[-1:])
        optimizer = _class_in(chain[:1]) == "optimizer"
        if kind is None or not (optimizer or _inside_graph(chain)):
            continue
        phase = "optimizer" if optimizer else "backward" if any(each.name == BACKWARD_RANGE for each in chain) else "forward"
        sends = kind == "collective"
        found.append(TimelineEvent(0, "communication" if sends else "compute", event.name, kind if sends else phase,
                                   event.start_ns / 1e3, event.end_ns / 1e3))
    begin = min((each.start_us for each in found), default=0.0)
    longest = sorted(found, key=lambda each: each.start_us - each.stop_us)[:MOST_EVENTS]
    return tuple(replace(each, start_us=each.start_us - begin, stop_us=each.stop_us - begin)
                 for each in sorted(longest, key=lambda each: each.start_us))


def _inside_graph(chain: Sequence[ProfilerEvent]) -> Sequence[ProfilerEvent]:
    """The nested events from the range of a compiled graph on; empty if there is no such range."""
    return next((chain[i:] for i in reversed(range(len(chain))) if chain[i].name in RANGES), ())


def _class_in(chain: Sequence[ProfilerEvent]) -> str | None:
    """The class of the innermost of nested events: that of the outermost event with a class in `_STICKY`, else its own."""
    classes = [class_of_event(event.name) for event in chain]
    return next((found for found in classes if found in _STICKY), classes[-1] if classes else None)


def _with_parents(events: Iterable[ProfilerEvent]) -> Iterable[tuple[ProfilerEvent, int, tuple[ProfilerEvent, ...]]]:
    """Each event of a thread with its self time in ns (without its children), and the chain of the events around it and itself,
    outermost first."""
    by_thread: dict[int, list[ProfilerEvent]] = {}
    for event in events:
        if not event.on_device:
            by_thread.setdefault(event.thread, []).append(event)
    for each in by_thread.values():
        open_events: list[list[Any]] = []  # event, ns of its children so far, chain
        for event in sorted(each, key=lambda e: (e.start_ns, -e.end_ns)):
            while open_events and open_events[-1][0].end_ns <= event.start_ns:
                yield _closed(open_events.pop())
            chain = (*open_events[-1][2], event) if open_events else (event,)
            if open_events:
                open_events[-1][1] += event.end_ns - event.start_ns
            open_events.append([event, 0, chain])
        while open_events:
            yield _closed(open_events.pop())


def _closed(entry: list[Any]) -> tuple[ProfilerEvent, int, tuple[ProfilerEvent, ...]]:
    event, children_ns, chain = entry
    return event, max(event.end_ns - event.start_ns - children_ns, 0), chain


def peak(changes: Iterable[tuple[int, int]], notes: Sequence[tuple[int, int]] = ()) -> int:
    """Peak memory in bytes: the highest running sum of allocations and frees, `(ns, bytes)`, plus the other bytes in memory by
    the next of the notes, `(ns, bytes)` in order of time."""
    changes = sorted(changes, key=lambda change: change[0])
    times = [at for at, _ in notes]
    running = itertools.accumulate((size for _, size in changes), initial=0)
    moments = [times[0] if times else 0, *(at for at, _ in changes)]

    def besides(at: int) -> int:
        return notes[min(bisect.bisect_left(times, at), len(notes) - 1)][1] if notes else 0

    return max(total + besides(at) for at, total in zip(moments, running))


def _event(raw: Any) -> ProfilerEvent:
    on_device = raw.device_type() != torch.profiler.DeviceType.CPU
    linked = raw.linked_correlation_id()
    return ProfilerEvent(raw.name(), raw.start_ns(), raw.start_ns() + raw.duration_ns(), raw.start_thread_id(), on_device,
                         id=0 if linked or on_device else raw.correlation_id(), operation=linked if on_device else 0)


def _is_mirrored(raw: Any) -> bool:
    """True for events to leave out: copies of ranges on the device, and async ranges, which overlap others."""
    return raw.is_async() or raw.is_user_annotation() and raw.device_type() != torch.profiler.DeviceType.CPU


class _quiet_kineto:
    """Silences Kineto, which prints the start and stop of each profile unless its log level is set at its first use."""

    def __enter__(self) -> None:
        self.ours = "KINETO_LOG_LEVEL" not in os.environ
        if self.ours:
            os.environ["KINETO_LOG_LEVEL"] = "6"

    def __exit__(self, *_: Any) -> None:
        if self.ours:
            os.environ.pop("KINETO_LOG_LEVEL", None)
