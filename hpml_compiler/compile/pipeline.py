"""What a rank runs of a graph that goes through the stages of a pipeline: some of the stages, and what is around their loop."""
from __future__ import annotations

import hashlib
import logging
from collections.abc import Container, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch.fx import GraphModule

from hpml_compiler.compile import session
from hpml_compiler.compile.agreement import from_rank_0, same_graph, when_all_can
from hpml_compiler.compile.local import local_cluster
from hpml_compiler.compile.microbatched import MakesWhole, Microbatched
from hpml_compiler.compile.owners import Needs
from hpml_compiler.compile.stages import LoweredStage
from hpml_compiler.options import Options
from hpml_compiler.planning.stage_axes import STAGES_AXIS, schedule_of
from hpml_compiler.planning.staged_body import StagedBody, stage_body, structure_of
from hpml_compiler.runtime.devices import device_type
from hpml_compiler.runtime.messages import Messages
from hpml_compiler.runtime.pipelined import Pipelined, of_loop
from hpml_compiler.runtime.stages import StageCalls
from hpml_compiler.runtime.stand_in import collectives_of
from hpml_compiler.runtime.world import control_group, from_all_ranks
from passes import compat
from passes.graph.interface import Interface

log = logging.getLogger("hpml")


class Pipeline(Microbatched):
    """Microbatches of which this rank runs some stages. interface: of the marked graph. starts: the block that each stage but
    the first begins with; else it is cut where stages take about the same time."""

    def __init__(self, options: Options, marked: GraphModule, microbatches: int, forward_outputs: int, interface: Interface,
                 written: Container[int] = (), whole: MakesWhole | None = None, starts: tuple[str, ...] = ()):
        self.interface, self.starts = interface, starts
        super().__init__(options, marked, microbatches, forward_outputs, written, whole)

    def cut_body(self) -> None:
        options = self.options
        self.mesh = session.current().device_mesh(options.mesh or {})
        self.place = self.mesh.get_local_rank(STAGES_AXIS)
        self.table = schedule_of(options, self.microbatches)
        text = structure_of(self.loop.body)
        same_graph(hashlib.sha256(text.encode()).hexdigest(), lambda: text)
        self.staged = self.cut_in_stages()
        times = self.staged.stages.time_us  # of one microbatch
        self.stages = when_all_can("cut its stages in two", lambda: [
            LoweredStage(graph, options, self.table.splits_backward, times[graph.index]) for graph in self.staged.graphs
            if self.table.ranks[graph.index] == self.place])
        self.needs = Needs(self.marked, self.loop, self.staged, self.table, self.interface)
        if dist.get_rank() == 0:
            log.info("%d stages under %s with %d microbatches: %s", self.table.stages, self.table.name, self.microbatches,
                     "; ".join(", ".join(blocks) for blocks in self.staged.stages.blocks))

    def cut_in_stages(self) -> StagedBody:
        """All ranks call this together."""
        device = local_cluster(self.options, dist.get_world_size()).device
        return stage_body(self.marked, self.interface.kinds, self.loop, self.table.stages, device, from_rank_0, self.starts)

    def give_to(self, owners: Mapping[str, int]) -> None:
        """owners: of parameters that one rank has alone, by the names of their placeholders. Those that its stages do not need
        alone are lent to all ranks for the step."""
        needed_alone = self.needs.owners(owners)
        own = {name: rank for name, rank in owners.items() if needed_alone.get(name) == rank}
        self.loop = self.needs.around(self.place, own)
        self.alone = self.needs.gradients_alone(own)
        values = {node.name: node.meta.get("val") for node in self.marked.graph.nodes}
        self.lent = {name: (rank, values[name]) for name, rank in owners.items() if name not in own}
        self.elsewhere = {name: values[name] for name in self.needs.gradients_elsewhere(self.place, owners)}

    def saved_in_loop(self) -> list[Any]:
        return [fake for stage in self.stages for _ in range(self.microbatches) for fake in stage.saved.values()]

    def schedule(self) -> Pipelined:
        stages = when_all_can("compile its stages", self._compiled)
        self._share_reports()
        group = self.mesh.get_group(STAGES_AXIS)
        messages = Messages(dist.get_process_group_ranks(group), torch.device(device_type()), group,
                            control_group() if self.mesh.ndim > 1 else None)
        before = tuple(collectives_of(segment.gm) for segment in self.loop.before)  # before they are compiled
        return Pipelined(self.loop, self.calls(of_loop, None, ()), self.table, self.place, stages, messages,
                         self.staged.reads, self.staged.outputs, self.staged.gradients, self.alone, self.elsewhere,
                         self.lent, before)

    def _compiled(self) -> dict[int, StageCalls]:
        """The stages of this rank, with their kernels: one that cannot be compiled is told to the other ranks, too."""
        with self.lowering.waiting_once(self.loop.body):
            return {stage.graph.index: stage.calls() for stage in self.stages}

    def _share_reports(self) -> None:
        """All ranks say the same of all stages."""
        with compat.outside_tracing():
            found = from_all_ranks({stage.graph.index: stage.reports for stage in self.stages})
        for _, reports in sorted((pair for own in found for pair in own.items()), key=lambda pair: pair[0]):
            self.reports.update(reports)
