from __future__ import annotations

import pytest
import torch
from torch import nn

from hpml_compiler.runtime.program.second_derivatives import NoSecondDerivative


def of_input(call, model, x) -> torch.Tensor:
    return torch.autograd.grad(call(x).sum(), x, create_graph=True)[0].square().sum()


def of_parameters(call, model, x) -> torch.Tensor:
    gradients = torch.autograd.grad(call(x).square().mean(), list(model.parameters()), create_graph=True)
    return sum((each.square().sum() for each in gradients), torch.zeros(()))


def of_accumulated(call, model, x) -> torch.Tensor:
    call(x).sum().backward(create_graph=True)
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-3)  # in place
    return model[0].weight.grad.square().sum()


@pytest.mark.filterwarnings("ignore:Using backward:UserWarning")
@pytest.mark.parametrize("take", [of_input, of_parameters, of_accumulated])
@pytest.mark.parametrize("options", [{}, {"microbatches": 2}], ids=["plain", "microbatches"])
def test_a_second_derivative_says_what_to_do(take, options):
    """First derivatives are eager's; a penalty on them is not, and the error names both ways out."""
    torch.manual_seed(0)
    torch._dynamo.reset()
    model = nn.Sequential(nn.Linear(16, 8), nn.Tanh(), nn.Linear(8, 1))
    x = torch.randn(8, 16, requires_grad=True)
    call = torch.compile(model, backend="hpml", options={"compiler": "eager", **options})
    expected = take(model, model, x)
    model.zero_grad()
    for _ in range(2):
        found = take(call, model, x)
        torch.testing.assert_close(found, expected)
        with pytest.raises(NoSecondDerivative, match=r"with the uncompiled model(.|\n)*torch.compiler.disable"):
            found.backward()
        model.zero_grad()
    assert issubclass(NoSecondDerivative, RuntimeError)


def test_taking_gradients_inside_a_compiled_function_adds_no_graph():
    model = nn.Sequential(nn.Linear(16, 8), nn.Tanh(), nn.Linear(8, 1))
    graphs = {}
    for backend in ("aot_eager", "hpml"):
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        call = torch.compile(lambda x: of_input(model, model, x), backend=backend)
        call(torch.randn(8, 16, requires_grad=True))
        graphs[backend] = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    assert graphs["hpml"] == graphs["aot_eager"] > 1
