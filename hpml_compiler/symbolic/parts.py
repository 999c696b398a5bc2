"""What the entities of a partition problem are called: blocks, nodes and parameters."""
from __future__ import annotations

from collections import defaultdict

from hpml_compiler.plans.listing import listing
from hpml_compiler.plans.schema import ROOT
from hpml_compiler.symbolic.cost import Part
from hpml_compiler.visualize.blocks import block_path, owner_path
from passes.graph.annotated import Annotated
from passes.graph.placement_graph import block_class
from passes.partition.place import Placed


def parts_of(annotated: Annotated, placed: Placed) -> tuple[Part, ...]:
    """A part for each entity, in their order. Copies of a value belong to the block that makes or reads the value."""
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
        Part(entity.name, block_class(block_path(block.get(k, ROOT))) or ROOT, entity.multiplicity, tuple(names[k]))
        for k, entity in enumerate(placed.solved.entities)
    )
