"""Properties that a user registers for an operator hold in plans and in runs: FLOPs, kind of kernel, no recomputation."""
from __future__ import annotations

import pytest
import torch
from torch import nn

import hpml_compiler
from passes.op_rules.base import make_rule
from passes.op_rules.rule_table import OPERATORS, load, rule

WIDTH, ROWS, LAYERS = 64, 512, 3
EAGER = {"compiler": "eager", "costs": "roofline", "cluster": "1x1:cpu"}
X = torch.linspace(-1, 1, ROWS * WIDTH).view(ROWS, WIDTH).sin()
calls: list[int] = []


@torch.library.custom_op("test_user_operators::bend", mutates_args=())
def bend(x: torch.Tensor) -> torch.Tensor:
    calls.append(x.numel())
    return x.tanh()


@bend.register_fake
def _(x):
    return torch.empty_like(x)


bend.register_autograd(lambda ctx, grad: grad * (1 - ctx.saved_tensors[0].tanh().square()),
                       setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        return x + self.down(bend(self.up(x)))


def model():
    torch.manual_seed(0)
    return nn.Sequential(*(Block() for _ in range(LAYERS)))


def run(**options):
    """The plan of a step on one device; gradients equal eager's."""
    hpml_compiler.reset()
    ours, eager = model(), model()
    eager(X).square().mean().backward()
    calls.clear()
    torch.compile(ours, backend="hpml", options={**EAGER, **options})(X).square().mean().backward()
    for a, b in zip(ours.parameters(), eager.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad)
    return hpml_compiler.last_plan()


def planned(**options):
    return hpml_compiler.plan(model(), (X,), **EAGER, **options)


@pytest.fixture(autouse=True)
def registered(monkeypatch):
    monkeypatch.setenv("HPML_CACHE", "0")
    load()
    with OPERATORS.temporary():
        rule("test_user_operators::bend", heavy="matmul", flops=lambda x, out_val: 300.0 * x.numel())(
            lambda call: make_rule(call, ["rf"], ["rf"]))
        yield
    hpml_compiler.reset()


@pytest.mark.parametrize("plan", [planned, run])
def test_its_flops_and_kind_are_those_that_are_registered(plan):
    operations = plan(memory_budget="1GiB").graphs[0].operations
    found = [each for each in operations.values() if "bend" in each.op]
    assert [(each.flops, each.kind) for each in found] == [(300.0 * ROWS * 4 * WIDTH, "matmul")] * len(found) != []


@pytest.mark.parametrize("recomputable", [True, False])
def test_under_a_budget_it_is_recomputed_only_if_that_is_allowed(recomputable):
    if not recomputable:
        rule("test_user_operators::bend", recomputable=False)
    budget = int(0.8 * planned(memory_budget="1GiB").peak.bytes)
    for plan in (planned(memory_budget=budget), run(memory_budget=budget)):
        again = [name for name in plan.graphs[0].kept.again if name.startswith("bend")]
        assert bool(again) == recomputable and plan.graphs[0].kept.again
    assert len(calls) == LAYERS + len(again)
