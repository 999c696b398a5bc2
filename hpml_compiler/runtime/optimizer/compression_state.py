"""State of PowerSGD in checkpoints: errors, summed over ranks and placed like parameters, and bases of whole parameters."""
from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Replicate

from hpml_compiler.runtime.dtensor.placed_tensor import PlacedTensor, place_like
from hpml_compiler.runtime.optimizer.resident_memory import local
from hpml_compiler.runtime.process.world_group import from_all_ranks
from passes import compat
from passes.graph.fx_nodes import memory_of
from passes.session_state import state_of
from passes.transforms.comm.low_rank_ops import LowRankState, LowRankStates

ERROR, BASIS = ".error", ".basis"


def compression_tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    """Errors and bases by name. All ranks must call it."""
    states, parameters = state_of(LowRankStates), dict(model.named_parameters())
    with compat.plain_torch_functions(), torch.no_grad():
        own = {name: found for name, each in parameters.items() if (found := states.of(local(each))) is not None}
        tensors: dict[str, torch.Tensor] = {}
        for name in sorted({name for names in from_all_ranks(list(own)) for name in names}):
            parameter = parameters[name]
            here = own.get(name)
            error = torch.zeros_like(local(parameter)) if here is None else here.total_error()  # of a stage of other ranks
            is_placed = isinstance(parameter, DTensor)
            tensors[name + ERROR] = compat.make_dtensor(PlacedTensor, error, parameter._spec) if is_placed else error
            whole = not is_placed or all(type(each) is Replicate for each in parameter.placements)
            if whole and here is not None and here.basis is not None:
                tensors[name + BASIS] = here.basis
        return tensors


def restore_compression(model: nn.Module, tensors: Mapping[str, torch.Tensor]) -> None:
    """Make the next step of the model continue from these; parameters may be placed until then."""
    states, remaining = state_of(LowRankStates), dict(tensors)
    with compat.plain_torch_functions():
        for parameter in model.parameters():
            states.forget(local(parameter))

    def find(part: torch.Tensor) -> LowRankState | None:
        with compat.plain_torch_functions():
            for name, parameter in model.named_parameters():
                if name + ERROR in remaining and memory_of(local(parameter)) == memory_of(part):
                    error, basis = remaining.pop(name + ERROR), remaining.pop(name + BASIS, None)
                    own = local(place_like(error, parameter) if isinstance(parameter, DTensor) else error)
                    return LowRankState(own, basis)
        return None

    states.restored = [find] if remaining else []
