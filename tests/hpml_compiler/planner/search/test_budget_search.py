"""Plans that a table offers -> the one that is taken."""
from __future__ import annotations

from dataclasses import replace

import pytest

from hpml_compiler.planner.search.budget_search import first_within_budget, search_within_budget
from hpml_compiler.plans.plan_result import PlanResult
from hpml_compiler.plans.schema import MeshAttempt
from passes.checkpointing.checkpoint_keys import CheckpointDecision
from passes.checkpointing.layers.layer_boundary import LayersDiffer
from passes.errors import Infeasible
from passes.graph.decision import Decision
from passes.json_records import FrozenMap
from passes.solver.work_limit import WorkLimit
from tests.helpers.plans import gpt_graph


class Table:
    """Plans by name: step µs, what running again takes, state bytes, bytes above them, and the bytes that their placements are
    counted with if no saved value counts, and if all do."""

    def __init__(self, **plans):
        self.plans, self.asked, self.tried = plans, [], []

    def plan(self, lifetimes, nbytes, seconds):
        self.asked.append((lifetimes.saved_share, nbytes))
        share = lifetimes.saved_share
        found = [(name, row) for name, row in self.plans.items()
                 if (1 - share) * row["counted"][0] + share * row["counted"][1] <= nbytes]
        if not found:
            raise Infeasible("no assignment fits", "here", "more")
        name, row = min(found, key=lambda each: each[1]["us"])
        made = gpt_graph()
        record = made.model_copy(update={
            "name": name, "predicted": made.predicted.model_copy(update={"step_time_us": row["us"]}),
            "memory": made.memory.model_copy(update={"parameters": row["state"], "optimizer": 0}),
            "solver": made.solver.model_copy(update={"cost": row["us"], "bound": row["us"], "gap": 0.0})})
        others = tuple(MeshAttempt(mesh={}, cost=None, bound=bound, reason="") for bound in row.get("other_bounds", ()))
        return PlanResult({name: 2}, Decision((), FrozenMap(), FrozenMap(), FrozenMap(), ()), record, others)

    def try_out(self, planned):
        self.tried.append(planned.record.name)
        row = self.plans[planned.record.name]
        if row.get("not_alike"):
            raise LayersDiffer
        kept = CheckpointDecision(frozenset(), 1, row["again_us"], 0, row["above"], 0, self.left - row["state"], 0.0,
                                  after_bytes=row.get("stepping", 0))
        return replace(planned, checkpointing=kept)

    def answer(self, budget, others=0.0):
        return self.planned(budget, others).record.name

    def planned(self, budget, others=0.0):
        self.left = budget - others
        return search_within_budget(self.plan, self.try_out, budget, WorkLimit(10.0), others, wanted_gap=0.01,
                                    remedies=['offload="saved"'])


WHOLE = {"us": 100.0, "again_us": 30.0, "state": 40, "above": 50, "counted": (40, 120)}
SPLIT = {"us": 110.0, "again_us": 0.0, "state": 20, "above": 60, "counted": (20, 80)}


def test_the_fastest_plan_is_taken_at_once_if_nothing_runs_again_for_it():
    table = Table(whole={**WHOLE, "again_us": 0.0}, split=SPLIT)
    assert table.answer(100) == "whole" and table.tried == ["whole"]


def test_running_again_is_weighed_against_other_placements():
    assert Table(whole=WHOLE, split=SPLIT).answer(100) == "split", "130 µs against 110"
    assert Table(whole={**WHOLE, "again_us": 5.0}, split=SPLIT).answer(100) == "whole"


def test_what_a_trial_holds_too_much_is_taken_off_for_the_next():
    heavy = {**WHOLE, "above": 70, "counted": (40, 95)}
    table = Table(heavy=heavy, split=SPLIT)
    assert table.answer(100) == "split"
    assert table.asked == [(0.0, 100), (1.0, 100), (1.0, 90)] and table.tried == ["heavy", "split"]


def test_what_other_graphs_keep_is_taken_off():
    assert Table(whole={**WHOLE, "again_us": 0.0}, split=SPLIT).answer(100, others=15.0) == "split"


class Refusing(Table):
    """That says how many bytes it takes."""

    def plan(self, lifetimes, nbytes, seconds):
        try:
            return super().plan(lifetimes, nbytes, seconds)
        except Infeasible as refusal:
            refusal.smallest_budget_bytes = min(row["counted"][lifetimes.saved_share > 0] for row in self.plans.values())
            raise


def test_the_last_thing_tried_is_as_little_state_as_can_be():
    least = {"us": 150.0, "again_us": 90.0, "state": 15, "above": 30, "counted": (15, 80)}
    heavy = {**WHOLE, "above": 99, "counted": (15.5, 120)}
    table = Refusing(heavy=heavy, least=least)
    assert table.answer(46) == "least" and table.asked[-1] == (0.0, 15)


def test_a_budget_that_no_trial_meets_is_refused_with_the_least():
    with pytest.raises(Infeasible, match="needs at least 80 B") as caught:
        Table(whole=WHOLE, split=SPLIT).answer(79)
    assert caught.value.smallest_budget_bytes == 80 and 'offload="saved"' in caught.value.next_step
    assert "at the peak: parameters and optimizer state 20 B" in caught.value.what


def test_placements_that_count_no_bytes_are_not_found_again_and_again():
    table = Table(whole={**WHOLE, "state": 0, "counted": (0, 0)})
    with pytest.raises(Infeasible, match="needs at least 50 B"):
        table.answer(40)
    assert table.tried == ["whole"] and len(table.asked) < 15


def row(us, again_us, state, above, counted):
    return {"us": us, "again_us": again_us, "state": state, "above": above, "counted": (state, counted)}


@pytest.mark.parametrize(("budget", "plans"), [
    (50, {"a": row(59.0, 5.0, 60, 45, 141), "b": row(196.0, 0.0, 44, 31, 102), "c": row(97.0, 0.0, 50, 17, 136)}),
    (40, {"a": row(174.0, 30.0, 38, 34, 119), "b": row(174.0, 5.0, 27, 59, 67), "c": row(200.0, 0.0, 58, 70, 78),
          "d": row(105.0, 0.0, 51, 60, 99)}),
])
def test_as_many_bytes_as_an_error_names_are_enough(budget, plans):
    """Where a search comes by depends on its bytes: with as many as were named, it may go elsewhere."""
    with pytest.raises(Infeasible) as caught:
        Refusing(**plans).answer(budget)
    assert Refusing(**plans).answer(caught.value.smallest_budget_bytes)


def test_an_optimizers_step_that_does_not_fit_is_named():
    with pytest.raises(Infeasible, match="needs at least 95 B, during the optimizer step") as caught:
        Table(split={**SPLIT, "stepping": 75}).answer(90)
    assert "foreach=False" in caught.value.next_step


def test_a_budget_that_no_placements_meet_is_refused_as_they_are():
    with pytest.raises(Infeasible, match="no assignment fits"):
        Table(whole=WHOLE, split=SPLIT).answer(10)


def test_placements_by_which_layers_do_not_run_alike_are_passed_over():
    table = Table(whole={**WHOLE, "not_alike": True}, split=SPLIT)
    assert table.answer(100) == "split"
    with pytest.raises(LayersDiffer):
        Table(whole={**WHOLE, "not_alike": True}).answer(100)


def test_the_bound_is_that_of_placements_with_nothing_saved_whatever_is_taken():
    solver = Table(whole=WHOLE, split=SPLIT).planned(100).record.solver
    assert (solver.cost, solver.bound) == (110.0, 100.0), "split is taken, whole is what nothing can be faster than"
    assert solver.gap == pytest.approx(10 / 110) and solver.status == "feasible"


def test_running_again_is_part_of_the_cost_and_a_small_gap_is_optimal():
    solver = Table(whole={**WHOLE, "again_us": 0.5}, split=SPLIT).planned(100).record.solver
    assert (solver.cost, solver.bound, solver.status) == (100.5, 100.0, "optimal") and 0 < solver.gap < 0.01


def test_a_mesh_that_was_given_up_may_lower_the_bound():
    solver = Table(whole={**WHOLE, "other_bounds": (95.0, None)}, split=SPLIT).planned(100).record.solver
    assert solver.bound == 95.0, "None: nothing fits on that mesh"


@pytest.mark.parametrize(("limit_s", "tried"), [(10.0, ["heavy", "split"]), (2.0, ["heavy"])])
def test_one_of_many_candidates_keeps_to_its_part_of_the_time_limit(limit_s, tried):
    class Slow(Table):
        def try_out(self, planned):
            allowance.take(3.0)
            return super().try_out(planned)

    table = Slow(heavy={**WHOLE, "above": 70, "counted": (50, 95)}, split={**SPLIT, "counted": (20, 60)})
    table.left, allowance = 100, WorkLimit(limit_s)
    if len(tried) == 1:
        with pytest.raises(Infeasible, match="needs at least 110 B"):
            first_within_budget(table.plan, table.try_out, 100, allowance)
    else:
        assert first_within_budget(table.plan, table.try_out, 100, allowance).record.name == tried[-1]
    assert table.tried == tried and allowance.was_over == (len(tried) == 1)
