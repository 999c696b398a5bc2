"""Plans: contents, validation, sums and JSON."""
from __future__ import annotations

import json

import pytest
from pydantic import ValidationError

from hpml_compiler.plan_api.model_plan import Plan, PlanMismatch
from hpml_compiler.plans.schema import CollectiveTotal
from passes.errors import BadInput
from tests.helpers.plans import gpt_graph, gpt_plan, operation


def edited(plan: Plan, **changes) -> str:
    return json.dumps(json.loads(plan.to_json()) | changes)


def test_file_gives_back_the_plan(tmp_path):
    plan = gpt_plan()
    plan.save(tmp_path / "plan.json")
    again = Plan.load(tmp_path / "plan.json")
    assert again == plan
    assert list(again.mesh) == ["dp", "tp"]  # the order of axes has a meaning
    assert list(again.graphs[0].operations) == list(plan.graphs[0].operations)
    assert [each.name for each in tmp_path.iterdir()] == ["plan.json"]  # nothing partial is left


def test_save_into_missing_folder_is_bad_input(tmp_path):
    with pytest.raises(BadInput, match="cannot write the plan"):
        gpt_plan().save(tmp_path / "missing" / "plan.json")


def test_failed_save_keeps_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "plan.json"
    gpt_plan(2).save(path)

    def full_disk(self, target):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("pathlib.Path.replace", full_disk)
    with pytest.raises(BadInput, match="No space left"):
        gpt_plan(3).save(path)
    assert Plan.load(path) == gpt_plan(2)


@pytest.mark.parametrize(("text", "message"), [
    ("{", "not a plan"),
    ("[]", "format_version"),
    (edited(gpt_plan(1), format_version=1), "format_version 7, this one has 1"),
    (edited(gpt_plan(1), world_size=4), "does not multiply to world_size 4"),
    (edited(gpt_plan(1), world_size="8"), "world_size"),
    (edited(gpt_plan(1), surprise=1), "surprise"),
    (edited(gpt_plan(1), mesh={"tp": 4, "dp": 2}), "graph 'GPT' has the mesh"),
    (gpt_plan(1).to_json().replace('"predicted_us": 10.0', '"predicted_us": NaN'), "NaN is no JSON"),
    (gpt_plan(1).to_json().replace('"S(2)"', '"S(-1)"'), "pattern"),
    (gpt_plan(1).to_json().replace('"axis": "tp"', '"axis": "pp"'), r"name the axes \['pp'\]"),
])
def test_load_refuses(tmp_path, text, message):
    path = tmp_path / "plan.json"
    path.write_text(text)
    with pytest.raises(BadInput, match=message) as caught:
        Plan.load(path)
    assert str(path) in caught.value.where


def test_load_of_missing_file_names_it(tmp_path):
    with pytest.raises(BadInput, match="cannot read the plan"):
        Plan.load(tmp_path / "none.json")


def test_a_placement_for_each_axis_or_none():
    graph = gpt_graph(1)
    no_tensor = operation("aten.sym_size", "", 9, [[]], [[]], 0.0, [])
    assert graph.model_validate(graph.model_dump() | {"operations": {"size": no_tensor}})
    with pytest.raises(ValidationError, match="has 1 placements"):
        one_axis = operation("aten.mm", "", 9, [], [["R"]], 1.0, [])
        graph.model_validate(graph.model_dump() | {"operations": {"x": one_axis}})


def test_records_are_frozen():
    with pytest.raises(ValidationError, match="frozen"):
        gpt_plan().world_size = 4  # type: ignore[misc]


def test_options_hold_no_nan():
    with pytest.raises(ValidationError, match="finite"):
        Plan.model_validate(gpt_plan().model_dump() | {"options": {"gap": float("nan")}})


def test_folded_plan_sums_to_the_whole_one():
    whole, folded = gpt_plan(12), gpt_plan(12, listed=2)
    assert whole.collectives == folded.collectives == {"all_reduce": CollectiveTotal(24, 24 * 1024)}

    def compute_us(plan):
        graph = plan.graphs[0]
        return sum(each.predicted_us * graph.runs(each) for each in graph.operations.values())

    assert compute_us(whole) == compute_us(folded) == whole.predicted.compute_us


def test_local_steps_are_no_collectives():
    graph = gpt_graph(1)
    move = graph.redistributions[0]
    local = move.model_copy(update={"hops": (move.hops[0].model_copy(update={"collective": "slice", "bytes": 0}),)})
    assert graph.model_copy(update={"redistributions": (local,)}).collectives == {}


def test_evaluation_graphs_are_no_part_of_the_step():
    training = gpt_graph(2)
    evaluation = training.model_copy(update={"training": False, "name": "eval"})
    both = gpt_plan(2).model_copy(update={"graphs": (training, evaluation)})
    assert both.predicted == training.predicted
    assert both.memory == training.memory
    alone = both.model_copy(update={"graphs": (evaluation,)})
    assert alone.predicted == evaluation.predicted


def test_graph_breaks_add_up():
    two = gpt_plan(2).model_copy(update={"graphs": (gpt_graph(2), gpt_graph(3, name="rest"))})
    summary = two.summary_json()
    assert summary["step_time_s"] == pytest.approx((118 + 166) * 1e-6)
    assert summary["ilp"] == {"variables": 600, "binaries": 80, "constraints": 140}
    assert summary["seconds"]["trace"] == 2.0


def test_summary_is_json_with_what_scripts_read():
    summary = json.loads(json.dumps(gpt_plan().summary_json(), allow_nan=False))
    assert summary["step_time_s"] == pytest.approx(166e-6)
    assert summary["bound_s"] == pytest.approx(165.9e-6)
    assert (summary["gap"], summary["status"], summary["mesh"]) == (0.001, "optimal", {"dp": 2, "tp": 4})
    assert set(summary["memory_bytes"]) == {"parameters", "gradients", "optimizer", "activations", "peak", "copies"}
    assert summary["collectives"] == {"all_reduce": {"count": 6, "bytes": 6144}}
    assert set(summary["seconds"]) == {"trace", "annotate", "solve", "rewrite"}


def test_unknown_bound_is_null():
    graph = gpt_graph(1)
    solver = graph.solver.model_copy(update={"bound": None, "gap": None, "status": "feasible"})
    summary = gpt_plan(1).model_copy(update={"graphs": (graph.model_copy(update={"solver": solver}),)}).summary_json()
    assert (summary["bound_s"], summary["gap"], summary["status"]) == (None, None, "feasible")


def test_check_finds_the_graph():
    plan = gpt_plan()
    assert plan.check("GPT-3-hash", "2.13.1+cu126", 8) is plan.graphs[0]


@pytest.mark.parametrize(("arguments", "message"), [
    (("GPT-3-hash", "2.13.0", 4), "for 8 ranks .* this run has 4"),
    (("GPT-3-hash", "2.12.0", 8), "made with torch 2.13.0"),
    (("other", "2.13.0", 8), "another model or batch.*GPT"),
])
def test_check_refuses(arguments, message):
    with pytest.raises(PlanMismatch, match=message) as caught:
        gpt_plan().check(*arguments)
    assert caught.value.exit_code == 2 and caught.value.next_step


def test_what_was_compiled_again_counts_once():
    """Three graphs of two frames: a step runs the last graph of each, and every graph whose frame is not known."""
    graph = gpt_plan().graphs[0]
    graphs = tuple(graph.model_copy(update={"name": name, "frame": frame})
                   for name, frame in (("a", "0"), ("b", "1"), ("c", "0"), ("d", ""), ("e", "")))
    plan = gpt_plan().model_copy(update={"graphs": graphs})
    assert [g.name for g in plan.step_graphs] == ["b", "c", "d", "e"]
    assert plan.memory.peak == 4 * graph.memory.peak
