"""What a rank runs of a graph that goes through the stages of a pipeline: some of the stages, and what is around their loop."""
from __future__ import annotations

import torch
import torch.distributed as dist

from hpml_compiler.compile import session
from hpml_compiler.compile.agreement import when_all_can
from hpml_compiler.compile.cut_stages import CutInStages
from hpml_compiler.compile.microbatched import MakesWhole, Microbatched
from hpml_compiler.compile.stages import LoweredStage
from hpml_compiler.options import Options
from hpml_compiler.planning.stage_axes import STAGES_AXIS, schedule_of
from hpml_compiler.runtime.devices import device_type
from hpml_compiler.runtime.messages import Messages
from hpml_compiler.runtime.pipelined import Pipelined, of_loop
from hpml_compiler.runtime.stages import StageCalls
from hpml_compiler.runtime.stand_in import collectives_of
from hpml_compiler.runtime.world import control_group, from_all_ranks
from passes import compat


class Pipeline(Microbatched):
    """Microbatches of which this rank runs some stages."""

    def __init__(self, options: Options, cut: CutInStages, whole: MakesWhole | None = None, shares: bool = True):
        super().__init__(options, cut.parts, whole, shares)
        self.cut = cut
        self.mesh = session.current().device_mesh(options.mesh or {})
        self.place = self.mesh.get_local_rank(STAGES_AXIS)
        self.table = schedule_of(options, cut.parts.microbatches)
        self.stages = [LoweredStage(stage, options, shares) for stage in cut.stages]

    def schedule(self) -> Pipelined:
        cut, loop = self.cut, self.parts.loop
        stages = when_all_can("compile its stages", self._compiled)
        self._share_reports()
        group = self.mesh.get_group(STAGES_AXIS)
        messages = Messages(dist.get_process_group_ranks(group), torch.device(device_type()), group,
                            control_group() if self.mesh.ndim > 1 else None)
        before = tuple(collectives_of(segment.gm) for segment in loop.before)  # before they are compiled
        return Pipelined(loop, self.calls(of_loop, None, ()), self.table, self.place, stages, messages, cut.reads, cut.outputs,
                         cut.gradients, cut.alone, cut.elsewhere, cut.lent, before)

    def _compiled(self) -> dict[int, StageCalls]:
        """The stages of this rank, with their kernels: one that cannot be compiled is told to the other ranks, too."""
        with self.around.waiting_once(self.stages[0].stage.halves.forward.gm):
            return {each.stage.ends.index: each.calls() for each in self.stages}

    def _share_reports(self) -> None:
        """All ranks say the same of all stages."""
        with compat.outside_tracing():
            found = from_all_ranks({each.stage.ends.index: each.reports for each in self.stages})
        for _, reports in sorted((pair for own in found for pair in own.items()), key=lambda pair: pair[0]):
            self.reports.update(reports)
