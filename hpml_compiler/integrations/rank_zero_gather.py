"""What several ranks hold, whole on rank 0: for libraries in which one rank writes the checkpoint."""
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
    """Go on when all ranks are here: what rank 0 writes is then there for all."""
    if dist.is_initialized():
        dist.barrier(group=control_group())


def gathered(nest: Any) -> Any:
    """A state dict, or any nest of dicts and lists, with whole plain tensors on the CPU in the place of placed ones.

    All ranks call it; tensor by tensor, only rank 0 keeps what is gathered, the others get empty tensors there. Tensors that
    share memory, as tied weights do, still do. Everything else stays as it is.
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
    """Whether a nest has placed tensors."""
    return any(True for _ in _placed(nest))


def _placed(value: Any) -> Iterator[DTensor]:
    if isinstance(value, DTensor):
        yield value
    elif isinstance(value, (Mapping, list, tuple)):
        for item in value.values() if isinstance(value, Mapping) else value:
            yield from _placed(item)


@contextmanager
def gathered_states(optimizers: Any) -> Iterator[None]:
    """Inside, `state_dict()` of these optimizers is the whole state as it was at the start; all ranks enter together."""
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
