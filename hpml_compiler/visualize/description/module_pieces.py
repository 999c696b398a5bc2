"""Pieces of the operations of modules that run in several places: those that contain others, such as the model itself, whose
sums, masks or upsamplings run between two inner modules; and those that are called again, such as a dropout."""
from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from itertools import groupby

from hpml_compiler.plans.schema import ROOT, GraphPlan

BEFORE, AFTER = " before ", " after "


def module_pieces(graph: GraphPlan, module_by_operation: dict[str, str]) -> dict[str, str]:
    """The piece of each forward operation of such a module that depends on another one: "(root) before h.3" if
    a later module reads it, directly or through others, else "transformer after ln_f"; the last ones of the model itself keep
    their place. module_by_operation: "" for the model's own."""
    forward = [name for name, operation in graph.operations.items() if not operation.backward]
    outer = _in_several_places(graph, [module_by_operation[name] for name in forward])
    paths = list(dict.fromkeys(module_by_operation[name] for name in forward if module_by_operation[name] not in outer))
    order = {path: number for number, path in enumerate(paths)}
    latest: dict[str, int] = {}
    for name in forward:
        own = order.get(module_by_operation[name])
        latest[name] = own if own is not None else max(
            (latest.get(source, -1) for source in graph.operations[name].sources), default=-1)
    first_reader: dict[str, int] = {}
    for name in reversed(forward):
        own = order.get(module_by_operation[name])
        reader = own if own is not None else first_reader.get(name)
        if reader is not None:
            for source in graph.operations[name].sources:
                if module_by_operation.get(source) in outer:
                    first_reader[source] = min(reader, first_reader.get(source, reader))
    found = {}
    for name in forward:
        path, reader = module_by_operation[name], first_reader.get(name)
        if path in outer and latest[name] >= 0:
            read = {found.get(source, "") for source in graph.operations[name].sources if source in module_by_operation}
            if reader is not None and latest[name] < reader:
                found[name] = f"{path or ROOT}{BEFORE}{_inside(path, paths[reader])}"
            elif reader is None and len(read) == 1 and (same := read.pop()).startswith(f"{path or ROOT}{BEFORE}"):
                found[name] = same  # as what backward needs of a pooling
            elif reader is None and path:
                found[name] = f"{path}{AFTER}{_inside(path, paths[latest[name]])}"
    return found


def _in_several_places(graph: GraphPlan, run: list[str]) -> set[str]:
    """The model itself, modules that contain others of these, and those without parameters that run again after others."""
    known, times = set(run), Counter(path for path, _ in groupby(run))
    owned = {name.rpartition(".")[0] for name in graph.parameters}
    again = {path for path, count in times.items()
             if count > 1 and not any(own == path or own.startswith(f"{path}.") for own in owned)}
    return {""} | again | {path for path in known if any(other.startswith(f"{path}.") for other in known)}


def _inside(path: str, other: str) -> str:
    return other.removeprefix(f"{path}.") if path else other


def read_by(piece: str, known: Iterable[str]) -> str:
    """Path of the module that a piece runs before; "" for other modules."""
    path, before, other = piece.partition(BEFORE)
    return (f"{path}.{other}" if f"{path}.{other}" in set(known) else other) if before else ""
