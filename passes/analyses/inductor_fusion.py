"""Inductor's treatment of one call: whether its result takes memory, and its scratch memory."""
# FX types a node's arguments as a union of everything an argument can be.
# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportOptionalMemberAccess=false, reportCallIssue=false
from __future__ import annotations

from typing import Any

import torch
from torch.fx import Node

from passes.op_rules.families import convolutions
from passes.op_rules.rule_table import name_of, operator_of, packet_name

NOT_ADDED_TO = {torch.bfloat16, torch.int64, torch.bool}
"""dtypes without atomic additions in inductor's CPU kernels: the operator's own kernel is called."""


def is_inlined(target: Any) -> bool:
    return operator_of(target).fusion in ("inlined", "costly")


def is_costly(target: Any) -> bool:
    """True for results that inductor's CPU kernels do not compute twice: with several readers they are materialized
    (`StorageBox.should_realize_on_reuse`; see `inductor_order.COSTLY`). On CPUs alone."""
    return operator_of(target).fusion == "costly"


def is_fusing(node: Node) -> bool:
    if operator_of(node.target).fusion == "scatters":
        return not _calls_adding_kernel(node) and node.args[0].meta["val"].dtype not in NOT_ADDED_TO
    return is_fusing_target(node.target)


def is_fusing_target(target: Any) -> bool:
    """As `is_fusing`, where only the operator is known."""
    return operator_of(target).fusion not in (None, "none")


def scratch_bytes(node: Node) -> int:
    """Scratch memory of a call: of convolutions on CPUs, of the operator's own accumulating kernel, which reorders its result,
    and of dropout on CPUs, which converts its mask to the dtype of its input (measured, torch 2.13)."""
    if _calls_adding_kernel(node):
        return torch.int64.itemsize * node.args[2].meta["val"].numel()
    if packet_name(node.target) == "native_dropout":
        x = node.args[0].meta["val"]
        return x.nbytes if x.device.type == "cpu" else 0
    operands = convolutions.OPERANDS.get(name_of(node.target), 0)
    if not operands:
        return 0
    weight = node.args[operands - 1].meta["val"]
    out = (node if operands == 2 else node.args[0]).meta["val"]
    if weight.device.type != "cpu":
        return 0
    return round(convolutions.scratch_bytes(operands, weight.shape, out.nbytes, weight.element_size()))


def _calls_adding_kernel(node: Node) -> bool:
    """On CPUs that kernel is also called if the process has several threads, which would contend."""
    on_cpu = packet_name(node.target) == "scatter_add" and node.args[0].meta["val"].device.type == "cpu"
    return on_cpu and torch.get_num_threads() > 1
