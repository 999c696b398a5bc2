"""Parameters and outputs of pipeline stages: the ranks that need each one, and each rank's work around the loop.

A parameter that is read only by the stages of one rank, which also make its gradient, is on that rank alone. One that is read
by stages of several ranks (a tied embedding), or around the loop by values that all ranks need, stays on all. Computations on
parameters before the loop, and on gradients after it, run only on the ranks that need them; random numbers are drawn on all
ranks, in one order.
"""
from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace

import torch
from torch.fx import GraphModule, Node

from hpml_compiler.planner.pipeline.stage_halves import StagedBody
from passes.graph.fx_nodes import returned_nodes
from passes.graph.graph_signature import GraphSignature
from passes.graph.loops.loop_parts import PrologueEpilogue
from passes.pipeline.pipeline_schedule import PipelineSchedule
from passes.transforms.microbatch.loop_split import must_run, restricted


@dataclass(frozen=True)
class _Dependencies:
    """Dependencies of some values, by name: inputs of the graph, values made around the loop, results of the loop."""

    inputs: frozenset[str]
    made: frozenset[str]
    collected: frozenset[str]


class StageDependencies:
    """marked: the graph that the loop was cut out of, with its interface. table: the schedule, which maps stages to ranks."""

    def __init__(self, marked: GraphModule, loop: PrologueEpilogue, staged: StagedBody, table: PipelineSchedule,
                 interface: GraphSignature):
        self.loop, self.staged, self.table, self.interface = loop, staged, table, interface
        self.ranks = range(len(table.actions))
        self.nodes: Mapping[str, Node] = {node.name: node for node in marked.graph.nodes}
        self.gradients_of_loop = {each.name: k for k, each in enumerate(loop.backward)}
        self.in_loop = {each.name for each in (*loop.forward, *loop.backward)}
        returned = returned_nodes(marked)
        self.tensors = [k for k, node in enumerate(returned) if node is not None and isinstance(node.meta["val"], torch.Tensor)]
        """Positions of the tensors among the graph's results."""
        results = [None if node is None else node.name for node in returned]
        always = (node.name for each in (*loop.before, *loop.after) if each.gm is not None for node in each.gm.graph.nodes
                  if must_run(node))
        self.common = frozenset(name for name in (*results[:interface.forward_outputs], *always) if name is not None)
        gradients = results[interface.forward_outputs:]  # one for each input; effect tokens have none
        self.gradients = {name: result for name, result in zip(interface.positions, gradients, strict=True)
                          if result is not None} if interface.training else {}
        """Input -> its gradient, by name."""

    def owners(self, parameters: Iterable[str]) -> dict[str, int]:
        """The parameters among these inputs that only one rank needs: name -> rank."""
        everybody = self._needed(self.common).inputs
        readers = {rank: self._needed(self._read_in_stages(rank)).inputs for rank in self.ranks}
        of_gradients = {name: self._needed([gradient]) for name, gradient in self.gradients.items()}
        several = {each for each, count in Counter(self.gradients.values()).items() if count > 1}
        found: dict[str, int] = {}
        for name in parameters:
            ranks = {rank for rank in self.ranks if name in readers[rank]}
            needed = of_gradients.get(name)
            if needed is not None:
                ranks |= {rank for each in needed.collected for rank in self._makers(each)}
            elsewhere = any(name in of_gradients[other].inputs for other in of_gradients if other != name)
            if len(ranks) == 1 and name not in everybody and not elsewhere and self.gradients.get(name) not in several:
                found[name] = ranks.pop()
        return found

    def around(self, rank: int, owners: Mapping[str, int]) -> PrologueEpilogue:
        """The loop with only the computations around it that this rank needs."""
        needed = self._needed(self._wanted(rank, owners))
        segments = {when: tuple(restricted(each, needed.made) for each in getattr(self.loop, when))
                    for when in ("before", "after")}
        return replace(self.loop, **segments)

    def gradients_alone(self, owners: Mapping[str, int]) -> frozenset[int]:
        """Places of the loop's gradients that only the rank that makes them needs."""
        wanted = {each: self._needed(self._wanted(each, owners)).collected for each in self.ranks}
        return frozenset(place for name, place in self.gradients_of_loop.items()
                         if len(makers := self._makers(name)) == 1
                         and all(name not in wanted[each] for each in self.ranks if each not in makers))

    def gradients_elsewhere(self, rank: int, owners: Mapping[str, int]) -> frozenset[str]:
        """Names of the graph's gradients of which this rank has no rows."""
        return frozenset(self.gradients[name] for name, owner in owners.items() if owner != rank and name in self.gradients)

    def outputs_alone(self) -> dict[int, int]:
        """Outputs that the loop collects from one rank, that need not be read, and that nothing else in the step reads:
        position among the graph's results -> that rank."""
        loop, place = self.loop, {each.name: k for k, each in enumerate(self.loop.forward)}
        read = {name for each in (*loop.before, *loop.after) for name in each.reads}
        read |= {each.name for each in (*loop.reads, *loop.late)}
        found = {(k := self.tensors[each.number]): loop.results[k] for each in self.interface.unread}
        return {k: self.table.ranks[self.staged.outputs[place[name]]] for k, name in found.items()
                if name in place and name not in read and loop.results.count(name) == 1}

    def is_needed_elsewhere(self, given: str, rank: int, owners: Mapping[str, int]) -> bool:
        """True if another rank than this one needs an input of the graph."""
        return any(given in self._needed(self._wanted(each, owners)).inputs for each in self.ranks if each != rank)

    def _wanted(self, rank: int, owners: Mapping[str, int]) -> set[str]:
        gradients = {result for name, result in self.gradients.items() if owners.get(name, rank) == rank}
        return {*self._read_in_stages(rank), *self.common, *gradients}

    def _read_in_stages(self, rank: int) -> set[str]:
        reads = self.staged.reads
        return {reads[node.name].name for graph in self.staged.graphs if self.table.ranks[graph.index] == rank
                for node in graph.gm.graph.find_nodes(op="placeholder") if node.name in reads}

    def _makers(self, collected: str) -> set[int]:
        """Ranks that contribute to a result of the loop's backward. Results of its forward are on all ranks."""
        place = self.gradients_of_loop.get(collected)
        return set() if place is None else {self.table.ranks[stage] for stage in self.staged.gradients[place]}

    def _needed(self, names: Collection[str]) -> _Dependencies:
        inputs, made, collected, stack = set(), set(), set(), [self.nodes[name] for name in names]
        while stack:
            node = stack.pop()
            if node.op == "placeholder":
                inputs.add(node.name)
            elif node.name in self.in_loop:
                collected.add(node.name)
            elif node.name not in made:
                made.add(node.name)
                stack += node.all_input_nodes
        return _Dependencies(frozenset(inputs), frozenset(made), frozenset(collected))
