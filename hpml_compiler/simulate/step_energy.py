"""Energy of a step from its kernels and collectives, besides what devices draw while they are idle."""
from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from hpml_compiler.plans.pipeline_records import PipelinePlan
from passes.cost_model.energy_model import Power, link_j
from passes.hardware.mesh import Mesh
from passes.pipeline.pipeline_timeline import TimedStage
from passes.simulation.rank_program import OPTIMIZER, ProgramEntry
from passes.simulation.step_graph import StepCall, TransferHop


@dataclass(frozen=True)
class Activity:
    """Work of one rank. us: by kind of kernel, "" for communication. link_j: joules on the links."""

    us: Mapping[str, float] = field(default_factory=dict)
    link_j: float = 0.0

    @staticmethod
    def of_entries(entries: Iterable[ProgramEntry]) -> Activity:
        """Activity of tasks, without the optimizer's."""
        own = [each for each in entries if each.kind != OPTIMIZER]
        return _added(((each.kernel, each.us) for each in own), sum(each.link_j for each in own))

    @staticmethod
    def of_runs(calls: Iterable[tuple[float, StepCall]], hops: Iterable[tuple[float, TransferHop]]) -> Activity:
        """Activity of calls and collectives, each with its number of runs."""
        hops = [*hops]
        return _added([*((call.kernel, runs * call.us) for runs, call in calls), *(("", runs * hop.us) for runs, hop in hops)],
                      sum(runs * hop.link_j for runs, hop in hops))

    def above_idle_uj(self, power: Power) -> float:
        """Energy in µJ besides that of an idle device."""
        return 1e6 * self.link_j + sum(us * (_watts(power, kernel) - power.idle_w) for kernel, us in self.us.items())

    def beside(self, other: Activity) -> Activity:
        return _added([*self.us.items(), *other.us.items()], self.link_j + other.link_j)

    def step_j(self, step_us: float, mesh: Mesh) -> float:
        """Joules of a step on all devices of the mesh, each of which does this."""
        power = Power.of(mesh.device)
        return mesh.size * 1e-6 * (power.idle_w * step_us + self.above_idle_uj(power))

    @property
    def computed(self) -> Activity:
        return Activity({kernel: us for kernel, us in self.us.items() if kernel})

    def mean_w(self, power: Power) -> float:
        """Mean power above idle, in W, with that of links."""
        total = sum(self.us.values())
        return self.above_idle_uj(power) / total if total else 0.0


def above_idle_j(pipe: PipelinePlan, loops: Sequence[Activity], onces: Sequence[Activity], stages: Sequence[TimedStage],
                 accumulate_us: float, mesh: Mesh, axis: str) -> float:
    """Joules of a step on all ranks and links besides those of idle devices. loops, onces: work of a rank of each stage for one
    microbatch, and once in a step. accumulate_us: to add the gradients of one microbatch on the rank with the most parameters.
    axis: of the mesh, along which stages send."""
    power, count, along = Power.of(mesh.device), pipe.microbatches, mesh.axis(axis)
    memory_w, moving_w = power.memory_w - power.idle_w, power.communication_w - power.idle_w
    held, found = [0.0] * pipe.ranks, 0.0
    for plan, stage in zip(pipe.stages, stages, strict=True):
        held[plan.rank] += stage.held_bytes
    for k, (plan, stage, loop, once) in enumerate(zip(pipe.stages, stages, loops, onces, strict=True)):
        back_us = stage.return_us if stage.return_us is not None else stages[k - 1].send_us if k else 0.0
        adding_us = accumulate_us * (count - 1) * (stage.held_bytes / max(held) if max(held) else 0.0)
        found += count * (loop.above_idle_uj(power) + (stage.send_us + back_us) * moving_w)
        found += once.above_idle_uj(power) + plan.again_us * loop.computed.mean_w(power)
        found += (stage.optimizer_us + adding_us) * memory_w
        found += 1e6 * count * sum(link_j("send_recv", along, each.bytes) for each in plan.sends)
    return found * 1e-6 * (mesh.size // pipe.ranks)


def _added(parts: Iterable[tuple[str, float]], link_j: float) -> Activity:
    found: dict[str, float] = {}
    for kernel, us in parts:
        found[kernel] = found.get(kernel, 0.0) + us
    return Activity(found, link_j)


def _watts(power: Power, kernel: str) -> float:
    return power.kernel_w(kernel) if kernel else power.communication_w
