"""Compiled graphs whose calls are repeated when they run out of memory, under a plan that takes less (`on_oom="replan"`).

A forward that fails has changed nothing but random states: these are restored, and the graph is compiled with a smaller memory
budget and called again. A backward that fails has given no gradient to anyone: autograd gets all of a graph's gradients at
once. So its forward runs once more, from the inputs and random states that it had, under the new plan, and this plan's backward
computes the gradients. What the script does in between is not repeated. Calls whose inputs have changed since are refused.

On several ranks, a call fails on all of them or none (`hpml_compiler.runtime.consistency.memory_agreement`).
"""
from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import torch
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.fx import GraphModule

from hpml_compiler.compile.recovery.call_state import CallState, edges_of
from hpml_compiler.compile.recovery.compiled_again import Call, Compile, CompiledAgain
from hpml_compiler.compile.recovery.optimizer_room import watch_room
from hpml_compiler.compile.recovery.smaller_plans import SmallerPlans
from hpml_compiler.options import Options
from hpml_compiler.runtime.optimizer.resident_memory import held_bytes
from hpml_compiler.runtime.outputs.call_modes import Modes
from hpml_compiler.runtime.process.compute_device import device_type
from hpml_compiler.runtime.process.out_of_memory import OutOfMemoryOnRank, StepTooLarge, free_memory, memory_failure
from hpml_compiler.runtime.process.world_group import this_rank, world_size
from hpml_compiler.runtime.program.stage_errors import StageError
from hpml_compiler.runtime.program.undefined_gradients import node_of
from hpml_compiler.session import optimizer_lookup, session
from passes import compat
from passes.errors import HpmlError

log = logging.getLogger("hpml")
T = TypeVar("T")
_STATE, _GUARDED = "hpml_call_state", "_hpml_repeats"
FEWER = "use fewer rows, a memory_budget, or microbatches from the start"


def with_repeats(gm: GraphModule, given: Sequence[Any], options: Options, compile_: Compile) -> Call:
    """Compile a graph; where the options ask for it, so that calls that run out of memory are repeated."""
    if options.on_oom != "replan" or not torch.is_grad_enabled() or not CompiledAgain.is_possible(gm):
        return compile_(gm, given, options)
    graph = RepeatableGraph(gm, given, options, compile_)
    watch_room(options)  # after the hooks that placing parameters registers
    return graph.run


class RepeatableGraph:
    """call: the graph as it is compiled now, with `options`. changes: positions of the inputs that it changes in place."""

    def __init__(self, gm: GraphModule, given: Sequence[Any], options: Options, compile_: Compile) -> None:
        self.again, self.name = CompiledAgain(gm, compile_), session.current().next_name()
        self.modes, self.options = Modes(device_type()), options
        self.changes: frozenset[int] | None = None
        self.call = compile_(gm, given, options)

    @compat.untraced
    def run(self, *args: Any) -> Any:
        if not torch.is_grad_enabled():
            return self.call(*args)
        state = CallState(args, self.changes)
        try:
            results = self.call(*args)
        except Exception as error:
            failure = _failure(error)
            if not failure:
                raise
        else:
            return self._watched(state, results)
        # Here, the error and the values that its frames hold are freed.
        if changed := state.changed():
            raise self._unrepeatable("forward", failure, f"it has changed input {min(changed)} in place")

        def call_again(call: Call) -> Any:
            state.restore_random()
            return call(*args)

        return self._watched(state, self._repeated("forward", failure, state, call_again))

    def _watched(self, state: CallState, results: Any) -> Any:
        changed = state.changed()
        state.note_forward(changed)
        self.changes = changed | (self.changes or frozenset())
        if (node := _node_of(results)) is not None and not hasattr(node, _STATE):
            setattr(node, _STATE, (self, state))
            _guard(compat.autograd_function(node))
        return results

    def backward_again(self, node: Any, state: CallState, gradients: Sequence[Any], failure: str) -> tuple[Any, ...]:
        """Gradients of a call whose backward failed. node: its autograd node, which backward was called on."""
        if changed := state.changed() | state.lost:
            raise self._unrepeatable("backward", failure, f"input {min(changed)} was changed in place since its forward")
        shapes, edges = _shapes(node), edges_of(node)
        node.maybe_clear_saved_tensors()

        def both_halves(call: Call) -> tuple[Any, ...]:
            with state.again(), self.modes.again():
                edge = _edge_of(call(*state.args))  # keeps the node alive, not the results
            made = edge and edge.node
            if made is None or _shapes(made) != shapes or len(set(edges)) > len(made.next_functions):
                raise self._unrepeatable("backward", failure, "under the new plan, other outputs have gradients")
            found = dict(zip(edges_of(made), compat.autograd_function(made).backward(made, *_copied(gradients)), strict=True))
            if missing := set(edges) - found.keys() - {None}:
                raise self._unrepeatable("backward", failure, f"{len(missing)} of its inputs are outputs of other graphs")
            return tuple(found.get(edge) for edge in edges)

        with torch.no_grad():
            return self._repeated("backward", failure, state, both_halves)

    def _repeated(self, half: str, failure: str, state: CallState, run: Callable[[Call], T]) -> T:
        """Run something with the graph compiled for less and less memory, until it succeeds; keep that graph."""
        plans = SmallerPlans(self.name, self.options, self._held(state.args), self._peak)
        first, options = failure, plans.next(failure)
        while True:
            call = self.again.compiled(options)
            free_memory()
            refusal: HpmlError | None = None
            try:
                result = run(call)
            except Exception as error:
                failure, refusal = _failure(error), _refusal(error)
                if isinstance(error, StepTooLarge) or not failure and refusal is None:
                    raise
            else:
                break
            options = plans.next(failure) if refusal is None else plans.after_refusal(refusal, first)
        self.call, self.options = call, options
        if this_rank() == 0:
            log.warning("%s of %s: %s; nothing is lost: it was repeated, and from now on runs as %s, with %s", half, self.name,
                        first, self.again.name, plans.told())
        return result

    def _held(self, args: Sequence[Any]) -> int:
        parameters = [x for x in args if isinstance(x, torch.nn.Parameter)]
        optimizers = optimizer_lookup.optimizer_of(parameters)
        owned = {id(p) for p in optimizer_lookup.held_by(optimizers)}
        return sum(held_bytes(optimizers, [p for p in parameters if id(p) not in owned]).values())

    def _peak(self) -> float | None:
        """Predicted peak of the graph that was compiled last, in bytes; None where it has no plan."""
        name, current = self.again.name, session.current()
        if name not in current.unplanned and all(graph.name != name for graph in current.graphs):
            return None
        graph = next(each for each in session.last_plan().graphs if each.name == name)
        return graph.memory.peak

    def _unrepeatable(self, half: str, failure: str, why: str) -> StepTooLarge:
        return StepTooLarge(f"{half} of {self.name}: {failure}, and cannot be repeated: {why}", self.name, FEWER)


def _failure(error: Exception) -> str:
    """Words of an error by which a call can be repeated: on several ranks, one that all of them have."""
    if world_size() > 1 and not isinstance(error, OutOfMemoryOnRank | StageError):
        return ""
    return memory_failure(error)


def _refusal(error: BaseException) -> HpmlError | None:
    """The planner's error that made a compilation fail."""
    while not isinstance(error, HpmlError):
        found = getattr(error, "inner_exception", None) or error.__cause__
        if found is None:
            return None
        error = found
    return error if not isinstance(error, torch.OutOfMemoryError) else None


def _of_graph(results: Sequence[Any]) -> Iterator[torch.Tensor]:
    """The results whose autograd node is the graph's that made them."""
    return (x for x in results if isinstance(x, torch.Tensor) and x.requires_grad and node_of(x) is not None)


def _node_of(results: Sequence[Any]) -> Any:
    """The autograd node of the graph that made these results; it lives as long as one of them."""
    with compat.plain_torch_functions():
        return next(map(node_of, _of_graph(results)), None)


def _edge_of(results: Sequence[Any]) -> GradientEdge | None:
    """An edge to that node, which keeps it alive without the results."""
    with compat.plain_torch_functions():
        for x in _of_graph(results):
            edge = get_gradient_edge(x)
            return GradientEdge(node_of(x), x.output_nr, edge.ownership_token or edge.node)
    return None


def _shapes(node: Any) -> list[tuple[int, ...]]:
    return [tuple(each.shape) for each in node._input_metadata]


def _copied(gradients: Sequence[Any]) -> list[Any]:
    """The gradients that a backward is called with: it may empty a list of them."""
    return [[*each] if isinstance(each, list) else each for each in gradients]


def _guard(function: Any) -> None:
    """Let backward of the autograd function of a compiled graph be repeated; once per graph."""
    if hasattr(function, _GUARDED):
        return
    setattr(function, _GUARDED, function.backward)
    first = function.backward

    @compat.untraced
    def backward(ctx: Any, *gradients: Any) -> Any:
        kept = _copied(gradients)
        try:
            return first(ctx, *gradients)
        except Exception as error:
            failure = _failure(error)
            if not failure or torch.is_grad_enabled() or not hasattr(ctx, _STATE):  # with create_graph, there is more to keep
                raise
        graph, state = getattr(ctx, _STATE)
        return graph.backward_again(ctx, state, kept, failure)

    function.backward = staticmethod(backward)
