"""The plan of a graph that runs as the stages of a pipeline: made when somebody asks for it.

A rank holds the parameters that its stages read. Times of the stages, and what goes between them, are those that the cut was
made by; what a stage saves is what the partitioner saves of its graph.
"""
from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch.fx import GraphModule

from hpml_compiler.options import Options
from hpml_compiler.planning.in_microbatches import with_microbatches
from hpml_compiler.planning.microbatches import loss_alone, loss_of
from hpml_compiler.planning.plan_graph import plan_graph
from hpml_compiler.planning.staged_body import Halves, StagedBody, halves_of
from hpml_compiler.plans.in_time import PipelinePlan, SentPlan, StagePlan
from hpml_compiler.plans.schema import GraphPlan
from hpml_compiler.simulate.stages import stages_of
from passes import compat
from passes.analysis.flops import FLOPS
from passes.annotations import read
from passes.costs.prices import MeshPrices
from passes.graph.interface import GraphInput
from passes.graph.phase import BACKWARD, FORWARD
from passes.machine.cluster import Cluster
from passes.machine.mesh import mesh_from_pin
from passes.partition.in_time import InTime
from passes.presets import annotate
from passes.schedule.actions import Schedule
from passes.schedule.pipeline import play
from passes.transform.split_stages import StageGraph


class StagedPlan:
    """joint: as it was traced. times: where everything is on the axis of time, None where the whole batch is one microbatch.
    cluster: of all ranks."""

    def __init__(self, joint: GraphModule, inputs: Sequence[GraphInput], forward_outputs: int, options: Options,
                 cluster: Cluster, times: InTime | None):
        self.joint, self.inputs, self.forward_outputs = joint, inputs, forward_outputs
        self.options, self.cluster, self.times = options, cluster, times
        self.frame = compat.frame_being_compiled()

    def plan(self, name: str, marked: GraphModule, staged: StagedBody, table: Schedule) -> GraphPlan:
        count = 1 if self.times is None else self.times.microbatches
        joint = loss_alone(self.joint)
        annotated = annotate(joint, self.inputs, self.forward_outputs, count)
        options = self.options.model_copy(update={"mesh": None})
        alone = one_rank_of(self.cluster)
        planned = plan_graph(annotated, options, alone, name=name)
        record = planned.record
        if self.times is not None:
            record = with_microbatches(record, annotated.graph, self.times, loss_of(joint) is not None,
                                       mesh_from_pin(planned.mesh, alone), options.optimizer_states)
        read = _parameters(marked, staged, annotated.interface.names)
        held = [sum(_held(record, {name for k in own for name in read[k]})) for own in _stages_of_ranks(table)]
        mesh = mesh_from_pin({"dp": len(table.actions)}, self.cluster)  # for its links alone
        prices = MeshPrices(mesh, options.optimizer_states)
        stages = tuple(self._stage(k, record, staged, table, read, prices) for k in range(table.stages))
        pipe = PipelinePlan(schedule=table.name, ranks=len(table.actions), microbatches=table.microbatches, step_us=0.0,
                            bubble=0.0, stages=stages)
        played = play(table, stages_of(pipe))
        pipe = pipe.model_copy(update={"step_us": played.step_us, "bubble": played.bubble})
        most = max(range(len(held)), key=held.__getitem__)
        own = {name for k in _stages_of_ranks(table)[most] for name in read[k]}
        return _with_pipeline(record, pipe, _held(record, own)).model_copy(update={"frame": self.frame})

    def _stage(self, k: int, record: GraphPlan, staged: StagedBody, table: Schedule, read: Sequence[Mapping[str, bool]],
               prices: MeshPrices) -> StagePlan:
        stages = staged.stages
        on = stages.over(k, FORWARD) if k + 1 < table.stages and table.ranks[k + 1] != table.ranks[k] else ()
        back = stages.over(k - 1, BACKWARD) if k and table.ranks[k - 1] != table.ranks[k] else ()
        halves = halves_of(staged.graphs[k], self.options.compiler, table.splits_backward)
        saved, in_flight = _saved_bytes(staged, halves), table.in_flight()[k]
        backward_us = stages.time_us[k] - stages.forward_us[k]
        # What an earlier stage of its rank reads, too, is there once.
        held = {name for name in read[k] if not any(name in read[j] for j in range(k) if table.ranks[j] == table.ranks[k])}
        parameters = tuple(name for name, makes in read[k].items() if makes)
        return StagePlan(
            blocks=stages.blocks[k], rank=table.ranks[k], parameters=parameters,
            parameter_bytes=sum(record.parameters[name].bytes_whole for name in parameters),
            forward_us=stages.forward_us[k], backward_us=backward_us,
            weight_us=backward_us * _share_of_weights(staged.graphs[k], halves) if table.splits_backward else None,
            send_us=sum(prices.collective("send_recv", 0, each.bytes) for each in on),
            return_us=sum(prices.collective("send_recv", 0, each.bytes) for each in back),
            saved_bytes=saved, in_flight=in_flight,
            memory_bytes=sum(_held(record, held)) + saved * in_flight,
            sends=tuple(SentPlan(value=each.value, bytes=round(each.bytes), backward=each.phase == BACKWARD)
                        for each in (*on, *back)))


def one_rank_of(cluster: Cluster) -> Cluster:
    return Cluster((replace(cluster.groups[0], nodes=1, devices_per_node=1),))


def _stages_of_ranks(table: Schedule) -> list[list[int]]:
    return [[stage for stage, rank in enumerate(table.ranks) if rank == own] for own in range(len(table.actions))]


def _held(record: GraphPlan, names: Collection[str]) -> tuple[int, int, int]:
    """Bytes of these parameters, of their gradients and of their optimizer state: of all, in proportion."""
    memory, total = record.memory, sum(each.bytes_whole for each in record.parameters.values())
    share = sum(record.parameters[name].bytes_whole for name in names) / total if total else 0.0
    return round(memory.parameters * share), round(memory.gradients * share), round(memory.optimizer * share)


def _with_pipeline(record: GraphPlan, pipe: PipelinePlan, held: tuple[int, int, int]) -> GraphPlan:
    """held: see `_held`, of the rank that holds most."""
    compute = sum(stage.forward_us + stage.backward_us for stage in pipe.stages) * pipe.microbatches / pipe.ranks
    sent = sum(stage.send_us + stage.return_us for stage in pipe.stages) * pipe.microbatches / pipe.ranks
    of_rank = [[stage for stage in pipe.stages if stage.rank == rank] for rank in range(pipe.ranks)]
    activations = max(sum(stage.saved_bytes * stage.in_flight for stage in own) for own in of_rank)
    share = held[0] / record.memory.parameters if record.memory.parameters else 0.0
    optimizer_us = record.predicted.optimizer_us * share
    return record.model_copy(update={
        "mesh": {"pp": pipe.ranks}, "pipeline": pipe,
        "predicted": record.predicted.model_copy(update={
            "step_time_us": pipe.step_us + optimizer_us, "optimizer_us": optimizer_us, "compute_us": compute,
            "communication_us": sent, "overhead_us": 0.0, "energy_j": None, "energy_label": None}),
        "memory": record.memory.model_copy(update={
            "parameters": held[0], "gradients": held[1], "optimizer": held[2], "activations": activations,
            "peak": sum(held) + activations})})


def _saved_bytes(staged: StagedBody, halves: Halves) -> int:
    """Of one microbatch: what backward takes of forward, but for what was whole before the loop. If what its second part takes
    is more, that."""
    whole = {name for name, read in staged.reads.items() if read.rows is None}

    def held(values: Mapping[str, Any]) -> int:
        return sum(value.numel() * value.element_size() for name, value in values.items()
                   if name not in whole and hasattr(value, "element_size"))

    late = [] if halves.weight is None else halves.weight.gm.graph.find_nodes(op="placeholder")
    return max(held(halves.saved), held({node.name: node.meta["val"] for node in late}))


def _share_of_weights(graph: StageGraph, halves: Halves) -> float:
    """Of backward's work, by FLOPs, that of its second part."""
    if halves.backward is None or halves.weight is None:
        return float(halves.backward is None)
    flops = {node.name: read(FLOPS, node) for node in graph.gm.graph.nodes if FLOPS.selects(node)}
    first, second = (sum(flops.get(node.name, 0.0) for node in half.gm.graph.nodes)
                     for half in (halves.backward, halves.weight))
    return second / (first + second) if first + second else 0.5


def _parameters(marked: GraphModule, staged: StagedBody, names: Mapping[str, str]) -> list[dict[str, bool]]:
    """Of each stage, the parameters that it reads, also where something is made of them before the loop; whether it is the one
    that their gradients are made whole in."""
    made_of: dict[str, set[str]] = {}
    for node in marked.graph.nodes:
        made_of[node.name] = {names[node.name]} if node.name in names else {
            name for x in node.all_input_nodes for name in made_of[x.name]}
    found: list[dict[str, bool]] = [{} for _ in staged.graphs]
    seen: set[str] = set()
    for given, readers in staged.stages.parameters.items():
        for name in sorted(made_of.get(staged.reads[given].name, ())):
            for k, stage in enumerate(readers):
                found[stage][name] = found[stage].get(name, False) or (k == 0 and name not in seen)
            seen.add(name)
    return found
