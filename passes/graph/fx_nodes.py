"""Helpers on FX nodes that several passes use."""
from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any

import torch
from torch import fx
from torch.fx import GraphModule, Node

from passes.compat import pytree

BACKWARD_ON_PURPOSE = "must_be_in_backward"
"""The partitioner's tag for a node that must run in backward although it could run in forward."""
WAIT = torch.ops._c10d_functional.wait_tensor.default
COMPRESSION = "hpml_compression"
"""Key in the meta of the start of a gradient's reduction: (compression, number of ranks), where it is to be compressed
(`passes.hardware.gradient_compression`). GRADIENT_OF: the graph's input that the gradient is of."""
GRADIENT_OF = "hpml_gradient_of"
BY_COORDINATE = "hpml_by_coordinate"
"""Key in the meta of a call with the start of a rank's shard among its constants: the
`passes.graph.shard_offset.ShardOffset` of that constant. Two calls that are equal on some ranks only differ in it."""


def is_collective(target: Any) -> bool:
    """True if a call's target is a functional collective, or the wait for one."""
    return getattr(target, "namespace", "") == "_c10d_functional"


def has_effect(node: Node) -> bool:
    """True if a call must run although nothing reads its result. torch says so of all collectives, even of functional ones,
    whose operands are not dead code then either; all ranks of a group have the same graph, and leave out the same ones."""
    target: Any = node.target
    return node.is_impure() and not (is_collective(target) and not target._schema.is_mutable)


def with_dependencies(nodes: Iterable[Node]) -> set[Node]:
    """Nodes and all that they are computed from."""
    found = set(nodes)
    waiting = list(found)
    while waiting:
        new = set(waiting.pop().all_input_nodes) - found
        found |= new
        waiting += new
    return found


def memory_of(what: Any) -> int | None:
    """Identity of the storage of a tensor, or of a node's fake tensor; None for anything else."""
    value = what.meta.get("val") if isinstance(what, Node) else what
    return value.untyped_storage()._cdata if isinstance(value, torch.Tensor) else None


def inputs_alone_in_memory(gm: GraphModule) -> frozenset[int]:
    """Indices of the inputs of a graph whose memory no other input is in, such as a view."""
    memory = [memory_of(node) for node in gm.graph.find_nodes(op="placeholder")]
    counts = Counter(memory)
    return frozenset(k for k, where in enumerate(memory) if counts[where] == 1)


def returned_nodes(gm: GraphModule) -> list[Node | None]:
    """Outputs of a graph, in order; None for an output that is no node."""
    results = pytree.tree_leaves(gm.graph.output_node().args, is_leaf=lambda x: x is None or isinstance(x, Node))
    return [x if isinstance(x, Node) else None for x in results]


def on_cpus(gm: GraphModule) -> bool:
    """True if all inputs of the graph are on CPUs."""
    return all(x.device.type == "cpu" for node in gm.graph.find_nodes(op="placeholder")
               if isinstance(x := node.meta["val"], torch.Tensor))


def arguments_of(node: Node) -> list[Node]:
    """Operands of a call in order, with repetitions."""
    found: list[Any] = []
    fx.map_arg((node.args, node.kwargs), lambda x: found.append(x) or x)
    return found


def constants_of(node: Node) -> str:
    """The arguments of a call, without its operands."""
    return repr(fx.map_arg((node.args, node.kwargs), lambda _: "?"))
