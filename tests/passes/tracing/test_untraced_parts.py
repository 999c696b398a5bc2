"""Models whose graph breaks -> all graphs of a step, and what was not reached."""
from __future__ import annotations

import pytest
import torch
from torch import nn

from passes.errors import BadInput
from passes.tracing.joint_trace import trace

HERE = "test_untraced_parts.py"


class Breaks(nn.Module):
    def __init__(self, how: str):
        super().__init__()
        self.how, self.first = how, nn.Linear(4, 4)
        self.rest = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
        self.register_buffer("seen", torch.zeros(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        if self.how == "break":
            torch._dynamo.graph_break()
        elif self.how == "print":
            print("hidden", tuple(x.shape))
        elif self.how == "item":
            x = x * (1 + 0 * x.sum().item())
        elif self.how == "tolist":
            x = x * len(x.sum(1).tolist())
        elif self.how == "branch" and x.sum() > 1e9:
            x = x * 2
        self.seen += 1
        for layer in self.rest:
            x = layer(x).relu()
        return x.square().mean()


def traced(how, **options):
    unplanned = []
    graphs = trace(Breaks(how), torch.ones(3, 4), unplanned=unplanned, **options)
    names = {each.name for graph in graphs for each in graph.inputs if each.kind == "parameter"}
    return len(graphs), len(names), unplanned


@pytest.mark.parametrize(("how", "graphs"), [("none", 1), ("break", 2), ("print", 2)])
def test_python_between_graphs_runs_on_fake_tensors(how, graphs):
    assert traced(how) == (graphs, 6, [])


@pytest.mark.parametrize("how", ["item", "tolist", "branch"])
def test_code_that_needs_values_is_named_with_the_parameters_behind_it(how):
    graphs, _, (unplanned,) = traced(how)
    assert graphs == 1 and HERE in unplanned.where and "needs values" in unplanned.reason
    assert unplanned.parameters == tuple(f"rest.{k}.{part}" for k in range(2) for part in ("weight", "bias"))


@pytest.mark.parametrize("how", ["item", "tolist", "branch"])
def test_on_real_weights_it_goes_on_and_leaves_them_as_they_were(how):
    model, unplanned = Breaks(how), []
    state = torch.get_rng_state()
    assert len(trace(model, torch.ones(3, 4), run_breaks=True, unplanned=unplanned)) == 2 and not unplanned
    assert torch.equal(model.seen, torch.zeros(1)) and torch.equal(torch.get_rng_state(), state)


def test_real_weights_are_asked_for():
    with torch.device("meta"):
        model = Breaks("item")
    with pytest.raises(BadInput, match="runs on real weights only"):
        trace(model, torch.ones(3, 4), run_breaks=True)


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(4, 8), nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.up(x)
        torch._dynamo.graph_break()
        return self.down(x.relu())


class Deep(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


def test_further_calls_of_one_graph_are_told():
    unplanned = []
    graphs = trace(Deep(), torch.ones(3, 4), unplanned=unplanned)
    planned = [each.name for graph in graphs for each in graph.inputs if each.kind == "parameter"]
    told = [name for each in unplanned for name in each.parameters]
    assert sorted(planned + told) == sorted(name for name, _ in Deep().named_parameters())
    assert told and all("is called 3 times" in each.reason for each in unplanned)


class LeftToPython(nn.Module):
    """Breaks in a loop, for which Dynamo leaves `forward` to Python and compiles what it calls."""

    def __init__(self):
        super().__init__()
        self.layers, self.scale = nn.ModuleList(Layer() for _ in range(2)), nn.Parameter(torch.ones(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            torch._dynamo.graph_break()
            x = layer(x * self.scale)
        return x.square().mean()


def test_all_parameters_of_a_function_that_is_left_to_python_are_planned_or_told():
    unplanned = []
    graphs = trace(LeftToPython(), torch.ones(3, 4), unplanned=unplanned)
    planned = {each.name for graph in graphs for each in graph.inputs if each.kind == "parameter"}
    assert planned == {"layers.0.up.weight", "layers.0.up.bias", "layers.0.down.weight", "layers.0.down.bias"}
    assert {each.reason.split(",")[0]: set(each.parameters) for each in unplanned} == {
        "a graph behind a graph break is called 2 times": {name.replace("0", "1") for name in planned},
        "Python code that Dynamo does not trace computes with them": {"scale"}}


class SkipsALayer(Breaks):
    """Layer drop: a layer that this step leaves out."""

    def __init__(self, how: str):
        super().__init__(how)
        self.dropped = nn.Linear(4, 4)


@pytest.mark.parametrize("how", ["none", "break"])
def test_parameters_without_gradients_are_listed_as_not_used(how):
    unplanned = []
    trace(SkipsALayer(how), torch.ones(3, 4), unplanned=unplanned)
    assert [(part.parameters, part.used) for part in unplanned] == [(("dropped.weight", "dropped.bias"), False)]


class InAList(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.listed = [self.layer]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.listed[0](x).square().mean()


def test_parameters_have_the_models_names_however_they_are_reached():
    (graph,) = trace(InAList(), torch.ones(3, 4))
    assert {each.name for each in graph.inputs if each.kind == "parameter"} == {"layer.weight", "layer.bias"}
