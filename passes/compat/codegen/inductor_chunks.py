"""Inductor's schedule of a graph with an unrolled loop: one turn of the loop after another.

Turns do not depend on each other but for sums. By default, inductor may run the first call of every turn, then the second of
every turn, and hold what all of them have computed; it fuses kernels of different turns that read the same; and it adds a
product to a sum out of place: a copy of the sum for each turn.
"""
# Nodes of inductor's scheduler have no types to speak of.
# pyright: reportAttributeAccessIssue=false
from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch._inductor import config, ir
from torch._inductor.fx_passes.reinplace import InplaceableOp
from torch._inductor.lowering import lowerings, register_lowering
from torch._inductor.virtualized import V

from passes.compat.codegen.inductor_order import graph_positions, stable_topological_order
from passes.compat.patching.patches import replaced

aten = torch.ops.aten
torch.library.define("hpml::add_product_", "(Tensor(a!) total, Tensor a, Tensor b) -> ()")
"""`addmm_` without a result, which inductor would take for memory of its own."""


@torch.library.impl("hpml::add_product_", "CompositeExplicitAutograd")
def _add_product(total: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> None:
    total.addmm_(a, b)


@torch.library.register_fake("hpml::add_product_")
def _fake_add_product(total: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> None:
    pass


@register_lowering(aten.addmm_.default, type_promotion_kind=None)
def _lower_add_product(total: Any, a: Any, b: Any) -> Any:
    """Graphs have this operator from `turns_in_order` alone."""
    total.realize()
    ir.FallbackKernel.create(torch.ops.hpml.add_product_.default, total, a, b)
    return total


def _lower_sum(total: Any, part: Any) -> Any:
    """Graphs have this operator, and the next, from `passes.transforms.loss_chunks`."""
    found = lowerings[aten.add.Tensor](total, part)
    found.realize()
    return found


def _lower_rows(part: Any) -> Any:
    found = lowerings[aten.clone.default](part)
    found.realize()
    return found


@contextlib.contextmanager
def products_added_in_place() -> Iterator[None]:
    """Context in which inductor adds a product into the memory of a sum that nothing else reads, and other large parts of a sum
    one by one."""
    key = {**config.unsafe_marked_cacheable_functions, "hpml.turns": hashlib.sha256(Path(__file__).read_bytes()).hexdigest()}
    added = InplaceableOp(aten.addmm_.default, 0, _adds_products)
    if hasattr(torch.ops.hpml, "add_to_sum"):
        register_lowering(torch.ops.hpml.add_to_sum.default, type_promotion_kind=None)(_lower_sum)
        register_lowering(torch.ops.hpml.rows_of_chunk.default, type_promotion_kind=None)(_lower_rows)
    with (replaced({"inplaceable_ops": lambda usual: {**usual, aten.addmm.default: added}}),
          config.patch(unsafe_marked_cacheable_functions=key)):
        yield


@contextlib.contextmanager
def turns_in_order(turn: str) -> Iterator[None]:
    """Context in which inductor runs calls of one turn of a loop after those of the turn before. turn: the key in the meta of a
    node for the number of its turn."""
    replacements = {
        "Scheduler.can_fuse": lambda fuses: (
            lambda self, node1, node2, *how, **more: (
                _turn_of(node1, self.nodes, turn) == _turn_of(node2, self.nodes, turn)
                and fuses(self, node1, node2, *how, **more))),
        "reorder_for_peak_memory": lambda usual: (
            lambda nodes, *others, **more: _in_order(usual(nodes, *others, **more), turn)),
    }
    with replaced(replacements), config.patch(reorder_for_peak_memory=True), products_added_in_place():
        yield


def _adds_products(node: torch.fx.Node) -> bool:
    """True where a product is added to a tensor with the layout of the result. Inductor checks that none reads it later."""
    total = node.args[0].meta.get("val") if isinstance(node.args[0], torch.fx.Node) else None
    value = node.meta["val"]
    return (isinstance(total, torch.Tensor) and not node.kwargs and total.shape == value.shape and total.dtype == value.dtype
            and total.is_contiguous())


def _in_order(nodes: list[Any], turn: str) -> list[Any]:
    makers = {name: k for k, node in enumerate(nodes) for name in node.get_buffer_names()}
    waits_for = [{makers[dep.name] for dep in node.unmet_dependencies if dep.name in makers} - {k}
                 for k, node in enumerate(nodes)]
    by_turn: dict[int, set[int]] = {}
    for k, node in enumerate(nodes):
        number = _turn_of(node, nodes, turn)
        if number is not None:
            by_turn.setdefault(number, set()).add(k)
    numbers = sorted(by_turn)
    for before, after in zip(numbers, numbers[1:]):
        for k in by_turn[after]:
            waits_for[k] |= by_turn[before]
    try:
        return [nodes[k] for k in stable_topological_order(list(range(len(nodes))), waits_for)]
    except AssertionError:  # a kernel of several turns
        return nodes


def _turn_of(kernel: Any, nodes: list[Any], turn: str) -> int | None:
    """The turn that all parts of a kernel are from; None where they are from several, or from none."""
    graph: Any = V.graph
    if not hasattr(graph, "hpml_turns"):
        graph.hpml_turns = _intervals(graph.graph, turn)
    places = graph_positions(nodes).of(kernel)
    found = {next((number for number, (first, last) in graph.hpml_turns.items() if first <= place <= last), None)
             for place in places}
    return found.pop() if len(found) == 1 else None


def _intervals(graph: torch.fx.Graph, turn: str) -> dict[int, tuple[int, int]]:
    """By turn, the positions of its first and its last call, which calls that patterns were replaced by are between."""
    found: dict[int, tuple[int, int]] = {}
    for k, node in enumerate(graph.nodes):
        number = node.meta.get(turn)
        if number is not None:
            found[number] = (found.get(number, (k, k))[0], k)
    return found
