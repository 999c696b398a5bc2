"""Microbatched step through pipeline stages, inside one forward and one backward of autograd.

The graphs before and after the loop run on every rank; in the loop, each rank runs its own stages by the table of a schedule.
After the loop, the ranks share the results of their stages.
"""
from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from typing import Any

import torch

from hpml_compiler.runtime.placements.single_rank_placement import no_rows
from hpml_compiler.runtime.program.dummy_collectives import DummyCollective, begun, take_part
from hpml_compiler.runtime.program.microbatch_loop import Collector, LoopCalls, MicrobatchLoop, Values
from hpml_compiler.runtime.program.p2p import P2P, StageFailure
from hpml_compiler.runtime.program.stage_executor import StageCallables, StageExecutor
from hpml_compiler.runtime.watchdog.attribution import is_distributed
from passes.graph.loops.loop_order import BACKWARD, FORWARD
from passes.graph.loops.loop_parts import LoopInput, LoopOutput, PrologueEpilogue
from passes.pipeline.microbatches_in_flight import FORWARD_KINDS
from passes.pipeline.pipeline_schedule import PipelineSchedule
from passes.transforms.microbatch.loop_markers import taken


def of_loop(*_values: Any) -> Any:
    """Placeholder for the loop body's call: the stages have calls of their own."""
    raise AssertionError("the body of a pipeline runs stage by stage")


class PipelineLoop(MicrobatchLoop):
    """A `MicrobatchLoop` of which this rank runs some stages. rank: its place in the pipeline. reads: sources of the body's
    inputs, by name. outputs, gradients: the stages that make the results of the body's forward and backward. alone: places of
    gradients that stay on the rank that makes them; stays: the same of outputs. elsewhere: gradients of which other ranks have
    all rows, with fakes. lent: inputs that one rank has and others need, with that rank and a fake. before: the collectives
    that run before forward's loop and before backward's."""

    def __init__(self, loop: PrologueEpilogue, calls: LoopCalls, table: PipelineSchedule, rank: int,
                 stages: Mapping[int, StageCallables], messages: P2P, reads: Mapping[str, LoopInput],
                 outputs: Mapping[int, int], gradients: Mapping[int, tuple[int, ...]], alone: Container[int] = (),
                 elsewhere: Mapping[str, torch.Tensor] | None = None,
                 lent: Mapping[str, tuple[int, torch.Tensor]] | None = None,
                 before: Sequence[tuple[DummyCollective, ...]] = ((), ()), stays: Container[int] = ()):
        super().__init__(loop, calls, table.microbatches)
        self.table, self.rank, self.stages, self.messages = table, rank, stages, messages
        self.reads_of, self.outputs, self.gradients = reads, outputs, gradients
        self.alone, self.elsewhere, self.lent = alone, elsewhere or {}, lent or {}
        self.before, self.stays = before, stays

    @property
    def parts(self) -> list[int]:
        """Number of saved values between forward and backward, for each stage on this rank and each microbatch."""
        return [len(calls.saved) for calls in self.stages.values() for _ in range(self.microbatches)]

    def at_once(self, values: Values) -> None:
        failed = self._before((0, 1), values)
        made = _StageResults(self)
        self.messages.agree(self._run(values, made).run(failed=failed))
        self._finish("forward", made, values)
        self._finish("backward", made, values)
        self.let_go(BACKWARD, values, at_once=True)
        for half in (0, 1):
            self.segment(half, "after", values, at_once=True)
        self._note_elsewhere(values)

    def all_forward(self, values: Values, saves: bool = True) -> list[list[torch.Tensor]]:
        failed = self._before((0,), values)
        made = _StageResults(self)
        run = self._run(values, made)
        run.saves = saves
        actions = self.table.actions[self.rank]
        self.messages.agree(run.run([action for action in actions if action.kind in FORWARD_KINDS], failed))
        self._finish("forward", made, values)
        self.let_go(FORWARD, values, at_once=False)
        self.segment(0, "after", values)
        return [[run.known[stage, number][name] for name in calls.saved]
                for stage, calls in self.stages.items() for number in range(self.microbatches)] if saves else []

    def all_backward(self, saved: list[list[torch.Tensor]], values: Values) -> None:
        failed = self._before((1,), values)
        made = _StageResults(self)
        run = self._run(values, made)
        keys = [(stage, number) for stage in self.stages for number in range(self.microbatches)]
        run.known.update({key: dict(zip(self.stages[key[0]].saved, own, strict=True))
                          for key, own in zip(keys, saved, strict=True)})
        saved.clear()  # nothing else refers to the values, so that each is freed after its last use
        actions = self.table.actions[self.rank]
        self.messages.agree(run.run([action for action in actions if action.kind not in FORWARD_KINDS], failed))
        self._finish("backward", made, values)
        self.let_go(BACKWARD, values, at_once=False)
        self.segment(1, "after", values)
        self._note_elsewhere(values)

    def _note_elsewhere(self, values: Values) -> None:
        for name, fake in self.elsewhere.items():
            values[name] = self._no_rows(fake)

    def _no_rows(self, fake: torch.Tensor) -> torch.Tensor:
        return torch.empty(no_rows(fake.shape), dtype=fake.dtype, device=self.messages.device)

    def _before(self, halves: Sequence[int], values: Values) -> StageFailure | None:
        """Run the graphs before the loop. A failure is returned, and reported to the other ranks after the loop."""
        lent = {name: each for name, each in self.lent.items() if int(name.startswith("tangents")) in halves}
        if lent:
            owners, like = zip(*lent.values())
            values.update(zip(lent, self.messages.share([values[name] for name in lent], owners, like, self.rank)))
        failed = None
        for half in halves:
            collectives = self.before[half]
            counts = begun(collectives)
            try:
                if failed is None:
                    self.segment(half, "before", values, at_once=len(halves) == 2)
            except Exception as error:
                if is_distributed(error):
                    raise
                failed = StageFailure("the graph before the first microbatch", error)
            if failed is not None:
                take_part(collectives, counts, self.messages.device)
        return failed

    def _run(self, values: Values, made: _StageResults) -> StageExecutor:
        def given(number: int, name: str) -> torch.Tensor:
            read = self.reads_of[name]
            x = values[read.name]
            return x if read.rows is None else taken(x, read.rows.apart, read.rows.dim, read.rows.size, number)

        return StageExecutor(self.table, self.rank, self.stages, self.messages, given, made.add)

    def _finish(self, way: str, made: _StageResults, values: Values) -> None:
        """Complete the loop's results, of forward or of backward, and share them with every rank."""
        what = self.loop.forward if way == "forward" else self.loop.backward
        makers = [(self.outputs[k],) if way == "forward" else self.gradients[k] for k in range(len(what))]
        own: list[torch.Tensor | None] = []
        staying = self.stays if way == "forward" else self.alone
        shared = [place for place in range(len(what)) if place not in staying]
        like = [_fake_of(each) for each in what]
        for place, stages in enumerate(makers):
            owner, total = self.table.ranks[stages[0]], None
            for stage in stages:
                maker = self.table.ranks[stage]
                part = made.result(way, place, stage) if maker == self.rank else None
                if self.rank == owner != maker:
                    (part,) = self.messages.receive([like[place]], maker).wait()
                elif self.rank == maker != owner:
                    assert part is not None, "this rank has computed the value"
                    self.messages.send([part], owner)
                if self.rank == owner and part is not None:
                    total = part if total is None else total + part
            own.append(total)
        self.messages.finish()
        if way == "forward":
            values.update((each.name, self._no_rows(like[place])) for place, each in enumerate(what) if place in self.stays)
        values.update((what[place].name, x) for place, x in enumerate(own) if x is not None)
        found = self.messages.share([own[place] for place in shared], [self.table.ranks[makers[place][0]] for place in shared],
                                    [like[place] for place in shared], self.rank)
        values.update((what[place].name, value) for place, value in zip(shared, found, strict=True))


class _StageResults:
    """Results of this rank's stages, collected over microbatches, by place and stage."""

    def __init__(self, pipelined: PipelineLoop):
        self.pipelined = pipelined
        self.collectors: dict[tuple[str, int, int], Collector] = {}

    def add(self, way: str, place: int, stage: int, number: int, value: torch.Tensor) -> None:
        run, key = self.pipelined, (way, place, stage)
        if key not in self.collectors:
            forward = way == "forward"
            # Not in place where another stage accumulates into it, or the previous stage still reads it.
            alone = not forward and len(run.gradients[place]) == 1 and place not in run.stages[stage].shared
            what = (run.loop.forward if forward else run.loop.backward)[place]
            self.collectors[key] = Collector(what, run.microbatches, alone)
        self.collectors[key].add(value, number)

    def result(self, way: str, place: int, stage: int) -> torch.Tensor:
        return self.collectors.pop((way, place, stage)).result()


def _fake_of(what: LoopOutput) -> torch.Tensor:
    assert what.value is not None, "only tensors are collected"
    return what.value if what.rows is None else what.value.new_empty(what.rows.size)
