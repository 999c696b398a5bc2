"""Formulas of a plan against new traces at other sizes, priced by code that knows nothing of formulas."""
from __future__ import annotations

from dataclasses import asdict, replace

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import hpml_compiler
from hpml_compiler.demo.train import GPT
from hpml_compiler.instruments.cost_formulas.cost_growth import growth
from hpml_compiler.instruments.cost_formulas.formula_builder import formulas
from hpml_compiler.instruments.cost_formulas.formula_file import load, save
from hpml_compiler.instruments.cost_formulas.input_sizes import varied_inputs
from hpml_compiler.plan_api.model_plan import Plan
from passes.cost_model.measured.mesh_prices import MeshPrices
from passes.errors import BadInput
from passes.graph.analyzed_graph import AnalyzedGraph
from passes.hardware.cluster import Cluster
from passes.hardware.mesh import mesh_from_pin
from passes.presets import annotate
from passes.sharding.oracle.cost_check import DecisionCost, recompute_cost
from passes.sharding.pricing.training_state import TrainingStateModel
from passes.sharding.search.mesh_placement import MeshPlacement, solve_on_mesh
from passes.tracing.joint_trace import trace

CLUSTER, MESH = "1x4:cpu", {"dp": 2, "tp": 2}


class MLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(64, 256), nn.Linear(256, 64)

    def forward(self, x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return F.mse_loss(self.down(F.relu(self.up(x))), target)


class Picture(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.convolution, self.head = nn.Conv2d(3, 8, 3, padding=1), nn.Linear(8, 10)

    def forward(self, pixels: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(self.head(F.relu(self.convolution(pixels)).mean((2, 3))), label)


class Shifted(nn.Module):
    """The loss of all tokens but the first: sizes grow with s - 1."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(32, 16), nn.Linear(16, 32)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        logits = self.head(self.embedding(tokens))[:, :-1]
        return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


class Fixed(nn.Module):
    """Takes tokens of one length only."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.mix = nn.Embedding(32, 16), nn.Linear(16, 16)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.mix(self.embedding(tokens).transpose(1, 2)).square().mean()


def tokens(batch: int, sequence: int) -> tuple[torch.Tensor, torch.Tensor]:
    both = torch.zeros(batch, sequence, dtype=torch.long)
    return both, both


def gpt() -> nn.Module:
    return GPT(width=64, heads=2, layers=1, length=64)


def planned(model: nn.Module, batch: object, **options: object) -> Plan:
    plan = hpml_compiler.plan(model, batch, **options)
    assert isinstance(plan, Plan)
    return plan


def annotated(model: nn.Module, batch: object) -> AnalyzedGraph:
    (traced,) = trace(model, batch)
    return annotate(traced.gm, traced.inputs, traced.forward_outputs)


def repriced(model: nn.Module, batch: object, other: object, mesh: dict[str, int], cluster: str) -> DecisionCost:
    """The placements of `batch` on MESH, priced on a trace of `other` and on `mesh`, on the unfolded graph."""
    before, after = (MeshPrices(mesh_from_pin(pin, Cluster.parse(text)), 2) for pin, text in ((MESH, CLUSTER), (mesh, cluster)))
    state = TrainingStateModel()
    answer = solve_on_mesh(annotated(model, batch).graph, before.mesh.layout_axes, before)
    assert isinstance(answer, MeshPlacement)
    decision = replace(answer.decision, axes=after.mesh.layout_axes)
    problem = answer.problem
    return recompute_cost(annotated(model, other).graph, problem.groups, problem.saved, decision, after, state)


@pytest.fixture(scope="module")
def of_gpt():
    return formulas(gpt(), tokens(4, 16), cluster=CLUSTER, mesh=MESH)


def without_peak(held):
    """A formula adds up what is held and the largest transient; the peak of a plan is found along the step, with copies."""
    return {part: nbytes for part, nbytes in held.items() if part not in ("peak", "copies")}


def test_at_its_own_size_a_formula_says_what_the_plan_says(of_gpt):
    plan = planned(gpt(), tokens(4, 16), cluster=CLUSTER, mesh=MESH)
    now = of_gpt.evaluate()
    assert without_peak(now.memory_bytes) == without_peak(plan.memory.model_dump())
    for part in ("step_time_us", "compute_us", "communication_us", "optimizer_us"):
        assert getattr(now, part) == pytest.approx(getattr(plan.predicted, part), rel=1e-9)
    sent = sum(total.bytes for total in plan.collectives.values())
    assert now.sent_bytes == pytest.approx(sent, rel=1e-3)  # a plan has whole bytes
    flops = sum(op.flops * plan.graphs[0].runs(op) for op in plan.graphs[0].operations.values())
    assert now.flops == flops


@pytest.mark.parametrize(("batch", "sequence", "mesh", "cluster"), [
    (8, 16, MESH, CLUSTER), (4, 32, MESH, CLUSTER), (20, 48, MESH, CLUSTER), (8, 16, {"dp": 4, "tp": 2}, "1x8:cpu"),
    (4, 16, {"dp": 1, "tp": 2}, "1x2:cpu"),
])
def test_other_sizes_cost_what_a_new_trace_of_them_costs(of_gpt, batch, sequence, mesh, cluster):
    expected = repriced(gpt(), tokens(4, 16), tokens(batch, sequence), mesh, cluster)
    then = of_gpt.evaluate(batch=batch, sequence=sequence, cluster=cluster, **mesh)
    for part in ("compute", "communication", "optimizer"):
        assert getattr(then, f"{part}_us") == pytest.approx(getattr(expected, part), rel=1e-9)
    assert {k: v for k, v in then.memory_bytes.items() if k != "peak"} == {
        "parameters": expected.parameter_bytes, "gradients": expected.gradient_bytes,
        "optimizer": expected.optimizer_bytes, "activations": expected.activation_bytes}


@pytest.mark.parametrize(("sizes", "cluster"), [
    ({}, "1x4:cpu"), ({"batch": 8}, "1x4:cpu"), ({"sequence": 48, "batch": 20}, "1x4:cpu"), ({"dp": 4}, "1x8:cpu"),
    ({"dp": 1}, "1x2:cpu"),
])
def test_the_expressions_are_what_is_evaluated(of_gpt, sizes, cluster):
    at = {of_gpt.symbols[name]: size for name, size in {**of_gpt.base, **sizes}.items()}
    then = of_gpt.evaluate(cluster=cluster, **sizes)
    for part in ("step_time_us", "compute_us", "communication_us", "optimizer_us"):
        assert float(getattr(of_gpt, part).subs(at)) == pytest.approx(getattr(then, part), rel=1e-9)
    assert {k: float(v.subs(at)) for k, v in of_gpt.memory_bytes.items()} == pytest.approx(then.memory_bytes, rel=1e-12)


def test_blocks_add_up_to_the_step(of_gpt):
    parts = [of_gpt.evaluate(block) for block in of_gpt.blocks]
    whole = of_gpt.evaluate()
    assert sum(part.step_time_us for part in parts) == pytest.approx(whole.step_time_us)
    assert sum(part.memory_bytes["activations"] for part in parts) == pytest.approx(whole.memory_bytes["activations"])


def test_a_new_plan_that_chooses_the_same_costs_the_same():
    def batch(rows: int) -> dict[str, torch.Tensor]:
        return {"x": torch.zeros(rows, 64), "target": torch.zeros(rows, 64)}

    cost = formulas(MLP(), batch(32), cluster=CLUSTER, mesh={"dp": 4})
    old, new = (planned(MLP(), batch(rows), cluster=CLUSTER, mesh={"dp": 4}) for rows in (32, 64))
    assert old.graphs[0].decisions == new.graphs[0].decisions
    then = cost.evaluate(batch=64)
    assert without_peak(then.memory_bytes) == without_peak(new.memory.model_dump())
    assert then.step_time_us == pytest.approx(new.predicted.step_time_us, rel=1e-6)
    assert then.flops == 2 * cost.evaluate().flops


def test_deep_models_are_traced_by_a_few_layers():
    model = GPT(width=32, heads=2, layers=9, length=16)
    plan = planned(model, tokens(4, 16), cluster=CLUSTER, mesh=MESH)
    cost = formulas(model, tokens(4, 16), plan)
    now = cost.evaluate()
    assert now.step_time_us == pytest.approx(plan.predicted.step_time_us, rel=1e-9)
    assert without_peak(now.memory_bytes) == pytest.approx(without_peak(plan.memory.model_dump()))
    assert cost.evaluate("blocks.3").flops == pytest.approx(cost.evaluate("blocks.*").flops / 9)


def test_a_plan_for_the_least_energy_is_obeyed_as_it_is():
    batch = (torch.zeros(32, 64), torch.zeros(32, 64))
    plan = planned(MLP(), batch, cluster="1x4:h100-80g", mesh={"x": 4}, objective="energy")
    now = formulas(MLP(), batch, plan).evaluate()
    for part in ("step_time_us", "compute_us", "communication_us", "optimizer_us"):
        assert getattr(now, part) == pytest.approx(getattr(plan.predicted, part), rel=1e-9)


def test_sizes_that_are_no_products_take_more_traces():
    model, batch = Shifted(), torch.zeros(4, 16, dtype=torch.long)
    cost = formulas(model, batch, cluster=CLUSTER, mesh=MESH)
    then = cost.evaluate(batch=12, sequence=24)
    expected = repriced(model, batch, torch.zeros(12, 24, dtype=torch.long), MESH, CLUSTER)
    assert then.memory_bytes["activations"] == expected.activation_bytes
    assert then.compute_us == pytest.approx(expected.compute, rel=1e-9)


def test_pictures_have_a_batch_and_no_sequence():
    cost = formulas(Picture(), (torch.zeros(8, 3, 16, 16), torch.zeros(8, dtype=torch.long)), cluster="1x2:cpu",
                    mesh={"dp": 2})
    assert list(cost.inputs) == ["batch"]
    assert cost.evaluate(batch=16).flops == 2 * cost.evaluate().flops


def test_a_length_that_the_model_fixes_is_no_symbol_and_a_note_says_why():
    cost = formulas(Fixed(), torch.zeros(4, 16, dtype=torch.long), cluster="1x2:cpu", mesh={"dp": 2})
    assert list(cost.inputs) == ["batch"]
    assert cost.notes[0].startswith("sequence is no symbol") and "note: " in growth(cost)


def test_an_axis_that_does_not_divide_is_refused(of_gpt):
    with pytest.raises(BadInput, match="dp=3 does not divide 4"):
        of_gpt.evaluate(dp=3)
    assert of_gpt.evaluate(dp=3, batch=6).step_time_us > 0
    assert of_gpt.evaluate(dp=3, check=False).step_time_us > 0


@pytest.mark.parametrize("sizes", [{"pp": 2}, {"batch": 0}, {"batch": 2.5}])
def test_what_is_no_size_is_refused(of_gpt, sizes):
    with pytest.raises(BadInput):
        of_gpt.evaluate(**sizes)


def test_a_plan_for_other_devices_is_refused():
    batch = (torch.zeros(8, 64), torch.zeros(8, 64))
    plan = planned(MLP(), batch, cluster="1x2:cpu", mesh={"dp": 2})
    with pytest.raises(BadInput, match="not so on 1x2:a100-80g"):
        formulas(MLP(), batch, plan, cluster="1x2:a100-80g")


def test_a_file_holds_everything(of_gpt, tmp_path):
    save(of_gpt, tmp_path / "formulas.json")
    again = load(tmp_path / "formulas.json")
    assert again.graphs == of_gpt.graphs and again.cluster == of_gpt.cluster
    assert asdict(again.evaluate(batch=8, dp=4)) == asdict(of_gpt.evaluate(batch=8, dp=4))


@pytest.mark.parametrize("text", ["{}", '{"format": "hpml formulas", "version": 1}', "[]"])
def test_a_file_that_is_none_is_refused(tmp_path, text):
    (tmp_path / "formulas.json").write_text(text)
    with pytest.raises(BadInput):
        load(tmp_path / "formulas.json")


@pytest.mark.parametrize(("batch", "sizes"), [
    ((torch.zeros(4, 16, dtype=torch.long),) * 2, {"batch": 4, "sequence": 16}),
    ({"x": torch.zeros(8, 3, 32, 32)}, {"batch": 8}),
    (torch.zeros(8, 64), {"batch": 8}),
    (torch.zeros(8, 20, 64), {"batch": 8, "sequence": 20}),
    ((torch.zeros(8, 8, dtype=torch.long), torch.zeros(8, dtype=torch.long)), {"batch": 8, "sequence": 8}),
])
def test_batch_and_sequence_are_found(batch, sizes):
    assert varied_inputs(batch).sizes == sizes


def test_masks_are_as_long_as_the_tokens():
    inputs = varied_inputs({"ids": torch.zeros(4, 16, dtype=torch.long), "mask": torch.zeros(4, 1, 16, 16)})
    assert inputs.places["sequence"] == ((0, 1), (1, 2), (1, 3))
    other = inputs.at({"batch": 2, "sequence": 8})
    assert other["mask"].shape == (2, 1, 8, 8) and other["ids"].shape == (2, 8)


def test_dims_can_be_named_by_their_size():
    inputs = varied_inputs(torch.zeros(8, 3, 32, 32), {"rows": 8, "side": 32})
    assert inputs.places == {"rows": ((0, 0),), "side": ((0, 2), (0, 3))}
    with pytest.raises(BadInput):
        varied_inputs(torch.zeros(8, 8), {"a": 8, "b": 8})
    with pytest.raises(BadInput):
        varied_inputs(torch.zeros(8, 8), {"a": 7})
