"""Assign the layers of a deep model to stages where its plan lists one layer for many.

The plan's layers are unrolled as in a simulation (`passes.simulation.layer_unrolling`), and cut where stages take about the
same time. Values that go from one layer to the next are sent at each stage boundary.
"""
from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence

from hpml_compiler.planner.graph.few_layer_trace import FewLayerTrace
from hpml_compiler.planner.pipeline.layer_costs import LayerCosts, LayerPosition, ModelSection
from hpml_compiler.planner.pipeline.layer_memory import LayerMemory
from hpml_compiler.planner.pipeline.pipeline_estimate import StagePart
from hpml_compiler.planner.pipeline.stage_memory import sends_on
from hpml_compiler.plans.checkpointing_records import CheckpointingPlan
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


class ExtrapolatedStages:
    """The stages of `record`, which lists a few layers for a deeper model. step: of one microbatch. lists: paths of the lists
    of layers. table: the schedule. speeds: of its ranks. reads: parameters of each stage. Raises TooFewBlocks."""

    def __init__(self, record: GraphPlan, step: StepGraph, lists: Sequence[str], table: PipelineSchedule,
                 speeds: Sequence[float] = ()):
        self.units, self.lists, self.table = (units := _Units(step, lists)), lists, table
        ends = equal_cut(units.times_us, [0.0] * (len(units.times_us) - 1), table.stages, table.ranks, speeds)
        if ends is None:
            parts = len(units.times_us)
            raise TooFewBlocks(f"the graph has {parts} consecutive parts that compute something, fewer than "
                               f"{table.stages} stages", "options['mesh']['pp']", f"take at most {parts} stages")
        self.stage_of = [sum(end <= unit for end in ends) for unit in range(len(units.times_us))]
        self.reads = _reads(record, units, self.stage_of, table.stages)

    def sections(self) -> list[ModelSection]:
        """Lists of layers, and the calls around them."""
        places, found = self.units.places, list[ModelSection]()
        for unit, (place, stage, later) in enumerate(zip(places, self.stage_of, [*self.stage_of[1:], self.stage_of[-1]])):
            here = ModelSection(place.list, None if place.layer is not None else self.units.blocks[unit][0], later != stage)
            if found and here[:2] == found[-1][:2]:
                found.pop()
            found.append(here)
        return found

    def reads_of(self, rank: int) -> set[str]:
        """Parameters of a rank."""
        return {name for own, names in zip(self.table.ranks, self.reads) if own == rank for name in names}

    def places(self, stage: int) -> list[LayerPosition]:
        return [place for place, its in zip(self.units.places, self.stage_of) if its == stage]

    def parts(self, costs: LayerCosts, memory: LayerMemory, kept: Mapping[int, CheckpointingPlan]) -> list[StagePart]:
        """kept: see `StagePlan`."""
        table, units = self.table, self.units
        counts = [Counter[str]() for _ in range(table.stages)]
        for each, unit in units.placed:
            counts[self.stage_of[unit]][each.call.name] += 1
        found = []
        for k in range(table.stages):
            own = [unit for unit, stage in enumerate(self.stage_of) if stage == k]
            first, last = units.places[own[0]], units.places[own[-1]]
            on = costs.over(last, units.places[own[-1] + 1], FORWARD) if sends_on(table, k) else ()
            back = costs.over(units.places[own[0] - 1], first, BACKWARD) if k and sends_on(table, k - 1) else ()
            # The first stage sends nothing back, so all of its backward may run later.
            share = costs.weight_share(first) if k or not table.splits_backward else 1.0
            blocks = tuple(name for unit in own for name in units.blocks[unit])
            in_flight = memory.in_flight(k)
            found.append(StagePart(blocks, counts[k], self.reads[k], kept[k].saved_bytes // in_flight, (*on, *back), in_flight,
                                   kept[k], share))
        return found


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
