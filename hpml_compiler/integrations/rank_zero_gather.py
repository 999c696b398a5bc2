"""Gather sharded state on rank 0, for libraries in which one rank writes the checkpoint."""
from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from hpml_compiler.runtime.placements.shard_and_gather import to_full_tensor
from hpml_compiler.runtime.process.world_group import control_group


def is_first_rank() -> bool:
    return not dist.is_initialized() or dist.get_rank() == 0


def barrier() -> None:
    """Wait for all ranks, so that files written by rank 0 are visible to all."""
    if dist.is_initialized():
        dist.barrier(group=control_group())


def gathered(nest: Any) -> Any:
    """Gather the placed tensors of a state dict (or any nest of dicts and lists) to whole plain CPU tensors on rank 0.

    All ranks must call it; other ranks get empty tensors. Tensors are gathered one at a time. Tensors that share memory,
    such as tied weights, still do. Other values stay as they are.
    """
    return _gathered(nest, {})


def _gathered(value: Any, known: dict[tuple, torch.Tensor]) -> Any:
    if isinstance(value, DTensor):
        local = value._local_tensor
        key = (local.data_ptr(), value.shape, value.stride(), value.dtype) if local.numel() else (id(value),)
        if key not in known:
            plain = to_full_tensor(value.detach())
            known[key] = plain.to("cpu", copy=True) if is_first_rank() else torch.empty(0, dtype=plain.dtype)
        return known[key]
    if isinstance(value, Mapping):
        result = {key: _gathered(item, known) for key, item in value.items()}
        return type(value)(result) if type(value) is not dict else result  # pyright: ignore[reportCallIssue]
    if type(value) in (list, tuple):
        return type(value)(_gathered(item, known) for item in value)
    return value


def holds_placed(nest: Any) -> bool:
    """True if a nest contains placed tensors."""
    return any(True for _ in _placed(nest))


def _placed(value: Any) -> Iterator[DTensor]:
    if isinstance(value, DTensor):
        yield value
    elif isinstance(value, (Mapping, list, tuple)):
        for item in value.values() if isinstance(value, Mapping) else value:
            yield from _placed(item)


@contextmanager
def gathered_states(optimizers: Any) -> Iterator[None]:
    """Context manager in which `state_dict()` of these optimizers returns the state gathered on entering. All ranks must
    enter it together."""
    with ExitStack() as stack:
        for optimizer in optimizers:
            optimizer = getattr(optimizer, "optimizer", optimizer)  # accelerate's wrapper
            state = gathered(optimizer.state_dict())
            stack.enter_context(_instead(optimizer, state))
        yield


@contextmanager
def _instead(optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> Iterator[None]:
    handle = optimizer.register_state_dict_post_hook(lambda _optimizer, _state: state)
    try:
        yield
    finally:
        handle.remove()
