"""Custom ops that copy a saved value out of the device's memory and back, each as a start and a wait, like collectives.

    handle = offload_start(value)        forward: start a copy to offload memory
        handle = offload_wait(handle, value) forward: the copy is done, and the value may be freed
        value = fetch_start(handle, ...)     backward: start the copy back
        value = fetch_wait(value)            backward: the copy is done

The handle is saved in between: a one-byte tensor at the start of the offload memory that keeps all of it alive. So an
offloaded value lives exactly as long as autograd references it, and can be fetched any number of times.

On a GPU, copies run on a stream of their own. On a CPU they are done when the start returns.
"""
from __future__ import annotations

from collections.abc import Sequence

import torch

from passes.errors import HpmlError
from passes.session_state import state_of
from passes.transforms.memory.offload_storage import reserve, tensor_on

ANY_STRIDES = (torch.Tag.flexible_layout,)
"""Offloading copies anyway, from the strides that a compiler chose to those of the graph."""

torch.library.define("hpml::offload_start", "(Tensor value, SymInt[] stride, str folder) -> Tensor", tags=ANY_STRIDES)
torch.library.define("hpml::offload_wait", "(Tensor(a) handle, Tensor value) -> Tensor(a)", tags=ANY_STRIDES)
torch.library.define(
    "hpml::fetch_start", "(Tensor handle, SymInt[] size, SymInt[] stride, ScalarType dtype, Device device) -> Tensor")
torch.library.define("hpml::fetch_wait", "(Tensor(a) value) -> Tensor(a)")

hpml = torch.ops.hpml
OFFLOAD_START, OFFLOAD_WAIT = hpml.offload_start.default, hpml.offload_wait.default
FETCH_START, FETCH_WAIT = hpml.fetch_start.default, hpml.fetch_wait.default


class _PendingCopies:
    """Copies of one GPU in flight: by target address, the event of their end, and the device tensor. It is referenced here
    until then: if it were freed before, as after an error between start and wait, its memory could be reused while the copy
    still runs."""

    def __init__(self, device: torch.device):
        self.device, self.stream = device, torch.cuda.Stream(device)
        self.pending: dict[int, tuple[torch.cuda.Event, torch.Tensor]] = {}

    def start(self, target: torch.Tensor, source: torch.Tensor) -> None:
        self.stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self.stream):
            target.copy_(source, non_blocking=True)
            event = torch.cuda.Event()
            event.record(self.stream)
        self.pending = {address: each for address, each in self.pending.items() if not each[0].query()}
        self.pending[address_of(target)] = event, target if target.is_cuda else source

    def wait(self, target: torch.Tensor) -> None:
        event, _ = self.pending.pop(address_of(target), (None, None))
        if event is not None:
            torch.cuda.current_stream(self.device).wait_event(event)


class _OffloadStreams(dict[torch.device, _PendingCopies]):
    """By GPU; closing waits for their copies."""

    def close(self) -> None:
        for each in self.values():
            each.stream.synchronize()


def address_of(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def copy(target: torch.Tensor, source: torch.Tensor, device: torch.device) -> None:
    """device: of the tensor that is not offloaded."""
    if device.type == "cpu":
        target.copy_(source)
    else:
        streams = state_of(_OffloadStreams)
        if device not in streams:
            streams[device] = _PendingCopies(device)
        streams[device].start(target, source)


def wait(target: torch.Tensor, device: torch.device) -> None:
    streams = state_of(_OffloadStreams)
    if device in streams:
        streams[device].wait(target)


@torch.library.impl("hpml::offload_start", "default")
def _offload_start(value: torch.Tensor, stride: Sequence[int], folder: str) -> torch.Tensor:
    storage = reserve(value.numel() * value.element_size(), value.device, folder)
    copy(tensor_on(storage, value.dtype, value.shape, stride), value, value.device)
    return tensor_on(storage, torch.uint8, (1,), (1,))


@torch.library.impl("hpml::offload_wait", "default")
def _offload_wait(handle: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    wait(handle, value.device)
    return tensor_on(handle.untyped_storage(), torch.uint8, (1,), (1,))


@torch.library.impl("hpml::fetch_start", "default")
def _fetch_start(handle: torch.Tensor, size: Sequence[int], stride: Sequence[int], dtype: torch.dtype, device: torch.device,
                 ) -> torch.Tensor:
    value = torch.empty_strided(tuple(size), tuple(stride), dtype=dtype, device=device)
    storage = handle.untyped_storage()
    if storage.nbytes() < value.untyped_storage().nbytes():
        raise HpmlError("an offloaded value was copied without the memory behind it", "backward",
                        "leave saved_tensors_hooks that copy away, or offload")
    copy(value, tensor_on(storage, dtype, size, stride), device)
    return value


@torch.library.impl("hpml::fetch_wait", "default")
def _fetch_wait(value: torch.Tensor) -> torch.Tensor:
    wait(value, value.device)
    return value.view_as(value)


@torch.library.register_fake("hpml::offload_start")
def _fake_handle(value: torch.Tensor, stride: Sequence[int], folder: str) -> torch.Tensor:
    return torch.empty(1, dtype=torch.uint8, device="cpu")


@torch.library.register_fake("hpml::offload_wait")
def _fake_offload_wait(handle: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    return handle.view_as(handle)


@torch.library.register_fake("hpml::fetch_start")
def _fake_fetch(handle: torch.Tensor, size: Sequence[int], stride: Sequence[int], dtype: torch.dtype, device: torch.device,
                ) -> torch.Tensor:
    return torch.empty_strided(tuple(size), tuple(stride), dtype=dtype, device=device)


@torch.library.register_fake("hpml::fetch_wait")
def _fake_fetch_wait(value: torch.Tensor) -> torch.Tensor:
    return value.view_as(value)
