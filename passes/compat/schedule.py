"""Inductor's schedule where bytes are counted: the order of the graph, and nothing held for longer than that says.

Left to itself, inductor gives a result its place when something needs it in memory. A result that only the next large kernel
reads is so computed just before that, after what else that kernel reads; and what it is computed from is held until then.
On CPUs it also puts all light kernels between two calls of a library into one function, whose memory is taken when it starts
and given back when it is over.
"""
# Nodes of inductor's scheduler have no types to speak of.
# pyright: reportAttributeAccessIssue=false
from __future__ import annotations

import contextlib
import heapq
from collections import defaultdict
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from torch._inductor import config
from torch._inductor.codegen.cpp import CppScheduling
from torch._inductor.virtualized import V

if TYPE_CHECKING:
    SchedulerPass = object
else:
    try:
        from torch._inductor.custom_graph_pass import CustomSchedulerPass as SchedulerPass
    except ImportError:  # torch 2.11, 2.12: any callable is one
        SchedulerPass = object

LEAST_FREED_BYTES = 1 << 14
"""What is worth a function of its own."""


@contextlib.contextmanager
def as_in_graph() -> Iterator[None]:
    """What inductor compiles inside holds what the graph, run call by call, would hold."""
    settings = {
        "_post_fusion_custom_pass": InGraphOrder(), "reorder_for_peak_memory": False, "allow_buffer_reuse": False,
        "realize_acc_reads_threshold": 8, "realize_reads_threshold": 4,  # as `passes.keeping.walk` has them
    }
    usual = CppScheduling.ready_to_flush
    CppScheduling.ready_to_flush = lambda self: usual(self) or _freed_bytes(self.scheduler) >= LEAST_FREED_BYTES
    try:
        with config.patch(settings):
            yield
    finally:
        CppScheduling.ready_to_flush = usual


class InGraphOrder(SchedulerPass):
    """Of all kernels that can run, the one that stands first in the graph runs next."""

    def __call__(self, nodes: list[Any]) -> list[Any]:
        graph: Any = V.graph
        places = {node: k for k, node in enumerate(graph.graph.nodes)}
        first = [min((place for each in node.get_nodes() for place in _places(each.node, places)), default=-1)
                 for node in nodes]
        makers = {name: k for k, node in enumerate(nodes) for name in node.get_buffer_names()}
        waits_for = [{makers[dep.name] for dep in node.unmet_dependencies if dep.name in makers} - {k}
                     for k, node in enumerate(nodes)]
        return [nodes[k] for k in first_come(first, waits_for)]

    def uuid(self) -> bytes:
        """Of the code above: what inductor keeps from compiling is found by it, too."""
        return b"hpml: order of the graph, 1"


def _places(node: Any, places: dict[Any, int]) -> Iterator[int]:
    """Of the call that a buffer is the result of, if it is known: the last of those that it is computed by."""
    found = [places[origin] for origin in getattr(node, "origins", ()) if origin in places]
    if found:
        yield max(found)


def first_come(first: list[int], waits_for: list[set[int]]) -> list[int]:
    """All numbers, each after those that it waits for, and among those that wait for nothing more by `first`."""
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
    """Of buffers that nobody reads after the kernels that are not written down yet."""
    names = scheduler.buffer_names_to_free - V.graph.removed_buffers - V.graph.wrapper_code.freed
    return sum(map(_nbytes, names))


def _nbytes(name: str) -> int:
    try:
        return int(V.graph.get_numel(name)) * V.graph.get_dtype(name).itemsize
    except NotImplementedError:  # stands for several results, which are buffers themselves
        return 0
    except TypeError:  # nobody knows its size yet
        return LEAST_FREED_BYTES
