"""DTensor internals, for parameters that are DTensors (hpml_compiler/runtime)."""
from __future__ import annotations

import contextlib
import copy
import functools
import sys
from collections.abc import Callable, Iterable
from typing import Any, cast

import torch

from passes.compat.patching.patches import replace_for_good
from passes.session_state import state_of

plain_torch_functions = torch._C.DisableTorchFunctionSubclass
"""Context in which `__torch_function__` of subclasses is not called; only modes have a public one."""
script_torch_functions: Any = torch._C._EnableTorchFunction
"""The contrary: a context in which subclasses see the calls of functions, as in a script."""


def with_dispatch() -> Any:
    """Context in which `__torch_dispatch__` of subclasses is called, even inside `torch.tensor([x])`, which reads the number
    of `x` with that switched off: an unfinished collective's result would be read from memory that it lacks."""
    keys = torch._C.DispatchKey
    if not torch._C._dispatch_tls_is_dispatch_key_excluded(keys.Python):
        return contextlib.nullcontext()
    excluded = torch._C._dispatch_tls_local_exclude_set().remove(keys.Python).remove(keys.PythonTLSSnapshot)
    return torch._C._ForceDispatchKeyGuard(torch._C._dispatch_tls_local_include_set(), excluded)


def make_dtensor(kind: type, local: torch.Tensor, spec: Any, requires_grad: bool = False) -> Any:
    """A DTensor, or an instance of a subclass, from its local part and its spec (0.8 us).

    DTensor's public constructors derive and check the spec first, and cost 30 us and more.
    """
    return torch.Tensor._dtensor__new__(kind, local, spec, requires_grad=requires_grad)


def dtensor_spec(mesh: Any, placements: Any, like: torch.Tensor) -> Any:
    """The DTensorSpec of a tensor with the shape, strides and dtype of the whole tensor `like`."""
    from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

    return DTensorSpec(mesh, tuple(placements), tensor_meta=TensorMeta(like.shape, like.stride(), like.dtype))


class _InternedSpecs(dict[Any, Any]):
    """By mesh and spec, the spec that all equal ones are replaced by."""


def interned_spec(spec: Any) -> Any:
    """The interned spec equal to this one: parameters have interned specs, so that a guard need only compare identities."""
    return state_of(_InternedSpecs).setdefault((id(spec.mesh), spec), spec)  # equal meshes may be of other process groups


def renew_interned(specs: Iterable[Any]) -> None:
    """Replace interned specs by copies, for parameters that are placed from now on: they fail guards on the earlier ones."""
    state_of(_InternedSpecs).update(((id(spec.mesh), spec), copy.copy(spec)) for spec in specs)


def as_interned(spec: Any) -> Any:
    """The interned spec equal to this one if there is one, else this one."""
    return state_of(_InternedSpecs).get((id(spec.mesh), spec), spec)


def forget_interned_specs() -> None:
    """Clear the table, and what DTensor has cached by mesh: parameters placed from now on share nothing with earlier ones.

    A mesh equals another of the same ranks, also where this process's rank in it, or its process groups, are others: a result
    would have the mesh of before, and so the block of another rank.
    """
    state_of(_InternedSpecs).clear()
    if "torch.distributed.tensor" in sys.modules:
        from torch.distributed.tensor._api import DTensor
        from torch.distributed.tensor._redistribute import _gen_transform_infos

        cast("Any", DTensor)._op_dispatcher.sharding_propagator.propagate_op_sharding.cache_clear()
        getattr(torch._C, "_clear_DTensor_sharding_propagator_cache", lambda: None)()
        getattr(_gen_transform_infos, "cache_clear", lambda: None)()


def local_shape_and_offset(shape: Any, mesh: Any, placements: Any) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Shape of this rank's shard of a tensor, and its offset in the whole."""
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    return compute_local_shape_and_global_offset(shape, mesh, placements)


def norm_partial(order: float) -> Any:
    """The placement of norms of shards: reduced, they give the norm of the whole."""
    from torch.distributed.tensor._ops._math_ops import _NormPartial

    return _NormPartial(order)


def on_fully_shard(look: Callable[[Any], None]) -> None:
    """From now on, call `look` with each parameter that `fully_shard` is about to shard. Does nothing unless that
    is loaded."""
    if "torch.distributed.fsdp._fully_shard._fsdp_param" not in sys.modules:
        return

    def looking(original: Any) -> Any:
        if getattr(original, "looks", None) is look:
            return original

        @functools.wraps(original)
        def init(self: Any, param: Any, *args: Any, **kwargs: Any) -> None:
            look(param)
            original(self, param, *args, **kwargs)

        init.looks = look  # type: ignore[attr-defined]  # a function's own mark: a second call finds it
        return init

    replace_for_good({"FSDPParam.__init__": looking})


@functools.cache
def enable_subclass_dispatch() -> None:
    """From now on, call `__torch_dispatch__` of a DTensor subclass for the autograd engine's operations on gradients.

    Before torch 2.13, the C++ code for DTensors treats subclasses as DTensors; it checks a table of handlers first.
    """
    if tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 13):
        return
    from torch.distributed.tensor import DTensor

    def handled(op: Any, args: Any, kwargs: Any) -> Any:
        kind = next((type(value) for value in args if "__torch_dispatch__" in vars(type(value))
                     and type(value) is not DTensor), None)
        if kind is not None:
            return kind.__torch_dispatch__(op, (), args, kwargs)
        handlers: dict[Any, Any] = DTensor._op_dispatcher._custom_op_handlers  # pyright: ignore[reportAttributeAccessIssue]
        del handlers[op]
        try:
            return op(*args, **kwargs)
        finally:
            handlers[op] = handled

    aten = torch.ops.aten
    ops = aten.add.Tensor, aten.add_.Tensor, aten.detach.default, aten.clone.default, aten.copy_.default
    _handle(lambda handlers: dict.fromkeys(ops, handled) | handlers)


def register_scalar_reader(kind: type, whole: Callable[[Any], torch.Tensor]) -> None:
    """From now on, where torch reads a tensor of this kind as a number (`alpha=tensor`, `torch.full((2,), tensor)`), it reads
    `whole(tensor)`. `__torch_function__` is not called then, and DTensor gives this rank's shard, whatever its placement.
    """
    def read(op: Any, args: Any, kwargs: Any) -> Any:
        (tensor,) = args
        return op(whole(tensor) if isinstance(tensor, kind) else tensor._local_tensor)

    _handle(lambda handlers: {torch.ops.aten._local_scalar_dense.default: read})


def _handle(new: Callable[[dict[Any, Any]], dict[Any, Any]]) -> None:
    """Add handlers to DTensor's table, which torch's C++ code may hold: it stays the same dict."""
    def updated(handlers: dict[Any, Any]) -> dict[Any, Any]:
        handlers.update(new(handlers))
        return handlers

    replace_for_good({"DTensor._op_dispatcher._custom_op_handlers": updated})
