"""Placement graphs and a level of ZeRO before -> where parameters are stored, and how they are gathered, after."""
from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from passes.cost_model.cost_terms import SLICE
from passes.errors import BadInput
from passes.graph.decision import Decision
from passes.graph.layouts import as_layout, format_layout, stored_layout
from passes.graph.placement_graph import Value
from passes.hardware.axis import device_axes
from passes.op_rules.base import Spec
from passes.sharding.formulation.decision_decoder import pins
from passes.sharding.oracle.comm_attribution import CommAttribution
from passes.sharding.search.mesh_placement import MeshPlacement, solve_on_mesh
from passes.sharding.strategies.zero_levels import ZeroRules
from passes.simulation.rank_lanes import one_lane
from passes.solver.solvers import SolverOptions
from tests.passes.graphs import Builder, Prices, V, aten
from tests.passes.sharding.decision_step_graph import step_graph
from tests.passes.sharding.exhaustive import Game
from tests.passes.sharding.formulation.test_placement_problem import training_step
from tests.passes.sharding.random_graphs import graphs

HELD = ZeroRules(2, holds=True)
EXACT = SolverOptions(gap=0.0)


def placed(graph, axes, zero, prices=None, **options) -> MeshPlacement:
    answer = solve_on_mesh(graph, device_axes(axes), prices or Prices(us_per_flop=10.0), zero=zero, **options)
    assert isinstance(answer, MeshPlacement)
    return answer


def gathers(answer: MeshPlacement) -> list[tuple[int, bool]]:
    """Values that are gathered, and whether the runtime does that and holds what it made."""
    problem = answer.problem
    return [(leg.route.value, leg.held) for leg in CommAttribution(problem.graph, problem.groups, problem.saved,
                                                                   answer.decision).legs
            for k in range(leg.start, leg.stop)
            if any(isinstance(p, tuple) and q == "R" for p, q in zip(leg.route.layout(k), leg.route.layout(k + 1)))]


@pytest.mark.parametrize(("factors", "axes", "layouts"), [
    (((8,), (6,)), {"tp": 2}, ["R", "S(0)", "S(1)"]),
    (((3, 4, 8), (5,)), {"tp": 2}, ["R", "S(0.1)"]),  # fused query, key and value weights: by heads
    (((3, 4, 8), ()), {"tp": 4}, ["R", "S(0.1)"]),
    (((3, 4, 8), ()), {"tp": 3}, ["R", "S(0)"]),
    (((3, 4, 8), (6,)), {"dp": 2}, ["R", "S(1)"]),  # no work is split along dp: an outer factor does
    (((3, 4, 8),), {"dp": 2}, ["R", "S(0.1)"]),
    (((3, 4, 8),), {"a": 2, "tp": 2}, ["R,R", "R,S(0.1)", "S(0.1),R", "S(0.1),S(0.1)"]),
    (((3, 4, 8),), {"a": 3, "tp": 2}, ["R,R", "R,S(0.1)", "S(0),R"]),  # no dim along two of its factors
    (((3, 5, 7),), {"tp": 2}, ["R"]),
])
def test_an_inner_factor_is_split_where_the_outer_one_cannot_be(factors, axes, layouts):
    shape = tuple(math.prod(row) for row in factors)
    value = Value(0, "w", Spec(shape, "float32", 4), factors, None, 0, "parameter", True)
    assert sorted(map(format_layout, ZeroRules().storage(value, True, device_axes(axes)))) == layouts
    for layout in ZeroRules().storage(value, True, device_axes(axes)):
        assert as_layout(value, stored_layout(value, layout)) == layout


@pytest.mark.parametrize(("zero", "stored", "read", "gathered"), [
    (ZeroRules(0), "R", "R", []), (HELD, (0, 0), "R", [True]), (ZeroRules(3), (0, 0), (0, 0), [False, False])])
def test_a_level_says_where_a_parameter_of_data_parallelism_lies(zero, stored, read, gathered):
    """Read once in forward and once in backward."""
    b = Builder()
    x, w = b.input((8, 4)), b.input((4, 6), "parameter")
    y = b.call(aten.mm.default, V(x), V(w))
    b.backward = True
    tangent = b.input((8, 6), "tangent")
    g = b.call(aten.mm.default, V(b.call(aten.permute.default, V(x), [1, 0])), V(tangent))
    back = b.call(aten.mm.default, V(tangent), V(b.call(aten.permute.default, V(w), [1, 0])))
    answer = placed(b.finish([y, back, (g, w)]), {"dp": 2}, zero)
    decision: Decision = answer.decision
    assert (decision.stored(w), decision.inputs[w]) == ((stored,), (read,))
    assert [held for v, held in gathers(answer) if v == w] == gathered
    assert decision.outputs[-1].target == (stored,)
    share = 96 if stored == "R" else 48
    assert answer.cost.parameter_bytes == share + (96 if read != stored else 0)
    assert (answer.cost.gradient_bytes, answer.cost.optimizer_bytes) == (share, 2 * share)


def test_a_gradient_that_is_taken_in_parts_is_never_reduced_whole():
    graph, values = training_step()
    class Cheap(Prices):
        def collective(self, kind, axis, nbytes):
            return 1.0 if kind == "all_reduce" else 100.0

    for zero, hops in ((ZeroRules(), 2), (ZeroRules(3), 1)):
        answer = placed(graph, {"dp": 2}, zero, Cheap(), stored=None if zero.level else {"parameter_1": ((0, 0),)})
        (route,) = [r for r, (_, p) in zip(answer.decision.outputs, graph.outputs) if p == values["w"]]
        assert len(route.hops) == hops


def test_a_weight_is_cast_before_it_is_gathered_and_no_level_3_keeps_what_was_gathered():
    b = Builder()
    cast = torch.ops.prims.convert_element_type.default
    x, w, t = b.input((8, 4)), b.input((4, 6), "parameter"), b.input((8, 6), "tangent")
    half = b.call(cast, V(w), torch.bfloat16)
    y = b.call(aten.mm.default, V(b.call(cast, V(x), torch.bfloat16)), V(half))
    b.backward = True
    low = b.call(cast, V(t), torch.bfloat16)
    back = b.call(aten.mm.default, V(low), V(b.call(aten.permute.default, V(half), [1, 0])))
    graph = b.finish([y, back])
    answer = placed(graph, {"dp": 2}, ZeroRules(3))
    assert answer.decision.operations[0].outputs == (((0, 0),),)
    assert [v for v, _ in gathers(answer) if v in (w, half)] == [half, half]
    free = placed(graph, {"dp": 2}, ZeroRules(), stored={f"parameter_{w}": ((0, 0),)})
    assert [v for v, _ in gathers(free) if v in (w, half)] == [half], "what is kept whole is gathered once"


def test_tp_splits_as_before_and_other_axes_hold_all_that_they_can():
    for axes, stored in (({"dp": 2, "tp": 2}, ((0, 0), None)), ({"x": 2}, ((0, 0),)), ({"x": 2, "y": 2}, ((0, 0), (0, 0)))):
        for zero in (HELD, ZeroRules(3)):
            graph, values = training_step()
            layout = placed(graph, axes, zero).decision.stored(values["w"])
            assert all(isinstance(p, tuple) for p, q in zip(layout, stored) if q is not None)


def test_what_no_axis_divides_stays_whole():
    graph, values = training_step()
    assert placed(graph, {"dp": 5}, ZeroRules(3)).decision.stored(values["w"]) == ("R",)


def test_what_is_not_trained_is_whole_where_gathered_ones_are_held():
    graph, values = training_step()
    frozen = replace(graph, outputs=tuple(o for o in graph.outputs if o[1] is None))
    assert placed(frozen, {"dp": 2}, HELD).decision.inputs[values["w"]] == ("R",)
    assert placed(frozen, {"dp": 2}, ZeroRules(3)).decision.inputs[values["w"]] != ("R",)


def test_without_gradients_what_another_graph_stored_is_held_for_nothing():
    """An evaluation uses what training holds; how often it runs, nobody knows."""
    graph, values = training_step()
    forward = replace(graph, outputs=tuple(o for o in graph.outputs if o[1] is None))
    answer = placed(forward, {"dp": 2}, HELD, stored={"parameter_1": ((0, 0),)})
    assert answer.decision.held[values["w"]].target == answer.decision.inputs[values["w"]] == ("R",)
    assert gathers(answer) == [] and answer.cost.parameter_bytes == 48 + 96


def test_a_level_holds_for_what_was_stored_before_too():
    graph, values = training_step()
    assert placed(graph, {"dp": 2}, ZeroRules(0), stored={"parameter_1": ((0, 0),)}).decision.stored(values["w"]) == ((0, 0),)
    assert values["w"] in placed(graph, {"dp": 2}, HELD, stored={"parameter_1": ((0, 0),)}).decision.held


def test_a_budget_chooses_between_holding_and_gathering_again():
    graph, _ = training_step()
    b = Builder()
    x = b.input((8, 4))
    weights = [b.input((4, 4), "parameter") for _ in range(2)]
    y = b.call(aten.mm.default, V(b.call(aten.mm.default, V(x), V(weights[0]))), V(weights[1]))
    b.backward = True
    t = b.input((8, 4), "tangent")
    back = b.call(aten.mm.default, V(t), V(b.call(aten.permute.default, V(weights[1]), [1, 0])))
    outputs = []
    for w in weights:
        outputs.append((b.call(aten.mm.default, V(b.call(aten.permute.default, V(x), [1, 0])), V(back)), w))
    graph = b.finish([y, *outputs])
    free = ZeroRules(None, holds=True)
    whole, least = placed(graph, {"dp": 2}, free, options=EXACT), placed(graph, {"dp": 2}, ZeroRules(3), options=EXACT)
    assert whole.cost.held_bytes > least.cost.held_bytes and whole.cost.step < least.cost.step
    between = placed(graph, {"dp": 2}, free, budget_bytes=least.cost.held_bytes + 64, options=EXACT)
    assert list(between.decision.held) == [weights[1]], "it is gathered twice, else"
    assert whole.cost.step <= between.cost.step <= least.cost.step


def test_what_is_held_can_be_pinned_and_needs_to_be_allowed():
    graph, values = training_step()
    first = placed(graph, {"dp": 2}, HELD)
    taken = pins(first.problem, first.solution)
    again = placed(graph, {"dp": 2}, ZeroRules(None, holds=True), pinned=taken)
    assert again.decision == first.decision and again.cost == first.cost
    with pytest.raises(BadInput, match="parameter_1"):
        solve_on_mesh(graph, device_axes({"dp": 2}), Prices(), zero=ZeroRules(3), pinned=taken)


@settings(max_examples=40, deadline=None)
@given(graphs(most=5), st.sampled_from([(2,), (3,), (2, 2)]), st.sampled_from([0.001, 0.05, 1.0]),
       st.sampled_from([0.0, 2.0, 20.0]))
def test_nothing_is_cheaper_than_what_is_placed(graph, sizes, per_byte, latency):
    prices = Prices(latency=(latency, 3 * latency), us_per_byte=(per_byte, 3 * per_byte))
    axes = dict(zip("xy", sizes))
    found = placed(graph, axes, ZeroRules(None, holds=True), prices, options=EXACT)
    best = Game(graph, sizes, prices, found.problem.groups, holds=True).optimum()
    slack = 2 * len(sizes) * len(found.problem.problem.edges) * SLICE
    assert best * (1 - 1e-9) - 1e-9 <= found.cost.step <= best * (1 + 1e-6) + slack


@settings(max_examples=60, deadline=None)
@given(graphs(most=6), st.sampled_from([{"dp": 2}, {"tp": 2}, {"dp": 2, "tp": 2}, {"x": 2, "y": 3}]),
       st.sampled_from([ZeroRules(0), HELD, ZeroRules(3)]))
def test_every_level_leaves_an_answer_that_takes_what_it_costs(graph, axes, zero):
    answer = placed(graph, axes, zero)
    problem = answer.problem
    step = step_graph(graph, problem.groups, problem.saved, answer.decision, answer.cost, Prices(us_per_flop=10.0))
    assert one_lane([step], overlap=False).run().end_us == pytest.approx(answer.cost.step)
