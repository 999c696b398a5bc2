"""Records of real plans: the user's names, a block for everything, and reasons that name what is in the way."""
from __future__ import annotations

import pytest
import torch
from torch import nn

import hpml_compiler
from hpml_compiler.demo.train import GPT
from hpml_compiler.plan_api.model_plan import Plan
from hpml_compiler.plans.from_decision.replicated_values import left_whole
from hpml_compiler.plans.from_decision.user_names import UserNames, input_names
from hpml_compiler.plans.plan_terms import priced
from hpml_compiler.visualize.description.describe_plan import describe_step
from hpml_compiler.visualize.description.module_classes import module_classes
from hpml_compiler.visualize.drawings.plan_sketch import sketch
from passes.cost_model.measured.mesh_prices import MeshPrices
from passes.graph.graph_signature import GraphInput
from passes.hardware.cluster import Cluster
from passes.hardware.mesh import mesh_from_pin
from tests.passes.traced import annotated_joint

LAYERS = 6


@pytest.fixture(scope="module", params=[False, True], ids=["one layer listed", "all layers listed"])
def plan(request) -> Plan:
    tokens = torch.zeros(4, 16, dtype=torch.long)
    return hpml_compiler.plan(GPT(width=128, heads=2, layers=LAYERS, length=16), (tokens, tokens.clone()),
                              cluster="1x4:h100-80g", mesh={"dp": 2, "tp": 2}, trace_all_layers=request.param,
                              zero=3)  # so that parameters are stored in parts


def test_names_are_the_users(plan):
    (graph,) = plan.graphs
    known = graph.parameters.keys() | graph.operations.keys() | {"characters", "targets"}
    sources = {name for operation in graph.operations.values() for name in operation.sources}
    assert {name for name in sources - known if not name.startswith("tangents")} == set()
    assert {move.value for move in graph.redistributions} <= known
    assert {"characters", "targets"} <= sources and graph.operations.keys() >= {
        move.consumer for move in graph.redistributions if move.consumer}


def test_a_parameter_is_explained_with_its_readers_and_collectives(plan):
    (graph,) = plan.graphs
    moved = {move.value for move in graph.redistributions} & graph.parameters.keys()
    assert moved
    for name in ("blocks.0.up.weight", *sorted(moved)[:2]):
        text = plan.explain(name)
        assert "stored as" in text and "read by " in text
        assert name not in moved or f"after it, {name} float32" in text


def test_every_operation_has_a_block_and_every_block_its_time_and_place(plan):
    (graph,) = plan.graphs
    assert all(operation.block for operation in graph.operations.values())
    blocks = {operation.block for operation in graph.operations.values() if operation.backward}
    assert blocks >= {"characters", "positions", "norm", "head", "(root)", "blocks.0"}
    modules = describe_step(graph).modules
    assert [(each.name, each.count) for each in modules] == [
        ("characters", 1), ("positions", 1), ("(root) before blocks.0", 1),
        (f"blocks.0-{LAYERS - 1}", LAYERS), ("norm", 1), ("head", 1), ("(root)", 1)]
    assert all(each.compute_us > 0 for each in modules)
    total = sum(each.compute_us + each.communication_us for each in modules)
    assert total == pytest.approx(graph.predicted.compute_us + graph.predicted.communication_us)
    found = sketch(graph, module_classes(graph), (), 300)
    assert {end for pair in found.edges for end in pair} == set(found.nodes)


@pytest.mark.parametrize(("described", "name"), [
    (GraphInput("h.0.weight", "parameter"), "h.0.weight"),
    (GraphInput("L['tokens']", "batch"), "tokens"),
    (GraphInput("L['batch']['ids']", "batch"), "batch['ids']"),
    (GraphInput("L['add']", "batch"), None),  # an operation is called so
    (GraphInput("(made by Dynamo)", "batch"), None),
    (GraphInput("L['self']._buffers['mask']", "buffer"), None),
])
def test_names_of_inputs(described, name):
    assert input_names({"primals_1": 0}, [described], {"add"}).get("primals_1") == name


class Fused(nn.Module):
    def __init__(self, width: int, heads: int, extra: int = 0):
        super().__init__()
        self.heads, self.qkv = heads, nn.Linear(width, 3 * width + extra, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.qkv.out_features == 3 * self.qkv.in_features:
            return self.qkv(x).unflatten(-1, (3, self.heads, -1)).square().mean()
        return self.qkv(x).square().mean()


@pytest.mark.parametrize(("model", "rows", "name", "reason"), [
    (Fused(15, 5), 7, "qkv.weight", "no axis (tp=2) divides a factor of dim 0 (45 = 3 x 5 x 3), dim 1 (15)"),
    (Fused(15, 5), 7, "mm", "the outer factor 3 of dim 1 (45 = 3 x 5 x 3)"),
    (Fused(15, 5, extra=2), 7, "qkv.weight", "no axis (tp=2) divides dim 0 (47), dim 1 (15)"),
    (Fused(15, 5), 8, "qkv.weight", "a factor of dim 0 (45 = 3 x 5 x 3)"),
    (Fused(15, 5), 8, "mm", None),  # the rows can be split
    (Fused(16, 4), 7, "qkv.weight", None),  # the other dim can be split
])
def test_what_is_left_whole_names_the_factor_in_the_way(model, rows, name, reason):
    annotated = annotated_joint(model, torch.randn(rows, model.qkv.in_features))
    names = tuple(annotated.interface.names.get(v.name, v.name) for v in annotated.graph.values)
    mesh = mesh_from_pin({"tp": 2}, Cluster.parse("1x2:h100-80g"))
    found = {each.name: each.reason for each in left_whole(annotated, mesh, UserNames({}, names, ()))}
    assert reason in found[name] if reason else name not in found


def test_a_plan_holds_all_terms_of_its_cost(plan):
    (graph,) = plan.graphs
    found = priced(graph, MeshPrices(mesh_from_pin(plan.mesh, Cluster.parse("1x4:h100-80g")), 2))
    predicted = graph.predicted
    assert (found["compute"], found["communication"], found["optimizer"]) == pytest.approx(
        (predicted.compute_us, predicted.communication_us, predicted.optimizer_us), rel=1e-9)
    saved = sum(graph.runs(op) * size for op in graph.operations.values()
                for size, kept in zip(op.result_bytes, op.saved, strict=True) if kept)
    assert 0 < saved == pytest.approx(graph.memory.activations, rel=0.2)
