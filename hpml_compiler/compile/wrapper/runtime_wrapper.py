"""Runtime wrapper: the callable that replaces a graph in the script, around compiled code that takes local shards."""
from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
from torch.fx import GraphModule

from hpml_compiler.compile.inputs.graph_inputs import GraphInputs
from hpml_compiler.compile.inputs.moved_parameters import move_parameters
from hpml_compiler.compile.wrapper.runtime_metadata import RuntimeMetadata
from hpml_compiler.monitor.hooks import WatchedGraph, watch_optimizers
from hpml_compiler.monitor.stage_monitor import StageMonitor
from hpml_compiler.options import Options
from hpml_compiler.runtime.consistency.call_hooks import backward_call, forward_call
from hpml_compiler.runtime.consistency.initial_sync import params_and_buffers, sync_module_states
from hpml_compiler.runtime.consistency.input_check import backward_check, forward_check
from hpml_compiler.runtime.install.parameter_sharding import shard_module
from hpml_compiler.runtime.optimizer.optimizer_offload import offload_state, watch_steps
from hpml_compiler.runtime.optimizer.replica_averages import train_apart
from hpml_compiler.runtime.outputs.output_wrapper import OutputWrapper
from hpml_compiler.runtime.placements.single_rank_placement import owner_of
from hpml_compiler.runtime.placements.unsharded_params import UnshardedInputs
from hpml_compiler.runtime.program.second_derivatives import without_second_derivatives
from hpml_compiler.runtime.program.undefined_gradients import with_undefined_gradients
from hpml_compiler.runtime.watchdog.rank_status import Location
from hpml_compiler.runtime.weights.loaded_parameters import loaded_alike
from hpml_compiler.session import session
from hpml_compiler.session.run_monitor import current_monitor
from passes.transforms.shard.hoist_batch_slice import part_of

Watched = WatchedGraph | StageMonitor | None
"""A graph's calls as the monitor sees them; None without a monitor."""


def runtime_wrapper(name: str, function: Callable[..., Any], gm: GraphModule, given: Sequence[Any], inputs: GraphInputs,
                    takes: RuntimeMetadata, axes: Mapping[str, int], holding: UnshardedInputs, watched: Watched,
                    options: Options,
                    ) -> Callable[..., Any]:
    """Wrap the compiled graph `function`, which takes local shards. Shards its parameters on the mesh of `axes`, all ranks
    together. Returns `function` itself on one rank, whose mesh has no axes."""
    if not axes:
        return function
    devices = session.current().device_mesh(axes)
    sync_module_states(params_and_buffers(inputs.described, given))
    if options.offloads("optimizer"):
        offload_state((value for value in given if isinstance(value, torch.nn.Parameter)), options.offload_folder or "")
    function = without_second_derivatives(with_undefined_gradients(gm, given)(function))
    move_parameters([(each, placements) for k, placements in takes.moved.items()
                     for each in loaded_alike(inputs.described[k].name, given[k])])
    borrowed = {k for k, x in enumerate(given) if owner_of(x) is not None} - takes.gathered - takes.own_here
    installed = shard_module(takes.placements, gm, given, devices, takes.gathered, takes.written, holding, borrowed)
    if takes.training and takes.decision.placements is not None:
        train_apart(devices, takes.decision.placements.axes, options.outer_optimizer)
    outputs = OutputWrapper(name, devices, takes.sharded_outputs, for_calls_on_outputs(options))

    def parts(args: Sequence[Any]) -> list[Any]:
        local = installed.locals(args)
        for position, taken in takes.slices.items():
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
        return outputs.given(results) if takes.sharded_outputs else results

    if takes.sharded_outputs:
        call = call_and_leave
    if installed.writes:
        call = call_and_write
    half = forward_check(name, inputs.described, given, takes.uses_rng)
    if watched is not None:
        watch_optimizers(current_monitor)
        call = watched.forward(call)
    if options.offloads("optimizer"):
        watch_steps()
    return forward_call(call, Location(f"forward of {name}"), half, takes.training)


def for_calls_on_outputs(options: Options) -> str:
    """Options of the graphs that are compiled for what a script calls on sharded outputs, as JSON; "" where these calls gather
    them."""
    if not options.shards_outputs or options.stage_ranks > 1:
        return ""
    apply = {"compiler", "mesh", "mesh_order", "compile_blocks", "solver", "solver_options", "time_limit", "gap", "cluster",
             "costs", "objective", "power_cap", "monitor", "local_steps", "outer_optimizer", "on_oom"}
    return json.dumps(options.model_dump(mode="json", include=apply, exclude_defaults=True), sort_keys=True)


def backward_wrapper(name: str, call: Callable[[list[Any]], Any], gm: GraphModule, axes: Mapping[str, int],
                     in_parts: Collection[str], watched: Watched) -> Callable[[list[Any]], Any]:
    """Wrap a call of the backward `gm` in the same way. in_parts: placeholders of sharded gradients."""
    if not axes:
        return call
    call = call if watched is None else watched.backward(call)
    return backward_call(call, Location(f"backward of {name}"), backward_check(name, gm, in_parts))
