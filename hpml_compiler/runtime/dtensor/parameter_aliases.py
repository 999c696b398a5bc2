"""Find tensors of the script that share memory with parameters or gradients, which sharding would leave behind."""
from __future__ import annotations

import gc
import logging
import sys
import weakref
from collections.abc import Collection, Iterable, Sequence
from typing import Any

import torch
from torch import nn

from hpml_compiler.runtime.placements.shard_and_gather import local_shard
from hpml_compiler.runtime.process.live_objects import live_objects
from passes import compat
from passes.errors import HpmlError
from passes.session_state import state_of

log = logging.getLogger("hpml")


def aliases_of(tensors: Sequence[torch.Tensor]) -> dict[int, list[torch.Tensor]]:
    """id of a tensor -> the other tensors of the process that overlap its memory. Empty for most models."""
    found = _scan(tensors)
    if found:  # tensors that only await garbage collection, which differs between ranks, do not count
        found.clear()
        gc.collect()
        found = _scan(tensors)
    return found


def _scan(tensors: Sequence[torch.Tensor]) -> dict[int, list[torch.Tensor]]:
    by_storage: dict[int, list[torch.Tensor]] = {}
    for tensor in tensors:
        by_storage.setdefault(_address(tensor), []).append(tensor)
    by_storage.pop(0, None)
    if not by_storage:
        return {}
    found: dict[int, list[torch.Tensor]] = {}
    for other in live_objects(torch.Tensor, nn.Parameter, nn.Buffer, exact=True):
        for tensor in by_storage.get(_address(other), ()):
            (start, end), (other_start, other_end) = _bytes_of(tensor), _bytes_of(other)
            if tensor is not other and start < other_end and other_start < end:
                found.setdefault(id(tensor), []).append(other)
    return found


def _address(tensor: torch.Tensor) -> int:
    """Address of the storage; 0 for tensors without one, such as wrappers of a transform."""
    try:
        return tensor.untyped_storage().data_ptr() if tensor.layout is torch.strided and tensor.numel() else 0
    except RuntimeError:
        return 0


def _bytes_of(tensor: torch.Tensor) -> tuple[int, int]:
    """Addresses of the first byte and past the last one."""
    extent = 1 + sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.data_ptr(), tensor.data_ptr() + extent * tensor.itemsize


def is_same_view(alias: torch.Tensor, tensor: torch.Tensor) -> bool:
    """True if `alias` is a plain tensor with the same memory, shape and strides, as `p.detach()` is."""
    return (not isinstance(alias, nn.Parameter) and not alias.requires_grad and alias.dtype == tensor.dtype
            and alias.data_ptr() == tensor.data_ptr() and alias.shape == tensor.shape and alias.stride() == tensor.stride())


def inseparable(parameters: Sequence[torch.Tensor], inputs: Collection[int]) -> dict[int, torch.Tensor]:
    """id of each parameter that cannot be sharded -> a tensor that would not follow it: another parameter, a flat buffer of
    all parameters, a view of some rows. (A `p.detach()` of the script is replaced together with the parameter.) inputs: ids
    of the tensors that the graph reads besides the parameters."""
    return {key: other for key, others in aliases_of(parameters).items()
            for parameter in parameters if id(parameter) == key
            for other in others if id(other) in inputs or not is_same_view(other, parameter)}


def held_gradients(parameters: Iterable[torch.Tensor]) -> set[int]:
    """Ids of the parameters whose gradients have other references in the script: a variable, a flat buffer that they are views
    of, or a second parameter."""
    with_gradient = [parameter for parameter in parameters if parameter.grad is not None]
    if not with_gradient:
        return set()
    probe = nn.Parameter(torch.zeros(1))
    probe.grad = torch.zeros(1)
    alone = _counts(probe)
    held = {id(parameter) for parameter in with_gradient if any(
        count > least for count, least in zip(_counts(parameter), alone, strict=True))}
    gradients = {id(parameter): parameter.grad for parameter in with_gradient if id(parameter) not in held}
    aliased = aliases_of(list(gradients.values()))  # type: ignore[arg-type]
    return held | {key for key, gradient in gradients.items() if id(gradient) in aliased}


def _counts(parameter: torch.Tensor) -> tuple[int, int]:
    """Reference counts of its gradient, in Python and in torch."""
    return sys.getrefcount(parameter.grad), compat.use_count(parameter.grad)  # type: ignore[arg-type]


class _DataAlias:
    """Memory of the script that was assigned to a parameter (`p.data = flat[:8]`). This rank has a copy of its part, so writes
    to one do not reach the other, as they would on one device."""

    def __init__(self, parameter: Any, value: torch.Tensor, memory: torch.Tensor) -> None:
        self.parameter, self.memory = weakref.ref(parameter), weakref.ref(memory)
        self.view = value.shape, value.stride(), value.storage_offset()
        self.versions = parameter._local_tensor._version, memory._version
        self.warned = False

    def check(self) -> bool:
        """True if it must be checked again next time. Raises HpmlError if the script has written to its memory."""
        parameter: Any = self.parameter()
        memory = self.memory()
        if parameter is None or memory is None:
            return False
        where = f"a parameter of shape {tuple(parameter.shape)}, sharded over the ranks"
        trained = parameter._local_tensor._version != self.versions[0]
        if trained and not self.warned:
            self.warned = True
            log.warning("%s was assigned the memory of a tensor that the script still references (p.data = ...). That tensor "
                        "is not updated when the parameter changes: read the parameter instead", where)
        if memory._version != self.versions[1]:  # perhaps the part assigned to other parameters
            part = local_shard(memory.detach().as_strided(*self.view), parameter.device_mesh, parameter.placements)
            if trained or not torch.equal(part, parameter._local_tensor):
                raise HpmlError("a tensor whose memory was assigned to a parameter (p.data = ...) was written, which does not "
                                "change the parameter", where, "write to the parameter, with p.copy_(values); or assign "
                                "the memory before the model is compiled")
            self.versions = self.versions[0], memory._version
        return True


class _DataAliases:
    """Those that `check_links` checks."""

    def __init__(self) -> None:
        self.links: list[_DataAlias] = []


def note_given(parameter: Any, value: torch.Tensor) -> None:
    """Record, for `check_links`, that a full plain tensor of the script was assigned to a placed parameter."""
    aliases = state_of(_DataAliases)
    aliases.links = [link for link in aliases.links if (known := link.parameter()) is not None and known is not parameter]
    memory = value if value._base is None else value._base
    if not memory.is_inference() and _address(memory) != _address(parameter._local_tensor):
        aliases.links.append(_DataAlias(parameter, value, memory))


def check_links() -> None:
    """Check the recorded aliases; called before a compiled graph runs."""
    aliases = state_of(_DataAliases)
    if aliases.links:
        aliases.links = [link for link in aliases.links if link.check()]
