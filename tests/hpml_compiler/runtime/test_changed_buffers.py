"""A model changes a buffer in place and returns views of it -> values and memory sharing as on one device."""
from __future__ import annotations

import torch
from torch import nn

from tests.hpml_compiler.runtime.common import full

VIEWS = {
    "itself": lambda b: b, "slice": lambda b: b[1:3], "row": lambda b: b[2], "steps": lambda b: b[::2],
    "column": lambda b: b[:, 1], "reshape": lambda b: b.reshape(2, 12), "flat": lambda b: b.view(-1),
    "transposed": lambda b: b.t(),
    "new dim": lambda b: b.unsqueeze(0), "expanded": lambda b: b.unsqueeze(0).expand(3, 4, 6), "detached": lambda b: b.detach(),
    "slice of a reshape": lambda b: b.reshape(2, 12)[:, 3:5], "split": lambda b: b.split(2)[1],
    "computed": lambda b: b[1:3] * 2,
}


class Counts(nn.Module):
    """names: of the views that it returns besides the loss. after: whether the buffer changes once more when they are taken."""

    sums: torch.Tensor

    def __init__(self, names, after=False):
        super().__init__()
        self.names, self.after = names, after
        self.linear = nn.Linear(6, 4)
        self.register_buffer("sums", torch.zeros(4, 6))

    def forward(self, x):
        y = self.linear(x)
        self.sums.add_((y.t() @ x).detach())
        seen = [VIEWS[name](self.sums) for name in self.names]
        if self.after:
            self.sums.mul_(0.5)
        return (y.square().mean() + (y @ self.sums).mean(), *seen)


def seen_of(model, call, trains=True):
    """All that comes out of two steps; each view twice, the second time when the step after it has changed the buffer."""
    torch.manual_seed(1)
    found, before = [], []
    for _ in range(2):
        x = torch.randn(8, 6)
        with torch.set_grad_enabled(trains):
            loss, *views = call(x)
        if trains:
            loss.backward()
        found += [loss.detach(), *(view.clone() for view in views), *(view.clone() for view in before), model.sums.clone()]
        before = views
    grads = [full(p.grad).clone() for p in model.parameters()] if trains else []
    return [*found, *grads]


def made(names, after):
    torch.manual_seed(0)
    return Counts(names, after)


def split_and_plain(rank, cases, options):
    for names, after, trains in cases:
        expected = seen_of(plain := made(names, after), plain, trains)
        model = made(names, after)
        actual = seen_of(model, torch.compile(model, backend="hpml", options=options), trains)
        try:
            torch.testing.assert_close(actual, expected)
        except AssertionError as error:
            raise AssertionError(f"{names}, {after}, {trains}") from error
        torch.compiler.reset()


def test_views_of_a_changed_buffer(launch):
    every = tuple(VIEWS)
    cases = [(every, False, True), (every, True, True), (every, False, False)]
    launch(split_and_plain, 2, (cases, {"compiler": "eager"}))
