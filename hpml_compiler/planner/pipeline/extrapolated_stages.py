"""Assign the layers of a deep model to stages where its plan lists one layer for many.

The plan's layers are unrolled as in a simulation (`passes.simulation.layer_unrolling`), and cut where stages take about the
same time. Values that go from one layer to the next are sent at each stage boundary.
"""
from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence

from hpml_compiler.planner.graph.few_layer_trace import FewLayerTrace
from hpml_compiler.planner.pipeline.layer_costs import LayerCosts, LayerPosition
from hpml_compiler.planner.pipeline.pipeline_estimate import StagePart
from hpml_compiler.plans.schema import ROOT, GraphPlan
from passes.graph.placement_graph import block_class
from passes.graph.step_phase import BACKWARD, FORWARD
from passes.pipeline.find_stages import TooFewBlocks
from passes.pipeline.pipeline_schedule import PipelineSchedule
from passes.simulation.layer_unrolling import CallInstance, Group, unroll_layers
from passes.simulation.step_graph import StepGraph
from passes.solver.balanced_partition import equal_cut


def lists_in_order(record: GraphPlan, folded: FewLayerTrace) -> tuple[str, ...]:
    """Paths of the lists of layers, in the order of forward."""
    blocks = [operation.block for operation in record.operations.values()]
    first = {path: k for k, block in reversed([*enumerate(blocks)]) for path in folded.lists if block.startswith(f"{path}.")}
    return tuple(sorted(first, key=first.__getitem__))


def extrapolated_parts(record: GraphPlan, step: StepGraph, lists: Sequence[str], cut: LayerCosts,
                       table: PipelineSchedule) -> list[StagePart]:
    """The stages of `record`, which lists a few layers for a deeper model. step: of one microbatch. Raises TooFewBlocks."""
    units = _Units(step, lists)
    ends = equal_cut(units.times_us, [0.0] * (len(units.times_us) - 1), table.stages)
    if ends is None:
        raise TooFewBlocks(f"the graph has fewer than {table.stages} consecutive parts that compute something",
                           "options['mesh']['pp']", f"take at most {len(units.times_us)} stages")
    stage_of = [sum(end <= unit for end in ends) for unit in range(len(units.times_us))]
    counts = [Counter[str]() for _ in range(table.stages)]
    for each, unit in units.placed:
        counts[stage_of[unit]][each.call.name] += 1
    reads = _reads(record, units, stage_of, table.stages)
    parts = []
    for k in range(table.stages):
        own = [unit for unit, stage in enumerate(stage_of) if stage == k]
        first, last = units.places[own[0]], units.places[own[-1]]
        on = cut.over(last, units.places[own[-1] + 1], FORWARD) if _sends(table, k, k + 1) else ()
        back = cut.over(units.places[own[0] - 1], first, BACKWARD) if _sends(table, k, k - 1) else ()
        # The first stage sends nothing back, so all of its backward may run later.
        share = cut.weight_share(first) if k or not table.splits_backward else 1.0
        parts.append(StagePart(
            tuple(name for unit in own for name in units.blocks[unit]), counts[k], reads[k],
            sum(cut.saved_bytes(units.places[unit]) for unit in own), (*on, *back), share))
    return parts


def _sends(table: PipelineSchedule, stage: int, other: int) -> bool:
    return 0 <= other < table.stages and table.ranks[stage] != table.ranks[other]


class _Units:
    """Runs of calls that stay in one stage, in the order of forward: each layer, and the calls before, between and after them.

    placed: every instance of a call, with its unit. times_us, blocks, places: of each unit. lists: block class of the layers
    -> path of their list, in order."""

    def __init__(self, step: StepGraph, lists: Sequence[str]):
        phases = unroll_layers(step)
        self.lists = {block_class(f"{path}.0"): path for path in lists}
        self.of_layer: dict[Group, int] = {}
        self.blocks: list[list[str]] = []
        self.places: list[LayerPosition] = []
        self.placed: list[tuple[CallInstance, int]] = []
        of_block: dict[str, set[int]] = defaultdict(set)
        for each, unit in zip(phases[FORWARD], self._of_forward(phases[FORWARD])):
            self.placed.append((each, unit))
            if not self._in_layer(each):
                of_block[each.call.block].add(unit)
        self.placed += zip(phases[BACKWARD], self._of_backward(phases[BACKWARD], of_block))
        self.times_us = [0.0] * len(self.blocks)
        for each, unit in self.placed:
            self.times_us[unit] += each.call.us if each.call.when == "loop" else 0.0
        self.of_call: dict[str, list[int]] = defaultdict(list)
        for each, unit in self.placed:
            self.of_call[each.call.name].append(unit)

    def _in_layer(self, each: CallInstance) -> bool:
        return each.group[0] in self.lists

    def _of_forward(self, instances: Sequence[CallInstance]) -> Iterator[int]:
        last = {each.group: k for k, each in enumerate(instances)}
        current: Group | None = None
        for k, each in enumerate(instances):
            inside = self._in_layer(each)
            if inside and each.group not in self.of_layer:
                kind = list(self.lists).index(each.group[0])
                self.of_layer[each.group] = len(self.blocks)
                self.blocks.append([f"{self.lists[each.group[0]]}.{each.layer}"])
                self.places.append(LayerPosition(kind, each.layer))
                current = each.group
            elif not inside and (current is None or last[current] < k):
                if not self.blocks or current is not None:
                    self.places.append(LayerPosition(0 if not self.places else self.places[-1].list + 1))
                    self.blocks.append([])
                current = None
                name = "" if each.call.block == ROOT else each.call.block
                if name not in self.blocks[-1]:
                    self.blocks[-1].append(name)
            yield self.of_layer[each.group] if inside else len(self.blocks) - 1

    def _of_backward(self, instances: Sequence[CallInstance], of_block: Mapping[str, set[int]]) -> Iterator[int]:
        """Calls outside of layers are in the unit of their block in forward; where that has several, in backward's place."""
        last = max((k for k, each in enumerate(instances) if self._in_layer(each)), default=-1)
        now = len(self.blocks) - 1
        for k, each in enumerate(instances):
            if self._in_layer(each) and each.group in self.of_layer:
                now = self.of_layer[each.group]
                yield now
                continue
            if k > last:
                now = 0
            known = of_block.get(each.call.block, ())
            yield next(iter(known)) if len(known) == 1 else now


def _reads(record: GraphPlan, units: _Units, stage_of: Sequence[int], stages: int) -> list[dict[str, bool]]:
    """Parameters of each stage; True for the first stage that reads one: there, its gradient is summed."""
    readers: dict[str, set[int]] = defaultdict(set)
    for name, operation in record.operations.items():
        for source in operation.sources:
            if source in record.parameters:
                readers[source].update(stage_of[unit] for unit in units.of_call[name])
    found: list[dict[str, bool]] = [{} for _ in range(stages)]
    for name in record.parameters:
        for k, stage in enumerate(sorted(_layer_of(name, units, stage_of) or readers[name] or {0})):
            found[stage][name] = k == 0
    return found


def _layer_of(name: str, units: _Units, stage_of: Sequence[int]) -> set[int]:
    for kind, path in units.lists.items():
        number, _, _ = name.removeprefix(f"{path}.").partition(".")
        if name.startswith(f"{path}.") and (kind, int(number)) in units.of_layer:
            return {stage_of[units.of_layer[kind, int(number)]]}
    return set()
