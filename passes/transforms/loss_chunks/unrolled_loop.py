"""Write the loop over chunks of a loss into its graph: the calls once for each chunk, sums and concatenations after them."""
# FX types a node's arguments as a union of everything an argument can be.
# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportOptionalMemberAccess=false
from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch.fx import GraphModule, Node

from passes.compat import LOOP_TURN, fake_mode_of, pytree
from passes.errors import HpmlError
from passes.graph.fx_nodes import has_effect
from passes.graph.loops.loop_parts import HALF
from passes.graph.module_blocks import runs_in_backward
from passes.graph.user_checkpointing import copy_checkpoint_marks
from passes.op_rules.base import Factors, Placement
from passes.op_rules.call_rules import operand_nodes, results_of
from passes.op_rules.local_call import LocalCall, reshape
from passes.op_rules.opaque_calls import leaves_of, port_of
from passes.op_rules.rule_table import operator_of
from passes.transforms.loss_chunks.row_placement import LossLoop, Port
from passes.transforms.rewriting.call_inserter import CallInserter
from passes.transforms.rewriting.fake_results import FakeResults
from passes.transforms.shard.localization import localize
from passes.transforms.shard.output_strides import with_traced_strides

aten, prims = torch.ops.aten, torch.ops.prims
torch.library.define("hpml::beside_gradients", "(Tensor loss, Tensor[] gradients) -> Tensor")
BESIDE = torch.ops.hpml.beside_gradients.default
"""The loss, as a result of its gradients, too: partitioners would compute these in backward, from the logits of all chunks."""
torch.library.define("hpml::add_to_sum", "(Tensor total, Tensor part) -> Tensor")
ADD = torch.ops.hpml.add_to_sum.default
"""An addition that compilers do not move into a kernel after the loop, for which the parts of all chunks would wait."""
torch.library.define("hpml::rows_of_chunk", "(Tensor part) -> Tensor")
ROWS_OF_CHUNK = torch.ops.hpml.rows_of_chunk.default
"""Rows that compilers do not compute in a kernel after the loop, for which the logits of all chunks would wait."""
LEAST_PART_BYTES = 1 << 20
"""Parts of a sum from this size on are added in their own chunk."""
Chunk = tuple[int, int]
"""The first row of a chunk, and the one after its last."""


@torch.library.impl("hpml::beside_gradients", "CompositeExplicitAutograd")
@torch.library.register_fake("hpml::beside_gradients")
def _beside_gradients(loss: torch.Tensor, gradients: Sequence[torch.Tensor]) -> torch.Tensor:
    return loss.clone()


@torch.library.impl("hpml::add_to_sum", "CompositeExplicitAutograd")
@torch.library.register_fake("hpml::add_to_sum")
def _add_to_sum(total: torch.Tensor, part: torch.Tensor) -> torch.Tensor:
    return total + part


@torch.library.impl("hpml::rows_of_chunk", "CompositeExplicitAutograd")
@torch.library.register_fake("hpml::rows_of_chunk")
def _rows_of_chunk(part: torch.Tensor) -> torch.Tensor:
    return part.clone()


class _InForward(CallInserter):
    """Inserts calls that run in forward and that no script's checkpointing speaks of. turn: the chunk that they are for."""

    turn: int | None = None

    def __call__(self, target: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Node:
        node = super().__call__(target, *args, **kwargs)
        node.meta["partitioner_tag"] = "is_forward"
        if self.turn is not None:
            node.meta[LOOP_TURN] = self.turn
        copy_checkpoint_marks(None, node)
        return node


class LoopUnroller:
    """Replaces a loop's calls by those of its chunks, before the first of them. Call `run` where no torch mode is active."""

    def __init__(self, gm: GraphModule, loop: LossLoop, chunks: int):
        self.graph, self.loop = gm.graph, loop
        self.fakes = FakeResults(fake_mode_of(gm))
        self.places = {node: k for k, node in enumerate(gm.graph.nodes)}
        self.anchor = min((node for node in loop.calls if loop.inside(node)), key=self.places.__getitem__)
        self.bounds = [loop.rows * k // chunks for k in range(chunks + 1)]
        self.wholes: dict[Node, Node] = {}
        """By operand from outside, the node that the loop reads: for one that depends on the tangent, a copy with 1 for it."""
        self.collected: dict[Node, list[Node]] = {}
        """By value that leaves the loop: its rows in all chunks so far, or their sum."""
        self.turn: int | None = None
        self.loss = loop.region.loss

    def run(self) -> None:
        leaving = {port_of(node): node for node in self.loop.leaving()}
        for turn, chunk in enumerate(pairwise(self.bounds)):
            self.turn, made = turn, dict[Port, Node]()
            for node in self.loop.calls:
                self._call(node, made, chunk)
                for k in range(len(results_of(node))):
                    if (value := leaving.get((node, k))) is not None:
                        self._collect(value, made[node, k])
        self.turn = None
        gradients = []
        for value in leaving.values():
            joined = self._give(value, self.loop.made[port_of(value) or (value, 0)])
            gradients += [joined] if value in self.loop.region.late else []
        self._hold(gradients)
        self.graph.eliminate_dead_code(has_effect)

    def _insert(self, like: Node) -> _InForward:
        insert = _InForward(self.graph, self.anchor, like, fakes=self.fakes)
        insert.turn = self.turn
        return insert

    # -- one call of one chunk -------------------------------------------------------------------------------------------

    def _call(self, node: Node, made: dict[Port, Node], chunk: Chunk) -> None:
        insert, operands = self._insert(node), operand_nodes(node)
        arrived = iter([self._operand(x, wanted, made, chunk, insert)
                        for x, wanted in zip(operands, self.loop.reads[node], strict=True)])
        args, kwargs = pytree.tree_map(lambda x: next(arrived) if isinstance(x, Node) else x, (node.args, dict(node.kwargs)),
                                       is_leaf=lambda x: isinstance(x, Node))
        shapes = [tuple(x.shape) for x in results_of(node)]
        local = [self._shape(shape, (node, k), self.loop.made[node, k], chunk) for k, shape in enumerate(shapes)]
        new = localize(LocalCall(
            target=node.target, args=tuple(args), kwargs=kwargs, global_shapes=tuple(shapes), local_shapes=tuple(local),
            rule=self.loop.rules[node], ranges={}, strides=tuple(tuple(x.meta["val"].stride()) for x in operands)), insert)
        tensors = [(path, x) for path, x in leaves_of(new.meta["val"]) if isinstance(x, torch.Tensor)]
        if [tuple(x.shape) for _, x in tensors] != local:
            raise HpmlError(f"{node.name}: {node.target} on rows of a chunk gave the shapes {[x.shape for _, x in tensors]}, "
                            f"expected {local}", "loss_chunks", "set loss_chunks=1 and report this")
        for k, (path, _) in enumerate(tensors):
            part = new
            for position in path:
                part = insert(operator.getitem, part, position)
            made[node, k] = part

    def _operand(self, x: Node, wanted: Placement, made: dict[Port, Node], chunk: Chunk, insert: CallInserter) -> Node:
        port = port_of(x) or (x, 0)
        if self.loop.inside(x) or port in made and self.loop.made[port] == wanted:
            return made[port]
        whole = self._whole(x)
        return whole if not isinstance(wanted, tuple) else rows_of(insert, whole, self.loop.factors[port], wanted, chunk)

    def _shape(self, shape: tuple[int, ...], port: Port, placement: Placement, chunk: Chunk) -> tuple[int, ...]:
        if not isinstance(placement, tuple):
            return shape
        dim, k = placement
        size = shape[dim] // self.loop.factors[port][dim][k] * (chunk[1] - chunk[0])
        return (*shape[:dim], size, *shape[dim + 1:])

    # -- what comes in ---------------------------------------------------------------------------------------------------

    def _whole(self, x: Node) -> Node:
        """The node that the loop reads for an operand from outside, moved before the loop with all that it is computed from."""
        if x not in self.wholes:
            self.wholes[x] = self._with_unit_tangent(x) if x in self.loop.region.late else self._moved(x)
        return self.wholes[x]

    def _moved(self, x: Node) -> Node:
        before, stack = {x}, [x]
        while stack:
            for node in stack.pop().all_input_nodes:
                if node not in before:
                    before.add(node)
                    stack.append(node)
        for node in sorted(before, key=self.places.__getitem__):
            if runs_in_backward(node):  # traced there, as derivatives are, though it depends on forward alone
                node.meta["partitioner_tag"] = "is_forward"
            if self.places[node] > self.places[self.anchor]:
                self.anchor.prepend(node)
                self.places[node] = -1
        return x

    def _with_unit_tangent(self, x: Node) -> Node:
        insert = _InForward(self.graph, self.anchor, x, fakes=self.fakes)  # of all chunks
        if x is self.loop.region.tangent:
            value = x.meta["val"]
            return insert(aten.full.default, [], 1.0, dtype=value.dtype, device=value.device)
        swap = {node: self._whole(node) for node in x.all_input_nodes}
        args, kwargs = torch.fx.map_arg((x.args, x.kwargs), lambda node: swap.get(node, node))
        return insert(x.target, *args, **kwargs)

    # -- what goes out ---------------------------------------------------------------------------------------------------

    def _collect(self, value: Node, part: Node) -> None:
        found = self.collected.setdefault(value, [])
        if isinstance(self.loop.made[port_of(value) or (value, 0)], tuple):
            found.append(part if _is_in_memory(part) else self._insert(value)(ROWS_OF_CHUNK, part))
            return
        insert = self._insert(value)
        if part.meta["val"].dtype in HALF:  # many roundings to 16 bits would add up
            part = insert(prims.convert_element_type.default, part, torch.float32)
        if found and part.target is aten.mm.default:  # which compilers add in place, so that no product takes memory
            found[:] = [insert(aten.addmm.default, found[0], *part.args)]
        else:
            add = ADD if part.meta["val"].nbytes >= LEAST_PART_BYTES else aten.add.Tensor
            found[:] = [insert(add, found[0], part) if found else part]

    def _hold(self, gradients: list[Node]) -> None:
        """Let forward compute the gradients."""
        loss = self.loss
        with self.graph.inserting_after(loss):
            held = self.graph.call_function(BESIDE, (loss, gradients))
        held.meta.update({key: loss.meta[key] for key in ("seq_nr", "nn_module_stack") if key in loss.meta})
        held.meta["val"] = self.fakes(aten.clone.default, (loss.meta["val"],), {})  # in other memory: it is no view of the loss
        held.meta["partitioner_tag"] = "is_forward"
        output = self.graph.output_node()
        output.replace_input_with(loss, held)

    def _give(self, value: Node, placement: Placement) -> Node:
        insert, found, whole = self._insert(value), self.collected[value], value.meta["val"]
        joined = found[0] if not isinstance(placement, tuple) else _joined(
            insert, found, self.loop.factors[port_of(value) or (value, 0)], placement, tuple(whole.shape))
        if joined.meta["val"].dtype != whole.dtype:
            joined = insert(prims.convert_element_type.default, joined, whole.dtype)
        late = value in self.loop.region.late
        given = self._scaled(joined, value) if late else with_traced_strides(joined, whole, insert)
        value.replace_all_uses_with(given, delete_user_cb=lambda user: not self.loop.inside(user))
        if value is self.loop.region.loss:
            self.loss = given
        return joined

    def _scaled(self, joined: Node, value: Node) -> Node:
        """The gradient for the tangent that comes, in backward."""
        insert = CallInserter(self.graph, value, fakes=self.fakes)
        result = insert(aten.mul.Tensor, joined, self.loop.region.tangent)
        if result.meta["val"].dtype != value.meta["val"].dtype:
            result = insert(prims.convert_element_type.default, result, value.meta["val"].dtype)
        return result


def _is_in_memory(part: Node) -> bool:
    """True for results of library calls, as matrix products are, and views of them."""
    while operator_of(part.target).view and isinstance(part.args[0], Node):
        part = part.args[0]
    return operator_of(part.target).heavy is not None


def rows_apart(factors: Factors, placement: tuple[int, int], shape: Sequence[int]) -> tuple[list[int], int]:
    """The shape with the split factor, and what is inside of it, as a dim of its own, and that dim; unchanged if it is the
    outermost of its dim."""
    dim, k = placement
    outer = math.prod(factors[dim][:k])
    if outer == 1:
        return list(shape), dim
    return [*shape[:dim], outer, shape[dim] // outer, *shape[dim + 1:]], dim + 1


def rows_of(insert: CallInserter, x: Node, factors: Factors, placement: tuple[int, int], chunk: Chunk) -> Node:
    """The rows of one chunk: a view, where these are contiguous."""
    shape = tuple(x.meta["val"].shape)
    apart, dim = rows_apart(factors, placement, shape)
    inner = math.prod(factors[placement[0]][placement[1] + 1:])
    part = x if len(apart) == len(shape) else reshape(insert, x, apart)
    part = insert(aten.slice.Tensor, part, dim, chunk[0] * inner, chunk[1] * inner)
    if len(apart) == len(shape):
        return part
    outer, size = part.meta["val"].shape[dim - 1], part.meta["val"].shape[dim]
    return reshape(insert, part, [*shape[:placement[0]], outer * size, *shape[placement[0] + 1:]])


def _joined(insert: CallInserter, parts: Sequence[Node], factors: Factors, placement: tuple[int, int], shape: tuple[int, ...],
            ) -> Node:
    """Rows of all chunks, concatenated. shape: of the whole."""
    apart, dim = rows_apart(factors, placement, shape)
    if len(apart) == len(shape):
        return insert(aten.cat.default, list(parts), dim)
    outer, sizes = apart[dim - 1], {x.meta["val"].shape[dim - 1] for x in parts}
    if len(sizes) == 1:  # so that a compiler computes each part in its turn, into the memory of the concatenation
        joined = reshape(insert, insert(aten.cat.default, list(parts), dim - 1),
                         [*shape[:dim - 1], len(parts), outer, sizes.pop() // outer, *shape[dim:]])
        order = [*range(dim - 1), dim, dim - 1, *range(dim + 1, len(shape) + 2)]
        return reshape(insert, insert(aten.permute.default, joined, order), list(shape))
    split = [reshape(insert, x, [*shape[:dim - 1], outer, x.meta["val"].shape[dim - 1] // outer, *shape[dim:]]) for x in parts]
    return reshape(insert, insert(aten.cat.default, split, dim), list(shape))
