"""Passes that are run by name -> on each traced graph, in a run on one and two ranks and in a plan; what they break is told."""
from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import pytest
import torch
from torch import fx, nn

import hpml_compiler
from passes import registry
from passes.base import PassError, TransformPass
from passes.errors import BadInput
from passes.registry import register


@dataclass(frozen=True)
class CosForSin(TransformPass):
    """Replaces sin by cos, and its gradient's cos by the negative of sin."""

    name = "cos_for_sin"

    def run(self, graph_module: fx.GraphModule) -> bool:
        aten, changed = torch.ops.aten, False
        for node in [*graph_module.graph.nodes]:
            if node.target in (aten.sin.default, aten.cos.default):
                with graph_module.graph.inserting_after(node):
                    if node.target is aten.sin.default:
                        new = graph_module.graph.call_function(aten.cos.default, node.args)
                        node.replace_all_uses_with(new)
                    else:
                        sin = graph_module.graph.call_function(aten.sin.default, node.args)
                        sin.meta.update(node.meta)
                        with graph_module.graph.inserting_after(sin):
                            new = graph_module.graph.call_function(aten.neg.default, (sin,))
                        node.replace_all_uses_with(new)
                new.meta.update(node.meta)
                graph_module.graph.erase_node(node)
                changed = True
        return changed


@dataclass(frozen=True)
class WithoutFakes(TransformPass):
    name = "without_fakes"

    def run(self, graph_module: fx.GraphModule) -> bool:
        first = next(node for node in graph_module.graph.nodes if node.op == "call_function")
        with graph_module.graph.inserting_after(first):
            graph_module.graph.call_function(torch.ops.aten.neg.default, (first,))
        return True


@dataclass(frozen=True)
class OneResultLess(TransformPass):
    name = "one_result_less"

    def run(self, graph_module: fx.GraphModule) -> bool:
        output = graph_module.graph.output_node()
        output.args = (tuple(output.args[0])[:-1],)
        return True


@pytest.fixture(autouse=True)
def registered() -> Iterator[None]:
    """For one test: other tests look at the passes that are registered."""
    with registry.PASSES.temporary():
        for each in (CosForSin, WithoutFakes, OneResultLess):
            register(each)
        yield


class Waves(nn.Module):
    def __init__(self, function):
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.function = nn.Linear(8, 8), function

    def forward(self, x):
        return self.function(self.layer(x)).square().mean()


def losses_and_gradients(model: nn.Module, call) -> list[torch.Tensor]:
    x = torch.linspace(-1, 1, 64).view(8, 8)
    loss = call(x)
    loss.backward()
    with torch.no_grad():
        evaluated = call(x)
    return [loss.detach(), evaluated, *(p.grad for p in model.parameters())]


def run(rank: int = 0, **options) -> list[torch.Tensor]:
    hpml_compiler.reset()
    register(CosForSin)  # in each process
    model = Waves(torch.sin)
    call = torch.compile(model, backend="hpml", options={"compiler": "eager", "passes": ["cos_for_sin"], **options})
    return [x.full_tensor() if hasattr(x, "full_tensor") else x for x in losses_and_gradients(model, call)]


@pytest.mark.parametrize("options", [{}, {"microbatches": 2}, {"memory_budget": "1GB"}])
def test_a_run_computes_what_the_pass_says(options):
    model = Waves(torch.cos)
    torch.testing.assert_close(run(**options), losses_and_gradients(model, model))


def test_two_ranks_do_as_well(launch):
    model = Waves(torch.cos)
    expected = losses_and_gradients(model, model)
    for found in launch(run):
        torch.testing.assert_close(found, expected)


def test_a_plan_has_the_operations_of_the_changed_graph():
    plan = hpml_compiler.plan(Waves(torch.sin), (torch.randn(8, 8),), "1x2:h100-80g", passes=["cos_for_sin"])
    assert plan.options["passes"] == ["cos_for_sin"]
    ops = {operation.op.split(".")[1] for operation in plan.graphs[0].operations.values()}
    assert "cos" in ops and "neg" in ops


def test_what_a_pass_breaks_is_told():
    model, x = Waves(torch.sin), (torch.randn(8, 8),)
    for name, message in (("without_fakes", "has no fake result"), ("one_result_less", "had inputs and results")):
        with pytest.raises(PassError, match=message):
            hpml_compiler.plan(model, x, "1x2:h100-80g", passes=[name])
    with pytest.raises(BadInput, match="(?s)no pass is called 'cos_for_sine'.*did you mean cos_for_sin"):
        hpml_compiler.plan(model, x, "1x2:h100-80g", passes="cos_for_sine")
    with pytest.raises(PassError, match="requires 'shapes'"):
        hpml_compiler.plan(model, x, "1x2:h100-80g", passes=["flops"])
