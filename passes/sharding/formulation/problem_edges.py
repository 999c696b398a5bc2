"""Edges of a placement problem: the chain of redistributions from the producer of a value to each of its readers.

A value with several forward readers, or with backward readers too, is redistributed to one shared copy, which is also
the copy saved for backward; several backward readers share another copy.
"""
from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

from passes.cost_model.cost_terms import Prices
from passes.graph.layouts import format_layout
from passes.graph.placement_graph import PlacementGraph, Value
from passes.graph.step_phase import BACKWARD, FORWARD, Phase
from passes.op_rules.base import REPLICATE
from passes.sharding.formulation.problem_entities import Port, ProblemEntities
from passes.sharding.grouping.group_symmetry import value_signature
from passes.sharding.pricing.redistribution import hops_between
from passes.solver.problem import Arc, Edge
from passes.solver.work_limit import WorkLimit

Chain = tuple[tuple[int, Phase], ...]
"""Numbers of edges, each with the phase in which its collectives run."""


@dataclass(frozen=True)
class _ReaderEnd:
    """One reader of a value: (group, value), or the index of a graph output."""

    port: Port
    phase: Phase
    reader: tuple[int, int] | int


class ProblemEdges:
    """All edges of a problem. sources: value -> the port that supplies it. reads: (group, value) -> chain to that group.
    outputs: index of a graph output -> chain to it. Copies and outputs are added to `entities`. memo: arcs by
    signature, shared between problems of one mesh. bound: values that are never gathered. scatters: gradients whose
    optimizer update is sharded are reduce-scattered, never all-reduced."""

    def __init__(self, graph: PlacementGraph, entities: ProblemEntities, saved: frozenset[int], sharded: frozenset[str],
                 prices: Prices, bucket_bytes: float, memo: dict[Hashable, tuple[Arc, ...]] | None = None,
                 bound: frozenset[int] = frozenset(), scatters: bool = False, allowance: WorkLimit | None = None):
        self.graph, self.entities, self.saved, self.sharded = graph, entities, saved, sharded
        self.bound, self.scatters, self.allowance = bound, scatters, allowance or WorkLimit(math.inf)
        self.prices, self.bucket_bytes = prices, bucket_bytes
        self.sources: dict[int, Port] = {}
        self.reads: dict[tuple[int, int], Chain] = {}
        self.outputs: dict[int, Chain] = {}
        self._numbers: dict[Hashable, int] = {}
        self._found: list[tuple[Port, Port, tuple[Arc, ...], str]] = []
        self._counts: list[int] = []
        self._arcs = {} if memo is None else memo
        outputs_of: dict[int, list[int]] = defaultdict(list)
        for k, (v, _) in enumerate(graph.outputs):
            outputs_of[v].append(k)
        for value in graph.values:
            self._connect(value, outputs_of[value.index])

    def finished(self) -> tuple[Edge, ...]:
        return tuple(Edge(*source, *target, count, arcs, name)
                     for (source, target, arcs, name), count in zip(self._found, self._counts, strict=True))

    def _connect(self, value: Value, outputs: Sequence[int]) -> None:
        v, entities = value.index, self.entities
        maker = entities.wiring.maker(v)
        if maker is None:
            source = (entities.of_input[v], 0)
        elif v in maker.outputs:
            source = (entities.of_group[maker.index], maker.outputs.index(v))
        else:
            return
        made = maker.phase if maker is not None else BACKWARD if value.kind == "tangent" else FORWARD
        self.sources[v] = source
        ends = [_ReaderEnd((entities.of_group[group.index], port), group.phase, (group.index, v))
                for group, port in entities.wiring.readers[v]]
        for k in outputs:
            owner = self.graph.outputs[k][1]
            number = entities.add_output(k, value) if owner is None else entities.of_input[owner]
            ends.append(_ReaderEnd((number, 0), made, k))  # a forward value is returned by forward
        self._fan_out(value, source, made, ends)

    def _fan_out(self, value: Value, source: Port, made: Phase, ends: Sequence[_ReaderEnd]) -> None:
        forward = [end for end in ends if end.phase == FORWARD]
        backward = [end for end in ends if end.phase == BACKWARD]
        prefix: Chain = ()
        # A forward value that backward reads is saved once, in the layout of the forward copy; so is a gathered input
        # that arrives sharded. Parameters and replicated inputs are in memory anyway.
        computed = value.producer is not None or value.name in self.sharded
        kept = computed and made == FORWARD and bool(backward)
        if kept or len(forward) > 1:
            copy = (self.entities.add_copy("kept" if kept else "shared", source, [e.port for e in forward or backward],
                                           value, kept and value.index in self.saved,
                                           kept and value.index in self.graph.weights), 0)
            way: Chain = ((self._edge(source, copy, value), made),)
            self._arrive(value, copy, way, forward)
            if kept:
                source, prefix = copy, way
        else:
            self._arrive(value, source, prefix, forward)
        if len(backward) > 1:
            copy = (self.entities.add_copy("shared", source, [e.port for e in backward], value, False), 0)
            last: tuple[int, Phase] = (self._edge(source, copy, value), BACKWARD)
            prefix = (*prefix, last)
            source = copy
        self._arrive(value, source, prefix, backward)

    def _arrive(self, value: Value, source: Port, prefix: Chain, ends: Sequence[_ReaderEnd]) -> None:
        for end in ends:
            chain: Chain = (*prefix, (self._edge(source, end.port, value), end.phase))
            if isinstance(end.reader, int):
                self.outputs[end.reader] = chain
            else:
                self.reads[end.reader] = chain

    def _edge(self, source: Port, target: Port, value: Value) -> int:
        """Index of the edge for equal values between these ports; adds one to its multiplicity."""
        key = (source, target, value_signature(value))
        if key not in self._numbers:
            self._numbers[key] = len(self._found)
            self.allowance.spend("edge")
            self._found.append((source, target, self._arcs_between(source, target, value), value.name))
            self._counts.append(0)
        number = self._numbers[key]
        self._counts[number] += 1
        return number

    def _arcs_between(self, source: Port, target: Port, value: Value) -> tuple[Arc, ...]:
        entities = self.entities
        ends = dict.fromkeys(entities.layouts_supplied(source) + entities.layouts_demanded(target))
        gradient = entities.drafts[target[0]].kind == "parameter"
        bucket_bytes = self.bucket_bytes if gradient else 0.0
        scattered = [axis for axis in range(len(entities.axes)) if gradient and self.scatters and all(
            layout[axis] != REPLICATE for layout in entities.layouts_demanded(target))]
        bound = value.index in self.bound
        key = (value.spec, value.factors, tuple(sorted(map(format_layout, ends))), bucket_bytes, tuple(scattered), bound)
        if key not in self._arcs:
            hops = hops_between(value, ends, entities.axes, self.prices, bucket_bytes)
            self._arcs[key] = tuple(
                Arc(format_layout(hop.source), format_layout(hop.target), hop.cost) for hop in hops
                if not (bound and hop.collective in ("all_gather", "all_to_all"))
                and not (hop.axis in scattered and hop.collective == "all_reduce"))
            self.allowance.spend("hop", len(hops))
        return self._arcs[key]
