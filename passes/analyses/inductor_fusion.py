"""Inductor's treatment of one call: whether its result takes memory, and its scratch memory."""
# FX types a node's arguments as a union of everything an argument can be.
# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportOptionalMemberAccess=false, reportCallIssue=false
from __future__ import annotations

import functools
from typing import Any

import torch
from torch.fx import Node

from passes.op_rules.families.convolutions import OPERANDS
from passes.op_rules.rule_table import is_pointwise
from passes.op_rules.view_names import view_name

INLINED = {"clone", "_to_copy", "convert_element_type", "full", "full_like", "zeros_like", "ones_like", "new_zeros", "new_ones",
           "new_full", "iota", "arange", "scalar_tensor", "where", "constant_pad_nd", "slice_scatter", "select_scatter", "flip",
           "repeat", "_unsafe_index", "_low_memory_max_pool_offsets_to_indices"}
"""Operators besides the pointwise ones that inductor inlines into their readers."""
SCATTERING = {"index_put", "_unsafe_index_put", "scatter", "scatter_add"}
FUSING = INLINED | SCATTERING | {
    "sum", "mean", "amax", "amin", "max", "min", "var", "var_mean", "std", "prod", "any", "all", "argmax", "argmin", "index",
    "gather", "embedding", "cat", "cumsum", "_softmax", "_log_softmax", "inductor_random", "max_pool2d_with_indices_backward"}
"""Operators whose kernels fuse reads of other results before these are in memory."""
COSTLY = {"exp", "log", "log10", "log1p", "log2", "sigmoid", "tanh"}
"""Operators that inductor's CPU kernels do not compute twice: a result that uses one, and has several readers, is
materialized (`StorageBox.should_realize_on_reuse`, torch 2.13)."""
NOT_ADDED_TO = {torch.bfloat16, torch.int64, torch.bool}
"""dtypes without atomic additions in inductor's CPU kernels: the operator's own kernel is called."""


def is_inlined(target: Any) -> bool:
    return is_pointwise(target) or view_name(target) in INLINED


def is_costly(target: Any) -> bool:
    """True on CPUs alone."""
    return view_name(target) in COSTLY


def is_fusing(node: Node) -> bool:
    if view_name(node.target) in SCATTERING:
        return not _calls_adding_kernel(node) and node.args[0].meta["val"].dtype not in NOT_ADDED_TO
    return is_fusing_target(node.target)


def is_fusing_target(target: Any) -> bool:
    """As `is_fusing`, where only the operator is known."""
    return is_inlined(target) or view_name(target) in FUSING


@functools.cache
def target_of(op: str) -> Any:
    """The operator of a name such as `aten.mm.default`; the name itself where there is none."""
    namespace, *rest = op.split(".")
    if len(rest) != 2:
        return op
    return getattr(getattr(getattr(torch.ops, namespace), rest[0], None), rest[1], op)


def scratch_bytes(node: Node) -> int:
    """Scratch memory of a call. Convolutions on CPUs convert the memory format: forward of weights, backward of
    operands and results; the operator's own accumulating kernel reorders its result, too (measured,
    torch 2.13)."""
    if _calls_adding_kernel(node):
        return torch.int64.itemsize * node.args[2].meta["val"].numel()
    count = OPERANDS.get(node.target, 0)
    if not count:
        return 0
    weight = node.args[count - 1].meta["val"]
    return (count - 1) * weight.numel() * weight.element_size() if weight.device.type == "cpu" else 0


def _calls_adding_kernel(node: Node) -> bool:
    """On CPUs that kernel is also called if the process has several threads, which would contend."""
    on_cpu = view_name(node.target) == "scatter_add" and node.args[0].meta["val"].device.type == "cpu"
    return on_cpu and torch.get_num_threads() > 1
