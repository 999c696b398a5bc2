"""Compile a Dynamo graph: on several ranks by `GraphCompiler`, on one as `compile_single_device` chooses."""
from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.fx import GraphModule

from hpml_compiler.compile.balance.balanced_graph import with_balance
from hpml_compiler.compile.graph_compiler import GraphCompiler
from hpml_compiler.compile.inputs.fixed_sizes import may_fix_sizes, with_fixed_sizes
from hpml_compiler.compile.inputs.unsupported_graphs import check_supported, warn_of_reentrant_checkpoints
from hpml_compiler.compile.open_graph import DECIDED, OpenGraph, with_open_decisions
from hpml_compiler.compile.recompile_limit import note_function
from hpml_compiler.compile.recovery.repeatable_graph import with_repeats
from hpml_compiler.compile.single_device import compile_single_device
from hpml_compiler.compile.wrapper.deferred_outputs import with_outputs_of_ranks
from hpml_compiler.compile.wrapper.detached_outputs import with_detached_outputs
from hpml_compiler.compile.wrapper.loss_of_script import LossOfScript, frees_memory
from hpml_compiler.compile.wrapper.runtime_wrapper import for_calls_on_outputs
from hpml_compiler.integrations.ddp_fsdp_guard import refuse_other_wrappers, watch_compiled_modules
from hpml_compiler.monitor import tensorboard_scalars
from hpml_compiler.options import Options
from hpml_compiler.planner.joint.open_decisions import leaves_axes_open
from hpml_compiler.planner.step_decision import defers_outputs
from hpml_compiler.run_recording.recorder import open_monitor
from hpml_compiler.runtime.dtensor.lazy_outputs import LazyOutput
from hpml_compiler.runtime.process.compute_device import init_device
from hpml_compiler.runtime.process.gc_pause import gc_paused
from hpml_compiler.runtime.process.live_objects import one_scan
from hpml_compiler.runtime.process.world_group import ensure_process_group
from hpml_compiler.runtime.watchdog import heartbeat
from hpml_compiler.runtime.watchdog.activity_scope import activity
from hpml_compiler.session import session
from passes import compat


@gc_paused()
@one_scan()
def compile_graph(gm: GraphModule, example_inputs: Sequence[Any], options: Options, defers: bool = True) -> Callable[..., Any]:
    """Compile one Dynamo graph. defers: whether large outputs beside the loss may be computed when they are first read."""
    compat.warn_if_untested()
    world = ensure_process_group()
    watch_compiled_modules()  # the backend may have been imported before Dynamo
    if not leaves_axes_open(options, world):
        options.check_mesh(world)
    if options.tensorboard is not None:
        tensorboard_scalars.check_installed()
    if options.compiler == "inductor" and not torch.cuda.is_available():
        compat.warm_cpp_compiler()
    options = options.with_plan(world)
    compile_ = lambda: _whole_in_checkpoints(_compiled(gm, example_inputs, options, defers, world))  # noqa: E731
    if (monitor := open_monitor()) is not None:
        return monitor.counted(gm, example_inputs, options, compile_)
    return compile_()


def _whole_in_checkpoints(call: Callable[..., Any]) -> Callable[..., Any]:
    """The call, to the end also where a checkpoint makes it again: AOTAutograd writes to buffers, as eager modules do on the
    way, after it has saved all that the checkpoint waits for."""
    if not torch.is_grad_enabled():
        return call

    @compat.untraced
    def to_the_end(*args: Any) -> Any:
        if not compat.saving_is_hooked() or compat.inside_transform():
            return call(*args)
        with compat.early_stop_postponed():
            return call(*args)

    return to_the_end


def _compiled(gm: GraphModule, example_inputs: Sequence[Any], options: Options, defers: bool, world: int) -> Callable[..., Any]:
    warn_of_reentrant_checkpoints(gm, example_inputs)
    if world == 1:
        return _on_one_device(gm, example_inputs, options, defers)
    refuse_other_wrappers(example_inputs)
    heartbeat.start()
    with activity(f"compiling {session.current().next_name()}"):
        init_device(example_inputs)
        check_supported(gm)
        note_function()
        return with_fixed_sizes(gm, example_inputs, functools.partial(_on_ranks, options=options, defers=defers))


def _on_one_device(gm: GraphModule, example_inputs: Sequence[Any], options: Options, defers: bool) -> Callable[..., Any]:
    """Sizes become numbers where the script's loss may be part of the step, for the first few of them."""
    def compile_(graph: GraphModule, given: Sequence[Any]) -> Callable[..., Any]:
        if not defers:  # the decisions are those of the graph without its large outputs
            return decided(given, graph, options, DECIDED)
        return with_open_decisions(graph, given, options, lambda *made: decided(given, *made))

    def decided(given: Sequence[Any], graph: GraphModule, own: Options, deciding: OpenGraph) -> Callable[..., Any]:
        waits = LossOfScript(graph, given, own, compile_graph)
        whole = _compiles_whole(waits.alone) if defers and defers_outputs(own) else None
        found = deciding if waits.copy is None else DECIDED  # else with the loss, which may fit by itself
        return waits.compiled(lambda alone: compile_single_device(graph, given, alone, whole, found))

    if not any(isinstance(x, torch.SymInt) for x in example_inputs) or not torch.is_grad_enabled() or not (
            options.shards_outputs and frees_memory(gm, options) and may_fix_sizes(gm)):
        return compile_(gm, example_inputs)
    return with_fixed_sizes(gm, example_inputs, compile_)


def _on_ranks(gm: GraphModule, example_inputs: Sequence[Any], options: Options, defers: bool) -> Callable[..., Any]:
    if not defers:
        return _decided(gm, example_inputs, options, defers, DECIDED)
    return with_open_decisions(gm, example_inputs, options, lambda graph, own, deciding: _decided(
        graph, example_inputs, own, defers, deciding))


def _decided(gm: GraphModule, example_inputs: Sequence[Any], options: Options, defers: bool, deciding: OpenGraph,
             ) -> Callable[..., Any]:
    waits = LossOfScript(gm, example_inputs, options, compile_graph)
    if not defers or not defers_outputs(options):
        return waits.compiled(lambda own: _compile_for_ranks(gm, example_inputs, own, deciding))
    return waits.compiled(lambda own: with_outputs_of_ranks(
        gm, example_inputs, functools.partial(_compile_for_ranks, options=own, deciding=deciding), _compiles_whole(own),
        for_calls_on_outputs(own)))


def _compiles_whole(options: Options) -> Callable[[GraphModule], Callable[..., Any]]:
    """Compiles the graph that Dynamo compiles now once more, with all outputs, when it is called. Under a budget, it takes the
    place of the first one in the step."""
    step, frame = session.current().step, compat.frame_being_compiled()
    first = step.stands_for.get(frame, frame)

    def backend(gm: GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        step.stands_for[compat.frame_being_compiled()] = first
        return compile_graph(gm, example_inputs, options, defers=False)

    return lambda graph: torch.compile(graph.forward, backend=backend, dynamic=False)


def _compile_for_ranks(gm: GraphModule, example_inputs: Sequence[Any], options: Options, deciding: OpenGraph,
                       ) -> Callable[..., Any]:
    given = list(example_inputs)
    make = lambda *graph: GraphCompiler(*graph, deciding=deciding).compile()  # noqa: E731
    around = with_balance if options.balance == "auto" else with_repeats
    call = with_detached_outputs(gm, given, options, functools.partial(around, compile_=make), at_once=False)
    _release_outputs(given)
    return call


def _release_outputs(given: list[Any]) -> None:
    """Replace outputs of other graphs among the example inputs, which the graph's backward compiler holds, by tensors without
    memory: they are of the first step's activations, and hang on its graph."""
    for k, x in enumerate(given):
        if isinstance(x, LazyOutput):
            with compat.plain_torch_functions():
                given[k] = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta", requires_grad=x.requires_grad)
