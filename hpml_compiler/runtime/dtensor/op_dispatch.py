"""Routes of one eager op on placed tensors. No route runs an op twice if it may have written."""
from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Replicate

from hpml_compiler.runtime.dtensor.dispatch_table import WRITES_UNSEEN, in_place
from hpml_compiler.runtime.placements.shard_and_gather import local_shard, to_full_tensor, without_partial
from hpml_compiler.runtime.placements.unsharded_params import invalidate
from passes import compat

log = logging.getLogger(__name__)

AsView = Callable[[DTensor, torch.Tensor, torch.Tensor], Any]


def on_fakes(func: Callable[..., Any], args: tuple, kwargs: dict[str, Any]) -> Any:
    """Run the op on full fake tensors, for Dynamo."""
    return func(*map_tensors(to_full_tensor, args), **map_tensors(to_full_tensor, kwargs))


def run_gathered(func: Callable[..., Any], args: tuple, kwargs: dict[str, Any],
                 as_view: AsView | None = None, wholes: GatheredArguments | None = None) -> Any:
    """Run the op once on full plain tensors, as on one device.

    All writes of the op to placed tensors, by its name (`add_`), an option (`inplace=True`, `out=`) or as a side effect
    (running statistics, renormalized embeddings), are stored: each rank takes its part. If the op returns an argument, the
    placed tensor itself is returned. as_view(source, whole, view): wraps a result that shares the source's memory; without
    it, such a result is plain. wholes: records the full tensor of each placed one, for the caller.
    """
    wholes, name = wholes or GatheredArguments(), getattr(func, "__name__", str(func))
    result = func(*map_tensors(wholes.of, args), **map_tensors(wholes.of, kwargs))
    wholes.keep_changes(name)
    if name in ("numpy", "__array__") and not wholes.are_live:
        result.setflags(write=False)  # the array is a copy: writes would not reach the tensor
    if name == "__dlpack__" and not wholes.are_live:
        _say_that_dlpack_copies()
    return _map_results(lambda value: wholes.original(value, as_view), result)


@functools.cache
def _say_that_dlpack_copies() -> None:
    log.warning("DLPack received a copy of a tensor that is sharded over the ranks: writes to the copy do "
                "not reach the tensor. Use tensor.copy_(values) to write to it")


class GatheredArguments:
    """The full tensors used for the placed operands of one op. make: how to get one, `gathered_value` by default.
    changed: those the op has written to."""

    def __init__(self, make: Callable[[DTensor], torch.Tensor] | None = None) -> None:
        self._make = make or gathered_value
        self._found: dict[int, tuple[DTensor, torch.Tensor, int, Any]] = {}
        self.changed: list[tuple[DTensor, torch.Tensor]] = []

    def __iter__(self) -> Iterator[tuple[DTensor, torch.Tensor]]:
        return iter([(tensor, value) for tensor, value, _, _ in self._found.values()])

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        if not isinstance(tensor, DTensor):
            return tensor
        found = self._found.get(id(tensor))
        if found is None:
            value = self._make(tensor)
            version = -1 if value.is_inference() else value._version
            found = self._found[id(tensor)] = tensor, value, version, value.grad_fn
        return found[1]

    @property
    def are_live(self) -> bool:
        """True if writes to the full tensors at any time reach the placed ones."""
        return all(placement.is_replicate() for tensor, *_ in self._found.values() for placement in tensor.placements)

    def keep_changes(self, name: str) -> None:
        for tensor, value, version, grad_fn in self._found.values():
            if name in WRITES_UNSEEN:  # statistics; for others, autograd would notice the write
                changed = not tensor.requires_grad
            else:
                counted = version >= 0 and not name.startswith("_fused_")  # torch does not count these
                changed = value._version != version if counted else in_place(name)
            if not changed:
                continue
            try:
                recorded = value.grad_fn is not grad_fn or (value.requires_grad and not tensor.requires_grad)
            except RuntimeError:  # raised by autograd for views that a Function made
                recorded = True
            if recorded:
                raise RuntimeError(f"{name} writes in place, with gradients recorded, to a tensor of a model that is split; "
                                   "use torch.no_grad(), or an out-of-place op (x = x + y)")
            with torch.no_grad():
                store_value(tensor, value)
            self.changed.append((tensor, value))

    def original(self, value: torch.Tensor, as_view: AsView | None) -> Any:
        for tensor, known, _, _ in self._found.values():
            if value is known:
                return tensor
            if as_view is not None and shares_memory(value, known):
                return as_view(tensor, known, value)
        return value


def gathered_value(tensor: DTensor) -> torch.Tensor:
    """The full tensor, with a version counter, which tensors of inference mode lack."""
    if not torch.is_inference_mode_enabled():
        return to_full_tensor(tensor)
    with torch.inference_mode(False), torch.no_grad():
        return to_full_tensor(tensor)


def shares_memory(a: torch.Tensor, b: torch.Tensor) -> bool:
    if a.layout != torch.strided or b.layout != torch.strided or isinstance(a, DTensor) or not b.numel():
        return False
    if compat.inside_transform():  # of torch.func, whose tensors have no memory to inspect
        return False
    return a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr()


def store_value(tensor: DTensor, value: torch.Tensor) -> None:
    """Write a full new value to a placed tensor; it keeps its placement, and a pending reduction is done.

    If it is a gathered view, its source is written too.
    """
    if value.shape != tensor.shape:
        raise RuntimeError(f"a placed tensor keeps its shape {tuple(tensor.shape)}; it cannot be changed in place to "
                           f"{tuple(value.shape)}. Make a new tensor instead")
    invalidate([tensor])
    tensor._local_tensor.copy_(local_shard(value, tensor.device_mesh, tensor.placements))
    tensor._spec = without_partial(tensor._spec, value)
    step = getattr(tensor, VIEW_STEP, None)
    if step is not None and not step.is_cut_off:
        step.write(value)
        step.note_version()


VIEW_STEP = "view_step"
"""Attribute of a gathered view: its recipe, a `gathered_views.ViewReplay`."""


def as_dtensors(func: Callable[..., Any], name: str, args: tuple, kwargs: dict[str, Any], kind: type) -> Any:
    """Run an op of `dispatch_table.ON_DTENSORS` on DTensors; if DTensor raises, run it on full tensors, which is safe:
    these ops neither write nor draw random numbers.

    Pending reductions are done first. DTensors in the result become `kind`, a subclass.
    """
    if name != "stack":  # of norms, in `clip_grad_norm_`: reduced together
        args, kwargs = map_tensors(_reduced, args), map_tensors(_reduced, kwargs)
    try:
        result = adopt(func(*args, **kwargs), kind)
    except dist.DistError:
        raise
    except Exception as refusal:
        log.debug("%s runs on full tensors, because DTensor raised: %s", name, refusal)
        return run_gathered(func, args, kwargs)
    if isinstance(result, DTensor) and result.requires_grad and (
            not result.dim() or any(p.is_partial() for p in result.placements)):
        return to_full_tensor(result)  # a loss: from here on, everything is as on one device
    return result


def _reduced(tensor: torch.Tensor) -> torch.Tensor:
    if not isinstance(tensor, DTensor) or not any(placement.is_partial() for placement in tensor.placements):
        return tensor
    placements = [Replicate() if placement.is_partial() else placement for placement in tensor.placements]
    return tensor.redistribute(tensor.device_mesh, placements)


def run_local(func: Callable[..., Any], args: tuple, kwargs: dict[str, Any]) -> Any:
    """Run a pointwise op that writes to its first argument, a placed tensor: each rank updates its part with its parts of
    the others. Returns NotImplemented, without writing, if that is not enough."""
    target = args[0]
    if any(placement.is_partial() for placement in target.placements):
        return NotImplemented
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors_in((args, kwargs))):
        return NotImplemented
    try:
        local_args = map_tensors(lambda tensor: _part_like(tensor, target), args[1:])
        local_kwargs = map_tensors(lambda tensor: _part_like(tensor, target), kwargs)
    except _DoesNotFit:
        return NotImplemented
    func(target._local_tensor, *local_args, **local_kwargs)
    return target


class _DoesNotFit(Exception):
    pass


def _part_like(tensor: torch.Tensor, target: DTensor) -> torch.Tensor:
    """The part of an operand that corresponds to this rank's part of the target."""
    if isinstance(tensor, DTensor):
        if tensor.shape == target.shape and tensor.device_mesh == target.device_mesh:
            if tensor.placements == target.placements:
                return tensor._local_tensor
            if all(placement.is_replicate() for placement in tensor.placements):
                return local_shard(tensor._local_tensor, target.device_mesh, target.placements)
            return tensor.redistribute(target.device_mesh, target.placements)._local_tensor
        tensor = to_full_tensor(tensor)
    if not tensor.dim():
        return tensor
    if tensor.dim() > target.dim() or any(
            ours != theirs and ours != 1 for ours, theirs in zip(tensor.shape[::-1], target.shape[::-1], strict=False)):
        raise _DoesNotFit
    return local_shard(tensor.expand(target.shape), target.device_mesh, target.placements)


def adopt(value: Any, kind: type) -> Any:
    """Convert DTensors in a result to the subclass, so that they may meet plain tensors too. Their spec becomes the object of
    parameters with an equal one: `model.float()` makes parameters of such results, and guards compare identities."""
    if type(value) is DTensor:
        value.__class__ = kind
        if not compat.is_fake(value._local_tensor):
            value._spec = compat.as_interned(value._spec)
    elif isinstance(value, (list, tuple)):
        for item in value:
            adopt(item, kind)
    return value


def tensors_in(value: Any) -> list[torch.Tensor]:
    """All tensors in nested lists, tuples and dicts."""
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, dict):
        value = value.values()
    elif not isinstance(value, (list, tuple)):
        return []
    return [tensor for item in value for tensor in tensors_in(item)]


def changed_tensors(name: str, args: tuple, kwargs: dict[str, Any]) -> list[torch.Tensor]:
    """The tensors that the op writes to, by its name and `out=`; none for an out-of-place op."""
    out = kwargs.get("out")
    if in_place(name):
        first = args[0] if args else next(iter(kwargs.values()), None)  # torch.nn.init passes all arguments by name
        return tensors_in((first, out))
    return [] if out is None else tensors_in(out)


def map_tensors(function: Callable[[torch.Tensor], torch.Tensor], value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return function(value)
    if isinstance(value, dict):
        return {key: map_tensors(function, item) for key, item in value.items()}
    if isinstance(value, list):  # Dynamo passes a list class of its own, which is immutable
        return [map_tensors(function, item) for item in value]
    if isinstance(value, tuple):
        items = [map_tensors(function, item) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    return value


def _map_results(function: Callable[[torch.Tensor], Any], value: Any) -> Any:
    """Map over the results of an op; torch's named tuples take one argument, a sequence."""
    if isinstance(value, torch.Tensor):
        return function(value)
    if isinstance(value, (list, tuple)):
        items = [_map_results(function, item) for item in value]
        if all(new is old for new, old in zip(items, value, strict=True)):
            return value
        return type(value)(items)
    return value


