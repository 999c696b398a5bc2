"""Choose the collectives of sharded parameters that each microbatch of a pipeline repeats, by the rank that has the parameters.

A stage's own memory says whether a parameter stays unsharded while its microbatches run: with 1F1B the first stage has most of
them in flight, and repeats gathers that the last one runs once. The whole pipeline is cut, and counted, for each choice that is
tried: as much as a rank's excess over the limit at first, then growing parts of its gathered parameters and unreduced
gradients, those that take the least time. The fastest step within the limit is taken.
"""
from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from hpml_compiler.planner.graph.gather_choice import GatherChoice, ParameterGroup, with_groups
from hpml_compiler.planner.graph.graph_planning import solver_options
from hpml_compiler.planner.graph.memory_budget import GraphMemory
from hpml_compiler.plans.schema import GraphPlan
from passes.pipeline.stage_assignment import StageAssignment
from passes.sharding.loop_gathers import LoopGathers
from passes.solver.ilp_search import solve
from passes.solver.problem import Choice, Entity, Problem

SHARES = (0.0, 1.0, 0.25, 0.5, 0.75)
"""Parts of a tight rank's bytes to try, in order."""


@dataclass(frozen=True)
class CutResult:
    """The plan of a pipeline. peaks: bytes of each rank. owned: for each rank, how many parameters of the model each parameter
    of the graph stands for; copies: the same over all ranks, None where each is one. fullest: see `MakesPlan`."""

    record: GraphPlan
    stages: StageAssignment
    peaks: Sequence[int]
    owned: Sequence[Mapping[str, int]]
    copies: Mapping[str, int] | None = None
    fullest: GraphMemory | None = None

    @property
    def computes_again(self) -> list[bool]:
        """For each rank, whether it recomputes or offloads anything."""
        assert self.record.pipeline is not None, "it is a pipeline's"
        stages = [(stage.rank, stage.kept) for stage in self.record.pipeline.stages if stage.kept is not None]
        return [any(kept.again_us + kept.offload_us > 0 for own, kept in stages if own == rank)
                for rank in range(len(self.peaks))]

    @property
    def us(self) -> float:
        return self.record.predicted.step_time_us


@dataclass(frozen=True)
class StageGathers:
    """choice: of the ranks of one stage, as if they ran the full graph. cut: cuts and counts the pipeline. limit: bytes that a
    device may hold. A hurried choice is between as much as the excess, and everything."""

    choice: GatherChoice
    cut: Callable[[LoopGathers], CutResult]
    limit: float

    def found(self) -> CutResult:
        """The fastest plan within the limit, or else the one with the lowest peak."""
        start = self.choice.given or self.choice.pinned
        tried = {start: self.cut(start)}
        if self.choice.given is None and self._tight(tried[start]) and self.choice.groups:
            self._try_more(tried)
        fitting = [each for each in tried.values() if max(each.peaks) <= self.limit]
        return min(fitting, key=lambda each: each.us) if fitting else min(tried.values(), key=lambda each: max(each.peaks))

    def _try_more(self, tried: dict[LoopGathers, CutResult]) -> None:
        """Repeat as much as the excess of tight ranks; if that is not enough, everything; and, if that is, parts of it, until a
        step within the limit is not faster than one before, or recomputes nothing."""
        (latest,) = tried.values()
        groups, excess = self._groups(latest), dict[int, float]()
        for share in SHARES[:2] if self.choice.hurried else SHARES:
            fitting = [each.us for each in tried.values() if max(each.peaks) <= self.limit]
            if share == 1.0 and fitting:
                continue
            for rank in self._tight(latest):
                excess[rank] = max(excess.get(rank, 0.0), latest.peaks[rank] - self.limit)
            totals = {rank: sum(group.nbytes for group in groups.get(rank, ())) for rank in excess}
            latest = self._cut_more(tried, {rank: max(excess[rank], share * totals[rank]) for rank in excess}, groups)
            fits = max(latest.peaks) <= self.limit
            if not fits and share == 1.0 or fits and (not self._tight(latest) or latest.us > min(fitting, default=math.inf)):
                return

    def _cut_more(self, tried: dict[LoopGathers, CutResult], needed: Mapping[int, float],
                  groups: Mapping[int, Sequence[ParameterGroup]]) -> CutResult:
        """Cut with repetitions of at least so many bytes on these ranks."""
        chosen = [group for rank, nbytes in needed.items() for group in self._cheapest(groups.get(rank, ()), nbytes)]
        repeats = with_groups(self.choice.pinned, chosen)
        if repeats not in tried:
            tried[repeats] = self.cut(repeats)
        return tried[repeats]

    def _tight(self, found: CutResult) -> list[int]:
        """Ranks that exceed the limit, or recompute or offload something."""
        return [rank for rank, (peak, again) in enumerate(zip(found.peaks, found.computes_again, strict=True))
                if peak > self.limit or again]

    def _groups(self, found: CutResult) -> dict[int, list[ParameterGroup]]:
        """The groups of each rank: its part of those with a choice. A traced layer stands for layers of all ranks, which repeat
        the same collectives then."""
        of_ranks: dict[int, list[ParameterGroup]] = {}
        for group in self.choice.groups:
            total = len(group.names) if found.copies is None else sum(found.copies[name] for name in group.names)
            for rank, own in enumerate(found.owned):
                names = tuple(name for name in group.names if own.get(name))
                if names:
                    part = sum(own[name] for name in names) / total
                    of_ranks.setdefault(rank, []).append(replace(
                        group, names=names if found.copies is None else group.names, us=part * group.us,
                        nbytes=part * group.nbytes))
        return of_ranks

    def _cheapest(self, groups: Sequence[ParameterGroup], nbytes: float) -> list[ParameterGroup]:
        """Groups with at least so many bytes that take the least time."""
        entities = tuple(Entity(f"{k}", "parameters", 1, (
            Choice(0.0, (group.nbytes,), (), ()), Choice(group.us, (0.0,), (), ()))) for k, group in enumerate(groups))
        if nbytes <= 0 or not entities:
            return []
        limit = max(sum(group.nbytes for group in groups) - nbytes, 0.0)
        chosen = solve(Problem(entities, (), limit, ("step",)), replace(solver_options(self.choice.options), gap=0.0)).chosen
        return [group for group, repeated in zip(groups, chosen, strict=True) if repeated == 1]
