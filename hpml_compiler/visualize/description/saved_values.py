"""Values that are saved for backward, by the operation that owns their memory."""
from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from hpml_compiler.plans.checkpointing_records import SavedValue
from hpml_compiler.plans.record_fields import Placements
from hpml_compiler.plans.schema import GraphPlan, OperationPlan, Redistribution
from hpml_compiler.visualize.description.module_classes import block_path
from passes.cost_model.efficiency_curves import item_bytes
from passes.graph.placement_graph import block_class

VIEWS = frozenset((
    "view", "_unsafe_view", "permute", "transpose", "t", "expand", "unsqueeze", "squeeze", "slice", "select", "alias", "detach",
    "split", "split_with_sizes", "unbind", "as_strided", "unfold", "diagonal"))
"""Operators whose results share the memory of what they read."""


def short_name(operation: OperationPlan) -> str:
    """The operator without its namespace and overload: "addmm" of "aten.addmm.default"."""
    parts = operation.op.split(".")
    return parts[1] if len(parts) > 2 else parts[-1]


def saved_bytes(graph: GraphPlan) -> dict[str, int]:
    """Bytes that are saved on one device with each forward operation, for one run and one microbatch, where the partitioner
    chooses them: of its results, and of copies that collectives make for it."""
    found = dict(saved_results(graph))
    for move, nbytes in saved_copies(graph):
        found[move.consumer] = found.get(move.consumer, 0) + nbytes
    return found


def saved_results(graph: GraphPlan) -> dict[str, int]:
    """Bytes of results that are saved, by operation: a view that is saved keeps the memory of what it is a view of. What
    backward reads only as a copy in another placement is not kept itself. Operations that are listed in backward may be saved
    as well: forward computes an equal value, such as normalized rows."""
    root = _roots(graph)
    read = _read_by_backward(graph)
    copied = {root.get(move.value, move.value) for move in read.copies}
    found: dict[str, int] = {}
    for name, operation in graph.operations.items():
        if not any(operation.saved) or operation.backward and root[name] != name:
            continue
        owner = graph.operations.get(root[name])
        if owner is None or root[name] in copied - read.results:  # a parameter or an input; a copy
            continue
        own = zip(owner.result_bytes, owner.saved) if root[name] == name else ((size, True) for size in owner.result_bytes[:1])
        found[root[name]] = max(found.get(root[name], 0), sum(size for size, saved in own if saved))
    return {name: round(nbytes * _share(graph, name)) for name, nbytes in found.items()}


def saved_copies(graph: GraphPlan) -> list[tuple[Redistribution, int]]:
    """Redistributions of forward whose result backward reads, too, with the bytes of that; one for each reader."""
    found: dict[tuple[str, Placements], tuple[Redistribution, int]] = {}
    for move in _read_by_backward(graph).copies:
        parts = math.prod(size for size, place in zip(graph.mesh.values(), move.target) if place.startswith("S"))
        nbytes = math.prod(move.shape) * item_bytes(move.dtype) / parts
        found.setdefault((move.consumer, move.target), (move, round(nbytes * _share(graph, move.value))))
    return list(found.values())


@dataclass
class _BackwardReads:
    """results: operations of forward; copies: results of its redistributions."""

    results: set[str]
    copies: list[Redistribution]


def _read_by_backward(graph: GraphPlan) -> _BackwardReads:
    into = {(move.value, move.consumer): move for move in graph.redistributions}
    copies: dict[tuple[str, Placements], list[Redistribution]] = defaultdict(list)
    for move in graph.redistributions:
        made, reader = graph.operations.get(move.value), graph.operations.get(move.consumer)
        if made is not None and reader is not None and not made.backward and not reader.backward and any(
                hop.bytes for hop in move.hops):
            copies[move.value, move.target].append(move)
    found, seen = _BackwardReads(set(), []), set[tuple[str, Placements]]()
    left = [(name, source, placements) for name, operation in graph.operations.items() if operation.backward
            for source, placements in zip(operation.sources, operation.inputs)]
    while left:
        reader, source, placements = left.pop()
        own, made = into.get((source, reader)), graph.operations.get(source)
        if own is not None and any(hop.bytes for hop in own.hops):
            placements = own.source
        if made is None or made.backward or (source, placements) in seen:
            continue
        seen.add((source, placements))
        if (source, placements) in copies:
            found.copies += copies[source, placements]
            continue
        is_view = short_name(made) in VIEWS
        if not is_view:
            found.results.add(source)
        if is_view or not any(made.saved):  # read through the view, or computed again
            left += [(source, *read) for read in zip(made.sources, made.inputs)]
    return found


def _roots(graph: GraphPlan) -> dict[str, str]:
    """The operation, parameter or input that owns the memory of each result."""
    root: dict[str, str] = {}
    for name, operation in graph.operations.items():
        is_view = short_name(operation) in VIEWS and bool(operation.sources)
        root[name] = root.get(operation.sources[0], operation.sources[0]) if is_view else name
    return root


def _share(graph: GraphPlan, name: str) -> float:
    """The share of a listed value that is in memory at a time: of one microbatch, if backward follows each of them."""
    times = graph.microbatches
    if times is None or not times.loss_inside or name in times.before or name in times.after or name in times.repeated:
        return 1.0
    return 1.0 / times.count


def saved_in(values: Mapping[str, SavedValue], path: str) -> dict[str, SavedValue]:
    """The values of a block, or of an equal one that stands for it: that with the most bytes."""
    by_block: dict[str, dict[str, SavedValue]] = defaultdict(dict)
    for name, value in values.items():
        if block_class(block_path(value.block)) == block_class(path):
            by_block[block_path(value.block)][name] = value
    if not by_block or path in by_block or all(value.layers == 1 for value in values.values()):
        return by_block[path]
    return max(by_block.values(), key=lambda own: sum(value.bytes * value.layers for value in own.values()))


PRODUCTS = ("addmm", "mm", "bmm", "baddbmm")
Made = tuple[OperationPlan, tuple[int, ...]]
"""An operation, and the bytes of its results for one microbatch."""


def makers_of(values: Mapping[str, SavedValue], made: Mapping[str, Made]) -> dict[str, str]:
    """The listed operation that makes each saved value of a block. The graph that a rank runs has other names for some: a bias
    is in its product, and results of a tuple are operations. These are matched by size, in the order of the names' numbers.
    Values that match nothing are left out."""
    found = {name: name for name in values if name in made}
    taken = {(name, size) for name in found for size in made[name][1]}
    for name in sorted(values.keys() - found.keys(), key=_number):
        for other in _alike(name, made):
            size = values[name].bytes
            if size in made[other][1] and (other, size) not in taken:
                found[name] = other
                taken.add((other, size))
                break
    return found


def _alike(name: str, made: Mapping[str, Made]) -> Iterable[str]:
    kind = name.rstrip("0123456789_").removesuffix("_default")
    for other, (operation, sizes) in made.items():
        if kind in PRODUCTS:
            fits = operation.kind == "matmul"
        else:
            fits = len(sizes) > 1 if kind == "getitem" else kind == short_name(operation)
        if fits:
            yield other


def _number(name: str) -> tuple[str, int]:
    digits = name[len(name.rstrip("0123456789")):]
    return name[:len(name) - len(digits)], int(digits or -1)
