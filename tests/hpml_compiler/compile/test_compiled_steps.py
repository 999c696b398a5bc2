"""More than the model compiled: whole training steps, optimizer steps, sparse gradients, torch.func -> as on one device."""
from __future__ import annotations

from functools import partial
from itertools import cycle
from typing import Any

import pytest
import torch
from torch import nn
from torch.func import functional_call, grad, hessian, jvp, vmap
from torch.nn import functional as F

from hpml_compiler.session import session
from tests.hpml_compiler.runtime.common import full

X = torch.linspace(-1, 1, 8 * 16, dtype=torch.float64).view(8, 16).sin()
Y = torch.linspace(1, -1, 8 * 4, dtype=torch.float64).view(8, 4).cos()
ROWS = torch.arange(32).view(8, 4) % 13


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 4)).double()


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.01, eps=1e-4)


def whole_step(compile_: Any) -> list[Any]:
    model = net()
    optimizer = adamw(model)

    def train_step(x, y):
        optimizer.zero_grad()
        loss = F.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        return loss.detach()

    call = compile_(train_step)
    return [*(call(X, Y) for _ in range(3)), *model.parameters(), *(p.grad for p in model.parameters())]


def trained(compile_: Any, make: Any = adamw, compile_step: Any = lambda step: step) -> tuple[nn.Module, Any]:
    model = net()
    call, optimizer = compile_(model), make(model)
    step = compile_step(optimizer.step)
    for _ in range(2):
        optimizer.zero_grad()
        F.mse_loss(call(X), Y).backward()
        step()
    return model, call


def optimizer_step(compile_: Any) -> list[Any]:
    by_hpml = trained(compile_, compile_step=compile_)[0]
    by_torch = trained(compile_, lambda m: torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9),
                       lambda step: torch.compile(step, backend="eager"))[0]
    return [*by_hpml.parameters(), *by_torch.parameters()]


def per_sample(compile_: Any) -> list[Any]:
    model = trained(compile_)[0]

    def loss(parameters, x, y):
        return F.mse_loss(functional_call(model, parameters, (x[None],))[0], y)

    parameters = {name: p.detach() for name, p in model.named_parameters()}
    gradients = vmap(grad(loss), (None, 0, 0))(parameters, X, Y)
    assert all(type(g) is torch.Tensor and len(g) == len(X) for g in gradients.values())
    doubled = functional_call(model, {name: 2 * p for name, p in parameters.items()}, (X,))
    return [*gradients.values(), doubled]


def by_inputs(compile_: Any) -> list[Any]:
    model = trained(compile_)[0]
    second = hessian(lambda x: model(x).square().sum())(X[0])
    gradients = torch.autograd.grad(F.mse_loss(model(X), Y), list(model.parameters()), create_graph=True)
    penalty: Any = sum(g.square().sum() for g in gradients)
    penalty.backward()
    return [second, *jvp(lambda x: model(x), (X,), (X,)), *gradients, *(p.grad for p in model.parameters())]


class Table(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.out = nn.Embedding(20, 8, sparse=True), nn.Linear(8, 4)

    def forward(self, index: torch.Tensor) -> torch.Tensor:
        return self.out(self.table(index).mean(1))


def sparse_outside(compile_: Any) -> list[Any]:
    torch.manual_seed(0)
    model = Table().double()
    setattr(model.table, "forward", torch.compiler.disable(model.table.forward))  # noqa: B010  # as a script writes it
    call = compile_(model)
    optimizers = [torch.optim.SparseAdam([model.table.weight], lr=0.01), adamw(model.out)]
    losses = []
    for _ in range(2):
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss = F.mse_loss(call(ROWS), Y)
        loss.backward()
        assert model.table.weight.grad is not None and model.table.weight.grad.is_sparse
        for optimizer in optimizers:
            optimizer.step()
        losses.append(loss.detach())
    return [*losses, *model.parameters()]


def without_gradients(compile_: Any) -> list[Any]:
    """What needs no gradient splits no parameter, though gradients are on and the model is not placed yet."""
    model = net()
    frozen = compile_(lambda x: model(x).detach())
    return [frozen(X), *trained(lambda m: compile_(m))[0].parameters(), frozen(X)]


SCRIPTS = [whole_step, optimizer_step, per_sample, by_inputs, sparse_outside, without_gradients]


def compiled(function: Any, mesh: dict[str, int]) -> Any:
    options: dict[str, Any] = {"compiler": "eager", "mesh": mesh}
    return torch.compile(function, backend="hpml", options=options)


def as_on_one_device(rank):
    for script, mesh in zip(SCRIPTS, cycle(({"dp": 2}, {"tp": 2}))):
        seen = []
        for compile_ in (partial(compiled, mesh=mesh), lambda function: function):
            torch._dynamo.reset()
            session.reset()
            seen.append([full(value).detach() for value in script(compile_)])
        for a, b in zip(*seen, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9, msg=lambda text, at=script.__name__: f"{at}: {text}")
    torch._dynamo.reset()
    session.reset()
    with pytest.raises(Exception, match=r"sparse gradient.*\n.*sparse=True, module .*table.*\n.*torch.compiler.disable"):
        compiled(Table(), {"tp": 2})(ROWS)
    model = trained(partial(compiled, mesh={"tp": 2}))[0].eval()
    with torch.no_grad():
        for trace in (torch.export.export, torch.jit.trace, lambda model, _: torch.jit.script(model)):
            with pytest.raises(Exception, match="hpml_compiler.full_state_dict"):
                trace(model, (X,))


@pytest.mark.timeout(200)
def test_more_than_the_model(launch):
    launch(as_on_one_device, timeout_s=190)
