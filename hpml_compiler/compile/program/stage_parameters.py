"""Which ranks of a pipeline need a parameter, and what each of them does around the loop.

A parameter that the stages of one rank read, and make the gradient of, is that rank's alone. One that stages of several ranks
read (a tied embedding), or that is read around the loop by what all ranks need, stays on all. What is made of parameters before
the loop, and of gradients after it, only those ranks do that need it; random numbers are drawn on all, in one order.
"""
from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace

from torch.fx import GraphModule, Node

from hpml_compiler.planner.pipeline.stage_halves import StagedBody
from passes.graph.fx_nodes import returned_nodes
from passes.graph.graph_signature import GraphSignature
from passes.graph.loops.loop_parts import PrologueEpilogue
from passes.op_rules.recomputable import is_recomputable
from passes.pipeline.pipeline_schedule import PipelineSchedule
from passes.transforms.microbatch.loop_split import restricted


@dataclass(frozen=True)
class _Dependencies:
    """What it takes to have some values: inputs of the graph, what is made around the loop, what the loop makes; by name."""

    inputs: frozenset[str]
    made: frozenset[str]
    collected: frozenset[str]


class StageDependencies:
    """marked: the graph that the loop was cut out of, with its interface. table: whose ranks have the stages."""

    def __init__(self, marked: GraphModule, loop: PrologueEpilogue, staged: StagedBody, table: PipelineSchedule,
                 interface: GraphSignature):
        self.loop, self.staged, self.table = loop, staged, table
        self.ranks = range(len(table.actions))
        self.nodes: Mapping[str, Node] = {node.name: node for node in marked.graph.nodes}
        self.gradients_of_loop = {each.name: k for k, each in enumerate(loop.backward)}
        self.in_loop = {each.name for each in (*loop.forward, *loop.backward)}
        results = [None if node is None else node.name for node in returned_nodes(marked)]
        always = (node.name for each in (*loop.before, *loop.after) if each.gm is not None for node in each.gm.graph.nodes
                  if node.op == "call_function" and not is_recomputable(node))
        self.common = frozenset(name for name in (*results[:interface.forward_outputs], *always) if name is not None)
        gradients = results[interface.forward_outputs:]  # one for each input, which tokens of effects are not
        self.gradients = {name: result for name, result in zip(interface.positions, gradients, strict=True)
                          if result is not None} if interface.training else {}
        """Input -> its gradient, by name."""

    def owners(self, parameters: Iterable[str]) -> dict[str, int]:
        """Of these inputs, those that one rank needs alone, with that rank."""
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
        """The loop with what this rank needs around it."""
        needed = self._needed(self._wanted(rank, owners))
        segments = {when: tuple(restricted(each, needed.made) for each in getattr(self.loop, when))
                    for when in ("before", "after")}
        return replace(self.loop, **segments)

    def gradients_alone(self, owners: Mapping[str, int]) -> frozenset[int]:
        """Of what the loop's backward makes, by place, what only the rank needs that makes it."""
        wanted = {each: self._needed(self._wanted(each, owners)).collected for each in self.ranks}
        return frozenset(place for name, place in self.gradients_of_loop.items()
                         if len(makers := self._makers(name)) == 1
                         and all(name not in wanted[each] for each in self.ranks if each not in makers))

    def gradients_elsewhere(self, rank: int, owners: Mapping[str, int]) -> frozenset[str]:
        """Of the graph's gradients, by name, those that this rank has no rows of."""
        return frozenset(self.gradients[name] for name, owner in owners.items() if owner != rank and name in self.gradients)

    def _wanted(self, rank: int, owners: Mapping[str, int]) -> set[str]:
        gradients = {result for name, result in self.gradients.items() if owners.get(name, rank) == rank}
        return {*self._read_in_stages(rank), *self.common, *gradients}

    def _read_in_stages(self, rank: int) -> set[str]:
        reads = self.staged.reads
        return {reads[node.name].name for graph in self.staged.graphs if self.table.ranks[graph.index] == rank
                for node in graph.gm.graph.find_nodes(op="placeholder") if node.name in reads}

    def _makers(self, collected: str) -> set[int]:
        """Ranks that make a part of something that the loop's backward makes. What its forward makes, all ranks get."""
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
