"""Numbers at given positions -> those that inductor draws for the whole tensor, compiled or not."""
from __future__ import annotations

import math
from typing import Any

import torch
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from passes import compat
from passes.compat import POSITIONS, RANDOM_AT

prims, CPU = torch.ops.prims, torch.device("cpu")
SHAPE = (6, 5, 33)
MODES = ("rand", "randn")


def numbers(seed: torch.Tensor, mode: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Whole, and every other row of the last eight columns."""
    positions = [POSITIONS(size, math.prod(SHAPE[d + 1:]), dtype=torch.int32, device=CPU) for d, size in enumerate(SHAPE)]
    part = positions[0][1::2], positions[1], positions[2][-8:]
    return RANDOM_AT(seed, mode, positions), RANDOM_AT(seed, mode, part)


def drawn(seed: torch.Tensor) -> list[Any]:
    return [x for mode in MODES for x in (prims.inductor_random(SHAPE, seed, mode), *numbers(seed, mode))]


def test_parts_are_those_of_the_whole():
    compat.seed_operator()  # and the operator that draws from a seed
    seed = torch.tensor(2**62 + 12345)
    with FakeTensorMode() as mode:
        fake = mode.from_tensor(seed)
        gm = make_fx(drawn)(fake)
    compiled: Any = compat.compile_with_inductor(gm, [fake], static_inputs=(), is_backward=False, is_inference=True)
    found = compiled([seed])
    for k, (name, tolerance) in enumerate(zip(MODES, (0.0, 1e-6))):  # logarithms and cosines differ in the last bit
        whole, at, part = found[3 * k:3 * k + 3]
        assert torch.equal(at, whole) and torch.equal(part, whole[1::2, :, -8:])
        for x, y in zip(numbers(seed, name), (whole, part), strict=True):
            torch.testing.assert_close(x, y, atol=tolerance, rtol=0.0)
