"""Operators for some of the random numbers that inductor draws for a whole tensor.

    hpml::positions(size, step)               0, step, 2 * step, ...: what the indices of a dim add to a position in memory
    hpml::random_at(seed, mode, positions)    the numbers at these positions, given for each dim; mode: "rand" or "randn"

Inductor computes each number from a seed and the number's position in contiguous memory. So a rank or a microbatch can compute
its own numbers alone. Results are in float32. Positions count modulo 2**32, as inductor's do, so the numbers of a larger tensor
repeat.
"""
from __future__ import annotations

import functools
import math
import operator
from collections.abc import Sequence
from typing import Any

import torch

torch.library.define("hpml::random_at", "(Tensor seed, str mode, Tensor[] positions) -> Tensor")
torch.library.define("hpml::positions", "(int size, int step, *, ScalarType dtype, Device device) -> Tensor")
RANDOM_AT: Any = torch.ops.hpml.random_at.default
POSITIONS: Any = torch.ops.hpml.positions.default
_LOW = 0xFFFFFFFF


def draws_at_positions() -> bool:
    """True if inductor computes random numbers from their positions, by its settings."""
    from torch._inductor import config

    return not (config.fallback_random or getattr(config, "align_random_eager", False))


def seed_operator() -> Any:
    """Inductor's operator that draws a seed."""
    import torch._inductor.inductor_prims  # defines it

    return torch.ops.prims.inductor_seed.default


@torch.library.impl("hpml::positions", "CompositeExplicitAutograd")
@torch.library.register_fake("hpml::positions")
def _positions(size: int, step: int, *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    return torch.arange(0, size * step, step, dtype=dtype, device=device)


@torch.library.register_fake("hpml::random_at")
def _fake(seed: torch.Tensor, mode: str, positions: Sequence[torch.Tensor]) -> torch.Tensor:
    return seed.new_empty([x.shape[0] for x in positions], dtype=torch.float32)


@torch.library.impl("hpml::random_at", "CompositeExplicitAutograd")
def _uncompiled(seed: torch.Tensor, mode: str, positions: Sequence[torch.Tensor]) -> torch.Tensor:
    """The numbers of inductor's kernels for CPUs. Devices' own generators differ from them in the last steps."""
    dims = range(len(positions))
    parts = [x.long().view([-1 if d == k else 1 for k in dims]) for d, x in enumerate(positions)]
    first, second = _philox(seed.long(), functools.reduce(operator.add, parts, torch.zeros_like(seed)))
    if mode == "rand":
        return _uniform(first)
    return ((-2.0 * (1 - _uniform(first)).log().double()).sqrt() * (
        2.0 * math.pi * (1 - _uniform(second)).double()).cos()).float()


def _uniform(word: torch.Tensor) -> torch.Tensor:
    return (word & 0x7FFFFFFF).float() * 4.6566127342e-10


def _philox(seed: torch.Tensor, position: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Two of the four words of Philox 4x32 with ten rounds (Salmon et al. 2011) for keys and counters of 32 bits."""
    counter = [position & _LOW, *[torch.zeros_like(position)] * 3]
    keys = [seed & _LOW, torch.zeros_like(seed)]
    for _ in range(10):
        a, b = 0xD2511F53 * counter[0], 0xCD9E8D57 * counter[2]  # products wrap at 64 bits, which keeps all of these
        counter = [(b >> 32 & _LOW) ^ counter[1] ^ keys[0], b & _LOW, (a >> 32 & _LOW) ^ counter[3] ^ keys[1], a & _LOW]
        keys = [keys[0] + 0x9E3779B9 & _LOW, keys[1] + 0xBB67AE85 & _LOW]
    return counter[0], counter[1]
