"""The script's loss as a part of the step: the graph of a model without a loss waits for the script's calls on its outputs, and
is compiled with them (`hpml_compiler.runtime.outputs.loss_memory`)."""
from __future__ import annotations

import functools
import logging
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.fx import GraphModule

from hpml_compiler.options import Options
from hpml_compiler.runtime.dtensor.lazy_outputs import LazyOutput
from hpml_compiler.runtime.outputs.call_modes import nbytes
from hpml_compiler.runtime.outputs.loss_memory import TAKEN, LossMemory, OpenCalls, TakenOutputs
from hpml_compiler.runtime.outputs.record import SMALL_BYTES
from hpml_compiler.runtime.outputs.recorded_call import CompiledRecords
from hpml_compiler.runtime.outputs.recorded_output import watch_autograd
from hpml_compiler.runtime.outputs.step_calls import StepCalls
from hpml_compiler.runtime.outputs.step_output import step_output
from hpml_compiler.runtime.process.world_group import world_size
from hpml_compiler.session import session
from hpml_compiler.session.run_cluster import local_cluster
from hpml_compiler.visualize.formatting import format_bytes
from passes import compat
from passes.errors import Infeasible
from passes.graph.fx_nodes import returned_nodes
from passes.graph.graph_copy import copy_graph
from passes.session_state import state_of
from passes.transforms.loss_chunks.loss_outside import chunks_may_pay
from passes.transforms.outputs.inline_graph import inline_graph

log = logging.getLogger("hpml")
Call = Callable[..., Any]


class LossOfScript:
    """Makes the calls of one Dynamo graph wait. To be created before the graph is compiled, which changes it. compile_graph:
    the backend."""

    def __init__(self, gm: GraphModule, given: Sequence[Any], options: Options, compile_graph: Call) -> None:
        self.options, self.compile_graph = options, compile_graph
        self.name, self.frame = session.current().next_name(), compat.frame_being_compiled()
        shared = [vars(x)["shared"] for x in given if isinstance(x, LazyOutput) and "shared" in vars(x)]
        makers = dict.fromkeys(each.maker for each in shared if each.maker is not None)
        self.calls_on = makers if state_of(CompiledRecords).are_running else {}
        for maker in () if self.calls_on else makers:
            maker.stop(TAKEN)
        results = [None if node is None else node.meta.get("example_value") for node in returned_nodes(gm)]
        self.kind = self.frame, tuple(str(getattr(x, "shape", None)) for x in results)
        can_wait = not {self.kind, self.frame} <= state_of(TakenOutputs) and _can_wait(gm, given, options)
        self.copy = copy_graph(gm) if can_wait else None
        self.chunks = options.loss_chunks if isinstance(options.loss_chunks, int) else 1
        self.sources = compat.input_sources(gm)
        self.refusal: Infeasible | None = None

    @property
    def alone(self) -> Options:
        """Options of the graph without the loss: chunks are for the graph with it."""
        waits = self.copy is not None and self.chunks > 1
        return self.options.model_copy(update={"loss_chunks": 1}) if waits else self.options

    def compiled(self, compile_: Callable[[Options], Call]) -> Call:
        """Compile the graph alone and wrap it. Where that needs more than the budget, and no more than its device has, it is
        compiled all the same: with its loss it may need less. compile_: compiles with these options. Raises Infeasible."""
        try:
            return self.around(compile_(self.alone))
        except Infeasible as error:
            needs, device = error.smallest_budget_bytes, local_cluster(self.options, world_size()).device
            if self.copy is None or self.options.memory_budget is None or needs is None or needs > device.memory_bytes:
                raise
            log.warning("%s needs %s without the script's loss, more than the memory_budget: the first step, which records the "
                        "loss, takes at least that much; from the second step on, the loss is part of the step and its budget. "
                        "If the model returns its loss, the budget applies to all steps", self.name, format_bytes(needs))
            self.refusal = error.without_frames()
            return self.around(compile_(self.alone.model_copy(update={"memory_budget": math.ceil(needs)})))

    def around(self, call: Call) -> Call:
        """Wrap the compiled graph."""
        for memory in self.calls_on:
            memory.parts.append(self.name)
        if self.copy is None:
            return _after_open_calls(call)
        graph = self.copy

        @compat.as_one_call
        def leaf(*args: Any) -> tuple[Any, ...]:
            return tuple(graph(*args))

        leaf.__name__ = self.name
        if self.options.stage_ranks > 1:
            log.info("%s returns no loss, so its first step runs as GPipe: once the script's loss is known, it is part of the "
                     "schedule", leaf.__name__)
        watch_autograd()
        wholes: list[str] = []
        memory = LossMemory(self.name, call, leaf, functools.partial(self._compiled, leaf, wholes), wholes,
                            self.chunks, self.refusal, self.kind)

        @compat.untraced
        def wait(*args: Any) -> Any:
            state_of(OpenCalls).settle("another call of a compiled model")
            memory.note_call()
            if not memory.can_wait(args):
                return memory.run_alone(*args) if memory.uses else call(*args)
            if memory.first is None:
                results = memory.look(args)
                return results if memory.first is None else StepCalls(memory, memory.first, args, results).outputs(step_output)
            if memory.to_agree:
                memory.agree()
            if memory.stopped:
                return memory.run_alone(*args)
            calls = StepCalls(memory, memory.first, args)
            if not memory.losses:
                calls.learn("")
            return calls.outputs(step_output)

        return wait

    def _compiled(self, leaf: Call, wholes: list[str], module: GraphModule) -> Call:
        """Compile a graph that has this one as a call, and whose first result is the loss: the others have no gradient."""
        output = module.graph.output_node()
        results: Any = output.args[0]
        with module.graph.inserting_before(output):
            output.args = ((results[0], *[module.graph.call_method("detach", (node,)) for node in results[1:]]),)
        module.recompile()
        return torch.compile(module.forward, backend=functools.partial(self._compile, leaf, wholes), dynamic=False)

    def _compile(self, leaf: Call, wholes: list[str], gm: GraphModule, example_inputs: Sequence[Any]) -> Call:
        assert self.copy is not None
        given = compat.original_inputs(example_inputs)
        inline_graph(gm, leaf, self.copy, self.sources)
        name = session.current().next_name()
        session.current().step.stands_for[compat.frame_being_compiled()] = self.frame
        call = self.compile_graph(gm, given, self.options)
        wholes.append(name)
        return call


def _after_open_calls(call: Call) -> Call:
    @compat.untraced
    def after(*args: Any) -> Any:
        if not state_of(CompiledRecords).are_running:
            state_of(OpenCalls).settle("another call of a compiled model")
        return call(*args)

    return after


def frees_memory(gm: GraphModule, options: Options) -> bool:
    """True if a loss in the step may free so much memory that it is worth a second compilation: of all microbatches but one, of
    stages, or of large outputs. On one device, these are freed by chunks of the loss."""
    if options.stage_ranks > 1 or options.microbatches > 1:
        return True
    if world_size() == 1 and not isinstance(options.loss_chunks, int):
        chunked = options.compiler == "inductor" or options.chooses_saved
        return chunked and chunks_may_pay(gm, options.chooses_saved)
    values = [node.meta.get("example_value") for node in returned_nodes(gm) if node is not None]
    large = sum(nbytes(x) for x in values if isinstance(x, torch.Tensor)) > SMALL_BYTES
    return large and (world_size() > 1 or options.loss_chunks != 1)


def _can_wait(gm: GraphModule, given: Sequence[Any], options: Options) -> bool:
    """True for a graph without a loss, of fixed sizes, that is trained: with loops or stages, which its loss changes, or large
    outputs."""
    if state_of(CompiledRecords).are_running or not torch.is_grad_enabled():
        return False
    if not options.shards_outputs or options.plan is not None or options.passes:
        return False
    if compat.ends_in_a_break(gm) or not all(isinstance(x, torch.Tensor) for x in given):
        return False
    nodes = returned_nodes(gm)
    values = [x for node in nodes if node is not None and isinstance(x := node.meta.get("example_value"), torch.Tensor)]
    if len(values) < len(nodes) or not all(isinstance(size, int) for x in values for size in x.shape):
        return False
    if not frees_memory(gm, options):
        return False
    return any(x.requires_grad for x in values) and not any(
        x.dim() == 0 and x.is_floating_point() and x.requires_grad for x in values)
