"""Split a joint graph into one joint graph per stage, before placements are decided.

Each equals a trace of that stage alone, so that everything that handles a joint graph handles a stage: its inputs are graph
inputs and values received from the previous stage, its tangents are gradients received from the next one; it returns the values
to send and its own outputs, then gradients of its inputs and the gradients to send. Nodes keep their names, tags and
metadata. See `passes.pipeline.stage_assignment` for the values sent between stages.
"""
# FX types a node's arguments as a union of everything an argument can be.
# pyright: reportArgumentType=false
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

from torch import fx
from torch.fx import GraphModule, Node

from passes import compat
from passes.annotations import read
from passes.errors import HpmlError
from passes.graph.fx_nodes import returned_nodes
from passes.graph.graph_signature import GraphInput, input_position
from passes.graph.planning_keys import GRAPH_SIGNATURE, OPERATIONS
from passes.graph.step_phase import BACKWARD, FORWARD
from passes.op_rules.opaque_calls import port_of
from passes.pipeline.stage_assignment import STAGES, SentValue, StageAssignment
from passes.sharding.loop_gathers import ONCE, LoopGathers
from passes.transforms.loss_chunks.chunk_loss import Chunks
from passes.transforms.pipeline.stage_io import GRADIENT, StageIO


@dataclass(frozen=True)
class StageInputPosition:
    """Index of a placeholder among a stage's inputs; takes the place of AOTAutograd's description."""

    idx: int


@dataclass(frozen=True)
class StageGraph(StageIO):
    """A stage as a joint graph. inputs: of the whole graph, then those received from the previous stage, for
    `presets.annotate`. repeats: collectives of parameters in it, which each microbatch runs. chunks: of the loss."""

    gm: GraphModule
    inputs: tuple[GraphInput, ...]
    repeats: LoopGathers = ONCE
    chunks: Chunks = 1

    def ends(self) -> StageIO:
        return StageIO(**{each.name: getattr(self, each.name) for each in fields(StageIO)})


def split_stages(gm: GraphModule, inputs: Sequence[GraphInput], aligned: bool = True) -> tuple[StageGraph, ...]:
    """Split a joint graph that is annotated with stages. inputs: those that it was annotated with. aligned: False if
    backward's outputs are not one gradient per input; `inputs` are not known then, either."""
    whole = _WholeGraph(gm, inputs, aligned)
    return tuple(_StageBuilder(whole, index).build() for index in range(whole.stages.count))


def makers_of_gradients(gm: GraphModule) -> dict[int, tuple[int, ...]]:
    """For each output of backward, the stages that compute it: one, or several that compute summands, in the order of
    addition. An output that is a graph input belongs to the first."""
    stages, forward_outputs = read(STAGES, gm), read(GRAPH_SIGNATURE, gm).forward_outputs
    return {place: tuple(stages.of.get(part, 0) for part in stages.sums.get(node.name, (node.name,)))
            for place, node in enumerate(returned_nodes(gm)[forward_outputs:]) if node is not None}


class _WholeGraph:
    def __init__(self, gm: GraphModule, inputs: Sequence[GraphInput], aligned: bool):
        self.gm, self.inputs, self.aligned = gm, tuple(inputs), aligned
        self.stages: StageAssignment = read(STAGES, gm)
        self.interface = read(GRAPH_SIGNATURE, gm)
        self.nodes = {node.name: node for node in gm.graph.nodes}
        placeholders = gm.graph.find_nodes(op="placeholder")
        if any(map(compat.is_effect_token, placeholders)):
            raise HpmlError("calls with side effects that keep an order (prints, checks) cannot be spread over stages",
                            "options['mesh']['pp']", "take them out, or give no stages")
        self.primals = [node for node in placeholders if not node.name.startswith("tangents")]
        self.tangents = {node for node in placeholders if node.name.startswith("tangents")}
        results = returned_nodes(gm)
        self.outputs, self.gradients = results[:self.interface.forward_outputs], results[self.interface.forward_outputs:]
        described = gm.graph.output_node().meta.get("desc", ())
        self.described = list(compat.pytree.tree_leaves(described, is_leaf=lambda x: x is None))
        if len(self.described) != len(results):
            self.described = [None] * len(results)
        self.batch = {value.name for value in read(OPERATIONS, gm).graph.values if (0, 0) in value.batch} if aligned else set()

    def stage_of(self, node: Node) -> int:
        """Stage that returns the node; for a graph input, the first stage."""
        return self.stages.of.get(node.name, 0)

    def gradient(self, place: int, stage: int) -> Node | None:
        """A stage's gradient for an output of backward, or its summand of it."""
        whole = self.gradients[place] if place < len(self.gradients) else None
        if whole is None:
            return None
        parts = [self.nodes[name] for name in self.stages.sums.get(whole.name, (whole.name,))]
        return next((part for part in parts if self.stage_of(part) == stage), None)

    def described_input(self, sent: SentValue) -> GraphInput:
        owner = port_of(self.nodes[sent.value])
        assert owner is not None, "only tensors are sent"
        made, port = owner
        many = isinstance(made.meta.get("val"), (tuple, list))
        rows = (f"{made.name}.{port}" if many else made.name) in self.batch
        return GraphInput(f"{sent.value} of stage {sent.source}", "batch" if rows else "constant")


class _StageBuilder:
    def __init__(self, whole: _WholeGraph, index: int):
        self.whole, self.index = whole, index
        stages = whole.stages
        self.before = stages.over(index - 1, FORWARD) if index else ()
        self.after = stages.over(index, FORWARD)
        self.back_from = stages.over(index, BACKWARD)
        self.back_to = stages.over(index - 1, BACKWARD) if index else ()
        self.reads = [each for each in self.before if index in each.readers]
        self.reads_back = [each for each in self.back_from if index in each.readers]
        self.sends, self.sends_back = ([whole.nodes[each.value] for each in sent if each.source == index]
                                       for sent in (self.after, self.back_to))
        self.outputs = [k for k, node in enumerate(whole.outputs) if node is not None and whole.stage_of(node) == index]

    def build(self) -> StageGraph:
        whole = self.whole
        made = {k: node for k in range(len(whole.gradients)) if (node := whole.gradient(k, self.index)) is not None}
        forward = [*self.sends, *(whole.outputs[k] for k in self.outputs)]
        needed = self._needed([*forward, *made.values(), *self.sends_back])
        of_primals = {node for k, node in enumerate(whole.primals) if k in made and whole.aligned}
        given = [node for node in whole.primals if node in needed or node in of_primals]
        places = list(made) if not whole.aligned else [
            *(whole.primals.index(node) if node in of_primals else None for node in given), *(None for _ in self.reads)]
        graph = fx.Graph()
        new: dict[Node, Node] = {}
        for node in given:
            new[node] = graph.node_copy(node)
            new[node].meta.setdefault("desc", StageInputPosition(input_position(node, whole.primals.index(node))))
        for k, sent in enumerate(self.reads):
            self._received(graph, new, sent, sent.value).meta["desc"] = StageInputPosition(len(whole.inputs) + k)
        for node in whole.gm.graph.nodes:
            if node in whole.tangents and node in needed:
                new[node] = graph.node_copy(node)
        for sent in self.reads_back:
            self._received(graph, new, sent, GRADIENT + sent.value)
        for node in whole.gm.graph.nodes:
            if node in needed and node.op != "placeholder" and node not in new:
                new[node] = graph.node_copy(node, new.__getitem__)
        returned = [*forward, *(None if k is None else made[k] for k in places), *self.sends_back]
        output = graph.output(tuple(None if node is None else new[node] for node in returned))
        output.meta["desc"] = self._described(returned)
        graph.lint()
        return StageGraph(
            self.index, _names(given), _values(self.before), _values(self.reads), _values(self.after), _names(self.sends),
            tuple(self.outputs), tuple(places), _values(self.back_from), _values(self.reads_back), _values(self.back_to),
            _names(self.sends_back),
            {each.value: whole.nodes[each.value].meta["val"]
             for each in (*self.before, *self.after, *self.back_from, *self.back_to)},
            GraphModule(whole.gm, graph),
            (*whole.inputs, *map(whole.described_input, self.reads)) if whole.aligned else ())

    def _needed(self, wanted: Sequence[Node | None]) -> set[Node]:
        """All nodes that the stage computes or receives, for its outputs and side effects."""
        stages = self.whole.stages
        stack = [node for node in wanted if node is not None]
        stack += [node for node in self.whole.gm.graph.nodes
                  if node.op == "call_function" and stages.of[node.name] == self.index and node.is_impure()]
        received = {each.value for each in (*self.reads, *self.reads_back)}
        found: set[Node] = set()
        while stack:
            node = stack.pop()
            if node in found or node.name in received:
                continue
            own = node.op != "call_function" or node.name in stages.copied or stages.of[node.name] == self.index
            assert own, f"{node.name} is read in stage {self.index}, and not sent there"
            found.add(node)
            stack += node.all_input_nodes
        return found

    def _received(self, graph: fx.Graph, new: dict[Node, Node], sent: SentValue, name: str) -> Node:
        made = self.whole.nodes[sent.value]
        node = new[made] = graph.placeholder(name)
        node.meta = {key: made.meta[key] for key in ("val", "tensor_meta") if key in made.meta}
        return node

    def _described(self, returned: Sequence[Node | None]) -> list[Any]:
        """AOTAutograd's descriptions of the whole graph's outputs."""
        known = {node: said for node, said in zip((*self.whole.outputs, *self.whole.gradients), self.whole.described)
                 if node is not None}
        return [*(None for _ in self.sends), *(self.whole.described[k] for k in self.outputs),
                *(known.get(node) for node in returned[len(self.sends) + len(self.outputs):])]


def _names(nodes: Sequence[Node]) -> tuple[str, ...]:
    return tuple(node.name for node in nodes)


def _values(sent: Sequence[SentValue]) -> tuple[str, ...]:
    return tuple(each.value for each in sent)
