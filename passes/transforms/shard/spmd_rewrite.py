"""Rewrite a whole graph into the graph of one rank: local tensors, with collectives where layouts change.

Applies a `Decision`; decides nothing. A redistribution is emitted once per value, route and phase and shared by all readers
whose routes have the same prefix. A forward value that backward needs is redistributed in backward: the nodes are tagged
`must_be_in_backward`, so that the partitioner saves the value before its route and not after.
"""
# FX types a node's arguments as a union of everything an argument can be.
# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportCallIssue=false, reportIndexIssue=false
# pyright: reportOperatorIssue=false, reportOptionalMemberAccess=false, reportOptionalSubscript=false, reportReturnType=false
# pyright: reportAssignmentType=false, reportOptionalOperand=false, reportOptionalIterable=false, reportGeneralTypeIssues=false
from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from passes.annotations import read
from passes.base import TransformPass
from passes.compat import fake_mode_of, graph_module, pytree, without_modes
from passes.graph.decision import Decision, Hop, OperationLayouts, Route
from passes.graph.fx_nodes import BACKWARD_ON_PURPOSE
from passes.graph.layouts import Layout
from passes.graph.placement_graph import Operation, PlacementGraph, Value
from passes.graph.planning_keys import DECISION, GRAPH_SIGNATURE, OPERATIONS
from passes.graph.step_phase import FORWARD
from passes.graph.user_checkpointing import REGION
from passes.op_rules.base import PARTIAL, PARTIAL_MAX, REPLICATE, Rule
from passes.op_rules.call_rules import operand_nodes
from passes.op_rules.local_call import LocalCall
from passes.op_rules.opaque_calls import is_opaque, leaves_of, port_of
from passes.registry import register
from passes.replicas.replica_gradients import ReplicaGradients, check_replicas
from passes.transforms.rewriting.call_appender import CallAppender
from passes.transforms.rewriting.fake_results import FakeResults
from passes.transforms.shard.localization import localize, ordered_ranges, shifted_ranges
from passes.transforms.shard.output_strides import with_traced_strides
from passes.transforms.shard.redistributor import MeshGroups, Redistributor
from passes.transforms.shard.shard_range import ShardRange, range_of


class Sharder:
    def __init__(self, gm: GraphModule, graph: PlacementGraph, rules: Sequence[Rule | None], decision: Decision,
                 groups: MeshGroups, fake_mode: Any, at_run_time: bool = False):
        self.gm, self.graph, self.rules, self.decision = gm, graph, rules, decision
        self.groups, self.fake_mode, self.fakes = groups.with_rows(decision.axes), fake_mode, FakeResults(fake_mode)
        self.at_run_time, self.redistributor = at_run_time, Redistributor(self.groups, at_run_time)
        self.new = Graph()
        self.env: dict[Node, Node] = {}
        self.made: dict[int, tuple[Node, Layout]] = {}
        """Value -> (local node, layout of its producer). own: what gradients of replicas read in its place."""
        self.own, self.replicas = dict[int, tuple[Node, Layout]](), ReplicaGradients(graph, decision)
        check_replicas(graph, decision)
        self.moved: dict[tuple, Node] = {}
        self.by_name = {op.name: op for op in graph.operations}
        self.returned: dict[int, list[Route]] = {}
        """Value -> routes of the outputs that return it."""
        for (v, _), route in zip(graph.outputs, decision.outputs):
            self.returned.setdefault(v, []).append(route)
        trained = graph.gradients
        self.gradients = {route: graph.values[p].name for (_, p), route in zip(graph.outputs, decision.outputs) if p in trained}
        self.ports: dict[tuple[str, int], int] = {}
        for value in graph.values:
            name = value.name if value.producer is None else graph.operations[value.producer].name
            self.ports[name, value.port] = value.index

    def run(self) -> GraphModule:
        with without_modes():
            return self._run()

    def _run(self) -> GraphModule:
        for node in self.gm.graph.nodes:
            if node.op in ("placeholder", "get_attr"):
                self._input(node)
            elif node.op == "output":
                self._output(node)
            elif node.target is operator.getitem:
                self._part(node)
            elif node.name in self.by_name and is_opaque(node):
                self._opaque(node)
            elif node.name in self.by_name:
                self._call(node)
            else:
                self.env[node] = self._copy(node)
        result = graph_module(self.gm, self.new)
        result.graph.eliminate_dead_code()
        result.graph.lint()
        result.meta.update(self.gm.meta)
        return result

    def _copy(self, node: Node) -> Node:
        new = self.new.node_copy(node, lambda n: self.env[n])
        new.meta = dict(node.meta)
        return new

    def _part(self, node: Node) -> None:
        owner = port_of(node)
        index = None if owner is None else self.ports.get((owner[0].name, owner[1]))
        self.env[node] = self._copy(node) if index is None else self.made[index][0]

    def _opaque(self, node: Node) -> None:
        """The call as traced, on whole operands."""
        op = self.by_name[node.name]
        whole = {x: self._arrive(self.decision.routes[op.index, k], node, op.index) for k, x in enumerate(operand_nodes(node))}
        new = self.new.node_copy(node, lambda x: whole[x] if x in whole else self.env[x])
        new.meta = dict(node.meta)
        if node.meta.get("partitioner_tag") != "is_backward" and any(
            x.meta.get("partitioner_tag") == BACKWARD_ON_PURPOSE for x in whole.values()
        ):
            new.meta["partitioner_tag"] = BACKWARD_ON_PURPOSE
        self.env[node] = new
        insert = CallAppender(self.new, node, self.fakes)
        paths = [path for path, _ in leaves_of(node.meta.get("val"))]
        layout = (REPLICATE,) * len(self.groups.axes)
        for v in op.outputs:
            part = new
            for position in paths[self.graph.values[v].port]:
                part = insert(operator.getitem, part, position)
            self.made[v] = (part, layout)
            for route in self.returned.get(v, ()):
                self._give(route, node)

    def _input(self, node: Node) -> None:
        new = self._copy(node)
        self.env[node] = new
        index = self.ports.get((node.name, 0))
        if index is None:
            return
        layout = self.decision.inputs.get(index, ("R",) * len(self.groups.axes))
        value = self.graph.values[index]
        shape = self.groups.local_shape(value, layout)
        old = node.meta["val"]
        if tuple(old.shape) != shape:
            with self.fake_mode:
                local = torch.empty(shape, dtype=old.dtype, device=old.device)
                new.meta["val"] = local.requires_grad_(old.requires_grad)
            new.meta.pop("tensor_meta", None)
        self.made[index] = (new, layout)

    def _arrive(self, route: Route, reader: Node, operation: int | None = None) -> Node:
        value, own = self.graph.values[route.value], self.replicas.are_own(route, operation)
        node, layout = self.own.get(route.value, self.made[route.value]) if own else self.made[route.value]
        key: tuple = (route.value, own)
        for hop in route.hops:
            key = (*key, hop)
            if key not in self.moved:
                # A gradient's own phase is backward; a forward value (or an input) is moved there on purpose.
                made_backward = node.meta.get("partitioner_tag") == "is_backward"
                tag = "is_forward" if hop.phase == FORWARD else "is_backward" if made_backward else BACKWARD_ON_PURPOSE
                # What forward moves for backward alone belongs to the layer that made it: readers there name no layer.
                saved = tag == "is_forward" and node.op == "call_function" and (
                    reader.meta.get("partitioner_tag") == "is_backward")
                insert = CallAppender(self.new, node if saved else reader, self.fakes, tag)
                insert.marked = _marked(node, reader, layout, hop)
                (axis,) = [a for a, p, q in zip(self.decision.axes, layout, hop.layout) if p != q]
                compression = (axis.compression, self.gradients[route]) if route in self.gradients else ("", "")
                self.moved[key] = self.redistributor.hop(insert, node, value, layout, hop.layout, compression, own)
            node, layout = self.moved[key], hop.layout
        return node

    def _give(self, route: Route, node: Node) -> Node:
        """Emit the outputs of the graph. Forward outputs get the traced strides."""
        arrived = self._arrive(route, node)
        key = (route.value, route.hops, "given")
        if key not in self.moved:
            value = node.meta["val"]
            if not isinstance(value, torch.Tensor):
                value = [x for _, x in leaves_of(value)][self.graph.values[route.value].port]
            late = node.op == "placeholder" or node.meta.get("partitioner_tag") == "is_backward"
            self.moved[key] = arrived if late else with_traced_strides(arrived, value, CallAppender(self.new, node, self.fakes))
        return self.moved[key]

    def _call(self, node: Node) -> None:
        op = self.by_name[node.name]
        rule = self.rules[op.index]
        layouts = self.decision.operations[op.index]
        arrived = iter([
            self._arrive(self.decision.routes[op.index, k], node, op.index) for k in range(len(op.inputs))
        ])
        operands = set(operand_nodes(node))

        def swap(x: Any) -> Any:
            if not isinstance(x, Node):
                return x
            return next(arrived) if x in operands else self.env[x]

        args, kwargs = pytree.tree_map(swap, (node.args, dict(node.kwargs)), is_leaf=lambda x: isinstance(x, Node))
        values = [self.graph.values[v] for v in op.outputs]

        def part(is_input: bool, tensor: int, dim: int) -> ShardRange | None:
            return self._range(op, layouts, is_input, tensor, dim)

        new = localize(
            LocalCall(
                target=node.target, args=tuple(args), kwargs=kwargs,
                global_shapes=tuple(v.spec.shape for v in values),
                local_shapes=tuple(self.groups.local_shape(v, p) for v, p in zip(values, layouts.made)),
                rule=rule, ranges=shifted_ranges(rule, part), ordered=ordered_ranges(rule, part), at_run_time=self.at_run_time,
                strides=tuple(tuple(n.meta["val"].stride()) for n in operand_nodes(node)),
            ),
            CallAppender(self.new, node, self.fakes),
        )
        self.env[node] = new
        self._check(node, op, values, layouts, new)
        insert, paths = CallAppender(self.new, node, self.fakes), [path for path, _ in leaves_of(node.meta["val"])]
        for value, made, after in zip(values, layouts.made, layouts.outputs):
            part = new
            for position in paths[value.port]:
                part = insert(operator.getitem, part, position)
            whole, own = self.replicas.made_for(value)
            if own and made != after:
                self.own[value.index] = self._reduced(insert, part, value, made, after, own)
            self.made[value.index] = self._reduced(insert, part, value, made, after) if whole else self.own.get(
                value.index, (part, made))
            # Not at the end of the graph: nodes before the last forward output count as forward.
            for route in self.returned.get(value.index, ()):
                self._give(route, node)

    def _reduced(self, insert: CallAppender, part: Node, value: Value, layout: Layout, after: Layout, own: bool = False,
                 ) -> tuple[Node, Layout]:
        for axis in range(len(layout)):
            if layout[axis] != after[axis]:
                following = (*layout[:axis], after[axis], *layout[axis + 1 :])
                part = self.redistributor.hop(insert, part, value, layout, following, own=own)
                layout = following
        return part, layout

    def _range(self, op: Operation, layouts: OperationLayouts, is_input: bool, tensor: int, dim: int) -> ShardRange | None:
        value = self.graph.values[(op.inputs if is_input else op.outputs)[tensor]]
        return range_of(value, (layouts.inputs if is_input else layouts.made)[tensor], dim, self.groups)

    def _check(self, node, op, values, layouts, new) -> None:
        made = [part for _, part in leaves_of(new.meta["val"])]
        for value, layout in zip(values, layouts.made):
            got, expected = tuple(made[value.port].shape), self.groups.local_shape(value, layout)
            if got != expected:
                operands = [tuple(x.meta["val"].shape) for x in new.all_input_nodes]
                raise AssertionError(f"{node.name}: {node.target} on local operands {operands} gave shape {got}, "
                                     f"expected {expected} for layout {layout}")

    def _output(self, node: Node) -> None:
        remaining = iter(self.decision.outputs)

        def swap(x: Any) -> Any:
            if not isinstance(x, Node):
                return x
            if isinstance(x.meta.get("val"), torch.Tensor):
                return self._give(next(remaining), x)
            return self.env[x]

        args = pytree.tree_map(swap, node.args, is_leaf=lambda x: isinstance(x, Node))
        new = self.new.output(args[0])
        new.meta = dict(node.meta)


def _marked(made: Node, reader: Node, layout: Layout, hop: Hop) -> Node | None:
    """Checkpointing marks of a collective: a reduction of partial sums belongs to the producer's region, so that the saved
    value is the sum; a gather belongs to the reader's region, so that the saved value is the shard."""
    if hop.phase != FORWARD:
        return None
    adds_up = any(p != q and p in (PARTIAL, PARTIAL_MAX) for p, q in zip(layout, hop.layout))
    return made if adds_up or REGION not in reader.meta else reader


def shard(gm: GraphModule, graph: PlacementGraph, rules: Sequence[Rule | None], decision: Decision, groups: MeshGroups,
          fake_mode: Any, at_run_time: bool = False) -> GraphModule:
    """The graph of one rank; placeholders and outputs keep their order, placeholders have local shapes."""
    return Sharder(gm, graph, rules, decision, groups, fake_mode, at_run_time).run()


@register
@dataclass(frozen=True)
class Shard(TransformPass):
    """Replaces the whole graph by the graph of one rank. groups: this rank's place in the mesh. at_run_time: read that place
    from the process groups when the graph runs, instead of from constants, except for large slices: then
    ranks have equal graphs, if they differ in nothing else."""

    name = "shard"
    requires = (GRAPH_SIGNATURE, OPERATIONS, DECISION)

    groups: MeshGroups = MeshGroups((), (), ())
    at_run_time: bool = False

    def run(self, graph_module: GraphModule) -> bool:
        operations = read(OPERATIONS, graph_module)
        decision = read(DECISION, graph_module)
        sharded = shard(
            graph_module, operations.graph, operations.rules, decision, self.groups, fake_mode_of(graph_module),
            self.at_run_time)
        graph_module.graph = sharded.graph
        return True
