"""Choose the collectives of sharded parameters that each microbatch repeats: least time within a device's memory.

An integer program has one choice for the parameters of equal layers: gathered once, they are unsharded at every moment of the
loop; gathered in each microbatch, only while they are read. The same for gradients, accumulated unsharded or as shards. The
answer is counted like any plan; where that is more, the limit is lowered by the excess and the program solved again; where it
leaves room, groups that need not be repeated are not.
"""
from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate

from hpml_compiler.options import Options
from hpml_compiler.planner.graph.graph_planning import solver_options
from hpml_compiler.planner.graph.microbatch_estimate import in_time, likeness
from hpml_compiler.planner.graph.plan_assembly import with_peak
from hpml_compiler.plans.pipeline_records import MicrobatchPlan
from hpml_compiler.plans.schema import GraphPlan
from hpml_compiler.simulate.local_sizes import values_of_parameters
from hpml_compiler.simulate.plan_prices import PlannedPrices
from hpml_compiler.simulate.plan_step_graph import step_graph
from passes.graph.analyzed_graph import AnalyzedGraph
from passes.graph.decision import MicrobatchPlacement
from passes.hardware.cluster import Cluster
from passes.sharding.loop_gathers import ONCE, LoopGathers, repeatable_gathers, repeatable_reductions
from passes.simulation.memory.step_trace import trace_step
from passes.simulation.step_graph import StepGraph, Transfer, storage_of
from passes.solver.ilp_search import solve
from passes.solver.problem import Choice, Entity, Problem

MOST_SOLVES = 4
KINDS = ((False, True), (False,), (True,))
"""Kinds of groups that a program is about: gathers and reductions, or one of them. The bytes of what each repeats are counted
with all of them repeated."""
SHARES, BELOW = (0.75, 0.5, 0.25, 0.0), 0.98
"""Under a memory budget: shares of the excess of gathering everything once that recomputation may have to make up for, and part
of the budget for an answer that leaves room, since plans are counted less exactly than rewritten graphs."""


@dataclass(frozen=True)
class ParameterGroup:
    """Parameters of equal layers, by name in the graph. reduces: about the reductions of their gradients, not their gathers.
    us: time that a step takes longer if each microbatch repeats them. nbytes: in memory during the loop if none does, or more
    than otherwise. own: for reductions, further such bytes of one microbatch's gradients, by byte of a shard."""

    reduces: bool
    names: tuple[str, ...]
    us: float
    nbytes: float
    own: float = 0.0


@dataclass(frozen=True)
class GatherChoice:
    """The choice for one plan. record: for the whole batch, with all layers. given: choice of a saved plan to apply. hurried:
    try out few of the choices under a memory budget."""

    record: GraphPlan
    annotated: AnalyzedGraph
    times: MicrobatchPlacement
    cluster: Cluster
    options: Options
    given: LoopGathers | None = None
    hurried: bool = False

    def record_of(self, repeats: LoopGathers) -> GraphPlan:
        """The plan in microbatches."""
        return in_time(self.record, self.annotated, self.times, self.cluster, self.options, repeats)

    def within(self, limit: float) -> tuple[LoopGathers, GraphPlan]:
        """The choice that takes the least time among those whose peak is at most `limit` bytes, or else the one that repeats
        everything, and its plan."""
        start = self.given or self.pinned
        record = self.record_of(start)
        if self.given is not None or not self.groups or _is_far_below(record, self.groups, limit):
            return start, record
        if self._peak(start) <= limit:
            return start, self._counted(start)
        found = [self._lowered(kinds, limit) for kinds in KINDS]
        fitting = [each for each in found if self._peak(each) <= limit]
        repeats = self._fewer(min(fitting, key=self.us), limit) if fitting else self.all
        return repeats, self._counted(repeats)

    def _lowered(self, kinds: tuple[bool, ...], limit: float) -> LoopGathers:
        """The solution of the integer program about these kinds of groups, if its count is at most `limit`; else of lower
        ones."""
        lowered = limit
        for _ in range(MOST_SOLVES):
            repeats = self.solved(lowered, kinds)
            excess = self._peak(repeats) - limit
            if excess <= 0:
                break
            lowered -= excess
        return repeats

    def _fewer(self, repeats: LoopGathers, limit: float) -> LoopGathers:
        """Without groups that need not be repeated, the most expensive ones first."""
        for group in sorted(self.groups, key=lambda group: -group.us):
            gathered, reduced = ([name for name in part if reduces != group.reduces or name not in group.names]
                                 for reduces, part in ((False, repeats.gathered), (True, repeats.reduced)))
            fewer = LoopGathers(tuple(gathered), tuple(reduced))
            if fewer != repeats and self._peak(fewer) <= limit:
                repeats = fewer
        return repeats

    def candidates(self, limit: float) -> list[LoopGathers]:
        """Choices to try out under a memory budget of `limit` bytes, beginning with as few repetitions as possible: those of
        which recomputation has to make up for parts of the bytes, and all repetitions."""
        if self.given is not None or not self.groups:
            return [self.given or self.pinned]
        if self.hurried:
            held = sum(group.nbytes for group in self.groups)  # all the time, if nothing is repeated
            return [self.all] if held > limit else list(dict.fromkeys([self.pinned, self.all]))
        excess = max(self._peak(self.pinned) - limit, 0)
        between = [self.within(target)[0] for target in (*(limit + share * excess for share in SHARES), BELOW * limit)]
        return list(dict.fromkeys([self.pinned, *between, self.all]))

    def us(self, repeats: LoopGathers) -> float:
        """Time of a step that the repetitions take."""
        return sum(group.us for group in self._all_groups if set(group.names) <= set(
            repeats.reduced if group.reduces else repeats.gathered))

    @property
    def pinned(self) -> LoopGathers:
        """Only repetitions that the options ask for."""
        return LoopGathers(self._gathers if self.options.gather == "each" else ())

    @property
    def all(self) -> LoopGathers:
        return LoopGathers(() if self.options.gather == "once" else self._gathers, self._reductions)

    @cached_property
    def groups(self) -> list[ParameterGroup]:
        """Groups with a choice."""
        return [group for group in self._all_groups if group.reduces or self.options.gather == "auto"]

    def solved(self, limit: float, kinds: tuple[bool, ...] = (False, True)) -> LoopGathers:
        """The solution of the integer program about these kinds of groups, by `reduces`."""
        problem, groups = self.problem(limit, kinds)
        chosen = solve(problem, replace(solver_options(self.options), gap=0.0)).chosen
        return with_groups(self.pinned, [group for group, choice in zip(groups, chosen) if choice == 1])

    def problem(self, limit: float, kinds: tuple[bool, ...] = (False, True)) -> tuple[Problem, list[ParameterGroup]]:
        """The integer program, with an entity for each group (not repeated, repeated), then one for all other bytes."""
        groups = [group for group in self.groups if group.reduces in kinds]
        if kinds not in self._at_work:  # it does not depend on the limit, and takes most of the time
            self._at_work[kinds] = self._live_bytes(self._step_graph(with_groups(self.pinned, groups)), groups)
        at_work = self._at_work[kinds]
        state = self.record.memory.parameters + self.record.memory.optimizer
        rows = sorted(at_work.items())
        repeated = (0.0,) * len(rows)
        entities = []
        for number, group in enumerate(groups):
            # A gathered parameter that is read at the moment is there in any case; gradients are there in one more size.
            held = [max(group.nbytes + (group.own if group.reduces else -1.0) * live[number], 0.0) for live, _ in rows]
            entities.append(Entity(", ".join(group.names), "parameters", 1, (
                Choice(0.0, tuple(held), (), ()), Choice(group.us, repeated, (), ()))))
        rest = tuple(float(nbytes + state) for _, nbytes in rows)
        entities.append(Entity("all else", "step", 1, (Choice(0.0, rest, (), ()),)))
        return Problem(tuple(entities), (), max(limit, max(rest, default=0.0)), tuple(str(k) for k in range(len(rows)))), groups

    def _live_bytes(self, graph: StepGraph, groups: Sequence[ParameterGroup]) -> dict[tuple[int, ...], int]:
        """Most bytes in memory, by the bytes of each group at that moment: gathered, or of shards of gradients."""
        gathers = self._group_of_value([replace(group, names=() if group.reduces else group.names) for group in groups])
        gradients = {value: number for number, group in enumerate(groups) if group.reduces
                     for value in self._gradients(group.names)}
        trace = trace_step(graph, self.cluster.device.kind)
        found: dict[tuple[int, ...], int] = {}
        for phase in (trace.forward, trace.backward):
            change = [[0] * (len(phase.order) + 1) for _ in groups]
            for life in phase.lives:
                storage = trace.program.storages[life.storage]
                of = gathers if storage.gathered else gradients if life.storage in trace.program.gradients else {}
                if (number := of.get(storage.name)) is not None:
                    change[number][max(life.first, 0)] += storage.nbytes
                    change[number][min(life.last + 1, len(phase.order))] -= storage.nbytes
            live = list(zip(*map(accumulate, change))) if change else [()] * (len(phase.order) + 1)
            for here, nbytes in zip(live, phase.nbytes):
                found[here] = max(found.get(here, 0), nbytes)
        return found

    @cached_property
    def _all_groups(self) -> list[ParameterGroup]:
        """Groups with a choice, and those whose gathers the options pin."""
        once, each = self._step_graph(ONCE), self._step_graph(LoopGathers(self._gathers, self._reductions))
        found = []
        for reduces, names in ((False, self._gathers), (True, self._reductions)):
            for group in self._alike(names):
                values = self._gradients(group) if reduces else self._group_of_value([ParameterGroup(reduces, group, 0, 0)])
                first, second = ([leg for leg in graph.legs if leg.value in values and leg.gradient == reduces
                                  and leg.communicates] for graph in (once, each))
                if second:
                    shards = sum(leg.result_bytes * leg.multiplicity for leg in first)
                    nbytes = _accumulated(once, first) if reduces else shards
                    found.append(ParameterGroup(reduces, group, _us(second, each) - _us(first, once), nbytes,
                                                nbytes / shards if reduces and shards else 0.0))
        return found

    def _step_graph(self, repeats: LoopGathers) -> StepGraph:
        record = self.record_of(repeats)
        return step_graph(record, PlannedPrices(record))

    @cached_property
    def _gathers(self) -> tuple[str, ...]:
        """Those that are gathered in the graph, in the listed layer or in others that are like it."""
        names, own = self.annotated.interface.names, self.record.parameters
        roots = values_of_parameters(self.record, own)
        gathered = {roots.get(move.value) for move in self.record.redistributions
                    if not move.held and any(hop.collective == "all_gather" for hop in move.hops)}
        alike = {likeness(path, own[path]) for path in gathered if path in own}
        return tuple(sorted(name for name in repeatable_gathers(self.annotated.graph, self.times)
                            if likeness(names[name], own[names[name]]) in alike))

    @cached_property
    def _reductions(self) -> tuple[str, ...]:
        """Those whose gradients are scattered when they are reduced."""
        names, own = self.annotated.interface.names, self.record.parameters
        scattered = {move.value for move in self.record.redistributions
                     if not move.consumer and any(hop.collective == "reduce_scatter" for hop in move.hops)}
        return tuple(sorted(name for name in repeatable_reductions(self.annotated.graph, self.times)
                            if own[names[name]].gradient in scattered))

    def _alike(self, names: Sequence[str]) -> list[tuple[str, ...]]:
        found: dict[object, list[str]] = defaultdict(list)
        for name in names:
            path = self.annotated.interface.names[name]
            found[likeness(path, self.record.parameters[path])].append(name)
        return [tuple(group) for group in found.values()]

    def _group_of_value(self, groups: Sequence[ParameterGroup]) -> dict[str, int]:
        paths = self.annotated.interface.names
        of = {paths[name]: number for number, group in enumerate(groups) for name in group.names}
        return {value: of[root] for value, root in values_of_parameters(self.record, of).items()}

    def _gradients(self, names: Iterable[str]) -> set[str]:
        return {self.record.parameters[self.annotated.interface.names[name]].gradient for name in names}

    def _counted(self, repeats: LoopGathers) -> GraphPlan:
        """The plan in microbatches with its peak."""
        if repeats not in self._plans:
            self._plans[repeats] = with_peak(self.record_of(repeats), self.options, self.cluster)
        return self._plans[repeats]

    @cached_property
    def _at_work(self) -> dict[tuple[bool, ...], dict[tuple[int, ...], int]]:
        """Most bytes in memory with all groups of these kinds repeated."""
        return {}

    @cached_property
    def _plans(self) -> dict[LoopGathers, GraphPlan]:
        return {}

    def _peak(self, repeats: LoopGathers) -> int:
        return self._counted(repeats).memory.peak


def repeats_in(said: MicrobatchPlan | None, names: Mapping[str, str]) -> LoopGathers | None:
    """The choice that a plan records, of the parameters with these names; None without microbatches."""
    if said is None:
        return None
    gathered, reduced = (tuple(sorted(name for name, path in names.items() if path in set(part)))
                         for part in (said.gathered, said.reduced))
    return LoopGathers(gathered, reduced)


def with_groups(repeats: LoopGathers, groups: Iterable[ParameterGroup]) -> LoopGathers:
    """The same repetitions, and those of these groups."""
    gathered, reduced = set(repeats.gathered), set(repeats.reduced)
    for group in groups:
        (reduced if group.reduces else gathered).update(group.names)
    return LoopGathers(tuple(sorted(gathered)), tuple(sorted(reduced)))


def _us(legs: Iterable[Transfer], graph: StepGraph) -> float:
    """Time of these redistributions in a step."""
    return sum(hop.us * leg.multiplicity * leg.runs(graph.microbatches) for leg in legs for hop in leg.hops)


def _accumulated(graph: StepGraph, legs: Sequence[Transfer]) -> float:
    """Bytes that gradients take more when they are accumulated unsharded; 0 where they are stored in a larger layout than
    that in which they are computed, such as those of norms, whose rows tensor ranks split."""
    owners = [graph.by_name[storage_of(leg.value, graph.by_name)] for leg in legs]
    return max(sum((owner.bytes - leg.result_bytes) * leg.multiplicity for owner, leg in zip(owners, legs)), 0.0)


def _is_far_below(record: GraphPlan, groups: Iterable[ParameterGroup], limit: float) -> bool:
    return record.memory.peak + sum(group.nbytes for group in groups) <= 0.5 * limit
