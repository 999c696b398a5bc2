"""Kernels and their dependencies -> their order."""
from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch._inductor.codegen.cpp import CppScheduling
from torch._inductor.scheduler import ExternKernelSchedulerNode, Scheduler
from torch.fx import Graph, Node

from passes.compat.codegen.inductor_order import (
    COSTLY,
    InGraphOrder,
    _GraphPositions,
    scheduled_in_graph_order,
    stable_topological_order,
)
from passes.op_rules import rule_table


def test_of_what_can_run_the_first_in_the_graph_runs_next():
    assert stable_topological_order([30, 10, 20], [set(), set(), set()]) == [1, 2, 0]


def test_what_waits_does_not_bring_forward_what_it_waits_for():
    """0 stands first and waits for 3, which stands last: the others run before, and 1 does not wait with it."""
    assert stable_topological_order([0, 5, 6, 9], [{3}, set(), {1}, set()]) == [1, 2, 3, 0]


def test_settings_of_inductor_are_what_they_were_afterwards():
    usual, fuses, reuse = CppScheduling.ready_to_flush, Scheduler.can_fuse, torch._inductor.config.allow_buffer_reuse
    with scheduled_in_graph_order():
        assert CppScheduling.ready_to_flush is not usual and not torch._inductor.config.allow_buffer_reuse
        assert Scheduler.can_fuse is not fuses
    assert CppScheduling.ready_to_flush is usual and torch._inductor.config.allow_buffer_reuse == reuse
    assert Scheduler.can_fuse is fuses


def test_kernels_that_other_code_has_ordered_are_not_taken_from_a_cache(monkeypatch):
    def key() -> Any:
        with scheduled_in_graph_order():
            return torch._inductor.config.save_config_portable()

    before = key()
    assert key() == before
    monkeypatch.setattr(InGraphOrder, "uuid", lambda self: b"of other code")
    assert key() != before


def test_operators_that_are_costly_in_kernels_are_those_of_the_rules():
    rule_table.load()
    assert {f"aten::{name}" for name in COSTLY} == {
        name for name, operator in rule_table.OPERATORS.items() if operator.fusion == "costly" and not operator.external}


class Called(ExternKernelSchedulerNode):
    """A call of a library."""

    def __init__(self, node: Any):
        self.node = node


def kernel(name: str, *origins: Node, known: Node | None = None, reads: tuple[str, ...] | None = None) -> Any:
    """reads: of a call of a library, the buffers."""
    buffer = SimpleNamespace(origins=origins, origin_node=known, get_name=lambda: name, get_operation_name=lambda: name)
    if reads is not None:
        buffer.inputs = [SimpleNamespace(get_name=lambda name=name: name) for name in reads]
        return Called(buffer)
    made = SimpleNamespace(node=buffer, get_name=lambda: name)
    made.get_nodes = lambda: [made]
    return made


def graph_of_a_product() -> tuple[Graph, Node, Node, Node, Node]:
    graph = Graph()
    x = graph.placeholder("x")
    first, second = (graph.call_function(torch.ops.aten.relu.default, (x,)) for _ in range(2))
    product = graph.call_function(torch.ops.aten.mm.default, (first, second))
    later = graph.call_function(torch.ops.aten.relu.default, (x,))
    return graph, first, second, product, later


def test_an_operand_of_a_library_stands_where_it_is_computed_and_not_at_the_call_that_wants_it_in_memory():
    graph, first, second, product, _ = graph_of_a_product()
    copied = kernel("copied", first, second, product)  # inductor says that all of these compute it
    other = kernel("other", second, known=second)
    places = _GraphPositions(graph, [copied, other, kernel("called", first, second, product, reads=("copied", "other"))])
    assert places.of(copied) == [1] and places.of(other) == [2]


def test_what_a_later_call_hands_on_unchanged_stands_where_it_is_computed():
    graph, first, _, _, later = graph_of_a_product()
    places = _GraphPositions(graph, [handed_on := kernel("handed_on", first, known=later)])
    assert places.of(handed_on) == [1]


def test_what_stands_before_a_call_of_a_library_and_after_it_is_of_two_stretches():
    graph, first, second, product, later = graph_of_a_product()
    kernels = [kernel(node.name, node, known=node) for node in (first, second, later)]
    places = _GraphPositions(graph, [*kernels, kernel("called", product, reads=())])
    assert places.stretches(*kernels[:2]) == {0} and places.stretches(kernels[0], kernels[2]) == {0, 1}
