"""What a plan says of its stages, as what a schedule is played with."""
from __future__ import annotations

from hpml_compiler.plans.in_time import PipelinePlan
from passes.schedule.pipeline import Stage


def stages_of(pipe: PipelinePlan, held_bytes: float = 0.0, optimizer_us: float = 0.0) -> list[Stage]:
    """held_bytes, optimizer_us: of a rank, whatever stages it has; they go with its first one."""
    first = {stage.rank: k for k, stage in reversed(list(enumerate(pipe.stages)))}
    return [Stage(stage.forward_us, stage.backward_us, stage.send_us, stage.return_us, activation_bytes=stage.saved_bytes,
                  held_bytes=held_bytes if first[stage.rank] == k else 0.0,
                  optimizer_us=optimizer_us if first[stage.rank] == k else 0.0)
            for k, stage in enumerate(pipe.stages)]
