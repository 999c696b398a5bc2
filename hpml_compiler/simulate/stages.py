"""What a plan says of its stages, as what a schedule is played with."""
from __future__ import annotations

from collections.abc import Mapping

from hpml_compiler.plans.in_time import PipelinePlan
from hpml_compiler.plans.schema import MemoryBytes
from passes.schedule.pipeline import Stage


def stages_of(pipe: PipelinePlan, optimizer_us: float = 0.0) -> list[Stage]:
    """optimizer_us: on the rank that holds most; on others it takes as much less as they hold less."""
    held = [stage.memory_bytes - stage.saved_bytes * stage.in_flight for stage in pipe.stages]
    most = max(sum(nbytes for stage, nbytes in zip(pipe.stages, held) if stage.rank == rank) for rank in range(pipe.ranks))
    return [Stage(stage.forward_us, stage.backward_us, stage.send_us, stage.return_us, activation_bytes=stage.saved_bytes,
                  held_bytes=nbytes, optimizer_us=optimizer_us * nbytes / most if most else 0.0, weight_us=stage.weight_us)
            for stage, nbytes in zip(pipe.stages, held)]


def held_by_part(held_bytes: float, memory: MemoryBytes) -> Mapping[str, float]:
    """What a rank holds all the time, as parameters, state of the optimizer and gradients: in proportion to those of the rank
    that holds most."""
    total = memory.parameters + memory.optimizer + memory.gradients
    parts = {"parameters": memory.parameters, "optimizer": memory.optimizer, "gradients": memory.gradients}
    return {part: held_bytes * nbytes / total for part, nbytes in parts.items()} if total else {}
