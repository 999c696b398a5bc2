"""Group the modules of a graph into classes: what runs the same, once, in the order of execution.

A module is the path up to its first number ("transformer.h.3"), or its first two names where there is none
("transformer.wte"). Modules whose paths differ only in that number are one class if their parameters are equal in shape, dtype
and placements and their forward operations in kind and placements. Where a plan lists one layer's operations for many, they are
the class's, whichever layer is listed. With pipeline stages, a class belongs to one stage.
"""
from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass

from hpml_compiler.plans.pipeline_records import StagePlan
from hpml_compiler.plans.schema import ROOT, GraphPlan, OperationPlan, ParameterPlan, Redistribution
from hpml_compiler.visualize.description.module_pieces import AFTER, BEFORE, module_pieces, read_by
from passes.graph.placement_graph import block_class


@dataclass(frozen=True)
class PlanBlock:
    """Parameters, operations and redistributions of one module, by their names in the plan."""

    path: str
    parameters: dict[str, ParameterPlan]
    operations: dict[str, OperationPlan]
    redistributions: tuple[Redistribution, ...]


@dataclass(frozen=True)
class ModuleClass:
    """A class of equal modules. blocks: those with operations first; `blocks[0]` stands for all. count: how many modules of the
    class one step runs, listed or not. runs: how often a step runs each listed operation in this class; moves: each listed
    redistribution with its number in a step. stage: the pipeline stage; None without a pipeline."""

    name: str
    blocks: tuple[PlanBlock, ...]
    count: int
    runs: dict[str, int]
    moves: tuple[tuple[Redistribution, float], ...]
    stage: int | None = None

    @property
    def parameters(self) -> dict[str, ParameterPlan]:
        return {name: each for block in self.blocks for name, each in block.parameters.items()}


def named(classes: Sequence[ModuleClass], name: str) -> ModuleClass | None:
    """The class with a name, or with a module of that path."""
    return next((found for found in classes if name == found.name or any(block.path == name for block in found.blocks)), None)


def block_path(module_path: str) -> str:
    """The module that a path belongs to; "" is the model itself, displayed as ROOT."""
    parts = module_path.split(".") if module_path not in ("", ROOT) else []
    for position, part in enumerate(parts):
        if part.isdigit():
            return ".".join(parts[: position + 1])
    return ".".join(parts[:2])


def owner_path(parameter: str) -> str:
    """Path of the module of a parameter, from the parameter's fully qualified name."""
    return parameter.rpartition(".")[0]


def module_classes(graph: GraphPlan) -> list[ModuleClass]:
    """Classes of equal modules of a graph, in the order in which they run, stage after stage."""
    families = _families(graph)
    if graph.pipeline is not None:
        return [each for k, stage in enumerate(graph.pipeline.stages) for each in _of_stage(graph, families, k, stage)]
    found = []
    for members in families:
        runs = {name: graph.runs(each) for block in members for name, each in block.operations.items()}
        moves = tuple((move, float(move.multiplicity)) for block in members for move in block.redistributions)
        found.append(ModuleClass(compact_name([block.path for block in members]), tuple(members), _count(members, runs), runs,
                                 moves))
    return found


def _count(members: list[PlanBlock], runs: Mapping[str, int]) -> int:
    if any(block.parameters for block in members):  # modules with parameters are all listed
        return len(members)
    # a class id may cover a few operations of other modules too, so take the most common multiplicity
    return max(len(members), sum(Counter(runs[name] for name in block.operations).most_common(1)[0][0]
                                 for block in members if block.operations))


def _of_stage(graph: GraphPlan, families: list[list[PlanBlock]], number: int, stage: StagePlan) -> list[ModuleClass]:
    paths, owned = set(map(block_path, stage.blocks)) - {""}, set(stage.parameters)
    found = []
    for family in families:
        runs = {name: stage.operations[name] for block in family for name in block.operations if name in stage.operations}
        members = [block for block in family if block.path in paths or not owned.isdisjoint(block.parameters)]
        if not runs and not members:
            continue
        stands_for = next((block for block in family if block.operations), family[0])
        shown = [PlanBlock(block.path, {name: each for name, each in block.parameters.items()
                                        if name in owned or block.path in paths}, block.operations, block.redistributions)
                 for block in members or [PlanBlock(stands_for.path, {}, stands_for.operations, stands_for.redistributions)]]
        if not any(block.operations for block in shown):  # listed in the layer of another stage
            first = shown[0]
            shown[0] = PlanBlock(first.path, first.parameters, stands_for.operations, stands_for.redistributions)
        shown.sort(key=lambda block: not block.operations)
        moves = tuple((move, share) for block in family for move in block.redistributions
                      if (share := move.multiplicity * _share(graph, stage, move)))
        found.append(ModuleClass(compact_name([block.path for block in shown]), tuple(shown), len(shown), runs, moves, number))
    return found


def _share(graph: GraphPlan, stage: StagePlan, move: Redistribution) -> float:
    """The share of a redistribution's runs that are in a stage."""
    owner = next((name for name in (move.consumer, move.value) if name in graph.operations), None)
    if owner is None:
        return float(move.value in stage.parameters)
    return stage.operations.get(owner, 0) / graph.runs(graph.operations[owner])


def _families(graph: GraphPlan) -> list[list[PlanBlock]]:
    """Equal modules, each family in order with those that list operations first."""
    families: dict[Hashable, list[PlanBlock]] = defaultdict(list)
    blocks, listed_once = _blocks(graph), bool(graph.multiplicity)
    keys: dict[str, Hashable] = {}
    for block in reversed(blocks):  # a piece of an outer module is equal to another one if the modules that read them are
        read = read_by(block.path, keys)
        keys[block.path] = (block_class(block.path), _parameters_of(block), None if listed_once else _forward_of(block),
                            keys.get(read) if read else None)
    last: Hashable = None
    for number, block in enumerate(blocks):
        key = keys[block.path]
        apart = not (block.parameters or listed_once or read_by(block.path, keys))  # others may run in between, and read these
        if apart and last != key and key in families:
            key = (*key, number)  # pyright: ignore[reportGeneralTypeIssues]
        families[key].append(block)
        last = keys[block.path] if apart else None
    if not listed_once:  # modules without operations are those of layers that another one stands for
        with_operations = {key[:2]: key for key in families if key[2]}  # pyright: ignore[reportIndexIssue]
        for key in [key for key in families if not key[2] and key[:2] in with_operations]:  # pyright: ignore[reportIndexIssue]
            families[with_operations[key[:2]]].extend(families.pop(key))  # pyright: ignore[reportIndexIssue]
    order = {block.path: position for position, block in enumerate(blocks)}
    found = [sorted(members, key=lambda block: not block.operations) for members in families.values()]  # stable
    return sorted(found, key=lambda members: order[members[0].path])


def _blocks(graph: GraphPlan) -> list[PlanBlock]:
    """All modules in the order of their first forward operation, those without one last."""
    operations: dict[str, dict[str, OperationPlan]] = defaultdict(dict)
    parameters: dict[str, dict[str, ParameterPlan]] = defaultdict(dict)
    moves: dict[str, list[Redistribution]] = defaultdict(list)
    homes = {name: block_path(operation.block) for name, operation in graph.operations.items()}
    homes |= module_pieces(graph, homes)
    for name, operation in graph.operations.items():
        operations[homes[name]][name] = operation
    first_reader = {source: name for name, each in reversed(graph.operations.items()) for source in each.sources}
    unread: dict[str, str] = {}  # modules without operations of their own, and the first module that reads their parameters
    for name, parameter in graph.parameters.items():
        path, reader = block_path(owner_path(name)), homes.get(first_reader.get(name, ""), "")
        if reader.startswith((f"{path}{BEFORE}", f"{path}{AFTER}")):
            path = reader
        elif path not in operations and reader:
            unread.setdefault(path, reader)
        parameters[path][name] = parameter
    for move in graph.redistributions:
        owner = next((name for name in (move.consumer, move.value) if name in homes), None)
        moves[block_path(module_of(graph, move)) if owner is None else homes[owner]].append(move)
    # views of weights may be made long before they are read
    run = [homes[name] for name, each in graph.operations.items()
           if not each.backward and not (each.kind == "view" and graph.parameters.keys() >= set(each.sources))]
    # the model's own operations (masks and positions before, a loss after) count from their last one
    paths = [path for path in dict.fromkeys(run) if path]
    if "" in run:
        last = len(run) - 1 - run[::-1].index("")
        paths.insert(len({path for path in run[:last] if path}), "")
    for path, reader in unread.items():
        if reader in paths:
            paths.insert(paths.index(reader), path)
    return [PlanBlock(path, parameters[path], operations[path], tuple(moves[path]))
            for path in dict.fromkeys([*paths, *operations, *parameters, *moves])]


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


def compact_name(paths: list[str]) -> str:
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
