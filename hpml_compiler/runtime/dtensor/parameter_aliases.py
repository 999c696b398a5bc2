"""Other tensors of the script in the memory of parameters and gradients, which parts of these would leave behind."""
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
from passes import compat
from passes.errors import HpmlError

log = logging.getLogger("hpml")

KINDS = frozenset((torch.Tensor, nn.Parameter, nn.Buffer))


def aliases_of(tensors: Sequence[torch.Tensor]) -> dict[int, list[torch.Tensor]]:
    """By the id of a tensor, the others in the process that lie in its memory, at least in part. Empty for most models."""
    found = _scan(tensors)
    if found:  # what only waits for Python's garbage collector, whose turns differ from rank to rank, does not count
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
    for other in [each for each in gc.get_objects() if type(each) in KINDS]:  # isinstance would wake up lazy proxies
        for tensor in by_storage.get(_address(other), ()):
            (start, end), (other_start, other_end) = _bytes_of(tensor), _bytes_of(other)
            if tensor is not other and start < other_end and other_start < end:
                found.setdefault(id(tensor), []).append(other)
    return found


def _address(tensor: torch.Tensor) -> int:
    """Of the storage; 0 of what has none, as the wrappers of a transform."""
    try:
        return tensor.untyped_storage().data_ptr() if tensor.layout is torch.strided and tensor.numel() else 0
    except RuntimeError:
        return 0


def _bytes_of(tensor: torch.Tensor) -> tuple[int, int]:
    """Addresses of the first byte and of the one after the last."""
    extent = 1 + sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.data_ptr(), tensor.data_ptr() + extent * tensor.itemsize


def is_same_view(alias: torch.Tensor, tensor: torch.Tensor) -> bool:
    """Whether it is a plain tensor that sees what the other one sees, as `p.detach()` does."""
    return (not isinstance(alias, nn.Parameter) and not alias.requires_grad and alias.dtype == tensor.dtype
            and alias.data_ptr() == tensor.data_ptr() and alias.shape == tensor.shape and alias.stride() == tensor.stride())


def inseparable(parameters: Sequence[torch.Tensor], inputs: Collection[int]) -> dict[int, torch.Tensor]:
    """By id, the parameters that cannot be stored in parts, and a tensor that would not follow them: another parameter, a flat
    buffer of all of them, a view of some rows. (A `p.detach()` that the script keeps is replaced as the parameter is.) inputs:
    ids of the tensors that the graph reads beside the parameters."""
    return {key: other for key, others in aliases_of(parameters).items()
            for parameter in parameters if id(parameter) == key
            for other in others if id(other) in inputs or not is_same_view(other, parameter)}


def held_gradients(parameters: Iterable[torch.Tensor]) -> set[int]:
    """Ids of the parameters whose gradients are something else to the script, too: a tensor that it has in a variable, a view
    of a flat buffer, the gradient of two parameters."""
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
    """How often its gradient is held, by Python and by torch."""
    return sys.getrefcount(parameter.grad), compat.use_count(parameter.grad)  # type: ignore[arg-type]


class _DataAlias:
    """Memory of the script's that was given to a parameter (`p.data = flat[:8]`), of which this one keeps its part: what is
    written to the one does not reach the other, as it does on one device."""

    def __init__(self, parameter: Any, value: torch.Tensor, memory: torch.Tensor) -> None:
        self.parameter, self.memory = weakref.ref(parameter), weakref.ref(memory)
        self.view = value.shape, value.stride(), value.storage_offset()
        self.versions = parameter._local_tensor._version, memory._version
        self.warned = False

    def check(self) -> bool:
        """Whether there is something to look at next time, too. Raises HpmlError where the script has written to its memory."""
        parameter: Any = self.parameter()
        memory = self.memory()
        if parameter is None or memory is None:
            return False
        where = f"a parameter of shape {tuple(parameter.shape)}, of which ranks keep parts"
        trained = parameter._local_tensor._version != self.versions[0]
        if trained and not self.warned:
            self.warned = True
            log.warning("%s was given memory of a tensor that the script still has (p.data = ...). That tensor does not follow "
                        "when the parameter changes: read the parameter", where)
        if memory._version != self.versions[1]:  # perhaps what was given to other parameters
            part = local_shard(memory.detach().as_strided(*self.view), parameter.device_mesh, parameter.placements)
            if trained or not torch.equal(part, parameter._local_tensor):
                raise HpmlError("memory that was given to a parameter (p.data = ...) has been changed since, which did not "
                                "reach the parameter", where, "change the parameter itself, with p.copy_(values); or give it "
                                "the memory before the model is compiled")
            self.versions = self.versions[0], memory._version
        return True


links: list[_DataAlias] = []


def note_given(parameter: Any, value: torch.Tensor) -> None:
    """Remembers, for `check_links`, that a placed parameter has been given a whole plain tensor of the script's."""
    links[:] = [link for link in links if (known := link.parameter()) is not None and known is not parameter]
    memory = value if value._base is None else value._base
    if not memory.is_inference() and _address(memory) != _address(parameter._local_tensor):
        links.append(_DataAlias(parameter, value, memory))


def check_links() -> None:
    """Before a compiled graph runs."""
    links[:] = [link for link in links if link.check()]
