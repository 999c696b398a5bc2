"""PlacedTensor: a DTensor that single-device code may use as the full tensor."""
from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Placement, Replicate, Shard

from hpml_compiler.runtime.dtensor import foreach_ops
from hpml_compiler.runtime.dtensor.dispatch_table import (
    CASTS,
    COMPUTED_ATTRIBUTES,
    DIFFERENTIABLE,
    MEMORY,
    METADATA,
    NEW,
    NO_BACKWARD,
    NORMS,
    ON_DTENSORS,
    ON_LOCALS,
    VIEWS,
    in_place,
)
from hpml_compiler.runtime.dtensor.export_guard import cannot_export
from hpml_compiler.runtime.dtensor.gathered_views import ViewReplay, refresh, strided_replay
from hpml_compiler.runtime.dtensor.local_dispatch import try_local
from hpml_compiler.runtime.dtensor.op_dispatch import (
    VIEW_STEP,
    adopt,
    as_dtensors,
    changed_tensors,
    map_tensors,
    on_fakes,
    run_gathered,
    run_local,
    tensors_in,
)
from hpml_compiler.runtime.dtensor.parameter_aliases import note_given
from hpml_compiler.runtime.dtensor.script_collectives import MODULE, on_replicas
from hpml_compiler.runtime.dtensor.storage_access import of_memory, refused
from hpml_compiler.runtime.placements.accumulate_grad import note_eager_use
from hpml_compiler.runtime.placements.inner_shard import chunk_offsets, inner_axes, without_inner
from hpml_compiler.runtime.placements.shard_and_gather import local_shard, to_full_tensor, without_partial
from hpml_compiler.runtime.placements.single_rank_placement import as_at_owner, as_dtensor_knows, is_owner, unknown_to_dtensor
from hpml_compiler.runtime.placements.unsharded_params import UnshardedCache, invalidate
from hpml_compiler.runtime.watchdog.barrier_check import all_failed_or_none, refuse_single_sender, require_all_ranks
from hpml_compiler.runtime.watchdog.rank_status import RankStatus
from passes import compat
from passes.errors import HpmlError
from passes.session_state import state_of

log = logging.getLogger(__name__)


class PlacedTensor(DTensor):
    """A DTensor that mixes with plain tensors.

    Parameters, their gradients and optimizer state are PlacedTensors while a model is sharded. Unlike a DTensor, it acts as
    the full tensor in ops with plain tensors, in both directions, so that single-device scripts run unchanged.

    - Traced by Dynamo, it is the full tensor in every op, so recompiled graphs look like the first.
    - Changed in place (`p.copy_(plain)`, `p[0] = 0`), it keeps its placement and takes its part of the new value.
      So do its views.
    - In ops with plain tensors, it is gathered, differentiably. (Plain scalars that no gradient flows to do not count.)
    - Among DTensors it is a DTensor; an op that DTensor does not support runs on full tensors. Pointwise ops without
      autograd, on equal placements, run on the local parts directly, which is several times faster.
    - Pickled, it is the full tensor; copied by `copy.deepcopy`, it stays placed.

    As with every DTensor, all ranks must do the same, since some of this communicates.
    """

    __slots__ = ()

    @classmethod
    @compat.untraced
    def __torch_function__(cls, func: Callable[..., Any], types: Any, args: tuple = (),
                           kwargs: dict[str, Any] | None = None) -> Any:
        if len(types) > 1 and any(hasattr(kind, "record_of_calls") for kind in types):
            return NotImplemented  # that class records the call, or computes its operands
        if foreach_ops.is_composite(func):
            return func.__wrapped__(*args, **kwargs or {})  # comes back with the function that it calls
        name = getattr(func, "__name__", "")
        with compat.plain_torch_functions():
            if name == "__get__" and getattr(func.__self__, "__name__", "") not in COMPUTED_ATTRIBUTES:
                return adopt(func(*args), PlacedTensor)  # the autograd engine makes `.grad` a DTensor
            kwargs = kwargs or {}
            if state_of(RankStatus).failed and name not in METADATA | MEMORY and name != "__set__":
                all_failed_or_none()
            if name in ON_LOCALS:  # first, since optimizers call thousands of these
                if state_of(UnshardedCache).in_memory and in_place(name):
                    invalidate(changed_tensors(name, args, kwargs))
                result = try_local(func, name, args, kwargs)
                if result is not NotImplemented:
                    return result
            elif name in METADATA:
                return func(*args, **kwargs)
            elif name in MEMORY:
                return of_memory(func, name, args)
            elif name == "__set__":
                return _set_attribute(func, *args)
            return cls._route(func, name, args, kwargs)

    @classmethod
    def _route(cls, func: Callable[..., Any], name: str, args: tuple, kwargs: dict[str, Any]) -> Any:
        module = getattr(func, "__module__", None)
        operands = tensors_in((args, kwargs))
        placed = [operand for operand in operands if isinstance(operand, DTensor)]
        if not placed or module == "torch.autograd":
            return func(*args, **kwargs)
        if torch.is_grad_enabled():
            for operand in placed:
                if operand.requires_grad and operand.is_leaf:
                    note_eager_use(operand)
        if compat.is_fake(placed[0]._local_tensor):
            return on_fakes(func, args, kwargs)
        if module == MODULE:
            return on_replicas(func, args, kwargs)
        if name == "_amp_foreach_non_finite_check_and_unscale_":
            return foreach_ops.unscale(func, *args, **kwargs)
        if name in ("share_memory_", "is_shared"):  # shares each rank's part with the processes that the rank starts
            shared = func(args[0]._local_tensor)
            return shared if name == "is_shared" else args[0]
        changed = changed_tensors(name, args, kwargs)
        if changed and state_of(UnshardedCache).in_memory:
            invalidate(changed)
        plain = [operand for operand in operands if not isinstance(operand, DTensor)]
        if foreach_ops.is_foreach(name) and (changed or _tracked(plain) or any(operand.dim() for operand in plain)):
            results = cls._route_by_kind(func, name, args, kwargs)
            return args[0] if in_place(name) and args and results is not None else results
        if changed:
            return cls._change(func, name, args, kwargs, changed)
        if name == "__iter__":
            return iter(_view(torch.Tensor.unbind, "unbind", args, kwargs))
        if placed[0] is args[0] and (name in VIEWS or name == "__get__"):
            return _view(func, name, args, kwargs)
        if name in NEW and placed[0] is args[0]:
            return _new(func, *args, **kwargs)
        pending = any(p.is_partial() for p in placed[0].placements)
        if name == "detach" and placed[0] is args[0] and not pending:
            return _detached(args[0])
        if any(unknown_to_dtensor(operand.placements) for operand in placed):  # DTensor cannot run on these
            if name == "new_empty":  # of this class, as torch's stager of asynchronous checkpoints expects
                mesh = args[0].device_mesh
                return place(func(args[0]._local_tensor, *args[1:], **kwargs), mesh, [Replicate()] * mesh.ndim)
            return run_gathered(func, args, kwargs, gathered_view)
        if name in CASTS and placed[0] is args[0] and pending:
            return run_gathered(func, args, kwargs, gathered_view)  # it may share memory on one device
        alone = not _tracked(plain) and (name == "stack" or not any(operand.dim() for operand in plain))
        if name in NORMS and placed[0].dtype in (torch.bfloat16, torch.float16):
            alone = False  # norms of parts would be rounded before they are combined
        if alone and name in (DIFFERENTIABLE if _tracked(placed) else ON_DTENSORS):
            return as_dtensors(func, name, args, kwargs, PlacedTensor)
        return run_gathered(func, args, kwargs, gathered_view)

    @classmethod
    def _change(cls, func: Callable[..., Any], name: str, args: tuple, kwargs: dict[str, Any],
                changed: list[torch.Tensor]) -> Any:
        """Run an op that writes to these tensors, some of which may be plain."""
        if getattr(func, "__module__", None) == "torch.nn.init":  # these record no gradients
            with torch.no_grad():
                return run_gathered(func, args, kwargs)
        target = args[0] if args else None
        if torch.is_grad_enabled():
            _check_may_change(name, changed)
            if (target is changed[0] and len(changed) == 1 and isinstance(target, DTensor) and target.requires_grad
                    and not unknown_to_dtensor(target.placements)):
                return func(*args, **kwargs)  # DTensor's own, with autograd: placements match by the check above
        if name in ON_LOCALS and len(changed) == 1 and changed[0] is target and isinstance(target, PlacedTensor):
            result = run_local(func, args, kwargs)
            if result is not NotImplemented:
                return result
        return run_gathered(func, args, kwargs, gathered_view)

    @classmethod
    def _route_by_kind(cls, func: Callable[..., Any], name: str, args: tuple, kwargs: dict[str, Any]) -> Any:
        groups = foreach_ops.split_by_kind(name, args, kwargs)
        if all(groups):
            return foreach_ops.merge([
                (indices, cls._route_by_kind(func, name, tuple(foreach_ops.at(indices, value) for value in args),
                                             {key: foreach_ops.at(indices, value) for key, value in kwargs.items()}))
                for indices in groups
            ])
        if groups[1] or not in_place(name):
            return run_gathered(func, args, kwargs)
        placed_args, placed_kwargs = foreach_ops.like_targets(place_like, args, kwargs)
        result = try_local(func, name, tuple(placed_args), placed_kwargs) if name in ON_LOCALS else NotImplemented
        return run_gathered(func, args, kwargs) if result is NotImplemented else result

    def __tensor_flatten__(self) -> Any:
        if torch.compiler.is_exporting():
            raise cannot_export("torch.export")
        return DTensor.__tensor_flatten__(self)

    @classmethod
    def __tensor_unflatten__(cls, inner_tensors: Any, flatten_spec: Any, outer_size: Any, outer_stride: Any) -> Any:
        return adopt(DTensor.__tensor_unflatten__(inner_tensors, flatten_spec, outer_size, outer_stride), cls)

    def full_tensor(self, *, grad_placements: Any = None) -> torch.Tensor:
        if unknown_to_dtensor(self.placements):
            return to_full_tensor(self)
        return DTensor.full_tensor(self, grad_placements=grad_placements)

    def set_(self, source: Any = None, *args: Any, **kwargs: Any) -> Any:
        """Take this rank's part of the source, a full tensor. (torch does not dispatch this to `__torch_function__`.)"""
        if compat.is_tracing():  # Dynamo fakes the wrapper this way
            return DTensor.set_(self, source, *args, **kwargs)
        if compat.is_fake(self._local_tensor):  # torch.export fakes tensors that share memory this way
            raise cannot_export("torch.export, or another tracer that works on fake tensors")
        with compat.plain_torch_functions():
            if torch.is_grad_enabled():
                _check_may_change("set_", [self])
            if (args or kwargs or not isinstance(source, torch.Tensor) or source.shape != self.shape
                    or source.stride() != self.stride() or source.dtype != self.dtype):
                raise refused("it can only be assigned the memory of a tensor of the same shape, strides and dtype", self)
            if type(self) not in (PlacedTensor, GatheredView):
                raise refused("rows of a batch, and outputs of a model, cannot be assigned other memory", self)
            invalidate([self])
            if hasattr(self, VIEW_STEP):  # no longer a view
                delattr(self, VIEW_STEP)
            _set_data(None, self, to_full_tensor(source.detach()))
        return self

    def redistribute(self, *args: Any, **kwargs: Any) -> DTensor:
        target: Sequence[Placement] = kwargs.get("placements", args[1] if len(args) > 1 else None) or ()
        if not unknown_to_dtensor([*self.placements, *target]):
            return DTensor.redistribute(self, *args, **kwargs)
        if self.requires_grad and torch.is_grad_enabled():
            raise HpmlError(f"a tensor placed as {self.placements} cannot be redistributed with gradients",
                            f"a tensor of shape {tuple(self.shape)}", "use torch.no_grad(), or tensor.full_tensor()")
        if unknown_to_dtensor(target):
            return place(to_full_tensor(self), self.device_mesh, target)
        with compat.plain_torch_functions():
            return compat.make_dtensor(PlacedTensor, *as_dtensor_knows(self._local_tensor, self._spec)).redistribute(
                *args, **kwargs)

    def __create_write_items__(self, fqn: str, item: Any) -> Any:
        """For torch.distributed.checkpoint: each rank writes its shard, at its offset in the full tensor."""
        if not is_owner(self.device_mesh, self.placements):
            return []
        written: Any
        (written,) = _to_write(self).__create_write_items__(fqn, _to_write(item))
        return [replace(written, index=replace(written.index, offset=chunk.offsets),
                        tensor_data=replace(written.tensor_data, chunk=chunk)) for chunk, _ in _chunks(self)]

    def __create_chunk_list__(self) -> Any:
        return [chunk for chunk, _ in _chunks(self)] if is_owner(self.device_mesh, self.placements) else []

    def __get_tensor_shard__(self, index: Any) -> torch.Tensor:
        return next(part for chunk, part in _chunks(self) if index.offset is None or chunk.offsets == index.offset)

    def __deepcopy__(self, memo: dict[int, Any]) -> PlacedTensor:
        if id(self) in memo:
            return memo[id(self)]
        with compat.plain_torch_functions():
            if not self.is_leaf:
                raise RuntimeError("only tensors created by the user (leaves of the autograd graph) support deepcopy; "
                                   "detach() it first")
            result = compat.make_dtensor(type(self), self._local_tensor.clone(), self._spec, self.requires_grad)
            memo[id(self)] = result
            result.__dict__.update(copy.deepcopy(self.__dict__, memo))
            if self.grad is not None:
                result.grad = copy.deepcopy(self.grad, memo)
        return result

    def __copy__(self) -> PlacedTensor:
        with compat.plain_torch_functions():
            result = compat.make_dtensor(type(self), self._local_tensor.detach(), self._spec, self.requires_grad)
            result.__dict__.update(self.__dict__)
        return result

    def __reduce_ex__(self, protocol: Any) -> Any:
        if not all(placement.is_replicate() for placement in self.placements):
            refuse_single_sender()
            require_all_ranks("saving or copying (pickling) a tensor of the model", every=1)
        plain = to_full_tensor(self.detach())
        if isinstance(self, torch.nn.Parameter):
            plain = torch.nn.Parameter(plain, requires_grad=self.requires_grad)
        elif self.requires_grad:
            plain.requires_grad_()
        return plain.__reduce_ex__(protocol)

    def __format__(self, spec: str) -> str:
        return format(self.item(), spec) if self.dim() == 0 else object.__format__(self, spec)


def name_slots(kind: type) -> None:
    """Give a class without slots of its own the slot names of DTensor: torch's stager of asynchronous checkpoints copies the
    slots that a tensor's class names. (Declared in the class, they would be created a second time.)"""
    kind.__slots__ = DTensor.__slots__  # pyright: ignore[reportAttributeAccessIssue]


name_slots(PlacedTensor)
compat.register_foreach_type(PlacedTensor)
compat.register_scalar_reader(PlacedTensor, lambda tensor: to_full_tensor(tensor.detach()))


class GatheredView(PlacedTensor):
    """A view that had to be gathered, such as one row where rows are sharded.

    Writes to it reach its source; when the source changes, it is gathered again at its next use.
    """

    __slots__ = ()

    @classmethod
    @compat.untraced
    def __torch_function__(cls, func: Callable[..., Any], types: Any, args: tuple = (),
                           kwargs: dict[str, Any] | None = None) -> Any:
        name = getattr(func, "__name__", "")
        attribute = name == "__get__" and getattr(func.__self__, "__name__", "") not in COMPUTED_ATTRIBUTES
        if attribute or name in METADATA | MEMORY:
            return super().__torch_function__(func, types, args, kwargs)
        kwargs = kwargs or {}
        with compat.plain_torch_functions():
            for operand in tensors_in((args, kwargs)):
                if isinstance(operand, GatheredView):
                    refresh(operand)
            if name == "detach":
                return run_gathered(func, args, kwargs, gathered_view)
            if any(isinstance(operand, GatheredView) for operand in changed_tensors(name, args, kwargs)):
                if torch.is_grad_enabled():
                    _check_may_change(name, changed_tensors(name, args, kwargs))
                return run_gathered(func, args, kwargs, gathered_view)
        return super().__torch_function__(func, types, args, kwargs)


name_slots(GatheredView)


def gathered_view(source: DTensor, whole_value: torch.Tensor, value: torch.Tensor) -> PlacedTensor:
    """Wrap a view of the full value of `source` as a placed tensor that stays a view."""
    mesh, replicate = source.device_mesh, [Replicate()] * source.device_mesh.ndim
    view: Any = (DTensor.from_local(value, mesh, replicate, run_check=False) if value.requires_grad
                 else place(value, mesh, replicate))
    view.__class__ = PlacedTensor
    if not all(placement.is_replicate() for placement in source.placements) or hasattr(source, VIEW_STEP):
        view.__class__ = GatheredView
        setattr(view, VIEW_STEP, ViewReplay(source, strided_replay(value, whole_value)))
    return view


class _Alias(torch.autograd.Function):
    """A view of all of a tensor whose placement DTensor does not know."""

    @staticmethod
    def forward(ctx: Any, tensor: DTensor) -> Any:
        return compat.make_dtensor(PlacedTensor, tensor._local_tensor.detach(), tensor._spec)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> Any:
        return gradients[0]


def _to_write(tensor: DTensor) -> DTensor:
    """This rank's part of a tensor, as a DTensor with standard placements. Shares the part's storage."""
    with compat.plain_torch_functions():
        like = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
        return compat.make_dtensor(DTensor, tensor._local_tensor, compat.dtensor_spec(
            tensor.device_mesh, without_inner(as_at_owner(tensor.placements)), like))


def _chunks(tensor: DTensor) -> list[tuple[Any, torch.Tensor]]:
    """For torch.distributed.checkpoint, this rank's blocks of the tensor, each with its offset in the local part."""
    written, local = _to_write(tensor), tensor._local_tensor
    (chunk,) = written.__create_chunk_list__()
    if not any(inner_axes(tensor.placements)):
        return [(chunk, local)]
    found = []
    for whole_offset, offset, sizes in chunk_offsets(tensor.placements, tensor.device_mesh, local.shape):
        part = local
        for dim, (start, size) in enumerate(zip(offset, sizes, strict=True)):
            part = part.narrow(dim, start, size)
        at = [start + more for start, more in zip(chunk.offsets, whole_offset, strict=True)]
        found.append((replace(chunk, offsets=torch.Size(at), sizes=torch.Size(sizes)), part))
    return found


def place(tensor: torch.Tensor, mesh: DeviceMesh, placements: Sequence[Placement]) -> PlacedTensor:
    """Shard a full plain tensor, equal on all ranks, as a PlacedTensor: each rank keeps its part; no communication.

    Not differentiable. If a rank's part is the full tensor, it shares the storage.
    """
    tensor = tensor.detach()
    spec = compat.dtensor_spec(mesh, placements, tensor)
    return compat.make_dtensor(PlacedTensor, local_shard(tensor, mesh, placements), spec)


def place_like(tensor: torch.Tensor, other: DTensor) -> torch.Tensor:
    """Place a full plain tensor like `other`, without a pending reduction; a DTensor is returned unchanged."""
    if isinstance(tensor, DTensor):
        return tensor
    return place(tensor, other.device_mesh, without_partial(other._spec, tensor).placements)


def in_place_of(gradient: torch.Tensor, tensor: DTensor) -> torch.Tensor:
    """Wrap a full plain gradient as a placed tensor in the same memory, so that a script that holds it, or its base,
    sees accumulated gradients, and its writes change the gradient. A DTensor is returned unchanged."""
    mesh = tensor.device_mesh
    return gradient if isinstance(gradient, DTensor) else place(gradient, mesh, [Replicate()] * mesh.ndim)


def _tracked(tensors: Sequence[torch.Tensor]) -> bool:
    return torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)


def _check_may_change(name: str, changed: Sequence[torch.Tensor]) -> None:
    for tensor in changed:
        if tensor.requires_grad and tensor.is_leaf:
            raise RuntimeError(f"{name} writes in place to a leaf of the autograd graph that requires a gradient; "
                               "use torch.no_grad()")


def _view(func: Callable[..., Any], name: str, args: tuple, kwargs: dict[str, Any]) -> Any:
    """Run a view op; a result that does not share the source's storage becomes a GatheredView."""
    source = args[0]
    if name == "__get__" and func.__self__.__name__ == "data" and not hasattr(source, VIEW_STEP) and not any(
            p.is_partial() for p in source.placements):
        return _detached(source)
    if name in ("view_as", "expand_as") and unknown_to_dtensor(source.placements) and _tracked([source]) and (
            source.shape == args[1].shape):
        return _Alias.apply(source)  # scripts and torch reach a leaf's AccumulateGrad node this way
    if name == "__getitem__" and _copies(args[1]):
        return run_gathered(func, args, kwargs)
    without_backward = name in NO_BACKWARD and _tracked([source])
    as_dtype = name == "view" and any(isinstance(value, torch.dtype) for value in (*args, *kwargs.values()))
    if not without_backward and not as_dtype and not hasattr(source, VIEW_STEP) and not unknown_to_dtensor(source.placements):
        result = _try_view(func, args, kwargs)
        address = source._local_tensor.untyped_storage().data_ptr()
        if result is not None and all(_is_view_at(address, view) for view in tensors_in(result)):
            for view in tensors_in(result):
                _share_version(view, source)
            return adopt(result, PlacedTensor)
    return run_gathered(func, args, kwargs, gathered_view)


def _detached(source: DTensor) -> PlacedTensor:
    """The source without autograd, in its memory, with its version counter, which DTensor's would not share."""
    return compat.make_dtensor(PlacedTensor, source._local_tensor.detach(), source._spec)


def _share_version(view: Any, source: DTensor) -> None:
    """Let the part of a view have the version counter of its source's: DTensor makes them where torch keeps none."""
    part, own = view._local_tensor, source._local_tensor
    if part is not own:
        view._local_tensor = own.detach().as_strided(part.shape, part.stride(), part.storage_offset())


def _try_view(func: Callable[..., Any], args: tuple, kwargs: dict[str, Any]) -> Any:
    """DTensor's view, or None. Views neither write nor draw random numbers, so the op may run again."""
    try:
        return func(*args, **kwargs)
    except dist.DistError:
        raise
    except Exception as refusal:
        log.debug("a view runs on the full tensor, because DTensor raised: %s", refusal)
        return None


def _is_view_at(address: int, view: torch.Tensor) -> bool:
    return (isinstance(view, DTensor) and view._local_tensor.untyped_storage().data_ptr() == address
            and all(type(placement) in (Shard, Replicate) for placement in view.placements))


def _copies(index: Any) -> bool:
    """True if indexing with it copies on one device too."""
    if isinstance(index, tuple):
        return any(map(_copies, index))
    return not (index is None or index is Ellipsis or isinstance(index, slice) or type(index) is int)


def _new(func: Callable[..., Any], tensor: DTensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    """A new tensor, placed like this one if the shapes are equal, else replicated. Replicated ones are placed too,
    because scripts that know DTensors mix them with DTensors of their own."""
    value = func(tensor._local_tensor, *map_tensors(to_full_tensor, args), **map_tensors(to_full_tensor, kwargs))
    if value.requires_grad or value.device != tensor._local_tensor.device or value.layout is not torch.strided:
        return value
    placements = without_partial(tensor._spec, tensor).placements
    return place(value, tensor.device_mesh, placements if value.shape == tensor.shape else [Replicate()] * len(placements))


def _set_attribute(func: Any, tensor: torch.Tensor, value: Any) -> None:
    """Assign a full plain tensor to `p.grad` or `p.data`: keeps this rank's part."""
    name = func.__self__.__name__
    if isinstance(tensor, PlacedTensor) and isinstance(value, torch.Tensor) and name in ("grad", "data"):
        if value.shape != tensor.shape:
            raise ValueError(f"a placed tensor keeps its shape: {tuple(tensor.shape)}, not {tuple(value.shape)}")
        if value.layout is not torch.strided:
            raise HpmlError(f"a placed tensor cannot be given a {value.layout} tensor", f"{name} of a parameter of shape "
                            f"{tuple(tensor.shape)}", "assign value.to_dense()")
        if name == "data":
            invalidate([tensor])
            with torch.no_grad():  # not of a detached value: DTensor of torch 2.15 would move one that a single rank has
                _set_data(func, tensor, to_full_tensor(value).detach())
            if not isinstance(value, DTensor):
                note_given(tensor, value)
            return
        value = in_place_of(value, tensor)
    func(tensor, value)


def _set_data(func: Any, tensor: PlacedTensor, value: torch.Tensor) -> None:
    spec = without_partial(tensor._spec, tensor) if value.dtype == tensor.dtype else compat.dtensor_spec(
        tensor.device_mesh, without_partial(tensor._spec, tensor).placements, value)
    part = local_shard(value, tensor.device_mesh, spec.placements)
    if value.dtype != tensor.dtype:  # the wrapper stores its dtype too
        func(tensor, compat.make_dtensor(PlacedTensor, part, spec))
        tensor._local_tensor = part
    else:
        tensor._local_tensor.data = part
        torch.autograd.graph.increment_version(tensor._local_tensor)
    tensor._spec = spec
