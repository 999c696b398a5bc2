"""Group the equal blocks of a graph into classes: rows of the table and nodes of the drawing.

A block is the module at a path up to its first number ("transformer.h.3"), or its first two names where there is none
("transformer.wte"). Blocks whose paths differ only in that number are folded into one class if their parameters are
equal in shape, dtype and placements and their forward operations in kind and placements. In a pipeline they must also be in
the same stage.
"""
from __future__ import annotations

import math
from collections import Counter, defaultdict
from dataclasses import dataclass, replace

from hpml_compiler.plans.schema import (
    ROOT,
    CollectiveTotal,
    GraphPlan,
    OperationPlan,
    ParameterPlan,
    Redistribution,
    collective_totals,
)
from passes.graph.placement_graph import block_class
from passes.pipeline.block_chain import BlockChain, ForwardCall, chain_of_blocks


@dataclass(frozen=True)
class PlanBlock:
    """Parameters, operations and redistributions of one block, by their names in the plan."""

    path: str
    parameters: dict[str, ParameterPlan]
    operations: dict[str, OperationPlan]
    redistributions: tuple[Redistribution, ...]


@dataclass(frozen=True)
class BlockClass:
    """A class of equal blocks, with totals over them. `blocks[0]` represents all; `multiplicity`: how many blocks of the class
    one step of the whole model runs, listed or not."""

    name: str
    blocks: tuple[PlanBlock, ...]
    multiplicity: int
    compute_us: float
    communication_us: float
    parameter_count: int
    bytes_per_device: int
    collectives: dict[str, CollectiveTotal]
    stage: int | None = None
    """Pipeline stage of the blocks; None without a pipeline, and for operations that lie in several stages."""


def block_path(module_path: str) -> str:
    """The block that a module belongs to; "" is the model itself, displayed as ROOT."""
    parts = module_path.split(".") if module_path not in ("", ROOT) else []
    for position, part in enumerate(parts):
        if part.isdigit():
            return ".".join(parts[: position + 1])
    return ".".join(parts[:2])


def owner_path(parameter: str) -> str:
    """Path of the module of a parameter, from the parameter's fully qualified name."""
    return parameter.rpartition(".")[0]


def block_classes(graph: GraphPlan) -> list[BlockClass]:
    """Classes of equal blocks of a graph, in the order in which they run."""
    families: dict[tuple[int | None, str, tuple[object, ...], frozenset[object]], list[PlanBlock]] = defaultdict(list)
    blocks, stages = _blocks(graph), _stages(graph)
    for block in blocks:
        stage = stages.get(block.path)
        families[(stage, block_class(block.path), _parameters_of(block), _forward_of(block))].append(block)
    # where one layer's nodes are listed for all, the other layers have only parameters: fold them into that class
    with_operations = {key[:3]: key for key in families if key[3]}
    for key in [key for key in families if not key[3] and key[:3] in with_operations]:
        families[with_operations[key[:3]]].extend(families.pop(key))
    order = {block.path: position for position, block in enumerate(blocks)}
    found = [replace(_fold(graph, members), stage=key[0]) for key, members in families.items()]
    return sorted(found, key=lambda c: order[c.blocks[0].path])


def _stages(graph: GraphPlan) -> dict[str, int]:
    """Pipeline stage of each block. The model itself is in none, since its own calls can be in any stage."""
    return {} if graph.pipeline is None else {
        path: k for k, stage in enumerate(graph.pipeline.stages) for path in map(block_path, stage.blocks) if path}


def chain(graph: GraphPlan) -> BlockChain:
    """Chain of the listed blocks in forward order, with the bytes per device that one block passes to the next."""
    return chain_of_blocks([
        ForwardCall(name, block_path(each.block), each.sources, float(sum(each.result_bytes)), (each.op, each.outputs))
        for name, each in graph.operations.items() if not each.backward])


def _blocks(graph: GraphPlan) -> list[PlanBlock]:
    """All blocks in forward order, those without operations last."""
    operations: dict[str, dict[str, OperationPlan]] = defaultdict(dict)
    parameters: dict[str, dict[str, ParameterPlan]] = defaultdict(dict)
    moves: dict[str, list[Redistribution]] = defaultdict(list)
    for name, operation in graph.operations.items():
        operations[block_path(operation.block)][name] = operation
    for name, parameter in graph.parameters.items():
        parameters[block_path(owner_path(name))][name] = parameter
    for move in graph.redistributions:
        moves[block_path(module_of(graph, move))].append(move)
    paths = dict.fromkeys([*(block.path for block in chain(graph).blocks), *operations, *parameters, *moves])
    return [PlanBlock(path, parameters[path], operations[path], tuple(moves[path])) for path in paths]


def module_of(graph: GraphPlan, move: Redistribution) -> str:
    """The module that a redistribution counts for: its consumer's, else its value's."""
    for name in (move.consumer, move.value):
        if name in graph.operations:
            return graph.operations[name].block
        if name in graph.parameters:
            return owner_path(name)
    return ""


def _parameters_of(block: PlanBlock) -> tuple[object, ...]:
    start = len(block.path)
    return tuple(sorted((name[start:], each.shape, each.dtype, each.placements)
                        for name, each in block.parameters.items()))


def _forward_of(block: PlanBlock) -> frozenset[object]:
    kinds = Counter((each.op, each.outputs) for each in block.operations.values() if not each.backward)
    return frozenset(kinds.items())


def _fold(graph: GraphPlan, members: list[PlanBlock]) -> BlockClass:
    members = sorted(members, key=lambda block: not block.operations)  # stable: those with operations first
    multiplicity = len(members)
    if not any(block.parameters for block in members):  # blocks with parameters are all listed
        # a class id may cover a few operations of other blocks too, so take the most common multiplicity of a block
        multiplicity = max(multiplicity, sum(
            Counter(graph.runs(each) for each in block.operations.values()).most_common(1)[0][0]
            for block in members if block.operations))
    parameters = [each for block in members for each in block.parameters.values()]
    operations = [each for block in members for each in block.operations.values()]
    moves = [each for block in members for each in block.redistributions]
    return BlockClass(
        name=_name([block.path for block in members]),
        blocks=tuple(members),
        multiplicity=multiplicity,
        compute_us=sum(each.predicted_us * graph.runs(each) for each in operations),
        communication_us=sum(hop.predicted_us * move.multiplicity for move in moves for hop in move.hops),
        parameter_count=sum(math.prod(each.shape) for each in parameters),
        bytes_per_device=sum(each.bytes_per_device for each in parameters),
        collectives=collective_totals(moves),
    )


def _name(paths: list[str]) -> str:
    """Short name of several paths, such as "h.0-2,5" for h.0, h.1, h.2 and h.5."""
    if len(paths) == 1:
        return paths[0] or ROOT
    head, dot, _ = paths[0].rpartition(".")
    numbers = sorted(int(path.rpartition(".")[2]) for path in paths)
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1][1:] = [number]
        else:
            runs.append([number])
    return f"{head}{dot}" + ",".join("-".join(map(str, run)) for run in runs)
