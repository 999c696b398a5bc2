"""A pipeline stage on its rank: split into forward and backward, and compiled."""
from __future__ import annotations

from dataclasses import dataclass

from hpml_compiler.compile.lower.lowering import lowering_of_part
from hpml_compiler.options import Options
from hpml_compiler.planner.pipeline.stage_halves import StageHalves, StageSplit, halves_of
from hpml_compiler.plans.schema import BlocksReport
from hpml_compiler.runtime.program.dummy_collectives import collectives_of
from hpml_compiler.runtime.program.stage_executor import BoxedCall, StageCallables
from passes.graph.fx_nodes import memory_of, returned_nodes
from passes.transforms.pipeline.stage_graphs import GRADIENT, StageGraph, StageIO


@dataclass(frozen=True)
class StageProgram:
    """A stage split into forward and backward. shared: places of gradients whose memory may still be read elsewhere. time_us:
    predicted time of the stage for one microbatch."""

    ends: StageIO
    halves: StageHalves
    shared: frozenset[int]
    time_us: float

    @staticmethod
    def of(graph: StageGraph, compiler: str, splits_backward: bool, time_us: float, split: StageSplit | None) -> StageProgram:
        """splits_backward: whether gradients of weights are a separate graph, as zero-bubble schedules need it. split: under a
        memory budget."""
        halves = halves_of(graph, compiler, splits_backward, split)
        return StageProgram(graph.ends(), halves, _sent(graph) | _waiting(graph, halves), time_us)


class CompiledStage:
    """A stage that `calls` compiles. counted: see `StepProgram`."""

    def __init__(self, stage: StageProgram, options: Options, shares: bool = True, counted: bool = False):
        self.stage, self.lowering = stage, lowering_of_part(options.compiler, shares, options.compile_blocks)
        if counted:
            self.lowering.count_bytes()
        self.lowering.step_us = stage.time_us

    def calls(self) -> StageCallables:
        ends, forward = self.stage.ends, self.stage.halves.forward
        self.lowering.forward_outputs, self.lowering.of = ends.forward_outputs, f"stage {ends.index} "
        backwards = {"backward": self.stage.halves.backward, "weights": self.stage.halves.weight}
        halves = {name: half for name, half in backwards.items() if half is not None}
        # Before compiling, which changes the graphs.
        parts = {name: collectives_of(half.gm) for name, half in {"forward": forward, **halves}.items()}
        graphs = {name: half.gm for name, half in halves.items()}
        run, calls = self.lowering.part(forward.gm, graphs, ends.forward_outputs)
        lowered = {name: BoxedCall(calls[name], half.takes, half.returns, parts[name]) for name, half in halves.items()}
        return StageCallables(ends, BoxedCall(run, forward.takes, forward.returns, parts["forward"]), lowered.get("backward"),
                              lowered.get("weights"), tuple(self.stage.halves.saved), self.stage.shared)

    @property
    def reports(self) -> dict[str, BlocksReport]:
        """Reports of regional compilation, once `calls` has run."""
        return {f"stage {self.stage.ends.index} {half}": report for half, report in self.lowering.reports.items()}


def _sent(graph: StageGraph) -> frozenset[int]:
    """Places of gradients whose memory the previous stage may still read, or that another stage accumulates into."""
    returned = returned_nodes(graph.gm)[graph.forward_outputs:]
    gradients, sent = returned[:len(graph.gradients)], returned[len(graph.gradients):]
    handed_on = {GRADIENT + name for name in graph.sent_back}
    received = [node for node in graph.gm.graph.find_nodes(op="placeholder") if node.name in handed_on]
    elsewhere = {memory_of(node) for node in (*sent, *received)}
    return frozenset(place for place, node in zip(graph.gradients, gradients)
                     if place is not None and memory_of(node) in elsewhere)


def _waiting(graph: StageGraph, halves: StageHalves) -> frozenset[int]:
    """Places of gradients that share memory with inputs of the weight part of backward, which runs later."""
    backward, weight = halves.backward, halves.weight
    if backward is None or weight is None:
        return frozenset()
    held = {memory_of(node) for node in weight.gm.graph.find_nodes(op="placeholder")}
    return frozenset(place for place, node in zip(graph.gradients, returned_nodes(backward.gm))
                     if place is not None and node is not None and memory_of(node) in held)
