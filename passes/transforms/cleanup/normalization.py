"""Rewrite a joint graph into the normal form that rules and clusters expect, with the same values.

- `alias` and `detach` are removed where the caller cannot notice;
- random numbers that only take the shape of a tensor do not depend on it, and dropout multiplies by a mask, so that a mask
  that is drawn whole on every rank (to equal one device's) needs no unsharded activation;
- constants that only take dtype and device of a tensor (`new_zeros`) do not depend on it, either;
- a fused bias (`addmm`) is split off, so that the product may be a partial sum while the bias is added once;
- `mean`, `var` and `var_mean` become sums: over a split dim these are partial sums, so that the statistics of a
  BatchNorm over a split batch are those of the whole batch without special handling;
- `as_strided` becomes equivalent views;
- every heavy operation gets its own copies of the views that lead to it, so that the value before the views is the one
  shared by its users.
"""
# FX types a node's arguments as a union of everything an argument can be.
# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportCallIssue=false, reportIndexIssue=false
# pyright: reportOperatorIssue=false, reportOptionalMemberAccess=false, reportOptionalSubscript=false, reportReturnType=false
# pyright: reportOptionalOperand=false, reportOptionalIterable=false, reportGeneralTypeIssues=false
from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.fx import GraphModule, Node

from passes.base import TransformPass
from passes.compat import fake_mode_of, without_modes
from passes.graph.user_checkpointing import copy_checkpoint_marks
from passes.op_rules.opaque_calls import is_opaque
from passes.op_rules.rule_table import is_random, operator_of
from passes.registry import register
from passes.transforms.cleanup import as_strided_views
from passes.transforms.rewriting.call_inserter import CallInserter
from passes.transforms.rewriting.fake_results import FakeResults

aten, prims = torch.ops.aten, torch.ops.prims
Rewrite = Callable[[Node, CallInserter], bool]
IDENTITIES = (aten.alias.default, aten.detach.default)


def normalize(gm: GraphModule, fake_mode=None) -> bool:
    """Normalize `gm` in place; returns whether anything changed. Node values (`meta["val"]`) are needed and kept."""
    changed, fakes = False, FakeResults(fake_mode)
    with without_modes():
        for node in list(gm.graph.nodes):
            rewrite = REWRITES.get(node.target) if node.op == "call_function" else None
            if rewrite is not None and not is_opaque(node) and rewrite(node, CallInserter(gm.graph, node, fakes=fakes)):
                gm.graph.erase_node(node)
                changed = True
    changed |= _private_views(gm)
    if changed:
        gm.graph.eliminate_dead_code()
        gm.graph.lint()
        gm.recompile()
    return changed


@register
@dataclass(frozen=True)
class Normalize(TransformPass):
    """See the module's docstring. Values (`meta["val"]`) of all nodes are kept up to date."""

    name = "normalize"

    def run(self, graph_module: GraphModule) -> bool:
        return normalize(graph_module, fake_mode_of(graph_module))


def _identity(node: Node, insert: CallInserter) -> bool:
    source = node.args[0]
    # AOTAutograd manages outputs that alias an input or another output: leave those.
    if any(user.op == "output" for user in node.users) or not isinstance(source, Node):
        return False
    node.replace_all_uses_with(source)
    return True


LENDS_SHAPE = (
    aten.rand_like.default, aten.randn_like.default, aten.randint_like.default, aten.randint_like.low_dtype,
    aten.bernoulli.p, aten.exponential.default, aten.geometric.default, aten.uniform.default, aten.normal_functional.default,
    aten.random.default, aten.random.to, getattr(aten.random, "from"), aten.log_normal.default, aten.cauchy.default,
)
"""Random ops with the shape, strides and dtype of the first argument, whose values are not read."""


def _like(x: Node, insert: CallInserter) -> Node:
    """An empty tensor with the metadata of another."""
    value = x.meta["val"]
    return insert(aten.empty_strided.default, list(value.shape), list(value.stride()), dtype=value.dtype, device=value.device)


def _drawn_for_it(x: Node) -> bool:
    """True if random numbers with a single reader are drawn for a value. Removing the draw would change those
    that come after it."""
    return len(x.users) == 1 and (is_random(x.target) or any(map(_drawn_for_it, x.all_input_nodes)))


def _lends_shape(node: Node, insert: CallInserter) -> bool:
    source, *others = node.args
    if not source.all_input_nodes and source.op == "call_function" or _drawn_for_it(source):
        return False
    node.replace_all_uses_with(insert(node.target, _like(source, insert), *others, **node.kwargs))
    return True


def _reads_no_values(target: Callable[..., object], *fills: object) -> Rewrite:
    """Rewrite of a constant that takes only dtype and device of its first argument. fills: follow the size in `target`."""
    def rewrite(node: Node, insert: CallInserter) -> bool:
        source, *others = node.args
        if not isinstance(source, Node) or _drawn_for_it(source):
            return False
        value = node.meta["val"]
        node.replace_all_uses_with(insert(target, *others, *fills, dtype=value.dtype, device=value.device))
        return True

    return rewrite


def _dropout(node: Node, insert: CallInserter) -> bool:
    """On a GPU, dropout itself draws the mask, on a tensor of ones: no other op draws the same."""
    x, p, train = (*node.args, True)[:3]
    parts = [(user, user.args[1]) for user in node.users if user.target is operator.getitem]
    if len(parts) < len(node.users) or train is False or p in (0, 1):
        return False
    mask = insert(operator.getitem, insert(node.target, _like(x, insert), p, True), 1)
    result = insert(aten.mul.Tensor, insert(aten.mul.Tensor, x, mask), 1 / (1 - p))
    for user, part in parts:
        user.replace_all_uses_with((result, mask)[part])
        node.graph.erase_node(user)
    return True


def _fused_bias(product):
    def rewrite(node: Node, insert: CallInserter) -> bool:
        bias, a, b = node.args
        beta, alpha = node.kwargs.get("beta", 1), node.kwargs.get("alpha", 1)
        if not (node.meta["val"].is_floating_point() or node.meta["val"].is_complex()):
            beta, alpha = int(beta), int(alpha)  # as the operator converts them
        result = insert(product, a, b)
        if alpha != 1:
            result = insert(aten.mul.Tensor, result, alpha)
        if beta == 0:
            node.replace_all_uses_with(result)
            return True
        if beta != 1:
            bias = insert(aten.mul.Tensor, bias, beta)
        node.replace_all_uses_with(insert(aten.add.Tensor, result, bias))
        return True

    return rewrite


def _accumulation_dtype(x: torch.Tensor) -> torch.dtype:
    return torch.float32 if x.dtype in (torch.bfloat16, torch.float16) else x.dtype


def _reduced(node: Node, position: int = 1) -> tuple[list[int], bool, int]:
    """Reduced dims, keepdim, and the number of elements in each sum."""
    x = node.args[0].meta["val"]
    dims = node.args[position] if len(node.args) > position else node.kwargs.get("dim")
    if dims is None or dims == []:
        dims = list(range(x.ndim))
    dims = [d % max(x.ndim, 1) for d in ([dims] if isinstance(dims, int) else dims)]
    keep = node.kwargs.get("keepdim", node.args[position + 1] if len(node.args) > position + 1 else False)
    count = 1
    for d in dims:
        count *= int(x.shape[d])
    return dims, bool(keep) if not isinstance(keep, torch.dtype) else False, count


def _mean(node: Node, insert: CallInserter) -> bool:
    x = node.args[0]
    value = x.meta["val"]
    out = node.meta["val"]
    if node.target is aten.mean.default:
        dims, keep, count = list(range(value.ndim)), False, value.numel()
    else:
        dims, keep, count = _reduced(node)
    if count == 0 or value.ndim == 0 or not out.dtype.is_floating_point:
        return False
    wide = _accumulation_dtype(out)
    total = insert(aten.sum.dim_IntList, x, dims, keep, dtype=wide)
    result = insert(aten.div.Tensor, total, count)
    if wide != out.dtype:
        result = insert(prims.convert_element_type.default, result, out.dtype)
    node.replace_all_uses_with(result)
    return True


def _moments(node: Node, insert: CallInserter) -> tuple[Node, Node] | None:
    """(variance, mean) in two passes: first the mean, then the squares of the deviations."""
    x = node.args[0]
    value = x.meta["val"]
    if not value.dtype.is_floating_point:
        return None
    dims, keep, count = _reduced(node)
    keep = bool(node.kwargs.get("keepdim", False))
    correction = node.kwargs.get("correction")
    correction = 1 if correction is None else correction
    if count - correction <= 0:
        return None
    wide = _accumulation_dtype(value)
    if wide != value.dtype:
        x = insert(prims.convert_element_type.default, x, wide)
    mean = insert(aten.div.Tensor, insert(aten.sum.dim_IntList, x, dims, True), count)
    deviation = insert(aten.sub.Tensor, x, mean)
    squares = insert(aten.sum.dim_IntList, insert(aten.mul.Tensor, deviation, deviation), dims, True)
    variance = insert(aten.div.Tensor, squares, count - correction)
    results = []
    for result in (variance, mean):
        if wide != value.dtype:
            result = insert(prims.convert_element_type.default, result, value.dtype)
        results.append(result if keep else insert(aten.squeeze.dims, result, dims))
    return results[0], results[1]


def _var_mean(node: Node, insert: CallInserter) -> bool:
    pair = _moments(node, insert)
    if pair is None:
        return False
    for user in list(node.users):
        if user.op != "call_function" or len(user.args) != 2 or not isinstance(user.args[1], int):
            return False
    for user in list(node.users):
        user.replace_all_uses_with(pair[user.args[1]])
        node.graph.erase_node(user)
    return True


def _var(node: Node, insert: CallInserter) -> bool:
    pair = _moments(node, insert)
    if pair is None:
        return False
    node.replace_all_uses_with(pair[0])
    return True


REWRITES = {
    **dict.fromkeys(IDENTITIES, _identity),
    **dict.fromkeys(LENDS_SHAPE, _lends_shape),
    aten.new_empty.default: _reads_no_values(aten.empty.memory_format),
    aten.new_empty_strided.default: _reads_no_values(aten.empty_strided.default),
    aten.new_full.default: _reads_no_values(aten.full.default),
    aten.new_zeros.default: _reads_no_values(aten.full.default, 0),
    aten.new_ones.default: _reads_no_values(aten.full.default, 1),
    aten.native_dropout.default: _dropout,
    aten.addmm.default: _fused_bias(aten.mm.default),
    aten.baddbmm.default: _fused_bias(aten.bmm.default),
    aten.mean.default: _mean,
    aten.mean.dim: _mean,
    aten.var_mean.correction: _var_mean,
    aten.var.correction: _var,
    aten.as_strided.default: as_strided_views.as_views,
    aten.as_strided_scatter.default: as_strided_views.scattered,
}


def _private_views(gm: GraphModule) -> bool:
    changed = False
    for node in list(gm.graph.nodes):
        if node.op == "call_function" and operator_of(node.target).heavy:
            copies: dict[Node, Node] = {}
            for operand in list(node.all_input_nodes):
                own = _private(operand, node, copies)
                if own is not operand:
                    node.replace_input_with(operand, own)
                    changed = True
    return changed


def _is_view(x: Node) -> bool:
    return x.op == "call_function" and operator_of(x.target).view == "whole"


def _private(x: Node, user: Node, copies: dict[Node, Node], shared: bool = False) -> Node:
    """`x`, or a copy of the chain of views that leads to it if the chain has other readers."""
    if not _is_view(x) or not shared and _alone(x):
        return x
    if x not in copies:
        old = x.args[0]
        source = _private(old, user, copies, shared=True)  # the copy alone would be a second reader of `old`
        with user.graph.inserting_before(user):
            copies[x] = user.graph.node_copy(x, lambda a: source if a is old else a)
        copies[x].meta = dict(x.meta)
        # The copy has its user's phase: forward views that feed backward products move there.
        for key in ("partitioner_tag", "seq_nr", "nn_module_stack"):
            if key in user.meta:
                copies[x].meta[key] = user.meta[key]
        copy_checkpoint_marks(user, copies[x])
    return copies[x]


def _alone(x: Node) -> bool:
    """True if a view and the views before it have one reader each."""
    while _is_view(x):
        if len(x.users) > 1:
            return False
        (x, *_) = x.args  # pyright: ignore[reportAssignmentType]
    return True
