"""Pass: assign every call of a joint graph to a pipeline stage; see `passes.pipeline.stage_assignment`.

Every call gets a position in the chain of blocks (`passes.pipeline.block_chain`), which is cut where stages take about
equal time and few bytes cross. The position is:

    forward     its own block's; for calls on parameters alone, its first reader's
        backward    that of the forward call with its `seq_nr`, but not after its backward operands
        held back   the latest of its readers' and its operands': forward values that are redistributed for backward alone
        sums        the earliest of the summands, so that one gradient goes on from there, however many blocks read the value

A collective and its wait have the same position. So no forward value goes to an earlier stage and no gradient to a later one;
a graph that violates this is rejected. Cuts are between repeated blocks or the modules between them; where there are fewer of
these than stages, between any two modules.
"""
from __future__ import annotations

import operator
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import fx

from passes.analyses.flops import FLOPS
from passes.analyses.shapes import SHAPES
from passes.annotations import read, write
from passes.base import AnalysisPass
from passes.cost_model.roofline import RooflineCost
from passes.errors import BadInput, HpmlError
from passes.graph.fx_nodes import is_collective, returned_nodes
from passes.graph.graph_signature import GraphSignature
from passes.graph.module_blocks import block_of, is_backward, runs_in_backward
from passes.graph.planning_keys import GRAPH_SIGNATURE
from passes.graph.step_phase import BACKWARD, FORWARD, Phase
from passes.hardware.cluster import Cluster
from passes.hardware.device import Device
from passes.hardware.mesh import Mesh
from passes.json_records import FrozenMap
from passes.op_rules.rule_table import operator_of
from passes.pipeline.block_chain import BlockChain
from passes.pipeline.block_places import places
from passes.pipeline.find_blocks import BLOCK_CHAIN, learned_nodes
from passes.pipeline.stage_assignment import STAGES, SentValue, StageAssignment, StageUnits
from passes.pipeline.stage_moves import cut_units
from passes.registry import register


class TooFewBlocks(BadInput):
    """The graph cannot be cut into so many stages."""


@register
@dataclass(frozen=True)
class FindStages(AnalysisPass):
    """Writes STAGES. count: number of stages; device: whose time is balanced. starts: in place of balancing, the name of the
    block that each stage but the first begins with. ranks: of the stages, where some have several. speeds: of the ranks, where
    they are unequal."""

    name = "find_stages"
    requires = (SHAPES, FLOPS, GRAPH_SIGNATURE, BLOCK_CHAIN)
    provides = (STAGES,)

    count: int = 1
    device: Device = field(default_factory=lambda: Cluster.local(1, "cpu").device)
    starts: tuple[str, ...] = ()
    ranks: tuple[int, ...] = ()
    speeds: tuple[float, ...] = ()

    def run(self, graph_module: fx.GraphModule) -> None:
        write(STAGES, graph_module, _StageBalance(
            graph_module, self.count, self.device, self.ranks, self.speeds).stages(self.starts))


class _StageBalance:
    def __init__(self, gm: fx.GraphModule, count: int, device: Device, ranks: tuple[int, ...],
                 speeds: tuple[float, ...]):
        self.gm, self.count, self.ranks, self.speeds = gm, count, ranks, speeds
        self.interface: GraphSignature = read(GRAPH_SIGNATURE, gm)
        self.chain: BlockChain = read(BLOCK_CHAIN, gm)
        if not self.chain.blocks:
            raise self._too_few(0)
        self.calls = [node for node in gm.graph.nodes if node.op == "call_function"]
        learned = learned_nodes(gm)
        self.copied = {node for node in self.calls if node not in learned}
        self.place = places(gm, self.chain, learned)
        cost = RooflineCost(device, Mesh((), device))
        self.us = {node: _us(node, cost) for node in self.calls if node not in self.copied}

    def stages(self, starts: Sequence[str] = ()) -> StageAssignment:
        units = self._units()
        ends = self._pinned(starts) if starts else self._cut(units)
        stage_of = [sum(end <= place for end in ends) for place in range(len(self.chain.blocks))]
        of = {node: stage_of[self.place[node]] for node in self.calls}
        sums, summed = self._sums(of)
        self.copied |= self._gathers_elsewhere(of)
        sent = self._sent(of, summed)
        time_us, forward_us = [0.0] * self.count, [0.0] * self.count
        for node, us in self.us.items():
            time_us[of[node]] += us
            forward_us[of[node]] += 0.0 if is_backward(node) else us
        blocks = [[block.name for block, s in zip(self.chain.blocks, stage_of) if s == stage] for stage in range(self.count)]
        return StageAssignment(
            self.count, FrozenMap({node.name: stage for node, stage in of.items()}),
            frozenset(node.name for node in self.copied), tuple(sent),
            FrozenMap({node.name: tuple(part.name for part in parts) for node, parts in sums.items()}),
            frozenset(node.name for node in summed), FrozenMap(self._readers(of, sums)),
            tuple(map(tuple, blocks)), tuple(time_us), tuple(forward_us), units)

    def _gathers_elsewhere(self, of: dict[fx.Node, int]) -> set[fx.Node]:
        """Gathers of parameters, with the calls that lead to them or view them, that other stages than their own read."""
        alone, gathered, found = set[fx.Node](), set[fx.Node](), set[fx.Node]()
        for node in self.calls:
            if all(x in alone or self.interface.kinds.get(x.name) == "parameter" for x in node.all_input_nodes) and (
                    node.all_input_nodes):
                alone.add(node)
                if is_collective(node.target) or not gathered.isdisjoint(node.all_input_nodes):
                    gathered.add(node)
        for node in reversed(self.calls):
            if any(user in found or node in gathered and user in of and of[user] != of[node] for user in node.users):
                found.add(node)
        return found

    def _too_few(self, parts: int) -> TooFewBlocks:
        return TooFewBlocks(f"the graph has {max(parts, 1)} consecutive parts that compute something, "
                            f"fewer than {self.count} stages", "options['mesh']['pp']", f"take at most {max(parts, 1)} stages")

    def _pinned(self, starts: Sequence[str]) -> list[int]:
        places = {block.name: place for place, block in enumerate(self.chain.blocks)}
        ends = [places.get(name, -1) for name in starts]
        if len(ends) != self.count - 1 or any(after <= before for before, after in zip([0, *ends], ends)):
            raise BadInput(f"{self.count} stages that begin with {', '.join(starts)}: the blocks are, in order, "
                           f"{', '.join(places)}", "stages", "name one for each stage but the first, in their order")
        return [*ends, len(self.chain.blocks)]

    def _cut(self, units: StageUnits) -> list[int]:
        """Index of the first block after each stage."""
        found = cut_units(units, self.count, self.ranks, self.speeds)
        if found is None:
            raise self._too_few(sum(us > 0 for us in units.times_us))
        return found

    def _units(self) -> StageUnits:
        """Runs of blocks between which a stage may end."""
        blocks = self.chain.blocks
        time = [0.0] * len(blocks)
        for node, us in self.us.items():
            time[self.place[node]] += us
        crossing = [cut.bytes for cut in self.chain.cuts]
        repeated = {block_of(node) for node in self.calls if not runs_in_backward(node)} - {""}
        among = [block.path in repeated for block in blocks]
        if sum(among) >= self.count:
            units = [k for k in range(1, len(blocks)) if among[k - 1] or among[k]] + [len(blocks)]
        else:
            units = list(range(1, len(blocks) + 1))
        return StageUnits(tuple(units), tuple(sum(time[start:stop]) for start, stop in zip([0, *units], units)),
                          tuple(crossing[unit - 1] for unit in units[:-1]))

    def _sums(self, of: dict[fx.Node, int]) -> tuple[dict[fx.Node, list[fx.Node]], set[fx.Node]]:
        """Gradients of inputs that are sums over stages, with their parts; and the calls that add these."""
        sums: dict[fx.Node, list[fx.Node]] = {}
        summed: set[fx.Node] = set()
        for gradient in returned_nodes(self.gm)[self.interface.forward_outputs:]:
            if gradient is None or gradient in sums:
                continue
            parts, adding = _parts(gradient, of)
            if adding and len({of[part] for part in parts}) == len(parts):
                sums[gradient] = parts
                summed.update(adding)
        return sums, summed

    def _sent(self, of: dict[fx.Node, int], summed: set[fx.Node]) -> list[SentValue]:
        found = []
        for node in self.calls:
            if node in self.copied or node in summed:
                continue
            readers: dict[Phase, set[int]] = defaultdict(set)
            for user in node.users:
                if user.op == "output" or user in summed or of[user] == of[node]:
                    continue
                phase = FORWARD if of[user] > of[node] else BACKWARD
                if runs_in_backward(node) and phase == FORWARD or not runs_in_backward(user) and phase == BACKWARD:
                    raise HpmlError(
                        f"a pipeline of {self.count} stages would have to send a value against its order: {node.name}, made "
                        f"in stage {of[node]}, is read by {user.name} in stage {of[user]}", node.name,
                        "give another number of stages, or none")
                readers[phase].add(of[user])
            for phase, stages in readers.items():
                if not isinstance(node.meta.get("val"), torch.Tensor):
                    raise HpmlError(f"{node.name} is not a tensor and cannot be sent from stage {of[node]}", node.name,
                                    "give another number of stages, or none")
                found.append(SentValue(node.name, of[node], tuple(sorted(stages)), phase,
                                       float(sum(spec.bytes for spec in read(SHAPES, node)))))
        return found

    def _readers(self, of: dict[fx.Node, int], sums: dict[fx.Node, list[fx.Node]]) -> dict[str, tuple[int, ...]]:
        """Stages that read each parameter. First comes the stage where its gradient is accumulated, else its first reader."""
        gradients = {owner: name for name, owner in self.interface.outputs if owner is not None}
        by_name = {node.name: node for node in self.calls}
        found = {}
        for node in self.gm.graph.find_nodes(op="placeholder"):
            if self.interface.kinds.get(node.name) != "parameter":
                continue
            stages = self._stages_reading(node, of)
            gradient = by_name.get(gradients.get(node.name, ""))
            if gradient is not None:
                stages.update(of[part] for part in sums.get(gradient, [gradient]))
            first = of[gradient] if gradient is not None else min(stages, default=0)
            found[node.name] = (first, *sorted(stages - {first}))
        return found

    def _stages_reading(self, node: fx.Node, of: dict[fx.Node, int]) -> set[int]:
        """Stages that read a parameter, also through calls that each of them runs."""
        return {stage for user in node.users if user.op != "output"
                for stage in (self._stages_reading(user, of) if user in self.copied else (of[user],))}


def _parts(gradient: fx.Node, of: dict[fx.Node, int]) -> tuple[list[fx.Node], list[fx.Node]]:
    """Summands of a sum over stages, in the order of addition, and the adding calls. A sum of two numbers does not depend
    on the order; of three, the two that the graph adds first are added first here, too."""
    parts, adding = list[fx.Node](), list[fx.Node]()
    node: fx.Node | None = gradient
    while node is not None and _adds_over_stages(node, of):
        left, right = node.all_input_nodes
        further = next((x for x in (left, right) if len(x.users) == 1 and _adds_over_stages(x, of)), None)
        adding.append(node)
        parts += [left, right] if further is None else [right if further is left else left]
        node = further
    return parts[-2:] + parts[-3::-1], adding


def _adds_over_stages(node: fx.Node, of: dict[fx.Node, int]) -> bool:
    inputs = node.all_input_nodes
    if node.target is not torch.ops.aten.add.Tensor or node.kwargs or len(node.users) != 1 or len(inputs) != 2:
        return False
    if not all(x in of and is_backward(x) for x in inputs) or of[inputs[0]] == of[inputs[1]]:
        return False
    return len({(tuple(x.meta["val"].shape), x.meta["val"].dtype) for x in (node, *inputs)}) == 1


def _us(node: fx.Node, cost: RooflineCost) -> float:
    specs = [spec for each in (node, *node.all_input_nodes) for spec in read(SHAPES, each)]
    if node.target is operator.getitem or not read(SHAPES, node):
        return 0.0
    dtype = str(read(SHAPES, node)[0].dtype).removeprefix("torch.")
    return cost.compute_us(read(FLOPS, node), float(sum(spec.bytes for spec in specs)), dtype, operator_of(node.target).kind)
