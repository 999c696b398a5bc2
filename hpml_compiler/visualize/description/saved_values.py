"""Values that are saved for backward, by the operation that owns their memory."""
from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Set
from dataclasses import dataclass

from hpml_compiler.plans.checkpointing_records import SavedValue
from hpml_compiler.plans.peak_memory import fixed_values
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
    as well: forward computes an equal value, such as normalized rows. Values that are computed once before a loop over
    microbatches are held for all of them."""
    root, read = _roots(graph), _read_by_backward(graph).results
    found: dict[str, int] = {}
    for name, operation in graph.operations.items():
        owner = graph.operations.get(root[name])
        if not any(operation.saved) or operation.backward and root[name] != name or owner is None or root[name] not in read:
            continue
        own = zip(owner.result_bytes, owner.saved) if root[name] == name else ((size, True) for size in owner.result_bytes[:1])
        found[root[name]] = max(found.get(root[name], 0), sum(size for size, saved in own if saved))
    shares = _Shares(graph)
    found = {name: round(nbytes * shares.of(name)) for name, nbytes in found.items()}
    return found | {name: sum(graph.operations[name].result_bytes) for name in _held_for_the_loop(graph, root)}


def saved_copies(graph: GraphPlan) -> list[tuple[Redistribution, int]]:
    """Redistributions of forward whose result backward reads, too, with the bytes of that; one for each reader."""
    found: dict[tuple[str, str, Placements], tuple[Redistribution, int]] = {}
    shares = _Shares(graph)
    for move in _read_by_backward(graph).copies:
        parts = math.prod(size for size, place in zip(graph.mesh.values(), move.target) if place.startswith("S"))
        nbytes = math.prod(move.shape) * item_bytes(move.dtype) / parts
        key = move.value, move.consumer, move.target
        found.setdefault(key, (move, round(nbytes * shares.of(move.value))))
    return list(found.values())


@dataclass
class _BackwardReads:
    """results: operations whose results backward reads as they are; copies: results of redistributions of forward."""

    results: set[str]
    copies: list[Redistribution]


def _read_by_backward(graph: GraphPlan) -> _BackwardReads:
    """Down from what backward reads, through views and what is computed again, to what is saved."""
    root, parameters = _roots(graph), graph.parameters
    kept = {root[name] for name, operation in graph.operations.items() if any(operation.saved)}
    into = {(move.value, move.consumer): move for move in graph.redistributions if any(hop.bytes for hop in move.hops)}
    copies: dict[tuple[str, Placements], list[Redistribution]] = defaultdict(list)
    for (value, consumer), move in into.items():
        made, reader = graph.operations.get(value), graph.operations.get(consumer)
        if reader is not None and not reader.backward and (made is None or not made.backward) and not _is_once(graph, move):
            copies[value, move.target].append(move)
    found, seen = _BackwardReads(set(), []), set[tuple[str, Placements, bool, int]]()
    left = [(name, source, placements, False) for name in _running(graph, kept)
            for source, placements in zip(graph.operations[name].sources, graph.operations[name].inputs)]
    while left:
        reader, source, placements, again = left.pop()
        own, made = into.get((source, reader)), graph.operations.get(source)
        if own is not None and graph.operations[reader].backward:  # backward makes a copy of its own
            placements = own.source
        there = copies.get((source, placements), [])
        copy = next((move for move in there if move is own), there[-1] if there else None)
        if (key := (source, placements, again, id(copy))) in seen:
            continue
        seen.add(key)
        if made is None:  # backward gathers parameters anew, but for what it computes again
            found.copies += [copy] if copy is not None and again and source in parameters else []
        elif copy is not None:
            found.copies.append(copy)
        elif short_name(made) in VIEWS:
            left += [(source, *read, again) for read in zip(made.sources, made.inputs)]
        elif source in kept:
            found.results.add(source)
        elif not made.backward:
            left += [(source, *read, True) for read in zip(made.sources, made.inputs)]
    return found


def _running(graph: GraphPlan, kept: Set[str]) -> list[str]:
    """Operations that backward runs: forward runs those that are saved, and nobody what only they read."""
    read_by: dict[str, list[str]] = defaultdict(list)
    for name, operation in graph.operations.items():
        for source in operation.sources:
            read_by[source].append(name)
    found: dict[str, None] = {}
    for name, operation in reversed(graph.operations.items()):
        readers = read_by[name]
        if operation.backward and name not in kept and (not readers or any(reader in found for reader in readers)):
            found[name] = None
    return [*found]


def _is_once(graph: GraphPlan, move: Redistribution) -> bool:
    """True for a parameter's copy that stays until the optimizer changes it, or through all microbatches: no activation."""
    return move.held or move.value in graph.parameters and graph.microbatches is not None and (
        move.value not in graph.microbatches.gathered)


def _held_for_the_loop(graph: GraphPlan, root: Mapping[str, str]) -> set[str]:
    """Operations before the loop over microbatches whose results the loop reads."""
    before = set() if graph.microbatches is None else {*graph.microbatches.before}
    return {root[source] for name, operation in graph.operations.items() if name not in before
            for source in operation.sources if source in before and root[source] in graph.operations}


def _roots(graph: GraphPlan) -> dict[str, str]:
    """The operation, parameter or input that owns the memory of each result."""
    root: dict[str, str] = {}
    for name, operation in graph.operations.items():
        is_view = short_name(operation) in VIEWS and bool(operation.sources)
        root[name] = root.get(operation.sources[0], operation.sources[0]) if is_view else name
    return root


class _Shares:
    """The share of a listed value that is in memory at a time: of one microbatch, if backward follows each of them."""

    def __init__(self, graph: GraphPlan):
        times = graph.microbatches
        self.share, self.whole = 1.0, frozenset[str]()
        if times is not None and times.loss_inside:
            self.share = 1.0 / times.count
            self.whole = fixed_values(graph).union(times.before, times.after, times.repeated)

    def of(self, name: str) -> float:
        return 1.0 if name in self.whole else self.share


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
