"""Placement graphs before -> problems whose optimum is the best of all placements, and decisions, after."""
from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from passes.cost_model.cost_terms import SLICE
from passes.errors import BadInput
from passes.graph.decision import Hop
from passes.graph.step_phase import BACKWARD, FORWARD
from passes.sharding.formulation.decision_decoder import decode, pins
from passes.sharding.formulation.placement_problem import PlacementProblem
from passes.sharding.grouping.op_groups import groups_of
from passes.sharding.oracle.comm_attribution import CommAttribution
from passes.sharding.pricing.decision_terms import collective
from passes.sharding.pricing.training_state import TrainingStateModel
from passes.solver.ilp_search import solve
from passes.solver.solvers import SolverOptions
from tests.helpers.axes import axes_of
from tests.passes.graphs import Builder, Prices, V, aten
from tests.passes.sharding.exhaustive import Game
from tests.passes.sharding.random_graphs import graphs

EXACT = SolverOptions(gap=0.0)


def problem(graph, sizes=(2,), prices=None, pinned=None, **options) -> PlacementProblem:
    built = PlacementProblem(graph, axes_of(*sizes), prices or Prices(), **options)
    built.pin(pinned or {})
    return built


def compare(graph, sizes, prices, merge):
    """The solver's optimum and that of trying everything are equal, but for slices: a choice that reads parts stands
    in for one that reads the whole, and `SLICE` is not added for that."""
    built = problem(graph, sizes, prices, merge=merge, fold=False)
    found = solve(built.problem, EXACT).cost
    best = Game(graph, sizes, prices, groups_of(graph, merge)).optimum()
    slack = 2 * len(sizes) * len(built.problem.edges) * SLICE
    assert best * (1 - 1e-9) - 1e-9 <= found <= best * (1 + 1e-6) + slack


PER_BYTE, LATENCY = st.sampled_from([0.001, 0.05, 1.0]), st.sampled_from([0.0, 2.0, 20.0])


@settings(max_examples=200, deadline=None)
@given(graphs(most=6), st.sampled_from([2, 3]), st.booleans(), PER_BYTE, LATENCY)
def test_one_axis_agrees_with_brute_force(graph, size, merge, per_byte, latency):
    compare(graph, (size,), Prices(latency=(latency,), us_per_byte=(per_byte,)), merge)


@settings(max_examples=40, deadline=None)
@given(graphs(most=4), st.sampled_from([(2, 2), (2, 3)]), st.booleans(), PER_BYTE, LATENCY)
def test_two_axes_agree_with_brute_force(graph, sizes, merge, per_byte, latency):
    compare(graph, sizes, Prices(latency=(latency, 3 * latency), us_per_byte=(per_byte, 3 * per_byte)), merge)


@settings(max_examples=100, deadline=None)
@given(graphs(most=6), PER_BYTE, LATENCY)
def test_grouping_never_beats_single_operations(graph, per_byte, latency):
    """With pointwise kernels for nothing, so that fusing them saves nothing."""
    prices = Prices(latency=(latency,), us_per_byte=(per_byte,), light=False)
    merged, single = (solve(problem(graph, prices=prices, merge=m, fold=False).problem, EXACT) for m in (True, False))
    assert merged.cost >= single.cost * (1 - 1e-9) - SLICE * len(graph.operations)


def test_grouping_loses_nothing_where_one_split_suits_all_it_joins():
    b = Builder()
    x = b.input((8, 4))
    for _ in range(2):
        w = b.call(aten.permute.default, V(b.input((4, 4), "parameter")), [1, 0])
        x = b.call(aten.mm.default, V(x), V(w))
        x = b.call(aten.tanh.default, V(b.call(aten.exp.default, V(x))))
    graph = b.finish([x])
    prices = Prices(us_per_flop=1.0, light=False)
    merged, single = (solve(problem(graph, prices=prices, merge=m, fold=False).problem, EXACT) for m in (True, False))
    assert merged.cost == pytest.approx(single.cost, rel=1e-12)


# --- the parts of a problem -------------------------------------------------------------------------------------------


def training_step():
    """y = x @ w; loss = sum(exp(y)); the gradient of w. Backward reads x and exp(y)."""
    b = Builder()
    x, w = b.input((8, 4)), b.input((4, 6), "parameter")
    y = b.call(aten.mm.default, V(x), V(w))
    e = b.call(aten.exp.default, V(y))
    loss = b.call(aten.sum.dim_IntList, V(e), [0, 1])
    b.backward = True
    tangent = b.input((8, 6), "tangent")
    d = b.call(aten.mul.Tensor, V(e), V(tangent))
    t = b.call(aten.permute.default, V(x), [1, 0])
    g = b.call(aten.mm.default, V(t), V(d))
    return b.finish([loss, (g, w)]), {"x": x, "w": w, "y": y, "e": e, "loss": loss, "d": d, "g": g}


def test_entities_of_a_training_step():
    graph, _ = training_step()
    built = problem(graph)
    kinds = sorted((e.kind, e.name.split("#")[0]) for e in built.problem.entities)
    assert kinds == [
        ("input", "batch_0"), ("input", "tangent_5"),
        ("kept", "kept:value_3"),
        ("operations", "op_0"), ("operations", "op_1"), ("operations", "op_3"), ("operations", "op_5"),
        ("output", "output:value_4"), ("parameter", "parameter_1"),
    ]
    (w,) = [e for e in built.problem.entities if e.kind == "parameter"]
    assert [c.outputs for c in w.choices] == [("R",), ("S(0)",), ("S(1)",)] == [c.inputs for c in w.choices]
    # parameter, gradient and two states; the optimizer's time by elements
    assert [c.held_bytes for c in w.choices] == [(4 * 96,), (4 * 48,), (4 * 48,)]
    assert [c.cost for c in w.choices] == pytest.approx([24 * 0.02, 12 * 0.02, 12 * 0.02])
    assert len({e.name for e in built.problem.entities}) == len(built.problem.entities)


def test_a_pinned_copy_whose_ends_do_not_offer_its_layout_stays_free():
    graph, _ = training_step()
    pinned, whole = {"kept:value_3": (("S(0)",), ("S(0)",))}, [lambda op, strategy: not strategy.splits]
    (free,) = [e for e in problem(graph, rules=whole).problem.entities if e.kind == "kept"]
    assert ("S(0)",) not in [c.outputs for c in free.choices]

    found = [e for e in problem(graph, pinned=pinned, rules=whole).problem.entities if e.kind == "kept"]

    assert found == [free]
    with pytest.raises(BadInput, match="which it cannot"):
        problem(graph, (3,), pinned=pinned, rules=whole)  # 3 does not divide 8 rows


def test_the_state_model_and_frozen_parameters():
    graph, values = training_step()
    (w,) = [e for e in problem(graph, state=TrainingStateModel(0.5, 0.0)).problem.entities if e.kind == "parameter"]
    assert [c.held_bytes for c in w.choices] == [(1.5 * 96,), (1.5 * 48,), (1.5 * 48,)]
    graph = replace(graph, outputs=tuple(o for o in graph.outputs if o[1] is None))
    (w,) = [e for e in problem(graph).problem.entities if e.kind == "parameter"]
    assert [(c.cost, c.held_bytes) for c in w.choices] == [(0, (96,)), (0, (48,)), (0, (48,))]
    assert w.choices[0].inputs == ()


def test_a_value_that_backward_reads_is_held_once_in_the_layout_of_its_copy():
    # exp is recomputed in backward, from what the product made
    graph, values = training_step()
    built = problem(graph)
    assert built.saved == {values["y"]}
    (kept,) = [e for e in built.problem.entities if e.kind == "kept"]
    assert {c.held_bytes for c in kept.choices} == {(0.0,)}  # of exp(y): not saved
    (product,) = [e for e in built.problem.entities if e.name == "op_0"]
    held = {c.outputs[0]: c.held_bytes[0] for c in product.choices}
    assert held["R"] == 192 and held["S(0)"] == held["S(1)"] == 96


def test_equal_operations_may_be_allowed_different_things():
    b = Builder()
    x, w = b.input((8, 4)), b.input((4, 6), "buffer")
    graph = b.finish([b.call(aten.mm.default, V(x), V(w)) for _ in range(2)])
    for fold in (True, False):
        built = PlacementProblem(graph, axes_of(2), Prices(), rules=[lambda op, s: op.index == 1 or not s.splits], fold=fold)
        first, second = [e for e in built.problem.entities if e.kind == "operations"]
        assert len(first.choices) == 1 < len(second.choices)


def test_stored_parameters_and_rows_have_one_choice():
    graph, _ = training_step()
    built = problem(graph, stored={"parameter_1": ((1, 0),)}, rows=frozenset({"batch_0"}))
    by_name = {e.name: e for e in built.problem.entities}
    assert [c.outputs for c in by_name["parameter_1"].choices] == [("S(1)",)]
    assert [c.outputs for c in by_name["batch_0"].choices] == [("S(0)",)]
    assert [c.outputs for c in by_name["tangent_5"].choices] == [("R",)]


def test_rows_that_forward_gathers_are_there_in_backward():
    """x @ w with the columns of w split needs all rows of x, and so does the gradient of w."""
    graph, values = training_step()
    built = problem(graph, prices=Prices(us_per_flop=100.0), rows=frozenset({"batch_0"}), stored={"parameter_1": ((1, 0),)},
                    pinned={"op_0": (("R", "S(1)"), ("S(1)",))})
    solution = solve(built.problem, EXACT)
    decision = decode(built, solution)
    routes = {r for (_, _), r in decision.routes.items() if r.value == values["x"]}
    assert {r.hops[0] for r in routes if r.hops} == {Hop(("R",), FORWARD)}
    found = CommAttribution(graph, built.groups, built.saved, decision)
    (leg,) = [leg for leg in found.legs if leg.route.value == values["x"]]
    assert leg.route.target == found.saved[values["x"]] == ("R",)
    assert built.problem.held_bytes(solution.chosen)[0] >= 8 * 4 * 4, "the copy takes memory"


@pytest.mark.parametrize("prices", [Prices(), Prices(us_per_flop=10.0), Prices(latency=(1e4, 1e4))])
@pytest.mark.parametrize("sizes", [(2,), (2, 2)])
def test_the_decision_is_consistent(prices, sizes):
    graph, values = training_step()
    built = problem(graph, sizes, prices)
    solution = solve(built.problem, EXACT)
    decision = decode(built, solution)
    assert set(decision.operations) == set(range(len(graph.operations)))
    assert set(decision.inputs) == {v.index for v in graph.values if v.producer is None}
    made = dict(decision.inputs)
    for op in graph.operations:
        rows = decision.operations[op.index]
        made.update(zip(op.outputs, rows.outputs))
    for op in graph.operations:
        for position, v in enumerate(op.inputs):
            route = decision.routes[op.index, position]
            assert route.value == v and route.source == made[v]
            assert route.target == decision.operations[op.index].inputs[position]
            assert op.phase == BACKWARD or all(hop.phase == FORWARD for hop in route.hops), "forward cannot wait for backward"
            _check_steps(route)
    for (v, parameter), route in zip(graph.outputs, decision.outputs):
        assert route.source == made[v]
        assert route.target == (("R",) * len(sizes) if parameter is None else decision.inputs[parameter])
        _check_steps(route)


def _check_steps(route):
    layout = route.source
    for hop in route.hops:
        (axis,) = [a for a, (p, q) in enumerate(zip(layout, hop.layout)) if p != q]
        assert collective(layout[axis], hop.layout[axis]) is not None
        layout = hop.layout


def test_what_was_chosen_can_be_pinned_and_gives_the_same_again():
    graph, _ = training_step()
    first = problem(graph, (2, 2), Prices(us_per_flop=10.0))
    solution = solve(first.problem, EXACT)
    again = problem(graph, (2, 2), Prices(us_per_flop=10.0), pinned=pins(first, solution))
    assert all(len(e.choices) == 1 for e in again.problem.entities)
    same = solve(again.problem, EXACT)
    assert same.cost == pytest.approx(solution.cost, rel=1e-12)
    assert decode(again, same) == decode(first, solution)


def test_a_pin_narrows_one_choice_and_leaves_the_others():
    graph, _ = training_step()
    built = problem(graph, pinned={"parameter_1": (("S(1)",), ("S(1)",))})
    by_name = {e.name: e for e in built.problem.entities}
    assert len(by_name["parameter_1"].choices) == 1 < len(by_name["op_0"].choices)
    assert decode(built, solve(built.problem, EXACT)).inputs[1] == ((1, 0),)


def test_a_pin_that_cannot_be_met_is_bad_input():
    graph, _ = training_step()
    with pytest.raises(BadInput, match="parameter_1.*S\\(7\\)"):
        problem(graph, pinned={"parameter_1": (("S(7)",), ("S(7)",))})


def test_a_pin_is_refused_where_there_is_one_choice_alone():
    b = Builder()
    graph = b.finish([b.call(aten.exp.default, V(b.input((3, 5))))])  # no dim in two parts
    whole = problem(graph, pinned={"op_0": (("R",), ("R",))})
    assert [len(e.choices) for e in whole.problem.entities if e.name == "op_0"] == [1]
    with pytest.raises(BadInput, match="the plan wants op_0"):
        problem(graph, pinned={"op_0": (("S(0)",), ("S(0)",))})
