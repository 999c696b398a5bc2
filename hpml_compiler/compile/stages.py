"""A stage of a pipeline on the rank that runs it: compiled."""
from __future__ import annotations

from hpml_compiler.compile.lowering import Lowering
from hpml_compiler.options import Options
from hpml_compiler.planning.staged_body import halves_of
from hpml_compiler.plans.schema import BlocksReport
from hpml_compiler.runtime.stages import Half, StageCalls
from hpml_compiler.runtime.stand_in import collectives_of
from passes.graph.nodes import memory_of, returned_nodes
from passes.transform.split_stages import GRADIENT, StageGraph


class LoweredStage:
    """A stage that is cut into forward and backward at once, and compiled by `calls`. splits_backward: gradients of weights run
    apart. step_us: what the stage is predicted to take for one microbatch."""

    def __init__(self, graph: StageGraph, options: Options, splits_backward: bool = False, step_us: float = 0.0):
        compiler = options.compiler
        self.graph, self.halves = graph, halves_of(graph, compiler, splits_backward)
        self.lowering = Lowering(compiler, blocks=options.compile_blocks)
        self.lowering.reuse = compiler == "inductor"  # call by call, each value is let go of when it was last read
        self.lowering.step_us = step_us
        self.lowering.forward_outputs, self.lowering.of = graph.forward_outputs, f"stage {graph.index} "
        self.saved = self.halves.saved
        self.shared = self._sent() | self._waiting()

    def calls(self) -> StageCalls:
        forward, backwards = self.halves.forward, {"backward": self.halves.backward, "weights": self.halves.weight}
        halves = {name: half for name, half in backwards.items() if half is not None}
        # Before these are compiled, which changes them.
        parts = {name: collectives_of(half.gm) for name, half in {"forward": forward, **halves}.items()}
        graphs = {name: half.gm for name, half in halves.items()}
        run, calls = self.lowering.part(forward.gm, graphs, self.graph.forward_outputs)
        lowered = {name: Half(calls[name], half.takes, half.returns, parts[name]) for name, half in halves.items()}
        return StageCalls(self.graph, Half(run, forward.takes, forward.returns, parts["forward"]), lowered.get("backward"),
                          lowered.get("weights"), tuple(self.saved), self.shared)

    @property
    def reports(self) -> dict[str, BlocksReport]:
        """What `calls` has compiled in blocks."""
        return {f"stage {self.graph.index} {half}": report for half, report in self.lowering.reports.items()}

    def _sent(self) -> frozenset[int]:
        """Places of gradients whose memory the stage before may still read, or that another stage adds to."""
        returned = returned_nodes(self.graph.gm)[self.graph.forward_outputs:]
        gradients, sent = returned[:len(self.graph.gradients)], returned[len(self.graph.gradients):]
        handed_on = {GRADIENT + name for name in self.graph.sent_back}
        received = [node for node in self.graph.gm.graph.find_nodes(op="placeholder") if node.name in handed_on]
        elsewhere = {memory_of(node) for node in (*sent, *received)}
        return frozenset(place for place, node in zip(self.graph.gradients, gradients)
                         if place is not None and memory_of(node) in elsewhere)

    def _waiting(self) -> frozenset[int]:
        """Places of gradients whose memory is among what waits for the second part of backward."""
        backward, weight = self.halves.backward, self.halves.weight
        if backward is None or weight is None:
            return frozenset()
        held = {memory_of(node) for node in weight.gm.graph.find_nodes(op="placeholder")}
        return frozenset(place for place, node in zip(self.graph.gradients, returned_nodes(backward.gm))
                         if place is not None and node is not None and memory_of(node) in held)
