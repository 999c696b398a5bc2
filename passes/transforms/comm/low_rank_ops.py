"""Operators of PowerSGD (Vogels et al., arXiv 1905.13727): a sum of matrices over ranks as a product of two thin ones.

    left, sum = low_rank_start(gradient, parameter, rank)        sum = gradient + error; left = sum @ basis
        left = all_reduce(left)
    left, right = low_rank_middle(left, sum)                     left has orthonormal columns; right = sum^T @ left
        right = all_reduce(right)
    result = low_rank_end(left, right, sum, parameter, ranks)    left @ right^T; error = sum - result / ranks; basis = right

Error and basis are state of the parameter: they are found by its memory, and live as long. The errors of the ranks add up to
what the result lacks of the sum of gradients, and only their sum matters. The first basis is drawn with a seed, the same on
every rank. Where a gradient is not finite, as under a GradScaler, the state stays as it was.
"""
from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from passes.graph.fx_nodes import memory_of
from passes.session_state import state_of

torch.library.define("hpml::low_rank_start", "(Tensor gradient, Tensor parameter, int rank, int ranks) -> (Tensor, Tensor)")
torch.library.define("hpml::low_rank_middle", "(Tensor left, Tensor sum) -> (Tensor, Tensor)")
torch.library.define(
    "hpml::low_rank_end", "(Tensor left, Tensor right, Tensor sum, Tensor parameter, int ranks, str group) -> Tensor")

c10d = torch.ops._c10d_functional
START, MIDDLE, END = (getattr(torch.ops.hpml, f"low_rank_{name}").default for name in ("start", "middle", "end"))


@dataclass
class LowRankState:
    """error: of this rank, shaped like its part of the parameter. basis: (columns, rank); None to begin anew. group: name of
    the process group whose errors add up; "" for a state from a checkpoint, whose error is already the sum."""

    error: torch.Tensor
    basis: torch.Tensor | None
    group: str = ""

    def total_error(self) -> torch.Tensor:
        """The sum over the group, which all its ranks must ask for."""
        return self.error if not self.group else c10d.wait_tensor(c10d.all_reduce(self.error, "sum", self.group))


class LowRankStates:
    """States by the memory of their parameters. restored: each gives away the state that a checkpoint has of a parameter."""

    is_of_models = True

    def __init__(self) -> None:
        self._found: dict[int, tuple[StorageWeakRef, LowRankState]] = {}
        self.restored: list[Callable[[torch.Tensor], LowRankState | None]] = []

    def __bool__(self) -> bool:
        return bool(self._found or self.restored)

    def of(self, parameter: torch.Tensor) -> LowRankState | None:
        place, state = self._found.get(_key(parameter), (None, None))
        if place is not None and not place.expired():  # else another tensor had its address
            return state
        state = next((found for each in self.restored if (found := each(parameter)) is not None), None)
        if state is not None:
            self.put(parameter, state)
        return state

    def put(self, parameter: torch.Tensor, state: LowRankState) -> None:
        key = _key(parameter)
        if key not in self._found or self._found[key][0].expired():
            self._found = {each: found for each, found in self._found.items() if not found[0].expired()}
            self._found[key] = StorageWeakRef(parameter.untyped_storage()), state
        self._found[key] = self._found[key][0], state

    def forget(self, parameter: torch.Tensor) -> None:
        self._found.pop(_key(parameter), None)


def _key(parameter: torch.Tensor) -> int:
    key = memory_of(parameter)
    assert key is not None, "it is a tensor"
    return key


def _matrix(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.reshape(tensor.shape[0], -1)


def _first_basis(like: torch.Tensor, rank: int) -> torch.Tensor:
    drawn = torch.randn(like.shape[1], rank, generator=torch.Generator().manual_seed(0), dtype=like.dtype)
    return drawn.to(like.device)


def _rank(shape: torch.Size, rank: int) -> int:
    return min(rank, shape[0], shape.numel() // shape[0])


@torch.library.impl("hpml::low_rank_start", "default")
def _start(gradient: torch.Tensor, parameter: torch.Tensor, rank: int, ranks: int) -> tuple[torch.Tensor, torch.Tensor]:
    state, rank = state_of(LowRankStates).of(parameter), _rank(gradient.shape, rank)
    total = gradient.contiguous().clone()
    if state is not None:
        total += state.error if state.group else state.error / ranks
    basis = None if state is None or state.basis is None or state.basis.shape[1] != rank else state.basis
    return _matrix(total) @ (_first_basis(_matrix(total), rank) if basis is None else basis), total


@torch.library.impl("hpml::low_rank_middle", "default")
def _middle(left: torch.Tensor, total: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    left = torch.linalg.qr(left).Q.contiguous()
    return left, _matrix(total).T @ left


@torch.library.impl("hpml::low_rank_end", "default")
def _end(left: torch.Tensor, right: torch.Tensor, total: torch.Tensor, parameter: torch.Tensor, ranks: int, group: str,
         ) -> torch.Tensor:
    result = (left @ right.T).view(total.shape)
    states = state_of(LowRankStates)
    before, finite = states.of(parameter), result.isfinite().all()
    error, basis = torch.zeros((), dtype=total.dtype, device=total.device), None
    if before is not None:
        error, basis = before.error if before.group else before.error / ranks, before.basis
    if basis is None or basis.shape != right.shape:
        basis = _first_basis(_matrix(total), right.shape[1])
    states.put(parameter, LowRankState(
        torch.where(finite, total - result / ranks, error), torch.where(finite, right, basis), group))
    return result


@torch.library.register_fake("hpml::low_rank_start")
def _fake_start(gradient: torch.Tensor, parameter: torch.Tensor, rank: int, ranks: int) -> tuple[torch.Tensor, torch.Tensor]:
    return gradient.new_empty(gradient.shape[0], _rank(gradient.shape, rank)), gradient.new_empty(gradient.shape)


@torch.library.register_fake("hpml::low_rank_middle")
def _fake_middle(left: torch.Tensor, total: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return left.new_empty(left.shape), left.new_empty(total.numel() // total.shape[0], left.shape[1])


@torch.library.register_fake("hpml::low_rank_end")
def _fake_end(left: torch.Tensor, right: torch.Tensor, total: torch.Tensor, parameter: torch.Tensor, ranks: int, group: str,
              ) -> torch.Tensor:
    return total.new_empty(total.shape)
