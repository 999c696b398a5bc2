"""Options: accepted and refused values, and helpful refusals."""
from __future__ import annotations

import pytest

from hpml_compiler.commands._fix_option import parse_fixes
from hpml_compiler.options import Options
from hpml_compiler.plans.pipeline_records import MicrobatchPlan
from passes.errors import BadInput
from tests.helpers.plans import gpt_plan


@pytest.mark.parametrize(("given", "budget"), [
    (0.8, 0.8), (1.0, 1.0), ("80%", 0.8), (" 12.5 %", 0.125), ("0.8", 0.8), ("100%", 1.0), (1, 1), ("24GB", 24 * 10**9)])
def test_budgets(given, budget):
    found = Options.parse({"memory_budget": given}).memory_budget
    assert found == budget and type(found) is type(budget)
    assert Options.parse({"memory_budget": given}).budget_bytes(10**9) == (
        budget if isinstance(budget, int) else int(budget * 10**9))


@pytest.mark.parametrize("given", [0.0, "0%", "0.0", 1.5, "1.5", "120%", -0.5, float("nan"), float("inf"), 24e9])
def test_no_budgets(given):
    with pytest.raises(BadInput, match="a number of bytes nor a fraction of a device's memory") as caught:
        Options.parse({"memory_budget": given})
    assert "write 24GB, 0.8 or 80%" in str(caught.value)


def test_defaults():
    options = Options.parse(None)
    assert options == Options.parse({})
    assert (options.compiler, options.solver) == ("inductor", "HiGHS")
    assert options.to_json() == {}
    assert options.load_plan() is None


def test_to_json_gives_the_same_options_again():
    options = Options.parse({"mesh": {"tp": 2, "dp": 4}, "memory_budget": "1GiB", "gap": 0, "compiler": "eager",
                             "rows": "dp=3+2+2+1", "local_steps": 8, "outer_optimizer": "nesterov",
                             "mesh_order": ["tp", "dp"], "solver_options": {"threads": 1}, "optimizer": "sgd"})
    assert Options.parse(options.to_json()) == options
    assert options.to_json()["memory_budget"] == 2**30
    assert list(options.to_json()["mesh"]) == ["tp", "dp"]
    assert Options.parse(options) is options


@pytest.mark.parametrize(("optimizer", "states"), [("adamw", 2), ("sgd", 0), ("sgd_momentum", 1)])
def test_optimizer_states(optimizer, states):
    assert Options.parse({"optimizer": optimizer}).optimizer_states == states
    assert Options.parse({}).optimizer_states == 2, "as AdamW, where nothing is known"


def test_optimizer_states_are_those_torch_keeps():
    """The tensors of a parameter's shape in the state after one step, for every optimizer in the table."""
    import torch

    from hpml_compiler.options import OPTIMIZER_STATES

    made = {"adamw": torch.optim.AdamW, "adam": torch.optim.Adam, "sgd": torch.optim.SGD,
            "sgd_momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9), "rmsprop": torch.optim.RMSprop,
            "adagrad": torch.optim.Adagrad}
    found = {}
    for name, make in made.items():
        weight = torch.nn.Parameter(torch.ones(3, 2))
        weight.grad = torch.ones(3, 2)
        optimizer = make([weight])
        optimizer.step()
        state = optimizer.state[weight].values()
        found[name] = sum(isinstance(each, torch.Tensor) and each.shape == weight.shape for each in state)
    assert found == OPTIMIZER_STATES


@pytest.mark.parametrize(("options", "message"), [
    ({"memry_budget": 1}, r"unknown option 'memry_budget' \(did you mean 'memory_budget'"),
    ({"zzz": 1}, r"unknown option 'zzz'\n[^\n]*\n.*compiler, mesh_order, mesh"),
    ({1: 2}, "unknown option 1"),
    ("gap=1", "options must be a dict, not str"),
    ({"memory_budget": "24 G"}, "'24 G' is not a number of bytes"),
    ({"offload": "saved"}, "needs a memory_budget"),
    ({"mesh": {"dp": 2, "pp": 1}, "schedule": "gpipe"}, "needs pipeline stages"),
    ({"mesh": {"dp": 0}}, "size of axis 'dp' is 0"),
    ({"mesh": {"dp": 2.0}}, "size of axis 'dp' is 2.0"),
    ({"mesh": {"d p": 2}}, "'d p' is not the name"),
    ({"mesh": {}}, "has no axis"),
    ({"mesh": "2x2"}, "mesh"),
    ({"rows": {"dp": [5, 3]}}, "the mesh is not set"),
    ({"rows": {"dp": [5, 3]}, "mesh": {"dp": 4}}, "2 numbers of rows for the axis 'dp'"),
    ({"rows": {"dp": [8, 0]}, "mesh": {"dp": 2}}, "a positive number of rows for each rank"),
    ({"rows": "dp=5+x", "mesh": {"dp": 2}}, "a positive number of rows for each rank"),
    ({"rows": {"tp": [5, 3]}, "mesh": {"tp": 2}}, "give the rows along dp"),
    ({"rows": {"dp": [5, 3]}, "mesh": {"dp": 2}, "microbatches": 2}, "do not divide into 2 microbatches"),
    ({"rows": {"pp": [5, 3]}, "mesh": {"dp": 2, "pp": 2}}, "give the rows along dp"),
    ({"rows": "odd"}, "'even' or 'whole'"),
    ({"redundancy": -1}, "a number of at least 0, got -1"),
    ({"redundancy": 1, "compress": "powersgd:2"}, "PowerSGD is not copied"),
    ({"redundancy": 1, "mesh": {"dp": 2}, "local_steps": {"dp": 4}}, "replicas that train apart are not copied"),
    ({"gap": -0.1}, "gap"),
    ({"gap": True}, "gap"),
    ({"zero": 4}, "zero"),
    ({"zero": "2"}, "zero"),
    ({"zero": True}, "zero"),
    ({"gap": float("nan")}, "finite"),
    ({"time_limit": 0}, "time_limit"),
    ({"compiler": "llvm"}, "'inductor' or 'eager'"),
    ({"optimizer": "lion"}, "sgd_momentum"),
    ({"trace_all_layers": 1}, "trace_all_layers"),
    ({"plan": 3}, "plan"),
    ({"solver_options": {"callback": print}}, "JSON"),
    ({"compress": "int8"}, "'int8' is no compression of gradients"),
    ({"compress": {"dp": 16}}, "16 is no compression"),
    ({"compress": "powersgd:0"}, "'powersgd:0' is no compression"),
    ({"compress": "powersgd:4", "zero": 2}, "pin zero to 0 or 3"),
    ({"compress": "powersgd:4", "memory_budget": "1GiB"}, "pin zero to 0 or 3"),
    ({"mesh": {"dp": 2, "pp": 2}, "compress": {"pp": "bf16"}}, "no gradients are reduced along 'pp'"),
    ({"mesh": {"dp": 2}, "compress": {"tp": "bf16"}}, "no gradients are reduced along 'tp'"),
    ({"local_steps": 1}, "1 is no number of optimizer steps"),
    ({"local_steps": "often"}, "'often' is no number of optimizer steps"),
    ({"local_steps": {"dp": 8}}, "'dp' is no axis of the mesh"),
    ({"local_steps": {"*": 8}}, "along one mesh axis that splits the batch"),
    ({"mesh": {"dp": 2, "tp": 2}, "local_steps": "dp=8,tp=8"}, "along one mesh axis that splits the batch"),
    ({"mesh": {"dp": 2, "pp": 2}, "local_steps": {"pp": 8}}, "along one mesh axis that splits the batch"),
    ({"mesh": {"dp": 2, "pp": 2}, "local_steps": {"dp": 8}, "zero": 1}, "zero=1 needs another axis"),
    ({"mesh": {"dp": 2}, "local_steps": {"dp": 8}, "compress": {"dp": "bf16"}}, "no gradients are sent along 'dp'"),
    ({"mesh": {"dp": 2}, "local_steps": {"dp": 8}, "zero": 3}, "zero=3 needs another axis"),
    ({"mesh": {"dp": 2}, "local_steps": {"dp": 8}, "rows": {"dp": [5, 3]}}, "replicas have equal numbers of rows"),
    ({"outer_optimizer": "nesterov"}, "set that, too"),
    ({"balance": "often"}, "'off' or 'auto'"),
    ({"balance": "auto"}, "pin one, as in"),
    ({"balance": "auto", "mesh": {"pp": 2}, "offload": "optimizer"}, "leave offload or balance out"),
    ({"balance": "auto", "mesh": {"dp": 2, "pp": 2}, "compress": "powersgd:2"}, "leave compress or balance out"),
    ({"stage_speeds": [2, 1]}, "2 speeds for 1 pipeline ranks"),
    ({"stage_speeds": [2, 0], "mesh": {"pp": 2}}, "give positive numbers"),
    ({"balance": "auto", "mesh": {"dp": 2}, "rows": "whole"}, "leave one of the two out"),
    ({"balance": "auto", "mesh": {"dp": 2}, "on_oom": "replan"}, "leave on_oom out"),
    ({"balance": "auto", "mesh": {"dp": 2}, "local_steps": {"dp": 8}}, "leave local_steps out"),
    ({"local_steps": 8, "outer_optimizer": "adam"}, "'adam' is no outer optimizer"),
    ({"local_steps": 8, "outer_optimizer": "nesterov:0:0.9"}, "LR above 0"),
])
def test_bad_options(options, message):
    with pytest.raises(BadInput, match=r"(?s)" + message) as caught:
        Options.parse(options)
    assert caught.value.where and caught.value.next_step and caught.value.exit_code == 2


def test_check_mesh_says_which_sizes_fit():
    options = Options.parse({"mesh": {"dp": 2, "tp": 2}})
    options.check_mesh(4)
    with pytest.raises(BadInput, match="multiplies to 4, but there are 8 ranks") as caught:
        options.check_mesh(8)
    assert "dp=4" in caught.value.next_step and "tp=4" in caught.value.next_step
    with pytest.raises(BadInput, match="3 ranks") as caught:
        options.check_mesh(3)
    assert "dp=" not in caught.value.next_step
    Options.parse(None).check_mesh(8)
    for pins in ({"mesh": {"dp": 2}, "schedule": "gpipe"}, {"virtual_stages": 2}):
        with pytest.raises(BadInput, match="needs pipeline stages"):
            Options.parse(pins).check_mesh(2)


def test_plan_by_object_and_by_path(tmp_path):
    plan = gpt_plan(1)
    plan.save(tmp_path / "plan.json")
    for given in (plan, tmp_path / "plan.json", str(tmp_path / "plan.json")):
        options = Options.parse({"plan": given})
        assert options.load_plan() == plan
        assert options.to_json() == {}


def test_a_plan_is_read_once(tmp_path):
    plan = gpt_plan(1)
    plan.save(tmp_path / "plan.json")
    options = Options.parse({"plan": tmp_path / "plan.json"}).with_plan(plan.world_size)
    (tmp_path / "plan.json").unlink()
    assert (options.load_plan(), options.memory_budget) == (plan, None)
    assert options.with_plan(plan.world_size) == options


def test_fixes_are_options_before_axes():
    assert parse_fixes(["dp=2", "tp=4", "memory_budget=24GiB", "gap=1e-2", 'solver_options={"threads": 1}']) == {
        "mesh": {"dp": 2, "tp": 4}, "memory_budget": "24GiB", "gap": 0.01, "solver_options": {"threads": 1}}
    assert parse_fixes(["x=8"]) == {"mesh": {"x": 8}}
    assert parse_fixes(['mesh={"a": 2}', "b=4"]) == {"mesh": {"a": 2, "b": 4}}
    assert parse_fixes([]) == {}


@pytest.mark.parametrize(("fixes", "message"), [
    (["dp"], "not KEY=VALUE"),
    (["=2"], "not KEY=VALUE"),
    (["dp=2", "dp=4"], "dp is given twice"),
    (["dp=x"], "'dp' is not an option"),
    (["memry_budget=100"], "did you mean 'memory_budget'"),
    (['mesh={"dp": 2}', "dp=4"], "cannot be combined"),
])
def test_bad_fixes(fixes, message):
    with pytest.raises(BadInput, match=message):
        parse_fixes(fixes)


def test_a_plan_says_when_things_are_computed_where_the_options_do_not():
    plan = gpt_plan(1)
    (graph,) = plan.graphs
    plan = plan.model_copy(update={"graphs": (graph.model_copy(update={"microbatches": MicrobatchPlan(count=4, share=1.0)}),)})
    assert Options.parse({"plan": plan}).with_plan(plan.world_size).microbatches == 4
    assert Options.parse({"plan": plan, "microbatches": 2}).with_plan(plan.world_size).microbatches == 2
    assert Options.parse({"plan": plan}).with_plan(plan.world_size + 1).microbatches == 1


@pytest.mark.parametrize(("given", "found"), [
    ({"mesh": {"tp": 8, "dp": 32}}, ["dp", "tp"]),
    ({"mesh": {"dp": 32, "tp": 8}}, ["dp", "tp"]),
    ({"mesh": {"tp": 2, "dp": 2, "pp": 2}}, ["pp", "dp", "tp"]),
    ({"mesh": {"tp": 2, "y": 2, "x": 2, "dp": 2}}, ["dp", "y", "x", "tp"]),
    ({"mesh": {"y": 2, "x": 2}}, ["y", "x"]),
    ({"mesh": {"dp": 32, "tp": 8}, "mesh_order": ["tp", "dp"]}, ["tp", "dp"]),
    ({"mesh": {"dp": 32, "tp": 8}, "mesh_order": "tp, dp"}, ["tp", "dp"]),
    (parse_fixes(["tp=2", "pp=2", "mesh_order=tp,pp"]), ["tp", "pp"]),
    (parse_fixes(['mesh={"tp": 2}', "pp=2"]), ["pp", "tp"]),
])
def test_axes_have_the_fields_order_unless_another_is_asked_for(given, found):
    assert list(Options.parse(given).mesh or {}) == found


@pytest.mark.parametrize("given", [
    {"mesh_order": ["dp"]}, {"mesh": {"dp": 2, "tp": 2}, "mesh_order": ["dp"]},
    {"mesh": {"dp": 2}, "mesh_order": ["dp", "dp"]}, {"mesh": {"dp": 2}, "mesh_order": ["tp"]}])
def test_an_order_names_each_axis_once(given):
    with pytest.raises(BadInput, match="name each axis of the mesh once"):
        Options.parse(given)


def test_a_plan_that_is_obeyed_keeps_its_order():
    plan = gpt_plan(1)
    turned = {axis: plan.mesh[axis] for axis in reversed(plan.mesh)}
    graphs = tuple(graph.model_copy(update={"mesh": turned}) for graph in plan.graphs)
    plan = plan.model_copy(update={"mesh": turned, "graphs": graphs})
    for mesh in (turned, dict(reversed(turned.items()))):
        assert list(Options.parse({"plan": plan, "mesh": mesh}).with_plan(plan.world_size).mesh or {}) == list(turned)
