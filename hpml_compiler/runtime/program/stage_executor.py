"""Run this rank's stages of a pipeline by the table of a schedule (`passes.pipeline.pipeline_schedule`).

A stage reads values that the table has received for it and inputs of the full graph; the values it makes are stored by name
until the table sends them, or backward takes them. Receives start where the table has them and are waited for when they are
read; sends are waited for at the end. Both ends start transfers in the same order, which the table was checked for.
"""
from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Container, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch

from hpml_compiler.runtime.program.dummy_collectives import DummyCollective, begun, take_part
from hpml_compiler.runtime.program.p2p import P2P, Received, StageFailure
from hpml_compiler.runtime.program.stage_timer import LoopTimes, loop_times
from hpml_compiler.runtime.watchdog.attribution import is_distributed
from passes import compat
from passes.pipeline.pipeline_schedule import PipelineSchedule, ScheduleAction
from passes.transforms.pipeline.stage_io import GRADIENT, StageIO


@dataclass(frozen=True)
class BoxedCall:
    """Boxed call of a stage's forward or backward, with the names of its inputs and results. collectives: those in the call,
    between the ranks that share the stage."""

    call: Callable[[list[Any]], Any]
    takes: tuple[str, ...]
    returns: tuple[str | None, ...]
    collectives: tuple[DummyCollective, ...] = ()


@dataclass(frozen=True)
class StageCallables:
    """Compiled calls of one stage. forward returns the values to send, the stage's outputs, and the values saved for backward.
    backward returns gradients, the gradients to send back, and inputs of `weight`: the part of backward that runs later, and
    returns the remaining gradients, if any. Where nothing is sent back, there is no `backward` before it. Each returns None in
    place of gradients that the other makes. saved: names of the values that both take from forward. shared: places of gradients
    whose memory may still be read elsewhere."""

    graph: StageIO
    forward: BoxedCall
    backward: BoxedCall | None
    weight: BoxedCall | None = None
    saved: tuple[str, ...] = ()
    shared: frozenset[int] = frozenset()

    @property
    def backwards(self) -> tuple[BoxedCall, ...]:
        return tuple(half for half in (self.backward, self.weight) if half is not None)

    def collectives(self, kind: str) -> tuple[DummyCollective, ...]:
        """Collectives of an action of this kind; it may have none."""
        half = {"forward": self.forward, "backward": self.backward, "backward_input": self.backward,
                "backward_weight": self.weight}.get(kind)
        return () if half is None else half.collectives


class StageExecutor:
    """Executes one step of this rank. given: returns the value of an input or a tangent of the full graph for a microbatch.
    collect: takes a microbatch's part of a result of the full graph: "forward" or "backward", place there, stage, microbatch,
    value.
    """

    def __init__(self, table: PipelineSchedule, rank: int, stages: Mapping[int, StageCallables], messages: P2P,
                 given: Callable[[int, str], Any], collect: Callable[[str, int, int, int, torch.Tensor], None]):
        self.table, self.rank, self.stages, self.messages = table, rank, stages, messages
        self.given, self.collect = given, collect
        self.known: dict[tuple[int, int], dict[str, Any]] = defaultdict(dict)
        """Saved, received and computed values, by stage and microbatch; each is dropped after its last use."""
        self.waiting: dict[tuple[int, int], dict[str, Any]] = {}
        """Values that the weight part of backward takes, in the same form."""
        self.arriving: dict[tuple[str, int, int], Received] = {}
        self.saves = True
        """Save values for backward; False for inference."""
        self.times: LoopTimes | None = None

    def run(self, actions: Sequence[ScheduleAction] | None = None, failed: StageFailure | None = None) -> StageFailure | None:
        """Run the table's actions for this rank, or a part of them. Returns the failure of this rank, now or earlier (failed).
        After a failure, sends and collectives still run, with zeros, since the other ranks would wait for them until they time
        out."""
        self.times = loop_times()
        for action in self.table.actions[self.rank] if actions is None else actions:
            if failed is not None:
                self._in_place_of(action)
                continue
            collectives = self.stages[action.stage].collectives(action.kind)
            before = begun(collectives)
            try:
                with compat.annotated(f"hpml {action}"), nullcontext() if self.times is None else self.times.action(action):
                    getattr(self, f"_{action.kind}")(action.stage, action.microbatch)
            except Exception as error:
                if is_distributed(error):  # another rank is late or gone; the caller finds out which
                    raise
                failed = StageFailure(str(action), error, action.stage, action.microbatch)
                self.known.clear()
                self.waiting.clear()
                take_part(collectives, before, self.messages.device)
        for received in self.arriving.values():  # only after a failure
            received.wait()
        self.messages.finish()
        if self.times is not None:
            self.times.end()
        return failed

    def _in_place_of(self, action: ScheduleAction) -> None:
        graph = self.stages[action.stage].graph
        if action.kind.startswith("receive"):
            getattr(self, f"_{action.kind}")(action.stage, action.microbatch)
        elif action.kind.startswith("send"):
            forward = action.kind == "send_forward"
            fakes = [graph.fakes[name] for name in (graph.sent if forward else graph.sent_back)]
            zeros = [torch.zeros(tuple(map(int, x.shape)), dtype=x.dtype, device=self.messages.device) for x in fakes]
            self.messages.send(zeros, self.table.ranks[action.stage + (1 if forward else -1)])
        else:
            collectives = self.stages[action.stage].collectives(action.kind)
            take_part(collectives, begun(collectives), self.messages.device)

    def _forward(self, stage: int, microbatch: int) -> None:
        calls, known = self.stages[stage], self.known[stage, microbatch]
        self._arrive("forward", stage, microbatch, stage - 1, calls.graph.received, "")
        given = set(calls.graph.given)
        made = calls.forward.call([self.given(microbatch, name) if name in given else known[name]
                                   for name in calls.forward.takes])
        sent, ends = calls.graph.own_sent, calls.graph.forward_outputs
        known.update((name, x) for name, x in zip(calls.forward.returns[ends:], made[ends:]) if name is not None)
        known.update(zip(sent, made))
        for place, x in zip(calls.graph.outputs, made[len(sent):ends]):
            self.collect("forward", place, stage, microbatch, x)
        self._keep(stage, microbatch, calls.graph.sent if stage + 1 < self.table.stages else ())

    def _backward(self, stage: int, microbatch: int) -> None:
        """Run backward, or the part of it before `_backward_weight`."""
        calls, known = self.stages[stage], self.known[stage, microbatch]
        graph, half = calls.graph, calls.backward
        self._arrive("backward", stage, microbatch, stage + 1, graph.received_back, GRADIENT)
        later = {GRADIENT + name for name in graph.sent_back} | set(() if calls.weight is None else calls.weight.takes)
        made = [] if half is None else self._gradients(half, stage, microbatch, known, later)
        first = len(graph.gradients)
        back = dict(zip(graph.own_sent_back, made[first:]))
        handed = {name: back[name] if name in back else known[GRADIENT + name] for name in graph.sent_back}
        if calls.weight is not None:
            names = () if half is None else half.returns[first + len(graph.own_sent_back):]
            there = {**known, **dict(zip(names, made[len(made) - len(names):], strict=True))}
            self.waiting[stage, microbatch] = {name: there[name] for name in calls.weight.takes if name in there}
        known.clear()
        known.update(handed)

    _backward_input = _backward

    def _backward_weight(self, stage: int, microbatch: int) -> None:
        half = self.stages[stage].weight
        if half is not None:
            self._gradients(half, stage, microbatch, self.waiting.pop((stage, microbatch)))

    def _gradients(self, half: BoxedCall, stage: int, microbatch: int, known: dict[str, Any], later: Container[str] = (),
                   ) -> Sequence[Any]:
        """Run backward, or a part of it, and collect its gradients; returns its results. Its inputs are freed once they have
        been read, except those that are read `later`."""
        given = [known[name] if name in known else self.given(microbatch, name) for name in half.takes]
        for name in half.takes:
            if name not in later:
                known.pop(name, None)
        made = half.call(given)
        for place, x in zip(self.stages[stage].graph.gradients, made):
            if place is not None and x is not None:
                self.collect("backward", place, stage, microbatch, x)
        return made

    def _send_forward(self, stage: int, microbatch: int) -> None:
        known = self.known[stage, microbatch]
        self.messages.send([known[name] for name in self.stages[stage].graph.sent], self.table.ranks[stage + 1])
        self._keep(stage, microbatch)

    def _send_backward(self, stage: int, microbatch: int) -> None:
        known = self.known.pop((stage, microbatch))
        self.messages.send([known[name] for name in self.stages[stage].graph.sent_back], self.table.ranks[stage - 1])

    def _receive_forward(self, stage: int, microbatch: int) -> None:
        graph = self.stages[stage].graph
        self.arriving["forward", stage, microbatch] = self.messages.receive(
            [graph.fakes[name] for name in graph.received], self.table.ranks[stage - 1])

    def _receive_backward(self, stage: int, microbatch: int) -> None:
        graph = self.stages[stage].graph
        self.arriving["backward", stage, microbatch] = self.messages.receive(
            [graph.fakes[name] for name in graph.received_back], self.table.ranks[stage + 1])

    def _arrive(self, way: str, stage: int, microbatch: int, source: int, names: Sequence[str], prefix: str) -> None:
        """Store the values from the stage `source` under their names."""
        if not 0 <= source < self.table.stages:
            return
        received = self.arriving.pop((way, stage, microbatch), None)
        if received is not None:
            with nullcontext() if self.times is None else self.times.waiting():
                values = received.wait()
        else:  # the other stage is on this rank
            known = self.known[source, microbatch]
            values = [known[name] for name in names]
            if way == "forward":
                self._keep(source, microbatch)
            else:
                known.clear()
        self.known[stage, microbatch].update((prefix + name, x) for name, x in zip(names, values, strict=True))

    def _keep(self, stage: int, microbatch: int, sent: Sequence[str] = ()) -> None:
        """Drop values after forward, except those that backward takes, and `sent`, which are still to be sent."""
        known = self.known[stage, microbatch]
        kept = {*sent, *(name for half in self.stages[stage].backwards if self.saves for name in half.takes)}
        for name in [name for name in known if name not in kept]:
            del known[name]
