"""State of a run as of the last completed step, from which a step that was interrupted is repeated."""
from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import torch
import torch.distributed as dist
from torch.optim.optimizer import register_optimizer_step_pre_hook

from hpml_compiler.checkpoints.read_checkpoint import CheckpointReader
from hpml_compiler.checkpoints.run_state import RunState
from hpml_compiler.runtime.install.plain_parameters import is_whole
from hpml_compiler.runtime.optimizer.replica_averages import ReplicaAverages
from hpml_compiler.runtime.optimizer.resident_memory import local
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


@dataclass
class StepState:
    """State after a step without parameters and the optimizers' tensors. state: as JSON; tensors: copies by full name; own: of
    this rank alone. groups: options of the optimizers' groups. optimizers: all else of the optimizers, as JSON."""

    done: int
    state: dict[str, Any]
    groups: list[list[dict[str, Any]]]
    tensors: dict[str, torch.Tensor]
    own: dict[str, Any]
    optimizers: list[dict[str, Any]] | None = None

    def held(self, live: Mapping[str, torch.Tensor], ranks: Sequence[dict[str, Any]]) -> HeldState:
        """All of the state. live: parameters and the optimizers' tensors, whole. ranks: own states of the ranks."""
        assert self.optimizers is not None
        optimizers = [{**each, "groups": groups} for each, groups in zip(self.optimizers, self.groups, strict=True)]
        return HeldState(self.done, {**self.state, "optimizers": optimizers, "ranks": list(ranks)}, {**live, **self.tensors})


class KeptState:
    """State of a run when `done` steps were completed.

    Parameters and the optimizers' tensors are not copied: they change in an optimizer's step alone. All else is: whole buffers,
    random states, schedulers, position in the data, and what the script adds. `is_there` tells whether parameters and
    optimizers still are what they were. To be closed when the next one is made. identity: equal while tensors that are not
    copied have the same memory and placements. has_numbers: the optimizers' state has values that are no tensors.
    """

    def __init__(self, run: RunState, done: int) -> None:
        self._run, self._stepped = run, False
        changing = run.collect_changing()
        with compat.plain_torch_functions(), torch.no_grad():
            copies = {name: local(each).clone() for name, each in changing.tensors.items() if is_whole(each)}
            parts = [each for each in changing.tensors.values() if not is_whole(each)]
            live, self.has_numbers = _live_tensors(run)
            self.is_whole = not (parts or state_of(LowRankStates) or state_of(ReplicaAverages)) and all(map(is_whole, live))
            self._versions = [local(each)._version for each in live]
            self.identity = [(local(each).data_ptr(), each.shape, getattr(each, "_spec", None)) for each in (*live, *parts)]
        self._parts = {name for name in changing.tensors if name not in copies}
        self.step = StepState(done, changing.state, changing.groups, copies, changing.own)
        self._hook = register_optimizer_step_pre_hook(self._steps)

    @property
    def done(self) -> int:
        return self.step.done

    def _steps(self, *_: Any) -> None:
        self._stepped = True

    def close(self) -> None:
        self._hook.remove()

    def is_there(self) -> bool:
        """True if this rank has all of the state, unchanged. To be asked before parameters become plain."""
        if self._stepped or not self.is_whole or state_of(LowRankStates) or state_of(ReplicaAverages):
            return False
        with compat.plain_torch_functions():
            live, _ = _live_tensors(self._run)
            return all(map(is_whole, live)) and [local(each)._version for each in live] == self._versions

    def named(self) -> dict[str, torch.Tensor]:
        """Tensors that are not copied by full name: parameters, the optimizers' tensors, and sharded buffers."""
        tensors, state, _ = self._run.collect(compression=False)
        self.step.optimizers = state["optimizers"]
        live = {*self._parts, *(f"model/{name}" for name in self._run.parameter_names())}
        return {name: each for name, each in tensors.items()
                if name not in self.step.tensors and (name in live or name.startswith("optimizer"))}

    def held(self, own: Sequence[dict[str, Any]]) -> HeldState:
        """The state, when parameters are plain. own: states of the ranks that are there now."""
        return self.step.held(self.named(), own)


def _live_tensors(run: RunState) -> tuple[list[torch.Tensor], bool]:
    """Parameters and the optimizers' tensors, in one order, and whether the optimizers' state has other things, too."""
    found: list[torch.Tensor] = [*run.model.parameters()]
    has_numbers = False
    for optimizer in run.optimizers:
        for state in optimizer.state.values():
            for value in state.values() if isinstance(state, dict) else (state,):
                if isinstance(value, torch.Tensor):
                    found.append(value)
                else:
                    leaves = compat.pytree.tree_leaves(value)
                    found += [each for each in leaves if isinstance(each, torch.Tensor)]
                    has_numbers = True
    return found, has_numbers


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
