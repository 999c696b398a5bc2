"""AOTAutograd's runtime epilogue around a traced graph: input mutations and outputs."""
from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch._guards import TracingContext


class UnsupportedEpilogue(Exception):
    """AOTAutograd's epilogue does more than return results and copy new values into inputs."""


@dataclass(frozen=True)
class MutatedInput:
    """An input that a program mutates, and into which AOTAutograd copies the new value after each call.

    position: among the program's inputs. without_gradients: mutated under `no_grad` only. metadata: AOTAutograd's,
    of the input, by which it decides how to copy.
    """

    position: int
    without_gradients: bool
    metadata: tuple[bool, ...]


def mutated_inputs_as_traced(inputs: int) -> tuple[MutatedInput, ...]:
    """Inside the compiler of a forward graph: inputs mutated by the traced program, in the order in which the graph returns
    the new values, before its results. inputs: number of the program's inputs.

    Raises UnsupportedEpilogue for mutations that a copy of values does not express: changes of shape or
    storage, mutations that autograd records or does not see, and inputs that AOTAutograd has merged since they alias.
    """
    known: Any = TracingContext.get().fw_metadata
    written = []
    for position, info in enumerate(known.input_info):
        if info.mutates_metadata or info.mutates_storage_metadata or info.mutation_inductor_storage_resize:
            raise UnsupportedEpilogue("it changes the shape, the strides or the memory of its inputs")
        if not info.mutates_data:
            continue
        if info.requires_grad:  # also a buffer that gradients flow into: its new value is differentiable
            raise UnsupportedEpilogue("it changes an input that gradients flow into")
        if info.mutations_hidden_from_autograd:
            raise UnsupportedEpilogue("it changes an input unseen by autograd")
        written.append(MutatedInput(position, info.mutations_under_no_grad_or_inference_mode, dataclasses.astuple(info)))
    if written and len(known.input_info) != inputs:
        raise UnsupportedEpilogue("it changes an input, and is traced with other inputs than its own")
    if [each.position for each in written] != list(known.mutated_inp_runtime_indices):
        raise UnsupportedEpilogue("it changes an input while it runs, not after")
    return tuple(written)


def results_as_traced(outputs: Sequence[torch.Tensor]) -> list[tuple[torch.Tensor, bool]]:
    """Inside the compiler of a forward graph: each result as the program computed it, before decomposition, and whether it can
    have a gradient, which then has these strides. outputs: the results in the traced graph, for those without a gradient.

    Raises UnsupportedEpilogue for results that alias others or inputs, effect tokens, generators or
    tensor subclasses as inputs or outputs, and a program that changes the grad mode.
    """
    from torch._functorch._aot_autograd.schemas import OutputType

    known: Any = TracingContext.get().fw_metadata
    fresh = (OutputType.non_alias, OutputType.unsafe_view_alias)
    tangents = [x for x in known.traced_tangents if isinstance(x, torch.Tensor)]
    differentiable = [bool(info.requires_grad) for info in known.output_info]
    if known.num_intermediate_bases or any(info.output_type not in fresh for info in known.output_info):
        raise UnsupportedEpilogue("its results share memory with others, or with its inputs")
    if known.tokens or known.num_graphsafe_rng_states or known.grad_enabled_mutation is not None or any(
            type(meta).__name__ == "SubclassCreationMeta" for meta in known.subclass_inp_meta):
        raise UnsupportedEpilogue("it does more than to compute tensors")
    if len(outputs) != len(differentiable) or len(tangents) not in (0, sum(differentiable)):  # none: nothing is differentiated
        raise UnsupportedEpilogue("it is traced with other results than it returns")
    left = iter(tangents)
    return [(next(left, x) if its else x, its) for x, its in zip(outputs, differentiable, strict=True)]
