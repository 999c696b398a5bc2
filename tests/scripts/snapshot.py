"""A script's results and side effects as one flat list of names and plain values."""
from __future__ import annotations

import dataclasses
import hashlib
import math
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

Leaf = tuple[str, Any]


def snapshot(value: Any) -> list[Leaf]:
    """Every tensor and number in `value`, with the way to it. DTensors are gathered, so all ranks must call this."""
    return list(_leaves("seen", value))


def _leaves(path: str, value: Any) -> Iterator[Leaf]:
    value = getattr(value, "_orig_mod", value)
    if isinstance(value, nn.Module):
        yield from _of_module(path, value)
    elif isinstance(value, torch.optim.Optimizer):
        yield from _leaves(f"{path}.optimizer", value.state_dict())
    elif isinstance(value, torch.Tensor):
        yield path, _plain(value)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        yield from _leaves(path, vars(value))
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from _leaves(f"{path}.{key}", item)
    elif isinstance(value, (list, tuple)):
        yield f"{path}.length", len(value)
        for index, item in enumerate(value):
            yield from _leaves(f"{path}[{index}]", item)
    elif isinstance(value, (int, float, complex, str, bool, type(None), torch.dtype, torch.Size)):
        yield path, value
    else:
        raise TypeError(f"a use returned a {type(value).__name__} at {path}")


def _of_module(path: str, module: nn.Module) -> Iterator[Leaf]:
    for name, parameter in module.named_parameters(remove_duplicate=False):
        yield f"{path}.{name}", _plain(parameter)
        yield f"{path}.{name}.requires_grad", parameter.requires_grad
        yield f"{path}.{name}.grad", None if parameter.grad is None else _plain(parameter.grad)
    for name, buffer in module.named_buffers():
        yield f"{path}.{name}", _plain(buffer)


def _plain(tensor: torch.Tensor) -> torch.Tensor:
    tensor = tensor.detach()
    if isinstance(tensor, DTensor):
        tensor = tensor.full_tensor()
    return (tensor.to_dense() if tensor.layout != torch.strided else tensor).clone()


def difference(ours: list[Leaf], theirs: list[Leaf], tolerance: float) -> str | None:
    """The first leaf that differs, in words; None if all agree."""
    expected = dict(theirs)
    names = [name for name, _ in ours]
    if sorted(names) != sorted(expected):
        extra, missing = sorted(set(names) - set(expected)), sorted(set(expected) - set(names))
        return f"other things were seen: {extra[:5]} too many, {missing[:5]} missing"
    found = [(name, words) for name, value in ours if (words := _differs(value, expected[name], tolerance))]
    if not found:
        return None
    return f"{len(found)} of {len(ours)} differ, first {found[0][0]}: {found[0][1]}"


def _differs(ours: Any, theirs: Any, tolerance: float) -> str | None:
    if isinstance(ours, torch.Tensor) and isinstance(theirs, torch.Tensor):
        if ours.shape != theirs.shape or ours.dtype != theirs.dtype:
            return f"{tuple(ours.shape)} {ours.dtype} is not {tuple(theirs.shape)} {theirs.dtype}"
        if ours.is_floating_point() and ours.itemsize == 1:  # there is no arithmetic of such numbers
            ours, theirs = ours.float(), theirs.float()
        if torch.allclose(ours, theirs, rtol=tolerance, atol=tolerance, equal_nan=True):
            return None
        ratio = (ours.double().norm() / theirs.double().norm()).item() if not ours.is_complex() else math.nan
        return f"off by {(ours - theirs).abs().max().item():.3g}, norm {ratio:.6g} times the expected" \
            if ours.dtype != torch.bool else "not the same"
    if isinstance(ours, torch.Tensor) or isinstance(theirs, torch.Tensor):
        return f"{_short(ours)} is not {_short(theirs)}"
    if isinstance(ours, (float, complex)) and isinstance(theirs, (float, complex)):
        near = abs(ours - theirs) <= tolerance * (1 + abs(theirs)) or (ours != ours and theirs != theirs) or ours == theirs
        return None if near else f"{ours!r} is not {theirs!r}"
    return None if ours == theirs else f"{_short(ours)} is not {_short(theirs)}"


def _short(value: Any) -> str:
    return f"a tensor {tuple(value.shape)}" if isinstance(value, torch.Tensor) else repr(value)[:80]


def digest(leaves: list[Leaf]) -> str:
    """Equal for two ranks only if every bit of every value is."""
    sums = hashlib.sha256()
    for name, value in leaves:
        sums.update(name.encode())
        if isinstance(value, torch.Tensor):
            flat = value.contiguous().view(-1)
            flat = torch.view_as_real(flat).contiguous().view(-1) if flat.is_complex() else flat
            sums.update(flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b"")
        else:
            sums.update(repr(value).encode())
    return sums.hexdigest()
