"""A loop over microbatches on all ranks of a mesh in one process, and decisions in time that nobody would take."""
from __future__ import annotations

import functools
import random
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from passes import compat
from passes.graph.decision import AFTER, MicrobatchPlacement
from passes.graph.fx_nodes import returned_nodes
from passes.graph.loops.loop_parts import GraphFragment, LoopInput, LoopOutput, LoopSplit
from passes.graph.placement_graph import PlacementGraph
from passes.hardware.axis import time_axis
from passes.op_rules.base import REPLICATE
from passes.op_rules.rule_table import is_random
from passes.presets import in_loop
from passes.sharding.microbatch_axis import _MicrobatchProblem
from passes.solver.problem import Label
from passes.transforms.microbatch.loop_markers import place_of, taken
from passes.transforms.shard.redistributor import MeshGroups
from tests.passes.transforms.ranks import run


def random_times(graph: PlacementGraph, microbatches: int, targets: dict[str, Any], rng: random.Random) -> MicrobatchPlacement:
    """For every operation one of its options in time at random, mostly one in the loop. What draws random numbers stays where
    the whole graph has it: before all else. targets: of the operations, by name."""
    times = _MicrobatchProblem(graph, time_axis(microbatches))
    made: dict[int, Label] = {}
    reads, makes, whole = [], [], []
    for op, options in zip(graph.operations, times.options):
        possible = [o for o in options if all(_reachable(made.get(v, REPLICATE), r) for v, r in zip(op.inputs, o.reads))]
        loops = [o for o in possible if not {REPLICATE, AFTER}.issuperset(o.reads + o.makes)]
        early = [o for o in possible if AFTER not in o.reads + o.makes]  # what is late makes all that reads it late
        free = loops if loops and rng.random() < 0.9 else early if early and rng.random() < 0.98 else possible
        chosen = possible[0] if is_random(targets[op.name]) else rng.choice(free)
        made.update(zip(op.outputs, chosen.makes))
        reads.append(chosen.reads)
        makes.append(chosen.makes)
        whole += [op.name] if len(options) > 1 and chosen not in loops else []
    could = sum(len(options) > 1 for options in times.options)
    return MicrobatchPlacement(microbatches, tuple(reads), tuple(makes), 1 - len(whole) / could, tuple(whole))


def _reachable(made: Label, read: Label) -> bool:
    """Rows are taken of what is whole before the loop, and anything is there after it."""
    return made == read or read == AFTER or (made == REPLICATE and read.startswith("S"))


class _Ranks:
    """Values by the names of their nodes, on every rank."""

    def __init__(self, loops: Sequence[LoopSplit], groups: Sequence[MeshGroups], inputs: Sequence[dict[str, Any]]):
        self.loops, self.groups, self.values = loops, groups, [dict(own) for own in inputs]

    def segment(self, when: str, half: int) -> None:
        parts: list[GraphFragment] = [getattr(loop, when)[half] for loop in self.loops]
        graphs = [part.gm for part in parts if part.gm is not None]
        if not graphs:
            return
        given = [[own[name] for name in part.reads] for part, own in zip(parts, self.values)]
        for part, own, made in zip(parts, self.values, run(graphs, self.groups, given)):
            own.update(zip(part.makes, made, strict=True))

    def reads(self, reads: Sequence[LoopInput], rank: int, number: int) -> list[Any]:
        own = self.values[rank]
        return [own[r.name] if r.rows is None else taken(own[r.name], r.rows.apart, r.rows.dim, r.rows.size, number)
                for r in reads]

    def collect(self, what: str, made: Sequence[Sequence[Sequence[torch.Tensor]]]) -> None:
        """made: by microbatch and rank."""
        for rank, loop in enumerate(self.loops):
            each: LoopOutput
            for k, each in enumerate(getattr(loop, what)):
                parts = [by_rank[rank][k] for by_rank in made]
                self.values[rank][each.name] = _together(each, parts)


def _together(what: LoopOutput, parts: Sequence[torch.Tensor]) -> torch.Tensor:
    if what.rows is None:
        return functools.reduce(torch.add, parts)
    whole = parts[0].new_empty(what.rows.size)
    for number, part in enumerate(parts):
        place = place_of(whole, what.rows.apart, what.rows.dim, number)
        place.copy_(part.reshape(place.shape))
    return whole


def run_loops(loops: Sequence[LoopSplit], groups: Sequence[MeshGroups], inputs: Sequence[dict[str, Any]],
              microbatches: int) -> list[list[Any]]:
    """What each rank's graph returns: all forward, then all backward, the loop's body cut in two as the compiler does."""
    ranks = _Ranks(loops, groups, inputs)
    halves = [_halves(loop) for loop in loops]
    ranks.segment("before", 0)
    made = []
    for number in range(microbatches):
        given = [ranks.reads(loop.reads, rank, number) for rank, loop in enumerate(loops)]
        made.append(run([forward for forward, _ in halves], groups, given))
    ranks.collect("forward", made)
    ranks.segment("after", 0)
    ranks.segment("before", 1)
    gradients = []
    for number in range(microbatches):
        given = [[*_saved(*halves[rank], made[number][rank]), *ranks.reads(loop.late, rank, number)]
                 for rank, loop in enumerate(loops)]
        gradients.append(run([backward for _, backward in halves], groups, given))
    ranks.collect("backward", gradients)
    ranks.segment("after", 1)
    return [[None if name is None else own[name] for name in loop.results] for loop, own in zip(loops, ranks.values)]


def _halves(loop: LoopSplit) -> tuple[fx.GraphModule, fx.GraphModule]:
    in_loop("inductor", len(loop.forward))(loop.body)  # which goes by the tags that nodes have
    inputs = [node.meta.get("val") for node in loop.body.graph.find_nodes(op="placeholder")]
    return compat.min_cut_partition(loop.body, inputs, len(loop.forward), None)


def _saved(forward: fx.GraphModule, backward: fx.GraphModule, made: Sequence[Any]) -> list[Any]:
    """What backward takes of forward, in its order."""
    by_name = {node.name: x for node, x in zip(returned_nodes(forward), made) if node is not None}
    return [by_name[node.name] for node in backward.graph.find_nodes(op="placeholder") if node.name in by_name]
