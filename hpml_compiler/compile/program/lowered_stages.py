"""A pipeline stage on its rank: split into forward and backward, and compiled."""
from __future__ import annotations

from dataclasses import dataclass

from hpml_compiler.compile.lower.lowering import lowering_of_part
from hpml_compiler.options import Options
from hpml_compiler.plans.schema import BlocksReport
from hpml_compiler.runtime.program.dummy_collectives import collectives_of
from hpml_compiler.runtime.program.stage_executor import BoxedCall, StageCallables
from passes.transforms.pipeline.stage_io import StageHalves, StageIO


@dataclass(frozen=True)
class StageProgram:
    """A stage split into forward and backward. shared: places of gradients whose memory may still be read elsewhere. time_us:
    predicted time of the stage for one microbatch."""

    ends: StageIO
    halves: StageHalves
    shared: frozenset[int]
    time_us: float


class CompiledStage:
    """A stage that `calls` compiles. counted: see `StepProgram`."""

    def __init__(self, stage: StageProgram, options: Options, shares: bool = True, counted: bool = False):
        self.stage, self.lowering = stage, lowering_of_part(options.compiler, shares, options.compile_blocks)
        if counted:
            self.lowering.count_bytes()
        self.lowering.step_us = stage.time_us

    def calls(self) -> StageCallables:
        ends, forward = self.stage.ends, self.stage.halves.forward
        self.lowering.forward_outputs, self.lowering.of = ends.forward_outputs, f"stage {ends.index} "
        backwards = {"backward": self.stage.halves.backward, "weights": self.stage.halves.weight}
        halves = {name: half for name, half in backwards.items() if half is not None}
        # Before compiling, which changes the graphs.
        parts = {name: collectives_of(half.gm) for name, half in {"forward": forward, **halves}.items()}
        graphs = {name: half.gm for name, half in halves.items()}
        run, calls = self.lowering.part(forward.gm, graphs, ends.forward_outputs)
        lowered = {name: BoxedCall(calls[name], half.takes, half.returns, parts[name]) for name, half in halves.items()}
        return StageCallables(ends, BoxedCall(run, forward.takes, forward.returns, parts["forward"]), lowered.get("backward"),
                              lowered.get("weights"), tuple(self.stage.halves.saved), self.stage.shared)

    @property
    def reports(self) -> dict[str, BlocksReport]:
        """Reports of regional compilation, once `calls` has run."""
        return {f"stage {self.stage.ends.index} {half}": report for half, report in self.lowering.reports.items()}
