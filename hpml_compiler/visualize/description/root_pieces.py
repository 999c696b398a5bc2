"""Pieces of the model's own operations: those between two modules, such as a sum or an upsampling, run before the second."""
from __future__ import annotations

from hpml_compiler.plans.schema import ROOT, GraphPlan


def root_pieces(graph: GraphPlan, module_by_operation: dict[str, str]) -> dict[str, str]:
    """The piece of each of the model's own forward operations that a later module reads, directly or through others of them,
    and that depends on an earlier module: "(root) before h.3". module_by_operation: "" for the model's own."""
    order = {path: number for number, path in enumerate(dict.fromkeys(
        path for name, path in module_by_operation.items() if path and not graph.operations[name].backward))}
    forward = [name for name, operation in graph.operations.items() if not operation.backward]
    latest: dict[str, int] = {}
    for name in forward:
        own = module_by_operation[name]
        latest[name] = order[own] if own else max(
            (latest.get(source, -1) for source in graph.operations[name].sources), default=-1)
    first_reader: dict[str, int] = {}
    for name in reversed(forward):
        own = module_by_operation[name]
        reader = order[own] if own else first_reader.get(name)
        if reader is not None:
            for source in graph.operations[name].sources:
                if module_by_operation.get(source) == "":
                    first_reader[source] = min(reader, first_reader.get(source, reader))
    paths = list(order)
    return {name: f"{ROOT} before {paths[first_reader[name]]}" for name in forward
            if not module_by_operation[name] and name in first_reader and 0 <= latest[name] < first_reader[name]}
