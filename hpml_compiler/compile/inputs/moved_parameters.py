"""Parameters that get other placements, with their gradients and optimizer state: when a pipeline is cut anew, and where they
were loaded in shards that do not fit a graph.

They stay the same objects, in the script and in optimizers: only their parts and placements change.
"""
from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Placement

from hpml_compiler.runtime.dtensor.parameter_aliases import aliases_of
from hpml_compiler.runtime.dtensor.placed_tensor import PlacedTensor
from hpml_compiler.runtime.placements.shard_and_gather import place_again
from hpml_compiler.runtime.process.live_objects import live_objects
from hpml_compiler.runtime.process.world_group import from_all_ranks
from hpml_compiler.session import optimizer_lookup
from passes import compat
from passes.errors import HpmlError


class StageMoves:
    """Frames of Dynamo whose next compilation moves parameters to the stage that needs them; allowed: the one that runs does.
    Else another stage lends them."""

    is_of_models = True

    def __init__(self) -> None:
        self.frames: set[str] = set()
        self.allowed = False

    def ask(self, frame: str, parameters: Sequence[Any]) -> None:
        """Let Dynamo compile a frame again in its next call: guards compare the identity of these parameters' specs."""
        self.frames.add(frame)
        with compat.plain_torch_functions():
            compat.renew_interned([each._spec for each in parameters])
            for each in parameters:
                each._spec = compat.interned_spec(each._spec)

    @contextmanager
    def allowing(self, frame: str) -> Iterator[None]:
        """Context of a compilation of the frame."""
        self.allowed = frame in self.frames
        try:
            yield
        finally:
            self.frames.discard(frame)
            self.allowed = False


def move_parameters(moves: Sequence[tuple[Any, tuple[Placement, ...]]]) -> None:
    """Give placed parameters other placements. All ranks must call this together. Raises HpmlError where ranks have not the
    same tensors."""
    if not moves:
        return
    optimizers = optimizer_lookup.optimizer_of([parameter for parameter, _ in moves])
    with compat.outside_tracing(), compat.plain_torch_functions(), torch.no_grad():
        tensors = [each for parameter, placements in moves for each in _with_state(parameter, placements, optimizers)]
        known = from_all_ranks([name for name, _, _ in tensors])
        if any(each != known[0] for each in known):
            raise HpmlError("the optimizers of several ranks have other state for parameters that get another placement",
                            "moving them", "step all parameters on all ranks, after the model was compiled")
        for _, tensor, placements in tensors:
            place_again(tensor, placements)


def _with_state(parameter: Any, placements: Sequence[Placement], optimizers: Sequence[torch.optim.Optimizer],
                ) -> list[tuple[str, DTensor, tuple[Placement, ...]]]:
    """A parameter, its gradient and state with their names and new placements: on axes on which they are placed as the
    parameter, those of the parameter."""
    states = {f"{number}.{name}": value for number, each in enumerate(optimizers)
              for name, value in each.state.get(parameter, {}).items()}
    old = parameter.placements
    found = [(name, each, tuple(new if mine == before else mine
                                for mine, before, new in zip(each.placements, old, placements, strict=True)))
             for name, each in {"": parameter, "grad": parameter.grad, **states}.items()
             if isinstance(each, DTensor) and each.device_mesh == parameter.device_mesh]
    return [each for each in found if each[2] != each[1].placements]


def share_memory(parameters: Sequence[Any]) -> bool:
    """True if tensors of the script are in the memory of these parameters on some rank: these could not follow."""
    with compat.outside_tracing(), compat.plain_torch_functions():
        parts = [each._local_tensor for each in parameters]
        addresses = {each.untyped_storage().data_ptr() for each in parts if each.numel()}
        own = {id(each) for each in parameters}
        others = [each for each in live_objects(PlacedTensor) if id(each) not in own and not compat.is_fake(each._local_tensor)]
        views = any(each._local_tensor.untyped_storage().data_ptr() in addresses for each in others)
        return any(from_all_ranks(views or bool(aliases_of(parts))))
