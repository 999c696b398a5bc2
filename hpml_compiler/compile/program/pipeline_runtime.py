"""Runtime of one rank of a pipelined graph: compiles its stages and the graphs around their loop."""
from __future__ import annotations

import torch
import torch.distributed as dist

from hpml_compiler.compile.program.lowered_stages import CompiledStage
from hpml_compiler.compile.program.microbatch_autograd import MakesWhole, MicrobatchAutograd
from hpml_compiler.compile.program.pipeline_program import PipelineProgram
from hpml_compiler.options import Options
from hpml_compiler.planner.pipeline.pp_axis import PP_AXIS, schedule_of
from hpml_compiler.runtime.consistency.rank_sync import when_all_succeed
from hpml_compiler.runtime.process.compute_device import device_type
from hpml_compiler.runtime.process.world_group import control_group, from_all_ranks
from hpml_compiler.runtime.program.dummy_collectives import collectives_of
from hpml_compiler.runtime.program.p2p import P2P
from hpml_compiler.runtime.program.pipeline_step import PipelineLoop, of_loop
from hpml_compiler.runtime.program.stage_executor import StageCallables
from hpml_compiler.session import session
from passes import compat


class PipelineRuntime(MicrobatchAutograd):
    """A microbatched step of which this rank runs some stages."""

    def __init__(self, options: Options, cut: PipelineProgram, whole: MakesWhole | None = None, shares: bool = True):
        super().__init__(options, cut.parts, whole, shares)
        self.cut = cut
        self.mesh = session.current().device_mesh(options.mesh or {})
        self.place = self.mesh.get_local_rank(PP_AXIS)
        self.table = schedule_of(options, cut.parts.microbatches)
        self.stages = [CompiledStage(stage, options, shares) for stage in cut.stages]

    def schedule(self) -> PipelineLoop:
        cut, loop = self.cut, self.parts.loop
        stages = when_all_succeed("compile its stages", self._compiled)
        self._share_reports()
        group = self.mesh.get_group(PP_AXIS)
        messages = P2P(dist.get_process_group_ranks(group), torch.device(device_type()), group,
                       control_group() if self.mesh.ndim > 1 else None)
        before = tuple(collectives_of(segment.gm) for segment in loop.before)  # before they are compiled
        return PipelineLoop(loop, self.calls(of_loop, None, ()), self.table, self.place, stages, messages, cut.reads,
                            cut.outputs,
                            cut.gradients, cut.alone, cut.elsewhere, cut.lent, before)

    def _compiled(self) -> dict[int, StageCallables]:
        """The stages of this rank, compiled; an error in one is raised on all ranks."""
        with self.around.waiting_once(self.stages[0].stage.halves.forward.gm):
            return {each.stage.ends.index: each.calls() for each in self.stages}

    def _share_reports(self) -> None:
        """Gather the reports of all stages, so that they are the same on all ranks."""
        with compat.outside_tracing():
            found = from_all_ranks({each.stage.ends.index: each.reports for each in self.stages})
        for _, reports in sorted((pair for own in found for pair in own.items()), key=lambda pair: pair[0]):
            self.reports.update(reports)
