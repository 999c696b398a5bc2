"""Detached outputs of a graph: large results beside the loss are compiled without a gradient, until one arrives.

Then the call is repeated once, from the same inputs and random numbers, by a graph that takes gradients there, too; later calls
run that one. On several ranks, all decide the same: a gradient arrives at an output on each of them or on none.
"""
from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.fx import GraphModule

from hpml_compiler.compile.recovery.call_state import edges_of
from hpml_compiler.compile.recovery.compiled_again import CompiledAgain
from hpml_compiler.compile.wrapper.late_gradients import DetachedCall
from hpml_compiler.options import Options
from hpml_compiler.runtime.consistency.initial_sync import drawing_as, generator_states
from hpml_compiler.runtime.dtensor.lazy_outputs import LazyOutput
from hpml_compiler.runtime.install.to_local import as_placed
from hpml_compiler.runtime.outputs.call_modes import Modes
from hpml_compiler.runtime.placements.shard_and_gather import to_full_tensor
from hpml_compiler.runtime.process.compute_device import device_type
from hpml_compiler.runtime.process.world_group import from_all_ranks, world_size
from hpml_compiler.runtime.program.undefined_gradients import gradients_of_node, node_of
from hpml_compiler.runtime.watchdog.barrier_check import RankDiverged, require_all_ranks
from hpml_compiler.session import session
from passes import compat
from passes.graph.fx_nodes import returned_nodes
from passes.graph.graph_copy import copy_graph
from passes.transforms.outputs.outputs_beside_loss import detach_results, is_statistic, outputs_beside_loss

log = logging.getLogger("hpml")
TOGETHER = "let the loss depend on the same outputs of the model on every rank; look for code that depends on the rank"
Call = Callable[..., Any]
Compile = Callable[[GraphModule, Sequence[Any], Options], Call]


def with_detached_outputs(gm: GraphModule, given: Sequence[Any], options: Options, compile_: Compile, at_once: bool) -> Call:
    """Compile a graph, with outputs detached where it has a loss. at_once: a graph can be compiled for real inputs, too, not by
    Dynamo alone."""
    fixed = not any(isinstance(x, torch.SymInt) for x in given) and CompiledAgain.is_possible(gm)
    fixed &= world_size() == 1 or all(isinstance(x, torch.nn.Parameter) for x in _trained(given))
    if not torch.is_grad_enabled() or not fixed or compat.saving_is_hooked() or compat.ends_in_a_break(gm):
        return compile_(gm, given, options)
    beside = outputs_beside_loss(gm)
    return _DetachingGraph(gm, given, options, compile_, at_once, beside).run if beside else compile_(gm, given, options)


def _trained(given: Sequence[Any]) -> list[torch.Tensor]:
    return [x for x in given if isinstance(x, torch.Tensor) and x.requires_grad]


class _DetachingGraph:
    """beside: positions of the results that may be detached. attached: those of them that gradients have arrived at. trained:
    positions of the inputs that have gradients; statistics: of those that it changes, and reads for nothing else."""

    def __init__(self, gm: GraphModule, given: Sequence[Any], options: Options, compile_: Compile, at_once: bool,
                 beside: Sequence[int]) -> None:
        self.name, self.modes, self.beside = session.current().next_name(), Modes(device_type()), tuple(beside)
        self.attached, self.draws, self._known = frozenset[int](), True, False
        self.trained = [k for k, x in enumerate(given) if isinstance(x, torch.Tensor) and x.requires_grad]
        self.statistics = [k for k, node in enumerate(gm.graph.find_nodes(op="placeholder")) if is_statistic(node)]
        self.results = [str(node) for node in returned_nodes(gm)]
        self._options, self._compile = options, compile_
        self._graph = copy_graph(gm) if at_once else CompiledAgain(gm, compile_)
        self._calls = {self.attached: compile_(detach_results(gm, beside), given, options)}

    @compat.untraced
    def run(self, *args: Any) -> Any:
        if not torch.is_grad_enabled():
            return self._compiled(self.attached, args)(*args)
        if compat.inside_transform():
            with compat.outside_transforms():
                call = self._compiled(frozenset(self.beside), args)
            return call(*args)
        # a checkpoint counts what is saved, and counts again in backward
        attached = frozenset[int]() if compat.saving_is_hooked() else self.attached
        call = self._compiled(attached, args)
        if len(attached) == len(self.beside):
            return call(*args)
        return self._with_gradients(call, attached, args)

    def _with_gradients(self, call: Call, attached: frozenset[int], args: Sequence[Any]) -> list[Any]:
        detached = [k for k in self.beside if k not in attached]
        what = f"output {', '.join(self.results[k] for k in detached)} of {self.name}"
        made = DetachedCall(args, self.statistics, self.draws, what, functools.partial(self._gradients, attached, detached))
        results = list(call(*args))
        if not self._known:
            self.draws, self._known = not all(map(torch.equal, made.states, generator_states())), True
        if not made.note_forward():  # it changes inputs in a way that Dynamo's trace does not show
            self.attached = frozenset(self.beside)
        outputs = made.attach([results[k] for k in detached], [args[k] for k in self.trained])
        for k, value in zip(detached, outputs, strict=True):
            results[k] = value
        with compat.plain_torch_functions():
            node = next((node for x in results if isinstance(x, torch.Tensor) and (node := node_of(x)) is not None), None)
        if node is not None:
            made.after(node)
        return results

    def _compiled(self, attached: frozenset[int], args: Sequence[Any]) -> Call:
        if attached not in self._calls:
            detached = [k for k in self.beside if k not in attached]
            log.info("%s is compiled once more: with gradients at output %s", self.name,
                     ", ".join(self.results[k] for k in self.beside if k in attached))
            if isinstance(self._graph, CompiledAgain):
                again = self._graph.changed(lambda gm: detach_results(gm, detached))
                self._calls[attached] = again.compiled(_for_all_gradients(self._options))
            else:
                self._calls[attached] = self._compile(detach_results(copy_graph(self._graph), detached), args, self._options)
        return self._calls[attached]

    def _gradients(self, attached: frozenset[int], detached: Sequence[int], made: DetachedCall,
                   arriving: Sequence[torch.Tensor | None]) -> Sequence[torch.Tensor | None]:
        """Gradients of the trained inputs of a call for those that have arrived at its detached results."""
        _agree(made.what, [x is not None for x in arriving])
        arrived = {k: x for k, x in zip(detached, arriving, strict=True) if x is not None}
        attached = attached.union(arrived)
        now = {k: made.args[k].clone() for k in made.changed}
        with compat.outside_transforms(), compat.saving_without_hooks(), self.modes.again():
            call = self._compiled(attached, made.args)
            with drawing_as(made.states):
                results = call(*made.args)
        for k, value in now.items():
            made.args[k].copy_(value)
        found = gradients_of_node({k: results[k] for k in arrived}, {
            k: x if isinstance(results[k], LazyOutput) else to_full_tensor(x) for k, x in arrived.items()})
        edges = zip(edges_of(found.node), found.node.next_functions, found.gradients, strict=True)
        by_edge = {key: as_placed(node, number, x) for key, (node, number), x in edges}
        trained = [made.args[k] for k in self.trained]
        gradients = [by_edge.pop(id(x) if x.is_leaf else (id(x.grad_fn), x.output_nr), None) for x in trained]
        assert all(x is None for x in by_edge.values()), "each gradient is that of an input"
        compat.after_backward(lambda: self._attach(attached))
        return gradients

    def _attach(self, attached: frozenset[int]) -> None:
        """Let later calls take gradients at these results. Not before the end of a backward: until then, checkpoints run calls
        again that were made without."""
        self.attached |= attached


def _for_all_gradients(options: Options) -> Options:
    """Options of a graph with gradients at other outputs than its loss: loops over microbatches with placed values are for the
    loss alone."""
    if options.microbatches == 1 or options.stage_ranks > 1 or world_size() == 1:
        return options
    log.warning("gradients at other outputs than the loss: the step is not split into %d microbatches; to avoid this, compute "
                "all of the loss in the compiled model, or none of it", options.microbatches)
    return options.model_copy(update={"microbatches": 1})


def _agree(what: str, arrived: Sequence[bool]) -> None:
    """Check that gradients arrive at the same results on all ranks, which compute gradients for them together."""
    require_all_ranks(f"backward through {what}", TOGETHER, every=0)
    told = from_all_ranks(arrived)
    if different := [rank for rank, theirs in enumerate(told) if theirs != told[0]]:
        raise RankDiverged(f"on rank {different[0]}, other gradients than on rank 0 arrive at {what}: all ranks compute them "
                           "together", f"ranks {different}", TOGETHER)
