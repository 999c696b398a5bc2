"""Runtime of a step program: the graphs that AOTAutograd gets, and the loop that runs instead of them.

AOTAutograd gets a forward and a backward graph of one opaque call each, with the right inputs and outputs; these are not
compiled. Instead of them runs a loop over microbatches (`hpml_compiler.runtime.program.microbatch_loop`) of the program's
parts, each compiled once.
"""
# FX types a node's arguments as a union of everything an argument can be.
# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportOptionalMemberAccess=false
from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch.fx import Graph, GraphModule, Node

from hpml_compiler.compile.lower.compile_timer import tell
from hpml_compiler.compile.lower.lowering import lowering_of_part
from hpml_compiler.compile.program.lowered_stages import CompiledStage
from hpml_compiler.compile.program.rerun import compiled_rerun
from hpml_compiler.compile.program.step_program import PipelineLinks, StepProgram
from hpml_compiler.options import Options
from hpml_compiler.planner.pipeline.pp_axis import PP_AXIS, schedule_of
from hpml_compiler.plans.schema import BlocksReport
from hpml_compiler.runtime.consistency.memory_agreement import AgreeingLoop, LoopCollectives
from hpml_compiler.runtime.consistency.rank_sync import when_all_succeed
from hpml_compiler.runtime.process.compute_device import device_type
from hpml_compiler.runtime.process.world_group import control_group, from_all_ranks, world_size
from hpml_compiler.runtime.program.dummy_collectives import collectives_of
from hpml_compiler.runtime.program.fused_forward_backward import FusedForwardBackward
from hpml_compiler.runtime.program.microbatch_loop import (
    Call,
    LoopCalls,
    MicrobatchLoop,
    SplitForwardBackward,
    numbers_first,
    numbers_last,
)
from hpml_compiler.runtime.program.p2p import P2P
from hpml_compiler.runtime.program.pipeline_step import PipelineLoop, of_loop
from hpml_compiler.runtime.program.stage_executor import StageCallables
from hpml_compiler.session import session
from passes import compat
from passes.graph.loops.loop_parts import GraphFragment


def whole_schedule(*_values: Any) -> Any:
    """Placeholder for the loop, in the graphs that AOTAutograd gets."""
    raise AssertionError("the graphs of a schedule are not compiled yet")

MakesWhole = Callable[[], "StepRuntime | None"]


class StepRuntime:
    """`partition` makes AOTAutograd's graphs; `forward` and `backward` are the callables that run. whole: makes the same step
    for gradients at all outputs; None where that is not possible. shares: see `Lowering.shares`. reports: of regional
    compilation, once the stages are compiled."""

    def __init__(self, options: Options, program: StepProgram, whole: MakesWhole | None = None, shares: bool = True):
        self.options, self.program, self.parts, again = options, program, program.parts, program.parts.rerun
        self.again = again if again is None or whole is None else replace(again, full_loop=lambda: compiled_rerun(whole))
        self.around = lowering_of_part(options.compiler, shares)
        if program.counted:
            self.around.count_bytes()
        self.stages = [CompiledStage(stage, options, shares, program.counted) for stage in program.stages]
        self.reports: dict[str, BlocksReport] = {}
        self.runs: FusedForwardBackward | SplitForwardBackward | None = None

    def partition(self) -> tuple[GraphModule, GraphModule]:
        given, parts = self.parts.inputs, self.parts
        primals = [(name, fake) for name, fake in given.items() if not name.startswith("tangents")]
        tangents = [(name, fake) for name, fake in given.items() if name.startswith("tangents")]
        outputs, gradients = parts.results[:parts.forward_outputs], parts.results[parts.forward_outputs:]
        forward = _opaque(primals, [*outputs, *numbers_last(parts.saved)])
        backward = _opaque([*((f"saved_{k}", x) for k, x in enumerate(numbers_first(parts.saved))), *tangents], gradients)
        return forward, backward

    def forward(self) -> Call:
        schedule, parts = self.schedule(), self.parts
        if parts.loss is None:
            self.runs = SplitForwardBackward(schedule, parts.forward_outputs, parts.saved)
        else:
            self.runs = FusedForwardBackward(schedule, parts.forward_outputs, parts.loss, parts.saved, self.again)
        run = self.runs.forward
        return compat.mark_boxed(lambda arguments: run(arguments))

    def backward(self) -> Call:
        assert self.runs is not None, "forward must be compiled first"
        run = self.runs.backward
        return compat.mark_boxed(lambda arguments: run(arguments))

    def inference(self) -> Call:
        """Forward alone, of a program without backward."""
        schedule, loop = self.schedule(), self.parts.loop

        def run(arguments: list[Any]) -> list[Any]:
            values = dict(zip(loop.inputs, arguments, strict=True))
            arguments.clear()
            schedule.all_forward(values, saves=False)
            return schedule.results(values, loop.results)

        return compat.mark_boxed(run)

    def schedule(self) -> MicrobatchLoop:
        """The loop, compiled."""
        links = self.program.links
        return self._one_stage() if links is None else self._pipeline(links)

    def _one_stage(self) -> MicrobatchLoop:
        (stage,), loop = self.stages, self.parts.loop
        halves, outputs = stage.stage.halves, len(loop.forward)
        assert halves.backward is not None, "it is trained"
        made = {name: k for k, name in enumerate(halves.forward.returns[outputs:])}
        # Forward returns tensors before numbers, backward takes numbers first.
        saved = tuple(made[name] for name in halves.backward.takes[:len(made)])
        collectives = None
        if self.options.on_oom == "replan" and world_size() > 1:
            collectives = LoopCollectives.of(loop, halves.forward.gm, halves.backward.gm)
        with stage.lowering.waiting_once(halves.forward.gm):
            run_forward, backwards = stage.lowering.part(halves.forward.gm, {"backward": halves.backward.gm}, outputs)
            calls = self._calls(run_forward, backwards["backward"] if loop.backward else None, saved)
        self.reports.update(stage.lowering.reports)
        if collectives is not None:
            return AgreeingLoop(loop, calls, self.parts.microbatches, collectives)
        return MicrobatchLoop(loop, calls, self.parts.microbatches)

    def _pipeline(self, links: PipelineLinks) -> PipelineLoop:
        loop = self.parts.loop
        mesh = session.current().device_mesh(self.options.mesh or {})
        table = schedule_of(self.options, self.parts.microbatches)
        stages = when_all_succeed("compile its pipeline stages", self._compiled_stages)
        self._share_reports()
        group = mesh.get_group(PP_AXIS)
        messages = P2P(dist.get_process_group_ranks(group), torch.device(device_type()), group,
                       control_group() if mesh.ndim > 1 else None)
        before = tuple(collectives_of(segment.gm) for segment in loop.before)  # before they are compiled
        return PipelineLoop(loop, self._calls(of_loop, None, ()), table, mesh.get_local_rank(PP_AXIS), stages, messages,
                            links.reads, links.outputs, links.gradients, links.alone, links.elsewhere, links.lent, before,
                            links.stays)

    def _compiled_stages(self) -> dict[int, StageCallables]:
        """The stages of this rank, compiled; an error in one is raised on all ranks."""
        with self.around.waiting_once(self.stages[0].stage.halves.forward.gm):
            return {each.stage.ends.index: each.calls() for each in self.stages}

    def _share_reports(self) -> None:
        """Gather the reports of all stages, so that they are the same on all ranks."""
        with compat.outside_tracing():
            found = from_all_ranks({each.stage.ends.index: each.reports for each in self.stages})
        for _, reports in sorted((pair for own in found for pair in own.items()), key=lambda pair: pair[0]):
            self.reports.update(reports)

    def _calls(self, forward: Call, backward: Call | None, saved: tuple[int, ...]) -> LoopCalls:
        """The compiled graphs around the loop, together with these for its body."""
        before, after = (tuple(map(self._segment, halves)) for halves in (self.parts.loop.before, self.parts.loop.after))
        return LoopCalls(before, forward, backward, after, saved)

    def _segment(self, segment: GraphFragment) -> Call | None:
        if segment.gm is None:
            return None
        tell("what is around its loop")
        with compat.strides_of_results():
            return self.around.inference(segment.gm)


def _opaque(inputs: Sequence[tuple[str, torch.Tensor]], results: Sequence[Any]) -> GraphModule:
    """A graph of one opaque call with these inputs and results."""
    graph = Graph()
    given = []
    for name, value in inputs:
        given.append(graph.placeholder(name))
        given[-1].meta["val"] = value
    call = graph.call_function(whole_schedule, tuple(given))
    call.meta["val"] = tuple(results)
    made: list[Node | None] = []
    for k, value in enumerate(results):
        if value is None:
            made.append(None)
            continue
        made.append(graph.call_function(operator.getitem, (call, k)))
        made[-1].meta["val"] = value
    graph.output(tuple(made))
    return GraphModule(torch.nn.Module(), graph)
