"""A stage of a pipeline on the rank that runs it: compiled."""
from __future__ import annotations

from hpml_compiler.compile.lowering import Lowering
from hpml_compiler.planning.staged_body import halves_of
from hpml_compiler.runtime.stages import Half, StageCalls
from passes.graph.nodes import memory_of, returned_nodes
from passes.transform.split_stages import StageGraph


class LoweredStage:
    """A stage that is cut into forward and backward at once, and compiled by `calls`."""

    def __init__(self, graph: StageGraph, compiler: str):
        self.graph, self.halves = graph, halves_of(graph, compiler)
        self.lowering = Lowering(compiler)
        self.lowering.reuse = compiler == "inductor"  # call by call, each value is let go of when it was last read
        self.lowering.forward_outputs = graph.forward_outputs
        self.saved = self.halves.saved

    def calls(self) -> StageCalls:
        halves = self.halves
        forward, backward = self.lowering.part(halves.forward, halves.backward, self.graph.forward_outputs)
        return StageCalls(self.graph, Half(forward, *halves.forward_names), Half(backward, *halves.backward_names),
                          tuple(self.saved), self._shared())

    def _shared(self) -> frozenset[int]:
        """Places of gradients whose memory the stage before may still read, or that another stage adds to."""
        returned = returned_nodes(self.graph.gm)[self.graph.forward_outputs:]
        gradients, sent = returned[:len(self.graph.gradients)], returned[len(self.graph.gradients):]
        elsewhere = {memory_of(node) for node in sent}
        return frozenset(place for place, node in zip(self.graph.gradients, gradients)
                         if place is not None and memory_of(node) in elsewhere)
