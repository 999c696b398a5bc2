"""Trace the joint graph of a model without running it: no devices, no memory for its weights, meta tensors too."""
from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn
from torch.fx import GraphModule

from passes import compat
from passes.errors import BadInput
from passes.graph.decision import LossChunking
from passes.graph.graph_signature import GraphInput, graph_inputs
from passes.tracing.tracing_errors import check_batch, check_products, not_traceable
from passes.tracing.untraced_parts import GraphCalls, UntracedPart


@dataclass(frozen=True)
class JointTrace:
    """Joint graph, its inputs in the order of the Dynamo graph, and the number of its forward outputs. leaves: positions of the
    inputs whose gradients go into `.grad`; breaks: True if the graph ends at a graph break. received: position of an input that
    an earlier graph of the step returned -> that graph, and the position among its results. loss_chunks: how the graph computes
    its loss, where that was decided already. copied: bytes of inputs that are copied for outputs that were left out."""

    gm: GraphModule
    inputs: list[GraphInput]
    forward_outputs: int
    seconds: float
    leaves: frozenset[int] = frozenset()
    breaks: bool = False
    received: dict[int, tuple[int, int]] = field(default_factory=dict)
    loss_chunks: LossChunking | None = None
    copied: float = 0.0


Defer = Callable[[GraphModule], GraphModule | None]
"""Changes a Dynamo graph to leave out large outputs beside its loss, as in a run, and returns the graph with them, if there are
any."""


class _TraceComplete(BaseException):
    """Ends compilation once the joint graph is traced. No Exception, which Dynamo or the model might handle as a failure."""


def call_arguments(batch: Any) -> tuple[tuple, dict[str, Any]]:
    """A batch as arguments: a mapping by name, a tuple or list by position, anything else as the only one."""
    if isinstance(batch, Mapping):
        return (), dict(batch)
    if isinstance(batch, (tuple, list)):
        return tuple(batch), {}
    return (batch,), {}


def decompositions(compiler: str) -> dict[Any, Callable[..., Any]]:
    """Decomposition table for tracing. Random numbers are those of one device: inductor draws with its own generator, "eager"
    as torch does without a compiler."""
    return compat.inductor_decompositions() if compiler == "inductor" else compat.eager_decompositions()


def _leaves(examples: Sequence[Any]) -> frozenset[int]:
    return frozenset(position for position, value in enumerate(examples)
                     if isinstance(value, torch.Tensor) and value.requires_grad and value.is_leaf)


def joint_graphs(function: Callable[..., Any], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None, *,
                 compiler: str = "inductor", dynamic: bool | None = False, alone: bool = False,
                 calls: GraphCalls | None = None, defer: Defer | None = None) -> list[JointTrace]:
    """The joint graphs of one call, one per graph that Dynamo makes: AOTAutograd is stopped where it would cut them in two.

    dynamic: as in torch.compile. alone: on one device, which runs ops that "eager" does not decompose without a compiler.
    calls: records calls behind graph breaks, and the error that ends the step there; without it, the first graph with
    gradients is the last. Where Dynamo leaves a function to Python, its first graph is one of a callee.
    """
    start = time.perf_counter()
    found: list[JointTrace] = []

    def backend(gm: GraphModule, examples: Sequence[Any]) -> Any:
        compat.drop_unread_function_outputs(gm)
        before, received = len(found), dict[int, tuple[int, int]]()
        inputs, leaves, breaks = graph_inputs(gm, examples), _leaves(examples), compat.ends_in_a_break(gm)
        whole_graph = (None if defer is None or breaks else defer(gm)) or gm

        def partition(joint: GraphModule, _inputs: Any, *, num_fwd_outputs: int, **_: Any) -> Any:
            found.append(JointTrace(joint, inputs, num_fwd_outputs, time.perf_counter() - start, leaves, breaks, received))
            raise _TraceComplete

        try:
            return compat.aot_autograd(
                fw_compiler=lambda graph, _: graph, partition_fn=partition,
                decompositions=None if alone and compiler == "eager" else decompositions(compiler),
            )(gm, examples)
        except _TraceComplete:
            if calls is None:
                raise
        whole = not (breaks or calls is None or calls.counts) and compat.frame_being_compiled() in ("", "0")
        number = len(found)

        def run(*arguments: Any) -> Any:
            assert calls is not None, "else the call has ended"
            if calls.note(number, arguments):
                received.update(calls.received(arguments))
                for k, value in enumerate(arguments):  # Dynamo's name is the path by which the frame reached it
                    inputs[k] = replace(inputs[k], name=calls.trained.get(id(value), inputs[k].name))
            if whole:
                raise _TraceComplete
            return calls.note_results(before if number > before else None, whole_graph.forward(*arguments))

        return run

    torch.compiler.reset()
    try:
        with compat.quiet_dynamo():
            result = torch.compile(function, backend=backend, dynamic=dynamic)(*args, **(kwargs or {}))
        if calls is not None:
            calls.note_result(result)
    except _TraceComplete:
        pass
    except Exception as error:
        if calls is None or not calls.counts:
            raise
        calls.stopped = error
    finally:
        torch.compiler.reset()
    return found


def trace(model: nn.Module, batch: Any, compiler: str = "inductor", alone: bool = False, run_breaks: bool = False,
          unplanned: list[UntracedPart] | None = None, defer: Defer | None = None) -> list[JointTrace]:
    """Joint graphs of one training step of `model` on `batch`, one per graph that Dynamo makes, as they are for a compiler;
    alone: on one device. defer: see `joint_graphs`.

    Real, fake and meta tensors are treated alike: weights and batch are replaced by fake ones on their
    device (meta: cpu, since on meta the loss has no gradient). Behind a graph break, Python code runs on these; with
    `run_breaks` on the real ones, restoring buffers and generators. unplanned: receives the parts that were not reached.
    Raises BadInput if nothing is differentiable.
    """
    check_batch(batch)
    with (_left_as_it_was(model, batch) if run_breaks else _fake_weights(model)):
        args, kwargs = call_arguments(batch if run_breaks else _fake(batch))
        calls = GraphCalls.of(model)
        try:
            found = joint_graphs(model, args, kwargs, compiler=compiler, alone=alone, calls=calls, defer=defer)
        except Exception as error:
            raise not_traceable(model, batch, error) from error
        if unplanned is not None:
            unplanned += calls.unplanned()
    if not found:
        raise BadInput(_why_no_gradient(model), where=type(model).__name__,
                       next_step="give a model whose output, such as a loss, depends on a parameter that is trained")
    for traced in found:
        check_products(traced.gm, model)
    return found


def _why_no_gradient(model: nn.Module) -> str:
    parameters = list(model.parameters())
    if not parameters:
        return "the model has no parameters, so there is no training step to plan"
    if not any(parameter.requires_grad for parameter in parameters):
        return "all parameters of the model are frozen, so there is no training step to plan"
    return "nothing that the model returns has a gradient, so there is no training step to plan"


def _fake(value: Any) -> Any:
    mode = compat.tracing_fake_mode()

    def convert(x: Any) -> Any:
        if not isinstance(x, torch.Tensor):
            return x
        device = "cpu" if x.device.type == "meta" else x.device
        with mode:
            return torch.zeros(x.shape, dtype=x.dtype, device=device).requires_grad_(x.requires_grad)

    return compat.pytree.tree_map(convert, value)


@contextlib.contextmanager
def _left_as_it_was(model: nn.Module, batch: Any) -> Iterator[None]:
    """For a step of the real model: restores its buffers and the random number generators."""
    leaves = compat.pytree.tree_leaves(batch)
    tensors = [*model.parameters(), *model.buffers(), *(x for x in leaves if isinstance(x, torch.Tensor))]
    if any(x.device.type == "meta" or compat.is_fake(x) for x in tensors):
        raise BadInput("code between the graphs of a model runs on real weights only, and some are on the meta device or fake",
                       type(model).__name__, "leave --run-breaks out, or load the weights")
    buffers = [(buffer, buffer.detach().clone()) for buffer in model.buffers()]
    try:
        with torch.random.fork_rng():
            yield
    finally:
        with torch.no_grad():
            for buffer, value in buffers:
                buffer.copy_(value)


@contextlib.contextmanager
def _fake_weights(model: nn.Module) -> Iterator[None]:
    """The model with fake parameters and buffers, ties kept; the real ones are restored at the end."""
    mode = compat.tracing_fake_mode()
    fakes: dict[int, torch.Tensor] = {}
    before: list[tuple[dict[str, Any], str, Any]] = []
    try:
        for module in model.modules():
            for table in (module._parameters, module._buffers):
                for name, value in table.items():
                    if value is None:
                        continue
                    if id(value) not in fakes:
                        device = "cpu" if value.device.type == "meta" else value.device
                        with mode:
                            fake = torch.empty_strided(
                                value.shape, value.stride(), dtype=value.dtype, device=device)
                        is_parameter = isinstance(value, nn.Parameter)
                        fakes[id(value)] = nn.Parameter(fake, value.requires_grad) if is_parameter else fake
                    before.append((table, name, value))
        for table, name, value in before:
            table[name] = fakes[id(value)]
        yield
    finally:
        for table, name, value in before:
            table[name] = value
