"""Place the calls of a loss's region in the loop over chunks of rows, by the rules of the microbatch axis.

    R   whole, before the loop: what does not depend on the head, such as the count of unmasked tokens
    S   rows of one chunk, in the loop
    P   partial, summed over the chunks, in the loop

All else comes after the loop and reads rows that are concatenated, or sums. Nothing in the loop may read it: a call that needs
all rows of something large, and a call in the loop that needs a total, are why a loss is not computed in chunks. Placements are
exact by the rules of operators; here they follow from one choice, the factor of the head's result that is split.
"""
# FX types a node's arguments as a union of everything an argument can be.
# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportOptionalMemberAccess=false
from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch.fx import GraphModule, Node

from passes.analyses.dim_factors import RuledCall, factorize
from passes.analyses.microbatch_dims import same_for_all
from passes.graph.fx_nodes import WAIT, is_collective
from passes.op_rules.base import PARTIAL, PARTIAL_MAX, REPLICATE, Factors, Placement, Rule, Strategy, strategies
from passes.op_rules.call_rules import operand_nodes, results_of, rule_of
from passes.op_rules.collective_rules import collective_rule
from passes.op_rules.opaque_calls import is_opaque, port_of
from passes.op_rules.recomputable import is_recomputable
from passes.op_rules.rule_table import operator_of
from passes.transforms.loss_chunks.loss_region import LossRegion, Unchunkable, matrices_of
from passes.transforms.microbatch.tangent_linearity import LinearCalls

Port = tuple[Node, int]
"""A tensor: the call that returns it, and which of its results it is."""


aten = torch.ops.aten
PARTS = (operator.getitem, aten.split.Tensor, aten.cat.default, aten.view.default, aten.reshape.default, aten.permute.default)
"""Calls that put together what ranks gather."""


@dataclass
class LossLoop:
    """calls: in the loop, in order. made: placements of what they return. reads: of their operands, by call. copied: those of
    the calls that also run outside the loop, if anything there reads them. rows: size of the factor that is split."""

    region: LossRegion
    rows: int
    factors: dict[Port, Factors]
    rules: dict[Node, Rule | None]
    calls: list[Node] = field(default_factory=list)
    made: dict[Port, Placement] = field(default_factory=dict)
    reads: dict[Node, tuple[Placement, ...]] = field(default_factory=dict)
    copied: set[Node] = field(default_factory=set)

    def inside(self, node: Node) -> bool:
        """True if a node is computed in the loop alone; parts of a call's results are where it is."""
        while node.target is operator.getitem and isinstance(node.args[0], Node):
            node = node.args[0]
        return node in self.reads and node not in self.copied

    def leaving(self) -> list[Node]:
        """Values of the loop that others read, as nodes, in order."""
        graph = self.calls[0].graph
        return [node for node in graph.nodes if node.op == "call_function" and self.inside(node)
                and not isinstance(node.meta.get("val"), (tuple, list)) and any(not self.inside(user) for user in node.users)]


def place_rows(gm: GraphModule, region: LossRegion, chunks: int) -> LossLoop:
    """The loop that splits rows into this many chunks, evenly where possible. Raises Unchunkable."""
    factors, rules = factors_of(region)
    head = region.heads[0]
    weight = operand_nodes(head).index(matrices_of(head)[1])
    splits: dict[bool, list[tuple[int, Strategy]]] = {False: [], True: []}
    """By whether the weight is split: rows of the hidden state come first, then columns of the weight."""
    for strategy in strategies_of(head, factors, rules):
        if isinstance(p := strategy.outputs[0], tuple):
            splits[isinstance(strategy.inputs[weight], tuple)].append((factors[head, 0][p[0]][p[1]], strategy))
    reasons: list[Unchunkable] = []
    for group in splits.values():
        fitting = [each for each in group if each[0] >= chunks]
        if not fitting:
            reasons.append(TooFewRows(head.name, max((rows for rows, _ in group), default=1)))
        for rows, strategy in sorted(fitting, key=lambda each: each[0] % chunks != 0):
            try:
                return _placed(gm, LossLoop(region, rows, factors, rules), {head: strategy})
            except Unchunkable as error:
                reasons.append(error)
    raise reasons[0]


def _placed(gm: GraphModule, loop: LossLoop, given: dict[Node, Strategy]) -> LossLoop:
    """The loop for these strategies. Where it turns out to need another call of the region, such as a second head, that call is
    given, too, so that all its readers are placed as well."""
    while True:
        placement = _RowPlacement(gm, replace(loop, calls=[], made={}, reads={}, copied=set()), given)
        found = placement.run()
        more = {node: strategy for node, strategy in placement.brought.items() if node in loop.region.calls}
        if not more:
            return found
        given = {**given, **more}


class TooFewRows(Unchunkable):
    """There are fewer rows than chunks. most: the most chunks that are possible."""

    def __init__(self, head: str, most: int) -> None:
        super().__init__(f"{head} has {most} rows that can be split")
        self.most = most


def factors_of(region: LossRegion) -> tuple[dict[Port, Factors], dict[Node, Rule | None]]:
    """Factors of all tensors of the region and of what is computed from labels and the like, and rules of the calls."""
    calls = _with_operands(region)
    rules = {node: _rule(node) for node in calls}
    number: dict[Port, int] = {}
    shapes: list[tuple[int, ...]] = []
    ruled = []

    def index(port: Port, value: torch.Tensor) -> int:
        if port not in number:
            if not all(isinstance(n, int) for n in value.shape):
                raise Unchunkable(f"sizes of {port[0].name} differ from call to call")
            number[port] = len(shapes)
            shapes.append(tuple(value.shape))
        return number[port]

    for node in calls:
        inputs = tuple(index(port_of(x) or (x, 0), x.meta["val"]) for x in operand_nodes(node))
        outputs = tuple(index((node, k), x) for k, x in enumerate(results_of(node)))
        rule = rules[node]
        if rule is not None:
            ruled.append(RuledCall(rule, inputs, outputs))
    found = factorize(shapes, ruled)
    return {port: found[k] for port, k in number.items()}, rules


def _rule(node: Node) -> Rule | None:
    return None if is_opaque(node) else collective_rule(node) if is_collective(node.target) else rule_of(node)


def _with_operands(region: LossRegion) -> list[Node]:
    """Calls of the region, and light calls before it that compute their operands, but for those of heads."""
    found = {node for node in region.calls if node.target is not operator.getitem}
    stack = [x for node in found if node not in region.heads for x in node.all_input_nodes]
    while stack:
        node = stack.pop()
        if node.op == "call_function" and node not in found and not operator_of(node.target).heavy:
            if node.target is not operator.getitem:
                found.add(node)
            stack += node.all_input_nodes
    return [node for node in region.heads[0].graph.nodes if node in found]


def strategies_of(node: Node, factors: dict[Port, Factors], rules: dict[Node, Rule | None]) -> Iterator[Strategy]:
    """Strategies of a call that split it into equal calls, or keep sums."""
    rule = rules.get(node)
    inputs = [factors[port_of(x) or (x, 0)] for x in operand_nodes(node)]
    outputs = [factors[node, k] for k in range(len(results_of(node)))]
    for strategy in strategies(rule, inputs, outputs):
        if rule is not None and same_for_all(rule, strategy) and PARTIAL_MAX not in strategy.inputs + strategy.outputs:
            yield strategy


class _RowPlacement:
    """Places the calls of one region. given: strategies that others follow from. after: nodes that depend on values of the loop
    and are not in it. brought: strategies of the calls that others needed in the loop."""

    def __init__(self, gm: GraphModule, loop: LossLoop, given: dict[Node, Strategy]):
        self.gm, self.loop, self.region, self.given = gm, loop, loop.region, given
        self.brought: dict[Node, Strategy] = {}
        self.after: set[Node] = set()
        self.linear = LinearCalls(loop.region.tangent)

    def run(self) -> LossLoop:
        members = frozenset(self.region.calls)
        for node in self.gm.graph.nodes:
            if node.op != "call_function":
                continue
            depends = node in self.given or any(self.loop.inside(x) for x in node.all_input_nodes)
            if node.target is operator.getitem and depends:
                pass
            elif depends and node in members:
                self._place(node)
            elif depends or not self.after.isdisjoint(node.all_input_nodes):
                self.after.add(node)
            if node in members or node not in self.region.late:
                self.linear.note(node)
        self._check()
        return self.loop

    def _place(self, node: Node) -> None:
        """Add a call to the loop."""
        operands = operand_nodes(node)
        late = [x for x in operands if x in self.after]
        if late:
            raise Unchunkable(f"{_told(node)} needs {_told(late[0])}, which needs all rows")
        if not self.region.others.isdisjoint(node.all_input_nodes):
            raise Unchunkable(f"{node.name} belongs to the gradients of two outputs")
        strategy = self.given.get(node) or self._following(node, operands)
        if strategy is None:
            raise Unchunkable(f"rows depend on each other at {_told_reader(node)}")
        self._enter(node, operands, strategy)

    def _following(self, node: Node, operands: Sequence[Node]) -> Strategy | None:
        """The strategy of a call that takes its operands as the loop makes them: others are sliced, or whole."""
        made = [self.loop.made.get(port_of(x) or (x, 0)) if self.loop.inside(x) else None for x in operands]
        for strategy in strategies_of(node, self.loop.factors, self.loop.rules):
            if all(wanted != PARTIAL if have is None else have == wanted for have, wanted in zip(made, strategy.inputs)) and (
                    all(p != REPLICATE for p in strategy.outputs)):
                return strategy
        return None

    def _enter(self, node: Node, operands: Sequence[Node], strategy: Strategy) -> None:
        for x, wanted in zip(operands, strategy.inputs, strict=True):
            if isinstance(wanted, tuple) and not self.loop.inside(x):
                self._bring(x, wanted)
        self.loop.calls.append(node)
        self.loop.reads[node] = strategy.inputs
        for k, placement in enumerate(strategy.outputs):
            self.loop.made[node, k] = placement

    def _bring(self, x: Node, wanted: Placement) -> None:
        """Compute a value in the loop, as a copy, instead of slicing it, where it is as large as the logits."""
        owner = port_of(x)
        if owner is None or (node := owner[0]) in self.loop.copied or not self._is_copied(node):
            return
        for strategy in strategies_of(node, self.loop.factors, self.loop.rules):
            if strategy.outputs[owner[1]] == wanted and PARTIAL not in strategy.inputs and all(
                    p != REPLICATE for p in strategy.outputs):
                self._enter(node, operand_nodes(node), strategy)
                self.loop.copied.add(node)
                self.brought[node] = strategy
                return

    def _is_copied(self, node: Node) -> bool:
        """True for calls of the region, and for those that return or read large values: in rows they take no longer."""
        return node.op == "call_function" and node in self.loop.rules and is_recomputable(node) and (
            node in self.region.calls or any(map(self.region.is_large, (node, *operand_nodes(node)))))

    def _check(self) -> None:
        """Nothing as large as the logits leaves the loop, and what leaves it is linear in the tangent."""
        for node in self.loop.leaving():
            value, readers = node.meta["val"], [user for user in node.users if not self.loop.inside(user)]
            if isinstance(self.loop.made[port_of(node) or (node, 0)], tuple) and self.region.is_large(node):
                told = "is returned" if any(user.op == "output" for user in readers) else f"is read by {readers[0].name}"
                raise Unchunkable(f"{node.name}, as large as the result of {self.region.heads[0].name}, {told}")
            if node in self.region.late and value.dtype == torch.float16:
                raise Unchunkable(f"{node.name} is a gradient in float16, which would underflow before it is scaled")
        nonlinear = self.linear.found.intersection(self.loop.calls)
        if nonlinear:
            raise Unchunkable(f"gradients are not linear in the loss's at {min(map(_told, nonlinear))}")
        ends = [node for node in self.loop.leaving() if node in self.region.late]
        if not ends:
            raise Unchunkable("no gradient leaves the loop")


def _told_reader(node: Node) -> str:
    """The call; for a collective the one that reads its result."""
    found = node
    while found.users and (is_collective(found.target) or found.target in (WAIT, *PARTS)):
        found = next(iter(found.users))
    if found is node or not is_collective(node.target) or found.op == "output":
        return _told(node)
    return f"{_told(found)}, which reads what {node.name} gathers"


def _told(node: Node) -> str:
    return f"{node.name} ({node.target})"
