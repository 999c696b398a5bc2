"""Steps in a pipeline in which gradients are missing or zero -> losses and gradients of one device, None where it has none."""
from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

from tests.helpers.frozen import fresh

LOSSES = {
    "plain": lambda x, y, scale: (x - y).square().mean(),
    "zero": lambda x, y, scale: x.sign().mean(),  # its gradient depends on no tangent
    "detached": lambda x, y, scale: (x.detach() - y).square().mean() + 0 * scale,
    "without gradient": lambda x, y, scale: (x.detach() - y).square().mean(),
}


class Blocks(nn.Module):
    """frozen: blocks whose parameters require no gradient. zero_at: block before which gradients become zero."""

    def __init__(self, loss: str, frozen: tuple[int, ...], zero_at: int | None):
        super().__init__()
        self.loss, self.zero_at = LOSSES[loss], zero_at
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8)) for _ in range(4)])
        self.scale = nn.Parameter(torch.ones(()))
        for number in frozen:
            self.blocks[number].requires_grad_(False)

    def forward(self, x, y):
        for number, block in enumerate(self.blocks):
            x = x.round() if number == self.zero_at else x
            x = x + block(x)
        return self.loss(x, y, self.scale), x.argmax(-1)


CASES = (  # arguments of the model; whether its input requires a gradient
    (("plain", (0, 1, 2, 3), None), True), (("plain", (0, 1), None), False), (("plain", (2, 3), None), False),
    (("plain", (), 3), True), (("zero", (), None), False), (("detached", (), None), False),
    (("without gradient", (), None), True),
)


def trained(model, call, asks):
    torch.manual_seed(1)
    x, y = (torch.randn(8, 8, dtype=torch.float64) for _ in range(2))
    seen = []
    for backward in (True, False, True):
        model.zero_grad()
        x.grad = None
        loss, chosen = call(x.requires_grad_(asks), y)
        if backward and loss.requires_grad:
            loss.backward()
        gradients = [x.grad, *(p.grad for p in model.parameters())]
        seen += [loss.requires_grad, loss.detach(), chosen + 0, *gradients]
    return [value.full_tensor() if isinstance(value, DTensor) else value for value in seen]


def compared(rank, options):
    for arguments, asks in CASES:
        fresh()
        torch.manual_seed(0)
        ours = Blocks(*arguments).double()
        theirs = copy.deepcopy(ours)
        found = trained(ours, torch.compile(ours, backend="hpml", options=options), asks)
        for a, b in zip(found, trained(theirs, theirs, asks), strict=True):
            assert type(a) is type(b), (arguments, a, b)
            if isinstance(b, torch.Tensor):
                torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-11, msg=lambda text, at=arguments: f"{at}: {text}")
            else:
                assert a == b, arguments


@pytest.mark.parametrize("options", [{"microbatches": 2}, {"microbatches": 4, "schedule": "zero_bubble"}], ids=str)
def test_two_stages(launch, options):
    launch(compared, 2, ({"mesh": {"pp": 2}, "compiler": "eager", **options},))
