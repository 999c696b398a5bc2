"""diff: nothing between equal plans, and each kind of change where there is one."""
from __future__ import annotations

from dataclasses import replace

from hpml_compiler.plans.schema import CollectiveTotal
from passes.hardware.cluster import Cluster
from tests.helpers.plans import gpt_graph, gpt_plan


def test_equal_plans_agree():
    found = gpt_plan().diff(gpt_plan())
    assert not found and str(found) == "the plans agree"


def test_placements_are_grouped_by_class_and_change():
    found = gpt_plan(12).diff(gpt_plan(12, column="R"))
    assert found and not found.settings and not found.costs
    assert [(len(each.names), each.before, each.after) for each in found.parameters] == [
        (12, "tp: columns (tp S(0))", "whole (R)"), (12, "tp: rows (tp S(1))", "whole (R)")]
    assert [each.names[0] for each in found.operations] == ["fc_0", "gelu_0", "proj_0"]
    assert "fc_0 and 11 more: dp S(0), tp S(2) from dp S(0) | tp S(0) -> dp S(0) from dp S(0) | R" in str(found)


def test_costs_and_collectives():
    found = gpt_plan(2).diff(gpt_plan(4))
    assert found.costs["step_time_us"] == (118.0, 214.0)
    assert found.collectives == {"all_reduce": (CollectiveTotal(4, 4096), CollectiveTotal(8, 8192))}
    text = str(found)
    assert "step_time: 118 us -> 214 us (+81.4%)" in text and "all_reduce: 4 (4.00 KiB) -> 8 (8.00 KiB)" in text
    assert "h.2.ln.weight and 1 more: absent -> whole (R)" in text
    graph = gpt_graph(2)
    estimated = graph.predicted.model_copy(update={"energy_j": 2.0, "energy_label": "estimated"})
    plan = gpt_plan(2).model_copy(update={"graphs": (graph.model_copy(update={"predicted": estimated}),)})
    assert "  energy: unknown -> 2.00 J" in str(gpt_plan(2).diff(plan)).splitlines()


def test_settings():
    before, graph = gpt_plan(), gpt_graph(3)
    mesh = {"dp": 8}
    moved = graph.model_copy(update={"mesh": mesh, "operations": {}, "redistributions": (), "parameters": {
        name: each.model_copy(update={"placements": ("R",)}) for name, each in graph.parameters.items()}})
    after = before.model_copy(update={"mesh": mesh, "graphs": (moved,), "options": {"gap": 0.1}, "cluster": None})
    found = before.diff(after)
    assert {each.names[0]: (each.before, each.after) for each in found.settings} == {
        "mesh": ("dp=2 x tp=4", "dp=8"), "cluster": ("1x8:h100-80g", "None"),
        "option memory_budget": (str(2**30), "absent"), "option gap": ("absent", "0.1")}
    # replicated over both axes and over one: no change
    assert not any("h.0.ln.weight" in each.names or "wte.weight" in each.names for each in found.parameters)


def test_other_devices_of_one_name():
    cluster = Cluster.parse("1x8:h100-80g")
    device = replace(cluster.group.device, memory_bytes=40 * 10**9)
    made_for = [gpt_plan().model_copy(update={"hardware": each})
                for each in (cluster, Cluster((replace(cluster.group, device=device),)))]
    (found,) = made_for[0].diff(made_for[1]).settings
    assert found.names == ("hardware.groups.0.device.memory_bytes",) and found.after == str(40 * 10**9)
    assert not gpt_plan().diff(made_for[0]), "plans of earlier releases have no hardware"


def test_graph_that_is_gone():
    found = gpt_plan(1).diff(gpt_plan(1).model_copy(update={"graphs": ()}))
    assert all(each.after == "absent" for each in found.operations) and found.operations


def test_modules_account_for_the_difference_in_time_and_memory():
    found = gpt_plan(2).diff(gpt_plan(4))
    (layers,) = found.modules
    assert (layers.name, layers.before_us, layers.after_us) == ("h.*", 2 * 43.0, 4 * 43.0)
    assert sum(each.after_us - each.before_us for each in found.modules) == sum(
        after - before for part, (before, after) in found.parts.items() if part != "optimizer")
    assert "h.*: 86.0 us -> 172 us" in str(found) and "compute: 88.0 us -> 154 us" in str(found)
    split = gpt_plan().diff(gpt_plan(column="R"))
    assert "dp: batch, tp: columns, rows" in str(split.modules[0])
