"""Inductor's schedule under a memory budget: the order of the graph, without longer lifetimes.

By default, inductor computes a result when something needs it in memory. A result that only the next large kernel
reads is then computed just before that kernel, after its other operands; and its own operands live until then.
On CPUs it also puts all light kernels between two library calls into one function, whose memory is allocated when it starts
and freed when it ends. And it fuses kernels with common operands, however far apart: recomputation in backward would run
layers ahead of its reader.
"""
# Nodes of inductor's scheduler have no types to speak of.
# pyright: reportAttributeAccessIssue=false
from __future__ import annotations

import contextlib
import hashlib
import heapq
from bisect import bisect
from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from torch._inductor import config, custom_graph_pass
from torch._inductor.ir import Pointwise, is_cpu
from torch._inductor.scheduler import ExternKernelSchedulerNode
from torch._inductor.virtualized import V

from passes.compat.patching.patches import replaced

SchedulerPass: Any = getattr(custom_graph_pass, "CustomSchedulerPass", object)  # torch 2.11, 2.12: any callable is one

LEAST_FREED_BYTES = 1 << 14
"""Minimum bytes worth a separate function."""

COSTLY = frozenset(("exp", "log", "log10", "log1p", "log2", "sigmoid", "tanh"))
"""A result that is computed with one of these on a CPU, for several readers, is materialized, as `passes.op_rules` registers
their operators. In torch 2.11, inductor has `exp` and `sigmoid` alone, and computes the others once for each reader."""


@contextlib.contextmanager
def scheduled_in_graph_order() -> Iterator[None]:
    """Context: graphs that inductor compiles inside hold no more memory than the graph run call by call."""
    order = InGraphOrder()
    # Part of a cache's key, which has no passes over schedules before torch 2.13: kernels are not those of another hpml.
    key = {**config.unsafe_marked_cacheable_functions, "hpml.schedule": order.uuid().hex()}
    settings = {
        "unsafe_marked_cacheable_functions": key, "_post_fusion_custom_pass": order,
        "reorder_for_peak_memory": False, "allow_buffer_reuse": False,
        "realize_acc_reads_threshold": 8, "realize_reads_threshold": 4,  # as `passes.simulation.memory.memory_trace` has them
    }
    replacements = {
        "CppScheduling.ready_to_flush": lambda usual: (
            lambda self: usual(self) or _freed_bytes(self.scheduler) >= LEAST_FREED_BYTES),
        "Scheduler.can_fuse": lambda fuses: (
            lambda self, node1, node2, *how, **more: (
                len(graph_positions(self.nodes).stretches(node1, node2)) <= 1 and fuses(self, node1, node2, *how, **more))),
        "StorageBox.should_realize_on_reuse": lambda usual: (
            lambda self, users, **more: usual(self, users, **more) or users > 1 and _is_costly(self.data)),
    }
    with replaced(replacements), config.patch(settings):
        yield


class InGraphOrder(SchedulerPass):
    """Run the ready kernel that is first in the graph."""

    def __call__(self, nodes: list[Any]) -> list[Any]:
        places = graph_positions(nodes)
        first = [min(places.of(node), default=-1) for node in nodes]
        makers = {name: k for k, node in enumerate(nodes) for name in node.get_buffer_names()}
        waits_for = [{makers[dep.name] for dep in node.unmet_dependencies if dep.name in makers} - {k}
                     for k, node in enumerate(nodes)]
        return [nodes[k] for k in stable_topological_order(first, waits_for)]

    def uuid(self) -> bytes:
        """Hash of this file, as part of inductor's cache key."""
        return hashlib.sha256(Path(__file__).read_bytes()).digest()


class _GraphPositions:
    """Positions in the graph of the calls behind each kernel. called: the library calls among them. operands: by
    buffer, the position of the call that reads it, through views or not."""

    def __init__(self, graph: Any, nodes: Iterable[Any]):
        self.number = {node: k for k, node in enumerate(graph.nodes)}
        self.of_kernel: dict[str, list[int]] = {}
        self.called: list[int] = []
        self.operands: dict[str, int] = {}
        calls = list(graph.nodes)
        for node in nodes:
            if isinstance(node, ExternKernelSchedulerNode) and (found := self._origins(node.node)):
                self.called.append(max(found))
                read, made = calls[max(found)].all_input_nodes, getattr(node.node, "inputs", ())
                if len(read) == len(made):
                    self.operands.update((x.get_name(), self.number[call]) for x, call in zip(made, read, strict=True)
                                         if hasattr(x, "get_name"))
        self.called.sort()

    def of(self, node: Any) -> list[int]:
        """Positions, one for each kernel that was fused."""
        return [place for each in node.get_nodes() for place in self._of_kernel(each)]

    def stretches(self, *nodes: Any) -> set[int]:
        """Indices of the stretches between library calls that these kernels are from."""
        return {bisect(self.called, place) for node in nodes for place in self.of(node)}

    def _of_kernel(self, each: Any) -> list[int]:
        name = each.get_name()
        if name not in self.of_kernel:
            found = self._origins(each.node)
            if not isinstance(each, ExternKernelSchedulerNode):
                found = self._computed(each.node, found)
            self.of_kernel[name] = [max(found)] if found else []
        return self.of_kernel[name]

    def _computed(self, node: Any, origins: list[int]) -> list[int]:
        """Where a library call needs an operand in memory, or in another memory format, inductor lists its own call and the
        origins of its other operands as origins of that operand."""
        known = self.number.get(getattr(node, "origin_node", None))
        if known is not None:  # a no-op, such as a view of the same shape, is listed as an origin, too, if it comes later
            return [min(known, max(origins, default=known))]
        known = self.operands.get(node.get_name())
        return origins if known is None else [known]

    def _origins(self, node: Any) -> list[int]:
        return [self.number[origin] for origin in getattr(node, "origins", ()) if origin in self.number]


def _is_costly(data: Any) -> bool:
    return isinstance(data, Pointwise) and is_cpu(data) and not COSTLY.isdisjoint(data.inner_fn_opcount().used_ops)


def graph_positions(nodes: Iterable[Any]) -> _GraphPositions:
    """Positions for the graph that is being compiled. nodes: all of its kernels; called before and after fusion."""
    graph: Any = V.graph
    if not hasattr(graph, "hpml_places"):
        graph.hpml_places = _GraphPositions(graph.graph, nodes)
    return graph.hpml_places


def stable_topological_order(first: list[int], waits_for: list[set[int]]) -> list[int]:
    """Topological order of all numbers; among ready ones, by `first`."""
    waiting = [len(found) for found in waits_for]
    followers: dict[int, list[int]] = defaultdict(list)
    for k, found in enumerate(waits_for):
        for other in found:
            followers[other].append(k)
    ready = [(first[k], k) for k, number in enumerate(waiting) if not number]
    heapq.heapify(ready)
    order = []
    while ready:
        _, k = heapq.heappop(ready)
        order.append(k)
        for follower in followers[k]:
            waiting[follower] -= 1
            if not waiting[follower]:
                heapq.heappush(ready, (first[follower], follower))
    assert len(order) == len(first), "kernels wait for each other in a circle"
    return order


def _freed_bytes(scheduler: Any) -> int:
    """Bytes of buffers without readers after the kernels that are not emitted yet."""
    names = scheduler.buffer_names_to_free - V.graph.removed_buffers - V.graph.wrapper_code.freed
    return sum(map(_nbytes, names))


def _nbytes(name: str) -> int:
    try:
        return int(V.graph.get_numel(name)) * V.graph.get_dtype(name).itemsize
    except NotImplementedError:  # a multi-output buffer, whose outputs are buffers themselves
        return 0
    except TypeError:  # its size is not known yet
        return LEAST_FREED_BYTES
