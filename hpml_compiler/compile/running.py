"""What a script calls in the place of a graph: compiled code, with its parts of the arguments and results."""
from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.fx import GraphModule

from hpml_compiler.compile import session
from hpml_compiler.compile.graph_inputs import GraphInputs
from hpml_compiler.compile.monitoring import current_monitor
from hpml_compiler.compile.rewritten import Rewritten
from hpml_compiler.monitor.hooks import WatchedGraph, watch_optimizers
from hpml_compiler.options import Options
from hpml_compiler.runtime.alike import own_values, same_values
from hpml_compiler.runtime.calls import forward_call
from hpml_compiler.runtime.compared import of_forward
from hpml_compiler.runtime.doing import Spot
from hpml_compiler.runtime.gathered import Holding
from hpml_compiler.runtime.missing_gradients import without_missing
from hpml_compiler.runtime.optimizer_offload import offload_state, watch_steps
from hpml_compiler.runtime.outputs import Outputs
from hpml_compiler.runtime.parameters import install
from passes.transform.take_outside import part_of


def running(function: Callable[..., Any], gm: GraphModule, given: Sequence[Any], inputs: GraphInputs, rewritten: Rewritten,
            holding: Holding, watched: WatchedGraph | None, options: Options) -> Callable[..., Any]:
    """function: the compiled graph, which takes local parts. Places its parameters, all ranks together."""
    record = rewritten.record
    same_values(own_values(inputs.described, given))
    if options.offloads("optimizer"):
        offload_state((value for value in given if isinstance(value, torch.nn.Parameter)), options.offload_folder or "")
    mesh = session.current().device_mesh(record.mesh)
    placements = {position: session.to_dtensor(layout) for position, layout in rewritten.placements.items()}
    function = without_missing(gm, given)(function)
    installed = install(placements, gm, given, mesh, rewritten.gathered, rewritten.written, holding)
    outputs = Outputs(record.name, mesh, rewritten.left)

    def parts(args: Sequence[Any]) -> list[Any]:
        local = installed.locals(args)
        for position, taken in rewritten.taken.items():
            local[position] = part_of(local[position], taken)
        return local

    def call(*args: Any) -> Any:
        return function(*parts(args))

    def call_and_leave(*args: Any) -> Any:
        return outputs.given(function(*parts(args)))

    def call_and_write(*args: Any) -> Any:
        local = parts(args)
        results = function(*local)
        installed.write_back(args, local)
        return outputs.given(results) if rewritten.left else results

    if rewritten.left:
        call = call_and_leave
    if installed.writes:
        call = call_and_write
    half = of_forward(record.name, inputs.described, given, rewritten.draws)
    spot = Spot(f"forward of {record.name}")
    if watched is not None:
        watch_optimizers(current_monitor)
    if options.offloads("optimizer"):
        watch_steps()
    return forward_call(call if watched is None else watched.forward(call), spot, half, rewritten.training)
