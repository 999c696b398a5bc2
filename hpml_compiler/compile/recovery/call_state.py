"""State that a call of a graph starts from, kept so that the call can be repeated: inputs, random states, changed buffers."""
from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from hpml_compiler.runtime.consistency.initial_sync import generator_states
from hpml_compiler.runtime.install.to_local import is_to_local
from hpml_compiler.runtime.outputs.output_parts import output_of_part

SMALL_BYTES = 1 << 22
"""In the first call of a graph, before it is known which inputs it changes: the largest that are copied."""


class CallState:
    """The inputs of one call. changes: positions of those that the graph changes in place; None before they are known."""

    def __init__(self, args: Sequence[Any], changes: frozenset[int] | None) -> None:
        self.args, self.states = args, generator_states()
        self.versions = [_version(x) for x in args]
        self.copies = {k: x.detach().clone() for k, x in enumerate(args) if (
            k in changes if changes is not None else _may_be_changed(x))}

    def changed(self) -> frozenset[int]:
        """Positions of inputs that were changed in place since the call began, or since `note_forward`."""
        now = map(_version, self.args)
        return frozenset(k for k, (one, other) in enumerate(zip(now, self.versions, strict=True)) if one != other)

    def note_forward(self, changed: frozenset[int]) -> None:
        """Note that forward is over, and has changed these inputs."""
        self.copies = {k: x for k, x in self.copies.items() if k in changed}
        self.lost = changed - self.copies.keys()
        if changed:
            self.versions = [_version(x) for x in self.args]

    def restore_random(self) -> None:
        set_states(self.states)

    @contextlib.contextmanager
    def again(self) -> Iterator[None]:
        """Context in which the state is that before forward; afterwards it is as it is now."""
        now, states = {k: self.args[k].detach().clone() for k in self.copies}, generator_states()
        try:
            with torch.no_grad():
                for k, before in self.copies.items():
                    self.args[k].copy_(before)
            self.restore_random()
            yield
        finally:
            with torch.no_grad():
                for k, after in now.items():
                    self.args[k].copy_(after)
            set_states(states)


def set_states(states: Sequence[torch.Tensor]) -> None:
    torch.set_rng_state(states[0])
    if len(states) > 1:
        torch.cuda.set_rng_state(states[1])


def _version(tensor: Any) -> int:
    """Version of the values of a tensor; 0 for anything else. An optimizer changes the local part of a parameter."""
    if not isinstance(tensor, torch.Tensor):
        return 0
    part = tensor._local_tensor if isinstance(tensor, DTensor) else tensor
    return 0 if part.is_inference() else part._version


def _may_be_changed(x: Any) -> bool:
    return type(x) is torch.Tensor and not x.requires_grad and not x.is_inference() and x.nbytes <= SMALL_BYTES


def edges_of(node: Any) -> list[Any]:
    """For each edge of the autograd node of a compiled graph, a key of where its gradient goes, that is the same for another
    call on the same inputs."""
    return [_key(*edge) for edge in node.next_functions]


def _key(function: Any, number: int) -> Any:
    if function is None:
        return None
    if hasattr(function, "variable"):
        return id(function.variable)
    if is_to_local(function):
        return id(function.placed[number])
    if (found := output_of_part(function, number)) is not None:
        edge, spec = found
        return _key(*edge), spec.placements
    return id(function), number


