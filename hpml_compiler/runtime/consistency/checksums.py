"""Compare tensors across ranks by two numbers per tensor."""
from __future__ import annotations

import functools

import torch

SAMPLE = 1 << 16
"""Number of elements sampled from a larger tensor; different rows, shuffling or augmentation change any of them."""
_TOLERANCES = {torch.float64: 1e-8, torch.float32: 1e-4, torch.float16: 1e-3, torch.bfloat16: 5e-3}


def exact_sum(tensor: torch.Tensor) -> torch.Tensor:
    """Sum of a tensor's bits as an int64 scalar on its device: one pass, no copy. Independent of the order of elements."""
    size = tensor.element_size()
    kind = {1: torch.uint8, 2: torch.int16, 4: torch.int32}.get(size, torch.int64)
    plain = torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor
    return plain.detach().view(kind).sum(dtype=torch.int64)


def fingerprint(tensor: torch.Tensor) -> torch.Tensor:
    """Two float64 numbers on the tensor's device.

    For floating point, the projection on fixed numbers and the norm, which change no more than the values do: equal
    computations may differ in the last bits between ranks, since devices sum in any order. For other dtypes, a hash.
    """
    flat = _sampled(tensor.detach())
    if flat.is_complex():
        flat = torch.view_as_real(flat.resolve_conj()).flatten()
    if flat.is_floating_point():
        values = flat.double()
        return torch.stack([values @ _directions(flat.numel(), flat.device), torch.linalg.vector_norm(values)])
    hashed = (flat.long() * _factors(flat.numel(), flat.device)).sum()
    return torch.stack([hashed >> 32, hashed & 0xFFFFFFFF]).double()


def tolerance(dtype: torch.dtype) -> float:
    """Tolerance for fingerprints of equal tensors, relative to the norm."""
    if not dtype.is_floating_point and not dtype.is_complex:
        return 0.0
    return _TOLERANCES.get(torch.empty(0, dtype=dtype).real.dtype if dtype.is_complex else dtype, 1e-2)


def differs(mine: torch.Tensor, other: torch.Tensor, tolerances: torch.Tensor) -> torch.Tensor:
    """Mask of the n tensors that differ, from their fingerprints (n, 2)."""
    finite, other_finite = mine.isfinite().all(1), other.isfinite().all(1)
    scale = torch.maximum(mine[:, 1].abs(), other[:, 1].abs())
    far = ((mine - other).abs() > (tolerances * scale)[:, None]).any(1)
    return torch.where(finite & other_finite, far, finite != other_finite)


def _sampled(tensor: torch.Tensor) -> torch.Tensor:
    count = tensor.numel()
    if tensor.dim() == 4 and tensor.is_contiguous(memory_format=torch.channels_last):
        tensor = tensor.permute(0, 2, 3, 1)
    flat = tensor.reshape(-1)
    return flat if count <= SAMPLE else flat[:: count // SAMPLE | 1]  # an odd stride reaches every column


@functools.lru_cache(maxsize=16)
def _directions(count: int, device: torch.device) -> torch.Tensor:
    return ((torch.arange(count, dtype=torch.float64) * 12.9898).sin() * 43758.5453).frac().to(device)


@functools.lru_cache(maxsize=16)
def _factors(count: int, device: torch.device) -> torch.Tensor:
    return torch.arange(1, count + 1).mul(-7046029254386353131).bitwise_or(1).to(device)
