"""Collectives of torch.distributed that a script calls on placed tensors: they act as on full replicas.

They are intercepted in two places. Functions of torch.distributed dispatch on the class of their tensors (all of them in
recent releases of torch, `all_reduce` alone in 2.11), however the script imported them. All of them end in methods of
ProcessGroup, which scripts can call as well, so these are intercepted too.
"""
from __future__ import annotations

import functools
import inspect
import logging
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from hpml_compiler.runtime.dtensor.dispatch_table import COALESCED, OF_SOME_RANKS, REDUCTIONS, UNLIKE_RESULTS
from hpml_compiler.runtime.dtensor.op_dispatch import GatheredArguments, gathered_value, map_tensors, store_value, tensors_in
from hpml_compiler.runtime.dtensor.storage_access import is_everywhere
from passes import compat
from passes.errors import HpmlError

log = logging.getLogger(__name__)

MODULE = "torch.distributed.distributed_c10d"
"""Modules that define torch.distributed's functions."""


@functools.cache
def watch_collectives(kind: type) -> None:
    """Patch methods of process groups to run on the full tensors of placed tensors of this class."""
    for name in sorted(compat.PROCESS_GROUP_METHODS | compat.NEW_PROCESS_GROUP_METHODS):
        if name in compat.PROCESS_GROUP_METHODS or hasattr(dist.ProcessGroup, name):
            compat.replace_for_good({f"ProcessGroup.{name}": functools.partial(_watched, name, kind)})


def _watched(name: str, kind: type, method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def watched(group: Any, *args: Any, **kwargs: Any) -> Any:
        if not any(isinstance(tensor, kind) for tensor in tensors_in((args, kwargs))):
            return method(group, *args, **kwargs)
        call, output = functools.partial(method, group), next(iter((*args, *kwargs.values())))
        if name == "reduce":
            call = functools.partial(_reduce_for_all, group)
        with compat.plain_torch_functions():
            return _on_wholes(name, call, args, kwargs, output, group, gathered_value)

    return watched


def _reduce_for_all(group: Any, tensors: Any, options: Any) -> Any:
    for_all: Any = dist.AllreduceOptions()  # pyright: ignore[reportPrivateImportUsage]
    for_all.reduceOp, for_all.timeout = options.reduceOp, options.timeout
    return group.allreduce(tensors, for_all)


def on_replicas(func: Callable[..., Any], args: tuple, kwargs: dict[str, Any],
                make: Callable[[DTensor], torch.Tensor] = gathered_value) -> Any:
    """Run a function of torch.distributed on placed tensors. make: how to get the full tensor of one."""
    name = func.__name__
    given = dict(inspect.signature(func).bind(*args, **kwargs).arguments)
    output = given.get("gather_list") if name == "gather" else next(iter(given.values()))
    if name == "reduce":
        func = dist.all_reduce
        given = {key: value for key, value in given.items() if key not in ("dst", "group_dst")}
    return _on_wholes(name, func, (), given, output, given.get("group"), make)


def _on_wholes(name: str, call: Callable[..., Any], args: tuple, kwargs: dict[str, Any], output: Any, group: Any,
               make: Callable[[DTensor], torch.Tensor]) -> Any:
    """Run the call on full tensors. Once it is done, every rank keeps its part of the results.

    output: the argument that the collective writes to.
    """
    placed = [tensor for tensor in tensors_in((args, kwargs)) if isinstance(tensor, DTensor)]
    written = [] if name in ("send", "isend") else [t for t in tensors_in(output) if isinstance(t, DTensor)]
    _check(name, placed, written, group)
    if name in REDUCTIONS:
        _say_that_gradients_are_global()
    wholes = GatheredArguments(lambda tensor: make(tensor).contiguous())  # gloo writes wrong elements of non-contiguous ones
    with torch.no_grad():
        result = call(*map_tensors(wholes.of, args), **map_tensors(wholes.of, kwargs))
    targets = {id(tensor) for tensor in written}

    def keep_all() -> None:
        with torch.no_grad(), compat.plain_torch_functions():
            for tensor, value in wholes:
                if id(tensor) in targets:
                    store_value(tensor, value)

    if isinstance(result, dist.Work):
        return _WriteBackWork(result, keep_all)
    keep_all()
    return result


def _check(name: str, placed: Iterable[DTensor], written: list[DTensor], group: Any) -> None:
    parts = next((tensor for tensor in placed if not is_everywhere(tensor)), None)
    if written and name in UNLIKE_RESULTS:
        raise HpmlError(f"{name} writes a different result on each rank, but a tensor of a sharded model has one value on all "
                        "ranks", _described(written[0]), "pass a plain tensor to write to, such as torch.empty(shape)")
    if parts is None:
        return
    if name in COALESCED or compat.is_coalescing(group):
        raise HpmlError("a coalescing manager cannot write back to a tensor that is sharded over the ranks",
                        _described(parts), "call the collective outside of it")
    of_some = group is not None and (not isinstance(group, dist.ProcessGroup) or group.size() < dist.get_world_size())
    if name in OF_SOME_RANKS or of_some:
        raise HpmlError(f"not all ranks call {name} with this tensor, which is sharded over all ranks: "
                        "gathering it would wait for the others", _described(parts), "on all ranks, gather it first: "
                        "full = tensor.full_tensor(); and receive into a plain tensor, then tensor.copy_(received) on all "
                        "ranks")


def _described(tensor: DTensor) -> str:
    return f"a tensor of shape {tuple(tensor.shape)}, placed as {tuple(map(str, tensor.placements))}"


@functools.cache
def _say_that_gradients_are_global() -> None:
    if dist.get_rank() == 0:
        log.warning("torch.distributed reduces a tensor of a sharded model as if it were replicated. Gradients already are "
                    "those of the global batch on every rank: averaging them over the ranks changes nothing, and summing them "
                    "multiplies them by the number of ranks")


class _WriteBackWork(dist.Work):
    """A pending collective that writes its results back once it is waited for, or is completed. Keeps its tensors alive."""

    def __init__(self, work: Any, keep_all: Callable[[], None]) -> None:
        super().__init__()
        self._work, self._keep_all = work, functools.cache(keep_all)

    def _after(self, result: Any) -> Any:
        self._keep_all()
        return result

    def wait(self, *args: Any, **kwargs: Any) -> Any:
        return self._after(self._work.wait(*args, **kwargs))

    def synchronize(self) -> None:
        self._after(self._work.synchronize())

    def block_current_stream(self) -> None:
        self._after(self._work.block_current_stream())

    def is_completed(self) -> bool:
        return bool(self._work.is_completed() and self.wait())

    def get_future(self) -> Any:
        return self._work.get_future().then(lambda future: self._after(future.value()))

    def is_success(self) -> bool:
        return self._work.is_success()

    def exception(self) -> Any:
        return self._work.exception()

    def result(self) -> Any:
        return self._work.result()

    def source_rank(self) -> int:
        return self._work.source_rank()

    def _source_rank(self) -> int:
        return self._work._source_rank()
