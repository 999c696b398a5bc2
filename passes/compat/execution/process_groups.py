"""Process groups: timeouts, stores, and workarounds for collectives over gloo."""
from __future__ import annotations

import math
import socket
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any, cast

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.distributed_c10d import _get_default_store
from torch.utils import _pytree as pytree

from passes.compat.patching.patches import STORES, replace_for_good
from passes.errors import BadInput
from passes.session_state import state_of


def group_timeout(group: Any) -> timedelta:
    """Timeout of the collectives of a process group. Raises BadInput for one of torch's "fake" groups, which have none."""
    backend = next(iter({group._get_backend(device) for device in group._device_types}))
    if backend.options is None:
        raise BadInput(f"a {dist.get_backend(group)!r} process group sends nothing, so its ranks cannot agree on a plan",
                       where="torch.distributed's process group",
                       next_step="run on gloo or nccl; to plan for devices that are not there: `hpml plan --cluster`")
    return backend.options._timeout


def collectives_begun(name: str) -> int:
    """Number of collectives that this rank has started in the process group of this name."""
    group: Any = cast("Any", distributed_c10d)._resolve_process_group(name)
    return group._get_sequence_number_for_group()


def is_coalescing(group: Any) -> bool:
    """True if collectives of a process group are being collected by a `_coalescing_manager`; None is the group of all ranks."""
    world: Any = cast("Any", distributed_c10d)._world
    return (dist.group.WORLD if group is None else group) in world.pg_coalesce_state


def coordinate_in(name: str) -> int:
    """This rank's index in the process group of this name."""
    return int(cast("Any", distributed_c10d)._resolve_process_group(name).rank())


def ranks_in(name: str) -> int:
    """Number of ranks of the process group of this name."""
    return int(cast("Any", distributed_c10d)._resolve_process_group(name).size())


def registered_as(name: str, group: Any) -> str:
    """Register another name of a process group for functional collectives; replaces another group under that name.

    torch's names differ between groups of one axis, and so would graphs of equal ranks.
    """
    c10d: Any = torch._C._distributed_c10d  # type: ignore[attr-defined]
    try:
        known = c10d._resolve_process_group(name)
    except RuntimeError:  # nobody has it
        known = None
    if known is not group:
        if known is not None:
            c10d._unregister_process_group(name)
        c10d._register_process_group(name, group)
    return name


def subgroups_mesh(device_type: str, axes: Mapping[str, int], timeout: timedelta) -> DeviceMesh:
    """A mesh of all ranks, whose groups have this `timeout`; `init_device_mesh` would give them half an hour."""
    ranks = torch.arange(math.prod(axes.values())).view(*axes.values())
    own: list[Any] = []
    for axis in range(len(axes)):
        lines = ranks.movedim(axis, -1).reshape(-1, ranks.shape[axis]).tolist()
        own.append(dist.new_subgroups_by_enumeration(lines, timeout=timeout)[0])
    return DeviceMesh.from_group(own, device_type, ranks, mesh_dim_names=tuple(axes))


def side_store(prefix: str, timeout_s: float) -> Any:
    """The store of the group of all ranks, through a separate connection: a thread that waits for a key on the other one blocks
    all its users. None for a store that cannot be connected to twice."""
    c10d, store = cast("Any", torch.distributed), cast("Any", _get_default_store())
    while isinstance(store, c10d.PrefixStore):
        store = store.underlying_store
    if not isinstance(store, c10d.TCPStore):
        return None
    return c10d.PrefixStore(prefix, connect_to_store(store.host, store.port, timeout_s))


def connect_to_store(host: str, port: int, timeout_s: float = 60.0) -> Any:
    """A connection to the store that another process serves."""
    return cast("Any", dist).TCPStore(host, port, is_master=False, timeout=timedelta(seconds=timeout_s), wait_for_workers=False)


def loopback_store() -> Any:
    """A store that this process serves on a free port of 127.0.0.1 alone, for the processes that it starts."""
    return _store_on_loopback("127.0.0.1", 0, None, True, wait_for_workers=False)


def store_below(prefix: str, store: Any) -> Any:
    """The keys of a store that begin with a prefix."""
    return cast("Any", dist).PrefixStore(prefix, store)


_LOOPBACK = ("localhost", "127.0.0.1", "::1")


def open_stores_on_loopback() -> None:
    """From now on, stores that torchrun or `init_process_group` opens in this process for 127.0.0.1 listen there alone: a
    TCPStore listens on all interfaces."""
    replace_for_good({"DynamicRendezvousHandler._create_tcp_store_server": lambda _: _server_on_loopback})
    for module in STORES:
        replace_for_good({f"{module}.TCPStore": lambda _: _store_on_loopback})


def _server_on_loopback(_handler: Any, master_addr: str, master_port: int) -> Any:
    return _store_on_loopback(master_addr, master_port, is_master=True, multi_tenant=True)


def _store_on_loopback(host_name: str, port: int, world_size: int | None = None, is_master: bool = False, *args: Any,
                       **kwargs: Any) -> Any:
    if not is_master or host_name not in _LOOPBACK:
        return cast("Any", dist).TCPStore(host_name, port, world_size, is_master, *args, **kwargs)
    listening = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listening.bind(("127.0.0.1", port))
        listening.listen(1024)
    except OSError as error:  # as torch raises where a port is taken; torchrun then looks whether another has the store
        listening.close()
        raise RuntimeError(f"the store cannot listen on 127.0.0.1:{port}: {error}") from error
    port = listening.getsockname()[1]
    return cast("Any", dist).TCPStore(host_name, port, world_size, True, *args, **kwargs, master_listen_fd=listening.detach())


_FUNCTIONAL_COLLECTIVES = (
    "all_reduce", "all_reduce_", "all_reduce_coalesced", "all_reduce_coalesced_", "all_gather_into_tensor",
    "all_gather_into_tensor_out", "all_gather_into_tensor_coalesced", "reduce_scatter_tensor", "reduce_scatter_tensor_out",
    "reduce_scatter_tensor_coalesced", "all_to_all_single", "broadcast", "broadcast_",
)


class _CollectiveOverrides(dict[Any, torch.library.Library]):
    """Other implementations of functional collectives, which live as long as their library."""

    def close(self) -> None:
        for library in self.values():
            library._destroy()


def collectives_through_host(dispatch_key: str = "CUDA") -> None:
    """Until the session ends, functional collectives of CUDA tensors run on copies in host memory: for process groups on gloo.
    Its `all_gather_into_tensor` reads device memory as if it were host memory and the process dies
    (https://github.com/pytorch/pytorch/issues/152645); other ops are copied inside gloo anyway.
    """
    if (library := _new_override("through host", dispatch_key)) is None:
        return
    for name in _FUNCTIONAL_COLLECTIVES:
        if hasattr(torch.ops._c10d_functional, name):  # the *_out of reduce_scatter is younger than 2.11
            library.impl(name, through_host(getattr(torch.ops._c10d_functional, name).default), dispatch_key)


def _new_override(what: str, dispatch_key: str) -> torch.library.Library | None:
    """A library for implementations of functional collectives; None if there is one for this purpose."""
    overrides, key = state_of(_CollectiveOverrides), (what, dispatch_key)
    if key in overrides:
        return None
    overrides[key] = library = torch.library.Library("_c10d_functional", "IMPL")
    return library


def through_host(op: Any) -> Callable[..., Any]:
    """A functional collective on host copies of its tensors. It waits, so that there is nothing to wait for
    in the result; mutated arguments are copied back."""
    written = [each.name for each in op._schema.arguments if each.alias_info is not None and each.alias_info.is_write]
    names = [each.name for each in op._schema.arguments]

    def call(*args: Any, **kwargs: Any) -> Any:
        given = {**dict(zip(names, args)), **kwargs}
        device = next(x.device for x in pytree.tree_leaves(given) if isinstance(x, torch.Tensor))
        host = pytree.tree_map_only(torch.Tensor, lambda x: x.cpu(), given)
        positional = [host.pop(name) for name in names[:len(args)]]
        results = op(*positional, **host)
        results = pytree.tree_map_only(torch.Tensor, torch.ops._c10d_functional.wait_tensor.default, results)
        if not written:
            return pytree.tree_map_only(torch.Tensor, lambda x: x.to(device), results)
        (target,) = (given[name] for name in written)
        for mine, new in zip(pytree.tree_leaves(target), pytree.tree_leaves(results), strict=True):
            mine.copy_(new)
        return target

    return call


def use_single_gloo_allgather(dispatch_key: str = "CPU") -> None:
    """Until the session ends, a functional all_gather of CPU tensors is one `allgather` of gloo, not a coalesced one.

    The two threads of a gloo group write the name of their last operation into one std::string, without a lock
    (`ProcessGroupGloo::runLoop`, in torch 2.11 to 2.15 at least). "ALLGATHER_COALESCED" is too long for the small-string
    buffer, so two gathers that end at once free its memory twice: the heap is corrupt, and the process dies somewhere else,
    later. The names of all other ops in graphs fit: characters written twice do no harm.
    """
    if (library := _new_override("single gather", dispatch_key)) is not None:
        library.impl("all_gather_into_tensor", single_all_gather, dispatch_key)


def single_all_gather(tensor: torch.Tensor, group_size: int, group_name: Any) -> torch.Tensor:
    """Like `_c10d_functional.all_gather_into_tensor`: the result must be waited for."""
    out = tensor.new_empty((group_size * tensor.shape[0], *tensor.shape[1:]))
    packed = tensor.contiguous()  # torch 2.11 takes no other, such as a sharded output of another graph may be
    real, real_out = (torch.view_as_real(x) if x.is_complex() else as_transferable(x) for x in (packed, out))
    torch.ops._c10d_functional.all_gather_into_tensor_out.default(real, group_size, group_name, out=real_out)
    return out  # the work is registered by its memory


_KNOWN_TO_GLOO = frozenset((torch.uint8, torch.int8, torch.int32, torch.int64, torch.float16, torch.bfloat16, torch.float32,
                            torch.float64, torch.complex64, torch.complex128))


def as_transferable(tensor: torch.Tensor) -> torch.Tensor:
    """A packed tensor in a dtype that can be moved between ranks: its bytes where gloo does not support the dtype, such
    as float8 and int16 ("Invalid scalar type"), or not in all releases, such as bool. The same memory."""
    return tensor if tensor.dtype in _KNOWN_TO_GLOO else tensor.view(-1).view(torch.uint8)
