"""Summaries of the classes of equal modules of a graph, and of the values that pass between them."""
from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from hpml_compiler.plans.checkpointing_records import CheckpointingPlan
from hpml_compiler.plans.record_fields import Placements
from hpml_compiler.plans.schema import ROOT, GraphPlan, Redistribution
from hpml_compiler.visualize.description.module_classes import ModuleClass, block_path
from hpml_compiler.visualize.description.placement_words import parameter_words, value_words
from hpml_compiler.visualize.description.records import (
    CollectiveSummary,
    CommunicationSummary,
    EdgeSummary,
    ModuleSummary,
    ParameterSummary,
)
from passes.graph.placement_graph import block_class

Moves = Iterable[tuple[Redistribution, float]]


def module_summary(graph: GraphPlan, each: ModuleClass, uses: Mapping[str, Placements],
                   saved_by: Mapping[str, int] | None = None) -> ModuleSummary:
    """uses: of parameters; see `uses_of`. saved_by: see `saved_bytes`."""
    first, parameters = each.blocks[0], each.parameters
    shown = tuple(_parameter(graph, name, first.path, uses) for name in first.parameters)
    compute_us = sum(graph.operations[name].predicted_us * runs for name, runs in each.runs.items())
    saved, recompute_us, offloaded = _checkpointing(graph, each, saved_by or {})
    return ModuleSummary(
        name=each.name, path=first.path, count=each.count, stage=each.stage, sharding=_sharding(graph, each, shown),
        parameters=tuple(sorted(shown, key=lambda p: -p.bytes_whole)),
        parameter_count=sum(math.prod(p.shape) for p in parameters.values()),
        parameter_bytes=sum(p.bytes_per_device for p in parameters.values()),
        compute_us=compute_us, communication=communication(each.moves),
        saved_bytes=saved, recompute_us=recompute_us, offloaded_bytes=offloaded, read_by=_readers(graph, each))


def _readers(graph: GraphPlan, each: ModuleClass) -> tuple[str, ...]:
    """Modules that read the parameters of a module without operations of its own."""
    own = set(each.parameters)
    readers = (operation.block for operation in graph.operations.values()
               if not operation.backward and not own.isdisjoint(operation.sources))
    return () if each.runs else tuple(dict.fromkeys(block_path(block) or ROOT for block in readers))


def scaled(modules: Sequence[ModuleSummary], compute_us: float, communication_us: float) -> list[ModuleSummary]:
    """The modules of a step or stage with these totals, each in proportion: microbatches take longer in sum than the whole
    batch, which the operations of a plan are listed for."""
    own, moved = sum(each.compute_us for each in modules), sum(each.communication_us for each in modules)
    more, further = (compute_us / own if own else 1.0), (communication_us / moved if moved else 1.0)
    return [replace(each, compute_us=each.compute_us * more,
                    communication={axis: _times(total, further) for axis, total in each.communication.items()})
            for each in modules]


def _times(total: CommunicationSummary, factor: float) -> CommunicationSummary:
    return replace(total, us=total.us * factor, by_kind={kind: us * factor for kind, us in total.by_kind.items()})


def communication(moves: Moves) -> dict[str, CommunicationSummary]:
    """Collectives by axis."""
    found: dict[str, CommunicationSummary] = {}
    for move, times in moves:
        for hop in move.hops:
            old = found.get(hop.axis, CommunicationSummary(0.0, 0.0, 0.0, {}))
            kinds = old.by_kind | {hop.collective: old.by_kind.get(hop.collective, 0.0) + hop.predicted_us * times}
            found[hop.axis] = CommunicationSummary(
                old.us + hop.predicted_us * times, old.bytes + hop.bytes * times, old.count + bool(hop.bytes) * times, kinds)
    return {axis: total for axis, total in found.items() if total.count or total.us}


def _parameter(graph: GraphPlan, name: str, path: str, uses: Mapping[str, Placements]) -> ParameterSummary:
    parameter = graph.parameters[name]
    return ParameterSummary(
        name=name[len(path):].lstrip("."), shape=parameter.shape, dtype=parameter.dtype,
        words=parameter_words(graph, name, uses),
        stored=value_words(parameter.placements, parameter.dims, graph.mesh),
        placements=parameter.placements, bytes_whole=parameter.bytes_whole,
        bytes_per_device=parameter.bytes_per_device)


def _sharding(graph: GraphPlan, each: ModuleClass, parameters: Sequence[ParameterSummary]) -> dict[str, tuple[str, ...]]:
    """Words by axis: of the parameters by size, then of the values of forward by how often they occur."""
    found: dict[str, Counter[str]] = defaultdict(Counter)
    values: dict[str, Counter[str]] = defaultdict(Counter)
    for parameter in parameters:
        for axis, word in parameter.words.items():
            found[axis][word] += parameter.bytes_whole
    forward = [graph.operations[name] for name in each.runs if not graph.operations[name].backward]
    # what a kernel of another module computes is a view here
    for operation in [own for own in forward if own.kind != "view"] or forward:
        for placements, dims in zip(operation.outputs, (*operation.dims, *[""] * len(operation.outputs))):
            for axis, word in value_words(placements, dims, graph.mesh).items():
                values[axis][word] += 1
    words = {axis: dict.fromkeys([*(word for word, _ in found[axis].most_common()),
                                  *(word for word, _ in values[axis].most_common()
                                    if word != "features" or not found[axis])])
             for axis in graph.mesh}
    return {axis: tuple(own) for axis, own in words.items() if own}


def decided(graph: GraphPlan, stage: int | None) -> CheckpointingPlan | None:
    """Activation checkpointing of a graph or of one of its stages, where it was decided."""
    return graph.kept if stage is None or graph.pipeline is None else graph.pipeline.stages[stage].kept


def _checkpointing(graph: GraphPlan, each: ModuleClass, saved_by: Mapping[str, int]) -> tuple[int, float, int]:
    """Saved bytes, µs of recomputation and of copies to the host, and offloaded bytes."""
    kept = decided(graph, each.stage)
    if kept is None:
        return sum(runs * saved_by.get(name, 0) for name, runs in each.runs.items()), 0.0, 0
    own = {block_class(block.path) for block in each.blocks}

    def here(block: str) -> bool:
        return block_class(block_path(block)) in own

    saved = sum(value.bytes * value.layers for value in kept.saved.values() if here(value.block))
    recompute_us = sum(call.predicted_us * call.layers for call in kept.again.values() if here(call.block))
    recompute_us += sum(value.predicted_us * value.layers for value in kept.offloaded.values() if here(value.block))
    return saved, recompute_us, sum(value.bytes * value.layers for value in kept.offloaded.values() if here(value.block))


def edge_summaries(graph: GraphPlan, classes: Sequence[ModuleClass], saved_by: Mapping[str, int]) -> list[EdgeSummary]:
    """Values that each module reads from others in forward: the largest of each pair, with its collectives. Modules that do
    no work and save nothing, such as a dropout that is off, are passed through."""
    homes: dict[tuple[int | None, str], int] = {}
    for number, each in enumerate(classes):
        homes |= {(each.stage, name): number for name in each.runs}
    moves: dict[tuple[str, str], list[Redistribution]] = defaultdict(list)
    for move in graph.redistributions:
        moves[move.value, move.consumer].append(move)
    idle = {number for number, each in enumerate(classes) if not each.parameters and not any(
        graph.operations[name].predicted_us or saved_by.get(name) for name in each.runs)}
    largest: dict[tuple[int, int], tuple[int, str, list[Redistribution]]] = {}
    for (stage, name), head in homes.items():
        operation = graph.operations[name]
        for source in _read_through(graph, homes, idle, stage, name) if not operation.backward and head not in idle else ():
            tail = homes.get((stage, source))
            if tail is None or tail == head or graph.operations[source].backward:
                continue
            nbytes = sum(graph.operations[source].result_bytes)
            old = largest.get((tail, head))
            hops = (old[2] if old else []) + moves[source, name]
            largest[tail, head] = (nbytes, source, hops) if old is None or nbytes > old[0] else (*old[:2], hops)
    trained = _with_gradients(graph)
    return [_edge(graph, tail, head, value, hops, value in trained) for (tail, head), (_, value, hops) in largest.items()]


def _with_gradients(graph: GraphPlan) -> set[str]:
    """Forward values that have gradients: those made of trainable parameters through operators on floating-point numbers."""
    if not any(each.backward for each in graph.operations.values()):
        return set()
    found = {name for name, each in graph.parameters.items() if each.trainable}
    for name, each in graph.operations.items():
        if not each.backward and "float" in each.dtype and not found.isdisjoint(each.sources):
            found.add(name)
    return found


def _read_through(graph: GraphPlan, homes: Mapping[tuple[int | None, str], int], idle: set[int], stage: int | None, name: str,
                  ) -> list[str]:
    """The values that an operation reads; those of idle modules are replaced by what they are made of."""
    found, left, seen = [], [*graph.operations[name].sources], set[str]()
    while left:
        source = left.pop()
        if source in seen:
            continue
        seen.add(source)
        if homes.get((stage, source)) in idle:
            left += graph.operations[source].sources
        else:
            found.append(source)
    return found


def _edge(graph: GraphPlan, tail: int, head: int, value: str, moves: Sequence[Redistribution], trained: bool) -> EdgeSummary:
    operation = graph.operations[value]
    dims = operation.dims[0] if operation.dims else ""
    sums: dict[tuple[str, str], CollectiveSummary] = {}
    for move in moves:
        for hop in move.hops:
            if hop.bytes:
                old = sums.get((hop.collective, hop.axis), CollectiveSummary(hop.collective, hop.axis, 0.0, 0.0, 0.0))
                sums[hop.collective, hop.axis] = replace(
                    old, bytes=old.bytes + hop.bytes * move.multiplicity, us=old.us + hop.predicted_us * move.multiplicity,
                    count=old.count + move.multiplicity)
    nbytes = sum(operation.result_bytes)
    words = value_words(operation.outputs[0] if operation.outputs else (), dims, graph.mesh)
    return EdgeSummary(tail, head, value, dims, words, nbytes, nbytes if trained else 0, tuple(sums.values()))


def axis_totals(modules: Iterable[Mapping[str, CommunicationSummary]]) -> dict[str, CommunicationSummary]:
    """Sums over modules."""
    found: dict[str, CommunicationSummary] = {}
    for module in modules:
        for axis, total in module.items():
            old = found.get(axis, CommunicationSummary(0.0, 0.0, 0.0, {}))
            kinds = dict(old.by_kind)
            for kind, us in total.by_kind.items():
                kinds[kind] = kinds.get(kind, 0.0) + us
            found[axis] = CommunicationSummary(old.us + total.us, old.bytes + total.bytes, old.count + total.count, kinds)
    return found
