"""State of a run as of the last completed step, from which a step that was interrupted is repeated."""
from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import register_optimizer_step_pre_hook

from hpml_compiler.checkpoints.read_checkpoint import CheckpointReader
from hpml_compiler.checkpoints.run_state import RunState
from hpml_compiler.runtime.install.plain_parameters import is_whole
from hpml_compiler.runtime.optimizer.replica_averages import ReplicaAverages
from hpml_compiler.runtime.process.world_group import control_group, this_rank
from passes import compat
from passes.session_state import state_of
from passes.transforms.comm.low_rank_ops import LowRankStates


@dataclass
class HeldState:
    """State without files, in the form of a checkpoint. tensors: whole ones by full name. state: the rest, as JSON."""

    step: int
    state: dict[str, Any]
    tensors: dict[str, torch.Tensor] = field(default_factory=dict)

    def names(self, group: str) -> dict[str, tuple[torch.dtype, torch.Size]]:
        start = f"{group}/"
        return {name.removeprefix(start): (each.dtype, each.shape)
                for name, each in self.tensors.items() if name.startswith(start)}

    def described(self, name: str) -> tuple[torch.dtype, tuple[int, ...]]:
        return self.tensors[name].dtype, tuple(self.tensors[name].shape)

    def load(self, targets: Mapping[str, torch.Tensor]) -> None:
        with torch.no_grad():
            for name, target in targets.items():
                target.copy_(self.tensors[name])

    def restore(self, run: RunState) -> None:
        """Load it into the run's objects, whose parameters are plain."""
        run.restore(cast("CheckpointReader", self))


class KeptState:
    """State of a run when `done` steps were completed.

    Parameters and the optimizers' tensors are not copied: they change in an optimizer's step alone. All else is: buffers,
    random states, schedulers, position in the data, and what the script adds. `is_there` tells whether parameters and
    optimizers still are what they were. To be closed when the next one is made.
    """

    def __init__(self, run: RunState, done: int) -> None:
        self.done, self._run, self._stepped = done, run, False
        tensors, self._state, self.own = run.collect(compression=False)
        self._parameters = {f"model/{name}" for name, _ in run.model.named_parameters(remove_duplicate=False)}
        with compat.plain_torch_functions(), torch.no_grad():
            self.is_whole = all(map(is_whole, tensors.values())) and not (state_of(LowRankStates) or state_of(ReplicaAverages))
            self._copies = {name: _local(each).clone() for name, each in tensors.items() if not self._is_live(name)}
            self._versions = self._versions_of(tensors)
        self._hook = register_optimizer_step_pre_hook(self._steps)

    def _is_live(self, name: str) -> bool:
        return name.replace("_orig_mod.", "") in self._parameters or name.startswith("optimizer")

    def _versions_of(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, int]:
        return {name: _local(each)._version for name, each in tensors.items() if self._is_live(name)}

    def _steps(self, *_: Any) -> None:
        self._stepped = True

    def close(self) -> None:
        self._hook.remove()

    def is_there(self) -> bool:
        """True if this rank has all of the state, unchanged. To be asked before parameters become plain."""
        if self._stepped or not self.is_whole or state_of(LowRankStates) or state_of(ReplicaAverages):
            return False
        tensors, _, _ = self._run.collect(compression=False)
        with compat.plain_torch_functions():
            return all(map(is_whole, tensors.values())) and self._versions_of(tensors) == self._versions

    def held(self, own: Sequence[dict[str, Any]]) -> HeldState:
        """The state, when parameters are plain. own: states of the ranks that are there now."""
        tensors, _, _ = self._run.collect(compression=False)
        live = {name: each for name, each in tensors.items() if self._is_live(name)}
        return HeldState(self.done, {**self._state, "ranks": list(own)}, {**live, **self._copies})


def sent_from(source: int, held: HeldState | None) -> HeldState:
    """The state that rank `source` holds, on all ranks."""
    group = control_group()
    message: list[Any] = [None]
    if held is not None and this_rank() == source:
        message = [(held.step, held.state, {name: (each.dtype, each.shape) for name, each in held.tensors.items()})]
    dist.broadcast_object_list(message, source, group)
    step, state, described = message[0]
    mine = held.tensors if held is not None and this_rank() == source else {}
    result = HeldState(step, state, {})
    for name, (dtype, shape) in described.items():
        tensor = mine[name].detach().cpu().contiguous() if name in mine else torch.empty(shape, dtype=dtype)
        dist.broadcast(tensor, source, group)
        result.tensors[name] = tensor
    return result


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor
