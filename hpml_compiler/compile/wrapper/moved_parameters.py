"""Parameters of pipeline stages that move to other ranks, with gradients and optimizer state, when a pipeline is cut anew.

They stay the same objects, in the script and in optimizers: only their parts and placements change.
"""
from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from hpml_compiler.runtime.dtensor.parameter_aliases import aliases_of
from hpml_compiler.runtime.dtensor.placed_tensor import PlacedTensor
from hpml_compiler.runtime.placements.single_rank_placement import move_to_owner, owner_of
from hpml_compiler.runtime.process.live_objects import live_objects
from hpml_compiler.runtime.process.world_group import from_all_ranks
from hpml_compiler.session import optimizer_lookup
from passes import compat
from passes.errors import HpmlError


class StageMoves:
    """allowed: graphs that are compiled now move parameters to the stage that needs them; else another stage lends them."""

    def __init__(self) -> None:
        self.allowed = False

    @contextmanager
    def allowing(self) -> Iterator[None]:
        self.allowed = True
        try:
            yield
        finally:
            self.allowed = False


def move_to_stages(moves: Sequence[tuple[Any, int]]) -> None:
    """Move placed parameters to these ranks along the pipeline axis. All ranks must call this together. Raises HpmlError where
    ranks have not the same tensors."""
    if not moves:
        return
    optimizers = optimizer_lookup.optimizer_of([parameter for parameter, _ in moves])
    with compat.outside_tracing(), compat.plain_torch_functions(), torch.no_grad():
        tensors = [(name, tensor, rank) for parameter, rank in moves for name, tensor in _with_state(parameter, optimizers)]
        known = from_all_ranks([name for name, _, _ in tensors])
        if any(each != known[0] for each in known):
            raise HpmlError("the optimizers of several ranks have other state for parameters of a pipeline stage",
                            "moving them to another stage", "step all parameters on all ranks, or leave balance out")
        for _, tensor, rank in tensors:
            move_to_owner(tensor, rank)


def _with_state(parameter: Any, optimizers: Sequence[torch.optim.Optimizer]) -> list[tuple[str, DTensor]]:
    """The tensors of a parameter that the rank owns that has it, with their names."""
    states = {f"{number}.{name}": value for number, each in enumerate(optimizers)
              for name, value in each.state.get(parameter, {}).items()}
    named = {"": parameter, "grad": parameter.grad, **states}
    return [(name, each) for name, each in named.items() if owner_of(each) is not None]


def share_memory(parameters: Sequence[Any]) -> bool:
    """True if tensors of the script are in the memory of these parameters on some rank: these could not follow."""
    with compat.outside_tracing(), compat.plain_torch_functions():
        parts = [each._local_tensor for each in parameters]
        addresses = {each.untyped_storage().data_ptr() for each in parts if each.numel()}
        own = {id(each) for each in parameters}
        others = [each for each in live_objects(PlacedTensor) if id(each) not in own and not compat.is_fake(each._local_tensor)]
        views = any(each._local_tensor.untyped_storage().data_ptr() in addresses for each in others)
        return any(from_all_ranks(views or bool(aliases_of(parts))))
