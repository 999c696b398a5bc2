"""Build the planner's view of a joint graph: operations with their strategies, values with their factors."""
# FX types a node's arguments as a union of everything an argument can be.
# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportCallIssue=false, reportIndexIssue=false
# pyright: reportOperatorIssue=false, reportOptionalMemberAccess=false, reportOptionalSubscript=false, reportReturnType=false
# pyright: reportOptionalOperand=false, reportOptionalIterable=false, reportGeneralTypeIssues=false
from __future__ import annotations

import operator
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch.fx import GraphModule, Node

from passes.analyses.batch_dims import batch_factors, split_along
from passes.analyses.dim_factors import RuledCall, factorize
from passes.analyses.microbatch_dims import row_cuts, seeds, time_strategies, touches
from passes.graph.fx_nodes import arguments_of, constants_of
from passes.graph.module_blocks import assign_blocks, is_backward
from passes.graph.placement_graph import InputKind, Operation, PlacementGraph, Value, ValueKind
from passes.graph.step_phase import BACKWARD, FORWARD
from passes.json_records import FrozenMap
from passes.op_rules.base import REPLICATE, Factors, Rule, Spec, Strategy, strategies
from passes.op_rules.call_rules import call_of, operand_nodes, rule_of_call, spec_of
from passes.op_rules.opaque_calls import is_opaque, is_plain, leaves_of, port_of
from passes.op_rules.rule_table import operator_of

aten = torch.ops.aten


class _PlacementGraphBuilder:
    """Calls and values in order, still without factors and strategies."""

    def __init__(self, gm: GraphModule, input_kinds: Mapping[str, InputKind], trainable: Mapping[str, bool],
                 flops: Mapping[Node, float] | Any):
        self.gm, self.kinds, self.trainable, self.flops = gm, input_kinds, trainable, flops
        self.values: list[Value] = []
        self.operations: list[Operation] = []
        self.rules: list[Rule | None] = []
        self.unruled: dict[str, list[str]] = {}
        self.of: dict[tuple[Node, int], int] = {}
        self.known: dict[Hashable, Rule | None] = {}
        self.blocks = assign_blocks(gm)
        for node in gm.graph.nodes:
            if node.op in ("placeholder", "get_attr"):
                if isinstance(node.meta.get("val"), torch.Tensor):
                    self.value(node, 0, spec_of(node.meta["val"]), None, self.kinds.get(node.name, "constant"))
            elif node.op == "call_function" and node.target is not operator.getitem:
                self._operation(node)

    def value(self, node: Node, port: int, spec: Spec, producer: int | None, kind: ValueKind = "activation") -> int:
        index = len(self.values)
        name = node.name if not isinstance(node.meta.get("val"), (tuple, list)) else f"{node.name}.{port}"
        self.values.append(Value(index, name, spec, (), producer, port, kind, self.trainable.get(node.name, False)))
        self.of[node, port] = index
        return index

    def read(self, node: Node) -> int:
        """The value of a node, through `getitem`."""
        owner = port_of(node)
        assert owner is not None, "only tensors are read"
        return self.of[owner]

    def _operation(self, node: Node) -> None:
        inputs = tuple(self.read(x) for x in operand_nodes(node))
        outputs = tuple(
            self.value(node, port, spec_of(x), len(self.operations))
            for port, (_, x) in enumerate(leaves_of(node.meta.get("val"))) if isinstance(x, torch.Tensor)
        )
        rule = self._rule(node) if outputs else None
        if outputs and rule is None:
            self.unruled.setdefault(str(node.target), []).append(node.name)
        self.rules.append(rule)
        self.operations.append(Operation(
            index=len(self.operations), name=node.name, target=str(node.target), kind=operator_of(node.target).kind,
            inputs=inputs, outputs=outputs, strategies=(), flops=float(self.flops(node)),
            phase=BACKWARD if is_backward(node) else FORWARD, block=self.blocks[node], ruled=rule is not None,
            linear=rule is not None and any(0 in group for group in rule.linear),
        ))


    def _rule(self, node: Node) -> Rule | None:
        """Rule of a call, looked up once for equal calls, such as those of repeated blocks."""
        key = _key(node)
        if key is None:
            return _rule(node)
        if key not in self.known:
            self.known[key] = _rule(node)
        return self.known[key]


def _rule(node: Node) -> Rule | None:
    return None if is_opaque(node) else rule_of_call(call_of(node))


def _key(node: Node) -> Hashable | None:
    """Equal for calls with equal rules; None unless all operands and results are tensors of static sizes."""
    described: list[Hashable] = [node.target, constants_of(node)]
    for value in (*(x.meta.get("val") for x in arguments_of(node)), *(x for _, x in leaves_of(node.meta.get("val")))):
        if not is_plain(value) or not all(type(size) is int for size in (*value.shape, *value.stride())):
            return None
        described.append((tuple(value.shape), value.stride(), value.dtype))
    return tuple(described)


def build_placement_graph(
    gm: GraphModule,
    input_kinds: Mapping[str, InputKind],
    outputs: Sequence[tuple[str, str | None]],
    flops: Any,
    trainable: Mapping[str, bool] | None = None,
    microbatches: int = 1,
) -> tuple[PlacementGraph, tuple[Rule | None, ...]]:
    """Returns the graph and the rule of every operation.

    `input_kinds`: by placeholder name; `outputs`: (name of a node, name of the parameter whose placement it takes, or None if
    it is returned replicated); `flops(node)` -> FLOPs of a whole call; `microbatches`: number in a step, one after another.
    """
    built = _PlacementGraphBuilder(gm, input_kinds, trainable or {}, flops)
    nodes = {node.name: node for node in gm.graph.nodes}
    by_name = {v.name: v.index for v in built.values if v.producer is None}
    returned = [(built.read(nodes[name]), by_name[p] if p is not None else None) for name, p in outputs]
    graph = complete(built.operations, built.values, built.rules, returned, built.unruled, microbatches)
    return graph, tuple(built.rules)


def complete(operations: Sequence[Operation], values: Sequence[Value], rules: Sequence[Rule | None],
             outputs: Sequence[tuple[int, int | None]], unruled: Mapping[str, Sequence[str]] | None = None,
             microbatches: int = 1) -> PlacementGraph:
    """Complete the graph of these calls and values: factors, strategies, rows of the batch, users."""
    calls = [RuledCall(rule, op.inputs, op.outputs) for op, rule in zip(operations, rules) if rule is not None]
    factors = factorize([v.spec.shape for v in values], calls, row_cuts(values, microbatches) if microbatches > 1 else ())
    known: dict[Hashable, tuple[Strategy, ...]] = {}
    decided = [replace(op, strategies=_strategies(op, rule, factors, values, known)) for op, rule in zip(operations, rules)]
    values = [replace(value, factors=found) for value, found in zip(values, factors)]
    batch = batch_factors(decided, values)
    if microbatches > 1:
        decided, values = _with_microbatches(decided, values, rules, microbatches)
    users: list[list[int]] = [[] for _ in values]
    for op in decided:
        for v in dict.fromkeys(op.inputs):
            users[v].append(op.index)
    return PlacementGraph(
        tuple(decided),
        tuple(replace(value, batch=rows, users=tuple(users[value.index])) for value, rows in zip(values, batch)),
        tuple(outputs), FrozenMap({target: tuple(names) for target, names in (unruled or {}).items()}),
    )


def _with_microbatches(operations: Sequence[Operation], values: Sequence[Value], rules: Sequence[Rule | None],
                       microbatches: int) -> tuple[list[Operation], list[Value]]:
    """Split microbatch factors in time alone: devices have the other strategies."""
    numbers = split_along(operations, values, seeds(values, microbatches))
    return (
        [replace(op, strategies=tuple(s for s in op.strategies if not touches(op, s, numbers)),
                 in_time=time_strategies(op, rule, numbers)) for op, rule in zip(operations, rules)],
        [replace(value, microbatch=found) for value, found in zip(values, numbers)],
    )


def _strategies(op: Operation, rule: Rule | None, factors: Sequence[Factors], values: Sequence[Value],
                known: dict[Hashable, tuple[Strategy, ...]]) -> tuple[Strategy, ...]:
    """Strategies of operations, cached by their signature. known: the cache; calls of equal rules share one rule object."""
    inputs, outputs = tuple(factors[v] for v in op.inputs), tuple(factors[v] for v in op.outputs)
    given = tuple(values[v].producer is None for v in op.inputs)
    key = id(rule), inputs, outputs, op.heavy, given, tuple(map(op.inputs.index, op.inputs))
    if key not in known:
        known[key] = _consistent(op, strategies(rule, inputs, outputs), values)
    return known[key]


def _consistent(op: Operation, found: Sequence[Strategy], values: Sequence[Value]) -> tuple[Strategy, ...]:
    """Strategies that are consistent: a value read twice has one placement, a graph input is never a partial sum, and
    heavy work is not replicated on every rank just to keep a sum partial."""
    kept = []
    for s in found:
        if op.heavy and not s.splits and any(p != REPLICATE for p in s.inputs):
            continue
        if any(not isinstance(p, tuple) and p != REPLICATE and values[v].producer is None
               for v, p in zip(op.inputs, s.inputs)):
            continue
        placed: dict[int, Any] = {}
        if all(placed.setdefault(v, p) == p for v, p in zip(op.inputs, s.inputs)):
            kept.append(s)
    return tuple(kept)


