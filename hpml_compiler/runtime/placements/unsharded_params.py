"""Parameters that are stored in parts and held gathered: gathered at most once between two changes of them.

What is held is dropped as soon as the parameter changes: by an optimizer's step, and by whatever writes to its part or to
another tensor in the same memory (a view, `.data`, `detach()`) through `PlacedTensor` (`invalidate`). What writes to a rank's
part itself, as loading a checkpoint does, is seen by the count of changes that torch keeps, at the next use. Ranks that do the
same see the same, so all gather together.
"""
from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.fx import GraphModule

from hpml_compiler.runtime.placements.inner_shard import InnerShard, put_together
from hpml_compiler.runtime.watchdog.barrier_check import require_all_ranks
from passes import compat
from passes.graph.decision import Route

c10d = torch.ops._c10d_functional


@dataclass(slots=True)
class _UnshardedEntry:
    """One rank's part of a parameter, and what was gathered of it, by the axes that are gathered.

    alias: another tensor in its memory, which is thus not given to anything else while this counts on it.
    """

    ref: weakref.ref[torch.Tensor]
    alias: torch.Tensor
    versions: tuple[int, int]
    wholes: dict[tuple[int, ...], torch.Tensor] = field(default_factory=dict)


_parts: dict[int, _UnshardedEntry] = {}
"""By the id of the part."""
in_memory: dict[int, list[_UnshardedEntry]] = {}
"""By the address of the memory that they lie in. Empty where nothing is held: `invalidate` has nothing to do then."""


def invalidate(tensors: Iterable[torch.Tensor]) -> None:
    """These are about to be changed, or have been: what was gathered of them, or of others in the same memory, is dropped. So
    is everything where it cannot be told what memory a tensor has, as inside of `torch.func`."""
    if not in_memory:
        return
    with compat.plain_torch_functions():
        for tensor in tensors:
            part = tensor._local_tensor if isinstance(tensor, DTensor) else tensor
            if compat.is_fake(part):
                continue
            known = type(part) in (torch.Tensor, torch.nn.Parameter) and not compat.inside_transform()
            for found in in_memory.get(_address(part), ()) if known else tuple(_parts.values()):
                found.wholes.clear()


def cached_unsharded(parameters: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """What is held now of these parameters besides their parts."""
    locals_of = (parameter._local_tensor for parameter in parameters if isinstance(parameter, DTensor))
    found = (_parts.get(id(part)) for part in locals_of)
    return [whole for part in found if part is not None for whole in part.wholes.values()]


def _address(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr() if tensor.layout is torch.strided else 0


@dataclass(frozen=True)
class GatheredInput:
    """A parameter that a graph takes gathered. position: among the graph's arguments. axes: of the mesh, in their order."""

    position: int
    axes: tuple[int, ...]

    @staticmethod
    def along(route: Route, position: int) -> GatheredInput:
        """route: the layouts in which it is gathered, one after another."""
        return GatheredInput(position, tuple(
            next(a for a, (p, q) in enumerate(zip(route.layout(k), route.layout(k + 1), strict=True)) if p != q)
            for k in range(len(route.hops))))


class UnshardedInputs:
    """What one compiled graph takes gathered.

    `take` is called before each call of the graph, with its arguments. The graph itself is given parts, to which gradients
    belong; forward, which `around` wraps, gets what was gathered in their place.
    """

    def __init__(self) -> None:
        self._positions: dict[str, int] = {}
        self._axes: list[tuple[int, ...]] = []
        self._given: list[torch.Tensor] = []

    def __bool__(self) -> bool:
        return bool(self._positions)

    def note(self, held: Mapping[str, GatheredInput]) -> None:
        """held: by placeholder."""
        self._positions = {name: each.position for name, each in held.items()}
        self._axes = [each.axes for each in held.values()]

    def take(self, arguments: Sequence[Any]) -> None:
        self._given = unsharded([arguments[position] for position in self._positions.values()], self._axes)

    def around(self, gm: GraphModule, call: Callable[[list[Any]], Any]) -> Callable[[list[Any]], Any]:
        """gm: forward, as it is compiled; `call` takes its arguments as one list."""
        order = {node.name: place for place, node in enumerate(gm.graph.find_nodes(op="placeholder"))}
        places = [order[name] for name in self._positions]
        if not places:
            return call

        def with_gathered(arguments: list[Any]) -> Any:
            given, self._given = self._given, []
            for place, whole in zip(places, given, strict=True):
                arguments[place] = whole
            return call(arguments)

        with_gathered._boxed_call = True  # type: ignore[attr-defined]  # how AOTAutograd knows
        return with_gathered


def unsharded(parameters: Sequence[DTensor], axes: Sequence[tuple[int, ...]]) -> list[torch.Tensor]:
    """What is held of each parameter, gathered along so many axes of its mesh, in their order. What is missing, or was gathered
    before the part changed, is gathered now."""
    with compat.plain_torch_functions(), torch.inference_mode(False), torch.no_grad():
        parts = list(map(_part_of, parameters))
        missing = [k for k, part in enumerate(parts) if axes[k] not in part.wholes]
        if missing:
            require_all_ranks("gathering the parameters of the model")
            started = [_AsyncGather(parameters[k], axes[k]) for k in missing]
            for k, gathering in zip(missing, started, strict=True):
                parts[k].wholes[axes[k]] = gathering.result()
        return [part.wholes[wanted] for part, wanted in zip(parts, axes, strict=True)]


def _part_of(tensor: DTensor) -> _UnshardedEntry:
    """The record of a parameter's part as it is now: where that was changed, or is another, there is nothing in it."""
    part = tensor._local_tensor
    if part.is_inference() or tensor.is_inference():  # counts no changes, so nothing is held of it beyond this call
        return _UnshardedEntry(weakref.ref(part), part, (0, 0))
    key, versions = id(part), (tensor._version, part._version)
    known = _parts.get(key)
    if known is None or known.ref() is not part:
        known = _parts[key] = _UnshardedEntry(weakref.ref(part, functools.partial(_forget, key)), part.detach(), versions)
        _enter_memory(known)
    elif known.alias.data_ptr() != part.data_ptr():  # `p.data = ...`
        _leave_memory(known)
        known.alias, known.versions = part.detach(), versions
        _enter_memory(known)
    elif known.versions != versions:
        known.wholes.clear()
        known.versions = versions
    return known


def _forget(key: int, ref: Any) -> None:
    """A part is gone, and with it what was gathered of it."""
    known = _parts.get(key)
    if known is not None and known.ref is ref:
        del _parts[key]
        _leave_memory(known)


def _enter_memory(part: _UnshardedEntry) -> None:
    """In a new list: another may be forgotten at any moment, and the list that was there with it."""
    address = _address(part.alias)
    in_memory[address] = [*in_memory.get(address, ()), part]


def _leave_memory(part: _UnshardedEntry) -> None:
    part.wholes.clear()
    address = _address(part.alias)
    left = [each for each in in_memory.get(address, ()) if each is not part]
    if left:
        in_memory[address] = left
    else:
        in_memory.pop(address, None)


class _AsyncGather:
    """A gather that has begun. Along several axes, one follows the other."""

    def __init__(self, tensor: DTensor, axes: Sequence[int]) -> None:
        self.tensor, self.left = tensor, list(axes)
        self.have = tensor._local_tensor
        self.start()

    def start(self) -> None:
        """Parts come one after another along the first dim, so a dim that is split in blocks goes there."""
        axis = self.left.pop(0)
        mesh = self.tensor.device_mesh
        self.placement: Any = self.tensor.placements[axis]
        self.dim: int = 0 if isinstance(self.placement, InnerShard) else self.placement.dim
        self.ranks = mesh.size(axis)
        part = self.have.movedim(self.dim, 0).contiguous()
        self.begun = c10d.all_gather_into_tensor.default(part, mesh.size(axis), mesh.get_group(axis).group_name)

    def result(self) -> torch.Tensor:
        """In the order in memory that the graph was traced with: that of the whole parameter, packed if it is not whole yet."""
        while True:
            gathered = c10d.wait_tensor.default(self.begun)
            if isinstance(self.placement, InnerShard):
                self.have = put_together(gathered.unflatten(0, (self.ranks, -1)), self.placement)
            else:
                self.have = gathered.movedim(0, self.dim) if self.dim else gathered
            if not self.left:
                break
            self.start()
        whole = self.have.shape == self.tensor.shape
        strides = self.tensor.stride() if whole else torch.empty(self.have.shape, device="meta").stride()
        if not self.dim and self.have.stride() == strides:
            return self.have
        return self.have.new_empty_strided(self.have.shape, strides).copy_(self.have)
