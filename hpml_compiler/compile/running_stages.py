"""What a script calls in the place of a graph that goes through stages, and what that takes besides what is compiled."""
from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.placement_types import Placement
from torch.fx import GraphModule

from hpml_compiler.compile.graph_inputs import GraphInputs
from hpml_compiler.monitor.stages import StagesWatch
from hpml_compiler.runtime.alike import own_values, same_values
from hpml_compiler.runtime.calls import forward_call
from hpml_compiler.runtime.compared import of_forward
from hpml_compiler.runtime.doing import Spot
from hpml_compiler.runtime.gathered import Held, Holding
from hpml_compiler.runtime.missing_gradients import without_missing
from hpml_compiler.runtime.owned import owner_of
from hpml_compiler.runtime.parameters import install
from passes.graph.stages import Stages


@dataclass(frozen=True)
class InStages:
    """What running a graph takes, once it is planned, cut and compiled: data, which is kept for the next launch.

    draws: whether it draws random numbers. placements: of the parameters that it places, by position. owned: parameters that
    one rank has alone in it, by their placeholders; None where there are no stages. own_here: positions of those that have the
    right owner already. held: what it takes gathered, by placeholder. stages: None where it has none, or no backward.
    """

    training: bool
    draws: bool
    placements: Mapping[int, tuple[Placement, ...]]
    owned: Mapping[str, int] | None
    own_here: frozenset[int]
    held: Mapping[str, Held]
    gathered: frozenset[int]
    written: frozenset[int]
    stages: Stages | None

    def plan(self) -> list[Any]:
        """What is the same on all ranks that obey one plan."""
        return [self.training, self.placements, self.owned, self.stages and (self.stages.blocks, self.stages.time_us)]


def running_in_stages(name: str, function: Callable[..., Any], gm: GraphModule, given: Sequence[Any], inputs: GraphInputs,
                      takes: InStages, devices: DeviceMesh, holding: Holding, watched: StagesWatch | None,
                      ) -> Callable[..., Any]:
    """function: the compiled graph, which takes local parts. Places its parameters, all ranks together."""
    same_values(own_values(inputs.described, given))
    function = without_missing(gm, given)(function)
    borrowed = {k for k, x in enumerate(given) if owner_of(x) is not None} - takes.gathered - takes.own_here
    installed = install(dict(takes.placements), gm, given, devices, takes.gathered, takes.written, holding, borrowed)

    def call(*args: Any) -> Any:
        local = installed.locals(args)
        results = function(*local)
        if installed.writes:
            installed.write_back(args, local)
        return results

    half = of_forward(name, inputs.described, given, takes.draws)
    call = call if watched is None else watched.forward(call)
    return forward_call(call, Spot(f"forward of {name}"), half, takes.training)
