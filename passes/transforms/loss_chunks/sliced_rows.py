"""Move slices of rows from a head's result to what the head reads: rows that nobody reads are not computed.

    logits = hidden @ weight                      part = hidden[:, :-1]
    loss = f(logits[:, :-1])            ->        loss = f(part @ weight)

As Hugging Face shifts labels: of 8 x 256 tokens, 8 x 255 have a loss. Rows of a chunk can be split along the 256 tokens only
before the slice, and along the 255 only behind it, so there were at most 8 chunks. What is computed from the head row by row is
computed of fewer rows, back to the gradients: these were zero in all others.
"""
# FX types a node's arguments as a union of everything an argument can be.
# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportOptionalMemberAccess=false
from __future__ import annotations

import operator
from collections.abc import Iterator

import torch
from torch.fx import GraphModule, Node

from passes.compat import fake_mode_of, pytree
from passes.graph.fx_nodes import has_effect
from passes.op_rules.base import PARTIAL, Factors, Placement, Rule, Strategy
from passes.op_rules.call_rules import operand_nodes, results_of
from passes.op_rules.local_call import LocalCall, reshape
from passes.op_rules.opaque_calls import port_of
from passes.transforms.loss_chunks.loss_region import LossRegion, matrices_of
from passes.transforms.loss_chunks.row_placement import Port, factors_of, strategies_of
from passes.transforms.loss_chunks.unrolled_loop import rows_apart, rows_of
from passes.transforms.rewriting.call_inserter import CallInserter
from passes.transforms.rewriting.fake_results import FakeResults
from passes.transforms.shard.localization import localize

aten = torch.ops.aten
Range = tuple[int, int]
"""The first row that is read, and the one after the last."""


def slice_before_heads(gm: GraphModule, region: LossRegion) -> bool:
    """Rewrite a joint graph where one range of the rows of a head's result is read. Returns True if it changed."""
    factors, rules = factors_of(region)
    for head in region.heads:
        weight = operand_nodes(head).index(matrices_of(head)[1])
        for strategy in strategies_of(head, factors, rules):
            if not isinstance(strategy.outputs[0], tuple) or isinstance(strategy.inputs[weight], tuple):
                continue
            rows = _SlicedRows(region, factors, rules, head, strategy)
            if rows.found():
                _Rewrite(gm, rows).run()
                return True
    return False


class _SlicedRows:
    """Calls on rows of which one range is read. made: placements of what they return. reads: of their operands. zero: calls
    whose other rows are zero. slices: those that read the range. pads: gradients of them. range: in rows of the factor that
    is split."""

    def __init__(self, region: LossRegion, factors: dict[Port, Factors], rules: dict[Node, Rule | None], head: Node,
                 strategy: Strategy):
        self.region, self.factors, self.rules, self.head, self.strategy = region, factors, rules, head, strategy
        self.made: dict[Port, Placement] = {}
        self.reads: dict[Node, tuple[Placement, ...]] = {}
        self.zero: set[Node] = set()
        self.slices: list[Node] = []
        self.pads: list[Node] = []
        self.range: Range | None = None

    def inside(self, x: Node) -> bool:
        return isinstance(self.made.get(port_of(x) or (x, 0)), tuple)

    def found(self) -> bool:
        """True if the calls can be rewritten."""
        self._enter(self.head, self.strategy)
        if not all(map(self._place, self._others())) or not self.slices:
            return False
        return all(node in self.zero or all(map(self._keeps, node.users)) for node in self.reads)

    def _others(self) -> Iterator[Node]:
        return (node for node in self.region.calls if node is not self.head and (
            self._is_pad(node) or any(map(self.inside, node.all_input_nodes))))

    def _keeps(self, user: Node) -> bool:
        """True for a reader of rows that reads no others."""
        return user in self.reads or user in self.slices

    def _place(self, node: Node) -> bool:
        """Returns False if a call prevents the rewrite."""
        if self._is_pad(node):
            self.pads.append(node)
            self.zero.add(node)
            self.made[node, 0] = self.made[port_of(self.slices[0].args[0])]
            return True
        if node.target is operator.getitem:
            return False
        if (rows := self._rows_read(node)) is not None:
            self.slices.append(node)
            self.range, before = rows, self.range
            return before in (None, rows)
        operands = operand_nodes(node)
        zeros = {k for k, x in enumerate(operands) if x in self.zero}
        rule = self.rules.get(node)
        is_zero = rule is not None and any(each <= zeros for each in rule.linear)
        for strategy in strategies_of(node, self.factors, self.rules):
            kept = all(self.made[port_of(x)] == wanted if self.inside(x) else wanted != PARTIAL
                       for x, wanted in zip(operands, strategy.inputs))
            if kept and len(strategy.outputs) == 1 and (
                    isinstance(p := strategy.outputs[0], tuple) or p == PARTIAL and is_zero):
                self._enter(node, strategy)
                self.zero |= {node} if is_zero else set()
                return is_zero or not zeros
        return False

    def _enter(self, node: Node, strategy: Strategy) -> None:
        self.reads[node] = strategy.inputs
        for k, placement in enumerate(strategy.outputs):
            self.made[node, k] = placement

    def _rows_read(self, node: Node) -> Range | None:
        """The range of a slice of the rows."""
        if node.target is not aten.slice.Tensor or not self.inside(node.args[0]):
            return None
        return self._range(node, node.args[0], *node.args[1:])

    def _is_pad(self, node: Node) -> bool:
        """True for the gradient of one of the slices: zeros, but for a range of rows."""
        if node.target is not aten.slice_scatter.default or not self.slices:
            return False
        base, whole = node.args[0], self.slices[0].args[0]
        if not isinstance(base, Node) or base.target is not aten.full.default or base.args[1] != 0 or node.args[1] in self.zero:
            return False
        same = tuple(node.meta["val"].shape) == tuple(whole.meta["val"].shape)
        return same and self._range(node, whole, *node.args[2:]) == self.range

    def _range(self, node: Node, whole: Node, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1,
               ) -> Range | None:
        port = port_of(whole)
        shape, placement = whole.meta["val"].shape, self.made[port]
        if node.kwargs or step != 1 or placement != (dim % len(shape), 0):
            return None
        rows = self.factors[port][dim][0]
        inner = shape[dim] // rows
        first, last, _ = slice(start, end).indices(shape[dim])
        whole_blocks = first % inner == last % inner == 0 and 0 < last - first < shape[dim]
        return (first // inner, last // inner) if whole_blocks else None


class _Rewrite:
    """Replaces the calls by those on fewer rows, each at its place."""

    def __init__(self, gm: GraphModule, rows: _SlicedRows):
        assert rows.range is not None
        self.gm, self.rows, self.range, self.fakes = gm, rows, rows.range, FakeResults(fake_mode_of(gm))
        self.new: dict[Port, Node] = {}
        self.sliced: dict[tuple[Node, Placement], Node] = {}

    def run(self) -> None:
        rows = self.rows
        for node in list(self.gm.graph.nodes):
            if node in rows.pads:
                self.new[node, 0] = node.args[1]
            elif node in rows.slices:
                node.replace_all_uses_with(self.new[port_of(node.args[0])])
            elif node in rows.reads:
                self._call(node)
            if node in rows.zero:
                self._give(node)
        self.gm.graph.eliminate_dead_code(has_effect)
        self.gm.recompile()

    def _call(self, node: Node) -> None:
        rows, insert = self.rows, CallInserter(self.gm.graph, node, fakes=self.fakes)
        operands = operand_nodes(node)
        arrived = iter([self._operand(x, wanted, insert) for x, wanted in zip(operands, rows.reads[node], strict=True)])
        args, kwargs = pytree.tree_map(lambda x: next(arrived) if isinstance(x, Node) else x, (node.args, dict(node.kwargs)),
                                       is_leaf=lambda x: isinstance(x, Node))
        (whole,) = [tuple(x.shape) for x in results_of(node)]
        self.new[node, 0] = localize(LocalCall(
            target=node.target, args=tuple(args), kwargs=kwargs, global_shapes=(whole,), local_shapes=(self._shape(node),),
            rule=rows.rules[node], ranges={}, strides=tuple(tuple(x.meta["val"].stride()) for x in operands)), insert)

    def _operand(self, x: Node, wanted: Placement, insert: CallInserter) -> Node:
        port = port_of(x) or (x, 0)
        if not isinstance(wanted, tuple) or self.rows.inside(x):
            return self.new.get(port, x)
        if (x, wanted) not in self.sliced:
            self.sliced[x, wanted] = rows_of(insert, self.new.get(port, x), self.rows.factors[port], wanted, self.range)
        return self.sliced[x, wanted]

    def _shape(self, node: Node) -> tuple[int, ...]:
        shape, placement = tuple(node.meta["val"].shape), self.rows.made[node, 0]
        if not isinstance(placement, tuple):
            return shape
        dim, k = placement
        size = shape[dim] // self.rows.factors[node, 0][dim][k] * (self.range[1] - self.range[0])
        return (*shape[:dim], size, *shape[dim + 1:])

    def _give(self, node: Node) -> None:
        """Give a gradient to its other readers: a sum as it is, rows with zeros in place of the others."""
        others = [user for user in node.users if user not in self.rows.reads]
        placement, given = self.rows.made[node, 0], self.new[node, 0]
        if not others or node in self.rows.pads:
            return
        if isinstance(placement, tuple):
            insert, factors = CallInserter(self.gm.graph, node, fakes=self.fakes), self.rows.factors[node, 0]
            shape = tuple(node.meta["val"].shape)
            apart, dim = rows_apart(factors, placement, given.meta["val"].shape)
            inner = factors[placement[0]][placement[1] + 1:]
            size = torch.Size(inner).numel()
            rows = factors[placement[0]][placement[1]]
            pad = [0, 0] * (len(apart) - 1 - dim) + [self.range[0] * size, (rows - self.range[1]) * size]
            given = reshape(insert, given, apart)
            given = reshape(insert, insert(aten.constant_pad_nd.default, given, pad, 0.0), shape)
        node.replace_all_uses_with(given, delete_user_cb=lambda user: user not in self.rows.reads)
