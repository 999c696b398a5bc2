"""Names for the entities of a partition problem: blocks, nodes and parameters."""
from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

from hpml_compiler.plans.from_decision.user_names import listing
from hpml_compiler.plans.schema import ROOT
from hpml_compiler.visualize.description.module_classes import block_path, owner_path
from passes.graph.analyzed_graph import AnalyzedGraph
from passes.graph.placement_graph import block_class
from passes.sharding.search.mesh_placement import MeshPlacement
from passes.sharding.search.symbolic_terms import SymbolicTerms


@dataclass(frozen=True)
class CostPart:
    """One class of equal entities of the graph: `count` groups of operations, parameters or copies of one block.

    block: path with list indices starred (`blocks.*`). names: its nodes and parameters."""

    name: str
    block: str
    count: int
    names: tuple[str, ...]


@dataclass(frozen=True)
class GraphTerms:
    """Cost terms of one graph. parts: indexed by entity. overhead_us: per call of the graph, besides its kernels."""

    name: str
    parts: tuple[CostPart, ...]
    bill: SymbolicTerms
    overhead_us: float = 0.0


def parts_of(annotated: AnalyzedGraph, placed: MeshPlacement) -> tuple[CostPart, ...]:
    """One `CostPart` per entity, in their order. Copies of a value belong to the block that produces or reads the value."""
    problem, graph = placed.problem, annotated.graph
    blocks = listing(annotated, problem, once=False).blocks
    names: dict[int, list[str]] = defaultdict(list)
    block: dict[int, str] = {}
    for c in problem.groups:
        number = problem.entities.of_group[c.index]
        names[number] += [graph.operations[i].name for i in c.operations]
        lead = next((i for i in c.operations if graph.operations[i].heavy), c.operations[0])
        block.setdefault(number, blocks[lead])
    for v, number in problem.entities.of_input.items():
        value = graph.values[v]
        if value.kind == "parameter":
            parameter = annotated.interface.names[value.name]
            names[number].append(parameter)
            block.setdefault(number, owner_path(parameter))
    by_name = {value.name: value for value in graph.values}
    for edge in placed.solved.edges:
        producer = by_name[edge.name].producer
        if edge.target not in block and producer is not None:
            block[edge.target] = blocks[producer]
    return tuple(
        CostPart(entity.name, block_class(block_path(block.get(k, ROOT))) or ROOT, entity.multiplicity, tuple(names[k]))
        for k, entity in enumerate(placed.solved.entities)
    )


def in_block(graph: GraphTerms, name: str) -> dict[int, float]:
    """Entities in the blocks below `name`, with weights: 1, or the mean over all repetitions for one block (`blocks.3`)."""
    starred = block_class(name)
    found = {k: part for k, part in enumerate(graph.parts) if part.block == starred or part.block.startswith(f"{starred}.")}
    if not found or starred == name:
        return dict.fromkeys(found, 1.0)
    count = max((part.count for part in found.values() if part.names), default=1)
    return dict.fromkeys(found, 1.0 / count)


def one_with(graph: GraphTerms, name: str) -> dict[int, float]:
    """Entities that contain the node or parameter `name`, with the weight of one instance."""
    return {k: 1.0 / part.count for k, part in enumerate(graph.parts) if name in part.names}
