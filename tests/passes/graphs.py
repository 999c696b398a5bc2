"""Placement graphs made by hand: call by call, with the real rules, but without FX and without a model."""
from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from passes.analyses.placement_graph_builder import complete
from passes.cost_model.algebra import NUMBERS
from passes.graph.placement_graph import InputKind, Operation, PlacementGraph, Value
from passes.graph.step_phase import BACKWARD, FORWARD
from passes.op_rules.base import Call, Operand, Rule
from passes.op_rules.call_rules import rule_of_call, spec_of
from passes.op_rules.rule_table import operator_of

aten = torch.ops.aten


@dataclass
class Builder:
    """`v = builder.input((8, 4)); w = builder.call(aten.relu.default, v); graph = builder.finish([w])`.

    Values are their indices; every operation has one result. `backward` and `block` are of the calls to come.
    """

    backward: bool = False
    block: str = ""
    values: list[Value] = field(default_factory=list)
    operations: list[Operation] = field(default_factory=list)
    rules: list[Rule | None] = field(default_factory=list)

    def input(self, shape: Sequence[int], kind: InputKind = "batch") -> int:
        index = len(self.values)
        spec = spec_of(torch.empty(tuple(shape), device="meta"))
        self.values.append(Value(index, f"{kind}_{index}", spec, (), None, 0, kind, kind == "parameter"))
        return index

    def call(self, target: Any, *args: Any, ruled: bool = True) -> int:
        """`args`: values as `V(index)`, anything else as it is."""
        operands = [a.index for a in args if isinstance(a, V)]
        order = itertools.count()
        real = [torch.empty(self.values[a.index].spec.shape, device="meta") if isinstance(a, V) else a for a in args]
        result = spec_of(target(*real))
        rule = rule_of_call(Call(
            target, tuple(Operand(next(order)) if isinstance(a, V) else a for a in args), {},
            tuple(self.values[v].spec for v in operands), (result,),
            tuple(x.stride() for x in real if isinstance(x, torch.Tensor)),
        )) if ruled else None
        kind = operator_of(target).kind
        flops = 0.0
        if kind == "matmul":
            flops = 2.0 * result.elements * self.values[operands[0]].spec.shape[-1]
        number, out = len(self.operations), len(self.values)
        self.values.append(Value(out, f"value_{out}", result, (), number))
        self.operations.append(Operation(
            number, f"op_{number}", str(target), kind, tuple(operands), (out,), (), flops,
            BACKWARD if self.backward else FORWARD, self.block, ruled,
            rule is not None and any(0 in group for group in rule.linear),
        ))
        self.rules.append(rule)
        return out

    def finish(self, outputs: Sequence[int | tuple[int, int]]) -> PlacementGraph:
        """outputs: values, or (gradient, parameter)."""
        returned = [(o, None) if isinstance(o, int) else o for o in outputs]
        graph = complete(self.operations, self.values, self.rules, returned)
        return replace(graph, saved=frozenset(_saved(graph)))


def _saved(graph: PlacementGraph) -> set[int]:
    """What backward needs of forward, where it computes pointwise operations and views again."""
    kept, seen = set(), set()
    left = [v for op in graph.operations if op.phase == BACKWARD for v in op.inputs]
    while left:
        v = left.pop()
        producer = graph.values[v].producer
        if v in seen or producer is None or graph.operations[producer].phase == BACKWARD:
            continue
        seen.add(v)
        op = graph.operations[producer]
        if op.heavy or not op.ruled or any(word in op.target for word in ("sum", "amax", "rand", "dropout")):
            kept.add(v)
        else:
            left += op.inputs
    return kept


@dataclass(frozen=True)
class V:
    """A value among the arguments of a call."""

    index: int


class Prices:
    """Simple prices. `light`: whether pointwise kernels cost anything. axis k has latency[k] and us_per_byte[k]."""

    def __init__(self, latency=(2.0, 5.0), us_per_byte=(0.01, 0.03), us_per_flop=0.001, memory=0.001, launch=0.5,
                 optimizer=0.02, light=True):
        self.latency, self.us_per_byte, self.us_per_flop = latency, us_per_byte, us_per_flop
        self.memory, self.launch, self.optimizer, self.light = memory, launch, optimizer, light

    algebra, keyed = NUMBERS, False

    def kernel(self, flops: float, nbytes: float, dtype: str, kind: str, key: str = "") -> float:
        if kind == "pointwise" and not self.light:
            return 0.0
        return max(flops * self.us_per_flop, nbytes * self.memory) + self.launch

    def collective(self, kind: str, axis: int, nbytes: float) -> float:
        rounds = 2 if kind == "all_reduce" else 1
        return rounds * (self.latency[axis] + nbytes * self.us_per_byte[axis])

    def update(self, elements: float, dtype: str) -> float:
        return elements * self.optimizer
