"""Cache of unsharded parameters, valid until the sharded parameter changes (ZeRO-2).

An unsharded parameter is dropped as soon as the parameter changes: by an optimizer step, or by a write to its part or to
another tensor in the same memory (a view, `.data`, `detach()`) through `PlacedTensor` (`invalidate`). Direct writes to a
rank's part, as in loading a checkpoint, are detected by torch's version counters at the next use. Ranks that run the same
ops see the same changes, so all gather together.
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
from passes.session_state import state_of

c10d = torch.ops._c10d_functional


@dataclass(slots=True)
class _UnshardedEntry:
    """One rank's part of a parameter and its unsharded tensors, by the gathered axes.

    alias: another tensor in the part's memory, so that this memory is not reused while the entry refers to it.
    """

    ref: weakref.ref[torch.Tensor]
    alias: torch.Tensor
    versions: tuple[int, int]
    wholes: dict[tuple[int, ...], torch.Tensor] = field(default_factory=dict)


class UnshardedCache:
    """parts: entries by id of the part. in_memory: by address of the storage, the entries in it; empty if nothing is cached."""

    def __init__(self) -> None:
        self.parts: dict[int, _UnshardedEntry] = {}
        self.in_memory: dict[int, list[_UnshardedEntry]] = {}

    def entry_of(self, tensor: DTensor) -> _UnshardedEntry:
        """The entry of a parameter's current part; empty if the part was changed or replaced."""
        part = tensor._local_tensor
        if part.is_inference() or tensor.is_inference():  # no version counter, so not cached beyond this call
            return _UnshardedEntry(weakref.ref(part), part, (0, 0))
        key, versions = id(part), (tensor._version, part._version)
        known = self.parts.get(key)
        if known is None or known.ref() is not part:
            known = _UnshardedEntry(weakref.ref(part, functools.partial(self._forget, key)), part.detach(), versions)
            self.parts[key] = known
            self._enter_memory(known)
        elif known.alias.data_ptr() != part.data_ptr():  # `p.data = ...`
            self._leave_memory(known)
            known.alias, known.versions = part.detach(), versions
            self._enter_memory(known)
        elif known.versions != versions:
            known.wholes.clear()
            known.versions = versions
        return known

    def _forget(self, key: int, ref: Any) -> None:
        """Drop the entry of a part that was freed."""
        known = self.parts.get(key)
        if known is not None and known.ref is ref:
            del self.parts[key]
            self._leave_memory(known)

    def _enter_memory(self, part: _UnshardedEntry) -> None:
        """Add an entry. Makes a new list, since garbage collection may remove other entries at any moment."""
        address = _address(part.alias)
        self.in_memory[address] = [*self.in_memory.get(address, ()), part]

    def _leave_memory(self, part: _UnshardedEntry) -> None:
        part.wholes.clear()
        address = _address(part.alias)
        left = [each for each in self.in_memory.get(address, ()) if each is not part]
        if left:
            self.in_memory[address] = left
        else:
            self.in_memory.pop(address, None)


def invalidate(tensors: Iterable[torch.Tensor]) -> None:
    """Drop the unsharded tensors of parameters that change, or that share memory with changed tensors. Drops everything if a
    tensor's memory is unknown, as inside of `torch.func`."""
    cache = state_of(UnshardedCache)
    if not cache.in_memory:
        return
    with compat.plain_torch_functions():
        for tensor in tensors:
            part = tensor._local_tensor if isinstance(tensor, DTensor) else tensor
            if compat.is_fake(part):
                continue
            known = type(part) in (torch.Tensor, torch.nn.Parameter) and not compat.inside_transform()
            for found in cache.in_memory.get(_address(part), ()) if known else tuple(cache.parts.values()):
                found.wholes.clear()


def _address(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr() if tensor.layout is torch.strided else 0


@dataclass(frozen=True)
class GatheredInput:
    """A parameter that a graph takes unsharded. position: among the graph's arguments. axes: mesh axes, in gather order."""

    position: int
    axes: tuple[int, ...]

    @staticmethod
    def along(route: Route, position: int) -> GatheredInput:
        """Gather along the axis of each step of a route. route: the sequence of layouts from sharded to gathered."""
        return GatheredInput(position, tuple(
            next(a for a, (p, q) in enumerate(zip(route.layout(k), route.layout(k + 1), strict=True)) if p != q)
            for k in range(len(route.hops))))


class UnshardedInputs:
    """Unsharded inputs of one compiled graph.

    `take` is called with the graph's arguments before each call. The graph itself takes the parts, which get the gradients;
    the compiled forward, wrapped by `around`, gets the unsharded tensors in their place.
    """

    def __init__(self) -> None:
        self._positions: dict[str, int] = {}
        self._axes: list[tuple[int, ...]] = []
        self._given: list[torch.Tensor] = []

    def __bool__(self) -> bool:
        return bool(self._positions)

    def note(self, held: Mapping[str, GatheredInput]) -> None:
        """Set the unsharded inputs. held: name of the placeholder -> the input."""
        self._positions = {name: each.position for name, each in held.items()}
        self._axes = [each.axes for each in held.values()]

    def take(self, arguments: Sequence[Any]) -> None:
        self._given = unsharded([arguments[position] for position in self._positions.values()], self._axes)

    def around(self, gm: GraphModule, call: Callable[[list[Any]], Any]) -> Callable[[list[Any]], Any]:
        """Wrap the compiled forward so that it gets unsharded tensors. gm: forward as compiled. call: takes one list."""
        order = {node.name: place for place, node in enumerate(gm.graph.find_nodes(op="placeholder"))}
        places = [order[name] for name in self._positions]
        if not places:
            return call

        def with_gathered(arguments: list[Any]) -> Any:
            given, self._given = self._given, []
            for place, whole in zip(places, given, strict=True):
                arguments[place] = whole
            return call(arguments)

        return compat.mark_boxed(with_gathered)


def unsharded(parameters: Sequence[DTensor], axes: Sequence[tuple[int, ...]]) -> list[torch.Tensor]:
    """Each parameter gathered along the given axes of its mesh, from the cache where valid, else gathered now."""
    with compat.plain_torch_functions(), torch.inference_mode(False), torch.no_grad():
        parts = list(map(state_of(UnshardedCache).entry_of, parameters))
        missing = [k for k, part in enumerate(parts) if axes[k] not in part.wholes]
        if missing:
            require_all_ranks("gathering the parameters of the model")
            started = [_AsyncGather(parameters[k], axes[k]) for k in missing]
            for k, gathering in zip(missing, started, strict=True):
                parts[k].wholes[axes[k]] = gathering.result()
        return [part.wholes[wanted] for part, wanted in zip(parts, axes, strict=True)]


class _AsyncGather:
    """An all-gather in flight; several axes are gathered one after the other."""

    def __init__(self, tensor: DTensor, axes: Sequence[int]) -> None:
        self.tensor, self.left = tensor, list(axes)
        self.have = tensor._local_tensor
        self.start()

    def start(self) -> None:
        """Start the next all-gather. It concatenates along the first dim, so the sharded dim is moved there."""
        axis = self.left.pop(0)
        mesh = self.tensor.device_mesh
        self.placement: Any = self.tensor.placements[axis]
        self.dim: int = 0 if isinstance(self.placement, InnerShard) else self.placement.dim
        self.ranks = mesh.size(axis)
        part = self.have.movedim(self.dim, 0).contiguous()
        self.begun = c10d.all_gather_into_tensor.default(part, mesh.size(axis), mesh.get_group(axis).group_name)

    def result(self) -> torch.Tensor:
        """Wait for the result, with the strides the graph was traced with: the whole parameter's, or contiguous if still
        sharded along other axes."""
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
