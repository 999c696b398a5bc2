"""What running a graph takes, once it is planned, rewritten and compiled: nothing that is there only until then."""
from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist

from hpml_compiler.compile.left_outputs import LeftTangent
from hpml_compiler.planning import room
from hpml_compiler.planning.plan_graph import Planned
from hpml_compiler.plans.schema import GraphPlan, MeshAttempt
from hpml_compiler.runtime.gathered import Held
from hpml_compiler.runtime.outputs import LeftOutput
from passes import compat
from passes.graph.annotated import Annotated
from passes.graph.decision import Decision
from passes.graph.layouts import StoredLayout, stored_layout
from passes.transform.take_outside import Taken

log = logging.getLogger("hpml")


@dataclass(frozen=True)
class Rewritten:
    """What running a rewritten graph takes besides its two halves.

    placements: of the parameters that it places, by position. held: what it takes gathered, by placeholder. draws: whether it
    draws random numbers. taken: what the halves take of arguments, by position. unruled: calls that were left whole since
    nobody said how to split them. structure: by which later graphs find its decisions (`planning.reuse`), on rank 0. budgeted:
    under a budget, what later graphs of the step find held by it, if it has a backward.
    """

    record: GraphPlan
    training: bool
    placements: dict[int, StoredLayout]
    held: dict[str, Held]
    left: tuple[LeftOutput, ...]
    tangents: tuple[LeftTangent, ...]
    draws: bool
    gathered: frozenset[int]
    written: frozenset[int]
    taken: Mapping[int, Taken]
    cluster: str
    rejected: tuple[MeshAttempt, ...]
    unruled: Mapping[str, tuple[str, ...]]
    structure: str
    budgeted: room.Held | None = None

    def without_fakes(self) -> Rewritten:
        """With what tensors are like as meta tensors, which belong to no trace."""
        with compat.outside_tracing():
            return replace(self, left=tuple(replace(each, like=_meta(each.like)) for each in self.left),
                           tangents=tuple(replace(each, part=_meta(each.part)) for each in self.tangents))

    def plan(self) -> list[str]:
        """What is the same on all ranks that obey one plan."""
        return [self.record.model_dump_json(exclude={"seconds", "frame", "blocks"})]


def held_by(annotated: Annotated, decision: Decision) -> dict[str, Held]:
    """What a graph takes gathered, by placeholder."""
    positions, values = annotated.interface.positions, annotated.graph.values
    named = {values[v].name: route for v, route in decision.held.items()}
    return {name: Held.along(route, positions[name]) for name, route in named.items()}


def placements_of(annotated: Annotated, decision: Decision) -> dict[int, StoredLayout]:
    """Layout of every parameter that gets placed now, by position."""
    values, interface = annotated.graph.values, annotated.interface
    if not interface.training:
        return {}
    return {interface.positions[values[v].name]: stored_layout(values[v], decision.stored(v)) for v in decision.inputs
            if values[v].kind == "parameter" and values[v].name not in interface.stored}


def say_plan(planned: Planned, unruled: Mapping[str, Sequence[str]]) -> None:
    if dist.get_rank() == 0:
        record = planned.record
        log.info("%s: mesh %s, predicted step %.3f ms, planned in %.2f s", record.name, planned.mesh,
                 record.predicted.step_time_us / 1e3, sum(record.seconds.values()))
        say_what_is_whole(unruled)


def say_what_is_whole(unruled: Mapping[str, Sequence[str]]) -> None:
    for target, nodes in unruled.items():
        log.warning("no rule for %s: left whole at %s", target, ", ".join(nodes[:3]))


def _meta(like: torch.Tensor) -> torch.Tensor:
    return torch.empty_strided(like.shape, like.stride(), dtype=like.dtype, device="meta")
