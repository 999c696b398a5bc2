"""What several passes ask of a node of an FX graph."""
from __future__ import annotations

from typing import Any

import torch
from torch import fx
from torch.fx import GraphModule, Node

from passes.compat import pytree

BACKWARD_ON_PURPOSE = "must_be_in_backward"
"""The partitioner's tag for a node that could run in forward and shall not."""
WAIT = torch.ops._c10d_functional.wait_tensor.default
BY_COORDINATE = "hpml_by_coordinate"
"""In the meta of a call among whose constants is where a rank's part begins: the `passes.graph.shard_offset.ShardOffset` that
this follows from. Two calls that are equal on some ranks alone differ in it."""


def is_collective(target: Any) -> bool:
    """Whether a call's target is a functional collective, or the wait for one."""
    return getattr(target, "namespace", "") == "_c10d_functional"


def memory_of(what: Any) -> int | None:
    """Identifies the memory behind a tensor, or behind the one that a node stands for; None for anything else."""
    value = what.meta.get("val") if isinstance(what, Node) else what
    return value.untyped_storage()._cdata if isinstance(value, torch.Tensor) else None


def returned_nodes(gm: GraphModule) -> list[Node | None]:
    """What a graph returns, in order; None where that is no node."""
    results = pytree.tree_leaves(gm.graph.output_node().args, is_leaf=lambda x: x is None or isinstance(x, Node))
    return [x if isinstance(x, Node) else None for x in results]


def on_cpus(gm: GraphModule) -> bool:
    """Whether all that a graph is given is on CPUs."""
    return all(x.device.type == "cpu" for node in gm.graph.find_nodes(op="placeholder")
               if isinstance(x := node.meta["val"], torch.Tensor))


def arguments_of(node: Node) -> list[Node]:
    """All that a call reads, in order, each as often as it is read."""
    found: list[Any] = []
    fx.map_arg((node.args, node.kwargs), lambda x: found.append(x) or x)
    return found


def constants_of(node: Node) -> str:
    """The arguments of a call, without the calls among them."""
    return repr(fx.map_arg((node.args, node.kwargs), lambda _: "?"))
