"""Compile one Dynamo graph for one device: by inductor itself, or by hpml for a memory budget, microbatches or blocks."""
from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.fx import GraphModule

from hpml_compiler.compile.graph_compiler import GraphCompiler
from hpml_compiler.compile.inputs.unsupported_graphs import check_supported
from hpml_compiler.compile.lower.compile_timer import compile_phase
from hpml_compiler.compile.lower.inductor_cache_dir import check_cache_dir
from hpml_compiler.compile.lower.lowering import Lowering, boxed
from hpml_compiler.compile.open_graph import DECIDED, OpenGraph
from hpml_compiler.compile.recovery.repeatable_graph import with_repeats
from hpml_compiler.compile.wrapper.deferred_outputs import Compile, with_deferred_outputs
from hpml_compiler.compile.wrapper.detached_outputs import with_detached_outputs
from hpml_compiler.options import Options
from hpml_compiler.runtime.install.unwrap_inputs import copy_for_set_data
from hpml_compiler.runtime.optimizer.optimizer_offload import offload_state, watch_steps
from hpml_compiler.runtime.program.second_derivatives import without_second_derivatives
from hpml_compiler.runtime.program.undefined_gradients import with_undefined_gradients
from passes import compat
from passes.manager import PassManager
from passes.tracing.joint_trace import decompositions
from passes.transforms.cleanup.common_subexpressions import Deduplicate
from passes.transforms.cleanup.pre_partition import TagPhases
from passes.transforms.loss_chunks.chunk_loss import Chunks, chunk_loss, source_hash
from passes.transforms.outputs.outputs_beside_loss import keep_results_as_saved, without_unread_draws


def compile_single_device(gm: GraphModule, example_inputs: Sequence[Any], options: Options,
                          whole: Callable[[GraphModule], Callable[..., Any]] | None = None,
                          deciding: OpenGraph = DECIDED) -> Callable[..., Any]:
    """Compile a graph. whole: compiles it with all outputs, when it is called; None where none are deferred. deciding: what may
    be decided besides."""
    if options.offloads("optimizer"):
        offload_state((x for x in example_inputs if isinstance(x, torch.nn.Parameter)), options.offload_folder or "")
        watch_steps()
    def repeated(graph: GraphModule, given: Sequence[Any], own: Options) -> Callable[..., Any]:
        return with_repeats(graph, given, own, functools.partial(_compiled, deciding=deciding))

    compile_ = functools.partial(with_detached_outputs, options=options, compile_=repeated, at_once=not _is_ours(options))
    if not options.shards_outputs or _is_ours(options) and whole is None:
        return compile_(gm, example_inputs)
    if whole is None or not _is_ours(options):
        return with_deferred_outputs(gm, example_inputs, compile_, compile_)
    return with_deferred_outputs(gm, example_inputs, compile_, lambda graph, _: whole(graph))


def _is_ours(options: Options) -> bool:
    """True if hpml compiles graphs with these options, not inductor by itself."""
    ours = options.chooses_saved or options.microbatches > 1 or options.compile_blocks == "on"
    return (ours and torch.is_grad_enabled()) or bool(options.passes)


def _compiled(gm: GraphModule, example_inputs: Sequence[Any], options: Options, deciding: OpenGraph) -> Callable[..., Any]:
    if _is_ours(options):
        check_supported(gm)
        make = functools.partial(GraphCompiler, options=options, deciding=deciding)
        return _with_gradients_as_eager(lambda *graph: make(*graph).compile(), gm, example_inputs)
    by = functools.partial(_by_inductor if options.compiler == "inductor" else _by_eager, chunks=options.loss_chunks)
    return _with_gradients_as_eager(by, gm, example_inputs)


def _with_gradients_as_eager(compile_: Compile, gm: GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
    around = with_undefined_gradients(gm, example_inputs)  # first: compiling may change the graph
    return without_second_derivatives(around(compile_(gm, example_inputs)))


def _by_inductor(gm: GraphModule, example_inputs: Sequence[Any], chunks: Chunks) -> Callable[..., Any]:
    run = functools.partial(chunk_loss, chunks=chunks)
    joint_pass = None if chunks == 1 else compat.JointPass(run, f"{chunks} {source_hash()}")
    with compile_phase("compile", "compiling with inductor", {}), check_cache_dir():
        return compat.inductor_whole(gm, example_inputs, check_cache_dir, joint_pass)


def _by_eager(gm: GraphModule, example_inputs: Sequence[Any], chunks: Chunks) -> Callable[..., Any]:
    """Without a compiler, chunks of the loss are made only where their number is given: operators are decomposed then."""
    copy_for_set_data(gm)
    compiler = lambda graph, _: boxed(graph.forward)  # noqa: E731
    own: dict[str, Any] = {}
    if chunks not in (1, "auto"):
        def partition(joint: GraphModule, inputs: Any, *, num_fwd_outputs: int, static_lifetime_input_indices: Any = None,
                      **_: Any) -> Any:
            chunk_loss(joint, num_fwd_outputs, chunks)
            PassManager((Deduplicate(), TagPhases(num_fwd_outputs)))(joint)
            return Lowering("eager").partition(joint, inputs, num_fwd_outputs, static_lifetime_input_indices)

        own = {"partition_fn": partition, "decompositions": decompositions("eager")}
    forward = lambda graph, given: compiler(keep_results_as_saved(graph), given)  # noqa: E731
    backward = lambda graph, given: compiler(without_unread_draws(graph), given)  # noqa: E731
    return compat.aot_autograd(fw_compiler=forward, bw_compiler=backward, **own)(gm, example_inputs)
