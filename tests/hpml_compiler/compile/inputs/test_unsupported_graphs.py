from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint


@pytest.mark.parametrize("reentrant, needs_gradient, warned", [
    (True, False, True), (True, True, False), (False, False, False)])
def test_a_reentrant_checkpoint_that_eager_would_cut_off_is_warned_of(caplog, reentrant, needs_gradient, warned):
    """Eager leaves the parameters inside without a gradient; a compiled graph gives them theirs, and says so."""
    torch._dynamo.reset()
    inner, outer = nn.Linear(16, 8), nn.Linear(8, 4)

    def loss(x: torch.Tensor) -> torch.Tensor:
        hidden: torch.Tensor = checkpoint(inner, x, use_reentrant=reentrant)  # type: ignore[assignment]
        return outer(hidden.tanh()).square().mean()

    x = torch.randn(8, 16, requires_grad=needs_gradient)
    torch.compile(loss, backend="hpml", options={"compiler": "eager"})(x).backward()
    whole = outer(inner(x).tanh()).square().mean()
    torch.testing.assert_close(inner.weight.grad, torch.autograd.grad(whole, inner.weight)[0])
    assert ("use_reentrant=False behaves the same in both" in caplog.text) == warned
    if not needs_gradient:
        with pytest.warns(UserWarning, match="None of the inputs have requires_grad=True") if reentrant else nullcontext():
            eager = loss(x)
        assert (torch.autograd.grad(eager, inner.weight, allow_unused=True)[0] is None) == warned
