"""A stage of a pipeline on the rank that runs it: compiled."""
from __future__ import annotations

from hpml_compiler.compile.lowering import Lowering
from hpml_compiler.planning.staged_body import halves_of
from hpml_compiler.runtime.stages import Half, StageCalls
from hpml_compiler.runtime.stand_in import collectives_of
from passes.graph.nodes import memory_of, returned_nodes
from passes.transform.split_stages import GRADIENT, StageGraph


class LoweredStage:
    """A stage that is cut into forward and backward at once, and compiled by `calls`. splits_backward: gradients of weights run
    apart."""

    def __init__(self, graph: StageGraph, compiler: str, splits_backward: bool = False):
        self.graph, self.halves = graph, halves_of(graph, compiler, splits_backward)
        self.lowering = Lowering(compiler)
        self.lowering.reuse = compiler == "inductor"  # call by call, each value is let go of when it was last read
        self.lowering.forward_outputs = graph.forward_outputs
        self.saved = self.halves.saved
        self.shared = self._sent() | self._waiting()

    def calls(self) -> StageCalls:
        forward, *backwards = self.halves.forward, self.halves.backward, self.halves.weight
        # Before these are compiled, which changes them.
        parts = [collectives_of(None if half is None else half.gm) for half in (forward, *backwards)]
        run, calls = self.lowering.part(forward.gm, [half.gm for half in backwards if half is not None],
                                        self.graph.forward_outputs)
        backward, weight = (None if half is None else Half(calls.pop(0), half.takes, half.returns, own)
                            for half, own in zip(backwards, parts[1:], strict=True))
        return StageCalls(self.graph, Half(run, forward.takes, forward.returns, parts[0]), backward, weight,
                          tuple(self.saved), self.shared)

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
